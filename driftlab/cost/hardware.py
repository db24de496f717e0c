"""A machine: memory bandwidth, peak operations by precision, and what tensor parallelism costs.

Of a tensor-parallel group of p devices each reads 1/p of the weights and does 1/p of the operations, and every decoder
layer ends in two all-reduces (after attention and after the MLP) of n x H activations. Of a ring all-reduce each device
sends and receives 2 (p - 1) / p of the data:

    all-reduce(bytes) = latency + 2 (p - 1) / p * bytes / link bandwidth        (0 for p = 1)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from driftlab.errors import DriftlabError

Number = float | int


@dataclass(frozen=True)
class Hardware:
    """One device and how many work as one.

    ``bandwidth``: memory, bytes/s a device. ``peak``: precision ("bf16", "fp8", "fp4") -> operations/s a device, dense,
    without sparsity. ``link``: bytes/s a device in one direction. ``all_reduce_latency``: seconds each. ``source``: of the
    numbers.
    """

    name: str
    bandwidth: Number
    peak: Mapping[str, Number] = field(hash=False)
    link: Number
    source: str
    tensor_parallel: int = 1
    all_reduce_latency: Number = 0.0

    def __post_init__(self) -> None:
        if min(self.bandwidth, self.link, *self.peak.values()) <= 0 or self.tensor_parallel < 1:
            raise DriftlabError(f"{self.name}: bandwidth, link and peaks must be above 0, tensor_parallel at least 1")
        if self.all_reduce_latency < 0:
            raise DriftlabError(f"{self.name}: all_reduce_latency {self.all_reduce_latency} is below 0")

    def group(self, tensor_parallel: int, all_reduce_latency: Number = 0.0) -> Hardware:
        """Return ``tensor_parallel`` such devices working as one. Latency is a measured number: there is no default but 0."""
        return replace(self, tensor_parallel=tensor_parallel, all_reduce_latency=all_reduce_latency)

    def operations_per_second(self, precision: str) -> float:
        """Peak of the whole group. A precision that the device does not list is a :class:`DriftlabError`."""
        if precision not in self.peak:
            raise DriftlabError(f"{self.name} has no peak for {precision!r}, only for {sorted(self.peak)}")
        return float(self.peak[precision] * self.tensor_parallel)

    def all_reduce(self, size: Number) -> float:
        """Seconds of one all-reduce of ``size`` bytes over the group."""
        if self.tensor_parallel == 1:
            return 0.0
        share = 2 * (self.tensor_parallel - 1) / self.tensor_parallel
        return float(self.all_reduce_latency + share * size / self.link)
