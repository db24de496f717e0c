"""Hooks see what passes, may replace it, and are gone after the block."""

import pytest
import torch
from builders import random_batch
from torch import nn

STREAM = (
    *("fusion.hook_states", "fusion.hook_aux", "fusion.hook_fused"),
    *("layers.0.hook_embed_normed", "layers.0.hook_hidden_normed"),
    *("layers.0.self_attn.hook_q", "layers.0.self_attn.hook_k", "layers.0.self_attn.hook_v"),
    *("layers.0.self_attn.hook_out", "layers.0.hook_attn_out", "layers.0.hook_mlp_out", "layers.0.hook_resid"),
    *("hook_normed", "hook_feedback"),
)
STATISTICS = tuple(
    f"layers.0.self_attn.hook_{name}" for name in ("mass", "entropy", "visible", "sees_sink", "recent", "columns")
)
DEPTH = 3


@pytest.fixture
def drafter(make_drafter):
    return make_drafter("eagle31")


@pytest.fixture
def batch():
    return random_batch((10, 7), (6, 4), width=32)


def run(drafter, batch):
    """Normed states of every depth, on the drafter's own tokens."""
    from driftlab.draft import unroll

    with torch.no_grad():
        return [state.normed for state, _ in unroll(drafter, batch, DEPTH, feed="own")]


def no_hooks(drafter):
    return not any(module._forward_hooks or module._forward_pre_hooks for module in drafter.modules())


def test_the_names_are_the_documented_ones(drafter, make_drafter):
    assert set(drafter.hook_dict) == {*STREAM, *STATISTICS, "hook_starts"}
    assert all(point.name == name for name, point in drafter.hook_dict.items())
    two = set(make_drafter(num_hidden_layers=2).hook_dict)
    assert {"layers.1.hook_resid", "layers.1.self_attn.hook_mass"} <= two
    assert "layers.1.hook_embed_normed" not in two


def test_hook_points_are_no_part_of_the_state(drafter):
    assert not [key for key in drafter.state_dict() if "hook" in key]


@pytest.mark.parametrize("name", STREAM)
def test_a_replaced_tensor_changes_what_is_downstream_and_only_in_the_block(drafter, batch, name):
    before = run(drafter, batch)
    with drafter.hooks([(name, lambda value, hook: value.flip(-1) * 1.5)]):
        inside = run(drafter, batch)
    after = run(drafter, batch)
    first = 2 if name == "hook_feedback" else 1
    for depth, (old, new, again) in enumerate(zip(before, inside, after, strict=True), 1):
        assert torch.equal(old, again)
        changed = ~torch.isclose(old, new).all(-1)
        assert bool(changed.all()) == (depth >= first), depth
    assert no_hooks(drafter)


@pytest.mark.parametrize("name", STREAM[3:])
def test_a_hook_may_act_at_one_depth_only(drafter, batch, name):
    before = run(drafter, batch)
    inside = drafter.run_with_hooks(
        batch, fwd_hooks=[(name, lambda value, hook: value * 1.5 if hook.depth == 2 else None)], run=run
    )
    assert torch.equal(before[0], inside[0])
    assert torch.equal(before[1], inside[1]) == (name == "hook_feedback")
    assert not torch.equal(before[2], inside[2])


def test_a_hook_that_returns_none_changes_no_bit(drafter, batch):
    before = run(drafter, batch)
    with drafter.hooks([(None, lambda value, hook: None)]):
        watched = run(drafter, batch)
    assert all(torch.equal(old, new) for old, new in zip(before, watched, strict=True))


def test_replacing_one_row_of_the_values_moves_only_the_starts_that_see_it(drafter, batch):
    def change(value, hook):
        if hook.depth == 1:
            value = value.clone()
            value[0, 7] += 10.0
            return value
        return None

    before, inside = run(drafter, batch), drafter.run_with_hooks(batch, fwd_hooks=[("hook_v", change)], run=run)
    same = torch.isclose(before[0], inside[0]).all(-1)
    assert same.tolist() == [[True, True, False, False], [True] * 4]  # starts at rows 5, 6, 7, 8


def test_keys_are_published_after_rotary_by_row_and_by_start(drafter, batch):
    _, cache = drafter.run_with_cache(batch, run=run)
    attention = "layers.0.self_attn."
    assert cache[attention + "hook_k", 1].shape == (2, 9, 2, 8)
    assert cache[attention + "hook_k", 2].shape == (2, 4, 2, 8)
    assert cache[attention + "hook_q", 1].shape == (2, 4, 4, 8)
    assert cache[attention + "hook_out", 3].shape == (2, 4, 4, 8)
    assert cache[attention + "hook_mass", 3].shape == (2, 4, 4, 4)


def test_plain_torch_forward_hooks_work(drafter, batch):
    seen = []
    handle = drafter.layers[0].hook_resid.register_forward_hook(
        lambda module, args, output: seen.append((module.depth, args[0] is output)) or output * 2
    )
    inside = run(drafter, batch)
    handle.remove()
    assert seen == [(1, True), (2, True), (3, True)]
    assert not torch.allclose(inside[1], run(drafter, batch)[1])


def test_hooks_of_several_points_and_nested_blocks_compose(drafter, batch):
    order = []
    with (
        drafter.hooks([("hook_resid", lambda value, hook: order.append("outer") or value + 1)]),
        drafter.hooks([(["hook_normed", "hook_resid"], lambda value, hook: order.append(hook.name) or value * 2)]),
    ):
        _, cache = drafter.run_with_cache(batch, names_filter="hook_resid", run=run)
    _, plain = drafter.run_with_cache(batch, names_filter="hook_resid", run=run)
    torch.testing.assert_close(cache["layers.0.hook_resid", 1], 2 * (plain["layers.0.hook_resid", 1] + 1))
    assert order == ["outer", "layers.0.hook_resid", "hook_normed"] * DEPTH


# ---- selecting


def test_a_misspelt_name_is_an_error_and_leaves_nothing_attached(drafter):
    from driftlab import DriftlabError

    for names in ("hook_rezid", ["hook_resid", "hook_rezid"], "esid", "0.hook_mass"):
        with (
            pytest.raises(DriftlabError, match="no hook point is called .*layers.0.hook_resid"),
            drafter.hooks([("hook_normed", lambda value, hook: None), (names, lambda value, hook: None)]),
        ):
            pytest.fail("the block ran")
        assert no_hooks(drafter)


def test_names_may_be_shortened_listed_or_a_predicate(make_drafter):
    drafter = make_drafter(num_hidden_layers=2)

    def names(selection):
        return [point.name for point in drafter.select_hooks(selection)]

    assert names("hook_resid") == ["layers.0.hook_resid", "layers.1.hook_resid"]
    assert names("1.hook_resid") == ["layers.1.hook_resid"]
    assert names(["hook_normed", "layers.0.hook_resid"]) == ["hook_normed", "layers.0.hook_resid"]
    assert names(lambda name: name.endswith("_fused")) == ["fusion.hook_fused"]
    assert names(None) == list(drafter.hook_dict)


# ---- caching


def test_run_with_cache_returns_the_result_and_every_name_and_depth(drafter, batch):
    result, cache = drafter.run_with_cache(batch, run=run)
    plain = run(drafter, batch)
    assert all(torch.equal(a, b) for a, b in zip(result, plain, strict=True))
    quiet = {"layers.0.self_attn.hook_recent"}  # nobody set a window
    per_depth = (set(STREAM) | set(STATISTICS)) - quiet
    fusion = {name for name in STREAM if name.startswith("fusion")}
    assert set(cache) == {(name, 1) for name in per_depth} | {
        (name, depth) for name in per_depth - fusion for depth in (2, 3)
    }
    for depth in (1, 2, 3):
        assert torch.equal(cache["hook_normed", depth], result[depth - 1])
        assert torch.equal(cache["hook_feedback", depth], result[depth - 1])
    assert no_hooks(drafter)


def test_a_filter_keeps_the_cache_small_and_cached_tensors_carry_no_graph(drafter, batch):
    _, cache = drafter.run_with_cache(batch, names_filter=["hook_feedback", "hook_mass"], run=run)
    assert {name for name, _ in cache} == {"hook_feedback", "layers.0.self_attn.hook_mass"}
    logits, cache = drafter.run_with_cache(batch.tokens, batch.aux)
    assert logits.requires_grad
    assert not cache["hook_normed", 1].requires_grad
    assert torch.equal(drafter.logits(cache["hook_normed", 1]), logits)


def test_several_batches_are_several_calls(drafter, tiny_trajectory):
    from driftlab import DriftlabError, all_starts

    _, cache = drafter.run_with_cache(tiny_trajectory, 2, max_tokens=1, run=all_starts)
    assert [call.shape[0] for call in cache.calls("hook_feedback", 2)] == [1] * 4
    with pytest.raises(DriftlabError, match=r"seen 4 times.*cache.calls\('hook_feedback', 2\)"):
        cache["hook_feedback", 2]
    with pytest.raises(DriftlabError, match=r"nothing cached for \('hook_feedback', 3\)"):
        cache["hook_feedback", 3]


def test_an_exception_in_the_block_removes_the_hooks(drafter, batch):
    def fail(value, hook):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        drafter.run_with_hooks(batch, fwd_hooks=[("hook_normed", lambda v, h: v * 2), ("hook_resid", fail)], run=run)
    assert no_hooks(drafter)
    with pytest.raises(KeyboardInterrupt), drafter.hooks([(None, fail)]):
        run(drafter, batch)
    assert no_hooks(drafter)


# ---- cost


def test_statistics_are_computed_only_while_somebody_listens(drafter, batch, monkeypatch):
    from driftlab.attention import Stats
    from driftlab.drafter import blocks

    asked = []
    original = blocks.attend
    monkeypatch.setattr(blocks, "attend", lambda *args, **kw: asked.append(kw["stats"]) or original(*args, **kw))
    run(drafter, batch)
    assert asked == [Stats()] * DEPTH
    drafter.layers[0].self_attn.recent_windows = (4,)
    for name, stats in {
        "hook_mass": Stats(mass=True),
        "hook_entropy": Stats(entropy=True),
        "hook_columns": Stats(columns=True),
        "hook_recent": Stats(recent=(4,)),
        "hook_visible": Stats(),
    }.items():
        asked.clear()
        _, cache = drafter.run_with_cache(batch, names_filter=name, run=run)
        assert asked == [stats] * DEPTH
        assert len(cache) == DEPTH
    asked.clear()
    run(drafter, batch)
    assert asked == [Stats()] * DEPTH


def test_any_module_with_hook_points_has_the_verbs():
    from driftlab.hooks import HookedModule, HookPoint

    class Doubler(HookedModule):
        def __init__(self):
            super().__init__()
            self.inner = nn.ModuleList([HookPoint(), HookPoint()])
            self.name_hook_points()

        def forward(self, x):
            return self.inner[1](2 * self.inner[0](x, 1), 2)

    module, one = Doubler(), torch.ones(1)
    result, cache = module.run_with_cache(one)
    assert (float(result), float(cache["inner.0", 1]), float(cache["inner.1", 2])) == (2.0, 1.0, 2.0)
    assert float(module.run_with_hooks(one, fwd_hooks=[("inner.0", lambda value, hook: value + hook.depth)])) == 4.0
    assert not module.inner[0].watched
