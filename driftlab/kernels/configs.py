"""Tile sizes of the kernels, and what the ahead-of-time check compiles.

A tile is (BM, BN, warps, stages): BM query rows against BN keys at a time. The table was made by compiling for sm_90: no
entry spills registers in its inner loop, and shared memory stays below the 227 KiB of a block. Tiles of 128 rows and head
size 128 spill a few before and after it, where each instruction runs once a block (tests/kernels/test_aot.py). float32
is multiplied without tensor cores, exactly, in small tiles. The choice is frozen here rather than tuned at run time, so that
a result does not depend on a timing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Tile = tuple[int, int, int, int]

SMEM_LIMIT = 227 * 1024
"""bytes of shared memory that a block may use on sm_90"""

MANY_ROWS = 132 * 128
"""from so many query rows on, tiles of 128 rows still give every multiprocessor one"""

REPLAY: dict[tuple[int, str, str], Tile] = {
    (64, "half", "many"): (128, 64, 8, 3),
    (64, "half", "few"): (64, 64, 4, 3),
    (128, "half", "many"): (128, 64, 8, 2),
    (128, "half", "few"): (64, 64, 8, 3),
    (256, "half", "many"): (64, 32, 8, 2),
    (256, "half", "few"): (64, 32, 8, 2),
    (64, "single", "many"): (32, 16, 4, 2),
    (64, "single", "few"): (32, 16, 4, 2),
    (128, "single", "many"): (32, 16, 8, 2),
    (128, "single", "few"): (32, 16, 8, 2),
    (256, "single", "many"): (16, 16, 8, 2),
    (256, "single", "few"): (16, 16, 8, 2),
}
"""(largest padded head size, precision, number of query rows) -> tile of the replay kernel"""


@dataclass(frozen=True)
class AotCase:
    """One kernel with one set of constants, as the ahead-of-time check compiles it.

    ``types``: Triton type of each argument that is not in ``constexprs``. ``aligned``: arguments divisible by 16, as a
    launch would find them. ``wants_wgmma``, ``wants_async``: the machine code must hold tensor-core instructions of a
    warp group, and asynchronous copies.
    """

    name: str
    kernel: Any
    types: dict[str, str]
    constexprs: dict[str, Any]
    aligned: tuple[str, ...]
    warps: int
    stages: int
    wants_wgmma: bool
    wants_async: bool


def padded(size: int) -> int:
    """Return the power of two, at least 16, that a tensor core is given for a head size."""
    return max(16, 1 << (size - 1).bit_length())


def shape_class(d_head: int, d_value: int, itemsize: int, rows: int) -> tuple[int, str, str]:
    """Return the key of the table for a problem of so many query rows over all heads and sequences."""
    size = max(64, padded(d_head), padded(d_value))
    return size, "half" if itemsize == 2 else "single", "many" if rows >= MANY_ROWS else "few"


def replay_tile(d_head: int, d_value: int, itemsize: int, rows: int) -> Tile:
    """Return (BM, BN, warps, stages) for the replay kernel."""
    return REPLAY[shape_class(d_head, d_value, itemsize, rows)]
