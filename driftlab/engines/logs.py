r"""What a tool printed, read from its log or output file, in the terms of :mod:`driftlab.engines.conventions`.

    vllm-log          "SpecDecoding metrics: ..." lines            vllm-prometheus   one scrape of /metrics
    vllm-requests     JSON, metrics.speculative_decoding           sglang-log        "Decode batch ... accept len: ..." lines
    sglang-meta       JSON, meta_info with spec_verify_ct          trtllm            report_json or log of trtllm-bench
    safeailab         answer JSONL with idxs                       spec-bench        answer JSONL with accept_lengths
    speed-bench       acceptance_rate.json of specdec_bench        modelopt-profile  speculation_profile.json
    speculators       acceptance.csv

Windows are pooled by counts; ratios are never averaged over windows (SafeAILab/EAGLE#95). Where a window does not print its
counts, the pooled ratio is only known to lie between the windows' smallest and largest: the value is None, with bounds and a
reason. A line that should hold numbers and does not is reported by its number; where the sums would be wrong without it, the
text is refused. A record that comes again counts once, as it was last. Not read: SGLang's bench_serving summary, speculators'
Parquet table, AIPerf's exports, vLLM before V1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import pandas as pd

from driftlab.engines import jsonreaders, logreaders
from driftlab.engines.found import Found, LogValue
from driftlab.engines.trtllm import trtllm
from driftlab.engines.vllmlog import vllm_log
from driftlab.errors import DriftlabError
from driftlab.histogram import EngineReport


@dataclass(frozen=True)
class EngineLog:
    """``values`` of a log in ``format``; ``parts``: windows, requests or runs in it; ``skipped``: (line, what was wrong)."""

    format: str
    source: str
    parts: int
    values: tuple[LogValue, ...]
    skipped: tuple[tuple[int, str], ...] = ()

    def __getitem__(self, quantity: str | tuple[str, int]) -> LogValue:
        """Return the value of a quantity, or of (quantity, position)."""
        key = (quantity, 0) if isinstance(quantity, str) else quantity
        for value in self.values:
            if (value.quantity, value.position) == key:
                return value
        raise DriftlabError(f"{self.source}: no {key} in this log; it has {sorted({v.quantity for v in self.values})}")


def read_engine_log(path_or_text: Path | str, format: str = "auto") -> EngineLog:
    """Read a tool's log or output.

    Args:
        path_or_text: a file; a string with a line break, a brace or a colon and a space in it is the text itself.
        format: a name of :data:`FORMATS`, or "auto".

    Raises:
        DriftlabError: no such file or format, text that fits no format or several, no line with numbers in it, or several
            reports, servers or models that do not pool.
    """
    is_text = isinstance(path_or_text, str) and re.search(r"[\n{]|: ", path_or_text)
    source = "text" if is_text else str(path_or_text)
    text = path_or_text if is_text else _read(Path(path_or_text))
    if format == "auto":
        fitting = [name for name, (mark, _) in FORMATS.items() if re.search(mark, text)]
        if len(fitting) != 1:
            told = "looks like several formats" if fitting else "looks like no format that is known"
            advice = "say which it is" if fitting else "is it the whole log or output file of that tool?"
            raise DriftlabError(
                f"{source} {told} ({', '.join(fitting or FORMATS)}): {advice} (format=..., on the command line --log-format)"
            )
        format = fitting[0]
    if format not in FORMATS:
        raise DriftlabError(f"no log format {format!r}: choose from auto, {', '.join(FORMATS)}")
    mark, reader = FORMATS[format]
    found = Found()
    reader(text, found)
    if not found.parts:
        first = "; ".join(f"line {line}: {what}" for line, what in found.skipped[:1])
        raise DriftlabError(
            f"{source}: nothing of format {format} (looked for {mark!r}) could be used; {len(found.skipped)} of "
            f"{text.count(chr(10)) + 1} lines had it and were broken{'; ' + first if first else ''}"
        )
    return EngineLog(format, source, found.parts, tuple(found.values), tuple(found.skipped))


def beside(report: EngineReport, log: EngineLog) -> pd.DataFrame:
    """Return a row per quantity (and position): ours with bounds, theirs with bounds, and why one of them is missing.

    Fractions, as everywhere; ``unit`` "%" says that the tool prints 100 times as much.

    Raises:
        DriftlabError: the log is not of the tool that the report is for. Tools use the same words for other numbers.
    """
    check_pair(report.engine, log)
    ours = {(v.quantity, v.position): v for v in report.values}
    theirs = {(v.quantity, v.position): v for v in log.values}
    rows = []
    for key in [*ours, *(key for key in theirs if key not in ours)]:
        mine, his = ours.get(key), theirs.get(key)
        reasons = [
            v.reason if v else f"{side} does not have it" for v, side in ((mine, report.engine), (his, log.format))
        ]
        rows.append(
            {
                "quantity": key[0],
                "position": key[1],
                "name": (his or mine).name,
                "unit": mine.unit if mine else "",
                **{f"ours{end}": getattr(mine, name, None) for end, name in _ENDINGS},
                **{f"theirs{end}": getattr(his, name, None) for end, name in _ENDINGS},
                "reason": "; ".join(filter(None, reasons)),
            }
        )
    numbers = [f"{side}{end}" for side in ("ours", "theirs") for end, _ in _ENDINGS]
    return pd.DataFrame(rows).astype(dict.fromkeys(numbers, "float64"))


def check_pair(engine: str, log: EngineLog) -> None:
    """Raise a DriftlabError unless a log's numbers are those of the convention ``engine`` (:data:`SPEAKS_FOR`)."""
    fitting = SPEAKS_FOR[log.format]
    if engine not in fitting:
        raise DriftlabError(
            f"{log.source}: a log of format {log.format} does not belong beside {engine}, whose numbers are made otherwise: "
            f"choose {' or '.join(fitting)}"
        )


_ENDINGS = (("", "value"), ("_low", "low"), ("_high", "high"))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        raise DriftlabError(f"{path}: cannot be read as a log ({error.strerror})") from error


#: name -> (what such a text has in it, reader)
FORMATS: Mapping[str, tuple[str, Callable[[str, Found], None]]] = MappingProxyType(
    {
        "vllm-log": ("SpecDecoding metrics:", vllm_log),
        "vllm-prometheus": ("vllm:spec_decode_num_", logreaders.vllm_prometheus),
        "vllm-requests": ('"num_spec_steps"', jsonreaders.vllm_requests),
        "sglang-log": ("accept len:", logreaders.sglang_log),
        "sglang-meta": ('"spec_verify_ct"', jsonreaders.sglang_meta),
        "trtllm": (r'"decoding_stats"|\[AL\] AVERAGE', trtllm),
        "safeailab": ('"idxs"', jsonreaders.safeailab),
        "spec-bench": ('"accept_lengths"', jsonreaders.spec_bench),
        "speed-bench": ('"Acceptance_Length_Histogram"', jsonreaders.speed_bench),
        "modelopt-profile": ('"marginal_accept_rates"', jsonreaders.modelopt_profile),
        "speculators": ("num_drafts,num_draft_tokens", logreaders.speculators),
    }
)

#: format -> conventions (:data:`driftlab.engines.conventions.CONVENTIONS`) whose numbers it holds
SPEAKS_FOR: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "vllm-log": ("vllm", "speculators"),
        "vllm-prometheus": ("vllm", "speculators"),
        "vllm-requests": ("vllm", "speculators", "aiperf"),
        "sglang-log": ("sglang-server",),
        "sglang-meta": ("sglang", "specforge"),
        "trtllm": ("tensorrt-llm",),
        "safeailab": ("safeailab",),
        "spec-bench": ("spec-bench",),
        "speed-bench": ("speed-bench", "speed-bench-trimmed"),  # the file does not say which version made it
        "modelopt-profile": ("modelopt-profile",),
        "speculators": ("speculators", "vllm"),
    }
)
