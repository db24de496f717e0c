"""The words that a newcomer reads: every name is in the API reference, every link and command of the pages is there."""

import importlib.util
import re
from pathlib import Path

import pytest

import driftlab

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("experiments/*.md")])
README = (ROOT / "README.md").read_text(encoding="utf-8")
#: [words](place), with or without the mark of a picture
LINK = re.compile(r"(!?)\[[^\]]*\]\(([^)\s]+)\)")


def anchors(path):
    """The headings of a page, as links name them."""
    heads = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def broken(page):
    """The links of a page that lead nowhere."""
    lost = []
    for _, place in LINK.findall(page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", place):
            continue
        name, _, anchor = place.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            lost.append(place)
    return lost


@pytest.fixture(scope="module")
def build_api():
    pytest.importorskip("pdoc")
    spec = importlib.util.spec_from_file_location("build_api", ROOT / "docs" / "build_api.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    assert not broken(page)


def test_a_lost_link_would_be_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# One Head\n[a](gone.md) [b](#one-head) [c](#other) [d](https://example.org) ![e](page.md)")
    assert broken(page) == ["gone.md", "#other"]


def test_the_readme_shows_a_small_picture():
    pictures = [ROOT / place for mark, place in LINK.findall(README) if mark]
    assert pictures
    for picture in pictures:
        assert picture.suffix == ".png"
        assert picture.stat().st_size < 300_000


def test_commands_of_the_readme_exist():
    from driftlab import cli

    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    made = set(re.findall(r"\bmake ([a-z]+)\b(?=`|  )", README))
    assert {"demo", "test"} <= made <= targets
    scripts = set(re.findall(r"python ((?:experiments|docs)/\w+\.py)", README))
    assert scripts
    assert not [script for script in scripts if not (ROOT / script).is_file()]
    said = set(re.findall(r"(?:^    |`)driftlab ([a-z]+)\b", README, re.MULTILINE))
    assert said
    source = "".join(path.read_text(encoding="utf-8") for path in Path(cli.__file__).parent.glob("*.py"))
    assert not [name for name in said if not re.search(rf"^def {name}\(", source, re.MULTILINE)]


def test_every_public_name_is_in_the_api_reference(build_api):
    import pdoc

    build_api.resolve()
    page = pdoc.doc.Module(driftlab)
    told = {name for name in driftlab.__all__ if callable(getattr(driftlab, name))}  # SHIPPED and VARIANTS are data
    assert {name for name, shown in page.members.items() if shown.docstring.strip()} >= told
    assert set(driftlab.__all__) <= set(page.members)


def test_the_reference_is_built(build_api, tmp_path):
    page = build_api.build(tmp_path, ["driftlab.errors"]).read_text(encoding="utf-8")
    assert {"DriftlabError", "BackendWarning"} <= set(re.findall(r'<section id="(\w+)">', page))
    assert (tmp_path / "search.js").exists()


def test_the_reference_has_every_module_but_triton_source(build_api):
    names = build_api.modules()
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in (ROOT / "driftlab").rglob("*.py")
        if path.name != "__main__.py" and not path.stem.endswith("_kernels")
    }
    assert set(names) == files
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", driftlab.__all__)
def test_what_a_public_name_offers_says_what_it_does(name):
    value = getattr(driftlab, name)
    assert value.__doc__
    if isinstance(value, type):
        own = [member for member in vars(value).values() if callable(member) or isinstance(member, property)]
        functions = [member.fget if isinstance(member, property) else member for member in own]
        named = [f for f in functions if not getattr(f, "__name__", "_").startswith("_")]
        assert not [f.__qualname__ for f in named if not f.__doc__ and f.__module__.startswith("driftlab")]


def test_the_table_of_licences_has_the_bounds_of_the_project():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *(one for group in project["optional-dependencies"].values() for one in group)]
    table = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    for requirement in wanted:
        name, bound = re.match(r"([\w.-]+)(?:\[.*\])?\s*([^;]*)", requirement).groups()
        if name != "driftlab":
            assert f"| {name} | {bound.strip()} |" in table, f"run docs/licences.py again: {requirement}"
