"""Drafts on disk: what a drafter proposed for a recording, kept so that a smaller K or another rule needs no drafting.

One safetensors file a draft, written whole or not at all; its metadata say what it holds, for which texts, and from which
drafter. A file of another drafter, recording, tree or version is not used but drafted again. Chains are kept as deep, and with
as many logits, as they were ever asked for.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from driftlab.attention import Controls
from driftlab.draft import TIES, Draft, DraftLogits, all_starts
from driftlab.drafter import Drafter
from driftlab.errors import DriftlabError
from driftlab.progress import Progress, silent
from driftlab.sealed import open_tensors, save_sealed, sealed_tensors
from driftlab.trajectory import Trajectory
from driftlab.trees import DynamicTree, StaticTree, Tree, TreeDraft, tree_all_starts

FORMAT_VERSION = 1
_AGAIN = "draft again"
_LOGITS = ("text", "top", "lse")


def save_draft(path: Path | str, draft: Draft | TreeDraft, *, key: str = "") -> None:
    """Write a draft to ``path`` (.safetensors). ``key``: what it answers, for :func:`stored_chains`."""
    tensors = {f.name: getattr(draft, f.name) for f in dataclasses.fields(draft)}
    tensors = {name: value for name, value in tensors.items() if isinstance(value, Tensor)}
    told: dict[str, Any] = {"ids": draft.ids, "digests": draft.digests}
    if isinstance(draft, TreeDraft):
        told["tree"] = {"kind": type(draft.tree).__name__, **dataclasses.asdict(draft.tree)}
    else:
        told["feed"] = draft.feed
        if draft.logits is not None:
            tensors |= {f"logits.{name}": getattr(draft.logits, name) for name in _LOGITS}
            told |= {"temperatures": draft.logits.temperatures, "vocab": draft.logits.vocab}
    metadata = {"driftlab_draft_version": str(FORMAT_VERSION), "key": key, "draft": json.dumps(told)}
    save_sealed(Path(path), tensors, metadata)


def load_draft(path: Path | str) -> Draft | TreeDraft:
    """Read what :func:`save_draft` wrote.

    Raises:
        DriftlabError: a missing or broken file, or one of another version.
    """
    path = Path(path)
    with _opened(path) as file:
        told = file.metadata().get("draft", "")
        tensors = sealed_tensors(file, path, _AGAIN)
    try:
        return _draft(json.loads(told), tensors)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DriftlabError(f"{path}: what it says of its draft cannot be read ({error!r}): {_AGAIN}") from error


def _draft(told: dict[str, Any], tensors: dict[str, Tensor]) -> Draft | TreeDraft:
    common = {"ids": tuple(told["ids"]), "digests": tuple(told["digests"])}
    logits = {name.removeprefix("logits."): tensors.pop(name) for name in list(tensors) if name.startswith("logits.")}
    if "tree" in told:
        kind = {"StaticTree": StaticTree, "DynamicTree": DynamicTree}[told["tree"].pop("kind")]
        values = {name: tuple(map(tuple, v)) if name == "paths" else v for name, v in told["tree"].items()}
        return TreeDraft(**tensors, **common, tree=kind(**values))
    kept = None
    if logits:
        kept = DraftLogits(*(logits[name] for name in _LOGITS), tuple(told["temperatures"]), told["vocab"])
    return Draft(**tensors, **common, feed=told["feed"], logits=kept)


def stored_chains(
    folder: Path | str | None,
    drafter: Drafter,
    trajectory: Trajectory,
    depth: int,
    *,
    temperatures: Sequence[float] = (),
    top: int = 32,
    progress: Progress = silent,
) -> Draft:
    """Return text-fed chains of ``depth`` from what ``folder`` holds, if it is as deep and has what is asked for; else draft.

    Args:
        folder: where drafts are kept; None: nowhere.
        drafter: its weights and configuration are part of the key.
        trajectory: its texts are.
        depth: K; a deeper draft is cut to it.
        temperatures: as of :func:`driftlab.draft.all_starts`, and likewise ``top``; more may be there.
        top: see ``temperatures``.
        progress: see :func:`driftlab.draft.all_starts`.

    A drafter with hooks on it or with attention controls is no longer what its weights say, and whoever hooked it wants it
    to run: nothing is read or kept.
    """
    asked = tuple(float(t) for t in temperatures)
    if folder is None or _altered(drafter):
        return all_starts(drafter, trajectory, depth, temperatures=asked, top=top, progress=progress)
    path, key = _place(Path(folder), drafter, trajectory, "text-fed chains")
    held = _held(path, key)
    if isinstance(held, Draft):
        if held.depth >= depth and _has(held.logits, asked, top):
            return held.upto(depth)
        # nothing that is there is given up
        made = max(depth, held.depth)
        if held.logits is not None:
            asked = tuple(sorted({*asked, *held.logits.temperatures}))
            top = max(top, held.logits.top.shape[-1] - TIES)
    else:
        made = depth
    draft = all_starts(drafter, trajectory, made, temperatures=asked, top=top, progress=progress)
    save_draft(path, draft, key=key)
    return draft.upto(depth)


def _has(logits: DraftLogits | None, temperatures: tuple[float, ...], top: int) -> bool:
    """Whether what is kept of the logits is what is asked for."""
    if not temperatures or logits is None:
        return not temperatures
    return set(temperatures) <= set(logits.temperatures) and logits.top.shape[-1] >= min(top + TIES, logits.vocab)


def stored_trees(
    folder: Path | str | None, drafter: Drafter, trajectory: Trajectory, tree: Tree, *, progress: Progress = silent
) -> TreeDraft:
    """Return the trees that ``folder`` holds for this drafter and recording, else draft and keep them.

    Arguments as of :func:`stored_chains`; ``tree`` is part of the key.
    """
    if folder is None or _altered(drafter):
        return tree_all_starts(drafter, trajectory, tree, progress=progress)
    path, key = _place(Path(folder), drafter, trajectory, repr(tree))
    held = _held(path, key)
    if held is None:
        held = tree_all_starts(drafter, trajectory, tree, progress=progress)
        save_draft(path, held, key=key)
    return held


def _place(folder: Path, drafter: Drafter, trajectory: Trajectory, what: str) -> tuple[Path, str]:
    """File and key. Other versions may draft otherwise."""
    versions = f"{importlib.metadata.version('driftlab')} {FORMAT_VERSION} {torch.__version__}"
    key = f"{versions} {_fingerprint(drafter)} {_texts(trajectory)} {what}"
    return folder / f"draft-{hashlib.sha256(key.encode()).hexdigest()[:20]}.safetensors", key


def _held(path: Path, key: str) -> Draft | TreeDraft | None:
    try:
        with _opened(path) as file:
            if file.metadata().get("key") != key:
                return None
        return load_draft(path)
    except DriftlabError:
        return None  # missing, cut short or of another version: it is made again


def _altered(drafter: Drafter) -> bool:
    hooked = any(module._forward_hooks or module._forward_pre_hooks for module in drafter.modules())
    blocks = [layer.self_attn for layer in drafter.layers]
    return hooked or any(block.controls != Controls() or block.steering for block in blocks)


def _fingerprint(drafter: Drafter) -> str:
    """Hash of what decides the drafts: configuration, every tensor (the target's tables too), dtype."""
    digest = hashlib.sha256(f"{type(drafter).__qualname__} {drafter.config} {drafter.device}".encode())
    tensors = {**dict(drafter.named_parameters()), **dict(drafter.named_buffers())}
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _texts(trajectory: Trajectory) -> str:
    """Hash of which recorded states the drafts were made from: the target, its settings, the sequences."""
    told = [trajectory.spec.fingerprint, trajectory.aux_layers, sorted(trajectory.settings.items(), key=str)]
    told += [(e.id, e.piece, e.offset, e.length, e.prompt_length) for e in trajectory.entries]
    digest = hashlib.sha256(repr(told).encode())
    for index in range(len(trajectory)):
        digest.update(trajectory.tokens(index).numpy())
    return digest.hexdigest()


def _opened(path: Path) -> Any:
    file = open_tensors(path, _AGAIN)
    version = (file.metadata() or {}).get("driftlab_draft_version")
    if version != str(FORMAT_VERSION):
        raise DriftlabError(f"{path} is no draft of version {FORMAT_VERSION} (it says {version}): draft again")
    return file
