r"""Which drafted tokens the target accepts, at every start and depth, given the recorded text.

Two ways to draft, with the verifier's one rule (accept a draft x with probability min(1, p(x) / q(x)), else draw from the
positive part of p - q; p and q processed):

    argmax      q is one-hot. A draft is accepted iff the text's token is the draft, greedy text or sampled.
    rejection   drafts are sampled from q. The joint probability of "the output is y and it was an accepted draft" is
                min(p(y), q(y)), that of "the output is y" is p(y); hence

                    P(accept | output y) = min(1, q(y) / p(y)),

                exact for each depth given that all earlier drafts were accepted (they then are the text).

A start at row t drafts tokens t + 2, t + 3, ...; depth k is comparable while t + k + 1 is at most the last answer token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from driftlab.draft import Draft, text_digest
from driftlab.errors import DriftlabError
from driftlab.sampling import Sampling
from driftlab.trajectory import Batch, Trajectory

RULES = ("argmax", "rejection")
_BLOCK_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Acceptance:
    """``match [batch start depth]``: arg-max draft equals text (False where not ``valid``). ``remaining [batch start]``:
    text tokens after the one that the start already has. ``finish``: "stop" or "length", one per sequence. ``sampled``: see
    :attr:`probability`; None for arg-max drafts. ``drafting``: the draft's temperature and top_k.
    """

    match: Bool[Tensor, "batch start depth"]
    valid: Bool[Tensor, "batch start depth"]
    remaining: Int[Tensor, "batch start"]
    rows: Int[Tensor, "batch start"]
    ids: tuple[str, ...]
    categories: tuple[str, ...]
    finish: tuple[str, ...]
    rule: str = "argmax"
    sampled: Float[Tensor, "batch start depth"] | None = None
    drafting: tuple[float, int] = (0.0, 0)

    @property
    def depth(self) -> int:
        """Number of draft steps K."""
        return self.match.shape[2]

    @property
    def probability(self) -> Float[Tensor, "batch start depth"]:
        """Of accepting the text's token, given that all drafts before it were accepted: 0 or 1 for arg-max drafts."""
        return self.match.double() if self.sampled is None else self.sampled

    @property
    def accept_length(self) -> Tensor:
        """Accepted draft tokens, 0..K, of a round at each start; without the bonus token. [batch start]

        Integers for arg-max drafts, expectations (float64) for sampled ones.
        """
        if self.rule == "argmax":
            return self.match.long().cumprod(-1).sum(-1)
        return self.probability.cumprod(-1).sum(-1)

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield tidy rows: per prompt and depth, over all starts, the share at which the arg-max draft equals the text, and,
        for sampled drafts, the mean probability of accepting the text's token.
        """
        matches, starts = self.match.sum(1).tolist(), self.valid.sum(1).tolist()
        sampled = self.probability.sum(1).tolist() if self.rule == "rejection" else None
        for i, (name, category) in enumerate(zip(self.ids, self.categories, strict=True)):
            for k in range(self.depth):
                at = {"prompt": name, "category": category, "depth": k + 1, "quantity": "match"}
                yield {**at, **share(matches[i][k], starts[i][k])}
                if sampled is not None:
                    yield {**at, "quantity": "accept_all_starts", **share(sampled[i][k], starts[i][k])}


def accept(
    draft: Draft,
    data: Trajectory | Batch,
    *,
    rule: str = "argmax",
    draft_temperature: float | None = None,
    draft_top_k: int = 0,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Acceptance:
    """Compare drafts with the text they were made for.

    Args:
        draft: of ``data``; for ``rule="rejection"`` made by ``all_starts(..., temperatures=...)``.
        data: a recording; one batch of it will do for arg-max drafts.
        rule: "argmax" or "rejection" (sampled drafts): see the module.
        draft_temperature: of sampled drafts; default the text's own temperature.
        draft_top_k: cut of the draft distribution; 0: none.
        temperature: the target's, and likewise ``top_k`` and ``top_p``: the text was made with the recording's settings
            and with no others, so these can only confirm them.
        top_k: see ``temperature``.
        top_p: see ``temperature``.

    Raises:
        DriftlabError: when ``data`` holds other sequences than the draft, a target setting that is not the recording's, or a
            draft without what the rule needs.
    """
    if rule not in RULES:
        raise DriftlabError(f"rule {rule!r}: choose from {', '.join(RULES)}")
    if isinstance(data, Trajectory):
        _refuse_other_settings(data, {"temperature": temperature, "top_k": top_k, "top_p": top_p})
    if rule == "argmax" and (draft_temperature or draft_top_k):
        raise DriftlabError('draft_temperature and draft_top_k belong to sampled drafts: rule="rejection"')
    ids, lengths, prompts, finish, categories, texts = _texts(data)
    if ids != draft.ids:
        raise DriftlabError("the draft was made for other sequences than this recording's (or in another order)")
    if draft.digests and draft.digests != tuple(text_digest(text) for text in texts):
        raise DriftlabError(
            "the draft was made for other texts than this recording's, though the prompts have the same names"
        )
    longest = max(lengths)
    tokens = torch.full((len(ids), longest + draft.depth + 2), -1, dtype=torch.long)
    for index, text in enumerate(texts):
        tokens[index, : len(text)] = text
    offsets = torch.arange(2, draft.depth + 2)
    positions = draft.rows[..., None] + offsets
    actual = tokens.gather(1, positions.flatten(1)).view(positions.shape)
    last = torch.tensor(lengths)[:, None] - 1
    valid = draft.valid[..., None] & (positions <= last[..., None])
    if not torch.equal(draft.rows[:, 0], torch.tensor(prompts) - 1):
        raise DriftlabError("the draft's first rows are not the answers' first rows: replay needs every answer row")
    match = (draft.tokens == actual) & valid
    sampled, drafting = None, (0.0, 0)
    if rule == "rejection":
        drafting = _drafting(draft, data, draft_temperature, draft_top_k)
        sampled = _sampled(draft, data, drafting).masked_fill(~valid, 0)
    return Acceptance(
        match=match,
        valid=valid,
        sampled=sampled,
        rule=rule,
        drafting=drafting,
        remaining=torch.where(draft.valid, last - 1 - draft.rows, 0),
        rows=draft.rows,
        ids=ids,
        categories=categories,
        finish=finish,
    )


def _refuse_other_settings(data: Trajectory, asked: dict[str, Any]) -> None:
    for name, value in asked.items():
        there = data.settings[name]
        if value is not None and value != there:
            raise DriftlabError(
                f"target {name} {value}: this text was recorded with {name} {there}, and another setting would have made "
                f"another text: record with {name}={value}"
            )


def _drafting(draft: Draft, data: Trajectory | Batch, temperature: float | None, top_k: int) -> tuple[float, int]:
    if draft.logits is None:
        raise DriftlabError(
            'rule="rejection" needs draft logits: all_starts(drafter, trajectory, depth, temperatures=(1.0,)), with the draft '
            "temperatures that you want"
        )
    if isinstance(data, Batch):
        raise DriftlabError(
            'rule="rejection" needs the recording, which knows how its text was sampled: pass the trajectory'
        )
    if data.settings["answers"] != "target":
        raise DriftlabError(
            "these answers were given, not sampled from the target: how probable an accepted draft is, given the text, does "
            "not follow from them. Record without answers="
        )
    if temperature is None:
        temperature = float(data.settings["temperature"])
        if temperature == 0:
            raise DriftlabError("the text is greedy: say at which draft_temperature drafts are sampled")
    return temperature, top_k


def _sampled(draft: Draft, data: Trajectory, drafting: tuple[float, int]) -> Tensor:
    """min(1, q / p) of the text's tokens, [batch start depth]; float64."""
    q = draft.logits.q(*drafting)
    p = torch.ones(len(data), draft.rows.shape[1] + draft.depth + 1, dtype=torch.float64)
    for index in range(len(data)):
        row = text_probability(data, index)
        p[index, : len(row)] = row
    # start j at depth k is judged by row P - 1 + j + k
    place = torch.arange(draft.rows.shape[1])[:, None] + torch.arange(1, draft.depth + 1)
    return (q / p[:, place]).clamp(max=1)


@torch.no_grad()
def text_probability(trajectory: Trajectory, index: int) -> Float[Tensor, " row"]:
    """Return the processed probability with which each answer token of a sequence was chosen; float64, in row order P - 1...

    Computed once per sequence from the recorded last hidden state; logits exist for a block of rows at a time. A token at
    the very edge of a cut, which rounding puts outside, counts as inside: it was chosen.
    """
    entry = trajectory.entries[index]
    key = f"p {entry.piece} {entry.offset}"
    if key not in trajectory._opened:
        settings, sequence, head = trajectory.settings, trajectory[index], trajectory.head
        sampling = Sampling(settings["temperature"], settings["top_k"], settings["top_p"])
        rows = slice(entry.prompt_length - 1, entry.length - 1)
        hidden, chosen = sequence.last_hidden[rows], sequence.tokens[entry.prompt_length :]
        block = max(1, _BLOCK_BYTES // (8 * trajectory.spec.vocab_size))
        parts = []
        for states, tokens in zip(hidden.split(block), chosen.split(block), strict=True):
            logits = head.logits(states).double()
            parts.append(sampling.process(logits).gather(1, tokens[:, None])[:, 0])
        p = torch.cat(parts)
        trajectory._opened[key] = torch.where(p > 0, p, 1.0)
    return trajectory._opened[key]


def _texts(
    data: Trajectory | Batch,
) -> tuple[tuple[str, ...], list[int], list[int], tuple[str, ...], tuple[str, ...], list[Tensor]]:
    if isinstance(data, Batch):
        lengths = data.lengths.tolist()
        texts = [row[:length].cpu() for row, length in zip(data.tokens, lengths, strict=True)]
        return data.ids, lengths, data.prompt_lengths.tolist(), data.finish, ("",) * len(data), texts
    entries = data.entries
    return (
        tuple(e.id for e in entries),
        [e.length for e in entries],
        [e.prompt_length for e in entries],
        tuple(e.finish for e in entries),
        tuple(e.category for e in entries),
        [data.tokens(index) for index in range(len(entries))],
    )


def share(count: int | float, of: int | float) -> dict[str, Any]:
    """Return ``value`` and ``n`` of a row that says what share of ``of`` something holds for; NaN of none."""
    return {"value": count / of if of else float("nan"), "n": of}
