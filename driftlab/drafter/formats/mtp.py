"""MTP heads as drafters: of DeepSeek-V3 and R1, GLM-4 MoE, Qwen3-Next and Qwen3.5, and of speculators.

    z = eh_proj [ RMS(E[x_(t+1)]) , RMS(h_t) ];   u = layer(z);   y = RMS(u);   logits = head(y);   feedback = y or u

h_t is the target's final state after its norm. A head stands inside its target's checkpoint, of which only its own tensors are
read, or alone. Nothing in such files says which state is fed back, nor what becomes of row 0: engines differ, so both are
conventions that are said, and may be given. Families are told by ``model_type``: another model with the same names may
concatenate the other way round (MiMo does), so a type that is not known is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from driftlab.drafter.formats.conventions import refuse_options
from driftlab.drafter.formats.mtpnames import Modules, Part, find_modules, head_parts, read_parts
from driftlab.drafter.formats.mtpsettings import Family, Settings, count_of, whole
from driftlab.drafter.formats.reading import Ledger, Reading
from driftlab.errors import DriftlabError

_DEEPSEEK = Family("DeepSeek-V3 MTP", "nextn", sigmoid=True, zeroed=True)
_GLM = Family("GLM-4 MoE NextN", "nextn", sigmoid=True, partial=0.5, zeroed=True, prenorm_in_vllm=True)
_QWEN = Family("Qwen3-Next MTP", "mtp", gated=True, normed_heads=True, partial=0.25)
FAMILIES = {
    **{"deepseek_v3": _DEEPSEEK, "glm4_moe": _GLM, "qwen3_next": _QWEN},
    **{"qwen3_5": _QWEN, "qwen3_5_text": _QWEN, "qwen3_5_moe": _QWEN, "qwen3_5_moe_text": _QWEN},
}
"""model_type -> family"""
SPECULATORS = {
    **{
        name: Family("speculators MTP", "speculators", gated=True, normed_heads=True, partial=0.25)
        for name, f in FAMILIES.items()
        if f is _QWEN
    },
    "qwen3": Family("speculators MTP", "speculators", normed_heads=True),
}
"""model_type of transformer_layer_config -> family"""
OPTIONS = frozenset({"module"})
"""what may be given beside the fields of DrafterConfig: which module is read, where there are several"""

_FIXED: dict[str, tuple[Any, ...]] = {
    **{
        "hidden_act": ("silu",),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "attn_output_gate": (True,),
    },
    **{"use_sliding_window": (False, None), "mlp_bias": (False, None), "index_topk": (None,), "swiglu_limit": (None,)},
    **dict.fromkeys(("logit_scale", "logits_scaling", "residual_multiplier", "embedding_multiplier"), (1, None)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "attention_chunk_size"), (None,)),
}
"""settings that are supported with these values only; absent is as good"""
_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


def looks_like_mtp(names: Iterable[str]) -> bool:
    """Whether tensors of these raw names hold an MTP head. Names are enough: a target's shards need not be opened."""
    return find_modules(names) is not None


def read_mtp(raw: Any, given: Mapping[str, Any] | None = None) -> Reading:
    """Read an MTP head.

    Args:
        raw: the opened checkpoint, the target's or the head's own (RawCheckpoint).
        given: conventions known better than the file says them (fields of DrafterConfig), and ``module``, the place of the
            module that is read where there are several; default 0.

    Raises:
        DriftlabError: a model type or setting that is not supported, a setting that contradicts the tensors, no such module.
    """
    given = dict(given or {})
    modules = find_modules(raw.names)
    if modules is None:
        raise DriftlabError(
            "no MTP head: neither layers.{N}.eh_proj, mtp.fc nor mtp_layers.0.input_proj is among the tensors"
        )
    refuse_options(given, "an MTP head", OPTIONS)
    values, kind, family = _family(raw.config, modules)
    ledger = Ledger({name: value for name, value in given.items() if name not in OPTIONS})
    module = _module(modules, given.get("module", 0), values, ledger)
    head = raw.only(lambda name: modules.name(name, module) is not None)
    _check_fixed(values)
    hidden, heads = whole(values, "hidden_size"), whole(values, "num_attention_heads")
    parts = head_parts(head.shapes, modules, module, hidden=hidden, heads=heads, gated=family.gated)
    Settings(values, family, parts, ledger).settle()
    parts = _without_lent(parts, ledger)
    for words in getattr(head, "notes", ()):
        ledger.note(words)
    return Reading(
        raw=raw,
        name=raw.label,
        format=family.name,
        told=f"tensors {modules.prefix(module)}* and model_type {kind}",
        settled=ledger.conventions(),
        shapes={name: part.shape for name, part in parts.items()},
        load_tensors=lambda: read_parts(head, parts),
        notes=tuple(ledger.notes),
        given=given,
    )


def _family(config: Mapping[str, Any], modules: Modules) -> tuple[dict[str, Any], str, Family]:
    """Return the settings of the decoder, its model type and its family."""
    inner = next(
        (config[key] for key in ("transformer_layer_config", "text_config") if isinstance(config.get(key), dict)), {}
    )
    values = {**config, **inner}
    kind = values.get("model_type")
    speculators = modules.layout == "speculators"
    if speculators and config.get("speculators_model_type") != "mtp":
        raise DriftlabError(
            f"tensors {modules.prefix(0)}* are those of speculators' MTP heads, but speculators_model_type is "
            f"{config.get('speculators_model_type')!r}, not 'mtp'. MiMo has the same names and concatenates the "
            "state first: it is not supported"
        )
    known = SPECULATORS if speculators else FAMILIES
    family = known.get(str(kind))
    if family is None:
        raise DriftlabError(f"MTP head of model_type {kind!r}: supported are {', '.join(known)}")
    if family.layout != modules.layout:
        raise DriftlabError(
            f"tensors {modules.prefix(0)}* are not what model_type {kind!r} has: make config.json and tensors agree"
        )
    return values, str(kind), family


def _module(modules: Modules, module: Any, values: Mapping[str, Any], ledger: Ledger) -> int:
    count = len(modules.numbers)
    if isinstance(module, bool) or not isinstance(module, int) or not 0 <= module < count:
        raise DriftlabError(f"module={module!r}: there are {count} MTP modules, 0..{count - 1}")
    said = next((count_of(values, key) for key in _COUNTS if values.get(key) is not None), None)
    if said is not None and said != count:
        ledger.note(f"modules: the settings say {said} MTP modules, the tensors hold {count}")
    if count > 1:
        ledger.note(
            f"module: {module} of {count} MTP modules is read and serves every depth; engines take module (depth - "
            f"1) mod {count}, so that their depths beyond the first are other numbers (give module= for another)"
        )
    return module


def _without_lent(parts: dict[str, Part], ledger: Ledger) -> dict[str, Part]:
    """Leave out tables for which the user gave that the target's are to be used (DeepSeek's are copies of them)."""
    lent = {"embed_tokens.weight": ("own_embed", False), "lm_head.weight": ("lm_head", "target")}
    left = {name for name, (setting, value) in lent.items() if name in parts and ledger.given.get(setting) == value}
    for name in sorted(left):
        ledger.note(f"{name}: {parts[name].raw} is not read, the target's table is used, as given")
    return {name: part for name, part in parts.items() if name not in left}


def _check_fixed(values: Mapping[str, Any]) -> None:
    for key, allowed in _FIXED.items():
        if values.get(key) is not None and values[key] not in allowed:
            raise DriftlabError(f"config.json: {key} is {values[key]!r}; supported is {allowed[0]!r} only")
    types = values.get("layer_types") or []
    if not isinstance(types, list):
        raise DriftlabError(f"config.json: layer_types is {types!r}, not a list")
    if any("sliding" in str(layer) for layer in types):
        raise DriftlabError(
            "config.json: layer_types has sliding windows; MTP heads are supported with full attention only"
        )
