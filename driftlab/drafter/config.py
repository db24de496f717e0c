"""The drafter's configuration: shapes, and the two switches of EAGLE 3.1."""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass
from typing import Any, Literal

from driftlab.errors import DriftlabError
from driftlab.trajectory import TargetSpec

HeadSource = Literal["own", "target", "target_with_norm"]


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Everything that fixes a drafter's architecture. Read once, in ``__init__`` of the modules."""

    hidden_size: int
    """H, the drafter's width"""
    target_hidden_size: int
    """Ht, width of each captured target state"""
    aux_layers: tuple[int, ...]
    """captured states: k is the residual stream after k decoder layers (0: embedding, N: before the final norm)"""
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    """V, the target's vocabulary"""
    draft_vocab_size: int
    """Vd <= V; below V the buffers d2t and t2d map between the two"""
    rope_theta: float
    rms_norm_eps: float
    fc_norm: bool
    """one RMSNorm per captured state before the concat"""
    norm_output: bool
    """feed the post-norm state to the next depth (off: the residual stream before the final norm)"""
    num_hidden_layers: int = 1
    own_embed: bool = False
    """whether the drafter has an embedding of its own; else the target's table is used"""
    lm_head: HeadSource = "own"
    """own: a tensor of the checkpoint; target: the target's rows; target_with_norm: those rows times the gain of the
    target's final norm, so that a drafter whose final norm starts at one starts with logits of the right scale"""
    ttt: int = 0
    """train-time test depth that the weights were trained with; 0: untrained or unknown"""
    trained_length: int = 0
    """longest sequence seen in training, in tokens; 0: unknown"""

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise DriftlabError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise DriftlabError(f"head_dim {self.head_dim} is odd: rotary embedding turns pairs of dimensions")
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise DriftlabError(f"draft_vocab_size {self.draft_vocab_size} is not in 1..vocab_size {self.vocab_size}")
        if not self.aux_layers or list(self.aux_layers) != sorted(set(self.aux_layers)) or self.aux_layers[0] < 0:
            raise DriftlabError(f"aux_layers {self.aux_layers}: give one or more distinct layers >= 0, ascending")
        if self.num_hidden_layers < 1:
            raise DriftlabError(f"num_hidden_layers {self.num_hidden_layers}: a drafter has at least one layer")
        for shared, name in (
            (not self.own_embed, "own_embed=False"),
            (self.lm_head != "own", f"lm_head={self.lm_head}"),
        ):
            if shared and self.hidden_size != self.target_hidden_size:
                raise DriftlabError(
                    f"{name} uses the target's table, which is {self.target_hidden_size} wide; hidden_size is "
                    f"{self.hidden_size}: the drafter needs a table of its own"
                )

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        values = dataclasses.asdict(self)
        values["aux_layers"] = list(self.aux_layers)
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DrafterConfig:
        """Rebuild from :meth:`to_dict`. Raises DriftlabError that names unknown and missing keys."""
        fields = dataclasses.fields(cls)
        required = {f.name for f in fields if f.default is dataclasses.MISSING}
        unknown, missing = set(values) - {f.name for f in fields}, required - set(values)
        if unknown or missing:
            raise DriftlabError(f"drafter config: unknown keys {sorted(unknown)}, missing keys {sorted(missing)}")
        return cls(**{**values, "aux_layers": tuple(values["aux_layers"])})


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
    """Return the name of the variant that the two switches make."""
    return next(v.name for v in VARIANTS.values() if (v.fc_norm, v.norm_output) == (config.fc_norm, config.norm_output))
