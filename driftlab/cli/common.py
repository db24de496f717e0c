"""What the subcommands share: loading by name with a progress bar, naming, words for tables."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

from driftlab.errors import DriftlabError

DType = Literal["float32", "bfloat16", "float16"]


def progress_bar() -> Any:
    """Return a bar on stderr."""
    from driftlab.progress import ProgressBar

    return ProgressBar()


def dtype_of(name: str) -> Any:
    """Return the torch dtype of a name."""
    import torch

    return getattr(torch, name)


def load_target(
    name: str,
    device: str,
    dtype: str,
    aux_layers: tuple[int, ...] | None,
    drafters: tuple[str, ...] = (),
    given: tuple[str, ...] = (),
) -> Any:
    """Load a target with a progress bar; it captures ``aux_layers`` and the states that some drafters read."""
    from driftlab import Target

    for drafter in drafters:
        check_name(drafter)
    # any layers do until the drafters' are known: a small target has no default ones
    layers = aux_layers or ((0,) if drafters else None)
    target = Target.load(name, device=device, dtype=dtype_of(dtype), aux_layers=layers, progress=progress_bar())
    if drafters:
        target.aux_layers = _read_by(drafters, target, given, set(aux_layers or ()))
    return target


def _read_by(drafters: tuple[str, ...], target: Any, given: tuple[str, ...], more: set[int]) -> tuple[int, ...]:
    """Return the states that the drafters read, and more, ascending; MTP heads read the final one, which is always kept."""
    from driftlab.drafter.formats.reading import read_checkpoint

    layers = set(more)
    for name in drafters:
        reading = read_checkpoint(name, **given_values(given))
        for words in reading.layer_notes(target):
            print(f"{name}: {words}", file=sys.stderr)
        layers |= set(reading.config_for(target).aux_layers)
    return tuple(sorted(layers)) or (target.spec.num_layers,)


def open_lender(name: str) -> Any:
    """Open a recording, or load a target."""
    from driftlab import Trajectory

    if (Path(name) / "trajectory.json").is_file():
        return Trajectory.open(Path(name))
    return load_target(name, "cpu", "float32", (0,))  # no states are wanted, and a shallow target has no default ones


_WORDS = {"on": True, "yes": True, "off": False, "no": False, "none": None, "null": None}


def given_values(said: tuple[str, ...]) -> dict[str, Any]:
    """Read name=value; whether it can be a value of that name is checked where the file is read."""
    words = named_words("--given", said)
    values = {name: word if name == "revision" else given_value(word) for name, word in words.items()}
    if values:
        _refuse_unknown(values)
    return values


def named_words(option: str, said: tuple[str, ...]) -> dict[str, str]:
    """Split name=value words. Raises DriftlabError for one without "=", and for a name that comes twice."""
    words: dict[str, str] = {}
    for word in said:
        name, equals, value = (part.strip() for part in word.partition("="))
        if not equals:
            raise DriftlabError(f"{option} {word}: wants name=value")
        if name in words:
            raise DriftlabError(f"{option} says {name} twice")
        words[name] = value
    return words


def _refuse_unknown(values: dict[str, Any]) -> None:
    from driftlab.drafter.formats.reading import READING_OPTIONS, SETTINGS

    known = SETTINGS | READING_OPTIONS | {"revision"}
    if unknown := sorted(set(values) - known):
        raise DriftlabError(f"--given {', '.join(unknown)}: no such convention; there are {', '.join(sorted(known))}")


def given_value(text: str) -> Any:
    """Read true, on, yes and their opposites, none, a number, a list with commas, or JSON; else it is a name."""
    import json

    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for spelling in (text, text.lower()):  # True and False, as in Python
        try:
            return json.loads(spelling)
        except (json.JSONDecodeError, RecursionError):
            continue
    if "," in text and text[0] not in "[{":
        return [given_value(part.strip()) for part in text.strip(",").split(",")]
    return text


def load_drafter(path: Path, trajectory: Any, device: str, given: tuple[str, ...] = ()) -> Any:
    """Load a drafter for a recording; what was assumed goes to stderr."""
    from driftlab import Drafter
    from driftlab.devices import usable_device

    check_name(path)
    drafter = Drafter.load(path, trajectory, **given_values(given)).to(usable_device(device)).eval()
    for note in drafter.notes:
        print(f"{path.name}: {note}", file=sys.stderr)
    return drafter


def check_name(path: Path | str) -> None:
    """Raise DriftlabError if a drafter's name can be neither a folder, a file, a Hugging Face id nor a shipped one."""
    from driftlab import SHIPPED

    path = Path(path)
    if str(path) not in SHIPPED and len(path.parts) == 1 and not path.exists():  # a Hugging Face id has an owner
        raise DriftlabError(
            f"there is no drafter {str(path)!r}: no folder or file here, and those shipped are {', '.join(SHIPPED)}"
        )


def named(paths: tuple[Path, ...], out: Path, given: tuple[str, ...] = ()) -> dict[str, Path]:
    """Give each drafter folder the shortest name that no other has, from its end, with what was given; refuse ``out`` first."""
    if not paths:
        raise DriftlabError("name at least one drafter folder")
    if out.suffix not in (".parquet", ".csv"):
        raise DriftlabError(f"{out}: rows are written as .parquet or .csv")
    folders = [path.resolve() for path in paths]
    if len(set(folders)) < len(folders):
        raise DriftlabError("the same drafter folder is named twice")
    for parts in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-parts:]) for folder in folders]
        if len(set(names)) == len(names):
            break
    more = f" ({', '.join(given)})" if given else ""  # two readings of one file are two drafters
    return {f"{name}{more}": path for name, path in zip(names, paths, strict=True)}


def sink_words(trajectory: Any) -> str:
    """Say where the sink is, and how that is known."""
    report = trajectory.sink_report
    if tuple(report["positions"]) != trajectory.sinks:
        return f"positions {list(trajectory.sinks)} (given)"
    if not report["found"]:
        return f"position 0, assumed ({report['reason']})"
    tops = [top for top in report["top"] if top["position"] in report["positions"]]
    told = ", ".join(f"{top['position']} ({top['token']!r}, mean mass {top['mass']:.2f})" for top in tops)
    return f"position{'s' if len(tops) > 1 else ''} {told} in the target"


def table_words(table: Any) -> str:
    """Return a table as text."""
    from driftlab.report import P_VALUES, p_words

    words = table.assign(**{name: [p_words(p) for p in table[name]] for name in P_VALUES if name in table})
    return words.to_string(index=False, float_format=lambda x: f"{x:.3f}", na_rep="")
