"""Every row of every probe against means taken by hand over the naive recursion's attention weights and states."""

import math
from collections import defaultdict

import pytest
import torch
from builders import own_tables, random_batch
from naive import fuse, naive_chain

DEPTH, WINDOWS, NULL_DEPTH = 5, (2, 4, 30), 4
SHAPES = ((14, 5), (14, 1), (8, 6))  # tokens, prompt tokens: as many starts as rows, after one token, and 9 and 2
KEYS = ["prompt", "layer", "head", "depth", "quantity", "window"]


def float64_drafter(**overrides):
    drafter = own_tables(draft_vocab_size=20, **overrides).double()
    with torch.no_grad():
        for layer in drafter.layers:
            layer.self_attn.q_proj.weight.mul_(2)  # attention far from uniform
    return drafter


def batch_of(*shapes, sinks=(0,), **options):
    lengths, prompts = zip(*shapes, strict=True)
    return random_batch(lengths, prompts, width=32, sinks=sinks, **options).to("cpu", torch.float64)


def by_hand(drafter, batch, depth):
    """{(prompt, layer, head, depth, quantity, window): [values]} of every start, from the naive recursion."""
    values = defaultdict(list)
    most = int((batch.lengths - batch.prompt_lengths).max())
    for name, tokens, aux, length, prompt in zip(
        batch.ids, batch.tokens, batch.aux, batch.lengths.tolist(), batch.prompt_lengths.tolist(), strict=True
    ):
        rows = range(prompt - 1, length - 1)
        chains = {row: naive_chain(drafter, tokens, aux, row, depth) for row in rows}
        for row, steps in chains.items():
            for k, step in enumerate(steps, 1):
                values[name, -1, -1, k, "rms_feedback", 0].append(rms(step["feedback"]))
                values[name, -1, -1, k, "rms_resid", 0].append(rms(step["resid"]))
                for layer, by_head in enumerate(step["weights"]):
                    for head, p in enumerate(by_head):
                        key = (name, layer, head, k)
                        for quantity, value in masses(p, row, prompt, batch.sinks).items():
                            seen = quantity != "mass_sink" or any(sink <= row for sink in batch.sinks)
                            values[*key, quantity, 0].extend([value] * seen)
                        for window in WINDOWS:
                            values[*key, "recent", window].append(float(p[-window:].sum()))
                        entropy = -sum(float(x) * math.log(float(x)) for x in p)
                        values[*key, "entropy", 0].append(entropy)
                        if len(p) > 1:
                            values[*key, "entropy_relative", 0].append(entropy / math.log(len(p)))
                        if 2 <= k <= NULL_DEPTH and k - 1 < most:
                            null = values[*key, "mass_self_null", 0]  # stays empty where no start reaches so far
                            if row + k - 1 in chains:
                                ahead = chains[row + k - 1][0]["weights"][layer][head]
                                null.append(float(ahead[-(k - 1) :].sum()))
            states = aux[row].double()
            for i, state in enumerate(states):
                values[name, -1, -1, 1, f"rms_aux{i}", 0].append(rms(state))
            weight = {key: tensor.double() for key, tensor in drafter.state_dict().items()}
            values[name, -1, -1, 1, "rms_fused", 0].append(rms(fuse(drafter.config, weight, states)))
    return values


def masses(p, row, prompt, sinks):
    """Split the weights on keys 0..row and on the chain's own keys."""
    split = {"mass_sink": 0.0, "mass_prompt": 0.0, "mass_context": 0.0, "mass_self": 0.0}
    for position, x in enumerate(p.tolist()):
        if position > row:
            split["mass_self"] += x
        elif position in sinks:
            split["mass_sink"] += x
        elif position < prompt - 1:
            split["mass_prompt"] += x
        else:
            split["mass_context"] += x
    return split


def rms(x):
    return math.sqrt(float((x * x).sum()) / len(x))


def rows_of(frame):
    return {tuple(row[key] for key in KEYS): (row["value"], row["n"]) for row in frame.to_dict("records")}


def same_rows(frame, values):
    ours = rows_of(frame)
    assert set(ours) == set(values)
    for key, expected in values.items():
        value, count = ours[key]
        assert count == len(expected), key
        if expected:
            assert value == pytest.approx(sum(expected) / len(expected), rel=1e-7, abs=1e-9), key
        else:
            assert math.isnan(value), key


def is_norm(key):
    return key[4].startswith("rms")


def probed(drafter, batch, depth=DEPTH, feed="own"):
    from driftlab import AttentionMass, StateNorm, all_starts

    with AttentionMass(drafter, recent=WINDOWS, null_depth=NULL_DEPTH) as mass, StateNorm(drafter) as norm:
        all_starts(drafter, batch, depth, feed=feed)
    return mass, norm


# ---- the numbers


@pytest.mark.parametrize(
    ("overrides", "sinks"),
    [
        ({}, (0,)),
        ({"fc_norm": False, "norm_output": False, "num_key_value_heads": 4}, (0, 2)),
        ({"num_hidden_layers": 2, "num_key_value_heads": 1}, (0,)),
        ({"num_hidden_layers": 2, "norm_output": False}, ()),
    ],
)
def test_every_row_is_the_mean_by_hand(overrides, sinks):
    """Also: padded starts count nowhere, four heads in repeat_kv's order, prompts of one token beside longer ones."""
    drafter = float64_drafter(**overrides)
    batch = batch_of(*SHAPES, sinks=sinks)
    mass, norm = probed(drafter, batch)
    values = by_hand(drafter, batch, DEPTH)
    same_rows(mass.frame(), {key: value for key, value in values.items() if not is_norm(key)})
    same_rows(norm.frame(), {key: value for key, value in values.items() if is_norm(key)})
    assert {key[2] for key in values if not is_norm(key)} == {0, 1, 2, 3}
    assert any(value == [] for value in values.values())


def test_the_four_masses_sum_to_one_and_self_is_exactly_zero_at_depth_1():
    drafter = float64_drafter(num_hidden_layers=2)
    frame = probed(drafter, batch_of(*SHAPES))[0].frame()
    names = ["mass_sink", "mass_prompt", "mass_context", "mass_self"]
    parts = frame[frame["quantity"].isin(names)]
    sums = parts.groupby(["prompt", "layer", "head", "depth"])["value"].agg(["sum", "size"])
    assert (sums["size"] == 4).all()
    assert sums["sum"].to_list() == pytest.approx([1.0] * len(sums), abs=1e-12)
    own = frame[frame["quantity"] == "mass_self"]
    assert (own.loc[own["depth"] == 1, "value"] == 0).all()
    assert (own.loc[own["depth"] > 1, "value"] > 0).all()


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_start_whose_window_leaves_the_sink_out_is_not_counted_with_a_mass_of_0(backend):
    """Answer rows 2..5, window 4: at depth k a start at row t sees the sink iff t + k - 1 < 4 (29777 of transformers)."""
    from driftlab import AttentionMass, all_starts, chain

    drafter = own_tables(draft_vocab_size=20, windows=(4,))
    batch = random_batch((7,), (3,), width=32)
    with AttentionMass(drafter) as probe:
        all_starts(drafter, batch, 3, feed="own", backend=backend)
    rows = {key: value for key, value in rows_of(probe.frame()).items() if key[4] == "mass_sink" and key[2] == 0}
    assert [rows["p:0", 0, 0, k, "mass_sink", 0][1] for k in (1, 2, 3)] == [2, 1, 0]
    assert rows["p:0", 0, 0, 2, "mass_sink", 0][0] > 0.01
    assert math.isnan(rows["p:0", 0, 0, 3, "mass_sink", 0][0])
    with AttentionMass(drafter) as one:
        chain(drafter, batch, [2], 3, backend=backend)
    counts = rows_of(one.frame())
    assert [counts["p:0", 0, 0, k, "mass_sink", 0][1] for k in (1, 2, 3)] == [1, 1, 0]
    assert counts["p:0", 0, 0, 2, "mass_sink", 0][0] == pytest.approx(rows["p:0", 0, 0, 2, "mass_sink", 0][0], rel=1e-5)


def test_recent_is_defined_at_depth_1_and_counts_own_keys_first_deeper():
    """recent(w) at depth k <= w covers all own keys; recent(k - 1) is SELF itself."""
    from driftlab import AttentionMass, all_starts

    drafter, batch = float64_drafter(), batch_of((14, 5))
    with AttentionMass(drafter, recent=(1, 2, 3, 4)) as probe:
        all_starts(drafter, batch, 5, feed="own")
    rows = rows_of(probe.frame())
    for head in range(4):
        for k in (2, 3, 4, 5):
            own = rows["p:0", 0, head, k, "mass_self", 0][0]
            assert rows["p:0", 0, head, k, "recent", k - 1][0] == pytest.approx(own, abs=1e-12)
        assert 0 < rows["p:0", 0, head, 1, "recent", 1][0] < rows["p:0", 0, head, 1, "recent", 4][0] < 1


def test_the_null_line_is_what_self_would_be_if_drafts_were_rows_of_the_text():
    """Uniform attention: row t + k - 1 sees t + k keys, of which the last k - 1 are relabelled, and so does SELF."""
    from driftlab import AttentionMass, all_starts

    drafter, batch = float64_drafter(), batch_of((10, 4))
    with torch.no_grad():
        drafter.layers[0].self_attn.q_proj.weight.zero_()
    with AttentionMass(drafter) as probe:
        all_starts(drafter, batch, 4, feed="own")
    rows = rows_of(probe.frame())
    for k in (2, 3, 4):
        starts = [t for t in range(3, 9) if t + k - 1 <= 8]
        value, count = rows["p:0", 0, 0, k, "mass_self_null", 0]
        assert count == len(starts) == 7 - k
        assert value == pytest.approx(sum((k - 1) / (t + k) for t in starts) / len(starts), abs=1e-12)
        every = [(k - 1) / (t + k) for t in range(3, 9)]
        assert rows["p:0", 0, 0, k, "mass_self", 0] == (pytest.approx(sum(every) / 6, abs=1e-12), 6)
        assert rows["p:0", 0, 0, k, "entropy_relative", 0][0] == pytest.approx(1.0, abs=1e-7)


def test_the_null_line_ends_with_null_depth():
    from driftlab import AttentionMass, all_starts

    drafter, batch = float64_drafter(), batch_of((14, 5))
    for null_depth, depths in ((1, set()), (2, {2}), (16, {2, 3, 4, 5})):
        with AttentionMass(drafter, recent=(), null_depth=null_depth) as probe:
            all_starts(drafter, batch, 5, feed="own")
        frame = probe.frame()
        assert set(frame.loc[frame["quantity"] == "mass_self_null", "depth"]) == depths
        assert "recent" not in set(frame["quantity"])


@pytest.mark.parametrize("norm_output", [False, True])
def test_the_magnitude_report_is_a_loop_over_depths(norm_output):
    """TorchSpec#97. With norm_output the feedback's size stays within the gains."""
    from driftlab import StateNorm, all_starts

    drafter, batch = float64_drafter(norm_output=norm_output), batch_of((12, 7))
    with StateNorm(drafter) as probe:
        all_starts(drafter, batch, 8, feed="own")
    rows = rows_of(probe.frame())
    gains = drafter.norm.weight.detach()
    chains = [naive_chain(drafter, batch.tokens[0], batch.aux[0], row, 8) for row in range(6, 11)]
    bounded = []
    for k in range(1, 9):
        by_loop = [rms(chain[k - 1]["feedback"]) for chain in chains]
        value, count = rows["p:0", -1, -1, k, "rms_feedback", 0]
        assert (value, count) == (pytest.approx(sum(by_loop) / 5), 5)
        bounded.append(float(gains.min()) <= value <= float(gains.max()))
    assert all(bounded) == norm_output


def test_half_precision_is_summed_in_float32_or_wider():
    """The probe adds masses of bfloat16 drafters as float32: they still sum to 1."""
    from driftlab import AttentionMass, all_starts

    drafter = own_tables().bfloat16()
    batch = random_batch((200,), (20,), width=32)
    with AttentionMass(drafter) as probe:
        all_starts(drafter, batch, 3, feed="own")
    frame = probe.frame()
    parts = frame[frame["quantity"].isin(["mass_sink", "mass_prompt", "mass_context", "mass_self"])]
    sums = parts.groupby(["head", "depth"])["value"].sum()
    assert sums.to_list() == pytest.approx([1.0] * len(sums), abs=1e-5)
    assert set(frame["dtype"]) == {"bfloat16"}


# ---- batches, runs, executors


def test_a_padded_batch_gives_the_rows_of_its_sequences_alone():
    drafter = float64_drafter(num_hidden_layers=2)
    batch = batch_of(*SHAPES)
    together = [rows_of(probe.frame()) for probe in probed(drafter, batch)]
    for b in range(3):
        alone = [rows_of(probe.frame()) for probe in probed(drafter, single(batch, b))]
        for whole, part in zip(together, alone, strict=True):
            mine = {key: row for key, row in whole.items() if key[0] == f"p:{b}" and row[1]}
            part = {key: row for key, row in part.items() if row[1]}
            assert set(mine) == set(part)
            for key, (value, count) in mine.items():
                assert part[key] == (pytest.approx(value, rel=1e-9), count), key


def single(batch, b):
    import dataclasses

    length = int(batch.lengths[b])
    cut = {name: getattr(batch, name)[b : b + 1, :length] for name in ("tokens", "aux", "last_hidden", "lse")}
    more = {name: getattr(batch, name)[b : b + 1] for name in ("lengths", "prompt_lengths", "ids", "finish")}
    return dataclasses.replace(batch, **cut, **more)


def test_a_probe_adds_up_all_runs_inside_its_block():
    from driftlab import AttentionMass, StateNorm, all_starts

    drafter, batch = float64_drafter(), batch_of(*SHAPES)
    whole, norms = (rows_of(probe.frame()) for probe in probed(drafter, batch))
    with AttentionMass(drafter, recent=WINDOWS, null_depth=NULL_DEPTH) as mass, StateNorm(drafter) as norm:
        for b in (0, 1, 2, 0):
            all_starts(drafter, single(batch, b), DEPTH, feed="own")
    for ours, expected in ((rows_of(mass.frame()), whole), (rows_of(norm.frame()), norms)):
        for key, (value, count) in expected.items():
            if count:
                assert ours[key] == (pytest.approx(value, rel=1e-9), count * (2 if key[0] == "p:0" else 1)), key


@pytest.mark.parametrize("num_layers", [1, 2])
def test_single_chains_add_up_to_all_starts(num_layers):
    """Probes of deployed behaviour: one chain after the other, in pieces of context or at once."""
    from driftlab import AttentionMass, Chain, StateNorm, chain

    drafter, batch = float64_drafter(num_hidden_layers=num_layers), batch_of((14, 5))
    expected = {**rows_of(probed(drafter, batch)[0].frame()), **rows_of(probed(drafter, batch)[1].frame())}
    expected = {key: row for key, row in expected.items() if key[4] != "mass_self_null"}  # needs the rows around
    with AttentionMass(drafter, recent=WINDOWS) as mass, StateNorm(drafter) as norm:
        for row in range(4, 13):
            chain(drafter, batch, [row], DEPTH)
    with AttentionMass(drafter, recent=WINDOWS) as piece_mass, StateNorm(drafter) as piece_norm:
        session = Chain(drafter, prompt_lengths=[5], ids=batch.ids)
        for first, last in ((0, 5), *((row, row + 1) for row in range(5, 13))):
            session.extend(batch.tokens[:, first + 1 : last + 1], batch.aux[:, first:last])
            session.draft(DEPTH)
    for probes in ((mass, norm), (piece_mass, piece_norm)):
        ours = {key: row for probe in probes for key, row in rows_of(probe.frame()).items()}
        assert set(ours) == set(expected)
        for key, (value, count) in expected.items():
            assert ours[key] == (pytest.approx(value, rel=1e-7, abs=1e-12), count), key


def test_the_text_feed_differs_from_depth_2_on():
    drafter, batch = float64_drafter(), batch_of((14, 5))
    own, text = (rows_of(probed(drafter, batch, feed=feed)[0].frame()) for feed in ("own", "text"))
    assert set(own) == set(text)
    for key, (value, _) in own.items():
        if key[4] == "mass_self" and key[3] > 1:
            assert value != text[key][0]
        elif key[3] == 1:
            assert (value, _) == text[key]


def test_the_forward_pass_is_seen_too():
    from driftlab import AttentionMass

    drafter, batch = float64_drafter(), batch_of((9, 4))
    with AttentionMass(drafter) as probe:
        drafter(batch.tokens, batch.aux)
    frame = probe.frame()
    assert set(frame["depth"]) == {1}
    context = frame[frame["quantity"] == "mass_context"]
    assert context["value"].to_list() == pytest.approx([1.0] * 4)
    assert context["n"].to_list() == [8] * 4


# ---- scope


def state_of(drafter):
    hooks = [name for name, module in drafter.named_modules() if module._forward_hooks]
    return hooks, [layer.self_attn.recent_windows for layer in drafter.layers]


def test_nothing_is_left_after_the_block_nor_after_an_exception():
    from driftlab import AttentionMass, SinkSearch, StateNorm, all_starts

    drafter, batch = float64_drafter(num_hidden_layers=2), batch_of((9, 4))
    for probe in (AttentionMass(drafter), StateNorm(drafter), SinkSearch(drafter)):
        with probe:
            assert state_of(drafter) != ([], [(), ()])
        assert state_of(drafter) == ([], [(), ()])
        with pytest.raises(KeyboardInterrupt), probe:
            raise KeyboardInterrupt
        assert state_of(drafter) == ([], [(), ()])
    with StateNorm(drafter) as probe:
        all_starts(drafter, batch, 2, feed="own")
    before = rows_of(probe.frame())
    all_starts(drafter, batch, 2, feed="own")
    assert rows_of(probe.frame()) == before


def test_a_probe_changes_no_result():
    from driftlab import all_starts
    from driftlab.probes import AttentionMass, SinkSearch, StateNorm

    drafter, batch = float64_drafter(), batch_of(*SHAPES)
    plain = all_starts(drafter, batch, 4, feed="own")
    with AttentionMass(drafter), StateNorm(drafter), SinkSearch(drafter):
        watched = all_starts(drafter, batch, 4, feed="own")
    assert torch.equal(plain.tokens, watched.tokens)


def test_two_probes_with_other_windows_do_not_disturb_each_other():
    from driftlab import AttentionMass, all_starts

    drafter, batch = float64_drafter(num_hidden_layers=2), batch_of((14, 5))
    options = ({"recent": (8, 20), "null_depth": 3}, {"recent": (1, 12), "null_depth": 5})
    alone = []
    for option in options:
        with AttentionMass(drafter, **option) as probe:
            all_starts(drafter, batch, DEPTH, feed="own")
        alone.append(rows_of(probe.frame()))
    with AttentionMass(drafter, **options[0]) as first, AttentionMass(drafter, **options[1]) as second:
        all_starts(drafter, batch, DEPTH, feed="own")
    for ours, expected in zip((first, second), alone, strict=True):
        rows = rows_of(ours.frame())
        assert set(rows) == set(expected)
        for key, (value, count) in expected.items():
            assert rows[key] == (pytest.approx(value, rel=1e-12, nan_ok=True), count), key
    assert state_of(drafter) == ([], [(), ()])


def test_a_probe_sees_what_another_hook_did():
    """The feedback made ten times larger at depth 1 shows in its own row; probes read after earlier hooks."""
    from driftlab import StateNorm, all_starts

    drafter, batch = float64_drafter(), batch_of((9, 4))
    plain = rows_of(probed(drafter, batch, 2)[1].frame())
    louder = [("hook_feedback", lambda v, hook: 10 * v if hook.depth == 1 else None)]
    with drafter.hooks(louder), StateNorm(drafter) as probe:
        all_starts(drafter, batch, 2, feed="own")
    key = ("p:0", -1, -1, 1, "rms_feedback", 0)
    assert rows_of(probe.frame())[key][0] == pytest.approx(10 * plain[key][0])


# ---- frames


def test_frames_obey_the_row_contract_and_carry_the_settings():
    from driftlab import results
    from driftlab.drafter import variant_name

    for fc_norm, norm_output in ((False, False), (True, False), (False, True), (True, True)):
        drafter = own_tables(fc_norm=fc_norm, norm_output=norm_output, ttt=3)
        for probe in probed(drafter, random_batch((9, 7), (4, 3), width=32), 3):
            frame = probe.frame(feed="own", target="tiny", depth_max=3)
            results.check(frame)
            assert list(frame.columns) == list(results.COLUMNS)
            settings = frame[["variant", "fc_norm", "norm_output", "dtype", "ttt", "feed", "target", "depth_max"]]
            (row,) = set(settings.itertuples(index=False, name=None))
            assert row == (variant_name(drafter.config), fc_norm, norm_output, "float32", 3, "own", "tiny", 3)
            assert set(probe.frame()["depth_max"]) == {3}  # what a probe knows itself
            assert set(frame["prompt"]) == {"p:0", "p:1"}
            assert set(frame["depth"]) == {1, 2, 3}


def test_nothing_seen_is_an_error():
    from driftlab import AttentionMass, DriftlabError, SinkSearch, StateNorm

    drafter = own_tables()
    for probe in (AttentionMass(drafter), StateNorm(drafter)):
        with probe, pytest.raises(DriftlabError, match=f"{type(probe).__name__} saw nothing"):
            probe.frame()
    with SinkSearch(drafter) as search, pytest.raises(DriftlabError, match="SinkSearch saw nothing"):
        search.top()


# ---- the drafter's own sink


@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_planted_sink_is_found_with_its_mass(num_layers):
    """Scores 0 but for one key with ln 5: a start at row t gives it 5 / (t + 5), every other key 1 / (t + 5)."""
    from driftlab import SinkSearch, all_starts

    drafter = float64_drafter(num_hidden_layers=num_layers, num_key_value_heads=4)
    batch = batch_of((14, 7), (10, 6), (11, 9))

    def plant(value, hook):
        value = torch.zeros_like(value)
        if hook.depth == 1:
            value[:, 3] = math.log(5) / math.sqrt(8)  # q.k / sqrt(d) = 8 * this / sqrt(8)
        return value

    ones = [("hook_q", lambda value, hook: torch.ones_like(value)), ("hook_k", plant)]
    with drafter.hooks(ones), SinkSearch(drafter) as search:
        all_starts(drafter, batch, 3, feed="own")
    spans = [range(6, 13), range(5, 9), range(8, 10)]
    share = [sum(1 / (t + 5) for t in span) / len(span) for span in spans]
    assert search.top(1) == [(3, pytest.approx(5 * sum(share) / 3))]
    everything = dict(search.top(99))
    assert sorted(everything) == [0, 1, 2, 3, 4]  # the rows that all prompts have
    assert [everything[position] for position in (0, 1, 2, 4)] == pytest.approx([sum(share) / 3] * 4)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_the_mass_per_position_is_the_mean_by_hand(num_layers):
    from driftlab import SinkSearch, all_starts

    drafter = float64_drafter(num_hidden_layers=num_layers)
    batch = batch_of((14, 7), (10, 6))
    with SinkSearch(drafter) as search:
        all_starts(drafter, batch, 2, feed="own")
    mean = torch.zeros(5, dtype=torch.float64)
    for b, span in enumerate((range(6, 13), range(5, 9))):
        for row in span:
            (step,) = naive_chain(drafter, batch.tokens[b], batch.aux[b], row, 1)
            weights = torch.stack([torch.stack([p[:5] for p in by_head]).mean(0) for by_head in step["weights"]])
            mean += weights.mean(0) / len(span) / 2
    found = dict(search.top(5))
    for position in range(5):
        assert found[position] == pytest.approx(float(mean[position]), rel=1e-7)


def test_without_a_shared_prompt_row_there_is_nothing_to_search():
    from driftlab import DriftlabError, SinkSearch, all_starts

    drafter = float64_drafter()
    with SinkSearch(drafter) as search:
        all_starts(drafter, batch_of((9, 4), (6, 1)), 1)
    with pytest.raises(DriftlabError, match="no row before the answer"):
        search.top()


@pytest.mark.parametrize("hook", ["hook_feedback", "fusion.hook_fused"])
def test_a_state_that_is_not_finite_is_reported_with_its_place(tiny_trajectory, make_drafter, hook):
    """Averaging the rest would give a number that looks right."""
    from driftlab import DriftlabError, StateNorm, all_starts

    drafter = make_drafter("eagle3")

    def spoil(value, _):
        return value.index_fill(1, torch.tensor([5]), float("nan"))

    with (
        pytest.raises(DriftlabError, match="is not finite: prompt"),
        drafter.hooks([(hook, spoil)]),
        StateNorm(drafter),
    ):
        all_starts(drafter, tiny_trajectory, 2)
