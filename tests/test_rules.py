"""The verifier's rules: exact laws on tiny vocabularies, and the dice against them. Wrong mixes do not pass."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from driftlab import DriftlabError
from driftlab.rules import (
    SAMPLED_RULES,
    TOKEN_RULES,
    WRONG_MIXES,
    block_chances,
    given_text,
    output_law,
    round_law,
    verify,
)

P, Q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)


def tables(vocab, depth, seed, sparse=False):
    """Random p and q after every prefix of up to ``depth`` tokens; ``sparse``: with zeros in both."""
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(2):
        table = {}
        for length in range(depth + 1):
            for prefix in itertools.product(range(vocab), repeat=length):
                weights = generator.dirichlet(np.full(vocab, 0.7))
                if sparse:
                    weights[generator.integers(vocab)] = 0
                table[prefix] = torch.tensor(weights / weights.sum())
        found.append(table)
    return found


def texts_of(law, p, vocab, length):
    """Distribution of the first ``length`` tokens, when the target goes on alone after the round."""
    total = dict.fromkeys(itertools.product(range(vocab), repeat=length), 0.0)
    for text in total:
        for (tokens, _), chance in law.items():
            n = len(tokens)
            if tokens == text[:n]:
                total[text] += chance * math.prod(float(p[text[:k]][text[k]]) for k in range(n, length))
    return total


def distance(law, p, vocab, length):
    """Largest difference from the target's distribution over texts."""
    truth = {
        text: math.prod(float(p[text[:k]][text[k]]) for k in range(length))
        for text in itertools.product(range(vocab), repeat=length)
    }
    return max(abs(truth[text] - chance) for text, chance in texts_of(law, p, vocab, length).items())


def test_published_values_of_one_position():
    """SafeAILab/EAGLE#329, p = [.5, .3, .2], q = [.2, .5, .3]."""
    right = {"rejection": 0.70, "q1": 0.31, "exact": 0.31}
    for name, accepted in right.items():
        rule = TOKEN_RULES[name]
        torch.testing.assert_close(output_law(rule, P, Q), P)
        assert float((Q * rule.chance(P, Q)).sum()) == pytest.approx(accepted)
    wrong = ([0.405, 0.338, 0.257], [0.79, 0.15, 0.06], [0.35, 0.39, 0.26])
    for rule, expected in zip(WRONG_MIXES.values(), wrong, strict=True):
        np.testing.assert_allclose(output_law(rule, P, Q), expected, atol=6e-4)
    # arg-max drafts of a sampling target: p of the draft, .3 here (engines that keep no q: vllm#40149), against .7
    one_hot = torch.tensor([0.0, 1, 0], dtype=torch.float64)
    argmax = TOKEN_RULES["argmax"]
    assert float((one_hot * argmax.chance(P, one_hot)).sum()) == pytest.approx(0.3)
    torch.testing.assert_close(output_law(argmax, P, one_hot), P)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("rule", SAMPLED_RULES)
@pytest.mark.parametrize(("vocab", "depth"), [(2, 4), (3, 3), (4, 2), (5, 1)])
def test_rules_are_lossless_and_replayed_exactly(rule, vocab, depth, sparse):
    """The whole law: texts have the target's distribution, and P(at least k accepted | text) is replay's, whatever follows."""
    for seed in range(2):
        p, q = tables(vocab, depth, seed, sparse)
        law = round_law(rule, p.__getitem__, q.__getitem__, depth)
        assert sum(law.values()) == pytest.approx(1, abs=1e-12)
        assert distance(law, p, vocab, depth + 1) < 1e-12
        for text in itertools.product(range(vocab), repeat=depth + 1):
            truth = math.prod(float(p[text[:k]][text[k]]) for k in range(depth + 1))
            if not truth:
                continue
            at_least = [
                sum(
                    chance * math.prod(float(p[text[:j]][text[j]]) for j in range(len(tokens), depth + 1))
                    for (tokens, accepted), chance in law.items()
                    if accepted >= k and tokens == text[: len(tokens)]
                )
                / truth
                for k in range(1, depth + 1)
            ]
            qs = torch.tensor([float(q[text[:k]][text[k]]) for k in range(depth)], dtype=torch.float64)
            ps = torch.tensor([float(p[text[:k]][text[k]]) for k in range(depth)], dtype=torch.float64)
            np.testing.assert_allclose(given_text(rule, qs, ps).cumprod(-1), at_least, atol=1e-11)


@pytest.mark.parametrize("name", WRONG_MIXES)
@pytest.mark.parametrize(("vocab", "depth"), [(3, 2), (3, 3), (5, 1)])
def test_wrong_mixes_are_not_lossless(name, vocab, depth):
    """With two tokens the first of them is right: p without x is all that (p - q)+ can be."""
    p, q = tables(vocab, depth, seed=1)
    law = round_law(WRONG_MIXES[name], p.__getitem__, q.__getitem__, depth)
    assert distance(law, p, vocab, depth + 1) > 0.01


def test_block_verification_accepts_at_least_as_much_as_token_by_token():
    """Sun et al., theorem 2; and strictly more where it can."""
    gains = []
    for seed in range(10):
        p, q = tables(3, 3, seed)
        taus = {}
        for rule in ("rejection", "block"):
            law = round_law(rule, p.__getitem__, q.__getitem__, 3)
            taus[rule] = sum(chance * accepted for (_, accepted), chance in law.items())
        assert taus["block"] >= taus["rejection"] - 1e-12
        gains.append(taus["block"] - taus["rejection"])
    assert max(gains) > 0.02


def test_block_by_hand():
    """Two drafts of a fair coin: p = (.8, .2) then (.5, .5); q = (.4, .6) then (.9, .1); drafts 1, 0."""
    p = torch.tensor([[0.8, 0.2], [0.5, 0.5], [0.5, 0.5]], dtype=torch.float64)
    q = torch.tensor([[0.4, 0.6], [0.9, 0.1]], dtype=torch.float64)
    kept, chances = block_chances([1, 0], p, q)
    # P_1 = .2/.6; S_1 = (.1667 - .9)+ + (.1667 - .1)+ = .0667; h_1 = .0667 / (.0667 + .6667); P_2 = P_1 * .5/.9
    np.testing.assert_allclose(kept, [1, 1 / 3, 1 / 3 * 5 / 9])
    np.testing.assert_allclose(chances, [(1 / 15) / (1 / 15 + 2 / 3), 5 / 27])
    # the text 1, 0: ratios q/p = 3, 1.8; c_1 = min(1, 3), c_2 = min(1, 3, 5.4)
    assert given_text("block", torch.tensor([0.6, 0.9]), torch.tensor([0.2, 0.5])).tolist() == [1, 1]
    # the text 0, 1: ratios .5, .2 -> c = .5, .1; and .5, 4 -> c = .5, min(.5, 2)
    np.testing.assert_allclose(given_text("block", torch.tensor([0.4, 0.1]), torch.tensor([0.8, 0.5])), [0.5, 0.2])
    np.testing.assert_allclose(given_text("block", torch.tensor([0.4, 0.8]), torch.tensor([0.8, 0.2])), [0.5, 1.0])
    # a draft that cannot be: nothing is accepted from there on, and nothing is NaN
    assert given_text("block", torch.tensor([0.4, 0.0, 0.5]), torch.tensor([0.8, 0.2, 0.5])).tolist() == [0.5, 0, 0]
    # a product of ratios that overflows
    tiny = torch.full((12,), 1e-300, dtype=torch.float64)
    assert given_text("block", torch.ones(12, dtype=torch.float64), tiny).tolist() == [1.0] * 12


def sample(rule, p, q, depth, rounds, seed):
    """Counts of the first ``depth + 1`` tokens over rounds run by dice, the target going on alone."""
    generator = torch.Generator().manual_seed(seed)

    def roll():
        return torch.rand(1, generator=generator, dtype=torch.float64)

    def drawn(weights):
        return int(torch.searchsorted(weights.cumsum(0), float(roll()) * float(weights.sum()), right=True))

    counts, lengths = {}, []
    for _ in range(rounds):
        drafts = []
        for _ in range(depth):
            drafts.append(drawn(q[tuple(drafts)]))
        prefixes = [tuple(drafts[:k]) for k in range(depth + 1)]
        accepted, last = verify(
            rule, drafts, torch.stack([p[x] for x in prefixes]), torch.stack([q[x] for x in prefixes[:-1]]), roll
        )
        text = [*drafts[:accepted], last]
        while len(text) <= depth:
            text.append(drawn(p[tuple(text)]))
        counts[tuple(text)] = counts.get(tuple(text), 0) + 1
        lengths.append(accepted)
    return counts, lengths


def p_value(counts, p, vocab, length, rounds):
    truth = {
        text: rounds * math.prod(float(p[text[:k]][text[k]]) for k in range(length))
        for text in itertools.product(range(vocab), repeat=length)
    }
    # rare texts together
    rare = [t for t, n in truth.items() if n < 10]
    cells = [(counts.get(t, 0), n) for t, n in truth.items() if n >= 10]
    cells.append((sum(counts.get(t, 0) for t in rare), sum(truth[t] for t in rare)))
    cells = [(seen, n) for seen, n in cells if n > 0]
    return chi2.sf(sum((seen - n) ** 2 / n for seen, n in cells), len(cells) - 1)


@pytest.mark.parametrize("rule", SAMPLED_RULES)
def test_the_dice_follow_the_law(rule):
    """Chi-square of texts, and the mean accept length within three standard errors of the law's."""
    rounds = 3000
    p, q = tables(3, 2, seed=4)
    counts, lengths = sample(rule, p, q, 2, rounds, seed=1)
    assert p_value(counts, p, 3, 3, rounds) > 0.001
    law = round_law(rule, p.__getitem__, q.__getitem__, 2)
    mean = sum(chance * accepted for (_, accepted), chance in law.items())
    spread = math.sqrt(sum(chance * accepted**2 for (_, accepted), chance in law.items()) - mean**2)
    assert abs(np.mean(lengths) - mean) < 3 * spread / math.sqrt(rounds)


@pytest.mark.parametrize("name", WRONG_MIXES)
def test_the_same_chi_square_catches_wrong_mixes(name):
    p, q = tables(3, 2, seed=4)
    counts, _ = sample(WRONG_MIXES[name], p, q, 2, 3000, seed=1)
    assert p_value(counts, p, 3, 3, 3000) < 1e-6


def test_the_distance_to_p_falls_with_the_root_of_the_sample():
    """vllm#2336: an implementation that is a little wrong stops falling."""
    p, q = tables(4, 1, seed=2)
    truth = p[()].numpy()
    sizes = (400, 6400)
    gaps = []
    for size in sizes:
        counts, _ = sample("rejection", p, q, 1, size, seed=3)
        first = np.array([sum(n for text, n in counts.items() if text[0] == x) for x in range(4)]) / size
        gaps.append(np.abs(first - truth).sum() / 2)
    # expected total variation is below half the root of (vocabulary / size)
    assert all(gap < 1.5 * 0.5 * math.sqrt(4 / size) for gap, size in zip(gaps, sizes, strict=True))
    assert p_value(counts, p, 4, 2, sizes[-1]) > 0.001


def test_extremes():
    """p = q is always accepted; p(x) = 0 never; q(x) = 0 is never drafted and still comes out by the fallback."""
    roll = lambda: torch.tensor([0.999999])  # noqa: E731
    for rule in ("rejection", "block"):
        assert verify(rule, [1], torch.stack([P, P]), P[None], roll)[0] == 1
    zero = torch.tensor([0.0, 0.6, 0.4], dtype=torch.float64)
    for rule in SAMPLED_RULES:
        low = lambda: torch.tensor([0.0])  # noqa: E731
        accepted, token = verify(rule, [0], torch.stack([zero, zero]), Q[None], low)
        assert accepted == 0, rule
        assert token != 0, rule
    never = torch.tensor([0.0, 0.7, 0.3], dtype=torch.float64)
    assert float(output_law(TOKEN_RULES["rejection"], P, never)[0]) == pytest.approx(0.5)
    torch.testing.assert_close(output_law(TOKEN_RULES["rejection"], P, P), P)


def test_typical_acceptance_by_hand():
    """Entropy of (.5, .25, .25) is 1.0397, delta exp(-H) = .3 * .3536 = .106, epsilon .09: the limit is .09."""
    p = torch.tensor([[0.5, 0.25, 0.25], [0.95, 0.05, 0.0], [0.2, 0.3, 0.5]], dtype=torch.float64)
    one_hot = torch.eye(3, dtype=torch.float64)
    roll = lambda: torch.tensor([0.0])  # noqa: E731
    assert verify("typical", [1, 0], p, one_hot[[1, 0]], roll) == (2, 0)
    # .05 is below min(.09, .3 * exp(-.1985) = .246)
    assert verify("typical", [1, 1], p, one_hot[[1, 1]], roll) == (1, 0)
    assert verify("typical", [1, 1], p, one_hot[[1, 1]], roll, epsilon=0.04)[0] == 2


def test_a_rule_that_the_text_does_not_determine_is_refused():
    with pytest.raises(DriftlabError, match="replayed under rejection"):
        given_text("typical", torch.ones(1), torch.ones(1))
