r"""The walk over a trajectory: which rounds a decoder would really have made, and tau.

Verification is lossless, so the text of a speculative decoder is the recorded text. A round that starts at row t and
accepts a drafts emits them and the target's own next token, and the next round starts at row t + a + 1. Hence

    tau = sum of emitted tokens / sum of verify rounds,  pooled over prompts.

The prefill and its token are outside. A round that ends at EOS counts, with what it emitted (no bonus token after an
accepted EOS). A round that the length limit cuts does not: its accept length is unknown. The mean over all starts is a
larger number, since rounds start where the last draft failed: it is ``all_starts_mean``, never tau.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from driftlab.acceptance import Acceptance, share
from driftlab.results import Interval, bootstrap_ratio, pooled_ratio

End = Literal["bonus", "eos", "cut"]


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


@dataclass(frozen=True)
class Simulation:
    """The rounds of every prompt, and what follows from them. ``K`` is ``depth``."""

    rounds: tuple[tuple[Round, ...], ...]
    acceptance: Acceptance

    @property
    def depth(self) -> int:
        """Number of draft steps K."""
        return self.acceptance.depth

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
    def tau(self) -> float:
        """Emitted tokens per verify round, pooled over prompts. NaN if no prompt has a complete round."""
        return pooled_ratio(self.emitted, self.verify_rounds)

    def tau_interval(self, samples: int = 2000, seed: int = 0) -> Interval:
        """tau with its 95 % interval by bootstrap over prompts."""
        return bootstrap_ratio(self.emitted, self.verify_rounds, samples=samples, seed=seed)

    @property
    def tau_uncensored(self) -> float:
        """tau over the rounds that start with more than K tokens left, in texts that the length limit ended.

        A round near the limit is known only if it fails early, so leaving out just the cut ones lowers tau a little, most
        for short answers, deep drafts and good drafters. Here rounds are left out by where they start, which does not.
        """
        emitted = rounds = 0
        for i, complete in enumerate(self.complete):
            stopped, first = self.acceptance.finish[i] == "stop", int(self.acceptance.rows[i, 0])
            left = self.acceptance.remaining[i]
            kept = [r for r in complete if stopped or int(left[r.row - first]) > self.depth]
            emitted, rounds = emitted + sum(r.emitted for r in kept), rounds + len(kept)
        return pooled_ratio(np.array([emitted]), np.array([rounds]))

    @property
    def all_starts_mean(self) -> float:
        """1 + mean accept length over every start that has K comparable depths: not what a decoder achieves."""
        full = self.acceptance.valid[..., -1]
        lengths = self.acceptance.accept_length[full]
        return float(lengths.float().mean()) + 1 if len(lengths) else float("nan")

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield tidy rows: per prompt emitted and rounds; per prompt and depth match and acceptance; pooled tau."""
        yield from self.acceptance.records()
        for i, (name, category) in enumerate(zip(self.acceptance.ids, self.acceptance.categories, strict=True)):
            key, rounds = {"prompt": name, "category": category}, self.complete[i]
            yield {**key, "quantity": "emitted", "value": int(self.emitted[i]), "n": len(rounds)}
            yield {**key, "quantity": "rounds", "value": len(rounds), "n": 1}
            for k in range(1, self.depth + 1):
                # after an accepted EOS nothing is compared: such a round has neither passed nor failed the next depth
                reached = sum(r.accepted >= k - (r.end != "eos") for r in rounds)
                passed = sum(r.accepted >= k for r in rounds)
                yield {**key, "depth": k, "quantity": "accept_unconditional", **share(passed, len(rounds))}
                yield {**key, "depth": k, "quantity": "accept_conditional", **share(passed, reached)}
        tau = self.tau_interval()
        pooled = {"value": tau.value, "low": tau.low, "high": tau.high, "n": int(self.verify_rounds.sum())}
        yield {"prompt": "", "quantity": "tau", **pooled}
        yield {"prompt": "", "quantity": "tau_uncensored", "value": self.tau_uncensored, "n": pooled["n"]}
        full = int(self.acceptance.valid[..., -1].sum())
        yield {"prompt": "", "quantity": "all_starts_mean", "value": self.all_starts_mean, "n": full}


def simulate(acceptance: Acceptance) -> Simulation:
    """Walk every sequence of an acceptance table."""
    lengths, remaining = acceptance.accept_length.tolist(), acceptance.remaining.tolist()
    rows = acceptance.rows[:, 0].tolist()
    walks = [
        tuple(walk(lengths[i], remaining[i], first_row=rows[i], stopped=acceptance.finish[i] == "stop"))
        for i in range(len(acceptance.ids))
    ]
    return Simulation(tuple(walks), acceptance)


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
