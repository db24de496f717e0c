"""Train-time test: which labels count, the target's distribution, micro-batches, stride, held-out text, and resuming to
the same bits.
"""

import dataclasses
import functools
import json
import math
import subprocess
import sys

import pandas as pd
import pytest
import torch
from conftest import EOS, VOCAB, TinyTokenizer, tiny_model
from safetensors.torch import load_file

from driftlab import (
    VARIANTS,
    Drafter,
    DriftlabError,
    Target,
    TrainConfig,
    Trajectory,
    accept,
    all_starts,
    choose_draft_vocab,
    simulate,
    train,
    training,
)
from driftlab.draft import unroll
from driftlab.files import atomic
from driftlab.losses import LOSSES, TargetDistribution
from driftlab.training import answer_rows, batch_loss, held_out_numbers, schedule, split, uses_bfloat16
from driftlab.vocabulary import coverage

# 2 batches an epoch: 7 steps; rows of the log at steps 2, 4, 6 and 7
CONFIG = TrainConfig(ttt=2, lr=3e-3, batch_size=2, epochs=3.5, save_every=0, log_every=2)
STEPS = 7


def fresh(trajectory, variant="eagle31", **overrides):
    vocab = overrides.pop("draft_vocab", None)
    size = VOCAB if vocab is None else len(vocab)
    config = VARIANTS[variant].for_target(trajectory, draft_vocab_size=size, **overrides)
    return Drafter(config, trajectory, draft_vocab=vocab)


def same_bits(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def head_rows(drafter, trajectory):
    return trajectory.head.lm_head[drafter.draft_vocab]


class Stop(Exception):
    pass


def begin(drafter, trajectory, config=CONFIG, held_out=None):
    return training._Run(drafter, trajectory, config, held_out)


def models_p(model, tokens):
    with torch.no_grad():
        return model(tokens[None], use_cache=False).logits[0].double().softmax(-1)


@pytest.fixture(scope="module")
def uneven(varied_target, tmp_path_factory):
    """Answers of 3, 17, 1, 9 and 6 given tokens."""
    answers = ["abc", "the quick brown f", "x", "lazy dogs", "jumped"]
    out = tmp_path_factory.mktemp("uneven") / "r"
    prompts = ["hello", "ab", "q", "another", "z"]
    return varied_target.record(prompts, answers=answers, max_new_tokens=17, template=False, out=out)


@pytest.fixture(scope="module")
def whole(varied_trajectory, tmp_path_factory):
    """Trained for seven steps without a stop, and the folder it was saved to."""
    out = tmp_path_factory.mktemp("whole") / "d"
    return train(fresh(varied_trajectory), varied_trajectory, CONFIG, out=out), out


# ---- the loss


def naive_loss(drafter, model, batch, config, offset=0):
    """Row by row in float64, from the target model's own logits: t >= P - 1 counts at depth k iff t + k + 1 exists, and
    beyond depth 1 only every stride-th start, from ``offset``.
    """
    p = torch.stack([models_p(model, row) for row in batch.tokens])[..., drafter.draft_vocab]
    total, by_depth = 0.0, []
    for state, _ in unroll(drafter, batch, config.ttt, feed="text"):
        q = drafter.logits(state.normed).double().softmax(-1)
        pairs = []
        for b in range(len(batch)):
            prompt, length = int(batch.prompt_lengths[b]), int(batch.lengths[b])
            for start, t in enumerate(range(prompt - 1, length - 1)):
                skipped = state.depth > 1 and (start < offset or (start - offset) % config.stride)
                if t + state.depth + 1 <= length - 1 and not skipped:
                    pairs.append((p[b, t + state.depth], q[b, start]))
        kl = [(x * (x / y).log()).sum() for x, y in pairs]
        a = [torch.minimum(x, y).sum() for x, y in pairs]
        if config.loss == "soft_ce":
            terms = [-(x * y.log()).sum() for x, y in pairs]
        elif config.loss == "lambda":
            share = math.exp(-config.eta * float(sum(a).detach()) / len(a))
            terms = [share * x + (1 - share) * (1 - y) for x, y in zip(kl, a, strict=True)]
        else:
            terms = kl if config.loss == "kl" else [-x.log() for x in a]
        by_depth.append(sum(terms) / max(len(terms), 1))
        total = total + config.depth_decay ** (state.depth - 1) * by_depth[-1]
    return total, by_depth


def check_loss(drafter, trajectory, model, batch, config, offset=0):
    loss, logged = batch_loss(drafter, batch, head_rows(drafter, trajectory), config, offset=offset)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in drafter.named_parameters()}
    drafter.zero_grad()
    expected, by_depth = naive_loss(drafter, model, batch, config, offset)
    expected.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-4)
    depths = range(1, config.ttt + 1)
    assert [logged[f"loss_{k}"] for k in depths] == pytest.approx([float(x.detach()) for x in by_depth], rel=1e-4)
    for name, parameter in drafter.named_parameters():
        scale = float(parameter.grad.abs().max())
        assert scale > 0, name
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-2, atol=1e-3 * scale)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("reduced", [False, True])
def test_loss_and_gradients_are_those_of_a_plain_loop(varied_target, varied_trajectory, make_drafter, variant, reduced):
    """J1, C4 and the loss itself, over two sequences of different length, against the target model's logits."""
    vocab = choose_draft_vocab(varied_trajectory, 40) if reduced else None
    drafter = make_drafter(variant, target=varied_trajectory, draft_vocab=vocab, scale=2.0)
    batch, config = varied_trajectory.batch([0, 3]), TrainConfig(ttt=3, depth_decay=0.7)
    check_loss(drafter, varied_trajectory, varied_target.adapter.model, batch, config)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("stride", "offset"), [(1, 0), (3, 0), (3, 2)])
def test_so_are_the_other_losses_and_a_part_of_the_starts(varied_target, uneven, make_drafter, loss, stride, offset):
    drafter = make_drafter(target=uneven, draft_vocab=choose_draft_vocab(uneven, 40), scale=2.0, lm_head="own")
    config = TrainConfig(ttt=3, loss=loss, eta=1.5, stride=stride)
    check_loss(drafter, uneven, varied_target.adapter.model, uneven.batch([0, 1, 2, 3]), config, offset)


def test_which_labels_count(varied_trajectory, make_drafter, monkeypatch):
    """J1: ten tokens, answer 6..9. Depth 1 learns tokens 7, 8, 9; depth 2 tokens 8, 9; depth 3 token 9; depth 4 none."""
    whole = varied_trajectory.batch([0])
    cut = {name: getattr(whole, name)[:, :10] for name in ("tokens", "aux", "last_hidden", "lse")}
    batch = dataclasses.replace(whole, **cut, lengths=torch.tensor([10]), prompt_lengths=torch.tensor([6]))
    batch = dataclasses.replace(batch, lse=torch.zeros(1, 10))
    labels, plain = [], training.draft_loss
    index = answer_rows(batch)[1]
    place = {int(index[0, t]): t for t in range(5, 9)}  # the distribution at row t is that of token t + 1

    def spy(hidden, weight, target, rows, **options):
        labels.append([place[int(row)] + 1 for row in rows])
        return plain(hidden, weight, target, rows, **options)

    monkeypatch.setattr(training, "draft_loss", spy)
    drafter = make_drafter(target=varied_trajectory)
    loss, logged = batch_loss(drafter, batch, varied_trajectory.head.lm_head, TrainConfig(ttt=4))
    assert labels == [[7, 8, 9], [8, 9], [9], []]
    assert loss.isfinite()
    assert logged["loss_4"] == 0
    assert logged["match_4"] == 0


def distribution(batch, head, **options):
    answer, index = answer_rows(batch)
    target = TargetDistribution.of(batch.last_hidden[answer], batch.lse[answer], head, **options)
    return target.at(torch.arange(int(answer.sum()))), index


def check_distribution(model, batch, p, index, vocab):
    """p is the model's to 1e-5 at every answer row."""
    assert len(p) == int((batch.lengths - batch.prompt_lengths).sum())
    for b in range(len(batch)):
        length = int(batch.lengths[b])
        own = models_p(model, batch.tokens[b, :length]).float()
        for t in range(int(batch.prompt_lengths[b]) - 1, length - 1):
            torch.testing.assert_close(p[index[b, t]], own[t, vocab], rtol=0, atol=1e-5)


def test_the_targets_distribution_is_the_models(varied_target, varied_trajectory):
    """C4: from the file, without the model, to 1e-5, and restricted to the draft vocabulary without renormalising."""
    vocab = torch.tensor(choose_draft_vocab(varied_trajectory, 20))
    batch = varied_trajectory.batch([0, 1, 2, 3])
    p, index = distribution(batch, varied_trajectory.head.lm_head[vocab])
    check_distribution(varied_target.adapter.model, batch, p, index, vocab)
    assert 0.05 < float(p.sum(-1).mean()) < 0.99
    full, _ = distribution(batch, varied_trajectory.head.lm_head)
    torch.testing.assert_close(full.sum(-1), torch.ones(len(full)), rtol=0, atol=1e-4)


@pytest.mark.parametrize("autocast", ["none", "bfloat16"])
def test_so_it_is_for_a_drafter_in_half_precision(varied_target, varied_trajectory, monkeypatch, tmp_path, autocast):
    """The aux states are narrowed, the last hidden state never: in bfloat16 p is off by per cents."""
    batch = varied_trajectory.batch([0, 1, 2, 3])
    narrow = batch.to("cpu", torch.bfloat16)
    assert (narrow.aux.dtype, narrow.last_hidden.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(narrow.last_hidden, batch.last_hidden)
    made, of = [], TargetDistribution.of

    def spy(*args, **options):
        made.append(of(*args, **options))
        return made[-1]

    monkeypatch.setattr(TargetDistribution, "of", spy)
    config = dataclasses.replace(CONFIG, batch_size=4, epochs=2.0, autocast=autocast)
    drafter = fresh(varied_trajectory).to(torch.bfloat16)
    before = drafter.fc.weight.clone()
    run = begin(drafter, varied_trajectory, config)
    train(drafter, varied_trajectory, config, out=tmp_path / "d", stop_after=1)
    assert not torch.equal(drafter.fc.weight, before)
    order = run.order(0)[0][0]
    batch = varied_trajectory.batch(order)
    check_distribution(varied_target.adapter.model, batch, made[0].p, answer_rows(batch)[1], drafter.draft_vocab)


def test_the_log_holds_the_share_of_right_drafts(varied_trajectory, trained):
    drafter, batch = trained["eagle31"], varied_trajectory.batch([0, 1, 2, 3])
    _, logged = batch_loss(drafter, batch, varied_trajectory.head.lm_head, TrainConfig(ttt=3))
    acceptance = accept(all_starts(drafter, varied_trajectory, 3), varied_trajectory)
    for k in (1, 2, 3):
        share = acceptance.match[..., k - 1].sum() / acceptance.valid[..., k - 1].sum()
        assert logged[f"match_{k}"] == pytest.approx(float(share))


def test_probabilities_are_made_once_per_batch(varied_trajectory, make_drafter, monkeypatch):
    """P2."""
    calls = []
    of = TargetDistribution.of
    monkeypatch.setattr(TargetDistribution, "of", lambda *args, **options: calls.append(1) or of(*args, **options))
    drafter = make_drafter(target=varied_trajectory)
    batch_loss(drafter, varied_trajectory.batch([0, 1]), head_rows(drafter, varied_trajectory), TrainConfig(ttt=5))
    assert len(calls) == 1


def test_answers_of_one_token_teach_nothing_and_break_nothing(varied_target, tmp_path):
    trajectory = varied_target.record(["abc", "q"], max_new_tokens=1, template=False, out=tmp_path / "r")
    before = fresh(trajectory)
    after = train(fresh(trajectory), trajectory, dataclasses.replace(CONFIG, weight_decay=0.0), out=tmp_path / "d")
    assert same_bits(before, after)
    assert pd.read_csv(tmp_path / "d" / "train_log.csv")["loss"].tolist() == [0.0] * 2


def test_an_own_head_is_trained_and_a_borrowed_one_is_not(varied_trajectory, tmp_path):
    own = fresh(varied_trajectory, lm_head="own")
    before, lent = own.lm_head.weight.clone(), varied_trajectory.head.lm_head.clone()
    train(own, varied_trajectory, CONFIG, out=tmp_path / "own")
    assert not torch.equal(own.lm_head.weight, before)
    borrowed = fresh(varied_trajectory)
    before = borrowed.lm_head.weight.clone()
    train(borrowed, varied_trajectory, CONFIG, out=tmp_path / "borrowed")
    assert torch.equal(borrowed.lm_head.weight, before)
    assert torch.equal(varied_trajectory.head.lm_head, lent)


# ---- gradients


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_flow_through_the_feedback(varied_trajectory, make_drafter, variant):
    """What depth 2 says alone reaches the state that depth 1 handed on, and fc behind it."""
    drafter, kept = make_drafter(variant, target=varied_trajectory), {}
    batch = varied_trajectory.batch([0, 1])

    def keep(value, hook):
        value.retain_grad()
        kept[hook.depth] = value

    with drafter.hooks([("hook_feedback", keep)]):
        states = [state for state, _ in unroll(drafter, batch, 2, feed="text")]
    states[1].normed.square().sum().backward()
    through = drafter.fc.weight.grad.clone()
    assert kept[1].grad.abs().max() > 0
    assert through.abs().max() > 0
    drafter.zero_grad()
    with drafter.hooks([("hook_feedback", lambda value, hook: value.detach())]):
        states = [state for state, _ in unroll(drafter, batch, 2, feed="text")]
    states[1].normed.square().sum().backward()
    assert not torch.allclose(drafter.fc.weight.grad, through, rtol=1e-2)


def test_the_gradient_is_the_slope_of_the_loss(varied_trajectory, make_drafter):
    """Central differences in float64 along random directions, all depths."""
    drafter = make_drafter("eagle31", target=varied_trajectory, scale=2.0).double()
    batch = varied_trajectory.batch([0, 2]).to("cpu", torch.float64)
    rows, config = varied_trajectory.head.lm_head.double(), TrainConfig(ttt=3)

    def value():
        return batch_loss(drafter, batch, rows, config)[0]

    assert value().dtype == torch.float64

    value().backward()
    generator = torch.Generator().manual_seed(0)
    for parameter in (drafter.fc.weight, drafter.norm.weight, drafter.layers[0].self_attn.k_proj.weight):
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        direction *= 3e-3 / direction.norm()
        with torch.no_grad():
            parameter += direction
            high = value()
            parameter -= 2 * direction
            low = value()
            parameter += direction
        expected = float((parameter.grad * direction).sum())
        assert float(high - low) / 2 == pytest.approx(expected, rel=2e-2, abs=2e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_loud_state_gives_finite_loss_and_gradients(varied_trajectory, variant):
    """J5, and INV2: with a norm per state it changes next to nothing."""
    batch = varied_trajectory.batch([0, 1])
    aux = batch.aux.clone()
    aux[:, :, 1] *= 1e4
    drafter = fresh(varied_trajectory, variant)
    rows = head_rows(drafter, varied_trajectory)
    quiet, _ = batch_loss(drafter, batch, rows, TrainConfig())
    loud, _ = batch_loss(drafter, dataclasses.replace(batch, aux=aux), rows, TrainConfig())
    loud.backward()
    assert loud.isfinite()
    assert all(p.grad.isfinite().all() for p in drafter.parameters())
    assert (abs(float((loud - quiet).detach())) < 1e-4) == drafter.config.fc_norm


# ---- the schedule


def test_the_rate_rises_then_falls_to_a_tenth():
    factors = [schedule(step, 100, 0.1) for step in range(100)]
    assert factors[:10] == pytest.approx([i / 10 for i in range(1, 11)])
    assert factors[10] == 1
    assert factors[55] == pytest.approx(0.55)
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert 0.1 < factors[-1] < 0.11
    assert schedule(0, 1, 0.05) == 1


# ---- what it learns, and what it sees


def test_loss_falls_and_tau_rises(varied_trajectory, trained):
    for variant, drafter in trained.items():
        batch, config = varied_trajectory.batch([0, 1, 2, 3]), TrainConfig(ttt=3)
        new = fresh(varied_trajectory, variant)
        rows = head_rows(new, varied_trajectory)
        assert batch_loss(drafter, batch, rows, config)[0] < 0.8 * batch_loss(new, batch, rows, config)[0]
        taus = [simulate(accept(all_starts(d, varied_trajectory, 3), varied_trajectory)).tau for d in (new, drafter)]
        assert taus[1] > taus[0] + 0.5


def test_a_row_of_the_log_is_the_mean_of_some_steps(varied_trajectory, whole, tmp_path):
    log = pd.read_csv(whole[1] / "train_log.csv")
    assert log["step"].tolist() == [2, 4, 6, STEPS]
    assert list(log.columns) == ["step", "lr", "grad_norm", "loss", "loss_1", "match_1", "loss_2", "match_2"]
    assert (log["loss"] - log["loss_1"] - 0.8 * log["loss_2"]).abs().max() < 1e-4
    assert log["loss"].iloc[-1] < log["loss"].iloc[0]
    assert log["lr"].tolist() == pytest.approx([3e-3 * schedule(s - 1, STEPS, 0.05) for s in log["step"]], rel=1e-4)
    config = dataclasses.replace(CONFIG, log_every=1)
    each = train(fresh(varied_trajectory), varied_trajectory, config, out=tmp_path / "d")
    assert same_bits(each, whole[0])
    steps = pd.read_csv(tmp_path / "d" / "train_log.csv")
    assert steps["step"].tolist() == list(range(1, STEPS + 1))
    for column in ("grad_norm", "loss", "loss_1", "match_1", "loss_2", "match_2"):
        value = steps[column]
        means = [value[:2].mean(), value[2:4].mean(), value[4:6].mean(), value[6]]
        assert log[column].tolist() == pytest.approx(means, rel=1e-4), column


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"loss": "kl"}, ["loss_1", "match_1"]),
        ({"loss": "lambda"}, ["loss_1", "alpha_1", "match_1"]),
        ({"loss": "alpha", "negatives": 5}, ["loss_1", "alpha_1"]),
    ],
)
def test_the_log_holds_what_was_measured(varied_trajectory, make_drafter, options, kept):
    """No acceptance rate where the loss forms none, no match where columns are sampled."""
    drafter = make_drafter(target=varied_trajectory)
    batch, config = varied_trajectory.batch([0, 1]), TrainConfig(ttt=1, **options)
    _, logged = batch_loss(drafter, batch, head_rows(drafter, varied_trajectory), config)
    assert sorted(logged) == sorted(kept)
    if options["loss"] == "lambda":
        _, alpha = batch_loss(drafter, batch, head_rows(drafter, varied_trajectory), TrainConfig(ttt=1, loss="alpha"))
        assert 0 < logged["alpha_1"] < 1
        assert logged["alpha_1"] == pytest.approx(alpha["alpha_1"])


@pytest.fixture
def high_floor(monkeypatch):
    """Leave some of a tiny vocabulary to sample from."""
    monkeypatch.setattr(TargetDistribution, "of", functools.partial(TargetDistribution.of, floor=0.2))


def test_sampled_columns_are_near_and_others_each_step(varied_trajectory, make_drafter, high_floor):
    drafter = make_drafter(target=varied_trajectory, scale=2.0)
    batch, rows = varied_trajectory.batch([0, 1]), head_rows(drafter, varied_trajectory)

    def value(negatives, seed=0):
        config = TrainConfig(ttt=2, negatives=negatives)
        return float(batch_loss(drafter, batch, rows, config, seed=seed)[0].detach())

    few = [value(3, seed) for seed in range(8)]
    assert value(VOCAB) == pytest.approx(value(0), rel=1e-5)
    assert few == pytest.approx([value(0)] * 8, rel=0.3)
    assert len(set(few)) > 1
    assert value(3, 5) == few[5]


# ---- what a step is made of


def batches_seen(trajectory, monkeypatch, out, variant="eagle3", **config):
    seen, batch = [], Trajectory.batch
    with monkeypatch.context() as patch:
        patch.setattr(Trajectory, "batch", lambda self, indices: seen.append(list(indices)) or batch(self, indices))
        train(fresh(trajectory, variant), trajectory, dataclasses.replace(CONFIG, **config), out=out)
    return seen


def test_every_variant_sees_the_same_batches_and_the_seed_changes_them(varied_trajectory, monkeypatch, tmp_path):
    config = {"epochs": 3.0, "batch_size": 1, "ttt": 1}
    seen = {
        variant: batches_seen(varied_trajectory, monkeypatch, tmp_path / variant, variant, **config)
        for variant in VARIANTS
    }
    first = seen["eagle3"]
    assert all(other == first for other in seen.values())
    epochs = [sum(first[i : i + 4], []) for i in range(0, 12, 4)]
    assert all(sorted(epoch) == [0, 1, 2, 3] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    other = batches_seen(varied_trajectory, monkeypatch, tmp_path / "seed", seed=1, **config)
    assert other != first
    again = batches_seen(varied_trajectory, monkeypatch, tmp_path / "ttt", **{**config, "ttt": 2, "lr": 1e-4})
    assert again == first


def test_epochs_may_be_a_part(varied_trajectory, monkeypatch, tmp_path):
    assert len(batches_seen(varied_trajectory, monkeypatch, tmp_path / "a", epochs=0.5)) == 1
    assert len(batches_seen(varied_trajectory, monkeypatch, tmp_path / "b", epochs=1.5)) == 3
    assert len(batches_seen(varied_trajectory, monkeypatch, tmp_path / "c", epochs=0.01)) == 1


def test_a_step_is_some_micro_batches_of_an_epoch(uneven):
    drafter, order = fresh(uneven), {}
    for accumulate in (1, 2):
        config = dataclasses.replace(CONFIG, accumulate=accumulate)
        run = begin(drafter, uneven, config)
        order[accumulate] = run.order(3)
        assert run.per_epoch == len(order[accumulate])
        assert run.steps == round(3.5 * run.per_epoch)
    assert [len(step) for step in order[1]] == [1, 1, 1]
    assert [len(step) for step in order[2]] == [2, 1]
    assert sum(order[1], []) == sum(order[2], [])
    assert sorted(sum(sum(order[1], []), [])) == [0, 1, 2, 3, 4]
    assert max(len(batch) for step in order[1] for batch in step) == CONFIG.batch_size


@pytest.mark.parametrize("options", [{}, {"stride": 2}, {"loss": "alpha"}])
def test_micro_batches_add_up_to_one_batch(uneven, options):
    """Gradients and weights, in float64: every token counts the same, however long the sequences beside it."""
    results = []
    for size, accumulate in ((5, 1), (1, 5), (2, 3)):
        options = {**options, "batch_size": size, "accumulate": accumulate, "ttt": 3, "epochs": 8.0, "clip": 1e9}
        drafter = fresh(uneven).double()
        config = dataclasses.replace(CONFIG, **options, weight_decay=0.0, autocast="none")
        run, gradients = begin(drafter, uneven, config), []
        for step in range(3):
            run.step(step)
            gradients.append({name: p.grad.clone() for name, p in drafter.named_parameters()})
        results.append((gradients, drafter.state_dict(), run.log[0]))
    for other in results[1:]:
        for mine, reference in zip(other[0], results[0][0], strict=True):
            for name in mine:
                scale = float(reference[name].abs().max())
                assert scale > 0
                torch.testing.assert_close(mine[name], reference[name], rtol=1e-6, atol=1e-7 * scale)
        for name, value in other[1].items():
            torch.testing.assert_close(value, results[0][1][name], rtol=1e-6, atol=1e-6)
        assert other[2] == pytest.approx(results[0][2], rel=1e-6)


@pytest.mark.parametrize("stride", [1, 2, 5])
def test_counts_are_the_rows_that_count(uneven, make_drafter, monkeypatch, stride):
    """At every depth and offset, in one batch and sequence by sequence; at depth 1 every row counts."""
    seen, plain = [], training.draft_loss

    def spy(hidden, weight, target, rows, **options):
        seen.append(len(rows))
        return plain(hidden, weight, target, rows, **options)

    monkeypatch.setattr(training, "draft_loss", spy)
    drafter, config = make_drafter(target=uneven), TrainConfig(ttt=4, stride=stride)
    run, rows, every = begin(drafter, uneven, config), head_rows(drafter, uneven), range(len(uneven))
    by_offset = []
    for offset in range(stride):
        for indices in (list(every), *([i] for i in every)):
            seen.clear()
            batch_loss(drafter, uneven.batch(indices), rows, config, offset=offset)
            assert run.counts(indices, offset) == seen
        by_offset.append(run.counts(list(every), offset))
        assert by_offset[-1][0] == uneven.answer_tokens - len(uneven)
    all_rows = [sum(max(0, e.length - e.prompt_length - k) for e in uneven.entries) for k in (2, 3, 4)]
    assert [sum(column) for column in zip(*by_offset, strict=True)][1:] == all_rows


def test_the_stride_begins_at_another_start_each_step(uneven, monkeypatch):
    offsets, plain = [], batch_loss

    def spy(*args, **options):
        offsets.append((options["offset"], options["seed"]))
        return plain(*args, **options)

    monkeypatch.setattr(training, "batch_loss", spy)
    run = begin(fresh(uneven), uneven, dataclasses.replace(CONFIG, stride=3, batch_size=3, accumulate=2))
    for step in range(4):
        run.step(step)
    assert [offset for offset, _ in offsets] == [0, 0, 1, 1, 2, 2, 0, 0]
    assert len({seed for _, seed in offsets}) == 8


def test_autocast_is_what_the_config_says(varied_trajectory, monkeypatch):
    cpu = torch.device("cpu")
    runs = {
        name: begin(fresh(varied_trajectory), varied_trajectory, dataclasses.replace(CONFIG, autocast=name))
        for name in ("auto", "bfloat16", "none")
    }
    assert {name: run.autocast for name, run in runs.items()} == {
        **{"auto": uses_bfloat16(cpu), "bfloat16": True, "none": False}
    }
    assert runs["none"].fingerprint != runs["bfloat16"].fingerprint
    assert uses_bfloat16(torch.device("cuda"))
    for tile, avx in ((False, False), (True, False), (False, True)):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda tile=tile: tile)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda avx=avx: avx)
        assert uses_bfloat16(cpu) == (tile or avx)
    for name in ("bfloat16", "none"):
        runs[name].step(0)
        runs[name].step(1)
    exact, near = (runs[name].log[0]["loss"] for name in ("none", "bfloat16"))
    assert exact != near == pytest.approx(exact, rel=0.02)
    assert all(p.dtype == torch.float32 for p in runs["bfloat16"].drafter.parameters())


# ---- held-out text


@pytest.fixture
def halves(varied_trajectory):
    return varied_trajectory.subset([0, 1, 2]), varied_trajectory.subset([3])


PEAK = dataclasses.replace(CONFIG, evaluate_every=1, epochs=3.0)  # 6 steps


@pytest.fixture
def measured(monkeypatch):
    """Return a function that makes the held-out tau of the weights after each step what is listed."""

    def say(taus):
        seen = []

        def numbers(drafter, held_out):
            weight = drafter.fc.weight.detach().clone()
            place = next((i for i, known in enumerate(seen) if torch.equal(known, weight)), len(seen))
            seen[place:] = seen[place:] or [weight]
            return {"held_out_tau": taus[place]}

        monkeypatch.setattr(training, "held_out_numbers", numbers)

    return say


def after(steps, halves, out):
    """The weights after some steps of the same training."""
    return train(fresh(halves[0]), halves[0], PEAK, out=out, held_out=halves[1], stop_after=steps)


@pytest.mark.parametrize(
    ("taus", "best"), [([1.0, 1.5, 2.5, 2.0, 2.5, 1.2], 3), ([3, 1, 1, 1, 1, 2], 1), ([1, 1, 1, 1, 1, 2], 6)]
)
def test_the_weights_kept_are_those_with_the_largest_tau(halves, tmp_path, measured, taus, best):
    """The earliest of them; the log says what every measurement gave, and the last step's state is kept beside."""
    measured(taus)
    drafter = train(fresh(halves[0]), halves[0], PEAK, out=tmp_path / "d", held_out=halves[1])
    assert same_bits(drafter, after(best, halves, tmp_path / "best") if best < 6 else drafter)
    assert same_bits(Drafter.load(tmp_path / "d", halves[0]), drafter)
    log = pd.read_csv(tmp_path / "d" / "train_log.csv")
    held = log[log["held_out_tau"].notna()]
    assert held["step"].tolist() == [1, 2, 3, 4, 5, 6]
    assert held["held_out_tau"].tolist() == taus
    assert log[log["loss"].notna()]["step"].tolist() == [2, 4, 6]
    last = load_file(tmp_path / "d" / "train_state.safetensors")["weight.fc.weight"]
    assert torch.equal(drafter.fc.weight, last) == (best == 6)


@pytest.mark.parametrize("stops", [(1,), (2,), (3,), (4,), (5,), (1, 3, 5)])
@pytest.mark.parametrize("taus", [[1.0, 1.5, 2.5, 2.0, 2.5, 1.2], [math.nan, 2.0, 1.0, 1.0, 1.0, 1.0]])
def test_stopped_and_resumed_keeps_the_same_best(halves, tmp_path, measured, stops, taus):
    measured(taus)
    whole = train(fresh(halves[0]), halves[0], PEAK, out=tmp_path / "whole", held_out=halves[1])
    for stop in (*stops, None):
        drafter = train(fresh(halves[0]), halves[0], PEAK, out=tmp_path / "d", held_out=halves[1], stop_after=stop)
    assert same_bits(drafter, whole)
    for name in ("train_log.csv", "train_state.safetensors", "train_best.safetensors", "model.safetensors"):
        assert (tmp_path / "d" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize("at", [3, 4, 5])
def test_an_error_after_the_best_was_written_changes_nothing(halves, tmp_path, measured, at):
    """The state is older than the best weights, or they are of a step still to come."""
    measured([1.0, 1.5, 2.5, 2.0, 3.0, 1.2])
    config, best = dataclasses.replace(PEAK, save_every=2), after(5, halves, tmp_path / "best")

    def progress(what, done, total):
        if done == at:
            raise Stop

    with pytest.raises(Stop):
        train(fresh(halves[0]), halves[0], config, out=tmp_path / "d", held_out=halves[1], progress=progress)
    again = train(fresh(halves[0]), halves[0], config, out=tmp_path / "d", held_out=halves[1])
    assert same_bits(again, best)
    finished = train(fresh(halves[0]), halves[0], config, out=tmp_path / "d", held_out=halves[1])
    assert same_bits(finished, best)
    (tmp_path / "d" / "train_best.safetensors").unlink()
    with pytest.raises(DriftlabError, match="train_best.safetensors is gone: remove .*train_state.safetensors too"):
        train(fresh(halves[0]), halves[0], config, out=tmp_path / "d", held_out=halves[1])


def test_held_out_text_too_short_for_a_round_keeps_the_last_weights(halves, tmp_path, measured):
    """And not the best of another training in the same folder, whose state was removed."""
    measured([1.0] * 6)
    train(fresh(halves[0]), halves[0], PEAK, out=tmp_path / "d", held_out=halves[1])
    (tmp_path / "d" / "train_state.safetensors").unlink()
    measured([math.nan] * 6)
    drafter = train(fresh(halves[0]), halves[0], PEAK, out=tmp_path / "d", held_out=halves[1])
    last = load_file(tmp_path / "d" / "train_state.safetensors")
    assert all(torch.equal(p, last[f"weight.{name}"]) for name, p in drafter.named_parameters())


def test_measuring_changes_no_step(halves, tmp_path):
    """And it is at the steps asked for and the last, or eight times in all."""
    config = dataclasses.replace(PEAK, evaluate_every=4)
    train(fresh(halves[0]), halves[0], config, out=tmp_path / "held", held_out=halves[1])
    plain = train(fresh(halves[0]), halves[0], config, out=tmp_path / "plain")
    last = load_file(tmp_path / "held" / "train_state.safetensors")
    assert all(torch.equal(p, last[f"weight.{name}"]) for name, p in plain.named_parameters())
    log = pd.read_csv(tmp_path / "held" / "train_log.csv")
    assert log[log["held_out_tau"].notna()]["step"].tolist() == [4, 6]
    assert "held_out_tau" not in pd.read_csv(tmp_path / "plain" / "train_log.csv").columns
    for steps, every in ((7, 1), (16, 2), (17, 3)):
        assert begin(fresh(halves[0]), halves[0], dataclasses.replace(CONFIG, epochs=steps / 2)).evaluate_every == every


def test_held_out_numbers_are_those_of_replay(varied_trajectory, trained):
    drafter, held_out = trained["eagle31"], varied_trajectory.subset([1, 3])
    numbers = held_out_numbers(drafter, held_out)
    acceptance = accept(all_starts(drafter, held_out, 8), held_out)
    assert numbers.pop("held_out_tau") == simulate(acceptance).tau > 1.5
    assert numbers == {
        f"held_out_match_{k}": pytest.approx(
            int(acceptance.match[..., k - 1].sum()) / sum(e.length - e.prompt_length - k for e in held_out.entries)
        )
        for k in (1, 2, 4, 8)
    }


def test_held_out_text_that_does_not_fit_is_refused_at_once(tiny_target, varied_target, halves, tmp_path):
    with pytest.raises(DriftlabError, match="none held out"):
        train(fresh(halves[0]), halves[0], PEAK, out=tmp_path / "d", held_out=halves[1].subset([]))
    other = Target(tiny_target.adapter.model, TinyTokenizer(), aux_layers=(2, 4, 6))
    other = other.record(["abc"], max_new_tokens=3, template=False, out=tmp_path / "r")
    with pytest.raises(DriftlabError, match="the drafter reads target states"):
        train(fresh(halves[0]), halves[0], PEAK, out=tmp_path / "d", held_out=other)
    assert not (tmp_path / "d").exists()


# ---- the split


@pytest.fixture(scope="module")
def many(varied_target, tmp_path_factory):
    """30 prompts of one or two letters; the first is there three times."""
    prompts = [letter + end for end in ("", "x") for letter in "abcdefghijklmn"]
    out = tmp_path_factory.mktemp("many") / "r"
    return varied_target.record([*prompts, "a", "a"], answers=["xyz"] * 30, max_new_tokens=3, template=False, out=out)


def sides(trajectory, share):
    return [[entry.id for entry in side.entries] for side in split(trajectory, share)]


def test_a_split_is_disjoint_and_complete_and_depends_on_the_prompt_alone(many):
    names = [entry.id for entry in many.entries]
    kept, held = sides(many, 0.3)
    assert sorted(kept + held) == sorted(names)
    assert kept == [name for name in names if name in kept]
    assert 3 <= len(held) <= 18
    assert len({name in held for name in (names[0], names[28], names[29])}) == 1
    again = many.subset(list(reversed(range(30))))
    assert [sorted(side) for side in sides(again, 0.3)] == [sorted(kept), sorted(held)]


def test_a_split_stays_when_the_recording_grows(many):
    before, now = (sides(many.subset(range(n)), 0.3) for n in (18, 30))
    for small, large in zip(before, now, strict=True):
        assert set(small) < set(large)
    assert set(now[1]) < set(sides(many, 0.7)[1])


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, 1.5])
def test_a_share_that_is_none_is_refused(many, share):
    with pytest.raises(DriftlabError, match=f"held-out share {share}: give a number between 0 and 1"):
        split(many, share)


def test_of_a_few_sequences_one_prompt_is_held_out(many):
    learning, held_out = split(many, 1e-6)
    prompts = [many.tokens(i)[: e.prompt_length].tolist() for i, e in enumerate(many.entries)]
    aside = [held_out.tokens(i)[: e.prompt_length].tolist() for i, e in enumerate(held_out.entries)]
    assert len({tuple(prompt) for prompt in aside}) == 1
    assert len(learning) + len(held_out) == len(many)
    assert len(aside) == prompts.count(aside[0])


def test_a_split_that_leaves_nothing_to_train_on_is_refused(many):
    with pytest.raises(DriftlabError, match=r"a share of 0\.3 of 1 sequences leaves nothing to train on: record more"):
        split(many.subset([0]), 0.3)


# ---- the same bits


def test_the_same_seed_twice_is_the_same_drafter(varied_trajectory, whole, tmp_path):
    again = train(fresh(varied_trajectory), varied_trajectory, CONFIG, out=tmp_path / "d")
    assert same_bits(again, whole[0])
    for name in ("train_log.csv", "config.json", "train_state.safetensors"):
        assert (tmp_path / "d" / name).read_bytes() == (whole[1] / name).read_bytes()


@pytest.mark.parametrize("stops", [(1,), (3,), (6,), (1, 2, 5), (0, 4)])
def test_stopped_and_resumed_ends_with_the_same_bits(varied_trajectory, whole, tmp_path, stops):
    for stop in stops:
        part = train(fresh(varied_trajectory), varied_trajectory, CONFIG, out=tmp_path / "d", stop_after=stop)
        assert not same_bits(part, whole[0])
        assert not (tmp_path / "d" / "model.safetensors").exists()
    resumed = train(fresh(varied_trajectory), varied_trajectory, CONFIG, out=tmp_path / "d")
    assert same_bits(resumed, whole[0])
    assert (tmp_path / "d" / "train_log.csv").read_bytes() == (whole[1] / "train_log.csv").read_bytes()
    assert resumed.config == whole[0].config


def test_so_it_does_with_everything_on(uneven, tmp_path, high_floor):
    """Micro-batches, a stride, sampled columns, a loss with a weight of its own, and a log of more steps than a stop."""
    config = dataclasses.replace(
        CONFIG, batch_size=1, accumulate=2, epochs=2.4, stride=2, negatives=4, loss="lambda", log_every=3, ttt=3
    )
    answer, _ = answer_rows(batch := uneven.batch([0, 1]))
    target = TargetDistribution.of(batch.last_hidden[answer], batch.lse[answer], uneven.head.lm_head, negatives=4)
    assert target.weights.max() > 1
    whole = train(fresh(uneven), uneven, config, out=tmp_path / "whole")
    for stop in (1, 2, 4, None):
        resumed = train(fresh(uneven), uneven, config, out=tmp_path / "d", stop_after=stop)
        assert same_bits(resumed, whole) == (stop is None)
    assert pd.read_csv(tmp_path / "d" / "train_log.csv")["step"].tolist() == [3, 6, 7]
    for name in ("train_log.csv", "train_state.safetensors"):
        assert (tmp_path / "d" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize("at", [1, 2, 4, 5, 7])
def test_an_error_between_saves_loses_no_more_than_to_the_last(varied_trajectory, whole, tmp_path, at):
    config = dataclasses.replace(CONFIG, save_every=2)
    told = []

    def progress(what, done, total):
        told.append((what, done, total))
        if done == at and len(told) > 1:
            raise Stop

    with pytest.raises(Stop):
        train(fresh(varied_trajectory), varied_trajectory, config, out=tmp_path / "d", progress=progress)
    told.clear()
    resumed = train(
        fresh(varied_trajectory), varied_trajectory, config, out=tmp_path / "d", progress=lambda *a: told.append(a)
    )
    assert told[0] == ("training d", max(at - 1, 0) // 2 * 2, STEPS)
    assert [done for _, done, _ in told] == list(range(told[0][1], STEPS + 1))
    assert same_bits(resumed, whole[0])


def test_killed_at_any_step_it_goes_on_to_the_same_bits(varied_trajectory, whole, tmp_path):
    """kill -9, between saves and while a state or the weights are written."""
    code = """
import os, signal, sys
import torch
import driftlab.files
from driftlab import VARIANTS, Drafter, TrainConfig, Trajectory, train
out, recording = sys.argv[1:]
config = TrainConfig(ttt=2, lr=3e-3, batch_size=2, epochs=3.5, save_every=2, log_every=2)
def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)
for point in ("3", "state", "model"):
    child = os.fork()
    if not child:
        torch.set_num_threads(1)
        replace = driftlab.files.os.replace
        def dying(temporary, path):
            if point in str(path.name):
                die()
            replace(temporary, path)
        driftlab.files.os.replace = dying
        trajectory = Trajectory.open(recording)
        drafter = Drafter(VARIANTS["eagle31"].for_target(trajectory), trajectory)
        train(drafter, trajectory, config, out=out + "/" + point, progress=lambda w, done, t: str(done) == point and die())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL, point
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), str(varied_trajectory.path)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    config = dataclasses.replace(CONFIG, save_every=2)
    for point in ("3", "state", "model"):
        out = tmp_path / point
        assert not (out / "config.json").exists()
        assert list(out.glob(".*.tmp")) or point == "3"
        resumed = train(fresh(varied_trajectory), varied_trajectory, config, out=out)
        assert same_bits(resumed, whole[0]), point
        assert not list(out.glob(".*.tmp"))
        assert same_bits(Drafter.load(out, varied_trajectory), whole[0])


def test_a_finished_training_is_not_trained_further(varied_trajectory, whole, tmp_path, monkeypatch):
    train(fresh(varied_trajectory), varied_trajectory, CONFIG, out=tmp_path / "d")
    monkeypatch.setattr(training._Run, "step", lambda self, step: pytest.fail("a step was made"))
    again = train(fresh(varied_trajectory), varied_trajectory, CONFIG, out=tmp_path / "d")
    assert same_bits(again, whole[0])


# ---- refused


@pytest.fixture(scope="module")
def begun(varied_trajectory, tmp_path_factory):
    out = tmp_path_factory.mktemp("begun") / "d"
    train(fresh(varied_trajectory), varied_trajectory, CONFIG, out=out, stop_after=2)
    return out


@pytest.mark.parametrize(
    "change",
    [
        *({"lr": 1e-3}, {"seed": 1}, {"epochs": 9.0}, {"ttt": 3}, {"batch_size": 1}, {"weight_decay": 0.1}),
        *(
            {"loss": "kl"},
            {"accumulate": 2},
            {"stride": 2},
            {"negatives": 9},
            {"log_every": 3},
            {"autocast": "bfloat16"},
        ),
    ],
)
def test_the_state_of_a_training_with_other_settings_is_refused(varied_trajectory, begun, change):
    before = (begun / "train_state.safetensors").read_bytes()
    with pytest.raises(DriftlabError, match="state of another training .*choose another folder"):
        train(fresh(varied_trajectory), varied_trajectory, dataclasses.replace(CONFIG, **change), out=begun)
    assert (begun / "train_state.safetensors").read_bytes() == before


def test_how_often_to_save_may_change(varied_trajectory, begun, whole, tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "train_state.safetensors").write_bytes((begun / "train_state.safetensors").read_bytes())
    config = dataclasses.replace(CONFIG, save_every=3)
    assert same_bits(train(fresh(varied_trajectory), varied_trajectory, config, out=tmp_path / "d"), whole[0])


def test_the_state_of_another_drafter_is_refused(varied_trajectory, begun):
    other = Drafter(VARIANTS["eagle31"].for_target(varied_trajectory), varied_trajectory, seed=1)
    for drafter in (other, fresh(varied_trajectory, "eagle3")):
        with pytest.raises(DriftlabError, match="state of another training"):
            train(drafter, varied_trajectory, CONFIG, out=begun)


def test_the_state_of_a_training_on_other_data_is_refused(varied_target, varied_trajectory, begun, tmp_path):
    """Also where ids and lengths are the same, as for another sampling seed."""
    with pytest.raises(DriftlabError, match="state of another training"):
        train(fresh(varied_trajectory), varied_trajectory.subset([1, 0, 2, 3]), CONFIG, out=begun)
    sampled = [
        varied_target.record(
            ["abc", "q"], max_new_tokens=6, temperature=1.0, seed=seed, template=False, out=tmp_path / f"{seed}"
        )
        for seed in (0, 1)
    ]
    assert [e.length for e in sampled[0].entries] == [e.length for e in sampled[1].entries]
    train(fresh(sampled[0]), sampled[0], CONFIG, out=tmp_path / "d", stop_after=1)
    with pytest.raises(DriftlabError, match="state of another training"):
        train(fresh(sampled[1]), sampled[1], CONFIG, out=tmp_path / "d")
    aside = [
        varied_target.record(
            ["xy", "zz"], max_new_tokens=6, temperature=1.0, seed=seed, template=False, out=tmp_path / f"aside {seed}"
        )
        for seed in (0, 1)
    ]
    train(fresh(varied_trajectory), varied_trajectory, CONFIG, out=tmp_path / "held", held_out=aside[0], stop_after=1)
    for held_out in (None, aside[1]):
        with pytest.raises(DriftlabError, match="state of another training"):
            train(fresh(varied_trajectory), varied_trajectory, CONFIG, out=tmp_path / "held", held_out=held_out)


def test_a_broken_state_is_named(varied_trajectory, begun, tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "train_state.safetensors").write_bytes((begun / "train_state.safetensors").read_bytes()[:-9])
    with pytest.raises(DriftlabError, match="train_state.safetensors is not a whole safetensors file .*remove it"):
        train(fresh(varied_trajectory), varied_trajectory, CONFIG, out=tmp_path / "d")


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_state(varied_trajectory, whole, tmp_path, monkeypatch):
    config = dataclasses.replace(CONFIG, save_every=2)
    calls, plain = [], batch_loss

    def spoilt(*args, **options):
        calls.append(1)
        loss, logged = plain(*args, **options)
        return (loss * math.nan if len(calls) == 4 else loss), logged

    monkeypatch.setattr(training, "batch_loss", spoilt)
    with pytest.raises(
        DriftlabError, match=r"the loss at step 3 is nan: lower lr \(0\.003\); the last saved state is kept"
    ):
        train(fresh(varied_trajectory), varied_trajectory, config, out=tmp_path / "d")
    told = []
    resumed = train(
        fresh(varied_trajectory), varied_trajectory, config, out=tmp_path / "d", progress=lambda *a: told.append(a)
    )
    assert told[0][1] == 2
    assert same_bits(resumed, whole[0])


@pytest.mark.parametrize(
    "values",
    [
        *({"ttt": 0}, {"batch_size": 0}, {"accumulate": 0}, {"log_every": 0}, {"stride": 0}, {"save_every": -1}),
        *({"evaluate_every": -1}, {"negatives": -1}, {"lr": 0.0}, {"epochs": 0.0}, {"clip": 0.0}, {"eta": -1.0}),
        *({"weight_decay": -0.1}, {"warmup": -0.1}, {"warmup": 1.1}, {"depth_decay": 0.0}, {"depth_decay": 1.1}),
    ],
)
def test_settings_out_of_range_are_refused(values):
    name, value = next(iter(values.items()))
    with pytest.raises(DriftlabError, match=f"{name}={value}[,)].*stride and log_every are at least 1"):
        TrainConfig(**values)


def test_settings_by_name_are_refused_with_the_names_there_are():
    with pytest.raises(DriftlabError, match="loss 'mse': choose from soft_ce, kl, alpha, lambda"):
        TrainConfig(loss="mse")
    with pytest.raises(DriftlabError, match="autocast 'float16': choose from auto, bfloat16, none"):
        TrainConfig(autocast="float16")


def test_a_drafter_for_other_states_is_refused(varied_trajectory, tmp_path):
    config = dataclasses.replace(VARIANTS["eagle31"].for_target(varied_trajectory), aux_layers=(2, 4, 6))
    with pytest.raises(DriftlabError, match=r"record with aux_layers=\[2, 4, 6\]"):
        train(Drafter(config, varied_trajectory), varied_trajectory, CONFIG, out=tmp_path / "d")
    assert not (tmp_path / "d").exists()


def test_a_full_disk_keeps_the_last_state(varied_trajectory, whole, tmp_path, monkeypatch):
    config, saves = dataclasses.replace(CONFIG, save_every=2), []

    def full(path):
        saves.append(path)
        if len(saves) == 2:
            raise DriftlabError(f"no space left while writing {path}")
        return atomic(path)

    monkeypatch.setattr("driftlab.sealed.atomic", full)
    with pytest.raises(DriftlabError, match="no space left"):
        train(fresh(varied_trajectory), varied_trajectory, config, out=tmp_path / "d")
    told = []
    resumed = train(
        fresh(varied_trajectory), varied_trajectory, config, out=tmp_path / "d", progress=lambda *a: told.append(a)
    )
    assert told[0][1] == 2
    assert same_bits(resumed, whole[0])


# ---- what is saved


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_trained_drafter_reloads_and_says_how_it_was_trained(varied_trajectory, tmp_path, variant):
    """B4, J11: the two switches, the depths and the longest text are in its config."""
    drafter = train(fresh(varied_trajectory, variant), varied_trajectory, CONFIG, out=tmp_path / "d")
    longest = max(entry.length for entry in varied_trajectory.entries)
    assert (drafter.config.ttt, drafter.config.trained_length) == (2, longest)
    loaded = Drafter.load(tmp_path / "d", varied_trajectory)
    assert loaded.config == drafter.config
    assert (loaded.config.fc_norm, loaded.config.norm_output) == (
        VARIANTS[variant].fc_norm,
        VARIANTS[variant].norm_output,
    )
    assert same_bits(loaded, drafter)
    batch = varied_trajectory.batch([0])
    with torch.no_grad():
        assert torch.equal(loaded(batch.tokens, batch.aux), drafter(batch.tokens, batch.aux))
    assert json.loads((tmp_path / "d" / "config.json").read_text())["norm_output"] == VARIANTS[variant].norm_output
    assert not {"embed_tokens.weight", "lm_head.weight"} & set(load_file(tmp_path / "d" / "model.safetensors"))


def test_a_reduced_vocabulary_is_kept_through_training_and_reload(varied_trajectory, tmp_path):
    vocab = choose_draft_vocab(varied_trajectory, 30)
    drafter = train(fresh(varied_trajectory, draft_vocab=vocab), varied_trajectory, CONFIG, out=tmp_path / "d")
    assert drafter.draft_vocab.tolist() == vocab
    assert Drafter.load(tmp_path / "d", varied_trajectory).draft_vocab.tolist() == vocab


# ---- the draft vocabulary


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """Answers given: 'a' five times, 'b' three times, 'c' once; prompts of 'z' and 'y'."""
    target = Target(tiny_model("Llama"), TinyTokenizer(), aux_layers=(1, 3, 5))
    return target.record(
        ["zzy", "z"],
        answers=["abaab", "aabc"],
        max_new_tokens=9,
        template=False,
        out=tmp_path_factory.mktemp("c") / "r",
    )


def ids(text):
    return TinyTokenizer()(text, False)["input_ids"]


def test_the_draft_vocabulary_is_the_frequent_answers_with_eos_always_in(counted):
    a, b, c, y, z = ids("abcyz")
    assert choose_draft_vocab(counted, 1) == [EOS]
    assert choose_draft_vocab(counted, 2) == sorted([EOS, a])
    assert choose_draft_vocab(counted, 3) == sorted([EOS, a, b])
    assert choose_draft_vocab(counted, 4) == sorted([EOS, a, b, c])
    assert choose_draft_vocab(counted, 5) == sorted([EOS, a, b, c, z])  # then by frequency in the prompts
    for size in range(1, VOCAB + 1):
        chosen = choose_draft_vocab(counted, size)
        assert len(chosen) == size
        assert chosen == sorted(set(chosen))
        assert EOS in chosen
    assert choose_draft_vocab(counted, VOCAB) == list(range(VOCAB))
    rest = set(choose_draft_vocab(counted, 9)) - {EOS, a, b, c, z, y, 1}
    assert rest == set(sorted(set(range(VOCAB)) - {EOS, a, b, c, z, y, 1})[:2])  # then low ids


@pytest.mark.parametrize("size", [0, -1, VOCAB + 1])
def test_a_draft_vocabulary_of_no_or_too_many_tokens_is_refused(counted, size):
    with pytest.raises(DriftlabError, match=f"draft vocabulary of {size}: the target has {VOCAB} tokens"):
        choose_draft_vocab(counted, size)


def test_coverage_counts_answer_tokens(counted):
    """D8."""
    a, b, c, _, z = ids("abcyz")
    assert coverage([a], counted) == pytest.approx(5 / 9)
    assert coverage([a, b], counted) == pytest.approx(8 / 9)
    assert coverage(torch.tensor([a, b, c]), counted) == 1
    assert coverage([z], counted) == 0
    assert coverage([a, b], counted.subset([1])) == pytest.approx(3 / 4)
    assert math.isnan(coverage([a], counted.subset([])))


def test_what_is_trained_on_cannot_be_held_out(varied_trajectory, halves, tmp_path):
    """Its tau would be in-sample, and would look like a result."""
    with pytest.raises(DriftlabError, match="1 held-out prompts are trained on too, the first is 'prompts:3'"):
        train(
            fresh(varied_trajectory),
            varied_trajectory.subset([0, 2]),
            CONFIG,
            out=tmp_path / "d",
            held_out=varied_trajectory.subset([1, 2]),
        )
    assert not (tmp_path / "d").exists()


def test_a_gradient_that_is_not_finite_leaves_the_last_state(varied_trajectory, tmp_path, monkeypatch):
    """The loss may be finite where its gradient is not; the clip would write NaN into every weight."""
    plain, calls = batch_loss, []

    def spoilt(drafter, *args, **kwargs):
        loss, logged = plain(drafter, *args, **kwargs)
        calls.append(1)
        if len(calls) == 3:
            loss = loss + (drafter.fc.weight.flatten()[0] * 0).sqrt()
        return loss, logged

    config = dataclasses.replace(CONFIG, save_every=1)
    drafter = fresh(varied_trajectory)
    with monkeypatch.context() as patch:
        patch.setattr(training, "batch_loss", spoilt)
        with pytest.raises(DriftlabError, match="gradient at step 2 is not finite"):
            train(drafter, varied_trajectory, config, out=tmp_path / "d")
    assert all(p.isfinite().all() for p in drafter.parameters())
    again = train(fresh(varied_trajectory), varied_trajectory, config, out=tmp_path / "d")
    assert same_bits(again, train(fresh(varied_trajectory), varied_trajectory, config, out=tmp_path / "whole"))


def test_the_log_pools_over_rows_and_has_nothing_where_there_was_none():
    """1 of 10 right and 81 of 90 right are 82 of 100, not the mean of .1 and .9."""
    steps = [
        {"grad_norm": 1.0, "loss": 2.0, "match_1": 0.1, "loss_2": 0.0, "rows_1": 10, "rows_2": 0},
        {"grad_norm": 3.0, "loss": 4.0, "match_1": 0.9, "loss_2": 0.0, "rows_1": 90, "rows_2": 0},
    ]
    pooled = training._pooled(steps)
    assert math.isnan(pooled.pop("loss_2"))
    assert pooled == {"grad_norm": 2.0, "loss": 3.0, "match_1": pytest.approx(0.82)}
