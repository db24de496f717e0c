"""Many runs with a name each: ablate."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional

from driftlab.errors import DriftlabError


def ablate(
    file: Positional[Path],
    out: Path | None = None,
    executor: Literal["in-process", "processes", "ray"] = "in-process",
    cores: int | None = None,
    address: str | None = None,
    retries: int = 2,
    only: str = "",
    suffix: Literal[".parquet", ".csv"] = ".parquet",
    dry_run: bool = False,
) -> None:
    """Make the table of every cell of a Python file that has none yet. Stopped at any moment, the same command goes on.

    The file defines CELLS, a list of driftlab.ablation.Cell, and run(cell), which returns rows; and, if its tables depend on
    more than the cell, SETTINGS, a dict.

    Args:
        file: .py.
        out: folder of the tables; default runs/<name of the file>.
        executor: in-process: one after the other; processes: several at a time on this machine; ray: on a Ray cluster.
        cores: of --executor processes; default all.
        address: of the Ray cluster, "auto" or host:port; default one that is started here.
        retries: how often a cell is tried again whose worker was lost.
        only: cells whose key holds this text.
        suffix: of the tables.
        dry_run: list the cells and their state, run nothing.
    """
    from driftlab.ablation import ablate as run_cells
    from driftlab.ablation.cells import distinct

    chosen = executor_of(executor, cores, address, retries)
    module = load_file(file)
    cells, run = distinct(_given(module, "CELLS", file)), _given(module, "run", file)
    wanted = [cell for key, cell in cells.items() if only in key]
    if not wanted:
        raise DriftlabError(f"--only {only}: none of the {len(cells)} keys of {file} holds it; --dry-run lists them")
    report = run_cells(
        wanted,
        run,
        out=out or Path("runs") / file.stem,
        executor=chosen,
        settings=vars(module).get("SETTINGS"),
        suffix=suffix,
        dry_run=dry_run,
        progress=tell,
    )
    print(report.words)
    sys.exit(report.status)


def executor_of(name: str, cores: int | None, address: str | None, retries: int) -> Any:
    """Return the executor of a name; options of another one are refused."""
    from driftlab.ablation import InProcess, Processes, Ray

    if cores is not None and name != "processes":
        raise DriftlabError("--cores is of --executor processes")
    if address is not None and name != "ray":
        raise DriftlabError("--address is of --executor ray")
    if name == "processes":
        return Processes(cores=cores, retries=retries)
    return Ray(address=address, retries=retries) if name == "ray" else InProcess()


def tell(snapshot: Any) -> None:
    """Write one line to stderr."""
    print(snapshot.words, file=sys.stderr, flush=True)


def load_file(file: Path) -> Any:
    """Import a Python file by its name, its folder on the path: so worker processes find it too."""
    if file.suffix != ".py" or not file.is_file():
        raise DriftlabError(f"{file} is no Python file: name one that defines CELLS and run(cell)")
    folder = str(file.resolve().parent)
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    known = sys.modules.get(file.stem)
    spec = known.__spec__ if known is not None else importlib.util.find_spec(file.stem)
    if spec is None or spec.origin is None or Path(spec.origin).resolve() != file.resolve():
        raise DriftlabError(f"{file}: its name is that of another module, {file.stem}, or no name of one: rename it")
    return importlib.import_module(file.stem)


def _given(module: Any, name: str, file: Path) -> Any:
    if name not in vars(module):
        raise DriftlabError(f"{file} defines no {name}: it needs CELLS, a list of cells, and run(cell)")
    return vars(module)[name]
