"""Drafter checkpoints: a folder with config.json and model.safetensors, keys as the engines name them.

Written here: a ``driftlab`` block in config.json holds the whole configuration, so that nothing has to be guessed. Read
here: that, and the plain EAGLE-3 layout (``layers.0.*`` or ``midlayer.*``) of LlamaForCausalLMEagle3 files. Loading is
strict: a tensor that is missing, unused or of the wrong shape is an error that names it.
"""

from __future__ import annotations

import importlib.metadata
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from driftlab.drafter.config import DrafterConfig
from driftlab.drafter.model import Drafter
from driftlab.drafter.shipped import SHIPPED, shipped_path
from driftlab.errors import DriftlabError
from driftlab.files import atomic, read_json, sort_metadata, write_json

FORMAT_VERSION = 1

_PLAIN_REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
    "rms_norm_eps",
)
_PLAIN_KNOWN = {
    *_PLAIN_REQUIRED,
    *("num_key_value_heads", "head_dim", "num_hidden_layers", "draft_vocab_size", "target_hidden_size", "rope_theta"),
    *("rope_parameters", "rope_scaling", "fc_norm", "norm_output", "eagle_config", "num_aux_hidden_states"),
    "eagle_config.eagle_aux_hidden_state_layer_ids",
}
_PLAIN_IRRELEVANT = {
    *("architectures", "model_type", "max_position_embeddings", "tie_word_embeddings", "torch_dtype", "dtype"),
    *("transformers_version", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "initializer_range"),
    *("pretraining_tp", "attention_dropout", "_name_or_path", "auto_map"),
}
_PLAIN_FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "bias": False,
    "norm_before_fc": False,
    "norm_before_residual": False,
    "eagle_config.norm_before_fc": False,
    "eagle_config.norm_before_residual": False,
    "eagle_config.use_aux_hidden_state": True,
}


def save(drafter: Drafter, path: str | Path, *, dtype: torch.dtype | None = None) -> None:
    """Write ``path``/model.safetensors and, last, ``path``/config.json. The target's tables are not written.

    Args:
        drafter: what to save.
        path: folder; made if need be, files of the same names replaced.
        dtype: floating-point tensors are cast to it; default as they are.
    """
    path = Path(path)
    tensors = {
        name: (tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor).detach().cpu().contiguous()
        for name, tensor in drafter.state_dict().items()
    }
    with atomic(path / "model.safetensors") as temporary:
        save_file(tensors, temporary, metadata={"format": "pt", "driftlab_format_version": str(FORMAT_VERSION)})
        sort_metadata(temporary)
    write_json(path / "config.json", _written_config(drafter.config, drafter.trained_for))


def load(path: str | Path, target: Any = None, *, aux_layers: tuple[int, ...] | None = None) -> Drafter:
    """Load a checkpoint folder; ``drafter.notes`` says in words what was assumed.

    Args:
        path: folder with config.json and model.safetensors, or a name in :data:`driftlab.drafter.SHIPPED`.
        target: lends embedding and head where the file has none (a Target or a Trajectory).
        aux_layers: captured target states, if the file does not say or says it wrongly.

    Raises:
        DriftlabError: a missing, unused or misshapen tensor, an unknown setting, a drafter that does not fit the target.
    """
    path = shipped_path(str(path)) if str(path) in SHIPPED and not Path(path).exists() else Path(path)
    values, tensors = read_json(path / "config.json"), _read_tensors(path / "model.safetensors")
    tensors = _plain_names(tensors, path)
    notes: list[str] = []
    own = "driftlab" in values
    config = _own_config(values, path) if own else _plain_config(values, tensors, aux_layers, path, notes)
    drafter = Drafter(config, target, draft_vocab=_draft_vocab(tensors, config, path))
    _assign(drafter, tensors, path)
    if drafter.reduced and not bool(drafter.d2t.any()):
        notes.append(f"d2t: all zero, so the draft vocabulary is target ids 0..{config.draft_vocab_size - 1}")
    if own and (saved := values["driftlab"].get("target")):
        here, drafter.trained_for = drafter.trained_for, saved
        if here is not None and here["fingerprint"] != saved["fingerprint"]:
            notes.append(
                f"{path} was trained for {saved['label']} (weights {saved['fingerprint'][:12]}), this target is "
                f"{here['label']} ({here['fingerprint'][:12]}): states and head are not those that it learned from"
            )
            warnings.warn(notes[-1], stacklevel=3)
    drafter.notes = notes
    return drafter


def _written_config(config: DrafterConfig, trained_for: dict[str, str] | None) -> dict[str, Any]:
    plain = {key: value for key, value in config.to_dict().items() if key in _PLAIN_KNOWN}
    return {
        **plain,
        # an engine would lend such a file the target's head without the norm's gain: better that it knows no such name
        "architectures": ["LlamaForCausalLMEagle3" if config.lm_head == "own" else "DriftlabEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "driftlab": {
            "format_version": FORMAT_VERSION,
            "driftlab_version": importlib.metadata.version("driftlab"),
            "config": config.to_dict(),
            **({} if trained_for is None else {"target": trained_for}),
        },
    }


def _read_tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise DriftlabError(f"{path} does not exist: a drafter folder holds config.json and model.safetensors")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise DriftlabError(f"{path} is not a whole safetensors file ({error}): copy or download it again") from error


def _plain_key(key: str) -> str:
    key = key.removeprefix("model.")
    return f"layers.0.{key.removeprefix('midlayer.')}" if key.startswith("midlayer.") else key


def _plain_names(tensors: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    named: dict[str, str] = {}
    for key in tensors:
        first = named.setdefault(_plain_key(key), key)
        if first != key:
            raise DriftlabError(f"{path}: {first} and {key} are two names of one tensor: keep the right one")
    return {name: tensors[key] for name, key in named.items()}


def _own_config(values: dict[str, Any], path: Path) -> DrafterConfig:
    block = values["driftlab"]
    if block.get("format_version") != FORMAT_VERSION:
        raise DriftlabError(
            f"{path}/config.json has drafter format version {block.get('format_version')}; this driftlab reads "
            f"{FORMAT_VERSION}: update driftlab, or save the drafter again"
        )
    config = DrafterConfig.from_dict(block.get("config", {}))
    for key, value in config.to_dict().items():
        if key in _PLAIN_KNOWN and values.get(key, value) != value:
            raise DriftlabError(
                f"{path}/config.json: {key} is {values[key]!r}, but {value!r} in its driftlab block, which is what is "
                "read: make the two agree"
            )
    return config


def _plain_config(
    values: dict[str, Any],
    tensors: dict[str, Tensor],
    aux_layers: tuple[int, ...] | None,
    path: Path,
    notes: list[str],
) -> DrafterConfig:
    where = f"{path}/config.json"
    settings = {**values, **{f"eagle_config.{key}": v for key, v in (values.get("eagle_config") or {}).items()}}
    unknown = set(settings) - _PLAIN_KNOWN - _PLAIN_IRRELEVANT - set(_PLAIN_FIXED)
    if unknown:
        raise DriftlabError(f"{where}: settings that this loader does not know: {sorted(unknown)}")
    missing = [key for key in _PLAIN_REQUIRED if key not in values]
    if missing:
        raise DriftlabError(f"{where}: missing {missing}")
    for key, only in _PLAIN_FIXED.items():
        if settings.get(key, only) != only:
            raise DriftlabError(f"{where}: {key}={settings[key]!r} is not supported, only {only!r}")
    for key in ("fc_norm", "norm_output"):
        if not isinstance(values.get(key) or False, bool):
            raise DriftlabError(f"{where}: {key} is {values[key]!r}, not true or false")
    if "input_norm.weight" in tensors:
        raise DriftlabError(
            f"{path}: input_norm.weight is norm_before_fc, one norm over the concat; it is not supported yet"
        )
    if "fc.weight" not in tensors:
        raise DriftlabError(f"{path}: no fc.weight among {sorted(tensors)[:8]}...: not an EAGLE-3 drafter")
    hidden = values["hidden_size"]
    target_hidden = values.get("target_hidden_size") or hidden
    vocab = values["vocab_size"]
    states, rest = divmod(tensors["fc.weight"].shape[1], target_hidden)
    if rest:
        raise DriftlabError(
            f"{path}: fc.weight is {list(tensors['fc.weight'].shape)}, not a whole number of states {target_hidden} wide"
        )
    if (
        tensors["fc.weight"].shape[1] == hidden + target_hidden
        and "d2t" not in tensors
        and "norm.weight" not in tensors
    ):
        raise DriftlabError(
            f"{path}: fc takes one embedding and one state, and there is no final norm: EAGLE-1, not EAGLE-3"
        )
    if (values.get("num_aux_hidden_states") or states) != states:
        raise DriftlabError(
            f"{where}: num_aux_hidden_states={values['num_aux_hidden_states']}, fc.weight takes {states}"
        )
    has_norm = "fc_norm.0.weight" in tensors
    if has_norm and not values.get("fc_norm", False):
        notes.append("fc_norm: the file has fc_norm tensors but its config does not say so; tensors win: on")
    own_head = "lm_head.weight" in tensors
    if not own_head and "embed_tokens.weight" in tensors and (values.get("draft_vocab_size") or vocab) == vocab:
        raise DriftlabError(
            f"{path}: an embedding of its own but no lm_head.weight: whether the head is tied is not said"
        )
    for kind, have in (("embedding", "embed_tokens.weight" in tensors), ("head", own_head)):
        if not have:
            notes.append(f"{kind}: none in the file, the target's is used")
    draft_vocab = values.get("draft_vocab_size") or vocab
    if not own_head and draft_vocab < vocab:
        raise DriftlabError(f"{path}: no lm_head.weight, and a head for {draft_vocab} of {vocab} tokens cannot be lent")
    return DrafterConfig(
        hidden_size=hidden,
        target_hidden_size=target_hidden,
        aux_layers=aux_layers or _plain_aux_layers(values, states, where, notes),
        intermediate_size=values["intermediate_size"],
        num_attention_heads=values["num_attention_heads"],
        num_key_value_heads=values.get("num_key_value_heads") or values["num_attention_heads"],
        head_dim=values.get("head_dim") or hidden // values["num_attention_heads"],
        vocab_size=vocab,
        draft_vocab_size=draft_vocab,
        rope_theta=_plain_rope(values, where, notes),
        rms_norm_eps=values["rms_norm_eps"],
        fc_norm=has_norm or bool(values.get("fc_norm", False)),
        norm_output=bool(values.get("norm_output", False)),
        num_hidden_layers=values.get("num_hidden_layers", 1),
        own_embed="embed_tokens.weight" in tensors,
        lm_head="own" if own_head else "target",
    )


def _plain_aux_layers(values: dict[str, Any], count: int, where: str, notes: list[str]) -> tuple[int, ...]:
    ids = (values.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if not ids:
        raise DriftlabError(f"{where} does not say which {count} target states it reads: pass aux_layers=")
    if len(ids) != count:
        raise DriftlabError(f"{where}: {len(ids)} layer ids {ids}, but fc.weight takes {count} states")
    layers = tuple(index + 1 for index in ids)
    notes.append(
        f"aux_layers: ids {ids} read as output-of-layer, so states {list(layers)} (pass aux_layers= to override)"
    )
    return layers


def _plain_rope(values: dict[str, Any], where: str, notes: list[str]) -> float:
    thetas = {"rope_theta": values.get("rope_theta")}
    for name in ("rope_parameters", "rope_scaling"):
        block = dict(values.get(name) or {})
        thetas[f"{name}.rope_theta"] = block.pop("rope_theta", None)
        kinds = {block.pop("rope_type", "default"), block.pop("type", "default")}
        if kinds != {"default"}:
            kind = sorted(kinds - {"default"})[0]
            raise DriftlabError(f"{where}: rope type {kind!r} is not supported, only 'default' ({name})")
        if any(value is not None for value in block.values()):
            raise DriftlabError(f"{where}: {name} sets {sorted(block)}, which plain rotary embedding does not have")
    said = {name: float(theta) for name, theta in thetas.items() if theta is not None}
    if not said:
        notes.append("rope_theta: absent, 10000 assumed, as every engine does")
        return 10000.0
    if len(set(said.values())) > 1:
        raise DriftlabError(f"{where}: contradicting rotary bases {said}")
    return next(iter(said.values()))


def _assign(drafter: Drafter, tensors: dict[str, Tensor], path: Path) -> None:
    expected = drafter.state_dict()
    if not drafter.reduced:
        identity = tensors.pop("d2t", None)
        tensors.pop("t2d", None)
        if identity is not None and bool(identity.any()):
            raise DriftlabError(f"{path}: d2t is not zero although the draft vocabulary is the whole vocabulary")
    missing, unexpected = sorted(set(expected) - set(tensors)), sorted(set(tensors) - set(expected))
    if missing or unexpected:
        raise DriftlabError(f"{path}: missing tensors {missing}; unused tensors {unexpected}")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise DriftlabError(
                f"{path}: {name} is {list(tensor.shape)}, the configuration makes it {list(expected[name].shape)}"
            )
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise DriftlabError(f"{path}: {name} holds values that are not finite")
    drafter.load_state_dict({name: t.to(expected[name].dtype) for name, t in tensors.items()})


def _draft_vocab(tensors: dict[str, Tensor], config: DrafterConfig, path: Path) -> Tensor | None:
    """Return the target ids that d2t (offsets) names, and complete t2d; None for a full vocabulary."""
    if config.draft_vocab_size == config.vocab_size:
        return None
    if "d2t" not in tensors:
        raise DriftlabError(
            f"{path}: no d2t, though the draft vocabulary has {config.draft_vocab_size} of {config.vocab_size} tokens: "
            "without it nobody knows which token a draft id means"
        )
    d2t = tensors["d2t"].to(torch.int64)
    if d2t.shape != (config.draft_vocab_size,):
        raise DriftlabError(f"{path}: d2t is {list(d2t.shape)}, the configuration makes it [{config.draft_vocab_size}]")
    ids = torch.arange(len(d2t)) + d2t
    if bool((ids.diff() <= 0).any()) or int(ids[0]) < 0 or int(ids[-1]) >= config.vocab_size:
        raise DriftlabError(
            f"{path}: d2t holds no valid offsets (target id = draft id + d2t[draft id] must ascend within "
            f"0..{config.vocab_size - 1}; here it runs from {int(ids[0])} to {int(ids[-1])})"
        )
    if "t2d" not in tensors and len(d2t) > 1 and bool((d2t.diff() > 0).all()):
        raise DriftlabError(
            f"{path}: d2t ascends strictly, as a list of target ids does (verl-SpeCo#67); as offsets it would leave out every "
            "second token or more, and no t2d says that this is meant. Offsets are wanted: target id - draft id"
        )
    t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
    t2d[ids] = True
    if not torch.equal(tensors.setdefault("t2d", t2d).bool(), t2d):
        raise DriftlabError(f"{path}: t2d and d2t name different draft vocabularies")
    return ids
