"""The recorded target pass: tokens, aux states, last hidden state. All that is measured is computed from it.

A trajectory is a folder: ``trajectory.json`` (what was recorded and how), ``piece-00000.safetensors`` ... (some sequences
each, written whole as they are finished), and, beside the folder, the target's embedding, head and final-norm gain in
``head-<fingerprint>.safetensors``. Sequences are stored end to end without padding and read by memory map.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from driftlab.errors import DriftlabError
from driftlab.files import atomic, check_sealed, read_json, sealed, sort_metadata, write_json
from driftlab.sealed import KEY, check, crc, metadata_crc, open_tensors, save_sealed, sealed_tensors
from driftlab.segments import Starts, answer_starts

FORMAT_VERSION = 1
_VOCAB_BLOCK = 8192


@dataclass(frozen=True, kw_only=True)
class TargetSpec:
    """Shapes and identity of a target: what a drafter has to know of it."""

    name: str
    """how it was asked for: a known name, a Hugging Face id, or a folder's name"""
    label: str
    """what to call it wherever a number stands, e.g. with its quantisation"""
    fingerprint: str
    """hash of the weights' identity"""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_type: str
    max_positions: int
    eos_ids: tuple[int, ...]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TargetSpec:
        """Rebuild from ``dataclasses.asdict``."""
        return cls(**{**values, "eos_ids": tuple(values["eos_ids"])})


@dataclass(frozen=True)
class TargetHead:
    """The target's tables: ``embed [vocab d_target]``, ``lm_head [vocab d_target]``, ``norm_weight [d_target]``.

    ``lm_head`` reads states *after* the final norm; ``norm_weight`` is that norm's gain.
    """

    embed: Float[Tensor, "vocab d_target"]
    lm_head: Float[Tensor, "vocab d_target"]
    norm_weight: Float[Tensor, " d_target"]

    def logits(self, last_hidden: Float[Tensor, "*batch d_target"]) -> Float[Tensor, "*batch vocab"]:
        """The target's logits of post-norm states, in float32."""
        return torch.nn.functional.linear(last_hidden.float(), self.lm_head.float())

    def lse(self, last_hidden: Float[Tensor, "*batch d_target"]) -> Float[Tensor, "*batch"]:
        """Log-sum-exp of :meth:`logits`, widened to float32 block by block of the vocabulary.

        (Of half-precision logits it is off by up to a tenth where they are large, and probabilities with it.)
        """
        wide, blocks = last_hidden.float(), self.lm_head.split(_VOCAB_BLOCK)
        parts = [torch.nn.functional.linear(wide, rows.float()).logsumexp(-1) for rows in blocks]
        return torch.stack(parts).logsumexp(0)

    def save(self, path: Path) -> None:
        """Write the tables; a tied head is written once."""
        tensors = {"embed": self.embed.cpu().contiguous(), "norm_weight": self.norm_weight.cpu().contiguous()}
        if self.lm_head.data_ptr() != self.embed.data_ptr() and not torch.equal(self.lm_head, self.embed):
            tensors["lm_head"] = self.lm_head.cpu().contiguous()
        save_sealed(path, tensors, {"driftlab_format_version": str(FORMAT_VERSION)})

    @classmethod
    def load(cls, path: Path) -> TargetHead:
        """Read what :meth:`save` wrote. Raises DriftlabError if the file is missing, broken or of another version."""
        with _open(path) as file:
            tensors = sealed_tensors(file, path, "remove it and run the same record command again")
        shapes = [tuple(tensors[name].shape) if name in tensors else () for name in ("embed", "norm_weight")]
        if (
            len(shapes[0]) != 2
            or shapes[1] != shapes[0][1:]
            or tensors.get("lm_head", tensors["embed"]).shape != shapes[0]
        ):
            told = {name: list(tensor.shape) for name, tensor in tensors.items()}
            raise DriftlabError(
                f"{path} does not hold embed, lm_head [vocab d_target] and norm_weight [d_target], but {told}"
            )
        return cls(tensors["embed"], tensors.get("lm_head", tensors["embed"]), tensors["norm_weight"])


@dataclass(frozen=True)
class Recorded:
    """One recorded sequence, unpadded. ``tokens [pos]``; the answer starts at ``prompt_length``.

    ``finish``: "stop" (the last token is EOS) or "length". ``lse [pos]``: log-sum-exp of the target's logits at each
    answer row (NaN below row P - 1), so that p(x) = exp(logit_x - lse) is exact for any subset of the vocabulary.
    """

    id: str
    category: str
    prompt_length: int
    finish: str
    tokens: Int[Tensor, " pos"]
    aux: Float[Tensor, "pos aux d_target"]
    last_hidden: Float[Tensor, "pos d_target"]
    lse: Float[Tensor, " pos"]


@dataclass(frozen=True)
class Batch:
    """Some sequences, right-padded to the longest. ``lengths``, ``prompt_lengths [batch]`` count tokens."""

    tokens: Int[Tensor, "batch pos"]
    aux: Float[Tensor, "batch pos aux d_target"]
    last_hidden: Float[Tensor, "batch pos d_target"]
    lse: Float[Tensor, "batch pos"]
    lengths: Int[Tensor, " batch"]
    prompt_lengths: Int[Tensor, " batch"]
    ids: tuple[str, ...]
    finish: tuple[str, ...]
    sinks: tuple[int, ...]
    aux_layers: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def valid(self) -> Bool[Tensor, "batch pos"]:
        """True where there is a token."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.lengths[:, None]

    @property
    def starts(self) -> Starts:
        """Every answer row t, P - 1 <= t <= T - 2, with the segments of the key rows."""
        return answer_starts(self.prompt_lengths, self.lengths, self.sinks, self.ids)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Batch:
        """Move to a device. If a ``dtype`` is given the aux states are cast to it; last_hidden, which the target's
        probabilities are made from, is never made narrower (in half precision they are off by several per cent).
        """
        moved = {
            f.name: getattr(self, f.name).to(device)
            for f in dataclasses.fields(self)
            if isinstance(getattr(self, f.name), Tensor)
        }
        if dtype is not None:
            last = moved["last_hidden"]
            moved |= {"aux": moved["aux"].to(dtype), "last_hidden": last.to(torch.promote_types(last.dtype, dtype))}
        return dataclasses.replace(self, **moved)


@dataclass(frozen=True)
class Entry:
    """Where a sequence lies: its place in a piece, and what is known of it without reading its states."""

    id: str
    category: str
    prompt_length: int
    length: int
    finish: str
    piece: int
    offset: int
    crc: dict[str, int] | None = field(default=None, repr=False, compare=False)
    """CRC-32 of its part of every tensor; recordings of earlier versions have none"""


_PARTS = ("tokens", "aux", "last_hidden", "lse")
_AGAIN = "remove it and run the same record command again"
_TRAJECTORY_KEYS = ("pieces", "fingerprint", "target", "aux_layers", "settings", "sink", "head")


@dataclass(frozen=True)
class Trajectory:
    """A recorded set of sequences, in the order of the prompts.

    ``trajectory[i]`` reads one sequence, ``batches()`` padded batches, ``subset(indices)`` is a view. ``settings`` says
    how it was recorded; ``sinks`` are the sink positions; ``head`` the target's tables, so that nothing downstream
    needs the target.
    """

    path: Path
    spec: TargetSpec
    aux_layers: tuple[int, ...]
    settings: dict[str, Any]
    sinks: tuple[int, ...]
    sink_report: dict[str, Any]
    entries: tuple[Entry, ...]
    head_path: Path
    _opened: dict[int | str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def open(cls, path: str | Path) -> Trajectory:
        """Open a finished recording. Raises DriftlabError if it is missing, unfinished, broken or of another version."""
        path = Path(path)
        if not (path / "trajectory.json").is_file():
            raise DriftlabError(f"{path} {_what_it_is(path)}")
        values = _trajectory_json(path / "trajectory.json")
        entries = [e for piece in range(values["pieces"]) for e in piece_entries(piece_path(path, piece), piece)]
        foreign = [i for i in range(values["pieces"]) if not piece_is_whole(piece_path(path, i), values["fingerprint"])]
        if foreign:
            raise DriftlabError(
                f"{piece_path(path, foreign[0])} belongs to another recording or another place: run the same record "
                "command again, it makes what is missing"
            )
        return cls(
            path=path,
            spec=TargetSpec.from_dict(values["target"]),
            aux_layers=tuple(values["aux_layers"]),
            settings=values["settings"],
            sinks=tuple(values["sink"]["positions"]),
            sink_report=values["sink"],
            entries=tuple(entries),
            head_path=path.parent / values["head"],
        )

    @property
    def head(self) -> TargetHead:
        """The target's embedding, head and final-norm gain. Read once, shared by all views."""
        if "head" not in self._opened:
            self._opened["head"] = TargetHead.load(self.head_path)
        return self._opened["head"]

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Recorded]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Recorded:
        entry = self.entries[index]
        return _read(self._file(entry.piece), entry, piece_path(self.path, entry.piece), self._seen)

    def tokens(self, index: int) -> Int[Tensor, " pos"]:
        """Read the tokens of one sequence, without its states."""
        entry = self.entries[index]
        path = piece_path(self.path, entry.piece)
        return _read_part(self._file(entry.piece), entry, "tokens", path, self._seen).long()

    @property
    def _seen(self) -> set[tuple[int, int, str]]:
        """Parts whose checksum was looked at: once a process is enough."""
        return self._opened.setdefault("seen", set())

    def _file(self, piece: int) -> Any:
        if piece not in self._opened:
            self._opened[piece] = _open(piece_path(self.path, piece))
        return self._opened[piece]

    def subset(self, indices: Sequence[int]) -> Trajectory:
        """Return a view of some sequences, in the given order."""
        return dataclasses.replace(self, entries=tuple(self.entries[i] for i in indices))

    def with_sinks(self, sinks: Sequence[int]) -> Trajectory:
        """Return a view whose sink positions are ``sinks``, in place of those found in the target.

        Raises DriftlabError unless they are one or more positions that every prompt has: a sink that is not there would
        get a mass of 0, which looks like a measurement.
        """
        shared = min(entry.prompt_length for entry in self.entries)
        sinks = list(sinks)
        if not sinks or any(type(p) is not int or not 0 <= p < shared for p in sinks):
            raise DriftlabError(f"sinks {sinks}: give one or more positions in 0..{shared - 1}, which all prompts have")
        return dataclasses.replace(self, sinks=tuple(sinks))

    @property
    def answer_tokens(self) -> int:
        """Number of answer tokens in all."""
        return sum(entry.length - entry.prompt_length for entry in self.entries)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Read some sequences into one right-padded batch."""
        sequences = [self[i] for i in indices]
        pad = functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
        return Batch(
            tokens=pad([s.tokens for s in sequences]),
            aux=pad([s.aux for s in sequences]),
            last_hidden=pad([s.last_hidden for s in sequences]),
            lse=pad([s.lse for s in sequences], padding_value=float("nan")),
            lengths=torch.tensor([len(s.tokens) for s in sequences]),
            prompt_lengths=torch.tensor([s.prompt_length for s in sequences]),
            ids=tuple(s.id for s in sequences),
            finish=tuple(s.finish for s in sequences),
            sinks=self.sinks,
            aux_layers=self.aux_layers,
        )

    def batches(self, max_tokens: int = 2048) -> Iterator[Batch]:
        """Yield batches in order, each of at most ``max_tokens`` padded tokens (but at least one sequence)."""
        group: list[int] = []
        longest = 0
        for index, entry in enumerate(self.entries):
            longest = max(longest, entry.length)
            if group and longest * (len(group) + 1) > max_tokens:
                yield self.batch(group)
                group, longest = [], entry.length
            group.append(index)
        if group:
            yield self.batch(group)


def _what_it_is(path: Path) -> str:
    """Say of a path without trajectory.json whether it is missing, empty, unfinished or something else."""
    again = "run the same record command again"
    if not path.exists():
        return "is not a recording: there is no such folder; make one with driftlab record, or look at the name"
    if not path.is_dir():
        return "is not a recording: it is a file, and a recording is a folder"
    if pieces := len(list(path.glob("piece-*.safetensors"))):
        return f"holds {pieces} pieces of an unfinished recording: {again}"
    found = sorted(entry.name for entry in path.iterdir())
    if not found:
        return f"is not a recording: the folder is empty (stopped before its first piece?); {again}"
    few = ", ".join(found[:3])
    return f"is not a recording: it has no trajectory.json and no piece, but {few}; look at the name, or {again}"


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
    with _open(path) as file:
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
    return [_read(_open(path), entry, path, set()) for entry, path in zip(entries, paths, strict=True)]


def _read(file: Any, entry: Entry, path: Path, seen: set[tuple[int, int, str]]) -> Recorded:
    values = {name: _read_part(file, entry, name, path, seen) for name in _PARTS}
    values["tokens"] = values["tokens"].long()
    return Recorded(entry.id, entry.category, entry.prompt_length, entry.finish, **values)


def _read_part(file: Any, entry: Entry, name: str, path: Path, seen: set[tuple[int, int, str]]) -> Tensor:
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
        with _open(path) as file:
            metadata = file.metadata()
            return metadata.get("fingerprint") == fingerprint and metadata.get("piece") == path.stem
    except DriftlabError:
        return False


def check_version(version: Any, path: Path) -> None:
    """Raise DriftlabError unless ``version`` is the one that this code reads."""
    if str(version) != str(FORMAT_VERSION):
        raise DriftlabError(
            f"{path} has trajectory format version {version}; this driftlab reads {FORMAT_VERSION}: "
            "update driftlab, or record again"
        )


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


def _trajectory_json(path: Path) -> dict[str, Any]:
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


def _open(path: Path) -> Any:
    """Open a safetensors file of ours by memory map, its version checked."""
    file = open_tensors(path, "it belongs to a recording: keep folder and head file together, or record again")
    check_version((file.metadata() or {}).get("driftlab_format_version"), path)
    return file
