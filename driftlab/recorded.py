"""What a recorded target pass is made of: the target's shapes and tables, one sequence, a batch, and a place in a file.

:mod:`driftlab.pieces` writes and reads these, :mod:`driftlab.trajectory` is the set of them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from driftlab.errors import DriftlabError
from driftlab.sealed import open_tensors, save_sealed, sealed_tensors
from driftlab.segments import Starts, answer_starts

FORMAT_VERSION = 1
_VOCAB_BLOCK = 8192


@dataclass(frozen=True, kw_only=True)
class TargetSpec:
    """Shapes and identity of a target: what a drafter has to know of it."""

    name: str
    """how it was asked for: a known name, a Hugging Face id, or a folder's name"""
    label: str
    """what to call it wherever a number stands, e.g. with its quantisation"""
    fingerprint: str
    """hash of the weights' identity"""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_type: str
    max_positions: int
    eos_ids: tuple[int, ...]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TargetSpec:
        """Rebuild from ``dataclasses.asdict``."""
        return cls(**{**values, "eos_ids": tuple(values["eos_ids"])})


@dataclass(frozen=True)
class TargetHead:
    """The target's tables: ``embed [vocab d_target]``, ``lm_head [vocab d_target]``, ``norm_weight [d_target]``.

    ``lm_head`` reads states *after* the final norm; ``norm_weight`` is that norm's gain.
    """

    embed: Float[Tensor, "vocab d_target"]
    lm_head: Float[Tensor, "vocab d_target"]
    norm_weight: Float[Tensor, " d_target"]

    def logits(self, last_hidden: Float[Tensor, "*batch d_target"]) -> Float[Tensor, "*batch vocab"]:
        """The target's logits of post-norm states, in float32."""
        return torch.nn.functional.linear(last_hidden.float(), self.lm_head.float())

    def lse(self, last_hidden: Float[Tensor, "*batch d_target"]) -> Float[Tensor, "*batch"]:
        """Log-sum-exp of :meth:`logits`, widened to float32 block by block of the vocabulary.

        (Of half-precision logits it is off by up to a tenth where they are large, and probabilities with it.)
        """
        wide, blocks = last_hidden.float(), self.lm_head.split(_VOCAB_BLOCK)
        parts = [torch.nn.functional.linear(wide, rows.float()).logsumexp(-1) for rows in blocks]
        return torch.stack(parts).logsumexp(0)

    def save(self, path: Path) -> None:
        """Write the tables; a tied head is written once."""
        tensors = {"embed": self.embed.cpu().contiguous(), "norm_weight": self.norm_weight.cpu().contiguous()}
        if self.lm_head.data_ptr() != self.embed.data_ptr() and not torch.equal(self.lm_head, self.embed):
            tensors["lm_head"] = self.lm_head.cpu().contiguous()
        save_sealed(path, tensors, {"driftlab_format_version": str(FORMAT_VERSION)})

    @classmethod
    def load(cls, path: Path) -> TargetHead:
        """Read what :meth:`save` wrote. Raises DriftlabError if the file is missing, broken or of another version."""
        with open_recorded(path) as file:
            tensors = sealed_tensors(file, path, "remove it and run the same record command again")
        shapes = [tuple(tensors[name].shape) if name in tensors else () for name in ("embed", "norm_weight")]
        if (
            len(shapes[0]) != 2
            or shapes[1] != shapes[0][1:]
            or tensors.get("lm_head", tensors["embed"]).shape != shapes[0]
        ):
            told = {name: list(tensor.shape) for name, tensor in tensors.items()}
            raise DriftlabError(
                f"{path} does not hold embed, lm_head [vocab d_target] and norm_weight [d_target], but {told}"
            )
        return cls(tensors["embed"], tensors.get("lm_head", tensors["embed"]), tensors["norm_weight"])


@dataclass(frozen=True)
class Recorded:
    """One recorded sequence, unpadded. ``tokens [pos]``; the answer starts at ``prompt_length``.

    ``finish``: "stop" (the last token is EOS) or "length". ``lse [pos]``: log-sum-exp of the target's logits at each
    answer row (NaN below row P - 1), so that p(x) = exp(logit_x - lse) is exact for any subset of the vocabulary.
    """

    id: str
    category: str
    prompt_length: int
    finish: str
    tokens: Int[Tensor, " pos"]
    aux: Float[Tensor, "pos aux d_target"]
    last_hidden: Float[Tensor, "pos d_target"]
    lse: Float[Tensor, " pos"]


@dataclass(frozen=True)
class Batch:
    """Some sequences, right-padded to the longest. ``lengths``, ``prompt_lengths [batch]`` count tokens."""

    tokens: Int[Tensor, "batch pos"]
    aux: Float[Tensor, "batch pos aux d_target"]
    last_hidden: Float[Tensor, "batch pos d_target"]
    lse: Float[Tensor, "batch pos"]
    lengths: Int[Tensor, " batch"]
    prompt_lengths: Int[Tensor, " batch"]
    ids: tuple[str, ...]
    finish: tuple[str, ...]
    sinks: tuple[int, ...]
    aux_layers: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def valid(self) -> Bool[Tensor, "batch pos"]:
        """True where there is a token."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.lengths[:, None]

    @property
    def starts(self) -> Starts:
        """Every answer row t, P - 1 <= t <= T - 2, with the segments of the key rows."""
        return answer_starts(self.prompt_lengths, self.lengths, self.sinks, self.ids)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Batch:
        """Move to a device. If a ``dtype`` is given the aux states are cast to it; last_hidden, which the target's
        probabilities are made from, is never made narrower (in half precision they are off by several per cent).
        """
        moved = {
            f.name: getattr(self, f.name).to(device)
            for f in dataclasses.fields(self)
            if isinstance(getattr(self, f.name), Tensor)
        }
        if dtype is not None:
            last = moved["last_hidden"]
            moved |= {"aux": moved["aux"].to(dtype), "last_hidden": last.to(torch.promote_types(last.dtype, dtype))}
        return dataclasses.replace(self, **moved)


@dataclass(frozen=True)
class Entry:
    """Where a sequence lies: its place in a piece, and what is known of it without reading its states."""

    id: str
    category: str
    prompt_length: int
    length: int
    finish: str
    piece: int
    offset: int
    crc: dict[str, int] | None = field(default=None, repr=False, compare=False)
    """CRC-32 of its part of every tensor; recordings of earlier versions have none"""


def check_version(version: Any, path: Path) -> None:
    """Raise DriftlabError unless ``version`` is the one that this code reads."""
    if str(version) != str(FORMAT_VERSION):
        raise DriftlabError(
            f"{path} has trajectory format version {version}; this driftlab reads {FORMAT_VERSION}: "
            "update driftlab, or record again"
        )


def open_recorded(path: Path) -> Any:
    """Open a safetensors file of ours by memory map, its version checked."""
    file = open_tensors(path, "it belongs to a recording: keep folder and head file together, or record again")
    check_version((file.metadata() or {}).get("driftlab_format_version"), path)
    return file
