"""Replay of sampled drafts: against an engine enumerated by hand, and against the live loop's own dice."""

import dataclasses
import functools
import itertools
import math
from collections import defaultdict
from statistics import NormalDist

import numpy as np
import pytest
import torch
from conftest import BOS, EOS, TinyTokenizer, tiny_llama
from naive import naive_chain

from driftlab import VARIANTS, Drafter, DriftlabError, Target, accept, all_starts, simulate, speculate
from driftlab.draft import DraftLogits
from driftlab.measure import replay_rows
from driftlab.probability import _at_the_edge, text_probability
from driftlab.rules import round_law
from driftlab.sampling import Sampling, draw
from driftlab.siblings import accept_siblings, sibling_law
from driftlab.simulation import difference, renewal
from driftlab.trees import SampledTree

# ---- the identity, and the recursion, by enumeration


@pytest.mark.parametrize("vocab", [3, 4, 5])
def test_an_output_was_an_accepted_draft_with_probability_min_1_q_over_p(vocab):
    """Every draft, every verdict and every redraw of one position, summed up."""
    generator = np.random.default_rng(vocab)
    for _ in range(20):
        p, q = (generator.dirichlet(np.full(vocab, 0.5)) for _ in range(2))
        p[generator.integers(vocab)] = 0
        p /= p.sum()
        residual = np.maximum(p - q, 0)
        output, accepted = np.zeros(vocab), np.zeros(vocab)
        for x in range(vocab):
            accepted[x] += q[x] * min(1, p[x] / q[x])
            output += q[x] * (1 - min(1, p[x] / q[x])) * residual / residual.sum()
        output += accepted
        np.testing.assert_allclose(output, p, atol=1e-12)
        emitted = p > 0
        np.testing.assert_allclose(
            accepted[emitted] / output[emitted], np.minimum(1, q[emitted] / p[emitted]), atol=1e-12
        )


def enumerated(probability, remaining, stopped):
    """Every sequence of verdicts of one text: [(chance, rounds, emitted, passed by depth, reached by depth, starts)]."""
    depth, runs = len(probability[0]), []

    def go(start, chance, rounds, emitted, passed, reached, starts):
        if start >= len(remaining) or remaining[start] == 0:
            runs.append((chance, rounds, emitted, passed, reached, starts))
            return
        left = remaining[start]
        for a in range(min(depth, left) + 1):
            here = chance * math.prod(probability[start][:a])
            if a < min(depth, left):
                here *= 1 - probability[start][a]
            now = [p + (a >= k) for k, p in enumerate(passed, 1)]
            if a < left:
                tried = [r + (a >= k - 1) for k, r in enumerate(reached, 1)]
                go(start + a + 1, here, rounds + 1, emitted + a + 1, now, tried, [*starts, start])
            elif stopped:
                tried = [r + (a >= k) for k, r in enumerate(reached, 1)]
                runs.append((here, rounds + 1, emitted + left, now, tried, [*starts, start]))
            else:
                tried = [r + (a >= k) for k, r in enumerate(reached, 1)]
                runs.append((here, rounds, emitted, now, tried, [*starts, start]))

    go(0, 1.0, 0, 0, [0] * depth, [0] * depth, [])
    return runs


@pytest.mark.parametrize("stopped", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("length", [0, 1, 2, 5])
def test_moments_are_those_of_all_verdicts(stopped, depth, length):
    generator = np.random.default_rng(depth)
    probability = generator.random((length + 1, depth))
    remaining = list(range(length, -1, -1))
    v, means, variances = (x[0] for x in renewal(probability[None], np.array([remaining]), np.array([stopped])))
    runs = enumerated(probability.tolist(), remaining, stopped)
    assert sum(run[0] for run in runs) == pytest.approx(1)
    values = np.array([[rounds, emitted, *passed, *reached] for _, rounds, emitted, passed, reached, _ in runs])
    chances = np.array([run[0] for run in runs])
    np.testing.assert_allclose(means, chances @ values, atol=1e-12)
    np.testing.assert_allclose(variances, chances @ values**2 - (chances @ values) ** 2, atol=1e-10)
    visited = [sum(r[0] for r in runs if i in r[5]) for i in range(length)]
    np.testing.assert_allclose(v, [*visited, 0], atol=1e-12)


def test_prompts_of_different_length_do_not_touch_one_another():
    """Padding has nothing remaining; each prompt's moments are those of it alone."""
    generator = np.random.default_rng(0)
    lengths, depth, stopped = (5, 2, 0, 7), 3, np.array([True, False, True, False])
    remaining = np.array([[max(n - i, 0) for i in range(9)] for n in lengths])
    probability = generator.random((4, 9, depth))
    together = renewal(probability, remaining, stopped)
    for i, n in enumerate(lengths):
        alone = renewal(probability[i : i + 1, : n + 1], remaining[i : i + 1, : n + 1], stopped[i : i + 1])
        np.testing.assert_allclose(together[0][i, : n + 1], alone[0][0])
        for a, b in zip(together[1:], alone[1:], strict=True):
            np.testing.assert_allclose(a[i], b[0])


def draft_options(drafting):
    return {
        "draft_temperature": drafting.temperature,
        "draft_top_k": drafting.top_k,
        "draft_top_p": drafting.top_p,
    }


# ---- a whole engine, enumerated


@pytest.fixture(scope="module")
def three_words(tmp_path_factory):
    """A target of three tokens, the last of them EOS, and a drafter for it; weights float64."""
    model = tiny_llama(layers=6, seed=3, vocab_size=3, hidden_size=16, intermediate_size=16, scale=2.0, bos_token_id=0)
    target = Target(model.double(), None, name="three", aux_layers=(1, 3, 5))
    drafter = Drafter(VARIANTS["norm_output"].for_target(target), target, seed=1).double()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.mul_(8) if parameter.ndim > 1 else parameter.uniform_(0.5, 2)
    return target, drafter.eval()


class Words:
    """Token ids as text."""

    chat_template, bos_token_id, eos_token_id = None, 0, 2

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [int(c) for c in text]}

    def decode(self, ids):
        return "".join(map(str, ids))


def node_law(p_after, q_after, branching):
    """Law of a round over a tree of sampled children: only the nodes on the text that comes out matter."""
    law = defaultdict(float)

    def go(prefix, chance):
        if len(prefix) == len(branching):
            for y, share in enumerate(p_after(prefix).tolist()):
                law[(*prefix, y), len(prefix)] += chance * share
            return
        accepted, output = sibling_law(p_after(prefix), q_after(prefix), branching[len(prefix)])
        for y in range(3):
            law[(*prefix, y), len(prefix)] += chance * float(output[y] - accepted[y])
            if float(accepted[y]):
                go((*prefix, y), chance * float(accepted[y]))

    go((), 1.0)
    return law


@functools.cache  # the same few texts under every rule and temperature
def _target_logits(target, text):
    return target.adapter.model(torch.tensor([text])).logits[:, -1].double()


@functools.cache
def _chain_logits(target, drafter, text, depth):
    tokens = torch.tensor(text)
    with target.adapter.capturing(target.aux_layers) as states, torch.inference_mode():
        target.adapter.hidden(tokens[None])
    aux = torch.stack([states[k][0] for k in target.aux_layers], 1)
    found = {}
    for drafts in itertools.product(range(3), repeat=depth - 1):
        steps = naive_chain(drafter, tokens, aux, len(text) - 2, depth, fed=[*drafts, 0])
        found |= {drafts[:k]: step["logits"][None].double() for k, step in enumerate(steps)}
    return tuple(found.items())


def engine(target, drafter, prompt, sampling, drafting, depth, limit, rule="rejection"):
    """Return {text: [(chance, complete rounds, emitted by them, rounds that passed depth k...)]}, by enumeration."""

    def p_after(text):
        return sampling.process(_target_logits(target, text))[0].tolist()

    def q_chain(text):
        """q at depth 1, 2, ... after a text whose last token has no target state yet, for every chain of drafts."""
        return {
            fed: drafting.process(logits)[0].tolist() for fed, logits in _chain_logits(target, drafter, text, depth)
        }

    results, memo = defaultdict(list), {}

    def outcomes(text):
        """{(emitted tokens, accepted): chance} of one round."""
        if text not in memo:
            table = q_chain(text)
            p = lambda drafts: torch.tensor(p_after((*text, *drafts)), dtype=torch.float64)  # noqa: E731
            q = lambda drafts: torch.tensor(table[drafts], dtype=torch.float64)  # noqa: E731
            found = round_law(rule, p, q, depth) if isinstance(rule, str) else node_law(p, q, rule)
            memo[text] = found
        return memo[text]

    def go(text, chance, rounds, emitted, passed):
        if text[-1] == EOS or len(text) - len(prompt) == limit:
            results[text[len(prompt) :]].append((chance, rounds, emitted, passed))
            return
        for (tokens, accepted), share in outcomes(text).items():
            left = limit - (len(text) - len(prompt))
            stop = tokens.index(EOS) + 1 if EOS in tokens else len(tokens)
            kept = min(stop, left)
            if not share:
                continue
            after = (*text, *tokens[:kept])
            reached = accepted if kept == len(tokens) else kept
            now = tuple(n + (reached >= k) for k, n in enumerate(passed, 1))
            counts = kept == len(tokens) or after[-1] == EOS
            go(after, chance * share, rounds + counts, emitted + kept * counts, now)

    for token, share in enumerate(p_after(tuple(prompt))):
        if share:
            go((*prompt, token), share, 0, 0, (0,) * depth)
    return results


@pytest.mark.parametrize("rule", ["rejection", "block", "exact", "q1"])
@pytest.mark.parametrize(
    ("sampling", "drafting"),
    [
        (Sampling(1.0), Sampling(1.0)),
        (Sampling(0.7), Sampling(1.3)),
        (Sampling(1.0, top_k=2), Sampling(0.8, top_k=2)),
        (Sampling(1.5, top_p=0.8), Sampling(1.5)),
        (Sampling(1.2), Sampling(1.1, top_p=0.7)),
        (Sampling(0.0), Sampling(1.0)),
    ],
)
def test_replay_is_the_conditional_expectation_of_an_enumerated_engine(three_words, sampling, drafting, rule, tmp_path):
    """Vocabulary of 3, K = 2, texts of up to 4 tokens: every draft, verdict and redraw, for every text that can come out."""
    target, drafter = three_words
    prompt, depth, limit = [0, 1, 1, 0], 2, 4
    results = engine(target, drafter, prompt, sampling, drafting, depth, limit, rule)
    assert sum(run[0] for runs in results.values() for run in runs) == pytest.approx(1, abs=1e-9)
    texts = list(results)
    assert len(texts) >= (1 if sampling.temperature == 0 else 8)
    speaking = Target(target.adapter.model, Words(), name="three", aux_layers=(1, 3, 5))
    trajectory = speaking.record(
        ["0110"] * len(texts),
        answers=texts,
        own_answers=True,
        max_new_tokens=limit,
        template=False,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        out=tmp_path / "r",
    )
    draft = all_starts(drafter, trajectory, depth, temperatures=(drafting.temperature,), top=3)
    expected = simulate(accept(draft, trajectory, rule=rule, **draft_options(drafting)))
    for i, text in enumerate(texts):
        chances = np.array([run[0] for run in results[text]])
        values = np.array([[run[1], run[2], *run[3]] for run in results[text]], dtype=float)
        mean = chances @ values / chances.sum()
        variance = chances @ (values - mean) ** 2 / chances.sum()
        np.testing.assert_allclose(expected.means[i, : 2 + depth], mean, atol=2e-5)
        np.testing.assert_allclose(expected.variances[i, : 2 + depth], variance, atol=2e-5)


@pytest.mark.parametrize("drafting", [Sampling(1.0), Sampling(1.4)])
def test_sampled_trees_are_the_conditional_expectation_of_an_enumerated_engine(three_words, drafting, tmp_path):
    """Two children a node, K = 2, EOS and the limit: every text that can come out, within the noise of the draws."""
    target, drafter = three_words
    prompt, branching, limit, sampling = [0, 1, 1, 0], (2, 2), 4, Sampling(1.0)
    results = engine(target, drafter, prompt, sampling, drafting, 2, limit, branching)
    assert sum(run[0] for runs in results.values() for run in runs) == pytest.approx(1, abs=1e-9)
    texts = list(results)
    speaking = Target(target.adapter.model, Words(), name="three", aux_layers=(1, 3, 5))
    options = {"own_answers": True, "max_new_tokens": limit, "template": False, "temperature": 1.0}
    trajectory = speaking.record(["0110"] * len(texts), answers=texts, out=tmp_path / "r", **options)
    tree, how = SampledTree(branching), draft_options(drafting)
    expected = simulate(accept_siblings(drafter, trajectory, tree, draws=600, **how))
    for i, text in enumerate(texts):
        chances = np.array([run[0] for run in results[text]])
        values = np.array([[run[1], run[2], *run[3]] for run in results[text]], dtype=float)
        np.testing.assert_allclose(expected.means[i, :4], chances @ values / chances.sum(), atol=0.03)
    assert np.isnan(expected.variances).all()
    # a sequence's numbers do not depend on the others
    alone = accept_siblings(drafter, trajectory.subset([3]), tree, draws=600, **how)
    starts = alone.sampled.shape[1]
    torch.testing.assert_close(alone.sampled[0], expected.acceptance.sampled[3, :starts])


# ---- the live loop's dice


def sampled_target(seed=0):
    model = tiny_llama(layers=6, seed=seed, vocab_size=12, hidden_size=16, intermediate_size=16, scale=2.0)
    return Target(model, TinyTokenizer(), name="dice", aux_layers=(1, 3, 5))


class Twelve(TinyTokenizer):
    def __call__(self, text, add_special_tokens=True):
        ids = [3 + ord(character) % 9 for character in text]
        return {"input_ids": [BOS, *ids] if add_special_tokens else ids}


def live_against_replay(target, drafter, prompt, sampling, drafting, depth, limit, runs, out, rule="rejection"):
    """Run live, record its own texts, replay them; return (rounds, z of rounds, emitted and passed depths)."""
    rule = "argmax" if drafting is None else rule
    options = {} if drafting is None else draft_options(drafting)
    ids = target.tokenizer(prompt)["input_ids"]
    lives = [
        speculate(
            target,
            drafter,
            ids,
            depth=depth,
            max_new_tokens=limit,
            sampling=dataclasses.replace(sampling, seed=seed),
            rule=rule,
            **options,
        )
        for seed in range(runs)
    ]
    trajectory = target.record(
        [prompt] * runs,
        answers=[live.tokens for live in lives],
        own_answers=True,
        max_new_tokens=limit,
        template=False,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        out=out,
    )
    temperatures = () if drafting is None else (drafting.temperature,)
    draft = all_starts(drafter, trajectory, depth, temperatures=temperatures, top=12)
    simulation = simulate(accept(draft, trajectory, rule=rule, **options))
    if drafting is None:
        assert [live.rounds for live in lives] == list(simulation.rounds)
        return sum(len(live.rounds) for live in lives), np.zeros(1)
    observed = []
    for live in lives:
        whole = [r for r in live.rounds if r.end != "cut"]
        passed = [sum(r.accepted >= k for r in live.rounds) for k in range(1, depth + 1)]
        observed.append([len(whole), sum(r.emitted for r in whole), *passed])
    gap = np.array(observed).sum(0) - simulation.means[:, : 2 + depth].sum(0)
    spread = np.sqrt(simulation.variances[:, : 2 + depth].sum(0))
    certain = spread < 1e-9  # a depth that no text can reach: then live did not either
    assert np.abs(gap[certain]).max(initial=0) < 1e-9
    return int(np.array(observed)[:, 0].sum()), gap[~certain] / spread[~certain]


@pytest.fixture(scope="module")
def dice(tmp_path_factory):
    target = sampled_target()
    target.tokenizer = Twelve()
    drafter = Drafter(VARIANTS["eagle31"].for_target(target, draft_vocab_size=10), target, draft_vocab=range(1, 11))
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.mul_(6) if parameter.ndim > 1 else parameter.uniform_(0.5, 2)
    return target, drafter.eval()


SETTINGS = [
    (Sampling(1.0), Sampling(1.0)),
    (Sampling(0.6, top_k=4), Sampling(1.0, top_k=3)),
    (Sampling(1.2, top_p=0.9), Sampling(0.7, top_p=0.9)),
]


@pytest.mark.parametrize("rule", ["rejection", "block", "exact", "q1"])
@pytest.mark.parametrize(("sampling", "drafting"), SETTINGS)
def test_live_rounds_are_what_replay_expects_of_their_text(dice, sampling, drafting, rule, tmp_path):
    rounds, z = live_against_replay(*dice, "hello", sampling, drafting, 3, 12, 16, tmp_path / "r", rule)
    bound = NormalDist().inv_cdf(1 - 0.0027 / 2 / (4 * len(SETTINGS) * len(z)))
    assert rounds > 40
    assert np.abs(z).max() < bound, z


def test_argmax_drafts_of_a_sampling_target_are_replayed_round_for_round(dice, tmp_path):
    rounds, _ = live_against_replay(*dice, "hello", Sampling(0.8), None, 3, 12, 25, tmp_path / "r")
    assert rounds > 80


def test_exact_match_gives_the_text_that_the_target_samples_alone(dice, tmp_path):
    """Drafts have dice of their own, so not even the seed's text depends on drafter and depth."""
    target, drafter = dice
    prompts = ["hello", "abc", "hello world", "zebra", "question", "ab"]
    trajectory = target.record(prompts, max_new_tokens=20, template=False, temperature=1.5, seed=3, out=tmp_path / "r")
    options = {"max_new_tokens": 20, "sampling": Sampling(1.5, seed=3), "rule": "exact"}
    accepted = 0
    for i, entry in enumerate(trajectory.entries):
        tokens = trajectory.tokens(i).tolist()
        for depth in (1, 3):
            live = speculate(target, drafter, tokens[: entry.prompt_length], depth=depth, **options)
            assert list(live.tokens) == tokens[entry.prompt_length :]
            accepted += sum(r.accepted for r in live.rounds)
    assert accepted > 0


def test_typical_acceptance_is_live_only_and_said_to_be_lossy(dice, sampled, make_drafter):
    target, drafter = dice
    ids = target.tokenizer("hello")["input_ids"]
    run = {"depth": 3, "max_new_tokens": 12, "sampling": Sampling(1.0), "rule": "typical"}
    live = speculate(target, drafter, ids, **run)
    assert not live.lossless
    assert speculate(target, drafter, ids, **{**run, "rule": "argmax"}).lossless
    # everything is typical, nothing is
    assert all(r.accepted == 3 for r in speculate(target, drafter, ids, **run, delta=1e-9).rounds if r.end == "bonus")
    strict = speculate(target, drafter, ids, **run, epsilon=1 - 1e-9, delta=1e9)
    assert all(r.accepted == 0 for r in strict.rounds)
    for wrong in ({"sampling": Sampling()}, {"epsilon": 0.0}, {"delta": 0.0}):
        with pytest.raises(DriftlabError, match="typical acceptance at temperature"):
            speculate(target, drafter, ids, **{**run, **wrong})
    draft = all_starts(make_drafter("eagle31"), sampled, 2)
    with pytest.raises(DriftlabError, match="changes the text"):
        accept(draft, sampled, rule="typical")


def test_the_live_text_has_the_targets_distribution(dice):
    """First two tokens of 240 texts against p, whatever the drafter says."""
    target, drafter = dice
    ids = target.tokenizer("hello")["input_ids"]
    texts = [
        speculate(
            target,
            drafter,
            ids,
            depth=2,
            max_new_tokens=2,
            sampling=Sampling(1.0, seed=seed),
            rule="rejection",
        ).tokens
        for seed in range(240)
    ]
    with torch.inference_mode():
        p = target.adapter.model(torch.tensor([ids])).logits[0, -1].double().softmax(-1)
        both = defaultdict(float)
        for x in range(12):
            if x == EOS:
                both[(x,)] = float(p[x])
                continue
            after = target.adapter.model(torch.tensor([[*ids, x]])).logits[0, -1].double().softmax(-1)
            for y in range(12):
                both[x, y] = float(p[x] * after[y])
    likely = [pair for pair, chance in both.items() if chance * 240 >= 8]
    bound = NormalDist().inv_cdf(1 - 0.0027 / 2 / len(likely))
    for pair in likely:
        seen, chance = sum(t == pair for t in texts), both[pair]
        assert abs(seen - 240 * chance) < bound * math.sqrt(240 * chance * (1 - chance))


# ---- the pieces


def test_draws_pass_the_cumulative_distribution():
    p = torch.tensor([[0.25, 0.0, 0.5, 0.25]] * 4)
    assert draw(p, torch.tensor([0.0, 0.24, 0.25, 0.999])).tolist() == [0, 0, 2, 3]


def test_greedy_processing_is_one_hot():
    assert Sampling().process(torch.tensor([[1.0, 3.0, 2.0]])).tolist() == [[0, 1, 0]]


def test_kept_logits_give_q_of_the_whole_softmax(varied_trajectory, make_drafter):
    """Any kept temperature, any top_k up to the ranks kept, and depths cut afterwards."""
    vocab = [i for i in range(61) if i % 3]
    drafter = make_drafter("eagle31", draft_vocab=vocab)
    draft = all_starts(drafter, varied_trajectory, 3, temperatures=(0.7, 1.0), top=30)
    batch = varied_trajectory.batch(range(4))
    from driftlab.draft import text_at, unroll

    for state, _ in unroll(drafter, batch, 3, feed="text"):
        k, rows = state.depth - 1, state.starts.rows
        logits = drafter.logits(state.normed).double()
        wanted = text_at(batch, rows + state.depth + 1)
        for drafting in (
            *(Sampling(0.7), Sampling(1.0), Sampling(0.3, 5), Sampling(2.0, 8), Sampling(0.7, top_p=0.5)),
            Sampling(0.4, top_k=7, top_p=0.8),
        ):
            q = drafting.process(logits.flatten(0, 1)).view(logits.shape)
            wide = torch.zeros(*q.shape[:2], 61, dtype=q.dtype)
            wide[..., vocab] = q
            expected = wide.gather(2, wanted[..., None])[..., 0]
            valid = state.starts.valid
            torch.testing.assert_close(draft.logits.q(drafting)[..., k][valid], expected[valid], rtol=1e-5, atol=1e-9)
    cut = draft.upto(2).logits.q(Sampling(0.7))
    assert torch.equal(cut, draft.logits.q(Sampling(0.7))[..., :2])


def test_equals_at_the_edge_of_a_nucleus_are_all_inside():
    """One rule on both sides: which of equals a sort puts first is chance. Probabilities sum to 1."""
    logits = torch.tensor([2.0, 1, 1, 1, 1, 0])
    for drafting in (Sampling(1.0, top_p=0.5), Sampling(1.0, top_k=5, top_p=0.5), Sampling(1.0, top_p=0.99)):
        processed = drafting.process(logits[None].double())[0]
        kept = DraftLogits(
            text=logits[None, None],
            top=logits[None, None, None].expand(1, 1, 6, 6),
            lse=logits.logsumexp(0).expand(1, 1, 6, 1),
            temperatures=(1.0,),
            vocab=6,
        )
        q = kept.q(drafting)[0, 0]
        torch.testing.assert_close(q, processed, rtol=1e-6, atol=1e-9)
        assert float(q.sum()) == pytest.approx(1)
    assert Sampling(1.0, top_p=0.5).process(logits[None].double())[0, 1:5].min() > 0
    few = DraftLogits(logits[None, None], logits[None, None, None, :3].expand(1, 1, 6, 3), kept.lse, (1.0,), 6)
    with pytest.raises(DriftlabError, match="the last of the 3 logits kept"):
        few.q(Sampling(1.0, top_p=0.5))


def test_the_cuts_of_a_greedy_target_are_not_those_of_drafts(varied_target, make_drafter, tmp_path):
    data = varied_target.record(
        ["abc"], max_new_tokens=6, template=False, temperature=0.0, top_k=2, top_p=0.5, out=tmp_path / "r"
    )
    draft = all_starts(make_drafter("eagle3"), data, 2, temperatures=(1.0,))
    assert accept(draft, data, rule="rejection", draft_temperature=1.0).drafting == Sampling(1.0)


def test_drafts_joined_from_batches_are_those_of_one(varied_target, make_drafter, tmp_path):
    drafter = make_drafter("eagle3")
    texts = ["hello", "hello to all of you", "hi"]
    data = varied_target.record(["abc", "q", "xyz"], answers=texts, template=False, out=tmp_path / "r")
    whole = all_starts(drafter, data, 2, temperatures=(1.0,), max_tokens=10**6)
    parts = all_starts(drafter, data, 2, temperatures=(1.0,), max_tokens=1)
    for name in ("text", "top", "lse"):
        a, b = getattr(whole.logits, name), getattr(parts.logits, name)
        torch.testing.assert_close(a[whole.valid], b[whole.valid], rtol=1e-5, atol=1e-5)
    assert not whole.valid.all()
    for drafting in (Sampling(1.0, 5), Sampling(1.0, top_p=0.3), Sampling(1.0)):  # padding ties with nothing
        a, b = whole.logits.q(drafting), parts.logits.q(drafting)
        torch.testing.assert_close(a[whole.valid], b[whole.valid], rtol=1e-4, atol=1e-7)


@pytest.fixture(scope="module")
def sampled(varied_target, tmp_path_factory):
    """A recording at temperature 0.8, top_k 20."""
    return varied_target.record(
        ["hello world", "abc", "q", "another longer prompt here"],
        max_new_tokens=16,
        template=False,
        temperature=0.8,
        top_k=20,
        seed=5,
        out=tmp_path_factory.mktemp("sampled") / "r",
    )


def test_the_text_probability_is_that_of_a_fresh_pass(varied_target, sampled):
    for i, entry in enumerate(sampled.entries):
        tokens = sampled.tokens(i)
        with torch.inference_mode():
            logits = varied_target.adapter.model(tokens[None]).logits[0, entry.prompt_length - 1 : -1].double()
        p = Sampling(0.8, 20).process(logits).gather(1, tokens[entry.prompt_length :, None])[:, 0]
        torch.testing.assert_close(text_probability(sampled, i), p, rtol=1e-4, atol=1e-7)


def test_a_perfect_drafter_is_always_accepted(sampled, make_drafter):
    """Where q is p, min(1, q / p) is 1: K + 1 tokens a round."""
    draft = all_starts(make_drafter("eagle3"), sampled, 2, temperatures=(0.8,))
    perfect = torch.zeros_like(draft.logits.text)
    for i in range(len(sampled)):
        p = text_probability(sampled, i)
        for j, k in itertools.product(range(len(p)), range(2)):
            if j + k + 1 < len(p):
                perfect[i, j, k] = p[j + k + 1].log() * 0.8
    logits = dataclasses.replace(draft.logits, text=perfect, lse=torch.zeros_like(draft.logits.lse))
    result = accept(dataclasses.replace(draft, logits=logits), sampled, rule="rejection", draft_top_k=0)
    assert result.probability[result.valid].min() > 1 - 1e-6


def test_other_target_settings_are_refused_by_name(sampled, make_drafter):
    draft = all_starts(make_drafter("eagle3"), sampled, 2, temperatures=(0.8,))
    inherited = accept(draft, sampled, rule="rejection", temperature=0.8, top_k=20, top_p=1.0)
    assert inherited.drafting == Sampling(0.8, 20, 1.0)
    for name, value in (("temperature", 0.7), ("top_k", 0), ("top_p", 0.9)):
        with pytest.raises(DriftlabError, match=f"target {name} {value}: this text was recorded with {name}"):
            accept(draft, sampled, rule="rejection", **{name: value})
        with pytest.raises(DriftlabError, match=f"target {name}"):
            accept(draft, sampled, **{name: value})


def test_what_the_rule_lacks_is_said(sampled, varied_target, varied_trajectory, make_drafter, tmp_path):
    drafter = make_drafter("eagle3")
    draft = all_starts(drafter, sampled, 2, temperatures=(0.8,), top=4)
    for message, call in (
        ("needs draft logits", lambda: accept(all_starts(drafter, sampled, 2), sampled, rule="rejection")),
        ("above 0", lambda: all_starts(drafter, sampled, 2, temperatures=(float("nan"),))),
        ("draft top_k 13: only the 12 largest", lambda: accept(draft, sampled, rule="rejection", draft_top_k=13)),
        ("draft top_k 20: only the 12 largest", lambda: accept(draft, sampled, rule="rejection")),
        (
            "top_p 0.999999: it reaches beyond the 12",
            lambda: accept(draft, sampled, rule="rejection", draft_top_k=0, draft_top_p=0.999999),
        ),
        ("draft_temperature 0 is the arg max", lambda: accept(draft, sampled, rule="rejection", draft_temperature=0.0)),
        (
            "a batch does not know",
            lambda: accept(all_starts(drafter, sampled.batch([0]), 2), sampled.batch([0]), top_k=3),
        ),
        ("kept for", lambda: accept(draft, sampled, rule="rejection", draft_temperature=1.0, draft_top_k=0)),
        ("belong to sampled drafts", lambda: accept(draft, sampled, draft_temperature=1.0)),
        ("choose from argmax, rejection", lambda: accept(draft, sampled, rule="greedy")),
        ("along the text", lambda: all_starts(drafter, sampled, 2, feed="own", temperatures=(1.0,))),
        ("above 0", lambda: all_starts(drafter, sampled, 2, temperatures=(0.0,))),
    ):
        with pytest.raises(DriftlabError, match=message):
            call()
    greedy = all_starts(drafter, varied_trajectory, 2, temperatures=(1.0,))
    with pytest.raises(DriftlabError, match="the text is greedy: say at which draft_temperature"):
        accept(greedy, varied_trajectory, rule="rejection")
    with pytest.raises(DriftlabError, match="pass the trajectory"):
        accept(
            all_starts(drafter, sampled.batch([0]), 2, temperatures=(0.8,)),
            sampled.batch([0]),
            rule="rejection",
            draft_temperature=0.8,
        )
    given = varied_target.record(
        ["abc"], answers=["hello"], temperature=0.8, template=False, max_new_tokens=8, out=tmp_path / "g"
    )
    with pytest.raises(DriftlabError, match="given, not sampled"):
        accept(all_starts(drafter, given, 2, temperatures=(0.8,)), given, rule="rejection")
    for answers in (None, ["hello"]):
        with pytest.raises(DriftlabError, match="lists of ids"):
            varied_target.record(["abc"], answers=answers, own_answers=True, template=False, out=tmp_path / "h")
    with pytest.raises(DriftlabError, match="draft_temperature above 0"):
        speculate(varied_target, drafter, [1, 2], depth=2, max_new_tokens=4, rule="rejection")
    with pytest.raises(DriftlabError, match="belong to sampled drafts"):
        speculate(varied_target, drafter, [1, 2], depth=2, max_new_tokens=4, draft_temperature=1.0)


def test_expected_rounds_agree_with_the_walk_when_nothing_is_left_to_chance(varied_trajectory, trained):
    """0/1 probabilities: all numbers are those of the walk."""
    acceptance = accept(all_starts(trained["eagle31"], varied_trajectory, 3), varied_trajectory)
    walked = simulate(acceptance)
    expected = simulate(dataclasses.replace(acceptance, rule="rejection", sampled=acceptance.match.double()))
    np.testing.assert_allclose(expected.emitted, walked.emitted)
    np.testing.assert_allclose(expected.verify_rounds, walked.verify_rounds)
    assert expected.variances.max() < 1e-9
    assert expected.tau_uncensored == pytest.approx(walked.tau_uncensored)
    assert expected.all_starts_mean == pytest.approx(walked.all_starts_mean)
    key = lambda r: (r["prompt"], r.get("depth", 0), r["quantity"])  # noqa: E731
    ours = {key(r): (r["value"], r["n"]) for r in expected.records() if r["quantity"] != "accept_all_starts"}
    theirs = {key(r): (r["value"], r["n"]) for r in walked.records()}
    assert ours.keys() == theirs.keys()
    for name, pair in theirs.items():
        assert ours[name] == pytest.approx(pair, nan_ok=True), name
    starts = [[int(r.row) - int(acceptance.rows[i, 0]) for r in rounds] for i, rounds in enumerate(walked.rounds)]
    assert [np.nonzero(v > 0.5)[0].tolist() for v in expected.starts] == starts


def test_rows_carry_the_rule_and_the_draft_settings(sampled, make_drafter):
    rows, expected = replay_rows(make_drafter("eagle31"), sampled, "d", depth=3, match_depth=5, rule="rejection")
    drawn = rows[rows["quantity"] != "match"]
    assert set(drawn["rule"]) == {"rejection"}
    assert set(drawn["draft_temperature"]) == {0.8}
    assert set(drawn["draft_top_k"]) == {20}
    assert set(rows["top_k"]) == {20}
    assert set(rows.loc[rows["quantity"] == "match", "rule"]) == {"argmax"}
    by = rows.set_index("quantity")["value"]
    assert by["tau"] == expected.tau
    assert 1 <= expected.tau <= 4
    assert set(rows.loc[rows["quantity"] == "match", "depth"]) == set(range(1, 6))
    assert set(rows.loc[rows["quantity"] == "accept_all_starts", "depth"]) == set(range(1, 4))


def test_differences_are_paired(sampled, trained):
    simulations = [
        simulate(
            accept(
                all_starts(trained[name], sampled, 3, temperatures=(1.0,)),
                sampled,
                rule="rejection",
                draft_temperature=1.0,
            )
        )
        for name in ("eagle3", "eagle31")
    ]
    gap = difference(*simulations)
    assert gap.value == pytest.approx(simulations[0].tau - simulations[1].tau)
    assert gap.low <= gap.value <= gap.high
    assert difference(simulations[0], simulations[0])[:3] == (0, 0, 0)
    other = simulate(accept(all_starts(trained["eagle3"], sampled.subset([1, 0]), 3), sampled.subset([1, 0])))
    with pytest.raises(DriftlabError, match="same prompts"):
        difference(simulations[0], other)


def test_texts_of_the_same_names_are_not_paired(sampled, varied_trajectory, trained):
    """The same four prompts, sampled here and greedy there: all ids agree, no text does."""
    simulations = [
        simulate(accept(all_starts(trained["eagle3"], data, 2), data)) for data in (sampled, varied_trajectory)
    ]
    assert simulations[0].acceptance.ids == simulations[1].acceptance.ids
    with pytest.raises(DriftlabError, match="texts"):
        difference(*simulations)


@pytest.mark.parametrize("wrong", [{}, {"temperature": 0.8, "top_k": 2}, {"temperature": 0.8, "top_p": 0.2}])
def test_settings_that_cannot_have_made_the_text_are_refused(varied_target, make_drafter, wrong, tmp_path):
    """Scored as certain, such tokens would give a tau made of plain q."""
    free = varied_target.record(
        ["hello world"], max_new_tokens=16, template=False, temperature=0.8, seed=3, out=tmp_path / "free"
    )
    said = {"max_new_tokens": 16, "template": False, "own_answers": True}
    ids = free.tokens(0)[free.entries[0].prompt_length :].tolist()
    claimed = varied_target.record(["hello world"], answers=[ids], out=tmp_path / "claimed", **said, **wrong)
    draft = all_starts(make_drafter("eagle3"), claimed, 2, temperatures=(1.0,))
    with pytest.raises(DriftlabError, match="are not those that made its text"):
        accept(draft, claimed, rule="rejection", draft_temperature=1.0, draft_top_k=0, draft_top_p=1.0)
    right = varied_target.record(["hello world"], answers=[ids], temperature=0.8, out=tmp_path / "right", **said)
    assert text_probability(right, 0).tolist() == pytest.approx(text_probability(free, 0).tolist())


def test_a_token_just_outside_a_cut_counts_as_inside():
    logits = torch.tensor([3.0, 2.0, 2.0 - 1e-6, 1.0], dtype=torch.float64)
    inside = _at_the_edge(Sampling(1.0, top_k=2), logits, 2)
    assert inside == pytest.approx(float(logits[:3].softmax(-1)[2]), rel=1e-6)
    assert _at_the_edge(Sampling(1.0, top_k=2), logits, 3) == 0
    assert _at_the_edge(Sampling(0.0), logits, 1) == 0
    assert _at_the_edge(Sampling(0.0), torch.tensor([3.0, 3.0 - 1e-6]).double(), 1) == 1
    edge = float(logits.softmax(-1)[:1].sum())
    assert _at_the_edge(Sampling(1.0, top_p=edge), logits, 1) == pytest.approx(
        float(logits[:2].softmax(-1)[1]), rel=1e-6
    )
    assert _at_the_edge(Sampling(1.0, top_p=edge), logits, 3) == 0


def test_ties_are_kept_on_both_sides(make_drafter, sampled):
    """Half-precision drafters draw from every token tied with the k-th; replay must divide by all of them."""
    logits = torch.tensor([[3.0, 2.0, 2.0, 1.0, 0.0]])
    kept = DraftLogits(
        text=torch.tensor([[[2.0]]]),
        top=logits[:, None, None, :4],
        lse=torch.zeros(1, 1, 1, 0),
        temperatures=(),
        vocab=5,
    )
    expected = Sampling(1.0, 2).process(logits)[0, 1]
    assert float(kept.q(Sampling(1.0, 2))) == pytest.approx(float(expected), rel=1e-6)
    with pytest.raises(DriftlabError, match="equal to the last one"):
        dataclasses.replace(kept, top=torch.tensor([[[[3.0, 2.0, 2.0]]]])).q(Sampling(1.0, 2))
    assert float(dataclasses.replace(kept, top=logits[:, None, None]).q(Sampling(1.0, 50))) == pytest.approx(
        float(logits.softmax(-1)[0, 1]), rel=1e-6
    )


def test_half_precision_targets_are_replayed_with_the_p_that_chose_their_text(tmp_path):
    """Logits rounded to bfloat16 lie on a grid of 1/8 at 20: p would be off by several per cent."""
    target = Target(tiny_llama(layers=6, scale=6.0).bfloat16(), TinyTokenizer(), aux_layers=(1, 3, 5))
    trajectory = target.record(
        ["hello world"], max_new_tokens=24, template=False, temperature=1.0, seed=1, out=tmp_path / "r"
    )
    entry, tokens = trajectory.entries[0], trajectory.tokens(0)
    chosen = []
    with torch.inference_mode():
        for n in range(entry.prompt_length, entry.length):
            logits = target.adapter.logits(target.adapter.hidden(tokens[None, :n])[:, -1])
            chosen.append(float(Sampling(1.0).process(logits.double())[0, tokens[n]]))
    assert logits.dtype == torch.float32
    rounded = logits.bfloat16().float()
    assert not torch.equal(logits, rounded)
    # the states of a pass over the whole text differ from those of its prefixes in bfloat16: the bulk must agree
    ratio = text_probability(trajectory, 0) / torch.tensor(chosen, dtype=torch.float64)
    assert float((ratio.log().abs()).median()) < 0.05
