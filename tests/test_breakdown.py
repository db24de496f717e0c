"""Buckets, repetition and the starts that differ most, by hand."""

import dataclasses
import math

import pytest
import torch
from test_estimators import random_table, table_of
from test_results import widening
from test_simulation import acceptance_of, text_with_rounds

from driftlab import DriftlabError, accept, all_starts, simulate
from driftlab.breakdown import buckets, most_different, repetition, repetition_records
from driftlab.intervals import weighted_mean
from driftlab.results import as_rows


def lines(frame, *columns):
    return list(frame[list(columns)].itertuples(index=False, name=None))


# ---- buckets


def test_a_round_belongs_to_the_bucket_in_which_it_starts():
    """p0: accepts 1, 3, 0 at 1, 3, 7 answer tokens; p1: 0, 2 at 1, 2. The round that begins at 3 ends at 7."""
    table = acceptance_of(text_with_rounds(1, 3, 0), text_with_rounds(0, 2), depth=3, finish=["stop"] * 2)
    frame = buckets(simulate(table), "position", edges=(1, 3, 5, 8), samples=50)
    assert lines(frame, "bucket", "begin", "end", "tau", "rounds", "prompts") == [
        ("1-2", 1, 2, (2 + 1 + 3) / 3, 3.0, 2),
        ("3-4", 3, 4, 4.0, 1.0, 1),
        ("5-7", 5, 7, 1.0, 1.0, 1),
    ]
    # one prompt alone says nothing about others
    assert frame["low"].isna().tolist() == [False, True, True]
    assert not frame["beyond_trained"].any()
    # under a length limit rounds at 7 of p0 and 2 of p1 have 1 and 3 tokens left, no more than K, and are not judged
    limited = simulate(dataclasses.replace(table, finish=("length",) * 2))
    assert lines(buckets(limited, "position", edges=(1, 3, 5, 8)), "bucket", "tau", "rounds") == [
        ("1-2", (2 + 1) / 2, 2.0),
        ("3-4", 4.0, 1.0),
    ]


@pytest.mark.parametrize("by", ["position", "context", "category"])
@pytest.mark.parametrize("tokens", [130, 135, 140])
def test_a_constant_drafter_is_constant_up_to_the_limit(by, tokens):
    """Acceptance .8 everywhere, K = 8: (1 - .8^9) / .2 in every bucket, whatever is left of the text in the last one."""
    sequence = [(0.8,) * min(8, tokens - s) for s in range(tokens)]
    table = table_of(sequence, sequence[40:], depth=8, sampled=True)
    frame = buckets(simulate(table), by, samples=5)
    assert frame["tau"].tolist() == pytest.approx([(1 - 0.8**9) / 0.2] * len(frame))
    # starts of tokens - 8 answer tokens and fewer have more than 8 left, and there are 3 more tokens of context
    last = {"position": tokens - 8, "context": tokens - 8 + 3, "category": 0}[by]
    assert frame["begin"].max() <= last
    assert (frame["begin"].max() == 128) == (last >= 128)


def test_without_a_round_that_counts_there_is_no_bucket_but_its_columns():
    frame = buckets(simulate(acceptance_of([1, 0], depth=3)), "position")
    assert frame.empty
    # so that it can stand beside others in one table
    full = buckets(simulate(acceptance_of([1, 0, 0, 0, 0], depth=3)), "position")
    assert frame.dtypes.to_dict() == full.dtypes.to_dict()


def test_context_counts_the_tokens_of_prompt_and_answer():
    """First row 2: prompt of 3 tokens, and one of the answer: 4 tokens at the first round."""
    simulation = simulate(acceptance_of(text_with_rounds(1, 3, 0), depth=3, finish=["stop"]))
    frame = buckets(simulation, "context", edges=(4, 6, 10, 11))
    assert lines(frame, "bucket", "tau") == [("4-5", 2.0), ("6-9", 4.0), ("10-10", 1.0)]


def test_what_is_longer_than_the_training_is_marked():
    """L1. Contexts 4, 6 and 10; texts of at most 9 tokens were trained on, so 10 is beyond, whatever the edges."""
    simulation = simulate(acceptance_of(text_with_rounds(1, 3, 0), depth=3, finish=["stop"]))
    frame = buckets(simulation, "context", edges=(1, 20), trained_length=9)
    assert lines(frame, "bucket", "tau", "beyond_trained") == [("1-9", 3.0, False), ("10-19", 1.0, True)]
    inside = buckets(simulation, "context", edges=(1, 20), trained_length=10)
    assert lines(inside, "bucket", "beyond_trained") == [("1-10", False)]


def test_categories():
    table = table_of(
        *([(1, 1), (0, 0), (0,)], [(0, 0), (0,)], [(0, 1), (1,)]),
        depth=2,
        categories=["code", "chat", "code"],
        finish=["stop"] * 3,
    )
    frame = buckets(simulate(table), "category", samples=50)
    # code: 3 tokens in a round; then 1, and EOS as an accepted draft
    assert lines(frame, "bucket", "tau", "rounds", "prompts") == [("code", 5 / 3, 3.0, 2), ("chat", 1.0, 2.0, 1)]
    assert math.isnan(frame["low"].iloc[1])
    # resamples of the two give 1, 5/3 or 3; widened for two the ends are beyond what tau can be at K = 2
    assert 5 / 3 - widening(2) * (5 / 3 - 1) < 1 < 3 < 5 / 3 + widening(2) * (3 - 5 / 3)
    assert (frame["low"].iloc[0], frame["high"].iloc[0]) == (1, 3)


@pytest.mark.parametrize("by", ["position", "context", "category"])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("finish", ["stop", "length"])
def test_default_buckets_hold_every_round_of_tau_uncensored(by, sampled, finish):
    simulation = simulate(random_table(2, sampled=sampled, finish=finish, prompts=8))
    frame = buckets(simulation, by, samples=20)
    emitted, rounds = simulation.uncensored
    assert frame["rounds"].sum() == pytest.approx(rounds)
    assert (frame["tau"] * frame["rounds"]).sum() == pytest.approx(emitted)


def test_default_edges_double():
    """Of the seven starts from 64 on the last has one token left, no more than K."""
    simulation = simulate(acceptance_of([0] * 70, depth=1))
    frame = buckets(simulation, "position", samples=5)
    assert lines(frame, "begin", "end", "rounds") == [(1, 15, 15.0), (16, 31, 16.0), (32, 63, 32.0), (64, 71, 6.0)]


@pytest.mark.parametrize(
    ("by", "options", "message"),
    [
        ("position", {"edges": (3, 3)}, "ascending"),
        ("position", {"edges": (3,)}, "at least two"),
        ("category", {"edges": (1, 3)}, "categories have none"),
        ("position", {"trained_length": 9}, "trained_length"),
    ],
)
def test_senseless_buckets_are_refused(by, options, message):
    with pytest.raises(DriftlabError, match=message):
        buckets(simulate(acceptance_of([0, 0], depth=1)), by, **options)


# ---- repetition


@pytest.mark.parametrize(
    ("tokens", "ngrams", "tail", "period"),
    [
        ([1, 2, 3, 4, 5, 6], 0, 0, 0),
        # grams 1212 2121 1212 2121 1212: three of five are not new; all eight have period 2
        ([1, 2, 1, 2, 1, 2, 1, 2], 3 / 5, 1, 2),
        # 5 is before the loop; 1231 2312 3123 come again: grams at 1..7, first three new, and 5123 new
        ([5, 1, 2, 3, 1, 2, 3, 1, 2, 3], 3 / 7, 9 / 10, 3),
        # repeated words, no loop at the end
        ([1, 2, 3, 4, 9, 1, 2, 3, 4, 8], 1 / 7, 0, 0),
        # a doubled last token, two periods of three, eight tokens of less than three periods: ordinary text
        ([1, 2, 3, 7, 7], 0, 0, 0),
        ([1, 6, 7, 7, 6, 7, 7], 0, 0, 0),
        ([9, 1, 2, 3, 1, 2, 3, 1, 2], 2 / 6, 0, 0),
        # three periods of less than eight tokens; seven and eight tokens
        ([1, 7, 8, 7, 8, 7, 8], 1 / 4, 0, 0),
        ([7] * 7, 3 / 4, 0, 0),
        ([1, 2, *[7] * 8], 4 / 7, 8 / 10, 1),
        # 7 7 at the end is shorter than 6 7 7 three times
        ([1, *[6, 7, 7] * 3], 3 / 7, 9 / 10, 3),
        # a period of nine is longer than looked for
        ([*range(9)] * 3, 15 / 24, 0, 0),
        ([*range(8)] * 2, 5 / 13, 0, 0),
        ([*range(8)] * 3, 13 / 21, 1, 8),
    ],
)
def test_repetition_by_hand(tokens, ngrams, tail, period):
    found = repetition(tokens)
    assert found.repeated_ngrams == pytest.approx(ngrams)
    assert (found.periodic_tail, found.period) == (pytest.approx(tail), period)
    assert (found.ngrams, found.tokens) == (len(tokens) - 3, len(tokens))


def test_texts_too_short_to_repeat_themselves_are_missing():
    assert math.isnan(repetition([1, 2, 3]).repeated_ngrams)
    assert repetition([1, 2, 3]).periodic_tail == 0
    assert repetition([5, 5]).periodic_tail == 0
    assert math.isnan(repetition([]).periodic_tail)
    assert repetition([1, 1, 2], n=1).repeated_ngrams == pytest.approx(1 / 3)


def test_repetition_is_of_the_answer_and_pools_by_token(tiny_target, tmp_path):
    """The prompt may repeat itself as it likes, and the EOS after a loop does not end the loop."""
    answers = [[7, 8, 7, 8, 7, 8, 7, 8, 2], [3, 4, 5, 6, 7, 8, 9, 10, 11, 12]]
    trajectory = tiny_target.record(
        ["aaaaaaaaaaaa", "b"], answers=answers, max_new_tokens=10, template=False, out=tmp_path / "r"
    )
    assert [entry.finish for entry in trajectory.entries] == ["stop", "length"]
    rows = as_rows(repetition_records(trajectory))
    assert lines(rows, "quantity", "window", "value", "n") == [
        ("repeated_ngrams", 4, pytest.approx(3 / 5), 5),
        ("periodic_tail", 8, 1, 8),
        ("repeated_ngrams", 4, 0, 7),
        ("periodic_tail", 8, 0, 10),
    ]
    pooled = weighted_mean(rows, by=["quantity"]).set_index("quantity")["value"]
    assert pooled["repeated_ngrams"] == pytest.approx(3 / 12)
    assert pooled["periodic_tail"] == pytest.approx(8 / 18)


# ---- the starts that differ most


@pytest.fixture(scope="module")
def two_replays(varied_trajectory, trained):
    drafts = [all_starts(trained[name], varied_trajectory, 4) for name in ("eagle31", "eagle3")]
    return [simulate(accept(d.upto(3), varied_trajectory)) for d in drafts], tuple(drafts), varied_trajectory


def words(ids):
    return " ".join(map(str, ids))


def made(lengths_a, lengths_b, depth=2):
    """Two replays of texts 100, 101, ... after a prompt of three, and their drafts: right as far as accepted, then 1."""
    from driftlab.draft import Draft

    replays = [simulate(acceptance_of(*lengths, depth=depth)) for lengths in (lengths_a, lengths_b)]
    texts = [torch.arange(100, 104 + len(lengths)) for lengths in lengths_a]
    drafts = []
    for replay in replays:
        table = replay.acceptance
        tokens = torch.ones(*table.match.shape, dtype=torch.long)
        for i, s, k in table.match.nonzero().tolist():
            tokens[i, s, k] = texts[i][table.rows[i, s] + 2 + k]
        drafts.append(Draft(tokens, table.rows, table.valid[..., 0], table.ids, "text"))
    return replays, tuple(drafts), texts


def test_the_starts_that_differ_most_come_first_with_their_text():
    replays, drafts, texts = made([[2, 0, 0, 1, 0, 0], [0, 2, 0, 0]], [[0, 0, 1, 0, 0, 0], [0, 0, 0, 0]])
    frame = most_different(*replays, drafts, texts, words, before=3)
    # s3 of p0 differs by one as s2 does, which comes before it and overlaps it
    assert lines(frame, "prompt", "row", "difference") == [("p0", 2, 2.0), ("p1", 3, 2.0), ("p0", 4, -1.0)]
    first = frame.iloc[0]
    # row 2 has token 3 (103) already and drafts 104, 105
    assert (first["before"], first["text"]) == ("101 102 103", "104 105")
    assert (first["drafted_a"], first["drafted_b"]) == ("104 105", "1 1")
    assert (first["accepted_a"], first["accepted_b"]) == (2.0, 0.0)
    assert len(most_different(*replays, drafts, texts, words, count=1)) == 1


def test_only_starts_on_one_of_the_walks():
    """Rounds that the limit cuts count as places too."""
    replays, drafts, texts = made([[2, 0, 0, 1, 0, 0], [0, 0, 0, 2, 0]], [[0, 0, 1, 0, 0, 0], [0, 1, 0, 0, 0]])
    assert [[r.row - 2 for r in rounds] for rounds in replays[0].rounds] == [[0, 3, 5], [0, 1, 2, 3]]
    assert [[r.row - 2 for r in rounds] for rounds in replays[1].rounds] == [[0, 1, 2, 4, 5], [0, 1, 3, 4]]
    frame = most_different(*replays, drafts, texts, words, on="walk")
    assert set(frame["weight"]) == {1.0}
    skipped = made([[1, 2, 0, 0]], [[1, 0, 0, 0]])
    assert lines(most_different(*skipped[0], *skipped[1:], words), "row") == [(3,)]
    assert most_different(*skipped[0], *skipped[1:], words, on="walk").empty  # both walks pass over s1


def test_expected_differences_are_weighted_by_the_chance_to_start_there():
    sequences = [[(0.5, 0.2), (0.8, 0.4), (0.6,)]], [[(0.5, 0.2), (0.1, 0.4), (0.2,)]]
    replays = [simulate(table_of(*s, depth=2, finish=["stop"], sampled=True)) for s in sequences]
    _, drafts, texts = made([[0, 0, 0]], [[0, 0, 0]])
    frame = most_different(*replays, drafts, texts, words, on="walk")
    # v of s1 is .5 in both, so .75 for either; accepted .8 + .32 and .1 + .04
    assert lines(frame, "row", "difference", "weight") == [(3, pytest.approx(0.98), pytest.approx(0.75))]


def test_on_a_recording_the_texts_are_its_own(two_replays):
    (a, b), drafts, trajectory = two_replays
    frame = most_different(a, b, drafts, trajectory, words, count=50, before=1000)
    assert len(frame) > 3
    sizes = frame["difference"].abs().tolist()
    assert sizes == sorted(sizes, reverse=True)
    for row in frame.itertuples():
        i = a.acceptance.ids.index(row.prompt)
        tokens = trajectory.tokens(i).tolist()
        assert row.before == words(tokens[: row.row + 2])
        assert row.text == words(tokens[row.row + 2 : row.row + 5])
        for drafted, accepted in ((row.drafted_a, row.accepted_a), (row.drafted_b, row.accepted_b)):
            agree = [x == y for x, y in zip(drafted.split(), row.text.split(), strict=False)]
            assert accepted == next((k for k, same in enumerate(agree) if not same), len(agree))


def test_what_does_not_belong_together_is_refused(two_replays):
    (a, b), drafts, trajectory = two_replays
    shallow = simulate(accept(drafts[0].upto(2), trajectory))
    with pytest.raises(DriftlabError, match="same K"):
        most_different(a, shallow, drafts, trajectory, words)
    with pytest.raises(DriftlabError, match="not as deep"):
        most_different(a, b, (drafts[0].upto(2), drafts[1]), trajectory, words)
    with pytest.raises(DriftlabError, match="not those that were replayed"):
        most_different(a, b, drafts, [trajectory.tokens(0)] * 4, words)
