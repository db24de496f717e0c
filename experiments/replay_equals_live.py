"""Is replay what a live engine does? Greedy: list for list. Sampled: within the dice, on the live run's own text.

    python experiments/replay_equals_live.py [--prompts 12] [--depth 8] [--max-new-tokens 64] [--rounds 20000] [--seed 0]

Greedy, SmolLM2-135M-Instruct, the four shipped drafters of TTT 4: per (prompt, drafter) the live text is that of plain
decoding, and the list of rounds (row, accepted, emitted, how it ended) is that of replay.

Sampled: target and drafts are sampled, the live loop accepts with probability min(1, p / q), and its own texts are recorded
and replayed. Given a text, replay says how many rounds, and how many that passed each depth, are to be expected, and how
much they vary; z is the difference of the live counts from that, in standard deviations, summed over many texts. ``rounds``
live rounds on tiny random targets in four settings, and a smaller run on SmolLM2. The bound is three standard deviations,
corrected for the number of z's.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pandas as pd
import tyro
from live_common import SETTINGS, sampled, tiny, worst_z

from driftlab import (
    Drafter,
    ProgressBar,
    Sampling,
    Target,
    accept,
    all_starts,
    first_divergence,
    load_prompts,
    simulate,
    speculate,
)
from driftlab.files import atomic
from driftlab.prompts import evenly
from driftlab.workers import run_jobs

DRAFTERS = ("smollm2-eagle3", "smollm2-fc_norm", "smollm2-norm_output", "smollm2-eagle31")


def main(
    prompts: int = 12,
    depth: int = 8,
    max_new_tokens: int = 64,
    rounds: int = 20000,
    seed: int = 0,
    out: Path = Path("runs/replay_equals_live"),
) -> None:
    """Compare, print one line a drafter and setting, write the rows; the last line is the verdict."""
    bar = ProgressBar()
    target = Target.load("smollm2", progress=bar)
    chosen = evenly(load_prompts("default"), prompts)
    greedy = _greedy(target, chosen, depth, max_new_tokens, bar)
    with atomic(out / "greedy.csv") as temporary:
        greedy.to_csv(temporary, index=False)

    jobs = [
        (index, "rejection", rounds // len(SETTINGS), seed, out / f"tiny-{index}") for index in range(len(SETTINGS))
    ]
    parts = run_jobs(tiny, jobs, what="sampled, tiny targets", progress=bar)
    for name, sampling, drafting in (
        ("smollm2-eagle3", Sampling(1.0), Sampling(1.0)),
        ("smollm2-eagle31", Sampling(0.8, top_p=0.95), Sampling(1.0)),
    ):
        drafter = Drafter.load(name, target).eval()
        texts = [(p, seed) for seed, p in enumerate(chosen)]
        who = f"{name}, T {sampling.temperature:g}, top_p {sampling.top_p:g}, drafts at T {drafting.temperature:g}"
        parts.append(
            sampled(who, target, drafter, texts, sampling, drafting, "rejection", 4, max_new_tokens, out / name, bar)
        )
    counts = pd.concat(parts)
    with atomic(out / "sampled.csv") as temporary:
        counts.to_csv(temporary, index=False)
    for who, rows in counts.groupby("run", sort=False):
        z = rows["z"].abs().max()
        print(f"{who}: {int(rows['live'].iloc[0])} rounds, {rows['expected'].iloc[0]:.1f} expected, max |z| = {z:.2f}")

    same = int((greedy["text_equal"] & greedy["rounds_equal"]).sum())
    worst, bound = worst_z(counts)
    total, tests = int(counts[counts["quantity"] == "rounds"]["live"].sum()), len(counts)
    print(
        f"greedy: {same}/{len(greedy)} prompts equal list for list; sampled: max |z| = {worst:.2f} over {total} rounds, "
        f"bound {bound:.2f} ({tests} tests)"
    )
    if same < len(greedy) or not worst < bound:
        raise SystemExit(1)


def _greedy(target: Target, prompts: list[Any], depth: int, max_new_tokens: int, bar: ProgressBar) -> pd.DataFrame:
    trajectory = target.record(prompts, max_new_tokens=max_new_tokens, progress=bar)
    rows = []
    for name in DRAFTERS:
        drafter = Drafter.load(name, trajectory).eval()
        began = time.perf_counter()
        simulation = simulate(accept(all_starts(drafter, trajectory, depth), trajectory))
        replayed = time.perf_counter() - began
        began = time.perf_counter()
        for index, entry in enumerate(trajectory.entries):
            tokens = trajectory.tokens(index).tolist()
            prompt, answer = tokens[: entry.prompt_length], tokens[entry.prompt_length :]
            live = speculate(
                target, drafter, prompt, depth=depth, max_new_tokens=max_new_tokens, sinks=trajectory.sinks
            )
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
            if told := first_divergence(target, [*prompt, *live.tokens], tokens):
                print(f"{name}, prompt {entry.id!r}: {told.words}")
            bar(f"live {name}", index + 1, len(trajectory))
        lived = time.perf_counter() - began
        mine = [row for row in rows if row["drafter"] == name]
        print(
            f"{name}: K = {depth}, tau {simulation.tau:.4f}, {sum(r['rounds'] for r in mine)} rounds, texts equal "
            f"{sum(r['text_equal'] for r in mine)}/{len(mine)}, rounds equal {sum(r['rounds_equal'] for r in mine)}/"
            f"{len(mine)}; replay {replayed:.2f} s, live {lived:.1f} s"
        )
    return pd.DataFrame(rows)


if __name__ == "__main__":
    tyro.cli(main)
