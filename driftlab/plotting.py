"""Panels: tidy rows in, matplotlib Axes out; the numbers behind a panel are :func:`curve`, tested without a pixel.

The four variants are two switches, so hue is ``norm_output`` and line style is ``fc_norm``; the four segments have
fixed colours of their own. Everything is drawn inside :func:`theme`: nothing global is changed and pyplot is not used.
A missing value or an absent depth is a gap in the line, never 0 and never bridged.
"""

from __future__ import annotations

import math
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator

from driftlab.errors import DriftlabError
from driftlab.files import atomic
from driftlab.intervals import Interval, bootstrap_ratio, limits, weighted_mean
from driftlab.results import NEUTRAL, TOGGLES, VARYING, mixed_settings

COLORS = sns.color_palette("colorblind").as_hex()
#: norm_output off, on
HUES = (COLORS[3], COLORS[0])
#: fc_norm off, on
STYLES = ("-", (0, (4, 1.6)))
MARKERS = ("o", "s", "^", "D", "v", "P")
#: quantity -> label, colour, marker
SEGMENTS = {
    "mass_sink": ("sink", COLORS[4], "o"),
    "mass_prompt": ("prompt", COLORS[7], "s"),
    "mass_context": ("context", COLORS[2], "^"),
    "mass_self": ("self", COLORS[1], "D"),
}
#: a point that averages fewer rounds than this is hollow
FEW = 10
COUNT_HEIGHT = 9
WHOLE = 0.9
"""share of the other segments' n below which a segment's own is told"""
_POINT = (*VARYING, "template", "intervention", "quantity", "window", "depth")
"""what the rows that make one point of a line share"""
GREY = "#6b6b6b"
THEME = {
    **sns.axes_style("ticks"),
    "font.family": ["DejaVu Sans"],  # comes with matplotlib: the same picture on every machine
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": "#222222",
    "ytick.labelcolor": "#222222",
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}


@contextmanager
def theme() -> Iterator[None]:
    """Draw the block in the house style; the settings of matplotlib are as before after it."""
    with matplotlib.rc_context(THEME):
        yield


# ---------------------------------------------------------------------------------------------- the numbers


def curve(frame: pd.DataFrame, quantity: str, *, samples: int = 2000, seed: int = 0) -> pd.DataFrame:
    """Return one quantity by depth: ``results.VARYING`` (a drafter), ``depth``, ``value``, ``n``, ``low``, ``high``.

    Heads, layers and prompts are pooled by ``intervals.weighted_mean``; rows for a mean (head -1, prompt "") count only
    where the finer ones are absent. With two or more prompts the interval is a 95 % bootstrap over them, cut to what the
    quantity can be (``intervals.limits``); a single row keeps its own. No row of that quantity, or more than one
    ``window``, is a :class:`DriftlabError`; averaging over rows whose settings differ (other than ``seed``) warns.
    """
    return _curve(_select(frame, quantity), samples, seed)


def caption(frame: pd.DataFrame) -> str:
    """Say the settings that make the numbers comparable, several values as a/b, and what an interval is over."""
    forms = {
        "target": "{}",
        "drafting": "{} drafting",
        "depth_max": "K = {}",
        "feed": "{}-fed",
        "starts": "starts: {}",
        "temperature": "T = {}",
        "top_k": "top-k {}",
        "top_p": "top-p {}",
        "draft_temperature": "draft T = {}",
        "draft_top_k": "draft top-k {}",
        "draft_top_p": "draft top-p {}",
        "template": "template: {}",
        "intervention": "with {}",
        "dtype": "{}",
        "ttt": "TTT {}",
        "rule": "rule: {}",
    }
    words, matches = [], set(frame["quantity"]) == {"match"}
    for name, form in forms.items():
        values = sorted(frame[name].unique().tolist())
        if name == "depth_max" and matches:  # match does not depend on K, and may be measured deeper
            words.append(f"match to depth {frame['depth'].max()}")
            continue
        # "" and 0, and a top-p of 1, are "not said", but for a temperature
        if name == "temperature" or any(value != NEUTRAL[name] for value in values):
            said = "/".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)
            words.append(form.format(said))
    few, many = _prompts(frame)
    if many > 1:
        words.append(f"95 % interval over {f'{few} to ' if few < many else ''}{many} prompts")
    elif frame["low"].notna().any():
        words.append("95 % interval")
    return " · ".join(words)


def _prompts(frame: pd.DataFrame) -> tuple[int, int]:
    """Return how many prompts a point rests on, at least and at most: those with a value, of one series at one depth."""
    there = frame[(frame["prompt"] != "") & frame["value"].notna() & (frame["n"] > 0)]
    counts = there.groupby(list(_POINT), observed=True)["prompt"].nunique()
    return (int(counts.min()), int(counts.max())) if len(counts) else (0, 0)


def _select(frame: pd.DataFrame, quantity: str) -> pd.DataFrame:
    rows = frame[frame["quantity"] == quantity]
    if rows.empty:
        present = sorted(frame["quantity"].unique()) or "no rows at all"
        raise DriftlabError(f"no rows of {quantity!r} to plot; the frame has {present}")
    windows = sorted(rows["window"].unique().tolist())
    if len(windows) > 1:
        raise DriftlabError(f"{quantity!r} is there for the windows {windows}: choose one")
    return rows


def _curve(rows: pd.DataFrame, samples: int = 2000, seed: int = 0) -> pd.DataFrame:
    parts = []
    for key, one in rows.groupby(list(VARYING), sort=False):
        _warn_if_unlike(one)
        finest = _finest(one)
        alone = finest[~finest["depth"].duplicated(keep=False)].set_index("depth")
        for depth, prompts in weighted_mean(finest, ["depth", "prompt"]).groupby("depth"):
            interval, n = _pooled(prompts, samples, seed)
            interval = interval.within(*limits(one["quantity"].iloc[0], int(one["depth_max"].max())))
            if depth in alone.index:  # a single row keeps its own
                interval = interval._replace(low=alone.at[depth, "low"], high=alone.at[depth, "high"])
            parts.append([*key, depth, interval.value, n, interval.low, interval.high])
    points = pd.DataFrame(parts, columns=[*VARYING, "depth", "value", "n", "low", "high"])
    return points.astype(rows.dtypes[[*VARYING, "depth"]].to_dict())


def _finest(rows: pd.DataFrame) -> pd.DataFrame:
    """Drop rows that sum up others: prompt "" beside prompts, head -1 beside heads, depth 0 beside depths; and what is
    by category alone beside the whole.
    """
    for name in ("prompt", "layer", "head", "depth"):
        fine = rows[name] != NEUTRAL[name]
        rows = rows[fine] if fine.any() else rows
    whole = (rows["prompt"] == "") & (rows["category"] == "")
    return rows[whole] if whole.any() else rows


def _pooled(prompts: pd.DataFrame, samples: int, seed: int) -> tuple[Interval, int]:
    """Pool the means of prompts, with an interval over them."""
    prompts = prompts[prompts["n"] > 0]
    n = prompts["n"].to_numpy(dtype="float64")
    interval = bootstrap_ratio(prompts["value"].to_numpy() * n, n, samples=samples, seed=seed)
    return interval, round(float(n.sum()))


def _warn_if_unlike(rows: pd.DataFrame) -> None:
    if mixed := mixed_settings(rows, (*VARYING, "seed")):
        who = f"{rows['quantity'].iloc[0]!r} of {rows['variant'].iloc[0]!r}"
        warnings.warn(f"{who} is averaged over rows whose settings differ: {mixed}", stacklevel=2)


def _drafters(rows: pd.DataFrame) -> list[tuple[str, dict[str, Any], pd.DataFrame]]:
    """Split rows into drafters, the named variants first: label, line properties, rows."""
    order = {name: place for place, name in enumerate(TOGGLES)}
    groups = sorted(rows.groupby(list(VARYING)), key=lambda group: (order.get(group[0][0], len(order)), group[0]))
    names = [key[0] for key, _ in groups]
    alike: Counter[tuple[bool, bool]] = Counter()
    found = []
    for (variant, fc_norm, norm_output, drafter), group in groups:
        marker = MARKERS[(2 * alike[fc_norm, norm_output] + fc_norm) % len(MARKERS)]
        alike[fc_norm, norm_output] += 1
        look = {"color": HUES[norm_output], "linestyle": STYLES[fc_norm], "marker": marker}
        both = drafter if variant in drafter else f"{variant} {drafter}".strip()
        label = variant if variant and names.count(variant) == 1 else both or "drafter"
        found.append((label, look, group))
    return found


def _series(points: pd.DataFrame) -> list[tuple[str, dict[str, Any], pd.DataFrame]]:
    return [(label, look, _whole(group)) for label, look, group in _drafters(points)]


def _whole(group: pd.DataFrame) -> pd.DataFrame:
    """Index by depth and put NaN where a depth is absent, so that a line has a gap there."""
    depths = np.arange(group["depth"].min(), group["depth"].max() + 1)
    whole = group.set_index("depth")[["value", "n", "low", "high"]].reindex(depths)
    return whole.assign(n=whole["n"].fillna(0).astype("int64"))


# ---------------------------------------------------------------------------------------------- the panels


def plot_quantity(
    frame: pd.DataFrame, quantity: str, ax: Axes | None = None, ylabel: str | None = None, log: bool = False
) -> Axes:
    """Draw any quantity by depth, one line a drafter, with a 95 % band where there are several prompts.

    Raises :class:`DriftlabError` as :func:`curve` does, naming the quantities that the frame does have.
    """
    with theme():
        ax, _ = _panel(_select(frame, quantity), ax, ylabel or quantity.replace("_", " "))
        if log:
            _log_axis(ax)
    return ax


def plot_magnitude(frame: pd.DataFrame, ax: Axes | None = None, *, log: bool = False) -> Axes:
    """Draw the RMS of the feedback by depth; where it is there, that of the fused input as hollow marks at depth 0."""
    fused = frame[(frame["quantity"] == "rms_fused") & (frame["depth"] == 0)]
    with theme():
        ax, _ = _panel(_select(frame, "rms_feedback"), ax, "RMS of the feedback")
        if len(fused):
            series = _series(_curve(fused))
            for place, (label, look, points) in zip(np.linspace(-0.15, 0.15, len(series)), series, strict=True):
                # side by side: variants that share their fusion lie upon each other
                _line(
                    ax, points.set_axis(points.index + place), f"_{label} fused", **{**look, "markerfacecolor": "white"}
                )
            ax.set_xticks([0, *ax.get_xticks()], ["fused", *(f"{tick:g}" for tick in ax.get_xticks())])
            ax.set_xlim(left=-0.5)
        if log:
            _log_axis(ax)
    return ax


def plot_match(frame: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Draw the top-1 match over all starts by depth, and a vertical line where training stopped unrolling (TTT)."""
    rows = _select(frame, "match")
    with theme():
        ax, series = _panel(rows, ax, "top-1 match, all starts")
        # from zero, but only as high as the data: untrained or small drafters match a tenth of the text
        ax.set_ylim(0, min(1.03, 1.2 * max(_highest(series), 0.01)))
        depths = [ttt for ttt in sorted(set(rows["ttt"]) - {0}) if ttt <= rows["depth"].max()]
        for place, ttt in enumerate(depths):  # above the panel, one higher than the other: nothing runs through them
            ax.axvline(ttt, color=GREY, linestyle=":", linewidth=1, label=f"_TTT {ttt}", zorder=1)
            above = {"xycoords": ("data", "axes fraction"), "ha": "center", "va": "bottom", "size": 7}
            _note(ax, f"trained to {ttt}", (ttt, 1), (0, 2 + COUNT_HEIGHT * place), **above)
    return ax


def plot_acceptance(frame: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Draw acceptance given that all earlier drafts were accepted, with n per depth under the axis.

    Deep depths are reached by few rounds: a point with n below 10 is hollow, faint and not joined to others.
    """
    with theme():
        ax, series = _panel(_select(frame, "accept_conditional"), ax, "acceptance, given all before", counts=True)
        ax.set_ylim(0, 1.03)
        hollow = {"linestyle": "none", "markerfacecolor": "white", "alpha": 0.55}
        for label, look, points in series:
            few = points[(points["n"] < FEW) & points["value"].notna()]
            if len(few):
                ax.plot(few.index, few["value"], label=f"_{label} few", **{**look, **hollow})
        if any(line.get_label().endswith(" few") for line in ax.lines):
            _legend(ax, [Line2D([], [], color=GREY, marker="o", label=f"n < {FEW}", **hollow)])
    return ax


def plot_recent(frame: pd.DataFrame, ax: Axes | None = None, *, window: int | None = None) -> Axes:
    """Draw the mass on the last ``window`` keys by depth; ``window`` may be left out where the frame has just one."""
    rows = frame[frame["quantity"] == "recent"]
    widths = sorted(rows["window"].unique().tolist())
    if window is not None and widths:
        rows = rows[rows["window"] == window]
        if rows.empty:
            raise DriftlabError(f"no rows of 'recent' with window {window}; there are the windows {widths}")
    rows = _select(frame if rows.empty else rows, "recent")
    width = rows["window"].iloc[0]
    with theme():
        ax, _ = _panel(rows, ax, "mass on the last key" if width == 1 else f"mass on the last {width} keys")
    return ax


def plot_mass(frame: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Draw the attention mass on each segment by depth for one drafter; the null of SELF is a thin dashed line.

    Raises :class:`DriftlabError` for several drafters: :func:`plot_mass_grid` gives each a panel.
    """
    rows = _mass_rows(frame)
    if len(drafters := _drafters(rows)) > 1:
        names = [label for label, _, _ in drafters]
        raise DriftlabError(f"plot_mass draws one drafter, and here are {names}: use plot_mass_grid")
    with theme():
        ax = _axes(ax)
        _masses(ax, rows)
        ax.set(xlabel="draft depth", ylabel="attention mass")
        _legend(ax)
        _footnote(ax, rows)
    return ax


def plot_mass_grid(frame: pd.DataFrame) -> Figure:
    """Draw the masses of each drafter in a panel of its own, on one scale, with one legend."""
    rows = _mass_rows(frame)
    drafters = _drafters(rows)
    columns = len(drafters) if len(drafters) < 4 else math.ceil(math.sqrt(len(drafters)))
    lines = math.ceil(len(drafters) / columns)
    with theme():
        figure = Figure(figsize=(0.8 + 2.9 * columns, 1.0 + 2.2 * lines), layout="constrained")
        panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flat
        for (label, _, group), ax in zip(drafters, panels, strict=False):
            _masses(ax, group)
            ax.set_title(label, loc="left")
        for ax in list(panels):
            ax.remove()
        handles = {line.get_label(): line for ax in figure.axes for line in ax.lines}
        figure.legend(handles.values(), handles.keys(), loc="outside right upper")
        figure.supylabel("attention mass", fontsize=9)
        for ax in figure.axes[-columns:]:
            ax.set_xlabel("draft depth")
            ax.tick_params(labelbottom=True)
        figure.supxlabel(_wrapped(rows, figure.get_figwidth()), fontsize=6.5, color=GREY)
    return figure


def plot_tau(frame: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Draw tau of each drafter as a point with its interval: from the pooled rows, or else over the prompts.

    Per-prompt rows count by their ``n``, the verify rounds. The axis does not start at 0, so nothing is a bar.
    """
    rows = _select(frame, "tau")
    pooled = rows[rows["prompt"] == ""]
    drafters = _drafters(_curve(pooled if len(pooled) else rows))
    with theme():
        ax = _axes(ax, height=1.3 + 0.5 * len(drafters))
        for place, (label, look, points) in enumerate(drafters):
            value, low, high = points[["value", "low", "high"]].iloc[0]
            ax.plot([low, high], [place, place], color=look["color"], label=f"_{label} span")
            ax.plot([value], [place], **{**look, "linestyle": "none"}, markersize=6.5, label=label)
            above = {"textcoords": "offset points", "ha": "center", "fontsize": 8}
            if np.isnan(value):
                ax.annotate("no value", (0.5, place), (0, -3), xycoords=("axes fraction", "data"), **above)
            else:
                ax.annotate(f"{value:.2f}", (value, place), (0, 6), **above)
        ax.set_yticks(range(len(drafters)), [label for label, _, _ in drafters])
        ax.set_ylim(len(drafters) - 0.5, -0.7)
        ax.margins(x=0.12)
        ax.grid(axis="x")
        ax.grid(False, axis="y")
        ax.set_xlabel("tau: tokens per verify round")
        _footnote(ax, rows)
    return ax


def save_panel(figure: Figure, path: Path | str) -> None:
    """Write a figure as PNG, whole or not at all; the same figure gives the same bytes (no date, no version in it)."""
    if Path(path).suffix.lower() != ".png":
        raise DriftlabError(f"a panel is kept as .png, not as {Path(path).name!r}")
    with atomic(Path(path)) as temporary, theme():
        figure.savefig(temporary, format="png", dpi=160, metadata={"Software": None})


# ---------------------------------------------------------------------------------------------- the parts


def _axes(ax: Axes | None, height: float = 3.8) -> Axes:
    return ax if ax is not None else Figure(figsize=(6.6, height), layout="constrained").subplots()


def _panel(
    rows: pd.DataFrame, ax: Axes | None, ylabel: str, *, counts: bool = False
) -> tuple[Axes, list[tuple[str, dict[str, Any], pd.DataFrame]]]:
    """Draw one quantity by depth for each drafter, with axis, legend and footnote."""
    series = _series(_curve(rows))
    ax = _axes(ax)
    for label, look, points in series:
        # a line or band over next to no rounds would say nothing and cover the rest
        unknown = dict.fromkeys(("value", "low", "high"), np.nan)
        _line(ax, points.where(points["n"] >= FEW, points.assign(**unknown)) if counts else points, label, **look)
    _depth_axis(ax, [points for _, _, points in series])
    ax.set(xlabel="draft depth", ylabel=ylabel)
    _legend(ax)
    if counts:
        _counts(ax, series)
    _footnote(ax, rows, lines=len(series) if counts else 0)
    return ax, series


def _line(ax: Axes, points: pd.DataFrame, label: str, **look: Any) -> None:
    ax.plot(points.index, points["value"], label=label, **look)
    if points["low"].notna().any():
        ax.fill_between(points.index, points["low"], points["high"], color=look["color"], alpha=0.13, linewidth=0)


def _mass_rows(frame: pd.DataFrame) -> pd.DataFrame:
    rows = frame[frame["quantity"].isin([*SEGMENTS, "mass_self_null"])]
    if not rows["quantity"].isin(list(SEGMENTS)).any():
        present = sorted(frame["quantity"].unique()) or "no rows at all"
        raise DriftlabError(f"no rows of any of {list(SEGMENTS)} to plot; the frame has {present}")
    return rows


def _masses(ax: Axes, rows: pd.DataFrame) -> None:
    found = {name: _whole(curve(rows, name)) for name in SEGMENTS if (rows["quantity"] == name).any()}
    drawn, most = list(found.values()), max(int(points["n"].max()) for points in found.values())
    for quantity, points in found.items():
        label, color, marker = SEGMENTS[quantity]
        n = points["n"][points["n"] > 0]
        if len(n) and n.min() < WHOLE * most:  # of the sink: a window leaves it behind
            label = f"{label} (n {n.min()} to {n.max()} of {most})"
        _line(ax, points, label, color=color, marker=marker)
    if (rows["quantity"] == "mass_self_null").any():
        null = _whole(curve(rows, "mass_self_null"))
        ax.plot(
            null.index, null["value"], color=SEGMENTS["mass_self"][1], linestyle="--", linewidth=0.9, label="self, null"
        )
    ax.set_ylim(0, 1.03)
    _depth_axis(ax, drawn)


def _depth_axis(ax: Axes, drawn: Sequence[pd.DataFrame]) -> None:
    first, last = min(points.index.min() for points in drawn), max(points.index.max() for points in drawn)
    step = math.ceil((last - first + 1) / 16)
    ax.set_xticks(range(first, last + 1, step))
    ax.set_xlim(first - 0.4, last + 0.4)


def _log_axis(ax: Axes) -> None:
    if not any((np.asarray(line.get_ydata(), dtype="float64") > 0).any() for line in ax.lines):
        return  # matplotlib has no log axis without a positive value
    ax.set_yscale("log", nonpositive="mask")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter("")


def _legend(ax: Axes, more: Sequence[Line2D] = ()) -> None:
    handles, _ = ax.get_legend_handles_labels()
    ax.legend(handles=[*handles, *more], loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0, handlelength=3)


def _counts(ax: Axes, series: Sequence[tuple[str, dict[str, Any], pd.DataFrame]]) -> None:
    """Write the n of each depth under the axis, one line a drafter in its colour."""
    ax.xaxis.labelpad = 4 + COUNT_HEIGHT * len(series)
    shown = set(ax.get_xticks())
    for place, (label, look, points) in enumerate(series):
        down = -18 - COUNT_HEIGHT * place
        _note(ax, f"n {label} ", (0, 0), (-6, down), xycoords="axes fraction", ha="right", color=look["color"])
        for depth, n in points["n"].items():
            if depth in shown:
                _note(ax, _short(n), (depth, 0), (0, down), ha="center", color=look["color"])


def _highest(series: Sequence[tuple[str, dict[str, Any], pd.DataFrame]]) -> float:
    """The largest value or upper end of an interval in any line; 0 if there is none."""
    tops = [points[["value", "high"]].max(axis=None) for _, _, points in series]
    return max([float(top) for top in tops if pd.notna(top)], default=0.0)


def _short(n: int) -> str:
    for size, unit in ((1_000_000, "M"), (1_000, "k")):
        if n >= size:
            return f"{n / size:.{1 if n < 10 * size else 0}f}{unit}"
    return str(n)


def _footnote(ax: Axes, rows: pd.DataFrame, lines: int = 0) -> None:
    """Write the caption under the axis label, below ``lines`` lines of counts."""
    words = _wrapped(rows, ax.get_position().width * ax.figure.get_figwidth())
    _note(ax, words, (0, 0), (0, -36 - COUNT_HEIGHT * lines), xycoords="axes fraction")


def _wrapped(rows: pd.DataFrame, inches: float) -> str:
    """Break the caption between its items only, for a width at the size of a footnote."""
    words = caption(rows).replace(" ", "\N{NO-BREAK SPACE}").replace("\N{NO-BREAK SPACE}·\N{NO-BREAK SPACE}", " · ")
    return textwrap.fill(words, max(20, int(inches * 20)), break_long_words=False)


def _note(ax: Axes, text: str, at: tuple[Any, Any], offset: tuple[Any, Any], **style: Any) -> None:
    size, color = style.pop("size", 6.5), style.pop("color", GREY)
    where = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "xytext": offset, "va": "top"}
    ax.annotate(text, at, fontsize=size, color=color, **{**where, **style})
