"""Ablations: a list of cells, one table each, that can be stopped at any moment and go on with the same bits.

@dataclass(frozen=True, kw_only=True)
class My(Cell):
    width: int
    seed: int = 0

def run(cell):
    return pd.DataFrame({"quantity": ["loss"], "value": [measure(cell.width, cell.seed)]})

report = ablate([My(width=w, seed=s) for w in (1, 2) for s in (0, 1)], run, out="runs/my")
report.rows()
"""

from driftlab.ablation.cells import Cell, Resources, config_of
from driftlab.ablation.cluster import Ray
from driftlab.ablation.engine import CellState, Report, Snapshot, ablate
from driftlab.ablation.executors import Executor, InProcess, Processes
from driftlab.ablation.store import read_cells

__all__ = [
    "Cell",
    "CellState",
    "Executor",
    "InProcess",
    "Processes",
    "Ray",
    "Report",
    "Resources",
    "Snapshot",
    "ablate",
    "config_of",
    "read_cells",
]
