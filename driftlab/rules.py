r"""How a verifier decides about drafted tokens: the rules, what replay may conclude from the text, and their exact law.

A draft x_k is drawn from q_k, the target's distribution at its place is p_k (both processed). Given that the text is y, a
round accepts draft k, all before it having been accepted, with probability

    argmax      [y_k is the draft]      the draft is the arg max of q, so that q is one-hot: every rule below says the same
    rejection   min(1, q_k(y_k) / p_k(y_k))     accept x with min(1, p / q), else draw from (p - q)+ (Leviathan et al. 2023)
    block       c_k / c_{k-1},  c_k = min_{0 <= b <= k} prod_{j <= b} q_j(y_j) / p_j(y_j)     (Sun et al., arXiv 2403.10444)
    exact       q_k(y_k)                accept x iff the target's own sample is x
    q1          q_k(y_k)                accept x with p(x), else draw from p without x ("q = 1"; SafeAILab/EAGLE#329)

All are lossless: the text has the target's distribution. ``exact`` and ``q1`` are one law, the first with the target's dice.
Mixing the acceptance of one with the fallback of another is not lossless. Typical acceptance (Cai et al., arXiv 2401.10774)
accepts x iff p(x) > min(epsilon, delta exp(-H(p))): it changes the text, so it can be run and not replayed.

Block verification, from the paper's equations: P_0 = 1, P_k = min(1, P_{k-1} p_k(x_k) / q_k(x_k)). With one uniform u_k a
draft, the largest k with u_k <= h_k is accepted; h_K = P_K, else h_k = S_k / (S_k + 1 - P_k), S_k the sum of
(P_k p_{k+1} - q_{k+1})+, which is also what the next token is drawn from (after K drafts: p_{K+1}). Then P(at least k
accepted | x_1..x_k) = P_k, which times the drafts' probability over the text's is c_k; what follows x_1..x_k does not depend
on the verdict.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from driftlab.errors import DriftlabError
from driftlab.sampling import draw

SAMPLED_RULES = ("rejection", "block", "exact", "q1")
RULES = ("argmax", *SAMPLED_RULES)
LIVE_RULES = (*RULES, "typical")


def given_text(
    rule: str, q: Float[Tensor, "*start depth"], p: Float[Tensor, "*start depth"]
) -> Float[Tensor, "*start depth"]:
    """Return the probability of accepting the text's token at each depth, given that all drafts before it were accepted.

    ``q`` and ``p`` are the processed probabilities of the text's tokens. NaN where they are.

    Raises:
        DriftlabError: a rule that the text does not determine.
    """
    if rule == "rejection":
        return (q / p).clamp(max=1)
    if rule in ("exact", "q1"):
        return q
    if rule == "block":
        # in logarithms: a product of ratios overflows. Where c is 0 (q is), it stays so and so does the quotient
        kept = (q / p).log().cumsum(-1).cummin(-1).values.clamp(max=0)
        before = torch.cat([torch.zeros_like(kept[..., :1]), kept[..., :-1]], -1)
        return torch.where(before == -torch.inf, 0.0, (kept - before).exp())
    raise DriftlabError(f"rule {rule!r}: sampled drafts are replayed under {', '.join(SAMPLED_RULES)}")


# ---------------------------------------------------------------------------------------------- token by token


@dataclass(frozen=True)
class TokenRule:
    """Accept a draft x with probability ``chance(p, q)[x]``, else draw from ``after(p, q, x)``, which need not be normalised.

    p and q are [vocab]. Whether a pair is lossless :func:`output_law` tells.
    """

    chance: Callable[[Tensor, Tensor], Tensor]
    after: Callable[[Tensor, Tensor, int], Tensor]


def ratio(p: Float[Tensor, " vocab"], q: Float[Tensor, " vocab"]) -> Float[Tensor, " vocab"]:
    """min(1, p / q); 1 where q is 0 (never drafted)."""
    return torch.where(q > 0, p / q, 1.0).clamp(max=1)


def target_probability(p: Float[Tensor, " vocab"], q: Float[Tensor, " vocab"]) -> Float[Tensor, " vocab"]:
    """The target's probability itself."""
    return p


def residual(p: Float[Tensor, " vocab"], q: Float[Tensor, " vocab"], x: int) -> Float[Tensor, " vocab"]:
    """(p - q)+; where rounding leaves nothing of it (p = q), p."""
    rest = (p - q).clamp(min=0)
    return rest if bool(rest.sum() > 0) else p


def without(p: Float[Tensor, " vocab"], q: Float[Tensor, " vocab"], x: int) -> Float[Tensor, " vocab"]:
    """p without the rejected draft."""
    return p.index_fill(0, torch.tensor([x], device=p.device), 0)


def afresh(p: Float[Tensor, " vocab"], q: Float[Tensor, " vocab"], x: int) -> Float[Tensor, " vocab"]:
    """p, as if nothing had been rejected: not a fallback of any lossless rule here."""
    return p


TOKEN_RULES = {
    "argmax": TokenRule(ratio, residual),
    "rejection": TokenRule(ratio, residual),
    "exact": TokenRule(target_probability, without),
    "q1": TokenRule(target_probability, without),
}
WRONG_MIXES = {
    "min(1, p/q), then p without x": TokenRule(ratio, without),
    "p(x), then (p - q)+": TokenRule(target_probability, residual),
    "min(1, p/q), then p": TokenRule(ratio, afresh),
}
"""what implementations have got wrong: each changes the text's distribution"""


def output_law(rule: TokenRule, p: Float[Tensor, " vocab"], q: Float[Tensor, " vocab"]) -> Float[Tensor, " vocab"]:
    """Return the distribution of the token that comes out of one draft and its verdict. Lossless: it is p."""
    chance = rule.chance(p, q)
    out = q * chance
    for x in range(len(p)):
        if (missed := float(q[x] * (1 - chance[x]))) > 0:
            after = rule.after(p, q, x)
            out = out + missed * after / after.sum()
    return out


# ---------------------------------------------------------------------------------------------- one round, by dice


def verify(
    rule: str | TokenRule,
    drafts: list[int],
    p: Float[Tensor, "token vocab"],
    q: Float[Tensor, "depth vocab"],
    roll: Callable[[], Tensor],
    *,
    epsilon: float = 0.09,
    delta: float = 0.3,
) -> tuple[int, int]:
    """Decide about one round's drafts: return how many are accepted, and the token that comes after them.

    Args:
        rule: one of :data:`LIVE_RULES`, or any pair of acceptance and fallback.
        drafts: K tokens, x_k drawn from q_k.
        p: the target's processed distributions at the K drafts' places and after them, [K + 1, vocab].
        q: the processed distributions that the drafts were drawn from, [K, vocab]; one-hot for arg-max drafts.
        roll: gives a uniform number, [1]. ``exact`` takes one for each token that comes out.
        epsilon: of typical acceptance, the hard threshold.
        delta: of typical acceptance, the factor on exp(-entropy).
    """
    if rule == "block":
        return _verify_block(drafts, p, q, roll)
    if rule == "exact":
        for k, x in enumerate(drafts):
            y = _drawn(p[k], roll)
            if y != x:
                return k, y
        return len(drafts), _drawn(p[-1], roll)
    if rule == "typical":
        limit = (delta * torch.special.entr(p).sum(-1).neg().exp()).clamp(max=epsilon)
        bad = (k for k, x in enumerate(drafts) if not float(p[k, x]) > float(limit[k]))
        accepted = next(bad, len(drafts))
        return accepted, _drawn(p[accepted], roll)
    pair = TOKEN_RULES[rule] if isinstance(rule, str) else rule
    for k, x in enumerate(drafts):
        if float(roll()) < float(pair.chance(p[k], q[k])[x]):
            continue
        return k, _drawn(pair.after(p[k], q[k], x), roll)
    return len(drafts), _drawn(p[-1], roll)


def _verify_block(drafts: list[int], p: Tensor, q: Tensor, roll: Callable[[], Tensor]) -> tuple[int, int]:
    kept, chances = block_chances(drafts, p, q)
    verdicts = [float(roll()) < chance for chance in chances]
    accepted = max((k for k, passed in enumerate(verdicts, 1) if passed), default=0)
    return accepted, _drawn(_after_block(accepted, kept, p, q), roll)


def block_chances(
    drafts: list[int], p: Float[Tensor, "token vocab"], q: Float[Tensor, "depth vocab"]
) -> tuple[list[float], list[float]]:
    """Return P_0..P_K and h_1..h_K of block verification."""
    kept, chances = [1.0], []
    for k, x in enumerate(drafts):
        kept.append(min(1.0, kept[-1] * float(p[k, x]) / float(q[k, x])))
    for k in range(1, len(drafts)):
        rest = float((kept[k] * p[k] - q[k]).clamp(min=0).sum())
        # P_k = 1 and nothing left: p = q there, the chance does not matter (k + 1 drafts are accepted)
        chances.append(rest / (rest + 1 - kept[k]) if rest + 1 - kept[k] > 0 else 1.0)
    return kept, [*chances, kept[-1]]


def _after_block(accepted: int, kept: list[float], p: Tensor, q: Tensor) -> Tensor:
    if accepted == len(q):
        return p[-1]
    return residual(kept[accepted] * p[accepted], q[accepted], -1)


def _drawn(weights: Float[Tensor, " vocab"], roll: Callable[[], Tensor]) -> int:
    return int(draw(weights[None], roll())[0])


# ---------------------------------------------------------------------------------------------- one round, enumerated

Law = dict[tuple[tuple[int, ...], int], float]
Conditional = Callable[[tuple[int, ...]], Float[Tensor, " vocab"]]


def round_law(rule: str | TokenRule, p_after: Conditional, q_after: Conditional, depth: int) -> Law:
    """Return {(emitted tokens, accepted drafts): probability} of one round: every draft, verdict and redraw, summed up.

    For tiny vocabularies (vocab^K chains of drafts): what replay and the live loop are checked against.

    Args:
        rule: a lossless rule's name, or any pair of acceptance and fallback.
        p_after: the target's processed distribution after the round's first tokens, float64.
        q_after: the distribution that the next draft is drawn from, after the drafts so far.
        depth: K.
    """
    law: Law = defaultdict(float)
    vocab = range(len(p_after(())))
    for drafts in itertools.product(vocab, repeat=depth):
        chance = math.prod(float(q_after(drafts[:k])[x]) for k, x in enumerate(drafts))
        if not chance:
            continue
        p = torch.stack([p_after(drafts[:k]) for k in range(depth + 1)])
        q = torch.stack([q_after(drafts[:k]) for k in range(depth)])
        for accepted, share, after in _verdicts(rule, list(drafts), p, q):
            if share:
                for y, weight in enumerate((after / after.sum()).tolist()):
                    law[(*drafts[:accepted], y), accepted] += chance * share * weight
    return {key: value for key, value in law.items() if value}


def _verdicts(rule: str | TokenRule, drafts: list[int], p: Tensor, q: Tensor) -> list[tuple[int, float, Tensor]]:
    """(accepted, its probability given the drafts, what the next token is drawn from)."""
    if rule == "block":
        kept, chances = block_chances(drafts, p, q)
        shares = [
            (chances[k - 1] if k else 1.0) * math.prod(1 - later for later in chances[k:])
            for k in range(len(drafts) + 1)
        ]
        return [(k, share, _after_block(k, kept, p, q)) for k, share in enumerate(shares)]
    pair = TOKEN_RULES[rule] if isinstance(rule, str) else rule
    found, passed = [], 1.0
    for k, x in enumerate(drafts):
        chance = float(pair.chance(p[k], q[k])[x])
        found.append((k, passed * (1 - chance), pair.after(p[k], q[k], x)))
        passed *= chance
    return [*found, (len(drafts), passed, p[-1])]
