r"""The EAGLE-3 drafter with the two switches of EAGLE 3.1, each a module substitution made in ``__init__``; MTP heads alike.

    c_t  = concat_i  N_i(h_t^(k_i))         N_i: RMSNorm if fc_norm, else identity (after one over the concat: norm_before_fc)
    g_t  = W_fc c_t                         target states only, never the drafter's own
    u    = layers(embedding, s)             s = g_t at depth 1, the feedback deeper
    y    = RMS(u);  logits = W_lm y         the head reads the normed state
    feedback = y if norm_output else u

An MTP head (DeepSeek-V3, arXiv 2412.19437; Qwen3-Next; GLM-4.5), and an EAGLE-3 drafter with use_aux_hidden_state false,
read the target's final state after its norm: g_t is that state, without fc. (EAGLE-3: arXiv 2503.01840; the switches:
arXiv 2605.09992.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from driftlab.drafter.blocks import LayerKV
from driftlab.drafter.config import DrafterConfig
from driftlab.drafter.layers import Layer, first_layer
from driftlab.drafter.norms import RMSNorm
from driftlab.errors import DriftlabError
from driftlab.hooks import HookedModule, HookPoint
from driftlab.kernels.backend import wants_triton
from driftlab.recorded import TargetHead
from driftlab.segments import Starts


class Table(nn.Module):
    """A weight that belongs to the target: used, moved with the drafter, never trained and never saved with it."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)


class Fusion(nn.Module):
    """Hook points of the fusion. Its weights stand beside it, where real checkpoints have them: fc, fc_norm.i, input_norm."""

    def __init__(self) -> None:
        super().__init__()
        self.hook_states = HookPoint()  # [batch row aux d_target], as captured
        self.hook_aux = HookPoint()  # [batch row aux d_target], after the per-state norm
        self.hook_fused = HookPoint()  # [batch row d_model]


@dataclass
class DraftState:
    """Where a set of chains stands after some depth."""

    kv: list[LayerKV]
    starts: Starts
    depth: int
    normed: Float[Tensor, "batch start d_model"]
    """y: what the head reads"""
    feedback: Float[Tensor, "batch start d_model"]
    """what the next depth receives"""

    def pick(self, places: Int[Tensor, " some"]) -> DraftState:
        """Return the state of some of the starts, given by their places on the start axis."""
        starts = dataclasses.replace(self.starts, rows=self.starts.rows[:, places], valid=self.starts.valid[:, places])
        kv = [
            LayerKV(kv.k, kv.v, [k[:, :, places] for k in kv.own_k], [v[:, :, places] for v in kv.own_v])
            for kv in self.kv
        ]
        return DraftState(kv, starts, self.depth, self.normed[:, places], self.feedback[:, places])

    def at(self, places: Int[Tensor, "batch some"]) -> DraftState:
        """Return the state of some of each sequence's starts, given by their places on the start axis; any number of times.

        Own keys are copied: what one copy appends the others do not see.
        """

        def picked(x: Tensor, axis: int) -> Tensor:
            shape = [len(places), *(1,) * (x.ndim - 1)]
            shape[axis] = places.shape[1]
            return x.take_along_dim(places.view(shape), axis)

        starts = dataclasses.replace(self.starts, rows=picked(self.starts.rows, 1), valid=picked(self.starts.valid, 1))
        kv = [LayerKV(kv.k, kv.v, [picked(k, 2) for k in kv.own_k], [picked(v, 2) for v in kv.own_v]) for kv in self.kv]
        return DraftState(kv, starts, self.depth, picked(self.normed, 1), picked(self.feedback, 1))


class Drafter(HookedModule):
    """EAGLE-3 drafter. ``target`` (a Target, a Trajectory, or anything with ``.head``) lends embedding and head.

    Args:
        config: shapes and switches.
        target: needed unless the config has ``own_embed`` and an own ``lm_head``.
        draft_vocab: ascending target ids of the draft vocabulary; needed when draft_vocab_size < vocab_size.
        seed: of the initial weights: normal with standard deviation 0.02, norms at one.

    Raises:
        DriftlabError: when the target's tables do not fit.
    """

    def __init__(
        self,
        config: DrafterConfig,
        target: Any = None,
        *,
        draft_vocab: Sequence[int] | Tensor | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self._config = config
        self.notes: list[str] = []
        spec = getattr(target, "spec", None)
        #: label and fingerprint of the target that it is made for, or that its file names; written beside the weights
        self.trained_for = None if spec is None else {"label": spec.label, "fingerprint": spec.fingerprint}
        head = None if target is None else target.head
        _check_fits(config, head)
        self._target_head = None if config.lm_head == "own" else head
        width, eps = config.hidden_size, config.rms_norm_eps
        aux, fused = range(config.states_read), config.states_read * config.target_hidden_size
        plus_one = config.norm_plus_one
        self.fusion = Fusion()
        self.input_norm = RMSNorm(fused, eps, plus_one=plus_one) if config.norm_before_fc else nn.Identity()
        self.fc_norm = nn.ModuleList(
            RMSNorm(config.target_hidden_size, eps, plus_one=plus_one) if config.fc_norm else nn.Identity() for _ in aux
        )
        self.fc = nn.Linear(fused, width, bias=config.fc_bias) if config.aux_layers else nn.Identity()
        self.layers = nn.ModuleList(
            [first_layer(config), *(Layer(config, index) for index in range(1, config.num_hidden_layers))]
        )
        self.norm = RMSNorm(width, eps, plus_one=plus_one) if config.head_norm else nn.Identity()
        self.hook_starts = HookPoint()  # the Starts of a run, at depth 0, before its first depth
        self.hook_normed = HookPoint()  # [batch start d_model]
        self.hook_feedback = HookPoint()  # [batch start d_model]
        if config.draft_vocab_size < config.vocab_size:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
            if draft_vocab is None:
                raise DriftlabError(
                    f"draft_vocab_size {config.draft_vocab_size} is below vocab_size {config.vocab_size}: pass "
                    "draft_vocab=, the target ids that the drafter may propose (see choose_draft_vocab)"
                )
            self.set_draft_vocab(draft_vocab)
        self.embed_tokens = (
            nn.Embedding(config.vocab_size, width) if config.own_embed else Table(head.embed.to(self.device))
        )
        if config.lm_head == "own":
            self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        else:
            self._bind_head()
        self._initialise(seed)
        self.name_hook_points()
        self._built = _structure(self)

    @property
    def config(self) -> DrafterConfig:
        """What the drafter was built from. A switch is a module, so it cannot be flipped here: build another drafter."""
        return self._config

    @config.setter
    def config(self, config: DrafterConfig) -> None:
        notes_only = dataclasses.replace(config, ttt=self._config.ttt, trained_length=self._config.trained_length)
        if notes_only != self._config:
            raise DriftlabError(
                "a built drafter's architecture is fixed: make another with Drafter(dataclasses.replace(config, ...), target) "
                "and load_state_dict what they share"
            )
        self._config = config

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.layers[0].input_layernorm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """What the weights are, and what states are computed in."""
        return self.layers[0].input_layernorm.weight.dtype

    @property
    def backend(self) -> str:
        """What runs: "auto" unless :meth:`using` has set another."""
        return self.layers[0].self_attn.backend

    def replaced_modules(self) -> list[str]:
        """Return the names of modules that are no longer as built: other class, weights' shapes, constants or ``forward``."""
        now = _structure(self)
        return [name for name in sorted({*now, *self._built}) if now.get(name) != self._built.get(name)]

    @contextmanager
    def using(self, backend: str | None) -> Iterator[None]:
        """Draft with a backend, "auto" (the default), "torch" or "triton", for the block; None: as it is set.

        It holds for whatever runs inside and is not given a backend of its own.

        Raises:
            DriftlabError: a backend that is not known or not there.
        """
        if backend is not None:
            wants_triton(backend, self.device)
        blocks = [layer.self_attn for layer in self.layers]
        before = [block.backend for block in blocks]
        for block in blocks:
            block.backend = backend or block.backend
        try:
            yield
        finally:
            for block, earlier in zip(blocks, before, strict=True):
                block.backend = earlier

    def _initialise(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, (nn.Linear, nn.Embedding)):
                    module.weight.normal_(0, 0.02, generator=generator)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    module.bias.zero_()

    @classmethod
    def load(cls, path: str | Path, target: Any = None, *, aux_layers: Any = None, **given: Any) -> Drafter:
        """Load a checkpoint of any known format, or a shipped drafter by name; see :func:`driftlab.drafter.checkpoint.load`."""
        from driftlab.drafter.checkpoint import load

        return load(path, target, aux_layers=aux_layers, **given)

    def save(self, path: str | Path, *, dtype: torch.dtype | None = None) -> None:
        """Save as a checkpoint folder; see :func:`driftlab.drafter.checkpoint.save`."""
        from driftlab.drafter.checkpoint import save

        save(self, path, dtype=dtype)

    def set_draft_vocab(self, ids: Sequence[int] | Tensor) -> None:
        """Set d2t (offsets: target id = draft id + d2t[draft id]) and t2d from ascending target ids."""
        ids = torch.as_tensor(ids, dtype=torch.int64).to(self.d2t.device)
        size, vocab = self.config.draft_vocab_size, self.config.vocab_size
        if ids.shape != (size,) or bool((ids.diff() <= 0).any()) or int(ids[0]) < 0 or int(ids[-1]) >= vocab:
            raise DriftlabError(f"the draft vocabulary must be {size} distinct ascending target ids in 0..{vocab - 1}")
        offsets = ids - torch.arange(size, device=ids.device)
        if self.config.lm_head == "own" and bool(self.t2d.any()) and not torch.equal(self.d2t, offsets):
            raise DriftlabError(
                "the head is the drafter's own: its rows belong to the draft vocabulary that it has; make a new drafter"
            )
        self.d2t.copy_(offsets)
        self.t2d.zero_()
        self.t2d[ids] = True
        if self._target_head is not None:
            self._bind_head()

    @property
    def reduced(self) -> bool:
        """Whether the draft vocabulary is smaller than the target's."""
        return self.config.draft_vocab_size < self.config.vocab_size

    @property
    def draft_vocab(self) -> Int[Tensor, " draft_vocab"]:
        """Target id of every draft id."""
        ids = torch.arange(self.config.draft_vocab_size, device=self.device)
        return ids + self.d2t if self.reduced else ids

    def to_target(self, draft_ids: Int[Tensor, "*batch"]) -> Int[Tensor, "*batch"]:
        """Map draft ids to target ids."""
        return draft_ids + self.d2t[draft_ids] if self.reduced else draft_ids

    def fuse(self, aux: Float[Tensor, "batch row aux d_target"]) -> Float[Tensor, "batch row d_model"]:
        """Project captured target states (fc in their order, ascending by layer)."""
        states = self.fusion.hook_states(aux.to(self.dtype), 1)
        scaled = self.input_norm(states.flatten(2)).view_as(states)
        normed = torch.stack([norm(state) for norm, state in zip(self.fc_norm, scaled.unbind(2), strict=True)], 2)
        return self.fusion.hook_fused(self.fc(self.fusion.hook_aux(normed, 1).flatten(2)), 1)

    def embed(self, tokens: Int[Tensor, "batch row"]) -> Float[Tensor, "batch row d_model"]:
        """Embed target ids."""
        return nn.functional.embedding(tokens, self.embed_tokens.weight).to(self.dtype)

    def first(
        self,
        tokens: Int[Tensor, "batch row"],
        aux: Float[Tensor, "batch row aux d_target"],
        starts: Starts,
        past: list[LayerKV] | None = None,
        fused: Float[Tensor, "batch row d_model"] | None = None,
    ) -> DraftState:
        """Depth 1 over new context rows: ``tokens[:, i]`` is the token *after* the position of state ``aux[:, i]``.

        ``past``: keys of the rows before. ``fused``: what :meth:`fuse` makes of ``aux``, if a kernel made it already. Outputs
        are for ``starts.rows`` only (absolute rows, among the new ones).
        """
        offset = 0 if past is None else past[0].k.shape[2]
        batch, rows = tokens.shape
        positions = (offset + torch.arange(rows, device=tokens.device)).expand(batch, rows)
        counted = torch.zeros_like(positions).scatter_add(1, starts.rows - offset, starts.valid.long()) > 0
        every = Starts(positions, counted, starts.segments, starts.ids)
        embed, hidden, kv = self.embed(tokens), self.fuse(aux) if fused is None else fused, []
        if self.config.zero_first_embedding:
            embed = embed.masked_fill((positions == 0)[..., None], 0.0)
        for index, layer in enumerate(self.layers):
            last = index == len(self.layers) - 1
            hidden, layer_kv = layer.first(
                embed, hidden, positions, starts if last else every, None if past is None else past[index]
            )
            kv.append(layer_kv)
        return self._state(hidden, kv, starts, 1)

    def next(self, state: DraftState, tokens: Int[Tensor, "batch start"]) -> DraftState:
        """One depth deeper: feed ``tokens`` (target ids) and the last feedback. Extends the own keys in ``state.kv``."""
        embed, hidden, depth = self.embed(tokens), state.feedback, state.depth + 1
        for layer, kv in zip(self.layers, state.kv, strict=True):
            hidden = layer.next(embed, hidden, kv, state.starts, depth)
        return self._state(hidden, state.kv, state.starts, depth)

    def _state(self, resid: Tensor, kv: list[LayerKV], starts: Starts, depth: int) -> DraftState:
        normed = self.hook_normed(self.norm(resid), depth)
        feedback = self.hook_feedback(normed if self.config.norm_output else resid, depth)
        return DraftState(kv, starts, depth, normed, feedback)

    def logits(self, normed: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch draft_vocab"]:
        """Draft logits of normed states, over the draft vocabulary."""
        logits = nn.functional.linear(normed, self.lm_head.weight.to(normed.dtype))
        return logits if self.config.logit_scale == 1 else logits * self.config.logit_scale

    def forward(
        self, tokens: Int[Tensor, "batch pos"], aux: Float[Tensor, "batch pos aux d_target"]
    ) -> Float[Tensor, "batch row draft_vocab"]:
        """Depth-1 logits of every row t = 0..pos-2 of a text; row t drafts token t + 2."""
        batch, rows = tokens.shape[0], tokens.shape[1] - 1
        index = torch.arange(rows, device=tokens.device).expand(batch, rows)
        starts = Starts(index, torch.ones_like(index, dtype=torch.bool), torch.full_like(index, 2), ("",) * batch)
        self.hook_starts(starts, 0)
        return self.logits(self.first(tokens[:, 1:], aux[:, :-1], starts).normed)

    def _bind_head(self) -> None:
        """Take the target's head rows for the draft vocabulary; again after d2t has changed."""
        head, config = self._target_head, self.config
        rows = head.lm_head[self.draft_vocab.to(head.lm_head.device)] if self.reduced else head.lm_head
        if config.lm_head == "target_with_norm":
            rows = rows.float() * head.norm_weight.float()
        self.lm_head = Table(rows.to(self.device, self.dtype))

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        if self._target_head is not None and self.reduced:
            self._bind_head()


def _structure(drafter: Drafter) -> dict[str, tuple[Any, ...]]:
    """What a kernel that stands in for the modules takes for granted of each."""
    return {
        name: (
            type(module),
            [
                (key, x.shape)
                for key, x in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
            ],
            (module.eps, module.plus_one) if isinstance(module, RMSNorm) else None,
            vars(module).get("forward"),
        )
        for name, module in drafter.named_modules()
    }


def _check_fits(config: DrafterConfig, head: TargetHead | None) -> None:
    if head is None:
        if not config.own_embed or config.lm_head != "own":
            raise DriftlabError(
                "this drafter uses the target's embedding or head: pass target= (a Target or a Trajectory)"
            )
        return
    vocab, width = head.embed.shape
    if width != config.target_hidden_size:
        raise DriftlabError(
            f"drafter does not fit the target: it takes states {config.target_hidden_size} wide (fc.weight "
            f"[{config.hidden_size}, {config.states_read * config.target_hidden_size}]), the target's are {width}"
        )
    if vocab != config.vocab_size:
        raise DriftlabError(
            f"drafter does not fit the target: its vocabulary has {config.vocab_size} tokens, the target's embedding "
            f"embed_tokens.weight is [{vocab}, {width}]"
        )
