r"""Rounds, speed-ups, the best K, and two numbers that must not be mixed up.

    plain(b) = target step over b tokens              round(b, K) = target step over b (K + 1) tokens + draft + overhead
    speed-up over no drafter = tau * plain / round    break-even tau = round / plain

``draft`` is K steps of b tokens, or one step of b K tokens for a drafter that proposes all K at once. A tree verifies more
than K + 1 tokens a sequence, and each draft step after the first runs over the nodes that it expands (top_k in EAGLE).
tau is emitted tokens per round, bonus included (:mod:`driftlab.simulation`); it belongs to a K and comes from outside.

``speedup_over_none`` compares a drafter with no drafter, ``gain_over`` one drafter with another: a drafter can be twice as
fast as none and no faster than its predecessor. With a constant cost ratio c = draft step / target step the speed-up is
tau / (1 + K c), and with independent acceptance of rate alpha besides that is Leviathan et al. (arXiv 2211.17192).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from driftlab.cost.shapes import Number
from driftlab.cost.steps import MeasuredStep, StepCost
from driftlab.errors import DriftlabError


@dataclass(frozen=True)
class Best:
    """The best K with its speed-up over no drafter; depth 0 and 1.0 if every K is slower than that."""

    depth: int
    speedup: float
    by_depth: Mapping[int, float] = field(hash=False)


@dataclass(frozen=True)
class Gain:
    """Tokens per second of one drafter over those of another, and the K of each (0: better not to draft)."""

    ratio: float
    depth: int
    other_depth: int


@dataclass(frozen=True)
class CostModel:
    """What rounds cost. Contexts are cached tokens per sequence, concurrency is the sequences of a batch.

    ``overhead``: seconds that a round has and a plain step has not; what every step has belongs in ``target``.
    ``first_draft``: the first draft step where it differs (it runs fc, on the target's states). ``parallel``: one draft step
    proposes all K tokens.
    """

    target: StepCost
    draft: StepCost
    overhead: Number = 0.0
    first_draft: StepCost | None = None
    parallel: bool = False

    def __post_init__(self) -> None:
        for name in ("target", "draft", "first_draft"):
            step = getattr(self, name)
            if not isinstance(step, StepCost) and not (name == "first_draft" and step is None):
                raise DriftlabError(
                    f"{name} {step!r} is no step: give a RooflineStep, a LinearStep or a MeasuredStep (LinearStep(seconds) "
                    "where every step takes as long)"
                )
        if self.overhead < 0:
            raise DriftlabError(f"overhead {self.overhead}: seconds are not below 0")
        if isinstance(self.target, MeasuredStep) and self.target.by == "sequences":
            raise DriftlabError("a target measured by sequences would verify any K for nothing: give a table by tokens")

    def plain_time(self, concurrency: Number, context: Number = 0) -> float:
        """Seconds of a step without drafter: one token for each of ``concurrency`` sequences."""
        return self.target.time(concurrency, concurrency, context)

    def draft_time(
        self, depth: int, concurrency: Number, context: Number = 0, *, draft_tokens: int | None = None
    ) -> float:
        """Seconds of drafting K = ``depth`` tokens for each sequence, or a tree of that depth (``draft_tokens``)."""
        _check_depth(depth)
        first = self.first_draft or self.draft
        if self.parallel:
            if draft_tokens is not None:
                raise DriftlabError("a parallel drafter has no draft step after the first: leave draft_tokens out")
            return first.time(concurrency * depth, concurrency, context)
        nodes = 1 if draft_tokens is None else draft_tokens
        if nodes < 1:
            raise DriftlabError(f"draft_tokens {nodes}: a draft step runs over at least one token a sequence")
        rest = (depth - 1) * self.draft.time(concurrency * nodes, concurrency, context) if depth > 1 else 0.0
        return first.time(concurrency, concurrency, context) + rest

    def round_time(
        self,
        depth: int,
        concurrency: Number,
        context: Number = 0,
        *,
        verify_tokens: int | None = None,
        draft_tokens: int | None = None,
    ) -> float:
        """Seconds of one round.

        Args:
            depth: draft depth K, at least 1.
            concurrency: sequences in the batch.
            context: cached tokens per sequence.
            verify_tokens: tokens that the target verifies per sequence; K + 1 for a chain, more for a tree.
            draft_tokens: tokens a sequence in each draft step after the first; 1 for a chain. A tree must say it (1 where
                its drafter expands one node a step), except with ``parallel``, where there are no such steps.

        Raises:
            DriftlabError: fewer tokens verified than a path has, or a tree without ``draft_tokens``.
        """
        _check_depth(depth)
        width = depth + 1 if verify_tokens is None else verify_tokens
        if width < depth + 1:
            raise DriftlabError(f"verify_tokens {width}: a path of depth {depth} and its root are {depth + 1} tokens")
        if width > depth + 1 and draft_tokens is None and not self.parallel:
            raise DriftlabError(
                f"verify_tokens {width} with K = {depth} is a tree, whose draft steps run over more than one token a "
                "sequence: give draft_tokens (top_k in EAGLE)"
            )
        verify = self.target.time(concurrency * width, concurrency, context)
        return float(verify + self.draft_time(depth, concurrency, context, draft_tokens=draft_tokens) + self.overhead)

    def break_even_tau(
        self,
        depth: int,
        concurrency: Number,
        context: Number = 0,
        *,
        verify_tokens: int | None = None,
        draft_tokens: int | None = None,
    ) -> float:
        """tau at which drafting is as fast as not drafting. Above K + 1 no drafter of this cost can pay off."""
        spent = self.round_time(depth, concurrency, context, verify_tokens=verify_tokens, draft_tokens=draft_tokens)
        return spent / self.plain_time(concurrency, context)

    def speedup_over_none(
        self,
        tau: Number,
        depth: int,
        concurrency: Number,
        context: Number = 0,
        *,
        verify_tokens: int | None = None,
        draft_tokens: int | None = None,
    ) -> float:
        """Tokens per second with this drafter over those without one. tau outside [1, K + 1] is a :class:`DriftlabError`."""
        _check_tau(tau, depth)
        even = self.break_even_tau(depth, concurrency, context, verify_tokens=verify_tokens, draft_tokens=draft_tokens)
        return float(tau / even)

    def tokens_per_second_per_user(
        self,
        tau: Number,
        depth: int,
        concurrency: Number,
        context: Number = 0,
        *,
        verify_tokens: int | None = None,
        draft_tokens: int | None = None,
    ) -> float:
        """Tokens per second that one sequence of the batch gets."""
        _check_tau(tau, depth)
        spent = self.round_time(depth, concurrency, context, verify_tokens=verify_tokens, draft_tokens=draft_tokens)
        return float(tau / spent)

    def best_depth(self, taus: Mapping[int, Number], concurrency: Number, context: Number = 0) -> Best:
        """Return the K of ``taus`` (K -> tau) with the largest speed-up over no drafter; the smaller K of equals."""
        if not taus:
            raise DriftlabError("best_depth needs at least one K with its tau")
        speedups = {k: self.speedup_over_none(taus[k], k, concurrency, context) for k in sorted(taus)}
        depth = max(speedups, key=speedups.__getitem__)
        if speedups[depth] <= 1:
            return Best(0, 1.0, speedups)
        return Best(depth, speedups[depth], speedups)


@dataclass(frozen=True)
class Drafting:
    """A drafter as :func:`gain_over` compares it: what it costs, and its tau by K on the same text as the other's."""

    model: CostModel
    taus: Mapping[int, Number] = field(hash=False)


def gain_over(
    new: Drafting, old: Drafting, concurrency: Number, context: Number = 0, *, depth: int | None = None
) -> Gain:
    """Tokens per second of one drafter over those of another, on one target.

    Args:
        new: the drafter whose gain it is.
        old: the drafter that it is compared with.
        concurrency: sequences in the batch.
        context: cached tokens per sequence.
        depth: the K of both; by default each has its own best K, and does not draft where that is faster.

    Raises:
        DriftlabError: the two have other target costs (then it would compare machines), or no tau for ``depth``.
    """
    if new.model.target != old.model.target:
        raise DriftlabError("gain_over compares drafters on one target: these two have different target costs")
    if depth is None:
        best, other = (d.model.best_depth(d.taus, concurrency, context) for d in (new, old))
        return Gain(best.speedup / other.speedup, best.depth, other.depth)
    if lacking := [name for name, d in (("new", new), ("old", old)) if depth not in d.taus]:
        raise DriftlabError(f"the {lacking[0]} drafter has no tau for K = {depth}")
    speeds = [d.model.speedup_over_none(d.taus[depth], depth, concurrency, context) for d in (new, old)]
    return Gain(speeds[0] / speeds[1], depth, depth)


def tau_iid(alpha: Number, depth: int) -> float:
    """tau if every draft is accepted independently with probability ``alpha``: 1 + alpha + ... + alpha^K."""
    _check_depth(depth)
    if not 0 <= alpha <= 1:
        raise DriftlabError(f"alpha {alpha} is a probability")
    return float(sum(alpha**k for k in range(depth + 1)))


def leviathan_speedup_iid(alpha: Number, depth: int, cost_ratio: Number) -> float:
    """(1 - alpha^(K+1)) / ((1 - alpha)(K c + 1)): speed-up under independent acceptance and constant cost ratio c.

    Real acceptance is neither independent nor of one rate, so a tau that was measured or replayed is better where it is known.
    """
    if cost_ratio < 0:
        raise DriftlabError(f"cost_ratio {cost_ratio} is below 0")
    return tau_iid(alpha, depth) / (1 + depth * cost_ratio)


def _check_depth(depth: int) -> None:
    if depth < 1:
        raise DriftlabError(f"depth {depth}: a round drafts at least one token")


def _check_tau(tau: Number, depth: int) -> None:
    _check_depth(depth)
    if not 1 <= tau <= depth + 1:
        raise DriftlabError(
            f"tau {tau} with K = {depth}: tokens per round, bonus included, are between 1 and {depth + 1}; "
            "an accept length without the bonus needs 1 more"
        )
