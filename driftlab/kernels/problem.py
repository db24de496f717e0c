"""What an attention kernel is asked, and what it answers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import Tensor

from driftlab.segments import Segment


@dataclass(frozen=True)
class Stats:
    """Which statistics to reduce beside the output; nothing of it costs anything when it is not asked for."""

    mass: bool = False
    entropy: bool = False
    columns: bool = False
    recent: tuple[int, ...] = ()


@dataclass(frozen=True)
class Controls:
    """Interventions on the scores. All are neutral by default.

    ``bias``: added to the scores by segment, broadcastable to [batch head start seg].
    ``drop``: True where a context key is hidden, [batch ctx] or [batch start ctx].
    ``score_scale``: multiplies the scores, a number or broadcastable to [batch head start].
    """

    bias: Tensor | None = None
    drop: Tensor | None = None
    score_scale: Tensor | float = 1.0


@dataclass(frozen=True)
class Attended:
    """The answer; a statistic that was not asked for is None.

    ``out [batch head start d_value]``, ``lse [batch head start]``, ``mass [batch head start seg]``,
    ``entropy [batch head start]`` (nats), ``visible [batch start]`` (number of keys seen),
    ``recent [batch head start window]`` (mass on the last w keys, whatever their segment),
    ``columns [batch head ctx]`` (mass on each context key, summed over the valid starts), ``sees_sink [batch start]``
    (whether a sink key is among those seen; with ``mass``).
    """

    out: Tensor
    lse: Tensor
    mass: Tensor | None
    entropy: Tensor | None
    visible: Tensor
    recent: Tensor | None
    columns: Tensor | None
    sees_sink: Tensor | None = None


@dataclass(frozen=True)
class Problem:
    """Starts, context keys that all starts of a sequence share, and each start's own chain keys.

    ``q [batch head start d_head]``, ``context_k [batch kv_head ctx d_head]``, ``context_v [batch kv_head ctx d_value]``,
    ``own_k [batch kv_head start own d_head]``, ``own_v [batch kv_head start own d_value]`` (oldest first), ``rows [batch
    start]`` (context key c is visible to a start iff c <= row), ``segments [batch ctx]``, ``valid [batch start]`` (matters
    for ``columns`` alone), ``sink_logit [head]``. Query head h reads kv head h // group. The query stands at place row + own,
    its own key i at row + 1 + i. ``window``: keys at places > row + own - window are seen (0: all), and the first
    ``carried`` context keys besides.
    """

    q: Tensor
    context_k: Tensor
    context_v: Tensor
    own_k: Tensor
    own_v: Tensor
    rows: Tensor
    segments: Tensor
    scale: float
    window: int = 0
    carried: int = 0
    valid: Tensor | None = None
    controls: Controls = Controls()
    sink_logit: Tensor | None = None
    stats: Stats = Stats()

    @property
    def own(self) -> int:
        """Number of own keys a start has: 0 at depth 1."""
        return self.own_k.shape[3]

    def at(self, span: slice) -> Problem:
        """Return the problem of some of the starts."""
        return dataclasses.replace(
            self,
            q=self.q[:, :, span],
            own_k=self.own_k[:, :, span],
            own_v=self.own_v[:, :, span],
            rows=self.rows[:, span],
            valid=None if self.valid is None else self.valid[:, span],
            controls=controls_at(self.controls, span),
        )


def controls_at(controls: Controls, span: slice) -> Controls:
    """The controls of a block of starts: whatever has a start axis longer than 1 is cut along it."""
    bias, drop, scaling = controls.bias, controls.drop, controls.score_scale
    if bias is not None and bias.ndim >= 2 and bias.shape[-2] > 1:
        bias = bias[..., span, :]
    if drop is not None and drop.ndim == 3:
        drop = drop[:, span]
    if isinstance(scaling, Tensor) and scaling.ndim and scaling.shape[-1] > 1:
        scaling = scaling[..., span]
    return Controls(bias=bias, drop=drop, score_scale=scaling)


def visible_keys(problem: Problem) -> Tensor:
    """Return the number of keys seen, [batch start], in closed form; dropped ones are counted."""
    rows, own, window, context = problem.rows, problem.own, problem.window, problem.context_k.shape[2]
    seen = (rows + 1).clamp(0, context)
    if not window:
        return seen + own
    outside = (rows + own - window + 1).minimum(seen) - problem.carried
    return seen - outside.clamp(min=0) + min(own, window)


def sees_sink(problem: Problem) -> Tensor:
    """Return whether a start sees a key of segment SINK, [batch start]: no mass on a key that is not seen says nothing."""
    is_sink = problem.segments == Segment.SINK
    columns = is_sink.any(0).nonzero()[:, 0]
    rows = problem.rows[..., None]
    seen = is_sink[:, None, columns] & (columns <= rows)
    if problem.window:
        seen &= (columns > rows + problem.own - problem.window) | (columns < problem.carried)
    drop = problem.controls.drop
    if drop is not None:
        seen &= ~(drop[:, None] if drop.ndim == 2 else drop)[..., columns]
    return seen.any(-1)
