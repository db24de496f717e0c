r"""What other tools would print from one record, :class:`driftlab.histogram.RequestHistogram`: a function per tool.

Tools differ along four axes: the bonus token in or out; pooled over rounds or a mean over requests; conditional on earlier
drafts or not; and what happens in the round that ends a request. Where that depends on what the record does not know, a value
comes with bounds: ``value`` is as if no draft had been accepted that is not in the text, ``low`` and ``high`` hold whatever
the engine accepted and whether it made a round more. Values that follow exactly have equal bounds.

Values are fractions and counts; ``unit="%"`` says that the tool prints 100 times the value. For trees there is no rate per
position or per drafted token (hemingkx/Spec-Bench#8): such values are left out, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from types import MappingProxyType

import numpy as np

from driftlab.engines.chunks import modelopt_profile, speed_bench, speed_bench_trimmed
from driftlab.errors import DriftlabError
from driftlab.histogram import (
    Counts,
    EngineReport,
    EngineValue,
    RequestHistogram,
    Rounds,
    exact,
    mean_of,
    own_end,
    ratios,
    table_of,
    value_of,
)
from driftlab.intervals import Interval, pooled_ratio

#: quantities that a tree of drafts does not have
CHAIN_ONLY = (
    *("draft_tokens", "accept_rate", "accept_rate_mean", "accept_unconditional", "accept_conditional", "joint"),
    *("emitted_share", "emitted_share_mean"),
)
#: tool -> the engine behind it that drafts chains alone
CHAINS_ALONE = MappingProxyType({"vllm": "vLLM", "speculators": "vLLM", "aiperf": "vLLM"})
_AS_VERIFIED = "counted with all drafts that the verifier accepted, behind EOS or beyond the limit too"
_AS_KEPT = "counted with the tokens that are in the text"
_ONE_MORE = f"{_AS_VERIFIED}; the end may be noticed rounds later"
_ANCHORS = "a training metric over all positions of a text, not over the rounds of a decoder"


def engine_report(engine: str, records: Sequence[RequestHistogram]) -> EngineReport:
    """Return what a tool would print from these requests.

    Args:
        engine: a name of :data:`CONVENTIONS`.
        records: one a turn, all of one K; requests without a round are allowed.

    Raises:
        DriftlabError: no such tool, no records, records of several K, or chains and trees together.
    """
    if engine not in CONVENTIONS:
        raise DriftlabError(f"no convention {engine!r}: choose from {', '.join(CONVENTIONS)}")
    if not records:
        raise DriftlabError("no records: a report needs at least one request")
    kinds = {(record.depth, record.tree) for record in records}
    if len(kinds) > 1:
        raise DriftlabError(f"records of several (K, tree) {sorted(kinds)} do not belong in one report")
    report = CONVENTIONS[engine](records)
    if not records[0].tree:
        return report
    why = "a tree has several drafts a position, and the record does not know how many"
    lost = dict.fromkeys(value.name for value in report.values if value.quantity in CHAIN_ONLY)
    kept = tuple(value for value in report.values if value.quantity not in CHAIN_ONLY)
    alone = CHAINS_ALONE.get(engine)
    note = f"{alone} drafts chains alone: it would not make these rounds of trees" if alone else ""
    return replace(report, values=kept, left_out=report.left_out + tuple((name, why) for name in lost), note=note)


def driftlab(records: Sequence[RequestHistogram]) -> EngineReport:
    """Our own: cut rounds are excluded, EOS rounds count with what they emitted (docs/method.md).

    The conditional rate alone keeps what is known of cut rounds.
    """
    bonus, eos, cut = (table_of(records, kind) for kind in ("bonus", "eos", "cut"))
    counts, last = Counts(bonus + eos), "cut rounds excluded; EOS rounds with what they emitted"
    emitted = counts.tokens - eos.sum(1)  # there is no bonus token behind EOS
    values = [
        value_of("tau", "tau", _pool(emitted, counts.rounds), "tokens per round", last, bonus=True),
        value_of("tau per request", "tau_mean", _mean(emitted, counts.rounds), "mean of the requests' tau", last,
                 bonus=True, per="request"),
        value_of("accept length", "accepted_per_round", _pool(counts.accepted, counts.rounds), "accepted drafts per round",
                 last),
        value_of("accept rate", "accept_rate", _pool(counts.accepted, counts.drafted), "accepted per drafted token", last),
    ]  # fmt: skip
    for k in range(1, records[0].depth + 1):
        passed, known = counts.reached(k), cut[:, k:].sum(1)
        judged = counts.reached(k - 1) - eos[:, k - 1] + known
        values += [
            value_of("accept_unconditional", "accept_unconditional", _pool(passed, counts.rounds),
                     "share of rounds that accepted k drafts or more", last, conditional=False, position=k),
            value_of("accept_conditional", "accept_conditional", _pool(passed + known, judged),
                     "of the rounds judged at depth k, the share that accepted", "as far as the text goes",
                     conditional=True, position=k),
        ]  # fmt: skip
    return EngineReport("driftlab", "docs/method.md", tuple(values))


def vllm(records: Sequence[RequestHistogram]) -> EngineReport:
    """Server counters and the log line, vllm/v1/spec_decode/metrics.py; it counts positions from 0, we from 1.

    The scheduler (v1/core/sched/scheduler.py, update_from_output) counts before it looks for EOS or the limit. Drafts are
    taken as K long: near max_model_len, and of n-grams, they are shorter. Before V1, accepted tokens had matches behind the
    first miss in them (vllm#9565): not a function of this record.
    """
    return EngineReport("vllm", "vllm/v1/spec_decode/metrics.py", _counters(
        records, "Mean acceptance length", "Avg Draft acceptance rate", "Per-position acceptance rate"
    ))  # fmt: skip


def speculators(records: Sequence[RequestHistogram]) -> EngineReport:
    """scripts/evaluate of speculators: differences of vLLM's counters (perf_utils.py, acceptance.csv). Same numbers as vLLM.

    Of the training metrics (src/speculators/models/metrics.py) none is a function of rounds. EAL was the sum of running
    products of accuracies, without the bonus (#741); since #1032 it is counted per block and has the bonus in it.
    """
    values = _counters(records, "acceptance_length", "", "acceptance_at_pos_i")
    lost = tuple((name, _ANCHORS) for name in ("full_acc_k", "cond_acc_k", "eal", "accept_len"))
    return EngineReport("speculators", "speculators, scripts/evaluate/perf_utils.py", values, lost)


def _counters(records: Sequence[RequestHistogram], length: str, rate: str, position: str) -> tuple[EngineValue, ...]:
    rounds = Rounds.of(records)
    values = [
        value_of(length, "tokens_per_round", rounds.pooled(_tokens, _rounds), "1 + accepted / drafts", _AS_VERIFIED,
                 bonus=True),
        value_of("num_drafts", "rounds", rounds.sum(_rounds), "verify rounds", _AS_VERIFIED),
        value_of("num_draft_tokens", "draft_tokens", rounds.sum(_drafted), "K a round", _AS_VERIFIED),
        value_of("num_accepted_tokens", "accepted", rounds.sum(_accepted), "accepted drafts", _AS_VERIFIED),
    ]  # fmt: skip
    if rate:
        values.append(value_of(rate, "accept_rate", rounds.pooled(_accepted, _drafted), "accepted / drafted tokens",
                               _AS_VERIFIED, unit="%"))  # fmt: skip
    return (*values, *_positions(position, rounds))


def _positions(name: str, rounds: Rounds) -> list[EngineValue]:
    about = "share of all rounds that accepted k drafts or more"
    return [
        value_of(name, "accept_unconditional", rounds.pooled(lambda c, k=k: c.reached(k), _rounds), about, _AS_VERIFIED,
                 conditional=False, position=k)
        for k in range(1, rounds.depth + 1)
    ]  # fmt: skip


def sglang(records: Sequence[RequestHistogram]) -> EngineReport:
    """meta_info of requests, srt/managers/tokenizer_manager.py (0.5.23); a client's mean over requests.

    completion_tokens has the prefill's token in it, so a request of few rounds reads high. spec_num_correct_drafts is counted
    before the text is cut, by the verifiers before the overlapped one after it (both in the bounds). Older versions call it
    spec_accept_token_num, and the histogram spec_accept_histogram. The rate divides by K = speculative_num_draft_tokens - 1.
    """
    rounds = Rounds.of(records, trimmed=True)
    tokens, made = _text(records), rounds.scenarios[0].rounds
    values = [
        value_of("spec_accept_length", "tokens_per_round_prefill_mean", _mean(tokens, made),
                 "completion tokens / verify rounds, the prefill's token among them", _AS_KEPT, bonus=True, per="request"),
        value_of("completion_tokens / spec_verify_ct", "tokens_per_round_prefill", _pool(tokens, made),
                 "the same, pooled", _AS_KEPT, bonus=True),
        value_of("spec_accept_rate", "accept_rate_mean", rounds.mean(_accepted, _drafted), "accepted / drafted tokens",
                 _AS_VERIFIED, per="request"),
        value_of("spec_verify_ct", "rounds", exact(made.sum()), "verify rounds", _AS_KEPT),
        *_positions("spec_correct_drafts_histogram", rounds),
    ]  # fmt: skip
    return EngineReport("sglang", "sglang 0.5.23, srt/managers/tokenizer_manager.py", tuple(values))


def sglang_server(records: Sequence[RequestHistogram]) -> EngineReport:
    """Decode log line and avg_spec_accept_length, srt/managers/scheduler_components/metrics_reporter.py (0.5.23).

    A line is a window of the whole server; here all rounds are one window. The prefill's token is not in it. Under the
    overlapped scheduler a finished request is in one batch more, and that round counts too: part of the bounds.
    """
    once = (Rounds.of(records).scenarios[0].rounds > 0).astype(float)
    rounds = Rounds.of(records, trimmed=True, idle=once, full=once)
    values = (
        value_of("accept len", "tokens_per_round", rounds.pooled(_tokens, _rounds), "(accepted + rounds) / rounds",
                 _ONE_MORE, bonus=True),
        value_of("accept rate", "accept_rate", rounds.pooled(_accepted, _drafted), "accepted / drafted tokens", _ONE_MORE),
    )  # fmt: skip
    return EngineReport("sglang-server", "sglang 0.5.23, srt/managers/scheduler_components/metrics_reporter.py", values)


def specforge(records: Sequence[RequestHistogram]) -> EngineReport:
    """benchmarks/benchmarker/utils.py of SpecForge: SGLang's counts pooled; newer runners average first turns'
    lengths: what is averaged here are the records given, so they must be first turns only.

    It prints 1.0 where no round was made; here that is NaN.
    """
    tokens, made = _text(records), Rounds.of(records).scenarios[0].rounds
    values = (
        value_of("Average Accept length", "tokens_per_round_prefill", _pool(tokens, made),
                 "completion tokens / verify rounds, the prefill's token among them", _AS_KEPT, bonus=True),
        value_of("accept length per request", "tokens_per_round_prefill_mean", _mean(tokens, made),
                 "newer: mean over first turns, so give records of first turns only", _AS_KEPT, bonus=True, per="request"),
    )  # fmt: skip
    return EngineReport("specforge", "SpecForge, benchmarks/benchmarker/utils.py", values)


def tensorrt_llm(records: Sequence[RequestHistogram]) -> EngineReport:
    """trtllm-bench, tensorrt_llm/bench/dataclasses/reporting.py: output tokens over decode_iteration + 1.

    The prefill counts as an iteration, and its token as an output token. Where decode_iteration has the prefill in it already
    (the PyTorch samplers count it) there is one iteration more: the lower bound. Averages were plain means over requests and
    are weighted by iterations since 2026.
    """
    depth, tokens, passes = records[0].depth, _text(records), Rounds.of(records).scenarios[0].rounds + 1
    last = f"{_AS_KEPT}; the prefill is one iteration, perhaps two"

    def both(
        name: str, quantity: str, top: Callable[[np.ndarray], np.ndarray], width: int, about: str
    ) -> list[EngineValue]:
        found = []
        for ending, average, per in (("", _pool, "pooled"), ("_mean", _mean, "request")):
            value, low = (average(top(n), n * width).value for n in (passes, passes + 1))
            found.append(
                value_of(name, quantity + ending, Interval(value, low, value), about, last, bonus=width == 1, per=per)
            )
        return found

    values = [
        *both("[AL] AVERAGE", "tokens_per_iteration", lambda n: tokens + 0 * n, 1, "output tokens / iterations"),
        *both(
            "[DAR] AVERAGE", "accept_rate", lambda n: tokens - n, depth, "(output tokens - iterations) / K iterations"
        ),
    ]
    return EngineReport("tensorrt-llm", "tensorrt_llm/bench/dataclasses/reporting.py", tuple(values))


def safeailab(records: Sequence[RequestHistogram]) -> EngineReport:
    """eagle/model/ea_model.py and eagle/evaluation of SafeAILab/EAGLE.

    A round appends its root (the target's token before it) and the accepted drafts, and looks for EOS only in what is
    appended: EOS as the target's own token costs a round more, and the limit is passed before it is seen (up to two rounds).
    ``idxs`` is the index of the last round, rounds - 1, and alpha_length.py divides by it as it is.
    """
    rounds = _appending(records)
    shy = "counts one round too few"
    values = (
        value_of("new_tokens / (idxs + 1)", "tokens_per_round", rounds.pooled(_tokens, _rounds), "tau of the papers",
                 _ONE_MORE, bonus=True),
        value_of("accept_length", "accepted_per_round", rounds.pooled(_accepted, _rounds), "the variable: no bonus token",
                 _ONE_MORE),
        value_of("alpha_length.py", "tokens_per_idx_mean", rounds.mean(_tokens, lambda c: np.maximum(c.rounds - 1, 0)),
                 f"mean over requests of new_tokens / idxs: {shy}", _ONE_MORE, bonus=True, per="request"),
    )  # fmt: skip
    lost = (("alpha.py", "n-alpha comes from a run of its own, along the target's text"),)
    return EngineReport("safeailab", "SafeAILab/EAGLE, eagle/evaluation", values, lost)


def spec_bench(records: Sequence[RequestHistogram]) -> EngineReport:
    """evaluation/speed.py of Spec-Bench, for methods of the EAGLE and Medusa kind (its EAGLE is SafeAILab's loop)."""
    value = value_of("#Mean accepted tokens", "tokens_per_round", _appending(records).pooled(_tokens, _rounds),
                     "mean of accept_lengths, pooled over questions", _ONE_MORE, bonus=True)  # fmt: skip
    return EngineReport("spec-bench", "hemingkx/Spec-Bench, evaluation/speed.py", (value,))


def _appending(records: Sequence[RequestHistogram]) -> Rounds:
    own, cut = own_end(records), table_of(records, "cut").sum(1)
    return Rounds.of(records, idle=2 * own + cut, full=own + cut)


def aiperf(records: Sequence[RequestHistogram]) -> EngineReport:
    """metrics/types/spec_decode_metrics.py of AIPerf 0.13, column avg, from vLLM's per-request counts (vllm#48915)."""
    rounds = Rounds.of(records)
    mean, pooled = {"per": "request"}, {"per": "pooled"}
    values = (
        value_of("Acceptance Length", "tokens_per_round_mean", rounds.mean(_tokens, _rounds), "1 + accepted / steps",
                 _AS_VERIFIED, bonus=True, **mean),
        value_of("Token-Weighted Acceptance Length", "tokens_per_round", rounds.pooled(_tokens, _rounds),
                 "1 + accepted / steps", _AS_VERIFIED, bonus=True, **pooled),
        value_of("Draft Acceptance Rate", "accept_rate_mean", rounds.mean(_accepted, _drafted), "accepted / drafted tokens",
                 _AS_VERIFIED, unit="%", **mean),
        value_of("Overall Draft Acceptance Rate", "accept_rate", rounds.pooled(_accepted, _drafted),
                 "accepted / drafted tokens", _AS_VERIFIED, unit="%", **pooled),
        value_of("Accepted per Verified", "emitted_share_mean", rounds.mean(_tokens, _verified),
                 "(accepted + steps) / (drafted + steps)", _AS_VERIFIED, bonus=True, **mean),
    )  # fmt: skip
    return EngineReport("aiperf", "aiperf 0.13.0, metrics/types/spec_decode_metrics.py", values)


def deepspec(records: Sequence[RequestHistogram]) -> EngineReport:
    """deepspec/eval/base_evaluator.py: a round that an accepted EOS ends counts its j, as proposed and as accepted.

    At the limit it counts what the verifier accepted, and makes a round more if the text is exactly as long as the limit.
    Positions are printed from 0.
    """
    eos = table_of(records, "eos")
    ends, short = eos.sum(1), eos @ np.arange(records[0].depth, -1, -1)
    known = [replace(r, bonus=tuple(np.add(r.bonus, r.eos).tolist()), eos=(0.0,) * (r.depth + 1)) for r in records]
    rounds = Rounds.of(known, idle=own_end(records), full=own_end(records))
    last = f"EOS rounds with the drafts up to EOS, no bonus; limit rounds {_AS_VERIFIED}"

    def emitted(counts: Counts) -> np.ndarray:
        return counts.tokens - ends

    values = [
        value_of("accept_len", "tokens_per_round", rounds.pooled(emitted, _rounds), "emitted / rounds", last, bonus=True),
        value_of("verify_rate", "emitted_share", rounds.pooled(emitted, lambda c: _verified(c) - short),
                 "emitted / (proposed + rounds)", last, bonus=True),
    ]  # fmt: skip
    for k in range(1, rounds.depth + 1):
        share = rounds.pooled(lambda c, k=k: c.reached(k), lambda c, k=k: c.rounds - eos[:, :k].sum(1))
        values.append(value_of(f"accept_rate@{k - 1}", "accept_unconditional", share,
                               "of the rounds that proposed a k-th draft before EOS, the share that accepted k", last,
                               conditional=False, position=k))  # fmt: skip
    return EngineReport("deepspec", "deepseek-ai/DeepSpec, deepspec/eval/base_evaluator.py", tuple(values))


_tokens, _accepted, _rounds, _drafted = (attrgetter(name) for name in ("tokens", "accepted", "rounds", "drafted"))


def _verified(counts: Counts) -> np.ndarray:
    return counts.drafted + counts.rounds


def _text(records: Sequence[RequestHistogram]) -> np.ndarray:
    return np.array([record.tokens for record in records])


def _pool(top: np.ndarray, bottom: np.ndarray) -> Interval:
    return exact(pooled_ratio(top, bottom))


def _mean(top: np.ndarray, bottom: np.ndarray) -> Interval:
    return exact(mean_of(ratios(top, bottom)))


#: what each tool would print, by name
CONVENTIONS: Mapping[str, Callable[[Sequence[RequestHistogram]], EngineReport]] = MappingProxyType(
    {
        "driftlab": driftlab,
        "vllm": vllm,
        "sglang": sglang,
        "sglang-server": sglang_server,
        "tensorrt-llm": tensorrt_llm,
        "safeailab": safeailab,
        "spec-bench": spec_bench,
        "speed-bench": speed_bench,
        "speed-bench-trimmed": speed_bench_trimmed,
        "modelopt-profile": modelopt_profile,
        "speculators": speculators,
        "aiperf": aiperf,
        "specforge": specforge,
        "deepspec": deepspec,
    }
)
