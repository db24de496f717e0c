"""What stands beside tau in every report: other estimators and their bias, paired tests, repetition, buckets, selection."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pandas as pd

from driftlab.breakdown import buckets, repetition_records
from driftlab.comparisons import compare
from driftlab.estimators import decompose, estimates
from driftlab.intervals import weighted_mean
from driftlab.results import as_rows
from driftlab.simulation import Expected, Simulation
from driftlab.trajectory import Trajectory

#: title of a table -> what its columns mean, for whoever shows it
LEGEND = {
    "Estimators beside tau": "bias = value / tau_uncensored - 1, that of tau too: the length limit lowers tau on average, "
    "and by chance not always where rounds are few. n: rounds (walk) or starts (all).",
    "Paired comparisons of tau": "difference: tau of name - tau of base, same prompts. p: of swapping the two labels prompt "
    "by prompt; p_adjusted: for the number of comparisons (Holm); this one decides. low, high: 95 % bootstrap over prompts, "
    "another method, so with few prompts it can leave 0 out where p is above .05. mdd: smallest difference that these "
    "prompts show in four of five cases, one test at .05. reason: why a number is missing or cannot be small.",
    "How the text repeats itself": "repeated_ngrams: share of 4-grams that occurred earlier in the answer; periodic_tail: "
    "share of tokens in an end that loops with a period of at most 8.",
    "tau by": "rounds belong where they start; those with K or fewer tokens left are left out, as in tau_uncensored. One "
    "prompt has no interval, and that of a few says little.",
    "Conditional acceptance, split": "conditional_walk = ability + survivor_selection + start_selection + residual. They "
    "rest on: n_starts (ability), n_reached (conditional_all_starts, survivor_selection), n_rounds (start_selection), "
    "n_rounds_reached (conditional_walk, residual).",
}
_N_OF_TERM = {
    "n_starts": "ability",
    "n_reached": "conditional_all_starts",
    "n_rounds": "start_selection",
    "n_rounds_reached": "conditional_walk",
}


def legend(titles: Iterable[str]) -> list[str]:
    """Return what the columns of these tables mean, each once."""
    return list(dict.fromkeys(words for title in titles for name, words in LEGEND.items() if title.startswith(name)))


def account(
    simulations: Mapping[str, Simulation | Expected], trajectory: Trajectory, *, base: str | None = None
) -> dict[str, pd.DataFrame]:
    """Return the tables that every report of replays on one recording shows, by title.

    Args:
        simulations: drafter to replay.
        trajectory: what was replayed.
        base: the drafter that others are compared with; default the first.
    """
    tables = {"Estimators beside tau": _stacked({name: estimates(x) for name, x in simulations.items()})}
    if len(simulations) > 1:
        tables["Paired comparisons of tau"] = compare(simulations, base or next(iter(simulations)))
    repeated = as_rows(list(repetition_records(trajectory)))
    tables["How the text repeats itself"] = weighted_mean(repeated, ["quantity", "window"])
    return {title: _whole_counts(table) for title, table in tables.items()}


def details(
    simulations: Mapping[str, Simulation | Expected],
    trajectory: Trajectory,
    *,
    trained_lengths: Mapping[str, int] | None = None,
) -> dict[str, pd.DataFrame]:
    """Return the longer tables: tau by position, context and category, and what conditional acceptance is made of.

    Args:
        simulations: drafter to replay.
        trajectory: what was replayed.
        trained_lengths: longest sequence that each drafter was trained on, in tokens; 0: unknown.
    """
    known, tables = trained_lengths or {}, {}
    for by in ("position", "context", "category"):
        length = known if by == "context" else {}
        table = _stacked({name: buckets(x, by, trained_length=length.get(name, 0)) for name, x in simulations.items()})
        idle = {"position": ["beyond_trained"], "category": ["begin", "end", "beyond_trained"]}.get(by, [])
        tables[f"tau by {by}"] = table.drop(columns=["by", *idle])
    chains = {name: x for name, x in simulations.items() if x.acceptance.tree is None}
    if chains:
        split = _stacked({name: decompose(x) for name, x in chains.items()})
        wide = split.pivot(index=["drafter", "depth"], columns="quantity")
        rests = wide["n"].rename(columns={term: n for n, term in _N_OF_TERM.items()})[list(_N_OF_TERM)]
        tables["Conditional acceptance, split"] = pd.concat([wide["value"], rests], axis=1).reset_index()
    return {title: _whole_counts(table) for title, table in tables.items()}


def _whole_counts(table: pd.DataFrame) -> pd.DataFrame:
    """Make counts integers where all of a column are whole; expected ones are not."""
    names = [name for name in table.columns if name in ("n", "rounds", *_N_OF_TERM)]
    whole = [name for name in names if table[name].notna().all() and (table[name] % 1 == 0).all()]
    return table.astype(dict.fromkeys(whole, "int64"))


def _stacked(frames: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    named = [frame.assign(drafter=name) for name, frame in frames.items()]
    whole = pd.concat(named, ignore_index=True)
    return whole[["drafter", *(column for column in whole.columns if column != "drafter")]]
