"""The demo on the real model, at a small size: what it writes, and that measuring again gives the same bits."""

import json

import pandas as pd
import pytest

from driftlab import Drafter, Target, load_prompts, read_rows
from driftlab.demo import RECENT, DemoConfig, run_demo
from driftlab.measure import measure
from driftlab.prompts import evenly

COLUMNS = [
    *("drafter", "variant", "ttt", "tau", "tau_low", "tau_high", "match_d1", "match_d4", "rms_d1", "rms_d3"),
    *("sink_d1", "sink_d3", "self_d2", "self_d3"),
]


@pytest.mark.real
def test_demo_writes_what_it_promises_and_repeats(tmp_path):
    config = DemoConfig(prompts=3, answer_tokens=16, depth=3, match_depth=4, live_tokens=8)
    stages = []
    summary = run_demo(tmp_path / "a", config, progress=lambda what, done, total: stages.append(what))
    assert summary.columns.tolist() == COLUMNS
    assert summary["variant"].tolist() == ["eagle3", "fc_norm", "norm_output", "eagle31", "eagle3", "eagle31"]
    assert summary["ttt"].tolist() == [4, 4, 4, 4, 2, 2]
    assert summary[summary["ttt"] == 4].notna().all(axis=None)
    assert (summary["tau"] >= 1).all()
    assert "live check" in stages  # a recording that is in the cache has no stage
    written = pd.read_csv(tmp_path / "a" / "summary.csv")
    assert written.columns.tolist() == COLUMNS
    page = (tmp_path / "a" / "report.html").read_text(encoding="utf-8")
    assert "Q4_1, de-quantised" in page
    assert "single training seed" in page
    assert {p.name for p in (tmp_path / "a").glob("*.png")} == {
        *("magnitude.png", "match.png", "match_ttt.png", "acceptance.png", "tau.png", "recent.png", "mass.png")
    }
    rows = read_rows(tmp_path / "a" / "rows.parquet")
    assert rows[rows["quantity"] == "match"]["depth"].max() == 4
    assert json.loads((tmp_path / "a" / "rows.run.json").read_text())["settings"]["target"].startswith("SmolLM2")
    # one drafter again, in this process and not in one of the demo's, on what a second run would find recorded
    answers = Target.load("smollm2").record(evenly(load_prompts("default"), 3), max_new_tokens=16, piece_size=20)
    name = "smollm2-eagle31"
    again, _ = measure(Drafter.load(name, answers).eval(), answers, name, 3, 4, (RECENT,))
    found = rows[rows["drafter"] == name].reset_index(drop=True)
    pd.testing.assert_frame_equal(found, again[found.columns].reset_index(drop=True), check_exact=True)
