r"""Accuracy by depth, and what is left of it beyond the trained depth.

    match_k        share of all starts at which the arg-max draft of depth k is the text's token, text-fed
    conditional_k  of the rounds that accepted k - 1 drafts, the share that accepted k       (survivors)
    kept(a, b)     the same quantity at depth b over that at depth a; match over the starts that can be judged at b

Conditional acceptance may rise while the drafter gets worse, for only easy places survive; match cannot. So they stand
side by side. Both are counted by :mod:`driftlab.acceptance` and :mod:`driftlab.simulation`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from jaxtyping import Float

from driftlab.acceptance import Acceptance
from driftlab.errors import DriftlabError
from driftlab.intervals import Interval, bootstrap_ratio, percentile_interval
from driftlab.results import as_rows
from driftlab.simulation import Expected, Simulation

MULTIPLES = (2, 4)
"""of the trained depth: where extrapolation is looked at"""


def match_kept(acceptance: Acceptance, before: int, after: int, *, samples: int = 2000, seed: int = 0) -> Interval:
    """match at depth ``after`` over match at ``before``, on the same starts: those that both depths can be judged at.

    NaN where no start reaches ``after`` or none matches at ``before``.

    Raises:
        DriftlabError: depths that were not drafted; trees; drafts that were not fed the text.
    """
    _check(acceptance, before, after)
    deeper = max(before, after)
    judged = acceptance.valid[..., deeper - 1]
    counts = [(acceptance.match[..., k - 1] & judged).sum(1).numpy() for k in (after, before)]
    return bootstrap_ratio(*counts, samples=samples, seed=seed)


def conditional_kept(
    simulation: Simulation | Expected, before: int, after: int, *, samples: int = 2000, seed: int = 0
) -> Interval:
    """Conditional acceptance at depth ``after`` over that at ``before``, over the rounds of the walk.

    NaN where no round was judged at one of them, or none accepted at ``before``. Raises as :func:`match_kept` does.
    """
    _check(simulation.acceptance, before, after)
    counts = [_by_depth(simulation, depth) for depth in (after, before)]
    return ratio_of_ratios(*counts[0], *counts[1], samples=samples, seed=seed)


def _by_depth(simulation: Simulation | Expected, depth: int) -> tuple[np.ndarray, np.ndarray]:
    both = [simulation.by_depth(i) for i in range(len(simulation.acceptance.ids))]
    return tuple(np.array([counts[side][depth - 1] for counts in both], dtype=np.float64) for side in (0, 1))


def _check(acceptance: Acceptance, *depths: int) -> None:
    if acceptance.tree is not None or acceptance.feed != "text":
        raise DriftlabError('accuracy by depth is that of chains fed the text: all_starts(..., feed="text")')
    if wrong := [depth for depth in depths if not 1 <= depth <= acceptance.depth]:
        raise DriftlabError(f"depth {wrong[0]}: drafts are of depths 1..{acceptance.depth}; draft deeper")


def ratio_of_ratios(
    top_a: Float[np.ndarray, " prompt"],
    bottom_a: Float[np.ndarray, " prompt"],
    top_b: Float[np.ndarray, " prompt"],
    bottom_b: Float[np.ndarray, " prompt"],
    *,
    samples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Pooled ratio a over pooled ratio b, paired: both over the same resampled prompts. NaN where b is 0 or has nothing."""
    parts = np.stack([top_a, bottom_a, top_b, bottom_b])

    def ratio(chosen: np.ndarray) -> np.ndarray:
        sums = parts[:, chosen].sum(-1)
        below = sums[1] * sums[2]
        return np.divide(sums[0] * sums[3], below, out=np.full(below.shape, np.nan), where=below != 0)

    everything = np.arange(parts.shape[1])[None]
    informative = int(min((parts[1] > 0).sum(), (parts[3] > 0).sum()))
    return percentile_interval(float(ratio(everything)[0]), ratio, parts.shape[1], informative, samples, seed, 0.95)


def accuracy_rows(
    simulation: Simulation | Expected, trained: int, multiples: Sequence[int] = MULTIPLES, **settings: object
) -> pd.DataFrame:
    """Tidy rows, pooled with intervals: ``match`` and ``accept_conditional`` by depth side by side, and ``match_kept`` and
    ``conditional_kept`` at the multiples of the trained depth that were drafted (``window`` is the trained depth there).

    ``settings`` fill settings columns. ``starts`` is set here: "all" for match, "walk" for conditional acceptance.

    Raises:
        DriftlabError: trained below 1; what :func:`match_kept` refuses.
    """
    acceptance = simulation.acceptance
    if trained < 1:
        raise DriftlabError(f"trained depth {trained}: how deep was the drafter unrolled in training (ttt)?")
    _check(acceptance)
    everywhere, walk = [], []
    for k in range(1, acceptance.depth + 1):
        matches, judged = acceptance.match[..., k - 1].sum(1).numpy(), acceptance.valid[..., k - 1].sum(1).numpy()
        everywhere.append(_row("match", k, bootstrap_ratio(matches, judged).within(0, 1), judged.sum()))
        passed, reached = _by_depth(simulation, k)
        walk.append(_row("accept_conditional", k, bootstrap_ratio(passed, reached).within(0, 1), reached.sum()))
    for k in (trained * multiple for multiple in multiples):
        if k > acceptance.depth:
            continue
        judged = acceptance.valid[..., k - 1].sum()
        kept = match_kept(acceptance, trained, k).within(0, np.inf)
        everywhere.append(_row("match_kept", k, kept, judged, window=trained))
        kept = conditional_kept(simulation, trained, k).within(0, np.inf)
        walk.append(_row("conditional_kept", k, kept, _by_depth(simulation, k)[1].sum(), window=trained))
    common = {"depth_max": acceptance.depth, "feed": "text", **settings}
    return pd.concat(
        [as_rows(everywhere, **common, starts="all"), as_rows(walk, **common, starts="walk")], ignore_index=True
    )


def _row(quantity: str, depth: int, interval: Interval, n: object, **keys: int) -> dict[str, object]:
    ends = {"value": interval.value, "low": interval.low, "high": interval.high}
    return {"quantity": quantity, "depth": depth, "n": float(n), **ends, **keys}
