"""Values of a drafter's configuration: the same checks for files, for what is given, for the command line and for Python."""

import dataclasses
import json

import pytest
from builders import BASE, config_of, own_tables

YARN = {"kind": "yarn", "factor": 4.0, "original_max_positions": 64}
LLAMA3 = {**YARN, "kind": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
WRONG = [
    ("norm_output", "false", "norm_output is 'false', not true or false"),
    ("norm_output", 0, "norm_output is 0, not true or false"),
    ("norm_output", None, "norm_output is None, not true or false"),
    ("own_embed", "", "own_embed is '', not true or false"),
    ("windows", (4.5,), "windows is 4.5, not a whole number"),
    ("windows", 4, "windows is 4, not a list of whole numbers"),
    ("aux_layers", (1.0, 3.0, 5.0), "aux_layers is 1.0, not a whole number"),
    ("aux_layers", (True, 3, 5), "aux_layers is True, not a whole number"),
    ("aux_layers", "135", "aux_layers is '135', not a list of whole numbers"),
    ("architecture", "foo", "architecture is 'foo', not one of 'eagle3', 'mtp'"),
    ("lm_head", "foo", "lm_head is 'foo', not one of 'own'"),
    ("num_hidden_layers", 1.0, "num_hidden_layers is 1.0, not a whole number"),
    ("num_key_value_heads", 0, "num_key_value_heads is 0, not a whole number above 0"),
    ("head_dim", "8", "head_dim is '8', not a whole number"),
    ("hidden_size", None, "hidden_size is None, not a whole number"),
    ("rope_theta", "x", "rope_theta is 'x', not a number"),
    ("rope_theta", float("nan"), "rope_theta is nan, not a number"),
    ("rope_theta", True, "rope_theta is True, not a number"),
    ("rms_norm_eps", -1, "rms_norm_eps is -1, not a number of 0 or more"),
    ("rms_norm_eps", "1e-5", "rms_norm_eps is '1e-5', not a number"),
    ("logit_scale", 0.0, r"logit_scale is 0\.0, not a number above 0"),
    ("logit_scale", float("inf"), "logit_scale is inf, not a number"),
    ("rope_scaling", "yarn", "rope_scaling is 'yarn', not a table of kind, factor"),
    ("rope_scaling", {"kind": "yarn"}, r"rope_scaling: unknown keys \[\], missing keys \['factor'\]"),
    ("rope_scaling", {"type": "linear", "factor": 2.0}, r"rope_scaling: unknown keys \['type'\]"),
    ("rope_scaling", {**YARN, "attention_factor": 0.0}, "yarn: attention_factor is 0.0, not a number above 0"),
    ("rope_scaling", {**YARN, "attention_factor": float("nan")}, "attention_factor is nan, not a number"),
    ("rope_scaling", {**YARN, "factor": float("inf")}, "factor is inf, not a number"),
    ("rope_scaling", {**YARN, "beta_fast": 0}, "beta_fast is 0, not a number above 0"),
    ("rope_scaling", {**YARN, "beta_slow": -1.0}, "beta_slow is -1.0, not a number above 0"),
    ("rope_scaling", {**YARN, "beta_fast": 0.5}, "beta_fast 0.5 is below beta_slow 1"),
    ("rope_scaling", {**YARN, "truncate": "no"}, "truncate is 'no', not true or false"),
    ("rope_scaling", {**LLAMA3, "low_freq_factor": 4.0}, "low_freq_factor 4 is not below high_freq_factor 4"),
    ("latent", {}, r"latent: unknown keys \[\], missing keys"),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "d"
    own_tables().save(folder)
    return folder


def refused(told, call, *args, **kwargs):
    from driftlab import DriftlabError

    with pytest.raises(DriftlabError, match=told):
        call(*args, **kwargs)


@pytest.mark.parametrize(("name", "value", "told"), WRONG)
def test_a_value_that_none_can_have_is_named_wherever_it_comes_from(name, value, told, saved, tmp_path):
    from driftlab import Drafter, DrafterConfig

    if not (name == "rope_scaling" and isinstance(value, dict)) or "kind" in value:
        refused(told, DrafterConfig, **{**BASE, name: value})
    if (name, value) not in (("aux_layers", None),):
        refused(f"given: .*{told}", Drafter.load, saved, **{name: value})
    values = json.loads((saved / "config.json").read_text())
    values["driftlab"]["config"][name] = value
    values.pop(name, None)
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "model.safetensors").write_bytes((saved / "model.safetensors").read_bytes())
    refused(told, Drafter.load, tmp_path)


def test_what_can_be_meant_is_taken_in_the_type_of_the_field():
    config = config_of(rope_theta=5, windows=[3], rope_scaling={**YARN, "factor": 4}, aux_layers=[0, 2])
    assert config == config_of(rope_theta=5.0, windows=(3,), rope_scaling=config.rope_scaling, aux_layers=(0, 2))
    assert (type(config.rope_theta), type(config.windows), type(config.rope_scaling.factor)) == (float, tuple, float)


def test_experts_that_cannot_be_chosen_are_refused():
    from driftlab.drafter.config import ExpertsConfig

    fine = {
        "count": 8,
        "per_token": 2,
        "intermediate_size": 20,
        "scoring": "sigmoid",
        "groups": 4,
        "groups_per_token": 2,
    }
    ExpertsConfig(**fine)
    refused("a token takes 5, and 4 are open to it", ExpertsConfig, **{**fine, "per_token": 5})
    refused("8 in 3 groups", ExpertsConfig, **{**fine, "groups": 3})
    refused("8 in 8 groups", ExpertsConfig, **{**fine, "groups": 8})
    refused("a token takes 9 groups", ExpertsConfig, **{**fine, "groups_per_token": 9})


def test_a_logarithm_of_one_is_refused():
    from driftlab.drafter.rotary import RopeScaling

    refused("rope_theta 1.0: yarn", config_of, rope_theta=1.0, rope_scaling=RopeScaling(**YARN))


@pytest.mark.parametrize(
    ("said", "value"),
    [
        *(
            ("false", False),
            ("False", False),
            ("off", False),
            ("no", False),
            ("on", True),
            ("TRUE", True),
            ("yes", True),
        ),
        *(("null", None), ("None", None), ("2,4,6", [2, 4, 6]), ("5,", [5]), ("[2, 4]", [2, 4]), ("1e4", 10000.0)),
        *(("before-879", "before-879"), ("", ""), ('{"kind": "yarn"}', {"kind": "yarn"})),
    ],
)
def test_the_command_line_reads_words_numbers_lists_and_json(said, value):
    from driftlab.cli.common import given_value

    found = given_value(said)
    assert found == value
    assert type(found) is type(value)


def test_the_command_line_switches_off_what_it_says(saved, capsys):
    from driftlab.cli.checkpoints import inspect

    inspect(str(saved), given=("norm_output=off", "aux_layers=2,4,6"), json=True)
    rows = {row["name"]: row["value"] for row in json.loads(capsys.readouterr().out)["conventions"]}
    assert (rows["norm_output"], rows["aux_layers"]) == (False, [2, 4, 6])
    for wrong in ("norm_output=", "rope_theta=abc", "rope_scaling=yarn"):
        refused(f"given: {wrong.partition('=')[0]} is ", inspect, str(saved), given=(wrong,))


def test_depth_and_options_are_checked(saved):
    from driftlab.drafter.formats.reading import read_checkpoint

    refused("num_layers is '6', not a whole number", read_checkpoint, saved, num_layers="6")
    refused("specforge is 3, not a name", read_checkpoint, saved, specforge=3)
    for option in ({"module": 1}, {"layer_ids": "output"}, {"specforge": "before-879"}, {"format": "vLLM"}):
        refused(f"a file of driftlab, to which {next(iter(option))} does not apply", read_checkpoint, saved, **option)


def test_the_block_itself_is_checked(saved, tmp_path):
    from driftlab import Drafter

    values = json.loads((saved / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((saved / "model.safetensors").read_bytes())
    block = values["driftlab"]
    for wrong, told in (
        (5, "driftlab is 5, not a table"),
        (None, "driftlab is None, not a table"),
        ({**block, "config": [1]}, r"driftlab\.config is \[1\], not a table"),
        ({**block, "target": "tiny"}, r"driftlab\.target is 'tiny', not label and fingerprint"),
        ({**block, "config": {**block["config"], "aux_layers": None}}, "aux_layers is None, not a list"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**values, "driftlab": wrong}))
        refused(told, Drafter.load, tmp_path)


def test_every_record_is_checked_by_itself():
    from driftlab.drafter import config, rotary

    for record in (config.DrafterConfig, config.LatentConfig, config.ExpertsConfig, rotary.RopeScaling):
        assert dataclasses.is_dataclass(record)
        assert record.__no_type_check__


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("norm_output=on", "norm_output=off"), "norm_output twice"),
        (("path=x",), "path: no such convention"),
        (("num_layers=32",), "num_layers: no such convention"),
        (("norm_output",), "wants name=value"),
    ],
)
def test_what_can_not_be_given_on_the_command_line_is_said(given, told):
    from driftlab.cli.common import given_values

    refused(told, given_values, given)


def test_a_revision_stays_a_word():
    from driftlab.cli.common import given_values

    assert given_values(("revision=1234567",)) == {"revision": "1234567"}


def test_a_number_beyond_floats_is_refused_by_name():
    from driftlab import DrafterConfig

    refused("rope_theta is", DrafterConfig.from_dict, {**config_of().to_dict(), "rope_theta": 10**400})
    assert config_of(vocab_size=10**400, own_embed=True).vocab_size == 10**400
