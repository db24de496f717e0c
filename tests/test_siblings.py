"""Children sampled without replacement: exact laws on tiny vocabularies, and the replay's average over draws."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from driftlab import DriftlabError, accept, all_starts, simulate
from driftlab.sampling import Sampling
from driftlab.siblings import accept_siblings, sibling_law, sibling_probability
from driftlab.trees import SampledTree


def pairs(vocab, seed, sparse=False):
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(2):
        weights = generator.dirichlet(np.full(vocab, 0.7))
        if sparse:
            weights[generator.integers(vocab)] = 0
        found.append(torch.tensor(weights / weights.sum()))
    return found


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(("vocab", "children"), [(3, 1), (3, 2), (4, 3), (6, 2), (3, 5)])
def test_recursive_rejection_is_lossless(vocab, children, sparse):
    for seed in range(5):
        p, q = pairs(vocab, seed, sparse)
        accepted, output = sibling_law(p, q, children)
        torch.testing.assert_close(output, p, rtol=0, atol=1e-12)
        assert torch.all(accepted <= p + 1e-12)


def test_more_children_accept_more():
    p, q = pairs(5, 1)
    shares = [float(sibling_law(p, q, children)[0].sum()) for children in (1, 2, 3)]
    assert shares[0] == pytest.approx(float(torch.minimum(p, q).sum()))
    assert shares[0] < shares[1] < shares[2]


def test_the_unconditional_q_for_later_siblings_is_not_lossless():
    """SafeAILab/EAGLE#74."""
    p, q = pairs(6, 2)
    _, output = sibling_law(p, q, 2, conditional=False)
    assert float((output - p).abs().max()) > 0.01


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(("vocab", "children"), [(3, 2), (4, 3), (3, 5)])
def test_the_average_over_draws_is_the_law(vocab, children, sparse):
    """Every text token, within four standard errors of 400 independent averages."""
    p, q = pairs(vocab, 3, sparse)
    accepted, _ = sibling_law(p, q, children)
    generator = torch.Generator().manual_seed(0)
    for y in (p > 0).nonzero()[:, 0].tolist():
        rows = 400
        found = sibling_probability(
            p.expand(rows, -1), q.expand(rows, -1), torch.full((rows,), y), children, 3, generator
        )
        error = float(found.std()) / rows**0.5
        assert abs(float(found.mean()) - float(accepted[y] / p[y])) <= 4 * error + 1e-12


@pytest.fixture(scope="module")
def sampled(varied_target, tmp_path_factory):
    return varied_target.record(
        ["hello world", "abc", "q"],
        max_new_tokens=14,
        template=False,
        temperature=0.9,
        seed=5,
        out=tmp_path_factory.mktemp("siblings") / "r",
    )


def test_one_child_each_is_rejection_sampling_of_a_chain(sampled, make_drafter):
    drafter = make_drafter("eagle31", draft_vocab=range(3, 50))
    chain = accept(all_starts(drafter, sampled, 3, temperatures=(0.9,)), sampled, rule="rejection")
    tree = accept_siblings(drafter, sampled, SampledTree((1, 1, 1)))
    torch.testing.assert_close(tree.sampled, chain.sampled, rtol=1e-4, atol=1e-6)
    assert simulate(tree).tau == pytest.approx(simulate(chain).tau, rel=1e-4)


def test_every_start_and_depth_has_the_law_of_its_node(sampled, make_drafter):
    """Two and three children, against the exact law of the real p and q of a row; and tau grows."""
    said = sorted({*sampled.tokens(0)[sampled.entries[0].prompt_length :].tolist()})
    drafter = make_drafter("eagle31", draft_vocab=said, scale=3.0)
    tree = SampledTree((3, 2))
    result = accept_siblings(drafter, sampled, tree, draft_temperature=1.3, draws=400)
    drafting = Sampling(1.3)
    batch = sampled.batch([0])
    from driftlab.draft import unroll

    for state, _ in unroll(drafter, batch, 2, feed="text"):
        for start in (0, 4):
            row = int(state.starts.rows[0, start])
            with torch.no_grad():
                q = torch.zeros(1, 61, dtype=torch.float64)
                q[:, drafter.draft_vocab] = drafting.process(drafter.logits(state.normed[:, start]).double())
                p = Sampling(0.9).process(sampled.head.logits(sampled[0].last_hidden[row + state.depth][None]).double())
            y = int(sampled.tokens(0)[row + state.depth + 1])
            accepted, output = sibling_law(p[0], q[0], tree.branching[state.depth - 1])
            torch.testing.assert_close(output, p[0], rtol=0, atol=1e-9)
            exact = float(accepted[y] / p[0, y])
            assert exact > 0
            assert float(result.sampled[0, start, state.depth - 1]) == pytest.approx(exact, abs=0.03)
    one = accept_siblings(drafter, sampled, SampledTree((1, 1)), draft_temperature=1.3)
    assert simulate(result).tau > simulate(one).tau
    quantities = {record["quantity"] for record in simulate(result).records()}
    assert "accepted_exactly" in quantities
    assert "accept_conditional" not in quantities


def test_a_two_deep_tree_by_brute_force():
    """Two nodes of two children: the set of children of each, every order, every verdict, against the law of the node."""
    laws, texts = [], (1, 0)
    for seed in range(2):
        p, q = pairs(3, seed)
        laws.append((p, q, sibling_law(p, q, 2)[0]))
    brute = 1.0
    for (p, q, _), y in zip(laws, texts, strict=True):
        reached = 0.0
        for first, second in itertools.permutations(range(3), 2):
            chance = float(q[first] * q[second] / (1 - q[first]))
            keep = min(1, float(p[first] / q[first]))
            rest = (p - q).clamp(min=0)
            rest = rest / rest.sum()
            q2 = float(q[second] / (1 - q[first]))
            again = min(1, float(rest[second]) / q2)
            reached += chance * ((first == y) * keep + (second == y) * (1 - keep) * again)
        brute *= reached / float(p[y])
    product = float(laws[0][2][1] / laws[0][0][1] * laws[1][2][0] / laws[1][0][0])
    assert product == pytest.approx(brute)


def test_a_token_at_the_edge_of_a_cut_counts_as_inside(sampled, make_drafter, monkeypatch):
    """Rounding can put the text's token just outside the target's cut: no NaN, no prompt that leaves tau unseen."""
    from driftlab import siblings

    right = siblings.text_probabilities

    def edged(trajectory):
        found = [p.clone() for p in right(trajectory)]
        found[0][4] = 1e-7
        return found

    monkeypatch.setattr(siblings, "text_probabilities", edged)
    monkeypatch.setattr(
        siblings, "Sampling", lambda *args: type("Cut", (), {"process": lambda self, x: torch.zeros_like(x)})()
    )
    result = accept_siblings(make_drafter("eagle31"), sampled, SampledTree((2, 2)), draft_temperature=1.0)
    assert bool(result.sampled.isfinite().all())


def test_what_is_not_finite_is_refused(sampled, make_drafter):
    table = accept_siblings(make_drafter("eagle31"), sampled, SampledTree((1,)))
    broken = table.sampled.clone()
    broken[0, 0] = torch.nan
    with pytest.raises(DriftlabError, match="not finite"):
        simulate(dataclasses.replace(table, sampled=broken))


def test_what_cannot_be_replayed_is_refused(sampled, varied_trajectory, make_drafter):
    with pytest.raises(DriftlabError, match="the text is greedy"):
        accept_siblings(make_drafter("eagle3"), varied_trajectory, SampledTree((2,)))
    with pytest.raises(DriftlabError, match="at least one"):
        accept_siblings(make_drafter("eagle3"), sampled, SampledTree((2,)), draws=0)
    with pytest.raises(DriftlabError, match="at least one child"):
        SampledTree((2, 0))
