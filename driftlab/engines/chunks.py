r"""Tools that see the chunks an engine streams, not its rounds: specdec_bench of NVIDIA/Model-Optimizer (SPEED-Bench).

A chunk is what one step adds to the text: j + 1 tokens, or fewer at the end, and the prefill's token is a chunk of its own.
With L the length of a chunk and S_L the number of chunks of length L or more,

    joint (marginal) at draft position k = S_{k+1} / S_1,      conditional = S_{k+1} / S_l,  l the next shorter length seen.

Two versions are in use and an output file does not say which made it. One takes every chunk; with vLLM it takes EOS off the
last one, and a chunk of EOS alone vanishes. The other (Model-Optimizer#1272) drops the first chunk if it is one token, and the
last always. What the record does not know of this is in the bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from driftlab.histogram import (
    EngineReport,
    EngineValue,
    RequestHistogram,
    own_end,
    ratios,
    table_of,
    value_of,
)
from driftlab.intervals import Interval

_ALL = "chunks as streamed: the prefill's too, limit and EOS rounds with what they emitted, perhaps without EOS"
_TINY = 1e-9


def speed_bench(records: Sequence[RequestHistogram]) -> EngineReport:
    """specdec_bench/metrics/acceptance_rate.py, the version that takes every chunk (beside speculation_profile.py).

    The prefill's chunk of one token lowers everything. Only lengths that occurred have rates.
    """
    values = (_average(records), *_rates(records))
    return EngineReport("speed-bench", "NVIDIA/Model-Optimizer, examples/specdec_bench", values)


def modelopt_profile(records: Sequence[RequestHistogram]) -> EngineReport:
    """speculation_profile.json (schema 1.0) of specdec_bench: the same chunks, by draft position.

    A length that never occurred has rates of 0, although longer ones may have occurred.
    """
    tokens, chunks, doubt = _sums(records)
    mean = Interval(
        tokens.sum() / chunks.sum() if chunks.sum() else np.nan,
        *_extremes(tokens.sum(keepdims=True), chunks.sum(keepdims=True), doubt.sum(keepdims=True)),
    )
    values = [
        value_of("mean_accept_length", "tokens_per_chunk", mean, "tokens / chunks", _ALL, bonus=True),
        replace(_average(records), name="mean_accept_length_per_request"),
    ]
    table = _chunks(records).sum(0)
    seen = {(value.quantity, value.position): value for value in _rates(records)}
    for k in range(1, records[0].depth + 1):
        for name, quantity in (("conditional_accept_rates", "accept_conditional"), ("marginal_accept_rates", "joint")):
            absent = Interval(0.0, 0.0, 1.0 if doubt.any() and table[k + 1 :].any() else 0.0)
            none = value_of(name, quantity, absent, f"no chunk of length {k + 1}", _ALL, position=k)
            value = seen.get((quantity, k), none)
            # a length that only last chunks have may be gone
            values.append(replace(value, name=name, low=0.0 if table[k + 1] <= doubt.sum() else value.low))
    return EngineReport(
        "modelopt-profile", "NVIDIA/Model-Optimizer, specdec_bench/speculation_profile.py", tuple(values)
    )


def speed_bench_trimmed(records: Sequence[RequestHistogram]) -> EngineReport:
    """specdec_bench/metrics/base.py of Model-Optimizer#1272: first chunk dropped if it is one token, the last always.

    A turn of which nothing is left counts as one chunk of one token. Which round was last is unknown where the target's own
    token ended the text: the value leaves out an average one, the bounds the longest and the shortest there are.
    """
    table, own = np.pad(table_of(records, "bonus"), ((0, 0), (1, 0))), own_end(records)
    share = np.minimum(1, np.divide(own, table.sum(1), out=np.ones(len(own)), where=table.sum(1) > 0))
    sizes = np.arange(table.shape[1])
    cases = (table * (1 - share)[:, None], _without(table[:, ::-1], own)[:, ::-1], _without(table, own))
    means = [np.where(case.sum(1) > _TINY, ratios(case @ sizes, case.sum(1)), 1.0).mean() for case in cases]
    value = value_of("Average_AL", "average_al", Interval(*map(float, means)), "mean over turns of tokens per chunk",
                     "first chunk of one token and last chunk dropped", bonus=True, per="request")  # fmt: skip
    why = "which chunk was last decides it, and the record does not know that"
    lost = tuple((name, why) for name in ("Conditional_Acceptance_Rate", "Joint_Acceptance_Rate"))
    return EngineReport("speed-bench-trimmed", "NVIDIA/Model-Optimizer#1272, examples/specdec_bench", (value,), lost)


def _chunks(records: Sequence[RequestHistogram]) -> np.ndarray:
    """[request, length 0..K+1]: chunks of a length; one a round, and the prefill's."""
    table = np.pad(table_of(records, "bonus"), ((0, 0), (1, 0)))
    table[:, :-1] += table_of(records, "eos") + table_of(records, "cut")
    table[:, 1] += [record.prefill_tokens for record in records]
    return table


def _sums(records: Sequence[RequestHistogram]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, chunks, and the share of each request that may have ended in EOS; each [request]."""
    table = _chunks(records)
    return table @ np.arange(table.shape[1]), table.sum(1), 1 - table_of(records, "cut").sum(1)


def _extremes(tokens: np.ndarray, chunks: np.ndarray, doubt: np.ndarray) -> tuple[float, float]:
    """Smallest and largest mean length: EOS taken off a longer chunk, or a chunk of EOS alone gone."""
    cases = np.stack([ratios(tokens, chunks), ratios(tokens - doubt, chunks), ratios(tokens - doubt, chunks - doubt)])
    cases = cases[:, ~np.isnan(cases[0])]
    if not cases.size:
        return float("nan"), float("nan")
    return float(np.nanmin(cases, axis=0).mean()), float(np.nanmax(cases, axis=0).mean())


def _average(records: Sequence[RequestHistogram]) -> EngineValue:
    tokens, chunks, doubt = _sums(records)
    each = ratios(tokens, chunks)
    value = float(each[~np.isnan(each)].mean()) if chunks.any() else float("nan")
    x = Interval(value, *_extremes(tokens, chunks, doubt))
    return value_of(
        "Average_AL", "average_al", x, "mean over turns of tokens per chunk", _ALL, bonus=True, per="request"
    )


def _rates(records: Sequence[RequestHistogram]) -> list[EngineValue]:
    table, doubt = _chunks(records).sum(0), _sums(records)[2].sum()
    longer = table[::-1].cumsum()[::-1]
    values, before = [], 1
    for size in range(2, len(table)):
        if not table[size]:
            continue
        # without EOS a last chunk is one shorter: a length may appear between these two, or the shorter one vanish
        widest = longer[1] if table[before] <= doubt else longer[before]
        for name, quantity, of, most, tight in (
            ("Conditional_Acceptance_Rate", "accept_conditional", longer[before], widest, size == before + 1),
            ("Joint_Acceptance_Rate", "joint", longer[1], longer[1], True),
        ):
            high = longer[size] / (of - doubt) if of > doubt and (tight or not doubt) else 1.0
            x = Interval(longer[size] / of, max(0.0, (longer[size] - doubt) / most), min(1.0, high))
            values.append(value_of(name, quantity, x, f"chunks of length {size} or more", _ALL,
                                   conditional=quantity != "joint", position=size - 1))  # fmt: skip
        before = size
    return values


def _without(table: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """Take ``mass [request]`` out of the first columns that hold it."""
    taken = np.minimum(table.cumsum(1), mass[:, None])
    return table - np.diff(taken, axis=1, prepend=0)
