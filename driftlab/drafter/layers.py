r"""The drafter's parts: RMSNorm, rotary embedding, attention on the seam of ``attention.attend``, SwiGLU, the layer.

RMS_w(x) = w * x / sqrt(mean(x^2) + eps)      statistics in float32
rotary:  pairs (i, i + d/2) turned by position * theta^(-2i/d)   (half-split, as in every GQA drafter)
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from driftlab.attention import Controls, Stats, attend
from driftlab.drafter.config import DrafterConfig
from driftlab.hooks import HookPoint
from driftlab.segments import Starts


class RMSNorm(nn.Module):
    """Root-mean-square norm with a gain; the statistic is float32 even for half-precision inputs."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Float[Tensor, "... width"]) -> Float[Tensor, "... width"]:
        """Return the normed ``x`` in the dtype of ``x``."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * normed.to(x.dtype)


class Rotary(nn.Module):
    """Default rotary position embedding; absolute positions may be offset by any constant without effect.

    Angles are float64 whatever the drafter's dtype: a buffer would be cast with it, and bfloat16 has no 257.
    """

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.theta = theta

    def forward(
        self, x: Float[Tensor, "batch head pos d_head"], positions: Int[Tensor, "batch pos"]
    ) -> Float[Tensor, "batch head pos d_head"]:
        """Turn ``x`` by its positions."""
        exponent = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=x.device) / self.head_dim
        angle = positions[:, None, :, None] * self.theta**-exponent
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


@dataclass
class LayerKV:
    """Keys and values of one layer: of the context rows, and of the chain's own steps (one entry per depth >= 2)."""

    k: Tensor
    v: Tensor
    own_k: list[Tensor] = field(default_factory=list)
    own_v: list[Tensor] = field(default_factory=list)

    def own(self) -> tuple[Tensor, Tensor]:
        """Return the own keys and values as [batch kv_head start own d_head]."""
        if self.own_k:
            return torch.stack(self.own_k, 3), torch.stack(self.own_v, 3)
        batch, heads, _, width = self.k.shape
        empty = self.k.new_empty(batch, heads, 1, 0, width)
        return empty, empty


class SelfAttention(nn.Module):
    """Grouped-query attention. ``controls`` and ``recent_windows`` are set, for a ``with`` block, by interventions
    and probes; the ``hook_mass`` ... points carry statistics and are computed only while somebody listens.
    """

    def __init__(self, config: DrafterConfig, width: int) -> None:
        super().__init__()
        heads, kv_heads, self.d_head = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.q_proj = nn.Linear(width, heads * self.d_head, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * self.d_head, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * self.d_head, bias=False)
        self.o_proj = nn.Linear(heads * self.d_head, config.hidden_size, bias=False)
        self.rotary = Rotary(self.d_head, config.rope_theta)
        self.controls = Controls()
        self.recent_windows: tuple[int, ...] = ()
        self.hook_q = HookPoint()  # [batch start head d_head], after rotary
        self.hook_k = HookPoint()  # [batch row kv_head d_head], after rotary; rows at depth 1, starts deeper
        self.hook_v = HookPoint()  # [batch row kv_head d_head]
        self.hook_out = HookPoint()  # [batch start head d_head], before o_proj
        self.hook_mass = HookPoint()  # [batch head start seg]
        self.hook_entropy = HookPoint()  # [batch head start], nats
        self.hook_visible = HookPoint()  # [batch start], number of keys seen
        self.hook_recent = HookPoint()  # [batch head start window]
        self.hook_columns = HookPoint()  # [batch head ctx], summed over the valid starts

    def queries(
        self, x: Float[Tensor, "batch start width"], positions: Int[Tensor, "batch start"], depth: int
    ) -> Float[Tensor, "batch head start d_head"]:
        """Project and turn the queries."""
        return self._hooked(self.hook_q, self._turned(self.q_proj(x), positions), depth)

    def keys(
        self, x: Float[Tensor, "batch row width"], positions: Int[Tensor, "batch row"], depth: int
    ) -> tuple[Float[Tensor, "batch kv_head row d_head"], Float[Tensor, "batch kv_head row d_head"]]:
        """Project and turn the keys; project the values."""
        k = self._hooked(self.hook_k, self._turned(self.k_proj(x), positions), depth)
        v = self._hooked(self.hook_v, rearrange(self.v_proj(x), "b s (h d) -> b h s d", d=self.d_head), depth)
        return k, v

    def forward(
        self, q: Float[Tensor, "batch head start d_head"], kv: LayerKV, starts: Starts, depth: int
    ) -> Float[Tensor, "batch start d_model"]:
        """Attend and project the output."""
        own_k, own_v = kv.own()
        result = attend(
            q,
            kv.k,
            kv.v,
            own_k.expand(-1, -1, q.shape[2], -1, -1),
            own_v.expand(-1, -1, q.shape[2], -1, -1),
            rows=starts.rows,
            segments=starts.segments,
            scale=self.d_head**-0.5,
            valid=starts.valid,
            controls=self.controls,
            stats=self._stats(),
        )
        self._publish(result, depth)
        out = self.hook_out(rearrange(result.out, "b h s d -> b s h d"), depth)
        return self.o_proj(rearrange(out, "b s h d -> b s (h d)"))

    def _stats(self) -> Stats:
        return Stats(
            mass=self.hook_mass.watched,
            entropy=self.hook_entropy.watched,
            columns=self.hook_columns.watched,
            recent=self.recent_windows if self.hook_recent.watched else (),
        )

    def _publish(self, result: object, depth: int) -> None:
        for name in ("visible", "mass", "entropy", "recent", "columns"):
            value = getattr(result, name)
            if value is not None:
                getattr(self, f"hook_{name}")(value, depth)

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.rotary(rearrange(x, "b s (h d) -> b h s d", d=self.d_head), positions)

    @staticmethod
    def _hooked(point: HookPoint, x: Tensor, depth: int) -> Tensor:
        if not point.watched:
            return x
        return rearrange(point(rearrange(x, "b h s d -> b s h d"), depth), "b s h d -> b h s d")


class MLP(nn.Module):
    """SwiGLU: down(silu(gate x) * up x)."""

    def __init__(self, width: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, intermediate, bias=False)
        self.up_proj = nn.Linear(width, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, width, bias=False)

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """Return the MLP's output, without the residual."""
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A drafter layer i >= 1: an ordinary pre-norm decoder layer on the hidden stream alone."""

    def __init__(self, config: DrafterConfig, width: int | None = None) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config, width or config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)
        self.hook_hidden_normed = HookPoint()  # [batch row d_model]
        self.hook_attn_out = HookPoint()  # [batch start d_model]
        self.hook_mlp_out = HookPoint()  # [batch start d_model]
        self.hook_resid = HookPoint()  # [batch start d_model], the residual stream that leaves the layer

    def attention_input(self, embed: Tensor, hidden: Tensor, depth: int) -> Tensor:
        """Return what q, k and v are projected from, [batch row width]."""
        return self.hook_hidden_normed(self.input_layernorm(hidden), depth)

    def first(
        self, embed: Tensor, hidden: Tensor, positions: Tensor, queries: Starts, past: LayerKV | None
    ) -> tuple[Tensor, LayerKV]:
        """Depth 1: keys of every new context row, output for the rows in ``queries`` only.

        ``embed``, ``hidden [batch row d_model]`` are the new rows; ``past`` holds the rows before them.
        """
        x = self.attention_input(embed, hidden, 1)
        k, v = self.self_attn.keys(x, positions, 1)
        offset = 0 if past is None else past.k.shape[2]
        kv = LayerKV(k, v) if past is None else LayerKV(torch.cat([past.k, k], 2), torch.cat([past.v, v], 2))
        index = queries.rows - offset
        q = self.self_attn.queries(pick_rows(x, index), queries.rows, 1)
        return self._finish(pick_rows(hidden, index), self.self_attn(q, kv, queries, 1), 1), kv

    def next(self, embed: Tensor, hidden: Tensor, kv: LayerKV, starts: Starts, depth: int) -> Tensor:
        """Depth k >= 2 at rotary position row + k - 1: append the chain's own key, then attend."""
        x = self.attention_input(embed, hidden, depth)
        positions = starts.rows + (depth - 1)
        k, v = self.self_attn.keys(x, positions, depth)
        kv.own_k.append(k)
        kv.own_v.append(v)
        q = self.self_attn.queries(x, positions, depth)
        return self._finish(hidden, self.self_attn(q, kv, starts, depth), depth)

    def _finish(self, residual: Tensor, attended: Tensor, depth: int) -> Tensor:
        residual = residual + self.hook_attn_out(attended, depth)
        out = self.hook_mlp_out(self.mlp(self.post_attention_layernorm(residual)), depth)
        return self.hook_resid(residual + out, depth)


class FirstLayer(Layer):
    """Layer 0: attends from [norm(embedding), norm(hidden)], twice the width; the residual stream is the raw hidden."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config, 2 * config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hook_embed_normed = HookPoint()  # [batch row d_model]

    def attention_input(self, embed: Tensor, hidden: Tensor, depth: int) -> Tensor:
        """Return [batch row 2*d_model]: embedding first, hidden second."""
        embed_normed = self.hook_embed_normed(self.input_layernorm(embed), depth)
        hidden_normed = self.hook_hidden_normed(self.hidden_norm(hidden), depth)
        return torch.cat([embed_normed, hidden_normed], -1)


def pick_rows(
    x: Float[Tensor, "batch row width"], index: Int[Tensor, "batch start"]
) -> Float[Tensor, "batch start width"]:
    """Select rows of ``x`` by sequence."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))
