"""A probe that keeps arrays by start, for the measures of drift: masses, recent masses, size and direction of the feedback.

    with Recorder(drafter, depth=8) as recorder:
        all_starts(drafter, trajectory, depth=8, feed="text")
    record = recorder.record()

Nothing of size T x T is kept, and no state but the feedback of ``vectors`` starts a prompt. With L layers, H heads and w
windows a start takes about 4 (K L H (5 + w) + L H (K - 1) + 10 K) bytes and each of the ``vectors`` 4 K d_model; ``max_bytes``
bounds the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from driftlab.drafter import Drafter
from driftlab.drift.geometry import contributions, cosine, magnitude_shares, projection_shares
from driftlab.drift.record import Record
from driftlab.drift.updates import Updates
from driftlab.errors import DriftlabError
from driftlab.hooks import HookPoint
from driftlab.probes import drafter_settings, rms
from driftlab.segments import Segment, Starts

_BLOCK = 256
"""rows whose contributions, aux times d_model of float64 each, exist at a time"""


class Recorder:
    """Keeps what one run of ``all_starts`` shows, over any number of batches of different prompts.

    Args:
        drafter: whose hooks are watched, read-only.
        depth: the deepest that will run.
        recent: windows w of recent(w).
        vectors: how many starts of each prompt keep their feedback, evenly spaced; for the rank and spread.
        updates: the target's last-layer updates by prompt id, [pos d_target]; see :func:`driftlab.drift.updates.last_updates`.
        max_bytes: of the arrays in all.

    One recorder is for one run: a prompt that comes again is an error, since two runs may differ in their settings.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        depth: int,
        recent: tuple[int, ...] = (8,),
        vectors: int = 8,
        updates: Updates | None = None,
        max_bytes: int = 2**30,
    ) -> None:
        if depth < 1 or vectors < 0 or any(type(w) is not int or w < 1 for w in recent):
            raise DriftlabError(
                f"depth={depth}, vectors={vectors}, recent={recent}: depth and windows are whole numbers >= 1, vectors >= 0"
            )
        self.drafter, self.max_depth, self.windows = drafter, depth, tuple(recent)
        self._vectors, self._updates, self._max_bytes = vectors, updates, max_bytes
        self._stack, self._entered = ExitStack(), False
        self._parts: list[dict[str, np.ndarray]] = []
        self._ids: list[str] = []
        self._bytes = 0
        self._sinks: tuple[int, ...] | None = None
        self._batch: _Running | None = None

    def __enter__(self) -> Recorder:
        if self._entered:
            raise DriftlabError("this Recorder is in use already: make another one")
        self._entered = True
        self._watch("hook_starts", self._on_starts)
        wanted = {*self.windows, *range(1, self.max_depth)}
        for index, layer in enumerate(self.drafter.layers):
            attention, prefix = layer.self_attn, f"layers.{index}.self_attn"
            self._stack.callback(setattr, attention, "recent_windows", attention.recent_windows)
            attention.recent_windows = tuple(sorted(wanted.union(attention.recent_windows)))
            for name in ("visible", "sees_sink", "mass", "entropy", "recent"):
                self._watch(f"{prefix}.hook_{name}", self._taking(name, index))
        last = len(self.drafter.layers) - 1
        self._watch("fusion.hook_aux", lambda value, _: self._running().take_aux(value))
        self._watch("fusion.hook_fused", lambda value, _: self._running().take_fused(value))
        self._watch(f"layers.{last}.hook_resid", lambda value, hook: self._running().take_resid(value, hook.depth))
        self._watch("hook_feedback", lambda value, hook: self._running().take_feedback(value, hook.depth))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._entered = False
        self._stack.close()
        if kind is None:
            self._flush()
        self._batch = None

    def record(self) -> Record:
        """Return the arrays of all batches.

        Raises:
            DriftlabError: inside the ``with`` block; when nothing ran in it; depths that differ between batches; what
                :class:`Record` refuses.
        """
        if self._entered:
            raise DriftlabError("leave the Recorder's with block before asking for its record")
        if not self._parts:
            raise DriftlabError("Recorder saw nothing: run all_starts inside its with block")
        depths = {part["mass"].shape[1] for part in self._parts}
        if len(depths) > 1:
            raise DriftlabError(f"batches of depths {sorted(depths)}: one recorder is for one run")
        joined = {name: np.concatenate([part[name] for part in self._parts]) for name in self._parts[0]}
        update = joined.pop("update")
        return Record(
            ids=tuple(self._ids),
            windows=self.windows,
            update=None if self._updates is None else update,
            sinks=self._sinks or (),
            settings=drafter_settings(self.drafter),
            **joined,
        )

    def _watch(self, name: str, function: Callable[[Any, HookPoint], None]) -> None:
        self._stack.enter_context(self.drafter.hooks([(name, function)], read_only=True))

    def _taking(self, name: str, layer: int) -> Callable[[Tensor, HookPoint], None]:
        def take(value: Tensor, hook: HookPoint) -> None:
            if hook.depth > self.max_depth:
                raise DriftlabError(f"depth {hook.depth} runs, and the Recorder was made for depth {self.max_depth}")
            self._running().take(name, value, hook.depth, layer)

        return take

    def _running(self) -> _Running:
        if self._batch is None:
            raise DriftlabError("Recorder follows all_starts: the drafter ran without starts")
        return self._batch

    def _on_starts(self, starts: Starts, _: HookPoint) -> None:
        self._flush()
        if again := sorted({*starts.ids} & {*self._ids}) or (len({*starts.ids}) < len(starts.ids) and ["twice in it"]):
            raise DriftlabError(
                f"prompt {again[0]!r} was recorded already: one recorder is for one run of all_starts, since two may differ "
                "in their settings; make another"
            )
        sinks = tuple((starts.segments == int(Segment.SINK)).any(0).nonzero()[:, 0].tolist())
        if self._sinks not in (None, sinks):
            raise DriftlabError(
                f"sinks {list(sinks)} after sinks {list(self._sinks)}: other keys are not pooled; make another Recorder"
            )
        self._sinks = sinks
        self._batch = _Running(self, starts)

    def _flush(self) -> None:
        if self._batch is None:
            return
        batch, self._batch = self._batch, None
        part = batch.arrays(len(self._ids))
        self._bytes += sum(value.nbytes for value in part.values())
        if self._bytes > self._max_bytes:
            raise DriftlabError(
                f"the arrays by start take more than {self._max_bytes / 2**20:.0f} MiB after {len(self._ids)} prompts: record "
                "fewer prompts or depths, or raise max_bytes"
            )
        self._ids += batch.starts.ids
        self._parts.append(part)


class _Running:
    """One batch on its way: tensors by depth, cut to the valid starts when it is done."""

    def __init__(self, recorder: Recorder, starts: Starts) -> None:
        self.starts, self.recorder, self.drafter = starts, recorder, recorder.drafter
        self.valid = starts.valid
        self.kept: dict[tuple[str, int, int], Tensor] = {}
        self.values: dict[tuple[str, int], Tensor] = {}
        self.picked: list[Tensor] = []
        self.fused = self.previous = None
        self._refuse_sinks()
        count = self.valid.sum(1)
        self.last = starts.rows.gather(1, (count - 1).clamp(min=0)[:, None])
        self.places = [self._spaced(int(n)) for n in count]
        self.updates = self._padded_updates()

    def _refuse_sinks(self) -> None:
        rows = self.starts.rows[:, 1:]
        kinds = self.starts.segments.gather(1, rows)
        sink = (kinds == int(Segment.SINK)) & self.valid[:, 1:]
        if bool(sink.any()):
            batch, place = sink.nonzero()[0].tolist()
            raise DriftlabError(
                f"row {int(rows[batch, place])} of prompt {self.starts.ids[batch]!r} is a sink and a start beyond the answer's "
                "first: sinks are positions of the prompt"
            )

    def _spaced(self, starts: int) -> list[int]:
        """Places of a prompt's starts whose feedback is kept: evenly spaced among those that reach every depth."""
        full, wanted = starts - self.recorder.max_depth + 1, self.recorder._vectors
        if full < 1 or not wanted:
            return []
        return sorted({i * full // min(wanted, full) for i in range(min(wanted, full))})

    def _padded_updates(self) -> Tensor | None:
        if self.recorder._updates is None:
            return None
        rows = [self.recorder._updates(name) for name in self.starts.ids]
        if rows[0].shape[-1] != self.drafter.config.hidden_size:
            raise DriftlabError(
                f"the target's states have width {rows[0].shape[-1]}, the feedback {self.drafter.config.hidden_size}: they "
                "have no common direction"
            )
        padded = torch.nn.utils.rnn.pad_sequence(
            [row.double() for row in rows], batch_first=True, padding_value=torch.nan
        )
        return padded.to(self.valid.device)

    def take(self, name: str, value: Tensor, depth: int, layer: int) -> None:
        """Keep a statistic of one layer, for the starts' rows."""
        if name in ("visible", "sees_sink"):
            value = value[:, None, :, None]
        elif name == "entropy":
            value = value[..., None]
        value = value.detach()
        if depth == 1 and layer < len(self.drafter.layers) - 1:  # lower layers attend from every context row
            index = self.starts.rows[:, None, :, None].expand(-1, value.shape[1], -1, value.shape[3])
            value = value.gather(2, index)
        self._check(value.shape[2])
        if name == "recent":
            held = self.drafter.layers[layer].self_attn.recent_windows
            if depth == 1:
                own = [held.index(w) for w in range(1, self.recorder.max_depth)]
                self.kept["recent_first", 1, layer] = value[..., own]
            value = value[..., [held.index(w) for w in self.recorder.windows]]
        self.kept[name, depth, layer] = value.transpose(1, 2)[self.valid].cpu()
        if name == "recent" and depth == 1:
            first = self.kept["recent_first", 1, layer]
            self.kept["recent_first", 1, layer] = first.transpose(1, 2)[self.valid].cpu()

    def _check(self, starts: int) -> None:
        if starts != self.valid.shape[1]:
            raise DriftlabError(
                f"{starts} of {self.valid.shape[1]} starts go on beyond depth 1: Recorder follows all_starts, which takes all"
            )

    def take_aux(self, aux: Float[Tensor, "batch row aux d_target"]) -> None:
        """Shares of the aux states in the fused vector, for the starts' rows."""
        if aux.shape[1] != self.starts.segments.shape[1]:
            raise DriftlabError("Recorder follows all_starts: a live chain adds a few rows at a time")
        if not self.drafter.config.aux_layers:
            return
        index = self.starts.rows[..., None, None].expand(-1, -1, *aux.shape[2:])
        rows = aux.detach().gather(1, index)[self.valid]
        weight = self.drafter.fc.weight.detach()
        shares = []
        for block in rows.split(_BLOCK):
            parts = contributions(block, weight)
            shares.append((magnitude_shares(parts), projection_shares(parts)))
        for place, name in enumerate(("magnitude_share", "projection_share")):
            self.values[name, 1] = (
                torch.cat([pair[place] for pair in shares]) if shares else rows.new_zeros(0, aux.shape[2])
            )

    def take_fused(self, fused: Float[Tensor, "batch row d_model"]) -> None:
        """The fusion output: its size at the starts, and what the feedback is compared with."""
        self.fused = fused.detach()
        self.values["rms_fused", 1] = rms(fused).gather(1, self.starts.rows)[self.valid]

    def take_resid(self, resid: Float[Tensor, "batch start d_model"], depth: int) -> None:
        """Size of the residual stream."""
        self.values["rms_resid", depth] = rms(resid)[self.valid]

    def take_feedback(self, feedback: Float[Tensor, "batch start d_model"], depth: int) -> None:
        """Size and direction of the feedback of ``depth``."""
        self._check(feedback.shape[1])
        feedback = feedback.detach()
        self.values["rms_feedback", depth] = rms(feedback)[self.valid]
        missing = torch.full(self.valid.shape, torch.nan, dtype=torch.float64, device=self.valid.device)
        before = missing if self.previous is None else cosine(feedback, self.previous)
        self.values["successive", depth] = before[self.valid]
        stands = self.starts.rows + depth  # the position whose state it takes the place of
        self.values["imitation", depth] = self._at(feedback, self.fused, stands, stands <= self.last)
        if self.updates is not None:
            self.values["update", depth] = self._at(feedback, self.updates, stands, stands <= self.last + 1)
        self.previous = feedback
        chosen = [feedback[i, places] for i, places in enumerate(self.places)]
        self.picked.append(torch.cat(chosen).float().cpu())

    def _at(self, feedback: Tensor, states: Tensor, rows: Tensor, there: Tensor) -> Tensor:
        index = rows.clamp(max=states.shape[1] - 1)[..., None].expand(-1, -1, states.shape[-1])
        return cosine(feedback, states.gather(1, index)).masked_fill(~there, torch.nan)[self.valid]

    def arrays(self, offset: int) -> dict[str, np.ndarray]:
        """Arrays of the valid starts; ``offset``: how many prompts came before."""
        depths = sorted({depth for name, depth in self.values if name == "rms_feedback"})
        layers, starts = range(len(self.drafter.layers)), int(self.valid.sum())
        if not depths:
            raise DriftlabError("Recorder follows all_starts: starts were named and nothing was drafted")
        prompt = torch.arange(len(self.valid), device=self.valid.device)[:, None].expand_as(self.valid)[self.valid]

        def stacked(name: str) -> np.ndarray:
            by_depth = [torch.stack([self.kept[name, k, layer] for layer in layers], 1) for k in depths]
            return torch.stack(by_depth, 1).numpy()

        def by_depth(name: str) -> np.ndarray:
            return torch.stack([self.values[name, k] for k in depths], 1).cpu().numpy()

        update = by_depth("update") if self.updates is not None else np.full((starts, len(depths)), np.nan)
        none = torch.zeros(starts, 0, dtype=torch.float64)
        first = torch.stack([self.kept["recent_first", 1, layer] for layer in layers], 1).numpy()
        return {
            **{"prompt": prompt.cpu().numpy() + offset, "row": self.starts.rows[self.valid].cpu().numpy()},
            **{"mass": stacked("mass"), "recent": stacked("recent"), "recent_first": first[..., : len(depths) - 1]},
            **{"entropy": stacked("entropy")[..., 0], "visible": stacked("visible")[..., 0, 0].astype(np.int64)},
            "sees_sink": stacked("sees_sink")[..., 0, 0].astype(bool),
            **{name: by_depth(name) for name in ("rms_resid", "rms_feedback", "successive", "imitation")},
            **{"update": update, "rms_fused": self.values["rms_fused", 1].cpu().numpy()},
            **{
                name: self.values.get((name, 1), none).cpu().numpy() for name in ("magnitude_share", "projection_share")
            },
            "vectors": torch.stack(self.picked, 1).numpy(),
            "vector_prompt": np.array(
                [offset + i for i, places in enumerate(self.places) for _ in places], dtype=np.int64
            ),
        }
