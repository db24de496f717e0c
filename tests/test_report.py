"""One page that stands alone: nothing fetched, text escaped, numbers readable, written whole."""

import base64
import math
import re
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from driftlab.errors import DriftlabError
from driftlab.plotting import save_panel
from driftlab.report import write_report


class Page(HTMLParser):
    """Collects tags with attributes, the text, and whether tags nest."""

    VOID = ("meta", "img", "br", "link", "input")

    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self.open = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    def cells(self):
        return [word for word in self.words if word.strip()]


@pytest.fixture
def png(tmp_path):
    path = tmp_path / "panel.png"
    save_panel(Figure(figsize=(1, 1)), path)
    return path


def write(tmp_path, **parts):
    path = tmp_path / "report.html"
    empty = {"title": "t", "lead": "", "tables": {}, "panels": {}, "notes": [], "provenance": {}}
    write_report(path, **{**empty, **parts})
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    return text, page


def test_the_page_stands_alone(tmp_path, png):
    parts = {
        "title": "Drift of <b>four</b> & more",
        "lead": "One.\n\nTwo: see https://example.org.",
        "tables": {"tau": pd.DataFrame({"variant": ["eagle3"], "tau": [2.5]})},
        "panels": {"from a file": png, "from bytes": png.read_bytes()},
        "notes": ["<script>alert(1)</script>"],
        "provenance": {"git": {"commit": None}, "argv": ["driftlab", "a<b"]},
    }
    text, page = write(tmp_path, **parts)
    for tag, attributes in page.tags:
        assert tag not in ("script", "link", "iframe", "object", "b")
        for name in ("src", "href", "srcset", "data", "action"):
            assert "http" not in (attributes.get(name) or "")
    assert "url(" not in text
    assert "@import" not in text
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    assert [image["alt"] for image in images] == ["from a file", "from bytes"]
    for image in images:
        assert base64.b64decode(image["src"].removeprefix("data:image/png;base64,")) == png.read_bytes()
    assert "Drift of <b>four</b> & more" in page.words
    assert "<script>alert(1)</script>" in page.words
    assert len(re.findall('<p class="lead">', text)) == 2
    assert "prefers-color-scheme: dark" in text
    assert str(tmp_path) not in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["panel.png", "report.html"]


def test_the_same_parts_give_the_same_bytes(tmp_path, png):
    assert write(tmp_path, panels={"p": png})[0] == write(tmp_path, panels={"p": png})[0]


def test_numbers_are_readable(tmp_path):
    table = pd.DataFrame(
        {
            "n": [1234567, 3],
            "share": [0.123456, np.nan],
            "rms": [12.3456, -0.5],
            "big": [98765.4321, np.inf],
            "tiny": [1.5e-6, 0.0],
            "on": [True, False],
            "name": ["a<b", None],
        }
    )
    _, page = write(tmp_path, tables={"numbers": table})
    cells = page.cells()
    start = cells.index("name") + 1
    first, second = cells[start : start + 7], cells[start + 7 : start + 14]
    assert first == ["1,234,567", "0.123", "12.35", "98,765", "1.50e-06", "yes", "a<b"]
    assert second == ["3", "–", "−0.50", "∞", "0.00e+00", "no", "–"]


def test_a_named_index_is_a_column_and_row_numbers_are_not(tmp_path):
    table = pd.DataFrame({"variant": ["eagle3", "eagle31"], "depth": [1, 1], "tau": [2.0, 2.5]})
    _, page = write(tmp_path, tables={"t": table.pivot_table(index="variant", columns="depth", values="tau")})
    assert "eagle31" in page.cells()
    _, page = write(tmp_path, tables={"t": table[table["tau"] > 2.2]})
    assert "index" not in page.cells()


def test_a_long_table_is_cut_and_says_so(tmp_path):
    text, _ = write(tmp_path, tables={"t": pd.DataFrame({"x": np.arange(1500)})})
    assert "The first 200 of 1,500 rows." in text
    assert text.count("<tr>") == 201
    assert "The first" not in write(tmp_path, tables={"t": pd.DataFrame({"x": [1]})})[0]
    write(tmp_path, tables={"t": pd.DataFrame()})


def test_a_panel_that_is_missing_or_no_png_is_named_and_nothing_is_written(tmp_path):
    for panel in (tmp_path / "none.png", b"<svg/>"):
        with pytest.raises(DriftlabError, match="'tau by depth'"):
            write(tmp_path, panels={"tau by depth": panel})
    assert list(tmp_path.iterdir()) == []


def test_a_small_p_value_is_not_zero(tmp_path):
    table = pd.DataFrame(
        {"name": ["a", "b", "c"], "p": [0.00005, 0.0181, math.nan], "p_adjusted": [0.0005, 1.0, math.nan]}
    )
    text, page = write(tmp_path, tables={"Tests": table})
    assert "0.000" not in text
    assert [cell for cell in page.cells() if cell in ("< .001", "0.001", "0.018", "1.000", "–")] == [
        *("< .001", "0.001", "0.018", "1.000", "–", "–")
    ]
