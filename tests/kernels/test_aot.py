"""Every shipped configuration compiles for sm_90 within its limits; no GPU is needed. Writes runs/aot_<module>.txt."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SPILLS = 40
"""instructions that may spill outside the loops on tensor cores, where each runs once a block"""


@pytest.fixture(scope="module", params=["replay_kernels", "chain_kernels"])
def table(request, tmp_path_factory):
    """The rows that the script writes for one module of kernels, compiled afresh in a child without the interpreter."""
    if find_spec(f"driftlab.kernels.{request.param}") is None:
        pytest.skip(f"there is no {request.param}")
    folder = tmp_path_factory.mktemp("aot")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": str(HERE.parents[1])}
    run = subprocess.run(
        [sys.executable, str(HERE / "aot.py"), str(folder), request.param],
        **{"env": environment, "capture_output": True, "text": True, "check": False},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    runs = HERE.parents[1] / "runs"
    runs.mkdir(exist_ok=True)
    (runs / f"aot_{request.param}.txt").write_text((folder / "aot.txt").read_text())
    rows = json.loads((folder / "aot.json").read_text())
    assert rows
    return rows


def on_sm90(table):
    return [row for row in table if row["sm"] == 90]


def test_shared_memory_is_within_what_a_block_may_use(table):
    from driftlab.kernels.configs import SMEM_LIMIT

    assert {row["name"]: row["smem"] for row in on_sm90(table) if row["smem"] > SMEM_LIMIT} == {}


def test_nothing_spills_in_the_inner_loops_and_little_elsewhere(table):
    spilling = [row for row in on_sm90(table) if row["inner_spills"] or row["spills"] > SPILLS]
    assert {row["name"]: (row["spills"], row["inner_spills"]) for row in spilling} == {}


def test_half_precision_uses_tensor_cores_of_a_warp_group(table):
    assert [row["name"] for row in on_sm90(table) if row["wants_wgmma"] and row["wgmma"] == 0] == []


def test_streaming_loops_copy_asynchronously(table):
    assert [row["name"] for row in on_sm90(table) if row["wants_async"] and row["cp_async"] == 0] == []


def test_other_architectures_compile(table):
    assert {row["sm"] for row in table} >= {80, 90, 100}
    assert all(row["cubin"] > 0 for row in table if row["sm"] != 90)
