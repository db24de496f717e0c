"""The table of claims: pooled ratios, their two intervals and the verdicts, against numbers worked out by hand."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from driftlab.intervals import Interval

PATH = Path(__file__).parents[1] / "experiments" / "claims.py"
NAN = float("nan")


@pytest.fixture(scope="module")
def claims():
    spec = importlib.util.spec_from_file_location("claims", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["claims"] = module
    spec.loader.exec_module(module)
    return module


def cells(*records):
    """Rows of cells: (variant, seed, prompt, quantity, depth, value, n) each."""
    frame = pd.DataFrame(
        records, columns=["cell_variant", "cell_seed", "prompt", "quantity", "depth", "value", "n"]
    ).assign(cell_gate=False, cell_ttt=4, cell_intervention="", category="held-out")
    other = frame.assign(value=99.0)  # what must not count
    return pd.concat([frame, other.assign(category="coding"), other.assign(cell_intervention="sink:drop"),
                      other.assign(cell_gate=True), other.assign(cell_ttt=2), other.assign(prompt="")])  # fmt: skip


def test_a_ratio_is_pooled_by_n_and_a_missing_value_has_no_weight(claims):
    rows = cells(
        *(("eagle3", 0, "a", "match", 1, value, n) for value, n in ((0.5, 4), (NAN, 100), (1.0, 6))),
        ("eagle3", 0, "b", "match", 1, 0.25, 8),
        ("eagle3", 0, "b", "match", 2, 0.75, 8),
    )
    top, bottom = claims.Cells(rows).ratio("eagle3", False, 4, "match", 1, 0)
    assert (top.tolist(), bottom.tolist()) == ([8, 2], [10, 8])
    assert claims.Cells(rows).ratio("eagle31", False, 4, "match", 1, 0) is None


def test_tau_is_emitted_tokens_over_rounds(claims):
    rows = cells(("eagle3", 0, "a", "emitted", 0, 30.0, 20), ("eagle3", 0, "b", "emitted", 0, 8.0, 2))
    top, bottom = claims.Cells(rows).ratio("eagle3", False, 4, "tau", 0, 0)
    assert top.sum() / bottom.sum() == pytest.approx(38 / 22)


def test_a_contrast_has_an_interval_over_prompts_and_one_over_seeds(claims):
    """Three seeds whose prompts all say the same: no spread over prompts, the t interval by hand over seeds."""
    records = []
    for seed, (one, other) in enumerate(((1.0, 1.5), (1.0, 1.75), (1.0, 2.0))):
        for prompt, rounds in (("a", 10), ("b", 30)):
            records.append(("eagle3", seed, prompt, "emitted", 0, one * rounds, rounds))
            records.append(("eagle31", seed, prompt, "emitted", 0, other * rounds, rounds))
    records.append(("eagle3", 3, "a", "emitted", 0, 1.0, 1))  # a seed without the other variant says nothing
    terms = [(variant, False, 4, "tau", 0) for variant in ("eagle3", "eagle31")]
    prompts, seeds, n = claims.contrast(claims.Cells(cells(*records)), terms, claims._rise)
    assert n == 3
    assert (prompts.value, prompts.low, prompts.high) == pytest.approx((0.75, 0.75, 0.75))
    half = 4.302653 * 0.25 / 3**0.5  # t of 2 degrees of freedom at 97.5 %, deviation .25
    assert (seeds.low, seeds.high) == pytest.approx((0.75 - half, 0.75 + half), abs=1e-6)


def test_prompts_that_differ_widen_the_interval_over_prompts_alone(claims):
    """Of two prompts a resample holds one twice in half of the cases: the ends are the prompts' own ratios."""
    records = [
        (variant, seed, prompt, "match", 1, value, 10)
        for variant, shift in (("eagle3", 0.0), ("eagle31", 0.1)) for seed in (0, 1)
        for prompt, value in (("a", 0.2 + shift), ("b", 0.6 + 2 * shift))
    ]  # fmt: skip
    terms = [(variant, False, 4, "match", 1) for variant in ("eagle3", "eagle31")]
    prompts, seeds, _ = claims.contrast(claims.Cells(cells(*records)), terms, claims._rise)
    assert prompts.value == pytest.approx(0.15)
    assert prompts.low <= 0.1 + 1e-9
    assert prompts.high >= 0.2 - 1e-9
    assert (seeds.low, seeds.high) == pytest.approx((0.15, 0.15))


def test_one_seed_has_no_interval_and_no_verdict(claims):
    records = [(v, 0, p, "match", 1, x, 5) for v, x in (("eagle3", 0.1), ("eagle31", 0.5)) for p in "ab"]
    terms = [(variant, False, 4, "match", 1) for variant in ("eagle3", "eagle31")]
    prompts, seeds, n = claims.contrast(claims.Cells(cells(*records)), terms, claims._rise)
    assert n == 1
    assert np.isnan(seeds.low)
    assert claims._word(prompts, seeds, 0.4) == "undecided"


UP, DOWN, WIDE, NONE = Interval(1, 0.5, 1.5), Interval(-1, -1.5, -0.5), Interval(0.2, -1, 1), Interval(1, NAN, NAN)


@pytest.mark.parametrize(
    ("prompts", "seeds", "paper", "word"),
    [
        (UP, UP, 0.4, "same direction"),
        (DOWN, DOWN, -0.4, "same direction"),
        (UP, UP, -0.4, "opposite"),
        (UP, WIDE, 0.4, "undecided"),
        (WIDE, UP, 0.4, "undecided"),
        (UP, DOWN, 0.4, "undecided"),
        (UP, NONE, 0.4, "undecided"),
        (UP, UP, None, "above 0"),
        (DOWN, DOWN, None, "below 0"),
        (UP, WIDE, None, "undecided"),
        (UP, UP, 0.01, "no change published; a change here"),
        (WIDE, WIDE, -0.01, "no change in either"),
        (Interval(0.002, 0.001, 0.003), Interval(0.002, 0.001, 0.003), -0.01, "no change in either"),
    ],
)
def test_verdicts(claims, prompts, seeds, paper, word):
    assert claims._word(prompts, seeds, paper) == word


def test_the_published_changes_are_those_of_the_committed_numbers(claims):
    """Llama 3.1 8B: the feedback of eagle3 grows more than e-fold from depth 1 to 8, that of a post-norm drafter does not."""
    numbers = pd.read_csv(claims.PAPER, comment="#")
    llama = numbers[numbers["source"].str.contains("Llama") & (numbers["quantity"] == "rms")]
    at = llama.set_index(["drafter", "depth"])["value"]
    assert claims.paper_growth("eagle3") == pytest.approx(np.log(at["eagle3", 8] / at["eagle3", 1]))
    assert claims.paper_growth("eagle3") > 1 > 0.02 > abs(claims.paper_growth("norm_output"))


def test_the_table_is_printed_from_what_is_committed(claims, capsys):
    claims.main()
    said = capsys.readouterr().out.splitlines()
    assert said[-1].startswith(f"claims: {len(said) - 3}; ")
    assert sum(int(part.rsplit(" ", 1)[1]) for part in said[-1].split("; ")[1].split(", ")) == len(said) - 3
