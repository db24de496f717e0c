"""config.json as each engine's loader wants it: names, places, the engine's own counting of layers, both spellings of rope.

vLLM         flat; layer ids as boundaries, at the top level and in eagle_config (its two runners look in one each)
SGLang       flat; layer ids in eagle_config only, as outputs of layers; draft_vocab_size must be a key
speculators  one layer's settings in transformer_layer_config, the switches above it; norm_before_residual always said,
             for speculators takes it as off and vLLM as on where it is missing
SafeAILab    flat, older spelling of rope alone; target_hidden_size only where the file brings its own embedding
"""

from __future__ import annotations

from typing import Any

from driftlab.drafter.config import DrafterConfig
from driftlab.drafter.formats.limits import Format, TargetFacts, sglang_ids

UNKNOWN_TARGET_POSITIONS = 32768
"""max_position_embeddings where the target is not known"""


def settings_of(
    config: DrafterConfig, form: Format, facts: TargetFacts, *, dtype: str, num_speculative_tokens: int
) -> dict[str, Any]:
    """Return config.json of a format that can carry the drafter (see :mod:`limits`)."""
    if form == "speculators":
        return _speculators(config, facts, dtype, num_speculative_tokens)
    plain = {**_layer(config, facts), "torch_dtype": dtype, "draft_vocab_size": config.draft_vocab_size}
    return {"vllm": _vllm, "sglang": _sglang, "safeailab": _safeailab}[form](config, facts, plain)


def max_positions(config: DrafterConfig, facts: TargetFacts) -> int:
    """Return max_position_embeddings: the target's, or more where the drafter's rotary scaling reaches further."""
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "dynamic":
        return scaling.original_max_positions  # there it is the length from which on the base grows
    reach = 0 if scaling is None else int(scaling.original_max_positions * scaling.factor)
    return max(facts.max_positions or UNKNOWN_TARGET_POSITIONS, reach, config.trained_length)


def rope_scaling(config: DrafterConfig, key: str = "rope_type") -> dict[str, Any] | None:
    """Return the scaling's settings, None if there is none; ``key`` is how its kind is called."""
    scaling = config.rope_scaling
    if scaling is None:
        return None
    values: dict[str, Any] = {key: scaling.kind, "factor": scaling.factor}
    if scaling.kind in ("llama3", "yarn"):
        values["original_max_position_embeddings"] = scaling.original_max_positions
    if scaling.kind == "llama3":
        values |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.kind == "yarn":
        values |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
        extras = ("mscale", "mscale_all_dim", "attention_factor")
        values |= {name: getattr(scaling, name) for name in extras if getattr(scaling, name) is not None}
        values |= {} if scaling.truncate else {"truncate": False}
        if config.latent is not None and not scaling.mscale:  # DeepSeek's rule takes 1 and 0 where they are not said
            values |= {"mscale": 1.0, "mscale_all_dim": 0.0}
    return values


def _layer(config: DrafterConfig, facts: TargetFacts) -> dict[str, Any]:
    """What a decoder layer of the family is described by."""
    values: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": max_positions(config, facts),
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "model_type": _model_type(config),
    }
    scaling = rope_scaling(config)
    values |= {"rope_theta": config.rope_theta, "rope_scaling": scaling}
    values["rope_parameters"] = {**(scaling or {"rope_type": "default"}), "rope_theta": config.rope_theta}
    if config.latent is None:
        return values | {"head_dim": config.head_dim}
    latent = config.latent
    return values | {
        "num_key_value_heads": config.num_attention_heads,
        "q_lora_rank": latent.q_lora_rank,
        "kv_lora_rank": latent.kv_lora_rank,
        "qk_nope_head_dim": latent.qk_nope_head_dim,
        "qk_rope_head_dim": latent.qk_rope_head_dim,
        "v_head_dim": latent.v_head_dim,
        "rope_interleave": True,
    }


def _model_type(config: DrafterConfig) -> str:
    if config.latent is not None:
        return "deepseek_v3"
    return "qwen3" if config.qk_norm else "llama"


def _biases(config: DrafterConfig) -> dict[str, Any]:
    return {
        "attention_bias": config.attention_bias or config.output_bias,
        **({} if config.qk_norm or config.latent else {"mlp_bias": config.mlp_bias}),
    }


def _windows(config: DrafterConfig) -> dict[str, Any]:
    if not any(config.windows):
        return {}
    kinds = ["sliding_attention" if width else "full_attention" for width in config.windows]
    return {"layer_types": kinds, "sliding_window": max(config.windows), "use_sliding_window": True}


def _states(config: DrafterConfig) -> dict[str, Any]:
    """vLLM makes these settings its own and takes three states where it does not find the number there."""
    return {} if len(config.aux_layers) == 3 else {"num_aux_hidden_states": len(config.aux_layers)}


def _switches(config: DrafterConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in ("fc_norm", "norm_output", "norm_before_fc")}


def _vllm(config: DrafterConfig, facts: TargetFacts, plain: dict[str, Any]) -> dict[str, Any]:
    block = {"norm_before_fc": config.norm_before_fc, "use_aux_hidden_state": bool(config.aux_layers)}
    values = {
        **plain,
        "architectures": [_vllm_architecture(config)],
        "target_hidden_size": config.target_hidden_size,
        **_switches(config),
        "norm_before_residual": config.norm_before_residual,
        **_biases(config),
        **_windows(config),
        **({} if config.logit_scale == 1 else {"logit_scale": config.logit_scale}),
    }
    if config.aux_layers:
        ids = {"eagle_aux_hidden_state_layer_ids": list(config.aux_layers)}
        block |= ids
        values |= {**ids, "num_aux_hidden_states": len(config.aux_layers)}
    return values | {"eagle_config": block}


def _vllm_architecture(config: DrafterConfig) -> str:
    if config.latent is not None:
        return "Eagle3DeepseekV2ForCausalLM"
    return "Eagle3Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLMEagle3"


def _sglang(config: DrafterConfig, facts: TargetFacts, plain: dict[str, Any]) -> dict[str, Any]:
    block: dict[str, Any] = {
        "norm_before_fc": config.norm_before_fc,
        "use_aux_hidden_state": bool(config.aux_layers),
    }
    values = {
        **plain,
        "architectures": ["Eagle3DeepseekV2ForCausalLM" if config.latent else "LlamaForCausalLMEagle3"],
        "target_hidden_size": config.target_hidden_size,
        "bias": config.fc_bias,
        "attention_bias": False,
        **_switches(config),
    }
    if config.aux_layers:
        block["eagle_aux_hidden_state_layer_ids"] = list(sglang_ids(config.aux_layers, facts))
        values["num_aux_hidden_states"] = len(config.aux_layers)
    return values | {"eagle_config": block}


def _safeailab(config: DrafterConfig, facts: TargetFacts, plain: dict[str, Any]) -> dict[str, Any]:
    values = {key: value for key, value in plain.items() if key not in ("rope_parameters", "head_dim")}
    brings = {"target_hidden_size": config.target_hidden_size} if config.own_embed else {}
    return values | brings | {"architectures": ["LlamaForCausalLM"], "rope_scaling": rope_scaling(config, "type")}


def _speculators(config: DrafterConfig, facts: TargetFacts, dtype: str, tokens: int) -> dict[str, Any]:
    proposal = {"proposal_type": "greedy", "speculative_tokens": tokens}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "dtype": dtype,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": None,
        **_switches(config),
        "norm_before_residual": config.norm_before_residual,
        "eagle_aux_hidden_state_layer_ids": list(config.aux_layers),
        "embed_requires_grad": config.own_embed,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{**proposal, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": facts.name, "architectures": []},
        },
        "transformer_layer_config": {**_layer(config, facts), **_biases(config), **_windows(config), **_states(config)},
    }
