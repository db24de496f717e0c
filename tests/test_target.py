"""The adapter to transformers: captured states, the head, attention mass, and what loading refuses."""

import json
import shutil

import pytest
import torch
from conftest import BOS, EOS, FAMILIES, VOCAB, TinyTokenizer, tiny_fast_tokenizer, tiny_llama, tiny_model
from safetensors.torch import load_file, save_file

from driftlab import VARIANTS, Drafter, DriftlabError, Target
from driftlab.target import default_aux_layers
from driftlab.target.watching import mass_attention

LAYERS = 7


@pytest.fixture(scope="module")
def family_target():
    """Return one random target per family, made once."""
    made = {}

    def get(family):
        if family not in made:
            made[family] = Target(tiny_model(family), TinyTokenizer(), name=family, aux_layers=(1, 3, 5))
        return made[family]

    return get


def random_tokens(*shape, seed=0):
    return torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def captured(target, tokens, layers=range(LAYERS + 1)):
    with torch.no_grad(), target.adapter.capturing(list(layers)) as states:
        last = target.adapter.hidden(tokens)
    return states, last


# ---- capture


@pytest.mark.parametrize("family", FAMILIES)
def test_state_k_is_the_stream_after_k_layers(family_target, family):
    """C1, C3: index 0 is the embedding, k < N equals HF's hidden_states[k], N is before the final norm."""
    target, tokens = family_target(family), random_tokens(2, 20)
    model = target.adapter.model
    states, last = captured(target, tokens)
    with torch.no_grad():
        own = model(tokens, output_hidden_states=True, use_cache=False)
    assert len(own.hidden_states) == LAYERS + 1
    for k in range(LAYERS):
        assert torch.equal(states[k], own.hidden_states[k]), k
    assert torch.equal(target.adapter.decoder.norm(states[LAYERS]), last)
    assert torch.equal(last, own.hidden_states[LAYERS])
    assert not torch.allclose(states[LAYERS], last, rtol=0.1, atol=0.1)  # the norm does something here
    assert torch.equal(target.adapter.logits(last), own.logits.float())
    target.adapter.check_head(tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tables_lent_to_a_drafter_give_the_targets_logits(family_target, family):
    """C4, and the gain of the norm where a family stores it minus one (Gemma)."""
    target, tokens = family_target(family), random_tokens(2, 12)
    head = target.head
    states, last = captured(target, tokens, [LAYERS])
    with torch.no_grad():
        logits = target.adapter.model(tokens, use_cache=False).logits
    torch.testing.assert_close(head.logits(last), logits, rtol=1e-5, atol=1e-4)
    plain = states[LAYERS] * (states[LAYERS].square().mean(-1, keepdim=True) + target.spec.rms_norm_eps).rsqrt()
    torch.testing.assert_close(head.norm_weight * plain, last, rtol=1e-4, atol=1e-4)
    assert head.embed.shape == head.lm_head.shape == (VOCAB, 32)


@pytest.mark.parametrize("family", ["Llama", "Mistral", "DeepseekV3"])
def test_capturing_twice_and_in_batches_gives_the_same_states(family_target, family):
    """C7 and INV7: A, B, A; and a right-padded batch against single runs."""
    target = family_target(family)
    a, b = random_tokens(1, 18, seed=1), random_tokens(1, 11, seed=2)
    first, _ = captured(target, a)
    other, _ = captured(target, b)
    again, _ = captured(target, a)
    batch = torch.cat([a, torch.nn.functional.pad(b, (0, 7))])
    both, _ = captured(target, batch)
    for k in range(LAYERS + 1):
        assert torch.equal(first[k], again[k])
        torch.testing.assert_close(both[k][:1], first[k], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(both[k][1:, :11], other[k], rtol=1e-4, atol=1e-4)


def test_the_hooks_go_with_the_block_also_after_an_error(tiny_target):
    layers = [*tiny_target.adapter.decoder.layers, tiny_target.adapter.decoder.norm]

    def fail():
        with tiny_target.adapter.capturing([0, 3, LAYERS]):
            assert sum(len(layer._forward_pre_hooks) for layer in layers) == 3
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        fail()
    assert not any(layer._forward_pre_hooks for layer in layers)


# ---- which layers


@pytest.mark.parametrize("layers", [*range(1, 9), 30])
def test_default_layers_are_distinct_ascending_and_in_range_or_refused(layers):
    """C5, C6: the embedding is never captured by default, and no layer twice."""
    try:
        chosen = default_aux_layers(layers)
    except DriftlabError as error:
        assert layers < 7
        assert "aux_layers=" in str(error)  # noqa: PT017
        return
    assert layers >= 7
    assert chosen == (2, layers // 2, layers - 3)
    assert 0 < chosen[0] < chosen[1] < chosen[2] < layers


def test_a_target_without_named_layers_takes_the_default():
    assert Target(tiny_llama(), TinyTokenizer()).aux_layers == (2, 3, 4)
    with pytest.raises(DriftlabError, match="4 layers has no default"):
        Target(tiny_llama(layers=4), TinyTokenizer())


@pytest.mark.parametrize("layers", [(), (1, 1), (3, 1), (-1, 2), (2, LAYERS + 1)])
def test_layers_that_cannot_be_captured_are_refused(layers):
    with pytest.raises(DriftlabError, match=rf"aux_layers .*0\.\.{LAYERS}"):
        Target(tiny_llama(), TinyTokenizer(), aux_layers=layers)


def test_the_embedding_and_the_last_state_may_be_asked_for():
    assert Target(tiny_llama(), TinyTokenizer(), aux_layers=(0, LAYERS)).aux_layers == (0, LAYERS)


# ---- the head


def capped(model):
    forward = model.forward

    def with_cap(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = 5 * torch.tanh(output.logits / 5)
        return output

    model.forward = with_cap
    return model


def scaled(model):
    forward = model.forward

    def with_scale(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits * 1.1
        return output

    model.forward = with_scale
    return model


def biased(model):
    model.lm_head.bias = torch.nn.Parameter(torch.linspace(-1, 1, VOCAB), requires_grad=False)
    return model


@pytest.mark.parametrize("change", [capped, scaled, biased])
def test_a_model_that_does_more_than_one_projection_is_refused(tmp_path, change):
    """Its distribution could not be rebuilt from what is recorded."""
    target = Target(change(tiny_llama()), TinyTokenizer(), aux_layers=(1, 3, 5))
    with pytest.raises(DriftlabError, match="cannot be a target yet"):
        target.record(["abc"], max_new_tokens=4, template=False, out=tmp_path / "recording")
    assert not list((tmp_path / "recording").glob("piece-*"))


def test_a_half_precision_head_passes_the_check():
    target = Target(tiny_llama(scale=2.0).bfloat16(), TinyTokenizer(), aux_layers=(1, 3, 5))
    target.adapter.check_head(random_tokens(1, 20))
    assert target.head.norm_weight.equal(target.adapter.decoder.norm.weight)


def test_a_decoder_that_cannot_be_captured_is_refused():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2)
    )
    with pytest.raises(DriftlabError, match=r"GPT2LMHeadModel: its decoder has no \.layers and \.norm"):
        Target(model, TinyTokenizer(), aux_layers=(1,))


# ---- identity


def test_the_spec_says_what_a_drafter_has_to_know():
    spec = Target(tiny_llama(rope_theta=77.0), TinyTokenizer(), name="n", label="l", aux_layers=(1,)).spec
    assert (spec.name, spec.label) == ("n", "l")
    assert (spec.num_layers, spec.hidden_size, spec.intermediate_size, spec.vocab_size) == (LAYERS, 32, 48, VOCAB)
    assert (spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim) == (4, 2, 8)
    assert (spec.rope_theta, spec.rope_type, spec.max_positions) == (77.0, "default", 256)
    assert spec.eos_ids == (EOS,)


def test_every_token_that_ends_a_text_is_an_eos():
    model, tokenizer = tiny_llama(), TinyTokenizer()
    model.generation_config.eos_token_id = [9, 4]
    assert Target(model, tokenizer, aux_layers=(1,)).spec.eos_ids == (EOS, 4, 9)
    model.generation_config.eos_token_id = None
    assert Target(model, tokenizer, aux_layers=(1,)).spec.eos_ids == (EOS,)


def test_the_fingerprint_follows_the_weights():
    def fingerprint(model):
        return Target(model, TinyTokenizer(), name=f"{id(model)}", aux_layers=(1,)).spec.fingerprint

    same, other, moved = tiny_llama(), tiny_llama(seed=1), tiny_llama()
    moved.model.layers[3].mlp.up_proj.weight[0, 0] += 1e-3
    assert fingerprint(tiny_llama()) == fingerprint(same)
    assert len({fingerprint(m) for m in (same, other, moved, tiny_llama().bfloat16())}) == 4


# ---- loading


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model and its tokenizer, saved as anyone saves them."""
    path = tmp_path_factory.mktemp("models") / "tiny-model"
    tiny_llama().save_pretrained(path)
    tiny_fast_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


def test_a_folder_loads_as_the_model_that_was_saved(folder):
    target = Target.load(str(folder), aux_layers=(1, 3, 5))
    assert (target.spec.name, target.spec.label) == ("tiny-model", "tiny-model")  # no path of this machine
    assert target.spec.fingerprint == Target(tiny_llama(), TinyTokenizer(), aux_layers=(1,)).spec.fingerprint
    assert target.adapter.dtype == torch.float32
    assert not any(p.requires_grad for p in target.adapter.model.parameters())
    assert not target.adapter.model.training
    assert target.tokenizer("ab")["input_ids"] == [BOS, 3, 4]
    tokens = random_tokens(1, 9)
    assert torch.equal(captured(target, tokens)[1], captured(Target(tiny_llama(), None, aux_layers=(1,)), tokens)[1])


def test_a_folder_loads_in_the_dtype_that_is_asked_for(folder):
    assert Target.load(str(folder), dtype=torch.bfloat16).adapter.dtype == torch.bfloat16


def test_a_folder_records_like_the_model_in_memory(folder, tmp_path):
    args = {"max_new_tokens": 6, "template": False}
    loaded = Target.load(str(folder), aux_layers=(1,)).record(["hello", "ab"], out=tmp_path / "a", **args)
    model = Target(tiny_llama(), tiny_fast_tokenizer(), aux_layers=(1,)).record(
        ["hello", "ab"], out=tmp_path / "b", **args
    )
    assert [loaded.tokens(i).tolist() for i in range(2)] == [model.tokens(i).tolist() for i in range(2)]


@pytest.mark.parametrize("name", ["no such model", "./nowhere"])
def test_an_unknown_name_says_what_names_there_are(name):
    with pytest.raises(DriftlabError, match=r"cannot load target .*smollm2.*local model folder.*Hugging Face id"):
        Target.load(name)


def test_a_misspelt_name_does_not_ask_the_hub(monkeypatch):
    def asked(*_, **__):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("driftlab.target.load_pretrained", asked)
    with pytest.raises(DriftlabError, match=r"cannot load target 'smolm2': there is no such folder.*smollm2.*owner"):
        Target.load("smolm2")


def test_a_hub_id_out_of_reach_says_so(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        DriftlabError, match=r"cannot load target 'nobody/nothing': .*which needs the hub, or its cache"
    ):
        Target.load("nobody/nothing")


def test_a_drafters_folder_is_not_a_target(tmp_path, tiny_trajectory):
    """A10."""
    Drafter(VARIANTS["eagle31"].for_target(tiny_trajectory), tiny_trajectory).save(tmp_path / "drafter")
    with pytest.raises(DriftlabError, match=r"EAGLE-3 draft .*Drafter\.load"):
        Target.load(str(tmp_path / "drafter"))


def change_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


NAME = "model.layers.2.mlp.up_proj.weight"


def test_missing_weights_are_refused_by_name(copy):
    change_weights(copy, lambda tensors: tensors.pop(NAME))
    with pytest.raises(DriftlabError, match=f"did not load whole.*missing_keys.*{NAME}"):
        Target.load(str(copy))


def test_weights_of_another_shape_are_refused_by_name(copy):
    """A10: a size mismatch never re-initialises."""
    change_weights(copy, lambda tensors: tensors.update({NAME: torch.zeros(48, 31)}))
    with pytest.raises(DriftlabError, match=f"did not load whole.*mismatched_keys.*{NAME}"):
        Target.load(str(copy))


def test_a_truncated_file_is_refused(copy):
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(DriftlabError, match="cannot load target"):
        Target.load(str(copy))


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ("{", "config.json is not valid JSON"),
        ("[]", "config.json is no table of settings"),
        (json.dumps({"model_type": "of-the-future"}), "cannot load target"),
    ],
)
def test_a_config_that_nobody_understands_is_refused(copy, config, told):
    (copy / "config.json").write_text(config)
    with pytest.raises(DriftlabError, match=told):
        Target.load(str(copy))


# ---- attention mass per position


def eager_mass(model, tokens, first_query):
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            maps = model(tokens, output_attentions=True, use_cache=False).attentions
    finally:
        model.set_attn_implementation(before)
    assert len(maps) == LAYERS
    return [layer[0, :, first_query:].mean((0, 1)) for layer in maps]


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "GptOss"])
@pytest.mark.parametrize("first_query", [0, 13])
def test_mass_is_the_mean_of_the_eager_attention_maps(family_target, family, first_query):
    target, tokens = family_target(family), random_tokens(1, 30)
    mass = target.adapter.position_mass(tokens, first_query)
    expected = eager_mass(target.adapter.model, tokens, first_query)
    assert sorted(mass) == list(range(LAYERS))
    for layer, value in enumerate(expected):
        torch.testing.assert_close(mass[layer], value, rtol=1e-4, atol=1e-6)
        assert float(mass[layer].sum()) == pytest.approx(1, abs=1e-5)


def test_mass_does_not_depend_on_the_blocks_of_queries(family_target, monkeypatch):
    target, tokens = family_target("Mistral"), random_tokens(1, 50)
    whole = target.adapter.position_mass(tokens, 3)
    monkeypatch.setattr("driftlab.target.watching._QUERY_BLOCK", 7)
    for layer, value in target.adapter.position_mass(tokens, 3).items():
        torch.testing.assert_close(value, whole[layer], rtol=1e-5, atol=1e-7)


def test_watching_changes_nothing_and_the_setting_comes_back(family_target, monkeypatch):
    """F1: the model's own attention is restored, also after an error half-way."""
    target, tokens = family_target("Qwen3"), random_tokens(1, 9)
    model = target.adapter.model
    before = captured(target, tokens)[1]
    target.adapter.position_mass(tokens, 0)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(captured(target, tokens)[1], before)

    def broken(*args, **kwargs):
        assert model.config._attn_implementation != "sdpa"
        raise ValueError("mine")

    monkeypatch.setattr("driftlab.target.watching.MassRecorder.add", broken)
    with pytest.raises(ValueError, match="mine"):
        target.adapter.position_mass(tokens, 0)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(captured(target, tokens)[1], before)


def test_a_setting_other_than_the_default_comes_back_too():
    target = Target(tiny_model("Llama", attn_implementation="eager"), TinyTokenizer(), aux_layers=(1,))
    target.adapter.position_mass(random_tokens(1, 9), 0)
    assert target.adapter.model.config._attn_implementation == "eager"


def test_learned_sinks_are_not_dropped_silently(family_target):
    with pytest.raises(DriftlabError, match="learned sinks"):
        family_target("GptOss").adapter.position_mass(random_tokens(1, 9), 0)
    x = torch.zeros(1, 1, 2, 4)
    for options in ({"s_aux": torch.zeros(1)}, {"softcap": 30.0}):
        with pytest.raises(DriftlabError, match="learned sinks or soft-capped scores, which SDPA would drop"):
            mass_attention(torch.nn.Identity(), x, x, x, None, **options)
