"""Run the cells of an ablation that are not finished, and keep one table each.

Per cell: take its lock, look again whether it is finished, run it, write its provenance and then its table, let the lock go. A
killed run leaves finished cells and nothing else; started again it makes the rest. What a cell's table holds depends on the
cell alone: threads are the cell's, and time, machine and commit are in the provenance. A cell that fails is told, and the
others go on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from driftlab.ablation.cells import Cell, config_of, distinct
from driftlab.ablation.executors import Event, Executor, InProcess, Run, Session
from driftlab.ablation.store import Store, read_cells
from driftlab.errors import DriftlabError
from driftlab.results import provenance

_POLL = 1.0
"""seconds between looks at cells that another process makes"""
_TELL_EVERY = 60.0
"""seconds after which the time left is told again"""

Status = Literal["done", "found", "failed", "running", "waiting"]


@dataclass(frozen=True)
class CellState:
    """A cell's state. done: made now; found: it was there, or another process made it; running: another process makes it."""

    cell: Cell
    status: Status
    reason: str = ""
    seconds: float = 0.0

    @property
    def words(self) -> str:
        """One line."""
        told = f"{self.status:8}{self.cell.key}"
        told += f"  {_clock(self.seconds)}" if self.status == "done" else ""
        return f"{told}  {self.reason}" if self.reason else told


@dataclass(frozen=True)
class Snapshot:
    """How far a run is. ``what``: what has just happened, for a log; ``seconds_left``: None while nothing is known."""

    what: str
    total: int
    finished: int
    running: tuple[str, ...]
    failed: tuple[tuple[str, str], ...]
    seconds_left: float | None

    @property
    def words(self) -> str:
        """One line."""
        counts = f"{self.finished} of {self.total} done, {len(self.running)} running, {len(self.failed)} failed"
        left = "" if self.seconds_left is None else f", about {_clock(self.seconds_left)} left"
        return f"{self.what} ({counts}{left})"


@dataclass(frozen=True)
class Report:
    """The state of every cell, in the order given."""

    out: Path
    states: tuple[CellState, ...]

    @property
    def failed(self) -> list[CellState]:
        """Those that failed."""
        return [state for state in self.states if state.status == "failed"]

    @property
    def status(self) -> int:
        """Exit status of a program: 1 if a cell failed."""
        return int(bool(self.failed))

    @property
    def words(self) -> str:
        """A line per cell, failed ones last, and a sum."""
        lines = [state.words for state in sorted(self.states, key=lambda state: state.status == "failed")]
        counts = {state.status: 0 for state in self.states}
        for state in self.states:
            counts[state.status] += 1
        return "\n".join([*lines, f"{self.out}: " + ", ".join(f"{n} {status}" for status, n in counts.items())])

    def rows(self) -> pd.DataFrame:
        """Return the rows of all cells (see :func:`read_cells`). Raises DriftlabError if one is not finished."""
        return read_cells(self.out, [state.cell for state in self.states])


def ablate(
    cells: Sequence[Cell],
    run: Run,
    *,
    out: str | Path,
    executor: Executor | None = None,
    settings: Mapping[str, Any] | None = None,
    suffix: str = ".parquet",
    dry_run: bool = False,
    progress: Callable[[Snapshot], None] | None = None,
) -> Report:
    """Make the table of every cell that has none, by ``run(cell) -> DataFrame``; return what became of each.

    Args:
        cells: see :class:`Cell`.
        run: returns rows: what :func:`driftlab.results.as_rows` takes. What it draws at random it draws from the cell's seed.
        out: folder of the tables; several processes may work on one.
        executor: default :class:`InProcess`.
        settings: what ``run`` depends on beside the cell, for the provenance; a folder holds tables of one kind only.
        suffix: .parquet or .csv.
        dry_run: run nothing, write nothing; say what there is.
        progress: called when something happens, and once a minute.

    Raises:
        DriftlabError: cells that are none, a table made with other settings, a folder that cannot be written to.
    """
    found = distinct(cells)
    # as they will be read again: without this machine's folders
    plain = {"settings": dict(settings or {}), "cells": {key: config_of(cell) for key, cell in found.items()}}
    record = provenance(plain)
    told = record.pop("settings")
    store = Store(Path(out), suffix, told["settings"], told["cells"])
    states = {key: _state(store, cell) for key, cell in found.items()}
    if not dry_run:
        work = [state.cell for state in states.values() if state.status != "found"]
        if work:
            _Work(store, run, executor or InProcess(), record, states, progress).do(work)
    return Report(Path(out), tuple(states.values()))


def _state(store: Store, cell: Cell) -> CellState:
    if store.finished(cell):
        return CellState(cell, "found")
    if store.taken(cell):
        return CellState(cell, "running", "by another process")
    reason = store.reason(cell)
    return CellState(cell, "waiting") if reason is None else CellState(cell, "waiting", f"failed before: {reason}")


@dataclass
class _Work:
    """The loop's moving parts."""

    store: Store
    run: Run
    executor: Executor
    record: dict[str, Any]
    states: dict[str, CellState]
    progress: Callable[[Snapshot], None] | None
    running: dict[str, tuple[Any, float]] = field(default_factory=dict)
    """key -> lock, time of the start"""
    told: float = 0.0

    def do(self, cells: list[Cell]) -> None:
        """Make them."""
        by_key = {cell.key: cell for cell in cells}
        waiting, elsewhere = deque(cells), deque[Cell]()
        try:
            with self.executor.session(self.run) as session:
                while waiting or elsewhere or self.running:
                    while waiting and session.room(waiting[0]):
                        cell = waiting.popleft()
                        if not self._begin(session, cell):
                            elsewhere.append(cell)
                    if self.running:
                        for event in session.wait(_POLL):
                            self._end(session, by_key[event.key], event)
                    else:
                        time.sleep(_POLL)
                    if not waiting:  # another process may have finished, failed or died
                        waiting, elsewhere = elsewhere, deque()
                    if time.monotonic() - self.told > _TELL_EVERY:
                        self._tell(session, "still at work")
        finally:
            for lock, _ in self.running.values():
                lock.release()

    def _begin(self, session: Session, cell: Cell) -> bool:
        """Start a cell; False if another process makes it."""
        lock = self.store.claim(cell)
        if lock is None:
            if self.states[cell.key].status != "running":
                self.states[cell.key] = CellState(cell, "running", "by another process")
                self._tell(session, f"made by another process: {cell.key}")
            return False
        try:
            there = self.store.finished(cell)
        except DriftlabError:
            lock.release()
            raise
        if there:
            lock.release()
            self.states[cell.key] = CellState(cell, "found")
            self._tell(session, f"made by another process: {cell.key}")
            return True
        self.running[cell.key] = (lock, time.monotonic())
        self.states[cell.key] = CellState(cell, "running")
        self._tell(session, f"started {cell.key}")
        session.submit(cell)
        return True

    def _end(self, session: Session, cell: Cell, event: Event) -> None:
        lock, _ = self.running[cell.key]
        if event.rows is None:
            self.store.fail(cell, event.reason, event.trace)
            state = CellState(cell, "failed", event.reason, event.seconds)
        else:
            self.store.write(cell, event.rows, {**self.record, **self._how(cell, event)})
            state = CellState(cell, "done", "", event.seconds)
        self.states[cell.key] = state
        del self.running[cell.key]
        lock.release()
        self._tell(session, state.words)

    def _how(self, cell: Cell, event: Event) -> dict[str, Any]:
        need = cell.resources
        return {
            "settings": {"key": cell.key, "cell": self.store.configs[cell.key], "settings": self.store.settings},
            "seconds": round(event.seconds, 3),
            "attempts": event.attempts,
            "executor": type(self.executor).__name__,
            "resources": {"cpus": need.cpus, "gpus": need.gpus, "memory": need.memory, "threads": need.threads},
        }

    def _tell(self, session: Session, what: str) -> None:
        self.told = time.monotonic()
        if self.progress is None:
            return
        states = self.states.values()
        failed = tuple((s.cell.key, s.reason) for s in states if s.status == "failed")
        finished = sum(s.status in ("done", "found") for s in states)
        self.progress(Snapshot(what, len(states), finished, tuple(self.running), failed, self._left(session)))

    def _left(self, session: Session) -> float | None:
        """Mean seconds of the cells made so far, times what is left, over what runs at a time."""
        made = [s.seconds for s in self.states.values() if s.status == "done"]
        if not made:
            return None
        mean = sum(made) / len(made)
        now = time.monotonic()
        begun = sum(max(0.0, mean - (now - began)) for _, began in self.running.values())
        left = sum(s.status in ("waiting", "running") for s in self.states.values()) - len(self.running)
        return (begun + mean * left) / max(1.0, min(session.parallel, left + len(self.running)))


def _clock(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"
