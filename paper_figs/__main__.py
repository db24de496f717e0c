"""Draw every figure into paper_figs/out/ as PDF and PNG.

python -m paper_figs [NAME ...]
"""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path

from driftlab import plotting

HERE = Path(__file__).parent
OUT = HERE / "out"


def main() -> None:
    """Draw the figures named on the command line, or all: each module here has ``draw() -> Figure``."""
    names = sys.argv[1:] or sorted(p.stem for p in HERE.glob("fig_*.py"))
    OUT.mkdir(exist_ok=True)
    for name in names:
        began = time.perf_counter()
        with plotting.theme():
            figure = importlib.import_module(f"paper_figs.{name}").draw()
            # no date in the file: the same table gives the same bytes
            figure.savefig(OUT / f"{name}.pdf", metadata={"CreationDate": None}, bbox_inches="tight")
            figure.savefig(OUT / f"{name}.png", dpi=200, metadata={"Software": None}, bbox_inches="tight")
        print(f"{name}: {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
