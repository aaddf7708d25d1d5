"""One query against many keys: keys and values streamed once, multiplied with float32 FMA."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from elsa_core.backends.triton.attention import INTEGERS
from elsa_core.backends.triton.shared.helpers import (
    LN2,
    LOG2E,
    exponent,
    finite_score,
    load_tile,
    power,
    times_power,
    wide,
)


@triton.jit
def fold_keys(
    q, e_s, m, z, acc, p_k, p_v, p_mask, n0, n_k, stride_k, k_d, stride_v, v_d, mask_k, weight,
    MASK: tl.constexpr, BOUNDED: tl.constexpr, UNIT_D: tl.constexpr, BN: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    """A tile of keys: every row of `acc` is a lane's own partial sum, added up after the loop."""
    o_n = tl.arange(0, BN)
    o_d = tl.arange(0, DP)
    o_v = tl.arange(0, VP)
    columns = n_k - n0
    row = wide(n0)
    p = p_k + row * stride_k + o_n[:, None] * stride_k
    p = p + (o_d[None, :] if UNIT_D else o_d[None, :] * k_d)
    k = load_tile(p, o_n < columns, o_d < D, BOUNDED, BOUNDED or D < DP).to(tl.float32)  # [BN, DP]
    p = p_v + row * stride_v + o_n[:, None] * stride_v
    p = p + (o_v[None, :] if UNIT_D else o_v[None, :] * v_d)
    v = load_tile(p, o_n < columns, o_v < DV, BOUNDED, BOUNDED or DV < VP).to(tl.float32)
    s = finite_score(tl.sum(k * q[None, :], 1), e_s)  # [BN]
    if MASK:
        p = p_mask + (n0 + o_n) * mask_k
        if MASK == 1:
            b = tl.load(p, mask=o_n < columns, other=0)
            s = tl.where(b != 0, s, -float("inf"))
        else:
            s += tl.load(p, mask=o_n < columns, other=0.0).to(tl.float32) * LOG2E
    if BOUNDED:
        s = tl.where(o_n < columns, s, -float("inf"))
    m_new = tl.maximum(m, tl.max(s, 0))
    m_safe = tl.where(m_new == -float("inf"), 0.0, m_new)
    a = tl.exp2(m - m_safe)
    w = tl.exp2(s - m_safe)
    z = z * a + w
    acc = acc * a + (w * weight)[:, None] * v
    return m_new, z, acc


@triton.jit
def fold_row(
    p_q, p_k, p_v, p_mask, lo, hi, n_k, q_d, k_n, k_d, v_n, v_d, mask_k, shift, scale_exp, scale,
    MASK: tl.constexpr, UNIT_D: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    """The keys [lo, hi) of n_k folded for one query: the output [VP] and base 2 log-sum-exp."""
    o_d = tl.arange(0, DP)
    q = tl.load(p_q + o_d * q_d, mask=o_d < D, other=0.0).to(tl.float32)
    # the scaled query stays below 2**-9: its product with any finite key is finite
    e_q = exponent(tl.max(tl.abs(q), 0)) - 24
    q = times_power(q, e_q) * scale
    e_s = tl.minimum(tl.maximum(scale_exp - e_q, -252), 254)
    # weights carry 2**-shift <= 1 / n_k, so that no sum of values overflows
    weight = power(-shift)
    full = lo + tl.maximum(hi - lo, 0) // BN * BN
    m = tl.full([], -float("inf"), tl.float32)
    z = tl.zeros([BN], tl.float32)
    acc = tl.zeros([BN, VP], tl.float32)
    for n0 in tl.range(lo, full, BN, num_stages=STAGES):
        m, z, acc = fold_keys(
            q, e_s, m, z, acc, p_k, p_v, p_mask, n0, n_k, k_n, k_d, v_n, v_d, mask_k, weight,
            MASK, False, UNIT_D, BN, D, DP, DV, VP,
        )  # fmt: skip
    for n0 in tl.range(full, hi, BN, num_stages=1):
        m, z, acc = fold_keys(
            q, e_s, m, z, acc, p_k, p_v, p_mask, n0, n_k, k_n, k_d, v_n, v_d, mask_k, weight,
            MASK, True, UNIT_D, BN, D, DP, DV, VP,
        )  # fmt: skip
    total = tl.sum(z, 0)
    empty = total == 0.0
    out = tl.sum(acc, 0) / (tl.where(empty, 1.0, total) * weight)
    return out, tl.where(empty, -float("inf"), m + tl.log2(total))


@triton.jit(do_not_specialize=INTEGERS)
def decode(
    Q, K, V, Mask, Out, LSE,
    heads: tl.int32, group: tl.int32, n_k: tl.int32, chunk: tl.int32,
    shift: tl.int32, scale_exp: tl.int32, scale: tl.float32, flip: tl.float32,
    q_b: tl.int64, q_h: tl.int64, q_d: tl.int64,
    k_b: tl.int64, k_h: tl.int64, k_n: tl.int64, k_d: tl.int64,
    v_b: tl.int64, v_h: tl.int64, v_n: tl.int64, v_d: tl.int64,
    mask_b: tl.int64, mask_h: tl.int64, mask_k: tl.int64, batch: tl.int32,
    MASK: tl.constexpr, PARTIAL: tl.constexpr, UNIT: tl.constexpr, UNIT_D: tl.constexpr,
    OVERLAP: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    """Grid (batch x heads, key partitions). Strides as in `forward.forward`."""
    if OVERLAP:
        gdc_launch_dependents()
    i_bh = tl.program_id(0)
    i_part = tl.program_id(1)
    i_b = (i_bh // heads).to(tl.int64)
    i_h = (i_bh % heads).to(tl.int64)
    i_kv = i_h // group
    p_mask = Mask
    if MASK:
        p_mask = Mask + i_b * mask_b + i_h * mask_h
    lo = i_part * chunk
    out, lse = fold_row(
        Q + (i_b * q_b + i_h * q_h) * UNIT, K + (i_b * k_b + i_kv * k_h) * UNIT,
        V + (i_b * v_b + i_kv * v_h) * UNIT, p_mask, lo, tl.minimum(n_k, lo + chunk), n_k, q_d,
        k_n * UNIT, k_d, v_n * UNIT, v_d, mask_k, shift, scale_exp, scale * flip,
        MASK, UNIT_D, BN, STAGES, D, DP, DV, VP,
    )  # fmt: skip
    o_v = tl.arange(0, VP)
    if PARTIAL:
        i_state = i_part.to(tl.int64) * batch * heads + i_bh
    else:
        # one query: [batch, 1, heads, DV] and [batch, heads, 1] are both in the order of i_bh
        i_state = i_bh.to(tl.int64)
        lse = lse * LN2
    tl.store(Out + i_state * DV + o_v, out.to(Out.dtype.element_ty), mask=o_v < DV)
    tl.store(LSE + i_state, lse)
