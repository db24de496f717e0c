"""What a reader of logs gathers: numbers under the tool's name and ours, with bounds or with the reason why there is none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

#: names of vLLM's mean length, rate and rate by position
VLLM = "Mean acceptance length|Avg Draft acceptance rate|Per-position acceptance rate"
SEVERAL_LENGTHS = (
    "draft_tokens is not K x drafts: drafts of several lengths, so a position was not drafted in every round"
)


@dataclass(frozen=True)
class LogValue:
    """A number under the tool's ``name`` and our ``quantity``; None with a ``reason`` where the log does not tell it.

    ``low`` and ``high`` bound it where that is known; for an exact number both are the number, for a printed one they are half
    a last digit away.
    """

    name: str
    quantity: str
    value: float | int | None
    position: int = 0
    low: float | int | None = None
    high: float | int | None = None
    reason: str = ""


@dataclass
class Found:
    """What a reader gathers."""

    parts: int = 0
    values: list[LogValue] = field(default_factory=list)
    skipped: list[tuple[int, str]] = field(default_factory=list)

    def add(self, name: str, quantity: str, value: float | int | None, position: int = 0, **more: Any) -> None:
        """Note a number, exact unless bounds are given."""
        bounds = {} if value is None else {"low": value, "high": value}
        self.values.append(LogValue(name, quantity, value, position, **{**bounds, **more}))

    def ratio(self, name: str, quantity: str, top: float | int, bottom: float | int, position: int = 0) -> None:
        """Note top / bottom; of nothing there is none."""
        reason = "" if bottom else "nothing was counted: the divisor is 0"
        self.add(name, quantity, top / bottom if bottom else None, position, reason=reason)

    def printed(self, name: str, quantity: str, numbers: list[float | int], half: float, why: str) -> None:
        """Note the one window's number, ``half`` a last digit around it; of several only where the pooled one lies."""
        one = len(numbers) == 1
        self.add(name, quantity, numbers[0] if one else None, low=min(numbers) - half, high=max(numbers) + half,
                 reason="" if one else why)  # fmt: skip

    def positions(self, name: str, counts: Iterable[float | int], rounds: float | int, why: str = "") -> None:
        """Note the share of rounds by position 1, 2, ...; with ``why``, none of them."""
        for k, count in enumerate(counts, 1):
            if why:
                self.add(name, "accept_unconditional", None, k, reason=why)
            else:
                self.ratio(name, "accept_unconditional", count, rounds, k)

    def counters(
        self,
        rounds: float | int,
        drafted: float | int,
        accepted: float | int,
        per_position: Iterable[float | int],
        names: str,
        why: str = "",
    ) -> None:
        """vLLM's counters and what follows from them; ``why``: the reason to give nothing by position."""
        length, rate, position = names.split("|")
        self.add("num_drafts", "rounds", rounds)
        self.add("num_draft_tokens", "draft_tokens", drafted)
        self.add("num_accepted_tokens", "accepted", accepted)
        self.ratio(length, "tokens_per_round", rounds + accepted, rounds)
        self.ratio(rate, "accept_rate", accepted, drafted)
        self.positions(position, per_position, rounds, why)


def marked(text: str, mark: str) -> Iterator[tuple[int, str]]:
    """Lines with ``mark`` in them, with their numbers."""
    return ((number, line) for number, line in enumerate(text.splitlines(), 1) if mark in line)
