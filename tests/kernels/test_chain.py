"""The step kernels against the drafter's own modules: tokens, states and probes of whole chains."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch
from builders import config_of, own_tables, random_batch, target_of

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET", "0") == "1" else "cuda"
DEPTH = 3
ROWS = [11, 9, 14, 3, 12]
"""where the chains start: context keys of a batch reach to the largest, and each chain sees its own part"""


@pytest.fixture
def shipped():
    """A test that asks for it runs with the tiles as they are shipped."""


@pytest.fixture(autouse=True)
def few_programs(monkeypatch, request):
    """As few programs as tiny weights need, for the interpreter runs one after the other."""
    from driftlab.kernels import chain

    if "shipped" in request.fixturenames:
        return
    tiles_of = chain.tiles_of

    def large(batch):
        return dataclasses.replace(tiles_of(batch), BN=64 if batch > 4 else 32)

    monkeypatch.setattr(chain, "SPLITS", 2)
    monkeypatch.setattr(chain, "tiles_of", large)
    monkeypatch.setattr(chain, "gate_up_tiles", large)


def varied(drafter, factor=2.0):
    """Larger weights, so that tokens change along a chain."""
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.ndim > 1 and "embed" not in name and "lm_head" not in name:
                parameter.mul_(factor)
    return drafter.requires_grad_(False).to(DEVICE)


def problem(drafter, batch, rows=None):
    """A random batch's state after depth 1, made anew at each call: its own keys grow in place."""
    from driftlab.draft import Chain, read_states

    rows = torch.tensor(ROWS[:batch] if rows is None else rows, device=DEVICE)
    config = drafter.config
    data = random_batch(
        [20] * batch, [5, 7, 4, 3, 6][:batch], width=config.target_hidden_size, scales=(1.0, 2.0, 4.0)
    ).to(drafter.device, drafter.dtype)
    last = int(rows.max()) + 1
    session = Chain(drafter, prompt_lengths=data.prompt_lengths.tolist())
    with drafter.using("torch"):
        session.extend(data.tokens[:, 1 : last + 1], read_states(drafter, data)[:, :last], rows)
    return session.take(), rows


def expected(drafter, batch, depth=DEPTH, uniforms=None, temperature=0.0, rows=None):
    """What the drafter's own chain makes, token by token, with its hooks."""
    from driftlab.sampling import Sampling, draw

    state, _ = problem(drafter, batch, rows)
    tokens, logits, normed, feedback = [], [], [], []

    def run(drafter):
        here = state
        while True:
            z = drafter.logits(here.normed[:, 0])
            p = Sampling(temperature).process(z.float())
            chosen = z.argmax(-1) if uniforms is None else draw(p, uniforms[:, here.depth - 1])
            logits.append(z.float())
            normed.append(here.normed[:, 0])
            feedback.append(here.feedback[:, 0])
            tokens.append(drafter.to_target(chosen))
            if len(tokens) == depth:
                return
            here = drafter.next(here, tokens[-1][:, None])

    names = ("hook_mass", "hook_entropy", "hook_q", "hook_resid")
    with torch.no_grad(), drafter.using("torch"):
        _, cache = drafter.run_with_cache(names_filter=names, run=run)
    points = {name: drafter.select_hooks(name)[0].name for name in names}
    seen = {name: [cache[path, k] for k in range(2, depth + 1)] for name, path in points.items()}
    return {
        "tokens": torch.stack(tokens, 1),
        "logits_max": torch.stack(logits, 1).amax(-1),
        "lse": torch.stack(logits, 1).logsumexp(-1),
        "normed": torch.stack(normed, 1),
        "feedback": torch.stack(feedback, 1),
        "resid": torch.cat(seen["hook_resid"], 1),
        "q": torch.cat(seen["hook_q"], 1).transpose(1, 2),
        "mass": torch.cat(seen["hook_mass"], 2),
        "entropy": torch.cat(seen["hook_entropy"], 2),
    }


def poison(kernels):
    """Nothing may be read before it is written: NaN everywhere but in the counters and tables."""
    for value in (*vars(kernels).values(), *kernels.parts.values(), *kernels.head_parts.values()):
        state = isinstance(value, torch.Tensor) and value is not kernels.cos and value is not kernels.sin
        if state and value.is_floating_point():
            value.fill_(float("nan"))
    kernels.tokens.fill_(-(10**9))
    kernels.segments.fill_(99)


def drafted(drafter, batch, depth=DEPTH, *, kernels=None, probes=True, rows=None, **given):
    from driftlab.kernels.chain import StepKernels

    state, rows = problem(drafter, batch, rows)
    if kernels is None:
        kernels = StepKernels(drafter, batch, state.kv[0].k.shape[2] + depth, depth, probes=probes)
        poison(kernels)
    return kernels.draft(
        state.kv[0], state.feedback[:, 0], state.normed[:, 0], rows, state.starts.segments, depth, **given
    )


def agree(got, want, limit=1e-4):
    assert got.tokens.tolist() == want["tokens"].tolist()
    for name, value in want.items():
        if name != "tokens":
            mine = getattr(got, name).double()
            assert mine.shape == value.shape, name
            assert mine.isfinite().all(), name
            worst = float((mine - value.double()).abs().max() / value.double().abs().max())
            assert worst < limit, (name, worst)


@pytest.mark.parametrize("batch", [1, 3, 5])
@pytest.mark.parametrize("fc_norm", [False, True])
@pytest.mark.parametrize("norm_output", [False, True])
def test_every_variant_drafts_what_its_modules_draft(fc_norm, norm_output, batch):
    drafter = varied(own_tables(fc_norm=fc_norm, norm_output=norm_output))
    want = expected(drafter, batch)
    got = drafted(drafter, batch)
    agree(got, want)
    torch.testing.assert_close(got.mass.sum(-1), torch.ones_like(got.entropy), atol=1e-5, rtol=0)


def test_tokens_are_those_of_the_public_chain():
    from driftlab import chain

    drafter = varied(own_tables(), 4.0)
    data = random_batch([20] * 2, [5, 7], width=32, scales=(1.0, 2.0, 4.0))
    want = chain(drafter, data, ROWS[:2], 5)
    assert len(set(want.flatten().tolist())) > 2  # a chain of one token for ever would show nothing
    assert drafted(drafter, 2, 5).tokens.tolist() == want.tolist()


SWITCHES = {
    "window": {"windows": (6,)},
    "window shorter than the chain": {"windows": (2,)},
    "biases": {"attention_bias": True, "output_bias": True, "mlp_bias": True, "fc_bias": True},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_residual without feedback of the norm": {"norm_before_residual": True, "norm_output": False},
    "plus_one": {"norm_plus_one": True},
    "reduced vocabulary": {"draft_vocab_size": 37},
    "logit_scale": {"logit_scale": 0.25},
    "no norm before the head": {"head_norm": False, "norm_output": False},
    "odd sizes": {
        **{"hidden_size": 27, "target_hidden_size": 35, "intermediate_size": 45, "num_attention_heads": 3},
        **{"num_key_value_heads": 1, "head_dim": 6, "vocab_size": 71, "draft_vocab_size": 71},
    },
    "one query head to a kv head": {"num_key_value_heads": 4},
}


@pytest.mark.parametrize("name", list(SWITCHES))
def test_every_switch_is_honoured(name):
    drafter = varied(own_tables(**SWITCHES[name]))
    agree(drafted(drafter, 2), expected(drafter, 2))


def test_tensor_cores_honour_switches_too():
    together = {**SWITCHES["biases"], **SWITCHES["odd sizes"], "norm_plus_one": True, "norm_before_residual": True}
    drafter = varied(own_tables(**together))
    agree(drafted(drafter, 5, 2), expected(drafter, 5, 2))


def test_scaled_rotary_embedding():
    from driftlab.drafter.rotary import RopeScaling

    scaling = RopeScaling(kind="yarn", factor=4.0, original_max_positions=8)
    assert scaling.rotation_factor != 1
    drafter = varied(own_tables(rope_scaling=scaling))
    agree(drafted(drafter, 1), expected(drafter, 1))


def test_lent_tables():
    from driftlab import Drafter

    drafter = varied(Drafter(config_of(lm_head="target_with_norm"), target_of()).eval(), 6.0)
    agree(drafted(drafter, 2), expected(drafter, 2))


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_the_shipped_tiles_and_a_chain_at_row_0(shipped, batch):
    drafter, rows = varied(own_tables()), [0, 5, 2][:batch]
    agree(drafted(drafter, batch, 2, rows=rows), expected(drafter, batch, 2, rows=rows))


def test_many_keys_meet_several_blocks():
    from driftlab.draft import Chain

    drafter = varied(own_tables(windows=(40,)))
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(3, 61, (1, 90), generator=generator).to(DEVICE)
    aux = torch.randn(1, 90, 3, 32, generator=generator).to(DEVICE)

    def state():
        session = Chain(drafter, prompt_lengths=[70])
        session.extend(tokens, aux)
        return session.take()

    from driftlab.kernels.chain import StepKernels

    for window in (40, 0):
        drafter.layers[0].self_attn.window = window
        here = state()
        kernels = StepKernels(drafter, 1, 92, 2, probes=True)
        poison(kernels)
        got = kernels.draft(
            here.kv[0],
            here.feedback[:, 0],
            here.normed[:, 0],
            torch.tensor([89], device=DEVICE),
            here.starts.segments,
            2,
        )
        again = state()

        def run(drafter, again=again, got=got):
            return drafter.next(again, got.tokens[:, :1])

        with torch.no_grad():
            deeper, cache = drafter.run_with_cache(names_filter=("hook_mass", "hook_entropy"), run=run)
        mass, entropy = (cache[f"layers.0.self_attn.hook_{name}", 2] for name in ("mass", "entropy"))
        torch.testing.assert_close(got.mass, mass, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(got.entropy, entropy, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(got.normed[:, 1:], deeper.normed, atol=1e-4, rtol=1e-4)


def test_drawn_tokens_are_those_of_the_same_uniform_numbers():
    generator = torch.Generator().manual_seed(2)
    for batch, temperature, overrides in ((2, 0.7, {}), (5, 1.6, {"draft_vocab_size": 37})):
        drafter = varied(own_tables(logit_scale=0.15, **overrides))
        uniforms = torch.rand(batch, DEPTH, generator=generator).to(DEVICE)
        uniforms[0, 0] = 0.0
        want = expected(drafter, batch, uniforms=uniforms, temperature=temperature)
        greedy = expected(drafter, batch)
        assert want["tokens"].tolist() != greedy["tokens"].tolist()
        agree(drafted(drafter, batch, uniforms=uniforms, temperature=temperature), want)


def test_a_draw_never_falls_on_a_token_without_probability(shipped):
    drafter = varied(own_tables())
    want = expected(drafter, 2)  # at so low a temperature only the arg max has any
    assert (want["tokens"] > 0).all()
    uniforms = torch.tensor([[0.0, 0.999, 0.5], [0.999, 0.0, 0.0]], device=DEVICE)
    assert drafted(drafter, 2, uniforms=uniforms, temperature=1e-6).tokens.tolist() == want["tokens"].tolist()


def test_one_object_drafts_again_and_again():
    """Counters are reset, what an earlier chain left in the cache is not seen, and changed weights are."""
    from driftlab.kernels.chain import StepKernels

    drafter = varied(own_tables())
    kernels = StepKernels(drafter, 2, 30, 4, probes=False)
    poison(kernels)
    drafted(drafter, 2, 4, kernels=kernels, rows=[14, 12])
    assert int(kernels.parts["count"].abs().sum()) == 0 == int(kernels.head_parts["count"])
    want = expected(drafter, 2)
    statistics = ("mass", "entropy")
    states = {name: value for name, value in want.items() if name not in statistics}
    again = drafted(drafter, 2, kernels=kernels)
    assert (again.mass, again.entropy, again.attention_lse) == (None, None, None)
    agree(again, states)
    with torch.no_grad():
        drafter.layers[0].mlp.down_proj.weight.mul_(-3)
    changed = expected(drafter, 2)
    assert float((changed["normed"] - want["normed"]).abs().max()) > 0.1
    agree(
        drafted(drafter, 2, kernels=kernels), {name: value for name, value in changed.items() if name not in statistics}
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batch", [1, 5])
def test_half_precision_rounds_where_the_modules_do(batch, dtype):
    drafter = varied(own_tables(norm_before_residual=True)).to(dtype)
    want = expected(drafter, batch, 2)
    got = drafted(drafter, batch, 2)
    assert got.tokens[:, 0].tolist() == want["tokens"][:, 0].tolist()
    for name in ("normed", "resid", "q", "mass"):
        mine, theirs = getattr(got, name).double(), want[name].double()
        ratio = float((mine - theirs).square().mean().sqrt() / theirs.square().mean().sqrt())
        # a rounding that falls on the other side moves one number by half a unit; a rounding left out moves many
        assert ratio < (1e-2 if dtype == torch.bfloat16 else 2e-3), (name, ratio)


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize(
    "switches",
    [{"fc_norm": False}, {"fc_norm": True}, {"fc_norm": True, "norm_plus_one": True, "fc_bias": True}],
    ids=["fc", "fc_norm", "all"],
)
def test_fuse(switches, rows):
    from driftlab.kernels.chain import fuse

    drafter = own_tables(hidden_size=27, target_hidden_size=35, head_dim=6, **switches).requires_grad_(False).to(DEVICE)
    aux = torch.randn(2, rows, 3, 35, generator=torch.Generator().manual_seed(3)) * torch.tensor([1.0, 4, 20])[:, None]
    aux = aux.to(DEVICE)
    want = drafter.fuse(aux)
    torch.testing.assert_close(fuse(drafter, aux), want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


def test_fuse_leaves_to_the_module_what_is_not_a_matrix_vector_product(monkeypatch):
    from driftlab.kernels import chain, chain_kernels

    monkeypatch.setattr(chain_kernels, "fuse_kernel", None)  # a launch would raise
    for switches, rows in (({}, 9), ({"norm_before_fc": True}, 1), ({"aux_layers": (), "fc_norm": False}, 1)):
        drafter = own_tables(**switches)
        aux = torch.randn(2, rows, drafter.config.states_read, 32)
        assert torch.equal(chain.fuse(drafter, aux), drafter.fuse(aux))


REFUSED = {
    "qk_norm": {"qk_norm": True},
    "gate": {"attention_gate": True},
    "interleaved": {"rope_interleaved": True},
    "part of each head": {"rotary_dim": 4},
    "twice": {"twice_normed": True},
    "2 layers": {"num_hidden_layers": 2},
}


@pytest.mark.parametrize("words", list(REFUSED))
def test_what_the_kernels_do_not_compute_is_refused(words):
    from driftlab.errors import DriftlabError
    from driftlab.kernels.chain import StepKernels, refuses

    drafter = own_tables(**REFUSED[words])
    assert words in refuses(drafter)
    with pytest.raises(DriftlabError, match=words):
        StepKernels(drafter, 1, 30, 3, probes=False)


def test_interventions_and_other_dtypes_are_refused():
    from driftlab.attention import Controls
    from driftlab.kernels.chain import refuses

    drafter = own_tables()
    assert refuses(drafter) == ""
    drafter.layers[0].self_attn.controls = Controls(bias=torch.zeros(4))
    assert "interventions" in refuses(drafter)
    drafter.layers[0].self_attn.controls = Controls(score_scale=2.0)
    assert "interventions" in refuses(drafter)
    assert "float64" in refuses(own_tables().double())


def test_sizes_that_do_not_fit_are_refused():
    from driftlab.errors import DriftlabError
    from driftlab.kernels.chain import StepKernels

    drafter = own_tables().requires_grad_(False).to(DEVICE)
    for batch, capacity, depth in ((0, 30, 3), (17, 30, 3), (1, 2, 3), (1, 30, 0)):
        with pytest.raises(DriftlabError, match="step kernels for batch"):
            StepKernels(drafter, batch, capacity, depth, probes=False)
    tight = StepKernels(drafter, 1, 14, 3, probes=False)
    drafted(drafter, 1, 3, kernels=tight)  # 12 context keys and 2 of its own
    with pytest.raises(DriftlabError, match="capacity of 13"):
        drafted(drafter, 1, 3, kernels=StepKernels(drafter, 1, 13, 3, probes=False))
    with pytest.raises(DriftlabError, match="1..3"):
        drafted(drafter, 1, 4, kernels=tight)
    with pytest.raises(DriftlabError, match="2 states"):
        drafted(drafter, 2, 3, kernels=tight)
    with pytest.raises(DriftlabError, match="uniforms"):
        drafted(drafter, 1, 3, kernels=tight, temperature=1.0)


def _late_angle(monkeypatch, drafter):
    from driftlab.kernels import chain

    tables = chain.turning_tables
    monkeypatch.setattr(chain, "turning_tables", lambda *given: tuple(x.roll(1, 0) for x in tables(*given)))


def _one_key_fewer(monkeypatch, drafter):
    monkeypatch.setattr(drafter.layers[0].self_attn, "window", drafter.layers[0].self_attn.window - 1)


def _other_feedback(monkeypatch, drafter):
    monkeypatch.setattr(drafter, "_config", dataclasses.replace(drafter.config, norm_output=False))


def _unfinished_counter(monkeypatch, drafter):
    if DEVICE != "cpu":
        pytest.skip("the run before a graph's capture leaves every part in its place")
    from driftlab.kernels.chain import StepKernels

    allocate = StepKernels._allocate

    def off_by_one(self):
        allocate(self)
        self.head_parts["count"].fill_(1)

    monkeypatch.setattr(StepKernels, "_allocate", off_by_one)


@pytest.mark.parametrize("mutation", [_late_angle, _one_key_fewer, _other_feedback, _unfinished_counter])
def test_mutations_are_caught(mutation, monkeypatch):
    from driftlab.kernels.chain import StepKernels

    drafter = varied(own_tables(windows=(6,)))  # unmutated it agrees: the test of the switches
    want = expected(drafter, 1)
    state, rows = problem(drafter, 1)
    mutation(monkeypatch, drafter)
    kernels = StepKernels(drafter, 1, 20, DEPTH, probes=True)
    got = kernels.draft(state.kv[0], state.feedback[:, 0], state.normed[:, 0], rows, state.starts.segments, DEPTH)
    with pytest.raises(AssertionError):
        agree(got, want)
