"""A recording on disk: ``piece-00000.safetensors`` ..., each written whole, and ``trajectory.json``, which completes it.

Sequences are stored end to end without padding; a piece's index says where each lies and holds a CRC-32 of every part, so that
one sequence is read, and checked, without the others.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from driftlab.errors import DriftlabError
from driftlab.files import atomic, check_sealed, read_json, sealed, sort_metadata, write_json
from driftlab.recorded import FORMAT_VERSION, Entry, Recorded, TargetSpec, check_version, open_recorded
from driftlab.sealed import KEY, check, crc, metadata_crc

_PARTS = ("tokens", "aux", "last_hidden", "lse")
_AGAIN = "remove it and run the same record command again"
_TRAJECTORY_KEYS = ("pieces", "fingerprint", "target", "aux_layers", "settings", "sink", "head")


def piece_path(folder: Path, piece: int) -> Path:
    """Path of piece number ``piece``."""
    return folder / f"piece-{piece:05d}.safetensors"


def write_piece(path: Path, sequences: Sequence[Recorded], fingerprint: str) -> None:
    """Write some sequences as one piece, whole or not at all. ``fingerprint`` ties it to its recording."""
    offsets, total = [], 0
    for sequence in sequences:
        offsets.append(total)
        total += len(sequence.tokens)
    tensors = {
        "tokens": torch.cat([s.tokens.to(torch.int32) for s in sequences]),
        "aux": torch.cat([s.aux for s in sequences]),
        "last_hidden": torch.cat([s.last_hidden for s in sequences]),
        "lse": torch.cat([s.lse for s in sequences]),
    }
    index = [
        {
            "id": s.id,
            "category": s.category,
            "prompt_length": s.prompt_length,
            "length": len(s.tokens),
            "finish": s.finish,
            "offset": offset,
            "crc": {name: crc(name, tensor[offset : offset + len(s.tokens)]) for name, tensor in tensors.items()},
        }
        for s, offset in zip(sequences, offsets, strict=True)
    ]
    metadata = {
        "driftlab_format_version": str(FORMAT_VERSION),
        "fingerprint": fingerprint,
        "piece": path.stem,
        "sequences": json.dumps(index),
    }
    # of the metadata alone: the parts have numbers of their own, so that one is read without the others
    metadata[KEY] = f"{metadata_crc(metadata):08x}"
    with atomic(path) as temporary:
        save_file({name: t.contiguous().cpu() for name, t in tensors.items()}, temporary, metadata=metadata)
        sort_metadata(temporary)


def piece_entries(path: Path, piece: int) -> list[Entry]:
    """Read a piece's index. Raises DriftlabError if the piece is missing or broken."""
    with open_recorded(path) as file:
        metadata = file.metadata()
        check(metadata.get(KEY, "") in ("", f"{metadata_crc(metadata):08x}"), path, _AGAIN)
        try:
            entries = [Entry(piece=piece, **values) for values in json.loads(metadata["sequences"])]
            rows = {file.get_slice(name).get_shape()[0] for name in _PARTS}
            sound = len(rows) == 1 and all(_is_sound(entry, min(rows)) for entry in entries)
        except (KeyError, TypeError, ValueError, IndexError, RecursionError, SafetensorError) as error:
            raise DriftlabError(f"{path}: its index cannot be read ({error!r}): {_AGAIN}") from error
    if not sound or not entries:
        raise DriftlabError(f"{path}: its index does not fit its tensors: {_AGAIN}")
    return entries


def _is_sound(entry: Entry, rows: int) -> bool:
    """Whether an index entry is one of a sequence that lies within ``rows`` rows."""
    words = all(isinstance(word, str) for word in (entry.id, entry.category)) and entry.finish in ("stop", "length")
    numbers = (entry.offset, entry.length, entry.prompt_length)
    if not words or any(type(number) is not int for number in numbers):
        return False
    told = entry.crc is None or (isinstance(entry.crc, dict) and set(entry.crc) == set(_PARTS))
    return told and 0 <= entry.offset <= rows - entry.length and 1 <= entry.prompt_length <= entry.length


def read_entries(folder: Path, entries: Sequence[Entry]) -> list[Recorded]:
    """Read sequences of a recording that need not be finished."""
    paths = [piece_path(folder, entry.piece) for entry in entries]
    return [read_sequence(open_recorded(path), entry, path, set()) for entry, path in zip(entries, paths, strict=True)]


def read_sequence(file: Any, entry: Entry, path: Path, seen: set[tuple[int, int, str]]) -> Recorded:
    """Read one sequence from an open piece."""
    values = {name: read_part(file, entry, name, path, seen) for name in _PARTS}
    values["tokens"] = values["tokens"].long()
    return Recorded(entry.id, entry.category, entry.prompt_length, entry.finish, **values)


def read_part(file: Any, entry: Entry, name: str, path: Path, seen: set[tuple[int, int, str]]) -> Tensor:
    """Read a sequence's part of a tensor; the first time, check it."""
    part = file.get_slice(name)[entry.offset : entry.offset + entry.length]
    key = (entry.piece, entry.offset, name)
    if entry.crc is not None and key not in seen:
        check(crc(name, part) == entry.crc[name], path, _AGAIN, f"{name} of sequence {entry.id!r}")
        seen.add(key)
    return part


def piece_is_whole(path: Path, fingerprint: str) -> bool:
    """Whether ``path`` is a readable piece of the recording with this fingerprint."""
    if not path.is_file():
        return False
    try:
        with open_recorded(path) as file:
            metadata = file.metadata()
            return metadata.get("fingerprint") == fingerprint and metadata.get("piece") == path.stem
    except DriftlabError:
        return False


def finish_recording(
    path: Path,
    *,
    spec: TargetSpec,
    aux_layers: Sequence[int],
    settings: dict[str, Any],
    sink: dict[str, Any],
    pieces: int,
    head: str,
    fingerprint: str,
    provenance: dict[str, Any],
) -> None:
    """Write trajectory.json, which makes the recording complete."""
    write_trajectory_json(
        path,
        {
            "format_version": FORMAT_VERSION,
            "target": dataclasses.asdict(spec),
            "aux_layers": list(aux_layers),
            "settings": settings,
            "sink": sink,
            "pieces": pieces,
            "head": head,
            "fingerprint": fingerprint,
            "provenance": provenance,
        },
    )


_LEFT_OUT = ("provenance",)
"""not in the checksum: it holds the time, and two recordings that are equal have equal numbers"""


def write_trajectory_json(path: Path, values: dict[str, Any]) -> None:
    """Write a recording's trajectory.json with its checksum."""
    write_json(path / "trajectory.json", sealed(values, _LEFT_OUT))


def read_trajectory_json(path: Path) -> dict[str, Any]:
    """Read it, and check all that is used of it."""
    values = read_json(path)
    if not isinstance(values, dict):
        raise DriftlabError(f"{path} holds a {type(values).__name__}, not a table of settings: {_AGAIN}")
    check_version(values.get("format_version"), path)
    if lacking := [name for name in _TRAJECTORY_KEYS if name not in values]:
        raise DriftlabError(f"{path} has no {', '.join(lacking)}: record again")
    check_sealed(values, path, _AGAIN, _LEFT_OUT)
    sink, head, pieces = values["sink"], values["head"], values["pieces"]
    wrong = {
        "target": _wrong_in_spec(values["target"]),
        "aux_layers": not _counts(values["aux_layers"]),
        "settings": not isinstance(values["settings"], dict),
        "sink": not isinstance(sink, dict) or not _counts(sink.get("positions")) or not sink["positions"],
        "pieces": type(pieces) is not int or pieces < 1,
        # a name that leads elsewhere would have another file read
        "head": not isinstance(head, str) or head in ("", ".", "..") or "\0" in head or Path(head).name != head,
        "fingerprint": not isinstance(values["fingerprint"], str),
    }
    if found := next((name for name, bad in wrong.items() if bad), None):
        told = f"{wrong[found]} of target" if isinstance(wrong[found], str) else found
        raise DriftlabError(f"{path}: {told} cannot be {str(values[found])[:80]!r}: {_AGAIN}")
    return values


def _counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _wrong_in_spec(values: Any) -> str | bool:
    """Name the field that is missing, unknown, or not of its kind; False if there is none."""
    kinds = {f.name: f.type for f in dataclasses.fields(TargetSpec)}
    if not isinstance(values, dict) or set(values) != set(kinds):
        return True
    for name, kind in kinds.items():
        value = values[name]
        right = {
            "str": isinstance(value, str),
            "int": type(value) is int and value >= 0,
            "float": type(value) in (int, float) and 0 <= value < float("inf"),
            "tuple[int, ...]": _counts(value),
        }[kind]
        if not right:
            return name
    return False
