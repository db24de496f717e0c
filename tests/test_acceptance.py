"""Which drafts match the recorded text, by hand; what a reduced draft vocabulary cannot propose is a rejection."""

import dataclasses
import math

import pytest
import torch
from conftest import VOCAB

from driftlab import DriftlabError, accept, all_starts, simulate
from driftlab.draft import Draft
from driftlab.recorded import Batch
from driftlab.results import as_rows
from driftlab.vocabulary import coverage


def batch_of(*texts, prompts, finish=None, width=4):
    """Return a batch of texts whose states are random."""
    generator = torch.Generator().manual_seed(0)
    longest = max(map(len, texts))
    return Batch(
        tokens=torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts]),
        aux=torch.randn(len(texts), longest, 2, width, generator=generator),
        last_hidden=torch.randn(len(texts), longest, width, generator=generator),
        lse=torch.zeros(len(texts), longest),
        lengths=torch.tensor([len(text) for text in texts]),
        prompt_lengths=torch.tensor(prompts),
        ids=tuple(f"p{i}" for i in range(len(texts))),
        finish=tuple(finish or ["length"] * len(texts)),
        sinks=(0,),
    )


def draft_of(batch, tokens):
    """Return a draft of every answer row of a batch; ``tokens [batch start depth]``."""
    starts = batch.starts
    return Draft(torch.as_tensor(tokens), starts.rows, starts.valid, batch.ids, "text")


def oracle(batch, depth):
    """Return the draft that is right wherever there is a text; 0 past its end."""
    rows = batch.starts.rows
    tokens = torch.nn.functional.pad(batch.tokens, (0, depth + 2))
    return draft_of(batch, torch.stack([tokens.gather(1, rows + k + 1) for k in range(1, depth + 1)], -1))


def test_a_start_at_row_t_drafts_token_t_plus_two():
    """Prompt [5 6], answer [7 8 9 7]: starts 1, 2, 3, 4 have 7, 8, 9, 7 already; only the first three can be wrong."""
    batch = batch_of([5, 6, 7, 8, 9, 7], prompts=[2], finish=["stop"])
    result = accept(draft_of(batch, [[[8, 9], [9, 8], [8, 8], [7, 7]]]), batch)
    assert result.rows.tolist() == [[1, 2, 3, 4]]
    assert result.match.tolist() == [[[True, True], [True, False], [False, False], [False, False]]]
    assert result.valid.tolist() == [[[True, True], [True, True], [True, False], [False, False]]]
    assert result.remaining.tolist() == [[3, 2, 1, 0]]
    assert result.accept_length.tolist() == [[2, 1, 0, 0]]
    assert (result.depth, result.ids, result.finish, result.rule) == (2, ("p0",), ("stop",), "argmax")


def test_a_match_behind_a_miss_is_not_accepted():
    batch = batch_of([5, 6, 7, 8, 9, 7], prompts=[2])
    result = accept(draft_of(batch, [[[0, 9, 7], [9, 0, 0], [7, 0, 0], [0, 0, 0]]]), batch)
    assert result.match[0, 0].tolist() == [False, True, True]
    assert result.accept_length[0].tolist() == [0, 1, 1, 0]


def test_padding_never_matches_even_where_the_tokens_agree():
    """Two texts of different length: the pad token 0 is drafted everywhere, and nothing past an end counts."""
    batch = batch_of([5, 6, 7, 8, 9, 7], [5, 0, 0, 0], prompts=[2, 1])
    result = accept(draft_of(batch, torch.zeros(2, 4, 3, dtype=torch.long)), batch)
    assert not result.match[0].any()
    assert result.valid[1].tolist() == [[True, True, False], [True, False, False], [False] * 3, [False] * 3]
    assert torch.equal(result.match[1], result.valid[1])
    assert result.remaining.tolist() == [[3, 2, 1, 0], [2, 1, 0, 0]]
    assert result.accept_length[1].tolist() == [2, 1, 0, 0]


def test_a_padded_start_never_matches_wherever_its_row_points():
    """Where batches were joined, the padding's row is 0, and the text there might be what was drafted."""
    batch = batch_of([5, 6, 7, 8, 9, 7], [5, 0, 0, 0], prompts=[2, 1])
    draft = draft_of(batch, torch.zeros(2, 4, 2, dtype=torch.long))
    joined = dataclasses.replace(draft, rows=torch.where(draft.valid, draft.rows, 0))
    result = accept(joined, batch)
    assert not result.match[1, 3].any()
    assert result.remaining[1, 3] == 0


def test_an_answer_of_one_token_has_nothing_to_draft():
    batch = batch_of([5, 6, 7], prompts=[2])
    result = accept(draft_of(batch, [[[1, 1]]]), batch)
    assert result.remaining.tolist() == [[0]]
    assert not result.valid.any()


@pytest.mark.parametrize("depth", [1, 3, 8])
def test_the_oracle_is_accepted_to_the_end_of_the_text(depth):
    batch = batch_of([5, 6, 7, 8, 9, 7, 5], [1, 2, 3, 4], prompts=[2, 1])
    result = accept(oracle(batch, depth), batch)
    assert result.accept_length.tolist() == result.remaining.clamp(max=depth).tolist()
    assert torch.equal(result.match, result.valid)


def test_a_recording_and_its_batches_say_the_same(varied_trajectory, trained):
    """And so does one batch after the other, joined (INV7)."""
    drafter = trained["eagle3"]
    whole = accept(all_starts(drafter, varied_trajectory, 4), varied_trajectory)
    small = accept(all_starts(drafter, varied_trajectory, 4, max_tokens=40), varied_trajectory)
    for name in ("match", "valid", "remaining"):
        assert torch.equal(getattr(whole, name), getattr(small, name))
    for i in range(len(varied_trajectory)):
        batch = varied_trajectory.batch([i])
        alone = accept(all_starts(drafter, batch, 4), batch)
        starts = alone.match.shape[1]
        assert torch.equal(whole.match[i, :starts], alone.match[0])
        assert torch.equal(whole.remaining[i, :starts], alone.remaining[0])
        assert not whole.valid[i, starts:].any()
    assert 0 < whole.match.sum() < whole.valid.sum()


def test_a_draft_of_other_sequences_is_refused(varied_trajectory, make_drafter):
    draft = all_starts(make_drafter(), varied_trajectory, 2)
    for other in (varied_trajectory.subset([1, 0, 2, 3]), varied_trajectory.subset([0, 1, 2])):
        with pytest.raises(DriftlabError, match="other sequences than this recording's"):
            accept(draft, other)


def test_a_draft_of_some_rows_only_is_refused():
    batch = batch_of([5, 6, 7, 8, 9, 7], prompts=[2])
    draft = oracle(batch, 2)
    later = dataclasses.replace(draft, rows=draft.rows + 1)
    with pytest.raises(DriftlabError, match="replay needs every answer row"):
        accept(later, batch)


def test_rows_give_the_share_of_comparable_starts_by_prompt_and_depth():
    batch = batch_of([5, 6, 7, 8, 9, 7], [5, 6, 7], prompts=[2, 2])
    records = list(accept(draft_of(batch, [[[8, 9], [9, 8], [8, 8], [7, 7]], [[0, 0]] * 4]), batch).records())
    found = {(r["prompt"], r["depth"]): (r["value"], r["n"]) for r in records}
    assert found["p0", 1] == (pytest.approx(2 / 3), 3)
    assert found["p0", 2] == (pytest.approx(1 / 2), 2)
    assert found["p1", 1][1] == found["p1", 2][1] == 0
    assert all(math.isnan(found["p1", k][0]) for k in (1, 2))  # nothing to compare is missing, not 0
    assert {r["quantity"] for r in records} == {"match"}
    assert len(as_rows(records)) == 4


# ---- a reduced draft vocabulary (D8)


def test_what_the_draft_vocabulary_lacks_is_a_rejection():
    """Ten positions, three of whose tokens cannot be drafted, the rest right: 0.7, and never 1.0."""
    text = [1, 2, 10, 11, 12, 50, 13, 14, 51, 15, 52, 16]  # one prompt token, one from the prefill, ten to draft
    batch = batch_of(text, prompts=[1])
    wanted = batch.tokens[:, 2:]
    best = torch.where(wanted < 50, wanted, 16)
    result = accept(draft_of(batch, torch.cat([best, torch.zeros(1, 1, dtype=torch.long)], 1)[..., None]), batch)
    assert (int(result.match.sum()), int(result.valid.sum())) == (7, 10)
    match = next(row for row in simulate(result).records() if row["quantity"] == "match")
    assert (match["value"], match["n"]) == (pytest.approx(0.7), 10)


def test_no_drafter_accepts_more_than_its_vocabulary_covers(varied_trajectory, train_tiny, make_drafter):
    """Misses stay in the denominator, for every draft of a real drafter with a reduced vocabulary."""
    answers = torch.cat([r.tokens[r.prompt_length :] for r in varied_trajectory])
    common = torch.bincount(answers, minlength=VOCAB).argsort(descending=True)
    kept = common[3:30].sort().values.tolist()  # without the three most frequent
    share = coverage(kept, varied_trajectory)
    assert 0 < share < 0.9
    drafter = make_drafter(draft_vocab=kept)
    result = accept(all_starts(drafter, varied_trajectory, 3), varied_trajectory)
    inside = torch.zeros(VOCAB, dtype=torch.bool)
    inside[kept] = True
    for i, recorded in enumerate(varied_trajectory):
        for start in range(int(result.valid[i, :, 0].sum())):
            token = recorded.tokens[recorded.prompt_length + start + 1]
            assert inside[token] or not result.match[i, start, 0]
    assert int(result.valid[..., 0].sum()) == varied_trajectory.answer_tokens - len(varied_trajectory)


def test_a_draft_for_other_texts_of_the_same_prompts_is_refused(tiny_target, make_drafter, tmp_path):
    """Ids and first rows agree, the answers do not: tau would be of drafts against a text they were not made for."""
    from driftlab import DriftlabError, accept, all_starts

    prompts = ["hello world", "abc"]
    greedy = tiny_target.record(prompts, max_new_tokens=12, template=False, out=tmp_path / "greedy")
    sampled = tiny_target.record(prompts, max_new_tokens=12, template=False, temperature=1.0, out=tmp_path / "sampled")
    with pytest.raises(DriftlabError, match="other texts"):
        accept(all_starts(make_drafter(), sampled, 3), greedy)
