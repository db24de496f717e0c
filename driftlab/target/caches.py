"""What a target remembers of a text: one cache that can be cropped, and one of many slots."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers.cache_utils import DynamicCache

from driftlab.target.rollback import Rollback, running_layers


class TargetCache(DynamicCache):
    """What the layers remember of a text. ``rollback``: set by :func:`allow_crop` where a layer keeps a running state."""

    rollback: Rollback | None = None


class SlotCache:
    """Keys and values of independent sequences, one a slot, each written at a position of its own.

    Stands where a model expects its cache; it is asked for nothing but ``update``, since masks and positions are given.
    """

    def __init__(self, slots: int, length: int) -> None:
        self.slots, self.length, self.span = slots, length, 0
        self._rows = torch.arange(slots)
        self._k: dict[int, Tensor] = {}
        self._v: dict[int, Tensor] = {}

    def at(self, positions: Int[Tensor, " slot"]) -> None:
        """Say where the next token of every slot goes."""
        self._positions, self.span = positions, int(positions.max()) + 1
        self._rows = torch.arange(len(positions), device=positions.device)

    def update(self, k: Tensor, v: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write one key and value a slot, [slot kv_head 1 d_head]; return those up to the longest slot's."""
        for store, new in ((self._k, k), (self._v, v)):
            if layer_idx not in store:
                store[layer_idx] = new.new_zeros(self.slots, new.shape[1], self.length, new.shape[3])
            store[layer_idx][self._rows, :, self._positions] = new[:, :, 0]
        return self._k[layer_idx][:, :, : self.span], self._v[layer_idx][:, :, : self.span]

    def get_seq_length(self, *_: Any) -> int:
        """Longest slot so far."""
        return self.span

    def share(self, cache: DynamicCache) -> None:
        """Copy one sequence's keys and values to the first positions of every slot."""
        for index, layer in enumerate(cache.layers):
            stop = layer.get_seq_length()
            for store, values in ((self._k, layer.keys), (self._v, layer.values)):
                store[index] = values.new_zeros(self.slots, values.shape[1], self.length, values.shape[3])
                # a layer with a sliding window keeps the last positions only
                store[index][:, :, stop - values.shape[2] : stop] = values

    def keep(self, index: Int[Tensor, " slot"]) -> None:
        """Drop all slots but these."""
        self.slots = len(index)
        for store in (self._k, self._v):
            for layer in store:
                store[layer] = store[layer][index]


def allow_crop(cache: TargetCache) -> None:
    """Let :func:`crop` take back tokens of the passes that follow. After the prefill: it costs memory.

    Sliding-window layers keep what a crop takes back (transformers#47447); layers with a running state are run again.
    """
    running = set(running_layers(cache))
    for number, layer in enumerate(cache.layers):
        if number not in running and hasattr(layer, "activate_past_recording"):
            layer.activate_past_recording()
    if running:
        cache.rollback = Rollback(cache)


def crop(cache: TargetCache, remove: int) -> None:
    """Drop the last ``remove`` positions of a cache, fewer than the last pass had. Call it after every pass, with 0 too.

    (With 0, sliding-window layers drop what no crop will ask for; before transformers 5.24 the next pass fails without.)
    """
    if cache.rollback is None:
        cache.crop(-remove)
    else:
        cache.rollback.take_back(cache, remove)


def select(cache: DynamicCache, index: Int[Tensor, " row"]) -> None:
    """Keep these rows of a batch. (Layers with a running state know no ``batch_select_indices``.)"""
    cache.reorder_cache(index)
