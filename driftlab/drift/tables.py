"""The measures of a record as tidy rows: per prompt and head, and pooled with intervals over prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from driftlab.draft import Feed, all_starts
from driftlab.drafter import Drafter
from driftlab.drift import distances, geometry
from driftlab.drift.record import Record
from driftlab.drift.recorder import Recorder
from driftlab.errors import DriftlabError
from driftlab.intervals import Interval, bootstrap_ratio
from driftlab.results import as_rows
from driftlab.segments import Segment
from driftlab.trajectory import Trajectory

_ANYTHING = (-np.inf, np.inf)
_QUANTILES = {"_p05": 0.05, "_p50": 0.5, "_p95": 0.95}

ByHead = Float[np.ndarray, "start layer head"]
ByStart = Float[np.ndarray, " start"]


def _by_head(record: Record, depth: int) -> dict[str, tuple[ByHead, tuple[float, float]]]:
    """Measures of attention at a depth, with the least and most that each can be."""
    gain = {segment: distances.segment_gain(record, depth, segment) for segment in (Segment.SINK, Segment.SELF)}
    nats = (0.0, float(np.log(2)))
    return {
        "drift_tv": (distances.drift(record, depth), (0.0, 1.0)),
        "drift_js": (distances.drift(record, depth, "js"), nats),
        "drift_tv_null": (distances.null(record, depth), (0.0, 1.0)),
        "drift_js_null": (distances.null(record, depth, "js"), nats),
        "sink_loss": (-gain[Segment.SINK], (-1.0, 1.0)),
        "self_gain": (gain[Segment.SELF], (-1.0, 1.0)),
        "entropy_relative_gain": (distances.relative_entropy_gain(record, depth), (-1.0, 1.0)),
    }


def _by_start(record: Record, depth: int) -> dict[str, tuple[ByStart, tuple[float, float]]]:
    """Measures of the feedback at a depth."""
    measures = {
        "cosine_successive": (record.successive[:, depth - 1], (-1.0, 1.0)),
        "cosine_imitation": (record.imitation[:, depth - 1], (-1.0, 1.0)),
    }
    if record.update is not None:
        measures["cosine_update"] = (record.update[:, depth - 1], (-1.0, 1.0))
    if depth == 1:
        for i in range(record.magnitude_share.shape[1]):
            measures[f"aux{i}_magnitude_share"] = (record.magnitude_share[:, i], (0.0, 1.0))
            measures[f"aux{i}_projection_share"] = (record.projection_share[:, i], _ANYTHING)
    return measures


def drift_rows(record: Record, *, heads: bool = True, samples: int = 2000, **settings: Any) -> pd.DataFrame:
    """Every measure of one record as tidy rows.

    Attention: rows per prompt, layer and head (``heads``), and pooled ones with intervals (``prompt`` "", ``head`` -1: the mean
    of the heads' values, per layer). Feedback: pooled rows. ``drift_tv_null_p05`` ... are quantiles over starts of the mean of
    heads (``layer`` -1). Depth 1 is compared with itself where a measure has a null.

    Args:
        record: of one run; runs with other settings get a frame of their own.
        heads: whether rows per prompt and head are wanted.
        samples: resamples of the intervals.
        settings: fill settings columns. The drafter's own are known; ``measure.settings`` makes all of them.
    """
    rows: list[dict[str, Any]] = []
    for depth in range(1, record.depth + 1):
        for quantity, (values, ends) in _by_head(record, depth).items():
            for layer in range(values.shape[1]):
                if heads:
                    rows += _per_prompt(record, values[:, layer], quantity, depth, layer)
                rows.append(
                    _pooled(record, distances.over_heads(values[:, [layer]]), ends, samples, quantity, depth, layer)
                )
        for window in record.windows:
            values = distances.recent_gain(record, depth, window)
            for layer in range(values.shape[1]):
                pooled = _pooled(record, values[:, layer].mean(1), (-1.0, 1.0), samples, "recent_gain", depth, layer)
                rows.append({**pooled, "window": window})
        rows += _of_all_layers(record, depth, samples)
        for quantity, (values, ends) in _by_start(record, depth).items():
            rows.append(_pooled(record, values, ends, samples, quantity, depth))
        rows += list(_of_runs(record, depth, samples))
    return as_rows(rows, **{**record.settings, "depth_max": record.depth, "starts": "all", **settings})


def _per_prompt(
    record: Record, values: Float[np.ndarray, "start head"], quantity: str, depth: int, layer: int
) -> Iterator[dict[str, Any]]:
    for head in range(values.shape[1]):
        total, count = record.sums(values[:, head])
        for name, top, n in zip(record.ids, total.tolist(), count.tolist(), strict=True):
            keys = {"prompt": name, "layer": layer, "head": head, "depth": depth, "quantity": quantity}
            yield {**keys, "value": top / n if n else float("nan"), "n": n, "low": np.nan, "high": np.nan}


def _pooled(
    record: Record,
    values: ByStart,
    ends: tuple[float, float],
    samples: int,
    quantity: str,
    depth: int,
    layer: int = -1,
) -> dict[str, Any]:
    interval = record.mean(values, samples=samples).within(*ends)
    return _row(interval, float((~np.isnan(values)).sum()), quantity, depth, layer)


def _row(interval: Interval, n: float, quantity: str, depth: int, layer: int = -1) -> dict[str, Any]:
    keys = {"prompt": "", "layer": layer, "depth": depth, "quantity": quantity}
    return {**keys, "value": interval.value, "n": n, "low": interval.low, "high": interval.high}


def _of_all_layers(record: Record, depth: int, samples: int) -> Iterator[dict[str, Any]]:
    null = distances.over_heads(distances.null(record, depth))
    n = float((~np.isnan(null)).sum())
    bands = distances.band(record, null, tuple(_QUANTILES.values()), samples=max(samples // 4, 1))
    for suffix, interval in zip(_QUANTILES, bands, strict=True):
        yield _row(interval.within(0, 1), n, f"drift_tv_null{suffix}", depth)
    yield _pooled(record, excess(record, depth), (-1.0, 1.0), samples, "drift_tv_excess", depth)
    yield _pooled(record, sink_before(record, depth), (0.0, 1.0), samples, "sink_before", depth)
    relative = relative_sink_loss(record, depth, samples=samples)
    yield _row(relative.within(-np.inf, 1), float(record.reach[:, depth - 1].sum()), "sink_loss_relative", depth)


def _of_runs(record: Record, depth: int, samples: int) -> Iterator[dict[str, Any]]:
    """Measures that are no mean over starts."""
    n = float(record.reach[:, depth - 1].sum())
    yield _row(geometry.growth(record, depth, samples=samples).within(0, np.inf), n, "growth", depth)
    if depth > 1:
        yield _pooled(record, geometry.log_slopes(record, depth), _ANYTHING, samples, "log_rms_slope", depth)
    kept = geometry.spread_kept(record, depth, samples=max(samples // 10, 1)).within(0, np.inf)
    yield _row(kept, float(len(record.vectors)), "spread_kept", depth)
    rank = geometry.effective_rank(record.vectors[:, depth - 1])
    yield _row(Interval(rank, np.nan, np.nan), float(len(record.vectors)), "effective_rank", depth)


def excess(record: Record, depth: int) -> ByStart:
    """Drift less its null, total variation, mean over layers and heads: of the starts that have both, NaN elsewhere."""
    return distances.over_heads(distances.drift(record, depth) - distances.null(record, depth))


def sink_before(record: Record, depth: int) -> ByStart:
    """SINK at depth 1 of the row where the start stands at ``depth``, mean over layers and heads: what can be lost.

    NaN where a window has left the sink behind, there or at ``depth``.
    """
    here, there = record.pairs(depth)
    mass = record.mass[there, 0, ..., Segment.SINK].astype(np.float64)
    if record.sees_sink is not None:
        mass[~(record.sees_sink[here, depth - 1] & record.sees_sink[there, 0])] = np.nan
    before = np.full((len(record.row), *mass.shape[1:]), np.nan)
    before[here] = mass
    return distances.over_heads(before)


def relative_sink_loss(record: Record, depth: int, *, samples: int = 2000, seed: int = 0) -> Interval:
    """Share of the depth-1 sink mass that is gone at ``depth``, at equal position; over layers, heads and starts.

    NaN where the sink has no mass at depth 1: then there is nothing to lose. 1 - (sum of sink masses at depth k / at depth 1).
    """
    loss, before = (
        -distances.over_heads(distances.segment_gain(record, depth, Segment.SINK)),
        sink_before(record, depth),
    )
    return bootstrap_ratio(record.sums(loss)[0], record.sums(before)[0], samples=samples, seed=seed)


def by_sinks(
    drafter: Drafter,
    trajectory: Trajectory,
    choices: Sequence[Sequence[int]],
    *,
    depth: int,
    feed: Feed = "text",
) -> dict[tuple[int, ...], Record]:
    """Run again with other sink positions, for how much the answer depends on which keys are called the sink.

    Args:
        drafter: the drafter.
        trajectory: the recording; its own choice of sinks is not used.
        choices: such as (0,), (0, 1, 2, 3), and the positions that ``SinkSearch.top`` names.
        depth: K.
        feed: what is fed.

    Returns:
        One record a choice: a frame of each is made by :func:`drift_rows`, and rows of two choices must not be pooled.

    Raises:
        DriftlabError: no choice, one given twice, positions that a prompt does not have.
    """
    wanted = [tuple(sorted(set(choice))) for choice in choices]
    if not wanted or len(set(wanted)) < len(wanted):
        raise DriftlabError(f"choices {wanted}: give one or more sets of sink positions, each once")
    records = {}
    for sinks in wanted:
        with Recorder(drafter, depth=depth) as recorder:
            all_starts(drafter, trajectory.with_sinks(sinks), depth, feed=feed)
        records[sinks] = recorder.record()
    return records
