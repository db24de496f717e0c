r"""Reader of vLLM's log lines. They print accepted tokens A, drafted tokens D and ratios, but not the rounds R.

What is printed bounds R. With the mean length m (two decimals) and the rates p_k by position (three), K of them,

    D / K <= R <= D,     |1 + A / R - m| <= .005,     |A / R - sum of p_k| <= .0005 K,     R whole.

Where one R is left it is known. Where R = D / K is among few, drafts all of K tokens are taken as the value, with the bounds.
Elsewhere there are only bounds: at low acceptance drafts of several lengths print the same line as full ones.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import ceil, floor

import numpy as np

from driftlab.engines.found import VLLM, Found, marked
from driftlab.errors import DriftlabError

_NUMBER = r"(nan|\d+(?:\.\d+)?)"
_MEAN_HALF, _RATE_HALF = 0.005, 0.0005  # half a last digit
_SLACK = 1e-6
_WIDE = 0.01  # of the rounds; bounds further apart are no value
_UNKNOWN = "rounds are not printed, and what is printed leaves several: drafts may be of several lengths"


@dataclass(frozen=True)
class _Window:
    """One line; rounds lie between ``fewest`` and ``most``."""

    line: int
    accepted: float
    drafted: float
    mean: float
    positions: tuple[float, ...]
    fewest: int
    most: int

    @property
    def full(self) -> float:
        """Rounds if every draft had K tokens; NaN if that cannot be."""
        made = self.drafted / len(self.positions) if self.positions else np.nan
        return made if made.is_integer() and self.fewest <= made <= self.most else np.nan


def vllm_log(text: str, found: Found) -> None:
    """Windows, pooled by their counts."""
    windows = []
    for number, line in marked(text, "SpecDecoding metrics:"):
        window = _window(number, line)
        if isinstance(window, str):
            found.skipped.append((number, window))
            continue
        found.parts += 1
        if window.drafted:
            windows.append(window)
    if windows:
        _pool(windows, found)
    elif found.parts:
        found.counters(0, 0, 0, [], VLLM)


def _window(number: int, line: str) -> _Window | str:
    """Read a line; a sentence if it is broken."""
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
    if not drafted:
        return _Window(number, accepted, drafted, mean, (), 0, 0)
    if not abs(100 * accepted / drafted - rate) <= 0.0501:
        return f"{accepted:g} of {drafted:g} accepted is not {rate:g} %"
    rates = re.search(rf"Per-position acceptance rate: ({_NUMBER}(?:, {_NUMBER})*)", line)
    positions = tuple(float(x) for x in rates.group(1).split(", ")) if rates else ()
    fewest, most = _possible(accepted, drafted, mean, positions)
    if fewest > most:
        return (
            f"accepted {accepted:g}, drafted {drafted:g}, mean length {mean:g} and positions {positions} do not fit "
            "together: the line is cut"
        )
    return _Window(number, accepted, drafted, mean, positions, fewest, most)


def _possible(accepted: float, drafted: float, mean: float, positions: tuple[float, ...]) -> tuple[int, int]:
    """The smallest and the largest R that prints this; the first is the larger if none does."""
    told = [(mean - 1, _MEAN_HALF)]
    low, high = 1.0, drafted
    if positions:
        told.append((sum(positions), _RATE_HALF * len(positions)))
        low = drafted / len(positions)
    if not all(np.isfinite(x) and x + half > 0 for x, half in told):
        return 1, 0
    low = max(low, *(accepted / (x + half) for x, half in told), 1.0)
    high = min([high, *(accepted / (x - half) for x, half in told if x - half > _SLACK)])
    return ceil(low - _SLACK), floor(high + _SLACK)


def _pool(windows: list[_Window], found: Found) -> None:
    """Sum up windows with drafts, all of one number of positions."""
    for window in windows:
        if len(window.positions) != len(windows[0].positions):
            raise DriftlabError(
                f"line {window.line} has {len(window.positions)} positions and line {windows[0].line} "
                f"{len(windows[0].positions)}: give the log of one server with one K"
            )
    length, rate, position = VLLM.split("|")
    accepted, drafted = (sum(getattr(w, name) for w in windows) for name in ("accepted", "drafted"))
    few, many = (np.array([getattr(w, name) for w in windows], dtype=float) for name in ("fewest", "most"))
    made = _made(windows, few, many)
    rounds, low, high = (float(counts.sum()) for counts in (made, few, many))
    known = not np.isnan(rounds)
    found.add("num_drafts", "rounds", rounds if known else None, low=low, high=high, reason="" if known else _UNKNOWN)
    found.add("num_draft_tokens", "draft_tokens", drafted)
    found.add("num_accepted_tokens", "accepted", accepted)
    ends = {"low": 1 + accepted / high, "high": 1 + accepted / low}
    if known or ends["low"] == ends["high"]:
        found.add(length, "tokens_per_round", 1 + accepted / (rounds if known else low), **ends)
    elif len(windows) == 1:
        found.printed(length, "tokens_per_round", [windows[0].mean], _MEAN_HALF, "")
    else:
        found.add(length, "tokens_per_round", None, **ends, reason=_UNKNOWN)
    found.ratio(rate, "accept_rate", accepted, drafted)
    for k, rates in enumerate(np.array([w.positions for w in windows]).T, 1):
        told = known or len(windows) == 1
        value = float(rates @ made / rounds) if known else float(rates[0])
        lowest, highest = (-_largest(-rates, few, many) - _RATE_HALF, _largest(rates, few, many) + _RATE_HALF)
        found.add(position, "accept_unconditional", value if told else None, k, low=max(0.0, lowest),
                  high=min(1.0, highest), reason="" if told else _UNKNOWN)  # fmt: skip


def _made(windows: list[_Window], few: np.ndarray, many: np.ndarray) -> np.ndarray:
    """Rounds of each window, or NaN where nothing is told."""
    made = np.where(few == many, few, [w.full for w in windows])
    wide = (many - few).sum() > _WIDE * few.sum()
    return np.full(len(windows), np.nan) if wide else made


def _largest(rates: np.ndarray, few: np.ndarray, many: np.ndarray) -> float:
    """Largest mean of ``rates``, each weighted by a number between its ``few`` and ``many``: most for the highest rates."""
    order = np.argsort(-rates)
    rates, few, more = rates[order], few[order], (many - few)[order]
    top = rates @ few + np.concatenate([[0.0], np.cumsum(rates * more)])
    return float((top / (few.sum() + np.concatenate([[0.0], np.cumsum(more)]))).max())
