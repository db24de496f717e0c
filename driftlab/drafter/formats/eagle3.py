"""EAGLE-3 files of every project: each convention of the drafter from settings, tensors and provenance.

Where tensors and a flag disagree the tensors win and it is said; a flag without its tensors is an error. What only the settings
can say (feedback, residual, layer ids, rotary embedding) is read as the file's own engine reads it, and assumed aloud where the
file is silent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from driftlab.drafter.config import LatentConfig
from driftlab.drafter.formats.conventions import refuse_options
from driftlab.drafter.formats.fileids import read_layer_ids
from driftlab.drafter.formats.marker import read_marker
from driftlab.drafter.formats.names import Heads, Names, canonical_names
from driftlab.drafter.formats.provenance import (
    Provenance,
    provenance_of,
    refuse_others,
    refuse_whole_model,
    unknown_architecture,
)
from driftlab.drafter.formats.reading import Found, Ledger, Reading
from driftlab.drafter.formats.rope import DEFAULT_THETA, Rope, read_rope, turned_width
from driftlab.drafter.formats.settings import Settings
from driftlab.drafter.formats.switches import read_switches
from driftlab.drafter.formats.tables import is_tied, read_tables, read_whole
from driftlab.drafter.formats.vocabulary import with_maps
from driftlab.errors import DriftlabError

_LAYER = re.compile(r"layers\.(\d+)\.")
_GATES = ("gate_proj", "g_proj")
_OPTIONS = frozenset({"format", "specforge", "layer_ids"})
_LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@dataclass(frozen=True)
class File:
    """What a reader looks at, and the ledger that it fills."""

    settings: Settings
    shapes: dict[str, tuple[int, ...]]
    """canonical name -> shape"""
    source: Provenance
    ledger: Ledger
    unused: set[str] = field(default_factory=set)
    """tensors that the file's own engine leaves out; each is told in a note"""

    @property
    def latent(self) -> bool:
        """Whether the attention is MLA."""
        return "layers.0.self_attn.kv_a_proj_with_mqa.weight" in self.shapes


def read_eagle3(raw: Any, given: Mapping[str, Any]) -> Reading:
    """Read an EAGLE-3 file.

    Args:
        raw: the opened checkpoint.
        given: the user's word, see :func:`driftlab.drafter.formats.reading.read_checkpoint`.

    Raises:
        DriftlabError: another kind of model, a contradiction, a flag without its tensors, a setting that is not known.
    """
    refuse_whole_model(raw.names)
    settings = Settings.of(raw.config)
    names = _names(raw, settings, given)
    shapes = {_plain_gate(name): shape for name, shape in names.shapes.items()}
    refuse_others(raw.config, shapes)
    refuse_options(given, "an EAGLE-3 file", _OPTIONS)
    told: list[str] = []
    marker = None if given.get("format") else read_marker(raw, told)
    source = provenance_of(raw.config, names.shapes | raw.shapes, given.get("format"), marker)
    file = File(settings, shapes, source, Ledger(given))
    for words in (*getattr(raw, "notes", ()), *told, *unknown_architecture(raw.config, source)):
        file.ledger.note(words)
    settings.check_known()
    _sizes(file)
    states = _states(file)
    read_switches(file, states)
    _rope(file)
    ids = read_tables(file, partial(_one, raw, names))
    vocab_size = file.ledger.rows["vocab_size"].value
    return Reading(
        raw=raw,
        name=raw.label,
        format=file.source.name,
        told=file.source.told,
        settled=file.ledger.conventions(),
        shapes=shapes,
        copies={"lm_head.weight": "embed_tokens.weight"} if is_tied(file) else {},
        load_tensors=partial(_load, raw, names, ids, vocab_size, is_tied(file)),
        notes=tuple(file.ledger.notes),
        layer_ids=None if states == 0 or "aux_layers" in given else read_layer_ids(file, states),
        draft_vocab=ids,
        given=dict(given),
        unused=frozenset(file.unused),
        load_embedding=partial(_one, raw, names, "embed_tokens.weight") if _replaced(file) else None,
    )


def _names(raw: Any, settings: Settings, given: Mapping[str, Any]) -> Names:
    heads = given.get("num_attention_heads") or settings.whole("num_attention_heads")
    kv = given.get("num_key_value_heads") or settings.whole("num_key_value_heads") or heads
    width = given.get("head_dim") or settings.whole("head_dim")
    if width is None and heads and settings.whole("hidden_size"):
        width = settings.whole("hidden_size") // heads
    return canonical_names(raw.shapes, heads=Heads(heads, kv, width) if heads and width else None)


def _replaced(file: File) -> bool:
    """Whether engines put the target's embedding in the place of the file's own."""
    rows = file.ledger.rows
    return rows["own_embed"].value and rows["hidden_size"].value == rows["target_hidden_size"].value


def _plain_gate(name: str) -> str:
    for gate in _GATES:
        name = name.replace(f".self_attn.{gate}.weight", ".self_attn.gate.weight")
    return name


def _one(raw: Any, names: Names, name: str) -> Tensor:
    return raw.tensor(names.sources[name])


def _load(raw: Any, names: Names, ids: Tensor | None, vocab_size: int, tied: bool) -> dict[str, Tensor]:
    tensors = {_plain_gate(name): tensor for name, tensor in names.tensors(raw).items()}
    if tied:
        tensors["lm_head.weight"] = tensors["embed_tokens.weight"].clone()
    return with_maps(tensors, ids, vocab_size)


def _sizes(file: File) -> None:
    settings, settle = file.settings, file.ledger.settle
    wanted = [
        n
        for n in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
        if n not in file.ledger.given
    ]
    settings.required(*wanted)
    hidden = settle("hidden_size", lambda: read_whole(settings, "hidden_size"))
    wide_mlp = settings.get("model_type") == "llama4_text" and settings.get("intermediate_size_mlp") is not None
    settle(
        "intermediate_size", lambda: read_whole(settings, "intermediate_size_mlp" if wide_mlp else "intermediate_size")
    )
    heads = settle("num_attention_heads", lambda: read_whole(settings, "num_attention_heads"))
    if file.latent:
        latent = settle("latent", lambda: _latent(file))
        settle("num_key_value_heads", Found(heads, "tensors", "latent attention: as many as query heads"))
        width = latent.qk_nope_head_dim + latent.qk_rope_head_dim
        settle("head_dim", Found(width, "tensors", "latent attention: qk_nope_head_dim + qk_rope_head_dim"))
    else:
        if settings.get("kv_lora_rank") and "layers.0.self_attn.k_proj.weight" not in file.shapes:
            raise DriftlabError(
                "config.json has kv_lora_rank, but layer 0 has no kv_a_proj_with_mqa: latent attention is not there"
            )
        settle("num_key_value_heads", lambda: _or(settings, "num_key_value_heads", heads, "as many as query heads"))
        width = settle("head_dim", lambda: _head_dim(file, hidden, heads))
        if file.source.name == "SafeAILab" and width * heads != hidden:
            file.ledger.note(
                f"head_dim: {width}, though hidden_size / num_attention_heads is {hidden / heads:g}, which the code of "
                "SafeAILab's reference version makes it; its later versions read head_dim"
            )
    found = {match[1] for name in file.shapes if (match := _LAYER.match(name))}
    settle("num_hidden_layers", lambda: _or(settings, "num_hidden_layers", len(found), "by the tensors", "tensors"))
    settle("rms_norm_eps", lambda: _eps(settings))


def _or(settings: Settings, name: str, value: Any, why: str, source: Any = "assumed") -> Found:
    said = settings.whole(name)
    return Found(value, source, f"absent: {why}") if said is None else Found(said, "read", name)


def _head_dim(file: File, hidden: int, heads: int) -> Found:
    said = file.settings.whole("head_dim")
    if said is not None:
        return Found(said, "read", "head_dim")
    norm = file.shapes.get("layers.0.self_attn.q_norm.weight")
    if norm is not None:
        return Found(norm[0], "tensors", "width of q_norm")
    if hidden % heads:
        raise DriftlabError(
            f"config.json: no head_dim, and hidden_size {hidden} is no multiple of {heads} heads: add head_dim"
        )
    return Found(hidden // heads, "assumed", "absent: hidden_size / num_attention_heads, as in every engine")


def _eps(settings: Settings) -> Found:
    value = settings.get("rms_norm_eps")
    if value is None:
        return Found(1e-6, "assumed", "absent: 1e-6, the default of Llama configurations and of SafeAILab", note=True)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise DriftlabError(f"config.json: rms_norm_eps is {value!r}, not a small number")
    return Found(float(value), "read", "rms_norm_eps")


def _latent(file: File) -> Found:
    settings, shapes, prefix = file.settings, file.shapes, "layers.0.self_attn."
    settings.required(*_LATENT)
    rank = settings.whole("q_lora_rank")
    norm = shapes.get(f"{prefix}q_a_layernorm.weight")
    if (rank is None) != (norm is None):
        raise DriftlabError(
            f"config.json: q_lora_rank is {settings.get('q_lora_rank')!r}, but the file has "
            f"{'no ' if norm is None else ''}{prefix}q_a_layernorm.weight: make the two agree"
        )
    values = {name: settings.whole(name) for name in _LATENT}
    return Found(
        LatentConfig(q_lora_rank=rank or 0, **values),
        "read",
        "q_lora_rank, kv_lora_rank, ...; kv_a_proj_with_mqa is there",
    )


def _states(file: File) -> int:
    """Settle the target's width and return A, how many of its states fc takes; 0: the final one, without fc."""
    settings, shapes, ledger = file.settings, file.shapes, file.ledger
    uses, place = settings.flag("eagle_config.use_aux_hidden_state")
    if ledger.given.get("aux_layers") == () or (uses is False and "aux_layers" not in ledger.given):
        if "fc.weight" in shapes and "aux_layers" not in ledger.given:
            raise DriftlabError(
                f"{place} is false, but there is an fc.weight: vLLM drops it, so give aux_layers=() to read the file "
                "as vLLM does, or the layers whose states fc was trained on"
            )
        ledger.settle("target_hidden_size", Found(ledger.rows["hidden_size"].value, "read", f"{place} is false"))
        ledger.settle(
            "aux_layers", Found((), "read", f"{place} is false: the target's final state after its norm, no fc")
        )
        return 0
    if "fc.weight" not in shapes:
        raise DriftlabError(
            f"no fc.weight among {sorted(shapes)[:8]}...: not an EAGLE-3 drafter (unless "
            "eagle_config.use_aux_hidden_state is false)"
        )
    width = ledger.settle("target_hidden_size", lambda: _target_width(file))
    count = _count(file, width)
    if count * width == ledger.rows["hidden_size"].value:
        ledger.note(
            f"fc: the target states together are {count * width} wide, as wide as the drafter's own: SafeAILab's code, SGLang "
            "and tokenspeed tell the two by their width and leave out fc; vLLM applies it, and so does this"
        )
    if "aux_layers" in ledger.given:
        layers = ledger.settle("aux_layers", Found((), "given", ""))
        if len(layers) != count:
            raise DriftlabError(f"aux_layers {list(layers)} names {len(layers)} states, but fc.weight takes {count}")
    return count


def _target_width(file: File) -> Found:
    said, norm = file.settings.whole("target_hidden_size"), file.shapes.get("fc_norm.0.weight")
    if norm is not None and said is not None and norm[0] != said:
        raise DriftlabError(f"config.json: target_hidden_size is {said}, but fc_norm.0.weight is {list(norm)}")
    if said is not None:
        return Found(said, "read", "target_hidden_size")
    if norm is not None:
        return Found(norm[0], "tensors", "width of fc_norm.0")
    return Found(file.ledger.rows["hidden_size"].value, "assumed", "absent: hidden_size, as in every engine")


def _count(file: File, width: int) -> int:
    """Return A; everything that says it must agree."""
    shape = file.shapes["fc.weight"]
    count, rest = divmod(shape[-1], width)
    if rest:
        raise DriftlabError(
            f"fc.weight is {list(shape)}, not a whole number of states {width} wide: give target_hidden_size= if it "
            "is another"
        )
    norms = [name for name in file.shapes if name.startswith("fc_norm.") and name.endswith(".weight")]
    if len(norms) > count:
        raise DriftlabError(f"{len(norms)} fc_norm tensors, but fc.weight takes {count} states")
    for key in ("num_aux_hidden_states", "num_aux_layers"):
        said = file.settings.whole(key)
        if said not in (None, count):
            raise DriftlabError(f"config.json: {key}={said}, but fc.weight takes {count} states {width} wide")
    return count


def _rope(file: File) -> None:
    settings, ledger = file.settings, file.ledger
    rope = read_rope(settings.values, latent=file.latent, given=ledger.given)
    for words in rope.notes:
        ledger.note(words)
    scaling = ledger.settle("rope_scaling", lambda: Found(rope.scaling, "read", rope.scaling_said))
    ledger.settle("rope_theta", lambda: _theta(rope, scaling is not None and file.source.name == "SafeAILab"))
    interleaved, place = settings.flag("rope_interleave")
    if file.latent:
        found = Found(True, "assumed", "latent attention turns pairs (0, 1), (2, 3), ... in every engine")
        ledger.settle("rope_interleaved", found if interleaved is None else Found(interleaved, "read", place))
    elif interleaved:
        raise DriftlabError("rope_interleave is true, but only latent attention has it in any engine")
    if rope.partial != 1.0 and file.latent:
        ledger.note(
            f"partial_rotary_factor {rope.partial:g}: latent attention turns its qk_rope_head_dim dimensions whatever it says"
        )
    elif rope.partial != 1.0:
        ledger.settle("rotary_dim", lambda: _turned(file, rope.partial))
    _rope_notes(file)


def _theta(rope: Rope, fixed: bool) -> Found:
    if fixed and rope.theta != DEFAULT_THETA:
        why = f"SafeAILab's scaled rotary embeddings have this base, whatever rope_theta ({rope.theta:g} here) says"
        return Found(DEFAULT_THETA, "read", f"{why}; give rope_theta= for another", note=True)
    if rope.theta_read:
        return Found(rope.theta, "read", "rope_theta")
    return Found(rope.theta, "assumed", "absent: 10000, as in every engine", note=True)


def _turned(file: File, share: float) -> Found:
    width = turned_width(file.ledger.rows["head_dim"].value, share)
    return Found(width, "read", f"partial_rotary_factor {share:g}", note=True)


def _rope_notes(file: File) -> None:
    scaling, name = file.ledger.rows["rope_scaling"].value, file.source.name
    if scaling is None:
        return
    if name == "NVIDIA ModelOpt" and scaling.kind == "yarn":
        file.ledger.note(
            "rope_scaling: ModelOpt's exporter writes YaRN in place of the plain rotary embedding of the training, "
            "on purpose; engines use it. Give rope_scaling=None for what was trained"
        )
    if name == "TorchSpec" and (scaling.kind in ("linear", "dynamic") or file.latent):
        file.ledger.note(
            "rope_theta: some versions of TorchSpec trained scaled rotary embedding at the base 10000 whatever the "
            "file says; give rope_theta=10000.0 to try"
        )
