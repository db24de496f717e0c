"""What is plotted is what the rows say: line data, gaps, hollow points, intervals, and no state left behind."""

import math
import warnings

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from driftlab import intervals, plotting, results
from driftlab.errors import DriftlabError
from driftlab.results import as_rows

DEPTHS = (1, 2, 3, 4)


def rows_of(variant, quantity, values, *, drafter=None, n=20, **settings):
    """One row a depth for each prompt; ``values`` is {prompt: [value by depth]}."""
    records = [
        {"prompt": prompt, "depth": depth, "quantity": quantity, "value": value, "n": n}
        for prompt, series in values.items()
        for depth, value in enumerate(series, 1)
    ]
    return as_rows(records, variant=variant, drafter=drafter or f"{variant}-0", ttt=2, depth_max=4, **settings)


def four(quantity, **settings):
    rise = {"eagle3": 1.0, "fc_norm": 0.8, "norm_output": 0.1, "eagle31": 0.0}
    frames = [
        rows_of(name, quantity, {"a": [0.3 + 0.1 * k * up for k in DEPTHS], "b": [0.2] * 4}, **settings)
        for name, up in rise.items()
    ]
    return results.combine(frames)


def line(ax, label):
    return next(one for one in ax.lines if one.get_label() == label)


def drawn(ax, label):
    return np.asarray(line(ax, label).get_ydata(), dtype="float64")


def masses(variant="eagle3"):
    values = {"mass_sink": [0.5, 0.3], "mass_prompt": [0.2, 0.2], "mass_context": [0.3, 0.2], "mass_self": [0.0, 0.3]}
    values["mass_self_null"] = [0.0, 0.1]
    return results.combine([rows_of(variant, quantity, {"a": series}) for quantity, series in values.items()])


# ---- the numbers


def test_a_curve_pools_heads_and_prompts_by_their_n():
    records = [
        {"prompt": prompt, "head": head, "depth": 1, "quantity": "mass_sink", "value": value, "n": n}
        for prompt, head, value, n in [("a", 0, 0.2, 10), ("a", 1, 0.4, 10), ("b", 0, 0.9, 40), ("b", 1, 0.5, 40)]
    ]
    point = plotting.curve(as_rows(records, variant="eagle3"), "mass_sink").iloc[0]
    assert point["value"] == pytest.approx((0.3 * 20 + 0.7 * 80) / 100)
    assert point["n"] == 100
    expected = intervals.bootstrap_ratio([0.3 * 20, 0.7 * 80], [20, 80])
    assert expected.low < 0 < 1 < expected.high  # of two prompts; a mass is a share
    assert (point["low"], point["high"]) == (0, 1)


def test_sums_beside_their_parts_are_not_counted_twice():
    parts = [{"prompt": prompt, "depth": 1, "quantity": "match", "value": 0.5, "n": 4} for prompt in ("a", "b")]
    whole = {"prompt": "", "depth": 1, "quantity": "match", "value": 0.9, "n": 8}
    assert plotting.curve(as_rows([*parts, whole]), "match")["value"].tolist() == [0.5]
    by_category = [{**whole, "category": "math", "value": 0.1}, {**whole, "category": "chat", "value": 0.3}, whole]
    assert plotting.curve(as_rows(by_category), "match")["value"].tolist() == [0.9]
    assert plotting.curve(as_rows(by_category[:2]), "match")["value"].tolist() == [pytest.approx(0.2)]
    over_depths = {**whole, "depth": 0}
    assert plotting.curve(as_rows([over_depths, *parts]), "match")["depth"].tolist() == [1]


def test_a_single_row_keeps_its_own_interval_and_one_prompt_has_none():
    pooled = as_rows([{"depth": 1, "quantity": "match", "value": 0.5, "low": 0.4, "high": 0.7}])
    assert plotting.curve(pooled, "match")[["low", "high"]].iloc[0].tolist() == [0.4, 0.7]
    one = rows_of("eagle3", "match", {"a": [0.5]})
    assert plotting.curve(one, "match")[["low", "high"]].isna().all(axis=None)


def test_averaging_over_unlike_settings_warns_and_over_seeds_does_not():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hot = results.combine([rows_of("eagle3", "match", {"a": [0.5]}, temperature=t) for t in (0.0, 1.0)])
        seeds = results.combine([rows_of("eagle3", "match", {"a": [0.5]}, seed=seed) for seed in (0, 1)])
    with pytest.warns(UserWarning, match=r"'match' of 'eagle3'.*temperature"):
        plotting.curve(hot, "match")
    assert len(plotting.curve(seeds, "match")) == 1


def test_the_caption_says_the_settings():
    frame = four("accept_conditional", target="tiny", drafting="chain", feed="text", starts="all", temperature=0.5)
    said = plotting.caption(frame)
    for word in ("tiny", "chain", "K = 4", "text-fed", "T = 0.5", "TTT 2", "95 % interval over 2 prompts"):
        assert word in said
    assert "rule" not in said
    deep = plotting.caption(rows_of("eagle3", "match", {"a": [0.2] * 6}))  # K = 4, and match does not depend on it
    assert "match to depth 6" in deep
    assert "K =" not in deep


# ---- lines


def test_lines_carry_the_values_and_the_looks_of_the_two_switches():
    frame = four("rms_feedback")
    ax = plotting.plot_quantity(frame, "rms_feedback", ylabel="RMS")
    for variant, (fc_norm, norm_output) in results.TOGGLES.items():
        one = frame[frame["variant"] == variant]
        expected = [one.loc[one["depth"] == depth, "value"].mean() for depth in DEPTHS]
        assert drawn(ax, variant) == pytest.approx(expected)
        assert list(line(ax, variant).get_xdata()) == list(DEPTHS)
        assert to_hex(line(ax, variant).get_color()) == plotting.HUES[norm_output]
        assert line(ax, variant).is_dashed() == fc_norm
    assert [text.get_text() for text in ax.get_legend().get_texts()] == list(results.TOGGLES)
    assert ax.get_ylabel() == "RMS"
    assert len(ax.collections) == 4  # a band each


def test_the_band_is_the_bootstrap_over_prompts():
    frame = rows_of("eagle3", "match", {"a": [0.4, 0.4], "b": [0.5, 0.8], "c": [0.45, 0.9]})
    band = plotting.plot_match(frame).collections[0].get_paths()[0].vertices
    expected = intervals.bootstrap_ratio(np.array([0.4, 0.5, 0.45]) * 20, [20] * 3)
    assert 0 < expected.low < expected.high < 1
    first, second = (band[band[:, 0] == depth][:, 1] for depth in (1, 2))
    assert (first.min(), first.max()) == pytest.approx((expected.low, expected.high))
    assert second.max() == 1  # where the widened bootstrap goes beyond what a share can be


def test_a_single_prompt_has_no_band():
    assert not plotting.plot_match(rows_of("eagle3", "match", {"a": [0.2, 0.4]})).collections


def test_missing_values_and_absent_depths_are_gaps():
    frame = rows_of("eagle3", "mass_sink", {"a": [0.4, math.nan, 0.2, 0.1, 0.1]})
    frame = frame[frame["depth"] != 4]
    ax = plotting.plot_quantity(frame, "mass_sink")
    assert np.isnan(drawn(ax, "eagle3")).tolist() == [False, True, False, True, False]
    assert 0.0 not in drawn(ax, "eagle3")


def test_one_missing_prompt_does_not_drag_the_mean():
    ax = plotting.plot_quantity(rows_of("eagle3", "mass_sink", {"a": [0.4], "b": [math.nan]}), "mass_sink")
    assert drawn(ax, "eagle3").tolist() == [0.4]


def test_two_drafters_of_one_variant_are_two_lines():
    frame = results.combine(
        [rows_of("eagle3", "match", {"a": [value]}, drafter=name) for name, value in zip("xy", (0.1, 0.2), strict=True)]
    )
    ax = plotting.plot_match(frame)
    assert (drawn(ax, "eagle3 x").tolist(), drawn(ax, "eagle3 y").tolist()) == ([0.1], [0.2])
    assert line(ax, "eagle3 x").get_marker() != line(ax, "eagle3 y").get_marker()


@pytest.mark.parametrize(
    "plot",
    [
        lambda frame: plotting.plot_quantity(frame, "entropy"),
        plotting.plot_magnitude,
        plotting.plot_acceptance,
        plotting.plot_recent,
        plotting.plot_mass,
        plotting.plot_mass_grid,
        plotting.plot_tau,
        lambda frame: plotting.curve(frame, "tau"),
    ],
)
def test_an_empty_selection_names_what_was_asked_and_what_there_is(plot):
    frame = four("match")
    with pytest.raises(DriftlabError, match=r"no rows of .*(entropy|rms_feedback|accept|recent|mass|tau).*\['match'\]"):
        plot(frame)
    with pytest.raises(DriftlabError, match="no rows at all"):
        plot(frame.iloc[:0])


# ---- the panels


def test_the_match_panel_marks_the_trained_depth():
    ax = plotting.plot_match(four("match"))
    assert list(line(ax, "_TTT 2").get_xdata()) == [2, 2]
    assert "trained to 2" in [text.get_text() for text in ax.texts]
    assert ax.get_ylim()[0] == 0


def test_trained_depths_are_written_beside_each_other_and_off_the_lines():
    shallow = rows_of("eagle3", "match", {"a": [0.3, 0.2, 0.1, 0.1]}, drafter="x")
    deep = rows_of("eagle3", "match", {"a": [0.3, 0.2, 0.2, 0.1]}, drafter="y").assign(ttt=3)
    ax = plotting.plot_match(results.combine([shallow, deep], varying=(*results.VARYING, "ttt")))
    ax.figure.canvas.draw()
    first, second = (
        next(text for text in ax.texts if text.get_text() == f"trained to {ttt}").get_window_extent() for ttt in (2, 3)
    )
    assert not first.overlaps(second)
    assert min(first.y0, second.y0) >= ax.get_window_extent().y1


def test_a_drafter_named_after_its_variant_is_named_once():
    names = ("smollm2-eagle3", "smollm2-eagle3-ttt2")
    frame = results.combine([rows_of("eagle3", "match", {"a": [0.2]}, drafter=name) for name in names])
    legend = [text.get_text() for text in plotting.plot_match(frame).get_legend().get_texts()]
    assert legend == list(names)


def test_the_magnitude_panel_shows_the_fused_input_at_depth_0():
    fused = as_rows(
        [{"quantity": "rms_fused", "value": 12.5}], variant="eagle3", drafter="eagle3-0", ttt=2, depth_max=4
    )
    frame = results.combine([four("rms_feedback"), fused])
    ax = plotting.plot_magnitude(frame, log=True)
    assert drawn(ax, "_eagle3 fused").tolist() == [12.5]
    assert abs(line(ax, "_eagle3 fused").get_xdata()[0]) < 0.5
    assert ax.get_yscale() == "log"
    assert [text.get_text() for text in ax.get_xticklabels()] == ["fused", "1", "2", "3", "4"]


@pytest.mark.parametrize("values", [[math.nan, math.nan], [0.0, 0.0], [math.inf, 1.0]])
def test_a_log_axis_survives_values_it_cannot_show(values, tmp_path):
    ax = plotting.plot_magnitude(rows_of("eagle3", "rms_feedback", {"a": values}), log=True)
    plotting.save_panel(ax.figure, tmp_path / "log.png")


def test_the_acceptance_panel_counts_n_and_makes_few_hollow():
    reach = {1: 1234, 2: 50, 3: 9, 4: 0}
    records = [
        {"depth": depth, "quantity": "accept_conditional", "value": 0.5 if n else math.nan, "n": n}
        for depth, n in reach.items()
    ]
    ax = plotting.plot_acceptance(as_rows(records, variant="eagle31"))
    assert list(line(ax, "_eagle31 few").get_xdata()) == [3]
    assert to_hex(line(ax, "_eagle31 few").get_markerfacecolor()) == "#ffffff"
    assert np.isnan(drawn(ax, "eagle31")[3])
    assert np.isnan(drawn(ax, "eagle31")[2])  # not joined to the depths that many rounds reach
    assert drawn(ax, "_eagle31 few").tolist() == [0.5]
    assert line(ax, "_eagle31 few").get_alpha() < 1
    assert [text.get_text() for text in ax.texts][:5] == ["n eagle31 ", "1.2k", "50", "9", "0"]
    assert "n < 10" in [text.get_text() for text in ax.get_legend().get_texts()]


def test_the_recent_panel_wants_one_window():
    records = [{"depth": 1, "quantity": "recent", "window": window, "value": 0.1 * window} for window in (1, 8)]
    frame = as_rows(records, variant="eagle3")
    with pytest.raises(DriftlabError, match=r"windows \[1, 8\]"):
        plotting.plot_recent(frame)
    with pytest.raises(DriftlabError, match=r"window 4.*\[1, 8\]"):
        plotting.plot_recent(frame, window=4)
    ax = plotting.plot_recent(frame, window=8)
    assert drawn(ax, "eagle3").tolist() == [0.8]
    assert "last 8 keys" in ax.get_ylabel()


def test_the_mass_panel_draws_each_segment_and_the_null():
    ax = plotting.plot_mass(masses())
    assert drawn(ax, "sink").tolist() == [0.5, 0.3]
    assert drawn(ax, "self").tolist() == [0.0, 0.3]
    assert drawn(ax, "self, null").tolist() == [0.0, 0.1]
    assert line(ax, "self, null").is_dashed()
    assert line(ax, "self, null").get_color() == line(ax, "self").get_color()
    total = sum(drawn(ax, label) for label, _, _ in plotting.SEGMENTS.values())
    assert total == pytest.approx([1, 1])


def test_several_drafters_get_a_panel_each():
    frame = results.combine([masses("eagle31"), masses("eagle3"), masses("norm_output")])
    with pytest.raises(DriftlabError, match="plot_mass_grid"):
        plotting.plot_mass(frame)
    figure = plotting.plot_mass_grid(frame)
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["eagle3", "norm_output", "eagle31"]
    for ax in figure.axes:
        assert drawn(ax, "context").tolist() == [0.3, 0.2]
    assert len(figure.legends[0].get_texts()) == 5


def test_a_grid_leaves_no_empty_panel():
    frame = pd.concat([masses().assign(variant=f"v{place}") for place in range(5)])
    assert len(plotting.plot_mass_grid(frame).axes) == 5


def test_tau_is_a_point_with_its_interval_and_no_bar():
    records = [{"quantity": "tau", "value": 2.25, "low": 2.0, "high": 2.5, "n": 90}]
    ax = plotting.plot_tau(as_rows(records, variant="eagle31"))
    assert line(ax, "eagle31").get_xdata().tolist() == [2.25]
    assert list(line(ax, "_eagle31 span").get_xdata()) == [2.0, 2.5]
    assert "2.25" in [text.get_text() for text in ax.texts]
    assert not ax.patches
    assert ax.get_xlim()[0] > 0


def test_tau_of_prompts_is_pooled_over_their_rounds():
    records = [{"prompt": p, "quantity": "tau", "value": tau, "n": n} for p, tau, n in [("a", 4.0, 2), ("b", 1.0, 1)]]
    ax = plotting.plot_tau(as_rows(records, variant="eagle3"))
    assert line(ax, "eagle3").get_xdata().tolist() == [3.0]
    # resamples of two prompts reach from 1 to 4; t of one degree of freedom, 12.706, over z, 1.960, times the root of 2
    wider = 12.7062 / 1.95996 * 2**0.5
    assert 3 - 2 * wider < 1  # what tau cannot be
    assert list(line(ax, "_eagle3 span").get_xdata()) == pytest.approx([1, 3 + 1 * wider], rel=1e-4)
    ax = plotting.plot_tau(as_rows(records, variant="eagle3", depth_max=5))
    assert list(line(ax, "_eagle3 span").get_xdata()) == [1, 6]


def test_a_missing_tau_says_so():
    ax = plotting.plot_tau(as_rows([{"quantity": "tau", "value": None}], variant="eagle3"))
    assert "no value" in [text.get_text() for text in ax.texts]


# ---- no state


def test_nothing_global_is_changed_and_the_axes_given_are_used():
    import matplotlib.pyplot as plt

    def state():
        # reading "backend" itself would choose one
        chosen = {"backend": matplotlib.get_backend(auto_select=False)}
        return chosen | {key: matplotlib.rcParams[key] for key in matplotlib.rcParams if key != "backend"}

    before = state()
    given = Figure().subplots()
    assert plotting.plot_match(four("match"), given) is given
    plotting.plot_mass_grid(masses())
    assert state() == before
    assert plt.get_fignums() == []


def test_a_panel_is_saved_whole_and_the_same_twice(tmp_path):
    for name in ("one.png", "two.png"):
        plotting.save_panel(plotting.plot_match(four("match")).figure, tmp_path / name)
    first, second = (tmp_path / "one.png").read_bytes(), (tmp_path / "two.png").read_bytes()
    assert first.startswith(b"\x89PNG")
    assert first == second
    assert b"Software" not in first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.png", "two.png"]
    with pytest.raises(DriftlabError, match=r"\.png"):
        plotting.save_panel(Figure(), tmp_path / "panel.svg")
