"""Is replay what a live engine does? Greedy: list for list. Sampled: within the dice, on the live run's own text.

    python experiments/replay_equals_live.py [--prompts 12] [--depth 8] [--max-new-tokens 64] [--rounds 20000]

Greedy, SmolLM2-135M-Instruct, the demo's four drafters (trained if need be): per (prompt, drafter) the live text is that of
plain decoding, and the list of rounds (row, accepted, emitted, how it ended) is that of replay.

Sampled: target and drafts are sampled, the live loop accepts with probability min(1, p / q), and its own texts are recorded
and replayed. Given a text, replay says how many rounds, and how many that passed each depth, are to be expected, and how
much they vary; z is the difference of the live counts from that, in standard deviations, summed over many texts. ``rounds``
live rounds on tiny random targets in four settings, and a smaller run on SmolLM2. The bound is three standard deviations,
corrected for the number of z's.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pandas as pd
import tyro

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
from driftlab.demo import DemoConfig, record_all, train_all
from driftlab.files import atomic
from driftlab.prompts import evenly
from driftlab.workers import run_jobs

#: target, drafts, K, of the tiny targets
SETTINGS = (
    (Sampling(1.0), Sampling(1.0), 3),
    (Sampling(0.7), Sampling(1.3), 4),
    (Sampling(0.8, top_k=5), Sampling(1.0, top_k=4), 2),
    (Sampling(1.2, top_p=0.9), Sampling(0.9, top_p=0.8), 5),
)


def main(
    prompts: int = 12,
    depth: int = 8,
    max_new_tokens: int = 64,
    rounds: int = 20000,
    out: Path = Path("runs/replay_equals_live"),
) -> None:
    """Compare, print one line a drafter and setting, write the rows; the last line is the verdict."""
    bar = ProgressBar()
    target = Target.load("smollm2", progress=bar)
    chosen = evenly(load_prompts("default"), prompts)
    _, lessons = record_all(target, DemoConfig(), bar)
    drafters = train_all(lessons, DemoConfig(), "cpu", bar)
    greedy = _greedy(target, drafters, chosen, depth, max_new_tokens, bar)
    with atomic(out / "greedy.csv") as temporary:
        greedy.to_csv(temporary, index=False)

    jobs = [(index, rounds // len(SETTINGS), out / f"tiny-{index}") for index in range(len(SETTINGS))]
    parts = run_jobs(_tiny, jobs, what="sampled, tiny targets", progress=bar)
    for name, sampling, drafting in (
        ("eagle3", Sampling(1.0), Sampling(1.0)),
        ("eagle31", Sampling(0.8, top_p=0.95), Sampling(1.0)),
    ):
        texts = [(p, seed) for seed, p in enumerate(chosen)]
        who = f"{name}, T {sampling.temperature:g}, top_p {sampling.top_p:g}, drafts at T {drafting.temperature:g}"
        parts.append(
            _sampled(who, target, drafters[name], texts, sampling, drafting, 4, max_new_tokens, out / name, bar)
        )
    sampled = pd.concat(parts)
    with atomic(out / "sampled.csv") as temporary:
        sampled.to_csv(temporary, index=False)
    for who, rows in sampled.groupby("run", sort=False):
        z = rows["z"].abs().max()
        print(f"{who}: {int(rows['live'].iloc[0])} rounds, {rows['expected'].iloc[0]:.1f} expected, max |z| = {z:.2f}")

    same = int((greedy["text_equal"] & greedy["rounds_equal"]).sum())
    worst, tests = float(sampled["z"].abs().max()), len(sampled)
    bound = NormalDist().inv_cdf(NormalDist().cdf(3) + (1 - NormalDist().cdf(3)) * (1 - 1 / tests))
    total = int(sampled[sampled["quantity"] == "rounds"]["live"].sum())
    print(
        f"greedy: {same}/{len(greedy)} prompts equal list for list; sampled: max |z| = {worst:.2f} over {total} rounds, "
        f"bound {bound:.2f} ({tests} tests)"
    )
    if same < len(greedy) or not worst < bound:
        raise SystemExit(1)


def _greedy(
    target: Target, drafters: dict[str, Drafter], prompts: list[Any], depth: int, max_new_tokens: int, bar: ProgressBar
) -> pd.DataFrame:
    trajectory = target.record(prompts, max_new_tokens=max_new_tokens, progress=bar)
    rows = []
    for name, drafter in drafters.items():
        began = time.perf_counter()
        simulation = simulate(accept(all_starts(drafter, trajectory, depth), trajectory))
        replayed = time.perf_counter() - began
        began = time.perf_counter()
        for index, entry in enumerate(trajectory.entries):
            tokens = trajectory.tokens(index).tolist()
            prompt, answer = tokens[: entry.prompt_length], tokens[entry.prompt_length :]
            live = speculate(target, drafter, prompt, depth=depth, max_new_tokens=max_new_tokens)
            rows.append(
                {
                    "drafter": name,
                    "prompt": entry.id,
                    "rounds": len(live.rounds),
                    "text_equal": list(live.tokens) == answer,
                    "rounds_equal": live.rounds == simulation.rounds[index],
                    "accepted_live": " ".join(str(r.accepted) for r in live.rounds),
                }
            )
            bar(f"live {name}", index + 1, len(trajectory))
        lived = time.perf_counter() - began
        mine = [row for row in rows if row["drafter"] == name]
        print(
            f"{name}: K = {depth}, tau {simulation.tau:.4f}, {sum(r['rounds'] for r in mine)} rounds, texts equal "
            f"{sum(r['text_equal'] for r in mine)}/{len(mine)}, rounds equal {sum(r['rounds_equal'] for r in mine)}/"
            f"{len(mine)}; replay {replayed:.2f} s, live {lived:.1f} s"
        )
    return pd.DataFrame(rows)


class _Letters:
    """A tokenizer for random targets: one token a character."""

    chat_template, bos_token_id, eos_token_id = None, 1, 2

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [1, *(3 + ord(character) % 13 for character in text)]}

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def _tiny(index: int, rounds: int, folder: Path, report: Callable[[int, int], None]) -> pd.DataFrame:
    """One setting on a random target of 16 tokens, with a random drafter of 14."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sampling, drafting, depth = SETTINGS[index]
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
    done, frames, seed = 0, [], 0
    while done < rounds:
        texts = [(letters, seed + i) for i, letters in enumerate(["hello", "abc", "question", "zebra"] * 25)]
        seed += len(texts)
        frame = _sampled(
            f"tiny {index}: T {sampling.temperature:g}, top_k {sampling.top_k}, top_p {sampling.top_p:g}; drafts T "
            f"{drafting.temperature:g}, top_k {drafting.top_k}, top_p {drafting.top_p:g}; K {depth}",
            *(target, drafter.eval(), texts, sampling, drafting, depth, 24, folder / f"{seed:06d}", None),
        )
        frames.append(frame)
        done += int(frame["live"].iloc[0])
        report(min(done, rounds), rounds)
    whole = pd.concat(frames).groupby(["run", "quantity"], sort=False)[["live", "expected", "variance"]].sum()
    return _with_z(whole.reset_index())


def _sampled(
    who: str,
    target: Target,
    drafter: Drafter,
    texts: list[tuple[Any, int]],
    sampling: Sampling,
    drafting: Sampling,
    depth: int,
    limit: int,
    folder: Path,
    bar: ProgressBar | None,
) -> pd.DataFrame:
    """Run (prompt, seed) live, record the texts that came out, replay them; return live and expected counts with z."""
    template = target.tokenizer.chat_template is not None
    loaded = load_prompts([p for p, _ in texts])
    from driftlab.prompts import encode

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
                rule="rejection",
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
    expected = simulate(accept(draft, trajectory, rule="rejection", **options))
    whole = [[r for r in live.rounds if r.end != "cut"] for live in lives]
    live = [sum(map(len, whole)), sum(r.emitted for rounds in whole for r in rounds)]
    live += [sum(r.accepted >= k for rounds in whole for r in rounds) for k in range(1, depth + 1)]
    return _with_z(
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


def _with_z(rows: pd.DataFrame) -> pd.DataFrame:
    return rows.assign(z=(rows["live"] - rows["expected"]) / np.sqrt(rows["variance"]))


if __name__ == "__main__":
    tyro.cli(main)
