"""A convention of a checkpoint: its value, where that comes from, and why; and the ledger that collects them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from driftlab.errors import DriftlabError

Source = Literal["read", "tensors", "assumed", "given"]


@dataclass(frozen=True)
class Convention:
    """One field of DrafterConfig, its value, where that comes from, and why."""

    name: str
    value: Any
    source: Source
    why: str


@dataclass(frozen=True)
class Found:
    """What a reader found for a convention; ``note``: worth telling whoever loads the file."""

    value: Any
    source: Source
    why: str
    note: bool = False


class Ledger:
    """Collects conventions while a file is read. What the user gave comes before what the file says, and is marked so.

    Args:
        given: fields of DrafterConfig, and the options of reading.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = dict(given)
        self.rows: dict[str, Convention] = {}
        self.notes: list[str] = []

    def settle(self, name: str, find: Callable[[], Found] | Found) -> Any:
        """Enter a convention and return its value. A function is called only if the user gave no value."""
        if name in self.given:
            row = Convention(name, self.given[name], "given", "given by the user")
        else:
            found = find if isinstance(find, Found) else find()
            row = Convention(name, found.value, found.source, found.why)
            if found.note:
                self.note(f"{name}: {shown(found.value)} ({found.why})")
        self.rows[name] = row
        return row.value

    def note(self, words: str) -> None:
        """Add a note, once."""
        if words not in self.notes:
            self.notes.append(words)

    def conventions(self) -> tuple[Convention, ...]:
        """Return what was settled."""
        return tuple(self.rows.values())


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Put the checkpoint's name before every DriftlabError of the block that does not hold it."""
    try:
        yield
    except DriftlabError as error:
        if len(name) > 3 and name in str(error):  # a short one may be part of any word
            raise
        raise DriftlabError(f"{name}: {error}") from error


def refuse_options(given: Mapping[str, Any], what: str, allowed: Set[str] = frozenset()) -> None:
    """Raise DriftlabError if the user gave an option of reading that has no meaning for this kind of file."""
    wrong = sorted(({"format", "specforge", "layer_ids", "module"} - allowed) & set(given))
    if wrong:
        raise DriftlabError(f"it is {what}, to which {', '.join(wrong)} does not apply: leave it out")


def shown(value: Any) -> str:
    """Return a value as it stands in tables and notes."""
    if value is None or value == ():
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return str(list(value))
    if isinstance(value, float):
        return f"{value:.10g}"
    if dataclasses.is_dataclass(value):
        fields = ((f.name, getattr(value, f.name), f.default) for f in dataclasses.fields(value))
        return ", ".join(f"{name} {shown(v)}" for name, v, default in fields if v != default)
    return str(value)
