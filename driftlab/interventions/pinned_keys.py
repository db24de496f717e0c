r"""One key a head and start: which one has a given mass, and what becomes of an answer when its mass is moved.

The mass p_c of a single key c is moved to m_1 without another pass over the keys: with r = (1 - m_1) / (1 - p_c),

    out' = r out + (m_1 - r p_c) v_c,   mass likewise,   lse' = lse - ln r,
    entropy' = h(m_1) + r (entropy - h(p_c)) - (1 - m_1) ln r,   h(x) = -x ln x.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from driftlab.attention import Attended, Problem
from driftlab.interventions.merging import by_head, scores_of
from driftlab.segments import Segment

SCORE_BYTES = 2**26
"""bytes of scores held at a time while a key of equal mass is looked for"""


class Key:
    """One context key a head and start, and what becomes of an answer when its mass is moved."""

    def __init__(self, problem: Problem, free: Attended, key: Tensor) -> None:
        self.problem, self.free = problem, free
        index = key.nan_to_num(0).long().clamp(min=0)
        self.place, self.segment = index, problem.segments[:, None].expand(-1, index.shape[1], -1).gather(2, index)
        keys, self.value = (_at(by_head(x, problem), index) for x in (problem.context_k, problem.context_v))
        self.mass = (scores_of(problem, keys, self.segment) - free.lse).exp().clamp(max=1)
        self.seen = (key >= 0) & (index <= problem.rows[:, None])
        if problem.window:
            near = index > (problem.rows + problem.own - problem.window)[:, None]
            self.seen &= near | (index < problem.carried)
        if (drop := problem.controls.drop) is not None:
            drop = drop if drop.ndim == 3 else drop[:, None].expand(-1, index.shape[2], -1)
            self.seen &= ~drop[:, None].expand(-1, index.shape[1], -1, -1).gather(3, index[..., None])[..., 0]
        self.mass = self.mass.masked_fill(~self.seen, 0)

    def at(self, target: Tensor) -> Attended:
        """Return the answer with the key's mass at ``target [batch head start]``."""
        free, wide = self.free, self.free.lse.dtype
        ratio = torch.where(target == self.mass, 1.0, (1 - target) / (1 - self.mass))
        more = torch.where(target == self.mass, 0.0, target - ratio * self.mass)
        out = ratio[..., None] * free.out.to(wide) + more[..., None] * self.value.to(wide)
        mass = ratio[..., None] * free.mass
        mass = mass.scatter_add(3, self.segment[..., None], more[..., None].to(mass.dtype))
        entropy = recent = None
        if free.entropy is not None:
            others = ratio * (free.entropy - torch.special.entr(self.mass))
            entropy = torch.special.entr(target) + others - torch.where(ratio > 0, (1 - target) * ratio.log(), 0.0)
        if free.recent is not None:
            place = (self.problem.rows + self.problem.own)[:, None]
            among = torch.stack([self.place > place - width for width in self.problem.stats.recent], -1)
            recent = ratio[..., None] * free.recent + among * more[..., None]
        return dataclasses.replace(
            free,
            out=out.to(free.out.dtype),
            lse=free.lse - ratio.log(),
            mass=mass,
            entropy=entropy,
            recent=recent,
            columns=None,
        )


def closest(problem: Problem, lse: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Return the place of the key whose mass is closest to ``wanted [batch head start]``, as a number, and its mass.

    Keys that are no sink, among those seen in the window; -1 and mass 0 where there is none. Scores exist for some starts at a
    time.
    """
    batch, heads, starts, _ = problem.q.shape
    context, wide = problem.context_k.shape[2], lse.dtype
    kv_heads = problem.context_k.shape[1]
    block = max(1, SCORE_BYTES // (8 * batch * heads * max(context, 1)))
    keys = problem.context_k.to(wide)[:, :, None].transpose(-1, -2)
    place = torch.arange(context, device=lse.device)
    found, masses = [], []
    for first in range(0, starts, block):
        part = problem.at(slice(first, first + block))
        q = part.q.to(wide).view(batch, kv_heads, heads // kv_heads, -1, part.q.shape[-1])
        scores = ((q * part.scale) @ keys).view(batch, heads, -1, context)
        scaling, bias, drop = part.controls.score_scale, part.controls.bias, part.controls.drop
        scores = scores * (scaling[..., None] if isinstance(scaling, Tensor) and scaling.ndim else scaling)
        if bias is not None:
            bias = bias.to(wide).expand(*scores.shape[:3], len(Segment))
            scores = scores + bias.gather(-1, part.segments[:, None, None].expand(scores.shape))
        hidden = (place > part.rows[..., None]) | (part.segments == int(Segment.SINK))[:, None]
        if part.window:
            hidden = hidden | ((place <= (part.rows + part.own - part.window)[..., None]) & (place >= part.carried))
        if drop is not None:
            hidden = hidden | (drop if drop.ndim == 3 else drop[:, None])
        p = (scores - lse[:, :, first : first + block, None]).exp()
        away = (p - wanted[:, :, first : first + block, None]).abs().masked_fill(hidden[:, None], torch.inf)
        best = away.min(-1, keepdim=True)
        mass = p.gather(-1, best.indices)[..., 0]
        none = best.values[..., 0] == torch.inf
        found.append(best.indices[..., 0].masked_fill(none, -1).to(torch.float64))
        masses.append(mass.masked_fill(none, 0))
    return torch.cat(found, 2), torch.cat(masses, 2)


def _at(x: Tensor, index: Tensor) -> Tensor:
    """Pick keys [batch head ctx d] by place [batch head start]."""
    return x.gather(2, index[..., None].expand(-1, -1, -1, x.shape[-1]))
