"""The direct dependencies with their licences, as their own metadata state them; writes docs/dependencies.md.

python docs/licences.py        # in an environment where driftlab is installed with [dev,ray,gpu]; what is not there is said
"""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

_HERE = Path(__file__).parent
_HEAD = """# Direct dependencies and their licences

Made by `python docs/licences.py` from the metadata of what is installed; the licence is what each package says of itself
(`License-Expression`, else its classifiers, else the first line of `License`). driftlab itself is Apache-2.0.

| package | bound | for | installed | licence |
|---|---|---|---|---|
"""


def licence(name: str) -> tuple[str, str]:
    """Version and licence of an installed package."""
    try:
        told = importlib.metadata.metadata(name)
    except importlib.metadata.PackageNotFoundError:
        return "-", "not installed here"
    classifiers = [c.split(" :: ")[-1] for c in told.get_all("Classifier") or [] if c.startswith("License :: ")]
    first = next(iter((told.get("License") or "").strip().splitlines()), "")
    return told["Version"], told.get("License-Expression") or ", ".join(classifiers) or first[:60] or "not stated"


def main() -> None:
    """Write the table."""
    project = tomllib.loads((_HERE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = {"running": project["dependencies"], **project["optional-dependencies"]}
    rows: dict[str, tuple[str, list[str]]] = {}
    for group, requirements in groups.items():
        for requirement in requirements:
            name, bound = re.match(r"([\w.-]+)(?:\[.*\])?\s*([^;]*)", requirement).groups()
            if name != "driftlab":
                rows.setdefault(name, (bound.strip(), []))[1].append(group)
    lines = [
        f"| {name} | {bound} | {', '.join(groups)} | {' | '.join(licence(name))} |"
        for name, (bound, groups) in rows.items()
    ]
    (_HERE / "dependencies.md").write_text(_HEAD + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
