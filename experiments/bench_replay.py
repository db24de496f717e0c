"""How much faster is replay than the live loop, for one more variant on text that is recorded already?

    python experiments/bench_replay.py [--prompts 8] [--depth 8]

Both are timed in one run on the same prompts, drafter and device (named in the table), after their accept lengths were
found equal. Replay is timed including reading the recording. The ratio is what a researcher saves per further variant;
recording itself is paid once and is in the table too.
"""

from __future__ import annotations

import platform
import tempfile
import time
from pathlib import Path

import tyro

from driftlab import ProgressBar, Target, accept, all_starts, load_prompts, simulate, speculate
from driftlab.demo import DemoConfig, record_all, train_all
from driftlab.files import atomic
from driftlab.prompts import evenly


def main(prompts: int = 8, depth: int = 8, max_new_tokens: int = 64, out: Path = Path("runs/bench_replay.csv")) -> None:
    """Time recording, replay and live; check that replay and live agree; print and write one table."""
    import pandas as pd

    bar = ProgressBar()
    target, config = Target.load("smollm2", progress=bar), DemoConfig()
    _, lessons = record_all(target, config, bar)
    drafter = train_all(lessons, config, "cpu", bar)["eagle31"]
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        trajectory = target.record(
            evenly(load_prompts("default"), prompts), max_new_tokens=max_new_tokens, out=Path(folder) / "recording"
        )
        recorded = time.perf_counter() - began
        began = time.perf_counter()
        simulation = simulate(accept(all_starts(drafter, trajectory, depth), trajectory))
        replayed = time.perf_counter() - began
        began, equal = time.perf_counter(), 0
        for index, entry in enumerate(trajectory.entries):
            prompt = trajectory.tokens(index)[: entry.prompt_length].tolist()
            live = speculate(target, drafter, prompt, depth=depth, max_new_tokens=max_new_tokens)
            equal += live.rounds == simulation.rounds[index]
            bar("live", index + 1, len(trajectory))
        lived = time.perf_counter() - began
    if equal < prompts:
        raise SystemExit(f"replay and live agree on {equal} of {prompts} prompts only: no timing is reported")
    table = pd.DataFrame(
        [
            {"what": what, "seconds": s, "prompts": prompts, "K": depth, "device": f"CPU, {platform.machine()}"}
            for what, s in (
                ("record, once", recorded),
                ("replay of one variant", replayed),
                ("live loop of one variant", lived),
            )
        ]
    )
    with atomic(out) as temporary:
        table.to_csv(temporary, index=False)
    print(table.to_string(index=False, float_format=lambda x: f"{x:.2f}"))
    print(f"live / replay: {lived / replayed:.1f}x on {prompts} prompts, accept lengths equal on all")


if __name__ == "__main__":
    tyro.cli(main)
