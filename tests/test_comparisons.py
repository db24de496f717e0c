"""Paired tests on the same prompts: by hand, by enumeration, and against what they promise on synthetic prompts."""

import dataclasses
import itertools
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats
from test_simulation import acceptance_of, text_with_rounds

from driftlab import DriftlabError, simulate
from driftlab.comparisons import adjusted, compare, detectable, linearised, paired_counts, relabelling_p
from driftlab.simulation import difference


def one_round_each(a, b):
    """Every prompt has one round; a and b give the emitted tokens."""
    return np.array([[x, 1, y, 1] for x, y in zip(a, b, strict=True)], dtype=float)


# ---- p


@pytest.mark.parametrize(
    ("a", "b", "p"),
    [
        # differences 2, 1, 2: of the eight signings only +++ and --- reach 5
        ([3, 2, 4], [1, 1, 2], 2 / 8),
        # 2, -1, 2: four reach 3
        ([3, 1, 4], [1, 2, 2], 4 / 8),
        # all alike: still no more than the prompts can say
        ([2, 2, 2, 2], [1, 1, 1, 1], 2 / 16),
        ([2, 5], [1, 4], 2 / 4),
        # nothing differs
        ([2, 3, 4], [2, 3, 4], 1.0),
    ],
)
def test_p_by_hand(a, b, p):
    assert relabelling_p(one_round_each(a, b)) == p


def test_p_is_that_of_every_relabelling_of_the_ratio():
    """In fractions, with other numbers of rounds for each prompt and side: no linearisation hides in it."""
    generator = np.random.default_rng(0)
    seen = []
    for _ in range(5):
        counts = generator.integers(1, 9, size=(6, 4))
        counts[:, 0] += counts[:, 1]

        def ratio(rows):
            top = sum(Fraction(int(row[0])) for row in rows) / sum(int(row[1]) for row in rows)
            return top - sum(Fraction(int(row[2])) for row in rows) / sum(int(row[3]) for row in rows)

        observed = abs(ratio(counts))
        drawn = [
            abs(ratio([[*row[2:], *row[:2]] if swap else row for row, swap in zip(counts, swaps, strict=True)]))
            for swaps in itertools.product((False, True), repeat=6)
        ]
        seen.append(sum(d >= observed for d in drawn) / 64)
        assert relabelling_p(counts.astype(float)) == seen[-1]
    assert len(set(seen)) > 2


def test_the_order_of_the_two_does_not_matter():
    counts = np.random.default_rng(1).integers(1, 9, size=(8, 4)).astype(float)
    assert relabelling_p(counts) == relabelling_p(counts[:, [2, 3, 0, 1]])


def test_random_relabellings_come_near_all_of_them():
    generator = np.random.default_rng(2)
    counts = one_round_each(generator.normal(3.25, 1, 12), generator.normal(3, 1, 12))
    exact = relabelling_p(counts)
    assert 0.05 < exact < 0.95
    drawn = relabelling_p(counts, relabellings=3000, seed=4)
    assert drawn == pytest.approx(exact, abs=4 * (exact * (1 - exact) / 3000) ** 0.5)
    assert drawn == relabelling_p(counts, relabellings=3000, seed=4)


def test_p_is_never_zero():
    counts = one_round_each(range(100, 140), range(40))
    assert relabelling_p(counts, relabellings=500) == 1 / 500
    assert np.isnan(relabelling_p(counts[:1]))
    assert np.isnan(relabelling_p(counts[:0]))


def test_a_variant_without_rounds_has_no_p():
    counts = np.array([[3.0, 1.0, 0.0, 0.0], [3.0, 1.0, 0.0, 0.0]])
    assert np.isnan(relabelling_p(counts))
    # where only a relabelling has none, it does not make p smaller
    half = np.array([[9.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]])
    assert relabelling_p(half) == 1.0


def synthetic(generator, prompts, *, delta=0.0, spread=0.5, common=1.0, own=(1.0, 1.0)):
    """Counts of prompts that differ in tau and in rounds; both variants share what a prompt is like."""
    rounds = generator.integers(5, 31, size=(prompts, 2)).astype(float)
    level = 3 + common * generator.standard_normal(prompts)
    noise = spread * generator.standard_normal((prompts, 2)) * own
    taus = level[:, None] + noise + np.array([delta, 0])
    return np.stack([taus[:, 0] * rounds[:, 0], rounds[:, 0], taus[:, 1] * rounds[:, 1], rounds[:, 1]], 1)


@pytest.mark.parametrize(("prompts", "own"), [(14, (1.0, 1.0)), (40, (2.0, 0.5))])
def test_without_a_difference_p_is_uniform(prompts, own):
    """With exchangeable labels for few prompts; with equal tau and unlike spreads for many. 600 sets, 3.5 sigma."""
    generator, sets = np.random.default_rng(3), 600
    drawn = np.array(
        [relabelling_p(synthetic(generator, prompts, own=own), relabellings=200, seed=i) for i in range(sets)]
    )
    for level in (0.05, 0.2, 0.5, 0.8):
        assert (drawn <= level).mean() == pytest.approx(level, abs=3.5 * (level * (1 - level) / sets) ** 0.5)


def test_pairing_finds_what_prompts_in_common_hide():
    """Prompts vary by 3, the pair by 0.1: a difference of 0.2 is seen with 10 prompts, and is far from seen unpaired."""
    generator = np.random.default_rng(5)
    found = []
    for _ in range(20):
        a, b = np.full(10, 0.2), np.zeros(10)
        level = 3 * generator.standard_normal(10)
        pairs = one_round_each(a + level + 0.1 * generator.standard_normal(10), b + level)
        found.append((relabelling_p(pairs), stats.ttest_ind(pairs[:, 0], pairs[:, 2]).pvalue))
    assert np.mean([p < 0.05 for p, _ in found]) > 0.9
    assert np.mean([p < 0.05 for _, p in found]) < 0.2


# ---- what could be detected


def test_linearised_differences_are_the_derivative_of_the_difference():
    counts = np.random.default_rng(6).integers(1, 9, size=(7, 4)).astype(float)

    def of(weights):
        e_a, r_a, e_b, r_b = weights @ counts
        return e_a / r_a - e_b / r_b

    found, step = linearised(counts), 1e-6
    for i in range(7):
        moved = np.ones(7)
        moved[i] += step
        assert found[i] / 7 == pytest.approx((of(moved) - of(np.ones(7))) / step, abs=1e-5)
    assert found.sum() == pytest.approx(0, abs=1e-12)
    assert linearised(one_round_each([3, 2], [1, 1])).tolist() == [0.5, -0.5]


@pytest.mark.parametrize(("level", "power"), [(0.05, 0.8), (0.01, 0.9)])
def test_the_detectable_difference_is_that_of_the_noncentral_t(level, power):
    generator = np.random.default_rng(7)
    counts = one_round_each(generator.normal(3, 1, 20), generator.normal(3, 1, 20))
    mdd, reason = detectable(counts, level=level, power=power)
    assert reason == ""
    shift = mdd / (counts[:, 0] - counts[:, 2]).std(ddof=1) * 20**0.5
    bound = stats.t.ppf(1 - level / 2, 19)
    assert stats.nct.sf(bound, 19, shift) + stats.nct.cdf(-bound, 19, shift) == pytest.approx(power, abs=1e-6)


def test_at_the_detectable_difference_the_test_finds_it_four_times_in_five():
    """400 sets of 20 prompts that differ in rounds; 3.5 sigma and a point for the t where p is by relabelling."""
    generator, sets = np.random.default_rng(8), 400
    mdd = np.mean([detectable(synthetic(generator, 20))[0] for _ in range(200)])

    def found(delta):
        return np.mean(
            [
                relabelling_p(synthetic(generator, 20, delta=delta), relabellings=400, seed=i) <= 0.05
                for i in range(sets)
            ]
        )

    assert found(mdd) == pytest.approx(0.8, abs=3.5 * (0.8 * 0.2 / sets) ** 0.5 + 0.01)
    assert found(mdd / 2) < 0.4
    assert found(1.6 * mdd) > 0.95


@pytest.mark.parametrize(
    ("a", "b", "expected", "reason"),
    [
        ([3], [1], np.nan, "two or more"),
        ([], [], np.nan, "two or more"),
        # the smallest p of five prompts is 2 / 32
        ([3, 2, 4, 5, 3], [1, 1, 2, 2, 1], np.inf, "0.062"),
        ([2] * 8, [1] * 8, np.nan, "differs by as much"),
        ([2, 3] * 4, [2, 3] * 4, np.nan, "no prompt differs"),
        # 16 swaps change nothing: the four others have 16 signings
        (
            [300, 500, 200, 600, *[2] * 16],
            [1, 2, 1, 2, *[2] * 16],
            np.inf,
            "4 of 20 prompts differ: p is at least 0.125",
        ),
    ],
)
def test_where_nothing_can_be_detected_it_is_said(a, b, expected, reason):
    mdd, said = detectable(one_round_each(a, b) if a else np.zeros((0, 4)))
    np.testing.assert_equal(mdd, expected)
    assert reason in said


def test_tied_prompts_do_not_make_p_smaller():
    for size in (1, 1000):
        tied = one_round_each([size * x for x in (3, 5, 2, 6)] + [2] * 8, [1, 2, 1, 2] + [2] * 8)
        assert relabelling_p(tied) == 0.125
        assert detectable(tied, level=0.125)[0] < np.inf
        assert detectable(tied, level=0.12) == (np.inf, "4 of 12 prompts differ: p is at least 0.125, above 0.12")
    # a prompt differs if its rounds do, or its tokens do
    either = np.array(
        [[4, 1, 4, 2], [3, 1, 3, 3], [5, 2, 5, 1], [2, 1, 3, 1], [4, 1, 2, 1], [3, 2, 4, 2], [1, 1, 1, 1.0]]
    )
    assert detectable(either)[0] < np.inf
    assert detectable(either[1:])[0] == np.inf


def test_six_prompts_can_show_something():
    generator = np.random.default_rng(9)
    mdd, reason = detectable(one_round_each(generator.normal(3, 1, 6), generator.normal(3, 1, 6)))
    assert 0 < mdd < np.inf
    assert reason == ""


# ---- adjustment


def test_adjustment_by_hand():
    """Holm: .01 * 3, then .03 * 2, then .04 * 1, which may not be smaller than the one before."""
    assert adjusted(np.array([0.01, 0.04, 0.03])) == pytest.approx([0.03, 0.06, 0.06])
    assert adjusted(np.array([0.01, 0.04, 0.03]), method="bonferroni") == pytest.approx([0.03, 0.12, 0.09])
    np.testing.assert_allclose(adjusted(np.array([0.01, np.nan, 0.03])), [0.02, np.nan, 0.03])
    assert np.isnan(adjusted(np.array([np.nan]))).all()


# ---- the table


@pytest.fixture
def three():
    """Eight prompts; ``good`` accepts one draft more than ``base`` in each, ``same`` is ``base``."""
    texts = [(1, 0, 2, 0, 1), (0, 0, 2), (2, 1, 0, 0), (1, 1), (0, 2, 2, 1), (0, 0), (1, 2), (2, 0, 1)]
    base = acceptance_of(*(text_with_rounds(*accepted) for accepted in texts), depth=3)
    good = acceptance_of(*(text_with_rounds(*(a + 1 for a in accepted)) for accepted in texts), depth=3)
    return {"base": simulate(base), "good": simulate(good), "same": simulate(base)}


def test_one_row_a_comparison(three):
    frame = compare(three, "base", samples=200, seed=3)
    assert frame.columns.tolist() == [
        *("name", "base", "difference", "low", "high", "p", "p_adjusted", "mdd", "prompts", "reason"),
    ]
    assert frame[["name", "base"]].values.tolist() == [["good", "base"], ["same", "base"]]
    good, same = frame.iloc[0], frame.iloc[1]
    expected = difference(three["good"], three["base"], samples=200, seed=3)
    assert (good["difference"], good["low"], good["high"]) == tuple(expected)
    assert good["difference"] == pytest.approx(three["good"].tau - three["base"].tau) == pytest.approx(1.0)
    # one more in every round of every prompt: only the observed labels and their opposites go so far
    assert good["p"] == 2 / 2**8
    assert good["p_adjusted"] == 4 / 2**8
    assert np.isnan(good["mdd"])
    assert "differs by as much" in good["reason"]
    assert good["prompts"] == 8
    assert (same["difference"], same["p"], same["p_adjusted"], same["reason"]) == (0, 1, 1, "no prompt differs")


def test_all_pairs_and_their_adjustment(three):
    frame = compare(three, samples=50)
    assert frame[["name", "base"]].values.tolist() == [["good", "base"], ["same", "base"], ["same", "good"]]
    assert frame["difference"].tolist() == pytest.approx([1, 0, -1])
    assert frame["p"].tolist() == [2 / 256, 1, 2 / 256]
    assert frame["p_adjusted"].tolist() == pytest.approx([6 / 256, 1, 6 / 256])


def test_the_detectable_difference_is_that_of_the_pair(three):
    texts = [text_with_rounds(*accepted) for accepted in ((1,), (2, 0), (3,), (0, 3), (1, 1), (2, 2), (0,), (3, 1))]
    mixed = simulate(acceptance_of(*texts, depth=3))
    frame = compare({"base": three["base"], "mixed": mixed}, "base", samples=20, level=0.1, power=0.5)
    counts = paired_counts(mixed, three["base"])
    assert counts[1].tolist() == [4, 2, 5, 3]
    assert frame["mdd"].iloc[0] == detectable(counts, level=0.1, power=0.5)[0] < detectable(counts)[0]
    assert frame["reason"].iloc[0] == ""


def test_prompts_without_rounds_do_not_count():
    texts = [text_with_rounds(1, 0), [], text_with_rounds(2), [3]]
    frame = compare({name: simulate(acceptance_of(*texts, depth=3)) for name in ("a", "b")}, "a", samples=20)
    assert frame["prompts"].tolist() == [2]  # the last one's only round is cut
    single = compare({name: simulate(acceptance_of(*texts[:2], depth=3)) for name in ("a", "b")}, "a", samples=20)
    assert np.isnan(single["p"].iloc[0])
    assert "1 prompt(s)" in single["reason"].iloc[0]


def test_what_cannot_be_compared_is_refused(three):
    with pytest.raises(DriftlabError, match="two variants or more"):
        compare({"base": three["base"]}, "base")
    with pytest.raises(DriftlabError, match="'nobody'"):
        compare(three, "nobody")
    other = dataclasses.replace(three["good"].acceptance, ids=tuple("abcdefgh"))
    with pytest.raises(DriftlabError, match="same prompts and texts"):
        compare({"base": three["base"], "other": simulate(other)}, "base")
