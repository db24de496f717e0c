"""Kernel tests: in Triton's interpreter where there is no GPU (tests/conftest.py decides, before triton is imported)."""

from __future__ import annotations

import os

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

if INTERPRETED:
    from kernels import interp_bf16

    interp_bf16.install()


def pytest_configure(config):
    # Triton 3.6's interpreter takes numbers out of arrays in a way that numpy 2.3 announces the end of (triton#9171)
    config.addinivalue_line("filterwarnings", "ignore:Conversion of an array with ndim > 0:DeprecationWarning")


@pytest.fixture
def device():
    import torch

    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture
def trapped():
    """numpy, in which the interpreter computes, raises on inf - inf, 0 * inf, log(0) and overflow."""
    import numpy as np

    with np.errstate(invalid="raise", over="raise", divide="raise"):
        yield
