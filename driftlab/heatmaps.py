r"""Attention mass of a few starts on single keys, by depth and head, with the text of their tokens.

A start at row t sees context keys 0..t and, at depth k, its own keys of depths 2..k. Mass is the softmax over all of them,

    context key c     column c of the masses that ``attend`` reduces (one start runs at a time, so its sum over starts is it)
    own key, w-th newest     recent(w) - recent(w - 1), recent(w) being the mass on the last w keys, the w <= k - 1 newest own

so whatever decides the masses (windows, interventions) is in them, and nothing is larger than heads x keys: a
start of a long text costs what a live round costs. Keys that are not shown are summed as the rest of their segment. A key that
is not seen (left behind by a window, dropped) has no mass in any head. As many keys without mass as there are keys that are not
seen are those; where there are more, some are seen and underflow, which cannot be told, and all stay 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from driftlab.draft import Chain, Feed, check_depth, check_fits, greedy_tokens, read_states
from driftlab.drafter import Drafter
from driftlab.errors import DriftlabError
from driftlab.recorded import Batch
from driftlab.trajectory import Trajectory

Kind = Literal["sink", "prompt", "context", "own", "rest of prompt", "rest of context"]
_ROUNDING = 1e-3
"""by how much float32 masses of many keys may miss their sum"""


class Key(NamedTuple):
    """One column: a key, or the rest of a segment. ``place``: its row (own keys: the place that they stand at; rests: how
    many keys). ``text``: of the token at that position; of an own key, the draft that was fed. "" for a rest.
    """

    kind: Kind
    place: int
    text: str = ""


@dataclass(frozen=True)
class KeyMasses:
    """Masses of one start. They sum to 1 over the keys; NaN where an own key does not exist yet or a key is not seen."""

    prompt: str
    row: int
    """absolute row of the start"""
    token: str
    """text of the token that the start is fed at depth 1, t + 1"""
    drafted: tuple[str, ...]
    keys: tuple[Key, ...]
    mass: Float[np.ndarray, "depth layer head key"]


def key_masses(
    drafter: Drafter,
    trajectory: Trajectory,
    prompt: str,
    *,
    depth: int,
    starts: int = 3,
    feed: Feed = "own",
    prompt_keys: int = 6,
    context_keys: int = 8,
    largest: int = 4,
    decode: Callable[[int], str] = str,
) -> list[KeyMasses]:
    """Measure some starts of one prompt, spread evenly over its answer; the first is row P - 1.

    Args:
        drafter: the drafter, with whatever interventions are on.
        trajectory: the recording; its sinks are shown.
        prompt: id of the prompt.
        depth: K.
        starts: how many, at most.
        feed: what is fed deeper than depth 1; with "text" the answer's end limits which rows can be starts.
        prompt_keys: how many of the last keys of the prompt are shown.
        context_keys: how many of the last context keys are shown.
        largest: how many other keys are shown, those with the largest mean mass over depths, heads and layers.
        decode: token id to text.

    Raises:
        DriftlabError: no such prompt, numbers below 1, an answer too short, masses on single keys that an intervention does not
            give (a re-numbered window).
    """
    check_depth(depth)
    check_fits(drafter, trajectory)
    sizes = (prompt_keys, context_keys, largest)
    if starts < 1 or min(sizes) < 0 or feed not in ("text", "own"):
        raise DriftlabError(
            f"starts={starts}, prompt_keys, context_keys, largest={sizes}, feed={feed!r}: at least one start, no negative "
            "numbers, and feed 'text' or 'own'"
        )
    batch = trajectory.batch([place_of(trajectory, prompt)]).to(drafter.device, drafter.dtype)
    rows = _spread(batch, starts, depth if feed == "text" else 1)
    with ExitStack() as stack:
        seen = _Seen(drafter, depth, stack)
        session = Chain(
            drafter, prompt_lengths=batch.prompt_lengths.tolist(), sinks=batch.sinks, ids=batch.ids, backend="torch"
        )
        found = []
        for row in rows:
            fed, drafted = _run(drafter, session, batch, row, depth, feed, seen)
            found.append(_shown(seen, batch, row, fed, drafted, sizes, decode))
    return found


def place_of(trajectory: Trajectory, prompt: str) -> int:
    """Return the place of a prompt in a recording. Raises DriftlabError if it is not there, naming some that are."""
    ids = [entry.id for entry in trajectory.entries]
    if prompt not in ids:
        few = ", ".join(ids[:8]) + (", ..." if len(ids) > 8 else "")
        raise DriftlabError(f"there is no prompt {prompt!r} in the recording; it has {few}")
    return ids.index(prompt)


def _spread(batch: Batch, count: int, depth: int) -> list[int]:
    first, last = int(batch.prompt_lengths[0]) - 1, int(batch.lengths[0]) - 1 - depth
    if last < first:
        raise DriftlabError(
            f"prompt {batch.ids[0]!r} has {last - first + depth} answer tokens: so no start has {depth} of them"
        )
    return sorted({int(row) for row in np.linspace(first, last, min(count, last - first + 1)).round()})


class _Seen:
    """What the hooks saw of the start that runs: masses by depth and layer."""

    def __init__(self, drafter: Drafter, depth: int, stack: ExitStack) -> None:
        self.layers = len(drafter.layers)
        self.windows = tuple(range(1, depth))
        self.columns: dict[tuple[int, int], Tensor] = {}
        self.recent: dict[tuple[int, int], Tensor] = {}
        self.visible: dict[tuple[int, int], Tensor] = {}
        for index, layer in enumerate(drafter.layers):
            attention, prefix = layer.self_attn, f"layers.{index}.self_attn"
            stack.callback(setattr, attention, "recent_windows", attention.recent_windows)
            attention.recent_windows = self.windows
            for name, held in (("columns", self.columns), ("recent", self.recent), ("visible", self.visible)):

                def take(value: Tensor, hook: Any, held: Any = held, index: int = index) -> None:
                    held[hook.depth, index] = value.detach()

                stack.enter_context(drafter.hooks([(f"{prefix}.hook_{name}", take)], read_only=True))

    def by_key(self, depth: int, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Mass on context keys and on own keys, oldest first: [head ctx], [head own]."""
        columns = self.columns.get((depth, layer))
        if columns is None:
            raise DriftlabError(
                "the masses on single keys were not reduced: an intervention does not give them (a re-numbered "
                "window, hidden own keys, a pin of single keys)"
            )
        context = columns[0].double().cpu().numpy()
        own = np.zeros((len(context), 0))
        if depth > 1:
            newest = self.recent[depth, layer][0, :, 0, : depth - 1].double().cpu().numpy()
            own = np.diff(newest, axis=1, prepend=0.0)[:, ::-1]
        empty = [(mass == 0).all(0) for mass in (context, own)]
        hidden = context.shape[1] + own.shape[1] - int(self.visible[depth, layer].flatten()[-1])
        if 0 < hidden == sum(int(none.sum()) for none in empty):
            context, own = (np.where(none, np.nan, mass) for none, mass in zip(empty, (context, own), strict=True))
        return context, own


@torch.no_grad()
def _run(
    drafter: Drafter, session: Chain, batch: Batch, row: int, depth: int, feed: Feed, seen: _Seen
) -> tuple[list[int], list[int]]:
    """Bring the session to a row and draft from it; return the tokens that were fed deeper than depth 1, and the drafts."""
    for held in (seen.columns, seen.recent, seen.visible):
        held.clear()
    begin = session.rows
    session.extend(batch.tokens[:, begin + 1 : row + 2], read_states(drafter, batch)[:, begin : row + 1])
    state, fed, drafted = session.take(), [], []
    with drafter.using("torch"):
        while True:
            token = greedy_tokens(drafter, state.normed)
            drafted.append(int(token))
            if state.depth == depth:
                return fed, drafted
            if feed == "text":
                token = batch.tokens[:, [row + state.depth + 1]]
            fed.append(int(token))
            state = drafter.next(state, token)


def _shown(
    seen: _Seen,
    batch: Batch,
    row: int,
    fed: Sequence[int],
    drafted: Sequence[int],
    sizes: tuple[int, int, int],
    decode: Callable[[int], str],
) -> KeyMasses:
    found = [[seen.by_key(depth, layer) for layer in range(seen.layers)] for depth in range(1, len(fed) + 2)]
    context = np.stack([np.stack([by_key[0] for by_key in layers]) for layers in found])
    columns = _columns(batch, row, np.nan_to_num(context).mean((0, 1, 2)), sizes, decode)
    own = np.full((*context.shape[:3], len(fed)), np.nan)
    for depth, layers in enumerate(found):
        own[depth, ..., :depth] = np.stack([by_key[1] for by_key in layers])
    keys = [key for key, _ in columns]
    keys += [Key("own", row + 1 + i, decode(token)) for i, token in enumerate(fed)]
    mass = np.concatenate([*(_summed(context[..., places]) for _, places in columns), own], -1)
    away = np.abs(np.nansum(mass, -1) - 1).max()
    if away > _ROUNDING:
        raise DriftlabError(
            f"the masses on single keys miss 1 by {away:.3g}: an intervention that is on changes what is not reduced by key"
        )
    words = tuple(decode(token) for token in drafted)
    return KeyMasses(batch.ids[0], row, decode(int(batch.tokens[0, row + 1])), words, tuple(keys), mass)


def _summed(mass: np.ndarray) -> np.ndarray:
    """Sum over the last axis, kept; NaN where none of its keys is seen."""
    whole = np.nansum(mass, -1, keepdims=True)
    return np.where(np.isnan(mass).all(-1, keepdims=True), np.nan, whole)


def _columns(
    batch: Batch, row: int, mean: np.ndarray, sizes: tuple[int, int, int], decode: Callable[[int], str]
) -> list[tuple[Key, list[int]]]:
    """Choose the context keys that are shown, with ``mean [ctx]`` as their mean mass: each column and the rows in it."""
    first, tokens = int(batch.prompt_lengths[0]) - 1, batch.tokens[0].tolist()
    sinks = [place for place in batch.sinks if place <= row]
    parts: dict[Kind, list[int]] = {
        "prompt": [place for place in range(first) if place not in sinks],
        "context": [place for place in range(first, row + 1) if place not in sinks],
    }
    shown = {
        place
        for kind, size in zip(parts, sizes, strict=False)
        for place in parts[kind][max(0, len(parts[kind]) - size) :]
    }
    others = [place for places in parts.values() for place in places if place not in shown]
    shown |= set(sorted(others, key=lambda place: -mean[place])[: sizes[2]])
    columns = [(Key("sink", place, decode(tokens[place])), [place]) for place in sinks]
    rests: dict[Kind, Kind] = {"prompt": "rest of prompt", "context": "rest of context"}
    for kind, places in parts.items():
        rest = [place for place in places if place not in shown]
        columns += [(Key(rests[kind], len(rest)), rest)] if rest else []
        columns += [(Key(kind, place, decode(tokens[place])), [place]) for place in places if place in shown]
    return columns
