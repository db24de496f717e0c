"""Named identity modules as hook points, and scoped hooks with the verbs that TransformerLens users know.

A hook point is a real submodule, so a plain ``register_forward_hook`` (and nnsight) works on it as well. What is added
here is scope: a hook lives for one ``with`` block, and it may replace the tensor it sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from driftlab.errors import DriftlabError

HookFunction = Callable[[Any, "HookPoint"], Any]
NamesFilter = str | Sequence[str] | Callable[[str], bool] | None


class HookPoint(nn.Module):
    """Identity on its first argument. The executor passes the draft depth along; hooks read it as ``hook.depth``."""

    def __init__(self) -> None:
        super().__init__()
        self.name = ""
        self.depth = 0
        self._readers = 0

    def forward(self, value: Any, depth: int) -> Any:
        """Return ``value`` and remember ``depth`` (1..K; 0 for what belongs to no depth) for the hooks."""
        self.depth = depth
        return value

    @property
    def watched(self) -> bool:
        """Whether anybody listens: what costs time to compute is computed only then."""
        return bool(self._forward_hooks)

    @property
    def replaceable(self) -> bool:
        """Whether a hook is attached that may replace the value: any that was not attached with ``read_only``."""
        return len(self._forward_hooks) > self._readers

    @contextmanager
    def listening(self, function: HookFunction, *, read_only: bool) -> Iterator[None]:
        """Attach ``function(value, hook)`` for the block; with ``read_only`` what it returns is ignored."""
        handle = self.register_forward_hook(_reading(function) if read_only else _adapt(function))
        self._readers += read_only
        try:
            yield
        finally:
            handle.remove()
            self._readers -= read_only


class ActivationCache(dict[tuple[str, int], Any]):
    """Cached activations. ``cache[name, depth]`` is one tensor; ``cache.calls(name, depth)`` all, one per batch."""

    def __getitem__(self, key: tuple[str, int]) -> torch.Tensor:
        calls = self.calls(*key)
        if len(calls) != 1:
            raise DriftlabError(f"{key} was seen {len(calls)} times (one per batch): use cache.calls{key}")
        return calls[0]

    def calls(self, name: str, depth: int) -> list[torch.Tensor]:
        """Return every tensor that passed ``name`` at ``depth``, in order. Raises DriftlabError if there is none."""
        try:
            return super().__getitem__((name, depth))
        except KeyError:
            raise DriftlabError(f"nothing cached for {(name, depth)}; there is: {sorted(self)}") from None


class HookedModule(nn.Module):
    """Adds scoped hooks to a module whose children include :class:`HookPoint`."""

    def name_hook_points(self) -> None:
        """Give every hook point its dotted path as name. Call once at the end of ``__init__``."""
        for name, module in self.named_modules():
            if isinstance(module, HookPoint):
                module.name = name

    @property
    def hook_dict(self) -> dict[str, HookPoint]:
        """All hook points by name."""
        return {name: module for name, module in self.named_modules() if isinstance(module, HookPoint)}

    def select_hooks(self, names: NamesFilter) -> list[HookPoint]:
        """Return the hook points that ``names`` selects: None for all, a name, names, or a predicate on names.

        A name may be shortened to its last part or parts (``"hook_resid"`` selects it in every layer). Raises
        DriftlabError when a name selects nothing, since a misspelt hook would silently do nothing.
        """
        points = self.hook_dict
        if names is None:
            return list(points.values())
        if callable(names):
            return [point for name, point in points.items() if names(name)]
        selected: list[HookPoint] = []
        for wanted in [names] if isinstance(names, str) else names:
            found = [point for name, point in points.items() if f".{name}".endswith(f".{wanted}")]
            if not found:
                raise DriftlabError(f"no hook point is called {wanted!r}; there are: {', '.join(points)}")
            selected += found
        return selected

    @contextmanager
    def hooks(
        self, fwd_hooks: Sequence[tuple[NamesFilter, HookFunction]], *, read_only: bool = False
    ) -> Iterator[HookedModule]:
        """Attach ``(names, fn)`` pairs for the block. ``fn(value, hook)`` may return a replacement, or None.

        ``read_only``: what they return is ignored. A fused kernel can serve such hooks, not one that may replace a value.
        """
        with ExitStack() as stack:
            for names, function in fwd_hooks:
                for point in self.select_hooks(names):
                    stack.enter_context(point.listening(function, read_only=read_only))
            yield self

    def run_with_hooks(
        self,
        *args: Any,
        fwd_hooks: Sequence[tuple[NamesFilter, HookFunction]],
        run: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run once with hooks. ``run(self, *args, **kwargs)`` is what runs, e.g. ``all_starts``; default the module."""
        with self.hooks(fwd_hooks):
            return self(*args, **kwargs) if run is None else run(self, *args, **kwargs)

    def run_with_cache(
        self,
        *args: Any,
        names_filter: NamesFilter = None,
        run: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ActivationCache]:
        """Run once and return ``(result, cache)``; ``cache[name, depth]`` is the (detached) tensor of that hook."""
        cache = ActivationCache()

        def keep(value: Any, hook: HookPoint) -> None:
            if isinstance(value, torch.Tensor):
                cache.setdefault((hook.name, hook.depth), []).append(value.detach())

        with self.hooks([(names_filter, keep)], read_only=True):
            result = self(*args, **kwargs) if run is None else run(self, *args, **kwargs)
        return result, cache


def _reading(function: HookFunction) -> Callable[[nn.Module, Any, Any], Any]:
    def hook(module: nn.Module, _args: Any, output: Any) -> None:
        function(output, module)

    return hook


def _adapt(function: HookFunction) -> Callable[[nn.Module, Any, Any], Any]:
    def hook(module: nn.Module, _args: Any, output: Any) -> Any:
        return function(output, module)

    return hook
