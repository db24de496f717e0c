"""The figures: what is drawn is what the tables say, tables are what a run says, and bytes do not depend on the day."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex

from driftlab.errors import DriftlabError
from driftlab.plotting import FEW, HUES
from driftlab.results import as_rows, combine, write_rows
from paper_figs import __main__ as program
from paper_figs import fig_doctor, fig_estimator_bias, fig_survivors, style, tables
from paper_figs.attention_map import group

ALPHAS = (0.1, 0.25, 0.5, 1.0, 2.0)


# ---- reading figures back


def lines(ax):
    """Label -> (x, y) of every labelled line."""
    return {
        line.get_label(): (np.asarray(line.get_xdata(), float), np.asarray(line.get_ydata(), float))
        for line in ax.lines
        if not line.get_label().startswith("_child")
    }


def corners(ax, label):
    """The vertices of a band."""
    band = next(one for one in ax.collections if one.get_label() == label)
    return {(round(x, 9), round(y, 9)) for x, y in band.get_paths()[0].vertices}


def holds_line(ax, label, rows, *, x="depth", y="value", low="low", high="high", band=True):
    """Check one line, and its band, against rows of a table."""
    rows = rows.sort_values(x)
    drawn_x, drawn_y = lines(ax)[label]
    np.testing.assert_allclose(drawn_x, rows[x])
    np.testing.assert_allclose(drawn_y, rows[y])
    if band:
        whole = rows.dropna(subset=[low, high])
        wanted = {
            (round(float(a), 9), round(float(b), 9))
            for end in (low, high)
            for a, b in zip(whole[x], whole[end], strict=True)
        }
        assert wanted
        assert wanted <= corners(ax, f"_{label}")


def holds_dots(ax, rows, by, *, y="value", low=None, high=None):
    """Check every point and interval of a panel of dots, and that each stands on the line of its name."""
    names = [text.get_text() for text in ax.get_yticklabels()]
    order = list(dict.fromkeys(rows[by]))
    assert names == order or names == [""] * len(order)
    for drafter, mine in rows.groupby("drafter", sort=False):
        values, places = lines(ax)[style.short(drafter)]
        np.testing.assert_allclose(values, mine[y])
        assert [order[round(place)] for place in places] == mine[by].tolist()
        if low:
            ends = next(one for one in ax.collections if one.get_label() == f"_{style.short(drafter)}")
            drawn = np.array([segment[:, 0] for segment in ends.get_segments() if len(segment)])
            np.testing.assert_allclose(drawn, mine.dropna(subset=[low])[[low, high]])


def of(frame, **where):
    for name, value in where.items():
        frame = frame[frame[name] == value]
    return frame


def drawn(name, data):
    figure = program.render(name, data)
    return figure, figure.axes, {table: style.read(data, table).frame for table in program.script(name).TABLES}


# ---- what each figure must hold


def check_eagle31(axes, read):
    texts = {text.get_gid(): text.get_text() for text in axes[0].texts if text.get_gid()}
    wanted = {}
    for row in read["eagle31_switches"].itertuples():
        wanted |= {f"eagle3:{row.stage}": row.eagle3, f"eagle31:{row.stage}": row.eagle31}
        if isinstance(row.switch, str):
            wanted[f"switch:{row.stage}"] = row.switch
            assert row.eagle3 != row.eagle31
    assert texts == wanted
    assert {texts[key] for key in texts if key.startswith("switch:")} == {"fc_norm", "norm_output"}


def check_throughput(axes, read):
    frame = read["throughput"]
    for (drafter, kind), rows in frame.groupby(["drafter", "kind"]):
        holds_line(axes[0], f"{drafter}, {kind}", rows, x="concurrency", band=False)
    for kind, rows in frame.groupby("kind"):
        users = sorted(rows["concurrency"].unique())
        at = rows.set_index(["drafter", "concurrency"])["value"]
        x, y = lines(axes[1])[f"EAGLE 3.1, {kind}"]
        np.testing.assert_allclose(x, users)
        np.testing.assert_allclose(y, [at["EAGLE 3.1", n] / at["none", n] for n in users])


def check_attention_map(axes, read):
    frame = read["attention_map"]
    for ax, (drafter, mine) in zip(axes, frame.groupby("drafter", sort=False), strict=False):
        image = np.ma.filled(ax.images[0].get_array().astype(float), np.nan)
        assert image.shape == (mine["depth"].max(), mine["place"].max() + 1)
        for row in mine.itertuples():
            if row.kind == "rest":
                assert np.isnan(image[row.depth - 1, row.place])
                if row.depth in (1, mine["depth"].max()):
                    assert f"{row.mass:.2f} at" in ax.get_title(loc="left")
            else:
                assert image[row.depth - 1, row.place] == pytest.approx(row.mass)
        assert np.isfinite(image).sum() == (mine["kind"] != "rest").sum()
        assert ax.get_title(loc="left").startswith(drafter)


def check_drift_curves(axes, read):
    frame = read["demo_curves"]
    panels = ("mass_sink", "mass_prompt", "mass_context", "mass_self", "recent", "entropy_relative")
    for ax, quantity in zip(axes, panels, strict=True):
        mine = of(frame, quantity=quantity)
        assert len(mine)
        for drafter, rows in mine.groupby("drafter"):
            holds_line(ax, style.short(drafter), rows)
    for drafter, rows in of(frame, quantity="mass_self_null").groupby("drafter"):
        holds_line(axes[3], f"_null {style.short(drafter)}", rows, band=False)


def check_magnitude(axes, read):
    targets, drafters, ours = axes
    for target, rows in read["published_magnitude"].groupby("target"):
        first = of(rows, depth=1)["rms"].item()
        holds_line(targets, target, rows.assign(grown=rows["rms"] / first), y="grown", band=False)
    table2 = of(read["published"], claim="magnitude")
    table2 = table2[table2["source"].str.contains("Llama")]
    for drafter, rows in table2.groupby("drafter"):
        holds_line(drafters, drafter, rows.assign(value=rows["value"] / of(rows, depth=1)["value"].item()), band=False)
    assert len(lines(drafters)) == 4
    for drafter, rows in of(read["demo_curves"], quantity="rms_feedback").groupby("drafter"):
        holds_line(ours, style.short(drafter), rows)


def check_depth(axes, read):
    for drafter, rows in of(read["published"], claim="depth").groupby("drafter"):
        holds_line(axes[0], drafter, rows, band=False)
    match = of(read["demo_curves"], quantity="match")
    for ax, ttt in zip(axes[1:], sorted(match["ttt"].unique(), reverse=True), strict=True):
        for drafter, rows in of(match, ttt=ttt).groupby("drafter"):
            holds_line(ax, style.short(drafter), rows)
        if ttt <= match["depth"].max():
            np.testing.assert_array_equal(lines(ax)[f"_trained {ttt}"][0], [ttt, ttt])
        assert (f"_trained {ttt}" in lines(ax)) == (ttt <= match["depth"].max())


def check_noise(axes, read):
    theirs = of(read["published"], claim="noise")
    for place, path in enumerate(("hidden", "embedding")):
        left, right = axes[2 * place : 2 * place + 2]
        for drafter, rows in theirs[theirs["setting"].str.contains(path)].groupby("drafter"):
            holds_line(left, drafter, rows.assign(alpha=ALPHAS), x="alpha", band=False)
        for drafter, rows in of(read["noise"], path=path).groupby("drafter"):
            holds_line(
                right, style.short(drafter), rows, x="alpha", y="percent", low="percent_low", high="percent_high"
            )


def check_templates(axes, read):
    holds_dots(axes[0], of(read["published"], claim="template"), "setting")
    holds_dots(axes[1], read["template"], "input", y="tau", low="low", high="high")


def check_windows(axes, read):
    holds_dots(axes[0], of(read["published"], claim="window"), "setting")
    holds_dots(axes[1], read["window"], "setting", y="tau", low="low", high="high")
    holds_dots(axes[2], read["window"], "setting", y="match_2_to_K", low="match_low", high="match_high")


def check_pin(axes, read):
    named = program.script("fig_pin").NAMES
    for ax, claims, more in (
        (axes[0], of(read["published"], claim="pin"), {}),
        (axes[1], read["pin"], {"y": "tau", "low": "low", "high": "high"}),
        (axes[2], read["pin"], {"y": "match_2_to_K", "low": "match_low", "high": "match_high"}),
    ):
        holds_dots(ax, claims.assign(setting=claims["setting"].map(named)), "setting", **more)


def check_mtp(axes, read):
    bars = [(bar.get_y(), bar.get_y() + bar.get_height()) for bar in axes[0].patches]
    frame = read["published_mtp"].sort_values("segment", ascending=False, kind="stable")
    np.testing.assert_allclose(bars, frame[["low", "high"]])


def check_estimator_bias(axes, read):
    frame = read["estimator_bias"]
    drafters = list(dict.fromkeys(frame["drafter"]))
    for ax, drafter in zip(axes, drafters, strict=False):
        for quantity, label in fig_estimator_bias.LABELS.items():
            rows = of(frame, drafter=drafter, quantity=quantity)
            percent = rows.assign(**{name: 100 * rows[name] for name in ("value", "low", "high")})
            holds_line(ax, label, percent, x="k")
    for drafter in drafters:
        holds_line(
            axes[len(drafters)],
            style.short(drafter),
            of(frame, drafter=drafter, quantity="first_draft_change"),
            x="k",
        )


def check_survivors(axes, read):
    frame = read["survivors"]
    for ax, drafter in zip(axes, dict.fromkeys(frame["drafter"]), strict=True):
        for quantity, (label, *_) in fig_survivors.LABELS.items():
            rows = of(frame, drafter=drafter, quantity=quantity)
            holds_line(ax, label, rows[rows["n"] >= FEW])


def check_doctor(axes, read):
    frame, ax = read["doctor_confusion"], axes[0]
    rows = [tick.get_text() for tick in ax.get_yticklabels()]
    columns = [tick.get_text() for tick in ax.get_xticklabels()]
    numbers = {
        (round(text.get_position()[1]), round(text.get_position()[0])): int(text.get_text()) for text in ax.texts
    }
    words = fig_doctor.RESULTS
    for i, mistake in enumerate(rows):
        mine = of(frame, mistake=mistake)
        shades = ax.images[0].get_array()[i]
        for j, column in enumerate(columns):
            hits = sum(words[result] == column for result in mine["result"])
            assert numbers.get((i, j), 0) == hits
            assert shades[j] == pytest.approx(hits / len(mine))
    assert sum(numbers.values()) == len(frame)


def check_kernels(axes, read):
    frame = read["kernels"]
    for ax, column, unit in zip(axes, ("regs", "spills", "smem"), (1, 1, 1024), strict=True):
        np.testing.assert_allclose([bar.get_width() for bar in ax.patches], frame[column] / unit)
    assert [tick.get_text() for tick in axes[0].get_yticklabels()] == frame["kernel"].tolist()


def check_lab_depth(axes, read):
    frame = read["lab_depth"]
    for ax, quantity in zip(axes, ("growth", "drift_tv", "sink_loss", "recent_gain"), strict=True):
        for drafter, rows in of(frame, quantity=quantity).groupby("drafter"):
            holds_line(ax, style.short(drafter), rows)
    for drafter, rows in of(frame, quantity="drift_tv_null").groupby("drafter"):
        holds_line(axes[1], f"_null {style.short(drafter)}", rows, band=False)


def check_study(axes, read):
    frame, (state, depth, tau) = read["study"], axes
    four = of(frame, ttt=4)
    for drafter, rows in of(four, quantity="rms_feedback").groupby("drafter"):
        holds_line(state, drafter, rows.groupby("depth", as_index=False)["value"].mean(), band=False)
        np.testing.assert_allclose(np.sort(lines(state)[f"_{drafter}"][1]), np.sort(rows["value"]))
    for (drafter, ttt), rows in of(frame, quantity="match", seed=0).groupby(["drafter", "ttt"]):
        if drafter in ("eagle3", "eagle31"):
            holds_line(depth, f"{drafter}, TTT {ttt}", rows, band=False)
    names = [text.get_text() for text in tau.get_yticklabels()]
    for drafter, rows in of(four, quantity="tau").groupby("drafter"):
        values, places = lines(tau)[drafter]
        np.testing.assert_allclose(values, rows["value"])
        assert {names[round(place)] for place in places} == {drafter}
        ends = next(one for one in tau.collections if one.get_label() == f"_{drafter}")
        np.testing.assert_allclose([segment[:, 0] for segment in ends.get_segments()], rows[["low", "high"]])


def check(name, data):
    figure, axes, read = drawn(name, data)
    globals()[f"check_{name.removeprefix('fig_')}"](axes, read)
    return figure


# ---- committed tables


def test_a_figure_waits_only_while_its_table_is_not_there():
    for name in program.WAITING:
        assert not all((style.DATA / f"{table}.csv").exists() for table in program.script(name).TABLES)


@pytest.mark.parametrize("name", [name for name in program.names() if name not in program.WAITING])
def test_a_figure_holds_its_committed_tables(name):
    figure = check(name, style.DATA)
    assert figure.get_figwidth() == style.WIDTH
    words = figure._supxlabel.get_text()
    assert "interval" in words or name == "fig_eagle31", "a figure says what its intervals are over, or that none is"
    with style.theme():
        figure.draw_without_rendering()
    sizes = [text.get_fontsize() for ax in figure.axes for text in ax.findobj(lambda a: hasattr(a, "get_fontsize"))]
    assert min(sizes) >= 5.5


def test_copied_numbers_are_those_of_the_lab():
    theirs = pd.read_csv(tables.EXPERIMENTS / "data" / "paper_numbers.csv", skiprows=1)
    pd.testing.assert_frame_equal(style.read(style.DATA, "published").frame, theirs)


def test_the_announcements_speed_ups_are_the_points_drawn():
    figure = program.render("fig_throughput")
    assert np.round(lines(figure.axes[1])["EAGLE 3.1, published"][1], 2).tolist() == [2.03, 1.71, 1.66]


def test_the_committed_terms_add_up_to_conditional_acceptance():
    frame = style.read(style.DATA, "survivors").frame
    wide = frame.pivot(index=["drafter", "depth"], columns="quantity", values="value").dropna()
    assert len(wide) > 8
    terms = wide[["ability", "survivor_selection", "start_selection", "residual"]].sum(axis=1)
    np.testing.assert_allclose(wide["conditional_walk"], terms, atol=2e-6)


def test_figures_need_no_torch_and_leave_no_setting():
    code = (
        "import sys, matplotlib; before = dict(matplotlib.rcParams)\n"
        "from paper_figs.__main__ import render\n"
        "render('fig_throughput'); render('fig_mtp')\n"
        "assert 'torch' not in sys.modules and dict(matplotlib.rcParams) == before"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(program.__file__).parents[1])


def test_the_same_table_gives_the_same_bytes(tmp_path):
    for place in ("a", "b"):
        program.save(program.render("fig_mtp"), tmp_path / place, "fig_mtp")
    for kind in ("pdf", "png"):
        first, second = ((tmp_path / place / f"fig_mtp.{kind}").read_bytes() for place in ("a", "b"))
        assert first == second
    assert b"CreationDate" not in (tmp_path / "a" / "fig_mtp.pdf").read_bytes()


# ---- a run of one's own


def lab_run(folder, prompts=7):
    """Small tables in the lab's form: every number different, so that none can stand in another's place."""
    folder.mkdir(exist_ok=True)
    counter = iter(np.arange(0.01, 40, 0.0137))
    names = ("smollm2-eagle3", "smollm2-norm_output", "smollm2-eagle31")

    def value(prefix, mean, low, high):
        middle = next(counter)
        return {mean: middle, low: middle - 0.004, high: middle + 0.007} | ({"rounds": 50.0} if prefix else {})

    def tau():
        return value(True, "tau", "low", "high") | value(False, "match_2_to_K", "match_low", "match_high")

    pins = ("plain", "magnitude:fused", "pin:sink", "pin:equal")
    made = {
        "template": [{"drafter": d, "input": i, **tau()} for i in ("chat", "none", "bos=on") for d in names],
        "window": [{"drafter": d, "setting": s, **tau()} for d in names for s in ("full", "window")],
        "pin": [{"drafter": d, "setting": s, **tau(), "sink": 3.0, "sink_mass": 0.2} for d in names for s in pins],
        "noise": [
            {"drafter": d, "path": p, "alpha": a, **tau(), **value(False, "percent", "percent_low", "percent_high")}
            for d in names for p in ("hidden", "embedding") for a in ALPHAS
        ],
        "depth": [
            {"layer": 0, "quantity": q, "drafter": d, "depth": float(k), "n": 9.0, **value(False, "value", "low", "high")}
            for d in names for q in ("growth", "drift_tv", "drift_tv_null", "sink_loss", "recent_gain") for k in (1, 2, 3)
        ] + [{"quantity": "verdict: undecided (sink)", "drafter": names[0]}],
    }  # fmt: skip
    made["template"][3]["tau"] = made["template"][3]["low"] = made["template"][3]["high"] = np.nan  # no round
    settings = {
        "prompts": prompts,
        "answer_tokens": 24,
        "depth": 8,
        "context": 900,
        "context_prompts": 3,
        "window": 128,
    }
    for name, records in made.items():
        pd.DataFrame(records).to_csv(folder / f"{name}.csv", index=False)
        said = {"settings": {key: str(number) for key, number in settings.items()}}
        (folder / f"{name}.run.json").write_text(json.dumps(said))
    return folder


def own_rows(folder, *, windows=(8,), quantities=("match",), intervention=""):
    """Rows of two drafters and two prompts."""
    frames = []
    for variant, ttt in (("eagle3", 4), ("eagle31", 2)):
        records = [
            {"prompt": p, "quantity": q, "depth": k, "window": w, "value": 0.5 / k + 0.01 * place, "n": 10 * (place + 1)}
            for place, p in enumerate("ab") for q in quantities for k in (1, 2, 3) for w in (windows if q == "recent" else (0,))
        ]  # fmt: skip
        settings = {"template": "chat", "feed": "text", "target": "T", "intervention": intervention, "depth_max": 3}
        frames.append(as_rows(records, variant=variant, drafter=f"my-{variant}", ttt=ttt, **settings))
    folder.mkdir(exist_ok=True)
    write_rows(
        folder / "rows.parquet", combine(frames, varying=("variant", "fc_norm", "norm_output", "drafter", "ttt"))
    )
    return folder


def test_the_study_is_pooled_over_prompts_and_holds_plain_trainings_alone(tmp_path):
    """Cells as the study leaves them: two trainings, one measured under an intervention as well."""
    from dataclasses import dataclass

    from driftlab.ablation import Cell, ablate

    @dataclass(frozen=True, kw_only=True)
    class Trained(Cell):
        variant: str
        seed: int
        intervention: str = ""
        gate: bool = False
        ttt: int = 4
        qk_norm: bool = False
        norm_before_fc: bool = False
        loss: str = "soft_ce"
        aux_layers: tuple[int, ...] = ()
        conversations: int = 0
        perturbation: str = "chat"
        window: int = 0
        steps: int = 600
        depth: int = 8

    def made(cell):
        shift = cell.seed + 10 * bool(cell.intervention)
        numbers = {"rms_feedback": 5.0, "mass_sink": 0.1, "recent": 0.2, "entropy": 1.0, "match": 0.4}
        records = [
            {"prompt": p, "category": "held-out", "quantity": q, "depth": k, "value": x * k + shift + place, "n": 1.0 + place}
            for q, x in numbers.items() for k in (1, 2) for place, p in enumerate("ab")
        ]  # fmt: skip
        records.append(
            {"category": "held-out", "quantity": "tau", "value": 1.5 + shift, "low": 1.0, "high": 2.0 + shift}
        )
        settings = {
            "template": "chat",
            "feed": "text",
            "target": "T",
            "depth_max": 8,
            "intervention": cell.intervention,
        }
        return as_rows(records, variant=cell.variant, drafter=cell.variant, **settings)

    cells = [Trained(variant="eagle3", seed=s) for s in (0, 1)]
    ablate([*cells, Trained(variant="eagle3", seed=0, intervention="sink:drop")], made, out=tmp_path / "cells")
    (tmp_path / "data").mkdir()
    table = tables.study(tmp_path / "cells")
    tables.write(table, tmp_path / "data" / "study.csv")
    assert len(table.frame) == 2 * (1 + 5 * 2)
    one = of(table.frame, quantity="rms_feedback", seed=1, depth=2)
    assert (one["value"].item(), one["n"].item()) == (pytest.approx((1 * 11 + 2 * 12) / 3), 3)
    assert of(table.frame, quantity="tau", seed=1)["high"].item() == 3
    figure = check("fig_study", tmp_path / "data")
    words = " ".join(figure._supxlabel.get_text().split())
    assert "600 training steps" in words
    assert words.endswith("n = 2")
    with pytest.raises(tables.Missing, match="no cells"):
        tables.study(tmp_path / "data")


LAB_FIGURES = ("fig_noise", "fig_templates", "fig_windows", "fig_pin", "fig_lab_depth")


def written(run, data):
    """Make a run's tables, as --from does, and say which could not be made."""
    data.mkdir()
    return program.tables_of(run, {*tables.FROM_RUN, "published", "published_magnitude"}, data)


def test_figures_of_a_lab_run_hold_its_numbers(tmp_path):
    run = lab_run(tmp_path / "run")
    why = written(run, tmp_path / "data")
    assert set(why) == {
        *("demo_curves", "estimator_bias", "survivors", "attention_map", "doctor_confusion", "kernels", "study")
    }
    for name in LAB_FIGURES:
        figure = check(name, tmp_path / "data")
        assert "7 prompts" in figure._supxlabel.get_text() or name == "fig_windows"
    assert "3 prompts of 900 tokens" in program.render("fig_windows", tmp_path / "data")._supxlabel.get_text()
    raw = pd.read_csv(run / "noise.csv")
    pd.testing.assert_frame_equal(style.read(tmp_path / "data", "noise").frame, raw, rtol=1e-5, check_dtype=False)
    assert (
        "none" in program.render("fig_templates", tmp_path / "data")._supxlabel.get_text().split("ends at once): ")[1]
    )


def test_rows_are_pooled_over_prompts_by_n_and_only_plain_ones_count(tmp_path):
    run = own_rows(tmp_path / "run", quantities=("match", "recent"), windows=(4, 8))
    frame = tables.demo_curves(run).frame
    one = of(frame, drafter="my-eagle3", quantity="match", depth=2)
    assert one["value"].item() == pytest.approx((10 * 0.25 + 20 * 0.26) / 30)
    assert (one["n"].item(), one["ttt"].item(), one["feed"].item()) == (30, 4, "text")
    assert len(of(frame, quantity="recent")) == 6, "one window"
    words = tables.demo_curves(run).words
    assert "the last 8 keys" in words
    assert "2 prompts" in words
    assert "TTT" not in words
    own_rows(tmp_path / "pinned", intervention="held")
    with pytest.raises(tables.Missing, match="no plain setting"):
        tables.demo_curves(tmp_path / "pinned")


def test_a_run_with_matches_alone_gives_the_depth_figure_and_words_for_the_others(tmp_path, capsys):
    before = {path: path.read_bytes() for path in style.DATA.iterdir()}
    run = own_rows(tmp_path / "run")
    assert program.main(["--from", str(run)]) == 0
    assert sorted(path.name for path in (run / "figures").iterdir()) == ["fig_depth.pdf", "fig_depth.png"]
    said = capsys.readouterr().out
    assert "fig_drift_curves: not drawn. demo_curves has no entropy_relative, mass_context" in said
    assert "fig_noise: not drawn." in said
    assert "no noise.csv with noise.run.json (of python experiments/lab.py)" in said
    assert "fig_mtp: drawn from published numbers alone" in said
    assert {path: path.read_bytes() for path in style.DATA.iterdir()} == before
    why = written(run, tmp_path / "data")
    assert "demo_curves" not in why
    check("fig_depth", tmp_path / "data")


def test_a_named_figure_that_cannot_be_drawn_is_an_error_in_words(tmp_path, capsys):
    run = own_rows(tmp_path / "run")
    assert program.main(["--from", str(run), "fig_pin", "--out", str(tmp_path / "out")]) == 1
    assert "no figure could be drawn" in capsys.readouterr().out
    assert program.main(["fig_unicorn"]) == 1
    assert "no figure 'fig_unicorn'; there are fig_" in capsys.readouterr().err
    assert program.main(["--from", str(tmp_path / "nowhere"), "fig_pin"]) == 1
    assert "is not a folder" in capsys.readouterr().err


def test_lab_tables_without_a_column_are_refused_by_name(tmp_path):
    run = lab_run(tmp_path / "run")
    pd.read_csv(run / "pin.csv").drop(columns="match_2_to_K").to_csv(run / "pin.csv", index=False)
    with pytest.raises(tables.Missing, match="lacks the column.s. match_2_to_K"):
        tables.pin(run)


def test_a_table_without_its_first_line_is_refused(tmp_path):
    (tmp_path / "noise.csv").write_text("drafter,path\na,b\n")
    with pytest.raises(DriftlabError, match="first line must say"):
        style.read(tmp_path, "noise")


# ---- the parts


def test_hue_is_norm_output_and_dash_is_fc_norm():
    looks = style.looks(["smollm2-eagle3", "fc_norm", "norm_output", "smollm2-eagle31-ttt2", "mine", "other"])
    assert [to_hex(looks[name]["color"]) for name in ("smollm2-eagle3", "norm_output")] == [to_hex(hue) for hue in HUES]
    assert looks["smollm2-eagle31-ttt2"]["color"] == HUES[1]
    assert looks["smollm2-eagle31-ttt2"]["linestyle"] != "-"
    assert looks["smollm2-eagle31-ttt2"]["markerfacecolor"] == "white"
    assert looks["fc_norm"]["color"] == HUES[0]
    assert "markerfacecolor" not in looks["fc_norm"]
    assert looks["mine"] != looks["other"]


def test_compile_reports_are_read_by_column():
    text = (
        "triton 9.9            sm        warps       stages         regs       spills         smem\n"
        "kernel one            90            4            3          115            7        81920\n"
        "kernel one            80            4            3                                  30720\n"
        "kernel two, half     100            8            2                                  70656\n"
    )
    version, frame = tables.compile_report(text)
    assert version == "triton 9.9"
    assert frame["kernel"].tolist() == ["kernel one", "kernel one", "kernel two, half"]
    assert frame["sm"].tolist() == [90, 80, 100]
    assert frame["smem"].tolist() == [81920, 30720, 70656]
    assert frame.loc[0, ["regs", "spills"]].tolist() == [115, 7]
    assert frame["regs"].isna().tolist() == [
        False,
        True,
        True,
    ]


def test_kernels_of_a_run(tmp_path):
    head = "triton 9.9            sm        warps       stages         regs       spills         smem\n"
    (tmp_path / "aot_x.txt").write_text(
        head + "k                     90            4            3          115            7        81920\n"
    )
    frame = tables.kernels(tmp_path).frame
    assert frame.to_dict("records") == [
        {"kernel": "k", "warps": 4, "stages": 3, "regs": 115, "spills": 7, "smem": 81920}
    ]


def test_what_came_of_a_case_of_the_doctor(tmp_path):
    cases = [
        ("d | aux_layers: [3]", "d", 1, False, "another", True, "exactly", "aux_layers", "exactly"),
        ("d | aux_layers: [4]", "d", 1, False, "another", False, "no", "aux_layers", "not named"),
        ("d | gain: 1 + w", "d", 1, False, "another", True, "in the class", "gain", "in the class"),
        ("d | gain: none", "d", 1, False, "too weak", False, "exactly", "gain", "too weak"),
        ("d | gain: x + aux_layers: y", "d", 2, False, "declared", False, "no", "two at once", "not named"),
        ("d | honest", "d", 0, True, "declared", True, "exactly", "honest", "kept"),
        ("e | honest", "e", 0, True, "another", False, "no", "honest", "doubted"),
        (
            "random eagle3 | honest",
            "random eagle3",
            0,
            True,
            "too weak",
            False,
            "exactly",
            "random weights",
            "too weak",
        ),
        ("f | honest", "f", 0, True, "error: it broke", False, float("nan"), "honest", "error"),
    ]
    names = ["case", "base", "factors", "honest", "outcome", "named", "how", "mistake", "result"]
    frame = pd.DataFrame(cases, columns=names).assign(doubted=lambda f: f["honest"] & (f["outcome"] == "another"))
    frame.drop(columns=["mistake", "result"]).to_csv(tmp_path / "confusion.csv", index=False)
    made = tables.doctor_confusion(tmp_path).frame.set_index("case")
    for case, *_, mistake, result in cases:
        assert made.loc[case, ["mistake", "result"]].tolist() == [mistake, result]
    written(tmp_path, tmp_path / "data")
    check("fig_doctor", tmp_path / "data")
    assert fig_doctor.counts(frame).index.tolist() == ["aux_layers", "gain", "two at once", "honest", "random weights"]


def test_keys_of_a_start_are_lined_up_and_keep_their_sum():
    from driftlab.heatmaps import Key, KeyMasses

    keys = [Key("sink", 0), *(Key("prompt", p) for p in range(1, 30)), *(Key("context", p) for p in range(30, 42))]
    keys += [Key("own", 42), Key("own", 43)]
    rng = np.random.default_rng(0)
    mass = rng.random((3, 2, 4, len(keys)))
    mass[0, ..., -2:], mass[1, ..., -1] = np.nan, np.nan
    found = group(KeyMasses("p", 41, "x", ("a", "b", "c"), tuple(keys), mass))
    mean = mass[:, -1].mean(1)
    np.testing.assert_allclose(found["first", 0], mean[:, 0])
    np.testing.assert_allclose(found["first", 23], mean[:, 23])
    np.testing.assert_allclose(found["context", 0], mean[:, 41])
    np.testing.assert_allclose(found["context", -7], mean[:, 34])
    np.testing.assert_allclose(found["rest", 0], mean[:, 24:34].sum(1))
    np.testing.assert_allclose(found["own", 2], mean[:, 42])
    np.testing.assert_allclose(found["own", 3], mean[:, 43])
    np.testing.assert_allclose(np.nansum(list(found.values()), axis=0), np.nansum(mean, 1))
