"""Probes: where a drafter's attention goes and how large its state is, per draft depth.

    with AttentionMass(drafter) as mass, StateNorm(drafter) as norm:
        all_starts(drafter, trajectory, depth=8, feed="own")
    mass.frame(), norm.frame()

Every probe reduces while the executor runs: a sum over the starts of each sequence, per depth, layer and head. Nothing of
size T x T is kept. Frames are tidy rows (see ``driftlab.results``), one per prompt, depth, layer, head and quantity.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from contextlib import ExitStack
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from driftlab.drafter import Drafter, variant_name
from driftlab.errors import DriftlabError
from driftlab.hooks import HookPoint
from driftlab.results import as_rows
from driftlab.segments import Segment, Starts

SEGMENT_NAMES = {segment: f"mass_{segment.name.lower()}" for segment in Segment}


class Probe(ABC):
    """Base: follows which starts are running, and accumulates sums per sequence in float64.

    Enter it as a context manager around one run or several; leaving it removes every hook.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self._starts: Starts | None = None
        self._sums: dict[tuple[str, int, int, int, str, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._stack = ExitStack()
        self._entered = False

    def __enter__(self) -> Any:
        if self._entered:
            raise DriftlabError(
                f"this {type(self).__name__} is in use already: make another one, or every start is counted twice"
            )
        self._entered = True
        self._watch("hook_starts", self._on_starts)
        self.attach()
        return self

    def __exit__(self, *_: object) -> None:
        self._entered = False
        self._stack.close()

    @abstractmethod
    def attach(self) -> None:
        """Register the hooks; subclasses say which."""

    def frame(self, **settings: Any) -> pd.DataFrame:
        """Return the rows seen so far.

        Args:
            settings: fill settings columns. The drafter's own are known, and ``depth_max``, the deepest that ran. A probe does
                not know ``target``, ``drafter`` (a name), ``feed``, ``starts``, ``temperature``, ``template``, ``seed``: what
                is not given stays empty, and rows that differ there must not be pooled. ``measure.settings`` makes them all,
                ``measure.probe_rows`` does the whole.

        Raises:
            DriftlabError: when nothing ran inside the ``with`` block.
        """
        if not self._sums:
            raise DriftlabError(f"{type(self).__name__} saw nothing: run an executor inside its with block")
        records = [
            {
                **{"prompt": prompt, "layer": layer, "head": head, "depth": depth, "quantity": quantity},
                **{"window": window, "value": total / count if count else float("nan"), "n": int(count)},
            }
            for (prompt, layer, head, depth, quantity, window), (total, count) in self._sums.items()
        ]
        known = {**drafter_settings(self.drafter), "depth_max": max(record["depth"] for record in records)}
        return as_rows(records, **{**known, **settings})

    def _watch(self, names: Any, function: Any) -> None:
        self._stack.enter_context(self.drafter.hooks([(names, function)], read_only=True))

    def _on_starts(self, starts: Starts, hook: HookPoint) -> None:
        self._starts = starts
        self.on_run()

    def on_run(self) -> None:
        """Begin a new batch; subclasses that carry something from depth to depth forget it here."""

    def _add(
        self,
        quantity: str,
        depth: int,
        value: Tensor,
        *,
        valid: Tensor | None = None,
        layer: int = -1,
        window: int = 0,
        may_miss: bool = False,
    ) -> None:
        """Add ``value [batch start]`` or ``[batch head start]``, summed over the valid starts of each sequence.

        A NaN among them is an error that names its place, unless the quantity ``may_miss`` there (then it leaves n too).
        """
        valid = self._starts.valid if valid is None else valid
        value, by_heads = value.detach().double(), value.ndim == 3
        value = value if by_heads else value[:, None]
        counted = valid[:, None] & value.isfinite()
        if not may_miss and not torch.equal(counted, valid[:, None].expand_as(counted)):
            place = (valid[:, None] & ~value.isfinite()).nonzero()[0].tolist()
            raise DriftlabError(
                f"{quantity} is not finite: prompt {self._starts.ids[place[0]]!r}, start {place[2]} of its answer, depth "
                f"{depth}. Look for NaN or inf in the drafter's weights and in what hooks returned"
            )
        totals = value.masked_fill(~counted, 0).sum(-1).tolist()
        counts = counted.sum(-1).tolist()
        for name, by_head, count_by_head in zip(self._starts.ids, totals, counts, strict=True):
            for head, (total, count) in enumerate(zip(by_head, count_by_head, strict=True)):
                entry = self._sums[name, layer, head if by_heads else -1, depth, quantity, window]
                entry[0] += total
                entry[1] += count


class AttentionMass(Probe):
    """Mass on SINK, PROMPT, CONTEXT, SELF and on the last w keys, entropy (nats, and relative to ln of visible keys).

    ``recent``: windows w; each counts the last w keys whatever their segment, so it is defined at depth 1 too. The null
    line of SELF, ``mass_self_null``, at depth k is the depth-1 attention of the row at the same position, its last k - 1
    keys relabelled: what SELF would get if own keys were treated like the rows that verified tokens leave there.
    A start that sees no sink key (outside the window, dropped, none named) is not counted in ``mass_sink``.
    ``entropy=False`` leaves the entropy out, which costs more than the masses.
    """

    def __init__(
        self, drafter: Drafter, *, recent: tuple[int, ...] = (8,), null_depth: int = 16, entropy: bool = True
    ) -> None:
        super().__init__(drafter)
        self.entropy = entropy
        if any(type(w) is not int or w < 1 for w in recent) or null_depth < 1:
            raise DriftlabError(
                f"recent={recent}, null_depth={null_depth}: windows are whole numbers >= 1, null_depth >= 1"
            )
        self.recent = recent
        self.null_depth = null_depth
        self._null: dict[int, Tensor] = {}
        self._visible: dict[int, Tensor] = {}
        self._sees_sink: dict[int, Tensor] = {}

    def attach(self) -> None:
        """Watch every layer's statistics."""
        windows = {*self.recent, *range(1, self.null_depth)}
        for index, layer in enumerate(self.drafter.layers):
            attention, prefix = layer.self_attn, f"layers.{index}.self_attn"
            self._stack.callback(setattr, attention, "recent_windows", attention.recent_windows)
            attention.recent_windows = tuple(sorted(windows.union(attention.recent_windows)))
            self._watch(f"{prefix}.hook_visible", lambda v, hook, i=index: self._visible.__setitem__(i, v))
            self._watch(f"{prefix}.hook_sees_sink", lambda v, hook, i=index: self._sees_sink.__setitem__(i, v))
            self._watch(f"{prefix}.hook_mass", lambda v, hook, i=index: self._on_mass(v, hook.depth, i))
            if self.entropy:
                self._watch(f"{prefix}.hook_entropy", lambda v, hook, i=index: self._on_entropy(v, hook.depth, i))
            self._watch(f"{prefix}.hook_recent", lambda v, hook, i=index: self._on_recent(v, hook.depth, i))

    def on_run(self) -> None:
        """Forget the last batch's depth-1 rows."""
        self._null.clear()
        self._visible.clear()
        self._sees_sink.clear()

    def _values(self, value: Tensor, depth: int, layer: int) -> Tensor:
        """Keep the starts' rows: layers below the last attend from every new context row at depth 1."""
        if depth > 1 or layer == len(self.drafter.layers) - 1:
            return value
        index = self._starts.rows - (self._starts.segments.shape[1] - value.shape[2])
        return value.gather(2, index[:, None, :, None].expand(-1, value.shape[1], -1, value.shape[3]))

    def _on_mass(self, mass: Tensor, depth: int, layer: int) -> None:
        mass = self._values(mass, depth, layer)
        for segment, name in SEGMENT_NAMES.items():
            value, sees_sink = mass[..., segment], self._sees_sink.get(layer)
            if segment == Segment.SINK and sees_sink is not None:
                sees_sink = self._values(sees_sink[:, None, :, None], depth, layer)[..., 0]
                value = value.masked_fill(~sees_sink, torch.nan)
            self._add(name, depth, value, layer=layer, may_miss=segment == Segment.SINK)
        null, ahead = self._null.get(layer), depth - 1
        if null is not None and 0 < ahead < min(self.null_depth, null.shape[2]):
            value, reaches = self._null_at(null, ahead)
            self._add("mass_self_null", depth, value, valid=reaches, layer=layer)

    def _null_at(self, null: Tensor, ahead: int) -> tuple[Tensor, Tensor]:
        """Return the last ``ahead`` keys' depth-1 mass at the row ``ahead`` further on, and where there is such a row."""
        kept, valid = null.shape[2] - ahead, self._starts.valid
        value = nn.functional.pad(null[:, :, ahead:, ahead - 1], (0, ahead))
        reaches = nn.functional.pad(valid[:, ahead:], (0, valid.shape[1] - kept)) & valid
        return value, reaches

    def _on_entropy(self, entropy: Tensor, depth: int, layer: int) -> None:
        entropy = self._values(entropy[..., None], depth, layer)[..., 0]
        visible = self._values(self._visible[layer][:, None, :, None], depth, layer)[..., 0]
        self._add("entropy", depth, entropy, layer=layer)
        relative = (entropy / visible.log()).masked_fill(visible < 2, torch.nan)  # of one key there is none
        self._add("entropy_relative", depth, relative, layer=layer, may_miss=True)

    def _on_recent(self, recent: Tensor, depth: int, layer: int) -> None:
        recent = self._values(recent, depth, layer)
        windows = self.drafter.layers[layer].self_attn.recent_windows  # another probe may have added its own
        for window in self.recent:
            self._add("recent", depth, recent[..., windows.index(window)], layer=layer, window=window)
        if depth == 1:
            self._null[layer] = recent[..., [windows.index(w) for w in range(1, self.null_depth)]]


class StateNorm(Probe):
    """RMS of the captured states (``rms_aux0`` the lowest), the fusion output, the residual stream and the feedback.

    RMS = ||x||_2 / sqrt(d), over the starts' rows; aux and fused states belong to depth 1.
    """

    def attach(self) -> None:
        """Watch the fusion, the last layer's residual stream and the feedback."""
        self._watch("fusion.hook_states", lambda v, hook: self._on_rows(v, hook))
        self._watch("fusion.hook_fused", lambda v, hook: self._on_rows(v, hook))
        last = len(self.drafter.layers) - 1
        self._watch(f"layers.{last}.hook_resid", lambda v, hook: self._add("rms_resid", hook.depth, rms(v)))
        self._watch("hook_feedback", lambda v, hook: self._add("rms_feedback", hook.depth, rms(v)))

    def _on_rows(self, value: Tensor, hook: HookPoint) -> None:
        """States of every context row: keep those of the starts. New rows come last (a live chain adds few)."""
        offset = self._starts.segments.shape[1] - value.shape[1]
        index = self._starts.rows - offset
        by_row = rms(value)
        if hook.name == "fusion.hook_fused":
            self._add("rms_fused", 1, by_row.gather(1, index))
            return
        for i in range(value.shape[2]):
            self._add(f"rms_aux{i}", 1, by_row[..., i].gather(1, index))


class SinkSearch(Probe):
    """Mass per key position, at depth 1: where does the drafter's own sink lie, whatever the target's?

    Searches the positions that all sequences share, prompt rows 0..min(P) - 2, template tokens included.
    """

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter)
        self._mass: list[Tensor] = []

    def attach(self) -> None:
        """Watch the mass on each context key."""
        self._watch("hook_columns", self._on_columns)

    def _on_columns(self, columns: Tensor, hook: HookPoint) -> None:
        if hook.depth != 1 or columns.shape[2] < self._starts.segments.shape[1]:
            return
        counts = self._starts.valid.sum(1).clamp(min=1)
        prompt_rows = int(self._starts.rows[:, 0].min())
        self._mass += [row[:prompt_rows].cpu() for row in (columns.mean(1) / counts[:, None]).double()]

    def top(self, count: int = 5) -> list[tuple[int, float]]:
        """Return the ``count`` positions with the largest mean mass as (position, mass)."""
        if not self._mass:
            raise DriftlabError("SinkSearch saw nothing: run an executor inside its with block")
        shared = min(len(row) for row in self._mass)
        if not shared:
            raise DriftlabError("the prompts have no row before the answer: there is no shared position to search")
        mean = torch.stack([row[:shared] for row in self._mass]).mean(0)
        values, positions = mean.topk(min(count, shared))
        return list(zip(positions.tolist(), values.tolist(), strict=True))


def rms(x: Tensor) -> Tensor:
    """Root mean square over the last axis, in float32 or wider."""
    return x.detach().to(torch.promote_types(x.dtype, torch.float32)).square().mean(-1).sqrt()


def drafter_settings(drafter: Drafter) -> dict[str, Any]:
    """Return the settings columns that a drafter fixes."""
    config = drafter.config
    return {
        "variant": variant_name(config),
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "ttt": config.ttt,
        "dtype": str(drafter.dtype).removeprefix("torch."),
    }
