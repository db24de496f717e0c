"""A chain by the fused step kernels: when they can stand in for the modules, and what the hooks are told afterwards."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.modules import module as module_hooks

from driftlab.drafter import Drafter, DraftState
from driftlab.errors import DriftlabError
from driftlab.hooks import HookPoint
from driftlab.kernels import chain as kernels
from driftlab.kernels.backend import cannot_compute
from driftlab.kernels.problem import Problem, sees_sink
from driftlab.kernels.recent import recent_mass

_ATTENTION = "layers.0.self_attn"
STATISTICS = tuple(f"{_ATTENTION}.hook_{name}" for name in ("mass", "entropy", "recent"))
SERVED = (
    *(*STATISTICS, f"{_ATTENTION}.hook_visible", f"{_ATTENTION}.hook_sees_sink"),
    *("layers.0.hook_resid", "hook_normed", "hook_feedback"),
)
"""hook points whose values the kernels leave behind, for hooks that only read"""
_BEFORE = ("fusion.", "hook_starts")
"""hook points that a chain passes at depth 1 only, in plain torch"""


class FusedChain:
    """The step kernels of one drafter, with buffers and graph that outlive a round."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self._kernels: Any = None
        self._made_for: tuple[Any, ...] = ()

    def refuses(self, state: DraftState) -> str:
        """Return why chains from a state at depth 1 cannot be drafted by the kernels now; empty if they can."""
        batch = len(state.starts.rows)
        if batch > kernels.MOST:
            return f"batch {batch}: the step kernels take at most {kernels.MOST} sequences"
        if self.drafter.config.norm_output and state.feedback is not state.normed:
            return "the feedback of depth 1 was replaced, and the step reads the normed state"
        return _refuses(self.drafter) or _watched(self.drafter)

    def fuse(self, aux: Float[Tensor, "batch row aux d_target"]) -> Float[Tensor, "batch row d_model"] | None:
        """Return the fusion of a few new rows by its kernel; None where the module is to do it, for size, kind or hooks."""
        drafter = self.drafter
        if aux.shape[0] * aux.shape[1] > kernels.MOST or _refuses(drafter) or not drafter.config.aux_layers:
            return None
        parts = (drafter.fusion, drafter.input_norm, drafter.fc_norm, drafter.fc)
        modules = [module for part in parts for module in part.modules()]
        if any(module._forward_hooks or module._forward_pre_hooks for module in modules):
            return None
        return kernels.fuse(drafter, aux)

    def draft(self, state: DraftState, depth: int) -> Int[Tensor, "batch depth"]:
        """Draft ``depth`` tokens (target ids) from a state at depth 1 with one start a sequence, and tell the hooks."""
        return self._run(state, depth).tokens.clone()  # the next round writes its buffer again

    def sample(
        self, state: DraftState, depth: int, temperature: float, uniforms: Float[Tensor, "batch depth"]
    ) -> tuple[Int[Tensor, "batch depth"], Float[Tensor, "batch depth draft_vocab"]]:
        """Draw tokens at a temperature above 0, each with its number in [0, 1); also return the logits they were drawn by."""
        made = self._run(state, depth, temperature, uniforms)
        return made.tokens.clone(), made.logits.clone()

    def _run(self, state: DraftState, depth: int, temperature: float = 0.0, uniforms: Tensor | None = None) -> Any:
        point = self.drafter.hook_dict
        probes = any(point[name].watched for name in STATISTICS)
        (kv,), starts = state.kv, state.starts
        context, batch = kv.k.shape[2], len(starts.rows)
        attention = self.drafter.layers[0].self_attn  # window and scale are constants of the compiled kernel
        needed = (batch, depth, probes, self.drafter.dtype, self.drafter.device, attention.window, attention.scale)
        if self._kernels is None or needed != self._made_for or context + depth > self._kernels.capacity:
            capacity = 1 << (context + depth).bit_length()
            self._kernels = kernels.StepKernels(self.drafter, batch, capacity, depth, probes=probes)
            self._made_for = needed
        made = self._kernels.draft(
            *(kv, state.feedback[:, 0], state.normed[:, 0], starts.rows[:, 0], starts.segments, depth),
            uniforms=uniforms,
            temperature=temperature,
        )
        bad = (~made.normed.isfinite()).any(-1) | ~made.lse.isfinite()
        if bool(bad.any()):
            sequence, at = bad.nonzero()[0].tolist()
            raise not_finite(starts.ids[sequence], int(starts.rows[sequence, 0]), at + 1)
        for k in range(2, depth + 1):
            self._tell(made, state, k)
        return made

    def _tell(self, made: Any, state: DraftState, depth: int) -> None:
        """Pass what the kernels left of depth ``depth`` >= 2 to the hook points."""
        at, attention = depth - 2, self.drafter.layers[0].self_attn  # the kernels' first step is depth 2
        point = self.drafter.hook_dict

        def tell(name: str, value: Tensor) -> None:
            if point[name].watched:
                point[name](value.clone(), depth)  # the next round writes the buffer again

        rows, own, window = state.starts.rows, depth - 1, attention.window
        seen = rows + 1 + own
        tell(f"{_ATTENTION}.hook_visible", seen.clamp(max=window) if window else seen)
        if made.mass is not None:
            tell(f"{_ATTENTION}.hook_sees_sink", sees_sink(self._problem(made, state, depth)))
            tell(f"{_ATTENTION}.hook_mass", made.mass[:, :, at : at + 1])
            tell(f"{_ATTENTION}.hook_entropy", made.entropy[:, :, at : at + 1])
        if point[f"{_ATTENTION}.hook_recent"].watched and attention.recent_windows:
            lse = made.attention_lse[:, :, at : at + 1]
            mass = recent_mass(self._problem(made, state, depth), lse, attention.recent_windows)
            tell(f"{_ATTENTION}.hook_recent", mass)
        tell("layers.0.hook_resid", made.resid[:, at : at + 1])
        tell("hook_normed", made.normed[:, depth - 1 : depth])
        tell("hook_feedback", made.feedback[:, depth - 1 : depth])

    def _problem(self, made: Any, state: DraftState, depth: int) -> Problem:
        """What was attended to at depth ``depth``; the own keys stand in the kernels' cache behind each start's row."""
        (kv,), starts, attention, own = state.kv, state.starts, self.drafter.layers[0].self_attn, depth - 1
        place = starts.rows + 1 + torch.arange(own, device=starts.rows.device)
        keys, values = (
            cache.take_along_dim(place[:, None, :, None], 2)[:, :, None]
            for cache in (self._kernels.k_cache, self._kernels.v_cache)
        )
        return Problem(
            **{"q": made.q[:, :, depth - 2 : depth - 1], "context_k": kv.k, "context_v": kv.v},
            **{"own_k": keys, "own_v": values, "rows": starts.rows, "segments": starts.segments},
            **{"scale": attention.scale, "window": attention.window},
        )


def not_finite(sequence: str, row: int, depth: int) -> DriftlabError:
    """Return the error of a draft state that is not finite."""
    return DriftlabError(
        f"the draft state is not finite: sequence {sequence!r}, row {row}, depth {depth}. Look for NaN or inf in the weights "
        "and in what hooks returned; half precision overflows"
    )


def _refuses(drafter: Drafter) -> str:
    """Why the kernels cannot stand in for the drafter's modules, hooks aside."""
    replaced = drafter.replaced_modules()
    if replaced:
        return f"the module {replaced[0]} is not as the drafter was built"
    if module_hooks._global_forward_hooks or module_hooks._global_forward_pre_hooks:
        return "a hook on every module is registered (register_module_forward_hook)"
    weights = {**dict(drafter.named_parameters()), **dict(drafter.named_buffers())}
    scattered = next((name for name, x in weights.items() if not x.is_contiguous()), "")
    if scattered:
        return f"{scattered} is not contiguous in memory"
    kinds = {x.dtype for x in weights.values() if x.is_floating_point()}
    if len(kinds) > 1:
        return f"weights of several dtypes ({', '.join(sorted(map(str, kinds)))})"
    return cannot_compute(drafter.dtype) or kernels.refuses(drafter)


def _watched(drafter: Drafter) -> str:
    """Which hook the kernels cannot honour, in words."""
    for name, module in drafter.named_modules():
        if module._forward_pre_hooks or (module._forward_hooks and not isinstance(module, HookPoint)):
            return f"a hook is attached to the module {name or 'itself'}, which the fused step does not run"
        if isinstance(module, HookPoint):
            if not module.watched or name.startswith(_BEFORE):
                continue
            if name not in SERVED:
                return f"{name} is watched, and the fused step does not make it"
            if module.replaceable:
                return f"a hook on {name} may replace its value (attach it with read_only=True if it only looks)"
    return ""
