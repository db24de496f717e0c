"""From the names that tensors have in a file to those of ``Drafter.state_dict()``.

Prefixes of trainers are taken off, ``midlayer`` becomes ``layers.0``, fused projections are split by rows. Every raw name
either becomes part of a canonical tensor or is dropped for a reason that is said; nothing is lost on the way. ``d2t`` and
``t2d`` keep their names and their values.

    names = canonical_names(raw.shapes, heads=Heads(query=32, kv=8, dim=128))
    names.shapes     canonical name -> shape, before anything is read
    names.dropped    raw name -> why it is not used
    names.tensors(raw)                   canonical name -> tensor; or at once: canonical_tensors(raw, heads=...)

``heads`` is needed only where a file holds a fused ``qkv_proj``. Names that are not known stay as they are, so that a strict
loader meets them. Tensors of MTP heads inside a target's files are named by ``mtp``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from driftlab.errors import DriftlabError

# FSDP, torch.compile and activation checkpointing put these between a module and its parent
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_TRAINER = re.compile(r"^(?:.*\.)?(?:draft_model|eagle_module|module)\.")
_LATER_HIDDEN_NORM = re.compile(r"^layers\.([1-9]\d*)\.hidden_norm\.")
# TorchSpec writes three modules under names of its own
_RENAMED = {
    **{"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"},
    **{"context_proj": "fc", "context_norm": "hidden_norm", "final_norm": "norm"},
}
_DROPPED = (
    (re.compile(r"(?:^|\.)inv_freq$"), "rotary frequencies, computed from the settings"),
    (re.compile(r"(?:^|\.)(?:cos|sin)_cached$"), "table of rotary angles, computed from the settings"),
    (re.compile(r"(?:^|\.)verifier_norm\."), "the target's final norm, used in training only"),
    (re.compile(r"(?:^|\.)verifier_lm_head\."), "the target's head, used in training only"),
)
_FUSED = re.compile(
    r"^(?P<owner>.*\.)(?P<kind>self_attn\.(?:qkv_proj|fused_qkv_a_proj(?:_with_mqa)?)|mlp\.gate_up_proj)\.(?P<leaf>weight|bias)$"
)


@dataclass(frozen=True)
class Heads:
    """Head counts and width, by which the rows of a fused ``qkv_proj`` are told apart."""

    query: int
    kv: int
    dim: int


@dataclass(frozen=True)
class Rows:
    """Rows ``start`` to ``stop`` of the raw tensor ``raw``."""

    raw: str
    start: int
    stop: int


@dataclass(frozen=True)
class Names:
    """Where every canonical tensor comes from."""

    sources: dict[str, str | Rows]
    """canonical name -> raw name, or rows of one"""
    shapes: dict[str, tuple[int, ...]]
    """canonical name -> shape"""
    dropped: dict[str, str]
    """raw name -> why it is not used"""
    twins: dict[str, tuple[str, str]] = field(default_factory=dict)
    """canonical name -> the raw ``input_layernorm`` and ``hidden_norm`` of a layer >= 1, which must be equal: SGLang's name of
    the norm written beside vLLM's"""

    def tensors(self, raw: Any) -> dict[str, Tensor]:
        """Read every canonical tensor of ``raw``, a RawCheckpoint or anything with ``label``, ``shapes`` and ``tensor(name)``.

        Raises:
            DriftlabError: the two norms of a layer >= 1 differ, so that engines would compute different things.
        """
        self.check_twins(raw)
        return {name: _read(raw, source) for name, source in self.sources.items()}

    def check_twins(self, raw: Any) -> None:
        """Raise DriftlabError unless the two norms of each layer >= 1 are bit-equal."""
        for name, (first, second) in self.twins.items():
            if not torch.equal(raw.tensor(first), raw.tensor(second)):
                raise DriftlabError(
                    f"{raw.label}: {first} and {second} are both {name}, which norms the only input of the layer, and "
                    "their values differ: vLLM reads the first, SGLang the second; remove the one that was not trained"
                )


def canonical_names(shapes: Mapping[str, tuple[int, ...]], *, heads: Heads | None = None) -> Names:
    """Name the tensors of a drafter file.

    Args:
        shapes: raw name -> shape.
        heads: splits fused query, key and value rows; their order is all q, all k, all v.

    Raises:
        DriftlabError: two raw names are one tensor, or a fused tensor cannot be split.
    """
    sources: dict[str, str | Rows] = {}
    named: dict[str, tuple[int, ...]] = {}
    dropped: dict[str, str] = {}
    twins: dict[str, tuple[str, str]] = {}
    for raw in shapes:
        reason = next((why for pattern, why in _DROPPED if pattern.search(raw)), None)
        if reason is not None:
            dropped[raw] = reason
            continue
        check_size(raw, shapes[raw])
        for name, source, shape in _parts(raw, shapes, heads):
            if name not in sources:
                sources[name], named[name] = source, shape
                continue
            pair = _twin(name, _raw(sources[name]), raw)
            if pair is None or shape != named[name] or name in twins:
                raise DriftlabError(
                    f"{_raw(sources[name])} and {raw} are two names of one tensor, {name}: keep the right one"
                )
            sources[name], twins[name] = pair[0], pair
    return Names(sources, named, dropped, twins)


def check_size(raw: str, shape: tuple[int, ...]) -> None:
    """Raise DriftlabError if a tensor holds a single number or nothing: no part of a drafter does."""
    if not shape or 0 in shape:
        raise DriftlabError(f"{raw} is {list(shape)}: {'it holds nothing' if shape else 'it is a single number'}")


def canonical_tensors(raw: Any, *, heads: Heads | None = None) -> dict[str, Tensor]:
    """Read all tensors of a checkpoint under their canonical names; see :func:`canonical_names`."""
    try:
        names = canonical_names(raw.shapes, heads=heads)
    except DriftlabError as error:
        raise DriftlabError(f"{raw.label}: {error}") from error
    return names.tensors(raw)


def canonical_name(raw: str) -> str:
    """Return the canonical name of a raw one; a fused projection keeps the name of its own."""
    name = _TRAINER.sub("", _WRAPPERS.sub("", raw)).removeprefix("model.")
    if name.startswith("midlayer."):
        rest = name.removeprefix("midlayer.")
        name = f"layers.{rest}" if rest.split(".", 1)[0].isdigit() else f"layers.0.{rest}"
    first, dot, rest = name.partition(".")
    name = _RENAMED.get(first, first) + dot + rest
    return _LATER_HIDDEN_NORM.sub(r"layers.\1.input_layernorm.", name)


def _parts(
    raw: str, shapes: Mapping[str, tuple[int, ...]], heads: Heads | None
) -> Iterator[tuple[str, str | Rows, tuple[int, ...]]]:
    """Yield canonical name, source and shape of what a raw tensor holds."""
    name, shape = canonical_name(raw), shapes[raw]
    match = _FUSED.match(name)
    if match is None:
        yield name, raw, shape
        return
    kind = match["kind"].rpartition(".")[2]
    start = 0
    for part, rows in _split(raw, kind, shapes, heads):
        block = match["kind"].rpartition(".")[0]
        yield f"{match['owner']}{block}.{part}.{match['leaf']}", Rows(raw, start, start + rows), (rows, *shape[1:])
        start += rows


def _split(
    raw: str, kind: str, shapes: Mapping[str, tuple[int, ...]], heads: Heads | None
) -> tuple[tuple[str, int], ...]:
    """Return the names and row counts of the parts of a fused projection, in the order of their rows."""
    rows = shapes[raw][0] if shapes[raw] else 0
    if kind == "gate_up_proj":
        if rows % 2:
            raise DriftlabError(f"{raw} has {rows} rows: gate and up have as many rows each, so it must be even")
        return ("gate_proj", rows // 2), ("up_proj", rows // 2)
    if kind == "qkv_proj":
        if heads is None:
            raise DriftlabError(
                f"{raw} holds query, key and value rows: which are which cannot be told without the heads"
            )
        q, kv = heads.query * heads.dim, heads.kv * heads.dim
        if rows != q + 2 * kv:
            raise DriftlabError(
                f"{raw} has {rows} rows; {heads.query} query and {heads.kv} key and value heads of {heads.dim} make "
                f"{q} + {kv} + {kv} = {q + 2 * kv}: correct the heads in config.json"
            )
        return ("q_proj", q), ("k_proj", kv), ("v_proj", kv)
    return _split_latent(raw, kind, shapes, rows)


def _split_latent(raw: str, kind: str, shapes: Mapping[str, tuple[int, ...]], rows: int) -> tuple[tuple[str, int], ...]:
    """Split compressed queries from compressed keys: the norm of the former says how many rows they have."""
    layer = canonical_name(raw).partition(kind)[0]
    rank = next(
        (shape[0] for name, shape in shapes.items() if canonical_name(name) == f"{layer}q_a_layernorm.weight"), 0
    )
    if not 0 < rank < rows:
        raise DriftlabError(
            f"{raw} has {rows} rows, the compressed queries and then the compressed keys; {layer}q_a_layernorm.weight, which "
            f"says how many belong to the queries, {'has ' + str(rank) if rank else 'is not in the file'}"
        )
    return ("q_a_proj", rank), ("kv_a_proj_with_mqa", rows - rank)


def _twin(name: str, first: str, second: str) -> tuple[str, str] | None:
    """Return the two raw names as (input_layernorm, hidden_norm) if that is what they are, in a layer >= 1."""
    pair = sorted((first, second), key=lambda raw: ".hidden_norm." in raw)
    is_pair = [".hidden_norm." in raw for raw in pair] == [False, True]
    return (pair[0], pair[1]) if is_pair and re.match(r"layers\.[1-9]\d*\.input_layernorm\.", name) else None


def _raw(source: str | Rows) -> str:
    return source if isinstance(source, str) else source.raw


def _read(raw: Any, source: str | Rows) -> Tensor:
    if isinstance(source, str):
        return raw.tensor(source)
    # a part keeps no hold on the whole
    return raw.tensor(source.raw)[source.start : source.stop].clone()
