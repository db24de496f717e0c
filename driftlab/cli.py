"""The command line: each subcommand is a thin wrapper over functions that a notebook calls.

Nothing heavy is imported before a subcommand runs, so ``driftlab --help`` answers at once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional

from driftlab.errors import DriftlabError

DType = Literal["float32", "bfloat16", "float16"]


def demo(out: Path = Path("runs/demo"), device: str = "cpu") -> None:
    """Record SmolLM2, replay and probe the six shipped drafters, write report, panels and rows.

    Args:
        out: folder for report.html, summary.csv, rows.parquet and the panels.
        device: where target and drafters run.
    """
    from driftlab.demo import run_demo

    summary = run_demo(out, device=device, progress=_bar())
    print(summary.to_string(index=False, float_format=lambda x: f"{x:.3f}"))
    print(f"\n{out / 'report.html'}")


def record(
    out: Positional[Path],
    prompts: str = "default",
    self_prompts: int | None = None,
    target: str = "smollm2",
    max_new_tokens: int | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    template: bool = True,
    limit: int | None = None,
    aux_layers: tuple[int, ...] | None = None,
    device: str = "cpu",
    dtype: DType = "float32",
    store_dtype: DType | None = None,
    processes: int | None = None,
    slots: int = 96,
) -> None:
    """Let a target answer prompts and keep its states. Stopped at any moment, the same command goes on.

    Args:
        out: folder to write.
        prompts: a .jsonl or .json file (MT-Bench, ShareGPT or OpenAI shape), or "default": the project's 80.
        self_prompts: let the target write that many user messages itself and answer them, in place of ``prompts``: training
            text. States are then stored in bfloat16 by default.
        target: "smollm2", a Hugging Face id, or a local folder.
        max_new_tokens: length limit of an answer; default 128, with --self-prompts 192.
        temperature: 0 is greedy.
        top_k: 0 is off.
        top_p: 1 is off.
        seed: of the sampling.
        template: render the chat template; off: raw text.
        limit: take that many prompts, spread evenly over the categories.
        aux_layers: captured states; default 2, N/2, N-3.
        device: where the target runs.
        dtype: of the target.
        store_dtype: of the stored aux states; default the target's.
        processes: with --self-prompts, each with a copy of the target; default one a core.
        slots: with --self-prompts, conversations that each process decodes together.
    """
    from driftlab.prompts import evenly, load_prompts

    store = {} if store_dtype is None else {"store_dtype": _dtype(store_dtype)}
    sampling: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    if self_prompts is not None:
        if prompts != "default" or limit is not None or not template:
            raise DriftlabError(
                "--self-prompts makes its own prompts with the chat template: leave out the options of others"
            )
        model = _target(target, device, dtype, aux_layers)
        trajectory = model.record_self_prompts(
            self_prompts,
            max_new_tokens=192 if max_new_tokens is None else max_new_tokens,
            processes=processes,
            slots=slots,
            out=out,
            progress=_bar(),
            **sampling,
            **store,
        )
    else:
        loaded = load_prompts(prompts)
        loaded = loaded if limit is None else evenly(loaded, limit)
        model = _target(target, device, dtype, aux_layers)
        trajectory = model.record(
            loaded,
            max_new_tokens=128 if max_new_tokens is None else max_new_tokens,
            template=template,
            out=out,
            progress=_bar(),
            **sampling,
            **store,
        )
    stops = sum(entry.finish == "stop" for entry in trajectory.entries)
    print(f"{out}: {len(trajectory)} sequences, {trajectory.answer_tokens} answer tokens, {stops} ended by EOS")
    print(f"target {trajectory.spec.label}; states {list(trajectory.aux_layers)}; sink {_sink_words(trajectory)}")


def train(
    recording: Positional[Path],
    out: Positional[Path],
    variant: Literal["eagle3", "fc_norm", "norm_output", "eagle31"] = "eagle31",
    draft_vocab: int = 8192,
    ttt: int = 4,
    loss: Literal["soft_ce", "kl", "alpha", "lambda"] = "soft_ce",
    lr: float = 1e-3,
    batch_size: int = 8,
    accumulate: int = 1,
    epochs: float = 1.0,
    negatives: int = 0,
    stride: int = 1,
    held_out: float = 0.05,
    checked: int = 32,
    seed: int = 0,
    order_seed: int | None = None,
    device: str = "cpu",
) -> None:
    """Train a drafter of a variant on a recording. Stopped at any moment, the same command goes on.

    Args:
        recording: folder that `driftlab record` wrote.
        out: folder for the drafter.
        variant: setting of the two switches.
        draft_vocab: size of the draft vocabulary, chosen on the recording.
        ttt: depths unrolled in training.
        loss: soft cross-entropy, KL, or the acceptance losses alpha and lambda.
        lr: learning rate.
        batch_size: sequences a micro-batch.
        accumulate: micro-batches an optimiser step.
        epochs: passes over the recording.
        negatives: 0: exact sums over the draft vocabulary; else sample so many columns (faster).
        stride: beyond depth 1 unroll one start in so many (faster).
        held_out: share of the conversations that is not trained on; the weights with the largest tau there are kept. 0: none.
        checked: held-out conversations measured at intervals.
        seed: of the first weights and, by default, of the order of the data.
        order_seed: of the order of the data.
        device: where to train.
    """
    from driftlab import VARIANTS, Drafter, TrainConfig, Trajectory, choose_draft_vocab
    from driftlab import train as run
    from driftlab.devices import usable_device
    from driftlab.training import held_out_numbers, split
    from driftlab.vocabulary import coverage

    trajectory = Trajectory.open(recording)
    learning, held = split(trajectory, held_out) if held_out else (trajectory, None)
    size = min(draft_vocab, trajectory.spec.vocab_size)
    vocab = choose_draft_vocab(learning, size)
    config = VARIANTS[variant].for_target(trajectory, draft_vocab_size=size)
    drafter = Drafter(config, trajectory, draft_vocab=vocab, seed=seed).to(usable_device(device))
    settings = TrainConfig(
        ttt=ttt,
        loss=loss,
        lr=lr,
        batch_size=batch_size,
        accumulate=accumulate,
        epochs=epochs,
        negatives=negatives,
        stride=stride,
        seed=seed if order_seed is None else order_seed,
    )
    few = None if held is None else held.subset(range(min(checked, len(held))))
    run(drafter, learning, settings, out=out, held_out=few, progress=_bar())
    print(
        f"{out}: {variant}; the draft vocabulary holds {coverage(vocab, learning):.1%} of the answers trained on",
        end="",
    )
    if held is None:
        print("; nothing was held out")
        return
    rest = held.subset(range(checked, len(held))) if len(held) > checked else held
    who = (
        f"the {len(rest)} held-out conversations that chose no weights"
        if len(held) > checked
        else (f"the {len(rest)} held-out conversations, which chose the weights: a little flattering")
    )
    numbers = ", ".join(f"{k.removeprefix('held_out_')} {v:.3f}" for k, v in held_out_numbers(drafter, rest).items())
    print(f" and {coverage(vocab, held):.1%} of those held out\n{who}, K = 8: {numbers}")


def probe(
    recording: Positional[Path],
    drafters: Positional[tuple[Path, ...]],
    out: Path = Path("runs/probe.parquet"),
    depth: int = 8,
    feed: Literal["text", "own"] = "own",
    recent: tuple[int, ...] = (8,),
    sink: tuple[int, ...] | None = None,
    device: str = "cpu",
) -> None:
    """Measure attention mass, entropy and state norms per draft depth; write them as rows and print the means.

    Args:
        recording: folder that `driftlab record` wrote.
        drafters: one or more drafter folders, or names of shipped drafters (smollm2-eagle31, ...).
        out: .parquet or .csv.
        depth: K.
        feed: own: the drafter's tokens (deployed behaviour); text: the recorded text.
        recent: windows w of the mass on the last w keys.
        sink: sink positions; default those found in the target.
        device: where the drafters run.
    """
    from driftlab import Trajectory
    from driftlab.intervals import weighted_mean
    from driftlab.measure import MIXED, probe_rows
    from driftlab.results import combine, provenance, write_rows

    trajectory = Trajectory.open(recording)
    trajectory = trajectory if sink is None else trajectory.with_sinks(sink)
    frames = [
        probe_rows(_drafter(path, trajectory, device), trajectory, name, depth=depth, feed=feed, recent=recent)
        for name, path in _named(drafters, out).items()
    ]
    rows = combine(frames, varying=MIXED)
    write_rows(out, rows, provenance({"recording": recording.name, "depth": depth, "feed": feed}))
    means = weighted_mean(rows, ["drafter", "quantity", "window", "depth"])
    table = means.pivot(index=["drafter", "quantity", "window"], columns="depth", values="value")
    print(table.to_string(float_format=lambda x: f"{x:.4g}", na_rep=""))
    print(f"\ntarget {trajectory.spec.label}; sink {_sink_words(trajectory)}; {out}")


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
    details: bool = False,
    drafts: Path | None = None,
    device: str = "cpu",
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
        details: also tau by position, context and category, and conditional acceptance by its parts.
        drafts: folder in which drafts are kept, so that another rule or a smaller K needs no drafting.
        device: where the drafters run.
    """
    from driftlab import DynamicTree, StaticTree, Trajectory
    from driftlab.account import account
    from driftlab.account import details as detailed
    from driftlab.measure import MIXED, replay_rows, tree_rows
    from driftlab.results import combine, provenance, write_rows

    engines = _engines(as_, log)
    sampled = {"draft_temperature": draft_temperature, "draft_top_k": draft_top_k, "draft_top_p": draft_top_p}
    shape = None
    if tree is not None or chains is not None:
        if (
            (tree is not None and chains is not None)
            or rule != "argmax"
            or any(v is not None for v in sampled.values())
        ):
            raise DriftlabError("--tree, --chains and sampled drafts are ways to draft: give one of them")
        if tree is not None and depth is not None:
            raise DriftlabError("the first number of --tree is its depth: leave --depth out")
        shape = StaticTree.chains(chains, depth or 8) if tree is None else DynamicTree(*tree)
    depth = 8 if depth is None else depth
    trajectory = Trajectory.open(recording)
    named = _named(drafters, out)
    loaded = {name: _drafter(path, trajectory, device) for name, path in named.items()}
    replayed = {}
    for name, drafter in loaded.items():
        how: dict[str, Any] = {"drafts": drafts, "progress": _bar()}
        if shape is None:
            replayed[name] = replay_rows(drafter, trajectory, name, depth=depth, rule=rule, **sampled, **how)
        else:
            replayed[name] = tree_rows(drafter, trajectory, name, shape, **how)
    rows = combine([frame for frame, _ in replayed.values()], varying=MIXED)
    settings = {"recording": recording.name, "depth": depth if shape is None else shape.depth, "rule": rule, **sampled}
    write_rows(out, rows, provenance({**settings, "tree": None if shape is None else shape.label}))
    simulations = {name: simulation for name, (_, simulation) in replayed.items()}
    tables = account(simulations, trajectory)
    if details:
        lengths = {name: drafter.config.trained_length for name, drafter in loaded.items()}
        tables |= detailed(simulations, trajectory, trained_lengths=lengths)
    for title, table in tables.items():
        print(f"{title}\n{_words(table)}\n")
    _print_engines(engines, log, simulations)
    print(_said(trajectory, next(iter(simulations.values())), rule, shape), out, sep="; ")


def _engines(name: str | None, log: Path | None) -> tuple[str, ...]:
    """Names of the tools asked for; refused before any work."""
    from driftlab.engines.conventions import CONVENTIONS
    from driftlab.engines.logs import check_pair, read_engine_log

    if name is None:
        if log is not None:
            raise DriftlabError(
                f"--log is shown beside what a tool would print: add --as, one of {', '.join(CONVENTIONS)}"
            )
        return ()
    if name != "all" and name not in CONVENTIONS:
        raise DriftlabError(f"--as {name}: no such convention; choose from all, {', '.join(CONVENTIONS)}")
    if log is not None:
        if name == "all" or not log.is_file():
            raise DriftlabError(f"--log {log}: wants a file, and one tool in --as")
        check_pair(name, read_engine_log(log))
    return tuple(CONVENTIONS) if name == "all" else (name,)


def _print_engines(engines: tuple[str, ...], log: Path | None, simulations: dict[str, Any]) -> None:
    from driftlab.engines.conventions import engine_report
    from driftlab.engines.logs import beside, read_engine_log

    theirs = None if log is None else read_engine_log(log)
    for name, simulation in simulations.items():
        for engine in engines:
            report = engine_report(engine, simulation.histograms())
            if theirs is not None:
                print(
                    f"{name}, as {engine} would print it, beside {theirs.format} of {log}\n{_words(beside(report, theirs))}\n"
                )
                continue
            columns = ["name", "position", "value", "low", "high", "unit", "per", "bonus"]
            print(f"{name}, as {engine} would print it ({report.source})\n{_words(report.frame()[columns])}")
            for lost, why in report.left_out:
                print(f"  without {lost}: {why}")
            print()
    for line, why in theirs.skipped if theirs is not None else ():
        print(f"{log}, line {line}: {why}", file=sys.stderr)


def _words(table: Any) -> str:
    return table.to_string(index=False, float_format=lambda x: f"{x:.3f}", na_rep="")


def _said(trajectory: Any, simulation: Any, rule: str, tree: Any) -> str:
    there = trajectory.settings
    told = f"tau: emitted tokens / verify rounds, bonus token included, K = {simulation.depth}, 95 % over prompts; target T = "
    told += f"{there['temperature']:g}, top_k {there['top_k']}, top_p {there['top_p']:g}; drafts: {rule}"
    if tree is not None:
        told += f", {tree.label}"
    if (drafting := simulation.acceptance.drafting) is not None:
        told += f", T = {drafting.temperature:g}, top_k {drafting.top_k}, top_p {drafting.top_p:g}"
    return told


def main() -> None:
    """Entry point: dispatch, and turn a DriftlabError into one message on stderr (exit 2)."""
    try:
        tyro.extras.subcommand_cli_from_dict(
            {"demo": demo, "record": record, "train": train, "probe": probe, "simulate": simulate},
            prog="driftlab",
            description="Measure attention drift in speculative decoding.",
        )
    except DriftlabError as error:
        print(f"driftlab: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("driftlab: stopped. What was finished is kept; the same command goes on from there", file=sys.stderr)
        sys.exit(130)


def _bar() -> Any:
    from driftlab.progress import ProgressBar

    return ProgressBar()


def _dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)


def _target(name: str, device: str, dtype: str, aux_layers: tuple[int, ...] | None) -> Any:
    from driftlab import Target

    return Target.load(name, device=device, dtype=_dtype(dtype), aux_layers=aux_layers or None, progress=_bar())


def _drafter(path: Path, trajectory: Any, device: str) -> Any:
    from driftlab import Drafter
    from driftlab.devices import usable_device

    drafter = Drafter.load(path, trajectory).to(usable_device(device)).eval()
    for note in drafter.notes:
        print(f"{path.name}: {note}", file=sys.stderr)
    return drafter


def _named(paths: tuple[Path, ...], out: Path) -> dict[str, Path]:
    """Give each drafter folder the shortest name, from its end, that no other has; refuse ``out`` before any work."""
    if not paths:
        raise DriftlabError("name at least one drafter folder")
    if out.suffix not in (".parquet", ".csv"):
        raise DriftlabError(f"{out}: rows are written as .parquet or .csv")
    folders = [path.resolve() for path in paths]
    if len(set(folders)) < len(folders):
        raise DriftlabError("the same drafter folder is named twice")
    for parts in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-parts:]) for folder in folders]
        if len(set(names)) == len(names):
            break
    return dict(zip(names, paths, strict=True))


def _sink_words(trajectory: Any) -> str:
    report = trajectory.sink_report
    if tuple(report["positions"]) != trajectory.sinks:
        return f"positions {list(trajectory.sinks)} (given)"
    if not report["found"]:
        return f"position 0, assumed ({report['reason']})"
    top = report["top"][0]
    return f"position {top['position']} ({top['token']!r}, mean mass {top['mass']:.2f} in the target)"


if __name__ == "__main__":
    main()
