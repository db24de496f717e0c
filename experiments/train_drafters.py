"""Train the six shipped drafters, from nothing: the target's own text, a check of learning rates, training, measurement.

    python experiments/train_drafters.py [--conversations 2560] [--epochs 3] [--out runs/drafters]

The four settings of the two switches at TTT 4, and eagle3 and eagle31 at TTT 2, all from the same first weights on the same
batches at the same learning rate: of ``check_lrs`` the one with the largest held-out tau, mean over the variants, after short
trainings whose table is kept (learning_rates.csv). Stopped at any moment, the same command goes on. Each drafter's folder
holds config.json, model.safetensors (bfloat16, without the target's embedding and head), train_log.csv and training.json
(settings, seed, what it came from).
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import torch
import tyro

from driftlab import VARIANTS, Drafter, ProgressBar, Target, TrainConfig, Trajectory, choose_draft_vocab, train
from driftlab.files import atomic, write_json
from driftlab.results import provenance
from driftlab.training import split
from driftlab.vocabulary import coverage
from driftlab.workers import run_jobs

HELD_OUT = 0.05
CHECKED = 24
"""held-out conversations that checkpoints are compared on; the rest is for the final measurement"""
SIX = (("eagle31", 4), ("eagle3", 4), ("fc_norm", 4), ("norm_output", 4), ("eagle31", 2), ("eagle3", 2))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """What all six have in common."""

    conversations: int = 2560
    """of the target with itself; about 160 answer tokens each"""
    seed: int = 0
    """of the first weights and of the order of the data"""
    draft_vocab: int = 16384
    epochs: float = 3.0
    lr: float | None = None
    """default: that of ``check_lrs`` whose short trainings had the largest held-out tau, mean over the variants"""
    batch_size: int = 2
    stride: int = 2
    negatives: int = 1024
    check_lrs: tuple[float, ...] = (1e-3, 2e-3)
    check_steps: int = 300
    out: Path = Path("runs/drafters")


def main(setup: Setup) -> None:
    """Do all of it, and print where things are and how large held-out tau is."""
    bar = ProgressBar()
    target = Target.load("smollm2", progress=bar)
    text = target.record_self_prompts(setup.conversations, seed=setup.seed, out=setup.out / "text", progress=bar)
    learning, held_out = split(text, HELD_OUT)
    vocab = choose_draft_vocab(learning, setup.draft_vocab)
    print(
        f"{learning.answer_tokens} answer tokens to learn from, {held_out.answer_tokens} held out; the draft vocabulary of "
        f"{setup.draft_vocab} holds {coverage(vocab, learning):.2%} and {coverage(vocab, held_out):.2%}",
        flush=True,
    )
    checks = [(f"check-{v}-{lr:g}", v, 4, lr, setup.check_steps) for lr in setup.check_lrs for v in VARIANTS]
    run_jobs(_train, [(*job, setup) for job in checks], what="learning rates", progress=bar)
    table = pd.DataFrame([{"variant": v, "lr": lr, **_last(setup.out / name)} for name, v, _, lr, _ in checks])
    with atomic(setup.out / "learning_rates.csv") as temporary:
        table.to_csv(temporary, index=False, float_format="%.4f")
    print(table.to_string(index=False), flush=True)
    best = table.groupby("lr")["held_out_tau"].mean().idxmax() if setup.lr is None else setup.lr
    jobs = [(f"{variant}-ttt{ttt}", variant, ttt, float(best), 0) for variant, ttt in SIX]
    run_jobs(_train, [(*job, setup) for job in jobs], what="training six drafters", progress=bar)
    for name, _, _, lr, _ in jobs:
        _ship(setup, name, text, lr)
        print(name, _last(setup.out / name), flush=True)


def _last(folder: Path) -> dict[str, float]:
    """Best held-out row of a training's log."""
    log = pd.read_csv(folder / "train_log.csv").dropna(subset=["held_out_tau"])
    best = log.loc[log["held_out_tau"].idxmax()]
    return {name: float(best[name]) for name in ("step", *(c for c in log.columns if c.startswith("held_out")))}


def _train(
    name: str, variant: str, ttt: int, lr: float, steps: int, setup: Setup, report: Callable[[int, int], None]
) -> None:
    text = Trajectory.open(setup.out / "text")
    learning, held_out = split(text, HELD_OUT)
    shape = VARIANTS[variant].for_target(text, draft_vocab_size=setup.draft_vocab)
    vocab = choose_draft_vocab(learning, setup.draft_vocab)
    drafter = Drafter(shape, text, draft_vocab=vocab, seed=setup.seed)
    config = TrainConfig(
        ttt=ttt,
        lr=lr,
        batch_size=setup.batch_size,
        stride=setup.stride,
        negatives=setup.negatives,
        epochs=steps * setup.batch_size / len(learning) if steps else setup.epochs,
        seed=setup.seed,
        evaluate_every=steps,
    )
    train(
        drafter,
        learning,
        config,
        out=setup.out / name,
        held_out=held_out.subset(range(min(CHECKED, len(held_out)))),
        progress=lambda _, done, total: report(done, total),
    )


def _ship(setup: Setup, name: str, text: Trajectory, lr: float) -> None:
    """Write the bfloat16 copy, and what it came from."""
    drafter, out = Drafter.load(setup.out / name, text), setup.out / "shipped" / f"smollm2-{name.removesuffix('-ttt4')}"
    drafter.save(out, dtype=torch.bfloat16)
    shutil.copy(setup.out / name / "train_log.csv", out / "train_log.csv")
    settings = {
        "command": "python experiments/train_drafters.py",
        **dataclasses.asdict(setup),
        "lr": lr,
        "text": text.settings,
    }
    write_json(out / "training.json", {**provenance(settings), "held_out": _last(setup.out / name)})


if __name__ == "__main__":
    main(tyro.cli(Setup))
