"""What every intervention is: settings with a name, laid on a drafter for one ``with`` block, at some draft depths.

    with Noise("hidden", 0.25).on(drafter), SinkAblation("drop").on(drafter):
        all_starts(drafter, trajectory, depth=8, feed="own")

An intervention is a frozen record, so it can be printed, compared and used again; what it remembers of a run lives in the
block. It is put on as forward hooks and as ``steering`` of the attention blocks, and taken off by identity, so blocks may
end in any order. While one is on, hooks that may replace values are attached: neither fused kernels nor stored drafts
stand in for the modules then.

Depths count what an intervention changes: the pass that drafts token k of a chain is depth k. The feedback that *enters*
depth k left depth k - 1.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from driftlab.drafter import Drafter
from driftlab.drafter.blocks import Attention, Steer
from driftlab.errors import DriftlabError
from driftlab.hooks import HookPoint
from driftlab.segments import Starts

DEEPER, EVERY = "2-", "1-"
"""all depths but the first; all depths"""

OBSERVE, WINDOW, SCALING, ABLATION, PIN, OWN, MOVE = range(100, 30, -10)
"""ranks of what is laid on attention: the first sees the problem first, whatever the order of the ``with`` statements"""


@dataclass(frozen=True, kw_only=True)
class Intervention(ABC):
    """Settings of an intervention.

    ``depths``: "3", "2-4", "2-" (and deeper), "1,3", or a number; the default is the class's.
    """

    kind: ClassVar[str]
    forms: ClassVar[tuple[str, ...]]
    """how it is written on a command line"""
    places: ClassVar[tuple[str, ...]] = ()
    """fields that are written by place, the others by name where they are not the default"""

    depths: str | int = EVERY

    def __post_init__(self) -> None:
        object.__setattr__(self, "depths", str(self.depths).replace(" ", ""))
        _spans(str(self.depths))
        for setting in dataclasses.fields(self):
            self._check_kind(setting)
        self.check()

    def _check_kind(self, setting: dataclasses.Field[Any]) -> None:
        """A number where a name is wanted, half a key, an infinite factor: refused before anything runs."""
        value, kinds = getattr(self, setting.name), {kind.strip() for kind in str(setting.type).split("|")}
        if setting.name == "depths" or not kinds <= {"int", "float", "str"}:
            return
        whole = isinstance(value, int) and not isinstance(value, bool)
        number = whole or (isinstance(value, float) and math.isfinite(value))
        if not (
            ("str" in kinds and isinstance(value, str)) or ("float" in kinds and number) or ("int" in kinds and whole)
        ):
            wanted = {"float": "a finite number", "int": "a whole number", "str": "a name"}
            words = " or ".join(wanted[kind] for kind in sorted(kinds) if not (kind == "int" and "float" in kinds))
            raise DriftlabError(
                f"{self.kind}: {setting.name} is {value!r}, it is to be {words}; {' or '.join(self.forms)}"
            )

    def check(self) -> None:
        """Raise DriftlabError for settings that mean nothing; subclasses say which."""

    @property
    def key(self) -> str:
        """A readable name that holds every setting; ``parse_intervention`` makes the intervention of it again."""
        fields = {field.name: field for field in dataclasses.fields(self)}
        parts = [self.kind, *(_written(getattr(self, name)) for name in self.places)]
        for name, field in sorted(fields.items(), key=lambda item: item[0] == "layers"):
            value = getattr(self, name)
            if name not in (*self.places, "depths") and field.repr and value != field.default:
                parts.append(f"{name}={_written(value)}")
        depths = "" if self.depths == fields["depths"].default else f"@{self.depths}"
        return ":".join(parts) + depths

    def acts_at(self, depth: int) -> bool:
        """Whether it acts at a draft depth."""
        return any(first <= depth and (last is None or depth <= last) for first, last in _spans(str(self.depths)))

    @contextmanager
    def on(self, drafter: Drafter) -> Iterator[Any]:
        """Lay it on a drafter for the block; yields what it reports, or None.

        Raises:
            DriftlabError: a drafter that it has no meaning for.
        """
        with ExitStack() as stack:
            yield self.attach(drafter, stack)

    @abstractmethod
    def attach(self, drafter: Drafter, stack: ExitStack) -> Any:
        """Lay it on; what undoes it goes onto the stack."""


@contextmanager
def intervened(drafter: Drafter, interventions: Sequence[Intervention]) -> Iterator[list[Any]]:
    """Lay several on, in order, for the block; yields what each reports. Raises DriftlabError for what is no intervention."""
    if isinstance(interventions, str) or not all(isinstance(one, Intervention) for one in interventions):
        raise DriftlabError(
            f"intervened wants a list of interventions, not {interventions!r}: parse_intervention makes one of a text such as "
            '"pin:sink"'
        )
    with ExitStack() as stack:
        yield [stack.enter_context(intervention.on(drafter)) for intervention in interventions]


def key_of(interventions: Sequence[Intervention]) -> str:
    """Return the value of a settings column for several interventions at once; "" for none."""
    return " + ".join(intervention.key for intervention in interventions)


@dataclass(frozen=True, kw_only=True)
class OnAttention(Intervention):
    """An intervention on attention. ``layers``: of the drafter; default all."""

    layers: tuple[int, ...] | int = ()

    def __post_init__(self) -> None:
        layers = (self.layers,) if isinstance(self.layers, int) else self.layers
        if not isinstance(layers, tuple) or any(type(layer) is not int or layer < 0 for layer in layers):
            raise DriftlabError(f"{self.kind}: layers {layers!r} are to be numbers of layers, 0 the first")
        object.__setattr__(self, "layers", tuple(sorted(set(layers))))  # a layer named twice is one
        super().__post_init__()

    def blocks(self, drafter: Drafter) -> list[tuple[int, Attention]]:
        """Return the attention blocks that it acts on, with the numbers of their layers.

        Raises:
            DriftlabError: a layer that the drafter does not have.
        """
        count = len(drafter.layers)
        if wrong := [layer for layer in self.layers if not 0 <= layer < count]:
            raise DriftlabError(f"{self.key}: layer {wrong[0]} of a drafter that has layers 0..{count - 1}")
        return [(layer, drafter.layers[layer].self_attn) for layer in self.layers or range(count)]


@dataclass(frozen=True)
class Ranked:
    """A steer with its rank among those of a block."""

    rank: int
    steer: Steer

    def __call__(self, *args: Any) -> Any:
        """Pass the question on."""
        return self.steer(*args)


def steer(stack: ExitStack, drafter: Drafter, block: Attention, rank: int, function: Steer) -> None:
    """Put a steer on a block until the stack closes; among equal ranks the later is asked first."""
    mine = Ranked(rank, function)
    block.steering = tuple(sorted((*block.steering, mine), key=lambda other: getattr(other, "rank", 0)))

    def remove() -> None:
        block.steering = tuple(other for other in block.steering if other is not mine)

    stack.callback(remove)
    listen(stack, drafter, "hook_feedback", lambda value, hook: None)  # keeps fused kernels away


def listen(stack: ExitStack, drafter: Drafter, names: str, function: Any, *, read_only: bool = False) -> None:
    """Attach a hook until the stack closes."""
    stack.enter_context(drafter.hooks([(names, function)], read_only=read_only))


class Running:
    """Which rows are running: what hooks on states need to know, and are not told.

    ``rows``, ``valid [batch start]`` are those of the last pass through the last layer, or, before it, of the run's starts.
    """

    def __init__(self, drafter: Drafter, stack: ExitStack, on_run: Callable[[], None] = lambda: None) -> None:
        self._starts: Starts | None = None
        self._on_run = on_run
        self.depth = 0
        listen(stack, drafter, "hook_starts", self._on_starts, read_only=True)
        steer(stack, drafter, drafter.layers[-1].self_attn, OBSERVE, self._observe)

    def _on_starts(self, starts: Starts, hook: HookPoint) -> None:
        self._starts, self.depth = starts, hook.depth
        self.rows, self.valid = starts.rows, starts.valid
        if hook.depth == 0:  # trees tell their nodes at each depth
            self._on_run()

    def _observe(self, answer: Any, problem: Any, depth: int) -> Any:
        self.depth, self.rows, self.valid = depth, problem.rows, problem.valid
        return answer(problem)

    @property
    def starts(self) -> Starts:
        """The starts of the run. Raises DriftlabError outside of one."""
        if self._starts is None:
            raise DriftlabError(
                "an intervention is on, and the drafter was called without saying its starts: run it by all_starts, chain, "
                "Chain, tree_all_starts or speculate, or call drafter.hook_starts(starts, 0) first"
            )
        return self._starts

    def new_rows(self, count: int) -> Tensor:
        """Return the absolute rows of the newest ``count`` context rows, [1 row]."""
        total = self.starts.segments.shape[1]
        return torch.arange(total - count, total, device=self.starts.rows.device)[None]

    def rows_of(self, value: Tensor, depth: int) -> Tensor:
        """Return the rows [batch start] of what leaves ``depth``, ``value [batch start ...]``."""
        if self.starts and (self.depth != depth or self.rows.shape[1] != value.shape[1]):
            raise DriftlabError(
                f"{value.shape[1]} states of depth {depth} came by, and the last attention was of {self.rows.shape[1]} rows at "
                f"depth {self.depth}: an intervention cannot tell which rows they are"
            )
        return self.rows


class ByRow:
    """Values of the starts of a run, found again by row whatever starts go on."""

    def __init__(self) -> None:
        self._table: Tensor | None = None

    def clear(self) -> None:
        """Forget them."""
        self._table = None

    def put(self, rows: Tensor, value: Tensor, total: int) -> None:
        """Remember ``value [batch start ...]`` of ``rows [batch start]`` among ``total`` rows."""
        table = value.new_full((len(value), total, *value.shape[2:]), torch.nan)
        self._table = table.scatter_(1, _spread(rows, value), value)

    def at(self, rows: Tensor) -> Tensor:
        """Return the values of ``rows``, [batch start ...]. Raises DriftlabError if the run's first depth was not seen."""
        if self._table is None:
            raise DriftlabError(
                "an intervention compares with depth 1, which it did not see: enter it before the chain is extended, not "
                "between extend and draft"
            )
        return self._table.gather(1, _spread(rows, self._table))


def rms(x: Tensor) -> Tensor:
    """Root mean square over the last axis, kept, in float32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).square().mean(-1, keepdim=True).sqrt()


def _spread(rows: Tensor, like: Tensor) -> Tensor:
    shape = *rows.shape, *(1,) * (like.ndim - 2)
    return rows.view(shape).expand(*rows.shape, *like.shape[2:])


def _spans(text: str) -> list[tuple[int, int | None]]:
    spans: list[tuple[int, int | None]] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()):
            raise DriftlabError(
                f'depths {text!r}: write "3", "2-4", "2-" (and deeper) or "1,3"; depth 1 drafts the first token'
            )
        spans.append((int(first), int(last) if last else None if dash else int(first)))
        if spans[-1][0] < 1 or (last and int(last) < int(first)):
            raise DriftlabError(f"depths {text!r}: depths begin with 1, and a span with its smaller end")
    return spans


def _written(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:.15g}" if isinstance(value, float) else str(value)
