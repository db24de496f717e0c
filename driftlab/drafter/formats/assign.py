"""Putting a file's tensors into a drafter, strictly: none missing, none unused, every shape as the configuration makes it.

Only what the user switched off may leave tensors of the file without use, and that is said.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Set

import torch
from torch import Tensor

from driftlab.drafter.config import DrafterConfig
from driftlab.drafter.model import Drafter
from driftlab.errors import DriftlabError

# field that, given by the user, may leave these tensors without use
_LEFT_OUT = (
    ("fc_norm", re.compile(r"fc_norm\.")),
    ("norm_before_fc", re.compile(r"input_norm\.")),
    ("head_norm", re.compile(r"norm\.")),
    ("fc_bias", re.compile(r"fc\.bias")),
    ("aux_layers", re.compile(r"(fc|fc_norm|input_norm)\.")),
    ("qk_norm", re.compile(r".*\.[qk]_norm\.")),
    ("attention_gate", re.compile(r".*\.self_attn\.gate\.")),
    ("output_bias", re.compile(r".*\.o_proj\.bias")),
    ("attention_bias", re.compile(r".*\.[qkv]_proj\.bias")),
    ("mlp_bias", re.compile(r".*\.mlp\..*\.bias")),
    ("lm_head", re.compile(r"lm_head\.")),
    ("own_embed", re.compile(r"embed_tokens\.")),
    ("num_hidden_layers", re.compile(r"layers\.")),
)
_MAPS = ("d2t", "t2d")


class _Shapes(Drafter):
    """A drafter without weights."""

    def _initialise(self, seed: int) -> None:
        pass


def expected_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every tensor that the configuration wants, the vocabulary's maps aside."""
    alone = dataclasses.replace(config, own_embed=True, lm_head="own", draft_vocab_size=config.vocab_size)
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in _Shapes(alone).state_dict().items()}
    shapes["lm_head.weight"] = (config.draft_vocab_size, config.hidden_size)
    lent = [] if config.own_embed else ["embed_tokens.weight"]
    lent += [] if config.lm_head == "own" else ["lm_head.weight"]
    return {name: shape for name, shape in shapes.items() if name not in lent}


def check_shapes(config: DrafterConfig, shapes: Mapping[str, tuple[int, ...]], given: Set[str]) -> list[str]:
    """Compare a file with its configuration, before any weight is read.

    Args:
        config: of the drafter.
        shapes: canonical name -> shape, of the file.
        given: fields that the user gave; what they leave without use is no fault.

    Returns:
        Notes on tensors that stay unused.

    Raises:
        DriftlabError: a missing, unused or misshapen tensor.
    """
    expected = expected_shapes(config)
    there = {name: tuple(shape) for name, shape in shapes.items() if name not in _MAPS}
    left_out = {name: _switch_of(name, config, given) for name in sorted(set(there) - set(expected))}
    missing = sorted(set(expected) - set(there))
    unused = [name for name, switch in left_out.items() if switch is None]
    if missing or unused:
        raise DriftlabError(f"missing tensors {missing}; unused tensors {unused}")
    for name, shape in expected.items():
        if there[name] != shape:
            raise DriftlabError(f"{name} is {list(there[name])}, the configuration makes it {list(shape)}")
    return [
        f"{switch}: as given, so {', '.join(name for name, s in left_out.items() if s == switch)} of the file is not used"
        for switch in sorted({switch for switch in left_out.values() if switch is not None})
    ]


def assign(drafter: Drafter, tensors: Mapping[str, Tensor]) -> None:
    """Copy the tensors, whose names and shapes were checked, into the drafter.

    Raises:
        DriftlabError: a weight that is not of a floating-point type, or a value that is not finite.
    """
    drafter.load_state_dict({name: _cast(name, tensors[name], made) for name, made in drafter.state_dict().items()})


def _cast(name: str, tensor: Tensor, made: Tensor) -> Tensor:
    if made.is_floating_point() and not tensor.is_floating_point():
        raise DriftlabError(f"{name} is stored as {_kind(tensor)}: a weight is a floating-point number")
    cast = tensor.to(made.dtype)
    if made.is_floating_point() and not bool(cast.isfinite().all()):
        raise DriftlabError(f"{name} holds values that are not finite in {_kind(cast)}")
    return cast


def _kind(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _switch_of(name: str, config: DrafterConfig, given: Set[str]) -> str | None:
    """Return the switch that the user gave off and that a tensor belongs to."""
    for switch, pattern in _LEFT_OUT:
        if switch in given and pattern.match(name) and _is_off(switch, name, config):
            return switch
    return None


def _is_off(switch: str, name: str, config: DrafterConfig) -> bool:
    if switch == "num_hidden_layers":
        index = name.split(".")[1]
        return index.isdigit() and int(index) >= config.num_hidden_layers
    value = getattr(config, switch)
    return value != "own" if switch == "lm_head" else not value
