"""Interventions on attention against weights worked out key by key from the queries, keys and values that the run had."""

import dataclasses
import math

import pytest
import torch
from test_interventions import batch_of, drafter_of, parsed

DEPTH, RECENT = 4, (1, 2, 5, 30)
SINKS = (0, 1)
CASES = {
    "sink:drop": {"drop": True},
    "sink:value": {"zero": True},
    "own:older": {"own": "older"},
    "own:all": {"own": "all"},
    "own:older@3": {"own": "older", "own_depths": (3,)},
    "logn:5": {"logn": 5},
    "window:1": {"window": 1},
    "window:5": {"window": 5},
    "window:5:carried=sink": {"window": 5, "carried": 2},
    "window:4:carried=3:positions=renumbered": {"window": 4, "carried": 3, "moved": True},
    "window:1:carried=sink:positions=renumbered": {"window": 1, "carried": 2, "moved": True},
    "window:2:carried=4:positions=renumbered@3-": {"window": 2, "carried": 4, "moved": True, "window_depths": (3, 4)},
    "pin:sink:least=0.001": {"pin": "sink"},
    "pin:sink:least=0.3": {"pin": "sink", "least": 0.3},
    "pin:equal:least=0.001": {"pin": "equal"},
    "window:3:carried=2 sink:drop own:older logn:3": {
        **{"window": 3, "carried": 2, "drop": True, "own": "older", "logn": 3},
    },
    "pin:sink:least=0.001 window:4:carried=2:positions=renumbered own:older logn:3 sink:value": {
        **{"pin": "sink", "window": 4, "carried": 2, "moved": True, "own": "older", "logn": 3, "zero": True},
    },
    "own:older pin:equal:least=0.001 window:6": {"pin": "equal", "own": "older", "window": 6},
}


def observed(drafter, texts, batch, layer):
    """Everything that passed a layer's attention, by (hook, depth), and what each intervention reported."""
    from driftlab.draft import all_starts
    from driftlab.interventions import intervened

    attention = drafter.layers[layer].self_attn
    attention.recent_windows = RECENT
    names = [
        f"layers.{layer}.self_attn.hook_{n}"
        for n in ("q", "k", "v", "out", "mass", "entropy", "visible", "recent", "sees_sink")
    ]
    names += ["hook_embed_normed", "layers.0.hook_hidden_normed"]
    with intervened(drafter, parsed(texts)) as reports:
        _, cache = drafter.run_with_cache(
            batch, DEPTH, names_filter=names, run=lambda d, *args: all_starts(d, *args, feed="text")
        )
    return {(name.split("hook_")[-1], depth): cache[name, depth] for name, depth in cache}, reports


class Oracle:
    """One start, head and depth: its keys and its weights."""

    def __init__(self, drafter, seen, batch, layer, rules):
        self.block, self.seen, self.batch, self.rules = drafter.layers[layer].self_attn, seen, batch, rules
        self.last = layer == len(drafter.layers) - 1
        self.layer = layer

    def index(self, row, start, depth):
        return start if self.last or depth > 1 else row

    def keys(self, sequence, start, head, depth):
        row = int(self.batch.starts.rows[sequence, start])
        group = self.seen["q", 1].shape[2] // self.seen["k", 1].shape[2]
        kv = head // group
        k = [
            self.seen["k", 1][sequence, : row + 1, kv],
            *(self.seen["k", d][sequence, start, kv][None] for d in range(2, depth + 1)),
        ]
        v = [
            self.seen["v", 1][sequence, : row + 1, kv],
            *(self.seen["v", d][sequence, start, kv][None] for d in range(2, depth + 1)),
        ]
        segments = [*self.batch.starts.segments[sequence, : row + 1].tolist(), *[3] * (depth - 1)]
        return row, torch.cat(k), torch.cat(v), segments, kv

    @torch.no_grad()
    def moved(self, sequence, count, kv, by):
        """The first context keys made again, ``by`` positions further on."""
        x = torch.cat([self.seen["embed_normed", 1], self.seen["hidden_normed", 1]], -1)[
            sequence : sequence + 1, :count
        ]
        positions = torch.arange(count)[None] + by
        return self.block.project_kv(x, positions)[0][0, kv]

    def weights(self, sequence, start, head, depth):
        """p of every key 0..row + own, values, segments, which keys are seen."""
        p, v, segments, visible = self.free(sequence, start, head, depth)
        kind = self.rules.get("pin")
        if kind is None or depth == 1:
            return p, v, segments, visible
        first, *_ = self.free(sequence, start, head, 1)
        sink = sum(float(x) for x, s in zip(first, segments, strict=False) if s == 0)
        if sink < self.rules.get("least", 0.001):
            return p, v, segments, visible
        if kind == "sink":
            chosen = [j for j, s in enumerate(segments) if s == 0]
        else:
            free = [j for j, s in enumerate(segments[: len(first)]) if s != 0 and float(first[j]) > 0]
            chosen = [min(free, key=lambda j: abs(float(first[j]) - sink))]
        wanted, now = (sum(float(x[j]) for j in chosen) for x in (first, p))
        if now == 0:
            return p, v, segments, visible
        factor = [wanted / now if j in chosen else (1 - wanted) / (1 - now) for j in range(len(p))]
        return p * torch.tensor(factor, dtype=p.dtype), v, segments, visible

    def free(self, sequence, start, head, depth):
        rules = self.rules
        row, k, v, segments, kv = self.keys(sequence, start, head, depth)
        here = row + depth - 1
        window = rules.get("window", 0) if depth in rules.get("window_depths", (1, 2, 3, 4)) else 0
        carried = rules.get("carried", 0)
        q = self.seen["q", depth][sequence, self.index(row, start, depth), head]
        if rules.get("moved") and window and here - (window + carried - 1) > 0:
            outside = [j for j in range(min(carried, row + 1)) if j <= here - window]
            if outside:
                new = self.moved(sequence, len(outside), kv, here - (window + carried - 1))
                k = torch.cat([new, k[len(outside) :]])
        scores = (k @ q) * self.block.scale
        visible = [not window or j > here - window or (j < carried and j <= row) for j in range(len(k))]
        if rules.get("logn") and sum(visible) > rules["logn"]:
            scores = scores * math.log(sum(visible)) / math.log(rules["logn"])
        if rules.get("drop"):
            visible = [seen and s != 0 for seen, s in zip(visible, segments, strict=True)]
        if depth in rules.get("own_depths", (2, 3, 4)) and rules.get("own"):
            gone = range(row + 1, len(k) - (rules["own"] == "older"))
            visible = [seen and j not in gone for j, seen in enumerate(visible)]
        if rules.get("zero"):
            v = torch.stack([x * (s != 0) for x, s in zip(v, segments, strict=True)])
        e = torch.tensor(
            [math.exp(float(s)) if seen else 0.0 for s, seen in zip(scores, visible, strict=True)], dtype=k.dtype
        )
        return e / e.sum(), v, segments, visible


@pytest.mark.parametrize(
    ("text", "layer"),  # keys of the second layer are not made again by hand, elsewhere
    [(text, layer) for text, rules in CASES.items() for layer in ((0,) if "moved" in rules else (0, 1))],
)
def test_outputs_and_statistics_are_those_of_the_weights_by_hand(text, layer):
    drafter, batch = drafter_of("two layers"), dataclasses.replace(batch_of(), sinks=SINKS)
    seen, _ = observed(drafter, text.split(), batch, layer)
    compare(drafter, seen, batch, layer, CASES[text])


def compare(drafter, seen, batch, layer, rules):
    oracle = Oracle(drafter, seen, batch, layer, rules)
    starts = batch.starts
    for sequence, start in starts.valid.nonzero().tolist():
        if start % 3 == 1:
            continue  # two thirds of the starts: the oracle is slow
        row = int(starts.rows[sequence, start])
        for depth in range(1, DEPTH + 1):
            at = oracle.index(row, start, depth)
            for head in range(seen["q", 1].shape[2]):
                p, v, segments, visible = oracle.weights(sequence, start, head, depth)
                where = (sequence, start, head, depth)
                assert torch.allclose(seen["out", depth][sequence, at, head], p @ v, atol=1e-10), where
                mass = [sum(float(x) for x, s in zip(p, segments, strict=True) if s == n) for n in range(4)]
                got = seen["mass", depth][sequence, head, at]
                assert torch.allclose(got, torch.tensor(mass, dtype=got.dtype), atol=1e-10), where
                entropy = -sum(float(x) * math.log(float(x)) for x in p if x > 0)
                assert float(seen["entropy", depth][sequence, head, at]) == pytest.approx(entropy, abs=1e-9), where
                recent = [float(p[-w:].sum()) for w in RECENT]
                got = seen["recent", depth][sequence, head, at]
                assert torch.allclose(got, torch.tensor(recent, dtype=got.dtype), atol=1e-10), where
                assert int(seen["visible", depth][sequence, at]) == sum(visible), where
                sink = any(s == 0 and seen_ for s, seen_ in zip(segments, visible, strict=True))
                assert bool(seen["sees_sink", depth][sequence, at]) == sink, where


@pytest.mark.parametrize("text", ["window:4:carried=3:positions=renumbered", "pin:equal:least=0.001", "own:older"])
def test_latent_attention_is_intervened_on_alike(text):
    drafter = drafter_of("MLA")
    drafter.layers[0].self_attn.window = 0
    batch = dataclasses.replace(batch_of(), sinks=SINKS)
    seen, _ = observed(drafter, [text], batch, 0)
    compare(drafter, seen, batch, 0, CASES[text])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", ["GQA", "MLA", "three layers, gate"])
def test_a_pinned_mass_is_that_of_depth_1(shape, dtype):
    drafter = drafter_of(shape).to(dtype)
    drafter.layers[0].self_attn.window = 0  # no sink slides out of it
    batch = batch_of().to("cpu", dtype)
    for layer in range(len(drafter.layers)):
        seen, (report,) = observed(drafter, ["pin:sink:least=0.02"], batch, layer)
        rows, valid = batch.starts.rows, batch.starts.valid
        first = seen["mass", 1][..., 0]
        if layer < len(drafter.layers) - 1:
            first = first.gather(2, rows[:, None].expand(-1, first.shape[1], -1))
        large = (first >= 0.02) & valid[:, None]
        assert bool(large.any())
        for depth in range(2, DEPTH + 1):
            assert float((seen["mass", depth][..., 0] - first)[large].abs().max()) < 1e-5
            sums = seen["mass", depth].sum(-1)[valid[:, None].expand_as(first)]
            assert torch.allclose(sums, torch.ones_like(sums), atol=1e-5)
        assert report.worst < 1e-5
        assert sum(n for (at, _), n in report.total.items() if at == layer) == 3 * int(valid.sum()) * first.shape[1]
        assert sum(n for (at, _), n in report.small.items() if at == layer) == 3 * int((~large & valid[:, None]).sum())


@pytest.mark.parametrize("more", [20.0, -20.0, 95.0, -95.0, -110.0, -150.0, -240.0, -400.0, 400.0, -1500.0])
def test_a_pin_holds_where_float32_has_no_room_between_the_mass_and_one(more):
    """Something pushes the sink's scores far up or down from depth 2 on: the pin takes exactly that back."""
    from contextlib import ExitStack

    from driftlab.attention import Controls
    from driftlab.interventions.base import ABLATION, steer

    def push(answer, problem, depth):
        bias = torch.tensor([more, 0, 0, 0])
        return answer(dataclasses.replace(problem, controls=Controls(bias=bias)) if depth > 1 else problem)

    drafter, batch = drafter_of("GQA").float(), batch_of().to("cpu", torch.float32)
    valid = batch.starts.valid
    plain, _ = observed(drafter, ["pin:sink:least=0.001"], batch, 0)
    free, _ = observed(drafter, [], batch, 0)
    with ExitStack() as stack:
        steer(stack, drafter, drafter.layers[0].self_attn, ABLATION, push)
        pushed, _ = observed(drafter, [], batch, 0)
        pinned, (report,) = observed(drafter, ["pin:sink:least=0.001"], batch, 0)
    assert report.worst < 1e-4 if abs(more) > 200 else 1e-5  # scores of 1,500 have three digits behind the point
    assert sum(report.lost.values()) == 0
    large = (free["mass", 1][..., 0] >= 0.001) & valid[:, None]
    nearly = (pushed["mass", 2][..., 0] - float(more > 0)).abs()[large]
    assert float(nearly.min()) < 1e-6
    for name in ("out", "mass"):
        a, b = (x[name, 2] if name == "mass" else x[name, 2].transpose(1, 2) for x in (plain, pinned))
        assert torch.allclose(a[large], b[large], atol=2e-4), name


def test_the_control_in_half_precision_is_that_of_full_precision():
    half = drafter_of("GQA").to(torch.bfloat16)
    full = drafter_of("GQA").to(torch.bfloat16).float()
    batch = batch_of().to("cpu", torch.bfloat16)
    seen, _ = observed(half, ["pin:equal:least=0.001@2"], batch, 0)
    want, (report,) = observed(full, ["pin:equal:least=0.001@2"], batch.to("cpu", torch.float32), 0)
    plain, _ = observed(full, [], batch.to("cpu", torch.float32), 0)
    valid = batch.starts.valid
    assert seen["out", 2].dtype == torch.bfloat16
    assert report.share > 0.5
    error, effect = (float((x - want["out", 2])[valid].abs().mean()) for x in (seen["out", 2].float(), plain["out", 2]))
    assert error < 0.1 * effect


def test_a_pin_on_the_sink_itself_in_closed_form_is_the_pin_by_bias(monkeypatch):
    """The control's formulas with the sink as the key: the same masses, outputs, entropies."""
    from driftlab.interventions import pins

    def the_sink(problem, lse, wanted):
        return torch.zeros_like(wanted, dtype=torch.float64), wanted

    drafter, batch = drafter_of("GQA"), batch_of()
    by_bias, _ = observed(drafter, ["pin:sink:least=0.001"], batch, 0)
    monkeypatch.setattr(pins, "closest", the_sink)
    closed, _ = observed(drafter, ["pin:equal:least=0.001"], batch, 0)
    valid = batch.starts.valid
    for depth in range(1, DEPTH + 1):
        for name in ("mass", "entropy", "recent"):
            a, b = (x[name, depth].transpose(1, 2)[valid] for x in (by_bias, closed))
            assert torch.allclose(a, b, atol=1e-9), (name, depth)
        assert torch.allclose(by_bias["out", depth][valid], closed["out", depth][valid], atol=1e-9)


def test_the_report_says_which_heads_it_says_nothing_about():
    drafter, batch = drafter_of("two layers"), batch_of()
    seen, (all_heads,) = observed(drafter, ["pin:sink:least=0.0000001"], batch, 1)
    assert all_heads.share == 1
    assert all_heads.excluded == ()
    assert all_heads.mean_gap == 0
    _, (none,) = observed(drafter, ["pin:sink:least=0.9999999"], batch, 1)
    assert none.share == 0
    assert len(none.excluded) == 8
    assert math.isnan(none.mean_gap)
    assert "8 of 8 heads never: 0.0, 0.1, 0.2, 0.3, 1.0, 1.1, 1.2, 1.3 (" in str(none)
    masses = seen["mass", 1][..., 0].transpose(1, 2)[batch.starts.valid].amax(0)
    least = float(masses.sort().values[1:3].mean())
    _, (some,) = observed(drafter, [f"pin:sink:layers=1:least={least}"], batch, 1)
    assert set(some.excluded) == {(1, head) for head in range(4) if masses[head] < least}
    _, (control,) = observed(drafter, ["pin:equal:least=0.001"], batch, 1)
    assert 0 < control.mean_gap < 1
    assert "from the sink's on average" in str(control)
    assert "average" not in str(some)


def test_a_sink_that_is_dropped_cannot_be_pinned_and_that_is_said():
    drafter, batch = drafter_of("GQA"), batch_of()
    seen, (report, _) = observed(drafter, ["pin:sink:least=0.001", "sink:drop@2-"], batch, 0)
    alone, _ = observed(drafter, ["sink:drop@2-"], batch, 0)
    assert report.share == 0
    assert sum(report.lost.values()) > 0
    assert all(
        torch.equal(seen["out", d][batch.starts.valid], alone["out", d][batch.starts.valid]) for d in (1, 2, 3, 4)
    )


@pytest.mark.parametrize("shape", ["GQA", "three layers, gate", "MTP"])
def test_the_rescaled_pin_leaves_the_size_that_the_state_has_without_it(shape):
    """At the first pinned depth nothing before differs, so the run without the pin has the size that is wanted."""
    from driftlab.draft import all_starts
    from driftlab.probes import rms

    drafter, batch = drafter_of(shape), batch_of()
    last = len(drafter.layers) - 1
    name = f"layers.{last}.hook_resid"
    valid = batch.starts.valid

    def sizes(texts):
        from driftlab.interventions import intervened

        kept = {}
        keep = lambda value, hook: kept.__setitem__((hook.name, hook.depth), value)  # noqa: E731
        with (
            intervened(drafter, parsed(texts)),
            drafter.hooks([(["hook_feedback", "hook_resid"], keep)], read_only=True),
        ):
            all_starts(drafter, batch, 3, feed="text")
        return kept

    pin = f"pin:sink:least=0.0001:layers={last}"
    free, pinned, both = sizes([]), sizes([pin]), sizes([pin.replace(":least", ":state=rescaled:least")])
    key = ("hook_feedback", 2)
    assert not torch.allclose(rms(pinned[key])[valid], rms(free[key])[valid], rtol=1e-6)
    assert torch.allclose(rms(both[key])[valid], rms(free[key])[valid], rtol=1e-9)
    direction = torch.nn.functional.cosine_similarity(both[key], pinned[key], dim=-1)[valid]
    assert torch.allclose(direction, torch.ones_like(direction), atol=1e-12)
    assert torch.equal(both[name, 2], pinned[name, 2])
    if last:  # at a lower layer the residual stream that leaves it is rescaled
        pin = "pin:sink:least=0.0001:layers=0"
        pinned, both = sizes([pin]), sizes([pin.replace(":least", ":state=rescaled:least")])
        key = ("layers.0.hook_resid", 2)
        assert not torch.allclose(rms(pinned[key])[valid], rms(free[key])[valid], rtol=1e-6)
        assert torch.allclose(rms(both[key])[valid], rms(free[key])[valid], rtol=1e-9)


def test_a_dropped_sink_is_a_key_that_is_absent():
    """The cache without that key at all, and its segment."""
    from driftlab.draft import text_at, unroll
    from driftlab.drafter.blocks import LayerKV

    drafter, batch = drafter_of("two layers"), batch_of()
    one = parsed(["sink:drop@2-"])[0]
    with torch.no_grad():
        with one.on(drafter):
            dropped = [state.normed for state, _ in unroll(drafter, batch, 3, feed="text")]
        state = next(unroll(drafter, batch, 1, feed="text"))[0]
        assert torch.equal(state.normed, dropped[0])
        starts = state.starts
        state.kv[:] = [LayerKV(kv.k[:, :, 1:], kv.v[:, :, 1:], kv.own_k, kv.own_v) for kv in state.kv]
        state.starts = dataclasses.replace(starts, rows=starts.rows - 1, segments=starts.segments[:, 1:])
        for layer in drafter.layers:  # rows are counted without it, positions are not
            original = layer.self_attn.rotary.forward
            layer.self_attn.rotary.forward = lambda x, positions, turn=original: turn(x, positions + 1)
        for depth in (2, 3):
            state = drafter.next(state, text_at(batch, starts.rows + depth))
            assert torch.allclose(state.normed[starts.valid], dropped[depth - 1][starts.valid], atol=1e-10)


def test_the_first_row_keeps_its_own_key():
    drafter, batch = drafter_of("two layers"), batch_of(prompts=(1, 3))
    seen, _ = observed(drafter, ["sink:drop"], batch, 1)
    assert float(seen["mass", 1][0, 0, 0, 0]) == pytest.approx(1)  # row 0: the sink is all it sees
    assert float(seen["mass", 2][0, 0, 0, 0]) == 0
    assert float(seen["mass", 1][0, 0, 1, 0]) == 0


def test_all_own_keys_cannot_go_where_the_window_shows_nothing_else():
    from driftlab.errors import DriftlabError

    drafter, batch = drafter_of("GQA"), batch_of()
    with pytest.raises(DriftlabError, match="own keys alone"):
        observed(drafter, ["own:all", "window:2"], batch, 0)
    seen, _ = observed(drafter, ["own:older", "window:2"], batch, 0)
    mass = seen["mass", 4].transpose(1, 2)[batch.starts.valid]
    assert torch.equal(mass, torch.tensor([0.0, 0, 0, 1], dtype=mass.dtype).expand_as(mass))


def test_a_layer_of_ones_choice_is_the_only_one_changed():
    drafter, batch = drafter_of("three layers, gate"), batch_of()
    plain, _ = observed(drafter, [], batch, 0)
    upper, _ = observed(drafter, ["sink:drop:layers=1"], batch, 0)
    assert torch.equal(plain["mass", 1], upper["mass", 1])
    seen, _ = observed(drafter, ["sink:drop:layers=1"], batch, 1)
    assert float(seen["mass", 3][..., 0].abs().max()) == 0
    seen, _ = observed(drafter, ["sink:drop:layers=1"], batch, 2)
    assert float(seen["mass", 3][..., 0].min()) > 0


def test_a_narrower_window_of_the_layer_stays():
    drafter, batch = drafter_of("GQA"), batch_of()
    drafter.layers[0].self_attn.window = 3
    seen, _ = observed(drafter, ["window:5"], batch, 0)
    plain, _ = observed(drafter, [], batch, 0)
    assert all(torch.equal(seen["out", d], plain["out", d]) for d in range(1, 5))
    seen, _ = observed(drafter, ["window:2"], batch, 0)
    assert int(seen["visible", 3].max()) == 2
