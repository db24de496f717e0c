r"""Readers of JSON files and JSON lines, one a format; :mod:`driftlab.engines.logs` says which and calls them.

Counts are pooled; a printed ratio is used to check them, or as itself where there is one. An entry that is broken, or that
contradicts itself, is noted with its line (of JSON lines) or its place (in a JSON list).
"""

from __future__ import annotations

from driftlab.engines.found import SEVERAL_LENGTHS, VLLM, Found
from driftlab.engines.jsontext import (
    Record,
    added,
    first_choices,
    last_of_each,
    mapping,
    number,
    numbers,
    records,
    table,
)
from driftlab.errors import DriftlabError

_CLOSE = 1e-3  # of printed ratios that check counts


def vllm_requests(text: str, found: Found) -> None:
    """metrics.speculative_decoding of responses (vllm#48915): counts of every request."""
    rounds = drafted = accepted = 0.0
    passed: list[float | int] = []
    lengths, rates, depths = [], [], set()
    must = {"num_spec_steps": number, "acceptance_histogram": numbers, "num_draft_tokens": number}
    may = {"num_accepted_draft_tokens": number, "mean_acceptance_length": number, "num_spec_tokens": number}
    named = []
    for place, entry, holders in records(text, found, must, may):
        ids = [holder["id"] for holder in holders if "metrics" in holder and "id" in holder]
        named.append((ids[-1] if ids else None, (place, entry)))
    for place, entry in last_of_each(named, found, "id"):
        made, took, beyond = _counted(entry["acceptance_histogram"])
        if wrong := _vllm_contradiction(entry, made, took):
            found.skipped.append((place, wrong))
            continue
        found.parts += 1
        rounds, accepted, drafted = rounds + made, accepted + took, drafted + entry["num_draft_tokens"]
        passed = added(passed, beyond)
        if made:
            depths.add(entry["num_draft_tokens"] / made)
            lengths.append(1 + took / made)
            rates.append(took / entry["num_draft_tokens"] if entry["num_draft_tokens"] else 0.0)
    if found.parts:
        found.counters(rounds, drafted, accepted, passed, VLLM, _uneven(depths, passed))
        found.ratio("mean_acceptance_length", "tokens_per_round_mean", sum(lengths), len(lengths))
        found.ratio("draft_acceptance_rate", "accept_rate_mean", sum(rates), len(rates))


def _vllm_contradiction(entry: Record, made: float | int, took: float | int) -> str:
    told, mean = entry.get("num_accepted_draft_tokens"), entry.get("mean_acceptance_length")
    depth, drafts = entry.get("num_spec_tokens"), entry["num_draft_tokens"]
    if made != entry["num_spec_steps"]:
        return f"acceptance_histogram {entry['acceptance_histogram']} does not sum to num_spec_steps"
    if told is not None and told != took:
        return f"num_accepted_draft_tokens {told} is not the {took} of acceptance_histogram"
    if made and mean is not None and abs(mean - 1 - took / made) > _CLOSE:
        return f"mean_acceptance_length {mean} is not 1 + {took} / {made}"
    if took > drafts or (depth is not None and drafts > depth * made):
        return f"num_draft_tokens {drafts} is less than accepted, or more than num_spec_tokens a step"
    return ""


def sglang_meta(text: str, found: Found) -> None:
    """meta_info of responses. Accepted drafts have two names, and are absent from old versions."""
    tokens = made = took = proposed = 0.0
    lengths, rates, passed, depths = [], [], [], set()
    whole = tabled = True
    must = {"spec_verify_ct": number, "completion_tokens": number}
    may = dict.fromkeys([*_SGLANG[0], *_SGLANG[1], "spec_accept_length"], number) | dict.fromkeys(_SGLANG[2], numbers)
    named = ((entry.get("id"), (place, entry)) for place, entry, _ in records(text, found, must, may))
    for place, entry in last_of_each(named, found, "id"):
        rounds, completion = entry["spec_verify_ct"], entry["completion_tokens"]
        accepted, drafts, counts = (entry.get(new, entry.get(old)) for new, old in _SGLANG)
        if wrong := _sglang_contradiction(entry, accepted, drafts, counts):
            found.skipped.append((place, wrong))
            continue
        found.parts += 1
        tokens, made = tokens + completion, made + rounds
        if not rounds:
            continue
        lengths.append(completion / rounds)
        whole, tabled = whole and accepted is not None and bool(drafts), tabled and bool(counts)
        if whole:
            took, proposed = took + accepted, proposed + drafts
            rates.append(accepted / drafts)
            depths.add(drafts / rounds)
            passed = added(passed, _counted(counts or [])[2])
    if not found.parts:
        return
    found.add("spec_verify_ct", "rounds", made)
    found.ratio("spec_accept_length", "tokens_per_round_prefill_mean", sum(lengths), len(lengths))
    found.ratio("completion_tokens / spec_verify_ct", "tokens_per_round_prefill", tokens, made)
    if whole and made:
        found.ratio("spec_accept_rate", "accept_rate_mean", sum(rates), len(rates))
        found.ratio("(accepted + rounds) / rounds", "tokens_per_round", took + made, made)
        found.ratio("accepted / drafted", "accept_rate", took, proposed)
        why = _uneven(depths, passed) if tabled else "not every request has a histogram"
        found.positions("spec_correct_drafts_histogram", passed, made, why)
    else:
        why = "accepted drafts are not in every request's meta_info"
        for quantity in ("accept_rate_mean", "tokens_per_round", "accept_rate"):
            found.add("spec_num_correct_drafts", quantity, None, reason=why)


#: new and old names
_SGLANG = (
    ("spec_num_correct_drafts", "spec_accept_token_num"),
    ("spec_num_proposed_drafts", "spec_draft_token_num"),
    ("spec_correct_drafts_histogram", "spec_accept_histogram"),
)


def _sglang_contradiction(
    entry: Record, accepted: float | int | None, drafts: float | int | None, counts: list[float | int] | None
) -> str:
    rounds, completion, told = entry["spec_verify_ct"], entry["completion_tokens"], entry.get("spec_accept_length")
    if rounds and told is not None and abs(told - completion / rounds) > _CLOSE:
        return f"spec_accept_length {told} is not {completion} / {rounds}"
    if accepted is not None and drafts is not None and accepted > drafts:
        return f"{accepted} drafts accepted of {drafts}"
    if counts and (sum(counts) != rounds or (accepted is not None and _counted(counts)[1] != accepted)):
        return f"histogram {counts} is not of {rounds} rounds and {accepted} accepted drafts"
    return ""


def safeailab(text: str, found: Found) -> None:
    """Answers of SafeAILab/EAGLE: ``idxs`` counts one round too few (the index of the last)."""
    tokens = rounds = 0.0
    by_question = []
    for place, entry in first_choices(text, found, {"idxs": numbers, "new_tokens": numbers}):
        if len(entry["idxs"]) != len(entry["new_tokens"]) or not entry["idxs"]:
            found.skipped.append((place, "idxs and new_tokens are empty or of different lengths"))
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
    lengths: list[float | int] = []
    for _, entry in first_choices(text, found, {"accept_lengths": numbers}):
        found.parts += 1
        lengths += entry["accept_lengths"]
    if found.parts:
        found.add("len(accept_lengths)", "rounds", float(len(lengths)))
        found.ratio("#Mean accepted tokens", "tokens_per_round", sum(lengths), len(lengths))


def speed_bench(text: str, found: Found) -> None:
    """acceptance_rate.json of specdec_bench: runs pooled by their histograms, rates made from them.

    Rates are not read: the printed joint rate has two definitions, and the histogram one.
    """
    sizes: dict[int, float | int] = {}
    averages, turns = [], []
    may = dict.fromkeys(("Average_AL", "Average_AR"), number) | dict.fromkeys(("Request_AL", "Request_AR"), mapping)
    for place, entry, _ in records(text, found, {"Acceptance_Length_Histogram": table}, may):
        average, requests = (entry.get(f"{name}_AL", entry.get(f"{name}_AR")) for name in ("Average", "Request"))
        own = [t for told in (requests or {}).values() for t in (told.values() if isinstance(told, dict) else [told])]
        if average is None or not numbers(own):
            found.skipped.append((place, "no Average_AL" if average is None else f"Request_AL {own} are no numbers"))
            continue
        found.parts += 1
        averages.append(average)
        turns.append(own)
        for size, count in entry["Acceptance_Length_Histogram"].items():
            sizes[int(size)] = sizes.get(int(size), 0) + count
    if not found.parts:
        return
    if found.parts == 1:
        found.add("Average_AL", "average_al", averages[0])
    elif all(turns):
        found.ratio("Average_AL", "average_al", sum(map(sum, turns)), sum(map(len, turns)))
    else:
        why = "not every run tells its turns (Request_AL), so runs cannot be weighted by them"
        found.printed("Average_AL", "average_al", averages, 0.0, why)
    _chunk_rates(sizes, found)


def _chunk_rates(sizes: dict[int, float | int], found: Found) -> None:
    """Mean length and rates of a histogram of chunk lengths."""
    before = total = sum(sizes.values())
    found.ratio("mean of the histogram", "tokens_per_chunk", sum(size * count for size, count in sizes.items()), total)
    for size in sorted(size for size in sizes if size > 1):
        longer = sum(count for other, count in sizes.items() if other >= size)
        found.ratio("Conditional_Acceptance_Rate", "accept_conditional", longer, before, size - 1)
        found.ratio("Joint_Acceptance_Rate", "joint", longer, total, size - 1)
        before = longer


def modelopt_profile(text: str, found: Found) -> None:
    """speculation_profile.json; a profile that says it is not measured is no profile."""
    rates, means = ("conditional_accept_rates", "marginal_accept_rates"), ("tokens_per_chunk", "average_al")
    names = ("mean_accept_length", "mean_accept_length_per_request")
    for place, entry, _ in records(text, found, {rates[1]: numbers, rates[0]: numbers}):
        if not entry.get("measured"):
            found.skipped.append((place, "measured is false: a placeholder"))
            continue
        if found.parts:
            raise DriftlabError("several profiles in one file: give one")
        if len(entry[rates[0]]) != len(entry[rates[1]]) or not all(number(entry.get(name)) for name in names):
            found.skipped.append(
                (place, f"{' and '.join(rates)} differ in length, or {' or '.join(names)} is no number")
            )
            continue
        found.parts = 1
        for name, quantity in zip(names, means, strict=True):
            found.add(name, quantity, entry[name])
        for k, (conditional, marginal) in enumerate(zip(entry[rates[0]], entry[rates[1]], strict=True), 1):
            found.add(rates[0], "accept_conditional", conditional, k)
            found.add(rates[1], "joint", marginal, k)


def _counted(histogram: list[float | int]) -> tuple[float | int, float | int, list[float | int]]:
    """Rounds, accepted drafts, and rounds that accepted 1, 2, ... or more, of rounds by accepted drafts."""
    beyond = [sum(histogram[k:]) for k in range(1, len(histogram))]
    return sum(histogram), sum(beyond), beyond


def _uneven(depths: set[float], passed: list[float | int]) -> str:
    """Why there is nothing by position, where requests or rounds had several K; empty where all had one."""
    one = len(depths) <= 1 and all(depth.is_integer() and depth >= len(passed) for depth in map(float, depths))
    return "" if one else SEVERAL_LENGTHS
