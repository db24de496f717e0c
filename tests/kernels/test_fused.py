"""Chains by the step kernels against the modules: tokens, and what the hooks are told."""

from __future__ import annotations

import contextlib
import dataclasses
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


@pytest.mark.parametrize(
    ("variant", "window", "depth"),
    [("eagle31", 0, 3), *((name, 0, 2) for name in VARIANT_NAMES[:3]), ("fc_norm", 4, 3)],
)
def test_the_kernels_draft_what_the_modules_draft_and_tell_the_hooks_the_same(
    variant, window, depth, make_drafter, batch
):
    from driftlab.fused import SERVED

    drafter = make_drafter(variant, windows=(window,))
    drafter.layers[0].self_attn.recent_windows = (1, 2, 3, 7)
    rows = (batch.prompt_lengths + 2).tolist()
    plain, cache = drafted(drafter, batch, rows, depth, "torch", names=SERVED)
    fused, told = drafted(drafter, batch, rows, depth, "triton", names=SERVED)
    assert torch.equal(fused, plain)
    assert set(told) == set(cache)
    assert {k for _, k in told} == set(range(1, depth + 1))
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
def adapted(drafter):
    """An adapter around a projection that shows the weight of what it wraps, as many do."""

    class Adapted(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        weight = property(lambda self: self.inner.weight)
        bias = property(lambda self: self.inner.bias)

        def forward(self, x):
            return self.inner(x) * -3

    attention = drafter.layers[0].self_attn
    attention.o_proj = Adapted(attention.o_proj)
    yield
    attention.o_proj = attention.o_proj.inner


@contextlib.contextmanager
def own_forward(drafter):
    mlp = drafter.layers[0].mlp
    mlp.forward = lambda x: 5 * type(mlp).forward(mlp, x)
    yield
    del mlp.forward


@contextlib.contextmanager
def hook_on_all(drafter):
    def scaled(module, args, out):
        return -4 * out if isinstance(module, type(drafter.layers[0].mlp)) else None

    handle = torch.nn.modules.module.register_module_forward_hook(scaled)
    yield
    handle.remove()


@contextlib.contextmanager
def steered(drafter):
    attention = drafter.layers[0].self_attn
    attention.steering = (
        lambda answer, problem, depth: dataclasses.replace(answer(problem), out=answer(problem).out * -9),
    )
    yield
    attention.steering = ()


@contextlib.contextmanager
def pre_hook(drafter):
    handle = drafter.layers[0].hook_resid.register_forward_pre_hook(lambda module, args: (args[0] * 0 + 1, args[1]))
    yield
    handle.remove()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (controls, "interventions on the attention"),
        (steered, "interventions on the attention"),
        (adapted, "module layers.0.self_attn.o_proj is not as"),
        (own_forward, "module layers.0.mlp is not as the drafter was built"),
        (hook_on_all, "a hook on every module"),
        (plain_hook, "attached to the module layers.0.mlp"),
        (pre_hook, "attached to the module layers.0.hook_resid"),
        (lambda d: d.hooks([("hook_feedback", lambda v, hook: v * 2)]), "hook_feedback may replace its value"),
        (lambda d: d.hooks([("hook_mlp_out", lambda v, hook: v * 2)]), "hook_mlp_out is watched"),
        (lambda d: d.hooks([("hook_k", lambda v, hook: None)], read_only=True), "hook_k is watched"),
    ],
)
def test_what_the_step_cannot_honour_runs_in_torch_and_says_so(change, reason, make_drafter, batch):
    from driftlab import chain
    from driftlab.errors import BackendWarning

    drafter, rows = make_drafter(), batch.prompt_lengths.tolist()
    unchanged = chain(drafter, batch, rows, 5, backend="torch")
    with change(drafter):
        plain = chain(drafter, batch, rows, 5, backend="torch")
        with pytest.warns(BackendWarning, match=reason):
            fused = chain(drafter, batch, rows, 5, backend="triton")
    assert torch.equal(fused, plain)
    assert "hook_k" in reason or not torch.equal(plain, unchanged)


@contextlib.contextmanager
def stored_by_columns(drafter):
    weight = drafter.lm_head.weight
    with torch.no_grad():
        weight.data = weight.data.T.contiguous().T
    yield
    weight.data = weight.data.contiguous()


@contextlib.contextmanager
def biased(drafter):
    q_proj = drafter.layers[0].self_attn.q_proj
    q_proj.bias = torch.nn.Parameter(torch.ones(len(q_proj.weight)))
    yield
    q_proj.bias = None


@contextlib.contextmanager
def other_eps(drafter):
    drafter.norm.eps, before = 3.0, drafter.norm.eps
    yield
    drafter.norm.eps = before


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (stored_by_columns, "lm_head.weight is not contiguous"),
        (biased, "layers.0.self_attn.q_proj is not as"),
        (other_eps, "norm is not as"),
    ],
)
def test_weights_that_the_kernels_would_misread_run_in_torch(change, reason, make_drafter, batch):
    from driftlab import BackendWarning, chain

    drafter, rows = make_drafter(lm_head="own"), batch.prompt_lengths.tolist()
    with change(drafter):
        plain = chain(drafter, batch, rows, 3, backend="torch")
        with pytest.warns(BackendWarning, match=reason):
            assert torch.equal(chain(drafter, batch, rows, 3, backend="triton"), plain)


def test_a_feedback_of_depth_1_that_was_replaced_is_used(make_drafter, batch):
    """The hook is gone when the step runs: only the state knows."""
    from driftlab import BackendWarning

    drafter, drafts = make_drafter("eagle31"), []
    for backend in ("torch", "triton"):
        with drafter.hooks([("hook_feedback", lambda value, hook: value * -20)]):
            chains = session(drafter, batch, backend)
        if backend == "torch":
            drafts.append(chains.draft(3))
        else:
            with pytest.warns(BackendWarning, match="feedback of depth 1 was replaced"):
                drafts.append(chains.draft(3))
    assert torch.equal(*drafts)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_states_that_the_drafter_does_not_read_are_refused_before_a_kernel_sees_them(backend, make_drafter, batch):
    from driftlab import Chain, DriftlabError

    drafter = make_drafter()
    chains = Chain(drafter, prompt_lengths=[4, 2], backend=backend)
    for aux in (batch.aux[:, :4, :2], batch.aux[:, :4, :, :16]):
        with pytest.raises(DriftlabError, match="3 states of width 32"):
            chains.extend(batch.tokens[:, 1:5], aux)
    with pytest.raises(DriftlabError, match="with 3 sequences"):
        Chain(drafter, prompt_lengths=[4, 2, 2], backend=backend).extend(batch.tokens[:, 1:5], batch.aux[:, :4])
    with pytest.raises(DriftlabError, match=r"rows \[4, 0\].*0\.\.3"):
        chains.extend(batch.tokens[:, 1:5], batch.aux[:, :4], torch.tensor([4, 0]))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_head_with_nan_is_refused(backend, make_drafter, batch):
    from driftlab import DriftlabError, chain

    drafter = make_drafter(lm_head="own")
    with torch.no_grad():
        drafter.lm_head.weight[5, 3] = torch.nan
    with pytest.raises(DriftlabError, match="not finite|logit is NaN"):
        chain(drafter, batch, batch.prompt_lengths.tolist(), 2, backend=backend)


def test_step_kernels_made_in_inference_mode_serve_outside(make_drafter, batch):
    chains = session(make_drafter(), batch, "triton")
    state = chains.take()
    with torch.inference_mode():
        first = chains._fused.draft(state, 2)
    assert torch.equal(chains._fused.draft(state, 2), first)


def test_weights_of_two_dtypes_run_in_torch(make_drafter, batch):
    from driftlab import BackendWarning, chain

    drafter, rows = make_drafter(), batch.prompt_lengths.tolist()
    drafter.norm.half()
    with pytest.warns(BackendWarning, match=r"several dtypes \(torch.float16, torch.float32\)"):
        chain(drafter, batch, rows, 2, backend="triton")


def test_what_a_cache_keeps_of_one_round_is_not_written_by_the_next(make_drafter, tiny_target, tiny_trajectory):
    from driftlab import speculate

    drafter = make_drafter("eagle31")
    prompt = tiny_trajectory.tokens(0)[: int(tiny_trajectory.entries[0].prompt_length)].tolist()
    caches = []
    for backend in ("torch", "triton"):
        _, cache = drafter.run_with_cache(
            names_filter=["hook_normed", "hook_mass", "hook_resid"],
            run=lambda d, backend=backend: speculate(
                tiny_target, d, prompt, depth=2, max_new_tokens=5, backend=backend
            ),
        )
        caches.append(cache)
    assert set(caches[0]) == set(caches[1])
    for key in caches[0]:
        rounds, again = (cache.calls(*key) for cache in caches)
        assert len(rounds) == len(again) > 1
        for one, other in zip(rounds, again, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-6)


def test_a_tree_is_drafted_by_the_chains_backend(make_drafter, batch, monkeypatch):
    from driftlab import StaticTree
    from driftlab.drafter import blocks
    from driftlab.trees import draft_tree

    asked, original = [], blocks.attend
    monkeypatch.setattr(blocks, "attend", lambda *a, **k: asked.append(k["backend"]) or original(*a, **k))
    draft_tree(session(make_drafter(), batch, "torch"), StaticTree(paths=((0,), (0, 0))))
    assert asked == ["torch", "torch"]


def test_using_reaches_chains_and_live_runs_unless_they_are_told_otherwise(make_drafter, batch, monkeypatch):
    from driftlab import chain
    from driftlab.kernels.chain import StepKernels

    drafter, rows, calls = make_drafter(), batch.prompt_lengths.tolist(), []
    original = StepKernels.draft
    monkeypatch.setattr(StepKernels, "draft", lambda *a, **k: calls.append(1) or original(*a, **k))
    with drafter.using("triton"):
        chain(drafter, batch, rows, 2)
        assert len(calls) == 1
        chain(drafter, batch, rows, 2, backend="torch")
        with drafter.using("torch"):
            chain(drafter, batch, rows, 2)
        assert len(calls) == 1
    chain(drafter, batch, rows, 2)
    assert len(calls) == 1


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
    from driftlab.errors import BackendWarning

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
