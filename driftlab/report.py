"""One self-contained HTML page: lead, panels, tables, notes, provenance; it asks nothing of the network."""

from __future__ import annotations

import base64
import html
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from driftlab.errors import DriftlabError
from driftlab.files import write_text

PNG = b"\x89PNG\r\n\x1a\n"
ROWS_SHOWN = 200
P_VALUES = ("p", "p_adjusted")
# the policy makes a browser refuse whatever a later edit might try to fetch
HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="color-scheme" content="light dark">
"""
STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #5f6670; --line: #d9dde2; --page: #fdfdfc; --band: #f2f4f6; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7ea; --soft: #a2a9b2; --line: #3a4048; --page: #16191d; --band: #20252b; }
}
body { margin: 0 auto; padding: 2.5rem 1.25rem 4rem; max-width: 62rem; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .75rem; }
h2 { font-size: 1.1rem; margin: 2.5rem 0 .6rem; }
p, li { max-width: 46rem; }
p.lead { font-size: 1.08rem; }
figure { margin: 2rem 0; }
figure img { max-width: 100%; height: auto; background: #fff; border-radius: 6px; padding: .6rem;
  box-sizing: border-box; border: 1px solid var(--line); }
figcaption, .cut { color: var(--soft); font-size: .9rem; margin-top: .4rem; max-width: 46rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .32rem .8rem; border-bottom: 1px solid var(--line); text-align: left; white-space: nowrap; }
thead th { border-bottom: 2px solid var(--line); color: var(--soft); font-weight: 600; }
tbody tr:nth-child(even) { background: var(--band); }
.number { text-align: right; }
details { margin-top: 2.5rem; } summary { cursor: pointer; font-weight: 600; }
pre { overflow-x: auto; background: var(--band); padding: .8rem 1rem; border-radius: 6px; font-size: .82rem; }
@media print { body { max-width: none; padding: 0; } figure, table { break-inside: avoid; } }
"""


def write_report(
    path: Path | str,
    *,
    title: str,
    lead: str,
    tables: Mapping[str, pd.DataFrame],
    panels: Mapping[str, Path | str | bytes],
    notes: Sequence[str],
    provenance: Mapping[str, Any],
) -> None:
    """Write the page to ``path``, whole or not at all.

    The names in ``tables`` and ``panels`` are shown as headings and captions; a panel is a PNG as bytes or as a file.
    All text is escaped; a blank line in ``lead`` starts a paragraph. A missing number is a dash. Of a long table the
    first 200 rows are shown, and the page says so. A panel that is missing or no PNG is a :class:`DriftlabError`.
    """
    parts = [HEAD, f"<title>{_escaped(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"]
    parts.append(f"<h1>{_escaped(title)}</h1>\n")
    parts += [f'<p class="lead">{_escaped(words)}</p>\n' for words in lead.split("\n\n") if words.strip()]
    parts += [_panel(name, panel) for name, panel in panels.items()]
    parts += [_table(name, table) for name, table in tables.items()]
    if notes:
        parts.append("<h2>Notes</h2>\n<ul>\n" + "".join(f"<li>{_escaped(note)}</li>\n" for note in notes) + "</ul>\n")
    if provenance:
        stated = json.dumps(provenance, indent=2, ensure_ascii=False, default=str)
        parts.append(f"<details>\n<summary>How this was made</summary>\n<pre>{_escaped(stated)}</pre>\n</details>\n")
    parts.append("</main>\n</body>\n</html>\n")
    write_text(Path(path), "".join(parts))


def p_words(p: float) -> str:
    """Write a p-value to three decimals; one that would read 0.000 is "< .001"."""
    return "–" if _is_missing(p) else "< .001" if p < 0.0005 else f"{p:.3f}"


def _escaped(text: Any) -> str:
    return html.escape(str(text))


def _panel(name: str, panel: Path | str | bytes) -> str:
    if not isinstance(panel, bytes):
        try:
            panel = Path(panel).read_bytes()
        except OSError as error:
            raise DriftlabError(f"panel {name!r}: cannot read {panel} ({error.strerror})") from error
    if not panel.startswith(PNG):
        raise DriftlabError(f"panel {name!r} is not a PNG; save it with plotting.save_panel")
    data = base64.b64encode(panel).decode()
    words = _escaped(name)
    image = f'<img alt="{words}" src="data:image/png;base64,{data}">'
    return f"<figure>\n{image}\n<figcaption>{words}</figcaption>\n</figure>\n"


def _table(name: str, table: pd.DataFrame) -> str:
    if any(table.index.names) or not pd.api.types.is_integer_dtype(table.index):
        table = table.reset_index()
    shown = table.iloc[:ROWS_SHOWN]
    columns = _columns(shown)
    marks = [' class="number"' if _is_number(shown.iloc[:, place]) else "" for place in range(shown.shape[1])]
    head = "".join(f"<th{mark}>{_escaped(column)}</th>" for mark, column in zip(marks, table.columns, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{mark}>{_escaped(cell)}</td>" for mark, cell in zip(marks, row, strict=True)) + "</tr>\n"
        for row in zip(*columns, strict=True)
    )
    cut = f'<p class="cut">The first {ROWS_SHOWN} of {len(table):,} rows.</p>\n' if len(table) > ROWS_SHOWN else ""
    return (
        f'<h2>{_escaped(name)}</h2>\n<div class="wide">\n<table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}</tbody>\n</table>\n</div>\n{cut}"
    )


def _columns(table: pd.DataFrame) -> list[list[str]]:
    """Write the cells. Where rows are quantities, each has the decimals that its own largest number calls for."""
    written = [
        [p_words(p) for p in table.iloc[:, place]] if name in P_VALUES else _column(table.iloc[:, place])
        for place, name in enumerate(table.columns)
    ]
    wide = [i for i, name in enumerate(table.columns) if _is_float(table.iloc[:, i]) and name not in P_VALUES]
    if "quantity" in table.columns and len(wide) > 1:
        for place, row in enumerate(table.iloc[:, wide].to_numpy(dtype="float64")):
            form = _form(np.abs(row[np.isfinite(row) & (row != 0)]))
            for i, value in zip(wide, row, strict=True):
                written[i][place] = _number(value, form)
    return written


def _is_float(column: pd.Series) -> bool:
    return pd.api.types.is_float_dtype(column)


def _is_number(column: pd.Series) -> bool:
    return pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column)


def _column(column: pd.Series) -> list[str]:
    """Write the cells of a column: thousands apart, as many decimals as its largest number calls for."""
    if pd.api.types.is_bool_dtype(column):
        return ["yes" if value else "no" for value in column]
    if not _is_number(column):
        return [
            "–" if _is_missing(value) else f"{value:g}" if isinstance(value, float) else str(value) for value in column
        ]
    sizes = np.abs(column.to_numpy(dtype="float64", na_value=np.nan))
    sizes = sizes[np.isfinite(sizes) & (sizes > 0)]
    form = ",.0f" if pd.api.types.is_integer_dtype(column) else _form(sizes)
    return [_number(value, form) for value in column]


def _form(sizes: np.ndarray) -> str:
    if len(sizes) == 0:
        return ",.3f"
    if sizes.max() < 0.01:
        return ".2e"
    return f",.{min(3, max(0, 3 - math.floor(math.log10(sizes.max()))))}f"


def _number(value: Any, form: str) -> str:
    if _is_missing(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    text = format(value, form)
    return f"−{text[1:]}" if text.startswith("-") else text


def _is_missing(value: Any) -> bool:
    return value is None or value is pd.NA or value is pd.NaT or (isinstance(value, float) and math.isnan(value))
