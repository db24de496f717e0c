"""What a pickled reading keeps of its files: their names and settings. A drafter's pickle does not need its folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from driftlab.errors import DriftlabError


@dataclass(frozen=True)
class Remembered:
    """A checkpoint that was read elsewhere; none of its files is opened."""

    path: Path
    label: str
    files: tuple[str, ...]
    config: dict[str, Any]

    @classmethod
    def of(cls, raw: Any) -> Remembered:
        """Return what is kept of an opened checkpoint, or of one that is remembered already."""
        return cls(raw.path, raw.label, tuple(raw.files), raw.config)


def not_here() -> NoReturn:
    """Raise DriftlabError: what is asked for would have to be read in the files."""
    raise DriftlabError("this reading was pickled, without its file's tensors: read the checkpoint again")
