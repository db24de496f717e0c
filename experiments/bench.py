"""All benchmarks, one after another, into one table: runs/bench.csv.

    python experiments/bench.py [--only replay training probes import]

Every ratio is of two things measured side by side in one run on the machine named in the row. A benchmark that fails is a
row that says why, the others go on, and the exit code is 1. A goal that is missed is a row with met = no.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import time
from pathlib import Path

from bench_common import row, write

HERE = Path(__file__).resolve().parent
BENCHES = ("replay", "training", "probes", "import")


def main() -> None:
    """Run, collect, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=BENCHES, default=BENCHES)
    parser.add_argument("--out", type=Path, default=Path("runs/bench.csv"))
    options = parser.parse_args()
    rows, failed = [], []
    for name in options.only:
        began = time.perf_counter()
        found, failure = run(name, options.out.with_name(f"bench_{name}.csv"))
        print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
        rows += found
        if failure:
            rows.append(row(name, "this benchmark failed", met=False, note=failure))
            failed.append(name)
    print()
    write(rows, options.out)
    print(f"\n{options.out}")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def run(name: str, out: Path) -> tuple[list[dict[str, str]], str]:
    """Run one benchmark; return its rows, and why it failed if it did. What an earlier run left is not read."""
    out.unlink(missing_ok=True)
    command = [sys.executable, str(HERE / f"bench_{name}.py"), "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        tail = b""
        while chunk := process.stderr.read1(65536):  # not by line: progress bars end theirs with a carriage return
            sys.stderr.buffer.write(chunk)
            sys.stderr.flush()
            tail = (tail + chunk)[-4000:]
    rows = []
    if out.is_file():
        with out.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    if process.returncode:
        said = tail.decode(errors="replace").split()
        return rows, f"exit code {process.returncode}: ...{' '.join(said)[-300:]}"
    return rows, "" if rows else "it wrote no rows"


if __name__ == "__main__":
    main()
