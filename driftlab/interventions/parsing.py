"""Interventions from text: KIND[:VALUE...][:NAME=VALUE...][@DEPTHS], as ``Intervention.key`` writes them."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from driftlab.errors import DriftlabError
from driftlab.interventions.base import Intervention
from driftlab.interventions.keys import LogNTemperature, OwnKeyAblation, SinkAblation
from driftlab.interventions.pins import AttentionPin
from driftlab.interventions.states import (
    AuxScale,
    DirectionSwap,
    GainRemoved,
    HeldFeedback,
    MagnitudePin,
    Noise,
    TorchHook,
)
from driftlab.interventions.windows import DraftWindow

INTERVENTIONS: dict[str, type[Intervention]] = {
    cls.kind: cls
    for cls in (
        *(Noise, MagnitudePin, DirectionSwap, HeldFeedback, AuxScale, GainRemoved),
        *(AttentionPin, SinkAblation, OwnKeyAblation, LogNTemperature, DraftWindow, TorchHook),
    )
}


def parse_intervention(text: str) -> Intervention:
    """Return the intervention that a text names, e.g. "noise:hidden:0.25", "magnitude:fused@2-4", "sink:drop:layers=0".

    Raises:
        DriftlabError: a text that is none; it lists the forms.
    """
    body, _, depths = text.strip().partition("@")
    kind, *words = body.split(":")
    cls = INTERVENTIONS.get(kind)
    if re.search(r"(?<![eE])\+", text) and cls is not TorchHook:
        raise DriftlabError(
            f"intervention {text!r}: several at once are joined by ' + ', with spaces around the plus sign"
        )
    if cls is None:
        raise DriftlabError(f"intervention {text!r}: there is no kind {kind!r}. {forms()}")
    settings: dict[str, Any] = {"depths": depths} if depths else {}
    if cls is TorchHook:
        if len(words) != 2:
            raise DriftlabError(f"intervention {text!r} is not {' or '.join(cls.forms)}")
        return TorchHook(words[0], words[1], **settings)
    by_place, by_name = [w for w in words if "=" not in w], [w for w in words if "=" in w]
    named = [(name, value) for name, _, value in (word.partition("=") for word in by_name)]
    wanted = [field for field in dataclasses.fields(cls) if field.name in cls.places]
    needed = sum(field.default is dataclasses.MISSING for field in wanted)
    known = {field.name for field in dataclasses.fields(cls) if field.repr}
    pairs = [*zip(cls.places, by_place, strict=False), *named]
    settings |= {name: _value(name, value) for name, value in pairs}
    unknown = sorted(set(settings) - known)
    doubled = len(settings) != len(pairs) + bool(depths)
    if unknown or doubled or not needed <= len(by_place) <= len(cls.places):
        why = f"there is no setting {unknown[0]}" if unknown else "a value too many, too few, or twice"
        raise DriftlabError(
            f"intervention {text!r} ({why}) is not {' or '.join(cls.forms)}, with @DEPTHS"
            + (" and :layers=N,... at the end" if "layers" in known else "")
        )
    return cls(**settings)


def forms() -> str:
    """Return how every intervention is written, for messages and help."""
    every = [form for cls in INTERVENTIONS.values() for form in cls.forms]
    return (
        f"Write one of: {'; '.join(every)}. Each may end in @DEPTHS (@3, @2-4, @2- for 2 and deeper, @1,3); those on attention "
        "also take :layers=N,..."
    )


def _value(name: str, text: str) -> Any:
    if name == "layers":
        words = [word.strip() for word in text.split(",")]
        if wrong := [word for word in words if not word.isdecimal()]:
            raise DriftlabError(f"layers={text}: {wrong[0]!r} is no number of a layer; write layers=0,2, 0 the first")
        return tuple(map(int, words))
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
