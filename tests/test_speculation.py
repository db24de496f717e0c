"""The live loop: its text is that of plain decoding, its rounds are those of the replay, its cache holds no trace."""

import dataclasses

import pytest
import torch
from conftest import BOS, EOS, TinyTokenizer, tiny_model

from driftlab import (
    Chain,
    Drafter,
    DriftlabError,
    DynamicTree,
    StaticTree,
    Target,
    accept,
    all_starts,
    simulate,
    speculate,
    tree_all_starts,
)
from driftlab.drafter.config import VARIANTS
from driftlab.speculation import _Loop
from driftlab.target.sampling import Sampling, continue_prompts, streams

DEPTHS = (1, 3, 5)
PROMPTS = ["hello world", "abc", "q", "another longer prompt here"]


def prompt_of(trajectory, index):
    return trajectory.tokens(index)[: trajectory.entries[index].prompt_length].tolist()


def answer_of(trajectory, index):
    return tuple(trajectory.tokens(index)[trajectory.entries[index].prompt_length :].tolist())


def check_live_equals_replay(target, drafter, trajectory, depth, limit=24):
    """Compare text, finish and every round, prompt for prompt; return the simulation."""
    simulation = simulate(accept(all_starts(drafter, trajectory, depth), trajectory))
    for i, entry in enumerate(trajectory.entries):
        live = speculate(target, drafter, prompt_of(trajectory, i), depth=depth, max_new_tokens=limit)
        assert live.tokens == answer_of(trajectory, i)
        assert live.rounds == simulation.rounds[i]
        assert live.finish == entry.finish
        assert sum(r.emitted for r in live.rounds) + 1 == len(live.tokens)
    return simulation


# ---- live equals replay, and plain decoding


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_live_is_the_replay_round_for_round(varied_target, varied_trajectory, trained, variant, depth):
    """H7, INV6 and the package's central claim, for drafters that are right about half of the time."""
    simulation = check_live_equals_replay(varied_target, trained[variant], varied_trajectory, depth)
    accepted = {r.accepted for rounds in simulation.rounds for r in rounds}
    assert {0, min(depth, 3)} <= accepted
    assert depth == 1 or len(accepted) > 2
    assert 1.3 < simulation.tau < depth + 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_live_is_the_replay_for_an_untrained_drafter(varied_target, varied_trajectory, make_drafter, variant):
    simulation = check_live_equals_replay(varied_target, make_drafter(variant), varied_trajectory.subset([2, 3]), 3)
    assert simulation.tau < 1.3


@pytest.mark.parametrize(("family", "depth"), [("Mistral", 4), ("Gemma3", 3), ("GptOss", 2)])
def test_live_is_the_replay_with_sliding_windows(family, depth, train_tiny, tmp_path):
    """The verify cache of a window of 8 is rolled back behind, at and far beyond the window (transformers#47447)."""
    target = Target(tiny_model(family), TinyTokenizer(), name=family, aux_layers=(1, 3, 5))
    trajectory = target.record(PROMPTS, max_new_tokens=24, template=False, out=tmp_path / "r")
    drafter = train_tiny(trajectory, "eagle31")
    simulation = check_live_equals_replay(target, drafter, trajectory, depth)
    assert len({r.accepted for rounds in simulation.rounds for r in rounds}) > 1


def test_live_is_the_replay_with_a_reduced_draft_vocabulary(varied_target, varied_trajectory, make_drafter):
    answers = torch.cat([torch.tensor(answer_of(varied_trajectory, i)) for i in range(4)])
    kept = answers.unique().tolist()[:-3]
    drafter = make_drafter("eagle31", draft_vocab=kept)
    check_live_equals_replay(varied_target, drafter, varied_trajectory.subset([0, 1]), 3)


@pytest.mark.filterwarnings("ignore:the text grew to")
def test_a_long_text_is_that_of_plain_decoding(varied_target, trained):
    """INV6: 200 tokens in float32, with rejections all along."""
    prompt = [BOS, 5, 9, 40]
    plain = continue_prompts(
        varied_target.adapter,
        [prompt],
        max_new_tokens=200,
        stop_ids=varied_target.spec.eos_ids,
        sampling=Sampling(),
        generators=streams([prompt], 0),
    )[0]
    live = speculate(varied_target, trained["eagle3"], prompt, depth=4, max_new_tokens=200)
    assert list(live.tokens) == plain
    assert len({r.accepted for r in live.rounds}) > 1


def test_the_same_call_gives_the_same_run(varied_target, trained, varied_trajectory):
    """Q3; only the wall time differs."""
    runs = [
        speculate(varied_target, trained["eagle31"], prompt_of(varied_trajectory, 3), depth=3, max_new_tokens=24)
        for _ in range(2)
    ]
    assert (runs[0].tokens, runs[0].rounds) == (runs[1].tokens, runs[1].rounds)
    assert set(runs[0].seconds) == {"prefill", "draft", "verify", "commit"}
    assert all((value > 0) == (name != "commit") for name, value in runs[0].seconds.items())


# ---- the drafter's keys after a round (E6)


@pytest.mark.parametrize("variant", ["eagle3", "eagle31"])
def test_after_any_rejections_the_next_draft_is_that_of_a_fresh_prefill(
    varied_target, trained, varied_trajectory, variant
):
    """INV5: the accepted tokens' keys are made from the target's states, and from all of them."""
    drafter, depth = trained[variant], 4
    for index in range(len(varied_trajectory)):
        recorded, seen = varied_trajectory[index], []

        def keep(value, hook, seen=seen):
            seen.append((hook.depth, value.detach().clone()))

        with drafter.hooks([("hook_normed", keep)]):
            live = speculate(
                varied_target, drafter, prompt_of(varied_trajectory, index), depth=depth, max_new_tokens=24
            )
        firsts = [i for i, (k, _) in enumerate(seen) if k == 1]
        assert len(firsts) == len(live.rounds)
        assert any(0 < r.accepted < depth or r.accepted == 0 for r in live.rounds)
        for place, r in zip(firsts, live.rounds, strict=True):
            fresh, again = Chain(drafter, prompt_lengths=[recorded.prompt_length]), []
            with drafter.hooks(
                [("hook_normed", lambda value, hook, again=again: again.append(value.detach()) or None)]
            ):
                fresh.extend(recorded.tokens[None, 1 : r.row + 2], recorded.aux[None, : r.row + 1])
                fresh.draft(depth)
            for k in range(depth):
                torch.testing.assert_close(seen[place + k][1], again[k], rtol=1e-4, atol=1e-4)


def test_the_verify_cache_holds_the_committed_text_and_nothing_else(varied_target, trained, varied_trajectory):
    """Its keys after every round are those of one plain pass."""
    prompt, answer = prompt_of(varied_trajectory, 0), answer_of(varied_trajectory, 0)
    with torch.inference_mode():
        loop = _Loop(varied_target, trained["eagle3"], prompt, 24, Sampling(), None)
        while not loop.finish:
            loop.round(3)
            committed = [*prompt, *answer][: loop.committed]
            whole = varied_target.adapter.new_cache()
            varied_target.adapter.hidden(torch.tensor([committed]), cache=whole)
            assert loop.cache.get_seq_length() == loop.committed
            for ours, theirs in zip(loop.cache.layers, whole.layers, strict=True):
                torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(ours.values, theirs.values, rtol=1e-4, atol=1e-4)


# ---- the end: EOS and the limit


@pytest.fixture(scope="module")
def stopping(train_tiny, tmp_path_factory):
    """A target with a text that ends at a token which a trained drafter has learnt; and its free text."""
    model = tiny_model("Llama", seed=1)
    model.lm_head.weight.mul_(3)
    free = Target(model, TinyTokenizer(), aux_layers=(1, 3, 5)).record(
        PROMPTS, max_new_tokens=24, template=False, out=tmp_path_factory.mktemp("free") / "r"
    )
    answer = answer_of(free, 3)
    place = next(i for i in range(9, 24) if answer.index(answer[i]) == i)
    model.generation_config.eos_token_id = [EOS, answer[place]]
    target = Target(model, TinyTokenizer(), aux_layers=(1, 3, 5))
    trajectory = target.record(PROMPTS, max_new_tokens=24, template=False, out=tmp_path_factory.mktemp("stop") / "r")
    assert len(answer_of(trajectory, 3)) == place + 1
    return target, trajectory, train_tiny(trajectory, "eagle31", 60.0)


def test_eos_on_the_path_of_a_tree_ends_the_text(stopping):
    """An accepted child is EOS: no bonus token after it, and nothing behind it is emitted or counted."""
    target, trajectory, drafter = stopping
    for tree in (StaticTree.chains(2, 9), DynamicTree(depth=9, top_k=2, total=18)):
        simulation = simulate(accept(tree_all_starts(drafter, trajectory, tree), trajectory))
        for i, entry in enumerate(trajectory.entries):
            live = speculate(target, drafter, prompt_of(trajectory, i), tree=tree, max_new_tokens=24)
            assert live.tokens == answer_of(trajectory, i)
            assert live.rounds == simulation.rounds[i]
            assert live.finish == entry.finish
        assert simulation.rounds[3][-1].end == "eos"


def test_after_a_tree_round_the_cache_is_that_of_plain_decoding(varied_target, trained, varied_trajectory):
    """Keys of the accepted path alone (sglang#26866)."""
    prompt, answer = prompt_of(varied_trajectory, 0), answer_of(varied_trajectory, 0)
    with torch.inference_mode():
        loop = _Loop(varied_target, trained["eagle3"], prompt, 24, Sampling(), None)
        while not loop.finish:
            loop.tree_round(DynamicTree(depth=3, top_k=3, total=8))
            if loop.finish:
                break
            committed = [*prompt, *answer][: loop.committed]
            whole = varied_target.adapter.new_cache()
            varied_target.adapter.hidden(torch.tensor([committed]), cache=whole)
            assert loop.cache.get_seq_length() == loop.committed
            for ours, theirs in zip(loop.cache.layers, whole.layers, strict=True):
                torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("depth", [1, 3, 9])
def test_eos_ends_the_text_as_bonus_or_as_accepted_draft(stopping, depth):
    target, trajectory, drafter = stopping
    simulation = check_live_equals_replay(target, drafter, trajectory, depth)
    assert trajectory.entries[3].finish == "stop"
    last = simulation.rounds[3][-1]
    assert last.end in ("bonus", "eos")
    if depth == 9:
        assert last.end == "eos"  # learnt by heart, EOS is an accepted draft


@pytest.mark.parametrize("limit", [1, 5, 9, 10, 11])
def test_eos_and_limit_in_one_round_cut_everything_at_the_same_place(stopping, tmp_path, limit):
    """H11: whatever comes first ends tokens, rounds and states alike."""
    target, whole, drafter = stopping
    trajectory = target.record(PROMPTS, max_new_tokens=limit, template=False, out=tmp_path / "r")
    for i in range(len(whole)):
        assert answer_of(trajectory, i) == answer_of(whole, i)[:limit]
    simulation = check_live_equals_replay(target, drafter, trajectory, 5, limit)
    for entry, rounds in zip(trajectory.entries, simulation.rounds, strict=True):
        assert entry.length - entry.prompt_length <= limit
        if limit == 1:
            assert rounds == ()
        if rounds and rounds[-1].end == "cut":
            assert entry.finish == "length"


def test_what_follows_eos_is_neither_emitted_nor_counted():
    """H11: committed [10, 11, EOS, 20, 21, 22] at limit 5."""

    def emit(tokens, limit):
        loop = _Loop.__new__(_Loop)
        loop.answer, loop.limit, loop.finish, loop.eos = [], limit, "", {EOS}
        kept = loop._emit(tokens)
        return loop.answer, kept, loop.finish

    assert emit([10, 11, EOS, 20, 21, 22], 5) == ([10, 11, EOS], 3, "stop")
    assert emit([10, 11, EOS, 20, 21, 22], 3) == ([10, 11, EOS], 3, "stop")
    assert emit([10, 11, EOS, 20, 21, 22], 2) == ([10, 11], 2, "length")
    assert emit([10, 11], 5) == ([10, 11], 2, "")


def test_a_limit_of_one_needs_no_round(varied_target, trained, varied_trajectory):
    live = speculate(varied_target, trained["eagle3"], prompt_of(varied_trajectory, 0), depth=3, max_new_tokens=1)
    assert live.tokens == answer_of(varied_trajectory, 0)[:1]
    assert (live.rounds, live.finish) == ((), "length")


def test_a_prompt_of_one_token_works(varied_target, trained):
    """E8: its first draft row is (state of the prompt's token, the token that the prefill gave)."""
    live = speculate(varied_target, trained["eagle31"], [BOS], depth=3, max_new_tokens=8)
    assert live.rounds[0].row == 0
    assert len(live.tokens) == 8


# ---- refused


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"prompt_ids": []}, "the prompt has no token"),
        ({"depth": 0}, "depth 0"),
        ({"max_new_tokens": 0}, "max_new_tokens 0"),
    ],
)
def test_what_cannot_run_is_refused(varied_target, trained, change, told):
    arguments = {"prompt_ids": [BOS, 5], "depth": 2, "max_new_tokens": 4, **change}
    with pytest.raises(DriftlabError, match=told):
        speculate(varied_target, trained["eagle3"], **arguments)


def test_the_live_loop_captures_what_the_drafter_reads(varied_target, trained):
    """Whatever states the target records: the drafter's are captured."""
    other = Target(varied_target.adapter.model, varied_target.tokenizer, aux_layers=(2, 4, 6))
    runs = [speculate(t, trained["eagle31"], [BOS, 5], depth=2, max_new_tokens=8) for t in (varied_target, other)]
    assert runs[0].rounds == runs[1].rounds
    assert runs[0].tokens == runs[1].tokens


def test_a_drafter_for_a_deeper_target_is_refused(varied_target, trained):
    config = dataclasses.replace(trained["eagle3"].config, aux_layers=(1, 3, 99))
    with pytest.raises(DriftlabError, match=r"reads target states \[1, 3, 99\], the target has \d+ layers"):
        speculate(varied_target, Drafter(config, varied_target), [BOS, 5], depth=2, max_new_tokens=4)


def test_a_live_run_says_once_that_it_left_the_lengths_of_its_training(tiny_target, tiny_trajectory, make_drafter):
    entry = tiny_trajectory.entries[0]
    prompt = tiny_trajectory.tokens(0)[: entry.prompt_length].tolist()
    for length in (len(prompt) + 2, len(prompt) + 8):
        short = make_drafter("eagle31", trained_length=length)
        with pytest.warns(UserWarning, match=f"grew to {len(prompt) + 9} tokens, beyond the {length} of") as caught:
            speculate(tiny_target, short, prompt, depth=2, max_new_tokens=9)
        assert len(caught) == 1
    for enough in (0, len(prompt) + 9):  # 0: unknown
        speculate(tiny_target, make_drafter("eagle31", trained_length=enough), prompt, depth=2, max_new_tokens=9)
