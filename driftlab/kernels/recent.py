"""Mass on the last w keys, from the log-sum-exp and those keys alone: sum over the w newest of exp(s_j - lse)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from driftlab.kernels.problem import Problem
from driftlab.segments import Segment

STARTS = 768
"""Starts at a time on a CPU: one key each is held."""


def recent_mass(problem: Problem, lse: Tensor, windows: Sequence[int]) -> Tensor:
    """Return [batch head start window]: the chain's own keys are the newest, then context rows t, t - 1, ...

    ``lse [batch head start]`` is that of the whole attention; what ``problem`` hides has no mass. Keys are taken one place at a
    time, so no more than one key a start is held.
    """
    starts = lse.shape[2]
    found = lse.new_empty(*lse.shape, len(windows))
    block = STARTS if lse.device.type == "cpu" else max(starts, 1)
    for span in (slice(first, first + block) for first in range(0, starts, block)):
        found[:, :, span] = _of_span(problem.at(span), lse[:, :, span], windows)
    return found


def _of_span(problem: Problem, lse: Tensor, windows: Sequence[int]) -> Tensor:
    batch, heads, starts, _ = problem.q.shape
    kv_heads, own, rows = problem.context_k.shape[1], problem.own, problem.rows
    wide = lse.dtype
    q = problem.q.to(wide).view(batch, kv_heads, -1, starts, problem.q.shape[-1])
    total, sums = torch.zeros_like(lse), []
    for place in range(max(windows)):
        row = rows - (place - own)
        if place < own:
            key = problem.own_k[:, :, :, own - 1 - place]
            segment = torch.full_like(rows, int(Segment.SELF))
            seen = torch.ones_like(rows, dtype=torch.bool)
        else:
            seen, row = row >= 0, row.clamp(min=0)
            index = row[:, None, :, None].expand(-1, kv_heads, -1, problem.context_k.shape[-1])
            key, segment = problem.context_k.gather(2, index), problem.segments.gather(1, row)
        if problem.window and place >= problem.window:
            seen = seen & (row < problem.carried) if place >= own else torch.zeros_like(seen)
        score = (q * key[:, :, None].to(wide)).sum(-1).view(batch, heads, starts) * problem.scale
        p = (_controlled(problem, score, segment) - lse).exp().masked_fill(~_kept(problem, row, seen, place), 0)
        total = total + p
        sums.append(total)
    return torch.stack([sums[w - 1] for w in windows], -1)


def _controlled(problem: Problem, score: Tensor, segment: Tensor) -> Tensor:
    controls = problem.controls
    score = score * controls.score_scale
    if controls.bias is None:
        return score
    bias = controls.bias.to(score.dtype)
    bias = bias.view((1,) * (4 - bias.ndim) + bias.shape).expand(*score.shape, -1)
    return score + bias.gather(-1, segment[:, None, :, None].expand(*score.shape, 1))[..., 0]


def _kept(problem: Problem, row: Tensor, seen: Tensor, place: int) -> Tensor:
    """[batch 1 start]: whether the key at this place is seen; a context key may be dropped."""
    drop = problem.controls.drop
    if drop is not None and place >= problem.own:
        drop = drop if drop.ndim == 3 else drop[:, None].expand(-1, row.shape[1], -1)
        seen = seen & ~drop.gather(2, row[..., None])[..., 0]
    return seen[:, None]
