"""What the estimators hide, by hand: bias by estimator, and the terms of conditional acceptance, on tables one can read."""

import dataclasses
import importlib.util
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from test_simulation import acceptance_of, text_with_rounds

from driftlab import DriftlabError, accept, all_starts, simulate
from driftlab.acceptance import Acceptance
from driftlab.estimators import decompose, estimates, estimates_by_depth, round_counts, start_weights
from driftlab.results import as_rows, read_rows


def table_of(*sequences, depth, finish=None, sampled=False, first_row=2, categories=None):
    """Return the table of sequences given start by start: the acceptance at each depth, as far as there is text.

    ``sequences[i][s]`` belongs to the start with s + 1 answer tokens; one more start is at the last token.
    """
    starts = max(map(len, sequences)) + 1
    remaining = torch.zeros(len(sequences), starts, dtype=torch.long)
    valid = torch.zeros(len(sequences), starts, depth, dtype=torch.bool)
    m = torch.zeros(len(sequences), starts, depth, dtype=torch.float64)
    for i, sequence in enumerate(sequences):
        for s, chances in enumerate(sequence):
            left = len(sequence) - s
            assert len(chances) == min(left, depth)
            remaining[i, s], valid[i, s, :left] = left, True
            m[i, s, : len(chances)] = torch.tensor(chances, dtype=torch.float64)
    return Acceptance(
        match=m >= 1,
        valid=valid,
        remaining=remaining,
        rows=torch.arange(starts).expand(len(sequences), starts) + first_row,
        ids=tuple(f"p{i}" for i in range(len(sequences))),
        categories=tuple(categories or [""] * len(sequences)),
        finish=tuple(finish or ["length"] * len(sequences)),
        rule="rejection" if sampled else "argmax",
        sampled=m if sampled else None,
    )


# ``two``: accepted 1 at s0, 2 at s2, which ends p0; 0 at s0 of p1, and 2 at s1, where the limit cuts the round.
TWO = [[(1, 0), (0, 1), (1, 1), (1, 1), (0,)], [(0, 0), (1, 1), (1,)]]
# ``one``: P(0 accepted) at s0 is .5, P(1) .4, P(2) .1, so v = 1, .5, .4 + .5 * .2
ONE = [[(0.5, 0.2), (0.8, 0.4), (0.6,)]]


def upto(table, depth):
    return dataclasses.replace(table, match=table.match[..., :depth], valid=table.valid[..., :depth])


def random_table(seed, *, sampled, finish, prompts=5, depth=3):
    generator = np.random.default_rng(seed)
    lengths = [int(generator.integers(1, 14)) for _ in range(prompts)]
    sequences = []
    for length in lengths:
        chances = generator.random((length, depth))
        chances = chances if sampled else (chances < 0.6) * 1.0
        sequences.append([tuple(chances[s, : length - s]) for s in range(length)])
    return table_of(*sequences, depth=depth, finish=[finish] * prompts, sampled=sampled)


def named(frame, column="value"):
    return dict(zip(frame["quantity"], frame[column], strict=True))


def terms(simulation, depth, column="value"):
    frame = decompose(simulation, samples=20)
    return named(frame[frame["depth"] == depth], column)


# ---- counts by start


def test_rounds_lie_at_the_starts_of_the_walk():
    simulation = simulate(table_of(*TWO, depth=2))
    assert start_weights(simulation).tolist() == [[1, 0, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0]]
    emitted, rounds = round_counts(simulation)
    assert emitted.tolist() == [[2, 0, 3, 0, 0, 0], [1, 0, 0, 0, 0, 0]]  # p1's second round is cut
    assert rounds.tolist() == [[1, 0, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("finish", "emitted", "rounds"),
    [
        # s1: .5 * (1 + .8 + .32), less the bonus token that EOS, both accepted, has not
        ("stop", [1.6, 0.5 * 1.8, 0.5 * 1.0], [1, 0.5, 0.5]),
        # the round counts only if it fails: s1 .5 * (.2 * 1 + .48 * 2), s2 .5 * .4 * 1
        ("length", [1.6, 0.5 * 1.16, 0.5 * 0.4], [1, 0.5 * 0.68, 0.5 * 0.4]),
    ],
)
def test_expected_rounds_lie_where_the_recursion_puts_them(finish, emitted, rounds):
    simulation = simulate(table_of(*ONE, depth=2, finish=[finish], sampled=True))
    assert start_weights(simulation)[0].tolist() == pytest.approx([1, 0.5, 0.5, 0])
    found = round_counts(simulation)
    assert found[0][0].tolist() == pytest.approx([*emitted, 0])
    assert found[1][0].tolist() == pytest.approx([*rounds, 0])


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("finish", ["stop", "length"])
def test_counts_by_start_sum_to_those_of_the_simulation(sampled, finish):
    for seed in range(10):
        simulation = simulate(random_table(seed, sampled=sampled, finish=finish))
        emitted, rounds = round_counts(simulation)
        np.testing.assert_allclose(emitted.sum(1), simulation.emitted, atol=1e-12)
        np.testing.assert_allclose(rounds.sum(1), simulation.verify_rounds, atol=1e-12)


# ---- estimators of tau


def test_half_of_the_positions_accept_everything_and_half_nothing():
    """G4: tau 2.0, and the product of the rates by depth says 1.75. Rounds: 0, 2, 0 | 0, 2; six starts have two depths."""
    simulation = simulate(acceptance_of([0, 2, 2, 0], [0, 2, 0, 0], depth=2))
    assert [[r.accepted for r in rounds] for rounds in simulation.rounds] == [[0, 2], [0, 2]]
    values = named(estimates(simulation, samples=20))
    assert values == {
        "tau": 2.0,
        "tau_uncensored": 2.0,
        "all_starts_mean": 2.0,
        "product_of_rates": 1.75,
        "iid_formula": 1.75,
    }
    assert named(estimates(simulation, samples=20), "bias")["product_of_rates"] == pytest.approx(-0.125)


def test_estimators_by_hand():
    """V_2 holds s0..s3 and s0, s1; accepted 1, 0, 2, 2 and 0, 2; 4 of 6 match at depth 1 and at depth 2."""
    frame = estimates(simulate(table_of(*TWO, depth=2)), samples=20)
    assert named(frame) == pytest.approx(
        {
            "tau": 6 / 3,
            "tau_uncensored": 6 / 3,
            "all_starts_mean": 1 + 7 / 6,
            "product_of_rates": 1 + 2 / 3 + 4 / 9,
            "iid_formula": 1 + 2 / 3 + 4 / 9,
        }
    )
    assert named(frame, "n") == {
        **{"tau": 3, "tau_uncensored": 3},
        **{"all_starts_mean": 6, "product_of_rates": 6, "iid_formula": 6},
    }
    assert named(frame, "bias")["all_starts_mean"] == pytest.approx(13 / 12 - 1)
    assert set(frame["depth_max"]) == {2}
    # K = 1: rounds 1, 1, 0 | 0, 1; of eight starts five match; the two last rounds have one token left
    shallow = estimates(simulate(upto(table_of(*TWO, depth=2), 1)), samples=20)
    assert named(shallow) == pytest.approx(
        {
            "tau": 8 / 5,
            "tau_uncensored": (4 + 3) / (2 + 2),
            "all_starts_mean": 13 / 8,
            "product_of_rates": 13 / 8,
            "iid_formula": 13 / 8,
        }
    )
    biases = named(shallow, "bias")
    assert biases["tau"] == pytest.approx((8 / 5) / (7 / 4) - 1)
    assert biases["iid_formula"] == pytest.approx((13 / 8) / (7 / 4) - 1)


def test_estimators_of_sampled_drafts_by_hand():
    """Three different numbers: r = .65, .3 over s0 and s1; accepted .6 and 1.12 there."""
    frame = estimates(simulate(table_of(*ONE, depth=2, finish=["stop"], sampled=True)), samples=20)
    assert named(frame) == pytest.approx(
        {
            "tau": 3 / 2,
            "tau_uncensored": 3 / 2,
            "all_starts_mean": 1 + 1.72 / 2,
            "product_of_rates": 1 + 0.65 + 0.65 * 0.3,
            "iid_formula": (1 - 0.65**3) / (1 - 0.65),
        }
    )
    assert frame["low"].isna().all()  # one prompt


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("finish", ["stop", "length"])
def test_estimators_are_those_of_the_simulation_by_another_way(sampled, finish):
    simulation = simulate(random_table(3, sampled=sampled, finish=finish, prompts=8))
    frame = estimates(simulation, samples=100, seed=5).set_index("quantity")
    for name in ("tau", "tau_uncensored", "all_starts_mean"):
        assert frame.loc[name, "value"] == pytest.approx(getattr(simulation, name))
    tau = simulation.tau_interval(samples=100, seed=5)
    assert tuple(frame.loc["tau", ["value", "low", "high"]]) == pytest.approx(tuple(tau))
    assert frame.loc["tau_uncensored", ["bias", "bias_low", "bias_high"]].tolist() == [0, 0, 0]
    assert frame.loc["tau", "bias"] == pytest.approx(simulation.tau / simulation.tau_uncensored - 1)
    assert (frame.loc["tau", "bias"] == 0) == (finish == "stop")
    assert frame.loc["tau", "n"] == pytest.approx(simulation.verify_rounds.sum())


@pytest.mark.parametrize(("tokens", "lowered"), [(24, 0.088), (64, 0.031), (127, 0.015)])
def test_of_independent_acceptance_no_estimator_is_biased_but_tau(tokens, lowered):
    """Rate .8, K = 8, texts that the limit ended: all four are (1 - .8^9) / .2 exactly, and tau is too low."""
    sequence = [(0.8,) * min(8, tokens - s) for s in range(tokens)]
    frame = estimates(simulate(table_of(sequence, sequence, depth=8, sampled=True)), samples=5)
    right = frame[frame["quantity"] != "tau"]
    assert right["value"].tolist() == pytest.approx([(1 - 0.8**9) / 0.2] * 4)
    assert right[["bias", "bias_low", "bias_high"]].to_numpy() == pytest.approx(np.zeros((4, 3)), abs=1e-12)
    assert 1 / (1 + named(frame, "bias")["tau"]) - 1 == pytest.approx(lowered, abs=6e-4)


def test_a_bias_has_an_interval_if_two_prompts_say_what_is_right():
    """All three have starts with two depths; only the first has rounds with more than two tokens left."""
    simulation = simulate(acceptance_of([0, 1, 0, 2, 0, 0], [2, 0], [0, 0], depth=2))
    row = estimates(simulation, samples=50).set_index("quantity").loc["all_starts_mean"]
    assert row["low"] < row["value"] < row["high"]
    assert not math.isnan(row["bias"])
    assert np.isnan([row["bias_low"], row["bias_high"]]).all()


def test_an_interval_of_the_bias_is_paired():
    """All prompts alike but in size: each estimator varies not at all, whatever the resample."""
    block = [0, 2, 2, 0]
    simulation = simulate(acceptance_of(*[block] * 6, depth=2))
    frame = estimates(simulation, samples=50)
    np.testing.assert_allclose(frame["low"], frame["value"])
    np.testing.assert_allclose(frame["bias_high"], frame["bias"])
    mixed = estimates(simulate(acceptance_of(*[block] * 3, *[[0, 0, 1, 0]] * 3, depth=2)), samples=200)
    row = mixed.set_index("quantity").loc["all_starts_mean"]
    assert row["low"] < row["value"] < row["high"]
    assert row["bias_low"] < row["bias"] < row["bias_high"]
    # unpaired, the ends of the bias would be those of the quotient of two intervals
    tau = mixed.set_index("quantity").loc["tau"]
    assert row["bias_high"] - row["bias_low"] < (row["high"] / tau["low"] - row["low"] / tau["high"]) / 2


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_the_iid_formula_at_its_ends(rate):
    sequence = [(rate,) * min(3, 9 - s) for s in range(9)]
    values = named(estimates(simulate(table_of(sequence, depth=3, finish=["stop"])), samples=5))
    assert values["iid_formula"] == values["product_of_rates"] == values["all_starts_mean"] == 1 + 3 * rate


def test_without_rounds_or_deep_starts_estimators_are_missing():
    frame = estimates(simulate(acceptance_of([], [1], depth=3)), samples=5)
    assert frame["value"].isna().all()
    assert frame["bias"].isna().all()


def test_every_k_from_one_table(varied_trajectory, trained):
    draft = all_starts(trained["eagle31"], varied_trajectory, 4)
    frame = estimates_by_depth(draft, varied_trajectory, samples=20)
    assert frame["depth_max"].unique().tolist() == [1, 2, 3, 4]
    for depth in (1, 3):
        simulation = simulate(accept(all_starts(trained["eagle31"], varied_trajectory, depth), varied_trajectory))
        values = named(frame[frame["depth_max"] == depth])
        assert values["tau"] == simulation.tau
        assert values["all_starts_mean"] == pytest.approx(simulation.all_starts_mean)
        full = simulation.acceptance.valid[..., -1]
        rates = [float(simulation.acceptance.match[..., k][full].double().mean()) for k in range(depth)]
        assert values["product_of_rates"] == pytest.approx(1 + sum(math.prod(rates[: k + 1]) for k in range(depth)))
    assert estimates_by_depth(draft, varied_trajectory, depths=(2,), samples=5)["depth_max"].unique().tolist() == [2]
    rows = as_rows(frame.drop(columns=["bias", "bias_low", "bias_high"]), variant="eagle31")
    assert len(rows) == 4 * 5
    own = all_starts(trained["eagle31"], varied_trajectory, 2, feed="own")
    with pytest.raises(DriftlabError, match="feed='text'"):
        estimates_by_depth(own, varied_trajectory)


# ---- conditional acceptance


def test_terms_of_conditional_acceptance_by_hand():
    simulation = simulate(table_of(*TWO, depth=2))
    # depth 1, eight starts: 5 match; rounds at s0, s2 | s0, s1 (cut, but its drafts are known): 3 of 4
    assert terms(simulation, 1) == pytest.approx(
        {
            "ability": 5 / 8,
            "conditional_all_starts": 5 / 8,
            "conditional_walk": 3 / 4,
            "survivor_selection": 0,
            "start_selection": 3 / 4 - 5 / 8,
            "residual": 0,
        }
    )
    # depth 2, s0..s3 | s0, s1: text-fed 4 of 6; four have passed depth 1, three of them depth 2
    # rounds: text-fed 0, 1, 0, 1; three have passed depth 1, two of them depth 2
    assert terms(simulation, 2) == pytest.approx(
        {
            "ability": 2 / 3,
            "conditional_all_starts": 3 / 4,
            "conditional_walk": 2 / 3,
            "survivor_selection": 1 / 12,
            "start_selection": 1 / 2 - 2 / 3,
            "residual": (2 / 3 - 1 / 2) - 1 / 12,
        }
    )
    assert list(terms(simulation, 1, "n").values()) == [8, 8, 4, 8, 4, 4]
    assert list(terms(simulation, 2, "n").values()) == [6, 4, 3, 4, 4, 3]


def test_terms_of_sampled_drafts_by_hand():
    """v = 1, .5, .5. Depth 2 is at s0 and s1 only."""
    simulation = simulate(table_of(*ONE, depth=2, finish=["stop"], sampled=True))
    assert terms(simulation, 1) == pytest.approx(
        {
            "ability": 1.9 / 3,
            "conditional_all_starts": 1.9 / 3,
            "conditional_walk": 1.2 / 2,
            "survivor_selection": 0,
            "start_selection": 0.6 - 1.9 / 3,
            "residual": 0,
        },
        abs=1e-12,
    )
    ability, everywhere, among_rounds, walk = 0.3, 0.42 / 1.3, 0.4 / 1.5, 0.26 / 0.9
    assert terms(simulation, 2) == pytest.approx(
        {
            "ability": ability,
            "conditional_all_starts": everywhere,
            "conditional_walk": walk,
            "survivor_selection": everywhere - ability,
            "start_selection": among_rounds - ability,
            "residual": walk - among_rounds - everywhere + ability,
        }
    )
    assert terms(simulation, 2, "n")["residual"] == pytest.approx(0.9)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("finish", ["stop", "length"])
def test_terms_are_covariances_and_add_up(sampled, finish):
    """The second definition of each: how far the weight goes along with what is averaged."""
    simulation = simulate(random_table(1, sampled=sampled, finish=finish, prompts=12))
    table, v = simulation.acceptance, start_weights(simulation)
    m, valid = table.probability.numpy(), table.valid.numpy()

    def tilt(values, weights, base):
        """Weighted covariance of values and weights over the mean weight; means under ``base``."""
        mean = lambda x: (x * base).sum() / base.sum()  # noqa: E731
        return mean((weights - mean(weights)) * (values - mean(values))) / mean(weights)

    for k in range(3):
        here = valid[..., k]
        before, value, weight = np.prod(m[..., :k], -1)[here], m[..., k][here], v[here]
        one = np.ones_like(weight)
        found = terms(simulation, k + 1)
        assert found["survivor_selection"] == pytest.approx(tilt(value, before, one), abs=1e-12)
        assert found["start_selection"] == pytest.approx(tilt(value, weight, one), abs=1e-12)
        twice = tilt(value, before, weight) - tilt(value, before, one)
        assert found["residual"] == pytest.approx(twice, abs=1e-12)
        parts = ("ability", "survivor_selection", "start_selection", "residual")
        assert sum(found[part] for part in parts) == pytest.approx(found["conditional_walk"], abs=1e-12)
    if not sampled:
        assert abs(found["residual"]) > 1e-3  # it is not zero by construction


def pooled_conditional(simulation, depth):
    passed, reached = zip(*(simulation.by_depth(i) for i in range(len(simulation.acceptance.ids))), strict=True)
    return sum(p[depth - 1] for p in passed) / sum(r[depth - 1] for r in reached)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("finish", ["stop", "length"])
def test_on_the_walk_it_is_the_rounds_own_conditional_acceptance(sampled, finish):
    simulation = simulate(random_table(7, sampled=sampled, finish=finish, prompts=12))
    for k in (1, 2, 3):
        assert terms(simulation, k)["conditional_walk"] == pytest.approx(pooled_conditional(simulation, k))


def test_ability_is_the_match_over_all_starts(varied_trajectory, trained):
    simulation = simulate(accept(all_starts(trained["eagle3"], varied_trajectory, 3), varied_trajectory))
    rows = as_rows(decompose(simulation, samples=20), variant="eagle3", depth_max=3)
    for k in range(3):
        share = simulation.acceptance.match[..., k].sum() / simulation.acceptance.valid[..., k].sum()
        ability = rows[(rows["quantity"] == "ability") & (rows["depth"] == k + 1)].iloc[0]
        assert ability["value"] == pytest.approx(float(share))
        assert ability["n"] == float(simulation.acceptance.valid[..., k].sum())
        assert ability["low"] <= ability["value"] <= ability["high"]
    assert set(rows["starts"]) == {"all", "walk"}


def test_one_surviving_prompt_has_no_interval():
    """Resampled, it would always give the same number: an interval of width 0."""
    simulation = simulate(acceptance_of(text_with_rounds(2, 1, 2), [0, 0, 0], [0, 0, 0], depth=2))
    frame = decompose(simulation, samples=50).set_index(["depth", "quantity"])
    assert frame.loc[(2, "conditional_walk"), "value"] == pytest.approx(2 / 3)
    assert math.isnan(frame.loc[(2, "conditional_walk"), "low"])
    assert frame.loc[(1, "conditional_walk"), "low"] < frame.loc[(1, "conditional_walk"), "high"]


def test_without_a_survivor_the_conditional_is_missing_and_the_ability_is_not():
    simulation = simulate(table_of([(0, 1), (0, 1), (0,)], [(0, 0), (0,)], depth=2, finish=["stop", "stop"]))
    found = terms(simulation, 2)
    assert found["ability"] == pytest.approx(2 / 3)
    assert found["start_selection"] == pytest.approx(0)
    missing = ("conditional_all_starts", "conditional_walk", "survivor_selection", "residual")
    assert all(math.isnan(found[name]) for name in missing)


# ---- the experiment


def experiment():
    path = Path(__file__).parent.parent / "experiments" / "estimator_bias.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_experiments_numbers_are_those_of_direct_calls(varied_trajectory, trained, tmp_path, capsys):
    module, draft = experiment(), all_starts(trained["eagle31"], varied_trajectory, 4)
    rows = as_rows(module.measure(draft, varied_trajectory, 3, samples=20), variant="eagle31", drafter="one")
    table, by_depth = module.by_k(rows), module.by_depth(rows)
    assert table.index.tolist() == [1, 2, 3, 4]
    for k in table.index:
        simulation = simulate(accept(draft.upto(k), varied_trajectory))
        walk = [r.accepted for rounds in simulation.rounds for r in rounds]
        assert table.loc[k, "tau"] == simulation.tau
        right = simulation.tau_uncensored
        assert table.loc[k, "all_starts_mean %"] == pytest.approx(100 * (simulation.all_starts_mean / right - 1))
        assert table.loc[k, "tau %"] == pytest.approx(100 * (simulation.tau / right - 1))
        assert table.loc[k, "first_draft"] == pytest.approx(np.mean([a >= 1 for a in walk]))
        assert table.loc[k, "low"] <= right <= table.loc[k, "high"]
    change = rows[rows["quantity"] == "first_draft_change"].set_index("depth_max")
    assert change["value"].tolist() == pytest.approx((table["first_draft"] - table["first_draft"][1]).tolist())
    assert change.loc[1, ["low", "high"]].tolist() == [0, 0]
    assert change.loc[4, "low"] <= change.loc[4, "value"] <= change.loc[4, "high"]
    expected = decompose(simulate(accept(draft.upto(3), varied_trajectory)), samples=5)
    assert by_depth.index.tolist() == [1, 2, 3]
    for k in by_depth.index:
        assert by_depth.loc[k].to_dict() == pytest.approx(named(expected[expected["depth"] == k]), nan_ok=True)
    module.tell("one", rows)
    assert "K = 1 to 4" in capsys.readouterr().out
    both = pd.concat([rows, rows.assign(drafter="two")], ignore_index=True)
    figure = module.draw(both)
    assert figure.axes[1].get_title() == "bias relative to tau_uncensored"
    drawn = {line.get_label(): line.get_ydata() for line in figure.axes[1].lines}
    assert drawn["tau (walk)"].tolist() == pytest.approx(table["tau %"].tolist())
    assert "tau_uncensored (walk)" not in drawn
    module.save_panel(figure, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_the_experiment_runs_from_a_recording_and_a_folder(varied_trajectory, trained, tmp_path, capsys):
    trained["eagle3"].save(tmp_path / "mine")
    experiment().main(varied_trajectory.path, (str(tmp_path / "mine"),), depth=2, out=tmp_path / "bias")
    written = read_rows(tmp_path / "bias.csv")
    tau = simulate(accept(all_starts(trained["eagle3"], varied_trajectory, 2), varied_trajectory)).tau
    assert written[(written["quantity"] == "tau") & (written["depth_max"] == 2)]["value"].tolist() == [tau]
    assert set(written["drafter"]) == {"mine"}
    assert (tmp_path / "bias.png").is_file()
    assert (tmp_path / "bias.run.json").is_file()
    assert "mine, by K" in capsys.readouterr().out
