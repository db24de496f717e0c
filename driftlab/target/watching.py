"""Attention functions that transformers is lent: SDPA with the mass per key beside it, and SDPA for one query a slot."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from driftlab.errors import DriftlabError

_QUERY_BLOCK = 256


class MassRecorder:
    """Mean mass per key of each layer, over heads and over queries from ``first_query`` on; some queries at a time."""

    def __init__(self, first_query: int) -> None:
        self.first_query = first_query
        self.mass: dict[int, Tensor] = {}
        self.seen: dict[int, Tensor] = {}
        """whether every one of those queries sees the key"""

    def add(self, layer: int, q: Tensor, k: Tensor, scaling: float, mask: Tensor | None) -> None:
        """Add a layer's queries and keys, [batch head pos d_head]."""
        keys, queries = k.shape[2], q.shape[2]
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1).float()
        total, seen = k.new_zeros(keys), torch.ones(keys, dtype=torch.bool, device=k.device)
        for start in range(self.first_query, queries, _QUERY_BLOCK):
            stop = min(start + _QUERY_BLOCK, queries)
            scores = (q[:, :, start:stop].float() @ k.transpose(-1, -2)) * scaling
            if mask is None:
                visible = torch.arange(keys, device=k.device) <= torch.arange(start, stop, device=k.device)[:, None]
            else:
                visible = mask[..., start:stop, :keys]
            seen &= visible.reshape(-1, keys).all(0)
            total += scores.masked_fill(~visible, -torch.inf).softmax(-1).mean((0, 1)).sum(0)
        self.mass[layer] = (total / (queries - self.first_query)).cpu()
        self.seen[layer] = seen.cpu()


def mass_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    driftlab_recorder: MassRecorder | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """SDPA as it is, and beside it the mass per key for the recorder that came with the call."""
    if kwargs.get("s_aux") is not None or kwargs.get("softcap") is not None:
        raise DriftlabError("this target has learned sinks or soft-capped scores, which SDPA would drop")
    if driftlab_recorder is not None:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        driftlab_recorder.add(module.layer_idx, query, key, scale, attention_mask)
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)


def slot_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """One query a slot: the heads of a group stand where SDPA expects queries, so keys are read once a group."""
    if kwargs.get("s_aux") is not None or kwargs.get("softcap") is not None:
        raise DriftlabError(f"{type(module).__name__} has learned sinks or soft-capped scores, which SDPA would drop")
    slots, heads, _, width = query.shape
    grouped = query.view(slots, key.shape[1], heads // key.shape[1], width)
    out = torch.nn.functional.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(slots, 1, heads, -1), None
