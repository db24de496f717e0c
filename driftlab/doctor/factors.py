"""The conventions that may be read wrong, each with the values that the tensors and the recording allow.

A :class:`Level` is one value of one factor: what it changes in a :class:`View`. A reading is the declared view with some
levels applied, one a factor. What no recorded text can tell apart is not offered as another reading but listed by :func:`same`,
with the reason: a constant shift of all rotary positions (scores depend on differences alone), and, where only one token is
drafted, the feedback.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch

from driftlab.doctor.stored import Stored, View
from driftlab.drafter.config import DrafterConfig
from driftlab.drafter.formats.conventions import shown
from driftlab.errors import DriftlabError
from driftlab.recorded import TargetSpec

_WIDTHS = (32, 48, 64, 80, 96, 112, 128, 160, 192, 256)
_COMMON_THETA = 10000.0


@dataclass(frozen=True)
class Level:
    """One value of a factor, and the fields of the configuration and of the view that make it."""

    factor: str
    label: str
    config: dict[str, Any] = field(default_factory=dict)
    view: dict[str, Any] = field(default_factory=dict)

    def apply(self, view: View) -> View:
        """Return the view so read. Raises DriftlabError where the settings contradict each other."""
        return dataclasses.replace(view, config=dataclasses.replace(view.config, **self.config), **self.view)


@dataclass(frozen=True)
class Factors:
    """The factors of a file: name to levels, the declared one first; and what was not tried, with the reason."""

    declared: View
    levels: dict[str, tuple[Level, ...]]
    skipped: tuple[str, ...]

    def view(self, point: dict[str, Level]) -> View:
        """Return the reading that has these levels, and the declared one of all other factors."""
        view = self.declared
        for level in point.values():
            view = level.apply(view)
        return view


def plausible(
    declared: View, stored: Stored, spec: TargetSpec | None, recorded: tuple[int, ...], depth: int
) -> Factors:
    """Return the readings that are worth trying.

    Args:
        declared: how the file is read now.
        stored: its tensors.
        spec: of the target, if there is one.
        recorded: target states that the recording holds.
        depth: deepest depth scored; at 1 nothing is fed back.
    """
    skipped: list[str] = []
    found = [
        *_layers(declared, spec, recorded, skipped),
        *_fusion(declared, stored),
        *_norms(declared, stored),
        *_inputs(declared),
        *_tables(declared, stored),
        *_rope(declared, spec, depth),
        *_heads(declared, stored),
    ]
    levels: dict[str, list[Level]] = {}
    for level in found:
        levels.setdefault(level.factor, []).append(level)
    kept = {name: _distinct(declared, each, skipped) for name, each in levels.items()}
    return Factors(declared, {name: each for name, each in kept.items() if len(each) > 1}, tuple(skipped))


def same(view: View, depth: int) -> tuple[str, ...]:
    """Return what no recorded text can tell from this reading, in words."""
    words = []
    if view.config.rope_scaling is None or view.config.rope_scaling.kind != "dynamic":
        words.append(
            "rotary positions that all begin at another number: scores depend on differences of positions alone"
        )
    if depth == 1:
        words.append("the state fed back: only one token is drafted, and nothing is fed back")
    return tuple(words)


def aux_candidates(layers: tuple[int, ...], num_layers: int) -> dict[str, tuple[int, ...]]:
    """Return the lists of captured states that a list may have been meant as, by what was counted otherwise."""
    lists = {
        "each one layer later": tuple(k + 1 for k in layers),
        "each one layer earlier": tuple(k - 1 for k in layers),
    }
    default = (2, num_layers // 2, num_layers - 3)
    if len(layers) == 3 and 2 < default[1] < default[2]:
        lists["the engines' default"] = default
    return {
        words: ids for words, ids in lists.items() if ids and ids[0] >= 0 and ids[-1] <= num_layers and ids != layers
    }


def _distinct(declared: View, levels: list[Level], skipped: list[str]) -> tuple[Level, ...]:
    """Return the declared level and those that make another view of it, each view once."""
    seen: set[View] = set()
    kept: list[Level] = []
    for level in levels:
        try:
            view = level.apply(declared)
        except DriftlabError as error:
            skipped.append(f"{level.factor} {level.label}: {error}")
            continue
        if view not in seen:
            kept.insert(0 if view == declared else len(kept), level)
        seen.add(view)
    return tuple(kept)


def _layers(view: View, spec: TargetSpec | None, recorded: tuple[int, ...], skipped: list[str]) -> list[Level]:
    layers = view.config.aux_layers
    if not layers:
        return []
    levels = [Level("aux_layers", shown(layers), {"aux_layers": layers})]
    if spec is not None:
        for words, ids in aux_candidates(layers, spec.num_layers).items():
            if set(ids) <= set(recorded):
                levels.append(Level("aux_layers", f"{shown(ids)} ({words})", {"aux_layers": ids}))
            else:
                lacking = sorted(set(ids) - set(recorded))
                skipped.append(
                    f"aux_layers {shown(ids)} ({words}): the recording has no states {shown(tuple(lacking))}"
                )
    skipped.append("aux_layers other than these: all one earlier or later, and the engines' default")
    count = len(layers)
    orders = {"ascending": (), "descending": tuple(range(count))[::-1]}
    if count > 2:
        orders |= {"last first": (count - 1, *range(count - 1)), "first last": (*range(1, count), 0)}
    if view.order and view.order not in orders.values():
        orders["as given"] = view.order
    return levels + [Level("aux_order", words, view={"order": order}) for words, order in orders.items()]


def _fusion(view: View, stored: Stored) -> list[Level]:
    """One norm a state, or one over the concat: the gains are the same numbers in the same order."""
    if not view.config.aux_layers or not (stored.has_fc_norm or stored.has_input_norm):
        return []
    ways = {
        "fc_norm (one norm a state)": {"fc_norm": True, "norm_before_fc": False},
        "norm_before_fc (one norm over the concat)": {"fc_norm": False, "norm_before_fc": True},
        "no norm before fc (its gains unused)": {"fc_norm": False, "norm_before_fc": False},
    }
    if stored.has_fc_norm and stored.has_input_norm:
        ways["norm_before_fc, then fc_norm"] = {"fc_norm": True, "norm_before_fc": True}
    return [Level("norm before fc", words, fields) for words, fields in ways.items()]


def _norms(view: View, stored: Stored) -> list[Level]:
    levels = [
        Level("norm_output", "off (fed back before the norm)", {"norm_output": False, "head_norm": True}),
        Level("norm_output", "on (fed back after the norm)", {"norm_output": True, "head_norm": True}),
        Level(
            "norm_output",
            "off, and the head reads the state without the norm",
            {"norm_output": False, "head_norm": False},
        ),
        Level("gain", "w", {"norm_plus_one": False}),
        Level("gain", "1 + w", {"norm_plus_one": True}),
    ]
    if view.config.architecture == "eagle3":
        for name in ("norm_before_residual", "twice_normed"):
            levels += [Level(name, shown(value), {name: value}) for value in (False, True)]
    if "layers.0.self_attn.q_norm.weight" in stored.tensors:
        levels += [Level("qk_norm", shown(value), {"qk_norm": value}) for value in (False, True)]
    return levels


def _inputs(view: View) -> list[Level]:
    levels = [
        Level("token_shift", words, view={"token_shift": shift})
        for shift, words in (
            (1, "1 (a state with the token after it)"),
            (0, "0 (a state with its own token)"),
            (2, "2 (the state before with the token after)"),
        )
    ]
    ways = ("embedding first", "hidden first")
    levels += [Level("inputs", words, view={"inputs": words}) for words in ways]
    if view.config.architecture == "mtp":
        kinds = ("normed", "raw", "normed twice")
        levels += [Level("final_state", words, view={"final_state": words}) for words in kinds]
        levels += [
            Level("zero_first_embedding", shown(value), {"zero_first_embedding": value}) for value in (False, True)
        ]
    return levels


def _tables(view: View, stored: Stored) -> list[Level]:
    levels = []
    head = stored.head
    if "embed_tokens.weight" in stored.tensors and head is not None:
        own = stored.tensors["embed_tokens.weight"]
        if own.shape == head.embed.shape and not torch.equal(own, head.embed.float()):
            levels += [Level("embedding", "the file's own", {"own_embed": True})]
            levels += [Level("embedding", "the target's", {"own_embed": False})]
    if "lm_head.weight" not in stored.tensors and head is not None:
        levels += [
            Level("lm_head", "the target's rows times its final norm's gain", {"lm_head": "target_with_norm"}),
            Level("lm_head", "the target's rows", {"lm_head": "target"}),
        ]
    if stored.d2t is not None:
        levels += [
            Level("d2t", how, view={"d2t": how})
            for how in ("offset", "absolute")
            if how == view.d2t or _are_ids(stored, how, view.config.vocab_size)
        ]
    return levels


def _are_ids(stored: Stored, how: Any, vocab: int) -> bool:
    ids = stored.ids(how)
    return bool((ids.diff() > 0).all()) and int(ids[0]) >= 0 and int(ids[-1]) < vocab


def _rope(view: View, spec: TargetSpec | None, depth: int) -> list[Level]:
    config = view.config
    thetas = {config.rope_theta: "declared", _COMMON_THETA: "what engines take where none is said"}
    if spec is not None:
        thetas.setdefault(spec.rope_theta, "the target's")
    levels = [Level("rope_theta", f"{theta:g} ({words})", {"rope_theta": theta}) for theta, words in thetas.items()]
    levels += [
        Level("rope_interleaved", "off (halves of a head)", {"rope_interleaved": False}),
        Level("rope_interleaved", "on (neighbours)", {"rope_interleaved": True}),
    ]
    if config.rope_scaling is not None:
        levels += [Level("rope_scaling", shown(s), {"rope_scaling": s}) for s in (config.rope_scaling, None)]
    if depth > 1:
        gaps = {
            "drafted tokens stand next to the last row": {"gap": 0, "frozen": False},
            "drafted tokens begin one further": {"gap": 1, "frozen": False},
            "drafted tokens begin where the last row stands": {"gap": -1, "frozen": False},
            "drafted tokens all stand where the first does": {"gap": 1, "frozen": True},
        }
        levels += [Level("position", words, view=fields) for words, fields in gaps.items()]
    return levels


def _heads(view: View, stored: Stored) -> list[Level]:
    """Other head widths that the shapes allow, and the other way of sharing keys. (MLA's parts have widths of their own.)"""
    config = view.config
    if config.latent is not None:
        return []
    rows, kv_rows = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    levels = [_head_level(rows, kv_rows, config.head_dim)]
    if not config.qk_norm and not config.rotary_dim:  # their width is that of the norms
        for width in _WIDTHS:
            if rows % width == 0 and kv_rows % width == 0 and (rows // width) % (kv_rows // width) == 0:
                levels.append(_head_level(rows, kv_rows, width))
    if 1 < config.num_key_value_heads < config.num_attention_heads:
        levels += [
            Level("key heads", "shared by neighbours", view={"grouping": "blocks"}),
            Level("key heads", "shared by every n-th head", view={"grouping": "strided"}),
        ]
    return levels


def _head_level(rows: int, kv_rows: int, width: int) -> Level:
    fields = {"head_dim": width, "num_attention_heads": rows // width, "num_key_value_heads": kv_rows // width}
    words = f"{width} ({rows // width} query, {kv_rows // width} key heads)"
    return Level("head_dim", words, fields)


def fields_of(config: DrafterConfig, declared: DrafterConfig) -> dict[str, Any]:
    """Return the fields in which a configuration differs from the declared one."""
    return {
        f.name: getattr(config, f.name)
        for f in dataclasses.fields(config)
        if getattr(config, f.name) != getattr(declared, f.name)
    }
