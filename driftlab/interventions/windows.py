r"""A window over the drafter's keys, with the first keys carried along, positions kept or re-numbered.

The query at place p = row + own sees the keys at places > p - w, and the first c context keys besides. Positions kept: they
are scored where they stand. Re-numbered (StreamingLLM, arXiv 2309.17453): the carried keys stand right before the window,

    p' = p - max(0, p - (w + c - 1)),

is where the query stands for them; rotary scores depend on differences alone, so the query is moved, not the keys. The two
sets of keys are attended to apart, and merged by their log-sum-exps.
"""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from driftlab.attention import Answer, Attended, Problem
from driftlab.drafter import Drafter
from driftlab.drafter.blocks import Attention
from driftlab.errors import DriftlabError
from driftlab.interventions.base import MOVE, WINDOW, OnAttention, steer
from driftlab.interventions.merging import merged
from driftlab.segments import Segment

SCORE_BYTES = 2**26
"""bytes of the carried keys' scores held at a time"""


@dataclass(frozen=True)
class DraftWindow(OnAttention):
    """A window of ``width`` keys, the query's own among them, at every depth unless said.

    ``carried``: how many of the first context keys stay visible besides, or "sink": up to the last sink position.
    ``positions``: "kept" or "renumbered". A layer that has a window of its own keeps the narrower of the two.
    """

    width: int
    carried: int | str = 0
    positions: str = "kept"

    kind: ClassVar[str] = "window"
    forms: ClassVar[tuple[str, ...]] = ("window:WIDTH[:carried=N|sink][:positions=renumbered]",)
    places: ClassVar[tuple[str, ...]] = ("width",)

    def check(self) -> None:
        """See :meth:`Intervention.check`."""
        wrong_count = self.carried != "sink" and (isinstance(self.carried, str) or self.carried < 0)
        if self.width < 1 or wrong_count or self.positions not in ("kept", "renumbered"):
            raise DriftlabError(
                f"draft window {self.width}, carried {self.carried!r}, positions {self.positions!r}: the width is at least 1, "
                'carried a number >= 0 or "sink", positions "kept" or "renumbered"'
            )

    def attach(self, drafter: Drafter, stack: ExitStack) -> None:
        """See :meth:`Intervention.attach`."""
        for _, block in self.blocks(drafter):
            steer(stack, drafter, block, WINDOW, self._narrow)
            if self.positions == "renumbered":
                steer(stack, drafter, block, MOVE, partial(self._moved, block))

    def _narrow(self, answer: Answer, problem: Problem, depth: int) -> Attended:
        carried, before = self._count(problem), problem.window
        longest = problem.own + int(problem.rows.max()) + 1
        if not self.acts_at(depth) or (not before and longest <= self.width + carried):
            return answer(problem)
        width = min(self.width, before) if before else self.width
        return answer(dataclasses.replace(problem, window=width, carried=max(carried, problem.carried)))

    def _count(self, problem: Problem) -> int:
        if isinstance(self.carried, int):
            return self.carried
        sink = (problem.segments == int(Segment.SINK)).any(0).nonzero()
        return int(sink[-1]) + 1 if len(sink) else 0

    def _moved(self, block: Attention, answer: Answer, problem: Problem, depth: int) -> Attended:
        carried, place = problem.carried, problem.rows + problem.own
        if not self.acts_at(depth) or not problem.window or not carried:
            return answer(problem)
        by = (place - (problem.window + carried - 1)).clamp(min=0)
        if not bool(by.any()):
            return answer(problem)
        wide = torch.promote_types(problem.q.dtype, torch.float32)
        turned = block.turned(problem.q.to(wide), -by)
        sinks = dataclasses.replace(problem, q=torch.where((by > 0)[:, None, :, None], turned, problem.q.to(wide)))
        return merged(answer(dataclasses.replace(problem, carried=0)), _attend_first(sinks))


def _attend_first(problem: Problem) -> Attended:
    """Answer over the carried keys outside of the window, some starts at a time."""
    batch, heads, starts, _ = problem.q.shape
    block = max(1, SCORE_BYTES // (8 * batch * heads * problem.carried))
    parts = [_first(problem.at(slice(i, i + block))) for i in range(0, starts, block)]
    if len(parts) == 1:
        return parts[0]
    names = ("out", "lse", "mass", "entropy", "recent")
    joined = {n: None if getattr(parts[0], n) is None else torch.cat([getattr(p, n) for p in parts], 2) for n in names}
    visible, sees_sink = (torch.cat([getattr(part, name) for part in parts], 1) for name in ("visible", "sees_sink"))
    return Attended(**joined, visible=visible, columns=None, sees_sink=sees_sink)


def _first(problem: Problem) -> Attended:
    count, controls, stats = min(problem.carried, problem.context_k.shape[2]), problem.controls, problem.stats
    batch, heads, starts, _ = problem.q.shape
    keys, values = (x[:, :, :count].to(problem.q.dtype) for x in (problem.context_k, problem.context_v))
    groups = (batch, keys.shape[1], heads // keys.shape[1], starts)
    scores = (problem.q.view(*groups, -1) * problem.scale) @ keys[:, :, None].transpose(-1, -2)
    scores = scores.view(batch, heads, starts, count)
    scaling, segments = controls.score_scale, problem.segments[:, :count]
    scores = scores * (scaling[..., None] if isinstance(scaling, Tensor) and scaling.ndim else scaling)
    if controls.bias is not None:
        bias = controls.bias.to(scores.dtype).expand(batch, heads, starts, len(Segment))
        scores = scores + bias.gather(-1, segments[:, None, None].expand(batch, heads, starts, count))
    at, place = torch.arange(count, device=scores.device), problem.rows + problem.own
    hidden = (at > place[..., None] - problem.window) | (at > problem.rows[..., None])
    if controls.drop is not None:
        drop = controls.drop[..., :count]
        hidden = hidden | (drop if drop.ndim == 3 else drop[:, None])
    scores = scores.masked_fill(hidden[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    p = (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    one_hot = torch.nn.functional.one_hot(segments, len(Segment)).to(p.dtype)
    recent = None
    if stats.recent:
        newer = [(at > place[..., None] - width)[:, None] for width in stats.recent]
        recent = torch.stack([p.masked_fill(~mask, 0).sum(-1) for mask in newer], -1)
    return Attended(
        out=(p.view(*groups, count) @ values[:, :, None]).view(batch, heads, starts, -1),
        lse=lse,
        mass=p @ one_hot[:, None] if stats.mass else None,
        entropy=torch.special.entr(p).sum(-1) if stats.entropy else None,
        visible=(~hidden).sum(-1),
        recent=recent,
        columns=None,
        sees_sink=(~hidden & (segments == int(Segment.SINK))[:, None]).any(-1),
    )
