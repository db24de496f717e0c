"""The only place that knows transformers: load a target, run it, capture its states, watch its attention.

Aux states are captured by forward pre-hooks, because ``output_hidden_states=[...]`` changed its meaning between 5.22 and
5.23 and the last entry is after the final norm (transformers#26142). Index k is the residual stream after k layers.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from jaxtyping import Bool, Float, Int
from packaging.version import Version
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
)
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import sdpa_mask

from driftlab.errors import DriftlabError
from driftlab.recorded import TargetHead, TargetSpec
from driftlab.target.caches import SlotCache, TargetCache
from driftlab.target.watching import MassRecorder, mass_attention, slot_attention
from driftlab.target.windows import Window, window_mask, windowed

_CACHE_ARGUMENT = "cache" if Version(transformers.__version__) >= Version("5.24") else "past_key_values"
_MASS_ATTENTION = "driftlab_mass"
_SLOT_ATTENTION = "driftlab_slots"
_QUERY_BLOCK = 256
_HEAD_BLOCK = 8192
_CHECKSUM_BLOCK = 1 << 22
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DRAFT_TENSORS = (".fc.weight", ".fc_norm.", ".d2t", ".t2d", ".midlayer.", ".hidden_norm.weight")
_NOT_OF_THE_MODEL = {"architectures", "transformers_version", "dtype", "torch_dtype", "use_cache"}


class Adapter:
    """A loaded causal language model behind the few operations that driftlab needs."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.decoder = model.get_decoder()
        if not hasattr(self.decoder, "layers") or not hasattr(self.decoder, "norm"):
            raise DriftlabError(
                f"{type(model).__name__}: its decoder has no .layers and .norm, so its states cannot be captured"
            )
        self.config = model.config.get_text_config()
        self.window: Window | None = None

    @property
    def device(self) -> torch.device:
        """Where input ids go."""
        return self.model.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The model's floating-point type."""
        return self.model.dtype

    def head(self) -> TargetHead:
        """Embedding, head and final-norm gain."""
        return TargetHead(
            self.model.get_input_embeddings().weight.detach(),
            self.model.get_output_embeddings().weight.detach(),
            self._norm_gain(),
        )

    @torch.no_grad()
    def _norm_gain(self) -> Tensor:
        """Gain of the final norm, read from what it does: Gemma's parameter is the gain minus one."""
        weight = self.decoder.norm.weight
        # a power of two leaves no rounding, and eps vanishes beside its square
        return self.decoder.norm(torch.full_like(weight, 2.0**14)[None])[0]

    def spec(self, name: str, label: str, eos_ids: tuple[int, ...]) -> TargetSpec:
        """Shapes and identity, read from the text config."""
        config = self.config
        rope = config.rope_parameters
        if "rope_theta" not in rope:  # by kind of layer; a drafter attends to all keys
            rope = rope["full_attention"] if "full_attention" in rope else next(iter(rope.values()))
        heads = config.num_attention_heads
        return TargetSpec(
            name=name,
            label=label,
            fingerprint=self._fingerprint(eos_ids),
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            vocab_size=self.model.get_input_embeddings().weight.shape[0],
            num_attention_heads=heads,
            num_key_value_heads=_present(config, "num_key_value_heads") or heads,
            head_dim=_present(config, "head_dim") or config.hidden_size // heads,
            rms_norm_eps=float(_present(config, "rms_norm_eps") or 1e-6),
            rope_theta=float(rope["rope_theta"]),
            rope_type=rope["rope_type"],
            max_positions=config.max_position_embeddings,
            eos_ids=eos_ids,
        )

    def _fingerprint(self, eos_ids: tuple[int, ...]) -> str:
        """Hash of every weight, of the configuration and of what ends a text: whatever changes a recording changes it."""
        config = self.config.to_dict()
        settings = {key: config[key] for key in sorted(config) if key not in _NOT_OF_THE_MODEL and key[0] != "_"}
        digest = hashlib.sha256(f"{settings} {eos_ids}".encode())
        for name, parameter in sorted(self.model.named_parameters()):
            digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype} {checksum(parameter)}".encode())
        return digest.hexdigest()

    @property
    def hooked(self) -> bool:
        """Whether somebody's forward hooks sit on the model: they change what it does without changing its weights.

        (transformers' own, which stay once ``output_hidden_states`` was asked for, only look.)
        """
        hooks = (h for m in self.model.modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values()))
        return not all(_is_transformers_own(hook) for hook in hooks)

    @contextmanager
    def capturing(self, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Fill a dict with the residual stream after k layers, for each k in ``layers``, at every forward in the block."""
        states: dict[int, Tensor] = {}
        handles = []
        for k in layers:
            module = self.decoder.layers[k] if k < len(self.decoder.layers) else self.decoder.norm
            handles.append(module.register_forward_pre_hook(functools.partial(_keep, states, k), with_kwargs=True))
        try:
            yield states
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def attending(self, window: Window) -> Iterator[None]:
        """Attend through a window in the block (:mod:`driftlab.target.windows`).

        Raises:
            DriftlabError: layers that are no softmax attention, which see all of a text through a state; see also
                :func:`driftlab.target.windows.windowed`.
        """
        if unknown := self._other_layer_types():
            raise DriftlabError(
                f"{type(self.model).__name__} has layers of type {unknown}: they see the text in another way than through "
                "a mask over its keys, so a window would not hold"
            )
        with windowed(self.model, self.config, window):
            self.window = window
            try:
                yield
            finally:
                self.window = None

    def new_cache(self) -> TargetCache:
        """Return an empty cache."""
        return TargetCache(config=self.config)

    def hidden(
        self,
        tokens: Int[Tensor, "batch pos"],
        *,
        cache: DynamicCache | None = None,
        attention_mask: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Float[Tensor, "batch pos d_target"]:
        """Run the decoder; return its states after the final norm. ``cache`` is extended in place."""
        kwargs: dict[str, Any] = {"use_cache": cache is not None}
        if cache is not None:
            kwargs[_CACHE_ARGUMENT] = cache
            self._note_for_rollback(tokens, cache, attention_mask, positions)
        if attention_mask is not None:
            kwargs["attention_mask"] = attention_mask
        if positions is not None:
            kwargs["position_ids"] = positions
        return self.decoder(tokens, **kwargs).last_hidden_state

    def _note_for_rollback(
        self, tokens: Tensor, cache: DynamicCache, attention_mask: Tensor | None, positions: Tensor | None
    ) -> None:
        if not isinstance(cache, TargetCache) or cache.rollback is None:
            return
        pos = tokens.shape[1]

        def run(kept: int) -> None:
            rollback, cache.rollback = cache.rollback, None  # this pass is not one to take back
            mask = None if attention_mask is None else attention_mask[:, : attention_mask.shape[1] - pos + kept]
            at = None if positions is None else positions[:, :kept]
            self.hidden(tokens[:, :kept], cache=cache, attention_mask=mask, positions=at)
            cache.rollback = rollback

        cache.rollback.note(cache, pos, run)

    def logits(self, last_hidden: Float[Tensor, "*batch d_target"]) -> Float[Tensor, "*batch vocab"]:
        """The head on post-norm states, in float32 whatever the model's type.

        (Half-precision logits lie on a grid of 1/8 where they are large: probabilities would be off by several per cent, and
        a text chosen by them could not be replayed from the recorded states.)
        """
        head = self.model.get_output_embeddings()
        states = last_hidden.to(head.weight.device)
        if head.weight.dtype in (torch.float32, torch.float64):
            return head(states.to(head.weight.dtype)).float()
        wide = states.float()
        return torch.cat([torch.nn.functional.linear(wide, w.float()) for w in head.weight.split(_HEAD_BLOCK)], -1)

    @torch.inference_mode()
    def check_head(self, tokens: Int[Tensor, "batch pos"]) -> None:
        """Raise DriftlabError unless the head's matrix on the last hidden states gives the model's own logits.

        (Soft-capping, scaling or a bias of the head differ.) Of finite states they are finite; others are told with their
        place where they are recorded.
        """
        own = self.model(tokens, use_cache=False).logits.float()
        head, hidden = self.model.get_output_embeddings().weight, self.hidden(tokens)
        if not bool(hidden.isfinite().all()):
            return
        ours = torch.nn.functional.linear(hidden.to(head), head).float().to(own.device)
        if not bool(own.isfinite().all()):
            bad = int((~own.isfinite()).nonzero()[0, -1])
            raise DriftlabError(
                f"the target's logit of token {bad} is not finite, though its states are: look for NaN or inf in its head "
                "(lm_head.weight), or load it in float32 (half precision overflows at 65504)"
            )
        worst = float((own - ours).abs().max())
        if worst > 1e-3 * max(1.0, float(own.abs().max())) * (1 if self.dtype == torch.float32 else 16):
            raise DriftlabError(
                f"{type(self.model).__name__} does more after its final norm than one head projection (logits differ by "
                f"{worst:.3g}): its distribution cannot be rebuilt from recorded states, so it cannot be a target yet"
            )

    @contextmanager
    def slotted(self) -> Iterator[None]:
        """Attend by key-value head in the block: one query a slot, so keys need not be repeated for every head.

        Models that SDPA cannot stand in for (learned sinks) keep their own attention.
        """
        if not self.model._supports_sdpa:
            yield
            return
        AttentionInterface.register(_SLOT_ATTENTION, slot_attention)
        AttentionMaskInterface.register(_SLOT_ATTENTION, sdpa_mask)
        before = self.config._attn_implementation
        self.model.set_attn_implementation(_SLOT_ATTENTION)
        try:
            yield
        finally:
            self.model.set_attn_implementation(before)

    def check_slots(self) -> None:
        """Raise DriftlabError if the model has layers that :meth:`hidden_slots` has no mask or cache for, or a window."""
        if self.window is not None:
            raise DriftlabError(
                f"decoding in slots knows no {self.window.label}: make these prompts outside target.attention(...)"
            )
        if unknown := self._other_layer_types():
            raise DriftlabError(
                f"{type(self.model).__name__} has layers of type {unknown}: only layers with softmax attention "
                "over all or the last positions can be decoded in slots. Make prompts with target.self_prompts() and "
                "record those"
            )

    def _other_layer_types(self) -> list[str]:
        return sorted(set(_present(self.config, "layer_types") or ()) - {"full_attention", "sliding_attention"})

    def hidden_slots(
        self, tokens: Int[Tensor, " slot"], positions: Int[Tensor, " slot"], cache: SlotCache
    ) -> Float[Tensor, "slot one d_target"]:
        """Run the decoder on one token a slot, each at a position of its own; return its states after the final norm."""
        cache.at(positions)
        keys = torch.arange(cache.span, device=positions.device)
        full = self._additive(keys <= positions[:, None])
        window = _present(self.config, "sliding_window")
        sliding = (
            full if not window else self._additive((keys <= positions[:, None]) & (keys > positions[:, None] - window))
        )
        mask: Any = sliding
        if _present(self.config, "layer_types"):
            mask = {"full_attention": full, "sliding_attention": sliding}
        kwargs: dict[str, Any] = {"use_cache": True, _CACHE_ARGUMENT: cache, "position_ids": positions[:, None]}
        return self.decoder(tokens[:, None], attention_mask=mask, **kwargs).last_hidden_state

    def hidden_tree(
        self, tokens: Int[Tensor, " node"], positions: Int[Tensor, " node"], seen: Bool[Tensor, "node node"], cache: Any
    ) -> Float[Tensor, "one node d_target"]:
        """Run the decoder on a tree's tokens, each seeing the whole cache and the nodes in its row of ``seen``.

        Raises:
            DriftlabError: where a sliding window would already hide something, since the mask knows none, or a layer keeps one
                state for a whole text and so has no branches.
        """
        if self.window is not None:
            raise DriftlabError(
                f"the mask of a tree knows no {self.window.label}: draft chains in target.attention(...)"
            )
        if unknown := self._other_layer_types():
            raise DriftlabError(
                f"{type(self.model).__name__} has layers of type {unknown}: what is no softmax attention cannot verify the "
                "branches of a tree in one pass. Draft chains (depth=)"
            )
        if (kind := self.config._attn_implementation) not in ("eager", "sdpa"):
            raise DriftlabError(
                f"attention {kind!r} may not take a tree's mask: load the target with eager or sdpa attention"
            )
        types, window = _present(self.config, "layer_types"), _present(self.config, "sliding_window")
        slides = window and (types is None or "sliding_attention" in types)
        if slides and int(positions.max()) >= window:
            raise DriftlabError(
                f"{type(self.model).__name__} has layers that see {window} positions; a tree at position "
                f"{int(positions.max())} would reach beyond. Draft chains, or keep prompt and answer within the window"
            )
        before = torch.ones(len(tokens), cache.get_seq_length(), dtype=torch.bool, device=seen.device)
        mask: Any = self._additive(torch.cat([before, seen], 1)).transpose(0, 2)
        if types:
            mask = {"full_attention": mask, "sliding_attention": mask}
        kwargs: dict[str, Any] = {"use_cache": True, _CACHE_ARGUMENT: cache, "position_ids": positions[None]}
        return self.decoder(tokens[None], attention_mask=mask, **kwargs).last_hidden_state

    def _additive(self, visible: Tensor) -> Tensor:
        return torch.zeros(visible.shape, dtype=self.dtype, device=visible.device).masked_fill(~visible, -torch.inf)[
            :, None, None
        ]

    @torch.inference_mode()
    def position_mass(
        self, tokens: Int[Tensor, "one pos"], first_query: int, *, seen_by_all: bool = False
    ) -> dict[int, Float[Tensor, " pos"]]:
        """Attention mass on each position, by layer; mean over heads and over queries >= ``first_query``.

        ``seen_by_all``: NaN at positions that some of these queries cannot see (behind a window, or after the query).
        One unpadded sequence. Layers without softmax attention are absent. No T x T map is kept: blocks of queries are
        reduced as they come. Raises DriftlabError for targets with learned sinks (their eager kernel would be needed).
        """
        if not self.model._supports_sdpa:
            raise DriftlabError(f"{type(self.model).__name__} has no SDPA attention to watch (learned sinks have none)")
        AttentionInterface.register(_MASS_ATTENTION, mass_attention)
        # without a mask of the same name the mask is silently dropped
        mask = sdpa_mask if self.window is None else window_mask(self.window, sdpa_mask)
        AttentionMaskInterface.register(_MASS_ATTENTION, mask)
        before = self.config._attn_implementation
        recorder = MassRecorder(first_query)
        self.model.set_attn_implementation(_MASS_ATTENTION)
        try:
            self.decoder(tokens, use_cache=False, driftlab_recorder=recorder)
        finally:
            self.model.set_attn_implementation(before)
        if not seen_by_all:
            return recorder.mass
        return {layer: mass.masked_fill(~recorder.seen[layer], torch.nan) for layer, mass in recorder.mass.items()}


def checksum(tensor: Tensor) -> tuple[int, int]:
    """Return two sums over a tensor's bits, plain and weighted by place: integers, so the same on any device."""
    bits = tensor.detach().contiguous().view(-1).view(_BITS[tensor.element_size()])
    plain = weighted = 0
    for first in range(0, len(bits), _CHECKSUM_BLOCK):
        block = bits[first : first + _CHECKSUM_BLOCK].long()
        place = torch.arange(len(block), device=block.device) % 65521 + 1
        plain += int(block.sum())
        weighted = (weighted * 31 + int((block * place).sum())) % (1 << 61)
    return plain, weighted


def _present(thing: Any, name: str) -> Any:
    """An attribute that some have: a config value of some architectures, say."""
    return getattr(thing, name) if hasattr(thing, name) else None


def _is_transformers_own(hook: Any) -> bool:
    function = hook.func if isinstance(hook, functools.partial) else hook
    return str(_present(function, "__module__")).startswith("transformers.utils.output_capturing")


def _keep(states: dict[int, Tensor], k: int, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    states[k] = args[0] if args else kwargs["hidden_states"]
