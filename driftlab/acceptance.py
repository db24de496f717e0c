r"""Which drafted tokens the target accepts, at every start and depth, given the recorded text.

Arg-max drafts are accepted iff they are the text, greedy or sampled, whatever the verifier's rule. Sampled drafts are
accepted with a probability that the text determines, rule by rule (:mod:`driftlab.rules`). Rejection sampling: the joint
probability of "the output is y and it was an accepted draft" is min(p(y), q(y)), that of "the output is y" is p(y); hence

    P(accept | output y) = min(1, q(y) / p(y)),

exact for each depth given that all earlier drafts were accepted (they then are the text).

A start at row t drafts tokens t + 2, t + 3, ...; depth k is comparable while t + k + 1 is at most the last answer token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from driftlab.draft import Draft, text_digest
from driftlab.errors import DriftlabError
from driftlab.probability import text_probabilities
from driftlab.recorded import Batch
from driftlab.rules import RULES, SAMPLED_RULES, given_text
from driftlab.sampling import Sampling
from driftlab.trajectory import Trajectory
from driftlab.trees import SampledTree, Tree, TreeDraft

_BLOCK_BYTES = 16 * 2**20
_NODES = ("tokens", "parents", "depths", "rows", "valid")


@dataclass(frozen=True)
class Acceptance:
    """``match [batch start depth]``: arg-max draft equals text (False where not ``valid``). ``remaining [batch start]``:
    text tokens after the one that the start already has. ``finish``: "stop" or "length", one per sequence. ``sampled``: see
    :attr:`probability`, and ``drafting``: how drafts are sampled; both None for arg-max drafts. ``digests``: of the texts.
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
    drafting: Sampling | None = None
    digests: tuple[str, ...] = ()
    tree: Tree | SampledTree | None = None
    """of tree drafts, whose ``match`` at depth k says that a path of nodes follows the text so far"""
    feed: str = "text"
    """what the drafts were fed; with their own tokens, a depth behind the first miss is judged against another text"""

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
        if self.sampled is None:
            return self.match.cumprod(-1, dtype=torch.uint8).sum(-1)
        return self.probability.cumprod(-1).sum(-1)

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield tidy rows: per prompt and depth, over all starts, the share at which the arg-max draft equals the text, and,
        for sampled drafts, the mean probability of accepting the text's token.
        """
        # a position of a tree has no rate (Spec-Bench#8); match is text-fed
        if self.tree is not None or self.feed != "text":
            return
        matches, starts = self.match.sum(1).tolist(), self.valid.sum(1).tolist()
        sampled = None if self.sampled is None else self.sampled.sum(1).tolist()
        for i, (name, category) in enumerate(zip(self.ids, self.categories, strict=True)):
            for k in range(self.depth):
                at = {"prompt": name, "category": category, "depth": k + 1, "quantity": "match"}
                yield {**at, **share(matches[i][k], starts[i][k])}
                if sampled is not None:
                    yield {**at, "quantity": "accept_all_starts", **share(sampled[i][k], starts[i][k])}


def accept(
    draft: Draft | TreeDraft,
    data: Trajectory | Batch,
    *,
    rule: str = "argmax",
    draft_temperature: float | None = None,
    draft_top_k: int | None = None,
    draft_top_p: float | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Acceptance:
    """Compare drafts with the text they were made for.

    Args:
        draft: of ``data``, chains or trees; for sampled drafts made by ``all_starts(..., temperatures=...)``.
        data: a recording; one batch of it will do for arg-max drafts.
        rule: "argmax" drafts, or the rule that sampled drafts are verified by: "rejection", "block", "exact", "q1".
        draft_temperature: of sampled drafts, and likewise ``draft_top_k`` (0: off) and ``draft_top_p`` (1: off); default the
            text's own, as engines do.
        draft_top_k: see ``draft_temperature``.
        draft_top_p: see ``draft_temperature``.
        temperature: the target's, and likewise ``top_k`` and ``top_p``: the text was made with the recording's settings
            and with no others, so these can only confirm them.
        top_k: see ``temperature``.
        top_p: see ``temperature``.

    Raises:
        DriftlabError: when ``data`` holds other sequences than the draft, a target setting that is not the recording's, or a
            draft without what the rule needs.
    """
    drafting = drafting_of(data, rule, draft_temperature, draft_top_k, draft_top_p)
    _refuse_other_settings(data, {"temperature": temperature, "top_k": top_k, "top_p": top_p})
    ids, lengths, prompts, finish, categories, texts = _texts(data)
    if ids != draft.ids:
        raise DriftlabError("the draft was made for other sequences than this recording's (or in another order)")
    digests = tuple(text_digest(text) for text in texts)
    if draft.digests and draft.digests != digests:
        raise DriftlabError(
            "the draft was made for other texts than this recording's, though the prompts have the same names"
        )
    if not torch.equal(draft.rows[:, 0], torch.tensor(prompts) - 1):
        raise DriftlabError("the draft's first rows are not the answers' first rows: replay needs every answer row")
    tree = draft.tree if isinstance(draft, TreeDraft) else None
    if tree is not None and rule != "argmax":
        raise DriftlabError(
            f'rule {rule!r}: a tree\'s children are not drawn by chance; they are accepted by rule="argmax". For children that '
            "are: SampledTree and accept_siblings in driftlab.siblings"
        )
    match, valid = _compared(draft, texts)
    sampled = None if drafting is None else _sampled(draft, data, rule, drafting, valid)
    last = torch.tensor(lengths)[:, None] - 1
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
        digests=digests,
        tree=tree,
        feed="own" if isinstance(draft, TreeDraft) else draft.feed,
    )


def drafting_of(
    data: Trajectory | Batch,
    rule: str,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Sampling | None:
    """Return how drafts are sampled for a recording's text, None for arg-max drafts; what is not given is the recording's.

    Raises:
        DriftlabError: no such rule, settings that it does not have, or a text that it says nothing about.
    """
    if isinstance(data, Batch):
        if rule in SAMPLED_RULES:
            raise DriftlabError(
                f'rule="{rule}" needs the recording, which knows how its text was sampled: pass the trajectory'
            )
        return drafting_for(rule, Sampling(), temperature, top_k, top_p)
    there = data.settings
    if rule in SAMPLED_RULES and there["answers"] == "given":
        raise DriftlabError(
            "these answers were given, not sampled from the target: how probable an accepted draft is, given the text, does "
            "not follow from them. Record without answers="
        )
    made = Sampling(float(there["temperature"]), there["top_k"], float(there["top_p"]))
    return drafting_for(rule, made, temperature, top_k, top_p)


def drafting_for(
    rule: str, target: Sampling, temperature: float | None, top_k: int | None, top_p: float | None
) -> Sampling | None:
    """Return how drafts are sampled, None for arg-max drafts; what is not given is the target's.

    Raises:
        DriftlabError: no such rule, settings that it does not have, or a temperature of 0.
    """
    if rule == "typical":
        raise DriftlabError(
            "typical acceptance changes the text, so a recording says nothing about it: run it with speculate()"
        )
    if rule not in RULES:
        raise DriftlabError(f"rule {rule!r}: choose from {', '.join(RULES)}")
    if rule == "argmax":
        if any(value is not None for value in (temperature, top_k, top_p)):
            raise DriftlabError(
                f"draft_temperature, draft_top_k and draft_top_p belong to sampled drafts: rule = {', '.join(SAMPLED_RULES)}"
            )
        return None
    if target.temperature == 0:  # greedy: its cuts, if it has any, say nothing
        target = Sampling()
    chosen = Sampling(
        float(target.temperature if temperature is None else temperature),
        target.top_k if top_k is None else top_k,
        float(target.top_p if top_p is None else top_p),
    )
    if chosen.temperature == 0:
        said = "draft_temperature 0 is the arg max" if temperature == 0 else "the text is greedy"
        raise DriftlabError(f'{said}: say at which draft_temperature above 0 drafts are sampled, or rule="argmax"')
    return chosen


def _refuse_other_settings(data: Trajectory | Batch, asked: dict[str, Any]) -> None:
    for name, value in asked.items():
        if value is None:
            continue
        if isinstance(data, Batch):
            raise DriftlabError(
                f"target {name} {value}: a batch does not know how its text was made; pass the trajectory"
            )
        there = data.settings[name]
        if value != there:
            raise DriftlabError(
                f"target {name} {value}: this text was recorded with {name} {there}, and another setting would have made "
                f"another text: record with {name}={value}"
            )


def _compared(draft: Draft | TreeDraft, texts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Whether each draft is the text, and whether there is a text to compare it with; both [batch start depth]."""
    match = torch.zeros(*draft.rows.shape, draft.depth, dtype=torch.bool)
    valid = torch.zeros_like(match)
    reach, offsets = draft.depth + 2, torch.arange(2, draft.depth + 2)
    for span in _spans(match):
        positions = draft.rows[span, :, None] + offsets
        tokens = torch.full((len(positions), max(len(text) for text in texts[span]) + reach), -1, dtype=torch.long)
        for row, text in zip(tokens, texts[span], strict=True):
            row[: len(text)] = text
        lengths = torch.tensor([len(text) for text in texts[span]])
        actual = tokens.gather(1, positions.flatten(1)).view(positions.shape)
        valid[span] = draft.valid[span, :, None] & (positions < lengths[:, None, None])
        if isinstance(draft, TreeDraft):
            here = dataclasses.replace(draft, **{name: getattr(draft, name)[span] for name in _NODES})
            match[span] = (torch.arange(draft.depth) < here.accept_length(actual)[..., None]) & valid[span]
        else:
            match[span] = (draft.tokens[span] == actual) & valid[span]
    return match, valid


def _spans(table: Tensor) -> list[slice]:
    """Runs of sequences whose part of a table [batch start depth] of 8-byte numbers is a block."""
    size = max(1, _BLOCK_BYTES // (8 * max(1, table[0].numel())))
    return [slice(first, first + size) for first in range(0, len(table), size)]


def _sampled(draft: Draft, data: Trajectory, rule: str, drafting: Sampling, valid: Tensor) -> Tensor:
    """Probability of accepting the text's tokens, [batch start depth]; float64, 0 where there is none."""
    if draft.logits is None:
        raise DriftlabError(
            f'rule="{rule}" needs draft logits: all_starts(drafter, trajectory, depth, '
            f"temperatures=({drafting.temperature},))"
        )
    # start j at depth k is judged by row P - 1 + j + k
    place = torch.arange(draft.rows.shape[1])[:, None] + torch.arange(1, draft.depth + 1)
    known, accepted = text_probabilities(data), torch.zeros(valid.shape, dtype=torch.float64)
    for span in _spans(draft.logits.top.flatten(2)):
        q = draft.logits.map(lambda x, span=span: x[span]).q(drafting)
        p = torch.ones(len(q), draft.rows.shape[1] + draft.depth + 1, dtype=torch.float64)
        for row, there in zip(p, known[span], strict=True):
            row[: len(there)] = there
        chance = given_text(rule, q, p[:, place])
        bad = valid[span] & ~chance.isfinite()
        if bool(bad.any()):
            i, start, depth = bad.nonzero()[0].tolist()
            i += span.start
            raise DriftlabError(
                f"the draft's probability of the text is not finite: sequence {draft.ids[i]!r}, row "
                f"{int(draft.rows[i, start])}, depth {depth + 1}. Half-precision logits overflow: draft in float32"
            )
        accepted[span] = chance.masked_fill(~valid[span], 0)
    return accepted


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
