"""What a drafter's file means: every convention is read, told by tensors, assumed aloud or given, and none in silence."""

import copy
import dataclasses
import hashlib
import json
import math
import pickle
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from builders import own_tables, random_batch, target_of
from safetensors.torch import save_file

LAYERS = 8
IDS = "eagle_aux_hidden_state_layer_ids"
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
MLA = {"q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10}


def settings_of(drafter, **changes):
    """Plain settings of a drafter, as other projects write them; ... takes one away."""
    config = drafter.config
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    names += ("draft_vocab_size", "target_hidden_size", "rms_norm_eps", "rope_theta", "num_hidden_layers")
    values = {name: getattr(config, name) for name in names}
    values |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu", **changes}
    return {name: value for name, value in values.items() if value is not ...}


@pytest.fixture
def write(tmp_path):
    """Return a function that writes tensors and settings as a folder."""

    def written(drafter, *, prefix="layers.0.", tensors=(), without=(), settings=None, **changes):
        folder = tmp_path / f"drafter{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        weights = {name: t.clone() for name, t in drafter.state_dict().items()} | dict(tensors)
        weights = {n.replace("layers.0.", prefix): t for n, t in weights.items() if n not in without}
        save_file(weights, folder / "model.safetensors")
        values = settings_of(drafter, **changes) if settings is None else settings
        (folder / "config.json").write_text(json.dumps(values))
        return folder

    return written


def read(path, num_layers=LAYERS, **given):
    from driftlab.drafter.formats.reading import read_checkpoint

    return read_checkpoint(path, num_layers=num_layers, **given)


def row(reading, name):
    return next(r for r in reading.conventions if r.name == name)


def refused(told, call, *args, **kwargs):
    from driftlab import DriftlabError

    with pytest.raises(DriftlabError, match=told):
        call(*args, **kwargs)


def nested(ids, **settings):
    return {"eagle_config": {IDS: ids, **settings}}


@torch.no_grad()
def first_state(drafter):
    """Fused states, and the drafter's state at depth 1, of every row but the last of a random text."""
    from driftlab.segments import Starts

    batch = random_batch((9,), (5,), width=drafter.config.target_hidden_size, aux=drafter.config.states_read)
    index = torch.arange(8)[None]
    starts = Starts(index, torch.ones_like(index, dtype=torch.bool), torch.full_like(index, 2), ("x",))
    return drafter.fuse(batch.aux[:, :-1]), drafter.first(batch.tokens[:, 1:], batch.aux[:, :-1], starts)


def speculators_settings(drafter, model_type="llama", layer=(), **changes):
    plain = settings_of(drafter)
    outer = {"draft_vocab_size": plain.pop("draft_vocab_size"), "target_hidden_size": None}
    del plain["target_hidden_size"], plain["architectures"]
    return {
        **{"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"], **outer},
        "transformer_layer_config": {**plain, "model_type": model_type, **dict(layer)},
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "a/b"}},
        **changes,
    }


# ---- whose file it is


@pytest.mark.parametrize(
    ("changes", "prefix", "format", "told"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "midlayer.", "SafeAILab", "LlamaForCausalLM with tensors midlayer"),
        (nested([1, 3, 5]), "midlayer.", "SpecForge", "likely"),
        ({"_torchspec_version": "1", **nested([1, 3, 5])}, "midlayer.", "TorchSpec", "_torchspec_version"),
        (nested([1, 3, 5], next_layer_regular=True), "layers.0.", "NVIDIA ModelOpt", "next_layer_regular"),
        (nested([1, 3, 5], return_hidden_post_norm=True), "layers.0.", "TensorRT-LLM", "return_hidden_post_norm"),
        ({"architectures": ["EAGLE3LlamaForCausalLM"]}, "layers.0.", "TensorRT-LLM", "EAGLE3LlamaForCausalLM"),
        ({"architectures": ["Eagle3LlamaForCausalLM"]}, "layers.0.", "vLLM", "Eagle3LlamaForCausalLM"),
        ({}, "model.layers.0.", "NeMo Automodel", "prefix model"),
        (nested([1, 3, 5]), "layers.0.", "plain EAGLE-3", "nothing names a project"),
        ({"architectures": ["SomethingElse"], **nested([1, 3, 5])}, "layers.0.", "plain EAGLE-3", "SomethingElse"),
    ],
)
def test_projects_are_told_apart(write, changes, prefix, format, told):
    """sglang#24663, vllm#24967: an unknown architecture is decided by tensors."""
    reading = read(write(own_tables(fc_norm=False, norm_output=False), prefix=prefix, **changes))
    assert reading.format == format
    assert told in reading.told
    reading.build()
    assert read(reading.path, format="SGLang").told == "given by the user"
    refused("format='vllm' is not known: choose from", read, reading.path, format="vllm")


def test_speculators_files_are_told_by_their_own_key(write):
    drafter = own_tables(fc_norm=False, norm_output=False)
    reading = read(write(drafter, settings=speculators_settings(drafter)))
    assert (reading.format, reading.config_for().vocab_size) == ("speculators", 61)
    wrong = speculators_settings(drafter, norm_output=True, layer={"norm_output": False})
    refused("norm_output is True, and False in transformer_layer_config", read, write(drafter, settings=wrong))


@pytest.mark.parametrize(
    ("kind", "told"), [("peagle", "P-EAGLE"), ("dflash", "DFlash"), ("eagle", "EAGLE-1"), ("x", "another")]
)
def test_other_kinds_of_speculators_are_refused_by_name(write, kind, told):
    drafter = own_tables()
    path = write(drafter, settings=speculators_settings(drafter, speculators_model_type=kind))
    refused(f"speculators_model_type '{kind}'.*{told}", read, path)


def test_what_is_no_eagle3_drafter_is_refused_by_name(write, tmp_path):
    """vllm#24967, DeepSpec#44."""
    drafter = own_tables(fc_norm=False)
    narrow = {f"layers.0.self_attn.{n}_proj.weight": torch.randn(r, 32) for n, r in (("q", 32), ("k", 16), ("v", 16))}
    maps, hidden = ("norm.weight",), ("layers.0.hidden_norm.weight",)
    eagle1 = {**narrow, "fc.weight": torch.randn(32, 64), "fc.bias": torch.randn(32)}
    refused("EAGLE-1 .*not EAGLE-3", read, write(drafter, tensors=eagle1, without=maps + hidden))
    whole = write(drafter, tensors=narrow, without=("fc.weight", *hidden), architectures=["LlamaForCausalLM"])
    refused("a whole language model of 1 layers, a target and not a drafter", read, whole)
    deep = {f"layers.{i}.mlp.up_proj.weight": torch.ones(2, 2) for i in range(6)}
    refused("a whole language model of 6 layers", read, write(drafter, tensors=deep, without=("fc.weight", *hidden)))
    refused("P-EAGLE", read, write(drafter, tensors={"mask_hidden": torch.zeros(1, 96)}))
    refused("Medusa", read, write(drafter, medusa_num_heads=3))
    refused("DFlash", read, write(drafter, architectures=["DFlashDraftModel"]))
    refused("MLP speculator", read, write(drafter, architectures=["MLPSpeculatorPreTrainedModel"]))
    refused("parallel_draft_step=4 is not supported", read, write(drafter, **nested([1, 3, 5], parallel_draft_step=4)))


# ---- which states


@pytest.mark.parametrize(
    ("settings", "states", "source", "told"),
    [
        (nested([1, 3, 4]), (2, 4, 5), "assumed", "output-of-layer .*default states of a target with 8"),
        (nested([2, 4, 5]), (2, 4, 5), "assumed", "boundaries .*default states of a target with 8"),
        (nested([0, 2, 4]), (1, 3, 5), "assumed", "output-of-layer .*in eagle_config"),
        (nested([4, 6, 8]), (4, 6, 8), "assumed", "id 8 = N can be no output"),
        (nested([5, 0, 2]), (1, 3, 6), "assumed", "sorted"),
        ({IDS: [2, 4, 6]}, (2, 4, 6), "assumed", "boundaries .*top level"),
        ({IDS: [1, 4, 6]}, (2, 5, 7), "assumed", "output-of-layer .*start at 1"),
        ({IDS: [0, 4, 8], "architectures": ["Eagle3LlamaForCausalLM"]}, (0, 4, 8), "read", "vLLM"),
        ({IDS: [2, 4, 7], **nested([1, 3, 6])}, (2, 4, 7), "read", "the same states"),
        ({"model_type": "kimi_k2", **nested([2, 4, 6])}, (2, 4, 6), "assumed", "the first is not 1: SGLang's rule"),
        ({"model_type": "kimi_k2", **nested([1, 3, 5])}, (2, 4, 6), "assumed", "the first is 1: SGLang's rule"),
        ({"_torchspec_version": "1", **nested([1, 3, 5])}, (2, 4, 6), "read", "TorchSpec counts so"),
        (
            {"_torchspec_version": "1", "model_type": "kimi_k2", IDS: [1, 4, 6], **nested([1, 4, 6])},
            (1, 4, 6),
            "read",
            "boundaries .*the same list at the top level and in eagle_config",
        ),
        ({IDS: [1, 3, 6], **nested([1, 3, 6])}, (1, 3, 6), "assumed", "boundaries .*the same list at the top level"),
        (
            {"_torchspec_version": "1", "model_type": "deepseek_v3", **nested([2, 4, 6])},
            (3, 5, 7),
            "read",
            "TorchSpec counts so",
        ),
        (
            {"model_type": "kimi_k2", **nested([2, 4, 6], next_layer_regular=True)},
            (2, 4, 6),
            "assumed",
            r"first is not 1.*NVIDIA ModelOpt itself counts outputs of layers.*states \[3, 5, 7\]",
        ),
        (
            {"model_type": "deepseek_v3", **nested([2, 4, 6])},
            (3, 5, 7),
            "assumed",
            r"in eagle_config.*DeepSeek or Kimi model, SGLang takes them as boundaries.*states \[2, 4, 6\]",
        ),
        (
            {"architectures": ["Eagle3LlamaForCausalLM"], **nested([0, 3, 6])},
            (0, 3, 6),
            "assumed",
            r"boundaries \(in eagle_config alone, of a file with one of vLLM's architectures",
        ),
        (nested([2, 4, 5], next_layer_regular=True), (3, 5, 6), "read", "ModelOpt counts so"),
        (nested(None), (2, 4, 5), "assumed", "no layer ids"),
        ({}, (2, 4, 5), "assumed", "no layer ids"),
    ],
)
def test_layer_ids_are_counted_as_the_project_counts_and_shown(write, settings, states, source, told):
    """sglang#25454, sglang#32334, vllm#43671."""
    path = write(own_tables(), **settings)
    reading = read(path)
    found = row(reading, "aux_layers")
    assert (found.value, found.source) == (states, source)
    assert torch.tensor(reading.config_for().aux_layers).tolist() == list(states)
    import re

    assert re.search(told, found.why), found.why
    assert f"states {list(states)}" in found.why
    assert any(f"states {list(states)}" in note for note in reading.build().notes)
    assert read(path, aux_layers=(0, 1, 2)).config_for().aux_layers == (0, 1, 2)
    assert row(read(path, aux_layers=(0, 1, 2)), "aux_layers").source == "given"


def test_two_countings_of_the_same_states_name_the_same_states(write):
    """sglang#25454: output-of [1, 2, 3] and before [2, 3, 4] in a target of 6 layers."""
    first = read(write(own_tables(), **nested([1, 2, 3])), 6, layer_ids="output")
    second = read(write(own_tables(), **nested([2, 3, 4])), 6, layer_ids="boundary")
    assert first.config_for().aux_layers == second.config_for().aux_layers == (2, 3, 4)
    assert row(first, "aux_layers").source == "given"


def test_speculators_ids_are_boundaries_whatever_they_look_like(write):
    drafter = own_tables()
    path = write(drafter, settings=speculators_settings(drafter, **{IDS: [1, 3, 4]}, fc_norm=True))
    assert read(path).config_for().aux_layers == (1, 3, 4)


def test_impossible_layer_ids_are_refused(write):
    drafter = own_tables()
    refused("state 10, but the target has 8 layers", read(write(drafter, **nested([0, 2, 9]))).config_for)
    refused(
        rf"{IDS} is \[2, 4, 7\], and \[1, 2, 3\] in eagle_config",
        read,
        write(drafter, **{IDS: [2, 4, 7]}, **nested([1, 2, 3])),
    )
    refused("not distinct", read, write(drafter, **nested([1, 1, 3])))
    refused("negative", read, write(drafter, **nested([1, 2, -1])))
    refused("layer_ids='sideways'", read, write(drafter, **nested([1, 2, 3])), layer_ids="sideways")
    refused("aux_layers .* names 2 states, but fc.weight takes 3", read, write(drafter), aux_layers=(1, 2))


@pytest.mark.parametrize(("layers", "states"), [(7, (2, 3, 4)), (8, (2, 4, 5)), (32, (2, 16, 29)), (61, (2, 30, 58))])
def test_without_ids_the_states_follow_from_the_target_s_depth(write, layers, states):
    path = write(own_tables())
    assert read(path, layers).config_for().aux_layers == states
    assert read(path, None).config_for(spec_of(num_layers=layers)).aux_layers == states


@pytest.mark.parametrize("layers", range(1, 7))
def test_a_shallow_target_has_no_default_states(write, layers):
    """Automodel#2224."""
    refused(f"{layers} layers has no default ones.*pass aux_layers=", read(write(own_tables()), layers).config_for)


def test_without_ids_and_without_a_target_the_states_stay_open(write):
    reading = read(write(own_tables()), None)
    assert row(reading, "aux_layers").value is None
    assert "not known yet" in reading.words()
    refused("pass aux_layers=, or the target", reading.config_for)
    five = own_tables(aux_layers=(0, 1, 2, 3, 4))
    refused("which 5 target states it reads: pass aux_layers=", read(write(five)).config_for)


def spec_of(**changes):
    from driftlab.recorded import TargetSpec

    values = {
        "name": "t",
        "label": "T",
        "fingerprint": "f",
        "num_layers": LAYERS,
        "hidden_size": 32,
        "intermediate_size": 48,
    }
    values |= {
        "vocab_size": 61,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
    }
    values |= {"rope_theta": 10000.0, "rope_type": "default", "max_positions": 64, "eos_ids": (1,)}
    return SimpleNamespace(spec=TargetSpec(**{**values, **changes}), head=target_of().head)


# ---- switches


def test_specforge_s_norm_output_has_two_meanings(write):
    """SpecForge#879: before it the flag said whether the head reads the normed state; feedback was always before the norm."""
    drafter = own_tables(fc_norm=False, norm_output=True)
    expected = {  # norm_output in the file, when -> head reads the normed state, feedback is the normed state
        (True, "before-879"): (True, False),
        (True, "after-879"): (True, True),
        (True, None): (True, True),
        (False, "before-879"): (False, False),
        (False, "after-879"): (True, False),
        (False, None): (True, False),
        (..., "before-879"): (True, False),
        (..., None): (True, False),
    }
    for (said, when), (head, feed) in expected.items():
        path = write(drafter, prefix="midlayer.", norm_output=said, **nested([1, 3, 5]))
        reading = read(path, specforge=when)
        again = reading.build()
        _, state = first_state(again)
        resid = state.feedback if not feed else None
        y = drafter.norm(resid) if resid is not None else state.feedback
        reads = y if head else resid
        torch.testing.assert_close(again.logits(state.normed), reads @ drafter.lm_head.weight.T)
        assert feed == again.config.norm_output
        ambiguous = when is None and said is not ...
        assert ("before-879" in " ".join(again.notes)) == ambiguous
        assert row(reading, "norm_output").source == (
            "given" if when == "before-879" else "assumed" if when is None else "read"
        )
    refused("specforge='2026'", read, path, specforge="2026")


def test_post_norm_feedback_has_a_second_name(write):
    drafter = own_tables()
    reading = read(write(drafter, fc_norm=True, **nested([1, 3, 5], return_hidden_post_norm=True)))
    assert reading.config_for().norm_output
    wrong = write(drafter, norm_output=False, **nested([1, 3, 5], return_hidden_post_norm=True))
    refused("norm_output is False, and eagle_config.return_hidden_post_norm is True", read, wrong)


@pytest.mark.parametrize("said", [True, False, None])
@pytest.mark.parametrize("speculators", [True, False])
@torch.no_grad()
def test_the_residual_starts_at_the_raw_or_the_normed_hidden(write, said, speculators):
    """speculators#142: absent means on in vLLM's reading of speculators files, off in plain ones."""
    drafter = own_tables(fc_norm=False, norm_output=False)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        drafter.get_submodule(f"layers.0.{name}").weight.zero_()
    extra = {} if said is None else {"norm_before_residual": said}
    settings = speculators_settings(drafter, **extra) if speculators else settings_of(drafter, **extra)
    reading = read(write(drafter, settings=settings))
    on = said if said is not None else speculators
    fused, state = first_state(reading.build())
    torch.testing.assert_close(state.feedback, drafter.layers[0].hidden_norm(fused) if on else fused)
    found = row(reading, "norm_before_residual")
    assert (found.value, found.source) == (on, "read" if said is not None else "assumed")
    told = [note for note in reading.notes if "norm_before_residual" in note]
    assert len(told) == ((speculators and said is None) or (not speculators and said is True))
    assert all(("SGLang and all others ignore it" in note) == (not speculators) for note in told)


@torch.no_grad()
def test_both_norms_before_fc_the_concat_s_first(write):
    """Scales 1, 10, 100: the concat's norm keeps their ratios, then each state gets its own."""
    drafter = own_tables(fc_norm=True, norm_before_fc=True)
    reading = read(write(drafter, fc_norm=True, norm_before_fc=True))
    batch = random_batch((9,), (5,), width=32, scales=(1.0, 10.0, 100.0))
    again = reading.build()

    def rms(x):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    x = rms(batch.aux.flatten(2)) * drafter.input_norm.weight
    chunks = [rms(c) * n.weight for c, n in zip(x.chunk(3, -1), drafter.fc_norm, strict=True)]
    torch.testing.assert_close(again.fuse(batch.aux), torch.cat(chunks, -1) @ drafter.fc.weight.T, rtol=1e-4, atol=1e-4)
    assert again.config.norm_before_fc
    silent = read(write(drafter))
    assert [row(silent, name).source for name in ("fc_norm", "norm_before_fc")] == ["tensors", "tensors"]
    assert sum("tensors win" in note for note in silent.notes) == 2


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"fc_norm": True}, r"fc_norm is true, but the file has no fc_norm\.0\.weight, fc_norm\.1\.weight"),
        ({"use_aux_norm": True}, "use_aux_norm is true, but the file has no fc_norm"),
        ({"norm_before_fc": True}, "norm_before_fc is true, but the file has no input_norm"),
        ({"bias": True}, r"bias is true, but the file has no fc\.bias"),
        ({"attention_bias": True}, r"attention_bias is true, but the file has no q_proj\.bias"),
        ({"mlp_bias": True}, "mlp_bias is true, but the file has no mlp biases"),
        ({"architectures": ["Eagle3Qwen3ForCausalLM"]}, "no q_norm and k_norm"),
        ({"kv_lora_rank": 12, "fc_norm": "yes"}, "fc_norm is 'yes', not true or false"),
    ],
)
def test_a_flag_without_its_tensors_is_refused(write, settings, told):
    """vllm#38111, speculators#337."""
    refused(told, read, write(own_tables(fc_norm=False), **settings))


def test_a_flag_that_a_project_carries_without_using_it_is_said(write):
    drafter = own_tables(fc_norm=False, norm_output=False)
    specforge = read(write(drafter, prefix="midlayer.", attention_bias=True, **nested([1, 3, 5])))
    assert not specforge.config_for().attention_bias
    assert "SpecForge carries the setting" in row(specforge, "attention_bias").why
    safeailab = read(write(drafter, prefix="midlayer.", bias=True, architectures=["LlamaForCausalLM"]))
    assert not safeailab.config_for().fc_bias


def test_biases_and_norms_of_the_attention_come_from_the_tensors(write):
    switches = ("fc_bias", "attention_bias", "output_bias", "mlp_bias", "qk_norm", "attention_gate")
    drafter = own_tables(**dict.fromkeys(switches, True))
    again = read(write(drafter)).build()
    assert all(getattr(again.config, name) for name in switches)
    assert all(torch.equal(t, again.state_dict()[name]) for name, t in drafter.state_dict().items())
    assert any("gated" in note for note in again.notes)
    half = write(drafter, without=["layers.0.self_attn.k_proj.bias"])
    refused(r"missing tensors \['layers\.0\.self_attn\.k_proj\.bias'\]", read(half).build)
    for other in ("gate_proj", "g_proj"):
        gate = {f"layers.0.self_attn.{other}.weight": drafter.layers[0].self_attn.gate.weight}
        folder = write(drafter, tensors=gate, without=["layers.0.self_attn.gate.weight"])
        assert torch.equal(
            read(folder).build().layers[0].self_attn.gate.weight, drafter.layers[0].self_attn.gate.weight
        )


def test_windows_come_from_layer_types(write):
    drafter, sliding = own_tables(num_hidden_layers=2), ["sliding_attention", "full_attention"]
    path = write(drafter, layer_types=sliding, sliding_window=4)
    assert read(path).config_for().windows == (4, 0)
    assert read(write(drafter, sliding_window=4)).config_for().windows == ()
    assert "does nothing in vLLM" in " ".join(read(write(drafter, sliding_window=4)).notes)
    refused("layer_types has sliding_attention, but sliding_window is None", read, write(drafter, layer_types=sliding))
    off = {"layer_types": sliding, "sliding_window": 4, "use_sliding_window": False}
    refused("use_sliding_window False", read, write(drafter, **off))
    assert read(write(drafter, **off), windows=(4, 0)).config_for().windows == (4, 0)
    refused("the drafter has 2 layers", read, write(drafter, layer_types=sliding[:1], sliding_window=4))
    refused(r"\['chunked_attention'\]", read, write(drafter, layer_types=["chunked_attention"] * 2, sliding_window=4))
    forge = write(own_tables(), prefix="midlayer.", layer_types=sliding[:1], sliding_window=4, **nested([1, 3, 5]))
    assert read(forge).config_for().windows == ()
    assert "SpecForge trains and SGLang serves without windows" in " ".join(read(forge).notes)


def test_a_window_of_speculators_is_counted_in_two_ways(write):
    drafter = own_tables()
    layer = {"layer_types": ["sliding_attention"], "sliding_window": 4}
    settings = speculators_settings(drafter, layer=layer, fc_norm=True)
    reading = read(write(drafter, settings=settings))
    assert reading.config_for().windows == (4,)
    assert sum("speculators' training counts it from the row" in note for note in reading.notes) == 1
    plain = read(write(drafter, **layer))
    assert not any("speculators" in note for note in plain.notes if note.startswith("windows"))


def test_tensorrt_s_norms_before_fc(write):
    """It applies fc_norm alone where both are set, and norm_before_fc only where eagle_config has it."""
    both, one = own_tables(fc_norm=True, norm_before_fc=True), own_tables(fc_norm=False, norm_before_fc=True)
    trt = {"architectures": ["EAGLE3LlamaForCausalLM"]}
    path = write(both, fc_norm=True, **trt, **nested([1, 3, 5], norm_before_fc=True))
    reading = read(path)
    again = reading.build()
    assert (again.config.fc_norm, again.config.norm_before_fc) == (True, False)
    assert any("fc_norm alone" in note and "input_norm.weight is not used" in note for note in again.notes)
    kept = read(path, norm_before_fc=True).build()
    assert torch.equal(kept.input_norm.weight, both.input_norm.weight)
    inside = read(write(one, **trt, **nested([1, 3, 5], norm_before_fc=True)))
    outside = read(write(one, norm_before_fc=True, **trt, **nested([1, 3, 5])))
    silent = read(write(one, **trt, **nested([1, 3, 5])))
    for found, told in ((inside, False), (outside, True), (silent, True)):
        assert found.build().config.norm_before_fc
        assert any("would not apply it: tensors win" in note for note in found.notes) == told
    other = read(write(one, norm_before_fc=True, **nested([1, 3, 5])))
    assert not any("norm_before_fc" in note for note in other.notes)


def test_what_sglang_would_pass_over_is_said(write):
    biased = own_tables(attention_bias=True)
    assert any("SGLang skips them in silence" in note for note in read(write(biased, attention_bias=True)).notes)
    vllm = {"architectures": ["Eagle3LlamaForCausalLM"], "attention_bias": True, "norm_before_residual": True}
    assert not any("SGLang" in note for note in read(write(biased, **vllm)).notes)
    head = "SGLang and tokenspeed take the target's head"
    for size, told in ((None, True), (..., True), (61, False)):
        assert any(head in note for note in read(write(own_tables(), draft_vocab_size=size)).notes) == told
    lent = write(own_tables(), draft_vocab_size=None, without=["lm_head.weight"], tie_word_embeddings=False)
    assert not any(head in note for note in read(lent).notes)


def test_states_together_as_wide_as_the_drafter_are_said(write):
    """SGLang, SafeAILab and tokenspeed tell target states by their width: then they leave out fc."""
    one = read(write(own_tables(aux_layers=(4,)), **nested([3])))
    assert sum("tell the two by their width and leave out fc" in note for note in one.notes) == 1
    assert not any(
        "by their width" in note for note in read(write(own_tables(aux_layers=(2, 4)), **nested([1, 3]))).notes
    )


def test_an_embedding_that_engines_replace_is_said(write):
    drafter, target = own_tables(), target_of()
    told = "SGLang, TensorRT-LLM and tokenspeed (equal widths)"
    path = write(drafter, **nested([1, 3, 5]))

    def notes(path, *args):
        return [note for note in read(path).build(*args).notes if note.startswith("own_embed")]

    (alone,) = notes(path)
    assert told in alone
    assert "if it differs from the target's" in alone
    assert "SafeAILab" not in alone  # it takes the file's own beside target_hidden_size
    assert "SafeAILab's code" in notes(write(drafter, target_hidden_size=..., **nested([1, 3, 5])))[0]
    (differs,) = notes(path, target)
    assert "it differs from this target's" in differs
    assert told in " ".join(read(path).words().split())
    copied = write(drafter, tensors={"embed_tokens.weight": target.head.embed.clone()}, **nested([1, 3, 5]))
    assert notes(copied, target) == []
    wide = write(own_tables(hidden_size=48, target_hidden_size=64), **nested([1, 3, 5]))
    assert notes(wide) == []
    given = read(path, own_embed=False).build(target)
    assert torch.equal(given.embed_tokens.weight, target.head.embed)
    assert not any(told in note for note in given.notes)


def test_logit_scale(write):
    drafter = own_tables()
    again = read(write(drafter, logit_scale=0.5, norm_output=True)).build()
    _, state = first_state(again)
    torch.testing.assert_close(again.logits(state.normed), 0.5 * state.normed @ drafter.lm_head.weight.T)
    refused("logit_scale is 'x'", read, write(drafter, logit_scale="x"))


def test_without_aux_states_the_final_state_is_read_without_fc(write):
    drafter = own_tables(aux_layers=(), fc_norm=False, norm_output=False)
    off = nested(None, use_aux_hidden_state=False)
    reading = read(write(drafter, **off), None)
    again = reading.build()
    assert again.config.aux_layers == ()
    assert "final state after its norm" in row(reading, "aux_layers").why
    torch.testing.assert_close(first_state(again)[1].normed, first_state(drafter)[1].normed)
    refused(r"no fc\.weight", read, write(drafter))
    refused("fc_norm is true, but the file has no fc", read, write(drafter, fc_norm=True, **off))
    with_fc = write(own_tables(fc_norm=False), **off)
    refused("use_aux_hidden_state is false, but there is an fc.weight", read, with_fc)
    left = read(with_fc, aux_layers=()).build()
    assert any("fc.weight of the file is not used" in note for note in left.notes)


def test_modelopt_s_second_norm_is_a_switch_to_try(write):
    drafter = own_tables(fc_norm=False, norm_output=False)
    path = write(drafter, **nested([1, 3, 5], next_layer_regular=True))
    reading = read(path)
    assert any("twice_normed=True" in note for note in reading.notes)
    fused, state = first_state(reading.build())
    _, twice = first_state(read(path, twice_normed=True).build())
    assert (state.normed - twice.normed).abs().max() > 0.01


# ---- widths


def test_the_target_s_width_and_the_states_agree_with_fc(write):
    wide = own_tables(hidden_size=48, target_hidden_size=64)
    assert read(write(wide)).config_for().target_hidden_size == 64
    told = read(write(wide, target_hidden_size=...))
    assert row(told, "target_hidden_size").source == "tensors"
    refused(r"target_hidden_size is 32, but fc_norm\.0\.weight is \[64\]", read, write(wide, target_hidden_size=32))
    bare = own_tables(hidden_size=48, target_hidden_size=64, fc_norm=False)
    refused(r"fc\.weight is \[48, 192\], not a whole|takes 4", read, write(bare, target_hidden_size=40))
    assert read(write(bare, target_hidden_size=...), target_hidden_size=64).config_for().aux_layers == (2, 4, 5)
    refused("num_aux_hidden_states=4, but fc.weight takes 3", read, write(wide, num_aux_hidden_states=4))
    refused("missing tensors .*fc_norm.1.weight", read, write(wide, without=["fc_norm.1.weight"]))


def test_head_width_and_eps_may_be_left_out(write):
    reading = read(write(own_tables(), head_dim=..., num_key_value_heads=2, rms_norm_eps=...))
    assert (row(reading, "head_dim").value, row(reading, "head_dim").source) == (8, "assumed")
    assert (row(reading, "rms_norm_eps").value, row(reading, "rms_norm_eps").source) == (1e-6, "assumed")
    normed = own_tables(head_dim=16, qk_norm=True)
    assert row(read(write(normed, head_dim=...)), "head_dim").value == 16
    refused("no multiple of 5 heads", read, write(own_tables(), head_dim=..., num_attention_heads=5))


def test_several_layers_later_ones_under_either_name(write):
    drafter = own_tables(num_hidden_layers=2)
    gain = drafter.layers[1].input_layernorm.weight.detach()
    both = write(drafter, tensors={"layers.1.hidden_norm.weight": gain.clone()})
    assert torch.equal(read(both).build().layers[1].input_layernorm.weight, gain)
    refused(
        "both layers.1.input_layernorm.weight",
        read(write(drafter, tensors={"layers.1.hidden_norm.weight": gain * 2})).build,
    )


def test_latent_attention(write):
    from driftlab.drafter.config import LatentConfig

    drafter = own_tables(latent=LatentConfig(**MLA), num_key_value_heads=4, head_dim=10, rope_interleaved=True)
    changes = {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2", "head_dim": ..., **MLA}
    changes |= {"n_routed_experts": 8, "norm_output": True, "fc_norm": True, **nested([1, 3, 5])}
    reading = read(write(drafter, **changes))
    assert dataclasses.replace(reading.config_for(), rope_scaling=None) == dataclasses.replace(
        drafter.config, aux_layers=(2, 4, 6)
    )
    torch.testing.assert_close(first_state(reading.build())[1].normed, first_state(drafter)[1].normed)
    refused("q_lora_rank is None, but the file has layers", read, write(drafter, **{**changes, "q_lora_rank": None}))
    direct = own_tables(latent=LatentConfig(**{**MLA, "q_lora_rank": 0}), num_key_value_heads=4, head_dim=10)
    assert read(write(direct, **{**changes, "q_lora_rank": None})).config_for().latent.q_lora_rank == 0
    refused("rope_interleave is true, but only latent", read, write(own_tables(), rope_interleave=True))
    refused(
        "kv_lora_rank, but layer 0 has no",
        read,
        write(direct, without=[n for n in direct.state_dict() if "kv_" in n], **changes),
    )


# ---- rope


def inv_freq(settings, width=8):
    """As transformers computes it: frequencies, and the factor of cos and sin."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_theta": 50000.0, **settings}
    config = LlamaConfig(
        hidden_size=32, num_attention_heads=4, head_dim=width, max_position_embeddings=64, rope_parameters=parameters
    )
    return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu")


@pytest.mark.parametrize(
    "scaling",
    [
        LLAMA3,
        YARN,
        {**YARN, "beta_fast": 4.0, "beta_slow": 2.0, "truncate": False},
        {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0},
        {**YARN, "attention_factor": 1.3},
        {"rope_type": "linear", "factor": 2.0},
    ],
)
@pytest.mark.parametrize("spelling", ["rope_scaling", "type", "rope_parameters"])
def test_scaled_rope_is_transformers(write, scaling, spelling):
    """speculators#574, Model-Optimizer#1238: dropped scaling is wrong in long contexts and nothing fails."""
    from driftlab.drafter.rotary import frequencies

    block = dict(scaling)
    if spelling == "type":
        block["type"] = block.pop("rope_type")
    changes = {"rope_theta": 50000.0, "rope_scaling": block, "max_position_embeddings": 64}
    if spelling == "rope_parameters":
        changes = {
            "rope_theta": ...,
            "rope_parameters": {**block, "rope_theta": 50000.0},
            "max_position_embeddings": 64,
        }
    config = read(write(own_tables(), **changes)).config_for()
    wanted, factor = inv_freq(scaling)
    ours = frequencies(8, config.rope_theta, config.rope_scaling)
    torch.testing.assert_close(ours.float(), wanted, rtol=1e-5, atol=0)
    assert config.rope_scaling.rotation_factor == pytest.approx(factor)
    assert (ours - frequencies(8, config.rope_theta)).abs().max() > 1e-6


def test_the_two_spellings_must_agree(write):
    same = {"rope_scaling": LLAMA3, "rope_parameters": {**LLAMA3, "rope_theta": 10000.0}}
    assert read(write(own_tables(), **same)).config_for().rope_scaling.kind == "llama3"
    other = {**LLAMA3, "factor": 4.0}
    refused(
        "rope_parameters and rope_scaling contradict",
        read,
        write(own_tables(), rope_scaling=LLAMA3, rope_parameters=other),
    )
    refused("contradicting rotary bases", read, write(own_tables(), rope_parameters={"rope_theta": 5e5}))


@pytest.mark.parametrize(
    ("scaling", "told"),
    [
        (
            {"rope_type": "longrope", "factor": 2.0},
            "rope type 'longrope' is not supported, only default, linear, dynamic",
        ),
        ({"rope_type": None, "factor": 2.0}, r"sets \['factor'\] but no rope_type"),
        ({"rope_type": "default", "factor": 2.0}, r"\['factor'\], which plain rotary embedding"),
        ({"rope_type": "llama3", "factor": 8.0}, r"'llama3' without \['low_freq_factor'"),
        ({"rope_type": "linear"}, r"'linear' without \['factor'\]"),
        ({"rope_type": "linear", "factor": "2"}, "factor is '2'"),
        (
            {"rope_type": "linear", "factor": 2.0, "beta_fast": 1.0},
            r"linear does not have the settings \['beta_fast'\]",
        ),
        ({"rope_type": "linear", "type": "yarn", "factor": 2.0}, "two rope types"),
        ({"rope_type": "dynamic", "factor": 2.0}, "add max_position_embeddings"),
        ({"full_attention": {"rope_type": "default"}}, "settings of its own for"),
        ({**YARN, "mrope_section": [1, 1, 2]}, "SGLang drops the scaling"),
    ],
)
def test_rope_settings_that_cannot_be_followed_are_named(write, scaling, told):
    """executorch#20149."""
    refused(told, read, write(own_tables(), rope_scaling=scaling))


def test_plain_rope_in_many_words(write):
    """TorchSpec#103: a null rope_type; Qwen-VL's three axes are one in text."""
    for scaling in ({"rope_type": None}, {"type": "default"}, {"rope_type": None, "type": None}):
        assert read(write(own_tables(), rope_scaling=scaling)).config_for().rope_scaling is None
    for scaling in (
        {"type": "mrope", "mrope_section": [1, 1, 2]},
        {"rope_type": "default", "mrope_section": [1, 1, 2]},
    ):
        reading = read(write(own_tables(), rope_scaling=scaling))
        assert reading.config_for().rope_scaling is None
        assert any("Images and video are not supported" in note for note in reading.notes)


@pytest.mark.parametrize(("mscale", "all_dim"), [(1.0, 1.0), (0.7, 1.0), (0.7, None), (None, None), (None, 0.5)])
def test_yarn_of_latent_attention_is_deepseek_s(mscale, all_dim):
    """cos and sin: m(mscale) / m(mscale_all_dim) with defaults 1 and 0; the scores: m(mscale_all_dim) squared."""
    from driftlab.drafter.formats.rope import read_rope

    block = {**YARN, "mscale": mscale, "mscale_all_dim": all_dim}
    scaling = read_rope({"rope_theta": 1e4, "rope_scaling": block}, latent=True).scaling

    def m(x):
        return 1 + 0.1 * x * math.log(4.0)

    assert scaling.rotation_factor == pytest.approx(m(1.0 if mscale is None else mscale) / m(all_dim or 0.0))
    assert scaling.score_factor == pytest.approx(m(all_dim or 0.0) ** 2)


def test_part_of_a_head_is_turned(write):
    reading = read(write(own_tables(), partial_rotary_factor=0.5))
    assert reading.config_for().rotary_dim == 4


def test_file_and_target_that_turn_differently_are_warned_of(write):
    """speculators#574: target scaled and drafter not; a base that the file does not say."""
    drafter, target = own_tables(), spec_of(rope_theta=5e5, rope_type="llama3")
    silent = read(write(drafter, rope_theta=...))
    assert (row(silent, "rope_theta").value, row(silent, "rope_theta").source) == (10000.0, "assumed")
    with pytest.warns(UserWarning, match="rope") as caught:
        loaded = silent.build(target)
    assert [str(w.message)[:5] for w in caught] == ["rope_", "rope:"]
    assert any("T has 500000" in note for note in loaded.notes)
    assert read(write(drafter, rope_theta=...)).build(spec_of()).config.rope_theta == 10000.0
    assert read(write(drafter, rope_scaling=LLAMA3)).about(target) == []


# ---- vocabulary and tables


def test_ids_in_the_place_of_offsets_are_converted_where_t2d_proves_it(write):
    """verl-SpeCo#67, EAGLE#222."""
    from driftlab import Drafter

    ids = [0, 1, 2, 3, 4, 12, *range(20, 34)]
    drafter = Drafter(own_tables(draft_vocab_size=20).config, draft_vocab=ids)
    path = write(drafter, tensors={"d2t": torch.tensor(ids)})
    again = read(path).build()
    assert again.draft_vocab.tolist() == ids
    assert int(again.d2t[5]) == 7
    assert any("target ids, not offsets" in note for note in again.notes)
    refused(
        "d2t ascends strictly|no valid offsets",
        read,
        write(drafter, tensors={"d2t": torch.tensor(ids)}, without=["t2d"]),
    )
    small = read(write(drafter, tensors={"d2t": drafter.d2t.int()}, without=["t2d"])).build()
    assert small.draft_vocab.tolist() == ids
    assert not any("d2t" in note for note in small.notes)
    refused("d2t is stored as bfloat16", read, write(drafter, tensors={"d2t": drafter.d2t.bfloat16()}))
    refused(
        r"t2d is \[60\], the configuration makes it \[61\]",
        read,
        write(drafter, tensors={"t2d": drafter.t2d[:60].clone()}),
    )
    refused("t2d leaves tokens out", read, write(own_tables(), tensors={"t2d": drafter.t2d}))


def test_the_draft_vocabulary_s_size_may_be_left_to_the_tensors(write):
    reading = read(write(own_tables(draft_vocab_size=20), draft_vocab_size=...))
    assert (row(reading, "draft_vocab_size").value, row(reading, "draft_vocab_size").source) == (20, "tensors")
    assert reading.build().reduced


def test_whose_head(write):
    drafter, target = own_tables(), target_of()
    none = write(drafter, without=["lm_head.weight"])
    refused("whether the head is tied is not said", read, none)
    tied = read(write(drafter, without=["lm_head.weight"], tie_word_embeddings=True)).build()
    assert torch.equal(tied.lm_head.weight, drafter.embed_tokens.weight)
    lent = read(write(drafter, without=["lm_head.weight"], tie_word_embeddings=False)).build(target)
    assert torch.equal(lent.lm_head.weight, target.head.lm_head)
    both = read(write(drafter, tie_word_embeddings=True))
    assert torch.equal(both.build().lm_head.weight, drafter.lm_head.weight)
    assert any("tie_word_embeddings is true, but the file has" in note for note in both.notes)
    small = own_tables(draft_vocab_size=20)
    settings = speculators_settings(small, fc_norm=True)
    rows = read(write(small, settings=settings, without=["lm_head.weight"])).build(target)
    assert torch.equal(rows.lm_head.weight, target.head.lm_head[small.draft_vocab])


# ---- settings


def test_unknown_settings_are_listed_and_bookkeeping_is_not(write):
    path = write(own_tables(), mystery=1, another=[2], use_cache=True, transformers_version="5", nothing=None)
    refused(r"does not know: \['another', 'mystery'\]", read, path)
    refused(r"\['eagle_config\.odd'\]", read, write(own_tables(), **nested([1, 3, 5], odd=1)))
    refused("eh_proj_bias=True is not supported", read, write(own_tables(), **nested([1, 3, 5], eh_proj_bias=True)))
    refused("hidden_act='gelu' is not supported", read, write(own_tables(), hidden_act="gelu"))
    refused("eagle_config is 3, not a table", read, write(own_tables(), eagle_config=3))


# ---- readings as objects


def test_what_is_given_comes_first_and_says_so(write):
    drafter = own_tables()
    reading = read(write(drafter, norm_output=True, fc_norm=True))
    flipped = reading.with_given(norm_output=False)
    assert (row(flipped, "norm_output").value, row(flipped, "norm_output").source) == (False, "given")
    assert (reading.config_for().norm_output, flipped.build().config.norm_output) == (True, False)
    assert flipped.with_given(rope_theta=5).config_for() == dataclasses.replace(flipped.config_for(), rope_theta=5.0)
    without = reading.with_given(fc_norm=False).build()
    assert any(note.startswith("fc_norm: as given, so fc_norm.0.weight") for note in without.notes)
    refused(r"given \['fc_norms'\]: no such convention", reading.with_given, fc_norms=True)
    # a switch that this format never has
    assert read(reading.path, twice_normed=True).config_for().twice_normed
    scaled = reading.with_given(rope_scaling={"kind": "linear", "factor": 2.0})
    assert scaled.config_for().rope_scaling.factor == 2.0
    assert row(reading.with_given(rope_scaling=None), "rope_scaling").source == "given"


def test_a_loaded_drafter_keeps_its_reading_and_can_be_copied(write):
    from driftlab import Drafter

    drafter = Drafter.load(write(own_tables(), **nested([1, 3, 5])), norm_output=False)
    assert row(drafter.reading, "norm_output").source == "given"
    assert "tensors" not in vars(drafter.reading)
    twin = copy.deepcopy(drafter)
    assert torch.equal(twin.fc.weight, drafter.fc.weight)
    again = pickle.loads(pickle.dumps(drafter.reading))
    assert again.config_for() == drafter.config


def test_our_own_files_are_read_as_they_say(tmp_path):
    drafter = own_tables(norm_before_residual=True, windows=(4,), aux_layers=(0, 7))
    drafter.save(tmp_path / "d")
    reading = read(tmp_path / "d", None)
    assert (reading.format, reading.config_for(), reading.notes) == ("driftlab", drafter.config, ())
    assert {r.source for r in reading.conventions} == {"read"}
    # an engine that looks at the top level only would pass over the residual and the window
    assert json.loads((tmp_path / "d" / "config.json").read_text())["architectures"] == ["DriftlabEagle3"]
    assert read(tmp_path / "d", aux_layers=(1, 2)).build().config.aux_layers == (1, 2)


def test_a_drafter_of_the_hub_is_called_by_its_commit(write, monkeypatch):
    from driftlab.drafter.formats import files

    path, label = write(own_tables(), **nested([1, 3, 5])), f"lab/drafter@{'a' * 40}"
    raw = dataclasses.replace(files.open_checkpoint(path), label=label)
    monkeypatch.setattr(files, "open_checkpoint", lambda name, revision=None: raw)
    assert read("lab/drafter").name == read("lab/drafter").build().reading.name == label
    assert read("lab/drafter").words().startswith(f"{label}: ")
    assert read(path).name == str(path)


def test_notes_of_opening_our_own_files_are_kept(tmp_path):
    own_tables().save(tmp_path / "d")
    torch.save({}, tmp_path / "d" / "pytorch_model.bin")
    (note,) = read(tmp_path / "d", None).notes
    assert "pytorch_model.bin in the same folder is not" in note
    assert note in read(tmp_path / "d", None).build().notes


def test_the_table_of_conventions_holds_sizes_that_were_assumed(write):
    words = read(write(own_tables(), head_dim=..., draft_vocab_size=..., num_attention_heads=4)).words()
    rows = words.split("conventions\n")[1].split("\n\n")[0].splitlines()
    table = {line.split()[0]: line.split()[1] for line in rows if line[2] != " "}
    assert (table["head_dim"], table["draft_vocab_size"]) == ("assumed", "assumed")
    assert "hidden_size" not in table


def test_the_words_hold_shapes_and_the_count_of_parameters(write):
    """EAGLE#256."""
    drafter = own_tables(draft_vocab_size=20)
    reading = read(write(drafter, **nested([0, 2, 4])))
    count = 61 * 32 + 32 * 96 + 3 * 32  # embedding, fc, its norms
    count += 3 * 32 + 32 * 64 + 2 * 16 * 64 + 32 * 32 + 3 * 32 * 48  # layer: norms, q, k and v, o, MLP
    count += 32 + 20 * 32  # norm, head
    words = reading.words()
    assert f"{count:,} parameters" in words
    assert sum(p.numel() for p in drafter.parameters()) == count
    for told in ("[32, 96]", "20 of 61 tokens", "layers.0.self_attn.q_proj.weight", "[32, 64]", "model.safetensors"):
        assert told in words
    assert "ids [0, 2, 4] counted as output-of-layer" in words
    assert max(map(len, words.splitlines()[1:])) <= 120


def run(monkeypatch, *arguments):
    from driftlab import cli

    monkeypatch.setattr(sys, "argv", ["driftlab", "inspect", *map(str, arguments)])
    cli.main()


def test_inspect_on_the_command_line(write, monkeypatch, capsys):
    path = write(own_tables(), **nested([0, 2, 4]))
    run(monkeypatch, path, "--num-layers", 8, "--given", "norm_output=true", "layer_ids=boundary")
    told = capsys.readouterr().out
    assert "states [0, 2, 4]" in told
    assert "The tensors are those that these conventions want." in told
    run(monkeypatch, path, "--json", "--given", "aux_layers=[1,2,3]")
    values = json.loads(capsys.readouterr().out)
    assert values["fault"] is None
    assert {"name": "aux_layers", "value": [1, 2, 3], "source": "given", "why": "given by the user"} in values[
        "conventions"
    ]
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, write(own_tables(), tensors={"extra.weight": torch.ones(2)}))
    assert stopped.value.code == 1
    assert "It cannot be loaded so" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run(monkeypatch, path, "--given", "nonsense")
    assert "wants name=value" in capsys.readouterr().err


def test_inspect_beside_a_recording(write, monkeypatch, capsys, tiny_trajectory):
    spec = tiny_trajectory.spec
    path = write(own_tables(), rope_theta=...)
    run(monkeypatch, path, "--target", tiny_trajectory.path)
    told = capsys.readouterr().out
    assert f"N = {spec.num_layers}" in told or "no default ones" in told or f"with {spec.num_layers}" in told


# ---- what must not be lost in silence


def test_what_is_given_of_the_rotary_embedding_leaves_the_rest_of_it(write):
    """Giving base and scaling must not turn whole heads where the file turns half of each."""
    block = {"rope_type": "mrope", "mrope_section": [1, 1, 2]}
    folder = write(own_tables(), partial_rotary_factor=0.5, rope_scaling=block, **nested([1, 3, 5]))
    reading = read(folder, rope_theta=5.0, rope_scaling={"kind": "linear", "factor": 2.0})
    assert (reading.config_for().rotary_dim, reading.config_for().rope_theta) == (4, 5.0)
    assert any("several position axes" in note for note in reading.notes)
    # a scaling that is not known may be given, alone or with the base
    strange = write(own_tables(), partial_rotary_factor=0.5, rope_scaling={"rope_type": "su"}, **nested([1, 3, 5]))
    refused("rope type 'su'", read, strange)
    assert read(strange, rope_scaling=None).config_for().rotary_dim == 4
    layers = {"full": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}
    per_layer = write(own_tables(), rope_parameters=layers, rope_theta=..., **nested([1, 3, 5]))
    refused("give rotary_dim=", read, per_layer, rope_theta=1e4, rope_scaling=None)
    assert read(per_layer, rope_theta=1e4, rope_scaling=None, rotary_dim=4).config_for().rotary_dim == 4


@pytest.mark.parametrize("factor", [0.1, 1.5])
def test_a_share_of_a_head_that_is_none_or_more_than_all_is_refused(write, factor):
    folder = write(own_tables(), partial_rotary_factor=factor, **nested([1, 3, 5]))
    refused(f"partial_rotary_factor {factor} turns .* of the 8", read, folder)
    assert read(folder, rotary_dim=2).config_for().rotary_dim == 2


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
        ({"rope_scaling": {**YARN, "attention_factor": float("nan")}}, "attention_factor is nan"),
        ({"rope_scaling": {**YARN, "attention_factor": 0}}, "attention_factor is 0.0"),
        ({"rope_scaling": {"type": "linear", "factor": float("inf")}}, "factor is inf"),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 64.5}}, "is 64.5, not a whole number"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "low_freq_factor 4 is not below"),
        ({"rope_scaling": {**YARN, "beta_fast": 0}}, "beta_fast is 0.0"),
        ({"logit_scale": float("inf")}, "logit_scale is inf"),
    ],
)
def test_numbers_that_are_none_are_refused(write, changes, told):
    refused(told, read, write(own_tables(), **changes, **nested([1, 3, 5])))


def test_a_null_residual_of_speculators_is_off(write):
    """vLLM takes only an absent one as on."""
    drafter = own_tables()
    for changes, value in (({}, True), ({"norm_before_residual": None}, False)):
        settings = speculators_settings(drafter, **changes, **{IDS: [2, 4, 6]})
        found = row(read(write(drafter, settings=settings)), "norm_before_residual")
        assert found.value is value
    assert "null: off in vLLM" in found.why


@pytest.mark.parametrize("kind", ["linear", "dynamic"])
def test_safeailabs_scaled_rotary_embedding_has_the_base_10000(write, kind):
    changes = {"architectures": ["LlamaForCausalLM"], "rope_theta": 5e5, "max_position_embeddings": 64}
    plain = {"fc_norm": False, "norm_output": False}
    scaled = {"rope_scaling": {"type": kind, "factor": 2.0}}
    folder = write(own_tables(**plain), prefix="midlayer.", **changes, **scaled)
    reading = read(folder)
    assert (reading.format, reading.config_for().rope_theta) == ("SafeAILab", 10000.0)
    assert any(note.startswith("rope_theta: 10000 ") and "(500000 here)" in note for note in reading.notes)
    assert read(folder, rope_theta=5e5).config_for().rope_theta == 5e5
    assert read(write(own_tables(**plain), prefix="midlayer.", **changes)).config_for().rope_theta == 5e5
    other = write(own_tables(), **{**changes, "architectures": ["LlamaForCausalLMEagle3"]}, **scaled)
    assert read(other).config_for().rope_theta == 5e5


def test_a_width_of_heads_that_safeailabs_first_code_does_not_read_is_noted(write):
    wide = own_tables(head_dim=16, fc_norm=False, norm_output=False)
    settings = {"prefix": "midlayer.", "architectures": ["LlamaForCausalLM"]}
    assert any(n.startswith("head_dim: 16, though") for n in read(write(wide, **settings)).notes)
    usual = own_tables(fc_norm=False, norm_output=False)
    assert not any(n.startswith("head_dim") for n in read(write(usual, **settings)).notes)


def test_an_unknown_architecture_is_noted(write):
    drafter = read(write(own_tables(), architectures=["EagleQwen2ForCausalLM"], **nested([1, 3, 5]))).build()
    assert any("architecture EagleQwen2ForCausalLM is not known" in note for note in drafter.notes)
    assert not any("not known" in n for n in read(write(own_tables(), **nested([1, 3, 5]))).notes)
    notes = read(write(own_tables(), architectures=5, **nested([1, 3, 5]))).build().notes
    assert any("architecture 5 is not known" in note for note in notes)


def test_a_module_is_no_option_of_an_eagle3_file(write):
    refused("an EAGLE-3 file, to which module does not apply", read, write(own_tables(), **nested([1, 3, 5])), module=1)


def mark(folder, **values):
    """Write what an export says of itself; the hash is that of the weights unless it is given."""
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    values = {"format": "vllm", "states": [1, 3, 5], "layer_ids": [1, 3, 5], "weights": digest, **values}
    (folder / "driftlab_export.json").write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))


def test_a_marker_of_other_weights_is_not_read(write):
    """By the marker ids are boundaries; without it eagle_config's are outputs of layers, one more."""
    folder = write(own_tables(), **nested([1, 3, 5]))
    for values, states in (({}, (1, 3, 5)), ({"weights": ...}, (1, 3, 5)), ({"weights": "0" * 64}, (2, 4, 6))):
        mark(folder, **values)
        reading = read(folder)
        assert reading.config_for().aux_layers == states
        assert any("other weights than are read here" in n for n in reading.notes) == (states == (2, 4, 6))


@pytest.mark.parametrize("states", [[1.0, 3.0, 5.0], ["a", 1, 2], [True, 3, 5], [5, 3, 1], [-1, 3, 5]])
def test_states_of_a_marker_are_ascending_whole_numbers(write, states):
    folder = write(own_tables(), **nested([1, 3, 5]))
    mark(folder, states=states)
    refused("driftlab_export.json: states is .* not ascending whole numbers", read, folder)


# ---- pickles


def test_a_pickled_drafter_needs_no_folder(write, tmp_path):
    from driftlab import Drafter

    folder = write(own_tables(), **nested([1, 3, 5]))
    drafter = Drafter.load(folder, num_layers=LAYERS, norm_output=False)
    torch.save(drafter, tmp_path / "whole.pt")
    data, embedding = pickle.dumps(drafter), drafter.reading.embedding_notes()
    shutil.rmtree(folder)
    for again in (pickle.loads(data), torch.load(tmp_path / "whole.pt", weights_only=False)):
        assert torch.equal(again.fc.weight, drafter.fc.weight)
        assert (again.config, again.notes, again.reading.name) == (drafter.config, drafter.notes, drafter.reading.name)
        assert (again.reading.conventions, again.reading.format) == (
            drafter.reading.conventions,
            drafter.reading.format,
        )
        assert again.reading.words() == drafter.reading.words()
        assert again.reading.embedding_notes(target_of()) == embedding
        for call in (again.reading.build, lambda r=again.reading: r.with_given(norm_output=True)):
            refused("this reading was pickled", call)
        assert pickle.loads(pickle.dumps(again)).reading.words() == drafter.reading.words()


def test_giving_a_number_of_layers_excuses_deeper_layers_only(write):
    from driftlab import DriftlabError

    path = write(own_tables(), tensors={"layers.0.self_attn.sinks": torch.ones(4)})
    with pytest.raises(DriftlabError, match="unused tensors.*layers.0.self_attn.sinks"):
        read(path, num_hidden_layers=1).check()
    two = write(own_tables(num_hidden_layers=2), num_hidden_layers=2)
    assert any("layers.1." in words for words in read(two, num_hidden_layers=1).check())


def test_a_switch_given_on_excuses_nothing(write):
    from driftlab import DriftlabError

    path = write(own_tables(), tensors={"layers.0.self_attn.gate_proj.bias": torch.ones(32)})
    with pytest.raises(DriftlabError, match="unused tensors.*gate_proj.bias"):
        read(path, fc_norm=True, attention_bias=False).check()


def test_a_depth_that_is_not_the_targets_is_refused(write):
    from driftlab import DriftlabError

    target = SimpleNamespace(spec=SimpleNamespace(num_layers=LAYERS, label="tiny"))
    with pytest.raises(DriftlabError, match=f"num_layers={LAYERS + 1}, but tiny has {LAYERS}"):
        read(write(own_tables()), num_layers=LAYERS + 1).config_for(target)


def test_specforge_ids_that_are_boundary_defaults_are_doubtful(write):
    """Its own files for Kimi targets hold [2, 30, 58] of 61 layers, which SGLang takes as boundaries there."""
    settings = settings_of(own_tables(), eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4, 5]})
    settings["architectures"] = ["LlamaForCausalLMEagle3"]
    reading = read(write(own_tables(), prefix="midlayer.", settings=settings), num_layers=8)
    assert reading.format == "SpecForge"
    found = row(SimpleNamespace(conventions=reading.conventions_for(None)), "aux_layers")
    assert (found.value, found.source) == ((3, 5, 6), "assumed")
    assert "give layer_ids='boundary' for states [2, 4, 5]" in found.why


@pytest.mark.parametrize(
    "harmless",
    [
        {"target_model_type": "gemma3"},
        {"num_local_experts": 32, "experts_per_token": 4},
        {"truncated_vocab_size": 61},
        {"rope_scaling": {"rope_type": "default", "factor": 1.0}},
    ],
)
def test_settings_of_published_files_that_change_nothing_are_taken(write, harmless):
    plain, more = (read(write(own_tables(), **changes)).build() for changes in ({}, harmless))
    assert plain.config == more.config


def test_a_saved_drafter_does_not_lose_most_of_a_matrix(tmp_path):
    from driftlab import DriftlabError

    drafter = own_tables()
    with torch.no_grad():
        drafter.fc.weight.mul_(1e-12)
        drafter.fc.weight[0, 0] = 1.0
    with pytest.raises(DriftlabError, match="fc.weight would lose 3071 of 3072 values"):
        drafter.save(tmp_path / "q", dtype=torch.float16)
