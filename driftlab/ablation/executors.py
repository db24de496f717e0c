"""Where cells run: in this process, or in processes beside it. (On a Ray cluster: ``driftlab.ablation.cluster``.)

An executor opens a session, which takes cells and gives back events. It never touches the ablation's folder: tables travel to
the process that called ``ablate``, which holds the locks and writes. Workers end when that process does, however it ends.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

import pandas as pd

from driftlab.ablation.cells import Cell
from driftlab.errors import DriftlabError
from driftlab.results import COLUMNS, as_rows

Run = Callable[[Any], pd.DataFrame]


@dataclass(frozen=True)
class Event:
    """What became of a cell: its rows, or why there are none."""

    key: str
    rows: pd.DataFrame | None
    reason: str
    trace: str
    seconds: float
    attempts: int = 1


class Session(ABC):
    """Takes cells while there is room, and tells what became of them."""

    @abstractmethod
    def room(self, cell: Cell) -> bool:
        """Whether the cell can be taken now."""

    @abstractmethod
    def submit(self, cell: Cell) -> None:
        """Take a cell."""

    @abstractmethod
    def wait(self, seconds: float) -> list[Event]:
        """Wait so long at most for something to happen; return what did."""

    @property
    @abstractmethod
    def parallel(self) -> float:
        """How many cells run at a time, roughly: for the time left."""


class Executor(ABC):
    """How cells are run."""

    @abstractmethod
    def session(self, run: Run) -> Any:
        """Return a context manager that yields a :class:`Session`; when it closes, nothing of it runs on."""


def perform(run: Run, cell: Cell, attempts: int = 1) -> Event:
    """Run a cell with the threads that it asks for; an exception becomes an event with its reason."""
    import torch

    began, threads = time.perf_counter(), torch.get_num_threads()
    torch.set_num_threads(cell.resources.threads)
    try:
        frame = run(cell)
        if not isinstance(frame, pd.DataFrame):
            raise DriftlabError(
                f"run returned a {type(frame).__name__}: it returns a DataFrame of rows (results.as_rows)"
            )
        if not len(frame):
            raise DriftlabError("run returned no rows")
        rows, reason, trace = _as_rows(frame, cell), "", ""
    except (Exception, SystemExit) as error:
        rows, reason, trace = None, _reason(error), traceback.format_exc()
    finally:
        torch.set_num_threads(threads)
    return Event(cell.key, rows, reason, trace, time.perf_counter() - began, attempts)


def lost(cell: Cell, how: str, seconds: float, attempts: int) -> Event:
    """Return the event of a cell whose worker was lost once too often."""
    reason = f"its worker was lost {attempts} time{'s' if attempts > 1 else ''} ({how})"
    return Event(cell.key, None, reason, "", seconds, attempts)


def _as_rows(frame: pd.DataFrame, cell: Cell) -> pd.DataFrame:
    """Fill what ``run`` left out; rows that name no drafter get the cell's key, so that tables can be put together."""
    unnamed = "drafter" not in frame
    rows = frame if list(frame) == list(COLUMNS) else as_rows(frame, **({"drafter": cell.key} if unnamed else {}))
    return rows[list(COLUMNS)]


def _reason(error: BaseException) -> str:
    told = " ".join(str(error).split())
    return told if isinstance(error, DriftlabError) else f"{type(error).__name__}: {told}".rstrip(": ")


# ---------------------------------------------------------------------------------------------- in this process


@dataclass(frozen=True)
class InProcess(Executor):
    """One cell after the other, here."""

    @contextmanager
    def session(self, run: Run) -> Iterator[Session]:
        """See :class:`Executor`."""
        yield _Here(run)


class _Here(Session):
    def __init__(self, run: Run) -> None:
        self._run, self._cell = run, None

    def room(self, cell: Cell) -> bool:
        return self._cell is None

    def submit(self, cell: Cell) -> None:
        self._cell = cell

    def wait(self, seconds: float) -> list[Event]:
        cell, self._cell = self._cell, None
        return [] if cell is None else [perform(self._run, cell)]

    @property
    def parallel(self) -> float:
        return 1.0


# ---------------------------------------------------------------------------------------------- in processes beside it


@dataclass(frozen=True)
class Processes(Executor):
    """Several at a time, in processes of this machine that each run one cell after the other.

    ``cores``: cells run beside one another as long as their ``resources.cpus`` sum to no more; default all that may be used.
    ``retries``: how often a cell is tried again whose process was killed (memory, mostly). A cell that raises is not.
    GPUs are not shared out: what several cells ask for on one GPU is up to ``run``.
    """

    cores: int | None = None
    retries: int = 1

    def __post_init__(self) -> None:
        if (self.cores is not None and self.cores < 1) or self.retries < 0:
            raise DriftlabError(f"{self}: cores is at least 1, retries not negative")

    @contextmanager
    def session(self, run: Run) -> Iterator[Session]:
        """See :class:`Executor`."""
        from driftlab.workers import usable_cores

        try:
            pickle.dumps(run)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise DriftlabError(
                f"run cannot be sent to another process ({error}): define it at the top level of a module, or run in process"
            ) from error
        session = _Beside(run, self.cores or usable_cores(), self.retries)
        try:
            yield session
        finally:
            session.close()


@dataclass
class _Worker:
    process: Any
    pipe: Any
    cell: Cell | None = None
    attempts: int = 0
    began: float = 0.0


class _Beside(Session):
    def __init__(self, run: Run, cores: int, retries: int) -> None:
        self._run, self._cores, self._retries = run, cores, retries
        self._workers: list[_Worker] = []

    def room(self, cell: Cell) -> bool:
        taken = sum(worker.cell.resources.cpus for worker in self._workers if worker.cell is not None)
        return taken == 0 or taken + cell.resources.cpus <= self._cores

    def submit(self, cell: Cell) -> None:
        idle = next((worker for worker in self._workers if worker.cell is None), None)
        self._give(idle or self._start(), cell, 1)

    def wait(self, seconds: float) -> list[Event]:
        busy = {worker.pipe: worker for worker in self._workers if worker.cell is not None}
        found = []
        for pipe in connection.wait(list(busy), seconds):
            worker = busy[pipe]
            try:
                found.append(pipe.recv())
                worker.cell = None
            except (EOFError, OSError):
                found += self._lost(worker)
        return found

    @property
    def parallel(self) -> float:
        busy = [worker.cell.resources.cpus for worker in self._workers if worker.cell is not None]
        return max(1.0, self._cores / (sum(busy) / len(busy))) if busy else float(self._cores)

    def close(self) -> None:
        """End the workers, wherever they are."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.pipe.close()
        self._workers = []

    def _start(self) -> _Worker:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._run), daemon=True)
        process.start()
        theirs.close()  # or its end would not be seen here
        self._workers.append(_Worker(process, ours))
        return self._workers[-1]

    def _give(self, worker: _Worker, cell: Cell, attempts: int) -> None:
        worker.cell, worker.attempts, worker.began = cell, attempts, time.perf_counter()
        try:
            worker.pipe.send((cell, attempts))
        except OSError:
            return  # it is dead: wait() will see it
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise DriftlabError(
                f"the cell {cell.key} cannot be sent to another process ({error}): "
                "define its class at the top level of a module"
            ) from error

    def _lost(self, worker: _Worker) -> list[Event]:
        worker.process.join()
        worker.pipe.close()
        self._workers.remove(worker)
        assert worker.cell is not None
        if worker.attempts <= self._retries:
            self._give(self._start(), worker.cell, worker.attempts + 1)
            return []
        code = worker.process.exitcode or 0
        how = f"killed by signal {signal.Signals(-code).name}" if code < 0 else f"it ended with status {code}"
        how += '; memory may have run out, and in a script the call must stand under `if __name__ == "__main__":`'
        return [lost(worker.cell, how, time.perf_counter() - worker.began, worker.attempts)]


def _serve(pipe: Any, run: Run) -> None:
    """Run cells until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            cell, attempts = pipe.recv()
        except EOFError:
            return
        pipe.send(perform(run, cell, attempts))


def _end_with_parent() -> None:
    """A killed parent ends nothing by itself; its workers would go on, and write into folders that are no longer theirs."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
