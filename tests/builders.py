"""Drafters with tables of their own, tables to lend, and random batches: what the tests of the drafter build from."""

from __future__ import annotations

from types import SimpleNamespace

import torch

BASE = {
    **{"hidden_size": 32, "target_hidden_size": 32, "aux_layers": (1, 3, 5), "intermediate_size": 48},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 61, "draft_vocab_size": 61},
    **{"rope_theta": 10000.0, "rms_norm_eps": 1e-6, "fc_norm": True, "norm_output": True},
}


def config_of(**overrides):
    from driftlab import DrafterConfig

    return DrafterConfig(**{**BASE, **overrides})


def target_of(vocab=61, width=32, seed=0):
    """Anything with a head can lend its tables."""
    from driftlab.recorded import TargetHead

    generator = torch.Generator().manual_seed(seed)
    return SimpleNamespace(
        head=TargetHead(
            embed=torch.randn(vocab, width, generator=generator),
            lm_head=torch.randn(vocab, width, generator=generator),
            norm_weight=torch.rand(width, generator=generator) + 0.5,
        )
    )


def own_tables(**overrides):
    """A drafter with tables of its own, gains in [0.5, 2] and larger weights."""
    from driftlab import Drafter

    config = config_of(own_embed=True, lm_head="own", **overrides)
    size = config.draft_vocab_size
    drafter = Drafter(config, draft_vocab=range(1, size + 1) if size < config.vocab_size else None)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 2.0, generator=generator)
            else:
                parameter.mul_(6)
    return drafter.eval()


def random_batch(lengths, prompt_lengths, *, width, aux=3, vocab=61, seed=0, sinks=(0,), scales=(1.0, 4.0, 20.0)):
    """A padded batch of random tokens and states; padding holds large states, which nothing may read."""
    from driftlab.recorded import Batch

    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    tokens = torch.randint(3, vocab, (len(lengths), longest), generator=generator)
    scale = torch.tensor([scales[i % len(scales)] for i in range(aux)])
    states = torch.randn(len(lengths), longest, aux, width, generator=generator) * scale[:, None]
    padding = torch.arange(longest) >= torch.tensor(lengths)[:, None]
    return Batch(
        tokens=tokens.masked_fill(padding, 0),
        aux=states.masked_fill(padding[..., None, None], 100.0),
        last_hidden=torch.zeros(len(lengths), longest, width),
        lse=torch.zeros(len(lengths), longest),
        lengths=torch.tensor(lengths),
        prompt_lengths=torch.tensor(prompt_lengths),
        ids=tuple(f"p:{i}" for i in range(len(lengths))),
        finish=("length",) * len(lengths),
        sinks=sinks,
    )
