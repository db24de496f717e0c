"""Two executors of one recursion: every answer row at once, and one chain token by token.

At row t and depth k the drafter is fed token t + k and predicts token t + k + 1. ``feed="text"`` feeds the recorded text
(replay and training), ``feed="own"`` the drafter's own tokens (deployed behaviour). As long as all drafts match the two
are the same, so greedy accept lengths do not depend on the feed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from driftlab.drafter import Drafter, DraftState
from driftlab.drafter.blocks import LayerKV
from driftlab.errors import DriftlabError
from driftlab.footprint import draft_bytes, refuse_beyond
from driftlab.fused import FusedChain, not_finite
from driftlab.kernels.backend import say_torch, wants_triton
from driftlab.progress import Progress, silent
from driftlab.recorded import Batch
from driftlab.sampling import Sampling, draw
from driftlab.segments import Starts, context_segments
from driftlab.stacking import Stack
from driftlab.trajectory import Trajectory

Feed = Literal["text", "own"]
LOGIT_BLOCK_BYTES = 64 * 2**20
_LOGITS = ("text", "top", "lse")
TIES = 8
"""ranks kept beyond those asked for, to see which logits are equal to the last one"""


@dataclass(frozen=True)
class DraftLogits:
    """The part of the draft logits that sampled acceptance needs: not [start depth vocab].

    ``text [batch start depth]``: logit of the text's token, -inf where the draft vocabulary lacks it; ``top [batch start
    depth rank]``: the largest logits, descending; ``lse [batch start depth temperature]``: ln sum exp(logits / temperature)
    over the draft vocabulary, for each of ``temperatures``; ``vocab``: size of the draft vocabulary.
    """

    text: Float[Tensor, "batch start depth"]
    top: Float[Tensor, "batch start depth rank"]
    lse: Float[Tensor, "batch start depth temperature"]
    temperatures: tuple[float, ...]
    vocab: int

    def map(self, function: Callable[[Tensor], Tensor]) -> DraftLogits:
        """Apply a function to each tensor."""
        parts = (function(self.text), function(self.top), function(self.lse))
        return DraftLogits(*parts, self.temperatures, self.vocab)

    def q(self, drafting: Sampling) -> Float[Tensor, "batch start depth"]:
        """Return the processed draft probability of the text's token, float64: what :meth:`Sampling.process` gives it.

        Any temperature with a ``top_k`` up to the number of ranks kept; over the whole draft vocabulary (``top_k`` 0) those
        whose log-sum-exp is kept; a ``top_p`` whose tokens are among the ranks kept.

        Raises:
            DriftlabError: a setting that what is kept does not determine.
        """
        temperature, top_k = drafting.temperature, min(drafting.top_k, self.vocab)
        text, top, ranks = self.text.double(), self.top.double(), self.top.shape[-1]
        if temperature == 0:
            raise DriftlabError('draft temperature 0 is the arg max: accept it with rule="argmax"')
        again = "draft again with all_starts(..., top=...)"
        if top_k > ranks:
            raise DriftlabError(f"draft top_k {top_k}: only the {ranks} largest draft logits are kept; {again}")
        if not top_k and temperature not in self.temperatures:
            raise DriftlabError(
                f"draft temperature {temperature} over the whole draft vocabulary: log-sum-exps are kept for "
                f"{list(self.temperatures)}; draft again with temperatures=({temperature},), or give a draft top_k"
            )
        kept = torch.ones_like(top, dtype=torch.bool)
        if top_k:
            # ties with the k-th are kept, as in process
            kept = top >= top[..., top_k - 1 : top_k]
            if ranks < self.vocab and bool(kept[..., -1].any()):
                raise DriftlabError(
                    f"draft top_k {top_k}: more logits are equal to the last one than are kept; {again}"
                )
            lse = (top / temperature).masked_fill(~kept, -torch.inf).logsumexp(-1)
        else:
            lse = self.lse[..., self.temperatures.index(temperature)].double()
        mass = torch.ones_like(lse)
        inside = text >= top[..., top_k - 1] if top_k else torch.ones_like(text, dtype=torch.bool)
        if drafting.top_p < 1:
            p = (top / temperature - lse[..., None]).exp().masked_fill(~kept, 0)
            within = (p.cumsum(-1) - p < drafting.top_p) & kept
            if not top_k and ranks < self.vocab and bool((p.sum(-1) < drafting.top_p).any()):
                raise DriftlabError(f"draft top_p {drafting.top_p}: it reaches beyond the {ranks} logits kept; {again}")
            # as likely as one that stays: as in process
            edge = top.masked_fill(~within, torch.inf).amin(-1)
            if ranks < self.vocab and bool((top[..., -1] >= edge).any()):
                raise DriftlabError(
                    f"draft top_p {drafting.top_p}: it reaches the last of the {ranks} logits kept; {again}"
                )
            mass = (p * (top >= edge[..., None])).sum(-1)
            inside &= text >= edge
        return torch.where(inside, (text / temperature - lse).exp() / mass, 0.0)


@dataclass(frozen=True)
class Draft:
    """What an executor drafted.

    ``tokens [batch start depth]``: target ids; ``rows [batch start]``: the row each chain started from;
    ``valid [batch start]``: False for padding; ``ids``: one per sequence; ``feed``: what was fed.
    """

    tokens: Int[Tensor, "batch start depth"]
    rows: Int[Tensor, "batch start"]
    valid: Bool[Tensor, "batch start"]
    ids: tuple[str, ...]
    feed: Feed
    digests: tuple[str, ...] = ()
    """hash of each sequence's tokens: what the draft was made for"""
    logits: DraftLogits | None = None
    """what the acceptance of sampled drafts is computed from, if it was asked for"""

    @property
    def depth(self) -> int:
        """Number of draft steps K."""
        return self.tokens.shape[2]

    def upto(self, depth: int) -> Draft:
        """Return the draft cut to its first ``depth`` tokens: what drafting only so deep would have given."""
        if not 1 <= depth <= self.depth:
            raise DriftlabError(f"depth {depth}: this draft is {self.depth} deep")
        logits = None if self.logits is None else self.logits.map(lambda x: x[:, :, :depth])
        return dataclasses.replace(self, tokens=self.tokens[..., :depth], logits=logits)


def unroll(
    drafter: Drafter, batch: Batch, depth: int, *, feed: Feed, deeper: Int[Tensor, " some"] | None = None
) -> Iterator[tuple[DraftState, Tensor | None]]:
    """Yield (state, drafted tokens) depth by depth for every answer row of a batch on the drafter's device.

    With ``feed="text"`` the tokens are None: call ``greedy_tokens(drafter, state.normed)`` if they are wanted. Gradients
    flow through the feedback unless the caller disables them. Past the end of the text the last token is fed; such
    depths are not valid for acceptance. ``deeper``: places on the start axis that go on beyond depth 1; default all.
    """
    if feed not in ("text", "own"):
        raise DriftlabError(f"feed {feed!r}: it is 'text' (the recorded text) or 'own' (the drafter's tokens)")
    starts = batch.starts
    drafter.hook_starts(starts, 0)
    state = drafter.first(batch.tokens[:, 1:], read_states(drafter, batch)[:, :-1], starts)
    while True:
        check_finite(state)
        drafted = greedy_tokens(drafter, state.normed) if feed == "own" else None
        yield state, drafted
        if state.depth >= depth:
            return
        if deeper is not None and state.depth == 1:
            state = state.pick(deeper)
            drafted = None if drafted is None else drafted[:, deeper]
        fed = text_at(batch, state.starts.rows + state.depth + 1) if drafted is None else drafted
        state = drafter.next(state, fed)


def check_finite(state: DraftState) -> None:
    """Raise DriftlabError if a state that is read is not finite: its arg max would be a token that looks like a draft."""
    bad = (~state.normed.isfinite()).any(-1) & state.starts.valid
    if bool(bad.any()):
        batch, start = bad.nonzero()[0].tolist()
        raise not_finite(state.starts.ids[batch], int(state.starts.rows[batch, start]), state.depth)


def text_at(batch: Batch, positions: Int[Tensor, "batch start"]) -> Int[Tensor, "batch start"]:
    """Token of the text at each position; past the end, the last token."""
    return batch.tokens.gather(1, positions.minimum(batch.lengths[:, None] - 1))


@torch.no_grad()
def greedy_tokens(drafter: Drafter, normed: Float[Tensor, "batch start d_model"]) -> Int[Tensor, "batch start"]:
    """Arg max over the draft vocabulary, as target ids; logits exist for a block of rows at a time."""
    flat = normed.flatten(0, 1)
    block = max(1, LOGIT_BLOCK_BYTES // (4 * drafter.config.draft_vocab_size))
    best = [drafter.logits(rows).max(-1) for rows in flat.split(block)]
    if bool(torch.cat([values for values, _ in best]).isnan().any()):
        raise DriftlabError("a draft logit is NaN, though the states are finite: look for NaN or inf in lm_head.weight")
    return drafter.to_target(torch.cat([ids for _, ids in best])).view(normed.shape[:2])


def _kept_logits(
    drafter: Drafter, normed: Tensor, wanted: Tensor, temperatures: Sequence[float], top: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Logit of the wanted token, the largest logits and the log-sum-exps, for a block of rows at a time."""
    vocab = drafter.draft_vocab
    place = torch.searchsorted(vocab, wanted.flatten()).clamp(max=len(vocab) - 1)
    inside = vocab[place] == wanted.flatten()
    block = max(1, LOGIT_BLOCK_BYTES // (4 * len(vocab)))
    texts, tops, lses = [], [], []
    for rows, ids, known in zip(
        normed.flatten(0, 1).split(block), place.split(block), inside.split(block), strict=True
    ):
        logits = drafter.logits(rows).float()
        texts.append(logits.gather(1, ids[:, None])[:, 0].masked_fill(~known, -torch.inf))
        tops.append(logits.topk(min(top + TIES, len(vocab))).values)
        largest = logits.amax(-1)  # subtracted: small temperatures make large numbers
        lses.append(
            torch.stack([((logits - largest[:, None]) / t).logsumexp(-1) + largest / t for t in temperatures], -1)
        )
    shape = normed.shape[:2]
    return tuple(torch.cat(parts).unflatten(0, shape) for parts in (texts, tops, lses))


@torch.no_grad()
def all_starts(
    drafter: Drafter,
    data: Trajectory | Batch,
    depth: int,
    *,
    feed: Feed = "text",
    temperatures: Sequence[float] = (),
    top: int = 32,
    max_tokens: int = 2048,
    backend: str | None = None,
    progress: Progress = silent,
) -> Draft:
    """Draft ``depth`` tokens from every row of the answers, t >= P - 1, one pass per depth.

    Args:
        drafter: on any device; batches are moved to it.
        data: a trajectory (read in batches of at most ``max_tokens`` padded tokens) or one batch.
        depth: K >= 1.
        feed: "text" for replay, "own" for probes of deployed behaviour.
        temperatures: keep what sampled drafts at these draft temperatures are accepted by (see :class:`DraftLogits`);
            none: arg-max drafts only.
        top: largest logits kept with it; any draft temperature is exact for a draft top_k up to so many.
        max_tokens: size of a batch; results do not depend on it beyond rounding.
        backend: "auto" (the Triton attention kernel on CUDA), "torch", "triton"; default what ``drafter.using`` has set,
            else "auto". Results do not depend on it beyond rounding.
        progress: called with ("drafting", done, sequences x K), before the first depth of all and after each depth of a batch.

    Raises:
        DriftlabError: drafter and data do not fit, no sequence, settings that cannot be kept, a state that is not finite, or
            more than memory can hold, with an estimate.
    """
    check_depth(depth)
    check_fits(drafter, data)
    if not len(data):
        raise DriftlabError("there is no sequence to draft for")
    temperatures = tuple(temperatures)
    if temperatures and (feed != "text" or top < 1 or not min(temperatures) > 0):
        raise DriftlabError(
            f'temperatures {list(temperatures)} (above 0) with top {top} (at least 1) are kept along the text: feed="text"'
        )
    device, dtype = drafter.device, drafter.dtype
    stack, ids, digests = Stack(len(data), most_starts(data)), [], []
    _refuse_too_large(drafter, data, depth, top if temperatures else 0, len(temperatures))
    done, total = 0, depth * len(data)
    progress("drafting", done, total)
    for batch in [data] if isinstance(data, Batch) else data.batches(max_tokens):
        batch = batch.to(device, dtype)
        tokens, kept = [], []
        with drafter.using(backend):
            for state, drafted in unroll(drafter, batch, depth, feed=feed):
                tokens.append(greedy_tokens(drafter, state.normed) if drafted is None else drafted)
                if temperatures:
                    wanted = text_at(batch, state.starts.rows + state.depth + 1)
                    kept.append(_kept_logits(drafter, state.normed, wanted, temperatures, top))
                done += len(batch)
                progress("drafting", done, total)
        starts = batch.starts
        ids += batch.ids
        digests += [text_digest(row[:n]) for row, n in zip(batch.tokens.cpu(), batch.lengths.tolist(), strict=True)]
        parts = {"tokens": torch.stack(tokens, -1), "rows": starts.rows, "valid": starts.valid}
        parts |= {name: torch.stack(part, 2) for name, part in zip(_LOGITS, zip(*kept, strict=True), strict=bool(kept))}
        stack.add(parts, dict.fromkeys(_LOGITS, math.nan))
    tables = stack.whole()
    logits = None
    if temperatures:
        held = (tables.pop(name) for name in _LOGITS)
        logits = DraftLogits(*held, tuple(float(t) for t in temperatures), drafter.config.draft_vocab_size)
    return Draft(**tables, ids=tuple(ids), feed=feed, digests=tuple(digests), logits=logits)


def _refuse_too_large(drafter: Drafter, data: Trajectory | Batch, depth: int, top: int, temperatures: int) -> None:
    """Raise DriftlabError if what is drafted, or one sequence's own keys, cannot be held."""
    config, starts = drafter.config, most_starts(data)
    ranks = min(top + TIES, config.draft_vocab_size) if temperatures else 0
    sampled = {"depth": depth, "ranks": ranks, "temperatures": temperatures} if temperatures else {}
    needed = draft_bytes(len(data), starts, depth, **sampled)
    what = f"drafting {depth} tokens from up to {starts} rows of {len(data)} sequences"
    refuse_beyond(
        needed, what, "draft subset(...)s of the recording one after the other, or fewer depths or ranks (top)"
    )
    if config.latent is not None:
        return
    keys = 2 * config.num_key_value_heads * config.head_dim * drafter.dtype.itemsize
    needed = starts * (depth - 1) * config.num_hidden_layers * keys
    refuse_beyond(
        needed, f"the keys of chains of {depth} tokens from {starts} rows", "draft fewer depths", drafter.device
    )


def most_starts(data: Trajectory | Batch) -> int:
    """The most answer rows that one sequence has, at least 1: the length of the start axis."""
    if isinstance(data, Batch):
        return max(int((data.lengths - data.prompt_lengths).max()), 1)
    return max(1, *(entry.length - entry.prompt_length for entry in data.entries))


class Chain:
    """One chain at a time, as deployed: context keys grow with verified rows, drafted keys are thrown away.

    Works on a batch of sequences of equal length so far. ``extend`` adds rows made from target states and drafts the
    first token; ``draft`` continues it to depth K on the drafter's own feedback. ``backend``: "torch"; "triton" drafts by the
    fused step kernels, as far as they can honour the drafter and its hooks (where not, a BackendWarning says why); "auto":
    triton on CUDA; default what ``drafter.using`` has set at each call, else "auto".
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        prompt_lengths: Sequence[int],
        sinks: Sequence[int] = (0,),
        ids: Sequence[str] | None = None,
        backend: str | None = None,
    ) -> None:
        self.drafter = drafter
        self.backend = backend
        self._fused = FusedChain(drafter)
        self._wants_kernels()
        self._ids = ("",) * len(prompt_lengths) if ids is None else tuple(ids)
        self.rows = 0
        self._prompt_lengths = torch.tensor(prompt_lengths, device=drafter.device)
        self._sinks = tuple(sinks)
        self._context: list[LayerKV] | None = None
        self._state: DraftState | None = None

    @torch.no_grad()
    def extend(
        self,
        tokens: Int[Tensor, "batch row"],
        aux: Float[Tensor, "batch row aux d_target"],
        rows: Int[Tensor, " batch"] | None = None,
    ) -> None:
        """Append context rows. ``tokens[:, i]`` is the token after the position whose states are ``aux[:, i]``.

        ``rows``: absolute row that each chain starts from, among the new ones; default the last.
        """
        total = self.rows + tokens.shape[1]
        self._check(tokens, aux, rows, total)
        rows = torch.full_like(tokens[:, 0], total - 1) if rows is None else rows
        starts = Starts(
            rows=rows[:, None],
            valid=torch.ones_like(rows[:, None], dtype=torch.bool),
            segments=context_segments(self._prompt_lengths, total, self._sinks),
            ids=self._ids,
        )
        self.drafter.hook_starts(starts, 0)
        with self.drafter.using(self.backend):
            fused = self._fused.fuse(aux) if self._wants_kernels() else None
            self._state = self.drafter.first(tokens, aux, starts, self._context, fused)
        self._context = [LayerKV(kv.k, kv.v) for kv in self._state.kv]
        self.rows = total

    def _check(self, tokens: Tensor, aux: Tensor, rows: Tensor | None, total: int) -> None:
        batch, config = len(self._prompt_lengths), self.drafter.config
        wanted = (batch, tokens.shape[1], config.states_read, config.target_hidden_size)
        if len(tokens) != batch or tokens.shape[1] == 0 or tuple(aux.shape) != wanted:
            raise DriftlabError(
                f"tokens {list(tokens.shape)} and target states {list(aux.shape)}: the drafter reads [batch row aux d_target] "
                f"with {batch} sequences (prompt_lengths), at least one row, {config.states_read} states of width "
                f"{config.target_hidden_size}"
            )
        if rows is not None and (len(rows) != batch or bool((rows < self.rows).any()) or bool((rows >= total).any())):
            raise DriftlabError(
                f"rows {rows.tolist()}: one of the new rows {self.rows}..{total - 1} for each of {batch} sequences"
            )

    @torch.no_grad()
    def draft(self, depth: int) -> Int[Tensor, "batch depth"]:
        """Draft the ``depth`` most probable tokens (target ids), one after the other, after the last ``extend``."""
        check_depth(depth)
        state = self.take()
        if self._by_kernels(state):
            return self._fused.draft(state, depth)
        with self.drafter.using(self.backend):
            return self._by_modules(state, depth, lambda step, normed: greedy_tokens(self.drafter, normed))

    @torch.no_grad()
    def sample(
        self, depth: int, drafting: Sampling, uniforms: Float[Tensor, "batch depth"]
    ) -> tuple[Int[Tensor, "batch depth"], Float[Tensor, "batch depth draft_vocab"]]:
        """Draft ``depth`` tokens drawn by chance; return them (target ids) and the processed q that each was drawn from.

        ``uniforms`` in [0, 1): a token is where the cumulative distribution over the draft ids passes its number. q is float64;
        the kernels sum it in float32, so where a number lies within rounding of a step they may take the neighbour.

        Raises:
            DriftlabError: a temperature of 0: that is :meth:`draft`.
        """
        check_depth(depth)
        if drafting.temperature == 0:
            raise DriftlabError("draft temperature 0 is the arg max, for which no number is drawn: call draft()")
        state = self.take()
        if tuple(uniforms.shape) != (len(state.starts.rows), depth) or bool(((uniforms < 0) | (uniforms >= 1)).any()):
            raise DriftlabError(
                f"uniforms {list(uniforms.shape)}: one number in [0, 1) for each token is wanted, "
                f"[{len(state.starts.rows)}, {depth}]"
            )
        cut = "top_k or top_p cuts the draft distribution" if drafting.top_k or drafting.top_p < 1 else ""
        if self._by_kernels(state, cut):
            tokens, logits = self._fused.sample(state, depth, drafting.temperature, uniforms)
            return tokens, torch.stack([drafting.process(x.double()) for x in logits.unbind(1)], 1)
        kept: list[Tensor] = []

        def drawn(step: int, normed: Tensor) -> Tensor:
            kept.append(drafting.process(self.drafter.logits(normed[:, 0]).double()))
            return self.drafter.to_target(draw(kept[-1], uniforms[:, step].to(normed.device))[:, None])

        with self.drafter.using(self.backend):
            return self._by_modules(state, depth, drawn), torch.stack(kept, 1)

    def _wants_kernels(self) -> bool:
        return wants_triton(self.backend or self.drafter.backend, self.drafter.device)

    def _by_kernels(self, state: DraftState, why: str = "") -> bool:
        """Whether the fused step drafts; where it was asked for and cannot, say why."""
        if not self._wants_kernels():
            return False
        why = why or self._fused.refuses(state)
        if why:
            say_torch("a chain's step", why)
        return not why

    def _by_modules(self, state: DraftState, depth: int, choose: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Draft by the modules; ``choose(step, normed [batch 1 d_model])`` gives the token [batch 1] of step 0..depth-1."""
        tokens: list[Tensor] = []
        while True:
            check_finite(state)
            tokens.append(choose(len(tokens), state.normed))
            if len(tokens) == depth:
                return torch.cat(tokens, 1)
            state = self.drafter.next(state, tokens[-1])

    def take(self) -> DraftState:
        """Return the state at depth 1 after the last ``extend``, for one draft: its own keys grow in place.

        Raises:
            DriftlabError: when it was taken already, or nothing was extended.
        """
        if self._state is None:
            raise DriftlabError("extend() the chain with context rows before drafting")
        state, self._state = self._state, None
        return state


def chain(
    drafter: Drafter, batch: Batch, rows: Sequence[int] | Tensor, depth: int, *, backend: str | None = None
) -> Int[Tensor, "batch depth"]:
    """Draft one chain per sequence, from row ``rows[b]``, token by token. Equals ``all_starts(feed="own")`` there.

    ``backend``: see :class:`Chain`.
    """
    check_fits(drafter, batch)
    batch = batch.to(drafter.device, drafter.dtype)
    rows = torch.as_tensor(rows, device=batch.tokens.device)
    if len(rows) != len(batch):
        raise DriftlabError(f"rows {rows.tolist()}: give one row for each of the {len(batch)} sequences")
    if bool((rows < 0).any()) or bool((rows > batch.lengths - 2).any()):
        raise DriftlabError(f"rows {rows.tolist()}: row t needs token t + 1, so 0 <= t <= length - 2")
    last = int(rows.max()) + 1
    session = Chain(
        drafter, prompt_lengths=batch.prompt_lengths.tolist(), sinks=batch.sinks, ids=batch.ids, backend=backend
    )
    session.extend(batch.tokens[:, 1 : last + 1], read_states(drafter, batch)[:, :last], rows)
    return session.draft(depth)


def text_digest(tokens: Int[Tensor, " pos"]) -> str:
    """Return a short hash of a text's tokens."""
    return hashlib.sha256(tokens.long().cpu().numpy().tobytes()).hexdigest()[:16]


def check_depth(depth: int) -> None:
    """Raise DriftlabError unless depth >= 1."""
    if depth < 1:
        raise DriftlabError(f"depth {depth}: a draft has at least one token")


def check_fits(drafter: Drafter, data: Trajectory | Batch) -> None:
    """Raise DriftlabError if the recorded states are not, or do not hold, those that the drafter takes."""
    config = drafter.config
    wanted, held = config.aux_layers, tuple(data.aux_layers)
    if held and not set(wanted) <= set(held):
        raise DriftlabError(
            f"the drafter reads target states {list(wanted)}, the recording holds {list(held)}: record with "
            f"aux_layers={list(wanted)}, or with those of several drafters for all of them"
        )
    if isinstance(data, Trajectory):
        aux, width = len(held), data.spec.hidden_size
        if data.spec.vocab_size != config.vocab_size:
            raise DriftlabError(
                f"the drafter is for a vocabulary of {config.vocab_size} tokens, the recorded target has "
                f"{data.spec.vocab_size}"
            )
    else:
        aux, width = data.aux.shape[2:]
    few = bool(wanted) and not held and aux != len(wanted)
    if few or width != config.target_hidden_size:
        raise DriftlabError(
            f"the drafter's fc.weight takes {len(wanted)} states of width {config.target_hidden_size}, the "
            f"recording has {aux} of width {width}"
        )


def read_states(drafter: Drafter, batch: Batch) -> Float[Tensor, "batch pos aux d_target"]:
    """Return the target states that the drafter reads: its aux layers of those recorded, or the final one after its norm."""
    wanted, held = drafter.config.aux_layers, tuple(batch.aux_layers)
    if not wanted:
        return batch.last_hidden[:, :, None]
    if not held or held == wanted:
        return batch.aux
    return batch.aux[:, :, [held.index(layer) for layer in wanted]]
