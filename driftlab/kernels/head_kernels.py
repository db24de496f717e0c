r"""The draft head: final norm, logits, and the next token, without a second pass over the vocabulary.

    y = RMS(x) (stored: the feedback under norm_output);  z = scale * W y
    each block of the vocabulary:  m_i = max z,  its place,  S_i = sum exp(z - m_i);  at temperature T: sum exp((z - m_i) / T)
    the last block to arrive:      M = max m_i,  lse = M + ln sum S_i exp(m_i - M),  token = arg max

or, of a number u in [0, 1), the token at which the cumulative distribution at T over the draft ids passes u: first the block,
then the place in it. Ties of the arg max go to the smaller id.
"""

import triton
import triton.language as tl

from driftlab.kernels.matvec_kernels import accumulate, reduced, rstds, store_normed, zeros

NEG = tl.constexpr(-1.0e30)


@triton.jit
def head_kernel(x, gain, w, normed, logits, p_max, p_arg, p_sum, p_warm, count, d2t, uniforms, temperature, tokens,
                out_max, out_lse, B: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                NST: tl.constexpr, BLOCKS: tl.constexpr, BB: tl.constexpr, V: tl.constexpr, D: tl.constexpr,
                EPS: tl.constexpr, PLUS_ONE: tl.constexpr, NORM: tl.constexpr, STORE: tl.constexpr,
                LOGIT_SCALE: tl.constexpr, REDUCED: tl.constexpr, SAMPLE: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """Grid [BLOCKS]; BB is the power of two that holds BLOCKS.

    ``x``, ``normed [B, D]``, ``w [V, D]``, parts ``[B, BLOCKS]``, ``logits [B, V]`` float32 (written with SAMPLE alone),
    ``uniforms``, ``tokens``, ``out_max``, ``out_lse [B]``, ``temperature [1]``; ``count [1]`` is zero before and after.
    """
    DT: tl.constexpr = x.dtype.element_ty
    i_block = tl.program_id(0)
    o_b = tl.arange(0, BM)
    m_b = o_b < B
    p_x = x + o_b.to(tl.int64)[:, None] * D
    b_rstd = tl.zeros((BM,), tl.float32)
    if NORM:
        b_rstd = rstds(p_x, m_b, D, EPS, BM, BK, DT)
    if STORE:  # noqa: SIM102 (known to the compiler; the other is not)
        if i_block == 0:
            store_normed(p_x, normed + o_b.to(tl.int64)[:, None] * D, gain, b_rstd, m_b, D, BK, NORM, PLUS_ONE, DT)
    o_n = i_block * BN + tl.arange(0, BN)
    m_n = o_n < V
    p_w = w + o_n.to(tl.int64)[:, None] * D
    acc = zeros(BM, BN, BK, DOT)
    acc = accumulate(acc, p_w, m_n, p_x, m_b, gain, b_rstd, D, BK, NST, NORM, PLUS_ONE, DOT, DT)
    b_z = reduced(acc, DOT).to(DT).to(tl.float32)
    if LOGIT_SCALE != 1.0:
        b_z = (b_z * LOGIT_SCALE).to(DT).to(tl.float32)
    b_z = tl.where(m_n[None, :], b_z, NEG)
    b_m, b_arg = tl.max(b_z, 1, return_indices=True)
    o_part = o_b * BLOCKS + i_block
    tl.store(p_max + o_part, b_m, mask=m_b)
    tl.store(p_arg + o_part, i_block * BN + b_arg, mask=m_b)
    b_e = b_z - b_m[:, None]
    tl.store(p_sum + o_part, tl.sum(tl.where(m_n[None, :], tl.exp(b_e), 0.0), 1), mask=m_b)
    if SAMPLE:
        t = tl.load(temperature)
        tl.store(p_warm + o_part, tl.sum(tl.where(m_n[None, :], tl.exp(b_e / t), 0.0), 1), mask=m_b)
        tl.store(logits + o_b.to(tl.int64)[:, None] * V + o_n[None, :], b_z, mask=m_b[:, None] & m_n[None, :])
    # every thread's part must be written before one of them counts the block in
    tl.debug_barrier()
    arrived = tl.atomic_add(count, 1, sem="acq_rel", scope="gpu")
    if arrived == BLOCKS - 1:
        o_i = tl.arange(0, BB)
        m_i = o_i < BLOCKS
        for b in tl.range(0, B):
            b_ms = tl.load(p_max + b * BLOCKS + o_i, mask=m_i, other=NEG, cache_modifier=".cg")
            b_ss = tl.load(p_sum + b * BLOCKS + o_i, mask=m_i, other=0.0, cache_modifier=".cg")
            largest, block = tl.max(b_ms, 0, return_indices=True)
            token = tl.load(p_arg + b * BLOCKS + tl.minimum(block, BLOCKS - 1), cache_modifier=".cg")
            tl.store(out_max + b, largest)
            tl.store(out_lse + b, largest + tl.log(tl.sum(b_ss * tl.exp(b_ms - largest), 0)))
            if SAMPLE:
                t = tl.load(temperature)
                b_warm = tl.load(p_warm + b * BLOCKS + o_i, mask=m_i, other=0.0, cache_modifier=".cg")
                b_mass = b_warm * tl.exp((b_ms - largest) / t)
                b_upto = tl.cumsum(b_mass, 0)
                goal = tl.load(uniforms + b) * tl.sum(b_mass, 0)
                block = tl.minimum(tl.sum((m_i & (b_upto <= goal)).to(tl.int32), 0), BLOCKS - 1)
                before = tl.sum(tl.where(o_i == block - 1, b_upto, 0.0), 0)
                o_z = block * BN + tl.arange(0, BN)
                m_z = o_z < V
                b_row = tl.load(logits + b * V + o_z, mask=m_z, other=NEG, cache_modifier=".cg")
                b_inside = before + tl.cumsum(tl.where(m_z, tl.exp((b_row - largest) / t), 0.0), 0)
                place = tl.sum((m_z & (b_inside <= goal)).to(tl.int32), 0)
                token = tl.minimum(block * BN + tl.minimum(place, BN - 1), V - 1)
            # a state that is not finite has no arg max: still no address outside the table
            token = tl.minimum(token, V - 1).to(tl.int64)
            if REDUCED:
                token += tl.load(d2t + token)
            tl.store(tokens + b, token)
        tl.store(count, 0)  # ready for the next step
