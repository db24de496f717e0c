r"""What a drafter is trained to minimise, with gradients in closed form.

With p the target's distribution over its whole vocabulary, q the drafter's over the draft vocabulary D, and sums over D:

    soft_ce   - sum p ln q
    kl          sum p ln (p / q)                      (soft_ce less a constant: same gradient, another value)
    alpha     - ln a,     a = sum min(p, q)           the acceptance rate of a sampled draft
    lambda      l kl + (1 - l) (1 - a),   l = exp(-eta mean a), a number per depth and batch, without gradient

(LK losses: arXiv 2602.23881.) What the drafter cannot propose is no part of D, so p sums to its coverage, not to 1.

Derivatives by the logits z_j:  soft_ce: m q_j - p_j, m = sum p;   a: q_j ([q_j < p_j] - A), A = sum of q over q < p.

Sums over D may run over some columns instead: all that carry probability, with weight 1, and a uniform sample of the rest
with weight (rest / sampled). ln sum_c w_c exp z_c then estimates the log-sum-exp, and every sum above is weighted so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from driftlab.errors import DriftlabError

LossName = Literal["soft_ce", "kl", "alpha", "lambda"]
LOSSES: tuple[str, ...] = get_args(LossName)
_BLOCK_BYTES = 64 * 2**20
_HELD_BYTES = 2**28
_TINY = 1e-8


@dataclass(frozen=True)
class TargetDistribution:
    """p at every answer row of a batch, over columns of the draft vocabulary.

    ``hidden [row d_target]``, ``lse [row]``: the target's last state and log-sum-exp; ``head [column d_target]``: its head
    rows; ``columns``: draft ids, None for all; ``weights [column]``. ``p [row column]`` is held if it fits in memory, or made
    for a block of rows at a time: never for all rows of a large vocabulary.
    """

    hidden: Float[Tensor, "row d_target"]
    lse: Float[Tensor, " row"]
    head: Float[Tensor, "column d_target"]
    columns: Int[Tensor, " column"] | None
    weights: Float[Tensor, " column"] | None
    p: Float[Tensor, "row column"] | None

    @classmethod
    def of(
        cls,
        hidden: Float[Tensor, "row d_target"],
        lse: Float[Tensor, " row"],
        head: Float[Tensor, "draft_vocab d_target"],
        *,
        negatives: int = 0,
        floor: float = 1e-3,
        seed: int = 0,
    ) -> TargetDistribution:
        """Compute p once for a batch.

        Args:
            hidden: post-norm target states of the answer rows, float32 or wider.
            lse: log-sum-exp of the target's logits over its whole vocabulary.
            head: the target's head rows of the draft vocabulary.
            negatives: 0: all columns. Otherwise those with p >= ``floor`` in some row, and so many of the rest.
            floor: see ``negatives``.
            seed: of the sample.
        """
        held = len(hidden) * len(head) * 4 <= _HELD_BYTES
        if not negatives:
            p = torch.cat(list(_blocks(hidden, lse, head))) if held and len(hidden) else None
            return cls(hidden, lse, head, None, None, p)
        parts, seen = [], torch.zeros(len(head), dtype=torch.bool, device=head.device)
        for part in _blocks(hidden, lse, head):
            seen |= (part >= floor).any(0)
            if held:
                parts.append(part)
        rest = (~seen).nonzero()[:, 0]
        count = min(negatives, len(rest))
        generator = torch.Generator().manual_seed(seed)
        sample = rest[torch.randperm(len(rest), generator=generator)[:count].to(rest.device)]
        columns = torch.cat([seen.nonzero()[:, 0], sample])
        weights = torch.ones(len(columns), dtype=hidden.dtype, device=head.device)
        if count:
            weights[len(columns) - count :] = len(rest) / count
        chosen = head[columns]
        p = torch.cat([part[:, columns] for part in parts]) if parts else None
        return cls(hidden, lse, chosen, columns, weights, p)

    def at(self, rows: Int[Tensor, " some"]) -> Float[Tensor, "some column"]:
        """p at some rows."""
        if self.p is not None:
            return self.p[rows]
        return _probabilities(self.hidden[rows], self.lse[rows], self.head)


def _probabilities(hidden: Tensor, lse: Tensor, head: Tensor) -> Tensor:
    with torch.autocast(hidden.device.type, enabled=False):
        return (hidden @ head.to(hidden.dtype).T).sub_(lse[:, None]).exp_()


def _blocks(hidden: Tensor, lse: Tensor, head: Tensor) -> Any:
    size = max(1, _BLOCK_BYTES // (4 * len(head)))
    for first in range(0, len(hidden), size):
        yield _probabilities(hidden[first : first + size], lse[first : first + size], head)


def draft_loss(
    hidden: Float[Tensor, "row d_model"],
    weight: Float[Tensor, "draft_vocab d_model"],
    target: TargetDistribution,
    rows: Int[Tensor, " row"],
    *,
    loss: str = "soft_ce",
    eta: float = 3.0,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""], Int[Tensor, " row"]]:
    """Return (summed loss, summed acceptance rate a, arg max over the columns as draft ids) of some drafted rows.

    a is 0 for the losses that do not form it.

    Args:
        hidden: normed draft states.
        weight: the drafter's head.
        target: of the batch; ``rows`` point into it, one for each drafted row.
        rows: see ``target``.
        loss: one of :data:`LOSSES`.
        eta: of the lambda loss.

    Raises:
        DriftlabError: no such loss.
    """
    if loss not in LOSSES:
        raise DriftlabError(f"loss {loss!r}: choose from {', '.join(LOSSES)}")
    return _DraftLoss.apply(hidden, weight, target, rows, loss, eta)


class _DraftLoss(torch.autograd.Function):
    """Logits exist for a block of rows at a time: the gradient is formed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, target: TargetDistribution, rows: Tensor, loss: str, eta: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sum the loss and form its gradients."""
        columns, w = target.columns, target.weights
        used = (weight if columns is None else weight[columns]).to(hidden.dtype)
        offset = None if w is None else w.log()
        both = loss == "lambda"
        grads = [torch.empty_like(hidden) for _ in range(1 + both)]
        weight_grads = [torch.zeros_like(used) for _ in range(1 + both)] if ctx.needs_input_grad[1] else []
        total, other = target.hidden.new_zeros(()), target.hidden.new_zeros(())
        accepted = torch.zeros_like(total)
        best = torch.empty_like(rows)
        size = max(1, _BLOCK_BYTES // (4 * len(used)))
        for first in range(0, len(rows), size):
            span = slice(first, first + size)
            z, p = (hidden[span] @ used.T).to(target.hidden.dtype), target.at(rows[span])
            best[span] = z.argmax(-1)
            if offset is not None:
                z += offset
            lse = z.logsumexp(-1, keepdim=True)
            wp = p if w is None else p * w
            wq = (z - lse).exp_()
            if loss in ("alpha", "lambda"):
                below = wq < wp
                overlap = torch.where(below, wq, wp).sum(-1, keepdim=True)
                accepted += overlap.sum()
            if loss != "alpha":
                mass = wp.sum(-1, keepdim=True)
                log_q = z if offset is None else z - offset
                total += (mass * lse).sum() - (wp * log_q).sum()
                if loss != "soft_ce":
                    total += torch.special.xlogy(wp, p).sum()
                parts = [wq * mass - wp]
            else:
                total -= overlap.clamp(min=_TINY).log().sum()
                parts = []
            if loss in ("alpha", "lambda"):
                inside = wq * below
                slope = inside - wq * inside.sum(-1, keepdim=True)
                parts.append(-slope / overlap.clamp(min=_TINY) if loss == "alpha" else -slope)
                other += len(p) - overlap.sum()
            for i, part in enumerate(parts):
                part = part.to(hidden.dtype)
                grads[i][span] = part @ used
                if weight_grads:
                    weight_grads[i] += part.T @ hidden[span]
        shares = [1.0]
        if both:
            share = float(torch.exp(-eta * accepted / max(len(rows), 1)))
            shares = [share, 1 - share]
            total = share * total + (1 - share) * other
        grad_hidden = sum(s * g for s, g in zip(shares, grads, strict=True))
        grad_weight = None
        if weight_grads:
            grad_weight = sum(s * g for s, g in zip(shares, weight_grads, strict=True))
            if columns is not None:
                grad_weight = torch.zeros_like(weight).index_copy_(0, columns, grad_weight.to(weight))
        ctx.save_for_backward(grad_hidden, grad_weight)
        if columns is not None:
            best = columns[best]
        ctx.mark_non_differentiable(accepted, best)
        return total, accepted, best

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """Scale the gradients formed in the forward pass."""
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grad.to(grad_hidden.dtype)
        return grad_hidden * scale, None if grad_weight is None else grad_weight * scale, None, None, None, None
