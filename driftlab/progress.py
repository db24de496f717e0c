"""How long work reports: a callback ``progress(what, done, total)``. The library never draws; this adapter does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Progress = Callable[[str, int, int], None]


def silent(what: str, done: int, total: int) -> None:
    """Report nothing."""


class ProgressBar:
    """Draws one tqdm bar per kind of work, in a terminal or a notebook. Pass an instance as ``progress=``."""

    def __init__(self) -> None:
        self._what: str | None = None
        self._bar: Any = None

    def __call__(self, what: str, done: int, total: int) -> None:
        """Draw."""
        from tqdm.auto import tqdm

        if what != self._what:
            self.close()
            self._what, self._bar = what, tqdm(total=total, desc=what, dynamic_ncols=True, leave=True)
        if self._bar is None:
            return
        self._bar.total = total
        self._bar.update(done - self._bar.n)
        if done >= total:
            self.close()

    def close(self) -> None:
        """Finish the bar that is open, if any."""
        if self._bar is not None:
            self._bar.close()
        self._bar = None
