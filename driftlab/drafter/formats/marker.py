"""driftlab_export.json: what an export of driftlab says of itself, beside the files that an engine reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from driftlab.drafter.formats.files import read_object
from driftlab.errors import DriftlabError
from driftlab.files import file_sha256

MARKER = "driftlab_export.json"
_WEIGHTS = "model.safetensors"
PROJECTS = {"vllm": "vLLM", "sglang": "SGLang", "speculators": "speculators", "safeailab": "SafeAILab"}
"""format of an export -> name in ``provenance.FORMATS``"""


@dataclass(frozen=True)
class Marker:
    """For which project an export was written, and which states it reads."""

    project: str
    states: tuple[int, ...]
    """boundaries; (): the target's final state"""
    layer_ids: tuple[int, ...] | None
    """the same as config.json has them, in the engine's counting; None: left out"""


def marker_values(form: str, states: tuple[int, ...], settings: dict[str, Any], weights: str) -> dict[str, Any]:
    """Return what an export writes of its format, its states and its weights (the sha256 of model.safetensors, in hex)."""
    return {"format": form, "states": list(states), "layer_ids": _written_ids(settings), "weights": weights}


def read_marker(raw: Any, notes: list[str]) -> Marker | None:
    """Return what driftlab_export.json says; None if there is none, if it names no format that is known, or if it was written
    beside other weights, which is added to ``notes``.

    Raises:
        DriftlabError: it is broken, or config.json has other layer ids than were written.
    """
    values = read_object(raw.folder, MARKER) or {}
    project, states, ids = PROJECTS.get(str(values.get("format"))), values.get("states"), values.get("layer_ids")
    if project is None or not isinstance(states, list):
        return None
    for name, numbers in (("states", states), ("layer_ids", ids or [])):
        if not _ascend(numbers):
            raise DriftlabError(f"{MARKER}: {name} is {numbers!r}, not ascending whole numbers: export it again")
    if values.get("weights") is not None and values["weights"] != _weights_digest(raw):
        notes.append(
            f"{MARKER}: not read, for it was written with other weights than are read here; export again, or remove it"
        )
        return None
    found = _written_ids(raw.config)
    if found != ids:
        raise DriftlabError(
            f"config.json has layer ids {found}, but {MARKER} says that {ids} were written, for states {states}: "
            "export it again, or pass format= for the project whose file it is now"
        )
    return Marker(project, tuple(states), None if ids is None else tuple(ids))


def _ascend(numbers: Any) -> bool:
    whole = isinstance(numbers, list) and all(type(number) is int and number >= 0 for number in numbers)
    return whole and numbers == sorted(set(numbers))


def _weights_digest(raw: Any) -> str | None:
    """Return the sha256 of model.safetensors; None if the tensors are read from other files."""
    path = raw.folder.find(_WEIGHTS) if raw.files == (_WEIGHTS,) else None
    return None if path is None else file_sha256(path)


def _written_ids(settings: dict[str, Any]) -> list[int] | None:
    name, block = "eagle_aux_hidden_state_layer_ids", settings.get("eagle_config")
    return settings.get(name) or (block.get(name) if isinstance(block, dict) else None)
