"""Which convention of a checkpoint is read wrong: doctor."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from driftlab.cli.common import DType, check_name, given_value, given_values, load_target, named_words, progress_bar


def doctor(
    drafter: Positional[str],
    target: str = "smollm2",
    given: tuple[str, ...] = (),
    declared: tuple[str, ...] = (),
    prompts: str = "default",
    count: int = 80,
    max_new_tokens: int = 128,
    depth: int | None = None,
    device: str = "cpu",
    dtype: DType = "float32",
    json: bool = False,
) -> None:
    """Measure which reading of a drafter's checkpoint predicts the target's answers best: the declared one, or another.

    Layer ids, norms, feedback, d2t, token shift, rotary embedding, tables and head shapes are tried on a recorded text, one by
    one and in pairs; the answer says how sure it is, what it is worth in tau, and which keys of config.json make it so.
    How often it is right is measured by experiments/doctor_confusion.py; docs/method.md says what came of it.

    Args:
        drafter: a folder, a file, a Hugging Face id, or the name of a shipped drafter.
        target: "smollm2", a Hugging Face id or a local folder, whose answers are recorded (and kept); or a recording's folder.
            A recording may lack the states that neighbouring layer ids name; which those are is said.
        given: conventions to take as declared in place of the file's, as name=value (see `driftlab inspect`).
        declared: what is declared beyond any configuration: token_shift=0, inputs="hidden first", grouping=strided,
            final_state=raw, gap=1, frozen=true, d2t=absolute.
        prompts: a .jsonl or .json file, or "default"; used where answers are recorded.
        count: how many of them.
        max_new_tokens: length limit of a recorded answer.
        depth: deepest draft depth scored; default 3, or what the drafter was trained for if that is less.
        device: where the target runs.
        dtype: of the target.
        json: print JSON.
    """
    from driftlab import Trajectory
    from driftlab.doctor import diagnose, read_for, record_for

    check_name(drafter)
    recorded = (Path(target) / "trajectory.json").is_file()
    lender = Trajectory.open(target) if recorded else load_target(target, device, dtype, (0,))
    reading, d2t = read_for(drafter, **given_values(given))
    if recorded:
        trajectory = lender
    else:
        config = reading.config_for(lender)
        trajectory = record_for(lender, config, prompts, count=count, answer=max_new_tokens, progress=progress_bar())
    for words in (*reading.layer_notes(trajectory), *reading.notes):
        print(f"{drafter}: {words}", file=sys.stderr)
    found = diagnose(reading, trajectory, outside=_declared(declared), d2t=d2t, depth=depth, progress=progress_bar())
    print(_json(found) if json else found.words())


def _declared(said: tuple[str, ...]) -> dict[str, Any]:
    values = {name: given_value(word) for name, word in named_words("--declared", said).items()}
    if "order" in values:
        order = values["order"]
        values["order"] = tuple(order) if isinstance(order, list) else (order,)
    return values


def _json(found: Any) -> str:
    import json

    return json.dumps(found.to_dict(), indent=2, ensure_ascii=False, allow_nan=False)
