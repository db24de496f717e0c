"""The recorded target pass: tokens, aux states, last hidden state. All that is measured is computed from it.

A trajectory is a folder: ``trajectory.json`` (what was recorded and how), ``piece-00000.safetensors`` ... (some sequences
each, written whole as they are finished), and, beside the folder, the target's embedding, head and final-norm gain in
``head-<fingerprint>.safetensors``. Sequences are read by memory map (:mod:`driftlab.pieces`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int

from driftlab.errors import DriftlabError
from driftlab.pieces import (
    piece_entries,
    piece_is_whole,
    piece_path,
    read_part,
    read_sequence,
    read_trajectory_json,
)
from driftlab.recorded import Batch, Entry, Recorded, TargetHead, TargetSpec, open_recorded


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
        values = read_trajectory_json(path / "trajectory.json")
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
        return read_sequence(self._file(entry.piece), entry, piece_path(self.path, entry.piece), self._seen)

    def tokens(self, index: int) -> Int[Tensor, " pos"]:
        """Read the tokens of one sequence, without its states."""
        entry = self.entries[index]
        path = piece_path(self.path, entry.piece)
        return read_part(self._file(entry.piece), entry, "tokens", path, self._seen).long()

    @property
    def _seen(self) -> set[tuple[int, int, str]]:
        """Parts whose checksum was looked at: once a process is enough."""
        return self._opened.setdefault("seen", set())

    def _file(self, piece: int) -> Any:
        if piece not in self._opened:
            self._opened[piece] = open_recorded(piece_path(self.path, piece))
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
