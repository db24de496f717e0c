r"""Records in a JSON text (numbered by entry of a list) or in JSON lines (numbered by line), checked and each counted once."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from driftlab.engines.found import Found

Record = dict[str, Any]
Check = Callable[[Any], bool]
#: (line or place, record, dictionaries that hold it from the outside in)
Held = tuple[int, Record, tuple[Record, ...]]


def number(value: Any) -> bool:
    """Return whether it is a count or a ratio: finite and not negative."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def numbers(value: Any) -> bool:
    """Return whether it is a list of numbers."""
    return isinstance(value, list) and all(map(number, value))


def table(value: Any) -> bool:
    """Return whether it is a dictionary of whole sizes and counts."""
    return isinstance(value, dict) and all(size.isdecimal() and number(count) for size, count in value.items())


def mapping(value: Any) -> bool:
    """Return whether it is a dictionary."""
    return isinstance(value, dict)


def records(
    text: str, found: Found, must: Mapping[str, Check], may: Mapping[str, Check] | None = None
) -> Iterator[Held]:
    """Dictionaries, at any depth, that have all names of ``must``; those of ``may`` are checked where they are not null."""
    for place, part in _parts(text, found):
        there = list(_walk(part, tuple(must), ()))
        if not there:
            found.skipped.append((place, f"no {' and '.join(must)} in it"))
        for record, holders in there:
            if _sound(place, record, {**(may or {}), **must}, must, found):
                yield place, record, holders


def first_choices(
    text: str, found: Found, must: Mapping[str, Check], name: str = "question_id"
) -> list[tuple[int, Record]]:
    """The first choice of every answer, the one that the tools' own scripts take; of a question that comes again, the last.

    A first choice that is broken is noted, and no other is taken in its place.
    """
    answers = []
    for place, part in _parts(text, found):
        there = [answer for answer, _ in _walk(part, ("choices",), ())]
        if not there:
            found.skipped.append((place, "no choices in it"))
        answers += [(answer.get(name), (place, answer)) for answer in there]
    kept = []
    for place, answer in last_of_each(answers, found, name):
        choices = answer["choices"]
        first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
        if absent := [key for key in must if key not in first]:
            found.skipped.append((place, f"no {' and '.join(absent)} in its first choice"))
        elif _sound(place, first, must, must, found):
            kept.append((place, first))
    return kept


def last_of_each(named: Iterable[tuple[Any, tuple[int, Record]]], found: Found, name: str) -> list[tuple[int, Record]]:
    """Keep the last record of every id (streams print a request again and again, cumulative); all that have none."""
    kept: dict[Any, tuple[int, Record]] = {}
    for count, (key, record) in enumerate(named):
        key = ("none", count) if key is None else ("id", repr(key))
        if key in kept:
            place = kept.pop(key)[0]
            found.skipped.append((place, f"{name} {key[1]} comes again in {record[0]}: the last one is taken"))
        kept[key] = record
    return list(kept.values())


def added(a: list[float | int], b: list[float | int]) -> list[float | int]:
    """Sum by position; a histogram may be cut after its last count."""
    size = max(len(a), len(b))
    return [x + y for x, y in zip(a + [0.0] * (size - len(a)), b + [0.0] * (size - len(b)), strict=True)]


def _sound(place: int, record: Record, checks: Mapping[str, Check], must: Mapping[str, Check], found: Found) -> bool:
    for key, check in checks.items():
        value = record.get(key)
        if (value is not None or key in must) and not check(value):
            found.skipped.append((place, f"{key} is {value!r}, no {check.__name__}"))
            return False
    return True


def _parts(text: str, found: Found) -> list[tuple[int, Any]]:
    try:
        whole = json.loads(text)
        return list(enumerate(whole if isinstance(whole, list) else [whole], 1))
    except (ValueError, RecursionError):  # no JSON, or not one value; a number of 5,000 digits; brackets without end
        pass
    parts = []
    for place, line in enumerate(text.split("\n"), 1):
        try:
            parts += [(place, json.loads(line))] if line.strip() else []
        except json.JSONDecodeError as error:
            found.skipped.append((place, f"not JSON ({error.msg} at {error.colno})"))
        except (ValueError, RecursionError) as error:
            found.skipped.append((place, f"not JSON ({error})"))
    return parts


def _walk(part: Any, keys: tuple[str, ...], holders: tuple[Record, ...]) -> Iterator[tuple[Record, tuple[Record, ...]]]:
    if isinstance(part, dict) and all(key in part for key in keys):
        yield part, holders
    elif isinstance(part, dict):
        for inner in part.values():
            yield from _walk(inner, keys, (*holders, part))
    elif isinstance(part, list):
        for inner in part:
            yield from _walk(inner, keys, holders)
