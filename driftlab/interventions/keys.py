r"""Interventions on keys and scores: sink ablation, own-key ablation, log-n temperature.

sink    drop: the sink's keys are hidden.  value: they stay in the denominator, their values are 0
own     older: of the chain's own keys only the newest stays.  all: none does
logn    scores times max(1, ln n / ln n_trained), n the number of keys seen (Su 2021; Chiang and Cholak 2022)
"""

from __future__ import annotations

import dataclasses
import math
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from driftlab.attention import Answer, Attended, Problem
from driftlab.drafter import Drafter
from driftlab.errors import DriftlabError
from driftlab.interventions.base import ABLATION, OWN, SCALING, OnAttention, steer
from driftlab.interventions.merging import merged, one_key
from driftlab.kernels.problem import visible_keys
from driftlab.segments import Segment


@dataclass(frozen=True)
class SinkAblation(OnAttention):
    """The sink's keys dropped, or (``what="value"``) kept with their values zeroed, at every depth unless said.

    At depth 1 a row that is a sink itself keeps its own key: without it the first row would see nothing.
    """

    what: str = "drop"

    kind: ClassVar[str] = "sink"
    forms: ClassVar[tuple[str, ...]] = ("sink:drop", "sink:value")
    places: ClassVar[tuple[str, ...]] = ("what",)

    def check(self) -> None:
        """See :meth:`Intervention.check`."""
        if self.what not in ("drop", "value"):
            raise DriftlabError(
                f'sink ablation {self.what!r}: it is "drop" (the key hidden) or "value" (the value zeroed)'
            )

    def attach(self, drafter: Drafter, stack: ExitStack) -> None:
        """See :meth:`Intervention.attach`."""
        for _, block in self.blocks(drafter):
            steer(stack, drafter, block, ABLATION, self._steer)

    def _steer(self, answer: Answer, problem: Problem, depth: int) -> Attended:
        sink = problem.segments == int(Segment.SINK)
        if not self.acts_at(depth) or not bool(sink.any()):
            return answer(problem)
        if self.what == "value":
            values = problem.context_v.masked_fill(sink[:, None, :, None], 0)
            return answer(dataclasses.replace(problem, context_v=values))
        if depth == 1 and bool((sink.gather(1, problem.rows)).any()):
            place = torch.arange(sink.shape[1], device=sink.device)
            sink = sink[:, None] & (place != problem.rows[..., None])
        drop = problem.controls.drop
        if drop is not None and drop.ndim != sink.ndim:
            drop, sink = (x if x.ndim == 3 else x[:, None] for x in (drop, sink))
        drop = sink if drop is None else drop | sink
        return answer(dataclasses.replace(problem, controls=dataclasses.replace(problem.controls, drop=drop)))


@dataclass(frozen=True)
class OwnKeyAblation(OnAttention):
    """The chain's own keys dropped: the "older" ones, or "all".

    The newest own key is the query's own position, which any causal attention sees; "older" keeps it, so that what is taken
    away is what the chain wrote before. With "all" a query sees the context alone. At depth 1 there is no own key.
    """

    which: str = "older"
    depths: str | int = dataclasses.field(default="2-", kw_only=True)

    kind: ClassVar[str] = "own"
    forms: ClassVar[tuple[str, ...]] = ("own:older", "own:all")
    places: ClassVar[tuple[str, ...]] = ("which",)

    def check(self) -> None:
        """See :meth:`Intervention.check`."""
        if self.which not in ("older", "all"):
            raise DriftlabError(f'own-key ablation {self.which!r}: it is "older" (all but the newest) or "all"')

    def attach(self, drafter: Drafter, stack: ExitStack) -> None:
        """See :meth:`Intervention.attach`."""
        for _, block in self.blocks(drafter):
            steer(stack, drafter, block, OWN, self._steer)

    def _steer(self, answer: Answer, problem: Problem, depth: int) -> Attended:
        own = problem.own
        if not self.acts_at(depth) or own < (2 if self.which == "older" else 1):
            return answer(problem)
        # hidden by a bias: places are counted with the own keys, so they cannot be left out
        bias = torch.zeros(
            len(Segment), dtype=torch.promote_types(problem.q.dtype, torch.float32), device=problem.q.device
        )
        bias[int(Segment.SELF)] = -torch.inf
        old = problem.controls.bias
        hidden = dataclasses.replace(problem.controls, bias=bias if old is None else bias + old)
        context = answer(dataclasses.replace(problem, controls=hidden))
        seen = min(own, problem.window) if problem.window else own
        context = dataclasses.replace(context, visible=context.visible - seen, columns=None)
        if bool((context.visible < 1).any()):
            if self.which == "all":
                raise DriftlabError(
                    f"{self.key}: with a window of {problem.window} a query at depth {depth} sees own keys alone, so without "
                    "them nothing; keep the newest (own:older)"
                )
            none = (context.visible < 1)[:, None]
            context = dataclasses.replace(context, lse=context.lse.masked_fill(none, -torch.inf))
        if self.which == "all":
            return context
        newest = one_key(problem, problem.own_k[:, :, :, -1], problem.own_v[:, :, :, -1], Segment.SELF)
        return merged(context, newest)


@dataclass(frozen=True)
class LogNTemperature(OnAttention):
    """Scores times ln n / ln n_trained for the queries that see more keys than ``trained``, n_trained >= 2.

    n counts the keys in the window, dropped ones too.
    """

    trained: int

    kind: ClassVar[str] = "logn"
    forms: ClassVar[tuple[str, ...]] = ("logn:LENGTH",)
    places: ClassVar[tuple[str, ...]] = ("trained",)

    def check(self) -> None:
        """See :meth:`Intervention.check`."""
        if self.trained < 2:
            raise DriftlabError(
                f"log-n temperature: trained on {self.trained} keys; it must be 2 at least, for ln 1 is 0"
            )

    def attach(self, drafter: Drafter, stack: ExitStack) -> None:
        """See :meth:`Intervention.attach`."""
        for _, block in self.blocks(drafter):
            steer(stack, drafter, block, SCALING, self._steer)

    def _steer(self, answer: Answer, problem: Problem, depth: int) -> Attended:
        seen = visible_keys(problem)
        if not self.acts_at(depth) or not bool((seen > self.trained).any()):
            return answer(problem)
        wide = torch.promote_types(problem.q.dtype, torch.float32)
        factor = (seen.double().log() / math.log(self.trained)).clamp(min=1)[:, None].to(wide)
        scale: Tensor | float = problem.controls.score_scale
        controls = dataclasses.replace(problem.controls, score_scale=factor * scale)
        return answer(dataclasses.replace(problem, controls=controls))
