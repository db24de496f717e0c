"""What the kernels take: registers of a thread, instructions that spill, shared memory of a block.

Reads kernels.csv, compile reports for sm 90 (nothing is run).
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from driftlab.plotting import COLORS
from paper_figs import style

TABLES = ("kernels",)
PANELS = {"regs": ("registers", 1), "spills": ("spills", 1), "smem": ("shared, KiB", 1024)}


def draw(data: Path = style.DATA) -> Figure:
    """Draw a line of bars a kernel."""
    table = style.read(data, "kernels")
    frame = table.frame
    figure = style.figure(0.9 + 0.135 * len(frame))
    axes = figure.subplots(1, 3, sharey=True, gridspec_kw={"width_ratios": (1, 0.7, 1)})
    places = range(len(frame))
    for ax, (column, (label, unit)), color in zip(axes, PANELS.items(), COLORS, strict=False):
        values = frame[column] / unit
        ax.barh(places, values, height=0.65, color=color, label=column)
        for place, value in zip(places, values, strict=True):
            ax.annotate(f"{value:.0f}", (value, place), (1.5, 0), textcoords="offset points", va="center", fontsize=5.5)
        ax.set_xlim(0, max(1.4 * values.max(), 1))
        ax.set_title(label, fontsize=7)
        ax.grid(False, axis="y")
        ax.tick_params(axis="y", length=0)
    axes[0].set_yticks(places, frame["kernel"], fontsize=5.8)
    axes[0].set_ylim(len(frame) - 0.5, -0.5)
    style.note(
        figure,
        table.words,
        "the hardware has 255 registers a thread and 227 KiB a block",
        f"n = {len(frame)} compilations",
    )
    return figure
