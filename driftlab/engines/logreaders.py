r"""Readers of logs that are lines, one a format; :mod:`driftlab.engines.logs` says which and calls them.

A reader takes the text and fills a :class:`Found`. Windows, requests and runs are pooled by counts. A line or entry that
should hold numbers and does not is noted with its number; nothing is guessed in its place.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from driftlab.errors import DriftlabError


@dataclass(frozen=True)
class LogValue:
    """A number under the tool's ``name`` and our ``quantity``; None with a ``reason`` where the log does not tell it.

    ``low`` and ``high`` bound it where that is known; for an exact number both are the number.
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

    def counters(
        self, rounds: float, drafted: float, accepted: float, per_position: Iterable[float], names: str
    ) -> None:
        """vLLM's counters and what follows from them."""
        length, rate, position = names.split("|")
        self.add("num_drafts", "rounds", rounds)
        self.add("num_draft_tokens", "draft_tokens", drafted)
        self.add("num_accepted_tokens", "accepted", accepted)
        self.ratio(length, "tokens_per_round", rounds + accepted, rounds)
        self.ratio(rate, "accept_rate", accepted, drafted)
        for k, passed in enumerate(per_position, 1):
            self.ratio(position, "accept_unconditional", passed, rounds, k)


VLLM = "Mean acceptance length|Avg Draft acceptance rate|Per-position acceptance rate"
_NUMBER = r"(nan|\d+(?:\.\d+)?)"


# ---------------------------------------------------------------------------------------------- lines


def vllm_log(text: str, found: Found) -> None:
    """Accepted and drafted tokens are printed, rounds are not: drafted / K where every draft had K tokens."""
    accepted = drafted = rounds = 0.0
    passed: list[float] = []
    means: list[float] = []
    why = ""
    for number, line in _marked(text, "SpecDecoding metrics:"):
        window = _window(line)
        if isinstance(window, str):
            found.skipped.append((number, window))
            continue
        found.parts += 1
        accepted, drafted = accepted + window[0], drafted + window[1]
        if not window[1]:
            continue
        means.append(window[2])
        made = window[1] / len(window[3]) if window[3] else 0
        if window[3] and passed and len(window[3]) != len(passed):
            why = why or f"line {number} has another number of positions"
        elif not made or abs(1 + window[0] / made - window[2]) > 0.00501:
            why = why or f"line {number} does not tell its rounds: drafts of several lengths, or no positions printed"
        else:
            rounds += made
            passed = [a + rate * made for a, rate in zip(passed or [0.0] * len(window[3]), window[3], strict=True)]
    if found.parts and not why:
        found.counters(rounds, drafted, accepted, passed, VLLM)
    elif found.parts:
        found.add("Accepted", "accepted", accepted)
        found.add("Drafted", "draft_tokens", drafted)
        found.ratio("Avg Draft acceptance rate", "accept_rate", accepted, drafted)
        found.add("num_drafts", "rounds", None, reason=why)
        value = means[0] if len(means) == 1 else None
        bounds = {"low": min(means), "high": max(means), "reason": "" if len(means) == 1 else why}
        found.add("Mean acceptance length", "tokens_per_round", value, **bounds)


def _window(line: str) -> tuple[float, float, float, list[float]] | str:
    """Accepted, drafted, mean length and rates by position of a window; a sentence if it is broken."""
    patterns = (
        r"\bAccepted: (\d+) tokens",
        r"\bDrafted: (\d+) tokens",
        rf"Mean acceptance length: {_NUMBER}",
        rf"raft acceptance rate: {_NUMBER}%",
    )
    parts = [re.search(pattern, line) for pattern in patterns]
    if not all(parts):
        return f"broken line: {line.strip()[-60:]!r}"
    accepted, drafted, mean, rate = (float(part.group(1)) for part in parts)
    rates = re.search(rf"Per-position acceptance rate: ({_NUMBER}(?:, {_NUMBER})*)", line)
    if drafted and abs(100 * accepted / drafted - rate) > 0.0501:
        return f"{accepted:g} of {drafted:g} accepted is not {rate:g} %"
    positions = [float(x) for x in rates.group(1).split(", ")] if rates else []
    if positions and drafted and 1 + accepted * len(positions) / drafted < mean - 0.00501:
        return f"mean length {mean:g} does not fit {len(positions)} positions: the line is cut"
    if positions and drafted and abs(sum(positions) - (mean - 1)) > 0.00501 + 0.000501 * len(positions):
        return f"positions {positions} do not add up to {mean:g} - 1: the line is cut"
    return accepted, drafted, mean, positions


def vllm_prometheus(text: str, found: Found) -> None:
    """Counters of one scrape, summed over engines; several scrapes in a file are refused, since counters only grow."""
    sums: dict[tuple[str, int], float] = {}
    seen = set()
    for number, line in _marked(text, "vllm:spec_decode_num_"):
        if line.startswith("#") or "_created" in line:
            continue
        parts = re.fullmatch(r"vllm:spec_decode_num_(\w+?)(?:_total)?(\{.*\})?\s+([\d.eE+]+)(?:\s+\d+)?", line.strip())
        place = re.search(r'position="(\d+)"', line)
        if not parts or (parts.group(1) == "accepted_tokens_per_pos") != bool(place):
            found.skipped.append((number, f"broken line: {line.strip()[-60:]!r}"))
            continue
        key = (parts.group(1), int(place.group(1)) if place else -1)
        if (key, parts.group(2)) in seen:
            raise DriftlabError(f"line {number}: {key[0]} comes twice: counters only grow, so give one scrape")
        seen.add((key, parts.group(2)))
        sums[key] = sums.get(key, 0.0) + float(parts.group(3))
    wanted = [(name, -1) for name in ("drafts", "draft_tokens", "accepted_tokens")]
    if absent := [f"num_{name}" for name, _ in wanted if (name, -1) not in sums]:
        found.skipped.append((0, f"counters {absent} are not there"))
        return
    found.parts = 1
    depth = 1 + max((place for _, place in sums), default=-1)
    passed = [sums.get(("accepted_tokens_per_pos", k), 0.0) for k in range(depth)]
    found.counters(*(sums[key] for key in wanted), passed, VLLM)


def sglang_log(text: str, found: Found) -> None:
    """A window prints ratios and no counts, so several cannot be pooled: only bounds are known."""
    lengths, rates = [], []
    for number, line in _marked(text, "accept len:"):
        length = re.search(r"(?<!block )accept len: (\d+\.\d\d)\b", line)
        rate = re.search(r"accept rate: (\d+\.\d\d)\b", line)
        if not length or ("accept rate" in line and not rate):
            found.skipped.append((number, f"broken line: {line.strip()[-60:]!r}"))
            continue
        found.parts += 1
        lengths.append(float(length.group(1)))
        rates += [float(rate.group(1))] if rate else []
    why = "windows print no counts: the pooled ratio lies between their smallest and largest"
    for name, quantity, numbers in (("accept len", "tokens_per_round", lengths), ("accept rate", "accept_rate", rates)):
        if numbers:
            value = numbers[0] if len(numbers) == 1 else None
            found.add(
                name, quantity, value, low=min(numbers), high=max(numbers), reason="" if len(numbers) == 1 else why
            )


def speculators(text: str, found: Found) -> None:
    """acceptance.csv of scripts/evaluate: a row a subset, pooled by counts."""
    totals, passed = [0.0, 0.0, 0.0], []
    columns = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    for number, row in enumerate(csv.DictReader(io.StringIO(text)), 2):
        try:
            counts = [float(row[name]) for name in columns]
            names = sorted((n for n in row if n and n.startswith("acceptance_at_pos_")), key=lambda n: int(n[18:]))
            at = [float(row[name]) * counts[0] for name in names]
        except (KeyError, TypeError, ValueError) as error:
            found.skipped.append((number, f"broken row ({error})"))
            continue
        found.parts += 1
        totals = [a + b for a, b in zip(totals, counts, strict=True)]
        passed = [a + b for a, b in zip(passed or [0.0] * len(at), at, strict=True)]
    if found.parts:
        found.counters(*totals, passed, "acceptance_length|accepted / drafted|acceptance_at_pos_i")


def _marked(text: str, mark: str) -> Iterator[tuple[int, str]]:
    return ((number, line) for number, line in enumerate(text.splitlines(), 1) if mark in line)
