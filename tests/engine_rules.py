"""How each engine reads a drafter folder: names, norms, which states, whose embedding, where ids count from, what is ignored.

One function an engine, from the raw files to the forward of tests/engine_forwards.py, with no code of the package.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from engine_forwards import Engine, Lent
from safetensors.torch import load_file
from torch import Tensor


def files_of(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and all tensors of a folder, whatever their container; floating-point ones as float64."""
    if (folder / "training_state.pt").exists():
        tensors = torch.load(folder / "training_state.pt", weights_only=True)["draft_state_dict"]
    elif (folder / "pytorch_model.bin").exists():
        tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
    else:
        tensors = {}
        for shard in sorted(folder.glob("*.safetensors")):
            tensors |= {} if shard.name == "expected.safetensors" else load_file(shard)
    wide = {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}
    return json.loads((folder / "config.json").read_text()), wide


def _named(tensors: dict[str, Tensor], *renames: tuple[str, str]) -> dict[str, Tensor]:
    out = {}
    for name, tensor in tensors.items():
        for old, new in renames:
            name = name.replace(old, new)
        out[name] = tensor
    return out


def _vocabulary(config: dict[str, Any], tensors: dict[str, Tensor]) -> Tensor:
    size = config.get("draft_vocab_size") or config["vocab_size"]
    offsets = tensors.get("d2t")
    return torch.arange(size) + (0 if offsets is None or size == config["vocab_size"] else offsets.long())


def _eagle_config(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("eagle_config") or {}


def _ids(config: dict[str, Any]) -> list[int] | None:
    return _eagle_config(config).get("eagle_aux_hidden_state_layer_ids")


def _default(layers: int) -> tuple[int, ...]:
    return (2, layers // 2, layers - 3)


def _outputs(ids: list[int] | None, layers: int) -> tuple[int, ...]:
    """Ids that count outputs of layers, from 0; absent: the outputs of layers 1, N/2 - 1 and N - 4."""
    return tuple(j + 1 for j in ids or (1, layers // 2 - 1, layers - 4))


def safeailab(folder: Path, lent: Lent) -> Engine:
    """SafeAILab: states are hard-coded, only classic EAGLE-3, embedding by target_hidden_size, heads are H/nh wide."""
    config, tensors = files_of(folder)
    config = {"rms_norm_eps": 1e-6, **config, "num_hidden_layers": 1, "head_dim": None}
    if config.get("rope_scaling"):
        config["rope_theta"] = 10000.0  # its scaled rotary classes are made without the base
    own = config.get("target_hidden_size") is not None
    return Engine(
        config,
        _named(tensors, ("midlayer.", "layers.0.")),
        lent,
        _default(lent.layers),
        tensors["embed_tokens.weight"] if own else lent.embed,
        tensors["lm_head.weight"],
        _vocabulary(config, tensors),
        fc_by_width=True,
    )


def _sglang_boundaries(config: dict[str, Any], lent: Lent) -> tuple[int, ...]:
    """Only nested ids count; the target's family says where they count from."""
    ids = _ids(config)
    if ids is None:
        return _default(lent.layers)
    if lent.family == "gpt_oss":
        add = max(ids) != lent.layers
    elif lent.family == "deepseek_v2":
        add = ids[0] == 1
    else:
        add = True
    return tuple(k + add for k in ids)


def sglang(folder: Path, lent: Lent) -> Engine:
    """SGLang's Llama drafter: the raw residual, no q/k norm and no q/k/v bias, the target's embedding, hidden_norm later on."""
    config, tensors = files_of(folder)
    # names are tried as they are, then with the prefix model.: files with and without it load alike
    tensors = {name.removeprefix("model."): t for name, t in tensors.items()}
    aliases = [(f"aux_norm_{where}", f"fc_norm.{i}") for i, where in enumerate(("low", "mid", "high"))]
    tensors = _named(tensors, ("midlayer", "layers.0"), *aliases)
    dropped = ("q_norm.weight", "k_norm.weight", "q_proj.bias", "k_proj.bias", "v_proj.bias")
    tensors = {name: t for name, t in tensors.items() if not name.endswith(dropped)}
    if not config.get("bias", False):
        tensors.pop("fc.bias", None)
    eagle = _eagle_config(config)
    own = (config.get("target_hidden_size") or config["hidden_size"]) != config["hidden_size"]
    return Engine(
        {**config, "rms_norm_eps": config["rms_norm_eps"]},
        tensors,
        lent,
        _sglang_boundaries(config, lent) if eagle.get("use_aux_hidden_state", True) else (),
        tensors["embed_tokens.weight"] if own else lent.embed,
        lent.lm_head if config["draft_vocab_size"] is None else tensors["lm_head.weight"],
        _vocabulary(config, tensors),
        concat_norm=eagle.get("norm_before_fc", config.get("norm_before_fc", False)),
        chunk_norms=config.get("fc_norm", False) or config.get("use_aux_norm", False),
        feed_normed=config.get("norm_output", False),
        fc_by_width=True,
        later_norm="hidden_norm",
    )


def sglang_mla(folder: Path, lent: Lent) -> Engine:
    """SGLang's MLA drafter: one layer, queries through a low rank only, no norm_before_fc."""
    config, tensors = files_of(folder)
    assert config["q_lora_rank"], "SGLang refuses a null q_lora_rank"
    return Engine(
        {**config, "num_hidden_layers": 1},
        _named(tensors, ("midlayer.", "layers.0.")),
        lent,
        _sglang_boundaries(config, lent),
        lent.embed,
        tensors["lm_head.weight"],
        _vocabulary(config, tensors),
        chunk_norms=config.get("fc_norm", False) or config.get("use_aux_norm", False),
        feed_normed=config.get("norm_output", False),
        fc_by_width=True,
    )


def _vllm(config: dict[str, Any], tensors: dict[str, Tensor], lent: Lent) -> Engine:
    eagle = _eagle_config(config)
    ids = config.get("eagle_aux_hidden_state_layer_ids") or _ids(config)
    concat_norm = eagle.get("norm_before_fc", config.get("norm_before_fc", False))
    tensors = _named(tensors, ("midlayer.", "layers.0."))
    layers = config.get("num_hidden_layers", 1)
    kinds = config.get("layer_types") or ["full_attention"] * layers
    return Engine(
        config,
        tensors,
        lent,
        tuple(sorted(set(ids or _default(lent.layers)))) if eagle.get("use_aux_hidden_state", True) else (),
        tensors.get("embed_tokens.weight", lent.embed),
        tensors.get("lm_head.weight", lent.lm_head),
        _vocabulary(config, tensors),
        concat_norm=concat_norm,
        chunk_norms=config.get("fc_norm", False),
        residual_normed=config.get("norm_before_residual", False),
        feed_normed=config.get("norm_output", False),
        windows=tuple(config["sliding_window"] if kind == "sliding_attention" else 0 for kind in kinds),
        logit_scale=config.get("logit_scale", 1.0),
    )


def vllm(folder: Path, lent: Lent) -> Engine:
    """vLLM, plain configs: ids are boundaries, own tables where the file has them, windows by layer_types."""
    config, tensors = files_of(folder)
    assert not any(name.startswith("model.") for name in tensors), "vLLM prepends model. itself"
    return _vllm(config, tensors, lent)


def speculators(folder: Path, lent: Lent) -> Engine:
    """A speculators folder as vLLM flattens it: seven fields go to the top, norm_before_residual is true unless said."""
    config, tensors = files_of(folder)
    layer = config["transformer_layer_config"]
    assert layer.get("model_type", "llama") in ("llama", "qwen3")
    copied = ("draft_vocab_size", "target_hidden_size", "norm_before_fc", "fc_norm", "norm_output")
    flat = {**layer, **{name: config[name] for name in copied if config.get(name) is not None}}
    flat["norm_before_residual"] = config.get("norm_before_residual", True)
    flat["eagle_aux_hidden_state_layer_ids"] = config.get("eagle_aux_hidden_state_layer_ids")
    return _vllm(flat, tensors, lent)


def torchspec(folder: Path, lent: Lent) -> Engine:
    """TorchSpec, both attentions: ids count outputs of layers, unless the file was exported for vLLM (ids[0] is not 1)."""
    config, tensors = files_of(folder)
    # the trainer's files of a sharded run carry the draft model's place in front
    tensors = {name.rpartition("draft_model.")[2]: t for name, t in tensors.items()}
    tensors = _named(tensors, ("midlayer.", "layers.0."))
    ids = _ids(config)
    exported = config["model_type"] == "kimi_k2" and ids is not None and ids[0] != 1
    return Engine(
        config,
        tensors,
        lent,
        tuple(ids) if exported else _outputs(ids, lent.layers),
        tensors.get("embed_tokens.weight", lent.embed),
        tensors["lm_head.weight"],
        _vocabulary(config, tensors),
        chunk_norms=config.get("fc_norm", False),
        feed_normed=config.get("norm_output", False),
    )


def specforge(folder: Path, lent: Lent, *, before: bool) -> Engine:
    """SpecForge as it trained the file: before its PR 879 norm_output gated the norm before the head, and feedback was raw."""
    config, tensors = files_of(folder)
    tensors = _named(tensors, ("midlayer.", "layers.0."))
    flag = config.get("norm_output", before)
    return Engine(
        config,
        tensors,
        lent,
        _outputs(_ids(config), lent.layers),
        tensors.get("embed_tokens.weight", lent.embed),
        tensors["lm_head.weight"],
        _vocabulary(config, tensors),
        chunk_norms=config.get("fc_norm", False),
        feed_normed=flag and not before,
        head_normed=flag or not before,
    )


def modelopt(folder: Path, lent: Lent) -> Engine:
    """ModelOpt's own forward, without its doubled input norm: raw residual, raw feedback, later layers are stock Llama's."""
    config, tensors = files_of(folder)
    aux = _eagle_config(config).get("use_aux_hidden_state", True)
    return Engine(
        config,
        tensors,
        lent,
        _outputs(_ids(config), lent.layers) if aux else (),
        lent.embed,
        tensors["lm_head.weight"],
        _vocabulary(config, tensors),
    )


def tensorrt(folder: Path, lent: Lent) -> Engine:
    """TensorRT-LLM: norm_before_fc nested only and beaten by fc_norm, fc bias by config.bias, hidden_norm in later layers."""
    config, tensors = files_of(folder)
    eagle = _eagle_config(config)
    own = (config.get("target_hidden_size") or config["hidden_size"]) != config["hidden_size"]
    if not config.get("bias", False):
        tensors.pop("fc.bias", None)
    chunks = config.get("fc_norm", False)
    return Engine(
        config,
        tensors,
        lent,
        _outputs(_ids(config), lent.layers),
        tensors["embed_tokens.weight"] if own else lent.embed,
        tensors.get("lm_head.weight", lent.lm_head),
        _vocabulary(config, tensors),
        concat_norm=eagle.get("norm_before_fc", False) and not chunks,
        chunk_norms=chunks,
        feed_normed=config.get("norm_output", False) or eagle.get("return_hidden_post_norm", False),
        later_norm="hidden_norm",
    )
