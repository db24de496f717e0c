"""From a run's folder to the small tables that the figures read (no torch).

    demo_curves                   rows.parquet of ``driftlab demo`` (or of ``probe``, ``simulate``, with what they have)
    estimator_bias, survivors     estimator_bias.csv of ``python experiments/estimator_bias.py``
    noise, template, window,      the tables of ``python experiments/lab.py``
    pin, lab_depth
    attention_map                 attention_map.csv of ``python -m paper_figs.attention_map``
    doctor_confusion              confusion.csv of ``python experiments/doctor_confusion.py``
    study                         cells of ``python experiments/ablate.py``
    kernels                       aot_*.txt, the kernels' compile reports
    published, throughput         experiments/data/ of this repository (no run)

A table's first line says what its numbers are, n, what intervals are over, and the command.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pandas as pd

from driftlab.errors import DriftlabError
from driftlab.files import atomic
from driftlab.plotting import caption, curve
from driftlab.results import read_rows
from paper_figs.study import study as study_table
from paper_figs.style import COMMAND, Table

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
RECENT = 8
CURVES = (
    *("match", "rms_feedback", "mass_sink", "mass_prompt", "mass_context", "mass_self"),
    *("mass_self_null", "recent", "entropy_relative"),
)
ESTIMATORS = ("bias_tau", "bias_all_starts_mean", "bias_product_of_rates", "bias_iid_formula", "first_draft_change")
TERMS = (
    *("conditional_walk", "conditional_all_starts", "ability"),
    *("survivor_selection", "start_selection", "residual"),
)
MEASURES = ("growth", "drift_tv", "drift_tv_null", "sink_loss", "recent_gain", "self_gain", "spread_kept")
TAU = ("drafter", "tau", "low", "high", "rounds")
MATCH = ("match_2_to_K", "match_low", "match_high")
LAB = {
    "template": (*TAU, "input"),
    "window": (*TAU, *MATCH, "setting"),
    "noise": (*TAU, "path", "alpha", "percent", "percent_low", "percent_high"),
    "pin": (*TAU, *MATCH, "setting", "sink", "sink_mass"),
    "depth": ("quantity", "drafter", "layer", "depth", "value", "low", "high", "n"),
}
CASES = ("case", "base", "factors", "honest", "outcome", "named", "how", "doubted")
CONCURRENCIES = (1, 2, 4, 8, 16)


class Missing(DriftlabError):
    """A run does not have what a table is made of."""


def write(table: Table, path: Path) -> None:
    """Write a table, its words first."""
    with atomic(path) as temporary:
        body = table.frame.to_csv(index=False, float_format="%.6g", lineterminator="\n")
        temporary.write_text(f"# {table.words}\n{body}", encoding="utf-8")


# ---------------------------------------------------------------------------------------------- rows


def demo_curves(run: Path) -> Table:
    """Pool the plain rows over prompts (and heads), a line a drafter, quantity and depth."""
    rows = _plain(read_rows(_rows_of(run)))
    rows = rows[rows["quantity"].isin(CURVES) & (rows["depth"] > 0)]
    if rows.empty:
        raise Missing(f"{run}: its rows have none of {', '.join(CURVES)} by depth")
    recent = rows["quantity"] == "recent"
    windows = sorted(rows.loc[recent, "window"].unique())
    window = RECENT if RECENT in windows else (windows or [0])[0]
    rows = rows[~recent | (rows["window"] == window)]
    frames = []
    for (ttt, feed, quantity), some in rows.groupby(["ttt", "feed", "quantity"], sort=False):
        frames.append(curve(some, quantity).assign(quantity=quantity, ttt=ttt, feed=feed))
    columns = [
        "quantity",
        "drafter",
        "variant",
        "fc_norm",
        "norm_output",
        "ttt",
        "feed",
        "depth",
        "value",
        "low",
        "high",
        "n",
    ]
    frame = pd.concat(frames)[columns]
    order = {name: place for place, name in enumerate(CURVES)}
    frame = frame.sort_values("quantity", key=lambda names: names.map(order), kind="stable")
    words = f"{caption(rows.assign(ttt=0, feed='', rule=''))} · recent: the last {window} keys"
    return Table(frame, f"{words}{COMMAND}driftlab demo")


def _rows_of(run: Path) -> Path:
    named = run / "rows.parquet"
    if named.exists():
        return named
    found = sorted(run.glob("*.parquet"))
    if len(found) != 1:
        there = ", ".join(path.name for path in found) or "none"
        raise Missing(f"{run}: no rows.parquet (of driftlab demo, probe or simulate); other .parquet files: {there}")
    return found[0]


def _plain(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows without interventions, on the input that stands first."""
    rows = rows[rows["intervention"] == ""]
    if rows.empty:
        raise Missing("its rows have no plain setting: all were measured under interventions")
    return rows[rows["template"] == rows["template"].iloc[0]]


def _estimator_rows(run: Path) -> tuple[pd.DataFrame, str]:
    path = run / "estimator_bias.csv"
    if not path.exists():
        raise Missing(f"{run}: no estimator_bias.csv (of python experiments/estimator_bias.py)")
    rows = read_rows(path)
    told = path.with_name("estimator_bias.run.json")
    text = ""
    if told.exists():
        settings = json.loads(told.read_text(encoding="utf-8"))["settings"]
        text = f" · answers of {settings['text']['max_new_tokens']} tokens"
    target, rule = rows["target"].iloc[0], rows["rule"].iloc[0]
    words = f"{target} · chain drafting, greedy, rule {rule} · 95 % intervals over prompts"
    return rows, f"{words}{text}"


def estimator_bias(run: Path) -> Table:
    """Biases relative to tau_uncensored by K, and the change of a round's first draft."""
    rows, words = _estimator_rows(run)
    frame = rows[rows["quantity"].isin(ESTIMATORS)].rename(columns={"depth_max": "k"})
    frame = frame[["quantity", "drafter", "k", "value", "low", "high", "n"]]
    return Table(frame, f"{words}{COMMAND}python experiments/estimator_bias.py")


def survivors(run: Path) -> Table:
    """Terms of conditional acceptance by depth at the one K where all are there."""
    rows, words = _estimator_rows(run)
    k = int(rows.loc[rows["quantity"] == "residual", "depth_max"].iloc[0])
    frame = rows[rows["quantity"].isin(TERMS) & (rows["depth_max"] == k) & (rows["depth"] > 0)]
    frame = frame[["quantity", "drafter", "depth", "value", "low", "high", "n"]]
    return Table(frame, f"{words} · K = {k}{COMMAND}python experiments/estimator_bias.py")


# ---------------------------------------------------------------------------------------------- the lab


def _lab(run: Path, section: str, words: str) -> Table:
    path, told = run / f"{section}.csv", run / f"{section}.run.json"
    if not (path.exists() and told.exists()):
        raise Missing(f"{run}: no {section}.csv with {section}.run.json (of python experiments/lab.py)")
    frame = pd.read_csv(path)
    if lacking := [column for column in LAB[section] if column not in frame]:
        raise Missing(f"{path}: it lacks the column(s) {', '.join(lacking)}; run python experiments/lab.py again")
    settings = {
        name: int(value)
        for name, value in json.loads(told.read_text(encoding="utf-8"))["settings"].items()
        if str(value).isdigit()
    }
    said = words.format(**settings)
    common = f"SmolLM2-135M-Instruct, greedy, K = {settings['depth']}, answers of {settings['answer_tokens']} tokens"
    return Table(frame, f"{common} · {said} · 95 % intervals over prompts{COMMAND}python experiments/lab.py")


def noise(run: Path) -> Table:
    """Accepted drafts a round under noise, in % of those without."""
    return _lab(run, "noise", "{prompts} prompts")


def template(run: Path) -> Table:
    """Tau by input."""
    return _lab(run, "template", "{prompts} prompts")


def window(run: Path) -> Table:
    """Tau by draft attention window."""
    return _lab(run, "window", "{context_prompts} prompts of {context} tokens and more, window of {window} keys")


def pin(run: Path) -> Table:
    """Tau under pins and controls."""
    return _lab(run, "pin", "{prompts} prompts")


def lab_depth(run: Path) -> Table:
    """Measures of drift by depth."""
    table = _lab(run, "depth", "{prompts} prompts")
    frame = table.frame[table.frame["quantity"].isin(MEASURES)]
    frame = frame[["quantity", "drafter", "layer", "depth", "value", "low", "high", "n"]]
    return Table(frame.astype({"layer": int, "depth": int}), table.words)


# ---------------------------------------------------------------------------------------------- others


def _copied(run: Path, name: str, columns: tuple[str, ...], maker: str) -> Table:
    path = run / f"{name}.csv"
    if not path.exists():
        raise Missing(f"{run}: no {name}.csv (of {maker})")
    with path.open(encoding="utf-8") as lines:
        first = lines.readline().rstrip("\n")
    words = first[2:] if first.startswith("# ") else f"of {maker}"
    frame = pd.read_csv(path, skiprows=int(first.startswith("# ")))
    if lacking := [column for column in columns if column not in frame]:
        raise Missing(f"{path}: it lacks the column(s) {', '.join(lacking)}")
    return Table(frame[list(columns)], words if COMMAND in words else f"{words}{COMMAND}{maker}")


def attention_map(run: Path) -> Table:
    """Mean mass on single keys by depth."""
    columns = ("drafter", "depth", "place", "kind", "key", "mass", "n")
    return _copied(run, "attention_map", columns, "python -m paper_figs.attention_map")


def study(run: Path) -> Table:
    """Trainings of the study: see :mod:`paper_figs.study`."""
    try:
        return study_table(run)
    except DriftlabError as error:
        raise Missing(f"no cells of python experiments/ablate.py: {error}") from error


def doctor_confusion(run: Path) -> Table:
    """Cases of the doctor's experiment, with the kind of mistake and what came of it."""
    path = run / "confusion.csv"
    if not path.exists():
        raise Missing(f"{run}: no confusion.csv (of python experiments/doctor_confusion.py)")
    frame = pd.read_csv(path)
    if lacking := [name for name in CASES if name not in frame]:
        raise Missing(f"{path}: it lacks the column(s) {', '.join(lacking)}")
    frame = frame[list(CASES)].sort_values("case", kind="stable")
    frame = frame.assign(mistake=frame.apply(_mistake, axis=1), result=frame.apply(_result, axis=1))
    words = (
        "Drafters of known reading, declared wrongly in one factor or two, or honestly; counts of cases, no interval"
    )
    return Table(frame, f"{words}{COMMAND}python experiments/doctor_confusion.py")


def _mistake(case: pd.Series) -> str:
    if case["base"].startswith("random"):
        return "random weights"
    if case["honest"]:
        return "honest"
    return "two at once" if case["factors"] > 1 else case["case"].split(" | ", 1)[1].split(":", 1)[0]


def _result(case: pd.Series) -> str:
    if case["outcome"].startswith("error"):
        return "error"
    if case["outcome"] == "too weak":
        return "too weak"
    if case["honest"]:
        return "doubted" if case["doubted"] else "kept"
    return case["how"] if case["named"] else "not named"


def kernels(run: Path) -> Table:
    """Registers, spills and shared memory of the kernels, compiled for sm 90."""
    paths = sorted(run.glob("aot_*.txt"))
    if not paths:
        raise Missing(f"{run}: no aot_*.txt (compile reports of tests/kernels/test_aot.py)")
    frames = [compile_report(path.read_text(encoding="utf-8")) for path in paths]
    versions = sorted({version for version, _ in frames})
    frame = pd.concat([table for _, table in frames])
    frame = frame[frame["sm"] == 90][["kernel", "warps", "stages", "regs", "spills", "smem"]]
    words = (
        f"Compiled ahead of time for sm 90 with {', '.join(versions)}, not run; registers a thread, instructions that "
        "spill, shared memory a block; one compilation each, no interval"
    )
    return Table(
        frame.astype({name: int for name in frame if name != "kernel"}),
        f"{words}{COMMAND}pytest tests/kernels/test_aot.py",
    )


def compile_report(text: str) -> tuple[str, pd.DataFrame]:
    """Read a report: the compiler's version, and a table; numbers stand right-aligned under their names, a blank is missing."""
    head, *body = text.rstrip("\n").split("\n")
    begin = head.index(" sm") + 1
    names = head[begin:].split()
    ends, at = [], begin
    for name in names:
        at = head.index(name, at) + len(name)
        ends.append(at)
    # the first number may be wider than its name
    starts = [ends[0] - 8, *ends[:-1]]
    records = []
    for row in body:
        cells = [row[start:end].strip() for start, end in zip(starts, ends, strict=True)]
        numbers = {name: float(cell) if cell else float("nan") for name, cell in zip(names, cells, strict=True)}
        records.append({"kernel": row[: starts[0]].strip(), **numbers})
    return head[:begin].strip(), pd.DataFrame(records)


def published() -> Table:
    """The published numbers, as they are kept beside the lab."""
    path = EXPERIMENTS / "data" / "paper_numbers.csv"
    first = path.read_text(encoding="utf-8").split("\n", 1)[0]
    return Table(pd.read_csv(path, skiprows=1), f"{first[2:]}{COMMAND}a copy of experiments/data/paper_numbers.csv")


def throughput() -> Table:
    """Points of the announcement's figure 2, and the cost model of them."""
    sys.path.insert(0, str(EXPERIMENTS))
    try:
        from cost_curves import points_of, read
        from cost_curves_moe import eagle31_model
    finally:
        sys.path.remove(str(EXPERIMENTS))
    points, model = points_of(read(), "eagle31_blog"), eagle31_model()
    tau = float(points["tau"].max())
    rows = [
        {"kind": "published", "drafter": p.drafter, "concurrency": int(p.concurrency), "value": p.value}
        for p in points.itertuples()
    ]
    for users in CONCURRENCIES:
        plain, drafted = 1 / model.plain_time(users), model.tokens_per_second_per_user(tau, 3, users)
        for name, value in (("none", plain), ("EAGLE 3.1", drafted)):
            rows.append({"kind": "model", "drafter": name, "concurrency": users, "value": value})
    words = (
        "Output tokens a second and user; Kimi-K2.6-NVFP4, 4 x GB200, K = 3, SPEED-Bench coding; published points: one "
        f"each, no interval; cost model: tau {tau:g}, three parameters chosen on these six points, so a regression check"
    )
    return Table(pd.DataFrame(rows), f"{words}{COMMAND}experiments/cost_curves_moe.py")


FROM_RUN: Mapping[str, Callable[[Path], Table]] = {
    "demo_curves": demo_curves,
    "estimator_bias": estimator_bias,
    "survivors": survivors,
    "noise": noise,
    "template": template,
    "window": window,
    "pin": pin,
    "lab_depth": lab_depth,
    "attention_map": attention_map,
    "doctor_confusion": doctor_confusion,
    "study": study,
    "kernels": kernels,
}
FROM_REPOSITORY: Mapping[str, Callable[[], Table]] = {"published": published, "throughput": throughput}
