"""The study: train drafters that differ in one thing, measure each, one table a cell. Change one line of a grid, run it again.

    python experiments/ablate.py two_by_two gate ttt --out runs/study/cells [--executor processes] [--dry-run]

Grids: ``two_by_two`` (the two switches, three seeds, TTT 4), ``gate`` (attention gate x norm_output, three seeds), ``ttt``
(2, 4, 8 x eagle3 / eagle31, match to depth 16); exploratory, one seed: ``blocks`` (q/k-norm x fc_norm / norm_before_fc /
neither, speculators#610), ``losses``, ``lab`` (interventions on trained drafters). Trainings are kept by what they depend on
(``--trainings``), so cells that only measure otherwise share one; stopped at any moment, the same command goes on.

Each cell is measured on held-out text of the training's source (``category`` held-out) and on answers to prompts (pooled
rows: ``category`` prompts): replayed tau and acceptance at K, text-fed match deeper, and, on a part of them, attention mass,
recent(8), entropy and norms under the drafter's own tokens.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import pandas as pd
import tyro

from driftlab import (
    VARIANTS,
    Drafter,
    DrafterConfig,
    Perturbation,
    Target,
    TrainConfig,
    Trajectory,
    choose_draft_vocab,
    load_prompts,
    parse_intervention,
    train,
)
from driftlab.ablation import Cell, ablate
from driftlab.cli.ablating import executor_of, tell
from driftlab.errors import DriftlabError
from driftlab.files import locked
from driftlab.measure import MIXED, probe_rows, replay_rows
from driftlab.prompts import evenly
from driftlab.results import combine
from driftlab.training import split

SEEDS = (0, 1, 2)
HELD_OUT = 0.05
"""share of the conversations that is not trained on"""
BATCH = 2


@dataclass(frozen=True, kw_only=True)
class Drafted(Cell):
    """One drafter, measured in one way."""

    variant: str
    seed: int
    """of the first weights and of the order of the data"""
    # what is trained
    ttt: int = 4
    gate: bool = False
    qk_norm: bool = False
    norm_before_fc: bool = False
    loss: str = "soft_ce"
    aux_layers: tuple[int, ...] = ()
    """empty: those of the recording"""
    conversations: int = 0
    """trained on; 0: all"""
    steps: int = 600
    lr: float = 1e-3
    # how it is measured
    depth: int = 8
    """K"""
    match_depth: int = 16
    intervention: str = ""
    """one or several, joined by " + " """
    perturbation: str = "chat"
    """of the prompts' input"""
    window: int = 0
    """of the target's attention while it answers the prompts; 0: all keys"""
    sinks: int = 0

    @property
    def training(self) -> str:
        """Name of what is trained: all that the weights depend on."""
        extra = [name for name in ("gate", "qk_norm", "norm_before_fc") if getattr(self, name)]
        extra += [self.loss] if self.loss != "soft_ce" else []
        extra += [f"aux{'+'.join(map(str, self.aux_layers))}"] if self.aux_layers else []
        extra += [f"on{self.conversations}"] if self.conversations else []
        extra += [f"steps{self.steps}"] if self.steps != 600 else []
        extra += [f"lr{self.lr:g}"] if self.lr != 1e-3 else []
        return "-".join([self.variant, *extra, f"ttt{self.ttt}", f"seed{self.seed}"])


GRIDS: dict[str, list[Drafted]] = {
    "two_by_two": [Drafted(variant=v, seed=s) for s in SEEDS for v in VARIANTS],
    "gate": [
        Drafted(variant=v, gate=g, seed=s) for s in SEEDS for v in ("eagle3", "norm_output") for g in (False, True)
    ],
    "ttt": [Drafted(variant=v, ttt=t, seed=0) for t in (2, 4, 8) for v in ("eagle3", "eagle31")],
    "blocks": [
        Drafted(variant=v, norm_before_fc=b, qk_norm=q, seed=0)
        for v, b in (("eagle3", False), ("fc_norm", False), ("eagle3", True))
        for q in (False, True)
    ],
    "losses": [
        Drafted(variant=v, loss=loss, seed=0)
        for loss in ("soft_ce", "kl", "alpha", "lambda")
        for v in ("eagle3", "eagle31")
    ],
    "lab": [
        Drafted(variant=v, intervention=i, seed=0)
        for v in VARIANTS
        for i in ("", "magnitude:depth1", "pin:sink", "sink:drop", "noise:hidden:0.25", "noise:hidden:0.5")
    ],
}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What all cells have in common."""

    text: Path = Path("runs/study/text")
    """the target's own conversations: recorded there if they are not"""
    trainings: Path = Path("runs/study/trainings")
    """folder of the trained drafters"""
    conversations: int = 2560
    """of the text"""
    prompts: str = "default"
    """file of prompts, or "default": the project's"""
    recording: Path | None = None
    """answers to prompts that are there, in place of ``prompts``"""
    answer_tokens: int = 128
    draft_vocab: int = 16384
    held_out: int = 40
    """held-out conversations measured"""
    prompt_count: int = 40
    """prompts measured, evenly over their kinds"""
    probed: int = 20
    """of each of the two, probed"""

    @property
    def told(self) -> dict[str, object]:
        """For the provenance: what numbers depend on, not where things are."""
        own = dataclasses.asdict(self)
        paths = {"text": self.text.name, "recording": None if self.recording is None else self.recording.name}
        prompts = self.prompts if self.recording is None else None
        return {**own, **paths, "prompts": prompts, "trainings": None}


def run(cell: Drafted, setup: Setup | None = None) -> pd.DataFrame:
    """Train the cell's drafter, or find it trained, and measure it."""
    setup = setup or Setup()
    text = open_text(setup)
    learning, held_out = split(text, HELD_OUT)
    drafter = trained(cell, text, learning, setup).eval()
    held_out = held_out.subset(range(min(setup.held_out, len(held_out))))
    answers = answered(cell, setup)
    frames = [
        measured(cell, drafter, held_out, setup).assign(category="held-out"),
        measured(cell, drafter, answers, setup).replace({"category": {"": "prompts"}}),
    ]
    return combine(frames, varying=(*MIXED, "template", "target"))


def open_text(setup: Setup) -> Trajectory:
    """Open the text, or record it: the target's own conversations."""
    if not (setup.text / "trajectory.json").is_file():
        Target.load("smollm2").record_self_prompts(setup.conversations, seed=0, out=setup.text)
    return Trajectory.open(setup.text)


def trained(cell: Drafted, text: Trajectory, learning: Trajectory, setup: Setup) -> Drafter:
    """Return the cell's drafter: what its folder holds, else trained, from where it was stopped."""
    out = setup.trainings / cell.training
    if cell.conversations:
        learning = learning.subset(range(min(cell.conversations, len(learning))))
    switches = {"attention_gate": cell.gate, "qk_norm": cell.qk_norm, "norm_before_fc": cell.norm_before_fc}
    switches |= {"aux_layers": cell.aux_layers} if cell.aux_layers else {}
    shape = VARIANTS[cell.variant].for_target(text, draft_vocab_size=setup.draft_vocab, **switches)
    with locked(out / "training"):  # not while another process writes it
        if (out / "config.json").is_file():
            return _found(cell, out, shape, text, len(learning))
    vocab = choose_draft_vocab(learning, setup.draft_vocab)
    drafter = Drafter(shape, text, draft_vocab=vocab, seed=cell.seed)
    config = TrainConfig(
        ttt=cell.ttt,
        loss=cell.loss,
        lr=cell.lr,
        batch_size=BATCH,
        stride=4,
        negatives=1024,
        epochs=cell.steps * BATCH / len(learning),
        seed=cell.seed,
    )
    train(drafter, learning, config, out=out)
    return Drafter.load(out, text)  # as the next cell finds it


def _found(cell: Drafted, out: Path, shape: DrafterConfig, text: Trajectory, sequences: int) -> Drafter:
    """Load a finished training; refuse one of another shape or length: its folder was made by something else."""
    drafter = Drafter.load(out, text)
    steps = int(pd.read_csv(out / "train_log.csv")["step"].max())
    wanted = round(cell.steps * BATCH / sequences * math.ceil(sequences / BATCH))
    expected = dataclasses.replace(shape, ttt=cell.ttt, trained_length=drafter.config.trained_length)
    had, want = ({**config.to_dict(), "steps": n} for config, n in ((drafter.config, steps), (expected, wanted)))
    if wrong := [f"{name} {had[name]!r}, not {want[name]!r}" for name in want if had[name] != want[name]]:
        raise DriftlabError(f"{out} holds another drafter ({'; '.join(wrong)}): move it away")
    return drafter


def answered(cell: Drafted, setup: Setup) -> Trajectory:
    """Return the target's answers to the prompts, under the cell's input and window; recorded once, in the cache."""
    plain = cell.perturbation == "chat" and not cell.window
    if setup.recording is not None and plain:
        whole = Trajectory.open(setup.recording)
        count = min(setup.prompt_count, len(whole))
        return whole.subset([i * len(whole) // count for i in range(count)])
    if setup.recording is not None:
        raise DriftlabError(f"{cell.key} wants prompts answered anew: give --prompts FILE in place of --recording")
    prompts = evenly(load_prompts(setup.prompts), setup.prompt_count)
    change = None if cell.perturbation == "chat" else Perturbation.parse(cell.perturbation)
    with ExitStack() as stack:
        target = Target.load("smollm2")
        if cell.window:
            stack.enter_context(target.attention(window=cell.window, sinks=cell.sinks))
        return target.record(prompts, perturbation=change, max_new_tokens=setup.answer_tokens)


def measured(cell: Drafted, drafter: Drafter, data: Trajectory, setup: Setup) -> pd.DataFrame:
    """Replay and probe: rows that name the drafter by its training."""
    interventions = [parse_intervention(word) for word in cell.intervention.split(" + ") if word]
    replayed, _ = replay_rows(
        drafter, data, cell.training, depth=cell.depth, match_depth=cell.match_depth, interventions=interventions
    )
    count = min(setup.probed, len(data))
    some = data.subset([i * len(data) // count for i in range(count)])
    probed = probe_rows(drafter, some, cell.training, depth=cell.depth, interventions=interventions)
    return combine([replayed, probed], varying=MIXED)


CELLS: list[Drafted] = [cell for name in ("two_by_two", "gate", "ttt") for cell in GRIDS[name]]


def main(
    grids: tyro.conf.Positional[tuple[str, ...]],
    setup: tyro.conf.OmitArgPrefixes[Setup],
    out: Path = Path("runs/study/cells"),
    executor: Literal["in-process", "processes", "ray"] = "in-process",
    cores: int | None = None,
    address: str | None = None,
    retries: int = 2,
    only: str = "",
    dry_run: bool = False,
) -> int:
    """Make the tables of the grids' cells; return the exit status.

    Args:
        grids: names of grids.
        setup: what all cells have in common.
        out: folder of the tables.
        executor: in-process: one after the other; processes: several at a time; ray: on a Ray cluster.
        cores: of --executor processes.
        address: of the Ray cluster; default one that is started here.
        retries: how often a cell is tried again whose worker was lost.
        only: cells whose key holds this text.
        dry_run: list the cells and their state.
    """
    cells = [cell for cell in chosen(grids) if only in cell.key]
    report = ablate(
        cells,
        partial(run, setup=setup),
        out=out,
        executor=executor_of(executor, cores, address, retries),
        settings=setup.told,
        dry_run=dry_run,
        progress=tell,
    )
    print(report.words)
    return report.status


def chosen(grids: Sequence[str]) -> list[Drafted]:
    """Return the cells of grids by name."""
    if not grids or (unknown := [name for name in grids if name not in GRIDS]):
        raise DriftlabError(f"grids {', '.join(unknown) if grids else 'none'}: choose from {', '.join(GRIDS)}")
    return [cell for name in grids for cell in GRIDS[name]]


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
