r"""Draft trees: several children a node, from every start at once or from one; which nodes lie on the text.

A node of depth d is a token drafted d places after the last verified one. Its own keys are those of its ancestors and
itself, at positions row + 1, row + 2, ..., so a node is a chain like any other: siblings and cousins do not see each other
(vllm#17560), SELF mass is the mass on a node's ancestors and itself, and positions follow the depth, not the node's number.

Static trees have the same shape everywhere; each node is the r-th most probable child of its parent. Dynamic trees
(EAGLE-2, arXiv 2406.16858; EAGLE-3) grow where the drafter is confident: with the score

    s(node) = sum of ln q along its path        (q over the draft vocabulary, temperature 1)

the ``top_k`` best nodes of each depth are expanded into ``top_k`` children each, down to ``depth``, and of all nodes so made
the ``total`` best stay. A score never exceeds its parent's, so what stays is a tree.

Children that are not drawn by chance are accepted iff the text's next token is among them, whether the target is greedy or
samples: trying them one after the other, each with its probability in what is left of p, amounts to that.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from driftlab.draft import (
    LOGIT_BLOCK_BYTES,
    Chain,
    check_depth,
    check_finite,
    check_fits,
    most_starts,
    read_states,
    text_digest,
)
from driftlab.drafter import Drafter, DraftState
from driftlab.errors import DriftlabError
from driftlab.footprint import draft_bytes, refuse_beyond
from driftlab.progress import Progress, silent
from driftlab.recorded import Batch
from driftlab.stacking import Stack
from driftlab.trajectory import Trajectory


@dataclass(frozen=True)
class StaticTree:
    """The same tree everywhere. ``paths``: each node as ranks from the root, (0,) the most probable first token, (0, 2) the
    third most probable token after it. Every node's parent is a node.
    """

    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        paths = tuple(sorted({tuple(path) for path in self.paths}, key=lambda path: (len(path), path)))
        if not paths or len(paths) < len(self.paths) or any(not path or min(path) < 0 for path in paths):
            raise DriftlabError(f"a static tree has at least one node, each once, of ranks >= 0, not {self.paths}")
        if orphans := [path for path in paths if len(path) > 1 and path[:-1] not in paths]:
            raise DriftlabError(f"node {orphans[0]} has no parent: {orphans[0][:-1]} is not among the paths")
        object.__setattr__(self, "paths", paths)

    @classmethod
    def chains(cls, width: int, depth: int) -> StaticTree:
        """``width`` first tokens, each continued as an arg-max chain: top-k chains."""
        return cls(tuple((rank, *(0,) * below) for rank in range(width) for below in range(depth)))

    @property
    def depth(self) -> int:
        """Longest path."""
        return len(self.paths[-1])

    @property
    def label(self) -> str:
        """What rows call it."""
        shape = hashlib.sha256(repr(self.paths).encode()).hexdigest()[:6]
        return f"static tree of {len(self.paths)} nodes, depth {self.depth}, shape {shape}"

    def at(self, depth: int) -> list[tuple[int, ...]]:
        """Return the nodes of a depth, in order."""
        return [path for path in self.paths if len(path) == depth]


@dataclass(frozen=True)
class DynamicTree:
    """A tree that follows the drafter's confidence. ``depth`` K, ``top_k`` nodes expanded a depth and children of each,
    ``total`` drafted nodes that stay; a ``total`` beyond what the tree can have is what it can have.
    """

    depth: int
    top_k: int
    total: int

    def __post_init__(self) -> None:
        if min(self.depth, self.top_k, self.total) < 1:
            raise DriftlabError(f"{self}: depth, top_k and total are at least 1")

    @classmethod
    def eagle(cls, *, depth: int, top_k: int, total_tokens: int) -> DynamicTree:
        """From the numbers of the SafeAILab engine: its depth counts expansions, its total_tokens the root as well.

        Raises:
            DriftlabError: for total_tokens below 2, which drafts nothing.
        """
        if total_tokens < 2:
            raise DriftlabError(
                f"total_tokens {total_tokens} counts the root: nothing would be drafted; give at least 2"
            )
        return cls(depth + 1, top_k, total_tokens - 1)

    def size(self, draft_vocab: int) -> int:
        """Nodes that stay, given the size of the draft vocabulary."""
        width = min(self.top_k, draft_vocab)
        return min(self.total, width + (self.depth - 1) * width * width)

    @property
    def label(self) -> str:
        """What rows call it."""
        return f"dynamic tree of {self.total} nodes, depth {self.depth}, top {self.top_k}"


@dataclass(frozen=True)
class SampledTree:
    """Children drawn from q without replacement: ``branching[d - 1]`` of each node above depth d. Replayed by
    :mod:`driftlab.siblings`, not drafted.
    """

    branching: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.branching or min(self.branching) < 1:
            raise DriftlabError(f"branching {self.branching}: every depth needs at least one child")

    @property
    def depth(self) -> int:
        """Longest path."""
        return len(self.branching)

    @property
    def label(self) -> str:
        """What rows call it."""
        return f"sampled tree, children {' '.join(map(str, self.branching))}"


Tree = StaticTree | DynamicTree


@dataclass(frozen=True)
class TreeDraft:
    """Trees drafted from the starts of some sequences. Nodes come by depth.

    ``tokens [batch start node]``: target ids; ``parents [batch start node]``: the parent's place on the node axis, -1 for
    the root (the last verified token, not a node); ``depths [batch start node]``: 1..K; the rest as in
    :class:`driftlab.draft.Draft`.
    """

    tokens: Int[Tensor, "batch start node"]
    parents: Int[Tensor, "batch start node"]
    depths: Int[Tensor, "batch start node"]
    rows: Int[Tensor, "batch start"]
    valid: Bool[Tensor, "batch start"]
    ids: tuple[str, ...]
    tree: Tree
    digests: tuple[str, ...] = ()

    @property
    def depth(self) -> int:
        """Largest depth that a node can have, K."""
        return self.tree.depth

    def accept_length(self, text: Int[Tensor, "batch start depth"]) -> Int[Tensor, "batch start"]:
        """Return how far a path of nodes follows the text's tokens t + 2, t + 3, ..., 0..K."""
        at = torch.full(self.tokens.shape[:2], -1)
        length = torch.zeros_like(at)
        for k in range(text.shape[2]):
            hit = (self.parents == at[..., None]) & (self.tokens == text[..., k : k + 1])
            found = hit.any(-1)
            at = torch.where(found, hit.int().argmax(-1), -2)
            length += found
        return length


@torch.no_grad()
def tree_all_starts(
    drafter: Drafter,
    data: Trajectory | Batch,
    tree: Tree | SampledTree,
    *,
    max_tokens: int = 2048,
    progress: Progress = silent,
) -> TreeDraft:
    """Draft a tree from every row of the answers, t >= P - 1, one pass per depth.

    Args:
        drafter: on any device.
        data: a trajectory, read in batches of at most ``max_tokens`` padded tokens, or one batch.
        tree: which nodes are drafted.
        max_tokens: size of a batch; a start becomes as many queries as nodes are expanded at a depth.
        progress: called with ("drafting trees", sequences done, sequences).

    Raises:
        DriftlabError: a drafter that does not fit, no sequence, or a static tree with more ranks than draft tokens.
    """
    check_fits(drafter, data)
    if not len(data):
        raise DriftlabError("there is no sequence to draft for")
    device, dtype = drafter.device, drafter.dtype
    _refuse_sampled(tree)
    nodes = len(tree.paths) if isinstance(tree, StaticTree) else tree.size(drafter.config.draft_vocab_size)
    most = most_starts(data)
    refuse_beyond(
        draft_bytes(len(data), most, 3 * nodes),
        f"drafting trees of {nodes} nodes from up to {most} rows of {len(data)} sequences",
        "draft subset(...)s of the recording one after the other, or smaller trees",
    )
    stack, ids, digests = Stack(len(data), most), [], []
    for batch in [data] if isinstance(data, Batch) else data.batches(max_tokens):
        batch = batch.to(device, dtype)
        starts = batch.starts
        drafter.hook_starts(starts, 0)
        state = drafter.first(batch.tokens[:, 1:], read_states(drafter, batch)[:, :-1], starts)
        grown = dict(zip(("tokens", "parents", "depths"), grow(drafter, state, tree), strict=True))
        stack.add({**grown, "rows": starts.rows, "valid": starts.valid})
        ids += batch.ids
        digests += [text_digest(row[:n]) for row, n in zip(batch.tokens.cpu(), batch.lengths.tolist(), strict=True)]
        progress("drafting trees", len(ids), len(data))
    return TreeDraft(**stack.whole(), ids=tuple(ids), tree=tree, digests=tuple(digests))


@torch.no_grad()
def draft_tree(chain: Chain, tree: Tree) -> TreeDraft:
    """Draft one tree a sequence after the chain's last ``extend``, as deployed."""
    state = chain.take()
    with chain.drafter.using(chain.backend):
        tokens, parents, depths = (x.cpu() for x in grow(chain.drafter, state, tree))
    return TreeDraft(tokens, parents, depths, state.starts.rows.cpu(), state.starts.valid.cpu(), state.starts.ids, tree)


def grow(drafter: Drafter, state: DraftState, tree: Tree | SampledTree) -> tuple[Tensor, Tensor, Tensor]:
    """Grow a tree from each start of a state of depth 1; return tokens, parents and depths, [batch start node]."""
    _refuse_sampled(tree)
    check_depth(tree.depth)
    run = _grow_static if isinstance(tree, StaticTree) else _grow_dynamic
    return run(drafter, state, tree)


def _grow_static(drafter: Drafter, state: DraftState, tree: StaticTree) -> tuple[Tensor, Tensor, Tensor]:
    batch, starts = state.normed.shape[:2]
    width = 1 + max(max(path) for path in tree.paths)
    if width > drafter.config.draft_vocab_size:
        raise DriftlabError(f"rank {width - 1}: the draft vocabulary has {drafter.config.draft_vocab_size} tokens")
    number = {path: place for place, path in enumerate(tree.paths)}
    expanded: list[tuple[int, ...]] = [()]
    tokens = []
    for depth in range(1, tree.depth + 1):
        check_finite(state)
        nodes = tree.at(depth)
        ids, _ = _children(drafter, state.normed, width)
        ids = ids.view(batch, starts, len(expanded), width)
        parent = [expanded.index(path[:-1]) for path in nodes]
        tokens.append(ids[:, :, parent, [path[-1] for path in nodes]])
        if depth == tree.depth:
            break
        inner = [place for place, path in enumerate(nodes) if any(p[:-1] == path for p in tree.at(depth + 1))]
        chosen = torch.tensor([parent[place] for place in inner], device=ids.device).expand(batch, starts, -1)
        state = _expanded(drafter, state, chosen, len(expanded), tokens[-1][:, :, inner])
        expanded = [nodes[place] for place in inner]
    parents = torch.tensor([number.get(path[:-1], -1) for path in tree.paths])
    depths = torch.tensor([len(path) for path in tree.paths])
    every = torch.cat(tokens, -1)
    return every, parents.expand_as(every), depths.expand_as(every)


def _grow_dynamic(drafter: Drafter, state: DraftState, tree: DynamicTree) -> tuple[Tensor, Tensor, Tensor]:
    batch, starts = state.normed.shape[:2]
    width = min(tree.top_k, drafter.config.draft_vocab_size)
    tokens, parents, scores, depths = [], [], [], []
    frontier = torch.full((batch, starts, 1), -1, device=state.normed.device)  # node number of each expanded node
    reached = state.normed.new_zeros(batch, starts, 1, dtype=torch.float32)
    made = 0
    for depth in range(1, tree.depth + 1):
        check_finite(state)
        ids, logp = _children(drafter, state.normed, width)
        expanded = frontier.shape[2]
        ids = ids.view(batch, starts, expanded, width)
        score = reached[..., None] + logp.view(batch, starts, expanded, width)
        tokens.append(ids.flatten(2))
        scores.append(score.flatten(2))
        parents.append(frontier[..., None].expand_as(ids).flatten(2))
        depths.append(torch.full_like(tokens[-1], depth))
        if depth == tree.depth:
            break
        best = scores[-1].topk(width, -1)
        reached, frontier = best.values, made + best.indices
        state = _expanded(drafter, state, best.indices // width, expanded, tokens[-1].gather(2, best.indices))
        made += tokens[-1].shape[2]
    # stable: among equal scores the earlier node stays, so no node stays without its parent
    order = torch.cat(scores, -1).sort(dim=-1, descending=True, stable=True).indices
    kept = order[..., : tree.size(drafter.config.draft_vocab_size)].sort(-1).values
    number = torch.full((batch, starts, sum(x.shape[2] for x in tokens) + 1), -1, device=kept.device)
    number.scatter_(2, kept, torch.arange(kept.shape[2], device=kept.device).expand_as(kept))
    # the last column stays -1: a first token's parent is the root
    return (
        torch.cat(tokens, -1).gather(2, kept),
        number.gather(2, torch.cat(parents, -1).gather(2, kept) % number.shape[2]),
        torch.cat(depths, -1).gather(2, kept),
    )


def _children(drafter: Drafter, normed: Float[Tensor, "batch start d_model"], width: int) -> tuple[Tensor, Tensor]:
    """The ``width`` most probable tokens after each state, as target ids, with ln q; [batch start rank]."""
    block = max(1, LOGIT_BLOCK_BYTES // (4 * drafter.config.draft_vocab_size))
    ids, logps = [], []
    for rows in normed.flatten(0, 1).split(block):
        logits = drafter.logits(rows).float()
        # of equals the lower id first, as arg max has it; far below the distance of two float32 logits that differ
        first = torch.arange(logits.shape[1], device=logits.device, dtype=torch.float64) * 1e-14
        chosen = (logits.double() - first).topk(width).indices
        ids.append(drafter.to_target(chosen))
        logps.append(
            (logits.gather(1, chosen) - logits.logsumexp(-1, keepdim=True)).clamp(max=0)
        )  # rounding may leave 1e-7
    shape = normed.shape[:2]
    return torch.cat(ids).unflatten(0, shape), torch.cat(logps).unflatten(0, shape)


def _expanded(
    drafter: Drafter,
    state: DraftState,
    chosen: Int[Tensor, "batch start node"],
    expanded: int,
    tokens: Int[Tensor, "batch start node"],
) -> DraftState:
    """Feed the tokens of the chosen nodes, each with the state of its parent: ``chosen`` among the ``expanded`` of a start."""
    first = torch.arange(chosen.shape[1], device=chosen.device)[:, None] * expanded
    state = state.at((first + chosen).flatten(1))
    drafter.hook_starts(state.starts, state.depth)
    return drafter.next(state, tokens.flatten(1))


def _refuse_sampled(tree: Tree | SampledTree) -> None:
    if isinstance(tree, SampledTree):
        raise DriftlabError("children drawn by chance are not drafted: driftlab.siblings replays them")
