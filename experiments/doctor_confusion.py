"""Does the doctor name the convention that is read wrong? Drafters of our own, mis-declared in every way and in pairs.

    python experiments/doctor_confusion.py [--drafters runs/drafters] [--out runs/doctor]

A case is a drafter whose true reading is known and a declared one that differs from it in one or two factors; honest cases
declare the truth. The target's answers are recorded once, with the states that neighbouring layer ids name. The drafters:
those that are shipped, one of them with a head and an embedding of its own, three small ones trained here (latent
attention, an MTP head, one norm over the concat with gains of 1 + w), and any of yours (``--also``: honest, and ``--draws``
mistakes of one factor and as many of two, drawn with a fixed seed). A case is named if the reading found is the true one, or
if the true one stands in the class that the doctor reports as one with it; the table says which. Cases whose row is there are
skipped.
"""

from __future__ import annotations

import dataclasses
import random
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import tyro

from driftlab import VARIANTS, Drafter, ProgressBar, Target, TrainConfig, Trajectory, choose_draft_vocab, train
from driftlab.doctor import Diagnosis, diagnose, record_for
from driftlab.doctor.factors import Factors, Level, fields_of, plausible
from driftlab.doctor.stored import OUTSIDE, Stored, View
from driftlab.drafter.config import LatentConfig
from driftlab.drafter.formats.reading import Reading, read_checkpoint
from driftlab.errors import DriftlabError
from driftlab.files import atomic, locked

KINDS: dict[str, dict[str, Any]] = {
    "mla": {
        "variant": "eagle31",
        "latent": LatentConfig(
            q_lora_rank=0, kv_lora_rank=128, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=64
        ),
        "num_key_value_heads": 9,
        "rope_interleaved": True,
    },
    "mtp": {"variant": "norm_output", "architecture": "mtp", "aux_layers": ()},
    "concat": {"variant": "norm_output", "norm_before_fc": True, "norm_before_residual": True, "norm_plus_one": True},
}
SHIPPED = ("smollm2-eagle31", "smollm2-eagle3", "smollm2-norm_output", "smollm2-fc_norm")
HONEST = (*SHIPPED, "smollm2-eagle3-ttt2", "smollm2-eagle31-ttt2", "own", *KINDS)
SINGLES = {
    "smollm2-eagle31": None,  # every level of every factor
    "smollm2-eagle3": ("aux_layers", "norm_output", "norm_before_residual", "gain", "token_shift"),
    "own": ("norm_output", "embedding", "d2t", "inputs", "key heads"),
    "mla": ("aux_order", "norm before fc", "norm_output", "rope_interleaved", "token_shift"),
    "mtp": ("norm_output", "token_shift", "inputs", "final_state", "rope_interleaved"),
    "concat": ("norm before fc", "gain", "norm_before_residual", "norm_output"),
}
PAIRS = {"smollm2-eagle31": 8, "smollm2-eagle3": 3, "own": 3, "mla": 3, "mtp": 3}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Where things are, and how much is done."""

    drafters: Path = Path("runs/doctor/drafters")
    """the small ones are trained here"""
    text: Path | None = None
    """recording that they are trained on; default: made here"""
    steps: int = 640
    out: Path = Path("runs/doctor")
    only: tuple[str, ...] = ()
    """drafters whose cases are run; default all, or none beside --also"""
    also: tuple[Path, ...] = ()
    """folders of other drafters, whose files are taken to be honest"""
    draws: int = 2
    """mistakes drawn of each of these, single ones and pairs"""
    random_weights: bool = True
    """also two drafters of random weights, of which nothing can be told"""


@dataclass(frozen=True)
class Case:
    """A drafter, and the levels that are declared wrong; none: an honest file."""

    base: str
    wrong: tuple[Level, ...] = ()

    @property
    def key(self) -> str:
        """Its name in the table."""
        changes = " + ".join(f"{level.factor}: {level.label}" for level in self.wrong)
        return f"{self.base} | {changes or 'honest'}"


@dataclass(frozen=True)
class Base:
    """A drafter as it is: its file, and the factors around the true reading."""

    reading: Reading
    factors: Factors
    d2t: torch.Tensor | None = None
    outside: dict[str, Any] = field(default_factory=dict)


def main(setup: Setup) -> None:
    """Run the cases that are not in the table yet; print the table's summary."""
    torch.set_num_threads(1)
    target = Target.load("smollm2", progress=ProgressBar())
    recording = record_for(target, read_checkpoint("smollm2-eagle3").config_for(target), progress=ProgressBar())
    every = dict.fromkeys([*SINGLES, *HONEST])
    wanted = setup.only or (() if setup.also else every)
    names = [name for name in every if name in wanted]
    bases = {name: base(name, setup, target, recording) for name in names}
    bases |= {path.name: _base(read_checkpoint(path), recording) for path in setup.also}
    if setup.random_weights and not (setup.only or setup.also):
        bases |= {f"random {kind}": random_base(kind, setup, recording) for kind in ("eagle3", "eagle31")}
    for case in cases(bases, {path.name: setup.draws for path in setup.also}):
        if case.key not in set(_rows(setup)["case"]):
            _write(setup, run(case, bases[case.base], recording))
    report(setup)


def cases(bases: dict[str, Base], draws: dict[str, int] | None = None) -> Iterator[Case]:
    """Yield honest files, single mistakes, and pairs of them drawn with a fixed seed, in turn.

    ``draws``: of drafters that :data:`SINGLES` does not list, how many mistakes of one factor and of two.
    """
    draws = draws or {}
    lists = [[Case(name) for name in bases]]
    for name, factors in SINGLES.items():
        if name in bases:
            levels = bases[name].factors.levels
            wanted = levels if factors is None else [f for f in factors if f in levels]
            lists.append(
                [Case(name, (level,)) for f in wanted for level in levels[f][1 : None if factors is None else 2]]
            )
    for name, count in draws.items():
        dice, levels = random.Random(f"singles {name}"), bases[name].factors.levels
        lists.append(
            [Case(name, (dice.choice(levels[f][1:]),)) for f in dice.sample(sorted(levels), min(count, len(levels)))]
        )
    for name, count in (PAIRS | draws).items():
        if name in bases:
            lists.append(_pairs(name, bases[name].factors, count))
    for place in range(max((len(each) for each in lists), default=0)):
        yield from (each[place] for each in lists if place < len(each))


def _pairs(name: str, factors: Factors, count: int) -> list[Case]:
    dice, found = random.Random(f"pairs {name}"), []
    while len(found) < count:
        one, other = dice.sample(sorted(factors.levels), 2)
        levels = tuple(dice.choice(factors.levels[f][1:]) for f in (one, other))
        try:
            factors.view({level.factor: level for level in levels})
        except DriftlabError:
            continue
        case = Case(name, levels)
        if case not in found:
            found.append(case)
    return found


def run(case: Case, honest: Base, recording: Trajectory) -> dict[str, Any]:
    """Diagnose a case, and say whether the truth was named."""
    truth = honest.factors.declared
    declared = honest.factors.view({level.factor: level for level in case.wrong})
    reading = honest.reading.with_given(**fields_of(declared.config, truth.config))
    outside = {name: getattr(declared, name) for name in OUTSIDE}
    began, cpu = time.monotonic(), time.process_time()
    row = {"case": case.key, "base": case.base, "factors": len(case.wrong), "honest": not case.wrong}
    try:
        found = diagnose(reading, recording, outside=outside, d2t=honest.d2t)
    except DriftlabError as error:
        traceback.print_exc()
        return {**row, "outcome": f"error: {error}", "named": False, "doubted": False, "seconds": 0.0}
    how = named(found, truth)
    return {
        **row,
        "outcome": found.outcome,
        "best": "; ".join(f"{n}: {after}" for n, _, after in found.changes) or "as declared",
        "named": how != "no" and found.outcome != "too weak",
        "how": how,
        "doubted": not case.wrong and found.outcome == "another",
        "gain": 0.0 if found.gain is None else found.gain.value,
        "tau_declared": found.tau_declared.value,
        "tau_best": found.tau_best.value,
        "information": found.information,
        "class": "; ".join(", ".join(f"{f}: {label}" for f, label in r.changes) for r in found.together),
        "tried": found.tried,
        "cpu_seconds": time.process_time() - cpu,
        "seconds": time.monotonic() - began,
    }


def named(found: Diagnosis, truth: View) -> str:
    """Return "exactly", "in the class" that is one with the reading found, or "no"."""
    if found.best == truth:
        return "exactly"
    return "in the class" if truth in [row.view for row in found.together] else "no"


def base(name: str, setup: Setup, target: Target, recording: Trajectory) -> Base:
    """Return a drafter, trained or made first if it is not there."""
    folder = setup.drafters / name
    if name in KINDS and not (folder / "config.json").is_file():
        trained(name, setup, target)
    if name == "own" and not (folder / "config.json").is_file():
        own_tables(folder, recording)
    reading = read_checkpoint(folder if name in KINDS or name == "own" else name)
    return _base(reading, recording)


def _base(reading: Reading, recording: Trajectory) -> Base:
    truth, d2t = View(config=reading.config_for(recording)), None
    if reading.config_for(recording).lm_head == "own" and reading.draft_vocab is not None:
        truth, d2t = (
            dataclasses.replace(truth, d2t="absolute"),
            reading.draft_vocab,
        )  # a file whose writer took d2t for ids
    stored = Stored.of(reading.tensors, recording.head, d2t=d2t)
    depth = min(3, truth.config.ttt or 3)
    factors = plausible(truth, stored, recording.spec, recording.aux_layers, depth)
    if d2t is not None:  # offsets of it leave the vocabulary, and are declared all the same
        mistaken = Level("d2t", "offset", view={"d2t": "offset"})
        factors = Factors(
            truth, {**factors.levels, "d2t": (Level("d2t", "absolute", view={"d2t": "absolute"}), mistaken)}, ()
        )
    return Base(reading, factors, d2t)


def trained(name: str, setup: Setup, target: Target) -> None:
    """Train one of the small drafters."""
    if setup.text is None:
        text = target.record_self_prompts(setup.steps * 4, out=setup.out / "text", progress=ProgressBar())
    else:
        text = Trajectory.open(setup.text)
    kind = dict(KINDS[name])
    config = VARIANTS[kind.pop("variant")].for_target(text, draft_vocab_size=8192, **kind)
    drafter = Drafter(config, text, draft_vocab=choose_draft_vocab(text, 8192), seed=0)
    how = TrainConfig(ttt=2, lr=2e-3, batch_size=4, stride=3, negatives=512, save_every=40, evaluate_every=10**9)
    train(drafter, text.subset(range(setup.steps * 4)), how, out=setup.drafters / name, progress=ProgressBar())


def own_tables(folder: Path, recording: Trajectory) -> None:
    """Write a shipped drafter with a head and an embedding of its own.

    The embedding's columns are scaled and the gain of the norm that reads it unscaled, so that the drafter is nearly the same
    and the target's embedding is another one.
    """
    drafter = Drafter.load("smollm2-norm_output", recording)
    scale = torch.empty(drafter.config.hidden_size).uniform_(0.4, 2.5, generator=torch.Generator().manual_seed(0))
    scale /= scale.square().mean().sqrt()  # the norm takes a common factor out
    config = dataclasses.replace(drafter.config, own_embed=True, lm_head="own")
    own = Drafter(config, draft_vocab=drafter.draft_vocab)
    tensors = {**drafter.state_dict(), "lm_head.weight": drafter.lm_head.weight}
    tensors["embed_tokens.weight"] = recording.head.embed.float() * scale
    tensors["layers.0.input_layernorm.weight"] = tensors["layers.0.input_layernorm.weight"] / scale
    own.load_state_dict(tensors)
    own.save(folder)


def random_base(kind: str, setup: Setup, recording: Trajectory) -> Base:
    """Return a drafter of random weights."""
    folder = setup.drafters / f"random-{kind}"
    if not (folder / "config.json").is_file():
        layers = (2, 15, 27)
        config = VARIANTS[kind].for_target(recording, aux_layers=layers, draft_vocab_size=8192)
        Drafter(config, recording, draft_vocab=choose_draft_vocab(recording, 8192), seed=7).save(folder)
    return _base(read_checkpoint(folder), recording)


def _rows(setup: Setup) -> pd.DataFrame:
    path = setup.out / "confusion.csv"
    return pd.read_csv(path) if path.is_file() else pd.DataFrame({"case": []})


def _write(setup: Setup, row: dict[str, Any]) -> None:
    with locked(setup.out / "confusion"):
        rows = pd.concat([_rows(setup), pd.DataFrame([row])], ignore_index=True)
        with atomic(setup.out / "confusion.csv") as temporary:
            rows.to_csv(temporary, index=False, float_format="%.5g")
    print(
        f"{row['case']}: {row['outcome']}; {row.get('best', '')}; {row.get('how', '')}; {row['seconds']:.0f} s",
        flush=True,
    )


def report(setup: Setup) -> None:
    """Write the figure and print what it comes to; the last line is the summary."""
    rows = _rows(setup)
    noise = rows["base"].str.startswith("random")
    wrong, honest = rows[~rows["honest"].astype(bool) & ~noise], rows[rows["honest"].astype(bool) & ~noise]
    figure(wrong, honest, setup.out / "confusion.png")
    for row in wrong[~wrong["named"].astype(bool)].itertuples():
        print(f"not named: {row.case}: {row.outcome}; {row.best}")
    for row in rows[noise].itertuples():
        print(f"{row.base}: {row.outcome}")
    exactly = int((wrong["how"] == "exactly").sum())
    print(
        f"{exactly} named exactly, {int(wrong['named'].sum()) - exactly} in a class that is one with the reading found"
    )
    print(f"slowest {rows['seconds'].max():.0f} s, CPU {rows['cpu_seconds'].mean():.0f} s a case")
    print(
        f"doctor: {int(wrong['named'].sum())}/{len(wrong)} true readings named, {int(honest['doubted'].sum())}/{len(honest)} "
        f"honest ones doubted, {rows['seconds'].mean():.0f} s each"
    )


def figure(wrong: pd.DataFrame, honest: pd.DataFrame, path: Path) -> None:
    """Draw the gain that the doctor found against the number of cases named, factor by factor."""
    from matplotlib.figure import Figure

    pattern = r"\| ([^:+]+):"
    singles = wrong[wrong["factors"] == 1].assign(factor=wrong["case"].str.extract(pattern)[0])
    order = singles.groupby("factor")["gain"].median().sort_values().index
    fig = Figure(figsize=(7, 0.32 * len(order) + 1.6), layout="constrained")
    ax = fig.add_subplot()
    colours = {"exactly": "tab:blue", "in the class": "tab:orange", "no": "tab:red"}
    for how, colour in colours.items():
        there = singles[singles["how"] == how]
        places = [list(order).index(factor) for factor in there["factor"]]
        ax.scatter(there["gain"], places, c=colour, s=24, label=how)
    ax.set_yticks(range(len(order)), order)
    ax.set_xscale("symlog", linthresh=0.01)
    ax.axvline(0.01, lw=0.7, ls=":", c="grey")
    ax.set_xlabel("gain of the reading found over the declared one (nats a token)")
    ax.set_title(
        f"single mistakes: named; {int(honest['doubted'].sum())} of {len(honest)} honest files doubted", fontsize=10
    )
    ax.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=150)


if __name__ == "__main__":
    main(tyro.cli(Setup))
