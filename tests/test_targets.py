"""Recording on tiny random targets of every kind: Llama, Qwen3, gpt-oss (learned sinks, sliding layers), DeepSeek-V3 (MLA),
and Qwen3-Next and Qwen3.5 (linear attention beside softmax attention), in float32 and bfloat16."""

import json

import pytest
import torch
from conftest import BOS, EOS, VOCAB, TinyTokenizer, tiny_fast_tokenizer, tiny_model
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear

from driftlab import VARIANTS, Drafter, DriftlabError, StaticTree, Target, accept, all_starts, simulate, speculate
from driftlab.speculation import _Loop
from driftlab.target.sampling import Sampling, continue_prompts, streams

HYBRIDS = {
    "Qwen3Next": {
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        **{"shared_expert_intermediate_size": 16},
    },
    "Qwen3_5": {},
}
FAMILIES = ("Llama", "Qwen3", "GptOss", "DeepseekV3", *HYBRIDS)
DTYPES = (torch.float32, torch.bfloat16)
PROMPTS = ["hello world", "abc", "q", "another longer prompt here"]
LIMIT = 16
TEXT = {
    **{"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256},
    **{"eos_token_id": EOS, "bos_token_id": BOS, "pad_token_id": 0},
}
LINEAR = {
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
}


def hybrid_model(family, layers=8, seed=0):
    """Every fourth layer has softmax attention. Gains, stored minus one, lie in [0.5, 2]."""
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, "Qwen3NextConfig" if family == "Qwen3Next" else "Qwen3_5TextConfig")
    config = config(**TEXT, **LINEAR, **HYBRIDS[family], num_hidden_layers=layers)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.mul_(5)
        elif "norm" in name:
            parameter.uniform_(0.5, 2.0).sub_(0 if "linear_attn" in name else 1)
    return model


def model_of(family, dtype=torch.float32):
    return (hybrid_model(family) if family in HYBRIDS else tiny_model(family)).to(dtype)


def target_on(model, **kwargs):
    layers = tuple(range(len(model.model.layers) + 1))
    return Target(model, TinyTokenizer(), **{"aux_layers": layers, **kwargs})


@pytest.fixture(scope="module")
def target_of():
    """Return one target per family and type that captures all of its states, made once."""
    made = {}

    def get(family, dtype=torch.float32):
        if (family, dtype) not in made:
            made[family, dtype] = target_on(model_of(family, dtype))
        return made[family, dtype]

    return get


@pytest.fixture(scope="module")
def recorded(target_of, tmp_path_factory):
    """Return the recording of four prompts of different lengths, decoded together, and of any one alone."""
    made = {}

    def get(family, dtype=torch.float32, alone=None):
        if (family, dtype, alone) not in made:
            prompts = PROMPTS if alone is None else [PROMPTS[alone]]
            out = tmp_path_factory.mktemp("targets") / "r"
            made[family, dtype, alone] = target_of(family, dtype).record(
                prompts, max_new_tokens=LIMIT, template=False, out=out, piece_size=4
            )
        return made[family, dtype, alone]

    return get


#: rounding in float32, a thousandth of what a leak does; a running state adds up more of it than one row of attention
ROUNDING = {family: 1e-4 if family in HYBRIDS else 1e-5 for family in FAMILIES}
every = pytest.mark.parametrize("family", FAMILIES)
both = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])


def error(ours, theirs):
    """Largest distance of a state from where it should be, as a fraction of its length."""
    ours, theirs = ours.float(), theirs.float()
    return float(((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp(min=1e-6)).max())


def random_tokens(length, seed):
    return torch.randint(3, VOCAB, (1, length), generator=torch.Generator().manual_seed(seed))


# ---- what is recorded


@every
@both
def test_recorded_states_are_transformers_own(target_of, recorded, family, dtype):
    """k < N is hidden_states[k]; N is what the last layer puts out; the last is after the norm. Bit for bit."""
    model = target_of(family, dtype).adapter.model
    trajectory = recorded(family, dtype, alone=3)
    entry, output = trajectory[0], []
    count = len(model.model.layers)

    def keep(_module, _args, out):
        output.append(out[0] if isinstance(out, tuple) else out)

    handle = model.model.layers[-1].register_forward_hook(keep)
    with torch.no_grad():
        own = model(entry.tokens[None], output_hidden_states=True, use_cache=False)
    handle.remove()
    assert trajectory.aux_layers == tuple(range(count + 1))
    assert entry.aux.dtype == dtype
    for k in range(count):
        assert torch.equal(entry.aux[:, k], own.hidden_states[k][0]), k
    assert torch.equal(entry.aux[:, count], output[0].view(entry.aux[:, count].shape))
    assert entry.last_hidden.dtype == torch.float32
    assert torch.equal(entry.last_hidden, own.hidden_states[count][0].float())
    normed = model.model.norm(entry.aux[:, count])
    assert torch.equal(normed.float(), entry.last_hidden)
    assert torch.equal(linear(normed, model.lm_head.weight), own.logits[0])
    assert error(entry.aux[:, count], entry.last_hidden) > 0.1  # the norm does something here


@every
@both
def test_the_gain_is_what_the_norm_multiplies_by(target_of, recorded, family, dtype):
    """Also where a family stores it minus one."""
    target = target_of(family, dtype)
    raw = target.adapter.model.model.norm.weight.float()
    gain = raw + 1 if family in HYBRIDS else raw
    assert 0.5 <= float(gain.min()) < 0.8 < 1.7 < float(gain.max()) <= 2.01
    tolerance = 1e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(target.head.norm_weight.float(), gain, rtol=tolerance, atol=0)
    entry = recorded(family, dtype, alone=3)[0]
    stream = entry.aux[:, -1].float()
    normed = stream / (stream.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain
    assert error(entry.last_hidden, normed) < (1e-5 if dtype == torch.float32 else 0.01)


@every
def test_recorded_answers_are_those_of_generate(target_of, recorded, family):
    """One prompt at a time, there; a left-padded batch of four lengths, here. Token by token, in float32."""
    model, trajectory = target_of(family).adapter.model, recorded(family)
    for i, entry in enumerate(trajectory.entries):
        prompt = trajectory.tokens(i)[None, : entry.prompt_length]
        own = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=LIMIT, do_sample=False)[
            0
        ].tolist()
        assert trajectory.tokens(i).tolist() == own
        assert entry.finish == ("stop" if own[-1] == EOS else "length")
        assert len(set(own[entry.prompt_length :])) > 4 or entry.finish == "stop"


@every
def test_in_bfloat16_answers_leave_generate_only_where_its_logits_tie(target_of, recorded, family):
    """driftlab chooses from float32 logits, generate from rounded ones: they part where two of those are a step apart."""
    model = target_of(family, torch.bfloat16).adapter.model
    compared = 0
    for i in range(len(PROMPTS)):
        trajectory = recorded(family, torch.bfloat16, alone=i)
        length, ours = trajectory.entries[0].prompt_length, trajectory.tokens(0)
        own = model.generate(
            ours[None, :length],
            attention_mask=torch.ones(1, length, dtype=torch.long),
            **{"max_new_tokens": LIMIT, "do_sample": False, "output_logits": True, "return_dict_in_generate": True},
        )
        for token, logits in zip(ours[length:].tolist(), own.logits, strict=False):
            best = float(logits.max())
            assert best - float(logits[0, token]) <= 2**-7 * max(abs(best), 1.0)
            if token != int(logits.argmax()):
                break
            compared += 1
    assert compared > 2 * LIMIT


# ---- padding


@every
def test_a_left_padded_batch_is_recorded_as_one_at_a_time(recorded, family):
    together = recorded(family)
    assert len({entry.prompt_length for entry in together.entries}) == 4
    for i in range(len(PROMPTS)):
        a, b = together[i], recorded(family, alone=i)[0]
        assert torch.equal(a.tokens, b.tokens)
        assert error(a.last_hidden, b.last_hidden) < ROUNDING[family]
        assert max(error(a.aux[:, k], b.aux[:, k]) for k in range(a.aux.shape[1])) < ROUNDING[family]
        torch.testing.assert_close(a.lse, b.lse, rtol=1e-5, atol=1e-4, equal_nan=True)


@every
@both
def test_padding_on_the_left_leaks_into_no_state(target_of, family, dtype):
    """Softmax attention masks it out; linear attention has to be told, or its running state begins with the padding."""
    adapter = target_of(family, dtype).adapter
    layers = target_of(family, dtype).aux_layers
    alone, pad = random_tokens(9, 1), 5
    padded = torch.cat([torch.full((1, pad), 7), alone], 1)
    batch = torch.cat([random_tokens(9 + pad, 2), padded])
    mask = torch.ones_like(batch)
    mask[1, :pad] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)

    def states(tokens, **kwargs):
        with torch.no_grad(), adapter.capturing(layers) as seen:
            adapter.hidden(tokens, **kwargs)
        return torch.stack([seen[k] for k in layers], 2)

    right = states(alone)[0]
    masked = states(batch, attention_mask=mask, positions=positions)[1, pad:]
    unmasked = states(batch)[1, pad:]  # (positions alone would be read as packed texts, and masked)
    assert error(unmasked, right) > 0.05  # it would leak
    if dtype == torch.float32:
        assert error(masked, right) < ROUNDING[family]
    else:  # rounding chooses other experts now and then
        off = ((masked.float() - right.float()).norm(dim=-1) / right.float().norm(dim=-1).clamp(min=1e-6)).flatten()
        assert float(off.quantile(0.5)) < 0.02


@every
def test_sequences_that_end_leave_the_batch_and_the_rest_goes_on(target_of, recorded, family):
    """The cache of every kind of layer loses the rows of what has ended."""
    adapter, trajectory = target_of(family).adapter, recorded(family)
    answers = [trajectory.tokens(i)[e.prompt_length :].tolist() for i, e in enumerate(trajectory.entries)]
    prompts = [trajectory.tokens(i)[: e.prompt_length].tolist() for i, e in enumerate(trajectory.entries)]
    stops = [answers[0][3], answers[2][5], EOS]
    widths, hidden = [], adapter.hidden
    adapter.hidden = lambda tokens, **kwargs: (widths.append(len(tokens)), hidden(tokens, **kwargs))[1]
    try:
        again = continue_prompts(
            adapter,
            prompts,
            **{"max_new_tokens": LIMIT, "stop_ids": stops, "sampling": Sampling()},
            generators=streams(prompts, 0),
        )
    finally:
        del adapter.hidden
    ends = [next((n for n, t in enumerate(a, 1) if t in stops), len(a)) for a in answers]
    assert again == [a[:end] for a, end in zip(answers, ends, strict=True)]
    assert len(set(ends)) > 1
    assert widths[0] == 4
    assert widths[-1] < 4


# ---- again


@every
@both
def test_the_second_call_gives_what_the_first_gave(target_of, family, dtype):
    """A, B, A, bit for bit; no state of B stays."""
    target = target_of(family, dtype)
    a, b = random_tokens(18, 3), random_tokens(11, 4)

    def states(tokens):
        with torch.no_grad(), target.adapter.capturing(target.aux_layers) as seen:
            last = target.adapter.hidden(tokens)
        return [seen[k] for k in target.aux_layers] + [last]

    first, _, again = states(a), states(b), states(a)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@every
@both
def test_the_same_recording_twice_is_the_same(target_of, recorded, family, dtype, tmp_path):
    first = recorded(family, dtype)
    again = target_of(family, dtype).record(
        PROMPTS, max_new_tokens=LIMIT, template=False, out=tmp_path / "r", piece_size=4
    )
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a.tokens, b.tokens)
        assert torch.equal(a.aux, b.aux)
        assert torch.equal(a.last_hidden, b.last_hidden)
    assert again.sinks == first.sinks


# ---- the sink


@every
@both
def test_the_sink_is_searched_in_layers_with_softmax_attention(recorded, family, dtype):
    report = recorded(family, dtype).sink_report
    if family == "GptOss":
        assert report["found"] is False
        assert "learned sinks" in report["reason"]
        return
    layers = (3, 7) if family in HYBRIDS else range(7)
    assert report["found"] is True
    assert sorted(report["by_layer"]) == [str(layer) for layer in layers]
    assert sum(report["by_layer"].values()) / len(layers) == pytest.approx(report["top"][0]["mass"], rel=1e-4)


@pytest.mark.parametrize("family", HYBRIDS)
def test_the_mass_of_a_hybrid_is_that_of_its_eager_maps(family):
    model = hybrid_model(family)
    target, tokens = target_on(model), random_tokens(20, 5)
    mass = target.adapter.position_mass(tokens, 6)
    assert sorted(mass) == [3, 7]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = [m for m in model(tokens, output_attentions=True, use_cache=False).attentions if m is not None]
    assert len(maps) == 2
    for layer, own in zip((3, 7), maps, strict=True):
        torch.testing.assert_close(mass[layer], own[0, :, 6:].mean((0, 1)), rtol=1e-4, atol=1e-6)


# ---- live


@pytest.fixture(scope="module")
def drafted(target_of, train_tiny, tmp_path_factory):
    """Return target, recording and two drafters of a family: one that has learnt some of it, one at random."""
    made = {}

    def get(family):
        if family not in made:
            target = target_on(target_of(family).adapter.model, aux_layers=(1, 3, 5))
            trajectory = target.record(
                PROMPTS, max_new_tokens=LIMIT, template=False, out=tmp_path_factory.mktemp("live") / "r"
            )
            made[family] = target, trajectory, train_tiny(trajectory, "eagle31", 25.0), random_drafter(trajectory)
        return made[family]

    return get


def random_drafter(trajectory):
    drafter = Drafter(VARIANTS["eagle3"].for_target(trajectory), trajectory, seed=3).eval()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 2.0, generator=generator)
            else:
                parameter.mul_(6)
    return drafter


@pytest.mark.parametrize(
    ("family", "depth"), [*((family, 3) for family in FAMILIES), *((family, 1) for family in HYBRIDS)]
)
def test_live_is_the_replay_on_every_kind_of_target(drafted, family, depth):
    """What is not accepted is taken back from every cache, a running state too."""
    target, trajectory, learnt, random = drafted(family)
    for drafter, rows in ((learnt, range(4)), (random, (1,))):
        simulation = simulate(accept(all_starts(drafter, trajectory, depth), trajectory))
        for i in rows:
            entry = trajectory.entries[i]
            text = trajectory.tokens(i).tolist()
            live = speculate(target, drafter, text[: entry.prompt_length], depth=depth, max_new_tokens=LIMIT)
            assert list(live.tokens) == text[entry.prompt_length :]
            assert live.rounds == simulation.rounds[i]
            assert live.finish == entry.finish
        accepted = {r.accepted for rounds in simulation.rounds for r in rounds}
        assert len(accepted) > 1 or drafter is random


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_running_state_holds_the_committed_text_and_nothing_else(drafted, family):
    """transformers crops the convolution's inputs and leaves the recurrent state as it was: it would hold the rejected."""
    target, trajectory, learnt, _ = drafted(family)
    text = trajectory.tokens(0).tolist()
    rejected = 0
    with torch.inference_mode():
        loop = _Loop(target, learnt, text[: trajectory.entries[0].prompt_length], LIMIT, Sampling(), None)
        while not loop.finish:
            loop.round(3)
            rejected += loop.rounds[-1].accepted < 3
            if loop.finish:
                break
            whole = target.adapter.new_cache()
            target.adapter.hidden(torch.tensor([text[: loop.committed]]), cache=whole)
            assert loop.cache.get_seq_length() == loop.committed
            for number, (ours, theirs) in enumerate(zip(loop.cache.layers, whole.layers, strict=True)):
                names = ("keys", "values") if number in (3, 7) else ("recurrent_states", "conv_states")
                for name in names:
                    a, b = getattr(ours, name), getattr(theirs, name)
                    a, b = (a, b) if number in (3, 7) else (a[0], b[0])
                    assert error(a.flatten(1), b.flatten(1)) < ROUNDING[family], (number, name)
    assert rejected


@pytest.mark.parametrize("family", HYBRIDS)
def test_what_a_running_state_cannot_do_is_refused_by_name(drafted, family, tmp_path):
    target, trajectory, learnt, _ = drafted(family)
    told = rf"{family}ForCausalLM has layers of type \['linear_attention'\]"
    prompt = trajectory.tokens(0)[: trajectory.entries[0].prompt_length].tolist()
    with pytest.raises(DriftlabError, match=f"{told}: .*branches of a tree.*Draft chains"):
        speculate(target, learnt, prompt, tree=StaticTree.chains(2, 2), max_new_tokens=8)
    with pytest.raises(DriftlabError, match=f"{told}: .*decoded in slots"):
        target.adapter.check_slots()


# ---- loading: where embeddings lie


def multimodal(kind):
    """A tiny multimodal model: its keys are nested in another way in each."""
    import transformers

    vision = {"hidden_size": 16, "intermediate_size": 16}
    clip = {**vision, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    qwen = {**vision, "depth": 1, "num_heads": 2, "out_hidden_size": 32, "patch_size": 14}
    text = {**TEXT, "num_hidden_layers": 7}
    torch.manual_seed(0)
    if kind == "Gemma3":
        config = transformers.Gemma3Config(text_config={**text, "sliding_window": 8}, vision_config=clip)
    elif kind == "Qwen3_5":
        config = transformers.Qwen3_5Config(text_config={**text, **LINEAR}, vision_config=qwen)
    elif kind == "Qwen2_5_VL":
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
        plain = {key: value for key, value in text.items() if key != "head_dim"}
        config = transformers.Qwen2_5_VLConfig(text_config={**plain, "rope_parameters": rope}, vision_config=qwen)
    else:
        text = {**text, "model_type": "llama", "tie_word_embeddings": False}
        config = transformers.LlavaConfig(text_config=text, vision_config={"model_type": "clip_vision_model", **clip})
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval().requires_grad_(False)


def saved(model, folder):
    model.save_pretrained(folder)
    tiny_fast_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("Gemma3", "language_model.model.embed_tokens.weight"),
        ("Qwen3_5", "model.language_model.embed_tokens.weight"),
        ("Qwen2_5_VL", "model.embed_tokens.weight"),
        ("Llava", "language_model.model.embed_tokens.weight"),
    ],
)
def test_the_text_model_of_a_multimodal_checkpoint_is_found(tmp_path, kind, key):
    """Names are nested; Gemma's head is tied and in no file."""
    model = multimodal(kind)
    folder = saved(model, tmp_path / "model")
    stored = load_file(folder / "model.safetensors")
    assert key in stored
    target = Target.load(str(folder), aux_layers=(1, 3, 7))
    head = stored[key] if kind == "Gemma3" else next(v for k, v in stored.items() if k.endswith("lm_head.weight"))
    assert torch.equal(target.head.embed, stored[key])
    assert torch.equal(target.head.lm_head, head)
    trajectory = target.record(["abc", "hello"], max_new_tokens=6, template=False, out=tmp_path / "r")
    for entry in trajectory:
        with torch.no_grad():
            own = model(input_ids=entry.tokens[None], output_hidden_states=True, use_cache=False)
        for i, k in enumerate((1, 3)):
            torch.testing.assert_close(entry.aux[:, i], own.hidden_states[k][0], rtol=1e-5, atol=1e-5)
        first = entry.prompt_length - 1
        assert own.logits[0, first:-1].argmax(-1).tolist() == entry.tokens[first + 1 :].tolist()


def test_a_tied_head_is_in_no_file(tmp_path):
    """SpecForge#666: names nested in multimodal checkpoints."""
    from conftest import tiny_llama

    folder = saved(tiny_llama(tie_word_embeddings=True), tmp_path / "model")
    stored = load_file(folder / "model.safetensors")
    assert not any("lm_head" in key for key in stored)
    head = Target.load(str(folder), aux_layers=(1,)).head
    assert torch.equal(head.lm_head, stored["model.embed_tokens.weight"])
    assert torch.equal(head.embed, head.lm_head)


def test_where_no_embedding_is_found_those_seen_are_listed(tmp_path):
    """SpecForge#666: names nested in multimodal checkpoints."""
    folder = saved(tiny_model("Llama"), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["thinker.text.tok_embeddings.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    told = r"missing_keys.*model\.embed_tokens\.weight.*the files have \['thinker\.text\.tok_embeddings\.weight'\]"
    with pytest.raises(DriftlabError, match=told):
        Target.load(str(folder))


# ---- loading: a draft is no target


def draft_tensors(prefix):
    """The names and shapes of an EAGLE-3 draft, its first layer taking 2H inputs."""
    layer = {
        **{"self_attn.q_proj.weight": (32, 64), "self_attn.k_proj.weight": (16, 64)},
        **{"self_attn.v_proj.weight": (16, 64), "self_attn.o_proj.weight": (32, 32)},
        **{"mlp.gate_proj.weight": (48, 32), "mlp.up_proj.weight": (48, 32), "mlp.down_proj.weight": (32, 48)},
        **{"input_layernorm.weight": (32,), "hidden_norm.weight": (32,), "post_attention_layernorm.weight": (32,)},
    }
    tensors = {f"{prefix}{name}": torch.ones(shape) for name, shape in layer.items()}
    return {
        **tensors,
        "fc.weight": torch.ones(32, 96),
        "norm.weight": torch.ones(32),
        "lm_head.weight": torch.ones(61, 32),
    }


@pytest.mark.parametrize("prefix", ["midlayer.", "layers.0.", "model.layers.0."])
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_a_draft_whose_config_does_not_tell_is_no_target_either(tmp_path, prefix, file):
    """The config says a plain model of one layer; what loads it would draw the layer again by chance."""
    from conftest import tiny_llama

    folder = saved(tiny_llama(layers=1), tmp_path / "draft")
    (folder / "model.safetensors").unlink()
    if file == "model.safetensors":
        save_file(draft_tensors(prefix), folder / file, metadata={"format": "pt"})
    else:
        torch.save(draft_tensors(prefix), folder / file)
    with pytest.raises(DriftlabError, match=r"is an EAGLE-3 draft .*q_proj takes 2H inputs.*Drafter\.load"):
        Target.load(str(folder), aux_layers=(1,))


@pytest.mark.parametrize("mark", [{"draft_vocab_size": 32}, {"architectures": ["LlamaForCausalLMEagle3"]}])
def test_a_draft_whose_config_tells_is_refused_before_it_is_read(tmp_path, mark):
    """A draft is told from a target by its tensors."""
    from conftest import tiny_llama

    folder = saved(tiny_llama(layers=1), tmp_path / "draft")
    (folder / "model.safetensors").write_bytes(b"")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **mark}))
    with pytest.raises(DriftlabError, match=r"is an EAGLE-3 draft .*not a target: use Drafter\.load"):
        Target.load(str(folder))


def test_weights_beside_the_target_are_no_draft(tmp_path):
    """A head that predicts several tokens may lie in the target's own files."""
    folder = saved(tiny_model("Llama"), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "mtp.fc.weight": torch.ones(32, 64)}, folder / "model.safetensors", metadata={"format": "pt"})
    assert Target.load(str(folder), aux_layers=(1,)).spec.num_layers == 7
