"""What one run of ``all_starts`` leaves behind for the measures of drift: arrays by start, depth, layer and head.

Starts of all prompts stand end to end on the ``start`` axis, the rows of one prompt without a gap. Row t at depth k stands
at position t + k - 1 and is fed token t + k; it is compared with row t + k - 1 at depth 1, which stands at the same position,
is fed the same token (of the text) and has as many keys. Where the answer has no such row, nothing is compared: ``reach``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from driftlab.errors import DriftlabError
from driftlab.intervals import Interval, bootstrap_ratio

_ROUNDING = 1e-4
"""by how much float32 masses of many keys may miss their sum"""


@dataclass(frozen=True, kw_only=True)
class Record:
    """Arrays of one run (one drafter, feed, depth, set of sinks); see :class:`driftlab.drift.recorder.Recorder`.

    Quantities with a depth axis are of depth 1..K. ``prompt``, ``row``: which of ``ids`` a start belongs to, and its absolute
    row. NaN stands only where it is said.

    Raises:
        DriftlabError: no start, arrays that do not fit together, rows with a gap, values that are not finite, masses that are
            none.
    """

    ids: tuple[str, ...]
    prompt: Int[np.ndarray, " start"]
    row: Int[np.ndarray, " start"]
    mass: Float[np.ndarray, "start depth layer head seg"]
    """of the segments SINK, PROMPT, CONTEXT, SELF"""
    recent_first: Float[np.ndarray, "start layer head window"]
    """depth-1 mass on the last 1, 2, ... K - 1 keys"""
    entropy: Float[np.ndarray, "start depth layer head"]
    """nats"""
    visible: Int[np.ndarray, "start depth layer"]
    """number of keys seen"""
    windows: tuple[int, ...]
    recent: Float[np.ndarray, "start depth layer head recent"]
    """mass on the last w keys for each w of ``windows``"""
    rms_fused: Float[np.ndarray, " start"]
    rms_resid: Float[np.ndarray, "start depth"]
    rms_feedback: Float[np.ndarray, "start depth"]
    successive: Float[np.ndarray, "start depth"]
    """cosine of the feedback of depth k and that of depth k - 1; NaN at depth 1"""
    imitation: Float[np.ndarray, "start depth"]
    """cosine of the feedback of depth k and the fusion output of row t + k, whose place it takes; NaN beyond the last row"""
    update: Float[np.ndarray, "start depth"] | None
    """cosine of the feedback of depth k and the target's last-layer update at position t + k; NaN beyond the text; None:
    not asked for"""
    magnitude_share: Float[np.ndarray, "start aux"]
    projection_share: Float[np.ndarray, "start aux"]
    vectors: Float[np.ndarray, "vector depth d_model"]
    """feedback of some starts of every prompt"""
    vector_prompt: Int[np.ndarray, " vector"]
    sinks: tuple[int, ...] = ()
    """positions whose keys are SINK"""
    sees_sink: Bool[np.ndarray, "start depth layer"] | None = None
    """whether a key of the SINK is among those seen (a window may have left it behind); None: always"""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """settings columns of the drafter, for the rows"""

    def __post_init__(self) -> None:
        starts = len(self.row)
        if not starts:
            raise DriftlabError("there is no start to measure: every answer is empty")
        sized = {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        for name, value in sized.items():
            if name not in ("vectors", "vector_prompt") and len(value) != starts:
                raise DriftlabError(f"{name} holds {len(value)} starts, row {starts}: they are of one run")
            if value.ndim > 1 and name not in ("recent_first", "magnitude_share", "projection_share"):
                self._same_depth(name, value)
        if (held := self.recent_first.shape[-1]) != self.depth - 1:
            raise DriftlabError(f"recent_first holds {held} windows, depth {self.depth} wants 1..{self.depth - 1}")
        if not 0 <= self.prompt.min() <= self.prompt.max() < len(self.ids):
            raise DriftlabError(f"prompt: indices into the {len(self.ids)} ids are wanted")
        step, same = np.diff(self.row), np.diff(self.prompt) == 0
        if bool((step[same] != 1).any()) or len(np.unique(self.prompt)) != int((~same).sum()) + 1:
            raise DriftlabError(
                "the rows of a prompt must follow one another without a gap, and its starts lie together"
            )
        self._check_values()

    def _same_depth(self, name: str, value: np.ndarray) -> None:
        if value.shape[1] != self.depth:
            raise DriftlabError(f"{name} is of depth {value.shape[1]}, mass of depth {self.depth}: they are of one run")

    def _check_values(self) -> None:
        never = ("mass", "recent_first", "entropy", "recent", "rms_resid", "rms_feedback", "magnitude_share")
        for name in (*never, "projection_share"):
            value = getattr(self, name)
            bad = ~np.isfinite(value)
            if bad.any():
                start, *rest = np.argwhere(bad)[0].tolist()
                depth = "" if name.endswith("share") or name == "recent_first" else f", depth {rest[0] + 1}"
                raise DriftlabError(
                    f"{name} is not finite: prompt {self.ids[self.prompt[start]]!r}, row {self.row[start]}{depth}. Look for "
                    "NaN or inf in the drafter's weights and in what hooks returned"
                )
        total = self.mass.sum(-1, dtype=np.float64)
        if self.mass.min() < -_ROUNDING or total.max() > 1 + _ROUNDING:
            raise DriftlabError(
                f"masses lie in 0..1 and sum to 1 at most, not {self.mass.min():.3g} and {total.max():.3g}"
            )

    @property
    def depth(self) -> int:
        """K."""
        return self.mass.shape[1]

    @property
    def reach(self) -> Bool[np.ndarray, "start depth"]:
        """Whether the answer has the row t + k - 1, at the position where row t stands at depth k."""
        last = np.zeros(len(self.ids), dtype=np.int64)
        np.maximum.at(last, self.prompt, self.row)
        return self.row[:, None] + np.arange(self.depth) <= last[self.prompt][:, None]

    def pairs(self, depth: int) -> tuple[Int[np.ndarray, " pair"], Int[np.ndarray, " pair"]]:
        """Return the starts that reach ``depth`` and the starts that stand at depth 1 where those stand at ``depth``.

        Raises:
            DriftlabError: a depth that was not run.
        """
        if not 1 <= depth <= self.depth:
            raise DriftlabError(f"depth {depth}: the record holds depths 1..{self.depth}")
        here = np.flatnonzero(self.reach[:, depth - 1])
        return here, here + depth - 1

    def first_row(self) -> Int[np.ndarray, " start"]:
        """Row P - 1 of each start's prompt."""
        first = np.full(len(self.ids), np.iinfo(np.int64).max)
        np.minimum.at(first, self.prompt, self.row)
        return first[self.prompt]

    def sums(
        self, values: Float[np.ndarray, " start"]
    ) -> tuple[Float[np.ndarray, " prompt"], Float[np.ndarray, " prompt"]]:
        """Sum of ``values`` over each prompt's starts and how many there are, in float64; NaN leaves both."""
        there = ~np.isnan(values)
        size = len(self.ids)
        total = np.bincount(self.prompt[there], values[there].astype(np.float64), minlength=size)
        # of no value at all bincount makes whole numbers
        return total.astype(np.float64), np.bincount(self.prompt[there], minlength=size).astype(np.float64)

    def mean(
        self, values: Float[np.ndarray, " start"], *, samples: int = 2000, seed: int = 0, level: float = 0.95
    ) -> Interval:
        """Mean over all starts with its interval over prompts; NaN leaves the mean."""
        return bootstrap_ratio(*self.sums(values), samples=samples, seed=seed, level=level)
