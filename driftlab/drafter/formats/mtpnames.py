"""Where the tensors of an MTP head stand, in a target's checkpoint or alone, and what they are in ``Drafter.state_dict()``.

    nextn        model.layers.{N + i}.*: enorm, hnorm, eh_proj, shared_head.norm, shared_head.head, embed_tokens, one layer
                 (DeepSeek-V3, GLM-4 MoE)
    mtp          mtp.fc, mtp.pre_fc_norm_embedding, mtp.pre_fc_norm_hidden, mtp.norm, mtp.layers.{i}.*     (Qwen3-Next)
    speculators  mtp_layers.{i}.*: input_proj, token_layernorm, hidden_layernorm, final_layernorm, one layer

i is the module. A layer's query projection may hold [query | gate] head by head, its experts may lie in one tensor, in
transformers' order [expert, gate rows then up rows, in] or transposed; both are taken apart. Tensors outside the head are the
target's, except in a folder that holds the head alone: there a table beside it is the head's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from driftlab.drafter.formats.names import check_size
from driftlab.errors import DriftlabError

Layout = Literal["nextn", "mtp", "speculators"]

# the group (?P<base>...) is what stands before; (?P<module>...) counts the modules
_MARKS: dict[Layout, re.Pattern[str]] = {
    "nextn": re.compile(r"^(?P<base>(?:.*\.)?layers\.)(?P<module>\d+)\.eh_proj\.weight$"),
    "mtp": re.compile(r"^(?P<base>(?:.*\.)?mtp\.)fc\.weight$"),
    "speculators": re.compile(r"^(?P<base>(?:.*\.)?mtp_layers\.)(?P<module>\d+)\.input_proj\.weight$"),
}
_RENAMED: dict[Layout, dict[str, str]] = {
    "nextn": {"shared_head.norm": "norm", "shared_head.head": "lm_head", "embed_tokens": "embed_tokens"},
    "mtp": {
        **{"fc": "layers.0.eh_proj", "pre_fc_norm_embedding": "layers.0.enorm", "pre_fc_norm_hidden": "layers.0.hnorm"},
        **{"norm": "norm", "embed_tokens": "embed_tokens", "lm_head": "lm_head"},
    },
    "speculators": {
        **{"input_proj": "layers.0.eh_proj", "token_layernorm": "layers.0.enorm", "hidden_layernorm": "layers.0.hnorm"},
        "final_layernorm": "norm",
    },
}
_OF_A_HEAD = re.compile(r"(?:^|\.)(?:enorm|hnorm|eh_proj|shared_head|pre_fc_norm_\w+|mtp_layers)\.")
_TABLE = re.compile(r"^(?:model\.|language_model\.)*(?P<table>embed_tokens|lm_head)\.weight$")
_DECODER_LAYER = re.compile(r"(?:^|\.)layers\.\d+\.")
_EXPERTS = re.compile(r"^(?P<owner>.*\.mlp\.experts\.)(?P<kind>gate_up_proj|down_proj)(?:\.weight)?$")


@dataclass(frozen=True)
class Modules:
    """The MTP modules of a checkpoint."""

    layout: Layout
    base: str
    """what stands before a module's number, or before mtp's own names"""
    numbers: tuple[int, ...]
    """as in the file: N, N + 1, ... for nextn, 0, 1, ... otherwise"""
    alone: bool
    """whether the checkpoint holds nothing of a target but tables"""

    def prefix(self, module: int) -> str:
        """Return what stands before the names of a module's layer."""
        return f"{self.base}{'layers.' if self.layout == 'mtp' else ''}{self.numbers[module]}."

    def name(self, raw: str, module: int) -> str | None:
        """Return the name of a raw tensor in the drafter; None: not of this module. Fused tensors keep theirs."""
        renamed = _RENAMED[self.layout]
        if raw.startswith(prefix := self.prefix(module)):
            if raw.endswith("rotary_emb.inv_freq"):
                return None
            owner, _, leaf = (rest := raw.removeprefix(prefix)).rpartition(".")
            if self.layout != "mtp" and owner in renamed:
                return f"{renamed[owner]}.{leaf}"
            return f"layers.0.{rest}".replace(".mlp.shared_expert.", ".mlp.shared_experts.")
        if self.layout == "mtp" and raw.startswith(self.base) and not raw.startswith(f"{self.base}layers."):
            owner, _, leaf = (rest := raw.removeprefix(self.base)).rpartition(".")
            return f"{renamed[owner]}.{leaf}" if owner in renamed else raw
        if not self.alone or self._of_any_module(raw):
            return None
        table = _TABLE.match(raw)
        return f"{table['table']}.weight" if table else raw

    def _of_any_module(self, raw: str) -> bool:
        return any(raw.startswith(self.prefix(module)) for module in range(len(self.numbers)))


@dataclass(frozen=True)
class Part:
    """A canonical tensor: what it is taken from, its shape, how it is taken (None: as it is)."""

    raw: str
    shape: tuple[int, ...]
    take: Callable[[Tensor], Tensor] | None = None


def find_modules(names: Iterable[str]) -> Modules | None:
    """Return the MTP modules among raw names, None if there is none.

    Raises:
        DriftlabError: there are modules under two kinds of names.
    """
    names = list(names)
    found: dict[tuple[Layout, str], set[int]] = {}
    for name in names:
        for layout, mark in _MARKS.items():
            if match := mark.match(name):
                numbers = {int(match["module"])} if layout != "mtp" else _numbers(names, f"{match['base']}layers.")
                found.setdefault((layout, match["base"]), set()).update(numbers)
    if not found:
        return None
    if len(found) > 1:
        raise DriftlabError(
            f"MTP heads under several names: {sorted(base for _, base in found)}; keep the tensors of one of them"
        )
    ((layout, base), numbers) = next(iter(found.items()))
    modules = Modules(layout, base, tuple(sorted(numbers)), alone=False)
    if not numbers:
        raise DriftlabError(f"{base}fc.weight is there, but no layer {base}layers.0.*: the file is not whole")
    others = (name for name in names if not modules._of_any_module(name))
    alone = not any(_DECODER_LAYER.search(name) for name in others)
    return Modules(layout, base, modules.numbers, alone)


def refuse_part(names: Iterable[str]) -> None:
    """Raise DriftlabError if these raw names are some tensors of an MTP head, without the projection that makes it one."""
    part = next((name for name in names if _OF_A_HEAD.search(name)), None)
    if part is not None:
        raise DriftlabError(
            f"{part} is a tensor of an MTP head, but its projection (eh_proj, mtp.fc or input_proj) is not among the tensors: "
            "the file is not whole"
        )


def _numbers(names: list[str], prefix: str) -> set[int]:
    rests = (name.removeprefix(prefix).partition(".")[0] for name in names if name.startswith(prefix))
    return {int(rest) for rest in rests if rest.isdigit()}


def head_parts(
    shapes: Mapping[str, tuple[int, ...]], modules: Modules, module: int, *, hidden: int, heads: int, gated: bool
) -> dict[str, Part]:
    """Return every canonical tensor of a module.

    Args:
        shapes: raw name -> shape; names that are not of the module are passed over.
        modules: of :func:`find_modules`.
        module: which one.
        hidden: H, by which transposed experts are told.
        heads: query heads, each with rows [query | gate] if ``gated``.
        gated: whether q_proj holds the gate.

    Raises:
        DriftlabError: two raw names are one tensor, or a fused tensor cannot be taken apart.
    """
    parts: dict[str, Part] = {}
    for raw, shape in shapes.items():
        name = modules.name(raw, module)
        if name is None:
            continue
        check_size(raw, shape)
        for canonical, part in _taken_apart(name, raw, shape, hidden, heads if gated else 0):
            if canonical in parts:
                raise DriftlabError(
                    f"{parts[canonical].raw} and {raw} are two names of {canonical}: keep the right one"
                )
            parts[canonical] = part
    return parts


def read_parts(raw: Any, parts: Mapping[str, Part]) -> dict[str, Tensor]:
    """Read every canonical tensor; a raw one that several are part of is read once."""
    by_raw: dict[str, list[str]] = {}
    for name, part in parts.items():
        by_raw.setdefault(part.raw, []).append(name)
    tensors: dict[str, Tensor] = {}
    for source, names in by_raw.items():
        whole = raw.tensor(source)
        for name in names:
            take = parts[name].take
            tensors[name] = whole if take is None else take(whole).clone()  # a part keeps no hold on the whole
    return tensors


def _taken_apart(name: str, raw: str, shape: tuple[int, ...], hidden: int, gated_heads: int) -> list[tuple[str, Part]]:
    if match := _EXPERTS.match(name):
        return _experts(match["owner"], match["kind"], raw, shape, hidden)
    if name == "layers.0.self_attn.q_proj.weight" and gated_heads:
        return _gated(raw, shape, gated_heads)
    if name == "layers.0.mlp.gate_up_proj.weight":
        half = _half(shape[0], raw)
        return [
            ("layers.0.mlp.gate_proj.weight", Part(raw, (half, *shape[1:]), lambda whole: whole[:half])),
            ("layers.0.mlp.up_proj.weight", Part(raw, (half, *shape[1:]), lambda whole: whole[half:])),
        ]
    return [(name, Part(raw, shape))]


def _gated(raw: str, shape: tuple[int, ...], heads: int) -> list[tuple[str, Part]]:
    """Split q_proj's rows [query | gate] of each head."""
    rows = shape[0]
    if rows % (2 * heads):
        raise DriftlabError(f"{raw} has {rows} rows, which are not query and gate of {heads} heads each")

    def take(which: int) -> Callable[[Tensor], Tensor]:
        return lambda whole: whole.view(heads, 2, rows // (2 * heads), -1)[:, which].reshape(rows // 2, -1)

    half = (rows // 2, *shape[1:])
    return [
        ("layers.0.self_attn.q_proj.weight", Part(raw, half, take(0))),
        ("layers.0.self_attn.gate.weight", Part(raw, half, take(1))),
    ]


def _experts(owner: str, kind: str, raw: str, shape: tuple[int, ...], hidden: int) -> list[tuple[str, Part]]:
    """Take experts out of one tensor; which axis the hidden state is on tells whether they lie transposed."""
    if len(shape) != 3:
        raise DriftlabError(f"{raw} is {list(shape)}, not [expert, out, in]")
    count, first, second = shape
    out, width = (second, first) if (transposed := _transposed(kind, first, second, hidden, raw)) else (first, second)
    if kind == "down_proj":
        names = (("down_proj", slice(0, out)),)
    else:
        half = _half(out, raw)
        names = (("gate_proj", slice(0, half)), ("up_proj", slice(half, out)))

    def take(index: int, rows: slice) -> Callable[[Tensor], Tensor]:
        return lambda whole: (whole[index].T if transposed else whole[index])[rows]

    return [
        (f"{owner}{index}.{name}.weight", Part(raw, (rows.stop - rows.start, width), take(index, rows)))
        for index in range(count)
        for name, rows in names
    ]


def _transposed(kind: str, first: int, second: int, hidden: int, raw: str) -> bool:
    place = (second, first) if kind == "gate_up_proj" else (first, second)  # where the hidden state is, where it may be
    if hidden not in place:
        raise DriftlabError(f"{raw}: no axis of [{first}, {second}] is hidden_size {hidden}")
    if place[0] == place[1]:
        raise DriftlabError(f"{raw}: both axes are {hidden} wide, so it cannot be told whether it is transposed")
    return place[0] != hidden


def _half(rows: int, raw: str) -> int:
    if rows % 2:
        raise DriftlabError(f"{raw} has {rows} rows: gate and up have as many each, so it must be even")
    return rows // 2
