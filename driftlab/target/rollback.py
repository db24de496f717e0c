"""Take back the last tokens of a forward pass where a layer keeps a running state.

Linear attention and short convolutions keep one state for the whole text: no token can be cut out of it. (transformers'
own crop shortens the convolution's inputs and leaves the recurrent state as it was, without a word.) So the state before
the last pass is kept, put back, and the tokens that stay are run again: a second, short pass after every rejection.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

_Run = Callable[[int], None]


def running_layers(cache: Any) -> list[int]:
    """Return the numbers of the cache's layers that keep a running state."""
    return [number for number, layer in enumerate(cache.layers) if hasattr(layer, "recurrent_states")]


class Rollback:
    """What the running layers of one cache held before its last pass, and how to run that pass again."""

    def __init__(self, cache: Any) -> None:
        self._numbers = running_layers(cache)
        self._before: dict[int, Any] = {}
        self._tokens = 0
        self._run: _Run | None = None

    def note(self, cache: Any, tokens: int, run: _Run) -> None:
        """Keep the states before a pass over ``tokens`` tokens; ``run(n)`` runs the first n of them again."""
        # a deep copy: these layers write into their tensors
        self._before = {number: copy.deepcopy(cache.layers[number]) for number in self._numbers}
        self._tokens, self._run = tokens, run

    def take_back(self, cache: Any, remove: int) -> None:
        """Drop the last ``remove`` tokens of the last pass, 0 or more."""
        if self._run is None or not 0 <= remove < self._tokens:
            raise ValueError(f"{remove} tokens to take back, of a pass over {self._tokens}")
        run, self._run = self._run, None
        others = [layer for number, layer in enumerate(cache.layers) if number not in self._before]
        if remove:
            for number, layer in self._before.items():
                cache.layers[number] = layer
            for layer in others:
                layer.crop(-self._tokens)
            run(self._tokens - remove)
        for layer in others:
            layer.crop(0)  # a sliding window keeps more until then
