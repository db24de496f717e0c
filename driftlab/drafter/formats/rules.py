"""The loaders' rules as a checker: what an engine would stop at, leave out in silence, or read as something else.

    findings = check_folder("folder", "sglang")     empty: the engine's loader takes the folder as it is meant

It reads a folder, anybody's, and knows the engines' rules (here and in ``loaders``); it shares no code with :mod:`export`,
which runs it on whatever it writes. Whatever a folder holds, it is told and never raised. Sources: vLLM 0.33, SGLang 0.5.23,
speculators 0.9.0, SafeAILab/EAGLE cb7e084.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from driftlab.drafter.formats import loaders
from driftlab.drafter.formats.loader_files import Weights, read_weights
from driftlab.drafter.formats.loader_tensors import Sizes
from driftlab.drafter.formats.loader_types import well_kinded
from driftlab.errors import DriftlabError

FORMATS = ("vllm", "sglang", "speculators", "safeailab")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_WHOLES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


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
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no JSON, no UTF-8, a number of 5000 digits
        return [f"config.json cannot be read ({error})"]
    if not isinstance(config, dict):
        return ["config.json is not an object"]
    config, wrong = well_kinded(config)
    weights, findings = read_weights(path, format)
    findings = [*wrong.values(), *findings]
    if weights is None:
        return findings
    view = {
        "vllm": loaders.vllm,
        "sglang": loaders.sglang,
        "speculators": loaders.speculators,
        "safeailab": loaders.safeailab,
    }[format](config, weights.shapes)
    told = {place.rpartition(".")[2] for place in wrong}  # a rule would only say that they are missing
    findings += [words for words in view.findings if words.partition(":")[0] not in told]
    if view.sizes is not None:
        findings += _vocabulary(weights, view.sizes)
    return findings + _values(weights) + (_twin_norms(weights) if format == "sglang" else [])


def _vocabulary(weights: Weights, sizes: Sizes) -> list[str]:
    """d2t holds offsets: target id = draft id + d2t[draft id], ascending within the vocabulary, the same ids as in t2d."""
    d2t, t2d = weights.small.get("d2t"), weights.small.get("t2d")
    shape = weights.shapes.get("t2d", (sizes.vocab,))
    findings = [] if shape == (sizes.vocab,) else [f"t2d: {list(shape)}, and vocab_size is {sizes.vocab}"]
    if d2t is None or not sizes.reduced or d2t.shape != (sizes.draft_vocab,):
        return findings
    if d2t.dtype not in _WHOLES:
        return [*findings, f"d2t: {d2t.dtype}, offsets are whole numbers"]
    ids = torch.arange(len(d2t)) + d2t.long()
    within = int(ids.min()) >= 0 and int(ids.max()) < sizes.vocab
    if not within or bool((ids.diff() <= 0).any()):
        findings.append(
            f"d2t: no offsets (draft id + d2t[draft id] must ascend within 0..{sizes.vocab - 1}); target ids themselves?"
        )
    elif t2d is not None and not torch.equal(t2d.bool().nonzero()[:, 0], ids):
        findings.append("d2t and t2d name different draft vocabularies")
    return findings


def _values(weights: Weights) -> list[str]:
    findings = [
        f"{name}: {dtype}, weights are float32, bfloat16 or float16"
        for name, dtype in sorted(weights.dtypes.items())
        if name not in ("d2t", "t2d") and dtype not in _FLOATS
    ]
    return findings + [f"{name}: holds values that are not finite" for name in sorted(weights.infinite)]


def _twin_norms(weights: Weights) -> list[str]:
    """SGLang norms the input of layers after the first with hidden_norm, others with input_layernorm."""
    findings = []
    for name, tensor in sorted(weights.small.items()):
        if not name.endswith(".input_layernorm.weight") or "layers." not in name or "layers.0." in name:
            continue
        twin = weights.small.get(name.replace("input_layernorm", "hidden_norm"))
        if twin is not None and not torch.equal(twin, tensor):
            findings.append(f"{name}: differs from hidden_norm, which SGLang uses in its place")
    return findings
