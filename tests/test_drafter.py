"""The drafter's architecture: the two switches, the norms, whose tables are used, and the vocabulary mapping."""

import pytest
import torch
from builders import config_of, own_tables, random_batch, target_of
from naive import naive_chain

VARIANTS = ("eagle3", "fc_norm", "norm_output", "eagle31")


@torch.no_grad()
def unrolled(drafter, batch, depth):
    """States of every depth on the text's tokens."""
    from driftlab.draft import unroll

    states = [state for state, _ in unroll(drafter, batch, depth, feed="text")]
    return [(state.normed, state.feedback) for state in states]


def rms(x):
    return x.double().square().mean(-1).sqrt()


# ---- norm_output


@pytest.mark.parametrize("norm_output", [False, True])
def test_the_head_reads_the_normed_state_once_and_the_switch_chooses_the_feedback(norm_output):
    """Gains are not constant: a second norm by the same gains would show (SpecForge#879, Automodel#2322)."""
    drafter = own_tables(norm_output=norm_output)
    batch = random_batch((9,), (6,), width=32)
    with torch.no_grad():
        _, cache = drafter.run_with_cache(run=lambda d: unrolled(d, batch, 3))
    for i, row in enumerate((5, 6, 7)):
        fed = [int(batch.tokens[0, min(row + k + 1, 8)]) for k in (1, 2, 3)]
        for k, step in enumerate(naive_chain(drafter, batch.tokens[0], batch.aux[0], row, 3, fed), 1):
            resid, normed, feedback = (
                cache[name, k][0, i] for name in ("layers.0.hook_resid", "hook_normed", "hook_feedback")
            )
            by_hand = drafter.norm.weight * resid / (resid.square().mean() + 1e-6).sqrt()
            close(normed, by_hand)
            close(drafter.logits(normed), step["logits"].float(), atol=1e-4)
            assert torch.equal(feedback, normed if norm_output else resid)


def close(ours, theirs, rtol=1e-5, atol=1e-5):
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


@pytest.mark.parametrize("fc_norm", [False, True])
def test_the_switch_changes_no_bit_at_depth_1_and_everything_after(fc_norm):
    """INV1."""
    from driftlab import Drafter

    off = own_tables(fc_norm=fc_norm, norm_output=False)
    on = Drafter(config_of(own_embed=True, lm_head="own", fc_norm=fc_norm, norm_output=True))
    on.load_state_dict(off.state_dict())
    batch = random_batch((12,), (6,), width=32)
    (first_off, second_off), (first_on, second_on) = unrolled(off, batch, 2), unrolled(on, batch, 2)
    assert torch.equal(off.logits(first_off[0]), on.logits(first_on[0]))
    assert not torch.isclose(off.logits(second_off[0]), on.logits(second_on[0])).all(-1).any()


def test_the_size_of_the_feedback_is_bounded_by_the_gains_only_with_norm_output():
    """INV3."""
    batch = random_batch((12, 9), (6, 2), width=32)
    sizes = {}
    for norm_output in (False, True):
        drafter = own_tables(fc_norm=False, norm_output=norm_output)
        sizes[norm_output] = torch.stack([rms(feedback) for _, feedback in unrolled(drafter, batch, 8)])
    gains = drafter.norm.weight.detach().abs()
    assert (sizes[True] >= float(gains.min()) - 1e-4).all()
    assert (sizes[True] <= float(gains.max()) + 1e-4).all()
    assert (sizes[False] > float(gains.max())).all()


# ---- fc_norm


@pytest.mark.parametrize("fc_norm", [False, True])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_the_size_of_a_state_matters_only_without_fc_norm(fc_norm, which):
    """INV2: each state has a norm of its own."""
    drafter = own_tables(fc_norm=fc_norm)
    batch = random_batch((9,), (4,), width=32)
    louder = batch.aux.clone()
    louder[:, :, which] *= 1e3
    with torch.no_grad():
        before, after = drafter(batch.tokens, batch.aux), drafter(batch.tokens, louder)
    if fc_norm:
        close(after, before, atol=1e-4)
    else:
        assert not torch.isclose(after, before, rtol=0.01).all(-1).any()


def test_each_chunk_is_normed_by_itself():
    """Three states of rms 1, 10, 100: fc_norm makes each 1; one norm over all would give 0.0172, 0.1723, 1.7234."""
    from driftlab import Drafter

    states = torch.randn(1, 5, 3, 32, generator=torch.Generator().manual_seed(0))
    states = states / rms(states)[..., None].float() * torch.tensor([1.0, 10.0, 100.0])[:, None]
    sizes = {}
    for fc_norm in (False, True):
        drafter = Drafter(config_of(fc_norm=fc_norm), target_of())
        _, cache = drafter.run_with_cache(states, run=lambda d, aux: d.fuse(aux))
        sizes[fc_norm] = rms(cache["fusion.hook_aux", 1])
        assert torch.equal(cache["fusion.hook_states", 1], states)
    close(sizes[True], torch.ones(1, 5, 3).double(), atol=1e-3)
    close(sizes[False], torch.tensor([1.0, 10.0, 100.0]).double().expand(1, 5, 3), atol=1e-3)


def test_states_are_concatenated_in_their_order_each_with_its_own_gain():
    drafter = own_tables()
    aux = random_batch((4,), (2,), width=32).aux
    parts = []
    for i in range(3):
        state = aux[:, :, i]
        parts.append(drafter.fc_norm[i].weight * state / (state.square().mean(-1, keepdim=True) + 1e-6).sqrt())
    with torch.no_grad():
        close(drafter.fuse(aux), torch.cat(parts, -1) @ drafter.fc.weight.T)


@pytest.mark.parametrize("count", [1, 3, 5])
@pytest.mark.parametrize("fc_norm", [False, True])
def test_any_number_of_states(count, fc_norm):
    drafter = own_tables(aux_layers=tuple(range(count)), fc_norm=fc_norm)
    batch = random_batch((9,), (6,), width=32, aux=count)
    assert drafter.fc.weight.shape == (32, count * 32)
    names = [key for key in drafter.state_dict() if key.startswith("fc_norm")]
    assert names == ([f"fc_norm.{i}.weight" for i in range(count)] if fc_norm else [])
    _, cache = drafter.run_with_cache(run=lambda d: unrolled(d, batch, 2))
    expected = naive_chain(drafter, batch.tokens[0], batch.aux[0], 7, 2, [int(batch.tokens[0, 8])] * 2)
    for k in (1, 2):
        close(cache["hook_feedback", k][0, 2], expected[k - 1]["feedback"].float(), atol=1e-4)


# ---- shapes


def test_the_number_of_parameters_by_hand():
    """H 32, Ht 32, I 48, 4 query and 2 kv heads of width 8, V 61, Vd 20; the first layer's q, k, v take 2H."""
    fc, fc_norm = 32 * 96, 3 * 32
    attention = 64 * 32 + 2 * 64 * 16 + 32 * 32
    mlp, norms = 3 * 32 * 48, 4 * 32  # input, hidden and post-attention norms, and the final one
    head, embed = 20 * 32, 61 * 32
    assert (fc, attention, mlp) == (3072, 5120, 4608)
    drafter = own_tables(draft_vocab_size=20)
    assert (
        sum(p.numel() for p in drafter.parameters()) == fc + fc_norm + attention + mlp + norms + head + embed == 15616
    )
    from driftlab import Drafter

    lent = Drafter(config_of(draft_vocab_size=20, fc_norm=False, lm_head="target"), target_of(), draft_vocab=range(20))
    assert sum(p.numel() for p in lent.parameters()) == fc + attention + mlp + norms == 12928
    second = 32 * 32 + 2 * 32 * 16 + 32 * 32 + mlp + 2 * 32  # takes H; no hidden norm
    two = own_tables(draft_vocab_size=20, num_hidden_layers=2)
    assert sum(p.numel() for p in two.parameters()) == 15616 + second


def test_the_state_dict_has_the_engines_names_and_no_table_of_the_target():
    from driftlab import Drafter

    lent = Drafter(config_of(lm_head="target"), target_of())
    layer = [f"layers.0.{name}.weight" for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")]
    layer += [f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    layer += [f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"]
    assert set(lent.state_dict()) == {"fc.weight", "norm.weight", *(f"fc_norm.{i}.weight" for i in range(3)), *layer}
    assert set(own_tables(draft_vocab_size=20).state_dict()) - set(lent.state_dict()) == {
        *("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")
    }


def test_two_layers_are_a_first_layer_and_an_ordinary_one():
    drafter = own_tables(num_hidden_layers=2)
    batch = random_batch((9, 7), (6, 1), width=32)
    states = unrolled(drafter, batch, 3)
    for b, i in ((0, 0), (0, 2), (1, 0), (1, 5)):
        row = int(batch.starts.rows[b, i])
        fed = [int(batch.tokens[b, min(row + k + 1, int(batch.lengths[b]) - 1)]) for k in (1, 2, 3)]
        for k, step in enumerate(naive_chain(drafter, batch.tokens[b], batch.aux[b], row, 3, fed)):
            close(states[k][1][b, i], step["feedback"].float(), atol=1e-4)


def test_forward_is_depth_1_of_every_row():
    drafter = own_tables()
    batch = random_batch((7,), (1,), width=32)
    ((normed, _),) = unrolled(drafter, batch, 1)
    with torch.no_grad():
        logits = drafter(batch.tokens, batch.aux)
    assert logits.shape == (1, 6, 61)
    close(logits, drafter.logits(normed))


def test_initial_weights_depend_on_the_seed_alone():
    from driftlab import Drafter

    torch.manual_seed(1)
    first = Drafter(config_of(), target_of(), seed=3).state_dict()
    torch.manual_seed(2)
    second = Drafter(config_of(), target_of(), seed=3).state_dict()
    third = Drafter(config_of(), target_of(), seed=4).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["fc.weight"], third["fc.weight"])
    assert abs(float(first["fc.weight"].std()) - 0.02) < 0.001
    assert torch.equal(first["norm.weight"], torch.ones(32))
    assert len({float(first[f"layers.0.self_attn.{n}_proj.weight"].flatten()[0]) for n in "qkvo"}) == 4


# ---- numbers


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_states_of_60000_in_half_precision_do_not_overflow_the_norms(dtype):
    """SafeAILab/EAGLE#69: x^2 leaves float16 from 256 on."""
    from driftlab.drafter.layers import RMSNorm

    generator = torch.Generator().manual_seed(0)
    large = (torch.randint(0, 2, (1, 9, 3, 32), generator=generator) * 2 - 1) * torch.tensor(6e4)
    large[..., ::2] /= 3
    norm = RMSNorm(32, 1e-6).to(dtype)
    normed = norm(large.to(dtype))
    assert normed.dtype == dtype
    close(rms(normed), torch.ones(1, 9, 3).double(), atol=0.01)
    drafter = own_tables().to(dtype)
    tokens = torch.randint(0, 61, (1, 9), generator=generator)
    _, cache = drafter.run_with_cache(tokens, large.to(dtype))
    for (name, _), calls in cache.items():
        assert all(call.isfinite().all() for call in calls), name
    wide = own_tables().double()
    with torch.no_grad():
        close(drafter(tokens, large.to(dtype)).double(), wide(tokens, large.double()), rtol=0.1, atol=0.6)


def test_the_statistic_of_a_norm_is_float32_and_eps_is_under_the_root():
    from driftlab.drafter.layers import RMSNorm

    norm = RMSNorm(4, 0.5)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    x = torch.tensor([1.0, -1.0, 1.0, -1.0])
    close(norm(x), torch.tensor([1.0, -2.0, 3.0, -4.0]) / 1.5**0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_positions_are_not_rounded_with_the_drafter(dtype):
    """bfloat16 has no 257: a cast of the whole drafter must not reach the angles."""
    from driftlab.drafter.rotary import Rotary

    class Holder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.rotary = Rotary(8, 10000.0)

    rotary = Holder().to(dtype).rotary
    x = torch.ones(1, 1, 4, 8, dtype=dtype)
    positions = torch.tensor([[256, 257, 2047, 100001]])
    exact = Rotary(8, 10000.0)(x.double(), positions)
    turned = rotary(x, positions).double()
    assert (turned - exact).abs().max() < {torch.float32: 1e-6}.get(dtype, 0.02)


def test_rotary_turns_half_split_pairs_by_position_over_frequency():
    from driftlab.drafter.rotary import Rotary

    x = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64).view(1, 1, 1, 4)
    turned = Rotary(4, 100.0)(x, torch.tensor([[3]])).flatten()
    a, b = torch.tensor(3.0, dtype=torch.float64), torch.tensor(0.3, dtype=torch.float64)
    close(
        turned,
        torch.stack(
            [a.cos() - 3 * a.sin(), 2 * b.cos() - 4 * b.sin(), 3 * a.cos() + a.sin(), 4 * b.cos() + 2 * b.sin()]
        ),
        atol=1e-12,
    )


def test_a_constant_shift_of_all_positions_changes_nothing_and_a_gap_does():
    """INV9."""
    drafter = own_tables()
    batch = random_batch((12,), (6,), width=32)
    rotary = drafter.layers[0].self_attn.rotary
    original = rotary.forward
    before = unrolled(drafter, batch, 4)
    rotary.forward = lambda x, positions: original(x, positions + 1000)
    shifted = unrolled(drafter, batch, 4)
    for (_, plain), (_, moved) in zip(before, shifted, strict=True):
        close(moved, plain, atol=1e-4)
    calls = []

    def gap(x, positions):
        calls.append(1)
        return original(x, positions + (len(calls) > 2))  # depth 1 turns keys and queries, then each depth both

    rotary.forward = gap
    gapped = unrolled(drafter, batch, 4)
    assert torch.equal(gapped[0][1], before[0][1])
    for (_, plain), (_, moved) in zip(before[1:], gapped[1:], strict=True):
        assert not torch.isclose(moved, plain, rtol=1e-3, atol=1e-3).all(-1).any()


# ---- vocabulary


def test_d2t_holds_offsets():
    from driftlab import Drafter

    ids = [0, 1, 2, 3, 4, 12, 13, 20]
    drafter = Drafter(config_of(draft_vocab_size=8), target_of(), draft_vocab=ids)
    assert int(drafter.d2t[5]) == 7
    assert drafter.to_target(torch.tensor([[5, 0], [7, 3]])).tolist() == [[12, 0], [20, 3]]
    assert drafter.draft_vocab.tolist() == ids
    assert drafter.t2d.nonzero()[:, 0].tolist() == ids


@pytest.mark.parametrize(
    "ids", [[0, 1, 2], [0, 1, 1, 5], [0, 5, 3, 9], [-1, 2, 3, 4], [0, 1, 2, 61], [], [0, 1, 2, 3, 4]]
)
def test_a_draft_vocabulary_is_ascending_target_ids(ids):
    from driftlab import Drafter, DriftlabError

    with pytest.raises(DriftlabError, match=r"4 distinct ascending target ids in 0\.\.60"):
        Drafter(config_of(draft_vocab_size=4), target_of(), draft_vocab=ids)


def test_a_full_vocabulary_needs_no_map():
    """vllm#53458: no buffers and no scatter; the tokens are those of a map by zeros."""
    from driftlab import Drafter, all_starts

    full = own_tables()
    assert not full.reduced
    assert not {"d2t", "t2d"} & set(full.state_dict())
    ids = torch.tensor([3, 60])
    assert full.to_target(ids) is ids
    assert full.draft_vocab.tolist() == list(range(61))
    batch = random_batch((12,), (6,), width=32)
    mapped = Drafter(config_of(own_embed=True, lm_head="own", vocab_size=62), draft_vocab=range(61))
    state = dict(full.state_dict(), d2t=mapped.d2t, t2d=mapped.t2d)
    state["embed_tokens.weight"] = torch.cat([state["embed_tokens.weight"], torch.zeros(1, 32)])
    mapped.load_state_dict(state)
    assert mapped.reduced
    assert not mapped.d2t.any()
    with torch.no_grad():
        assert torch.equal(full(batch.tokens, batch.aux), mapped(batch.tokens, batch.aux))
    drafts = [all_starts(drafter, batch, 3, feed="own").tokens for drafter in (full, mapped)]
    assert torch.equal(*drafts)


# ---- whose tables


def test_the_targets_embedding_is_used_unless_the_drafter_has_its_own():
    from driftlab import Drafter

    target = target_of()
    tokens = torch.tensor([[3, 60, 0]])
    lent = Drafter(config_of(), target)
    assert torch.equal(lent.embed(tokens), target.head.embed[tokens])
    own = Drafter(config_of(own_embed=True), target)
    assert torch.equal(own.embed(tokens), own.embed_tokens.weight[tokens])
    assert isinstance(own.embed_tokens.weight, torch.nn.Parameter)
    assert not torch.equal(own.embed(tokens), lent.embed(tokens))


def test_a_drafter_of_another_width_needs_tables_of_its_own():
    """vllm#18906: H 48 under a target 64 wide."""
    from driftlab import Drafter, DriftlabError

    shapes = {"hidden_size": 48, "target_hidden_size": 64}
    drafter = own_tables(**shapes)
    assert drafter.fc.weight.shape == (48, 192)
    assert drafter(torch.tensor([[1, 2, 3]]), torch.randn(1, 3, 3, 64)).shape == (1, 2, 61)
    with pytest.raises(DriftlabError, match=r"own_embed=False.*64 wide; hidden_size is 48"):
        config_of(**shapes, lm_head="own")
    with pytest.raises(DriftlabError, match=r"lm_head=target .*64 wide; hidden_size is 48"):
        config_of(**shapes, own_embed=True, lm_head="target")
    for overrides in ({}, {"own_embed": True}, {"lm_head": "own"}):
        with pytest.raises(DriftlabError, match="pass target="):
            Drafter(config_of(**{"lm_head": "target", **overrides}))


@pytest.mark.parametrize("source", ["target", "target_with_norm"])
def test_a_lent_head_is_the_rows_of_the_draft_vocabulary(source):
    from driftlab import Drafter

    target = target_of()
    gain = target.head.norm_weight if source == "target_with_norm" else torch.ones(32)
    normed = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    full = Drafter(config_of(lm_head=source), target)
    close(full.logits(normed), (normed * gain) @ target.head.lm_head.T)
    ids = [2, 3, 10, 60]
    reduced = Drafter(config_of(lm_head=source, draft_vocab_size=4), target, draft_vocab=ids)
    close(reduced.logits(normed), (normed * gain) @ target.head.lm_head[ids].T)
    assert not [name for name, _ in full.named_parameters() if "lm_head" in name]


@pytest.mark.parametrize("way", ["set", "load"])
def test_a_lent_head_follows_the_draft_vocabulary(way):
    from driftlab import Drafter

    target = target_of()
    config = config_of(lm_head="target", draft_vocab_size=4)
    drafter = Drafter(config, target, draft_vocab=[0, 1, 2, 3])
    other = Drafter(config, target, draft_vocab=[5, 6, 40, 60])
    if way == "set":
        drafter.set_draft_vocab([5, 6, 40, 60])
    else:
        drafter.load_state_dict(other.state_dict())
    assert torch.equal(drafter.lm_head.weight, target.head.lm_head[[5, 6, 40, 60]])


def test_what_does_not_fit_the_target_is_named_with_its_shape():
    from driftlab import Drafter, DriftlabError

    with pytest.raises(DriftlabError, match=r"fc\.weight \[32, 96\].*target's are 48"):
        Drafter(config_of(own_embed=True, lm_head="own"), target_of(width=48))
    with pytest.raises(DriftlabError, match=r"61 tokens.*embed_tokens\.weight is \[64, 32\]"):
        Drafter(config_of(), target_of(vocab=64))


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"draft_vocab_size": 62}, r"draft_vocab_size 62 is not in 1\.\.vocab_size 61"),
        ({"draft_vocab_size": 0}, "draft_vocab_size 0"),
        ({"aux_layers": ()}, "aux_layers is empty"),
        ({"aux_layers": (3, 1)}, "ascending"),
        ({"aux_layers": (2, 2, 1)}, "distinct"),
        ({"aux_layers": (-1, 2)}, ">= 0"),
        ({"num_hidden_layers": 0}, "at least one layer"),
    ],
)
def test_impossible_settings_are_refused(overrides, told):
    from driftlab import DriftlabError

    with pytest.raises(DriftlabError, match=told):
        config_of(**overrides)


def test_configs_survive_a_dictionary_and_unknown_keys_are_named():
    from driftlab import DrafterConfig, DriftlabError

    config = config_of(own_embed=True, ttt=7)
    assert DrafterConfig.from_dict(config.to_dict()) == config
    values = {**config.to_dict(), "norm_outputs": True}
    del values["rope_theta"]
    with pytest.raises(DriftlabError, match=r"unknown keys \['norm_outputs'\], missing keys \['rope_theta'\]"):
        DrafterConfig.from_dict(values)


def test_the_four_variants(tiny_trajectory):
    from driftlab import VARIANTS as variants
    from driftlab.drafter import variant_name

    switches = {"eagle3": (False, False), "fc_norm": (True, False), "norm_output": (False, True)}
    switches["eagle31"] = (True, True)
    assert tuple(variants) == VARIANTS
    for name, variant in variants.items():
        config = variant.for_target(tiny_trajectory, draft_vocab_size=20)
        assert (config.fc_norm, config.norm_output) == switches[name]
        assert variant_name(config) == name
        assert (config.hidden_size, config.vocab_size, config.draft_vocab_size) == (32, 61, 20)
        assert (config.aux_layers, config.num_key_value_heads, config.lm_head) == ((1, 3, 5), 2, "target_with_norm")
    for switch in ("norm_before_fc", "norm_before_residual", "twice_normed"):  # two readings of one file
        assert variant_name(config_of(**{switch: True})) == f"eagle31+{switch}"
    assert variant_name(config_of(norm_output=False, head_norm=False)) == "fc_norm+unnormed_head"


def test_a_target_with_scaled_rotary_embedding_warns(tiny_trajectory):
    import dataclasses

    from driftlab import VARIANTS as variants

    scaled = dataclasses.replace(tiny_trajectory, spec=dataclasses.replace(tiny_trajectory.spec, rope_type="llama3"))
    with pytest.warns(UserWarning, match="llama3 rotary scaling"):
        variants["eagle3"].for_target(scaled)


def test_a_switch_of_a_built_drafter_cannot_be_flipped_in_its_config(make_drafter):
    """Half of it would take effect: feedback follows the config, the norms are modules."""
    import dataclasses

    from driftlab import DriftlabError

    drafter = make_drafter("eagle3")
    with pytest.raises(DriftlabError, match="architecture is fixed"):
        drafter.config = dataclasses.replace(drafter.config, fc_norm=True, norm_output=True)
    drafter.config = dataclasses.replace(drafter.config, ttt=4)
    assert drafter.config.ttt == 4
