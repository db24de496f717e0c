"""Continue prompts with the target: batched, greedy or sampled, every sequence with a random stream of its own.

A sequence's text depends on its prompt, the seed and the settings, not on batch size or order: its stream is keyed by
the prompt's tokens (and by how often the same prompt came before), and finished sequences leave the batch.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from driftlab.errors import DriftlabError
from driftlab.target.adapter import Adapter

_COMPACT_BELOW = 0.75


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 are off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise DriftlabError(f"{self}: temperature and top_k must be >= 0, top_p in (0, 1]")

    def process(self, logits: Float[Tensor, "batch vocab"]) -> Float[Tensor, "batch vocab"]:
        """Return the processed distribution: temperature, then top-k, then top-p, renormalised."""
        scores = logits.double() / self.temperature
        if self.top_k:
            kth = scores.topk(min(self.top_k, scores.shape[-1])).values[:, -1:]
            scores = scores.masked_fill(scores < kth, -torch.inf)
        p = scores.softmax(-1)
        if self.top_p < 1:
            ordered, order = p.sort(-1, descending=True)
            # a token stays if the mass before it is below top_p: the first one always does
            outside = ordered.cumsum(-1) - ordered >= self.top_p
            p = p.masked_fill(outside.gather(-1, order.argsort(-1)), 0)
            p = p / p.sum(-1, keepdim=True)
        return p.to(logits.dtype)


def streams(prompts: Sequence[Sequence[int]], seed: int) -> list[torch.Generator]:
    """Return one generator per prompt, keyed by seed, tokens and the prompt's occurrence number."""
    seen: Counter[tuple[int, ...]] = Counter()
    generators = []
    for prompt in prompts:
        key = tuple(prompt)
        text = f"{seed}|{seen[key]}|{','.join(map(str, key))}"
        seen[key] += 1
        number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
        generators.append(torch.Generator().manual_seed(number))
    return generators


def choose(
    logits: Float[Tensor, "batch vocab"], sampling: Sampling, generators: Sequence[torch.Generator]
) -> list[int]:
    """Choose one token per row: arg max, or inverse-CDF sampling with one uniform number from the row's stream."""
    if sampling.temperature == 0:
        return logits.argmax(-1).tolist()
    p = sampling.process(logits).double().cpu()
    u = torch.stack([torch.rand((), generator=g, dtype=torch.float64) for g in generators])
    cumulative = p.cumsum(-1)
    chosen = torch.searchsorted(cumulative, (u * cumulative[:, -1])[:, None], right=True)[:, 0]
    # a row that is not finite has no place for u; the recording names the state that is to blame
    return chosen.clamp(max=p.shape[-1] - 1).tolist()


@torch.inference_mode()
def continue_prompts(
    adapter: Adapter,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    sampling: Sampling,
    generators: Sequence[torch.Generator],
    report: Callable[[int], None] = lambda finished: None,
) -> list[list[int]]:
    """Continue a batch of prompts (token ids) until a stop token, which is kept, or ``max_new_tokens``.

    Left-padded, positions counted from each sequence's first real token. ``report(finished)`` is called as sequences
    end.
    """
    device, stop = adapter.device, set(stop_ids)
    longest = max(map(len, prompts))
    tokens = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros(len(prompts), longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    tokens, mask = tokens.to(device), mask.to(device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = adapter.new_cache()
    answers: list[list[int]] = [[] for _ in prompts]
    active = list(range(len(prompts)))
    ended = [False] * len(prompts)
    for step in range(max_new_tokens):
        hidden = adapter.hidden(tokens, cache=cache, attention_mask=mask, positions=positions)[:, -1]
        chosen = choose(adapter.logits(hidden), sampling, [generators[i] for i in active])
        for row, token in zip(active, chosen, strict=True):
            if not ended[row]:
                answers[row].append(token)
                ended[row] = token in stop
        if step == max_new_tokens - 1 or all(ended):
            break
        if sum(not ended[row] for row in active) <= _COMPACT_BELOW * len(active):
            keep = [place for place, row in enumerate(active) if not ended[row]]
            index = torch.tensor(keep, device=device)
            cache.batch_select_indices(index)
            mask, positions = mask[index], positions[index]
            active, chosen = [active[k] for k in keep], [chosen[k] for k in keep]
            report(len(prompts) - len(active))
        tokens = torch.tensor(chosen, device=device)[:, None]
        mask = torch.cat([mask, mask.new_ones(len(active), 1)], 1)
        positions = positions[:, -1:] + 1
    report(len(prompts))
    return answers
