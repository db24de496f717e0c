"""The cost model against hand arithmetic, published totals and published curves."""

import dataclasses
import subprocess
import sys
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driftlab.cost import (
    CostModel,
    Drafting,
    Experts,
    Gqa,
    Hardware,
    LinearStep,
    MeasuredStep,
    Mla,
    ModelShape,
    RooflineStep,
    UnknownAttention,
    eagle3_head,
    experts_touched,
    gain_over,
    leviathan_speedup_iid,
    tau_iid,
)
from driftlab.cost.catalogue import (
    B300,
    DEEPSEEK_V3,
    DEEPSEEK_V4_FLASH,
    GB200,
    GPT_OSS_20B,
    GPT_OSS_120B,
    H100,
    KIMI_K2_NVFP4,
    LLAMA31_8B,
    QWEN3_8B,
    SMOLLM2_135M,
)
from driftlab.errors import DriftlabError

# a model to count by hand: hidden 4, two layers, 2 heads of 3 with 1 key head, SwiGLU 5, vocabulary 7
SMALL = ModelShape("small", layers=2, hidden=4, vocab=7, attention=Gqa(2, 1, 3), ffn=5)
SMALL_ATTENTION = 4 * 6 + 2 * 4 * 3 + 6 * 4  # q, k and v, o
SMALL_LAYER = SMALL_ATTENTION + 3 * 4 * 5 + 2 * 4  # with the SwiGLU and two norms
# 6 experts of which 2 are active and one shared, in the second layer only
SPARSE = dataclasses.replace(SMALL, experts=Experts(6, 2, width=3, shared=1), dense_layers=1)
EXPERT = 3 * 4 * 3
ROUND_NUMBERS = Hardware("round", bandwidth=1e3, peak={"bf16": 1e6}, link=100.0, source="made up")


def constant(seconds):
    return LinearStep(seconds)


# ---- shapes


def test_small_models_are_counted_by_hand():
    assert SMALL.parameters == 2 * SMALL_LAYER + 4 + 2 * 7 * 4
    assert SMALL.active_parameters == SMALL.parameters - 7 * 4
    layers = SMALL_LAYER + (SMALL_ATTENTION + 2 * 4 + 6 * 4)  # the second with a router in place of the SwiGLU
    assert SPARSE.parameters == layers + 7 * EXPERT + 4 + 2 * 7 * 4
    assert SPARSE.active_parameters == layers + 3 * EXPERT + 4 + 7 * 4
    assert dataclasses.replace(SMALL, tied=True).parameters == SMALL.parameters - 7 * 4


@pytest.mark.parametrize(
    ("shape", "total", "active", "tolerance"),
    [
        (LLAMA31_8B, 8030261248, None, 0),  # the checkpoint's own count
        (SMOLLM2_135M, 134515008, None, 0),
        (QWEN3_8B, 8190735360, None, 2e-6),  # without q and k norms
        (GPT_OSS_120B, 116.83e9, 5.13e9, 1e-3),
        (GPT_OSS_20B, 20.91e9, 3.61e9, 1e-3),
        (DEEPSEEK_V3, 671e9, 37e9, 0.011),  # 36.6 without the embedding, 37.6 with it
        (KIMI_K2_NVFP4, 1.03e12, 32e9, 0.011),
        (DEEPSEEK_V4_FLASH, 284e9, 13e9, 0.011),
    ],
)
def test_parameters_are_the_published_totals(shape, total, active, tolerance):
    assert shape.parameters == pytest.approx(total, rel=tolerance, abs=0)
    if active:
        assert shape.active_parameters == pytest.approx(active, rel=tolerance)


def test_the_published_size_of_gpt_oss_120b_follows_from_its_formats():
    """60.8 GiB in the model card: routed experts in 4.25 bits, all else in bfloat16."""
    everything = GPT_OSS_120B.weight_bytes(1, coverage=None) + GPT_OSS_120B.vocab * GPT_OSS_120B.hidden * 2
    one = GPT_OSS_120B.weight_bytes(1) - GPT_OSS_120B.weight_bytes(1e-9)  # bytes of 4 experts a layer
    size = everything + one * (128 - 4) / 4
    assert size / 2**30 == pytest.approx(60.8, rel=5e-3)


def test_an_eagle3_head_has_the_published_size():
    """kimi-k2.6-eagle3-mla: 6.03 GB in bfloat16. Head for Llama-3.1-8B, by hand: fc, q, k and v, o, SwiGLU, head, norms."""
    kimi = eagle3_head(KIMI_K2_NVFP4, draft_vocab=163840, ffn=18432, has_embedding=True)
    assert 2 * kimi.parameters == pytest.approx(6.03e9, rel=1e-3)
    h = 4096
    by_hand = 3 * h * h + 2 * h * (h + 2 * 1024) + h * h + 3 * h * 14336 + 32000 * h + 4 * h
    head = eagle3_head(LLAMA31_8B, draft_vocab=32000, ffn=14336)
    assert head.parameters == by_hand
    assert head.weight_bytes(1) == 2 * by_hand
    later = eagle3_head(LLAMA31_8B, draft_vocab=32000, ffn=14336, with_fusion=False)
    assert head.parameters - later.parameters == 3 * h * h
    assert eagle3_head(LLAMA31_8B, draft_vocab=32000, ffn=14336, bytes_weights=1.0).weight_bytes(1) == by_hand


def test_experts_touched_are_counted_by_enumeration():
    """Two tokens, each to 2 of 4 experts, all 6 x 6 choices equally likely."""
    pairs = [{a, b} for a in range(4) for b in range(a)]
    touched = [len(a | b) for a, b in product(pairs, pairs)]
    assert experts_touched(4, 2, 2) == pytest.approx(np.mean(touched))
    assert experts_touched(4, 2, 1) == 2


def test_experts_touched_by_the_rounds_of_the_announcement():
    """384 experts, 8 a token: 8 -> 31, 31 -> 110 and 110 -> 284 when 4 tokens are verified in place of 1."""
    got = [(round(KIMI_K2_NVFP4.touched(c)), round(KIMI_K2_NVFP4.touched(4 * c))) for c in (1, 4, 16)]
    assert got == [(8, 31), (31, 110), (110, 284)]


def test_weight_bytes_are_by_part():
    shape = dataclasses.replace(SPARSE, bytes_experts=0.5, bytes_attention=1.0, bytes_dense=4.0, bytes_head=3.0)
    dense = 3 * 4 * 5 + 5 * 4 + EXPERT + 6 * 4  # SwiGLU of layer 1, five norms, shared expert, router
    rest = 2 * SMALL_ATTENTION * 1.0 + dense * 4.0 + 7 * 4 * 3.0
    for tokens in (1, 3, 10):
        assert shape.weight_bytes(tokens) == pytest.approx(rest + 6 * (1 - (2 / 3) ** tokens) * EXPERT * 0.5)
    assert shape.weight_bytes(3, coverage=lambda n: 2) == pytest.approx(rest + 2 * EXPERT * 0.5)
    assert SMALL.weight_bytes(1) == SMALL.weight_bytes(1000) == 2 * (2 * SMALL_LAYER + 4 + 7 * 4)


@pytest.mark.parametrize(("tokens", "value"), [(1, 1.9), (1, 2.1), (2, 4.5), (9, 6.5), (2, 1.0)])
def test_a_coverage_that_cannot_be_is_refused(tokens, value):
    """2 of 6 experts a token: one token touches 2, two touch 2 to 4, nine touch 2 to 6."""
    with pytest.raises(DriftlabError, match="experts"):
        SPARSE.weight_bytes(tokens, coverage=lambda n: value)


def test_cached_bytes_by_attention_and_window():
    assert SMALL.kv_bytes(10) == 10 * 2 * (2 * 3) * 2.0  # layers, k and v of one head of 3, bytes
    assert LLAMA31_8B.kv_bytes(1) == 131072
    assert DEEPSEEK_V3.kv_bytes(1) == 61 * (512 + 64) * 2
    half = dataclasses.replace(SMALL, window=4, windowed_layers=1)
    assert half.kv_bytes(10) == (10 + 4) * 6 * 2.0
    assert half.kv_bytes(3) == SMALL.kv_bytes(3)
    assert dataclasses.replace(SMALL, bytes_kv=1.0).kv_bytes(10) == SMALL.kv_bytes(10) / 2
    assert DEEPSEEK_V4_FLASH.kv_bytes(1000) == 0


def test_operations_by_hand():
    """A multiply-add is two; per query and key 2 head_dim for the score and 2 for the sum, in every head and layer."""
    assert SMALL.operations(5, 0) == 5 * 2 * SMALL.active_parameters
    assert SMALL.operations(5, 10) - SMALL.operations(5, 0) == 5 * 10 * 2 * (2 * 4 * 3)
    mla = dataclasses.replace(SMALL, attention=Mla(2, 0, kv_rank=5, nope_dim=3, rope_dim=2, value_dim=3))
    assert mla.operations(1, 1) - mla.operations(1, 0) == 2 * 2 * (2 * (5 + 2) + 2 * 5)


@pytest.mark.parametrize(
    "change",
    [
        {"ffn": 0},
        {"bytes_head": 0},
        {"layers": 0},
        {"dense_layers": 3},
        {"windowed_layers": 1},
        {"windowed_layers": 3, "window": 4},
    ],
)
def test_shapes_that_cannot_be_are_refused(change):
    with pytest.raises(DriftlabError, match="small"):
        dataclasses.replace(SMALL, **change)


def test_other_impossible_inputs_are_refused():
    with pytest.raises(DriftlabError, match="active"):
        Experts(4, 5, 3)
    with pytest.raises(DriftlabError, match="attention="):
        eagle3_head(DEEPSEEK_V4_FLASH, draft_vocab=10, ffn=10)
    with pytest.raises(DriftlabError, match="more than 0"):
        SMALL.weight_bytes(0)
    with pytest.raises(DriftlabError, match="fp4"):
        H100.operations_per_second("fp4")


# ---- steps


def test_a_roofline_step_by_hand():
    """Bandwidth 1000 bytes/s, 1e6 operations/s, half of each reached."""
    step = RooflineStep(SMALL, ROUND_NUMBERS, fixed=2.0, per_token=0.25, bandwidth_fraction=0.5, ops_fraction=0.5)
    memory = (SMALL.weight_bytes(6) + 3 * SMALL.kv_bytes(10)) / 500
    assert step.time(6, 3, 10) == pytest.approx(2.0 + 6 * 0.25 + memory)
    assert step.memory_bound(6, 3, 10)
    many = 5000
    compute = SMALL.operations(many, 10) / 5e5
    assert not step.memory_bound(many, 3, 10)
    assert step.time(many, 3, 10) == pytest.approx(2.0 + many * 0.25 + compute)


def test_the_cache_is_read_once_per_sequence_not_per_token():
    step = RooflineStep(SMALL, ROUND_NUMBERS)
    assert step.time(8, 2, 100) - step.time(8, 2, 0) == pytest.approx(2 * SMALL.kv_bytes(100) / 1000)
    assert step.time(8, 2, 100) == step.time(2, 2, 100)  # dense and memory-bound: verifying is free


def test_tensor_parallel_by_hand():
    """4 devices: a quarter of the weights; the one key head is repeated; two all-reduces a layer of 6 x 4 numbers."""
    step = RooflineStep(SMALL, ROUND_NUMBERS.group(4, all_reduce_latency=0.5))
    memory = (SMALL.weight_bytes(6) / 4 + 3 * SMALL.kv_bytes(10)) / 1000
    exchange = 2 * 2 * (0.5 + 2 * 3 / 4 * (6 * 4 * 2) / 100)
    assert step.time(6, 3, 10) == pytest.approx(memory + exchange)
    assert RooflineStep(SMALL, ROUND_NUMBERS).communication(6) == 0
    assert ROUND_NUMBERS.group(4).operations_per_second("bf16") == 4e6
    wide = dataclasses.replace(SMALL, attention=Gqa(8, 8, 3))
    got = RooflineStep(wide, ROUND_NUMBERS.group(4)).memory(1, 1, 10)
    assert got == pytest.approx((wide.weight_bytes(1) + wide.kv_bytes(10)) / 4000)
    latent = dataclasses.replace(SMALL, attention=Mla(8, 0, 5, 3, 2, 3))
    got = RooflineStep(latent, ROUND_NUMBERS.group(4)).memory(1, 1, 10)
    assert got == pytest.approx((latent.weight_bytes(1) / 4 + latent.kv_bytes(10)) / 1000)


def test_key_heads_that_do_not_divide_are_read_by_the_fullest_device():
    """8 heads on 3 devices: 3, 3 and 2 of them, so a step waits for 3/8 of the cache. On 5: 2/8; on 12: one head, 1/8."""
    wide = dataclasses.replace(SMALL, attention=Gqa(8, 8, 3))
    for devices, share in ((1, 1), (2, 4 / 8), (3, 3 / 8), (5, 2 / 8), (8, 1 / 8), (12, 1 / 8)):
        step = RooflineStep(wide, ROUND_NUMBERS.group(devices))
        expected = (wide.weight_bytes(1) / devices + share * wide.kv_bytes(10)) / 1000
        assert step.memory(1, 1, 10) == pytest.approx(expected)


def test_a_measured_step_holds_its_points_and_is_straight_between():
    step = MeasuredStep(at=(1, 8, 16), seconds=(5.0, 7.0, 9.0))
    assert [step.time(n, 1, 0) for n in (1, 8, 16)] == [5.0, 7.0, 9.0]
    assert step.time(4.5, 1, 0) == pytest.approx(6.0)
    assert step.time(12, 1, 0) == pytest.approx(8.0)
    by_requests = MeasuredStep(at=(1, 3), seconds=(1.0, 2.0), by="sequences")
    assert by_requests.time(50, 2, 0) == pytest.approx(1.5)


def test_a_measured_step_refuses_what_it_does_not_know():
    step = MeasuredStep(at=(1, 1024, 1536), seconds=(5.11e-3, 20.63e-3, 104.5e-3), jumps=(1024,), context=100)
    assert step.time(1024, 1, 100) == 20.63e-3
    assert step.time(1536, 1, 100) == 104.5e-3
    with pytest.raises(DriftlabError, match="jumps between 1024 and 1536"):
        step.time(1200, 1, 100)
    for tokens in (0.5, 1537):
        with pytest.raises(DriftlabError, match="outside the measured 1 to 1536"):
            step.time(tokens, 0.5, 100)
    with pytest.raises(DriftlabError, match="measured at context 100, not 150: give per_cached_token"):
        step.time(8, 1, 150)
    longer = dataclasses.replace(step, per_cached_token=1e-6)
    assert longer.time(1024, 3, 150) == pytest.approx(20.63e-3 + 3 * 50 * 1e-6)
    for shorter in (step, longer):
        with pytest.raises(DriftlabError, match="measured at context 100, not 99: measure"):
            shorter.time(1024, 3, 99)


def test_no_measured_step_takes_less_than_nothing():
    """6 ms less 8 x 4,096 cached tokens of 1 us would be -26.8 ms."""
    step = MeasuredStep((1, 8), (5e-3, 6e-3), context=4096, per_cached_token=1e-6)
    with pytest.raises(DriftlabError, match="4096, not 0"):
        step.time(8, 8, 0)
    for cost in (-1e-6, float("nan"), float("inf")):
        with pytest.raises(DriftlabError, match="per_cached_token"):
            dataclasses.replace(step, per_cached_token=cost)


@pytest.mark.parametrize(
    ("at", "seconds", "jumps"),
    [
        ((1,), (1.0,), ()),
        ((1, 1), (1.0, 2.0), ()),
        ((2, 1), (1.0, 2.0), ()),
        ((1, 2), (1.0, 0.0), ()),
        ((1, 2), (1.0, 2.0), (2,)),
    ],
)
def test_tables_that_cannot_be_are_refused(at, seconds, jumps):
    with pytest.raises(DriftlabError):
        MeasuredStep(at=at, seconds=seconds, jumps=jumps)


@pytest.mark.parametrize(
    "step", [RooflineStep(SMALL, ROUND_NUMBERS), LinearStep(1.0), MeasuredStep((1, 9), (1.0, 2.0))]
)
@pytest.mark.parametrize(("tokens", "sequences", "context"), [(2, 3, 0), (1, 0, 0), (1, 1, -1)])
def test_steps_without_tokens_or_with_negative_context_are_refused(step, tokens, sequences, context):
    with pytest.raises(DriftlabError):
        step.time(tokens, sequences, context)


# ---- rounds


def test_speed_up_with_a_constant_cost_ratio():
    """G10: tau 2.333, K = 3, c = 0.1 gives tau / (1 + K c) = 1.795."""
    model = CostModel(constant(1.0), constant(0.1))
    assert model.speedup_over_none(2.333, 3, 1) == pytest.approx(1.795, abs=5e-4)
    assert model.break_even_tau(3, 1) == pytest.approx(1.3)
    assert model.speedup_over_none(1.3, 3, 1) == pytest.approx(1.0)


def test_a_round_by_hand():
    """Batch 4, K = 3: the target verifies 16 tokens, the drafter runs 3 steps of 4; one step of 12 if parallel."""
    target, draft = LinearStep(10.0, 0.5, 0.01), LinearStep(1.0, 0.125)
    model = CostModel(target, draft, overhead=2.0)
    assert model.plain_time(4, 100) == 10 + 4 * 0.5 + 4 * 100 * 0.01
    assert model.round_time(3, 4, 100) == pytest.approx((10 + 16 * 0.5 + 4) + 3 * (1 + 4 * 0.125) + 2)
    assert model.tokens_per_second_per_user(2.5, 3, 4, 100) == pytest.approx(2.5 / model.round_time(3, 4, 100))
    parallel = dataclasses.replace(model, parallel=True)
    assert parallel.round_time(3, 4, 100) == pytest.approx((10 + 16 * 0.5 + 4) + (1 + 12 * 0.125) + 2)
    first = dataclasses.replace(model, first_draft=LinearStep(5.0))
    assert first.draft_time(3, 4) == pytest.approx(5 + 2 * 1.5)
    assert first.draft_time(1, 4) == 5.0


def test_a_tree_round_by_hand():
    """Batch 2, K = 7, 60 nodes verified, 10 expanded a step: 120 target tokens, a draft step of 2 tokens and 6 of 20."""
    model = CostModel(LinearStep(10.0, 0.5), LinearStep(1.0, 0.25), overhead=2.0)
    expected = (10 + 120 * 0.5) + (1 + 2 * 0.25) + 6 * (1 + 20 * 0.25) + 2
    tree = {"verify_tokens": 60, "draft_tokens": 10}
    assert model.draft_time(7, 2, draft_tokens=10) == pytest.approx(1.5 + 6 * 6.0)
    assert model.round_time(7, 2, **tree) == pytest.approx(expected)
    assert model.break_even_tau(7, 2, **tree) == pytest.approx(expected / 11)
    assert model.speedup_over_none(3.3, 7, 2, **tree) == pytest.approx(3.3 * 11 / expected)
    assert model.tokens_per_second_per_user(3.3, 7, 2, **tree) == pytest.approx(3.3 / expected)
    first = dataclasses.replace(model, first_draft=LinearStep(5.0))
    assert first.round_time(7, 2, **tree) == pytest.approx(expected + 5.0 - 1.5)
    # a drafter that expands one node a step drafts a tree at the price of a chain
    narrow = model.round_time(7, 2, verify_tokens=60, draft_tokens=1)
    assert narrow == pytest.approx((10 + 120 * 0.5) + 7 * 1.5 + 2)
    assert model.round_time(7, 2, draft_tokens=1) == model.round_time(7, 2, verify_tokens=8) == model.round_time(7, 2)


def test_a_parallel_drafter_has_one_step_whatever_is_verified():
    model = CostModel(LinearStep(10.0, 0.5), LinearStep(1.0, 0.25), parallel=True)
    assert model.round_time(7, 2, verify_tokens=60) == pytest.approx((10 + 120 * 0.5) + (1 + 14 * 0.25))
    with pytest.raises(DriftlabError, match="leave draft_tokens out"):
        model.round_time(7, 2, verify_tokens=60, draft_tokens=10)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ("step, 1e-3", "draft 0.001 is no step"),
        ("0.02, step", "target 0.02 is no step"),
        ("step, step, first_draft=1e-3", "first_draft 0.001 is no step"),
    ],
)
def test_a_number_is_no_step(made, words):
    """In a process of its own: in these tests the type hook would be first."""
    code = (
        "from driftlab.cost import CostModel, LinearStep\nfrom driftlab.errors import DriftlabError\nstep = LinearStep(1.0)\n"
        f"try: CostModel({made})\nexcept DriftlabError as error: print(error)"
    )
    assert words in subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_a_target_measured_by_sequences_is_refused():
    table = MeasuredStep(at=(1, 8), seconds=(1.0, 2.0), by="sequences")
    with pytest.raises(DriftlabError, match="measured by sequences"):
        CostModel(table, constant(0.1))
    assert CostModel(constant(1.0), table).draft_time(2, 8) == 4.0


@settings(max_examples=60, deadline=None)
@given(alpha=st.floats(0.0, 0.999), depth=st.integers(1, 12), ratio=st.floats(0.0, 2.0))
def test_leviathans_factor_is_the_constant_ratio_with_independent_acceptance(alpha, depth, ratio):
    closed = (1 - alpha ** (depth + 1)) / ((1 - alpha) * (depth * ratio + 1))
    assert leviathan_speedup_iid(alpha, depth, ratio) == pytest.approx(closed, rel=1e-9)
    if ratio > 0:
        model = CostModel(constant(1.0), constant(ratio))
        assert model.speedup_over_none(tau_iid(alpha, depth), depth, 1) == pytest.approx(closed, rel=1e-9)


def test_tau_of_a_drafter_that_is_always_right():
    assert tau_iid(1.0, 4) == 5
    assert tau_iid(1, 4) == 5


def test_best_depth_weighs_tau_against_cost():
    """With c = 0.2: 1.8 / 1.2 = 1.5, 2.3 / 1.4 = 1.643, 2.5 / 1.6 = 1.5625."""
    model = CostModel(constant(1.0), constant(0.2))
    best = model.best_depth({1: 1.8, 2: 2.3, 3: 2.5}, 1)
    assert (best.depth, best.speedup) == (2, pytest.approx(2.3 / 1.4))
    assert list(best.by_depth.values()) == pytest.approx([1.5, 2.3 / 1.4, 2.5 / 1.6])
    dear = CostModel(constant(1.0), constant(3.0)).best_depth({1: 1.8, 2: 2.3}, 1)
    assert (dear.depth, dear.speedup) == (0, 1.0)  # better not to draft
    with pytest.raises(DriftlabError, match="at least one K"):
        model.best_depth({}, 1)


def test_best_depth_falls_with_concurrency_where_verifying_costs():
    model = CostModel(LinearStep(5.0, 0.1), constant(0.1))
    taus = {k: tau_iid(0.7, k) for k in range(1, 9)}
    depths = [model.best_depth(taus, c).depth for c in (1, 8, 64)]
    assert depths == sorted(depths, reverse=True)
    assert depths[0] > depths[-1]


def test_gain_over_another_drafter_is_not_speed_up_over_none():
    target = constant(1.0)
    new = Drafting(CostModel(target, constant(0.2)), {2: 2.3, 3: 2.6})
    old = Drafting(CostModel(target, constant(0.1)), {2: 2.0, 3: 2.2})
    gain = gain_over(new, old, 1)
    assert (gain.depth, gain.other_depth) == (2, 3)  # 2.3 / 1.4 against 2.2 / 1.3, each at its own best
    assert gain.ratio == pytest.approx((2.3 / 1.4) / (2.2 / 1.3))
    assert new.model.speedup_over_none(2.3, 2, 1) == pytest.approx(2.3 / 1.4)
    same = gain_over(new, old, 1, depth=3)
    assert same.ratio == pytest.approx((2.6 / 1.6) / (2.2 / 1.3))
    assert (same.depth, same.other_depth) == (3, 3)
    with pytest.raises(DriftlabError, match="old drafter has no tau"):
        gain_over(new, dataclasses.replace(old, taus={2: 2.0}), 1, depth=3)
    with pytest.raises(DriftlabError, match="one target"):
        gain_over(new, Drafting(CostModel(constant(2.0), constant(0.1)), {2: 2.0}), 1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: m.speedup_over_none(0.9, 3, 1), "between 1 and 4"),
        (lambda m: m.tokens_per_second_per_user(4.1, 3, 1), "between 1 and 4"),
        (lambda m: m.round_time(0, 1), "at least one token"),
        (lambda m: m.round_time(3, 1, verify_tokens=3), "are 4 tokens"),
        (lambda m: m.round_time(3, 1, verify_tokens=5), "give draft_tokens"),
        (lambda m: m.speedup_over_none(2.0, 3, 1, verify_tokens=5), "give draft_tokens"),
        (lambda m: m.round_time(3, 1, draft_tokens=0), "at least one token a sequence"),
        (lambda m: tau_iid(1.1, 2), "probability"),
        (lambda m: leviathan_speedup_iid(0.5, 2, -0.1), "below 0"),
        (lambda m: CostModel(m.target, m.draft, overhead=-1.0), "not below 0"),
    ],
)
def test_rounds_that_cannot_be_are_refused(call, words):
    with pytest.raises(DriftlabError, match=words):
        call(CostModel(constant(1.0), constant(0.1)))


# ---- known numbers


def test_the_six_times_of_the_announcement_from_three_parameters():
    """5.5 ms fixed, 87 % of bandwidth, 1.53 ms for three draft steps: 2.14, 1.75, 1.59 (published 2.03, 1.71, 1.66)."""
    step = RooflineStep(KIMI_K2_NVFP4, GB200.group(4), fixed=5.5e-3, bandwidth_fraction=0.87)
    model = CostModel(step, LinearStep(1.53e-3 / 3))
    got = [model.speedup_over_none(3.013, 3, c) for c in (1, 4, 16)]
    assert got == pytest.approx([2.14, 1.75, 1.59], abs=0.015)
    plain = [1e3 * model.plain_time(c) for c in (1, 4, 16)]
    rounds = [1e3 * model.round_time(3, c) for c in (1, 4, 16)]
    assert plain == pytest.approx([6.35, 7.96, 12.56], rel=0.06)
    assert rounds == pytest.approx([9.42, 14.04, 22.81], rel=0.04)


def test_what_a_cached_token_costs_llama_on_an_h100():
    """SpecDecode-Bench fitted 3.93e-5 ms per cached token: its bytes at full bandwidth are 3.91e-5 ms."""
    step = RooflineStep(LLAMA31_8B, H100)
    per_token = (step.time(1, 1, 10_000) - step.time(1, 1, 0)) / 10_000
    assert 1e3 * per_token == pytest.approx(3.93e-5, rel=0.01)


def test_measured_coverage_lowers_the_cost_of_verifying():
    step = RooflineStep(KIMI_K2_NVFP4, GB200.group(4))
    correlated = dataclasses.replace(step, coverage=lambda n: min(8.0 * n, 20.0))
    assert correlated.memory(1, 1, 0) == pytest.approx(step.memory(1, 1, 0))
    saved = step.memory(4, 1, 0) - correlated.memory(4, 1, 0)
    expert = 3 * 7168 * 2048 * 0.5625
    assert saved == pytest.approx((KIMI_K2_NVFP4.touched(4) - 20) * 60 * expert / (4 * 8e12))


def test_devices_and_unknown_attention_say_what_they_are():
    assert UnknownAttention(5).parameters(3, 3) == 5
    assert B300.group(4).tensor_parallel == 4
    assert RooflineStep(DEEPSEEK_V4_FLASH, B300.group(4)).memory(1, 1, 0) == pytest.approx(
        DEEPSEEK_V4_FLASH.weight_bytes(1) / (4 * 8e12)
    )


def test_the_cost_model_starts_without_torch():
    code = "import sys, driftlab.cost.catalogue, driftlab.cost.fitting; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "False", done.stderr
