r"""Matrix-vector kernels of a draft step, for at most 16 rows: y = W x (+ b), with what surrounds each in the drafter.

    qkv       x = [RMS_e(E[token]) | RMS_h(hidden)];  q, k, v = W x + b;  q, k turned by position;  k, v appended to the cache
    project   y = (W x + b) + residual                                    (o_proj, down_proj)
    gate_up   y = silu(W_g RMS(x) + b_g) * (W_u RMS(x) + b_u)
    fuse      y = W [RMS_1(h_1) | ... | RMS_a(h_a)] + b                   (fc, once a verification)

A program owns BN rows of W and streams them. Two forms (DOT): acc[BM, BN, BK] += w x on CUDA cores, one sum at the end, for
few rows; dot(W, x^T) with the weights on the M side for more, since wgmma needs 64 rows there and the batch has not so many.
Numbers are rounded where the modules round them: (x rstd) to the dtype, times the gain, to the dtype; products of a rotation.
"""

import triton
import triton.language as tl


@triton.jit
def rstds(p_x, m_b, K: tl.constexpr, EPS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, DT: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps) of each row: p_x [BM, 1] pointers -> [BM]."""
    o_k = tl.arange(0, BK)
    b_square = tl.zeros((BM, BK), tl.float32)
    for k in tl.range(0, K, BK):
        m_x = m_b[:, None] & ((k + o_k) < K)[None, :]
        b_x = tl.load(p_x + (k + o_k)[None, :], mask=m_x, other=0.0).to(DT).to(tl.float32)
        b_square += b_x * b_x
    return tl.rsqrt(tl.sum(b_square, 1) / K + EPS)


@triton.jit
def scaled(b_x, b_gain, b_rstd, PLUS_ONE: tl.constexpr, DT: tl.constexpr):
    """Norm of b_x [BM, BK] in the rounding order of the module; b_gain [BK], b_rstd [BM]."""
    b_y = b_x.to(tl.float32) * b_rstd[:, None]
    if PLUS_ONE:
        b_y = (b_y * (1.0 + b_gain.to(tl.float32))[None, :]).to(DT)
    else:
        b_y = (b_y.to(DT).to(tl.float32) * b_gain.to(DT).to(tl.float32)[None, :]).to(DT)
    return b_y


@triton.jit
def store_normed(p_x, p_y, gain, b_rstd, m_b, K: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr,
                 PLUS_ONE: tl.constexpr, DT: tl.constexpr):  # fmt: skip
    """Write the normed rows (NORM off: the rows), [BM, 1] pointers in and out."""
    o_k = tl.arange(0, BK)
    for k in tl.range(0, K, BK):
        m_k = (k + o_k) < K
        b_y = tl.load(p_x + (k + o_k)[None, :], mask=m_b[:, None] & m_k[None, :], other=0.0).to(DT)
        if NORM:
            b_y = scaled(b_y, tl.load(gain + k + o_k, mask=m_k, other=0.0), b_rstd, PLUS_ONE, DT)
        tl.store(p_y + (k + o_k)[None, :], b_y, mask=m_b[:, None] & m_k[None, :])


@triton.jit
def zeros(BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DOT: tl.constexpr):
    """Return an empty accumulator of the form."""
    if DOT:  # noqa: SIM108 (the two have different shapes)
        acc = tl.zeros((BN, BM), tl.float32)
    else:
        acc = tl.zeros((BM, BN, BK), tl.float32)
    return acc


@triton.jit
def accumulate(acc, p_w, m_n, p_x, m_b, gain, b_rstd, K: tl.constexpr, BK: tl.constexpr, NST: tl.constexpr,
               NORM: tl.constexpr, PLUS_ONE: tl.constexpr, DOT: tl.constexpr, DT: tl.constexpr):  # fmt: skip
    """acc += W x over K columns: p_w [BN, 1] and p_x [BM, 1] pointers to rows; x is normed on the way if NORM."""
    o_k = tl.arange(0, BK)
    # the annotation and not the launch option makes the compiler stream the weights ahead of a loop without a dot
    for k in tl.range(0, K, BK, num_stages=NST):
        m_k = (k + o_k) < K
        b_w = tl.load(p_w + (k + o_k)[None, :], mask=m_n[:, None] & m_k[None, :], other=0.0).to(DT)
        b_x = tl.load(p_x + (k + o_k)[None, :], mask=m_b[:, None] & m_k[None, :], other=0.0).to(DT)
        if NORM:
            b_x = scaled(b_x, tl.load(gain + k + o_k, mask=m_k, other=0.0), b_rstd, PLUS_ONE, DT)
        if DOT:
            acc = tl.dot(b_w, tl.trans(b_x), acc, input_precision="ieee")
        else:
            acc += b_w.to(tl.float32)[None, :, :] * b_x.to(tl.float32)[:, None, :]
    return acc


@triton.jit
def reduced(acc, DOT: tl.constexpr):
    """Return the products [BM, BN] in float32."""
    if DOT:  # noqa: SIM108 (the two have different shapes)
        b_y = tl.trans(acc)
    else:
        b_y = tl.sum(acc, 2)
    return b_y


@triton.jit
def halves(b_y, BM: tl.constexpr, BP: tl.constexpr):
    """Split [BM, 2 BP] into its two halves [BM, BP]."""
    return tl.split(tl.permute(tl.reshape(b_y, (BM, 2, BP)), (0, 2, 1)))


@triton.jit(do_not_specialize=["step", "capacity"])
def qkv_kernel(tokens, embed, hidden, rows, w_q, w_k, w_v, bias_q, bias_k, bias_v, gain_e, gain_h, cos, sin, q, k_cache,
               v_cache, residual, step, capacity, B: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
               NST: tl.constexpr, D: tl.constexpr, H: tl.constexpr, KVH: tl.constexpr, HD: tl.constexpr,
               EPS: tl.constexpr, PLUS_ONE: tl.constexpr, BIAS: tl.constexpr, STORE: tl.constexpr,
               DOT: tl.constexpr):  # fmt: skip
    """A program makes BN / 2 pairs (i, i + HD / 2) of one head of q, k or v, so that it can turn them; grid [head x block].

    ``tokens``, ``rows [B]``, ``hidden [B, D]``, ``cos``, ``sin [capacity, HD / 2]``, ``q [B, H, HD]``, caches
    ``[B, KVH, capacity, HD]``: a key lies at its absolute position, rows + step. STORE: the stream starts at the normed hidden.
    """
    DT: tl.constexpr = hidden.dtype.element_ty
    BP: tl.constexpr = BN // 2
    HALF: tl.constexpr = HD // 2
    BLOCKS: tl.constexpr = (HALF + BP - 1) // BP
    i_block = tl.program_id(0)
    i_head = i_block // BLOCKS
    o_b = tl.arange(0, BM)
    m_b = o_b < B
    b_token = tl.load(tokens + o_b, mask=m_b, other=0).to(tl.int64)
    b_place = tl.load(rows + o_b, mask=m_b, other=0).to(tl.int64) + step
    p_e = embed + b_token[:, None] * D
    p_h = hidden + o_b.to(tl.int64)[:, None] * D
    b_rstd_e = rstds(p_e, m_b, D, EPS, BM, BK, DT)
    b_rstd_h = rstds(p_h, m_b, D, EPS, BM, BK, DT)
    if STORE:  # noqa: SIM102 (known to the compiler; the other is not)
        if i_block == 0:
            p_r = residual + o_b.to(tl.int64)[:, None] * D
            store_normed(p_h, p_r, gain_h, b_rstd_h, m_b, D, BK, True, PLUS_ONE, DT)

    w = w_q
    bias = bias_q
    local = i_head
    if i_head >= H:
        w = w_k
        bias = bias_k
        local = i_head - H
    if i_head >= H + KVH:
        w = w_v
        bias = bias_v
        local = i_head - H - KVH
    o_n = tl.arange(0, BN)
    o_pair = (i_block % BLOCKS) * BP + o_n % BP
    m_n = o_pair < HALF
    o_row = local * HD + o_pair + (o_n // BP) * HALF
    p_w = w + o_row.to(tl.int64)[:, None] * (2 * D)
    acc = zeros(BM, BN, BK, DOT)
    acc = accumulate(acc, p_w, m_n, p_e, m_b, gain_e, b_rstd_e, D, BK, NST, True, PLUS_ONE, DOT, DT)
    acc = accumulate(acc, p_w + D, m_n, p_h, m_b, gain_h, b_rstd_h, D, BK, NST, True, PLUS_ONE, DOT, DT)
    b_y = reduced(acc, DOT)
    if BIAS:
        b_y += tl.load(bias + o_row, mask=m_n, other=0.0).to(tl.float32)[None, :]
    b_first, b_second = halves(b_y.to(DT).to(tl.float32), BM, BP)

    o_p = (i_block % BLOCKS) * BP + tl.arange(0, BP)
    m_p = m_b[:, None] & (o_p < HALF)[None, :]
    if i_head < H + KVH:
        o_angle = b_place[:, None] * HALF + o_p[None, :]
        b_cos = tl.load(cos + o_angle, mask=m_p, other=0.0).to(tl.float32)
        b_sin = tl.load(sin + o_angle, mask=m_p, other=0.0).to(tl.float32)
        b_old = b_first
        b_first = (b_old * b_cos).to(DT).to(tl.float32) - (b_second * b_sin).to(DT).to(tl.float32)
        b_second = (b_second * b_cos).to(DT).to(tl.float32) + (b_old * b_sin).to(DT).to(tl.float32)
    o_wide = o_b.to(tl.int64)
    p_y = q + ((o_wide * H + local) * HD)[:, None]
    if i_head >= H:
        p_y = k_cache + (((o_wide * KVH + local) * capacity + b_place) * HD)[:, None]
    if i_head >= H + KVH:
        p_y = v_cache + (((o_wide * KVH + local) * capacity + b_place) * HD)[:, None]
    tl.store(p_y + o_p[None, :], b_first.to(DT), mask=m_p)
    tl.store(p_y + HALF + o_p[None, :], b_second.to(DT), mask=m_p)


@triton.jit
def project_kernel(x, w, bias, residual, y, B: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                   NST: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """``y [B, N]`` = round(W x + b) + residual; ``x [B, K]``, ``residual [B, N]``; grid [cdiv(N, BN)]."""
    DT: tl.constexpr = x.dtype.element_ty
    o_b = tl.arange(0, BM)
    m_b = o_b < B
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    m_n = o_n < N
    p_w = w + o_n.to(tl.int64)[:, None] * K
    p_x = x + o_b.to(tl.int64)[:, None] * K
    acc = zeros(BM, BN, BK, DOT)
    acc = accumulate(acc, p_w, m_n, p_x, m_b, w, o_b, K, BK, NST, False, False, DOT, DT)
    b_y = reduced(acc, DOT)
    if BIAS:
        b_y += tl.load(bias + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
    o_y = o_b.to(tl.int64)[:, None] * N + o_n[None, :]
    m_y = m_b[:, None] & m_n[None, :]
    b_y = b_y.to(DT).to(tl.float32) + tl.load(residual + o_y, mask=m_y, other=0.0).to(tl.float32)
    tl.store(y + o_y, b_y.to(DT), mask=m_y)


@triton.jit
def gate_up_kernel(x, gain, w_gate, w_up, bias_gate, bias_up, y, B: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                   BK: tl.constexpr, NST: tl.constexpr, N: tl.constexpr, K: tl.constexpr, EPS: tl.constexpr,
                   PLUS_ONE: tl.constexpr, BIAS: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """``y [B, N]``, ``x [B, K]``: a program makes BN rows of the gate and the same rows of up; grid [cdiv(N, BN)]."""
    DT: tl.constexpr = x.dtype.element_ty
    o_b = tl.arange(0, BM)
    m_b = o_b < B
    p_x = x + o_b.to(tl.int64)[:, None] * K
    b_rstd = rstds(p_x, m_b, K, EPS, BM, BK, DT)
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    m_n = o_n < N
    o_w = o_n.to(tl.int64)[:, None] * K
    o_k = tl.arange(0, BK)
    acc_gate = zeros(BM, BN, BK, DOT)
    acc_up = zeros(BM, BN, BK, DOT)
    # two loads from two pointers: a choice between pointers would hide from the compiler that both are aligned
    for k in tl.range(0, K, BK, num_stages=NST):
        m_k = (k + o_k) < K
        m_w = m_n[:, None] & m_k[None, :]
        b_gate = tl.load(w_gate + o_w + (k + o_k)[None, :], mask=m_w, other=0.0).to(DT)
        b_up = tl.load(w_up + o_w + (k + o_k)[None, :], mask=m_w, other=0.0).to(DT)
        b_x = tl.load(p_x + (k + o_k)[None, :], mask=m_b[:, None] & m_k[None, :], other=0.0).to(DT)
        b_x = scaled(b_x, tl.load(gain + k + o_k, mask=m_k, other=0.0), b_rstd, PLUS_ONE, DT)
        if DOT:
            acc_gate = tl.dot(b_gate, tl.trans(b_x), acc_gate, input_precision="ieee")
            acc_up = tl.dot(b_up, tl.trans(b_x), acc_up, input_precision="ieee")
        else:
            acc_gate += b_gate.to(tl.float32)[None, :, :] * b_x.to(tl.float32)[:, None, :]
            acc_up += b_up.to(tl.float32)[None, :, :] * b_x.to(tl.float32)[:, None, :]
    b_gate = reduced(acc_gate, DOT)
    b_up = reduced(acc_up, DOT)
    if BIAS:
        b_gate += tl.load(bias_gate + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
        b_up += tl.load(bias_up + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
    b_gate = b_gate.to(DT).to(tl.float32)
    b_gate = (b_gate / (1.0 + tl.exp(-b_gate))).to(DT).to(tl.float32)
    b_y = (b_gate * b_up.to(DT).to(tl.float32)).to(DT)
    tl.store(y + o_b.to(tl.int64)[:, None] * N + o_n[None, :], b_y, mask=m_b[:, None] & m_n[None, :])


@triton.jit
def fuse_kernel(x, gain, w, bias, y, B: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                NST: tl.constexpr, N: tl.constexpr, K: tl.constexpr, AUX: tl.constexpr, EPS: tl.constexpr,
                PLUS_ONE: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """``y [B, N]``; ``x [B, AUX, K]``, ``gain [AUX, K]``, ``w [N, AUX K]``: each state normed alone; grid [cdiv(N, BN)]."""
    DT: tl.constexpr = x.dtype.element_ty
    o_b = tl.arange(0, BM)
    m_b = o_b < B
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    m_n = o_n < N
    p_w = w + o_n.to(tl.int64)[:, None] * (AUX * K)
    p_x = x + o_b.to(tl.int64)[:, None] * (AUX * K)
    acc = zeros(BM, BN, BK, DOT)
    for i in tl.static_range(AUX):
        b_rstd = tl.zeros((BM,), tl.float32)
        if NORM:
            b_rstd = rstds(p_x + i * K, m_b, K, EPS, BM, BK, DT)
        acc = accumulate(
            acc, p_w + i * K, m_n, p_x + i * K, m_b, gain + i * K, b_rstd, K, BK, NST, NORM, PLUS_ONE, DOT, DT
        )
    b_y = reduced(acc, DOT)
    if BIAS:
        b_y += tl.load(bias + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
    tl.store(y + o_b.to(tl.int64)[:, None] * N + o_n[None, :], b_y.to(DT), mask=m_b[:, None] & m_n[None, :])
