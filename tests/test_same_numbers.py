"""The same command gives the same numbers: with other threads, batches and orders. (docs/reliability.md lists where else.)"""

from __future__ import annotations

import pytest
import torch

from driftlab import VARIANTS, Drafter, TrainConfig, accept, all_starts, simulate, train
from driftlab.trees import DynamicTree, tree_all_starts

PROMPTS = ["hello world", "abc", "q"]


def with_threads(count, work):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return work()
    finally:
        torch.set_num_threads(before)


def test_threads_change_no_number(varied_target, tmp_path):
    """Recorded bits, sampled texts, drafts, and the weights that a training ends with."""
    found = {}
    for threads in (1, 2):

        def work(threads=threads):
            how = {"max_new_tokens": 9, "temperature": 1.0, "template": False, "out": tmp_path / f"{threads}" / "r"}
            text = varied_target.record(PROMPTS, **how)
            drafter = Drafter(VARIANTS["eagle31"].for_target(text), text)
            steps = TrainConfig(ttt=2, batch_size=2, epochs=1.0, save_every=0)
            train(drafter, text, steps, out=tmp_path / f"{threads}" / "d")
            draft = all_starts(drafter.eval(), text, 3, temperatures=(1.0,), top=4)
            return text, drafter.state_dict(), draft, simulate(accept(draft, text, rule="rejection")).tau

        found[threads] = with_threads(threads, work)
    (text, weights, draft, tau), (other, weights2, draft2, tau2) = found[1], found[2]
    for a, b in zip(text, other, strict=True):
        for name in ("tokens", "aux", "last_hidden"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert all(torch.equal(weights[name], weights2[name]) for name in weights)
    assert torch.equal(draft.tokens, draft2.tokens)
    assert tau == tau2


@pytest.mark.parametrize("kind", ["sampled", "tree"])
def test_batches_and_the_order_of_prompts_change_no_tau(kind, varied_target, make_drafter, tmp_path):
    """Within 1e-5: a product of matrices is not the same bits at another width."""
    taus = {}
    for order, size in ((PROMPTS, 10_000), (PROMPTS, 1), (PROMPTS[::-1], 40)):
        how = {"max_new_tokens": 9, "temperature": 1.0, "template": False, "piece_size": 2}
        text = varied_target.record(order, **how, out=tmp_path / f"{size}")
        drafter = make_drafter("eagle31", target=text)
        if kind == "tree":
            judged = accept(tree_all_starts(drafter, text, DynamicTree(3, 2, 6), max_tokens=size), text)
        else:
            draft = all_starts(drafter, text, 3, temperatures=(1.0,), top=4, max_tokens=size)
            judged = accept(draft, text, rule="rejection")
        simulation = simulate(judged)
        rounds = dict(zip(judged.ids, simulation.verify_rounds.tolist(), strict=True))
        names = dict(zip((entry.id for entry in text.entries), order, strict=True))
        taus[size] = simulation.tau, {names[name]: count for name, count in rounds.items()}
    reference, rounds = taus[10_000]
    for tau, there in taus.values():
        assert tau == pytest.approx(reference, abs=1e-5)
        assert there == pytest.approx(rounds, abs=1e-4)
