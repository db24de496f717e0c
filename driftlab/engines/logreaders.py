r"""Readers of texts that are lines, one a format; :mod:`driftlab.engines.logs` says which and calls them.

A reader takes the text and fills a :class:`driftlab.engines.found.Found`. Windows, requests and runs are pooled by counts. A
line that should hold numbers and does not is noted with its number, or refused where the rest would be pooled without it.
"""

from __future__ import annotations

import csv
import io
import math
import re

from driftlab.engines.found import SEVERAL_LENGTHS, VLLM, Found, marked
from driftlab.errors import DriftlabError

_COUNTER = re.compile(r"vllm:spec_decode_num_(\w+?)(?:_total)?(\{.*\})?\s+(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)(?:\s+\d+)?")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_COUNTERS = ("drafts", "draft_tokens", "accepted_tokens")
_BY_POSITION = "accepted_tokens_per_pos"

Labels = frozenset[tuple[str, str]]


def vllm_prometheus(text: str, found: Found) -> None:
    """Counters of one scrape, summed over the engines of one model.

    Counters are ratios of sums, so one that is lost makes all of them wrong: a broken line, an engine that is not in every
    counter, several models or several scrapes (counters only grow) are a :class:`DriftlabError`.
    """
    counts = _scrape(text)
    if not counts:
        return
    engines = {name: {labels for other, labels, _ in counts if other == name} for name in (*_COUNTERS, _BY_POSITION)}
    if absent := [f"num_{name}" for name in _COUNTERS if not engines[name]]:
        raise DriftlabError(f"counters {absent} are not there: give the whole scrape")
    everyone = set.union(*engines.values())
    for name, there in engines.items():
        if there != everyone and (there or name != _BY_POSITION):
            lacking = sorted(map(sorted, everyone - there))
            raise DriftlabError(
                f"num_{name} lacks {lacking[0]}, which other counters have: a line is lost or a label differs"
            )
    if len(models := {value for labels in everyone for key, value in labels if key == "model_name"}) > 1:
        raise DriftlabError(f"counters of several models {sorted(models)}: give the lines of one")
    sums = [sum(count for (name, _, _), count in counts.items() if name == wanted) for wanted in _COUNTERS]
    passed = _by_position(counts, everyone) if engines[_BY_POSITION] else []
    found.parts = 1
    why = SEVERAL_LENGTHS if passed and sums[1] != len(passed) * sums[0] else ""
    found.counters(*sums, passed, VLLM, why)


def _scrape(text: str) -> dict[tuple[str, Labels, int], float]:
    """Counters by name, labels without the position, and position (-1: none)."""
    counts: dict[tuple[str, Labels, int], float] = {}
    for number, line in marked(text, "vllm:spec_decode_num_"):
        if line.startswith("#"):
            continue
        parts = _COUNTER.fullmatch(line.strip())
        labels = dict(_LABEL.findall(parts.group(2) or "")) if parts else {}
        place = labels.pop("position", "-1")
        if not parts or (parts.group(1) == _BY_POSITION) != (place != "-1") or not place.removeprefix("-").isdigit():
            raise DriftlabError(
                f"line {number}: broken counter {line.strip()[-60:]!r}: what it counted is lost, so the sums would be wrong"
            )
        key = (parts.group(1), frozenset(labels.items()), int(place))
        if key in counts:
            raise DriftlabError(f"line {number}: {key[0]} comes twice: counters only grow, so give one scrape")
        if not key[0].endswith("_created"):
            counts[key] = float(parts.group(3))
    return counts


def _by_position(counts: dict[tuple[str, Labels, int], float], engines: set[Labels]) -> list[float]:
    """Accepted tokens by position, summed; refused if positions are missing or the sum is not the number accepted."""
    tables = []
    for labels in engines:
        at = {place: count for (name, other, place), count in counts.items() if (name, other) == (_BY_POSITION, labels)}
        if sorted(at) != list(range(len(at))):
            raise DriftlabError(f"num_{_BY_POSITION} of {sorted(labels)} has positions {sorted(at)}: some are lost")
        if (whole := counts["accepted_tokens", labels, -1]) != sum(at.values()):
            raise DriftlabError(
                f"num_{_BY_POSITION} of {sorted(labels)} adds up to {sum(at.values()):g}, not to {whole:g} accepted tokens"
            )
        tables.append([at[place] for place in sorted(at)])
    if len(depths := {len(table) for table in tables}) > 1:
        raise DriftlabError(f"engines of several K {sorted(depths)}: give the lines of one")
    return [sum(column) for column in zip(*tables, strict=True)]


def sglang_log(text: str, found: Found) -> None:
    """A window prints ratios and no counts, so several cannot be pooled: only bounds are known."""
    lengths, rates = [], []
    for number, line in marked(text, "accept len:"):
        length = re.search(r"(?<!block )accept len: (\d+\.\d\d)\b", line)
        rate = re.search(r"accept rate: (\d+\.\d\d)\b", line)
        if not length or ("accept rate" in line and not rate):
            found.skipped.append((number, f"broken line: {line.strip()[-60:]!r}"))
            continue
        found.parts += 1
        lengths.append(float(length.group(1)))
        rates += [float(rate.group(1))] if rate else []
    why = "windows print no counts: the pooled ratio lies between their smallest and largest"
    if lengths:
        found.printed("accept len", "tokens_per_round", lengths, 0.005, why)
    if rates and len(rates) == len(lengths):
        found.printed("accept rate", "accept_rate", rates, 0.005, why)
    elif rates:
        told = f"{len(lengths) - len(rates)} of {len(lengths)} windows print no accept rate"
        found.add("accept rate", "accept_rate", None, reason=told)


def speculators(text: str, found: Found) -> None:
    """acceptance.csv of scripts/evaluate: a row a subset, pooled by counts."""
    totals, passed, depths = [0.0, 0.0, 0.0], [], set()
    columns = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    for number, row in enumerate(csv.DictReader(io.StringIO(text)), 2):
        try:
            counts = [float(row[name]) for name in columns]
            names = sorted((n for n in row if n and n.startswith("acceptance_at_pos_")), key=lambda n: int(n[18:]))
            at = [float(row[name]) * counts[0] for name in names]
            length = float(row.get("acceptance_length") or "nan")
        except (KeyError, TypeError, ValueError) as error:
            found.skipped.append((number, f"broken row ({error})"))
            continue
        if not all(0 <= count < math.inf for count in (*counts, *at)):
            found.skipped.append((number, f"broken row: {counts} and {at} must be finite and not negative"))
            continue
        if counts[0] and abs(length - 1 - counts[2] / counts[0]) > 0.00501:
            found.skipped.append((number, f"acceptance_length {length:g} is not 1 + {counts[2]:g} / {counts[0]:g}"))
            continue
        found.parts += 1
        depths |= {counts[1] / counts[0]} if counts[0] else set()
        totals = [a + b for a, b in zip(totals, counts, strict=True)]
        passed = [a + b for a, b in zip(passed or [0.0] * len(at), at, strict=True)]
    if found.parts:
        why = "" if depths <= {float(len(passed))} else SEVERAL_LENGTHS
        found.counters(*totals, passed, "acceptance_length|accepted / drafted|acceptance_at_pos_i", why)
