"""Drafters constructed to be each thing, and what the verdict says of them; accuracy beyond the trained depth; tidy rows."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from drift_drafters import constructed, texts

T, D = 2, 4


def run(drafter, batch, depth=D, feed="text"):
    from driftlab import accept, all_starts
    from driftlab.drift import Recorder

    with Recorder(drafter, depth=depth, vectors=4) as recorder:
        draft = all_starts(drafter, batch, depth, feed=feed)
    return recorder.record(), accept(draft, batch)


def judged(drafter, batch, trained=T, depth=None, **thresholds):
    from driftlab.drift import Thresholds, verdict

    record, acceptance = run(drafter, batch, depth or 2 * trained)
    return verdict(record, acceptance, trained, Thresholds(**thresholds), samples=300)


def states(found):
    return {sign.name: sign.state for sign in found.signs}


# ---- drafters that are what they were made to be


def test_feedback_that_equals_the_fusion_state_is_depth_invariant():
    """Attention is far from uniform and differs from row to row; nothing of it depends on depth."""
    from driftlab.drift import drift, growth, log_slopes, null, over_heads, segment_gain
    from driftlab.segments import Segment

    drafter, batch = constructed(), texts()
    record, acceptance = run(drafter, batch)
    for k in range(1, D + 1):
        here, _ = record.pairs(k)
        for values in (drift(record, k), drift(record, k, "js"), *(segment_gain(record, k, part) for part in Segment)):
            assert np.abs(values[here]).max() < 1e-12
        assert growth(record, k) == pytest.approx((1, 1, 1))
        assert np.nanmin(record.imitation[:, k - 1]) == pytest.approx(1)
    assert np.nanmax(np.abs(log_slopes(record, D))) < 1e-12
    assert 0.2 < record.mass[:, 0, ..., 0].mean() < 0.8
    assert record.mean(over_heads(null(record, 3))).low > 0.05
    assert record.successive[:, 1:] == pytest.approx(np.ones((len(record.row), D - 1)))
    rate = acceptance.match.sum((0, 1)) / acceptance.valid.sum((0, 1))
    assert rate.min() > 0.7  # eight of ten tokens are the prompt's
    found = judged(drafter, batch)
    assert found.word == "depth-invariant"
    assert set(states(found).values()) == {"same"}
    assert (found.trained, found.beyond, found.notes) == (T, D, ())


def test_growth_makes_a_drafter_depth_specific_and_the_normed_feedback_of_the_same_weights_does_not():
    """u = s + s / RMS(s): RMS 2, 3, 4, 5 from a fused RMS of 1, direction and attention unchanged."""
    from driftlab.drift import growth, log_slopes

    record, _ = run(constructed(grow=1.0), texts())
    assert [growth(record, k).value for k in range(1, D + 1)] == pytest.approx([1, 1.5, 2, 2.5], rel=1e-5)
    logs = np.log([2.0, 3, 4, 5])
    slope = ((np.arange(4) - 1.5) * logs).sum() / 5
    assert np.nanmean(log_slopes(record, D)) == pytest.approx(slope, rel=1e-5)
    grown = judged(constructed(grow=1.0), texts())
    assert (grown.word, grown.because) == ("depth-specific", ("magnitude",))
    assert judged(constructed(grow=1.0, norm_output=True), texts()).word == "depth-invariant"
    assert judged(constructed(grow=1.0), texts(), slope=0.4).word == "depth-invariant"


def test_drift_without_growth_is_depth_specific():
    """The feedback turns towards v at RMS 1: queries leave the sink, and find their own keys, which lie along v too."""
    found = judged(constructed(push=2.0, norm_output=True), texts())
    assert (found.word, found.because) == ("depth-specific", ("sink", "self", "attention"))
    loss, gain = (next(sign.interval for sign in found.signs if sign.name == name) for name in ("sink", "self"))
    assert loss.low > 0.2
    assert gain.low > 0.7


def test_accuracy_lost_beyond_the_trained_depth_is_depth_specific():
    """At depth k the stream is sqrt(32) e_p + 20 k v; the head's lure lies along v: 0.1 * 20 * 3 > sqrt(32) > 0.1 * 20 * 2."""
    found = judged(constructed(push=20.0, lure=0.1), texts())
    assert found.word == "depth-specific"
    assert states(found)["accuracy_trained"] == "same"
    assert states(found)["accuracy_beyond"] == "changed"
    assert next(sign for sign in found.signs if sign.name == "accuracy_beyond").interval == (0, 0, 0)


def test_accuracy_lost_within_the_trained_depth_is_collapse():
    found = judged(constructed(push=20.0, lure=0.2), texts())
    assert found.word == "collapsed"
    assert states(found)["accuracy_trained"] == "changed"
    assert states(found)["accuracy_beyond"] == "open"  # 0 of 0


def test_feedback_that_is_the_same_for_every_start_is_collapse():
    """Directions (sqrt(32) e_p + 20 k v): what is left off v falls from 32 / 432 to 32 / 6432 of the square by depth 4."""
    from driftlab.drift import spread_kept

    found = judged(constructed(push=20.0), texts(), trained=4)
    assert found.word == "collapsed"
    assert states(found)["spread"] == "changed"
    assert states(found)["accuracy_trained"] == "same"  # without a lure the head is not led astray
    record, _ = run(constructed(push=20.0), texts(), 4)
    assert spread_kept(record, 4).value == pytest.approx(32 / 6432 / (32 / 432), rel=1e-3)


def test_prompts_that_disagree_leave_it_undecided():
    """From RMS 0.3 the feedback grows to 4.3, a slope of .39 in the logarithm, from 5 to 9, a slope of .13."""
    batch = texts(sizes=[0.3, 5.0] * 4)
    found = judged(constructed(grow=1.0), batch, slope=0.2)
    assert (found.word, found.because) == ("undecided", ("magnitude",))
    assert judged(constructed(grow=1.0), batch, slope=0.45).word == "depth-invariant"


def test_a_sink_that_holds_little_is_noted():
    found = judged(constructed(), texts(), moved=0.9)
    assert "cannot lose so much" in found.notes[0]


def test_one_prompt_has_no_interval_and_no_verdict():
    found = judged(constructed(), texts(prompts=1))
    assert found.word == "undecided"
    assert set(states(found).values()) == {"open"}


def test_a_drafter_that_never_hits_is_undecided_not_invariant():
    found = judged(constructed(), texts(right=0.0))
    assert found.word == "undecided"
    assert found.because == ("accuracy_trained", "accuracy_beyond")


def test_a_verdict_wants_runs_that_are_deep_enough_and_the_same():
    from driftlab import DriftlabError
    from driftlab.drift import Thresholds, verdict

    drafter, batch = constructed(), texts(prompts=3, answer=12)
    record, acceptance = run(drafter, batch)
    with pytest.raises(DriftlabError, match="looks at depth 6, twice"):
        verdict(record, acceptance, 3)
    with pytest.raises(DriftlabError, match="trained depth 0"):
        verdict(record, acceptance, 0)
    with pytest.raises(DriftlabError, match="other prompts"):
        verdict(record, dataclasses.replace(acceptance, ids=("a", "b", "c")), T)
    longer, _ = run(drafter, texts(prompts=3, answer=13))
    with pytest.raises(DriftlabError, match="of other starts"):
        verdict(longer, acceptance, T)
    own, drafts = run(drafter, batch, feed="own")
    with pytest.raises(DriftlabError, match="fed the text"):
        verdict(own, drafts, T)
    assert verdict(own, acceptance, T, samples=20).word  # the record may be of either feed
    for wrong in ({"slope": 0.0}, {"moved": 1.0}, {"kept": 0.0}, {"collapse": 1.5}):
        with pytest.raises(DriftlabError, match="slope > 0"):
            Thresholds(**wrong)


@pytest.mark.parametrize(
    ("ends", "state"),
    [
        ((0.6, 0.9), "same"),
        ((0.5, 1.0), "same"),
        ((0.49, 0.9), "open"),
        ((0.1, 0.49), "changed"),
        ((0.6, 1.01), "open"),
        ((1.01, 1.2), "changed"),
        ((0.1, 2.0), "open"),
        ((math.nan, math.nan), "open"),
        ((0.3, 0.3), "changed"),
    ],
)
def test_a_sign_is_open_where_its_interval_covers_a_threshold(ends, state):
    from driftlab.drift.verdicts import sign
    from driftlab.intervals import Interval

    assert sign("it", Interval(0.6, *ends), least=0.5, most=1.0).state == state


# ---- accuracy by depth


def acceptance_of(match, valid, **others):
    """An Acceptance of given [prompt start depth] arrays."""
    from driftlab import Acceptance

    match, valid = torch.as_tensor(match), torch.as_tensor(valid)
    prompts, starts, _ = match.shape
    names = tuple(f"p:{i}" for i in range(prompts))
    return Acceptance(
        match=match & valid,
        valid=valid,
        remaining=valid.sum(-1),
        rows=torch.arange(starts).expand(prompts, -1) + 2,
        ids=names,
        categories=("",) * prompts,
        finish=("length",) * prompts,
        **others,
    )


def two_prompts():
    """Depth 4, five starts with fewer and fewer comparable depths; prompt 0 matches always to depth 2 and half deeper."""
    valid = (torch.arange(5)[:, None] + torch.arange(4) < 7).expand(2, -1, -1).clone()
    match = torch.ones(2, 5, 4, dtype=torch.bool)
    match[0, ::2, 2:] = False
    match[1, 1:, 3] = False
    return match, valid


def test_match_kept_is_over_the_same_starts():
    from driftlab.drift import match_kept

    acceptance = acceptance_of(*two_prompts())
    # depth 4 is judged at four starts of each prompt: 2 and 1 matches; depth 2 there: 4 and 4
    kept = match_kept(acceptance, 2, 4)
    assert kept.value == pytest.approx(3 / 8)
    assert kept.low < 1 / 4
    assert kept.high > 2 / 4
    assert match_kept(acceptance, 4, 2).value == pytest.approx(8 / 3)
    nothing = acceptance_of(torch.zeros(2, 5, 4, dtype=torch.bool), two_prompts()[1])
    assert math.isnan(match_kept(nothing, 2, 4).value)
    short = two_prompts()[1]
    short[..., 3] = False
    assert math.isnan(match_kept(acceptance_of(two_prompts()[0], short), 2, 4).value)  # no answer is so long


def test_conditional_kept_is_a_ratio_of_ratios():
    from driftlab.drift import conditional_kept
    from driftlab.drift.extrapolation import ratio_of_ratios
    from driftlab.simulation import Simulation

    acceptance = acceptance_of(*two_prompts())
    counts = {0: ([9, 6, 4, 2], [10, 9, 6, 4]), 1: ([8, 4, 3, 1], [10, 8, 4, 3])}

    class Counted(Simulation):
        def by_depth(self, index):
            return counts[index]

    assert conditional_kept(Counted((), acceptance), 2, 4).value == pytest.approx((3 / 7) / (10 / 17))
    ones = np.ones(3)
    assert ratio_of_ratios(ones, 2 * ones, ones, 4 * ones) == pytest.approx((2, 2, 2))
    assert math.isnan(ratio_of_ratios(ones, ones, 0 * ones, ones).value)
    assert math.isnan(ratio_of_ratios(ones, 0 * ones, ones, ones).value)


def test_only_text_fed_chains_have_an_accuracy_by_depth():
    from driftlab import DriftlabError
    from driftlab.drift import match_kept

    acceptance = acceptance_of(*two_prompts())
    with pytest.raises(DriftlabError, match=r"depths 1\.\.4; draft deeper"):
        match_kept(acceptance, 2, 8)
    with pytest.raises(DriftlabError, match="fed the text"):
        match_kept(dataclasses.replace(acceptance, feed="own"), 1, 2)


def test_accuracy_rows_stand_side_by_side():
    from driftlab import simulate
    from driftlab.drift import accuracy_rows, conditional_kept, match_kept
    from driftlab.results import check

    _, acceptance = run(constructed(push=20.0, lure=0.1), texts(prompts=4, answer=20))
    simulation = simulate(acceptance)
    rows = accuracy_rows(simulation, 2, target="tiny")
    check(rows)
    by = rows.set_index(["quantity", "depth"])
    for k in range(1, 5):
        expected = float(acceptance.match[..., k - 1].sum() / acceptance.valid[..., k - 1].sum())
        assert by.loc[("match", k), "value"] == pytest.approx(expected)
        passed, reached = (sum(simulation.by_depth(i)[side][k - 1] for i in range(4)) for side in (0, 1))
        assert by.loc[("accept_conditional", k), "n"] == reached
        if reached:
            assert by.loc[("accept_conditional", k), "value"] == pytest.approx(passed / reached)
    assert (by.loc[("match", 3), "value"], by.loc[("match", 2), "value"] > 0.5) == (0, True)
    assert by.loc[("match_kept", 4), ["value", "window"]].tolist() == [match_kept(acceptance, 2, 4).value, 2]
    kept = conditional_kept(simulation, 2, 4).value
    assert by.loc[("conditional_kept", 4), "value"] == pytest.approx(kept, nan_ok=True)
    assert "match_kept" not in set(rows[rows["depth"] == 8]["quantity"])  # 4 T was not drafted
    assert set(rows[rows["quantity"].str.startswith("match")]["starts"]) == {"all"}
    assert set(rows[rows["quantity"].str.contains("conditional")]["starts"]) == {"walk"}


# ---- rows


def test_rows_obey_the_contract_and_hold_what_the_functions_say():
    from driftlab.drift import drift, drift_rows, growth, null, over_heads, segment_gain
    from driftlab.results import check
    from driftlab.segments import Segment

    record, _ = run(constructed(push=2.0), texts(prompts=3, answer=12), 3)
    rows = drift_rows(record, samples=40, feed="text", target="tiny")
    check(rows)
    assert set(rows["depth"]) == {1, 2, 3}
    assert (set(rows["variant"]), set(rows["ttt"]), set(rows["dtype"])) == ({"eagle3"}, {2}, {"float64"})
    assert (set(rows["depth_max"]), set(rows["starts"]), set(rows["feed"])) == ({3}, {"all"}, {"text"})
    pooled = rows[rows["prompt"] == ""].set_index(["quantity", "depth"])
    mean = over_heads(drift(record, 3))
    assert pooled.loc[("drift_tv", 3), "value"] == pytest.approx(np.nanmean(mean))
    assert pooled.loc[("drift_tv", 3), "n"] == np.isfinite(mean).sum()
    assert pooled.loc[("sink_loss", 3), "value"] == pytest.approx(-np.nanmean(segment_gain(record, 3, Segment.SINK)))
    assert pooled.loc[("growth", 3), "value"] == growth(record, 3).value
    both = ~np.isnan(over_heads(null(record, 3)))
    excess = mean[both].mean() - over_heads(null(record, 3))[both].mean()
    assert pooled.loc[("drift_tv_excess", 3), "value"] == pytest.approx(excess)
    shares = [pooled.loc[(f"aux{i}_projection_share", 1), "value"] for i in range(3)]
    assert shares == pytest.approx([1, 0, 0])  # fc reads the lowest state alone
    one = rows[
        (rows["prompt"] == "p:1") & (rows["head"] == 2) & (rows["quantity"] == "drift_tv") & (rows["depth"] == 2)
    ]
    assert one["value"].item() == pytest.approx(np.nanmean(drift(record, 2)[record.prompt == 1, 0, 2]))
    ends = pooled[pooled["low"].notna()]
    assert (ends["low"] <= ends["value"] + 1e-12).all()
    assert (ends["value"] <= ends["high"] + 1e-12).all()
    assert set(drift_rows(record, heads=False, samples=20)["prompt"]) == {""}


def test_other_sinks_give_frames_of_their_own(tiny_trajectory, make_drafter):
    from driftlab import DriftlabError, SinkSearch, all_starts
    from driftlab.drift import Recorder, by_sinks, relative_sink_loss

    drafter = make_drafter("eagle3")
    shared = min(entry.prompt_length for entry in tiny_trajectory.entries)
    with SinkSearch(drafter) as search:
        all_starts(drafter, tiny_trajectory, 1)
    found = search.top(1)[0][0]
    choices = {(0,), tuple(range(shared)), (found,)}
    losses = by_sinks(drafter, tiny_trajectory, sorted(choices), depth=3)
    assert set(losses) == choices
    with Recorder(drafter, depth=3) as recorder:
        all_starts(drafter, tiny_trajectory.with_sinks([0]), 3)
    assert np.array_equal(losses[0,].mass, recorder.record().mass)
    wide, narrow = losses[tuple(range(shared))], losses[0,]
    assert (wide.mass[..., 0] >= narrow.mass[..., 0] - 1e-6).all()
    assert wide.mass[..., 3] == pytest.approx(narrow.mass[..., 3])
    assert relative_sink_loss(wide, 3).value != relative_sink_loss(narrow, 3).value
    for wrong in ([], [(0,), (0,)]):
        with pytest.raises(DriftlabError, match="each once"):
            by_sinks(drafter, tiny_trajectory, wrong, depth=2)
