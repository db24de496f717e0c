r"""The specification of draft attention in plain torch, dense: any device, any dtype; float64 is the oracle of the tests.

    s_j = scale * (q . k_j) * score_scale + bias[segment(j)],   p = softmax(s),   out = sum_j p_j v_j,
    mass[seg] = sum_{j in seg} p_j,   entropy = -sum_j p_j ln p_j  (nats),   lse = ln sum_j exp s_j

A learned sink logit b joins the denominator, lse = ln(exp b + sum_j exp s_j), and is in no segment and no term of the entropy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from driftlab.errors import DriftlabError
from driftlab.kernels.problem import Attended, Controls, Problem
from driftlab.segments import Segment


def attend(problem: Problem) -> Attended:
    """Answer a problem with one dense softmax over the concatenated keys. Differentiable by autograd, statistics too.

    Raises:
        DriftlabError: every key of a valid start is dropped.
    """
    q, context_k, context_v, own_k, own_v = (
        getattr(problem, name) for name in ("q", "context_k", "context_v", "own_k", "own_v")
    )
    rows, segments, window, controls = problem.rows, problem.segments, problem.window, problem.controls
    sink_logit, stats = problem.sink_logit, problem.stats

    batch, heads, starts, d_head = q.shape
    kv_heads, context, own = context_k.shape[1], context_k.shape[2], own_k.shape[3]
    grouped = (batch, kv_heads, heads // kv_heads, starts)
    wide = torch.promote_types(q.dtype, torch.float32)
    q = (q.to(wide) * problem.scale).view(*grouped, d_head)
    context_scores = q.reshape(batch, kv_heads, -1, d_head) @ context_k.to(wide).transpose(-1, -2)
    own_scores = (q[..., None, :] * own_k[:, :, None].to(wide)).sum(-1)
    scores = torch.cat([context_scores.view(*grouped, context), own_scores], -1).view(batch, heads, starts, -1)
    segments = torch.cat([segments, segments.new_full((batch, own), int(Segment.SELF))], 1)
    scores = _controlled(scores, segments, controls)
    hidden = _hidden(rows, context, controls.drop)
    outside = max(0, own - window) if window else 0  # of the chain's own keys; the query stands at place row + own
    if window:
        place = torch.arange(context, device=rows.device)
        hidden = hidden | ((place <= rows[..., None] + own - window) & (place >= problem.carried))
    if controls.drop is not None and own == 0 and sink_logit is None:
        refuse_blind(hidden, rows, problem.valid)
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
        columns=_columns(p[..., :context], problem.valid) if stats.columns else None,
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


def refuse_blind(hidden: Tensor, rows: Tensor, valid: Tensor | None) -> None:
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
