"""What do probes cost, in time and memory, on a long text?

    python experiments/bench_probes.py [--tokens 8192] [--answer 384] [--depth 4] [--repeats 3]

``all_starts(feed="own")`` over one sequence of random tokens and states, with a drafter of the size that fits
SmolLM2-135M and random weights: without a probe, with ``AttentionMass`` of masses alone, and with masses and entropy.
Each runs in a process of its own and they take turns. Peak memory is the resident peak of the process less that after
drafter, tables and states were built, so that the ratio is of what the run itself takes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench_common import Worker, in_turn, peak_mib, row, serve, write

MODES = {"none": "no probe", "mass": "AttentionMass, masses", "entropy": "AttentionMass, masses and entropy"}
TIME_GOALS = {"mass": 2.0, "entropy": 3.0}
MEMORY_GOAL = 1.2


def main() -> None:
    """Take turns and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--answer", type=int, default=384, help="starts: the last so many tokens")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/bench_probes.csv"))
    options = parser.parse_args()
    job = {"tokens": options.tokens, "answer": options.answer, "depth": options.depth}
    workers: list[Worker] = []
    try:
        for mode in MODES:
            workers.append(Worker(sys.executable, Path(__file__).resolve(), {"name": mode, **job}))
        answers = in_turn(workers, options.repeats)
    finally:
        for worker in workers:
            worker.close()
    seconds = {mode: statistics.median(r["seconds"] for r in answers[mode][1:]) for mode in MODES}
    memory = {mode: max(r["peak_mib"] - r["baseline_mib"] for r in answers[mode]) for mode in MODES}
    shape = f"T = {options.tokens}, {options.answer} starts, K = {options.depth}, own tokens fed, draft vocabulary 8192"
    rows = []
    for values, unit, what in ((seconds, "s", "time"), (memory, "MiB", "peak memory")):
        for mode, words in MODES.items():
            ratio = values[mode] / values["none"]
            goal = TIME_GOALS.get(mode) if unit == "s" else MEMORY_GOAL
            measured = mode != "none"
            rows.append(
                row(
                    "probes",
                    f"{what}, {words}",
                    values[mode],
                    unit,
                    ratio=ratio if measured else None,
                    goal=f"<= {goal:g}x" if measured else "",
                    met=ratio <= goal if measured else None,
                    note=f"{shape}{answers[mode][0]['how']}",
                    threads=answers[mode][0]["threads"],
                )
            )
    write(rows, options.out)


def build(job: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """Return the run of the job's mode."""
    import torch

    from driftlab import VARIANTS, Drafter, DrafterConfig, all_starts
    from driftlab.recorded import Batch, TargetHead

    generator = torch.Generator().manual_seed(0)
    width, vocab, tokens = 576, 49152, job["tokens"]

    def normal(*shape: int) -> torch.Tensor:
        return torch.empty(shape).normal_(0, 1, generator=generator)

    config = DrafterConfig(
        **{"hidden_size": width, "target_hidden_size": width, "aux_layers": (2, 15, 27), "intermediate_size": 1536},
        **{"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "vocab_size": vocab},
        **{"draft_vocab_size": 8192, "lm_head": "target", "rope_theta": 1e5, "rms_norm_eps": 1e-5},
        **{"fc_norm": VARIANTS["eagle31"].fc_norm, "norm_output": VARIANTS["eagle31"].norm_output},
    )
    table = normal(vocab, width)
    lent = SimpleNamespace(head=TargetHead(table, table, torch.ones(width)))
    drafter = Drafter(config, lent, draft_vocab=range(8192)).eval()
    batch = Batch(
        tokens=torch.randint(vocab, (1, tokens), generator=generator),
        aux=normal(1, tokens, 3, width),
        last_hidden=torch.zeros(1, tokens, width),
        lse=torch.zeros(1, tokens),
        lengths=torch.tensor([tokens]),
        prompt_lengths=torch.tensor([tokens - job["answer"]]),
        ids=("random",),
        finish=("length",),
        sinks=(0,),
    )
    probe, how = probe_of(job["name"])
    baseline = peak_mib()

    def run() -> dict[str, Any]:
        with probe(drafter) as watching:
            all_starts(drafter, batch, job["depth"], feed="own")
        if watching is not None:
            watching.frame()
        return {"baseline_mib": baseline, "how": how, "threads": torch.get_num_threads()}

    return run


def probe_of(mode: str) -> tuple[Callable[[Any], Any], str]:
    """Return what makes the probe of a mode, and what to say about it."""
    from driftlab import AttentionMass

    if mode == "none":
        return lambda drafter: nullcontext(), ""
    if mode == "entropy":
        return AttentionMass, "; AttentionMass as it is: segments, last 8 keys, SELF null, entropy"
    return lambda drafter: AttentionMass(drafter, entropy=False), "; AttentionMass(entropy=False)"


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        serve(build)
    else:
        main()
