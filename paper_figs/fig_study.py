"""The study: drafters that differ in one thing, several trainings each. State, trained depth, and what is accepted.

Reads study.csv. Top: RMS of the feedback by depth; small points are single trainings, lines their mean. Middle: match of all
starts, text-fed, for drafters trained to 2, 4 and 8 steps. Bottom: tau of every training, with its interval over prompts.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from driftlab.plotting import HUES, STYLES
from paper_figs import style

TABLES = ("study",)
TTT = {2: (":", "o"), 4: ("--", "s"), 8: (STYLES[0], "^")}
HUE = {"eagle3": HUES[0], "eagle31": HUES[1]}


def draw(data: Path = style.DATA) -> Figure:
    """Draw the three panels."""
    table = style.read(data, "study")
    frame = table.frame
    figure = style.figure(5.6)
    state, depth, tau = figure.subplots(3, 1, height_ratios=(1.2, 1.2, 1))
    looks = style.looks(frame["drafter"])
    common = frame[frame["ttt"] == 4]
    for drafter, rows in common[common["quantity"] == "rms_feedback"].groupby("drafter", sort=False):
        look = looks[drafter]
        mean = rows.groupby("depth", as_index=False)["value"].mean()
        style.line(state, mean, drafter, **look | {"marker": ""})
        state.plot(
            rows["depth"], rows["value"], label=f"_{drafter}", linestyle="none",
            marker=look["marker"], color=look["color"], markersize=2.2, alpha=0.7,
        )  # fmt: skip
    highest = common.loc[common["quantity"] == "rms_feedback", "value"].max()
    state.set(yscale="log", ylabel="RMS of the feedback", ylim=(None, 60 * highest))  # room for the legend
    style.title(state, "state, TTT 4")
    style.depth_axis(state, common.loc[common["quantity"] == "rms_feedback", "depth"])
    state.legend(ncols=2, fontsize=6, loc="upper right")
    trained = frame[(frame["quantity"] == "match") & (frame["seed"] == 0) & frame["drafter"].isin(HUE)]
    for (drafter, ttt), rows in trained.groupby(["drafter", "ttt"], sort=True):
        line, marker = TTT[ttt]
        style.line(
            depth, rows, f"{drafter}, TTT {ttt}", color=HUE[drafter], linestyle=line, marker=marker, markersize=2.5
        )
    depth.set(ylim=(0, 1.25 * trained["value"].max()), ylabel="match (all starts)")
    style.title(depth, "trained depth, seed 0")
    style.depth_axis(depth, trained["depth"])
    depth.legend(ncols=2, fontsize=6, loc="upper right")
    accepted = common[common["quantity"] == "tau"]
    names = list(dict.fromkeys(accepted["drafter"]))
    for drafter, rows in accepted.groupby("drafter", sort=False):
        seeds = sorted(rows["seed"])
        at = names.index(drafter) + 0.22 * (rows["seed"].map(seeds.index) - (len(seeds) - 1) / 2)
        look = looks[drafter]
        ends = tau.hlines(at, rows["low"], rows["high"], color=look["color"], linewidth=0.9, alpha=0.75)
        ends.set_label(f"_{drafter}")
        tau.plot(rows["value"], at, linestyle="none", marker=look["marker"], color=look["color"], label=drafter)
    tau.set_yticks(range(len(names)), names)
    tau.set_ylim(len(names) - 0.5, -0.5)
    tau.grid(False, axis="y")
    tau.grid(True, axis="x")
    tau.set_xlabel("tau, TTT 4")
    counts = accepted.groupby("drafter")["seed"].nunique()
    style.note(figure, table.words, f"trainings of each: {style.span(counts)}")
    return figure
