"""Draw the README's picture, docs/demo.png, from the demo's committed table (paper_figs/data/demo_curves.csv; no torch).

python docs/picture.py
"""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # paper_figs is not installed

from driftlab.plotting import save_panel, theme  # noqa: E402 (found by the path set above)
from paper_figs import style  # noqa: E402 (found by the path set above)

TTT = 4
PANELS = {"match": "text-fed match", "rms_feedback": "RMS of the feedback"}


def draw() -> Figure:
    """Draw match and magnitude by depth, of the four drafters that differ in the two switches alone."""
    frame = style.read(style.DATA, "demo_curves").frame
    frame = frame[frame["ttt"] == TTT]
    looks = style.looks(frame["drafter"])
    figure = Figure(figsize=(7.6, 2.7), layout="constrained")
    axes = figure.subplots(1, 2)
    for ax, (quantity, label) in zip(axes, PANELS.items(), strict=True):
        for drafter, rows in frame[frame["quantity"] == quantity].groupby("drafter", sort=False):
            style.line(ax, rows, style.short(drafter), **looks[drafter])
        style.depth_axis(ax, frame.loc[frame["quantity"] == quantity, "depth"])
        ax.set_ylabel(label)
    axes[0].set_ylim(0, None)
    axes[1].set_yscale("log")
    axes[0].legend()
    return figure


if __name__ == "__main__":
    with theme():
        save_panel(draw(), ROOT / "docs" / "demo.png")
