"""The walk and tau, by hand: bonus, EOS and limit; pooled and per prompt; what all starts would say instead."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_acceptance import batch_of, draft_of, oracle

from driftlab import accept, all_starts, engine_report, simulate
from driftlab.acceptance import Acceptance
from driftlab.intervals import Interval, limits, weighted_mean
from driftlab.results import COLUMNS, as_rows
from driftlab.simulation import Round, Simulation, walk


def rounds_of(lengths, *, finish="length", first_row=4):
    """Walk one text in which the start after i tokens accepts ``lengths[i]``."""
    remaining = list(range(len(lengths), -1, -1))
    return list(walk([*lengths, 0], remaining, first_row=first_row, stopped=finish == "stop"))


def acceptance_of(*sequences, depth, finish=None):
    """Return the table in which every start of each sequence accepts the given number of drafts, as far as there is text.

    ``sequences[i][s]`` belongs to the start that has s + 1 answer tokens; one more start is at the last token.
    """
    starts = max(map(len, sequences)) + 1
    remaining = torch.zeros(len(sequences), starts, dtype=torch.long)
    valid = torch.zeros(len(sequences), starts, depth, dtype=torch.bool)
    match = torch.zeros_like(valid)
    for i, lengths in enumerate(sequences):
        for s, length in enumerate(lengths):
            remaining[i, s] = len(lengths) - s
            valid[i, s, : len(lengths) - s] = True
            match[i, s, :length] = True
    return Acceptance(
        match=match & valid,
        valid=valid,
        remaining=remaining,
        rows=torch.arange(starts).expand(len(sequences), starts) + 2,
        ids=tuple(f"p{i}" for i in range(len(sequences))),
        categories=("",) * len(sequences),
        finish=tuple(finish or ["length"] * len(sequences)),
    )


def text_with_rounds(*accepted):
    """Return accept lengths per start such that the walk makes exactly these rounds, all complete."""
    return [value for a in accepted for value in (a, *[0] * a)]


def values(simulation, quantity):
    return {(r["prompt"], r.get("depth", 0)): r["value"] for r in simulation.records() if r["quantity"] == quantity}


# ---- the walk


@pytest.mark.parametrize(
    ("lengths", "finish", "expected"),
    [
        # nothing accepted: one token a round, the last one being the limit's or EOS itself, as the target's own
        ([0, 0, 0], "length", [(0, 1, "bonus")] * 3),
        ([0, 0, 0], "stop", [(0, 1, "bonus")] * 3),
        # two accepted and the bonus is the last token of the text: complete, whether EOS or limit
        ([2, 9, 9], "length", [(2, 3, "bonus")]),
        ([2, 9, 9], "stop", [(2, 3, "bonus")]),
        # the last draft accepted is EOS: a complete round without bonus
        ([3, 9, 9], "stop", [(3, 3, "eos")]),
        ([0, 2, 9], "stop", [(0, 1, "bonus"), (2, 2, "eos")]),
        ([0, 0, 1], "stop", [(0, 1, "bonus"), (0, 1, "bonus"), (1, 1, "eos")]),
        # drafts beyond the text could not be compared, so the accept length is unknown
        ([3, 9, 9], "length", [(3, 3, "cut")]),
        ([0, 2, 9], "length", [(0, 1, "bonus"), (2, 2, "cut")]),
        ([1, 9, 1], "length", [(1, 2, "bonus"), (1, 1, "cut")]),
        # nothing after the prefill's token
        ([], "length", []),
        ([], "stop", []),
    ],
)
def test_rounds_start_behind_what_the_last_one_emitted(lengths, finish, expected):
    rounds = rounds_of(lengths, finish=finish)
    assert [(r.accepted, r.emitted, r.end) for r in rounds] == expected
    rows = 4 + np.cumsum([0, *[emitted for _, emitted, _ in expected]])
    assert [r.row for r in rounds] == rows[: len(rounds)].tolist()


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 7), max_size=40),
    depth=st.integers(1, 7),
    finish=st.sampled_from(["stop", "length"]),
)
def test_the_rounds_partition_the_text(lengths, depth, finish):
    """Every token after the prefill's is emitted by exactly one round, in order, and only the last round may be short."""
    kept = [min(length, depth, len(lengths) - s) for s, length in enumerate(lengths)]
    simulation = simulate(acceptance_of(kept, depth=depth, finish=[finish]))
    rounds = simulation.rounds[0]
    place = 0
    for r in rounds:
        assert r.row == 2 + place
        assert 1 <= r.emitted <= depth + 1
        assert r.accepted == kept[place]
        place += r.emitted
    assert place == len(lengths)
    assert all(r.end == "bonus" and r.emitted == r.accepted + 1 for r in rounds[:-1])
    if rounds and rounds[-1].end != "bonus":
        assert rounds[-1].end == ("eos" if finish == "stop" else "cut")
        assert rounds[-1].emitted == rounds[-1].accepted
    assert simulation.emitted.sum() == sum(r.emitted for r in rounds if r.end != "cut")
    assert simulation.verify_rounds.sum() == sum(r.end != "cut" for r in rounds)


@settings(max_examples=200, deadline=None)
@given(reach=st.lists(st.integers(0, 6), min_size=1, max_size=40))
def test_tau_does_not_fall_with_depth(reach):
    """No cut, and a start further on never reaches less far: then a deeper draft never needs more rounds."""
    ends = np.maximum.accumulate([s + length for s, length in enumerate(reach)]).clip(max=len(reach))
    lengths = [int(end) - s for s, end in enumerate(ends)]
    taus = []
    for depth in range(1, 8):
        simulation = simulate(acceptance_of([min(length, depth) for length in lengths], depth=depth, finish=["stop"]))
        assert int(simulation.emitted.sum()) == len(reach)
        taus.append(simulation.tau)
    assert taus == sorted(taus)


# ---- tau


def test_tau_counts_the_bonus_token_and_acceptance_does_not():
    """G1: accepted [3, 0, 1], K = 3."""
    simulation = simulate(acceptance_of(text_with_rounds(3, 0, 1), depth=3))
    assert [r.accepted for r in simulation.rounds[0]] == [3, 0, 1]
    assert simulation.tau == pytest.approx(7 / 3)
    unconditional = values(simulation, "accept_unconditional")
    assert sum(unconditional.values()) == pytest.approx(4 / 3)  # accepted per round, without bonus
    assert sum(unconditional.values()) / 3 == pytest.approx(4 / 9)  # the acceptance rate of engines


def test_tau_is_pooled_and_the_mean_over_prompts_can_be_had():
    """G2: tokens per round [[4, 4], [1]]."""
    simulation = simulate(acceptance_of(text_with_rounds(3, 3), text_with_rounds(0), depth=3))
    assert [[r.emitted for r in rounds] for rounds in simulation.rounds] == [[4, 4], [1]]
    assert simulation.tau == pytest.approx(3.0)
    emitted, rounds = values(simulation, "emitted"), values(simulation, "rounds")
    assert np.mean([emitted[key] / rounds[key] for key in emitted]) == pytest.approx(2.5)


def test_acceptance_by_depth_is_given_both_ways():
    """G3: accepted [3, 3, 1, 0]; the unconditional shares sum to the mean accepted."""
    simulation = simulate(acceptance_of(text_with_rounds(3, 3, 1, 0), depth=3))
    assert list(values(simulation, "accept_unconditional").values()) == pytest.approx([0.75, 0.5, 0.5])
    assert list(values(simulation, "accept_conditional").values()) == pytest.approx([0.75, 2 / 3, 1.0])


def test_tau_is_not_the_product_of_the_acceptance_by_depth():
    """G4: half of the rounds accept everything and half nothing: tau 2.0; the product of 0.5 and 0.5 says 1.75."""
    simulation = simulate(acceptance_of(text_with_rounds(2, 0, 0, 2, 2, 0), depth=2))
    assert simulation.tau == pytest.approx(2.0)
    first, second = values(simulation, "accept_unconditional").values()
    assert 1 + first + first * second == pytest.approx(1.75)
    assert set(values(simulation, "tau").values()) == {2.0}


def test_an_engines_counters():
    """G6: vLLM's 4816 drafts of 7 tokens, 12208 accepted: 3.53 and 36.2 %."""
    accepted = np.full(4816, 12208 // 4816)
    accepted[: 12208 % 4816] += 1
    rounds = tuple(Round(0, int(a), int(a) + 1, "bonus") for a in accepted)
    simulation = Simulation((rounds,), acceptance_of([0], depth=7))
    assert simulation.tau == pytest.approx(3.53, abs=0.01)
    assert sum(values(simulation, "accept_unconditional").values()) / 7 == pytest.approx(0.362, abs=5e-4)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_the_oracle_has_depth_plus_one_and_the_always_wrong_exactly_one(depth):
    """INV8, on uncut rounds; an acceptance of 0 is 0 and not missing."""
    batch = batch_of([1, 2, *range(3, 3 + 4 * (depth + 1))], list(range(20, 31)), prompts=[1, 3])
    right = simulate(accept(oracle(batch, depth), batch))
    assert right.tau == depth + 1
    assert all(r.emitted == depth + 1 for rounds in right.complete for r in rounds)
    assert right.all_starts_mean == depth + 1
    wrong_draft = draft_of(batch, torch.full_like(oracle(batch, depth).tokens, 60))
    wrong = simulate(accept(wrong_draft, batch))
    assert wrong.tau == 1.0
    assert wrong.all_starts_mean == 1.0
    for quantity in ("match", "accept_unconditional"):
        assert set(values(wrong, quantity).values()) == {0.0}
    first = [value for (_, k), value in values(wrong, "accept_conditional").items() if k == 1]
    assert first == [0.0, 0.0]


def test_a_round_that_the_limit_cuts_is_left_out_and_one_that_eos_ends_is_not():
    lengths = [*text_with_rounds(1, 0), 2, 2]
    limit = simulate(acceptance_of(lengths, depth=3, finish=["length"]))
    eos = simulate(acceptance_of(lengths, depth=3, finish=["stop"]))
    assert [r.end for r in limit.rounds[0]] == ["bonus", "bonus", "cut"]
    assert (limit.emitted.tolist(), limit.verify_rounds.tolist(), limit.tau) == ([3], [2], 1.5)
    assert [r.end for r in eos.rounds[0]] == ["bonus", "bonus", "eos"]
    assert (eos.emitted.tolist(), eos.verify_rounds.tolist()) == ([5], [3])
    assert eos.tau == pytest.approx(5 / 3)


@pytest.mark.parametrize("sequences", [[[]], [[], []], [[2, 2]]])
def test_no_complete_round_is_no_tau(sequences):
    """Answers of one token, or one round that the limit cut: missing, not 0."""
    simulation = simulate(acceptance_of(*sequences, depth=3))
    assert math.isnan(simulation.tau)
    assert math.isnan(simulation.tau_interval().low)
    rows = as_rows(simulation.records())
    assert rows.loc[rows["quantity"] == "tau", "value"].isna().all()
    assert rows.loc[rows["quantity"] == "tau", "n"].tolist() == [0]


def test_a_prompt_without_rounds_does_not_move_tau():
    with_one = simulate(acceptance_of(text_with_rounds(1, 2), [], depth=2))
    assert with_one.tau == simulate(acceptance_of(text_with_rounds(1, 2), depth=2)).tau == 2.5


def test_the_mean_over_all_starts_is_another_number():
    """Rounds start where the last draft failed: 8 starts that accept 2, 1, 0, ... are walked at the harder places."""
    lengths = [2, 1, 0, 2, 1, 0, 0, 0]
    simulation = simulate(acceptance_of(lengths, depth=2, finish=["stop"]))
    assert [r.accepted for r in simulation.rounds[0]] == [2, 2, 0, 0]
    assert simulation.tau == 2.0
    assert simulation.all_starts_mean == pytest.approx(1 + sum(lengths[:7]) / 7)  # the last start has one token left
    assert set(values(simulation, "all_starts_mean").values()) == {simulation.all_starts_mean}


def test_the_interval_holds_tau_and_follows_its_seed():
    texts = [text_with_rounds(*accepted) for accepted in ((1, 2), (0, 0, 2), (2, 2, 2), (1, 0), (0,))]
    simulation = simulate(acceptance_of(*texts, depth=2))
    interval = simulation.tau_interval(seed=3)
    assert interval.value == simulation.tau
    assert interval.low < simulation.tau < interval.high
    assert interval == simulation.tau_interval(seed=3) != simulation.tau_interval(seed=4)
    two = simulate(acceptance_of(*texts[1:3], depth=2)).tau_interval()
    assert (two.low, two.high) == (1, 3)  # two prompts widen it beyond what tau can be


@pytest.mark.parametrize(
    ("quantity", "depth_max", "ends"),
    [
        ("tau", 8, (1, 9)),
        ("iid_formula", 0, (1, math.inf)),
        ("match", 8, (0, 1)),
        ("mass_self_null", 8, (0, 1)),
        ("rms_feedback", 8, (0, math.inf)),
        ("entropy", 8, (0, math.inf)),
        ("entropy_relative", 8, (0, 1)),
        ("residual", 8, (-math.inf, math.inf)),
    ],
)
def test_what_a_quantity_can_be(quantity, depth_max, ends):
    assert limits(quantity, depth_max) == ends


def test_ends_are_cut_and_the_value_is_not():
    assert Interval(0.4, -0.2, 1.3).within(0, 1) == (0.4, 0, 1)
    assert Interval(0.4, 0.1, 0.9).within(0, 1) == (0.4, 0.1, 0.9)
    assert Interval(1 + 1e-15, 0.5, 2.0).within(0, 1).high == 1 + 1e-15  # rounding: the value stays between its ends
    assert all(math.isnan(end) for end in Interval(0.4, math.nan, math.nan).within(0, 1)[1:])


# ---- rows


def test_records_are_rows_that_pool_to_the_pooled_numbers(varied_trajectory, trained):
    acceptance = accept(all_starts(trained["eagle31"], varied_trajectory, 3), varied_trajectory)
    simulation = simulate(acceptance)
    rows = as_rows(simulation.records(), variant="eagle31", depth_max=3)
    assert list(rows.columns) == list(COLUMNS)
    assert set(rows["quantity"]) == {
        *("emitted", "rounds", "match", "accept_unconditional", "accept_conditional", "tau", "all_starts_mean"),
        "tau_uncensored",
    }
    prompts = {entry.id for entry in varied_trajectory.entries}
    assert set(rows.loc[~rows["quantity"].isin(["tau", "tau_uncensored", "all_starts_mean"]), "prompt"]) == prompts
    assert rows.loc[rows["quantity"] == "emitted", "value"].sum() == simulation.emitted.sum()
    tau = rows[rows["quantity"] == "tau"].iloc[0]
    assert tau["value"] == simulation.tau
    assert tau["low"] <= tau["value"] <= tau["high"]
    assert tau["n"] == rows.loc[rows["quantity"] == "rounds", "value"].sum() == simulation.verify_rounds.sum()
    for k in range(1, 4):
        match = rows[(rows["quantity"] == "match") & (rows["depth"] == k)]
        share = acceptance.match[..., k - 1].sum() / acceptance.valid[..., k - 1].sum()
        pooled = (match["value"] * match["n"]).sum() / match["n"].sum()
        assert pooled == pytest.approx(float(share))
        reached = [r for rounds in simulation.rounds for r in rounds if r.accepted >= k - (r.end == "bonus")]
        given_all = rows[(rows["quantity"] == "accept_conditional") & (rows["depth"] == k)]
        assert given_all["n"].sum() == len(reached)
    assert simulation.tau > 1.5  # there was something to pool
    assert len(weighted_mean(rows[rows["quantity"] == "match"], by=["depth"])) == 3


def test_categories_travel_with_the_prompts():
    simulation = simulate(acceptance_of(text_with_rounds(1), depth=2))
    records = list(simulation.records())
    assert {r.get("category", "") for r in records} == {""}
    assert {r["prompt"] for r in records} == {"p0", ""}


def test_leaving_out_rounds_by_where_they_start_is_not_biased_by_the_length_limit():
    """Independent acceptance 0.8, K = 8, answers of 24: leaving out only the cut rounds lowers tau (4.33 in truth)."""
    import numpy as np

    generator = np.random.default_rng(0)
    share, depth, length, texts = 0.8, 8, 24, 1500
    truth = (1 - share ** (depth + 1)) / (1 - share)
    counted = {"tau": [0, 0], "uncensored": [0, 0]}
    for _ in range(texts):
        misses = generator.random((length, depth)) >= share
        accepts = np.where(misses.any(1), misses.argmax(1), depth)
        left = list(range(length - 1, -1, -1))
        for r in walk(accepts.tolist(), left, first_row=0, stopped=False):
            if r.end != "cut":
                for name, counts in (("tau", True), ("uncensored", left[r.row] > depth)):
                    counted[name][0] += r.emitted * counts
                    counted[name][1] += counts
    tau, uncensored = (emitted / rounds for emitted, rounds in counted.values())
    assert tau < 0.95 * truth
    assert uncensored == pytest.approx(truth, rel=0.02)


def test_a_round_that_an_accepted_eos_ends_is_not_a_rejection_at_the_next_depth():
    (only,) = walk([2], [2], first_row=0, stopped=True)
    assert (only.end, only.accepted) == ("eos", 2)
    simulation = simulate(acceptance_of(text_with_rounds(1), depth=2))
    eos = type(simulation)(((Round(0, 1, 1, "eos"), Round(0, 2, 3, "bonus")),), simulation.acceptance)
    rows = {(r["quantity"], r.get("depth")): (r["value"], r["n"]) for r in eos.records()}
    assert rows["accept_conditional", 1] == (1.0, 2)
    assert rows["accept_conditional", 2] == (1.0, 1)
    assert rows["accept_unconditional", 2] == (0.5, 2)


# ---- the record for other tools


def histogram_acceptance(probability, finish, sampled):
    """One prompt with a text of as many tokens after the first as there are starts."""
    table = torch.tensor(probability, dtype=torch.float64)[None]
    starts, depth = table.shape[1:]
    remaining = torch.arange(starts - 1, -1, -1)[None]
    valid = torch.arange(1, depth + 1) <= remaining[..., None]
    return Acceptance(
        match=(table > 0.5) & valid,
        valid=valid,
        remaining=remaining,
        rows=torch.arange(starts)[None],
        ids=("a",),
        categories=("c",),
        finish=(finish,),
        rule="rejection" if sampled else "argmax",
        sampled=table.masked_fill(~valid, 0) if sampled else None,
    )


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_histograms_by_hand(finish):
    """K = 2, five starts, certain drafts: rounds at 0 (accepts 1), 2 (accepts 0), 3 (the last token, by draft)."""
    certain = [[1, 0], [1, 1], [0, 1], [1, 1], [0, 0]]
    (record,) = simulate(histogram_acceptance(certain, finish, False)).histograms()
    assert record.bonus == (1, 1, 0)
    assert (record.eos, record.cut) == (((0, 1, 0), (0, 0, 0)) if finish == "stop" else ((0, 0, 0), (0, 1, 0)))
    assert record.tokens == 5
    (expected,) = simulate(histogram_acceptance(certain, finish, True)).histograms()
    assert (expected.bonus, expected.eos, expected.cut) == (record.bonus, record.eos, record.cut)


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_expected_histograms_hold_the_moments(finish):
    """Two tokens left, K = 2, probabilities a, b at the first start and c at the second: by hand."""
    a, b, c = 0.6, 0.3, 0.8
    outcome = simulate(histogram_acceptance([[a, b], [c, 0.5], [0.5, 0.5]], finish, True))
    (record,) = outcome.histograms()
    assert record.bonus == pytest.approx([(1 - a) + (1 - a) * (1 - c), a * (1 - b), 0])
    last = record.eos if finish == "stop" else record.cut
    assert last == pytest.approx([0, (1 - a) * c, a * b])
    counted = record.rounds - sum(record.cut)
    assert counted == pytest.approx(outcome.verify_rounds[0])
    assert record.emitted - sum(k * n for k, n in enumerate(record.cut)) == pytest.approx(outcome.emitted[0])
    assert record.tokens == pytest.approx(3)
    assert engine_report("driftlab", [record])["tau"].value == pytest.approx(outcome.tau)


def test_the_convention_of_this_package_is_tau(varied_trajectory, make_drafter):
    """By pooled counts and by depth, on real walks."""
    outcome = simulate(accept(all_starts(make_drafter("eagle31"), varied_trajectory, 3), varied_trajectory))
    report = engine_report("driftlab", outcome.histograms())
    assert report["tau"].value == outcome.tau
    passed, reached = np.sum([outcome.by_depth(i) for i in range(len(varied_trajectory))], axis=0)
    for k in range(3):
        if reached[k]:
            assert report["accept_conditional", k + 1].value == pytest.approx(passed[k] / reached[k])
        unconditional = sum(r.accepted > k for rounds in outcome.complete for r in rounds)
        assert report["accept_unconditional", k + 1].value == pytest.approx(unconditional / outcome.verify_rounds.sum())


@pytest.mark.parametrize("sampled", [False, True])
def test_acceptance_by_depth_of_a_constant_drafter_does_not_change_with_depth(sampled):
    """Texts cut by the limit: leaving out the cut rounds made a constant .8 rise from .771 to .792."""
    starts, depth = 24, 8
    table = histogram_acceptance(np.full((starts + 1, depth), 0.8).tolist(), "length", True)
    if not sampled:
        generator = np.random.default_rng(0)
        runs = [
            histogram_acceptance((generator.random((starts + 1, depth)) < 0.8).tolist(), "length", False)
            for _ in range(600)
        ]
        passed, reached = np.sum([simulate(run).by_depth(0) for run in runs], axis=0)
    else:
        passed, reached = np.array(simulate(table).by_depth(0))
    tolerance = 1e-9 if sampled else 4 * np.sqrt(0.16 / reached.min())
    np.testing.assert_allclose(passed / reached, 0.8, atol=tolerance)
