"""The command line: each subcommand is a thin wrapper over functions that a notebook calls.

Nothing heavy is imported before a subcommand runs, so ``driftlab --help`` answers at once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

import tyro
from tyro.conf import Positional

from driftlab.errors import DriftlabError

DType = Literal["float32", "bfloat16", "float16"]


def demo(out: Path = Path("runs/demo"), device: str = "cpu") -> None:
    """Record SmolLM2, train the four small drafters, replay and probe them, write report, panels and rows.

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
    target: str = "smollm2",
    max_new_tokens: int = 128,
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
) -> None:
    """Let a target answer prompts and keep its states. Stopped at any moment, the same command goes on.

    Args:
        out: folder to write.
        prompts: a .jsonl or .json file (MT-Bench, ShareGPT or OpenAI shape), or "default": the project's 80.
        target: "smollm2", a Hugging Face id, or a local folder.
        max_new_tokens: length limit of an answer.
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
    """
    from driftlab.prompts import evenly, load_prompts

    loaded = load_prompts(prompts)
    loaded = loaded if limit is None else evenly(loaded, limit)
    model = _target(target, device, dtype, aux_layers)
    trajectory = model.record(
        loaded,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        template=template,
        out=out,
        store_dtype=None if store_dtype is None else _dtype(store_dtype),
        progress=_bar(),
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
    lr: float = 1e-3,
    batch_size: int = 8,
    epochs: float = 1.0,
    seed: int = 0,
    device: str = "cpu",
) -> None:
    """Train a drafter of a variant on a recording. Stopped at any moment, the same command goes on.

    Args:
        recording: folder that `driftlab record` wrote.
        out: folder for the drafter.
        variant: setting of the two switches.
        draft_vocab: size of the draft vocabulary, chosen on the recording.
        ttt: depths unrolled in training.
        lr: learning rate.
        batch_size: sequences a step.
        epochs: passes over the recording.
        seed: of the first weights and of the order of the data.
        device: where to train.
    """
    from driftlab import VARIANTS, Drafter, TrainConfig, Trajectory, choose_draft_vocab
    from driftlab import train as run
    from driftlab.devices import usable_device
    from driftlab.training import coverage

    trajectory = Trajectory.open(recording)
    size = min(draft_vocab, trajectory.spec.vocab_size)
    vocab = choose_draft_vocab(trajectory, size)
    config = VARIANTS[variant].for_target(trajectory, draft_vocab_size=size)
    drafter = Drafter(config, trajectory, draft_vocab=vocab, seed=seed).to(usable_device(device))
    settings = TrainConfig(ttt=ttt, lr=lr, batch_size=batch_size, epochs=epochs, seed=seed)
    run(drafter, trajectory, settings, out=out, progress=_bar())
    print(f"{out}: {variant}; the draft vocabulary holds {coverage(vocab, trajectory):.1%} of the recording's answers")


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
        drafters: one or more drafter folders.
        out: .parquet or .csv.
        depth: K.
        feed: own: the drafter's tokens (deployed behaviour); text: the recorded text.
        recent: windows w of the mass on the last w keys.
        sink: sink positions; default those found in the target.
        device: where the drafters run.
    """
    from driftlab import Trajectory
    from driftlab.measure import MIXED, probe_rows
    from driftlab.results import combine, provenance, weighted_mean, write_rows

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
    depth: int = 8,
    device: str = "cpu",
) -> None:
    """Replay drafters on a recording: tau with its interval, acceptance by depth. Exact, without the target.

    Args:
        recording: folder that `driftlab record` wrote.
        drafters: one or more drafter folders.
        out: .parquet or .csv.
        depth: K, drafted tokens a round.
        device: where the drafters run.
    """
    from driftlab import Trajectory
    from driftlab.measure import MIXED, replay_rows
    from driftlab.results import combine, provenance, write_rows

    trajectory = Trajectory.open(recording)
    frames = [
        replay_rows(_drafter(path, trajectory, device), trajectory, name, depth=depth, progress=_bar())[0]
        for name, path in _named(drafters, out).items()
    ]
    rows = combine(frames, varying=MIXED)
    write_rows(out, rows, provenance({"recording": recording.name, "depth": depth}))
    pooled = rows[rows["quantity"].isin(["tau", "all_starts_mean"])]
    columns = ["drafter", "variant", "quantity", "value", "low", "high", "n"]
    print(pooled[columns].to_string(index=False, float_format=lambda x: f"{x:.3f}"))
    print(f"\ntau: emitted tokens / verify rounds, bonus token included, K = {depth}, 95 % over prompts; {out}")


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
