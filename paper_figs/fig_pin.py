"""Pins and their controls: does acceptance follow the magnitude, or the attention?

Reads pin.csv and published.csv (table 4 of arXiv 2605.09992: the magnitude pin). ``pin:equal`` is the attention pin's control.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from driftlab.errors import DriftlabError
from paper_figs import style

TABLES = ("published", "pin")
NAMES = {
    "plain": "plain",
    "magnitude:fused": "magnitude of fused",
    "magnitude:depth1": "magnitude of depth 1",
    "gain": "norm's gain only",
    "held": "feedback held",
    "pin:sink": "pin sink",
    "pin:equal": "control: pin equal",
    "pin:sink:state=rescaled": "pin sink, rescaled",
    "sink:drop": "drop sink",
}


def draw(data: Path = style.DATA) -> Figure:
    """Draw published points above, ours below: tau, and the match at depths 2 to K."""
    published, ours = (style.read(data, name) for name in TABLES)
    theirs = published.frame[published.frame["claim"] == "pin"]
    theirs = theirs.assign(setting=theirs["setting"].map(lambda key: NAMES.get(key, key)))
    mine = ours.frame.assign(setting=ours.frame["setting"].map(lambda key: NAMES.get(key, key)))
    if mine["tau"].notna().sum() == 0:
        raise DriftlabError("pin has no value at all")
    settings = mine["setting"].nunique()
    figure = style.figure(2.1 + 0.26 * settings)
    axes = figure.subplot_mosaic([["published", "published"], ["tau", "match"]], height_ratios=(2.2, settings))
    style.dots(axes["published"], theirs, "setting")
    axes["published"].set_xlabel("accept length")
    style.title(axes["published"], "published, Llama 3.1 8B")
    style.dots(axes["tau"], mine, "setting", y="tau")
    axes["tau"].set_xlabel("tau")
    style.title(axes["tau"], "ours")
    style.dots(axes["match"], mine, "setting", y="match_2_to_K", low="match_low", high="match_high")
    axes["match"].set_yticklabels([])
    axes["match"].set_xlabel("match, 2 to K")
    style.legend(figure, [axes["tau"]], columns=3)
    sinks = mine.dropna(subset="sink").drop_duplicates("drafter")
    told = ", ".join(f"{style.short(r.drafter)} {r.sink:g} ({r.sink_mass:.3f})" for r in sinks.itertuples())
    style.note(
        figure, "Published: no interval stated", f"Ours: {ours.words}", f"rounds: {style.span(mine['rounds'].dropna())}",
        f"pinned position, and its share of depth 1's mass: {told}" if told else "",
    )  # fmt: skip
    return figure
