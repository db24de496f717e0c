r"""What the estimators hide: how far other numbers are from tau, and what conditional acceptance is made of.

Notation. i: a start; m_ik: the probability of accepting depth k at i, given that all before it were accepted (0 or 1 for
arg-max drafts); C_ik = prod_{j <= k} m_ij, C_i0 = 1; v_i: the probability that a round of the walk starts at i (0 or 1 for
arg-max drafts); V_k: the starts with at least k comparable depths. Sums run over prompts together (pooled).

Estimators, all at one K (:func:`estimates`); those over all starts are over V_K, so that they differ in nothing but formula:

    tau                emitted tokens / verify rounds of the walk, without the rounds that the length limit cuts
    tau_uncensored     the same, rounds left out by where they start: what a decoder achieves
    all_starts_mean    1 + sum_k mean C_k       (a product along each path, then the mean; the product of the all-starts
                       conditional rates is the same number)
    product_of_rates   1 + sum_k prod_{j <= k} r_j,   r_j = mean m_j: what training logs print (NVIDIA-NeMo/Automodel#2959)
    iid_formula        (1 - r_1^(K+1)) / (1 - r_1)      (Leviathan et al. 2023)

    bias of each       value / tau_uncensored - 1

tau itself is no measure of bias: near the limit it knows only the rounds that fail early, so it is too low where answers are
short, and would make estimators that are right look too high.

Conditional acceptance at depth k on the walk (:func:`decompose`). Every mean is over V_k, cut rounds included: whether a
start is in V_k depends on its place and not on what was accepted there.

    ability                 A  = mean m_k                            the text is fed; every start counts
    conditional_all_starts  S  = sum C_k / sum C_{k-1}
    conditional_walk        c  = sum v C_k / sum v C_{k-1}
    survivor_selection      S - A  = cov(C_{k-1}, m_k) / mean C_{k-1}         starts that got so far are easier
    start_selection         W - A  = cov(v, m_k) / mean v,  W = sum v m_k / sum v       rounds start where a draft failed
    residual                (c - W) - (S - A): survivor selection among the walk's starts less that among all starts

    c = ability + survivor_selection + start_selection + residual, exactly; at depth 1 the second and the last are 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from driftlab.acceptance import accept
from driftlab.draft import Draft
from driftlab.errors import DriftlabError
from driftlab.intervals import Interval, limits, percentile_interval
from driftlab.recorded import Batch
from driftlab.simulation import Expected, Simulation, simulate
from driftlab.trajectory import Trajectory

Numbers = np.ndarray | np.floating
"""an array, or what numpy makes of one without axes"""
#: estimator -> which starts it is over
_OVER = {
    "tau": "walk",
    "tau_uncensored": "walk",
    "all_starts_mean": "all",
    "product_of_rates": "all",
    "iid_formula": "all",
}
#: of rates by depth, which trees and drafts fed with their own tokens do not have
_OF_RATES = ("product_of_rates", "iid_formula")
#: starts, and which of the sums below (1, m, C before, C after, then times v) is the weight of the sparsest mean in it
_TERMS = {
    "ability": ("all", 0),
    "conditional_all_starts": ("all", 2),
    "conditional_walk": ("walk", 6),
    "survivor_selection": ("all", 2),
    "start_selection": ("walk", 4),
    "residual": ("walk", 6),
}


# ---------------------------------------------------------------------------------------------- counts by start


def start_weights(simulation: Simulation | Expected) -> np.ndarray:
    """Return v, the probability that a round starts at each start, cut rounds included; float64 [batch start]."""
    table = simulation.acceptance
    v = np.zeros(tuple(table.rows.shape))
    for i, first in enumerate(table.rows[:, 0].tolist()):
        if isinstance(simulation, Expected):
            v[i, : len(simulation.starts[i])] = simulation.starts[i]
        else:
            v[i, [r.row - first for r in simulation.rounds[i]]] = 1
    return v


def round_counts(simulation: Simulation | Expected) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens emitted by, and number of, the rounds that count (tau's), by where they start; float64 [batch start]."""
    table, v = simulation.acceptance, start_weights(simulation)
    product, left = table.probability.numpy().cumprod(-1), table.remaining.numpy()
    last = np.take_along_axis(product, np.clip(left - 1, 0, table.depth - 1)[..., None], -1)[..., 0]
    all_left = np.where((left > 0) & (left <= table.depth), last, 0.0)
    stopped = _stopped(simulation)
    # all that was left was accepted: EOS without a bonus token, or a round that the limit cut
    emitted = product.sum(-1) + 1 - all_left * np.where(stopped, 1, left + 1)
    return v * emitted, v * (1 - np.where(stopped, 0, all_left))


def uncensored_starts(simulation: Simulation | Expected) -> np.ndarray:
    """Return whether rounds from each start count in ``tau_uncensored``; bool [batch start].

    Where more than K tokens are left, or EOS ended the text: a start's place decides, not what was accepted there.
    """
    return _stopped(simulation) | (simulation.acceptance.remaining.numpy() > simulation.depth)


def _stopped(simulation: Simulation | Expected) -> np.ndarray:
    return np.array([finish == "stop" for finish in simulation.acceptance.finish])[:, None]


# ---------------------------------------------------------------------------------------------- estimators of tau


def estimates(simulation: Simulation | Expected, *, samples: int = 2000, seed: int = 0) -> pd.DataFrame:
    """Return every estimator at this K, by name, with its bias relative to tau_uncensored.

    Columns: ``depth_max`` (K), ``quantity`` (the names above), ``value``, ``low``, ``high``, ``n`` (rounds or starts),
    ``starts``, and ``bias`` = value / tau_uncensored - 1 with its own interval ``bias_low``, ``bias_high``. Intervals are
    95 % bootstraps over prompts, both of a quotient on the same resampled prompts. Without the bias they are rows. Trees, and
    drafts fed with their own tokens, have no rates by depth: the last two are left out. The bias is NaN where every text was
    cut with K or fewer tokens left at its first round.
    """
    sums, depth = _estimator_sums(simulation), simulation.depth
    counts = sums.sum(0)
    lines = []
    by_depth = simulation.acceptance.tree is None and simulation.acceptance.feed == "text"
    for name, starts in _OVER.items():
        if name in _OF_RATES and not by_depth:
            continue
        over = {"tau": 1, "tau_uncensored": 3}.get(name, 4)
        value = _bootstrap(sums, lambda s, name=name: _estimators(s, depth)[name], (over,), samples, seed)
        value = value.within(*limits(name, depth))
        bias = _bootstrap(sums, lambda s, name=name: _bias(_estimators(s, depth), name), (over, 3), samples, seed)
        line = {"depth_max": depth, "quantity": name, **value._asdict(), "n": float(counts[over]), "starts": starts}
        lines.append({**line, "bias": bias.value, "bias_low": bias.low, "bias_high": bias.high})
    return pd.DataFrame(lines)


def estimates_by_depth(
    draft: Draft,
    data: Trajectory | Batch,
    *,
    depths: Sequence[int] | None = None,
    samples: int = 2000,
    seed: int = 0,
    **how: Any,
) -> pd.DataFrame:
    """Return :func:`estimates` for K = 1..``draft.depth`` (or ``depths``) from one table drafted at the largest K.

    ``how``: passed to :func:`accept`.

    Raises:
        DriftlabError: a draft that was not fed the text (its rates at depth 2 and beyond are on other tokens).
    """
    if draft.feed != "text":
        raise DriftlabError(f"rates over all starts want a draft with feed='text', this one has feed={draft.feed!r}")
    chosen = range(1, draft.depth + 1) if depths is None else depths
    tables = (simulate(accept(draft.upto(depth), data, **how)) for depth in chosen)
    return pd.concat([estimates(table, samples=samples, seed=seed) for table in tables], ignore_index=True)


def _estimator_sums(simulation: Simulation | Expected) -> np.ndarray:
    """[prompt, quantity]: emitted, rounds, both uncensored, starts in V_K, then over V_K the sums of m_k and of C_k."""
    table = simulation.acceptance
    emitted, rounds = round_counts(simulation)
    known = uncensored_starts(simulation)
    full = table.valid[..., -1].numpy()
    m = table.probability.numpy() * full[..., None]
    five = [(x * w).sum(1) for w in (1, known) for x in (emitted, rounds)]
    return np.concatenate([np.stack([*five, full.sum(1)], 1), m.sum(1), m.cumprod(-1).sum(1)], 1)


def _estimators(sums: np.ndarray, depth: int) -> dict[str, Numbers]:
    """By name, from summed ``sums [*batch quantity]``."""
    emitted, rounds, known_emitted, known_rounds, starts = np.moveaxis(sums[..., :5], -1, 0)
    rates = _ratio(sums[..., 5 : 5 + depth], starts[..., None])
    return {
        "tau": _ratio(emitted, rounds),
        "tau_uncensored": _ratio(known_emitted, known_rounds),
        "all_starts_mean": 1 + _ratio(sums[..., 5 + depth :], starts[..., None]).sum(-1),
        "product_of_rates": 1 + rates.cumprod(-1).sum(-1),
        "iid_formula": (rates[..., :1] ** np.arange(depth + 1)).sum(-1),
    }


def _bias(values: dict[str, Numbers], name: str) -> Numbers:
    return _ratio(values[name], values["tau_uncensored"]) - 1


# ---------------------------------------------------------------------------------------------- conditional acceptance


def decompose(simulation: Simulation | Expected, *, samples: int = 2000, seed: int = 0) -> pd.DataFrame:
    """Return by depth the conditional acceptance on the walk and on all starts, and the terms that the first is made of.

    Wants drafts that were fed the text. Columns ``depth``, ``quantity`` (names and equations above), ``value``, ``low``,
    ``high`` (95 % bootstrap over prompts), ``n`` and ``starts``: rows for ``results.as_rows``, pooled over prompts. ``n``
    is the sum of the weights of the sparsest mean in it: of 1, of v, of C_{k-1}, or of v C_{k-1}. NaN where that is 0.
    The walk's is ``accept_conditional`` of a simulation, by another way.
    Under rule "block" m depends on earlier depths too: there the ability is not the drafter's alone.

    Raises:
        DriftlabError: trees, or drafts that were fed with their own tokens.
    """
    if simulation.acceptance.tree is not None or simulation.acceptance.feed != "text":
        raise DriftlabError(
            "conditional acceptance is split for chains that were fed the text: trees have no rate by depth"
        )
    table, v = simulation.acceptance, start_weights(simulation)
    m, valid = table.probability.numpy(), table.valid.numpy()
    product = np.concatenate([np.ones((*m.shape[:2], 1)), m.cumprod(-1)], -1)
    lines = []
    for k in range(table.depth):
        before, after, here = product[..., k] * valid[..., k], product[..., k + 1], valid[..., k]
        parts = (here, m[..., k], before, after)
        sums = np.stack([(x * w).sum(1) for w in (1, v) for x in parts], 1)
        for name, (starts, over) in _TERMS.items():
            value = _bootstrap(sums, lambda s, name=name: _terms(s)[name], (over,), samples, seed).within(*limits(name))
            n = float(sums[:, over].sum())
            lines.append({"depth": k + 1, "quantity": name, **value._asdict(), "n": n, "starts": starts})
    return pd.DataFrame(lines)


def _terms(sums: np.ndarray) -> dict[str, Numbers]:
    """By name, from summed ``[*batch 8]``: over V_k the sums of 1, m_k, C_{k-1}, C_k, then of the same times v."""
    one, m, before, after, v_one, v_m, v_before, v_after = np.moveaxis(sums, -1, 0)
    ability, ability_walk = _ratio(m, one), _ratio(v_m, v_one)
    everywhere, walk = _ratio(after, before), _ratio(v_after, v_before)
    return {
        "ability": ability,
        "conditional_all_starts": everywhere,
        "conditional_walk": walk,
        "survivor_selection": everywhere - ability,
        "start_selection": ability_walk - ability,
        "residual": (walk - ability_walk) - (everywhere - ability),
    }


# ---------------------------------------------------------------------------------------------- arithmetic


def _ratio(top: Numbers, bottom: Numbers) -> np.ndarray:
    """Divide; NaN where the divisor is 0."""
    top, bottom = np.broadcast_arrays(np.asarray(top, dtype=float), np.asarray(bottom, dtype=float))
    return np.divide(top, bottom, out=np.full(top.shape, np.nan), where=bottom != 0)


def _bootstrap(
    sums: np.ndarray, statistic: Callable[[np.ndarray], Numbers], over: tuple[int, ...], samples: int, seed: int
) -> Interval:
    """``statistic`` of the column sums of ``sums [prompt quantity]``, with its interval over resampled prompts.

    ``over``: the columns it divides by. The fewest prompts that have anything in one of them say how wide the interval is.
    """

    def resampled(chosen: np.ndarray) -> Numbers:
        return statistic(np.stack([column[chosen].sum(1) for column in sums.T], -1))

    value, informative = float(statistic(sums.sum(0))), int((sums[:, over] > 0).sum(0).min())
    return percentile_interval(value, resampled, len(sums), informative, samples, seed, 0.95)
