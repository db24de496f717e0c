"""Which code computes: plain torch, or the Triton kernels, compiled or in Triton's interpreter.

Triton decides between compiler and interpreter when its kernels are first imported, by TRITON_INTERPRET; the package never
sets that variable.
"""

from __future__ import annotations

import os
import sys
import warnings
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from driftlab.errors import BackendWarning, DriftlabError

Backend = Literal["auto", "torch", "triton"]
BACKENDS = ("auto", "torch", "triton")
_INSIDE = (str(Path(torch.__file__).parent) + os.sep, str(Path(__file__).parents[1]) + os.sep)
"""folders whose frames are not the user's: torch's and this package's"""


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
    if interpreted() != _made_for_the_interpreter():
        raise DriftlabError(
            f"TRITON_INTERPRET is {os.environ.get('TRITON_INTERPRET', 'not set')!r} now, and was another when Triton was "
            "imported, which decides once: set it before Python starts (in Jupyter: before the kernel does), and start again"
        )
    return True


@cache
def _made_for_the_interpreter() -> bool:
    import triton.language as tl

    return type(tl.sum).__name__ == "InterpretedFunction"


def cannot_compute(dtype: torch.dtype) -> str:
    """Return why kernels that are interpreted cannot compute in a dtype; empty if they can, or are compiled."""
    if dtype == torch.bfloat16 and interpreted() and not _interpreter_rounds():
        return "Triton's interpreter computes bfloat16 wrongly (triton#11584); use float32 or float16 there"
    return ""


def _interpreter_rounds() -> bool:
    """Whether 1 + 3 / 512 becomes 1 + 1 / 128, the nearest bfloat16, and not 1, as truncation makes it."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle, interpreter_builder

    value = TensorHandle(np.array([1 + 3 / 512], dtype=np.float32), tl.float32)
    return int(interpreter_builder.cast_impl(value, tl.bfloat16).data[0]) == 0x3F81


def say_torch(what: str, why: str) -> None:
    """Warn, at the line of the user's that led here, that plain torch runs in the place of a kernel, and why."""
    level, frame = 1, sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        level, frame = level + 1, frame.f_back
    warnings.warn(f"{what} runs in plain torch, not in a Triton kernel: {why}", BackendWarning, stacklevel=level)
