"""A target's window + sinks by mask: a float64 reference, decoding with a cache, padding, recordings, restoration."""

from __future__ import annotations

import pytest
import torch
from conftest import TinyTokenizer, tiny_model

from driftlab import Target
from driftlab.errors import DriftlabError
from driftlab.target.windows import Window

FAMILIES = ["Llama", "Qwen3", "GptOss", "DeepseekV3", "Mistral"]
WINDOW, SINKS = 5, 2
#: Mistral slides over 8 keys in every layer, gpt-oss over 8 in every other one
OWN_WINDOW = {"Mistral": lambda layer: 8, "GptOss": lambda layer: 8 if layer % 2 == 0 else None}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def target(family):
    return Target(tiny_model(family, layers=4), TinyTokenizer(), name=family, aux_layers=(1, 2))


@pytest.fixture(scope="module")
def text():
    return torch.randint(3, 61, (1, 30), generator=torch.Generator().manual_seed(5))


def seen(length, own=None):
    """By a loop over queries and keys, from the words: the last 5 with the own one, the first 2, nothing in the future."""
    mask = torch.zeros(length, length, dtype=torch.bool)
    for query in range(length):
        for key in range(query + 1):
            near = query - key <= WINDOW - 1
            allowed = near or key in (0, 1)
            mask[query, key] = allowed and (own is None or query - key <= own - 1)
    return mask


def reference_attention(masks, sinks_of):
    """Dense float64 softmax over all keys under an explicit mask; one more logit where a layer has a learned sink."""

    def attend(module, q, k, v, _mask, scaling=None, **kwargs):
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1).double(), v.repeat_interleave(group, 1).double()
        scores = torch.einsum("bhqd,bhkd->bhqk", q.double(), k) * scaling
        scores = scores.masked_fill(~masks[module.layer_idx], -torch.inf)
        extra = sinks_of(module)
        if extra is None:
            weights = scores.softmax(-1)
        else:
            extra = extra.double()[None, :, None, None].expand(*scores.shape[:-1], 1)
            weights = torch.cat([scores, extra], -1).softmax(-1)[..., :-1]
        return torch.einsum("bhqk,bhkd->bqhd", weights, v).to(q.dtype), None

    return attend


def reference(family, text):
    """The model in float64, run with a mask made here: no mask of transformers, none of ours."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    model = tiny_model(family, layers=4).double()
    model.set_experts_implementation("eager")  # grouped products know no float64
    own = OWN_WINDOW.get(family, lambda layer: None)
    masks = {layer: seen(text.shape[1], own(layer)) for layer in range(4)}
    learned = (lambda module: module.sinks) if family == "GptOss" else (lambda module: None)
    AttentionInterface.register("dense_reference", reference_attention(masks, learned))
    AttentionMaskInterface.register("dense_reference", eager_mask)
    model.set_attn_implementation("dense_reference")
    with torch.no_grad():
        return model.get_decoder()(text, use_cache=False).last_hidden_state


def relative(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


def test_the_prefill_equals_a_dense_mask_in_float64(family, target, text):
    expected = reference(family, text)
    with torch.no_grad():
        plain = target.adapter.hidden(text)
        with target.attention(window=WINDOW, sinks=SINKS):
            found = target.adapter.hidden(text)
    assert relative(found, expected) < 2e-5
    assert relative(plain, expected) > 1e-2  # the window does something


def test_learned_sinks_take_part(text):
    """With them moved far down, they take nothing: another result, so they were kept."""
    model = tiny_model("GptOss", layers=4)
    target = Target(model, TinyTokenizer(), aux_layers=(1, 2))
    with torch.no_grad(), target.attention(window=WINDOW, sinks=SINKS):
        kept = target.adapter.hidden(text)
        for layer in model.get_decoder().layers:
            layer.self_attn.sinks.fill_(-1e4)
        without = target.adapter.hidden(text)
    assert relative(without, kept) > 1e-3


def test_decoding_with_a_cache_equals_the_prefill(target, text):
    with torch.no_grad(), target.attention(window=WINDOW, sinks=SINKS):
        whole = target.adapter.hidden(text)
        cache = target.adapter.new_cache()
        parts = [target.adapter.hidden(text[:, :11], cache=cache)]
        parts += [target.adapter.hidden(text[:, i : i + 1], cache=cache) for i in range(11, 20)]
        parts += [target.adapter.hidden(text[:, 20:], cache=cache)]  # a block of drafts to verify
    assert relative(torch.cat(parts, 1), whole) < 2e-5


def test_texts_padded_on_the_left_see_their_own_first_tokens(target, text):
    """The sinks of a short text in a batch are its own first tokens, in the prefill and in decoding."""
    short, long = text[0, :9], text[0, 3:24]
    tokens = torch.zeros(2, 21, dtype=torch.long)
    tokens[0, 12:], tokens[1] = short, long
    mask = torch.ones(2, 21, dtype=torch.long)
    mask[0, :12] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    more = text[:, 24:28].expand(2, 4)
    with torch.no_grad(), target.attention(window=WINDOW, sinks=SINKS):
        alone = [target.adapter.hidden(torch.cat([row, more[0]])[None])[0] for row in (short, long)]
        cache = target.adapter.new_cache()
        found = [target.adapter.hidden(tokens, cache=cache, attention_mask=mask, positions=positions)]
        for step in range(4):
            mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
            at = positions[:, -1:] + 1 + step
            found.append(
                target.adapter.hidden(more[:, step : step + 1], cache=cache, attention_mask=mask, positions=at)
            )
    found = torch.cat(found, 1)
    assert relative(found[0, 12:], alone[0]) < 2e-5
    assert relative(found[1], alone[1]) < 2e-5


def test_the_own_attention_comes_back(target, text):
    kind = target.adapter.config._attn_implementation
    with torch.no_grad():
        before = target.adapter.hidden(text)
        with target.attention(window=3), pytest.raises(DriftlabError, match="inside"), target.attention(window=2):
            pass
        with pytest.raises(ZeroDivisionError), target.attention(window=3, sinks=1):
            raise ZeroDivisionError
        after = target.adapter.hidden(text)
    assert torch.equal(before, after)
    assert (target.adapter.config._attn_implementation, target.adapter.window) == (kind, None)


def test_a_window_over_everything_changes_nothing(target, text):
    with torch.no_grad():
        plain = target.adapter.hidden(text)
        with target.attention(window=30):
            wide = target.adapter.hidden(text)
        with target.attention(window=1, sinks=30):
            sunk = target.adapter.hidden(text)
    assert relative(wide, plain) < 2e-5
    assert relative(sunk, plain) < 2e-5


def test_what_is_recorded_through_a_window_has_another_key_and_says_so(tiny_target, tmp_path, monkeypatch):
    monkeypatch.setenv("DRIFTLAB_CACHE", str(tmp_path))
    prompts = ["hello world, a longer one", "abc and more"]

    def record():
        return tiny_target.record(prompts, max_new_tokens=8, template=False)

    plain = record()
    with tiny_target.attention(window=4, sinks=1):
        narrow = record()
    with tiny_target.attention(window=4, sinks=2):
        other = record()
    assert len({t.path for t in (plain, narrow, other)}) == 3
    assert "attention" not in plain.settings
    assert narrow.settings["attention"] == "window 4 + 1 sinks"
    assert narrow.spec.label == f"{plain.spec.label}, window 4 + 1 sinks"
    assert narrow.spec.fingerprint == plain.spec.fingerprint
    assert record().path == plain.path
    # the recorded states are those of the window, and the text is the window's own
    one = narrow[0]
    with torch.no_grad(), tiny_target.attention(window=4, sinks=1):
        assert relative(tiny_target.adapter.hidden(one.tokens[None])[0], one.last_hidden) < 1e-5
    answer = one.tokens[one.prompt_length :]
    assert torch.equal(narrow.head.logits(one.last_hidden[one.prompt_length - 1 : -1]).argmax(-1), answer)
    assert relative(tiny_target.adapter.hidden(one.tokens[None])[0], one.last_hidden) > 1e-2


def test_the_sink_search_watches_through_the_window(tiny_target, text):
    """Window 1 without sinks: every query's mass is its own."""
    with tiny_target.attention(window=1):
        mass = tiny_target.adapter.position_mass(text, 20)
    for layer in mass.values():
        assert layer[:20].abs().max() == 0
        assert torch.allclose(layer[20:], torch.full((10,), 0.1))
    assert tiny_target.adapter.position_mass(text, 20)[3][:20].sum() > 0.1


@pytest.mark.parametrize(("width", "sinks"), [(0, 0), (-3, 1), (4, -1), (True, 0)])
def test_impossible_windows_are_refused(width, sinks):
    with pytest.raises(DriftlabError, match="at least 1 key"):
        Window(width, sinks)


def test_paths_that_know_no_window_refuse(tiny_target):
    with tiny_target.attention(window=4):
        with pytest.raises(DriftlabError, match="slots"):
            tiny_target.adapter.check_slots()
        with pytest.raises(DriftlabError, match="slots"):
            tiny_target.record_self_prompts(4)
        nodes = torch.zeros(1, dtype=torch.long)
        with pytest.raises(DriftlabError, match="tree"):
            tiny_target.adapter.hidden_tree(nodes, nodes, torch.ones(1, 1, dtype=torch.bool), None)


def test_other_attention_and_layers_are_refused(tiny_target, monkeypatch):
    monkeypatch.setattr(tiny_target.adapter.config, "_attn_implementation_internal", "flash_attention_2")
    with pytest.raises(DriftlabError, match="eager or sdpa"), tiny_target.attention(window=4):
        pass
    monkeypatch.undo()
    monkeypatch.setattr(tiny_target.adapter.config, "layer_types", ["linear_attention"] * 7, raising=False)
    with pytest.raises(DriftlabError, match="linear_attention"), tiny_target.attention(window=4):
        pass
