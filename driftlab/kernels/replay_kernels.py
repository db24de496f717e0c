r"""Triton code of the replay attention: many starts over shared context keys and over the keys of their own chains.

In log2 units, s_j = log2(e) (scale * score_scale * q . k_j + bias[segment(j)]). A row carries m = max s, l = sum 2^(s - m),
u = sum 2^(s - m) (s - m) and acc = sum 2^(s - m) v; a tile with m' = max(m, max_j s_j), d = m - m', a = 2^d, x_j = s_j - m':

    u' = a (u + d l) + sum_j 2^x_j x_j        (before l)
    l' = a l + sum_j 2^x_j
    acc' = a acc + sum_j 2^x_j v_j
    lse = ln2 (m + log2 l),    H = ln2 (log2 l - u / l) >= 0,    mass_c = l_c / l

H is m + log l - (sum p s) / l with m cancelled on paper: a sum of two numbers that are not negative. Keys come in runs of one
segment. Each run has sums of its own that start at 0 but share m and acc, and joins the total by the same rule, so the inner
loop holds no work for segments. Own keys come first, a column each, without tensor cores.

A learned sink b joins after the loop: M = max(m, b'), f = 2^(m - M), z = l f + 2^(b' - M), b' = b log2(e). With the real share
w = l f / z the entropy over real keys, of p that include the sink in their denominator, is w H - w ln w.

Hidden scores are a finite NEG: 2^(NEG - m) = 0 and 0 * NEG = 0, where -inf would give NaN. A row that has seen no key yet has
m = NEG and junk in acc, which the factor a = 2^(NEG - m) = 0 of its first key wipes; its sums are zeroed after each run.
"""

import triton
import triton.language as tl

from driftlab.kernels.configs import REPLAY, AotCase, padded

NEG = tl.constexpr(-1.0e30)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
SELF = tl.constexpr(3)


@triton.jit
def _load(ptr, offsets, m_rows, m_cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Load a [rows, cols] tile with the masks that are needed at all."""
    if ROWS and COLS:
        tile = tl.load(ptr + offsets, mask=m_rows[:, None] & m_cols[None, :], other=0.0)
    elif ROWS:
        tile = tl.load(ptr + offsets, mask=m_rows[:, None], other=0.0)
    elif COLS:
        tile = tl.load(ptr + offsets, mask=m_cols[None, :], other=0.0)
    else:
        tile = tl.load(ptr + offsets)
    return tile


@triton.jit
def _run(
    b_q, b_t, b_after, b_bias, k_ptr, v_ptr, skc, svc, lo, hi, end, qk_scale, b_m, b_l, b_u, b_o,
    D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, BN: tl.constexpr,
    PROBES: tl.constexpr, BIAS: tl.constexpr, WINDOWED: tl.constexpr, IEEE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Fold the keys lo..hi-1 into (m, l, u, acc); MASKED: some of them may be hidden, or at or after ``end``."""
    o_d = tl.arange(0, DP)  # [DP]
    o_v = tl.arange(0, DVP)  # [DVP]
    o_k = tl.arange(0, BN)[:, None] * skc + o_d[None, :]  # [BN, DP], small: the 64-bit part is a scalar
    o_kv = tl.arange(0, BN)[:, None] * svc + o_v[None, :]  # [BN, DVP]
    p_k = k_ptr + lo.to(tl.int64) * skc
    p_v = v_ptr + lo.to(tl.int64) * svc
    for n in tl.range(lo, hi, BN):
        o_n = n + tl.arange(0, BN)
        m_n = o_n < end
        b_k = _load(p_k, o_k, m_n, o_d < D, MASKED, D != DP)  # [BN, DP]
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee" if IEEE else "tf32") * qk_scale  # [BM, BN]
        if BIAS:
            b_s += b_bias[:, None]
        if MASKED:
            ok = (o_n[None, :] <= b_t[:, None]) & m_n[None, :]
            if WINDOWED:
                ok = ok & (o_n[None, :] > b_after[:, None])
            b_s = tl.where(ok, b_s, NEG)
        b_m2 = tl.maximum(b_m, tl.max(b_s, 1))
        b_x = b_s - b_m2[:, None]
        b_p = tl.exp2(b_x)
        b_d = b_m - b_m2
        b_a = tl.exp2(b_d)
        if PROBES:
            b_u = b_a * (b_u + b_d * b_l) + tl.sum(b_p * b_x, 1)
        b_l = b_a * b_l + tl.sum(b_p, 1)
        b_m = b_m2
        b_v = _load(p_v, o_kv, m_n, o_v < DV, MASKED, DV != DVP)  # [BN, DVP]
        b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o * b_a[:, None], input_precision="ieee" if IEEE else "tf32")
        p_k += BN * skc
        p_v += BN * svc
    return b_m, b_l, b_u, b_o


@triton.jit(do_not_specialize=["starts", "own", "n_runs", "window"])
def replay_attn_fwd_kernel(
    q_ptr,  # [batch, head, start, D]
    k_ptr, v_ptr,  # [batch, kv_head, ctx, D or DV]
    own_k_ptr, own_v_ptr,  # [batch, kv_head, start, own, D or DV]
    rows_ptr,  # [batch, start] int32
    runs_ptr,  # [batch, run, 4] int32: first key, end, segment, 1 where the window applies
    bias_ptr,  # [batch, head, start, seg] fp32, or None
    scaling_ptr,  # [batch, head, start] fp32, or None
    sink_ptr,  # [head] fp32, or None
    out_ptr, lse_ptr, mass_ptr, entropy_ptr,  # [batch, head, start, (DV | - | 4 | -)], contiguous
    sqb, sqh, sqs, skb, skh, skc, svb, svh, svc, sakb, sakh, saks, sako, savb, savh, savs, savo,
    sbb, sbh, sbs, sbg, scb, sch, scs,
    starts, own, n_runs, window, scale,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PROBES: tl.constexpr, BIAS: tl.constexpr, SCALING: tl.constexpr,
    SINK: tl.constexpr, WINDOWED: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """Attend with BM rows, each one (start, head of the group), of one kv head of one sequence."""
    i_q = tl.num_programs(0) - 1 - tl.program_id(0)  # late starts have the longest contexts: first come
    i_kv = tl.program_id(1)
    i_b = tl.program_id(2).to(tl.int64)
    o_m = i_q * BM + tl.arange(0, BM)
    m_q = o_m < starts * G
    o_s = tl.where(m_q, o_m // G, 0).to(tl.int64)  # start of each row
    o_h = i_kv * G + o_m % G  # its query head
    o_d = tl.arange(0, DP)
    o_v = tl.arange(0, DVP)
    m_d = o_d < D
    m_v = o_v < DV
    place = (i_b * tl.num_programs(1) * G + o_h) * starts + o_s  # [BM] in [batch, head, start]

    b_q = _load(
        q_ptr + i_b * sqb, (o_h.to(tl.int64) * sqh + o_s * sqs)[:, None] + o_d[None, :], m_q, m_d, True, D != DP
    )
    b_t = tl.load(rows_ptr + i_b * starts + o_s, mask=m_q, other=-1)  # [BM]
    t_hi = tl.max(b_t, 0)
    b_t = tl.where(m_q, b_t, t_hi)
    t_lo = tl.min(b_t, 0)
    qk_scale = scale * LOG2E
    if SCALING:
        b_c = qk_scale * tl.load(scaling_ptr + i_b * scb + o_h * sch + o_s * scs, mask=m_q, other=1.0)
    p_bias = bias_ptr
    b_bias = b_t
    if BIAS:
        p_bias = bias_ptr + i_b * sbb + o_h * sbh + o_s * sbs
        b_bias = tl.maximum(tl.load(p_bias + SELF * sbg, mask=m_q, other=0.0) * LOG2E, NEG)

    b_m = tl.full((BM,), NEG, tl.float32)
    b_l = tl.zeros((BM,), tl.float32)
    b_u = tl.zeros((BM,), tl.float32)
    b_o = tl.zeros((BM, DVP), tl.float32)
    first = 0
    if WINDOWED:
        first = tl.maximum(own - window, 0)
    p_own_k = own_k_ptr + i_b * sakb + i_kv.to(tl.int64) * sakh
    p_own_v = own_v_ptr + i_b * savb + i_kv.to(tl.int64) * savh
    for i in range(first, own):
        b_k = _load(p_own_k + i * sako, (o_s * saks)[:, None] + o_d[None, :], m_q, m_d, True, D != DP).to(tl.float32)
        b_v = _load(p_own_v + i * savo, (o_s * savs)[:, None] + o_v[None, :], m_q, m_v, True, DV != DVP).to(tl.float32)
        b_s = tl.sum(b_q.to(tl.float32) * b_k, 1) * (b_c if SCALING else qk_scale)
        if BIAS:
            b_s += b_bias
        b_m2 = tl.maximum(b_m, b_s)
        b_x = b_s - b_m2
        b_p = tl.exp2(b_x)
        b_d = b_m - b_m2
        b_a = tl.exp2(b_d)
        if PROBES:
            b_u = b_a * (b_u + b_d * b_l) + b_p * b_x
        b_l = b_a * b_l + b_p
        b_o = b_o * b_a[:, None] + b_p[:, None] * b_v
        b_m = b_m2
    if BIAS:  # a bias of -inf hides the own keys
        b_l = tl.where(b_m > NEG * 0.5, b_l, 0.0)
        b_u = tl.where(b_m > NEG * 0.5, b_u, 0.0)
    l_0 = tl.zeros((BM,), tl.float32)
    l_1 = tl.zeros((BM,), tl.float32)
    l_2 = tl.zeros((BM,), tl.float32)
    l_3 = b_l

    p_k = k_ptr + i_b * skb + i_kv.to(tl.int64) * skh
    p_v = v_ptr + i_b * svb + i_kv.to(tl.int64) * svh
    scores_scale = qk_scale
    if SCALING:
        scores_scale = b_c[:, None]
    for r in tl.range(0, n_runs, num_stages=1):
        p_run = runs_ptr + (i_b * n_runs + r) * 4
        lo = tl.load(p_run)
        end = tl.minimum(tl.load(p_run + 1), t_hi + 1)
        seg = tl.load(p_run + 2)
        b_after = b_t
        if BIAS:
            b_bias = tl.maximum(tl.load(p_bias + seg * sbg, mask=m_q, other=0.0) * LOG2E, NEG)
        m_0 = b_m
        s_l = tl.zeros((BM,), tl.float32)
        s_u = tl.zeros((BM,), tl.float32)
        if WINDOWED:
            b_after = tl.where(tl.load(p_run + 3) > 0, b_t + (own - window), -1)
            lo = tl.maximum(lo, tl.min(b_after, 0) + 1)
            mid = lo
        else:
            # no row of this block has to mask the keys up to its first start
            mid = lo + tl.maximum(tl.minimum(end, t_lo + 1) - lo, 0) // BN * BN
            b_m, s_l, s_u, b_o = _run(
                b_q, b_t, b_after, b_bias, p_k, p_v, skc, svc, lo, mid, end, scores_scale, b_m, s_l, s_u, b_o,
                D, DV, DP, DVP, BN, PROBES, BIAS, WINDOWED, IEEE, False,
            )  # fmt: skip
        b_m, s_l, s_u, b_o = _run(
            b_q, b_t, b_after, b_bias, p_k, p_v, skc, svc, mid, end, end, scores_scale, b_m, s_l, s_u, b_o,
            D, DV, DP, DVP, BN, PROBES, BIAS, WINDOWED, IEEE, True,
        )  # fmt: skip
        seen = b_m > NEG * 0.5
        s_l = tl.where(seen, s_l, 0.0)
        b_d = m_0 - b_m
        b_a = tl.exp2(b_d)
        if PROBES:
            b_u = b_a * (b_u + b_d * b_l) + tl.where(seen, s_u, 0.0)
            l_0 = b_a * l_0 + tl.where(seg == 0, s_l, 0.0)
            l_1 = b_a * l_1 + tl.where(seg == 1, s_l, 0.0)
            l_2 = b_a * l_2 + tl.where(seg == 2, s_l, 0.0)
            l_3 = b_a * l_3 + tl.where(seg == 3, s_l, 0.0)
        b_l = b_a * b_l + s_l

    b_z = b_l
    b_f = tl.full((BM,), 1.0, tl.float32)
    if PROBES:
        l_real = tl.where(b_l > 0, b_l, 1.0)  # every key may be hidden by a bias beside a learned sink
        b_h = tl.log2(l_real) - b_u / l_real
    if SINK:
        b_sink = tl.load(sink_ptr + o_h).to(tl.float32) * LOG2E
        b_m2 = tl.maximum(b_m, b_sink)
        b_f = tl.exp2(b_m - b_m2)
        b_z = b_l * b_f + tl.exp2(b_sink - b_m2)
        b_m = b_m2
    # of a row that sees nothing, or NaN alone, there is no answer
    b_r = tl.where(b_z > 0, b_f / b_z, float("nan"))
    m_o = m_q[:, None]
    if DV != DVP:
        m_o = m_o & m_v[None, :]
    tl.store(out_ptr + place[:, None] * DV + o_v[None, :], (b_o * b_r[:, None]).to(out_ptr.dtype.element_ty), mask=m_o)
    tl.store(lse_ptr + place, (b_m + tl.log2(b_z)) * LN2, mask=m_q)
    if PROBES:
        tl.store(mass_ptr + place * 4 + 0, l_0 * b_r, mask=m_q)
        tl.store(mass_ptr + place * 4 + 1, l_1 * b_r, mask=m_q)
        tl.store(mass_ptr + place * 4 + 2, l_2 * b_r, mask=m_q)
        tl.store(mass_ptr + place * 4 + 3, l_3 * b_r, mask=m_q)
        if SINK:
            b_w = b_l * b_r
            b_h = b_w * (b_h - tl.log2(tl.maximum(b_w, 1.0e-37)))
        tl.store(entropy_ptr + place, tl.where(b_z > 0, b_h * LN2, float("nan")), mask=m_q)


_STRIDES = tuple(f"s{name}" for tensor in ("q:bhs", "k:bhc", "v:bhc", "ak:bhso", "av:bhso", "b:bhsg", "c:bhs")
                 for name in [tensor.split(":")[0] + axis for axis in tensor.split(":")[1]])  # fmt: skip


def _aot_case(name: str, tile, dtype="bf16", heads=(128, 128), group=4, probes=True, extras=False) -> AotCase:
    block_m, block_n, warps, stages = tile
    half = dtype != "fp32"
    constexprs = {
        **{"G": group, "D": heads[0], "DV": heads[1], "BM": block_m, "BN": block_n, "PROBES": probes, "IEEE": not half},
        **{n: padded(size) for n, size in zip(("DP", "DVP"), heads, strict=True)},
        **dict.fromkeys(("BIAS", "SCALING", "SINK", "WINDOWED"), extras),
    }
    inputs = ("q_ptr", "k_ptr", "v_ptr", "own_k_ptr", "own_v_ptr", "out_ptr")
    floats = ("lse_ptr", "mass_ptr", "entropy_ptr", "bias_ptr", "scaling_ptr", "sink_ptr")
    types = {
        **dict.fromkeys(inputs, f"*{dtype}"), **dict.fromkeys(floats, "*fp32"),
        **dict.fromkeys(("rows_ptr", "runs_ptr"), "*i32"), **dict.fromkeys(_STRIDES, "i32"),
        **dict.fromkeys(("starts", "own", "n_runs", "window"), "i32"), "scale": "fp32",
    }  # fmt: skip
    unused = [] if probes else ["mass_ptr", "entropy_ptr"]
    unused += [] if extras else ["bias_ptr", "scaling_ptr", "sink_ptr"]
    for argument in unused:
        del types[argument]
        constexprs[argument] = None
    aligned = tuple(n for n in types if n.endswith("_ptr") or (n in _STRIDES and n[:2] not in ("sb", "sc")))
    wgmma = half and block_m >= 64
    return AotCase(
        name, replay_attn_fwd_kernel, types, constexprs, aligned, warps, stages, wants_wgmma=wgmma, wants_async=half
    )


def aot_cases() -> list[AotCase]:
    """Return every tile of the table with probes, the large one without as well, and one case with every extra."""
    heads = {64: (64, 64), 128: (128, 128), 256: (192, 128)}
    different = {(size, precision, tile): rows for (size, precision, rows), tile in REPLAY.items()}
    cases = []
    for (size, precision, tile), rows in different.items():
        name = f"replay {size} {precision} {rows}"
        cases.append(_aot_case(name, tile, "bf16" if precision == "half" else "fp32", heads[size]))
    large = REPLAY[128, "half", "many"]
    cases.append(_aot_case("replay 128 half many, no probes", large, probes=False))
    cases.append(_aot_case("replay 128 half few, every extra", REPLAY[128, "half", "few"], "fp16", extras=True))
    return cases
