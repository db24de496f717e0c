"""Interventions on states: sizes, directions and draws worked out apart."""

import math

import pytest
import torch
from test_interventions import batch_of, drafter_of, parsed, seen

WORDS = 2**64 - 1


def splitmix(x):
    """The finaliser of SplitMix64 on Python's integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORDS
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORDS
    return x ^ (x >> 31)


def run(drafter, batch, texts, depth=4, feed="text"):
    """Feedback of each depth, after the interventions."""
    from driftlab.draft import all_starts

    return {k: v[0] for k, v in seen(drafter, texts, lambda: all_starts(drafter, batch, depth, feed=feed))[1].items()}


def before(drafter, batch, texts, names=("hook_feedback",), depth=4):
    """What passes hook points outside of the interventions, which come after: the values that they were handed."""
    from driftlab.draft import all_starts
    from driftlab.interventions import intervened

    values = {}
    keep = lambda value, hook: values.__setitem__((hook.name, hook.depth), value.clone())  # noqa: E731
    with drafter.hooks([(list(names), keep)], read_only=True), intervened(drafter, parsed(texts)):
        all_starts(drafter, batch, depth)
    return values


def within(drafter, batch, texts, names, depth=4):
    """What passes hook points inside of the interventions, which come before: the values that they leave."""
    from driftlab.draft import all_starts
    from driftlab.interventions import intervened

    values = {}
    keep = lambda value, hook: values.__setitem__((hook.name, hook.depth), value.clone())  # noqa: E731
    with intervened(drafter, parsed(texts)), drafter.hooks([(list(names), keep)], read_only=True):
        all_starts(drafter, batch, depth)
    return values


def size(x):
    return x.double().square().mean(-1, keepdim=True).sqrt()


def test_draws_are_splitmix_and_box_muller():
    import hashlib

    from driftlab.interventions.draws import hashes, normal

    golden = 0x9E3779B97F4A7C15
    rows = torch.tensor([[0, 5], [3, 100000]])
    bits, numbers = hashes("4 x", ("a", "b"), rows, 3, 4), normal("4 x", ("a", "b"), rows, 3, 2)
    for b, name in enumerate("ab"):
        start = int.from_bytes(hashlib.sha256(f"4 x 3 {name}".encode()).digest()[:8], "big")
        for r in (0, 1):
            place = splitmix((start + (int(rows[b, r]) + 1) * golden) & WORDS)
            words = [splitmix((place + column * golden) & WORDS) for column in (1, 2, 3, 4)]
            assert [int(x) % 2**64 for x in bits[b, r]] == words
            u = [((word >> 11) + 0.5) / 2**53 for word in words]
            want = [math.sqrt(-2 * math.log(u[i])) * math.cos(2 * math.pi * u[2 + i]) for i in (0, 1)]
            assert numbers[b, r].tolist() == pytest.approx(want, abs=1e-6)


def test_draws_are_normal_and_independent_of_each_other():
    from scipy import stats

    from driftlab.interventions.draws import normal

    rows = torch.arange(400)[None]
    x = normal("0 n", ("p",), rows, 2, 100)
    assert stats.kstest(x.flatten().numpy(), "norm").pvalue > 0.01
    others = [
        normal("1 n", ("p",), rows, 2, 100),
        normal("0 n", ("q",), rows, 2, 100),
        normal("0 n", ("p",), rows, 3, 100),
        normal("0 n", ("p",), rows + 1, 2, 100),
        x.roll(1, -1),
    ]
    for other in others:
        assert abs(float((x * other).mean())) < 4 / math.sqrt(x.numel())
    assert torch.equal(normal("0 n", ("p",), rows + 1, 2, 100)[:, :-1], x[:, 1:])


def test_noise_on_the_hidden_path_has_the_stated_size_and_enters_at_the_stated_depths():
    drafter, batch = drafter_of("GQA"), batch_of()
    names = ("hook_fused", "hook_feedback")
    for text, fused, fed in (("noise:hidden:0.5", True, (1, 2, 3)), ("noise:hidden:0.5@2,4", False, (1, 3))):
        raw = before(drafter, batch, [text], names)
        after = within(drafter, batch, [text], names)
        noise = {key: (after[key] - raw[key]) / size(raw[key]) for key in raw}
        assert bool((noise["fusion.hook_fused", 1] != 0).any()) == fused
        for depth in (1, 2, 3, 4):
            x = noise["hook_feedback", depth]
            # what leaves depth 4 would enter depth 5
            assert bool((x != 0).all()) == (depth in fed or (depth == 4 and fused)), depth
            if depth in fed:
                assert float(x.square().mean()) == pytest.approx(0.25, rel=0.25)
        assert not torch.allclose(noise["hook_feedback", 1], noise["hook_feedback", 3])


def test_noise_depends_on_seed_and_path_and_id_and_on_nothing_else():
    import dataclasses

    drafter, batch = drafter_of("GQA"), batch_of()
    first = run(drafter, batch, ["noise:hidden:0.5"])
    assert all(torch.equal(first[k], again) for k, again in run(drafter, batch, ["noise:hidden:0.5:seed=0"]).items())
    assert not torch.allclose(first[2], run(drafter, batch, ["noise:hidden:0.5:seed=1"])[2])
    renamed = dataclasses.replace(batch, ids=("p:0", "other"))
    named = run(drafter, renamed, ["noise:hidden:0.5"])
    assert torch.equal(first[2][0], named[2][0])
    assert not torch.allclose(first[2][1], named[2][1])


@pytest.mark.parametrize("shape", ["GQA", "MTP", "twice_normed"])
@pytest.mark.parametrize("depths", ["1-", "1", "3"])
def test_noise_on_the_embedding_is_added_before_its_norm_and_nowhere_else(shape, depths):
    from driftlab.draft import text_at
    from driftlab.interventions.draws import normal

    drafter, batch = drafter_of(shape), batch_of()
    norm = drafter.layers[0].enorm if shape == "MTP" else drafter.layers[0].input_layernorm
    values = before(
        drafter, batch, [f"noise:embedding:0.7:seed=5@{depths}"], ("hook_embed_normed", "hook_hidden_normed")
    )
    plain = before(drafter, batch, [], ("hook_hidden_normed",))
    for depth in (1, 2, 3, 4):
        rows = batch.starts.rows if depth > 1 else torch.arange(13)[None].expand(2, -1)
        tokens = text_at(batch, rows + depth) if depth > 1 else batch.tokens[:, 1:]
        e = drafter.embed(tokens).detach()
        acts = depths == "1-" or depths == str(depth)
        noise = 0.7 * size(e) * normal("5 embedding", batch.ids, rows, depth, 32).double() if acts else 0
        with torch.no_grad():
            want = norm(e + noise)
        assert torch.allclose(values["layers.0.hook_embed_normed", depth], want, atol=1e-12), depth
    if shape != "MTP":
        first = "layers.0.hook_hidden_normed", 1
        assert torch.equal(values[first], plain[first])


@pytest.mark.parametrize("shape", ["GQA", "two layers", "MTP"])
@pytest.mark.parametrize("to", ["fused", "depth1", "2.5"])
def test_a_magnitude_pin_sets_the_size_and_keeps_the_direction(shape, to):
    drafter, batch = drafter_of(shape), batch_of()
    text = f"magnitude:{to}@3-"
    raw, pinned = before(drafter, batch, [text], ("hook_feedback", "hook_fused")), run(drafter, batch, [text])
    fused = raw["fusion.hook_fused", 1].gather(1, batch.starts.rows[..., None].expand(-1, -1, 32))
    want = {"fused": size(fused), "depth1": size(raw["hook_feedback", 1]), "2.5": torch.tensor(2.5)}[to]
    assert torch.equal(pinned[1], raw["hook_feedback", 1])  # it enters depth 2
    for depth in (2, 3, 4):
        assert torch.allclose(size(pinned[depth]), want.double().expand_as(size(pinned[depth])), rtol=1e-12)
        cosine = torch.nn.functional.cosine_similarity(pinned[depth], raw["hook_feedback", depth], dim=-1)
        assert torch.allclose(cosine, torch.ones_like(cosine), atol=1e-12)
        assert not torch.allclose(size(raw["hook_feedback", depth]), size(pinned[depth]), rtol=1e-3)


def test_a_state_of_zeros_stays():
    from driftlab.interventions.base import rms
    from driftlab.interventions.states import rescaled

    x = torch.tensor([[0.0, 0.0], [3.0, 3.0]])
    assert rescaled(x, rms(x), torch.tensor([[6.0], [6.0]])).tolist() == [[0.0, 0.0], [6.0, 6.0]]


def test_a_direction_swap_takes_each_direction_once_and_never_its_own():
    drafter, batch = drafter_of("GQA"), batch_of()
    rings = {}
    for seed in (0, 1):
        text = f"direction:seed={seed}"
        raw, swapped = before(drafter, batch, [text]), run(drafter, batch, [text])
        for depth in (1, 2, 3):
            old, new = raw["hook_feedback", depth], swapped[depth]
            assert torch.allclose(size(new), size(old), rtol=1e-12)
            for sequence, count in ((0, 8), (1, 6)):
                unit = [torch.nn.functional.normalize(x[sequence, :count], dim=-1) for x in (new, old)]
                match = (unit[0] @ unit[1].T) > 1 - 1e-12
                assert match.sum(0).tolist() == [1] * count  # nobody's direction twice: same start, same depth, once
                assert match.sum(1).tolist() == [1] * count
                assert not bool(match.diagonal().any())
                rings[seed, sequence, depth] = match.float().argmax(1).tolist()
    assert rings[0, 0, 1] != rings[1, 0, 1]
    assert rings[0, 0, 1] != rings[0, 0, 2]


def test_a_chain_has_no_other_direction_unless_there_is_a_bank():
    from driftlab.draft import all_starts, chain
    from driftlab.errors import DriftlabError
    from driftlab.interventions import DirectionSwap

    drafter, batch = drafter_of("GQA"), batch_of()
    with DirectionSwap().on(drafter), pytest.raises(DriftlabError, match="bank of directions"):
        chain(drafter, batch, [6, 4], 3)
    bank = torch.randn(50, 32, dtype=torch.float64)
    swap = DirectionSwap(seed=3, bank=bank)
    assert swap.key == "direction:bank:seed=3"
    kept = []
    with swap.on(drafter), drafter.hooks([("hook_feedback", lambda v, hook: kept.append(v.clone()))], read_only=True):
        every = all_starts(drafter, batch, 4, feed="own")
        wide = list(kept)
        kept.clear()
        assert torch.equal(chain(drafter, batch, [6, 4], 4), every.tokens[:, [1, 2]].diagonal().T)
    for depth in range(4):
        assert torch.allclose(kept[depth][0, 0], wide[depth][0, 1], rtol=1e-9)
        assert torch.allclose(kept[depth][1, 0], wide[depth][1, 2], rtol=1e-9)
    cosine = (
        torch.nn.functional.normalize(wide[0].flatten(0, 1), dim=-1) @ torch.nn.functional.normalize(bank, dim=-1).T
    )
    assert torch.allclose(cosine.amax(1), torch.ones(len(cosine), dtype=cosine.dtype))
    assert len(set(cosine.argmax(1).tolist())) > 5
    with pytest.raises(DriftlabError, match=r"not \[n, 32\]"), DirectionSwap(bank=bank[:, :8]).on(drafter):
        pytest.fail("was laid on")


def test_held_feedback_is_that_of_depth_1():
    drafter, batch = drafter_of("two layers"), batch_of()
    plain, held = run(drafter, batch, []), run(drafter, batch, ["held"])
    assert all(torch.equal(held[depth], plain[1]) for depth in (1, 2, 3, 4))
    late = run(drafter, batch, ["held@4"])
    assert torch.equal(late[2], plain[2])
    assert torch.equal(late[3], plain[1])


def test_an_aux_state_is_scaled_before_its_norm_or_behind_it():
    drafter, batch = drafter_of("GQA"), batch_of()  # with fc_norm
    plain = before(drafter, batch, [], ("hook_states", "hook_aux"), 1)
    for text, name in (("aux:1:3", "hook_states"), ("aux:1:3:where=normed", "hook_aux")):
        kept = within(drafter, batch, [text], (name, "hook_aux"), 1)
        want = plain[f"fusion.{name}", 1].clone()
        want[:, :, 1] *= 3
        assert torch.equal(kept[f"fusion.{name}", 1], want)
        same = torch.allclose(kept["fusion.hook_aux", 1], plain["fusion.hook_aux", 1], rtol=1e-5)
        assert same == (name == "hook_states")  # a norm takes a factor away


@pytest.mark.parametrize("shape", ["GQA", "MTP", "three layers, gate"])
@pytest.mark.parametrize("depths", ["", "@2"])
def test_the_final_norm_without_its_gain(shape, depths):
    drafter, batch = drafter_of(shape), batch_of()
    last = f"layers.{len(drafter.layers) - 1}.hook_resid"
    values = within(drafter, batch, [f"gain{depths}"], (last, "hook_normed", "hook_feedback"), 3)
    kept = {(name.split(".")[-1], depth): value for (name, depth), value in values.items()}
    for depth in (1, 2, 3):
        u = kept["hook_resid", depth]
        want = u / (u.square().mean(-1, keepdim=True) + drafter.config.rms_norm_eps).sqrt()
        if depths and depth != 2:
            want = want * (drafter.norm.weight + drafter.config.norm_plus_one)
        assert torch.allclose(kept["hook_normed", depth], want, rtol=1e-12)
        fed = kept["hook_normed", depth] if drafter.config.norm_output else u
        assert torch.equal(kept["hook_feedback", depth], fed)


def test_a_torch_hook_acts_at_its_depths_and_is_named():
    from driftlab.errors import DriftlabError
    from driftlab.interventions import TorchHook, parse_intervention

    drafter, batch = drafter_of("two layers"), batch_of()

    def doubled(module, args, output):
        return 2 * output

    plain = run(drafter, batch, [])
    hook = TorchHook("layers.1.hook_resid", doubled, depths="2")
    assert hook.key == f"hook:layers.1.hook_resid:{__name__}.{doubled.__qualname__}@2"
    with hook.on(drafter):
        changed = run(drafter, batch, [])
    assert torch.equal(changed[1], plain[1])
    assert torch.allclose(size(changed[2]), 2 * size(plain[2]))
    with TorchHook("layers.0.mlp", doubled, name="double").on(drafter):
        assert not torch.allclose(run(drafter, batch, [])[1], plain[1])
    text = "hook:layers.0.mlp:driftlab.hooks._adapt"
    assert parse_intervention(text).key == text
    with pytest.raises(DriftlabError, match="no hook point"), TorchHook("layers.0.mlp", doubled, depths=2).on(drafter):
        pytest.fail("was laid on")
    with (
        pytest.raises(DriftlabError, match=r"no module 'layers.7'.*layers.0.mlp"),
        TorchHook("layers.7", doubled).on(drafter),
    ):
        pytest.fail("was laid on")
