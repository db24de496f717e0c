"""Files that appear whole or not at all, a cache folder, and a lock that two processes can share."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import platformdirs
from filelock import FileLock, Timeout

from driftlab.errors import DriftlabError

_log = logging.getLogger(__name__)
_CHECKSUM = "checksum"
_PATIENCE = 1.0
"""seconds of waiting for a lock before it is said"""


def cache_dir() -> Path:
    """Return the cache folder: ``DRIFTLAB_CACHE`` if set, else the platform's own. It is made on first use."""
    root = os.environ.get("DRIFTLAB_CACHE")
    path = Path(root).expanduser() if root else Path(platformdirs.user_cache_dir("driftlab"))
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DriftlabError(
            f"cannot make the cache folder {path} ({error.strerror}): set DRIFTLAB_CACHE to a folder that can be written"
        ) from error
    return path


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file ``path`` + ``.lock`` for the block; a second process waits, and a logging warning says so once.

    Released when a process dies.
    """
    lock = FileLock(f"{path}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=_PATIENCE)
        except Timeout:
            _log.warning("waiting for another process that writes %s", path)
            lock.acquire()
    except OSError as error:
        raise _explained(error, Path(f"{path}.lock")) from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder; rename it to ``path`` if the block succeeds, remove it otherwise.

    The file is flushed to disk before the rename, so that ``path`` is never seen half-written, not even after a power
    cut. A full disk or a read-only folder becomes a :class:`DriftlabError` that names the file.
    """
    path = Path(path)
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        temporary.chmod(0o666 & ~_umask())
        yield temporary
        temporary.chmod(0o666 & ~_umask())  # safetensors puts a file of its own there, readable by its owner alone
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise _explained(error, path) from error
    except Exception as error:
        # safetensors wraps the system's message, with its number, in an error type of its own
        number = re.search(r"\(os error (\d+)\)", str(error)) if type(error).__name__ == "SafetensorError" else None
        if number or "No space left on device" in str(error):
            told = OSError(int(number[1]), os.strerror(int(number[1]))) if number else OSError(errno.ENOSPC, str(error))
            raise _explained(told, path) from error
        raise
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def sweep(folder: Path) -> None:
    """Remove what killed processes left half-written in ``folder``. Only under a lock that all its writers hold."""
    # safetensors writes beside the name that it is given, to a file that it calls so
    for leftover in (*folder.glob(".*.tmp"), *folder.glob(".tmp??????")):
        leftover.unlink()


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` as UTF-8, whole or not at all."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON with sorted keys, whole or not at all. NaN is refused: JSON has none."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Read JSON; a broken or missing file, NaN or infinity in it, or a name that comes twice in one object is a
    :class:`DriftlabError` that names the file.
    """
    try:
        if (
            there := Path(path)
        ).exists() and not there.is_file():  # a pipe would be waited for, a device read without end
            raise DriftlabError(f"{path} is not a file")
        text = there.read_text(encoding="utf-8")
        return json.loads(text, parse_constant=_no_number, object_pairs_hook=_each_once)
    except FileNotFoundError as error:
        raise DriftlabError(f"{path} does not exist") from error
    except OSError as error:
        raise DriftlabError(f"{path} cannot be read: {error.strerror or error}") from error
    except DriftlabError:
        raise
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, a number of 5,000 digits, brackets without end
        raise DriftlabError(f"{path} is not valid JSON ({error})") from error


def _no_number(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON number")


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{max(names, key=names.count)!r} comes twice in one object")
    return values


def sealed(values: Mapping[str, Any], leave: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return ``values`` with a checksum over all of them but those named in ``leave``."""
    return {**values, _CHECKSUM: _checksum(values, leave)}


def check_sealed(values: Mapping[str, Any], path: Path, advice: str, leave: tuple[str, ...] = ()) -> None:
    """Raise DriftlabError if ``values`` have a checksum and it is not theirs. Files of earlier versions have none."""
    if _CHECKSUM in values and values[_CHECKSUM] != _checksum(values, leave):
        raise DriftlabError(f"{path} is not what was written there (its checksum differs): {advice}")


def _checksum(values: Mapping[str, Any], leave: tuple[str, ...]) -> str:
    counted = {key: value for key, value in values.items() if key not in (_CHECKSUM, *leave)}
    return hashlib.sha256(json.dumps(counted, sort_keys=True).encode()).hexdigest()[:16]


def is_file(path: Path) -> bool:
    """Whether there is such a file; a name that no file can have is none (``Path.is_file`` raises for some)."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def refuse_outside(folder: Path, path: Path) -> None:
    """Raise DriftlabError if ``path`` in ``folder`` is a link to a file outside of it, as a folder of somebody else may have.

    Links of the Hugging Face cache, from ``snapshots/REVISION`` into ``blobs``, are inside.
    """
    if not path.is_symlink():
        return
    root, end = (
        Path(os.path.realpath(folder)),
        Path(os.path.realpath(path)),
    )  # unlike resolve, it takes a link to itself
    cached = root.parent.name == "snapshots" and end.is_relative_to(root.parent.parent / "blobs")
    if not cached and not end.is_relative_to(root):
        raise DriftlabError(
            f"{path} is a link to {path.readlink()}, outside of its folder, and is not followed: copy the file there, or give "
            "the folder that it lies in"
        )


def sort_metadata(path: Path) -> None:
    """Sort the metadata of a safetensors file in place: the library writes it in random order, so equal files differ."""
    with open(path, "r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        file.seek(8)
        file.write(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size))


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _explained(error: OSError, path: Path) -> DriftlabError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return DriftlabError(
            f"no space left while writing {path}: what was finished before is kept; free space and run the same command"
        )
    if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        return DriftlabError(f"cannot write {path}: {error.strerror}; choose another folder or change its permissions")
    return DriftlabError(f"cannot write {path}: {error}")


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file's bytes, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
