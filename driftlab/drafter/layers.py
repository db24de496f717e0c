"""The drafter's layers: EAGLE-3's first, an MTP head's first, and ordinary ones."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from driftlab.drafter.blocks import LatentAttention, LayerKV, SelfAttention
from driftlab.drafter.config import DrafterConfig
from driftlab.drafter.mlp import MLP, Experts
from driftlab.drafter.norms import RMSNorm
from driftlab.hooks import HookPoint
from driftlab.segments import Starts


class Layer(nn.Module):
    """A drafter layer i >= 1: an ordinary pre-norm decoder layer on the hidden stream alone."""

    def __init__(self, config: DrafterConfig, index: int, width: int | None = None) -> None:
        super().__init__()
        self.config = config
        block = SelfAttention if config.latent is None else LatentAttention
        self.input_layernorm = self._norm()
        self.self_attn = block(config, width or config.hidden_size, config.window(index))
        self.post_attention_layernorm = self._norm()
        self.mlp = (
            MLP(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
            if config.experts is None
            else Experts(config.hidden_size, config.experts)
        )
        self.hook_hidden_normed = HookPoint()  # [batch row d_model]
        self.hook_attn_out = HookPoint()  # [batch start d_model]
        self.hook_mlp_out = HookPoint()  # [batch start d_model]
        self.hook_resid = HookPoint()  # [batch start d_model], the residual stream that leaves the layer

    def _norm(self) -> RMSNorm:
        return RMSNorm(self.config.hidden_size, self.config.rms_norm_eps, plus_one=self.config.norm_plus_one)

    def inputs(self, embed: Tensor, hidden: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """Return what attention reads, [batch row width], and where the residual stream starts, [batch row d_model]."""
        return self.hook_hidden_normed(self.input_layernorm(hidden), depth), hidden

    def first(
        self, embed: Tensor, hidden: Tensor, positions: Tensor, queries: Starts, past: LayerKV | None
    ) -> tuple[Tensor, LayerKV]:
        """Depth 1: keys of every new context row, output for the rows in ``queries`` only.

        ``embed``, ``hidden [batch row d_model]`` are the new rows; ``past`` holds the rows before them.
        """
        x, residual = self.inputs(embed, hidden, 1)
        k, v = self.self_attn.keys(x, positions, 1)
        offset = 0 if past is None else past.k.shape[2]
        kv = LayerKV(k, v) if past is None else LayerKV(torch.cat([past.k, k], 2), torch.cat([past.v, v], 2))
        index = queries.rows - offset
        attended = self.self_attn(pick_rows(x, index), queries.rows, kv, queries, 1)
        return self._finish(pick_rows(residual, index), attended, 1), kv

    def next(self, embed: Tensor, hidden: Tensor, kv: LayerKV, starts: Starts, depth: int) -> Tensor:
        """Depth k >= 2 at rotary position row + k - 1: append the chain's own key, then attend."""
        x, residual = self.inputs(embed, hidden, depth)
        positions = starts.rows + (depth - 1)
        k, v = self.self_attn.keys(x, positions, depth)
        kv.own_k.append(k)
        kv.own_v.append(v)
        return self._finish(residual, self.self_attn(x, positions, kv, starts, depth), depth)

    def _finish(self, residual: Tensor, attended: Tensor, depth: int) -> Tensor:
        residual = residual + self.hook_attn_out(attended, depth)
        out = self.hook_mlp_out(self.mlp(self.post_attention_layernorm(residual)), depth)
        return self.hook_resid(residual + out, depth)


class FirstLayer(Layer):
    """EAGLE-3's layer 0: attends from [norm(embedding), norm(hidden)], twice the width; the residual stream is the raw hidden,
    or the normed one with ``norm_before_residual``.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config, 0, 2 * config.hidden_size)
        self.hidden_norm = self._norm()
        self.hook_embed_normed = HookPoint()  # [batch row d_model]

    def inputs(self, embed: Tensor, hidden: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """See :meth:`Layer.inputs`; width 2 * d_model: embedding first, hidden second."""
        embed_normed = self.hook_embed_normed(self.input_layernorm(embed), depth)
        raw = self.input_layernorm(hidden) if self.config.twice_normed else hidden
        hidden_normed = self.hook_hidden_normed(self.hidden_norm(raw), depth)
        residual = hidden_normed if self.config.norm_before_residual else hidden
        return torch.cat([embed_normed, hidden_normed], -1), residual


class CombiningLayer(Layer):
    """An MTP head's layer 0: z = eh_proj [enorm(embedding), hnorm(hidden)], then an ordinary layer whose stream starts at z."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config, 0)
        self.enorm, self.hnorm = self._norm(), self._norm()
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.hook_embed_normed = HookPoint()  # [batch row d_model]
        self.hook_combined = HookPoint()  # [batch row d_model], z

    def inputs(self, embed: Tensor, hidden: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """See :meth:`Layer.inputs`."""
        embed_normed = self.hook_embed_normed(self.enorm(embed), depth)
        z = self.hook_combined(self.eh_proj(torch.cat([embed_normed, self.hnorm(hidden)], -1)), depth)
        return super().inputs(embed, z, depth)


def first_layer(config: DrafterConfig) -> Layer:
    """Return layer 0 of the architecture."""
    return FirstLayer(config) if config.architecture == "eagle3" else CombiningLayer(config)


def pick_rows(
    x: Float[Tensor, "batch row width"], index: Int[Tensor, "batch start"]
) -> Float[Tensor, "batch start width"]:
    """Select rows of ``x`` by sequence."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))
