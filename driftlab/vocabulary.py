"""The draft vocabulary: which of the target's tokens a drafter may propose, and how much of a text they cover."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from driftlab.errors import DriftlabError
from driftlab.trajectory import Trajectory


def choose_draft_vocab(trajectory: Trajectory, size: int) -> list[int]:
    """Return ``size`` target ids, ascending: the most frequent answer tokens, EOS always, then the rest by frequency in
    the prompts and by id (in a BPE vocabulary low ids are the common pieces).
    """
    spec = trajectory.spec
    if not 0 < size <= spec.vocab_size:
        raise DriftlabError(f"draft vocabulary of {size}: the target has {spec.vocab_size} tokens")
    answers, prompts = torch.zeros(spec.vocab_size), torch.zeros(spec.vocab_size)
    for index, entry in enumerate(trajectory.entries):
        tokens = trajectory.tokens(index)
        answers += torch.bincount(tokens[entry.prompt_length :], minlength=spec.vocab_size)
        prompts += torch.bincount(tokens[: entry.prompt_length], minlength=spec.vocab_size)
    keys = [
        (token not in spec.eos_ids, -a, -p, token)
        for token, (a, p) in enumerate(zip(answers.tolist(), prompts.tolist(), strict=True))
    ]
    return sorted(key[-1] for key in sorted(keys)[:size])


def coverage(draft_vocab: Sequence[int] | Tensor, trajectory: Trajectory) -> float:
    """Return the share of the answers' tokens that the draft vocabulary holds: no drafter can accept more."""
    inside = torch.zeros(trajectory.spec.vocab_size, dtype=torch.bool)
    inside[torch.as_tensor(draft_vocab).cpu()] = True
    hits = total = 0
    for index, entry in enumerate(trajectory.entries):
        answer = trajectory.tokens(index)[entry.prompt_length :]
        hits, total = hits + int(inside[answer].sum()), total + len(answer)
    return hits / total if total else float("nan")
