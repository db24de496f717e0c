"""Interventions compose, undo themselves, are named and read back, and act alike in every executor."""

import dataclasses

import pytest
import torch
from builders import own_tables, random_batch
from test_blocks import KINDS

DEPTH = 4
TEXTS = (
    *(
        "noise:hidden:0.25",
        "noise:embedding:1:seed=7@2-3",
        "magnitude:fused",
        "magnitude:depth1@3-",
        "magnitude:0.125@2",
    ),
    *("direction", "direction:seed=3", "held", "aux:2:0", "aux:1:0.5:where=normed", "gain", "gain@1"),
    *("pin:sink", "pin:equal:least=0.2", "pin:sink:state=rescaled:layers=0,1@2,4", "sink:drop", "sink:value@2-"),
    *("own:older", "own:all@3", "logn:2048", "window:256", "window:64:carried=sink"),
    "window:64:carried=12:positions=renumbered:layers=1",
)
TOGETHER = (
    ("noise:hidden:0.5", "noise:embedding:0.3", "magnitude:fused"),
    ("held@3-", "aux:0:3", "gain", "sink:value"),
    ("pin:sink:state=rescaled:least=0.01", "logn:4", "window:4:carried=sink"),
    ("pin:equal:least=0.01", "own:older", "sink:value:layers=0"),
    ("window:4:carried=3:positions=renumbered", "own:older", "pin:sink:least=0.001", "magnitude:depth1"),
    ("sink:drop@2-", "own:all", "noise:embedding:0.5@2-3", "magnitude:2"),
)
SHAPES = {
    "GQA": {"norm_output": False, "draft_vocab_size": 20},
    "two layers": {"num_hidden_layers": 2, "norm_output": False},
    "three layers, gate": {"num_hidden_layers": 3, "attention_gate": True, "qk_norm": True, "rotary_dim": 4},
    "MLA": KINDS["MLA, yarn, window"],
    "MTP": KINDS["MTP"],
    "twice_normed": KINDS["twice_normed"],
}


def drafter_of(shape):
    values = SHAPES[shape]
    drafter = own_tables(**(values() if callable(values) else values)).double()
    with torch.no_grad():
        for layer in drafter.layers:
            if hasattr(layer.self_attn, "q_proj"):
                layer.self_attn.q_proj.weight.mul_(2)
    return drafter


def batch_of(lengths=(14, 9), prompts=(6, 3), **options):
    batch = random_batch(lengths, prompts, width=32, **options).to("cpu", torch.float64)
    generator = torch.Generator().manual_seed(9)
    last = 3 * torch.randn(batch.last_hidden.shape, generator=generator, dtype=torch.float64)
    return dataclasses.replace(batch, last_hidden=last)


def parsed(texts):
    from driftlab.interventions import parse_intervention

    return [parse_intervention(text) for text in texts]


def seen(drafter, texts, run):
    """What ``run()`` returns, and the feedback of every depth, under interventions."""
    from driftlab.interventions import intervened

    feedback = {}

    def keep(value, hook):
        feedback.setdefault(hook.depth, []).append(value.clone())

    with intervened(drafter, parsed(texts)), drafter.hooks([("hook_feedback", keep)], read_only=True):
        result = run()
    return result, feedback


def is_bare(drafter):
    hooked = any(module._forward_hooks or module._forward_pre_hooks for module in drafter.modules())
    return not hooked and all(layer.self_attn.steering == () for layer in drafter.layers)


@pytest.mark.parametrize("text", TEXTS)
def test_a_key_holds_every_setting_and_is_read_back(text):
    from driftlab.interventions import parse_intervention

    intervention = parse_intervention(text)
    assert intervention.key == text
    assert parse_intervention(intervention.key) == intervention


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nois:hidden:1", "Write one of: noise:hidden:ALPHA"),
        ("", "Write one of"),
        ("noise:sideways:1", '"hidden" or "embedding"'),
        ("noise:hidden:-1", ">= 0"),
        ("noise:hidden", "noise:hidden:ALPHA"),
        ("noise:hidden:1:2", "noise:hidden:ALPHA"),
        ("noise:hidden:1:sed=2", "there is no setting sed"),
        ("noise:hidden:1:seed=2:seed=2", "noise:hidden:ALPHA"),
        ("noise:hidden:1@0", "begin with 1"),
        ("noise:hidden:1@4-2", "smaller end"),
        ("noise:hidden:1@x", "depths"),
        ("held@1", "depth 1 has no feedback"),
        ("magnitude:fusion", '"fused", "depth1" or a number'),
        ("magnitude:0", '"fused", "depth1" or a number'),
        ("aux:0:1@2-", "only depth 1"),
        ("aux:-1:1", "count from 0"),
        ("pin:bos", '"sink" or "equal"'),
        ("pin:sink@1-", "depth 1 is what the mass is held at"),
        ("pin:sink:least=0", "between 0 and 1"),
        ("sink:key", '"drop"'),
        ("own:some", '"older"'),
        ("logn:1", "2 at least"),
        ("window:0", "at least 1"),
        ("window:8:carried=bos", "at least 1"),
        ("window:8:positions=moved", "renumbered"),
        ("hook:layers.0", "hook:MODULE:PACKAGE.FUNCTION"),
        ("hook:layers.0:torch.no_such_thing", "no such function"),
    ],
)
def test_a_text_that_is_none_is_refused_with_the_form(text, words):
    from driftlab.errors import DriftlabError
    from driftlab.interventions import parse_intervention

    with pytest.raises(DriftlabError) as error:
        parse_intervention(text)
    assert words in str(error.value)


def test_the_list_of_forms_has_every_kind():
    from driftlab.interventions import INTERVENTIONS, forms

    assert len(INTERVENTIONS) == 12
    assert all(f"{kind}" in forms() for kind in INTERVENTIONS)


def test_depths_are_read_as_spans_and_numbers():
    from driftlab.interventions import GainRemoved, Noise

    def acts(depths):
        return [depth for depth in range(1, 7) if Noise("hidden", 1, depths=depths).acts_at(depth)]

    assert acts("2-") == [2, 3, 4, 5, 6]
    assert acts("2-4") == [2, 3, 4]
    assert acts("1, 3") == [1, 3]
    assert acts(5) == [5]
    assert acts("1,4-") == [1, 4, 5, 6]
    assert GainRemoved().acts_at(1)
    assert Noise("hidden", 1, depths=5) == Noise("hidden", 1, depths="5")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("texts", TOGETHER, ids=" ".join)
def test_chain_and_all_starts_are_one_recursion_under_interventions(shape, texts):
    from driftlab.draft import Chain, all_starts, chain, read_states

    drafter, batch = drafter_of(shape), batch_of()
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    plain, free = seen(drafter, (), lambda: all_starts(drafter, batch, DEPTH, feed="own"))
    every, wide = seen(drafter, texts, lambda: all_starts(drafter, batch, DEPTH, feed="own"))
    assert any(not torch.allclose(wide[k][0], free[k][0]) for k in wide)
    rows = [[8, 4], [5, 7]]
    for pair in rows:
        tokens, narrow = seen(drafter, texts, lambda pair=pair: chain(drafter, batch, pair, DEPTH))
        for sequence, row in enumerate(pair):
            place = int((every.rows[sequence] == row).nonzero()[0])
            assert torch.equal(tokens[sequence], every.tokens[sequence, place])
            for depth in range(1, DEPTH + 1):
                want = wide[depth][0][sequence, place]
                assert torch.allclose(narrow[depth][0][sequence, 0], want, rtol=1e-9, atol=1e-11), depth

    def live():
        """Rows come a few at a time, and a draft is made after each."""
        session = Chain(drafter, prompt_lengths=[6], ids=batch.ids[:1])
        states, drafts = read_states(drafter, batch)[:1], {}
        for first, last in ((0, 6), (6, 7), (7, 10)):
            session.extend(batch.tokens[:1, first + 1 : last + 1], states[:, first:last])
            drafts[last - 1] = session.draft(DEPTH)
        return drafts

    drafts, narrow = seen(drafter, texts, live)
    for number, (row, tokens) in enumerate(drafts.items()):
        assert torch.equal(tokens[0], every.tokens[0, row - 5])
        want = wide[DEPTH][0][0, row - 5]
        assert torch.allclose(narrow[DEPTH][number][0, 0], want, rtol=1e-9, atol=1e-11)
    assert is_bare(drafter)
    assert all(torch.equal(value, before[name]) for name, value in drafter.state_dict().items())
    again, after = seen(drafter, (), lambda: all_starts(drafter, batch, DEPTH, feed="own"))
    assert torch.equal(again.tokens, plain.tokens)
    assert all(torch.equal(after[k][0], free[k][0]) for k in free)


@pytest.mark.parametrize("texts", [*TOGETHER, ("direction:seed=2",)], ids=" ".join)
def test_batching_changes_nothing(texts):
    from driftlab.draft import all_starts

    drafter, batch = drafter_of("two layers"), batch_of()
    for feed in ("text", "own"):
        both, wide = seen(drafter, texts, lambda feed=feed: all_starts(drafter, batch, DEPTH, feed=feed))
        for at in (0, 1):
            length = int(batch.lengths[at])
            alone = dataclasses.replace(
                batch,
                **{
                    name: getattr(batch, name)[at : at + 1, :length] for name in ("tokens", "aux", "last_hidden", "lse")
                },
                **{name: getattr(batch, name)[at : at + 1] for name in ("lengths", "prompt_lengths", "ids", "finish")},
            )
            one, narrow = seen(
                drafter, texts, lambda alone=alone, feed=feed: all_starts(drafter, alone, DEPTH, feed=feed)
            )
            count = one.tokens.shape[1]
            assert torch.equal(one.tokens[0], both.tokens[at, :count])
            for depth in range(1, DEPTH + 1):
                assert torch.allclose(narrow[depth][0][0], wide[depth][0][at, :count], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "texts",
    [
        ("noise:hidden:0.5", "magnitude:fused"),
        ("pin:sink:state=rescaled:least=0.001", "window:5:carried=sink:positions=renumbered", "own:older"),
        ("noise:embedding:1@2-",),
    ],
    ids=" ".join,
)
def test_live_rounds_draft_what_replay_drafts_at_their_rows(
    tiny_target, tiny_trajectory, make_drafter, monkeypatch, texts
):
    from driftlab.draft import Chain, all_starts
    from driftlab.interventions import intervened
    from driftlab.speculation import speculate

    drafter = make_drafter("eagle3")
    batch = next(iter(tiny_trajectory.batches(10_000)))
    batch = dataclasses.replace(
        batch, ids=("",) * len(batch)
    )  # a live run's sequence has no name, and noise goes by it
    drafted = {}
    original = Chain.draft
    monkeypatch.setattr(Chain, "draft", lambda self, depth: drafted.setdefault(self.rows - 1, original(self, depth)))
    prompt = batch.tokens[0, : int(batch.prompt_lengths[0])].tolist()
    with intervened(drafter, parsed(texts)):
        replayed = all_starts(drafter, batch, 3, feed="own")
        speculate(tiny_target, drafter, prompt, depth=3, max_new_tokens=10)
    assert len(drafted) >= 4
    for row, tokens in drafted.items():
        place = int((replayed.rows[0] == row).nonzero()[0])
        assert torch.equal(tokens[0], replayed.tokens[0, place])


def test_trees_of_one_path_are_chains_under_interventions():
    from driftlab.draft import all_starts
    from driftlab.interventions import intervened
    from driftlab.trees import StaticTree, tree_all_starts

    drafter, batch = drafter_of("two layers"), batch_of()
    tree = StaticTree(((0,), (1,), (0, 0), (1, 0), (0, 0, 0), (1, 0, 0)))
    for texts in (*TOGETHER, ()):
        with intervened(drafter, parsed(texts)):
            chains = all_starts(drafter, batch, 3, feed="own")
            grown = tree_all_starts(drafter, batch, tree)
        path = [tree.paths.index(node) for node in ((0,), (0, 0), (0, 0, 0))]
        assert torch.equal(grown.tokens[:, :, path][chains.valid], chains.tokens[chains.valid]), texts


def test_order_of_attention_interventions_does_not_matter():
    from driftlab.draft import all_starts

    drafter, batch = drafter_of("GQA"), batch_of()
    texts = ["pin:sink:least=0.001", "own:older", "window:5:carried=2:positions=renumbered", "logn:3", "sink:value"]
    runs = [
        seen(drafter, order, lambda: all_starts(drafter, batch, DEPTH, feed="text"))[1]
        for order in (texts, texts[::-1], texts[2:] + texts[:2])
    ]
    for other in runs[1:]:
        assert all(torch.equal(runs[0][k][0], other[k][0]) for k in other)


def test_states_are_changed_in_the_order_of_entry():
    from driftlab.draft import all_starts
    from driftlab.probes import rms

    drafter, batch = drafter_of("GQA"), batch_of()
    run = {
        order: seen(drafter, order, lambda: all_starts(drafter, batch, 2, feed="text"))[1][1][0]
        for order in (("noise:hidden:1@2", "magnitude:2"), ("magnitude:2", "noise:hidden:1@2"))
    }
    sizes = [rms(value) for value in run.values()]
    assert torch.allclose(sizes[0], torch.full_like(sizes[0], 2.0), rtol=1e-12)
    assert bool(((sizes[1] - 2).abs() > 0.1).any())


@pytest.mark.parametrize("texts", [*TOGETHER, ("gain", "pin:equal", "hook:norm:torch.nan_to_num")], ids=" ".join)
def test_an_error_inside_the_block_leaves_nothing_behind(texts):
    from driftlab.draft import all_starts
    from driftlab.interventions import TorchHook, intervened

    def fail(value, hook):
        if hook.depth == 3:
            raise RuntimeError("inside")

    drafter, batch = drafter_of("three layers, gate"), batch_of()
    laid = [TorchHook("norm", lambda *_: None) if "hook:" in text else parsed([text])[0] for text in texts]
    broken = drafter.hooks([("hook_normed", fail)], read_only=True)
    with pytest.raises(RuntimeError, match="inside"), intervened(drafter, laid), broken:
        all_starts(drafter, batch, DEPTH)
    assert is_bare(drafter)


def test_one_that_cannot_be_laid_on_takes_off_those_before_it():
    from driftlab.errors import DriftlabError
    from driftlab.interventions import intervened

    drafter = drafter_of("GQA")
    for text, words in (("sink:drop:layers=1", "layer 1"), ("aux:3:1", "reads 3 states")):
        with pytest.raises(DriftlabError, match=words), intervened(drafter, parsed(["pin:sink", "held", text])):
            pytest.fail("was laid on")
        assert is_bare(drafter)
    headless = own_tables(head_norm=False, norm_output=False)
    with pytest.raises(DriftlabError, match="no final norm"), intervened(headless, parsed(["gain"])):
        pytest.fail("was laid on")


def test_blocks_may_end_in_any_order_and_one_record_is_used_twice():
    from driftlab.draft import all_starts
    from driftlab.interventions import SinkAblation, key_of

    drafter, batch = drafter_of("GQA"), batch_of()
    ablation, other = SinkAblation("value"), parsed(["window:4"])[0]
    first, second = ablation.on(drafter), other.on(drafter)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    steering = drafter.layers[0].self_attn.steering
    assert len(steering) == 1
    left = all_starts(drafter, batch, 3, feed="own")
    second.__exit__(None, None, None)
    with other.on(drafter):
        assert torch.equal(all_starts(drafter, batch, 3, feed="own").tokens, left.tokens)
    assert is_bare(drafter)
    assert key_of([ablation, other]) == "sink:value + window:4"
    assert key_of([]) == ""


@pytest.mark.parametrize("texts", [*TOGETHER, ("direction",)], ids=" ".join)
def test_half_precision_runs_and_stays_half(make_drafter, tiny_trajectory, texts):
    from driftlab.draft import all_starts

    drafter = make_drafter("eagle3").to(torch.bfloat16)
    _, feedback = seen(drafter, texts, lambda: all_starts(drafter, tiny_trajectory, 3, feed="own"))
    assert all(
        value.dtype == torch.bfloat16 and bool(value.isfinite().all()) for k in feedback for value in feedback[k]
    )


NEUTRAL = (
    *("noise:hidden:0", "noise:embedding:0", "magnitude:depth1@2", "held@2", "aux:1:1", "window:14", "window:99"),
    *(
        "window:11:carried=3",
        "window:11:carried=3:positions=renumbered",
        "logn:20",
        "own:older@2",
        "pin:sink:least=0.999999",
    ),
    *("sink:drop@9", "pin:equal:least=0.999999", "noise:hidden:3@9", "noise:embedding:3@9", "gain@9", "direction@9"),
)


@pytest.mark.parametrize("text", NEUTRAL)
def test_settings_that_say_nothing_change_no_bit(text):
    from driftlab.draft import all_starts

    drafter = own_tables(norm_output=False)
    batch = random_batch((11, 9), (6, 3), width=32)
    run = lambda: all_starts(drafter, batch, DEPTH, feed="own")  # noqa: E731
    plain, intervened = seen(drafter, (), run)[1], seen(drafter, (text,), run)[1]
    assert all(torch.equal(plain[k][0], intervened[k][0]) for k in plain)


def test_gain_of_one_removed_changes_no_bit():
    from driftlab.draft import all_starts

    drafter, batch = own_tables(), random_batch((11, 9), (6, 3), width=32)
    run = lambda: all_starts(drafter, batch, DEPTH, feed="own")  # noqa: E731
    with torch.no_grad():
        drafter.norm.weight.fill_(1)
    plain, intervened = seen(drafter, (), run)[1], seen(drafter, ("gain",), run)[1]
    assert all(torch.equal(plain[k][0], intervened[k][0]) for k in plain)


@pytest.mark.parametrize("text", [text for text in TEXTS if "layers=" not in text and "aux" not in text])
def test_neither_fused_steps_nor_stored_drafts_stand_in(text):
    from driftlab.draft import Chain
    from driftlab.fused import FusedChain
    from driftlab.stored import _altered

    drafter, batch = own_tables(), random_batch((9,), (6,), width=32)
    fused = FusedChain(drafter)

    def state():
        session = Chain(drafter, prompt_lengths=[6], backend="torch")
        session.extend(batch.tokens[:, 1:7], batch.aux[:, :6])
        return session.take()

    before = state()
    assert fused.refuses(before) == ""
    with parsed([text])[0].on(drafter):
        assert fused.refuses(before) != ""
        assert _altered(drafter)
    assert fused.refuses(before) == ""
    assert not _altered(drafter)


def test_an_intervention_needs_to_be_told_the_starts():
    from driftlab.errors import DriftlabError
    from driftlab.segments import Starts

    drafter, batch = drafter_of("GQA"), batch_of()
    starts: Starts = batch.starts
    with torch.no_grad(), parsed(["noise:hidden:1"])[0].on(drafter), pytest.raises(DriftlabError, match="hook_starts"):
        drafter.first(batch.tokens[:, 1:], batch.aux[:, :-1], starts)


@pytest.mark.parametrize("text", ["pin:sink", "held", "magnitude:fused", "magnitude:depth1@3-"])
def test_an_intervention_entered_between_two_depths_says_so(text):
    from driftlab.draft import Chain
    from driftlab.errors import DriftlabError

    drafter, batch = drafter_of("GQA"), batch_of()
    session = Chain(drafter, prompt_lengths=[6])
    session.extend(batch.tokens[:1, 1:9], batch.aux[:1, :8])
    with parsed([text])[0].on(drafter), pytest.raises(DriftlabError):
        session.draft(3)
