"""The GPU benchmark's dry run: every section that measures runs on a CPU, in the interpreter, and prints no time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "experiments" / "bench_kernels.py"
SECTIONS = ("machine", "replay", "backward", "step", "chain")


def run(*options, **environment):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *options],
        **{
            "env": {**os.environ, "OMP_NUM_THREADS": "1", **environment},
            "capture_output": True,
            "text": True,
            "check": False,
        },
    )


def test_the_dry_run_goes_through_every_section(tmp_path):
    done = run("--dry-run", "--out", str(tmp_path), "--only", *SECTIONS, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip().endswith("5 of 5 sections ran")
    result = json.loads((tmp_path / "kernels.json").read_text())
    assert result["dry_run"] is True
    assert set(SECTIONS) <= set(result)
    assert all(row["equal"] for row in result["chain"])
    checks = [row for row in result["replay"] if row.get("what") == "probes cost"]
    assert len(checks) == 3
    for row in checks:
        assert row["mass_sum_error"] < 1e-5
        assert row["entropy_error"] < 1e-4
    (gradients,) = [row for row in result["backward"] if "relative_difference" in row]
    assert 0 <= gradients["relative_difference"] < 1e-4
    assert "ms -" in done.stdout  # a dry run's times mean nothing


def test_without_the_interpreter_a_dry_run_says_how():
    done = run("--dry-run", TRITON_INTERPRET="0")
    assert done.returncode != 0
    assert "TRITON_INTERPRET=1 python experiments/bench_kernels.py --dry-run" in done.stderr


def test_without_a_gpu_there_is_nothing_to_measure():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device, so the whole benchmark would start")
    done = run(TRITON_INTERPRET="0")
    assert done.returncode != 0
    assert "no CUDA device is seen" in done.stderr
