"""Every claim of the paper: its number, where that was read, ours with intervals, a verdict, and the command that makes ours.

    python experiments/claims.py

Reads committed tables alone: ``experiments/data/study`` (tables of ``experiments/ablate.py``, small drafters of 600 training
steps, several seeds), ``paper_figs/data/lab_claims.csv`` (``experiments/lab.py``, the shipped drafters, one seed) and
``experiments/data/paper_numbers.csv``.

Two intervals stand beside a number of the study, since they answer different questions. Over prompts: would these drafters show
it on other prompts? (seeds pooled; 95 %, bootstrap.) Over seeds: would other trainings show it? (t interval over seeds; none
with one.) A verdict "same direction" or "opposite" of the study wants both away from 0; one seed is "undecided", whatever its
prompts say. The lab has one training of each drafter, and its directions say so: "(one training)".
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import t as student

from driftlab.ablation import read_cells
from driftlab.intervals import Interval, percentile_interval

HERE = Path(__file__).parent
STUDY, LAB = HERE / "data" / "study", HERE.parent / "paper_figs" / "data" / "lab_claims.csv"
PAPER = HERE / "data" / "paper_numbers.csv"
STUDY_COMMAND = "python experiments/ablate.py two_by_two gate ttt"
LAB_COMMAND = "python experiments/lab.py"
PLAIN, GATED = False, True
SMALL = 0.02
"""change of a mass, of an ln or of nats that is called none"""


def main() -> None:
    """Print the table of claims."""
    lines = [*study_claims(), *lab_claims()]
    table = pd.DataFrame(lines, columns=["claim", "paper", "ours", "over prompts", "over seeds", "verdict", "command"])
    print(table.to_string(index=False, justify="left", max_colwidth=90))
    counts = table["verdict"].value_counts()
    print(f"\nclaims: {len(table)}; " + ", ".join(f"{word} {n}" for word, n in counts.items()))


# ---------------------------------------------------------------------------------------------- the study


class Cells:
    """Sums per drafter, seed and prompt of one quantity at one depth."""

    def __init__(self, rows: pd.DataFrame) -> None:
        self.rows = rows[(rows["cell_intervention"] == "") & (rows["category"] == "held-out")]
        self.seeds = sorted(self.rows["cell_seed"].unique().tolist())

    def ratio(
        self, variant: str, gate: bool, ttt: int, quantity: str, depth: int, seed: int
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Numerators and denominators per prompt, prompts in one order; None where no such cell is there."""
        r = self.rows
        mine = r[
            (r["cell_variant"] == variant) & (r["cell_gate"] == gate) & (r["cell_ttt"] == ttt) & (r["cell_seed"] == seed)
            & (r["quantity"] == ("emitted" if quantity == "tau" else quantity)) & (r["depth"] == depth) & (r["prompt"] != "")
        ]  # fmt: skip
        if mine.empty:
            return None
        weight = mine["n"].where(mine["value"].notna(), 0.0)
        top = mine["value"].fillna(0.0) * (1.0 if quantity == "tau" else weight)
        by_prompt = (
            pd.DataFrame({"prompt": mine["prompt"], "top": top, "n": weight}).groupby("prompt").sum().sort_index()
        )
        return by_prompt["top"].to_numpy(), by_prompt["n"].to_numpy()


def contrast(
    cells: Cells, terms: list[tuple[str, bool, int, str, int]], statistic: Callable[[np.ndarray], np.ndarray]
) -> tuple[Interval, Interval, int]:
    """Return a function of several pooled ratios: over prompts (seeds averaged) and over seeds, and how many seeds.

    ``terms``: variant, gate, TTT, quantity, depth of each; ``statistic``: ``[... term]`` to ``[...]``.
    """
    tops, bottoms = [], []
    for seed in cells.seeds:
        found = [cells.ratio(*term, seed) for term in terms]
        if all(pair is not None for pair in found):
            tops.append(np.stack([pair[0] for pair in found]))
            bottoms.append(np.stack([pair[1] for pair in found]))
    if not tops:
        nothing = Interval(np.nan, np.nan, np.nan)
        return nothing, nothing, 0
    top, bottom = np.stack(tops), np.stack(bottoms)  # seed term prompt

    def by_seed(chosen: np.ndarray) -> np.ndarray:
        sums = [a[:, :, chosen].sum(-1) for a in (top, bottom)]  # seed term resample
        ratios = np.divide(*sums, out=np.full(sums[0].shape, np.nan), where=sums[1] > 0)
        return statistic(np.moveaxis(ratios, 1, -1))  # seed resample

    each = by_seed(np.arange(top.shape[2])[None])[:, 0]
    over_prompts = percentile_interval(
        float(each.mean()), lambda c: by_seed(c).mean(0), top.shape[2], top.shape[2], 2000, 0, 0.95
    )
    n = len(each)
    half = student.ppf(0.975, n - 1) * each.std(ddof=1) / n**0.5 if n > 1 else np.nan
    return over_prompts, Interval(float(each.mean()), float(each.mean() - half), float(each.mean() + half)), n


def _first(x: np.ndarray) -> np.ndarray:
    return x[..., 0]


def _growth(x: np.ndarray) -> np.ndarray:
    return np.log(x[..., 1] / x[..., 0])


def _rise(x: np.ndarray) -> np.ndarray:
    return x[..., 1] - x[..., 0]


def _interaction(x: np.ndarray) -> np.ndarray:
    return (x[..., 3] - x[..., 2]) - (x[..., 1] - x[..., 0])


def study_claims() -> list[tuple[str, ...]]:
    """The claims that the study can speak to."""
    if not STUDY.is_dir():
        return []
    cells = Cells(read_cells(STUDY))

    def ends(quantity: str, variant: str, gate: bool = PLAIN, ttt: int = 4) -> list[tuple[str, bool, int, str, int]]:
        return [(variant, gate, ttt, quantity, k) for k in (1, 8)]

    def at(
        variant: str, quantity: str, depth: int, gate: bool = PLAIN, ttt: int = 4
    ) -> tuple[str, bool, int, str, int]:
        return (variant, gate, ttt, quantity, depth)

    def tau(variant: str, gate: bool = PLAIN, ttt: int = 4) -> tuple[str, bool, int, str, int]:
        return (variant, gate, ttt, "tau", 0)

    rms, sink, recent, entropy = "rms_feedback", "mass_sink", "recent", "entropy"
    grow = paper_growth
    wanted: list[tuple[str, float | None, str, list, Callable]] = [
        (
            "eagle3: ln growth of the feedback's RMS, depth 1 to 8",
            grow("eagle3"),
            "first",
            ends(rms, "eagle3"),
            _growth,
        ),
        ("gate: ln growth of the feedback's RMS", grow("gate"), "first", ends(rms, "eagle3", GATED), _growth),
        (
            "norm_output: ln growth of the feedback's RMS",
            grow("norm_output"),
            "first",
            ends(rms, "norm_output"),
            _growth,
        ),
        *(
            (f"{variant}: {name}, depth 8 less depth 1", change(variant, name), "first", ends(quantity, variant), _rise)
            for variant in ("eagle3", "norm_output")
            for name, quantity in (("sink", sink), ("recent", recent), ("entropy", entropy))
        ),
        ("tau: norm_output less eagle3", None, "", [tau("eagle3"), tau("norm_output")], _rise),
        ("tau: fc_norm less eagle3", None, "", [tau("eagle3"), tau("fc_norm")], _rise),
        ("tau: eagle31 less eagle3", None, "", [tau("eagle3"), tau("eagle31")], _rise),
        (
            "tau: are the two switches independent? (eagle31 - norm_output) - (fc_norm - eagle3)",
            None,
            "",
            [tau("eagle3"), tau("fc_norm"), tau("norm_output"), tau("eagle31")],
            _interaction,
        ),
        ("tau: gate less none, pre-norm", None, "", [tau("eagle3"), tau("eagle3", GATED)], _rise),
        ("tau: gate less none, post-norm", None, "", [tau("norm_output"), tau("norm_output", GATED)], _rise),
        (
            "match at depth 8: norm_output less eagle3 (all starts, text)",
            None,
            "",
            [at("eagle3", "match", 8), at("norm_output", "match", 8)],
            _rise,
        ),
        (
            "match at depth 16, TTT 2: eagle31 less eagle3",
            0.53,
            "second",
            [at("eagle3", "match", 16, ttt=2), at("eagle31", "match", 16, ttt=2)],
            _rise,
        ),
    ]
    lines = []
    for what, paper, hand, terms, statistic in wanted:
        prompts, seeds, n = contrast(cells, terms, statistic)
        if n:
            theirs = "" if paper is None else f"{paper:+.2f} ({hand} hand)"
            ours = f"{prompts.value:+.3f}", _ends(prompts), f"{_ends(seeds)} n={n}"
            lines.append((what, theirs, *ours, _word(prompts, seeds, paper), STUDY_COMMAND))
    return lines


def paper_growth(drafter: str) -> float:
    """Published ln growth of the feedback's RMS, depth 1 to 8, Llama 3.1 8B."""
    first, last = (_number(drafter, "rms", k) for k in (1, 8))
    return float(np.log(last / first))


def change(drafter: str, quantity: str) -> float:
    """Published change of a quantity from depth 1 to 8, Llama 3.1 8B."""
    first, last = (_number(drafter, quantity, k) for k in (1, 8))
    return last - first


def _number(drafter: str, quantity: str, depth: int) -> float:
    numbers = pd.read_csv(PAPER, comment="#")
    found = numbers[
        (numbers["drafter"] == drafter) & (numbers["quantity"] == quantity) & (numbers["depth"] == depth)
        & numbers["source"].str.contains("Llama")
    ]  # fmt: skip
    return float(found["value"].iloc[0])


def _ends(interval: Interval) -> str:
    return "none" if np.isnan(interval.low) else f"[{interval.low:+.3f}, {interval.high:+.3f}]"


def _word(prompts: Interval, seeds: Interval, paper: float | None) -> str:
    """Both intervals must be away from 0, on one side, for a direction; what the paper has no sign for is only described."""
    sides = {np.sign(i.low) if i.low * i.high > 0 else 0.0 for i in (prompts, seeds) if not np.isnan(i.low)}
    decided = len(sides) == 1 and 0.0 not in sides and not np.isnan(seeds.low)
    if paper is None:
        return f"{'above' if prompts.value > 0 else 'below'} 0" if decided else "undecided"
    if abs(paper) < SMALL:
        return (
            "no change published; a change here" if decided and abs(prompts.value) >= SMALL else "no change in either"
        )
    if not decided:
        return "undecided"
    return "same direction" if (prompts.value > 0) == (paper > 0) else "opposite"


# ---------------------------------------------------------------------------------------------- the lab


def lab_claims() -> list[tuple[str, ...]]:
    """The lab's contrasts: one training each, so prompts are their only interval."""
    if not LAB.is_file():
        return []
    lines = []
    for line in pd.read_csv(LAB, comment="#").itertuples():
        theirs = "" if np.isnan(line.paper) else f"{line.paper:+.2f} ({line.hand} hand)"
        interval = Interval(line.ours, line.low, line.high)
        word = f"{line.word} (one training)" if line.word in ("same direction", "opposite") else line.word
        lines.append((line.claim, theirs, f"{line.ours:+.3f}", _ends(interval), "none n=1", word, LAB_COMMAND))
    return lines


if __name__ == "__main__":
    sys.exit(main())
