"""The live loop: draft a chain, verify it with the real target, keep what matches. Ground truth for replay.

After a round the drafter's keys of the accepted tokens are made again from the target's states (engines that keep the
drafter's own lose 8-15 % of accept length: vLLM#14649). Greedy: the text is that of plain decoding, token for token, as
far as the target's arithmetic does not depend on how many tokens it sees at once; in float32 it does not. Sampled: the
text has the target's distribution. A draft x is accepted with probability min(1, p(x) / q(x)); where one is not, the
token is drawn from the positive part of p - q (Leviathan et al. 2023). p and q are processed; arg-max drafts have a
one-hot q.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from driftlab.acceptance import drafting_for
from driftlab.draft import Chain, check_depth
from driftlab.drafter import Drafter
from driftlab.errors import DriftlabError
from driftlab.rules import verify
from driftlab.sampling import Sampling, draw
from driftlab.simulation import Round
from driftlab.target import Target
from driftlab.target.caches import allow_crop, crop
from driftlab.target.sampling import streams
from driftlab.trees import SampledTree, Tree, draft_tree


@dataclass(frozen=True)
class Live:
    """A live run. ``tokens``: the answer; ``rounds`` as :func:`driftlab.simulation.walk` gives them; ``finish``;
    ``lossless``: False if the rule changes the text. ``seconds``: wall time spent on {"prefill", "draft", "verify", "commit"};
    draft is all depths, the first too; commit is the second target pass over the path that a tree's round accepts, which makes
    keys and states those of plain decoding and which an engine does not need.
    """

    tokens: tuple[int, ...]
    rounds: tuple[Round, ...]
    finish: str
    seconds: dict[str, float]
    lossless: bool = True


@torch.inference_mode()
def speculate(
    target: Target,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    *,
    depth: int | None = None,
    tree: Tree | SampledTree | None = None,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    rule: str = "argmax",
    draft_temperature: float | None = None,
    draft_top_k: int | None = None,
    draft_top_p: float | None = None,
    epsilon: float = 0.09,
    delta: float = 0.3,
    backend: str | None = None,
    sinks: Sequence[int] = (0,),
) -> Live:
    """Decode one prompt with speculation.

    Args:
        target: verifies.
        drafter: drafts ``depth`` tokens a round; on any device.
        prompt_ids: the prompt's tokens, e.g. ``trajectory.tokens(i)[:prompt_length].tolist()``.
        depth: K, of chains.
        tree: draft such a tree a round in place of a chain; verified in one pass over its nodes, a child being accepted iff
            it is the target's own next token (``rule`` stays "argmax").
        max_new_tokens: length limit.
        sampling: the target's; default greedy. Its seed decides drafts and dice as well.
        rule: "argmax" drafts the most probable tokens; "rejection", "block", "exact" and "q1" sample them and verify them
            by that rule. "typical" drafts the most probable tokens and accepts what is typical: lossy.
        draft_temperature: of sampled drafts, and likewise ``draft_top_k`` (0: off) and ``draft_top_p`` (1: off); default the
            target's.
        draft_top_k: see ``draft_temperature``.
        draft_top_p: see ``draft_temperature``.
        epsilon: of typical acceptance: a draft is accepted iff p(x) > min(epsilon, delta exp(-entropy of p)).
        delta: see ``epsilon``.
        backend: of the drafts; see :class:`driftlab.draft.Chain`.
        sinks: positions whose keys are SINK for hooks, probes and interventions; ``trajectory.sinks``, to match a replay.

    Warns where the text has grown beyond ``drafter.config.trained_length``.

    Raises:
        DriftlabError: an empty prompt, no token asked for, a drafter that reads other states than the target captures,
            sampled drafts without a temperature, or logits that are not finite.
    """
    if (depth is None) == (tree is None):
        raise DriftlabError("give either depth (a chain) or tree")
    if tree is not None and rule != "argmax":
        raise DriftlabError(
            f'rule {rule!r}: a tree\'s children are not drawn by chance; they are accepted by rule="argmax"'
        )
    check_depth(tree.depth if depth is None else depth)
    sampling = sampling or Sampling()
    if isinstance(tree, SampledTree):
        raise DriftlabError("children drawn by chance are replayed by accept_siblings(), not decoded live")
    lossless = rule != "typical"
    if lossless and (epsilon, delta) != (0.09, 0.3):
        raise DriftlabError(f'epsilon and delta belong to rule="typical", not to {rule!r}')
    if not lossless and (sampling.temperature == 0 or not 0 < epsilon < 1 or not delta > 0):
        raise DriftlabError(
            f"typical acceptance at temperature {sampling.temperature:g} with epsilon {epsilon:g}, delta {delta:g}: it wants a "
            "temperature above 0, 0 < epsilon < 1 and delta > 0"
        )
    drafting = drafting_for(rule if lossless else "argmax", sampling, draft_temperature, draft_top_k, draft_top_p)
    if len(prompt_ids) + max_new_tokens > target.spec.max_positions:
        raise DriftlabError(
            f"{len(prompt_ids)} prompt tokens and {max_new_tokens} new ones are beyond the target's "
            f"{target.spec.max_positions} positions"
        )
    if max_new_tokens < 1:
        raise DriftlabError(f"max_new_tokens {max_new_tokens} must be at least 1: the prefill gives a token")
    if not prompt_ids:
        raise DriftlabError("the prompt has no token: there is nothing to condition on")
    if drafter.config.aux_layers and drafter.config.aux_layers[-1] > target.spec.num_layers:
        raise DriftlabError(
            f"the drafter reads target states {list(drafter.config.aux_layers)}, the target has {target.spec.num_layers} layers"
        )
    loop = _Loop(target, drafter, list(prompt_ids), max_new_tokens, sampling, drafting, backend, sinks)
    loop.decide = partial(verify, rule, roll=loop.roll, epsilon=epsilon, delta=delta)
    while not loop.finish:
        if depth is None:
            loop.tree_round(tree)
        else:
            loop.round(depth)
    trained, length = drafter.config.trained_length, len(prompt_ids) + len(loop.answer)
    if 0 < trained < length:
        warnings.warn(
            f"the text grew to {length} tokens, beyond the {trained} of the longest that this drafter was trained on: accept "
            "lengths there may be lower. Keep prompt and answer within it, train on longer text, or see them by length with "
            'buckets(..., by="context")',
            stacklevel=3,  # inference_mode wraps this function
        )
    return Live(tuple(loop.answer), tuple(loop.rounds), loop.finish, loop.seconds, lossless)


class _Loop:
    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        prompt: list[int],
        limit: int,
        sampling: Sampling,
        drafting: Sampling | None,
        backend: str | None = None,
        sinks: Sequence[int] = (0,),
    ) -> None:
        self.sampling, self.drafting, self.drafter = sampling, drafting, drafter
        self.decide: Callable[..., tuple[int, int]] = partial(verify, "argmax", roll=self.roll)
        (self.dice,) = streams([prompt], sampling.seed)
        (self.draft_dice,) = streams([[-1, *prompt]], sampling.seed)
        self.adapter, self.layers, self.eos = target.adapter, drafter.config.aux_layers, set(target.spec.eos_ids)
        self.device, self.dtype = drafter.device, drafter.dtype
        self.chain = Chain(drafter, prompt_lengths=[len(prompt)], sinks=sinks, backend=backend)
        self.cache = self.adapter.new_cache()
        self.limit, self.answer, self.rounds, self.finish = limit, [], [], ""
        self.seconds = {"prefill": 0.0, "draft": 0.0, "verify": 0.0, "commit": 0.0}
        began = time.perf_counter()
        logits, aux = self._forward(prompt, 0)
        allow_crop(self.cache)
        first = self._choose(logits[-1:])
        self._emit([first])
        self._extend([*prompt[1:], first], aux)
        self.seconds["prefill"] = time.perf_counter() - began
        self.committed = len(prompt)

    def round(self, depth: int) -> None:
        """Draft, verify, commit."""
        row, began = self.chain.rows - 1, self._now()
        drafts, q = self._draft(depth)
        drafted = self._now()
        logits, aux = self._forward([self.answer[-1], *drafts], self.committed)
        accepted, last = self._verify(drafts, q, logits)
        emitted = [*drafts[:accepted], last]
        kept = self._emit(emitted)
        end = "bonus" if kept == len(emitted) else "eos" if self.answer[-1] in self.eos else "cut"
        self.rounds.append(Round(row, accepted if end == "bonus" else kept, kept, end))
        crop(self.cache, depth - accepted)
        self.committed += accepted + 1
        verified = self._now()
        if not self.finish:
            self._extend(emitted, aux[:, : accepted + 1])
        self.seconds["verify"] += verified - drafted
        self.seconds["draft"] += drafted - began + self._now() - verified

    def tree_round(self, tree: Tree) -> None:
        """Draft a tree, verify it in one pass, commit the path that the target takes."""
        row, began = self.chain.rows - 1, self._now()
        draft = draft_tree(self.chain, tree)
        tokens, parents = draft.tokens[0, 0].tolist(), draft.parents[0, 0].tolist()
        drafted = self._now()
        logits = self._tree_logits(tokens, parents, draft.depths[0, 0].tolist())
        path, at = [], -1
        while True:
            last = self._choose(logits[at + 1][None])
            child = next((n for n, p in enumerate(parents) if p == at and tokens[n] == last), None)
            if child is None:
                break
            path.append(last)
            at = child
        emitted = [*path, last]
        kept = self._emit(emitted)
        end = "bonus" if kept == len(emitted) else "eos" if self.answer[-1] in self.eos else "cut"
        self.rounds.append(Round(row, len(path) if end == "bonus" else kept, kept, end))
        verified = committed = self._now()
        if not self.finish:
            _, aux = self._forward([self.answer[-1 - len(emitted)], *path], self.committed)
            committed = self._now()
            self._extend(emitted, aux)
        self.committed += len(emitted)
        self.seconds["verify"] += verified - drafted
        self.seconds["commit"] += committed - verified
        self.seconds["draft"] += drafted - began + self._now() - committed

    def _tree_logits(self, tokens: list[int], parents: list[int], depths: list[int]) -> Float[Tensor, "node vocab"]:
        """Logits after the last verified token and after every node; the cache is left as it was."""
        seen = torch.eye(len(tokens) + 1, dtype=torch.bool, device=self.adapter.device)
        seen[:, 0] = True
        for node, parent in enumerate(parents, 1):  # a parent comes before its children
            seen[node] |= seen[parent + 1]
        ids = torch.tensor([self.answer[-1], *tokens], device=self.adapter.device)
        positions = self.committed + torch.tensor([0, *depths], device=self.adapter.device)
        hidden = self.adapter.hidden_tree(ids, positions, seen, self.cache)
        crop(self.cache, len(ids))
        return self._finite(self.adapter.logits(hidden)[0], positions)

    def _verify(
        self, drafts: list[int], q: Float[Tensor, "depth vocab"] | None, logits: Float[Tensor, "token vocab"]
    ) -> tuple[int, int]:
        """Return how many drafts are accepted, and the token that follows them."""
        if self.sampling.temperature == 0 and self.drafting is None:
            choice = logits.argmax(-1).tolist()
            accepted = next((i for i, token in enumerate(drafts) if token != choice[i]), len(drafts))
            return accepted, choice[accepted]
        p = self.sampling.process(logits).double().cpu()
        if q is None:
            q = torch.nn.functional.one_hot(torch.tensor(drafts), p.shape[1]).double()
        return self.decide(drafts, p, q)

    def _draft(self, depth: int) -> tuple[list[int], Float[Tensor, "depth vocab"] | None]:
        """Draft a chain; of drafts drawn by chance also q over the target's vocabulary."""
        if self.drafting is None:
            return self.chain.draft(depth)[0].tolist(), None
        uniforms = torch.rand(1, depth, generator=self.draft_dice, dtype=torch.float64)
        tokens, q = self.chain.sample(depth, self.drafting, uniforms)
        wide = q.new_zeros(depth, self.drafter.config.vocab_size).index_copy_(1, self.drafter.draft_vocab, q[0])
        return tokens[0].tolist(), wide.cpu()

    def _choose(self, logits: Float[Tensor, "one vocab"]) -> int:
        """Take the target's own next token."""
        if self.sampling.temperature == 0:
            return int(logits.argmax(-1))
        return int(draw(self.sampling.process(logits).cpu(), self.roll())[0])

    @staticmethod
    def _now() -> float:
        """Seconds, once what was launched on a GPU is done."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def roll(self) -> Tensor:
        """Return one uniform number of the target's and the verifier's stream, [1]."""
        return torch.rand(1, generator=self.dice, dtype=torch.float64)

    def _forward(self, tokens: list[int], start: int) -> tuple[Tensor, Tensor]:
        """Run the target on ``tokens`` at positions ``start``...; return its logits after each, and what is read."""
        ids = torch.tensor([tokens], device=self.adapter.device)
        positions = torch.arange(start, start + len(tokens), device=self.adapter.device)[None]
        with self.adapter.capturing(self.layers) as states:
            hidden = self.adapter.hidden(ids, cache=self.cache, positions=positions)
        read = [states[k] for k in self.layers] or [hidden]
        aux = torch.stack([state.to(self.device, self.dtype) for state in read], 2)
        return self._finite(self.adapter.logits(hidden)[0], positions[0]), aux

    @staticmethod
    def _finite(logits: Float[Tensor, "token vocab"], positions: Int[Tensor, " token"]) -> Float[Tensor, "token vocab"]:
        """Return the logits; an arg max of NaN would be a token like any other."""
        bad = ~logits.sum(-1).isfinite()  # a row's sum is finite only if all of it is; nothing of their size is made
        if bool(bad.any()):
            raise DriftlabError(
                f"the target's logits after position {int(positions[bad][0])} are not finite: look for NaN or inf in its "
                "weights, or load it in float32 (half precision overflows at 65504)"
            )
        return logits

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
