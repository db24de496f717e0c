r"""Attention pin: the sink's mass held at its depth-1 value, per head and start, and its controls.

With m_1 the sink's mass at depth 1 and m_k what it would have at depth k without the pin, each after every other intervention,

    b = logit(m_1) - logit(m_k) on the scores of the sink's keys  =>  m_k e^b / (m_k e^b + 1 - m_k) = m_1,

and all other keys keep their proportions. A single key is moved in closed form (:mod:`driftlab.interventions.pinned_keys`).
We found no published attention pin; the definitions are ours.
"""

from __future__ import annotations

import dataclasses
import math
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from einops import rearrange
from torch import Tensor

from driftlab.attention import Answer, Attended, Problem
from driftlab.drafter import Drafter
from driftlab.errors import DriftlabError
from driftlab.hooks import HookPoint
from driftlab.interventions.base import PIN, ByRow, OnAttention, Ranked, Running, listen, rms, steer
from driftlab.interventions.pinned_keys import Key, closest
from driftlab.interventions.states import rescaled
from driftlab.segments import Segment

TINY, PUSH, FARTHEST = 1e-30, 80.0, 16384.0
"""a mass below which float32 holds few digits of it, and how far scores are moved to see them, at first and at most"""
SHOWN = 16
"""heads named in a line"""
FAR_FROM_EQUAL = 0.1
"""mean distance of two depth-1 masses beyond which they are not called equal"""
ROUGH = 1e-4
"""of a held mass: a larger error is corrected once"""
MOST = 0.999
"""mass of a single key, moved in closed form, at most: what is left beside it is scaled up, and its rounding with it"""


@dataclass
class PinReport:
    """What a pin did, counted over valid starts x heads x depths, by (layer, head).

    ``total``: how many there were; ``small``: left alone, for the depth-1 mass is below ``least``; ``lost``: left alone, for no
    mass is left that a score could raise, or there is no such key. ``worst``: largest difference between the mass that came out
    and the one wanted; ``gap``: sum over the pinned of |m_1 of the key - m_1 of the sink|, 0 for the sink itself.
    """

    least: float
    of: str = "sink"
    total: dict[tuple[int, int], int] = field(default_factory=dict)
    small: dict[tuple[int, int], int] = field(default_factory=dict)
    lost: dict[tuple[int, int], int] = field(default_factory=dict)
    gap: dict[tuple[int, int], float] = field(default_factory=dict)
    worst: float = 0.0

    @property
    def share(self) -> float:
        """Share of starts x heads x depths that were pinned; NaN when nothing ran."""
        total = sum(self.total.values())
        return 1 - (sum(self.small.values()) + sum(self.lost.values())) / total if total else float("nan")

    @property
    def mean_gap(self) -> float:
        """Mean over the pinned of the distance between the key's depth-1 mass and the sink's; NaN when none was."""
        pinned = sum(self.total.values()) - sum(self.small.values()) - sum(self.lost.values())
        return sum(self.gap.values()) / pinned if pinned else float("nan")

    @property
    def excluded(self) -> tuple[tuple[int, int], ...]:
        """The (layer, head) that were never pinned: about them the experiment says nothing."""
        return tuple(key for key, n in self.total.items() if self.small[key] + self.lost[key] == n)

    def __str__(self) -> str:
        """One line for a report."""
        many = len({layer for layer, _ in self.total}) > 1
        names = [f"{layer}.{head}" if many else str(head) for layer, head in self.excluded]
        said = [f"pinned {self.share:.1%} of starts x heads x depths"]
        if names:
            shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
            said.append(
                f"{len(names)} of {len(self.total)} heads never: {shown} (depth-1 mass below {self.least:g}, or nothing to "
                "raise); about those it says nothing"
            )
        said.append(f"mass off by {self.worst:.1e} at most")
        if self.of != "sink":
            gap = f"the key's depth-1 mass is {self.mean_gap:.2g} from the sink's on average"
            said.append(gap + (": not an equal mass, so it controls little" if self.mean_gap > FAR_FROM_EQUAL else ""))
        return "; ".join(said)


@dataclass(frozen=True)
class AttentionPin(OnAttention):
    """Mass held at its depth-1 value, per head and start. Yields a :class:`PinReport`.

    Args:
        of: "sink"; or, as a control, "equal": of the keys of the context that are no sink, for each head and start, the one
            whose depth-1 mass is closest to the sink's (of equals the first) is held at its own depth-1 mass. The report's gap
            says how equal they were.
        state: "free"; or, as a control, "rescaled": the pin changes the state as well, so the residual stream that leaves a
            pinned layer (after the last: the feedback) is rescaled to the RMS that it has when the pin is taken off this layer
            at this depth, all before being as it is.
        least: of the sink's depth-1 mass; heads and starts below it are left alone.
    """

    of: str = "sink"
    state: str = "free"
    least: float | int = 0.05
    depths: str | int = field(default="2-", kw_only=True)

    kind: ClassVar[str] = "pin"
    forms: ClassVar[tuple[str, ...]] = ("pin:sink[:state=rescaled][:least=MASS]", "pin:equal[:least=MASS]")
    places: ClassVar[tuple[str, ...]] = ("of",)

    def check(self) -> None:
        """See :meth:`Intervention.check`."""
        if self.of not in ("sink", "equal"):
            raise DriftlabError(f'attention pin of {self.of!r}: it is of "sink" or "equal" (the control)')
        if self.state not in ("free", "rescaled"):
            raise DriftlabError(f'attention pin, state={self.state}: it is "free" or "rescaled"')
        if not 0 < self.least < 1:
            raise DriftlabError(f"attention pin, least={self.least}: a depth-1 mass between 0 and 1")
        if self.acts_at(1):
            raise DriftlabError(f"{self.key}: depth 1 is what the mass is held at; say depths from 2 on, as in @2-")

    def attach(self, drafter: Drafter, stack: ExitStack) -> PinReport:
        """See :meth:`Intervention.attach`."""
        report = PinReport(float(self.least), self.of)
        self._refuse_another(drafter)
        for index, block in self.blocks(drafter):
            pinned = _Pinned(self, index, report)
            Running(drafter, stack, pinned.clear)
            steer(stack, drafter, block, PIN, pinned)
            if self.state == "rescaled":
                _Rescaled(self, drafter, index, pinned).attach(stack)
        return report

    def _refuse_another(self, drafter: Drafter) -> None:
        """Each would hold its mass against the other's bias, in turn: neither comes out."""
        for index, block in self.blocks(drafter):
            for other in block.steering:
                pin = other.steer.pin if isinstance(other, Ranked) and isinstance(other.steer, _Pinned) else None
                if pin is not None and any(pin.acts_at(k) and self.acts_at(k) for k in range(2, 65)):
                    raise DriftlabError(
                        f"{self.key} with {pin.key}: two pins on layer {index} at one depth do not both come out; take them "
                        "one at a time, or at other depths or layers"
                    )


class _Pinned:
    """The pin of one layer."""

    def __init__(self, pin: AttentionPin, layer: int, report: PinReport) -> None:
        self.pin, self.layer, self.report = pin, layer, report
        self._sink, self._logit, self._mass, self._key = ByRow(), ByRow(), ByRow(), ByRow()
        self.free: Tensor | None = None
        self.held: Tensor | None = None

    def clear(self) -> None:
        for memory in (self._sink, self._logit, self._mass, self._key):
            memory.clear()

    def __call__(self, answer: Answer, problem: Problem, depth: int) -> Attended:
        if depth > 1 and not self.pin.acts_at(depth):
            self.free = self.held = None
            return answer(problem)
        problem = dataclasses.replace(problem, stats=dataclasses.replace(problem.stats, mass=True))
        free = answer(problem)
        if depth == 1:
            self._remember(problem, free)
            return free
        self.free = free.out
        sink, wanted = (memory.at(problem.rows).transpose(1, 2) for memory in (self._sink, self._mass))
        large = sink >= self.pin.least
        hold = self._hold_sink if self.pin.of == "sink" else self._hold_key
        result, error = hold(answer, problem, free, large, wanted)
        self._count(problem, large, error, (wanted - sink).abs())
        return result

    def _hold_sink(
        self, answer: Answer, problem: Problem, free: Attended, large: Tensor, wanted: Tensor
    ) -> tuple[Attended, Tensor]:
        shift = self._logit.at(problem.rows).transpose(1, 2) - _log_odds(answer, problem, free, large)
        self.held = large & shift.isfinite()
        if not bool(self.held.any()):
            return free, torch.zeros_like(wanted)
        shift = torch.where(self.held, shift, 0.0)
        result = answer(_raised(problem, shift.to(free.lse.dtype)))
        error = (result.mass[..., int(Segment.SINK)] - wanted).abs()
        if bool((self.held & (error > ROUGH)).any()):  # large scores are coarse: once more, by what is still missing
            sink, rest = _parts(result.mass)
            missing = self._logit.at(problem.rows).transpose(1, 2) - (sink.log() - rest.log())
            shift = shift + torch.where(self.held & missing.isfinite(), missing, 0.0)
            again = answer(_raised(problem, shift.to(free.lse.dtype)))
            closer = (again.mass[..., int(Segment.SINK)] - wanted).abs()
            if float(torch.where(self.held, closer, 0.0).max()) < float(torch.where(self.held, error, 0.0).max()):
                result, error = again, closer
        return result, error

    def _hold_key(
        self, answer: Answer, problem: Problem, free: Attended, large: Tensor, wanted: Tensor
    ) -> tuple[Attended, Tensor]:
        exact, out = free, free.out
        if out.dtype.itemsize < 4:  # what is left beside the key is scaled up, and its rounding with it
            names = ("q", "context_k", "context_v", "own_k", "own_v")
            problem = dataclasses.replace(problem, **{name: getattr(problem, name).float() for name in names})
            exact = answer(problem)
        key = Key(problem, exact, self._key.at(problem.rows).transpose(1, 2))
        self.held = large & (wanted > 0) & (wanted < 1) & key.seen & (key.mass < MOST)
        moved = key.at(torch.where(self.held, wanted, key.mass))
        kept = torch.where(self.held[..., None], moved.out.to(out.dtype), out)
        return dataclasses.replace(moved, out=kept), torch.zeros_like(wanted)

    def _remember(self, problem: Problem, free: Attended) -> None:
        rows, total = problem.rows, problem.segments.shape[1]
        sink = mass = free.mass[..., int(Segment.SINK)]
        if self.pin.of == "equal":
            key, mass = closest(problem, free.lse, sink)
            self._key.put(rows, key.transpose(1, 2), total)
        held, rest = _parts(free.mass)
        self._logit.put(rows, (held.log() - rest.log()).transpose(1, 2), total)
        self._sink.put(rows, sink.transpose(1, 2), total)
        self._mass.put(rows, mass.transpose(1, 2), total)

    def _count(self, problem: Problem, large: Tensor, error: Tensor, gap: Tensor) -> None:
        valid = torch.ones_like(problem.rows, dtype=torch.bool) if problem.valid is None else problem.valid
        valid, held, report = valid[:, None], self.held, self.report
        counted = {
            "total": valid.expand_as(held),
            "small": valid & ~large,
            "lost": valid & large & ~held,
            "gap": torch.where(valid & held, gap, 0.0),
        }
        for name, value in counted.items():
            table = getattr(report, name)
            for head, n in enumerate(value.sum((0, 2)).tolist()):
                table[self.layer, head] = table.get((self.layer, head), 0) + n
        report.worst = max(report.worst, float(torch.where(valid & held, error, 0.0).max()))


class _Rescaled:
    """Rescales what leaves a pinned layer to the RMS that it has without the pin."""

    def __init__(self, pin: AttentionPin, drafter: Drafter, index: int, pinned: _Pinned) -> None:
        self.pin, self.drafter, self.index, self.pinned = pin, drafter, index, pinned
        self.layer, self.last = drafter.layers[index], index == len(drafter.layers) - 1
        self.attended, self.after, self.gate, self.resid = (torch.empty(0) for _ in range(4))

    def attach(self, stack: ExitStack) -> None:
        name = f"layers.{self.index}"
        listen(stack, self.drafter, f"{name}.hook_attn_out", lambda v, hook: self._keep("attended", v), read_only=True)
        norm = self.layer.post_attention_layernorm
        stack.callback(norm.register_forward_pre_hook(lambda module, args: self._keep("after", args[0])).remove)
        gate = self.layer.self_attn.gate
        if gate is not None:
            stack.callback(gate.register_forward_hook(lambda module, args, output: self._keep("gate", output)).remove)
        listen(stack, self.drafter, f"{name}.hook_resid", self._on_resid)
        if self.last:
            listen(stack, self.drafter, "hook_feedback", self._on_feedback)

    def _keep(self, name: str, value: Tensor) -> None:
        setattr(self, name, value)

    def _on_resid(self, value: Tensor, hook: HookPoint) -> Any:
        if hook.depth == 1 or not self.pin.acts_at(hook.depth):
            return value
        self._refuse_what_it_cannot_follow()
        out = rearrange(self.pinned.free, "b h s d -> b s (h d)")
        if self.layer.self_attn.gate is not None:
            out = out * torch.sigmoid(self.gate)
        # called as functions: hooks are not to see a pass that is not the run's
        free = self.after - self.attended + self.layer.self_attn.o_proj.forward(out)
        self.resid = free + self.layer.mlp.forward(self.layer.post_attention_layernorm.forward(free))
        return value if self.last else self._scaled(value, self.resid)

    def _refuse_what_it_cannot_follow(self) -> None:
        """The counterfactual is made from the modules' own functions: what other interventions change there it would miss."""
        points = [self.layer.self_attn.hook_out, self.layer.hook_attn_out, self.layer.hook_mlp_out]
        modules = [self.layer.self_attn.o_proj, *self.layer.mlp.modules(), self.layer.post_attention_layernorm]
        if self.last:
            points, modules = [*points, self.drafter.hook_normed], [*modules, self.drafter.norm]
        if any(point.replaceable for point in points) or any(module._forward_hooks for module in modules):
            raise DriftlabError(
                f"{self.pin.key}: another intervention or hook changes what follows attention in layer {self.index}, which the "
                "pass without the pin would not see: take state=free, or one at a time"
            )

    def _on_feedback(self, value: Tensor, hook: HookPoint) -> Any:
        if hook.depth == 1 or not self.pin.acts_at(hook.depth):
            return value
        return self._scaled(
            value, self.drafter.norm.forward(self.resid) if self.drafter.config.norm_output else self.resid
        )

    def _scaled(self, value: Tensor, free: Tensor) -> Tensor:
        held = self.pinned.held.any(1)[..., None]
        return torch.where(held, rescaled(value, rms(value), rms(free)), value)


def _parts(mass: Tensor) -> tuple[Tensor, Tensor]:
    """The sink's mass and the others', in float64: 1 - m would be rounding where m is nearly 1."""
    others = [int(segment) for segment in Segment if segment is not Segment.SINK]
    return mass[..., int(Segment.SINK)].double(), mass[..., others].double().sum(-1)


def _log_odds(answer: Answer, problem: Problem, free: Attended, wanted: Tensor) -> Tensor:
    """Return ln(sink's mass / the others') ``[batch head start]`` where it is ``wanted``; infinite where there is no such key.

    A small mass has few digits in float32, or none, so scores are moved until both sides can be seen: by 80, and, where that is
    not enough, by an amount found by bisection.
    """
    sink, rest = _parts(free.mass)
    odds = sink.log() - rest.log()
    sign = (sink < TINY).double() - (rest < TINY).double()
    left = wanted & (sign != 0)
    low, high = torch.full_like(odds, 0.0), torch.full_like(odds, FARTHEST)
    push = torch.full_like(odds, PUSH)
    for attempt in range(2 + int(math.log2(FARTHEST / PUSH))):
        if not bool(left.any()):
            break
        moved = torch.where(left, sign * push, 0.0)
        sink, rest = _parts(answer(_raised(problem, moved.to(free.lse.dtype))).mass)
        near, far = torch.where(sign > 0, sink, rest), torch.where(sign > 0, rest, sink)
        seen = left & (near >= TINY) & (far >= TINY)
        odds = torch.where(seen, sink.log() - rest.log() - moved, odds)
        low, high = torch.where(near < TINY, push, low), torch.where(near < TINY, high, push)
        left = left & ~seen & (low < FARTHEST)  # not even so: there is no such key
        push = torch.where((high == FARTHEST) & (attempt == 0), FARTHEST, (low + high) / 2)
    return odds


def _raised(problem: Problem, shift: Tensor) -> Problem:
    """Return the problem with ``shift [batch head start]`` on the sink's scores."""
    bias = torch.nn.functional.pad(shift[..., None], (int(Segment.SINK), len(Segment) - 1 - int(Segment.SINK)))
    old = problem.controls.bias
    controls = dataclasses.replace(problem.controls, bias=bias if old is None else bias + old)
    return dataclasses.replace(problem, controls=controls)
