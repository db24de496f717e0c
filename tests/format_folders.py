"""Tiny random drafter folders, each in the exact layout of the project it is named after.

``FOLDERS`` names them all: how a folder is written, which engine's rules (tests/engine_rules.py) it is judged by, and what a
reader has to say of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import engine_rules as rules
import torch
from engine_forwards import Engine, Lent
from format_tensors import (
    KIMI,
    KIMI_YARN,
    LAYERS,
    LINEAR,
    LLAMA3,
    SAFEAILAB,
    VOCAB,
    WIDTH,
    YARN,
    Config,
    Shape,
    latent_config,
    lent,
    llama_config,
    nested,
    renamed,
    tensors_of,
    vocabulary,
    write,
)

# ---- one writer a project


def write_safeailab(
    path: Path, *, rope_theta: float | None = None, scaling: Config | None = None, wide: bool = False
) -> Path:
    """SafeAILab: pytorch_model.bin, midlayer.*, d2t and t2d; an embedding only beside target_hidden_size."""
    shape = Shape(seed=11, width=48, head_dim=12, own_embed=True) if wide else Shape(seed=12)
    config = llama_config(shape, **SAFEAILAB, rope_theta=rope_theta or ..., rope_scaling=scaling)
    config |= {"target_hidden_size": WIDTH} if wide else {}
    tensors = vocabulary(renamed(tensors_of(shape), "layers.0.", "midlayer."))
    return write(path, config, tensors, container="bin")


def write_safeailab_full(path: Path) -> Path:
    """SafeAILab with the whole vocabulary: identity buffers may still be in the file, and the loader deletes them."""
    shape = Shape(seed=13, draft_vocab=VOCAB)
    tensors = renamed(tensors_of(shape), "layers.0.", "midlayer.")
    tensors |= {"d2t": torch.zeros(VOCAB, dtype=torch.int64), "t2d": torch.ones(VOCAB, dtype=torch.bool)}
    return write(path, llama_config(shape, **SAFEAILAB), tensors, container="bin")


def write_specforge(
    path: Path, *, norm_output: bool | None, fc_norm: bool = False, container: str = "safetensors"
) -> Path:
    """SpecForge's to_hf and its training state: midlayer.*, a copy of the target's embedding, d2t and t2d."""
    shape = Shape(seed=21, fc_norm=fc_norm)
    settings = {"fc_norm": True} if fc_norm else {}
    settings |= {} if norm_output is None else {"norm_output": norm_output}
    config = llama_config(shape, **settings, eagle_config=nested((1, 3, 5)), attention_bias=False)
    tensors = {**tensors_of(shape), "embed_tokens.weight": lent().embed.float()}
    return write(path, config, vocabulary(renamed(tensors, "layers.0.", "midlayer.")), container=container)


def write_specforge_sglang(path: Path) -> Path:
    """SpecForge's to_sglang with the whole vocabulary, ids absent: d2t and t2d are there all the same, as the identity."""
    shape = Shape(seed=22, draft_vocab=VOCAB)
    tensors = renamed(tensors_of(shape), "layers.0.", "midlayer.")
    tensors |= {"d2t": torch.zeros(VOCAB, dtype=torch.int64), "t2d": torch.ones(VOCAB, dtype=torch.bool)}
    return write(path, llama_config(shape), tensors)


def write_sglang(path: Path, *, shards: int = 1, scaling: Config | None = None) -> Path:
    """SGLang, plain: layers.0.*, nested ids, both switches of 3.1, heads wider than H/nh; d2t without t2d."""
    shape = Shape(seed=31, fc_norm=True, head_dim=16)
    settings = {"fc_norm": True, "norm_output": True, "num_aux_hidden_states": 3, "rope_scaling": scaling}
    config = llama_config(shape, **settings, eagle_config=nested((1, 4, 6)))
    return write(path, config, vocabulary(tensors_of(shape), t2d=False), shards=shards)


def write_sglang_aliases(path: Path) -> Path:
    """SGLang's old names of the per-state norms, after one norm over the concat, and an fc with a bias."""
    shape = Shape(seed=32, fc_norm=True, concat_norm=True, fc_bias=True)
    tensors = tensors_of(shape)
    for i, where in enumerate(("low", "mid", "high")):
        tensors = renamed(tensors, f"fc_norm.{i}", f"aux_norm_{where}")
    settings = {"use_aux_norm": True, "norm_before_fc": True, "bias": True, "eagle_config": nested((1, 3, 5))}
    return write(path, llama_config(shape, **settings), vocabulary(tensors))


def write_sglang_layers(path: Path, *, both: bool = True) -> Path:
    """Two layers for SGLang, whose later layers norm with hidden_norm; an exporter for two engines writes both names."""
    shape = Shape(seed=33, layers=2)
    tensors = tensors_of(shape)
    tensors["layers.1.hidden_norm.weight"] = tensors["layers.1.input_layernorm.weight"].clone()
    if not both:
        del tensors["layers.1.input_layernorm.weight"]
    return write(path, llama_config(shape, eagle_config=nested((1, 3, 5))), vocabulary(tensors))


def write_wide(path: Path) -> Path:
    """A drafter wider than its target: its own embedding, and states 32 wide into 48."""
    shape = Shape(seed=34, width=48, head_dim=12, own_embed=True, fc_norm=True)
    settings = {"target_hidden_size": WIDTH, "fc_norm": True, "eagle_config": nested((1, 3, 5))}
    return write(path, llama_config(shape, **settings), vocabulary(tensors_of(shape)))


def write_gpt_oss(path: Path) -> Path:
    """NVIDIA's gpt-oss Eagle3-v3: ids that reach N are boundaries; one norm over the concat."""
    shape = Shape(seed=35, concat_norm=True)
    config = llama_config(shape, eagle_config=nested((4, 6, LAYERS), norm_before_fc=True))
    return write(path, config, vocabulary(tensors_of(shape), t2d=False))


def write_vllm(path: Path) -> Path:
    """vLLM, plain: Eagle3LlamaForCausalLM, boundaries at the top and nested, every switch that only vLLM has."""
    shape = Shape(seed=41, own_embed=True, attention_bias=True, output_bias=True, mlp_bias=True, layers=2)
    ids = [1, 4, LAYERS]
    settings = {
        **{"architectures": ["Eagle3LlamaForCausalLM"], "norm_before_residual": True, "norm_output": True},
        **{"attention_bias": True, "mlp_bias": True, "logit_scale": 0.5, "sliding_window": 4},
        **{"layer_types": ["sliding_attention", "full_attention"], "rope_scaling": LLAMA3},
        **{"eagle_aux_hidden_state_layer_ids": ids, "eagle_config": nested(ids)},
    }
    return write(path, llama_config(shape, **settings), vocabulary(tensors_of(shape)))


def write_vllm_qwen3(path: Path) -> Path:
    """vLLM's Qwen3 drafter: norms on queries and keys, full vocabulary without d2t, the target's embedding."""
    shape = Shape(seed=42, qk_norm=True, draft_vocab=VOCAB, head_dim=16)
    settings = {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False}
    settings |= {"eagle_aux_hidden_state_layer_ids": [2, 4, 7], "num_aux_hidden_states": 3, "draft_vocab_size": ...}
    return write(path, llama_config(shape, **settings), tensors_of(shape))


def write_vllm_default(path: Path) -> Path:
    """vLLM without ids and without a head: both are the target's."""
    shape = Shape(seed=43, draft_vocab=VOCAB)
    tensors = tensors_of(shape)
    del tensors["lm_head.weight"]
    settings = {"architectures": ["Eagle3LlamaForCausalLM"], "rope_theta": ..., "head_dim": ...}
    return write(path, llama_config(shape, **settings), tensors)


def write_vllm_mla(path: Path) -> Path:
    """vLLM's MLA drafter: it takes norm_before_residual; own head, embedding and boundaries at the top level."""
    shape = Shape(seed=44, latent=(20, 16, 12, 8, 10), own_embed=True)
    settings = {"architectures": ["Eagle3DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    settings |= {"norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [1, 4, 7]}
    return write(path, latent_config(shape, **settings), vocabulary(tensors_of(shape)))


def _speculators(shape: Shape, layer: Config, **settings: Any) -> Config:
    inner = llama_config(shape, **{"architectures": ..., "draft_vocab_size": ..., "tie_word_embeddings": ..., **layer})
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    verifier = {"name_or_path": "org/stand-in", "architectures": ["LlamaForCausalLM"]}
    config = {
        **{"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.4.0"},
        **{
            "auto_map": {"": "config.Eagle3SpeculatorConfig"},
            "has_no_defaults_at_init": False,
            "torch_dtype": "float32",
        },
        **{"draft_vocab_size": shape.draft_vocab, "target_hidden_size": None, "embed_requires_grad": False},
        **{"tie_word_embeddings": False, "transformer_layer_config": inner},
        "speculators_config": {
            **{"algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [proposal]},
            "verifier": verifier,
        },
        **settings,
    }
    return {name: value for name, value in config.items() if value is not ...}


def write_speculators_llama(path: Path) -> Path:
    """speculators as its command line trains: Llama layer, norm_before_fc, norm_output, a window, null ids, own embedding."""
    shape = Shape(seed=51, concat_norm=True, own_embed=True)
    layer = {
        "layer_types": ["sliding_attention"],
        "sliding_window": 4,
        "use_sliding_window": True,
        "attention_bias": False,
    }
    flags = {"norm_before_fc": True, "norm_output": True, "norm_before_residual": True, "fc_norm": False}
    config = _speculators(shape, layer, **flags, eagle_aux_hidden_state_layer_ids=None)
    return write(path, config, vocabulary(tensors_of(shape)))


def write_speculators_qwen3(path: Path) -> Path:
    """Two Qwen3 layers, one windowed, per-state norms, explicit boundaries; norm_before_residual is not said."""
    shape = Shape(seed=52, fc_norm=True, own_embed=True, qk_norm=True, layers=2, aux=4, head_dim=16)
    layer = {"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5}
    layer |= {"use_sliding_window": True, "max_window_layers": 0, "attention_bias": False, "rope_theta": ...}
    layer |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}
    config = _speculators(shape, layer, fc_norm=True, eagle_aux_hidden_state_layer_ids=[0, 2, 4, LAYERS])
    return write(path, config, vocabulary(tensors_of(shape)))


def write_speculators_converted(path: Path) -> Path:
    """A SafeAILab head that speculators converted: norm_before_residual false is said, full vocabulary without d2t."""
    shape = Shape(seed=53, own_embed=True, attention_bias=True, draft_vocab=VOCAB)
    config = _speculators(shape, {"rope_theta": 10000.0, "attention_bias": True}, norm_before_residual=False)
    return write(path, config, tensors_of(shape))


def write_torchspec(path: Path, *, ids: tuple[int, ...] = (0, 1, 3, 5, 6), scaling: Config | None = None) -> Path:
    """TorchSpec's Llama drafter, exported; as many states as ids."""
    shape = Shape(seed=61 + len(ids), aux=len(ids), fc_norm=True, own_embed=True)
    settings = {"fc_norm": True, "norm_output": True, "num_aux_hidden_states": len(ids), "_torchspec_version": "0.1.0"}
    config = llama_config(shape, **settings, rope_scaling=scaling, eagle_config={**nested(ids), **KIMI})
    return write(path, config, vocabulary(tensors_of(shape)))


def write_torchspec_trainer(path: Path) -> Path:
    """A sharded training run's own names, with the draft model's place in front; classic, full vocabulary."""
    shape = Shape(seed=71, draft_vocab=VOCAB, own_embed=True)
    tensors = renamed(tensors_of(shape), "layers.0.", "midlayer.")
    tensors = {f"module.draft_model.{name}": t for name, t in tensors.items()}
    return write(path, llama_config(shape, _torchspec_version="0.1.0", eagle_config=nested((1, 3, 5))), tensors)


def write_for_vllm(path: Path) -> Path:
    """For vLLM, by TorchSpec or driftlab: boundaries, the same list at the top level and nested; a name of no project."""
    shape, ids = Shape(seed=75, fc_norm=True), [1, 3, 6]
    both = {"eagle_aux_hidden_state_layer_ids": ids, "eagle_config": nested(ids)}
    return write(path, llama_config(shape, fc_norm=True, **both), vocabulary(tensors_of(shape)))


def write_torchspec_mla(path: Path, *, q_lora: bool = True, ids: tuple[int, ...] = (1, 3, 5)) -> Path:
    """TorchSpec's MLA drafter: kimi_k2 with YaRN, or deepseek_v3 without a low rank for queries and without scaling."""
    shape = Shape(seed=72 + q_lora, latent=(20 if q_lora else 0, 16, 12, 8, 10), own_embed=True, fc_norm=q_lora)
    settings = {"rope_scaling": KIMI_YARN} if q_lora else {"model_type": "deepseek_v3"}
    settings |= {"fc_norm": q_lora, "norm_output": True, "num_aux_hidden_states": 3, "_torchspec_version": "0.1.0"}
    config = latent_config(shape, **settings, eagle_config={**nested(ids), **KIMI})
    return write(path, config, vocabulary(tensors_of(shape)))


def write_modelopt(path: Path) -> Path:
    """ModelOpt's export: two layers, lm_head always, d2t without t2d, no embedding, the exporter's YaRN, q/k/v biases."""
    shape = Shape(seed=81, layers=2, attention_bias=True)
    scaling = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64}
    settings = {"attention_bias": True, "mlp_bias": False, "rope_scaling": scaling}
    layers = {"next_layer_regular": True, "parallel_draft_step": 1, "parallel_draft_heads_num_layers": 1}
    config = llama_config(shape, **settings, eagle_config=nested((1, 4, 6), **KIMI, **layers))
    return write(path, config, vocabulary(tensors_of(shape), t2d=False))


def write_modelopt_final(path: Path) -> Path:
    """ModelOpt with use_aux_hidden_state false: no fc, the target's final post-norm state is the hidden input."""
    shape = Shape(seed=82, fc=False)
    settings = {**KIMI, "use_aux_hidden_state": False, "next_layer_regular": True}
    config = llama_config(shape, attention_bias=False, mlp_bias=False, eagle_config=settings)
    return write(path, config, vocabulary(tensors_of(shape), t2d=False))


def write_tensorrt(path: Path) -> Path:
    """TensorRT-LLM: norm_before_fc nested, fc with a bias, q/k/v biases, int32 d2t, feedback after the norm."""
    shape = Shape(seed=91, concat_norm=True, fc_bias=True, attention_bias=True)
    eagle = nested((1, 3, 5), norm_before_fc=True, return_hidden_post_norm=True, next_layer_regular=True)
    settings = {"architectures": ["EAGLE3LlamaForCausalLM"], "bias": True, "attention_bias": True}
    config = llama_config(shape, **settings, eagle_config=eagle)
    return write(path, config, vocabulary(tensors_of(shape), t2d=False, dtype=torch.int32))


def write_tensorrt_layers(path: Path) -> Path:
    """TensorRT-LLM with two layers: regular ones norm with hidden_norm."""
    shape = Shape(seed=93, layers=2)
    tensors = renamed(tensors_of(shape), "layers.1.input_layernorm", "layers.1.hidden_norm")
    settings = {"architectures": ["EAGLE3LlamaForCausalLM"], "eagle_config": nested((1, 4, 6), next_layer_regular=True)}
    return write(path, llama_config(shape, **settings), vocabulary(tensors, t2d=False, dtype=torch.int32))


def write_tensorrt_both(path: Path) -> Path:
    """TensorRT-LLM with norms of both kinds: fc_norm comes before norm_before_fc, whose tensor is not used."""
    shape = Shape(seed=94, concat_norm=True, fc_norm=True)
    eagle = nested((1, 3, 5), norm_before_fc=True, next_layer_regular=True)
    settings = {"architectures": ["EAGLE3LlamaForCausalLM"], "fc_norm": True, "eagle_config": eagle}
    return write(path, llama_config(shape, **settings), vocabulary(tensors_of(shape), t2d=False, dtype=torch.int32))


def write_automodel(path: Path) -> Path:
    """Automodel: every name but the head's has model. in front; rotary settings spelled as transformers 5 does."""
    shape = Shape(seed=92, fc_norm=True)
    tensors = {n if n.startswith("lm_head") else f"model.{n}": t for n, t in tensors_of(shape).items()}
    settings = {"fc_norm": True, "norm_output": True, "rope_theta": ..., "num_aux_hidden_states": 3}
    settings["rope_parameters"] = {"rope_type": "default", "rope_theta": 70000.0}
    return write(path, llama_config(shape, **settings, eagle_config=nested((1, 3, 5))), vocabulary(tensors))


# ---- all of them


@dataclass(frozen=True)
class Folder:
    """A folder to write, its judge, and what a reader has to say of it."""

    write: Callable[[Path], Path]
    engine: Callable[[Path, Lent], Engine]
    format: str
    """a word that the format's name holds"""
    boundaries: tuple[int, ...]
    """what the engine reads, by hand; (): the final state"""
    assumed: tuple[str, ...] = ()
    """conventions that the file does not say"""
    family: str = "llama"
    given: dict[str, Any] = field(default_factory=dict)
    """what only a person can say of this file, in DrafterConfig's words"""


def _write(writer: Callable[..., Path], **options: Any) -> Callable[[Path], Path]:
    return lambda path: writer(path, **options)


def _specforge(before: bool) -> Callable[[Path, Lent], Engine]:
    return lambda path, given: rules.specforge(path, given, before=before)


FOLDERS: dict[str, Folder] = {
    "safeailab": Folder(write_safeailab, rules.safeailab, "SafeAILab", (2, 4, 5), assumed=("aux_layers", "rope_theta")),
    "safeailab_wide_linear": Folder(
        _write(write_safeailab, rope_theta=20000.0, scaling=LINEAR, wide=True),
        rules.safeailab,
        "SafeAILab",
        (2, 4, 5),
        assumed=("aux_layers",),
    ),
    "safeailab_full": Folder(write_safeailab_full, rules.safeailab, "SafeAILab", (2, 4, 5), assumed=("aux_layers",)),
    # the same file means two things, by its date: a person has to say which
    "specforge_before_true": Folder(
        _write(write_specforge, norm_output=True),
        _specforge(True),
        "SpecForge",
        (2, 4, 6),
        given={"norm_output": False},
    ),
    "specforge_before_false": Folder(
        _write(write_specforge, norm_output=False), _specforge(True), "SpecForge", (2, 4, 6), given={"head_norm": False}
    ),
    "specforge_after_false": Folder(
        _write(write_specforge, norm_output=False),
        _specforge(False),
        "SpecForge",
        (2, 4, 6),
        given={"norm_output": False},
    ),
    "specforge_after_31": Folder(
        _write(write_specforge, norm_output=True, fc_norm=True),
        _specforge(False),
        "SpecForge",
        (2, 4, 6),
        given={"norm_output": True},
    ),
    "specforge_absent": Folder(
        _write(write_specforge, norm_output=None, container="training_state"), _specforge(True), "SpecForge", (2, 4, 6)
    ),
    "specforge_sglang_full": Folder(
        write_specforge_sglang, rules.sglang, "SpecForge", (2, 4, 5), assumed=("aux_layers",)
    ),
    "sglang": Folder(write_sglang, rules.sglang, "", (2, 5, 7), assumed=("aux_layers",)),
    "sglang_sharded_yarn": Folder(
        _write(write_sglang, shards=3, scaling=YARN), rules.sglang, "", (2, 5, 7), assumed=("aux_layers",)
    ),
    "sglang_dynamic": Folder(
        _write(write_sglang, scaling={"type": "dynamic", "factor": 2.0}),
        rules.sglang,
        "",
        (2, 5, 7),
        assumed=("aux_layers",),
    ),
    "sglang_aliases": Folder(write_sglang_aliases, rules.sglang, "", (2, 4, 6), assumed=("aux_layers",)),
    "sglang_layers": Folder(write_sglang_layers, rules.sglang, "", (2, 4, 6), assumed=("aux_layers",)),
    "sglang_hidden_norm": Folder(
        _write(write_sglang_layers, both=False), rules.sglang, "", (2, 4, 6), assumed=("aux_layers",)
    ),
    "wide": Folder(write_wide, rules.sglang, "", (2, 4, 6), assumed=("aux_layers",)),
    "gpt_oss": Folder(write_gpt_oss, rules.sglang, "", (4, 6, 8), family="gpt_oss"),
    "vllm": Folder(write_vllm, rules.vllm, "vLLM", (1, 4, 8)),
    "vllm_qwen3": Folder(write_vllm_qwen3, rules.vllm, "vLLM", (2, 4, 7)),
    "vllm_default": Folder(write_vllm_default, rules.vllm, "vLLM", (2, 4, 5), assumed=("aux_layers", "rope_theta")),
    "vllm_mla": Folder(write_vllm_mla, rules.vllm, "vLLM", (1, 4, 7)),
    "speculators_llama": Folder(
        write_speculators_llama, rules.speculators, "speculators", (2, 4, 5), assumed=("aux_layers",)
    ),
    "speculators_qwen3": Folder(
        write_speculators_qwen3, rules.speculators, "speculators", (0, 2, 4, 8), assumed=("norm_before_residual",)
    ),
    "speculators_converted": Folder(
        write_speculators_converted, rules.speculators, "speculators", (2, 4, 5), assumed=("aux_layers",)
    ),
    "torchspec_five": Folder(write_torchspec, rules.torchspec, "TorchSpec", (1, 2, 4, 6, 7)),
    "torchspec_one_llama3": Folder(
        _write(write_torchspec, ids=(3,), scaling=LLAMA3), rules.torchspec, "TorchSpec", (4,)
    ),
    "torchspec_yarn_mscale": Folder(
        _write(write_torchspec, ids=(1, 3, 5), scaling=KIMI_YARN), rules.torchspec, "TorchSpec", (2, 4, 6)
    ),
    "torchspec_trainer": Folder(write_torchspec_trainer, rules.torchspec, "TorchSpec", (2, 4, 6)),
    "torchspec_mla": Folder(write_torchspec_mla, rules.torchspec, "TorchSpec", (2, 4, 6)),
    "torchspec_mla_for_vllm": Folder(
        _write(write_torchspec_mla, ids=(2, 4, 6)), rules.torchspec, "TorchSpec", (2, 4, 6)
    ),
    "torchspec_mla_no_q_lora": Folder(
        _write(write_torchspec_mla, q_lora=False), rules.torchspec, "TorchSpec", (2, 4, 6)
    ),
    "torchspec_mla_deepseek": Folder(
        _write(write_torchspec_mla, q_lora=False, ids=(2, 4, 6)), rules.torchspec, "TorchSpec", (3, 5, 7)
    ),
    "for_vllm": Folder(write_for_vllm, rules.vllm, "", (1, 3, 6), assumed=("aux_layers",)),
    "modelopt": Folder(write_modelopt, rules.modelopt, "ModelOpt", (2, 5, 7)),
    "modelopt_final": Folder(write_modelopt_final, rules.modelopt, "ModelOpt", ()),
    "tensorrt": Folder(write_tensorrt, rules.tensorrt, "TensorRT", (2, 4, 6)),
    "tensorrt_layers": Folder(write_tensorrt_layers, rules.tensorrt, "TensorRT", (2, 5, 7)),
    "tensorrt_both": Folder(write_tensorrt_both, rules.tensorrt, "TensorRT", (2, 4, 6)),
    "automodel": Folder(write_automodel, rules.sglang, "", (2, 4, 6), assumed=("aux_layers",)),
}
