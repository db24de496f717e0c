"""Settings of a wrong kind in config.json, before the engines' rules look at them; a part of :mod:`rules`."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable
from typing import Any

from driftlab.drafter.formats.loader_tensors import whole

IDS = "eagle_aux_hidden_state_layer_ids"
_MOST = 1000
"""layers, or captured states: more than any target has, and each asks for tensors"""


def _number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) < 2**63 if isinstance(value, int) else math.isfinite(value)


def _strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _count(value: Any) -> bool:
    return whole(value) and value <= _MOST


_KINDS: dict[str, tuple[Callable[[Any], bool], str, tuple[str, ...]]] = {
    "sizes": (
        whole,
        "a whole number above 0",
        (
            *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
            *("vocab_size", "target_hidden_size", "max_position_embeddings", "original_max_position_embeddings"),
            *("sliding_window", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
            *("speculative_tokens", "draft_vocab_size"),
        ),
    ),
    "counts": (
        _count,
        f"a whole number in 1..{_MOST}",
        ("num_hidden_layers", "num_aux_hidden_states", "num_aux_layers"),
    ),
    "flags": (
        lambda value: isinstance(value, bool),
        "true or false",
        (
            *("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual", "tie_word_embeddings", "bias"),
            *("attention_bias", "mlp_bias", "use_aux_norm", "use_aux_hidden_state", "truncate"),
        ),
    ),
    "numbers": (
        _number,
        "a finite number",
        (
            *("rms_norm_eps", "rope_theta", "logit_scale", "factor", "low_freq_factor", "high_freq_factor"),
            *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"),
        ),
    ),
    "strings": (
        lambda value: isinstance(value, str),
        "a string",
        (
            *("model_type", "hidden_act", "type", "rope_type", "speculators_model_type", "algorithm"),
            *("default_proposal_method", "proposal_type", "name_or_path"),
        ),
    ),
    "lists of strings": (_strings, "a list of strings", ("architectures", "layer_types")),
    "lists": (lambda value: isinstance(value, list), "a list", (IDS,)),
    "objects": (
        lambda value: isinstance(value, dict),
        "an object",
        (
            *("eagle_config", "rope_scaling", "rope_parameters", "speculators_config", "transformer_layer_config"),
            "verifier",
        ),
    ),
    "lists of objects": (
        lambda value: isinstance(value, list) and all(isinstance(item, dict) for item in value),
        "a list of objects",
        ("proposal_methods",),
    ),
}
_RULES = {name: (holds, what) for holds, what, names in _KINDS.values() for name in names}
_NEVER_NULL = frozenset((*_KINDS["flags"][2], "num_hidden_layers"))
"""null is no value there; elsewhere engines take it as not said"""


def well_kinded(config: dict[str, Any], place: str = "") -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings that are of the right kind, and for each other one its place -> a finding.

    Args:
        config: config.json, or a block of it.
        place: where the block is, ending with a dot.
    """
    kept: dict[str, Any] = {}
    wrong: dict[str, str] = {}
    for name, value in config.items():
        holds, what = _RULES.get(name, (None, ""))
        absent = value is None and name not in _NEVER_NULL
        if holds is not None and not absent and not holds(value):
            wrong[place + name] = f"{place}{name}: {reprlib.repr(value)} is not {what}"
        elif holds is not None and isinstance(value, dict):
            kept[name], inner = well_kinded(value, f"{place}{name}.")
            wrong |= inner
        elif name == "proposal_methods" and value is not None:
            blocks = [well_kinded(block, f"{place}{name}[{i}].") for i, block in enumerate(value)]
            kept[name] = [block for block, _ in blocks]
            wrong |= {key: words for _, inner in blocks for key, words in inner.items()}
        else:
            kept[name] = value
    return kept, wrong
