"""The notebooks as committed. `make notebooks`, a part of `make check`, runs every one of them from top to bottom."""

import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NAMES = [path.name for path in NOTEBOOKS]
#: what an extra brings: notebook -> module
NEEDS = {"06_nnsight.ipynb": "nnsight"}


def outputs(notebook):
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def test_there_are_notebooks_in_reading_order():
    assert len(NOTEBOOKS) >= 6
    assert [name[:3] for name in NAMES] == [f"{place:02d}_" for place in range(1, len(NAMES) + 1)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_a_notebook_is_committed_as_it_ran(path):
    text = path.read_text(encoding="utf-8")
    notebook = nbformat.reads(text, as_version=4)
    nbformat.validate(notebook)
    assert len(text) < 300_000
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [cell.id for cell in notebook.cells if cell.metadata]  # such as the times of a run
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    found = outputs(notebook)
    assert len(found) >= 3
    assert not [o for o in found if o.output_type == "error" or o.get("name") == "stderr"]
    assert notebook.cells[0].source.startswith("# ")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_a_notebook_shows_no_place_of_a_machine(path):
    notebook = nbformat.read(path, as_version=4)
    words = [str(o.get("text") or o.get("data", {}).get("text/plain", "")) for o in outputs(notebook)]
    words += [cell.source for cell in notebook.cells]
    assert not re.search(r"/(tmp|home|root|work|Users|mnt|opt)/", "\n".join(words))
