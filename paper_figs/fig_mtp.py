"""The pattern in a multi-token-prediction head, as published (no numbers of ours).

Reads published_mtp.csv: ranges of attention mass in prefill and at the first drafted token.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from driftlab.plotting import SEGMENTS
from paper_figs import style

TABLES = ("published_mtp",)


def draw(data: Path = style.DATA) -> Figure:
    """Draw each range as a bar from its low to its high end, a group a segment."""
    table = style.read(data, "published_mtp")
    figure = style.figure(2.5)
    ax = figure.subplots()
    places = list(dict.fromkeys(table.frame["place"]))
    segments = list(dict.fromkeys(table.frame["segment"]))
    for number, segment in enumerate(segments):
        _, color, _ = SEGMENTS[f"mass_{segment}"]
        rows = table.frame[table.frame["segment"] == segment]
        at = [places.index(place) + 0.2 * (number - 0.5) for place in rows["place"]]
        ax.bar(at, rows["high"] - rows["low"], bottom=rows["low"], width=0.16, color=color, label=f"mass on {segment}")
        for x, row in zip(at, rows.itertuples(), strict=True):
            ax.annotate(
                f"{row.low:g}–{row.high:g}", (x, row.high), (0, 2), textcoords="offset points", ha="center", fontsize=6
            )
    ax.set_xticks(range(len(places)), places)
    ax.set_xlim(-0.6, len(places) - 0.4)
    ax.set(ylabel="attention mass, %", ylim=(0, 55))
    ax.legend(loc="upper left", ncols=2)
    style.note(figure, "Published numbers only, drawn as the ranges they are given as", table.words)
    return figure
