"""What stands beside tau in every report: other estimators and their bias, paired tests, repetition, buckets, selection."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from driftlab.breakdown import buckets, repetition_records
from driftlab.comparisons import compare
from driftlab.estimators import decompose, estimates
from driftlab.intervals import weighted_mean
from driftlab.results import as_rows
from driftlab.simulation import Expected, Simulation
from driftlab.trajectory import Trajectory


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
    return tables


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
        tables[f"tau by {by}"] = _stacked(
            {name: buckets(x, by, trained_length=length.get(name, 0)) for name, x in simulations.items()}
        )
    chains = {name: x for name, x in simulations.items() if x.acceptance.tree is None}
    if chains:
        split = _stacked({name: decompose(x) for name, x in chains.items()})
        tables["Conditional acceptance, split"] = split.pivot(
            index=["drafter", "depth"], columns="quantity", values="value"
        ).reset_index()
    return tables


def _stacked(frames: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    named = [frame.assign(drafter=name) for name, frame in frames.items()]
    whole = pd.concat(named, ignore_index=True)
    return whole[["drafter", *(column for column in whole.columns if column != "drafter")]]
