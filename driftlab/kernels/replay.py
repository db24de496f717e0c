r"""Replay attention: one fused Triton kernel for many starts, with masses and entropy reduced beside the output.

    s_j = scale * (q . k_j) * score_scale + bias[segment(j)],   p = softmax(s),   out = sum_j p_j v_j,
    mass[seg] = sum_{j in seg} p_j,   entropy = -sum_j p_j ln p_j  (nats),   lse = ln sum_j exp s_j.

The kernel is handed the context as runs of keys of one segment; nothing of the size starts x context is ever made. The
gradients are made from lse again, without Triton (``kernels.blocked``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from driftlab.errors import DriftlabError
from driftlab.kernels import blocked, configs
from driftlab.kernels.problem import Attended, Problem, visible_keys
from driftlab.kernels.recent import recent_mass
from driftlab.segments import Segment

MAX_RUNS = 16
"""runs of equal segment, over which the masses are reduced one after the other"""

MAX_HEAD = 256
"""largest head size, of keys or values, for which a tile fits into shared memory"""

MAX_TILE_STRIDE = 2**24
"""elements between two keys: offsets within a tile are 32-bit numbers"""

_TYPES = (torch.float32, torch.float16, torch.bfloat16)


def refuses(problem: Problem) -> str:
    """Return why the kernel cannot answer this problem, in words; empty if it can."""
    tensors = [problem.q, problem.context_k, problem.context_v, problem.own_k, problem.own_v]
    types = {t.dtype for t in tensors}
    sizes = problem.q.shape[-1], problem.context_v.shape[-1]
    if len(types) > 1:
        return f"queries, keys and values are of different types ({', '.join(sorted(map(str, types)))})"
    if types.isdisjoint(_TYPES):
        return f"{problem.q.dtype} (it takes float32, float16 and bfloat16)"
    if max(sizes) > MAX_HEAD:
        return f"head sizes {sizes[0]} and {sizes[1]} (at most {MAX_HEAD})"
    if problem.controls.drop is not None:
        return "single keys are dropped (controls.drop)"
    if problem.stats.columns:
        return "the mass of each single key is asked for (stats.columns)"
    if max(t.stride(-2) for t in tensors[1:3]) > MAX_TILE_STRIDE:
        return f"two keys lie more than {MAX_TILE_STRIDE} elements apart"
    if _by_segment(problem) and runs(problem.segments, problem.carried).shape[1] > MAX_RUNS:
        return f"the segments change more than {MAX_RUNS - 1} times along the context"
    return ""


def attend(problem: Problem) -> Attended:
    """Answer a problem as ``reference.attend`` does, accumulated in float32 whatever the inputs' type.

    Raises:
        DriftlabError: the kernel cannot honour it, see ``refuses``.
    """
    why = refuses(problem)
    if why:
        raise DriftlabError(f'the replay kernel cannot answer this: {why}; use backend="torch"')
    batch, heads, starts, _ = problem.q.shape
    d_value, device = problem.context_v.shape[-1], problem.q.device
    probes = problem.stats.mass or problem.stats.entropy

    def made(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(batch, heads, starts, *shape, dtype=dtype, device=device)

    out, lse = made(d_value, dtype=problem.context_v.dtype), made()
    mass, entropy = (made(len(Segment)), made()) if probes else (None, None)
    if batch and starts:
        _launch(problem, out, lse, mass, entropy)
    return Attended(
        out=out,
        lse=lse,
        mass=mass if problem.stats.mass else None,
        entropy=entropy if problem.stats.entropy else None,
        visible=visible_keys(problem),
        recent=recent_mass(problem, lse, problem.stats.recent) if problem.stats.recent else None,
        columns=None,
    )


def backward(
    problem: Problem, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, context_k, context_v, own_k, own_v, from lse and without a start x context map."""
    return blocked.backward(problem, out, lse, d_out, d_lse)


def runs(segments: Tensor, carried: int, by_segment: bool = True) -> Tensor:
    """Return the runs of keys of ``segments [batch ctx]``: [batch, run, (first, end, segment, window applies)], int32.

    A run has one segment (any, if not ``by_segment``) and lies on one side of ``carried``. Sequences with fewer runs than
    another are padded with empty ones. Kept on the tensor until it is written to: counting the runs waits for the device.
    """
    key = carried, by_segment
    if segments.is_inference():  # has no version, so a kept table could be stale
        return _runs(segments, carried, by_segment)
    version, kept = getattr(segments, "_driftlab_runs", (-1, {}))
    if version != segments._version:
        kept = {}
        segments._driftlab_runs = segments._version, kept
    if key not in kept:
        kept[key] = _runs(segments, carried, by_segment)
    return kept[key]


def _runs(segments: Tensor, carried: int, by_segment: bool) -> Tensor:
    batch, context = segments.shape
    device = segments.device
    if not by_segment:
        edges = sorted({0, min(carried, context), context})
        table = [[first, end, 0, int(first >= carried)] for first, end in zip(edges, edges[1:], strict=False)]
        return torch.tensor(table, dtype=torch.int32, device=device).view(1, -1, 4).repeat(batch, 1, 1)
    place = torch.arange(context, device=device)
    begins = (place == 0) | (place == carried)
    begins = begins | torch.cat([segments[:, :1] != segments[:, :1], segments[:, 1:] != segments[:, :-1]], 1)
    count = begins.sum(1)
    most = int(count.max()) if segments.numel() else 0
    first = torch.where(begins, place, context).sort(1).values[:, :most]
    end = torch.cat([first[:, 1:], first.new_full((batch, 1 if most else 0), context)], 1)
    segment = segments.gather(1, first.clamp(max=max(context - 1, 0)))
    return torch.stack([first, end, segment, (first >= carried).to(first.dtype)], -1).to(torch.int32).contiguous()


def _by_segment(problem: Problem) -> bool:
    """Whether the kernel has to tell segments apart."""
    return problem.stats.mass or problem.controls.bias is not None


def _launch(problem: Problem, out: Tensor, lse: Tensor, mass: Tensor | None, entropy: Tensor | None) -> None:
    from driftlab.kernels.replay_kernels import replay_attn_fwd_kernel

    batch, heads, starts, d_head = problem.q.shape
    kv_heads, d_value = problem.context_v.shape[1], out.shape[-1]
    group = heads // kv_heads
    names = ("q", "context_k", "context_v", "own_k", "own_v")
    q, context_k, context_v, own_k, own_v = (_last_axis_contiguous(getattr(problem, name)) for name in names)
    bias, scaling, scale = _controls(problem)
    sink = problem.sink_logit
    table = runs(problem.segments, problem.carried, _by_segment(problem))
    half = q.element_size() == 2
    block_m, block_n, warps, stages = configs.replay_tile(d_head, d_value, q.element_size(), batch * heads * starts)
    strides = [stride for tensor in (q, context_k, context_v, own_k, own_v) for stride in tensor.stride()[:-1]]
    strides += [0] * 4 if bias is None else bias.stride()
    strides += [0] * 3 if scaling is None else scaling.stride()
    grid = (-(-starts * group // block_m), kv_heads, batch)
    with torch.cuda.device_of(q):
        replay_attn_fwd_kernel[grid](
            *(q, context_k, context_v, own_k, own_v, problem.rows.to(torch.int32).contiguous(), table),
            *(bias, scaling, None if sink is None else sink.float().contiguous(), out, lse, mass, entropy),
            *(*strides, starts, problem.own, table.shape[1], problem.window, scale),
            **{"G": group, "D": d_head, "DV": d_value, "DP": configs.padded(d_head), "DVP": configs.padded(d_value)},
            **{"BM": block_m, "BN": block_n, "PROBES": mass is not None, "BIAS": bias is not None},
            **{"SCALING": scaling is not None, "SINK": sink is not None, "WINDOWED": problem.window > 0},
            **{"IEEE": not half, "num_warps": warps, "num_stages": stages, "enable_fp_fusion": True},
        )


def _controls(problem: Problem) -> tuple[Tensor | None, Tensor | None, float]:
    """Bias [batch head start seg] and score scale [batch head start] as float32 views, or None; and the scale of all scores."""
    controls, shape = problem.controls, problem.q.shape[:3]
    bias, scaling = controls.bias, controls.score_scale
    if bias is not None:
        bias = bias.float().expand(*shape, len(Segment))
    if isinstance(scaling, Tensor):
        return bias, scaling.float().expand(shape), float(problem.scale)
    return bias, None, float(problem.scale * scaling)


def _last_axis_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()
