"""How long does it take to start? ``import driftlab``, its command line and its results module, beside ``import torch``.

    python experiments/bench_import.py [--repeats 5]

Wall time of fresh interpreters that take turns, the first round left out (it fills the caches); medians. Results and plots
are meant to start without torch, so a fresh process is checked for it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_common import row, write

WHAT = {
    "python -c pass": ["-c", "pass"],
    "import driftlab": ["-c", "import driftlab"],
    "import driftlab.results": ["-c", "import driftlab.results"],
    "driftlab --help": ["-m", "driftlab", "--help"],
    "import torch": ["-c", "import torch"],
}
TORCH_FREE = ("import driftlab", "import driftlab.results")


def main() -> None:
    """Measure, check and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/bench_import.csv"))
    options = parser.parse_args()
    for code in TORCH_FREE:
        run(["-c", f"{code}; import sys; assert 'torch' not in sys.modules, '{code} imports torch'"])
    seconds: dict[str, list[float]] = {name: [] for name in WHAT}
    for number in range(1 + options.repeats):
        for name, arguments in WHAT.items() if number % 2 else reversed(WHAT.items()):
            took = run(arguments)
            if number:
                seconds[name].append(took)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    torch = median["import torch"]
    rows = [
        row(
            "import",
            name,
            median[name],
            "s",
            ratio=None if name == "import torch" else median[name] / torch,
            note="wall time of a fresh process, interpreter included; ratio to import torch",
        )
        for name in WHAT
    ]
    write(rows, options.out)


def run(arguments: list[str]) -> float:
    """Run a fresh interpreter away from the source folder, byte code cached as usual; return its wall time."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        took = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}: {done.stderr.strip()[-500:]}")
    return took


if __name__ == "__main__":
    main()
