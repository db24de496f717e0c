"""Throughput by concurrency: the announcement's figure 2 and the cost model of it.

Reads throughput.csv. The speed-up is the ratio of the two lines at each concurrency.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from driftlab.plotting import GREY, HUES
from paper_figs import style

TABLES = ("throughput",)
LOOKS = {"none": (GREY, "o"), "EAGLE 3.1": (HUES[1], "D")}


def speedup(frame: pd.DataFrame) -> pd.DataFrame:
    """Return kind, concurrency and the ratio of EAGLE 3.1 to no speculation."""
    wide = frame.pivot(index=["kind", "concurrency"], columns="drafter", values="value")
    return (wide["EAGLE 3.1"] / wide["none"]).rename("value").reset_index()


def draw(data: Path = style.DATA) -> Figure:
    """Draw tokens a second and user, and the speed-up: points are published, lines the model's."""
    table = style.read(data, "throughput")
    figure = style.figure(3.6)
    top, bottom = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": (3, 2)})
    for drafter, (color, marker) in LOOKS.items():
        for kind, look in (("published", {"linestyle": "none", "marker": marker}), ("model", {"linestyle": "-"})):
            rows = table.frame.query("drafter == @drafter and kind == @kind")
            top.plot(rows["concurrency"], rows["value"], color=color, label=f"{drafter}, {kind}", **look)
    ratios = speedup(table.frame)
    for kind, look in (("published", {"linestyle": "none", "marker": "D"}), ("model", {"linestyle": "-"})):
        rows = ratios[ratios["kind"] == kind]
        bottom.plot(rows["concurrency"], rows["value"], color=HUES[1], label=f"EAGLE 3.1, {kind}", **look)
    wide = ratios.pivot(index="concurrency", columns="kind", values="value").dropna()
    for users, value, modelled in zip(wide.index, wide["published"], wide["model"], strict=True):
        aside = (0, 4) if value > modelled else (0, -10)  # on the side that the line is not
        bottom.annotate(f"{value:.2f}", (users, value), aside, textcoords="offset points", ha="center", fontsize=6)
    ticks = sorted(table.frame["concurrency"].unique())
    bottom.set_xscale("log", base=2)
    bottom.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    bottom.minorticks_off()
    top.set(ylabel="tokens / s / user", ylim=(0, None))
    bottom.set(xlabel="concurrent requests", ylabel="speed-up", ylim=(1, 2.35))
    style.legend(figure, [top])
    style.note(figure, table.words)
    return figure
