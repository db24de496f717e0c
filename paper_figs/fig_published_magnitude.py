"""Growth of the drafter's hidden state with depth, as published (Table 1 of arXiv 2605.09992).

Reads data/published_magnitude.csv: RMS of the drafter's output h* at depths 1, 2, 3 and 8, by target. Absolute scales
differ by the target's residual stream, so each line is divided by its value at depth 1.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

DATA = Path(__file__).parent / "data" / "published_magnitude.csv"


def table() -> pd.DataFrame:
    """Return the table with the column that is drawn: ``growth``."""
    frame = pd.read_csv(DATA, comment="#")
    first = frame[frame["depth"] == 1].set_index("target")["rms"]
    return frame.assign(growth=frame["rms"] / frame["target"].map(first))


def draw() -> Figure:
    """Draw one line a target."""
    figure = Figure(figsize=(3.4, 2.6), layout="constrained")
    ax = figure.subplots()
    colours = sns.color_palette("colorblind")
    for colour, (target, rows) in zip(colours, table().groupby("target", sort=False), strict=False):
        ax.plot(rows["depth"], rows["growth"], marker="o", color=colour, label=target)
    ax.axhline(1, color="0.6", linewidth=0.8)
    ax.set(xlabel="draft depth", ylabel="RMS of h* / its value at depth 1", xticks=[1, 2, 3, 8])
    ax.legend(frameon=False)
    return figure
