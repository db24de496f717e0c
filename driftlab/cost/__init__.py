"""What a round of speculative decoding costs, from bytes and operations or from a measured table.

    round = target step at batch x (K + 1) tokens + K draft steps + overhead
    speed-up over no drafter = tau * (target step at batch tokens) / round

:mod:`.shapes` counts the bytes and operations of a model, :mod:`.hardware` says how fast a machine moves them,
:mod:`.catalogue` names public models and machines, :mod:`.steps` turns both into seconds, :mod:`.model` makes rounds,
speed-ups and the best K of them, :mod:`.fitting` finds the few parameters of a curve and says which of them it determines.

Units: seconds, bytes, operations (a multiply-add is two), tokens. tau comes from outside, e.g. from a replay.
"""

from __future__ import annotations

from driftlab.cost.hardware import Hardware
from driftlab.cost.model import (
    Best,
    CostModel,
    Drafting,
    Gain,
    gain_over,
    leviathan_speedup_iid,
    tau_iid,
)
from driftlab.cost.shapes import Experts, Gqa, Mla, ModelShape, UnknownAttention, eagle3_head, experts_touched
from driftlab.cost.steps import LinearStep, MeasuredStep, RooflineStep, StepCost

__all__ = [
    "Best",
    "CostModel",
    "Drafting",
    "Experts",
    "Gain",
    "Gqa",
    "Hardware",
    "LinearStep",
    "MeasuredStep",
    "Mla",
    "ModelShape",
    "RooflineStep",
    "StepCost",
    "UnknownAttention",
    "eagle3_head",
    "experts_touched",
    "gain_over",
    "leviathan_speedup_iid",
    "tau_iid",
]
