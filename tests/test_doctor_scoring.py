"""The doctor's scores against the executors and against algebra; its evidence against scipy."""

import dataclasses

import numpy as np
import pytest
import torch

from driftlab import DriftlabError

DEPTH = 3
LATENT = {"q_lora_rank": 0, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}


def bench_of(drafter, trajectory, config=None, depth=DEPTH, **view):
    from driftlab.doctor.scoring import Bench, cut
    from driftlab.doctor.stored import Stored, View

    stored = Stored.of(drafter.state_dict(), trajectory.head)
    bench = Bench(stored, cut(trajectory, list(range(len(trajectory))), 20), depth)
    return bench, View(config=config or drafter.config, **view)


def latent(make_drafter, trajectory):
    from driftlab.drafter.config import LatentConfig

    more = {"num_key_value_heads": 4, "rope_interleaved": True, "latent": LatentConfig(**LATENT)}
    return make_drafter("eagle31", **more)


def mtp(make_drafter, trajectory):
    return make_drafter("norm_output", architecture="mtp", aux_layers=())


def reduced(make_drafter, trajectory):
    return make_drafter("eagle3", draft_vocab=range(3, 50, 2))


MAKERS = {
    "eagle3": lambda make, _: make("eagle3"),
    "eagle31": lambda make, _: make("eagle31"),
    **{"latent": latent, "mtp": mtp, "reduced": reduced},
}


@pytest.mark.parametrize("kind", MAKERS)
def test_score_is_the_likelihood_that_the_executor_gives(kind, make_drafter, tiny_trajectory):
    """The floor, the vocabulary's map, the temperature and the depths, by all_starts' own softmax."""
    from driftlab import Sampling, accept, all_starts, simulate
    from driftlab.doctor.scoring import FLOOR, TEMPERATURES

    drafter = MAKERS[kind](make_drafter, tiny_trajectory)
    bench, view = bench_of(drafter, tiny_trajectory)
    score = bench.score(view)
    draft = all_starts(drafter, bench.batch, DEPTH, temperatures=TEMPERATURES)
    vocab = drafter.config.vocab_size
    for depth, temperature in enumerate(score.temperatures):
        valid = score.valid[..., depth]
        means = {}
        for other in TEMPERATURES:
            q = draft.logits.q(Sampling(other))[..., depth][valid]
            means[other] = float(((1 - FLOOR) * q + FLOOR / vocab).log().mean())
            if other == temperature:
                expected = ((1 - FLOOR) * q + FLOOR / vocab).log()
        torch.testing.assert_close(score.log_q[..., depth][valid].double(), expected, atol=2e-4, rtol=0)
        assert means[temperature] == max(means.values())
        assert torch.equal(score.tokens[..., depth][valid], draft.tokens[..., depth][valid])
    assert bench.simulate(score).tau == simulate(accept(draft, bench.batch)).tau


@pytest.mark.parametrize("kind", ["eagle31", "latent", "mtp"])
def test_depth_one_is_shared_and_what_is_fed_back_is_not(kind, make_drafter, tiny_trajectory):
    from driftlab import Drafter, all_starts

    drafter = MAKERS[kind](make_drafter, tiny_trajectory)
    other = dataclasses.replace(drafter.config, norm_output=not drafter.config.norm_output)
    bench, view = bench_of(drafter, tiny_trajectory)
    mine, theirs = bench.score(view), bench.score(dataclasses.replace(view, config=other))
    assert torch.equal(mine.log_q[..., 0], theirs.log_q[..., 0])
    assert not torch.equal(mine.log_q[..., 1], theirs.log_q[..., 1])
    flipped = Drafter(other, tiny_trajectory)
    flipped.load_state_dict(drafter.state_dict())
    draft = all_starts(flipped.eval(), bench.batch, DEPTH)
    assert torch.equal(theirs.tokens[theirs.valid], draft.tokens[theirs.valid])
    assert torch.equal(bench.score(view).log_q, mine.log_q)  # scoring another one has left nothing behind


@pytest.mark.parametrize("kind", ["eagle3", "latent"])
@pytest.mark.parametrize(("gap", "frozen"), [(1, False), (-1, False), (1, True)])
def test_a_gap_of_positions_turns_the_context_back(kind, gap, frozen, make_drafter, tiny_trajectory):
    """Moving all that is drafted by g is turning every key of the context by -g."""
    from driftlab.doctor.stored import build
    from driftlab.draft import read_states, text_at

    drafter = MAKERS[kind](make_drafter, tiny_trajectory)
    bench, view = bench_of(drafter, tiny_trajectory, gap=gap, frozen=frozen, depth=2)
    (_, _, _), (_, _, moved) = bench._unroll(view)
    plain, _ = build(bench.stored, view)
    batch, starts = bench.batch, bench.batch.starts
    state = plain.first(batch.tokens[:, 1:], read_states(drafter, batch)[:, :-1], starts)
    back = torch.full(state.kv[0].k[:, 0, :, 0].shape, -(gap - 1 if frozen else gap))
    for kv, layer in zip(state.kv, plain.layers, strict=True):
        kv.k = layer.self_attn.turned(kv.k, back)
    if drafter.config.norm_output:
        state = dataclasses.replace(state, feedback=state.normed)
    expected = plain.next(state, text_at(batch, starts.rows + 2)).normed
    torch.testing.assert_close(moved[starts.valid], expected[starts.valid], atol=1e-3, rtol=1e-3)


def test_a_constant_shift_of_all_positions_changes_nothing(make_drafter, tiny_trajectory):
    from driftlab.doctor.stored import build, move
    from driftlab.draft import read_states

    drafter = make_drafter("eagle31")
    bench, view = bench_of(drafter, tiny_trajectory)
    plain, _ = build(bench.stored, view)
    inputs = (bench.batch.tokens[:, 1:], read_states(drafter, bench.batch)[:, :-1], bench.batch.starts)
    before = plain.first(*inputs).normed
    move(plain, 7)
    torch.testing.assert_close(plain.first(*inputs).normed, before, atol=1e-4, rtol=1e-4)


def test_strided_key_heads_are_key_heads_written_out(make_drafter, tiny_trajectory):
    """Query head h of 4 reads key head h mod 2: the same as four key heads 0, 1, 0, 1."""
    drafter = make_drafter("eagle3")
    bench, view = bench_of(drafter, tiny_trajectory, grouping="strided")
    found = bench.score(view)
    tensors = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    for name in ("k_proj", "v_proj"):
        key = f"layers.0.self_attn.{name}.weight"
        tensors[key] = torch.cat([tensors[key]] * 2)
    from driftlab.doctor.stored import Stored, View

    bench.stored = Stored.of(tensors, tiny_trajectory.head)
    bench._first.clear()
    written = bench.score(View(config=dataclasses.replace(drafter.config, num_key_value_heads=4)))
    torch.testing.assert_close(found.log_q, written.log_q, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(found.log_q, bench_of(drafter, tiny_trajectory)[0].score(view).log_q * 0)


@pytest.mark.parametrize("kind", ["eagle3", "latent", "mtp"])
def test_readings_undo_a_file_written_the_other_way(kind, make_drafter, tiny_trajectory):
    """Columns exchanged, states reordered, gains less one: each is read as before by the reading that says so."""
    drafter = MAKERS[kind](make_drafter, tiny_trajectory)
    bench, view = bench_of(drafter, tiny_trajectory)
    honest, tensors = bench.score(view), dict(drafter.state_dict())
    swapped = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "mqa.weight", "eh_proj.weight")) and (
            kind != "mtp" or "eh_proj" in name
        ):
            half = tensor.shape[1] // 2
            swapped[name] = torch.cat([tensor[:, half:], tensor[:, :half]], 1)
    less = {n: t - 1 if t.ndim == 1 and t.is_floating_point() else t for n, t in tensors.items()}
    cases = [
        (swapped, dataclasses.replace(view, inputs="hidden first")),
        (less, dataclasses.replace(view, config=dataclasses.replace(view.config, norm_plus_one=True))),
    ]
    if kind != "mtp":
        parts = tensors["fc.weight"].chunk(3, 1)
        moved = {**tensors, "fc.weight": torch.cat([parts[2], parts[1], parts[0]], 1)}
        if "fc_norm.0.weight" in tensors:
            moved |= {f"fc_norm.{i}.weight": tensors[f"fc_norm.{2 - i}.weight"] for i in range(3)}
        cases.append((moved, dataclasses.replace(view, order=(2, 1, 0))))
    for stored, reading in cases:
        bench.stored = dataclasses.replace(bench.stored, tensors=stored)
        bench._first.clear()
        torch.testing.assert_close(bench.score(reading).log_q, honest.log_q, atol=2e-3, rtol=2e-3)
        assert not torch.allclose(bench.score(view).log_q, honest.log_q, atol=2e-3)


def test_the_raw_final_state_of_an_mtp_head_is_known_from_the_normed_one(make_drafter, tiny_trajectory, tiny_target):
    """g x / rms(x) divided by g is x up to its size, which the head's own norm takes out."""
    drafter = mtp(make_drafter, tiny_trajectory)
    bench, view = bench_of(drafter, tiny_trajectory, final_state="raw")
    target_layers = tiny_target.aux_layers
    tiny_target.aux_layers = (tiny_target.spec.num_layers,)
    try:
        deep = tiny_target.record(
            ["hello world", "abc", "q", "another longer prompt here"], max_new_tokens=24, template=False
        )
    finally:
        tiny_target.aux_layers = target_layers
    from driftlab.doctor.scoring import cut

    raw = cut(deep, list(range(4)), 20).aux[:, :, 0]
    found = bench.score(view)
    bench.batch = dataclasses.replace(bench.batch, last_hidden=raw)
    bench._first.clear()
    torch.testing.assert_close(
        found.log_q, bench.score(dataclasses.replace(view, final_state="normed")).log_q, atol=1e-3, rtol=1e-3
    )


def test_only_rows_asked_for_are_normalised_over(make_drafter, tiny_trajectory):
    from driftlab.doctor.scoring import Bench, candidates

    drafter = reduced(make_drafter, tiny_trajectory)
    bench, view = bench_of(drafter, tiny_trajectory)
    among = candidates(bench.batch, drafter.config.vocab_size, 30)
    answer = {
        int(t)
        for i, n in enumerate(bench.batch.prompt_lengths)
        for t in bench.batch.tokens[i, n : bench.batch.lengths[i]]
    }
    assert answer <= set(among.tolist())
    assert len(among) == max(30, len(answer))
    few = Bench(bench.stored, bench.batch, DEPTH, among).score(view)
    everything = bench.score(view)
    known = torch.isin(bench.batch.tokens, drafter.draft_vocab)
    assert few.mean > everything.mean
    assert bool(known.any())
    every = Bench(bench.stored, bench.batch, DEPTH, torch.arange(drafter.config.vocab_size)).score(view)
    assert torch.equal(every.log_q, everything.log_q)


def test_tokens_beyond_the_draft_vocabulary_cost_the_same_in_every_reading(make_drafter, tiny_trajectory):
    from driftlab.doctor.scoring import FLOOR

    drafter = reduced(make_drafter, tiny_trajectory)
    bench, view = bench_of(drafter, tiny_trajectory)
    absolute = dataclasses.replace(view, d2t="absolute")
    floor = np.log(FLOOR / drafter.config.vocab_size)
    wanted = bench.batch.starts.rows + 2
    token = bench.batch.tokens.gather(1, wanted.clamp(max=bench.batch.tokens.shape[1] - 1))
    for reading in (view, absolute):
        score, ids = bench.score(reading), bench.stored.ids(reading.d2t)
        outside = score.valid[..., 0] & ~torch.isin(token, ids)
        assert bool(outside.any())
        assert torch.allclose(score.log_q[..., 0][outside], torch.tensor(float(floor)).float())
        assert bool((score.log_q[score.valid] >= floor - 1e-5).all())


def made(values, counts):
    from driftlab.doctor.scoring import Score

    width = max(counts)
    valid = torch.arange(width)[None, :, None] < torch.tensor(counts)[:, None, None]
    log_q = torch.tensor(values)[:, None, None] * valid
    return Score(
        log_q.float(), torch.zeros_like(log_q).float(), torch.zeros(valid.shape, dtype=torch.long), valid, valid, (1.0,)
    )


def test_contrast_of_equally_long_answers_is_the_paired_t_test():
    from scipy.stats import ttest_1samp

    from driftlab.doctor.evidence import contrast, information

    values = [0.3, -0.1, 0.25, 0.4, 0.05]
    found = contrast(made(values, [4] * 5), made([0.0] * 5, [4] * 5))
    theirs = ttest_1samp(values, 0, alternative="greater")
    assert found.mean == pytest.approx(np.mean(values), rel=1e-6)
    assert found.t == pytest.approx(theirs.statistic, rel=1e-6)
    assert found.better == pytest.approx(theirs.pvalue, rel=1e-6)
    assert found.better + found.worse == pytest.approx(1)
    assert found.tokens == 20
    low = theirs.confidence_interval(0.95).low
    assert found.mean - (found.bound(0.05) - found.mean) == pytest.approx(low, rel=1e-5)
    assert information(made(values, [4] * 5)).mean == pytest.approx(found.mean)


def test_contrast_weights_prompts_by_their_tokens():
    from driftlab.doctor.evidence import contrast

    counts = [1, 9]
    found = contrast(made([1.0, 0.0], counts), made([0.0, 0.0], counts))
    assert found.mean == pytest.approx(0.1)
    residuals = np.array([1 - 0.1, -0.9])  # d - D n
    assert found.error == pytest.approx(np.sqrt(2 * (residuals**2).sum()) / 10)


def test_the_tokens_that_are_wanted_would_do(make_drafter):
    from driftlab.doctor.evidence import contrast

    values = [0.1, -0.08, 0.15, -0.02, 0.05, 0.0]
    found = contrast(made(values, [5] * 6), made([0.0] * 6, [5] * 6))
    more = found.tokens_wanted(0.001)
    assert more > 0
    assert found.tokens_wanted(0.0001) > more
    grown = found.t * np.sqrt((found.tokens + more) / found.tokens)
    from scipy.special import stdtrit

    assert grown >= stdtrit(5, 0.999)
    assert contrast(made([-0.1, -0.2], [5, 5]), made([0.0, 0.0], [5, 5])).tokens_wanted(0.001) == 0


def test_one_prompt_is_refused():
    from driftlab.doctor.evidence import contrast

    with pytest.raises(DriftlabError, match="several"):
        contrast(made([0.1], [4]), made([0.0], [4]))


@pytest.mark.parametrize(
    ("mean", "error", "verdict"),
    [
        (0.001, 0.004, "no matter"),
        (-0.017, 0.011, "open"),  # it may be worse by .04
        (-0.068, 0.011, "worse"),
        (-0.012, 0.002, "no matter"),
        (0.03, 0.02, "open"),
        (0.07, 0.01, "open"),
        (0.1, 0.0, "open"),  # prompts that do not differ at all say nothing of the error
    ],
)
def test_no_matter_is_bounded_on_both_sides(mean, error, verdict):
    from driftlab.doctor.evidence import Contrast

    found = Contrast(mean, error, 40, 1000, False, ((0.0, 1.0),) * 40, (mean,))
    assert found.verdict == verdict
    if not error:
        assert found.better == found.worse == 0.5
