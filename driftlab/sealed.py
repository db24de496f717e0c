"""Checksums of driftlab's own files of tensors: a bit that changed on the disk is noticed when it is read.

``checksum`` in a file's metadata is a CRC-32 (zlib's) over the rest of its metadata and, for every tensor, its name, dtype,
shape and bytes. A large file that is read in parts keeps one number a part beside it (:func:`crc`). It guards against disks and
copies, not against people: who edits a file on purpose can write its number too. Files of earlier versions have none and are
read as they are.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from driftlab.errors import DriftlabError
from driftlab.files import atomic, is_file, sort_metadata

KEY = "checksum"
EACH = "driftlab_crc"
"""in the metadata of a drafter's weights: JSON, one number a tensor, so that tensors are read and checked one at a time"""


def crc(name: str, tensor: Tensor, begun: int = 0) -> int:
    """CRC-32 of a tensor's name, dtype, shape and bytes, going on from ``begun``."""
    tensor = tensor.detach().cpu().contiguous()
    begun = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode(), begun)
    return zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy(), begun)


def metadata_crc(metadata: Mapping[str, str]) -> int:
    """CRC-32 of a file's metadata but for the checksum itself."""
    return zlib.crc32("\n".join(f"{key}={metadata[key]}" for key in sorted(metadata) if key != KEY).encode())


def checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Return what belongs under :data:`KEY`."""
    number = metadata_crc(metadata)
    for name in sorted(tensors):
        number = crc(name, tensors[name], number)
    return f"{number:08x}"


def save_sealed(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors and metadata with their checksum, whole or not at all; equal content gives equal bytes."""
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with atomic(path) as temporary:
        save_file(held, temporary, metadata={**metadata, KEY: checksum(held, metadata)})
        sort_metadata(temporary)


def open_tensors(path: Path, advice: str) -> Any:
    """Open a safetensors file by memory map.

    Raises:
        DriftlabError: it is missing, cannot be read, or is not whole; ``advice`` says what to do then.
    """
    if not is_file(path):
        raise DriftlabError(f"{path} does not exist: {advice}")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise DriftlabError(f"{path} is not a whole safetensors file ({error}): {advice}") from error


def sealed_tensors(file: Any, path: Path, advice: str) -> dict[str, Tensor]:
    """Read every tensor of an opened file, and check the checksum if there is one.

    Raises:
        DriftlabError: a tensor cannot be read, or the file is not what was written.
    """
    try:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, RuntimeError) as error:
        raise DriftlabError(f"{path} cannot be read ({error}): {advice}") from error
    metadata = file.metadata() or {}
    check(KEY not in metadata or checksum(tensors, metadata) == metadata[KEY], path, advice)
    return tensors


def check(whole: bool, path: Path, advice: str, what: str = "") -> None:
    """Raise DriftlabError unless ``whole``."""
    if not whole:
        where = f"{path}, {what}," if what else f"{path}"
        raise DriftlabError(f"{where} is not what was written there (its checksum differs): {advice}")
