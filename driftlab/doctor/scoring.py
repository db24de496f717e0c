r"""How well a reading of a checkpoint predicts the recorded text, depth by depth.

At row t and depth k the drafter, fed the text, gives a distribution q over its vocabulary. Its score is

    s = ln((1 - e) q(y) + e / V),      y = token t + k + 1 of the text, e = 0.02, V the target's vocabulary,

so that all readings are distributions over the same tokens: one outside the draft vocabulary costs ln(e / V) in each of them,
whatever d2t is taken to be. A draft temperature of 1/2, 1, 2 or 4 is chosen for each reading and depth, the one with the
largest mean score: the arg max, which tau rests on, has no temperature, and a reading that is wrong but flatter or sharper is
not to win by that.

Only the rows of the tokens that the recorded answers hold, and of others drawn at random, are normalised over (``among``): a
conditional distribution over the same tokens for all readings. tau is made with all rows.

    information = mean of s(y) - s(y'),      y' the token that stands at the same depth at another start of the recording

is 0 for a drafter that knows how often tokens occur and no more: then nothing can be told.
"""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from driftlab.acceptance import accept
from driftlab.doctor.stored import Stored, View, build, move
from driftlab.draft import Draft, text_at
from driftlab.drafter.blocks import LayerKV
from driftlab.drafter.model import Drafter, DraftState
from driftlab.errors import DriftlabError
from driftlab.recorded import Batch
from driftlab.simulation import Simulation, simulate
from driftlab.trajectory import Trajectory

FLOOR = 0.02
TEMPERATURES = (0.5, 1.0, 2.0, 4.0)
_KEPT = 4
_BLOCK_BYTES = 4 * 2**20
"""of logits at a time: what follows runs over them several times, and they should stay in the cache"""


@dataclass(frozen=True)
class Score:
    """``log_q``, ``chance [batch start depth]``: of the text, and of text from elsewhere; 0 where not ``valid``.

    ``tokens``: the arg max, as target ids (-1: none of the vocabulary); ``match``: whether it is the text's. ``temperatures``:
    chosen, one a depth.
    """

    log_q: Float[Tensor, "batch start depth"]
    chance: Float[Tensor, "batch start depth"]
    tokens: Int[Tensor, "batch start depth"]
    match: Bool[Tensor, "batch start depth"]
    valid: Bool[Tensor, "batch start depth"]
    temperatures: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean log-likelihood of a token over all depths, in nats."""
        return float(self.log_q.double().sum() / self.valid.sum())


class Bench:
    """The recorded text that readings are scored on.

    Args:
        stored: tensors of the checkpoint, tables of the target.
        batch: some prompts; answers are scored from their first row on.
        depth: deepest depth K.
        among: target ids that are normalised over; None: all.
    """

    def __init__(
        self, stored: Stored, batch: Batch, depth: int, among: Int[Tensor, " candidate"] | None = None
    ) -> None:
        self.stored, self.batch, self.depth, self.among = stored, batch, depth, among
        starts = batch.starts
        offsets = torch.arange(2, depth + 2)
        self.valid = starts.valid[..., None] & (starts.rows[..., None] + offsets < batch.lengths[:, None, None])
        if not bool(self.valid[..., -1].any()):
            raise DriftlabError(f"no answer is long enough for depth {depth}: record longer answers")
        self._first: OrderedDict[View, tuple[Drafter, Tensor, DraftState]] = OrderedDict()

    @property
    def tokens(self) -> int:
        """Answer tokens that are predicted at depth 1."""
        return int(self.valid[..., 0].sum())

    @torch.no_grad()
    def score(self, view: View) -> Score:
        """Score a reading.

        Raises:
            DriftlabError: a reading that the tensors or the recorded states do not allow, or states that are not finite.
        """
        log_q, chance, tokens, match, chosen = [], [], [], [], []
        for depth, (drafter, ids), normed in self._unroll(view):
            valid = self.valid[..., depth - 1]
            wanted = text_at(self.batch, self.batch.starts.rows + depth + 1)
            right, wrong, best = _likelihood(drafter, normed[valid], wanted[valid], ids, view.config.vocab_size)
            place = int(right.double().mean(1).argmax())
            chosen.append(TEMPERATURES[place])
            hits = best == wanted[valid]
            for kept, values in ((log_q, right[place]), (chance, wrong[place]), (tokens, best), (match, hits)):
                filled = torch.zeros(valid.shape, dtype=values.dtype)
                filled[valid] = values
                kept.append(filled)
        stacked = (torch.stack(x, -1) for x in (log_q, chance, tokens, match))
        return Score(*stacked, self.valid, tuple(chosen))

    def simulate(self, score: Score) -> Simulation:
        """Return the rounds that a decoder would have made with the arg-max drafts of a reading."""
        starts = self.batch.starts
        draft = Draft(score.tokens, starts.rows, starts.valid, self.batch.ids, "text")
        simulation = simulate(accept(draft, self.batch))
        if not isinstance(simulation, Simulation):
            raise DriftlabError("arg-max drafts make certain rounds")
        return simulation

    def _unroll(self, view: View) -> Iterator[tuple[int, tuple[Drafter, Tensor], Tensor]]:
        """Yield depth, drafter with its head's target ids, and what the head reads, fed the text."""
        drafter, ids, state = self._depth_one(view)
        yield 1, (drafter, ids), state.normed
        resid = state.feedback
        kv = [LayerKV(kv.k, kv.v) for kv in state.kv]
        starts = state.starts
        state = DraftState(kv, starts, 1, state.normed, state.normed if view.config.norm_output else resid)
        for depth in range(2, self.depth + 1):
            move(drafter, (1 - depth if view.frozen else 0) + view.gap)
            fed = text_at(self.batch, starts.rows + depth - 1 + min(view.token_shift, 1))
            state = drafter.next(state, fed)
            move(drafter, 0)
            yield depth, (drafter, ids), state.normed
            if view.config.norm_output:
                state = dataclasses.replace(state, feedback=state.normed)

    def _depth_one(self, view: View) -> tuple[Drafter, Tensor, DraftState]:
        """Return the drafter, its head's target ids and its state at depth 1, which readings that differ deeper alone share."""
        plain = dataclasses.replace(view.config, norm_output=False)
        key = dataclasses.replace(view, config=plain, gap=0, frozen=False)
        if key in self._first:
            self._first.move_to_end(key)
            return self._first[key]
        (drafter, ids), batch = build(self.stored, view, self.among), self.batch
        aux = _states(view, batch, self.stored)[:, :-1]
        if view.token_shift == 2:
            aux = torch.cat([aux[:, :1], aux[:, :-1]], 1)
        tokens = batch.tokens[:, :-1] if view.token_shift == 0 else batch.tokens[:, 1:]
        state = drafter.first(tokens, aux, batch.starts)
        self._first[key] = drafter, ids, state
        if len(self._first) > _KEPT:
            self._first.popitem(last=False)
        return self._first[key]


def cut(trajectory: Trajectory, indices: list[int], answer: int) -> Batch:
    """Read some sequences into one batch, answers cut to their first ``answer`` tokens; float32 states."""
    batch = trajectory.batch(indices)
    lengths = batch.lengths.minimum(batch.prompt_lengths + answer)
    ended = (lengths == batch.lengths).tolist()
    width = int(lengths.max())
    return dataclasses.replace(
        batch,
        tokens=batch.tokens[:, :width],
        aux=batch.aux[:, :width].float(),
        last_hidden=batch.last_hidden[:, :width].float(),
        lse=batch.lse[:, :width],
        lengths=lengths,
        finish=tuple(how if whole else "length" for how, whole in zip(batch.finish, ended, strict=True)),
    )


def candidates(batch: Batch, vocab: int, count: int, seed: int = 0) -> Int[Tensor, " candidate"]:
    """Return the tokens of the answers, and others drawn at random up to ``count`` in all; ascending target ids."""
    place = torch.arange(batch.tokens.shape[1])
    answer = (place >= batch.prompt_lengths[:, None]) & (place < batch.lengths[:, None])
    there = batch.tokens[answer].unique()
    drawn = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))
    others = drawn[~torch.isin(drawn, there)][: max(0, count - len(there))]
    return torch.cat([there, others]).sort().values


def part(batch: Batch, count: int) -> Batch:
    """Return the first ``count`` sequences of a batch."""
    width = int(batch.lengths[:count].max())
    values = {name: getattr(batch, name)[:count, :width] for name in ("tokens", "aux", "last_hidden", "lse")}
    values |= {name: getattr(batch, name)[:count] for name in ("lengths", "prompt_lengths", "ids", "finish")}
    return dataclasses.replace(batch, **values)


def _states(view: View, batch: Batch, stored: Stored) -> Float[Tensor, "batch pos aux d_target"]:
    """Return the target states as the view takes them."""
    wanted = view.config.aux_layers
    if wanted:
        lacking = sorted(set(wanted) - set(batch.aux_layers))
        if lacking:
            raise DriftlabError(f"the recording does not hold target states {lacking}")
        places = [batch.aux_layers.index(layer) for layer in wanted]
        return batch.aux[:, :, [places[i] for i in view.order] if view.order else places]
    state = batch.last_hidden
    if view.final_state != "normed":
        if stored.head is None:
            raise DriftlabError(
                "the final state before its norm is found by the gain of the target's norm: give a target"
            )
        gain = stored.head.norm_weight.float()
        if view.final_state == "raw":  # up to its size, which the head's own norm takes out
            state = torch.where(gain.abs() > 1e-6, state / gain, 0.0)
        else:
            state = gain * state * torch.rsqrt(state.square().mean(-1, keepdim=True) + view.config.rms_norm_eps)
    return state[:, :, None]


def _likelihood(
    drafter: Drafter, normed: Tensor, wanted: Tensor, ids: Tensor, vocab: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores [temperature row] of the wanted token and of one from elsewhere, and the arg max [row]."""
    if not bool(normed.isfinite().all()):
        raise DriftlabError("a state that the head reads is not finite")
    elsewhere = wanted.roll(len(wanted) // 2)
    place = torch.full((vocab,), -1, dtype=torch.long)
    size = len(ids)
    inside = (ids >= 0) & (ids < vocab)
    place[ids[inside]] = torch.arange(size)[inside]
    rights, wrongs, bests = [], [], []
    block = max(16, _BLOCK_BYTES // (4 * size))
    for rows, mine, other in zip(
        normed.split(block), place[wanted].split(block), place[elsewhere].split(block), strict=True
    ):
        logits = drafter.logits(rows)
        largest, best = logits.max(-1, keepdim=True)
        shifted = logits.sub_(largest)
        both = torch.stack([mine, other], -1)
        picked = shifted.gather(1, both.clamp(min=0))
        lse = _log_sums(shifted)
        scores = [
            _mixed(picked / t - total[:, None], both >= 0, vocab) for t, total in zip(TEMPERATURES, lse, strict=True)
        ]
        stacked = torch.stack(scores)
        rights.append(stacked[..., 0])
        wrongs.append(stacked[..., 1])
        bests.append(best[:, 0])
    best = torch.cat(bests)
    token = torch.where(inside[best], ids[best], -1)
    return torch.cat(rights, 1), torch.cat(wrongs, 1), token


def _log_sums(shifted: Tensor) -> list[Tensor]:
    """Return ln sum exp(x / T) for each temperature, of logits whose largest is 0; one exponential, then roots, in place."""
    p = shifted.exp_()
    sums = [2 * torch.linalg.vector_norm(p, dim=-1).log()]  # sum p^2: the square itself would lose what T = 4 needs
    for _ in TEMPERATURES[1:]:
        sums.append(p.sum(-1).log())
        p.sqrt_()
    return sums


def _mixed(log_q: Tensor, known: Tensor, vocab: int) -> Tensor:
    uniform = torch.full_like(log_q, math.log(FLOOR / vocab))
    return torch.where(known, torch.logaddexp(log_q + math.log1p(-FLOOR), uniform), uniform)
