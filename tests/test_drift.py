"""Distances, null, gains, bands and geometry against numbers worked out by hand."""

import math

import numpy as np
import pytest
import torch
from drift_drafters import record_of

LN2 = math.log(2)


def of(*values):
    return np.array(values, dtype=np.float64)


# ---- distances


def test_known_distances():
    from driftlab.drift import jensen_shannon, total_variation

    p, q = of(0.5, 0.3, 0.2, 0.0), of(0.1, 0.3, 0.2, 0.4)
    assert float(total_variation(p, q)) == pytest.approx(0.4)
    assert float(jensen_shannon(of(1.0, 0.0), of(0.0, 1.0))) == pytest.approx(LN2)
    # middle (3/4, 1/4): half of ln 4/3, and half of half of ln 2/3 and half of ln 2
    by_hand = 0.5 * math.log(4 / 3) + 0.5 * (0.5 * math.log(2 / 3) + 0.5 * math.log(2))
    assert float(jensen_shannon(of(1.0, 0.0), of(0.5, 0.5))) == pytest.approx(by_hand)


def test_what_a_learned_sink_takes_is_a_part_of_its_own():
    from driftlab.drift import jensen_shannon, total_variation

    p, q = of(0.5, 0.0), of(1.0, 0.0)  # the half of p that is no segment's
    assert float(total_variation(p, q)) == pytest.approx(0.5)
    assert float(jensen_shannon(of(0.0, 0.0), q)) == pytest.approx(LN2)
    assert float(total_variation(of(0.2, 0.2), of(0.2, 0.2))) == 0


def test_distances_are_symmetric_bounded_and_0_of_equals():
    from driftlab.drift import jensen_shannon, total_variation

    generator = np.random.default_rng(0)
    p, q = (generator.dirichlet(np.ones(4) * 0.3, size=200) for _ in range(2))
    for distance, most in ((total_variation, 1.0), (jensen_shannon, LN2)):
        assert np.allclose(distance(p, q), distance(q, p), rtol=0, atol=1e-12)
        assert distance(p, q).min() > 0
        assert distance(p, q).max() <= most + 1e-12
        assert np.abs(distance(p, p)).max() < 1e-12
    # Pinsker and its reverse bound tie the two together
    tv, js = total_variation(p, q), jensen_shannon(p, q)
    assert (js >= tv**2 / 2 - 1e-12).all()
    assert (js <= LN2 * tv + 1e-12).all()


@pytest.mark.parametrize("bad", [(0.9, 0.9), (-0.2, 0.5), (float("nan"), 0.5)])
def test_what_is_no_mass_is_refused(bad):
    from driftlab import DriftlabError
    from driftlab.drift import total_variation

    with pytest.raises(DriftlabError, match="sum to 1"):
        total_variation(of(*bad), of(0.5, 0.5))


# ---- drift at equal position


def four_rows():
    """One prompt, rows 2..5, K = 3, one layer, two heads. Depth-1 masses by row; recent masses of the last 1 and 2 keys."""
    first = {2: (0.6, 0.2, 0.2), 3: (0.5, 0.2, 0.3), 4: (0.4, 0.2, 0.4), 5: (0.3, 0.2, 0.5)}
    recent = {2: (0.1, 0.2), 3: (0.1, 0.25), 4: (0.2, 0.3), 5: (0.2, 0.4)}
    mass = np.zeros((4, 3, 1, 2, 4))
    for i, row in enumerate(first):
        mass[i, 0, 0, :, :3] = first[row]
        mass[i, 1, 0, 0] = (0.2, 0.2, 0.2, 0.4)
        mass[i, 1, 0, 1] = (0.7, 0.1, 0.1, 0.1)
        mass[i, 2, 0, :] = (0.1, 0.2, 0.2, 0.5)
    return mass, np.stack([np.stack([recent[row]] * 2)[None] for row in first])


def test_drift_compares_with_the_relabelled_row_at_the_same_position():
    from driftlab.drift import drift, null, segment_gain
    from driftlab.segments import Segment

    record = record_of(*four_rows())
    assert np.abs(drift(record, 1)).max() == 0
    # row 2 at depth 2 stands where row 3 does: (.5, .2, .3 - .1, .1) against (.2, .2, .2, .4) and (.7, .1, .1, .1)
    second = drift(record, 2)[:, 0]
    assert second[0] == pytest.approx([0.3, 0.2])
    # row 4 against row 5: (.3, .2, .3, .2)
    assert second[2] == pytest.approx([(0.1 + 0.1 + 0.2) / 2, (0.4 + 0.1 + 0.2 + 0.1) / 2])
    assert np.isnan(second[3]).all()
    # row 2 at depth 3 against row 4: (.4, .2, .4 - .3, .3) and (.1, .2, .2, .5)
    third = drift(record, 3)[:, 0]
    assert third[0] == pytest.approx([0.3, 0.3])
    assert np.isnan(third[2:]).all()
    assert segment_gain(record, 2, Segment.SINK)[0, 0] == pytest.approx([0.2 - 0.5, 0.7 - 0.5])
    assert segment_gain(record, 3, Segment.SELF)[0, 0] == pytest.approx([0.5 - 0.3] * 2)
    # null at depth 2, of the start at row 3: rows 4 and 3 with the last key relabelled; of row 2 there is none
    nothing = null(record, 2)[:, 0]
    assert np.isnan(nothing[[0, 3]]).all()
    assert nothing[1] == pytest.approx([(0.1 + 0.0 + 0.0 + 0.1) / 2] * 2)  # (.4, .2, .2, .2) and (.5, .2, .2, .1)
    assert null(record, 2, lag=2)[:, 0][2] == pytest.approx([(0.2 + 0.2 + 0.2 - 0.2) / 2] * 2)  # rows 5 and 3
    assert np.isnan(null(record, 2, lag=2)[:2]).all()


def test_distances_are_averaged_not_averages_compared():
    from driftlab.drift import drift, over_heads, total_variation

    mass, recent = np.zeros((2, 2, 1, 2, 4)), np.zeros((2, 1, 2, 1))
    mass[:, 0, ..., :] = (0.5, 0.5, 0.0, 0.0)
    mass[:, 1, 0, 0] = (0.9, 0.1, 0.0, 0.0)  # one head to the sink, the other from it
    mass[:, 1, 0, 1] = (0.1, 0.9, 0.0, 0.0)
    record = record_of(mass, recent)
    assert over_heads(drift(record, 2))[0] == pytest.approx(0.4)
    assert float(total_variation(mass[0, 1, 0].mean(0), mass[1, 0, 0].mean(0))) == 0


def test_prompts_are_not_mixed():
    """The last row of one prompt has no partner in the next."""
    from driftlab.drift import drift, null

    mass, recent = four_rows()
    one, two = (
        record_of(mass, recent),
        record_of(
            np.concatenate([mass, mass]),
            np.concatenate([recent, recent]),
            prompt=[0] * 4 + [1] * 4,
            row=[2, 3, 4, 5] * 2,
        ),
    )
    for k in (1, 2, 3):
        assert np.array_equal(drift(two, k), np.concatenate([drift(one, k)] * 2), equal_nan=True)
        assert np.array_equal(null(two, k), np.concatenate([null(one, k)] * 2), equal_nan=True)
    assert two.reach.tolist() == one.reach.tolist() * 2
    assert one.reach.tolist() == [[True] * 3, [True] * 3, [True, True, False], [True, False, False]]


def test_a_last_key_that_is_not_context_is_refused():
    from driftlab import DriftlabError
    from driftlab.drift import relabelled

    moved = relabelled(of(0.2, 0.1, 0.7, 0.0), np.array(0.3))
    assert moved == pytest.approx(of(0.2, 0.1, 0.4, 0.3))
    with pytest.raises(DriftlabError, match="not all CONTEXT"):
        relabelled(of(0.9, 0.0, 0.1, 0.0), np.array(0.3))


def test_the_relative_sink_loss_is_missing_where_there_is_no_sink():
    from driftlab.drift import relative_sink_loss, sink_before

    mass, recent = four_rows()
    record = record_of(mass, recent)
    # depth 2: rows 2..4 have .45 (mean of heads), rows 3..5 had .5, .4, .3 at depth 1
    assert relative_sink_loss(record, 2).value == pytest.approx(1 - 3 * 0.45 / 1.2)
    assert sink_before(record, 2) == pytest.approx([0.5, 0.4, 0.3, math.nan], nan_ok=True)
    mass[:, 0, ..., 1] += mass[:, 0, ..., 0]
    mass[:, 0, ..., 0] = 0
    assert math.isnan(relative_sink_loss(record_of(mass, recent), 2).value)


def test_recent_and_entropy_gains():
    from driftlab import DriftlabError
    from driftlab.drift import normalised_entropy, recent_gain, relative_entropy_gain

    mass, recent = four_rows()
    seen = np.array([[3, 4, 5], [4, 5, 6], [5, 6, 7], [6, 7, 8]])[..., None]
    entropy = np.log(seen)[..., None] * np.array([1.0, 0.5]) * np.array([1.0, 0.8, 0.6])[:, None, None]
    last = np.zeros((4, 3, 1, 2, 1))
    last[:, 0, ..., 0], last[:, 1, ..., 0] = np.array([0.1, 0.2, 0.3, 0.4])[:, None, None], 0.9
    record = record_of(mass, recent, entropy=entropy, visible=seen, windows=(2,), recent=last)
    assert normalised_entropy(entropy, seen)[0, :, 0].tolist() == [
        pytest.approx([1.0, 0.5]),
        pytest.approx([0.8, 0.4]),
        pytest.approx([0.6, 0.3]),
    ]
    assert relative_entropy_gain(record, 3)[0, 0] == pytest.approx([-0.4, -0.2])
    assert recent_gain(record, 2, 2)[:, 0, 0] == pytest.approx([0.7, 0.6, 0.5, math.nan], nan_ok=True)
    with pytest.raises(DriftlabError, match="was not recorded"):
        recent_gain(record, 2, 8)
    assert np.isnan(normalised_entropy(np.zeros((1, 1, 1, 1)), np.ones((1, 1, 1), dtype=np.int64))).all()


# ---- bands


def test_a_band_is_the_quantiles_over_starts():
    from driftlab.drift import band

    starts = 100
    values = np.arange(starts, dtype=np.float64) / 100
    record = record_of(
        np.full((starts, 1, 1, 1, 4), 0.25),
        np.zeros((starts, 1, 1, 0)),
        prompt=np.repeat(np.arange(4), 25),
        row=np.tile(np.arange(2, 27), 4),
    )
    low, middle, high = band(record, values)
    assert (low.value, middle.value, high.value) == (0.04, 0.49, 0.94)
    # prompts hold 0 - .24, .25 - .49, ...: resampled medians move by whole prompts
    assert middle.low < 0.25
    assert middle.high > 0.7
    values[:50] = np.nan
    assert band(record, values, (0.5,))[0].value == 0.74
    same = band(record, np.where(np.isnan(values), np.nan, 0.3))
    assert same == ((0.3, 0.3, 0.3),) * 3
    assert all(math.isnan(part) for part in band(record, np.full(starts, np.nan), (0.5,))[0])
    one = record_of(np.full((3, 1, 1, 1, 4), 0.25), np.zeros((3, 1, 1, 0)))
    (only,) = band(one, of(0.1, 0.2, 0.3), (0.5,))
    assert only.value == 0.2
    assert math.isnan(only.low)


# ---- geometry


def test_shares_of_known_contributions():
    from driftlab.drift import contributions, magnitude_shares, projection_shares

    weight = torch.tensor([[1.0, 0.0, 0.0, 2.0], [0.0, 3.0, 0.0, 0.0]])  # two states of width two
    aux = torch.tensor([[[1.0, 1.0], [5.0, 2.0]]])
    parts = contributions(aux, weight)
    assert parts.tolist() == [[[1.0, 3.0], [4.0, 0.0]]]
    small, large = math.sqrt(10), 4
    assert magnitude_shares(parts)[0].tolist() == pytest.approx([small / (small + large), large / (small + large)])
    # g = (5, 3): c1.g = 14, c2.g = 20, ||g||^2 = 34
    assert projection_shares(parts)[0].tolist() == pytest.approx([14 / 34, 20 / 34])
    opposed = torch.tensor([[[3.0, 0.0], [-1.0, 0.0]]])
    assert projection_shares(opposed)[0].tolist() == pytest.approx([1.5, -0.5])


def test_a_weight_of_another_width_is_refused():
    from driftlab import DriftlabError
    from driftlab.drift import contributions

    with pytest.raises(DriftlabError, match="fc takes 5 inputs"):
        contributions(torch.zeros(1, 2, 2), torch.zeros(3, 5))


def test_effective_rank_and_spread_of_known_rows():
    from driftlab.drift import effective_rank, spread_share

    # +-e1, +-e2, +-e3: centred, three equal singular values; a common offset changes nothing
    cross = np.concatenate([np.eye(3), -np.eye(3)])
    assert effective_rank(cross) == pytest.approx(3)
    assert effective_rank(cross + 7) == pytest.approx(3)
    assert effective_rank(np.concatenate([cross, np.zeros((6, 2))], 1)) == pytest.approx(3)  # fewer rows than width too
    # singular values 2 sqrt 2 and sqrt 2: shares 2/3 and 1/3
    rows = np.array([[2.0, 0], [-2, 0], [0, 1], [0, -1]])
    by_hand = math.exp(-(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3)))
    assert effective_rank(rows) == pytest.approx(by_hand)
    wide = np.concatenate([rows, np.zeros((4, 9))], 1)
    assert effective_rank(wide) == pytest.approx(by_hand)
    assert effective_rank(rows, of(2, 2, 2, 2)) == pytest.approx(by_hand)
    repeated = np.concatenate([rows, rows[:1], rows[:1]])
    assert effective_rank(rows, of(3, 1, 1, 1)) == pytest.approx(effective_rank(repeated))
    assert math.isnan(effective_rank(np.full((5, 3), 0.1)))  # 0.1 has no exact mean
    assert math.isnan(effective_rank(rows[:1]))
    assert spread_share(cross) == pytest.approx(1)
    assert spread_share(np.array([[1.0, 0], [9, 0]])) == pytest.approx(0)  # length is no spread
    assert spread_share(np.array([[1.0, 0], [0, 2]])) == pytest.approx(0.5)
    assert spread_share(np.array([[1.0, 0], [0, 2]]), of(3, 1)) == pytest.approx(1 - (0.75**2 + 0.25**2))
    assert math.isnan(spread_share(np.zeros((2, 2))))


def grown(prompts):
    """Feedback of RMS a r^(k-1): prompt i has a = i + 1, r = prompts[i], four starts, K = 3."""
    size = np.concatenate([np.outer(np.ones(4) * (i + 1), r ** np.arange(3.0)) for i, r in enumerate(prompts)])
    starts = len(size)
    return record_of(
        np.full((starts, 3, 1, 1, 4), 0.25),
        np.zeros((starts, 1, 1, 2)),
        prompt=np.repeat(np.arange(len(prompts)), 4),
        row=np.tile(np.arange(2, 6), len(prompts)),
        rms_feedback=size,
    )


def test_growth_and_slope_with_intervals():
    from driftlab.drift import growth, log_slopes

    even = grown([1.5, 1.5, 1.5])
    assert growth(even, 3) == pytest.approx((2.25, 2.25, 2.25))
    assert growth(even, 1) == pytest.approx((1, 1, 1))
    slopes = log_slopes(even, 3)
    assert slopes[[0, 1, 4, 5]] == pytest.approx([math.log(1.5)] * 4)
    assert np.isnan(slopes[[2, 3]]).all()  # rows 4 and 5 have no row 6, 7 to stand beside
    uneven = grown([1.0, 2.0])
    interval = growth(uneven, 3)
    assert interval.value == pytest.approx((1 * 1 + 2 * 4) / (1 + 2))
    assert interval.low < 1.01
    assert interval.high > 3.9
    assert math.isnan(growth(grown([2.0]), 3).low)


def test_a_slope_wants_two_depths_and_a_size():
    from driftlab import DriftlabError
    from driftlab.drift import log_slopes

    record = grown([1.5])
    with pytest.raises(DriftlabError, match="two depths"):
        log_slopes(record, 1)
    record.rms_feedback[1, 2] = 0
    with pytest.raises(DriftlabError, match="feedback is 0: prompt 'p:0', row 3, depth 3"):
        log_slopes(record, 3)


def test_spread_kept_is_paired():
    from driftlab.drift import spread_kept

    angle = np.array([0.0, 1.0, 2.0, 4.0])
    rows = np.stack([np.cos(angle), np.sin(angle)], 1)
    vectors = np.stack([rows, rows * 3, rows * [1, 0] + [9.0, 0]], 1)
    record = record_of(
        np.full((4, 3, 1, 1, 4), 0.25),
        np.zeros((4, 1, 1, 2)),
        prompt=np.arange(4),
        row=np.full(4, 2),
        vectors=vectors,
        vector_prompt=np.arange(4),
    )
    kept = spread_kept(record, 2, samples=50)
    assert (kept.value, kept.low, kept.high) == pytest.approx((1, 1, 1))
    assert spread_kept(record, 3, samples=50).value == pytest.approx(0, abs=1e-9)  # all along one axis


# ---- what a record refuses


def test_records_that_do_not_hold_together():
    from driftlab import DriftlabError

    mass, recent = four_rows()
    for change, message in (
        ({"row": [2, 3, 5, 6]}, "without a gap"),
        ({"prompt": [0, 1, 0, 1], "row": [2, 2, 3, 3]}, "without a gap"),
        (
            {"rms_feedback": np.array([[1, 1, 1], [1, 1, 1], [1, np.inf, 1], [1, 1, 1.0]])},
            "prompt 'p:0', row 4, depth 2",
        ),
    ):
        with pytest.raises(DriftlabError, match=message):
            record_of(mass, recent, **change)
    with pytest.raises(DriftlabError, match="recent_first holds 1 windows"):
        record_of(mass, recent[..., :1])
    with pytest.raises(DriftlabError, match="no start"):
        record_of(mass[:0], recent[:0])
    with pytest.raises(DriftlabError, match="sum to 1 at most"):
        record_of(mass * 2, recent)
    with pytest.raises(DriftlabError, match=r"depths 1\.\.3"):
        record_of(mass, recent).pairs(4)


def test_one_start_has_no_partner_and_no_interval():
    from driftlab.drift import drift, drift_rows, over_heads

    mass, recent = four_rows()
    record = record_of(mass[:1], recent[:1])
    mean = record.mean(over_heads(drift(record, 2)))
    assert all(math.isnan(part) for part in mean)
    rows = drift_rows(record, samples=20, feed="text")
    deeper = rows[(rows["quantity"] == "drift_tv") & (rows["depth"] == 2)]
    assert deeper["value"].isna().all()
    assert (deeper["n"] == 0).all()
