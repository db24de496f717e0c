"""Measures of drift by depth with intervals: growth, distance from depth 1 beside its null, loss of the sink, latest keys.

Reads lab_depth.csv. Dotted lines are the null of the distance: two depth-1 rows at the same distance in the text.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from driftlab.plotting import GREY
from paper_figs import style

TABLES = ("lab_depth",)
PANELS = {
    "growth": ("growth of the feedback", 1.0),
    "drift_tv": ("distance from depth 1", 0.0),
    "sink_loss": ("loss of the sink", 0.0),
    "recent_gain": ("gain of latest keys", 0.0),
}


def draw(data: Path = style.DATA) -> Figure:
    """Draw a panel a measure and a line a drafter."""
    table = style.read(data, "lab_depth")
    frame = table.frame[table.frame["quantity"].isin([*PANELS, "drift_tv_null"])]
    figure = style.figure(3.9)
    axes = figure.subplots(2, 2, sharex=True)
    looks = style.looks(frame["drafter"])
    for ax, (quantity, (label, nothing)) in zip(axes.flat, PANELS.items(), strict=True):
        for drafter, rows in frame[frame["quantity"] == quantity].groupby("drafter", sort=False):
            style.line(ax, rows, style.short(drafter), **looks[drafter])
        if quantity == "drift_tv":
            for drafter, rows in frame[frame["quantity"] == "drift_tv_null"].groupby("drafter", sort=False):
                ax.plot(rows["depth"], rows["value"], color=looks[drafter]["color"], linestyle=":", linewidth=0.8,
                        label=f"_null {style.short(drafter)}")  # fmt: skip
        ax.axhline(nothing, color=GREY, linewidth=0.6, zorder=1)
        style.title(ax, label)
    for ax in axes[-1]:
        style.depth_axis(ax, frame["depth"])
    style.legend(figure, [axes[0, 0]], columns=3)
    style.note(figure, table.words, f"starts: {style.span(frame['n'])}", "dotted: null of the distance")
    return figure
