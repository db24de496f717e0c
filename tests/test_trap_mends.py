"""Public traps that had slipped through: sinks behind windows, a second BOS or none, rope by kind of layer."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from conftest import BOS, TinyTokenizer, tiny_fast_tokenizer, tiny_llama, tiny_model


@pytest.fixture
def windowed(make_drafter, tiny_trajectory):
    """A drafter that sees ten keys, on text whose sink is position 0, and what a Recorder kept of it."""
    from driftlab import all_starts
    from driftlab.drift import Recorder

    text = tiny_trajectory.with_sinks((0,))
    drafter = make_drafter("eagle31", windows=(10,), ttt=1)
    with Recorder(drafter, depth=2) as recorder:
        draft = all_starts(drafter, text, 2, feed="text")
    return drafter, text, draft, recorder.record()


def test_a_sink_that_slid_out_of_the_window_is_no_lost_mass(windowed):
    """The rows that see key 0 are those below 10, at depth 1, and below 9 at depth 2; the means are over them alone."""
    from driftlab.drift import segment_gain, sink_before
    from driftlab.segments import Segment

    _, _, _, record = windowed
    sees = (record.row < 10) & record.reach[:, 0]
    before = sink_before(record, 1)
    assert 0 < sees.sum() < len(sees)
    assert np.array_equal(~np.isnan(before), sees)
    assert np.allclose(before[sees], record.mass[sees, 0, ..., Segment.SINK].mean((1, 2)))
    gain = segment_gain(record, 2, Segment.SINK)
    deeper = (record.row + 1 < 10) & record.reach[:, 1]
    assert np.array_equal(~np.isnan(gain).any((1, 2)), deeper)
    assert not np.isnan(segment_gain(record, 2, Segment.SELF)[record.reach[:, 1]]).any()


def test_a_lost_sink_is_seen_through_a_window(windowed):
    """Planted: .6 on the sink at depth 1 and .3 at depth 2, wherever it is seen. The loss is .3, not .3 times how often."""
    from driftlab import accept
    from driftlab.drift import verdict

    drafter, text, draft, record = windowed
    mass, first = record.mass.copy(), record.recent_first.copy()
    for depth, wanted in ((0, 0.6), (1, 0.3)):
        at = mass[:, depth][record.sees_sink[:, depth, 0]]
        rest = at[..., 1:].sum(-1, keepdims=True)
        at[..., 1:] *= (1 - wanted) / rest
        at[..., 0] = wanted
        mass[record.sees_sink[:, depth, 0], depth] = at
        if depth == 0:
            first[record.sees_sink[:, 0, 0]] *= ((1 - wanted) / rest)[..., 0][..., None]
    planted = dataclasses.replace(record, mass=mass, recent_first=first)
    found = verdict(planted, accept(draft, text), 1)
    (sink,) = [sign for sign in found.signs if sign.name == "sink"]
    assert sink.interval.value == pytest.approx(0.3, abs=1e-6)
    assert sink.state == "changed"
    blind = dataclasses.replace(record, sees_sink=np.zeros_like(record.sees_sink))
    told = verdict(blind, accept(draft, text), 1)
    assert [sign.state for sign in told.signs if sign.name == "sink"] == ["open"]
    assert any("of its mass nothing is said" in note for note in told.notes)


def test_self_prompts_begin_as_recorded_prompts_do():
    from driftlab import Target

    tokenizer = tiny_fast_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}u {{ m.content }} x{% endfor %}{% if add_generation_prompt %} a {% endif %}"
    )
    target = Target(tiny_llama(), tokenizer, aux_layers=(1, 3, 5))
    prefix, _ = target._user_turn()
    recorded = target.record(["abc"], max_new_tokens=3).tokens(0).tolist()
    assert prefix[0] == BOS
    assert recorded[: len(prefix)] == prefix


def test_a_target_whose_layers_turn_by_kind_has_the_theta_of_its_full_attention():
    """Gemma 3: 1e4 of the windows, 1e6 of the layers that see all; a drafter sees all. The order in the file says nothing."""
    from driftlab import Target

    kinds = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    }
    for order in (list(kinds), list(reversed(kinds))):
        model = tiny_model("Gemma3", rope_parameters={name: dict(kinds[name]) for name in order})
        spec = Target(model, TinyTokenizer(), aux_layers=(1,)).spec
        assert (spec.rope_theta, spec.rope_type) == (1e6, "linear")


def planted(target, masses, monkeypatch):
    def position_mass(tokens, first_query, seen_by_all):
        mass = torch.full((tokens.shape[1],), 0.004)
        for place, value in masses.items():
            mass[place] = value
        return {0: mass}

    monkeypatch.setattr(target.adapter, "position_mass", position_mass)


@pytest.mark.parametrize(
    ("masses", "expected"),
    [
        ({0: 0.192, 1: 0.193}, (0, 1)),
        ({0: 0.35, 7: 0.07}, (0,)),
        ({3: 0.3, 1: 0.16}, (1, 3)),
        ({0: 0.02, 1: 0.019}, (0,)),
    ],
)
def test_two_first_tokens_that_share_the_mass_are_both_the_sink(varied_target, monkeypatch, tmp_path, masses, expected):
    planted(varied_target, masses, monkeypatch)
    prompts = ["a prompt of thirty letters, no", "another of about thirty letters"]
    found = varied_target.record(prompts, max_new_tokens=2, template=False, out=tmp_path / "r")
    assert found.sinks == expected


def test_no_sink_is_found_through_windows_alone():
    """Mistral with a window of 8: of 30 shared positions none is seen from all of the answer."""
    from driftlab import Target

    target = Target(tiny_model("Mistral"), TinyTokenizer(), aux_layers=(1,))
    prompts = ["thirty letters and a few more of", "other thirty letters, a few more"]
    recorded = target.record(prompts, max_new_tokens=12, template=False)
    assert recorded.sinks == (0,)
    assert recorded.sink_report["found"] is False
    assert "through a window" in recorded.sink_report["reason"]
    # a window of ours that carries the first keys leaves those to be found
    full = Target(tiny_llama(), TinyTokenizer(), aux_layers=(1,))
    with full.attention(window=8, sinks=2):
        carried = full.record(prompts, max_new_tokens=12, template=False)
    assert carried.sink_report["found"]
    assert set(carried.sinks) <= {0, 1}


@pytest.mark.parametrize("key", ["sink:drop", "pin:sink:least=0.0001"])
def test_a_live_run_knows_the_recorded_sinks(tiny_target, tiny_trajectory, make_drafter, key):
    from driftlab import all_starts, speculate
    from driftlab.interventions import intervened, parse_intervention

    drafter, text = make_drafter("eagle31", scale=4.0), tiny_trajectory.subset([3]).with_sinks((2,))
    entry, seen = text.entries[0], {}
    prompt = text.tokens(0)[: entry.prompt_length].tolist()
    with intervened(drafter, [parse_intervention(key)]):
        for name, run in {
            "live": lambda: speculate(tiny_target, drafter, prompt, depth=3, max_new_tokens=4, sinks=text.sinks),
            "elsewhere": lambda: speculate(tiny_target, drafter, prompt, depth=3, max_new_tokens=4),
            "replay": lambda: all_starts(drafter, text, 3, feed="own"),
        }.items():
            states = []

            def keep(value, hook, states=states):
                states.append((hook.depth, value[0, 0].clone()))

            with drafter.hooks([("hook_feedback", keep)], read_only=True):
                run()
            seen[name] = next(state for depth, state in states if depth == 2)
    assert torch.allclose(seen["live"], seen["replay"], atol=1e-5)
    assert not torch.allclose(seen["elsewhere"], seen["replay"], atol=1e-3)


def test_a_caption_says_what_was_laid_on():
    from driftlab.plotting import caption
    from driftlab.results import as_rows

    rows = [{"depth": 1, "quantity": "match", "value": 0.5}]
    assert "with sink:drop" in caption(as_rows(rows, intervention="sink:drop"))
    assert "with" not in caption(as_rows(rows))


def test_simulate_says_what_a_drafter_cannot_propose_and_what_is_longer_than_its_training(
    make_drafter, tiny_trajectory, monkeypatch, capsys, tmp_path
):
    from driftlab import choose_draft_vocab, cli
    from driftlab.vocabulary import coverage

    vocab = choose_draft_vocab(tiny_trajectory, 20)
    make_drafter("eagle31", draft_vocab=vocab, trained_length=30).save(tmp_path / "d")
    arguments = ["simulate", tiny_trajectory.path, tmp_path / "d", "--out", tmp_path / "r.csv", "--tree", 2, 2, 100]
    monkeypatch.setattr("sys.argv", ["driftlab", *map(str, arguments)])
    cli.main()
    told = capsys.readouterr().out
    assert f"its draft vocabulary holds {coverage(vocab, tiny_trajectory):.1%} of the answers' tokens" in told
    beyond = sum(entry.length > 30 for entry in tiny_trajectory.entries)
    assert f"{beyond} of 4 texts are longer than the 30 tokens it was trained on" in told
    assert "dynamic tree of 6 nodes" in told
    assert "100 nodes" not in told


@pytest.mark.parametrize("role", ["tool", "assistant"])
def test_a_message_that_the_template_drops_is_told_whoever_speaks(role):
    from driftlab.prompts import Message, Prompt, encode

    tokenizer = tiny_fast_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }} {% endif %}{% endfor %}a "
    )
    dialogue = (Message("user", "hello"), Message(role, "something else"), Message("user", "more"))
    with pytest.warns(UserWarning, match=f"the chat template leaves a {role} message out"):
        encode(Prompt("p", dialogue), tokenizer)


def test_thoughts_that_a_template_takes_out_are_no_loss(recwarn):
    from driftlab.prompts import Message, Prompt, encode

    tokenizer = tiny_fast_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content.split('</think>')[-1] }} {% endfor %}a "
    thought = Message("assistant", "<think>hm</think> so it is")
    encode(Prompt("p", (Message("user", "hello"), thought, Message("user", "more"))), tokenizer)
    assert not recwarn.list


def test_an_own_heads_rows_are_not_given_to_other_tokens(make_drafter):
    from driftlab import DriftlabError

    drafter = make_drafter("eagle31", draft_vocab=[3, 5, 7, 9], lm_head="own")
    drafter.set_draft_vocab([3, 5, 7, 9])
    with pytest.raises(DriftlabError, match="rows belong to the draft vocabulary that it has"):
        drafter.set_draft_vocab([3, 5, 7, 11])


def test_a_trained_folder_says_with_which_loss(make_drafter, tiny_trajectory, tmp_path):
    import json

    from driftlab import TrainConfig, train

    config = TrainConfig(ttt=1, loss="kl", batch_size=2, epochs=0.5, save_every=0)
    train(make_drafter("eagle31"), tiny_trajectory, config, out=tmp_path / "d")
    told = json.loads((tmp_path / "d" / "train_config.json").read_text())
    assert (told["loss"], told["ttt"], told["depth_decay"]) == ("kl", 1, config.depth_decay)


def test_a_draft_vocabulary_survives_training_on_other_text(make_drafter, tiny_target, tiny_trajectory, tmp_path):
    """d2t chosen on one text and kept when the weights are trained on another one."""
    from driftlab import TrainConfig, choose_draft_vocab, train

    vocab = choose_draft_vocab(tiny_trajectory, 20)
    drafter = make_drafter("eagle31", draft_vocab=vocab)
    before = drafter.d2t.clone()
    other = tiny_target.record(["zz top", "yes no"], max_new_tokens=12, template=False, out=tmp_path / "other")
    assert set(choose_draft_vocab(other, 20)) != set(vocab)
    for name, text in (("a", tiny_trajectory), ("b", other)):
        how = TrainConfig(ttt=1, batch_size=2, epochs=0.5, save_every=0)
        drafter = train(drafter, text, how, out=tmp_path / name)
    assert torch.equal(drafter.d2t, before)
