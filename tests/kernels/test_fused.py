"""Chains by the step kernels against the modules: tokens, and what the hooks are told."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch

VARIANT_NAMES = ("eagle3", "fc_norm", "norm_output", "eagle31")


def drafted(drafter, batch, rows, depth, backend, *, names=None):
    from driftlab import chain

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if names is None:
            return chain(drafter, batch, rows, depth, backend=backend), {}
        return drafter.run_with_cache(
            batch, rows, depth, names_filter=names, run=lambda *args: chain(*args, backend=backend)
        )


@pytest.fixture
def batch(tiny_trajectory):
    (batch,) = tiny_trajectory.subset([1, 2]).batches(2048)
    return batch


@pytest.mark.parametrize(("variant", "window"), [*((name, 0) for name in VARIANT_NAMES), ("fc_norm", 4)])
def test_the_kernels_draft_what_the_modules_draft_and_tell_the_hooks_the_same(variant, window, make_drafter, batch):
    from driftlab.fused import SERVED

    drafter = make_drafter(variant, windows=(window,))
    drafter.layers[0].self_attn.recent_windows = (1, 2, 3, 7)
    rows, depth = (batch.prompt_lengths + 2).tolist(), 3
    plain, cache = drafted(drafter, batch, rows, depth, "torch", names=SERVED)
    fused, told = drafted(drafter, batch, rows, depth, "triton", names=SERVED)
    assert torch.equal(fused, plain)
    assert set(told) == set(cache)
    assert {k for _, k in told} == {1, 2, 3}
    for key in cache:
        torch.testing.assert_close(
            told[key], cache[key], rtol=1e-4, atol=2e-6, msg=lambda text, key=key: f"{key}: {text}"
        )


def test_probes_read_a_fused_chain(make_drafter, batch):
    from driftlab import AttentionMass, StateNorm, chain

    drafter, frames = make_drafter(), {}
    rows = batch.prompt_lengths.tolist()
    for backend in ("torch", "triton"):
        with AttentionMass(drafter, recent=(2,)) as mass, StateNorm(drafter) as norm:
            chain(drafter, batch, rows, 2, backend=backend)
        frames[backend] = mass.frame(), norm.frame()
    for frame, other in zip(*frames.values(), strict=True):
        assert list(frame["quantity"]) == list(other["quantity"])
        pair = [torch.tensor(f["value"].to_numpy(dtype=float)) for f in (frame, other)]
        torch.testing.assert_close(*pair, rtol=1e-4, atol=2e-6, equal_nan=True)


def controls(drafter):
    from driftlab.attention import Controls

    @contextlib.contextmanager
    def pinned():
        drafter.layers[0].self_attn.controls = Controls(score_scale=0.5)
        yield
        drafter.layers[0].self_attn.controls = Controls()

    return pinned()


@contextlib.contextmanager
def plain_hook(drafter):
    handle = drafter.layers[0].mlp.register_forward_hook(lambda module, args, out: out * 0)
    yield
    handle.remove()


@contextlib.contextmanager
def pre_hook(drafter):
    handle = drafter.layers[0].hook_resid.register_forward_pre_hook(lambda module, args: (args[0] * 0 + 1, args[1]))
    yield
    handle.remove()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (controls, "interventions on the scores"),
        (plain_hook, "attached to the module layers.0.mlp"),
        (pre_hook, "attached to the module layers.0.hook_resid"),
        (lambda d: d.hooks([("hook_feedback", lambda v, hook: v * 2)]), "hook_feedback may replace its value"),
        (lambda d: d.hooks([("hook_mlp_out", lambda v, hook: v * 2)]), "hook_mlp_out is watched"),
        (lambda d: d.hooks([("hook_k", lambda v, hook: None)], read_only=True), "hook_k is watched"),
    ],
)
def test_what_the_step_cannot_honour_runs_in_torch_and_says_so(change, reason, make_drafter, batch):
    from driftlab import chain
    from driftlab.kernels.backend import BackendWarning

    drafter, rows = make_drafter(), batch.prompt_lengths.tolist()
    unchanged = chain(drafter, batch, rows, 5, backend="torch")
    with change(drafter):
        plain = chain(drafter, batch, rows, 5, backend="torch")
        with pytest.warns(BackendWarning, match=reason):
            fused = chain(drafter, batch, rows, 5, backend="triton")
    assert torch.equal(fused, plain)
    assert "hook_k" in reason or not torch.equal(plain, unchanged)


def test_a_state_that_is_not_finite_is_refused(make_drafter, batch, monkeypatch):
    """The interpreter takes no arg max of NaN, as a GPU does, so the kernels' answer is spoilt afterwards."""
    from driftlab import DriftlabError, chain
    from driftlab.kernels.chain import StepKernels

    original = StepKernels.draft

    def spoilt(*args, **kwargs):
        made = original(*args, **kwargs)
        made.normed[1, 1, 3] = torch.inf
        return made

    monkeypatch.setattr(StepKernels, "draft", spoilt)
    rows = batch.prompt_lengths.tolist()
    with pytest.raises(DriftlabError, match=rf"not finite: sequence '{batch.ids[1]}', row {rows[1]}, depth 2"):
        chain(make_drafter(), batch, rows, 2, backend="triton")


@pytest.mark.parametrize("variant", ["eagle3", "eagle31"])
def test_a_live_run_is_the_same_on_both_backends(variant, make_drafter, tiny_target, tiny_trajectory):
    from driftlab import speculate

    drafter = make_drafter(variant)
    prompt = tiny_trajectory.tokens(0)[: int(tiny_trajectory.entries[0].prompt_length)].tolist()
    runs = [
        speculate(tiny_target, drafter, prompt, depth=2, max_new_tokens=5, backend=backend)
        for backend in ("torch", "triton")
    ]
    assert runs[0].tokens == runs[1].tokens
    assert runs[0].rounds == runs[1].rounds


def session(drafter, batch, backend):
    from driftlab import Chain

    chains = Chain(drafter, prompt_lengths=batch.prompt_lengths.tolist(), ids=batch.ids, backend=backend)
    rows = batch.prompt_lengths + 1
    last = int(rows.max()) + 1
    chains.extend(batch.tokens[:, 1 : last + 1], batch.aux[:, :last], rows)
    return chains


@pytest.mark.parametrize("variant", ["eagle3", "eagle31"])
def test_tokens_drawn_by_chance_and_their_q_are_the_same_on_both_backends(variant, make_drafter, batch):
    from driftlab import Sampling

    drafter, depth = make_drafter(variant), 3
    uniforms = torch.rand(2, depth, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (tokens, q), (fused, fused_q) = (
            session(drafter, batch, backend).sample(depth, Sampling(temperature=1.7), uniforms)
            for backend in ("torch", "triton")
        )
    assert torch.equal(tokens, fused)
    torch.testing.assert_close(fused_q, q, rtol=1e-4, atol=1e-8)
    assert q.dtype == fused_q.dtype == torch.float64
    # the token is where the cumulative q passes the number
    place = (drafter.draft_vocab == tokens[..., None]).to(torch.int64).argmax(-1)
    upto = q.cumsum(-1).gather(-1, place[..., None])[..., 0]
    share = q.gather(-1, place[..., None])[..., 0]
    assert bool(((upto - share <= uniforms) & (uniforms < upto)).all())
    greedy = session(drafter, batch, "torch").draft(depth)
    assert not torch.equal(greedy, tokens)


def test_the_largest_number_below_one_takes_a_token_that_has_a_share(make_drafter, batch):
    """float32 makes it 1, at which no cumulative sum is passed."""
    from driftlab import Sampling

    drafter = make_drafter()
    with torch.no_grad():  # the last ids have no share worth the name
        drafter.lm_head.weight.mul_(40.0)
    uniforms = torch.full((2, 2), 1 - 2**-53, dtype=torch.float64)
    tokens, q = session(drafter, batch, "triton").sample(2, Sampling(temperature=1.0), uniforms)
    place = (drafter.draft_vocab == tokens[..., None]).to(torch.int64).argmax(-1)
    assert float(q.gather(-1, place[..., None]).min()) > 1e-9


def test_cuts_of_the_draft_distribution_run_in_torch_and_say_so(make_drafter, batch):
    from driftlab import DriftlabError, Sampling
    from driftlab.kernels.backend import BackendWarning

    drafter, uniforms = make_drafter(), torch.full((2, 2), 0.4, dtype=torch.float64)
    plain = session(drafter, batch, "torch").sample(2, Sampling(temperature=1.0, top_k=3), uniforms)
    with pytest.warns(BackendWarning, match="top_k"):
        fused = session(drafter, batch, "triton").sample(2, Sampling(temperature=1.0, top_k=3), uniforms)
    assert torch.equal(plain[0], fused[0])
    torch.testing.assert_close(plain[1], fused[1], rtol=1e-5, atol=1e-8)  # depth 1 is by the replay kernel
    assert int((plain[1] > 0).sum(-1).max()) == 3
    with pytest.raises(DriftlabError, match=r"arg max.*draft\(\)"):
        session(drafter, batch, "torch").sample(2, Sampling(), uniforms)
    with pytest.raises(DriftlabError, match=r"\[2, 1\].*\[2, 2\]"):
        session(drafter, batch, "torch").sample(2, Sampling(temperature=1.0), uniforms[:, :1])


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_sampled_live_run_is_the_same_on_both_backends(rule, make_drafter, tiny_target, tiny_trajectory):
    from driftlab import Sampling, speculate

    drafter = make_drafter("eagle31")
    prompt = tiny_trajectory.tokens(0)[: int(tiny_trajectory.entries[0].prompt_length)].tolist()
    runs = []
    for backend in ("torch", "triton"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            runs.append(
                speculate(
                    *(tiny_target, drafter, prompt),
                    **{"depth": 2, "max_new_tokens": 6, "sampling": Sampling(temperature=1.0, seed=3)},
                    **{"rule": rule, "backend": backend},
                )
            )
    assert runs[0].tokens == runs[1].tokens
    assert runs[0].rounds == runs[1].rounds


@pytest.mark.parametrize("variant", ["eagle3", "eagle31"])
def test_a_few_new_rows_are_fused_by_the_kernel_unless_the_fusion_is_hooked(variant, make_drafter, monkeypatch):
    from driftlab.fused import FusedChain
    from driftlab.kernels import chain as kernels

    drafter = make_drafter(variant)
    aux = torch.randn(1, 5, 3, 32, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 5, 30])[:, None]
    fused = FusedChain(drafter)
    torch.testing.assert_close(fused.fuse(aux), drafter.fuse(aux), rtol=1e-5, atol=1e-5)
    called = []
    monkeypatch.setattr(kernels, "fuse", lambda *args: called.append(args))
    assert fused.fuse(aux.expand(4, -1, -1, -1)) is None  # 20 rows are a matter for a matrix product
    with drafter.hooks([("fusion.hook_fused", lambda value, hook: None)], read_only=True):
        assert fused.fuse(aux) is None
    assert not called
