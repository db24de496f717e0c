r"""Seconds of one forward step: from a roofline, from a line, or from a measured table.

    roofline = fixed + per_token * n + max(memory, compute) + communication

    memory = (weight bytes / p + sequences * KV bytes(context) / shards) / (bandwidth_fraction * bandwidth)
    compute = operations / (ops_fraction * p * peak)
    communication = 2 * layers * all-reduce(n H bytes of activations)          p devices, see :mod:`.hardware`

``fixed`` is what a step costs whatever it does (launches, scheduling, sampling), ``per_token`` what grows with tokens at
bandwidths that no peak describes (routing, activations). Bytes and operations overlap, hence the maximum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from driftlab.cost.hardware import Hardware
from driftlab.cost.shapes import Coverage, ModelShape, Number
from driftlab.errors import DriftlabError


@runtime_checkable
class StepCost(Protocol):
    """What a model's forward step costs."""

    def time(self, tokens: Number, sequences: Number, context: Number) -> float:
        """Seconds of one step over ``tokens`` new tokens of ``sequences`` sequences with ``context`` cached tokens each."""
        ...


@dataclass(frozen=True)
class RooflineStep:
    """A step from bytes and operations. The equation and its terms are in the module's docstring.

    ``coverage``: measured experts touched by n tokens, in place of uniform routing. ``precision``: of the products, which
    for weight-only formats is that of the activations. ``activation_bytes``: per number that an all-reduce moves.
    """

    shape: ModelShape
    hardware: Hardware
    precision: str = "bf16"
    fixed: Number = 0.0
    per_token: Number = 0.0
    bandwidth_fraction: Number = 1.0
    ops_fraction: Number = 1.0
    coverage: Coverage | None = None
    activation_bytes: Number = 2.0

    def __post_init__(self) -> None:
        if not (0 < self.bandwidth_fraction <= 1 and 0 < self.ops_fraction <= 1):
            raise DriftlabError("bandwidth_fraction and ops_fraction are shares of a peak: above 0, at most 1")
        if self.fixed < 0 or self.per_token < 0:
            raise DriftlabError("fixed and per_token are seconds: not below 0")

    def memory(self, tokens: Number, sequences: Number, context: Number) -> float:
        """Seconds that reading weights and cache takes."""
        group = self.hardware.tensor_parallel
        cache = sequences * self.shape.kv_bytes(context) / self.shape.attention.kv_shards(group)
        size = self.shape.weight_bytes(tokens, self.coverage) / group + cache
        return float(size / (self.bandwidth_fraction * self.hardware.bandwidth))

    def compute(self, tokens: Number, context: Number) -> float:
        """Seconds that the operations take."""
        speed = self.ops_fraction * self.hardware.operations_per_second(self.precision)
        return self.shape.operations(tokens, context) / speed

    def communication(self, tokens: Number) -> float:
        """Seconds of the step's all-reduces, two a layer."""
        size = tokens * self.shape.hidden * self.activation_bytes
        return 2 * self.shape.layers * self.hardware.all_reduce(size)

    def memory_bound(self, tokens: Number, sequences: Number, context: Number) -> bool:
        """Whether reading takes longer than computing: then ``ops_fraction`` has no influence."""
        return self.memory(tokens, sequences, context) >= self.compute(tokens, context)

    def time(self, tokens: Number, sequences: Number, context: Number) -> float:
        """Seconds of one step. Fewer tokens than sequences, or none, is a :class:`DriftlabError`."""
        _check(tokens, sequences, context)
        longest = max(self.memory(tokens, sequences, context), self.compute(tokens, context))
        return float(self.fixed + self.per_token * tokens + longest + self.communication(tokens))


@dataclass(frozen=True)
class LinearStep:
    """fixed + per_token * tokens + per_cached_token * sequences * context: the form in which benchmarks publish costs."""

    fixed: Number
    per_token: Number = 0.0
    per_cached_token: Number = 0.0

    def __post_init__(self) -> None:
        if self.fixed < 0 or self.per_token < 0 or self.per_cached_token < 0 or not self.fixed + self.per_token > 0:
            raise DriftlabError(f"{self}: costs are seconds, not below 0 and not all 0")

    def time(self, tokens: Number, sequences: Number, context: Number) -> float:
        """Seconds of one step. Fewer tokens than sequences, or none, is a :class:`DriftlabError`."""
        _check(tokens, sequences, context)
        return float(self.fixed + self.per_token * tokens + self.per_cached_token * sequences * context)


@dataclass(frozen=True)
class MeasuredStep:
    """A step from measured points ``at`` (ascending; tokens of the step, or its sequences) and their ``seconds``.

    Between two points the line through them: whether weights or operations rule there, the cost is a constant plus
    something proportional to tokens, so a line follows it and never leaves the two measurements. Beyond the ends nothing is
    known, and asking is an error. ``jumps``: points after which the cost jumps before the next one (a step that no CUDA
    graph covers any more): between them a line would invent costs, so asking there is an error too.

    ``context``: cached tokens per sequence at which it was measured; a longer one needs ``per_cached_token`` seconds, a
    shorter one is an error, since the table does not say how much of a step its own context took. A table by sequences
    holds for the tokens a sequence that it was measured with: right for a drafter of one K, refused for a target.
    """

    at: tuple[Number, ...]
    seconds: tuple[Number, ...]
    by: Literal["tokens", "sequences"] = "tokens"
    jumps: tuple[Number, ...] = ()
    context: Number = 0
    per_cached_token: Number | None = None

    def __post_init__(self) -> None:
        if len(self.at) != len(self.seconds) or len(self.at) < 2:
            raise DriftlabError(
                f"a measured step needs two points or more: {len(self.at)} and {len(self.seconds)} given"
            )
        if any(b <= a for a, b in pairwise(self.at)) or self.at[0] <= 0:
            raise DriftlabError(f"measured points must ascend from above 0, each once: {self.at}")
        if not all(0 < value < math.inf for value in self.seconds):
            raise DriftlabError(f"measured seconds must be above 0 and finite: {self.seconds}")
        if unknown := [value for value in self.jumps if value not in self.at[:-1]]:
            raise DriftlabError(f"jump after {unknown[0]}: not a measured point with another one after it")
        if self.per_cached_token is not None and not 0 <= self.per_cached_token < math.inf:
            raise DriftlabError(f"per_cached_token {self.per_cached_token}: seconds are finite and not below 0")

    def time(self, tokens: Number, sequences: Number, context: Number) -> float:
        """Seconds of one step.

        Raises:
            DriftlabError: outside the measured range, across a jump, or at a context that the table does not know.
        """
        _check(tokens, sequences, context)
        x = tokens if self.by == "tokens" else sequences
        if not self.at[0] <= x <= self.at[-1]:
            raise DriftlabError(
                f"{x} {self.by} is outside the measured {self.at[0]} to {self.at[-1]}: measure there, or use a RooflineStep"
            )
        for low, high in pairwise(self.at):
            if low in self.jumps and low < x < high:
                raise DriftlabError(f"{x} {self.by}: the measured cost jumps between {low} and {high}; measure there")
        if context < self.context:
            raise DriftlabError(
                f"the table was measured at context {self.context}, not {context}: measure at the shorter context"
            )
        if context != self.context and self.per_cached_token is None:
            raise DriftlabError(
                f"the table was measured at context {self.context}, not {context}: give per_cached_token to carry it over"
            )
        more = (self.per_cached_token or 0.0) * sequences * (context - self.context)
        return float(np.interp(x, self.at, self.seconds) + more)


def _check(tokens: Number, sequences: Number, context: Number) -> None:
    if not (tokens >= sequences > 0 and context >= 0):
        raise DriftlabError(
            f"a step has at least one token a sequence and no negative context: {tokens} tokens, {sequences} sequences, "
            f"context {context}"
        )
