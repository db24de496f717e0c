"""Conventions by hand: bonus in or out, pooled or per request, EOS and limit rounds, expected counts, no rounds at all."""

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest

from driftlab import DriftlabError
from driftlab.engines.conventions import CHAIN_ONLY, CONVENTIONS, engine_report
from driftlab.histogram import RequestHistogram

of = RequestHistogram.of


def value(engine, records, quantity, position=0):
    return engine_report(engine, records)[quantity, position].value


def bounds(engine, records, quantity, position=0):
    found = engine_report(engine, records)[quantity, position]
    return found.low, found.high


# a request of each kind, K = 3: rounds 2 | 0 | 2 (EOS);   1 | 3 | 2 (cut);   prefill's token only
EOS = of("e", [2, 0, 2], depth=3, end="eos")
CUT = of("c", [1, 3, 2], depth=3, end="cut")
NONE = of("n", [], depth=3)
THREE = [EOS, CUT, NONE]


# ---- the record


def test_the_record_counts_rounds_and_tokens():
    assert (EOS.bonus, EOS.eos, EOS.cut) == ((1, 0, 1, 0), (0, 0, 1, 0), (0, 0, 0, 0))
    assert (CUT.bonus, CUT.eos, CUT.cut) == ((0, 1, 0, 1), (0, 0, 0, 0), (0, 0, 1, 0))
    assert (EOS.rounds, EOS.emitted, EOS.tokens) == (3, 3 + 1 + 2, 7)
    assert (CUT.rounds, CUT.emitted, CUT.tokens) == (3, 2 + 4 + 2, 9)
    assert (NONE.rounds, NONE.emitted, NONE.tokens) == (0, 0, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bonus": (1.0, 0.0)}, "bonus has 2 counts; K = 2 needs 3"),
        ({"cut": (0.0, -1.0, 0.0)}, "cut"),
        ({"bonus": (math.nan, 0.0, 0.0)}, "finite"),
        ({"eos": (1.0, 0.0, 0.0)}, r"eos\[0\]"),
        ({"cut": (0.5, 0.0, 0.0)}, r"cut\[0\]"),
        ({"eos": (0.0, 0.6, 0.0), "cut": (0.0, 0.0, 0.6)}, "ends 1.2 times"),
        ({"depth": 0}, "depth 0"),
        ({"prefill_tokens": 2}, "prefill_tokens 2"),
    ],
)
def test_a_record_that_cannot_be_is_refused(change, message):
    fields = {"id": "x", "category": "", "depth": 2, "bonus": (1.0, 0.0, 0.0), "eos": (0.0,) * 3, "cut": (0.0,) * 3}
    RequestHistogram(**fields)
    with pytest.raises(DriftlabError, match=message):
        RequestHistogram(**fields | change)


@pytest.mark.parametrize(
    ("accepted", "end"), [([4], "bonus"), ([-1], "bonus"), ([1], "stop"), ([0], "eos"), ([0], "cut")]
)
def test_rounds_that_cannot_be_are_refused(accepted, end):
    with pytest.raises(DriftlabError):
        of("x", accepted, depth=3, end=end)


# ---- traps


def test_with_and_without_bonus_G1():
    records = [of("a", [3, 0, 1], depth=3)]
    assert value("driftlab", records, "accepted_per_round") == pytest.approx(1.3333, abs=1e-4)
    assert value("driftlab", records, "tau") == pytest.approx(2.3333, abs=1e-4)
    for engine in ("vllm", "sglang-server", "safeailab", "spec-bench", "aiperf", "speculators", "deepspec"):
        assert value(engine, records, "tokens_per_round") == pytest.approx(7 / 3)
        assert engine_report(engine, records)["tokens_per_round"].bonus
    assert value("safeailab", records, "accepted_per_round") == pytest.approx(4 / 3)
    for engine in ("driftlab", "vllm", "sglang-server", "aiperf"):
        assert value(engine, records, "accept_rate") == pytest.approx(4 / 9)


def test_micro_and_macro_G2():
    records = [of("a", [3, 3], depth=3), of("b", [0], depth=3)]
    assert value("driftlab", records, "tau") == 3.0
    assert value("driftlab", records, "tau_mean") == 2.5
    assert value("aiperf", records, "tokens_per_round") == 3.0
    assert value("aiperf", records, "tokens_per_round_mean") == 2.5


def test_unconditional_and_conditional_G3():
    report = engine_report("driftlab", [of("a", [3, 3, 1, 0], depth=3)])
    unconditional = [report["accept_unconditional", k].value for k in (1, 2, 3)]
    assert unconditional == [0.75, 0.5, 0.5]
    assert [report["accept_conditional", k].value for k in (1, 2, 3)] == pytest.approx([0.75, 2 / 3, 1.0])
    assert sum(unconditional) == report["accepted_per_round"].value == 1.75
    vllm = engine_report("vllm", [of("a", [3, 3, 1, 0], depth=3)])
    assert [vllm["accept_unconditional", k].value for k in (1, 2, 3)] == unconditional


def test_counters_G6():
    # 2240 rounds accept 2 of 7 and 2576 accept 3: 4816 drafts, 33712 draft tokens, 12208 accepted
    report = engine_report("vllm", [of("a", [2] * 2240 + [3] * 2576, depth=7)])
    told = {v.quantity: v.value for v in report.values if not v.position}
    assert (told["rounds"], told["draft_tokens"], told["accepted"]) == (4816, 33712, 12208)
    assert round(told["tokens_per_round"], 2) == 3.53
    assert round(100 * told["accept_rate"], 1) == 36.2
    assert report["accept_rate"].unit == "%"


def test_trees_have_no_rate_per_position_G9():
    records = [of("a", [3, 0, 1], depth=3, tree=True)]
    for engine in CONVENTIONS:
        chain = engine_report(engine, [of("a", [3, 0, 1], depth=3)])
        tree = engine_report(engine, records)
        assert tree.values, engine
        assert not any(v.position or v.quantity in CHAIN_ONLY for v in tree.values)
        lost = {v.name for v in chain.values} - {v.name for v in tree.values}
        assert lost <= {name for name, _ in tree.left_out}
    with pytest.raises(DriftlabError, match="accept_unconditional"):
        engine_report("vllm", records)["accept_unconditional", 1]
    assert value("vllm", records, "tokens_per_round") == pytest.approx(7 / 3)


# ---- the ends, by hand


def test_ours_leaves_the_cut_round_out():
    # 3 + 1 + 2 tokens in 3 rounds; 2 + 4 in 2
    assert value("driftlab", THREE, "tau") == 12 / 5
    assert value("driftlab", THREE, "tau_mean") == pytest.approx((2 + 3) / 2)
    assert value("driftlab", THREE, "accepted_per_round") == (4 + 4) / 5
    # depth 3 is judged in rounds 2 and 3 only: the EOS round ended with 2
    assert value("driftlab", THREE, "accept_conditional", 3) == 1 / 2
    assert value("driftlab", THREE, "accept_unconditional", 3) == 1 / 5


def test_vllm_counts_before_the_end_is_seen():
    # accepted 2 0 2..3 and 1 3 2..3 of 6 rounds
    found = engine_report("vllm", THREE)
    assert found["rounds"].value == found["rounds"].low == found["rounds"].high == 6
    assert (found["accepted"].value, *bounds("vllm", THREE, "accepted")) == (10, 10, 12)
    assert (found["tokens_per_round"].value, *bounds("vllm", THREE, "tokens_per_round")) == (16 / 6, 16 / 6, 18 / 6)
    assert found["accept_rate"].high == pytest.approx(12 / 18)
    third = found["accept_unconditional", 3]
    assert (third.value, third.low, third.high) == (1 / 6, 1 / 6, 3 / 6)
    assert found["accept_unconditional", 2].low == found["accept_unconditional", 2].high == 4 / 6


def test_sglang_has_the_prefill_token_in_the_length_alone():
    found = engine_report("sglang", THREE)
    assert found["tokens_per_round_prefill_mean"].value == pytest.approx((7 / 3 + 9 / 3) / 2)
    # the request without rounds has a token too
    assert found["tokens_per_round_prefill"].value == pytest.approx((7 + 9 + 1) / 6)
    assert found["tokens_per_round_prefill"].low == found["tokens_per_round_prefill"].high
    # (4 + 6) / 18 if nothing more was accepted; trimmed first: (3 + 5) / 18; all: (5 + 7) / 18
    rate = found["accept_rate_mean"]
    assert (rate.value, rate.low, rate.high) == pytest.approx((10 / 18, 8 / 18, 12 / 18))
    assert value("specforge", THREE, "tokens_per_round_prefill") == pytest.approx(17 / 6)
    late = engine_report("sglang", [of("a", [1], depth=3, prefill_tokens=0)])
    assert late["tokens_per_round_prefill"].value == 2


def test_sglang_server_may_make_a_round_more():
    found = engine_report("sglang-server", [EOS, NONE])["tokens_per_round"]
    # rounds accept 2 0 2; trimmed 2 0 1 and an idle one: 3 + 1 + 2 + 1 tokens; all 2 0 3 and a full one: 3 + 1 + 4 + 4
    assert (found.value, found.low, found.high) == pytest.approx((7 / 3, 7 / 4, 12 / 4))


def test_tensorrt_counts_the_prefill_as_an_iteration():
    found = engine_report("tensorrt-llm", THREE)
    assert found["tokens_per_iteration"].value == pytest.approx(17 / (4 + 4 + 1))
    assert found["tokens_per_iteration"].low == pytest.approx(17 / (5 + 5 + 2))
    assert found["tokens_per_iteration_mean"].value == pytest.approx((7 / 4 + 9 / 4 + 1) / 3)
    assert found["accept_rate"].value == pytest.approx((3 + 5 + 0) / (3 * 9))
    assert found["accept_rate_mean"].value == pytest.approx((3 / 12 + 5 / 12 + 0) / 3)


def test_safeailab_appends_the_token_before_and_sees_the_end_late():
    one = [of("a", [3, 1], depth=3)]
    found = engine_report("safeailab", one)
    assert found["tokens_per_round"].value == 3
    # two rounds more that accept nothing, or one that accepts all
    assert (found["tokens_per_round"].low, found["tokens_per_round"].high) == (8 / 4, 10 / 3)
    assert found["tokens_per_idx_mean"].value == 6  # 6 tokens, idxs = 1
    # an accepted EOS is seen at once: only drafts behind it are in doubt
    at_once = engine_report("safeailab", [EOS])["tokens_per_round"]
    assert (at_once.value, at_once.low, at_once.high) == (7 / 3, 7 / 3, 8 / 3)
    assert math.isnan(engine_report("safeailab", [of("a", [1], depth=3)])["tokens_per_idx_mean"].value)


def alpha_length(requests):
    """Mean of new_tokens / idxs; a request of one round has idxs = 0 and no ratio."""
    each = [(sum(rounds) + len(rounds)) / (len(rounds) - 1) for rounds in requests if len(rounds) > 1]
    return sum(each) / len(each) if each else math.nan


@pytest.mark.parametrize("requests", [[[1], [3, 1]], [[0], [3]], [[1], [0, 0], [2, 2, 1]], [[3], [3, 3, 3]]])
def test_bounds_of_alpha_length_hold_whatever_rounds_came_late(requests):
    """Every request may end at once, after one or two rounds that accept nothing, or after one that accepts all."""
    found = engine_report("safeailab", [of(str(n), r, depth=3) for n, r in enumerate(requests)])["tokens_per_idx_mean"]
    late = [[], [0], [0, 0], [3]]
    means = [alpha_length([[*r, *more] for r, more in zip(requests, extra, strict=True)])
             for extra in itertools.product(late, repeat=len(requests))]  # fmt: skip
    assert found.low <= np.nanmin(means) + 1e-12
    assert found.high >= np.nanmax(means) - 1e-12
    assert found.value == pytest.approx(alpha_length(requests), nan_ok=True)


def test_bounds_of_alpha_length_by_hand():
    # 6 / 1 alone; [1] with two idle rounds 4 / 2, [3, 1] with them 8 / 3; [1] with a full round 6 / 1
    found = engine_report("safeailab", [of("a", [1], depth=3), of("b", [3, 1], depth=3)])["tokens_per_idx_mean"]
    assert (found.value, found.low, found.high) == pytest.approx((6, (2 + 8 / 3) / 2, 6))
    alone = engine_report("safeailab", [of("a", [1], depth=3)])["tokens_per_idx_mean"]
    assert (alone.low, alone.high) == (2, 6)


def test_a_ratio_that_has_no_value_keeps_the_bounds_of_where_it_has_one():
    """A text of the prefill's token alone: no round, or late ones that accept nothing, or all of 3."""
    found = engine_report("safeailab", [NONE])["tokens_per_round"]
    assert math.isnan(found.value)
    assert (found.low, found.high) == (1, 4)


def test_specforge_says_which_records_it_wants():
    assert "first turns only" in engine_report("specforge", THREE)["tokens_per_round_prefill_mean"].about


def test_deepspec_counts_an_eos_round_up_to_eos():
    found = engine_report("deepspec", [EOS])
    # lengths 3, 1, 2; proposed 3, 3, 2
    assert found["tokens_per_round"].value == found["tokens_per_round"].high == 2
    assert found["emitted_share"].value == pytest.approx(6 / (8 + 3))
    assert [found["accept_unconditional", k].value for k in (1, 2, 3)] == [2 / 3, 2 / 3, 0]
    cut = engine_report("deepspec", [CUT])["tokens_per_round"]
    assert (cut.value, cut.low, cut.high) == (9 / 3, 9 / 3, 10 / 3)


def test_aiperf():
    found = engine_report("aiperf", THREE)
    assert found["tokens_per_round_mean"].value == pytest.approx((7 / 3 + 9 / 3) / 2)
    assert found["accept_rate_mean"].value == pytest.approx((4 / 9 + 6 / 9) / 2)
    assert found["emitted_share_mean"].value == pytest.approx((7 / 12 + 9 / 12) / 2)
    assert found["emitted_share_mean"].high == pytest.approx((8 / 12 + 10 / 12) / 2)


# ---- chunks


def test_speed_bench_takes_every_chunk():
    # chunks 1 | 3 1 2 and 1 | 2 4 2 and 1
    found = engine_report("speed-bench", THREE)
    assert found["average_al"].value == pytest.approx((7 / 4 + 9 / 4 + 1) / 3)
    # EOS off the last chunk of the first (2 -> 1) and of the last (gone or, with it, nothing)
    assert found["average_al"].low == pytest.approx((6 / 4 + 9 / 4 + 0) / 3)
    # lengths: 1 x4, 2 x3, 3 x1, 4 x1
    assert [found["joint", k].value for k in (1, 2, 3)] == pytest.approx([5 / 9, 2 / 9, 1 / 9])
    assert [found["accept_conditional", k].value for k in (1, 2, 3)] == pytest.approx([5 / 9, 2 / 5, 1 / 2])
    profile = engine_report("modelopt-profile", THREE)
    assert profile["tokens_per_chunk"].value == pytest.approx(17 / 9)
    assert profile["average_al"].value == found["average_al"].value


def test_a_length_that_never_occurred_has_no_rate_or_a_rate_of_zero():
    records = [of("a", [3, 0, 3], depth=3, end="cut")]  # chunks 1 4 1 3
    assert engine_report("speed-bench", records)["joint", 2].value == 2 / 4
    gap = [of("a", [3, 0, 1], depth=3, end="cut")]  # chunks 1 4 1 1
    with pytest.raises(DriftlabError):
        engine_report("speed-bench", gap)["joint", 2]
    assert engine_report("speed-bench", gap)["accept_conditional", 3].value == 1 / 4
    profile = engine_report("modelopt-profile", gap)
    assert [profile["joint", k].value for k in (1, 2, 3)] == [0, 0, 1 / 4]
    assert (profile["joint", 2].low, profile["joint", 2].high) == (0, 0)  # the text did not end in EOS


def test_trimmed_chunks():
    # the last chunk goes: 3 1 and 2 4; of the third nothing is left, which counts as one token
    found = engine_report("speed-bench-trimmed", THREE)["average_al"]
    assert found.value == found.low == found.high == pytest.approx((2 + 3 + 1) / 3)
    open_end = engine_report("speed-bench-trimmed", [of("a", [3, 0, 1], depth=3)])["average_al"]
    assert (open_end.value, open_end.low, open_end.high) == pytest.approx((7 / 3, 3 / 2, 6 / 2))
    assert value("speed-bench-trimmed", [of("a", [2], depth=3)], "average_al") == 1


@pytest.mark.parametrize("lengths", [*itertools.product((1, 2, 4), repeat=3), (4, 4, 2, 2, 2, 2), (3, 4, 1, 1, 1)])
def test_bounds_of_chunk_rates_hold_whatever_the_last_chunk_was(lengths):
    """The chunk list of the tool, with EOS off the last chunk or not, in every order of the same rounds."""
    records = [of("a", [length - 1 for length in lengths], depth=3)]
    speed, profile = engine_report("speed-bench", records), engine_report("modelopt-profile", records)
    for order in set(itertools.permutations(lengths)):
        for strip in (0, 1):
            chunks = [c for c in (1, *order[:-1], order[-1] - strip) if c]
            average = speed["average_al"]
            assert average.low - 1e-12 <= np.mean(chunks) <= average.high + 1e-12
            joint = {c: sum(x >= c for x in chunks) / len(chunks) for c in chunks}
            for k in (1, 2, 3):
                found = profile["joint", k]
                assert found.low - 1e-12 <= joint.get(k + 1, 0) <= found.high + 1e-12
                seen = [c for c in sorted(set(chunks)) if c < k + 1]
                conditional = joint[k + 1] / joint[seen[-1]] if k + 1 in joint and seen else joint.get(k + 1, 0)
                found = profile["accept_conditional", k]
                assert found.low - 1e-12 <= conditional <= found.high + 1e-12


# ---- bounds, against every engine that could have been


@pytest.mark.parametrize("end", ["eos", "cut"])
@pytest.mark.parametrize("last", [1, 2, 3])
def test_bounds_hold_whatever_was_accepted_behind_the_end(end, last):
    records = [of("a", [0, last], depth=3, end=end), of("b", [2], depth=3)]
    for really in range(last, 4):
        accepted = [0, really, 2]
        for engine, extra in (("vllm", ()), ("safeailab", (0, 0)), ("safeailab", (3,)), ("spec-bench", (1,)),
                              ("sglang-server", (3, 3)), ("deepspec", ())):  # fmt: skip
            rounds = [*accepted, *extra]
            if engine == "deepspec" and end == "eos":
                continue
            low, high = bounds(engine, records, "tokens_per_round")
            assert low - 1e-12 <= 1 + sum(rounds) / len(rounds) <= high + 1e-12
        for k in (1, 2, 3):
            low, high = bounds("vllm", records, "accept_unconditional", k)
            assert low <= sum(j >= k for j in accepted) / 3 <= high


# ---- expected counts, nothing at all


def test_expected_counts_are_ratios_of_expectations():
    record = RequestHistogram("a", "", 2, (0.5, 1.0, 0.25), (0.0, 0.25, 0.0), (0.0, 0.0, 0.5))
    # rounds 2.5, accepted 1 + 0.5 + 0.25 + 1 = 2.75 (+ 0.25 behind EOS)
    found = engine_report("vllm", [record])
    assert found["rounds"].value == 2.5
    assert (found["accepted"].value, found["accepted"].high) == (2.75, 3.0)
    assert found["tokens_per_round"].value == pytest.approx(5.25 / 2.5)
    # tokens 0.5 + 2 + 0.75 + 0.25 + 1 = 4.5, the prefill's 1
    assert value("sglang", [record], "tokens_per_round_prefill") == pytest.approx(5.5 / 2.5)
    assert value("driftlab", [record], "tau") == pytest.approx(3.5 / 2.0)
    # a quarter of the text ends in the target's own token
    trimmed = engine_report("speed-bench-trimmed", [record])["average_al"]
    assert trimmed.value == pytest.approx(3.25 / 1.75)
    assert (trimmed.low, trimmed.high) == pytest.approx(((3.25 - 0.75) / 1.5, (3.25 - 0.25) / 1.5))


@pytest.mark.parametrize("engine", list(CONVENTIONS))
def test_pooled_values_are_of_expected_counts(engine):
    """Two requests that each went either way, half and half, pool to the same as one that went each way."""
    half = {name: np.add(getattr(EOS, name), getattr(CUT, name)) / 2 for name in ("bonus", "eos", "cut")}
    either = RequestHistogram("h", "", 3, **{name: counts.tolist() for name, counts in half.items()})
    expected, certain = engine_report(engine, [either, either]), engine_report(engine, [EOS, CUT])
    for one, other in zip(expected.values, certain.values, strict=True):
        assert (one.name, one.position) == (other.name, other.position)
        if one.per == "pooled":
            assert (one.value, one.low, one.high) == pytest.approx((other.value, other.low, other.high))


@pytest.mark.parametrize("engine", list(CONVENTIONS))
def test_no_rounds_is_no_number_and_no_failure(engine):
    report = engine_report(engine, [NONE])
    for found in report.values:
        assert bool(found.reason) == math.isnan(found.value)
    told = {v.quantity for v in report.values if not math.isnan(v.value)}
    assert not told & {"tau", "tau_mean", "tokens_per_round", "tokens_per_round_mean", "accepted_per_round"}


@pytest.mark.parametrize("engine", list(CONVENTIONS))
def test_every_value_lies_in_its_bounds_and_says_what_it_is(engine):
    for records in (THREE, [EOS], [of("a", [3, 0, 1], depth=3)], [CUT, of("b", [1, 1, 1], depth=3)]):
        report = engine_report(engine, records)
        keys = [(v.quantity, v.position) for v in report.values]
        assert len(set(keys)) == len(keys)
        for found in report.values:
            assert found.name
            assert found.about
            assert found.last
            assert found.per in ("pooled", "request")
            if not math.isnan(found.value):
                assert found.low <= found.value <= found.high
        assert len(report.frame()) == len(report.values)


def test_what_training_metrics_are_is_said():
    assert {"full_acc_k", "cond_acc_k", "eal"} <= {name for name, _ in engine_report("speculators", THREE).left_out}


def test_wrong_questions_are_refused():
    with pytest.raises(DriftlabError, match="no convention 'tgi'"):
        engine_report("tgi", THREE)
    with pytest.raises(DriftlabError, match="no records"):
        engine_report("vllm", [])
    with pytest.raises(DriftlabError, match="several"):
        engine_report("vllm", [EOS, of("x", [1], depth=2)])
    with pytest.raises(DriftlabError, match="has no"):
        engine_report("vllm", THREE)["tau"]


def test_starts_without_torch():
    code = "import sys, driftlab.engines.conventions, driftlab.engines.logs; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_per_cent_is_printed_as_per_cent():
    report = engine_report("vllm", [of("a", [2, 0, 1], depth=3)])
    table = report.printed().set_index(["name", "position"])
    assert table.loc[("Avg Draft acceptance rate", ""), "value"] == pytest.approx(100 * 3 / 9)
    assert table.loc[("Avg Draft acceptance rate", ""), "unit"] == "%"
    assert table.loc[("Mean acceptance length", ""), "value"] == 2.0
    assert table.loc[("Per-position acceptance rate", "2"), ["value", "low", "high"]].tolist() == [1 / 3] * 3
    assert report["accept_rate"].value == pytest.approx(3 / 9)  # fractions elsewhere


@pytest.mark.parametrize(
    ("engine", "said"), [("vllm", True), ("speculators", True), ("aiperf", True), ("sglang", False)]
)
def test_trees_of_an_engine_that_drafts_chains_alone_are_noted(engine, said):
    tree = of("a", [2, 0, 1], depth=3, tree=True)
    assert ("vLLM drafts chains alone" in engine_report(engine, [tree]).note) == said
    assert not engine_report(engine, [of("a", [2, 0, 1], depth=3)]).note
