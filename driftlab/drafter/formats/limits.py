"""What each engine's loader cannot carry, in words: the switch, why, and what to do.

An engine that has no such part either stops at the file or, worse, runs it without: SGLang skips tensors it does not know,
and a flag without a tensor (norm_output, norm_before_residual, the layer ids) is ignored by all of them in silence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from driftlab.drafter.config import DrafterConfig
from driftlab.errors import DriftlabError

Format = Literal["vllm", "sglang", "speculators", "safeailab"]

ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "speculators": "speculators", "safeailab": "SafeAILab's EAGLE"}


@dataclass(frozen=True, kw_only=True)
class TargetFacts:
    """What an export has to know of the target; 0, "" and None where it is not known."""

    name: str = ""
    """hub id or path by which the engine finds it"""
    model_type: str = ""
    num_layers: int = 0
    max_positions: int = 0
    embed: Tensor | None = None
    """its embedding, [vocab d_target]"""


def cannot_carry(config: DrafterConfig, form: Format, facts: TargetFacts) -> list[str]:
    """Return a sentence for each thing that the format has no place for; empty if it can hold the drafter."""
    return [
        *_nowhere(config),
        *{"vllm": _vllm, "sglang": _sglang, "speculators": _speculators, "safeailab": _safeailab}[form](config, facts),
    ]


def misfits(config: DrafterConfig, facts: TargetFacts) -> list[str]:
    """Return a sentence for each thing of the target that is not as the drafter takes it; empty if it is not known."""
    words = []
    if facts.embed is not None:
        vocab, width = facts.embed.shape
        if width != config.target_hidden_size:
            words.append(
                f"it takes states {config.target_hidden_size} wide (fc.weight [{config.hidden_size}, "
                f"{config.states_read * config.target_hidden_size}]), the target's are {width}"
            )
        if vocab != config.vocab_size:
            words.append(
                f"its vocabulary has {config.vocab_size} tokens, the target's embedding embed_tokens.weight is "
                f"[{vocab}, {width}]"
            )
    if facts.num_layers and config.aux_layers and config.aux_layers[-1] > facts.num_layers:
        words.append(
            f"aux_layers {list(config.aux_layers)} name state {config.aux_layers[-1]}, but the target has "
            f"{facts.num_layers} layers: it is the drafter of another target"
        )
    return words


def sglang_ids(layers: tuple[int, ...], facts: TargetFacts) -> tuple[int, ...]:
    """Return the ids by which SGLang captures the states ``layers`` (k: after k layers).

    It adds 1 to what it reads, except for DeepSeek-V2 targets (DeepSeek, Kimi), where it does so only if the first id is 1
    (sglang#25454), and gpt-oss, where it does not if the largest is the number of layers (sglang#32334).

    Raises:
        DriftlabError: no list is read as these states.
    """
    outputs, kind = tuple(k - 1 for k in layers), facts.model_type
    if layers[0] == 0:
        raise DriftlabError(
            f"aux_layers {list(layers)}: SGLang counts outputs of layers and has no id for state 0, the embedding; use vllm"
        )
    if kind != "gpt_oss" and facts.num_layers and layers[-1] == facts.num_layers:
        raise DriftlabError(
            f"aux_layers {list(layers)}: SGLang captures a state as it enters a layer, and none reads that after the "
            f"last of {facts.num_layers} (gpt-oss apart); use vllm"
        )
    if kind in ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25"):
        if layers[0] == 1:
            raise DriftlabError(
                f"aux_layers {list(layers)}: for {kind} targets SGLang adds 1 to a list that begins with 1 and to no "
                "other, so that no list means a first state after 1 layer; use vllm, or train on other states"
            )
        return outputs if layers[0] == 2 else layers
    if kind == "gpt_oss":
        if not facts.num_layers:
            raise DriftlabError("aux_layers: SGLang reads ids for gpt-oss by the number of its layers: pass target=")
        return layers if layers[-1] == facts.num_layers else outputs
    return outputs


def default_layers(num_layers: int) -> tuple[int, int, int]:
    """Return the states that engines capture when nothing is said."""
    return (2, num_layers // 2, num_layers - 3)


def _chosen(cases: dict[str, bool]) -> list[str]:
    return [words for words, holds in cases.items() if holds]


def _nowhere(config: DrafterConfig) -> list[str]:
    """What no engine's drafter has."""
    latent = config.latent is not None
    return _chosen(
        {
            "architecture mtp: an MTP head is served from its target's own files, and no drafter folder holds one": (
                config.architecture == "mtp"
            ),
            "head_norm off: every engine's head reads the normed state; train with head_norm on": not config.head_norm,
            "twice_normed: every engine norms the hidden input once; train without it": config.twice_normed,
            "attention_gate: no engine's drafter has a gate on the attention's output": config.attention_gate,
            "norm_plus_one: engines multiply by the gain itself; add 1 to every gain and set norm_plus_one=False": (
                config.norm_plus_one
            ),
            "rotary_dim: every engine's drafter turns all dimensions of a head": not latent
            and config.rotary_dim not in (0, config.head_dim),
            "rope_interleaved: engines turn the halves of a head in grouped-query drafters": not latent
            and config.rope_interleaved,
            "rope_interleaved off: engines turn neighbouring dimensions in latent (MLA) drafters": latent
            and not config.rope_interleaved,
            "latent.q_lora_rank 0: SGLang refuses a drafter without it, and for the others nothing is known": latent
            and not config.latent.q_lora_rank,
            "rope_scaling dynamic and latent: engines turn every scaling of an MLA drafter into DeepSeek's yarn": latent
            and config.rope_scaling is not None
            and config.rope_scaling.kind != "yarn",
            **_latent_yarn(config),
        }
    )


def _latent_yarn(config: DrafterConfig) -> dict[str, bool]:
    """DeepSeek's yarn takes mscale 1 and mscale_all_dim 0 where they are not said; ours takes neither."""
    scaling = config.rope_scaling
    if config.latent is None or scaling is None or scaling.kind != "yarn":
        return {}
    both = bool(scaling.mscale) == bool(scaling.mscale_all_dim)
    return {
        "rope_scaling: an MLA drafter's yarn needs both mscale and mscale_all_dim, or neither: engines fill in the other": (
            not both
        ),
        "rope_scaling.attention_factor and truncate: DeepSeek's yarn, which MLA drafters use, has neither": (
            scaling.attention_factor is not None or not scaling.truncate
        ),
    }


def _yarn_extras(config: DrafterConfig) -> bool:
    scaling = config.rope_scaling
    if scaling is None or config.latent is not None or scaling.kind != "yarn":
        return False
    said = (scaling.mscale, scaling.mscale_all_dim, scaling.attention_factor)
    return any(value is not None for value in said) or not scaling.truncate


def _kind(config: DrafterConfig) -> str:
    return "default" if config.rope_scaling is None else config.rope_scaling.kind


def _scaled(config: DrafterConfig, engine: str) -> dict[str, bool]:
    return {
        f"logit_scale: {engine} has none; multiply lm_head.weight by it and set logit_scale=1": config.logit_scale != 1
    }


def _dynamic(config: DrafterConfig, engine: str) -> dict[str, bool]:
    return {
        f"rope_scaling dynamic: {engine} enlarges the base from the first position on, not from a length on": (
            config.latent is None and _kind(config) == "dynamic"
        )
    }


def _windows(config: DrafterConfig) -> dict[str, bool]:
    widths = {width for width in config.windows if width}
    return {f"windows {config.windows}: a file has one sliding_window for all windowed layers": len(widths) > 1}


def _vllm(config: DrafterConfig, facts: TargetFacts) -> list[str]:
    latent, biased = config.latent is not None, config.attention_bias or config.output_bias
    return _chosen(
        {
            "fc_bias: vLLM's fc has none; export to sglang, or train without it": config.fc_bias,
            "attention_bias and output_bias with qk_norm: vLLM's drafter with normed queries and keys has no bias "
            "at the attention's output": config.qk_norm and biased,
            "mlp_bias: only vLLM's plain Llama drafter reads it": config.mlp_bias and (latent or config.qk_norm),
            "norm_before_fc: vLLM's MLA drafter has only fc_norm; train with that": latent and config.norm_before_fc,
            "windows: vLLM's MLA drafter attends everywhere": latent and any(config.windows),
            "aux_layers (): vLLM's MLA drafter always reads captured states": latent and not config.aux_layers,
            **_windows(config),
            **_dynamic(config, "vLLM"),
        }
    )


def _sglang(config: DrafterConfig, facts: TargetFacts) -> list[str]:
    latent, same = config.latent is not None, config.hidden_size == config.target_hidden_size
    words = _chosen(
        {
            "norm_before_residual: SGLang's residual stream always starts at the raw state, and no change of "
            "weights makes up for it; use vllm or speculators, or train without it": config.norm_before_residual,
            "qk_norm: SGLang's drafter has no norms of queries and keys and skips their tensors in silence; use "
            "vllm or speculators": config.qk_norm,
            "attention_bias, output_bias, mlp_bias: SGLang's drafter has no biases and skips their tensors in "
            "silence; use vllm": config.attention_bias or config.output_bias or config.mlp_bias,
            "windows: SGLang ignores those of the file; use vllm or speculators": any(config.windows),
            "norm_before_fc: SGLang's MLA drafter has only fc_norm; train with that": latent and config.norm_before_fc,
            "num_hidden_layers: SGLang's MLA drafter has one layer": latent and config.num_hidden_layers > 1,
            "fc_bias: not known of SGLang's MLA drafter": latent and config.fc_bias,
            "rope_scaling: only plain yarn (factor, original length, beta_fast, beta_slow) is known to be read by SGLang": (
                _yarn_extras(config)
            ),
            **_skipped_fc(config, "SGLang"),
            **_scaled(config, "SGLang"),
            **_dynamic(config, "SGLang"),
        }
    )
    if config.own_embed and same:
        words += _swapped_embedding(facts)
    if config.aux_layers:
        try:
            sglang_ids(config.aux_layers, facts)
        except DriftlabError as error:
            words.append(str(error))
    return words


def _swapped_embedding(facts: TargetFacts) -> list[str]:
    if facts.embed is None:
        return [
            "own_embed: SGLang puts the target's embedding in its place, in silence; pass target=, to compare the two"
        ]
    return []


def _skipped_fc(config: DrafterConfig, engine: str) -> dict[str, bool]:
    wide = len(config.aux_layers) * config.target_hidden_size
    return {
        f"hidden_size {config.hidden_size} is the width of all captured states together: {engine} tells target "
        "states from the drafter's own by their width and would leave out fc": wide == config.hidden_size
    }


def _speculators(config: DrafterConfig, facts: TargetFacts) -> list[str]:
    biased = config.attention_bias or config.output_bias
    return _chosen(
        {
            "latent (MLA): a speculators file holds a llama or a qwen3 layer; use vllm or sglang": config.latent
            is not None,
            "norm_before_fc and fc_norm together: speculators takes one of the two; use vllm or sglang": config.norm_before_fc
            and config.fc_norm,
            "aux_layers (): speculators always projects captured states; use vllm or sglang": not config.aux_layers,
            f"target_hidden_size {config.target_hidden_size}: speculators wants a target as wide as the drafter; use "
            "vllm or sglang": config.hidden_size != config.target_hidden_size,
            "fc_bias: speculators' fc has none; export to sglang, or train without it": config.fc_bias,
            "attention_bias and output_bias with qk_norm: vLLM, which serves the file, has no bias at the "
            "attention's output there": config.qk_norm and biased,
            "mlp_bias with qk_norm: a qwen3 layer has none": config.qk_norm and config.mlp_bias,
            **_windows(config),
            **_scaled(config, "speculators"),
            **_dynamic(config, "vLLM, which serves the file,"),
            "speculators_config.verifier: the file has to name its target: pass target= or target_name=": not facts.name,
        }
    )


def _safeailab(config: DrafterConfig, facts: TargetFacts) -> list[str]:
    classic = {
        f"{name}: SafeAILab's code is plain EAGLE-3 and has none; use vllm": bool(getattr(config, name))
        for name in (
            *(
                "fc_norm",
                "norm_output",
                "norm_before_fc",
                "norm_before_residual",
                "qk_norm",
                "fc_bias",
                "attention_bias",
            ),
            *("output_bias", "mlp_bias"),
        )
    }
    words = _chosen(
        {
            **classic,
            "latent (MLA): SafeAILab's code has grouped-query attention only; use vllm or sglang": config.latent
            is not None,
            "num_hidden_layers: SafeAILab's code has one layer; use vllm or sglang": config.num_hidden_layers > 1,
            "windows: SafeAILab's code attends everywhere; use vllm": any(config.windows),
            f"head_dim {config.head_dim}: SafeAILab's code makes it hidden_size / num_attention_heads; use vllm": (
                config.head_dim * config.num_attention_heads != config.hidden_size
            ),
            f"rope_scaling {_kind(config)}: SafeAILab's code knows linear and dynamic; use vllm": _kind(config)
            in ("llama3", "yarn"),
            f"rope_theta {config.rope_theta:g} with rope_scaling: SafeAILab's scaled rotary embeddings have base 10000": (
                _kind(config) != "default" and config.rope_theta != 10000
            ),
            **_skipped_fc(config, "SafeAILab's code"),
            **_scaled(config, "SafeAILab's code"),
        }
    )
    if not facts.num_layers:
        return [*words, "aux_layers: SafeAILab's code always captures 2, N/2, N-3: pass target=, so that N is known"]
    if config.aux_layers != default_layers(facts.num_layers):
        words.append(
            f"aux_layers {list(config.aux_layers)}: SafeAILab's code always captures "
            f"{list(default_layers(facts.num_layers))} of {facts.num_layers} layers; use vllm"
        )
    return words
