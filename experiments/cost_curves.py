"""Published curves of data/cost_curves.csv, each as a fit on some of its points and a prediction of the others.

Everything is linear in what is fitted, so a prediction is a sum of columns: a constant, the seconds that a step's bytes take
at full bandwidth (from the model's shape, times 1 / bandwidth fraction), its tokens, the draft steps. Where a
bandwidth fraction is fitted, all points are memory-bound, so no curve determines the share of peak operations.

Here: one dense model, and tables of single steps. Mixtures of experts by concurrency are in cost_curves_moe.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from driftlab.cost import CostModel, LinearStep, ModelShape, RooflineStep, eagle3_head
from driftlab.cost.catalogue import B300, DEEPSEEK_V4_FLASH, H100, LLAMA31_8B
from driftlab.cost.fitting import FitPoint, FitReport, Parameter, fit

DATA = Path(__file__).parent / "data" / "cost_curves.csv"
SLOWNESS = Parameter("1 / bandwidth fraction", 1.2, 1.0, 50.0)


#: marks of the data file -> whether such a point is fitted; a point marked otherwise is not compared with a prediction
MARKS = {"fit": True, "held out": False, "regression": True}


@dataclass(frozen=True)
class Result:
    """A report and what is to be said about it. ``one_quantity``: its points are values of one thing, in one unit."""

    report: FitReport
    words: str
    one_quantity: bool = True


def read() -> pd.DataFrame:
    """Return the table of measured points."""
    return pd.read_csv(DATA)


def points_of(table: pd.DataFrame, curve: str, column: str = "use") -> pd.DataFrame:
    """Return the points of a curve that are fitted or held out, with the column ``fitted`` as the file marks them.

    ``column``: a curve that is fitted twice has its second marks in ``second_use``.
    """
    rows = table[(table["curve"] == curve) & table[column].isin(MARKS)]
    return rows.assign(fitted=rows[column].map(MARKS).astype(bool))


# ---------------------------------------------------------------------------------------------- columns


def milliseconds(name: str, start: float, upper: float = 100.0) -> Parameter:
    """Return a parameter that is a time in milliseconds, not below 0."""
    return Parameter(name, start, 0.0, upper)


def reading(step: RooflineStep, tokens: pd.Series, sequences: pd.Series | int = 1, context: int = 0) -> np.ndarray:
    """Return the milliseconds of the bytes of steps at full bandwidth; refuse a step that is bound by operations."""
    sequences = np.broadcast_to(np.asarray(sequences), len(tokens)).tolist()
    pairs = list(zip(np.asarray(tokens).tolist(), sequences, strict=True))
    assert all(step.memory_bound(n, b, context) for n, b in pairs), "a point is bound by operations"
    return np.array([1e3 * step.memory(n, b, context) for n, b in pairs])


def exchange(step: RooflineStep, tokens: pd.Series) -> np.ndarray:
    """Return the milliseconds of the steps' all-reduces, latency not counted: it is part of the fixed cost."""
    return np.array([1e3 * step.communication(n) for n in np.asarray(tokens).tolist()])


def linear(
    curve: str,
    columns: list[np.ndarray],
    parameters: list[Parameter],
    labels: list[str],
    measured: np.ndarray,
    use: np.ndarray,
    known: np.ndarray | float = 0.0,
) -> FitReport:
    """Fit a sum of columns on top of what is ``known``."""
    design = np.stack([np.broadcast_to(c, len(labels)) for c in columns], axis=1)
    return fit(curve, lambda theta: known + design @ theta, parameters, labels, measured, use, linear=True)


def given(curve: str, labels: list[str], measured: np.ndarray, predicted: np.ndarray) -> FitReport:
    """Return the report of a prediction for which nothing of the curve was fitted."""
    points = zip(labels, np.asarray(measured, float).tolist(), np.asarray(predicted, float).tolist(), strict=True)
    return FitReport(curve, (), tuple(FitPoint(label, m, p, False) for label, m, p in points))


def hindsight_constant(measured: np.ndarray) -> float:
    """Return the constant c with the smallest sum of |c / y - 1|: the median of y, weighted by 1 / y."""
    y = np.sort(measured)
    weight = np.cumsum(1 / y)
    return float(y[np.searchsorted(weight, weight[-1] / 2)])


def labels_of(rows: pd.DataFrame, column: str, sign: str) -> list[str]:
    """Return names of the points: drafter and one coordinate."""
    return [f"{row.drafter} {sign}={getattr(row, column):g}" for row in rows.itertuples()]


# ---------------------------------------------------------------------------------------------- Llama-3.1-8B, H100


def vllm_eagle3(table: pd.DataFrame) -> Result:
    """Plain decoding and EAGLE-3, batch 1: TPOT = round / tau."""
    rows = points_of(table, "vllm_20780")
    rows = rows[rows["drafter"] != "EAGLE-1"]
    tau, depth = rows["tau"].fillna(1).to_numpy(), rows["depth"].to_numpy()
    memory = reading(RooflineStep(LLAMA31_8B, H100), depth + 1)
    report = linear(
        "vLLM #20780 EAGLE-3",
        [1 / tau, memory / tau, depth / tau, (depth > 0) / tau],
        [milliseconds("fixed", 3), SLOWNESS, milliseconds("draft step", 1), milliseconds("overhead", 1)],
        labels_of(rows, "depth", "K"),
        rows["value"].to_numpy(),
        rows["fitted"].to_numpy(),
    )
    words = "Works. A dense model at batch 1 reads the same bytes at every K, so fixed cost and bandwidth cannot be told apart."
    return Result(report, words)


def vllm_eagle1(table: pd.DataFrame, eagle3: FitReport, *, own_overhead: bool) -> Result:
    """EAGLE-1 with the target step of the EAGLE-3 fit, and that fit's overhead or its own."""
    rows = points_of(table, "vllm_20780")
    rows = rows[rows["drafter"] == "EAGLE-1"]
    tau, depth = rows["tau"].to_numpy(), rows["depth"].to_numpy()
    fixed, slowness, _, overhead = eagle3.values
    step = fixed + slowness * reading(RooflineStep(LLAMA31_8B, H100), depth + 1)
    design = np.stack([depth / tau, 1 / tau] if own_overhead else [depth / tau], axis=1)
    known = step / tau if own_overhead else (step + overhead) / tau
    parameters = [milliseconds("draft step", 1), *([milliseconds("overhead", 1)] if own_overhead else [])]
    report = fit(
        f"vLLM #20780 EAGLE-1, EAGLE-3's target{'' if own_overhead else ' and overhead'}",
        lambda theta: known + design @ theta,
        parameters,
        labels_of(rows, "depth", "K"),
        rows["value"].to_numpy(),
        rows["fitted"].to_numpy(),
        linear=True,
    )
    words = "The target's part carries over."
    return Result(
        report,
        f"{words} Its own overhead is smaller, within the ranges." if own_overhead else f"{words} {draft_bytes()}",
    )


def draft_bytes() -> str:
    """Say what the bytes of the two heads would cost: not what they do cost."""
    eagle3 = eagle3_head(LLAMA31_8B, draft_vocab=32000, ffn=14336, with_fusion=False)
    # EAGLE-1: fc reads [embedding, hidden], attention reads H, the head is the target's own
    eagle1 = ModelShape("EAGLE-1", 1, 4096, 128256, LLAMA31_8B.attention, ffn=14336, fusion=2 * 4096**2)
    times = [1e3 * RooflineStep(shape, H100).memory(1, 1, 0) for shape in (eagle3, eagle1)]
    return (
        f"Bytes alone would make a draft step {times[0]:.2f} ms (EAGLE-3) and {times[1]:.2f} ms (EAGLE-1): what is measured is "
        "longer and in the other order, so a draft step is launches, not bytes."
    )


def specdecode_bench(table: pd.DataFrame) -> Result:
    """The slopes of a linear cost, from bytes, operations and peaks alone: nothing is fitted."""
    rows = points_of(table, "specdecode_bench").set_index("quantity")["value"]
    step = RooflineStep(LLAMA31_8B, H100)
    predicted = {
        "target_fixed_ms": 1e3 * step.memory(1, 1, 0),
        "target_per_token_ms": 1e3 * step.compute(1, 0),
        "target_per_cached_token_ms": 1e3 * LLAMA31_8B.kv_bytes(1) / H100.bandwidth,
    }
    values = np.array([predicted[name] for name in rows.index])
    report = given("SpecDecode-Bench, from peaks alone", list(rows.index), rows.to_numpy(), values)
    words = (
        "Cached tokens cost their bytes at full bandwidth. Weights and operations run at about 3/4 of peak, and they add "
        "where a roofline takes the larger. Bytes and peaks say nothing of the overhead, nor of a draft whose K is not stated."
    )
    return Result(report, words, one_quantity=False)


def specdecode_model(table: pd.DataFrame) -> CostModel:
    """The published costs as a model, in milliseconds: the overhead is part of every step, plain ones too.

    The draft cost is one number a round, whatever K, so it stands as a parallel drafter.
    """
    costs = table[table["curve"] == "specdecode_bench"].set_index("quantity")["value"]
    overhead = float(costs["overhead_ms"])
    step = LinearStep(
        float(costs["target_fixed_ms"]) + overhead,
        float(costs["target_per_token_ms"]),
        float(costs["target_per_cached_token_ms"]),
    )
    return CostModel(step, LinearStep(float(costs["draft_ms"])), parallel=True)


def vllm_from_specdecode(table: pd.DataFrame) -> list[Result]:
    """One engine's costs for another engine's plain step and rounds. No cached tokens: the context is not stated."""
    model, rows = specdecode_model(table), points_of(table, "vllm_20780")
    plain, drafted = rows[rows["depth"] == 0], rows[rows["depth"] > 0]
    step = given("vLLM #20780 plain, from SpecDecode-Bench", ["plain"], plain["value"], np.array([model.plain_time(1)]))
    times = [model.round_time(k, 1) for k in drafted["depth"].astype(int).tolist()]
    rounds = given(
        "vLLM #20780 rounds, from SpecDecode-Bench",
        labels_of(drafted, "depth", "K"),
        drafted["value"].to_numpy(),
        np.array(times) / drafted["tau"].to_numpy(),
    )
    words = (
        "The target's cost carries over to another engine version. It does with the overhead, which belongs to every step: "
        "without it the step would come out 16 % short. 1,000 cached tokens would add 0.04 ms."
    )
    return [
        Result(step, words),
        Result(rounds, "The draft cost does not: one number a round, whatever K, is short of more draft steps."),
    ]


# ---------------------------------------------------------------------------------------------- measured tables


def dspark_verify(table: pd.DataFrame) -> list[Result]:
    """A roofline below the CUDA-graph cliff, and what it says beyond."""
    near = points_of(table, "dspark_verify")
    far = table[(table["curve"] == "dspark_verify") & (table["use"] == "beyond cliff")]
    step = RooflineStep(DEEPSEEK_V4_FLASH, B300.group(4), precision="fp8")
    report = linear(
        "DSpark verify, up to 1024 tokens",
        [np.ones(len(near)), reading(step, near["tokens"]), near["tokens"].to_numpy()],
        [milliseconds("fixed", 3), SLOWNESS, milliseconds("per token", 0.01, 10.0)],
        [f"{n:g} tokens" for n in near["tokens"]],
        near["value"].to_numpy(),
        near["fitted"].to_numpy(),
        exchange(step, near["tokens"]),
    )
    fixed, slowness, per_token = report.values
    fitted = replace(step, fixed=1e-3 * fixed, per_token=1e-3 * per_token, bandwidth_fraction=min(1.0, 1 / slowness))
    beyond = given(
        "DSpark verify, beyond the cliff",
        [f"{n:g} tokens" for n in far["tokens"]],
        far["value"].to_numpy(),
        np.array([1e3 * fitted.time(n, 1, 0) for n in far["tokens"].tolist()]),
    )
    words = (
        "1 token is predicted too cheap and 32 to 64 too dear: uniform routing touches too many experts there. Bandwidth "
        "is at its bound."
    )
    return [
        Result(report, words),
        Result(beyond, "Missed: no roofline knows where CUDA graphs end. Use the table (MeasuredStep)."),
    ]


def dspark_draft(table: pd.DataFrame) -> Result:
    """A line over requests."""
    rows = points_of(table, "dspark_draft")
    requests = rows["concurrency"].to_numpy()
    report = linear(
        "DSpark draft",
        [np.ones(len(rows)), requests],
        [milliseconds("fixed", 1), milliseconds("per request", 0.02)],
        [f"{n:g} requests" for n in requests],
        rows["value"].to_numpy(),
        rows["fitted"].to_numpy(),
    )
    return Result(report, "Concave below 64 requests; a line is within a tenth.")


def vllm_mlx(table: pd.DataFrame) -> Result:
    """A line over verify widths."""
    rows = points_of(table, "vllm_mlx_763")
    width = rows["tokens"].to_numpy()
    report = linear(
        "vllm-mlx #763 widths",
        [np.ones(len(rows)), width],
        [milliseconds("fixed", 5), milliseconds("per token", 2)],
        [f"width {n:g}" for n in width],
        rows["value"].to_numpy(),
        rows["fitted"].to_numpy(),
    )
    return Result(
        report, "Width 2 costs a jump that a line does not have. Verifying is not free here: 2 tokens cost 1.6 steps."
    )
