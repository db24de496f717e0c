"""The text that readings are measured on: answers of the target, with the states that any plausible reading takes."""

from __future__ import annotations

from typing import Any

from driftlab.doctor.factors import aux_candidates
from driftlab.drafter.config import DrafterConfig
from driftlab.progress import Progress, silent
from driftlab.prompts import Prompt, evenly, load_prompts
from driftlab.trajectory import Trajectory

PROMPTS = 80
ANSWER = 128
_LONGEST = 480
"""characters of a prompt: long ones cost time and tell no more"""


def states_wanted(config: DrafterConfig, num_layers: int) -> tuple[int, ...]:
    """Return the target states that a drafter's readings take, ascending; of an MTP head the last one will do."""
    lists = aux_candidates(config.aux_layers, num_layers) if config.aux_layers else {}
    wanted = set(config.aux_layers).union(*lists.values())
    return tuple(sorted(k for k in wanted if 0 <= k <= num_layers)) or (num_layers,)


def short_prompts(prompts: Any = "default", count: int = PROMPTS) -> list[Prompt]:
    """Return ``count`` prompts that are not long, spread over the categories."""
    every = load_prompts(prompts)
    short = [p for p in every if sum(len(m.content) for m in p.messages) <= _LONGEST]
    return evenly(short or every, count)


def record_for(
    target: Any,
    config: DrafterConfig,
    prompts: Any = "default",
    *,
    count: int = PROMPTS,
    answer: int = ANSWER,
    progress: Progress = silent,
) -> Trajectory:
    """Let the target answer some prompts and keep what readings of a drafter need; the same call finds it again.

    Args:
        target: a Target; its ``aux_layers`` are as before afterwards.
        config: of the drafter, as declared.
        prompts: anything :func:`driftlab.prompts.load_prompts` reads.
        count: how many of them.
        answer: tokens of an answer.
        progress: see :meth:`driftlab.target.Target.record`.
    """
    before = target.aux_layers
    target.aux_layers = states_wanted(config, target.spec.num_layers)
    try:
        return target.record(short_prompts(prompts, count), max_new_tokens=answer, progress=progress)
    finally:
        target.aux_layers = before
