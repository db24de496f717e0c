r"""The one place where the drafter's attention happens: context keys, own chain keys, and where the mass goes.

For a query q of a start at row t, over the context keys c <= t and the keys that its own chain has appended,

    s_j = scale * (q . k_j) * score_scale + bias[segment(j)],   p = softmax(s),   out = sum_j p_j v_j,
    mass[seg] = sum_{j in seg} p_j,   entropy = -sum_j p_j ln p_j  (nats),   lse = ln sum_j exp s_j.

No T x T map outlives a block of starts, in the backward pass neither: it makes the probabilities again from lse. Scores
and masses are float32 (float64 if the inputs are). A learned sink logit (gpt-oss) joins the denominator and belongs to no
segment: the masses then sum to 1 minus its share.

Four executors answer the same :class:`~driftlab.kernels.problem.Problem`: ``kernels.reference``, the dense specification;
``kernels.blocked``, plain torch for any device; ``kernels.flash``, torch's flash kernel on a CPU, as far as it goes;
``kernels.replay``, one fused Triton kernel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from driftlab.kernels import blocked, flash, reference
from driftlab.kernels.backend import cannot_compute, say_torch, wants_triton
from driftlab.kernels.problem import Attended, Controls, Problem, Stats, sees_sink

__all__ = ["Answer", "Attended", "Controls", "Problem", "Stats", "attend"]

Answer = Callable[[Problem], Attended]
"""what answers a problem"""

BLOCK_BYTES = 64 * 2**20
"""Bytes of scores held at a time where statistics carry gradients: blocks of starts are made as large as this allows."""


def attend(
    q: Float[Tensor, "batch head start d_head"],
    context_k: Float[Tensor, "batch kv_head ctx d_head"],
    context_v: Float[Tensor, "batch kv_head ctx d_value"],
    own_k: Float[Tensor, "batch kv_head start own d_head"],
    own_v: Float[Tensor, "batch kv_head start own d_value"],
    *,
    rows: Int[Tensor, "batch start"],
    segments: Int[Tensor, "batch ctx"],
    scale: float,
    window: int = 0,
    carried: int = 0,
    valid: Bool[Tensor, "batch start"] | None = None,
    controls: Controls | None = None,
    sink_logit: Float[Tensor, " head"] | None = None,
    stats: Stats | None = None,
    block: int | None = None,
    backend: str = "torch",
    steering: Sequence[Callable[[Answer, Problem], Attended]] = (),
) -> Attended:
    """Attend from each start to context keys c <= row and to its own chain keys.

    ``own`` counts the chain's own keys (0 at depth 1), oldest first; query head h reads kv head h // group, as
    Hugging Face's repeat_kv does. ``window``: only the last so many keys are seen, the query's own among them
    (sliding-window layers), and the first ``carried`` context keys besides; 0: all. ``valid`` matters for
    ``stats.columns`` alone. ``block`` is the number of starts at a time, by default as many as fit. Differentiable in q, k
    and v. ``backend``: "torch"; "triton", as far as the kernel can honour the problem (where not, a BackendWarning says
    why); "auto": triton on CUDA. ``steering``: interventions, each handed what answers problems and the problem; the last is
    asked first, and each may change the problem, the answer, or ask more than once.

    Raises:
        DriftlabError: every key of a valid start is dropped; a backend that is not there.
    """
    problem = Problem(
        **{"q": q, "context_k": context_k, "context_v": context_v, "own_k": own_k, "own_v": own_v},
        **{"rows": rows, "segments": segments, "scale": scale, "window": window, "carried": carried, "valid": valid},
        **{"controls": controls or Controls(), "sink_logit": sink_logit, "stats": stats or Stats()},
    )
    answer: Answer = partial(_answer, block=block, backend=backend)
    for steer in steering:
        answer = partial(steer, answer)
    return answer(problem)


def _answer(problem: Problem, *, block: int | None, backend: str) -> Attended:
    q = problem.q
    tensors = (q, problem.context_k, problem.context_v, problem.own_k, problem.own_v)
    wants_grad = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (*tensors, *_others(problem))
    )
    run = blocked.attend if q.device.type != "cpu" or flash.refuses(problem) else flash.attend
    executor: Any = partial(run, block=block), blocked.backward
    through_others = wants_grad and (_has_stats(problem) or any(t.requires_grad for t in _others(problem)))
    if wants_triton(backend, q.device):
        from driftlab.kernels import replay

        why = cannot_compute(q.dtype) or replay.refuses(problem)
        why = "gradients through statistics or controls" if through_others else why
        if why:
            say_torch("attention", why)
        else:
            executor = replay.attend, replay.backward
    # autocast would round the scores, and only those of context keys: own keys are not a matrix product
    with torch.autocast(q.device.type, enabled=False):
        if through_others:
            return _with_sink(_through_autograd(problem, block), problem)
        if not wants_grad:
            return _with_sink(executor[0](problem), problem)
        out, lse, visible = _Recomputed.apply(*executor, problem, *tensors)
        return Attended(out, lse, None, None, visible, None, None)


def _with_sink(answer: Attended, problem: Problem) -> Attended:
    return dataclasses.replace(answer, sees_sink=sees_sink(problem)) if problem.stats.mass else answer


def _others(problem: Problem) -> list[Tensor]:
    controls = problem.controls
    return [t for t in (controls.bias, controls.score_scale, problem.sink_logit) if isinstance(t, Tensor)]


def _has_stats(problem: Problem) -> bool:
    return problem.stats != Stats()


_TENSORS = ("q", "context_k", "context_v", "own_k", "own_v")
"""what gradients flow through, in the order in which they are handed on"""


class _Recomputed(torch.autograd.Function):
    """Output and lse with a backward pass that makes the probabilities again from lse."""

    @staticmethod
    def forward(ctx: Any, run: Callable, backward: Callable, problem: Problem, *tensors: Tensor) -> Any:
        answer = run(problem)
        # tensors are kept by save_for_backward alone, which lets them go after the backward pass
        none = problem.q.new_empty(0)
        ctx.problem, ctx.run_backward = dataclasses.replace(problem, **dict.fromkeys(_TENSORS, none)), backward
        ctx.save_for_backward(answer.out, answer.lse, *tensors)
        ctx.mark_non_differentiable(answer.visible)
        return answer.out, answer.lse, answer.visible

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor, _: Any) -> Any:
        out, lse, *tensors = ctx.saved_tensors
        problem = dataclasses.replace(ctx.problem, **dict(zip(_TENSORS, tensors, strict=True)))
        return None, None, None, *ctx.run_backward(problem, out, lse, d_out, d_lse)


def _through_autograd(problem: Problem, block: int | None) -> Attended:
    """The specification, a block of starts at a time; each block's map is made again in the backward pass."""
    batch, heads, starts, _ = problem.q.shape
    keys = problem.context_k.shape[2] + problem.own
    if block is None:
        block = max(1, BLOCK_BYTES // (4 * batch * heads * max(keys, 1)))
    spans = [slice(first, first + block) for first in range(0, max(starts, 1), block)]
    run: Callable[..., Attended] = reference.attend
    if len(spans) > 1:
        run = partial(checkpoint, reference.attend, use_reentrant=False, preserve_rng_state=False)
    return blocked.joined([run(problem.at(span)) for span in spans])
