r"""What the target itself says of the text that it was recorded on, beside tau under a perturbed input.

A text that the target itself finds unlikely, or that goes in circles, is a broken text, not a broken drafter:

    perplexity = exp( - sum log p(x_t | x_<t) / sum 1 ),    p = softmax of the target's logits: temperature 1, nothing cut,

over all answer tokens, EOS included; repetition is that of :mod:`driftlab.breakdown` (``repeated_ngrams`` is 1 - distinct-n).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from driftlab.breakdown import repetition_records
from driftlab.intervals import bootstrap_ratio
from driftlab.trajectory import Trajectory


def text_nll(
    last_hidden: Float[Tensor, "pos d_target"],
    lse: Float[Tensor, " pos"],
    tokens: Int[Tensor, " pos"],
    prompt_length: int,
    lm_head: Float[Tensor, "vocab d_target"],
) -> Float[Tensor, " row"]:
    """Return -log p of each answer token in nats, float64, unprocessed (temperature 1, no cut), whatever chose the tokens.

    Args:
        last_hidden: the target's states after its final norm.
        lse: log-sum-exp of the target's logits at the answer rows.
        tokens: prompt and answer.
        prompt_length: tokens of the prompt, at least 1.
        lm_head: the target's head.
    """
    rows = slice(prompt_length - 1, len(tokens) - 1)
    logits = (last_hidden[rows].double() * lm_head[tokens[prompt_length:]].double()).sum(-1)
    return (lse[rows].double() - logits).clamp(min=0)  # a probability above 1 is rounding


def text_records(trajectory: Trajectory, *, samples: int = 2000, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield tidy rows of a recording's text: per prompt ``nll`` (nats a token) and the repetition; the pooled ``perplexity``.

    ``n`` counts tokens. The interval of the perplexity resamples prompts.
    """
    head = trajectory.head.lm_head
    sums, counts = [], []
    for entry, one in zip(trajectory.entries, trajectory, strict=True):
        nll = text_nll(one.last_hidden, one.lse, one.tokens, one.prompt_length, head)
        sums.append(float(nll.sum()))
        counts.append(len(nll))
        at = {"prompt": entry.id, "category": entry.category}
        yield {**at, "quantity": "nll", "value": sums[-1] / counts[-1], "n": counts[-1]}
    yield from repetition_records(trajectory)
    pooled = bootstrap_ratio(sums, counts, samples=samples, seed=seed).within(0, np.inf)
    value, low, high = (float(end) for end in np.exp(pooled))  # a monotone function of the ratio keeps its interval
    yield {"prompt": "", "quantity": "perplexity", "value": value, "low": low, "high": high, "n": sum(counts)}
