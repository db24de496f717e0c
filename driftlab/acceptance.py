"""Which drafted tokens the target accepts, at every start and depth, against the recorded text.

The drafts here are arg max, so q is one-hot: a draft is accepted iff the text's token is the draft, whether the text was
chosen greedily or sampled. A start at row t drafts tokens t + 2, t + 3, ...; depth k is comparable while t + k + 1 is at
most the last answer token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from driftlab.draft import Draft, text_digest
from driftlab.errors import DriftlabError
from driftlab.trajectory import Batch, Trajectory


@dataclass(frozen=True)
class Acceptance:
    """``match [batch start depth]``: draft equals text (False where not ``valid``). ``remaining [batch start]``: text
    tokens after the one that the start already has. ``finish``: "stop" or "length", one per sequence.
    """

    match: Bool[Tensor, "batch start depth"]
    valid: Bool[Tensor, "batch start depth"]
    remaining: Int[Tensor, "batch start"]
    rows: Int[Tensor, "batch start"]
    ids: tuple[str, ...]
    categories: tuple[str, ...]
    finish: tuple[str, ...]
    rule: str = "argmax"

    @property
    def depth(self) -> int:
        """Number of draft steps K."""
        return self.match.shape[2]

    @property
    def accept_length(self) -> Int[Tensor, "batch start"]:
        """Accepted draft tokens, 0..K, of a round at each start; without the bonus token."""
        return self.match.long().cumprod(-1).sum(-1)

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield tidy rows: per prompt and depth, the share of all starts at which the draft equals the text."""
        matches, starts = self.match.sum(1).tolist(), self.valid.sum(1).tolist()
        for i, (name, category) in enumerate(zip(self.ids, self.categories, strict=True)):
            for k in range(self.depth):
                at = {"prompt": name, "category": category, "depth": k + 1, "quantity": "match"}
                yield {**at, **share(matches[i][k], starts[i][k])}


def accept(draft: Draft, data: Trajectory | Batch) -> Acceptance:
    """Compare drafts with the text they were made for.

    Raises:
        DriftlabError: when ``data`` holds other sequences than the draft.
    """
    ids, lengths, prompts, finish, categories, texts = _texts(data)
    if ids != draft.ids:
        raise DriftlabError("the draft was made for other sequences than this recording's (or in another order)")
    if draft.digests and draft.digests != tuple(text_digest(text) for text in texts):
        raise DriftlabError(
            "the draft was made for other texts than this recording's, though the prompts have the same names"
        )
    longest = max(lengths)
    tokens = torch.full((len(ids), longest + draft.depth + 2), -1, dtype=torch.long)
    for index, text in enumerate(texts):
        tokens[index, : len(text)] = text
    offsets = torch.arange(2, draft.depth + 2)
    positions = draft.rows[..., None] + offsets
    actual = tokens.gather(1, positions.flatten(1)).view(positions.shape)
    last = torch.tensor(lengths)[:, None] - 1
    valid = draft.valid[..., None] & (positions <= last[..., None])
    if not torch.equal(draft.rows[:, 0], torch.tensor(prompts) - 1):
        raise DriftlabError("the draft's first rows are not the answers' first rows: replay needs every answer row")
    return Acceptance(
        match=(draft.tokens == actual) & valid,
        valid=valid,
        remaining=torch.where(draft.valid, last - 1 - draft.rows, 0),
        rows=draft.rows,
        ids=ids,
        categories=categories,
        finish=finish,
    )


def _texts(
    data: Trajectory | Batch,
) -> tuple[tuple[str, ...], list[int], list[int], tuple[str, ...], tuple[str, ...], list[Tensor]]:
    if isinstance(data, Batch):
        lengths = data.lengths.tolist()
        texts = [row[:length].cpu() for row, length in zip(data.tokens, lengths, strict=True)]
        return data.ids, lengths, data.prompt_lengths.tolist(), data.finish, ("",) * len(data), texts
    entries = data.entries
    return (
        tuple(e.id for e in entries),
        [e.length for e in entries],
        [e.prompt_length for e in entries],
        tuple(e.finish for e in entries),
        tuple(e.category for e in entries),
        [data.tokens(index) for index in range(len(entries))],
    )


def share(count: int, of: int) -> dict[str, Any]:
    """Return ``value`` and ``n`` of a row that says what share of ``of`` something holds for; NaN of none."""
    return {"value": count / of if of else float("nan"), "n": of}
