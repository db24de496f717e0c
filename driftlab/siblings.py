r"""Trees whose children are sampled without replacement: how likely the text is accepted, averaged over the draws.

A node with the target's distribution p and the drafter's q has children x_1, x_2, ..., x_c, drawn one after the other from q
without those drawn before. The verifier tries them in order (recursive rejection sampling; q must be the conditional one:
SafeAILab/EAGLE#74): with p_1 = p, q_1 = q,

    accept x_i with min(1, p_i(x_i) / q_i(x_i));   else p_{i+1} ~ (p_i - q_i)+,   q_{i+1} ~ q_i without x_i,

and draws from p_{c+1} if none is accepted. The text y came from an accepted child with probability

    A(y) = 1/p(y) E sum_i r_1 ... r_{i-1} min(p_i(y), q_i(y)),     r_i = 1 - sum_x min(p_i(x), q_i(x)),

the mean over rejected children x_i ~ (q_i - p_i)+. The first term is that of a chain; the others are averaged over ``draws``
sets of children. Children that are not on the text do not matter, and the node that is on it at depth k has the text as its
path, so q is that of a chain fed the text, and rounds follow the renewal recursion of sampled chains with A in place of
min(1, q / p). Draws at different starts and depths are independent, so tau's expectations are unbiased over them.
"""

from __future__ import annotations

import hashlib

import torch
from jaxtyping import Float, Int
from torch import Tensor

from driftlab.acceptance import Acceptance, accept, drafting_of
from driftlab.draft import all_starts, check_fits, text_at, unroll
from driftlab.drafter import Drafter
from driftlab.errors import DriftlabError
from driftlab.probability import text_probabilities
from driftlab.progress import Progress, silent
from driftlab.sampling import Sampling
from driftlab.trajectory import Trajectory
from driftlab.trees import SampledTree

_BLOCK_BYTES = 64 * 2**20


@torch.no_grad()
def accept_siblings(
    drafter: Drafter,
    trajectory: Trajectory,
    tree: SampledTree,
    *,
    draft_temperature: float | None = None,
    draft_top_k: int | None = None,
    draft_top_p: float | None = None,
    draws: int = 4,
    seed: int = 0,
    progress: Progress = silent,
) -> Acceptance:
    """Replay a tree of sampled children on a recording.

    Args:
        drafter: on any device.
        trajectory: sampled by its target.
        tree: children a node, by depth.
        draft_temperature: of the children, and likewise ``draft_top_k`` and ``draft_top_p``; default the recording's.
        draft_top_k: see ``draft_temperature``.
        draft_top_p: see ``draft_temperature``.
        draws: sets of children that the probability is averaged over. Where every node has one child nothing is drawn.
        seed: of the draws.
        progress: called with ("siblings", sequences done, sequences).

    Returns:
        An acceptance table for :func:`driftlab.simulation.simulate`; its ``tree`` is ``tree``, its ``match`` is the arg-max
        chain's. Means of a simulation are unbiased over the draws; variances are not given (NaN) where children are drawn.

    Raises:
        DriftlabError: as :func:`driftlab.acceptance.accept` for sampled drafts; ``draws`` below 1.
    """
    if draws < 1:
        raise DriftlabError(f"draws {draws}: average over at least one")
    drafting = drafting_of(trajectory, "rejection", draft_temperature, draft_top_k, draft_top_p)
    check_fits(drafter, trajectory)
    plain = accept(all_starts(drafter, trajectory, tree.depth), trajectory)
    sampled = torch.zeros(plain.match.shape, dtype=torch.float64)
    chosen = text_probabilities(trajectory)
    target = Sampling(trajectory.settings["temperature"], trajectory.settings["top_k"], trajectory.settings["top_p"])
    for index in range(len(trajectory)):
        batch = trajectory.batch([index]).to(drafter.device, drafter.dtype)
        first, rows = int(batch.prompt_lengths[0]) - 1, batch.starts.rows.shape[1]
        states = trajectory[index].last_hidden
        # a stream of its own, so that a sequence's numbers do not depend on which others are there
        stream = hashlib.sha256(f"{seed} {plain.digests[index]}".encode()).digest()[:8]
        generator = torch.Generator().manual_seed(int.from_bytes(stream, "little") >> 1)
        for state, _ in unroll(drafter, batch, tree.depth, feed="text"):
            k = state.depth
            known = plain.valid[index, :rows, k - 1].nonzero()[:, 0]
            text = text_at(batch, state.starts.rows + k + 1)[0].cpu()
            for places in known.split(max(1, _BLOCK_BYTES // (8 * drafter.config.vocab_size))):
                p = target.process(trajectory.head.logits(states[first + places + k]).double())
                # a token at the very edge of a cut counts as inside, as everywhere (an impossible one was refused above)
                p = p.scatter(1, text[places][:, None], chosen[index][places + k][:, None])
                q = _wide(drafter, drafting, state.normed[0, places.to(state.normed.device)])
                sampled[index, places, k - 1] = sibling_probability(
                    p, q, text[places], tree.branching[k - 1], draws, generator
                )
        if not bool(sampled[index].isfinite().all()):
            raise DriftlabError(
                f"the draft's probabilities are not finite: sequence {plain.ids[index]!r}; draft in float32"
            )
        progress("siblings", index + 1, len(trajectory))
    return Acceptance(
        match=plain.match,
        valid=plain.valid,
        remaining=plain.remaining,
        rows=plain.rows,
        ids=plain.ids,
        categories=plain.categories,
        finish=plain.finish,
        rule="rejection",
        sampled=sampled,
        drafting=drafting,
        digests=plain.digests,
        tree=tree,
    )


def sibling_probability(
    p: Float[Tensor, "row vocab"],
    q: Float[Tensor, "row vocab"],
    text: Int[Tensor, " row"],
    children: int,
    draws: int,
    generator: torch.Generator,
) -> Float[Tensor, " row"]:
    """A(y) of each row, in [0, 1] up to the noise of the draws; float64."""
    at = text[:, None]
    whole = p.gather(1, at)[:, 0]
    total = torch.minimum(p, q).gather(1, at)[:, 0]
    if children == 1:
        return total / whole
    p2 = _normed((p - q).clamp(min=0))
    for _ in range(draws):
        weight, pi, qi = torch.ones_like(whole), p, q
        for child in range(2, children + 1):
            surplus = (qi - pi).clamp(min=0)
            missed = surplus.sum(1)
            # where nothing can be rejected the weight is 0 and the draw does not matter
            x = torch.multinomial(surplus + (missed <= 0)[:, None], 1, generator=generator)
            weight = weight * missed
            pi = p2 if child == 2 else _normed((pi - qi).clamp(min=0))
            qi = _normed(qi.scatter(1, x, 0.0))
            total = total + weight * torch.minimum(pi, qi).gather(1, at)[:, 0] / draws
    return total / whole


def _normed(weights: Tensor) -> Tensor:
    """Rows that sum to 1; rows of nothing stay nothing."""
    mass = weights.sum(1, keepdim=True)
    return weights / torch.where(mass > 0, mass, 1.0)


def _wide(drafter: Drafter, drafting: Sampling, normed: Float[Tensor, "row d_model"]) -> Float[Tensor, "row vocab"]:
    """Processed q over the target's vocabulary, float64 on the CPU."""
    q = drafting.process(drafter.logits(normed).double())
    wide = q.new_zeros(len(q), drafter.config.vocab_size)
    return wide.index_copy_(1, drafter.draft_vocab, q).cpu()


def sibling_law(
    p: Float[Tensor, " vocab"], q: Float[Tensor, " vocab"], children: int, *, conditional: bool = True
) -> tuple[Float[Tensor, " vocab"], Float[Tensor, " vocab"]]:
    """Return exact P(output is x and was a child), P(output is x) of one node: every set of children, verdict and redraw.

    For tiny vocabularies. ``conditional=False``: later children are judged by the unconditional q, a known fault, which is
    not lossless.
    """
    accepted, fallback = torch.zeros_like(p), torch.zeros_like(p)

    def go(chance: float, pi: Tensor, qi: Tensor, judged: Tensor, left: int) -> None:
        if not left or float(qi.sum()) <= 0:
            fallback.add_(chance * pi)
            return
        for x in range(len(p)):
            if not (drawn := float(qi[x])):
                continue
            kept = min(1.0, float(pi[x]) / float(judged[x]))
            accepted[x] += chance * drawn * kept
            rest = (pi - judged).clamp(min=0)
            if kept < 1 and float(rest.sum()) > 0:
                after = _normed(qi.index_fill(0, torch.tensor([x]), 0.0)[None])[0]
                go(chance * drawn * (1 - kept), rest / rest.sum(), after, after if conditional else q, left - 1)

    go(1.0, p, q, q, children)
    return accepted, accepted + fallback
