"""The settings of a config.json of an EAGLE-3 drafter: what is known, what is harmless, what contradicts itself.

Settings stand at the top level, in ``eagle_config``, or (speculators) in ``transformer_layer_config``. One that is not known
and could matter is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from driftlab.drafter.formats.rope import ROPE_KEYS
from driftlab.errors import DriftlabError

_SIZES = {
    *(
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "num_hidden_layers",
    ),
    *(
        "vocab_size",
        "draft_vocab_size",
        "truncated_vocab_size",
        "target_hidden_size",
        "rms_norm_eps",
        "intermediate_size_mlp",
    ),
}
_READ = {
    *_SIZES,
    *ROPE_KEYS,
    *("partial_rotary_factor", "rope_interleave", "max_position_embeddings", "hidden_act", "tie_word_embeddings"),
    *(
        "fc_norm",
        "use_aux_norm",
        "norm_output",
        "norm_before_fc",
        "norm_before_residual",
        "bias",
        "attention_bias",
        "mlp_bias",
    ),
    *("logit_scale", "layer_types", "sliding_window", "use_sliding_window", "num_aux_hidden_states", "num_aux_layers"),
    *("eagle_aux_hidden_state_layer_ids", "eagle_config", "speculators_model_type", "transformer_layer_config"),
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim"),
}
_NESTED_READ = {
    *("eagle_aux_hidden_state_layer_ids", "use_aux_hidden_state", "norm_before_fc", "norm_before_residual"),
    "return_hidden_post_norm",
}
_NESTED_FIXED = {
    **{"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False},
    **{"next_layer_regular": True, "parallel_draft_step": 1, "eh_proj_before_attn": False, "eh_proj_bias": False},
}
_NESTED_HARMLESS = {"parallel_draft_heads_num_layers"}
_BOOKKEEPING = {
    *("architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "use_cache", "initializer_range"),
    *(
        "pretraining_tp",
        "attention_dropout",
        "hidden_dropout",
        "_name_or_path",
        "name_or_path",
        "auto_map",
        "max_window_layers",
    ),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id"),
    "target_model_type",
    *("speculators_version", "speculators_config", "has_no_defaults_at_init", "embed_requires_grad", "unsloth_version"),
    *("_torchspec_version", "torchspec_version", "quantization_config", "compression_config", "_attn_implementation"),
    *("_attn_implementation_autoset", "attn_implementation", "_commit_hash", "task_specific_params", "problem_type"),
    *(
        "id2label",
        "label2id",
        "num_labels",
        "finetuning_task",
        "tokenizer_class",
        "prefix",
        "return_dict",
        "torchscript",
    ),
    *("output_attentions", "output_hidden_states", "use_bfloat16", "tf_legacy_loss", "pruned_heads", "is_decoder"),
    *(
        "is_encoder_decoder",
        "add_cross_attention",
        "cross_attention_hidden_size",
        "tie_encoder_decoder",
        "is_llama_config",
    ),
    *(
        "chunk_size_feed_forward",
        "max_length",
        "min_length",
        "do_sample",
        "early_stopping",
        "num_beams",
        "num_beam_groups",
    ),
    *("diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores"),
    *(
        "return_dict_in_generate",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "remove_invalid_values",
        "begin_suppress_tokens",
    ),
    *("exponential_decay_length_penalty", "suppress_tokens", "base_model_tp_plan", "base_model_pp_plan", "training"),
}
# copied from a target with experts; a drafter's MLP is dense in every engine, and tensors of experts would be refused
_OF_EXPERTS = {
    *(
        "n_routed_experts",
        "n_shared_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "moe_layer_freq",
        "n_group",
    ),
    *("first_k_dense_replace", "routed_scaling_factor", "scoring_func", "topk_method", "topk_group", "norm_topk_prob"),
    *("aux_loss_alpha", "seq_aux", "ep_size", "num_nextn_predict_layers", "num_local_experts"),
    *("experts_per_token", "num_experts"),
}


@dataclass(frozen=True)
class Settings:
    """Settings of a file: the top level (of speculators with its layer's), and eagle_config."""

    values: Mapping[str, Any]
    nested: Mapping[str, Any]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Settings:
        """Lay the layer's settings of a speculators file and its own on one level, as vLLM does.

        Raises:
            DriftlabError: the two levels contradict each other.
        """
        layer = config.get("transformer_layer_config") or {}
        nested = config.get("eagle_config") or {}
        for name, block in (("transformer_layer_config", layer), ("eagle_config", nested)):
            if not isinstance(block, dict):
                raise DriftlabError(f"config.json: {name} is {block!r}, not a table of settings")
        for key in sorted((set(layer) & set(config)) - _BOOKKEEPING):
            if None not in (layer[key], config[key]) and layer[key] != config[key]:
                raise DriftlabError(
                    f"config.json: {key} is {config[key]!r}, and {layer[key]!r} in transformer_layer_config: make "
                    "the two agree"
                )
        layer = {key: value for key, value in layer.items() if value is not None}
        values = {**layer, **{k: v for k, v in config.items() if v is not None or k not in layer}}
        return cls({**values, "model_type": layer.get("model_type", config.get("model_type"))}, nested)

    def get(self, name: str) -> Any:
        """Return a setting of the top level, None if absent or null."""
        return self.values.get(name)

    def said(self, *places: str) -> tuple[Any, str] | None:
        """Return the value that these places name, and the first that does; None if all are silent.

        Args:
            places: names, those in eagle_config as "eagle_config.name".

        Raises:
            DriftlabError: two places contradict each other.
        """
        found = []
        for place in places:
            inside = place.removeprefix("eagle_config.")
            value = (self.values if inside == place else self.nested).get(inside)
            if value is not None:
                found.append((value, place))
        for value, place in found[1:]:
            if value != found[0][0]:
                raise DriftlabError(
                    f"config.json: {found[0][1]} is {found[0][0]!r}, and {place} is {value!r}: make the two agree, "
                    "or give the right one"
                )
        return found[0] if found else None

    def flag(self, *places: str) -> tuple[bool | None, str]:
        """Return what :meth:`said` finds, true or false or None (silent), and where."""
        found = self.said(*places)
        if found is None:
            return None, places[0]
        if not isinstance(found[0], bool):
            raise DriftlabError(f"config.json: {found[1]} is {found[0]!r}, not true or false")
        return found[0], found[1]

    def whole(self, name: str) -> int | None:
        """Return a whole number above 0, None if absent."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise DriftlabError(f"config.json: {name} is {value!r}, not a whole number above 0")
        return value

    def required(self, *names: str) -> None:
        """Raise DriftlabError that names what is missing."""
        missing = [name for name in names if self.get(name) is None]
        if missing:
            raise DriftlabError(f"config.json: missing {missing}")

    def check_known(self) -> None:
        """Raise DriftlabError that lists the settings that could matter and are not known, or not supported."""
        known = _READ | _BOOKKEEPING | _OF_EXPERTS
        unknown = sorted(key for key, value in self.values.items() if key not in known and value is not None)
        inside = set(self.nested) - _NESTED_READ - set(_NESTED_FIXED) - _NESTED_HARMLESS
        unknown += sorted(f"eagle_config.{key}" for key in inside if self.nested[key] is not None)
        if unknown:
            raise DriftlabError(
                f"config.json: settings that this loader does not know: {unknown}; remove those that do not change "
                "the computation"
            )
        fixed = {f"eagle_config.{key}": only for key, only in _NESTED_FIXED.items()} | {"hidden_act": "silu"}
        for place, only in fixed.items():
            value, _ = self.said(place) or (only, place)
            if value != only:
                raise DriftlabError(f"config.json: {place}={value!r} is not supported, only {only!r}")
