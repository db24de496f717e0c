"""Draw every figure as PDF and PNG, from the committed tables or from a run of your own.

    python -m paper_figs [NAME ...] [--out DIR]
    python -m paper_figs --from RUN_DIR [NAME ...] [--out DIR]

Without --from: each figure (or those named) from data/, into paper_figs/out/. With it: the figures whose tables RUN_DIR can
give (rows.parquet of driftlab demo, probe or simulate; the tables of experiments/lab.py and estimator_bias.py), beside the
published numbers, into RUN_DIR/figures; what is missing is said. The committed tables are not touched.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType

from matplotlib.figure import Figure

from driftlab.errors import DriftlabError
from paper_figs import style
from paper_figs.tables import FROM_RUN, write

HERE = Path(__file__).parent
OUT = HERE / "out"
WAITING: dict[str, str] = {}
"""figures of a run's table alone, and why no such table is committed yet"""


def names() -> list[str]:
    """Return the names of all figures."""
    return sorted(path.stem for path in HERE.glob("fig_*.py"))


def script(name: str) -> ModuleType:
    """Return a figure's script: ``TABLES`` (names of the tables it reads) and ``draw(data: Path) -> Figure``."""
    if name not in names():
        raise DriftlabError(f"there is no figure {name!r}; there are {', '.join(names())}")
    return importlib.import_module(f"paper_figs.{name}")


def render(name: str, data: Path = style.DATA) -> Figure:
    """Draw a figure from the tables in ``data``."""
    with style.theme():
        return script(name).draw(data)


def save(figure: Figure, out: Path, name: str) -> None:
    """Write PDF and PNG; no date in the files: the same table gives the same bytes."""
    out.mkdir(parents=True, exist_ok=True)
    with style.theme():
        figure.draw_without_rendering()  # lays it out, once for both files
        figure.set_layout_engine("none")
        figure.savefig(out / f"{name}.pdf", metadata={"CreationDate": None})
        figure.savefig(out / f"{name}.png", metadata={"Software": None})


def tables_of(run: Path, wanted: set[str], data: Path) -> dict[str, str]:
    """Make the wanted tables of a run in ``data``, put the published ones beside them; return why others could not be made."""
    if not run.is_dir():
        raise DriftlabError(f"{run} is not a folder")
    why = {}
    for name in sorted(wanted):
        if name not in FROM_RUN:
            (data / f"{name}.csv").write_bytes((style.DATA / f"{name}.csv").read_bytes())
            continue
        try:
            write(FROM_RUN[name](run), data / f"{name}.csv")
        except DriftlabError as error:
            why[name] = str(error)
    return why


def from_run(run: Path, chosen: list[str], out: Path) -> list[str]:
    """Draw the figures that a run can give; return what is to be said of those that it cannot."""
    said = []
    with tempfile.TemporaryDirectory() as temporary:
        data = Path(temporary)
        why = tables_of(run, {table for name in chosen for table in script(name).TABLES}, data)
        for name in chosen:
            needed = script(name).TABLES
            if not set(needed) & set(FROM_RUN):
                said.append(f"{name}: drawn from published numbers alone; a run does not change it")
                continue
            if lacking := [table for table in needed if table in why]:
                said.append(f"{name}: not drawn. {'; '.join(why[table] for table in lacking)}")
                continue
            try:
                _timed(name, data, out)
            except DriftlabError as error:
                said.append(f"{name}: not drawn. {error}")
    return said


def _timed(name: str, data: Path, out: Path) -> None:
    began = time.perf_counter()
    save(render(name, data), out, name)
    print(f"{name}: {time.perf_counter() - began:.1f} s")


def main(arguments: list[str] | None = None) -> int:
    """Return 0 if everything that was asked for is drawn; without names, --from asks for what the run can give."""
    parser = argparse.ArgumentParser(
        prog="paper_figs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--from", dest="run", type=Path, metavar="RUN_DIR")
    parser.add_argument("--out", type=Path, metavar="DIR")
    chosen = parser.parse_args(arguments)
    try:
        wanted = chosen.names or names()
        if chosen.run is not None:
            out = chosen.out or chosen.run / "figures"
            said = from_run(chosen.run, wanted, out)
            print("\n".join(said))
            drawn = len(wanted) - len(said)
            print(f"{drawn} of {len(wanted)} figures drawn into {out}" if drawn else "no figure could be drawn")
            return int(bool(said) if chosen.names else drawn == 0)
        failed = 0
        for name, why in {} if chosen.names else WAITING.items():
            wanted = [other for other in wanted if other != name]
            print(f"{name}: no committed table yet: {why}")
        for name in wanted:
            try:
                _timed(name, style.DATA, chosen.out or OUT)
            except DriftlabError as error:
                failed += 1
                print(f"{name}: not drawn. {error}", file=sys.stderr)
    except DriftlabError as error:
        print(error, file=sys.stderr)
        return 1
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
