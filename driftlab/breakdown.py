"""Where tau comes from: buckets of rounds, the starts where two variants differ most, and how the text repeats itself.

A round belongs to the bucket in which it starts; tau of a bucket is the emitted tokens of its rounds over their number.
Rounds near the length limit are left out by where they start, as in ``tau_uncensored``: without the cut ones alone, the last
bucket would hold those that failed early, and show a collapse that is not there. So the mean over buckets weighted by
``rounds`` is tau_uncensored. A drafter beyond the length it was trained on can be worse than
none (sgl-project/sglang#6783), which the mean over all contexts hides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
from torch import Tensor

from driftlab.draft import Draft, text_digest
from driftlab.errors import DriftlabError
from driftlab.estimators import round_counts, start_weights, uncensored_starts
from driftlab.intervals import bootstrap_ratio, limits
from driftlab.simulation import Expected, Simulation
from driftlab.trajectory import Trajectory

FIRST_EDGE = 16
_COLUMNS = {
    **{"by": "str", "bucket": "str", "begin": "int64", "end": "int64", "beyond_trained": "bool"},
    **{"tau": "float64", "low": "float64", "high": "float64", "rounds": "float64", "prompts": "int64"},
}


# ---------------------------------------------------------------------------------------------- buckets


def buckets(
    simulation: Simulation | Expected,
    by: Literal["position", "context", "category"],
    *,
    edges: Sequence[int] | None = None,
    trained_length: int = 0,
    samples: int = 2000,
    seed: int = 0,
) -> pd.DataFrame:
    """Return tau of the rounds that start in each bucket, with more than K tokens left or in texts that EOS ended.

    Args:
        simulation: a replay.
        by: "position": answer tokens so far, 1 for the first round; "context": tokens of prompt and answer so far, row + 2;
            "category": the prompt's.
        edges: first value of each bucket, ascending, and one past the last; what is outside is left out. Default 1, 16, 32,
            64 ... to the end.
        trained_length: of "context": longest sequence that the drafter was trained on, in tokens (0: unknown). It becomes
            an edge, and what is longer is marked.
        samples: of the bootstrap.
        seed: of the bootstrap.

    Returns:
        Columns ``by``, ``bucket``, ``begin``, ``end`` (inclusive; 0 for categories), ``beyond_trained``, ``tau``, ``low``,
        ``high`` (95 %, bootstrap over the prompts with rounds there), ``rounds``, ``prompts``. Empty buckets are left out.

    Raises:
        DriftlabError: edges that do not ascend or belong to categories, or a trained length that is not for "context".
    """
    table = simulation.acceptance
    if trained_length and by != "context":
        raise DriftlabError(f"trained_length is a length of context: it marks buckets by='context', not by={by!r}")
    if by == "category":
        if edges is not None:
            raise DriftlabError("edges are for buckets by position or context; categories have none")
        value = np.array(table.categories)[:, None]
        groups = [(name, 0, 0, value == name) for name in dict.fromkeys(table.categories)]
    else:
        rows = table.rows.numpy()
        value = rows + 2 if by == "context" else rows - rows[:, :1] + 1
        spans = _spans(edges, int(value.max()), trained_length)
        groups = [(f"{low}-{high}", low, high, (value >= low) & (value <= high)) for low, high in spans]
    emitted, rounds = (counts * uncensored_starts(simulation) for counts in round_counts(simulation))
    lines = []
    for name, begin, end, inside in groups:
        top, bottom = (emitted * inside).sum(1), (rounds * inside).sum(1)
        there = bottom > 0
        if there.any():
            # a prompt without rounds here says nothing here: resampling it too would make one prompt look certain
            tau = bootstrap_ratio(top[there], bottom[there], samples=samples, seed=seed)
            tau = tau.within(*limits("tau", table.depth))
            place = {"by": by, "bucket": name, "begin": begin, "end": end}
            beyond = bool(trained_length) and begin > trained_length
            found = {"tau": tau.value, "low": tau.low, "high": tau.high, "rounds": float(bottom.sum())}
            lines.append({**place, "beyond_trained": beyond, **found, "prompts": int(there.sum())})
    return pd.DataFrame(lines, columns=list(_COLUMNS)).astype(_COLUMNS)


def _spans(edges: Sequence[int] | None, largest: int, trained_length: int) -> list[tuple[int, int]]:
    """Inclusive (first, last) of each bucket."""
    if edges is None:
        edges = [1, *(FIRST_EDGE << i for i in range(64) if FIRST_EDGE << i <= largest), largest + 1]
    if len(edges) < 2 or any(low >= high for low, high in zip(edges, edges[1:], strict=False)):
        raise DriftlabError(f"edges {list(edges)}: give at least two, ascending")
    cut = [trained_length + 1] if trained_length and edges[0] < trained_length + 1 < edges[-1] else []
    whole = sorted({*edges, *cut})
    return [(low, high - 1) for low, high in zip(whole, whole[1:], strict=False)]


# ---------------------------------------------------------------------------------------------- the text itself


#: least periods, and least tokens, of an end that counts as a loop
PERIODS, LOOP = 3, 8


@dataclass(frozen=True)
class Repetition:
    """How much a text repeats itself. ``repeated_ngrams``: share of its ``ngrams`` n-grams that occurred earlier in it.

    ``periodic_tail``: share of its ``tokens`` in the longest end that has a period of at most the given length, holds at least
    three of them and has at least eight tokens; ``period``: that period, 0 if there is none. Two periods are in ordinary text
    (a doubled word, two lines that begin alike), three short ones too (an ellipsis); a loop goes on until the text is cut.
    NaN where there is nothing to share.
    """

    repeated_ngrams: float
    ngrams: int
    periodic_tail: float
    period: int
    tokens: int


def repetition(tokens: Sequence[int], *, n: int = 4, max_period: int = 8) -> Repetition:
    """Measure the repetition of one text: high accept lengths may mean a text that loops (lightseekorg/tokenspeed#1305)."""
    tokens = list(tokens)
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    longest = period = 0
    for p in range(1, max_period + 1):
        run = next((r for r in range(len(tokens) - p) if tokens[-1 - r] != tokens[-1 - r - p]), max(0, len(tokens) - p))
        if run + p >= max(PERIODS * p, LOOP) and run + p > longest:
            longest, period = run + p, p
    return Repetition(
        repeated_ngrams=1 - len(set(grams)) / len(grams) if grams else float("nan"),
        ngrams=len(grams),
        periodic_tail=longest / len(tokens) if tokens else float("nan"),
        period=period,
        tokens=len(tokens),
    )


def repetition_records(trajectory: Trajectory, *, n: int = 4, max_period: int = 8) -> Iterator[dict[str, Any]]:
    """Yield tidy rows per prompt, of its answer without the EOS that ends it: ``repeated_ngrams``, ``periodic_tail``.

    ``window`` is n, and the largest period; the mean weighted by ``n`` is the pooled share.
    """
    for i, entry in enumerate(trajectory.entries):
        answer = trajectory.tokens(i)[entry.prompt_length : entry.length - (entry.finish == "stop")].tolist()
        found, at = repetition(answer, n=n, max_period=max_period), {"prompt": entry.id, "category": entry.category}
        yield {**at, "window": n, "quantity": "repeated_ngrams", "value": found.repeated_ngrams, "n": found.ngrams}
        yield {**at, "window": max_period, "quantity": "periodic_tail", "value": found.periodic_tail, "n": found.tokens}


# ---------------------------------------------------------------------------------------------- where two variants differ


def most_different(
    a: Simulation | Expected,
    b: Simulation | Expected,
    drafts: tuple[Draft, Draft],
    data: Trajectory | Sequence[Tensor],
    decode: Callable[[list[int]], str],
    *,
    count: int = 10,
    on: Literal["all", "walk"] = "all",
    before: int = 32,
) -> pd.DataFrame:
    """Return the starts where two variants differ most in (expected) accept length, with the text, for reading.

    Args:
        a: one replay.
        b: another, of the same texts at the same K.
        drafts: what each drafted, at K or deeper. Shown is the arg-max draft; behind its first miss it was fed the text.
        data: the recording, or its token sequences.
        decode: token ids to text.
        count: how many at most. A start whose K tokens overlap those of one above it in the same text is passed over.
        on: "walk": weighted by the probability that one of the two walks, or both, start there
            (sampled: as if they were independent).
        before: tokens of the text shown before the start's own.

    Returns:
        Columns ``prompt``, ``category``, ``row``, ``difference`` (a - b), ``accepted_a``, ``accepted_b``, ``weight``,
        ``before``, ``text`` (the K tokens drafted for), ``drafted_a``, ``drafted_b``. Largest first; of equals those early
        in their answer. Starts that do not differ are left out.

    Raises:
        DriftlabError: replays, drafts or texts that do not belong together.
    """
    _refuse_unlike(a, b, drafts, data)
    depth, rows = a.depth, a.acceptance.rows.numpy()
    lengths = [x.acceptance.accept_length.double().numpy() for x in (a, b)]
    missed = [1 - start_weights(x) for x in (a, b)]
    weight = 1 - missed[0] * missed[1] if on == "walk" else np.ones(rows.shape)
    size = np.abs(lengths[0] - lengths[1]) * weight
    prompt, start = (x.ravel() for x in np.indices(rows.shape))
    taken: list[tuple[int, int]] = []
    for place in np.lexsort((prompt, start, -size.ravel())):
        i, s = int(prompt[place]), int(start[place])
        if len(taken) == count or not size[i, s] > 0:
            break
        if all(i != j or abs(s - other) >= depth for j, other in taken):
            taken.append((i, s))
    lines = []
    for i, s in taken:
        tokens, row = _tokens(data, i), int(rows[i, s])
        lines.append(
            {
                "prompt": a.acceptance.ids[i],
                "category": a.acceptance.categories[i],
                "row": row,
                "difference": float(lengths[0][i, s] - lengths[1][i, s]),
                "accepted_a": float(lengths[0][i, s]),
                "accepted_b": float(lengths[1][i, s]),
                "weight": float(weight[i, s]),
                "before": decode(tokens[max(0, row + 2 - before) : row + 2].tolist()),
                "text": decode(tokens[row + 2 : row + 2 + depth].tolist()),
                "drafted_a": decode(drafts[0].tokens[i, s, :depth].tolist()),
                "drafted_b": decode(drafts[1].tokens[i, s, :depth].tolist()),
            }
        )
    return pd.DataFrame(lines)


def _refuse_unlike(a: Any, b: Any, drafts: tuple[Draft, Draft], data: Trajectory | Sequence[Tensor]) -> None:
    mine, theirs = a.acceptance, b.acceptance
    if mine.ids != theirs.ids or mine.digests != theirs.digests or mine.depth != theirs.depth:
        raise DriftlabError("these replays are not of the same texts in the same order at the same K")
    for draft in drafts:
        if draft.ids != mine.ids or draft.depth < mine.depth or (draft.digests and draft.digests != mine.digests):
            raise DriftlabError("these drafts are not those of the replays: other texts, or not as deep")
    texts = tuple(text_digest(_tokens(data, i)) for i in range(len(data)))
    if len(data) != len(mine.ids) or (mine.digests and texts != mine.digests):
        raise DriftlabError("the texts are not those that were replayed")


def _tokens(data: Trajectory | Sequence[Tensor], index: int) -> Tensor:
    return data.tokens(index) if isinstance(data, Trajectory) else data[index]


# ---------------------------------------------------------------------------------------------- by prompt length


def by_prompt_length(
    rows: pd.DataFrame,
    lengths: Mapping[str, int],
    edges: Sequence[int],
    *,
    trained_length: int = 0,
    samples: int = 2000,
    seed: int = 0,
) -> pd.DataFrame:
    """Pool rows of prompts by the length of the prompt.

    Args:
        rows: tidy rows with ``prompt``, ``quantity``, ``value``, ``n``; values are ratios over ``n``. Of ``emitted`` rows,
            which hold tokens over rounds, tau is made. Rows without a prompt, and ``rounds``, are left out.
        lengths: tokens of each prompt.
        edges: first length of each bucket, ascending, and one past the last; prompts outside are left out.
        trained_length: longest sequence that the drafter was trained on, in tokens (0: unknown). It becomes an edge, and
            longer prompts are marked. (A shorter prompt's answer may still reach beyond: see ``breakdown.buckets``.)
        samples: of the bootstraps.
        seed: of the bootstraps.

    Returns:
        Columns ``quantity``, ``layer``, ``head``, ``depth``, ``window`` (those that ``rows`` has), ``begin``, ``end``
        (inclusive), ``beyond_trained``, ``value``, ``low``, ``high`` (95 %), ``n``, ``prompts``.

    Raises:
        DriftlabError: a prompt without a length, edges that do not ascend.
    """
    edges = list(edges)
    if len(edges) < 2 or any(low >= high for low, high in zip(edges, edges[1:], strict=False)):
        raise DriftlabError(f"edges {edges}: give at least two, ascending")
    if trained_length and edges[0] < trained_length + 1 < edges[-1]:
        edges = sorted({*edges, trained_length + 1})
    rows = rows[(rows["prompt"] != "") & (rows["quantity"] != "rounds") & rows["value"].notna() & (rows["n"] > 0)]
    if lacking := sorted(set(rows["prompt"]) - set(lengths)):
        raise DriftlabError(f"no length is known of prompt {lacking[0]!r}")
    emitted = rows["quantity"] == "emitted"
    total = rows["value"].where(emitted, rows["value"] * rows["n"])
    length = rows["prompt"].map(lengths)
    rows = rows.assign(quantity=rows["quantity"].where(~emitted, "tau"), total=total, length=length)
    keys = ["quantity", *(name for name in ("layer", "head", "depth", "window") if name in rows.columns)]
    lines = []
    for place, group in rows.groupby(keys, sort=True):
        for begin, past in zip(edges, edges[1:], strict=False):
            inside = group[(group["length"] >= begin) & (group["length"] < past)]
            if inside.empty:
                continue
            by_prompt = inside.groupby("prompt", sort=False)[["total", "n"]].sum()
            found = bootstrap_ratio(by_prompt["total"], by_prompt["n"], samples=samples, seed=seed)
            found = found.within(*limits(str(place[0])))
            bucket = {
                "begin": begin,
                "end": past - 1,
                "beyond_trained": bool(trained_length) and begin > trained_length,
            }
            numbers = {**found._asdict(), "n": float(by_prompt["n"].sum()), "prompts": len(by_prompt)}
            lines.append({**dict(zip(keys, place, strict=True)), **bucket, **numbers})
    columns = [*keys, "begin", "end", "beyond_trained", "value", "low", "high", "n", "prompts"]
    return pd.DataFrame(lines, columns=columns)
