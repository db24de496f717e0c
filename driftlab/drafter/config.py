"""The drafter's configuration: shapes, the two switches of EAGLE 3.1, and every other convention that engines differ in."""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass
from typing import Any, Literal

from driftlab.drafter.fields import Count, NonNegative, Positive, Size, from_table, settle_fields
from driftlab.drafter.rotary import RopeScaling
from driftlab.errors import DriftlabError
from driftlab.recorded import TargetSpec

HeadSource = Literal["own", "target", "target_with_norm"]
Architecture = Literal["eagle3", "mtp"]


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2): widths of its parts. ``q_lora_rank`` 0: queries are projected at once."""

    __no_type_check__ = True

    q_lora_rank: Count
    kv_lora_rank: Size
    qk_nope_head_dim: Size
    qk_rope_head_dim: Size
    v_head_dim: Size

    def __post_init__(self) -> None:
        settle_fields(self)


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts in place of the MLP (MTP heads of DeepSeek-V3, GLM-4.5, Qwen3-Next).

    A token goes to the ``per_token`` experts with the largest scores, and to the shared one if there is any
    (``shared_intermediate_size`` 0: none). ``scoring`` "sigmoid": scores are sigmoids, chosen with a correction bias among the
    ``groups_per_token`` best of ``groups`` (a group counts by its two best), weighted without it. "softmax": over all.
    ``normalise``: the chosen weights are divided by their sum; then all are multiplied by ``scale``. ``shared_gate``: the
    shared expert's output is multiplied by a sigmoid of its own.
    """

    __no_type_check__ = True

    count: Size
    per_token: Size
    intermediate_size: Size
    shared_intermediate_size: Count = 0
    scoring: Literal["sigmoid", "softmax"] = "softmax"
    groups: Size = 1
    groups_per_token: Size = 1
    normalise: bool = True
    scale: Positive = 1.0
    shared_gate: bool = False

    def __post_init__(self) -> None:
        settle_fields(self)
        if self.groups > 1 and (self.count % self.groups or self.count < 2 * self.groups):
            raise DriftlabError(
                f"experts: {self.count} in {self.groups} groups: each needs as many, and two or more, for it counts by its "
                "two best"
            )
        if self.groups_per_token > self.groups:
            raise DriftlabError(f"experts: a token takes {self.groups_per_token} groups, and there are {self.groups}")
        open_to_it = self.count // self.groups * self.groups_per_token
        if self.per_token > open_to_it:
            raise DriftlabError(f"experts: a token takes {self.per_token}, and {open_to_it} are open to it")


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Everything that fixes a drafter's architecture. Read once, in ``__init__`` of the modules."""

    __no_type_check__ = True

    hidden_size: Size
    """H, the drafter's width"""
    target_hidden_size: Size
    """Ht, width of each captured target state"""
    aux_layers: tuple[int, ...]
    """captured states: k is the residual stream after k decoder layers (0: embedding, N: before the final norm). Empty: the
    target's final state after its final norm, which is then the hidden input as it is, without fc (use_aux_hidden_state
    false; every MTP head)"""
    intermediate_size: Size
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Size
    vocab_size: Size
    """V, the target's vocabulary"""
    draft_vocab_size: int
    """Vd <= V; below V the buffers d2t and t2d map between the two"""
    rope_theta: Positive
    rms_norm_eps: NonNegative
    fc_norm: bool
    """one RMSNorm per captured state before the concat"""
    norm_output: bool
    """feed the post-norm state to the next depth (off: the residual stream before the final norm)"""
    architecture: Architecture = "eagle3"
    """eagle3: layer 0 attends from [embedding, hidden]; mtp: the two are projected to one state, and layers are ordinary"""
    num_hidden_layers: int = 1
    own_embed: bool = False
    """whether the drafter has an embedding of its own; else the target's table is used"""
    lm_head: HeadSource = "own"
    """own: a tensor of the checkpoint; target: the target's rows; target_with_norm: those rows times the gain of the
    target's final norm, so that a drafter whose final norm starts at one starts with logits of the right scale"""
    norm_before_fc: bool = False
    """one RMSNorm over the whole concat before fc (and before fc_norm, where both are there)"""
    norm_before_residual: bool = False
    """layer 0's residual stream starts at the normed hidden input (off: at the raw one)"""
    head_norm: bool = True
    """whether the head reads the normed state; off only for SpecForge drafters trained with norm_output false before its PR
    879, which have no final norm in effect"""
    twice_normed: bool = False
    """the hidden input passes through input_layernorm and then hidden_norm (what ModelOpt's plugin seems to train; no engine
    serves it)"""
    fc_bias: bool = False
    attention_bias: bool = False
    """of q, k and v"""
    output_bias: bool = False
    """of the attention's output projection"""
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm on each head's query and key before rotary embedding (Qwen3)"""
    attention_gate: bool = False
    """the attention's output is multiplied element by element by a sigmoid of its input before the projection"""
    norm_plus_one: bool = False
    """every norm multiplies by 1 + weight (Gemma, Qwen3-Next), not by weight"""
    windows: tuple[int, ...] = ()
    """per layer: the last so many keys are visible, the query's own among them; 0: all. Empty: all in every layer"""
    latent: LatentConfig | None = None
    """MLA in place of grouped-query attention"""
    experts: ExpertsConfig | None = None
    """a mixture of experts in place of the MLP; mtp only"""
    rope_scaling: RopeScaling | None = None
    rope_interleaved: bool = False
    """turn pairs (0, 1), (2, 3), ... (off: (i, i + d/2), the half-split form)"""
    rotary_dim: Count = 0
    """so many leading dimensions of each head are turned; 0: all"""
    logit_scale: Positive = 1.0
    zero_first_embedding: bool = False
    """the embedding of row 0 is replaced by zeros (vLLM's DeepSeek MTP; SGLang does not)"""
    ttt: Count = 0
    """train-time test depth that the weights were trained with; 0: untrained or unknown"""
    trained_length: Count = 0
    """longest sequence seen in training, in tokens; 0: unknown"""

    def __post_init__(self) -> None:
        settle_fields(self)
        if self.num_attention_heads % self.num_key_value_heads:
            raise DriftlabError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )
        turned = self.rope_width
        if turned % 2:
            name = "qk_rope_head_dim" if self.latent else "rotary_dim" if self.rotary_dim else "head_dim"
            raise DriftlabError(f"{name} {turned} is odd: rotary embedding turns pairs of dimensions")
        if not self.latent and not 0 < turned <= self.head_dim:
            raise DriftlabError(f"rotary_dim {self.rotary_dim} is not within head_dim {self.head_dim}")
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise DriftlabError(f"draft_vocab_size {self.draft_vocab_size} is not in 1..vocab_size {self.vocab_size}")
        if list(self.aux_layers) != sorted(set(self.aux_layers)) or (self.aux_layers and self.aux_layers[0] < 0):
            raise DriftlabError(
                f"aux_layers {self.aux_layers}: give distinct layers >= 0, ascending; none for the target's final state"
            )
        if self.num_hidden_layers < 1:
            raise DriftlabError(f"num_hidden_layers {self.num_hidden_layers}: a drafter has at least one layer")
        if self.windows and (len(self.windows) != self.num_hidden_layers or min(self.windows) < 0):
            raise DriftlabError(
                f"windows {self.windows}: give one of the {self.num_hidden_layers} layers each, 0 for all keys"
            )
        if self.rope_scaling is not None and self.rope_scaling.kind == "yarn" and self.rope_theta <= 1:
            raise DriftlabError(f"rope_theta {self.rope_theta}: yarn takes its logarithm, which must be above 0")
        self._check_switches()
        self._check_shared()

    def _check_switches(self) -> None:
        mtp, final = self.architecture == "mtp", not self.aux_layers
        wrong = {
            "aux_layers is empty, so the final state is read without fc: fc_norm, norm_before_fc, fc_bias must be off": final
            and (self.fc_norm or self.norm_before_fc or self.fc_bias),
            "an MTP head reads the target's final state: aux_layers must be empty": mtp and not final,
            "norm_before_residual and twice_normed are switches of EAGLE-3's first layer; an MTP head has none": mtp
            and (self.norm_before_residual or self.twice_normed),
            "without a norm before the head (head_norm off) there is none to feed back: norm_output must be off": (
                self.norm_output and not self.head_norm
            ),
            "the head reads the target's final state: target_hidden_size must be hidden_size": final
            and self.hidden_size != self.target_hidden_size,
            "experts are supported in MTP heads only": self.experts is not None and not mtp,
            "qk_norm, attention_gate and biases are not parts of latent attention": self.latent is not None
            and (self.qk_norm or self.attention_gate or self.attention_bias or self.output_bias),
            "zero_first_embedding is a habit of MTP heads": self.zero_first_embedding and not mtp,
            "rotary_dim has no meaning in latent attention: qk_rope_head_dim dimensions are turned": self.latent
            is not None
            and self.rotary_dim > 0,
            "mlp_bias is not a part of experts": self.mlp_bias and self.experts is not None,
        }
        for words, is_wrong in wrong.items():
            if is_wrong:
                raise DriftlabError(f"drafter config: {words}")

    def _check_shared(self) -> None:
        for shared, name in (
            (not self.own_embed, "own_embed=False"),
            (self.lm_head != "own", f"lm_head={self.lm_head}"),
        ):
            if shared and self.hidden_size != self.target_hidden_size:
                raise DriftlabError(
                    f"{name} uses the target's table, which is {self.target_hidden_size} wide; hidden_size is "
                    f"{self.hidden_size}: the drafter needs a table of its own"
                )

    @property
    def rope_width(self) -> int:
        """How many dimensions of a head are turned."""
        return self.latent.qk_rope_head_dim if self.latent else self.rotary_dim or self.head_dim

    @property
    def states_read(self) -> int:
        """How many target states a row takes."""
        return len(self.aux_layers) or 1

    def window(self, layer: int) -> int:
        """Return the window of a layer, 0 for all keys."""
        return self.windows[layer] if self.windows else 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        values = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DrafterConfig:
        """Rebuild from :meth:`to_dict`. Raises DriftlabError that names unknown and missing keys, or a value that is none."""
        return from_table(cls, values, "drafter config")


@dataclass(frozen=True)
class Variant:
    """A setting of the two switches."""

    name: str
    fc_norm: bool
    norm_output: bool

    def for_target(self, target: Any, **overrides: Any) -> DrafterConfig:
        """Return a one-layer drafter config with the shapes of ``target`` (a Target or a Trajectory).

        ``overrides`` replace single fields, e.g. ``draft_vocab_size=8192``.
        """
        spec: TargetSpec = target.spec
        if spec.rope_type != "default":
            warnings.warn(
                f"{spec.label} uses {spec.rope_type} rotary scaling; the drafter's rotary embedding is not scaled",
                stacklevel=2,
            )
        values: dict[str, Any] = {
            "hidden_size": spec.hidden_size,
            "target_hidden_size": spec.hidden_size,
            "aux_layers": tuple(target.aux_layers),
            "intermediate_size": spec.intermediate_size,
            "num_attention_heads": spec.num_attention_heads,
            "num_key_value_heads": spec.num_key_value_heads,
            "head_dim": spec.head_dim,
            "vocab_size": spec.vocab_size,
            "draft_vocab_size": spec.vocab_size,
            "rope_theta": spec.rope_theta,
            "rms_norm_eps": spec.rms_norm_eps,
            "fc_norm": self.fc_norm,
            "norm_output": self.norm_output,
            "lm_head": "target_with_norm",
        }
        return DrafterConfig(**{**values, **overrides})


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("eagle3", fc_norm=False, norm_output=False),
        Variant("fc_norm", fc_norm=True, norm_output=False),
        Variant("norm_output", fc_norm=False, norm_output=True),
        Variant("eagle31", fc_norm=True, norm_output=True),
    )
}


def variant_name(config: DrafterConfig) -> str:
    """Return the name of the variant that the two switches make; an MTP head is "mtp" or "mtp+prenorm"; other
    switches of the recursion follow with a plus, so that rows of two readings of one file are told apart.
    """
    name = next(v.name for v in VARIANTS.values() if (v.fc_norm, v.norm_output) == (config.fc_norm, config.norm_output))
    if config.architecture == "mtp":
        name = "mtp" if config.norm_output else "mtp+prenorm"
    more = [
        s
        for s in ("norm_before_fc", "norm_before_residual", "twice_normed", "zero_first_embedding")
        if getattr(config, s)
    ]
    return "+".join([name, *more, *(() if config.head_norm else ("unnormed_head",))])
