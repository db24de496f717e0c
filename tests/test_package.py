"""The public names: each resolves, on first use, and what draws figures starts without torch."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import driftlab

LIGHT = ["driftlab", "driftlab.results", "driftlab.plotting", "driftlab.report", "driftlab.prompts", "driftlab.files"]


def child(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("module", LIGHT)
def test_what_reads_tables_imports_neither_torch_nor_transformers(module):
    loaded = child(f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))")
    assert module in loaded
    assert not {"torch", "transformers"} & set(loaded)


def test_importing_the_package_costs_next_to_nothing():
    code = "import json, time; t = time.process_time(); import driftlab; print(json.dumps(time.process_time() - t))"
    assert child(code) < 0.5


@pytest.mark.parametrize("name", driftlab.__all__)
def test_every_public_name_resolves_to_the_thing_of_that_name(name):
    value = getattr(driftlab, name)
    assert name in dir(driftlab)
    if hasattr(value, "__name__"):
        assert value.__name__ == name
    assert value.__doc__


def test_names_resolve_on_first_use_only():
    code = (
        "import json, sys, driftlab; before = 'driftlab.errors' in sys.modules; driftlab.DriftlabError\n"
        "print(json.dumps([before, 'driftlab.errors' in sys.modules, 'torch' in sys.modules]))"
    )
    assert child(code) == [False, True, False]


def test_a_name_that_does_not_exist_is_named():
    with pytest.raises(AttributeError, match="'speculte'"):
        driftlab.speculte  # noqa: B018


def test_type_checkers_see_the_names_that_exist():
    tree = ast.parse(Path(driftlab.__file__).read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    told = {alias.name for block in blocks for node in block.body for alias in node.names}
    assert told == set(driftlab.__all__)
