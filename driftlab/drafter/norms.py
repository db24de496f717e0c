"""RMS_w(x) = w * x / sqrt(mean(x^2) + eps), statistics in float32; with ``plus_one`` the gain is 1 + w."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Root-mean-square norm with a gain; the statistic is float32 even for half-precision inputs."""

    def __init__(self, width: int, eps: float, *, plus_one: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width) if plus_one else torch.ones(width))
        self.eps = eps
        self.plus_one = plus_one

    def forward(self, x: Float[Tensor, "... width"]) -> Float[Tensor, "... width"]:
        """Return the normed ``x`` in the dtype of ``x``."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.plus_one:  # such models multiply before they round
            return (normed * (1 + self.weight.to(wide.dtype))).to(x.dtype)
        return self.weight.to(x.dtype) * normed.to(x.dtype)
