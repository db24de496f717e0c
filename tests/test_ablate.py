"""The ablation engine: keys, whole tables or none, killed and resumed, several runners, machines that are lost."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from driftlab import DriftlabError
from driftlab.ablation import Cell, InProcess, Processes, Resources, ablate, read_cells
from driftlab.ablation import store as stores
from driftlab.ablation.cells import distinct
from driftlab.results import read_rows


@dataclass(frozen=True, kw_only=True)
class Point(Cell):
    variant: str
    seed: int = 0
    lr: float = 1e-3
    gate: bool = False
    layers: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Anything(Cell):
    a: bool | int | float | str | None | tuple = 0
    b: bool | int | float | str | None | tuple = 0


POINTS = [Point(variant=v, seed=s) for v in ("one", "two") for s in (0, 1)]


def mark(folder: Path, cell: Cell) -> None:
    """Leave a file for every time that a cell is run."""
    (folder / f"{cell.key}.{os.getpid()}.{time.time_ns()}.ran").touch()


def ran(folder: Path) -> list[str]:
    return sorted(path.name.rsplit(".", 3)[0] for path in folder.glob("*.ran"))


def draw(cell: Point, marks: Path | None = None, bad: str = "") -> pd.DataFrame:
    if marks is not None:
        mark(marks, cell)
    if bad and bad in cell.key:
        raise ValueError(f"{cell.variant} is\nbad")
    torch.manual_seed(cell.seed)
    product = (torch.randn(64, 300) @ torch.randn(300, 3)).mean(0) * len(cell.variant)
    return pd.DataFrame({"quantity": "product", "depth": [1, 2, 3], "value": product.tolist()})


def tables(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.parquet")}


# ---------------------------------------------------------------------------------------------- keys


@pytest.mark.parametrize(
    ("cell", "key"),
    [
        (Point(variant="eagle3"), "variant=eagle3"),
        (Point(variant="eagle3", seed=2, gate=True), "gate=on,seed=2,variant=eagle3"),
        (Point(variant="eagle3", lr=1e-5), "lr=1e-05,variant=eagle3"),
        (Point(variant="eagle3", lr=1), "lr=1.0,variant=eagle3"),
        (Point(variant="eagle3", layers=(2, 15)), "layers=2+15+,variant=eagle3"),
        (Point(variant="eagle3", layers=[2, 15]), "layers=2+15+,variant=eagle3"),
        (Point(variant="Noise:a,b/c"), "variant=%4eoise%3aa%2cb%2fc"),
        (Point(variant=""), "variant=~"),
        (Anything(), "default"),
        (Anything(a="1"), "a=~1"),
        (Anything(a="on"), "a=~on"),
        (Anything(a=None), "a=none"),
        (Anything(a=("",)), "a=~+"),
        (Anything(a=()), "a=+"),
        (Anything(a=-0.0), "a=0.0"),
    ],
)
def test_keys_are_readable(cell, key):
    assert cell.key == key


VALUES = st.one_of(
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.sampled_from(["on", "off", "none", "inf", "-inf", "1", "1.0", "~", "+", ",b=1", "%", "A", "a", None]),
)
VALUES = st.one_of(VALUES, st.lists(VALUES, max_size=3).map(tuple))


def exactly(value):
    """Values that are the same to the last letter: 1, 1.0 and True are three."""
    if isinstance(value, tuple):
        return tuple(map(exactly, value))
    return type(value).__name__, repr(value + 0.0 if isinstance(value, float) else value)


@given(st.tuples(VALUES, VALUES), st.tuples(VALUES, VALUES))
def test_two_cells_never_share_a_key_not_even_where_case_is_not_told_apart(left, right):
    keys = [Anything(a=a, b=b).key for a, b in (left, right)]
    assert all(re.fullmatch(r"[a-z0-9._=@%+,~-]{1,160}", key) for key in keys)
    assert keys[0].lower() == keys[0]
    assert (keys[0] == keys[1]) == (exactly(left) == exactly(right))


def test_long_keys_are_cut_and_still_differ():
    cells = [Point(variant="x" * 300 + end) for end in "ab"]
    assert cells[0].key != cells[1].key
    assert {len(cell.key) for cell in cells} == {160}


def test_a_field_that_is_added_or_moved_changes_no_key():
    fields = [("seed", int, 0), ("variant", str, "x"), ("gate", bool, False)]
    before = dataclasses.make_dataclass("Before", fields, bases=(Cell,), frozen=True, kw_only=True)
    more = [fields[2], ("added", float, 0.5), *fields[:2]]
    after = dataclasses.make_dataclass("After", more, bases=(Cell,), frozen=True, kw_only=True)
    assert before(seed=1, variant="y").key == after(seed=1, variant="y").key == "seed=1,variant=y"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"variant": 3}, "variant is a str, not 3"),
        ({"variant": "x", "seed": True}, "seed is a int, not True"),
        ({"variant": "x", "seed": 1.0}, "seed is a int, not 1.0"),
        ({"variant": "x", "lr": float("nan")}, "NaN"),
        ({"variant": "x", "layers": ((1,),)}, "tuple in a tuple"),
        ({"variant": "x", "layers": {1}}, "cells hold bool"),
    ],
)
def test_what_a_cell_cannot_hold_is_refused(values, message):
    with pytest.raises(DriftlabError, match=message):
        Point(**values)


def test_cells_of_two_kinds_with_one_key_and_no_cells_are_refused(tmp_path):
    @dataclass(frozen=True, kw_only=True)
    class Other(Cell):
        variant: str

    with pytest.raises(DriftlabError, match="two kinds, Point and Other"):
        ablate([Point(variant="x"), Other(variant="x")], draw, out=tmp_path)
    with pytest.raises(DriftlabError, match="no cells"):
        ablate([], draw, out=tmp_path)
    with pytest.raises(DriftlabError, match="is no cell"):
        distinct(["x"])


# ---------------------------------------------------------------------------------------------- tables


def test_a_cell_writes_its_table_and_provenance_and_is_then_found(tmp_path):
    marks = tmp_path / "marks"
    marks.mkdir()
    run = partial(draw, marks=marks)
    report = ablate([*POINTS, POINTS[0]], run, out=tmp_path / "out", settings={"prompts": 3, "where": "/a/b/file"})
    assert [state.status for state in report.states] == ["done"] * 4
    assert ran(marks) == sorted(cell.key for cell in POINTS)
    rows = read_rows(tmp_path / "out" / "seed=1,variant=two.parquet")
    assert rows["drafter"].unique().tolist() == ["seed=1,variant=two"]
    pd.testing.assert_series_equal(rows["value"], draw(POINTS[3])["value"])
    told = json.loads((tmp_path / "out" / "seed=1,variant=two.run.json").read_text())
    assert told["settings"] == {
        "key": "seed=1,variant=two",
        "cell": {"variant": "two", "seed": 1, "lr": 1e-3, "gate": False, "layers": []},
        "settings": {"prompts": 3, "where": "file"},
    }
    assert {"argv", "git", "versions", "time", "seconds", "attempts", "executor", "resources"} <= set(told)
    assert set(told["git"]) == {"commit", "dirty"}
    assert told["seconds"] > 0
    before = tables(tmp_path / "out")
    more = [*POINTS, Point(variant="three")]
    again = ablate(more, run, out=tmp_path / "out", settings={"prompts": 3, "where": "/other/file"})
    assert [state.status for state in again.states] == ["found"] * 4 + ["done"]
    assert len(ran(marks)) == 5
    assert before.items() < tables(tmp_path / "out").items()
    rows = again.rows()
    assert rows.groupby("cell")["cell_seed"].unique().explode().to_dict() == {c.key: c.seed for c in more}
    assert len(rows) == 15
    assert len(read_cells(tmp_path / "out", POINTS[:1])) == 3
    with pytest.raises(DriftlabError, match="not finished"):
        read_cells(tmp_path / "out", [Point(variant="four")])


def test_csv_holds_the_same_numbers(tmp_path):
    ablate(POINTS, draw, out=tmp_path / "p")
    ablate(POINTS, draw, out=tmp_path / "c", suffix=".csv")
    pd.testing.assert_frame_equal(read_cells(tmp_path / "p"), read_cells(tmp_path / "c"))


def test_a_table_made_with_another_default_or_other_settings_is_not_taken_for_this_one(tmp_path):
    ablate(POINTS, draw, out=tmp_path, settings={"prompts": 3})
    with pytest.raises(DriftlabError, match="settings' prompts 3, and now it is 4"):
        ablate(POINTS, draw, out=tmp_path, settings={"prompts": 4})
    with pytest.raises(DriftlabError, match="settings' prompts 3, and now it is None"):
        ablate(POINTS, draw, out=tmp_path)
    fields = [("variant", str), ("lr", float, 0.5), ("more", int, 1)]
    changed = dataclasses.make_dataclass("Point", fields, bases=(Cell,), frozen=True, kw_only=True)
    with pytest.raises(DriftlabError, match=r"made with lr 0\.001, and now it is 0\.5"):
        ablate([changed(variant="one")], draw, out=tmp_path, settings={"prompts": 3})


@pytest.mark.parametrize("text", ["{}", "[1]", '{"settings": 3}', '{"settings": {"cell": []}}'])
def test_a_provenance_that_does_not_say_how_a_cell_was_made_is_named(tmp_path, text):
    ablate(POINTS[:1], draw, out=tmp_path)
    (path,) = tmp_path.glob("*.run.json")
    path.write_text(text)
    for again in (lambda: ablate(POINTS[:1], draw, out=tmp_path), lambda: read_cells(tmp_path)):
        with pytest.raises(DriftlabError, match=f"{path.name} does not say how its cell was made"):
            again()


def test_a_failing_cell_is_told_and_the_others_go_on(tmp_path):
    told = []
    report = ablate(POINTS, partial(draw, bad="seed=1,variant=one"), out=tmp_path, progress=told.append)
    assert [state.status for state in report.states] == ["done", "failed", "done", "done"]
    assert report.status == 1
    assert [state.reason for state in report.failed] == ["ValueError: one is bad"]
    assert "failed  seed=1,variant=one  ValueError: one is bad" in report.words.splitlines()[-2]
    assert report.words.splitlines()[-1].endswith("3 done, 1 failed")
    assert "in draw" in (tmp_path / "seed=1,variant=one.error.txt").read_text()
    assert told[-1].finished == 3
    assert told[-1].failed == (("seed=1,variant=one", "ValueError: one is bad"),)
    assert told[-1].seconds_left == 0
    assert told[0].seconds_left is None
    assert told[0].running == ("variant=one",)
    with pytest.raises(DriftlabError, match="not finished"):
        report.rows()
    dry = ablate(POINTS, draw, out=tmp_path, dry_run=True)
    assert [state.status for state in dry.states] == ["found", "waiting", "found", "found"]
    assert dry.states[1].reason == "failed before: ValueError: one is bad"
    assert ablate(POINTS, draw, out=tmp_path).status == 0
    assert not (tmp_path / "seed=1,variant=one.error.txt").exists()


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (None, "returned a NoneType"),
        (pd.DataFrame(), "no rows"),
        (pd.DataFrame({"quantity": ["x"]}), "'value'"),
        (pd.DataFrame({"quantity": ["x"], "value": [1.0], "mine": [2]}), "unknown column.*mine"),
    ],
)
def test_what_is_no_table_of_rows_fails_the_cell(tmp_path, returned, reason):
    report = ablate(POINTS[:1], lambda cell: returned, out=tmp_path)
    assert re.search(reason, report.failed[0].reason)
    assert not tables(tmp_path)


def test_a_dry_run_writes_nothing(tmp_path):
    report = ablate(POINTS, lambda cell: pytest.fail("run"), out=tmp_path / "out", dry_run=True)
    assert [state.status for state in report.states] == ["waiting"] * 4
    assert not (tmp_path / "out").exists()


def test_cells_compute_with_their_own_threads_and_the_caller_keeps_its(tmp_path):
    @dataclass(frozen=True, kw_only=True)
    class Wide(Cell):
        cpus: int

        @property
        def resources(self):
            return Resources(cpus=float(self.cpus))

    before = torch.get_num_threads()
    cells = [Wide(cpus=3), Wide(cpus=2)]
    report = ablate(
        cells, lambda c: pd.DataFrame({"quantity": ["t"], "value": [torch.get_num_threads()]}), out=tmp_path
    )
    assert report.rows().set_index("cell_cpus")["value"].to_dict() == {3: 3.0, 2: 2.0}
    assert torch.get_num_threads() == before


# ---------------------------------------------------------------------------------------------- processes


def dies_once(cell: Point, marks: Path) -> pd.DataFrame:
    mark(marks, cell)
    if cell.key == "variant=one" and len(list(marks.glob("variant=one.*"))) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if cell.variant == "two" and cell.seed == 1:
        os._exit(7)
    return draw(cell)


def test_processes_give_the_same_bits_and_a_lost_one_is_made_good(tmp_path):
    marks = tmp_path / "marks"
    marks.mkdir()
    report = ablate(POINTS, partial(dies_once, marks=marks), out=tmp_path / "many", executor=Processes(cores=2))
    assert [state.status for state in report.states] == ["done", "done", "done", "failed"]
    assert "lost 2 times (it ended with status 7" in report.states[3].reason
    told = json.loads((tmp_path / "many" / "variant=one.run.json").read_text())
    assert told["attempts"] == 2
    keys = [cell.key for cell in POINTS]
    assert ran(marks) == sorted([*keys, keys[0], keys[3]])
    ablate(POINTS[:3], draw, out=tmp_path / "one", executor=InProcess())
    assert tables(tmp_path / "many") == tables(tmp_path / "one")


def test_run_that_cannot_be_sent_is_refused(tmp_path):
    with pytest.raises(DriftlabError, match="top level of a module"):
        ablate(POINTS, lambda cell: None, out=tmp_path, executor=Processes(cores=1))


def test_cells_that_cannot_be_sent_are_refused(tmp_path):
    @dataclass(frozen=True, kw_only=True)
    class Local(Cell):
        seed: int

    with pytest.raises(DriftlabError, match="seed=1 cannot be sent.*top level of a module"):
        ablate([Local(seed=1)], draw, out=tmp_path, executor=Processes(cores=1))


# ---------------------------------------------------------------------------------------------- killed

SCRIPT = """
import os, sys, time
from dataclasses import dataclass
import pandas as pd
import torch
from driftlab import VARIANTS, Drafter, TrainConfig, Trajectory, all_starts, train
from driftlab.ablation import Cell, InProcess, Processes, ablate
from driftlab.measure import replay_rows

@dataclass(frozen=True, kw_only=True)
class Tiny(Cell):
    variant: str
    seed: int

CELLS = [Tiny(variant=v, seed=s) for s in (0, 1) for v in ("eagle3", "eagle31")]
RECORDING, OUT = os.environ["RECORDING"], os.environ["OUT"]

def run(cell):
    name = f"{OUT}/marks/{cell.key}.{os.getpid()}.{time.time_ns()}"
    open(name + ".ran", "w").close()
    data = Trajectory.open(RECORDING)
    drafter = Drafter(VARIANTS[cell.variant].for_target(data), data, seed=cell.seed)
    config = TrainConfig(ttt=2, lr=6e-3, batch_size=2, epochs=4, save_every=2, seed=cell.seed)
    train(drafter, data, config, out=f"{OUT}/trained-{cell.key}")
    rows, _ = replay_rows(drafter.eval(), data, cell.key, depth=4)
    time.sleep(0.3)
    open(name + ".ended", "w").close()
    return rows
"""
RUN = """
if __name__ == "__main__":
    executor = Processes(cores=2) if sys.argv[1:] == ["processes"] else InProcess()
    sys.exit(ablate(CELLS, run, out=OUT + "/cells", executor=executor).status)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("script") / "tiny_cells.py"
    path.write_text(SCRIPT + RUN)
    return path


def start(script: Path, recording: Path, out: Path, *arguments: str) -> subprocess.Popen:
    (out / "marks").mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "RECORDING": str(recording), "OUT": str(out), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, str(script), *arguments],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen) -> None:
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err


@pytest.fixture(scope="module")
def undisturbed(script, varied_trajectory, tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed")
    finish(start(script, varied_trajectory.path, out))
    assert len(tables(out / "cells")) == 4
    return out


@pytest.mark.parametrize("executor", ["here", "processes"])
def test_killed_at_random_moments_it_ends_with_the_same_bits(
    script, undisturbed, varied_trajectory, tmp_path, executor
):
    """kill -9, a random while after a cell has begun; workers must not go on without their parent."""
    moments = random.Random(executor)
    for kill in range(2 if executor == "here" else 1):
        process = start(script, varied_trajectory.path, tmp_path, executor)
        before, deadline = len(ran(tmp_path / "marks")), time.monotonic() + 120
        while len(ran(tmp_path / "marks")) == before and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 1.0))
        process.kill()
        process.communicate(timeout=60)
        for path in (tmp_path / "cells").glob("*.parquet"):  # what is there is whole, and has its provenance
            assert path.read_bytes() == (undisturbed / "cells" / path.name).read_bytes(), kill
            assert path.with_name(f"{path.stem}.run.json").is_file()
    finish(start(script, varied_trajectory.path, tmp_path, executor))
    assert tables(tmp_path / "cells") == tables(undisturbed / "cells")
    assert not list((tmp_path / "cells").glob(".*.tmp"))
    begun, ended = len(ran(tmp_path / "marks")), len(list((tmp_path / "marks").glob("*.ended")))
    assert 4 <= ended <= begun <= 4 + 2 * 2


def test_what_a_killed_writer_left_is_swept_and_only_that(tmp_path):
    for name in (".variant=one.parquet.abc_1.tmp", ".variant=one.run.json.x.tmp", ".variant=one.5.parquet.x.tmp"):
        (tmp_path / name).touch()
    ablate(POINTS[:1], draw, out=tmp_path)
    assert [path.name for path in tmp_path.glob(".*.tmp")] == [".variant=one.5.parquet.x.tmp"]


@pytest.mark.parametrize("at", [".run.json", ".parquet"])
def test_killed_between_provenance_and_table_a_cell_is_not_there(tmp_path, monkeypatch, at):
    """What is renamed into place last is the table."""
    replace = os.replace

    def stop(source, target):
        if str(target).endswith(at):
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr("driftlab.files.os.replace", stop)
    with pytest.raises(KeyboardInterrupt):
        ablate(POINTS[:1], draw, out=tmp_path)
    monkeypatch.undo()
    assert not tables(tmp_path)
    assert ablate(POINTS[:1], draw, out=tmp_path).states[0].status == "done"


# ---------------------------------------------------------------------------------------------- two runners


def test_two_runners_on_one_folder_share_the_cells(script, undisturbed, varied_trajectory, tmp_path):
    both = [start(script, varied_trajectory.path, tmp_path) for _ in range(2)]
    for process in both:
        finish(process)
    assert ran(tmp_path / "marks") == sorted(path.stem for path in (undisturbed / "cells").glob("*.parquet"))
    assert tables(tmp_path / "cells") == tables(undisturbed / "cells")


def test_a_cell_that_another_process_makes_is_waited_for_and_made_if_that_one_dies(tmp_path, monkeypatch):
    monkeypatch.setattr("driftlab.ablation.engine._POLL", 0.05)
    store = stores.Store(tmp_path, ".parquet", {}, {})
    lock = store.claim(POINTS[0])
    assert lock is not None
    dry = ablate(POINTS[:2], draw, out=tmp_path, dry_run=True)
    assert [state.status for state in dry.states] == ["running", "waiting"]
    told = []

    def progress(snapshot):
        told.append(snapshot.what)
        if snapshot.what.startswith("done    seed=1"):
            lock.release()

    report = ablate(POINTS[:2], draw, out=tmp_path, progress=progress)
    assert [state.status for state in report.states] == ["done", "done"]
    assert told[-2:] == ["started variant=one", told[-1]]


# ---------------------------------------------------------------------------------------------- command line


def test_command_line(tmp_path):
    file = tmp_path / "my_cells.py"
    file.write_text(
        textwrap.dedent(
            """
            from dataclasses import dataclass
            import pandas as pd
            from driftlab.ablation import Cell

            @dataclass(frozen=True, kw_only=True)
            class Mine(Cell):
                width: int

            CELLS = [Mine(width=width) for width in (1, 2, 3)]
            SETTINGS = {"size": 5}

            def run(cell):
                if cell.width == 3:
                    raise RuntimeError("too wide")
                return pd.DataFrame({"quantity": ["double"], "value": [cell.width * 2]})
            """
        )
    )

    def driftlab(*arguments):
        command = [sys.executable, "-m", "driftlab", "ablate", str(file), "--out", str(tmp_path / "out"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    listed = driftlab("--dry-run")
    assert listed.returncode == 0
    assert listed.stdout.splitlines()[:-1] == [f"waiting width={width}" for width in (1, 2, 3)]
    assert not (tmp_path / "out").exists()
    made = driftlab("--executor", "processes", "--cores", "1")
    assert made.returncode == 1
    assert made.stdout.splitlines()[-2] == "failed  width=3  RuntimeError: too wide"
    assert "(2 of 3 done, 0 running, 1 failed" in made.stderr
    rows = read_cells(tmp_path / "out")
    assert rows.set_index("cell_width")["value"].to_dict() == {1: 2.0, 2: 4.0}
    found = driftlab("--only", "width=2")
    assert found.returncode == 0
    assert found.stdout.splitlines()[0] == "found   width=2"
    refused = driftlab("--cores", "2")
    assert refused.returncode == 2
    assert "--cores is of --executor processes" in refused.stderr


# ---------------------------------------------------------------------------------------------- the study's cells


@pytest.fixture(scope="module")
def study():
    path = Path(__file__).parents[1] / "experiments" / "ablate.py"
    spec = importlib.util.spec_from_file_location("study_cells", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["study_cells"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["study_cells"]


def test_trainings_are_named_by_what_weights_depend_on(study):
    cell = study.Drafted(variant="eagle3", seed=1)
    assert cell.training == "eagle3-ttt4-seed1"
    assert dataclasses.replace(cell, gate=True, ttt=8).training == "eagle3-gate-ttt8-seed1"
    measured = {"depth", "match_depth", "intervention", "perturbation", "window", "sinks"}
    other = {
        "variant": "eagle31",
        "seed": 2,
        "ttt": 2,
        "loss": "kl",
        "aux_layers": (1,),
        "conversations": 9,
        "steps": 5,
    }
    other |= {"lr": 0.1, "gate": True, "qk_norm": True, "norm_before_fc": True, "depth": 3, "match_depth": 3}
    other |= {"intervention": "held", "perturbation": "none", "window": 9, "sinks": 1}
    assert set(other) == {field.name for field in dataclasses.fields(cell)}
    for name, value in other.items():
        changed = dataclasses.replace(cell, **{name: value}).training != cell.training
        assert changed == (name not in measured), name


def test_grids_are_what_they_say(study):
    grids = {name: {cell.key for cell in cells} for name, cells in study.GRIDS.items()}
    assert {name: len(keys) for name, keys in grids.items()} == {
        name: len(cells) for name, cells in study.GRIDS.items()
    }
    assert (len(grids["two_by_two"]), len(grids["gate"]), len(grids["ttt"])) == (12, 12, 6)
    assert len(grids["two_by_two"] & grids["gate"]) == 6
    assert all(study.parse_intervention(cell.intervention) for cell in study.GRIDS["lab"] if cell.intervention)


def test_the_study_measures_two_texts_and_trains_once_for_two_measurements(
    study, varied_trajectory, tiny_trajectory, tmp_path, monkeypatch
):
    trained = []

    def count(*arguments, **named):
        trained.append(named["out"].name)
        return train(*arguments, **named)

    train = study.train
    monkeypatch.setattr(study, "train", count)
    setup = study.Setup(
        text=varied_trajectory.path, trainings=tmp_path / "trained", recording=varied_trajectory.path, draft_vocab=61
    )
    small = {"variant": "eagle31", "seed": 0, "ttt": 2, "steps": 3, "depth": 3, "match_depth": 5}
    cells = [study.Drafted(**small), study.Drafted(**small, intervention="sink:drop")]
    report = ablate(cells, partial(study.run, setup=setup), out=tmp_path / "out", settings=setup.told)
    assert report.status == 0, report.words
    assert trained == ["eagle31-steps3-ttt2-seed0"]
    rows = report.rows()
    assert set(rows["intervention"]) == {"", "sink:drop"}
    assert rows.groupby("intervention")["cell_intervention"].unique().explode().to_dict() == {
        "": "",
        "sink:drop": "sink:drop",
    }
    tau = rows[rows["quantity"] == "tau"]
    assert sorted(tau["category"]) == ["held-out", "held-out", "prompts", "prompts"]
    assert {"recent", "entropy", "mass_sink", "rms_feedback", "match", "accept_conditional"} <= set(rows["quantity"])
    assert rows.loc[rows["quantity"] == "match", "depth"].max() == 5
    dropped = rows[(rows["quantity"] == "mass_sink") & (rows["intervention"] != "")]
    assert dropped["value"].isna().all()  # no start sees the sink
    assert (dropped["n"] == 0).all()
    wrong = dataclasses.replace(cells[0], steps=4)
    (tmp_path / "trained" / cells[0].training).rename(tmp_path / "trained" / wrong.training)
    failed = ablate([wrong], partial(study.run, setup=setup), out=tmp_path / "out", settings=setup.told)
    assert "holds another drafter (steps 4, not 5)" in failed.failed[0].reason


# ---------------------------------------------------------------------------------------------- Ray

CLUSTER = """
import sys, threading, time
from dataclasses import dataclass
from pathlib import Path
import pandas as pd
import ray
from ray.cluster_utils import Cluster
from driftlab.ablation import Cell, Ray, Resources, ablate

@dataclass(frozen=True, kw_only=True)
class Point(Cell):
    seed: int
    gpus: float = 0.0

    @property
    def resources(self):
        return Resources(gpus=self.gpus)

MARKS = Path(sys.argv[1]) / "marks"

def run(cell):
    node = ray.get_runtime_context().get_node_id()
    (MARKS / f"{cell.key}.{node}.began").touch()
    if node == (MARKS / "second").read_text():
        time.sleep(600)  # until it is killed
    if cell.seed == 6:
        raise ValueError("six is bad")
    time.sleep(1.0)
    (MARKS / f"{cell.key}.{node}.ended").touch()
    return pd.DataFrame({"quantity": ["double"], "value": [cell.seed * 2.0]})

def two_nodes():
    # on a busy machine a node of Ray gives up after 15 seconds if its agent has not begun by then
    for left in reversed(range(6)):
        try:
            cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
            return cluster, cluster.add_node(num_cpus=1)
        except Exception as error:
            if not left or "timed out during startup" not in str(error):
                raise

if __name__ == "__main__":
    MARKS.mkdir(parents=True)
    cluster, second = two_nodes()
    ray.init(address=cluster.address, log_to_driver=False)
    (MARKS / "second").write_text(second.node_id)

    def kill():
        while not list(MARKS.glob(f"*.{second.node_id}.began")):
            time.sleep(0.05)
        cluster.remove_node(second, allow_graceful=False)

    watcher = threading.Thread(target=kill)
    watcher.start()
    cells = [Point(seed=seed) for seed in range(7)] + [Point(seed=7, gpus=1.0)]
    report = ablate(cells, run, out=Path(sys.argv[1]) / "cells", executor=Ray())
    watcher.join()
    print(report.words)
    print("KILLED", second.node_id)
    print("HEAD", cluster.head_node.node_id)
    sys.stdout.flush()
    ray.shutdown()
    cluster.shutdown()
"""


@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is an extra of 240 MB: pip install driftlab[ray]"
)
def test_a_ray_cluster_of_two_nodes_loses_one_and_all_cells_are_done_none_twice(tmp_path):
    script = tmp_path / "on_ray.py"
    script.write_text(CLUSTER)
    environment = {
        **os.environ,
        **{"RAY_raylet_start_wait_time_s": "30", "RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"},
        **{"RAY_DEDUP_LOGS": "0", "OMP_NUM_THREADS": "1"},
    }
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=500,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    words = dict(line.partition(" ")[::2] for line in done.stdout.splitlines() if line.startswith(("KILLED", "HEAD")))
    assert "failed  seed=6  ValueError: six is bad" in done.stdout
    assert "failed  gpus=1.0,seed=7  no machine of the cluster has 1 CPUs, 1 GPUs" in done.stdout
    rows = read_cells(tmp_path / "out" / "cells")
    assert rows.set_index("cell_seed")["value"].to_dict() == {seed: seed * 2.0 for seed in range(6)}
    ended = sorted(path.name.partition(".")[0] for path in (tmp_path / "out" / "marks").glob("*.ended"))
    assert ended == [f"seed={seed}" for seed in range(6)]
    began = [path.name.split(".")[:2] for path in (tmp_path / "out" / "marks").glob("*.began")]
    assert words["KILLED"] != words["HEAD"]
    (lost,) = {key for key, node in began if node == words["KILLED"]}
    assert [lost, words["HEAD"]] in began
    told = json.loads((tmp_path / "out" / "cells" / f"{lost}.run.json").read_text())
    assert told["attempts"] == 2
    assert told["executor"] == "Ray"
