"""What the gradient kernels read: terms of each row, and float32 operands split ahead.

Terms of a row, float32 [3, B * Hq, rows padded to UNIT]: m and s with P = 2**(x - m - s) for scores
x in base 2, and delta = sum(grad_out * out) - grad_lse. m is lse * log2(e) less SHIFT and s is 0;
where |lse| > 2**11 has lost digits of log S they are the maximum and log2(S), computed again. Rows
without a visible key, and padding, have m = inf: their weights are zero. In half precision weights carry 2**SHIFT, so that float16 keeps small ones, and
delta its inverse.

A split operand is float16 hi and lo of UNIT rows by D0 channels, scaled by one power of two for
each tile of UNIT rows (`helpers` says which bits that keeps), zero beyond its end. Guards, int32
[B * Hkv, tiles of the group's queries, then, if split, of keys]: bit 0 where a tile does not hold in a split,
bit 1 where a row of it needs s.
"""

from __future__ import annotations

import triton
import triton.language as tl

from elsa_core.backends.triton.shared.helpers import (
    LOG2E,
    exponent,
    extent,
    fails_guard,
    halves,
    load_part,
    power,
    row_before,
    wide,
)

UNIT: tl.constexpr = tl.constexpr(128)
SHIFT: tl.constexpr = tl.constexpr(7.0)
UNSHIFT: tl.constexpr = tl.constexpr(2.0**-7)
# an lse beyond it has lost digits of log S that show in the weights
LARGE_LSE: tl.constexpr = tl.constexpr(2048.0)
# scaled maxima stay at 2**13, so that factors of two operands and the scale stay in float32
LEAST_SPLIT: tl.constexpr = tl.constexpr(-40)
MOST_SPLIT: tl.constexpr = tl.constexpr(60)
SPLIT_GUARD: tl.constexpr = tl.constexpr(2.0**-5)


@triton.jit
def product(ah, al, bh, bl, MODE: tl.constexpr):
    """a b in an accumulator of its own. MODE: 0 half, 1 split, 2 three TF32 products, 3 FMA."""
    if MODE == 1:
        t = tl.dot(al, bh)
        t = tl.dot(ah, bl, t)
        t = tl.dot(ah, bh, t)
    elif MODE == 2:
        t = tl.dot(ah, bh, input_precision="tf32x3")
    elif MODE == 3:
        t = tl.dot(ah, bh, input_precision="ieee")
    else:
        t = tl.dot(ah, bh)
    return t


@triton.jit
def with_mask(
    x, p_mask, o_m, o_n, rows, columns, mask_q, mask_k, MASK: tl.constexpr, KEYS_FIRST: tl.constexpr
):
    """Scores in base 2 with the mask applied. [queries, keys], or [keys, queries] if KEYS_FIRST."""
    if KEYS_FIRST:
        p = p_mask + o_n[:, None] * mask_k + o_m[None, :] * mask_q
        inside = (o_n < columns)[:, None] & (o_m < rows)[None, :]
    else:
        p = p_mask + o_m[:, None] * mask_q + o_n[None, :] * mask_k
        inside = (o_m < rows)[:, None] & (o_n < columns)[None, :]
    if MASK == 1:
        x = tl.where(tl.load(p, mask=inside, other=0) != 0, x, -float("inf"))
    else:
        x += tl.load(p, mask=inside, other=0.0).to(tl.float32) * LOG2E
    return x


@triton.jit
def normaliser(
    p_q, p_k, p_mask, o_m, rows, row0, n_k, scale, q_n, q_d, k_n, k_d, mask_q, mask_k,
    MODE: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, BX: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, UNIT_D: tl.constexpr,
):  # fmt: skip
    """The maximum m and log2 of the sum of each row of scores in base 2."""
    q = load_part(p_q, o_m, rows, q_n, q_d, 0, D0, D, UNIT_D, True)
    o_x = tl.arange(0, BX)
    m = tl.full([q.shape[0]], -float("inf"), tl.float32)
    z = tl.zeros([q.shape[0]], tl.float32)
    for n0 in tl.range(0, n_k, BX, num_stages=1):
        columns = n_k - n0
        k = load_part(p_k + wide(n0) * k_n, o_x, columns, k_n, k_d, 0, D0, D, UNIT_D, True)
        x = product(q, q, k.T, k.T, MODE) * scale
        if MASK:
            p = p_mask + wide(n0) * mask_k
            x = with_mask(x, p, o_m, o_x, rows, columns, mask_q, mask_k, MASK, False)
        valid = (o_x < columns)[None, :]
        if CAUSAL:
            valid = valid & ((row0 + o_m)[:, None] >= (n0 + o_x)[None, :])
        x = tl.where(valid, x, -float("inf"))
        m_new = tl.maximum(m, tl.max(x, 1))
        m_safe = tl.where(m_new == -float("inf"), 0.0, m_new)
        z = z * tl.exp2(m - m_safe) + tl.sum(tl.exp2(x - m_safe[:, None]), 1)
        m = m_new
    return m, tl.log2(tl.where(z == 0.0, 1.0, z))


@triton.jit
def split_tile(x, before, p_w, region, W0: tl.constexpr):
    """Write a tile's halves. Returns the factor that undoes its scale, and its guard."""
    top, least = extent(tl.abs(x), before)
    e = tl.minimum(exponent(top), MOST_SPLIT)
    hi, lo = halves(x * power(e))
    p = p_w + tl.arange(0, x.shape[0])[:, None] * W0 + tl.arange(0, W0)[None, :]
    tl.store(p, hi)
    tl.store(p + region, lo)
    bad = fails_guard(least, e, SPLIT_GUARD)
    # an all but vanishing operand keeps too few bits; zeros have no least row or channel
    return power(-e), bad | (e < LEAST_SPLIT).to(tl.int32)


@triton.jit(
    do_not_specialize=[
        "heads", "group", "n_q", "n_k", "batch", "q_b", "q_h", "q_n", "q_d", "k_b", "k_h", "k_n",
        "k_d", "v_b", "v_h", "v_n", "v_d", "g_b", "g_h", "g_n", "g_d", "o_b", "o_h", "o_n", "o_d",
        "l_b", "l_h", "l_n", "mask_b", "mask_h", "mask_q", "mask_k",
    ]
)  # fmt: skip
def prepare(
    Q, K, V, G, Mask, Out, Lse, GradLse, Rows, Guards, Factors, Halves,
    heads: tl.int32, group: tl.int32, n_q: tl.int32, n_k: tl.int32, batch: tl.int32,
    scale: tl.float32,
    q_b: tl.int64, q_h: tl.int64, q_n: tl.int64, q_d: tl.int64,
    k_b: tl.int64, k_h: tl.int64, k_n: tl.int64, k_d: tl.int64,
    v_b: tl.int64, v_h: tl.int64, v_n: tl.int64, v_d: tl.int64,
    g_b: tl.int64, g_h: tl.int64, g_n: tl.int64, g_d: tl.int64,
    o_b: tl.int64, o_h: tl.int64, o_n: tl.int64, o_d: tl.int64,
    l_b: tl.int64, l_h: tl.int64, l_n: tl.int64,
    mask_b: tl.int64, mask_h: tl.int64, mask_q: tl.int64, mask_k: tl.int64,
    SPLIT: tl.constexpr, MODE: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr,
    UNIT_D: tl.constexpr, UNIT_K: tl.constexpr, STEP: tl.constexpr, BX: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, DV: tl.constexpr, V0: tl.constexpr,
):  # fmt: skip
    """Grid (query tiles x batch x heads, then, if SPLIT, key tiles x batch x key heads).

    G: grad_out, strides g; Lse contiguous; GradLse strides l. MODE: how scores are computed where
    a row needs s. Factors, float32: for each tile of the queries q and g, then for each tile of
    the keys k and v. Halves, float16: q, g, k, v in this order, each hi then lo.
    """
    pid = tl.program_id(0)
    q_tiles = tl.cdiv(n_q, UNIT)
    k_tiles = tl.cdiv(n_k, UNIT)
    # strides of rows come in units of STEP elements, so that their divisibility is known
    q_n = q_n * STEP
    k_n = k_n * STEP
    v_n = v_n * STEP
    g_n = g_n * STEP
    o_n = o_n * STEP
    q_rows = batch.to(tl.int64) * heads * q_tiles
    k_rows = batch.to(tl.int64) * (heads // group) * k_tiles
    guards = group * q_tiles + (k_tiles if SPLIT else 0)
    o_r = tl.arange(0, UNIT)
    size_q = q_rows * UNIT * D0
    size_g = q_rows * UNIT * V0
    if pid < q_rows:
        i_bh = pid // q_tiles
        row0 = (pid - i_bh * q_tiles) * UNIT
        rows = n_q - row0
        i_b = (i_bh // heads).to(tl.int64)
        i_h = (i_bh % heads).to(tl.int64)
        inside = o_r < rows
        p_g = G + (i_b * g_b + i_h * g_h) * STEP + wide(row0) * g_n
        g = load_part(p_g, o_r, rows, g_n, g_d, 0, V0, DV, UNIT_D, True)
        p_o = Out + (i_b * o_b + i_h * o_h) * STEP + wide(row0) * o_n
        out = load_part(p_o, o_r, rows, o_n, o_d, 0, V0, DV, UNIT_D, True)
        delta = tl.sum(g.to(tl.float32) * out.to(tl.float32), 1)
        p_l = GradLse + i_b * l_b + i_h * l_h
        delta -= tl.load(p_l + (row0 + o_r) * l_n, mask=inside, other=0.0)
        lse = tl.load(Lse + wide(i_bh) * n_q + row0 + o_r, mask=inside, other=-float("inf"))
        dead = lse == -float("inf")
        m = tl.where(dead, float("inf"), lse * LOG2E - (SHIFT if MODE == 0 else 0.0))
        s = tl.zeros_like(m)
        large = (tl.abs(lse) > LARGE_LSE) & (tl.abs(lse) < float("inf"))
        guard = tl.max(large.to(tl.int32), 0) * 2
        p_q = Q + (i_b * q_b + i_h * q_h) * STEP + wide(row0) * q_n
        if guard > 0:
            p_k = K + (i_b * k_b + (i_h // group) * k_h) * STEP
            p_mask = Mask
            if MASK:
                if UNIT_K:
                    mask_k = tl.full([], 1, tl.int64)
                p_mask = Mask + i_b * mask_b + i_h * mask_h + wide(row0) * mask_q
            m_new, s_new = normaliser(
                p_q, p_k, p_mask, o_r, rows, row0, n_k, scale, q_n, q_d, k_n, k_d, mask_q, mask_k,
                MODE, MASK, CAUSAL, BX, D, D0, UNIT_D,
            )  # fmt: skip
            m = tl.where(large, m_new, m)
            s = tl.where(large, s_new - (SHIFT if MODE == 0 else 0.0), s)
        p_rows = Rows + wide(pid) * UNIT + o_r
        tl.store(p_rows, m)
        tl.store(p_rows + q_rows * UNIT, s)
        tl.store(p_rows + 2 * q_rows * UNIT, delta * (UNSHIFT if MODE == 0 else 1.0))
        if SPLIT:
            q = load_part(p_q, o_r, rows, q_n, q_d, 0, D0, D, UNIT_D, True)
            before = row_before(p_q, row0, q_n, q_d, 0, D0, D, UNIT_D)
            f_q, bad_q = split_tile(q, before, Halves + wide(pid) * UNIT * D0, size_q, D0)
            before = row_before(p_g, row0, g_n, g_d, 0, V0, DV, UNIT_D)
            p_w = Halves + 2 * size_q + wide(pid) * UNIT * V0
            f_g, bad_g = split_tile(g, before, p_w, size_g, V0)
            tl.store(Factors + 2 * wide(pid), f_q)
            tl.store(Factors + 2 * wide(pid) + 1, f_g)
            guard = guard | bad_q | bad_g
        i_kv = i_b * (heads // group) + i_h // group
        tl.store(Guards + i_kv * guards + (i_h % group) * q_tiles + row0 // UNIT, guard)
    elif SPLIT:
        i = pid - q_rows
        i_kv = i // k_tiles
        tile = (i - i_kv * k_tiles).to(tl.int32)
        row0 = tile * UNIT
        rows = n_k - row0
        i_b = i_kv // (heads // group)
        i_h = i_kv % (heads // group)
        p_k = K + (i_b * k_b + i_h * k_h) * STEP + wide(row0) * k_n
        p_v = V + (i_b * v_b + i_h * v_h) * STEP + wide(row0) * v_n
        p_w = Halves + 2 * size_q + 2 * size_g
        k = load_part(p_k, o_r, rows, k_n, k_d, 0, D0, D, UNIT_D, True)
        before = row_before(p_k, row0, k_n, k_d, 0, D0, D, UNIT_D)
        f_k, bad_k = split_tile(k, before, p_w + i * UNIT * D0, k_rows * UNIT * D0, D0)
        p_w += 2 * k_rows * UNIT * D0
        v = load_part(p_v, o_r, rows, v_n, v_d, 0, V0, DV, UNIT_D, True)
        before = row_before(p_v, row0, v_n, v_d, 0, V0, DV, UNIT_D)
        f_v, bad_v = split_tile(v, before, p_w + i * UNIT * V0, k_rows * UNIT * V0, V0)
        tl.store(Factors + 2 * (q_rows + i), f_k)
        tl.store(Factors + 2 * (q_rows + i) + 1, f_v)
        tl.store(Guards + i_kv * guards + group * q_tiles + tile, bad_k | bad_v)
