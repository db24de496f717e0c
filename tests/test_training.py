"""Train-time test: which labels count, the target's distribution, gradients, and resuming to the same bits."""

import dataclasses
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
from driftlab.training import SoftCrossEntropy, batch_loss, coverage, schedule, target_probabilities

CONFIG = TrainConfig(ttt=2, lr=3e-3, batch_size=2, epochs=3.5, save_every=0)  # 2 batches an epoch: 7 steps
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


@pytest.fixture(scope="module")
def whole(varied_trajectory, tmp_path_factory):
    """Trained for seven steps without a stop, and the folder it was saved to."""
    out = tmp_path_factory.mktemp("whole") / "d"
    return train(fresh(varied_trajectory), varied_trajectory, CONFIG, out=out), out


# ---- the loss


def naive_loss(drafter, trajectory, model, batch, config):
    """Row by row in float64, from the target model's own logits: t >= P - 1 counts at depth k iff t + k + 1 exists."""
    with torch.no_grad():
        p = torch.stack([model(row[None], use_cache=False).logits[0].double().softmax(-1) for row in batch.tokens])
    p = p[..., drafter.draft_vocab]
    total, by_depth = 0.0, []
    for state, _ in unroll(drafter, batch, config.ttt, feed="text"):
        log_q = drafter.logits(state.normed).double().log_softmax(-1)
        terms = []
        for b in range(len(batch)):
            prompt, length = int(batch.prompt_lengths[b]), int(batch.lengths[b])
            for start, t in enumerate(range(prompt - 1, length - 1)):
                if t + state.depth + 1 <= length - 1:
                    terms.append(-(p[b, t + state.depth] * log_q[b, start]).sum())
        by_depth.append(sum(terms) / max(len(terms), 1))
        total = total + config.depth_decay ** (state.depth - 1) * by_depth[-1]
    return total, by_depth


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("reduced", [False, True])
def test_loss_and_gradients_are_those_of_a_plain_loop(varied_target, varied_trajectory, make_drafter, variant, reduced):
    """J1, C4 and the loss itself, over two sequences of different length, against the target model's logits."""
    vocab = choose_draft_vocab(varied_trajectory, 40) if reduced else None
    drafter = make_drafter(variant, target=varied_trajectory, draft_vocab=vocab, scale=2.0)
    batch, config = varied_trajectory.batch([0, 3]), TrainConfig(ttt=3, depth_decay=0.7)
    loss, logged = batch_loss(drafter, batch, head_rows(drafter, varied_trajectory), config)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in drafter.named_parameters()}
    drafter.zero_grad()
    expected, by_depth = naive_loss(drafter, varied_trajectory, varied_target.adapter.model, batch, config)
    expected.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-4)
    assert [logged[f"loss_{k}"] for k in (1, 2, 3)] == pytest.approx([float(x.detach()) for x in by_depth], rel=1e-4)
    for name, parameter in drafter.named_parameters():
        scale = float(parameter.grad.abs().max())
        assert scale > 0, name
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-2, atol=1e-3 * scale)


def test_which_labels_count(varied_trajectory, make_drafter, monkeypatch):
    """J1: ten tokens, answer 6..9. Depth 1 learns tokens 7, 8, 9; depth 2 tokens 8, 9; depth 3 token 9; depth 4 none."""
    whole = varied_trajectory.batch([0])
    cut = {name: getattr(whole, name)[:, :10] for name in ("tokens", "aux", "last_hidden", "lse")}
    batch = dataclasses.replace(whole, **cut, lengths=torch.tensor([10]), prompt_lengths=torch.tensor([6]))
    batch = dataclasses.replace(batch, lse=torch.zeros(1, 10))
    labels, apply = [], SoftCrossEntropy.apply
    index = target_probabilities(batch, varied_trajectory.head.lm_head)[1]
    place = {int(index[0, t]): t for t in range(5, 9)}  # the distribution at row t is that of token t + 1

    def spy(hidden, weight, p, rows):
        labels.append([place[int(row)] + 1 for row in rows])
        return apply(hidden, weight, p, rows)

    monkeypatch.setattr(training.SoftCrossEntropy, "apply", spy)
    drafter = make_drafter(target=varied_trajectory)
    loss, logged = batch_loss(drafter, batch, varied_trajectory.head.lm_head, TrainConfig(ttt=4))
    assert labels == [[7, 8, 9], [8, 9], [9], []]
    assert loss.isfinite()
    assert logged["loss_4"] == 0
    assert math.isnan(logged["match_4"])


def test_the_targets_distribution_is_the_models(varied_target, varied_trajectory):
    """C4: from the file, without the model, to 1e-5, and restricted to the draft vocabulary without renormalising."""
    vocab = torch.tensor(choose_draft_vocab(varied_trajectory, 20))
    batch = varied_trajectory.batch([0, 1, 2, 3])
    p, index = target_probabilities(batch, varied_trajectory.head.lm_head[vocab])
    assert len(p) == varied_trajectory.answer_tokens
    for b in range(4):
        with torch.no_grad():
            own = varied_target.adapter.model(batch.tokens[b : b + 1], use_cache=False).logits[0].softmax(-1)
        for t in range(int(batch.prompt_lengths[b]) - 1, int(batch.lengths[b]) - 1):
            torch.testing.assert_close(p[index[b, t]], own[t, vocab], rtol=0, atol=1e-5)
    assert 0.05 < float(p.sum(-1).mean()) < 0.99
    full, _ = target_probabilities(batch, varied_trajectory.head.lm_head)
    torch.testing.assert_close(full.sum(-1), torch.ones(len(full)), rtol=0, atol=1e-4)


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
    monkeypatch.setattr(training, "target_probabilities", lambda *args: calls.append(1) or target_probabilities(*args))
    drafter = make_drafter(target=varied_trajectory)
    batch_loss(drafter, varied_trajectory.batch([0, 1]), head_rows(drafter, varied_trajectory), TrainConfig(ttt=5))
    assert len(calls) == 1


def test_answers_of_one_token_teach_nothing_and_break_nothing(varied_target, tmp_path):
    trajectory = varied_target.record(["abc", "q"], max_new_tokens=1, template=False, out=tmp_path / "r")
    before = fresh(trajectory)
    after = train(fresh(trajectory), trajectory, dataclasses.replace(CONFIG, weight_decay=0.0), out=tmp_path / "d")
    assert same_bits(before, after)
    assert pd.read_csv(tmp_path / "d" / "train_log.csv")["loss"].tolist() == [0.0] * 4


# ---- the fused cross-entropy


@pytest.mark.parametrize("own_head", [False, True])
@pytest.mark.parametrize("block", [1, 7, 10_000])
def test_soft_cross_entropy_is_autograds(monkeypatch, own_head, block):
    """Also in blocks, for rows that repeat, for p that does not sum to one, and scaled from outside."""
    monkeypatch.setattr(training, "_BLOCK_BYTES", 4 * 13 * block)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(20, 8, generator=generator, dtype=torch.float64)
    weight = torch.randn(13, 8, generator=generator, dtype=torch.float64)
    p = torch.rand(9, 13, generator=generator, dtype=torch.float64)
    rows = torch.randint(0, 9, (20,), generator=generator)

    def run(function, dtype):
        h, w = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(own_head)
        loss = function(h, w, p.to(dtype))
        (2.5 * loss).backward()
        return loss.detach(), h.grad, w.grad

    def plain(h, w, p):
        z = h @ w.T
        return -(p[rows] * z.log_softmax(-1)).sum()

    ours = run(lambda h, w, p: SoftCrossEntropy.apply(h, w, p, rows)[0], torch.float32)
    theirs = run(plain, torch.float64)
    for mine, reference in zip(ours, theirs, strict=True):
        if reference is None:
            assert mine is None
        else:
            torch.testing.assert_close(mine.double(), reference, rtol=1e-4, atol=1e-4)
    best = SoftCrossEntropy.apply(hidden.float(), weight.float(), p.float(), rows)[1]
    assert torch.equal(best, (hidden @ weight.T).argmax(-1))


def test_no_rows_are_no_loss():
    hidden = torch.zeros(0, 8, requires_grad=True)
    loss, best = SoftCrossEntropy.apply(hidden, torch.ones(5, 8), torch.ones(3, 5), torch.zeros(0, dtype=torch.long))
    loss.backward()
    assert (float(loss.detach()), best.shape, hidden.grad.shape) == (0.0, (0,), (0, 8))


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


def test_the_log_is_one_row_a_step(whole):
    log = pd.read_csv(whole[1] / "train_log.csv")
    assert log["step"].tolist() == list(range(STEPS))
    assert list(log.columns) == ["step", "loss", "grad_norm", "loss_1", "match_1", "loss_2", "match_2"]
    assert (log["loss"] - log["loss_1"] - 0.8 * log["loss_2"]).abs().max() < 1e-4
    assert log["loss"].iloc[-1] < log["loss"].iloc[0]


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


class Stop(Exception):
    pass


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
config = TrainConfig(ttt=2, lr=3e-3, batch_size=2, epochs=3.5, save_every=2)
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
    "change", [{"lr": 1e-3}, {"seed": 1}, {"epochs": 9.0}, {"ttt": 3}, {"batch_size": 1}, {"weight_decay": 0.1}]
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


def test_a_broken_state_is_named(varied_trajectory, begun, tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "train_state.safetensors").write_bytes((begun / "train_state.safetensors").read_bytes()[:-9])
    with pytest.raises(DriftlabError, match="train_state.safetensors is not a whole file .*remove it"):
        train(fresh(varied_trajectory), varied_trajectory, CONFIG, out=tmp_path / "d")


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_state(varied_trajectory, whole, tmp_path, monkeypatch):
    config = dataclasses.replace(CONFIG, save_every=2)
    calls, plain = [], batch_loss

    def spoilt(*args):
        calls.append(1)
        loss, logged = plain(*args)
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

    monkeypatch.setattr(training, "atomic", full)
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
