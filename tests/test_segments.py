"""Which key is what, and which rows are starts."""

import torch
from hypothesis import given
from hypothesis import strategies as st


def names(segments):
    return ["".join("SPC"[value] for value in row) for row in segments.tolist()]


def test_key_rows_by_hand():
    """The answer's first row is P - 1: it is CONTEXT, and the state of the last prompt token is its state."""
    from driftlab.segments import context_segments

    assert names(context_segments(torch.tensor([4, 1, 6]), 6, (0,))) == ["SPPCCC", "SCCCCC", "SPPPPC"]
    assert names(context_segments(torch.tensor([4, 1, 6]), 6, ())) == ["PPPCCC", "CCCCCC", "PPPPPC"]
    assert names(context_segments(torch.tensor([4]), 6, (1, 4))) == ["PSPCSC"]
    assert names(context_segments(torch.tensor([4]), 3, (7,))) == ["PPP"]


def test_starts_by_hand():
    from driftlab.segments import answer_starts

    starts = answer_starts(torch.tensor([4, 1]), torch.tensor([7, 3]), (0,), ("a", "b"))
    assert starts.rows.tolist() == [[3, 4, 5], [0, 1, 1]]
    assert starts.valid.tolist() == [[True, True, True], [True, True, False]]
    assert names(starts.segments) == ["SPPCCC", "SCCCCC"]
    assert starts.ids == ("a", "b")


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4))
def test_every_answer_token_has_one_start(shapes):
    """Row t needs token t + 1, so an answer of n tokens has the n starts P - 1 <= t <= T - 2."""
    from driftlab.segments import answer_starts

    prompts = torch.tensor([prompt for prompt, _ in shapes])
    lengths = torch.tensor([prompt + answer for prompt, answer in shapes])
    starts = answer_starts(prompts, lengths, (0,), [str(i) for i in range(len(shapes))])
    assert starts.segments.shape == (len(shapes), int(lengths.max()) - 1)
    for b, (prompt, answer) in enumerate(shapes):
        rows = starts.rows[b][starts.valid[b]].tolist()
        assert rows == list(range(prompt - 1, prompt + answer - 1))
        assert starts.valid[b, :answer].all()
        assert int(starts.rows[b].max()) <= int(lengths[b]) - 2
