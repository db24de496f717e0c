"""Files that appear whole or not at all, messages that say what to do, and a lock that outlives no process."""

import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from safetensors import SafetensorError, safe_open

from driftlab import files
from driftlab.errors import DriftlabError
from driftlab.files import atomic, cache_dir, locked, read_json, sort_metadata, sweep, write_json, write_text


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# ---- the cache folder


def test_the_environment_names_the_cache_folder_and_it_is_made(tmp_path, monkeypatch):
    monkeypatch.setenv("DRIFTLAB_CACHE", str(tmp_path / "a" / "b"))
    assert cache_dir() == tmp_path / "a" / "b"
    assert cache_dir().is_dir()


def test_a_tilde_is_the_home_folder_and_empty_is_the_platforms_own(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DRIFTLAB_CACHE", "~/cache")
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.setenv("DRIFTLAB_CACHE", "")
    monkeypatch.setattr(files.platformdirs, "user_cache_dir", lambda name: str(tmp_path / "platform" / name))
    assert cache_dir() == tmp_path / "platform" / "driftlab"


# ---- atomic


def test_the_old_file_stands_until_the_block_has_succeeded(tmp_path):
    path = tmp_path / "new" / "file.txt"
    write_text(path, "old")
    with atomic(path) as temporary:
        temporary.write_text("new")
        assert temporary.parent == path.parent  # a rename across file systems would not be atomic
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert names(path.parent) == ["file.txt"]


@pytest.mark.parametrize("error", [ValueError("no"), DriftlabError("rule"), KeyboardInterrupt()])
def test_a_block_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, error):
    path = tmp_path / "file.txt"
    write_text(path, "old")

    def fail():
        with atomic(path) as temporary:
            temporary.write_text("half of the n")
            raise error

    with pytest.raises(type(error)) as caught:
        fail()
    assert caught.value is error
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file.txt"]


def test_bytes_reach_the_disk_before_the_name_does(tmp_path, monkeypatch):
    done = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(files.os, "fsync", lambda handle: (done.append("fsync"), fsync(handle)))
    monkeypatch.setattr(files.os, "replace", lambda a, b: (done.append("replace"), replace(a, b)))
    write_text(tmp_path / "file.txt", "text")
    assert done == ["fsync", "replace"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_a_new_file_has_the_mode_that_open_would_give(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        write_text(tmp_path / "file.txt", "text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file.txt").stat().st_mode) == mode


def test_a_writer_that_replaces_the_file_does_not_decide_its_mode(tmp_path):
    """safetensors renames a file of its own, with mode 600, to the path it is given: a shared drafter could not be read."""
    with atomic(tmp_path / "a.bin") as temporary:
        temporary.unlink()
        temporary.touch(mode=0o600)
    (tmp_path / "b.bin").touch()
    assert stat.S_IMODE((tmp_path / "a.bin").stat().st_mode) == stat.S_IMODE((tmp_path / "b.bin").stat().st_mode)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "no space left .*free space and run the same command"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), "no space left .*free space"),
        (OSError(errno.EACCES, "Permission denied"), "Permission denied; choose another folder"),
        (OSError(errno.EROFS, "Read-only file system"), "Read-only file system; choose another folder"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error"),
    ],
)
def test_what_the_system_refuses_is_explained_and_the_file_named(tmp_path, error, told):
    path = tmp_path / "piece.bin"
    path.write_text("old")
    with pytest.raises(DriftlabError, match=told) as caught, atomic(path):
        raise error
    assert str(path) in str(caught.value)
    assert caught.value.__cause__ is not None
    assert path.read_text() == "old"
    assert names(tmp_path) == ["piece.bin"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device that is always full")
def test_a_device_that_is_really_full(tmp_path):
    path = tmp_path / "piece.bin"
    with pytest.raises(DriftlabError, match="no space left"), atomic(path), open("/dev/full", "w") as full:
        full.write("x" * 100_000)
    assert names(tmp_path) == []


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DriftlabError, match="cannot write"):
        write_text(tmp_path / "file" / "inner.txt", "text")


def test_writers_of_one_file_do_not_mix(tmp_path):
    path = tmp_path / "file.txt"
    texts = [letter * 50_000 for letter in "abcd"]
    threads = [threading.Thread(target=write_text, args=(path, text)) for text in texts for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_text() in texts
    assert names(tmp_path) == ["file.txt"]


def test_leftovers_of_killed_writers_are_swept_and_nothing_else(tmp_path):
    for name in (".piece.safetensors.abc.tmp", "piece.safetensors", "notes.tmp", ".hidden"):
        (tmp_path / name).write_text("x")
    sweep(tmp_path)
    assert names(tmp_path) == [".hidden", "notes.tmp", "piece.safetensors"]


def test_equal_safetensors_files_are_equal_bytes(tmp_path):
    """The library writes the metadata in an order that differs from call to call."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file, save_file

    tensors = {"b": torch.arange(5), "a": torch.randn(3)}
    metadata = {**{str(i): "x" * i for i in range(9)}, "text": 'ä ☃ "quoted"\n\\'}
    content = set()
    for i in range(5):
        save_file(tensors, tmp_path / f"{i}", metadata=metadata)
        sort_metadata(tmp_path / f"{i}")
        content.add((tmp_path / f"{i}").read_bytes())
    assert len(content) == 1
    assert torch.equal(load_file(tmp_path / "0")["a"], tensors["a"])
    with safe_open(tmp_path / "0", "pt") as file:
        assert file.metadata() == metadata


# ---- JSON


def test_json_round_trips_sorted_and_readable(tmp_path):
    path = tmp_path / "value.json"
    write_json(path, {"b": [1, 2.5], "a": "ä ☃"})
    assert read_json(path) == {"a": "ä ☃", "b": [1, 2.5]}
    text = path.read_text(encoding="utf-8")
    assert text.index('"a"') < text.index('"b"')
    assert "☃" in text
    assert text.endswith("}\n")


def test_nan_is_refused_before_the_old_file_is_touched(tmp_path):
    path = tmp_path / "value.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"a": float("nan")})
    assert read_json(path) == {"a": 1}


@pytest.mark.parametrize("content", [b'{"a": 1', b"", b"\xff\xfe{}"])
def test_broken_json_is_named(tmp_path, content):
    path = tmp_path / "value.json"
    path.write_bytes(content)
    with pytest.raises(DriftlabError, match="value.json is not valid JSON"):
        read_json(path)


def test_missing_json_is_named(tmp_path):
    with pytest.raises(DriftlabError, match="nowhere.json does not exist"):
        read_json(tmp_path / "nowhere.json")


# ---- the lock


def test_a_second_holder_says_once_that_it_waits(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(files, "_PATIENCE", 0.05)
    path, said = tmp_path / "thing", []

    def enter():
        with locked(path):
            said.extend(record.getMessage() for record in caplog.records)

    thread = threading.Thread(target=enter)
    with locked(path):
        assert not caplog.records
        thread.start()
        thread.join(0.4)
        assert thread.is_alive()
    thread.join(10)
    assert said == [f"waiting for another process that writes {path}"]


def test_a_second_holder_waits_for_the_first(tmp_path):
    path, entered = tmp_path / "deep" / "thing", threading.Event()

    def enter():
        with locked(path):
            entered.set()

    thread = threading.Thread(target=enter)
    with locked(path):
        thread.start()
        assert not entered.wait(0.3)
    assert entered.wait(10)
    thread.join()


def test_an_error_in_the_block_releases_the_lock(tmp_path):
    with pytest.raises(ValueError, match="mine"), locked(tmp_path / "thing"):
        raise ValueError("mine")
    with locked(tmp_path / "thing"):
        pass


def test_a_killed_holder_leaves_no_lock_and_no_half_written_file(tmp_path):
    code = (
        "import os, signal, sys; from pathlib import Path; from driftlab.files import atomic, locked\n"
        "path = Path(sys.argv[1])\n"
        "with locked(path), atomic(path) as temporary:\n"
        "    temporary.write_text('half'); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = tmp_path / "thing"
    write_text(path, "old")
    killed = subprocess.run([sys.executable, "-c", code, str(path)], timeout=60)
    assert killed.returncode == -signal.SIGKILL
    with locked(path):
        assert path.read_text() == "old"
