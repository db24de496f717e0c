"""Checkpoints that others read and write: inspect, export."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from driftlab.cli.common import DType, check_name, dtype_of, given_values, open_lender


def inspect(
    path: Positional[str],
    target: str | None = None,
    num_layers: int | None = None,
    given: tuple[str, ...] = (),
    revision: str | None = None,
    json: bool = False,
) -> None:
    """Say what a drafter's checkpoint is: format, shapes, and every convention with the reason why it is read so.

    Args:
        path: a folder, a file, a Hugging Face id, or the name of a shipped drafter.
        target: a recording's folder, "smollm2", a Hugging Face id or a local folder: is it the drafter's target?
        num_layers: decoder layers of the target, without loading one; files without layer ids leave the states to it.
        given: conventions that you know better than the file, as name=value: norm_output=false, aux_layers=2,15,27,
            specforge=before-879, ...
        revision: of a Hugging Face id.
        json: print JSON.
    """
    from driftlab.drafter.formats.reading import read_checkpoint
    from driftlab.drafter.formats.words import fits, reading_lines

    chosen = {} if revision is None else {"revision": revision}
    check_name(path)
    reading = read_checkpoint(path, num_layers=num_layers, **{**chosen, **given_values(given)})
    lender = None if target is None else open_lender(target)
    print(reading_lines(reading, lender, as_json=json))
    if not fits(reading, lender):
        sys.exit(1)


def export(
    drafter: Positional[str],
    out: Positional[Path],
    format: Literal["vllm", "sglang", "speculators", "safeailab"] = "vllm",
    target: str = "smollm2",
    target_name: str | None = None,
    target_model_type: str | None = None,
    dtype: DType | None = None,
    num_speculative_tokens: int = 3,
    given: tuple[str, ...] = (),
) -> None:
    """Write a drafter as an engine's loader wants it, check it by the loader's rules, and say how to serve it.

    Args:
        drafter: a folder, a file, a Hugging Face id, or the name of a shipped drafter.
        out: folder to write; an earlier export there is replaced, anything else is not.
        format: whose loader is to take it.
        target: "smollm2", a Hugging Face id, a local folder, or a recording of it.
        target_name: what the engine is to call the target; default a local folder's path, or the id.
        target_model_type: of the target's config.json, where it is not the loaded one: SGLang counts layers by it.
        dtype: of the tensors; default as they are.
        num_speculative_tokens: K in the serve command, and in the file where the format has a place for it.
        given: conventions that you know better than the file, as name=value (see `driftlab inspect`).
    """
    from driftlab import Drafter
    from driftlab.drafter.formats.export import export_drafter

    check_name(drafter)
    model = open_lender(target)
    loaded = Drafter.load(drafter, model, **given_values(given))
    for note in loaded.notes:
        print(f"{drafter}: {note}", file=sys.stderr)
    local = str(Path(target)) if Path(target).exists() else None  # a local target's name is no path
    exported = export_drafter(
        loaded,
        out,
        format=format,
        target=model,
        target_name=target_name or local,
        target_model_type=target_model_type,
        dtype=None if dtype is None else dtype_of(dtype),
        num_speculative_tokens=num_speculative_tokens,
    )
    print(exported.words())
