"""Drafter folders of every project: the loaded drafter computes what the engine computes, and the reading says what it took.

The judge is tests/engine_forwards.py with the rules of tests/engine_rules.py. It shares no code with the package and is itself
held against values that engines' own code computed (tests/data/oracles).
"""

import copy
import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import engine_rules as rules
import format_tensors as formats
import pytest
import torch
from engine_forwards import Drafted, Lent
from format_folders import FOLDERS, write_specforge
from safetensors.torch import load_file

ORACLES = Path(__file__).parent / "data" / "oracles"
VECTORS = ("torchspec_f0n1", "torchspec_f1n1", "torchspec_mla_yarn1")
DEPTH = 5


def close(ours, theirs):
    """Within 1e-5 of the largest value: a chain of float32 states is not better than that."""
    scale = max(1.0, float(theirs.abs().max()))
    torch.testing.assert_close(ours.double() / scale, theirs.double() / scale, rtol=0, atol=1e-5)


def equal(ours, theirs):
    """Element by element, for what was computed in float64."""
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-5, atol=1e-5)


def every_row(rows):
    from driftlab.segments import Starts

    index = torch.arange(rows)[None]
    return Starts(index, torch.ones_like(index, dtype=torch.bool), torch.full_like(index, 2), ("text",))


def everything_recorded(given, ids):
    """A recording that holds every state of the target: the token before the first row is not read by any drafter."""
    from driftlab.recorded import Batch

    def padded(x):
        return torch.cat([x, x[-1:]])[None].float()

    tokens = torch.cat([ids.new_full((1,), 3), ids])[None]
    return Batch(
        tokens=tokens,
        aux=padded(given.stream),
        last_hidden=padded(given.final),
        lse=torch.zeros(tokens.shape),
        lengths=torch.tensor([tokens.shape[1]]),
        prompt_lengths=torch.tensor([1]),
        ids=("text",),
        finish=("length",),
        sinks=(0,),
        aux_layers=tuple(range(given.layers + 1)),
    )


@torch.no_grad()
def drafted(drafter, ids, states, depth, *, own):
    """The package's drafter from every row: logits, feedback and greedy tokens of each depth."""
    text = torch.cat([ids, ids.new_zeros(depth)])
    state = drafter.first(ids[None], states, every_row(len(ids)))
    logits, feedback, tokens = [], [], []
    for k in range(depth):
        logits.append(drafter.logits(state.normed)[0])
        feedback.append(state.feedback[0])
        tokens.append(drafter.to_target(logits[-1].argmax(-1)))
        if k + 1 < depth:
            state = drafter.next(state, (tokens[-1] if own else text[k + 1 : k + 1 + len(ids)])[None])
    return Drafted(torch.stack(logits), torch.stack(feedback), torch.stack(tokens))


# ---- the folders


@pytest.fixture(scope="module", params=FOLDERS)
def case(request, tmp_path_factory):
    """A folder, its judge and its target."""
    folder = FOLDERS[request.param]
    given = formats.lent(folder.family)
    path = folder.write(tmp_path_factory.mktemp("folders") / request.param)
    engine, ids = folder.engine(path, given), formats.text()
    fused = engine.fused()
    return SimpleNamespace(
        folder=folder,
        path=path,
        lent=given,
        engine=engine,
        target=formats.target_of(given),
        fused=fused,
        drafted={own: engine.every_start(ids, fused, DEPTH, own=own) for own in (True, False)},
    )


@pytest.fixture(scope="module")
def drafter(case):
    """Loaded as a person does; where the rotary base is not said, and the target has another, a warning has to say so."""
    from driftlab import Drafter

    told = (
        pytest.warns(UserWarning, match="rope_theta: 10000") if "rope_theta" in case.folder.assumed else nullcontext()
    )
    with told:
        return Drafter.load(case.path, case.target, **case.folder.given).eval()


def test_the_judge_reads_the_states_written_down_by_hand(case):
    assert case.engine.boundaries == case.folder.boundaries


def test_every_rule_makes_a_difference(case):
    """Otherwise equal numbers would not tell that a rule was followed."""
    engine, ids = case.engine, formats.text()
    first = engine.chain(ids, engine.fused(), 2)
    flips = {"residual_normed": not engine.residual_normed, "windows": () if any(engine.windows) else (3,) * 2}
    flips |= {"feed_normed": not engine.feed_normed, "head_normed": not engine.head_normed}
    others = [replace(engine, **{name: value}) for name, value in flips.items()]
    others += (
        [replace(engine, boundaries=tuple(k - 1 for k in engine.boundaries))]
        if min(engine.boundaries, default=0)
        else []
    )
    others += [replace(engine, concat_norm=False)] if engine.concat_norm else []
    others += [replace(engine, chunk_norms=False)] if engine.chunk_norms else []
    others += [
        replace(engine, config={**engine.config, "rope_theta": 300.0, "rope_scaling": None, "rope_parameters": None})
    ]
    others += [replace(engine, tensors={n: t for n, t in engine.tensors.items() if not n.endswith("bias")})] * any(
        name.endswith("bias") for name in engine.tensors
    )
    for other in others:
        second = other.chain(ids, other.fused(), 2)
        assert (second.logits[1] - first.logits[1]).abs().max() > 0.01


@pytest.mark.parametrize("own", [True, False], ids=["own", "text"])
def test_logits_and_feedback_at_every_depth_and_row_are_the_engine_s(case, drafter, own):
    ids = formats.text()
    theirs = case.drafted[own]
    states = case.engine.states.float()[None]
    ours = drafted(drafter, ids, states, DEPTH, own=own)
    close(drafter.fuse(states)[0], case.fused)
    close(ours.logits, theirs.logits)
    close(ours.feedback, theirs.feedback)
    assert torch.equal(ours.tokens, theirs.tokens)
    exact = drafted(
        copy.deepcopy(drafter).double(), ids, states.double(), DEPTH, own=own
    )  # rules can differ here, rounding cannot
    torch.testing.assert_close(exact.logits, theirs.logits, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(exact.feedback, theirs.feedback, rtol=1e-9, atol=1e-9)


def test_it_picks_the_engine_s_states_from_a_recording_and_drafts_the_engine_s_tokens(case, drafter):
    from driftlab.draft import all_starts, chain, read_states

    ids = formats.text()
    assert drafter.config.aux_layers == case.folder.boundaries
    batch = everything_recorded(case.lent, ids)
    assert torch.equal(read_states(drafter, batch)[0, :-1], case.engine.states.float())
    theirs = case.drafted[True]
    # a row is a start as far as the text goes on after it
    assert torch.equal(all_starts(drafter, batch, depth=DEPTH, feed="own").tokens[0].T, theirs.tokens)
    assert torch.equal(chain(drafter, batch, [5], DEPTH)[0], theirs.tokens[:, 5])


def inspected(monkeypatch, capsys, *arguments):
    from driftlab import cli

    monkeypatch.setattr(sys, "argv", ["driftlab", "inspect", *map(str, arguments)])
    cli.main()
    return capsys.readouterr().out


def test_inspect_names_format_states_and_all_that_was_assumed(case, drafter, monkeypatch, capsys):
    told = inspected(monkeypatch, capsys, case.path, "--num-layers", formats.LAYERS)
    assert case.folder.format.lower() in told.splitlines()[0].lower()
    rows = {words[0]: words for line in told.splitlines() if len(words := line.split(maxsplit=2)) == 3}
    states = list(case.folder.boundaries)
    assert (str(states) if states else "the target's final state") in rows["aux_layers"][2]
    values = json.loads(inspected(monkeypatch, capsys, case.path, "--num-layers", formats.LAYERS, "--json"))
    assert values["fault"] is None
    said = {row["name"]: row for row in values["conventions"]}
    assert said["aux_layers"]["value"] == states
    config = drafter.config.to_dict()
    for name, row in said.items():  # what is said is what was built, but for what a person gave
        assert config[name] == row["value"] or name in case.folder.given, name
        if row["source"] == "assumed":
            assert row["why"]
            assert rows[name][1] == "assumed"
    # what the file does not say, by hand
    for name in (*case.folder.assumed, *case.folder.given):
        assert said[name]["source"] == "assumed", name


YARNS = {
    "plain": {},
    "mscale": {"mscale": 0.7},
    "mscale_all_dim": {"mscale_all_dim": 0.8},
    "both": {"mscale": 0.7, "mscale_all_dim": 0.8},
    "attention_factor": {"attention_factor": 1.3},
}


@pytest.mark.parametrize(
    ("latent", "spelling"),  # no rule is known for an attention_factor beside DeepSeek's two magnitudes
    [(latent, name) for latent in (False, True) for name in YARNS if not (latent and name == "attention_factor")],
)
def test_yarn_scales_rotation_and_scores_as_its_fields_say(tmp_path, latent, spelling):
    """Latent attention has defaults and a softmax factor of its own."""
    from driftlab import Drafter

    shape = formats.Shape(seed=95, latent=(20, 16, 12, 8, 10) if latent else None, own_embed=True)
    config_of = formats.latent_config if latent else formats.llama_config
    scaling = {**formats.YARN, "factor": 16.0, **YARNS[spelling]}
    settings = {"rope_scaling": scaling, "_torchspec_version": "0.1.0", "eagle_config": formats.nested((1, 3, 5))}
    folder = formats.write(
        tmp_path / "yarn", config_of(shape, **settings), formats.vocabulary(formats.tensors_of(shape))
    )
    given, ids = formats.lent(), formats.text()
    engine = rules.torchspec(folder, given)
    theirs, _ = engine.rows(ids, engine.fused())
    drafter = Drafter.load(folder, formats.target_of(given)).eval()
    close(drafted(drafter, ids, engine.states.float()[None], 1, own=False).logits[0], theirs)
    unsaid = {name: value for name, value in scaling.items() if name not in YARNS[spelling]}
    plain, _ = replace(engine, config={**engine.config, "rope_scaling": unsaid}).rows(ids, engine.fused())
    # one magnitude alone changes nothing in the other projects' attention
    same = spelling == "plain" or (not latent and spelling in ("mscale", "mscale_all_dim"))
    assert ((plain - theirs).abs().max() < 1e-9) == same


@pytest.mark.parametrize("norm_output", [True, False])
@pytest.mark.parametrize("when", ["before-879", "after-879"])
def test_a_specforge_file_means_what_its_date_makes_of_norm_output(tmp_path, norm_output, when):
    from driftlab import Drafter

    folder = write_specforge(tmp_path / "specforge", norm_output=norm_output)
    given, ids = formats.lent(), formats.text()
    engine = rules.specforge(folder, given, before=when == "before-879")
    drafter = Drafter.load(folder, formats.target_of(given), specforge=when).eval()
    theirs = engine.every_start(ids, engine.fused(), 2, own=False)
    ours = drafted(drafter, ids, engine.states.float()[None], 2, own=False)
    close(ours.logits, theirs.logits)
    close(ours.feedback, theirs.feedback)
    other = rules.specforge(folder, given, before=when != "before-879")
    with pytest.raises(AssertionError):
        close(other.every_start(ids, engine.fused(), 2, own=False).logits, theirs.logits)


def test_a_layer_id_counts_from_where_the_project_counts(tmp_path):
    """On a real model: outputs of layers 1, 4, 6; boundaries 1, 4, N; the state after the final norm."""
    from conftest import TinyTokenizer, tiny_llama

    from driftlab import Drafter, Target
    from driftlab.draft import read_states

    model = tiny_llama(layers=formats.LAYERS, vocab_size=formats.VOCAB)
    target = Target(model, TinyTokenizer(), name="tiny", aux_layers=tuple(range(formats.LAYERS + 1)))
    recording = target.record(["hello world"], max_new_tokens=8, template=False, out=tmp_path / "recording")
    (batch,) = recording.batches(10_000)
    outputs: dict[object, torch.Tensor] = {}

    def keep(name):
        return lambda module, args, out: outputs.__setitem__(name, (out[0] if isinstance(out, tuple) else out).detach())

    hooks = [layer.register_forward_hook(keep(j)) for j, layer in enumerate(model.model.layers)]
    hooks.append(model.model.norm.register_forward_hook(keep("final")))
    with torch.no_grad():
        model(batch.tokens)
    for hook in hooks:
        hook.remove()
    for name, expected in (("sglang", (1, 4, 6)), ("vllm", (0, 3, 7)), ("modelopt_final", ("final",))):
        drafter = Drafter.load(FOLDERS[name].write(tmp_path / name), target)
        states = torch.stack([outputs[j] for j in expected], 2)
        torch.testing.assert_close(read_states(drafter, batch), states, rtol=1e-4, atol=1e-4)


# ---- values that engines' own code computed


def vectors(name):
    """A folder of tests/data/oracles and what was computed with it; its target has 12 layers, its states are the file's."""
    expected = load_file(ORACLES / name / "expected.safetensors")
    rows = expected["aux"].shape[0]
    states = expected["aux"].view(rows, 3, -1)
    nothing = torch.zeros(211, states.shape[-1], dtype=torch.float64)
    stream = torch.zeros(rows, 13, states.shape[-1], dtype=torch.float64)
    return SimpleNamespace(
        path=ORACLES / name, expected=expected, states=states, lent=Lent(nothing, nothing, stream, stream[:, 0])
    )


@pytest.mark.parametrize("name", VECTORS)
def test_the_judge_and_the_drafter_compute_what_torchspec_computes(name):
    from driftlab import Drafter

    case = vectors(name)
    expected, ids = case.expected, case.expected["ids_shifted"]
    engine, drafter = rules.torchspec(case.path, case.lent), Drafter.load(case.path).eval()
    assert drafter.config.aux_layers == engine.boundaries == (2, 6, 9)
    fused = engine.fused(case.states.double())
    equal(fused, expected["fused"])
    close(drafter.fuse(case.states[None])[0], expected["fused"])
    judged = engine.every_start(ids, fused, DEPTH, own=False)
    as_loaded = drafted(drafter, ids, case.states[None], DEPTH, own=False)
    exact = drafted(drafter.double(), ids, case.states[None].double(), DEPTH, own=False)
    for found, same in ((judged, equal), (as_loaded, close), (exact, equal)):
        assert found.logits.shape == expected["ttt_logits"].shape == (DEPTH, len(ids), 96)
        same(found.logits, expected["ttt_logits"])
        same(found.feedback, expected["ttt_feedback"])


def test_the_judge_and_the_drafter_compute_what_safeailab_computes():
    """Prefill in all rows, and the greedy chain of six from the last one. (The run used the file's own embedding.)"""
    from driftlab import Drafter

    case = vectors("safeailab")
    expected, ids = case.expected, case.expected["ids"][1:]
    drafter = Drafter.load(case.path, num_layers=12).eval()
    engine = rules.safeailab(case.path, case.lent)
    assert drafter.config.aux_layers == engine.boundaries == (2, 6, 9)
    engine = replace(engine, embed=engine.tensors["embed_tokens.weight"])
    logits, feedback = engine.rows(ids, engine.fused(case.states.double()))
    ours = drafted(drafter, ids, case.states[None], 6, own=True)
    for found_logits, found_feedback in ((logits, feedback), (ours.logits[0], ours.feedback[0])):
        close(found_logits, expected["logits_prefill"][0])
        close(found_feedback, expected["hidden_prefill"][0])
    chain = engine.chain(ids, engine.fused(case.states.double()), 6)
    last = Drafted(*(part[:, -1] for part in (ours.logits, ours.feedback, ours.tokens)))
    for found in (chain, last):
        close(found.logits, expected["chain_logits"])
        close(found.feedback, expected["chain_feedback"])
        assert found.tokens.tolist() == expected["chain_tokens"].tolist()


def test_the_vectors_settings_are_what_their_names_say():
    for name in VECTORS:
        config = json.loads((ORACLES / name / "config.json").read_text())
        assert config["fc_norm"] is ("f0" not in name)
        assert config["norm_output"] is True
