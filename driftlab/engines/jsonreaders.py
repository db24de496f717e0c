r"""Readers of JSON files and JSON lines, one a format; :mod:`driftlab.engines.logs` says which and calls them.

Counts are pooled; a printed ratio is used to check them, or as itself where there is one. An entry that is broken is noted
with its line (of JSON lines) or its place (in a JSON list).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from driftlab.engines.logreaders import VLLM, Found
from driftlab.errors import DriftlabError


def vllm_requests(text: str, found: Found) -> None:
    """metrics.speculative_decoding of responses (vllm#48915): counts of every request."""
    rounds = drafted = accepted = 0.0
    passed: list[float | int] = []
    lengths, rates = [], []
    for number, entry in _entries(text, found, ("num_spec_steps", "acceptance_histogram")):
        table = entry["acceptance_histogram"]
        if not isinstance(table, list) or sum(table) != entry["num_spec_steps"]:
            found.skipped.append((number, f"acceptance_histogram {table} does not sum to num_spec_steps"))
            continue
        found.parts += 1
        made, took = sum(table), sum(j * count for j, count in enumerate(table))
        rounds, accepted, drafted = rounds + made, accepted + took, drafted + entry["num_draft_tokens"]
        passed = _added(passed, [sum(table[k:]) for k in range(1, len(table))])
        if made:
            lengths.append(1 + took / made)
            rates.append(took / entry["num_draft_tokens"] if entry["num_draft_tokens"] else 0.0)
    if found.parts:
        found.counters(rounds, drafted, accepted, passed, VLLM)
        found.ratio("mean_acceptance_length", "tokens_per_round_mean", sum(lengths), len(lengths))
        found.ratio("draft_acceptance_rate", "accept_rate_mean", sum(rates), len(rates))


def sglang_meta(text: str, found: Found) -> None:
    """meta_info of responses. Accepted drafts have two names, and are absent from old versions."""
    tokens = made = took = proposed = 0.0
    lengths, rates, passed, whole = [], [], [], True
    for number, entry in _entries(text, found, ("spec_verify_ct", "completion_tokens")):
        rounds, completion = entry["spec_verify_ct"], entry["completion_tokens"]
        told = entry.get("spec_accept_length")
        if rounds and told is not None and abs(told - completion / rounds) > 1e-3:
            found.skipped.append((number, f"spec_accept_length {told} is not {completion} / {rounds}"))
            continue
        found.parts += 1
        tokens, made = tokens + completion, made + rounds
        if not rounds:
            continue
        lengths.append(completion / rounds)
        accepted = entry.get("spec_num_correct_drafts", entry.get("spec_accept_token_num"))
        drafts = entry.get("spec_num_proposed_drafts", entry.get("spec_draft_token_num"))
        table = entry.get("spec_correct_drafts_histogram", entry.get("spec_accept_histogram"))
        if accepted is None or not drafts:
            whole = False
            continue
        took, proposed = took + accepted, proposed + drafts
        rates.append(accepted / drafts)
        if table and passed is not None and sum(table) == rounds:
            passed = _added(passed, [sum(table[k:]) for k in range(1, len(table))])
        else:
            passed = None
    if not found.parts:
        return
    found.add("spec_verify_ct", "rounds", made)
    found.ratio("spec_accept_length", "tokens_per_round_prefill_mean", sum(lengths), len(lengths))
    found.ratio("completion_tokens / spec_verify_ct", "tokens_per_round_prefill", tokens, made)
    if whole and made:
        found.ratio("spec_accept_rate", "accept_rate_mean", sum(rates), len(rates))
        found.ratio("(accepted + rounds) / rounds", "tokens_per_round", took + made, made)
        found.ratio("accepted / drafted", "accept_rate", took, proposed)
        for k, count in enumerate(passed or [], 1):
            found.ratio("spec_correct_drafts_histogram", "accept_unconditional", count, made, k)
    else:
        why = "accepted drafts are not in every request's meta_info"
        for quantity in ("accept_rate_mean", "tokens_per_round", "accept_rate"):
            found.add("spec_num_correct_drafts", quantity, None, reason=why)


def trtllm(text: str, found: Found) -> None:
    """decoding_stats of a report, or the log's averages, by name.

    The averages of drafted and accepted tokens are plain means over requests, so their ratio is the pooled rate. Whether the
    other two averages are weighted by iterations (they are since 2026) shows in whether the rate is that one.
    """
    names = {"num_draft_tokens": "DT", "num_accepted_draft_tokens": "ADT", "draft_acceptance_rate": "DAR"}
    names["acceptance_length"] = "AL"
    numbers, step = {}, 1e-6
    if re.search(r"\[AL\] AVERAGE", text):
        step = 0.0051
        for tag in names.values():
            if told := re.findall(rf"\[{tag}\] AVERAGE\s*: (\d+\.\d+)", text):
                numbers[tag] = float(told[-1])
    else:
        for _, entry in _entries(text, found, ("acceptance_length_percentiles",)):
            numbers = {tag: (entry.get(f"{name}_percentiles") or {}).get("average") for name, tag in names.items()}
    if any(numbers.get(tag) is None for tag in names.values()):
        found.skipped.append((0, f"averages of {', '.join(names.values())} are not all there: {numbers}"))
        return
    found.parts = 1
    pooled = numbers["ADT"] / numbers["DT"] if numbers["DT"] else 0.0
    ending = "" if abs(numbers["DAR"] - pooled) < step else "_mean"
    found.add("[AL] AVERAGE", "tokens_per_iteration" + ending, numbers["AL"])
    found.ratio("[ADT] AVERAGE / [DT] AVERAGE", "accept_rate", numbers["ADT"], numbers["DT"])
    if ending:
        found.add("[DAR] AVERAGE", "accept_rate_mean", numbers["DAR"])


def safeailab(text: str, found: Found) -> None:
    """Answers of SafeAILab/EAGLE: ``idxs`` counts one round too few (the index of the last)."""
    tokens = rounds = 0.0
    by_question = []
    for number, entry in _first_choices(text, found, ("idxs", "new_tokens")):
        if len(entry["idxs"]) != len(entry["new_tokens"]) or not entry["idxs"]:
            found.skipped.append((number, "idxs and new_tokens are empty or of different lengths"))
            continue
        found.parts += 1
        tokens, rounds = tokens + sum(entry["new_tokens"]), rounds + sum(entry["idxs"]) + len(entry["idxs"])
        if all(entry["idxs"]):
            by_turn = [new / last for new, last in zip(entry["new_tokens"], entry["idxs"], strict=True)]
            by_question.append(sum(by_turn) / len(by_turn))
    if found.parts:
        found.add("sum of (idxs + 1)", "rounds", rounds)
        found.ratio("new_tokens / (idxs + 1)", "tokens_per_round", tokens, rounds)
        found.ratio("alpha_length.py", "tokens_per_idx_mean", sum(by_question), len(by_question))


def spec_bench(text: str, found: Found) -> None:
    """Answers of Spec-Bench: tokens of every round, all turns in one list; only the first choice counts, as in speed.py."""
    lengths: list[float] = []
    for _, entry in _first_choices(text, found, ("accept_lengths",)):
        found.parts += 1
        lengths += entry["accept_lengths"]
    if found.parts:
        found.add("len(accept_lengths)", "rounds", float(len(lengths)))
        found.ratio("#Mean accepted tokens", "tokens_per_round", sum(lengths), len(lengths))


def speed_bench(text: str, found: Found) -> None:
    """acceptance_rate.json of specdec_bench: runs pooled by their histograms, rates made from them.

    Rates are not read: the printed joint rate has two definitions, and the histogram one.
    """
    table: dict[int, float] = {}
    averages, turns = [], []
    for number, entry in _entries(text, found, ("Acceptance_Length_Histogram",)):
        average = entry.get("Average_AL", entry.get("Average_AR"))
        if average is None:
            found.skipped.append((number, "no Average_AL"))
            continue
        found.parts += 1
        averages.append(average)
        requests = entry.get("Request_AL", entry.get("Request_AR", {})).values()
        turns += [turn for told in requests for turn in (told.values() if isinstance(told, dict) else [told])]
        for size, count in entry["Acceptance_Length_Histogram"].items():
            table[int(size)] = table.get(int(size), 0) + count
    if not found.parts:
        return
    one = found.parts == 1
    found.ratio("Average_AL", "average_al", averages[0] if one else sum(turns), 1 if one else len(turns))
    total = sum(table.values())
    found.ratio("mean of the histogram", "tokens_per_chunk", sum(size * count for size, count in table.items()), total)
    before = total
    for size in sorted(size for size in table if size > 1):
        longer = sum(count for other, count in table.items() if other >= size)
        found.ratio("Conditional_Acceptance_Rate", "accept_conditional", longer, before, size - 1)
        found.ratio("Joint_Acceptance_Rate", "joint", longer, total, size - 1)
        before = longer


def modelopt_profile(text: str, found: Found) -> None:
    """speculation_profile.json; a profile that says it is not measured is no profile."""
    for number, entry in _entries(text, found, ("marginal_accept_rates", "conditional_accept_rates")):
        if not entry.get("measured"):
            found.skipped.append((number, "measured is false: a placeholder"))
            continue
        if found.parts:
            raise DriftlabError("several profiles in one file: give one")
        found.parts = 1
        found.add("mean_accept_length", "tokens_per_chunk", entry["mean_accept_length"])
        found.add("mean_accept_length_per_request", "average_al", entry["mean_accept_length_per_request"])
        pairs = zip(entry["conditional_accept_rates"], entry["marginal_accept_rates"], strict=True)
        for k, (conditional, marginal) in enumerate(pairs, 1):
            found.add("conditional_accept_rates", "accept_conditional", conditional, k)
            found.add("marginal_accept_rates", "joint", marginal, k)


def _entries(text: str, found: Found, keys: tuple[str, ...]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Dictionaries with these keys, at any depth, of a JSON text (numbered by entry) or of JSON lines (by line)."""
    try:
        whole = json.loads(text)
        parts = list(enumerate(whole if isinstance(whole, list) else [whole], 1))
    except json.JSONDecodeError:
        parts = []
        for number, line in enumerate(text.splitlines(), 1):
            try:
                parts += [(number, json.loads(line))] if line.strip() else []
            except json.JSONDecodeError as error:
                found.skipped.append((number, f"not JSON ({error.msg} at {error.colno})"))
    for number, part in parts:
        there = list(_walk(part, keys))
        if not there:
            found.skipped.append((number, f"no {' and '.join(keys)} in it"))
        for entry in there:
            if bad := [key for key in keys if not _sound(entry[key])]:
                found.skipped.append((number, f"{bad[0]} is {entry[bad[0]]!r}, no number"))
            else:
                yield number, entry


def _first_choices(text: str, found: Found, keys: tuple[str, ...]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The first choice of every answer, the one that the tools' own scripts take."""
    seen = set()
    for number, entry in _entries(text, found, keys):
        if number not in seen:
            yield number, entry
        seen.add(number)


def _sound(value: Any) -> bool:
    """Numbers, lists of them, and dictionaries (which hold them)."""
    if isinstance(value, list):
        return all(_sound(item) for item in value)
    return isinstance(value, int | float | dict) and not isinstance(value, bool)


def _walk(part: Any, keys: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    if isinstance(part, dict) and all(key in part for key in keys):
        yield part
    elif isinstance(part, dict | list):
        for inner in part.values() if isinstance(part, dict) else part:
            yield from _walk(inner, keys)


def _added(a: list[float | int], b: list[float | int]) -> list[float | int]:
    """Sum by position; a histogram may be cut after its last count."""
    size = max(len(a), len(b))
    return [x + y for x, y in zip(a + [0.0] * (size - len(a)), b + [0.0] * (size - len(b)), strict=True)]
