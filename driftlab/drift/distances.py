r"""How far attention moves with depth: distances of mass vectors at equal position, and what moves without any depth.

With m_k(t) the mass vector [SINK, PROMPT, CONTEXT, SELF] of row t at depth k, and r_j(s) the depth-1 mass of row s on its
last j keys,

    drift_k(t) = d(m_k(t), m_1(t + k - 1) with r_{k-1}(t + k - 1) moved from CONTEXT to SELF)
    null_k(t)  = d(m_1(s) relabelled so, m_1(s - lag) relabelled so),      s = t + k - 1.

Both rows of a drift stand at one position, see as many keys and are fed one token (feed "text"): only their states and the
states behind the last k - 1 keys differ. Both rows of a null come from target states alone. d is

    TV(p, q) = 1/2 sum |p - q|   in 0..1,      JS(p, q) = H((p + q) / 2) - (H(p) + H(q)) / 2   nats, in 0..ln 2,

over the segments and what a learned sink logit takes (1 - sum). Each is taken per start and head, and only then averaged: the
distance of averages would let heads that move to and fro cancel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from driftlab.drift.record import Record
from driftlab.errors import DriftlabError
from driftlab.intervals import Interval, percentile_interval
from driftlab.segments import Segment

_ROUNDING = 1e-4
Distance = Literal["tv", "js"]


def total_variation(
    p: Float[np.ndarray, "*batch seg"], q: Float[np.ndarray, "*batch seg"]
) -> Float[np.ndarray, "*batch"]:
    """Half the sum of absolute differences, 0..1, over the last axis and what is missing to 1."""
    p, q = _whole(p), _whole(q)
    return np.asarray(np.abs(p - q).sum(-1) / 2)


def jensen_shannon(
    p: Float[np.ndarray, "*batch seg"], q: Float[np.ndarray, "*batch seg"]
) -> Float[np.ndarray, "*batch"]:
    """Jensen-Shannon divergence in nats, 0..ln 2, over the last axis and what is missing to 1."""
    p, q = _whole(p), _whole(q)
    middle = (p + q) / 2
    return np.asarray(np.maximum((_kl(p, middle) + _kl(q, middle)) / 2, 0))


def _whole(p: np.ndarray) -> np.ndarray:
    p = p.astype(np.float64)
    if p.size and (p.min() < -_ROUNDING or p.sum(-1).max() > 1 + _ROUNDING or np.isnan(p).any()):
        raise DriftlabError("a mass vector has entries in 0..1 that sum to 1 at most")
    p = np.maximum(p, 0)
    # a rest of rounding size would count as a segment of its own
    rest = 1 - p.sum(-1, keepdims=True)
    p = np.concatenate([p, np.where(rest > _ROUNDING, rest, 0)], -1)
    return p / p.sum(-1, keepdims=True)


def _kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    ratio = np.divide(p, q, out=np.ones_like(p), where=p > 0)
    return np.asarray((p * np.log(ratio)).sum(-1))


_DISTANCES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {"tv": total_variation, "js": jensen_shannon}


def relabelled(
    mass: Float[np.ndarray, "*batch seg"], last: Float[np.ndarray, "*batch"]
) -> Float[np.ndarray, "*batch seg"]:
    """Move the mass ``last`` of a depth-1 row's last keys from CONTEXT to SELF, in float64.

    Raises:
        DriftlabError: CONTEXT has less: those keys were not all CONTEXT.
    """
    moved = mass.astype(np.float64)
    moved[..., Segment.CONTEXT] -= last
    moved[..., Segment.SELF] += last
    if moved.size and moved[..., Segment.CONTEXT].min() < -_ROUNDING:
        raise DriftlabError(
            "a row's last keys have more mass than CONTEXT: they are not all CONTEXT. Is a sink among the answer's rows?"
        )
    moved[..., Segment.CONTEXT] = np.maximum(moved[..., Segment.CONTEXT], 0)
    return moved


def drift(record: Record, depth: int, distance: Distance = "tv") -> Float[np.ndarray, "start layer head"]:
    """Distance between each start's masses at ``depth`` and the relabelled depth-1 masses at its position; NaN where the
    answer has no such row. At depth 1: 0.
    """
    here, there = record.pairs(depth)
    reference = first_row_masses(record, there, depth)
    return _spread(record, here, _DISTANCES[distance](record.mass[here, depth - 1], reference))


def null(
    record: Record, depth: int, distance: Distance = "tv", *, lag: int = 1
) -> Float[np.ndarray, "start layer head"]:
    """Distance between two depth-1 rows ``lag`` apart, both relabelled as for ``depth``; the later one stands where the start
    stands at ``depth``. NaN where either row is missing.

    The first ``lag`` starts of an answer have none: the earlier row's last keys would be the prompt's.

    Raises:
        DriftlabError: lag below 1, a depth that was not run.
    """
    if lag < 1:
        raise DriftlabError(f"lag {lag}: two rows at least one apart are compared")
    here, there = record.pairs(depth)
    kept = (record.row - record.first_row())[here] >= lag
    here, there = here[kept], there[kept]
    values = _DISTANCES[distance](first_row_masses(record, there, depth), first_row_masses(record, there - lag, depth))
    return _spread(record, here, values)


def first_row_masses(
    record: Record, starts: Int[np.ndarray, " pair"], depth: int
) -> Float[np.ndarray, "pair layer head seg"]:
    """Depth-1 masses of ``starts``, their last ``depth - 1`` keys relabelled SELF."""
    mass = record.mass[starts, 0]
    last = record.recent_first[starts, ..., depth - 2] if depth > 1 else np.zeros(mass.shape[:-1])
    return relabelled(mass, last)


def segment_gain(record: Record, depth: int, segment: Segment) -> Float[np.ndarray, "start layer head"]:
    """Mass of a segment at ``depth`` minus that of the relabelled depth-1 row at the same position; NaN where there is none.

    SELF: the self gain over the null. Minus that of SINK: the sink loss; NaN where a window has left the sink behind at either.
    """
    here, there = record.pairs(depth)
    before = first_row_masses(record, there, depth)[..., segment]
    gain = record.mass[here, depth - 1, ..., segment].astype(np.float64) - before
    if segment == Segment.SINK and record.sees_sink is not None:
        both = record.sees_sink[here, depth - 1] & record.sees_sink[there, 0]
        gain[~both] = np.nan
    return _spread(record, here, gain)


def recent_gain(record: Record, depth: int, window: int) -> Float[np.ndarray, "start layer head"]:
    """recent(w) at ``depth`` minus recent(w) of the depth-1 row at the same position; NaN where there is none."""
    if window not in record.windows:
        raise DriftlabError(f"recent({window}) was not recorded, {list(record.windows)} were: Recorder(recent=...)")
    here, there = record.pairs(depth)
    mass = record.recent[..., record.windows.index(window)].astype(np.float64)
    return _spread(record, here, mass[here, depth - 1] - mass[there, 0])


def relative_entropy_gain(record: Record, depth: int) -> Float[np.ndarray, "start layer head"]:
    """Entropy over ln of visible keys at ``depth`` minus that of the depth-1 row at the same position; NaN of one key."""
    here, there = record.pairs(depth)
    values = normalised_entropy(record.entropy, record.visible)
    return _spread(record, here, values[here, depth - 1] - values[there, 0])


def normalised_entropy(
    entropy: Float[np.ndarray, "start depth layer head"], visible: Int[np.ndarray, "start depth layer"]
) -> Float[np.ndarray, "start depth layer head"]:
    """Entropy over the ln of the number of keys seen, 0..1; NaN of one key, which has none."""
    keys = np.broadcast_to(visible[..., None], entropy.shape).astype(np.float64)
    out = np.full(entropy.shape, np.nan)
    return np.divide(entropy, np.log(np.maximum(keys, 1)), out=out, where=keys > 1)


def _spread(record: Record, here: np.ndarray, values: np.ndarray) -> np.ndarray:
    out = np.full((len(record.row), *values.shape[1:]), np.nan)
    out[here] = values
    return out


def over_heads(values: Float[np.ndarray, "start layer head"]) -> Float[np.ndarray, " start"]:
    """Mean over layers and heads of each start, those that have a value; NaN where none has."""
    there = ~np.isnan(values)
    total, count = np.where(there, values, 0.0).sum((1, 2)), there.sum((1, 2))
    return np.divide(total, count, out=np.full(len(values), np.nan), where=count > 0)


def band(
    record: Record,
    values: Float[np.ndarray, " start"],
    quantiles: Sequence[float] = (0.05, 0.5, 0.95),
    *,
    samples: int = 500,
    seed: int = 0,
) -> tuple[Interval, ...]:
    """Quantiles of ``values`` over the starts, each with its interval over resampled prompts; NaN of none.

    A quantile is the smallest value that at least so large a share of the starts does not exceed.
    """
    there = ~np.isnan(values)
    order = np.argsort(values[there], kind="stable")
    ordered, owner = values[there][order].astype(np.float64), record.prompt[there][order]
    count = np.bincount(owner, minlength=len(record.ids))
    informative = int((count > 0).sum())
    if not len(ordered):
        return tuple(Interval(np.nan, np.nan, np.nan) for _ in quantiles)

    def at(weights: np.ndarray, share: float) -> float:
        within = weights.cumsum()
        if not within[-1]:
            return np.nan
        return float(ordered[np.searchsorted(within, share * within[-1] * (1 - 1e-12))])

    def statistic(share: float) -> Callable[[np.ndarray], np.ndarray]:
        def run(chosen: np.ndarray) -> np.ndarray:
            times = [np.bincount(row, minlength=len(record.ids))[owner] for row in chosen]
            return np.array([at(weights, share) for weights in times])

        return run

    ones, prompts = np.ones(len(ordered)), len(record.ids)
    return tuple(
        percentile_interval(at(ones, share), statistic(share), prompts, informative, samples, seed, 0.95)
        for share in quantiles
    )
