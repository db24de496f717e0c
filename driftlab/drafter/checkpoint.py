"""Drafter checkpoints: a folder with config.json and model.safetensors, keys as the engines name them.

Written here: driftlab's own files, whose ``driftlab`` block holds the whole configuration, so that nothing has to be guessed.
Read here: those, and the files of other projects, see ``formats.reading``. Loading is strict: a tensor that is missing,
unused or of the wrong shape is an error that names it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from driftlab.drafter.formats.own import FORMAT_VERSION, written_config
from driftlab.drafter.formats.reading import read_checkpoint
from driftlab.drafter.model import Drafter
from driftlab.errors import DriftlabError
from driftlab.files import atomic, sort_metadata, write_json
from driftlab.sealed import EACH, crc

__all__ = ["FORMAT_VERSION", "load", "save"]


def save(drafter: Drafter, path: str | Path, *, dtype: torch.dtype | None = None) -> None:
    """Write ``path``/model.safetensors and, last, ``path``/config.json. The target's tables are not written.

    Args:
        drafter: what to save.
        path: folder; made if need be, files of the same names replaced.
        dtype: floating-point tensors are cast to it; default as they are.

    Raises:
        DriftlabError: weights that are not finite, or of which more than half would become zero in ``dtype``.
    """
    path = Path(path)
    tensors = {name: _written(name, tensor, dtype) for name, tensor in drafter.state_dict().items()}
    with atomic(path / "model.safetensors") as temporary:
        numbers = json.dumps({name: crc(name, tensor) for name, tensor in sorted(tensors.items())})
        metadata = {"format": "pt", "driftlab_format_version": str(FORMAT_VERSION), EACH: numbers}
        save_file(tensors, temporary, metadata=metadata)
        sort_metadata(temporary)
        # new weights and old settings would load as a drafter that nobody made: until both are written there are no settings
        (path / "config.json").unlink(missing_ok=True)
    write_json(path / "config.json", written_config(drafter.config, drafter.trained_for))


def _written(name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    if not tensor.is_floating_point():
        return tensor.detach().cpu().contiguous()
    cast = tensor.detach().to(dtype or tensor.dtype).cpu().contiguous()
    kind = str(cast.dtype).removeprefix("torch.")
    if not bool(cast.isfinite().all()):
        raise DriftlabError(
            f"{name} holds values that are not finite in {kind}, and could not be loaded: it is not saved"
        )
    held, kept = int(tensor.count_nonzero()), int(cast.count_nonzero())
    if 2 * kept < held:
        raise DriftlabError(
            f"{name} would lose {held - kept} of {held} values, which become zero in {kind}: choose another dtype="
        )
    return cast


def load(
    path: str | Path,
    target: Any = None,
    *,
    aux_layers: Any = None,
    num_layers: Any = None,
    **given: Any,
) -> Drafter:
    """Load a checkpoint; ``drafter.notes`` says in words what was assumed, ``drafter.reading`` every convention and why.

    Args:
        path: a folder, a file, a Hugging Face id, or a name in :data:`driftlab.drafter.SHIPPED`.
        target: lends embedding and head where the file has none, and its depth where layer ids are left out (a Target or a
            Trajectory).
        aux_layers: captured target states, if the file does not say or says it wrongly.
        num_layers: the target's depth, without a target.
        given: other conventions that are known better, see :func:`driftlab.drafter.formats.reading.read_checkpoint`.

    Raises:
        DriftlabError: a missing, unused or misshapen tensor, an unknown setting, a drafter that does not fit the target.
    """
    return read_checkpoint(path, num_layers=num_layers, aux_layers=aux_layers, **given).build(target)
