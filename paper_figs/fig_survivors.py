"""Conditional acceptance against the match of all starts, and the terms that part them.

Reads survivors.csv. conditional (walk) = ability + survivor selection + start selection + residual at every depth.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from driftlab.plotting import COLORS, FEW, GREY
from paper_figs import style

TABLES = ("survivors",)
LABELS = {
    "conditional_walk": ("conditional acceptance, walk", COLORS[0], "o"),
    "ability": ("match, all starts", COLORS[1], "s"),
    "survivor_selection": ("survivor selection", COLORS[2], "^"),
    "start_selection": ("start selection", COLORS[4], "D"),
    "residual": ("residual", COLORS[7], "v"),
}


def draw(data: Path = style.DATA) -> Figure:
    """Draw a panel a drafter; depths with fewer than ``FEW`` judged drafts are left out."""
    table = style.read(data, "survivors")
    frame, drafters = table.frame[table.frame["n"] >= FEW], list(dict.fromkeys(table.frame["drafter"]))
    figure = style.figure(1.2 + 1.75 * len(drafters))
    axes = figure.subplots(len(drafters), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for ax, drafter in zip(axes, drafters, strict=True):
        for quantity, (label, color, marker) in LABELS.items():
            rows = frame[(frame["drafter"] == drafter) & (frame["quantity"] == quantity)]
            style.line(ax, rows, label, color=color, marker=marker)
        ax.axhline(0, color=GREY, linewidth=0.7, zorder=1)
        ax.set_ylabel("share, or its change")
        style.title(ax, style.short(drafter))
    style.depth_axis(axes[-1], frame["depth"])
    style.legend(figure, axes)
    counts = frame[frame["quantity"] == "conditional_walk"]["n"]
    style.note(
        figure, "conditional = match + survivor selection + start selection + residual", table.words,
        f"drafts judged in the walk: {style.span(counts)}, fewer than {FEW} left out",
    )  # fmt: skip
    return figure
