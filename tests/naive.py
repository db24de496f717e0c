"""The drafter's recursion, written out the slow way for one sequence, from the weights alone.

The chain is a list of (embedding, state, position) that grows by one entry a depth; at every depth the whole list goes
through every layer with dense causal attention, head by head, in float64. It shares no code with the package.
"""

from __future__ import annotations

import math

import torch


@torch.no_grad()
def naive_chain(drafter, tokens, aux, row, depth, fed=None):
    """Draft from ``row`` and return one dict a depth: token, logits, normed, resid, feedback, weights.

    ``tokens [pos]``, ``aux [pos aux d_target]``; ``fed``: the tokens fed at depths 2, 3, ...; default the drafted ones.
    ``weights[layer][head]`` are the last query's attention weights on keys 0..row (context) and then its own.
    """
    weight = {name: tensor.double() for name, tensor in drafter.state_dict().items()}
    embedding = drafter.embed_tokens.weight.double()
    head = drafter.lm_head.weight.double()
    config = drafter.config
    entries = [(embedding[tokens[t + 1]], fuse(config, weight, aux[t].double()), t) for t in range(row + 1)]
    steps = []
    for k in range(1, depth + 1):
        resid, weights = layers(config, weight, entries)
        normed = rms_norm(resid, weight["norm.weight"], config.rms_norm_eps)
        logits = head @ normed
        drafted = int(logits.argmax())
        token = drafted + int(weight["d2t"][drafted]) if "d2t" in weight else drafted
        feedback = normed if config.norm_output else resid
        steps.append(
            {
                **{"token": token, "logits": logits, "normed": normed, "resid": resid},
                **{"feedback": feedback, "weights": weights},
            }
        )
        entries.append((embedding[token if fed is None else fed[k - 1]], feedback, row + k))
    return steps


def fuse(config, weight, states):
    """fc over the concatenated states, each normed first if the drafter has fc_norm."""
    if config.fc_norm:
        gains = [weight[f"fc_norm.{i}.weight"] for i in range(len(states))]
        states = [rms_norm(state, gain, config.rms_norm_eps) for state, gain in zip(states, gains, strict=True)]
    return weight["fc.weight"] @ torch.cat(list(states))


def rms_norm(x, gain, eps):
    return gain * x / math.sqrt(float((x * x).mean()) + eps)


def layers(config, weight, entries):
    """Run every entry through every layer; return the last entry's residual stream and its attention weights."""
    eps, positions = config.rms_norm_eps, [position for _, _, position in entries]
    stream = [state for _, state, _ in entries]
    seen = []
    for index in range(config.num_hidden_layers):
        own = {name.removeprefix(f"layers.{index}."): w for name, w in weight.items() if f"layers.{index}." in name}
        inputs = []
        for (embedded, _, _), hidden in zip(entries, stream, strict=True):
            if index == 0:
                parts = [rms_norm(embedded, own["input_layernorm.weight"], eps)]
                parts.append(rms_norm(hidden, own["hidden_norm.weight"], eps))
                inputs.append(torch.cat(parts))
            else:
                inputs.append(rms_norm(hidden, own["input_layernorm.weight"], eps))
        attended, weights = attention(config, own, torch.stack(inputs), positions)
        seen.append(weights)
        for i, hidden in enumerate(stream):
            hidden = hidden + own["self_attn.o_proj.weight"] @ attended[i]
            x = rms_norm(hidden, own["post_attention_layernorm.weight"], eps)
            gate = own["mlp.gate_proj.weight"] @ x
            up = own["mlp.up_proj.weight"] @ x
            stream[i] = hidden + own["mlp.down_proj.weight"] @ (gate / (1 + (-gate).exp()) * up)
    return stream[-1], seen


def attention(config, own, x, positions):
    """Causal attention over all entries, head by head; also the last query's weights."""
    width, group = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    outputs, last = [], []
    for head in range(config.num_attention_heads):
        kv = head // group
        q = rotate(
            x @ own["self_attn.q_proj.weight"][head * width : (head + 1) * width].T, positions, config.rope_theta
        )
        k = rotate(x @ own["self_attn.k_proj.weight"][kv * width : (kv + 1) * width].T, positions, config.rope_theta)
        v = x @ own["self_attn.v_proj.weight"][kv * width : (kv + 1) * width].T
        scores = q @ k.T / math.sqrt(width)
        scores = scores + torch.full_like(scores, -torch.inf).triu(1)
        p = scores.exp() / scores.exp().sum(-1, keepdim=True)
        outputs.append(p @ v)
        last.append(p[-1])
    return torch.cat(outputs, 1), last


def rotate(x, positions, theta):
    """Turn dimension pairs (i, i + d/2), taken as complex numbers, by position * theta^(-2i/d)."""
    half = x.shape[1] // 2
    turns = [[position * theta ** (-i / half) for i in range(half)] for position in positions]
    angle = torch.tensor(turns, dtype=torch.float64)
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], 1)
