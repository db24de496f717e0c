r"""Attention over two disjoint sets of keys is a mixture of the attentions over each.

With log-sum-exps l_a and l_b, l = ln(e^{l_a} + e^{l_b}) and w_a = e^{l_a - l}, w_b = e^{l_b - l}:

    out = w_a out_a + w_b out_b,   mass likewise,   entropy = sum_i w_i (entropy_i - ln w_i)
"""

from __future__ import annotations

import torch
from torch import Tensor

from driftlab.attention import Attended, Problem
from driftlab.segments import Segment


def merged(a: Attended, b: Attended) -> Attended:
    """Return the answer over the keys of both. What is summed over starts (columns) cannot be mixed, and is left out.

    A side without a key has lse -inf and no weight, whatever its other values are.
    """
    lse = torch.logaddexp(a.lse, b.lse)
    weights = [(side.lse - lse).exp() for side in (a, b)]

    def mixed(name: str, more: int) -> Tensor | None:
        values = [getattr(side, name) for side in (a, b)]
        if values[0] is None or values[1] is None:
            return None
        parts = []
        for value, weight in zip(values, weights, strict=True):
            weight = weight.view(*weight.shape, *(1,) * more)
            parts.append(torch.where(weight > 0, weight * value.to(weight.dtype), 0.0))
        return (parts[0] + parts[1]).to(values[0].dtype)

    entropy = mixed("entropy", 0)
    if entropy is not None:
        entropy = entropy + torch.special.entr(weights[0]) + torch.special.entr(weights[1])
    return Attended(
        out=mixed("out", 1),
        lse=lse,
        mass=mixed("mass", 1),
        entropy=entropy,
        visible=a.visible + b.visible,
        recent=mixed("recent", 1),
        columns=None,
        sees_sink=_either(a.sees_sink, b.sees_sink),
    )


def _either(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if b is None else b if a is None else a | b


def scores_of(problem: Problem, keys: Tensor, segments: Tensor) -> Tensor:
    """Return the scores of one key a start and head: ``keys [batch head start d_head]``, ``segments [batch head start]``."""
    wide = torch.promote_types(problem.q.dtype, torch.float32)
    score = (problem.q.to(wide) * keys.to(wide)).sum(-1) * problem.scale * problem.controls.score_scale
    bias = problem.controls.bias
    if bias is None:
        return score
    bias = bias.to(wide).expand(*score.shape, len(Segment))
    return score + bias.gather(-1, segments.expand(score.shape)[..., None])[..., 0]


def by_head(x: Tensor, problem: Problem) -> Tensor:
    """Repeat kv heads, axis 1, for the query heads of their groups."""
    return x.repeat_interleave(problem.q.shape[1] // x.shape[1], 1)


def one_key(problem: Problem, key: Tensor, value: Tensor, segment: Segment) -> Attended:
    """Return the answer over one key a start, the newest: ``key``, ``value [batch kv_head start d]``."""
    score = scores_of(problem, by_head(key, problem), torch.full_like(problem.rows, int(segment))[:, None])
    mass = torch.zeros(*score.shape, len(Segment), dtype=score.dtype, device=score.device)
    mass[..., int(segment)] = 1
    stats = problem.stats
    return Attended(
        out=by_head(value, problem),
        lse=score,
        mass=mass if stats.mass else None,
        entropy=torch.zeros_like(score) if stats.entropy else None,
        visible=torch.ones_like(problem.rows),
        recent=score.new_ones(*score.shape, len(stats.recent)) if stats.recent else None,
        columns=None,
    )
