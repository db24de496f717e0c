"""The tensors of a folder as an engine would open them: names, shapes, dtypes and vectors; a part of :mod:`rules`."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

_LFS = b"version https://git-lfs"


@dataclass(frozen=True)
class Weights:
    """Tensors by their names in the file."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    small: dict[str, Tensor] = field(default_factory=dict)
    """vectors: gains and vocabulary maps"""
    infinite: set[str] = field(default_factory=set)
    """those with values that are not finite"""

    def add(self, name: str, tensor: Tensor) -> None:
        """Note what is to be known of a tensor; matrices are not kept."""
        self.shapes[name], self.dtypes[name] = tuple(tensor.shape), tensor.dtype
        if tensor.ndim == 1:
            self.small[name] = tensor
        wide = tensor.dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
        if wide and not bool(tensor.isfinite().all()):
            self.infinite.add(name)


def read_weights(path: Path, format: str) -> tuple[Weights | None, list[str]]:
    """Read the files that the engine would open; what cannot be read is a finding.

    Args:
        path: the folder.
        format: of :func:`driftlab.drafter.formats.rules.check_folder`.
    """
    safe, pickled = sorted(path.glob("*.safetensors")), sorted(path.glob("*.bin"))
    findings: list[str] = []
    if format == "safeailab":
        safe = [p for p in safe if p.name == "model.safetensors"]
        pickled = [p for p in pickled if p.name == "pytorch_model.bin"]
        if safe and pickled:
            findings.append("pytorch_model.bin is read, and model.safetensors is not: remove the wrong one")
        safe = [] if pickled else safe
    if not safe and not pickled:
        return None, ["no file of weights that the loader looks for"]
    weights = Weights()
    for file in safe or pickled:
        try:
            _refuse_pointer(file)
            told = _safetensors(file, weights) if safe else _pickled(file, weights)
        except pickle.UnpicklingError:
            return None, [
                *findings,
                f"{file.name} holds no plain dictionary of tensors, and reading it would run its code",
            ]
        except Exception as error:  # a broken file makes the readers raise anything at all
            words = str(error) or type(error).__name__
            return None, [*findings, f"the weights cannot be read ({file.name}: {words})"]
        findings += told
    return weights, findings


def _refuse_pointer(file: Path) -> None:
    with open(file, "rb") as opened:
        if opened.read(len(_LFS)) == _LFS:
            raise ValueError("it is a Git LFS pointer, not the file itself")


def _safetensors(path: Path, weights: Weights) -> list[str]:
    findings = []
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (no mapping)
            findings += [f"{name}: in two files"] if name in weights.shapes else []
            weights.add(name, file.get_tensor(name))
    return findings


def _pickled(path: Path, weights: Weights) -> list[str]:
    tensors = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise ValueError("it is not a dictionary of tensors")
    findings = []
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise ValueError(f"it has a tensor named {name!r}, which is no string")
        if not _plain(tensor):
            raise ValueError(f"{name} is a sparse, quantised or empty-handed (meta) tensor")
        findings += [f"{name}: in two files"] if name in weights.shapes else []
        weights.add(name, tensor.detach())
    return findings


def _plain(tensor: Any) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized and not tensor.is_nested
