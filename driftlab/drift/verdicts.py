r"""One word for a drafter: does it apply the same predictor at every depth, or does depth matter?

Seven signs, each a number with its interval over prompts; T is the trained depth, D = 2 T:

    sign               what it measures                                                    same within
    spread             spread of the feedback's direction, depth T over 1                  collapse ..
    accuracy_trained   match at T over match at 1, same starts                             collapse ..
    magnitude          slope of ln RMS of the feedback on depth, 1..D                      -slope .. slope
    sink               sink loss at D, mean of layers and heads                            -moved .. moved
    self               self gain over the null at D, likewise                              -moved .. moved
    attention          drift (TV) at D less its null, likewise                             .. moved
    accuracy_beyond    match at D over match at T, same starts                             kept ..

A sign is "same" or "changed" where its whole interval lies inside or on one side outside, and "open" where the interval
covers a threshold or there is none (fewer than two prompts, no start that deep, nothing to divide by). Then, in this order:

    collapsed         spread or accuracy_trained has changed: within its trained depth the drafter no longer tells starts
                      apart, or no longer predicts
    depth-specific    another sign has changed
    depth-invariant   all seven are the same
    undecided         otherwise

``sink`` and ``self`` are signed and see where attention goes on the whole; ``attention`` also sees heads that move to and fro,
but only beyond what one row of text moves, which is much.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from driftlab.acceptance import Acceptance
from driftlab.drift import distances, geometry
from driftlab.drift.extrapolation import match_kept
from driftlab.drift.record import Record
from driftlab.drift.tables import excess, sink_before
from driftlab.errors import DriftlabError
from driftlab.intervals import Interval
from driftlab.segments import Segment

State = Literal["same", "changed", "open"]
Word = Literal["depth-invariant", "depth-specific", "collapsed", "undecided"]


@dataclass(frozen=True)
class Thresholds:
    """Where the same ends and change begins; conventions, not facts.

    ``slope``: by how much ln RMS of the feedback may change a depth, so that drafters of other trained depths are judged
    alike. ``moved``: attention mass that may leave the sink or go to own keys, and total variation beyond that from one row of
    text to the next. ``kept``: share of the accuracy at the trained depth that must be left at twice it. ``collapse``: share of
    depth 1's spread, and of its accuracy, that must be left at the trained depth.

    Raises:
        DriftlabError: values outside slope > 0, 0 <= moved < 1, 0 < kept <= 1, 0 < collapse <= 1.
    """

    slope: float = 0.05
    moved: float = 0.1
    kept: float = 0.5
    collapse: float = 0.1

    def __post_init__(self) -> None:
        if not (self.slope > 0 and 0 <= self.moved < 1 and 0 < self.kept <= 1 and 0 < self.collapse <= 1):
            raise DriftlabError(f"{self}: slope > 0, 0 <= moved < 1, 0 < kept <= 1, 0 < collapse <= 1")


@dataclass(frozen=True)
class Sign:
    """One sign: what it measures, its interval, between what values it is the same, and how it came out."""

    name: str
    interval: Interval
    least: float
    most: float
    state: State


@dataclass(frozen=True)
class Verdict:
    """The word, the signs that it follows from, and the depths T and D that they were taken at. ``notes``: what to keep in mind
    beside it.
    """

    word: Word
    signs: tuple[Sign, ...]
    trained: int
    beyond: int
    notes: tuple[str, ...] = ()

    @property
    def because(self) -> tuple[str, ...]:
        """Names of the signs that decide: those that changed, or, of an undecided drafter, those that are open."""
        state = {"collapsed": "changed", "depth-specific": "changed", "undecided": "open", "depth-invariant": "same"}
        return tuple(sign.name for sign in self.signs if sign.state == state[self.word])


def verdict(
    record: Record,
    acceptance: Acceptance,
    trained: int,
    thresholds: Thresholds | None = None,
    *,
    samples: int = 2000,
    seed: int = 0,
) -> Verdict:
    """Judge a drafter from one run's record and its text-fed drafts, both of the same prompts and at least 2 T deep.

    Args:
        record: of either feed; the text's isolates depth, for then the row at the same position is fed the same token.
        acceptance: of text-fed drafts.
        trained: T, the depth that training unrolled to (``drafter.config.ttt``); 1 for a drafter that was never fed back.
        thresholds: where the same ends.
        samples: resamples of the intervals.
        seed: of the resamples.

    Raises:
        DriftlabError: a trained depth below 1; prompts or starts that differ; runs that are not deep enough; a feedback of 0.
    """
    limit = thresholds or Thresholds()
    beyond = 2 * trained
    if trained < 1:
        raise DriftlabError(f"trained depth {trained}: how deep was the drafter unrolled in training (ttt)?")
    if record.depth < beyond or acceptance.depth < beyond:
        raise DriftlabError(
            f"a verdict looks at depth {beyond}, twice the trained depth; the record holds {record.depth}, the drafts "
            f"{acceptance.depth}: run deeper"
        )
    _check_same(record, acceptance)
    options = {"samples": samples, "seed": seed}
    spread = geometry.spread_kept(record, trained, samples=max(samples // 10, 1), seed=seed)
    slopes = geometry.log_slopes(record, beyond)
    shift = {part: distances.over_heads(distances.segment_gain(record, beyond, part)) for part in Segment}
    signs = (
        sign("spread", spread, least=limit.collapse),
        sign("accuracy_trained", match_kept(acceptance, 1, trained, **options), least=limit.collapse),
        sign("magnitude", record.mean(slopes, **options), least=-limit.slope, most=limit.slope),
        sign("sink", record.mean(-shift[Segment.SINK], **options), least=-limit.moved, most=limit.moved),
        sign("self", record.mean(shift[Segment.SELF], **options), least=-limit.moved, most=limit.moved),
        sign("attention", record.mean(excess(record, beyond), **options), most=limit.moved),
        sign("accuracy_beyond", match_kept(acceptance, trained, beyond, **options), least=limit.kept),
    )
    return Verdict(word_of(signs), signs, trained, beyond, _notes(record, beyond, limit))


def _notes(record: Record, beyond: int, limit: Thresholds) -> tuple[str, ...]:
    held = record.mean(sink_before(record, beyond)).value
    if np.isnan(held):
        return ("no start sees the sink at both depths (a window has left it behind): of its mass nothing is said",)
    if held >= limit.moved:
        return ()
    return (f"at depth 1 the sink holds {held:.3g}, less than the threshold {limit.moved:g}: it cannot lose so much",)


def sign(name: str, interval: Interval, *, least: float = -np.inf, most: float = np.inf) -> Sign:
    """Judge one interval: "same" inside least..most, "changed" wholly on one side outside, else "open".

    An interval of no width counts: prompts that agree to the last bit leave no doubt that resampling could show.
    """
    low, high = interval.low, interval.high
    state: State = "open"
    if least <= low and high <= most:
        state = "same"
    elif high < least or low > most:
        state = "changed"
    return Sign(name, interval, float(least), float(most), state)


def word_of(signs: tuple[Sign, ...]) -> Word:
    """Return the word that the signs amount to."""
    changed = {sign.name for sign in signs if sign.state == "changed"}
    if changed & {"spread", "accuracy_trained"}:
        return "collapsed"
    if changed:
        return "depth-specific"
    return "depth-invariant" if all(sign.state == "same" for sign in signs) else "undecided"


def _check_same(record: Record, acceptance: Acceptance) -> None:
    judged = acceptance.valid[..., 0]  # the answer's last row drafts what the text does not have
    rows, prompts = acceptance.rows[judged].numpy(), judged.nonzero()[:, 0].numpy()
    here = record.reach[:, 1]
    same = np.array_equal(record.row[here], rows) and np.array_equal(record.prompt[here], prompts)
    if record.ids != acceptance.ids or not same:
        raise DriftlabError("the record and the drafts are of other prompts, in another order, or of other starts")
