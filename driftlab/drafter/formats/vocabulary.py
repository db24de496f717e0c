"""The draft vocabulary of a file: d2t holds offsets, target id = draft id + d2t[draft id]; t2d marks the target ids in it.

No project writes absolute ids into d2t on purpose, but some have by mistake (verl-SpeCo#67): then draft id i becomes nearly
2 i and only the accept length tells. Where t2d confirms that the numbers are ids they are converted and it is said; else
they are refused.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from driftlab.errors import DriftlabError


def read_draft_vocab(
    shapes: dict[str, tuple[int, ...]],
    tensor: Callable[[str], Tensor],
    *,
    vocab_size: int,
    draft_vocab_size: int,
    notes: list[str],
) -> Tensor | None:
    """Return the ascending target ids of the draft vocabulary [draft_vocab]; None if it is the whole vocabulary.

    Args:
        shapes: canonical name -> shape.
        tensor: reads ``d2t`` and ``t2d``.
        vocab_size: V.
        draft_vocab_size: Vd.
        notes: what is worth telling is added.

    Raises:
        DriftlabError: no map though Vd < V, a map that leaves the vocabulary, or d2t and t2d that differ.
    """
    marks = _read_marks(shapes, tensor, vocab_size)
    if draft_vocab_size == vocab_size:
        _check_whole(shapes, tensor, marks)
        return None
    if "d2t" not in shapes:
        raise DriftlabError(
            f"no d2t, though the draft vocabulary has {draft_vocab_size} of {vocab_size} tokens: without it nobody "
            "knows which token a draft id means"
        )
    if shapes["d2t"] != (draft_vocab_size,):
        raise DriftlabError(f"d2t is {list(shapes['d2t'])}, the configuration makes it [{draft_vocab_size}]")
    d2t = _integers(tensor("d2t"), "d2t")
    ids = torch.arange(draft_vocab_size) + d2t
    marked = None if marks is None else marks.nonzero()[:, 0]
    if marked is not None and torch.equal(d2t, marked) and not torch.equal(ids, marked):
        notes.append(
            "d2t: it holds target ids, not offsets (they are exactly those that t2d marks); converted. Engines that "
            "read this file as it is map draft ids to the wrong tokens"
        )
        return d2t
    inside = bool(((d2t >= 0) & (d2t < vocab_size)).all())  # beyond that the sum may wrap around
    if not inside or not _valid(ids, vocab_size):
        raise DriftlabError(
            "d2t holds no valid offsets (target id = draft id + d2t[draft id] must ascend within "
            f"0..{vocab_size - 1}; here it runs from {int(ids[0])} to {int(ids[-1])})"
        )
    if marked is None and len(d2t) > 1 and bool((d2t.diff() > 0).all()):
        raise DriftlabError(
            "d2t ascends strictly, as a list of target ids does (verl-SpeCo#67); as offsets it would leave out "
            "every second token or more, and no t2d says that this is meant. Offsets are wanted: target id - draft id"
        )
    if marked is not None and not torch.equal(ids, marked):
        raise DriftlabError("t2d and d2t name different draft vocabularies")
    if not bool(d2t.any()):
        notes.append(f"d2t: all zero, so the draft vocabulary is target ids 0..{draft_vocab_size - 1}")
    return ids


def with_maps(tensors: dict[str, Tensor], ids: Tensor | None, vocab_size: int) -> dict[str, Tensor]:
    """Return the tensors with d2t and t2d as ``ids`` makes them: offsets and marks, or neither for the whole vocabulary."""
    kept = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    if ids is None:
        return kept
    marks = torch.zeros(vocab_size, dtype=torch.bool)
    marks[ids] = True
    return {**kept, "d2t": ids - torch.arange(len(ids)), "t2d": marks}


def _valid(ids: Tensor, vocab_size: int) -> bool:
    return not bool((ids.diff() <= 0).any()) and int(ids[0]) >= 0 and int(ids[-1]) < vocab_size


def _read_marks(shapes: dict[str, tuple[int, ...]], tensor: Callable[[str], Tensor], vocab_size: int) -> Tensor | None:
    if "t2d" not in shapes:
        return None
    if shapes["t2d"] != (vocab_size,):
        raise DriftlabError(f"t2d is {list(shapes['t2d'])}, the configuration makes it [{vocab_size}] (vocab_size)")
    return tensor("t2d").bool()


def _check_whole(shapes: dict[str, tuple[int, ...]], tensor: Callable[[str], Tensor], marks: Tensor | None) -> None:
    if "d2t" in shapes and bool(tensor("d2t").any()):
        raise DriftlabError("d2t is not zero although the draft vocabulary is the whole vocabulary")
    if marks is not None and not bool(marks.all()):
        raise DriftlabError(
            "t2d leaves tokens out although the draft vocabulary is the whole vocabulary: set draft_vocab_size"
        )


def _integers(tensor: Tensor, name: str) -> Tensor:
    if tensor.is_floating_point() or tensor.dtype == torch.bool:
        raise DriftlabError(
            f"{name} is stored as {str(tensor.dtype).removeprefix('torch.')}: token ids must be whole numbers"
        )
    return tensor.to(torch.int64)
