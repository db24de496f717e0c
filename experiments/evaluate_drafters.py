"""Measure the shipped drafters: tau and text-fed match by depth, on held-out text and on prompts of other kinds.

    python experiments/evaluate_drafters.py [--held-out runs/drafters/text] [--prompts spec_bench.jsonl] [--per-category 30]

``--held-out``: the recording that they were trained on (experiments/train_drafters.py writes it); the conversations that
training never saw, and that no checkpoint was chosen by, are measured. ``--prompts``: any file of the MT-Bench / Spec-Bench
shape, with categories. Without either, the project's own prompts. K = 8, greedy, walk; 95 % intervals over prompts, and
paired differences from eagle3 with p-values adjusted (Holm) for the five comparisons of a set, and the smallest difference that
the set's prompts can show. Written as CSV; recordings are cached.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import tyro

from driftlab import (
    SHIPPED,
    Drafter,
    ProgressBar,
    Target,
    Trajectory,
    accept,
    all_starts,
    compare,
    load_prompts,
    simulate,
)
from driftlab.files import atomic
from driftlab.prompts import encode
from driftlab.training import split
from driftlab.vocabulary import coverage
from driftlab.workers import run_jobs

DEPTHS = (1, 2, 4, 8, 16)
MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}


def main(
    held_out: Path | None = None,
    share: float = 0.05,
    skip: int = 24,
    prompts: str = "default",
    per_category: int = 30,
    max_new_tokens: int = 128,
    longest: int = 1024,
    depth: int = 8,
    out: Path = Path("runs/evaluation"),
) -> None:
    """Record, replay, write tau.csv (a row per drafter and set) and match.csv (by depth), print them.

    Args:
        held_out: recording of the training text.
        share: that training held out.
        skip: held-out conversations that checkpoints were compared on.
        prompts: file of prompts, or "default".
        per_category: at most so many of each category (the eight of MT-Bench count as one).
        max_new_tokens: of an answer.
        longest: leave out prompts of more tokens.
        depth: K.
        out: folder of the tables.
    """
    bar = ProgressBar()
    target = Target.load("smollm2", progress=bar)
    sets: list[tuple[str, Path, list[int]]] = []
    if held_out is not None:
        text = Trajectory.open(held_out)
        names = {entry.id for entry in split(text, share)[1].entries[skip:]}
        sets.append(("held-out", held_out, [i for i, entry in enumerate(text.entries) if entry.id in names]))
    chosen: dict[str, list] = {}
    for prompt in load_prompts(prompts):
        kind = "mt_bench" if prompt.category in MT_BENCH else prompt.category or "prompts"
        tokens = len(encode(prompt, target.tokenizer))
        if tokens <= longest and len(chosen.setdefault(kind, [])) < (80 if kind == "mt_bench" else per_category):
            chosen[kind].append(prompt)
    for kind, some in chosen.items():
        recording = target.record(some, max_new_tokens=max_new_tokens, progress=bar)
        sets.append((kind, recording.path, list(range(len(recording)))))
    jobs = [(name, path, places, drafter, depth) for name, path, places in sets for drafter in SHIPPED]
    results = run_jobs(_measure, jobs, what="replay", progress=bar)
    tests = {}
    for name, _, _ in sets:
        mine = {job[3]: result[0] for job, result in zip(jobs, results, strict=True) if job[0] == name}
        tests[name] = compare(mine, "smollm2-eagle3").set_index("name")
    rows, curves = [], []
    for (name, _, places, drafter, _), (simulation, match, held) in zip(jobs, results, strict=True):
        tau = simulation.tau_interval()
        gap = tests[name].loc[drafter] if drafter in tests[name].index else {}
        rows.append(
            {
                **{
                    "set": name,
                    "drafter": drafter,
                    "prompts": len(places),
                    "rounds": int(simulation.verify_rounds.sum()),
                },
                **{"tau": tau.value, "low": tau.low, "high": tau.high, "tau_uncensored": simulation.tau_uncensored},
                **{"minus_eagle3": gap.get("difference"), "minus_low": gap.get("low"), "minus_high": gap.get("high")},
                **{"p_adjusted": gap.get("p_adjusted"), "mdd": gap.get("mdd"), "coverage": held},
            }
        )
        curves += [
            {"set": name, "drafter": drafter, "depth": k, "match": match[k - 1]} for k in range(1, len(match) + 1)
        ]
    for name, table in (("tau", pd.DataFrame(rows)), ("match", pd.DataFrame(curves))):
        with atomic(out / f"{name}.csv") as temporary:
            table.to_csv(temporary, index=False, float_format="%.4f")
    print(pd.DataFrame(rows).to_string(index=False, float_format=lambda x: f"{x:.3f}"))
    wide = (
        pd.DataFrame(curves)
        .query(f"depth in {DEPTHS}")
        .pivot(index=["set", "drafter"], columns="depth", values="match")
    )
    print(wide.to_string(float_format=lambda x: f"{x:.3f}"))


def _measure(
    name: str, path: Path, places: list[int], drafter: str, depth: int, report: Callable[[int, int], None]
) -> tuple:
    data = Trajectory.open(path).subset(places)
    loaded = Drafter.load(drafter, data).eval()
    draft = all_starts(loaded, data, max(DEPTHS))
    deep = accept(draft, data)
    match = (deep.match.sum((0, 1)) / deep.valid.sum((0, 1))).tolist()
    report(1, 1)
    return simulate(accept(draft.upto(depth), data)), match, coverage(loaded.draft_vocab, data)


if __name__ == "__main__":
    tyro.cli(main)
