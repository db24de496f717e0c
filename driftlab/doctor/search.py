"""Finding the reading that predicts the text best: factor by factor from the declared one, then pairs.

From the reading held so far every level of every other factor is scored on a few prompts. What is far worse is dropped;
what is left is scored on more, then, while the difference may be of either sign and large enough to matter, on more again,
and the few that do best of these on all. The best reading whose gain is shown, at the level divided by the number of
readings tried, is taken as soon as it is shown, and the search goes on from there. Most factors are independent, so that
one mistake shows while another stands; where no single change helps, pairs are tried: of the levels that did best alone, or
of all where the reading predicts nothing (the 60 whose parts did best).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from driftlab.doctor.evidence import LEAST, LEVEL, Contrast, contrast, information, matching
from driftlab.doctor.factors import Factors, Level
from driftlab.doctor.scoring import Bench, Score
from driftlab.doctor.stored import View
from driftlab.errors import DriftlabError
from driftlab.progress import Progress, silent

_FAR = 0.002
"""p-value at which a few prompts are enough to drop a reading"""
_BEST_OPEN = 4
"""readings that are scored on all text: the best of those that may be better by what matters"""
_DULL = 0.5
"""nats of information below which a reading may be hiding what single changes do"""
_BEST_SINGLES = 4
_PAIRS = 60
_MOVES = 5

Point = dict[str, Level]


@dataclass(eq=False)
class Tried:
    """A reading that was measured: its changes from the one held, and its contrast with that one on the largest text."""

    point: Point
    changes: tuple[Level, ...]
    score: Score
    against: Contrast
    matches: Contrast
    """of the arg max's hits"""
    stage: int


@dataclass
class Search:
    """The state of a search.

    Args:
        factors: what may be changed.
        benches: the same recording, some prompts, more, all.
        progress: called with ("readings", tried, tried + 1) while there may be more.
    """

    factors: Factors
    benches: tuple[Bench, ...]
    progress: Progress = silent
    tried: set[View] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    moves: list[tuple[tuple[Level, ...], float]] = field(default_factory=list)
    """changes taken, and the p-value of each, adjusted for the readings that had been tried by then"""
    _scores: dict[tuple[int, View], Score | None] = field(default_factory=dict)

    def run(self) -> tuple[Point, list[Tried]]:
        """Return the best reading, and what was tried around it at last."""
        point: Point = {}
        for _ in range(_MOVES):
            around = self.singles(point)
            step = self._step(around)
            if step is None:
                pairs = self.pairs(point, around)
                step = self._step(pairs)
                around += pairs
            if step is None:
                return point, around
            self.moves.append((step.changes, min(1.0, step.against.better * len(self.tried))))
            point = step.point
        return point, self.singles(point)

    def singles(self, point: Point) -> list[Tried]:
        """Try every change of one factor."""
        changes = [
            (level,)
            for name, levels in self.factors.levels.items()
            for level in levels
            if level is not self._at(point, name)
        ]
        return self._try(point, changes)

    def pairs(self, point: Point, singles: list[Tried]) -> list[Tried]:
        """Try changes of two factors together."""
        here = self.score(0, self.factors.view(point))
        ordered = sorted(singles, key=lambda tried: -tried.against.mean)
        if here is not None and information(here).mean > _DULL:
            # what makes no difference alone makes none together
            ordered = [t for t in ordered if t.against.mean < -LEAST or t.against.bound(self.level) > LEAST][
                :_BEST_SINGLES
            ]
        pairs = [(a, b) for a, b in itertools.combinations(ordered, 2) if a.changes[0].factor != b.changes[0].factor]
        pairs.sort(key=lambda pair: -sum(tried.against.mean for tried in pair))
        return self._try(point, [(a.changes[0], b.changes[0]) for a, b in pairs[:_PAIRS]])

    def score(self, stage: int, view: View) -> Score | None:
        """Score a reading on a bench, once; None where it cannot be."""
        key = (stage, view)
        if key not in self._scores:
            try:
                self._scores[key] = self.benches[stage].score(view)
            except DriftlabError as error:
                self.failed[str(error)] = str(error)
                self._scores[key] = None
            self.tried.add(view)
            self.progress("readings", len(self.tried), len(self.tried) + 1)
        return self._scores[key]

    def largest(self, *views: View) -> int:
        """Return the largest text on which all of these were scored, the second smallest at least."""
        least = min(1, len(self.benches) - 1)
        there = [s for s in range(len(self.benches)) if all(self._scores.get((s, view)) is not None for view in views)]
        return max([least, *there])

    @property
    def level(self) -> float:
        """Of one comparison."""
        return LEVEL / max(1, len(self.tried))

    def _at(self, point: Point, factor: str) -> Level:
        return point.get(factor, self.factors.levels[factor][0])

    def _step(self, around: list[Tried]) -> Tried | None:
        """Return the best change whose gain is shown."""
        shown = [t for t in around if t.against.mean >= LEAST and t.against.better < self.level and t.matches.mean > 0]
        return max(shown, key=lambda tried: tried.against.mean, default=None)

    def _try(self, point: Point, changes: list[tuple[Level, ...]]) -> list[Tried]:
        here, found = self.factors.view(point), []
        for change in changes:
            there = {**point, **{level.factor: level for level in change}}
            try:
                view = self.factors.view(there)
            except DriftlabError:
                continue  # settings that contradict each other
            if view != here and (tried := self._measure(0, here, there, change)) is not None:
                found.append(tried)
        for stage in range(1, len(self.benches)):
            if self._step(found) is not None:
                return found  # a mistake so plain needs no more text, and all is tried again without it
            wanted = [tried for tried in found if self._unsettled(tried, stage)]
            if stage == len(self.benches) - 1:
                wanted = sorted(wanted, key=lambda tried: -tried.against.mean)[:_BEST_OPEN]
            found = [self._again(here, tried, stage) if tried in wanted else tried for tried in found]
        return found

    def _measure(self, stage: int, here: View, there: Point, change: tuple[Level, ...]) -> Tried | None:
        mine, theirs = self.score(stage, self.factors.view(there)), self.score(stage, here)
        return (
            None
            if mine is None or theirs is None
            else Tried(there, change, mine, contrast(mine, theirs), matching(mine, theirs), stage)
        )

    def _unsettled(self, tried: Tried, stage: int) -> bool:
        """Whether more text may show it to be better, or settle how it stands to the reading held."""
        c = tried.against
        if tried.stage < stage - 1 or c.identical or c.worse < (_FAR if stage == 1 else self.level):
            return False
        return stage == 1 or c.verdict == "open" or c.bound(self.level) > LEAST

    def _again(self, here: View, tried: Tried, stage: int) -> Tried:
        return self._measure(stage, here, tried.point, tried.changes) or tried
