"""Does the cost model predict published times, rates and ratios that it was not fitted to?

    python experiments/fit_cost_model.py [--out runs/cost_model.csv]

Every curve of data/cost_curves.csv is fitted on the points that its column ``use`` marks "fit" (a few parameters, relative
errors) and tried on those marked "held out"; a curve that is fitted twice has its other marks in ``second_use``. Printed:
errors of both parts, the best constant beside curves without a fit, what the points do not determine, and what does not work.
Written: one row a point, the parameters beside it (``_parameters.csv``), and a figure (``.png``).

The six times of the EAGLE 3.1 announcement are a regression check: three parameters were chosen on them. "Drafter against
none" and "3.1 against 3" are printed as the two numbers that they are.
"""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path

import numpy as np
import pandas as pd
from cost_curves import (
    Result,
    dspark_draft,
    dspark_verify,
    hindsight_constant,
    read,
    specdecode_bench,
    vllm_eagle1,
    vllm_eagle3,
    vllm_from_specdecode,
    vllm_mlx,
)
from cost_curves_moe import amd_kimi, eagle31_blog, eagle31_model, gpt_oss, p_eagle, tokenspeed, torchspec
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from driftlab.cost import CostModel, Drafting, gain_over
from driftlab.files import atomic
from driftlab.plotting import COLORS, GREY, theme


def main() -> None:
    """Fit, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/cost_model.csv"))
    options = parser.parse_args()
    results = every_curve()
    print(summary(results).to_string(index=False))
    print()
    for result in results:
        print_words(result)
    print(two_numbers())
    write(results, options.out)


def every_curve() -> list[Result]:
    """Fit and predict every curve, in the order of the printed table."""
    table = read()
    eagle3 = vllm_eagle3(table)
    return [
        eagle3,
        vllm_eagle1(table, eagle3.report, own_overhead=False),
        vllm_eagle1(table, eagle3.report, own_overhead=True),
        specdecode_bench(table),
        *vllm_from_specdecode(table),
        *dspark_verify(table),
        dspark_draft(table),
        gpt_oss(table, "use", "The curve between batch 1 and 64 is not of this form."),
        gpt_oss(table, "second_use", "Batch 64 costs twice what bytes say; queueing and prefill are not modelled."),
        amd_kimi(table),
        p_eagle(table, bonus=0),
        p_eagle(table, bonus=1),
        torchspec(table),
        eagle31_blog(table),
        tokenspeed(table),
        vllm_mlx(table),
    ]


def points(results: list[Result]) -> pd.DataFrame:
    """Return one row a point."""
    return pd.DataFrame([row for result in results for row in result.report.records()])


def parameters(results: list[Result]) -> pd.DataFrame:
    """Return one row a fitted parameter, with its 95 % profile range and whether the points determine it."""
    return pd.DataFrame(
        {"curve": r.report.curve, "parameter": p.name, "value": p.value, "low": p.low, "high": p.high}
        | {"determined": p.determined}
        for r in results
        for p in r.report.parameters
    )


def summary(results: list[Result]) -> pd.DataFrame:
    """Return one row a curve: parameters, points, and median and largest relative error of both parts, in percent.

    ``constant``: the errors of the best constant, chosen in hindsight, beside curves for which nothing was fitted.
    """
    rows = []
    for result in results:
        report = result.report
        row = {"curve": report.curve, "parameters": len(report.parameters)}
        for name, fitted in (("fitted", True), ("held out", False)):
            errors = 100 * report.errors(fitted=fitted)
            row[name] = len(errors)
            row[f"{name}: median %"] = f"{np.median(errors):.1f}" if len(errors) else "-"
            row[f"{name}: max %"] = f"{errors.max():.1f}" if len(errors) else "-"
        rows.append(row | dict(zip(("constant: median %", "constant: max %"), constant_errors(result), strict=True)))
    return pd.DataFrame(rows)


def constant_errors(result: Result) -> tuple[str, str]:
    """Return median and largest error of the best constant; "-" where parameters were fitted or it would say nothing."""
    measured = np.array([p.measured for p in result.report.points])
    if result.report.parameters or not result.one_quantity or len(measured) < 3:
        return "-", "-"
    errors = 100 * abs(hindsight_constant(measured) / measured - 1)
    return f"{np.median(errors):.1f}", f"{errors.max():.1f}"


def print_words(result: Result) -> None:
    """Print the parameters of a curve, what its points do not determine, and the words on it."""
    print(result.report.curve)
    for p in result.report.parameters:
        note = "" if p.determined else "   not determined"
        print(f"    {p.name:24s} {p.value:9.4g}   95 % profile range {p.low:.4g} to {p.high:.4g}{note}")
    print(textwrap.indent(textwrap.fill(result.words, 112), "    ") + "\n")


def two_numbers() -> str:
    """Say the announcement's speed-ups and the A/B of 3.1 against 3 under their own names."""
    table = read()
    blog = table[table["curve"] == "eagle31_blog"]
    rate = {(r.drafter == "none", int(r.concurrency)): r.value for r in blog.itertuples()}
    card = table[table["curve"] == "eagle31_card"].set_index("drafter")["value"]
    model, lines = eagle31_model(), []
    for users in (1, 4, 16):
        published = rate[False, users] / rate[True, users]
        modelled = model.speedup_over_none(card["EAGLE 3.1"], 3, users)
        even = model.break_even_tau(3, users)
        lines.append(
            f"    C = {users:2d}: {published:.2f} published, {modelled:.2f} modelled; break-even tau {even:.2f}"
        )
    gain = against_eagle3(model, card)
    return "\n".join(
        [
            "speedup_over_none: EAGLE 3.1 against no drafter, Kimi-K2.6-NVFP4, SPEED-Bench coding, K = 3",
            *lines,
            "gain_over: EAGLE 3.1 against EAGLE 3, the same target, text and K",
            f"    tau {card['EAGLE 3']:.3f} -> {card['EAGLE 3.1']:.3f}: {gain:.3f}x, since both cost the same",
        ]
    )


def against_eagle3(model: CostModel, tau: pd.Series) -> float:
    """Return the gain of 3.1 over 3 at C = 1; two norms more cost nothing that this model sees."""
    new, old = (Drafting(model, {3: float(tau[name])}) for name in ("EAGLE 3.1", "EAGLE 3"))
    return gain_over(new, old, 1, depth=3).ratio


def write(results: list[Result], out: Path) -> None:
    """Write the points, the parameters and the figure, each whole or not at all."""
    for path, frame in ((out, points(results)), (out.with_name(f"{out.stem}_parameters.csv"), parameters(results))):
        with atomic(path) as temporary:
            frame.to_csv(temporary, index=False, float_format="%.6g")
    with atomic(out.with_suffix(".png")) as temporary:
        draw(results).savefig(temporary, format="png", dpi=160)


# ---------------------------------------------------------------------------------------------- the figure


def draw(results: list[Result]) -> Figure:
    """Draw the relative error of every point by curve, and the DSpark table with the roofline that misses its cliff."""
    with theme():
        figure = Figure(figsize=(10, 5.2), layout="constrained")
        errors, cliff = figure.subplots(1, 2, width_ratios=(1.5, 1))
        draw_errors(results, errors)
        draw_cliff(results, cliff)
    return figure


def draw_errors(results: list[Result], ax: Axes) -> None:
    """Draw one row a curve: filled points were fitted, hollow ones held out."""
    names = [result.report.curve for result in results]
    for place, result in enumerate(results):
        for point in result.report.points:
            face = COLORS[0] if point.fitted else "white"
            ax.plot(
                100 * point.relative_error, place, "o", markerfacecolor=face, markeredgecolor=COLORS[0], markersize=5
            )
    ax.axvline(0, color=GREY, linewidth=0.8)
    ax.axvspan(-10, 10, color="#eeeeee", zorder=0)
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.set(
        xlabel="predicted / measured - 1 (%); grey: within 10 %", title="fitted (filled) and held-out (hollow) points"
    )


def draw_cliff(results: list[Result], ax: Axes) -> None:
    """Draw the DSpark verify table and the fitted roofline."""
    chosen = [point for r in results if r.report.curve.startswith("DSpark verify") for point in r.report.points]
    tokens = [int(point.label.split()[0]) for point in chosen]
    for point, n in zip(chosen, tokens, strict=True):
        face = COLORS[0] if point.fitted else "white"
        ax.plot(n, point.measured, "o", markerfacecolor=face, markeredgecolor=COLORS[0])
    ax.plot(tokens, [point.predicted for point in chosen], color=COLORS[3], label="roofline, fitted up to 512 tokens")
    ax.set(
        xscale="log", yscale="log", xlabel="tokens in the step", ylabel="ms", title="DSpark verify: the cliff is missed"
    )
    ax.legend(loc="upper left")


if __name__ == "__main__":
    main()
