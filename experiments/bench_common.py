"""What the benchmarks share: one kind of row, worker processes that take turns, and peak memory. Standard library only.

A worker is a process of its own that has built everything and then waits; the bench asks the workers in turn for one
measured call each, so that whatever else the machine does meets all of them alike, and each has a peak memory of its own.
"""

from __future__ import annotations

import csv
import importlib.metadata
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

COLUMNS = ("benchmark", "what", "value", "unit", "ratio", "goal", "met", "note", "cpu", "threads", "torch")
_STATUS = Path("/proc/self/status")


def row(
    benchmark: str,
    what: str,
    value: float | None = None,
    unit: str = "",
    *,
    ratio: float | None = None,
    goal: str = "",
    met: bool | None = None,
    note: str = "",
    threads: int | None = None,
) -> dict[str, str]:
    """Return one row of the table; ``threads`` is torch's number, where torch is used."""
    values = {
        "benchmark": benchmark,
        "what": what,
        "value": "" if value is None else f"{value:.4g}",
        "unit": unit,
        "ratio": "" if ratio is None else f"{ratio:.3g}x",
        "goal": goal,
        "met": "" if met is None else "yes" if met else "no",
        "note": note,
        "cpu": f"CPU: {cpu_name()}",
        "threads": "" if threads is None else str(threads),
        "torch": version_of("torch"),
    }
    return {name: values[name] for name in COLUMNS}


def write(rows: Sequence[dict[str, str]], out: Path) -> None:
    """Write the rows as CSV and print them."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    show(rows)


def show(rows: Sequence[dict[str, str]]) -> None:
    """Print the rows, notes below the line they belong to."""
    names = [name for name in COLUMNS if name not in ("note", "cpu", "threads", "torch")]
    widths = {name: max(len(name), *(len(r[name]) for r in rows)) for name in names}
    print("  ".join(name.ljust(widths[name]) for name in names))
    for r in rows:
        print("  ".join(r[name].ljust(widths[name]) for name in names).rstrip())
        if r["note"]:
            print(f"    {r['note']}")
    for machine in dict.fromkeys((r["cpu"], r["threads"], r["torch"]) for r in rows):
        print(f"{machine[0]}; {machine[1] or 'no'} torch threads; torch {machine[2] or 'unknown'}")


def cpu_name() -> str:
    """Return the processor's name, as far as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def version_of(package: str) -> str:
    """Version of an installed package, without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def peak_mib() -> float:
    """Peak resident memory of this process in MiB.

    VmHWM where there is one: on Linux a child's ru_maxrss starts at what its parent had when it was started.
    """
    if _STATUS.is_file():
        for line in _STATUS.read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) / 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 1024


def serve(build: Callable[[dict[str, Any]], Callable[[], dict[str, Any]]]) -> None:
    """Be a worker: ``build(job) -> call``; then one line of JSON for each line on standard input, until it closes.

    The job is the first argument, as JSON. What the libraries print goes to standard error.
    """
    answers, sys.stdout = sys.stdout, sys.stderr
    call = build(json.loads(sys.argv[1]))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        result = call()
        seconds = time.perf_counter() - began
        print(json.dumps({"seconds": seconds, "peak_mib": peak_mib(), **result}), file=answers, flush=True)


class Worker:
    """The bench's end of a worker process."""

    def __init__(self, python: Path | str, script: Path, job: dict[str, Any]) -> None:
        self.name = job["name"]
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
        self.process = subprocess.Popen(
            [str(python), str(script), json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    def call(self) -> dict[str, Any]:
        """Ask for one measured call."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def _answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name}: the worker ended with exit code {self.process.wait()} (see above)")
        return json.loads(line)


def in_turn(workers: Sequence[Worker], repeats: int, *, warm_up: int = 1) -> dict[str, list[dict[str, Any]]]:
    """Call every worker ``warm_up`` + ``repeats`` times, one after another in each round; all answers, by name.

    The order is turned round after each round. The warm-up's answers come first.
    """
    answers: dict[str, list[dict[str, Any]]] = {worker.name: [] for worker in workers}
    for number in range(warm_up + repeats):
        for worker in workers if number % 2 == 0 else reversed(workers):
            answers[worker.name].append(worker.call())
            print(f"round {number}: {worker.name} {answers[worker.name][-1]['seconds']:.2f} s", file=sys.stderr)
    return answers
