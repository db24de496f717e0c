"""Is replay what a live engine does? Real model, greedy: text and accept lengths, list for list.

    python experiments/replay_equals_live.py [--prompts 12] [--depth 8] [--max-new-tokens 64]

Records SmolLM2-135M-Instruct on the project's prompts, replays the demo's four drafters, and runs every prompt live with
every drafter. Two claims are counted per (prompt, drafter): the live text is the text of plain decoding, and the list of
rounds (row, accepted, emitted, how it ended) is the same. The drafters are those of the demo, trained if need be.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import tyro

from driftlab import ProgressBar, Target, accept, all_starts, load_prompts, simulate, speculate
from driftlab.demo import DemoConfig, record_all, train_all
from driftlab.files import atomic
from driftlab.prompts import evenly


def main(
    prompts: int = 12,
    depth: int = 8,
    max_new_tokens: int = 64,
    out: Path = Path("runs/replay_equals_live.csv"),
) -> None:
    """Compare, print one line a drafter, write one row per prompt and drafter; the last line is the verdict."""
    import pandas as pd

    bar = ProgressBar()
    target = Target.load("smollm2", progress=bar)
    config = DemoConfig()
    _, lessons = record_all(target, config, bar)
    drafters = train_all(lessons, config, "cpu", bar)
    chosen = evenly(load_prompts("default"), prompts)
    trajectory = target.record(chosen, max_new_tokens=max_new_tokens, progress=bar)
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
            same = live.rounds == simulation.rounds[index]
            rows.append(
                {
                    "variant": name,
                    "prompt": entry.id,
                    "rounds": len(live.rounds),
                    "text_equal": list(live.tokens) == answer,
                    "rounds_equal": same,
                    "accepted_live": " ".join(str(r.accepted) for r in live.rounds),
                }
            )
            bar(f"live {name}", index + 1, len(trajectory))
        lived = time.perf_counter() - began
        mine = [row for row in rows if row["variant"] == name]
        print(
            f"{name}: tau {simulation.tau:.4f}, {sum(r['rounds'] for r in mine)} rounds, texts equal "
            f"{sum(r['text_equal'] for r in mine)}/{len(mine)}, rounds equal {sum(r['rounds_equal'] for r in mine)}/"
            f"{len(mine)}; replay {replayed:.2f} s, live {lived:.1f} s"
        )
    with atomic(out) as temporary:
        pd.DataFrame(rows).to_csv(temporary, index=False)
    print(f"settings: {dataclasses.asdict(config.train) | {'depth': depth, 'target': target.spec.label}}")
    equal = sum(row["text_equal"] and row["rounds_equal"] for row in rows)
    print(f"greedy: {equal}/{len(rows)} prompts equal list for list")
    if equal < len(rows):
        raise SystemExit(1)


if __name__ == "__main__":
    tyro.cli(main)
