"""The two measurements that most work is made of, as tidy rows: replay a drafter, and probe it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from driftlab.acceptance import accept, drafting_of
from driftlab.draft import Feed, all_starts
from driftlab.drafter import Drafter
from driftlab.interventions import Intervention, intervened, key_of
from driftlab.probes import AttentionMass, SinkSearch, StateNorm, drafter_settings
from driftlab.progress import Progress, silent
from driftlab.results import VARYING, as_rows, combine
from driftlab.simulation import Expected, Simulation, simulate
from driftlab.stored import stored_chains, stored_trees
from driftlab.trajectory import Trajectory
from driftlab.trees import DynamicTree, Tree

MIXED = (*VARYING, "feed", "starts", "rule", "draft_temperature", "draft_top_k", "draft_top_p")
"""What may differ between the rows of one table: drafters, and which starts and feed a quantity is defined on."""

_NUCLEUS_RANKS = 512
"""draft logits kept where top_p alone cuts: it seldom reaches further"""


def settings(drafter: Drafter, trajectory: Trajectory, name: str, *, depth: int, feed: Feed) -> dict[str, Any]:
    """Return the settings columns of a run: what must agree before two of its numbers are compared."""
    recorded = trajectory.settings
    return {
        **drafter_settings(drafter),
        "target": trajectory.spec.label,
        "drafter": name,
        "depth_max": depth,
        "drafting": "chain",
        "feed": feed,
        "temperature": recorded["temperature"],
        "top_k": recorded["top_k"],
        "top_p": recorded["top_p"],
        "template": template_of(trajectory),
        "seed": recorded["seed"],
    }


def template_of(trajectory: Trajectory) -> str:
    """Return the ``template`` of a recording's rows: how its prompts were made, and whether its answers were given."""
    recorded = trajectory.settings
    return recorded["template"] + (", answers given" if recorded.get("answers") == "given" else "")


def replay_rows(
    drafter: Drafter,
    trajectory: Trajectory,
    name: str,
    *,
    depth: int,
    match_depth: int | None = None,
    rule: str = "argmax",
    draft_temperature: float | None = None,
    draft_top_k: int | None = None,
    draft_top_p: float | None = None,
    drafts: Path | None = None,
    interventions: Sequence[Intervention] = (),
    progress: Progress = silent,
) -> tuple[pd.DataFrame, Simulation | Expected]:
    """Replay drafting of K = ``depth`` tokens a round, arg-max or sampled (see :func:`accept`); return rows, simulation.

    ``match`` rows are over all starts (to ``match_depth`` if that is deeper: match does not depend on K), the acceptance
    rows and tau over the rounds of the walk; ``starts`` says which. ``drafts``: a folder in which drafts are kept and looked
    for (:mod:`driftlab.stored`). ``interventions`` are laid on the drafter for it; their key is in the column of that name.
    """
    given = (draft_temperature, draft_top_k, draft_top_p)
    drafting = drafting_of(trajectory, rule, *given)
    kept: dict[str, Any] = {}
    if drafting is not None:
        ranks = drafting.top_k or (_NUCLEUS_RANKS if drafting.top_p < 1 else 1)
        kept = {"temperatures": (drafting.temperature,), "top": ranks}
    elif drafts is not None:  # what costs little now and a drafting later
        kept = {"temperatures": (float(trajectory.settings["temperature"]) or 1.0,)}
    deepest = max(depth, match_depth or 0)
    with intervened(drafter, interventions):
        draft = stored_chains(drafts, drafter, trajectory, deepest, progress=progress, **kept)
    names = ("draft_temperature", "draft_top_k", "draft_top_p")
    sampled: dict[str, Any] = dict(zip(names, given, strict=True))
    simulation = simulate(accept(draft.upto(depth), trajectory, rule=rule, **sampled))
    plain = settings(drafter, trajectory, name, depth=depth, feed="text") | {"intervention": key_of(interventions)}
    # the match of arg-max drafts has nothing to do with how others are sampled
    matches = as_rows(list(accept(draft, trajectory).records()), **plain, rule="argmax", starts="all")
    return combine([matches, *_round_rows(simulation, plain)], varying=MIXED), simulation


def tree_rows(
    drafter: Drafter,
    trajectory: Trajectory,
    name: str,
    tree: Tree,
    *,
    drafts: Path | None = None,
    progress: Progress = silent,
) -> tuple[pd.DataFrame, Simulation | Expected]:
    """Replay drafting of a tree a round; return rows and simulation. ``drafting`` says which tree, with the nodes that stay."""
    draft = stored_trees(drafts, drafter, trajectory, tree, progress=progress)
    simulation = simulate(accept(draft, trajectory))
    label = tree.label
    if isinstance(tree, DynamicTree):  # what cannot be is cut, and said
        label = dataclasses.replace(tree, total=tree.size(drafter.config.draft_vocab_size)).label
    plain = settings(drafter, trajectory, name, depth=tree.depth, feed="own") | {"drafting": label}
    return combine(_round_rows(simulation, plain), varying=MIXED), simulation


def _round_rows(simulation: Simulation | Expected, plain: dict[str, Any]) -> list[pd.DataFrame]:
    """Rows of the rounds, and of the means over all starts."""
    common = {**plain, "rule": simulation.acceptance.rule}
    if (drafting := simulation.acceptance.drafting) is not None:
        names = ("draft_temperature", "draft_top_k", "draft_top_p")
        common |= dict(zip(names, (drafting.temperature, drafting.top_k, drafting.top_p), strict=True))
    records = [record for record in simulation.records() if record["quantity"] != "match"]
    over_all = ("all_starts_mean", "accept_all_starts")
    return [
        as_rows([r for r in records if (r["quantity"] in over_all) == everywhere], **common, starts=starts)
        for everywhere, starts in ((True, "all"), (False, "walk"))
    ]


def probe_rows(
    drafter: Drafter,
    trajectory: Trajectory,
    name: str,
    *,
    depth: int,
    feed: Feed = "own",
    recent: tuple[int, ...] = (8,),
    interventions: Sequence[Intervention] = (),
    progress: Progress = silent,
) -> pd.DataFrame:
    """Probe attention mass, entropy and norms at every start, by depth; on the drafter's own tokens by default.

    ``interventions`` are laid on first, so that what they leave is seen.
    """
    with (
        intervened(drafter, interventions),
        AttentionMass(drafter, recent=recent) as mass,
        StateNorm(drafter) as norm,
    ):
        all_starts(drafter, trajectory, depth, feed=feed, progress=progress)
    common = {**settings(drafter, trajectory, name, depth=depth, feed=feed), "starts": "all"}
    common["intervention"] = key_of(interventions)
    frame = combine([mass.frame(**common), norm.frame(**common)])
    category = {entry.id: entry.category for entry in trajectory.entries}
    return frame.assign(category=frame["prompt"].map(category).astype("str"))


def measure(
    drafter: Drafter,
    trajectory: Trajectory,
    name: str,
    depth: int,
    match_depth: int,
    recent: tuple[int, ...] = (8,),
    *,
    probe: bool = True,
) -> tuple[pd.DataFrame, Simulation]:
    """Replay arg-max drafts and, if wanted, probe: the rows of both, and the simulation."""
    rows, simulation = replay_rows(drafter, trajectory, name, depth=depth, match_depth=match_depth)
    if probe:
        rows = combine([rows, probe_rows(drafter, trajectory, name, depth=depth, recent=recent)], varying=MIXED)
    return rows, simulation


def measure_job(
    path: Path,
    name: str,
    depth: int,
    match_depth: int,
    recent: tuple[int, ...],
    probe: bool,
    report: Callable[[int, int], None],
) -> tuple[pd.DataFrame, Simulation]:
    """:func:`measure` for :func:`driftlab.workers.run_jobs`: recording and drafter by path or name. Here, where a worker
    need not import what draws or decodes.
    """
    trajectory = Trajectory.open(path)
    drafter = Drafter.load(name, trajectory).eval()
    result = measure(drafter, trajectory, name, depth, match_depth, recent, probe=probe)
    report(1, 1)
    return result


def drafter_sink(drafter: Drafter, trajectory: Trajectory, count: int = 5) -> list[tuple[int, float]]:
    """Return the positions with the drafter's largest mean mass at depth 1, as (position, mass)."""
    with SinkSearch(drafter) as search:
        all_starts(drafter, trajectory, 1)
    return search.top(count)
