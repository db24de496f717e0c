"""The switches of an EAGLE-3 file: norms, feedback, residual, biases, windows.

Tensors come before flags (``fc_norm``, ``norm_before_fc``, biases, norms on queries and keys): a flag that the tensors
contradict is noted where the tensors are there and refused where they are not. ``norm_output`` and ``norm_before_residual``
leave no trace in the tensors.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from driftlab.drafter.formats.provenance import architecture_of
from driftlab.drafter.formats.reading import Found
from driftlab.errors import DriftlabError

if TYPE_CHECKING:
    from driftlab.drafter.formats.eagle3 import File

_SPECFORGE = ("before-879", "after-879")
_NO_WINDOWS = ("SafeAILab", "SpecForge")
_NO_QKV_BIAS = ("SpecForge", "SGLang")
_QKV_BIAS = ("vLLM", "speculators", "TensorRT-LLM")


def read_switches(file: File, states: int) -> None:
    """Settle every switch.

    Args:
        file: settings, shapes, provenance, and the ledger to fill.
        states: how many target states fc takes; 0: there is no fc.

    Raises:
        DriftlabError: a flag without its tensors, or two places that contradict each other.
    """
    if file.ledger.given.get("specforge") not in (None, *_SPECFORGE):
        raise DriftlabError(f"specforge={file.ledger.given['specforge']!r}: give {' or '.join(map(repr, _SPECFORGE))}")
    _fusion(file, states)
    _output(file)
    _residual(file)
    _attention(file)
    file.ledger.settle("windows", lambda: _windows(file))
    file.ledger.settle("logit_scale", lambda: _logit_scale(file))


def _by_tensors(file: File, name: str, there: bool, flag: tuple[bool | None, str], tensors: str) -> Found:
    """Return a switch that its tensors decide.

    Args:
        file: for the provenance.
        name: the switch.
        there: whether the tensors are.
        flag: what the settings say, and where.
        tensors: their names, in words.
    """
    said, place = flag
    if there:
        if said:
            return Found(True, "read", f"{place}; {tensors} is there")
        words = "is false in config.json" if said is False else "is not in config.json"
        return Found(True, "tensors", f"{tensors} is there, though {place} {words}: tensors win", note=True)
    if said:
        raise DriftlabError(
            f"config.json: {place} is true, but the file has no {tensors}: it is not made up; copy the tensors, or "
            f"give {name}=False if it was trained without"
        )
    if said is False:
        return Found(False, "read", place)
    return Found(False, "tensors", f"no {tensors}")


def _fusion(file: File, count: int) -> None:
    settings, shapes, settle = file.settings, file.shapes, file.ledger.settle
    norms = [f"fc_norm.{i}.weight" for i in range(count)]
    there = [name for name in norms if name in shapes]
    if there and len(there) < count and "fc_norm" not in file.ledger.given:
        raise DriftlabError(
            f"missing tensors {sorted(set(norms) - set(there))}: each of the {count} states has a norm of its own"
        )
    flag = settings.flag("fc_norm", "use_aux_norm")
    settle("fc_norm", lambda: _by_tensors(file, "fc_norm", bool(there), flag, ", ".join(norms) or "fc"))
    settle("norm_before_fc", lambda: _norm_before_fc(file))
    settle("fc_bias", lambda: _fc_bias(file))


def _norm_before_fc(file: File) -> Found:
    settings, there = file.settings, "input_norm.weight" in file.shapes
    flag = settings.flag("eagle_config.norm_before_fc", "norm_before_fc")
    if file.source.name != "TensorRT-LLM":
        return _by_tensors(file, "norm_before_fc", there, flag, "input_norm.weight")
    inside = settings.nested.get("norm_before_fc")
    if inside and file.ledger.rows["fc_norm"].value:
        file.unused.update({"input_norm.weight"} & set(file.shapes))
        left = "; input_norm.weight is not used" if there else ""
        why = f"TensorRT-LLM applies fc_norm alone where eagle_config has norm_before_fc too{left}"
        return Found(False, "read", f"{why}; give norm_before_fc=True for both", note=True)
    found = _by_tensors(file, "norm_before_fc", there, flag, "input_norm.weight")
    if found.value and not inside:
        why = (
            f"{found.why}; TensorRT-LLM reads norm_before_fc in eagle_config alone and would not apply it: tensors win"
        )
        return Found(True, found.source, f"{why}; give norm_before_fc=False to do as it does", note=True)
    return found


def _fc_bias(file: File) -> Found:
    flag, there = file.settings.flag("bias"), "fc.bias" in file.shapes
    if flag[0] and not there and file.source.name == "SafeAILab":
        return Found(False, "tensors", "no fc.bias; SafeAILab's EAGLE-3 does not use its setting bias")
    return _by_tensors(file, "fc_bias", there, flag, "fc.bias")


def _output(file: File) -> None:
    """Settle what is fed back, and whether the head reads the normed state."""
    settings, ledger = file.settings, file.ledger
    said, place = settings.flag("norm_output", "eagle_config.return_hidden_post_norm")
    when = ledger.given.get("specforge")
    if when == "before-879":
        ledger.settle(
            "norm_output",
            Found(False, "given", "SpecForge before its PR 879 always feeds back the state before the norm"),
        )
        why = f"SpecForge before its PR 879: {place} {shown_flag(said)} " + (
            "means that the head reads the state without its norm"
            if said is False
            else "means that the head reads the normed state"
        )
        ledger.settle("head_norm", Found(said is not False, "given", why, note=said is False))
        return
    ledger.settle("norm_output", lambda: _norm_output(file, said, place, when))
    ledger.settle("head_norm", Found(True, "assumed", "the head reads the normed state in every engine"))


def shown_flag(said: bool | None) -> str:
    """Return a flag in words."""
    return "absent" if said is None else str(said).lower()


def _norm_output(file: File, said: bool | None, place: str, when: str | None) -> Found:
    if said is None:
        # EAGLE 3.1 has both switches, and writers have dropped this one (speculators, vLLM#46488)
        half = any(name.startswith("fc_norm.") for name in file.shapes)
        more = "; but EAGLE 3.1 has it with fc_norm, which is here: if the writer lost it, give norm_output=true" * half
        return Found(False, "assumed", f"absent: off, as in every engine ({place}){more}", note=half)
    if when is not None or file.source.name != "SpecForge":
        return Found(said, "read", place)
    meant = (
        "plain EAGLE-3 (give specforge='before-879')"
        if said
        else "a head that reads the state without its norm (give specforge='before-879')"
    )
    now = "feedback after the norm, as engines read it" if said else "plain EAGLE-3, as engines read it"
    return Found(
        said,
        "assumed",
        f"{place} is {shown_flag(said)}; trained by SpecForge after its PR 879 (2026-09) that is {now}; before it, "
        f"{meant}. The file does not say when",
        note=True,
    )


def _residual(file: File) -> None:
    settings, ledger, source = file.settings, file.ledger, file.source.name
    said, place = settings.flag("norm_before_residual", "eagle_config.norm_before_residual")
    if said is not None:
        alone = said and source != "speculators"
        why = place + ("; vLLM and speculators alone have it, SGLang and all others ignore it" if alone else "")
        found = Found(said, "read", why, note=alone and source != "vLLM")
    elif source == "speculators" and "norm_before_residual" in settings.values:
        why = "norm_before_residual is null: off in vLLM, which takes only an absent one as on"
        found = Found(False, "read", why, note=True)
    elif source == "speculators":
        found = Found(
            True,
            "assumed",
            "absent: on, as vLLM reads speculators files (speculators' own class reads off: a converter may have "
            "lost it; give norm_before_residual=False to try)",
            note=True,
        )
    else:
        found = Found(False, "assumed", f"absent: off, as in every engine ({place})")
    ledger.settle("norm_before_residual", found)
    if source == "NVIDIA ModelOpt":
        why = (
            "as every engine serves it; ModelOpt's plugin seems to train with the hidden input normed twice: give "
            "twice_normed=True to try"
        )
        ledger.settle("twice_normed", Found(False, "assumed", why, note=True))


def _attention(file: File) -> None:
    settings, ledger, settle = file.settings, file.ledger, file.ledger.settle

    def has(pattern: str) -> bool:
        return any(re.fullmatch(pattern, name) for name in file.shapes)

    settle("attention_bias", lambda: _attention_bias(file, has(r"layers\.\d+\.self_attn\.[qkv]_proj\.bias")))
    there = has(r"layers\.\d+\.self_attn\.o_proj\.bias")
    settle("output_bias", Found(there, "tensors", "o_proj.bias is there" if there else "no o_proj.bias"))
    mlp = has(r"layers\.\d+\.mlp\.\w+\.bias")
    settle("mlp_bias", lambda: _by_tensors(file, "mlp_bias", mlp, settings.flag("mlp_bias"), "mlp biases"))
    settle("qk_norm", lambda: _qk_norm(file, has(r"layers\.\d+\.self_attn\.[qk]_norm\.weight")))
    gate = has(r"layers\.\d+\.self_attn\.gate\.weight")
    if gate and "attention_gate" not in ledger.given:
        ledger.note(
            "attention_gate: on (a gate tensor is there; read as output * sigmoid(gate x), element by element. No "
            "engine that was read documents gated EAGLE-3 drafters: compare with the code that trained it)"
        )
    settle("attention_gate", Found(gate, "tensors", "self_attn.gate is there" if gate else "no gate"))


def _attention_bias(file: File, there: bool) -> Found:
    flag = file.settings.flag("attention_bias")
    if flag[0] and not there and file.source.name in _NO_QKV_BIAS:
        return Found(False, "tensors", f"no q/k/v biases; {file.source.name} carries the setting and has none")
    found = _by_tensors(file, "attention_bias", there, flag, "q_proj.bias, k_proj.bias, v_proj.bias")
    if found.value and file.source.name not in _QKV_BIAS:
        return replace(found, why=f"{found.why}; vLLM adds them, SGLang skips them in silence", note=True)
    return found


def _qk_norm(file: File, there: bool) -> Found:
    named = architecture_of(file.settings.values) == "Eagle3Qwen3ForCausalLM"
    qwen = named or (file.source.name == "speculators" and file.settings.get("model_type") == "qwen3")
    if qwen and not there:
        raise DriftlabError(
            "config.json: its layers are Qwen3's, which norm queries and keys, but the file has no q_norm and "
            "k_norm; give qk_norm=False if it was trained without"
        )
    if there and not qwen:
        return Found(True, "tensors", "q_norm is there; SGLang and vLLM's Llama drafter do not have it", note=True)
    return Found(there, "tensors", "q_norm is there" if there else "no q_norm")


def _windows(file: File) -> Found:
    settings, layers = file.settings, file.ledger.rows["num_hidden_layers"].value
    types, width = settings.get("layer_types"), settings.whole("sliding_window")
    if types is None:
        if width is None:
            return Found((), "assumed", "no layer_types and no sliding_window: every key is visible")
        why = f"sliding_window {width} without layer_types does nothing in vLLM and SGLang (ATOM would use it)"
        return Found((), "assumed", why, note=settings.get("use_sliding_window") is not False)
    if not isinstance(types, list) or len(types) != layers:
        raise DriftlabError(
            f"config.json: layer_types {types!r}, but the drafter has {layers} layers: one each, or give windows="
        )
    unknown = sorted(set(map(str, types)) - {"full_attention", "sliding_attention"})
    if unknown:
        raise DriftlabError(f"config.json: layer_types {unknown}: full_attention and sliding_attention are supported")
    if "sliding_attention" not in types:
        return Found((), "read", "layer_types: full_attention")
    if file.source.name in _NO_WINDOWS:
        why = (
            f"layer_types has sliding_attention, but {file.source.name} trains and SGLang serves without windows; "
            "vLLM would use them"
        )
        return Found((), "assumed", why, note=True)
    if file.latent:
        raise DriftlabError(
            "config.json: layer_types has sliding_attention, which no engine does with latent attention: give windows="
        )
    if width is None or settings.get("use_sliding_window") is False:
        raise DriftlabError(
            f"config.json: layer_types has sliding_attention, but sliding_window is {settings.get('sliding_window')} "
            f"and use_sliding_window {settings.get('use_sliding_window')}: give windows=, one a layer, 0 for all keys"
        )
    windows = tuple(width if kind == "sliding_attention" else 0 for kind in types)
    why = "layer_types and sliding_window, as in vLLM; SGLang ignores them"
    if file.source.name == "speculators":
        why += (
            ". From depth 2 on vLLM counts a window from the drafted position, and so does this; speculators' "
            "training counts it from the row that the chain starts at"
        )
    return Found(windows, "read", why, note=True)


def _logit_scale(file: File) -> Found:
    value = file.settings.get("logit_scale")
    if value is None:
        return Found(1.0, "assumed", "absent: 1")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise DriftlabError(f"config.json: logit_scale is {value!r}, not a number above 0")
    return Found(float(value), "read", "logit_scale")
