"""The row contract, files that round-trip, settings that do not mix, and intervals with the coverage they claim."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driftlab import results
from driftlab.errors import DriftlabError
from driftlab.intervals import bootstrap_difference, bootstrap_ratio, pooled_ratio, weighted_mean
from driftlab.results import as_rows, combine

SETTINGS = {"variant": "eagle31", "target": "tiny", "drafter": "d0", "depth_max": 4, "feed": "text", "starts": "all"}


def sample(**settings):
    records = [
        {"prompt": prompt, "depth": depth, "quantity": "match", "value": value, "n": 3}
        for prompt in ("p0", "NA", "007")
        for depth, value in ((1, 0.1 + 0.2), (2, float("nan")), (3, 1e-17))
    ]
    return as_rows(records, **{**SETTINGS, **settings})


# ---- the frame


def test_absent_keys_become_neutral_and_the_toggles_follow_from_the_variant():
    rows = as_rows([{"quantity": "tau", "value": 2}], variant="fc_norm")
    assert list(rows.columns) == list(results.COLUMNS)
    row = rows.to_dict("records")[0]
    assert (row["fc_norm"], row["norm_output"]) == (True, False)
    assert (row["layer"], row["head"], row["depth"], row["window"], row["n"]) == (-1, -1, 0, 0, 1)
    assert (row["prompt"], row["category"], row["value"]) == ("", "", 2.0)
    assert math.isnan(row["low"])
    assert math.isnan(row["high"])
    # records that hold a toggle in part, and a variant that is one setting of all
    records = [{"quantity": "tau", "value": 2, "fc_norm": True}, {"quantity": "tau", "value": 2, "depth": 1}]
    assert as_rows(records, variant="eagle31")[["fc_norm", "norm_output"]].to_numpy().all()
    assert as_rows(records, variant="fc_norm")["fc_norm"].tolist() == [True, True]


def test_records_may_differ_in_their_keys_and_none_is_a_missing_value():
    rows = as_rows([{"quantity": "entropy", "value": None, "head": 3}, {"quantity": "tau", "value": 1, "n": 7.0}])
    assert rows["head"].tolist() == [3, -1]
    assert rows["n"].tolist() == [1, 7]
    assert math.isnan(rows["value"][0])


def test_no_records_are_an_empty_frame_with_the_dtypes_of_a_full_one():
    empty = as_rows([], **SETTINGS)
    assert empty.dtypes.tolist() == sample().dtypes.tolist()
    assert len(combine([empty, sample()])) == len(sample())


@pytest.mark.parametrize(
    ("record", "settings", "told"),
    [
        ({"value": 1.0}, {}, "need the column 'quantity'"),
        ({"quantity": "tau"}, {}, "need the column 'value'"),
        ({"quantity": "tau", "value": 1.0, "heads": 1}, {}, r"unknown column\(s\) \['heads'\]"),
        ({"quantity": "tau", "value": 1.0}, {"temprature": 0.5}, "temprature"),
        ({"quantity": "tau", "value": 1.0, "seed": 1}, {"seed": 2}, "'seed' is both"),
        ({"quantity": "tau", "value": "high"}, {}, "'value' wants float64"),
        ({"quantity": "tau", "value": 1.0, "n": "many"}, {}, "'n' wants float64"),
        ({"quantity": "tau", "value": 1.0, "depth": math.inf}, {}, "'depth' wants int64"),
        ({"quantity": "tau", "value": 1.0, "fc_norm": "False"}, {}, "'fc_norm' wants bool"),
        ({"quantity": "tau", "value": 1.0, "prompt": 7}, {}, "'prompt' wants str"),
        ({"quantity": "", "value": 1.0}, {}, "'quantity' is empty"),
        ({"quantity": None, "value": 1.0}, {}, "'quantity'"),
        ({"quantity": "tau", "value": 1.0, "depth": -1}, {}, "row 0 .*depth=-1.*below 0"),
        ({"quantity": "tau", "value": 1.0, "n": -1}, {}, "'n' is below 0"),
        ({"quantity": "tau", "value": 1.0}, {"variant": "eagle3", "norm_output": True}, "norm_output=False"),
    ],
)
def test_what_breaks_the_contract_is_named(record, settings, told):
    with pytest.raises(DriftlabError, match=told):
        as_rows([record], **settings)


def test_check_names_the_first_offending_row():
    rows = sample()
    twice = pd.concat([rows, rows.iloc[4:6]], ignore_index=True)
    with pytest.raises(DriftlabError, match=r"row 9 .*prompt='NA'.*depth=2.*same settings and keys"):
        results.check(twice)
    with pytest.raises(DriftlabError, match="'depth' is float64, not int64"):
        results.check(rows.astype({"depth": "float64"}))
    with pytest.raises(DriftlabError, match=r"lack the column\(s\) \['rule'\]"):
        results.check(rows.drop(columns="rule"))


def test_a_window_tells_rows_apart():
    assert len(as_rows([{"quantity": "recent", "value": 0.5, "window": window} for window in (1, 8)])) == 2


# ---- trap G8: settings that do not mix


def test_combining_other_settings_warns_with_columns_and_values():
    with pytest.warns(UserWarning, match=r"temperature: 0\.0, 1\.0"):
        combine([sample(), sample(temperature=1.0, drafter="d1")])
    with pytest.warns(UserWarning, match=r"depth_max: 4, 8; template: '', 'chat'"):
        combine([sample(), sample(depth_max=8, template="chat")])


def test_combining_variants_of_one_comparison_is_silent():
    both = combine([sample(), sample(variant="eagle3", drafter="d1")])
    assert both["variant"].value_counts().to_dict() == {"eagle31": 9, "eagle3": 9}
    combine([sample(), sample(seed=1)], varying=("seed",))


def test_combining_nothing_or_the_same_rows_twice_is_refused():
    with pytest.raises(DriftlabError, match="nothing to combine"):
        combine([])
    with pytest.raises(DriftlabError, match="same settings and keys"):
        combine([sample(), sample()])


# ---- files


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_rows_come_back_bit_for_bit(tmp_path, suffix):
    rows = sample(template='a "b",\nc\r# d', rule="grün")
    rows.loc[0, ["low", "high"]] = [-math.inf, 0.30000000000000004]
    path = tmp_path / f"rows.{suffix}"
    results.write_rows(path, rows, results.provenance({"depth": 4}))
    pd.testing.assert_frame_equal(results.read_rows(path), rows, check_exact=True)
    assert json.loads((tmp_path / "rows.run.json").read_text())["settings"] == {"depth": 4}
    assert sorted(file.name for file in tmp_path.iterdir()) == [f"rows.{suffix}", "rows.run.json"]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_an_empty_frame_comes_back(tmp_path, suffix):
    results.write_rows(tmp_path / f"rows.{suffix}", as_rows([]))
    pd.testing.assert_frame_equal(results.read_rows(tmp_path / f"rows.{suffix}"), as_rows([]))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(allow_infinity=True, allow_nan=True), min_size=1, max_size=6))
def test_any_float_survives_csv(tmp_path_factory, values):
    path = tmp_path_factory.getbasetemp() / "any.csv"
    rows = as_rows([{"quantity": "entropy", "depth": depth, "value": value} for depth, value in enumerate(values)])
    results.write_rows(path, rows)
    pd.testing.assert_frame_equal(results.read_rows(path), rows, check_exact=True)


def test_the_first_line_of_csv_is_the_version_and_another_version_is_refused(tmp_path):
    path = tmp_path / "rows.csv"
    results.write_rows(path, sample())
    first, rest = path.read_text().split("\n", 1)
    assert first == "# driftlab rows v3"
    path.write_text("# driftlab rows v99\n" + rest)
    with pytest.raises(DriftlabError, match=r"rows\.csv: written as driftlab rows v99.*reads v3"):
        results.read_rows(path)
    path.write_text(rest)
    with pytest.raises(DriftlabError, match="no driftlab format version"):
        results.read_rows(path)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_rows_of_version_2_are_read_as_rows_without_an_intervention(tmp_path, suffix):
    path, old = tmp_path / f"rows.{suffix}", sample().drop(columns="intervention")
    if suffix == "csv":
        path.write_text("# driftlab rows v2\n" + old.to_csv(index=False))
    else:
        table = pa.Table.from_pandas(old, preserve_index=False)
        pq.write_table(table.replace_schema_metadata({results.PARQUET_KEY: "2"}), path)
    pd.testing.assert_frame_equal(results.read_rows(path), sample())


def test_another_version_of_parquet_is_refused(tmp_path):
    path = tmp_path / "rows.parquet"
    table = pa.Table.from_pandas(sample(), preserve_index=False)
    pq.write_table(table.replace_schema_metadata({results.PARQUET_KEY: "4"}), path)
    with pytest.raises(DriftlabError, match="written as driftlab rows v4"):
        results.read_rows(path)
    pq.write_table(table, path)
    with pytest.raises(DriftlabError, match="no driftlab format version"):
        results.read_rows(path)


def test_broken_files_are_named(tmp_path):
    for name, content in {
        "a.parquet": b"PAR1 cut",
        "b.csv": b"\xff\xfe\x00",
        "c.csv": b"# driftlab rows v3\n",
        "d.csv": b"# driftlab rows v3\nvariant,depth\neagle3,deep\n",
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DriftlabError, match=name):
            results.read_rows(tmp_path / name)
    with pytest.raises(DriftlabError, match="does not exist"):
        results.read_rows(tmp_path / "none.csv")
    with pytest.raises(DriftlabError, match=r"\.parquet or \.csv"):
        results.write_rows(tmp_path / "rows.xlsx", sample())
    cut = sample().drop(columns="seed")
    with pytest.raises(DriftlabError, match="lack"):
        results.write_rows(tmp_path / "cut.csv", cut)
    assert not (tmp_path / "cut.csv").exists()


def test_a_checkout_with_windows_line_ends_is_read(tmp_path):
    path = tmp_path / "rows.csv"
    results.write_rows(path, sample())
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    pd.testing.assert_frame_equal(results.read_rows(path), sample())


# ---- provenance


def test_provenance_names_versions_and_no_machine(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/home/someone/bin/driftlab", "probe", "--out=/home/someone/x.csv", "/data/a/b"])
    made = results.provenance({"out": Path("/home/someone/y.csv"), "lr": math.nan, "on": True, "k": (1, np.int64(2))})
    text = json.dumps(made, allow_nan=False)
    assert made["argv"] == ["driftlab", "probe", "--out=x.csv", "b"]
    assert made["settings"] == {"out": "y.csv", "lr": "nan", "on": True, "k": [1, 2]}
    assert made["versions"]["numpy"] == np.__version__
    assert set(made["git"]) == {"commit", "dirty"}
    assert made["time"].endswith("+00:00")
    assert "someone" not in text
    assert str(Path.home()) not in text


def test_without_git_the_commit_is_none(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert results.provenance({})["git"] == {"commit": None, "dirty": None}


def test_the_commit_is_the_one_of_the_tree_that_tracks_the_package(tmp_path, monkeypatch):
    def git(*arguments):
        run = subprocess.run(["git", "-C", str(tmp_path), *arguments], capture_output=True, text=True, check=True)
        return run.stdout.strip()

    package = tmp_path / "driftlab"
    package.mkdir()
    (package / "results.py").write_text("1\n")
    git("init", "-q")
    monkeypatch.setattr(results, "__file__", str(package / "results.py"))
    assert results.provenance({})["git"] == {"commit": None, "dirty": None}  # a tree, but it does not track the file
    git("add", ".")
    assert results.provenance({})["git"] == {"commit": None, "dirty": None}  # and no commit yet
    git("-c", "user.name=a", "-c", "user.email=a@example.org", "commit", "-qm", "one")
    assert results.provenance({})["git"] == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (package / "results.py").write_text("2\n")
    assert results.provenance({})["git"]["dirty"] is True


# ---- summaries


def test_the_pooled_ratio_is_micro_not_macro():
    # trap G2: rounds [[4, 4], [1]] give 3.0, not 2.5
    assert pooled_ratio([8, 1], [2, 1]) == 3.0
    assert math.isnan(pooled_ratio([1.0], [0.0]))
    assert pooled_ratio([8, 1, 5], [2, 1, math.nan]) == 3.0
    with pytest.raises(DriftlabError, match="same length"):
        pooled_ratio([1, 2], [1])


# t_{.975, n-1} of the printed tables, over 1.95996, times sqrt(n / (n - 1))
TABLE_T = {2: 12.7062, 4: 3.18245, 5: 2.77645, 12: 2.20099}


def widening(prompts):
    return TABLE_T[prompts] / 1.95996 * math.sqrt(prompts / (prompts - 1))


def test_the_bootstrap_of_two_prompts_by_hand():
    # resamples: ratio 1 (1/4), 2 (1/2), 3 (1/4); 2.5 % and 97.5 % lie in the outer two, 1 off the value
    assert bootstrap_ratio([1, 3], [1, 1]) == pytest.approx((2.0, 2 - widening(2), 2 + widening(2)), rel=1e-5)
    # so do 5 % and 95 %: t_{.95, 1} and z_{.95}
    wide = 6.31375 / 1.64485 * math.sqrt(2)
    assert bootstrap_ratio([1, 3], [1, 1], level=0.9) == pytest.approx((2.0, 2 - wide, 2 + wide), rel=1e-5)
    # at level 0.4 the ends are the 30 % and 70 % points, in the middle
    assert bootstrap_ratio([1, 3], [1, 1], level=0.4) == (2.0, 2.0, 2.0)


def test_prompts_without_a_denominator_do_not_narrow_the_interval():
    """A resample of four holds one of the two with rounds and not the other in a quarter of the cases, each."""
    empty = ([1, 3, 0, 0], [1, 1, 0, 0])
    assert bootstrap_ratio(*empty) == pytest.approx((2.0, 2 - widening(2), 2 + widening(2)), rel=1e-5)
    even = ([1, 1, 1, 1], [1, 1, 1, 1])
    expected = pytest.approx((1.0, 1 - widening(2), 1 + widening(2)), rel=1e-5)
    assert bootstrap_difference(*empty, *even) == expected
    reverse = bootstrap_difference(*even, *empty)
    assert (-reverse.value, -reverse.high, -reverse.low) == expected
    # four that all have one: a sixteenth of the resamples is at either end
    four = bootstrap_ratio([1, 3, 1, 3], [1, 1, 1, 1])
    assert four == pytest.approx((2.0, 2 - widening(4), 2 + widening(4)), abs=1e-4)


def test_one_prompt_with_rounds_has_no_interval():
    """Resamples of it all agree: an interval of width 0 would look like certainty."""
    lone = bootstrap_ratio([7, 0, 0], [3, 0, 0])
    assert lone.value == pytest.approx(7 / 3)
    assert np.isnan([lone.low, lone.high]).all()
    gap = bootstrap_difference([7, 0, 0], [3, 0, 0], [4, 2, 3], [2, 1, 1])
    assert gap.value == pytest.approx(7 / 3 - 9 / 4)
    assert np.isnan([gap.low, gap.high]).all()


def test_the_bootstrap_follows_its_seed():
    top, bottom = np.arange(1.0, 9.0), np.full(8, 2.0)
    assert bootstrap_ratio(top, bottom, seed=3) == bootstrap_ratio(top, bottom, seed=3)
    assert bootstrap_ratio(top, bottom, seed=3) != bootstrap_ratio(top, bottom, seed=4)


@pytest.mark.parametrize(("top", "bottom"), [([5.0], [2.0]), ([5.0, math.nan], [2.0, 3.0]), ([], []), ([1, 2], [0, 0])])
def test_no_interval_from_one_prompt_or_from_nothing(top, bottom):
    value, low, high = bootstrap_ratio(top, bottom)
    assert math.isnan(low)
    assert math.isnan(high)
    assert math.isnan(value) == (sum(bottom) == 0)


def test_resamples_without_a_denominator_are_dropped():
    # one resample of four prompts, which now and then draws the empty ones alone: nothing remains, so no interval
    single = [bootstrap_ratio([3.0, 3.0, 0, 0], [1.0, 1.0, 0, 0], samples=1, seed=seed) for seed in range(60)]
    assert {one.value for one in single} == {3.0}
    assert {math.isnan(one.low) for one in single} == {True, False}
    assert bootstrap_ratio([3, 3, 0, 0], [1, 1, 0, 0]) == (3.0, 3.0, 3.0)  # a sixteenth of the resamples has none


def test_overflowed_magnitudes_do_not_warn():
    assert bootstrap_ratio([math.inf, 1.0], [1.0, 1.0]).value == math.inf


def test_a_paired_difference_cancels_what_the_prompts_share():
    generator = np.random.default_rng(0)
    den = generator.integers(20, 60, 30)
    num = den * generator.uniform(1.5, 3.5, 30)
    value, low, high = bootstrap_difference(num + 0.25 * den, den, num, den)
    assert (value, low, high) == pytest.approx((0.25, 0.25, 0.25))
    width = np.ptp(bootstrap_ratio(num, den)[1:])
    assert width > 0.1
    assert math.isnan(bootstrap_difference([1], [1], [2], [1]).low)


def test_the_interval_covers_as_often_as_it_says():
    generator = np.random.default_rng(7)
    inside, runs = 0, 300
    for run in range(runs):
        rounds = generator.integers(10, 80, 40)
        rate = generator.gamma(20, 2.5 / 20, 40)  # prompts differ: starts within one are not independent
        emitted = generator.poisson(rounds * rate)
        interval = bootstrap_ratio(emitted, rounds, samples=400, seed=run)
        inside += interval.low <= 2.5 <= interval.high
    assert 0.90 <= inside / runs <= 0.98


@pytest.mark.parametrize(("prompts", "least", "gain"), [(5, 0.9, 0.08), (12, 0.91, 0.02)])
def test_few_prompts_are_covered_nearly_as_often_as_many(prompts, least, gain):
    """1000 runs, standard error below .01. Percentiles as they are: .80 to .83 of five prompts, .88 to .91 of twelve."""
    generator = np.random.default_rng(11)
    inside, plain, runs, factor = 0, 0, 1000, widening(prompts)
    for run in range(runs):
        rounds = generator.integers(10, 80, prompts)
        emitted = generator.poisson(rounds * generator.gamma(20, 2.5 / 20, prompts))
        value, low, high = bootstrap_ratio(emitted, rounds, samples=400, seed=run)
        inside += low <= 2.5 <= high
        plain += value - (value - low) / factor <= 2.5 <= value + (high - value) / factor
    assert least <= inside / runs <= 0.97
    assert inside / runs >= plain / runs + gain


def test_a_bootstrap_refuses_nonsense():
    with pytest.raises(DriftlabError, match="0 < level < 1"):
        bootstrap_ratio([1, 2], [1, 1], level=95.0)


def test_the_weighted_mean_is_pooled_and_leaves_out_the_missing_with_their_n():
    frame = pd.DataFrame(
        {
            "depth": [1, 1, 1, 2, 2, 3],
            "head": [0, 1, 2, 0, 1, 0],
            "value": [0.5, 0.2, np.nan, np.nan, np.nan, 4.0],
            "n": [10, 30, 60, 5, 5, 0],
        }
    )
    mean = weighted_mean(frame, ["depth"])
    assert mean.columns.tolist() == ["depth", "value", "n"]
    assert mean["n"].tolist() == [40, 0, 0]
    assert mean["value"][0] == pytest.approx((0.5 * 10 + 0.2 * 30) / 40)
    assert mean["value"][1:].isna().all()  # traps F6, O3: missing is not 0
    with pytest.raises(DriftlabError, match="no column 'layer'"):
        weighted_mean(frame, ["layer"])
    with pytest.raises(DriftlabError, match="at least one"):
        weighted_mean(frame, [])


def test_the_modules_that_figures_read_start_without_torch():
    code = (
        "import sys, driftlab.results, driftlab.plotting, driftlab.report\n"
        "assert not {'torch', 'transformers', 'triton'} & set(sys.modules)"
    )
    root = Path(results.__file__).resolve().parents[1]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)
