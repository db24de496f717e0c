"""Magnitude by draft depth: published growth by target and by drafter, and ours.

Reads published_magnitude.csv (table 1 of arXiv 2605.09992), published.csv (table 2) and demo_curves.csv. Published scales
differ by the target's residual stream, so published lines are divided by their value at depth 1; ours are the RMS as it is.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from driftlab.errors import DriftlabError
from driftlab.plotting import COLORS, MARKERS
from paper_figs import style

TABLES = ("published_magnitude", "published", "demo_curves")


def growth(frame: pd.DataFrame, by: str) -> pd.DataFrame:
    """Return the frame with ``growth``: RMS divided by its value at depth 1, of each ``by``."""
    first = frame[frame["depth"] == 1].set_index(by)["rms"]
    return frame.assign(growth=frame["rms"] / frame[by].map(first))


def by_drafter(published: pd.DataFrame) -> pd.DataFrame:
    """Return table 2's magnitudes: drafter, depth, rms."""
    rows = published[(published["claim"] == "magnitude") & published["source"].str.contains("Table .*2: Llama")]
    return rows.rename(columns={"value": "rms"})[["drafter", "depth", "rms"]]


def draw(data: Path = style.DATA) -> Figure:
    """Draw two published panels, and ours below."""
    targets, published, ours = (style.read(data, name) for name in TABLES)
    rows = ours.frame[ours.frame["quantity"] == "rms_feedback"]
    if rows.empty:
        raise DriftlabError("demo_curves has no rms_feedback: probe the drafters (driftlab demo or driftlab probe)")
    figure = style.figure(4.5)
    axes = figure.subplot_mosaic([["targets", "drafters"], ["ours", "ours"]], height_ratios=(1, 1.15))
    for place, (target, some) in enumerate(growth(targets.frame, "target").groupby("target", sort=False)):
        axes["targets"].plot(
            some["depth"], some["growth"], marker=MARKERS[place], color=COLORS[(2, 4, 9)[place % 3]], label=target
        )
    table2 = growth(by_drafter(published.frame), "drafter")
    looks = style.looks(table2["drafter"])
    for drafter, some in table2.groupby("drafter", sort=False):
        axes["drafters"].plot(some["depth"], some["growth"], label=drafter, **{**looks[drafter], "linestyle": ":"})
    looks = style.looks(rows["drafter"])
    for drafter, some in rows.groupby("drafter", sort=False):
        style.line(axes["ours"], some, style.short(drafter), **looks[drafter])
    for name, title in (("targets", "published, EAGLE 3"), ("drafters", "published, Llama 8B")):
        axes[name].set(xlabel="draft depth", xticks=[1, 2, 3, 8], ylim=(0.5, 7.5))
        style.title(axes[name], title)
        axes[name].legend(loc="upper left", fontsize=5.8, handlelength=1.6, borderaxespad=0.1, labelspacing=0.25)
    axes["targets"].set_ylabel("RMS / RMS at depth 1")
    _log(axes["ours"])
    axes["ours"].set_ylabel("RMS of the feedback")
    style.depth_axis(axes["ours"], rows["depth"])
    style.title(axes["ours"], "ours")
    style.above(axes["ours"])
    style.note(
        figure, "Published: MT-Bench, no interval stated; the right panel has depths 1 and 8 only",
        f"Ours: {ours.words}", style.told(rows),
        f"starts: {style.span(rows['n'])}",
    )  # fmt: skip
    return figure


def _log(ax: Axes) -> None:
    ax.set_yscale("log", nonpositive="mask")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter("")
