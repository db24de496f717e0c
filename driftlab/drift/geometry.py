r"""Size and direction of the feedback: growth, slope, shares of the aux states, cosines, effective rank.

    growth_k = sum RMS_k / sum RMS_1 over the starts that reach k     slope = OLS slope of ln RMS_k on k, per start
    W_fc [a_1, .., a_n] = sum_i c_i,   c_i = W_i a_i:
        magnitude share  ||c_i|| / sum_j ||c_j||       projection share  c_i . g / ||g||^2,  g = sum_j c_j   (sums to 1)
    effective rank = exp(- sum p_i ln p_i),   p_i = sigma_i / sum sigma_j

sigma: singular values of the rows less their mean (Roy & Vetterli 2007, on centred rows: a shared direction, of which residual
streams have a large one, is not what tells starts apart).
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from driftlab.drift.record import Record
from driftlab.errors import DriftlabError
from driftlab.intervals import Interval, bootstrap_ratio, percentile_interval

_NO_SPREAD = 1e-6
"""rows whose spread is below this share of their size are one vector up to float32 rounding"""


def contributions(
    aux: Float[Tensor, "*batch aux d_target"], weight: Float[Tensor, "d_model fused"]
) -> Float[Tensor, "*batch aux d_model"]:
    """What each aux state adds to the fused vector, W_i a_i, in float64. ``weight`` is that of fc, its columns by state.

    Raises:
        DriftlabError: a weight of another width than all states together.
    """
    states, width = aux.shape[-2:]
    if weight.shape[1] != states * width:
        raise DriftlabError(f"fc takes {weight.shape[1]} inputs, {states} states of width {width} are given")
    by_state = weight.double().view(weight.shape[0], states, width)
    return torch.einsum("...aw,daw->...ad", aux.double(), by_state)


def magnitude_shares(parts: Float[Tensor, "*batch aux d_model"]) -> Float[Tensor, "*batch aux"]:
    """||c_i|| over the sum of all: 0..1, sums to 1. NaN where all are 0."""
    size = parts.double().norm(dim=-1)
    return size / size.sum(-1, keepdim=True)


def projection_shares(parts: Float[Tensor, "*batch aux d_model"]) -> Float[Tensor, "*batch aux"]:
    """c_i . g / ||g||^2 of the sum g: signed, sums to 1. NaN where g is 0."""
    parts = parts.double()
    whole = parts.sum(-2, keepdim=True)
    return (parts * whole).sum(-1) / whole.square().sum(-1)


def cosine(a: Float[Tensor, "*batch width"], b: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch"]:
    """Cosine over the last axis, in float64; NaN where either is 0."""
    a, b = a.double(), b.double()
    return ((a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))).clamp(-1, 1)


def growth(record: Record, depth: int, *, samples: int = 2000, seed: int = 0) -> Interval:
    """Factor by which the feedback's RMS at ``depth`` exceeds that of depth 1, over the starts that reach ``depth``."""
    top, bottom = growth_sums(record, depth)
    return bootstrap_ratio(top, bottom, samples=samples, seed=seed)


def growth_sums(record: Record, depth: int) -> tuple[Float[np.ndarray, " prompt"], Float[np.ndarray, " prompt"]]:
    """Sum over each prompt's starts that reach ``depth`` of RMS_depth and of RMS_1."""
    here, _ = record.pairs(depth)
    sums = []
    for k in (depth, 1):
        values = np.full(len(record.row), np.nan)
        values[here] = record.rms_feedback[here, k - 1]
        sums.append(record.sums(values)[0])
    return sums[0], sums[1]


def log_slopes(record: Record, depth: int) -> Float[np.ndarray, " start"]:
    """Least-squares slope of ln RMS of the feedback on depth, 1..``depth``, of each start that reaches it; NaN otherwise.

    Raises:
        DriftlabError: depth 1, which has no slope; a feedback of 0.
    """
    if depth < 2:
        raise DriftlabError("a slope against depth wants two depths at least")
    here, _ = record.pairs(depth)
    size = record.rms_feedback[here, :depth].astype(np.float64)
    if size.size and size.min() <= 0:
        start, k = np.argwhere(size <= 0)[0].tolist()
        raise DriftlabError(
            f"the feedback is 0: prompt {record.ids[record.prompt[here[start]]]!r}, row {record.row[here[start]]}, depth "
            f"{k + 1}; its logarithm has no value"
        )
    ks = np.arange(1, depth + 1) - (depth + 1) / 2
    out = np.full(len(record.row), np.nan)
    out[here] = np.log(size) @ ks / (ks @ ks)
    return out


def effective_rank(
    rows: Float[np.ndarray, "vector width"], weights: Float[np.ndarray, " vector"] | None = None
) -> float:
    """exp of the entropy of the normalised singular values of ``rows`` less their mean: 1..min(rows - 1, width).

    ``weights``: how often each row counts. NaN of rows that are all one vector, whose singular values are all 0.
    """
    rows = rows.astype(np.float64)
    weights = np.ones(len(rows)) if weights is None else weights
    rows, weights = rows[weights > 0], weights[weights > 0]
    if len(rows) < 2:
        return float("nan")
    centred = rows - np.average(rows, axis=0, weights=weights)
    spread, size = (weights @ np.square(x).sum(1) for x in (centred, rows))
    if spread <= (_NO_SPREAD**2) * size:
        return float("nan")
    scaled = centred * np.sqrt(weights)[:, None]
    gram = scaled @ scaled.T if len(scaled) < scaled.shape[1] else scaled.T @ scaled
    sigma = np.sqrt(np.maximum(np.linalg.eigvalsh(gram), 0))
    p = sigma / sigma.sum()
    p = p[p > 0]
    return float(np.exp(-(p * np.log(p)).sum()))


def spread_share(rows: Float[np.ndarray, "vector width"], weights: Float[np.ndarray, " vector"] | None = None) -> float:
    """Share of the rows' mean square that is left when their mean is taken off: 0 for one vector, 1 for rows around 0.

    Rows are scaled to length 1 first, so that what counts is direction. NaN of no row, or of a row of 0.
    """
    rows = rows.astype(np.float64)
    weights = np.ones(len(rows)) if weights is None else weights
    size = np.linalg.norm(rows, axis=1, keepdims=True)
    if not weights.sum() or (size == 0).any():
        return float("nan")
    mean = np.average(rows / size, axis=0, weights=weights)
    return float(max(1 - mean @ mean, 0))


def spread_kept(record: Record, depth: int, *, samples: int = 200, seed: int = 0) -> Interval:
    """:func:`spread_share` of the feedback at ``depth`` over that at depth 1, with its interval over prompts.

    NaN where depth 1 has no spread.
    """
    record.pairs(depth)  # refuses a depth that was not run

    def ratio(weights: np.ndarray) -> float:
        first = spread_share(record.vectors[:, 0], weights)
        return spread_share(record.vectors[:, depth - 1], weights) / first if first > _NO_SPREAD else float("nan")

    def statistic(chosen: np.ndarray) -> np.ndarray:
        times = [np.bincount(row, minlength=len(record.ids)) for row in chosen]
        return np.array([ratio(row[record.vector_prompt].astype(np.float64)) for row in times])

    value, informative = ratio(np.ones(len(record.vectors))), len(np.unique(record.vector_prompt))
    return percentile_interval(value, statistic, len(record.ids), informative, samples, seed, 0.95)
