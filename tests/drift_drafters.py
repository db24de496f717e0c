"""Drafters whose behaviour by depth is set by hand, texts for them, and records from given masses.

A constructed drafter reads one target state as it is (fc picks it out), adds nothing by attention, and by its MLP adds to the
stream u either ``grow`` times the normed stream (size without direction) or ``push`` times a fixed direction v (size and
direction; with ``norm_output`` direction alone). Prompt p's target state is size[p] * e_p at every row and the head's token
3 + p lies along e_p, so a draft is right wherever the text has that token; token 60 lies along v, times ``lure``.
Attention: keys whose embedding is token 1's (row 0, the sink) draw queries along the e_p, keys along v draw queries along v.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from builders import own_tables, random_batch

WIDTH, FIRST, LURED, V, SINK_FEATURE = 32, 3, 60, 31, 30
SILU_OF_10 = 10 / (1 + float(torch.exp(torch.tensor(-10.0, dtype=torch.float64))))


def constructed(*, grow=0.0, push=0.0, lure=0.0, norm_output=False, ttt=2, prompts=8):
    """See the module docstring; float64."""
    drafter = own_tables(fc_norm=False, norm_output=norm_output, mlp_bias=True, ttt=ttt, num_key_value_heads=4).double()
    layer = drafter.layers[0]
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        drafter.fc.weight[:, :WIDTH] = torch.eye(WIDTH)  # the lowest of three states
        layer.mlp.gate_proj.bias.fill_(10.0)
        if push:
            layer.mlp.up_proj.bias[0] = 1.0
            layer.mlp.down_proj.weight[V, 0] = push / SILU_OF_10
        else:
            layer.mlp.up_proj.weight[:WIDTH] = torch.eye(WIDTH)
            layer.mlp.down_proj.weight[:, :WIDTH] = grow / SILU_OF_10 * torch.eye(WIDTH)
        for p in range(prompts):
            drafter.lm_head.weight[FIRST + p, p] = 1.0
        drafter.lm_head.weight[LURED, V] = lure
        generator = torch.Generator().manual_seed(3)
        embedding = torch.randn(61, WIDTH, generator=generator, dtype=torch.float64)
        embedding[:, SINK_FEATURE] = 0.0
        embedding[1] = 0.0
        embedding[1, SINK_FEATURE] = 1.0
        drafter.embed_tokens.weight.copy_(embedding)
        for head in range(4):  # slow rotary pairs, so that distance hardly matters
            q, k = layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight
            q[8 * head + 3, WIDTH + V] = k[8 * head + 3, WIDTH + V] = 1.0
            q[8 * head + 2, WIDTH : WIDTH + prompts] = 1.0
            k[8 * head + 2, SINK_FEATURE] = 0.3
            q[8 * head + 7, :WIDTH] = k[8 * head + 7, :WIDTH] = 0.4 * torch.randn(WIDTH, generator=generator).double()
    return drafter


def texts(*, prompts=8, right=0.8, answer=40, sizes=None, seed=0):
    """A batch whose prompt p has state sizes[p] * e_p (RMS 1 by default) and an answer that is token 3 + p at a rate."""
    lengths = [answer + 4 + p % 3 for p in range(prompts)]
    batch = random_batch(lengths, [n - answer for n in lengths], width=WIDTH, seed=seed).to("cpu", torch.float64)
    generator = torch.Generator().manual_seed(seed + 1)
    tokens = batch.tokens.clone()
    aux = torch.zeros_like(batch.aux)
    for p in range(prompts):
        hit = torch.rand(tokens.shape[1], generator=generator) < right
        other = torch.randint(20, 50, hit.shape, generator=generator)
        tokens[p] = torch.where(hit, FIRST + p, other)
        tokens[p, 1] = 1
        aux[p, :, 0, p] = WIDTH**0.5 * (1.0 if sizes is None else sizes[p])
    return dataclasses.replace(batch, tokens=tokens, aux=aux)


def record_of(mass, recent_first, *, prompt=None, row=None, **others):
    """A Record of given masses [start depth layer head seg], first recents [start layer head window]; the rest is filler."""
    from driftlab.drift import Record

    mass, recent_first = np.asarray(mass, dtype=np.float64), np.asarray(recent_first, dtype=np.float64)
    starts, depth, layers, heads, _ = mass.shape
    prompt = np.zeros(starts, dtype=np.int64) if prompt is None else np.asarray(prompt)
    row = np.arange(2, 2 + starts) if row is None else np.asarray(row)
    filler = {
        **{"entropy": np.ones((starts, depth, layers, heads)), "visible": np.full((starts, depth, layers), 4)},
        **{"windows": (), "recent": np.zeros((starts, depth, layers, heads, 0)), "rms_fused": np.ones(starts)},
        **{name: np.ones((starts, depth)) for name in ("rms_resid", "rms_feedback", "successive", "imitation")},
        **{"update": None, "vectors": np.zeros((0, depth, 4)), "vector_prompt": np.zeros(0, dtype=np.int64)},
        **{name: np.ones((starts, 1)) for name in ("magnitude_share", "projection_share")},
    }
    values = {**filler, **others}
    return Record(
        ids=tuple(f"p:{i}" for i in range(int(prompt.max()) + 1)) if starts else (),
        **{"prompt": prompt, "row": row, "mass": mass, "recent_first": recent_first, **values},
    )
