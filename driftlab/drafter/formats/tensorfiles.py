"""One file of tensors, safetensors or torch's: names, dtypes and shapes without the data, tensors one at a time.

Torch files are read with ``weights_only``, memory-mapped where the file allows it: no pickle of theirs is ever executed.
"""

from __future__ import annotations

import json
import pickle
import re
import warnings
import zipfile
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from driftlab.errors import DriftlabError
from driftlab.sealed import EACH, crc

TRAINING_STATE = "draft_state_dict"
"""where SpecForge's training_state.pt keeps the drafter"""
_LFS = b"version https://git-lfs.github.com/spec/"
# names that safetensors gives to the dtypes of torch files
_SHORT = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL"},
    **{torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"},
    **{torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"},
}


@dataclass(frozen=True)
class Info:
    """What a header says of one tensor; ``dtype`` as safetensors writes it ("BF16")."""

    dtype: str
    shape: tuple[int, ...]


class TensorFile(ABC):
    """A file of named tensors."""

    @property
    @abstractmethod
    def infos(self) -> dict[str, Info]:
        """Name -> dtype and shape, without reading the data."""

    @abstractmethod
    def tensor(self, name: str) -> Tensor:
        """Read one tensor; it keeps no hold on the file."""


class SafetensorsFile(TensorFile):
    """A local safetensors file. It is opened for each reading, so that nothing holds it in between."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def infos(self) -> dict[str, Info]:
        """See :class:`TensorFile`; a broken file is a DriftlabError."""
        try:
            with safe_open(self.path, "np") as file:  # "pt" would ask for memory of the file's size
                views = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
                return {name: Info(view.get_dtype(), tuple(view.get_shape())) for name, view in views.items()}
        except (SafetensorError, RuntimeError, OSError) as error:
            raise broken(self.path, "safetensors", error) from error

    def tensor(self, name: str) -> Tensor:
        """See :class:`TensorFile`."""
        try:
            with safe_open(self.path, "pt") as file:
                tensor = file.get_tensor(name).clone()  # what safetensors returns is the file itself, mapped
                numbers = (file.metadata() or {}).get(EACH)
        except (SafetensorError, RuntimeError, OSError) as error:
            raise broken(self.path, "safetensors", error) from error
        if numbers is not None and not _is_what_was_written(numbers, name, tensor):
            raise DriftlabError(
                f"{self.path}: {name} is not what driftlab wrote there (its checksum differs): copy the file again or, if you "
                f"changed it yourself, write it without {EACH} in its metadata"
            )
        return tensor


def _is_what_was_written(numbers: str, name: str, tensor: Tensor) -> bool:
    try:
        return json.loads(numbers)[name] == crc(name, tensor)
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


class TorchFile(TensorFile):
    """A local file of ``torch.save``: a dict of tensors, or one that has the drafter under ``draft_state_dict``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        state = _load_torch(self.path)
        if isinstance(state, dict) and TRAINING_STATE in state:
            state = state[TRAINING_STATE]
        if not isinstance(state, dict) or not state:
            raise DriftlabError(
                f"{self.path} holds a {type(state).__name__}, not a dict of tensors: save the drafter's state_dict()"
            )
        other = [key for key, value in state.items() if not (isinstance(key, str) and isinstance(value, Tensor))]
        if other:
            raise DriftlabError(
                f"{self.path} is not a dict of tensors: it holds {sorted(map(str, other))[:6]}; save the drafter's "
                f"state_dict() alone, or under {TRAINING_STATE!r}"
            )
        for name, tensor in state.items():
            if tensor.layout != torch.strided or tensor.is_meta or tensor.is_nested:
                kind = "without data (meta)" if tensor.is_meta else "sparse or nested"
                raise DriftlabError(f"{self.path}: {name} is {kind}: save plain tensors")
        return state

    @cached_property
    def infos(self) -> dict[str, Info]:
        """See :class:`TensorFile`; a broken file, or one that only a pickle could read, is a DriftlabError."""
        return {
            name: Info(_SHORT.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
            for name, tensor in self._tensors.items()
        }

    def tensor(self, name: str) -> Tensor:
        """See :class:`TensorFile`."""
        return self._tensors[name].detach().clone(memory_format=torch.contiguous_format)


def open_tensors(path: Path) -> TensorFile:
    """Open a local file by the end of its name.

    Raises:
        DriftlabError: a pointer of Git LFS, a GGUF file, or a name of no known kind.
    """
    refuse_pointer(path)
    if path.suffix == ".safetensors":
        return SafetensorsFile(path)
    if path.suffix in (".bin", ".pt", ".pth"):
        return TorchFile(path)
    raise DriftlabError(f"{path}: drafters are read from .safetensors, .bin and .pt files")


def refuse_pointer(path: Path) -> None:
    """Raise DriftlabError if a file is a Git LFS pointer or a GGUF file, which stand where weights should."""
    try:
        with open(path, "rb") as file:
            start = file.read(len(_LFS))
    except OSError as error:
        raise DriftlabError(f"{path} cannot be read: {error.strerror or error}") from error
    if start == _LFS:
        raise DriftlabError(
            f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull` in the clone, or download it from the hub"
        )
    if start[:4] == b"GGUF" or path.suffix == ".gguf":
        raise DriftlabError(f"{path} is a GGUF file: drafters are read from safetensors or torch files, unquantised")


def broken(path: Path, kind: str, error: Exception) -> DriftlabError:
    """Return the error for a file that cannot be read as what it should be."""
    return DriftlabError(
        f"{path} is not a whole {kind} file ({str(error) or type(error).__name__}): copy or download it again"
    )


def _load_torch(path: Path) -> Any:
    try:
        with open(path, "rb") as file:
            start = file.read(2)
        zipped = zipfile.is_zipfile(path)
        if zipped:
            _check_members(path)
        if not zipped and start[:1] != b"\x80":  # neither the zip of torch >= 1.6 nor the pickle of files before it
            raise broken(path, "torch", ValueError("its beginning or its end is missing"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickle protocols: what cannot be read is an error below
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
        if zipped:
            _check_sizes(path, state)
        return state
    except pickle.UnpicklingError as error:
        words = str(error)
        if "Unsupported" in words or "weights_only" in words.lower():
            raise DriftlabError(
                f"{path} holds Python objects beside tensors, and reading them would run code of the file: it is not "
                f"read (it asks for {_what_is_unsupported(words)}). Save the tensors alone, with safetensors or "
                "torch.save(state_dict, ...)"
            ) from error
        raise broken(path, "torch", error) from error
    except DriftlabError:
        raise
    except Exception as error:  # a pickle that is cut or changed ends in any error that its machine stumbles over
        raise broken(path, "torch", error) from error


def _check_members(path: Path) -> None:
    """Raise an error of ``zipfile`` or a DriftlabError if a member is not what was packed: torch.load looks at no CRC.

    torch writes 0 for all of them where it was told not to compute any; then nothing can be checked.
    """
    with zipfile.ZipFile(path) as packed:
        if not any(info.CRC for info in packed.infolist()):
            return
        changed = packed.testzip()
    if changed is not None:
        raise broken(path, "torch", ValueError(f"the CRC of {changed!r} in it is wrong"))


def _check_sizes(path: Path, state: Any) -> None:
    """Raise DriftlabError if a tensor is longer than its record: torch.load maps what lies behind it in the file."""
    held: dict[int, int] = {}
    waiting = [state]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            waiting += part.values()
        elif isinstance(part, list | tuple):
            waiting += part
        elif isinstance(part, Tensor) and part.layout == torch.strided and not part.is_meta and not part.is_nested:
            storage = part.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
    with zipfile.ZipFile(path) as packed:
        records = Counter(info.file_size for info in packed.infolist() if "/data/" in info.filename)
    if longer := Counter(size for size in held.values() if size) - records:
        raise broken(path, "torch", ValueError(f"no record in it has the {next(iter(longer))} bytes of a tensor"))


def _what_is_unsupported(words: str) -> str:
    match = re.search(r"GLOBAL (\S+)", words) or re.search(r"Unsupported (.+)", words)
    return match[1] if match else words.strip().splitlines()[0]
