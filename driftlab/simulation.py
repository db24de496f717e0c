r"""The walk over a trajectory: which rounds a decoder would really have made, and tau.

Verification is lossless, so the text of a speculative decoder is the recorded text. A round that starts at row t and
accepts a drafts emits them and the target's own next token, and the next round starts at row t + a + 1. Hence

    tau = sum of emitted tokens / sum of verify rounds,  pooled over prompts.

For sampled drafts a round at row t accepts exactly a drafts with a probability that the text determines (see
:mod:`driftlab.acceptance`), and whether a round starts at a row follows a renewal recursion,

    v[0] = 1,   v[i + a + 1] += v[i] P_i(a),        E[rounds | text] = sum of v,

so tau = tokens / E[rounds | text] (without the rounds that the limit cuts, and their tokens): the exact conditional
expectation of what an engine does by chance, given its text.

The prefill and its token are outside. A round that ends at EOS counts, with what it emitted (no bonus token after an
accepted EOS). A round that the length limit cuts does not: its accept length is unknown. The mean over all starts is a
larger number, since rounds start where the last draft failed: it is ``all_starts_mean``, never tau.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from driftlab.acceptance import Acceptance, share
from driftlab.errors import DriftlabError
from driftlab.histogram import RequestHistogram
from driftlab.intervals import Interval, bootstrap_difference, bootstrap_ratio, limits, pooled_ratio
from driftlab.trees import SampledTree

End = Literal["bonus", "eos", "cut"]
_BLOCK_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Round:
    """One verify round. ``accepted`` 0..K drafts (without bonus), ``emitted`` tokens (with it).

    ``end``: "bonus" (the target's own token came last), "eos" (an accepted draft was EOS: no bonus), "cut" (it ran into
    the length limit: accept length unknown beyond what is given, not part of tau).
    """

    row: int
    accepted: int
    emitted: int
    end: End


class _Outcome(ABC):
    """What follows from the rounds, certain or expected: tau, its relatives, and the tidy rows."""

    acceptance: Acceptance

    @property
    @abstractmethod
    def emitted(self) -> np.ndarray:
        """Tokens emitted by the rounds that count, per prompt."""

    @property
    @abstractmethod
    def verify_rounds(self) -> np.ndarray:
        """Rounds that count, per prompt."""

    @abstractmethod
    def by_depth(self, index: int) -> tuple[Sequence[float], Sequence[float]]:
        """Rounds of a prompt that accepted at least k drafts, and those judged at depth k, having accepted all before;
        k = 1..K.

        Rounds that the limit cut are among them, as far as they are known: leaving them out would leave out those that
        accepted most.
        """

    @abstractmethod
    def round_counts(self, index: int) -> dict[str, tuple[float, ...]]:
        """Rounds of a prompt by how they ended and by what they accepted: {"bonus", "eos", "cut"} to [K + 1]."""

    def histograms(self) -> tuple[RequestHistogram, ...]:
        """Return the record that other tools' numbers follow from (:mod:`driftlab.engines.conventions`), one a prompt."""
        told = self.acceptance
        return tuple(
            RequestHistogram(name, category, self.depth, **self.round_counts(i), tree=told.tree is not None)
            for i, (name, category) in enumerate(zip(told.ids, told.categories, strict=True))
        )

    @property
    def depth(self) -> int:
        """Number of draft steps K."""
        return self.acceptance.depth

    @property
    def tau(self) -> float:
        """Emitted tokens per verify round, pooled over prompts. NaN if no prompt has a complete round."""
        return pooled_ratio(self.emitted, self.verify_rounds)

    def tau_interval(self, samples: int = 2000, seed: int = 0) -> Interval:
        """tau with its 95 % interval by bootstrap over prompts, cut to [1, K + 1]."""
        interval = bootstrap_ratio(self.emitted, self.verify_rounds, samples=samples, seed=seed)
        return interval.within(*limits("tau", self.depth))

    @property
    def tau_uncensored(self) -> float:
        """tau over the rounds that start with more than K tokens left, in texts that the length limit ended.

        A round near the limit is known only if it fails early, so leaving out just the cut ones lowers tau a little, most
        for short answers, deep drafts and good drafters. Here rounds are left out by where they start, which does not.
        """
        emitted, rounds = self.uncensored
        return pooled_ratio(np.array([emitted]), np.array([rounds]))

    @property
    def all_starts_mean(self) -> float:
        """1 + mean accept length over every start that has K comparable depths: not what a decoder achieves."""
        lengths = self.acceptance.accept_length[self.acceptance.valid[..., -1]]
        return float(lengths.double().mean()) + 1 if len(lengths) else float("nan")

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield tidy rows: per prompt emitted and rounds; per prompt and depth match and acceptance; pooled tau.

        Of trees: per prompt the share of rounds that accept a path exactly so deep.
        """
        yield from self.acceptance.records()
        emitted, rounds = self.emitted.tolist(), self.verify_rounds.tolist()
        for i, (name, category) in enumerate(zip(self.acceptance.ids, self.acceptance.categories, strict=True)):
            key, (passed, reached) = {"prompt": name, "category": category}, self.by_depth(i)
            yield {**key, "quantity": "emitted", "value": emitted[i], "n": rounds[i]}
            yield {**key, "quantity": "rounds", "value": rounds[i], "n": 1}
            counts = self.round_counts(i)
            nothing, *exactly = (a + b for a, b in zip(counts["bonus"], counts["eos"], strict=True))
            if self.acceptance.tree is not None:
                yield {**key, "quantity": "accepted_nothing", **share(nothing, rounds[i])}
                for k, count in enumerate(exactly, 1):
                    yield {**key, "depth": k, "quantity": "accepted_exactly", **share(count, rounds[i])}
                continue
            for k in range(self.depth):
                at = {**key, "depth": k + 1}
                yield {**at, "quantity": "accept_unconditional", **share(sum(exactly[k:]), rounds[i])}
                yield {**at, "quantity": "accept_conditional", **share(passed[k], reached[k])}
        tau = self.tau_interval()
        pooled = {"value": tau.value, "low": tau.low, "high": tau.high, "n": self.verify_rounds.sum().item()}
        yield {"prompt": "", "quantity": "tau", **pooled}
        yield {"prompt": "", "quantity": "tau_uncensored", "value": self.tau_uncensored, "n": self.uncensored[1]}
        full = int(self.acceptance.valid[..., -1].sum())
        yield {"prompt": "", "quantity": "all_starts_mean", "value": self.all_starts_mean, "n": full}


@dataclass(frozen=True)
class Simulation(_Outcome):
    """The rounds of every prompt, and what follows from them. ``K`` is ``depth``."""

    rounds: tuple[tuple[Round, ...], ...]
    acceptance: Acceptance

    @property
    def complete(self) -> list[list[Round]]:
        """The rounds that count: all but those cut by the length limit."""
        return [[r for r in rounds if r.end != "cut"] for rounds in self.rounds]

    @property
    def emitted(self) -> np.ndarray:
        """Tokens emitted by the rounds that count, per prompt."""
        return np.array([sum(r.emitted for r in rounds) for rounds in self.complete])

    @property
    def verify_rounds(self) -> np.ndarray:
        """Rounds that count, per prompt."""
        return np.array([len(rounds) for rounds in self.complete])

    @property
    def uncensored(self) -> tuple[float, float]:
        """Tokens and rounds of :attr:`tau_uncensored`."""
        emitted = rounds = 0
        for i, complete in enumerate(self.complete):
            stopped, first = self.acceptance.finish[i] == "stop", int(self.acceptance.rows[i, 0])
            left = self.acceptance.remaining[i]
            kept = [r for r in complete if stopped or int(left[r.row - first]) > self.depth]
            emitted, rounds = emitted + sum(r.emitted for r in kept), rounds + len(kept)
        return float(emitted), float(rounds)

    def round_counts(self, index: int) -> dict[str, tuple[float, ...]]:
        """Whole numbers."""
        counts = {end: [0.0] * (self.depth + 1) for end in ("bonus", "eos", "cut")}
        for r in self.rounds[index]:
            counts[r.end][r.accepted] += 1
        return {name: tuple(values) for name, values in counts.items()}

    def by_depth(self, index: int) -> tuple[list[int], list[int]]:
        """At the end of the text nothing more is compared: such a round has neither passed nor failed the next depth."""
        rounds, depths = self.rounds[index], range(1, self.depth + 1)
        passed = [sum(r.accepted >= k for r in rounds) for k in depths]
        return passed, [sum(r.accepted >= k - (r.end == "bonus") for r in rounds) for k in depths]


@dataclass(frozen=True)
class Expected(_Outcome):
    """What the rounds of sampled drafting amount to, in expectation over the drafts and the verifier's dice, given the text.

    Same names as :class:`Simulation`; counts are expectations. ``starts[i] [row]``: probability that a round starts at each
    answer row of prompt i (v above), the attribution of every round to its place, those included that the limit cuts.
    """

    acceptance: Acceptance
    starts: tuple[np.ndarray, ...]
    means: np.ndarray
    """[prompt, quantity]: rounds, emitted, then passed and reached at depths 1..K"""
    variances: np.ndarray
    """of the same, over drafts and dice"""
    uncensored: tuple[float, float]
    """emitted and rounds over the starts that :attr:`tau_uncensored` keeps"""

    @property
    def emitted(self) -> np.ndarray:
        """Expected tokens emitted by the rounds that count, per prompt."""
        return self.means[:, 1]

    @property
    def verify_rounds(self) -> np.ndarray:
        """Expected rounds that count, per prompt."""
        return self.means[:, 0]

    def round_counts(self, index: int) -> dict[str, tuple[float, ...]]:
        """Expected numbers."""
        counts = {end: np.zeros(self.depth + 1) for end in ("bonus", "eos", "cut")}
        end = "eos" if self.acceptance.finish[index] == "stop" else "cut"
        starts = slice(len(self.starts[index]))
        left = self.acceptance.remaining[index, starts].numpy()
        chance = self.starts[index][:, None] * _outcomes(self.acceptance.probability[index, starts].numpy(), left)
        last = left <= self.depth
        np.add.at(counts[end], left[last], chance[last, left[last]])
        counts["bonus"] += (chance * (np.arange(self.depth + 1) < left[:, None])).sum(0)
        return {name: tuple(values.tolist()) for name, values in counts.items()}

    def by_depth(self, index: int) -> tuple[list[float], list[float]]:
        """Expected numbers of them."""
        counts = self.means[index, 2:].tolist()
        return counts[: self.depth], counts[self.depth :]


def simulate(acceptance: Acceptance) -> Simulation | Expected:
    """Walk every sequence of an acceptance table: a :class:`Simulation` of arg-max drafts, :class:`Expected` of sampled."""
    if acceptance.sampled is not None:
        return _expect(acceptance)
    lengths, remaining = acceptance.accept_length.tolist(), acceptance.remaining.tolist()
    rows = acceptance.rows[:, 0].tolist()
    walks = [
        tuple(walk(lengths[i], remaining[i], first_row=rows[i], stopped=acceptance.finish[i] == "stop"))
        for i in range(len(acceptance.ids))
    ]
    return Simulation(tuple(walks), acceptance)


def difference(a: Simulation | Expected, b: Simulation | Expected, *, samples: int = 2000, seed: int = 0) -> Interval:
    """tau of ``a`` minus tau of ``b`` on the same prompts, paired, with its 95 % interval by bootstrap over prompts.

    Raises:
        DriftlabError: for other texts or another order of them. (K and the way of drafting may differ.)
    """
    mine, theirs = a.acceptance, b.acceptance
    if mine.ids != theirs.ids or mine.digests != theirs.digests:
        raise DriftlabError("a paired difference is over the same prompts and texts in the same order")
    return bootstrap_difference(a.emitted, a.verify_rounds, b.emitted, b.verify_rounds, samples=samples, seed=seed)


def _expect(acceptance: Acceptance) -> Expected:
    probability, remaining = acceptance.probability.numpy(), acceptance.remaining.numpy()
    stopped = np.array([finish == "stop" for finish in acceptance.finish])
    if not np.isfinite(probability).all():
        raise DriftlabError("acceptance probabilities are not finite: a prompt would leave tau without a word")
    depth, parts = acceptance.depth, []
    size = max(1, _BLOCK_BYTES // (8 * max(1, probability[0].size)))
    for first in range(0, len(probability), size):  # what the recursion keeps is many times the probabilities
        here = slice(first, first + size)
        parts.append(
            (*renewal(probability[here], remaining[here], stopped[here]), _emitted(probability[here], remaining[here]))
        )
    v, means, variances, emitted = (np.concatenate(part) for part in zip(*parts, strict=True))
    if isinstance(acceptance.tree, SampledTree) and max(acceptance.tree.branching) > 1:
        variances = np.full_like(variances, np.nan)  # they would leave out the noise of the draws
    weight = v * ((remaining > 0) & (stopped[:, None] | (remaining > depth)))
    return Expected(
        acceptance=acceptance,
        starts=tuple(row[: _starts(left)] for row, left in zip(v, remaining, strict=True)),
        means=means,
        variances=variances,
        uncensored=(float((weight * emitted).sum()), float(weight.sum())),
    )


def _emitted(probability: np.ndarray, remaining: np.ndarray) -> np.ndarray:
    """Tokens that a round emits in the mean, [prompt start]; an accepted EOS has no bonus token."""
    product, depth = probability.cumprod(-1), probability.shape[-1]
    last = np.take_along_axis(product, np.clip(remaining - 1, 0, depth - 1)[..., None], -1)[..., 0]
    return product.sum(-1) + 1 - np.where(remaining <= depth, last, 0)


def _starts(remaining: np.ndarray) -> int:
    """Number of starts before the sequence ends: it ends at the first 0."""
    ended = np.flatnonzero(remaining == 0)
    return int(ended[0]) if len(ended) else len(remaining)


def renewal(
    probability: np.ndarray, remaining: np.ndarray, stopped: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Moments of the rounds of sequences whose drafts are accepted by chance.

    Args:
        probability: [prompt start depth], of accepting each draft given that all before it were accepted.
        remaining: [prompt start], text tokens after the one that each start already has; it falls to 0 at the last.
        stopped: [prompt], whether the text ends in EOS; otherwise in the length limit, and a round that runs into it does
            not count: only the depths that it is known to have passed do.

    Returns:
        v [prompt start], the probability that a round starts there; mean and variance [prompt quantity] of rounds, emitted,
        passed at depth 1..K, reached at depth 1..K. Given its start a round is independent of what came before, so the
        second moments follow a recursion of their own: E[(r + R)^2] = r^2 + 2 r E[R] + E[R^2], R the sum from the next
        start on.
    """
    prompts, starts, depth = probability.shape
    ks, accepted = np.arange(1, depth + 1), np.arange(depth + 1)
    chance = _outcomes(probability, remaining)
    bonus = chance * (accepted < remaining[..., None])  # outcomes that end in the target's own token
    reward = np.array([[1, a + 1, *(a >= ks), *(a >= ks - 1)] for a in accepted], dtype=np.float64)
    # all that is left was accepted: EOS, without the target's own token; or the limit cut the round
    ended = np.array([[1, left, *(left >= ks), *(left >= ks)] for left in accepted], dtype=np.float64)
    whole = np.clip(remaining, 0, depth)
    end = np.take_along_axis(chance, whole[..., None], -1)[..., 0] * ((remaining > 0) & (remaining <= depth))
    ended = ended[whole]
    ended[..., :2] *= stopped[:, None, None]
    first, second = np.zeros((2, prompts, starts + depth + 1, reward.shape[1]))
    for start in reversed(range(starts)):
        later = slice(start + 1, start + depth + 2)
        here, last = bonus[:, start, :, None], end[:, start, None]
        first[:, start] = (here * (reward + first[:, later])).sum(1) + last * ended[:, start]
        again = reward**2 + 2 * reward * first[:, later] + second[:, later]
        second[:, start] = (here * again).sum(1) + last * ended[:, start] ** 2
    v = np.zeros((prompts, starts + depth + 1))
    v[:, 0] = 1
    for start in range(starts):
        v[:, start + 1 : start + depth + 2] += v[:, start, None] * bonus[:, start]
    v = v[:, :starts] * (remaining > 0)
    return v, first[:, 0], np.maximum(second[:, 0] - first[:, 0] ** 2, 0)


def _outcomes(probability: np.ndarray, left: np.ndarray) -> np.ndarray:
    """Chance that a round accepts exactly 0, 1, ... K drafts, from those of accepting each after the others.

    ``probability [*start depth]``, ``left [*start]``: no more drafts than this count. Nothing left: all 0.
    """
    tried = probability * (np.arange(probability.shape[-1]) < left[..., None])
    ones = np.ones((*tried.shape[:-1], 1))
    chance = np.concatenate([ones, tried.cumprod(-1)], -1) * np.concatenate([1 - tried, ones], -1)
    # beyond the last draft that counts 1 - tried is 1, so the chance of all that is left stands at its place
    return chance * (left[..., None] > 0)


def walk(accept_lengths: Sequence[int], remaining: Sequence[int], *, first_row: int, stopped: bool) -> Iterator[Round]:
    """Yield the rounds of one sequence.

    Args:
        accept_lengths: accepted drafts (0..K) at each start, in row order.
        remaining: text tokens after the one that each start already has.
        first_row: P - 1, the row of start 0.
        stopped: whether the text ends in EOS; otherwise in the length limit.
    """
    start = 0
    while start < len(accept_lengths) and remaining[start] > 0:
        accepted, left = accept_lengths[start], remaining[start]
        if accepted < left:
            yield Round(first_row + start, accepted, accepted + 1, "bonus")
            start += accepted + 1
        else:
            yield Round(first_row + start, left, left, "eos" if stopped else "cut")
            return
