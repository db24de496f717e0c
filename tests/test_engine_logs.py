"""Logs as tools print them: pooled by counts, checked against themselves, broken lines told by number, beside our own."""

import json
import math
import re

import numpy as np
import pytest

from driftlab import DriftlabError
from driftlab.engines.conventions import CONVENTIONS, engine_report
from driftlab.engines.logs import FORMATS, SPEAKS_FOR, beside, check_pair, read_engine_log
from driftlab.histogram import RequestHistogram

HEAD = "(APIServer pid=1) INFO 10-26 12:36:16 [metrics.py:96] SpecDecoding metrics: "
SPEEDS = "Accepted throughput: 20.60 tokens/s, Drafted throughput: 60.90 tokens/s, "


def window(accepted, drafted, positions, *, mean=None, rate=None):
    """Print a vLLM window whose drafts all have as many tokens as there are positions."""
    rounds = drafted / len(positions)
    mean = 1 + accepted / rounds if mean is None else mean
    rate = 100 * accepted / drafted if rate is None else rate
    told = ", ".join(f"{p:.3f}" for p in positions)
    return (
        f"{HEAD}Mean acceptance length: {mean:.2f}, {SPEEDS}Accepted: {accepted} tokens, Drafted: {drafted} tokens, "
        f"Per-position acceptance rate: {told}, Avg Draft acceptance rate: {rate:.1f}%"
    )


# 203 rounds of 3 drafts, and 68
REAL = window(206, 609, (0.601, 0.286, 0.128))
SHORT = window(141, 204, (0.897, 0.676, 0.500))


# ---- vLLM


def test_vllm_windows_are_pooled_by_counts():
    log = read_engine_log(f"INFO nothing\n{REAL}\nINFO other\n{SHORT}\n")
    assert (log.format, log.parts, log.skipped) == ("vllm-log", 2, ())
    assert (log["rounds"].value, log["draft_tokens"].value, log["accepted"].value) == (271, 813, 347)
    assert log["tokens_per_round"].value == pytest.approx(1 + 347 / 271)
    mean_of_means = (2.01 + 3.07) / 2
    assert abs(log["tokens_per_round"].value - mean_of_means) > 0.2
    assert log["accept_rate"].value == pytest.approx(347 / 813)
    assert log["accept_unconditional", 1].value == pytest.approx((0.601 * 203 + 0.897 * 68) / 271)
    assert log["accept_unconditional", 3].value == pytest.approx((0.128 * 203 + 0.500 * 68) / 271)


def test_vllm_lines_of_older_versions():
    line = (
        "INFO 06-06 14:20:34 [metrics.py:86] SpecDecoding metrics: Draft acceptance rate: 38.8%, Mean acceptance length: 2.16, "
        "Accepted: 150 tokens, Drafted: 387 tokens, Per-position acceptance rate: 0.543, 0.357, 0.264\n"
    )
    log = read_engine_log(line)
    assert log["rounds"].value == 129
    assert log["tokens_per_round"].value == pytest.approx(1 + 150 / 129)


def test_vllm_lines_without_positions_do_not_tell_their_rounds():
    line = f"{HEAD}Mean acceptance length: %s, {SPEEDS}Accepted: %d tokens, Drafted: %d tokens, Avg Draft acceptance rate: %s%%"
    # 20 / .205 to 20 / .195 rounds, and not more than drafted
    one = read_engine_log(line % ("1.20", 20, 100, "20.0"))
    assert (one["rounds"].value, one["rounds"].low, one["rounds"].high) == (None, 98, 100)
    length = one["tokens_per_round"]
    assert (length.value, length.low, length.high) == pytest.approx((1.2, 1.195, 1.205))
    # 272 / .905 = 300.6 to 303.9, not more than 301 drafted: 301 rounds
    both = read_engine_log(line % ("1.90", 272, 301, "90.4") + "\n" + line % ("1.20", 20, 100, "20.0"))
    length = both["tokens_per_round"]
    assert (length.value, length.low, length.high) == (None, 1 + 292 / 401, 1 + 292 / 399)
    assert "rounds" in length.reason
    assert both["accept_rate"].value == pytest.approx(292 / 401)


def test_vllm_drafts_of_several_lengths():
    # 250 rounds of 1 to 3 drafts, fewer than 3 x 250 in all; 206 / .8255 to 206 / .8225 is 250 alone
    log = read_engine_log(window(206, 609, (0.5, 0.2, 0.124), mean=1.824))
    assert (log["rounds"].value, log["tokens_per_round"].value) == (250, 1 + 206 / 250)


def test_vllm_rounds_at_low_acceptance_are_bounds():
    # 250 rounds print what 203 rounds of 3 drafts would: 5 / .0215 to 5 / .0185
    text = window(5, 609, (0.016, 0.004, 0.0), mean=1.02)
    rounds = read_engine_log(text)["rounds"]
    assert (rounds.value, rounds.low, rounds.high) == (None, 233, 270)
    assert "several lengths" in rounds.reason
    both = read_engine_log(f"{text}\n{REAL}\n")
    assert (both["rounds"].value, both["rounds"].low, both["rounds"].high) == (None, 203 + 233, 203 + 270)
    length = both["tokens_per_round"]
    assert (length.value, length.low, length.high) == (None, 1 + 211 / 473, 1 + 211 / 436)
    first = both["accept_unconditional", 1]
    assert first.value is None
    assert first.low == pytest.approx((0.601 * 203 + 0.016 * 270) / 473 - 0.0005)
    assert first.high == pytest.approx((0.601 * 203 + 0.016 * 233) / 436 + 0.0005)
    # nothing accepted: 203 to 609 rounds, all of one token
    none = read_engine_log(window(0, 609, (0.0, 0.0, 0.0)))
    assert (none["rounds"].value, none["rounds"].low, none["rounds"].high) == (None, 203, 609)
    assert (none["tokens_per_round"].low, none["tokens_per_round"].value, none["tokens_per_round"].high) == (1, 1, 1)


def test_vllm_full_drafts_are_the_value_where_few_other_rounds_are_possible():
    # 5000 rounds of 3 drafts, 5075 accepted: 5075 / 1.0165 to 5075 / 1.0135 and not less than 5000
    log = read_engine_log(window(5075, 15000, (0.601, 0.286, 0.128)))
    rounds, length = log["rounds"], log["tokens_per_round"]
    assert (rounds.value, rounds.low, rounds.high) == (5000, 5000, 5007)
    assert (length.value, length.low, length.high) == (1 + 5075 / 5000, 1 + 5075 / 5007, 1 + 5075 / 5000)


def test_vllm_bounds_hold_the_rounds_that_made_the_line():
    """Rounds of 1 to 3 drafts at random, printed; the true counts must lie in the bounds, whatever they were."""
    random, low_acceptance = np.random.default_rng(1), 0
    for _ in range(100):
        drafts = random.integers(1, 4, size=random.integers(1, 300))
        accepted = np.minimum(random.geometric(random.uniform(0.4, 1.0), size=len(drafts)) - 1, drafts)
        at = [float((accepted >= k).mean()) for k in (1, 2, 3)]
        text = window(accepted.sum(), drafts.sum(), at, mean=1 + accepted.mean())
        log = read_engine_log(text)
        true = {"rounds": len(drafts), "tokens_per_round": 1 + accepted.mean()}
        true |= {("accept_unconditional", k): at[k - 1] for k in (1, 2, 3)}
        for key, number in true.items():
            assert log[key].low - 1e-9 <= number <= log[key].high + 1e-9
        low_acceptance += log["rounds"].value is None
    assert 10 < low_acceptance < 90


def test_a_vllm_log_of_several_K_is_refused():
    with pytest.raises(DriftlabError, match="line 2 has 1 positions and line 1 3"):
        read_engine_log(f"{REAL}\n{window(30, 60, (0.5,))}\n")


@pytest.mark.parametrize(
    "broken",
    [
        REAL[:-30],
        REAL[:120],
        REAL.replace("Accepted: 206", "Accepted: 2"),
        REAL.replace("0.286", "0.086"),
        "INFO SpecDecoding metrics: Draft acceptance rate: 38.8%, Mean acceptance length: 2.16, Accepted: 150 tokens, "
        "Drafted: 387 tokens, Per-position acceptance rate: 0.543, 0.3",
        "INFO SpecDecoding metrics: Draft acceptance rate: 38.8%, Mean acceptance length: 2.16, Accepted: 150 tokens, "
        "Drafted: 387 tokens, Per-position acceptance rate: 0.543, 0.357, 0.2",
    ],
)
def test_broken_vllm_lines_are_told_and_left_out(broken):
    log = read_engine_log(f"{SHORT}\nINFO\n{broken}\n")
    assert log.parts == 1
    assert [line for line, _ in log.skipped] == [3]
    assert log["accepted"].value == 141
    with pytest.raises(DriftlabError, match="1 of 2 lines had it and were broken; line 1"):
        read_engine_log(f"{broken}\n")


def test_a_vllm_window_without_drafts_changes_nothing():
    empty = f"{HEAD}Mean acceptance length: nan, {SPEEDS}Accepted: 0 tokens, Drafted: 0 tokens, Avg Draft acceptance rate: nan%"
    log = read_engine_log(f"{empty}\n{SHORT}\n{empty}\n")
    assert (log.parts, log.skipped, log["rounds"].value) == (3, (), 68)
    only = read_engine_log(empty)
    assert only["tokens_per_round"].value is None
    assert only["tokens_per_round"].reason


# two engines, K = 7: 4816 drafts of which all accept 1 or more, 2576 a third; 2.5348 accepted a draft
COUNTERS = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 4000.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 816.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 28000.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="m"} 5712.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 1.0208e+04
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="m"} 2000.0
"""
_AT = {0: (4000, 4000, 2208, 0, 0, 0, 0), 1: (816, 816, 368, 0, 0, 0, 0)}
COUNTERS += "".join(
    f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="{engine}",model_name="m",position="{k}"}} {count}.0\n'
    for engine, counts in _AT.items()
    for k, count in reversed(list(enumerate(counts)))
)


def test_vllm_counters_G6():
    log = read_engine_log(COUNTERS)
    assert log.format == "vllm-prometheus"
    assert (log["rounds"].value, log["draft_tokens"].value, log["accepted"].value) == (4816, 33712, 12208)
    assert round(log["tokens_per_round"].value, 2) == 3.53
    assert round(100 * log["accept_rate"].value, 1) == 36.2
    # positions count from 0 there and from 1 here
    told = [log["accept_unconditional", k].value for k in (1, 2, 3, 7)]
    assert told == pytest.approx([1, 1, 2576 / 4816, 0])
    assert read_engine_log(COUNTERS.replace("_total", ""))["rounds"].value == 4816


def test_two_scrapes_and_missing_counters_are_refused():
    with pytest.raises(DriftlabError, match="line 26: drafts comes twice"):
        read_engine_log(COUNTERS + COUNTERS)
    without = "\n".join(line for line in COUNTERS.splitlines() if "draft_tokens" not in line)
    with pytest.raises(DriftlabError, match="num_draft_tokens"):
        read_engine_log(without)
    with pytest.raises(DriftlabError, match="line 24: broken counter"):
        read_engine_log(COUNTERS + "vllm:spec_decode_num_accepted_tok")


@pytest.mark.parametrize("place", [*range(2, 3), *range(4, 22)])
def test_a_lost_broken_or_misnamed_counter_is_refused(place):
    """Without it, or with another label, the sums would be of different engines."""
    lines = COUNTERS.splitlines()
    engine = re.search(r'engine="\d"', lines[place]).group()
    for other in ([], [lines[place][:-2] + "o"], [lines[place].replace(engine, 'engine="7"')]):
        with pytest.raises(DriftlabError):
            read_engine_log("\n".join([*lines[:place], *other, *lines[place + 1 :]]))


def scrape(*engines):
    """Print counters of (engine, model, drafts, draft tokens, accepted by position)."""
    lines = []
    for engine, model, drafts, tokens, at in engines:
        labels = f'engine="{engine}",model_name="{model}"'
        told = {"drafts": drafts, "draft_tokens": tokens, "accepted_tokens": sum(at)}
        lines += [f"vllm:spec_decode_num_{name}_total{{{labels}}} {count}" for name, count in told.items()]
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        lines += [f'{name}{{{labels},position="{k}"}} {count}' for k, count in enumerate(at)]
    return "\n".join(lines)


def test_counters_of_two_engines_by_hand():
    # 1.5 accepted a draft in each
    two = (0, "m", 100, 300, (80, 50, 20)), (1, "m", 20, 60, (15, 10, 5))
    log = read_engine_log(scrape(*two))
    assert (log["tokens_per_round"].value, log["accept_unconditional", 2].value) == (2.5, 0.5)
    garbled = scrape(*two).replace(
        'num_drafts_total{engine="1",model_name="m"} 20', 'num_drafts_total{engine="1",model_name="m"} 2o'
    )
    with pytest.raises(DriftlabError, match="line 7: broken counter"):
        read_engine_log(garbled)
    with pytest.raises(DriftlabError, match="adds up to 150, not to 160"):
        read_engine_log(scrape(*two).replace(" 150\n", " 160\n"))


def test_several_models_or_K_in_one_scrape():
    a, b = (0, "a", 100, 300, (80, 50, 20)), (0, "b", 100, 100, (40,))
    assert read_engine_log(scrape(a))["accept_unconditional", 2].value == 0.5
    with pytest.raises(DriftlabError, match="several models"):
        read_engine_log(scrape(a, b))
    with pytest.raises(DriftlabError, match="several K"):
        read_engine_log(scrape(a, (1, "a", *b[2:])))
    short = read_engine_log(scrape((0, "a", 100, 280, (80, 50, 20))))  # as n-grams, or near the model's length
    assert short["tokens_per_round"].value == 2.5
    assert short["accept_unconditional", 2].value is None
    assert "several lengths" in short["accept_unconditional", 2].reason


def test_vllm_requests():
    first = {"mean_acceptance_length": 1 + 10 / 43, "acceptance_histogram": [39, 1, 0, 3], "num_spec_steps": 43}
    first |= {"num_accepted_draft_tokens": 10, "num_draft_tokens": 129, "num_spec_tokens": 3}
    second = {"acceptance_histogram": [0, 0, 0, 1], "num_spec_steps": 1, "num_draft_tokens": 3}
    wrong = {"acceptance_histogram": [1, 0], "num_spec_steps": 5, "num_draft_tokens": 5}
    parts = [{"choices": [], "metrics": {"speculative_decoding": part}} for part in (first, wrong, second)]
    log = read_engine_log("\n".join(map(json.dumps, parts)))
    assert (log.format, log.parts, [line for line, _ in log.skipped]) == ("vllm-requests", 2, [2])
    assert log["tokens_per_round"].value == pytest.approx(1 + 13 / 44)
    assert log["tokens_per_round_mean"].value == pytest.approx((1 + 10 / 43 + 4) / 2)
    assert log["accept_rate"].value == pytest.approx(13 / 132)
    assert [log["accept_unconditional", k].value for k in (1, 2, 3)] == pytest.approx([5 / 44, 4 / 44, 4 / 44])


def steps(table, drafts, **more):
    name = more.pop("id", None)
    entry = {"acceptance_histogram": table, "num_spec_steps": sum(table), "num_draft_tokens": drafts, **more}
    return json.dumps({"id": name, "metrics": {"speculative_decoding": entry}})


def test_vllm_requests_that_contradict_themselves_are_left_out():
    good = steps([39, 1, 0, 3], 129)
    for wrong in (steps([39, 1, 0, 3], 129, num_accepted_draft_tokens=25), steps([1, 1], 2, mean_acceptance_length=1.9),
                  steps([0, 0, 1], 1), steps([1, 0], 4, num_spec_tokens=3),
                  steps([0, 2], 2, num_spec_tokens="3")):  # fmt: skip
        log = read_engine_log(f"{good}\n{wrong}\n")
        assert (log.parts, [line for line, _ in log.skipped], log["accepted"].value) == (1, [2], 10)
    with pytest.raises(DriftlabError, match="no num_spec_steps and acceptance_histogram and num_draft_tokens"):
        read_engine_log('{"num_spec_steps": 1, "acceptance_histogram": [1]}')


def test_vllm_requests_of_several_K_have_no_rate_by_position():
    log = read_engine_log(steps([1, 0, 0, 1], 6) + "\n" + steps([1, 1], 2))
    assert log["tokens_per_round"].value == 2.0
    assert log["accept_unconditional", 1].value is None
    assert "several lengths" in log["accept_unconditional", 1].reason


def test_a_response_that_comes_again_counts_once():
    text = "\n".join(steps(table, 3 * sum(table), id=name) for table, name in (([1, 0, 0, 0], "a"), ([1, 0, 0, 1], "a"),
                                                                              ([0, 1, 0, 0], "b")))  # fmt: skip
    log = read_engine_log(text)
    assert (log["rounds"].value, log["accepted"].value, [line for line, _ in log.skipped]) == (3, 4, [1])


# ---- SGLang


def decode(length, rate=None):
    told = f"accept len: {length}, " + (f"accept rate: {rate}, " if rate else "")
    return f"[2026-01-01 00:00:00] Decode batch, #running-req: 1, #token: 99, {told}cuda graph: True, #queue-req: 0"


def test_sglang_windows_print_no_counts():
    one = read_engine_log(decode("2.41", "0.47"))
    assert (one["tokens_per_round"].value, one["accept_rate"].value) == (2.41, 0.47)
    # printed to two decimals
    assert (one["tokens_per_round"].low, one["tokens_per_round"].high) == pytest.approx((2.405, 2.415))
    log = read_engine_log("\n".join([decode("2.41", "0.47"), "Prefill batch", decode("3.00", "0.67"), decode("2.4")]))
    assert (log.parts, [line for line, _ in log.skipped]) == (2, [4])
    length = log["tokens_per_round"]
    assert length.value is None
    assert (length.low, length.high) == pytest.approx((2.405, 3.005))
    assert "no counts" in length.reason
    assert (log["accept_rate"].low, log["accept_rate"].high) == pytest.approx((0.465, 0.675))
    part = read_engine_log(decode("2.41", "0.47") + "\n" + decode("3.00"))["accept_rate"]
    assert (part.value, part.low, part.high) == (None, None, None)
    assert "1 of 2 windows" in part.reason
    assert read_engine_log(decode("2.41") + "\n")["tokens_per_round"].value == 2.41  # versions without a rate


META = {"completion_tokens": 106, "spec_verify_ct": 43, "spec_accept_length": 106 / 43, "spec_num_correct_drafts": 63}
META |= {"spec_num_proposed_drafts": 215, "spec_correct_drafts_histogram": [11, 14, 11, 4, 0, 3]}


def test_sglang_meta_info():
    older = {"completion_tokens": 9, "spec_verify_ct": 2, "spec_accept_token_num": 6, "spec_draft_token_num": 10}
    older |= {"spec_accept_histogram": [0, 0, 1, 0, 1]}
    text = json.dumps([{"text": "a", "meta_info": META}, {"meta_info": older}, {"text": "no counts"}])
    log = read_engine_log(text)
    assert (log.format, log.parts, [entry for entry, _ in log.skipped]) == ("sglang-meta", 2, [3])
    assert log["rounds"].value == 45
    assert log["tokens_per_round_prefill"].value == pytest.approx(115 / 45)
    assert log["tokens_per_round_prefill_mean"].value == pytest.approx((106 / 43 + 9 / 2) / 2)
    assert log["tokens_per_round"].value == pytest.approx(1 + 69 / 45)
    assert log["accept_rate"].value == pytest.approx(69 / 225)
    assert log["accept_rate_mean"].value == pytest.approx((63 / 215 + 6 / 10) / 2)
    assert log["accept_unconditional", 2].value == pytest.approx((18 + 2) / 45)
    assert log["accept_unconditional", 5].value == pytest.approx(3 / 45)


def test_sglang_meta_info_without_accepted_drafts_leaves_them_unknown():
    log = read_engine_log('{"meta_info": {"completion_tokens": 7, "spec_verify_ct": 3}}')
    assert log["tokens_per_round_prefill"].value == pytest.approx(7 / 3)
    assert log["tokens_per_round"].value is None
    assert log["accept_rate"].reason
    with pytest.raises(DriftlabError, match="spec_accept_length 2.0 is not 7 / 3"):
        read_engine_log('{"completion_tokens": 7, "spec_verify_ct": 3, "spec_accept_length": 2.0}')
    with pytest.raises(DriftlabError, match="spec_verify_ct is 'three', no number"):
        read_engine_log('{"completion_tokens": 7, "spec_verify_ct": "three"}')
    none = read_engine_log('{"completion_tokens": 1, "spec_verify_ct": 0}')
    assert none["tokens_per_round_prefill"].value is None
    assert none["tokens_per_round_prefill"].reason


def test_sglang_streams_are_cumulative_and_count_once():
    """The last of a request: 20 tokens in 7 rounds, not 29 in 13."""
    streamed = [
        {"meta_info": {"id": "a", "completion_tokens": n, "spec_verify_ct": r}} for n, r in ((3, 2), (6, 4), (20, 7))
    ]
    log = read_engine_log("\n".join(map(json.dumps, streamed)))
    assert (log.parts, log["rounds"].value) == (1, 7)
    assert log["tokens_per_round_prefill"].value == pytest.approx(20 / 7)
    assert [line for line, _ in log.skipped] == [1, 2]
    other = json.dumps({"meta_info": {"id": "b", "completion_tokens": 5, "spec_verify_ct": 2}})
    assert read_engine_log("\n".join([*map(json.dumps, streamed), other]))["rounds"].value == 9


@pytest.mark.parametrize("change", [
    {"spec_num_correct_drafts": 9, "spec_correct_drafts_histogram": [43, 0, 0, 0]},
    {"spec_correct_drafts_histogram": [12, 14, 11, 4, 0, 3]},
    {"spec_num_proposed_drafts": 62},
    {"spec_correct_drafts_histogram": [43, [0]]},
    {"spec_num_correct_drafts": "63"},
])  # fmt: skip
def test_sglang_requests_that_contradict_themselves_are_left_out(change):
    log = read_engine_log(json.dumps([META, META | change]))
    assert (log.parts, [entry for entry, _ in log.skipped]) == (1, [2])
    assert log["accept_unconditional", 5].value == pytest.approx(3 / 43)


def test_sglang_requests_of_several_K_or_without_a_histogram_have_no_rate_by_position():
    short = {"completion_tokens": 4, "spec_verify_ct": 2, "spec_num_correct_drafts": 1, "spec_num_proposed_drafts": 2}
    for more in ({"spec_correct_drafts_histogram": [1, 1]}, {}):
        log = read_engine_log(json.dumps([META, short | more]))
        assert log["accept_rate"].value == pytest.approx(64 / 217)
        assert log["accept_unconditional", 1].value is None
        assert log["accept_unconditional", 1].reason


# ---- the others


def test_trtllm_report_and_log():
    averages = {"num_draft_tokens": 30.0, "num_accepted_draft_tokens": 12.0, "draft_acceptance_rate": 0.4}
    averages |= {"acceptance_length": 2.2}
    stats = {f"{name}_percentiles": {"average": value, "p50": 0.1} for name, value in averages.items()}
    log = read_engine_log(json.dumps({"engine": {}, "decoding_stats": {"mode": "Eagle3", **stats}}))
    assert log.format == "trtllm"
    # the rate is the pooled one, so the averages are weighted by iterations
    assert (log["tokens_per_iteration"].value, log["accept_rate"].value) == (2.2, 0.4)
    stats["draft_acceptance_rate_percentiles"]["average"] = 0.5
    older = read_engine_log(json.dumps({"decoding_stats": stats}))
    assert (older["tokens_per_iteration_mean"].value, older["accept_rate_mean"].value) == (2.2, 0.5)
    assert older["accept_rate"].value == 0.4
    lines = "\n".join(f"[{tag}] {row}: {value:.2f}" for tag, value in (("DT", 30), ("ADT", 12), ("DAR", 0.4), ("AL", 2.2))
                      for row in ("MINIMUM", "AVERAGE", "P50    "))  # fmt: skip
    # to two decimals the averages may be plain or weighted: AL - 1 times (.4 / .405 .. .4 / .395), about
    told = read_engine_log(lines)
    assert told["tokens_per_iteration"].value is None
    length = told["tokens_per_iteration"]
    assert 2.17 < length.low < 1 + 1.195 * 0.4 / 0.405 < 1 + 1.205 * 0.4 / 0.395 < length.high < 2.23
    assert "plain or weighted" in length.reason
    assert (told["tokens_per_iteration_mean"].value, told["accept_rate_mean"].value) == (None, None)
    assert told["accept_rate"].low < 0.4 < told["accept_rate"].high
    plain = read_engine_log(lines.replace("[DAR] AVERAGE: 0.40", "[DAR] AVERAGE: 0.50"))["tokens_per_iteration_mean"]
    assert (plain.value, plain.low, plain.high) == pytest.approx((2.2, 2.195, 2.205))
    with pytest.raises(DriftlabError, match="2 reports in one log"):
        read_engine_log(f"{lines}\n{lines.replace('2.20', '1.30')}")
    with pytest.raises(DriftlabError, match="2 reports in one file"):
        read_engine_log(json.dumps([{"decoding_stats": stats}, {"decoding_stats": stats}]))
    with pytest.raises(DriftlabError, match="not all there"):
        read_engine_log("[AL] AVERAGE: 2.20\n[DAR] AVERAGE: 0.40\n")


def test_safeailab_answers_count_one_round_too_few():
    lines = [
        {"question_id": 1, "choices": [{"index": 0, "turns": ["a", "b"], "idxs": [9, 4], "new_tokens": [30, 10]},
                                       {"index": 1, "idxs": [1], "new_tokens": [99]}]},
        {"question_id": 2, "choices": [{"index": 0, "turns": ["a"], "idxs": [4], "new_tokens": [12]}]},
        {"question_id": 3, "choices": [{"index": 0, "turns": ["a"], "idxs": [4, 4], "new_tokens": [12]}]},
    ]  # fmt: skip
    log = read_engine_log("\n".join(map(json.dumps, lines)) + '\n{"question_id": 4, "choi')
    assert (log.format, log.parts, sorted(line for line, _ in log.skipped)) == ("safeailab", 2, [3, 4])
    assert log["rounds"].value == 10 + 5 + 5
    assert log["tokens_per_round"].value == pytest.approx(52 / 20)
    assert log["tokens_per_idx_mean"].value == pytest.approx(((30 / 9 + 10 / 4) / 2 + 12 / 4) / 2)


def answer(question, *choices):
    return {"question_id": question, "choices": [{"index": i, **choice} for i, choice in enumerate(choices)]}


@pytest.mark.parametrize("nested", [False, True])
def test_answers_count_once_and_with_their_first_choice(nested):
    """Question 1 comes twice: the last. Of question 3 the first choice is broken, of question 4 without counts."""
    good, other = {"idxs": [4], "new_tokens": [20]}, {"idxs": [1], "new_tokens": [99]}
    answers = [answer(1, {"idxs": [9], "new_tokens": [10]}), answer(1, good, other), answer(2, good),
               answer(3, {"idxs": [None], "new_tokens": [20]}, other), answer(4, {}, other)]  # fmt: skip
    log = read_engine_log(json.dumps({"answers": answers}) if nested else "\n".join(map(json.dumps, answers)))
    assert (log.parts, log["rounds"].value, log["tokens_per_round"].value) == (2, 10, 4.0)
    assert [line for line, _ in log.skipped] == ([1, 1, 1] if nested else [1, 4, 5])


def test_nested_lengths_are_broken_entries():
    with pytest.raises(DriftlabError, match="accept_lengths is .*no numbers"):
        read_engine_log(json.dumps(answer(1, {"accept_lengths": [[1, 2], [3]]})))
    with pytest.raises(DriftlabError, match="no numbers"):
        read_engine_log('{"choices": [{"accept_lengths": [1, NaN]}]}')


def test_spec_bench_answers_are_pooled_over_rounds_G2():
    lines = [{"category": "qa", "choices": [{"accept_lengths": x, "decoding_steps": [len(x)]}]} for x in ([4, 4], [1])]
    log = read_engine_log("\n".join(map(json.dumps, lines)))
    assert (log.format, log["rounds"].value, log["tokens_per_round"].value) == ("spec-bench", 3, 3.0)


def test_specdec_bench():
    one = {
        "Request_AL": {"0": {"0": 2.0, "1": 1.0}},
        "Average_AL": 1.5,
        "Acceptance_Length_Histogram": {"1": 3, "4": 1},
    }
    two = {"Request_AL": {"0": {"0": 3.0}}, "Average_AL": 3.0, "Acceptance_Length_Histogram": {"1": 1, "2": 1, "4": 2}}
    single = read_engine_log(json.dumps([one]))
    assert single["average_al"].value == 1.5
    assert single["tokens_per_chunk"].value == 7 / 4
    log = read_engine_log(json.dumps([one, two]))
    assert (log.format, log.parts) == ("speed-bench", 2)
    assert log["average_al"].value == 2.0  # three turns, not the mean of 1.5 and 3.0
    assert log["tokens_per_chunk"].value == (7 + 11) / 8
    assert [log["joint", k].value for k in (1, 3)] == [4 / 8, 3 / 8]
    assert [log["accept_conditional", k].value for k in (1, 3)] == [4 / 8, 3 / 4]
    untold = read_engine_log(json.dumps([one, {k: v for k, v in two.items() if k != "Request_AL"}]))["average_al"]
    assert (untold.value, untold.low, untold.high) == (None, 1.5, 3.0)
    assert "Request_AL" in untold.reason
    broken = read_engine_log(
        json.dumps([one, two | {"Request_AL": {"0": "x"}}, two | {"Acceptance_Length_Histogram": {"x": 1}}])
    )
    assert (broken.parts, [entry for entry, _ in broken.skipped]) == (1, [2, 3])


def test_speculation_profile():
    profile = {
        "schema_version": "1.0",
        "measured": True,
        "mean_accept_length": 1.9,
        "mean_accept_length_per_request": 2.0,
    }
    profile |= {"conditional_accept_rates": [0.6, 0.5], "marginal_accept_rates": [0.6, 0.3]}
    log = read_engine_log(json.dumps(profile))
    assert (log.format, log["tokens_per_chunk"].value, log["average_al"].value) == ("modelopt-profile", 1.9, 2.0)
    assert (log["joint", 2].value, log["accept_conditional", 2].value) == (0.3, 0.5)
    with pytest.raises(DriftlabError, match="placeholder"):
        read_engine_log(json.dumps({**profile, "measured": False}))
    for change in ({"conditional_accept_rates": [0.6]}, {"mean_accept_length": None}):
        with pytest.raises(DriftlabError, match="differ in length"):
            read_engine_log(json.dumps({**profile, **change}))


def test_speculators_table():
    text = (
        "subset,num_drafts,num_draft_tokens,num_accepted_tokens,acceptance_length,acceptance_at_pos_0,acceptance_at_pos_1\n"
        "qa,100.0,200.0,80.0,1.8,0.5,0.3\nrag,300.0,600.0,420.0,2.4,0.8,0.6\nmath,300.0,600.0\n"
    )
    log = read_engine_log(text)
    assert (log.format, log.parts, [line for line, _ in log.skipped]) == ("speculators", 2, [4])
    assert log["tokens_per_round"].value == 1 + 500 / 400
    assert log["accept_unconditional", 1].value == pytest.approx((50 + 240) / 400)
    short = read_engine_log(text.replace("300.0,600.0,420.0", "300.0,590.0,420.0"))
    assert short["tokens_per_round"].value == 1 + 500 / 400
    assert short["accept_unconditional", 1].value is None
    assert [line for line, _ in read_engine_log(text.replace("rag,300.0", "rag,nan")).skipped] == [3, 4]
    assert [line for line, _ in read_engine_log(text.replace("80.0,1.8", "80.0,1.9")).skipped] == [2, 4]


# ---- which format, which file


def test_unusable_text_says_what_was_looked_for():
    with pytest.raises(DriftlabError, match="no format that is known .*vllm-log.*speculators.*whole log.*--log-format"):
        read_engine_log("nothing: here\n")
    with pytest.raises(DriftlabError, match="several formats .*vllm-log, sglang-log.*say which"):
        read_engine_log(f"{REAL}\n{decode('2.41')}\n")
    assert read_engine_log(f"{REAL}\n{decode('2.41')}\n", format="sglang-log")["tokens_per_round"].value == 2.41
    with pytest.raises(DriftlabError, match="no log format 'tgi'"):
        read_engine_log(f"{REAL}\n", format="tgi")
    for name in FORMATS:
        with pytest.raises(DriftlabError):
            read_engine_log("nothing: here\n", format=name)


def test_files(tmp_path):
    path = tmp_path / "server.log"
    path.write_text(f"{REAL}\n", encoding="utf-8")
    assert read_engine_log(path).values == read_engine_log(str(path)).values == read_engine_log(f"{REAL}\n").values
    assert read_engine_log(path).source == str(path)
    with pytest.raises(DriftlabError, match="absent.log"):
        read_engine_log(tmp_path / "absent.log")
    with pytest.raises(DriftlabError, match="cannot be read"):
        read_engine_log("absent.log")


def test_a_byte_order_mark_loses_no_record(tmp_path):
    path = tmp_path / "answers.jsonl"
    lines = [json.dumps(answer(n, {"accept_lengths": [n]})) for n in (1, 2)]
    path.write_text("\n".join(lines), encoding="utf-8-sig")
    log = read_engine_log(path)
    assert (log["rounds"].value, log.skipped) == (2, ())


# ---- beside


def test_beside_puts_the_same_quantities_in_one_row():
    # 3 rounds of 3 drafts accept 3 0 1
    ours = engine_report("vllm", [RequestHistogram.of("a", [3, 0, 1], depth=3)])
    log = read_engine_log(window(4, 9, (2 / 3, 1 / 3, 1 / 3)))
    frame = beside(ours, log).set_index(["quantity", "position"])
    assert frame.loc[("tokens_per_round", 0), ["ours", "theirs"]].tolist() == pytest.approx([7 / 3, 7 / 3])
    assert frame.loc[("accept_rate", 0), ["ours", "theirs"]].tolist() == pytest.approx([4 / 9, 4 / 9])
    assert frame.loc[("accept_unconditional", 1), ["ours", "theirs"]].tolist() == pytest.approx(
        [2 / 3, 2 / 3], abs=1e-3
    )
    assert (frame["reason"] == "").all()
    assert frame.index.is_unique


def test_beside_says_why_a_side_is_missing():
    ours = engine_report("sglang-server", [RequestHistogram.of("a", [3, 0], depth=3)])
    log = read_engine_log("\n".join([decode("2.41"), decode("3.00")]))
    frame = beside(ours, log).set_index(["quantity", "position"])
    length, rate = frame.loc[("tokens_per_round", 0)], frame.loc[("accept_rate", 0)]
    assert math.isnan(length["theirs"])
    assert (length["theirs_low"], length["theirs_high"]) == pytest.approx((2.405, 3.005))
    assert "no counts" in length["reason"]
    assert rate["ours"] == 0.5
    assert math.isnan(rate["theirs"])
    assert rate["reason"] == "sglang-log does not have it"


def test_beside_refuses_a_log_of_another_tool():
    log = read_engine_log(json.dumps(answer(1, {"idxs": [2], "new_tokens": [7]})))
    ours = [RequestHistogram.of("a", [3, 0, 1], depth=3)]
    assert (
        beside(engine_report("safeailab", ours), log).set_index("quantity").loc["tokens_per_round", "theirs"] == 7 / 3
    )
    with pytest.raises(DriftlabError, match="safeailab does not belong beside vllm.*choose safeailab"):
        beside(engine_report("vllm", ours), log)


def test_every_format_speaks_for_a_convention():
    """Whose quantities it has, in part at least; deepspec and our own have no log."""
    assert set(SPEAKS_FOR) == set(FORMATS)
    assert {name for names in SPEAKS_FOR.values() for name in names} == set(CONVENTIONS) - {"driftlab", "deepspec"}
    log = read_engine_log(REAL)
    check_pair("vllm", log)
    for name in set(CONVENTIONS) - set(SPEAKS_FOR["vllm-log"]):
        with pytest.raises(DriftlabError, match="choose vllm or speculators"):
            check_pair(name, log)


def test_a_printed_number_and_an_equal_one_of_ours_overlap():
    ours = engine_report("sglang-server", [RequestHistogram.of("a", [2, 0, 2], depth=3, end="eos")])
    row = beside(ours, read_engine_log(decode("2.33"))).set_index("quantity").loc["tokens_per_round"]
    assert row["theirs_low"] < 7 / 3 < row["theirs_high"]
