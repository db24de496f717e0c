import dataclasses
import json
import subprocess
import sys
import time

import pytest

from driftlab import DriftlabError, cli
from driftlab.cli.common import named


@pytest.fixture
def saved(tiny_trajectory, make_drafter, tmp_path):
    """Two drafter folders for the tiny recording."""
    for name in ("eagle3", "eagle31"):
        make_drafter(name).save(tmp_path / name)
    return tmp_path


def run_main(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["driftlab", *map(str, arguments)])
    cli.main()


def test_help_answers_at_once_and_imports_nothing_heavy():
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "driftlab", "--help"], capture_output=True, text=True, check=True)
    assert time.perf_counter() - began < 5  # a second on an idle machine
    assert all(command in done.stdout for command in ("demo", "record", "train", "probe", "simulate"))
    code = (
        "import sys; sys.argv = ['driftlab', '--help']\nfrom driftlab.cli import main\ntry: main()\nexcept SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'pandas', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_simulate_writes_rows_and_prints_tau(saved, tiny_trajectory, monkeypatch, capsys):
    from driftlab import accept, all_starts, read_rows, simulate
    from driftlab.drafter import Drafter

    out = saved / "rows.csv"
    arguments = ("simulate", tiny_trajectory.path, saved / "eagle3", saved / "eagle31", "--depth", 3, "--out", out)
    run_main(monkeypatch, *arguments)
    rows = read_rows(out)
    drafter = Drafter.load(saved / "eagle3", tiny_trajectory)
    expected = simulate(accept(all_starts(drafter, tiny_trajectory, 3), tiny_trajectory)).tau
    tau = rows[(rows["quantity"] == "tau") & (rows["drafter"] == "eagle3")]["value"].item()
    assert tau == pytest.approx(expected)
    assert f"{expected:.3f}" in capsys.readouterr().out
    assert json.loads((saved / "rows.run.json").read_text())["settings"]["depth"] == 3


def test_simulate_shows_what_stands_beside_tau(saved, tiny_trajectory, monkeypatch, capsys):
    """Estimators, paired tests, repetition; another tool's words beside its log; drafts that are kept."""
    from driftlab import Drafter, accept, all_starts, engine_report, simulate

    log = saved / "server.log"
    log.write_text(
        "INFO SpecDecoding metrics: Mean acceptance length: 1.50, Accepted throughput: 5.00 tokens/s, Drafted throughput: "
        "30.00 tokens/s, Accepted: 50 tokens, Drafted: 300 tokens, Per-position acceptance rate: 0.300, 0.150, 0.050, "
        "Avg Draft acceptance rate: 16.7%\n"
    )
    common = (
        "simulate",
        tiny_trajectory.path,
        saved / "eagle3",
        saved / "eagle31",
        "--depth",
        3,
        "--out",
        saved / "r.csv",
    )
    run_main(monkeypatch, *common, "--as", "vllm", "--details", "--drafts", saved / "drafts")
    told = capsys.readouterr().out
    for words in ("all_starts_mean", "product_of_rates", "p_adjusted", "mdd", "repeated_ngrams", "survivor_selection"):
        assert words in told
    drafter = Drafter.load(saved / "eagle3", tiny_trajectory)
    outcome = simulate(accept(all_starts(drafter, tiny_trajectory, 3), tiny_trajectory))
    mean = engine_report("vllm", outcome.histograms())["tokens_per_round"].value
    (line,) = [x for x in told.split("eagle31, as vllm")[0].splitlines() if "Mean acceptance length" in x]
    assert f"{mean:.3f}" in line
    assert len(list((saved / "drafts").iterdir())) == 2
    run_main(monkeypatch, *common, "--as", "vllm", "--log", log)
    (line, _) = [x for x in capsys.readouterr().out.splitlines() if "Mean acceptance length" in x]
    assert f"{mean:.3f}" in line
    assert "1.500" in line
    assert f"{100 * engine_report('vllm', outcome.histograms())['accept_rate'].value:.3f}" in told
    run_main(monkeypatch, *common, "--as", "vllm", "--log", log, "--log-format", "vllm-log")
    (line, _) = [x for x in capsys.readouterr().out.splitlines() if "Avg Draft acceptance rate" in x]
    assert "16.667" in line  # in vLLM's own unit, on both sides


def test_tables_explain_themselves(saved, tiny_trajectory, monkeypatch, capsys):
    common = (
        "simulate",
        tiny_trajectory.path,
        saved / "eagle3",
        saved / "eagle31",
        "--depth",
        3,
        "--out",
        saved / "r.csv",
    )
    run_main(monkeypatch, *common, "--details")
    told = capsys.readouterr().out
    for words in (
        "tau_uncensored - 1",
        "p_adjusted: for the number",
        "mdd: smallest",
        "periodic_tail: share",
        "n_rounds_reached",
    ):
        assert words in told
    by_category = told.split("tau by category\n")[1].splitlines()[0].split()
    assert by_category == ["drafter", "bucket", "tau", "low", "high", "rounds", "prompts"]
    rounds = told.split("tau by category\n")[1].splitlines()[1].split()[-2]
    assert rounds.isdigit()
    assert "the default" not in told  # greedy text: there is no rule to choose


def test_sampled_text_says_which_rule_was_taken(saved, tiny_target, monkeypatch, capsys):
    sampled = tiny_target.record(
        ["hello", "ab"], max_new_tokens=6, temperature=1.0, template=False, out=saved / "sampled"
    )
    common = ("simulate", sampled.path, saved / "eagle3", "--depth", 2, "--out", saved / "r.csv")
    run_main(monkeypatch, *common)
    assert "drafts: argmax (the default; so vLLM and SGLang draft" in capsys.readouterr().out
    run_main(monkeypatch, *common, "--rule", "rejection")
    assert "the default" not in capsys.readouterr().out


def test_simulate_draws_trees(saved, tiny_trajectory, monkeypatch, capsys):
    from driftlab import Drafter, DynamicTree, accept, read_rows, simulate, tree_all_starts

    common = ("simulate", tiny_trajectory.path, saved / "eagle31", "--out", saved / "r.csv")
    run_main(monkeypatch, *common, "--tree", 3, 2, 5)
    drafter = Drafter.load(saved / "eagle31", tiny_trajectory)
    expected = simulate(accept(tree_all_starts(drafter, tiny_trajectory, DynamicTree(3, 2, 5)), tiny_trajectory))
    rows = read_rows(saved / "r.csv")
    assert rows[rows["quantity"] == "tau"]["value"].item() == pytest.approx(expected.tau)
    assert set(rows["drafting"]) == {"dynamic tree of 5 nodes, depth 3, top 2"}
    assert "product_of_rates" not in capsys.readouterr().out
    run_main(monkeypatch, *common, "--chains", 2, "--depth", 2, "--as", "vllm")
    told = capsys.readouterr().out
    assert "static tree of 4 nodes, depth 2" in told
    assert "vLLM drafts chains alone" in told
    run_main(monkeypatch, *common, "--tree", 3, 2, 5, "--depth", 3)


def test_simulate_refuses_before_any_work(saved, tiny_trajectory, monkeypatch, capsys):
    common = ("simulate", tiny_trajectory.path, saved / "eagle31")
    for words, *options in (
        ("ways to draft", "--tree", 3, 2, 5, "--chains", 2),
        ("ways to draft", "--chains", 2, "--rule", "exact"),
        ("SampledTree", "--tree", 3, 2, 5, "--rule", "rejection"),
        ("--depth says 4", "--tree", 3, 2, 5, "--depth", 4),
        ("give --draft-temperature", "--rule", "rejection"),
        ("add --rule rejection", "--draft-temperature", 0.5),
        ("no such convention", "--as", "vlm"),
        ("add --as", "--log", saved / "no.log"),
        ("wants a file", "--as", "vllm", "--log", saved / "no.log"),
    ):
        with pytest.raises(SystemExit):
            run_main(monkeypatch, *common, *options)
        assert words in capsys.readouterr().err


def test_probe_writes_every_quantity(saved, tiny_trajectory, monkeypatch, capsys):
    from driftlab import read_rows

    out = saved / "probe.parquet"
    run_main(monkeypatch, "probe", tiny_trajectory.path, saved / "eagle31", "--depth", 3, "--out", out, "--sink", 1)
    quantities = set(read_rows(out)["quantity"])
    assert {"mass_sink", "mass_self", "mass_self_null", "recent", "entropy", "rms_feedback", "rms_aux2"} <= quantities
    assert "positions [1] (given)" in capsys.readouterr().out


def test_train_then_simulate(tiny_trajectory, tmp_path, monkeypatch, capsys):
    run_main(monkeypatch, "train", tiny_trajectory.path, tmp_path / "d", "--ttt", 2, "--draft-vocab", 40, "--epochs", 2)
    assert "eagle31" in capsys.readouterr().out
    run_main(monkeypatch, "simulate", tiny_trajectory.path, tmp_path / "d", "--out", tmp_path / "rows.csv")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("simulate", "nowhere", "d"), "is not a recording: there is no such folder"),
        (("record", "out", "--temperature", "-1"), "--temperature -1 --top-k 0 --top-p 1: "),
        (("record", "out", "--prompts", "nothing.jsonl"), "nothing.jsonl"),
    ],
)
def test_a_driftlab_error_is_one_line_and_exit_2(arguments, message, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        run_main(monkeypatch, *arguments)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("driftlab: ")
    assert message in error


def test_an_unknown_drafter_is_named(tiny_trajectory, monkeypatch, capsys, tmp_path):
    with pytest.raises(SystemExit):
        run_main(monkeypatch, "simulate", tiny_trajectory.path, tmp_path / "absent")
    assert "absent" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run_main(monkeypatch, "simulate", tiny_trajectory.path, "smollm2-eagel31", "--out", tmp_path / "r.csv")
    assert "those shipped are smollm2-eagle3, smollm2-fc_norm" in capsys.readouterr().err


def test_what_is_no_recording_is_told_apart(tmp_path):
    from driftlab import Trajectory

    with pytest.raises(DriftlabError, match="nowhere is not a recording: there is no such folder"):
        Trajectory.open(tmp_path / "nowhere")
    folder = tmp_path / "hollow"
    folder.mkdir()
    with pytest.raises(DriftlabError, match=r"hollow is not a recording: the folder is empty .*same record command"):
        Trajectory.open(folder)
    (folder / "notes.txt").touch()
    with pytest.raises(DriftlabError, match=r"no trajectory.json and no piece, but notes.txt; look at the name"):
        Trajectory.open(folder)
    with pytest.raises(DriftlabError, match="it is a file"):
        Trajectory.open(folder / "notes.txt")
    (folder / "piece-00000.safetensors").touch()
    with pytest.raises(DriftlabError, match="holds 1 pieces of an unfinished recording: run the same record command"):
        Trajectory.open(folder)


def test_interrupted_work_says_how_to_go_on(monkeypatch, capsys):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.recording, "load_target", stop)
    with pytest.raises(SystemExit) as stopped:
        run_main(monkeypatch, "record", "out")
    assert stopped.value.code == 130
    assert "same command" in capsys.readouterr().err


def test_drafters_get_names_that_tell_them_apart(tmp_path):
    """Two folders called alike must not be pooled into one line."""
    from pathlib import Path

    out = Path("rows.csv")
    assert list(named((Path("runs/a"), Path("runs/b")), out)) == ["a", "b"]
    assert list(named((Path("ttt1/eagle31"), Path("ttt4/eagle31")), out)) == ["ttt1/eagle31", "ttt4/eagle31"]
    for paths, where, message in (
        ((), out, "at least one"),
        ((Path("a"), Path("./a")), out, "twice"),
        ((Path("a"),), Path("rows.txt"), "parquet or .csv"),
    ):
        with pytest.raises(DriftlabError, match=message):
            named(paths, where)


def test_a_recording_keeps_what_drafters_read_and_they_are_exported(tmp_path, make_drafter, monkeypatch, capsys):
    """From somebody's drafters to numbers: record for two of them, replay one, write it for an engine and read it back."""
    import torch
    from conftest import tiny_fast_tokenizer, tiny_llama

    from driftlab import Drafter, Trajectory, all_starts, read_rows

    model = tmp_path / "model"
    tiny_llama().save_pretrained(model)
    tiny_fast_tokenizer().save_pretrained(model)
    for name, layers in (("a", (1, 3, 5)), ("b", (1, 4, 5))):
        make_drafter("eagle31", aux_layers=layers).save(tmp_path / name)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello world"}\n')
    common = (
        "record",
        tmp_path / "rec",
        "--target",
        model,
        "--prompts",
        prompts,
        "--max-new-tokens",
        8,
        "--no-template",
    )
    run_main(monkeypatch, *common, "--drafters", tmp_path / "a", tmp_path / "b", "--aux-layers", 2)
    trajectory = Trajectory.open(tmp_path / "rec")
    assert trajectory.aux_layers == (1, 2, 3, 4, 5)
    run_main(
        monkeypatch, "export", tmp_path / "b", tmp_path / "vllm", "--target", model, "--target-name", "owner/model"
    )
    said = capsys.readouterr().out
    assert "vllm serve owner/model" in said
    here, back = (Drafter.load(tmp_path / name, trajectory) for name in ("b", "vllm"))
    assert back.config.aux_layers == (1, 4, 5)
    # read another way: what the user says goes before what the file says, in every command
    config = json.loads((tmp_path / "vllm" / "config.json").read_text())
    del config["norm_output"]
    (tmp_path / "vllm" / "config.json").write_text(json.dumps(config))
    out = tmp_path / "rows.csv"
    measured = {}
    for given in ((), ("--given", "norm_output=on")):
        run_main(monkeypatch, "simulate", tmp_path / "rec", tmp_path / "vllm", "--depth", 3, "--out", out, *given)
        measured[given] = read_rows(out).set_index("quantity")["norm_output"].unique().tolist()
        if not given:
            assert "if the writer lost it, give norm_output=true" in capsys.readouterr().err
    assert list(measured.values()) == [[False], [True]]
    assert torch.equal(all_starts(here, trajectory, 3).tokens, all_starts(back, trajectory, 3).tokens)


def test_inspect_says_what_it_is_and_fails_on_the_unloadable(
    tmp_path, make_drafter, tiny_trajectory, monkeypatch, capsys
):
    make_drafter("eagle31").save(tmp_path / "a")
    run_main(monkeypatch, "inspect", tmp_path / "a")
    assert "kind: EAGLE 3.1" in capsys.readouterr().out
    for arguments, told in (
        ((tmp_path / "a", "--given", "qk_norm=true"), "missing tensors"),
        ((tiny_trajectory.path,), "is a recording"),
        ((tmp_path,), "the folders a in it"),
        (("smollm2-eagle32",), "those shipped are smollm2-eagle3,"),
    ):
        with pytest.raises(SystemExit) as stopped:
            run_main(monkeypatch, "inspect", *arguments)
        said = capsys.readouterr()
        assert stopped.value.code in (1, 2)
        assert told in said.out + said.err
    run_main(monkeypatch, "inspect", tmp_path / "a", "--given", "fc_norm=off")
    assert "not all of it is used" in capsys.readouterr().out


def test_inspect_says_that_it_is_another_target(tmp_path, make_drafter, tiny_trajectory):
    from types import SimpleNamespace

    from driftlab.drafter.formats.reading import read_checkpoint

    make_drafter("eagle31").save(tmp_path / "a")
    spec = dataclasses.replace(tiny_trajectory.spec, vocab_size=tiny_trajectory.spec.vocab_size + 1)
    reading = read_checkpoint(tmp_path / "a")
    assert not any("another target" in words for words in reading.about(tiny_trajectory))
    assert any("it is the drafter of another target" in words for words in reading.about(SimpleNamespace(spec=spec)))
