"""A diagnosis in words, and as plain values."""

from __future__ import annotations

import math
from typing import Any

from driftlab.doctor.diagnosis import Diagnosis, Row
from driftlab.doctor.evidence import LEAST
from driftlab.intervals import Interval

_SHOWN = 10


def diagnosis_words(found: Diagnosis) -> str:
    """Return what a person reads: the outcome first, then how sure, what to change, and what was measured."""
    lines = [_outcome(found), *_how_sure(found)]
    if found.outcome == "another":
        lines += ["", "changes", *(f"  {name}: {before} -> {after}" for name, before, after in found.changes)]
        lines += [
            "",
            "to have it read so (each engine in its own format, which driftlab export writes)",
            *(f"  {engine}: {words}" for engine, words in found.remedies.items()),
        ]
    lines += ["", *_table(found)]
    if together := [_named(row) for row in found.together]:
        lines += ["", "one class with the best reading (not ranked)", *(f"  {words}" for words in together)]
    lines += [f"  {words}" for words in found.one_class] if together else _class(found.one_class)
    if found.open and found.outcome in ("declared", "another"):
        lines += ["", f"not told on this text: record {found.more_tokens} more answer tokens, if these may be meant"]
        lines += [f"  {_named(row)}" for row in found.open if len(row.changes) == 1]
    if found.notes:
        lines += ["", "of the file", *(f"  {words}" for words in found.notes)]
    if found.skipped:
        lines += ["", "not tried", *(f"  {words}" for words in found.skipped)]
    lines += ["", _measured(found)]
    return "\n".join(lines)


def diagnosis_values(found: Diagnosis) -> dict[str, Any]:
    """Return plain JSON values; numbers that are not there are null."""
    return {
        "name": found.name,
        "outcome": found.outcome,
        "says": _outcome(found),
        "changes": [{"factor": n, "declared": before, "best": after} for n, before, after in found.changes],
        "gain_nats_per_token": _interval(found.gain),
        "p_adjusted": _number(found.p),
        "tau": {
            "depth": found.depth,
            "declared": _interval(found.tau_declared),
            "best": _interval(found.tau_best),
            "gain": _interval(found.tau_gain),
        },
        "information_nats_per_token": _number(found.information),
        "more_tokens": found.more_tokens,
        "remedies": found.remedies,
        "one_class": [*(_named(row) for row in found.together), *found.one_class],
        "readings": [
            {
                "changes": dict(row.changes),
                "difference": _interval(row.difference),
                "difference_by_depth": [_number(x) for x in row.by_depth],
                "tokens": row.tokens,
                "verdict": row.verdict,
                "more_tokens": row.more_tokens,
            }
            for row in found.rows
        ],
        "notes": list(found.notes),
        "not_tried": list(found.skipped),
        "tried": found.tried,
        "prompts": found.prompts,
        "tokens": found.tokens,
        "seconds": _number(found.seconds),
    }


def _outcome(found: Diagnosis) -> str:
    if found.outcome == "too weak":
        return (
            f"{found.name}: too weak to tell. In the best reading tried tau is {found.tau_best.value:.3f}, and the text is "
            f"predicted by {found.information:.3f} nats a token more than text from elsewhere: untrained, broken, another "
            "target's, or read wrongly in a way that is not tried. Nothing is said of its conventions"
        )
    if found.outcome == "declared":
        return f"{found.name}: the declared reading is best of the {found.tried} tried"
    if found.outcome == "more text" and not found.open:
        return (
            f"{found.name}: not enough evidence. {found.tokens} answer tokens of {found.prompts} prompts show nothing: record "
            f"{found.more_tokens} more answer tokens, of more prompts"
        )
    if found.outcome == "more text":
        return (
            f"{found.name}: not enough evidence. {_named(found.open[0])} looks better than the declared reading, which this "
            f"text does not show: record {found.more_tokens} more answer tokens"
        )
    changes = ", ".join(f"{name} {after}" for name, _, after in found.changes)
    return f"{found.name}: another reading is better: {changes}"


def _how_sure(found: Diagnosis) -> list[str]:
    if found.outcome != "another" or found.gain is None:
        return [f"tau {_words(found.tau_declared)} at K = {found.depth}"] if found.outcome != "too weak" else []
    return [
        f"log-likelihood of the text: {_signed(found.gain)} nats a token, p = {found.p:.2g} "
        f"(adjusted for {found.tried} readings)",
        f"tau at K = {found.depth}: {_words(found.tau_declared)} as declared, {_words(found.tau_best)} so read, "
        f"difference {_signed(found.tau_gain)}",
    ]


def _table(found: Diagnosis) -> list[str]:
    """Other readings beside the best one, nearest first."""
    if found.outcome == "too weak" or not found.rows:
        return []
    lines = [
        "other readings less the best: nats a token, 95 % over prompts; verdict; depth by depth; on how many tokens"
    ]
    for row in found.rows[:_SHOWN]:
        depths = " ".join(f"{x:+.3f}" for x in row.by_depth)
        lines.append(f"  {_signed(row.difference):<25} {row.verdict:<9} {depths} {row.tokens:>6}  {_named(row)}")
    if len(found.rows) > _SHOWN:
        lines.append(f"  and {len(found.rows) - _SHOWN} more, all further below")
    return lines


def _class(words: tuple[str, ...]) -> list[str]:
    return ["", "one class with it (no text can tell)", *(f"  {each}" for each in words)] if words else []


def _named(row: Row) -> str:
    return ", ".join(f"{factor} {label}" for factor, label in row.changes)


def _measured(found: Diagnosis) -> str:
    return (
        f"{found.tried} readings on {found.tokens} answer tokens of {found.prompts} prompts, depths 1 to {found.depth}, in "
        f"{found.seconds:.0f} s; differences smaller than {LEAST} nats do not matter"
    )


def _words(x: Interval) -> str:
    return f"{x.value:.3f} [{x.low:.3f}, {x.high:.3f}]"


def _signed(x: Interval) -> str:
    return f"{x.value:+.3f} [{x.low:+.3f}, {x.high:+.3f}]"


def _number(x: float) -> float | None:
    return None if math.isnan(x) else x


def _interval(x: Interval | None) -> dict[str, float | None] | None:
    return None if x is None else {"value": _number(x.value), "low": _number(x.low), "high": _number(x.high)}
