"""Opening checkpoints: what is found, read without its data, and refused in words."""

import builtins
import json
import pickle
import struct

import pytest
import torch
from safetensors.torch import save_file

CONFIG = {"hidden_size": 8}


def opened(path, **options):
    from driftlab.drafter.formats.files import open_checkpoint

    return open_checkpoint(path, **options)


def refused(path, *told, **options):
    """Open and check a checkpoint; it must be refused with every one of the words."""
    from driftlab import DriftlabError

    with pytest.raises(DriftlabError) as caught:
        opened(path, **options).shapes  # noqa: B018
    assert [words for words in told if words not in str(caught.value)] == [], str(caught.value)


def tensors_of(*names, seed=0, rows=4, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(rows, 3, generator=generator).to(dtype) for name in names}


def write(folder, tensors=None, name="model.safetensors", config=CONFIG):
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file(tensors, folder / name) if name.endswith(".safetensors") else torch.save(tensors, folder / name)
    return folder


def write_shards(folder, *shards, kind="safetensors", where=None, config=CONFIG):
    """Write tensors to files of their own, and an index."""
    stem, end = {"safetensors": ("model", "safetensors"), "bin": ("pytorch_model", "bin")}[kind]
    named = {f"{stem}-{i + 1:05}-of-{len(shards):05}.{end}": tensors for i, tensors in enumerate(shards)}
    for name, tensors in named.items():
        write(folder, tensors, name, config)
    weight_map = {tensor: name for name, tensors in named.items() for tensor in tensors} if where is None else where
    (folder / f"{stem}.{end}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder, list(named)


def same(raw, tensors):
    return raw.shapes == {name: tuple(tensor.shape) for name, tensor in tensors.items()} and all(
        torch.equal(raw.tensor(name), tensor) and raw.tensor(name).dtype == tensor.dtype
        for name, tensor in tensors.items()
    )


# ---- what is found


def test_every_kind_of_weights_gives_the_same_tensors(tmp_path):
    tensors = {
        **tensors_of("fc.weight", "norm.weight", dtype=torch.bfloat16),
        **{"d2t": torch.arange(5), "t2d": torch.tensor([True, False])},
    }
    first, second = {"fc.weight": tensors["fc.weight"]}, {k: v for k, v in tensors.items() if k != "fc.weight"}
    write(tmp_path / "whole", tensors)
    write_shards(tmp_path / "sharded", first, second)
    write(tmp_path / "bin", tensors, "pytorch_model.bin")
    write_shards(tmp_path / "shardedbin", first, second, kind="bin")
    write(tmp_path / "state", {"draft_state_dict": tensors, "global_step": 7, "run": {"a": [1]}}, "training_state.pt")
    torch.save(tensors, write(tmp_path / "old") / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    for name in ("whole", "sharded", "bin", "shardedbin", "state", "old"):
        raw = opened(tmp_path / name)
        assert same(raw, tensors), name
        assert (raw.path, raw.label, raw.config, raw.notes) == (tmp_path / name, str(tmp_path / name), CONFIG, [])
        assert set(raw.names) == set(tensors)
    assert opened(tmp_path / "sharded").files == (
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    )


def test_a_file_is_opened_with_the_config_beside_it(tmp_path):
    tensors = tensors_of("a")
    for name in ("drafter.safetensors", "drafter.bin", "state.pt"):
        folder = write(tmp_path / name.replace(".", "_"), tensors, name)
        raw = opened(folder / name)
        assert same(raw, tensors)
        assert (raw.label, raw.config, raw.files) == (str(folder / name), CONFIG, (name,))
    folder, _ = write_shards(tmp_path / "sharded", tensors_of("a"), tensors_of("b"))
    assert set(opened(folder / "model.safetensors.index.json").shapes) == {"a", "b"}


def test_the_first_kind_of_weights_is_read_and_the_others_are_named(tmp_path):
    write(tmp_path, tensors_of("a", seed=1), "pytorch_model.bin")
    write(tmp_path, tensors_of("a", seed=2), "training_state.pt")
    raw = opened(tmp_path)
    assert torch.equal(raw.tensor("a"), tensors_of("a", seed=1)["a"])
    assert [note for note in raw.notes if "pytorch_model.bin is read" in note and "training_state.pt" in note]
    write(tmp_path, tensors_of("a", seed=3))
    assert torch.equal(opened(tmp_path).tensor("a"), tensors_of("a", seed=3)["a"])
    index = {"weight_map": {"a": "model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert opened(tmp_path).files == ("model.safetensors",)


def test_shapes_are_read_without_the_data(tmp_path):
    """A header that promises 600 GB is opened at once: the data behind it is a hole in the file."""
    header = {f"layers.{i}.w": {"dtype": "BF16", "shape": [2**20, 2**13], "data_offsets": [0, 0]} for i in range(35)}
    size = 2**34
    for i, info in enumerate(header.values()):
        info["data_offsets"] = [i * size, (i + 1) * size]
    text = json.dumps(header).encode()
    write(tmp_path)
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + 35 * size)
    raw = opened(tmp_path)
    assert raw.shapes == dict.fromkeys(header, (2**20, 2**13))


def test_a_view_needs_only_the_shards_of_what_it_keeps(tmp_path):
    folder, files = write_shards(tmp_path, tensors_of("a", "b"), tensors_of("mtp.c", "mtp.d"), tensors_of("e"))
    (folder / files[0]).unlink()
    (folder / files[2]).write_bytes(b"no safetensors at all")
    view = opened(folder).only(lambda name: name.startswith("mtp."))
    assert same(view, tensors_of("mtp.c", "mtp.d"))
    assert view.files == (files[1],)
    assert set(view.only(lambda name: name.endswith("d")).shapes) == {"mtp.d"}
    refused(folder, files[0], "does not exist", "index")


def test_a_tensor_keeps_no_hold_on_its_file(tmp_path):
    """What safetensors returns is the mapped file: overwritten in place, it would change under the drafter."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        folder = write(tmp_path / name[:5], tensors_of("a"), name)
        read = opened(folder).tensor("a")
        length = (folder / name).stat().st_size
        with open(folder / name, "r+b") as file:
            file.write(b"\xff" * length)
        assert torch.equal(read, tensors_of("a")["a"])


# ---- what is missing


def test_what_is_not_there_is_named(tmp_path):
    refused(tmp_path / "nowhere", "nowhere", "does not exist", "hub id")
    refused(tmp_path / "x" / "model.safetensors", "does not exist")
    refused("runs/model.safetensors", "does not exist")
    refused(write(tmp_path / "a"), "no weights", "model.safetensors.index.json", "training_state.pt")
    refused(write(tmp_path / "b", tensors_of("a"), config=None), "config.json")
    refused(write(tmp_path / "b", tensors_of("a"), config=None) / "model.safetensors", "config.json")
    refused(write(tmp_path / "c", tensors_of("a"), "eagle.safetensors"), "eagle.safetensors", "path of that file")
    refused(write(tmp_path / "d", {}, "model.safetensors"), "holds no tensors")
    refused(write(tmp_path / "e", tensors_of("a")), "revision", "hub", revision="main")
    refused(tmp_path / "e" / "config.json", "give the folder")


def test_a_missing_config_is_empty_where_none_is_needed(tmp_path):
    raw = opened(write(tmp_path, tensors_of("a"), config=None), need_config=False)
    assert raw.config == {}
    assert same(raw, tensors_of("a"))


def test_a_shard_or_an_index_alone_is_refused(tmp_path):
    folder, files = write_shards(tmp_path / "a", tensors_of("a"), tensors_of("b"))
    (folder / files[1]).unlink()
    refused(folder, files[1], "does not exist", "index")
    refused(folder / files[0], "one of 00002 files", "folder")
    (folder / "model.safetensors.index.json").unlink()
    refused(folder, "not their index", "model.safetensors.index.json")


def test_an_index_that_does_not_fit_its_shards_is_refused(tmp_path):
    shards = tensors_of("a"), tensors_of("b")
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    where = {"a": files[0], "b": files[1]}
    folder, _ = write_shards(tmp_path / "a", *shards, where={**where, "c": files[1]})
    refused(folder, "c", files[1], "does not hold it")
    folder, _ = write_shards(tmp_path / "b", tensors_of("a"), tensors_of("a", "b", seed=4), where=where)
    refused(folder, "a is in", files[0], files[1])
    folder, _ = write_shards(tmp_path / "c", tensors_of("a", "z"), tensors_of("b", "z"), where=where)
    refused(folder, "z is in", files[0], files[1])
    for index in ({}, {"weight_map": {}}, {"weight_map": ["a"]}, {"weight_map": {"a": 1}}):
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        refused(folder, "weight_map")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../b/x.safetensors"}}))
    refused(folder, "../b/x.safetensors")


def test_a_tensor_that_the_index_forgets_is_read_as_engines_do(tmp_path):
    where = {"a": "model-00001-of-00001.safetensors"}
    folder, _ = write_shards(tmp_path, tensors_of("a", "b"), where=where)
    raw = opened(folder)
    assert same(raw, tensors_of("a", "b"))
    assert [note for note in raw.notes if "'b'" in note]


# ---- what is broken


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_file_is_named(tmp_path, name, share):
    folder = write(tmp_path, tensors_of("a", rows=300), name)
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[: int(len(whole) * share)])
    refused(folder, str(folder / name), "not a whole", "copy or download it again")


@pytest.mark.parametrize("share", [0.05, 0.5, 0.99])
def test_a_truncated_file_of_the_old_format_is_named(tmp_path, share):
    folder = write(tmp_path)
    torch.save(tensors_of("a", rows=300), folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    whole = (folder / "pytorch_model.bin").read_bytes()
    (folder / "pytorch_model.bin").write_bytes(whole[: int(len(whole) * share)])
    refused(folder, "pytorch_model.bin", "copy or download it again")


def test_broken_settings_are_named(tmp_path):
    folder = write(tmp_path, tensors_of("a"))
    for text, told in (('{"a": 1', "not valid JSON"), ("[1]", "not an object"), ("\xff", "not valid JSON")):
        (folder / "config.json").write_bytes(text.encode("latin-1"))
        refused(folder, str(folder / "config.json"), told)


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"]
)
def test_a_pointer_of_git_lfs_is_named(tmp_path, name):
    folder = write(tmp_path, tensors_of("a") if name == "config.json" else None)
    (folder / name).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d7a' * 16}\nsize 12345\n")
    refused(folder, name, "Git LFS pointer", "git lfs pull")


def test_gguf_files_and_adapters_are_named(tmp_path):
    (write(tmp_path / "a") / "drafter-Q4.gguf").write_bytes(b"GGUF" + bytes(20))
    refused(tmp_path / "a", "GGUF")
    refused(tmp_path / "a" / "drafter-Q4.gguf", "GGUF")
    (write(tmp_path / "b") / "model.safetensors").write_bytes(b"GGUF" + bytes(20))
    refused(tmp_path / "b", "GGUF")
    write(tmp_path / "c", tensors_of("base_model.model.layers.0.lora_A.weight"), "adapter_model.safetensors")
    (tmp_path / "c" / "adapter_config.json").write_text("{}")
    refused(tmp_path / "c", "adapter (LoRA)", "merge")
    refused(tmp_path / "c" / "adapter_model.safetensors", "adapter", "lora_A")
    (write(tmp_path / "d", tensors_of("a")) / "adapter_config.json").write_text("{}")
    assert [note for note in opened(tmp_path / "d").notes if "adapter_config.json" in note]


class Trap:
    """Written to a file, it would call a function when it is read."""

    def __reduce__(self):
        return _sprung, (1,)


def _sprung(_):
    raise AssertionError("code of the file was run")


@pytest.mark.parametrize("how", ["zip", "old", "pickle", "module"])
def test_no_pickle_is_executed(tmp_path, how):
    folder = write(tmp_path)
    path = folder / "pytorch_model.bin"
    state = {**tensors_of("a"), "args": Trap()}
    if how == "pickle":
        path.write_bytes(pickle.dumps(state))
    else:
        what = torch.nn.Linear(2, 2) if how == "module" else state
        torch.save(what, path, _use_new_zipfile_serialization=how != "old")
    refused(folder, str(path), "would run code of the file", "safetensors")


def test_a_dict_of_something_else_is_named(tmp_path):
    refused(write(tmp_path / "a", {"model": tensors_of("a"), "step": 3}, "pytorch_model.bin"), "'model', 'step'")
    refused(write(tmp_path / "b", [1, 2], "pytorch_model.bin"), "holds a list")
    refused(write(tmp_path / "c", {}, "pytorch_model.bin"), "dict of tensors")


# ---- what is quantised


def test_quantised_checkpoints_are_named(tmp_path):
    plain = tensors_of("fc.weight")
    block = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    refused(
        write(tmp_path / "a", plain, config={"quantization_config": block}), "quantised", "NVFP4", "quantization_config"
    )
    nested = {"transformer_layer_config": {"quantization_config": {"quant_method": "compressed-tensors"}}}
    refused(write(tmp_path / "b", plain, config=nested), "compressed-tensors")
    (write(tmp_path / "c", plain) / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    refused(tmp_path / "c", "hf_quant_config.json", "FP8")
    (tmp_path / "c" / "hf_quant_config.json").write_text(
        '{"quantization": {"quant_algo": null, "kv_cache_quant_algo": "FP8"}}'
    )
    assert same(opened(tmp_path / "c"), plain)
    assert same(opened(write(tmp_path / "d", plain, config={"quantization_config": None})), plain)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("layers.0.mlp.up_proj.qweight", torch.int32),
        ("layers.0.mlp.up_proj.weight_packed", torch.uint8),
        ("layers.0.mlp.up_proj.weight_scale", torch.float32),
        ("layers.0.mlp.up_proj.input_scale", torch.float32),
        ("layers.0.mlp.experts.gate_up_proj_blocks", torch.uint8),
        ("layers.0.mlp.up_proj.weight.absmax", torch.float32),
        ("layers.0.mlp.up_proj.weight", torch.int8),
        ("layers.0.mlp.up_proj.weight", torch.float8_e4m3fn),
        ("layers.0.mlp.up_proj.weight_scale_inv", torch.float32),
    ],
)
@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin"])
def test_tensors_of_packed_weights_are_named(tmp_path, name, dtype, kind):
    folder = write(tmp_path, {**tensors_of("fc.weight"), name: torch.ones(4, 3).to(dtype)}, kind)
    refused(folder, "quantised", name, "unquantised")


def test_a_view_asks_only_what_it_keeps(tmp_path):
    """The MTP head of a quantised target is often left as it was."""
    body = {"layers.0.w": torch.ones(4, 3, dtype=torch.uint8)}
    folder = write(
        tmp_path, {**tensors_of("mtp.fc.weight"), **body}, config={"quantization_config": {"quant_method": "awq"}}
    )
    refused(folder, "awq")
    view = opened(folder).only(lambda name: name.startswith("mtp."))
    assert same(view, tensors_of("mtp.fc.weight"))
    assert [note for note in view.notes if "awq" in note]


def fp8(rows, columns, block, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-rows // block[0]), -(-columns // block[1]), generator=generator) + 0.5
    return weight, scale


@pytest.mark.parametrize(
    ("rows", "columns", "block"), [(6, 9, (2, 3)), (7, 10, (3, 4)), (200, 130, (128, 128)), (3, 3, (9, 9))]
)
def test_fp8_in_blocks_is_multiplied_out(tmp_path, rows, columns, block):
    weight, scale = fp8(rows, columns, block)
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": list(block)}}
    tensors = {"a.weight": weight, "a.weight_scale_inv": scale, **tensors_of("norm.weight", dtype=torch.bfloat16)}
    raw = opened(write(tmp_path, tensors, config=config))
    assert raw.shapes == {"a.weight": (rows, columns), "norm.weight": (4, 3)}
    read, plain = raw.tensor("a.weight"), weight.float()
    assert read.dtype == torch.float32
    for i in range(rows):
        for j in range(columns):
            assert read[i, j] == plain[i, j] * scale[i // block[0], j // block[1]]
    assert torch.equal(raw.tensor("norm.weight"), tensors["norm.weight"])
    assert [note for note in raw.notes if "1 weights in fp8" in note and f"{block[0]} x {block[1]}" in note]


def test_fp8_of_a_view_keeps_its_scales(tmp_path):
    weight, scale = fp8(4, 4, (2, 2))
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [2, 2]}}
    folder, _ = write_shards(
        tmp_path, {"mtp.weight": weight}, {"mtp.weight_scale_inv": scale, "b": torch.ones(1)}, config=config
    )
    view = opened(folder).only(lambda name: name == "mtp.weight")
    assert set(opened(folder).names) == {"mtp.weight", "b"}
    assert view.shapes == {"mtp.weight": (4, 4)}
    whole = weight.float() * scale.repeat_interleave(2, 0).repeat_interleave(2, 1)
    assert torch.equal(view.tensor("mtp.weight"), whole)


def test_fp8_that_cannot_be_multiplied_out_is_named(tmp_path):
    weight, scale = fp8(6, 9, (2, 3))
    tensors = {"a.weight": weight, "a.weight_scale_inv": scale}
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [2, 3]}}
    refused(write(tmp_path / "a", tensors), "a.weight", "weight_block_size")
    refused(
        write(tmp_path / "b", tensors, config={"quantization_config": {"weight_block_size": 3}}), "weight_block_size"
    )
    wrong = {**tensors, "a.weight_scale_inv": scale[:-1].contiguous()}
    refused(write(tmp_path / "c", wrong, config=config), "a.weight_scale_inv", "[2, 3]", "block")
    exponents = {**tensors, "a.weight_scale_inv": scale.to(torch.uint8)}
    refused(write(tmp_path / "d", exponents, config=config), "a.weight_scale_inv", "U8", "not a plain number")
    refused(write(tmp_path / "d", tensors_of("norm.weight"), config=config), "quantised", "look unquantised")


def test_tensors_without_plain_data_are_named(tmp_path):
    for name, tensor, told in (
        ("sparse", torch.eye(3).to_sparse(), "is sparse"),
        ("meta", torch.ones(3, device="meta"), "is without data (meta)"),
    ):
        refused(write(tmp_path / name, {"a": tensor}, "pytorch_model.bin"), f"a {told}", "save plain tensors")


def test_a_link_to_nothing_is_called_so(tmp_path):
    write(tmp_path / "d")
    (tmp_path / "d" / "model.safetensors").symlink_to(tmp_path / "blobs" / "abc")
    refused(tmp_path / "d", "model.safetensors is a link to", "which does not exist")


def test_settings_of_another_form_are_named(tmp_path):
    refused(
        write(tmp_path / "q", tensors_of("a"), config={**CONFIG, "quantization_config": "fp8"}),
        "quantization_config is 'fp8', not a table",
    )
    folder = write(tmp_path / "n", tensors_of("a"))
    (folder / "config.json").write_text("[" * 100000 + "]" * 100000)
    refused(folder, "is not valid JSON")


def test_an_unknown_tensor_is_not_there(tmp_path):
    from driftlab import DriftlabError

    with pytest.raises(DriftlabError, match="no tensor b"):
        opened(write(tmp_path, tensors_of("a"))).tensor("b")


def test_opening_a_folder_asks_no_hub(tmp_path, monkeypatch):
    """An existing folder wins over a hub id of the same name, and huggingface_hub is not even imported."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "owner" / "name", tensors_of("a"))
    imported = builtins.__import__

    def guarded(name, *args, **kwargs):
        assert not name.startswith("driftlab.drafter.formats.hub")
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", guarded)
    assert same(opened("owner/name"), tensors_of("a"))
