"""Writing a drafter so that an engine's loader takes it: vLLM, SGLang, speculators (which vLLM serves), SafeAILab's EAGLE.

    exported = export_drafter(drafter, "out/folder", format="sglang", target=target)
    print(exported.words())                  what was written, what it assumes, and the command to try it

The folder holds driftlab_export.json (whose it is), model.safetensors and, last, config.json, without which no engine takes it
for a drafter (:mod:`export_folder`). What a format cannot carry, and a target that the drafter does not fit, is refused by name
(:mod:`limits`); what was written is read back and checked against the loader's rules by code that shares nothing with this
(:mod:`rules`).
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from driftlab.drafter.formats.engine_settings import UNKNOWN_TARGET_POSITIONS, max_positions, settings_of
from driftlab.drafter.formats.export_folder import check_free, write_folder
from driftlab.drafter.formats.limits import ENGINES, Format, TargetFacts, cannot_carry, misfits
from driftlab.drafter.model import Drafter
from driftlab.errors import DriftlabError

_HUB_NAMES = {"smollm2": ("HuggingFaceTB/SmolLM2-135M-Instruct", "llama")}
"""driftlab's own names of targets -> hub id and model_type"""
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What :func:`export_drafter` wrote."""

    path: Path
    format: Format
    notes: tuple[str, ...]
    """what was written and what it rests on, in sentences"""
    command: str
    """how to try it: a shell command; for SafeAILab lines of Python"""
    bit_equal: bool
    """whether the tensors of the file are those of the drafter, bit for bit"""

    def words(self) -> str:
        """Return the notes and the command, as a person reads them."""
        return "\n".join([f"{self.path}: written for {ENGINES[self.format]}", *self.notes, "try it:", self.command])


def export_drafter(
    drafter: Drafter,
    path: str | Path,
    *,
    format: Format,
    target: Any = None,
    target_name: str | None = None,
    target_model_type: str | None = None,
    dtype: torch.dtype | None = None,
    num_speculative_tokens: int = 3,
) -> Exported:
    """Write ``drafter`` as the engine's loader wants it.

    Args:
        drafter: what to write; a head taken from the target is written as an own one.
        path: folder; made if need be. An earlier export there is replaced, any other folder is refused.
        format: "vllm", "sglang", "speculators" or "safeailab".
        target: the target that it will be served with (a Target or a Trajectory): its depth, length and embedding.
        target_name: hub id or path by which the engine finds the target; default the target's own name.
        target_model_type: as in the target's config.json, e.g. "gpt_oss"; SGLang counts layers otherwise for some.
        dtype: of the tensors (float32, bfloat16, float16); default the drafter's.
        num_speculative_tokens: K in the command, and in the file of speculators.

    Raises:
        DriftlabError: the drafter does not fit the target, the format cannot carry it (each reason by name), the folder
            holds something else, or what was written breaks a rule of the loader (a fault of this module).
    """
    dtype = drafter.dtype if dtype is None else dtype
    _check_arguments(format, target_name, target_model_type, dtype, num_speculative_tokens)
    path, config = Path(path), drafter.config
    facts = target_facts(drafter, target, target_name, target_model_type)
    wrong = misfits(config, facts)
    if wrong:
        raise DriftlabError("drafter does not fit the target: " + "; ".join(wrong))
    refused = cannot_carry(config, format, facts)
    if refused:
        raise DriftlabError(f"{ENGINES[format]} cannot carry this drafter: " + "; ".join(refused))
    tensors, notes = _tensors(drafter, format, facts, dtype)
    settings = settings_of(config, format, facts, dtype=_name(dtype), num_speculative_tokens=num_speculative_tokens)
    check_free(path)  # before any work, and again under the lock
    exported = Exported(
        path=path,
        format=format,
        notes=(*notes, *_notes(drafter, format, facts, dtype), *_about_target(drafter, target, target_name)),
        command=_command(path, format, facts, dtype, num_speculative_tokens),
        bit_equal=_keeps(drafter.dtype, dtype),
    )
    told = {"notes": list(exported.notes), "command": exported.command}
    write_folder(path, format, settings, tensors, config.aux_layers, told)
    return exported


def _check_arguments(form: Any, name: Any, model_type: Any, dtype: Any, tokens: Any) -> None:
    if form not in get_args(Format):
        raise DriftlabError(f"format {form!r}: choose from {', '.join(get_args(Format))}")
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise DriftlabError(f"num_speculative_tokens {tokens!r}: a drafter drafts one token or more, a whole number")
    if dtype not in _FLOATS:
        raise DriftlabError(f"dtype {dtype}: engines read float32, bfloat16 and float16")
    for option, value in (("target_name", name), ("target_model_type", model_type)):
        if value is not None and not isinstance(value, str):
            raise DriftlabError(f"{option} {value!r}: give a string")


def target_facts(drafter: Drafter, target: Any, name: str | None, model_type: str | None) -> TargetFacts:
    """Gather what is known of the target from what was given; see :func:`export_drafter`."""
    spec = getattr(target, "spec", None)
    own = "" if spec is None else spec.name
    hub_name, hub_type = _HUB_NAMES.get(own, (own, ""))
    return TargetFacts(
        name=name or hub_name,
        model_type=model_type or hub_type,
        num_layers=0 if spec is None else spec.num_layers,
        max_positions=0 if spec is None else spec.max_positions,
        embed=None if target is None else target.head.embed,
    )


def _tensors(
    drafter: Drafter, form: Format, facts: TargetFacts, dtype: torch.dtype
) -> tuple[dict[str, Tensor], list[str]]:
    config, notes = drafter.config, []
    tensors = {name: tensor.detach().cpu() for name, tensor in drafter.state_dict().items()}
    if config.lm_head != "own":
        tensors["lm_head.weight"] = drafter.lm_head.weight.detach().cpu()
        gain = " times the gain of its final norm" if config.lm_head == "target_with_norm" else ""
        notes.append(
            f"lm_head.weight: the target's rows{gain}, as this drafter uses them, written as a head of its own"
        )
    if form == "sglang" and config.own_embed and config.hidden_size == config.target_hidden_size:
        _check_embedding(tensors.pop("embed_tokens.weight"), facts)
        notes.append("embed_tokens.weight: equal to the target's, which SGLang uses in any case; left out")
    if config.attention_bias != config.output_bias:
        notes.append(_zero_biases(drafter, tensors))
    if form == "sglang":
        for layer in range(1, config.num_hidden_layers):
            gain = tensors[f"layers.{layer}.input_layernorm.weight"]
            tensors[f"layers.{layer}.hidden_norm.weight"] = gain.clone()
            notes.append(f"layers.{layer}: its input norm under both names, for SGLang calls it hidden_norm")
    if form == "safeailab":
        tensors = {_midlayer(name): tensor for name, tensor in tensors.items()}
    cast = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    notes += _check_values(tensors, cast, dtype)
    return {name: tensor.clone().contiguous() for name, tensor in cast.items()}, notes


def _check_values(before: dict[str, Tensor], after: dict[str, Tensor], dtype: torch.dtype) -> list[str]:
    """Refuse what the dtype cannot hold, by name; say how many small values became zero."""
    lost, small = {}, f"values too small for {_name(dtype)}"
    for name, tensor in after.items():
        if not tensor.is_floating_point():
            continue
        if not bool(tensor.isfinite().all()):
            raise DriftlabError(f"{name} holds values that are not finite in {_name(dtype)}: choose another dtype=")
        held, kept = int(before[name].count_nonzero()), int(tensor.count_nonzero())
        if 2 * kept < held:
            raise DriftlabError(
                f"{name}: {held - kept} of {held} values that are not zero are {small} and would become zero: choose "
                "another dtype="
            )
        if kept < held:
            lost[name] = held - kept
    if not lost:
        return []
    most = max(lost, key=lambda name: lost[name])
    return [f"dtype: {sum(lost.values())} {small} became zero, most of them in {most} ({lost[most]})"]


def _midlayer(name: str) -> str:
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name


def _check_embedding(own: Tensor, facts: TargetFacts) -> None:
    if facts.embed is None or facts.embed.shape != own.shape:
        raise DriftlabError(
            "own_embed: pass the target= that SGLang will serve, so that the two embeddings can be compared"
        )
    if not torch.equal(own.float(), facts.embed.detach().cpu().float()):
        raise DriftlabError(
            "SGLang cannot carry this drafter: own_embed: its embedding differs from the target's, which SGLang "
            "puts in its place in silence where the two are equally wide; use vllm"
        )


def _zero_biases(drafter: Drafter, tensors: dict[str, Tensor]) -> str:
    """Engines have biases at q, k, v and the output, or none: add zeros for those that the drafter has not."""
    config = drafter.config
    widths = (
        {"o_proj": config.hidden_size}
        if config.attention_bias
        else {
            "q_proj": config.num_attention_heads * config.head_dim,
            "k_proj": config.num_key_value_heads * config.head_dim,
            "v_proj": config.num_key_value_heads * config.head_dim,
        }
    )
    for layer in range(config.num_hidden_layers):
        for name, width in widths.items():
            tensors[f"layers.{layer}.self_attn.{name}.bias"] = torch.zeros(width, dtype=drafter.dtype)
    return f"biases of {', '.join(widths)}: zeros, for the loader wants them where the others are"


def _notes(drafter: Drafter, form: Format, facts: TargetFacts, dtype: torch.dtype) -> list[str]:
    config, notes = drafter.config, []
    if config.aux_layers and form == "sglang" and not facts.model_type:
        notes.append(
            "layer ids: counted as SGLang does for most targets (output of layer); for DeepSeek, Kimi and gpt-oss "
            "pass target_model_type="
        )
    if not config.own_embed:
        notes.append("embedding: none in the file, the target's is used")
        held, lent = drafter.embed_tokens.weight.detach().cpu(), facts.embed
        if lent is not None and not torch.equal(lent.detach().cpu().to(held.dtype), held):
            notes.append("embedding: that of this target differs from the one that the drafter has used until now")
    if config.rope_scaling is None or config.rope_scaling.kind != "dynamic":
        length = max_positions(config, facts)
        known = "" if facts.max_positions else f" (the target's is not known: {UNKNOWN_TARGET_POSITIONS} or more)"
        notes.append(f"max_position_embeddings: {length}{known}")
    if not _keeps(drafter.dtype, dtype):
        notes.append(
            f"dtype: {_name(drafter.dtype)} rounded to {_name(dtype)}; read back, the drafter is not bit-equal"
        )
    if form == "safeailab":
        notes.append("the target's folder must have an index of its shards (model.safetensors.index.json)")
    return notes


def _about_target(drafter: Drafter, target: Any, name: str | None) -> list[str]:
    """Say where the target that will be served is not, or may not be, the one that the drafter learned from."""
    spec, trained, notes = getattr(target, "spec", None), drafter.trained_for, []
    if target is None:
        notes.append("target: not given, so that its states, vocabulary and width were not compared with the drafter's")
    if trained is not None and (spec is None or spec.fingerprint != trained["fingerprint"]):
        notes.append(f"trained for {trained['label']}: with other weights it accepts less")
    if spec is not None and name is None and spec.name in _HUB_NAMES:
        notes.append(f"target: {_HUB_NAMES[spec.name][0]}, whose weights are not those of {spec.label}")
    return notes


def _keeps(held: torch.dtype, written: torch.dtype) -> bool:
    """Whether every value of one dtype is one of the other."""
    return written == held or (written == torch.float32 and held in (torch.bfloat16, torch.float16))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _command(path: Path, form: Format, facts: TargetFacts, dtype: torch.dtype, tokens: int) -> str:
    target, folder = facts.name or "TARGET", str(path)
    if form == "speculators":
        return f"vllm serve {shlex.quote(folder)}"
    if form == "vllm":
        told = json.dumps({"method": "eagle3", "model": folder, "num_speculative_tokens": tokens})
        return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(told)}"
    if form == "sglang":
        return (
            f"python3 -m sglang.launch_server --model-path {shlex.quote(target)} --speculative-algorithm EAGLE3 "
            f"--speculative-draft-model-path {shlex.quote(folder)} --speculative-num-steps {tokens} "
            f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {tokens + 1}"
        )
    return (
        "import torch\nfrom eagle.model.ea_model import EaModel\nmodel = "
        f"EaModel.from_pretrained(base_model_path={target!r}, ea_model_path={folder!r}, use_eagle3=True, "
        f"torch_dtype=torch.{_name(dtype)})"
    )
