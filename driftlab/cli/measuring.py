"""What is measured on a recording: simulate."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional

from driftlab.cli.common import load_drafter, named, progress_bar, table_words
from driftlab.errors import DriftlabError


def simulate(
    recording: Positional[Path],
    drafters: Positional[tuple[Path, ...]],
    out: Path = Path("runs/simulate.parquet"),
    depth: int | None = None,
    rule: Literal["argmax", "rejection", "block", "exact", "q1"] = "argmax",
    draft_temperature: float | None = None,
    draft_top_k: int | None = None,
    draft_top_p: float | None = None,
    tree: tuple[int, int, int] | None = None,
    chains: int | None = None,
    as_: Annotated[str | None, tyro.conf.arg(name="as")] = None,
    log: Path | None = None,
    log_format: str = "auto",
    details: bool = False,
    drafts: Path | None = None,
    device: str = "cpu",
    backend: Literal["auto", "torch", "triton"] = "auto",
    given: tuple[str, ...] = (),
) -> None:
    """Replay drafters on a recording: tau with its interval, and what other estimators would say. Without the target.

    With several drafters each is compared with the first, on the same prompts, p-values adjusted for their number.

    Args:
        recording: folder that `driftlab record` wrote.
        drafters: one or more drafter folders, or names of shipped drafters (smollm2-eagle31, ...).
        out: .parquet or .csv.
        depth: K, drafted tokens a round; default 8.
        rule: drafts are the arg max, or sampled and verified by this rule (in expectation, given the text).
        draft_temperature: of sampled drafts; default the recording's.
        draft_top_k: of sampled drafts, 0 off; default the recording's.
        draft_top_p: of sampled drafts, 1 off; default the recording's.
        tree: draft a dynamic tree a round: depth, nodes expanded a depth (and children of each), nodes that stay.
        chains: draft so many arg-max chains a round, from the most probable first tokens; of ``depth`` tokens each.
        as_: say what this tool would print, e.g. vllm; "all" for every tool.
        log: a tool's log or output file, shown beside what ``--as`` says it would print.
        log_format: of ``log``, where it cannot be told from the text: vllm-log, sglang-log, ...
        details: also tau by position, context and category, and conditional acceptance by its parts.
        drafts: folder in which drafts are kept, so that another rule or a smaller K needs no drafting.
        device: where the drafters run.
        backend: auto: fused Triton kernels on CUDA, plain torch elsewhere.
        given: conventions that you know better than the drafters' files, as name=value (see `driftlab inspect`).
    """
    from driftlab import Trajectory
    from driftlab.account import account, legend
    from driftlab.account import details as detailed
    from driftlab.measure import MIXED, replay_rows, tree_rows
    from driftlab.results import combine, provenance, write_rows

    engines, theirs = _engines(as_, log, log_format)
    sampled = {"draft_temperature": draft_temperature, "draft_top_k": draft_top_k, "draft_top_p": draft_top_p}
    shape = _shape(tree, chains, depth, rule, sampled)
    depth = 8 if depth is None else depth
    trajectory = Trajectory.open(recording)
    if rule != "argmax" and not trajectory.settings["temperature"] and not draft_temperature:
        raise DriftlabError(
            f"--rule {rule} samples the drafts, and {recording} is greedy text (T = 0), which has no temperature to take: give "
            "--draft-temperature, or a recording made with --temperature"
        )
    folders = named(drafters, out, given)
    loaded = {name: load_drafter(path, trajectory, device, given) for name, path in folders.items()}
    replayed = {}
    for name, drafter in loaded.items():
        how: dict[str, Any] = {"drafts": drafts, "progress": progress_bar()}
        with drafter.using(backend):
            if shape is None:
                replayed[name] = replay_rows(drafter, trajectory, name, depth=depth, rule=rule, **sampled, **how)
            else:
                replayed[name] = tree_rows(drafter, trajectory, name, shape, **how)
    rows = combine([frame for frame, _ in replayed.values()], varying=MIXED)
    settings = {"recording": recording.name, "depth": depth if shape is None else shape.depth, "rule": rule, **sampled}
    trees = None if shape is None else ", ".join(rows["drafting"].unique())
    write_rows(out, rows, provenance({**settings, "tree": trees}))
    simulations = {name: simulation for name, (_, simulation) in replayed.items()}
    tables = account(simulations, trajectory)
    if details:
        lengths = {name: drafter.config.trained_length for name, drafter in loaded.items()}
        tables |= detailed(simulations, trajectory, trained_lengths=lengths)
    for title, table in tables.items():
        print(f"{title}\n{table_words(table)}\n")
    print(*legend(tables), "", sep="\n")
    _print_engines(engines, theirs, simulations)
    for name, drafter in loaded.items():
        for words in _reach(drafter, trajectory):
            print(f"{name}: {words}")
    print(_said(trajectory, next(iter(simulations.values())), rule, trees), out, sep="; ")


def _reach(drafter: Any, trajectory: Any) -> list[str]:
    """What a drafter cannot propose, and what of the text is longer than what it was trained on."""
    from driftlab.vocabulary import coverage

    said = []
    if len(drafter.draft_vocab) < trajectory.spec.vocab_size:
        said.append(
            f"its draft vocabulary holds {coverage(drafter.draft_vocab, trajectory):.1%} of the answers' tokens"
        )
    if trained := drafter.config.trained_length:
        beyond = sum(entry.length > trained for entry in trajectory.entries)
        if beyond:
            said.append(
                f"{beyond} of {len(trajectory)} texts are longer than the {trained} tokens it was trained on (--details)"
            )
    return said


def _shape(
    tree: tuple[int, int, int] | None, chains: int | None, depth: int | None, rule: str, sampled: dict[str, Any]
) -> Any:
    """The tree that is asked for, None for a chain; refused before any work what does not go together."""
    from driftlab import DynamicTree, StaticTree

    given = any(value is not None for value in sampled.values())
    if tree is None and chains is None:
        if rule == "argmax" and given:
            raise DriftlabError(
                "--draft-temperature, --draft-top-k and --draft-top-p are of sampled drafts: add --rule rejection"
            )
        return None
    if (tree is not None and chains is not None) or rule != "argmax" or given:
        raise DriftlabError(
            "--tree, --chains and sampled drafts (--rule, --draft-...) are ways to draft: give one of them. A tree of sampled "
            "drafts is for Python: SampledTree and accept_siblings in driftlab.siblings"
        )
    if tree is None:
        return StaticTree.chains(chains, depth or 8)
    if depth not in (None, tree[0]):
        raise DriftlabError(
            f"the first number of --tree is its depth, {tree[0]}, and --depth says {depth}: leave one out"
        )
    return DynamicTree(*tree)


def _engines(name: str | None, log: Path | None, log_format: str) -> tuple[tuple[str, ...], Any]:
    """Names of the tools asked for, and the log, None without one; refused before any work."""
    from driftlab.engines.conventions import CONVENTIONS
    from driftlab.engines.logs import check_pair, read_engine_log

    if name is None:
        if log is not None:
            raise DriftlabError(
                f"--log is shown beside what a tool would print: add --as, one of {', '.join(CONVENTIONS)}"
            )
        return (), None
    if name != "all" and name not in CONVENTIONS:
        raise DriftlabError(f"--as {name}: no such convention; choose from all, {', '.join(CONVENTIONS)}")
    theirs = None
    if log is not None:
        if name == "all" or not log.is_file():
            raise DriftlabError(f"--log {log}: wants a file, and one tool in --as")
        theirs = read_engine_log(log, log_format)
        check_pair(name, theirs)
    return tuple(CONVENTIONS) if name == "all" else (name,), theirs


def _print_engines(engines: tuple[str, ...], theirs: Any, simulations: dict[str, Any]) -> None:
    from driftlab.engines.conventions import engine_report
    from driftlab.engines.logs import beside
    from driftlab.histogram import in_units

    for name, simulation in simulations.items():
        for engine in engines:
            report = engine_report(engine, simulation.histograms())
            if theirs is not None:
                print(f"{name}, as {engine} would print it, beside {theirs.format} of {theirs.source}")
                print(f"{table_words(in_units(beside(report, theirs)))}\n")
                continue
            print(f"{name}, as {engine} would print it ({report.source})\n{table_words(report.printed())}")
            if report.note:
                print(f"  note: {report.note}")
            for lost, why in report.left_out:
                print(f"  without {lost}: {why}")
            print()
    for line, why in theirs.skipped if theirs is not None else ():
        print(f"{theirs.source}, line {line}: {why}", file=sys.stderr)


def _said(trajectory: Any, simulation: Any, rule: str, trees: str | None) -> str:
    there = trajectory.settings
    told = f"tau: emitted tokens / verify rounds, bonus token included, K = {simulation.depth}, 95 % over prompts; target T = "
    told += f"{there['temperature']:g}, top_k {there['top_k']}, top_p {there['top_p']:g}; drafts: {rule}"
    if trees is not None:
        told += f", {trees}"
    elif rule == "argmax" and there["temperature"]:
        told += " (the default; so vLLM and SGLang draft unless told otherwise. --rule rejection: drafts sampled too)"
    if (drafting := simulation.acceptance.drafting) is not None:
        told += f", T = {drafting.temperature:g}, top_k {drafting.top_k}, top_p {drafting.top_p:g}"
    return told
