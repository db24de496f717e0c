"""Accuracy far beyond the trained depth: published conditional acceptance, and our text-fed match.

Reads published.csv and demo_curves.csv. The two are not the same quantity: conditional acceptance looks only at chains that
were accepted so far, the match at every start. Vertical lines mark the depth that training unrolled to.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from driftlab.errors import DriftlabError
from driftlab.plotting import COLORS, GREY, HUES, MARKERS
from paper_figs import style

TABLES = ("published", "demo_curves")
PUBLISHED = {
    "eagle3 TTT 8": (HUES[0], "o"),
    "eagle3 TTT 2": (COLORS[1], "s"),
    "norm_output TTT 2": (HUES[1], "^"),
}


def draw(data: Path = style.DATA) -> Figure:
    """Draw published points, then a panel of ours for each trained depth."""
    published, ours = (style.read(data, name) for name in TABLES)
    match = ours.frame[ours.frame["quantity"] == "match"]
    if match.empty:
        raise DriftlabError("demo_curves has no match by depth: simulate or probe the drafters")
    depths = sorted(match["ttt"].unique(), reverse=True)
    figure = style.figure(1.4 + 1.35 * (1 + len(depths)))
    top, *others = figure.subplots(1 + len(depths), 1)
    theirs = published.frame[published.frame["claim"] == "depth"]
    for place, (drafter, rows) in enumerate(theirs.groupby("drafter", sort=False)):
        color, marker = PUBLISHED.get(drafter, (COLORS[place], MARKERS[place]))
        top.plot(rows["depth"], rows["value"], color=color, marker=marker, linestyle=":", label=drafter)
    top.set(ylim=(-0.05, 1), ylabel="conditional acc.")
    style.title(top, "published, depths 1 and 16 only")
    top.legend(loc="lower left", bbox_to_anchor=(0.0, 0.0), fontsize=6)
    looks, highest = style.looks(match["drafter"]), 1.08 * match[["value", "high"]].max(axis=None)
    for ax, ttt in zip(others, depths, strict=True):
        for drafter, rows in match[match["ttt"] == ttt].groupby("drafter", sort=False):
            style.line(ax, rows, style.short(drafter), **looks[drafter])
        if 0 < ttt <= match["depth"].max():
            ax.axvline(ttt, color=GREY, linestyle="--", linewidth=0.8, zorder=1, label=f"_trained {ttt}")
        ax.set(ylim=(0, highest), ylabel="match")
        style.title(ax, f"ours, TTT {ttt}" if ttt else "ours")
        style.above(ax)
    for ax in (top, *others):
        style.depth_axis(ax, match["depth"], "")
    others[-1].set_xlabel("draft depth")
    style.note(
        figure, "Published: arXiv 2605.09992, read at second hand, no interval; another quantity than ours",
        f"Ours: match over all starts, {style.told(match)}; {ours.words}", f"starts: {style.span(match['n'])}",
        "dashed: the trained depth (TTT)",
    )  # fmt: skip
    return figure
