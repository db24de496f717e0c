"""Numbers that are not finite are told with their place, and a vocabulary of two sampled by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from conftest import TinyTokenizer, tiny_llama

from driftlab import DriftlabError, Target, accept, all_starts, simulate, speculate
from driftlab.trees import StaticTree


@pytest.fixture
def faulty():
    """A target whose head has one row that is not finite; its states are sound."""

    def make(value: float) -> Target:
        model = tiny_llama()
        with torch.no_grad():
            model.lm_head.weight[17, 3] = value
        return Target(model, TinyTokenizer(), name="faulty", aux_layers=(1, 3, 5))

    return make


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_head_that_is_not_finite_is_not_recorded(faulty, value, tmp_path):
    """An arg max of NaN is a token like any other: every text would be made of it."""
    with pytest.raises(
        DriftlabError, match=r"logit of token 17 is not finite, though its states are: .*lm_head\.weight"
    ):
        faulty(value).record(["abc"], max_new_tokens=3, template=False, out=tmp_path / "r")
    assert not list((tmp_path / "r").glob("piece-*"))


@pytest.mark.parametrize("how", [{"depth": 2}, {"tree": StaticTree.chains(2, 2)}])
def test_a_head_that_is_not_finite_is_no_live_text(faulty, make_drafter, how):
    with pytest.raises(DriftlabError, match="the target's logits after position 0 are not finite"):
        speculate(faulty(float("nan")), make_drafter(), [1, 5, 9], max_new_tokens=5, **how)


def test_logits_that_go_wrong_within_a_tree_are_told(tiny_target, make_drafter, monkeypatch):
    plain = tiny_target.adapter.hidden_tree
    monkeypatch.setattr(tiny_target.adapter, "hidden_tree", lambda *given: plain(*given) * float("nan"))
    with pytest.raises(DriftlabError, match="the target's logits after position 3 are not finite"):
        speculate(tiny_target, make_drafter(), [1, 5, 9], max_new_tokens=5, tree=StaticTree.chains(2, 2))


def test_a_drafts_probability_that_is_not_finite_is_told_with_its_place(varied_target, make_drafter, tmp_path):
    how = {"max_new_tokens": 6, "temperature": 1.0, "template": False}
    text = varied_target.record(["abc", "q"], **how, out=tmp_path / "r")
    draft = all_starts(make_drafter(target=text), text, 2, temperatures=(1.0,), top=4)
    wrong = draft.logits.map(torch.clone)
    wrong.text[1, 0, 1] = float("nan")
    row, name = text.entries[1].prompt_length - 1, text.entries[1].id
    with pytest.raises(DriftlabError, match=rf"text is not finite: sequence '{name}', row {row}, depth 2"):
        accept(dataclasses.replace(draft, logits=wrong), text, rule="rejection")


def test_a_sampled_vocabulary_of_two_by_hand(tmp_path):
    """A drafter whose head is 0 draws either token with 1/2, K = 1: a text token of probability p is kept with min(1, 1 / 2p).

    The text is tokens 0 0 0 1, the last one EOS: rounds start after the first; with c_i the chance to keep token i of it,
    v_1 = 1, v_2 = 1 - c_1 (a round that keeps one skips the next start), v_3 = v_1 c_1 + v_2 (1 - c_2).
    """
    from test_torture import TwoWords

    from driftlab import VARIANTS, Drafter

    model = tiny_llama(vocab_size=2, eos_token_id=1, bos_token_id=0, scale=1.0)
    target = Target(model, TwoWords(), name="two", aux_layers=(1, 3, 5))
    how = {"max_new_tokens": 8, "template": False, "temperature": 1.0, "own_answers": True, "out": tmp_path / "r"}
    text = target.record(["a"], answers=[[0, 0, 0, 1]], **how)
    drafter = Drafter(VARIANTS["eagle3"].for_target(text, lm_head="own"), text).eval()
    with torch.no_grad():
        drafter.lm_head.weight.zero_()
    draft = all_starts(drafter, text, 1, temperatures=(1.0,), top=2)
    found = simulate(accept(draft, text, rule="rejection"))
    tokens = text.tokens(0)
    p = model(tokens[None]).logits[0].softmax(-1)[range(4), tokens[1:]].tolist()
    c1, c2, c3 = (min(1.0, 0.5 / chance) for chance in p[1:])
    v1, v2 = 1.0, 1 - c1
    v3 = v1 * c1 + v2 * (1 - c2)
    assert float(found.verify_rounds[0]) == pytest.approx(v1 + v2 + v3, abs=1e-5)
    # two tokens where one is kept, one where none is; the kept EOS ends the text without a bonus
    assert float(found.emitted[0]) == pytest.approx(v1 * (1 + c1) + v2 * (1 + c2) + v3, abs=1e-5)
    assert 0 < c3 <= 1
