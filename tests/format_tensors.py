"""Tensors, settings and files of tiny random drafters, and a stand-in for their target.

tests/format_folders.py puts them together. The target has 8 layers, width 32 and 97 tokens; drafters are 32 wide unless that is
the point. Gains lie in [0.5, 2], weights are large enough that logits of different rows differ by units.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from engine_forwards import Lent
from safetensors.torch import save_file
from torch import Tensor

LAYERS, WIDTH, VOCAB, DRAFT_VOCAB, ROWS = 8, 32, 97, 41, 8

Tensors = dict[str, Tensor]
Config = dict[str, Any]


# ---- the target


def lent(family: str = "llama") -> Lent:
    """Tables and states of the stand-in, float64: the residual stream grows from rms 1 to 20 with depth."""
    generator = torch.Generator().manual_seed(5)
    scale = torch.linspace(1, 20, LAYERS + 1)[:, None]

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    tables = drawn(VOCAB, WIDTH), drawn(VOCAB, WIDTH) / 4
    return Lent(
        *(t.double() for t in tables),
        (drawn(ROWS, LAYERS + 1, WIDTH) * scale).double(),
        drawn(ROWS, WIDTH).double(),
        family,
    )


def text() -> Tensor:
    """The token after each of the rows."""
    return torch.randint(3, VOCAB, (ROWS,), generator=torch.Generator().manual_seed(6))


def target_of(given: Lent, family: str = "llama") -> Any:
    """The stand-in as the package wants a target: head, spec, and what it captures."""
    from driftlab.recorded import TargetHead, TargetSpec

    spec = TargetSpec(
        **{
            "name": "stand-in",
            "label": "stand-in",
            "fingerprint": "0" * 64,
            "num_layers": LAYERS,
            "hidden_size": WIDTH,
        },
        **{"intermediate_size": 48, "vocab_size": VOCAB, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"head_dim": 8, "rms_norm_eps": 1e-6, "rope_theta": 500000.0, "rope_type": "default", "max_positions": 4096},
        **{"eos_ids": (2,)},
    )
    head = TargetHead(given.embed.float(), given.lm_head.float(), torch.ones(WIDTH))
    return SimpleNamespace(head=head, spec=spec, aux_layers=(2, 4, 5))


# ---- tensors


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the tensors of a drafter are made from."""

    seed: int
    width: int = WIDTH
    target_width: int = WIDTH
    aux: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    mlp: int = 48
    draft_vocab: int = DRAFT_VOCAB
    layers: int = 1
    fc: bool = True
    fc_bias: bool = False
    fc_norm: bool = False
    concat_norm: bool = False
    qk_norm: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    own_embed: bool = False
    latent: tuple[int, int, int, int, int] | None = None
    """q_lora_rank (0: none), kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim"""


class _Draw:
    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def linear(self, out: int, width: int, scale: float = 1.0) -> Tensor:
        return torch.randn(out, width, generator=self.generator) * scale * width**-0.5

    def gain(self, width: int) -> Tensor:
        return torch.rand(width, generator=self.generator) * 1.5 + 0.5

    def bias(self, width: int) -> Tensor:
        return torch.randn(width, generator=self.generator) * 0.5


def _attention(draw: _Draw, shape: Shape, width: int) -> Tensors:
    if shape.latent is None:
        sizes = {"q": shape.heads * shape.head_dim, "k": shape.kv_heads * shape.head_dim}
        sizes["v"] = sizes["k"]
        out = {f"{part}_proj.weight": draw.linear(size, width) for part, size in sizes.items()}
        if shape.attention_bias:
            out |= {f"{part}_proj.bias": draw.bias(size) for part, size in sizes.items()}
        if shape.qk_norm:
            out |= {f"{part}_norm.weight": draw.gain(shape.head_dim) for part in ("q", "k")}
        value = shape.heads * shape.head_dim
    else:
        rank, kv_rank, plain, turned, per_value = shape.latent
        queries = shape.heads * (plain + turned)
        if rank:
            out = {"q_a_proj.weight": draw.linear(rank, width), "q_a_layernorm.weight": draw.gain(rank)}
            out["q_b_proj.weight"] = draw.linear(queries, rank)
        else:
            out = {"q_proj.weight": draw.linear(queries, width)}
        out["kv_a_proj_with_mqa.weight"] = draw.linear(kv_rank + turned, width)
        out["kv_a_layernorm.weight"] = draw.gain(kv_rank)
        out["kv_b_proj.weight"] = draw.linear(shape.heads * (plain + per_value), kv_rank)
        value = shape.heads * per_value
    out["o_proj.weight"] = draw.linear(shape.width, value)
    if shape.output_bias:
        out["o_proj.bias"] = draw.bias(shape.width)
    return out


def tensors_of(shape: Shape) -> Tensors:
    """Random tensors under the names most projects write: layers.{i}.*, fc, norm, lm_head."""
    draw, width = _Draw(shape.seed), shape.width
    out: Tensors = {}
    if shape.fc:
        out["fc.weight"] = draw.linear(width, shape.aux * shape.target_width, 0.5)
    if shape.fc_bias:
        out["fc.bias"] = draw.bias(width)
    if shape.concat_norm:
        out["input_norm.weight"] = draw.gain(shape.aux * shape.target_width)
    if shape.fc_norm:
        out |= {f"fc_norm.{i}.weight": draw.gain(shape.target_width) for i in range(shape.aux)}
    for i in range(shape.layers):
        layer = {f"self_attn.{name}": t for name, t in _attention(draw, shape, width if i else 2 * width).items()}
        norms = ("input_layernorm", "post_attention_layernorm") + (() if i else ("hidden_norm",))
        layer |= {f"{norm}.weight": draw.gain(width) for norm in norms}
        sizes = {"gate": (shape.mlp, width), "up": (shape.mlp, width), "down": (width, shape.mlp)}
        layer |= {f"mlp.{part}_proj.weight": draw.linear(*size) for part, size in sizes.items()}
        if shape.mlp_bias:
            layer |= {f"mlp.{part}_proj.bias": draw.bias(size[0]) for part, size in sizes.items()}
        out |= {f"layers.{i}.{name}": t for name, t in layer.items()}
    out["norm.weight"] = draw.gain(width)
    out["lm_head.weight"] = draw.linear(shape.draft_vocab, width, 2.0)
    if shape.own_embed:
        out["embed_tokens.weight"] = torch.randn(VOCAB, width, generator=draw.generator)
    return out


def vocabulary(tensors: Tensors, *, t2d: bool = True, dtype: torch.dtype = torch.int64) -> Tensors:
    """Add d2t (offsets) for a draft vocabulary with gaps of uneven size, and t2d."""
    size = tensors["lm_head.weight"].shape[0]
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(size))
    ids = order[:size].sort().values
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[ids] = True
    return {**tensors, "d2t": (ids - torch.arange(size)).to(dtype), **({"t2d": mask} if t2d else {})}


def renamed(tensors: Tensors, old: str, new: str) -> Tensors:
    """Replace the start of names."""
    return {new + name.removeprefix(old) if name.startswith(old) else name: t for name, t in tensors.items()}


# ---- config.json and files


def llama_config(shape: Shape, **settings: Any) -> Config:
    """The fields that all Llama-like drafters share; ``settings`` replace or add, and ... removes one."""
    config = {
        **{"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": VOCAB},
        **{"draft_vocab_size": shape.draft_vocab, "hidden_size": shape.width, "intermediate_size": shape.mlp},
        **{"num_hidden_layers": shape.layers, "num_attention_heads": shape.heads},
        **{"num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim, "rms_norm_eps": 1e-5},
        **{"max_position_embeddings": 4096, "rope_theta": 50000.0, "hidden_act": "silu", "tie_word_embeddings": False},
        **{"torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2},
        **settings,
    }
    return {name: value for name, value in config.items() if value is not ...}


def latent_config(shape: Shape, **settings: Any) -> Config:
    """DeepSeek-V3's fields in place of heads of one width."""
    rank, kv_rank, plain, turned, value = shape.latent
    ranks = {"q_lora_rank": rank or None, "kv_lora_rank": kv_rank, "qk_nope_head_dim": plain}
    ranks |= {"qk_rope_head_dim": turned, "v_head_dim": value}
    names = {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2"}
    return llama_config(shape, **{**names, **ranks, "num_key_value_heads": shape.heads, "head_dim": ..., **settings})


def write(path: Path, config: Config, tensors: Tensors, *, container: str = "safetensors", shards: int = 1) -> Path:
    """Write a folder: "safetensors" (one file or so many shards with an index), "bin" or "training_state"."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=1))
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if container == "bin":
        torch.save(tensors, path / "pytorch_model.bin")
    elif container == "training_state":
        torch.save({"draft_state_dict": tensors, "epoch": 3, "global_step": 7}, path / "training_state.pt")
    elif shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    else:
        _write_shards(path, tensors, shards)
    return path


def _write_shards(path: Path, tensors: Tensors, shards: int) -> None:
    weight_map, names = {}, sorted(tensors)
    for i in range(shards):
        name = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {key: tensors[key] for key in names[i::shards]}
        save_file(part, path / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def nested(ids: Iterable[int], **settings: Any) -> Config:
    """An eagle_config with layer ids."""
    return {"eagle_aux_hidden_state_layer_ids": list(ids), "use_aux_hidden_state": True, **settings}


# ---- rotary settings

LINEAR = {"type": "linear", "factor": 2.0}
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 4.0, "beta_slow": 1.0}
KIMI_YARN = {"type": "yarn", **YARN, "factor": 64.0, "mscale": 0.7, "mscale_all_dim": 1.0}
KIMI_YARN.pop("rope_type")
KIMI = {
    **{"use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True},
    "use_mtp_layernorm": False,
}
SAFEAILAB = {
    **{"architectures": ["LlamaForCausalLM"], "head_dim": ..., "bias": False, "pad_token_id": None, "torch_dtype": ...},
    "tie_word_embeddings": ...,
}
