r"""Draft attention on a CPU by torch's own flash kernel, a run of keys of one segment at a time; forward only.

For each start the kernel answers a run r of keys with out_r = sum_{j in r} p_j v_j and l_r = ln sum_{j in r} exp s_j, p being
the softmax over that run alone. Two disjoint sets of keys a, b are then put together exactly:

    w = sigmoid(l_a - l_b),   lse = ln(exp l_a + exp l_b),   out = w out_a + (1 - w) out_b,
    mass = w mass_a + (1 - w) mass_b,   H = w H_a + (1 - w) H_b - w ln w - (1 - w) ln(1 - w).

A run has one segment, so all its mass is there, and a bias by segment is added to l_r. A run's entropy is

    H_r = l_r - sum_{j in r} p_j s_j = l_r - scale * q . (sum_{j in r} p_j k_j),

for which the kernel is called with the keys in place of the values. It is a difference of numbers as large as the scores:
where those exceed REACH, the tiles of ``blocked`` answer the entropy. They answer the columns too. Output, lse, mass and
``recent`` do not depend on what else is asked for, not by a bit.

Starts are taken in stretches whose rows follow each other, or are the same (padding). Keys before a stretch are seen by all of
it; those along it are cut by the kernel's causal mask, which is aligned at the first query and the first key.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from driftlab.errors import DriftlabError
from driftlab.kernels import blocked
from driftlab.kernels.problem import Attended, Problem, Stats, visible_keys
from driftlab.kernels.recent import recent_mass
from driftlab.segments import Segment

STARTS = 768
"""Starts at a time: the least for which the kernel takes its large tiles, so that what it answers stays small."""
ANSWER_BYTES = 2**20
"""Bytes that the kernel answers at a time, where that is more than one kv head."""
LEAST_STARTS = 64
"""Starts of a stretch on average, below which the tiles are faster."""
MAX_RUNS = 32
"""Runs of equal segment: each costs a call per stretch."""
REACH = {torch.float32: 20.0, torch.float64: 1e4}
"""Mean scores and lse up to which the entropy by difference is good to 1e-5 nats (measured: 7.5e-6 at 19; up to 2.3 times the
tiles' error, which grows with the scores too: 1.3e-5 against 1.8e-5 at 28)."""

_KERNEL: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
"""not public in torch, so it may go: then the tiles answer"""


def refuses(problem: Problem) -> str:
    """Return why this problem is left to the tiles of ``blocked``, in words; empty if it is not."""
    why = _cannot(problem)
    if why:
        return why
    starts = problem.rows.shape[1]
    if starts < LEAST_STARTS:
        return f"fewer than {LEAST_STARTS} starts"
    step = problem.rows.diff()
    turns = int(((step[:, 1:] != step[:, :-1]) | (step[:, 1:] != step[:, 1:].clamp(0, 1))).sum(1).max())
    if turns * LEAST_STARTS > starts:
        return "the rows of the starts do not follow each other"
    if int((problem.segments.diff() != 0).sum(1).max()) >= MAX_RUNS:
        return f"the segments change more than {MAX_RUNS - 1} times along the context"
    return ""


def _cannot(problem: Problem) -> str:
    """Return why the answer would be wrong."""
    if _KERNEL is None:
        return "this torch has no such kernel"
    names = ("q", "context_k", "context_v", "own_k", "own_v")
    if any(getattr(problem, name).device.type != "cpu" for name in names):
        return "not on a CPU"
    if len({getattr(problem, name).dtype for name in names}) > 1:
        return "queries, keys and values are of different types"
    if problem.controls.drop is not None:
        return "single keys are dropped (controls.drop)"
    if not problem.q.numel() or not problem.context_k.numel():
        return "no starts, or no context keys"
    if 0 < problem.window <= int(problem.rows.max()) + problem.own:
        return "a window that hides keys"
    return ""


@torch.no_grad()
def attend(problem: Problem, block: int | None = None) -> Attended:
    """Answer a problem as ``reference.attend`` does, half inputs in float32. ``block``: starts at a time. Not differentiable.

    Raises:
        DriftlabError: it cannot be answered; see ``refuses`` (of whose reasons those of speed are no hindrance here).
    """
    why = _cannot(problem)
    if why:
        raise DriftlabError(f"torch's flash kernel cannot answer this: {why}; use kernels.blocked")
    q, stats, most = problem.q, problem.stats, block or STARTS
    batch, heads, starts, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(batch, heads, starts, problem.context_v.shape[-1])
    lse = q.new_empty(batch, heads, starts, dtype=wide)
    mass = q.new_empty(batch, heads, starts, len(Segment), dtype=wide) if stats.mass else None
    entropy = torch.empty_like(lse) if stats.entropy else None
    for b in range(batch):
        whole = _Sums(*(None if t is None else t[b : b + 1] for t in (lse, out, mass, entropy)))
        _answer(_sequence(problem, b), whole, most)
    recent = recent_mass(problem, lse, stats.recent) if stats.recent else None
    columns = None
    if stats.columns:
        columns = blocked.attend(dataclasses.replace(problem, stats=Stats(columns=True)), block).columns
    return Attended(out, lse, mass, entropy, visible_keys(problem), recent, columns)


@dataclass
class _Sums:
    """What the keys so far add up to: fields of ``Attended``, ``[1 head start ...]``."""

    lse: Tensor
    out: Tensor
    mass: Tensor | None
    entropy: Tensor | None

    def open(self) -> None:
        """No keys yet."""
        self.lse.fill_(-torch.inf)
        for tensor in (self.out, self.mass, self.entropy):
            if tensor is not None:
                tensor.zero_()

    def add(self, lse: Tensor, out: Tensor, segment: int, entropy: Tensor | None, skip: int = 0) -> None:
        """Add keys of one segment, seen by all starts but the first ``skip``."""
        past = self.lse[:, :, skip:]
        gap = torch.where(lse.isneginf(), torch.inf, past - lse)  # of two empty sets either will do
        kept, new = gap.sigmoid(), gap.neg().sigmoid()
        self.out[:, :, skip:].mul_(kept[..., None]).addcmul_(out, new[..., None])
        if self.mass is not None:
            self.mass[:, :, skip:].mul_(kept[..., None])[..., segment] += new
        if self.entropy is not None and entropy is not None:
            mixed = torch.special.entr(kept) + torch.special.entr(new) + new * entropy
            self.entropy[:, :, skip:].mul_(kept).add_(mixed)
        past.copy_(torch.logaddexp(past, lse))

    def close(self, sink: Tensor | None) -> None:
        """Let a learned sink ``[head]`` take its share. Starts that see nothing become NaN, as a softmax over nothing is."""
        if sink is None:
            share = torch.where(self.lse.isneginf(), torch.nan, 1.0).to(self.lse.dtype)
        else:
            share = (self.lse - sink[:, None]).sigmoid()
            self.lse.copy_(torch.logaddexp(self.lse, sink[:, None].expand_as(self.lse)))
        self.out.mul_(share[..., None])
        if self.mass is not None:
            self.mass.mul_(share[..., None])
        if self.entropy is not None:
            self.entropy.mul_(share).add_(torch.special.entr(share))


def _answer(problem: Problem, whole: _Sums, most: int) -> None:
    """Fill in the answer for one sequence, some heads and starts at a time."""
    heads, starts, d_head = problem.q.shape[1:]
    kv_heads, d_value = problem.context_v.shape[1], problem.context_v.shape[-1]
    group, width, wide = heads // kv_heads, max(d_head, d_value), whole.lse.dtype
    stretches = _stretches(problem.rows[0].tolist(), most)
    runs = _runs(problem.segments[0])
    together = max(1, ANSWER_BYTES // (max(min(starts, most), 1) * group * width * wide.itemsize))
    for first in range(0, kv_heads, together):
        kv = slice(first, min(first + together, kv_heads))
        part = _heads(problem, kv, slice(kv.start * group, kv.stop * group))
        k, v = (_ready(t, width, wide) for t in (part.context_k, part.context_v))
        for begin, end, step in stretches:
            here = (slice(None), slice(kv.start * group, kv.stop * group), slice(begin, end))
            target = _Sums(*(None if t is None else t[here] for t in (whole.lse, whole.out, whole.mass, whole.entropy)))
            _fill(target, part.at(here[2]), k, v, runs, step)


def _fill(target: _Sums, part: Problem, k: Tensor, v: Tensor, runs: list[tuple[int, int, int]], step: int) -> None:
    """Fill in the answer for a stretch of starts; ``k, v [1 kv_head ctx width]`` are ready for the kernel."""
    wide, scale, factor, bias = k.dtype, part.scale, part.controls.score_scale, part.controls.bias
    q, d_head, d_value = part.q, part.q.shape[-1], target.out.shape[-1]
    if isinstance(factor, Tensor):
        q = q.to(wide) * factor[..., None].to(wide)
    else:
        scale = scale * factor
    q = _ready(q, k.shape[-1], wide)
    bias = None if bias is None else bias.to(wide)
    fits = target.out.dtype == wide and d_value == k.shape[-1]
    sums = dataclasses.replace(target, out=target.out if fits else torch.empty_like(q))
    sums.open()
    reach = _add_context(sums, (q, k, v), runs, (int(part.rows[0, 0]), step), scale, bias)
    if part.own:
        _add_own(sums, q[..., :d_head], part.own_k[0].to(wide), part.own_v[0].to(wide), scale, bias)
    sums.close(None if part.sink_logit is None else part.sink_logit.to(wide))
    if not fits:
        target.out.copy_(sums.out[..., :d_value])
    if target.entropy is not None and not all(
        size <= REACH[wide] for size in reach
    ):  # or NaN, which spreads to other starts
        target.entropy.copy_(blocked.attend(dataclasses.replace(part, stats=Stats(entropy=True))).entropy)


def _add_context(
    sums: _Sums,
    tensors: tuple[Tensor, Tensor, Tensor],
    runs: list[tuple[int, int, int]],
    rows: tuple[int, int],
    scale: float,
    bias: Tensor | None,
) -> list[float]:
    """Add the context keys that starts at rows r, r + step, ... see; for the entropy, return how large their scores are."""
    (q, k, v), (row, step) = tensors, rows
    reach: list[float] = []
    seen = row + step * (q.shape[2] - 1) + 1
    edge = max(row, 0) if step else seen  # keys before it are seen by all
    before = [(begin, min(edge, end), segment) for begin, end, segment in runs]
    after = [(max(edge, begin), min(end, seen), segment) for begin, end, segment in runs]
    for begin, end, segment in before + after:
        if begin >= end:
            continue
        along = begin >= edge
        skip = begin - row if along else 0
        keys, values, queries = k[:, :, begin:end], v[:, :, begin:end], q[:, :, skip:]
        entropy = None
        if sums.entropy is not None:
            mean_key, lse = _KERNEL(queries, keys, keys, 0.0, along, scale=scale)
            mean_score = mean_key.mul_(queries).sum(-1).mul_(scale)
            del mean_key  # before there is another as large
            reach += [mean_score.abs().max().item(), lse.abs().max().item()]
            entropy = (lse - mean_score).clamp_(min=0)
        out, lse = _KERNEL(queries, keys, values, 0.0, along, scale=scale)
        sums.add(lse if bias is None else lse + bias[:, :, skip:, segment], out, segment, entropy, skip)
    return reach


def _add_own(sums: _Sums, q: Tensor, own_k: Tensor, own_v: Tensor, scale: float, bias: Tensor | None) -> None:
    """Add each start's own keys, ``own_k, own_v [kv_head start own d]``, scored one by one."""
    kv_heads, starts = own_k.shape[:2]
    heads = q.shape[1]
    queries = q.view(kv_heads, -1, starts, q.shape[-1]).permute(0, 2, 3, 1).flatten(0, 1)
    scores = torch.bmm(own_k.flatten(0, 1), queries).mul_(scale)  # [kv_head x start, own, group]
    p = scores.softmax(1)

    def by_head(tensor: Tensor) -> Tensor:
        return tensor.view(kv_heads, starts, heads // kv_heads, -1).transpose(1, 2).reshape(1, heads, starts, -1)

    out = by_head(torch.bmm(p.transpose(1, 2), own_v.flatten(0, 1)))
    lse = by_head(scores.logsumexp(1))[..., 0]
    entropy = by_head(torch.special.entr(p).sum(1))[..., 0] if sums.entropy is not None else None
    if bias is not None:
        lse = lse + bias[..., int(Segment.SELF)]
    sums.add(lse, pad(out, (0, sums.out.shape[-1] - out.shape[-1])), int(Segment.SELF), entropy)


def _ready(tensor: Tensor, width: int, wide: torch.dtype) -> Tensor:
    """As the kernel needs it: one width, wide, and the last axis without gaps (it reads others wrongly and says nothing)."""
    tensor = pad(tensor.to(wide), (0, width - tensor.shape[-1])) if tensor.shape[-1] < width else tensor.to(wide)
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _runs(segments: Tensor) -> list[tuple[int, int, int]]:
    """The runs of equal segment along a context: first key, end, segment."""
    edges = [0, *((segments.diff() != 0).nonzero()[:, 0] + 1).tolist(), len(segments)]
    return [(begin, end, int(segments[begin])) for begin, end in zip(edges[:-1], edges[1:], strict=True)]


def _stretches(rows: list[int], most: int) -> list[tuple[int, int, int]]:
    """Cut starts into stretches of at most ``most`` whose rows rise by a step of 1, or of 0: first start, end, step."""
    found, begin = [], 0
    while begin < len(rows):
        end, last = begin + 1, min(begin + most, len(rows))
        step = rows[end] - rows[begin] if end < last else 0
        if step in (0, 1):
            while end < last and rows[end] - rows[end - 1] == step:
                end += 1
        found.append((begin, end, step if step == 1 else 0))
        begin = end
    return found


def _sequence(problem: Problem, b: int) -> Problem:
    """One sequence of the batch; controls get all their axes."""
    batch, heads, starts, _ = problem.q.shape
    here, controls = slice(b, b + 1), problem.controls
    names = ("q", "context_k", "context_v", "own_k", "own_v", "rows", "segments")
    bias, factor = controls.bias, controls.score_scale
    if bias is not None:
        bias = bias.expand(batch, heads, starts, len(Segment))[here]
    if isinstance(factor, Tensor):
        factor = factor.expand(batch, heads, starts)[here]
    return dataclasses.replace(
        problem,
        **{name: getattr(problem, name)[here] for name in names},
        valid=None,
        controls=dataclasses.replace(controls, bias=bias, score_scale=factor),
    )


def _heads(problem: Problem, kv: slice, heads: slice) -> Problem:
    """Some heads of a problem of one sequence."""
    controls = problem.controls
    bias, factor = controls.bias, controls.score_scale
    if bias is not None:
        bias = bias[:, heads]
    if isinstance(factor, Tensor):
        factor = factor[:, heads]
    return dataclasses.replace(
        problem,
        **{name: getattr(problem, name)[:, kv] for name in ("context_k", "context_v", "own_k", "own_v")},
        q=problem.q[:, heads],
        sink_logit=None if problem.sink_logit is None else problem.sink_logit[heads],
        controls=dataclasses.replace(controls, bias=bias, score_scale=factor),
    )
