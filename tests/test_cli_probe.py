"""driftlab probe: what it refuses, what it measures, what it shows; masses on single keys against a softmax written here."""

import json
import time

import numpy as np
import pandas as pd
import pytest
import torch

from driftlab import DriftlabError, cli


def run_main(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["driftlab", *map(str, arguments)])
    cli.main()


def refused(monkeypatch, capsys, *arguments):
    """What a command that is refused says."""
    with pytest.raises(SystemExit) as stopped:
        run_main(monkeypatch, *arguments)
    assert stopped.value.code == 2
    return capsys.readouterr().err


@pytest.fixture
def saved(make_drafter, tmp_path):
    """Two drafter folders, which say to what depth they were trained."""
    for name in ("eagle3", "eagle31"):
        make_drafter(name, ttt=1).save(tmp_path / name)
    return tmp_path


@pytest.fixture
def model(saved, monkeypatch):
    """A target's folder, a prompt file, and a cache of their own: what drafters alone are probed on."""
    from conftest import tiny_fast_tokenizer, tiny_llama

    tiny_llama().save_pretrained(saved / "model")
    tokenizer = tiny_fast_tokenizer()
    ending = "{% if add_generation_prompt %}a {% endif %}"
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }} {% endfor %}" + ending
    tokenizer.save_pretrained(saved / "model")
    prompts = [
        {"prompt": words, "id": words.replace(" ", "_")} for words in ("hello world", "a b c", "one more prompt")
    ]
    (saved / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    monkeypatch.setenv("DRIFTLAB_CACHE", str(saved / "cache"))
    return saved / "model"


# ---------------------------------------------------------------------------------------------- masses on single keys


def by_hand(drafter, trajectory, index, start, depth):
    """Softmax over every key of one start by depth, [depth][head, key]: from captured q and k of a run over all starts."""
    from driftlab import all_starts

    batch = trajectory.batch([index])
    names = ["layers.0.self_attn.hook_q", "layers.0.self_attn.hook_k"]
    _, cache = drafter.run_with_cache(batch, depth, feed="own", run=all_starts, names_filter=names)
    row = int(batch.prompt_lengths[0]) - 1 + start
    context = cache[names[1], 1][0, : row + 1]  # [key kv_head d]
    found = []
    for k in range(1, depth + 1):
        q = cache[names[0], k][0, start]  # [head d]
        own = [cache[names[1], j][0, start][None] for j in range(2, k + 1)]
        keys = torch.cat([context, *own]).repeat_interleave(q.shape[0] // context.shape[1], 1)
        found.append((torch.einsum("hd,khd->hk", q, keys).double() / q.shape[-1] ** 0.5).softmax(-1).numpy())
    return row, found


def test_masses_on_single_keys_are_a_softmax_over_all_keys(tiny_trajectory, make_drafter):
    from driftlab.heatmaps import key_masses

    drafter = make_drafter("eagle3")
    recorded = tiny_trajectory.with_sinks((0,))
    index, depth = 3, 4
    name, first = recorded.entries[index].id, recorded.entries[index].prompt_length - 1
    maps = key_masses(drafter, recorded, name, depth=depth, starts=3, prompt_keys=3, context_keys=4, largest=2)
    assert [one.row for one in maps][0] == first
    assert len(maps) == 3
    for one in maps:
        row, exact = by_hand(drafter, recorded, index, one.row - first, depth)
        assert row == one.row
        # every key occurs once: single ones by place, the others in the two rests
        singles = [key.place for key in one.keys if key.kind in ("sink", "prompt", "context")]
        rests = sum(key.place for key in one.keys if key.kind.startswith("rest"))
        assert len(set(singles)) == len(singles)
        assert len(singles) + rests == row + 1
        for d in range(depth):
            for column, key in enumerate(one.keys):
                got = one.mass[d, 0, :, column]
                if key.kind == "own":
                    age = key.place - row  # own keys of depths 2, 3, ...
                    if age > d:
                        assert np.isnan(got).all()
                    else:
                        assert np.allclose(got, exact[d][:, row + age], atol=1e-5)
                elif key.kind in ("sink", "prompt", "context"):
                    assert np.allclose(got, exact[d][:, key.place], atol=1e-5)
            for kind, places in (("prompt", range(first)), ("context", range(first, row + 1))):
                rest = [p for p in places if p not in singles]
                column = [i for i, key in enumerate(one.keys) if key.kind == f"rest of {kind}"]
                assert bool(column) == bool(rest)
                if rest:
                    assert one.keys[column[0]].place == len(rest)
                    assert np.allclose(one.mass[d, 0, :, column[0]], exact[d][:, rest].sum(1), atol=1e-5)
        assert np.allclose(np.nansum(one.mass, -1), 1, atol=1e-5)


def test_a_key_that_is_not_seen_is_missing_and_not_zero(tiny_trajectory, make_drafter):
    """A window of 5 ends w - 1 places before the query, which stands at row + k - 1."""
    from driftlab.heatmaps import key_masses
    from driftlab.interventions import intervened, parse_intervention

    drafter, depth = make_drafter("eagle3", windows=(5,)), 7
    recorded = tiny_trajectory.with_sinks((0,))
    name = recorded.entries[3].id
    maps = key_masses(drafter, recorded, name, depth=depth, starts=2, prompt_keys=3, context_keys=4, largest=1)
    for one in maps:
        single = [(column, key) for column, key in enumerate(one.keys) if not key.kind.startswith("rest")]
        for k in range(1, depth + 1):
            for column, key in single:
                exists = key.kind != "own" or key.place - one.row < k
                seen = exists and key.place > one.row + k - 1 - 5
                assert np.isnan(one.mass[k - 1, 0, :, column]).tolist() == [not seen] * one.mass.shape[2], (k, key)
        assert np.allclose(np.nansum(one.mass, -1), 1, atol=1e-5)
        rest = [column for column, key in enumerate(one.keys) if key.kind == "rest of prompt"]
        assert np.isnan(one.mass[-1, 0, :, rest]).all()
    plain = make_drafter("eagle3")
    with intervened(plain, [parse_intervention("sink:drop")]):
        (one, *_) = key_masses(plain, recorded, name, depth=2)
    assert [key.kind for key in one.keys][0] == "sink"
    assert np.isnan(one.mass[:, 0, :, 0]).all()
    assert not np.isnan(one.mass[1, 0, :, 1:]).any()


def test_the_keys_with_most_mass_are_among_those_shown(tiny_trajectory, make_drafter):
    from driftlab.heatmaps import key_masses

    drafter = make_drafter("eagle3")
    recorded = tiny_trajectory.with_sinks((0,))
    name = recorded.entries[3].id
    (one,) = key_masses(drafter, recorded, name, depth=3, starts=1, prompt_keys=1, context_keys=1, largest=3)
    first = recorded.entries[3].prompt_length - 1
    _, exact = by_hand(drafter, recorded, 3, 0, 3)
    mean = np.mean([p[:, : first + 1].mean(0) for p in exact], 0)
    wanted = sorted(range(1, first - 1), key=lambda place: -mean[place])[:3]
    assert {key.place for key in one.keys if key.kind == "prompt"} == {first - 1, *wanted}


def test_text_feed_shows_the_text_and_stops_before_its_end(tiny_trajectory, make_drafter):
    from driftlab.heatmaps import key_masses

    drafter, entry = make_drafter("eagle31"), tiny_trajectory.entries[0]
    text = tiny_trajectory.tokens(0).tolist()
    maps = key_masses(drafter, tiny_trajectory, entry.id, depth=3, starts=50, feed="text")
    assert [one.row for one in maps] == list(range(entry.prompt_length - 1, entry.length - 3))
    for one in maps:
        assert [key.text for key in one.keys if key.kind == "own"] == [str(t) for t in text[one.row + 2 : one.row + 4]]
        assert one.token == str(text[one.row + 1])


def test_a_map_is_refused_where_it_cannot_be_true(tiny_trajectory, make_drafter):
    from driftlab.heatmaps import key_masses
    from driftlab.interventions import parse_intervention

    drafter, name = make_drafter("eagle3"), tiny_trajectory.entries[0].id
    with pytest.raises(DriftlabError, match="there is no prompt 'nobody' in the recording; it has "):
        key_masses(drafter, tiny_trajectory, "nobody", depth=2)
    with pytest.raises(DriftlabError, match="at least one start"):
        key_masses(drafter, tiny_trajectory, name, depth=2, starts=0)
    with pytest.raises(DriftlabError, match="so no start has 60 of them"):
        key_masses(drafter, tiny_trajectory, name, depth=60, feed="text")
    renumbered = parse_intervention("window:3:carried=1:positions=renumbered")
    with renumbered.on(drafter), pytest.raises(DriftlabError, match="single keys"):
        key_masses(drafter, tiny_trajectory, name, depth=2)
    assert not any(layer.self_attn.recent_windows for layer in drafter.layers)  # left as it was


# ---------------------------------------------------------------------------------------------- labels and panels


def test_texts_of_tokens_are_escaped_and_cut():
    from driftlab.plotting_probe import drawable, visible_text

    assert visible_text(" the\n") == "␣the\\n"
    assert visible_text("\x00\u202e\u00a0") == "\\x00\\u202e\\u00a0"[:9] + "…"
    assert visible_text("abcdefghij") == "abcdefghij"
    assert visible_text("abcdefghijk") == "abcdefghi…"
    assert drawable("a$你") == "a$\\u4f60"  # the font has no Chinese


def test_a_panel_of_keys_draws_any_text(tmp_path):
    """Dollar signs are no formula, foreign letters no warning, an absent key no colour."""
    from driftlab.plotting import save_panel
    from driftlab.plotting_probe import plot_keys

    mass = np.array([[[0.5, 0.5, np.nan], [0.2, 0.3, 0.5]]])
    labels = [["$x_1", "a 你", "\\n"]]
    figure = plot_keys(mass, labels, ["start $ at $"], groups=[["sink", "prompt", "own"]], note="$")
    save_panel(figure, tmp_path / "keys.png")
    (image,) = figure.axes[0].images
    assert np.ma.masked_invalid(image.get_array()).mask.sum() == 1
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["$x_1", "a \\u4f60", "\\n"]


def test_lines_stand_for_settings_and_panels_for_drafters():
    from driftlab.plotting_probe import plot_by
    from driftlab.results import as_rows

    lines = [
        {
            "drafter": drafter,
            "intervention": key,
            "depth": depth,
            "value": value + depth,
            "prompt": "a",
            "quantity": "match",
        }
        for drafter, shift in (("a", 0.0), ("b", 5.0))
        for key, value in (("", shift), ("sink:drop", shift + 0.5))
        for depth in (1, 3)
    ]
    figure = plot_by(as_rows(lines, variant="eagle3", ttt=2), "match", "intervention", trained=True)
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["a", "b"]
    drawn = {line.get_label(): line.get_ydata() for line in figure.axes[1].lines}
    assert drawn["plain"][[0, 2]].tolist() == [6.0, 8.0]
    assert np.isnan(drawn["plain"][1])  # depth 2 was not measured: a gap
    assert drawn["sink:drop"][[0, 2]].tolist() == [6.5, 8.5]
    assert any("trained to 2" in text.get_text() for text in figure.axes[0].texts)
    with pytest.raises(DriftlabError, match="no rows of 'recent'"):
        plot_by(as_rows(lines), "recent", "intervention")


def test_a_diff_too_long_to_be_matched_is_cut():
    from conftest import TinyTokenizer

    from driftlab.perturbations import Perturbation
    from driftlab.probe_report import diff_table
    from driftlab.prompts import load_prompts

    prompts = load_prompts([{"prompt": "ab " * 3000, "id": "long"}])
    began = time.process_time()
    table = diff_table(Perturbation.parse("none+whitespace=double"), prompts, TinyTokenizer())
    assert time.process_time() - began < 60
    assert "only the first 500 tokens" in table["token"].iloc[-1]
    short = diff_table(Perturbation.parse("none+bos=off"), load_prompts(["ab"]), TinyTokenizer())
    assert short["mark"].tolist() == ["-", "", ""]
    assert short["id"].tolist()[0] == "1"


# ---------------------------------------------------------------------------------------------- the command


def test_probe_refuses_before_any_work(saved, tiny_trajectory, monkeypatch, capsys):
    def stop(*_, **__):
        raise AssertionError("a target was loaded")

    monkeypatch.setattr(cli.probing, "load_target", stop)
    alone = ("probe", saved / "eagle31")
    recorded = ("probe", tiny_trajectory.path, saved / "eagle31")
    for words, *arguments in (
        ("there is no kind 'nois'", *alone, "--intervene", "nois:hidden:1"),
        ("is given twice", *alone, "--intervene", "sink:drop", "--intervene", "sink:drop"),
        ("width is at least 1", *alone, "--window", "0"),
        ("perturbation 'bos=maybe': 'maybe' is no value of it; write bos=on|off", *alone, "--perturb", "bos=maybe"),
        ("rows are written as .parquet or .csv", *alone, "--out", "x.txt"),
        ("neither a recording nor a drafter", "probe", saved / "nowhere"),
        ("there is no drafter 'nowhere'", "probe", "nowhere"),
        ("name at least one drafter", "probe"),
        ("nothing.jsonl", *alone, "--prompts", "nothing.jsonl"),
        ("numbers from 1 on", *alone, "--depth", 0),
        ("--perturb would want another", *recorded, "--perturb", "none"),
        ("--prompts, --max-new-tokens would", *recorded, "--prompts", "x.jsonl", "--max-new-tokens", 3),
        ("layer 7 of a drafter", *recorded, "--intervene", "sink:drop:layers=7"),
        ("there is no such prompt among", *recorded, "--heat", "nobody"),
        ("there are 0..3", *recorded, "--heads", "0,4"),
        ("there are 0..3", *recorded, "--heads", "-1"),
        ("name at least one drafter", "probe", tiny_trajectory.path),
    ):
        assert words in refused(monkeypatch, capsys, *arguments)


def test_a_recording_is_probed_as_before_and_more(saved, tiny_trajectory, monkeypatch, capsys):
    from driftlab import read_rows

    out = saved / "r.csv"
    run_main(
        monkeypatch,
        "probe",
        tiny_trajectory.path,
        saved / "eagle31",
        "--depth",
        3,
        "--out",
        out,
        "--sink",
        1,
        "--heads",
        "1,3",
    )
    told = capsys.readouterr().out
    rows = read_rows(out)
    quantities = set(rows["quantity"])
    assert {
        "mass_sink",
        "mass_self_null",
        "recent",
        "entropy",
        "rms_aux2",
        "match",
        "tau",
        "drift_tv",
        "perplexity",
    } <= quantities
    assert "positions [1] (given)" in told
    heads = told.split("Single heads")[1].splitlines()
    assert heads[1].split()[:5] == ["drafter", "layer", "head", "sink_d1", "sink_d3"]
    assert [line.split()[2] for line in heads[2:4]] == ["1", "3"]
    sink = rows[(rows["quantity"] == "mass_sink") & (rows["head"] == 3) & (rows["depth"] == 3)]
    assert float(heads[3].split()[4]) == pytest.approx((sink["value"] * sink["n"]).sum() / sink["n"].sum(), abs=6e-4)
    page = (saved / "r.html").read_text()
    assert "Drift: signs and thresholds" in page
    assert page.count("data:image/png") == len(list((saved / "r_panels").glob("*.png")))
    assert "heat_eagle31_heads.png" in {path.name for path in (saved / "r_panels").iterdir()}


def test_drafters_alone_are_recorded_once_for_each_input(saved, model, monkeypatch, capsys):
    """Inputs and settings are crossed, what changes nothing is left out with the reason, and a second run records nothing."""
    from driftlab import Drafter, Target, accept, all_starts, read_rows, simulate
    from driftlab.comparisons import compare
    from driftlab.interventions import intervened, parse_intervention
    from driftlab.perturbations import Perturbation

    out = saved / "p.parquet"
    command = ("probe", saved / "eagle3", saved / "eagle31", "--target", model, "--prompts", saved / "prompts.jsonl")
    command += ("--max-new-tokens", 12, "--depth", 3, "--out", out, "--limit", 2)
    command += ("--perturb", "bos=off", "--perturb", "bos=on", "thinking=on")
    crossed = ("--intervene", "magnitude:fused + sink:drop", "--window", "2", "--intervene", "pin:sink")
    run_main(monkeypatch, *command, *crossed)
    said = capsys.readouterr()
    rows = read_rows(out)
    replayed = rows[(rows["quantity"] == "tau") & (rows["prompt"] == "")]
    settings = {"", "magnitude:fused + sink:drop", "pin:sink", "window:2"}
    assert set(zip(replayed["drafter"], replayed["template"], replayed["intervention"], strict=True)) == {
        (d, i, s) for d in ("eagle3", "eagle31") for i in ("chat", "bos=off") for s in settings
    }
    assert "left out: bos=on: gives the same tokens as chat" in said.out
    assert "left out: thinking=on: " in said.out
    # the same numbers by the parts
    target = Target.load(str(model), aux_layers=(1, 3, 5))
    recorded = target.record(
        saved / "prompts.jsonl", max_new_tokens=12, perturbation=Perturbation.parse("bos=off"), out=saved / "again"
    )
    recorded = recorded.subset([0, 1])
    drafter = Drafter.load(saved / "eagle3", recorded)
    plain = simulate(accept(all_starts(drafter, recorded, 3), recorded))
    with intervened(drafter, [parse_intervention("magnitude:fused"), parse_intervention("sink:drop")]):
        changed = simulate(accept(all_starts(drafter, recorded, 3), recorded))
    at = replayed.set_index(["drafter", "template", "intervention"])["value"]
    assert at["eagle3", "bos=off", ""] == pytest.approx(plain.tau)
    assert at["eagle3", "bos=off", "magnitude:fused + sink:drop"] == pytest.approx(changed.tau)
    difference = compare({"": plain, "x": changed}, "")["difference"].item()
    found = rows[
        (rows["quantity"] == "tau_difference") & (rows["template"] == "bos=off") & (rows["drafter"] == "eagle3")
    ]
    assert found.set_index("intervention")["value"]["magnitude:fused + sink:drop"] == pytest.approx(difference)
    loss = rows[(rows["quantity"] == "tau_loss") & (rows["drafter"] == "eagle3") & (rows["intervention"] == "")]
    assert loss["value"].item() == pytest.approx(1 - at["eagle3", "bos=off", ""] / at["eagle3", "chat", ""])
    # words
    for words in (
        "a drafter against none",
        "a drafter against another",
        "a setting against plain",
        "pinned",
        "Token diff: bos=off",
    ):
        assert words in said.out
    page = (saved / "p.html").read_text()
    for words in (
        "Stability of each drafter",
        "perplexity",
        "Token diff: bos=off",
        "trained to depth 1",
        "not time: a speed-up",
    ):
        assert words in page
    assert page.count("data:image/png") == len(list((saved / "p_panels").glob("*.png")))
    marks = {path: path.stat().st_mtime_ns for path in (saved / "cache").rglob("*.safetensors")}
    assert marks
    run_main(monkeypatch, *command, "--heat", "none")
    assert {path: path.stat().st_mtime_ns for path in (saved / "cache").rglob("*.safetensors")} == marks
    plain_rows = rows[rows["intervention"] == ""].reset_index(drop=True)
    pd.testing.assert_frame_equal(read_rows(out), plain_rows)


def test_a_perturbed_prompt_without_room_is_left_out(saved, model, monkeypatch, capsys):
    text = saved / "text.txt"
    text.write_text("some words " * 200)
    command = ("probe", saved / "eagle3", "--target", model, "--prompts", saved / "prompts.jsonl", "--heat", "none")
    command += ("--max-new-tokens", 12, "--depth", 2, "--out", saved / "p.csv", "--perturb", f"before=250@{text}")
    run_main(monkeypatch, *command)
    said = capsys.readouterr()
    assert "and 244 leave room for the answer" in said.err
    assert "left out: before=250@text.txt:" in said.out
    assert not list((saved / "p_panels").glob("heat*"))


def test_a_drafter_without_trained_depth_gets_no_verdict_unless_told(
    make_drafter, tiny_trajectory, tmp_path, monkeypatch, capsys
):
    make_drafter("eagle31").save(tmp_path / "d")
    command = (
        "probe",
        tiny_trajectory.path,
        tmp_path / "d",
        "--depth",
        2,
        "--out",
        tmp_path / "r.csv",
        "--heat",
        "none",
    )
    run_main(monkeypatch, *command)
    assert "no verdict on drift: its file does not say" in capsys.readouterr().out
    run_main(monkeypatch, *command, "--trained-depth", 2)
    assert "trained depth 2, looked at to depth 4" in capsys.readouterr().out


def test_nothing_freezes_on_a_long_text(make_drafter, tmp_path, monkeypatch):
    """4,096 tokens of prompt: no T x T map, so seconds of work and panels of ordinary size."""
    from conftest import TinyTokenizer, tiny_llama

    from driftlab import Target

    target = Target(tiny_llama(max_position_embeddings=5000), TinyTokenizer(), name="long", aux_layers=(1, 3, 5))
    letters = "".join(chr(97 + (i * i) % 26) for i in range(4095))
    recorded = target.record([letters, letters[:50]], max_new_tokens=10, template=False, out=tmp_path / "long")
    assert recorded.entries[0].prompt_length == 4096
    make_drafter("eagle31", target=recorded, ttt=2).save(tmp_path / "d")
    began = time.process_time()
    run_main(
        monkeypatch, "probe", tmp_path / "long", tmp_path / "d", "--depth", 4, "--out", tmp_path / "r.csv", "--heads", "all",
        "--window", "512:carried=sink",
    )  # fmt: skip
    assert time.process_time() - began < 60  # about 10 here
    page = (tmp_path / "r.html").read_text()
    assert "Mass on single keys, d, prompt prompts:1, mean of heads" in page
    assert (tmp_path / "r_panels" / "heat_d.png").stat().st_size < 2**20
