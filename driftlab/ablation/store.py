"""The folder of an ablation: per cell ``KEY.parquet`` (or .csv) and ``KEY.run.json``, its provenance, written before it.

A table that is there is whole. What is being made is locked (``.locks/``), so two processes on one folder share the cells; a
dead process holds no lock. Why a cell failed is in ``KEY.error.txt`` until it succeeds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from filelock import FileLock, Timeout

from driftlab.ablation.cells import Cell
from driftlab.errors import DriftlabError
from driftlab.files import read_json, write_text
from driftlab.results import read_rows, write_rows

SUFFIXES = (".parquet", ".csv")


class Store:
    """Tables of cells in ``folder``: ``settings`` that all of them are made with, and the fields of each by key, as JSON."""

    def __init__(
        self, folder: Path, suffix: str, settings: Mapping[str, Any], configs: Mapping[str, dict[str, Any]]
    ) -> None:
        if suffix not in SUFFIXES:
            raise DriftlabError(f"suffix {suffix!r}: tables are {' or '.join(SUFFIXES)}")
        self.folder, self.suffix, self.settings, self.configs = folder, suffix, dict(settings), configs

    def table(self, key: str) -> Path:
        """Where the cell's table is, or will be."""
        return self.folder / f"{key}{self.suffix}"

    def finished(self, cell: Cell) -> bool:
        """Whether the cell's table is there, and is this cell's.

        Raises:
            DriftlabError: a table that was made with other values of fields that are now left at their default, or with other
                settings: it would be taken for something that it is not.
        """
        path = self.table(cell.key)
        if not path.is_file():
            return False
        told = self.provenance(cell.key)["settings"]
        for what, had, now in (
            ("", told["cell"], self.configs[cell.key]),
            ("the settings' ", told["settings"], self.settings),
        ):
            # a field that was added since has, by its default, the old meaning
            for name in sorted(set(had) & set(now) if not what else set(had) | set(now)):
                if had.get(name) != now.get(name):
                    raise DriftlabError(
                        f"{path} was made with {what}{name} {had.get(name)!r}, and now it is {now.get(name)!r}: give another "
                        "folder, or remove that table"
                    )
        return True

    def provenance(self, key: str) -> dict[str, Any]:
        """Return how a finished cell was made. Raises DriftlabError if its file does not say."""
        return read_provenance(self.folder / f"{key}.run.json")

    def write(self, cell: Cell, frame: pd.DataFrame, record: Mapping[str, Any]) -> None:
        """Write a cell's provenance and, last, its table."""
        write_rows(self.table(cell.key), frame, record)
        self._error(cell.key).unlink(missing_ok=True)

    def fail(self, cell: Cell, reason: str, trace: str) -> None:
        """Keep why a cell failed."""
        write_text(self._error(cell.key), f"{reason}\n\n{trace}")

    def reason(self, cell: Cell) -> str | None:
        """Return why the cell failed the last time, None if it did not."""
        path = self._error(cell.key)
        return path.read_text(encoding="utf-8").splitlines()[0] if path.is_file() else None

    def claim(self, cell: Cell) -> FileLock | None:
        """Return the cell's lock, held, or None if another process makes the cell. Remove what a killed one left of it."""
        lock = FileLock(self._lock(cell.key))
        try:
            self._lock(cell.key).parent.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
        except Timeout:
            return None
        except OSError as error:
            raise DriftlabError(f"cannot write into {self.folder} ({error}): choose another folder") from error
        half = re.compile(rf"\.{re.escape(cell.key)}(\{self.suffix}|\.run\.json|\.error\.txt)\.[a-z0-9_]+\.tmp")
        for path in self.folder.glob(".*.tmp"):
            if half.fullmatch(path.name):
                path.unlink(missing_ok=True)
        return lock

    def taken(self, cell: Cell) -> bool:
        """Whether some process makes the cell now."""
        path = self._lock(cell.key)
        if not path.is_file():
            return False
        lock = FileLock(path)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return True
        lock.release()
        return False

    def _lock(self, key: str) -> Path:
        return self.folder / ".locks" / f"{key}.lock"

    def _error(self, key: str) -> Path:
        return self.folder / f"{key}.error.txt"


def read_provenance(path: Path) -> dict[str, Any]:
    """Read a cell's provenance. Raises DriftlabError for a file that was not written as one."""
    record = read_json(path)
    told = record.get("settings") if isinstance(record, dict) else None
    if not isinstance(told, dict) or not all(isinstance(told.get(name), dict) for name in ("cell", "settings")):
        raise DriftlabError(
            f"{path} does not say how its cell was made: remove it and its table, and the cell is made again"
        )
    return record


def read_cells(out: str | Path, cells: Iterable[Cell] | None = None) -> pd.DataFrame:
    """Return the rows of finished cells in one frame, with ``cell`` (the key) and a column ``cell_NAME`` for every field.

    Args:
        out: folder of an ablation.
        cells: which; default all that are there. Fields that a cell does not have are missing.

    Raises:
        DriftlabError: nothing there, a cell that is not finished, a table that was changed.
    """
    out = Path(out)
    keys = None if cells is None else [cell.key for cell in cells]
    if keys is None:
        tables = sorted(path for path in out.glob("*") if path.suffix in SUFFIXES)
    else:
        tables = [_table(out, key) for key in keys]
    frames = []
    for path in tables:
        record = read_provenance(path.with_name(f"{path.stem}.run.json"))
        rows = read_rows(path)
        fields = {name: tuple(v) if isinstance(v, list) else v for name, v in record["settings"]["cell"].items()}
        own = {f"cell_{name}": pd.Series([value] * len(rows), index=rows.index) for name, value in fields.items()}
        frames.append(rows.assign(cell=path.stem, **own))
    if not frames:
        raise DriftlabError(f"{out} holds no table of a cell: run the ablation first")
    return pd.concat(frames, ignore_index=True)


def _table(out: Path, key: str) -> Path:
    for suffix in SUFFIXES:
        if (out / f"{key}{suffix}").is_file():
            return out / f"{key}{suffix}"
    raise DriftlabError(f"{out} holds no table of the cell {key!r}: it is not finished")
