"""Drafts and text probabilities on disk: the same numbers again, and never another's."""

import contextlib
from dataclasses import fields

import pytest
import torch

from driftlab import DriftlabError, Sampling, Trajectory, accept, all_starts, probability, simulate
from driftlab.attention import Controls
from driftlab.stored import load_draft, save_draft, stored_chains, stored_trees
from driftlab.trees import DynamicTree, StaticTree, tree_all_starts


def same(a, b):
    for field in fields(a):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if isinstance(x, torch.Tensor):
            assert torch.equal(x.nan_to_num(7), y.nan_to_num(7)) if x.is_floating_point() else torch.equal(x, y)
        elif field.name == "logits":
            assert (x is None) == (y is None)
            if x is not None:
                same(x, y)
        else:
            assert x == y, field.name


@pytest.mark.parametrize("kind", ["chain", "sampled", "static", "dynamic"])
def test_a_draft_comes_back_as_it_was(kind, varied_trajectory, make_drafter, tmp_path):
    drafter = make_drafter("eagle31", draft_vocab=range(3, 40))
    draft = {
        "chain": lambda: all_starts(drafter, varied_trajectory, 3, feed="own"),
        "sampled": lambda: all_starts(drafter, varied_trajectory, 3, temperatures=(0.5, 1.0), top=7, max_tokens=40),
        "static": lambda: tree_all_starts(drafter, varied_trajectory, StaticTree.chains(2, 3)),
        "dynamic": lambda: tree_all_starts(drafter, varied_trajectory, DynamicTree(3, 2, 6)),
    }[kind]()
    save_draft(tmp_path / "d.safetensors", draft)
    again = load_draft(tmp_path / "d.safetensors")
    assert type(again) is type(draft)
    same(draft, again)
    if kind == "sampled":
        assert torch.equal(again.logits.q(Sampling(0.5))[draft.valid], draft.logits.q(Sampling(0.5))[draft.valid])


@pytest.fixture
def counted(varied_trajectory, tmp_path, monkeypatch):
    """Ask for drafts; returns how often they were really drafted."""
    made = []

    def drafting(*args, **kwargs):
        made.append(kwargs)
        return all_starts(*args, **kwargs)

    monkeypatch.setattr("driftlab.stored.all_starts", drafting)

    def ask(drafter, trajectory=varied_trajectory, depth=2, **kept):
        draft = stored_chains(tmp_path / "drafts", drafter, trajectory, depth, **kept)
        fresh = all_starts(drafter, trajectory, depth)
        assert torch.equal(draft.tokens, fresh.tokens)
        assert (draft.ids, draft.digests, draft.depth) == (fresh.ids, fresh.digests, depth)
        return len(made)

    return ask


def test_what_is_kept_is_used_for_nothing_else(counted, make_drafter, varied_trajectory, tmp_path):
    drafter = make_drafter("eagle31")
    assert [counted(drafter), counted(drafter), counted(make_drafter("eagle31"))] == [1, 1, 1]
    assert counted(drafter, varied_trajectory.subset([0, 1])) == 2
    assert counted(drafter, varied_trajectory.subset([1, 0])) == 3
    with torch.no_grad():
        drafter.norm.weight[0] += 1e-3
    assert counted(drafter) == 4
    assert counted(make_drafter("eagle3")) == 5
    assert counted(make_drafter("eagle31").double()) == 6
    assert counted(make_drafter("eagle31")) == 6


def test_smaller_k_and_other_rules_need_no_drafting(counted, make_drafter, tmp_path):
    """More is drafted again, with all that was there: nothing is given up."""
    drafter = make_drafter("eagle31")
    assert counted(drafter, depth=3) == 1
    assert [counted(drafter, depth=k) for k in (1, 2, 3)] == [1, 1, 1]
    assert counted(drafter, depth=3, temperatures=(0.8,), top=5) == 2
    assert counted(drafter, depth=2, temperatures=(0.8,), top=5) == 2
    assert counted(drafter, depth=2) == 2
    assert counted(drafter, depth=2, temperatures=(1.0,), top=5) == 3
    assert counted(drafter, depth=3, temperatures=(0.8, 1.0), top=5) == 3
    assert counted(drafter, depth=2, temperatures=(0.8,), top=20) == 4
    assert counted(drafter, depth=4) == 5
    assert counted(drafter, depth=4, temperatures=(0.8, 1.0), top=20) == 5
    assert len(list((tmp_path / "drafts").iterdir())) == 1


def test_trees_are_kept_by_their_shape(varied_trajectory, make_drafter, tmp_path, monkeypatch):
    drafter, made = make_drafter("eagle31"), []

    def drafting(*args, **kwargs):
        made.append(args[2])
        return tree_all_starts(*args, **kwargs)

    monkeypatch.setattr("driftlab.stored.tree_all_starts", drafting)
    for tree in (DynamicTree(3, 2, 6), DynamicTree(3, 2, 5), StaticTree.chains(2, 3), DynamicTree(3, 2, 6)):
        same(
            stored_trees(tmp_path, drafter, varied_trajectory, tree), tree_all_starts(drafter, varied_trajectory, tree)
        )
    assert len(made) == 3


def test_a_changed_drafter_is_not_taken_for_its_weights(counted, make_drafter, tmp_path):
    drafter = make_drafter("eagle31")
    counted(drafter)
    files = set((tmp_path / "drafts").iterdir())
    with drafter.hooks([("hook_feedback", lambda value, hook: value * 2)]):
        assert counted(drafter) == 2
    drafter.layers[0].self_attn.controls = Controls(score_scale=0.5)
    assert counted(drafter) == 3
    drafter.layers[0].self_attn.controls = Controls()
    assert counted(drafter) == 3
    assert set((tmp_path / "drafts").iterdir()) == files


def test_a_broken_file_is_drafted_again(counted, make_drafter, tmp_path):
    drafter = make_drafter("eagle31")
    counted(drafter)
    (path,) = (tmp_path / "drafts").iterdir()
    path.write_bytes(path.read_bytes()[:100])
    assert counted(drafter) == 2
    with pytest.raises(DriftlabError, match="does not exist"):
        load_draft(tmp_path / "no.safetensors")
    path.write_bytes(b"x" * 100)
    with pytest.raises(DriftlabError, match="draft again"):
        load_draft(path)


# ---- p of the text


@pytest.fixture
def recording(varied_target, tmp_path):
    return varied_target.record(
        ["hello", "abc", "q"],
        max_new_tokens=8,
        template=False,
        temperature=0.8,
        piece_size=2,
        out=tmp_path / "r",
    )


def test_the_targets_head_is_used_once(recording, make_drafter, varied_target, monkeypatch):
    first = [p.clone() for p in probability.text_probabilities(recording.subset([2, 0]))]
    whole = probability.text_probabilities(recording)
    assert len(list(recording.path.glob("text-probability-*"))) == 2
    assert torch.equal(whole[0], first[1])
    again = Trajectory.open(recording.path)

    def head(_):
        raise AssertionError("the head was read")

    monkeypatch.setattr(Trajectory, "head", property(head))
    for a, b in zip(whole, probability.text_probabilities(again), strict=True):
        assert torch.equal(a, b)


def test_probabilities_of_another_text_are_not_used(recording, varied_target):
    right = probability.text_probabilities(recording)
    path = next(recording.path.glob("text-probability-*"))
    path.write_bytes(path.read_bytes()[:-8])
    again = Trajectory.open(recording.path)
    assert all(torch.equal(a, b) for a, b in zip(right, probability.text_probabilities(again), strict=True))
    # the folder is recorded anew with another seed
    kept = {p.name: p.read_bytes() for p in recording.path.glob("text-probability-*")}
    for file in recording.path.iterdir():
        file.unlink()
    other = varied_target.record(
        ["hello", "abc", "q"],
        max_new_tokens=8,
        template=False,
        temperature=0.8,
        seed=9,
        piece_size=2,
        out=recording.path,
    )
    fresh = [probability.text_probability(other, i) for i in range(3)]
    for name, content in kept.items():
        (other.path / name).write_bytes(content)
    found = probability.text_probabilities(Trajectory.open(other.path))
    assert all(torch.equal(a, b) for a, b in zip(fresh, found, strict=True))


def test_a_folder_that_cannot_be_written_costs_time_only(recording, monkeypatch):
    @contextlib.contextmanager
    def refused(path):
        raise DriftlabError("cannot write")
        yield path

    monkeypatch.setattr(probability, "atomic", refused)
    assert len(probability.text_probabilities(recording)) == 3
    assert not list(recording.path.glob("text-probability-*"))


def test_any_rule_and_k_from_one_stored_draft(recording, make_drafter, varied_target, tmp_path):
    drafter = make_drafter("eagle31")
    path = tmp_path / "d.safetensors"
    save_draft(path, all_starts(drafter, recording, 4, temperatures=(0.8,)))
    draft = load_draft(path)
    for depth in (1, 3):
        fresh = all_starts(drafter, recording, depth, temperatures=(0.8,))
        for rule in ("argmax", "rejection", "block", "exact", "q1"):
            a = simulate(accept(draft.upto(depth), recording, rule=rule))
            assert a.tau == pytest.approx(simulate(accept(fresh, recording, rule=rule)).tau, abs=1e-6)
