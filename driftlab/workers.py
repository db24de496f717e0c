"""Run independent jobs in processes of few threads each, with one progress for all.

On a CPU two processes of one thread train faster than one process of two, and far faster once anything else wants a core:
threads of one torch operation wait for each other at its end, processes do not.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch

from driftlab.errors import DriftlabError
from driftlab.progress import Progress, silent

_POLL_SECONDS = 0.2
_reports: Any = None


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_jobs(
    function: Callable[..., Any],
    jobs: Sequence[tuple[Any, ...]],
    *,
    what: str,
    processes: int | None = None,
    progress: Progress = silent,
) -> list[Any]:
    """Return ``[function(*job, report) for job in jobs]``, computed in ``processes`` at a time.

    Args:
        function: importable by name; ``report(done, total)`` may be called as it goes on. Threads are shared out evenly.
        jobs: positional arguments, picklable.
        what: name of the work, for ``progress(what, done, total)``, summed over the jobs.
        processes: default one per core, at most one per job.
        progress: called in this process.

    Raises:
        The first exception of any job, or of ``progress``; the other jobs are then ended, wherever they are. DriftlabError if
        the processes could not start or were killed.
    """
    cores = usable_cores()
    processes = min(processes or cores, len(jobs))
    context = multiprocessing.get_context("spawn")
    reports, state = context.Queue(), [(0, 1)] * len(jobs)
    threads, before = max(1, cores // processes), set(multiprocessing.active_children())
    with ProcessPoolExecutor(processes, context, initializer=_start, initargs=(reports, threads)) as pool:
        futures = [pool.submit(_call, function, index, job) for index, job in enumerate(jobs)]
        waiting, told = set(futures), (-1, -1)
        try:
            while waiting:
                done, waiting = wait(waiting, _POLL_SECONDS, FIRST_COMPLETED)
                for future in done:
                    future.result()
                _drain(reports, state)
                now = (sum(d for d, _ in state), sum(t for _, t in state))
                if now != told:  # a log file gets a line per change, not per poll
                    progress(what, *now)
                    told = now
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in set(multiprocessing.active_children()) - before:
                process.terminate()
            if isinstance(error, BrokenProcessPool):
                raise DriftlabError(
                    f"{what}: a worker process ended before its time. In a script the call must stand under "
                    '`if __name__ == "__main__":`; otherwise memory may have run out: use processes=1, or fewer at a time'
                ) from error
            raise
    _drain(reports, state)  # a worker's last report is certain to be here only once it has ended
    total = sum(t for _, t in state)
    progress(what, total, total)
    return [future.result() for future in futures]


def _start(reports: Any, threads: int) -> None:
    """Set up a worker process: its share of the threads, and where it reports to."""
    global _reports
    _reports = reports
    torch.set_num_threads(threads)


def _call(function: Callable[..., Any], index: int, job: tuple[Any, ...]) -> Any:
    return function(*job, lambda done, total: _reports.put((index, done, total)))


def _drain(reports: Any, state: list[tuple[int, int]]) -> None:
    while True:
        try:
            index, done, total = reports.get_nowait()
        except queue.Empty:
            return
        state[index] = (done, total)
