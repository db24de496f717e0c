"""Panels of ``driftlab probe``: one quantity by depth for several settings or inputs, tau of all runs, masses on single keys.

As in :mod:`driftlab.plotting`: rows in, figures out, nothing global is changed, a missing value is a gap. One panel a drafter;
hue is the setting or the input, the first of them (plain, chat) in black.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

import numpy as np
import pandas as pd
from jaxtyping import Float
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font

from driftlab.errors import DriftlabError
from driftlab.plotting import COLORS, GREY, MARKERS, caption, curve, theme

TEXT_WIDTH = 10
SPARSE = 0.5
"""share of the panel's largest n below which a point is hollow"""
_HOLLOW = f"hollow: on less than {SPARSE:.0%} of the starts of the panel's fullest point"
_FIRST = "#222222"
_SPACE, _CUT = "␣", "…"


def plain_or(name: str) -> str:
    """Return how a setting is called: "plain" where nothing is laid on."""
    return name or "plain"


def plot_by(
    frame: pd.DataFrame,
    quantity: str,
    by: Literal["intervention", "template"],
    *,
    ylabel: str | None = None,
    log: bool = False,
    window: int = 0,
    trained: bool = False,
) -> Figure:
    """Draw a quantity by depth: a panel a drafter, a line a setting (``intervention``) or an input (``template``).

    Args:
        frame: tidy rows, which differ in the drafter and in ``by`` alone.
        quantity: of the rows.
        by: settings column that the lines stand for.
        ylabel: of the axis; default the quantity.
        log: whether the axis is logarithmic.
        window: of quantities that have one.
        trained: whether a dotted line marks the depth that training unrolled to.

    Raises:
        DriftlabError: no rows of that quantity.
    """
    rows = frame[(frame["quantity"] == quantity) & (frame["window"] == window)]
    if rows.empty:
        raise DriftlabError(f"no rows of {quantity!r} to plot; the frame has {sorted(frame['quantity'].unique())}")
    drafters, lines = list(dict.fromkeys(rows["drafter"])), list(dict.fromkeys(rows[by]))
    hollow = False
    with theme():
        figure = Figure(figsize=(1.9 + 3.0 * len(drafters), 3.4 + 0.12 * max(0, len(lines) - 8)), layout="constrained")
        axes = figure.subplots(1, len(drafters), sharey=True, squeeze=False)[0]
        for drafter, ax in zip(drafters, axes, strict=True):
            mine = rows[rows["drafter"] == drafter]
            curves = {name: curve(one, quantity).set_index("depth") for name, one in mine.groupby(by, observed=True)}
            most = max(points["n"].max() for points in curves.values())
            for place, name in enumerate(lines):
                if name not in curves:
                    continue
                points = curves[name]
                points = points.reindex(range(points.index.min(), points.index.max() + 1))
                look = _look(place)
                ax.plot(points.index, points["value"], label=plain_or(name), **look)
                if len(sparse := points[points["n"] < SPARSE * most]):
                    ax.plot(sparse.index, sparse["value"], **{**look, "linestyle": "none", "markerfacecolor": "white"})
                    hollow = True
                if points["low"].notna().any():
                    ax.fill_between(
                        points.index, points["low"], points["high"], color=look["color"], alpha=0.1, linewidth=0
                    )
            ax.set_title(drafter, loc="left")
            ax.set_xlabel("draft depth")
            ax.xaxis.get_major_locator().set_params(integer=True)
            ttt = int(mine["ttt"].max())
            if trained and 0 < ttt <= mine["depth"].max():
                ax.axvline(ttt, color=GREY, linestyle=":", linewidth=1, zorder=1)
                ax.annotate(
                    f"trained to {ttt}", (ttt, 1), (0, 2), xycoords=("data", "axes fraction"), textcoords="offset points",
                    ha="center", va="bottom", fontsize=7, color=GREY,
                )  # fmt: skip
                ax.set_title(drafter, loc="left", pad=14)
        if log and bool((rows["value"] > 0).any()):
            axes[0].set_yscale("log", nonpositive="mask")
        axes[0].set_ylabel(ylabel or quantity.replace("_", " "))
        named = {line.get_label(): line for ax in axes for line in ax.lines if not line.get_label().startswith("_")}
        figure.legend(named.values(), named.keys(), loc="outside right upper", handlelength=3)
        words = _wrapped(rows.assign(intervention="") if by == "intervention" else rows, figure.get_figwidth()) + (
            f"\n{_HOLLOW}" if hollow else ""
        )
        figure.supxlabel(words, fontsize=6.5, color=GREY)
    return figure


def plot_taus(table: pd.DataFrame, k: int) -> Figure:
    """Draw tau of every run as a point with its interval.

    Args:
        table: columns ``drafter``, ``template``, ``setting``, ``tau``, ``low``, ``high``, in the order wanted.
        k: drafted tokens a round.
    """
    inputs = table["template"].nunique() > 1
    lines = [row.setting + (f"; {row.template}" if inputs else "") for row in table.itertuples()]
    if "prompts" in table.columns:
        few, all_ = table["prompts"].tolist(), table["prompts"].max()
        lines = [line + (f" ({n} of {all_} prompts)" if n < all_ else "") for line, n in zip(lines, few, strict=True)]
    drafters = list(dict.fromkeys(table["drafter"]))
    with theme():
        figure = Figure(figsize=(7.2, 1.2 + 0.27 * (len(lines) + len(drafters))), layout="constrained")
        ax = figure.subplots()
        place, ticks, names = 0, [], []
        for drafter in drafters:
            behind = {"facecolor": "white", "edgecolor": "none", "pad": 1}
            look = {"va": "center", "fontsize": 8, "weight": "bold", "bbox": behind, "parse_math": False}
            at = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
            ax.annotate(drafter, (0, place), (4, 0), **at, **look)
            place += 1
            for line, row in zip(lines, table.itertuples(), strict=True):
                if row.drafter != drafter:
                    continue
                color = _FIRST if row.setting == "plain" else COLORS[0]
                ax.plot([row.low, row.high], [place, place], color=color)
                ax.plot([row.tau], [place], "o", color=color, markersize=5)
                if not math.isnan(row.tau):
                    ax.annotate(
                        f"{row.tau:.2f}", (row.tau, place), (0, 5), textcoords="offset points", ha="center", fontsize=7
                    )
                ticks.append(place)
                names.append(line)
                place += 1
        ax.axvline(1, color=GREY, linestyle=":", linewidth=1)
        ax.annotate("no drafter", (1, 1), (0, 2), xycoords=("data", "axes fraction"), textcoords="offset points", ha="center",
                    va="bottom", fontsize=7, color=GREY)  # fmt: skip
        ax.set_yticks(ticks, names, parse_math=False)
        ax.set_ylim(place - 0.4, -0.6)
        ax.grid(axis="x")
        ax.grid(False, axis="y")
        ax.margins(x=0.08)
        ax.set_xlabel(f"tau: emitted tokens / verify round, bonus token included\nK = {k}; 95 % over prompts")
    return figure


def plot_keys(
    mass: Float[np.ndarray, "panel depth key"],
    labels: Sequence[Sequence[str]],
    titles: Sequence[str],
    *,
    groups: Sequence[Sequence[str]],
    note: str = "",
) -> Figure:
    """Draw masses on single keys: a panel a start or a head, a row a depth, a column a key; colour is the root of the mass.

    Args:
        mass: NaN where a key does not exist; panels with fewer keys are filled with NaN at the end.
        labels: text under each key of each panel, shown as it is.
        titles: of the panels.
        groups: kind of each key of each panel; a white line parts neighbours of different kinds.
        note: under the figure.
    """
    panels, depths, keys = mass.shape
    with theme():
        height = (0.16 * depths + 1.35) * panels + 0.5
        figure = Figure(figsize=(max(5.2, 1.5 + 0.25 * keys), height), layout="constrained")
        axes = figure.subplots(panels, 1, squeeze=False)[:, 0]
        top = float(np.nanmax(mass)) if np.isfinite(mass).any() else 1.0
        drawn = None
        for ax, values, names, title, kinds in zip(axes, mass, labels, titles, groups, strict=True):
            shown = values[:, : len(names)]
            drawn = ax.imshow(
                shown, aspect="auto", cmap="viridis", norm=PowerNorm(0.5, 0, max(top, 1e-6)), interpolation="none"
            )
            ax.grid(False)
            for i in range(1, len(kinds)):
                if kinds[i] != kinds[i - 1]:
                    ax.axvline(i - 0.5, color="white", linewidth=2)
            ax.set_xticks(
                range(len(names)), [drawable(name) for name in names], rotation=90, fontsize=6.5, parse_math=False
            )
            ax.set_yticks(range(depths), range(1, depths + 1))
            ax.set_ylabel("draft depth")
            ax.set_title(drawable(title), loc="left", fontsize=8, parse_math=False)
        figure.colorbar(drawn, ax=list(axes), label="attention mass", shrink=min(1.0, 1.6 / max(panels, 1)), aspect=14)
        if note:
            figure.supxlabel(note, fontsize=6.5, color=GREY, parse_math=False)
    return figure


def visible_text(text: str, width: int = TEXT_WIDTH) -> str:
    """Return a token's text for a label: blanks shown, control characters escaped, cut to ``width`` characters."""
    escaped = "".join(_escaped(character) for character in text)
    return escaped if len(escaped) <= width else escaped[: max(1, width - 1)] + _CUT


def _escaped(character: str) -> str:
    if character == " ":
        return _SPACE
    if unicodedata.category(character)[0] in "CZ":  # control, format, surrogates, unassigned; other blanks
        return repr(character)[1:-1] if not character.isprintable() else f"\\u{ord(character):04x}"
    return character


def drawable(text: str) -> str:
    """Replace what the panels' font cannot draw by its code point."""
    return "".join(c if ord(c) in _glyphs() else f"\\u{ord(c):04x}" for c in text)


@cache
def _glyphs() -> frozenset[int]:
    return frozenset(get_font(findfont(FontProperties(family="DejaVu Sans"))).get_charmap())


def _look(place: int) -> dict[str, Any]:
    color = _FIRST if place == 0 else COLORS[(place - 1) % len(COLORS)]
    return {"color": color, "marker": MARKERS[place % len(MARKERS)], "linestyle": "-" if place <= len(COLORS) else "--"}


def _wrapped(rows: pd.DataFrame, inches: float) -> str:
    words, lines, limit = caption(rows).split(" · "), [""], max(24, int(inches * 19))
    for word in words:
        if lines[-1] and len(lines[-1]) + len(word) + 3 > limit:
            lines.append("")
        lines[-1] += (" · " if lines[-1] else "") + word
    return "\n".join(lines)
