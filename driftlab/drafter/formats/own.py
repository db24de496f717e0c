"""driftlab's own files: a ``driftlab`` block in config.json holds the whole configuration, so that nothing is guessed.

The block comes first; what stands beside it in the words of other projects must agree with it.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from driftlab.drafter.config import DrafterConfig
from driftlab.drafter.formats.conventions import refuse_options
from driftlab.drafter.formats.layerids import is_default
from driftlab.drafter.formats.names import canonical_names
from driftlab.drafter.formats.reading import Found, Ledger, Reading
from driftlab.drafter.formats.vocabulary import read_draft_vocab, with_maps
from driftlab.errors import DriftlabError
from driftlab.files import check_sealed, sealed

FORMAT_VERSION = 1

PLAIN = frozenset(
    {
        *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
        *("rms_norm_eps", "num_hidden_layers", "draft_vocab_size", "target_hidden_size", "rope_theta", "fc_norm"),
        "norm_output",
    }
)
"""fields that are written a second time, at the top level, for who looks at the file"""


def written_config(config: DrafterConfig, trained_for: dict[str, str] | None) -> dict[str, Any]:
    """Return config.json of a drafter."""
    values = config.to_dict()
    plain = {key: value for key, value in values.items() if key in PLAIN}
    # an engine would lend the target's head without the norm's gain, or pass over switches: better that it knows no such name
    engine = config.lm_head == "own" and _is_plain(config)
    return {
        **plain,
        "architectures": ["LlamaForCausalLMEagle3" if engine else "DriftlabEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "driftlab": sealed(
            {
                "format_version": FORMAT_VERSION,
                "driftlab_version": importlib.metadata.version("driftlab"),
                "config": values,
                **({} if trained_for is None else {"target": trained_for}),
            }
        ),
    }


def _is_plain(config: DrafterConfig) -> bool:
    """Whether an engine that reads the top level alone computes what this drafter does, the default states among it."""
    beside = PLAIN | {"aux_layers", "lm_head", "own_embed", "ttt", "trained_length"}
    # without layer ids in the file an engine takes the default states of whatever target it serves
    return is_default(config.aux_layers) and all(
        getattr(config, f.name) == f.default for f in dataclasses.fields(config) if f.name not in beside
    )


def read_own(raw: Any, given: Mapping[str, Any]) -> Reading:
    """Read a file that :func:`driftlab.drafter.checkpoint.save` wrote.

    Raises:
        DriftlabError: another format version, an unknown key, settings outside the block that contradict it.
    """
    block = raw.config["driftlab"]
    if not isinstance(block, dict):
        raise DriftlabError(f"config.json: driftlab is {block!r}, not a table of settings")
    refuse_options(given, "a file of driftlab")
    config, target = _config(raw.config, block), _target(block)
    # last: the words above say more
    edited = "copy it again or, if you edited it, take the driftlab block's checksum out"
    check_sealed(block, Path("config.json"), edited)
    ledger = Ledger(given)
    for words in raw.notes:
        ledger.note(words)
    for setting in dataclasses.fields(config):
        ledger.settle(setting.name, Found(getattr(config, setting.name), "read", "driftlab block"))
    names = canonical_names(raw.shapes)
    ids = read_draft_vocab(
        names.shapes,
        raw_tensor(raw, names),
        vocab_size=config.vocab_size,
        draft_vocab_size=config.draft_vocab_size,
        notes=ledger.notes,
    )
    return Reading(
        raw=raw,
        name=raw.label,
        format="driftlab",
        told="config.json has a driftlab block",
        settled=ledger.conventions(),
        shapes=names.shapes,
        load_tensors=lambda: with_maps(names.tensors(raw), ids, config.vocab_size),
        notes=tuple(ledger.notes),
        draft_vocab=ids,
        given=dict(given),
        trained_for=target,
    )


def raw_tensor(raw: Any, names: Any) -> Any:
    """Return a function that reads one tensor by its canonical name (one that is not part of a fused one)."""
    return lambda name: raw.tensor(names.sources[name])


def _target(block: dict[str, Any]) -> dict[str, str] | None:
    target = block.get("target")
    if target is None:
        return None
    if not isinstance(target, dict) or not all(isinstance(target.get(key), str) for key in ("label", "fingerprint")):
        raise DriftlabError(f"config.json: driftlab.target is {target!r}, not label and fingerprint of a target")
    return target


def _config(values: dict[str, Any], block: dict[str, Any]) -> DrafterConfig:
    if block.get("format_version") != FORMAT_VERSION:
        raise DriftlabError(
            f"config.json has drafter format version {block.get('format_version')}; this driftlab reads "
            f"{FORMAT_VERSION}: update driftlab, or save the drafter again"
        )
    told = block.get("config", {})
    if not isinstance(told, dict):
        raise DriftlabError(f"config.json: driftlab.config is {told!r}, not a table of settings")
    try:
        config = DrafterConfig.from_dict(told)
    except DriftlabError as error:
        raise DriftlabError(f"config.json, driftlab block: {error}") from error
    for key, value in config.to_dict().items():
        if key in PLAIN and values.get(key, value) != value:
            raise DriftlabError(
                f"config.json: {key} is {values[key]!r}, but {value!r} in its driftlab block, which is what is read: "
                "make the two agree"
            )
    return config
