"""A cell: one point of an ablation, with a readable key that names its files.

The key lists the fields that are not at their default, by name: ``seed=2,ttt=8,variant=eagle31``; "default" if there are none.
Letters that are not safe in file names (of any usual system; upper case is none, for some do not tell it from lower) are
%XX, a text that looks like a number or a word for one gets a "~", elements of a tuple end in "+". So two different cells have
two keys, whatever their values; and a field that is added later, with a default, changes no key.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
import string
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from driftlab.errors import DriftlabError

LONGEST = 160
"""characters of a key; a longer one is cut, and ends in a digest of all of it"""
_SAFE = frozenset(string.ascii_lowercase + string.digits + "._-=@")
_WORDS = {True: "on", False: "off", None: "none"}
_LOOKS_OTHERWISE = re.compile(r"on|off|none|-?inf|-?[0-9].*", re.DOTALL)
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What a cell needs while it runs. It computes with ``cpus`` threads (at least one) everywhere: the bits agree."""

    cpus: float = 1.0
    gpus: float = 0.0
    memory: int = 0
    """bytes; 0: not said"""

    def __post_init__(self) -> None:
        if not (self.cpus > 0 and self.gpus >= 0 and self.memory >= 0):
            raise DriftlabError(f"{self}: cpus is above 0, gpus and memory are not negative")

    @property
    def threads(self) -> int:
        """Threads of a tensor operation."""
        return max(1, int(self.cpus))


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Base of a cell: subclass it as a frozen dataclass, with fields of type bool, int, float, str, None, or tuples of them."""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            hint = hints[field.name]
            value = _settled(getattr(self, field.name), hint)
            object.__setattr__(self, field.name, value)
            if hint in _PLAIN and type(value) is not hint:
                raise DriftlabError(f"{type(self).__name__}.{field.name} is a {hint.__name__}, not {value!r}")
            _encoded(value, field.name)

    @property
    def key(self) -> str:
        """Readable name, safe as a file's, that no other cell has."""
        parts, hints = [], typing.get_type_hints(type(self))
        for field in sorted(dataclasses.fields(self), key=lambda field: field.name):
            value = getattr(self, field.name)
            written = _encoded(value, field.name)
            default = _settled(_default(field), hints[field.name])
            if _is_missing(default) or written != _encoded(default, field.name):
                parts.append(f"{_escaped(field.name)}={written}")
        whole = ",".join(parts) or "default"
        if len(whole) <= LONGEST:
            return whole
        return f"{whole[: LONGEST - 22]}~~{hashlib.sha256(whole.encode()).hexdigest()[:20]}"

    @property
    def resources(self) -> Resources:
        """What it needs while it runs; a subclass may say otherwise."""
        return Resources()


def config_of(cell: Cell) -> dict[str, Any]:
    """Return every field with its value, ready for JSON."""
    values = {field.name: getattr(cell, field.name) for field in dataclasses.fields(cell)}
    return {
        name: list(v) if isinstance(v, tuple) else str(v) if v in (math.inf, -math.inf) else v
        for name, v in values.items()
    }


def distinct(cells: Sequence[Any]) -> dict[str, Cell]:
    """Return the cells by key, in order; the same cell in two grids is one.

    Raises:
        DriftlabError: no cell, something that is none, or different kinds of cells with one key.
    """
    found: dict[str, Cell] = {}
    for cell in cells:
        if not isinstance(cell, Cell):
            raise DriftlabError(f"{cell!r} is no cell: make frozen dataclasses that extend driftlab.ablation.Cell")
        other = found.setdefault(cell.key, cell)
        if type(other) is not type(cell):
            kinds = f"{type(other).__name__} and {type(cell).__name__}"
            raise DriftlabError(
                f"cells of two kinds, {kinds}, have the key {cell.key!r}: give each a folder of its own"
            )
    if not found:
        raise DriftlabError("there are no cells: give at least one")
    return found


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if _is_missing(field.default_factory) else field.default_factory()


def _is_missing(value: Any) -> bool:
    return isinstance(value, type(dataclasses.MISSING))  # a class sent to another machine has a MISSING of its own


def _settled(value: Any, hint: Any) -> Any:
    """Give equal values one form, so that they have one key: 1 and 1.0 where a float belongs, the two zeros, lists."""
    if isinstance(value, list):
        value = tuple(value)
    if hint is float and type(value) is int:
        value = float(value)
    return value + 0.0 if isinstance(value, float) else value


def _encoded(value: Any, name: str) -> str:
    if isinstance(value, tuple):
        if any(isinstance(element, tuple) for element in value):
            raise DriftlabError(f"field {name!r} holds a tuple in a tuple: keys have no place for it")
        return "".join(f"{_encoded(element, name)}+" for element in value) or "+"
    if type(value) not in _PLAIN:
        raise DriftlabError(
            f"field {name!r} holds {value!r}, a {type(value).__name__}: "
            "cells hold bool, int, float, str, None, and tuples of them"
        )
    if isinstance(value, float) and math.isnan(value):
        raise DriftlabError(f"field {name!r} is NaN, which is not even itself: leave it out")
    if value is None or isinstance(value, bool):
        return _WORDS[value]
    if isinstance(value, str):
        return ("~" if not value or _LOOKS_OTHERWISE.fullmatch(value) else "") + _escaped(value)
    return _escaped(repr(value))


def _escaped(text: str) -> str:
    if text.encode("utf-8", "surrogatepass").decode("utf-8", "replace") != text:
        raise DriftlabError(f"{text!r} is no text that can be written as UTF-8")
    return "".join(c if c in _SAFE else "".join(f"%{byte:02x}" for byte in c.encode()) for c in text)
