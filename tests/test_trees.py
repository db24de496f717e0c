"""Draft trees: an engine's own tree, plain forwards over every path, and the live loop."""

import json
from pathlib import Path

import pandas as pd
import pytest
import torch
from conftest import TinyTokenizer, tiny_model
from naive import naive_chain
from safetensors.torch import load_file, save_file

from driftlab import (
    VARIANTS,
    AttentionMass,
    Drafter,
    DriftlabError,
    Sampling,
    StateNorm,
    Target,
    accept,
    all_starts,
    simulate,
    speculate,
)
from driftlab.draft import Chain
from driftlab.estimators import decompose, estimates
from driftlab.trees import DynamicTree, SampledTree, StaticTree, draft_tree, tree_all_starts

ORACLE = Path(__file__).parent / "data" / "oracles" / "safeailab"


@pytest.fixture(scope="module")
def safeailab(tmp_path_factory):
    """The engine's tiny random drafter, its weights in a file that is read here, and what the engine computed."""
    folder = tmp_path_factory.mktemp("safeailab")
    weights = torch.load(ORACLE / "pytorch_model.bin", weights_only=True)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(json.loads((ORACLE / "config.json").read_text())))
    return Drafter.load(folder, aux_layers=(0, 1, 2)).eval(), load_file(ORACLE / "expected.safetensors")


def session(drafter, expected):
    """The drafter pairs aux row t with ids[t + 1]."""
    ids = expected["ids"]
    chain = Chain(drafter, prompt_lengths=[len(ids)])
    chain.extend(ids[None, 1:], expected["aux"].view(1, len(ids) - 1, 3, -1))
    return chain


def ancestors(parents, node):
    """Places of a node and all above it, root last as -1."""
    found = [node]
    while found[-1] != -1:
        found.append(parents[found[-1]])
    return found


def test_prefill_and_chain_are_the_engines(safeailab):
    drafter, expected = safeailab
    chain = session(drafter, expected)
    state = chain.take()
    torch.testing.assert_close(
        drafter.logits(state.normed)[0, 0], expected["logits_prefill"][0, -1], rtol=1e-5, atol=1e-5
    )
    normed = []
    with drafter.hooks([("hook_normed", lambda value, hook: normed.append(value[0, -1]))], read_only=True):
        tokens = session(drafter, expected).draft(6)
    logits = drafter.logits(torch.stack(normed))
    assert tokens[0].tolist() == expected["chain_tokens"].tolist()
    torch.testing.assert_close(logits, expected["chain_logits"], rtol=1e-5, atol=1e-5)


def test_the_dynamic_tree_is_the_engines(safeailab):
    """total_tokens 20, depth 4, top_k 5: tokens in order, who sees whom, positions, and the paths to the leaves."""
    drafter, expected = safeailab
    tree = DynamicTree.eagle(total_tokens=20, depth=4, top_k=5)
    draft = draft_tree(session(drafter, expected), tree)
    assert (tree.depth, tree.total) == (5, 19)
    assert draft.tokens[0, 0].tolist() == expected["tree_tokens"][1:].tolist()
    parents, depths = draft.parents[0, 0].tolist(), draft.depths[0, 0].tolist()
    seen = torch.zeros(20, 20)
    seen[0, 0] = 1
    for node in range(19):
        seen[node + 1, [place + 1 for place in ancestors(parents, node)]] = 1
    assert torch.equal(seen, expected["tree_mask"])
    assert [0, *depths] == expected["tree_pos"].tolist()
    leaves = {tuple(reversed([p + 1 for p in ancestors(parents, n)])) for n in range(19) if n not in parents}
    assert leaves == {tuple(p for p in row if p >= 0) for row in expected["tree_retrieve"].tolist()}


def by_hand(drafter, batch, index, row, tree):
    """The tree of one start from plain forwards over each path, without any cache: {path of tokens: its parent path}."""
    tokens, aux = batch.tokens[index, : batch.lengths[index]], batch.aux[index, : batch.lengths[index]]
    ids = drafter.draft_vocab.tolist()

    def logp(path):
        steps = naive_chain(drafter, tokens, aux, row, len(path) + 1, fed=[*path, 0])
        return steps[-1]["logits"].log_softmax(-1)

    if isinstance(tree, StaticTree):
        real = {(): ()}
        for path in tree.paths:
            above = real[path[:-1]]
            real[path] = (*above, ids[int(logp(above).argsort(descending=True)[path[-1]])])
        return [real[path] for path in tree.paths]
    frontier, nodes = [((), 0.0)], []
    for _ in range(tree.depth):
        children = []
        for path, score in frontier:
            top = logp(path).topk(min(tree.top_k, len(ids)))
            children += [
                ((*path, ids[i]), score + v) for v, i in zip(top.values.tolist(), top.indices.tolist(), strict=True)
            ]
        nodes += children
        frontier = sorted(children, key=lambda node: -node[1])[: tree.top_k]
    return [path for path, _ in sorted(nodes, key=lambda node: -node[1])[: tree.size(len(ids))]]


def paths_of(draft, index, start):
    tokens, parents = draft.tokens[index, start].tolist(), draft.parents[index, start].tolist()
    return [tuple(tokens[p] for p in reversed(ancestors(parents, n)[:-1])) for n in range(len(tokens))]


TREES = [
    StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 1, 0), (0, 1, 2))),
    StaticTree.chains(3, 3),
    StaticTree(((0,), (1,), (2,), (3,))),
    DynamicTree(depth=3, top_k=3, total=9),
    DynamicTree(depth=4, top_k=2, total=100),
    DynamicTree(depth=1, top_k=4, total=4),
]


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.label)
def test_every_node_is_what_a_plain_forward_over_its_path_gives(varied_trajectory, make_drafter, tree, layers):
    drafter = make_drafter("norm_output", draft_vocab=[i for i in range(61) if i % 3], num_hidden_layers=layers)
    drafter = drafter.double()
    draft = tree_all_starts(drafter, varied_trajectory, tree, max_tokens=40)
    batch = varied_trajectory.batch(range(4)).to("cpu", torch.float64)
    for index, start in ((0, 0), (1, 3), (3, 1)):
        expected = by_hand(drafter, batch, index, int(draft.rows[index, start]), tree)
        found = paths_of(draft, index, start)
        assert len(found) == len(set(found))
        assert sorted(found) == sorted(expected)
        assert [len(path) for path in found] == draft.depths[index, start].tolist()


def test_a_dynamic_tree_of_one_child_is_a_chain(varied_trajectory, make_drafter):
    drafter = make_drafter("eagle31")
    chain = all_starts(drafter, varied_trajectory, 5, feed="own")
    draft = tree_all_starts(drafter, varied_trajectory, DynamicTree(depth=5, top_k=1, total=5))
    assert torch.equal(draft.tokens[chain.valid], chain.tokens[chain.valid])
    assert draft.parents[0, 0].tolist() == [-1, 0, 1, 2, 3]


def test_one_start_at_a_time_gives_the_same_tree(varied_trajectory, make_drafter):
    drafter = make_drafter("eagle3").double()
    tree = DynamicTree(depth=3, top_k=3, total=8)
    draft = tree_all_starts(drafter, varied_trajectory, tree)
    batch = varied_trajectory.batch(range(4)).to("cpu", torch.float64)
    for start in (0, 4):
        row = int(draft.rows[2, start])
        chain = Chain(drafter, prompt_lengths=[int(batch.prompt_lengths[2])])
        chain.extend(batch.tokens[2:3, 1 : row + 2], batch.aux[2:3, : row + 1])
        one = draft_tree(chain, tree)
        assert torch.equal(one.tokens[0, 0], draft.tokens[2, start])
        assert torch.equal(one.parents[0, 0], draft.parents[2, start])


def test_no_node_stays_without_its_parent_where_scores_are_equal(varied_trajectory, make_drafter):
    """A drafter that is certain gives ln q = 0 along whole paths, so that a child's score equals its parent's."""
    drafter = make_drafter("norm_output", scale=200.0)
    draft = tree_all_starts(drafter, varied_trajectory, DynamicTree(depth=6, top_k=4, total=7))
    for index in range(4):
        for start in draft.valid[index].nonzero()[:, 0].tolist():
            parents, depths = draft.parents[index, start].tolist(), draft.depths[index, start].tolist()
            assert all(depths[n] == (1 if p < 0 else depths[p] + 1) for n, p in enumerate(parents))
            assert all(p < n for n, p in enumerate(parents))


def test_sizes_are_what_the_tree_can_have():
    assert DynamicTree(3, 4, 1000).size(50) == 4 + 2 * 16
    assert DynamicTree(3, 4, 1000).size(2) == 2 + 2 * 4  # top_k beyond the draft vocabulary
    assert DynamicTree(3, 4, 5).size(50) == 5
    assert StaticTree.chains(2, 3).paths == ((0,), (1,), (0, 0), (1, 0), (0, 0, 0), (1, 0, 0))
    assert StaticTree(((0, 0), (0,))).paths == ((0,), (0, 0))  # in order of depth, however given


@pytest.mark.parametrize(
    ("message", "make"),
    [
        (r"node \(1, 0\) has no parent", lambda: StaticTree(((0,), (1, 0)))),
        ("at least one node", lambda: StaticTree(())),
        ("each once", lambda: StaticTree(((0,), (0,)))),
        ("ranks >= 0", lambda: StaticTree(((-1,),))),
        ("at least 1", lambda: DynamicTree(0, 1, 1)),
        ("counts the root", lambda: DynamicTree.eagle(depth=1, top_k=1, total_tokens=1)),
    ],
)
def test_what_is_no_tree_is_refused(message, make):
    with pytest.raises(DriftlabError, match=message):
        make()


def test_a_rank_beyond_the_draft_vocabulary_is_refused(varied_trajectory, make_drafter):
    drafter = make_drafter("eagle3", draft_vocab=[3, 4, 5])
    with pytest.raises(DriftlabError, match="rank 3: the draft vocabulary has 3 tokens"):
        tree_all_starts(drafter, varied_trajectory, StaticTree(((0,), (3,))))


# ---- acceptance and the live loop


def simulated(drafter, trajectory, tree):
    return simulate(accept(tree_all_starts(drafter, trajectory, tree), trajectory))


def prompt_of(trajectory, index):
    return trajectory.tokens(index)[: trajectory.entries[index].prompt_length].tolist()


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.label)
def test_replay_is_the_live_tree_loop_round_for_round(varied_target, varied_trajectory, trained, tree):
    """And the live text is that of plain greedy decoding, whatever the tree (sglang#26866)."""
    for variant in ("eagle3", "eagle31"):
        simulation = simulated(trained[variant], varied_trajectory, tree)
        for i, entry in enumerate(varied_trajectory.entries):
            prompt = prompt_of(varied_trajectory, i)
            live = speculate(varied_target, trained[variant], prompt, tree=tree, max_new_tokens=24)
            assert list(live.tokens) == varied_trajectory.tokens(i)[entry.prompt_length :].tolist()
            assert live.rounds == simulation.rounds[i]
            assert live.finish == entry.finish
        assert simulation.tau > 1.2


def test_trees_of_a_sampling_target(varied_target, trained, tmp_path):
    """A child is accepted iff it is the text: the text is what the target samples alone with that seed."""
    trajectory = varied_target.record(
        ["hello world", "abc"], max_new_tokens=16, template=False, temperature=0.9, seed=2, out=tmp_path / "r"
    )
    tree = DynamicTree(depth=3, top_k=3, total=8)
    simulation = simulated(trained["eagle31"], trajectory, tree)
    for i, entry in enumerate(trajectory.entries):
        options = {"tree": tree, "max_new_tokens": 16, "sampling": Sampling(0.9, seed=2)}
        live = speculate(varied_target, trained["eagle31"], prompt_of(trajectory, i), **options)
        assert list(live.tokens) == trajectory.tokens(i)[entry.prompt_length :].tolist()
        assert live.rounds == simulation.rounds[i]


def test_a_tree_that_holds_the_chain_accepts_at_least_as_much(varied_trajectory, trained):
    """At every start; and a tree of the top 4 alone accepts iff the text is in the draft's top 4 (TensorRT-LLM#10323)."""
    drafter = trained["eagle3"]
    chain = accept(all_starts(drafter, varied_trajectory, 3), varied_trajectory)
    chains = accept(tree_all_starts(drafter, varied_trajectory, StaticTree.chains(3, 3)), varied_trajectory)
    assert torch.all(chains.accept_length >= chain.accept_length)
    assert chains.accept_length.sum() > chain.accept_length.sum()
    one = accept(tree_all_starts(drafter, varied_trajectory, StaticTree.chains(1, 3)), varied_trajectory)
    assert torch.equal(one.accept_length, chain.accept_length)
    wide = tree_all_starts(drafter, varied_trajectory, StaticTree(((0,), (1,), (2,), (3,))))
    result = accept(wide, varied_trajectory)
    for i, entry in enumerate(varied_trajectory.entries):
        text = varied_trajectory.tokens(i)
        for start in range(int(wide.valid[i].sum())):
            place = entry.prompt_length - 1 + start + 2
            inside = place < entry.length and int(text[place]) in wide.tokens[i, start].tolist()
            assert int(result.accept_length[i, start]) == inside


def test_of_equal_logits_the_lower_id_comes_first(varied_trajectory, make_drafter):
    """As arg max has it: a tree of one child is the chain even where half precision makes many equals."""
    drafter = make_drafter("eagle3", scale=1.0)
    with torch.no_grad():
        weight = drafter.lm_head.weight
        weight.copy_(weight[torch.arange(len(weight)) // 4 * 4])  # every four tokens have one logit
    chain = all_starts(drafter, varied_trajectory, 3, feed="own")
    tree = tree_all_starts(drafter, varied_trajectory, DynamicTree(depth=3, top_k=1, total=3))
    assert torch.equal(tree.tokens[chain.valid], chain.tokens[chain.valid])
    wide = tree_all_starts(drafter, varied_trajectory, StaticTree(((0,), (1,), (2,), (3,))))
    first = wide.tokens[chain.valid]
    equal = first[:, 1:] // 4 == first[:, :-1] // 4
    assert bool((first[:, 1:] > first[:, :-1])[equal].all())
    assert int(equal.sum()) > len(first)


def test_estimators_of_rates_by_depth_are_not_for_trees(varied_trajectory, trained):
    tree = simulated(trained["eagle31"], varied_trajectory, DynamicTree(depth=3, top_k=3, total=8))
    own = simulate(accept(all_starts(trained["eagle31"], varied_trajectory, 3, feed="own"), varied_trajectory))
    for simulation in (tree, own):
        assert set(estimates(simulation)["quantity"]) == {"tau", "tau_uncensored", "all_starts_mean"}
        assert not any(record["quantity"] == "match" for record in simulation.records())
        with pytest.raises(DriftlabError, match="no rate by depth"):
            decompose(simulation)


def test_a_tree_has_a_histogram_of_depths_and_no_rate_per_position(varied_trajectory, trained):
    simulation = simulated(trained["eagle31"], varied_trajectory, DynamicTree(depth=3, top_k=3, total=8))
    records = list(simulation.records())
    quantities = {record["quantity"] for record in records}
    assert {"accepted_nothing", "accepted_exactly", "tau"} <= quantities
    assert not quantities & {"match", "accept_conditional", "accept_unconditional"}
    for i, name in enumerate(simulation.acceptance.ids):
        whole = simulation.complete[i]
        rows = {r["depth"]: r for r in records if r["prompt"] == name and r["quantity"] == "accepted_exactly"}
        none = next(r for r in records if r["prompt"] == name and r["quantity"] == "accepted_nothing")
        assert [none["value"], *(rows[k]["value"] for k in (1, 2, 3))] == pytest.approx(
            [sum(r.accepted == k for r in whole) / len(whole) for k in range(4)]
        )


def test_self_mass_is_that_of_ancestors_alone(varied_trajectory, make_drafter):
    """A chain within the tree sees what it sees alone: siblings add nothing (vllm#17560)."""
    drafter = make_drafter("eagle3").double()

    def masses(tree):
        with AttentionMass(drafter, recent=(2,)) as mass, StateNorm(drafter) as norm:
            tree_all_starts(drafter, varied_trajectory, tree)
        return pd.concat([mass.frame(), norm.frame()]).set_index(["quantity", "prompt", "head", "depth", "window"])

    names = [entry.id for entry in varied_trajectory.entries]
    alone, wide = masses(StaticTree.chains(1, 3)), masses(StaticTree(((0,), (1,), (0, 0), (1, 0), (0, 0, 0))))
    key = [("mass_self", name, 0, 3, 0) for name in names]
    # at depth 3 only the arg-max chain is expanded, as it is alone
    assert alone.loc[key, "value"].tolist() == pytest.approx(wide.loc[key, "value"].tolist())
    assert alone.loc[key, "n"].tolist() == wide.loc[key, "n"].tolist()
    # at depth 2 two nodes a start are
    key = [("mass_self", name, 0, 2, 0) for name in names]
    assert wide.loc[key, "n"].tolist() == [2 * n for n in alone.loc[key, "n"].tolist()]
    total = sum(wide.xs(f"mass_{s}", level="quantity")["value"] for s in ("sink", "prompt", "context", "self"))
    assert total.to_numpy() == pytest.approx(1)


def test_what_a_tree_is_not_for_is_refused(varied_target, varied_trajectory, make_drafter):
    drafter, tree = make_drafter("eagle3"), StaticTree(((0,),))
    draft = tree_all_starts(drafter, varied_trajectory, tree)
    with pytest.raises(DriftlabError, match="not drawn by chance"):
        accept(draft, varied_trajectory, rule="rejection", draft_temperature=1.0)
    for wrong in ({}, {"depth": 2, "tree": tree}):
        with pytest.raises(DriftlabError, match="either depth"):
            speculate(varied_target, drafter, [1, 2], max_new_tokens=4, **wrong)
    with pytest.raises(DriftlabError, match="accept_siblings"):
        speculate(varied_target, drafter, [1, 2], tree=SampledTree((2,)), max_new_tokens=4)
    with pytest.raises(DriftlabError, match="driftlab.siblings"):
        tree_all_starts(drafter, varied_trajectory, SampledTree((2,)))
    with pytest.raises(DriftlabError, match="not drawn by chance"):
        speculate(varied_target, drafter, [1, 2], tree=tree, max_new_tokens=4, rule="exact", sampling=Sampling(1.0))


def test_a_sliding_window_that_would_hide_something_is_refused(train_tiny, tmp_path):
    target = Target(tiny_model("Mistral"), TinyTokenizer(), name="m", aux_layers=(1, 3, 5))  # window 8
    trajectory = target.record(["abc"], max_new_tokens=12, template=False, out=tmp_path / "r")
    drafter = Drafter(VARIANTS["eagle3"].for_target(trajectory), trajectory)
    tree = StaticTree(((0,), (1,)))
    with pytest.raises(DriftlabError, match="layers that see 8 positions"):
        speculate(target, drafter, prompt_of(trajectory, 0), tree=tree, max_new_tokens=12)
    short = speculate(target, drafter, prompt_of(trajectory, 0), tree=tree, max_new_tokens=3)
    assert list(short.tokens) == trajectory.tokens(0)[trajectory.entries[0].prompt_length :][:3].tolist()
