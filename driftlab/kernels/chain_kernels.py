"""The kernels of a draft step in one place; see ``chain`` for what each does."""

from __future__ import annotations

from typing import Any

from driftlab.kernels.chain import SPLITS, WARPS, decode_tiles, gate_up_tiles, power_of_two, tiles_of
from driftlab.kernels.configs import AotCase
from driftlab.kernels.decode_kernels import decode_kernel
from driftlab.kernels.head_kernels import head_kernel
from driftlab.kernels.matvec_kernels import fuse_kernel, gate_up_kernel, project_kernel, qkv_kernel

__all__ = ["aot_cases", "decode_kernel", "fuse_kernel", "gate_up_kernel", "head_kernel", "project_kernel", "qkv_kernel"]


def aot_cases() -> list[AotCase]:
    """Return every kernel for a drafter of the size that goes with an 8B target, bfloat16, batch 1 and 8."""
    width, heads, kv_heads, d_head, inner, vocab = 4096, 32, 8, 128, 14336, 32000
    cases = []
    for batch in (1, 8):
        tiles, wide = tiles_of(batch), gate_up_tiles(batch)
        blocks = -(-vocab // tiles.BN)
        norms = {"EPS": 1e-5, "PLUS_ONE": False}
        whole = {"B": batch, "BIAS": False, **vars(tiles)}
        heads_of = {"H": heads, "KVH": kv_heads, "HD": d_head}
        head = {"B": batch, "V": vocab, "D": width, "BLOCKS": blocks, "BB": power_of_two(blocks), "LOGIT_SCALE": 1.0}
        head |= {"NORM": True, "STORE": True, "REDUCED": True, **norms, **vars(tiles)}
        fuse = {"N": width, "K": width, "AUX": 3, **norms}
        constants = [
            ("qkv", qkv_kernel, {"D": width, "STORE": False, **heads_of, **norms, **whole}),
            ("o", project_kernel, {"N": width, "K": heads * d_head, **whole}),
            ("gate_up", gate_up_kernel, {"B": batch, "BIAS": False, "N": inner, "K": width, **norms, **vars(wide)}),
            ("down", project_kernel, {"N": width, "K": inner, **whole}),
            ("head argmax", head_kernel, {"SAMPLE": False, **head}),
            ("head sample", head_kernel, {"SAMPLE": True, **head}),
            ("fuse", fuse_kernel, {"NORM": False, **fuse, **whole}),
            ("fuse fc_norm", fuse_kernel, {"NORM": True, **fuse, **whole}),
        ]
        cases += [_case(f"chain {name} batch {batch}", kernel, c, tiles.DOT, True) for name, kernel, c in constants]
    attention = {**heads_of, "SCALE": d_head**-0.5, "SPLITS": SPLITS, **decode_tiles(heads // kv_heads, d_head)}
    for probes in (False, True):
        for window in (0, 2048):
            name = f"chain decode{' probes' if probes else ''}{' window' if window else ''}"
            cases.append(
                _case(name, decode_kernel, {"WINDOW": window, "PROBES": probes, **attention}, wgmma=False, stream=True)
            )
    return cases


TYPES = {
    **dict.fromkeys(("tokens", "rows", "d2t"), "*i64"),
    **dict.fromkeys(("segments", "count", "p_arg"), "*i32"),
    **dict.fromkeys(("mass", "entropy", "lse", "p_max", "p_sum", "p_cross", "p_mass", "p_out", "p_warm"), "*fp32"),
    **dict.fromkeys(("logits", "uniforms", "temperature", "out_max", "out_lse"), "*fp32"),
    **dict.fromkeys(("step", "capacity"), "i32"),
}
"""of the arguments that are not bfloat16 states or weights"""


def _case(name: str, kernel: Any, constants: dict[str, Any], wgmma: bool, stream: bool) -> AotCase:
    types = {n: TYPES.get(n, "*bf16") for n in kernel.arg_names if n not in constants}
    aligned = tuple(n for n, kind in types.items() if kind.startswith("*"))
    return AotCase(name, kernel, types, constants, aligned, WARPS, 3, wgmma, stream)
