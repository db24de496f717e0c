"""Drafter checkpoints: a folder with config.json and model.safetensors, keys as the engines name them.

Written here: driftlab's own files, whose ``driftlab`` block holds the whole configuration, so that nothing has to be guessed.
Read here: those, and the files of other projects, see ``formats.reading``. Loading is strict: a tensor that is missing,
unused or of the wrong shape is an error that names it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from driftlab.drafter.formats.own import FORMAT_VERSION, written_config
from driftlab.drafter.formats.reading import read_checkpoint
from driftlab.drafter.model import Drafter
from driftlab.files import atomic, sort_metadata, write_json

__all__ = ["FORMAT_VERSION", "load", "save"]


def save(drafter: Drafter, path: str | Path, *, dtype: torch.dtype | None = None) -> None:
    """Write ``path``/model.safetensors and, last, ``path``/config.json. The target's tables are not written.

    Args:
        drafter: what to save.
        path: folder; made if need be, files of the same names replaced.
        dtype: floating-point tensors are cast to it; default as they are.
    """
    path = Path(path)
    tensors = {
        name: (tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor).detach().cpu().contiguous()
        for name, tensor in drafter.state_dict().items()
    }
    with atomic(path / "model.safetensors") as temporary:
        save_file(tensors, temporary, metadata={"format": "pt", "driftlab_format_version": str(FORMAT_VERSION)})
        sort_metadata(temporary)
    write_json(path / "config.json", written_config(drafter.config, drafter.trained_for))


def load(
    path: str | Path,
    target: Any = None,
    *,
    aux_layers: tuple[int, ...] | None = None,
    num_layers: int | None = None,
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
