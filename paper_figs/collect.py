"""Make the small committed tables from a run's rows.

python -m paper_figs.collect runs/demo
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd

from driftlab.demo import TTT
from driftlab.files import atomic
from driftlab.plotting import caption, curve
from driftlab.results import read_rows
from paper_figs.fig_demo_depth import DATA, PANELS


def main() -> None:
    """Pool the demo's rows over prompts and write data/demo_curves.csv."""
    rows = read_rows(Path(sys.argv[1]) / "rows.parquet")
    rows = rows[rows["ttt"] == TTT]
    frames = [curve(rows, quantity).assign(quantity=quantity) for quantity in PANELS]
    said = caption(rows[rows["quantity"].isin(PANELS)])
    columns = ["quantity", "variant", "fc_norm", "norm_output", "depth", "value", "low", "high", "n"]
    with atomic(DATA) as temporary:
        body = pd.concat(frames)[columns].to_csv(index=False, float_format="%.6g")
        temporary.write_text(f"# {said}\n{body}", encoding="utf-8")


if __name__ == "__main__":
    main()
