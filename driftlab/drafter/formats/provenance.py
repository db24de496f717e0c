"""Which project an EAGLE-3 file is from, how its layer ids count, and what is no EAGLE-3 file at all.

Often the file does not say. Then it is "plain EAGLE-3" and every convention says what was assumed. ``FORMATS`` are the names
that a user who knows better may give as ``format=``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from driftlab.drafter.formats.layerids import Counting
from driftlab.drafter.formats.marker import MARKER, Marker
from driftlab.errors import DriftlabError

FORMATS: dict[str, Counting | None] = {
    "speculators": "boundary",
    "SafeAILab": None,
    "SpecForge": "output",
    "TorchSpec": "output",
    "SGLang": "output",
    "vLLM": "boundary",
    "NVIDIA ModelOpt": "output",
    "TensorRT-LLM": "output",
    "NeMo Automodel": None,
    "plain EAGLE-3": None,
}
"""name -> how the project counts layer ids (None: it has none, or it is not known)"""

_OTHERS = {
    "peagle": "P-EAGLE (parallel drafting with mask tokens)",
    "eagle": "EAGLE-1 or EAGLE-2, not EAGLE-3",
    "dflash": "DFlash (block diffusion)",
    "dspark": "DSpark",
    "mlp": "an MLP speculator",
    "mlp_speculator": "an MLP speculator",
    "medusa": "Medusa heads",
}
_TENSORRT = {"EAGLE3LlamaForCausalLM", "Eagle3DeepSeekV3ForCausalLM"}
_SWITCHES = ("fc_norm", "use_aux_norm", "norm_output", "norm_before_fc", "norm_before_residual")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_FUSION = re.compile(r"(?:^|\.)(?:fc\.|hidden_norm\.|midlayer\.)")
_WHOLE = (
    "it is a whole language model of {layers} layers, a target and not a drafter (its layer 0 reads the hidden state alone; "
    "there is no fc): use Target.load, or give the drafter's folder"
)
_NEXT = "driftlab reads EAGLE-3 and MTP heads"


@dataclass(frozen=True)
class Provenance:
    """Name of the project, how that was told, and how it counts layer ids."""

    name: str
    told: str
    counting: Counting | None = None
    sure: bool = True
    """whether the file is surely the project's"""
    states: tuple[int, ...] | None = None
    """the states that it reads, as boundaries, where an export of driftlab says so"""


def provenance_of(
    config: Mapping[str, Any], raw_names: Mapping[str, Any], given: str | None, marker: Marker | None = None
) -> Provenance:
    """Tell the project by settings and raw names.

    Args:
        config: config.json.
        raw_names: names as the file has them.
        given: the user's word, a name of :data:`FORMATS`.
        marker: what an export of driftlab says of itself; the user's word comes before it.
    """
    if given is not None:
        if given not in FORMATS:
            raise DriftlabError(f"format={given!r} is not known: choose from {', '.join(map(repr, FORMATS))}")
        return Provenance(given, "given by the user", FORMATS[given])
    if marker is not None:
        told = f"{MARKER} says for whom driftlab wrote it"
        return Provenance(marker.project, told, FORMATS[marker.project], states=marker.states)
    if config.get("speculators_model_type"):
        return Provenance("speculators", "config.json has speculators_model_type", "boundary")
    architecture = architecture_of(config)
    nested = config.get("eagle_config") or {}
    for name, told in (
        ("TorchSpec", "config.json has _torchspec_version" * ("_torchspec_version" in config)),
        ("TensorRT-LLM", _tensorrt(architecture, nested)),
        ("NVIDIA ModelOpt", _modelopt(config, nested)),
        ("SGLang", _sglang(config, raw_names)),
        ("NeMo Automodel", _automodel(architecture, raw_names)),
        ("SafeAILab", _safeailab(config, architecture, raw_names)),
        ("SpecForge", _specforge(architecture, raw_names)),
        ("TorchSpec", "architecture Eagle3DeepseekV2ForCausalLM" * (architecture == "Eagle3DeepseekV2ForCausalLM")),
    ):
        if told:
            sure = name != "TorchSpec" or "_torchspec_version" in config
            return Provenance(name, told, None if name == "SGLang" else FORMATS[name], sure)
    if architecture.startswith("Eagle3"):
        return Provenance("vLLM", f"architecture {architecture}", None)
    return Provenance("plain EAGLE-3", f"nothing names a project (architecture {architecture or 'not said'})")


def unknown_architecture(config: Mapping[str, Any], source: Provenance) -> list[str]:
    """Return a note on an architecture that no known project writes, where nothing else names one."""
    name = architecture_of(config)
    if source.name != "plain EAGLE-3" or name in ("", "LlamaForCausalLMEagle3", "LlamaForCausalLM"):
        return []
    return [
        f"architecture {name} is not known: the tensors are those of an EAGLE-3 drafter, and it is read as a plain one"
    ]


def architecture_of(config: Mapping[str, Any]) -> str:
    """Return the first of ``architectures``, empty if none is said."""
    names = config.get("architectures") or [""]
    return str(names[0] if isinstance(names, list) and names else names)


def _ids(values: Mapping[str, Any]) -> Any:
    return values.get("eagle_aux_hidden_state_layer_ids")


def _tensorrt(architecture: str, nested: Mapping[str, Any]) -> str:
    if architecture in _TENSORRT:
        return f"architecture {architecture}"
    marks = [key for key in ("return_hidden_post_norm", "eh_proj_before_attn", "eh_proj_bias") if key in nested]
    return f"eagle_config has {', '.join(marks)}" if marks else ""


def _modelopt(config: Mapping[str, Any], nested: Mapping[str, Any]) -> str:
    marks = [key for key in ("next_layer_regular", "parallel_draft_step") if key in nested]
    if marks:
        return f"eagle_config has {', '.join(marks)}"
    block = config.get("quantization_config")
    producer = block.get("producer") if isinstance(block, dict) else None
    named = isinstance(producer, dict) and producer.get("name") == "modelopt"
    return "quantization_config names modelopt" if named else ""


def _sglang(config: Mapping[str, Any], raw_names: Mapping[str, Any]) -> str:
    if "use_aux_norm" in config:
        return "config.json has use_aux_norm"
    return "tensors named aux_norm_low, ..." if any("aux_norm_" in name for name in raw_names) else ""


def _automodel(architecture: str, raw_names: Mapping[str, Any]) -> str:
    prefixed = any(name.startswith(("model.fc.", "model.fc_norm.", "model.layers.")) for name in raw_names)
    return "tensors carry the prefix model." if prefixed and architecture == "LlamaForCausalLMEagle3" else ""


def _safeailab(config: Mapping[str, Any], architecture: str, raw_names: Mapping[str, Any]) -> str:
    plain = not any(config.get(key) for key in _SWITCHES) and not config.get("eagle_config") and _ids(config) is None
    if architecture != "LlamaForCausalLM" or not plain or not any(name.startswith("midlayer.") for name in raw_names):
        return ""
    return "architecture LlamaForCausalLM with tensors midlayer.*, and no layer ids"


def _specforge(architecture: str, raw_names: Mapping[str, Any]) -> str:
    named = any(name.startswith("midlayer.") for name in raw_names)
    if architecture != "LlamaForCausalLMEagle3" or not named:
        return ""
    return "likely: architecture LlamaForCausalLMEagle3 with tensors midlayer.*"


def refuse_whole_model(names: Iterable[str]) -> None:
    """Raise DriftlabError if these raw names are a language model's: its shards need not be opened."""
    names = list(names)
    layers = {match[1] for name in names if (match := _LAYER.search(name))}
    if len(layers) > 4 and not any(_FUSION.search(name) for name in names):
        raise DriftlabError(_WHOLE.format(layers=len(layers)))


def refuse_others(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise DriftlabError that says what it is, unless it looks like an EAGLE-3 drafter.

    Args:
        config: config.json.
        shapes: canonical name -> shape.
    """
    kind = config.get("speculators_model_type")
    if kind and kind != "eagle3":
        raise DriftlabError(
            f"speculators_model_type {kind!r}: it is {_OTHERS.get(str(kind), 'another kind of drafter')}; {_NEXT}"
        )
    said = " ".join([architecture_of(config), str(config.get("model_type", ""))]).lower()
    heads = [name for name in shapes if name.startswith(("medusa_head", "heads.")) or ".linear.weight" in name]
    if "medusa" in said or "hydra" in said or "medusa_num_heads" in config or "medusa_head" in " ".join(heads):
        raise DriftlabError(f"it holds Medusa or Hydra heads, which read one state each and are no chain; {_NEXT}")
    if "mlp_speculator" in said or "mlpspeculator" in said:
        raise DriftlabError(f"it is an MLP speculator; {_NEXT}")
    if "dflash" in said or "dspark" in said:
        raise DriftlabError(f"it is a DFlash or DSpark drafter, which fills a block of masks at once; {_NEXT}")
    if "mask_hidden" in shapes or "peagle" in said:
        raise DriftlabError(f"it is P-EAGLE (parallel drafting; it has mask_hidden), not EAGLE-3; {_NEXT}")
    _refuse_layers(config, shapes)


def _refuse_layers(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Tell EAGLE-1 and whole models by what their first layer reads."""
    down = shapes.get("layers.0.mlp.down_proj.weight")
    projections = (shapes.get(f"layers.0.self_attn.{name}.weight") for name in ("q_proj", "q_a_proj"))
    read = next((shape for shape in projections if shape is not None), None)
    width = down[0] if down else config.get("hidden_size")
    ordinary = read is not None and len(read) == 2 and read[1] == width
    layers = {name.split(".")[1] for name in shapes if name.startswith("layers.")}
    fc = shapes.get("fc.weight")
    if fc is not None and ordinary and fc == (width, 2 * width) and "layers.0.hidden_norm.weight" not in shapes:
        raise DriftlabError(
            "fc takes one embedding and one state, and layer 0 is an ordinary one: EAGLE-1 (or EAGLE-2), not EAGLE-3"
        )
    if fc is None and ordinary and "layers.0.hidden_norm.weight" not in shapes:
        raise DriftlabError(_WHOLE.format(layers=len(layers)))
