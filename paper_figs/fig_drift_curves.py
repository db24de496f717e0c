"""Attention by draft depth: mass on each segment, on the latest keys, and entropy, of our drafters.

Reads demo_curves.csv. The thin dotted lines of the self panel are the null: what the same keys would get at depth 1.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from driftlab.errors import DriftlabError
from paper_figs import style

TABLES = ("demo_curves",)
PANELS = {
    "mass_sink": "sink",
    "mass_prompt": "prompt",
    "mass_context": "context",
    "mass_self": "own tokens",
    "recent": "latest keys",
    "entropy_relative": "entropy / largest",
}


def draw(data: Path = style.DATA) -> Figure:
    """Draw a panel a quantity and a line a drafter."""
    table = style.read(data, "demo_curves")
    frame = table.frame[table.frame["quantity"].isin([*PANELS, "mass_self_null"])]
    if not set(PANELS) <= set(frame["quantity"]):
        lacking = sorted(set(PANELS) - set(frame["quantity"]))
        raise DriftlabError(
            f"demo_curves has no {', '.join(lacking)}: probe the drafters (driftlab demo or driftlab probe)"
        )
    figure = style.figure(4.6)
    axes = figure.subplots(3, 2, sharex=True)
    looks = style.looks(frame["drafter"])
    for ax, (quantity, label) in zip(axes.flat, PANELS.items(), strict=True):
        for drafter, rows in frame[frame["quantity"] == quantity].groupby("drafter", sort=False):
            style.line(ax, rows, style.short(drafter), **looks[drafter])
        if quantity == "mass_self":
            for drafter, rows in frame[frame["quantity"] == "mass_self_null"].groupby("drafter", sort=False):
                ax.plot(rows["depth"], rows["value"], color=looks[drafter]["color"], linestyle=":", linewidth=0.8,
                        label=f"_null {style.short(drafter)}")  # fmt: skip
        style.title(ax, label)
        ax.set_ylim(0, None)
    for ax in axes[-1]:
        style.depth_axis(ax, frame["depth"])
    for ax in axes[:2, 0]:
        ax.set_ylabel("attention mass")
    axes[2, 0].set_ylabel("attention mass")
    style.legend(figure, [axes[0, 0]])
    style.note(
        figure,
        table.words,
        style.told(frame),
        f"starts times heads: {style.span(frame['n'])}",
        "dotted: null of own tokens",
    )
    return figure
