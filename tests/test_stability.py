"""Worst case, spread, loss, perplexity and lengths: numbers worked out by hand or with another program's arithmetic."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch

from driftlab.acceptance import Acceptance
from driftlab.breakdown import by_prompt_length
from driftlab.errors import DriftlabError
from driftlab.perplexity import text_nll, text_records
from driftlab.results import as_rows
from driftlab.simulation import Round, Simulation
from driftlab.stability import compare_stability, stability

K = 3


def replay(accepted, ids=None, text="text", depth=K):
    """A replay with these accepted drafts in each prompt's rounds, all complete."""
    prompts = len(accepted)
    blank = torch.zeros(prompts, 1, depth, dtype=torch.bool)
    acceptance = Acceptance(
        match=blank,
        valid=blank,
        remaining=torch.zeros(prompts, 1, dtype=torch.long),
        rows=torch.zeros(prompts, 1, dtype=torch.long),
        ids=tuple(ids or [f"p{i}" for i in range(prompts)]),
        categories=("",) * prompts,
        finish=("length",) * prompts,
        digests=tuple(f"{text}{i}" for i in range(prompts)),
    )
    return Simulation(tuple(tuple(Round(0, a, a + 1, "bonus") for a in rounds) for rounds in accepted), acceptance)


def three():
    # emitted / rounds: chat (4+3+2)/3 = 3 and 4/1, pooled 13/4; none 3/2 and 1/1, 4/3; bos=off 6/2 and 8/2, 14/4
    return {
        "chat": replay([[3, 2, 1], [3]], text="a"),
        "none": replay([[1, 0], [0]], text="b"),
        "bos=off": replay([[2, 2], [3, 3]], text="c"),
    }


# ---- stability


def test_an_input_without_rounds_is_left_out_of_the_summary_and_named():
    inputs = {
        "chat": replay([[3], [1]], text="a"),
        "none": replay([[], []], text="b"),
        "bos=off": replay([[1], [1]], text="c"),
    }
    found = stability(inputs)
    assert found.left_out == {"none": 0}
    assert found.worst == "bos=off"
    assert found.summary()["tau_worst"].value == pytest.approx(2)
    assert found.summary()["tau_loss_worst"].value == pytest.approx(1 / 3)
    table = found.table().set_index("template")
    assert table.loc["none", "prompts"] == 0
    assert table.loc["none", ["tau", "rounds"]].isna().all()
    with pytest.raises(DriftlabError, match="no text has a round under the plain input 'none'"):
        stability(inputs, plain="none")


def test_inputs_are_compared_on_the_prompts_that_all_have():
    """By hand: p2 has no round under bos=off, so it counts under no input; an input with one of three prompts is left out."""
    inputs = {
        "chat": replay([[3], [1, 1], [0]], text="a"),
        "bos=off": replay([[1], [1], []], text="b"),
        "none": replay([[], [3], []], text="c"),
    }
    found = stability(inputs)
    assert found.ids == ("p0", "p1")
    assert (found.prompts, found.left_out) == (3, {"none": 1})
    assert found.tau.tolist() == pytest.approx([8 / 3, 2])
    assert found.loss("bos=off").value == pytest.approx(1 - 2 / (8 / 3))
    assert found.summary()["tau_loss_mean"].value == pytest.approx(0.25)
    table = found.table().set_index("template")
    assert table["prompts"].to_dict() == {"chat": 2, "bos=off": 2, "none": 1}
    # two drafters, one of which has a round where the other has none: on what both have
    other = stability(inputs | {"bos=off": replay([[1], [1], [1]], text="b")})
    assert other.ids == ("p0", "p1", "p2")
    assert all(interval.value == 0 for interval in compare_stability(found, other).values())


def test_one_prompt_more_changes_a_loss_by_its_own_rounds_alone():
    """A prompt without rounds under one input may not move the loss under another through plain's tau."""
    alone = stability({"chat": replay([[3], [1]]), "none": replay([[1], [1]])})
    more = stability({"chat": replay([[3], [1], [3, 3, 3]]), "none": replay([[1], [1], []])})
    assert more.loss("none") == alone.loss("none")


def test_numbers_by_hand():
    found = stability(three())
    assert found.tau.tolist() == pytest.approx([13 / 4, 4 / 3, 14 / 4])
    assert found.worst == "none"
    assert found.loss("none").value == pytest.approx(1 - (4 / 3) / (13 / 4))  # .5897
    assert found.loss("bos=off").value == pytest.approx(1 - 14 / 13)
    assert found.loss("chat") == (0, 0, 0)
    summary = {name: interval.value for name, interval in found.summary().items()}
    assert summary == {
        "tau_worst": pytest.approx(4 / 3),
        "tau_spread": pytest.approx(14 / 4 - 4 / 3),
        "tau_loss_worst": pytest.approx(1 - 16 / 39),
        "tau_loss_mean": pytest.approx(1 - (4 / 3 + 14 / 4) / 2 / (13 / 4)),
    }


def test_the_plain_input_may_be_the_worst():
    found = stability(three(), plain="none")
    assert found.worst == "none"
    assert found.summary()["tau_loss_worst"].value == 0
    assert found.summary()["tau_loss_mean"].value < 0  # a gain


def paired(prompts=24, seed=0, share=0.5, m=1):
    """Prompts that differ a lot in tau; under the other inputs each keeps the same share of its accepted drafts."""
    random = np.random.default_rng(seed)
    chat, others = [], [[] for _ in range(m)]
    for _ in range(prompts):
        level = random.uniform(0.2, 0.95)
        chat.append((random.random(40) < level).astype(int).tolist())
        for other in others:
            other.append((random.random(40) < level * share).astype(int).tolist())
    return {"chat": replay(chat, text="a")} | {f"turns={i + 1}": replay(o, text=f"b{i}") for i, o in enumerate(others)}


def test_intervals_are_paired_over_prompts():
    """The loss is known much better than its two taus, because the prompts are the same."""
    found = stability(paired())
    loss = found.loss("turns=1")
    assert loss.low < loss.value < loss.high
    separate = [found.interval(key) for key in found.keys]
    width = [interval.high - interval.low for interval in separate]
    naive = math.hypot(*(w / interval.value for w, interval in zip(width, separate, strict=True)))
    assert loss.high - loss.low < 0.7 * naive * (1 - loss.value)


def test_the_loss_interval_covers_its_true_value():
    """tau = 1 + level, level uniform on .2 .. .95, halved: true loss (0.575 / 2) / 1.575."""
    truth = 1 - (1 + 0.575 / 2) / 1.575
    inside = sum(
        low <= truth <= high
        for low, high in (stability(paired(seed=s), samples=200).loss("turns=1")[1:] for s in range(40))
    )
    assert 33 <= inside <= 40


def test_order_of_prompts_does_not_matter():
    given = three()
    given["none"] = replay([[0], [1, 0]], ids=["p1", "p0"], text="b")
    found, expected = stability(given), stability(three())
    assert found.rounds.tolist() == expected.rounds.tolist()
    assert found.summary() == expected.summary()


def test_ends_stay_in_what_can_be():
    found = stability({"chat": replay([[3], [3], [0]]), "none": replay([[0], [0], [3]])})
    summary = found.summary()
    assert summary["tau_worst"].low >= 1
    assert summary["tau_worst"].high <= K + 1
    assert summary["tau_spread"].low >= 0
    assert summary["tau_loss_worst"].high <= K / (K + 1)
    assert found.loss("none").low >= -K


def test_selection_is_the_fall_of_a_smallest_tau():
    """Inputs that are alike: the smallest of eight taus lies low, and this says so. One far below the rest: no selection."""
    alike = stability(paired(share=1.0, m=7))
    assert alike.selection < -0.005
    truth = 1.575
    assert abs(alike.tau.min() - alike.selection - truth) < 0.2
    apart = stability({"chat": replay([[3]] * 6), "none": replay([[0]] * 6)})
    assert apart.selection == 0


def test_the_spread_of_inputs_that_are_alike_is_within_its_null():
    """About one in twenty is above; inputs that differ are far above."""
    above = sum(
        found.summary()["tau_spread"].value > found.spread_null()
        for found in (stability(paired(share=1.0, m=4, prompts=8, seed=s), samples=200) for s in range(30))
    )
    assert above <= 5
    found = stability(paired(share=0.5, m=1))
    assert found.summary()["tau_spread"].value > 1.5 * found.spread_null()


def test_the_null_of_one_prompt_by_hand():
    """One prompt, two inputs: to change places leaves the spread."""
    assert stability({"chat": replay([[3, 2]]), "none": replay([[1]])}).spread_null() == pytest.approx(3.5 - 2)


def test_one_prompt_has_no_interval():
    found = stability({"chat": replay([[3, 2]]), "none": replay([[1]])})
    assert found.summary()["tau_worst"].value == 2
    assert math.isnan(found.summary()["tau_worst"].low)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda given: {"chat": given["chat"]}, "two or more"),
        (lambda given: {"none": given["none"], "bos=off": given["bos=off"]}, "'chat' among them"),
        (lambda given: given | {"x": replay([[1]])}, "'x' is not over the same prompts"),
        (lambda given: given | {"x": replay([[1], [1]], ids=["p0", "q"])}, "'x' is not over the same prompts"),
        (lambda given: given | {"x": replay([[1], [1]], depth=2)}, "K = 2"),
    ],
)
def test_what_cannot_be_put_together(change, match):
    with pytest.raises(DriftlabError, match=match):
        stability(change(three()))


def test_rows_obey_the_contract():
    found = stability(three())
    rows = as_rows(list(found.records()), drafter="d", target="t", depth_max=K)
    names = ("loss", "worst", "spread", "loss_worst", "loss_mean", "selection", "spread_null")
    assert set(rows["quantity"]) == {f"tau_{name}" for name in names}
    assert rows[rows["quantity"] == "tau_loss"]["template"].tolist() == ["none", "bos=off"]
    assert rows[rows["quantity"] == "tau_worst"]["template"].item() == "chat | none | bos=off"
    table = found.table()
    assert table["template"].tolist() == ["chat", "none", "bos=off"]
    assert table["rounds"].tolist() == [4, 3, 4]
    assert table["prompts"].tolist() == [2, 2, 2]
    ended = stability({"chat": replay([[3], [1]]), "none": replay([[], [2]])}).table()
    assert (ended["tau"].tolist(), ended["prompts"].tolist()) == ([2, 3], [1, 1])
    assert table["loss"].tolist() == pytest.approx([0, 1 - 16 / 39, -1 / 13])


def test_two_drafters_are_compared_on_the_same_texts():
    first, second = stability(three()), stability(dict(three()))
    assert all(value == (0, 0, 0) for value in compare_stability(first, second).values())
    steady = stability(
        {
            "chat": replay([[3, 2, 1], [3]], text="a"),
            "none": replay([[3, 1], [2]], text="b"),
            "bos=off": replay([[2, 2], [3, 3]], text="c"),
        }
    )
    found = compare_stability(steady, first)
    assert found["tau_worst"].value == pytest.approx(3 - 4 / 3)
    assert found["tau_loss_worst"].value == pytest.approx((1 - 3 / 3.25) - (1 - (4 / 3) / 3.25))
    other = stability(three() | {"none": replay([[1, 0], [0]], text="z")})
    with pytest.raises(DriftlabError, match="same recordings"):
        compare_stability(steady, other)


def test_from_recordings_to_a_table(tiny_target, make_drafter, tmp_path):
    """Recorded under three inputs, replayed, put together: taus are the replays' own, rows carry the key of the input."""
    from driftlab.measure import replay_rows
    from driftlab.perturbations import Perturbation

    drafter, prompts, simulations, rows = make_drafter(), ["some words", "more of them", "a third one"], {}, []
    for key in ("none", "none+bos=off", "none+whitespace=double"):
        trajectory = tiny_target.record(
            prompts, max_new_tokens=16, perturbation=Perturbation.parse(key), out=tmp_path / key.replace("+", "-")
        )
        frame, simulations[key] = replay_rows(drafter, trajectory, "d", depth=K)
        rows.append(frame)
    found = stability(simulations, plain="none")
    assert found.tau.tolist() == pytest.approx([simulation.tau for simulation in simulations.values()])
    assert [set(frame["template"]) for frame in rows] == [{key} for key in simulations]
    assert len({simulation.acceptance.digests for simulation in simulations.values()}) == 3


# ---- the text


def test_nll_by_hand():
    """Logits 2 ln 2, ln 2, 0 in every row: p = 4/7, 2/7, 1/7."""
    head = torch.tensor([[2.0], [1.0], [0.0]]) * math.log(2)
    hidden, lse = torch.ones(5, 1), torch.full((5,), math.log(7.0))
    tokens = torch.tensor([0, 2, 0, 1, 2])
    found = text_nll(hidden, lse, tokens, 2, head)
    assert found.tolist() == pytest.approx([math.log(7 / 4), math.log(7 / 2), math.log(7)], rel=1e-6)


def test_perplexity_of_a_recording_is_unprocessed(tiny_target, tmp_path):
    """Sampled at temperature .5, top_k 3; the perplexity is that of temperature 1, by the model's own logits in float64."""
    trajectory = tiny_target.record(
        ["hello", "abcd", "some words"], max_new_tokens=12, temperature=0.5, top_k=3, template=False, out=tmp_path / "r"
    )
    rows = as_rows(list(text_records(trajectory)))
    total = count = 0
    for i, one in enumerate(trajectory):
        with torch.no_grad():
            logits = tiny_target.adapter.model(one.tokens[None], use_cache=False).logits[0].double()
        logp = logits.log_softmax(-1)
        own = [-float(logp[t - 1, one.tokens[t]]) for t in range(one.prompt_length, len(one.tokens))]
        mine = rows[(rows["quantity"] == "nll") & (rows["prompt"] == trajectory.entries[i].id)]
        assert mine["value"].item() == pytest.approx(sum(own) / len(own), abs=1e-4)
        assert mine["n"].item() == len(own)
        total, count = total + sum(own), count + len(own)
    pooled = rows[rows["quantity"] == "perplexity"]
    assert pooled["value"].item() == pytest.approx(math.exp(total / count), rel=1e-4)
    assert pooled["low"].item() < pooled["value"].item() < pooled["high"].item()
    assert pooled["n"].item() == count
    assert {"repeated_ngrams", "periodic_tail"} <= set(rows["quantity"])


def test_a_uniform_target_has_the_perplexity_of_its_vocabulary():
    hidden = torch.zeros(6, 4)
    tokens = torch.tensor([1, 5, 3, 0, 2, 4])
    nll = text_nll(hidden, torch.full((6,), math.log(9.0)), tokens, 1, torch.ones(9, 4))
    assert len(nll) == 5
    assert math.exp(float(nll.mean())) == pytest.approx(9, rel=1e-6)


# ---- by prompt length


def table_of(values):
    return pd.DataFrame(values, columns=["prompt", "quantity", "depth", "value", "n"])


ROWS = table_of(
    [
        *[
            ("a", "match", 1, 0.5, 10),
            ("b", "match", 1, 0.25, 20),
            ("c", "match", 1, 0.0, 4),
            ("d", "match", 1, 1.0, 6),
        ],
        *[("a", "match", 2, 0.1, 10), ("c", "match", 2, math.nan, 0)],
        *[("a", "emitted", 0, 30.0, 10), ("b", "emitted", 0, 10.0, 10), ("d", "emitted", 0, 8.0, 2)],
        *[("a", "rounds", 0, 10.0, 1), ("", "tau", 0, 9.0, 99)],
    ]
)
LENGTHS = {"a": 10, "b": 31, "c": 32, "d": 99}


def test_lengths_by_hand():
    found = by_prompt_length(ROWS, LENGTHS, [1, 32, 64, 128], trained_length=40)
    match = found[(found["quantity"] == "match") & (found["depth"] == 1)]
    assert match[["begin", "end", "beyond_trained", "value", "n", "prompts"]].values.tolist() == [
        [1, 31, False, pytest.approx(10 / 30), 30, 2],
        [32, 40, False, 0, 4, 1],
        [64, 127, True, 1, 6, 1],
    ]
    tau = found[found["quantity"] == "tau"]
    assert tau[["begin", "value", "n", "prompts"]].values.tolist() == [[1, 2, 20, 2], [64, 4, 2, 1]]
    assert found[found["depth"] == 2][["begin", "value"]].values.tolist() == [[1, pytest.approx(0.1)]]
    assert "rounds" not in set(found["quantity"])


def test_buckets_pool_to_the_whole():
    whole = by_prompt_length(ROWS, LENGTHS, [1, 1000])
    parts = by_prompt_length(ROWS, LENGTHS, [1, 20, 32, 50, 1000], trained_length=35)
    for (quantity, depth), group in parts.groupby(["quantity", "depth"]):
        one = whole[(whole["quantity"] == quantity) & (whole["depth"] == depth)]
        assert (group["value"] * group["n"]).sum() / group["n"].sum() == pytest.approx(one["value"].item())


def test_a_length_at_the_trained_one_is_not_beyond():
    rows = table_of([("a", "match", 1, 0.5, 1), ("b", "match", 1, 0.5, 1)])
    found = by_prompt_length(rows, {"a": 40, "b": 41}, [1, 100], trained_length=40)
    assert found[["begin", "end", "beyond_trained"]].values.tolist() == [[1, 40, False], [41, 99, True]]


def test_wrong_edges_and_unknown_prompts():
    for edges in ([1], [4, 2], [1, 1]):
        with pytest.raises(DriftlabError, match="ascending"):
            by_prompt_length(ROWS, LENGTHS, edges)
    with pytest.raises(DriftlabError, match="prompt 'd'"):
        by_prompt_length(ROWS, {"a": 1, "b": 2, "c": 3}, [1, 9])
