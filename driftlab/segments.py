"""The partition of the keys: SINK, PROMPT, CONTEXT, SELF, and which rows a draft starts from.

Row t pairs the target's state at position t with the embedding of token t + 1, so the answer's first row is P - 1 (P is
the prompt's length). A key row is SINK if its position is the sink's; else PROMPT if below P - 1; else CONTEXT; keys that
a chain made from its own feedback are SELF. The four are disjoint, so their masses sum to 1 (minus a learned sink's).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from jaxtyping import Bool, Int
from torch import Tensor


class Segment(IntEnum):
    """Index of each segment on the ``seg`` axis."""

    SINK = 0
    PROMPT = 1
    CONTEXT = 2
    SELF = 3


def context_segments(
    prompt_lengths: Int[Tensor, " batch"], rows: int, sinks: Sequence[int]
) -> Int[Tensor, "batch ctx"]:
    """Return the segment of each context key row 0..rows-1 (never SELF: those keys are the chain's own)."""
    row = torch.arange(rows, device=prompt_lengths.device)
    segments = torch.where(row < prompt_lengths[:, None] - 1, int(Segment.PROMPT), int(Segment.CONTEXT))
    for sink in sinks:
        segments[:, row == sink] = int(Segment.SINK)
    return segments


@dataclass(frozen=True)
class Starts:
    """The rows that drafts start from, and what their keys are.

    ``rows [batch start]``: context key c is visible to a start iff c <= row. ``valid [batch start]``: False for padding.
    ``segments [batch ctx]``: segment of each context key row. ``ids``: one name per sequence, for the probes' rows.
    """

    rows: Int[Tensor, "batch start"]
    valid: Bool[Tensor, "batch start"]
    segments: Int[Tensor, "batch ctx"]
    ids: tuple[str, ...]


def answer_starts(
    prompt_lengths: Int[Tensor, " batch"], lengths: Int[Tensor, " batch"], sinks: Sequence[int], ids: Sequence[str]
) -> Starts:
    """Return every answer row t, P - 1 <= t <= T - 2, as a start (row t needs token t + 1). Padded rows are invalid."""
    counts = lengths - prompt_lengths
    offset = torch.arange(max(int(counts.max()), 1), device=lengths.device)
    valid = offset < counts[:, None]
    rows = (prompt_lengths[:, None] - 1 + offset).minimum(lengths[:, None] - 2).clamp(min=0)
    segments = context_segments(prompt_lengths, int(lengths.max()) - 1, sinks)
    return Starts(rows=rows, valid=valid, segments=segments, ids=tuple(ids))
