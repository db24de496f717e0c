"""What the recorder keeps, against the naive recursion; what it refuses; that it changes and leaves nothing."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from builders import own_tables, random_batch
from naive import fuse, naive_chain
from test_probes import masses, rms, state_of

DEPTH, WINDOWS = 4, (2, 30)
SHAPES = ((14, 5), (14, 1), (8, 6))  # nine starts, thirteen after one token, two


def float64_drafter(**overrides):
    drafter = own_tables(draft_vocab_size=20, **overrides).double()
    with torch.no_grad():
        for layer in drafter.layers:
            layer.self_attn.q_proj.weight.mul_(2)
    return drafter


def batch_of(*shapes, **options):
    lengths, prompts = zip(*shapes, strict=True)
    return random_batch(lengths, prompts, width=32, **options).to("cpu", torch.float64)


def recorded(drafter, batches, depth=DEPTH, feed="own", **options):
    from driftlab import all_starts
    from driftlab.drift import Recorder

    with Recorder(drafter, **{"depth": depth, "recent": WINDOWS, "vectors": 3, **options}) as recorder:
        for batch in batches if isinstance(batches, list) else [batches]:
            all_starts(drafter, batch, depth, feed=feed)
    return recorder.record()


def naive(drafter, batch, feed):
    """{(prompt, row): steps}, in the order of the record."""
    chains = {}
    for b, (length, prompt) in enumerate(zip(batch.lengths.tolist(), batch.prompt_lengths.tolist(), strict=True)):
        for row in range(prompt - 1, length - 1):
            fed = None
            if feed == "text":
                fed = [int(batch.tokens[b, min(row + k + 1, length - 1)]) for k in range(1, DEPTH + 1)]
            chains[b, row] = naive_chain(drafter, batch.tokens[b], batch.aux[b], row, DEPTH, fed)
    return chains


def angle(a, b):
    return float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))


@pytest.mark.parametrize("feed", ["own", "text"])
@pytest.mark.parametrize(
    "overrides", [{}, {"num_hidden_layers": 2, "fc_norm": False, "norm_output": False}, {"windows": (3,)}]
)
def test_every_array_against_the_naive_recursion(overrides, feed):
    drafter, batch = float64_drafter(**overrides), batch_of(*SHAPES)
    chains = naive(drafter, batch, feed)
    record = recorded(drafter, batch, feed=feed)
    assert list(zip(record.prompt.tolist(), record.row.tolist(), strict=True)) == list(chains)
    assert (record.ids, record.depth, record.sinks) == (batch.ids, DEPTH, (0,))
    if overrides.get("windows"):  # the naive recursion has no windows: at most three keys are seen, and hold all mass
        assert record.visible.max() == 3
        assert record.recent[..., 1] == pytest.approx(np.ones(record.recent.shape[:-1]))
        return
    weight = {key: tensor.double() for key, tensor in drafter.state_dict().items()}
    for i, ((b, row), steps) in enumerate(chains.items()):
        length, prompt = int(batch.lengths[b]), int(batch.prompt_lengths[b])
        before = None
        for k, step in enumerate(steps, 1):
            for layer, by_head in enumerate(step["weights"]):
                for head, p in enumerate(by_head):
                    at = i, k - 1, layer, head
                    expected = list(masses(p, row, prompt, (0,)).values())
                    assert record.mass[at] == pytest.approx(expected, abs=1e-6)
                    for place, window in enumerate(WINDOWS):
                        assert record.recent[at][place] == pytest.approx(float(p[-window:].sum()), abs=1e-6)
                    entropy = -sum(float(x) * math.log(float(x)) for x in p)
                    assert record.entropy[at] == pytest.approx(entropy, abs=1e-6)
                    assert record.visible[at[:3]] == len(p) == row + k
                    if k == 1:
                        last = [float(p[-w:].sum()) for w in range(1, DEPTH)]
                        assert record.recent_first[i, layer, head] == pytest.approx(last, abs=1e-6)
            feedback = step["feedback"]
            assert record.rms_feedback[i, k - 1] == pytest.approx(rms(feedback))
            assert record.rms_resid[i, k - 1] == pytest.approx(rms(step["resid"]))
            if before is None:
                assert math.isnan(record.successive[i, 0])
            else:
                assert record.successive[i, k - 1] == pytest.approx(angle(feedback, before))
            if row + k <= length - 2:
                fused = fuse(drafter.config, weight, batch.aux[b, row + k].double())
                assert record.imitation[i, k - 1] == pytest.approx(angle(feedback, fused), abs=1e-9)
            else:
                assert math.isnan(record.imitation[i, k - 1])
            before = feedback
        assert record.rms_fused[i] == pytest.approx(rms(fuse(drafter.config, weight, batch.aux[b, row].double())))


def test_the_shares_add_up_the_fused_vector():
    """The projections' shares are those of the naive fusion with one state at a time."""
    drafter, batch = float64_drafter(), batch_of(*SHAPES)
    record = recorded(drafter, batch)
    weight = {key: tensor.double() for key, tensor in drafter.state_dict().items()}
    assert record.projection_share.sum(1) == pytest.approx(np.ones(len(record.row)))
    assert record.magnitude_share.sum(1) == pytest.approx(np.ones(len(record.row)))
    for i in (0, 5, len(record.row) - 1):
        states = batch.aux[record.prompt[i], record.row[i]].double()
        whole = fuse(drafter.config, weight, states)
        parts = []
        for j in range(3):
            only = torch.zeros_like(states)
            only[j] = states[j]
            parts.append(fuse(drafter.config, weight, only))
        sizes = [math.sqrt(float(part @ part)) for part in parts]
        assert record.magnitude_share[i] == pytest.approx([size / sum(sizes) for size in sizes])
        assert record.projection_share[i] == pytest.approx([float(part @ whole / (whole @ whole)) for part in parts])


def test_vectors_are_some_starts_of_every_prompt():
    """Those that reach every depth: 6, 10 and none of them (of 9, 13 and 2 starts), three evenly spaced."""
    drafter, batch = float64_drafter(), batch_of(*SHAPES)
    record = recorded(drafter, batch)
    assert record.vector_prompt.tolist() == [0, 0, 0, 1, 1, 1]
    chains = naive(drafter, batch, "own")
    for vector, key in zip(record.vectors, ((0, 4), (0, 6), (0, 8), (1, 0), (1, 3), (1, 6)), strict=True):
        for k in range(DEPTH):
            assert vector[k].tolist() == pytest.approx(chains[key][k]["feedback"].tolist(), rel=1e-5, abs=1e-5)


def test_batches_add_up():
    drafter, batch = float64_drafter(), batch_of(*SHAPES)
    whole = recorded(drafter, batch)
    parts = [single(batch, b) for b in range(3)]
    pieces = recorded(drafter, parts)
    assert pieces.ids == whole.ids
    for field in dataclasses.fields(whole):
        ours, expected = getattr(pieces, field.name), getattr(whole, field.name)
        if isinstance(expected, np.ndarray):
            assert np.allclose(ours, expected, rtol=1e-9, atol=1e-9, equal_nan=True), field.name


def single(batch, b):
    length = int(batch.lengths[b])
    cut = {name: getattr(batch, name)[b : b + 1, :length] for name in ("tokens", "aux", "last_hidden", "lse")}
    more = {name: getattr(batch, name)[b : b + 1] for name in ("lengths", "prompt_lengths", "ids", "finish")}
    return dataclasses.replace(batch, **cut, **more)


# ---- the target's last-layer update


def test_the_feedback_is_compared_with_the_update_at_the_position_it_stands_for():
    from driftlab.drift import last_updates

    drafter = float64_drafter(aux_layers=(1, 6, 7))
    batch = dataclasses.replace(batch_of(*SHAPES), aux_layers=(1, 6, 7))
    record = recorded(drafter, batch, updates=last_updates(batch, 7))
    chains = naive(drafter, batch, "own")
    for i, ((b, row), steps) in enumerate(chains.items()):
        for k, step in enumerate(steps, 1):
            if row + k < int(batch.lengths[b]):
                aux = batch.aux[b, row + k].double()
                assert record.update[i, k - 1] == pytest.approx(angle(step["feedback"], aux[2] - aux[1]), abs=1e-9)
            else:
                assert math.isnan(record.update[i, k - 1])
    assert recorded(drafter, batch).update is None


def test_what_to_record_for_the_update_is_said(tiny_trajectory, tmp_path, make_drafter):
    from conftest import TinyTokenizer, tiny_llama

    from driftlab import DriftlabError, Target
    from driftlab.drift import last_updates

    with pytest.raises(DriftlabError, match=r"lacks \[6, 7\]: record with aux_layers=\[1, 3, 5, 6, 7\]"):
        last_updates(tiny_trajectory)
    with pytest.raises(DriftlabError, match="num_layers"):
        last_updates(batch_of((9, 4)))
    target = Target(tiny_llama(), TinyTokenizer(), name="tiny", aux_layers=(1, 3, 5, 6, 7))
    trajectory = target.record(["hello", "abc"], max_new_tokens=8, template=False, out=tmp_path / "with")
    update = last_updates(trajectory)
    states = trajectory[1].aux
    assert torch.equal(update(trajectory.entries[1].id), states[:, 4].double() - states[:, 3].double())
    with pytest.raises(DriftlabError, match="not in the recording"):
        update("nobody")
    drafter = make_drafter("eagle3")
    record = recorded(drafter, trajectory, 2, feed="text", updates=update)
    assert np.isfinite(record.update[:, 0]).all()  # row t + 1 always has a state


def test_states_of_another_width_have_no_common_direction():
    from driftlab import DriftlabError

    drafter, batch = float64_drafter(), batch_of((9, 4))
    with pytest.raises(DriftlabError, match="width 16, the feedback 32"):
        recorded(drafter, batch, updates=lambda name: torch.zeros(9, 16))


# ---- scope


def test_nothing_changes_and_nothing_is_left():
    from driftlab import AttentionMass, all_starts
    from driftlab.drift import Recorder

    drafter, batch = float64_drafter(num_hidden_layers=2), batch_of(*SHAPES)
    plain = all_starts(drafter, batch, DEPTH, feed="own")
    alone = recorded(drafter, batch)
    with AttentionMass(drafter, recent=(5,), null_depth=6), Recorder(drafter, depth=6, recent=WINDOWS) as recorder:
        assert torch.equal(all_starts(drafter, batch, DEPTH, feed="own").tokens, plain.tokens)
    assert state_of(drafter) == ([], [(), ()])
    beside = recorder.record()  # shallower than it was made for
    assert np.array_equal(beside.mass, alone.mass)
    assert np.array_equal(beside.recent, alone.recent)
    assert np.array_equal(beside.recent_first, alone.recent_first)
    with pytest.raises(KeyboardInterrupt), Recorder(drafter, depth=2):
        raise KeyboardInterrupt
    assert state_of(drafter) == ([], [(), ()])


def test_it_agrees_with_the_probes():
    from driftlab import AttentionMass, all_starts
    from driftlab.drift import Recorder

    drafter, batch = float64_drafter(), batch_of(*SHAPES)
    with AttentionMass(drafter, null_depth=DEPTH) as probe, Recorder(drafter, depth=DEPTH) as recorder:
        all_starts(drafter, batch, DEPTH, feed="text")
    record, frame = recorder.record(), probe.frame()
    sink = frame[(frame["quantity"] == "mass_sink") & (frame["head"] == 1)].set_index(["prompt", "depth"])["value"]
    null = frame[(frame["quantity"] == "mass_self_null") & (frame["head"] == 1)].set_index(["prompt", "depth"])["value"]
    for b, name in enumerate(record.ids):
        for k in range(1, DEPTH + 1):
            mean = record.mass[record.prompt == b, k - 1, 0, 1, 0].mean()
            assert sink[name, k] == pytest.approx(mean)
            here, there = record.pairs(k)
            there = there[record.prompt[here] == b]
            if k > 1 and len(there):
                assert null[name, k] == pytest.approx(record.recent_first[there, 0, 1, k - 2].mean())


# ---- refusals


def test_what_is_no_single_run_of_all_starts_is_refused():
    from driftlab import DriftlabError, all_starts, chain
    from driftlab.drift import Recorder

    drafter, batch, other = float64_drafter(), batch_of((14, 5)), batch_of((9, 4), (9, 3))
    other = dataclasses.replace(other, ids=("q:0", "q:1"))
    with Recorder(drafter, depth=3):
        all_starts(drafter, batch, 3)
        with pytest.raises(DriftlabError, match="'p:0' was recorded already"):
            all_starts(drafter, batch, 3)
    with pytest.raises(DriftlabError, match="depth 4 runs"), Recorder(drafter, depth=3):
        all_starts(drafter, batch, 4)
    with Recorder(drafter, depth=3):
        all_starts(drafter, batch, 3)
        with pytest.raises(DriftlabError, match=r"sinks \[0, 1\] after sinks \[0\]"):
            all_starts(drafter, dataclasses.replace(other, sinks=(0, 1)), 3)
    mixed = Recorder(drafter, depth=3)
    with mixed:
        all_starts(drafter, batch, 3)
        all_starts(drafter, other, 2)
    with pytest.raises(DriftlabError, match=r"depths \[2, 3\]"):
        mixed.record()
    with Recorder(drafter, depth=3) as empty:
        pass
    with pytest.raises(DriftlabError, match="saw nothing"):
        empty.record()
    with pytest.raises(DriftlabError, match="leave the Recorder"), Recorder(drafter, depth=3) as inside:
        inside.record()
    for options in ({"depth": 0}, {"depth": 3, "recent": (0,)}, {"depth": 3, "vectors": -1}):
        with pytest.raises(DriftlabError, match="whole numbers"):
            Recorder(drafter, **options)
    one = Recorder(drafter, depth=2)
    with one:
        chain(drafter, batch, [6], 2)
    assert one.record().row.tolist() == [6]  # one start is a run of one start


def test_memory_is_bounded():
    from driftlab import DriftlabError

    drafter, batch = float64_drafter(), batch_of(*SHAPES)
    held = recorded(drafter, batch)
    size = sum(value.nbytes for value in vars(held).values() if isinstance(value, np.ndarray))
    rows = len(held.row)
    assert size < 8 * rows * (DEPTH * 4 * 7 + 4 * 3 + 5 * DEPTH + DEPTH + 20) + held.vectors.nbytes
    with pytest.raises(DriftlabError, match="take more than 0 MiB"):
        recorded(drafter, batch, max_bytes=size // 2)


def test_a_state_that_is_not_finite_is_reported_with_its_place():
    from driftlab import DriftlabError

    drafter, batch = float64_drafter(), batch_of((14, 5), (9, 4))

    def spoil(value, hook):
        return value.index_fill(1, torch.tensor([3]), math.inf) if hook.depth == 2 else None

    with drafter.hooks([("hook_feedback", spoil)]), pytest.raises(DriftlabError, match="'p:0', row 7, depth 2"):
        recorded(drafter, batch, depth=2)


def test_a_sink_among_the_answers_rows_is_refused():
    from driftlab import DriftlabError

    with pytest.raises(DriftlabError, match="row 6 of prompt 'p:0' is a sink"):
        recorded(float64_drafter(), batch_of((14, 5), sinks=(6,)))


def test_an_empty_answer_leaves_the_others():
    from driftlab import DriftlabError

    drafter = float64_drafter()
    record = recorded(drafter, batch_of((9, 4), (6, 6)))
    assert record.ids == ("p:0", "p:1")
    assert record.sums(record.rms_fused.astype(np.float64))[1].tolist() == [5, 0]
    assert math.isnan(record.mean(record.rms_fused.astype(np.float64)).low)  # one prompt that says anything
    with pytest.raises(DriftlabError, match="no start"):
        recorded(drafter, batch_of((6, 6)))


def test_an_mtp_head_has_no_shares():
    drafter = own_tables(architecture="mtp", aux_layers=(), fc_norm=False).double()
    batch = batch_of((9, 4), aux=1)
    batch = dataclasses.replace(batch, last_hidden=torch.randn(batch.last_hidden.shape, dtype=torch.float64))
    record = recorded(drafter, batch)
    assert record.magnitude_share.shape == (5, 0)
    assert record.rms_feedback.min() > 0
