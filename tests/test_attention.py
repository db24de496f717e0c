"""attend() against a softmax over the concatenated keys, written out key by key."""

import math

import pytest
import torch

SEGMENTS = 4
SELF = 3


def random_case(heads=4, kv_heads=2, own=2, batch=2, starts=5, context=9, d_head=6, d_value=4, seed=0):
    """Arguments of attend(), float64, with scores of a few units and starts at the first and the last row."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rows = torch.randint(0, context, (batch, starts), generator=generator)
    rows[:, 0], rows[:, -1] = 0, context - 1
    tensors = {
        "q": 2 * normal(batch, heads, starts, d_head),
        "context_k": 2 * normal(batch, kv_heads, context, d_head),
        "context_v": normal(batch, kv_heads, context, d_value),
        "own_k": 2 * normal(batch, kv_heads, starts, own, d_head),
        "own_v": normal(batch, kv_heads, starts, own, d_value),
        "rows": rows,
        "segments": torch.randint(0, SEGMENTS - 1, (batch, context), generator=generator),
    }
    return tensors, d_head**-0.5


def dense(case, scale, *, bias=None, drop=None, score_scale=None, sink=None, windows=(), valid=None):
    """The same by loops. ``bias``, ``drop``, ``score_scale`` are functions of (batch, head, start[, segment or key])."""
    q, kc, vc, ko, vo = (case[name] for name in ("q", "context_k", "context_v", "own_k", "own_v"))
    batch, heads, starts, _ = q.shape
    context, own, group = kc.shape[2], ko.shape[3], heads // kc.shape[1]
    out = q.new_zeros(batch, heads, starts, vc.shape[-1])
    lse, entropy = q.new_zeros(batch, heads, starts), q.new_zeros(batch, heads, starts)
    mass, recent = q.new_zeros(batch, heads, starts, SEGMENTS), q.new_zeros(batch, heads, starts, len(windows))
    columns = q.new_zeros(batch, heads, context)
    visible = torch.zeros(batch, starts, dtype=torch.int64)
    for b in range(batch):
        for s in range(starts):
            row = int(case["rows"][b, s])
            shown = [c for c in range(row + 1) if drop is None or not drop(b, s, c)]
            visible[b, s] = len(shown) + own
            for h in range(heads):
                kv = h // group
                keys = [(c, kc[b, kv, c], vc[b, kv, c], int(case["segments"][b, c])) for c in shown]
                keys += [(row + 1 + i, ko[b, kv, s, i], vo[b, kv, s, i], SELF) for i in range(own)]
                scores = []
                for _, key, _, segment in keys:
                    score = scale * torch.dot(q[b, h, s], key) * (1 if score_scale is None else score_scale(b, h, s))
                    scores.append(score + (0 if bias is None else bias(b, h, s, segment)))
                total = sum(score.exp() for score in scores) + (0 if sink is None else sink[h].exp())
                lse[b, h, s] = total.log()
                for (place, _, value, segment), score in zip(keys, scores, strict=True):
                    p = score.exp() / total
                    out[b, h, s] += p * value
                    mass[b, h, s, segment] += p
                    entropy[b, h, s] -= p * p.log()
                    for i, window in enumerate(windows):
                        recent[b, h, s, i] += p * (place > row + own - window)
                    if place <= row and (valid is None or valid[b, s]):
                        columns[b, h, place] += p
    return {
        **{"out": out, "lse": lse, "mass": mass, "entropy": entropy},
        **{"visible": visible, "recent": recent, "columns": columns},
    }


def run(case, scale, **options):
    from driftlab.attention import Stats, attend

    options.setdefault("stats", Stats(mass=True, entropy=True, columns=True, recent=WINDOWS))
    return attend(**case, scale=scale, **options)


WINDOWS = (1, 2, 3, 7, 30)
FIELDS = ("out", "lse", "mass", "entropy", "visible", "recent", "columns")


def same(result, expected, atol=1e-12, fields=FIELDS):
    for name in fields:
        ours = getattr(result, name)
        assert ours.shape == expected[name].shape, name
        torch.testing.assert_close(
            ours, expected[name], rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("own", [0, 1, 3])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1), (1, 1)])
def test_output_and_every_statistic_match_the_dense_softmax(heads, kv_heads, own):
    case, scale = random_case(heads, kv_heads, own)
    same(run(case, scale), dense(case, scale, windows=WINDOWS))


def test_columns_count_the_valid_starts_only():
    case, scale = random_case()
    valid = torch.tensor([[True, True, False, True, False], [False, False, True, True, True]])
    result = run(case, scale, valid=valid)
    same(result, dense(case, scale, windows=WINDOWS, valid=valid))
    assert not torch.allclose(result.columns, run(case, scale).columns)


def test_the_four_masses_sum_to_one_and_self_is_exactly_zero_without_own_keys():
    case, scale = random_case(own=0)
    mass = run(case, scale).mass
    torch.testing.assert_close(mass.sum(-1), torch.ones(mass.shape[:3], dtype=mass.dtype))
    assert (mass[..., SELF] == 0).all()
    case, scale = random_case(own=4)
    mass = run(case, scale).mass
    torch.testing.assert_close(mass.sum(-1), torch.ones(mass.shape[:3], dtype=mass.dtype))
    assert (mass[..., SELF] > 0).all()


def test_the_query_heads_are_grouped_as_repeat_kv_does():
    from transformers.models.llama.modeling_llama import repeat_kv

    case, scale = random_case(heads=4, kv_heads=2, own=2)
    grouped = run(case, scale)
    full = dict(case)
    for name in ("context_k", "context_v"):
        full[name] = repeat_kv(case[name], 2)
    for name in ("own_k", "own_v"):
        full[name] = torch.stack([repeat_kv(part, 2) for part in case[name].unbind(3)], 3)
    same(run(full, scale), {name: getattr(grouped, name) for name in FIELDS})


def test_keys_after_the_row_do_not_exist():
    case, scale = random_case(seed=1)
    case["rows"].clamp_(max=5)
    before = run(case, scale)
    case["context_k"][:, :, 6:] = 1e3
    case["context_v"][:, :, 6:] = 1e9
    after = run(case, scale)
    for name in FIELDS:
        assert torch.equal(getattr(before, name), getattr(after, name)), name
    assert (before.columns[..., 6:] == 0).all()


@pytest.mark.parametrize("block", [1, 2, 3, 5, 100])
def test_blocks_of_any_size_give_the_same(block):
    from driftlab.attention import Controls

    case, scale = random_case()
    generator = torch.Generator().manual_seed(1)
    controls = Controls(
        bias=torch.randn(2, 4, 5, SEGMENTS, generator=generator, dtype=torch.float64),
        drop=(torch.rand(2, 5, 9, generator=generator) < 0.3) & (torch.arange(9) > 0),
        score_scale=torch.rand(2, 4, 5, generator=generator, dtype=torch.float64),
    )
    valid = torch.rand(2, 5, generator=generator) < 0.6
    whole = run(case, scale, controls=controls, valid=valid, block=5)
    split = run(case, scale, controls=controls, valid=valid, block=block)
    same(split, {name: getattr(whole, name) for name in FIELDS}, atol=1e-14)


def test_the_block_follows_from_the_memory_allowed(monkeypatch):
    """Where statistics carry gradients, the specification runs in blocks."""
    from driftlab import attention
    from driftlab.kernels import reference

    case, scale = random_case()
    case["q"].requires_grad_()
    whole = run(case, scale)
    seen = []
    original = reference.attend
    monkeypatch.setattr(reference, "attend", lambda problem: seen.append(problem.q.shape[2]) or original(problem))
    monkeypatch.setattr(attention, "BLOCK_BYTES", 2 * 4 * 2 * 4 * (9 + 2))
    same(run(case, scale), {name: getattr(whole, name) for name in FIELDS}, atol=1e-14)
    assert seen == [2, 2, 1]


def test_a_learned_sink_takes_its_share_and_belongs_to_no_segment():
    """Two equal scores 0 and sink logit 0: each has 1/3 and the masses sum to 2/3."""
    from driftlab.attention import Stats, attend

    zero, value = torch.zeros(1, 1, 1, 4), torch.tensor([3.0, 6.0]).view(1, 1, 2, 1)
    result = attend(
        zero,
        torch.zeros(1, 1, 2, 4),
        value,
        torch.zeros(1, 1, 1, 0, 4),
        torch.zeros(1, 1, 1, 0, 1),
        rows=torch.tensor([[1]]),
        segments=torch.tensor([[0, 1]]),
        scale=0.5,
        sink_logit=torch.zeros(1),
        stats=Stats(mass=True, columns=True),
    )
    torch.testing.assert_close(result.columns, torch.full((1, 1, 2), 1 / 3))
    torch.testing.assert_close(result.mass[0, 0, 0], torch.tensor([1 / 3, 1 / 3, 0, 0]))
    torch.testing.assert_close(result.mass.sum(), torch.tensor(2 / 3))
    torch.testing.assert_close(result.out.flatten(), torch.tensor([3.0]))
    torch.testing.assert_close(result.lse.flatten(), torch.tensor([math.log(3)]))


def test_learned_sinks_differ_by_head():
    case, scale = random_case()
    sink = torch.tensor([-2.0, 0.0, 1.5, 4.0], dtype=torch.float64)
    result = run(case, scale, sink_logit=sink)
    same(result, dense(case, scale, sink=sink, windows=WINDOWS))
    share = (sink[:, None] - result.lse).exp()
    torch.testing.assert_close(result.mass.sum(-1) + share, torch.ones_like(share))


@pytest.mark.parametrize(
    "shape", [(SEGMENTS,), (4, 1, SEGMENTS), (1, 5, SEGMENTS), (2, 1, 1, SEGMENTS), (2, 4, 5, SEGMENTS)]
)
def test_a_bias_by_segment_may_depend_on_head_start_and_sequence(shape):
    from driftlab.attention import Controls

    case, scale = random_case()
    bias = torch.randn(*shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    full = bias.expand(2, 4, 5, SEGMENTS)
    expected = dense(case, scale, bias=lambda b, h, s, segment: full[b, h, s, segment], windows=WINDOWS)
    for block in (None, 2):
        same(run(case, scale, controls=Controls(bias=bias), block=block), expected)
    assert not torch.allclose(expected["mass"], run(case, scale).mass)


@pytest.mark.parametrize("by_start", [False, True])
def test_dropped_keys_are_as_if_they_were_not_there(by_start):
    from driftlab.attention import Controls

    case, scale = random_case()
    generator = torch.Generator().manual_seed(3)
    drop = torch.rand(*((2, 5, 9) if by_start else (2, 9)), generator=generator) < 0.4
    drop[..., 0] = False
    full = drop if by_start else drop[:, None].expand(2, 5, 9)
    expected = dense(case, scale, drop=lambda b, s, c: bool(full[b, s, c]), windows=WINDOWS)
    for block in (None, 2):
        same(run(case, scale, controls=Controls(drop=drop), block=block), expected)


@pytest.mark.parametrize("shape", [None, (), (5,), (4, 1), (2, 4, 5)])
def test_a_score_scale_multiplies_the_scores_before_the_bias(shape):
    from driftlab.attention import Controls

    case, scale = random_case()
    factor = 0.3 if shape is None else torch.rand(shape, generator=torch.Generator().manual_seed(4)).double()
    full = torch.as_tensor(factor, dtype=torch.float64).expand(2, 4, 5)
    bias = torch.tensor([1.0, -1.0, 0.5, 2.0], dtype=torch.float64)
    expected = dense(
        case,
        scale,
        score_scale=lambda b, h, s: full[b, h, s].double(),
        bias=lambda b, h, s, segment: bias[segment],
        windows=WINDOWS,
    )
    for block in (None, 2):
        same(run(case, scale, controls=Controls(bias=bias, score_scale=factor), block=block), expected)


def test_neutral_controls_change_no_bit():
    from driftlab.attention import Controls

    case, scale = random_case()
    neutral = Controls(
        bias=torch.zeros(SEGMENTS, dtype=torch.float64),
        drop=torch.zeros(2, 9, dtype=torch.bool),
        score_scale=torch.ones(2, 4, 5, dtype=torch.float64),
    )
    plain, controlled = run(case, scale), run(case, scale, controls=neutral)
    for name in FIELDS:
        assert torch.equal(getattr(plain, name), getattr(controlled, name)), name


@pytest.mark.parametrize("own", [0, 2])
def test_gradients(own):
    from driftlab.attention import Controls, attend

    case, scale = random_case(heads=2, kv_heads=1, own=own, batch=1, starts=3, context=4, d_head=3, d_value=2)
    names = ("q", "context_k", "context_v", "own_k", "own_v")
    controls = Controls(
        bias=torch.tensor([0.5, -0.5, 0.1, 1.0], dtype=torch.float64),
        drop=torch.tensor([[False, True, False, False]]),
        score_scale=0.7,
    )

    def outputs(*tensors):
        result = attend(
            **dict(zip(names, tensors, strict=True)),
            **{"rows": case["rows"], "segments": case["segments"]},
            **{"scale": scale, "controls": controls, "block": 2, "sink_logit": torch.zeros(2, dtype=torch.float64)},
        )
        return result.out, result.lse

    tensors = [case[name].requires_grad_() for name in names if case[name].numel()]
    empty = [case[name] for name in names if not case[name].numel()]
    assert torch.autograd.gradcheck(lambda *given: outputs(*given, *empty), tensors)


def test_training_keeps_no_map_of_all_starts():
    """Four depths of T = 4,096 would keep gigabytes of attention maps for the backward pass."""
    from driftlab.attention import attend

    case, scale = random_case(starts=64, context=64, own=1)
    inputs = {name: t.clone().requires_grad_() for name, t in case.items() if t.is_floating_point()}
    kept, grads = [], []
    for block in (64, 8):
        sizes = {}

        def pack(tensor, sizes=sizes):
            sizes[tensor.data_ptr()] = tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = attend(**{**case, **inputs}, scale=scale, block=block).out
        kept.append(max(sizes.values()))
        grads.append(torch.autograd.grad(out.square().sum(), list(inputs.values())))
    one_map = 2 * 4 * 64 * 65
    assert max(kept) < one_map / 2
    for whole, blocks in zip(*grads, strict=True):
        torch.testing.assert_close(whole, blocks, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_keep_scores_and_masses_in_float32(dtype):
    """The masses are those of the rounded inputs, not of rounded scores."""
    case, scale = random_case(context=200, d_head=32)
    half = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in case.items()}
    wide = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in half.items()}
    result, expected = run(half, scale), run(wide, scale)
    assert result.out.dtype == dtype
    for name in ("lse", "mass", "entropy", "recent", "columns"):
        assert getattr(result, name).dtype == torch.float32
        torch.testing.assert_close(getattr(result, name).double(), getattr(expected, name), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.mass.sum(-1), torch.ones(2, 4, 5), rtol=0, atol=1e-6)
    torch.testing.assert_close(result.out.double(), expected.out, rtol=0.02, atol=0.02)


def test_what_is_not_asked_for_is_not_computed():
    from driftlab.attention import Stats

    case, scale = random_case()
    bare = run(case, scale, stats=Stats())
    assert [bare.mass, bare.entropy, bare.recent, bare.columns] == [None] * 4
    full = run(case, scale)
    assert torch.equal(bare.out, full.out)
    assert torch.equal(bare.lse, full.lse)
    assert torch.equal(bare.visible, full.visible)


# ---- on the drafter's own attention module


def cached(drafter, trajectory, depth=3):
    from driftlab import all_starts

    return drafter.run_with_cache(trajectory, depth, feed="own", run=all_starts)


def test_controls_of_the_module_change_everything_downstream(make_drafter, tiny_trajectory):
    from driftlab.attention import Controls

    drafter = make_drafter("eagle31")
    attention = drafter.layers[0].self_attn
    data = tiny_trajectory.subset([0, 1])
    _, before = cached(drafter, data)
    for controls in (Controls(bias=torch.tensor([3.0, 0, 0, 0])), Controls(score_scale=0.1)):
        attention.controls = controls
        _, after = cached(drafter, data)
        for depth in (1, 2, 3):
            assert not torch.allclose(before["hook_feedback", depth], after["hook_feedback", depth])
    attention.controls = Controls()
    _, after = cached(drafter, data)
    for depth in (1, 2, 3):
        assert torch.equal(before["hook_feedback", depth], after["hook_feedback", depth])


@pytest.mark.parametrize("bias", [-1e4, -torch.inf])
def test_a_bias_on_self_changes_depth_2_on_only_and_pins_the_mass(make_drafter, tiny_trajectory, bias):
    from driftlab.attention import Controls

    drafter = make_drafter()
    _, before = cached(drafter, tiny_trajectory.subset([0]))
    drafter.layers[0].self_attn.controls = Controls(bias=torch.tensor([0, 0, 0, bias]))
    _, after = cached(drafter, tiny_trajectory.subset([0]))
    assert torch.equal(before["hook_feedback", 1], after["hook_feedback", 1])
    for depth in (2, 3):
        mass = after["layers.0.self_attn.hook_mass", depth]
        assert (mass[..., SELF] == 0).all()
        torch.testing.assert_close(mass.sum(-1), torch.ones(mass.shape[:-1]))
        assert (before["layers.0.self_attn.hook_mass", depth][..., SELF] > 0).all()
        assert not torch.allclose(before["hook_feedback", depth], after["hook_feedback", depth])


def test_a_dropped_key_has_no_mass_at_any_depth(make_drafter, tiny_trajectory):
    from driftlab.attention import Controls

    drafter = make_drafter()
    drop = torch.zeros(1, len(tiny_trajectory.tokens(0)) - 1, dtype=torch.bool)
    drop[:, 3] = True
    _, before = cached(drafter, tiny_trajectory.subset([0]))
    drafter.layers[0].self_attn.controls = Controls(drop=drop)
    _, after = cached(drafter, tiny_trajectory.subset([0]))
    for depth in (1, 2, 3):
        assert (before["layers.0.self_attn.hook_columns", depth][..., 3] > 0).all()
        assert (after["layers.0.self_attn.hook_columns", depth][..., 3] == 0).all()
        visible = [cache["layers.0.self_attn.hook_visible", depth] for cache in (before, after)]
        assert torch.equal(visible[0] - 1, visible[1])


def test_dropping_every_key_is_refused_and_padding_is_not_looked_at():
    from driftlab import DriftlabError
    from driftlab.attention import Controls, attend

    case, scale = random_case(own=0)
    drop = torch.zeros(2, 9, dtype=torch.bool)
    drop[1, :1] = True  # the only key of the start at row 0
    with pytest.raises(DriftlabError, match="sequence 1 of the batch, row 0: every key is dropped"):
        attend(**case, scale=scale, controls=Controls(drop=drop))
    valid = torch.ones(2, 5, dtype=torch.bool)
    valid[1, 0] = False
    assert (
        attend(**case, scale=scale, controls=Controls(drop=drop), valid=valid)
        .out[valid[:, None].expand(2, 4, 5)]
        .isfinite()
        .all()
    )


def test_a_second_derivative_is_refused_where_it_would_be_wrong():
    """The backward pass is made by hand, without a graph of its own."""
    from driftlab.attention import attend

    q = torch.randn(1, 2, 3, 4, requires_grad=True)
    k, v = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4)
    own = torch.zeros(1, 2, 3, 0, 4)
    rows, segments = torch.tensor([[2, 3, 4]]), torch.full((1, 5), 2)
    out = attend(q, k, v, own, own, rows=rows, segments=segments, scale=0.5).out
    (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.square().sum().backward()


def test_inputs_are_let_go_after_the_backward_pass_though_the_loss_is_kept():
    import gc
    import weakref

    from driftlab.attention import attend

    def loss():
        q = torch.randn(1, 2, 3, 4, requires_grad=True)
        scaled = q * 2
        k = torch.randn(1, 2, 5, 4)
        own = torch.zeros(1, 2, 3, 0, 4)
        rows, segments = torch.tensor([[2, 3, 4]]), torch.full((1, 5), 2)
        return attend(scaled, k, k, own, own, rows=rows, segments=segments, scale=0.5).out.sum(), weakref.ref(scaled)

    kept, scaled = loss()
    assert scaled() is not None
    kept.backward()
    gc.collect()
    assert scaled() is None
