"""Continuing prompts: the processed distribution, streams that depend on nothing but their prompt, and batches."""

import pytest
import torch
from conftest import EOS, FAMILIES, VOCAB, TinyTokenizer, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from driftlab import DriftlabError, Target
from driftlab.target.sampling import Sampling, choose, continue_prompts, streams

P = torch.tensor([0.5, 0.25, 0.15, 0.10])
LOGITS = P.log()[None] + 7.0


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def prompts_of(*lengths, seed=0):
    draw = generator(seed)
    return [[1, *torch.randint(3, VOCAB, (n - 1,), generator=draw).tolist()] for n in lengths]


def run(target, prompts, *, sampling=None, limit=16, stop=(), seeds=None, **kwargs):
    sampling = sampling or Sampling()
    return continue_prompts(
        target.adapter,
        prompts,
        max_new_tokens=limit,
        stop_ids=stop,
        sampling=sampling,
        generators=streams(prompts, sampling.seed) if seeds is None else seeds,
        **kwargs,
    )


# ---- the processed distribution


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(1.0), [0.5, 0.25, 0.15, 0.10]),
        (Sampling(2.0), [x / (0.5**0.5 + 0.5 + 0.15**0.5 + 0.1**0.5) for x in (0.5**0.5, 0.5, 0.15**0.5, 0.1**0.5)]),
        (Sampling(1.0, top_k=2), [2 / 3, 1 / 3, 0, 0]),
        (Sampling(1.0, top_k=1), [1, 0, 0, 0]),
        (Sampling(1.0, top_k=99), [0.5, 0.25, 0.15, 0.10]),
        (Sampling(1.0, top_p=0.5), [1, 0, 0, 0]),  # the mass before the second is 0.5 already
        (Sampling(1.0, top_p=0.51), [2 / 3, 1 / 3, 0, 0]),
        (Sampling(1.0, top_p=0.8), [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0]),
        (Sampling(1.0, top_p=1e-9), [1, 0, 0, 0]),
        # top-p counts the mass that top-k left: of 5/9, 2.5/9, 1.5/9 the first two hold 0.83
        (Sampling(1.0, top_k=3, top_p=0.8), [2 / 3, 1 / 3, 0, 0]),
        # and temperature comes first: squared, the first holds 0.725 of all
        (Sampling(0.5, top_p=0.7), [1, 0, 0, 0]),
    ],
)
def test_temperature_then_top_k_then_top_p(sampling, expected):
    torch.testing.assert_close(sampling.process(LOGITS), torch.tensor([expected]).float(), rtol=1e-5, atol=1e-7)


def test_the_nucleus_ends_where_its_mass_is_reached_exactly():
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    for top_p, kept in ((0.5, 1), (0.75, 2), (0.76, 4)):  # the last two are equals: both stay
        assert Sampling(1.0, top_p=top_p).process(logits).count_nonzero() == kept
    assert Sampling(1.0, top_p=0.5).process(torch.zeros(1, 4)).count_nonzero() == 4


@pytest.mark.parametrize("sampling", [Sampling(0.7), Sampling(1.3, 9), Sampling(0.9, 0, 0.8), Sampling(1.1, 20, 0.5)])
def test_the_processed_distribution_is_the_one_of_transformers(sampling):
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(5, VOCAB, generator=generator()) * 3
    scores = TemperatureLogitsWarper(sampling.temperature)(None, logits)
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    torch.testing.assert_close(sampling.process(logits), scores.softmax(-1), rtol=1e-4, atol=1e-7)


@settings(max_examples=30, deadline=None)
@given(
    logits=st.lists(st.floats(-50, 50), min_size=2, max_size=12),
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, 12),
    top_p=st.floats(0.01, 1),
)
def test_a_distribution_is_left_and_the_likeliest_token_stays(logits, temperature, top_k, top_p):
    logits = torch.tensor(logits)
    p = Sampling(temperature, top_k, top_p).process(logits[None])[0]
    assert float(p.sum()) == pytest.approx(1, abs=1e-5)
    assert p.min() >= 0
    likeliest = logits >= logits.max() - 1e-6 * temperature  # as likely as makes no difference
    assert p[likeliest].max() > 0


@pytest.mark.parametrize("values", [{"temperature": -0.1}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}])
def test_settings_out_of_range_are_refused(values):
    with pytest.raises(DriftlabError, match=next(iter(values))):
        Sampling(**values)


# ---- one token


def test_temperature_zero_is_the_arg_max_and_draws_nothing():
    draw = generator()
    before = draw.get_state()
    assert choose(torch.tensor([[0.0, 3.0, 1.0], [5.0, 1.0, 1.0]]), Sampling(), [draw, draw]) == [1, 0]
    assert torch.equal(draw.get_state(), before)


@pytest.mark.parametrize(
    ("sampling", "seed"),
    [(Sampling(1.0), 0), (Sampling(0.7), 1), (Sampling(1.0, top_k=5), 2), (Sampling(1.3, 0, 0.8), 3)],
)
def test_draws_follow_the_distribution(sampling, seed):
    """H9: chi-square at 20 000 draws; what has no mass is never drawn; the error falls like 1 / sqrt(N)."""
    logits = torch.randn(1, 8, generator=generator(10 + seed)).mul(1.5)
    expected = sampling.process(logits)[0].double()
    draw, count = generator(seed), 20_000
    chosen = torch.tensor(choose(logits.expand(count, 8), sampling, [draw] * count))
    seen = torch.bincount(chosen, minlength=8).double()
    assert seen[expected == 0].sum() == 0
    expected, seen = expected[expected > 0], seen[expected > 0]
    statistic = float(((seen - count * expected) ** 2 / (count * expected)).sum())
    assert statistic < 33  # the upper 1e-4 for 7 degrees of freedom is 29.9
    assert (seen / count - expected).abs().sum() < 3 / count**0.5 * len(seen) ** 0.5


def test_the_first_and_the_last_token_can_be_drawn_and_no_other_row_is_used():
    rows = torch.full((3, 4), -torch.inf)
    rows[0, 0] = rows[1, 3] = rows[2, 1] = 0.0
    for seed in range(20):
        assert choose(rows, Sampling(1.0), [generator(seed)] * 3) == [0, 3, 1]


@pytest.mark.parametrize(("u", "expected"), [(0.0, 1), (0.5, 3), (1 - 2**-53, 3)])
def test_what_has_no_mass_is_not_drawn_at_the_ends_either(monkeypatch, u, expected):
    monkeypatch.setattr(torch, "rand", lambda *args, **kwargs: torch.tensor(u, dtype=torch.float64))
    row = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    assert choose(row, Sampling(1.0), [generator()]) == [expected]


def test_a_row_that_is_not_finite_still_gives_a_token():
    rows = torch.tensor([[0.0, 1.0, 2.0], [torch.nan] * 3])
    assert choose(rows, Sampling(1.0), [generator(), generator()])[1] in range(3)


# ---- streams


def first_numbers(generators):
    return [float(torch.rand((), generator=g, dtype=torch.float64)) for g in generators]


def test_a_stream_belongs_to_its_prompt_not_to_its_place():
    """Q3."""
    a, b, c = [1, 5, 6], [1, 7], [1, 56]
    abc = first_numbers(streams([a, b, c], 0))
    assert first_numbers(streams([c, a, b], 0)) == [abc[2], abc[0], abc[1]]
    assert first_numbers(streams([b], 0)) == [abc[1]]
    assert len(set(abc)) == 3
    assert first_numbers(streams([a, b, c], 1)) != abc


def test_streams_of_prompts_that_read_alike_differ():
    assert len(set(first_numbers(streams([[1, 23], [12, 3], [123], [1, 2, 3]], 0)))) == 4


def test_copies_of_a_prompt_have_streams_of_their_own_in_order():
    numbers = first_numbers(streams([[1, 5], [1, 9], [1, 5], [1, 5]], 0))
    assert len(set(numbers)) == 4
    assert first_numbers(streams([[1, 5], [1, 5]], 0)) == [numbers[0], numbers[2]]


# ---- texts


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=3), Sampling(1.2, 20, 0.9, seed=4)])
def test_a_text_does_not_depend_on_batch_order_or_neighbours(varied_target, sampling):
    prompts = prompts_of(2, 19, 7, 7, 11)
    together = run(varied_target, prompts, sampling=sampling, stop=(EOS,))
    alone = [run(varied_target, [prompt], sampling=sampling, stop=(EOS,))[0] for prompt in prompts]
    backwards = run(varied_target, prompts[::-1], sampling=sampling, stop=(EOS,))[::-1]
    assert together == alone == backwards
    assert len({tuple(text) for text in together}) == len(prompts)


def test_copies_of_a_prompt_get_different_samples_but_one_greedy_text(varied_target):
    prompts = prompts_of(6) * 4
    assert len({tuple(text) for text in run(varied_target, prompts, sampling=Sampling(1.0))}) == 4
    assert len({tuple(text) for text in run(varied_target, prompts)}) == 1


def test_the_seed_changes_samples(varied_target):
    prompts = prompts_of(6)
    texts = [run(varied_target, prompts, sampling=Sampling(1.0, seed=seed)) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_what_generate_says_for_a_left_padded_batch(family):
    """F3, and the sliding windows of Mistral, Gemma 3 and gpt-oss: lengths below, at and far above the window of 8."""
    model = tiny_model(family)
    target = Target(model, TinyTokenizer(), aux_layers=(1,))
    prompts = prompts_of(1, 30, 8, 3)
    ours = run(target, prompts, limit=20, stop=(EOS,))
    longest = max(map(len, prompts))
    tokens = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    theirs = model.generate(tokens, attention_mask=mask, max_new_tokens=20, do_sample=False)[:, longest:].tolist()
    for mine, text in zip(ours, theirs, strict=True):
        assert mine == text[: len(mine)]
        assert len(mine) == 20 or mine[-1] == EOS
    assert len({tuple(text) for text in ours}) == len(prompts)


def test_positions_count_from_each_sequences_first_real_token(varied_target, monkeypatch):
    """F3. Rotary embedding forgives a constant shift of a whole row, so the texts alone would not tell."""
    seen, hidden = [], varied_target.adapter.hidden

    def spy(tokens, **kwargs):
        seen.append((tokens.clone(), kwargs["attention_mask"].clone(), kwargs["positions"].clone()))
        return hidden(tokens, **kwargs)

    monkeypatch.setattr(varied_target.adapter, "hidden", spy)
    prompts = prompts_of(2, 9, 5)
    run(varied_target, prompts, limit=3)
    tokens, mask, positions = seen[0]
    for row, prompt in enumerate(prompts):
        assert tokens[row, -len(prompt) :].tolist() == prompt
        assert mask[row].tolist() == [0] * (9 - len(prompt)) + [1] * len(prompt)
        assert positions[row, -len(prompt) :].tolist() == list(range(len(prompt)))
    for step in (1, 2):
        assert seen[step][2].tolist() == [[len(prompt) + step - 1] for prompt in prompts]
        assert seen[step][1].sum(1).tolist() == [len(prompt) + step for prompt in prompts]


# ---- the end


def test_a_stop_token_is_kept_and_nothing_follows(varied_target):
    prompts = prompts_of(2, 19, 7, 11)
    free = run(varied_target, prompts)
    stop = {free[0][4], free[2][9], free[3][0]}
    for text, whole in zip(run(varied_target, prompts, stop=tuple(stop)), free, strict=True):
        end = next((i for i, token in enumerate(whole, 1) if token in stop), len(whole))
        assert text == whole[:end]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)])
def test_one_token_is_one_forward_pass(varied_target, rows_forwarded, sampling):
    texts = run(varied_target, prompts_of(3, 9), limit=1, sampling=sampling)
    assert [len(text) for text in texts] == [1, 1]
    assert texts[0] + texts[1] == [text[0] for text in run(varied_target, prompts_of(3, 9), limit=5, sampling=sampling)]
    assert rows_forwarded[0] == 2
    assert len(rows_forwarded) == 1 + 5


@pytest.fixture
def rows_forwarded(varied_target, monkeypatch):
    """The batch sizes of the target's forward passes, as they come."""
    rows, hidden = [], varied_target.adapter.hidden

    def spy(tokens, **kwargs):
        rows.append(len(tokens))
        return hidden(tokens, **kwargs)

    monkeypatch.setattr(varied_target.adapter, "hidden", spy)
    return rows


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_finished_sequences_leave_the_batch(family, monkeypatch):
    target = Target(tiny_model(family), TinyTokenizer(), aux_layers=(1,))
    prompts = prompts_of(2, 19, 7, 11, seed=1)
    sampling = Sampling(1.0, seed=3)
    free = run(target, prompts, limit=24, sampling=sampling)
    # the first three end, one after the other, at a token that no other says
    others = [{token for other in free if other is not text for token in other} for text in free]
    own = [next(t for t in free[i] if t not in others[i] and free[i].index(t) >= 2 + 4 * i) for i in range(3)]
    ends = [text.index(token) + 1 for text, token in zip(free, own, strict=False)]
    rows, hidden = [], target.adapter.hidden
    monkeypatch.setattr(
        target.adapter, "hidden", lambda tokens, **kwargs: (rows.append(len(tokens)), hidden(tokens, **kwargs))[1]
    )
    told = []
    texts = run(target, prompts, limit=24, sampling=sampling, stop=tuple(own), report=told.append)
    assert texts == [free[i][: ends[i]] for i in range(3)] + [free[3]]
    assert len(rows) == 24
    assert len(set(ends)) == 3
    assert max(ends) < 20
    alive = [1 + sum(end > step for end in ends) for step in range(24)]
    assert all(real <= row for real, row in zip(alive, rows, strict=True))
    # at most a quarter of a batch is finished sequences, so three of four are gone at once here
    assert rows == alive
    assert told == sorted(told)
    assert told[-1] == 4
    assert set(told) >= {4 - a for a in alive[:-1] if a < 4}


def test_the_run_ends_with_the_last_sequence(varied_target, rows_forwarded):
    prompts = prompts_of(6, 6, seed=2)
    free = run(varied_target, prompts, limit=10)
    rows_forwarded.clear()
    texts = run(varied_target, prompts, limit=10, stop=(free[0][0], free[1][0]))
    assert texts == [[free[0][0]], [free[1][0]]]
    assert rows_forwarded == [2]
