r"""Random numbers that belong to a place: to a seed, a sequence's name, a row, a depth and a column, and to nothing else.

A generator's numbers depend on the order in which they are drawn, so on batching and on the executor. Here a counter is
hashed (the finaliser of SplitMix64: Steele, Lea and Flood, OOPSLA 2014), and two hashes make a normal number:

    n = sqrt(-2 ln u_1) cos(2 pi u_2)       (Box and Muller 1958)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def hashes(
    stream: str, ids: Sequence[str], rows: Int[Tensor, "batch row"], depth: int, columns: int
) -> Int[Tensor, "batch row column"]:
    """Return 64 random bits for each column of each row, as int64; ``stream``: seed and what they are for."""
    words = [int.from_bytes(hashlib.sha256(f"{stream} {depth} {name}".encode()).digest()[:8]) for name in ids]
    names = torch.tensor([_signed(word) for word in words], device=rows.device)
    places = _mixed(names[:, None] + (rows + 1) * _signed(_GOLDEN))
    steps = torch.arange(1, columns + 1, device=rows.device) * _signed(_GOLDEN)
    return _mixed(places[..., None] + steps)


def uniform(bits: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return float64 in (0, 1) from the upper 53 bits."""
    return (_right(bits, 11).double() + 0.5) * 2.0**-53


def normal(
    stream: str, ids: Sequence[str], rows: Int[Tensor, "batch row"], depth: int, width: int
) -> Float[Tensor, "batch row width"]:
    """Return standard normal numbers, float32."""
    first, second = uniform(hashes(stream, ids, rows, depth, 2 * width)).chunk(2, -1)
    return ((-2 * first.log()).sqrt() * (2 * math.pi * second).cos()).float()


def _mixed(x: Tensor) -> Tensor:
    x = (x ^ _right(x, 30)) * _signed(_FIRST)
    x = (x ^ _right(x, 27)) * _signed(_SECOND)
    return x ^ _right(x, 31)


def _right(x: Tensor, bits: int) -> Tensor:
    """Shift to the right as an unsigned number."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
