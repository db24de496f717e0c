import pandas as pd
import pytest

from driftlab.account import account, details, legend
from driftlab.measure import drafter_sink, probe_rows, replay_rows
from driftlab.results import check, mixed_settings


def test_replay_rows_carry_settings_and_say_which_starts(tiny_trajectory, make_drafter):
    rows, simulation = replay_rows(make_drafter("eagle31"), tiny_trajectory, "mine", depth=4)
    check(rows)
    assert not mixed_settings(rows, varying=("starts",))
    by_starts = rows.groupby("starts")["quantity"].unique()
    assert set(by_starts["all"]) == {"match", "all_starts_mean"}
    assert set(by_starts["walk"]) == {
        "tau",
        "tau_uncensored",
        "rounds",
        "emitted",
        "accept_conditional",
        "accept_unconditional",
    }
    assert rows[rows["quantity"] == "tau"]["value"].item() == pytest.approx(simulation.tau)
    assert rows["depth_max"].unique().tolist() == [4]
    assert rows["target"].unique().tolist() == [tiny_trajectory.spec.label]
    emitted, rounds = (rows[rows["quantity"] == name]["value"].sum() for name in ("emitted", "rounds"))
    assert emitted / rounds == pytest.approx(simulation.tau)


def test_match_does_not_depend_on_how_deep_the_draft_goes(tiny_trajectory, make_drafter):
    drafter = make_drafter("norm_output")
    shallow, first = replay_rows(drafter, tiny_trajectory, "d", depth=3)
    deep, second = replay_rows(drafter, tiny_trajectory, "d", depth=3, match_depth=6)
    assert first.rounds == second.rounds
    shallow, deep = (rows[rows["quantity"] == "match"] for rows in (shallow, deep))
    assert deep["depth"].max() == 6
    pd.testing.assert_frame_equal(
        shallow.set_index(["prompt", "depth"]), deep[deep["depth"] <= 3].set_index(["prompt", "depth"])
    )


def test_probe_rows_name_what_was_fed(tiny_trajectory, make_drafter):
    rows = probe_rows(make_drafter("fc_norm"), tiny_trajectory, "mine", depth=3)
    check(rows)
    assert rows["feed"].unique().tolist() == ["own"]
    assert rows["drafter"].unique().tolist() == ["mine"]
    masses = rows[rows["quantity"].isin(["mass_sink", "mass_prompt", "mass_context", "mass_self"])]
    assert masses.groupby(["prompt", "head", "depth"])["value"].sum().to_numpy() == pytest.approx(1, abs=1e-5)


def test_drafter_sink_lists_positions_by_mass(tiny_trajectory, make_drafter):
    longer = tiny_trajectory.subset([0, 3])
    top = drafter_sink(make_drafter("eagle3"), longer, 3)
    assert len(top) == 3
    assert top[0][1] >= top[1][1] >= top[2][1] > 0
    assert all(0 <= position < min(e.prompt_length for e in longer.entries) - 1 for position, _ in top)


def test_details_say_what_each_term_rests_on(tiny_trajectory, make_drafter):
    """Rounds that reached a depth, counted from the walk; totals without columns that say nothing; a legend for every table."""
    _, simulation = replay_rows(make_drafter("eagle3"), tiny_trajectory, "d", depth=3)
    tables = details({"d": simulation}, tiny_trajectory)
    split = tables["Conditional acceptance, split"].set_index("depth")
    for k in (1, 2, 3):
        reached = sum(simulation.by_depth(i)[1][k - 1] for i in range(len(tiny_trajectory)))
        assert split.loc[k, "n_rounds_reached"] == reached
        assert split.loc[k, "n_starts"] == simulation.acceptance.valid[..., k - 1].sum()
    assert split.loc[1, "n_rounds"] == split.loc[1, "n_rounds_reached"] > split.loc[2, "n_rounds_reached"]
    assert pd.api.types.is_integer_dtype(split["n_rounds_reached"])
    assert tables["tau by category"].columns.tolist() == [
        "drafter",
        "bucket",
        "tau",
        "low",
        "high",
        "rounds",
        "prompts",
    ]
    assert "beyond_trained" in tables["tau by context"]
    assert "beyond_trained" not in tables["tau by position"]
    whole = tables | account({"d": simulation, "e": simulation}, tiny_trajectory)
    assert len(whole) == 7
    assert all(legend([title]) for title in whole)
    assert len(legend(whole)) == 5  # three tables of tau by something share theirs


def test_expected_counts_stay_fractions(tiny_target, make_drafter, tmp_path):
    sampled = tiny_target.record(
        ["hello", "abc"], max_new_tokens=8, temperature=1.0, template=False, out=tmp_path / "r"
    )
    _, simulation = replay_rows(make_drafter("eagle3"), sampled, "d", depth=2, rule="rejection")
    table = account({"d": simulation}, sampled)["Estimators beside tau"]
    assert table.loc[table["quantity"] == "tau", "n"].item() == pytest.approx(simulation.verify_rounds.sum())
    assert table.loc[table["quantity"] == "tau", "n"].item() % 1
