r"""Sliding-window + sink attention of a target, by its attention mask: nothing is cut from a cache, no position is re-numbered.

Query t of a text sees key s of it iff the model's own mask m lets it, and

    s > t - W   or   s < S,           seen(t, s) = m(t, s) and (s > t - W or s < S),

positions counted from the text's first real token, W keys with its own, S sinks at the front. Absolute positions are kept, so
this is not StreamingLLM (arXiv 2309.17453), which re-numbers them inside a cut cache. A layer that has a window of its own sees
what both let it see. A learned sink logit (gpt-oss) is no key: it stays. The memory of a cache is not smaller.

The mask is put under a name of its own, with the attention function that the model has anyway: transformers leaves out the mask
of a name that has none registered, without a word.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import and_masks, eager_mask, sdpa_mask

from driftlab.errors import DriftlabError

_PREFIX = "driftlab_window"


@dataclass(frozen=True)
class Window:
    """The last ``width`` keys, a query's own among them, and the first ``sinks`` keys of the text."""

    width: int
    sinks: int = 0

    def __post_init__(self) -> None:
        if type(self.width) is not int or type(self.sinks) is not int or self.width < 1 or self.sinks < 0:
            raise DriftlabError(
                f"window={self.width!r}, sinks={self.sinks!r}: give at least 1 key, the query's own, and 0 or more sinks"
            )

    @property
    def label(self) -> str:
        """How it is called in settings and tables."""
        return f"window {self.width} + {self.sinks} sinks"

    def sees(
        self, queries: Int[Tensor, "*#shape"], keys: Int[Tensor, "*#shape"], first: Int[Tensor, "*#shape"]
    ) -> Bool[Tensor, "*shape"]:
        """Whether the window lets each query see each key; ``first``: where the text begins. Causality is not its matter."""
        return (keys > queries - self.width) | (keys < first + self.sinks)


@contextmanager
def windowed(model: Any, config: Any, window: Window) -> Iterator[None]:
    """Let a model attend through ``window`` in the block; its own attention comes back whatever happens.

    Raises:
        DriftlabError: an attention that takes no mask of ours (flash, flex), or a block inside another one.
    """
    before = config._attn_implementation
    if before.startswith(_PREFIX):
        raise DriftlabError(
            "target.attention(...) inside target.attention(...): leave the first block before the second"
        )
    if before not in ("eager", "sdpa"):
        raise DriftlabError(
            f"attention {before!r} takes no window by mask: load the target with eager or sdpa attention"
        )
    name = f"{_PREFIX}_{window.width}_{window.sinks}_{before}"
    if before == "eager":
        AttentionInterface.register(name, _own_eager)
    else:
        AttentionInterface.register(name, _sdpa)
    AttentionMaskInterface.register(name, window_mask(window, sdpa_mask if before == "sdpa" else eager_mask))
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        model.set_attn_implementation(before)


def window_mask(window: Window, factory: Callable[..., Any]) -> Callable[..., Any]:
    """Return a mask factory of transformers that hides from what ``factory`` makes all that the window does not see."""
    return functools.partial(_mask, window, factory)


def _mask(window: Window, factory: Callable[..., Any], **arguments: Any) -> Any:
    padding, batch = arguments["attention_mask"], arguments["batch_size"]
    # a batch padded on the left: the sinks are the first tokens of each text, not the first columns
    device = arguments.get("device", "cpu")
    first = torch.zeros(batch, dtype=torch.long, device=device) if padding is None else padding.int().argmax(1)

    def sees(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return window.sees(query, key, first[row])

    own = arguments["mask_function"]
    # SDPA's is_causal, and no mask at all, would see everything
    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return factory(**{**arguments, **skips, "mask_function": and_masks(own, sees)})


def _sdpa(module: Any, *tensors: Any, **kwargs: Any) -> Any:
    if kwargs.get("s_aux") is not None:
        raise DriftlabError(
            f"{type(module).__name__} has learned sinks, which SDPA would drop: load it with eager attention"
        )
    return sdpa_attention_forward(module, *tensors, **kwargs)


def _own_eager(module: Any, *tensors: Any, **kwargs: Any) -> Any:
    """Call the eager function of the module's own file: the one that knows its learned sinks or soft caps."""
    return vars(sys.modules[type(module).__module__])["eager_attention_forward"](module, *tensors, **kwargs)
