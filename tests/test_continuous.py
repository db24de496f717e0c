"""Conversations that the target makes up itself: the states of its decoding, whatever the slots, and what is refused."""

import dataclasses
import json
import shutil
import sys

import pytest
import torch
from conftest import BOS, EOS, VOCAB, TinyTokenizer, tiny_fast_tokenizer, tiny_model
from safetensors.torch import load_file, save_file

from driftlab import (
    VARIANTS,
    Drafter,
    DriftlabError,
    Target,
    TrainConfig,
    Trajectory,
    accept,
    all_starts,
    cli,
    simulate,
    train,
)
from driftlab.pieces import piece_path
from driftlab.recorded import TargetSpec
from driftlab.target import continuous
from driftlab.target.continuous import SelfJob
from driftlab.target.sampling import Sampling, continue_prompts, streams
from driftlab.target.watching import slot_attention

REAL_PIECE = continuous.PIECE
PIECE, SLOTS, LIMIT, USER = 8, 5, 8, 6


class Chat(TinyTokenizer):
    """Turns in a template whose user turn begins beyond a sliding window of 8 and ends with a token that is no EOS."""

    chat_template = "yes"

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        turns = "".join(f"<the {m['role']} says>{m['content']}#\n" for m in messages)
        return turns + "<bot>" * add_generation_prompt


def ids(text):
    return TinyTokenizer()(text, False)["input_ids"]


PREFIX, SUFFIX, END = [BOS, *ids("<the user says>")], ids("#\n<bot>"), ids("#")[0]
EOS_IDS = (EOS, 40, 41, 43, 44, 45)


def chat_target(family="Llama", layers=3, **kwargs):
    model = tiny_model(family, layers, **kwargs)
    model.generation_config.eos_token_id = list(EOS_IDS)
    return Target(model, Chat(), name=family, aux_layers=(0, 2, layers))


def record(target, out, count=2 * PIECE, **kwargs):
    """Messages of nearly uniform tokens: with so few allowed most are drawn again."""
    settings = {"max_new_tokens": LIMIT, "user_tokens": USER, "user_temperature": 30.0, "user_top_k": 0, "slots": SLOTS}
    return target.record_self_prompts(count, out=out, **{**settings, "store_dtype": None, **kwargs})


def texts(trajectory):
    return [trajectory.tokens(i).tolist() for i in range(len(trajectory))]


def prompts(trajectory):
    return [text[: entry.prompt_length] for text, entry in zip(texts(trajectory), trajectory.entries, strict=True)]


def files(folder):
    """Every piece's bytes; of trajectory.json all but the provenance, which holds the time."""
    values = json.loads((folder / "trajectory.json").read_text())
    pieces = {path.name: path.read_bytes() for path in folder.glob("piece-*")}
    return {**pieces, "trajectory.json": {k: v for k, v in values.items() if k != "provenance"}}


def assert_same_states(one, other):
    for a, b in zip(one, other, strict=True):
        assert (a.id, a.prompt_length, a.finish, a.tokens.tolist()) == (
            b.id,
            b.prompt_length,
            b.finish,
            b.tokens.tolist(),
        )
        for name in ("aux", "last_hidden", "lse"):
            torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.fixture(scope="module", autouse=True)
def small_pieces():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(continuous, "PIECE", PIECE)
        yield


@pytest.fixture(scope="module")
def target():
    return chat_target()


@pytest.fixture(scope="module")
def whole(target, tmp_path_factory, small_pieces):
    """Two pieces, recorded without interruption."""
    return record(target, tmp_path_factory.mktemp("whole") / "recording")


@pytest.fixture
def no_decoding(monkeypatch):
    def fail(*_):
        raise AssertionError("a conversation is made again")

    monkeypatch.setattr(continuous, "converse", fail)


# ---- what is recorded


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma3", "Qwen3", "GptOss", "DeepseekV3"])
def test_states_and_answers_are_those_of_ordinary_passes(family, tmp_path):
    """Greedy answers to the same prompts; states and lse of one plain pass. Windows of 8 are shorter than the prefix."""
    target = chat_target(family, 7 if family == "Gemma3" else 3)  # every sixth layer sees all
    trajectory = record(target, tmp_path / "r", PIECE)
    assert len(trajectory) == PIECE
    made = prompts(trajectory)
    answers = continue_prompts(
        target.adapter,
        made,
        max_new_tokens=LIMIT,
        stop_ids=EOS_IDS,
        sampling=Sampling(),
        generators=streams(made, 0),
    )
    for recorded, prompt, answer in zip(trajectory, made, answers, strict=True):
        assert recorded.tokens.tolist() == prompt + answer
        assert (prompt[: len(PREFIX)], prompt[-len(SUFFIX) :]) == (PREFIX, SUFFIX)
        assert recorded.finish == ("stop" if answer[-1] in EOS_IDS else "length")
        with torch.no_grad(), target.adapter.capturing(trajectory.aux_layers) as states:
            own = target.adapter.model(recorded.tokens[None], output_hidden_states=True, use_cache=False)
        for i, k in enumerate(trajectory.aux_layers):
            torch.testing.assert_close(recorded.aux[:, i], states[k][0], rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(recorded.last_hidden, own.hidden_states[-1][0], rtol=1e-4, atol=1e-3)
        first = recorded.prompt_length - 1
        assert recorded.lse[:first].isnan().all()
        torch.testing.assert_close(recorded.lse[first:], own.logits[0, first:].logsumexp(-1), rtol=1e-4, atol=1e-3)
    assert trajectory.sink_report["found"] is (family not in ("GptOss", "Mistral"))  # learned sinks; windows alone


def test_answers_end_with_an_eos_or_at_the_limit(whole):
    assert {entry.finish for entry in whole.entries} == {"stop", "length"}
    for text, entry in zip(texts(whole), whole.entries, strict=True):
        answer = text[entry.prompt_length :]
        assert not set(answer[:-1]) & set(EOS_IDS)
        assert (entry.finish == "stop") is (answer[-1] in EOS_IDS)
        assert entry.finish == "stop" or len(answer) == LIMIT


def test_messages_too_short_or_too_long_are_drawn_again(whole):
    """Of so few allowed lengths all occur, both ends among them; no message holds what ends one."""
    messages = [prompt[len(PREFIX) : -len(SUFFIX)] for prompt in prompts(whole)]
    assert {len(message) for message in messages} == {4, 5, 6}
    assert not any({END, *EOS_IDS} & set(message) for message in messages)
    assert len({tuple(message) for message in messages}) == len(whole)


def test_user_tokens_are_of_the_targets_best(target, tmp_path):
    """``user_top_k`` is that of the user's turn alone."""
    trajectory = record(target, tmp_path / "r", PIECE, user_top_k=20, user_tokens=40, temperature=30.0)
    ranks = {"user": [], "answer": []}
    for recorded in trajectory:
        with torch.no_grad():
            logits = target.adapter.model(recorded.tokens[None], use_cache=False).logits[0, :-1]
        rank = (logits > logits.gather(1, recorded.tokens[1:, None])).sum(1).tolist()
        ranks["user"] += rank[len(PREFIX) - 1 : recorded.prompt_length - len(SUFFIX) - 1]
        ranks["answer"] += rank[recorded.prompt_length - 1 :]
    assert max(ranks["user"]) < 20 < max(ranks["answer"])
    assert max(ranks["user"]) > 12


def test_settings_and_sinks_are_written_with_it(whole, target):
    assert whole.settings == {
        **{"max_new_tokens": LIMIT, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0, "template": "chat"},
        **{"answers": "target", "prompts": "self", "user_temperature": 30.0, "user_top_k": 0, "user_tokens": USER},
        **{"target_dtype": "float32", "store_dtype": "float32"},
    }
    assert (whole.spec, whole.aux_layers) == (target.spec, (0, 2, 3))
    assert [entry.id for entry in whole.entries] == [f"self-0-{i:06d}" for i in range(2 * PIECE)]
    assert {entry.category for entry in whole.entries} == {"self"}
    shared = min(entry.prompt_length for entry in list(whole.entries)[:8]) - 1
    assert (whole.sink_report["sequences"], whole.sink_report["searched_positions"]) == (8, shared)
    masses = []
    for i in range(8):
        mass = target.adapter.position_mass(whole.tokens(i)[None], whole.entries[i].prompt_length - 1)
        masses.append(torch.stack([m[:shared] for m in mass.values()]).mean(0))
    assert whole.sinks == (int(torch.stack(masses).mean(0).argmax()),)
    written = json.loads((whole.path / "trajectory.json").read_text())
    assert written["provenance"]["settings"] == whole.settings


def test_what_decides_a_recording_keeps_its_fingerprint():
    """Recordings that took days stay open to be made longer."""
    numbers = {"num_layers": 30, "hidden_size": 576, "intermediate_size": 1536, "vocab_size": 49152}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "rms_norm_eps": 1e-5}
    rope = {"rope_theta": 1e5, "rope_type": "default", "max_positions": 8192, "eos_ids": (2,)}
    spec = TargetSpec(name="n", label="l", fingerprint="f", **numbers, **heads, **rope)
    user, dtypes = Sampling(1.0, 32), ("float32", "bfloat16")
    job = SelfJob(spec, (2, 15, 27), (1, 4093, 198), (2, 198, 1, 520, 9531, 198), user, 56, Sampling(), 192, *dtypes)
    assert job.fingerprint == "3bb1d302b5d56cea5d6316f2b68c538984c909bbf752004bc3337e5c2930d52b"
    assert (job.length, REAL_PIECE) == (257, 32)


def test_it_feeds_drafters(whole, tmp_path):
    drafter = Drafter(VARIANTS["eagle31"].for_target(whole), whole)
    assert simulate(accept(all_starts(drafter, whole, 3), whole)).tau >= 1
    before = drafter.fc.weight.clone()
    train(drafter, whole, TrainConfig(ttt=2, batch_size=8, epochs=1.0), out=tmp_path / "d")
    assert not torch.equal(drafter.fc.weight, before)


def test_a_half_precision_target_is_recorded_with_an_exact_lse(tmp_path):
    model = tiny_model("Llama", scale=3.0)
    model.lm_head.weight.mul_(10)  # logits of 40, which bfloat16 rounds to eighths
    trajectory = record(Target(model.bfloat16(), Chat(), aux_layers=(1, 3)), tmp_path / "r", PIECE, user_tokens=30)
    assert trajectory[0].aux.dtype == torch.bfloat16
    assert (trajectory.settings["target_dtype"], trajectory.settings["store_dtype"]) == ("bfloat16", "bfloat16")
    for recorded in trajectory:
        first = recorded.prompt_length - 1
        p = (trajectory.head.logits(recorded.last_hidden[first:]) - recorded.lse[first:, None]).exp()
        torch.testing.assert_close(p.sum(-1), torch.ones(len(p)), rtol=0, atol=1e-4)


def test_states_may_be_stored_smaller_than_they_are_computed(target, whole, tmp_path):
    half = record(target, tmp_path / "r", PIECE, store_dtype=torch.bfloat16)
    for a, b in zip(half, whole.subset(range(PIECE)), strict=True):
        assert torch.equal(a.tokens, b.tokens)
        torch.testing.assert_close(a.aux.float(), b.aux, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(a.last_hidden, b.last_hidden, rtol=1e-4, atol=1e-4)
    assert half[0].aux.dtype == torch.bfloat16


# ---- what does not matter


@pytest.mark.parametrize("slots", [1, 7, 50])
def test_conversations_are_the_same_in_any_number_of_slots(target, whole, tmp_path, slots):
    count = PIECE if slots == 1 else 2 * PIECE
    assert_same_states(record(target, tmp_path / "r", count, slots=slots), whole.subset(range(count)))


def test_sampled_answers_are_reproducible_and_of_the_seed(target, whole, tmp_path):
    sampled = record(target, tmp_path / "a", PIECE, temperature=20.0)
    assert_same_states(record(target, tmp_path / "b", PIECE, temperature=20.0, slots=PIECE), sampled)
    assert prompts(sampled) == prompts(whole)[:PIECE]  # the user's turn comes first in a stream
    assert not any(text in texts(whole) for text in texts(sampled))
    other = record(target, tmp_path / "c", PIECE, temperature=20.0, seed=1)
    assert not {tuple(p) for p in prompts(other)} & {tuple(p) for p in prompts(sampled)}
    assert other.entries[0].id == "self-1-000000"
    best = record(target, tmp_path / "d", PIECE, temperature=20.0, top_k=1)
    assert texts(best) == texts(whole)[:PIECE]


def stop_at(number):
    def progress(what, done, total):
        assert (what, total) == ("self-prompts", 2 * PIECE)
        if done >= number:
            raise KeyboardInterrupt

    return progress


@pytest.mark.parametrize("stopped", [1, 2 * PIECE - 2, 2 * PIECE])
def test_an_interrupted_recording_goes_on_and_ends_the_same(target, whole, tmp_path, stopped):
    out = tmp_path / "r"
    with pytest.raises(KeyboardInterrupt):
        record(target, out, progress=stop_at(stopped))
    kept = {path: path.stat().st_mtime_ns for path in out.glob("piece-*")}
    assert len(kept) == stopped // PIECE
    with pytest.raises(DriftlabError, match="unfinished recording" if kept else "is not a recording"):
        Trajectory.open(out)
    seen = []
    again = record(target, out, progress=lambda what, done, total: seen.append((done, total)))
    assert seen == [(done, 2 * PIECE) for done in range(len(kept) * PIECE + 1, 2 * PIECE + 1)]
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items())
    assert_same_states(again, whole)  # a batch of another size rounds its last bits otherwise
    if stopped in (1, 2 * PIECE):  # stopped where no slot held another piece's conversation
        assert files(out) == files(whole.path)


def test_a_recording_is_made_longer_and_shorter_without_making_anything_twice(target, whole, tmp_path, request):
    out = tmp_path / "r"
    assert len(record(target, out, PIECE - 1)) == PIECE
    first = piece_path(out, 0).read_bytes()
    grown = record(target, out, PIECE + 1)
    assert piece_path(out, 0).read_bytes() == first
    assert_same_states(grown, whole)
    request.getfixturevalue("no_decoding")
    shorter = record(target, out, 1)
    assert texts(shorter) == texts(whole)[:PIECE]
    assert len(Trajectory.open(out)) == PIECE
    assert texts(record(target, out)) == texts(whole)


def test_a_finished_recording_is_opened_and_a_damaged_one_repaired(target, whole, tmp_path, monkeypatch):
    out = tmp_path / "r"
    shutil.copytree(whole.path, out)
    shutil.copy(whole.head_path, tmp_path)
    for name in ("trajectory.json", "piece-00001.safetensors"):
        (out / name).write_bytes((out / name).read_bytes()[:-30])
        assert_same_states(record(target, out), whole)
    assert piece_path(out, 0).read_bytes() == piece_path(whole.path, 0).read_bytes()
    monkeypatch.setattr(continuous, "locked", None)
    assert texts(record(target, out)) == texts(whole)


# ---- the model is left as it was


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_models_own_attention_comes_back(implementation, tmp_path, monkeypatch):
    target = chat_target(attn_implementation=implementation)
    config, seen = target.adapter.model.config, []

    def watched(*args, **kwargs):
        seen.append(config._attn_implementation)
        if len(seen) > 100:
            raise ValueError("mine")
        return slot_attention(*args, **kwargs)

    monkeypatch.setattr("driftlab.target.adapter.slot_attention", watched)

    def between(*_):
        assert config._attn_implementation == implementation

    with pytest.raises(ValueError, match="mine"):
        record(target, tmp_path / "r", progress=between)
    assert set(seen) == {"driftlab_slots"}
    assert config._attn_implementation == implementation
    assert not any(layer._forward_pre_hooks for layer in [*target.adapter.decoder.layers, target.adapter.decoder.norm])


# ---- what is refused


class Bare(Chat):
    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        return messages[0]["content"]


@pytest.mark.parametrize(
    ("tokenizer", "kwargs", "message"),
    [
        (TinyTokenizer(), {}, "need a chat template; this tokenizer has none"),
        (None, {}, "need a chat template"),
        (Bare(), {}, "marks neither where the user's text begins nor where it ends"),
        (Chat(), {"count": 0}, "count 0, .* must be at least 1"),
        (Chat(), {"max_new_tokens": 0}, "max_new_tokens 0, .* must be at least 1"),
        (Chat(), {"slots": 0}, "slots 0 and .* must be at least 1"),
        (Chat(), {"user_tokens": 0}, "user_tokens 0 must be at least 1"),
        (
            Chat(),
            {"max_new_tokens": 229},
            "up to 258 tokens are beyond the target's 256 .*lower max_new_tokens or user_",
        ),
        (Chat(), {"store_dtype": torch.int32}, "stored in a floating-point type"),
        (Chat(), {"temperature": -1.0}, "temperature and top_k must be >= 0"),
        (Chat(), {"user_top_k": -1}, "temperature and top_k must be >= 0"),
        (Chat(), {"processes": 2}, r"several processes need a target from Target\.load .*pass processes=1"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(target, tmp_path, tokenizer, kwargs, message):
    with pytest.raises(DriftlabError, match=message):
        record(Target(target.adapter.model, tokenizer, aux_layers=(1,)), tmp_path / "r", **{"count": 1, **kwargs})
    assert not list(tmp_path.iterdir())


def test_the_longest_conversation_that_fits_is_recorded(tmp_path):
    fits = len(PREFIX) + USER + len(SUFFIX) + LIMIT
    trajectory = record(chat_target(max_position_embeddings=fits), tmp_path / "r", PIECE)
    assert max(entry.length for entry in trajectory.entries) == fits


def test_messages_that_never_end_say_what_to_raise(target, tmp_path):
    with pytest.raises(DriftlabError, match="conversation 0: 50 user messages .* within 6 tokens: raise user_tokens"):
        record(target, tmp_path / "r", user_temperature=0.0, slots=1)
    assert not list((tmp_path / "r").glob("piece-*"))


@pytest.mark.parametrize("first", ["texts", "other seed"])
def test_a_folder_with_another_recording_is_refused(target, tmp_path, first):
    if first == "texts":
        target.record(["abc"], max_new_tokens=LIMIT, template=False, out=tmp_path / "r")
    else:
        record(target, tmp_path / "r", PIECE, seed=1)
    message = {"texts": "prompts: 1 there, ", "other seed": "seed: 1 there, 0 asked"}[first]
    before = files(tmp_path / "r")
    with pytest.raises(DriftlabError, match=f"holds another recording .*{message}.*choose another folder"):
        record(target, tmp_path / "r")
    assert files(tmp_path / "r") == before


def test_layers_without_softmax_attention_are_refused(tmp_path, monkeypatch):
    target = chat_target("Qwen3")
    monkeypatch.setattr(target.adapter.config, "layer_types", ["full_attention"] * 6 + ["linear_attention"])
    with pytest.raises(
        DriftlabError, match=r"Qwen3ForCausalLM has layers of type \['linear_attention'\]: .*self_prompts"
    ):
        record(target, tmp_path / "r")


@pytest.mark.parametrize("change", [lambda out: out * 1.1, lambda out: out * 0.9])
def test_a_model_whose_pass_in_slots_is_another_is_refused(target, tmp_path, monkeypatch, change):
    def wrong(*args, **kwargs):
        return change(slot_attention(*args, **kwargs)[0]), None

    monkeypatch.setattr("driftlab.target.adapter.slot_attention", wrong)
    with pytest.raises(DriftlabError, match=r"LlamaForCausalLM decoded in slots differs .*target\.self_prompts\(\)"):
        record(target, tmp_path / "r")
    assert not list((tmp_path / "r").glob("piece-*"))


def test_an_ordinary_pass_that_is_not_finite_is_no_match(target, whole, monkeypatch):
    plain = target.adapter.hidden
    continuous._check_same_pass(target.adapter, whole[0], target.aux_layers)
    monkeypatch.setattr(target.adapter, "hidden", lambda tokens: plain(tokens) * torch.nan)
    with pytest.raises(DriftlabError, match="differs from its ordinary pass: a state .last"):
        continuous._check_same_pass(target.adapter, whole[0], target.aux_layers)


def test_aux_states_are_compared_too(target, whole):
    shifted = dataclasses.replace(whole[0], aux=whole[0].aux.roll(1, 0))
    with pytest.raises(DriftlabError, match="differs from its ordinary pass: a state .aux"):
        continuous._check_same_pass(target.adapter, shifted, target.aux_layers)


def test_learned_sinks_and_soft_caps_are_not_dropped_silently():
    x = torch.zeros(1, 2, 1, 4)
    for kwargs in ({"s_aux": torch.zeros(2)}, {"softcap": 50.0}):
        with pytest.raises(DriftlabError, match="learned sinks or soft-capped scores"):
            slot_attention(torch.nn.Identity(), x, x, x, torch.zeros(1, 1, 1, 1), **kwargs)


def test_a_head_that_does_more_than_one_projection_is_refused(tmp_path):
    target = chat_target()
    target.adapter.model.lm_head.bias = torch.nn.Parameter(torch.linspace(-3, 3, VOCAB), requires_grad=False)
    with pytest.raises(DriftlabError, match="cannot be a target yet"):
        record(target, tmp_path / "r")


def test_a_state_that_is_not_finite_is_named_and_the_rest_is_kept(whole, tmp_path):
    """All tokens but the template's overflow once the first piece is done; repaired, the recording goes on."""
    target = chat_target()
    record(target, tmp_path / "r", PIECE)
    embed = target.adapter.model.model.embed_tokens.weight
    intact = embed.clone()
    embed[[token for token in range(VOCAB) if token not in {*PREFIX, *SUFFIX}]] = torch.inf
    named = r"'self-0-0000(0[89]|1\d)', token \d+, layer 0: the target's state is not finite; finished pieces are kept"
    with pytest.raises(DriftlabError, match=named):
        record(target, tmp_path / "r")
    embed.copy_(intact)
    assert_same_states(record(target, tmp_path / "r"), whole)


def test_a_state_too_large_for_what_it_is_stored_as_is_refused(tmp_path):
    target = chat_target()
    target.adapter.model.model.embed_tokens.weight.mul_(1e6)
    with pytest.raises(DriftlabError, match=r"'self-0-00000\d', token 0, layer 0: .* is not finite"):
        record(target, tmp_path / "r", store_dtype=torch.float16)


def test_logits_that_are_not_finite_are_not_taken_for_a_message_without_end(target, tmp_path, monkeypatch):
    monkeypatch.setattr(target.adapter, "logits", lambda last: torch.full((*last.shape[:-1], VOCAB), torch.nan))
    with pytest.raises(DriftlabError, match="conversation 0: the target's logits are not finite"):
        record(target, tmp_path / "r")


def test_a_hooked_target_is_warned_about(tmp_path):
    target = chat_target()
    target.adapter.model.model.layers[2].register_forward_hook(lambda m, args, out: out)
    with pytest.warns(UserWarning, match="the target has forward hooks"):
        record(target, tmp_path / "r", PIECE)
    target._source = continuous.Source("tiny", torch.float32, None, False)
    with pytest.raises(DriftlabError, match="without hooks: pass processes=1"):
        record(target, tmp_path / "other", processes=2)


# ---- a saved model: processes and the command line

TEMPLATE = (
    "{% for m in messages %}<s>the {{ m['role'] }} {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>bot {% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny chat model whose next token is anything, saved as anyone saves them."""
    path = tmp_path_factory.mktemp("models") / "tiny-chat"
    model = tiny_model("Llama")
    model.lm_head.weight.mul_(0.01)
    model.save_pretrained(path)
    tokenizer = tiny_fast_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


def test_processes_make_the_same_conversations(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(continuous, "PIECE", REAL_PIECE)  # the other processes do not know ours
    loaded, seen = Target.load(str(folder), aux_layers=(1, 3, 5)), []
    args = {"count": 2 * REAL_PIECE, "user_tokens": 20, "user_temperature": 1.0, "slots": 40}
    two = record(loaded, tmp_path / "two", processes=2, progress=lambda *step: seen.append(step), **args)
    assert seen[-1] == ("self-prompts", 64, 64)
    assert_same_states(two, record(loaded, tmp_path / "one", processes=1, **args))


def test_a_target_that_changed_on_disk_is_not_mixed_in(folder, tmp_path, monkeypatch):
    copy = shutil.copytree(folder, tmp_path / "copy")
    loaded = Target.load(str(copy), aux_layers=(1, 3, 5))
    tensors = load_file(copy / "model.safetensors")
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})

    def here(function, jobs, **_):
        for job in jobs:
            function(*job, lambda done, total: None)

    monkeypatch.setattr(continuous, "run_jobs", here)
    with pytest.raises(DriftlabError, match=r"loaded again, is not the one in use .*pass processes=1"):
        record(loaded, tmp_path / "r", processes=2)
    assert not list((tmp_path / "r").glob("piece-*"))


def run_main(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["driftlab", *map(str, arguments)])
    cli.main()


def test_the_command_line_records_self_prompts(folder, tmp_path, monkeypatch, capsys):
    arguments = ("--target", folder, "--aux-layers", 1, 3, 5, "--max-new-tokens", 6, "--self-prompts", PIECE)
    run_main(monkeypatch, "record", tmp_path / "r", *arguments)
    trajectory = Trajectory.open(tmp_path / "r")
    assert (len(trajectory), trajectory[0].aux.dtype) == (PIECE, torch.bfloat16)
    assert (trajectory.settings["prompts"], trajectory.settings["max_new_tokens"]) == ("self", 6)
    assert f"{PIECE} sequences, {trajectory.answer_tokens} answer tokens" in capsys.readouterr().out
    for more in (("--prompts", "other.jsonl"), ("--limit", 3), ("--no-template",)):
        with pytest.raises(SystemExit) as stopped:
            run_main(monkeypatch, "record", tmp_path / "other", *arguments, *more)
        assert stopped.value.code == 2
        assert "--self-prompts makes its own prompts" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
