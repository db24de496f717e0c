"""The replay kernel against the specification in float64: in the interpreter, or compiled where there is a GPU."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re
import sys
import warnings

import pytest
import torch

from kernels import replay_cases as cases

pytestmark = pytest.mark.usefixtures("trapped")

GUARD = 64


class GuardedTorch:
    """torch, but ``empty`` gives memory full of NaN between two bands that nobody may write to."""

    def __init__(self):
        self.made = []

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty(self, *shape, dtype, device):
        numel = torch.Size(shape).numel()
        room = torch.full((numel + 2 * GUARD,), torch.nan, dtype=dtype, device=device)
        self.made.append(room)
        return room[GUARD : GUARD + numel].view(shape)

    def check(self):
        assert self.made
        for room in self.made:
            assert room[:GUARD].isnan().all(), "written before the output"
            assert room[-GUARD:].isnan().all(), "written after the output"
            assert not room[GUARD:-GUARD].isnan().any(), "not all of the output was written"


@pytest.fixture
def answer(monkeypatch):
    """Attend with guarded outputs, in small tiles unless told."""
    from driftlab.kernels import configs, replay

    def attend(problem, tile=cases.SMALL_TILE):
        guarded = GuardedTorch()
        with monkeypatch.context() as patch:
            patch.setattr(replay, "torch", guarded)
            if tile:
                patch.setattr(configs, "replay_tile", lambda *_: tile)
            result = replay.attend(problem)
        guarded.check()
        return result

    return attend


@pytest.mark.parametrize("name", cases.NAMED)
def test_named_problems(name, answer, device):
    problem = cases.problem(**cases.NAMED[name], device=device)
    cases.check(problem, answer(problem))


@pytest.mark.parametrize("seed", range(12))
def test_random_problems(seed, answer, device):
    problem = cases.problem(**cases.random_options(seed), device=device)
    cases.check(problem, answer(problem))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [64, 128, 192])
def test_the_tiles_that_are_shipped(size, dtype, answer, device):
    options = {"d_head": size, "d_value": min(size, 128), "context": 140, "starts": 3, "late": True, "batch": 1}
    problem = cases.problem(**options, prompt=70, dtype=dtype, device=device)
    cases.check(problem, answer(problem, tile=None))


def test_without_statistics_the_output_is_the_same(answer, device):
    from driftlab.kernels.problem import Stats

    problem = cases.problem(sink=True, window=9, carried=4, context=40, device=device)
    full, bare = answer(problem), answer(dataclasses.replace(problem, stats=Stats()))
    assert bare.mass is bare.entropy is bare.recent is bare.columns is None
    torch.testing.assert_close(bare.out, full.out, rtol=0, atol=2e-6)
    torch.testing.assert_close(bare.lse, full.lse, rtol=0, atol=4e-6)


def test_equal_scores_have_the_entropy_ln_n_and_one_key_has_none(answer, device):
    problem = cases.problem(factor=0.0, device=device)
    result = answer(problem)
    expected = result.visible[:, None].float().log().expand_as(result.entropy)
    torch.testing.assert_close(result.entropy, expected, rtol=0, atol=2e-6)
    assert (answer(cases.problem(context=1, own=0, device=device)).entropy == 0).all()


def test_where_segments_end_changes_no_output(answer, device):
    problem = cases.problem(late=True, context=50, device=device)
    whole = answer(problem)
    for prompt in (1, 17, 48):
        segments = problem.segments.clone()
        segments[:, 1:prompt], segments[:, prompt:] = cases.PROMPT, cases.CONTEXT
        moved = answer(dataclasses.replace(problem, segments=segments))
        for name, atol in (("out", 2e-6), ("lse", 4e-6), ("entropy", 4e-6)):
            torch.testing.assert_close(getattr(moved, name), getattr(whole, name), rtol=0, atol=atol)
    assert not torch.allclose(moved.mass, whole.mass)


def test_keys_after_the_row_have_no_influence(answer, device):
    problem = cases.problem(device=device)
    problem.rows.clamp_(max=20)
    before = answer(problem)
    problem.context_k[:, :, 21:] = 1e3
    problem.context_v[:, :, 21:] = 1e9
    after = answer(problem)
    for name in ("out", "lse", "mass", "entropy", "recent"):
        assert torch.equal(getattr(before, name), getattr(after, name)), name


def test_a_start_that_sees_no_key_gets_no_number(device):
    """As the specification has it; a plausible average of hidden values would go unnoticed."""
    import numpy as np

    from driftlab.kernels import replay

    problem = cases.problem(bias=(-math.inf,) * 4, device=device)
    with np.errstate(all="ignore"):
        result = replay.attend(problem)
    assert (result.lse == -math.inf).all()
    assert result.out.isnan().all()
    assert result.mass.isnan().all()
    assert result.entropy.isnan().all()


def test_gradients_pass_through_the_kernel(device, monkeypatch):
    from driftlab.attention import attend
    from driftlab.kernels import configs, reference
    from driftlab.kernels.backend import BackendWarning

    monkeypatch.setattr(configs, "replay_tile", lambda *_: cases.SMALL_TILE)
    problem = cases.problem(window=9, carried=4, device=device)
    leaves = {name: getattr(problem, name).requires_grad_() for name in cases.INPUTS}
    where = {name: getattr(problem, name) for name in ("rows", "segments", "scale", "window", "carried")}
    with warnings.catch_warnings():
        warnings.simplefilter("error", BackendWarning)
        result = attend(**leaves, **where, backend="triton")
    weight = torch.randn(result.out.shape, generator=torch.Generator().manual_seed(1)).to(device)
    ours = torch.autograd.grad((result.out * weight).sum() + result.lse.sum(), list(leaves.values()))
    wide = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
    exact = reference.attend(dataclasses.replace(problem, **wide))
    theirs = torch.autograd.grad((exact.out * weight.double()).sum() + exact.lse.sum(), list(wide.values()))
    for name, got, expected in zip(leaves, ours, theirs, strict=True):
        torch.testing.assert_close(
            got.double(), expected, rtol=0, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_what_it_refuses_and_why(device):
    from driftlab import DriftlabError
    from driftlab.kernels import replay
    from driftlab.kernels.problem import Controls, Stats

    problem = cases.problem(device=device)
    assert replay.refuses(problem) == ""
    alternating = torch.arange(37, device=device) % 2 + torch.zeros(2, 1, dtype=torch.int64, device=device)
    wide = {name: getattr(problem, name).double() for name in cases.INPUTS}
    for change, why in (
        ({"controls": Controls(drop=torch.zeros(2, 37, dtype=torch.bool, device=device))}, "single keys are dropped"),
        ({"stats": Stats(columns=True)}, "mass of each single key"),
        (wide, "torch.float64 .it takes float32"),
        ({"q": wide["q"]}, "different types"),
        ({"segments": alternating}, "change more than 15 times"),
        (
            {"context_v": problem.context_v.repeat(1, 1, 1, 20), "own_v": problem.own_v.repeat(1, 1, 1, 1, 20)},
            "at most 256",
        ),
    ):
        refused = dataclasses.replace(problem, **change)
        assert re.search(why, replay.refuses(refused))
        with pytest.raises(DriftlabError, match=f'cannot answer this.*{why}.*use backend="torch"'):
            replay.attend(refused)
    assert replay.refuses(dataclasses.replace(problem, segments=alternating, stats=Stats())) == ""


def test_runs_are_cut_where_segments_change_and_where_carried_ends():
    from driftlab.kernels import replay

    segments = torch.tensor([[0, 1, 1, 2, 2, 2], [1, 1, 1, 1, 1, 1]])
    expected = [
        [[0, 1, 0, 0], [1, 3, 1, 0], [3, 4, 2, 0], [4, 6, 2, 1]],
        [[0, 4, 1, 0], [4, 6, 1, 1], [6, 6, 1, 1], [6, 6, 1, 1]],
    ]
    table = replay.runs(segments, 4)
    assert table.tolist() == expected
    assert replay.runs(segments, 4) is table
    assert replay.runs(segments, 4, by_segment=False).tolist() == [[[0, 4, 0, 0], [4, 6, 0, 1]]] * 2
    segments[1, 0] = 0
    assert replay.runs(segments, 4)[1].tolist() == [[0, 1, 0, 0], [1, 4, 1, 0], [4, 6, 1, 1], [6, 6, 1, 1]]


#: a fault of the kernel (old text, new text) and the named problem that must notice it
FAULTS = {
    "entropy not rescaled": (
        "b_u = b_a * (b_u + b_d * b_l) + tl.sum", "b_u = b_a * b_u + tl.sum", "late rows"),
    "entropy of own keys not rescaled": ("b_u = b_a * (b_u + b_d * b_l) + b_p", "b_u = b_a * b_u + b_p", "plain"),
    "the start's own row hidden": ("o_n[None, :] <= b_t", "o_n[None, :] < b_t", "plain"),
    "window one too long": ("o_n[None, :] > b_after", "o_n[None, :] >= b_after", "window"),
    "window counts one own key less": (
        "tl.maximum(own - window, 0)", "tl.maximum(own - window + 1, 0)", "window within the own keys"),
    "mass not rescaled": ("l_3 = b_a * l_3", "l_3 = l_3", "plain"),
    "runs merged without a common maximum": ("b_l = b_a * b_l + s_l", "b_l = b_l + s_l", "plain"),
    "keys after the first start not masked": ("tl.minimum(end, t_lo + 1)", "tl.minimum(end, t_hi + 1)", "late rows"),
    "entropy without the sink's share": ("b_h = b_w * (b_h - ", "b_h = b_w * (b_h - 0 * ", "learned sink"),
    "output not rescaled": ("b_v, b_o * b_a[:, None]", "b_v, b_o", "plain"),
    "head of another group": ("o_h = i_kv * G + o_m % G", "o_h = i_kv + o_m % G", "plain"),
    "rows of the last block unguarded": ("m_q = o_m < starts * G", "m_q = o_m < starts * G + 1", "plain"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_kernel_is_noticed(fault, answer, device, monkeypatch, tmp_path):
    from triton.runtime.errors import InterpreterError

    from driftlab.kernels import replay_kernels

    old, new, name = FAULTS[fault]
    with open(replay_kernels.__file__) as file:
        source = file.read()
    assert old in source
    path = tmp_path / "faulty_kernels.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location("faulty_kernels", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "driftlab.kernels.replay_kernels", module)
    problem = cases.problem(**cases.NAMED[name], device=device)
    with pytest.raises((AssertionError, InterpreterError)) as noticed:
        cases.check(problem, answer(problem))
    assert noticed.type is AssertionError or "FloatingPointError" in str(noticed.value)
