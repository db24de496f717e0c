r"""Bytes and operations of a decoder, from its shape.

A step over n tokens reads every weight it uses once, whatever n; of E routed experts, t a token, it touches

    E (1 - (1 - t / E)^n)      experts per layer, if routing is uniform and independent

(correlated routing touches fewer: give a measured coverage in its place). It reads the keys and values of every cached
token once per sequence, however many tokens of that sequence are new. Operations: 2 per weight used and token, and
attention over the context. The embedding is a table of which n rows are read; its bytes are left out.

Layouts: GQA as in Llama; MLA as in DeepSeek-V2 (arXiv 2405.04434), where the cache holds one latent of ``kv_rank`` and one
rotary key of ``rope_dim`` a token for all heads, and attention is computed on the latent (absorbed form).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from driftlab.errors import DriftlabError

Number = float | int
Coverage = Callable[[Number], Number]
"""Tokens of a step -> routed experts that they touch in one layer."""


@dataclass(frozen=True)
class Gqa:
    """Grouped-query attention. ``bias``: q, k, v and o have biases."""

    heads: int
    kv_heads: int
    head_dim: int
    bias: bool = False

    def parameters(self, width_in: int, hidden: int) -> int:
        """Weights of one layer; q, k, v read ``width_in``, o writes ``hidden``."""
        q, kv = self.heads * self.head_dim, 2 * self.kv_heads * self.head_dim
        return width_in * (q + kv) + q * hidden + self.bias * (q + kv + hidden)

    @property
    def kv_elements(self) -> int:
        """Cached numbers per token and layer."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def operations_per_key(self) -> int:
        """Operations of one query token on one cached token, one layer: scores and the weighted sum, 2 each."""
        return 4 * self.heads * self.head_dim

    def kv_shards(self, tensor_parallel: int) -> float:
        """The cache over what the fullest device holds: ceil(kv_heads / devices) heads, since a head cannot be split.

        8 heads on 3 devices: 8/3, not 3, since one reads 3 heads while the others wait. Beyond ``kv_heads`` heads repeat.
        """
        return self.kv_heads / -(-self.kv_heads // tensor_parallel)


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention. ``q_rank`` 0: q is one matrix."""

    heads: int
    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    def parameters(self, width_in: int, hidden: int) -> int:
        """Weights of one layer; q and kv read ``width_in``, o writes ``hidden``. Norms of the latents included."""
        q = self.heads * (self.nope_dim + self.rope_dim)
        query = width_in * self.q_rank + self.q_rank * (q + 1) if self.q_rank else width_in * q
        latent = width_in * (self.kv_rank + self.rope_dim) + self.kv_rank
        return query + latent + self.heads * (self.kv_rank * (self.nope_dim + self.value_dim) + self.value_dim * hidden)

    @property
    def kv_elements(self) -> int:
        """Cached numbers per token and layer: the latent and the one rotary key."""
        return self.kv_rank + self.rope_dim

    @property
    def operations_per_key(self) -> int:
        """Operations of one query token on one cached token, one layer, in the absorbed form."""
        return 2 * self.heads * (2 * self.kv_rank + self.rope_dim)

    def kv_shards(self, tensor_parallel: int) -> float:
        """Every device of a tensor-parallel group keeps the whole latent cache."""
        return 1.0


@dataclass(frozen=True)
class UnknownAttention:
    """Attention of which only the weights per layer are known: no cache is read and no context costs anything."""

    weights: int
    kv_elements: int = 0
    operations_per_key: int = 0

    def parameters(self, width_in: int, hidden: int) -> int:
        """Weights of one layer, as given."""
        return self.weights

    def kv_shards(self, tensor_parallel: int) -> float:
        """There is no cache to split."""
        return 1.0


@dataclass(frozen=True)
class Experts:
    """The routed and shared experts of a layer: SwiGLU of three matrices. ``bias``: experts and router have biases."""

    count: int
    active: int
    width: int
    shared: int = 0
    bias: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.active <= self.count or self.width <= 0 or self.shared < 0:
            raise DriftlabError(f"{self}: needs 0 < active <= count, width > 0, shared >= 0")


@dataclass(frozen=True)
class ModelShape:
    """A decoder: ``dense_layers`` with a SwiGLU of width ``ffn``, the others with ``experts`` (all dense if None).

    ``bytes_*``: bytes per weight by part, scales of a quantised format included (MXFP4 0.53125, NVFP4 0.5625);
    ``bytes_dense`` holds for all but routed experts, attention and head. ``bytes_kv``: per cached number.
    ``windowed_layers`` of the layers see the last ``window`` tokens only. ``attention_width``: what q, k, v read (0: hidden).
    ``fusion``: weights of the drafter's fc.
    """

    name: str
    layers: int
    hidden: int
    vocab: int
    attention: Gqa | Mla | UnknownAttention
    ffn: int = 0
    experts: Experts | None = None
    dense_layers: int = 0
    tied: bool = False
    has_embedding: bool = True
    window: int = 0
    windowed_layers: int = 0
    attention_width: int = 0
    fusion: int = 0
    bytes_experts: Number = 2.0
    bytes_attention: Number = 2.0
    bytes_dense: Number = 2.0
    bytes_head: Number = 2.0
    bytes_kv: Number = 2.0

    def __post_init__(self) -> None:
        if bad := [f.name for f in fields(self) if f.name.startswith("bytes_") and getattr(self, f.name) <= 0]:
            raise DriftlabError(f"{self.name}: {bad[0]} must be above 0")
        if min(self.layers, self.hidden, self.vocab) <= 0 or not 0 <= self.dense_layers <= self.layers:
            raise DriftlabError(
                f"{self.name}: layers, hidden and vocab must be above 0, dense_layers within the layers"
            )
        if (self.experts is None or self.dense_layers) and not self.ffn:
            raise DriftlabError(f"{self.name}: dense layers need ffn, the width of their SwiGLU")
        if not 0 <= self.windowed_layers <= self.layers or (self.windowed_layers and not self.window):
            raise DriftlabError(f"{self.name}: windowed_layers must be within the layers and have a window")

    # ---- weights

    @property
    def moe_layers(self) -> int:
        """Layers with routed experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def _attention(self) -> int:
        return self.layers * self.attention.parameters(self.attention_width or self.hidden, self.hidden)

    @property
    def _expert(self) -> int:
        """Weights of one expert of one layer."""
        if not self.experts:
            return 0
        return 3 * self.hidden * self.experts.width + self.experts.bias * (2 * self.experts.width + self.hidden)

    @property
    def _dense(self) -> int:
        """What every token uses beside attention and head: dense SwiGLU, shared experts, routers, norms, fc."""
        weights = (self.layers - self.moe_layers) * 3 * self.hidden * self.ffn + (2 * self.layers + 1) * self.hidden
        if self.experts:
            router = (self.hidden + self.experts.bias) * self.experts.count
            weights += self.moe_layers * (self.experts.shared * self._expert + router)
        return weights + self.fusion

    @property
    def _table(self) -> int:
        """Weights of the head, and of the embedding."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All weights, embedding included."""
        routed = self.moe_layers * self.experts.count * self._expert if self.experts else 0
        tables = self._table * (1 + (self.has_embedding and not self.tied))
        return self._attention + self._dense + routed + tables

    @property
    def active_parameters(self) -> int:
        """Weights that one token is multiplied by: no embedding, which is looked up."""
        routed = self.moe_layers * self.experts.active * self._expert if self.experts else 0
        return self._attention + self._dense + routed + self._table

    # ---- bytes

    def weight_bytes(self, tokens: Number, coverage: Coverage | None = None) -> float:
        """Bytes of weights that a step over ``tokens`` new tokens reads; ``coverage`` in place of uniform routing."""
        _require_tokens(tokens)
        total = self._attention * self.bytes_attention + self._dense * self.bytes_dense + self._table * self.bytes_head
        if self.experts:
            touched = self.touched(tokens, coverage)
            total += self.moe_layers * touched * self._expert * self.bytes_experts
        return float(total)

    def touched(self, tokens: Number, coverage: Coverage | None = None) -> float:
        """Routed experts per layer that ``tokens`` tokens touch. 0 for a dense model."""
        if not self.experts:
            return 0.0
        if coverage is None:
            return experts_touched(self.experts.count, self.experts.active, tokens)
        value = float(coverage(tokens))
        most = min(self.experts.count, self.experts.active * tokens)
        if not min(self.experts.active, most) <= value <= most:
            raise DriftlabError(
                f"{self.name}: coverage({tokens}) = {value:g} experts; {tokens} tokens touch "
                f"between {self.experts.active} and {most:g} of {self.experts.count}"
            )
        return value

    def kv_bytes(self, context: Number) -> float:
        """Bytes of keys and values that a step reads for one sequence with ``context`` cached tokens."""
        return float(self.attention.kv_elements * self.bytes_kv * self._keys(context))

    def _keys(self, context: Number) -> Number:
        """Cached tokens that are read, summed over layers."""
        if context < 0:
            raise DriftlabError(f"context {context}: cached tokens cannot be fewer than 0")
        full = self.layers - self.windowed_layers
        return full * context + self.windowed_layers * min(context, self.window)

    # ---- operations

    def operations(self, tokens: Number, context: Number) -> float:
        """Operations of a step over ``tokens`` new tokens, each attending to ``context`` cached ones."""
        _require_tokens(tokens)
        return float(tokens * (2 * self.active_parameters + self.attention.operations_per_key * self._keys(context)))


def experts_touched(count: int, active: int, tokens: Number) -> float:
    """Experts of a layer touched by ``tokens`` tokens, each routed to ``active`` of ``count`` uniformly, independently."""
    _require_tokens(tokens)
    return count * (1 - (1 - active / count) ** tokens)


def eagle3_head(
    target: ModelShape,
    *,
    draft_vocab: int,
    ffn: int,
    attention: Gqa | Mla | None = None,
    aux: int = 3,
    with_fusion: bool = True,
    has_embedding: bool = False,
    bytes_weights: Number = 2.0,
) -> ModelShape:
    """Return the shape of an EAGLE-3 / EAGLE 3.1 drafter for a target: one layer whose attention reads 2H, fc, draft head.

    Args:
        target: gives hidden width and, if ``attention`` is None, the attention.
        draft_vocab: rows of the draft head, Vd.
        ffn: width of the drafter's SwiGLU.
        attention: the drafter's own, where it differs from the target's.
        aux: captured states that fc reads.
        with_fusion: fc runs once a round, on target states: with it for the first draft step, without for the others.
        has_embedding: the drafter stores an embedding of its own, of the draft vocabulary's size.
        bytes_weights: per weight, all parts.

    Raises:
        DriftlabError: the target's attention is not known and none is given.
    """
    attention = attention or target.attention
    if isinstance(attention, UnknownAttention):
        raise DriftlabError(f"{target.name}: its attention is not described, so give the drafter's with attention=")
    head = ModelShape(
        name=f"EAGLE-3 head for {target.name}",
        layers=1,
        hidden=target.hidden,
        vocab=draft_vocab,
        attention=attention,
        ffn=ffn,
        has_embedding=has_embedding,
        attention_width=2 * target.hidden,
        # the layer's third norm, of the hidden input, and fc
        fusion=target.hidden + with_fusion * aux * target.hidden**2,
    )
    return replace(head, **{f.name: bytes_weights for f in fields(head) if f.name.startswith("bytes_")})


def _require_tokens(tokens: Number) -> None:
    if not tokens > 0:
        raise DriftlabError(f"tokens {tokens}: a step has more than 0")
