"""Problems for the replay kernel, and what must hold of its answer."""

from __future__ import annotations

import dataclasses
import math
import random

import torch

SINK, PROMPT, CONTEXT, SELF = range(4)
INPUTS = ("q", "context_k", "context_v", "own_k", "own_v")
SMALL_TILE = (16, 16, 4, 2)
"""several tiles and blocks even in a tiny problem"""

OUT = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
STATS = {"lse": 2e-5, "mass": 2e-6, "entropy": 1e-5, "recent": 2e-5}  # recent is exp(score - lse): as exact as those
ON_GPU = 1e-4
"""statistics on a GPU: approximate 2^x, another order of the sums"""

#: what differs from a plain problem: see ``problem``
NAMED = {
    "plain": {},
    "first depth": {"own": 0},
    "fifteen own keys": {"own": 15, "starts": 3},
    "late rows": {"late": True, "context": 70},
    "late rows, first depth": {"late": True, "own": 0, "context": 67},
    "odd group": {"heads": 3, "kv_heads": 1},
    "no group": {"heads": 2, "kv_heads": 2, "starts": 9},
    "one key": {"context": 1, "own": 0},
    "one row": {"batch": 1, "heads": 1, "kv_heads": 1, "starts": 1},
    "window": {"window": 7},
    "window of one, first depth": {"window": 1, "own": 0},
    "window within the own keys": {"window": 2, "own": 4},
    "window and carried": {"window": 9, "carried": 5},
    "window, carried within a run": {"window": 4, "own": 0, "carried": 3, "context": 50},
    "learned sink": {"sink": True},
    "learned sink, first depth": {"sink": True, "own": 0, "late": True},
    "no sink run": {"sinks": ()},
    "no prompt run": {"prompt": 0, "sinks": ()},
    "sink amid the prompt": {"sinks": (4, 9)},
    "bias": {"bias": True},
    "bias hides segments": {"bias": (0.5, -math.inf, -1.0, -math.inf)},
    "bias hides all but the learned sink": {"bias": (-math.inf,) * 4, "sink": True},
    "score scale": {"scaling": True},
    "score scale of all": {"scaling": 0.5},
    "everything": {"bias": True, "scaling": True, "sink": True, "window": 8, "carried": 4, "late": True},
    "head size 80": {"d_head": 80, "d_value": 80},
    "head size 8": {"d_head": 8, "d_value": 8},
    "values smaller than keys": {"d_head": 48, "d_value": 32},
    "strided": {"strided": True},
    "half": {"dtype": torch.float16},
    "bfloat": {"dtype": torch.bfloat16},
    "bfloat, everything": {"dtype": torch.bfloat16, "bias": True, "scaling": True, "sink": True, "window": 8},
    "scores x0.1": {"factor": 0.1},
    "scores x0": {"factor": 0.0},
    "scores x30": {"factor": 30.0},
    "scores x100": {"factor": 100.0, "sink": True, "late": True},
}


def problem(
    *, batch=2, heads=4, kv_heads=2, starts=5, context=37, own=3, d_head=16, d_value=16, dtype=torch.float32, late=False,
    window=0, carried=0, sink=False, sinks=(0,), prompt=20, bias=None, scaling=None, factor=1.0, strided=False, seed=0,
    device="cpu",
):  # fmt: skip
    """A random problem with unsorted rows; the second sequence has a shorter prompt."""
    from driftlab.kernels.problem import Controls, Problem, Stats

    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    rows = torch.randint(max(0, context - 9) if late else 0, context, (batch, starts), generator=generator)
    rows[:, 0] = context - 1
    segments = torch.full((batch, context), CONTEXT)
    for b in range(batch):
        segments[b, : max(0, prompt - 7 * b)] = PROMPT
    for place in sinks:
        segments[:, place : place + 1] = SINK
    tensors = {
        "q": 2 * factor * normal(batch, heads, starts, d_head),
        "context_k": normal(batch, kv_heads, context, d_head),
        "context_v": normal(batch, kv_heads, context, d_value),
        "own_k": normal(batch, kv_heads, starts, own, d_head),
        "own_v": normal(batch, kv_heads, starts, own, d_value),
    }
    tensors = {name: tensor.to(dtype).to(device) for name, tensor in tensors.items()}
    if strided:
        tensors = {name: _strided(tensor) for name, tensor in tensors.items()}
    if bias is True:
        bias = normal(batch, 1, starts, 4)
    elif bias is not None:
        bias = torch.tensor(bias)
    if scaling is True:
        scaling = torch.rand(batch, heads, starts, generator=generator) + 0.5
    controls = Controls(
        bias=None if bias is None else bias.to(device),
        score_scale=scaling.to(device) if isinstance(scaling, torch.Tensor) else 1.0 if scaling is None else scaling,
    )
    return Problem(
        **tensors,
        **{"rows": rows.to(device), "segments": segments.to(device), "scale": d_head**-0.5, "window": window},
        **{"carried": carried, "controls": controls, "sink_logit": normal(heads).to(device) if sink else None},
        stats=Stats(mass=True, entropy=True, recent=(1, 2, 9)),
    )


def _strided(tensor):
    """The same values with axes 1 and 2 laid out the other way round, within a larger buffer."""
    last = tensor.shape[-1]
    wide = torch.zeros(*tensor.transpose(1, 2).shape[:-1], last + 8, dtype=tensor.dtype, device=tensor.device)
    wide[..., :last] = tensor.transpose(1, 2)
    return wide[..., :last].transpose(1, 2)


def random_options(seed):
    """Options of a random problem."""
    pick = random.Random(seed)
    context, own, kv_heads = pick.randint(1, 60), pick.randint(0, 6), pick.choice([1, 2])
    return {
        **{"batch": pick.choice([1, 2]), "kv_heads": kv_heads, "heads": kv_heads * pick.choice([1, 2, 4])},
        **{"starts": pick.randint(1, 9), "context": context, "own": own, "late": pick.random() < 0.5},
        **{"d_head": pick.choice([16, 24, 40]), "d_value": pick.choice([16, 32]), "prompt": pick.randint(0, context)},
        **{"sinks": pick.choice([(), (0,), (0, 3)]), "window": pick.choice([0, 0, 1, 7, 30])},
        **{"carried": pick.choice([0, 0, 2, 11]), "sink": pick.random() < 0.4, "bias": pick.choice([None, None, True])},
        **{"scaling": pick.choice([None, None, True]), "factor": pick.choice([0.1, 1.0, 4.0]), "seed": seed},
    }


def oracle(asked):
    """The specification in float64, from the same rounded inputs."""
    from driftlab.kernels import reference
    from driftlab.kernels.problem import Controls

    controls = asked.controls
    scaling = controls.score_scale.double() if isinstance(controls.score_scale, torch.Tensor) else controls.score_scale
    bias = None if controls.bias is None else controls.bias.double()
    sink = None if asked.sink_logit is None else asked.sink_logit.double()
    wide = {name: getattr(asked, name).double() for name in INPUTS}
    return reference.attend(
        dataclasses.replace(asked, **wide, sink_logit=sink, controls=Controls(bias=bias, score_scale=scaling))
    )


def check(asked, answer):
    """Compare with the oracle, and see that what must hold of any answer holds."""
    expected, dtype = oracle(asked), asked.q.dtype
    wider = 10 if float(asked.q.abs().amax()) > 30 else 1
    error = (answer.out.double() - expected.out).abs().max()
    assert error <= wider * OUT[dtype], f"out: off by {error:.2e}"
    assert answer.out.dtype == dtype
    if dtype == torch.bfloat16:
        ratio = (answer.out.double() - expected.out).norm() / expected.out.norm()
        assert ratio < 5e-3, f"out: RMS ratio {ratio:.2e}"
    for name, allowed in STATS.items():
        if asked.q.is_cuda:
            allowed = ON_GPU
        error = (getattr(answer, name) - getattr(expected, name)).abs().max()
        assert error <= wider * allowed, f"{name}: off by {error:.2e}"
    assert torch.equal(answer.visible, expected.visible), "visible"
    assert (answer.mass >= 0).all()
    total = answer.mass.sum(-1)
    if asked.sink_logit is not None:
        total = total + (asked.sink_logit[:, None] - answer.lse).exp()
    assert (total - 1).abs().max() <= 1e-5 * wider, "masses do not sum to 1"
    most = answer.visible[:, None].float().log() + (1 / math.e if asked.sink_logit is not None else 0)
    assert (answer.entropy >= -1e-6).all(), "negative entropy"
    assert (answer.entropy <= most + 1e-5 * wider).all(), "more entropy than keys"
