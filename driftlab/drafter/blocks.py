r"""Attention blocks on the seam of ``attention.attend``: grouped-query, and multi-head latent (MLA).

GQA: q, k, v = W x (+ b); optionally RMSNorm on each head's q and k; rotary; out = W_o (attend * sigmoid(W_g x) if gated).

MLA (DeepSeek-V2, arXiv 2405.04434), with c the compressed state and k_r one rotary head shared by all:

    q        = W_qb RMS(W_qa x)     (or W_q x)      per head [q_n | q_r]
    [c, k_r] = W_kva x;  [k_n | v] per head = W_kvb RMS(c)
    score    = (q_n . k_n + rope(q_r) . rope(k_r)) / sqrt(d_n + d_r)  (times m^2 under YaRN);  out = W_o attend

It is computed decompressed, so that probes and interventions see ordinary keys and values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from driftlab.attention import Answer, Attended, Controls, Problem, Stats, attend
from driftlab.drafter.config import DrafterConfig
from driftlab.drafter.norms import RMSNorm
from driftlab.drafter.rotary import Rotary
from driftlab.hooks import HookPoint
from driftlab.segments import Starts

Steer = Callable[[Answer, Problem, int], Attended]
"""an intervention that depends on the problem: given what answers problems, the problem, and the draft depth"""


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
        return tuple(x.new_empty(*x.shape[:2], 1, 0, x.shape[-1]) for x in (self.k, self.v))


class Attention(nn.Module, ABC):
    """What the blocks share. ``controls``, ``steering``, ``recent_windows`` and ``backend`` are set for a ``with`` block by
    interventions, probes and executors;
    the ``hook_mass`` ... points carry statistics and are computed only while somebody listens.
    """

    def __init__(self, config: DrafterConfig, window: int) -> None:
        super().__init__()
        self.window = window
        self.rotary = Rotary(
            config.rope_width, config.rope_theta, config.rope_scaling, interleaved=config.rope_interleaved
        )
        self.scale = 1.0
        self.gate: nn.Module | None = None
        self.controls = Controls()
        self.steering: tuple[Steer, ...] = ()  # the last one is asked first
        self.backend = "auto"
        self.recent_windows: tuple[int, ...] = ()
        self.hook_q = HookPoint()  # [batch start head d_head], after rotary
        self.hook_k = HookPoint()  # [batch row kv_head d_head], after rotary; rows at depth 1, starts deeper
        self.hook_v = HookPoint()  # [batch row kv_head d_value]
        self.hook_out = HookPoint()  # [batch start head d_value], before the gate and the projection
        self.hook_mass = HookPoint()  # [batch head start seg]
        self.hook_entropy = HookPoint()  # [batch head start], nats
        self.hook_visible = HookPoint()  # [batch start], number of keys seen
        self.hook_sees_sink = (
            HookPoint()
        )  # [batch start], whether a sink key is among them; while hook_mass is listened to
        self.hook_recent = HookPoint()  # [batch head start window]
        self.hook_columns = HookPoint()  # [batch head ctx], summed over the valid starts

    @abstractmethod
    def project_q(self, x: Tensor, positions: Tensor) -> Float[Tensor, "batch head start d_head"]:
        """Project and turn the queries."""

    @abstractmethod
    def project_kv(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Project and turn the keys; project the values: [batch kv_head row d_head], [batch kv_head row d_value]."""

    @abstractmethod
    def turned(self, q: Tensor, by: Tensor) -> Tensor:
        """Move queries that are turned already by so many positions: [batch head start d_head], ``by`` [batch start]."""

    def keys(
        self, x: Float[Tensor, "batch row width"], positions: Int[Tensor, "batch row"], depth: int
    ) -> tuple[Float[Tensor, "batch kv_head row d_head"], Float[Tensor, "batch kv_head row d_value"]]:
        """Return keys and values of rows, seen by the hooks."""
        k, v = self.project_kv(x, positions)
        return _hooked(self.hook_k, k, depth), _hooked(self.hook_v, v, depth)

    def forward(
        self,
        x: Float[Tensor, "batch start width"],
        positions: Int[Tensor, "batch start"],
        kv: LayerKV,
        starts: Starts,
        depth: int,
    ) -> Float[Tensor, "batch start d_model"]:
        """Attend from ``x`` and project the output."""
        q = _hooked(self.hook_q, self.project_q(x, positions), depth)
        own_k, own_v = kv.own()
        result = attend(
            q,
            kv.k,
            kv.v,
            own_k.expand(-1, -1, q.shape[2], -1, -1),
            own_v.expand(-1, -1, q.shape[2], -1, -1),
            rows=starts.rows,
            segments=starts.segments,
            scale=self.scale,
            window=self.window,
            valid=starts.valid,
            controls=self.controls,
            stats=self._stats(),
            backend=self.backend,
            steering=[partial(_at_depth, steer, depth) for steer in self.steering],
        )
        self._publish(result, depth)
        out = rearrange(self.hook_out(rearrange(result.out, "b h s d -> b s h d"), depth), "b s h d -> b s (h d)")
        return self.o_proj(out if self.gate is None else out * torch.sigmoid(self.gate(x)))

    def _stats(self) -> Stats:
        return Stats(
            mass=self.hook_mass.watched,
            entropy=self.hook_entropy.watched,
            columns=self.hook_columns.watched,
            recent=self.recent_windows if self.hook_recent.watched else (),
        )

    def _publish(self, result: object, depth: int) -> None:
        for name in ("visible", "sees_sink", "mass", "entropy", "recent", "columns"):
            value = getattr(result, name)
            if value is not None:
                getattr(self, f"hook_{name}")(value, depth)


class SelfAttention(Attention):
    """Grouped-query attention; ``width`` is that of its input."""

    def __init__(self, config: DrafterConfig, width: int, window: int = 0) -> None:
        super().__init__(config, window)
        heads, kv_heads, self.d_head = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(width, heads * self.d_head, bias=bias)
        self.k_proj = nn.Linear(width, kv_heads * self.d_head, bias=bias)
        self.v_proj = nn.Linear(width, kv_heads * self.d_head, bias=bias)
        self.o_proj = nn.Linear(heads * self.d_head, config.hidden_size, bias=config.output_bias)
        if config.attention_gate:
            self.gate = nn.Linear(width, heads * self.d_head, bias=False)
        plus_one, eps = config.norm_plus_one, config.rms_norm_eps
        self.q_norm = RMSNorm(self.d_head, eps, plus_one=plus_one) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.d_head, eps, plus_one=plus_one) if config.qk_norm else nn.Identity()
        self.scale = self.d_head**-0.5

    def project_q(self, x: Tensor, positions: Tensor) -> Tensor:
        """See :meth:`Attention.project_q`."""
        return self.rotary(self.q_norm(self._heads(self.q_proj(x))), positions)

    def project_kv(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Attention.project_kv`."""
        return self.rotary(self.k_norm(self._heads(self.k_proj(x))), positions), self._heads(self.v_proj(x))

    def turned(self, q: Tensor, by: Tensor) -> Tensor:
        """See :meth:`Attention.turned`."""
        return _further(self.rotary, q, by)

    def _heads(self, x: Tensor) -> Tensor:
        return rearrange(x, "b s (h d) -> b h s d", d=self.d_head)


class LatentAttention(Attention):
    """Multi-head latent attention, decompressed; ``width`` is that of its input."""

    def __init__(self, config: DrafterConfig, width: int, window: int = 0) -> None:
        super().__init__(config, window)
        self.latent, heads, eps = config.latent, config.num_attention_heads, config.rms_norm_eps
        nope, rope, value = self.latent.qk_nope_head_dim, self.latent.qk_rope_head_dim, self.latent.v_head_dim
        rank = self.latent.q_lora_rank
        self.heads = heads
        if rank:
            self.q_a_proj = nn.Linear(width, rank, bias=False)
            self.q_a_layernorm = RMSNorm(rank, eps, plus_one=config.norm_plus_one)
            self.q_b_proj = nn.Linear(rank, heads * (nope + rope), bias=False)
        else:
            self.q_proj = nn.Linear(width, heads * (nope + rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, self.latent.kv_lora_rank + rope, bias=False)
        self.kv_a_layernorm = RMSNorm(self.latent.kv_lora_rank, eps, plus_one=config.norm_plus_one)
        self.kv_b_proj = nn.Linear(self.latent.kv_lora_rank, heads * (nope + value), bias=False)
        self.o_proj = nn.Linear(heads * value, config.hidden_size, bias=False)
        self.scale = (nope + rope) ** -0.5
        if config.rope_scaling is not None:
            self.scale *= config.rope_scaling.score_factor

    def project_q(self, x: Tensor, positions: Tensor) -> Tensor:
        """See :meth:`Attention.project_q`: [nope | rope] per head."""
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if self.latent.q_lora_rank else self.q_proj(x)
        plain, turned = self._heads(q).split([self.latent.qk_nope_head_dim, self.latent.qk_rope_head_dim], -1)
        return torch.cat([plain, self.rotary(turned, positions)], -1)

    def project_kv(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Attention.project_kv`; as many key heads as query heads."""
        compressed, turned = self.kv_a_proj_with_mqa(x).split(
            [self.latent.kv_lora_rank, self.latent.qk_rope_head_dim], -1
        )
        expanded = self._heads(self.kv_b_proj(self.kv_a_layernorm(compressed)))
        plain, v = expanded.split([self.latent.qk_nope_head_dim, self.latent.v_head_dim], -1)
        shared = self.rotary(turned[:, None], positions).expand(-1, self.heads, -1, -1)
        return torch.cat([plain, shared], -1), v

    def turned(self, q: Tensor, by: Tensor) -> Tensor:
        """See :meth:`Attention.turned`."""
        plain, turned = q.split([self.latent.qk_nope_head_dim, self.latent.qk_rope_head_dim], -1)
        return torch.cat([plain, _further(self.rotary, turned, by)], -1)

    def _heads(self, x: Tensor) -> Tensor:
        return rearrange(x, "b s (h d) -> b h s d", h=self.heads)


def _at_depth(steer: Steer, depth: int, answer: Answer, problem: Problem) -> Attended:
    return steer(answer, problem, depth)


def _further(rotary: Rotary, x: Tensor, by: Tensor) -> Tensor:
    """Turn what is turned already; a factor on cosine and sine (YaRN's) is in it once, and not to be applied again."""
    factor = 1.0 if rotary.scaling is None else rotary.scaling.rotation_factor
    return rotary(torch.cat([x[..., : rotary.width] / factor, x[..., rotary.width :]], -1), by)


def _hooked(point: HookPoint, x: Tensor, depth: int) -> Tensor:
    if not point.watched:
        return x
    return rearrange(point(rearrange(x, "b h s d -> b s h d"), depth), "b s h d -> b h s d")
