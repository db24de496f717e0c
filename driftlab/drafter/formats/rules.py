"""The loaders' rules as a checker: what an engine would stop at, leave out in silence, or read as something else.

    findings = check_folder("folder", "sglang")     empty: the engine's loader takes the folder as it is meant

It reads a folder, anybody's, and knows the engines' rules (here and in ``loaders``); it shares
no code with :mod:`export`, which runs it on whatever it writes. Sources: vLLM 0.33, SGLang 0.5.23, speculators 0.9.0,
SafeAILab/EAGLE cb7e084.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from driftlab.drafter.formats import loaders
from driftlab.drafter.formats.loader_tensors import Sizes
from driftlab.errors import DriftlabError

FORMATS = ("vllm", "sglang", "speculators", "safeailab")


@dataclass(frozen=True)
class _Weights:
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    small: dict[str, Tensor]
    """vectors: gains and vocabulary maps"""


def check_folder(path: str | Path, format: str) -> list[str]:
    """Return what the engine's loader would not take as it is meant, a sentence each.

    Args:
        path: a folder with config.json and weights, whoever wrote it.
        format: "vllm" (a plain folder), "sglang", "speculators" (as speculators and vLLM load it) or "safeailab".

    Raises:
        DriftlabError: no such format or folder.
    """
    path = Path(path)
    if format not in FORMATS:
        raise DriftlabError(f"format {format!r}: choose from {', '.join(FORMATS)}")
    if not path.is_dir():
        raise DriftlabError(f"{path} is not a folder")
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        return [f"config.json cannot be read ({error})"]
    if not isinstance(config, dict):
        return ["config.json is not an object"]
    weights, findings = _weights(path, format)
    if weights is None:
        return findings
    view = {
        "vllm": loaders.vllm,
        "sglang": loaders.sglang,
        "speculators": loaders.speculators,
        "safeailab": loaders.safeailab,
    }[format](config, weights.shapes)
    findings += view.findings
    if view.sizes is not None:
        findings += _vocabulary(weights, view.sizes)
    return findings + _values(weights) + (_twin_norms(weights) if format == "sglang" else [])


def _weights(path: Path, format: str) -> tuple[_Weights | None, list[str]]:
    """Read names, shapes and the vectors from the files that the engine would open."""
    safe, pickled = sorted(path.glob("*.safetensors")), sorted(path.glob("*.bin"))
    findings = []
    if format == "safeailab":
        safe = [p for p in safe if p.name == "model.safetensors"]
        pickled = [p for p in pickled if p.name == "pytorch_model.bin"]
        if safe and pickled:
            findings.append("pytorch_model.bin is read, and model.safetensors is not: remove the wrong one")
        safe = [] if pickled else safe
    if not safe and not pickled:
        return None, ["no file of weights that the loader looks for"]
    try:
        parts = [_safetensors(p) for p in safe] if safe else [_pickled(p) for p in pickled]
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        return None, [*findings, f"the weights cannot be read ({error})"]
    weights = _Weights({}, {}, {})
    for part in parts:
        twice = set(weights.shapes) & set(part.shapes)
        findings += [f"{name}: in two files" for name in sorted(twice)]
        weights.shapes.update(part.shapes)
        weights.dtypes.update(part.dtypes)
        weights.small.update(part.small)
    return weights, findings


def _safetensors(path: Path) -> _Weights:
    shapes, dtypes, small = {}, {}, {}
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (no mapping)
            shapes[name] = tuple(file.get_slice(name).get_shape())
            head = file.get_slice(name)[:0]
            dtypes[name] = head.dtype
            if len(shapes[name]) == 1:
                small[name] = file.get_tensor(name)
    return _Weights(shapes, dtypes, small)


def _pickled(path: Path) -> _Weights:
    tensors = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise ValueError(f"{path.name} is not a dictionary of tensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    small = {name: tensor for name, tensor in tensors.items() if tensor.ndim == 1}
    return _Weights(shapes, {name: tensor.dtype for name, tensor in tensors.items()}, small)


def _vocabulary(weights: _Weights, sizes: Sizes) -> list[str]:
    """d2t holds offsets: target id = draft id + d2t[draft id], ascending within the vocabulary, the same ids as in t2d."""
    d2t, t2d = weights.small.get("d2t"), weights.small.get("t2d")
    if d2t is None or not sizes.reduced or d2t.shape != (sizes.draft_vocab,):
        return []
    if d2t.is_floating_point() or d2t.dtype == torch.bool:
        return [f"d2t: {d2t.dtype}, offsets are whole numbers"]
    ids = torch.arange(len(d2t)) + d2t.long()
    if bool((ids.diff() <= 0).any()) or int(ids[0]) < 0 or int(ids[-1]) >= sizes.vocab:
        return [
            f"d2t: no offsets (draft id + d2t[draft id] must ascend within 0..{sizes.vocab - 1}); target ids themselves?"
        ]
    if t2d is not None and not torch.equal(t2d.bool().nonzero()[:, 0], ids):
        return ["d2t and t2d name different draft vocabularies"]
    return []


def _values(weights: _Weights) -> list[str]:
    maps = ("d2t", "t2d")
    findings = [
        f"{name}: {dtype}, weights are float32, bfloat16 or float16"
        for name, dtype in sorted(weights.dtypes.items())
        if name not in maps and dtype not in (torch.float32, torch.bfloat16, torch.float16)
    ]
    return findings + [
        f"{name}: holds values that are not finite"
        for name, tensor in sorted(weights.small.items())
        if tensor.is_floating_point() and not bool(tensor.isfinite().all())
    ]


def _twin_norms(weights: _Weights) -> list[str]:
    """SGLang norms the input of layers after the first with hidden_norm, others with input_layernorm."""
    findings = []
    for name, tensor in sorted(weights.small.items()):
        if not name.endswith(".input_layernorm.weight") or "layers." not in name or "layers.0." in name:
            continue
        twin = weights.small.get(name.replace("input_layernorm", "hidden_norm"))
        if twin is not None and not torch.equal(twin, tensor):
            findings.append(f"{name}: differs from hidden_norm, which SGLang uses in its place")
    return findings
