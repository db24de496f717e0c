"""What each engine computes with a drafter folder, written by hand: the judge of the reader, with no code of the package.

Everything is float64 and recomputed from the first row: no cache, no shared keys, no chains side by side. A chain is a list
of rows (token, state); row t of the context pairs the token after position t with the target's states at t, and every drafted
token adds a row with the drafter's own feedback. The list runs through the layers under a causal mask, and the last row is the
next draft. What differs between engines is in tests/engine_rules.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Lent:
    """What the target gives: its tables, its residual stream, and its final state after the final norm."""

    embed: Tensor  # [V, Ht]
    lm_head: Tensor  # [V, Ht]
    stream: Tensor  # [T, N + 1, Ht]: index k is the state after k layers
    final: Tensor  # [T, Ht]
    family: str = "llama"

    @property
    def layers(self) -> int:
        """N."""
        return self.stream.shape[1] - 1


@dataclass(frozen=True)
class Rope:
    """Radians a position for each pair, what cos and sin are multiplied by, and which dimensions make a pair."""

    frequencies: Tensor
    factor: float = 1.0
    neighbours: bool = False  # pairs (0, 1), (2, 3), ...; else (i, i + d/2)

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        """Turn ``x [row, head, d]`` pair by pair, as complex numbers."""
        angle = positions[:, None].double() * self.frequencies
        turned_by = torch.polar(torch.full_like(angle, self.factor), angle)[:, None]
        half = x.shape[-1] // 2
        if self.neighbours:
            pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], half, 2).contiguous())
            return torch.view_as_real(pairs * turned_by).reshape(x.shape)
        product = torch.complex(x[..., :half], x[..., half:]) * turned_by
        return torch.cat([product.real, product.imag], -1)


def _magnitude(scale: float, factor: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rope_of(config: dict[str, Any], width: int, *, latent: bool = False) -> tuple[Rope, float]:
    """Return the rotation that a config asks for, and what the softmax scale is multiplied by (latent attention, YaRN)."""
    block = dict(config.get("rope_scaling") or {}) or dict(config.get("rope_parameters") or {})
    theta = config.get("rope_theta") or block.get("rope_theta") or 10000.0
    kind = block.get("rope_type") or block.get("type") or "default"
    plain = [theta ** (-2 * i / width) for i in range(width // 2)]
    if kind in ("default", "dynamic"):  # dynamic: nothing happens within the trained length
        return Rope(torch.tensor(plain, dtype=torch.float64), 1.0, latent), 1.0
    factor = block["factor"]
    if kind == "linear":
        return Rope(torch.tensor([f / factor for f in plain], dtype=torch.float64), 1.0, latent), 1.0
    length = block["original_max_position_embeddings"]
    if kind == "llama3":
        low, high = block["low_freq_factor"], block["high_freq_factor"]
        scaled = []
        for f in plain:
            wave = 2 * math.pi / f
            if wave < length / high:
                scaled.append(f)
            elif wave > length / low:
                scaled.append(f / factor)
            else:
                smooth = (length / wave - low) / (high - low)
                scaled.append((1 - smooth) * f / factor + smooth * f)
        return Rope(torch.tensor(scaled, dtype=torch.float64), 1.0, latent), 1.0
    assert kind == "yarn", kind

    def dimension(turns: float) -> float:
        return width * math.log(length / (2 * math.pi * turns)) / (2 * math.log(theta))

    low = max(math.floor(dimension(block.get("beta_fast", 32))), 0)
    high = min(math.ceil(dimension(block.get("beta_slow", 1))), width - 1)
    span = (high - low) or 0.001
    ramps = [min(max((i - low) / span, 0.0), 1.0) for i in range(width // 2)]
    scaled = [f / factor * ramp + f * (1 - ramp) for f, ramp in zip(plain, ramps, strict=True)]
    if latent:
        every = block.get("mscale_all_dim", 0)
        rotation = _magnitude(block.get("mscale", 1), factor) / _magnitude(every, factor)
        return Rope(torch.tensor(scaled, dtype=torch.float64), rotation, True), _magnitude(every, factor) ** 2
    if block.get("attention_factor") is not None:
        rotation = block["attention_factor"]
    elif block.get("mscale") and block.get("mscale_all_dim"):
        rotation = _magnitude(block["mscale"], factor) / _magnitude(block["mscale_all_dim"], factor)
    else:
        rotation = _magnitude(1, factor)
    return Rope(torch.tensor(scaled, dtype=torch.float64), rotation), 1.0


Attend = Callable[["Engine", int, Tensor], Tensor]


@dataclass(frozen=True)
class Engine:
    """A folder as one engine reads it. ``tensors`` has one set of names: layers.{i}.*, fc.weight, fc_norm.{i}.weight, ..."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    lent: Lent
    boundaries: tuple[int, ...]  # empty: the target's final state after its norm
    embed: Tensor
    head: Tensor
    vocabulary: Tensor  # the target id of every draft id
    concat_norm: bool = False  # one norm over the whole concat
    chunk_norms: bool = False  # one norm a state, after it
    residual_normed: bool = False
    feed_normed: bool = False
    head_normed: bool = True
    fc_by_width: bool = False  # fc is applied iff the hidden input is not as wide as the embedding
    later_norm: str = "input_layernorm"  # the norm before attention in layers >= 1
    windows: tuple[int, ...] = ()  # a layer: so many keys, the row's own among them; 0: all
    logit_scale: float = 1.0
    attend: Attend = field(default=lambda engine, layer, x: engine.attention(layer, x))

    def _linear(self, name: str, x: Tensor) -> Tensor:
        out = x @ self.tensors[f"{name}.weight"].T
        bias = self.tensors.get(f"{name}.bias")
        return out if bias is None else out + bias

    def _norm(self, name: str, x: Tensor) -> Tensor:
        eps = self.config["rms_norm_eps"]
        return self.tensors[f"{name}.weight"] * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)

    # ---- fusion

    @property
    def states(self) -> Tensor:
        """The target states that the engine captures, [T, A, Ht]; the final state alone where it captures none."""
        return self.lent.stream[:, list(self.boundaries)] if self.boundaries else self.lent.final[:, None]

    def fused(self, states: Tensor | None = None) -> Tensor:
        """g_t of every row of ``states [T, A, Ht]``."""
        concat = (self.states if states is None else states).flatten(1)
        if not self.boundaries:
            return concat
        if self.fc_by_width and concat.shape[-1] == self.embed.shape[1]:
            return concat
        if self.concat_norm:
            concat = self._norm("input_norm", concat)
        if self.chunk_norms:
            chunks = concat.chunk(sum(name.startswith("fc_norm.") for name in self.tensors), -1)
            concat = torch.cat([self._norm(f"fc_norm.{i}", chunk) for i, chunk in enumerate(chunks)], -1)
        return self._linear("fc", concat)

    # ---- the layers

    def rows(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Run rows at positions 0, 1, ...; return draft logits and feedback of each."""
        embedding, u = self.embed[tokens], states
        for layer in range(self.config.get("num_hidden_layers", 1)):
            name = f"layers.{layer}"
            if layer == 0:
                hidden = self._norm(f"{name}.hidden_norm", u)
                x = torch.cat([self._norm(f"{name}.input_layernorm", embedding), hidden], -1)
                u = hidden if self.residual_normed else u
            else:
                x = self._norm(f"{name}.{self.later_norm}", u)
            u = u + self.attend(self, layer, x)
            z = self._norm(f"{name}.post_attention_layernorm", u)
            gate, up = self._linear(f"{name}.mlp.gate_proj", z), self._linear(f"{name}.mlp.up_proj", z)
            u = u + self._linear(f"{name}.mlp.down_proj", gate * torch.sigmoid(gate) * up)
        y = self._norm("norm", u) if self.head_normed or self.feed_normed else u
        logits = (y if self.head_normed else u) @ self.head.T * self.logit_scale
        return logits, y if self.feed_normed else u

    def attention(self, layer: int, x: Tensor) -> Tensor:
        """Causal self-attention of layer ``layer`` over all rows ``x [row, width]``."""
        name, heads = f"layers.{layer}.self_attn", self.config["num_attention_heads"]
        latent = f"{name}.kv_a_proj_with_mqa.weight" in self.tensors
        q, k, v, scale = self._latent(name, x, heads) if latent else self._grouped(name, x, heads)
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        query, key = torch.arange(len(x))[:, None], torch.arange(len(x))[None]
        seen = key <= query
        if self.windows and self.windows[layer]:
            seen &= key > query - self.windows[layer]
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return self._linear(f"{name}.o_proj", torch.einsum("hqk,khd->qhd", weights, v).flatten(1))

    def _grouped(self, name: str, x: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor, float]:
        kv_heads = self.config.get("num_key_value_heads") or heads
        width = self.config.get("head_dim") or self.config["hidden_size"] // heads
        q = self._linear(f"{name}.q_proj", x).view(len(x), heads, width)
        k = self._linear(f"{name}.k_proj", x).view(len(x), kv_heads, width)
        v = self._linear(f"{name}.v_proj", x).view(len(x), kv_heads, width)
        if f"{name}.q_norm.weight" in self.tensors:
            q, k = self._norm(f"{name}.q_norm", q), self._norm(f"{name}.k_norm", k)
        rope, _ = rope_of(self.config, width)
        positions = torch.arange(len(x))
        shared_by = torch.arange(heads) // (heads // kv_heads)  # head h reads key head h // group
        return rope.turn(q, positions), rope.turn(k, positions)[:, shared_by], v[:, shared_by], width**-0.5

    def _latent(self, name: str, x: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor, float]:
        plain, turned = self.config["qk_nope_head_dim"], self.config["qk_rope_head_dim"]
        rank = self.config["kv_lora_rank"]
        if self.config.get("q_lora_rank"):
            q = self._linear(
                f"{name}.q_b_proj", self._norm(f"{name}.q_a_layernorm", self._linear(f"{name}.q_a_proj", x))
            )
        else:
            q = self._linear(f"{name}.q_proj", x)
        q = q.view(len(x), heads, plain + turned)
        compressed = self._linear(f"{name}.kv_a_proj_with_mqa", x)
        kv = self._linear(f"{name}.kv_b_proj", self._norm(f"{name}.kv_a_layernorm", compressed[:, :rank]))
        kv = kv.view(len(x), heads, -1)
        rope, corrected = rope_of(self.config, turned, latent=True)
        positions = torch.arange(len(x))
        shared = rope.turn(compressed[:, None, rank:], positions).expand(-1, heads, -1)
        q = torch.cat([q[..., :plain], rope.turn(q[..., plain:], positions)], -1)
        return q, torch.cat([kv[..., :plain], shared], -1), kv[..., plain:], (plain + turned) ** -0.5 * corrected

    # ---- chains

    def chain(self, ids: Tensor, fused: Tensor, depth: int, forced: Tensor | None = None) -> Drafted:
        """Draft from the last of the context rows (``ids [row]``, ``fused [row, H]``): greedily, or along ``forced``."""
        ids, states, logits, feedback, tokens = ids, fused, [], [], []
        for k in range(depth):
            out, feed = self.rows(ids, states)
            logits.append(out[-1])
            feedback.append(feed[-1])
            tokens.append(self.vocabulary[out[-1].argmax()])
            following = tokens[-1] if forced is None else forced[k]
            ids, states = torch.cat([ids, following[None]]), torch.cat([states, feed[-1:]])
        return Drafted(torch.stack(logits), torch.stack(feedback), torch.stack(tokens))

    def every_start(self, ids: Tensor, fused: Tensor, depth: int, *, own: bool) -> Drafted:
        """Chains from every context row, [depth, row, ...]: own tokens, or the text's (zeros after its end)."""
        text = torch.cat([ids, ids.new_zeros(depth)])
        chains = [
            self.chain(ids[: t + 1], fused[: t + 1], depth, None if own else text[t + 1 :]) for t in range(len(ids))
        ]
        stacked = (
            torch.stack(parts, 1) for parts in zip(*((c.logits, c.feedback, c.tokens) for c in chains), strict=True)
        )
        return Drafted(*stacked)


@dataclass(frozen=True)
class Drafted:
    """Logits over the draft vocabulary, feedback, and greedy tokens (target ids) of each depth."""

    logits: Tensor
    feedback: Tensor
    tokens: Tensor
