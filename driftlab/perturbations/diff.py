"""What changed between two prompts, token by token, and where a token of the first is in the second."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any, Literal, NamedTuple


class Span(NamedTuple):
    """Neighbouring tokens with one fate; ``before`` and ``after``: position of the first one in either prompt."""

    fate: Literal["kept", "removed", "added"]
    before: int
    after: int
    ids: tuple[int, ...]


def spans(before: Sequence[int], after: Sequence[int]) -> list[Span]:
    """Return the spans in order: kept and removed ones make up ``before``, kept and added ones ``after``.

    What both begin and end with is kept; between, the longest matching blocks, again and again (Ratcliff and Obershelp).
    """
    before, after = tuple(before), tuple(after)
    shorter = min(len(before), len(after))
    head = next((i for i in range(shorter) if before[i] != after[i]), shorter)
    tail = next((i for i in range(shorter - head) if before[-1 - i] != after[-1 - i]), shorter - head)
    inner = before[head : len(before) - tail], after[head : len(after) - tail]
    found: list[Span] = [Span("kept", 0, 0, before[:head])]
    for tag, a, a_end, b, b_end in SequenceMatcher(None, *inner, autojunk=False).get_opcodes():
        if tag == "equal":
            found.append(Span("kept", head + a, head + b, inner[0][a:a_end]))
        else:
            found.append(Span("removed", head + a, head + b, inner[0][a:a_end]))
            found.append(Span("added", head + a_end, head + b, inner[1][b:b_end]))
    found.append(Span("kept", len(before) - tail, len(after) - tail, before[len(before) - tail :]))
    return [span for span in found if span.ids]


def token_diff(before: Sequence[int], after: Sequence[int], tokenizer: Any, *, context: int = 4) -> list[str]:
    """Return one line a token: its mark (" " kept, "-" removed, "+" added), place, id and text.

    Of more than ``2 context`` kept tokens in a row the middle is left out, and counted.
    """
    lines = []
    for span in spans(before, after):
        mark = {"kept": " ", "removed": "-", "added": "+"}[span.fate]
        start = span.before if span.fate == "removed" else span.after
        shown = [f"{mark} {start + i:5d} {token:7d} {tokenizer.decode([token])!r}" for i, token in enumerate(span.ids)]
        if span.fate == "kept" and len(shown) > 2 * context + 1:
            shown[context : len(shown) - context] = [f"  ... {len(shown) - 2 * context} tokens kept ..."]
        lines += shown
    return lines


def moved(positions: Sequence[int], before: Sequence[int], after: Sequence[int]) -> tuple[int, ...]:
    """Return where the tokens at ``positions`` of ``before`` are in ``after``; those that were removed are left out."""
    kept = [span for span in spans(before, after) if span.fate == "kept"]
    found = (
        span.after + position - span.before
        for position in positions
        for span in kept
        if span.before <= position < span.before + len(span.ids)
    )
    return tuple(found)
