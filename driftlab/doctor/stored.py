"""What a checkpoint and its target hold, and one way to read it: a :class:`View`.

A view says how the same tensors are taken: a drafter's configuration, and what no configuration has a field for: the order of
the captured states and of the two inputs, which token a state is paired with, where drafted tokens stand, how query heads share
keys, what kind of final state an MTP head reads, and whether d2t holds offsets or ids. :func:`build` makes the drafter, and
copies nothing that can be shared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from driftlab.drafter.config import DrafterConfig
from driftlab.drafter.model import Drafter, Table
from driftlab.drafter.rotary import Rotary
from driftlab.errors import DriftlabError
from driftlab.recorded import TargetHead

D2T = Literal["offset", "absolute"]
Inputs = Literal["embedding first", "hidden first"]
Grouping = Literal["blocks", "strided"]
FinalState = Literal["normed", "raw", "normed twice"]


@dataclass(frozen=True, kw_only=True)
class View:
    """One way to read a checkpoint. The defaults are what every engine does."""

    config: DrafterConfig
    d2t: D2T = "offset"
    """offset: target id = draft id + d2t[draft id]; absolute: target id = d2t[draft id]"""
    order: tuple[int, ...] = ()
    """places of the captured states in the concat; empty: ascending by layer"""
    token_shift: int = 1
    """the token paired with the state of position t is token t + 1; 0: token t; 2: token t + 1 with the state of t - 1"""
    gap: int = 0
    """rotary positions of drafted tokens are so much further than the row after the last one"""
    frozen: bool = False
    """whether the position does not advance while drafting"""
    inputs: Inputs = "embedding first"
    """order of the two halves that attention (EAGLE-3) or the projection (MTP) reads"""
    grouping: Grouping = "blocks"
    """query heads that share a key head are neighbours; strided: every n-th one"""
    final_state: FinalState = "normed"
    """of an MTP head: the target's final state after its norm, before it, or normed twice"""


OUTSIDE = tuple(f.name for f in dataclasses.fields(View) if f.name != "config")
"""what a view says that no configuration has a field for"""


_ALLOWED: dict[str, tuple[object, ...]] = {
    "d2t": get_args(D2T),
    "token_shift": (0, 1, 2),
    "gap": (-1, 0, 1),
    "frozen": (False, True),
    "inputs": get_args(Inputs),
    "grouping": get_args(Grouping),
    "final_state": get_args(FinalState),
}


def check_outside(values: Mapping[str, Any], config: DrafterConfig) -> None:
    """Check what is declared beyond the configuration. Raises DriftlabError for a name or a value that there is not."""
    if unknown := sorted(set(values) - set(OUTSIDE)):
        raise DriftlabError(f"declared {unknown}: there are {', '.join(OUTSIDE)}")
    for name, value in values.items():
        allowed = _ALLOWED.get(name, ())
        if allowed and not any(type(value) is type(one) and value == one for one in allowed):
            raise DriftlabError(f"{name} {value!r}: it is {' or '.join(map(str, allowed))}")
    if values.get("frozen") and values.get("gap", 0) != 1:
        raise DriftlabError(
            f"frozen with gap {values.get('gap', 0)}: drafted tokens that all stand at one place have gap 1"
        )
    order, count = values.get("order", ()), len(config.aux_layers)
    if order and (len(order) != count or set(order) != set(range(count))):
        raise DriftlabError(f"order {order!r}: the places 0..{count - 1} of the {count} captured states, each once")


@dataclass(frozen=True)
class Stored:
    """A checkpoint's tensors by canonical names, as read; and the target's tables. float32 where they are weights."""

    tensors: dict[str, Tensor]
    head: TargetHead | None
    """the target's; None: the file has an embedding and a head of its own"""
    d2t: Int[Tensor, " draft_vocab"] | None
    """as the file has it; None: the whole vocabulary"""

    @classmethod
    def of(cls, tensors: dict[str, Tensor], head: TargetHead | None, *, d2t: Tensor | None = None) -> Stored:
        """Take a checkpoint's tensors; ``d2t``: what the file holds where the reader has converted it."""
        held = {name: t.float() for name, t in tensors.items() if name not in ("d2t", "t2d")}
        return cls(held, head, tensors.get("d2t") if d2t is None else d2t)

    @property
    def has_fc_norm(self) -> bool:
        """Whether there are gains of one norm per captured state."""
        return "fc_norm.0.weight" in self.tensors

    @property
    def has_input_norm(self) -> bool:
        """Whether there are gains of one norm over the whole concat."""
        return "input_norm.weight" in self.tensors

    def rows(self, config: DrafterConfig) -> int:
        """How many rows the head has."""
        return len(self.tensors["lm_head.weight"]) if config.lm_head == "own" else config.draft_vocab_size

    def ids(self, how: D2T) -> Int[Tensor, " draft_vocab"] | None:
        """Return the target id of every draft id, some perhaps beyond the vocabulary; None: each is its own."""
        if self.d2t is None:
            return None
        d2t = self.d2t.long()
        return d2t + torch.arange(len(d2t)) if how == "offset" else d2t


class _Bare(Drafter):
    """A drafter whose weights are not drawn: they are put in."""

    def _initialise(self, seed: int) -> None:
        pass


class _Moved(Rotary):
    """A rotary embedding whose positions can be moved; the move is set before each depth."""

    def __init__(self, rotary: Rotary) -> None:
        super().__init__(rotary.width, rotary.theta, rotary.scaling, interleaved=rotary.interleaved)
        self.by = 0

    def forward(
        self, x: Float[Tensor, "batch head pos d_head"], positions: Int[Tensor, "batch pos"]
    ) -> Float[Tensor, "batch head pos d_head"]:
        """Turn ``x`` by its positions, moved."""
        return super().forward(x, positions + self.by)


def build(
    stored: Stored, view: View, among: Int[Tensor, " candidate"] | None = None
) -> tuple[Drafter, Int[Tensor, " rows"]]:
    """Return the drafter that a view makes of what is stored, and the target id of each of its head's rows.

    It always feeds back the state before the norm, and its head has the rows of the target ids ``among`` only, if given.

    (What is fed back, and where drafted tokens stand, is the unrolling's matter: depth 1 is then shared by readings that
    differ in these alone.)

    Raises:
        DriftlabError: a tensor that the view wants is not stored, or has another shape.
    """
    config = dataclasses.replace(
        view.config,
        own_embed=True,
        lm_head="own",
        draft_vocab_size=view.config.vocab_size,
        norm_output=False,
    )
    with torch.device("meta"):
        drafter = _Bare(config)
    ids = stored.ids(view.d2t)
    ids = torch.arange(stored.rows(view.config)) if ids is None else ids
    kept = torch.arange(len(ids)) if among is None else torch.isin(ids, among).nonzero()[:, 0]
    drafter.lm_head = Table(head_rows(stored, view, ids[kept], kept))
    drafter.embed_tokens = Table(_embedding(stored, view))
    wanted, held = drafter.state_dict(), _tensors(stored, view)
    for name, made in wanted.items():
        if name not in held or held[name].shape != made.shape:
            found = list(held[name].shape) if name in held else "not there"
            raise DriftlabError(f"{name} is {found}, this reading makes it {list(made.shape)}")
    drafter.load_state_dict({name: held[name] for name in wanted}, assign=True)
    for layer in drafter.layers:
        layer.self_attn.rotary = _Moved(layer.self_attn.rotary)
    return drafter.eval().requires_grad_(False), ids[kept]


def move(drafter: Drafter, by: int) -> None:
    """Let the positions that follow be so much further; of a drafter that :func:`build` made."""
    for layer in drafter.layers:
        layer.self_attn.rotary.by = by


def head_rows(
    stored: Stored, view: View, ids: Int[Tensor, " rows"], places: Int[Tensor, " rows"]
) -> Float[Tensor, "rows d_model"]:
    """Return the rows that make draft logits, of the draft ids ``places``, whose target ids are ``ids``."""
    if view.config.lm_head == "own":
        return stored.tensors["lm_head.weight"][places]
    if stored.head is None:
        raise DriftlabError(f"lm_head={view.config.lm_head} uses the target's head, and there is no target")
    rows = stored.head.lm_head[ids.clamp(0, len(stored.head.lm_head) - 1)].float()
    return rows * stored.head.norm_weight.float() if view.config.lm_head == "target_with_norm" else rows


def _embedding(stored: Stored, view: View) -> Tensor:
    if view.config.own_embed:
        return stored.tensors["embed_tokens.weight"]
    if stored.head is None:
        raise DriftlabError("own_embed=False uses the target's embedding, and there is no target")
    return stored.head.embed.float()


def _tensors(stored: Stored, view: View) -> dict[str, Tensor]:
    """Return the stored tensors as the view takes them."""
    config, held = view.config, dict(stored.tensors)
    if config.norm_before_fc and not stored.has_input_norm and stored.has_fc_norm:
        held["input_norm.weight"] = torch.cat([held[f"fc_norm.{i}.weight"] for i in range(config.states_read)])
    if config.fc_norm and not stored.has_fc_norm and stored.has_input_norm:
        parts = held["input_norm.weight"].chunk(config.states_read)
        held |= {f"fc_norm.{i}.weight": part for i, part in enumerate(parts)}
    if view.inputs == "hidden first":
        held |= _swapped(held)
    if view.grouping == "strided":
        held |= _strided(held, config)
    return held


def _swapped(held: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what reads [embedding, hidden] with its two halves of columns exchanged."""
    names = ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa", "gate")
    eagle = [f"layers.0.self_attn.{name}.weight" for name in names]
    readers = ["layers.0.eh_proj.weight"] if "layers.0.eh_proj.weight" in held else eagle
    return {name: torch.cat(held[name].chunk(2, 1)[::-1], 1) for name in readers if name in held}


def _strided(held: dict[str, Tensor], config: DrafterConfig) -> dict[str, Tensor]:
    """Return queries and output projections whose head h = i * kv_heads + j, sharing key head j, comes at j * group + i."""
    heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    order = torch.arange(heads).view(heads // kv_heads, kv_heads).T.flatten()
    rows = (order[:, None] * width + torch.arange(width)).flatten()
    moved = {}
    for name, tensor in held.items():
        if name.endswith(("self_attn.q_proj.weight", "self_attn.q_proj.bias", "self_attn.gate.weight")):
            moved[name] = tensor[rows]
        elif name.endswith("self_attn.o_proj.weight"):
            moved[name] = tensor[:, rows]
    return moved
