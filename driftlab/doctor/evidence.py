r"""Is one reading better than another? Paired differences of scores, prompts being the units.

With d_i the sum over a prompt's starts and depths of the difference of two readings' scores and n_i their number,

    D = sum d_i / sum n_i,      r_i = d_i - D n_i,      SE = sqrt(m / (m - 1) sum r_i^2) / sum n_i,

m prompts, and D / SE is compared with Student's t of m - 1 degrees of freedom. The level is divided by the number of readings
that were tried (Bonferroni). It is spent anew where more prompts are looked at and where pairs follow single changes, at most
eight times in a diagnosis, mostly on the same prompts: what the share of honest files that are doubted comes to is measured. A
reading that gains likelihood while its arg max does not hit the text more often is less sure, not right: not taken.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import stdtr, stdtrit

from driftlab.doctor.scoring import Score
from driftlab.errors import DriftlabError
from driftlab.intervals import Interval, bootstrap_ratio

LEVEL = 0.05
"""of taking a reading that is no better, over all readings tried, at one look"""
LEAST = 0.02
"""nats a token: a smaller gain is no reason to read a file otherwise"""
ONE_SIDED = 0.025
"""level of the bound by which a reading is told to be worse, or not to matter"""
SAME = 2e-4
"""nats: two readings whose scores differ nowhere by more are one"""
POWER = 0.8


@dataclass(frozen=True)
class Contrast:
    """Reading a against reading b: ``mean`` difference of the scores in nats a token, its standard error, prompts, tokens."""

    mean: float
    error: float
    prompts: int
    tokens: int
    identical: bool
    sums: tuple[tuple[float, float], ...]
    """d_i and n_i of each prompt"""
    by_depth: tuple[float, ...]
    """the mean at depth 1, 2, ... alone"""

    @property
    def t(self) -> float:
        """The mean in standard errors; 0 where prompts do not differ at all: then nothing is known of its error."""
        return self.mean / self.error if self.error else 0.0

    @property
    def better(self) -> float:
        """p-value of "a is not better than b", of this comparison alone."""
        return float(stdtr(self.prompts - 1, -self.t))

    @property
    def worse(self) -> float:
        """p-value of "a is not worse than b"."""
        return float(stdtr(self.prompts - 1, self.t))

    @property
    def verdict(self) -> str:
        """same (no text can tell), no matter (less than :data:`LEAST` either way), worse, or open (this text does not tell)."""
        if self.identical:
            return "same"
        spread = self.error * float(stdtrit(self.prompts - 1, 1 - ONE_SIDED))
        if abs(self.mean) + spread < LEAST:
            return "no matter"
        return "worse" if self.worse < ONE_SIDED else "open"

    def bound(self, level: float) -> float:
        """Return the upper end of the one-sided interval of the mean."""
        return self.mean + self.error * float(stdtrit(self.prompts - 1, 1 - level))

    def interval(self) -> Interval:
        """Return the mean with its 95 % bootstrap interval over prompts."""
        sums = np.array(self.sums)
        return bootstrap_ratio(sums[:, 0], sums[:, 1])

    def tokens_wanted(self, level: float) -> int:
        """Return about how many more answer tokens would show a difference as large as this, with a power of 0.8."""
        if not self.mean > 0:
            return 0
        wanted = (float(stdtrit(self.prompts - 1, 1 - level)) + float(stdtrit(self.prompts - 1, POWER))) / self.t
        return max(0, int(np.ceil(self.tokens * (wanted**2 - 1))))

    def tokens_to_settle(self, level: float) -> int:
        """Return about how many more answer tokens would show that the difference does not matter, if there is none."""
        wanted = self.error * float(stdtrit(self.prompts - 1, 1 - level)) / LEAST
        return max(0, int(np.ceil(self.tokens * (wanted**2 - 1))))


def contrast(a: Score, b: Score) -> Contrast:
    """Compare two readings on the same text.

    Raises:
        DriftlabError: fewer than two prompts, or other texts.
    """
    return _contrast(a.log_q.double() - b.log_q.double(), a)


def matching(a: Score, b: Score) -> Contrast:
    """Compare how often the arg max of two readings is the text's token; the mean is a share, not nats."""
    return _contrast(a.match.double() - b.match.double(), a)


def information(score: Score) -> Contrast:
    """Compare a reading's score of the text with that of text from elsewhere."""
    return _contrast(score.log_q.double() - score.chance.double(), score)


def _contrast(difference: object, score: Score) -> Contrast:
    valid = score.valid
    if difference.shape != valid.shape:
        raise DriftlabError("two readings are compared on the same starts and depths")
    d = (difference * valid).sum((1, 2)).numpy()
    n = valid.sum((1, 2)).numpy().astype(float)
    d, n = d[n > 0], n[n > 0]
    m = len(n)
    if m < 2:
        raise DriftlabError(f"{m} prompt(s) with answers: readings are compared over prompts, record several")
    mean = d.sum() / n.sum()
    spread = d - mean * n
    error = float(np.sqrt(m / (m - 1) * (spread**2).sum()) / n.sum())
    identical = bool((difference.abs() * valid).max() <= SAME)
    sums = tuple(zip(d.tolist(), n.tolist(), strict=True))
    by_depth = tuple(((difference * valid).sum((0, 1)) / valid.sum((0, 1))).tolist())
    return Contrast(float(mean), error, m, int(valid[..., 0].sum()), identical, sums, by_depth)
