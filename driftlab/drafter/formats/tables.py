"""Vocabulary, embedding and head of an EAGLE-3 file: its own, or the target's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from driftlab.drafter.formats.reading import Found
from driftlab.drafter.formats.settings import Settings
from driftlab.drafter.formats.vocabulary import read_draft_vocab
from driftlab.errors import DriftlabError

if TYPE_CHECKING:
    from driftlab.drafter.formats.eagle3 import File

_OWN_HEAD = ("vLLM", "speculators", "SafeAILab", "TensorRT-LLM")
"""projects that take the file's head whatever draft_vocab_size says"""


def read_whole(settings: Settings, name: str) -> Found:
    """Return a whole number of the settings, which is there."""
    return Found(settings.whole(name), "read", name)


def read_tables(file: File, tensor: Any) -> Tensor | None:
    """Settle vocabulary, embedding and head; return the draft vocabulary, None for the whole one.

    Args:
        file: settings, shapes, provenance, and the ledger to fill.
        tensor: reads one tensor by its canonical name.

    Raises:
        DriftlabError: a head that cannot be lent, a map that is missing or contradicts itself.
    """
    settings, shapes, ledger = file.settings, file.shapes, file.ledger
    vocab = ledger.settle("vocab_size", lambda: read_whole(settings, "vocab_size"))
    draft = ledger.settle("draft_vocab_size", lambda: _draft_size(file, vocab))
    own_embed, own_head = "embed_tokens.weight" in shapes, "lm_head.weight" in shapes
    ledger.settle("own_embed", lambda: _embed(file, own_embed))
    ledger.settle("lm_head", lambda: _head(file, own_head, own_embed, draft, vocab))
    if own_head and settings.get("draft_vocab_size") is None and file.source.name not in _OWN_HEAD:
        ledger.note(
            "lm_head: draft_vocab_size is not said, though the file has a head of its own: SGLang and tokenspeed "
            "take the target's head then; vLLM takes the file's, and so does this"
        )
    if own_head and settings.flag("tie_word_embeddings")[0]:
        ledger.note(
            "lm_head: tie_word_embeddings is true, but the file has an lm_head.weight: that is used, as in vLLM "
            "(SGLang takes the embedding)"
        )
    return read_draft_vocab(shapes, tensor, vocab_size=vocab, draft_vocab_size=draft, notes=ledger.notes)


def _draft_size(file: File, vocab: int) -> Found:
    for name in ("draft_vocab_size", "truncated_vocab_size"):  # the same, in some files
        if (said := file.settings.whole(name)) is not None:
            return Found(said, "read", name)
    for name in ("d2t", "lm_head.weight"):
        rows = file.shapes.get(name, (vocab,))[0]
        if rows != vocab:
            return Found(rows, "tensors", f"absent: {name} has {rows} rows", note=True)
    return Found(vocab, "assumed", "absent: the whole vocabulary")


def is_tied(file: File) -> bool:
    """Whether the head is a copy of the drafter's own embedding."""
    own_embed, own_head = ("embed_tokens.weight" in file.shapes, "lm_head.weight" in file.shapes)
    return own_embed and not own_head and bool(file.settings.flag("tie_word_embeddings")[0])


def _embed(file: File, own: bool) -> Found:
    if own:
        return Found(
            True, "tensors", "embed_tokens.weight is there; SGLang uses the target's unless target_hidden_size differs"
        )
    return Found(False, "tensors", "none in the file, the target's is used", note=True)


def _head(file: File, own: bool, own_embed: bool, draft: int, vocab: int) -> Found:
    if own:
        return Found("own", "tensors", "lm_head.weight is there")
    if (
        own_embed
        and file.source.name != "speculators"
        and draft == vocab
        and file.settings.get("tie_word_embeddings") is None
    ):
        raise DriftlabError(
            "an embedding of its own but no lm_head.weight: whether the head is tied is not said; set "
            "tie_word_embeddings"
        )
    if draft < vocab and file.source.name != "speculators":
        raise DriftlabError(f"no lm_head.weight, and a head for {draft} of {vocab} tokens cannot be lent")
    if is_tied(file):
        return Found("own", "read", "tie_word_embeddings: a copy of the drafter's embedding", note=True)
    return Found("target", "tensors", "none in the file, the target's is used", note=True)
