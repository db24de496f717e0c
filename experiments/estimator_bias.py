"""What do other estimators say in place of tau, by K, on one and the same real text? And what is conditional acceptance?

    python experiments/estimator_bias.py [--drafters smollm2-eagle31 FOLDER ...] [--recording FOLDER] [--depth 10]

Drafts once at the largest K from every start of a recording (default: 24 of the project's prompts, 128 tokens, greedy), and
compares, for every K, tau of the walk, the mean over all starts, the product of the rates by depth and the formula for
independent acceptance with tau_uncensored: the walk's tau with rounds left out by where they start, which the length limit
does not bias. The text and the drafter are the same for all K, so whatever changes with K in the acceptance of the
*first* draft changes because rounds start elsewhere. Writes the rows (OUT.csv, with OUT.run.json) and a figure (OUT.png).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from driftlab import Drafter, ProgressBar, Target, Trajectory, accept, all_starts, load_prompts, simulate
from driftlab.breakdown import repetition_records
from driftlab.draft import Draft
from driftlab.estimators import decompose, estimates_by_depth, start_weights
from driftlab.intervals import bootstrap_difference, weighted_mean
from driftlab.measure import MIXED, settings
from driftlab.plotting import COLORS, FEW, GREY, save_panel, theme
from driftlab.prompts import evenly
from driftlab.results import as_rows, combine, provenance, write_rows
from driftlab.simulation import Expected, Simulation

REFERENCE = "tau_uncensored"
ESTIMATORS = {
    REFERENCE: "tau_uncensored (walk)",
    "tau": "tau (walk)",
    "all_starts_mean": "all starts",
    "product_of_rates": "product of rates",
    "iid_formula": "(1 - r^(K+1)) / (1 - r)",
}
TERMS = {
    "conditional_walk": "conditional, walk",
    "conditional_all_starts": "conditional, all starts",
    "ability": "ability (text-fed, all starts)",
    "survivor_selection": "survivor selection",
    "start_selection": "start selection",
    "residual": "residual",
}
BIAS, CHANGE = "bias_", "first_draft_change"
Firsts = tuple[np.ndarray, np.ndarray]


def main(
    recording: Path | None = None,
    drafters: tuple[str, ...] = ("smollm2-eagle31",),
    prompts: int = 24,
    max_new_tokens: int = 128,
    depth: int = 10,
    terms_depth: int = 8,
    out: Path = Path("runs/estimator_bias"),
) -> None:
    """Measure every drafter on one recording; print the tables, write rows and figure."""
    bar = ProgressBar()
    if recording is None:
        target = Target.load("smollm2", progress=bar)
        chosen = evenly(load_prompts("default"), prompts)
        trajectory = target.record(chosen, max_new_tokens=max_new_tokens, progress=bar)
    else:
        trajectory = Trajectory.open(recording)
    frames = []
    for name in drafters:
        drafter, label = Drafter.load(name, trajectory).eval(), Path(name).name
        draft = all_starts(drafter, trajectory, depth, progress=bar)
        rows = measure(draft, trajectory, min(terms_depth, depth))
        common = {**settings(drafter, trajectory, label, depth=depth, feed="text"), "rule": "argmax"}
        frames.append(as_rows(rows, **{key: value for key, value in common.items() if key != "depth_max"}))
        tell(label, frames[-1])
    text = weighted_mean(as_rows(repetition_records(trajectory)), by=["quantity"]).set_index("quantity")["value"]
    print(
        f"{len(trajectory)} texts, {trajectory.answer_tokens} answer tokens; {text['repeated_ngrams']:.1%} of their 4-grams "
        f"occurred earlier, {text['periodic_tail']:.1%} of their tokens are in a periodic end"
    )
    whole = combine(frames, varying=(*MIXED, "depth_max"))
    stated = {
        "recording": trajectory.path.name,
        "drafters": list(drafters),
        "depth": depth,
        "text": trajectory.settings,
    }
    write_rows(out.with_name(f"{out.name}.csv"), whole, provenance(stated))
    save_panel(draw(whole), out.with_name(f"{out.name}.png"))


def measure(draft: Draft, trajectory: Trajectory, terms_depth: int, *, samples: int = 2000) -> pd.DataFrame:
    """Return rows by K (``depth_max``): estimators, biases, acceptance of a round's first draft and its change from K = 1
    (paired interval); at ``terms_depth`` all terms.
    """
    estimated = estimates_by_depth(draft, trajectory, samples=samples)
    bias = estimated.assign(quantity=BIAS + estimated["quantity"], value=estimated["bias"])
    bias = bias.assign(low=estimated["bias_low"], high=estimated["bias_high"])
    frames = [frame.drop(columns=["bias", "bias_low", "bias_high"]).assign(depth=0) for frame in (estimated, bias)]
    shallow: Firsts | None = None
    for k in range(1, draft.depth + 1):
        simulation = simulate(accept(draft.upto(k), trajectory))
        terms = decompose(simulation, samples=samples).assign(depth_max=k)
        first = (terms["depth"] == 1) & terms["quantity"].isin(["conditional_walk", "ability"])
        frames.append(terms if k == terms_depth else terms[first])
        passed, judged = firsts(simulation)
        shallow = shallow or (passed, judged)
        change = bootstrap_difference(passed, judged, *shallow, samples=samples)
        line = {"depth_max": k, "depth": 1, "quantity": CHANGE, **change._asdict(), "n": judged.sum(), "starts": "walk"}
        frames.append(pd.DataFrame([line]))
    return pd.concat(frames, ignore_index=True)


def firsts(simulation: Simulation | Expected) -> Firsts:
    """Per prompt: rounds whose first draft was accepted, and rounds that had one to judge, cut rounds included."""
    table = simulation.acceptance
    v = start_weights(simulation) * table.valid[..., 0].numpy()
    return (v * table.probability[..., 0].numpy()).sum(1), v.sum(1)


def by_k(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per K: tau_uncensored and its interval, the others and their biases relative to it in %, acceptance of the first
    draft of a round.
    """
    table = _wide(rows[rows["depth"] == 0], "depth_max")
    reference = rows[rows["quantity"] == REFERENCE].set_index("depth_max")
    shown = {REFERENCE: table[REFERENCE], "low": reference["low"], "high": reference["high"]}
    for name in ESTIMATORS:
        if name != REFERENCE:
            shown |= {name: table[name], f"{name} %": 100 * table[BIAS + name]}
    first = rows[(rows["depth"] == 1) & (rows["quantity"] == "conditional_walk")]
    shown["first_draft"] = first.set_index("depth_max")["value"]
    return pd.DataFrame(shown)


def by_depth(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per depth: the terms of conditional acceptance."""
    return _wide(_term_rows(rows), "depth")[list(TERMS)]


def tell(label: str, rows: pd.DataFrame) -> None:
    """Print both tables, and what the acceptance of the first draft does."""
    table, terms = by_k(rows), by_depth(rows)
    print(f"\n{label}, by K (%: bias relative to {REFERENCE})\n{table.to_string(float_format='%.3f')}")
    print(f"\n{label}, conditional acceptance by depth at K = {len(terms)}\n{terms.to_string(float_format='%.3f')}")
    last = rows[(rows["quantity"] == CHANGE) & (rows["depth_max"] == rows["depth_max"].max())].iloc[0]
    print(
        f"first draft of a round, K = 1 to {last['depth_max']}: {table['first_draft'].iloc[0]:.3f} to "
        f"{table['first_draft'].iloc[-1]:.3f}, change {last['value']:+.3f} [{last['low']:+.3f}, {last['high']:+.3f}]; over "
        f"all starts {terms['ability'].iloc[0]:.3f} at every K\n",
        flush=True,
    )


def draw(rows: pd.DataFrame) -> Figure:
    """One line of four panels per drafter: estimators and biases by K, the first draft by K, terms by depth."""
    drafters = list(rows.groupby(["variant", "drafter"], sort=False))
    with theme():
        figure = Figure(figsize=(14, 3.4 * len(drafters)), layout="constrained")
        grid = figure.subplots(len(drafters), 4, squeeze=False)
        for (taus, biases, first, deep), ((_, name), mine) in zip(grid, drafters, strict=True):
            for place, (quantity, label) in enumerate(ESTIMATORS.items()):
                _line(taus, mine[mine["quantity"] == quantity], "depth_max", COLORS[place], label, band=place == 0)
                if place:
                    _line(
                        biases, mine[mine["quantity"] == BIAS + quantity], "depth_max", COLORS[place], label, scale=100
                    )
            _line(first, mine[mine["quantity"] == CHANGE], "depth_max", COLORS[0], "rounds of the walk")
            terms = _term_rows(mine)
            terms = terms[(terms["quantity"] != CHANGE) & (terms["n"] >= FEW)]
            for place, (quantity, label) in enumerate(TERMS.items()):
                _line(deep, terms[terms["quantity"] == quantity], "depth", COLORS[place], label)
            taus.set(title=name, xlabel="K", ylabel="tokens per round")
            biases.set(title=f"bias relative to {REFERENCE}", xlabel="K", ylabel="%")
            first.set(title="first draft of a round", xlabel="K", ylabel="acceptance, change from K = 1")
            deep.set(title=f"conditional acceptance, K = {mine['depth'].max()}", xlabel=f"depth (n of {FEW} or more)")
            for ax in (biases, first, deep):
                ax.axhline(0, color=GREY, linewidth=0.8)
            for ax in (taus, biases, deep):
                ax.legend(fontsize=7)
    return figure


def _line(ax: Axes, points: pd.DataFrame, x: str, color: Any, label: str, *, band: bool = True, scale: int = 1) -> None:
    points = points.sort_values(x)
    ax.plot(points[x], scale * points["value"], color=color, label=label, marker="o", markersize=3)
    if band:
        ends = (scale * points["low"], scale * points["high"])
        ax.fill_between(points[x], *ends, color=color, alpha=0.15, linewidth=0)


def _term_rows(rows: pd.DataFrame) -> pd.DataFrame:
    deep = rows.loc[rows["quantity"] == "residual", "depth_max"].iloc[0]
    return rows[(rows["depth_max"] == deep) & (rows["depth"] > 0)]


def _wide(rows: pd.DataFrame, index: str, column: str = "value") -> pd.DataFrame:
    return rows.pivot(index=index, columns="quantity", values=column)


if __name__ == "__main__":
    tyro.cli(main)
