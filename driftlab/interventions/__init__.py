"""Interventions on a drafter, per draft depth: what happens to drafts if one thing inside is changed.

Each is laid on for one ``with`` block, composes with the others, and leaves the drafter as it was; see ``interventions.base``.
"""

from driftlab.interventions.base import Intervention, OnAttention, intervened, key_of
from driftlab.interventions.keys import LogNTemperature, OwnKeyAblation, SinkAblation
from driftlab.interventions.parsing import INTERVENTIONS, forms, parse_intervention
from driftlab.interventions.pins import AttentionPin, PinReport
from driftlab.interventions.states import (
    AuxScale,
    DirectionSwap,
    GainRemoved,
    HeldFeedback,
    MagnitudePin,
    Noise,
    OnFeedback,
    TorchHook,
)
from driftlab.interventions.windows import DraftWindow

__all__ = [
    "INTERVENTIONS",
    "AttentionPin",
    "AuxScale",
    "DirectionSwap",
    "DraftWindow",
    "GainRemoved",
    "HeldFeedback",
    "Intervention",
    "LogNTemperature",
    "MagnitudePin",
    "Noise",
    "OnAttention",
    "OnFeedback",
    "OwnKeyAblation",
    "PinReport",
    "SinkAblation",
    "TorchHook",
    "forms",
    "intervened",
    "key_of",
    "parse_intervention",
]
