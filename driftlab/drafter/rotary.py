r"""Rotary position embedding, plain and scaled, as transformers computes it.

    angle_i(position) = position * f_i,   f_i = theta^(-2 i / d),   i = 0 .. d/2 - 1

and, with factor s, original length L and wavelength w_i = 2 pi / f_i:

    linear   f_i / s
    dynamic  f_i while the sequence is no longer than max_positions (beyond that theta grows with the length)
    llama3   f_i where w_i < L / high, f_i / s where w_i > L / low, and in between (1 - m) f_i / s + m f_i with
             m = (L / w_i - low) / (high - low)
    yarn     f_i (1 - r_i) + (f_i / s) r_i,  r_i = clamp((i - a) / (b - a), 0, 1),  a, b = dim(beta_fast), dim(beta_slow),
             dim(n) = d ln(L / (2 pi n)) / (2 ln theta), rounded outwards unless truncate is off; cos and sin are multiplied by
             attention_factor, by default m(mscale) / m(mscale_all_dim) if both are given, else m(1); m(x) = 1 + x ln(s) / 10

(linear: kaiokendev 2023; yarn: arXiv 2309.00071; llama3: the Llama 3.1 release.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from driftlab.drafter.fields import Count, NonNegative, Positive, settle_fields
from driftlab.errors import DriftlabError

RopeKind = Literal["linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are scaled; see the module's formulas. What a kind does not use stays None."""

    __no_type_check__ = True

    kind: str
    factor: float
    original_max_positions: Count = 0
    """L; for "dynamic" the length up to which nothing is scaled"""
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    mscale: NonNegative | None = None
    mscale_all_dim: NonNegative | None = None
    attention_factor: Positive | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "dynamic", "llama3", "yarn"):
            raise DriftlabError(
                f"rope scaling {self.kind!r} is not known: linear, dynamic, llama3, yarn, or none (default)"
            )
        self._settle()
        if not self.factor >= 1:
            raise DriftlabError(f"rope scaling {self.kind}: factor {self.factor} is not a number >= 1")
        if self.kind != "linear" and self.original_max_positions < 1:
            raise DriftlabError(
                f"rope scaling {self.kind}: it needs the original length (original_max_position_embeddings)"
            )
        if self.kind == "llama3" and not (self.low_freq_factor and self.high_freq_factor):
            raise DriftlabError("rope scaling llama3: it needs low_freq_factor and high_freq_factor")
        if self.kind == "llama3" and not self.low_freq_factor < self.high_freq_factor:
            raise DriftlabError(
                f"rope scaling llama3: low_freq_factor {self.low_freq_factor:g} is not below high_freq_factor "
                f"{self.high_freq_factor:g}"
            )
        if self.beta_fast < self.beta_slow:
            raise DriftlabError(
                f"rope scaling {self.kind}: beta_fast {self.beta_fast:g} is below beta_slow {self.beta_slow:g}"
            )

    def _settle(self) -> None:
        try:
            settle_fields(self)
        except DriftlabError as error:
            raise DriftlabError(f"rope scaling {self.kind}: {error}") from error

    def magnitude(self, scale: float) -> float:
        """m(scale) of YaRN: 1 + scale ln(factor) / 10."""
        return 1 + 0.1 * scale * math.log(self.factor) if self.factor > 1 else 1.0

    @property
    def rotation_factor(self) -> float:
        """What cos and sin are multiplied by."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.magnitude(self.mscale) / self.magnitude(self.mscale_all_dim)
        return self.magnitude(1.0)

    @property
    def score_factor(self) -> float:
        """What latent attention multiplies its softmax scale by: m(mscale_all_dim) squared under YaRN."""
        return self.magnitude(self.mscale_all_dim) ** 2 if self.kind == "yarn" and self.mscale_all_dim else 1.0


def frequencies(width: int, theta: float, scaling: RopeScaling | None = None) -> Float[Tensor, " pair"]:
    """Return f_i, radians a position, in float64."""
    plain = theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    if scaling is None or scaling.kind == "dynamic":
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    length = scaling.original_max_positions
    if scaling.kind == "llama3":
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        waves = 2 * math.pi / plain
        share = ((length / waves - low) / (high - low)).clamp(0, 1)  # 0 for the longest waves: all divided
        return (1 - share) * plain / scaling.factor + share * plain

    def place(turns: float) -> float:
        return width * math.log(length / (2 * math.pi * turns)) / (2 * math.log(theta))

    first, last = place(scaling.beta_fast), place(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    if first == last:
        last += 0.001
    ramp = ((torch.arange(width // 2, dtype=torch.float64) - first) / (last - first)).clamp(0, 1)
    return plain * (1 - ramp) + plain / scaling.factor * ramp


class Rotary(nn.Module):
    """Turns queries and keys by their positions; unless frequencies depend on length, a constant offset has no effect.

    Angles are float64 whatever the drafter's dtype: a buffer would be cast with it, and bfloat16 has no 257. (Engines round
    them to float32: at position 100,000 by up to .01.)
    """

    def __init__(
        self, width: int, theta: float, scaling: RopeScaling | None = None, *, interleaved: bool = False
    ) -> None:
        super().__init__()
        self.width, self.theta, self.scaling, self.interleaved = width, theta, scaling, interleaved
        self._there: Tensor | None = None

    def forward(
        self, x: Float[Tensor, "batch head pos d_head"], positions: Int[Tensor, "batch pos"]
    ) -> Float[Tensor, "batch head pos d_head"]:
        """Turn the first ``width`` dimensions of ``x`` by its positions."""
        if self.scaling is not None and self.scaling.kind == "dynamic":
            self._check_length(positions)
        angle = positions[:, None, :, None] * self._frequencies(x.device)
        factor = 1.0 if self.scaling is None else self.scaling.rotation_factor
        cos, sin = (angle.cos() * factor).to(x.dtype), (angle.sin() * factor).to(x.dtype)
        turned, rest = x[..., : self.width], x[..., self.width :]
        first, second = (turned[..., ::2], turned[..., 1::2]) if self.interleaved else turned.chunk(2, -1)
        parts = [first * cos - second * sin, second * cos + first * sin]
        turned = torch.stack(parts, -1).flatten(-2) if self.interleaved else torch.cat(parts, -1)
        return torch.cat([turned, rest], -1) if rest.shape[-1] else turned

    def _frequencies(self, device: torch.device) -> Tensor:
        """Keep them where they are needed: they are asked for at each depth, and a copy to a GPU makes it wait."""
        if self._there is None or self._there.device != device:
            self._there = frequencies(self.width, self.theta, self.scaling).to(device)
        return self._there

    def _check_length(self, positions: Tensor) -> None:
        longest = self.scaling.original_max_positions
        if positions.numel() and int(positions.max()) >= longest:
            raise DriftlabError(
                f"the drafter has dynamic rotary scaling, and position {int(positions.max())} is beyond its {longest}: from "
                "there on a key depends on how long the sequence was when it was cached, in each engine another way. Use texts "
                f"of at most {longest} tokens"
            )
