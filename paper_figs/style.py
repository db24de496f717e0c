"""What the figures share: the theme at column width, tables with their words, looks of drafters, intervals, a footnote."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from driftlab import plotting
from driftlab.errors import DriftlabError
from driftlab.plotting import COLORS, GREY, HUES, MARKERS, STYLES

DATA = Path(__file__).parent / "data"
WIDTH = 3.4
"""inches, a column"""
COMMAND = " · made by: "
"""parts a table's words from its command, which a figure does not show"""
_SIZES = {
    "font.size": 7,
    "axes.labelsize": 7,
    "axes.titlesize": 7.5,
    "xtick.labelsize": 6.5,
    "ytick.labelsize": 6.5,
    "legend.fontsize": 6.5,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.2,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "legend.handlelength": 2.2,
    "pdf.fonttype": 42,  # text stays text
    "savefig.dpi": 220,
}
_PLAIN = {"eagle3": (0, 0, "o"), "fc_norm": (0, 1, "s"), "norm_output": (1, 0, "^"), "eagle31": (1, 1, "D")}
_GATES = {"gate": (COLORS[7], "-", "v"), "gate+norm_output": (COLORS[4], "-", "P")}


class Table(NamedTuple):
    """A committed table and what its first line says of it."""

    frame: pd.DataFrame
    words: str


@contextmanager
def theme() -> Iterator[None]:
    """Draw in the house theme, in sizes that are read at column width."""
    with plotting.theme(), matplotlib.rc_context(_SIZES):
        yield


def read(data: Path, name: str) -> Table:
    """Read ``data/name.csv``; the first line is a comment. Raises DriftlabError where it is not there or has no such line."""
    path = data / f"{name}.csv"
    if not path.exists():
        raise DriftlabError(f"the table {name}.csv is not in {data}; paper_figs/tables.py says what makes it")
    with path.open(encoding="utf-8") as lines:
        first = lines.readline().rstrip("\n")
    if not first.startswith("# "):
        raise DriftlabError(f"{path}: the first line must say, after '# ', what the numbers are")
    return Table(pd.read_csv(path, skiprows=1), first[2:].split(COMMAND)[0])


def figure(height: float) -> Figure:
    """Return an empty figure of the width of a column."""
    return Figure(figsize=(WIDTH, height), layout="constrained")


def short(name: str) -> str:
    """Return a drafter's name without the target's."""
    return name.removeprefix("smollm2-")


def looks(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return colour, line style and marker by name: hue is norm_output, a dashed line fc_norm.

    A drafter trained to another depth (``-ttt2``) has hollow points; names that say neither switch take turns.
    """
    found, other = {}, 0
    for name in dict.fromkeys(names):
        base = re.sub(r"-ttt\d+$", "", short(name))
        if base in _PLAIN:
            hue, style, marker = _PLAIN[base]
            color, line = HUES[hue], STYLES[style]
        elif base in _GATES:
            color, line, marker = _GATES[base]
        else:
            color, line, marker = COLORS[other % len(COLORS)], "-", MARKERS[other % len(MARKERS)]
            other += 1
        found[name] = {"color": color, "linestyle": line, "marker": marker}
        if base != short(name):
            found[name] |= {"markerfacecolor": "white", "linewidth": 0.8}
    return found


def line(ax: Axes, rows: pd.DataFrame, label: str, *, x: str = "depth", y: str = "value", **look: Any) -> None:
    """Draw one line, with its band where the rows have one; a missing value is a gap. The band is labelled ``_label``."""
    rows = rows.sort_values(x)
    ax.plot(rows[x], rows[y], label=label, **look)
    if {"low", "high"} <= set(rows) and rows["low"].notna().any():
        band = ax.fill_between(rows[x], rows["low"], rows["high"], color=look["color"], alpha=0.13, linewidth=0)
        band.set_label(f"_{label}")


def dots(ax: Axes, rows: pd.DataFrame, by: str, *, y: str = "value", low: str = "low", high: str = "high") -> None:
    """Draw a point with its interval for each (``by``, drafter): a line of the panel for each ``by``, drafters side by side.

    The interval's collection is labelled ``_drafter``. A missing value leaves its place empty.
    """
    names, drafters = list(dict.fromkeys(rows[by])), list(dict.fromkeys(rows["drafter"]))
    styles = looks(drafters)
    for place, drafter in enumerate(drafters):
        mine = rows[rows["drafter"] == drafter]
        at = mine[by].map(names.index) + 0.24 * (place - (len(drafters) - 1) / 2)
        look = styles[drafter]
        if low in mine:
            ends = ax.hlines(at, mine[low], mine[high], color=look["color"], linewidth=0.9, alpha=0.75)
            ends.set_label(f"_{short(drafter)}")
        ax.plot(mine[y], at, linestyle="none", marker=look["marker"], color=look["color"], label=short(drafter))
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.grid(False, axis="y")
    ax.grid(True, axis="x")
    for place in range(1, len(names)):
        ax.axhline(place - 0.5, color="#eeeeee", linewidth=0.5, zorder=0)
    ax.tick_params(axis="y", length=0)


def depth_axis(ax: Axes, depths: pd.Series, label: str = "draft depth") -> None:
    """Mark whole depths only."""
    last = int(depths.max())
    step = max(1, int(np.ceil(last / 8)))
    ax.set_xticks([1, *range(1 + step - (step > 1), last + 1, step)] if step > 1 else range(1, last + 1))
    ax.set_xlabel(label)


def legend(figure: Figure, axes: Sequence[Axes], columns: int = 2) -> None:
    """Put one legend for the panels above them: every label once."""
    handles: dict[str, Any] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(list(handles.values()), list(handles), loc="outside upper center", ncols=columns, handlelength=2.6)


def above(ax: Axes) -> None:
    """Put a panel's own legend right above it, below its title."""
    ax.set_title(ax.get_title(loc="left"), loc="left", pad=13)
    ax.legend(
        ncols=4, loc="lower right", bbox_to_anchor=(1.02, 1.0), borderaxespad=0.2, handlelength=1.9, columnspacing=0.9,
        handletextpad=0.4, fontsize=6,
    )  # fmt: skip


def title(ax: Axes, text: str) -> None:
    """Set a panel's title at its left."""
    ax.set_title(text, loc="left")


def note(figure: Figure, *parts: str) -> None:
    """Write the footnote: what is drawn, settings, n and what intervals are over."""
    words = textwrap.fill(" · ".join(part for part in parts if part), 72)
    figure.supxlabel(words, fontsize=5.8, color=GREY, x=0.01, ha="left", parse_math=False)


def told(rows: pd.DataFrame) -> str:
    """Say how rows of demo_curves were fed and how deep their drafters were trained (TTT 0: not known, not said)."""
    feeds, depths = ("/".join(map(str, sorted(rows[name].unique()))) for name in ("feed", "ttt"))
    return f"{feeds}-fed" + (f", TTT {depths}" if depths != "0" else "")


def span(values: pd.Series) -> str:
    """Say the range of some counts."""
    low, high = values.min(), values.max()
    return f"n = {low:g}" if low == high else f"n = {low:g} to {high:g}"
