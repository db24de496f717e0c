"""How much faster is replay than the live loop, for one more variant on text that is recorded already?

    python experiments/bench_replay.py [--prompts 80] [--live 10] [--depth 8] [--drafter FOLDER]

SmolLM2-135M-Instruct answers the project's 80 prompts greedily; that is recorded once and kept in the cache. Replay runs on
all of them, reading the recording included, three times: before, between and after the live runs. The live loop takes too
long for that and runs on some of them, spread over the list; on these, text and accept lengths of live and replay must be
equal list for list, or nothing is reported. The ratio is of seconds per answer token.

The better the drafter, the fewer rounds a live loop needs, so the ratio falls as tau rises: tau is in the row.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from bench_common import row, write

GOAL = 20.0


def main() -> None:
    """Record if need be, replay and run live in turns, compare, write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=80)
    parser.add_argument("--live", type=int, default=10, help="prompts that the live loop runs on")
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--drafter", default="smollm2-eagle31", help="a shipped drafter's name, or a folder")
    parser.add_argument("--out", type=Path, default=Path("runs/bench_replay.csv"))
    options = parser.parse_args()
    import torch

    from driftlab import Drafter, ProgressBar, Target, load_prompts, speculate
    from driftlab.prompts import evenly

    bar = ProgressBar()
    target = Target.load("smollm2", progress=bar)
    chosen, before = evenly(load_prompts("default"), options.prompts), time.time()
    began = time.perf_counter()
    trajectory = target.record(chosen, max_new_tokens=options.max_new_tokens, progress=bar)
    recorded = time.perf_counter() - began
    made_now = (trajectory.path / "trajectory.json").stat().st_mtime >= before
    drafter, what = Drafter.load(options.drafter, trajectory).eval(), f"drafter {Path(options.drafter).name}"

    indices = [i * len(trajectory) // options.live for i in range(options.live)]
    seconds, simulation = replay(drafter, trajectory.path, options.depth)
    replays, lives, unequal = [seconds], [], []
    for number, index in enumerate(indices):
        text = trajectory.tokens(index).tolist()
        prompt = text[: trajectory.entries[index].prompt_length]
        began = time.perf_counter()
        live = speculate(target, drafter, prompt, depth=options.depth, max_new_tokens=options.max_new_tokens)
        lives.append(time.perf_counter() - began)
        if tuple(live.rounds) != tuple(simulation.rounds[index]) or list(live.tokens) != text[len(prompt) :]:
            unequal.append(trajectory.entries[index].id)
        bar("live", number + 1, len(indices))
        if number == len(indices) // 2:
            replays.append(replay(drafter, trajectory.path, options.depth)[0])
    replays.append(replay(drafter, trajectory.path, options.depth)[0])
    if unequal:
        raise SystemExit(f"replay and live disagree on {', '.join(unequal)}: no timing is reported")

    replayed, lived = statistics.median(replays), sum(lives)
    answered = sum(trajectory.entries[i].length - trajectory.entries[i].prompt_length for i in indices)
    ratio = (lived / answered) / (replayed / trajectory.answer_tokens)
    common = {"threads": torch.get_num_threads()}
    rounds = sum(len(simulation.rounds[i]) for i in indices)
    rows = [
        row(
            "replay",
            f"record {len(trajectory)} prompts, once",
            recorded if made_now else None,
            "s",
            note=f"{trajectory.spec.label}, {trajectory.answer_tokens} answer tokens"
            + ("" if made_now else "; taken from the cache"),
            **common,
        ),
        row("replay", f"replay of one variant, {len(trajectory)} prompts", replayed, "s", note=what, **common),
        row(
            "replay",
            f"live loop of one variant, {len(indices)} of them",
            lived,
            "s",
            note=f"{answered} answer tokens in {rounds} rounds",
            **common,
        ),
        row(
            "replay",
            "live time / replay time, per answer token",
            ratio,
            "",
            ratio=ratio,
            goal=f">= {GOAL:g}x",
            met=ratio >= GOAL,
            note=f"K = {options.depth}, tau {simulation.tau:.2f}; text and accept lengths equal list for list on "
            f"{len(indices)} of {len(indices)} prompts run live",
            **common,
        ),
    ]
    write(rows, options.out)


def replay(drafter: Any, path: Path, depth: int) -> tuple[float, Any]:
    """Replay the recording, opened anew; return the seconds and the simulation."""
    from driftlab import Trajectory, accept, all_starts, simulate

    began = time.perf_counter()
    trajectory = Trajectory.open(path)
    simulation = simulate(accept(all_starts(drafter, trajectory, depth), trajectory))
    return time.perf_counter() - began, simulation


if __name__ == "__main__":
    main()
