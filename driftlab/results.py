"""Numbers leave as rows: one tidy frame, one observation a row, every row with the settings that make it comparable.

A value is a ratio pooled over ``n`` starts, rounds or tokens (an expected number of them where chance decides), so the
mean weighted by ``n`` over any of the keys is the pooled ratio again: ``sum(value * n) / sum(n)``. A missing value is NaN
and leaves every mean together with its ``n``; it is never 0. Intervals come from a bootstrap over prompts, the independent
units; the starts of one prompt are not.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePath, PureWindowsPath
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from driftlab.errors import DriftlabError
from driftlab.files import atomic, write_json

FORMAT_VERSION = 3
ADDED = {"2": ("intervention",)}
"""columns that files of an older version do not have; their neutral value is what held then"""
CSV_HEAD = "# driftlab rows v"
PARQUET_KEY = b"driftlab_rows"

SETTINGS = {
    "variant": "str",
    "fc_norm": "bool",
    "norm_output": "bool",
    "target": "str",
    "drafter": "str",
    "depth_max": "int64",
    "drafting": "str",
    "feed": "str",
    "starts": "str",
    "temperature": "float64",
    "top_k": "int64",
    "top_p": "float64",
    "draft_temperature": "float64",
    "draft_top_k": "int64",
    "draft_top_p": "float64",
    "template": "str",
    "dtype": "str",
    "ttt": "int64",
    "seed": "int64",
    "rule": "str",
    "intervention": "str",
}
KEYS = {
    "prompt": "str",
    "category": "str",
    "layer": "int64",
    "head": "int64",
    "depth": "int64",
    "window": "int64",
    "quantity": "str",
}
COLUMNS = {**SETTINGS, **KEYS, "value": "float64", "n": "float64", "low": "float64", "high": "float64"}
REQUIRED = ("quantity", "value")
MAY_BE_MISSING = ("value", "low", "high")
NEUTRAL: dict[str, Any] = {
    **{name: {"str": "", "bool": False, "int64": 0, "float64": 0.0}[dtype] for name, dtype in COLUMNS.items()},
    "layer": -1,
    "head": -1,
    "top_p": 1.0,
    "draft_top_p": 1.0,
    "n": 1.0,
    "low": np.nan,
    "high": np.nan,
}
#: (fc_norm, norm_output) of the four variants that have a name
TOGGLES = {"eagle3": (False, False), "fc_norm": (True, False), "norm_output": (False, True), "eagle31": (True, True)}
_TOGGLE_NAMES = ("fc_norm", "norm_output")
#: the settings in which two variants of one comparison differ
VARYING = ("variant", "fc_norm", "norm_output", "drafter")


def as_rows(records: pd.DataFrame | Iterable[Mapping[str, Any]], **settings: Any) -> pd.DataFrame:
    """Make a frame that obeys the row contract, in the order of :data:`COLUMNS`.

    ``records`` holds keys and values (``quantity`` and ``value`` at least), ``settings`` what is the same for all of
    them. What is absent becomes neutral: "" or 0, -1 for ``layer`` and ``head``, 1 for ``n``, NaN for the interval; the
    two toggles follow from the name of the variant where that is one of the four. Unknown or doubled columns, missing
    required ones and values of another type are a :class:`DriftlabError`.
    """
    frame = pd.DataFrame(records if isinstance(records, pd.DataFrame) else list(records))
    frame = frame.reset_index(drop=True)
    _refuse_unknown([*frame.columns, *settings])
    if doubled := [name for name in settings if name in frame.columns]:
        raise DriftlabError(f"column {doubled[0]!r} is both in the records and in the settings: give it once")
    if len(frame) and (lacking := [name for name in REQUIRED if name not in frame.columns]):
        raise DriftlabError(f"rows need the column {lacking[0]!r}; these have {list(frame.columns)}")
    if frame.columns.intersection(["variant", *_TOGGLE_NAMES]).empty:
        settings = _named_toggles(settings)
    else:
        frame = frame.assign(**_toggles(frame, settings))
    rows = pd.DataFrame(
        {name: _cast(frame[name], name) if name in frame else _same(settings, name, len(frame)) for name in COLUMNS},
        columns=list(COLUMNS),
    )
    check(rows)
    return rows


def check(frame: pd.DataFrame) -> None:
    """Check columns, types, ranges and that no two rows share all settings and keys.

    Raises :class:`DriftlabError`, which names the rule and the first row that breaks it.
    """
    _refuse_unknown(frame.columns)
    if lacking := [name for name in COLUMNS if name not in frame.columns]:
        raise DriftlabError(f"rows lack the column(s) {lacking}; make them with results.as_rows")
    for name, dtype in COLUMNS.items():
        column = frame[name]
        right = pd.api.types.is_string_dtype(column) if dtype == "str" else column.dtype == dtype
        if not right:
            raise DriftlabError(f"column {name!r} is {column.dtype}, not {dtype}; make rows with results.as_rows")
        if name not in MAY_BE_MISSING:
            _refuse(frame, column.isna(), f"{name!r} is missing")
    _refuse(frame, frame["quantity"] == "", "'quantity' is empty")
    _refuse(frame, frame["depth"] < 0, "'depth' is below 0 (depths count from 1; 0 is 'not by depth')")
    _refuse(frame, frame["n"] < 0, "'n' is below 0")
    for variant, (fc_norm, norm_output) in TOGGLES.items():
        other = (frame["fc_norm"] != fc_norm) | (frame["norm_output"] != norm_output)
        _refuse(
            frame,
            (frame["variant"] == variant) & other,
            f"variant {variant!r} has fc_norm={fc_norm} and norm_output={norm_output}, not other toggles",
        )
    _refuse(frame, frame.duplicated([*SETTINGS, *KEYS]), "an earlier row has the same settings and keys")


def mixed_settings(frame: pd.DataFrame, varying: Sequence[str] = VARYING) -> dict[str, list[Any]]:
    """Return the settings outside ``varying`` that take more than one value in ``frame``, with their values."""
    found = {name: sorted(frame[name].unique().tolist()) for name in SETTINGS if name not in varying}
    return {name: values for name, values in found.items() if len(values) > 1}


def combine(frames: Iterable[pd.DataFrame], varying: Sequence[str] = VARYING) -> pd.DataFrame:
    """Put frames under one another; warn, naming columns and values, where they are not comparable.

    Numbers for another K, temperature, template or way to draft do not belong in one comparison (SafeAILab/EAGLE#143,
    sglang#11948), so a difference in a setting outside ``varying`` is a ``UserWarning``. No frames, or rows that occur
    twice, are a :class:`DriftlabError`.
    """
    frames = list(frames)
    if not frames:
        raise DriftlabError("nothing to combine: give at least one frame of rows")
    for frame in frames:
        check(frame)
    whole = pd.concat([frame[list(COLUMNS)] for frame in frames], ignore_index=True)
    check(whole)
    if mixed := mixed_settings(whole, varying):
        told = "; ".join(f"{name}: {', '.join(map(repr, values))}" for name, values in mixed.items())
        warnings.warn(f"these rows differ in settings that make them incomparable ({told})", stacklevel=2)
    return whole


def _refuse_unknown(names: Iterable[str]) -> None:
    if unknown := [name for name in names if name not in COLUMNS]:
        raise DriftlabError(f"unknown column(s) {unknown} in the rows; known are {list(COLUMNS)}")


def _refuse(frame: pd.DataFrame, wrong: pd.Series, rule: str) -> None:
    if wrong.any():
        position = int(np.argmax(wrong.to_numpy()))
        row = frame.iloc[[position]].to_dict("records")[0]
        told = ", ".join(f"{name}={row[name]!r}" for name in ("variant", "prompt", "head", "depth", "quantity"))
        raise DriftlabError(f"row {position} ({told}): {rule}")


def _toggles(frame: pd.DataFrame, settings: Mapping[str, Any]) -> dict[str, pd.Series]:
    """Both toggles of rows that name their variants: as given, else from the variant's name."""
    filled = {}
    wanted = ("variant", *_TOGGLE_NAMES)
    column = {name: frame.get(name, pd.Series([settings.get(name)] * len(frame), dtype=object)) for name in wanted}
    for place, name in enumerate(_TOGGLE_NAMES):
        given = column[name]
        known = column["variant"].map({variant: both[place] for variant, both in TOGGLES.items()}).astype(object)
        filled[name] = given.astype(object).where(given.notna(), known)
    return filled


def _named_toggles(settings: Mapping[str, Any]) -> dict[str, Any]:
    """``settings`` with the toggles that follow from the variant's name, where they are not given."""
    both = TOGGLES.get(settings.get("variant"))
    known = {} if both is None else dict(zip(_TOGGLE_NAMES, both, strict=True))
    return {**settings, **{name: value for name, value in known.items() if settings.get(name) is None}}


def _same(settings: Mapping[str, Any], name: str, count: int) -> pd.Series:
    """A column that holds one value: checked and cast once, not once a row."""
    column = pd.Series([settings.get(name)] * min(count, 1), dtype=object)
    return _cast(column, name).take(np.zeros(count, dtype=int)).reset_index(drop=True)


def _cast(column: pd.Series, name: str) -> pd.Series:
    """Fill what is absent, refuse another type (a cut 1.5 or a true "False" would pass unseen), set the dtype."""
    dtype = COLUMNS[name]
    if name not in REQUIRED:
        column = column.astype(object).where(column.notna(), NEUTRAL[name])
    elif name == "value":
        column = column.astype(object).where(column.notna(), np.nan)
    held = pd.api.types.infer_dtype(column, skipna=False)
    numbers = ("floating", "integer", "mixed-integer-float", "integer-na", "empty")
    allowed = {"str": ("string", "empty"), "bool": ("boolean", "empty")}.get(dtype, numbers)
    cut = dtype == "int64" and held in numbers[:3] and not column.map(lambda number: float(number).is_integer()).all()
    if held not in allowed or cut:
        raise DriftlabError(f"column {name!r} wants {dtype} and holds {held} values such as {column.iloc[0]!r}")
    return column.astype(dtype)


# ---------------------------------------------------------------------------------------------- files


def write_rows(path: Path | str, frame: pd.DataFrame, provenance: Mapping[str, Any] | None = None) -> None:
    """Write checked rows to ``path`` (.parquet or .csv), whole or not at all; ``provenance`` to ``<stem>.run.json``.

    The format's version goes into the file: as schema metadata of Parquet, as the first line of CSV. Another suffix,
    rows that break the contract, or a file that cannot be written are a :class:`DriftlabError`.
    """
    path = Path(path)
    write = _by_suffix(path, parquet=_write_parquet, csv=_write_csv)
    check(frame)
    if provenance is not None:
        # first, so that a table that is there always has its provenance
        write_json(path.with_name(f"{path.stem}.run.json"), _portable(dict(provenance)))
    with atomic(path) as temporary:
        write(temporary, frame[list(COLUMNS)])


def read_rows(path: Path | str) -> pd.DataFrame:
    """Read rows written by :func:`write_rows`; a missing, broken or differently versioned file is a
    :class:`DriftlabError` that names it.
    """
    path = Path(path)
    read = _by_suffix(path, parquet=_read_parquet, csv=_read_csv)
    try:
        frame = read(path)
        check(frame)
        return frame[list(COLUMNS)]
    except FileNotFoundError as error:
        raise DriftlabError(f"{path} does not exist") from error
    except DriftlabError as error:
        raise DriftlabError(f"{path}: {error}") from error
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DriftlabError(f"{path} cannot be read as driftlab rows ({error})") from error


def _by_suffix(path: Path, **choices: Any) -> Any:
    suffix = path.suffix.lower().lstrip(".")
    if suffix not in choices:
        raise DriftlabError(
            f"{path}: rows are kept as .parquet or .csv, not as {path.suffix or 'a name without suffix'!r}"
        )
    return choices[suffix]


def _write_parquet(path: Path, frame: pd.DataFrame) -> None:
    table = pa.Table.from_pandas(frame, preserve_index=False)
    table = table.replace_schema_metadata({PARQUET_KEY: str(FORMAT_VERSION)})
    pq.write_table(table, path, write_page_checksum=True)


def _read_parquet(path: Path) -> pd.DataFrame:
    table = pq.read_table(path, page_checksum_verification=True)
    stored = (table.schema.metadata or {}).get(PARQUET_KEY, b"").decode()
    return _brought_up(table.to_pandas(), stored)


def _write_csv(path: Path, frame: pd.DataFrame) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.write(f"{CSV_HEAD}{FORMAT_VERSION}\n")
        frame.to_csv(file, index=False, lineterminator="\n")


def _read_csv(path: Path) -> pd.DataFrame:
    with open(path, "rb") as file:
        first = file.readline().decode("utf-8").strip()
        if file.seek(0, 2) and file.seek(-1, 2) is not None and file.read(1) != b"\n":
            raise DriftlabError("its last line has no end: it was cut short (or end it with a line break)")
    stored = first.removeprefix(CSV_HEAD) if first.startswith(CSV_HEAD) else ""
    _check_version(stored)
    # numbers come as text and are parsed by float: pandas' own parser is off by a bit before version 3.1
    floats = [name for name, dtype in COLUMNS.items() if dtype == "float64"]
    # a prompt may be called "NA": only an empty number is missing
    frame = pd.read_csv(path, skiprows=1, dtype={**COLUMNS, **dict.fromkeys(floats, "str")}, keep_default_na=False)
    held = [name for name in floats if name in frame.columns]
    return _brought_up(
        frame.assign(**{name: frame[name].replace("", "nan").astype("float64") for name in held}), stored
    )


def _brought_up(frame: pd.DataFrame, stored: str) -> pd.DataFrame:
    """Return the rows of a file as this version has them."""
    _check_version(stored)
    return frame.assign(**{name: NEUTRAL[name] for name in ADDED.get(stored, ())})


def _check_version(stored: str) -> None:
    if not stored:
        raise DriftlabError("no driftlab format version in it: it was not written by results.write_rows")
    if stored != str(FORMAT_VERSION) and stored not in ADDED:
        raise DriftlabError(
            f"written as driftlab rows v{stored}, and this driftlab reads v{FORMAT_VERSION}: "
            "use the driftlab that wrote it, or make the rows again"
        )


# ---------------------------------------------------------------------------------------------- provenance

PACKAGES = ("driftlab", "torch", "transformers", "tokenizers", "safetensors", "numpy", "pandas", "pyarrow", "triton")


def provenance(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a reader needs to repeat a run, ready for JSON: versions, platform, command, time, commit, settings.

    Nothing in it names a machine or a person: absolute paths are cut to their last part. A package that is not
    installed, or a commit where driftlab is not tracked by git, is None. Nothing is imported to find the versions.
    """
    return {
        "versions": {name: _version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "argv": [PurePath(sys.argv[0]).name, *map(_portable, sys.argv[1:])] if sys.argv else [],
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "git": _git_state(Path(__file__).resolve().parent),
        "settings": _portable(settings),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _git_state(folder: Path) -> dict[str, Any]:
    """Commit and dirty flag of the work tree that tracks ``folder``; None for both if there is none, or no git."""
    try:
        # an installed copy inside another project's ignored .venv is not of that project's commit
        _git(folder, "ls-files", "--error-unmatch", Path(__file__).name)
        head, *changes = _git(folder, "status", "--porcelain=v2", "--branch", "--untracked-files=no").splitlines()
        commit = head.removeprefix("# branch.oid ")
        if commit != "(initial)":  # a tree without any commit
            return {"commit": commit, "dirty": any(not line.startswith("#") for line in changes)}
    except (OSError, subprocess.SubprocessError):
        pass
    return {"commit": None, "dirty": None}


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()


def _portable(value: Any) -> Any:
    """Make ``value`` fit for JSON, without the machine's folders and without NaN."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(key): _portable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_portable(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    before, equals, after = str(value).rpartition("=")
    return f"{before}{equals}{_without_folder(after)}"


def _without_folder(text: str) -> str:
    for path in (PurePath(text), PureWindowsPath(text)):
        if path.is_absolute() and len(path.parts) > 2:
            return path.name
    return text
