"""How fast is a training step, beside the PyPI package speculators 0.9.0 in the same run?

    python experiments/bench_training.py [--repeats 5] [--tokens 1024] [--ttt 4] [--venv runs/speculators-venv]

The drafter has the size that fits SmolLM2-135M: one layer, width 576, 9 heads, 3 key heads, intermediate 1,536,
vocabulary 49,152, draft vocabulary 8,192, three aux states; one sequence of 1,024 random tokens, every row a start.
A step is forward, backward, clip and fused AdamW on both sides, with frozen embedding and head. Both start from the same
weights and inputs and minimise KL to the same target logits over the draft vocabulary; the losses of the first step are
compared, and nothing is reported unless they are equal.

speculators is a library for GPUs: its usual attention is flex attention, compiled, and its usual loss is a Triton kernel.
What runs here is its own eager path on a CPU (attention "eager", loss implementation "eager"). It attends to the T keys of
every depth under a mask, as [T x k T] scores; driftlab gives each start its own k - 1 extra keys.

Peak memory is the resident peak of the process less that after the imports: tables, weights, moments and activations.
speculators gets a virtual environment of its own, made on first use: ``--venv``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench_common import Worker, cpu_name, in_turn, row, write

HERE = Path(__file__).resolve().parent
TORCH_FREE = (
    *("transformers==5.19.0", "datasets==5.1.0", "openai==3.57.0", "pydantic-settings==2.16.3", "loguru==0.7.3"),
    *("httpx==0.28.1", "rich==15.0.0"),
)
"""what importing speculators needs beside torch; its own cap on transformers is 5.19.0"""
ALONE = ("speculators==0.9.0", "hs-connectors==0.9.0")
"""installed without dependencies: torchvision and torchaudio are asked for but not imported"""
GOAL, HOPE = 4.0, 8.0
PRECISIONS = {"float32": "float32", "bfloat16": "bf16 autocast"}


def main() -> None:
    """Make the environment if need be, take turns, compare losses, write the rows."""
    options = parse()
    theirs = speculators_python(options.venv)
    sizes = {
        **{"hidden": 576, "heads": 9, "kv_heads": 3, "intermediate": 1536, "vocab": 49152},
        **{"draft_vocab": options.draft_vocab, "tokens": options.tokens, "ttt": options.ttt, "seed": 0},
    }
    exact, sampled = {"negatives": 0, "stride": 1}, {"negatives": 1024, "stride": 2}
    workers: list[Worker] = []
    try:
        for precision in PRECISIONS:
            for library, python, extra, kind in (
                ("driftlab", sys.executable, exact, "exact"),
                ("speculators", theirs, exact, "exact"),
                ("driftlab", sys.executable, sampled, "sampled"),
            ):
                job = {"name": f"{library} {kind} {precision}", "library": library, "precision": precision}
                workers.append(Worker(python, HERE / "bench_training_worker.py", {**job, **sizes, **extra}))
        answers = in_turn(workers, options.repeats)
    finally:
        for worker in workers:
            worker.close()
    for precision, tolerance in (("float32", 1e-4), ("bfloat16", 2e-2)):
        check_equal(answers, precision, tolerance)
    write(rows_of(answers, options), options.out)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--ttt", type=int, default=4)
    parser.add_argument("--draft-vocab", type=int, default=8192)
    parser.add_argument("--venv", type=Path, default=Path("runs/speculators-venv"))
    parser.add_argument("--out", type=Path, default=Path("runs/bench_training.csv"))
    return parser.parse_args()


def speculators_python(venv: Path) -> Path:
    """Return the interpreter that has speculators 0.9.0, after making its environment if it is not there."""
    python = venv.absolute() / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    done = venv / ".ready"
    if done.is_file() and done.read_text() == requirements():
        return python
    print(f"making {venv} for speculators 0.9.0", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    pin = venv / "torch.txt"
    pin.write_text(f"{torch_pin()}\n")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    constraints = HERE.parent / "constraints.txt"
    subprocess.run([*pip, "--constraint", str(constraints), torch_pin(), "numpy"], check=True)
    subprocess.run([*pip, "--constraint", str(pin), *TORCH_FREE], check=True)
    subprocess.run([*pip, "--no-deps", *ALONE], check=True)
    done.write_text(requirements())
    return python


def torch_pin() -> str:
    """The very build of torch that runs here, local label included: a CPU build is never replaced by one for GPUs."""
    return f"torch=={importlib.metadata.version('torch')}"


def requirements() -> str:
    """What the environment was made of."""
    return "\n".join((torch_pin(), *TORCH_FREE, *ALONE))


def check_equal(answers: dict[str, list[dict[str, Any]]], precision: str, tolerance: float) -> None:
    """Refuse to compare the speed of two losses that are not the same loss."""
    ours, theirs = (answers[f"{library} exact {precision}"][0]["loss"] for library in ("driftlab", "speculators"))
    if not abs(ours - theirs) <= tolerance * abs(theirs):
        raise SystemExit(f"{precision}: driftlab's first loss is {ours}, speculators' {theirs}: no timing is reported")


def rows_of(answers: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> list[dict[str, str]]:
    """Medians over the repeats, the warm-up left out; peaks over all of them."""
    rows = []
    rate = {
        name: results[0]["tokens"] / statistics.median(r["seconds"] for r in results[1:])
        for name, results in answers.items()
    }
    memory = {name: max(r["peak_mib"] - r["baseline_mib"] for r in results) for name, results in answers.items()}
    threads = next(iter(answers.values()))[0]["threads"]
    common = {"threads": threads}
    shape = f"{options.tokens} tokens, TTT {options.ttt}, draft vocabulary {options.draft_vocab}, KL"
    for precision, words in PRECISIONS.items():
        ours, theirs, fast = (f"{x} {precision}" for x in ("driftlab exact", "speculators exact", "driftlab sampled"))
        losses = f"first losses {answers[ours][0]['loss']:.6g} and {answers[theirs][0]['loss']:.6g}"
        rows += [
            row(
                "training",
                f"speculators 0.9.0, eager CPU path, {words}",
                rate[theirs],
                "tokens/s",
                note=f"{shape}; a GPU-first library (flex attention, Triton loss), here on its eager CPU path",
                **common,
            ),
            row(
                "training",
                f"driftlab, exact sums, {words}",
                rate[ours],
                "tokens/s",
                ratio=rate[ours] / rate[theirs],
                goal=f">= {GOAL:g}x (hoped {HOPE:g}x)",
                met=rate[ours] >= GOAL * rate[theirs],
                note=f"the same step as speculators, side by side on {cpu_name()}; {losses}",
                **common,
            ),
            row(
                "training",
                f"driftlab, sampled columns and every 2nd start, {words}",
                rate[fast],
                "tokens/s",
                ratio=rate[fast] / rate[theirs],
                note="negatives=1024, stride=2: approximations of the same loss that speculators does not have",
                **common,
            ),
        ]
        for name, label in ((theirs, "speculators 0.9.0"), (ours, "driftlab, exact"), (fast, "driftlab, sampled")):
            rows.append(
                row(
                    "training",
                    f"peak memory, {label}, {words}",
                    memory[name],
                    "MiB",
                    ratio=None if name == theirs else memory[name] / memory[theirs],
                    note="resident peak of the process less that after imports; tables and moments included",
                    **common,
                )
            )
    best = {
        library: max(rate[f"{library} exact {precision}"] for precision in PRECISIONS)
        for library in ("driftlab", "speculators")
    }
    rows.append(
        row(
            "training",
            "each library in the precision that is faster for it here",
            best["driftlab"],
            "tokens/s",
            ratio=best["driftlab"] / best["speculators"],
            goal=f">= {GOAL:g}x (hoped {HOPE:g}x)",
            met=best["driftlab"] >= GOAL * best["speculators"],
            note="exact sums; driftlab's autocast='auto' takes float32 on a CPU without bf16 units",
            **common,
        )
    )
    return rows


if __name__ == "__main__":
    main()
