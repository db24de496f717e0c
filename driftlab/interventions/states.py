r"""Interventions on the states that pass from depth to depth, on the captured states and on the embeddings.

With h the state that enters a depth (the fusion output at depth 1, the feedback deeper), e the embedding, n standard normal:

    noise       h + alpha rms(h) n,  or  e + alpha rms(e) n, before any norm       (arXiv 2605.09992, table 3)
    magnitude   h m / rms(h),  m: rms of the fusion output at the start's row (table 4), of the feedback of depth 1, or a number
    direction   h' rms(h) / rms(h'),  h' of another start
    held        h of depth 2 at every depth
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from driftlab.drafter import Drafter
from driftlab.errors import DriftlabError
from driftlab.hooks import HookPoint
from driftlab.interventions import draws
from driftlab.interventions.base import DEEPER, EVERY, ByRow, Intervention, Running, listen, rms
from driftlab.interventions.draws import normal


@dataclass(frozen=True, kw_only=True)
class OnFeedback(Intervention):
    """An intervention on the feedback that enters the depths it acts at."""

    depths: str | int = DEEPER

    def check(self) -> None:
        """See :meth:`Intervention.check`."""
        if self.acts_at(1):
            raise DriftlabError(f"{self.key}: depth 1 has no feedback; say depths from 2 on, as in @{DEEPER}")


@dataclass(frozen=True)
class Noise(Intervention):
    """Gaussian noise of ``alpha`` times the RMS on the "hidden" or the "embedding" path, at every depth unless said.

    A draw belongs to the seed, the sequence's id, the row and the depth: batches and executors do not change it. At depth 1 the
    path is that of every context row, so the keys that remain are noisy as well.
    """

    path: str
    alpha: float | int
    seed: int = 0

    kind: ClassVar[str] = "noise"
    forms: ClassVar[tuple[str, ...]] = ("noise:hidden:ALPHA[:seed=N]", "noise:embedding:ALPHA[:seed=N]")
    places: ClassVar[tuple[str, ...]] = ("path", "alpha")

    def check(self) -> None:
        """See :meth:`Intervention.check`."""
        if self.path not in ("hidden", "embedding") or not 0 <= self.alpha < float("inf"):
            raise DriftlabError(
                f'noise on the {self.path!r} path, alpha {self.alpha}: the path is "hidden" or "embedding", alpha a number >= 0'
            )

    def attach(self, drafter: Drafter, stack: ExitStack) -> None:
        """See :meth:`Intervention.attach`."""
        if self.alpha == 0:
            return
        running = Running(drafter, stack)
        if self.path == "embedding":
            _OnEmbedding(self, running).attach(drafter, stack)
            return
        listen(
            *(stack, drafter, "fusion.hook_fused"),
            lambda value, hook: self._noisy(value, running.new_rows(value.shape[1]), running, 1),
        )
        listen(
            *(stack, drafter, "hook_feedback"),
            lambda value, hook: self._noisy(value, running.rows_of(value, hook.depth), running, hook.depth + 1),
        )

    def _noisy(self, x: Tensor, rows: Tensor, running: Running, depth: int) -> Tensor:
        if not self.acts_at(depth):
            return x
        noise = normal(f"{self.seed} {self.path}", running.starts.ids, rows.expand(len(x), -1), depth, x.shape[-1])
        size = rms(x)
        return (x + self.alpha * size * noise.to(size.dtype)).to(x.dtype)


class _OnEmbedding:
    """Noise on what the first layer's norm of the embedding reads: there is no hook point before it."""

    def __init__(self, noise: Noise, running: Running) -> None:
        self.noise, self.running = noise, running
        self.entered, self.open = 0, False

    def attach(self, drafter: Drafter, stack: ExitStack) -> None:
        first = drafter.layers[0]
        norm = first.input_layernorm if drafter.config.architecture == "eagle3" else first.enorm
        listen(stack, drafter, "hook_starts", self._enter, read_only=True)
        listen(stack, drafter, "hook_feedback", self._enter, read_only=True)
        handle = norm.register_forward_pre_hook(self._before)
        stack.callback(handle.remove)
        listen(stack, drafter, "layers.0.hook_embed_normed", self._passed, read_only=True)

    def _enter(self, _: Any, hook: HookPoint) -> None:
        self.entered, self.open = hook.depth + 1, True

    def _before(self, norm: nn.Module, args: tuple[Tensor]) -> tuple[Tensor] | None:
        if not self.open:  # twice_normed: the hidden state passes the same norm afterwards
            return None
        self.open = False
        x = args[0]
        running = self.running
        rows = running.new_rows(x.shape[1]) if self.entered == 1 else running.rows_of(x, running.depth)
        return (self.noise._noisy(x, rows, self.running, self.entered),)

    def _passed(self, _: Tensor, hook: HookPoint) -> None:
        if hook.depth != self.entered:
            raise DriftlabError(
                f"noise on the embeddings: depth {hook.depth} came where depth {self.entered} was awaited; draft depth by depth"
            )


@dataclass(frozen=True)
class MagnitudePin(OnFeedback):
    """The feedback rescaled, its direction kept: to the RMS of the "fused" state of its row, of "depth1", or to a number.

    With norm_output the feedback is what the final norm leaves, and that is what is rescaled; logits are untouched at the same
    depth either way.
    """

    to: str | float | int

    kind: ClassVar[str] = "magnitude"
    forms: ClassVar[tuple[str, ...]] = ("magnitude:fused", "magnitude:depth1", "magnitude:RMS")
    places: ClassVar[tuple[str, ...]] = ("to",)

    def check(self) -> None:
        """See :meth:`Intervention.check`."""
        if self.to not in ("fused", "depth1") and (isinstance(self.to, str) or not 0 < self.to < float("inf")):
            raise DriftlabError(f'magnitude pin to {self.to!r}: it is "fused", "depth1" or a number > 0')
        super().check()

    def attach(self, drafter: Drafter, stack: ExitStack) -> None:
        """See :meth:`Intervention.attach`."""
        size = ByRow()
        running = Running(drafter, stack, size.clear)

        def on_fused(value: Tensor, hook: HookPoint) -> None:
            rows = running.new_rows(value.shape[1]).expand(len(value), -1)
            size.put(rows, rms(value), running.starts.segments.shape[1])

        def on_feedback(value: Tensor, hook: HookPoint) -> Tensor:
            rows, now = running.rows_of(value, hook.depth), rms(value)
            if self.to == "depth1" and hook.depth == 1:
                size.put(rows, now, running.starts.segments.shape[1])
            if not self.acts_at(hook.depth + 1):
                return value
            wanted = size.at(rows) if isinstance(self.to, str) else torch.full_like(now, self.to)
            return rescaled(value, now, wanted)

        if self.to == "fused":
            listen(stack, drafter, "fusion.hook_fused", on_fused)
        listen(stack, drafter, "hook_feedback", on_feedback)


def rescaled(x: Tensor, now: Tensor, wanted: Tensor) -> Tensor:
    """Return ``x``, of RMS ``now``, at the RMS ``wanted``; a state of zeros has no direction, and stays."""
    return (x * torch.where(now > 0, wanted / now, 1.0)).to(x.dtype)


@dataclass(frozen=True)
class DirectionSwap(OnFeedback):
    """The feedback's direction taken from another start, its magnitude kept.

    The other start is one of the same sequence at the same depth: the starts are put into a random ring, which seed, id and
    depth decide, and each takes the direction of the next. A chain has one start, so there ``bank [n, d_model]`` must be given:
    rows of it, drawn by seed, id, row and depth, are the directions (under every executor).
    """

    seed: int = 0
    bank: Tensor | None = field(default=None, compare=False, repr=False)

    kind: ClassVar[str] = "direction"
    forms: ClassVar[tuple[str, ...]] = ("direction[:seed=N]",)

    @property
    def key(self) -> str:
        """See :attr:`Intervention.key`; that a bank was given is said, its rows are not."""
        written = super().key
        return written if self.bank is None else written.replace(self.kind, f"{self.kind}:bank", 1)

    def attach(self, drafter: Drafter, stack: ExitStack) -> None:
        """See :meth:`Intervention.attach`."""
        if self.bank is not None and (self.bank.ndim != 2 or self.bank.shape[1] != drafter.config.hidden_size):
            raise DriftlabError(
                f"direction swap: the bank is {list(self.bank.shape)}, not [n, {drafter.config.hidden_size}] for this drafter"
            )
        running = Running(drafter, stack)

        def on_feedback(value: Tensor, hook: HookPoint) -> Tensor:
            rows, depth = running.rows_of(value, hook.depth), hook.depth + 1
            if not self.acts_at(depth):
                return value
            bits = draws.uniform(draws.hashes(f"{self.seed} direction", running.starts.ids, rows, depth, 1))[..., 0]
            if self.bank is None:
                other = value.gather(1, self._ring(bits, running)[..., None].expand_as(value))
            else:
                chosen = (bits * len(self.bank)).long().clamp(max=len(self.bank) - 1)
                other = self.bank.to(value.device, value.dtype)[chosen]
            return rescaled(other, rms(other), rms(value))

        listen(stack, drafter, "hook_feedback", on_feedback)

    @staticmethod
    def _ring(order: Tensor, running: Running) -> Tensor:
        """Return the place of the next start in the ring of the valid ones; a padded one keeps its own."""
        valid = running.valid
        if int(valid.sum(1).min()) < 2:
            raise DriftlabError(
                "direction swap: a sequence has a single start here, so there is no other direction; draft from all starts, or "
                "give a bank of directions"
            )
        ring = torch.where(valid, order, torch.inf).argsort(dim=1, stable=True)
        count = valid.sum(1, keepdim=True)
        after = (torch.arange(ring.shape[1], device=ring.device) + 1) % count
        own = torch.arange(ring.shape[1], device=ring.device).expand_as(ring)
        return torch.where(valid, own.scatter(1, ring, ring.gather(1, after)), own)


@dataclass(frozen=True)
class HeldFeedback(OnFeedback):
    """The feedback of depth 1 at every depth: only the token and the position are new."""

    kind: ClassVar[str] = "held"
    forms: ClassVar[tuple[str, ...]] = ("held",)

    def attach(self, drafter: Drafter, stack: ExitStack) -> None:
        """See :meth:`Intervention.attach`."""
        held = ByRow()
        running = Running(drafter, stack, held.clear)

        def on_feedback(value: Tensor, hook: HookPoint) -> Tensor:
            rows = running.rows_of(value, hook.depth)
            if hook.depth == 1:
                held.put(rows, value, running.starts.segments.shape[1])
            return held.at(rows) if self.acts_at(hook.depth + 1) else value

        listen(stack, drafter, "hook_feedback", on_feedback)


@dataclass(frozen=True)
class AuxScale(Intervention):
    """One captured target state times a factor: aux state ``index`` (0: the lowest), before its norm, or ``where="normed"``.

    Before the norm nothing changes for a drafter with fc_norm, which is what the norm is for. Only depth 1 reads these states.
    """

    index: int
    factor: float | int
    where: str = "captured"

    kind: ClassVar[str] = "aux"
    forms: ClassVar[tuple[str, ...]] = ("aux:INDEX:FACTOR[:where=normed]",)
    places: ClassVar[tuple[str, ...]] = ("index", "factor")

    def check(self) -> None:
        """See :meth:`Intervention.check`."""
        if self.where not in ("captured", "normed") or self.index < 0:
            raise DriftlabError(
                f'aux state {self.index}, where={self.where!r}: states count from 0, where is "captured" or "normed"'
            )
        if not self.acts_at(1):
            raise DriftlabError(f"{self.key}: only depth 1 reads the captured states")

    def attach(self, drafter: Drafter, stack: ExitStack) -> None:
        """See :meth:`Intervention.attach`."""
        if self.index >= drafter.config.states_read:
            raise DriftlabError(f"{self.key}: the drafter reads {drafter.config.states_read} states, 0 the lowest")

        def scale(value: Tensor, hook: HookPoint) -> Tensor:
            factor = torch.ones(value.shape[2], 1, dtype=value.dtype, device=value.device)
            factor[self.index] = self.factor
            return value * factor

        listen(stack, drafter, f"fusion.hook_{'states' if self.where == 'captured' else 'aux'}", scale)


@dataclass(frozen=True)
class GainRemoved(Intervention):
    """The final norm without its gain: y = u / rms(u), in what the head reads and in what is fed back (norm_output)."""

    kind: ClassVar[str] = "gain"
    forms: ClassVar[tuple[str, ...]] = ("gain",)

    def attach(self, drafter: Drafter, stack: ExitStack) -> None:
        """See :meth:`Intervention.attach`."""
        norm = drafter.norm
        if not drafter.config.head_norm:
            raise DriftlabError(
                "the final norm's gain cannot be removed: this drafter has no final norm (head_norm off)"
            )
        plain: list[Tensor] = []

        def keep(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
            wide = args[0].to(torch.promote_types(args[0].dtype, torch.float32))
            plain[:] = [(wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)).to(args[0].dtype)]

        stack.callback(norm.register_forward_hook(keep).remove)
        listen(stack, drafter, "hook_normed", lambda value, hook: plain[0] if self.acts_at(hook.depth) else value)


@dataclass(frozen=True)
class TorchHook(Intervention):
    """Any torch forward hook, ``function(module, args, output)``, on the drafter's module of a name.

    On a hook point it can act at some depths only; other modules are not told the depth. ``name``: what the key calls it, by
    default the function's module and name.
    """

    module: str
    function: Callable[..., Any] | str = field(compare=False)
    name: str = ""

    kind: ClassVar[str] = "hook"
    forms: ClassVar[tuple[str, ...]] = ("hook:MODULE:PACKAGE.FUNCTION",)

    def check(self) -> None:
        """See :meth:`Intervention.check`; a function given by its name is imported."""
        if isinstance(self.function, str):
            package, _, name = self.function.rpartition(".")
            try:
                found = getattr(import_module(package), name)
            except (ImportError, AttributeError, ValueError) as error:
                raise DriftlabError(
                    f"hook {self.function!r}: there is no such function to import ({error}). Write PACKAGE.FUNCTION; a file "
                    "mine.py of the current folder is found with PYTHONPATH=."
                ) from error
            object.__setattr__(self, "function", found)
        if not self.name:
            written = (
                f"{self.function.__module__}.{getattr(self.function, '__qualname__', type(self.function).__name__)}"
            )
            object.__setattr__(self, "name", written)

    @property
    def key(self) -> str:
        """See :attr:`Intervention.key`."""
        return f"hook:{self.module}:{self.name}" + ("" if self.depths == EVERY else f"@{self.depths}")

    def attach(self, drafter: Drafter, stack: ExitStack) -> None:
        """See :meth:`Intervention.attach`."""
        modules = dict(drafter.named_modules())
        if self.module not in modules:
            raise DriftlabError(
                f"{self.key}: the drafter has no module {self.module!r}; there are: {', '.join(modules)}"
            )
        module, function = modules[self.module], self.function
        if self.depths != EVERY and not isinstance(module, HookPoint):
            raise DriftlabError(
                f"{self.key}: {self.module} is no hook point, so it is not told the depth; leave out the depths"
            )

        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            if isinstance(module, HookPoint) and module.depth and not self.acts_at(module.depth):
                return None
            return self._fitting(function(module, args, output), output)

        stack.callback(module.register_forward_hook(hook).remove)

    def _fitting(self, result: Any, output: Any) -> Any:
        """Refuse a tensor of another shape: what comes next would fail on it, or broadcast it."""
        if isinstance(result, Tensor) and isinstance(output, Tensor) and result.shape != output.shape:
            raise DriftlabError(
                f"{self.key}: the function returned {list(result.shape)} in place of {list(output.shape)}; it must return a "
                "tensor of the output's shape, or None to leave it as it is"
            )
        return result
