"""Quantised checkpoints: told apart and refused, except block-wise fp8 (DeepSeek-V3), which is multiplied out.

    W[i, j] = W8[i, j] * weight_scale_inv[i // b0, j // b1]          blocks b0 x b1 as quantization_config says, 128 x 128

in float32. What is known of a checkpoint's quantisation stands in its config.json (``quantization_config``), beside it
(``hf_quant_config.json`` of ModelOpt), and in the dtypes and names of its tensors. Where only some tensors are read, an MTP
head of a quantised target say, theirs alone count.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from driftlab.drafter.formats.tensorfiles import Info
from driftlab.errors import DriftlabError

SCALE = "_scale_inv"
"""what is appended to the name of an fp8 weight for the name of its scales"""
_PLAIN = {"F64", "F32", "F16", "BF16", "BOOL", "I64", "I32", "I16"}
_WHOLE = {"I8", "U8", "U16", "U32", "U64"}
"""small and unsigned numbers, in which a map may be stored and no weight"""
_PACKED_NAME = re.compile(
    r"(?:^|[._])(?:weight_packed|weight_scale|weight_scale_2|weight_zero_point|weight_shape|weight_g_idx|input_scale|qweight|"
    r"qzeros|scales|g_idx|SCB|absmax|quant_map|nested_absmax|nested_quant_map|blocks)$|\.quant_state\."
)
_UNWANTED = (
    "drafters are read unquantised, in float32, float16 or bfloat16: use the checkpoint that this one was made from"
)


def said_quantised(config: Mapping[str, Any], beside: Mapping[str, Any] | None) -> str:
    """Return in words what quantisation is named by config.json, or ``hf_quant_config.json`` beside it; empty: none."""
    block = quantisation_block(config)
    if block:
        method = block.get("quant_algo") or block.get("quant_method") or block.get("format") or "no method named"
        return f"quantization_config in config.json: {method}"
    told = (beside or {}).get("quantization")
    method = told.get("quant_algo") if isinstance(told, dict) else told
    return f"hf_quant_config.json: {method}" if method else ""


def quantisation_block(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``quantization_config`` of a config or of the layer's config inside it; empty if there is none."""
    inner = (config.get(name) for name in ("transformer_layer_config", "text_config"))
    places = (config, *(place for place in inner if isinstance(place, dict)))
    blocks = [(name, place.get(name)) for place in places for name in ("quantization_config", "compression_config")]
    for name, block in blocks:
        if block and not isinstance(block, dict):
            raise DriftlabError(f"config.json: {name} is {block!r}, not a table of settings")
    return next((block for _, block in blocks if block), {})


def unpacked(
    infos: Mapping[str, Info], config: Mapping[str, Any], said: str, label: str, *, whole: bool
) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """Return the shapes of the tensors to be read, without fp8 scales, and notes.

    Args:
        infos: raw tensors.
        config: config.json.
        said: of :func:`said_quantised`.
        label: the checkpoint, in words.
        whole: whether ``infos`` are all tensors; if not, what config.json says may be about others.

    Raises:
        DriftlabError: quantised otherwise than by blocks of fp8, or scales that do not fit their weights.
    """
    scaled = [name for name, info in infos.items() if info.dtype == "F8_E4M3" and name + SCALE in infos]
    scales = {name + SCALE for name in scaled}
    for name, info in infos.items():
        if info.dtype.removeprefix("torch.").lower().startswith("c"):
            raise DriftlabError(f"{label}: {name} is complex ({info.dtype}): a weight is a real number")
        packed = info.dtype not in _PLAIN and not (name.endswith(("t2d", "d2t")) and info.dtype in _WHOLE)
        if name not in scaled and name not in scales and (packed or _PACKED_NAME.search(name) or name.endswith(SCALE)):
            raise DriftlabError(
                f"{label} is quantised ({said or 'by its tensors'}): {name} is {info.dtype}; {_UNWANTED}"
            )
    if said and not scaled and whole:
        raise DriftlabError(
            f"{label} is quantised ({said}), though its tensors look unquantised; {_UNWANTED}. If nothing is "
            "quantised, take that setting out"
        )
    notes = (
        [f"{said}: no tensor that is read is quantised, so they are taken as they are"] if said and not scaled else []
    )
    if scaled:
        block = block_size(config, scaled[0], label)
        for name in scaled:
            _check_scale(name, infos, block, label)
        notes.append(
            f"{len(scaled)} weights in fp8 are multiplied by their scales, in float32, by blocks of {block[0]} x "
            f"{block[1]}; engines round the activations to fp8 as well, so that their logits differ a little"
        )
    return {name: info.shape for name, info in infos.items() if name not in scales}, notes


def block_size(config: Mapping[str, Any], name: str, label: str) -> tuple[int, int]:
    """Return the rows and columns that share a scale. Raises DriftlabError if config.json does not say."""
    size = quantisation_block(config).get("weight_block_size")
    if not (isinstance(size, list) and len(size) == 2 and all(isinstance(n, int) and n > 0 for n in size)):
        raise DriftlabError(
            f"{label}: {name} is fp8 with scales, but quantization_config.weight_block_size in config.json is "
            f"{size!r}, not two widths: it cannot be multiplied out"
        )
    return size[0], size[1]


def multiplied_out(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the float32 weight [out in] of an fp8 one and its scales [ceil(out / b0) ceil(in / b1)]."""
    rows = torch.arange(weight.shape[0]) // block[0]
    columns = torch.arange(weight.shape[1]) // block[1]
    return weight.float() * scale.float()[rows][:, columns]


def _check_scale(name: str, infos: Mapping[str, Info], block: tuple[int, int], label: str) -> None:
    shape, have = infos[name].shape, infos[name + SCALE].shape
    kind = infos[name + SCALE].dtype.removeprefix("torch.").upper()
    if kind not in ("F32", "BF16", "F16", "FLOAT32", "BFLOAT16", "FLOAT16"):
        raise DriftlabError(
            f"{label}: {name}{SCALE} is {kind}, not a plain number to multiply by: convert the weights to bf16"
        )
    fits = len(shape) == 2 and have == tuple(-(-size // width) for size, width in zip(shape, block, strict=True))
    if not fits:
        raise DriftlabError(
            f"{label}: {name} is {list(shape)} and {name}{SCALE} is {list(have)}, which is not one scale for each "
            f"block of {block[0]} x {block[1]}"
        )
