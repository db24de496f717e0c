"""The hub's file endpoints, spoken by a server on the loopback: huggingface_hub's own code runs against it."""

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from builders import own_tables, random_batch
from safetensors.torch import save

RESOLVE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<rev>[^/]+)/(?P<file>.+)")
MODEL = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+?)(?:/(?:revision|tree)/(?P<rev>[^/?]+))?(?:\?.*)?")
BLOB = re.compile(r"/blobs/(?P<repo>[^/]+/[^/]+)/(?P<commit>[^/]+)/(?P<file>.+)")


class Repo:
    """Commits of a repository: name of the file -> content. The last one is main."""

    def __init__(self, *commits, gated=False):
        self.commits = {hashlib.sha1(f"{i}".encode()).hexdigest(): files for i, files in enumerate(commits)}
        self.gated = gated

    @property
    def main(self):
        return list(self.commits)[-1]

    def commit(self, revision):
        revision = {"main": self.main, "v1": list(self.commits)[0]}.get(revision, revision)
        return revision if revision in self.commits else None


class Hub:
    """The server. ``cut`` maps a file to how many more of its downloads break off in the middle."""

    def __init__(self):
        self.repos, self.requests, self.cut, self.status = {}, [], {}, None
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        # large files come from another host name, as from the hub's storage
        self.storage = f"http://localhost:{self.server.server_port}"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def stop(self):
        if self._thread.is_alive():
            self.server.shutdown()
            self._thread.join()
            self.server.server_close()

    def downloads(self, ending):
        return [
            path for method, path, header in self.requests if method == "GET" and path.endswith(ending) and not header
        ]


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body):
        asked = self.headers.get("Range") or ""
        self.hub.requests.append((self.command, self.path, asked.startswith("bytes=0-")))
        if self.hub.status:
            return self.reply(self.hub.status, b"")
        if match := RESOLVE.fullmatch(self.path):
            return self.resolve(**match.groupdict())
        if match := BLOB.fullmatch(self.path):
            return self.send(self.hub.repos[match["repo"]].commits[match["commit"]][match["file"]], match["file"], {})
        if match := MODEL.fullmatch(self.path):
            return self.describe(match["repo"], match["rev"] or "main")
        return self.reply(404, b"{}")

    def found(self, repo, rev):
        if repo not in self.hub.repos:
            self.reply(404, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        elif self.hub.repos[repo].commit(rev) is None:
            self.reply(404, b"", {"X-Error-Code": "RevisionNotFound", "X-Error-Message": f"Invalid rev id: {rev}"})
        else:
            return self.hub.repos[repo].commit(rev)
        return None

    def resolve(self, repo, rev, file):
        commit = self.found(repo, rev)
        if commit is None:
            return None
        if self.hub.repos[repo].gated:
            return self.reply(401, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": f"Access to {repo} is gated"})
        files, about = self.hub.repos[repo].commits[commit], {"X-Repo-Commit": commit}
        if file not in files:
            return self.reply(
                404, b"", {**about, "X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}
            )
        tag = hashlib.sha256(files[file]).hexdigest()
        if not file.endswith((".safetensors", ".bin")):
            return self.send(files[file], file, {**about, "ETag": f'"{tag}"'})
        linked = {"X-Linked-Etag": f'"{tag}"', "X-Linked-Size": str(len(files[file])), "ETag": '"pointer"'}
        return self.reply(302, b"", {**about, **linked, "Location": f"{self.hub.storage}/blobs/{repo}/{commit}/{file}"})

    def describe(self, repo, rev):
        commit = self.found(repo, rev)
        if commit is None:
            return None
        names = sorted(self.hub.repos[repo].commits[commit])
        model = {"id": repo, "sha": commit, "siblings": [{"rfilename": name} for name in names], "tags": []}
        tree = [{"type": "file", "path": name, "size": 1, "oid": "0" * 40} for name in names]
        return self.reply(200, json.dumps(tree if "/tree/" in self.path else model).encode())

    def send(self, content, file, headers):
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        headers |= {"Accept-Ranges": "bytes"}
        if asked:
            start, stop = int(asked[1]), min(int(asked[2] or len(content)) + 1, len(content))
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
            content = content[start:stop]
        breaks = self.command == "GET" and self.hub.cut.get(file, 0) > 0 and not (asked and asked[2])
        self.hub.cut[file] = self.hub.cut.get(file, 0) - breaks
        return self.reply(206 if asked else 200, content, headers, sent=len(content) // 2 if breaks else None)

    def reply(self, status, content, headers=(), sent=None):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **dict(headers)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[:sent])


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A server, and huggingface_hub pointed at it with a cache of its own. What it read from the environment at import is
    replaced; waiting between tries takes no time.
    """
    import huggingface_hub
    from huggingface_hub import constants

    served = Hub()
    for name in ("http_proxy", "https_proxy", "all_proxy", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    home = tmp_path / "home"
    replaced = {
        **{
            "ENDPOINT": served.endpoint,
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_HUB_OFFLINE": False,
        },
        "HUGGINGFACE_CO_URL_TEMPLATE": served.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        **{"HF_TOKEN_PATH": str(home / "token"), "HF_STORED_TOKENS_PATH": str(home / "tokens")},
    }
    for name, value in replaced.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    huggingface_hub.close_session()
    yield served
    huggingface_hub.close_session()
    served.stop()


def tensors_of(*names, rows=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(rows, 3, generator=generator) for name in names}


def files_of(tensors, config=None, name="model.safetensors", **more):
    return {"config.json": json.dumps(config or {"hidden_size": 8}).encode(), name: save(tensors), **more}


def sharded(*shards):
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    index = {"weight_map": {key: name for name, tensors in zip(names, shards, strict=True) for key in tensors}}
    files = {name: save(tensors) for name, tensors in zip(names, shards, strict=True)}
    return {"config.json": b"{}", "model.safetensors.index.json": json.dumps(index).encode(), **files}


def opened(name, **options):
    from driftlab.drafter.formats.files import open_checkpoint

    return open_checkpoint(name, **options)


def read(raw):
    return {name: raw.tensor(name) for name in raw.shapes}


def equal(one, other):
    return set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)


def refused(name, *told, **options):
    from driftlab import DriftlabError

    with pytest.raises(DriftlabError) as caught:
        read(opened(name, **options))
    assert [words for words in told if words not in str(caught.value)] == [], str(caught.value)


# ---- what is had


def test_a_drafter_of_the_hub_is_the_drafter_that_was_put_there(hub, tmp_path):
    from driftlab import Drafter

    drafter = own_tables(draft_vocab_size=20)
    drafter.save(tmp_path / "d")
    repo = Repo({path.name: path.read_bytes() for path in (tmp_path / "d").iterdir()})
    hub.repos["lab/drafter"] = repo
    again = Drafter.load("lab/drafter")
    batch = random_batch((9,), (5,), width=32)
    with torch.no_grad():
        assert torch.equal(drafter(batch.tokens, batch.aux), again(batch.tokens, batch.aux))
    raw = opened("lab/drafter")
    assert raw.label == f"lab/drafter@{repo.main}"
    assert raw.path.name == repo.main
    assert raw.path.is_relative_to(tmp_path / "home")
    assert raw.notes == []


def test_a_second_load_needs_no_server(hub):
    tensors = tensors_of("fc.weight", "norm.weight")
    hub.repos["lab/drafter"] = Repo(files_of(tensors))
    first = opened("lab/drafter")
    assert equal(read(first), tensors)
    hub.stop()
    second = opened("lab/drafter")
    assert equal(read(second), tensors)
    assert (second.label, second.config, second.path) == (first.label, first.config, first.path)
    assert [note for note in second.notes if "not reached" in note]
    assert equal(read(opened(second.label)), tensors)  # the label names it


def test_the_revision_is_pinned(hub):
    """Two commits: main moves while a checkpoint is open, and what is read later is still of the same commit."""
    old, new = tensors_of("a", seed=1), tensors_of("a", seed=2)
    hub.repos["lab/drafter"] = Repo(files_of(old, {"n": 1}))
    raw = opened("lab/drafter")
    hub.repos["lab/drafter"] = repo = Repo(files_of(old, {"n": 1}), files_of(new, {"n": 2}))
    assert equal(read(raw), old)
    assert equal(read(opened("lab/drafter")), new)
    first = list(repo.commits)[0]
    for raw in (opened("lab/drafter", revision="v1"), opened("lab/drafter@v1"), opened(f"lab/drafter@{first}")):
        assert (raw.config, raw.label) == ({"n": 1}, f"lab/drafter@{first}")
        assert equal(read(raw), old)
    refused("lab/drafter@v1", "another", revision="main")


def test_only_what_is_read_is_downloaded(hub):
    shards = tensors_of("layers.0.w"), tensors_of("mtp.a", seed=1), tensors_of("mtp.b", "layers.1.w", seed=2)
    extra = {"pytorch_model.bin": b"x", "README.md": b"x", "model.gguf": b"GGUF"}
    hub.repos["lab/target"] = Repo({**sharded(*shards), **extra})
    raw = opened("lab/target")
    assert raw.shapes == dict.fromkeys(["layers.0.w", "mtp.a", "mtp.b", "layers.1.w"], (4, 3))
    assert hub.downloads(".safetensors") == []  # the headers alone
    head = raw.only(lambda name: name.startswith("mtp."))
    assert equal(read(head), {"mtp.a": shards[1]["mtp.a"], "mtp.b": shards[2]["mtp.b"]})
    got = {path.rsplit("/", 1)[1] for path in hub.downloads(".safetensors")}
    assert got == {"model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors"}
    assert hub.downloads(".bin") + hub.downloads(".md") + hub.downloads(".gguf") == []
    hub.stop()
    cached = opened("lab/target").only(lambda name: name.startswith("mtp."))
    assert equal(read(cached), read(head))
    refused("lab/target", "model-00001-of-00003.safetensors", "not in the cache")


def test_a_header_longer_than_the_first_request_is_read_whole(hub):
    tensors = {f"layers.{i}.{'w' * 200}": torch.full((1,), float(i)) for i in range(500)}
    hub.repos["lab/long"] = Repo(files_of(tensors))
    raw = opened("lab/long")
    assert raw.shapes == dict.fromkeys(tensors, (1,))
    assert equal(read(raw), tensors)


def test_a_torch_file_of_the_hub_is_read(hub, tmp_path):
    torch.save(tensors_of("a"), tmp_path / "x.bin")
    content = (tmp_path / "x.bin").read_bytes()
    hub.repos["lab/old"] = Repo({"config.json": b"{}", "pytorch_model.bin": content})
    assert equal(read(opened("lab/old")), tensors_of("a"))


def test_a_local_folder_wins_over_the_hub(hub, tmp_path, monkeypatch):
    hub.repos["lab/drafter"] = Repo(files_of(tensors_of("a", seed=1)))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "lab" / "drafter"
    folder.mkdir(parents=True)
    for name, content in files_of(tensors_of("a", seed=2)).items():
        (folder / name).write_bytes(content)
    raw = opened("lab/drafter")
    assert equal(read(raw), tensors_of("a", seed=2))
    assert (raw.label, hub.requests) == ("lab/drafter", [])


# ---- what is not


def test_a_missing_repository_is_named_as_both_that_it_could_be(hub):
    refused("lab/nothing", "neither a local folder lab/nothing nor a repository", hub.endpoint, "HF_TOKEN")


def test_a_gated_repository_says_where_to_ask(hub):
    hub.repos["lab/gated"] = Repo(files_of(tensors_of("a")), gated=True)
    refused("lab/gated", "lab/gated is gated", f"ask for access at {hub.endpoint}/lab/gated", "HF_TOKEN")


def test_a_missing_revision_is_named(hub):
    hub.repos["lab/drafter"] = Repo(files_of(tensors_of("a")))
    refused("lab/drafter", "no revision 'v9'", revision="v9")
    refused(f"lab/drafter@{'0' * 40}", f"no revision '{'0' * 40}'")


def test_missing_files_are_named(hub):
    hub.repos["lab/none"] = Repo({"README.md": b"x"})
    refused("lab/none", "lab/none@main has no config.json")
    hub.repos["lab/config"] = Repo({"config.json": b"{}", "eagle.safetensors": b"x"})
    refused("lab/config", "lab/config@", "no weights", "eagle.safetensors")
    hub.repos["lab/gguf"] = Repo({"config.json": b"{}", "drafter.gguf": b"GGUF"})
    refused("lab/gguf", "GGUF")
    hub.repos["lab/lora"] = Repo(
        {"config.json": b"{}", "adapter_config.json": b"{}", "adapter_model.safetensors": b"x"}
    )
    refused("lab/lora", "adapter (LoRA)")
    files = sharded(tensors_of("a"), tensors_of("b"))
    hub.repos["lab/shards"] = Repo({k: v for k, v in files.items() if "00002-of" not in k or k.endswith(".json")})
    refused("lab/shards", "model-00002-of-00002.safetensors", "incomplete")


def test_broken_and_quantised_files_are_refused_before_they_are_downloaded(hub):
    packed = {**tensors_of("a"), "w.qweight": torch.ones(2, 2, dtype=torch.int32)}
    hub.repos["lab/packed"] = Repo(files_of(packed))
    refused("lab/packed", "quantised", "w.qweight")
    hub.repos["lab/fp4"] = Repo(
        files_of(tensors_of("a"), **{"hf_quant_config.json": b'{"quantization": {"quant_algo": "NVFP4"}}'})
    )
    refused("lab/fp4", "hf_quant_config.json", "NVFP4")
    hub.repos["lab/broken"] = Repo({"config.json": b"{}", "model.safetensors": b"\x07" * 64})
    refused("lab/broken", "model.safetensors", "not a whole safetensors file")
    assert hub.downloads(".safetensors") == []


def test_without_network_or_cache_the_words_say_so(hub, monkeypatch):
    from huggingface_hub import constants

    hub.stop()
    refused("lab/drafter", "no local folder lab/drafter", "not in the cache", f"{hub.endpoint} cannot be reached")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refused("lab/drafter", "config.json of lab/drafter is not in the cache", "HF_HUB_OFFLINE")


def test_offline_the_cache_is_read_and_nothing_asked(hub, monkeypatch):
    import huggingface_hub
    from huggingface_hub import constants

    hub.repos["lab/drafter"] = Repo(files_of(tensors_of("a")))
    read(opened("lab/drafter"))
    asked = len(hub.requests)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    huggingface_hub.close_session()
    raw = opened("lab/drafter")
    assert equal(read(raw), tensors_of("a"))
    assert [note for note in raw.notes if "not reached" in note]
    assert len(hub.requests) == asked


def test_a_server_in_trouble_is_quoted(hub):
    hub.repos["lab/drafter"] = Repo(files_of(tensors_of("a")))
    raw = opened("lab/drafter")
    hub.status = 503
    refused("lab/other", hub.endpoint, "503")
    refused("lab/drafter", "no weights", "the hub was not reached")  # config.json is in the cache, and nothing else
    hub.status = None
    assert equal(read(raw), tensors_of("a"))


@pytest.mark.parametrize("name", ["a--b/c", "lab/na..me", "lab/name.git"])
def test_a_name_that_no_repository_can_have_is_refused(hub, name):
    refused(name, name)


def test_an_interrupted_download_is_resumed(hub):
    tensors = tensors_of("a", rows=5000)
    hub.repos["lab/drafter"] = Repo(files_of(tensors))
    hub.cut["model.safetensors"] = 2
    assert equal(read(opened("lab/drafter")), tensors)
    assert hub.cut["model.safetensors"] == 0


def test_a_download_that_fails_leaves_nothing_that_looks_whole(hub):
    tensors = tensors_of("a", rows=5000)
    hub.repos["lab/drafter"] = Repo(files_of(tensors))
    hub.cut["model.safetensors"] = 10**9
    refused("lab/drafter", "lab/drafter@", "the download of model.safetensors failed", "run the same again")
    assert not list(opened("lab/drafter").path.glob("*.safetensors"))
    hub.cut["model.safetensors"] = 0
    assert equal(read(opened("lab/drafter")), tensors)


SCRIPT = """
import sys
from driftlab import DriftlabError
from driftlab.drafter.formats.files import open_checkpoint
for name in sys.argv[1:]:
    try:
        raw = open_checkpoint(name)
        print(raw.label, sum(float(raw.tensor(key).sum()) for key in raw.shapes))
    except DriftlabError as error:
        print(error)
"""


def test_the_variables_of_the_environment_hold(hub, tmp_path):
    tensors = {"a": torch.full((2, 3), 7.0)}
    hub.repos["lab/drafter"] = repo = Repo(files_of(tensors))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path / "elsewhere"),
        "NO_PROXY": "127.0.0.1,localhost",
    }

    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "lab/drafter", "lab/other"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    assert told[0] == f"lab/drafter@{repo.main} 42.0"
    assert "neither a local folder lab/other" in told[1]
    assert hub.endpoint in told[1]
    assert (tmp_path / "elsewhere" / "hub" / "models--lab--drafter").is_dir()
