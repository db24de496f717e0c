"""Noise on one input path: accepted drafts a round that are left, published and ours.

Reads published.csv (table 3 of arXiv 2605.09992) and noise.csv. The noise is Gaussian, alpha times the RMS of its path.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from driftlab.plotting import GREY
from paper_figs import style

TABLES = ("published", "noise")
PATHS = {"hidden": "noise on the hidden state", "embedding": "noise on the embedding"}


def draw(data: Path = style.DATA) -> Figure:
    """Draw a line of panels a path: published left, ours right."""
    published, ours = (style.read(data, name) for name in TABLES)
    theirs = published.frame[published.frame["claim"] == "noise"]
    told = theirs["setting"].str.split(":", expand=True)
    theirs = theirs.assign(path=told[1], alpha=told[2].astype(float))
    mine = ours.frame.rename(columns={"percent": "kept"})
    figure = style.figure(3.7)
    axes = figure.subplots(2, 2, sharex=True, sharey=True)
    looks = style.looks([*theirs["drafter"], *mine["drafter"]])
    for (left, right), (path, words) in zip(axes, PATHS.items(), strict=True):
        for drafter, rows in theirs[theirs["path"] == path].groupby("drafter", sort=False):
            style.line(left, rows, drafter, x="alpha", **looks[drafter])
        for drafter, rows in mine[mine["path"] == path].groupby("drafter", sort=False):
            rows = rows.assign(low=rows["percent_low"], high=rows["percent_high"])
            style.line(right, rows, style.short(drafter), x="alpha", y="kept", **looks[drafter])
        style.title(left, f"{words}: published")
        style.title(right, "")
        right.set_title("ours", loc="right")
        left.set_ylabel("accepted drafts, %")
        for ax in (left, right):
            ax.axhline(100, color=GREY, linewidth=0.6, zorder=1)
    for ax in axes[1]:
        ax.set_xscale("log")
        alphas = sorted(mine["alpha"].unique())
        ax.set_xticks(alphas, [f"{alpha:g}" for alpha in alphas])
        ax.minorticks_off()
        ax.set_xlabel("alpha")
    style.legend(figure, [axes[0, 1]], columns=3)
    style.note(
        figure, "100: without noise. Published: Llama 3.1 8B, no interval stated",
        f"Ours: {ours.words}", f"rounds: {style.span(mine['rounds'])}",
    )  # fmt: skip
    return figure
