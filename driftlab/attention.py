r"""The one place where the drafter's attention happens: context keys, own chain keys, and where the mass goes.

For a query q of a start at row t, over the context keys c <= t and the keys that its own chain has appended,

    s_j = scale * (q . k_j) * score_scale + bias[segment(j)],   p = softmax(s),   out = sum_j p_j v_j,
    mass[seg] = sum_{j in seg} p_j,   entropy = -sum_j p_j ln p_j  (nats),   lse = ln sum_j exp s_j.

Mass per segment is attention over a one-hot segment matrix in the place of v, so no T x T map outlives a block of
starts; where gradients are wanted and there are several blocks, a block's map is made again in the backward pass. Scores
and masses are float32 (float64 if the inputs are). A learned sink logit (gpt-oss) joins the denominator and belongs to no
segment: the masses then sum to 1 minus its share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from driftlab.errors import DriftlabError
from driftlab.segments import Segment

BLOCK_BYTES = 64 * 2**20
"""Bytes of scores held at a time: blocks of starts are made as large as this allows."""


@dataclass(frozen=True)
class Stats:
    """Which statistics to reduce beside the output; nothing of it costs anything when it is not asked for."""

    mass: bool = False
    entropy: bool = False
    columns: bool = False
    recent: tuple[int, ...] = ()


@dataclass(frozen=True)
class Controls:
    """Interventions on the scores. All are neutral by default.

    ``bias``: added to the scores by segment, broadcastable to [batch head start seg].
    ``drop``: True where a context key is hidden, [batch ctx] or [batch start ctx].
    ``score_scale``: multiplies the scores, a number or broadcastable to [batch head start].
    """

    bias: Tensor | None = None
    drop: Tensor | None = None
    score_scale: Tensor | float = 1.0


@dataclass(frozen=True)
class Attended:
    """What :func:`attend` returns; a statistic that was not asked for is None.

    ``out [batch head start d_head]``, ``lse [batch head start]``, ``mass [batch head start seg]``,
    ``entropy [batch head start]`` (nats), ``visible [batch start]`` (number of keys seen),
    ``recent [batch head start window]`` (mass on the last w keys, whatever their segment),
    ``columns [batch head ctx]`` (mass on each context key, summed over the valid starts).
    """

    out: Tensor
    lse: Tensor
    mass: Tensor | None
    entropy: Tensor | None
    visible: Tensor
    recent: Tensor | None
    columns: Tensor | None


def attend(
    q: Float[Tensor, "batch head start d_head"],
    context_k: Float[Tensor, "batch kv_head ctx d_head"],
    context_v: Float[Tensor, "batch kv_head ctx d_value"],
    own_k: Float[Tensor, "batch kv_head start own d_head"],
    own_v: Float[Tensor, "batch kv_head start own d_value"],
    *,
    rows: Int[Tensor, "batch start"],
    segments: Int[Tensor, "batch ctx"],
    scale: float,
    window: int = 0,
    valid: Bool[Tensor, "batch start"] | None = None,
    controls: Controls | None = None,
    sink_logit: Float[Tensor, " head"] | None = None,
    stats: Stats | None = None,
    block: int | None = None,
) -> Attended:
    """Attend from each start to context keys c <= row and to its own chain keys.

    ``own`` counts the chain's own keys (0 at depth 1), oldest first; query head h reads kv head h // group, as
    Hugging Face's repeat_kv does. ``window``: only the last so many keys are seen, the query's own among them
    (sliding-window layers); 0: all. ``valid`` matters for ``stats.columns`` alone. ``block`` is the number of starts at a
    time; by default as many as :data:`BLOCK_BYTES` of scores allow. Differentiable in q, k and v.
    """
    batch, heads, starts, _ = q.shape
    keys = context_k.shape[2] + own_k.shape[3]
    controls = controls or Controls()
    stats = stats or Stats()
    if block is None:
        block = max(1, BLOCK_BYTES // (4 * batch * heads * max(keys, 1)))
    spans = [slice(first, first + block) for first in range(0, max(starts, 1), block)]
    run: Callable[..., Attended] = _attend_block
    if len(spans) > 1 and torch.is_grad_enabled() and any(t.requires_grad for t in (q, context_k, context_v)):
        # the backward pass would keep the maps of all blocks, and of all depths: make each again when its turn comes
        run = partial(checkpoint, _attend_block, use_reentrant=False, preserve_rng_state=False)
    # autocast would round the scores, and only those of context keys: own keys are not a matrix product
    with torch.autocast(q.device.type, enabled=False):
        parts = [
            run(
                q[:, :, span],
                context_k,
                context_v,
                own_k[:, :, span],
                own_v[:, :, span],
                rows[:, span],
                segments,
                scale,
                window,
                None if valid is None else valid[:, span],
                _sliced(controls, span),
                sink_logit,
                stats,
            )
            for span in spans
        ]
    return parts[0] if len(parts) == 1 else _joined(parts)


def _attend_block(
    q: Tensor,
    context_k: Tensor,
    context_v: Tensor,
    own_k: Tensor,
    own_v: Tensor,
    rows: Tensor,
    segments: Tensor,
    scale: float,
    window: int,
    valid: Tensor | None,
    controls: Controls,
    sink_logit: Tensor | None,
    stats: Stats,
) -> Attended:
    batch, heads, starts, d_head = q.shape
    kv_heads, context, own = context_k.shape[1], context_k.shape[2], own_k.shape[3]
    grouped = (batch, kv_heads, heads // kv_heads, starts)
    wide = torch.promote_types(q.dtype, torch.float32)
    q = (q.to(wide) * scale).view(*grouped, d_head)
    context_scores = q.reshape(batch, kv_heads, -1, d_head) @ context_k.to(wide).transpose(-1, -2)
    own_scores = (q[..., None, :] * own_k[:, :, None].to(wide)).sum(-1)
    scores = torch.cat([context_scores.view(*grouped, context), own_scores], -1).view(batch, heads, starts, -1)
    segments = torch.cat([segments, segments.new_full((batch, own), int(Segment.SELF))], 1)
    scores = _controlled(scores, segments, controls)
    hidden = _hidden(rows, context, controls.drop)
    outside = max(0, own - window) if window else 0  # of the chain's own keys; the query stands at place row + own
    if window:
        hidden = hidden | (torch.arange(context, device=rows.device) <= rows[..., None] + own - window)
    if controls.drop is not None and own == 0 and sink_logit is None:
        _refuse_blind(hidden, rows, valid)
    parts = [scores[..., :context].masked_fill(hidden[:, None], -torch.inf), scores[..., context + outside :]]
    if outside:
        parts.insert(1, torch.full_like(scores[..., :outside], -torch.inf))
    scores = torch.cat(parts, -1)
    if sink_logit is None:
        lse = scores.logsumexp(-1)
        p = scores.softmax(-1)
    else:
        sink = sink_logit.to(scores.dtype).view(1, heads, 1, 1).expand(batch, heads, starts, 1)
        lse = torch.cat([scores, sink], -1).logsumexp(-1)
        p = (scores - lse[..., None]).exp()
    weights = p.to(context_v.dtype).view(*grouped, -1)
    out = (weights[..., :context].reshape(batch, kv_heads, -1, context) @ context_v).view(*grouped, -1)
    out = out + (weights[..., context:, None] * own_v[:, :, None]).sum(-2)
    return Attended(
        out=out.reshape(batch, heads, starts, -1),
        lse=lse,
        mass=p @ _one_hot(segments, p.dtype)[:, None] if stats.mass else None,
        entropy=_entropy(p) if stats.entropy else None,
        visible=(~hidden).sum(-1) + own - outside,
        recent=_recent(p, rows, context, stats.recent) if stats.recent else None,
        columns=_columns(p[..., :context], valid) if stats.columns else None,
    )


def _entropy(p: Tensor) -> Tensor:
    """-sum p ln p, some starts at a time: the terms take as much room as p."""
    return torch.cat([torch.special.entr(part).sum(-1) for part in p.split(max(1, p.shape[2] // 8), 2)], 2)


def _one_hot(segments: Tensor, dtype: torch.dtype) -> Tensor:
    """[batch key seg]: 1 where the key is of that segment."""
    return torch.nn.functional.one_hot(segments, len(Segment)).to(dtype)


def _controlled(scores: Tensor, segments: Tensor, controls: Controls) -> Tensor:
    scaling = controls.score_scale
    scores = scores * (scaling[..., None] if isinstance(scaling, Tensor) and scaling.ndim else scaling)
    if controls.bias is None:
        return scores
    bias = controls.bias.to(scores.dtype)
    bias = bias.view((1,) * (4 - bias.ndim) + bias.shape).expand(len(segments), -1, -1, -1)
    # picked, not multiplied by a one-hot matrix: a bias of -inf hides a segment
    return scores + bias.gather(-1, segments[:, None, None].expand(*bias.shape[:3], -1))


def _hidden(rows: Tensor, context: int, drop: Tensor | None) -> Tensor:
    """[batch start ctx]: True where a context key is not visible."""
    hidden = torch.arange(context, device=rows.device) > rows[..., None]
    if drop is None:
        return hidden
    return hidden | (drop if drop.ndim == 3 else drop[:, None])


def _refuse_blind(hidden: Tensor, rows: Tensor, valid: Tensor | None) -> None:
    """A softmax over no key is no number: raise for the first start whose every key is dropped."""
    blind = hidden.all(-1) if valid is None else hidden.all(-1) & valid
    if bool(blind.any()):
        batch, start = blind.nonzero()[0].tolist()
        raise DriftlabError(
            f"sequence {batch} of the batch, row {int(rows[batch, start])}: every key is dropped, so there is nothing to "
            "attend to; keep at least one (the row's own, say)"
        )


def _recent(p: Tensor, rows: Tensor, context: int, windows: Sequence[int]) -> Tensor:
    """Mass on the last w keys: the chain's own first, then context rows t, t - 1, ..."""
    back = rows[..., None] - torch.arange(max(windows), device=rows.device)
    newest_context = p[..., :context].gather(-1, back.clamp(min=0)[:, None].expand(-1, p.shape[1], -1, -1))
    newest = torch.cat([p[..., context:].flip(-1), newest_context.masked_fill((back < 0)[:, None], 0)], -1)
    cumulative = newest.cumsum(-1)
    return cumulative[..., torch.tensor([w - 1 for w in windows], device=p.device)]


def _columns(p: Tensor, valid: Tensor | None) -> Tensor:
    return p.sum(2) if valid is None else (p * valid[:, None, :, None]).sum(2)


def _sliced(controls: Controls, span: slice) -> Controls:
    """The controls of a block of starts: whatever has a start axis longer than 1 is cut along it."""
    bias, drop, scaling = controls.bias, controls.drop, controls.score_scale
    if bias is not None and bias.ndim >= 2 and bias.shape[-2] > 1:
        bias = bias[..., span, :]
    if drop is not None and drop.ndim == 3:
        drop = drop[:, span]
    if isinstance(scaling, Tensor) and scaling.ndim and scaling.shape[-1] > 1:
        scaling = scaling[..., span]
    return Controls(bias=bias, drop=drop, score_scale=scaling)


def _joined(parts: list[Attended]) -> Attended:
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
