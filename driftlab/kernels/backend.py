"""Which code computes: plain torch, or the Triton kernels, compiled or in Triton's interpreter.

Triton decides between compiler and interpreter when its kernels are first imported, by TRITON_INTERPRET; the package never
sets that variable.
"""

from __future__ import annotations

import os
import warnings
from importlib.util import find_spec
from typing import Literal

import torch

from driftlab.errors import DriftlabError

Backend = Literal["auto", "torch", "triton"]
BACKENDS = ("auto", "torch", "triton")


class BackendWarning(UserWarning):
    """Kernels were asked for, or would have been taken, and plain torch runs instead."""


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter in this process."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def wants_triton(backend: str, device: torch.device) -> bool:
    """Return whether kernels are to be tried: "auto" takes them on CUDA alone, and never the interpreter by accident.

    Raises:
        DriftlabError: a backend that is not known, or "triton" where there is none, or neither a GPU nor the interpreter.
    """
    if backend not in BACKENDS:
        raise DriftlabError(f"backend {backend!r}: it is one of {', '.join(BACKENDS)}")
    there = find_spec("triton") is not None
    if backend == "auto":
        return there and device.type == "cuda" and not interpreted()
    if backend == "torch":
        return False
    if not there:
        raise DriftlabError('backend "triton": triton is not installed; pip install "driftlab[gpu]", or use "torch"')
    if device.type != "cuda" and not interpreted():
        raise DriftlabError(
            f'backend "triton" on {device.type}: kernels run on CUDA devices. Use "torch" or "auto"; to try the kernels '
            "without a GPU, slowly, start Python with TRITON_INTERPRET=1"
        )
    return True


def say_torch(what: str, why: str) -> None:
    """Warn that plain torch runs in the place of a kernel, and why."""
    warnings.warn(f"{what} runs in plain torch, not in a Triton kernel: {why}", BackendWarning, stacklevel=3)
