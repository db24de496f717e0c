"""What an attacker found in the lab: settings that were read as others, pins that did not hold, inputs without rounds."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings

import pytest
import torch


@pytest.fixture
def batch(tiny_trajectory):
    (batch,) = tiny_trajectory.subset([1, 2]).batches(2048)
    return batch


KINDS = {
    **{f"sink:drop:layers={word}": "no number of a layer" for word in ("-1", "last", "0,x", "")},
    "window:4:carried=1.5": "carried is 1.5, it is to be a whole number or a name",
    "window:4.5": "width is 4.5, it is to be a whole number",
    "window:abc": "width is 'abc'",
    "noise:hidden:abc": "alpha is 'abc', it is to be a finite number",
    "noise:hidden:nan": "alpha is nan",
    "noise:hidden:0.5:seed=x": "seed is 'x', it is to be a whole number",
    "aux:0:inf": "factor is inf",
    "aux:a:2": "index is 'a'",
    "aux:1.5:2": "index is 1.5",
    "logn:abc": "trained is 'abc'",
    "pin:sink:least=abc": "least is 'abc'",
}


def test_a_value_of_another_kind_is_refused_and_named():
    """In a process of its own: the tests' import hook would refuse the kinds before driftlab does."""
    program = (
        "import json, sys\nfrom driftlab import DriftlabError, parse_intervention\nsaid = {}\n"
        "for text in json.loads(sys.argv[1]):\n    try:\n        said[text] = parse_intervention(text).key\n"
        "    except DriftlabError as error:\n        said[text] = str(error)\nprint(json.dumps(said))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(list(KINDS))], capture_output=True, text=True, check=True
    )
    said = json.loads(done.stdout)
    assert {text: words for text, words in said.items() if KINDS[text] not in words} == {}


def test_a_layer_named_twice_is_one():
    from driftlab import parse_intervention

    assert parse_intervention("logn:8:layers=0,0").key == "logn:8:layers=0"
    assert parse_intervention("pin:sink:layers= 1").layers == (1,)


def test_two_pins_at_one_depth_are_refused_and_at_two_hold_their_mass(make_drafter, batch):
    from driftlab import DriftlabError, all_starts, intervened, parse_intervention

    drafter = make_drafter()
    pins = [parse_intervention(text) for text in ("pin:sink", "pin:equal")]
    for pair in (pins, pins[::-1]):
        with pytest.raises(DriftlabError, match="two pins on layer 0"), intervened(drafter, pair):
            pass
    assert not drafter.layers[0].self_attn.steering
    apart = [parse_intervention(text) for text in ("pin:sink:least=0.001@2", "pin:equal:least=0.001@3")]
    with intervened(drafter, apart) as reports:
        all_starts(drafter, batch, 3)
    assert all(report.worst < 1e-5 for report in reports)
    assert "mass off by" in str(reports[0])


def test_a_rescaled_pin_refuses_what_its_counterfactual_would_not_see(make_drafter, batch):
    from driftlab import DriftlabError, all_starts, intervened, parse_intervention

    drafter = make_drafter("eagle31")
    for texts in (("gain", "pin:sink:state=rescaled:least=0.001"), ("pin:sink:state=rescaled:least=0.001", "gain")):
        with (
            pytest.raises(DriftlabError, match="would not see"),
            intervened(drafter, [parse_intervention(text) for text in texts]),
        ):
            all_starts(drafter, batch, 2)


class Doubled:
    """A tokenizer whose template begins with two BOS."""

    chat_template = "there is one"
    bos_token_id, eos_token_id = 1, 2

    def __call__(self, text, add_special_tokens=True):
        ids = [1 if c == "^" else 10 + ord(c) % 40 for c in text]
        return {"input_ids": [1, *ids] if add_special_tokens else ids}

    def apply_chat_template(self, dialogue, add_generation_prompt=True, tokenize=False, **_):
        return "^^" + "".join(m["content"] for m in dialogue) + ("A" if add_generation_prompt else "")


@pytest.mark.parametrize(("key", "count"), [("bos=off", 0), ("bos=on", 1), ("chat", 2)])
def test_bos_is_one_or_none_whatever_the_template_writes(key, count):
    from driftlab import Perturbation, load_prompts

    (ids,) = Perturbation.parse(key).encode(load_prompts(["hello"]), Doubled())
    assert ids[: count + 1].count(1) == ids.count(1) == count


class Two(Doubled):
    """A tokenizer whose template takes every role but "user" for the assistant."""

    def apply_chat_template(self, dialogue, add_generation_prompt=True, tokenize=False, **_):
        lines = [("user " if m["role"] == "user" else "assistant ") + m["content"] for m in dialogue]
        return "".join(lines) + ("assistant" if add_generation_prompt else "")


def test_a_role_name_that_only_stands_in_the_content_is_not_a_renamed_role():
    from driftlab import DriftlabError, Perturbation, load_prompts

    with pytest.raises(DriftlabError, match="does not write the names of the roles"):
        Perturbation.parse("roles=human").encode(load_prompts(["is a human here"]), Two())


def test_rows_of_given_answers_are_told_from_the_targets_own(tiny_target, make_drafter):
    from driftlab.measure import settings

    own = tiny_target.record(["abc"], max_new_tokens=4, template=False)
    given = tiny_target.record(["abc"], max_new_tokens=4, template=False, answers=[own.tokens(0)[-2:].tolist()])
    told = [settings(make_drafter(target=x), x, "d", depth=2, feed="text")["template"] for x in (own, given)]
    assert told[1] == f"{told[0]}, answers given"


def test_a_plain_input_whose_answers_end_at_once_costs_the_stability_and_nothing_else(tiny_target, make_drafter):
    from driftlab.probing import ProbeConfig, probe

    prompts, options = ["abc", "de"], {"max_new_tokens": 6, "template": False}
    ended = tiny_target.record(prompts, answers=[[2], [2]], **options)
    longer = tiny_target.record(prompts, answers=[[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]], **options)
    drafter = make_drafter(target=longer, ttt=1)
    found = probe({"d": drafter}, {"none": ended, "other": longer}, ProbeConfig(depth=2))
    assert not found.stabilities
    tau = found.rows[(found.rows["quantity"] == "tau") & (found.rows["prompt"] == "")]
    assert tau["value"].isna().tolist() == [True, False]


def test_two_settings_of_one_name_are_refused():
    from driftlab import DriftlabError
    from driftlab.interventions import TorchHook
    from driftlab.probing import ProbeConfig

    one, two = (TorchHook("hook_resid", lambda module, args, out: None) for _ in range(2))
    with pytest.raises(DriftlabError, match="two settings are called"):
        ProbeConfig(settings=((one,), (two,)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ProbeConfig(settings=((one,), (TorchHook("hook_resid", torch.abs, name="other"),)))


def test_a_key_will_do_where_a_perturbation_is_wanted(tiny_target):
    from driftlab import Perturbation

    by_key, by_object = (
        tiny_target.record(["abc"], max_new_tokens=3, perturbation=one)
        for one in ("none+bos=off", Perturbation.parse("none+bos=off"))
    )
    assert by_key.settings == by_object.settings
    assert by_key.tokens(0).tolist() == by_object.tokens(0).tolist()


def test_a_text_is_no_intervention():
    script = """
from driftlab import DriftlabError
from driftlab.interventions import intervened
for wrong in ("pin:sink", ["pin:sink"]):
    try:
        with intervened(None, wrong):
            pass
    except DriftlabError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.count("parse_intervention makes one of a text") == 2


def test_a_hook_that_returns_another_shape_is_named(make_drafter, tiny_trajectory):
    from driftlab import DriftlabError, all_starts
    from driftlab.interventions import TorchHook, intervened

    hook = TorchHook("layers.0.mlp", lambda module, args, out: out[..., :1], name="cut")
    drafter = make_drafter()
    with (
        intervened(drafter, [hook]),
        pytest.raises(DriftlabError, match=r"hook:layers.0.mlp:cut: the function returned"),
    ):
        all_starts(drafter, tiny_trajectory, 2)


def test_the_probe_says_which_drafter_is_more_stable_and_how_far_it_drifts(varied_target, make_drafter):
    from driftlab.probe_report import drift_table, notes, stability_differences, tables
    from driftlab.probing import ProbeConfig, probe
    from driftlab.stability import compare_stability

    prompts, options = ["abc", "de", "fgh", "some more"], {"max_new_tokens": 16}
    inputs = {key: varied_target.record(prompts, perturbation=key, **options) for key in ("none", "none+bos=off")}
    first = inputs["none"]
    drafters = {name: make_drafter(name, target=first, ttt=1) for name in ("eagle3", "eagle31")}
    found = probe(drafters, inputs, ProbeConfig(depth=2))
    (line,) = stability_differences(found).to_dict("records")
    expected = compare_stability(found.stabilities["eagle31", ""], found.stabilities["eagle3", ""])
    assert (line["drafter"], line["base"]) == ("eagle31", "eagle3")
    assert (line["loss_worst"], line["loss_worst_low"]) == expected["tau_loss_worst"][:2]
    measures = drift_table(found)
    assert set(measures["depth"]) == {1, 2}
    at = measures[(measures["drafter"] == "eagle3") & (measures["depth"] == 2)].set_index("quantity")
    rows = found.rows[(found.rows["drafter"] == "eagle3") & (found.rows["depth"] == 2) & (found.rows["prompt"] == "")]
    for quantity in ("growth", "drift_tv", "sink_loss"):
        assert at.loc[quantity, "value"] == rows[rows["quantity"] == quantity]["value"].item()
    # one measure, one interval
    signs = {sign.name: sign.interval for sign in found.verdicts["eagle3"].signs}
    assert at.loc["log_rms_slope", ["value", "low", "high"]].tolist() == list(signs["magnitude"])
    assert {"Stability: a drafter less the first, plain", "Drift: verdict"} < set(tables(found))
    assert any("docs/method.md" in words for words in notes(found, {}))
