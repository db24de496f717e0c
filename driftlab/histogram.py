r"""The histogram of accepted tokens per request: the record from which every tool's numbers can be told, and what is told.

A round drafts K tokens, accepts j and emits j + 1: the drafts and the target's own token. The record counts rounds by j and by
how they ended. The round that ends a request is where tools differ most and the record knows least: an engine may count drafts
that it accepted behind EOS or beyond the length limit, and may make a round more before it notices. :class:`Rounds` counts in
every such scenario, so that a value comes with bounds. With expected counts (sampled drafts) each ratio is one of expectations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from driftlab.errors import DriftlabError
from driftlab.intervals import Interval, pooled_ratio

ENDS = ("bonus", "eos", "cut")
_SLACK = 1e-9


@dataclass(frozen=True)
class RequestHistogram:
    """Rounds of one generated text (one turn), by how they went. Counts may be expectations.

    ``depth``: K. ``bonus [K+1]``: rounds that ended in the target's own token, by accepted drafts 0..K (emits one more).
    ``eos [K+1]``: rounds in which an accepted draft was EOS, by drafts accepted up to and with it, 1..K (emits as many).
    ``cut [K+1]``: rounds that ran into the length limit, by tokens emitted, 1..K: at least so many drafts were accepted.
    ``prefill_tokens``: 1, the token that the prefill gives, outside all rounds; 0 if the engine gives none.
    ``tree``: drafts were trees; counts are then by depth of the accepted path. Sequences are kept as tuples of floats.

    Raises:
        DriftlabError: lengths, signs or ends that cannot be.
    """

    id: str
    category: str
    depth: int
    bonus: Sequence[float | int]
    eos: Sequence[float | int]
    cut: Sequence[float | int]
    prefill_tokens: int = 1
    tree: bool = False

    def __post_init__(self) -> None:
        told = f"request {self.id!r}"
        if self.depth < 1 or self.prefill_tokens not in (0, 1):
            raise DriftlabError(
                f"{told}: depth {self.depth} must be >= 1 and prefill_tokens {self.prefill_tokens} 0 or 1"
            )
        for name in ENDS:
            counts = tuple(float(count) for count in getattr(self, name))
            object.__setattr__(self, name, counts)
            if len(counts) != self.depth + 1:
                raise DriftlabError(f"{told}: {name} has {len(counts)} counts; K = {self.depth} needs {self.depth + 1}")
            if not all(0 <= count < np.inf for count in counts):
                raise DriftlabError(f"{told}: {name} {counts} must be finite and not negative")
            if name != "bonus" and counts[0]:
                raise DriftlabError(
                    f"{told}: {name}[0] is {counts[0]}: such a round emits a token at least, so it is 0"
                )
        if sum(self.eos) + sum(self.cut) > 1 + _SLACK:
            raise DriftlabError(
                f"{told} ends {sum(self.eos) + sum(self.cut):g} times (eos and cut together): a text ends once at most. Make a "
                "record for every turn"
            )

    @classmethod
    def of(
        cls,
        id: str,
        accepted: Sequence[int],
        *,
        depth: int,
        end: str = "bonus",
        category: str = "",
        prefill_tokens: int = 1,
        tree: bool = False,
    ) -> RequestHistogram:
        """Make the record from accepted drafts per round, in order.

        ``end`` says how the last round ended: "bonus", "eos" (its number is the drafts up to and with EOS) or "cut" (its
        number is the tokens emitted). No rounds are no error.
        """
        if end not in ENDS:
            raise DriftlabError(f"request {id!r}: end {end!r}: choose from {', '.join(ENDS)}")
        counts = {name: [0.0] * (depth + 1) for name in ENDS}
        for place, number in enumerate(accepted):
            if not 0 <= number <= depth:
                raise DriftlabError(f"request {id!r}, round {place}: {number} accepted of {depth} drafts")
            counts[end if place == len(accepted) - 1 else "bonus"][number] += 1
        return cls(id, category, depth, **counts, prefill_tokens=prefill_tokens, tree=tree)

    @property
    def rounds(self) -> float:
        """All rounds, cut ones too."""
        return sum(map(sum, (self.bonus, self.eos, self.cut)))

    @property
    def emitted(self) -> float:
        """Tokens of all rounds that are in the text, without the prefill's."""
        return sum(self.bonus) + sum(
            k * sum(kind) for k, kind in enumerate(zip(self.bonus, self.eos, self.cut, strict=True))
        )

    @property
    def tokens(self) -> float:
        """All tokens of the text, the prefill's too."""
        return self.emitted + self.prefill_tokens


@dataclass(frozen=True)
class EngineValue:
    """One printed number. ``name`` is the tool's, ``quantity`` ours (unique in a report with ``position``, 1..K or 0).

    ``bonus``: whether the target's own token is counted. ``per``: "pooled" or "request" (a mean over requests).
    ``conditional``: on all earlier drafts being accepted; None where there is no such question. ``last``: what is done with
    rounds that end a request. ``reason`` says why a value is NaN.
    """

    name: str
    quantity: str
    value: float
    low: float
    high: float
    about: str
    last: str
    bonus: bool = False
    per: str = "pooled"
    conditional: bool | None = None
    position: int = 0
    unit: str = ""
    reason: str = ""


@dataclass(frozen=True)
class EngineReport:
    """What ``engine`` would print. ``source``: the files described. ``left_out``: names with the reason. ``note``:
    a warning.
    """

    engine: str
    source: str
    values: tuple[EngineValue, ...]
    left_out: tuple[tuple[str, str], ...] = ()
    note: str = ""

    def __getitem__(self, quantity: str | tuple[str, int]) -> EngineValue:
        """Return the value of a quantity, or of (quantity, position)."""
        key = (quantity, 0) if isinstance(quantity, str) else quantity
        for value in self.values:
            if (value.quantity, value.position) == key:
                return value
        raise DriftlabError(f"{self.engine} has no {key}; it has {sorted({v.quantity for v in self.values})}")

    def frame(self) -> pd.DataFrame:
        """One row a value, engine first; fractions where the tool prints per cent (:meth:`printed` is shorter)."""
        return pd.DataFrame([{"engine": self.engine, **vars(value)} for value in self.values])

    def printed(self) -> pd.DataFrame:
        """Return the short form, in the tool's own units; ``position`` is "" of totals."""
        return in_units(self.frame()[["name", "position", "value", "low", "high", "unit", "per", "bonus"]])


def in_units(table: pd.DataFrame) -> pd.DataFrame:
    """Turn fractions into per cent where ``unit`` is "%", and position 0 into ""."""
    times = np.where(table["unit"] == "%", 100.0, 1.0)
    numbers = [name for name, kind in table.dtypes.items() if pd.api.types.is_float_dtype(kind)]
    scaled = table.assign(**{name: table[name] * times for name in numbers})
    return scaled.assign(position=[str(k) if k else "" for k in table["position"]])


# ---------------------------------------------------------------------------------------------- what engines count


@dataclass(frozen=True)
class Counts:
    """``table [request, K+1]``: rounds by accepted drafts. All results are [request]."""

    table: np.ndarray

    @property
    def rounds(self) -> np.ndarray:
        """Verify rounds."""
        return self.table.sum(1)

    @property
    def accepted(self) -> np.ndarray:
        """Accepted drafts."""
        return self.table @ np.arange(self.table.shape[1])

    @property
    def tokens(self) -> np.ndarray:
        """Accepted drafts and a bonus token a round."""
        return self.rounds + self.accepted

    @property
    def drafted(self) -> np.ndarray:
        """K drafts a round."""
        return self.rounds * (self.table.shape[1] - 1)

    def reached(self, depth: int) -> np.ndarray:
        """Rounds that accepted ``depth`` drafts or more."""
        return self.table[:, depth:].sum(1)


Measure = Callable[[Counts], np.ndarray]


@dataclass(frozen=True)
class Rounds:
    """Rounds by accepted drafts as an engine may have counted them: a ``Counts`` a scenario.

    The first scenario gives the value, all of them the bounds.
    """

    scenarios: tuple[Counts, ...]

    @classmethod
    def of(
        cls,
        records: Sequence[RequestHistogram],
        *,
        trimmed: bool = False,
        idle: np.ndarray | None = None,
        full: np.ndarray | None = None,
    ) -> Rounds:
        """Count as the verifier sees it: a round that EOS or the limit ended accepted what it emitted, or more, up to K.

        Args:
            records: of one K.
            trimmed: some versions count only drafts that are in the text, less one for the missing bonus token.
            idle: [request], rounds that may be made after the text's end and accept nothing.
            full: [request], rounds that may be made after the text's end and accept everything.
        """
        own, ended = table_of(records, "bonus"), table_of(records, "eos") + table_of(records, "cut")
        most = np.zeros_like(ended)
        most[:, -1] = ended.sum(1)
        tables = [own + ended, own + most]
        if trimmed:
            tables.append(own + np.roll(ended, -1, axis=1))  # none ended at index 0
        for place, late in ((0, idle), (-1, full)):
            if late is not None:
                there = np.zeros_like(ended)
                there[:, place] = late
                tables += [table + there for table in tables]
        return cls(tuple(Counts(table) for table in tables))

    @property
    def depth(self) -> int:
        """K."""
        return self.scenarios[0].table.shape[1] - 1

    def pooled(self, top: Measure, bottom: Measure) -> Interval:
        """Sum over requests / sum over requests."""
        return _bounds(np.array([pooled_ratio(top(counts), bottom(counts)) for counts in self.scenarios]))

    def mean(self, top: Measure, bottom: Measure) -> Interval:
        """Mean of the requests' ratios; every request has scenarios of its own.

        A request is in the mean in the scenarios that give it a ratio, so for the bounds it may be in it or not.
        """
        each = np.array([ratios(top(counts), bottom(counts)) for counts in self.scenarios])
        return Interval(mean_of(each[0]), _smallest_mean(each), -_smallest_mean(-each))

    def sum(self, what: Measure) -> Interval:
        """Sum over requests."""
        return _bounds(np.array([what(counts).sum() for counts in self.scenarios]))


def table_of(records: Sequence[RequestHistogram], kind: str) -> np.ndarray:
    """Counts of one kind of round, [request, K+1]."""
    return np.array([getattr(record, kind) for record in records])


def own_end(records: Sequence[RequestHistogram]) -> np.ndarray:
    """Share of each request that ended in the target's own token: EOS, or the last that the limit lets. [request]"""
    return np.clip(1 - table_of(records, "eos").sum(1) - table_of(records, "cut").sum(1), 0, 1)


def ratios(top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
    """Divide request by request; NaN where the divisor is 0."""
    return np.divide(top, bottom, out=np.full(len(top), np.nan), where=bottom > 0)


def mean_of(values: np.ndarray) -> float:
    """Mean of what is not NaN; NaN of nothing."""
    values = values[~np.isnan(values)]
    return float(values.mean()) if len(values) else float("nan")


def exact(value: float) -> Interval:
    """A value without doubt."""
    return Interval(float(value), float(value), float(value))


def value_of(name: str, quantity: str, x: Interval, about: str, last: str, **more: Any) -> EngineValue:
    """Make a printed number; a NaN gets its reason."""
    reason = "no request has a round that this number counts" if np.isnan(x.value) else ""
    return EngineValue(name, quantity, x.value, x.low, x.high, about, last, reason=reason, **more)


def _bounds(values: np.ndarray) -> Interval:
    """The first scenario's value, and the ends over all scenarios that have one."""
    there = values[~np.isnan(values)]
    return Interval(float(values[0]), float(there.min()), float(there.max())) if len(there) else exact(np.nan)


def _smallest_mean(each: np.ndarray) -> float:
    """Smallest mean over requests of ``each [scenario, request]``; a request that has NaN may be left out."""
    each = each[:, ~np.isnan(each).all(axis=0)]
    if not each.size:
        return float("nan")
    least, open_ = np.nanmin(each, axis=0), np.isnan(each).any(axis=0)
    sure, perhaps = least[~open_], np.sort(least[open_])
    sums, counts = sure.sum() + np.append(0, perhaps.cumsum()), len(sure) + np.arange(len(perhaps) + 1)
    return float((sums[counts > 0] / counts[counts > 0]).min())
