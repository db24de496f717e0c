r"""Where two greedy texts of one target part, and whether rounding explains it.

In float32 a live run and plain greedy decoding are one text (tested). In half precision a pass over several tokens rounds
otherwise than one over a single token, and where the two best logits are nearly equal the arg max may fall on the other one.
What tells such a tie from a fault is how far below the largest logit the lower of the two tokens lies, at the first place where
the texts differ:

    margin = (max_v l_v - min(l_a, l_b)) / max(|max_v l_v|, 1)          logits of one pass over the common text

A tie is a margin of at most 2^-6 in bfloat16 and 2^-9 in float16, two steps between neighbouring numbers at 1, and 2^-13 in
float32, where it is the size by which states differ between batches. Two tokens that are both far below the largest are no tie,
however near each other. Only the first place says anything: what follows is another text. Sampled texts are not to be compared
so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from driftlab.errors import DriftlabError
from driftlab.target import Target

TIES = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9, torch.float32: 2.0**-13}
"""largest margin that rounding explains; float64: as float32"""


@dataclass(frozen=True)
class Divergence:
    """The first place where two texts differ."""

    place: int
    """position in the text, from its begin"""
    tokens: tuple[int | None, int | None]
    """of the first text and of the second; None: it has ended"""
    margin: float
    """how far the less likely of the two lies below the largest logit, relative; NaN where one text has ended"""
    bound: float
    """largest margin that rounding explains in the target's precision"""

    @property
    def tie(self) -> bool:
        """Whether rounding explains it."""
        return self.margin <= self.bound

    @property
    def words(self) -> str:
        """For a person."""
        one, other = ("the end" if token is None else f"token {token}" for token in self.tokens)
        where = f"the texts part at position {self.place}: {one} and {other}"
        if None in self.tokens:
            return f"{where}; one of them was cut or did not stop where it should"
        verdict = "a numerical tie" if self.tie else f"more than rounding ({self.bound:.2g}) explains: a fault"
        return f"{where}, the less likely {self.margin:.2g} below the largest logit, relative to it: {verdict}"


@torch.inference_mode()
def first_divergence(target: Target, one: Sequence[int], other: Sequence[int]) -> Divergence | None:
    """Return where two greedy texts of a target part, None if they are the same.

    Args:
        target: whose logits judge; in the precision in which the texts were made.
        one: token ids, the prompt included.
        other: likewise.

    Raises:
        DriftlabError: the texts differ at their first token, so no logits choose between them.
    """
    place = next(
        (i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other))
    )
    if place == len(one) == len(other):
        return None
    if place == 0:
        raise DriftlabError("the texts differ at their first token: they do not answer one prompt")
    bound = TIES.get(target.adapter.dtype, TIES[torch.float32])
    tokens = tuple(text[place] if place < len(text) else None for text in (one, other))
    if None in tokens:
        return Divergence(place, tokens, float("nan"), bound)
    adapter = target.adapter
    hidden = adapter.hidden(torch.tensor([list(one[:place])], device=adapter.device))
    logits = adapter.logits(hidden[:, -1:])[0, 0].double()
    best, lower = float(logits.max()), min(float(logits[token]) for token in tokens)
    return Divergence(place, tokens, (best - lower) / max(abs(best), 1.0), bound)
