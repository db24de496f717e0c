"""Checkpoint folders: a round trip loses no bit, and nothing in a file is guessed, skipped or made up in silence."""

import json
import re
import shutil

import pytest
import torch
from builders import config_of, own_tables, random_batch, target_of
from safetensors.torch import load_file, save_file

VARIANTS = ("eagle3", "fc_norm", "norm_output", "eagle31")
IDS = {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}


def load(path, target=None):
    from driftlab import Drafter

    return Drafter.load(path, target)


def refused(path, told, target=None):
    from driftlab import DriftlabError

    with pytest.raises(DriftlabError, match=told) as caught:
        load(path, target)
    assert str(path) in str(caught.value)


def edit(folder, settings=(), tensors=(), without=()):
    """Change the settings and tensors of a folder; ``without`` removes either."""
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    config |= dict(settings)
    weights |= dict(tensors)
    for name in without:
        config.pop(name, None)
        weights.pop(name, None)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture
def plain(tmp_path):
    """Return a function that writes a drafter as other projects do: plain settings, no block of ours."""

    def write(drafter=None, name="plain", **settings):
        folder = tmp_path / name
        (drafter or own_tables(draft_vocab_size=20)).save(folder)
        plainly = {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": IDS}
        return edit(folder, {**plainly, **settings}, without=["driftlab"])

    return write


def logits(drafter):
    batch = random_batch((9,), (5,), width=drafter.config.target_hidden_size, aux=len(drafter.config.aux_layers))
    with torch.no_grad():
        return drafter(batch.tokens, batch.aux)


# ---- our own files


@pytest.mark.parametrize("fc_norm", [False, True])
@pytest.mark.parametrize("norm_output", [False, True])
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"draft_vocab_size": 20, "num_hidden_layers": 2, "ttt": 5, "trained_length": 99},
        {"hidden_size": 48, "target_hidden_size": 64, "aux_layers": (0, 7)},
    ],
)
def test_save_load_save_changes_no_byte(tmp_path, fc_norm, norm_output, overrides):
    """Save and load: the same bits."""
    first = own_tables(fc_norm=fc_norm, norm_output=norm_output, **overrides)
    first.save(tmp_path / "a")
    second = load(tmp_path / "a")
    second.save(tmp_path / "b")
    assert second.config == first.config
    assert second.notes == []
    assert (tmp_path / "a" / "config.json").read_bytes() == (tmp_path / "b" / "config.json").read_bytes()
    files = [tmp_path / name / "model.safetensors" for name in "ab"]
    assert files[0].read_bytes() == files[1].read_bytes()
    tensors, again = (load_file(file) for file in files)
    assert list(tensors) == list(again)
    assert all(torch.equal(tensors[name], again[name]) and tensors[name].dtype == again[name].dtype for name in tensors)
    assert torch.equal(logits(first), logits(second))
    written = json.loads((tmp_path / "a" / "config.json").read_text())
    assert (written["fc_norm"], written["norm_output"]) == (fc_norm, norm_output)
    assert written["architectures"] == ["DriftlabEagle3"]  # by that name no engine takes its default states for these


def test_only_a_drafter_of_the_default_states_has_an_engines_architecture(tmp_path):
    """There are no layer ids in our files, so that an engine would capture 2, N // 2, N - 3."""
    for states, name in (
        *(((2, 15, 27), "LlamaForCausalLMEagle3"), ((2, 16, 29), "LlamaForCausalLMEagle3")),
        *(((2, 14, 27), "DriftlabEagle3"), ((1, 15, 27), "DriftlabEagle3"), ((2, 5), "DriftlabEagle3")),
    ):
        own_tables(aux_layers=states).save(tmp_path / "d")
        assert json.loads((tmp_path / "d" / "config.json").read_text())["architectures"] == [name]


def test_an_interrupted_save_leaves_no_old_settings_beside_new_weights(tmp_path, monkeypatch):
    """Same shapes, another switch: the two halves would load together."""
    from driftlab import DriftlabError
    from driftlab.drafter import checkpoint

    own_tables(norm_output=False).save(tmp_path / "d")
    old = (tmp_path / "d" / "model.safetensors").read_bytes()

    changed = own_tables(norm_output=True)
    torch.nn.init.ones_(changed.fc.weight)

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "write_json", killed)
    with pytest.raises(KeyboardInterrupt):
        changed.save(tmp_path / "d")
    assert (tmp_path / "d" / "model.safetensors").read_bytes() != old
    with pytest.raises(DriftlabError, match=r"no config\.json"):
        load(tmp_path / "d")


@pytest.mark.parametrize(
    ("value", "dtype", "told"),
    [
        *((float("nan"), None, "not finite in float32"), (7e4, torch.float16, "not finite in float16")),
        (1e-9, torch.float16, "become zero in float16"),
    ],
)
def test_what_could_not_be_loaded_again_is_not_saved(tmp_path, value, dtype, told):
    from driftlab import DriftlabError

    own_tables().save(tmp_path / "d")
    before = {path.name: path.read_bytes() for path in (tmp_path / "d").iterdir()}
    drafter = own_tables()
    torch.nn.init.constant_(drafter.fc.weight, value)
    with pytest.raises(DriftlabError, match=rf"fc\.weight .*{told}"):
        drafter.save(tmp_path / "d", dtype=dtype)
    assert {path.name: path.read_bytes() for path in (tmp_path / "d").iterdir()} == before


@pytest.mark.parametrize("source", ["target", "target_with_norm"])
def test_lent_tables_are_not_written_and_bound_again(tmp_path, source):
    from driftlab import Drafter

    target, ids = target_of(), [2, 3, 10, 60]
    drafter = Drafter(config_of(lm_head=source, draft_vocab_size=4), target, draft_vocab=ids)
    drafter.save(tmp_path / "d")
    assert not {"embed_tokens.weight", "lm_head.weight"} & set(load_file(tmp_path / "d" / "model.safetensors"))
    # no engine may lend it a head of its own: it would leave out the norm's gain
    assert json.loads((tmp_path / "d" / "config.json").read_text())["architectures"] == ["DriftlabEagle3"]
    again = load(tmp_path / "d", target)
    assert again.draft_vocab.tolist() == ids
    assert torch.equal(logits(drafter), logits(again))
    from driftlab import DriftlabError

    with pytest.raises(DriftlabError, match="pass target="):
        load(tmp_path / "d")


def test_a_dtype_casts_the_weights_alone(tmp_path):
    drafter = own_tables(draft_vocab_size=20)
    drafter.save(tmp_path / "half", dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "half" / "model.safetensors")
    assert {name: t.dtype for name, t in tensors.items() if t.dtype != torch.bfloat16} == {
        **{"d2t": torch.int64, "t2d": torch.bool}
    }
    again = load(tmp_path / "half")
    assert again.fc.weight.dtype == torch.float32
    assert torch.equal(again.fc.weight, drafter.fc.weight.bfloat16().float())


def test_the_training_marks_survive(tmp_path):
    import dataclasses

    drafter = own_tables()
    drafter.config = dataclasses.replace(drafter.config, ttt=7, trained_length=512)
    drafter.save(tmp_path / "d")
    assert (load(tmp_path / "d").config.ttt, load(tmp_path / "d").config.trained_length) == (7, 512)


def test_an_unknown_format_version_says_so(tmp_path):
    own_tables().save(tmp_path / "d")
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    block = config["driftlab"]
    edit(tmp_path / "d", {"driftlab": {**block, "format_version": 99}})
    refused(tmp_path / "d", "format version 99; this driftlab reads 1")
    edit(tmp_path / "d", {"driftlab": {**block, "config": {**block["config"], "gated": True}}})
    from driftlab import DriftlabError

    with pytest.raises(DriftlabError, match=r"unknown keys \['gated'\]"):
        load(tmp_path / "d")


@pytest.mark.parametrize("key", ["norm_output", "fc_norm", "rope_theta"])
def test_a_setting_edited_outside_our_block_is_not_ignored(tmp_path, key):
    own_tables(norm_output=False, fc_norm=False).save(tmp_path / "d")
    edit(tmp_path / "d", {key: True if key != "rope_theta" else 5e5})
    refused(tmp_path / "d", f"{key} is .* in its driftlab block")


# ---- plain files


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_plain_file_of_each_variant(plain, variant):
    drafter = own_tables(fc_norm=variant in ("fc_norm", "eagle31"), norm_output=variant in ("norm_output", "eagle31"))
    again = load(plain(drafter))
    assert (again.config.fc_norm, again.config.norm_output) == (drafter.config.fc_norm, drafter.config.norm_output)
    assert again.config.aux_layers == (1, 3, 5)
    note, embedding = again.notes
    assert embedding.startswith("own_embed: ")
    assert "[0, 2, 4]" in note
    assert "[1, 3, 5]" in note
    assert torch.equal(logits(drafter), logits(again))


def test_four_spellings_of_the_layer_s_prefix(plain):
    """sglang#24663."""
    drafter = own_tables(draft_vocab_size=20)
    folder = plain(drafter)
    tensors = load_file(folder / "model.safetensors")
    for prefix in ("midlayer.", "layers.0.", "model.midlayer.", "model.layers.0."):
        renamed = {name.replace("layers.0.", prefix): tensor for name, tensor in tensors.items()}
        assert sum(name.startswith(prefix) for name in renamed) == 10
        save_file(renamed, folder / "model.safetensors")
        assert torch.equal(logits(drafter), logits(load(folder)))


def test_one_tensor_under_two_names_is_refused(plain):
    folder = plain()
    tensors = load_file(folder / "model.safetensors")
    twin = {"midlayer.hidden_norm.weight": tensors["layers.0.hidden_norm.weight"] * 2}
    refused(
        edit(folder, tensors=twin), r"layers\.0\.hidden_norm\.weight and midlayer\.hidden_norm\.weight are two names"
    )


def test_a_renamed_tensor_is_missing_under_one_name_and_unused_under_the_other(plain):
    """speculators#1114. Loading twice under different seeds gives no model twice."""
    folder = plain()
    q = load_file(folder / "model.safetensors")["layers.0.self_attn.q_proj.weight"]
    edit(folder, tensors={"midlayer.self_attn.query.weight": q}, without=["layers.0.self_attn.q_proj.weight"])
    for seed in (1, 2):
        torch.manual_seed(seed)
        refused(folder, r"missing .*layers\.0\.self_attn\.q_proj\.weight.*unused .*layers\.0\.self_attn\.query\.weight")


def test_loading_does_not_depend_on_the_global_seed(plain):
    folder, states = plain(), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        states.append(load(folder).state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("said", [{"fc_norm": False}, {}])
def test_fc_norm_weights_win_over_a_silent_config(plain, said):
    """vllm#38111: present weights are never skipped; the note says what was done."""
    drafter = own_tables(fc_norm=True)
    folder = edit(plain(drafter), said, without=() if said else ["fc_norm"])
    again = load(folder)
    assert again.config.fc_norm
    assert any("fc_norm" in note and "on" in note for note in again.notes)
    assert torch.equal(logits(drafter), logits(again))


def test_a_missing_norm_is_named_and_not_made_of_ones(plain):
    """speculators#337."""
    folder = plain(own_tables(fc_norm=True))
    refused(edit(folder, without=["fc_norm.1.weight"]), r"missing tensors \['fc_norm\.1\.weight'\]")
    shutil.rmtree(folder)
    folder = plain(own_tables(fc_norm=False), fc_norm=True)
    refused(folder, r"fc_norm\.0\.weight.*fc_norm\.1\.weight.*fc_norm\.2\.weight")
    shutil.rmtree(folder)
    folder = plain(own_tables(norm_output=True))
    refused(edit(folder, without=["norm.weight"]), r"missing tensors \['norm\.weight'\]")


def test_a_norm_over_the_concatenation_is_no_fc_norm(plain):
    """speculators#610: two things are called EAGLE 3.1; the tensor says which."""
    folder = plain(own_tables(fc_norm=False))
    before = load(edit(folder, tensors={"input_norm.weight": torch.ones(96)}))
    assert (before.config.norm_before_fc, before.config.fc_norm) == (True, False)
    assert any("norm_before_fc" in note and "tensors win" in note for note in before.notes)
    # states of rms 1, 10, 100: one norm over all three keeps their ratios
    unit = torch.ones(1, 1, 3, 32) * torch.tensor([1.0, 10.0, 100.0])[:, None]
    with torch.no_grad():
        normed = before.input_norm(unit.flatten(2)).view(3, 32)
    torch.testing.assert_close(normed[:, 0], torch.tensor([0.0172, 0.1723, 1.7234]), rtol=1e-3, atol=1e-4)
    edit(folder, without=["input_norm.weight"])
    refused(edit(folder, {"norm_before_fc": True}), r"norm_before_fc is true, but the file has no input_norm\.weight")
    nested = {"norm_before_fc": False, "eagle_config": {**IDS, "norm_before_fc": True}}
    refused(edit(folder, nested), r"eagle_config\.norm_before_fc is True, and norm_before_fc is False")


@pytest.mark.parametrize("count", [1, 3, 5])
def test_the_number_of_states_comes_from_the_weights(plain, count):
    """sglang#24663, executorch#20149."""
    drafter = own_tables(aux_layers=tuple(range(count)))
    ids = {"eagle_aux_hidden_state_layer_ids": list(range(count))}
    folder = plain(drafter, eagle_config=ids, num_aux_hidden_states=count)
    assert load(folder).config.aux_layers == tuple(range(1, count + 1))
    refused(edit(folder, {"num_aux_hidden_states": count + 1}), f"num_aux_hidden_states={count + 1}.*takes {count}")
    edit(folder, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": None}}, without=["num_aux_hidden_states"])
    refused(folder, f"which {count} target states it reads: pass aux_layers=")
    from driftlab.drafter import checkpoint

    told = checkpoint.load(folder, aux_layers=tuple(range(count)))
    assert told.config.aux_layers == tuple(range(count))
    assert not any("aux_layers" in note for note in told.notes)
    edit(folder, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}})
    refused(folder, rf"2 layer ids \[0, 1\], but fc.weight takes {count} states")


def test_two_layers_load_as_two_or_are_refused_by_name(plain):
    drafter = own_tables(num_hidden_layers=2)
    folder = plain(drafter)
    assert torch.equal(logits(drafter), logits(load(folder)))
    refused(edit(folder, {"num_hidden_layers": 1}), r"unused tensors \['layers\.1\.")
    refused(edit(folder, {"num_hidden_layers": 3}), r"missing tensors \['layers\.2\.")


# ---- whose tables


def test_embedding_and_head_of_the_file_or_of_the_target(plain):
    """vllm#18906, vllm#6830."""
    target, drafter = target_of(), own_tables()
    folder = plain(drafter)
    assert torch.equal(load(folder, target).embed_tokens.weight, drafter.embed_tokens.weight)
    assert torch.equal(load(folder, target).lm_head.weight, drafter.lm_head.weight)
    edit(folder, without=["embed_tokens.weight", "lm_head.weight"])
    lent = load(folder, target)
    assert torch.equal(lent.embed_tokens.weight, target.head.embed)
    assert torch.equal(lent.lm_head.weight, target.head.lm_head)
    from driftlab import DriftlabError

    with pytest.raises(DriftlabError, match="pass target="):
        load(folder)


def test_a_head_for_part_of_the_vocabulary_cannot_be_lent(plain):
    folder = plain(own_tables(draft_vocab_size=20))
    refused(edit(folder, without=["lm_head.weight"]), r"no lm_head\.weight.*20 of 61", target_of())


def test_a_narrow_drafter_without_its_embedding_says_how_wide_the_target_s_is(plain):
    drafter = own_tables(hidden_size=48, target_hidden_size=64)
    folder = plain(drafter)
    assert torch.equal(load(folder, target_of(width=64)).embed_tokens.weight, drafter.embed_tokens.weight)
    from driftlab import DriftlabError

    with pytest.raises(DriftlabError, match="64 wide; hidden_size is 48"):
        load(edit(folder, without=["embed_tokens.weight"]), target_of(width=64))


def test_a_drafter_of_another_target_is_named_by_tensor_and_shape(plain):
    from driftlab import DriftlabError

    folder = plain(own_tables())
    with pytest.raises(DriftlabError, match=r"fc\.weight \[32, 96\].*target's are 48"):
        load(folder, target_of(width=48))
    with pytest.raises(DriftlabError, match=r"61 tokens.*embed_tokens\.weight is \[64, 32\]"):
        load(folder, target_of(vocab=64))


# ---- d2t


def test_offsets(plain):
    from driftlab import Drafter

    ids = [0, 1, 2, 3, 4, 12, *range(20, 34)]
    config = config_of(own_embed=True, draft_vocab_size=20)
    again = load(plain(Drafter(config, draft_vocab=ids)))
    assert int(again.d2t[5]) == 7
    assert again.draft_vocab.tolist() == ids


def test_t2d_follows_from_d2t(plain):
    drafter = own_tables(draft_vocab_size=20)
    again = load(edit(plain(drafter), without=["t2d"]))
    assert torch.equal(again.t2d, drafter.t2d)
    uint8 = {"t2d": drafter.t2d.to(torch.uint8)}
    assert torch.equal(load(edit(plain(drafter), tensors=uint8)).t2d, drafter.t2d)


def test_ids_in_the_place_of_offsets_are_rejected(plain):
    """EAGLE#222, verl-SpeCo#67: with 0, 1, 2, ... draft id i would become 2i."""
    refused(edit(plain(own_tables()), tensors={"d2t": torch.arange(61)}), "d2t is not zero although")
    for size, told in ((20, "name different draft vocabularies"), (40, "no valid offsets.* 0 to 78")):
        folder = plain(own_tables(draft_vocab_size=size), name=str(size))
        refused(edit(folder, tensors={"d2t": torch.arange(size)}), told)
    folder = plain(own_tables(draft_vocab_size=20))
    refused(
        edit(folder, tensors={"d2t": torch.arange(20)}, without=["t2d"]), "d2t ascends strictly.*Offsets are wanted"
    )


@pytest.mark.parametrize(
    ("d2t", "told"),
    [
        ([0, 0, 0, -1], "no valid offsets"),
        ([-1, 0, 0, 0], "no valid offsets"),
        ([0, 0, 0, 58], "no valid offsets"),
        ([0, 0, 0, 0, 0], r"d2t is \[5\], the configuration makes it \[4\]"),
        ([0, 1, 1, 1], "t2d and d2t name different"),
    ],
)
def test_impossible_maps_are_rejected(plain, d2t, told):
    folder = plain(own_tables(draft_vocab_size=4))
    refused(edit(folder, tensors={"d2t": torch.tensor(d2t)}), told)


def test_a_reduced_vocabulary_without_a_map_is_refused(plain):
    """Automodel#2447, verl-SpeCo#66."""
    folder = plain(own_tables(draft_vocab_size=20))
    refused(edit(folder, without=["d2t", "t2d"]), "d2t")
    shutil.rmtree(folder)
    refused(edit(plain(own_tables(draft_vocab_size=20)), without=["d2t"]), "d2t")


def test_a_map_of_zeros_is_noted(plain):
    from driftlab import Drafter

    config = config_of(own_embed=True, draft_vocab_size=20)
    first, other = Drafter(config, draft_vocab=range(20)), Drafter(config, draft_vocab=range(1, 21))
    assert any("target ids 0..19" in note for note in load(plain(first)).notes)
    assert not any("d2t" in note for note in load(plain(other)).notes)


def test_a_full_vocabulary_may_have_an_identity_map(plain):
    drafter = own_tables()
    identity = {"d2t": torch.zeros(61, dtype=torch.int64), "t2d": torch.ones(61, dtype=torch.bool)}
    again = load(edit(plain(drafter), tensors=identity))
    assert not again.reduced
    assert torch.equal(logits(drafter), logits(again))


# ---- rope


def test_a_missing_theta_is_10000_and_noted(plain):
    drafter = load(plain(own_tables(rope_theta=10000.0)))
    assert not any("rope" in note for note in drafter.notes)
    folder = plain(own_tables(rope_theta=5e5))
    assert load(folder).config.rope_theta == 5e5
    edit(folder, without=["rope_theta"])
    drafter = load(folder)
    assert drafter.config.rope_theta == 10000.0
    assert any("rope_theta" in note and "10000" in note for note in drafter.notes)


@pytest.mark.parametrize("outer", [{}, {"rope_theta": None}])
def test_theta_may_stand_in_rope_parameters(plain, outer):
    folder = plain(own_tables(), rope_parameters={"rope_type": "default", "rope_theta": 5e5}, **outer)
    edit(folder, without=() if outer else ["rope_theta"])
    assert load(folder).config.rope_theta == 5e5


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_an_unknown_rope_type_is_named(plain, key):
    refused(
        plain(rope_scaling={key: "longrope", "factor": 8.0}),
        "rope type 'longrope' is not supported, only default, linear",
    )


def test_a_default_rope_type_is_fine(plain):
    load(plain(rope_scaling={"rope_type": "default"}))
    load(plain(rope_scaling=None))


# ---- broken files


def test_an_unknown_setting_is_named(plain):
    refused(plain(gated_attention=True), r"does not know: \['gated_attention'\]")
    refused(plain(eagle_config={**IDS, "norm_output": True}), r"does not know: \['eagle_config\.norm_output'\]")
    refused(plain(attention_bias=True), r"attention_bias is true, but the file has no q_proj\.bias")
    refused(plain(hidden_act="gelu"), "hidden_act='gelu'")
    refused(
        plain(eagle_config={**IDS, "use_aux_hidden_state": False}), "use_aux_hidden_state is false, but there is an fc"
    )
    refused(edit(plain(), without=["intermediate_size"]), r"missing \['intermediate_size'\]")


def test_a_truncated_file_is_named(plain):
    folder = plain()
    whole = (folder / "model.safetensors").read_bytes()
    for size in (0, 5, len(whole) // 2, len(whole) - 1):
        (folder / "model.safetensors").write_bytes(whole[:size])
        refused(folder, "not a whole safetensors file")


def test_missing_and_broken_files_are_named(plain, tmp_path):
    refused(tmp_path / "nowhere", "does not exist")
    folder = plain()
    (folder / "config.json").write_text("{")
    refused(folder, "not valid JSON")
    folder = plain()
    (folder / "model.safetensors").unlink()
    refused(folder, "has no weights: none of model.safetensors")


def test_wrong_shapes_are_named(plain):
    for name, shape, made in (
        ("layers.0.self_attn.q_proj.weight", (32, 32), [32, 64]),
        ("norm.weight", (33,), [32]),
        ("lm_head.weight", (61, 32), [20, 32]),
    ):
        told = re.escape(f"{name} is {list(shape)}, the configuration makes it {made}")
        refused(edit(plain(), tensors={name: torch.zeros(shape)}), told)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_named(plain, value):
    folder = plain()
    weight = load_file(folder / "model.safetensors")["layers.0.mlp.up_proj.weight"]
    weight[3, 4] = value
    refused(edit(folder, tensors={"layers.0.mlp.up_proj.weight": weight}), r"up_proj\.weight holds values that are not")


def test_a_folder_that_is_no_drafter(plain):
    refused(edit(plain(), without=["fc.weight"]), r"no fc\.weight among .*not an EAGLE-3 drafter")


# ---- whose drafter it is


def test_a_drafter_says_so_when_the_target_is_not_the_one_it_was_trained_for(
    varied_trajectory, tiny_trajectory, tmp_path
):
    """Another model of the same shapes lends its head without complaint, and its tau looks like a result."""
    from driftlab import VARIANTS, Drafter

    Drafter(VARIANTS["eagle31"].for_target(varied_trajectory), varied_trajectory).save(tmp_path / "d")
    own = Drafter.load(tmp_path / "d", varied_trajectory)
    assert own.notes == []
    with pytest.warns(UserWarning, match="was trained for varied"):
        other = Drafter.load(tmp_path / "d", tiny_trajectory)
    assert "this target is tiny" in other.notes[0]
    other.save(tmp_path / "again")
    assert Drafter.load(tmp_path / "again", varied_trajectory).notes == []


@pytest.mark.parametrize("name", ["smollm2-eagle3", "smollm2-eagle31-ttt2"])
def test_a_folder_of_a_shipped_name_comes_first(tmp_path, monkeypatch, name):
    own_tables().save(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    assert load(name).config.vocab_size == 61


def test_nobody_invents_whose_drafter_a_file_of_another_project_is(plain, tiny_trajectory, tmp_path):
    """The target that it is loaded with need not be the one that it was trained for."""
    from driftlab import Drafter

    folder = plain(own_tables())
    foreign = Drafter.load(folder, tiny_trajectory)
    assert foreign.trained_for is None
    foreign.save(tmp_path / "again")
    assert Drafter.load(tmp_path / "again", tiny_trajectory).trained_for is None


# ---- types of tensors


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(("layers.0.self_attn.q_proj.weight", torch.int64), ("norm.weight", torch.int32), ("norm.weight", torch.bool)),
        ("fc.weight", torch.int16),
    ],
)
def test_a_weight_of_whole_numbers_is_refused(plain, name, dtype):
    folder = plain()
    tensor = load_file(folder / "model.safetensors")[name].to(dtype)
    kind = str(dtype).removeprefix("torch.")
    refused(edit(folder, tensors={name: tensor}), rf"{re.escape(name)} is stored as {kind}")


def test_a_value_beyond_float32_is_not_finite(plain):
    folder = plain()
    weight = load_file(folder / "model.safetensors")["fc.weight"].double()
    weight[0, 0] = 1e300
    refused(edit(folder, tensors={"fc.weight": weight}), r"fc\.weight holds values that are not finite in float32")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32])
def test_a_map_may_be_stored_in_small_numbers(plain, dtype):
    folder = plain()
    d2t = load_file(folder / "model.safetensors")["d2t"]
    assert torch.equal(load(edit(folder, tensors={"d2t": d2t.to(dtype)})).d2t, d2t)


def test_complex_tensors_are_called_so(plain):
    folder = plain()
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save({**tensors, "fc.weight": tensors["fc.weight"].to(torch.complex64)}, folder / "pytorch_model.bin")
    refused(folder, r"fc\.weight is complex")


def test_offsets_that_wrap_around_are_rejected(plain):
    folder = plain()
    d2t = load_file(folder / "model.safetensors")["d2t"]
    d2t[-1] = 2**63 - 1
    refused(edit(folder, tensors={"d2t": d2t}, without=["t2d"]), "d2t holds no valid offsets")


@pytest.mark.parametrize(
    ("name", "shape", "told"),
    [
        *(("fc.weight", (), "a single number"), ("fc_norm.1.weight", (), "a single number")),
        *(("fc.weight", (32, 0), "it holds nothing"), ("layers.weight", (3,), "unused tensors")),
        ("layers.foo.bar", (3,), "unused tensors"),
    ],
)
def test_tensors_of_no_shape_and_no_layer_are_named(plain, name, shape, told):
    refused(
        edit(plain(), tensors={name: torch.ones(shape)}), rf"(?s){re.escape(name)}.*{told}|{told}.*{re.escape(name)}"
    )
