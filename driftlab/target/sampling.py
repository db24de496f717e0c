"""Continue prompts with the target: batched, greedy or sampled, every sequence with a random stream of its own.

A sequence's text depends on its prompt, the seed and the settings, not on batch size or order: its stream is keyed by
the prompt's tokens (and by how often the same prompt came before), and finished sequences leave the batch.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from driftlab.sampling import Sampling, draw
from driftlab.target.adapter import Adapter
from driftlab.target.caches import select

_COMPACT_BELOW = 0.75


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
    u = torch.stack([torch.rand((), generator=g, dtype=torch.float64) for g in generators])
    # rows that are not finite: the recording names the state that is to blame
    return draw(sampling.process(logits).cpu(), u).tolist()


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
            select(cache, index)
            mask, positions = mask[index], positions[index]
            active, chosen = [active[k] for k in keep], [chosen[k] for k in keep]
            report(len(prompts) - len(active))
        tokens = torch.tensor(chosen, device=device)[:, None]
        mask = torch.cat([mask, mask.new_ones(len(active), 1)], 1)
        positions = positions[:, -1:] + 1
    report(len(prompts))
    return answers
