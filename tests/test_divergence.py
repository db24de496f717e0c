"""Where two texts part: the place, the margin against logits taken here, and what is called a tie in which precision."""

import math

import pytest
import torch

from driftlab import DriftlabError, Target, first_divergence

PROMPT = [1, 7, 9, 20, 31]


@pytest.fixture(scope="module")
def tied():
    """A target whose tokens 10 and 11 have nearly one row in the head, and 12 another, in float32 and bfloat16."""
    from conftest import TinyTokenizer, tiny_llama

    made = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny_llama()
        with torch.no_grad():
            state = model.model(torch.tensor([PROMPT])).last_hidden_state[0, -1]
            model.lm_head.weight[10] = 8 * state / state.norm()  # the most probable token after the prompt
            model.lm_head.weight[11] = model.lm_head.weight[10] * (1 - 2**-9)
            model.lm_head.weight[20], model.lm_head.weight[21] = -model.lm_head.weight[10], -model.lm_head.weight[11]
        made[dtype] = Target(model.to(dtype), TinyTokenizer(), name="tied", aux_layers=(1, 3, 5))
    return made


def margin(target, text, a, b):
    logits = target.adapter.model(torch.tensor([text])).logits[0, -1].tolist()
    assert max(logits) > 2
    return (max(logits) - min(logits[a], logits[b])) / max(logits)


def test_equal_texts_do_not_part(tied):
    assert first_divergence(tied[torch.float32], PROMPT, PROMPT) is None


def test_the_first_place_and_its_margin(tied):
    target = tied[torch.float32]
    found = first_divergence(target, [*PROMPT, 12, 3, 4], [*PROMPT, 10, 5])
    assert (found.place, found.tokens) == (len(PROMPT), (12, 10))
    assert found.margin == pytest.approx(margin(target, PROMPT, 12, 10), rel=1e-4)
    assert not found.tie
    assert "position 5: token 12 and token 10" in found.words
    assert "a fault" in found.words
    other = first_divergence(target, [*PROMPT, 10, 5], [*PROMPT, 12, 3, 4])
    assert (other.tokens, other.margin) == ((10, 12), found.margin)


def test_what_is_a_tie_depends_on_the_precision(tied):
    texts = [*PROMPT, 10], [*PROMPT, 11]
    wide, narrow = (first_divergence(tied[dtype], *texts) for dtype in (torch.float32, torch.bfloat16))
    assert 2**-13 < wide.margin < 2**-8
    assert "a fault" in wide.words
    assert not wide.tie
    assert narrow.tie
    assert "a numerical tie" in narrow.words


def test_two_unlikely_tokens_are_no_tie_however_near_each_other(tied):
    found = first_divergence(tied[torch.bfloat16], [*PROMPT, 20], [*PROMPT, 21])
    assert found.margin > 1
    assert not found.tie


def test_a_text_that_ends_early_is_told(tied):
    found = first_divergence(tied[torch.float32], [*PROMPT, 12], PROMPT)
    assert (found.place, found.tokens) == (5, (12, None))
    assert math.isnan(found.margin)
    assert not found.tie
    assert "token 12 and the end" in found.words
    with pytest.raises(DriftlabError, match="first token"):
        first_divergence(tied[torch.float32], [1, 2], [2, 2])
