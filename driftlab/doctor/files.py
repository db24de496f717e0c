"""Reading a checkpoint for the doctor: also one whose d2t no reader takes, because it holds target ids where offsets belong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from driftlab.drafter.formats.conventions import naming
from driftlab.drafter.formats.files import open_checkpoint
from driftlab.drafter.formats.reading import Reading, read_checkpoint, read_raw
from driftlab.drafter.shipped import SHIPPED
from driftlab.errors import DriftlabError


class _Offsets:
    """An opened checkpoint whose d2t is seen as offsets; everything else is as it is."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    def tensor(self, name: str) -> Tensor:
        """Read a tensor; ids of d2t less their places."""
        found = self._raw.tensor(name)
        return found - torch.arange(len(found)) if _is_map(name) else found


def read_for(path: str | Path, **given: Any) -> tuple[Reading, Tensor | None]:
    """Read a checkpoint as :func:`driftlab.drafter.formats.reading.read_checkpoint` does; return it, and d2t as stored.

    d2t is None unless it holds strictly ascending target ids without a t2d that says so: as offsets, which engines take them
    for, they would leave out every second token, so readers refuse them. Which it is, the doctor measures.

    Raises:
        DriftlabError: as ``read_checkpoint``.
    """
    try:
        return read_checkpoint(path, **given), None
    except DriftlabError as error:
        if "d2t" not in str(error) or (str(path) in SHIPPED and not Path(path).exists()):
            raise
        revision = given.pop("revision", None)
        with naming(str(path)):
            raw = open_checkpoint(path, revision=revision)
        stored = next((raw.tensor(name) for name in raw.names if _is_map(name)), None)
        if stored is None or stored.is_floating_point() or stored.dim() != 1 or bool((stored.diff() <= 0).any()):
            raise
        return read_raw(_Offsets(raw), str(path), **given), stored.long()


def _is_map(name: str) -> bool:
    return name.rsplit(".", 1)[-1] == "d2t"
