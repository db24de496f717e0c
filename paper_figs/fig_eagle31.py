"""EAGLE 3 and EAGLE 3.1 as one pipeline with two switches (figure 1 of the announcement, drawn anew).

Reads eagle31_switches.csv: the stages in order, what stands there in each, and the switch where they differ.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from driftlab.plotting import GREY, HUES
from paper_figs import style

TABLES = ("eagle31_switches",)
COLUMNS = {"eagle3": ("EAGLE 3", 0.0), "eagle31": ("EAGLE 3.1", 1.0)}
BOX = (0.80, 0.56)


def draw(data: Path = style.DATA) -> Figure:
    """Draw two columns of boxes; the boxes that differ are coloured and their switch stands between them."""
    table = style.read(data, "eagle31_switches")
    figure = style.figure(3.5)
    ax = figure.subplots()
    ax.set_axis_off()
    last = len(table.frame) - 1
    for column, (name, x) in COLUMNS.items():
        ax.text(x, -0.75, name, ha="center", va="center", weight="bold", fontsize=8)
        for place, row in enumerate(table.frame.itertuples()):
            differs = isinstance(row.switch, str)
            color = HUES[column == "eagle31"] if differs else GREY
            box = FancyBboxPatch(
                (x - BOX[0] / 2, place - BOX[1] / 2), *BOX, boxstyle="round,pad=0,rounding_size=0.08",
                facecolor="white", edgecolor=color, linewidth=1.4 if differs else 0.8, label=f"{column}:{row.stage}",
            )  # fmt: skip
            ax.add_patch(box)
            ax.text(x, place, getattr(row, column), ha="center", va="center", fontsize=6.5, gid=f"{column}:{row.stage}")
            if place:
                ends = ((x, place - 1 + BOX[1] / 2), (x, place - BOX[1] / 2))
                ax.add_patch(
                    FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=6, color=GREY, shrinkA=0, shrinkB=0)
                )
        # the feedback: from the last stage up to the block
        block = table.frame["stage"].tolist().index("block")
        side = x + (BOX[0] / 2 if x else -BOX[0] / 2)
        bend = 0.16 if x else -0.16
        ax.plot([side, side + bend, side + bend], [last, last, block], color=HUES[column == "eagle31"], linewidth=1)
        arrow = FancyArrowPatch((side + bend, block), (side, block), arrowstyle="-|>", mutation_scale=6,
                                color=HUES[column == "eagle31"], shrinkA=0, shrinkB=0)  # fmt: skip
        ax.add_patch(arrow)
        turn = 90 if not x else 270
        ax.text(
            side + 1.45 * bend, (last + block) / 2, "depth k + 1", rotation=turn, ha="center", va="center", fontsize=6
        )
    for place, row in enumerate(table.frame.itertuples()):
        if isinstance(row.switch, str):
            ax.text(
                0.5,
                place - BOX[1] / 2 - 0.1,
                row.switch,
                ha="center",
                va="bottom",
                fontsize=6.5,
                gid=f"switch:{row.stage}",
            )
            ax.plot([BOX[0] / 2, 1 - BOX[0] / 2], [place, place], color=GREY, linestyle=":", linewidth=0.9)
    ax.set_xlim(-0.7, 1.7)
    ax.set_ylim(last + 0.5, -1.0)
    style.note(figure, table.words)
    return figure
