"""The blocked path against the dense specification: answers, gradients, memory and precision."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ANSWERS = ("out", "lse", "mass", "entropy", "visible", "recent", "columns")
LEAVES = ("q", "context_k", "context_v", "own_k", "own_v")
OPTIONS = [  # window, carried, own, options of the controls and the sink
    (0, 0, 0, ()),
    (0, 0, 3, ()),
    (0, 0, 2, ("bias", "drop", "scale", "sink")),
    (4, 0, 0, ("scale",)),
    (4, 0, 2, ("bias",)),
    (3, 2, 1, ("sink",)),
    (5, 3, 2, ("drop", "start drop", "bias")),
    (2, 0, 4, ("number",)),
    (2, 3, 5, ("bias", "scale", "sink", "drop")),
    (40, 0, 1, ("hide",)),
]


def random_problem(window=0, carried=0, own=0, options=(), seed=0, starts=11, context=13, dtype=torch.float64):
    """A problem with rows in no order, some of them the same."""
    from driftlab.attention import Controls, Stats
    from driftlab.kernels.problem import Problem

    generator = torch.Generator().manual_seed(seed)
    batch, heads, kv_heads, d_head, d_value = 2, 6, 2, 5, 4

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    bias = drop = None
    scaling = 0.6 if "number" in options else 1.0
    if "bias" in options:
        bias = normal(heads, 1, 4)
    if "hide" in options:
        bias = torch.tensor([0.0, -torch.inf, 0.5, 0.0], dtype=dtype)
    if "drop" in options:
        drop = (
            torch.rand((batch, starts, context) if "start drop" in options else (batch, context), generator=generator)
            < 0.3
        )
    if "scale" in options:
        scaling = torch.rand(batch, heads, starts, generator=generator, dtype=torch.float64).to(dtype) + 0.5
    rows = torch.randint(0, context, (batch, starts), generator=generator)
    rows[0, :2], rows[1, -1] = torch.tensor([0, context - 1]), context - 1
    segments = torch.randint(0, 3, (batch, context), generator=generator)
    segments[:, 0] = 0  # "hide" leaves every start a key
    return Problem(
        q=2 * normal(batch, heads, starts, d_head),
        context_k=2 * normal(batch, kv_heads, context, d_head),
        context_v=normal(batch, kv_heads, context, d_value),
        own_k=2 * normal(batch, kv_heads, 1, own, d_head).expand(-1, -1, starts, -1, -1),
        own_v=normal(batch, kv_heads, starts, own, d_value),
        rows=rows,
        segments=segments,
        scale=0.4,
        window=window,
        carried=carried,
        valid=torch.rand(batch, starts, generator=generator) < 0.7,
        controls=Controls(bias=bias, drop=drop, score_scale=scaling),
        sink_logit=normal(heads) if "sink" in options else None,
        stats=Stats(mass=True, entropy=True, columns=True, recent=(1, 2, 3, 7, 30)),
    )


def close(ours, theirs, fields=ANSWERS, atol=1e-12):
    for name in fields:
        torch.testing.assert_close(
            getattr(ours, name),
            getattr(theirs, name),
            rtol=0,
            atol=atol,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.fixture(params=["together", "one by one", "keys in runs"])
def tiles(request, monkeypatch):
    """All heads in a tile; one kv head of one sequence, a few starts at a time; and their keys in runs."""
    from driftlab.kernels import blocked

    if request.param != "together":
        monkeypatch.setattr(blocked, "KEYS", 3 if request.param == "keys in runs" else 1000)
        monkeypatch.setattr(blocked, "ROWS", 12)
        monkeypatch.setattr(blocked, "TILE_BYTES", 8 * 3 * 20)
        monkeypatch.setattr(blocked, "LEAST_ROWS", 5)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("given", OPTIONS, ids=str)
def test_the_answer_is_that_of_the_specification(tiles, given, seed):
    from driftlab.kernels import blocked, reference

    problem = random_problem(*given, seed=seed)
    for block in (None, 1, 4):
        expected = reference.attend(problem)
        close(blocked.attend(problem, block), expected)
        few = dataclasses.replace(problem, stats=dataclasses.replace(problem.stats, columns=False, recent=()))
        close(blocked.attend(few, block), expected, ANSWERS[:5])


@pytest.mark.parametrize("given", OPTIONS, ids=str)
def test_the_gradients_are_those_of_the_specification(tiles, given):
    from driftlab.kernels import blocked, reference

    problem = random_problem(*given, seed=2)
    leaves = {name: getattr(problem, name).clone().requires_grad_() for name in LEAVES}
    expected = reference.attend(dataclasses.replace(problem, **leaves))
    generator = torch.Generator().manual_seed(3)
    d_out, d_lse = (torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in (expected.out, expected.lse))
    answer = blocked.attend(problem)
    for with_lse in (False, True):
        into = ([expected.out, expected.lse], [d_out, d_lse]) if with_lse else ([expected.out], [d_out])
        theirs = torch.autograd.grad(into[0], list(leaves.values()), into[1], retain_graph=True)
        ours = blocked.backward(problem, answer.out, answer.lse, d_out, d_lse if with_lse else None)
        for name, one, other in zip(LEAVES, ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


class _Largest(TorchDispatchMode):
    """Remembers how many bytes the largest storage behind any result has."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.bytes = max(self.bytes, leaf.untyped_storage().nbytes())
        return result


def test_nothing_as_large_as_a_map_is_made_forward_or_backward(monkeypatch):
    from driftlab.attention import Stats
    from driftlab.kernels import blocked, reference

    starts = 256
    monkeypatch.setattr(blocked, "TILE_BYTES", 2**14)
    problem = random_problem(own=1, starts=starts, context=starts, dtype=torch.float32)
    problem = dataclasses.replace(problem, stats=Stats(mass=True, entropy=True, columns=True, recent=(1, 8)))
    one_map = 4 * starts * starts
    with _Largest() as dense:
        reference.attend(problem)
    assert dense.bytes >= one_map
    with _Largest() as ours:
        answer = blocked.attend(problem)
        blocked.backward(problem, answer.out, answer.lse, answer.out, answer.lse)
    assert ours.bytes < one_map / 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_accumulated_in_float32_and_rounded_once(tiles, dtype):
    """Every answer but ``out`` is as good as float32; ``out`` is as far away as its rounding, half a unit in the last place."""
    from driftlab.kernels import blocked, reference

    half = random_problem(own=2, context=200, starts=9, dtype=dtype)
    wide = dataclasses.replace(half, **{name: getattr(half, name).double() for name in LEAVES})
    ours, exact = blocked.attend(half), reference.attend(wide)
    assert ours.out.dtype == dtype
    for name in ("lse", "mass", "entropy", "recent", "columns"):
        assert getattr(ours, name).dtype == torch.float32
        torch.testing.assert_close(getattr(ours, name).double(), getattr(exact, name), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.out.double(), exact.out, rtol=0.51 * torch.finfo(dtype).eps, atol=1e-6)
    assert [g.dtype for g in blocked.backward(half, ours.out, ours.lse, ours.out, None)] == [dtype] * 5


def test_a_bias_of_minus_infinity_leaves_no_mass(tiles):
    from driftlab.kernels import blocked

    problem = random_problem(options=("hide",), own=2)
    mass = blocked.attend(problem).mass
    assert (mass[..., 1] == 0).all()
    torch.testing.assert_close(mass.sum(-1), torch.ones_like(mass[..., 0]))


def test_the_blind_start_that_is_named_is_the_problems_own(tiles):
    from driftlab import DriftlabError
    from driftlab.attention import Controls
    from driftlab.kernels import blocked

    problem = random_problem()
    drop = torch.zeros(2, 11, 13, dtype=torch.bool)
    drop[1, 7] = True
    valid = torch.ones(2, 11, dtype=torch.bool)
    blind = dataclasses.replace(problem, controls=Controls(drop=drop), valid=valid)
    with pytest.raises(
        DriftlabError, match=f"sequence 1 of the batch, row {int(problem.rows[1, 7])}: every key is dropped"
    ):
        blocked.attend(blind)
    valid[1, 7] = False
    answer = blocked.attend(blind)
    assert answer.out[valid[:, None].expand(2, 6, 11)].isfinite().all()
    assert answer.columns.isfinite().all()
    grads = blocked.backward(blind, answer.out.nan_to_num(), answer.lse, torch.ones_like(answer.out), None)
    assert all(grad.isfinite().all() for grad in grads)


def test_no_starts_are_no_special_case():
    from driftlab.kernels import blocked

    answer = blocked.attend(random_problem(own=2).at(slice(0, 0)))
    assert answer.out.shape == (2, 6, 0, 4)
    assert (answer.columns == 0).all()
