"""What grows with the tokens, what does not, and what is refused because it cannot be held."""

from __future__ import annotations

import gc

import pytest
import torch

from driftlab import DriftlabError, TrainConfig, accept, all_starts, footprint, simulate, train
from driftlab.footprint import draft_bytes, free_memory, training_bytes
from driftlab.trees import DynamicTree, StaticTree, tree_all_starts

K = 3


def held() -> int:
    """Bytes of all tensors that are alive and not frozen, each storage once."""
    storages = {}
    for value in gc.get_objects():
        if issubclass(type(value), torch.Tensor) and value.device.type == "cpu":
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def at_the_end(work) -> int:
    """What was made and is alive when the work reports that all is done but has not returned."""
    seen = []
    gc.collect()
    gc.freeze()
    try:
        work(lambda what, done, total: seen.append(held()) if done == total else None)
    finally:
        gc.unfreeze()
    return seen[-1]


@pytest.fixture(scope="module")
def recordings(tiny_target, tmp_path_factory):
    """Recordings of 4 and 16 prompts in pieces of 2; and the bytes that were alive at each one's end."""
    made, most, folder = {}, {}, tmp_path_factory.mktemp("memory")
    tiny_target.record(["warm"], max_new_tokens=2, template=False, out=folder / "warm")  # what is made once
    for count in (4, 16):
        prompts = [f"text {chr(97 + i)}" for i in range(count)]

        def work(progress, count=count, prompts=prompts):
            how = {"max_new_tokens": 24, "template": False, "piece_size": 2, "out": folder / f"{count}"}
            made[count] = tiny_target.record(prompts, progress=progress, **how)

        most[count] = at_the_end(work)
    return made, most


def test_a_recording_holds_one_piece_however_many_there_are(recordings):
    made, most = recordings
    piece = 520 * max(entry.length for entry in made[16].entries) * 2
    assert sum(entry.length for entry in made[16].entries) * 520 > 4 * piece
    assert most[16] - most[4] < 2 * piece


def test_a_replay_holds_its_drafts_and_the_states_of_one_batch(recordings, make_drafter):
    made, _ = recordings
    drafter, most, starts = make_drafter("eagle31"), {}, 24
    for count, text in made.items():
        most[count] = at_the_end(
            lambda progress, text=text: all_starts(drafter, text, K, max_tokens=32, progress=progress)
        )
    table = 12 * starts * (8 * K + 9)  # tokens, row and valid of every start
    states = 520 * made[16].entries[0].length
    assert 12 * states > 3 * table
    assert most[16] - most[4] < table + 2 * states


def test_the_count_sees_states_that_are_kept(recordings, make_drafter):
    made, _ = recordings

    def hoard(progress):
        kept = list(made[16].batches(32))
        progress("hoarding", len(kept), len(kept))

    assert at_the_end(hoard) > 10 * 520 * made[16].entries[0].length


# ---- judged in blocks


def tree_of(drafter, text, tree):
    return tree_all_starts(drafter, text, tree, max_tokens=40)


@pytest.mark.parametrize("kind", ["argmax", "rejection", "block", "static", "dynamic"])
def test_judging_in_blocks_changes_no_bit(kind, varied_target, make_drafter, monkeypatch, tmp_path):
    prompts = ["hello world", "abc", "q"]
    text = varied_target.record(prompts, max_new_tokens=9, temperature=1.0, template=False, out=tmp_path / "r")
    drafter = make_drafter("eagle31", target=text)
    tree = {"static": StaticTree.chains(2, K), "dynamic": DynamicTree(K, 2, 5)}.get(kind)
    draft = all_starts(drafter, text, K, temperatures=(1.0,), top=4) if tree is None else tree_of(drafter, text, tree)
    rule = "argmax" if tree else kind
    found = {}
    for size in (16 * 2**20, 1):
        monkeypatch.setattr("driftlab.acceptance._BLOCK_BYTES", size)
        monkeypatch.setattr("driftlab.simulation._BLOCK_BYTES", size)
        judged = accept(draft, text, rule=rule)
        simulation = simulate(judged)
        rows = [record["value"] for record in simulation.records() if record["value"] == record["value"]]
        found[size] = (judged.match.tolist(), judged.valid.tolist(), judged.probability.tolist(), rows)
    assert found[1] == found[16 * 2**20]
    assert judged.valid.any()


# ---- what cannot be held


def only(monkeypatch, free: int) -> None:
    monkeypatch.setattr(footprint, "free_memory", lambda device="cpu": free)


def test_a_draft_that_cannot_be_held_is_refused_with_an_estimate(tiny_trajectory, make_drafter, monkeypatch):
    drafter, most = make_drafter(), longest(tiny_trajectory)
    for how, numbers in (({}, 8 * K), ({"temperatures": (1.0,), "top": 4}, 8 * K + K * 4 * (1 + 12 + 1))):
        needed = 4 * most * numbers
        only(monkeypatch, needed - 1)
        with pytest.raises(
            DriftlabError, match=rf"drafting 3 tokens .* of 4 sequences takes at least {needed / 1e9:.3g} GB"
        ):
            all_starts(drafter, tiny_trajectory, K, **how)
        only(monkeypatch, max(needed, most * (K - 1) * own_keys(drafter)))
        draft = all_starts(drafter, tiny_trajectory, K, **how)
        tensors = [draft.tokens] + ([draft.logits.text, draft.logits.top, draft.logits.lse] if how else [])
        assert sum(x.nbytes for x in tensors) == needed


def longest(text) -> int:
    return max(entry.length - entry.prompt_length for entry in text.entries)


def own_keys(drafter) -> int:
    """Bytes of one chain's keys and values a depth."""
    return 2 * drafter.config.num_key_value_heads * drafter.config.head_dim * 4


def test_deep_chains_whose_own_keys_cannot_be_held_are_refused(tiny_trajectory, make_drafter, monkeypatch):
    drafter, most = make_drafter(), longest(tiny_trajectory)
    keys = most * 49 * own_keys(drafter)
    assert keys > draft_bytes(4, most, 50)
    only(monkeypatch, keys - 1)
    with pytest.raises(
        DriftlabError, match=rf"the keys of chains of 50 tokens from {most} rows .*: draft fewer depths"
    ):
        all_starts(drafter, tiny_trajectory, 50)


def test_trees_that_cannot_be_held_are_refused(tiny_trajectory, make_drafter, monkeypatch):
    only(monkeypatch, draft_bytes(4, longest(tiny_trajectory), 3 * 8) - 1)
    with pytest.raises(DriftlabError, match="drafting trees of 8 nodes .*: draft subset"):
        tree_all_starts(make_drafter(), tiny_trajectory, DynamicTree(3, 2, 8))


def test_a_piece_that_cannot_be_held_is_refused(tiny_target, monkeypatch, tmp_path):
    """Prompts of 4 and 2 tokens with one of answer each, 520 bytes a token, twice."""
    ask = {"max_new_tokens": 3, "template": False, "out": tmp_path / "r"}
    only(monkeypatch, 2 * 8 * 520 - 1)
    with pytest.raises(DriftlabError, match="recording 2 prompts at once, of at least 8 tokens .*: lower piece_size"):
        tiny_target.record(["abc", "q"], **ask)
    assert not list((tmp_path / "r").glob("piece-*"))
    only(monkeypatch, 2 * 5 * 520)  # the advice is good, in the same folder
    assert len(tiny_target.record(["abc", "q"], piece_size=1, **ask)) == 2
    only(monkeypatch, 2 * 8 * 520)
    assert len(tiny_target.record(["abc", "q"], **ask | {"out": tmp_path / "other"})) == 2


def test_a_recording_that_was_begun_in_larger_pieces_is_told_another_folder(tiny_target, monkeypatch, tmp_path):
    def stop(what, done, total):
        if done == 2:
            raise KeyboardInterrupt

    ask = {"max_new_tokens": 3, "template": False, "out": tmp_path / "r"}
    with pytest.raises(KeyboardInterrupt):
        tiny_target.record(["abc", "q", "def", "g"], piece_size=2, progress=stop, **ask)
    only(monkeypatch, 2 * 5 * 520)
    with pytest.raises(DriftlabError, match=r"another folder \(out=\) with a piece_size below the 2"):
        tiny_target.record(["abc", "q", "def", "g"], piece_size=1, **ask)


def test_a_training_step_that_cannot_be_held_is_refused(tiny_trajectory, make_drafter, monkeypatch, tmp_path):
    only(monkeypatch, 10_000)
    lengths = sorted(entry.length for entry in tiny_trajectory.entries)
    for size, told in ((8, f"1 sequence.s. of up to {lengths[-1]}"), (4, f"4 sequence.s. of up to {lengths[3]}")):
        with pytest.raises(DriftlabError, match=f"training on {told} tokens at once, 2 deep,.*: lower batch_size"):
            train(make_drafter(), tiny_trajectory, TrainConfig(ttt=2, batch_size=size), out=tmp_path / "d")
    assert not (tmp_path / "d").exists()


def test_a_training_is_charged_what_some_batch_must_hold(tiny_trajectory, make_drafter, monkeypatch, tmp_path):
    """The longest sequence may stand in a batch of its own, and with less than an epoch may never be drawn."""
    asked = []
    monkeypatch.setattr("driftlab.training.refuse_beyond", lambda needed, *_: asked.append(needed))
    monkeypatch.setattr("driftlab.training.training_bytes", lambda **of: 1000 * of["tokens"] + of["starts"])
    entries = sorted(tiny_trajectory.entries, key=lambda entry: entry.length)

    def bytes_of(some):
        return sum(1001 * entry.length - entry.prompt_length for entry in some)

    for size, epochs in ((8, 1.0), (2, 1.0), (2, 0.25)):
        how = TrainConfig(ttt=1, batch_size=size, epochs=epochs, save_every=0)
        train(make_drafter(), tiny_trajectory, how, out=tmp_path / f"{size} {epochs}")
    assert asked == [bytes_of(entries[-1:]), max(bytes_of(entries[-1:]), bytes_of(entries[:2])), bytes_of(entries[:1])]


@pytest.mark.parametrize("stride", [1, 2])
def test_a_training_step_holds_at_least_what_was_estimated(tiny_trajectory, make_drafter, stride):
    """Of what autograd keeps: each storage once, without the weights."""
    from driftlab.training import batch_loss

    drafter, config = make_drafter(), TrainConfig(ttt=3, batch_size=4, stride=stride, autocast="none")
    batch = tiny_trajectory.batch(range(4))
    weights, saved = {p.untyped_storage().data_ptr() for p in drafter.parameters()}, {}

    def keep(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss, _ = batch_loss(drafter, batch, tiny_trajectory.head.lm_head, config)
    assert loss.requires_grad
    measured = sum(size for place, size in saved.items() if place not in weights)
    estimate = training_bytes(
        **{"weights": 0, "tokens": 0, "states": 4, "target_width": 32, "starts": 4 * batch.starts.rows.shape[1]},
        **{"layers": 1, "width": drafter.config.hidden_size, "inner": drafter.config.intermediate_size},
        **{"depth": 3, "stride": stride, "itemsize": 4, "computed": 4},
    )
    assert measured / 20 < estimate <= measured


def test_free_memory_is_the_least_that_anybody_names(monkeypatch, tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:  5000 kB\nSwapFree: 100 kB\n")
    monkeypatch.setattr(footprint, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(footprint, "_CGROUP", tmp_path)
    assert free_memory() == 5100 * 1024
    for name, text in (("max", "max\n"), ("current", "1500\n"), ("stat", "anon 900\nfile 600\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert free_memory() == 5100 * 1024  # a group without a limit
    (tmp_path / "memory.max").write_text("2000\n")
    assert free_memory() == 2000 - 1500 + 600 + 100 * 1024  # no limit of its swap
    (tmp_path / "memory.stat").write_text("anon 700\nfile 600\nslab_reclaimable 200\n")
    (tmp_path / "memory.swap.max").write_text("70\n")
    (tmp_path / "memory.swap.current").write_text("30\n")
    assert free_memory() == 2000 - 1500 + 600 + 200 + 40
    monkeypatch.setattr(footprint, "_MEMINFO", tmp_path / "nothing")
    (tmp_path / "memory.max").unlink()
    assert free_memory() is None
    footprint.refuse_beyond(10**18, "all", "nothing is known, so nothing is refused")
    assert free_memory("meta") is None
