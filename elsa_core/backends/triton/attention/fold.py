"""One tile of keys folded into the state of BLOCK_M queries, and the loops over tiles."""

from __future__ import annotations

import triton
import triton.language as tl

from elsa_core.backends.triton.shared.helpers import (
    FACTOR_LIMIT,
    LEAST_VALUE,
    add_scaled,
    apply_mask,
    clamped_power,
    exponent,
    extent,
    fails_guard,
    halves,
    load_part,
    power,
    row_before,
    wide,
)


@triton.jit
def advance(s, f, m, z, shift, READY: tl.constexpr):
    """Fold scores into the reference and the sum. Returns m, z, the old state's factor, the
    weights.

    READY: s is in base 2 already; else s * f is. m is the running maximum less `shift`, rounded:
    weights are 2**shift at most, so that small ones stay normal in float16. Whatever m was rounded
    to, weights, sums and factors refer to the same m; shift = 7 rounds to 8 at most.
    """
    if READY:
        m_new = tl.maximum(m, tl.max(s, 1) - shift)
    else:
        m_new = tl.maximum(m, tl.max(s, 1) * f - shift)
    # a row without a visible key yet keeps m = -inf and weights 0, never exp2(-inf + inf)
    m_safe = tl.where(m_new == -float("inf"), 0.0, m_new)
    a = tl.exp2(m - m_safe)
    if READY:
        p = tl.exp2(s - m_safe[:, None])
    else:
        p = tl.exp2(s * f - m_safe[:, None])
    # summed over the columns that one lane holds; lanes are added up once, after the last tile
    part = tl.sum(tl.reshape(p, [p.shape[0], p.shape[1] // 8, 8]), 1)  # [BM, 8]
    return m_new, z * a[:, None] + part, a, p


@triton.jit
def scores_of(qh0, ql0, qh1, ql1, kh0, kl0, kh1, kl1, D1: tl.constexpr, MODE: tl.constexpr):
    """Q K^T of scaled operands, smallest products first. [BM, BN]"""
    if MODE == 1:
        s = tl.dot(ql0, kh0.T)
        s = tl.dot(qh0, kl0.T, s)
        if D1:
            s = tl.dot(ql1, kh1.T, s)
            s = tl.dot(qh1, kl1.T, s)
        s = tl.dot(qh0, kh0.T, s)
    else:
        s = tl.dot(qh0, kh0.T)
    if D1:
        s = tl.dot(qh1, kh1.T, s)
    return s


@triton.jit
def accumulate_pv(acc, a, ph, pl, vh, vl, fv, MODE: tl.constexpr, FRESH: tl.constexpr):
    """acc * a + P V. A fresh accumulator per tile: tensor cores truncate, float32 adds round. [BM,
    V]
    """
    if MODE == 1:
        o = tl.dot(pl, vh)
        o = tl.dot(ph, vl, o)
        o = tl.dot(ph, vh, o)
        return acc * a[:, None] + o * fv
    if FRESH:
        return add_scaled(acc, a, tl.dot(ph, vh) * fv)
    return tl.dot(ph, vh, acc * a[:, None])


@triton.jit
def split_tile(x0, x1, before0, before1, factor, W1: tl.constexpr, LIMIT: tl.constexpr):
    """A float32 tile as scaled hi + lo: the halves, the exponent, and whether the guard failed.

    The scaled tile is multiplied by `factor` in [1, 2) before it is split. before0, before1: the
    magnitudes of the row before it, or 0.
    """
    top, least = extent(tl.abs(x0), before0)
    if W1:
        top1, least1 = extent(tl.abs(x1), before1)
        top = tl.maximum(top, top1)
        least = tl.minimum(least, least1)
    e = exponent(top)
    h0, l0 = halves(x0 * (power(e) * factor))
    h1 = h0
    l1 = l0
    if W1:
        h1, l1 = halves(x1 * (power(e) * factor))
    return h0, l0, h1, l1, e, fails_guard(least, e, LIMIT)


@triton.jit
def load_split(p, o_n, region, W0: tl.constexpr, W1: tl.constexpr, HAS_LOW: tl.constexpr):
    """The halves of a whole tile that `split.py` wrote: rows of W0 + W1 columns."""
    h0 = load_part(p, o_n, 0, W0 + W1, 1, 0, W0, W0 + W1, True, False)
    l0 = h0
    if HAS_LOW:
        l0 = load_part(p + region, o_n, 0, W0 + W1, 1, 0, W0, W0 + W1, True, False)
    h1 = h0
    l1 = l0
    if W1:
        h1 = load_part(p, o_n, 0, W0 + W1, 1, W0, W1, W0 + W1, True, False)
        l1 = h1
        if HAS_LOW:
            l1 = load_part(p + region, o_n, 0, W0 + W1, 1, W0, W1, W0 + W1, True, False)
    return h0, l0, h1, l1


@triton.jit
def fold_tile(
    qh0, ql0, qh1, ql1, f, e_q, m, z, acc0, acc1, bad, e_k, e_v,
    p_k, p_v, p_mask, WK, WV, p_e, region_k, region_v, n0, columns,
    k_n, k_d, v_n, v_d, mask_q, mask_k, row0, rows,
    MODE: tl.constexpr, PRE: tl.constexpr, FRESH: tl.constexpr, MASK: tl.constexpr,
    CAUSAL: tl.constexpr, TEST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    DV: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    UNIT_D: tl.constexpr, SHIFT: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """One tile of keys, from where it lies: as given, or split ahead (then e_k and e_v are its
    exponents).

    TEST: 0 every key is there and seen by every row, 1 scores are tested for length and causality,
    2 they are tested in the tiles that need it.
    """
    BOUNDED: tl.constexpr = TEST != 0
    o_m = tl.arange(0, BM)
    o_n = tl.arange(0, BN)
    fv = 1.0
    e_k_next = e_k
    e_v_next = e_v
    if PRE:
        kh0, kl0, kh1, kl1 = load_split(WK + n0 * (D0 + D1), o_n, region_k, D0, D1, MODE == 1)
        # the next tile's, so that nothing waits for them
        e_k_next = tl.load(p_e + 2)
        e_v_next = tl.load(p_e + 3)
        f = clamped_power(e_q - e_k)
        fv = power(-e_v)
    else:
        k0 = load_part(p_k + n0 * k_n, o_n, columns, k_n, k_d, 0, D0, D, UNIT_D, BOUNDED)
        k1 = k0
        if D1:
            k1 = load_part(p_k + n0 * k_n, o_n, columns, k_n, k_d, D0, D1, D, UNIT_D, BOUNDED)
        if MODE == 0:
            kh0 = k0
            kl0 = k0
            kh1 = k1
            kl1 = k1
        else:
            before = 0.0
            if BOUNDED:
                before = row_before(p_k + n0 * k_n, n0, k_n, k_d, 0, D0, D, UNIT_D)
            kh0, kl0, kh1, kl1, e, bad_k = split_tile(k0, k1, before, 0.0, 1.0, D1, LIMIT)
            bad = bad | bad_k | (e_q - e > FACTOR_LIMIT).to(tl.int32)
            f = clamped_power(e_q - e)
    s = scores_of(qh0, ql0, qh1, ql1, kh0, kl0, kh1, kl1, D1, MODE)  # [BM, BN]
    if MASK:
        s = s * f
    if MASK or TEST == 1:
        s = apply_mask(
            s, p_mask + n0 * mask_k, o_m, o_n, rows, columns, mask_q, mask_k, row0, n0,
            MASK, CAUSAL, BOUNDED,
        )  # fmt: skip
    elif TEST == 2:
        needed = columns < BN
        if CAUSAL:
            needed = needed | (n0 + BN > row0 + 1)
        if needed:
            s = apply_mask(
                s, p_mask, o_m, o_n, rows, columns, mask_q, mask_k, row0, n0, 0, CAUSAL, True
            )
    m, z, a, p = advance(s, f, m, z, SHIFT, MASK != 0)

    if PRE:
        vh0, vl0, vh1, vl1 = load_split(WV + n0 * (V0 + V1), o_n, region_v, V0, V1, MODE == 1)
    else:
        vh0 = load_part(p_v + n0 * v_n, o_n, columns, v_n, v_d, 0, V0, DV, UNIT_D, BOUNDED)
        vh1 = vh0
        if V1:
            vh1 = load_part(p_v + n0 * v_n, o_n, columns, v_n, v_d, V0, V1, DV, UNIT_D, BOUNDED)
        vl0 = vh0
        vl1 = vh1
        if MODE != 0:
            before = 0.0
            if BOUNDED:
                before = row_before(p_v + n0 * v_n, n0, v_n, v_d, 0, V0, DV, UNIT_D)
            vh0, vl0, vh1, vl1, e, bad_v = split_tile(vh0, vh1, before, 0.0, 1.0, V1, LIMIT)
            bad = bad | bad_v | (e < LEAST_VALUE).to(tl.int32)
            fv = power(-e)
    if MODE == 0:
        ph = p.to(vh0.dtype)
        pl = ph
    else:
        ph, pl = halves(p)
    acc0 = accumulate_pv(acc0, a, ph, pl, vh0, vl0, fv, MODE, FRESH)
    if V1:
        acc1 = accumulate_pv(acc1, a, ph, pl, vh1, vl1, fv, MODE, FRESH)
    return m, z, acc0, acc1, bad, e_k_next, e_v_next


@triton.jit
def merged(m0, z0, x0, y0, m1, z1, x1, y1):
    """The state of two runs of keys: the monoid's product, on chip."""
    m = tl.maximum(m0, m1)
    m_safe = tl.where(m == -float("inf"), 0.0, m)
    a = tl.exp2(m0 - m_safe)[:, None]
    b = tl.exp2(m1 - m_safe)[:, None]
    return m, z0 * a + z1 * b, x0 * a + x1 * b, y0 * a + y1 * b


@triton.jit
def key_tiles(
    lo, chunk, n_k, row0, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr
):  # fmt: skip
    """(full, hi): a program's loops over keys run from `lo` to `hi`, the partition's end or the
    causal limit, and up to `full` tiles are whole and seen by every row.
    """
    hi = tl.minimum(n_k, lo + chunk)
    full = lo + (hi - lo) // BN * BN
    if CAUSAL:
        hi = tl.minimum(hi, row0 + BM)
        full = tl.minimum(full, lo + tl.maximum(row0 + 1 - lo, 0) // BN * BN)
    return full, hi


@triton.jit
def fold_range(
    qh0, ql0, qh1, ql1, f, e_q, m, z, acc0, acc1, bad, e_k, e_v,
    p_k, p_v, p_mask, WK, WV, p_e, region_k, region_v, lo, full, hi, n_k,
    k_n, k_d, v_n, v_d, mask_q, mask_k, row0, rows,
    MODE: tl.constexpr, PRE: tl.constexpr, FRESH: tl.constexpr, MASK: tl.constexpr,
    CAUSAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    DV: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    UNIT_D: tl.constexpr, SHIFT: tl.constexpr, LIMIT: tl.constexpr,
    ONE_LOOP: tl.constexpr, STAGES: tl.constexpr, TAIL_STAGES: tl.constexpr,
):  # fmt: skip
    """Tiles in [lo, full) untested, those in [full, hi) tested for length and causality.

    ONE_LOOP: one loop that asks of each tile whether it needs a test.
    """
    if ONE_LOOP:
        full = lo
    else:
        for n0 in tl.range(lo, full, BN, num_stages=STAGES):
            m, z, acc0, acc1, bad, e_k, e_v = fold_tile(
                qh0, ql0, qh1, ql1, f, e_q, m, z, acc0, acc1, bad, e_k, e_v,
                p_k, p_v, p_mask, WK, WV, p_e + n0 // BN * 2, region_k, region_v,
                wide(n0), n_k - n0, k_n, k_d, v_n, v_d, mask_q, mask_k, row0, rows,
                MODE, PRE, FRESH, MASK, False, 0, BM, BN,
                D, D0, D1, DV, V0, V1, UNIT_D, SHIFT, LIMIT,
            )  # fmt: skip
    for n0 in tl.range(full, hi, BN, num_stages=TAIL_STAGES):
        m, z, acc0, acc1, bad, e_k, e_v = fold_tile(
            qh0, ql0, qh1, ql1, f, e_q, m, z, acc0, acc1, bad, e_k, e_v,
            p_k, p_v, p_mask, WK, WV, p_e + n0 // BN * 2, region_k, region_v,
            wide(n0), n_k - n0, k_n, k_d, v_n, v_d, mask_q, mask_k, row0, rows,
            MODE, PRE, FRESH, MASK, CAUSAL, 2 if ONE_LOOP else 1, BM, BN,
            D, D0, D1, DV, V0, V1, UNIT_D, SHIFT, LIMIT,
        )  # fmt: skip
    return m, z, acc0, acc1, bad
