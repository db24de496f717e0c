"""The demo: a real model from prompt to drift picture.

SmolLM2-135M-Instruct answers some of the project's prompts; the six shipped drafters (every setting of the two switches, and
two of them trained less deep) are replayed and probed on the answers, and four run live on one prompt each as a check.
The recording is cached: the second run only measures.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from driftlab import plotting
from driftlab.account import account, legend
from driftlab.divergence import first_divergence
from driftlab.drafter import SHIPPED, Drafter
from driftlab.errors import DriftlabError
from driftlab.files import atomic
from driftlab.intervals import weighted_mean
from driftlab.measure import MIXED, drafter_sink, measure, measure_job
from driftlab.progress import Progress, silent
from driftlab.prompts import evenly, load_prompts
from driftlab.report import write_report
from driftlab.results import combine, provenance, write_rows
from driftlab.simulation import Simulation
from driftlab.speculation import speculate
from driftlab.target import Target
from driftlab.trajectory import Trajectory
from driftlab.vocabulary import coverage
from driftlab.workers import run_jobs

RECENT = 8
TTT = 4
"""depths that the drafters of the main comparison were trained to; the others show what this depth does"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Size of the demo. The default fits two CPU cores and a minute or two."""

    prompts: int = 16
    answer_tokens: int = 64
    depth: int = 8
    """K of replay, probes and live runs"""
    match_depth: int = 16
    live_tokens: int = 16


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
        prompts = evenly(load_prompts("default"), config.prompts)
        answers = target.record(prompts, max_new_tokens=config.answer_tokens, piece_size=20, progress=progress)
    drafters = {name: Drafter.load(name, answers).to(device).eval() for name in SHIPPED}
    with _timed(seconds, "replay and probe"):
        rows, simulations = measure_all(drafters, answers, config, device, progress)
    with _timed(seconds, "live check"):
        live = check_live(target, drafters, answers, simulations, config, progress)
    summary = summarise(rows)
    settings = {"demo": dataclasses.asdict(config), "target": target.spec.label, "device": device}
    record = provenance(settings)
    write_rows(out / "rows.parquet", rows, record)
    with atomic(out / "summary.csv") as temporary:
        summary.to_csv(temporary, index=False, float_format="%.6g")
    panels = draw(rows, out)
    accounts = account(simulations, answers, base="smollm2-eagle3")
    notes = [*describe(target, drafters, answers, config, live, seconds), *legend(accounts)]
    write_report(
        out / "report.html",
        title="Attention drift, measured: EAGLE-3 and EAGLE 3.1 on SmolLM2-135M",
        lead=f"Target: {target.spec.label}. Six one-layer drafters, trained on the same text from the same first weights; "
        f"four differ only in fc_norm and norm_output, two were unrolled less deep in training (TTT 2). Single training "
        f"seed. K = {config.depth}; greedy; {len(answers)} prompts.",
        tables={
            "Summary": summary,
            **accounts,
            "Sinks: the target's and the drafters'": sink_table(drafters, answers, target),
        },
        panels=panels,
        notes=notes,
        provenance=record,
    )
    return summary


def measure_all(
    drafters: dict[str, Drafter], answers: Trajectory, config: DemoConfig, device: str, progress: Progress
) -> tuple[pd.DataFrame, dict[str, Simulation]]:
    """Replay every drafter, and probe those of the main comparison; the match is measured deeper than K."""
    sizes = (config.depth, config.match_depth, (RECENT,))
    if device == "cpu":
        jobs = [(answers.path, name, *sizes, SHIPPED[name][1] == TTT) for name in drafters]
        measured = run_jobs(measure_job, jobs, what="measuring", progress=progress)
    else:
        measured = [measure(d, answers, name, *sizes, probe=SHIPPED[name][1] == TTT) for name, d in drafters.items()]
    frames = [frame for frame, _ in measured]
    simulations = dict(zip(drafters, (simulation for _, simulation in measured), strict=True))
    return combine(frames, varying=(*MIXED, "ttt")), simulations


def check_live(
    target: Target,
    drafters: dict[str, Drafter],
    answers: Trajectory,
    simulations: dict[str, Simulation],
    config: DemoConfig,
    progress: Progress,
) -> str:
    """Run the shortest answer live with the main drafters; raise if text or accept lengths differ from replay."""
    index = min(range(len(answers)), key=lambda i: answers.entries[i].length)
    entry, tokens = answers.entries[index], answers.tokens(index).tolist()
    prompt, answer = tokens[: entry.prompt_length], tokens[entry.prompt_length :]
    main = {name: drafter for name, drafter in drafters.items() if SHIPPED[name][1] == TTT}
    for done, (name, drafter) in enumerate(main.items()):
        progress("live check", done, len(main))
        limit = min(config.live_tokens, len(answer))
        live = speculate(target, drafter, prompt, depth=config.depth, max_new_tokens=limit, sinks=answers.sinks)
        # the last live round may be cut by the shorter limit
        whole = live.rounds if live.finish == "stop" else live.rounds[:-1]
        if list(live.tokens) != answer[: len(live.tokens)] or whole != simulations[name].rounds[index][: len(whole)]:
            told = first_divergence(target, [*prompt, *live.tokens], tokens[: len(prompt) + len(live.tokens)])
            why = "the text is the same, accept lengths differ" if told is None else told.words
            raise DriftlabError(
                f"{name}, prompt {entry.id!r}: the live run and replay disagree ({why}); please report this"
            )
    progress("live check", len(main), len(main))
    return f"prompt {entry.id}, {len(live.tokens)} tokens"


def summarise(rows: pd.DataFrame) -> pd.DataFrame:
    """One row a drafter: tau with interval, match and, where probed, RMS, sink and self mass at two depths each."""
    last, deepest = int(rows["depth_max"].max()), int(rows.loc[rows["quantity"] == "match", "depth"].max())
    means = weighted_mean(rows[rows["depth"] > 0], ["drafter", "quantity", "depth"])
    at = means.set_index(["drafter", "quantity", "depth"])["value"]
    tau = rows[rows["quantity"] == "tau"].set_index("drafter")
    columns = {
        "match_d1": ("match", 1),
        f"match_d{deepest}": ("match", deepest),
        "rms_d1": ("rms_feedback", 1),
        f"rms_d{last}": ("rms_feedback", last),
        "sink_d1": ("mass_sink", 1),
        f"sink_d{last}": ("mass_sink", last),
        "self_d2": ("mass_self", 2),
        f"self_d{last}": ("mass_self", last),
    }
    return pd.DataFrame(
        [
            {
                **{"drafter": name, "variant": tau.loc[name, "variant"], "ttt": int(tau.loc[name, "ttt"])},
                **{"tau": tau.loc[name, "value"], "tau_low": tau.loc[name, "low"], "tau_high": tau.loc[name, "high"]},
                **{column: at.get((name, *place), float("nan")) for column, place in columns.items()},
            }
            for name in rows["drafter"].unique()
        ]
    )


def draw(rows: pd.DataFrame, out: Path) -> dict[str, Path]:
    """Draw every panel; return title -> PNG. First what shows the contrast: match and magnitude."""
    main = rows[rows["ttt"] == TTT]
    single: dict[str, tuple[str, Any]] = {
        "Text-fed match by depth, all starts": ("match", lambda: plotting.plot_match(main)),
        "Magnitude of the feedback by depth": ("magnitude", lambda: plotting.plot_magnitude(main, log=True)),
        "Text-fed match of drafters trained to depth 2 and to depth 4": (
            "match_ttt",
            lambda: plotting.plot_match(rows),
        ),
        "tau with its interval": ("tau", lambda: plotting.plot_tau(rows)),
        "Acceptance by depth, given all earlier drafts were accepted": (
            "acceptance",
            lambda: plotting.plot_acceptance(main),
        ),
        f"Mass on the last {RECENT} keys": ("recent", lambda: plotting.plot_recent(main)),
    }
    panels = {}
    with plotting.theme():
        figures = {title: (name, plot().figure) for title, (name, plot) in single.items()}
        figures["Attention mass by depth"] = ("mass", plotting.plot_mass_grid(main))
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
        if SHIPPED[name][1] != TTT:
            continue
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
    config: DemoConfig,
    live: str,
    seconds: dict[str, float],
) -> list[str]:
    """Say what the numbers are, and what they are not."""
    drafter = next(iter(drafters.values()))
    size = sum(p.numel() for p in drafter.parameters()) / 1e6
    held = coverage(drafter.draft_vocab, answers)
    return [
        f"Numbers are for {target.spec.label}, float32 arithmetic on bfloat16 drafter weights, a single training seed. "
        "Intervals are over prompts only.",
        f"Drafters: {size:.1f} M trained parameters, shipped with the package; how they were trained, on what, and their "
        "held-out numbers are in the README and in their folders. Embedding and head are the target's.",
        f"Draft vocabulary: {drafter.config.draft_vocab_size} tokens; it holds {held:.1%} of the measured answers' tokens, "
        "and no drafter can match more.",
        f"tau counts the bonus token, over the rounds of the walk (K = {config.depth}); rounds cut by the length limit "
        "are excluded. Match is over all starts, text-fed; mass and magnitude are over all starts, fed with the "
        "drafter's own tokens.",
        f"Summary, by depth d: match_d1, match_d{config.match_depth}: text-fed match; rms: RMS of the feedback; sink, self: "
        "mass on SINK and SELF; tau_low, tau_high: 95 % over prompts. SELF grows with the number of own keys by itself: read "
        "it beside its null line.",
        f"Sink: position {answers.sinks[0]}, searched in the target over {answers.sink_report.get('searched_positions')} "
        "shared positions. The table shows the target's and the drafters' own, as they are: a drafter need not inherit it. "
        "The dashed SELF null is what the same keys would get at depth 1.",
        f"Live check: {live}, decoded live with the drafters of TTT {TTT}; text and accept lengths equal replay.",
        "Time: " + ", ".join(f"{stage} {value:.0f} s" for stage, value in seconds.items()) + ".",
    ]


class _timed:
    def __init__(self, seconds: dict[str, float], stage: str) -> None:
        self.seconds, self.stage = seconds, stage

    def __enter__(self) -> None:
        self.began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds[self.stage] = time.perf_counter() - self.began
