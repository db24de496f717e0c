"""What vLLM, speculators, SGLang and SafeAILab's code make of config.json and of tensor names; a part of :mod:`rules`."""

from __future__ import annotations

from typing import Any

from driftlab.drafter.formats.loader_tensors import Sizes, compare, whole
from driftlab.drafter.formats.loader_view import (
    FLAGS,
    IDS,
    Shapes,
    View,
    check_ids,
    common,
    first_layer,
    has_sizes,
    renamed_shapes,
    sizes_of,
    tables,
)

LLAMA = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
QWEN3 = ("Eagle3Qwen3ForCausalLM",)
LATENT = ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM")
_ALIASES = {"aux_norm_low.": "fc_norm.0.", "aux_norm_mid.": "fc_norm.1.", "aux_norm_high.": "fc_norm.2."}


def vllm(config: dict[str, Any], shapes: Shapes) -> View:
    """vLLM's rules for a plain folder."""
    view = common(config, "vllm")
    kind = _vllm_class(config, view)
    if not has_sizes(config):
        return view
    return _vllm_class_rules(config, shapes, kind, view)


def _vllm_class(config: dict[str, Any], view: View) -> str:
    named = (config.get("architectures") or [""])[0]
    for kind, names in (("llama", LLAMA), ("qwen3", QWEN3), ("latent", LATENT)):
        if named in names:
            return kind
    view.findings.append(f"architectures: {named!r} is no drafter that vLLM registers")
    return "latent" if config.get("kv_lora_rank") else "llama"


def _vllm_class_rules(config: dict[str, Any], shapes: Shapes, kind: str, view: View) -> View:
    block = config.get("eagle_config") or {}
    reads_states = kind == "latent" or block.get("use_aux_hidden_state", True)
    before = block.get("norm_before_fc", config.get("norm_before_fc", False)) and kind != "latent"
    if kind == "latent" and (block.get("norm_before_fc") or config.get("norm_before_fc")):
        view.findings.append("norm_before_fc: vLLM's MLA drafter has none and runs without it in silence")
    names = [name for name in shapes if name.startswith("model.")]
    view.findings += [
        f"{name}: vLLM puts model. before every name itself, and then knows no such tensor" for name in names
    ]
    found = renamed_shapes({n: s for n, s in shapes.items() if n not in names and n != "t2d"}, first_layer, view)
    sizes = sizes_of(
        config,
        states=_vllm_states(config, kind) if reads_states else 0,
        input_norm=bool(before),
        qk_norm=kind == "qwen3",
        qkv_bias=bool(config.get("attention_bias")) and kind != "latent",
        o_bias=bool(config.get("attention_bias")) and kind == "llama",
        mlp_bias=bool(config.get("mlp_bias")) and kind == "llama",
        latent=kind == "latent",
        view=view,
    )
    if sizes is None:
        return view
    for name, why in (("input_norm.weight", "norm_before_fc is not set"), ("fc.weight", "use_aux_hidden_state is off")):
        if name in found and not (sizes.input_norm if name.startswith("input") else sizes.states):
            view.findings.append(f"{name}: vLLM leaves it out in silence, for {why}")
            found.pop(name)
    tables(found, sizes, view, "vLLM")
    view.findings += compare(
        found,
        sizes,
        unknown="vLLM has no such tensor and stops",
        missing="vLLM would run it with whatever is in memory",
    )
    _vllm_ids(config, block, sizes, kind, view)
    _windows(config, sizes, kind, view)
    view.sizes = sizes
    return view


def _vllm_states(config: dict[str, Any], kind: str) -> int:
    nested = (config.get("eagle_config") or {}).get(IDS)
    if kind == "qwen3":
        return (
            config.get("num_aux_layers")
            or config.get("num_aux_hidden_states")
            or len(config.get(IDS) or nested or "abc")
        )
    return config.get("num_aux_hidden_states") or len(nested or "abc")


def _vllm_ids(config: dict[str, Any], block: dict[str, Any], sizes: Sizes, kind: str, view: View) -> None:
    top, nested = config.get(IDS), block.get(IDS)
    if not sizes.states:
        return
    if top and nested and list(top) != list(nested):
        view.findings.append(f"{IDS}: {top} at the top level, {nested} in eagle_config; vLLM takes the first")
    if nested and not top:
        view.findings.append(
            f"{IDS}: only in eagle_config, where vLLM's newer runner does not look; it takes 2, N/2, N-3"
        )
    check_ids(top or nested, sizes, view)


def _windows(config: dict[str, Any], sizes: Sizes, kind: str, view: View) -> None:
    kinds, width = config.get("layer_types"), config.get("sliding_window")
    if not kinds or "sliding_attention" not in kinds:
        return
    if kind == "latent":
        view.findings.append("layer_types: vLLM's MLA drafter attends everywhere, in silence")
    if len(kinds) != sizes.layers:
        view.findings.append(f"layer_types: {len(kinds)} of {sizes.layers} layers")
    if not whole(width):
        view.findings.append(f"layer_types: sliding_attention with sliding_window {width}")


def speculators(config: dict[str, Any], shapes: Shapes) -> View:
    """The rules of speculators 0.9.0 and of vLLM's reading of its files."""
    view, layer = View(), config.get("transformer_layer_config")
    settings = config.get("speculators_config") or {}
    if config.get("speculators_model_type") != "eagle3":
        view.findings.append("speculators_model_type: not eagle3, by which the format is known")
    if not isinstance(layer, dict):
        view.findings.append("transformer_layer_config: not in config.json")
        return view
    kind = layer.get("model_type")
    if kind not in ("llama", "qwen3"):
        view.findings.append(
            f"transformer_layer_config.model_type: {kind!r}, not llama or qwen3 (without it speculators takes qwen3 "
            "and vLLM llama)"
        )
    _proposals(settings, view)
    if "norm_before_residual" not in config:
        view.findings.append("norm_before_residual: not said; speculators takes it as off, vLLM as on")
    if config.get("norm_before_fc") and config.get("fc_norm"):
        view.findings.append("norm_before_fc and fc_norm: speculators takes one of the two")
    if config.get("target_hidden_size") not in (None, layer.get("hidden_size")):
        view.findings.append("target_hidden_size: speculators wants a target as wide as the drafter")
    if "draft_vocab_size" not in config:
        view.findings.append("draft_vocab_size: not said; speculators takes 32000")
    if layer.get("attention_bias") and kind == "qwen3":
        view.findings.append(
            "attention_bias: speculators has a bias at the output of a qwen3 layer's attention, vLLM none"
        )
    names = (
        "draft_vocab_size",
        "target_hidden_size",
        "norm_before_residual",
        "norm_before_fc",
        "fc_norm",
        "norm_output",
        IDS,
    )
    flat = {**layer, **{name: config[name] for name in names if config.get(name) is not None}}
    ids = config.get(IDS)
    # the number of states is that of the ids, in speculators; vLLM's Llama class would take 3 without the next line's key
    if ids and len(ids) != 3 and kind == "llama" and "num_aux_hidden_states" not in layer:
        view.findings.append(
            f"{IDS}: {len(ids)} ids; vLLM's Llama drafter builds fc for 3 (num_aux_hidden_states is not known)"
        )
    flat |= {"num_aux_hidden_states": len(ids)} if ids else {}
    inner = common(flat, "speculators")
    view.findings += inner.findings
    if sorted({"d2t", "t2d"} & set(shapes)) not in ([], ["d2t", "t2d"]):
        view.findings.append("d2t and t2d: speculators needs both, or neither")
    if not has_sizes(flat):
        return view
    return _vllm_class_rules(flat, shapes, "qwen3" if kind == "qwen3" else "llama", view)


def _proposals(settings: dict[str, Any], view: View) -> None:
    methods = settings.get("proposal_methods") or []
    if not methods or not whole(methods[0].get("speculative_tokens")):
        view.findings.append("speculators_config.proposal_methods[0].speculative_tokens: vLLM takes K from there")
    if settings.get("default_proposal_method") not in [method.get("proposal_type") for method in methods]:
        view.findings.append("speculators_config.default_proposal_method: none of proposal_methods")
    if not (settings.get("verifier") or {}).get("name_or_path"):
        view.findings.append("speculators_config.verifier.name_or_path: vLLM takes the target from there")
    if settings.get("algorithm") != "eagle3":
        view.findings.append("speculators_config.algorithm: not eagle3")


def sglang(config: dict[str, Any], shapes: Shapes) -> View:
    """SGLang's rules: whatever it does not know is skipped without a word."""
    view = common(config, "sglang")
    named = (config.get("architectures") or [""])[0]
    latent = named == "Eagle3DeepseekV2ForCausalLM"
    if named not in ("LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM"):
        view.findings.append(f"architectures: {named!r} is no EAGLE-3 drafter of SGLang")
    if "draft_vocab_size" not in config:
        view.findings.append("draft_vocab_size: SGLang wants the key to be there")
    for name in ("norm_before_residual", "attention_bias", "mlp_bias"):
        if config.get(name):
            view.findings.append(f"{name}: SGLang has none and runs without it in silence")
    if config.get("logit_scale", 1) != 1:
        view.findings.append("logit_scale: SGLang has none and runs without it in silence")
    if "sliding_attention" in (config.get("layer_types") or []):
        view.findings.append("layer_types: SGLang ignores windows of the file in silence")
    if config.get("tie_word_embeddings"):
        view.findings.append("tie_word_embeddings: SGLang would take the embedding as the head")
    block = config.get("eagle_config") or {}
    before = block.get("norm_before_fc", config.get("norm_before_fc", False))
    if latent and before:
        view.findings.append("norm_before_fc: SGLang's MLA drafter has none and runs without it in silence")
    ids = block.get(IDS)
    sizes = sizes_of(
        config,
        states=_sglang_states(config, ids, latent) if block.get("use_aux_hidden_state", True) else 0,
        fc_norm=bool(config.get("fc_norm") or config.get("use_aux_norm")),
        input_norm=bool(before) and not latent,
        fc_bias=bool(config.get("bias")) and not latent,
        latent=latent,
        deep_norms=("hidden_norm",),
        view=view,
    )
    if sizes is None:
        return view
    if latent and sizes.layers > 1:
        view.findings.append("num_hidden_layers: SGLang's MLA drafter has one layer")
    if sizes.states * sizes.target_hidden == sizes.hidden:
        view.findings.append("fc: as wide as the drafter, so that SGLang, which goes by widths, leaves it out")
    _sglang_tensors(shapes, sizes, view)
    if sizes.states:
        if config.get(IDS) and not ids:
            view.findings.append(f"{IDS}: at the top level, where SGLang does not look; it takes 2, N/2, N-3")
        check_ids(ids, sizes, view)
    view.sizes = sizes
    return view


def _sglang_states(config: dict[str, Any], ids: Any, latent: bool) -> int:
    if latent:
        return len(ids or config.get(IDS) or "abc")
    return config.get("num_aux_hidden_states") or len(ids or "abc")


def _sglang_tensors(shapes: Shapes, sizes: Sizes, view: View) -> None:
    def renamed(name: str) -> str:
        name = first_layer(name.removeprefix("model."))
        for old, new in _ALIASES.items():
            name = name.replace(old, new)
        return name

    found = renamed_shapes({name: shape for name, shape in shapes.items() if name != "t2d"}, renamed, view)
    for layer in range(1, sizes.layers):
        sizes.extra[f"layers.{layer}.input_layernorm.weight"] = (sizes.hidden,)
    if "embed_tokens.weight" in found and sizes.hidden == sizes.target_hidden:
        view.findings.append("embed_tokens.weight: SGLang puts the target's embedding in its place in silence")
    tables(found, sizes, view, "SGLang")
    if "lm_head.weight" not in found and not sizes.reduced:
        view.findings.append(
            "lm_head.weight: not in the file; SGLang takes the target's only where draft_vocab_size is null"
        )
    view.findings += compare(
        found, sizes, unknown="SGLang skips it in silence", missing="SGLang would run it with whatever is in memory"
    )


def safeailab(config: dict[str, Any], shapes: Shapes) -> View:
    """The rules of SafeAILab's code: one layer, plain EAGLE-3, nothing else."""
    view = common(config, "safeailab")
    for name in (*FLAGS[:4], "attention_bias", "mlp_bias"):
        if config.get(name):
            view.findings.append(f"{name}: SafeAILab's code has none and runs without it in silence")
    if "draft_vocab_size" not in config:
        view.findings.append("draft_vocab_size: SafeAILab's code wants the key to be there")
    if config.get("num_hidden_layers", 1) != 1:
        view.findings.append("num_hidden_layers: SafeAILab's code has one layer")
    head_dim = config.get("head_dim")
    sizes = sizes_of({**config, "head_dim": None}, states=3, view=view)
    if sizes is None:
        return view
    if sizes.hidden % sizes.heads or head_dim not in (None, sizes.head_dim):
        view.findings.append(
            f"head_dim: SafeAILab's code makes it hidden_size / num_attention_heads = {sizes.head_dim}"
        )
    if sizes.states * sizes.target_hidden == sizes.hidden:
        view.findings.append(
            "fc: as wide as the drafter, so that SafeAILab's code, which goes by widths, leaves it out"
        )
    deeper = [name for name in shapes if name.startswith("layers.")]
    view.findings += [f"{name}: SafeAILab's code calls its layer midlayer and skips this in silence" for name in deeper]
    found = renamed_shapes({n: s for n, s in shapes.items() if n not in deeper and n != "t2d"}, first_layer, view)
    tables(found, sizes, view, "SafeAILab's code")
    if config.get("target_hidden_size") is not None and "embed_tokens.weight" not in found:
        view.findings.append(
            "embed_tokens.weight: not in the file, and with target_hidden_size in config.json SafeAILab's code does "
            "not take the target's"
        )
    if "lm_head.weight" not in found:
        view.findings.append("lm_head.weight: not in the file, and SafeAILab's code never takes the target's")
    if sizes.reduced and "t2d" not in shapes:
        view.findings.append("t2d: not in the file; SafeAILab's code has room for it where the vocabulary is reduced")
    view.findings += compare(
        found,
        sizes,
        unknown="SafeAILab's code skips it in silence",
        missing="SafeAILab's code would run it at random",
        layer="midlayer.",
    )
    view.sizes = sizes
    return view
