"""Which tensors a loader makes room for, and how a file's compare with them; a part of :mod:`rules`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What an engine makes of config.json before it opens the weights."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocab: int
    draft_vocab: int
    target_hidden: int
    states: int
    """captured states; 0: no fc"""
    fc_norm: bool = False
    input_norm: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    fc_bias: bool = False
    latent: dict[str, int] | None = None
    """ranks and widths of MLA, by their names in config.json"""
    deep_norms: tuple[str, ...] = ("input_layernorm",)
    """norms of the layers after the first"""
    extra: dict[str, Shape] = field(default_factory=dict)
    """tensors that may be there and need not"""

    @property
    def reduced(self) -> bool:
        """Whether the draft vocabulary is a part of the target's."""
        return self.draft_vocab != self.vocab


def room(sizes: Sizes) -> dict[str, Shape]:
    """Return name -> shape of every tensor that must be there, but for embedding, head and vocabulary maps."""
    made: dict[str, Shape] = {"norm.weight": (sizes.hidden,)}
    wide = sizes.states * sizes.target_hidden
    if sizes.states:
        made["fc.weight"] = (sizes.hidden, wide)
        made |= {f"fc_norm.{i}.weight": (sizes.target_hidden,) for i in range(sizes.states)} if sizes.fc_norm else {}
        made |= {"input_norm.weight": (wide,)} if sizes.input_norm else {}
        made |= {"fc.bias": (sizes.hidden,)} if sizes.fc_bias else {}
    for layer in range(sizes.layers):
        made |= {f"layers.{layer}.{name}": shape for name, shape in _layer(sizes, layer).items()}
    return made


def _layer(sizes: Sizes, layer: int) -> dict[str, Shape]:
    width = sizes.hidden * (1 if layer else 2)
    norms = sizes.deep_norms if layer else ("input_layernorm", "hidden_norm")
    made: dict[str, Shape] = {f"{name}.weight": (sizes.hidden,) for name in (*norms, "post_attention_layernorm")}
    for name, (rows, columns) in {
        "gate_proj": (sizes.inner, sizes.hidden),
        "up_proj": (sizes.inner, sizes.hidden),
        "down_proj": (sizes.hidden, sizes.inner),
    }.items():
        made[f"mlp.{name}.weight"] = (rows, columns)
        made |= {f"mlp.{name}.bias": (rows,)} if sizes.mlp_bias else {}
    attention = _attention(sizes, width) if sizes.latent is None else _latent(sizes, sizes.latent, width)
    return made | {f"self_attn.{name}": shape for name, shape in attention.items()}


def _attention(sizes: Sizes, width: int) -> dict[str, Shape]:
    rows = {
        "q_proj": sizes.heads * sizes.head_dim,
        "k_proj": sizes.kv_heads * sizes.head_dim,
        "v_proj": sizes.kv_heads * sizes.head_dim,
    }
    made: dict[str, Shape] = {f"{name}.weight": (count, width) for name, count in rows.items()}
    made["o_proj.weight"] = (sizes.hidden, sizes.heads * sizes.head_dim)
    made |= {f"{name}.bias": (count,) for name, count in rows.items()} if sizes.qkv_bias else {}
    made |= {"o_proj.bias": (sizes.hidden,)} if sizes.o_bias else {}
    made |= {f"{name}.weight": (sizes.head_dim,) for name in ("q_norm", "k_norm")} if sizes.qk_norm else {}
    return made


def _latent(sizes: Sizes, latent: dict[str, int], width: int) -> dict[str, Shape]:
    rank, turned = latent["kv_lora_rank"], latent["qk_rope_head_dim"]
    each = latent["qk_nope_head_dim"] + turned
    q_rank = latent["q_lora_rank"]
    queries: dict[str, Shape] = {
        "q_a_proj.weight": (q_rank, width),
        "q_a_layernorm.weight": (q_rank,),
        "q_b_proj.weight": (sizes.heads * each, q_rank),
    }
    return queries | {
        "kv_a_proj_with_mqa.weight": (rank + turned, width),
        "kv_a_layernorm.weight": (rank,),
        "kv_b_proj.weight": (sizes.heads * (latent["qk_nope_head_dim"] + latent["v_head_dim"]), rank),
        "o_proj.weight": (sizes.hidden, sizes.heads * latent["v_head_dim"]),
    }


def compare(
    found: dict[str, Shape], sizes: Sizes, *, unknown: str, missing: str, layer: str = "layers.0."
) -> list[str]:
    """Return findings on names and shapes.

    Args:
        found: the file's tensors, the first layer called layers.0.
        sizes: what the engine makes room for.
        unknown: what it does with a tensor that it has no room for.
        missing: what it does where one is not there.
        layer: how the engine calls the first layer.
    """
    must = room(sizes)
    known = must | sizes.extra
    findings = [f"{name}: {unknown}" for name in sorted(set(found) - set(known))]
    findings += [f"{name}: not in the file; {missing}" for name in sorted(set(must) - set(found))]
    findings += [
        f"{name}: {list(found[name])} in the file, {list(shape)} by config.json"
        for name, shape in sorted(known.items())
        if name in found and found[name] != shape
    ]
    return [words.replace("layers.0.", layer) for words in findings]


def whole(value: Any) -> bool:
    """Whether a setting is a positive whole number."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
