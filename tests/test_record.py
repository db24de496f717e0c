"""The recorded target pass: what is in it, that it survives every interruption bit for bit, and what it refuses."""

import itertools
import json
import subprocess
import sys

import pytest
import torch
from conftest import BOS, EOS, VOCAB, TinyTokenizer, tiny_fast_tokenizer, tiny_model
from safetensors import SafetensorError, safe_open
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
    simulate,
    train,
)
from driftlab.pieces import piece_path
from driftlab.recorded import TargetHead

PROMPTS = ["hello world", "abc", "q", "another longer prompt here", "to be", "hello world"]
LIMIT = 12


def record(target, out, prompts=PROMPTS, **kwargs):
    return target.record(prompts, **{"max_new_tokens": LIMIT, "template": False, "out": out, "piece_size": 2, **kwargs})


def texts(trajectory):
    return [trajectory.tokens(i).tolist() for i in range(len(trajectory))]


def files(folder):
    """Every file's bytes; of trajectory.json all but the provenance, which holds the time."""
    content = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".safetensors"}
    values = json.loads((folder / "trajectory.json").read_text())
    return {**content, "trajectory.json": {k: v for k, v in values.items() if k != "provenance"}}


@pytest.fixture(scope="module")
def whole(varied_target, tmp_path_factory):
    """Six prompts in three pieces, recorded without interruption; two prompts are the same."""
    return record(varied_target, tmp_path_factory.mktemp("whole") / "recording", temperature=1.0)


@pytest.fixture
def forwards(varied_target, monkeypatch):
    """The token tensors of the target's forward passes, as they come."""
    seen, hidden = [], varied_target.adapter.hidden
    monkeypatch.setattr(varied_target.adapter, "hidden", lambda t, **kwargs: (seen.append(t), hidden(t, **kwargs))[1])
    return seen


# ---- what is recorded


@pytest.mark.parametrize("family", ["Qwen3", "Mistral", "GptOss", "DeepseekV3"])
def test_tokens_states_and_lse_are_those_of_one_plain_pass(family, tmp_path):
    """The text is the teacher-forced arg max; aux[i] is HF's state k at the same position; lse is the model's."""
    model = tiny_model(family)
    trajectory = record(Target(model, TinyTokenizer(), name=family, aux_layers=(0, 3, 6)), tmp_path / "r")
    assert [r.prompt_length for r in trajectory] == [1 + len(prompt) for prompt in PROMPTS]
    for recorded, prompt in zip(trajectory, PROMPTS, strict=True):
        assert recorded.tokens[: recorded.prompt_length].tolist() == [BOS, *TinyTokenizer()(prompt, False)["input_ids"]]
        with torch.no_grad():
            own = model(recorded.tokens[None], output_hidden_states=True, use_cache=False)
        for i, k in enumerate(trajectory.aux_layers):
            torch.testing.assert_close(recorded.aux[:, i], own.hidden_states[k][0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(recorded.last_hidden, own.hidden_states[-1][0], rtol=1e-4, atol=1e-4)
        first = recorded.prompt_length - 1
        assert recorded.lse[:first].isnan().all()
        torch.testing.assert_close(recorded.lse[first:], own.logits[0, first:].logsumexp(-1), rtol=1e-5, atol=1e-4)
        said = trajectory.head.logits(recorded.last_hidden).argmax(-1)
        assert torch.equal(said[first:-1], recorded.tokens[first + 1 :])
        assert torch.equal(own.logits[0].argmax(-1)[first:-1], recorded.tokens[first + 1 :])
        answer = recorded.tokens[recorded.prompt_length :].tolist()
        assert recorded.finish == ("stop" if answer[-1] == EOS else "length")
        assert EOS not in answer[:-1]
        assert len(answer) == LIMIT or recorded.finish == "stop"


def test_an_eos_ends_the_text_and_is_its_last_token(tmp_path):
    model = tiny_model("Llama")
    free = texts(record(Target(model, TinyTokenizer(), aux_layers=(1,)), tmp_path / "free"))
    stop = free[3][len(PROMPTS[3]) + 1 + 4]
    model.generation_config.eos_token_id = [EOS, stop]
    stopped = record(Target(model, TinyTokenizer(), aux_layers=(1,)), tmp_path / "stopped")
    assert "stop" in {entry.finish for entry in stopped.entries}
    for text, entry, plain in zip(texts(stopped), stopped.entries, free, strict=True):
        answer = plain[entry.prompt_length :]
        end = answer.index(stop) + 1 if stop in answer else LIMIT
        assert text == plain[: entry.prompt_length + end]
        assert entry.finish == ("stop" if stop in answer else "length")


def test_settings_spec_and_sinks_are_written_with_it(whole, varied_target):
    assert whole.settings == {
        **{"max_new_tokens": LIMIT, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 0, "template": "none"},
        **{"answers": "target", "target_dtype": "float32", "store_dtype": "float32"},
    }
    assert whole.spec == varied_target.spec
    assert whole.aux_layers == (1, 3, 5)
    written = json.loads((whole.path / "trajectory.json").read_text())
    assert written["provenance"]["settings"] == whole.settings
    assert str(whole.path.parent) not in json.dumps(written)


def test_the_sink_is_the_position_with_the_largest_mass(whole, varied_target):
    report = whole.sink_report
    shared = min(entry.prompt_length for entry in whole.entries) - 1
    assert (report["found"], report["sequences"], report["searched_positions"]) == (True, 6, shared)
    masses = []
    for recorded in whole:
        layers = varied_target.adapter.position_mass(recorded.tokens[None], recorded.prompt_length - 1).values()
        masses.append(torch.stack([mass[:shared] for mass in layers]).mean(0))
    mean = torch.stack(masses).mean(0)
    assert whole.sinks == (int(mean.argmax()),)
    assert report["top"][0]["mass"] == pytest.approx(float(mean.max()), rel=1e-4)
    assert sum(report["by_layer"].values()) / 7 == pytest.approx(float(mean.max()), rel=1e-4)


def test_the_sink_is_searched_where_all_prompts_have_a_token_of_their_own(varied_target, tmp_path, monkeypatch):
    """Mass at positions that only some prompts reach, or that belong to the answers, is no sink of the target."""

    def planted(tokens, first_query, seen_by_all):
        mass = torch.full((tokens.shape[1],), 0.01)
        mass[2], mass[first_query] = 0.3, 0.6
        return {0: mass, 5: mass.flip(0) * 0 + 0.02}

    monkeypatch.setattr(varied_target.adapter, "position_mass", planted)
    trajectory = record(varied_target, tmp_path / "r", ["hello world", "abcdef", "another one"])
    assert trajectory.sinks == (2,)
    assert trajectory.sink_report["top"][0]["mass"] == pytest.approx(0.16)
    assert trajectory.sink_report["by_layer"] == {"0": pytest.approx(0.3), "5": pytest.approx(0.02)}
    assert trajectory.batch([0]).sinks == (2,)


def test_learned_sinks_are_reported_as_not_found_with_the_reason(tmp_path):
    target = Target(tiny_model("GptOss"), TinyTokenizer(), aux_layers=(1,))
    trajectory = record(target, tmp_path / "r")
    assert trajectory.sinks == (0,)
    assert trajectory.sink_report["found"] is False
    assert "learned sinks" in trajectory.sink_report["reason"]
    assert len(trajectory) == len(PROMPTS)


# ---- what does not matter


@pytest.mark.parametrize("kwargs", [{}, {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "seed": 5}])
def test_piece_size_changes_no_text(varied_target, tmp_path, kwargs):
    recordings = [record(varied_target, tmp_path / f"{n}", piece_size=n, **kwargs) for n in (1, 4, 99)]
    assert [len(list((tmp_path / f"{n}").glob("piece-*"))) for n in (1, 4, 99)] == [6, 2, 1]
    for other in recordings[1:]:
        assert texts(other) == texts(recordings[0])
        assert [e.finish for e in other.entries] == [e.finish for e in recordings[0].entries]
        assert other.sinks == recordings[0].sinks
        for a, b in zip(other, recordings[0], strict=True):
            torch.testing.assert_close(a.aux, b.aux, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(a.last_hidden, b.last_hidden, rtol=1e-4, atol=1e-4)


def test_copies_of_a_prompt_are_sampled_apart_across_pieces(whole):
    assert PROMPTS[0] == PROMPTS[5]
    assert whole.tokens(0).tolist() != whole.tokens(5).tolist()


def test_the_seed_is_what_changes_a_sampled_recording(whole, varied_target, tmp_path):
    again = record(varied_target, tmp_path / "again", temperature=1.0)
    other = record(varied_target, tmp_path / "other", temperature=1.0, seed=1)
    assert files(again.path) == files(whole.path)
    assert texts(other) != texts(whole)


# ---- interrupted


class Stop(Exception):
    pass


def stop_at(calls):
    """A progress callback that raises at its n-th call."""
    count = itertools.count(1)

    def progress(what, done, total):
        if next(count) == calls:
            raise Stop

    return progress


def test_stopped_at_any_report_it_goes_on_to_the_same_bits(whole, varied_target, tmp_path):
    stopped = 0
    for calls in itertools.count(1):
        out = tmp_path / f"{calls}"
        try:
            record(varied_target, out, temperature=1.0, progress=stop_at(calls))
            break
        except Stop:
            stopped += 1
        with pytest.raises(DriftlabError, match="run the same record command again"):
            Trajectory.open(out)
        record(varied_target, out, temperature=1.0)
        assert files(out) == files(whole.path), calls
    assert stopped >= 7  # at the beginning, and at least twice for each of three pieces


def test_it_goes_on_with_the_piece_size_it_began_with(whole, varied_target, tmp_path):
    with pytest.raises(Stop):
        record(varied_target, tmp_path / "r", temperature=1.0, progress=stop_at(4))
    assert 0 < len(list((tmp_path / "r").glob("piece-*"))) < 3
    record(varied_target, tmp_path / "r", temperature=1.0, piece_size=4)
    assert files(tmp_path / "r") == files(whole.path)


def test_killed_at_any_piece_it_goes_on_to_the_same_bits(tmp_path):
    """kill -9, in processes of their own; the model comes from a folder, as it would after a crash."""
    tiny_model("Llama").save_pretrained(tmp_path / "model")
    tiny_fast_tokenizer().save_pretrained(tmp_path / "model")
    code = """
import os, signal, sys
from driftlab import Target
folder, prompts, kwargs = sys.argv[1], sys.argv[2].split("|"), dict(temperature=1.0, max_new_tokens=12, template=False)
import torch, transformers, driftlab.files
def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)
for point in (0, 3, "writing"):
    child = os.fork()
    if not child:
        torch.set_num_threads(1)
        def progress(what, done, total):
            if done == point:
                die()
            if point == "writing" and done == 2:
                driftlab.files.os.replace = die
        target = Target.load(folder + "/model", aux_layers=(1, 3, 5))
        target.record(prompts, out=f"{folder}/killed-{point}", piece_size=2, progress=progress, **kwargs)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL, point
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), "|".join(PROMPTS)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    target = Target.load(str(tmp_path / "model"), aux_layers=(1, 3, 5))
    uninterrupted = record(target, tmp_path / "whole", temperature=1.0)
    for point, pieces in ((0, 0), (3, 1), ("writing", 1)):
        out = tmp_path / f"killed-{point}"
        assert len(list(out.glob("piece-*"))) == pieces
        assert len(list(out.glob(".piece-*.tmp"))) == (point == "writing")
        record(target, out, temperature=1.0)
        assert files(out) == files(uninterrupted.path), point
        assert not list(out.glob(".*.tmp"))


def rewrite(path, change):
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    change(tensors, metadata)
    save_file(tensors, path, metadata=metadata)


@pytest.mark.parametrize(
    ("damage", "finished"),
    [("delete", True), ("delete", False), ("truncate", True), ("truncate", False), ("empty", True), ("foreign", True)],
)
def test_a_damaged_piece_is_made_again_and_only_that(whole, varied_target, tmp_path, forwards, damage, finished):
    out = tmp_path / "r"
    record(varied_target, out, temperature=1.0)
    path = piece_path(out, 1)
    if damage == "delete":
        path.unlink()
    elif damage == "truncate":
        path.write_bytes(path.read_bytes()[:-7])
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        rewrite(path, lambda tensors, metadata: metadata.update(fingerprint="another"))
    if not finished:
        (out / "trajectory.json").unlink()
    others = {number: piece_path(out, number).stat().st_mtime_ns for number in (0, 2)}
    forwards.clear()
    record(varied_target, out, temperature=1.0)
    assert files(out) == files(whole.path)
    assert others == {number: piece_path(out, number).stat().st_mtime_ns for number in (0, 2)}
    assert max(len(tokens) for tokens in forwards) <= 2


def test_a_finished_recording_is_opened_without_the_model(varied_target, tmp_path, forwards):
    first = record(varied_target, tmp_path / "r")
    forwards.clear()
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "r").iterdir()}
    again = record(varied_target, tmp_path / "r", piece_size=5)  # piece size is that of the first call
    assert not forwards
    assert texts(again) == texts(first)
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "r").iterdir()} == before


def test_the_default_folder_is_named_by_content(varied_target, tmp_path, monkeypatch):
    monkeypatch.setenv("DRIFTLAB_CACHE", str(tmp_path))
    a, b = (record(varied_target, None, ["abc"], seed=seed, temperature=1.0).path for seed in (0, 1))
    assert a.parent == b.parent == tmp_path / "recordings"
    assert a != b
    assert record(varied_target, None, ["abc"], temperature=1.0, piece_size=7).path == a


def test_progress_only_rises_and_ends_at_the_total(varied_target, tmp_path):
    told = []
    record(varied_target, tmp_path / "r", progress=lambda *args: told.append(args))
    assert {(what, total) for what, _, total in told} == {("recording", len(PROMPTS))}
    done = [d for _, d, _ in told]
    assert done == sorted(done)
    assert (done[0], done[-1]) == (0, len(PROMPTS))


# ---- refused


@pytest.mark.parametrize(
    ("kwargs", "told"),
    [
        ({"max_new_tokens": 5}, "max_new_tokens: 12 there, 5 asked"),
        ({"temperature": 0.0}, "temperature: 1.0 there, 0.0 asked"),
        ({"seed": 3}, "seed: 0 there, 3 asked"),
        ({"top_k": 4, "top_p": 0.5}, "top_k: 0 there, 4 asked, top_p: 1.0 there, 0.5 asked"),
        ({"store_dtype": torch.bfloat16}, "store_dtype: float32 there, bfloat16 asked"),
        ({"prompts": ["abc"]}, "prompts: 6 there, 1 asked"),
        ({"prompts": [*PROMPTS[:5], "other"]}, "other prompts, answers or weights"),
        ({"answers": ["a"] * 6}, "answers: target there, given asked"),
    ],
)
def test_a_folder_with_another_recording_is_refused_and_left_alone(varied_target, whole, kwargs, told):
    before = files(whole.path)
    with pytest.raises(DriftlabError, match=f"holds another recording .*{told}.*choose another folder"):
        record(varied_target, whole.path, **{"temperature": 1.0, **kwargs})
    assert files(whole.path) == before


def test_another_target_or_other_layers_are_named(varied_target, tmp_path):
    record(varied_target, tmp_path / "r", ["abc"])
    layers = Target(tiny_model("Llama"), TinyTokenizer(), name="varied", aux_layers=(1, 3))
    weights = Target(tiny_model("Llama", seed=1), TinyTokenizer(), name="varied", aux_layers=(1, 3, 5))
    with pytest.raises(DriftlabError, match=r"aux_layers: \[1, 3, 5\] there, \[1, 3\] asked"):
        record(layers, tmp_path / "r", ["abc"])
    with pytest.raises(DriftlabError, match="other prompts, answers or weights"):
        record(weights, tmp_path / "r", ["abc"])


class NoBos(TinyTokenizer):
    bos_token_id = None

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [] if text == "☃" else super().__call__(text, False)["input_ids"]}


@pytest.mark.parametrize(
    ("kwargs", "told"),
    [
        ({"prompts": ["abc", "x" * 250]}, r"prompt 'prompts:2' has 251 tokens; with 12 new ones .*256 positions"),
        ({"prompts": ["abc", "☃"]}, "prompt 'prompts:2' gives no token"),
        ({"prompts": []}, "prompt"),
        ({"max_new_tokens": 0}, "max_new_tokens 0"),
        ({"piece_size": 0}, "piece_size 0"),
        ({"answers": ["a"]}, "1 answers for 6 prompts"),
        ({"answers": ["a", "b", "", "d", "e", "f"]}, "the answer to prompt 'prompts:3' is empty"),
        ({"temperature": -1.0}, "temperature"),
    ],
)
def test_what_cannot_be_recorded_is_refused_before_anything_is_written(tmp_path, kwargs, told):
    tokenizer = NoBos() if "☃" in kwargs.get("prompts", ()) else TinyTokenizer()
    target = Target(tiny_model("Llama"), tokenizer, aux_layers=(1,))
    with pytest.raises(DriftlabError, match=told):
        record(target, tmp_path / "sub" / "r", **kwargs)
    assert not (tmp_path / "sub").exists()


def test_the_longest_prompt_that_fits_is_recorded(varied_target, tmp_path):
    trajectory = record(varied_target, tmp_path / "r", ["x" * (255 - LIMIT)])
    assert trajectory.entries[0].length == 256


def version(folder, where):
    if where == "trajectory.json":
        values = json.loads((folder / where).read_text())
        (folder / where).write_text(json.dumps({**values, "format_version": 99}))
    else:
        path = piece_path(folder, 1) if where == "piece" else next(folder.parent.glob("head-*"))
        rewrite(path, lambda tensors, metadata: metadata.update(driftlab_format_version="99"))


@pytest.mark.parametrize("where", ["trajectory.json", "piece", "head"])
def test_an_unknown_format_version_is_refused_by_number(varied_target, tmp_path, where):
    record(varied_target, tmp_path / "r")
    version(tmp_path / "r", where)
    with pytest.raises(DriftlabError, match=f"{where}.* has trajectory format version 99; this driftlab reads 1"):
        _ = Trajectory.open(tmp_path / "r").head


def test_a_file_without_a_version_is_refused(varied_target, tmp_path):
    record(varied_target, tmp_path / "r")
    save_file(load_file(piece_path(tmp_path / "r", 0)), piece_path(tmp_path / "r", 0))
    with pytest.raises(DriftlabError, match="format version None"):
        Trajectory.open(tmp_path / "r")


def test_what_is_not_a_whole_recording_says_so(varied_target, tmp_path):
    with pytest.raises(DriftlabError, match="nowhere is not a recording"):
        Trajectory.open(tmp_path / "nowhere")
    record(varied_target, tmp_path / "r")
    (tmp_path / "r" / "trajectory.json").rename(tmp_path / "r" / "kept")
    with pytest.raises(DriftlabError, match="holds 3 pieces of an unfinished recording: run the same record command"):
        Trajectory.open(tmp_path / "r")
    (tmp_path / "r" / "kept").rename(tmp_path / "r" / "trajectory.json")
    piece_path(tmp_path / "r", 2).unlink()
    with pytest.raises(DriftlabError, match="piece-00002.safetensors does not exist"):
        Trajectory.open(tmp_path / "r")
    (tmp_path / "r" / "trajectory.json").write_text("{")
    with pytest.raises(DriftlabError, match="not valid JSON"):
        Trajectory.open(tmp_path / "r")


# ---- states that are not finite, and a disk that is full


def test_a_state_that_is_not_finite_is_named_and_the_rest_is_kept(whole, tmp_path):
    """J3. One token, which stands in the fourth prompt alone, overflows; repaired, the recording goes on."""
    model = tiny_model("Llama")
    target = Target(model, TinyTokenizer(), name="tiny", aux_layers=(0, 3, 5))
    prompts = ["hello world", "abc", "q", "the quick brown fox jumps", "to be", "end"]
    for kwargs in ({}, {"temperature": 1.0}):
        clean = record(target, tmp_path / f"clean{len(kwargs)}", prompts, **kwargs)
        text = clean.tokens(3).tolist()
        elsewhere = {token for i in (0, 1, 2) for token in texts(clean)[i]} | set(text[len(prompts[3]) + 1 :])
        place, token = next((i, token) for i, token in enumerate(text) if token not in elsewhere)
        out = tmp_path / f"r{len(kwargs)}"
        intact = model.model.embed_tokens.weight[token].clone()
        model.model.embed_tokens.weight[token] = torch.inf
        named = f"'prompts:4', token {place}, layer 0: the target's state is not finite"
        with pytest.raises(DriftlabError, match=named) as told:
            record(target, out, prompts, **kwargs)
        assert "finished pieces are kept" in str(told.value)
        assert [path.name for path in sorted(out.glob("piece-*"))] == ["piece-00000.safetensors"]
        kept = piece_path(out, 0).stat().st_mtime_ns
        model.model.embed_tokens.weight[token] = intact
        record(target, out, prompts, **kwargs)
        assert piece_path(out, 0).stat().st_mtime_ns == kept
        assert files(out) == files(clean.path)


@pytest.mark.filterwarnings("ignore:the target has forward hooks")
def test_a_layer_that_overflows_is_named(tmp_path):
    model = tiny_model("Llama")
    target = Target(model, TinyTokenizer(), aux_layers=(1, 3, 5))
    spoil = model.model.layers[2].register_forward_hook(
        lambda m, args, out: out.index_fill(1, torch.tensor(2), torch.nan)
    )
    with pytest.raises(DriftlabError, match="'prompts:1', token 2, layer 3: the target's state"):
        record(target, tmp_path / "r", ["abc"], answers=["xyz"])
    spoil.remove()
    model.model.norm.register_forward_hook(lambda m, args, out: out.index_fill(1, torch.tensor(3), torch.nan))
    with pytest.raises(DriftlabError, match="'prompts:1', token 3, last hidden: the target's state"):
        record(target, tmp_path / "r", ["abc"], answers=["xyz"])


def test_a_state_too_large_for_what_it_is_stored_as_is_named(tmp_path):
    model = tiny_model("Llama")
    model.model.embed_tokens.weight.mul_(1e6)
    target = Target(model, TinyTokenizer(), aux_layers=(2, 4))
    with pytest.raises(
        DriftlabError, match="'prompts:1', token 0, layer 2: that state stored as float16 is not finite"
    ):
        record(target, tmp_path / "r", ["abc"], store_dtype=torch.float16)
    record(target, tmp_path / "wide", ["abc"])


def test_the_last_hidden_state_is_not_held_to_the_dtype_of_the_others(tmp_path):
    """It is stored as float32, whatever the aux states are stored as."""
    model = tiny_model("Llama")
    model.model.norm.weight.mul_(1e6)
    model.lm_head.weight.mul_(1e-6)
    target = Target(model, TinyTokenizer(), aux_layers=(2, 4))
    trajectory = record(target, tmp_path / "r", ["abc"], store_dtype=torch.float16)
    assert trajectory[0].last_hidden.abs().max() > 65504
    assert trajectory[0].last_hidden.isfinite().all()


@pytest.mark.parametrize("piece", [0, 1])
def test_a_full_disk_is_explained_and_the_recording_goes_on(whole, varied_target, tmp_path, monkeypatch, piece):
    written = itertools.count()

    def full(tensors, path, metadata=None):
        if "aux" in tensors and next(written) == piece:
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        save_file(tensors, path, metadata=metadata)

    monkeypatch.setattr("driftlab.pieces.save_file", full)
    out = tmp_path / "r"
    with pytest.raises(DriftlabError, match=f"no space left while writing .*piece-0000{piece}.*run the same command"):
        record(varied_target, out, temperature=1.0)
    assert len(list(out.glob("piece-*"))) == piece
    assert not list(out.glob(".*.tmp"))
    record(varied_target, out, temperature=1.0)
    assert files(out) == files(whole.path)


# ---- given answers


def test_given_answers_are_recorded_as_they_are(varied_target, tmp_path, forwards):
    answers = ["yes", "no no", "m", "a long answer that is cut", "x", "y"]
    trajectory = record(varied_target, tmp_path / "r", answers=answers)
    assert trajectory.settings["answers"] == "given"
    for recorded, prompt, answer in zip(trajectory, PROMPTS, answers, strict=True):
        ids = TinyTokenizer()(answer, False)["input_ids"][:LIMIT]
        assert recorded.tokens.tolist() == [*TinyTokenizer()(prompt)["input_ids"], *ids]
        assert (recorded.prompt_length, recorded.finish) == (len(prompt) + 1, "length")
        model = varied_target.adapter.model(recorded.tokens[None], use_cache=False).logits[0]
        first = recorded.prompt_length - 1
        torch.testing.assert_close(recorded.lse[first:], model[first:].logsumexp(-1), rtol=1e-5, atol=1e-4)
    assert all(tokens.shape[1] > 1 for tokens in forwards)  # nothing was generated


class EosTokenizer(TinyTokenizer):
    def __call__(self, text, add_special_tokens=True):
        ids = super().__call__(text, add_special_tokens)["input_ids"]
        return {
            "input_ids": [
                EOS if i == super(EosTokenizer, self).__call__("!", False)["input_ids"][0] else i for i in ids
            ]
        }


def test_a_given_answer_ends_at_its_first_eos(tmp_path):
    """H11: a decoder would not go on, so nothing behind it may be counted."""
    target = Target(tiny_model("Llama"), EosTokenizer(), aux_layers=(1,))
    trajectory = record(target, tmp_path / "r", ["abc", "d", "e"], answers=["yes!", "on!e!", "none"])
    answers = [r.tokens[r.prompt_length :].tolist() for r in trajectory]
    assert [len(a) for a in answers] == [4, 3, 4]
    assert [a[-1] == EOS for a in answers] == [True, True, False]
    assert [r.finish for r in trajectory] == ["stop", "stop", "length"]


# ---- reading


def test_a_recording_is_read_without_writing(whole, tmp_path):
    folder = whole.path
    before = {path.name: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}
    folder.chmod(0o555)
    try:
        opened = Trajectory.open(str(folder))
        assert texts(opened) == texts(whole)
        assert opened.head.embed.shape == (VOCAB, 32)
        assert len(list(opened.batches(40))) > 1
    finally:
        folder.chmod(0o755)
    assert {path.name: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")} == before


def test_a_folder_moved_without_its_head_file_says_what_belongs_together(varied_target, tmp_path):
    record(varied_target, tmp_path / "r", ["abc"])
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "r").rename(tmp_path / "elsewhere" / "r")
    moved = Trajectory.open(tmp_path / "elsewhere" / "r")
    assert moved[0].prompt_length == 4
    with pytest.raises(DriftlabError, match="head-.*does not exist.*keep folder and head file together"):
        _ = moved.head
    assert record(varied_target, tmp_path / "elsewhere" / "r", ["abc"]).head.lm_head.shape == (VOCAB, 32)


def test_lse_is_that_of_the_full_precision_logits_also_of_a_half_precision_target(tmp_path, monkeypatch):
    """So that probabilities made from the file sum to one; in blocks of the vocabulary as in one."""
    model = tiny_model("Llama")
    model.lm_head.weight.mul_(10)  # logits of 40, as real targets have: bfloat16 rounds them to eighths
    trajectory = record(Target(model.bfloat16(), TinyTokenizer(), aux_layers=(1,)), tmp_path / "r", ["abc"])
    recorded, head = trajectory[0], trajectory.head
    first = recorded.prompt_length - 1
    assert head.lm_head.dtype == torch.bfloat16
    p = (head.logits(recorded.last_hidden[first:]) - recorded.lse[first:, None]).exp()
    torch.testing.assert_close(p.sum(-1), torch.ones(len(p)), rtol=0, atol=1e-4)
    monkeypatch.setattr("driftlab.recorded._VOCAB_BLOCK", 7)
    torch.testing.assert_close(head.lse(recorded.last_hidden[first:]), recorded.lse[first:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_round_trips_and_a_tied_one_is_written_once(tmp_path, tied):
    embed = torch.randn(VOCAB, 32)
    head = TargetHead(embed, embed if tied else torch.randn(VOCAB, 32), torch.rand(32))
    head.save(tmp_path / "head.safetensors")
    assert ("lm_head" in load_file(tmp_path / "head.safetensors")) is not tied
    loaded = TargetHead.load(tmp_path / "head.safetensors")
    for name in ("embed", "lm_head", "norm_weight"):
        assert torch.equal(getattr(loaded, name), getattr(head, name))


def test_sequences_batches_and_views_hold_the_same_numbers(whole):
    assert len(whole) == len(list(whole)) == len(PROMPTS)
    assert [r.id for r in whole] == [f"prompts:{i}" for i in range(1, 7)]
    assert whole.answer_tokens == sum(len(r.tokens) - r.prompt_length for r in whole)
    view = whole.subset([4, 1])
    assert texts(view) == [texts(whole)[4], texts(whole)[1]]
    assert view.head is whole.head
    batch = view.batch([1, 0])
    assert batch.ids == ("prompts:2", "prompts:5")
    assert whole.with_sinks([1]).batch([0]).sinks == (1,)
    for sinks in ([], [-1], [999]):  # a sink that is not there would get a mass of 0
        with pytest.raises(DriftlabError, match="give one or more positions"):
            whole.with_sinks(sinks)
    for row, recorded in enumerate((whole[1], whole[4])):
        length = len(recorded.tokens)
        assert (int(batch.lengths[row]), int(batch.prompt_lengths[row])) == (length, recorded.prompt_length)
        assert batch.finish[row] == recorded.finish
        for name in ("tokens", "aux", "last_hidden"):
            value = getattr(batch, name)[row]
            assert torch.equal(value[:length], getattr(recorded, name))
            assert not value[length:].any()
        first = recorded.prompt_length - 1
        assert torch.equal(batch.lse[row, first:length], recorded.lse[first:])
        assert batch.lse[row, length:].isnan().all()
        assert batch.valid[row].tolist() == [i < length for i in range(batch.tokens.shape[1])]


@pytest.mark.parametrize("max_tokens", [1, 40, 60, 10_000])
def test_batches_hold_every_sequence_once_in_order_and_are_no_larger_than_asked(whole, max_tokens):
    batches = list(whole.batches(max_tokens))
    assert [name for batch in batches for name in batch.ids] == [entry.id for entry in whole.entries]
    assert all(batch.tokens.numel() <= max_tokens or len(batch) == 1 for batch in batches)
    sizes = [len(batch) for batch in batches]
    assert sizes == {1: [1] * 6, 10_000: [6]}.get(max_tokens, sizes)
    for batch, following in itertools.pairwise(batches):
        longest = max(batch.tokens.shape[1], int(following.lengths[0]))
        assert longest * (len(batch) + 1) > max_tokens  # not smaller than need be


def test_a_batch_is_cast_without_its_lse(whole):
    cast = whole.batch([0, 1]).to("cpu", torch.float64)
    assert (cast.aux.dtype, cast.last_hidden.dtype, cast.lse.dtype) == (torch.float64, torch.float64, torch.float32)
    assert cast.tokens.dtype == torch.int64
    assert whole.batch([0]).to("cpu").aux.dtype == torch.float32


def test_half_precision_recordings_feed_a_full_precision_drafter(tmp_path):
    target = Target(tiny_model("Llama").bfloat16(), TinyTokenizer(), aux_layers=(1, 3, 5))
    trajectory = record(target, tmp_path / "r")
    recorded = trajectory[0]
    assert (recorded.aux.dtype, recorded.last_hidden.dtype, recorded.lse.dtype) == (
        *(torch.bfloat16, torch.float32, torch.float32),
    )
    assert (trajectory.settings["target_dtype"], trajectory.settings["store_dtype"]) == ("bfloat16", "bfloat16")
    drafter = Drafter(VARIANTS["eagle31"].for_target(trajectory), trajectory)
    assert drafter.fc.weight.dtype == torch.float32
    assert simulate(accept(all_starts(drafter, trajectory, 3), trajectory)).tau >= 1
    config = TrainConfig(ttt=2, batch_size=6, epochs=1.0)
    before = drafter.fc.weight.clone()
    train(drafter, trajectory, config, out=tmp_path / "d")
    assert not torch.equal(drafter.fc.weight, before)


def test_states_may_be_stored_smaller_than_they_are_computed(varied_target, tmp_path):
    full = record(varied_target, tmp_path / "full")
    half = record(varied_target, tmp_path / "half", store_dtype=torch.bfloat16)
    assert texts(half) == texts(full)
    for a, b in zip(half, full, strict=True):
        assert a.aux.dtype == torch.bfloat16
        assert torch.equal(a.aux, b.aux.bfloat16())
        assert torch.equal(a.last_hidden, b.last_hidden)
        assert torch.equal(a.lse.nan_to_num(), b.lse.nan_to_num())
    size = {name: piece_path(t.path, 0).stat().st_size for name, t in (("half", half), ("full", full))}
    assert size["half"] < size["full"]


def test_two_processes_would_not_write_at_once(varied_target, tmp_path, monkeypatch):
    """The folder's lock is held while pieces are written and released afterwards."""
    from filelock import FileLock, Timeout

    def progress(what, done, total):
        with pytest.raises(Timeout):
            FileLock(f"{tmp_path / 'r'}.lock").acquire(timeout=0)

    record(varied_target, tmp_path / "r", ["abc"], progress=progress)
    FileLock(f"{tmp_path / 'r'}.lock").acquire(timeout=0).lock.release()


def test_a_recording_without_a_key_says_which(varied_target, tmp_path):
    trajectory = varied_target.record(["abc"], max_new_tokens=4, template=False, out=tmp_path / "r")
    path = trajectory.path / "trajectory.json"
    values = json.loads(path.read_text())
    del values["fingerprint"]
    path.write_text(json.dumps(values))
    with pytest.raises(DriftlabError, match="trajectory.json has no fingerprint: record again"):
        Trajectory.open(trajectory.path)
