"""How a token is chosen from logits: temperature, top-k, top-p, and one uniform number.

What a verifier compares are *processed* probabilities: those after temperature and cuts (with raw ones acceptance is wrong
and the text is no longer the target's: transformers#47932).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from driftlab.errors import DriftlabError


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 are off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise DriftlabError(f"{self}: temperature and top_k must be >= 0, top_p in (0, 1]; all finite")

    def process(self, logits: Float[Tensor, "row vocab"]) -> Float[Tensor, "row vocab"]:
        """Return the processed distribution: temperature, then top-k, then top-p, renormalised. Greedy: one-hot."""
        if self.temperature == 0:
            return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1)
        scores = logits.double() / self.temperature
        if self.top_k:
            kth = scores.topk(min(self.top_k, scores.shape[-1])).values[:, -1:]
            scores = scores.masked_fill(scores < kth, -torch.inf)
        p = scores.softmax(-1)
        if self.top_p < 1:
            ordered = p.sort(-1, descending=True).values
            # a token stays if the mass before it is below top_p (the first one always does), or if it is as likely as one
            # that stays: which of equals a sort puts first is chance
            outside = ordered.cumsum(-1) - ordered >= self.top_p
            edge = ordered.masked_fill(outside, torch.inf).amin(-1, keepdim=True)
            p = p.masked_fill(p < edge, 0)
            p = p / p.sum(-1, keepdim=True)
        return p.to(logits.dtype)


def draw(p: Float[Tensor, "row vocab"], u: Float[Tensor, " row"]) -> Int[Tensor, " row"]:
    """Return the token of each row at which the cumulative distribution passes ``u`` in [0, 1)."""
    cumulative = p.double().cumsum(-1)
    chosen = torch.searchsorted(cumulative, (u.double() * cumulative[:, -1])[:, None], right=True)[:, 0]
    # a row that is not finite has no place for u; whoever made it is told elsewhere
    return chosen.clamp(max=p.shape[-1] - 1)
