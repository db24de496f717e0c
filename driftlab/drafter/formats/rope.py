"""Rotary settings of a config.json: the older spelling, the newer one, and what is assumed where they are silent.

    older   rope_theta, rope_scaling {type or rope_type, factor, ...}
    newer   rope_parameters {rope_type, rope_theta, factor, ...}          (transformers 5)

A base that is absent is 10000 in every engine, whatever the target has. DeepSeek's latent attention multiplies cos and sin
under YaRN by m(mscale) / m(mscale_all_dim) with m(0) = 1 and defaults 1 and 0, in place of the general rule; see ``rotary``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

from driftlab.drafter.rotary import RopeScaling
from driftlab.errors import DriftlabError

ROPE_KEYS = frozenset({"rope_theta", "rope_scaling", "rope_parameters"})
DEFAULT_THETA = 10000.0

_YARN = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate")
_NUMBERS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", *_YARN),
}
_KINDS = {"deepseek_yarn": "yarn", "mrope": "default"}
_MULTI_AXIS = ("mrope_section", "mrope_interleaved", "interleaved")


@dataclass(frozen=True)
class Rope:
    """What the settings say of rotary embedding."""

    theta: float
    theta_read: bool
    """False: absent, so 10000"""
    scaling: RopeScaling | None
    scaling_said: str
    """how the settings spell it"""
    partial: float
    """share of a head's dimensions that is turned"""
    notes: tuple[str, ...]


def read_rope(values: Mapping[str, Any], *, latent: bool = False, given: Container[str] = ()) -> Rope:
    """Read the rotary settings.

    Args:
        values: config.json (of a speculators file: its transformer_layer_config).
        latent: the attention is MLA, so YaRN is DeepSeek's.
        given: of "rope_theta", "rope_scaling" and "rotary_dim" what the user knows better: that is not looked for.

    Raises:
        DriftlabError: a rope type that is not known, settings that it needs or does not have, or two that contradict.
    """
    notes: list[str] = []
    thetas: dict[str, float] = {}
    partials: dict[str, float] = {}
    kinds: dict[str, dict[str, Any]] = {}
    if "rope_theta" not in given:
        _take(thetas, "rope_theta", values.get("rope_theta"))
    _take(partials, "partial_rotary_factor", values.get("partial_rotary_factor"))
    for name in ("rope_parameters", "rope_scaling"):
        block = _block(values, name, given)
        theta = block.pop("rope_theta", None)
        if "rope_theta" not in given:
            _take(thetas, f"{name}.rope_theta", theta)
        _take(partials, f"{name}.partial_rotary_factor", block.pop("partial_rotary_factor", None))
        if block and "rope_scaling" in given:
            _axes(block, name, notes)
        elif block:
            kinds[name] = _kind(block, name, notes)
    theta, scaled = _agreed(thetas, "rotary bases"), _scaled(kinds)
    longest = values.get("max_position_embeddings")
    scaling = None if scaled["kind"] == "default" else _scaling(scaled, longest, latent, notes)
    said = f"rope type {scaled['kind']}" if kinds else "no rope_scaling and no rope_parameters"
    partial = _agreed(partials, "partial_rotary_factor")
    return Rope(
        DEFAULT_THETA if theta is None else theta,
        theta is not None,
        scaling,
        said,
        1.0 if partial is None else partial,
        tuple(notes),
    )


def _take(found: dict[str, float], name: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise DriftlabError(f"{name} is {value!r}, not a number above 0")
    found[name] = float(value)


def _agreed(found: dict[str, float], what: str) -> float | None:
    if len(set(found.values())) > 1:
        raise DriftlabError(f"contradicting {what} {found}")
    return next(iter(found.values()), None)


def turned_width(head_dim: int, share: float) -> int:
    """Return how many dimensions of a head a partial_rotary_factor turns, 0 for all, which is what DrafterConfig has for it.

    Raises:
        DriftlabError: it turns none, or more than there are.
    """
    if share == 1:
        return 0
    width = int(head_dim * share)
    if not 0 < width <= head_dim:
        raise DriftlabError(
            f"partial_rotary_factor {share:g} turns {width} of the {head_dim} dimensions of a head: give rotary_dim= for the "
            "number that was trained with"
        )
    return width


def _block(values: Mapping[str, Any], name: str, given: Container[str]) -> dict[str, Any]:
    block = values.get(name) or {}
    if not isinstance(block, dict):
        raise DriftlabError(f"{name} is {block!r}, not a table of settings")
    per_layer = sorted(key for key, value in block.items() if isinstance(value, dict))
    told = all(key in given for key in ("rope_theta", "rope_scaling"))
    partial = any("partial_rotary_factor" in block[key] for key in per_layer) and "rotary_dim" not in given
    if per_layer and (not told or partial):
        wanted = "rotary_dim=" if told else "rope_theta= and rope_scaling="
        raise DriftlabError(
            f"{name} has settings of its own for {per_layer}: one rotary embedding is supported; give {wanted}"
        )
    return {key: value for key, value in block.items() if value is not None and key not in per_layer}


def _axes(block: dict[str, Any], name: str, notes: list[str]) -> None:
    """Note several position axes of a block whose scaling the user gave."""
    axes = [key for key in _MULTI_AXIS if key in block]
    if axes or "mrope" in (block.get("rope_type"), block.get("type")):
        notes.append(
            f"rope: {name} has several position axes ({', '.join(axes) or 'mrope'}); in text all are the token's "
            "position. Images and video are not supported"
        )


def _kind(block: dict[str, Any], name: str, notes: list[str]) -> dict[str, Any]:
    """Return the block with its kind normalised and only what the kind has."""
    said = {str(block.pop(key)) for key in ("rope_type", "type") if key in block}
    axes = [key for key in _MULTI_AXIS if block.pop(key, None) is not None]
    normal = {_KINDS.get(kind, kind) for kind in said} or {"default"}
    if len(normal) > 1:
        raise DriftlabError(f"{name} names two rope types, {sorted(said)}: keep the right one")
    kind = normal.pop()
    if axes or "mrope" in said:
        if kind != "default":
            raise DriftlabError(
                f"{name}: rope type {kind!r} with {', '.join(axes)}: SGLang drops the scaling, vLLM keeps it; give "
                "rope_scaling="
            )
        notes.append(
            f"rope: {name} has several position axes ({', '.join(axes) or 'mrope'}); in text all are the token's "
            "position, so it is plain rotary embedding. Images and video are not supported"
        )
    for key in ("extrapolation_factor", "attn_factor", *(("factor",) if kind == "default" else ())):
        if block.get(key) == 1:  # changes nothing
            block.pop(key)
    if kind == "default":
        wrong = sorted(
            key for key in block if key not in ("original_max_position_embeddings", "max_position_embeddings")
        )
        if wrong and not said:
            raise DriftlabError(f"{name} sets {wrong} but no rope_type: add the one that was trained with")
        if wrong:
            raise DriftlabError(f"{name} sets {wrong}, which plain rotary embedding (rope type default) does not have")
        return {"kind": kind}
    if kind not in _NUMBERS:
        known = ", ".join(("default", *_NUMBERS))
        raise DriftlabError(f"rope type {kind!r} is not supported, only {known} ({name})")
    optional = {"original_max_position_embeddings"} if kind in ("linear", "dynamic") else set()
    wrong = sorted(set(block) - set(_NUMBERS[kind]) - optional)
    if wrong:
        raise DriftlabError(f"{name}: rope type {kind} does not have the settings {wrong}")
    return {"kind": kind, **{key: value for key, value in block.items() if key in _NUMBERS[kind]}}


def _scaled(kinds: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the one scaling that the blocks name."""
    found = list(kinds.values())
    if len(found) == 2 and found[0] != found[1]:
        raise DriftlabError(f"rope_parameters and rope_scaling contradict each other: {found[0]} and {found[1]}")
    return found[0] if found else {"kind": "default"}


def _scaling(scaled: dict[str, Any], longest: Any, latent: bool, notes: list[str]) -> RopeScaling:
    kind = scaled["kind"]
    numbers = {key: value for key, value in scaled.items() if key != "kind"}
    for key, value in numbers.items():
        wanted = bool if key == "truncate" else (int, float)
        fits = isinstance(value, wanted) and (key == "truncate" or not isinstance(value, bool))
        if not fits or not math.isfinite(value):
            raise DriftlabError(f"rope type {kind}: {key} is {value!r}")
    required = _NUMBERS[kind] if kind == "llama3" else ("factor",)
    missing = [key for key in required if key not in numbers]
    if missing:
        raise DriftlabError(f"rope type {kind!r} without {missing}: add what was trained with")
    original = numbers.pop("original_max_position_embeddings", None)
    if kind == "linear":
        original = 0
    elif kind == "dynamic" or original is None:
        if not isinstance(longest, int) or longest < 1:
            raise DriftlabError(f"rope type {kind!r} without the original length: add max_position_embeddings")
        if kind == "yarn":
            notes.append(
                f"rope: yarn without original_max_position_embeddings; max_position_embeddings {longest} is taken "
                "for it"
            )
        original = longest
    if original != int(original):
        raise DriftlabError(f"rope type {kind}: original_max_position_embeddings is {original!r}, not a whole number")
    truncate = numbers.pop("truncate", True)
    values = {key: float(value) for key, value in numbers.items()}
    scaling = RopeScaling(kind=kind, original_max_positions=int(original), truncate=truncate, **values)
    return _deepseek(scaling, notes) if latent and kind == "yarn" else scaling


def _deepseek(scaling: RopeScaling, notes: list[str]) -> RopeScaling:
    """Return YaRN as DeepSeek's attention has it: cos and sin times m(mscale) / m(mscale_all_dim)."""
    if scaling.attention_factor is not None:
        if scaling.attention_factor == 1.0 and scaling.mscale_all_dim:
            notes.append(
                "rope: attention_factor is 1, for which vLLM leaves out the factor m(mscale_all_dim)^2 of the "
                "softmax scale; it is kept here, as in SGLang and TorchSpec"
            )
        return scaling
    mscale = 1.0 if scaling.mscale is None else scaling.mscale
    factor = scaling.magnitude(mscale) / scaling.magnitude(scaling.mscale_all_dim or 0.0)
    return scaling if factor == scaling.rotation_factor else dataclasses.replace(scaling, attention_factor=factor)
