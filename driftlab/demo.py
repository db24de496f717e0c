"""The demo: a real model from prompt to drift picture.

SmolLM2-135M-Instruct answers 20 of the project's prompts; four small drafters (every setting of the two switches) are
trained on the spot, on answers that the same model gave to prompts of its own; then they are replayed, probed, and run
live on one prompt each as a check. Everything is cached: the second run only measures.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from driftlab import plotting
from driftlab.drafter import VARIANTS, Drafter
from driftlab.errors import DriftlabError
from driftlab.files import atomic, cache_dir
from driftlab.measure import MIXED, drafter_sink, probe_rows, replay_rows
from driftlab.progress import Progress, silent
from driftlab.prompts import evenly, load_prompts
from driftlab.report import write_report
from driftlab.results import combine, provenance, weighted_mean, write_rows
from driftlab.simulation import Simulation
from driftlab.speculation import speculate
from driftlab.target import Target
from driftlab.training import TrainConfig, choose_draft_vocab, coverage, train
from driftlab.trajectory import Trajectory
from driftlab.workers import run_jobs

RECENT = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Size of the demo. The default fits two CPU cores and a few minutes."""

    prompts: int = 20
    answer_tokens: int = 96
    training_texts: int = 160
    draft_vocab: int = 6144
    intermediate_size: int = 768
    train: TrainConfig = TrainConfig(ttt=4, lr=2e-3, batch_size=2, epochs=1.0)
    depth: int = 8
    """K of replay, probes and live runs"""
    match_depth: int = 16
    live_tokens: int = 32


def run_demo(
    out: str | Path, config: DemoConfig | None = None, *, device: str = "cpu", progress: Progress = silent
) -> pd.DataFrame:
    """Run the demo; write ``out``/report.html, summary.csv, rows.parquet and the panels; return the summary.

    Args:
        out: folder.
        config: sizes.
        device: of target and drafters.
        progress: called with (stage, done, total).

    Raises:
        DriftlabError: the target cannot be had, the disk is full, or a live run disagrees with replay.
    """
    out, config = Path(out), config or DemoConfig()
    seconds: dict[str, float] = {}
    with _timed(seconds, "load the target"):
        target = Target.load("smollm2", device=device, progress=progress)
    with _timed(seconds, "record"):
        answers, lessons = record_all(target, config, progress)
    with _timed(seconds, "train four drafters"):
        drafters = train_all(lessons, config, device, progress)
    with _timed(seconds, "replay and probe"):
        rows, simulations = measure_all(drafters, answers, lessons, config, device, progress)
    with _timed(seconds, "live check"):
        live = check_live(target, drafters, answers, simulations, config, progress)
    summary = summarise(rows)
    settings = {"demo": dataclasses.asdict(config), "target": target.spec.label, "device": device}
    record = provenance(settings)
    write_rows(out / "rows.parquet", rows, record)
    with atomic(out / "summary.csv") as temporary:
        summary.to_csv(temporary, index=False, float_format="%.6g")
    panels = draw(rows, out)
    notes = describe(target, drafters, answers, lessons, config, live, seconds)
    write_report(
        out / "report.html",
        title="Attention drift, measured: EAGLE-3 and EAGLE 3.1 on SmolLM2-135M",
        lead=f"Target: {target.spec.label}. Four one-layer drafters, trained on the same data from the same first "
        f"weights, differ only in fc_norm and norm_output. Single seed. K = {config.depth}; greedy; "
        f"{config.prompts} prompts.",
        tables={"Summary": summary, "Sinks: the target's and the drafters'": sink_table(drafters, answers, target)},
        panels=panels,
        notes=notes,
        provenance=record,
    )
    return summary


def record_all(target: Target, config: DemoConfig, progress: Progress) -> tuple[Trajectory, Trajectory]:
    """Record what is measured (answers to the project's prompts) and what is learned (shipped answers, teacher-forced)."""
    prompts = evenly(load_prompts("default"), config.prompts)
    answers = target.record(prompts, max_new_tokens=config.answer_tokens, piece_size=20, progress=progress)
    lines = resources.files("driftlab").joinpath("data/self_text.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line) for line in lines][: config.training_texts]
    lessons = target.record(
        texts,
        answers=[text["answer"] for text in texts],
        max_new_tokens=config.answer_tokens,
        progress=lambda what, done, total: progress("recording training text", done, total),
    )
    return answers, lessons


def train_all(lessons: Trajectory, config: DemoConfig, device: str, progress: Progress) -> dict[str, Drafter]:
    """Train every variant from the same first weights on the same batches; finished ones are read from the cache."""
    folders = {name: _folder(lessons, config, device) / name for name in VARIANTS}
    missing = [name for name, folder in folders.items() if not (folder / "config.json").is_file()]
    if device == "cpu" and missing:
        jobs = [(name, lessons.path, config, folders[name]) for name in missing]
        run_jobs(_train_job, jobs, what="training four drafters", progress=progress)
    drafters = {}
    for name, folder in folders.items():
        # finished: checks that the saved state is this training's, and loads it
        drafters[name] = train(_new(name, lessons, config).to(device), lessons, config.train, out=folder).eval()
    return drafters


def _new(name: str, lessons: Trajectory, config: DemoConfig) -> Drafter:
    sizes = {"draft_vocab_size": config.draft_vocab, "intermediate_size": config.intermediate_size}
    vocab = choose_draft_vocab(lessons, config.draft_vocab)
    shape = VARIANTS[name].for_target(lessons, **sizes)
    return Drafter(shape, lessons, draft_vocab=vocab, seed=config.train.seed)


def _folder(lessons: Trajectory, config: DemoConfig, device: str) -> Path:
    text = json.dumps([dataclasses.asdict(config), device], sort_keys=True)
    return cache_dir() / "demo" / f"{lessons.path.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _train_job(name: str, path: Path, config: DemoConfig, out: Path, report: Callable[[int, int], None]) -> None:
    lessons = Trajectory.open(path)
    progress: Progress = lambda what, done, total: report(done, total)  # noqa: E731
    train(_new(name, lessons, config), lessons, config.train, out=out, progress=progress)


def measure_all(
    drafters: dict[str, Drafter],
    answers: Trajectory,
    lessons: Trajectory,
    config: DemoConfig,
    device: str,
    progress: Progress,
) -> tuple[pd.DataFrame, dict[str, Simulation]]:
    """Replay and probe every drafter; the match is measured deeper than K."""
    if device == "cpu":
        jobs = [(name, _folder(lessons, config, device) / name, answers.path, config) for name in drafters]
        measured = run_jobs(_measure_job, jobs, what="measuring", progress=progress)
    else:
        measured = [_measure(name, drafter, answers, config) for name, drafter in drafters.items()]
    frames = [frame for frame, _ in measured]
    simulations = dict(zip(drafters, (simulation for _, simulation in measured), strict=True))
    return combine(frames, varying=MIXED), simulations


def _measure(name: str, drafter: Drafter, answers: Trajectory, config: DemoConfig) -> tuple[pd.DataFrame, Simulation]:
    replayed, simulation = replay_rows(drafter, answers, name, depth=config.depth, match_depth=config.match_depth)
    probed = probe_rows(drafter, answers, name, depth=config.depth, recent=(RECENT,))
    return combine([replayed, probed], varying=MIXED), simulation


def _measure_job(
    name: str, folder: Path, path: Path, config: DemoConfig, report: Callable[[int, int], None]
) -> tuple[pd.DataFrame, Simulation]:
    answers = Trajectory.open(path)
    result = _measure(name, Drafter.load(folder, answers).eval(), answers, config)
    report(1, 1)
    return result


def check_live(
    target: Target,
    drafters: dict[str, Drafter],
    answers: Trajectory,
    simulations: dict[str, Simulation],
    config: DemoConfig,
    progress: Progress,
) -> str:
    """Run the shortest answer live with every drafter; raise if text or accept lengths differ from replay."""
    index = min(range(len(answers)), key=lambda i: answers.entries[i].length)
    entry, tokens = answers.entries[index], answers.tokens(index).tolist()
    prompt, answer = tokens[: entry.prompt_length], tokens[entry.prompt_length :]
    for done, (name, drafter) in enumerate(drafters.items()):
        progress("live check", done, len(drafters))
        live = speculate(
            target, drafter, prompt, depth=config.depth, max_new_tokens=min(config.live_tokens, len(answer))
        )
        # the last live round may be cut by the shorter limit
        whole = live.rounds if live.finish == "stop" else live.rounds[:-1]
        if list(live.tokens) != answer[: len(live.tokens)] or whole != simulations[name].rounds[index][: len(whole)]:
            raise DriftlabError(f"{name}, prompt {entry.id!r}: the live run and replay disagree; please report this")
    progress("live check", len(drafters), len(drafters))
    return f"prompt {entry.id}, {len(live.tokens)} tokens"


def summarise(rows: pd.DataFrame) -> pd.DataFrame:
    """One row a variant: tau with interval, and RMS, sink, self and recent mass at the first and the last depth."""
    last = int(rows["depth_max"].max())
    means = weighted_mean(rows[rows["depth"] > 0], ["variant", "quantity", "depth"])
    at = means.set_index(["variant", "quantity", "depth"])["value"]
    tau = rows[rows["quantity"] == "tau"].set_index("variant")
    return pd.DataFrame(
        [
            {
                "variant": name,
                "tau": tau.loc[name, "value"],
                "tau_low": tau.loc[name, "low"],
                "tau_high": tau.loc[name, "high"],
                "rms_d1": at[name, "rms_feedback", 1],
                "rms_dK": at[name, "rms_feedback", last],
                "sink_d1": at[name, "mass_sink", 1],
                "sink_dK": at[name, "mass_sink", last],
                "self_d2": at[name, "mass_self", 2],
                "self_dK": at[name, "mass_self", last],
                "recent_d1": at[name, "recent", 1],
                "recent_dK": at[name, "recent", last],
            }
            for name in rows["variant"].unique()
        ]
    )


def draw(rows: pd.DataFrame, out: Path) -> dict[str, Path]:
    """Draw every panel; return title -> PNG."""
    single: dict[str, tuple[str, Callable[..., Any]]] = {
        "Magnitude of the feedback by depth": ("magnitude", lambda f: plotting.plot_magnitude(f, log=True)),
        "Text-fed match by depth": ("match", plotting.plot_match),
        "Acceptance by depth, given all earlier drafts were accepted": ("acceptance", plotting.plot_acceptance),
        "tau with its interval": ("tau", plotting.plot_tau),
        f"Mass on the last {RECENT} keys": ("recent", plotting.plot_recent),
    }
    panels = {}
    with plotting.theme():
        figures = {title: (name, plot(rows).figure) for title, (name, plot) in single.items()}
        figures["Attention mass by depth"] = ("mass", plotting.plot_mass_grid(rows))
        for title, (name, figure) in figures.items():
            panels[title] = out / f"{name}.png"
            plotting.save_panel(figure, panels[title])
    return panels


def sink_table(drafters: dict[str, Drafter], answers: Trajectory, target: Target) -> pd.DataFrame:
    """Where target and drafters put most of their attention among the positions that all prompts share."""
    shared = min(entry.prompt_length for entry in answers.entries)
    heads = torch.stack([answers.tokens(i)[:shared] for i in range(len(answers))])
    report = answers.sink_report
    found = [(entry["position"], entry["mass"]) for entry in report.get("top", [])[:3]]
    rows = [
        {"who": "target (mean of layers)", "place": i + 1, "position": p, "mass": m} for i, (p, m) in enumerate(found)
    ]
    for name, drafter in drafters.items():
        for i, (position, mass) in enumerate(drafter_sink(drafter, answers, 3)):
            rows.append({"who": name, "place": i + 1, "position": position, "mass": mass})

    def token(position: int) -> str:
        at = heads[:, position].unique()
        return target.tokenizer.decode([int(at[0])]) if len(at) == 1 else "(differs by prompt)"

    return pd.DataFrame([{**row, "token": token(row["position"])} for row in rows])


def describe(
    target: Target,
    drafters: dict[str, Drafter],
    answers: Trajectory,
    lessons: Trajectory,
    config: DemoConfig,
    live: str,
    seconds: dict[str, float],
) -> list[str]:
    """Say what the numbers are, and what they are not."""
    drafter = next(iter(drafters.values()))
    size = sum(p.numel() for p in drafter.parameters()) / 1e6
    held = coverage(drafter.draft_vocab, answers)
    return [
        f"Numbers are for {target.spec.label}, float32, a single training seed. Intervals are over prompts only.",
        f"Drafters: {size:.1f} M trained parameters, TTT {config.train.ttt}, {lessons.answer_tokens} answer tokens "
        f"of training text, {config.train.epochs:g} epoch, embedding and head lent by the target. They are small and "
        "little trained: read the contrast between variants, not the height of tau.",
        f"Draft vocabulary: {config.draft_vocab} tokens; it holds {held:.1%} of the measured answers' tokens, and no "
        "drafter can match more.",
        f"tau counts the bonus token, over the rounds of the walk (K = {config.depth}); rounds cut by the length limit "
        "are excluded. Match is over all starts, text-fed; mass and magnitude are over all starts, fed with the "
        "drafter's own tokens.",
        f"Sink: position {answers.sinks[0]}, searched in the target over {answers.sink_report.get('searched_positions')} "
        "shared positions. The dashed SELF null is what the same keys would get at depth 1.",
        f"Live check: {live}, decoded live with all four drafters; text and accept lengths equal replay.",
        "Time: " + ", ".join(f"{stage} {value:.0f} s" for stage, value in seconds.items()) + ".",
    ]


class _timed:
    def __init__(self, seconds: dict[str, float], stage: str) -> None:
        self.seconds, self.stage = seconds, stage

    def __enter__(self) -> None:
        self.began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds[self.stage] = time.perf_counter() - self.began
