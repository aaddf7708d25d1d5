"""The gradient kernels: dK and dV by programs of key tiles, dQ by programs of query tiles.

With P = 2**(x - m - s): dV = P^T dO, dS = P * (dO V^T - delta), dQ = scale dS K, dK = scale dS^T Q.
Weights are computed again in every program, each sum is one program's, in one order.

MODE: 0 half (operands as they are; dS and P are rounded to their dtype), always SAFE, 1 split
(three float16 products of hi + lo; each row of P and dS gets a power of two of its own, so that
weights of 1 / N keep their low halves), 2 three TF32 products. All but half sum tiles with
float32 adds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from elsa_core.backends.triton.attention.backward_prepare import (
    SHIFT,
    UNIT,
    UNSHIFT,
    product,
    with_mask,
)
from elsa_core.backends.triton.shared.helpers import exponent, halves, load_part, power, wide


@triton.jit
def load_pair(
    p, region, o_r, rows, stride_n, stride_d,
    DIM: tl.constexpr, WIDTH: tl.constexpr, UNIT_D: tl.constexpr, MODE: tl.constexpr,
    BOUNDED: tl.constexpr,
):  # fmt: skip
    """A tile; for split its halves, whose rows and channels are there to the end of the tile."""
    if MODE == 1:
        hi = load_part(p, o_r, rows, WIDTH, 1, 0, WIDTH, WIDTH, True, False)
        lo = load_part(p + region, o_r, rows, WIDTH, 1, 0, WIDTH, WIDTH, True, False)
    else:
        hi = load_part(p, o_r, rows, stride_n, stride_d, 0, WIDTH, DIM, UNIT_D, BOUNDED)
        lo = hi
    return hi, lo


@triton.jit
def accumulate(acc, x, yh, yl, factor, MODE: tl.constexpr, FRESH: tl.constexpr):
    """acc + x y * factor (MODE 1; else factor is 1)."""
    if MODE == 1:
        e = exponent(tl.max(tl.abs(x), 1))
        xh, xl = halves(x * power(e)[:, None])
        undo = tl.broadcast_to((power(-e) * factor)[:, None], acc.shape)
        acc = tl.fma(product(xh, xl, yh, yl, MODE, False), undo, acc)
    elif MODE == 0 and not FRESH:
        acc = tl.dot(x.to(yh.dtype), yh, acc)
    else:
        x = x.to(yh.dtype)
        # by name: written with + the compiler would let the product accumulate into acc
        acc = tl.fma(product(x, x, yh, yh, MODE, False), 1.0, acc)
    return acc


@triton.jit
def weights(
    t, f, m, s, p_mask, o_m, o_n, rows, columns, above, mask_q, mask_k,
    MODE: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, TEST: tl.constexpr,
    SAFE: tl.constexpr, KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """P (2**SHIFT P in half) of products t; m and s broadcast.

    Query i sees keys j <= i + above.
    """
    x = t * f
    if MASK:
        x = with_mask(x, p_mask, o_m, o_n, rows, columns, mask_q, mask_k, MASK, KEYS_FIRST)
    x = x - m
    if SAFE:
        # nothing outweighs the row's maximum, however far a large score was rounded
        x = tl.minimum(x, SHIFT if MODE == 0 else 0.5)
    if SAFE or MODE != 0:
        x = x - s
    if TEST:
        if KEYS_FIRST:
            valid = (o_n < columns)[:, None]
            if CAUSAL:
                valid = valid & (o_n[:, None] <= (o_m + above)[None, :])
        else:
            valid = (o_n < columns)[None, :]
            if CAUSAL:
                valid = valid & (o_n[None, :] <= (o_m + above)[:, None])
        x = tl.where(valid, x, -float("inf"))
    return tl.exp2(x)


@triton.jit
def fold_queries(
    i0, dk, dv, kh, kl, vh, vl, p_q, p_g, p_mask, p_rows, p_factors, region_q, region_g, row_count,
    f_k, f_v, n_q, columns, first_key, q_n, q_d, g_n, g_d, mask_q, mask_k,
    MODE: tl.constexpr, FRESH: tl.constexpr, MASK: tl.constexpr,
    CAUSAL: tl.constexpr, TEST: tl.constexpr, SAFE: tl.constexpr,
    WANT_K: tl.constexpr, WANT_V: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, DV: tl.constexpr, V0: tl.constexpr, UNIT_D: tl.constexpr,
):  # fmt: skip
    """One tile of queries folded into dK and dV of a tile of keys."""
    o_m = tl.arange(0, BM)
    o_n = tl.arange(0, BN)
    rows = n_q - i0
    i0 = wide(i0)
    f_q = 1.0
    f_g = 1.0
    if MODE == 1:
        f_q = tl.load(p_factors + i0 // UNIT * 2)
        f_g = tl.load(p_factors + i0 // UNIT * 2 + 1)
    qh, ql = load_pair(p_q + i0 * q_n, region_q, o_m, rows, q_n, q_d, D, D0, UNIT_D, MODE, TEST)
    gh, gl = load_pair(p_g + i0 * g_n, region_g, o_m, rows, g_n, g_d, DV, V0, UNIT_D, MODE, TEST)
    m = tl.load(p_rows + i0 + o_m)
    s = m
    if SAFE or MODE != 0:
        s = tl.load(p_rows + row_count + i0 + o_m)
    t = product(kh, kl, qh.T, ql.T, MODE, True)  # [BN, BM]
    p = weights(
        t, f_k * f_q, m[None, :], s[None, :], p_mask + i0 * mask_q, o_m, o_n, rows, columns,
        i0 - first_key, mask_q, mask_k, MODE, MASK, CAUSAL, TEST, SAFE, True,
    )  # fmt: skip
    if WANT_V:
        dv = accumulate(dv, p, gh, gl, f_g, MODE, FRESH)
    if WANT_K:
        delta = tl.load(p_rows + 2 * row_count + i0 + o_m)
        g = product(vh, vl, gh.T, gl.T, MODE, True) * (f_v * f_g)
        ds = p * (g - delta[None, :])
        dk = accumulate(dk, ds, qh, ql, f_q, MODE, FRESH)
    return dk, dv


@triton.jit
def key_side(
    program, Q, K, V, G, Mask, Rows, Factors, DK, DV_,
    heads, group, n_q, n_k, batch, scale, out_scale,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, g_b, g_h, g_n, g_d,
    dk_b, dk_h, dk_n, dk_d, dv_b, dv_h, dv_n, dv_d, mask_b, mask_h, mask_q, mask_k,
    MODE: tl.constexpr, FRESH: tl.constexpr, MASK: tl.constexpr,
    CAUSAL: tl.constexpr, SAFE: tl.constexpr, WANT_K: tl.constexpr, WANT_V: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, DV: tl.constexpr, V0: tl.constexpr, UNIT_D: tl.constexpr,
    UNIT_OUT: tl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of keys, summed over the query heads that share it."""
    tiles = tl.cdiv(n_k, BN)
    i_kv = program // tiles
    first = (program - i_kv * tiles) * BN
    columns = n_k - first
    key_heads = heads // group
    i_b = (i_kv // key_heads).to(tl.int64)
    i_h = (i_kv % key_heads).to(tl.int64)
    q_tiles = tl.cdiv(n_q, UNIT)
    k_tiles = tl.cdiv(n_k, UNIT)
    q_rows = batch.to(tl.int64) * heads * q_tiles
    row_count = q_rows * UNIT
    o_n = tl.arange(0, BN)
    f_k = scale
    f_v = UNSHIFT if MODE == 0 else 1.0
    if MODE == 1:
        q_n = D0
        g_n = V0
        size_k = batch.to(tl.int64) * key_heads * k_tiles * UNIT
        row = wide(i_kv) * k_tiles * UNIT + first
        p_k = K + row * D0
        p_v = V + row * V0
        f_k = scale * tl.load(Factors + 2 * (q_rows + row // UNIT))
        f_v = tl.load(Factors + 2 * (q_rows + row // UNIT) + 1)
    else:
        size_k = q_rows
        p_k = K + i_b * k_b + i_h * k_h + wide(first) * k_n
        p_v = V + i_b * v_b + i_h * v_h + wide(first) * v_n
    kh, kl = load_pair(p_k, size_k * D0, o_n, columns, k_n, k_d, D, D0, UNIT_D, MODE, True)
    vh, vl = load_pair(p_v, size_k * V0, o_n, columns, v_n, v_d, DV, V0, UNIT_D, MODE, True)
    dk = tl.zeros([BN, D0], tl.float32)
    dv = tl.zeros([BN, V0], tl.float32)
    # tiles of queries: [lo, partly) are tested, those of a split from there on see all these keys;
    # its padded queries have no weight
    lo = 0
    partly = 0
    if CAUSAL:
        lo = first // BM * BM
        partly = tl.minimum((first + BN + BM - 2) // BM * BM, n_q)
    TESTED: tl.constexpr = SAFE or MASK
    if TESTED:
        partly = n_q
    for i_g in range(0, group):
        i_q = i_h * group + i_g
        p_mask = Mask
        if MASK:
            p_mask = Mask + i_b * mask_b + i_q * mask_h + wide(first) * mask_k
        i_bh = i_b * heads + i_q
        if MODE == 1:
            p_q = Q + i_bh * q_tiles * UNIT * D0
            p_g = G + i_bh * q_tiles * UNIT * V0
        else:
            p_q = Q + i_b * q_b + i_q * q_h
            p_g = G + i_b * g_b + i_q * g_h
        p_rows = Rows + i_bh * q_tiles * UNIT
        p_f = Factors + 2 * i_bh * q_tiles
        if CAUSAL or TESTED:
            for i0 in tl.range(lo, partly, BM, num_stages=STAGES):
                dk, dv = fold_queries(
                    i0, dk, dv, kh, kl, vh, vl, p_q, p_g, p_mask, p_rows, p_f, row_count * D0,
                    row_count * V0, row_count, f_k, f_v, n_q, columns, first,
                    q_n, q_d, g_n, g_d, mask_q, mask_k,
                    MODE, FRESH, MASK, CAUSAL, True,
                    SAFE, WANT_K, WANT_V, BM, BN, D, D0, DV, V0, UNIT_D,
                )  # fmt: skip
        if not TESTED:
            tl.static_assert(MODE == 1)
            for i0 in tl.range(partly, n_q, BM, num_stages=STAGES):
                dk, dv = fold_queries(
                    i0, dk, dv, kh, kl, vh, vl, p_q, p_g, p_mask, p_rows, p_f, row_count * D0,
                    row_count * V0, row_count, f_k, f_v, n_q, columns, first,
                    q_n, q_d, g_n, g_d, mask_q, mask_k,
                    MODE, FRESH, 0, False, False,
                    False, WANT_K, WANT_V, BM, BN, D, D0, DV, V0, UNIT_D,
                )  # fmt: skip
    inside = (o_n < columns)[:, None]
    if WANT_K:
        o_d = tl.arange(0, D0)
        p = DK + i_b * dk_b + i_h * dk_h + (wide(first) + o_n)[:, None] * dk_n
        p += (o_d if UNIT_OUT else o_d * dk_d)[None, :]
        x = (dk * out_scale).to(DK.dtype.element_ty)
        tl.store(p, x, mask=inside & (o_d < D)[None, :])
    if WANT_V:
        o_v = tl.arange(0, V0)
        p = DV_ + i_b * dv_b + i_h * dv_h + (wide(first) + o_n)[:, None] * dv_n
        p += (o_v if UNIT_OUT else o_v * dv_d)[None, :]
        x = (dv * (UNSHIFT if MODE == 0 else 1.0)).to(DV_.dtype.element_ty)
        tl.store(p, x, mask=inside & (o_v < DV)[None, :])


@triton.jit
def fold_keys(
    n0, dq, pk, total, qh, ql, gh, gl, m, s, delta, p_k, p_v, p_mask, p_factors, region_k, region_v,
    f_q, f_g, n_k, rows, row0, k_n, k_d, v_n, v_d, mask_q, mask_k,
    MODE: tl.constexpr, FRESH: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr,
    TEST: tl.constexpr, SAFE: tl.constexpr, REFINE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, DV: tl.constexpr, V0: tl.constexpr, UNIT_D: tl.constexpr,
):  # fmt: skip
    """One tile of keys folded into dQ of a tile of queries; if REFINE, into P K and sum(dS) too."""
    o_m = tl.arange(0, BM)
    o_n = tl.arange(0, BN)
    columns = n_k - n0
    n0 = wide(n0)
    f_k = 1.0
    f_v = 1.0
    if MODE == 1:
        f_k = tl.load(p_factors + n0 // UNIT * 2)
        f_v = tl.load(p_factors + n0 // UNIT * 2 + 1)
    kh, kl = load_pair(p_k + n0 * k_n, region_k, o_n, columns, k_n, k_d, D, D0, UNIT_D, MODE, TEST)
    vh, vl = load_pair(p_v + n0 * v_n, region_v, o_n, columns, v_n, v_d, DV, V0, UNIT_D, MODE, TEST)
    t = product(qh, ql, kh.T, kl.T, MODE, False)  # [BM, BN]
    p = weights(
        t, f_q * f_k, m[:, None], s[:, None], p_mask + n0 * mask_k, o_m, o_n, rows, columns,
        row0 - n0, mask_q, mask_k, MODE, MASK, CAUSAL, TEST, SAFE, False,
    )  # fmt: skip
    g = product(gh, gl, vh.T, vl.T, MODE, False) * (f_g * f_v)
    ds = p * (g - delta[:, None])
    dq = accumulate(dq, ds, kh, kl, f_k, MODE, FRESH)
    if REFINE:
        total += tl.sum(ds, 1)
        pk = accumulate(pk, p, kh, kl, f_k, MODE, FRESH)
    return dq, pk, total


@triton.jit
def query_side(
    program, Q, K, V, G, Mask, Rows, GradLse, Factors, DQ,
    heads, group, n_q, n_k, batch, scale, out_scale,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, g_b, g_h, g_n, g_d,
    dq_b, dq_h, dq_n, dq_d, l_b, l_h, l_n, mask_b, mask_h, mask_q, mask_k,
    MODE: tl.constexpr, FRESH: tl.constexpr, MASK: tl.constexpr,
    CAUSAL: tl.constexpr, SAFE: tl.constexpr, REFINE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, DV: tl.constexpr, V0: tl.constexpr, UNIT_D: tl.constexpr,
    UNIT_OUT: tl.constexpr,
):  # fmt: skip
    """dQ of one tile of queries.

    REFINE: delta came from a rounded out. The sum of a row of dS says by how much it is off (it is
    grad_lse in exact arithmetic); dQ is corrected with P K, and delta for the launches that follow.
    """
    tiles = tl.cdiv(n_q, BM)
    i_bh = program // tiles
    i_m = program - i_bh * tiles
    if CAUSAL:
        # the longest rows first
        i_m = tiles - 1 - i_m
    row0 = i_m * BM
    rows = n_q - row0
    i_b = (i_bh // heads).to(tl.int64)
    i_h = (i_bh % heads).to(tl.int64)
    i_kv = i_b * (heads // group) + i_h // group
    q_tiles = tl.cdiv(n_q, UNIT)
    k_tiles = tl.cdiv(n_k, UNIT)
    q_rows = batch.to(tl.int64) * heads * q_tiles
    row_count = q_rows * UNIT
    size_k = batch.to(tl.int64) * (heads // group) * k_tiles * UNIT
    o_m = tl.arange(0, BM)
    row = wide(i_bh) * q_tiles * UNIT + row0
    f_q = scale
    f_g = UNSHIFT if MODE == 0 else 1.0
    p_f = Factors
    if MODE == 1:
        k_n = D0
        v_n = V0
        p_q = Q + row * D0
        p_g = G + row * V0
        p_k = K + i_kv * k_tiles * UNIT * D0
        p_v = V + i_kv * k_tiles * UNIT * V0
        f_q = scale * tl.load(Factors + 2 * (row // UNIT))
        f_g = tl.load(Factors + 2 * (row // UNIT) + 1)
        p_f = Factors + 2 * (q_rows + i_kv * k_tiles)
    else:
        p_q = Q + i_b * q_b + i_h * q_h + wide(row0) * q_n
        p_g = G + i_b * g_b + i_h * g_h + wide(row0) * g_n
        p_k = K + i_b * k_b + i_h // group * k_h
        p_v = V + i_b * v_b + i_h // group * v_h
    p_mask = Mask
    if MASK:
        p_mask = Mask + i_b * mask_b + i_h * mask_h + wide(row0) * mask_q
    qh, ql = load_pair(p_q, row_count * D0, o_m, rows, q_n, q_d, D, D0, UNIT_D, MODE, True)
    gh, gl = load_pair(p_g, row_count * V0, o_m, rows, g_n, g_d, DV, V0, UNIT_D, MODE, True)
    p_rows = Rows + row + o_m
    m = tl.load(p_rows)
    s = m
    if SAFE or MODE != 0:
        s = tl.load(p_rows + row_count)
    delta = tl.load(p_rows + 2 * row_count)
    dq = tl.zeros([BM, D0], tl.float32)
    pk = tl.zeros([BM, D0 if REFINE else 1], tl.float32)
    total = tl.zeros([BM], tl.float32)
    hi = n_k
    full = n_k // BN * BN
    if CAUSAL:
        hi = tl.minimum(n_k, row0 + BM)
        full = tl.minimum(full, (row0 + 1) // BN * BN)
    TESTED: tl.constexpr = SAFE or MASK
    if TESTED:
        full = 0
    else:
        for n0 in tl.range(0, full, BN, num_stages=STAGES):
            dq, pk, total = fold_keys(
                n0, dq, pk, total, qh, ql, gh, gl, m, s, delta, p_k, p_v, p_mask, p_f,
                size_k * D0, size_k * V0, f_q, f_g, n_k, rows, row0, k_n, k_d, v_n, v_d, mask_q,
                mask_k, MODE, FRESH, 0, False, False, False, REFINE, BM, BN,
                D, D0, DV, V0, UNIT_D,
            )  # fmt: skip
    for n0 in tl.range(full, hi, BN, num_stages=STAGES if TESTED else 1):
        dq, pk, total = fold_keys(
            n0, dq, pk, total, qh, ql, gh, gl, m, s, delta, p_k, p_v, p_mask, p_f,
            size_k * D0, size_k * V0, f_q, f_g, n_k, rows, row0, k_n, k_d, v_n, v_d, mask_q,
            mask_k, MODE, FRESH, MASK, CAUSAL, True, SAFE, REFINE, BM, BN,
            D, D0, DV, V0, UNIT_D,
        )  # fmt: skip
    inside = o_m < rows
    if REFINE:
        p_l = GradLse + i_b * l_b + i_h * l_h + (row0 + o_m) * l_n
        wanted = tl.load(p_l, mask=inside, other=0.0)
        # a row without a visible key has no weights either
        off = tl.where(m == float("inf"), 0.0, (total - wanted) * UNSHIFT)
        dq -= off[:, None] * pk
        tl.store(p_rows + 2 * row_count, delta + off)
    o_d = tl.arange(0, D0)
    p = DQ + i_b * dq_b + i_h * dq_h + (wide(row0) + o_m)[:, None] * dq_n
    p += (o_d if UNIT_OUT else o_d * dq_d)[None, :]
    x = (dq * out_scale).to(DQ.dtype.element_ty)
    tl.store(p, x, mask=inside[:, None] & (o_d < D)[None, :])
