"""Tables of many sequences, padded to one number of starts and filled batch by batch.

They are allocated once, at the first batch: parts and whole are never held together, and memory that is not there is missed
before the work, not behind it.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


class Stack:
    """Tables ``[sequences starts ...]`` by name.

    Args:
        sequences: number of them in all.
        starts: the most that one has.
    """

    def __init__(self, sequences: int, starts: int) -> None:
        self._sequences, self._starts, self._filled = sequences, starts, 0
        self._tables: dict[str, Tensor] = {}

    def add(self, parts: Mapping[str, Tensor], fills: Mapping[str, float] | None = None) -> None:
        """Copy the next sequences' parts ``[batch start ...]`` to the CPU. ``fills``: what pads a table, by name; default 0."""
        here = 0
        for name, part in parts.items():
            if name not in self._tables:
                shape = (self._sequences, self._starts, *part.shape[2:])
                self._tables[name] = part.new_full(shape, (fills or {}).get(name, 0), device="cpu")
            here = len(part)
            self._tables[name][self._filled : self._filled + here, : part.shape[1]] = part
        self._filled += here

    def whole(self) -> dict[str, Tensor]:
        """Return the tables."""
        return self._tables
