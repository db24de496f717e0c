"""The drafter's blocks against transformers' own modules; windows against a mask; own keys against one long text."""

import dataclasses
import math

import pytest
import torch
from builders import config_of, own_tables, random_batch

WIDTH, HEADS, KV_HEADS, D_HEAD = 32, 4, 2, 8
MLA = {"kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10}
YARN = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64},
    **{"beta_fast": 4.0, "beta_slow": 1.0},
}


def spread(module, seed=0, plus_one=False):
    """Random weights of unit output scale, gains in [0.5, 2], biases of a few tenths; in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3, generator=generator)
            elif parameter.ndim == 1:
                parameter.uniform_(0.5, 2.0, generator=generator).sub_(1.0 if plus_one else 0.0)
            else:
                parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5, generator=generator)
    return module


def noise(*shape, seed=1, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def causal(rows, dtype):
    return torch.full((rows, rows), -torch.inf, dtype=dtype).triu(1)[None, None]


def attended(block, x):
    """Every row attends from itself, over the rows up to it."""
    from driftlab.drafter.blocks import LayerKV
    from driftlab.segments import Starts

    batch, rows = x.shape[:2]
    positions = torch.arange(rows).expand(batch, rows)
    starts = Starts(positions, torch.ones_like(positions, dtype=torch.bool), torch.zeros_like(positions), ("",) * batch)
    return block(x, positions, LayerKV(*block.keys(x, positions, 1)), starts, 1)


def angles(width, rows, theta, dtype):
    """cos and sin as transformers hands them to a layer, in full precision."""
    turns = torch.arange(rows, dtype=torch.float64)[:, None] * theta ** (-torch.arange(0, width, 2).double() / width)
    turns = torch.cat([turns, turns], -1)[None]
    return turns.cos().to(dtype), turns.sin().to(dtype)


def exact_norms(module, plus_one=False):
    """Replace transformers' norms, which compute in float32, by torch's, so that the whole can be float64."""
    for name, child in list(module.named_children()):
        if "RMSNorm" in type(child).__name__:
            eps = child.eps if plus_one else child.variance_epsilon
            norm = torch.nn.RMSNorm(len(child.weight), eps=eps, dtype=torch.float64)
            norm.weight.data = child.weight.data.double() + (1.0 if plus_one else 0.0)
            setattr(module, name, norm)
        else:
            exact_norms(child, plus_one)
    return module.double()


def compare(block, reference, cos_sin, *, dtype, plus_one=False, width=WIDTH, rows=11):
    """One forward of both on the same input; ``reference`` has the block's weights."""
    x = noise(2, rows, width, dtype=dtype)
    if dtype == torch.float64:
        block, reference = block.double(), exact_norms(reference, plus_one)
    with torch.no_grad():
        expected = reference(
            hidden_states=x, position_embeddings=cos_sin(rows, dtype), attention_mask=causal(rows, dtype)
        )
        ours = attended(block, x)
    assert ours.std() > 0.1
    torch.testing.assert_close(ours, expected[0], rtol=0, atol=1e-9 if dtype == torch.float64 else 1e-5)


# ---- MLA


def deepseek_config(**overrides):
    from transformers import DeepseekV3Config

    config = DeepseekV3Config(
        **{
            **{"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "q_lora_rank": 16},
            **{"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "n_shared_experts": 2},
            **{"moe_intermediate_size": 20, "routed_scaling_factor": 2.5, "max_position_embeddings": 512},
            **MLA,
            **overrides,
        }
    )
    config._attn_implementation = "sdpa"  # eager rounds its softmax to float32
    return config


def mla_pair(rope=None, q_rank=16, interleaved=True):
    """Our block and transformers' with one set of weights, and its rotary embedding."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

    from driftlab.drafter.blocks import LatentAttention
    from driftlab.drafter.config import LatentConfig

    theirs = {**({"rope_type": "default", "rope_theta": 10000.0} if rope is None else rope)}
    config = deepseek_config(q_lora_rank=q_rank or None, rope_interleave=interleaved, rope_parameters=theirs)
    reference = spread(DeepseekV3Attention(config, 0))
    ours = config_of(
        num_key_value_heads=HEADS,
        latent=LatentConfig(q_lora_rank=q_rank, **MLA),
        rope_scaling=None if rope is None else scaling_of(rope),
        rope_interleaved=interleaved,
    )
    block = LatentAttention(ours, WIDTH)
    block.load_state_dict(reference.state_dict())
    return block, reference, DeepseekV3RotaryEmbedding(config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("q_rank", [16, 0])
def test_latent_attention_is_that_of_deepseek_v3(q_rank, interleaved, dtype):
    """E10; value heads are wider than key heads, queries with and without a low-rank step."""
    block, reference, _ = mla_pair(q_rank=q_rank, interleaved=interleaved)
    compare(block, reference, lambda rows, dtype: angles(4, rows, 10000.0, dtype), dtype=dtype)


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"mscale": 1.0, "mscale_all_dim": 1.0},
        {"mscale": 0.7, "mscale_all_dim": 1.3},
        {"mscale": 1.0},
        {"mscale_all_dim": 0.5},
    ],
)
def test_latent_attention_scales_its_scores_under_yarn(extra):
    block, reference, rotary = mla_pair(rope={**YARN, **extra})
    compare(
        block,
        reference,
        lambda rows, dtype: rotary(torch.zeros(1, dtype=dtype), torch.arange(rows)[None]),
        dtype=torch.float32,
    )
    expected = (1 + 0.1 * extra.get("mscale_all_dim", 0.0) * math.log(8.0)) ** 2
    assert block.scale == pytest.approx(expected / math.sqrt(10), abs=1e-12)


# ---- grouped-query attention


def gqa_config(family, **overrides):
    import transformers

    config = getattr(transformers, f"{family}Config")(
        **{
            **{"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": D_HEAD},
            **{"rms_norm_eps": 1e-3, "max_position_embeddings": 512},
            **overrides,
        }
    )
    config._attn_implementation = "sdpa"
    return config


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
def test_attention_is_that_of_llama(bias, dtype):
    from transformers.models.llama.modeling_llama import LlamaAttention

    from driftlab.drafter.blocks import SelfAttention

    reference = spread(LlamaAttention(gqa_config("Llama", attention_bias=bias), 0))
    block = SelfAttention(config_of(attention_bias=bias, output_bias=bias), WIDTH)
    block.load_state_dict(reference.state_dict())
    compare(block, reference, lambda rows, dtype: angles(D_HEAD, rows, 10000.0, dtype), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_attention_with_normed_heads_is_that_of_qwen3(dtype):
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

    from driftlab.drafter.blocks import SelfAttention

    reference = spread(Qwen3Attention(gqa_config("Qwen3"), 0))
    block = SelfAttention(config_of(qk_norm=True, rms_norm_eps=1e-3), WIDTH)
    block.load_state_dict(reference.state_dict())
    compare(block, reference, lambda rows, dtype: angles(D_HEAD, rows, 10000.0, dtype), dtype=dtype)


@pytest.mark.parametrize("use_qk_norm", [False, True])
def test_attention_with_a_half_turned_head_is_that_of_glm(use_qk_norm):
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeAttention

    from driftlab.drafter.blocks import SelfAttention

    reference = spread(Glm4MoeAttention(gqa_config("Glm4Moe", attention_bias=True, use_qk_norm=use_qk_norm), 0))
    block = SelfAttention(
        config_of(attention_bias=True, qk_norm=use_qk_norm, rms_norm_eps=1e-3, rotary_dim=D_HEAD // 2), WIDTH
    )
    block.load_state_dict(reference.state_dict())
    compare(block, reference, lambda rows, dtype: angles(D_HEAD // 2, rows, 10000.0, dtype), dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gated_attention_is_that_of_qwen3_next(dtype):
    """q_proj holds query and gate of each head in turn; a quarter of a head is turned; gains are 1 + w."""
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention

    from driftlab.drafter.blocks import SelfAttention

    reference = spread(Qwen3NextAttention(gqa_config("Qwen3Next"), 0), plus_one=True)
    state = reference.state_dict()
    both = state.pop("q_proj.weight").view(HEADS, 2, D_HEAD, WIDTH)
    state["q_proj.weight"], state["gate.weight"] = both[:, 0].reshape(-1, WIDTH), both[:, 1].reshape(-1, WIDTH)
    block = SelfAttention(
        config_of(attention_gate=True, qk_norm=True, norm_plus_one=True, rotary_dim=2, rms_norm_eps=1e-3), WIDTH
    )
    block.load_state_dict(state)
    compare(block, reference, lambda rows, dtype: angles(2, rows, 10000.0, dtype), dtype=dtype, plus_one=True)


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_norm_rounds_where_that_of_its_family_does(plus_one, dtype):
    """Llama's norms round before the gain, those with 1 + w after it: bit-equal in half precision too."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

    from driftlab.drafter.norms import RMSNorm

    reference = spread((Qwen3NextRMSNorm if plus_one else LlamaRMSNorm)(64, eps=1e-2), plus_one=plus_one).to(dtype)
    norm = RMSNorm(64, 1e-2, plus_one=plus_one).to(dtype)
    norm.load_state_dict(reference.state_dict())
    x = (3 * noise(50, 64)).to(dtype)
    assert torch.equal(norm(x), reference(x))


# ---- rotary embedding


def scaling_of(rope, max_positions=512):
    """The same settings in our words."""
    from driftlab.drafter.rotary import RopeScaling

    rope = {name: value for name, value in rope.items() if name not in ("rope_theta", "partial_rotary_factor")}
    kind = rope.pop("rope_type")
    if kind == "default":
        return None
    length = rope.pop("original_max_position_embeddings", max_positions)
    return RopeScaling(kind=kind, original_max_positions=length, **rope)


LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 128,
}
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "other theta": {"rope_type": "default", "rope_theta": 1234567.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": LLAMA3,
    "llama3, narrow": {**LLAMA3, "low_freq_factor": 2.0, "high_freq_factor": 3.0, "factor": 32.0},
    "yarn": YARN,
    "yarn, factor 1": {**YARN, "factor": 1.0},
    "yarn, beta 32": {**YARN, "beta_fast": 32.0, "original_max_position_embeddings": 4096},
    "yarn, equal betas": {**YARN, "beta_fast": 1.0, "beta_slow": 1.0},
    "yarn, attention_factor": {**YARN, "attention_factor": 0.6},
    "yarn, attention_factor 1": {**YARN, "attention_factor": 1.0},
    "yarn, not truncated": {**YARN, "truncate": False},
    "yarn, mscales": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn, mscale alone": {**YARN, "mscale": 0.7},
    "yarn, attention_factor wins": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3, "attention_factor": 0.9},
}


@pytest.mark.parametrize("name", ROPES)
def test_rotary_is_that_of_transformers(name):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    from driftlab.drafter.rotary import Rotary, frequencies

    rope, width, x = ROPES[name], 16, noise(2, 3, 40, 16)
    config = gqa_config("Llama", head_dim=width, rope_parameters=dict(rope))
    reference, scaling = LlamaRotaryEmbedding(config), scaling_of(rope)
    positions = torch.arange(17, 57).expand(2, -1)
    expected, _ = apply_rotary_pos_emb(x, x, *reference(x, positions))
    ours = frequencies(width, rope["rope_theta"], scaling)
    torch.testing.assert_close(ours.float(), reference.inv_freq, rtol=2e-6, atol=0)
    torch.testing.assert_close(Rotary(width, rope["rope_theta"], scaling)(x, positions), expected, rtol=0, atol=1e-5)
    plain = frequencies(width, rope["rope_theta"])
    changes = name not in ("default", "other theta", "dynamic", "yarn, factor 1")
    assert bool(((plain / ours - 1).abs() > 0.1).any()) == changes


@pytest.mark.parametrize("name", ["default", "llama3", "yarn, not truncated"])
def test_a_part_of_the_head_is_turned_as_if_it_were_the_head(name):
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRotaryEmbedding, apply_rotary_pos_emb

    from driftlab.drafter.rotary import Rotary

    rope, x = {**ROPES[name], "partial_rotary_factor": 0.25}, noise(1, 2, 9, 32)
    reference = Glm4MoeRotaryEmbedding(gqa_config("Glm4Moe", head_dim=32, rope_parameters=dict(rope)))
    positions = torch.arange(9)[None]
    expected, _ = apply_rotary_pos_emb(x, x, *reference(x, positions))
    ours = Rotary(8, rope["rope_theta"], scaling_of(rope))(x, positions)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
    assert torch.equal(ours[..., 8:], x[..., 8:])
    assert not torch.allclose(ours[:, :, 1:, :8], x[:, :, 1:, :8])


def test_interleaved_pairs_are_neighbours():
    """(1, 0) at dimensions 2 and 3 turns within them, by the second frequency."""
    from driftlab.drafter.rotary import Rotary

    x = torch.tensor([0.0, 0.0, 1.0, 0.0], dtype=torch.float64).view(1, 1, 1, 4)
    turned = Rotary(4, 100.0, interleaved=True)(x, torch.tensor([[3]])).flatten()
    torch.testing.assert_close(turned, torch.tensor([0, 0, math.cos(0.3), math.sin(0.3)], dtype=torch.float64))


def test_dynamic_scaling_ends_at_its_length():
    from driftlab import DriftlabError
    from driftlab.drafter.rotary import RopeScaling, Rotary

    rotary = Rotary(8, 10000.0, RopeScaling(kind="dynamic", factor=2.0, original_max_positions=20))
    assert torch.equal(
        rotary(noise(1, 1, 1, 8), torch.tensor([[19]])), Rotary(8, 1e4)(noise(1, 1, 1, 8), torch.tensor([[19]]))
    )
    with pytest.raises(DriftlabError, match="position 20 is beyond its 20"):
        rotary(noise(1, 1, 1, 8), torch.tensor([[20]]))


# ---- experts


def experts_state(state):
    """transformers' fused expert tensors under the names of single experts."""
    fused, down = state.pop("experts.gate_up_proj"), state.pop("experts.down_proj")
    for index, (both, out) in enumerate(zip(fused, down, strict=True)):
        gate, up = both.chunk(2)
        state |= {f"experts.{index}.{name}_proj.weight": w for name, w in (("gate", gate), ("up", up), ("down", out))}
    return state


def run_experts(experts, reference, dtype=torch.float32):
    x = noise(2, 40, WIDTH, dtype=dtype)
    with torch.no_grad():
        ours, expected = experts(x), reference.to(dtype)(x)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
    return ours


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("groups", [(4, 2), (2, 1), (1, 1)])
@pytest.mark.parametrize("shift", [0.0, -2.0])
def test_experts_are_those_of_deepseek_v3(groups, normalise, shift):
    """The correction bias takes part in the choice alone; with -2 every ranked score is negative, and a closed group is
    still closed.
    """
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    from driftlab.drafter.config import ExpertsConfig
    from driftlab.drafter.mlp import Experts

    config = deepseek_config(n_group=groups[0], topk_group=groups[1], norm_topk_prob=normalise)
    reference = spread(DeepseekV3MoE(config))
    reference.gate.e_score_correction_bias.copy_(0.3 * noise(8) + shift)
    ours = ExpertsConfig(
        **{"count": 8, "per_token": 3, "intermediate_size": 20, "shared_intermediate_size": 40, "scoring": "sigmoid"},
        **{"groups": groups[0], "groups_per_token": groups[1], "normalise": normalise, "scale": 2.5},
    )
    experts = Experts(WIDTH, ours)
    experts.load_state_dict(experts_state(reference.state_dict()))
    run_experts(experts, reference)
    x = noise(30, WIDTH)
    _, weights, chosen = reference.gate(x)
    dense = experts.gate(x)
    assert torch.equal((dense > 0).sum(-1), torch.full((30,), 3))
    torch.testing.assert_close(dense.gather(1, chosen), weights)
    unbiased = dataclasses.replace(ours, groups=1, groups_per_token=1)
    plain = Experts(WIDTH, unbiased).gate
    plain.weight = experts.gate.weight
    assert not torch.equal(plain(x) > 0, dense > 0)


@pytest.mark.parametrize("normalise", [True, False])
def test_experts_are_those_of_qwen3_next(normalise):
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock

    from driftlab.drafter.config import ExpertsConfig
    from driftlab.drafter.mlp import Experts

    config = gqa_config(
        "Qwen3Next",
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=normalise,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=24,
    )
    reference = spread(Qwen3NextSparseMoeBlock(config))
    state = experts_state(reference.state_dict())
    state = {name.replace("shared_expert.", "shared_experts."): tensor for name, tensor in state.items()}
    experts = Experts(
        WIDTH,
        ExpertsConfig(
            **{"count": 6, "per_token": 2, "intermediate_size": 20, "shared_intermediate_size": 24},
            **{"scoring": "softmax", "normalise": normalise, "shared_gate": True},
        ),
    )
    experts.load_state_dict(state)
    whole = run_experts(experts, reference)
    with torch.no_grad():
        experts.shared_expert_gate.weight.mul_(-1)
        assert not torch.allclose(experts(noise(2, 40, WIDTH)), whole, atol=1e-2)


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
def test_in_float64_experts_are_float64_throughout(scoring):
    """A router that stays in float32 would be off by 1e-7."""
    from driftlab.drafter.config import ExpertsConfig
    from driftlab.drafter.mlp import Experts

    config = ExpertsConfig(count=3, per_token=3, intermediate_size=8, scoring=scoring, normalise=True)
    experts, x = spread(Experts(WIDTH, config)).double(), noise(7, WIDTH, dtype=torch.float64)
    scores = x @ experts.gate.weight.T
    scores = scores.exp() if scoring == "softmax" else 1 / (1 + (-scores).exp())
    expected = 0
    for index, expert in enumerate(experts.experts):
        gate, up = x @ expert.gate_proj.weight.T, x @ expert.up_proj.weight.T
        out = (gate / (1 + (-gate).exp()) * up) @ expert.down_proj.weight.T
        expected = expected + out * (scores[:, index] / scores.sum(-1))[:, None]
    torch.testing.assert_close(experts(x), expected, rtol=0, atol=1e-12)


# ---- sliding windows of attend()


def window_case(own, seed=0):
    context, starts, d_value = 9, 6, 5
    rows = torch.tensor([[0, 1, 3, 5, 7, 8], [8, 2, 0, 4, 4, 6]])
    double = torch.float64
    return {
        "q": 2 * noise(2, HEADS, starts, 6, seed=seed, dtype=double),
        "context_k": 2 * noise(2, KV_HEADS, context, 6, seed=seed + 1, dtype=double),
        "context_v": noise(2, KV_HEADS, context, d_value, seed=seed + 2, dtype=double),
        "own_k": 2 * noise(2, KV_HEADS, starts, own, 6, seed=seed + 3, dtype=double),
        "own_v": noise(2, KV_HEADS, starts, own, d_value, seed=seed + 4, dtype=double),
        "rows": rows,
        "segments": torch.tensor([0, 1, 1, 2, 2, 2, 2, 2, 2]).expand(2, -1),
    }


def masked(case, window, scale):
    """Key by key: the query stands at place row + own, a key at place p is seen iff p > row + own - window."""
    own = case["own_k"].shape[3]
    outs, masses, counts, recents = [], [], [], []
    for b, rows in enumerate(case["rows"].tolist()):
        for s, row in enumerate(rows):
            first = max(0, row + own - window + 1)
            places = range(first, row + own + 1)
            counts.append(len(places))
            for h in range(HEADS):
                kv = h // (HEADS // KV_HEADS)
                picked = [("context", p) if p <= row else ("own", p - row - 1) for p in places]
                k = torch.stack(
                    [
                        case["context_k"][b, kv, i] if part == "context" else case["own_k"][b, kv, s, i]
                        for part, i in picked
                    ]
                )
                v = torch.stack(
                    [
                        case["context_v"][b, kv, i] if part == "context" else case["own_v"][b, kv, s, i]
                        for part, i in picked
                    ]
                )
                p = (k @ case["q"][b, h, s] * scale).softmax(0)
                outs.append(p @ v)
                segment = torch.tensor([int(case["segments"][b, i]) if part == "context" else 3 for part, i in picked])
                masses.append(torch.stack([p[segment == kind].sum() for kind in range(4)]))
                recents.append(p[-2:].sum())
    shape = (*case["rows"].shape, HEADS)
    return (
        torch.stack(outs).view(*shape, -1).transpose(1, 2),
        torch.stack(masses).view(*shape, 4).transpose(1, 2),
        torch.tensor(counts).view(shape[:2]),
        torch.stack(recents).view(shape).transpose(1, 2),
    )


@pytest.mark.parametrize("block", [None, 1, 4])
@pytest.mark.parametrize("own", [0, 1, 3])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 7, 11, 12, 100])
def test_a_window_is_a_mask_over_the_last_keys_own_ones_among_them(window, own, block):
    from driftlab.attention import Stats, attend

    case = window_case(own)
    result = attend(**case, scale=0.4, window=window, block=block, stats=Stats(mass=True, entropy=True, recent=(2,)))
    out, mass, count, recent = masked(case, window, 0.4)
    torch.testing.assert_close(result.out, out, rtol=0, atol=1e-12)
    torch.testing.assert_close(result.mass, mass, rtol=0, atol=1e-12)
    torch.testing.assert_close(result.recent[..., 0], recent, rtol=0, atol=1e-12)
    assert torch.equal(result.visible, count)
    assert bool(result.entropy.isfinite().all())
    assert bool((result.entropy <= count[:, None].double().log() + 1e-12).all())
    whole = attend(**case, scale=0.4, stats=Stats(mass=True))
    assert torch.equal(whole.mass, attend(**case, scale=0.4, window=12, stats=Stats(mass=True)).mass)
    assert torch.allclose(whole.out, result.out) == (window >= 9 + own)


@pytest.mark.parametrize("block", [None, 2])
@pytest.mark.parametrize(("window", "own"), [(2, 0), (2, 3), (5, 3)])
def test_gradients_under_a_window_are_those_of_the_mask(window, own, block):
    from driftlab.attention import attend

    names = ("q", "context_k", "context_v", *(("own_k", "own_v") if own else ()))
    gradients = []
    for run in (
        lambda case: attend(**case, scale=0.4, window=window, block=block).out,
        lambda c: masked(c, window, 0.4)[0],
    ):
        case = window_case(own)
        leaves = [case[name].requires_grad_() for name in names]
        out = run(case)
        weighted = (out * noise(*out.shape, seed=9, dtype=out.dtype)).sum()
        gradients.append(torch.autograd.grad(weighted, leaves, allow_unused=True, materialize_grads=True))
    for name, ours, expected in zip(names, *gradients, strict=True):
        assert bool((expected != 0).any()) == (own < window or "context" not in name), name
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


def test_dropped_keys_and_a_window_hide_what_either_hides():
    from driftlab.attention import Controls, Stats, attend

    case = window_case(1)
    drop = torch.zeros(2, 9, dtype=torch.bool)
    drop[:, 4] = True
    result = attend(**case, scale=0.4, window=4, controls=Controls(drop=drop), stats=Stats(columns=True))
    whole = attend(**case, scale=0.4, window=4)
    here = case["rows"] + 1 - 4  # the window begins behind this place
    within = (here < 4) & (case["rows"] >= 4)
    assert torch.equal(whole.visible - result.visible, within.long())
    assert bool((result.columns[..., 4] == 0).all())


# ---- the chain's own keys are keys like any others


def experts_of(**overrides):
    from driftlab.drafter.config import ExpertsConfig

    return ExpertsConfig(
        **{
            **{
                "count": 4,
                "per_token": 2,
                "intermediate_size": 16,
                "shared_intermediate_size": 16,
                "scoring": "sigmoid",
            },
            **{"groups": 2, "groups_per_token": 1, "scale": 1.5},
            **overrides,
        }
    )


def latent_of(q_rank=16):
    from driftlab.drafter.config import LatentConfig

    return LatentConfig(q_lora_rank=q_rank, **MLA)


def yarn_of(**extra):
    return scaling_of({**YARN, **extra})


FINAL = {"aux_layers": (), "fc_norm": False}
MTP = {"architecture": "mtp", **FINAL}
GATED = {"attention_gate": True, "qk_norm": True, "norm_plus_one": True, "rotary_dim": 4}
KINDS = {
    "window": lambda: {"windows": (4,)},
    "window of one": lambda: {"windows": (1,)},
    "windows by layer": lambda: {"num_hidden_layers": 3, "windows": (3, 0, 5)},
    "biases": lambda: {"attention_bias": True, "output_bias": True, "mlp_bias": True, "fc_bias": True},
    "gate": lambda: GATED,
    "norm_before_residual": lambda: {"norm_before_residual": True, "norm_output": False},
    "norm_before_fc": lambda: {"norm_before_fc": True, "fc_norm": False},
    "both norms before fc": lambda: {"norm_before_fc": True},
    "twice_normed": lambda: {"twice_normed": True, "norm_output": False},
    "without head_norm": lambda: {"head_norm": False, "norm_output": False},
    "logit_scale": lambda: {"logit_scale": 0.25},
    "two layers": lambda: {"num_hidden_layers": 2, "norm_output": False},
    "reduced vocabulary": lambda: {"draft_vocab_size": 40, "windows": (3,)},
    "MLA": lambda: {"latent": latent_of(), "rope_interleaved": True, "num_key_value_heads": 4},
    "MLA, yarn, window": lambda: {
        **{"latent": latent_of(0), "rope_interleaved": True, "num_key_value_heads": 4, "windows": (5,)},
        "rope_scaling": yarn_of(mscale=1.0, mscale_all_dim=0.7),
    },
    "llama3": lambda: {"rope_scaling": scaling_of(LLAMA3), "rope_theta": 500000.0},
    "final state": lambda: FINAL,
    "final state, two layers, windows": lambda: {**FINAL, "num_hidden_layers": 2, "windows": (2, 6)},
    "MTP": lambda: MTP,
    "MTP, pre-norm feedback, first embedding zero": lambda: {
        **MTP,
        "norm_output": False,
        "zero_first_embedding": True,
    },
    "MTP, two layers": lambda: {**MTP, "num_hidden_layers": 2},
    "MTP, experts, MLA": lambda: {
        **MTP,
        **{"experts": experts_of(), "latent": latent_of(), "rope_interleaved": True, "num_key_value_heads": 4},
    },
    "MTP, experts, gate": lambda: {**MTP, **GATED, "experts": experts_of(scoring="softmax", shared_gate=True)},
}


def drafter_of(kind):
    """A drafter in float64 with tables of its own; its biases are smaller than its gains, or they would fix the token."""
    drafter = own_tables(**KINDS[kind]()).double()
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if name.endswith("bias"):
                parameter.sub_(1.25).mul_(0.3)
    return drafter


def batch_for(drafter, dtype):
    """Two padded sequences; the final state is random too, and differs from the others."""
    batch = random_batch((14, 9), (6, 1), width=32)
    last = 3 * noise(2, 14, 32, seed=5)
    batch = dataclasses.replace(batch, last_hidden=last, aux_layers=(1, 3, 5))
    return batch.to("cpu", dtype)


@torch.no_grad()
def as_one_text(drafter, states, tokens, row, depth):
    """The chain from ``row`` as rows of a text: nothing is an own key, every depth runs the whole list again.

    Returns one (token, logits, feedback) a depth.
    """
    from driftlab.segments import Starts

    fused = drafter.fuse(states[None, : row + 1])
    embedded = drafter.embed(tokens[None, 1 : row + 2]).clone()
    if drafter.config.zero_first_embedding:
        embedded[:, 0] = 0
    steps = []
    for _ in range(depth):
        rows = torch.arange(fused.shape[1])[None]
        every = Starts(rows, torch.ones_like(rows, dtype=torch.bool), torch.zeros_like(rows), ("",))
        hidden = fused
        for layer in drafter.layers:
            hidden, _ = layer.first(embedded, hidden, rows, every, None)
        normed = drafter.norm(hidden[:, -1:])
        logits = drafter.logits(normed)
        token = drafter.to_target(logits.argmax(-1))
        feedback = normed if drafter.config.norm_output else hidden[:, -1:]
        steps.append((token.item(), logits[0, 0], feedback[0, 0]))
        fused, embedded = torch.cat([fused, feedback], 1), torch.cat([embedded, drafter.embed(token)], 1)
    return steps


@pytest.mark.parametrize("kind", KINDS)
def test_chain_all_starts_and_one_long_text_agree(kind):
    from driftlab import all_starts, chain
    from driftlab.draft import read_states, unroll

    drafter, depth = drafter_of(kind), 4
    batch = batch_for(drafter, torch.float64)
    draft = all_starts(drafter, batch, depth, feed="own")
    with torch.no_grad():
        states = [state for state, _ in unroll(drafter, batch, depth, feed="own")]
    assert len(draft.tokens[draft.valid].unique()) > 4
    for i in (0, 5):
        tokens = chain(drafter, batch, draft.rows[:, i], depth)
        assert torch.equal(tokens, draft.tokens[:, i])
        for b in range(2):
            assert draft.valid[b, i]
            row = int(draft.rows[b, i])
            steps = as_one_text(drafter, read_states(drafter, batch)[b], batch.tokens[b], row, depth)
            assert [step[0] for step in steps] == tokens[b].tolist()
            for state, (_, logits, feedback) in zip(states, steps, strict=True):
                torch.testing.assert_close(state.feedback[b, i], feedback, rtol=0, atol=1e-9)
                torch.testing.assert_close(drafter.logits(state.normed[b, i]), logits, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("window", {"windows": ()}),
        ("norm_before_residual", {"norm_before_residual": False}),
        ("twice_normed", {"twice_normed": False}),
        ("MTP", {"norm_output": False}),
        ("MTP, pre-norm feedback, first embedding zero", {"zero_first_embedding": False}),
        ("gate", {"norm_plus_one": False}),
        ("gate", {"rotary_dim": 8}),
        ("MLA, yarn, window", {"rope_scaling": yarn_of()}),
        ("MLA", {"rope_interleaved": False}),
        ("MTP, experts, MLA", {"experts": "scale"}),
    ],
)
def test_each_switch_changes_the_numbers(kind, changed):
    """Same weights, one switch turned: otherwise the test above could not tell."""
    from driftlab import Drafter
    from driftlab.draft import unroll

    drafter = drafter_of(kind)
    if changed == {"experts": "scale"}:
        changed = {"experts": experts_of(scale=1.0)}
    other = Drafter(dataclasses.replace(drafter.config, **changed)).double().eval()
    other.load_state_dict(drafter.state_dict())
    batch = batch_for(drafter, torch.float64)
    runs = []
    for one in (drafter, other):
        with torch.no_grad():
            runs.append([state.feedback for state, _ in unroll(one, batch, 2, feed="text")][-1])
    assert (runs[0] - runs[1]).abs().max() > 1e-3


def test_nothing_that_no_gradient_reaches_is_trained():
    """The correction bias takes part in the choice of experts alone: an optimiser has no state for it to go on from."""
    from driftlab.drafter.config import ExpertsConfig
    from driftlab.drafter.mlp import Experts

    experts = Experts(8, ExpertsConfig(count=4, per_token=2, intermediate_size=6, scoring="sigmoid"))
    experts(torch.randn(64, 8, generator=torch.Generator().manual_seed(0))).square().sum().backward()
    assert all(parameter.grad is not None for parameter in experts.parameters())
    assert "gate.e_score_correction_bias" in experts.state_dict()
