"""The same numbers as TorchSpec's own code on its own tiny drafters, five depths, every row."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

ORACLES = Path(__file__).parent / "data" / "oracles"
NAMES = ("torchspec_f0n1", "torchspec_f1n1")


@pytest.fixture(params=NAMES)
def oracle(request):
    from driftlab import Drafter

    folder = ORACLES / request.param
    return SimpleNamespace(
        folder=folder,
        drafter=Drafter.load(folder),
        expected=load_file(folder / "expected.safetensors"),
        tensors=load_file(folder / "model.safetensors"),
        fc_norm="f1" in request.param,
    )


def every_row(rows):
    from driftlab.segments import Starts

    index = torch.arange(rows)[None]
    return Starts(index, torch.ones_like(index, dtype=torch.bool), torch.full_like(index, 2), ("oracle",))


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_keys_and_values_are_those_of_the_file(oracle):
    ours = oracle.drafter.state_dict()
    assert set(ours) == set(oracle.tensors)
    for name, tensor in oracle.tensors.items():
        assert torch.equal(ours[name], tensor), name


def test_the_notes_say_what_was_assumed_and_the_config_is_the_file_s(oracle):
    config = oracle.drafter.config
    assert (config.fc_norm, config.norm_output) == (oracle.fc_norm, True)
    assert (config.aux_layers, config.rope_theta, config.own_embed, config.lm_head) == ((2, 6, 9), 50000.0, True, "own")
    (note,) = [words for words in oracle.drafter.notes if words.startswith("aux_layers")]
    assert any(words.startswith("own_embed") for words in oracle.drafter.notes)  # SGLang would take the target's
    assert "[1, 5, 8]" in note
    assert "[2, 6, 9]" in note


@torch.no_grad()
def test_fusion_logits_and_feedback_at_every_depth(oracle):
    drafter, expected = oracle.drafter, oracle.expected
    depths, rows, _ = expected["ttt_logits"].shape
    assert depths == 5
    ids = expected["ids_shifted"]
    aux = expected["aux"].view(1, rows, 3, -1)
    close(drafter.fuse(aux)[0], expected["fused"])
    state = drafter.first(ids[None], aux, every_row(rows))
    for depth in range(depths):
        close(drafter.logits(state.normed)[0], expected["ttt_logits"][depth])
        close(state.feedback[0], expected["ttt_feedback"][depth])
        shifted = torch.cat([ids[depth + 1 :], ids.new_zeros(depth + 1)])
        state = drafter.next(state, shifted[None])


@torch.no_grad()
def test_both_executors_of_the_package_reach_the_same_numbers(oracle):
    """Context rows one by one, as a live chain sees them, then the text's own tokens as if they had been drafted."""
    from driftlab.draft import Chain

    drafter, expected = oracle.drafter, oracle.expected
    ids, rows = expected["ids_shifted"], len(expected["ids_shifted"])
    aux = expected["aux"].view(1, rows, 3, -1)
    session = Chain(drafter, prompt_lengths=[1])
    for row in range(rows - 5):
        session.extend(ids[None, row : row + 1], aux[:, row : row + 1])
        state = session._state
        for depth in range(5):
            close(drafter.logits(state.normed)[0, 0], expected["ttt_logits"][depth, row])
            state = drafter.next(state, ids[None, row + depth + 1 : row + depth + 2])
