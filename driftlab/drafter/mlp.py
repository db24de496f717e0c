"""What follows attention in a layer: SwiGLU, or a mixture of such experts (see :class:`ExpertsConfig`)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from driftlab.drafter.config import ExpertsConfig


class MLP(nn.Module):
    """SwiGLU: down(silu(gate x) * up x)."""

    def __init__(self, width: int, intermediate: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, intermediate, bias=bias)
        self.up_proj = nn.Linear(width, intermediate, bias=bias)
        self.down_proj = nn.Linear(intermediate, width, bias=bias)

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """Return the MLP's output, without the residual."""
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Linear):
    """Scores of the experts, in float32 at least; ``e_score_correction_bias`` takes part in the choice only."""

    def __init__(self, width: int, config: ExpertsConfig) -> None:
        super().__init__(width, config.count, bias=False)
        self.config = config
        if config.scoring == "sigmoid":
            # it takes part in the choice alone, so no gradient reaches it: nothing to train
            self.register_buffer("e_score_correction_bias", torch.zeros(config.count))

    def forward(self, x: Float[Tensor, "row width"]) -> Float[Tensor, "row expert"]:
        """Return the weight of every expert for every row, 0 where it is not chosen."""
        config = self.config
        wide = torch.promote_types(x.dtype, torch.float32)
        scores = nn.functional.linear(x.to(wide), self.weight.to(wide))
        if config.scoring == "softmax":
            scores = scores.softmax(-1)
            chosen = scores.topk(config.per_token, -1).indices
        else:
            scores = scores.sigmoid()
            ranked = scores + self.e_score_correction_bias.to(wide)
            if config.groups > 1:
                grouped = ranked.unflatten(-1, (config.groups, -1))
                best = grouped.topk(2, -1).values.sum(-1).topk(config.groups_per_token, -1).indices
                open_groups = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, True)
                # not 0, which some releases used: a correction bias may leave every open group below it
                ranked = grouped.masked_fill(~open_groups[..., None], -torch.inf).flatten(-2)
            chosen = ranked.topk(config.per_token, -1).indices
        weights = scores.gather(-1, chosen)
        if config.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if config.scoring == "sigmoid" else 0))
        return torch.zeros_like(scores).scatter(-1, chosen, weights * config.scale)


class Experts(nn.Module):
    """A mixture of SwiGLU experts: each row is computed by its chosen ones only."""

    def __init__(self, width: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.gate = Router(width, config)
        self.experts = nn.ModuleList(MLP(width, config.intermediate_size) for _ in range(config.count))
        if config.shared_intermediate_size:
            self.shared_experts = MLP(width, config.shared_intermediate_size)
        if config.shared_gate:
            self.shared_expert_gate = nn.Linear(width, 1, bias=False)

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """Return the experts' output, without the residual."""
        rows = x.flatten(0, -2)
        weights = self.gate(rows)
        out = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            here = weights[:, index].nonzero()[:, 0]
            if len(here):
                out = out.index_add(0, here, (expert(rows[here]) * weights[here, index, None]).to(out.dtype))
        if self.gate.config.shared_intermediate_size:
            shared = self.shared_experts(rows)
            if self.gate.config.shared_gate:
                shared = shared * torch.sigmoid(self.shared_expert_gate(rows))
            out = out + shared
        return out.view_as(x)
