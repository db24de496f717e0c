r"""Reader of trtllm-bench's report_json and log: averages over requests of drafted (DT) and accepted (ADT) tokens, DAR and AL.

DT and ADT are plain means, so ADT / DT is the pooled rate. AL and DAR are weighted by iterations since 2026 and plain means
before. Where DAR is not ADT / DT they are plain. Where it is, they are weighted, or plain and alike by chance: the pooled
length then lies near AL in both cases, since a request's AL - 1 is K times its DAR and so are the averages,

    pooled AL - 1 = (AL - 1) (ADT / DT) / DAR,

and the plain means are not told.
"""

from __future__ import annotations

import re

from driftlab.engines.found import Found
from driftlab.engines.jsontext import mapping, number, records
from driftlab.errors import DriftlabError

_NAMES = {"num_draft_tokens": "DT", "num_accepted_draft_tokens": "ADT", "draft_acceptance_rate": "DAR"}
_NAMES |= {"acceptance_length": "AL"}
_WIDE = 0.01
_UNTOLD = "the averages are plain or weighted by iterations, and the printed rates agree with both"


def trtllm(text: str, found: Found) -> None:
    """One report. Several are a :class:`DriftlabError`: a report does not say how many requests it is of."""
    logged = re.search(r"\[AL\] AVERAGE", text) is not None
    numbers = _of_log(text) if logged else _of_report(text, found)
    if not all(number(numbers.get(tag)) for tag in _NAMES.values()):
        found.skipped.append((0, f"averages of {', '.join(_NAMES.values())} are not all there: {numbers}"))
        return
    found.parts = 1
    half = 0.005 if logged else 0.0
    drafted, accepted, rate, length = (numbers[tag] for tag in _NAMES.values())
    low, high = max(0.0, accepted - half) / (drafted + half) if drafted else 0.0, 0.0
    if drafted:
        high = min(1.0, (accepted + half) / (drafted - half)) if drafted > half else 1.0
        found.add("[ADT] AVERAGE / [DT] AVERAGE", "accept_rate", accepted / drafted, low=low, high=high)
    else:
        found.ratio("[ADT] AVERAGE / [DT] AVERAGE", "accept_rate", accepted, drafted)
    step = half + 1e-6
    if not low - step <= rate <= high + step:
        found.printed("[AL] AVERAGE", "tokens_per_iteration_mean", [length], half, "")
        found.printed("[DAR] AVERAGE", "accept_rate_mean", [rate], half, "")
        return
    bounds = _pooled_length(length, rate, low, high, half)
    known = not logged and bounds[1] - bounds[0] <= _WIDE * length
    found.add("[AL] AVERAGE", "tokens_per_iteration", length if known else None, low=bounds[0], high=bounds[1],
              reason="" if known else _UNTOLD)  # fmt: skip
    for tag, quantity in (("AL", "tokens_per_iteration_mean"), ("DAR", "accept_rate_mean")):
        found.add(f"[{tag}] AVERAGE", quantity, None, reason=_UNTOLD)


def _pooled_length(length: float | int, rate: float | int, low: float, high: float, half: float) -> tuple[float, float]:
    """Bounds of the pooled length: the averages are as printed if weighted, and 1 + (AL - 1) (ADT / DT) / DAR if plain."""
    if not rate:
        return (1.0, float("inf")) if half else (length, length)
    least = 1 + max(0.0, length - half - 1) * low / (rate + half)
    most = 1 + (length + half - 1) * high / (rate - half) if rate > half else float("inf")
    return min(least, length - half), max(most, length + half)


def _of_log(text: str) -> dict[str, float]:
    for tag in _NAMES.values():
        if (times := len(re.findall(rf"\[{tag}\] AVERAGE", text))) > 1:
            raise DriftlabError(f"{times} reports in one log ([{tag}] AVERAGE comes {times} times): give one")
    told = {tag: re.search(rf"\[{tag}\] AVERAGE\s*: (\d+\.\d\d)\b", text) for tag in _NAMES.values()}
    return {tag: float(part.group(1)) for tag, part in told.items() if part}


def _of_report(text: str, found: Found) -> dict[str, float | None]:
    names = {f"{name}_percentiles": tag for name, tag in _NAMES.items()}
    checks = dict.fromkeys(names, mapping)
    reports = list(records(text, found, {"acceptance_length_percentiles": mapping}, checks))
    if len(reports) > 1:
        raise DriftlabError(f"{len(reports)} reports in one file: give one")
    return {tag: (entry.get(name) or {}).get("average") for _, entry, _ in reports for name, tag in names.items()}
