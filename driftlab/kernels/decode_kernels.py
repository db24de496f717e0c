r"""Attention of one draft step: one query a head and sequence, the keys split over programs, the last to arrive merges.

With s2 = s log2(e), each split keeps m = max s2, l = sum 2^(s2 - m), a = sum 2^(s2 - m) v, u = sum 2^(s2 - m) (s2 - m) and, by
segment, the part of l that lies there. Two parts at a common maximum M merge by w = 2^(m - M): l = sum w l_i, a = sum w a_i,
mass = sum w mass_i, u = sum w (u_i + (m_i - M) l_i). Out = a / l, lse = ln 2 (M + log2 l), entropy = ln 2 (log2 l - u / l).
(The split: Flash-Decoding, 2023. Nobody waits, so the order of programs does not matter.)
"""

import triton
import triton.language as tl

NEG = tl.constexpr(-1.0e30)  # a masked score: minus infinity would make NaN of the difference of two
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
SELF = tl.constexpr(3)


@triton.jit
def segment_sum(b_p, b_seg, SEGMENT: tl.constexpr):
    """Return the part of b_p [BG, BC] on the keys of a segment, [BG]."""
    return tl.sum(tl.where((b_seg == SEGMENT)[None, :], b_p, 0.0), 1)


@triton.jit(do_not_specialize=["step", "capacity"])
def decode_kernel(q, k_cache, v_cache, rows, segments, out, mass, entropy, lse, p_max, p_sum, p_cross, p_mass, p_out,
                  count, step, capacity, H: tl.constexpr, KVH: tl.constexpr, HD: tl.constexpr, BD: tl.constexpr,
                  BG: tl.constexpr, BC: tl.constexpr, SPLITS: tl.constexpr, SCALE: tl.constexpr, WINDOW: tl.constexpr,
                  PROBES: tl.constexpr, NST: tl.constexpr):  # fmt: skip
    """Grid [batch x KVH, SPLITS]; the query heads of a kv head are the rows of one product.

    ``q``, ``out [batch, H, HD]``, caches ``[batch, KVH, capacity, HD]`` by absolute position, ``segments [batch, capacity]``;
    ``mass [batch, H, 4]``, ``entropy``, ``lse [batch, H]`` with PROBES; parts ``[batch, H, SPLITS, ...]`` in float32; ``count
    [batch x KVH]`` is zero before and after. The query stands at rows + step; keys beyond rows are the chain's own.
    """
    DT: tl.constexpr = q.dtype.element_ty
    GROUP: tl.constexpr = H // KVH
    i_pair = tl.program_id(0)
    i_split = tl.program_id(1)
    i_b = (i_pair // KVH).to(tl.int64)
    i_kv = i_pair % KVH
    row = tl.load(rows + i_b).to(tl.int32)
    keys = row + step + 1
    first = 0
    if WINDOW > 0:
        first = tl.maximum(keys - WINDOW, 0)
    size = tl.cdiv(tl.cdiv(keys - first, SPLITS), BC) * BC
    begin = first + i_split * size
    end = tl.minimum(begin + size, keys)

    o_g = tl.arange(0, BG)
    o_d = tl.arange(0, BD)
    o_c = tl.arange(0, BC)
    m_g = o_g < GROUP
    m_d = o_d < HD
    o_head = i_b * H + i_kv * GROUP + o_g
    m_q = m_g[:, None] & m_d[None, :]
    b_q = tl.load(q + o_head[:, None] * HD + o_d[None, :], mask=m_q, other=0.0)
    o_cache = (i_b * KVH + i_kv) * capacity * HD
    b_m = tl.full((BG,), NEG, tl.float32)
    b_l = tl.zeros((BG,), tl.float32)
    b_u = tl.zeros((BG,), tl.float32)
    b_s0 = tl.zeros((BG,), tl.float32)
    b_s1 = tl.zeros((BG,), tl.float32)
    b_s2 = tl.zeros((BG,), tl.float32)
    b_s3 = tl.zeros((BG,), tl.float32)
    b_a = tl.zeros((BG, BD), tl.float32)
    for c in tl.range(begin, end, BC, num_stages=NST):
        o_key = c + o_c
        m_c = o_key < end
        o_kv = o_cache + o_key.to(tl.int64)[:, None] * HD + o_d[None, :]
        m_kv = m_c[:, None] & m_d[None, :]
        b_k = tl.load(k_cache + o_kv, mask=m_kv, other=0.0)
        b_v = tl.load(v_cache + o_kv, mask=m_kv, other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * (SCALE * LOG2E)
        b_s = tl.where(m_c[None, :], b_s, NEG)
        b_new = tl.maximum(b_m, tl.max(b_s, 1))
        b_w = tl.exp2(b_m - b_new)
        b_p = tl.where(m_c[None, :], tl.exp2(b_s - b_new[:, None]), 0.0)
        if PROBES:
            b_seg = tl.load(segments + i_b * capacity + o_key, mask=m_c, other=0)
            b_seg = tl.where(o_key > row, SELF, b_seg)
            b_s0 = b_s0 * b_w + segment_sum(b_p, b_seg, 0)
            b_s1 = b_s1 * b_w + segment_sum(b_p, b_seg, 1)
            b_s2 = b_s2 * b_w + segment_sum(b_p, b_seg, 2)
            b_s3 = b_s3 * b_w + segment_sum(b_p, b_seg, 3)
            b_cross = tl.sum(tl.where(m_c[None, :], b_p * (b_s - b_new[:, None]), 0.0), 1)
            b_u = b_w * (b_u + (b_m - b_new) * b_l) + b_cross
        b_l = b_l * b_w + tl.sum(b_p, 1)
        b_a = b_a * b_w[:, None] + tl.dot(b_p.to(DT), b_v, input_precision="ieee")
        b_m = b_new

    o_part = o_head * SPLITS + i_split
    tl.store(p_max + o_part, b_m, mask=m_g)
    tl.store(p_sum + o_part, b_l, mask=m_g)
    tl.store(p_out + o_part[:, None] * HD + o_d[None, :], b_a, mask=m_q)
    if PROBES:
        tl.store(p_cross + o_part, b_u, mask=m_g)
        tl.store(p_mass + o_part * 4, b_s0, mask=m_g)
        tl.store(p_mass + o_part * 4 + 1, b_s1, mask=m_g)
        tl.store(p_mass + o_part * 4 + 2, b_s2, mask=m_g)
        tl.store(p_mass + o_part * 4 + 3, b_s3, mask=m_g)
    # every thread's part must be written before one of them counts the program in
    tl.debug_barrier()
    arrived = tl.atomic_add(count + i_pair, 1, sem="acq_rel", scope="gpu")
    if arrived == SPLITS - 1:
        o_s = tl.arange(0, SPLITS)
        o_all = o_head[:, None] * SPLITS + o_s[None, :]
        b_ms = tl.load(p_max + o_all, mask=m_g[:, None], other=0.0, cache_modifier=".cg")
        b_ls = tl.load(p_sum + o_all, mask=m_g[:, None], other=1.0, cache_modifier=".cg")
        b_m = tl.max(b_ms, 1)
        b_ws = tl.exp2(b_ms - b_m[:, None])
        b_l = tl.sum(b_ws * b_ls, 1)
        b_a = tl.zeros((BG, BD), tl.float32)
        for i in tl.range(0, SPLITS):
            b_mi = tl.load(p_max + o_head * SPLITS + i, mask=m_g, other=0.0, cache_modifier=".cg")
            o_a = (o_head * SPLITS + i)[:, None] * HD + o_d[None, :]
            b_ai = tl.load(p_out + o_a, mask=m_q, other=0.0, cache_modifier=".cg")
            b_a += tl.exp2(b_mi - b_m)[:, None] * b_ai
        tl.store(out + o_head[:, None] * HD + o_d[None, :], (b_a / b_l[:, None]).to(DT), mask=m_q)
        if PROBES:
            b_us = tl.load(p_cross + o_all, mask=m_g[:, None], other=0.0, cache_modifier=".cg")
            # an empty split has l = 0 and m = NEG: its terms are 0
            b_u = tl.sum(b_ws * (b_us + (b_ms - b_m[:, None]) * b_ls), 1)
            tl.store(entropy + o_head, (tl.log2(b_l) - b_u / b_l) * LN2, mask=m_g)
            tl.store(lse + o_head, (b_m + tl.log2(b_l)) * LN2, mask=m_g)
            for segment in tl.static_range(4):
                b_part = tl.load(p_mass + o_all * 4 + segment, mask=m_g[:, None], other=0.0, cache_modifier=".cg")
                tl.store(mass + o_head * 4 + segment, tl.sum(b_ws * b_part, 1) / b_l, mask=m_g)
        tl.store(count + i_pair, 0)  # ready for the next step
