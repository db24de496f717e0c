"""Opening a checkpoint, a folder, one file or a hub id, without reading its data.

    raw = open_checkpoint("path/to/folder")                  or a .safetensors / .bin / .pt file, or "owner/name"
    raw.label, raw.config, raw.files, raw.notes
    raw.names                    from the index alone
    raw.shapes                   from the headers; here the whole checkpoint is checked, see below
    raw.tensor(name)             one tensor is read (from the hub: its file is downloaded)
    raw.only(keep)               the same checkpoint, seen through a filter of names: the MTP head of a sharded target, whose
                                 other shards are neither opened nor downloaded, nor need they be there

Weights are looked for as model.safetensors, model.safetensors.index.json with its shards, pytorch_model.bin,
pytorch_model.bin.index.json with its shards, training_state.pt (SpecForge, under ``draft_state_dict``), in this order; if there
are several, ``notes`` says which is read. An existing path wins over a hub id of the same name; "owner/name@revision" pins one.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from driftlab.drafter.formats import packed
from driftlab.drafter.formats.tensorfiles import Info, TensorFile, open_tensors, refuse_pointer
from driftlab.errors import DriftlabError
from driftlab.files import is_file, refuse_outside

WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "training_state.pt",
)
"""where weights are looked for, in this order"""
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
_SHARD = re.compile(r"-\d+-of-(\d+)\.\w+$")


class Folder(ABC):
    """Where the files of a checkpoint lie."""

    path: Path
    """the local folder"""
    label: str
    """what it is called in words"""

    @property
    def notes(self) -> tuple[str, ...]:
        """What is worth knowing of it, in words."""
        return ()

    @abstractmethod
    def find(self, name: str) -> Path | None:
        """Return a file that can be read here, None if there is none of that name."""

    def has(self, name: str) -> bool:
        """Whether there is such a file; it need not be here yet."""
        return name in self.listing()

    @abstractmethod
    def listing(self) -> list[str]:
        """Names of all files."""

    @abstractmethod
    def tensors(self, name: str) -> TensorFile:
        """Open a file of tensors that there is said to be. Raises DriftlabError if there is none of that name."""


class LocalFolder(Folder):
    """A folder of this machine."""

    def __init__(self, path: Path) -> None:
        self.path, self.label = path, str(path)

    def find(self, name: str) -> Path | None:
        """See :class:`Folder`."""
        if not is_file(self.path / name):
            return None
        refuse_outside(self.path, self.path / name)
        return self.path / name

    def listing(self) -> list[str]:
        """See :class:`Folder`."""
        return sorted(entry.name for entry in self.path.iterdir() if entry.is_file())

    def tensors(self, name: str) -> TensorFile:
        """See :class:`Folder`."""
        path = self.find(name)
        if path is None:
            raise DriftlabError(
                f"{self.path / name} does not exist, though the index names it: copy or download it too"
            )
        return open_tensors(path)


@dataclass(frozen=True)
class RawCheckpoint:
    """A checkpoint as its files have it. ``shapes`` and ``tensor`` leave out fp8 scales: such weights are multiplied out."""

    folder: Folder
    label: str
    config: dict[str, Any]
    """config.json; empty if there is none and none was required"""
    files: tuple[str, ...]
    """names of the files of weights"""
    where: dict[str, str]
    """raw name -> file; of what ``only`` keeps"""
    keep: Callable[[str], bool] | None = None
    found: tuple[str, ...] = ()
    """notes of finding the files"""
    opened: dict[str, TensorFile] = field(default_factory=dict, repr=False)

    @property
    def path(self) -> Path:
        """The local folder; of a hub id, its snapshot in the cache."""
        return self.folder.path

    @property
    def names(self) -> tuple[str, ...]:
        """Raw names, from the index alone where there is one; without those of fp8 scales."""
        scales = {name + packed.SCALE for name in self.where}
        return tuple(name for name in self.where if name not in scales)

    def only(self, keep: Callable[[str], bool]) -> RawCheckpoint:
        """Return the checkpoint with only those raw names for which ``keep`` is true."""
        where = {name: file for name, file in self.where.items() if keep(name) or _scale_of_kept(name, keep)}
        files = tuple(file for file in self.files if file in set(where.values()))
        both = keep if self.keep is None else lambda name: self.keep(name) and keep(name)
        return RawCheckpoint(self.folder, self.label, self.config, files, where, both, self.found, self.opened)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Raw name -> shape, from the headers.

        Raises:
            DriftlabError: a file that is missing or broken, an index that does not fit its shards, a tensor that two files
                hold, a quantised checkpoint or an adapter.
        """
        return self._checked[0]

    @property
    def notes(self) -> list[str]:
        """What was assumed or is worth knowing, in words."""
        return [*self.found, *self._checked[1]]

    def tensor(self, name: str) -> Tensor:
        """Read one tensor, on the CPU, in the dtype of the file; fp8 weights multiplied out, in float32."""
        if name not in self.shapes:
            raise DriftlabError(f"{self.label} has no tensor {name}")
        tensor = self._read(name)
        if name + packed.SCALE not in self._infos:
            return tensor
        return packed.multiplied_out(
            tensor, self._read(name + packed.SCALE), packed.block_size(self.config, name, self.label)
        )

    def _read(self, name: str) -> Tensor:
        return self._open(self.where.get(name) or self._extra[name]).tensor(name)

    def _open(self, file: str) -> TensorFile:
        if file not in self.opened:
            self.opened[file] = self.folder.tensors(file)
        return self.opened[file]

    @cached_property
    def _extra(self) -> dict[str, str]:
        """Tensors that a shard holds and the index does not name, by file."""
        extra: dict[str, str] = {}
        for file in self.files:
            for name in self._open(file).infos:
                if name in self.where and self.where[name] != file:
                    raise DriftlabError(
                        f"{self.label}: {name} is in {self.where[name]} and in {file}: keep the right one"
                    )
                if name not in self.where and (self.keep is None or self.keep(name)):
                    if name in extra:
                        raise DriftlabError(
                            f"{self.label}: {name} is in {extra[name]} and in {file}: keep the right one"
                        )
                    extra[name] = file
        return extra

    @cached_property
    def _infos(self) -> dict[str, Info]:
        for name, file in self.where.items():
            if name not in self._open(file).infos:
                raise DriftlabError(
                    f"{self.label}: the index says that {name} is in {file}, which does not hold it: the two are not "
                    "of one checkpoint, copy or download both again"
                )
        return {name: self._open(file).infos[name] for name, file in (self.where | self._extra).items()}

    @cached_property
    def _checked(self) -> tuple[dict[str, tuple[int, ...]], list[str]]:
        lora = next((name for name in self._infos if ".lora_" in name or name.startswith("lora_")), None)
        if lora is not None:
            raise DriftlabError(f"{self.label} is an adapter (it holds {lora}): merge it into its drafter first")
        beside = read_object(self.folder, "hf_quant_config.json")
        said = packed.said_quantised(self.config, beside)
        shapes, notes = packed.unpacked(self._infos, self.config, said, self.label, whole=self.keep is None)
        if self._extra:
            notes.append(f"tensors that the index does not name are read too, as engines do: {sorted(self._extra)[:4]}")
        return shapes, notes


def open_checkpoint(
    path_or_hub_id: str | Path, *, revision: str | None = None, need_config: bool = True
) -> RawCheckpoint:
    """Open a checkpoint; see the module for what is found where.

    Args:
        path_or_hub_id: folder, file, or "owner/name" of the hub, with "@revision" if wanted.
        revision: branch, tag or commit of a hub id.
        need_config: whether a missing config.json is an error.

    Raises:
        DriftlabError: there is no such checkpoint, or its files cannot be read as one; says which and what to do.
    """
    path = Path(path_or_hub_id).expanduser()
    if path.is_dir():
        _refuse_revision(path, revision)
        return _open_folder(LocalFolder(path), need_config=need_config)
    if path.is_file():
        _refuse_revision(path, revision)
        return _open_file(path, need_config=need_config)
    match = _HUB_ID.fullmatch(str(path_or_hub_id))
    if match is None or str(path_or_hub_id).endswith(_SUFFIXES):
        raise DriftlabError(
            f"{path_or_hub_id} does not exist: give a folder, a .safetensors, .bin or .pt file, or a hub id owner/name"
        )
    from driftlab.drafter.formats.hub import HubFolder

    if revision and match["revision"] and revision != match["revision"]:
        raise DriftlabError(f"{path_or_hub_id} names a revision and revision={revision!r} another: give one")
    return _open_folder(HubFolder(match["repo"], revision or match["revision"]), need_config=True)


def read_object(folder: Folder, name: str) -> dict[str, Any] | None:
    """Read a JSON object of a folder; None if there is no such file.

    Raises:
        DriftlabError: it is broken, not an object, or a Git LFS pointer.
    """
    path = folder.find(name)
    if path is None:
        return None
    refuse_pointer(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, a number of 5,000 digits, brackets without end
        raise DriftlabError(f"{path} is not valid JSON ({error}): correct it, or copy it again") from error
    if not isinstance(value, dict):
        raise DriftlabError(f"{path} holds a {type(value).__name__}, not an object with settings")
    return value


def _open_folder(folder: Folder, *, need_config: bool) -> RawCheckpoint:
    config = read_object(folder, "config.json")
    present = [name for name in WEIGHTS if folder.has(name)]
    if not present:
        raise DriftlabError(_no_weights(folder))
    if config is None and need_config:
        raise DriftlabError(
            f"{folder.label} has no config.json, which says how its tensors are meant: put it beside them"
        )
    notes = list(folder.notes)
    if len(present) > 1:
        notes.append(f"weights: {present[0]} is read; {', '.join(present[1:])} in the same folder is not")
    if folder.has("adapter_config.json"):
        notes.append(
            "adapter_config.json: an adapter of the target lies beside the drafter; if they were trained together, "
            "the drafter wants the states of the target with that adapter"
        )
    return _open_weights(folder, present[0], folder.label, config or {}, notes)


def _open_file(path: Path, *, need_config: bool) -> RawCheckpoint:
    shard = _SHARD.search(path.name)
    if shard and int(shard[1]) > 1:
        raise DriftlabError(
            f"{path} is one of {shard[1]} files of a checkpoint: give the folder, which has their index"
        )
    if not path.name.endswith(_SUFFIXES):
        raise DriftlabError(f"{path}: give the folder of a checkpoint, or its .safetensors, .bin or .pt file")
    refuse_pointer(path)
    folder = LocalFolder(path.parent)
    config = read_object(folder, "config.json")
    if config is None and need_config:
        raise DriftlabError(f"{path.parent} has no config.json, which says how {path.name} is meant: put it beside it")
    return _open_weights(folder, path.name, str(path), config or {}, [])


def _open_weights(folder: Folder, name: str, label: str, config: dict[str, Any], notes: list[str]) -> RawCheckpoint:
    if not name.endswith(".index.json"):
        opened = folder.tensors(name)
        where = dict.fromkeys(opened.infos, name)
        if not where:
            raise DriftlabError(f"{label}: {name} holds no tensors")
        return RawCheckpoint(folder, label, config, (name,), where, found=tuple(notes), opened={name: opened})
    where = (read_object(folder, name) or {}).get("weight_map")
    if not isinstance(where, dict) or not where or not all(isinstance(file, str) for file in where.values()):
        raise DriftlabError(f"{label}: {name} has no weight_map from tensors to files: copy or download it again")
    outside = next((file for file in where.values() if Path(file).name != file), None)
    if outside is not None:
        raise DriftlabError(f"{label}: {name} names {outside!r}, which is not a file of the same folder")
    return RawCheckpoint(folder, label, config, tuple(sorted(set(where.values()))), where, found=tuple(notes))


def _no_weights(folder: Folder) -> str:
    names = folder.listing()
    if "trajectory.json" in names or "recording.json" in names:
        return f"{folder.label} is a recording of a target, not a drafter"
    broken = [name for name in WEIGHTS if (folder.path / name).is_symlink() and not (folder.path / name).exists()]
    if broken:
        link = folder.path / broken[0]
        return f"{link} is a link to {link.readlink()}, which does not exist: copy or download that too"
    if "adapter_config.json" in names:
        return (
            f"{folder.label} is an adapter (LoRA), not a drafter: merge it into the drafter that it was trained on, "
            "and give the merged folder"
        )
    if any(name.endswith(".gguf") for name in names):
        return f"{folder.label} holds a GGUF file: drafters are read from safetensors or torch files, unquantised"
    weights = [name for name in names if name.endswith(_SUFFIXES)]
    if any(_SHARD.search(name) for name in weights):
        return f"{folder.label} has files of a sharded checkpoint but not their index {WEIGHTS[1]}: copy or download it too"
    other = f"; it has {', '.join(weights[:5])}: give the path of that file" if weights else ""
    local = isinstance(folder, LocalFolder) and not weights
    if local and (inside := sorted(p.parent.name for p in folder.path.glob("*/config.json"))):
        other = f"; but the folders {', '.join(inside[:5])} in it have a config.json: give one of those"
    return "; ".join((f"{folder.label} has no weights: none of {', '.join(WEIGHTS)}{other}", *folder.notes))


def _refuse_revision(path: Path, revision: str | None) -> None:
    if revision is not None:
        raise DriftlabError(f"{path} is here, and revision={revision!r} belongs to a hub id: leave it out")


def _scale_of_kept(name: str, keep: Callable[[str], bool]) -> bool:
    return name.endswith(packed.SCALE) and keep(name.removesuffix(packed.SCALE))
