"""Attention by torch's flash kernel against the float64 specification; what it leaves to the tiles; that it is used at all."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from .replay_cases import NAMED, check, oracle, problem, random_options
from .test_blocked import LEAVES, _Largest, close, random_problem

NO_WINDOW = {name: options for name, options in NAMED.items() if not options.get("window")}
BITS = ("out", "lse", "mass", "recent", "visible")


def rising(starts=80, first=20, padding=0, seed=0, dtype=torch.float64, runs=4, **options):
    """A problem of two sequences, six heads, whose rows follow each other; the last ``padding`` are the same."""
    asked = random_problem(**options, seed=seed, starts=starts, context=first + starts, dtype=dtype)
    rows = torch.arange(first, first + starts).repeat(2, 1)
    rows[1, starts - padding :] = first + starts - 1 - padding
    segments = asked.segments[:, :runs].repeat_interleave(-(-(first + starts) // runs), 1)[:, : first + starts]
    return dataclasses.replace(asked, rows=rows, segments=segments)


@pytest.mark.parametrize("block", [None, 2])
@pytest.mark.parametrize("name", NO_WINDOW)
def test_named_problems(name, block):
    from driftlab.kernels import flash

    asked = problem(**NO_WINDOW[name])
    check(asked, flash.attend(asked, block))


@pytest.mark.parametrize("seed", range(12))
def test_random_problems(seed):
    from driftlab.kernels import flash

    asked = problem(**{**random_options(seed), "window": 0})
    check(asked, flash.attend(asked))


@pytest.mark.parametrize("block", [None, 1, 7, 32])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"first": 0},
        {"first": 0, "own": 3, "padding": 9},
        {"own": 2, "options": ("bias", "scale", "sink"), "padding": 30},
        {"own": 1, "options": ("hide", "number"), "runs": 20},
        {"own": 15, "window": 200},
    ],
    ids=str,
)
def test_rows_that_follow_each_other(given, block):
    """Common keys, the causal edge, runs that end before, at and after it, padding."""
    from driftlab.kernels import flash, reference

    asked = rising(**given)
    assert flash.refuses(asked) == ""
    close(flash.attend(asked, block), reference.attend(asked))


def test_one_kv_head_at_a_time(monkeypatch):
    from driftlab.kernels import flash, reference

    monkeypatch.setattr(flash, "ANSWER_BYTES", 1)
    asked = rising(own=3, options=("bias", "scale", "sink"))
    close(flash.attend(asked), reference.attend(asked))


def test_the_kernel_is_never_handed_a_last_axis_with_gaps():
    """It would read it wrongly, without a word."""
    from driftlab.kernels import flash, reference

    asked = rising(own=1)
    turned = {name: getattr(asked, name).transpose(-1, -2).contiguous().transpose(-1, -2) for name in LEAVES}
    close(flash.attend(dataclasses.replace(asked, **turned)), reference.attend(asked))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_else_is_asked_for_changes_no_bit(dtype):
    from driftlab.attention import Stats
    from driftlab.kernels import flash

    asked = rising(own=2, dtype=dtype)
    full, bare = flash.attend(asked), flash.attend(dataclasses.replace(asked, stats=Stats()))
    assert [bare.mass, bare.entropy, bare.recent, bare.columns] == [None] * 4
    for name in ("out", "lse", "visible"):
        assert torch.equal(getattr(bare, name), getattr(full, name)), name
    some = flash.attend(
        dataclasses.replace(asked, stats=dataclasses.replace(asked.stats, entropy=False, columns=False))
    )
    for name in BITS:
        assert torch.equal(getattr(some, name), getattr(full, name)), name


def test_a_sequence_is_answered_alike_in_any_batch():
    from driftlab.kernels import flash

    asked = rising(own=2, dtype=torch.float32)
    names = (*LEAVES, "rows", "segments", "valid")
    alone = dataclasses.replace(asked, **{name: getattr(asked, name)[1:] for name in names})
    for name in BITS:
        assert torch.equal(getattr(flash.attend(alone), name), getattr(flash.attend(asked), name)[1:]), name


@pytest.mark.parametrize("factor", [6.0, 30.0, 100.0])
def test_the_entropy_of_large_scores_is_left_to_the_tiles(factor, monkeypatch):
    from driftlab.kernels import flash

    asked = problem(factor=factor, starts=64, context=90, seed=1)
    expected = oracle(asked).entropy
    error = (flash.attend(asked).entropy - expected).abs().max()
    assert error <= (1e-5 if factor < 10 else 5e-5)
    monkeypatch.setattr(flash, "REACH", {torch.float32: torch.inf})
    assert error < (flash.attend(asked).entropy - expected).abs().max()


def test_entropy_keeps_its_digits_up_to_the_reach():
    from driftlab.kernels import flash

    asked = problem(factor=1.2, starts=128, context=700, own=4, d_head=64, d_value=64, late=True)
    assert 10 < flash.attend(asked).lse.abs().max() < flash.REACH[torch.float32]
    assert (flash.attend(asked).entropy - oracle(asked).entropy).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["q", "context_k", "own_k"])
def test_nan_gives_nan_to_those_that_see_it_and_no_others(name):
    from driftlab.kernels import flash, reference

    asked = rising(own=2, dtype=torch.float32)
    poisoned = getattr(asked, name).clone()
    poisoned[0, 1, 40] = torch.nan
    asked = dataclasses.replace(asked, **{name: poisoned})
    ours, theirs = flash.attend(asked), reference.attend(asked)
    for field in ("out", "lse", "mass", "entropy"):
        assert torch.equal(getattr(ours, field).isnan(), getattr(theirs, field).isnan()), field
        assert getattr(ours, field).isnan().any()


def test_starts_that_see_nothing_are_as_the_specification_has_them():
    from driftlab.attention import Controls
    from driftlab.kernels import flash, reference

    asked = rising(own=1)
    bias = torch.full((80, 4), -torch.inf, dtype=torch.float64)
    bias[::2] = 0
    asked = dataclasses.replace(
        asked, controls=Controls(bias=bias), stats=dataclasses.replace(asked.stats, recent=(), columns=False)
    )
    ours, theirs = flash.attend(asked), reference.attend(asked)
    for field in ("out", "lse", "mass", "entropy"):
        torch.testing.assert_close(getattr(ours, field), getattr(theirs, field), rtol=0, atol=1e-12, equal_nan=True)
    assert ours.out[:, :, 1::2].isnan().all()
    assert ours.out[:, :, ::2].isfinite().all()


def test_nothing_as_large_as_a_map_is_made(monkeypatch):
    from driftlab.attention import Stats
    from driftlab.kernels import blocked, flash

    starts = 512
    monkeypatch.setattr(flash, "STARTS", 64)
    monkeypatch.setattr(flash, "ANSWER_BYTES", 2**14)
    monkeypatch.setattr(blocked, "TILE_BYTES", 2**14)
    for stats in (Stats(mass=True, entropy=True, recent=(1, 8)), Stats(columns=True)):
        asked = dataclasses.replace(rising(starts=starts, first=0, own=1, dtype=torch.float32), stats=stats)
        with _Largest() as ours:
            flash.attend(asked)
        assert ours.bytes < 4 * starts * starts / 4


# ---- which problems it is given


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"window": 30}, "a window that hides keys"),
        ({"options": ("drop",)}, "single keys are dropped"),
        ({"starts": 40}, "fewer than 64 starts"),
        ({"runs": 80}, "the segments change more than 31 times"),
    ],
    ids=str,
)
def test_what_it_leaves_to_the_tiles(changed, why):
    from driftlab.kernels import flash

    assert flash.refuses(rising(**changed)).startswith(why)


def test_scattered_rows_and_mixed_types_are_left_to_the_tiles():
    from driftlab import DriftlabError
    from driftlab.kernels import flash

    asked = rising()
    scattered = dataclasses.replace(asked, rows=asked.rows // 2 * 2 - 10)
    assert flash.refuses(scattered) == "the rows of the starts do not follow each other"
    assert flash.refuses(dataclasses.replace(asked, own_k=asked.own_k.float())).endswith("of different types")
    with pytest.raises(DriftlabError, match="a window that hides keys; use kernels.blocked"):
        flash.attend(dataclasses.replace(asked, window=3))


@pytest.fixture
def taken(monkeypatch):
    """How many problems the flash kernel was given."""
    from driftlab.kernels import flash

    seen, original = [], flash.attend
    monkeypatch.setattr(flash, "attend", lambda asked, block=None: seen.append(asked) or original(asked, block))
    return seen


def at_the_seam(asked, **changed):
    from driftlab.attention import attend

    fields = {field.name: getattr(asked, field.name) for field in dataclasses.fields(asked)}
    return attend(**{**fields, **changed}, backend="auto")


def test_the_seam_gives_it_what_it_can_answer(taken):
    from driftlab.kernels import reference

    asked = rising(own=2)
    close(at_the_seam(asked), reference.attend(asked))
    assert len(taken) == 1
    at_the_seam(asked, window=5)
    assert len(taken) == 1


def test_gradients_at_the_seam_are_those_of_the_specification(taken):
    from driftlab.attention import Stats
    from driftlab.kernels import reference

    asked = dataclasses.replace(rising(own=2, options=("bias", "scale")), stats=Stats())
    leaves = {name: getattr(asked, name).clone().requires_grad_() for name in LEAVES}
    ours, theirs = at_the_seam(asked, **leaves), reference.attend(dataclasses.replace(asked, **leaves))
    assert len(taken) == 1
    grads = [
        torch.autograd.grad(answer.out.square().sum() + answer.lse.sum(), list(leaves.values()))
        for answer in (ours, theirs)
    ]
    for name, one, other in zip(LEAVES, *grads, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")
