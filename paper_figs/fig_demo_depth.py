"""Text-fed match and feedback magnitude by depth, of the demo's four drafters.

Reads data/demo_curves.csv: pooled over starts and prompts, with 95 % bootstrap intervals over prompts. Written by
``python -m paper_figs.collect RUN`` from a demo run's rows.parquet.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

DATA = Path(__file__).parent / "data" / "demo_curves.csv"
PANELS = {"match": "text-fed match", "rms_feedback": "RMS of the feedback"}


def draw() -> Figure:
    """Draw two panels: hue is norm_output, line style is fc_norm."""
    frame = pd.read_csv(DATA, comment="#")
    figure = Figure(figsize=(6.9, 2.6), layout="constrained")
    colours = sns.color_palette("colorblind")
    for ax, (quantity, label) in zip(figure.subplots(1, 2), PANELS.items(), strict=True):
        shown = frame[frame["quantity"] == quantity]
        for (variant, fc_norm, norm_output), rows in shown.groupby(["variant", "fc_norm", "norm_output"], sort=False):
            look = {"color": colours[1 if norm_output else 0], "linestyle": "--" if fc_norm else "-"}
            ax.plot(rows["depth"], rows["value"], label=variant, **look)
            ax.fill_between(rows["depth"], rows["low"], rows["high"], color=look["color"], alpha=0.12, linewidth=0)
        ax.set(xlabel="draft depth", ylabel=label)
        ax.xaxis.get_major_locator().set_params(integer=True)
    figure.axes[1].set_yscale("log")
    figure.axes[0].legend(frameon=False)
    return figure
