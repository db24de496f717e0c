"""Values of configuration records, checked against their annotations in one place, wherever they come from: a file, the
command line, Python.

A bool is a bool and an int no bool; a float may be written as an int, and is finite; a list may stand for a tuple, a table for
a nested record. Nothing else is converted: every string would be true, and every switch on.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from driftlab.errors import DriftlabError


@dataclass(frozen=True)
class Least:
    """Bound of a number: ``value`` or more; ``above``: more than that."""

    value: float
    above: bool = False

    @property
    def words(self) -> str:
        """The bound in words."""
        return f" above {self.value:g}" if self.above else f" of {self.value:g} or more"

    def holds(self, number: float | int) -> bool:
        """Whether a number keeps to it."""
        return number > self.value if self.above else number >= self.value


Size = Annotated[int, Least(0.0, above=True)]
Count = Annotated[int, Least(0.0)]
Positive = Annotated[float, Least(0.0, above=True)]
NonNegative = Annotated[float, Least(0.0)]


def settle_fields(record: Any) -> None:
    """Check every field of a frozen dataclass, and put ints into the form of its floats, lists into that of its tuples.

    Its class has ``__no_type_check__``, which keeps other checkers from asking first.

    Raises:
        DriftlabError: a value that its annotation does not allow; names field and value.
    """
    for name, hint in _hints(type(record)).items():
        object.__setattr__(record, name, fitted(name, getattr(record, name), hint))


def field_value(record: type, name: str, value: Any) -> Any:
    """Return a value as the field ``name`` of a dataclass has it. Raises DriftlabError if it cannot be one."""
    return fitted(name, value, _hints(record)[name])


def from_table(record: type, table: Mapping[str, Any], what: str) -> Any:
    """Build a dataclass from a table of its fields. Raises DriftlabError that names unknown and missing keys."""
    fields = dataclasses.fields(record)
    required = {f.name for f in fields if f.default is dataclasses.MISSING}
    unknown, missing = set(table) - {f.name for f in fields}, required - set(table)
    if unknown or missing:
        raise DriftlabError(f"{what}: unknown keys {sorted(map(str, unknown))}, missing keys {sorted(missing)}")
    return record(**table)


def fitted(name: str, value: Any, hint: Any) -> Any:
    """Return ``value`` in the type that ``hint`` names. Raises DriftlabError that says what it should be."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        found = fitted(name, value, args[0])
        if not args[1].holds(found):
            raise _wrong(name, value, _NAMES[args[0]] + args[1].words)
        return found
    if origin in (Union, types.UnionType):
        inner = next(arg for arg in args if arg is not type(None))
        return None if value is None else fitted(name, value, inner)
    if origin is Literal:
        if not isinstance(value, str) or value not in args:
            raise _wrong(name, value, f"one of {', '.join(map(repr, args))}")
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise _wrong(name, value, "a list of whole numbers")
        return tuple(fitted(name, item, args[0]) for item in value)
    if dataclasses.is_dataclass(hint):
        return _record(name, value, hint)
    return _PLAIN[hint](name, value)


@cache
def _hints(record: type) -> dict[str, Any]:
    annotations = {f.name: f.type for f in dataclasses.fields(record)}
    # of the class itself there are none, where it asks checkers of types to leave its values to settle_fields
    stand_in = types.SimpleNamespace(__annotations__=annotations)
    return get_type_hints(stand_in, vars(sys.modules[record.__module__]), include_extras=True)


def _record(name: str, value: Any, record: type) -> Any:
    if isinstance(value, record):
        return value
    if not isinstance(value, Mapping):
        raise _wrong(name, value, f"a table of {', '.join(f.name for f in dataclasses.fields(record))}, or nothing")
    try:
        return from_table(record, value, name)
    except DriftlabError as error:
        if name in str(error):
            raise
        raise DriftlabError(f"{name}: {error}") from error


def _bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong(name, value, "true or false")
    return value


def _int(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise _wrong(name, value, "a whole number")
    return int(value)


def _float(name: str, value: Any) -> float:
    number = math.nan
    if not isinstance(value, bool) and isinstance(value, numbers.Real):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
    if not math.isfinite(number):
        raise _wrong(name, value, "a number")
    return number


def _str(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong(name, value, "a name")
    return value


_PLAIN: dict[type, Callable[[str, Any], Any]] = {bool: _bool, int: _int, float: _float, str: _str}
_NAMES = {int: "a whole number", float: "a number"}


def _wrong(name: str, value: Any, wanted: str) -> DriftlabError:
    shown = repr(value)
    return DriftlabError(f"{name} is {shown if len(shown) < 80 else shown[:76] + ' ...'}, not {wanted}")
