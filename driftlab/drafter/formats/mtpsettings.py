"""What the settings of a model say about its MTP head, convention by convention; see ``mtp``.

The settings are the target's (a head has none of its own), so the tensors decide what the layer is made of, and a setting that
contradicts them is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from driftlab.drafter.config import ExpertsConfig, LatentConfig
from driftlab.drafter.formats.mtpnames import Layout, Part
from driftlab.drafter.formats.reading import Found, Ledger
from driftlab.drafter.formats.rope import read_rope, turned_width
from driftlab.errors import DriftlabError


@dataclass(frozen=True)
class Family:
    """What a model type fixes beyond its settings."""

    name: str
    layout: Layout
    gated: bool = False
    """q_proj holds a gate, and gains are 1 + w"""
    sigmoid: bool = False
    """experts are chosen by sigmoids, with a correction bias"""
    partial: float = 1.0
    """share of a head that is turned where the settings do not say"""
    zeroed: bool = False
    """vLLM zeroes the embedding of row 0"""
    prenorm_in_vllm: bool = False
    """what vLLM feeds back is the state before the norm"""
    normed_heads: bool = False
    """queries and keys are always normed"""


def whole(values: Mapping[str, Any], key: str) -> int:
    """Return a setting that is a whole number above 0. Raises DriftlabError if it is not."""
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise DriftlabError(f"config.json: {key} is {value!r}, not a whole number above 0")
    return value


def count_of(values: Mapping[str, Any], key: str) -> int:
    """Return a setting that is a whole number, 0 if absent. Raises DriftlabError if it is not."""
    value = values.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise DriftlabError(f"config.json: {key} is {value!r}, not a whole number")
    return value or 0


def flag_of(values: Mapping[str, Any], key: str) -> bool | None:
    """Return a setting that is true or false, None if absent. Raises DriftlabError if it is not."""
    value = values.get(key)
    if value is not None and not isinstance(value, bool):
        raise DriftlabError(f"config.json: {key} is {value!r}, not true or false")
    return value


@dataclass
class Settings:
    """Settles all conventions of a head, in the order in which people read them."""

    values: Mapping[str, Any]
    family: Family
    parts: Mapping[str, Part]
    ledger: Ledger

    def settle(self) -> None:
        """Enter everything into the ledger."""
        enter, hidden = self.ledger.settle, whole(self.values, "hidden_size")
        enter("architecture", Found("mtp", "tensors", "embedding and state are projected to one"))
        enter("hidden_size", self._read("hidden_size"))
        enter("target_hidden_size", Found(hidden, "read", "an MTP head is as wide as its target"))
        enter(
            "aux_layers",
            Found((), "assumed", "MTP heads read the target's final state after its norm, in every engine"),
        )
        enter("num_hidden_layers", Found(1, "tensors", "a module has one layer"))
        enter("vocab_size", self._read("vocab_size"))
        enter(
            "draft_vocab_size", Found(whole(self.values, "vocab_size"), "read", "MTP heads draft the whole vocabulary")
        )
        enter("fc_norm", Found(False, "tensors", "there is no fc"))
        self._attention()
        self._rope()
        enter("rms_norm_eps", self._eps)
        enter(
            "norm_plus_one", Found(self.family.gated, "read", f"by model_type: gains are {'1 + ' * self.family.gated}w")
        )
        self._mlp()
        self._tables()
        enter("norm_output", self._feedback)
        enter("zero_first_embedding", self._first_row)

    def _has(self, name: str) -> bool:
        return name in self.parts

    def _read(self, key: str) -> Found:
        return Found(whole(self.values, key), "read", key)

    def _flag(self, key: str, tensor: str) -> Found:
        """A switch that its tensor shows; settings that say otherwise are an error."""
        has, said = self._has(tensor), flag_of(self.values, key)
        if said is not None and said != has:
            raise DriftlabError(
                f"config.json says {key}={said!r}, but {tensor} is {'among the tensors' if has else 'missing'}: "
                "correct the one that is wrong"
            )
        return Found(has, "tensors", f"{tensor} {'is there' if has else 'is absent'}")

    def _attention(self) -> None:
        enter, heads = self.ledger.settle, whole(self.values, "num_attention_heads")
        latent = self._has("layers.0.self_attn.kv_a_proj_with_mqa.weight")
        enter("num_attention_heads", self._read("num_attention_heads"))
        if latent:
            found = self._latent()
            enter("num_key_value_heads", Found(heads, "tensors", "latent attention has keys for every head"))
            enter(
                "head_dim",
                Found(found.qk_nope_head_dim + found.qk_rope_head_dim, "read", "qk_nope_head_dim + qk_rope_head_dim"),
            )
            enter("latent", Found(found, "read", "MLA: kv_a_proj_with_mqa is there"))
            self._no_bias()
            return
        enter("num_key_value_heads", self._read("num_key_value_heads"))
        enter("head_dim", self._head_dim)
        layer = "layers.0.self_attn."
        enter("attention_bias", lambda: self._flag("attention_bias", f"{layer}q_proj.bias"))
        enter("output_bias", Found(self._has(f"{layer}o_proj.bias"), "tensors", "o_proj.bias is there or not"))
        if self.family.normed_heads:
            self._shape(f"{layer}q_norm.weight")
        enter("qk_norm", lambda: self._flag("use_qk_norm", f"{layer}q_norm.weight"))
        why = "q_proj holds a gate for each head" if self.family.gated else "by model_type"
        enter("attention_gate", Found(self.family.gated, "tensors" if self.family.gated else "read", why))
        if self.family.gated:
            self._no_bias()

    def _no_bias(self) -> None:
        if flag_of(self.values, "attention_bias"):
            raise DriftlabError(
                "config.json says attention_bias; attention of this kind is supported without biases only"
            )

    def _head_dim(self) -> Found:
        if self.values.get("head_dim") is not None:
            return self._read("head_dim")
        hidden, heads = whole(self.values, "hidden_size"), whole(self.values, "num_attention_heads")
        return Found(hidden // heads, "assumed", "absent: hidden_size / num_attention_heads, as in every engine")

    def _latent(self) -> LatentConfig:
        keys = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        rank = count_of(self.values, "q_lora_rank")
        if bool(rank) != self._has("layers.0.self_attn.q_a_proj.weight"):
            raise DriftlabError(
                f"config.json says q_lora_rank={self.values.get('q_lora_rank')!r}, which does not go with q_a_proj among "
                "the tensors or not"
            )
        return LatentConfig(q_lora_rank=rank, **{key: whole(self.values, key) for key in keys})

    def _rope(self) -> None:
        enter, latent = self.ledger.settle, self.ledger.rows.get("latent")
        rope = read_rope(self.values, latent=latent is not None, given=self.ledger.given)
        for words in rope.notes:
            self.ledger.note(words)
        why = "rope_theta" if rope.theta_read else "absent: 10000, as in every engine"
        enter("rope_theta", Found(rope.theta, "read" if rope.theta_read else "assumed", why, note=not rope.theta_read))
        enter("rope_scaling", Found(rope.scaling, "read", rope.scaling_said))
        if latent is not None:
            said = flag_of(self.values, "rope_interleave")
            why = (
                "rope_interleave"
                if said is not None
                else "absent: pairs are neighbours in latent attention, as in every engine"
            )
            enter("rope_interleaved", Found(said is not False, "read" if said is not None else "assumed", why))
            return
        blocks = (self.values, *(self.values.get(key) or {} for key in ("rope_parameters", "rope_scaling")))
        said = any(block.get("partial_rotary_factor") is not None for block in blocks)
        share = rope.partial if said else self.family.partial
        why = f"partial_rotary_factor {share:g}" + ("" if said else ", which the model type has where it is absent")
        head_dim, source = self.ledger.rows["head_dim"].value, "read" if said else "assumed"
        enter("rotary_dim", lambda: Found(turned_width(head_dim, share), source, why, note=not said and share != 1))

    def _eps(self) -> Found:
        eps = self.values.get("rms_norm_eps")
        if not isinstance(eps, float) or not 0 < eps < 1:
            raise DriftlabError(f"config.json: rms_norm_eps is {eps!r}, not a number above 0")
        if "latent" in self.ledger.rows and eps != 1e-6:
            self.ledger.note(
                f"rms_norm_eps: {eps:g} for the norms of latent attention too, as in engines; transformers has 1e-06 there"
            )
        return Found(eps, "read", "rms_norm_eps")

    def _mlp(self) -> None:
        enter, mixed = self.ledger.settle, self._has("layers.0.mlp.gate.weight")
        if mixed:
            experts = self._experts()
            dense = self.values.get("intermediate_size") or experts.intermediate_size
            enter("intermediate_size", Found(dense, "read", "not used: the layer has experts"))
            enter("experts", Found(experts, "read", "a mixture of experts: mlp.gate is there"))
            return
        shape = self._shape("layers.0.mlp.gate_proj.weight")
        enter("intermediate_size", Found(shape[0], "tensors", "rows of mlp.gate_proj"))

    def _shape(self, name: str) -> tuple[int, ...]:
        if name not in self.parts:
            raise DriftlabError(f"{name} is missing, though the settings of the model want it: the file is not whole")
        return self.parts[name].shape

    def _experts(self) -> ExpertsConfig:
        values, count = self.values, self._shape("layers.0.mlp.gate.weight")[0]
        said = next(
            (whole(values, key) for key in ("n_routed_experts", "num_experts") if values.get(key) is not None), count
        )
        if said != count:
            raise DriftlabError(
                f"config.json says {said} experts, mlp.gate.weight has {count} rows: correct the one that is wrong"
            )
        shared = "layers.0.mlp.shared_experts.gate_proj.weight"
        if any(values.get(key) for key in ("n_shared_experts", "shared_expert_intermediate_size")):
            self._shape(shared)
        normalise = flag_of(values, "norm_topk_prob")
        if normalise is None:
            self.ledger.note(
                "experts: norm_topk_prob absent, weights are divided by their sum, as all models of the type do"
            )
        scaling = {}
        if self.family.sigmoid:
            factor = values.get("routed_scaling_factor")
            if isinstance(factor, bool) or not isinstance(factor, (int, float)):
                raise DriftlabError(f"config.json: routed_scaling_factor is {factor!r}, not a number")
            groups = {
                "groups": count_of(values, "n_group") or 1,
                "groups_per_token": count_of(values, "topk_group") or 1,
            }
            scaling = {"scale": float(factor), **groups}
        return ExpertsConfig(
            count=count,
            per_token=whole(values, "num_experts_per_tok"),
            intermediate_size=self._shape("layers.0.mlp.experts.0.gate_proj.weight")[0],
            shared_intermediate_size=self._shape(shared)[0] if shared in self.parts else 0,
            scoring="sigmoid" if self.family.sigmoid else "softmax",
            normalise=normalise is not False,
            shared_gate=self._has("layers.0.mlp.shared_expert_gate.weight"),
            **scaling,
        )

    def _tables(self) -> None:
        if flag_of(self.values, "mtp_use_dedicated_embeddings"):
            self._shape("embed_tokens.weight")
        for setting, table, own, lent in (
            ("own_embed", "embed_tokens", True, False),
            ("lm_head", "lm_head", "own", "target"),
        ):
            has = self._has(f"{table}.weight")
            why = f"{table}.weight is the head's own" if has else f"no {table} of its own: the target's is used"
            self.ledger.settle(setting, Found(own if has else lent, "tensors", why, note=not has))

    def _feedback(self) -> Found:
        if self.family.prenorm_in_vllm:
            why = (
                "SGLang and transformers feed the post-norm state, vLLM the one before the norm: give "
                "norm_output=False for its depths"
            )
            return Found(True, "assumed", why, note=True)
        return Found(True, "assumed", "no file says it; vLLM, SGLang and transformers feed the post-norm state")

    def _first_row(self) -> Found:
        if self.family.zeroed:
            why = "SGLang and transformers embed row 0 like any other, vLLM puts zeros: give zero_first_embedding=True for it"
            return Found(False, "assumed", why, note=True)
        return Found(False, "assumed", "every engine embeds row 0 like any other")
