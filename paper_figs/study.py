"""The table of the study's figure, from the cells of ``experiments/ablate.py``: pooled ratios, a line a training and depth."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from driftlab.ablation import read_cells
from paper_figs.style import COMMAND, Table

BY_DEPTH = ("rms_feedback", "mass_sink", "recent", "entropy", "match")
FIELDS = ("variant", "gate", "ttt", "seed")
COMMAND_LINE = "python experiments/ablate.py two_by_two gate ttt"
_PLAIN = {"intervention": "", "qk_norm": False, "norm_before_fc": False, "loss": "soft_ce", "aux_layers": ()}
_PLAIN |= {"conversations": 0, "perturbation": "chat", "window": 0}


def study(run: Path) -> Table:
    """Pool each plain training's held-out rows over prompts (and heads); tau with its interval over prompts.

    Raises:
        DriftlabError: no cells there.
    """
    cells = read_cells(run)
    plain = pd.Series(True, index=cells.index)
    for name, value in _PLAIN.items():
        plain &= cells[f"cell_{name}"].map(lambda held, value=value: held == value)
    rows = cells[plain & (cells["category"] == "held-out")]
    tau = rows[(rows["quantity"] == "tau") & (rows["prompt"] == "")]
    frame = pd.concat([_named(tau), *(_pooled(rows, quantity) for quantity in BY_DEPTH)], ignore_index=True)
    first = rows.iloc[0]
    words = (
        f"{first['target']} · drafters of {first['cell_steps']} training steps, K = {first['cell_depth']}, held-out "
        "conversations; tau: 95 % intervals over prompts; by depth: pooled over starts or chains and heads, no interval; a "
        "line is one training (seed)"
    )
    return Table(frame, f"{words}{COMMAND}{COMMAND_LINE}")


def _named(rows: pd.DataFrame) -> pd.DataFrame:
    fields = {name: rows[f"cell_{name}"] for name in FIELDS}
    frame = pd.DataFrame({"quantity": rows["quantity"], **fields})
    frame["drafter"] = [_name(variant, gate) for variant, gate in zip(frame["variant"], frame["gate"], strict=True)]
    for name in ("depth", "value", "low", "high", "n"):
        frame[name] = rows[name]
    return frame


def _name(variant: str, gate: bool) -> str:
    """Name a training as the lab names its drafters."""
    if not gate:
        return variant
    return "gate" if variant == "eagle3" else f"gate+{variant}"


def _pooled(rows: pd.DataFrame, quantity: str) -> pd.DataFrame:
    """Mean weighted with n; a missing value has no weight."""
    some = rows[(rows["quantity"] == quantity) & (rows["prompt"] != "")]
    weight = some["n"].where(some["value"].notna(), 0.0)
    some = some.assign(top=some["value"].fillna(0.0) * weight, weight=weight)
    keys = ["quantity", *(f"cell_{name}" for name in FIELDS), "depth"]
    sums = some.groupby(keys, sort=False)[["top", "weight"]].sum().reset_index()
    value = np.divide(sums["top"], sums["weight"], out=np.full(len(sums), np.nan), where=sums["weight"] > 0)
    return _named(sums.assign(value=value, low=np.nan, high=np.nan, n=sums["weight"]))
