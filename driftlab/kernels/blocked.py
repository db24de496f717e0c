r"""Draft attention in plain torch, a tile at a time, without a T x T matrix; forward and backward, any device.

A tile is some starts of one kv head of one sequence (of all of them at once, where a problem is small), all query heads of its
group, and the keys up to the last row of the tile, a run of them at a time. Its scores s stay in a core's cache, and all that
is wanted is reduced there, the sums of earlier runs being scaled to a new largest score:

    m = max_j s_j,   x_j = s_j - m,   e_j = exp x_j,   L = sum_j e_j (+ exp(b - m) with a learned sink b),
    out = sum_j e_j v_j / L,   mass[seg] = sum_{j in seg} e_j / L,   lse = m + ln L,
    entropy = -sum_j p_j ln p_j = (ln L sum_j e_j - sum_j e_j x_j) / L.

The backward pass makes the probabilities again, p = exp(s - lse), and with D = dout . out:

    dv_j = sum p_j dout,   ds_j = p_j (dout . v_j - D + dlse),   dq = sum_j ds_j k_j,   dk_j = sum ds_j q

times the scale, which is folded into q. Half inputs are widened tile by tile, and rounded once, at the end.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from driftlab.kernels.problem import Attended, Problem, visible_keys
from driftlab.kernels.recent import recent_mass
from driftlab.kernels.reference import refuse_blind
from driftlab.segments import Segment

TILE_BYTES = 2**21
"""Bytes of a tile's scores: about a core's second-level cache. Fewer rows make slow products, more leave the cache."""
GPU_TILE_BYTES = 2**28
"""The same on a GPU, where keys are not cut: a launch costs more than what leaves a cache. Not measured."""
KEYS = 512
"""Keys of a tile at most, where sums can be carried from one tile to the next: with ROWS, what the products like best."""
ROWS = 192
"""Rows of a tile (starts x query heads of the group) where keys are cut."""
LEAST_ROWS = 32
"""Rows of a tile at least where keys are not cut, however long the context: fewer make a slow product."""
HIDDEN = -1e30
"""Score of a hidden key. Not -inf: 0 times that is no number, and the entropy and the bias by product would meet it."""
BLIND = HIDDEN / 10
"""A largest score below it says that all keys are hidden."""


@torch.no_grad()
def attend(problem: Problem, block: int | None = None) -> Attended:
    """Answer a problem; see ``reference.attend``. ``block``: starts at a time. Not differentiable: see ``backward``.

    Raises:
        DriftlabError: every key of a valid start is dropped.
    """
    q, context_v, rows, stats = problem.q, problem.context_v, problem.rows, problem.stats
    batch, heads, starts, _ = q.shape
    kv_heads, context = problem.context_k.shape[1:3]
    wide = _wide(problem)
    out = context_v.new_empty(batch, heads, starts, context_v.shape[-1])
    lse = q.new_empty(batch, heads, starts, dtype=wide)
    mass = q.new_empty(batch, heads, starts, len(Segment), dtype=wide) if stats.mass else None
    entropy = torch.empty_like(lse) if stats.entropy else None
    columns = q.new_zeros(batch, heads, context, dtype=wide) if stats.columns else None
    visible = visible_keys(problem)
    second = _Buffer(q, wide)  # the entropy alone needs scores and their exponentials together
    sums: Any = None
    # columns want the denominator before the scores are gone: all keys in one piece
    cut = columns is None and q.device.type == "cpu"
    for tile in _tiles(problem, block, KEYS if cut else context):
        x, shape, here = tile.scores, tile.shape, tile.here
        if tile.hidden is not None and here[1].start == 0:
            if tile.first:
                visible[here[0], here[2]] = tile.part.own_seen
            visible[here[0], here[2]] += (~tile.hidden).sum(-1)
        top = x.amax(-1, keepdim=True)
        before = tile.sink if tile.first else sums.top
        if before is not None:
            top = torch.maximum(top, before)
        base = top.masked_fill(top < BLIND, 0)
        x.sub_(base)
        e = torch.exp(x, out=second.of(*x.shape)) if stats.entropy else x.exp_()
        seen = e.sum(-1, keepdim=True)
        grouped = e.view(*shape, -1)
        answer = torch.bmm(e[..., : tile.keys], tile.of(tile.part.v))
        if tile.own:
            own_v = tile.part.own_v[:, :, None, here[2]].to(wide)
            answer += (grouped[..., tile.keys :, None] * own_v).sum(-2).view(answer.shape)
        share = spread = None
        if mass is not None:
            segment = tile.only_segment
            if segment is None:
                share = torch.bmm(e[..., : tile.keys], tile.of(tile.part.one_hot))
                share[..., int(Segment.SELF)] += e[..., tile.keys :].sum(-1)
            else:
                share = seen.new_zeros(*seen.shape[:2], len(Segment))
                share[..., segment] = seen[..., 0]
        if entropy is not None:
            spread = x.mul_(e).sum(-1, keepdim=True)
        now = _Sums(top, base, seen, answer, share, spread)
        sums = now if tile.first else now.with_earlier(sums)
        if not tile.last:
            continue
        total = sums.seen if tile.sink is None else sums.seen + (tile.sink - base).exp()
        log_total = total.log()
        _cut(lse, kv_heads, here).copy_((base + log_total).view(shape))
        _cut(out, kv_heads, here).copy_(sums.answer.div_(total).view(*shape, -1))
        if mass is not None:
            _cut(mass, kv_heads, here).copy_(sums.share.div_(total).view(*shape, -1))
        if entropy is not None:
            _cut(entropy, kv_heads, here).copy_(((log_total * sums.seen - sums.spread) / total).view(shape))
        if columns is not None:
            weight = total.reciprocal().view(shape)
            if problem.valid is not None:
                weight = weight.masked_fill(~problem.valid[here[0], None, None, here[2]], 0)
            summed = weight.unsqueeze(-2) @ grouped[..., : tile.keys]
            for piece, cols in tile.pieces:
                _cut(columns, kv_heads, here[:2])[..., piece] += summed[..., 0, cols]
    if problem.controls.drop is not None and problem.own == 0 and problem.sink_logit is None:
        refuse_blind((visible == 0)[..., None], rows, problem.valid)
    recent = recent_mass(problem, lse, stats.recent) if stats.recent else None
    return Attended(out, lse, mass, entropy, visible, recent, columns)


@torch.no_grad()
def backward(
    problem: Problem, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None, block: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, context_k, context_v, own_k, own_v. ``out`` and ``lse`` are what ``attend`` answered."""
    q, own_k, own_v = problem.q, problem.own_k, problem.own_v
    kv_heads, wide = problem.context_k.shape[1], _wide(problem)
    d_q, d_own_k, d_own_v = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, own_k, own_v))
    d_k, d_v = (torch.zeros(t.shape, dtype=wide, device=t.device) for t in (problem.context_k, problem.context_v))
    second = _Buffer(q, wide)
    d_earlier: Any = None
    for tile in _tiles(problem, block, KEYS if q.device.type == "cpu" else problem.context_k.shape[2]):
        x, shape, here, keys = tile.scores, tile.shape, tile.here, tile.keys
        rows = (x.shape[0], x.shape[1], -1)
        d_answer, answer = (_cut(t, kv_heads, here).to(wide).reshape(rows) for t in (d_out, out))
        log_total = _cut(lse, kv_heads, here).reshape(rows)
        p = x.sub_(log_total.masked_fill(log_total < BLIND, 0)).exp_()
        less = (d_answer * answer).sum(-1, keepdim=True)
        if d_lse is not None:
            less = less - _cut(d_lse, kv_heads, here).to(wide).reshape(rows)
        d_x = second.of(*x.shape)
        torch.bmm(d_answer, tile.of(tile.part.v).transpose(1, 2), out=d_x[..., :keys])
        d_own = d_answer.view(*shape, 1, -1)
        if tile.own:
            own_v = tile.part.own_v[:, :, None, here[2]].to(wide)
            d_x.view(*shape, -1)[..., keys:] = (d_own * own_v).sum(-1)
            d_own_v[here].copy_((p.view(*shape, -1)[..., keys:, None] * d_own).sum(2))
        d_x.sub_(less).mul_(p)
        d_queries = torch.bmm(d_x[..., :keys], tile.of(tile.part.k)).view(*shape, -1)
        if tile.own:
            d_own = d_x.view(*shape, -1)[..., keys:, None]
            d_queries += (d_own * tile.part.own_k[:, :, None, here[2]].to(wide)).sum(-2)
            d_own_k[here].copy_((d_own * tile.queries.view(*shape, 1, -1)).sum(2))
        d_earlier = d_queries if tile.first else d_earlier.add_(d_queries)
        if tile.last:
            _cut(d_q, kv_heads, here).copy_(d_earlier.mul_(tile.factor))
        for piece, cols in tile.pieces:
            for grad, weights, vectors in ((d_v, p, d_answer), (d_k, d_x, tile.queries)):
                grad[here[:2]].flatten(0, 1)[:, piece].baddbmm_(weights[..., cols].transpose(1, 2), vectors)
    return d_q, d_k.to(problem.context_k.dtype), d_v.to(problem.context_v.dtype), d_own_k, d_own_v


def joined(parts: list[Attended]) -> Attended:
    """Put the answers of consecutive blocks of starts together."""
    if len(parts) == 1:
        return parts[0]

    def cat(name: str, dim: int) -> Tensor | None:
        values = [getattr(part, name) for part in parts]
        return None if values[0] is None else torch.cat(values, dim)

    columns = None if parts[0].columns is None else torch.stack([part.columns for part in parts]).sum(0)
    return Attended(
        out=cat("out", 2),
        lse=cat("lse", 2),
        mass=cat("mass", 2),
        entropy=cat("entropy", 2),
        visible=cat("visible", 1),
        recent=cat("recent", 2),
        columns=columns,
    )


@dataclass(frozen=True)
class _Part:
    """Some sequences and kv heads of a problem; ``pair``: sequence x kv head. The keys and values are widened.

    ``q [batch kv_head group start d_head]``, ``k [pair ctx d_head]``, ``v [pair ctx d_value]``, ``one_hot [pair ctx seg]``,
    ``own_k, own_v [batch kv_head start own d]``, ``rows [batch start]``, ``bias [batch kv_head group start seg]``, ``drop
    [batch start ctx]``, ``factor [batch kv_head group start 1]`` or a number, ``sink [kv_head group 1]``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    one_hot: Tensor | None
    own_k: Tensor
    own_v: Tensor
    rows: Tensor
    place: Tensor
    bias: Tensor | None
    drop: Tensor | None
    factor: Tensor | float
    sink: Tensor | None
    window: int
    carried: int
    ends: list[int]
    """where the segment changes along the context, if there is one sequence and it was looked at"""

    @property
    def own(self) -> int:
        return self.own_k.shape[3]

    @property
    def own_seen(self) -> int:
        return min(self.own, self.window) if self.window else self.own

    def pieces(self, low: int, high: int) -> list[tuple[slice, slice]]:
        """Which context keys starts at rows low..high see, and the columns of the scores that they become."""
        end = max(min(high + 1, self.k.shape[1]), 0)
        # one key at least, hidden where the window is full of own keys
        begin = min(max(low + self.own - self.window + 1, 0), max(end - 1, 0)) if self.window else 0
        if begin <= self.carried:
            return [(slice(0, end), slice(0, end))]
        pieces = [(slice(begin, end), slice(self.carried, self.carried + end - begin))]
        return [(slice(0, self.carried), slice(0, self.carried)), *pieces] if self.carried else pieces


@dataclass(frozen=True)
class _Tile:
    """The scores of some starts, ``[pair row key]`` (rows: group x start), context keys first, then the own ones.

    ``here``: where it is, (sequences, kv heads, starts). ``hidden [batch start key]``: what is hidden of its context keys,
    None where that follows from the row and the window alone.
    """

    part: _Part
    here: tuple[slice, slice, slice]
    pieces: list[tuple[slice, slice]]
    scores: Tensor
    queries: Tensor
    factor: Tensor | float
    hidden: Tensor | None
    shape: tuple[int, int, int, int]
    first: bool
    last: bool

    @property
    def own(self) -> int:
        """Number of own keys: they come with the last of the context keys."""
        return self.part.own if self.last else 0

    @property
    def keys(self) -> int:
        """Number of context keys."""
        return self.pieces[-1][1].stop

    @property
    def only_segment(self) -> int | None:
        """The segment that all keys are of, where that is known: its mass is the sum of all."""
        ends, piece = self.part.ends, self.pieces[0][0]
        if not ends or self.own or len(self.pieces) > 1 or piece.start == piece.stop:
            return None
        place = bisect_right(ends, piece.start)
        return int(self.part.one_hot[0, piece.start].argmax()) if ends[place] >= piece.stop else None

    @property
    def sink(self) -> Tensor | None:
        """The learned sinks, [pair row 1]."""
        if self.part.sink is None:
            return None
        batch, kv_heads, group, starts = self.shape
        return self.part.sink.expand(batch, kv_heads, group, starts).reshape(*self.scores.shape[:2], 1)

    def of(self, tensor: Tensor) -> Tensor:
        """Cut its keys out of [pair ctx ...]."""
        return _keys_of(tensor, self.pieces)


@dataclass(frozen=True)
class _Sums:
    """What a start's keys so far add up to, ``[pair row ...]``: the largest score, and sums of exponentials above ``base``."""

    top: Tensor
    base: Tensor
    seen: Tensor
    answer: Tensor
    share: Tensor | None
    spread: Tensor | None

    def with_earlier(self, past: _Sums) -> _Sums:
        """Add those of the keys before; the largest score here is that of both."""
        decay = (past.top - self.base).exp()  # 0 where all keys before were hidden
        if self.spread is not None:
            self.spread.add_((past.spread + (past.base - self.base) * past.seen).mul_(decay))
        if self.share is not None:
            self.share.addcmul_(past.share, decay)
        self.answer.addcmul_(past.answer, decay)
        self.seen.addcmul_(past.seen, decay)
        return self


class _Buffer:
    """Memory that one tile after another writes to."""

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self.memory = like.new_empty(0, dtype=dtype)

    def of(self, *shape: int) -> Tensor:
        size = torch.Size(shape).numel()
        if self.memory.numel() < size:
            self.memory = self.memory.new_empty(size)
        return self.memory[:size].view(shape)


def _tiles(problem: Problem, block: int | None, most_keys: int) -> Iterator[_Tile]:
    """Every start of every kv head, ``most_keys`` at a time; a tile is no longer good when the next is asked for."""
    batch, heads, starts, d_head = problem.q.shape
    kv_heads, context = problem.context_k.shape[1:3]
    wide = _wide(problem)
    group = heads // max(kv_heads, 1)
    keys = max(context + problem.own * max(d_head, problem.context_v.shape[-1]), 1)
    most = (TILE_BYTES if problem.q.device.type == "cpu" else GPU_TILE_BYTES) // wide.itemsize
    together = batch * heads * min(block or starts, starts) * keys <= most
    row_list = problem.rows.tolist()
    buffer = _Buffer(problem.q, wide)
    whole = [(slice(0, batch), slice(0, kv_heads))]
    singly = [(slice(b, b + 1), slice(h, h + 1)) for b in range(batch) for h in range(kv_heads)]
    for sequences, kv in whole if together else singly:
        part = _part(problem, sequences, kv, wide)
        first = 0
        while first < starts:
            if block or together:
                count = block or starts
            elif most_keys < context:
                count = -(-ROWS // group)
            else:  # fewer starts the further they reach
                count = _count(row_list[sequences.start], first, keys - context, most // group, -(-LEAST_ROWS // group))
            span = slice(first, min(first + count, starts))
            reach = [row for rows in row_list[sequences] for row in rows[span]]
            low, high = min(reach), max(reach)
            chunks = [part.pieces(low, high)] if together else _chunks(part.pieces(low, high), most_keys)
            for number, pieces in enumerate(chunks):
                ends = (number == 0, number == len(chunks) - 1)
                yield _tile(part, (sequences, kv, span), low, pieces, ends, buffer)
            first = span.stop


def _chunks(pieces: list[tuple[slice, slice]], most: int) -> list[list[tuple[slice, slice]]]:
    """Cut what a tile sees into runs of ``most`` keys at most."""
    if pieces[-1][1].stop <= most:
        return [pieces]
    return [
        [(slice(begin, min(begin + most, piece.stop)), slice(0, min(most, piece.stop - begin)))]
        for piece, _ in pieces
        for begin in range(piece.start, piece.stop, most)
    ]


def _count(rows: list[int], first: int, more: int, most: int, least: int) -> int:
    """Return how many starts from ``first`` on have ``most`` keys together, each ``more`` besides the context; or ``least``."""
    reach = 0
    for number in range(len(rows) - first):
        reach = max(reach, rows[first + number] + 1 + more)
        if number >= least and (number + 1) * reach > most:
            return number
    return len(rows) - first


def _part(problem: Problem, sequences: slice, kv: slice, wide: torch.dtype) -> _Part:
    batch, heads, starts, _ = problem.q.shape
    kv_heads = problem.context_k.shape[1]
    group, controls = heads // kv_heads, problem.controls

    def by_head(tensor: Tensor) -> Tensor:
        """Of [batch head start ...], or what broadcasts to it."""
        return tensor.unflatten(1, (kv_heads, group))[sequences, kv]

    k, v = (t[sequences, kv].flatten(0, 1).to(wide) for t in (problem.context_k, problem.context_v))
    one_hot = bias = None
    ends: list[int] = []
    if problem.stats.mass and len(problem.segments[sequences]) == 1 and k.device.type == "cpu":
        (segment,) = problem.segments[sequences]
        ends = [*((segment.diff() != 0).nonzero()[:, 0] + 1).tolist(), len(segment)]
    if problem.stats.mass or controls.bias is not None:
        segments = problem.segments[sequences, :, None]
        one_hot = k.new_zeros(*segments.shape[:2], len(Segment)).scatter_(-1, segments.long(), 1)
        if len(one_hot) != len(k):
            one_hot = one_hot.repeat_interleave(len(k) // len(one_hot), 0)
    if controls.bias is not None:
        bias = by_head(controls.bias.to(wide).clamp(min=HIDDEN).expand(batch, heads, starts, -1))
    drop = controls.drop
    if drop is not None:
        drop = (drop if drop.ndim == 3 else drop[:, None].expand(-1, starts, -1))[sequences]
    factor = controls.score_scale
    if isinstance(factor, Tensor):
        factor = by_head(factor.to(wide).expand(batch, heads, starts))[..., None] * problem.scale
    else:
        factor = factor * problem.scale
    sink = None if problem.sink_logit is None else problem.sink_logit.to(wide).view(kv_heads, group, 1)[kv]
    return _Part(
        **{"q": by_head(problem.q), "k": k, "v": v, "one_hot": one_hot},
        **{"own_k": problem.own_k[sequences, kv], "own_v": problem.own_v[sequences, kv]},
        **{"rows": problem.rows[sequences], "place": torch.arange(problem.context_k.shape[2], device=k.device)},
        **{"bias": bias, "drop": drop, "factor": factor, "sink": sink},
        **{"window": problem.window, "carried": problem.carried, "ends": ends},
    )


def _tile(
    part: _Part,
    here: tuple[slice, slice, slice],
    low: int,
    pieces: list[tuple[slice, slice]],
    ends: tuple[bool, bool],
    buffer: _Buffer,
) -> _Tile:
    """The scores of one tile, controlled, hidden keys at HIDDEN; ``low`` is its smallest row, ``ends``: first and last."""
    span, begin = here[2], pieces[0][0].start
    keys, own = pieces[-1][1].stop, part.own if ends[1] else 0
    factor = part.factor[..., span, :] if isinstance(part.factor, Tensor) else part.factor
    queries = part.q[..., span, :].to(part.k.dtype) * factor
    shape = queries.shape[:4]
    flat = queries.reshape(len(part.k), -1, queries.shape[-1])
    scores = buffer.of(*flat.shape[:2], keys + own)
    torch.bmm(flat, _keys_of(part.k, pieces).transpose(1, 2), out=scores[..., :keys])
    grouped = scores.view(*shape, -1)
    if own:
        grouped[..., keys:] = (queries[..., None, :] * part.own_k[:, :, None, span].to(part.k.dtype)).sum(-1)
    if part.bias is not None:
        bias = part.bias[..., span, :].reshape(*flat.shape[:2], -1)
        scores[..., :keys].baddbmm_(bias, _keys_of(part.one_hot, pieces).transpose(1, 2))
        scores[..., keys:] += bias[..., int(Segment.SELF), None]
    hidden = None
    rows = part.rows[:, span, None]
    if part.window or part.drop is not None:
        place = _keys_of(part.place[None], pieces)
        hidden = place > rows
        if part.window:
            hidden = hidden | ((place <= rows + part.own - part.window) & (place >= part.carried))
        if part.drop is not None:
            hidden = hidden | _keys_of(part.drop[:, span].transpose(1, 2), pieces).transpose(1, 2)
        grouped[..., :keys].masked_fill_(hidden[:, None, None], HIDDEN)
        if own > part.own_seen:
            grouped[..., keys : keys + own - part.own_seen] = HIDDEN
    elif low + 1 < begin + keys:  # all starts of the tile see the keys up to its smallest row
        strip = slice(max(low + 1 - begin, 0), keys)
        later = part.place[begin:][strip] > rows
        grouped[..., strip].masked_fill_(later[:, None, None], HIDDEN)
    return _Tile(part, here, pieces, scores, flat, factor, hidden, shape, *ends)


def _keys_of(tensor: Tensor, pieces: list[tuple[slice, slice]]) -> Tensor:
    parts = [tensor[:, piece] for piece, _ in pieces]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _cut(tensor: Tensor, kv_heads: int, here: tuple[slice, ...]) -> Tensor:
    """A tile's place in [batch head start ...], as [batch kv_head group start ...]."""
    grouped = tensor.unflatten(1, (kv_heads, -1))
    return grouped[here[0], here[1]] if len(here) == 2 else grouped[here[0], here[1], :, here[2]]


def _wide(problem: Problem) -> torch.dtype:
    return torch.promote_types(problem.q.dtype, torch.float32)
