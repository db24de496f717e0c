"""What to change so that an engine reads a checkpoint as it was measured to be: the keys of config.json, engine by engine.

The settings of both readings are written as each engine's loader wants them (:mod:`driftlab.drafter.formats.engine_settings`)
and compared. What no engine has a key for is said as a change of the tensors or of the engine's code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from driftlab.doctor.factors import fields_of
from driftlab.doctor.stored import View
from driftlab.drafter.config import DrafterConfig
from driftlab.drafter.formats.engine_settings import settings_of
from driftlab.drafter.formats.limits import ENGINES, TargetFacts, cannot_carry
from driftlab.errors import DriftlabError

_FACTS = TargetFacts(name="TARGET", model_type="llama")
_NO_KEY = {
    "d2t": "rewrite the file: d2t holds target ids, and engines add them to draft ids: subtract 0, 1, 2, ... from it",
    "order": "rewrite the file: put the columns of fc.weight (and fc_norm) into ascending order of layers",
    "token_shift": "the engine's code: which token a state is paired with; no key says it",
    "gap": "the engine's code: the rotary position of drafted tokens; no key says it",
    "frozen": "the engine's code: whether the position advances while drafting; no key says it",
    "inputs": "rewrite the file: exchange the two halves of the columns that read [embedding, hidden]",
    "grouping": "rewrite the file: reorder the rows of q_proj and the columns of o_proj, so that heads that share a key head "
    "are neighbours",
    "final_state": "the engine's code: whether the head gets the target's final state before or after its norm; no key says it",
}
_FIELDS_WITHOUT_KEY = {
    "norm_plus_one": "rewrite the file: every gain is 1 + w, and engines of Llama drafters multiply by w: add 1 to all gains",
    "twice_normed": "the engine's code: no engine norms the hidden input twice",
    "head_norm": "the engine's code: no engine's head reads the state without the norm",
    "lm_head": "rewrite the file: write the head that was meant as lm_head.weight (driftlab export does)",
    "own_embed": "vLLM uses the file's embedding where there is one; elsewhere remove or add embed_tokens.weight",
    "rope_interleaved": "no key of Llama drafters: engines turn halves of a head; rewrite the rows of q_proj and k_proj",
    "zero_first_embedding": "the engine's code: whether the first embedding is zeroed; no key says it",
    "qk_norm": "vLLM: architectures (Eagle3Qwen3ForCausalLM has these norms)",
}


def remedies(declared: View, best: View, together: Mapping[str, View] | None = None) -> dict[str, str]:
    """Return engine to what is to be changed, in words.

    ``together``: the readings that are one with the best, by name. Where an engine's keys cannot say the best reading and can
    say one of these, that one is told: no text tells them apart, or by less than matters.
    """
    outside = _outside(declared, best)
    sayable = {name: view for name, view in (together or {}).items() if not _outside(declared, view)}
    said = {"driftlab": _own(declared, best)}
    for engine, keys in _KEYS.items():
        found = keys(declared.config, best.config)
        said[engine] = found.words
        if outside or not found.carried:
            others = ((name, keys(declared.config, view.config)) for name, view in sayable.items())
            if other := next(((name, keys) for name, keys in others if keys.carried), None):
                said[engine] = f"{other[1].words} (that is {other[0]}, one with the best; then nothing else is needed)"
    if outside:
        said["everywhere"] = f"{'; '.join(outside)}{' (for the best reading itself)' if sayable else ''}"
    return said


@dataclass(frozen=True)
class _Keys:
    """What to change of a config.json, or why nothing does it."""

    words: str
    carried: bool


def _outside(declared: View, view: View) -> list[str]:
    """Say what differs and has no key in any engine."""
    said = [words for name, words in _NO_KEY.items() if getattr(declared, name) != getattr(view, name)]
    changed = fields_of(view.config, declared.config)
    return said + [words for name, words in _FIELDS_WITHOUT_KEY.items() if name in changed]


def _own(declared: View, best: View) -> str:
    """Say what ``--given`` of this toolkit's commands takes, and what it has no word for."""
    given = [f"{name}={_word(value)}" for name, value in fields_of(best.config, declared.config).items()]
    return f"--given {' '.join(given)}" if given else "no field of its configuration (see everywhere)"


def _word(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "[]"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else f"{value}"


def _engine(declared: DrafterConfig, best: DrafterConfig, *, form: Format) -> _Keys:
    if refused := cannot_carry(best, form, _FACTS):
        return _Keys(f"cannot carry it: {'; '.join(refused[:2])}", carried=False)
    try:
        before = _flat(settings_of(declared, form, _FACTS, dtype="float32", num_speculative_tokens=3))
        after = _flat(settings_of(best, form, _FACTS, dtype="float32", num_speculative_tokens=3))
    except DriftlabError as error:
        return _Keys(f"cannot carry it: {error}", carried=False)
    changed = [
        f"{_path(path)}: {json.dumps(after[path]) if path in after else 'leave out'}"
        for path in sorted({*before, *after})
        if before.get(path) != after.get(path)
    ]
    return _in_config(changed)


def _in_config(changed: Sequence[str]) -> _Keys:
    if not changed:
        return _Keys("no key says it (see everywhere)", carried=False)
    return _Keys("config.json " + ", ".join(changed), carried=True)


def _tensorrt(declared: DrafterConfig, best: DrafterConfig) -> _Keys:
    """TensorRT-LLM's keys: layer ids as outputs of layers and norm_before_fc in eagle_config, the others at the top."""
    if best.norm_before_residual:
        return _Keys("cannot carry it: norm_before_residual", carried=False)
    ids = [k - 1 for k in best.aux_layers]
    keys = {
        "aux_layers": f'"eagle_config": {{"eagle_aux_hidden_state_layer_ids": {ids}}}',
        "norm_before_fc": f'"eagle_config": {{"norm_before_fc": {_word(best.norm_before_fc)}}}',
        "fc_norm": f'"fc_norm": {_word(best.fc_norm)}',
        "norm_output": f'"norm_output": {_word(best.norm_output)}',
        "rope_theta": f'"rope_theta": {best.rope_theta:g}',
        "head_dim": f'"head_dim": {best.head_dim}',
        "num_attention_heads": f'"num_attention_heads": {best.num_attention_heads}',
        "num_key_value_heads": f'"num_key_value_heads": {best.num_key_value_heads}',
    }
    return _in_config([words for name, words in keys.items() if name in fields_of(best, declared)])


def _flat(values: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    if not isinstance(values, dict):
        return {path: values}
    return {key: value for name, inner in values.items() for key, value in _flat(inner, (*path, name)).items()}


def _path(path: tuple[str, ...]) -> str:
    return '"' + ".".join(path) + '"'


_KEYS = {engine: partial(_engine, form=form) for form, engine in ENGINES.items()} | {"TensorRT-LLM": _tensorrt}
"""engine to what its keys change"""
