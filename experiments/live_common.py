"""What the exactness experiments share: live runs on tiny random targets and on a real one, their texts recorded and replayed.

Given a text, replay says how many rounds, and how many that passed each depth, are to be expected, and how much they vary; z
is the difference of the live counts from that, in standard deviations, summed over many texts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pandas as pd

from driftlab import (
    VARIANTS,
    Drafter,
    ProgressBar,
    Sampling,
    Target,
    Trajectory,
    accept,
    all_starts,
    load_prompts,
    simulate,
    speculate,
)
from driftlab.prompts import encode

#: target, drafts, K, of the tiny targets
SETTINGS = (
    (Sampling(1.0), Sampling(1.0), 3),
    (Sampling(0.7), Sampling(1.3), 4),
    (Sampling(0.8, top_k=5), Sampling(1.0, top_k=4), 2),
    (Sampling(1.2, top_p=0.9), Sampling(0.9, top_p=0.8), 5),
)


class _Letters:
    """A tokenizer for random targets: one token a character."""

    chat_template, bos_token_id, eos_token_id = None, 1, 2

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [1, *(3 + ord(character) % 13 for character in text)]}

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def tiny_pair(index: int) -> tuple[Target, Drafter]:
    """A random target of 16 tokens and a random drafter of 14 of them, alike on every machine."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(index)
    shape = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = LlamaConfig(**shape, num_attention_heads=2, num_key_value_heads=1, bos_token_id=1, eos_token_id=2)
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    target = Target(model, _Letters(), name=f"tiny {index}", aux_layers=(0, 1, 2))
    drafter = Drafter(
        VARIANTS[list(VARIANTS)[index % 4]].for_target(target, draft_vocab_size=14), target, draft_vocab=range(14)
    )
    with torch.no_grad():
        for parameter in (*model.parameters(), *drafter.parameters()):
            parameter.mul_(12) if parameter.ndim > 1 else parameter.uniform_(0.5, 2)
    return target, drafter.eval()


def tiny(
    index: int, rule: str, rounds: int, seed: int, folder: Path, report: Callable[[int, int], None]
) -> pd.DataFrame:
    """At least ``rounds`` live rounds of a setting and rule on a tiny random target, against replay; dice from ``seed`` on."""
    sampling, drafting, depth = SETTINGS[index]
    target, drafter = tiny_pair(index)
    done, frames = 0, []
    while done < rounds:
        texts = [(letters, seed + i) for i, letters in enumerate(["hello", "abc", "question", "zebra"] * 25)]
        seed += len(texts)
        frame = sampled(
            f"tiny {index}, {rule}: T {sampling.temperature:g}, top_k {sampling.top_k}, top_p {sampling.top_p:g}; drafts T "
            f"{drafting.temperature:g}, top_k {drafting.top_k}, top_p {drafting.top_p:g}; K {depth}",
            *(target, drafter, texts, sampling, drafting, rule, depth, 24, folder / f"{seed:06d}", None),
        )
        frames.append(frame)
        done += int(frame["live"].iloc[0])
        report(min(done, rounds), rounds)
    whole = pd.concat(frames).groupby(["run", "quantity"], sort=False)[["live", "expected", "variance"]].sum()
    return with_z(whole.reset_index())


def sampled(
    who: str,
    target: Target,
    drafter: Drafter,
    texts: list[tuple[Any, int]],
    sampling: Sampling,
    drafting: Sampling,
    rule: str,
    depth: int,
    limit: int,
    folder: Path,
    bar: ProgressBar | None,
) -> pd.DataFrame:
    """Run (prompt, seed) live, record the texts that came out, replay them; return live and expected counts with z."""
    template = target.tokenizer.chat_template is not None
    loaded = load_prompts([p for p, _ in texts])
    options = {"draft_temperature": drafting.temperature, "draft_top_k": drafting.top_k, "draft_top_p": drafting.top_p}
    lives = []
    for number, (prompt, (_, seed)) in enumerate(zip(loaded, texts, strict=True), 1):
        ids = encode(prompt, target.tokenizer, template=template)
        seeded = dataclasses.replace(sampling, seed=seed)
        lives.append(
            speculate(
                target,
                drafter,
                ids,
                depth=depth,
                max_new_tokens=limit,
                sampling=seeded,
                rule=rule,
                **options,
            )
        )
        if bar is not None:
            bar(f"live, sampled, {folder.name}", number, len(texts))
    trajectory: Trajectory = target.record(
        loaded,
        answers=[live.tokens for live in lives],
        own_answers=True,
        max_new_tokens=limit,
        template=template,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        out=folder,
        piece_size=len(loaded),
    )
    draft = all_starts(
        drafter,
        trajectory,
        depth,
        temperatures=(drafting.temperature,),
        top=max(1, drafting.top_k) if drafting.top_p == 1 else 512,
    )
    expected = simulate(accept(draft, trajectory, rule=rule, **options))
    whole = [[r for r in live.rounds if r.end != "cut"] for live in lives]
    live = [sum(map(len, whole)), sum(r.emitted for rounds in whole for r in rounds)]
    live += [sum(r.accepted >= k for run in lives for r in run.rounds) for k in range(1, depth + 1)]
    return with_z(
        pd.DataFrame(
            {
                "run": who,
                "quantity": ["rounds", "emitted", *(f"passed_{k}" for k in range(1, depth + 1))],
                "live": live,
                "expected": expected.means[:, : 2 + depth].sum(0),
                "variance": expected.variances[:, : 2 + depth].sum(0),
            }
        )
    )


def with_z(rows: pd.DataFrame) -> pd.DataFrame:
    """Add the difference in standard deviations: missing for a count that cannot vary, infinite if it did."""
    gap, spread = rows["live"] - rows["expected"], np.sqrt(rows["variance"])
    certain = np.where(gap.abs() < 1e-6, np.nan, np.inf)
    return rows.assign(z=np.where(spread > 1e-6, gap / spread.where(spread > 1e-6, 1), certain))


def worst_z(counts: pd.DataFrame) -> tuple[float, float]:
    """Largest |z|, and the bound: three standard deviations, corrected for the number of z's."""
    tests = int(counts["z"].notna().sum())
    tail = 1 - NormalDist().cdf(3)
    return float(counts["z"].abs().max()), NormalDist().inv_cdf(1 - tail / tests)
