"""The bfloat16 repair of the interpreter: without it, bf16 tests of kernels mean nothing."""

from __future__ import annotations

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET", "0") != "1":
    pytest.skip("the interpreter is not in use", allow_module_level=True)

import triton
import triton.language as tl


@triton.jit
def _cast(x_ptr, o_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(o_ptr + at, tl.load(x_ptr + at).to(tl.bfloat16))


@triton.jit
def _add(x_ptr, y_ptr, o_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(o_ptr + at, tl.load(x_ptr + at) + tl.load(y_ptr + at))


@triton.jit
def _dot(x_ptr, y_ptr, o_ptr, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(o_ptr + at, tl.dot(tl.load(x_ptr + at), tl.load(y_ptr + at)))


def test_casts_round_as_torch_does():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2**17, generator=generator) * torch.exp(8 * torch.randn(2**17, generator=generator))
    out = torch.empty(2**17, dtype=torch.bfloat16)
    _cast[(1,)](x, out, N=2**17)
    assert torch.equal(out, x.bfloat16())


def test_sums_are_sums_of_values():
    x, y = (torch.randn(256, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in (1, 2))
    out = torch.empty(256, dtype=torch.bfloat16)
    _add[(1,)](x, y, out, N=256)
    assert torch.equal(out, x + y)


def test_products_are_products_of_values():
    x, y = (torch.randn(32, 32, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in (1, 2))
    out = torch.empty(32, 32)
    _dot[(1,)](x, y, out, N=32)
    torch.testing.assert_close(out, x.float() @ y.float(), rtol=0, atol=1e-5)
