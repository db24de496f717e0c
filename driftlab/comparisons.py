r"""Are two variants different? Paired tests of tau on the same prompts, and the smallest difference they would show.

Prompts are the independent units. With E_i, R_i the emitted tokens and verify rounds of prompt i, tau = sum E / sum R and

    difference D = tau_a - tau_b
    p            share of relabellings, in each of which every prompt's (E_i, R_i) pairs of a and b are swapped or not, with
                 |D*| >= |D|. All 2^n if they are few, else a random sample with the observed one counted among it.
    interval     bootstrap over prompts (driftlab.simulation.difference)
    mdd          minimum detectable difference: effect x s, s the standard deviation over prompts of the linearised paired
                 differences d_i = (E_ai - tau_a R_ai) / mean R_a - (E_bi - tau_b R_bi) / mean R_b, and effect that at which
                 a two-sided paired t test of n prompts has the power asked for.

The relabelling test keeps the statistic as it is, a ratio, and needs no normality; it is exact if the two labels of a prompt
are exchangeable when nothing differs, and holds for many prompts if only tau is the same. Its p is never below 2^(1-m), m the
prompts whose counts differ (swapping the others changes nothing), so few of them cannot show anything. p-values of one table
are adjusted for their number (Holm; statsmodels).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import pandas as pd
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import TTestPower

from driftlab.errors import DriftlabError
from driftlab.intervals import pooled_ratio
from driftlab.simulation import Expected, Simulation, difference

_ROUNDING = 1e-9
_BLOCK = 2_000_000


def compare(
    simulations: Mapping[str, Simulation | Expected],
    base: str | None = None,
    *,
    method: str = "holm",
    level: float = 0.05,
    power: float = 0.8,
    relabellings: int = 20000,
    samples: int = 2000,
    seed: int = 0,
) -> pd.DataFrame:
    """Compare tau of variants on the same prompts: each with ``base``, or all pairs.

    Args:
        simulations: variant to replay.
        base: one of them; None: every pair, the earlier one as base.
        method: of adjusting p-values, as ``statsmodels.stats.multitest.multipletests`` names them.
        level: of the tests; ``mdd`` is for one test at it (pass level / number of tests for what survives any adjustment).
        power: probability with which a difference of ``mdd`` is found.
        relabellings: all if there are no more than this, else so many at random.
        samples: of the bootstrap.
        seed: of both.

    Returns:
        One row a comparison: ``name``, ``base``, ``difference`` (tau of name - tau of base), ``low``, ``high`` (95 %), ``p``,
        ``p_adjusted``, ``mdd``, ``prompts`` (those with rounds), ``reason`` (why a number is missing or cannot be small).

    Raises:
        DriftlabError: fewer than two variants, an unknown base, or replays of other texts.
    """
    if len(simulations) < 2 or (base is not None and base not in simulations):
        raise DriftlabError(
            f"compare wants two variants or more, the base among them: {list(simulations)}, base {base!r}"
        )
    others = [(name, base) for name in simulations if name != base]
    pairs = [(b, a) for a, b in itertools.combinations(simulations, 2)] if base is None else others
    lines = []
    for name, against in pairs:
        a, b = simulations[name], simulations[against]
        interval = difference(a, b, samples=samples, seed=seed)
        counts = paired_counts(a, b)
        p = relabelling_p(counts, relabellings=relabellings, seed=seed)
        mdd, reason = detectable(counts, level=level, power=power)
        line = {"name": name, "base": against, "difference": interval.value, "low": interval.low, "high": interval.high}
        lines.append({**line, "p": p, "p_adjusted": p, "mdd": mdd, "prompts": len(counts), "reason": reason})
    frame = pd.DataFrame(lines)
    frame["p_adjusted"] = adjusted(frame["p"].to_numpy(), method=method)
    return frame


def paired_counts(a: Simulation | Expected, b: Simulation | Expected) -> np.ndarray:
    """Return [prompt, 4]: emitted and rounds of a, then of b, of the prompts in which one of them has rounds that count."""
    counts = np.stack([a.emitted, a.verify_rounds, b.emitted, b.verify_rounds], 1).astype(float)
    return counts[(counts[:, 1] > 0) | (counts[:, 3] > 0)]


def relabelling_p(counts: np.ndarray, *, relabellings: int = 20000, seed: int = 0) -> float:
    """Return the two-sided p-value of the difference of two pooled ratios, paired by prompt.

    Args:
        counts: [prompt, 4], numerator and denominator of a, then of b.
        relabellings: all 2^n if there are no more than this, else so many at random (one of them the observed).
        seed: of those at random.

    Returns:
        NaN for fewer than two prompts; 1 if no prompt differs.
    """
    prompts = len(counts)
    if prompts < 2:
        return float("nan")
    seen = abs(float(_differences(counts, np.zeros((1, prompts), dtype=bool))[0]))
    if np.isnan(seen):
        return float("nan")
    every = 2**prompts <= relabellings
    if every:
        swaps = (np.arange(2**prompts)[:, None] >> np.arange(prompts)) & 1 == 1
        drawn = _differences(counts, swaps)
    else:
        generator, block = np.random.default_rng(seed), max(1, _BLOCK // prompts)
        sizes = [min(block, relabellings - 1 - at) for at in range(0, relabellings - 1, block)]
        drawn = np.concatenate([_differences(counts, generator.random((size, prompts)) < 0.5) for size in sizes])
    # one without any round on a side says nothing, and must not make p smaller
    extreme = np.isnan(drawn) | (np.abs(drawn) >= seen - _ROUNDING)
    return float((extreme.sum() + (not every)) / (len(drawn) + (not every)))


def _differences(counts: np.ndarray, swaps: np.ndarray) -> np.ndarray:
    """Difference of the pooled ratios for each row of ``swaps [relabelling prompt]``."""
    gained = swaps.astype(float) @ (counts[:, 2:] - counts[:, :2])
    mine, theirs = counts[:, :2].sum(0) + gained, counts[:, 2:].sum(0) - gained
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = mine[:, 0] / mine[:, 1] - theirs[:, 0] / theirs[:, 1]
    return np.where((mine[:, 1] > _ROUNDING) & (theirs[:, 1] > _ROUNDING), drawn, np.nan)


def linearised(counts: np.ndarray) -> np.ndarray:
    """Return d_i of each prompt (above), whose mean is 0 and whose standard error is that of the difference; NaN if none."""
    d = np.zeros(len(counts))
    for sign, (top, bottom) in ((1, (counts[:, 0], counts[:, 1])), (-1, (counts[:, 2], counts[:, 3]))):
        if not bottom.sum():
            return np.full(len(counts), np.nan)
        d = d + sign * (top - pooled_ratio(top, bottom) * bottom) / bottom.mean()
    return d


def detectable(counts: np.ndarray, *, level: float = 0.05, power: float = 0.8) -> tuple[float, str]:
    """Return the minimum detectable difference for these prompts, and why there is none or "".

    NaN where the spread is unknown, infinite where so few prompts, or so few that differ, cannot reach ``level`` whatever they
    show.
    """
    prompts, d = len(counts), linearised(counts)
    if prompts < 2:
        return float("nan"), f"{prompts} prompt(s) with rounds: a paired test wants two or more"
    if np.isnan(d).any():
        return float("nan"), "a variant without any complete round"
    if 2.0 ** (1 - prompts) > level:
        return float("inf"), f"with {prompts} prompts p is at least {2.0 ** (1 - prompts):.2g}, above {level:g}"
    differ = int((~np.isclose(counts[:, :2], counts[:, 2:], rtol=_ROUNDING, atol=_ROUNDING)).any(1).sum())
    if not differ:
        return float("nan"), "no prompt differs"
    if (least := 2.0 ** (1 - differ)) > level:
        return float("inf"), f"{differ} of {prompts} prompts differ: p is at least {least:.3g}, above {level:g}"
    spread = float(d.std(ddof=1))
    if spread <= _ROUNDING:
        return float("nan"), "every prompt differs by as much: the spread is unknown"
    effect = TTestPower().solve_power(nobs=prompts, alpha=level, power=power, alternative="two-sided")
    return float(np.ravel(effect)[0]) * spread, ""


def adjusted(p: np.ndarray, *, method: str = "holm") -> np.ndarray:
    """Return p-values adjusted for their number; NaN stay NaN and do not count."""
    p = np.asarray(p, dtype=float)
    out, known = p.copy(), ~np.isnan(p)
    if known.any():
        out[known] = multipletests(p[known], method=method)[1]
    return out
