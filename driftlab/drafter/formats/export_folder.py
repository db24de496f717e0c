"""The folder of an export: whose it is, and its files written in an order that no interruption makes wrong.

driftlab_export.json has the hash of the weights that were written. A folder whose weights are others, or whose config.json is
one of driftlab's own, holds a drafter that somebody put there since, and is not written over.
"""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from driftlab.drafter.formats.marker import MARKER, marker_values
from driftlab.drafter.formats.rules import check_folder
from driftlab.errors import DriftlabError
from driftlab.files import atomic, file_sha256, locked, sort_metadata, sweep, write_json

WEIGHTS, CONFIG, LOCK = "model.safetensors", "config.json", "driftlab_export.lock"
FORMAT_VERSION = 1


def check_free(path: Path) -> None:
    """Raise DriftlabError if ``path`` holds anything but an earlier export, or what an interrupted one has left."""
    if path.is_file():
        raise DriftlabError(f"{path} is a file: name a folder")
    if not path.is_dir():
        return
    names = {
        e.name for e in path.iterdir() if e.name != LOCK and not (e.name.startswith(".") and e.name.endswith(".tmp"))
    }
    strange = sorted(names - {MARKER, WEIGHTS, CONFIG})
    if names and (MARKER not in names or strange):
        raise DriftlabError(
            f"{path} holds {', '.join(strange or sorted(names))}, which no export wrote: choose another folder"
        )
    if names:
        _check_own(path, _marker(path), names)


def _check_own(path: Path, marker: dict[str, Any], names: set[str]) -> None:
    version = marker.get("format_version")
    if version != FORMAT_VERSION:
        raise DriftlabError(f"{path} was exported by another version of driftlab ({version}): choose another folder")
    if CONFIG in names and _has_block(path / CONFIG):
        raise DriftlabError(
            f"{path} holds a drafter that was saved there (its config.json has a driftlab block), not the export that "
            f"{MARKER} speaks of: choose another folder, or remove it yourself"
        )
    begun = "weights" not in marker and CONFIG not in names  # an export that was interrupted before it had weights
    if WEIGHTS in names and not begun and file_sha256(path / WEIGHTS) != marker.get("weights"):
        raise DriftlabError(
            f"{path}/{WEIGHTS} is not what {MARKER} says was exported (another hash): choose another folder, or remove "
            "it yourself"
        )


def _marker(path: Path) -> dict[str, Any]:
    try:
        marker = json.loads((path / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DriftlabError(f"{path / MARKER} cannot be read ({error}): choose another folder") from error
    if not isinstance(marker, dict):
        raise DriftlabError(
            f"{path / MARKER} holds a {type(marker).__name__}, not what an export writes: choose another folder"
        )
    return marker


def _has_block(config: Path) -> bool:
    try:
        return "driftlab" in dict(json.loads(config.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError):
        return False  # no settings of a saved drafter; the hash of the weights decides


def write_folder(
    path: Path,
    form: str,
    settings: dict[str, Any],
    tensors: dict[str, Tensor],
    states: tuple[int, ...],
    told: dict[str, Any],
) -> None:
    """Write tensors, then settings. While the two do not belong together there is no config.json.

    Args:
        path: folder; made if need be.
        form: of the export.
        settings: config.json.
        tensors: model.safetensors.
        states: that the drafter reads, as boundaries.
        told: what else driftlab_export.json is to say.

    Raises:
        DriftlabError: the folder holds something else, cannot be written, or breaks a rule of the engine's loader.
    """
    version = {"format_version": FORMAT_VERSION, "driftlab_version": importlib.metadata.version("driftlab")}
    with locked(path / LOCK.removesuffix(".lock")):
        check_free(path)
        sweep(path)
        if not (path / MARKER).exists():
            write_json(path / MARKER, version)
        with atomic(path / WEIGHTS) as temporary:
            save_file(tensors, temporary, metadata={"format": "pt"})
            sort_metadata(temporary)
            weights = file_sha256(temporary)
            (path / CONFIG).unlink(missing_ok=True)
            write_json(path / MARKER, version)  # begun: from here to the next one no hash would be true
        write_json(path / MARKER, {**version, **marker_values(form, states, settings, weights), **told})
        write_json(path / CONFIG, settings)
        findings = check_folder(path, form)
        if findings:
            (path / CONFIG).unlink()
            raise DriftlabError(f"{path}: not finished, for it breaks rules of the loader: " + "; ".join(findings))
