"""probe: where attention goes, how large the state is, what perturbations and interventions do to tau; rows, tables, a page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, UseAppendAction

from driftlab.cli.common import (
    DType,
    check_name,
    load_drafter,
    load_target,
    named,
    progress_bar,
    sink_words,
    table_words,
)
from driftlab.errors import DriftlabError

_DIFF_LINES = 16


def probe(
    paths: Positional[tuple[Path, ...]],
    target: str | None = None,
    prompts: str = "default",
    limit: int | None = None,
    max_new_tokens: int | None = None,
    perturb: Annotated[tuple[tuple[str, ...], ...], UseAppendAction] = (),
    intervene: Annotated[tuple[tuple[str, ...], ...], UseAppendAction] = (),
    window: Annotated[tuple[tuple[str, ...], ...], UseAppendAction] = (),
    target_window: tuple[int, int] | None = None,
    out: Path = Path("runs/probe.parquet"),
    depth: int = 8,
    feed: Literal["text", "own"] = "own",
    recent: tuple[int, ...] = (8,),
    heads: str | None = None,
    heat: str = "first",
    sink: tuple[int, ...] | None = None,
    trained_depth: int | None = None,
    drafts: Path | None = None,
    device: str = "cpu",
    dtype: DType = "float32",
    backend: Literal["auto", "torch", "triton"] = "auto",
    given: tuple[str, ...] = (),
) -> None:
    """Probe drafters: attention mass, entropy, norms and match by depth, tau, the verdict on drift; under perturbed inputs and
    with interventions. Writes rows, and an HTML page with panels beside them.

    Either a recording and drafters, or drafters alone: then a target answers prompts, once for each perturbation. Recordings
    are cached: stopped at any moment, the same command goes on.

    Args:
        paths: a folder that `driftlab record` wrote, then drafters; or drafters alone (folders, files, Hugging Face ids, names
            of shipped ones).
        target: "smollm2" (the default without a recording), a Hugging Face id, or a local folder. With a recording only its
            tokenizer is used, for the text of tokens.
        prompts: a .jsonl or .json file, or "default": the project's 80. Without a recording.
        limit: take that many prompts, spread evenly over the categories. Of a recording: the first ones.
        max_new_tokens: length limit of an answer; default 64.
        perturb: inputs beside the plain one (chat; none where the target has no template): none, bos=on, system=long,
            before=2000, none+bos=off, ... Those that change nothing are left out, with the reason. An unknown one lists all.
        intervene: settings beside the plain drafter: noise:hidden:0.5, magnitude:fused, pin:sink, sink:drop, ...; several at
            once in one argument, joined by " + ". An unknown one lists all.
        window: draft windows beside the plain drafter: 512, 512:carried=sink, 512:carried=4:positions=renumbered.
        target_window: the target attends to the last W keys and the first S: two numbers. Without a recording.
        out: .parquet or .csv; the page is beside it as .html, its panels in a folder.
        depth: K.
        feed: of the probes; own: the drafter's tokens (deployed behaviour); text: the recorded text.
        recent: windows w of the mass on the last w keys.
        heads: a table for single heads, and heat maps of them: "0,3" or "all".
        heat: id of the prompt whose masses on single keys are drawn; "first" or "none".
        sink: sink positions; default those found in the target.
        trained_depth: depth that training unrolled to, of drafters whose files do not say.
        drafts: folder in which drafts are kept, so that the same replay needs no drafting.
        device: where target and drafters run.
        dtype: of the target.
        backend: auto: fused Triton kernels on CUDA, plain torch elsewhere.
        given: conventions that you know better than the drafters' files, as name=value (see `driftlab inspect`).
    """
    from driftlab.measure import template_of
    from driftlab.probe_panels import heat_panels, panels
    from driftlab.probe_report import check_heads, notes, tables
    from driftlab.probing import ProbeConfig, check_settings, parse_settings
    from driftlab.probing import probe as run
    from driftlab.results import provenance, write_rows

    recording, names = _parted(paths)
    folders = named(names, out, given)
    perturb_keys, intervene_keys, widths = (
        [key for keys in lists for key in keys] for lists in (perturb, intervene, window)
    )
    asked_settings = [*intervene_keys, *(f"window:{words}" for words in widths)]
    wanted = parse_settings(asked_settings)
    for name, numbers in (("depth", (depth,)), ("recent", recent), ("limit", () if limit is None else (limit,))):
        if any(number < 1 for number in numbers):
            raise DriftlabError(f"--{name} {' '.join(map(str, numbers))}: numbers from 1 on")
    making = {"--prompts": prompts != "default", "--max-new-tokens": max_new_tokens is not None}
    making |= {"--perturb": bool(perturb_keys), "--target-window": target_window is not None}
    making |= {"--dtype": dtype != "float32" and target is None}
    _check_perturbations(perturb_keys)
    if recording is not None:
        if said := [name for name, there in making.items() if there]:
            raise DriftlabError(
                f"{recording} is a recording, made already, and {', '.join(said)} would want another: leave it out, "
                "and name the target (--target)"
            )
        opened = _opened(recording, limit, sink)
        loaded = {name: load_drafter(path, opened, device, given) for name, path in folders.items()}
        model = None if target is None else load_target(target, device, dtype, (0,))
        inputs, refused, chosen = {template_of(opened): opened}, {}, ()
        listed = _checked(
            loaded, wanted, heads, heat, [entry.id for entry in opened.entries], check_settings, check_heads
        )
    else:
        asked = _prompts(prompts, limit)
        print(f"loading {target or 'smollm2'} and {', '.join(folders)}", file=sys.stderr)
        model = load_target(target or "smollm2", device, dtype, None, tuple(map(str, names)), given)
        loaded = {name: load_drafter(path, model, device, given) for name, path in folders.items()}
        listed = _checked(loaded, wanted, heads, heat, [prompt.id for prompt in asked], check_settings, check_heads)
        inputs, refused, chosen = _recorded(model, asked, perturb_keys, max_new_tokens or 64, target_window, sink)
    config = ProbeConfig(
        depth=depth,
        feed=feed,
        recent=recent,
        settings=wanted,
        drafts=drafts,
        trained_depth=trained_depth,
        backend=backend,
    )
    bar = progress_bar()
    found = run(loaded, inputs, config, progress=bar)
    settings = {"recording": None if recording is None else recording.name, "depth": depth, "feed": feed}
    record = provenance({**settings, "inputs": list(inputs), "settings": asked_settings})
    write_rows(out, found.rows, record)
    folder = out.with_name(f"{out.stem}_panels")
    drawn = panels(found, folder, bar)
    first = next(iter(inputs.values()))
    if heat != "none":
        decode = None if model is None else lambda token: model.tokenizer.decode([token])
        drawn |= heat_panels(found, folder, first.entries[0].id if heat == "first" else heat, listed, decode)
    made = tables(found)
    made |= _more(found, listed, chosen, () if recording is not None else asked, model)
    said = notes(found, refused, [f"{key}: sink {sink_words(one)}" for key, one in inputs.items()])
    _page(out.with_suffix(".html"), found, made, drawn, said, record)
    _print(found, made, refused)
    print(f"\ntarget {first.spec.label}; K = {depth}; sink {sink_words(first)}; {out}; {out.with_suffix('.html')}")


def _parted(paths: tuple[Path, ...]) -> tuple[Path | None, tuple[Path, ...]]:
    """Tell a recording in front of the drafters from drafters alone; refuse paths that are neither."""
    if paths and any((paths[0] / name).is_file() for name in ("trajectory.json", "recording.json")):
        return paths[0], paths[1:]
    for path in paths:
        check_name(path)
        if not path.exists() and (path.is_absolute() or len(path.parts) > 2):  # a Hugging Face id is owner/name
            raise DriftlabError(f"{path}: there is no such folder or file, neither a recording nor a drafter")
    return None, paths


def _opened(recording: Path, limit: int | None, sink: tuple[int, ...] | None) -> Any:
    from driftlab import Trajectory

    trajectory = Trajectory.open(recording)
    trajectory = trajectory if limit is None else trajectory.subset(range(min(limit, len(trajectory))))
    return trajectory if sink is None else trajectory.with_sinks(sink)


def _check_perturbations(keys: list[str]) -> None:
    from driftlab.perturbations import Perturbation

    for key in keys:
        Perturbation.parse(key)


def _prompts(source: str, limit: int | None) -> list[Any]:
    from driftlab.prompts import evenly, load_prompts

    loaded = load_prompts(source)
    return loaded if limit is None else evenly(loaded, limit)


def _checked(
    drafters: dict[str, Any],
    wanted: Any,
    heads: str | None,
    heat: str,
    ids: list[str],
    check_settings: Any,
    check_heads: Any,
) -> list[int]:
    """Refuse what cannot be, before any long work; return the heads that are listed."""
    check_settings(drafters, wanted)
    if heat not in ("first", "none") and heat not in ids:
        few = ", ".join(ids[:8]) + (", ..." if len(ids) > 8 else "")
        raise DriftlabError(f"--heat {heat}: there is no such prompt among {few}")
    return [] if heads is None else check_heads(heads, drafters)


def _recorded(
    model: Any, prompts: list[Any], perturb: list[str], tokens: int, window: tuple[int, int] | None, sink: Any
) -> tuple[dict[str, Any], dict[str, str], tuple[Any, ...]]:
    """Record the prompts under each perturbation that applies."""
    from contextlib import nullcontext

    from driftlab.probing import usable_inputs

    kept, refused = usable_inputs(perturb, prompts, model.tokenizer, room=model.spec.max_positions - tokens)
    for key, why in refused.items():
        print(f"perturbation {key} is left out: {why}", file=sys.stderr)
    inputs, bar = {}, progress_bar()
    with nullcontext() if window is None else model.attention(window=window[0], sinks=window[1]):
        for perturbation in kept:
            one = model.record(
                prompts,
                max_new_tokens=tokens,
                perturbation=perturbation,
                progress=lambda what, done, total, key=perturbation.key: bar(f"{key}: {what}", done, total),
            )
            inputs[perturbation.key] = one if sink is None else one.with_sinks(sink)
    return inputs, refused, tuple(kept[1:])


def _more(found: Any, heads: list[int], perturbations: Any, prompts: Any, model: Any) -> dict[str, Any]:
    """Tables of single heads and of what the perturbations changed."""
    from driftlab.probe_report import diff_table, head_table

    made = {"Single heads, plain, depths 1 and K": head_table(found, heads)} if heads else {}
    for one in perturbations:
        made[f"Token diff: {one.key}, prompt {prompts[0].id}"] = diff_table(one, prompts, model.tokenizer)
    return made


def _page(path: Path, found: Any, made: Any, drawn: Any, said: list[str], record: Any) -> None:
    from driftlab.probe_report import verdict_words
    from driftlab.report import write_report

    first = next(iter(found.inputs.values()))
    lead = (
        f"Target: {first.spec.label}. Drafters: {', '.join(found.drafters)}. Inputs: {', '.join(found.inputs)}. "
        f"{len(first)} prompts, "
        f"{first.answer_tokens} answer tokens as {found.plain_input}; K = {found.config.depth}; probes {found.config.feed}-fed."
    )
    verdicts = [f"{name}: {verdict_words(one)}." for name, one in found.verdicts.items()]
    write_report(
        path, title="What the drafters attend to, by depth", lead="\n\n".join([lead, *verdicts]), tables=made, panels=drawn,
        notes=said, provenance=record,
    )  # fmt: skip


def _print(found: Any, made: dict[str, Any], refused: dict[str, str]) -> None:
    from driftlab.probe_report import verdict_words

    for title, table in made.items():
        if title.startswith("Token diff"):
            print(f"{title}")
            for row in table.head(_DIFF_LINES).itertuples():
                print(f"  {row.mark or ' '} {row.place:>5} {row.id:>7} {row.token}")
            if len(table) > _DIFF_LINES:
                print(f"  ... {len(table) - _DIFF_LINES} more lines on the page")
            print()
            continue
        print(f"{title}\n{table_words(table)}\n")
    for name, one in found.verdicts.items():
        print(f"{name}: {verdict_words(one)}")
    for run, reports in found.pins.items():
        print(*(f"{run.drafter}, {run.input}, {run.setting}: {words}" for words in reports), sep="\n")
    for key, why in refused.items():
        print(f"left out: {key}: {why}")
