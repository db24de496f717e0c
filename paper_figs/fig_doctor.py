"""What the doctor finds when a checkpoint is declared wrongly, factor by factor, and when it is honest.

Reads doctor_confusion.csv: a case a line, with its ``mistake`` and its ``result``. "in its class": the true reading is among
those that the doctor reports as one with the reading that it found.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from paper_figs import style

TABLES = ("doctor_confusion",)
RESULTS = {
    "exactly": "named\nexactly",
    "in the class": "in its\nclass",
    "not named": "not\nnamed",
    "too weak": "too weak\nto tell",
    "kept": "left as\ndeclared",
    "doubted": "doubted",
    "error": "error",
}
LAST = ("two at once", "honest", "random weights")


def counts(frame: pd.DataFrame) -> pd.DataFrame:
    """Return cases by mistake (line) and result (column): single mistakes by name, then :data:`LAST`."""
    table = pd.crosstab(frame["mistake"], frame["result"])
    singles = sorted(set(table.index) - set(LAST))
    lines = [*singles, *(name for name in LAST if name in table.index)]
    return table.loc[lines, [name for name in RESULTS if name in table]]


def draw(data: Path = style.DATA) -> Figure:
    """Draw the counts as numbers on shades."""
    table = style.read(data, "doctor_confusion")
    grid = counts(table.frame)
    figure = style.figure(1.2 + 0.2 * len(grid))
    ax = figure.subplots()
    shades = grid.div(grid.sum(axis=1), axis=0).to_numpy()
    ax.imshow(shades, cmap="Blues", vmin=0, vmax=1.7, aspect="auto")
    for i, row in enumerate(grid.to_numpy()):
        for j, number in enumerate(row):
            if number:
                ax.text(j, i, str(number), ha="center", va="center", fontsize=6.5)
    ax.set_xticks(range(grid.shape[1]), [RESULTS[name] for name in grid.columns], fontsize=6)
    ax.xaxis.tick_top()
    ax.set_yticks(range(len(grid)), grid.index)
    ax.tick_params(length=0)
    ax.grid(False)
    ax.spines[:].set_visible(False)
    style.note(figure, table.words, f"n = {len(table.frame)} cases, each diagnosed once; shade: share of the line")
    return figure
