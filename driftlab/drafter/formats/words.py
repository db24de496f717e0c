"""A reading in words: what a person sees of a checkpoint before trusting a number from it."""

from __future__ import annotations

import dataclasses
import json
import math
import textwrap
from typing import Any

from driftlab.drafter.formats.reading import Convention, Reading, shown
from driftlab.errors import DriftlabError

_WIDTH = 118
_SHAPES = {
    *(
        "hidden_size",
        "target_hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    ),
    *("vocab_size", "draft_vocab_size", "num_hidden_layers", "latent", "experts"),
}
_MAPS = ("d2t", "t2d")


def parameter_count(reading: Reading) -> int:
    """Return how many weights the file holds, the vocabulary's maps aside."""
    return sum(math.prod(shape) for name, shape in reading.shapes.items() if name not in _MAPS)


def reading_words(reading: Reading, target: Any = None) -> str:
    """Return format, sizes, the tensors' shapes, the table of conventions and the notes, as lines of text."""
    rows = reading.conventions_for(target)
    lines = [
        f"{reading.name}: {reading.format} ({reading.told})",
        f"kind: {_kind(reading)}",
        f"files: {', '.join(reading.raw.files)}",
        f"{parameter_count(reading):,} parameters; {_sizes(reading)}",
        f"draft vocabulary: {_vocabulary(reading)}",
        "",
        "tensors, by the names used here",
        *_table([(name, f"{list(shape)}") for name, shape in sorted(reading.shapes.items())]),
        "",
        "conventions",
        *_table([(row.name, row.source, _told(row)) for row in rows if _in_table(row)]),
    ]
    notes = _notes(reading, target)
    if notes:
        lines += ["", "notes", *(line for note in notes for line in _wrapped(f"- {note}", "  "))]
    return "\n".join(lines)


def reading_values(reading: Reading, target: Any = None) -> dict[str, Any]:
    """Return the same as plain JSON values."""
    rows = reading.conventions_for(target)
    return {
        "name": reading.name,
        "format": reading.format,
        "told": reading.told,
        "kind": _kind(reading),
        "files": list(reading.raw.files),
        "parameters": parameter_count(reading),
        "tensors": {name: list(shape) for name, shape in sorted(reading.shapes.items())},
        "conventions": [
            {"name": row.name, "value": _plain(row.value), "source": row.source, "why": row.why} for row in rows
        ],
        "notes": _notes(reading, target),
    }


def reading_lines(reading: Reading, target: Any = None, *, as_json: bool = False) -> str:
    """Return what ``driftlab inspect`` prints: the reading, and whether the tensors are those that it wants."""
    fault, unused = "", []
    try:
        unused = reading.check(target)
    except DriftlabError as error:
        fault = str(error)
    if as_json:
        values = {**reading_values(reading, target), "unused": unused, "fault": fault or None}
        return json.dumps(values, indent=2, ensure_ascii=False)
    verdict = f"It cannot be loaded so: {fault}" if fault else "The tensors are those that these conventions want."
    if unused and not fault:
        verdict = f"It can be loaded so, but not all of it is used. {' '.join(unused)}"
    return "\n".join([reading_words(reading, target), "", *_wrapped(verdict, "")])


def _kind(reading: Reading) -> str:
    """Name the variant, in the words that people use."""
    values = {row.name: row.value for row in reading.settled}
    if values.get("architecture") == "mtp":
        return "MTP head"
    switches = [name for name in ("fc_norm", "norm_output") if values.get(name)]
    kind = "EAGLE 3.1 (fc_norm and norm_output)" if len(switches) == 2 else " with ".join(["EAGLE-3", *switches])
    return f"{kind}, one norm before fc (norm_before_fc)" if values.get("norm_before_fc") else kind


def fits(reading: Reading, target: Any = None) -> bool:
    """Whether the file can be loaded as it is read."""
    try:
        reading.check(target)
    except DriftlabError:
        return False
    return True


def _notes(reading: Reading, target: Any) -> list[str]:
    return [
        *reading.layer_notes(target),
        *reading.notes,
        *reading.embedding_notes(target),
        *reading.about(target),
    ]


def _in_table(row: Convention) -> bool:
    """Sizes stand in a line of their own; those that are assumed are told here too, with the reason."""
    return row.name not in _SHAPES or row.source == "assumed"


def _told(row: Convention) -> str:
    value = "not known yet" if row.value is None and row.name == "aux_layers" else shown(row.value)
    return f"{value:<8}  {row.why}" if row.why else value


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return dataclasses.asdict(value)
    return list(value) if isinstance(value, tuple) else value


def _sizes(reading: Reading) -> str:
    values = {row.name: row.value for row in reading.settled}
    layers, heads = values["num_hidden_layers"], values["num_attention_heads"]
    said = [
        f"{layers} layer{'s' * (layers > 1)}",
        f"width {values['hidden_size']}, target states {values['target_hidden_size']} wide",
        f"{heads} query and {values['num_key_value_heads']} key heads of {values['head_dim']}",
        f"MLP {values['intermediate_size']}",
    ]
    if values.get("latent") is not None:
        said[2] = f"latent attention, {heads} heads ({shown(values['latent'])})"
    if values.get("experts") is not None:
        said[3] = f"experts ({shown(values['experts'])})"
    return "; ".join(said)


def _vocabulary(reading: Reading) -> str:
    values = {row.name: row.value for row in reading.settled}
    if reading.draft_vocab is None:
        return f"all {values['vocab_size']} tokens"
    ids = reading.draft_vocab.tolist()
    return (
        f"{len(ids)} of {values['vocab_size']} tokens, ids {ids[0]} to {ids[-1]} (target id = draft id + d2t[draft id])"
    )


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """Align all columns but the last, which is wrapped."""
    if not rows:
        return []
    widths = [min(max(len(row[i]) for row in rows), 60) for i in range(len(rows[0]) - 1)]
    lines = []
    for row in rows:
        head = "  " + "".join(f"{cell:<{width}}  " for cell, width in zip(row[:-1], widths, strict=True))
        lines += _wrapped(head + row[-1], " " * (sum(widths) + 2 * len(widths) + 2))
    return lines


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.fill(
        text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, replace_whitespace=False
    ).splitlines()
