"""The doctor on tiny trained drafters: what is mis-declared is named, no honest file is doubted, noise is said to be noise."""

import dataclasses
import json
import sys

import pytest

from driftlab import DriftlabError

SIZES = ((12, 12), (24, 22))


@pytest.fixture(scope="module")
def recording(varied_target, tmp_path_factory):
    """Twenty-four prompts, with the states beside those that the drafters read."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    prompts = [f"{a}{b} says {b}{a} {c}" for a, b, c in zip(letters, letters[3:], letters[2:], strict=False)]
    before = varied_target.aux_layers
    varied_target.aux_layers = (0, 1, 2, 3, 4, 5, 6)
    try:
        out = tmp_path_factory.mktemp("doctor") / "recording"
        prompts = [*prompts, "one more"]
        return varied_target.record(prompts, max_new_tokens=24, template=False, out=out)
    finally:
        varied_target.aux_layers = before


@pytest.fixture(scope="module")
def files(recording, tmp_path_factory):
    """eagle31 and an MTP head trained on the recording, and eagle3 with random weights, as folders."""
    from driftlab import VARIANTS, Drafter, TrainConfig, train

    out = tmp_path_factory.mktemp("drafters")
    kinds = {
        "eagle31": VARIANTS["eagle31"].for_target(recording, aux_layers=(1, 3, 5)),
        "mtp": VARIANTS["norm_output"].for_target(recording, architecture="mtp", aux_layers=()),
    }
    for name, config in kinds.items():
        how = TrainConfig(ttt=3, lr=6e-3, batch_size=8, epochs=30.0, save_every=0)
        train(Drafter(config, recording), recording, how, out=out / name)
    config = VARIANTS["eagle3"].for_target(recording, aux_layers=(1, 3, 5))
    Drafter(config, recording).save(out / "random")
    return out


def diagnosed(path, recording, outside=None, sizes=SIZES, depth=None, **given):
    from driftlab.doctor import diagnose
    from driftlab.drafter.formats.reading import read_checkpoint

    return diagnose(read_checkpoint(path, **given), recording, outside=outside, sizes=sizes, depth=depth)


@pytest.mark.parametrize("name", ["eagle31", "mtp"])
def test_an_honest_file_is_not_doubted(name, files, recording):
    found = diagnosed(files / name, recording)
    assert found.outcome in ("declared", "more text")
    assert found.best == found.declared
    assert not found.changes
    assert found.gain is None
    assert found.tau_gain.value == 0
    assert not found.remedies
    assert any("differences of positions" in words for words in found.one_class)


@pytest.mark.parametrize(
    ("name", "given", "outside"),
    [
        ("eagle31", {"norm_output": False}, {}),
        ("eagle31", {"aux_layers": (2, 4, 6)}, {}),
        ("eagle31", {}, {"order": (2, 1, 0)}),
        ("eagle31", {"fc_norm": False, "rope_interleaved": True}, {}),
        ("eagle31", {}, {"token_shift": 0}),
        ("eagle31", {"aux_layers": (2, 4, 6)}, {"inputs": "hidden first"}),
        ("mtp", {}, {"inputs": "hidden first"}),
        ("mtp", {}, {"token_shift": 0}),
    ],
)
def test_what_is_declared_wrong_is_named(name, given, outside, files, recording):
    from driftlab.doctor.evidence import LEVEL
    from driftlab.doctor.stored import View
    from driftlab.drafter.formats.reading import read_checkpoint

    truth = View(config=read_checkpoint(files / name).config_for(recording))
    found = diagnosed(files / name, recording, outside, **given)
    together = {row.view for row in found.together}
    assert found.outcome == "another"
    assert found.best == truth or truth in together
    assert found.p < LEVEL
    assert found.gain.low > 0
    assert found.tau_gain.high > 0
    assert set(found.remedies) >= {"driftlab", "vLLM", "SGLang", "speculators", "TensorRT-LLM"}


def test_what_is_found_is_said_while_something_else_is_open(files, recording):
    """Two mistakes, one so small on this text that it is not shown: the large one is named, for the other more is wanted."""
    found = diagnosed(files / "eagle31", recording, {"inputs": "hidden first"}, norm_plus_one=True)
    assert found.outcome == "another"
    assert ("inputs", "hidden first", "embedding first") in found.changes
    gain = ("gain", "w")
    assert gain in [c for row in found.open for c in row.changes] or found.best.config.norm_plus_one is False
    if found.best.config.norm_plus_one:
        assert found.more_tokens > 0
        assert f"record {found.more_tokens} more answer tokens" in found.words()
        assert "\n  gain w\n" in found.words().partition("not told on this text")[2]


def test_of_random_weights_nothing_is_told(files, recording):
    """Not even where the search has found a reading that is less bad: none of it is said, to a program either."""
    found = diagnosed(files / "random", recording, sizes=((16, 8),))
    assert found.outcome == "too weak"
    assert abs(found.information) < 0.1
    assert found.best == found.declared
    values, words = found.to_dict(), found.words()
    assert not any(values[key] for key in ("changes", "remedies", "one_class", "readings", "more_tokens"))
    assert values["gain_nats_per_token"] is None
    assert values["p_adjusted"] is None
    assert "Nothing is said" in words
    assert "one class" not in words


def test_what_no_text_can_tell_is_one_class_and_not_ranked(files, recording):
    """With one drafted token nothing is fed back: the wrong feedback is neither found nor called best."""
    found = diagnosed(files / "eagle31", recording, norm_output=False, depth=1)
    verdicts = {row.changes: row.verdict for row in found.rows}
    right = ("norm_output", "on (fed back after the norm)")
    assert found.outcome in ("declared", "more text")  # the head without its norm is sharper: no better for that
    assert verdicts[(right,)] == "same"
    assert "norm_output" not in [name for name, _, _ in found.changes]
    assert found.open == tuple(row for row in found.rows if row.verdict == "open")
    assert (right,) in [row.changes for row in found.together]
    assert any("only one token is drafted" in words for words in found.one_class)
    together = found.words().partition("one class")[2]
    assert "fed back after the norm" in together
    assert not any("position" in dict(row.changes) for row in found.rows)


def test_every_level_of_a_factor_is_another_reading_the_declared_one_first(files, recording):
    from driftlab.doctor.factors import plausible
    from driftlab.doctor.stored import Stored, View
    from driftlab.drafter.formats.reading import read_checkpoint

    for name in ("eagle31", "mtp"):
        reading = read_checkpoint(files / name)
        declared = View(config=reading.config_for(recording))
        stored = Stored.of(reading.tensors, recording.head)
        factors = plausible(declared, stored, recording.spec, recording.aux_layers, 3)
        assert len(factors.levels) > 8
        for levels in factors.levels.values():
            views = [level.apply(declared) for level in levels]
            assert views[0] == declared
            assert len(set(views)) == len(views) > 1


def test_words_and_json_say_the_same(files, recording):
    found = diagnosed(files / "eagle31", recording, norm_output=False)
    values = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert values["outcome"] == "another"
    change = {
        "factor": "norm_output",
        "declared": "off (fed back before the norm)",
        "best": "on (fed back after the norm)",
    }
    assert values["changes"] == [change]
    assert values["remedies"]["vLLM"] == 'config.json "norm_output": true'
    assert values["remedies"]["driftlab"] == "--given norm_output=true"
    words = found.words()
    assert "another reading is better" in words
    assert f"{found.tau_gain.value:+.3f}" in words
    assert '"norm_output": true' in words
    verdicts = {row["verdict"] for row in values["readings"]}
    assert verdicts <= {"same", "no matter", "worse", "open"}


def test_states_that_were_not_recorded_are_said(files, recording, varied_trajectory):
    from driftlab.doctor import diagnose
    from driftlab.drafter.formats.reading import read_checkpoint

    with pytest.raises(DriftlabError, match="the recording holds"):
        diagnose(read_checkpoint(files / "eagle31", aux_layers=(0, 2, 4)), varied_trajectory)
    found = diagnose(read_checkpoint(files / "eagle31"), varied_trajectory, sizes=SIZES)
    assert any("each one layer later" in words for words in found.skipped)
    with pytest.raises(DriftlabError, match="token_shft"):
        diagnose(read_checkpoint(files / "eagle31"), varied_trajectory, outside={"token_shft": 0})
    with pytest.raises(DriftlabError, match="record several"):
        diagnose(read_checkpoint(files / "eagle31"), varied_trajectory.subset([0]))


def test_the_states_that_are_wanted_are_those_beside(make_drafter):
    from driftlab.doctor import states_wanted

    config = make_drafter("eagle3").config
    assert config.aux_layers == (1, 3, 5)
    assert states_wanted(config, 7) == (0, 1, 2, 3, 4, 5, 6)
    assert states_wanted(config, 5) == (0, 1, 2, 3, 4, 5)  # no state 6 there
    assert states_wanted(dataclasses.replace(config, aux_layers=(2, 15, 27)), 30) == (1, 2, 3, 14, 15, 16, 26, 27, 28)


def test_only_readings_that_the_file_allows_are_offered(make_drafter, tiny_trajectory):
    from driftlab.doctor.factors import plausible
    from driftlab.doctor.stored import Stored, View

    def offered(drafter, depth=3, **tensors):
        stored = Stored.of({**drafter.state_dict(), **tensors}, tiny_trajectory.head)
        return plausible(View(config=drafter.config), stored, tiny_trajectory.spec, (1, 3, 5), depth).levels

    plain = offered(make_drafter("eagle3"))
    assert not {"norm before fc", "qk_norm", "embedding", "d2t", "final_state", "rope_scaling"} & set(plain)
    assert {"norm_output", "token_shift", "lm_head", "gain", "position", "key heads"} <= set(plain)
    assert all(len(levels) > 1 for levels in plain.values())
    assert "position" not in offered(make_drafter("eagle3"), depth=1)
    embed = tiny_trajectory.head.embed
    own = make_drafter("eagle3", own_embed=True)
    assert "embedding" in offered(own)
    assert "embedding" not in offered(own, **{"embed_tokens.weight": embed})  # the same table
    few = make_drafter("eagle3", draft_vocab=range(3, 50, 2))
    assert "d2t" in offered(few)  # 3, 4, 5, ... as ids would do too
    assert "d2t" not in offered(make_drafter("eagle3", draft_vocab=[5, 6, 7, 20, 30]))  # 5, 5, 5, 17, 26 are no ids
    assert {"final_state", "zero_first_embedding"} <= set(
        offered(make_drafter("norm_output", architecture="mtp", aux_layers=()))
    )


def test_remedies_name_each_engines_key(make_drafter):
    from driftlab.doctor.remedies import remedies
    from driftlab.doctor.stored import View

    declared = View(config=dataclasses.replace(make_drafter("eagle31").config, aux_layers=(2, 15, 27)))

    def said(**fields):
        return remedies(declared, dataclasses.replace(declared, config=dataclasses.replace(declared.config, **fields)))

    layers = said(aux_layers=(3, 16, 28))
    assert (
        layers["vLLM"].count("[3, 16, 28]") == 2
    )  # at the top level and in eagle_config: its runners look in one each
    assert '"eagle_config.eagle_aux_hidden_state_layer_ids": [2, 15, 27]' in layers["SGLang"]
    assert "[2, 15, 27]" in layers["TensorRT-LLM"]
    assert layers["driftlab"] == "--given aux_layers=3,16,28"
    residual = said(norm_before_residual=True)
    assert residual["speculators"] == 'config.json "norm_before_residual": true'
    assert residual["SGLang"].startswith("cannot carry it: norm_before_residual")
    assert "transformer_layer_config.rope_theta" in said(rope_theta=5e5)["speculators"]
    assert "add 1 to all gains" in said(norm_plus_one=True)["everywhere"]
    shift = remedies(declared, dataclasses.replace(declared, token_shift=0))
    assert "no key says it" in shift["vLLM"]
    assert "paired" in shift["everywhere"]


def test_an_engine_that_cannot_say_the_best_reading_is_told_one_that_is_one_with_it(make_drafter):
    from driftlab.doctor.remedies import remedies
    from driftlab.doctor.stored import View

    declared = View(config=make_drafter("eagle31").config)

    def view(**fields):
        return dataclasses.replace(declared, config=dataclasses.replace(declared.config, **fields))

    best = view(twice_normed=True)
    plain = remedies(declared, best)
    assert '"norm_output"' not in plain["vLLM"]
    together = {"gain 1 + w": view(norm_plus_one=True), "norm_output off": view(norm_output=False)}
    said = remedies(declared, best, together)
    for engine in ("vLLM", "SGLang", "TensorRT-LLM"):
        assert '"norm_output": false (that is norm_output off, one with the best' in said[engine]
    assert said["driftlab"] == plain["driftlab"] == "--given twice_normed=true"
    assert said["everywhere"] == plain["everywhere"] + " (for the best reading itself)"
    # where the best reading can be said, it is
    assert remedies(declared, view(rope_theta=5e5), together) == remedies(declared, view(rope_theta=5e5))


def test_the_command_says_what_is_wrong(files, recording, monkeypatch, capsys):
    from driftlab import cli

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["driftlab", "doctor", *map(str, arguments)])
        cli.main()
        return capsys.readouterr().out

    wrong = run(files / "mtp", "--target", recording.path, "--declared", "token_shift=0", "--json")
    values = json.loads(wrong)
    assert values["outcome"] == "another"
    assert [change["factor"] for change in values["changes"]] == ["token_shift"]
    plain = run(files / "mtp", "--target", recording.path)
    assert "declared reading is best" in plain or "not enough evidence" in plain  # it is honest: nothing else is named
    for said, told in {
        "sideways=1": "sideways",
        "order=descending": "order ('descending',)",
        "gap=x": "gap 'x'",
    }.items():
        with pytest.raises(SystemExit):
            run(files / "eagle31", "--target", recording.path, "--declared", said)
        assert told in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(files / "eagle31", "--target", recording.path, "--declared", "gap=1", "gap=0")
    assert "--declared says gap twice" in capsys.readouterr().err


def test_a_drafter_that_drafts_nothing_in_any_reading_gets_no_advice(files, recording, tmp_path):
    """Its fusion layer is 0: embedding and head alone predict a little, and no reading mends it."""
    import torch

    from driftlab import Drafter

    drafter = Drafter.load(files / "eagle31", recording)
    with torch.no_grad():
        drafter.fc.weight.zero_()
        drafter.layers[0].mlp.down_proj.weight.mul_(-1)
    drafter.save(tmp_path / "d")
    found = diagnosed(tmp_path / "d", recording, norm_output=False)
    assert found.outcome != "another"
    assert not found.changes
    assert not found.remedies


def test_a_best_reading_that_hardly_drafts_is_too_weak_to_tell(files, recording, monkeypatch):
    monkeypatch.setattr("driftlab.doctor.diagnosis.WEAK_TAU", 3.9)
    found = diagnosed(files / "eagle31", recording, norm_output=False)
    assert found.outcome == "too weak"
    assert found.tau_best.value < 3.9
    assert not found.changes
    assert "Nothing is said of its conventions" in found.words()


def test_one_text_many_times_is_one_text(files, recording):
    with pytest.raises(DriftlabError, match=r"1 different text\(s\)"):
        diagnosed(files / "eagle31", recording.subset([0] * 9))


@pytest.mark.parametrize(
    ("outside", "told"),
    [
        ({"gap": 2}, "gap 2: it is -1 or 0 or 1"),
        ({"gap": -1, "frozen": True}, "frozen with gap -1"),
        ({"frozen": 1}, "frozen 1"),
        ({"token_shift": 5}, "token_shift 5: it is 0 or 1 or 2"),
        ({"inputs": "foo"}, "'foo': it is embedding first or hidden first"),
        ({"grouping": "strides"}, "'strides'"),
        ({"d2t": "abs"}, "'abs': it is offset or absolute"),
        ({"order": (2, 0, 1, 5)}, "the places 0..2 of the 3 captured states"),
        ({"order": (2,)}, "the places 0..2"),
    ],
)
def test_what_is_declared_beyond_the_configuration_is_checked(files, recording, outside, told):
    with pytest.raises(DriftlabError) as error:
        diagnosed(files / "eagle31", recording, outside)
    assert told in str(error.value)


def test_depths_are_checked_and_answers_are_cut_behind_them(files, recording):
    with pytest.raises(DriftlabError, match="depth 0: .* 1 or more"):
        diagnosed(files / "eagle31", recording, depth=0)
    found = diagnosed(files / "eagle31", recording, depth=5, sizes=((4, 4), (5, 4)), norm_output=False)
    assert found.depth == 5
    assert all(len(row.by_depth) == 5 for row in found.rows)
