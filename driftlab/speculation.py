"""The live loop: draft a chain, verify it with the real target, keep what matches. Ground truth for replay.

After a round the drafter's keys of the accepted tokens are made again from the target's states (engines that keep the
drafter's own lose 8-15 % of accept length: vLLM#14649). Greedy: the text is that of plain decoding, token for token, as
far as the target's arithmetic does not depend on how many tokens it sees at once; in float32 it does not.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from driftlab.draft import Chain, check_depth
from driftlab.drafter import Drafter
from driftlab.errors import DriftlabError
from driftlab.simulation import Round
from driftlab.target import Target
from driftlab.target.adapter import allow_crop, crop


@dataclass(frozen=True)
class Live:
    """A live run. ``tokens``: the answer; ``rounds`` as :func:`driftlab.simulation.walk` gives them; ``finish``;
    ``seconds``: wall time spent ``{"prefill", "draft", "verify"}``.
    """

    tokens: tuple[int, ...]
    rounds: tuple[Round, ...]
    finish: str
    seconds: dict[str, float]


@torch.inference_mode()
def speculate(target: Target, drafter: Drafter, prompt_ids: Sequence[int], *, depth: int, max_new_tokens: int) -> Live:
    """Decode one prompt greedily with speculation.

    Args:
        target: verifies.
        drafter: drafts ``depth`` tokens a round; on any device.
        prompt_ids: the prompt's tokens, e.g. ``trajectory.tokens(i)[:prompt_length].tolist()``.
        depth: K.
        max_new_tokens: length limit.

    Raises:
        DriftlabError: an empty prompt, no token asked for, or a drafter that reads other states than the target captures.
    """
    check_depth(depth)
    if len(prompt_ids) + max_new_tokens > target.spec.max_positions:
        raise DriftlabError(
            f"{len(prompt_ids)} prompt tokens and {max_new_tokens} new ones are beyond the target's "
            f"{target.spec.max_positions} positions"
        )
    if max_new_tokens < 1:
        raise DriftlabError(f"max_new_tokens {max_new_tokens} must be at least 1: the prefill gives a token")
    if not prompt_ids:
        raise DriftlabError("the prompt has no token: there is nothing to condition on")
    if drafter.config.aux_layers != target.aux_layers:
        raise DriftlabError(
            f"the drafter reads target states {list(drafter.config.aux_layers)}, the target captures "
            f"{list(target.aux_layers)}: load the target with aux_layers={list(drafter.config.aux_layers)}"
        )
    loop = _Loop(target, drafter, list(prompt_ids), max_new_tokens)
    while not loop.finish:
        loop.round(depth)
    return Live(tuple(loop.answer), tuple(loop.rounds), loop.finish, loop.seconds)


class _Loop:
    def __init__(self, target: Target, drafter: Drafter, prompt: list[int], limit: int) -> None:
        self.adapter, self.layers, self.eos = target.adapter, target.aux_layers, set(target.spec.eos_ids)
        self.device, self.dtype = drafter.fc.weight.device, drafter.fc.weight.dtype
        self.chain = Chain(drafter, prompt_lengths=[len(prompt)])
        self.cache = self.adapter.new_cache()
        self.limit, self.answer, self.rounds, self.finish = limit, [], [], ""
        self.seconds = {"prefill": 0.0, "draft": 0.0, "verify": 0.0}
        began = time.perf_counter()
        choice, aux = self._forward(prompt, 0)
        allow_crop(self.cache)
        self._emit([choice[-1]])
        self._extend([*prompt[1:], choice[-1]], aux)
        self.seconds["prefill"] = time.perf_counter() - began
        self.committed = len(prompt)

    def round(self, depth: int) -> None:
        """Draft, verify, commit."""
        row, began = self.chain.rows - 1, time.perf_counter()
        drafts = self.chain.draft(depth)[0].tolist()
        drafted = time.perf_counter()
        choice, aux = self._forward([self.answer[-1], *drafts], self.committed)
        accepted = 0
        while accepted < depth and drafts[accepted] == choice[accepted]:
            accepted += 1
        emitted = [*drafts[:accepted], choice[accepted]]
        kept = self._emit(emitted)
        end = "bonus" if kept == len(emitted) else "eos" if self.answer[-1] in self.eos else "cut"
        self.rounds.append(Round(row, accepted if end == "bonus" else kept, kept, end))
        crop(self.cache, depth - accepted)
        self.committed += accepted + 1
        if not self.finish:
            self._extend(emitted, aux[:, : accepted + 1])
        self.seconds["draft"] += drafted - began
        self.seconds["verify"] += time.perf_counter() - drafted

    def _forward(self, tokens: list[int], start: int) -> tuple[list[int], torch.Tensor]:
        """Run the target on ``tokens`` at positions ``start``...; return its arg max after each, and the aux states."""
        ids = torch.tensor([tokens], device=self.adapter.device)
        positions = torch.arange(start, start + len(tokens), device=self.adapter.device)[None]
        with self.adapter.capturing(self.layers) as states:
            hidden = self.adapter.hidden(ids, cache=self.cache, positions=positions)
        aux = torch.stack([states[k].to(self.device, self.dtype) for k in self.layers], 2)
        return self.adapter.logits(hidden)[0].argmax(-1).tolist(), aux

    def _emit(self, tokens: list[int]) -> int:
        """Append tokens up to EOS or the limit; return how many."""
        for count, token in enumerate(tokens, 1):
            self.answer.append(token)
            if token in self.eos:
                self.finish = "stop"
            elif len(self.answer) == self.limit:
                self.finish = "length"
            if self.finish:
                return count
        return len(tokens)

    def _extend(self, following: list[int], aux: torch.Tensor) -> None:
        self.chain.extend(torch.tensor([following], device=self.device), aux)
