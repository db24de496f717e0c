"""Every loss and its gradients against autograd in float64; p held or made block by block; sampled columns."""

from types import SimpleNamespace

import pytest
import torch
from torch.autograd import gradcheck

from driftlab import DriftlabError, losses
from driftlab.losses import LOSSES, TargetDistribution, draft_loss

VOCAB, DRAFT, AT, ROWS, D_TARGET, D_MODEL = 31, 13, 9, 20, 6, 8
FLOOR = 0.1


def problem(dtype=torch.float64, draft=DRAFT, vocab=VOCAB, seed=0):
    """A target over ``vocab`` tokens, and drafted rows over ``draft`` of them that point into its rows, some repeated."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(AT, D_TARGET, generator=generator, dtype=torch.float64)
    head = torch.randn(vocab, D_TARGET, generator=generator, dtype=torch.float64)
    ids = torch.randperm(vocab, generator=generator)[:draft].sort().values
    full = (states @ head.T).softmax(-1)
    made = SimpleNamespace(
        states=states.to(dtype),
        lse=(states @ head.T).logsumexp(-1).to(dtype),
        head=head[ids].to(dtype),
        hidden=torch.randn(ROWS, D_MODEL, generator=generator, dtype=torch.float64).to(dtype),
        weight=torch.randn(draft, D_MODEL, generator=generator, dtype=torch.float64).to(dtype),
        rows=torch.randint(0, AT, (ROWS,), generator=generator),
        p=full[:, ids],
    )
    made.target = lambda **options: TargetDistribution.of(made.states, made.lse, made.head, **options)
    return made


def naive(loss, hidden, weight, p, eta=3.0, columns=None, w=None):
    """The definitions as they stand; columns c with weights w_c in place of all; p is [row column]."""
    z = hidden @ (weight if columns is None else weight[columns]).T
    w = torch.ones_like(z[0]) if w is None else w
    q = z.exp() / (w * z.exp()).sum(-1, keepdim=True)
    a = (w * torch.minimum(p, q)).sum(-1)
    kl = (w * p * (p / q).log()).sum()
    if loss == "lambda":
        share = (-eta * a.mean()).exp().detach()
        return share * kl + (1 - share) * (1 - a).sum()
    return {"soft_ce": -(w * p * q.log()).sum(), "kl": kl, "alpha": -a.log().sum()}[loss]


def run(function, made, trained=True):
    """Value and gradients of ``function(hidden, weight)``, scaled from outside."""
    hidden, weight = made.hidden.clone().requires_grad_(), made.weight.clone().requires_grad_(trained)
    loss = function(hidden, weight)
    (2.5 * loss).backward()
    return [loss.detach(), hidden.grad] + [weight.grad] * trained


def close(ours, theirs, tolerance=1e-9):
    assert len(ours) == len(theirs)
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.double(), reference.double(), rtol=tolerance, atol=tolerance)


# ---- values and gradients


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("block", [1, 7, 10_000])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 2e-4)])
def test_value_and_gradients_are_autograds(monkeypatch, loss, block, trained, dtype, tolerance):
    """Over a part of the vocabulary, so that p sums to less than one; in blocks; in float64 and float32."""
    monkeypatch.setattr(losses, "_BLOCK_BYTES", 4 * DRAFT * block)
    exact = problem()
    assert float(exact.p.sum(-1).max()) < 0.95
    theirs = run(lambda h, w: naive(loss, h, w, exact.p[exact.rows]), exact, trained)
    made = problem(dtype)
    target = made.target()
    close([target.at(torch.arange(AT))], [exact.p], tolerance)
    close(run(lambda h, w: draft_loss(h, w, target, made.rows, loss=loss)[0], made, trained), theirs, tolerance)


def test_a_frozen_head_gets_no_gradient():
    made = problem()
    hidden = made.hidden.requires_grad_()
    draft_loss(hidden, made.weight, made.target(), made.rows)[0].backward()
    assert made.weight.grad is None
    assert hidden.grad.abs().max() > 0


@pytest.mark.parametrize(
    ("loss", "eta"), [("soft_ce", 3.0), ("kl", 3.0), ("alpha", 3.0), ("lambda", 0.0), ("lambda", 1e9)]
)
def test_gradients_are_slopes(loss, eta):
    """gradcheck; of lambda at its two ends, kl and 1 - a, where its weight does not move."""
    made = problem()
    target = made.target()
    inputs = (made.hidden.requires_grad_(), made.weight.requires_grad_())
    assert gradcheck(lambda h, w: draft_loss(h, w, target, made.rows, loss=loss, eta=eta)[0], inputs)


def test_kl_is_soft_ce_less_a_constant():
    made = problem()
    ce, kl = (
        run(lambda h, w, loss=loss: draft_loss(h, w, made.target(), made.rows, loss=loss)[0], made)
        for loss in ("soft_ce", "kl")
    )
    p = made.p[made.rows]
    close([ce[0] - kl[0]], [-(p * p.log()).sum()])
    close(ce[1:], kl[1:])


def test_lambdas_weight_is_one_number_a_call_without_gradient():
    made = problem()
    target, p = made.target(), made.p[made.rows]

    def ours(h, w, rows=slice(None)):
        return draft_loss(h[rows], w, target, made.rows[rows], loss="lambda", eta=2.0)[0]

    def moving(h, w):
        q = (h @ w.T).softmax(-1)
        a = torch.minimum(p, q).sum(-1)
        share = (-2.0 * a.mean()).exp()
        return share * (p * (p / q).log()).sum() + (1 - share) * (1 - a).sum()

    whole = run(ours, made)
    close(whole[:1], run(moving, made)[:1])
    assert not torch.allclose(whole[1], run(moving, made)[1], rtol=1e-2)
    halves = (slice(0, 5), slice(5, None))
    parts = run(lambda h, w: sum(ours(h, w, half) for half in halves), made)
    close(parts, run(lambda h, w: sum(naive("lambda", h[half], w, p[half], 2.0) for half in halves), made))
    assert abs(float(parts[0] - whole[0])) > 1e-4


@pytest.mark.parametrize("loss", LOSSES)
def test_alpha_is_the_overlap_and_best_the_arg_max(loss):
    made = problem()
    _, accepted, best = draft_loss(made.hidden, made.weight, made.target(), made.rows, loss=loss)
    logits = made.hidden @ made.weight.T
    overlap = torch.minimum(made.p[made.rows], logits.softmax(-1)).sum()
    assert float(accepted) == pytest.approx(float(overlap) if loss in ("alpha", "lambda") else 0.0)
    assert torch.equal(best, logits.argmax(-1))


@pytest.mark.parametrize("loss", LOSSES)
def test_no_overlap_is_finite(loss):
    """q on one column, p on others: a underflows, and so do most of p and q."""
    made = problem(torch.float32)
    made.states, made.lse = made.states * 200, (made.states * 200 @ made.head.T).logsumexp(-1)
    made.weight = made.weight * 200
    q = (made.hidden @ made.weight.T).softmax(-1)
    assert torch.minimum(q, made.target().at(made.rows)).sum(-1).min() == 0
    value, *gradients = run(lambda h, w: draft_loss(h, w, made.target(), made.rows, loss=loss)[0], made)
    assert value.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("negatives", [0, 3])
@pytest.mark.parametrize("loss", LOSSES)
def test_no_rows_are_no_loss(loss, negatives):
    made = problem()
    for states in (AT, 0):
        target = TargetDistribution.of(made.states[:states], made.lse[:states], made.head, negatives=negatives)
        hidden, weight = made.hidden[:0].clone().requires_grad_(), made.weight.clone().requires_grad_()
        value, accepted, best = draft_loss(hidden, weight, target, made.rows[:0], loss=loss)
        value.backward()
        assert (float(value.detach()), float(accepted), best.shape, hidden.grad.shape) == (0, 0, (0,), (0, D_MODEL))
        assert weight.grad.abs().sum() == 0


def test_an_unknown_loss_is_refused():
    made = problem()
    with pytest.raises(DriftlabError, match="loss 'l2': choose from soft_ce, kl, alpha, lambda"):
        draft_loss(made.hidden, made.weight, made.target(), made.rows, loss="l2")


# ---- in half precision


def test_p_is_float32_under_autocast_and_the_loss_is_near():
    made = problem(torch.float32)
    plain = made.target().at(made.rows)
    exact = [run(lambda h, w, loss=loss: naive(loss, h, w, made.p[made.rows]), problem()) for loss in LOSSES]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(made.target().at(made.rows), plain)
        near = [
            run(lambda h, w, loss=loss: draft_loss(h, w, made.target(), made.rows, loss=loss)[0], made)
            for loss in LOSSES
        ]
    for ours, theirs in zip(near, exact, strict=True):
        for mine, reference in zip(ours, theirs, strict=True):
            assert mine.dtype == torch.float32
            assert (mine.double() - reference).norm() < 0.03 * reference.norm()


def test_a_bfloat16_drafter_gets_gradients_of_its_own_dtype():
    made = problem(torch.float32)
    target, theirs = made.target(), run(lambda h, w: naive("kl", h, w, made.p[made.rows].float()), made)
    made.hidden, made.weight = made.hidden.bfloat16(), made.weight.bfloat16()
    value, *gradients = run(lambda h, w: draft_loss(h, w, target, made.rows, loss="kl")[0], made)
    assert value.dtype == torch.float32
    for mine, reference in zip(gradients, theirs[1:], strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine.float() - reference).norm() < 0.05 * reference.norm()


# ---- p that does not fit


@pytest.mark.parametrize("negatives", [0, 4])
@pytest.mark.parametrize("loss", LOSSES)
def test_p_made_block_by_block_is_p_held(monkeypatch, loss, negatives):
    made = problem()

    def ours(target):
        return run(lambda h, w: draft_loss(h, w, target, made.rows, loss=loss)[0], made)

    held = made.target(negatives=negatives, floor=FLOOR)
    monkeypatch.setattr(losses, "_HELD_BYTES", 4 * DRAFT * AT - 1)
    monkeypatch.setattr(losses, "_BLOCK_BYTES", 4 * DRAFT * 2)
    made_again = made.target(negatives=negatives, floor=FLOOR)
    assert held.p is not None
    assert made_again.p is None
    close(ours(made_again), ours(held))


# ---- some of the columns


def test_columns_that_carry_probability_stay_and_the_rest_is_a_sample():
    made = problem()
    carries = (made.p >= FLOOR).any(0).nonzero()[:, 0].tolist()
    rest = set(range(DRAFT)) - set(carries)
    assert carries
    assert len(rest) > 4
    samples = set()
    for seed in range(30):
        target = made.target(negatives=4, floor=FLOOR, seed=seed)
        kept, sample = target.columns[:-4].tolist(), target.columns[-4:].tolist()
        assert kept == carries
        assert len(set(sample)) == 4
        assert set(sample) <= rest
        assert target.weights.tolist() == pytest.approx([1.0] * len(kept) + [len(rest) / 4] * 4)
        close([target.at(made.rows)], [made.p[made.rows][:, target.columns]])
        samples.add(tuple(sorted(sample)))
    assert len(samples) > 3
    assert set().union(*samples) == rest
    again = made.target(negatives=4, floor=FLOOR, seed=29)
    assert torch.equal(again.columns, target.columns)


@pytest.mark.parametrize("block", [1, 10_000])
@pytest.mark.parametrize("loss", LOSSES)
def test_sums_over_some_columns_are_weighted(monkeypatch, loss, block):
    """Value, both gradients and a; columns left out get no gradient."""
    monkeypatch.setattr(losses, "_BLOCK_BYTES", 4 * block)
    made = problem()
    target = made.target(negatives=3, floor=FLOOR)
    columns, w = target.columns, target.weights
    p = made.p[made.rows][:, columns]
    ours = run(lambda h, w: draft_loss(h, w, target, made.rows, loss=loss)[0], made)
    theirs = run(lambda h, weight: naive(loss, h, weight, p, columns=columns, w=w), made)
    close(ours, theirs)
    out = torch.ones(DRAFT, dtype=torch.bool)
    out[columns] = False
    assert out.any()
    assert (ours[2][out] == 0).all()
    if loss == "alpha":
        z = made.hidden @ made.weight[columns].T
        q = z.exp() / (w * z.exp()).sum(-1, keepdim=True)
        accepted = draft_loss(made.hidden, made.weight, target, made.rows, loss=loss)[1]
        close([accepted], [(w * torch.minimum(p, q)).sum()])


@pytest.mark.parametrize("negatives", [DRAFT, 1000])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_sample_of_all_is_exact(loss, negatives):
    made = problem()
    target = made.target(negatives=negatives, floor=FLOOR)
    assert sorted(target.columns.tolist()) == list(range(DRAFT))
    assert target.weights.tolist() == [1.0] * DRAFT
    whole = made.target()
    ours, theirs = (run(lambda h, w, t=t: draft_loss(h, w, t, made.rows, loss=loss)[0], made) for t in (target, whole))
    close(ours, theirs)
    best = [draft_loss(made.hidden, made.weight, t, made.rows, loss=loss)[2] for t in (target, whole)]
    assert torch.equal(*best)


def test_a_floor_that_all_columns_reach_leaves_none_to_sample():
    made = problem()
    target = made.target(negatives=5, floor=0.0)
    assert target.columns.tolist() == list(range(DRAFT))
    assert target.weights.tolist() == [1.0] * DRAFT


def test_the_linear_part_is_unbiased():
    """sum p z, averaged over every column that may be sampled, is the sum over all: exactly, for each draws as often."""
    made = problem()
    z = made.hidden @ made.weight.T
    by_column = {}
    for seed in range(200):
        target = made.target(negatives=1, floor=FLOOR, seed=seed)
        part = (target.at(made.rows) * z[:, target.columns] * target.weights).sum()
        lse = (z[:, target.columns] + target.weights.log()).logsumexp(-1)
        mass = (target.at(made.rows) * target.weights).sum(-1)
        value = draft_loss(made.hidden, made.weight, target, made.rows)[0]
        close([(mass * lse).sum() - value], [part])
        by_column[int(target.columns[-1])] = part
    assert len(by_column) == int((made.p < FLOOR).all(0).sum())
    close([torch.stack(list(by_column.values())).mean()], [(made.p[made.rows] * z).sum()])


@pytest.mark.parametrize("loss", ["soft_ce", "lambda"])
def test_more_columns_are_nearer(loss):
    """The error, over 40 samples, falls about as the root of their number, and is gone at the end."""
    made = problem(draft=250, vocab=300)
    exact = float(draft_loss(made.hidden, made.weight, made.target(), made.rows, loss=loss)[0])
    errors = []
    for negatives in (5, 40, 160, 250):
        targets = [made.target(negatives=negatives, floor=FLOOR, seed=seed) for seed in range(40)]
        values = [float(draft_loss(made.hidden, made.weight, t, made.rows, loss=loss)[0]) for t in targets]
        errors.append(sum((value - exact) ** 2 for value in values) ** 0.5)
    assert errors[0] > 2 * errors[1] > 2 * 1.5 * errors[2] > 0
    assert errors[3] < 1e-9


def test_the_arg_max_over_some_columns_is_a_draft_id_and_ignores_their_weights():
    made = problem(draft=200, vocab=200)
    target = made.target(negatives=20, floor=FLOOR)
    best = draft_loss(made.hidden, made.weight, target, made.rows)[2]
    logits = made.hidden @ made.weight[target.columns].T
    assert torch.equal(best, target.columns[logits.argmax(-1)])
    assert not torch.equal(best, target.columns[(logits + target.weights.log()).argmax(-1)])
