"""What the gradient kernels read: terms of each row, and float32 operands split ahead.

Terms of a row, float32 [3, B * Hq, rows padded to UNIT]: m and s with P = 2**(x - m - s) for scores
x in base 2, and delta = sum(grad_out * out) - grad_lse. m + s is lse * log2(e), s what rounding it
left over; where |lse| > 2**11 has lost digits of log S they are the maximum and log2(S), computed
again (`normalise`). Rows without a visible key, and padding, have m = inf: their weights are zero.
In half precision weights carry 2**SHIFT, so that float16 keeps small ones, and delta its inverse.

A split operand is float16 hi and lo of UNIT rows by D0 channels, scaled by one power of two for
each tile of UNIT rows (`helpers` says which bits that keeps), zero beyond its end. Queries are
multiplied by the scale's significand first, as the forward does: its scores, on which lse depends,
come out with the same bits.

Guards, int32 [B * Hkv, slots]: for each tile of the group's queries whether a row's lse is large
(bit 1), and, if split, for each tile of grad_out, queries, keys and values whether it does not hold
in a split (bit 0); grad_out's share a slot with the first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from elsa_core.backends.triton.attention import INTEGERS
from elsa_core.backends.triton.shared.helpers import (
    LOG2E,
    exponent,
    extent,
    fails_guard,
    halves,
    load_part,
    place,
    power,
    row_before,
    wide,
)

UNIT: tl.constexpr = tl.constexpr(128)
# what float32's log2(e) lacks
LOG2E_REST: tl.constexpr = tl.constexpr(1.9259629911266175e-08)
SHIFT: tl.constexpr = tl.constexpr(7.0)
UNSHIFT: tl.constexpr = tl.constexpr(2.0**-7)
# an lse beyond it has lost digits of log S that show in the weights
LARGE_LSE: tl.constexpr = tl.constexpr(2048.0)
# bounds of an operand's exponent, so that factors of two operands stay in float32
LEAST_SPLIT: tl.constexpr = tl.constexpr(-40)
MOST_SPLIT: tl.constexpr = tl.constexpr(60)
SPLIT_GUARD: tl.constexpr = tl.constexpr(2.0**-5)


@triton.jit
def product(ah, al, bh, bl, MODE: tl.constexpr, B_FIRST: tl.constexpr):
    """a b in an accumulator of its own. MODE: 0 half, 1 split, 2 three TF32 products.

    B_FIRST: the product with b's low half first, for scores of keys by queries: sums of the same
    bits as those of queries by keys.
    """
    if MODE == 1:
        if B_FIRST:
            t = tl.dot(ah, bl)
            t = tl.dot(al, bh, t)
        else:
            t = tl.dot(al, bh)
            t = tl.dot(ah, bl, t)
        t = tl.dot(ah, bh, t)
    elif MODE == 2:
        t = tl.dot(ah, bh, input_precision="tf32x3")
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
def verdict(p_guards, guards):
    """All of some guards in one."""
    o = tl.arange(0, 1024)
    bits = tl.load(p_guards + o, mask=o < guards, other=0)
    for first in range(1024, guards, 1024):
        bits = bits | tl.load(p_guards + first + o, mask=first + o < guards, other=0)
    return tl.max(bits, 0)


@triton.jit
def slots(group, n_q, n_k, SPLIT: tl.constexpr):
    """Guards of one key head."""
    count = group * tl.cdiv(n_q, UNIT)
    if SPLIT:
        count = 2 * (count + tl.cdiv(n_k, UNIT))
    return count


@triton.jit
def split_operand(
    p, p_w, region, o_r, row0, rows, stride_n, stride_d, factor,
    DIM: tl.constexpr, WIDTH: tl.constexpr, UNIT_D: tl.constexpr,
):  # fmt: skip
    """Write a tile's halves. Returns the factor that undoes its scale, and its guard."""
    x = load_part(p, o_r, rows, stride_n, stride_d, 0, WIDTH, DIM, UNIT_D, True)
    before = row_before(p, row0, stride_n, stride_d, 0, WIDTH, DIM, UNIT_D)
    top, least = extent(tl.abs(x), before)
    e = tl.minimum(exponent(top), MOST_SPLIT)
    hi, lo = halves(x * (power(e) * factor))
    p_w += o_r[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(p_w, hi)
    tl.store(p_w + region, lo)
    bad = fails_guard(least, e, SPLIT_GUARD)
    return power(-e), bad | (e < LEAST_SPLIT).to(tl.int32)


@triton.jit(do_not_specialize=INTEGERS)
def prepare(
    Q, K, V, G, Out, Lse, GradLse, Rows, Guards, Factors, Halves,
    heads: tl.int32, group: tl.int32, n_q: tl.int32, n_k: tl.int32, batch: tl.int32,
    significand: tl.float32,
    q_b: tl.int64, q_h: tl.int64, q_n: tl.int64, q_d: tl.int64,
    k_b: tl.int64, k_h: tl.int64, k_n: tl.int64, k_d: tl.int64,
    v_b: tl.int64, v_h: tl.int64, v_n: tl.int64, v_d: tl.int64,
    g_b: tl.int64, g_h: tl.int64, g_n: tl.int64, g_d: tl.int64,
    o_b: tl.int64, o_h: tl.int64, o_n: tl.int64, o_d: tl.int64,
    l_b: tl.int64, l_h: tl.int64, l_n: tl.int64,
    SPLIT: tl.constexpr, MODE: tl.constexpr, UNIT_D: tl.constexpr, STEP: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, DV: tl.constexpr, V0: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, which: rows with grad_out; then, if SPLIT, queries, keys, values).

    G: grad_out, strides g; Lse contiguous; GradLse strides l. Strides of q, k, v, g, o in units of
    STEP elements. Factors, float32: for each tile of the queries q and g, then for each tile of the
    keys k and v. Halves, float16: q, g, k, v in this order, each hi then lo.
    """
    pid = tl.program_id(0)
    which = tl.program_id(1)
    key_heads = heads // group
    q_tiles = tl.cdiv(n_q, UNIT)
    k_tiles = tl.cdiv(n_k, UNIT)
    q_rows = batch.to(tl.int64) * heads * q_tiles
    k_rows = batch.to(tl.int64) * key_heads * k_tiles
    size_q = q_rows * UNIT * D0
    size_g = q_rows * UNIT * V0
    size_k = k_rows * UNIT * D0
    size_v = k_rows * UNIT * V0
    o_r = tl.arange(0, UNIT)
    count = slots(group, n_q, n_k, SPLIT)
    tile = wide(pid)
    if which < 2:
        i_bh, i_t, i_b, i_h = place(pid, q_tiles, heads, False)
        p_slot = Guards + (i_b * key_heads + i_h // group) * count + (i_h % group) * q_tiles + i_t
    else:
        i_bh, i_t, i_b, i_h = place(pid, k_tiles, key_heads, False)
        p_slot = Guards + wide(i_bh) * count + 2 * group * q_tiles + i_t
    row0 = i_t * UNIT
    if which == 0 and pid < q_rows:
        rows = n_q - row0
        inside = o_r < rows
        g_n = g_n * STEP
        o_n = o_n * STEP
        p_g = G + (i_b * g_b + i_h * g_h) * STEP + wide(row0) * g_n
        p_o = Out + (i_b * o_b + i_h * o_h) * STEP + wide(row0) * o_n
        out = load_part(p_o, o_r, rows, o_n, o_d, 0, V0, DV, UNIT_D, True).to(tl.float32)
        g = load_part(p_g, o_r, rows, g_n, g_d, 0, V0, DV, UNIT_D, True).to(tl.float32)
        p_l = GradLse + i_b * l_b + i_h * l_h + (row0 + o_r) * l_n
        delta = tl.sum(g * out, 1) - tl.load(p_l, mask=inside, other=0.0)
        lse = tl.load(Lse + wide(i_bh) * n_q + row0 + o_r, mask=inside, other=-float("inf"))
        m = lse * LOG2E
        # what rounding left over, and the rest of log2(e)
        s = tl.fma(lse, tl.zeros_like(lse) + LOG2E, -m) + lse * LOG2E_REST
        if MODE == 0:
            m -= SHIFT
            delta *= UNSHIFT
        dead = lse == -float("inf")
        p_rows = Rows + tile * UNIT + o_r
        tl.store(p_rows, tl.where(dead, float("inf"), m))
        tl.store(p_rows + q_rows * UNIT, tl.where(tl.abs(lse) == float("inf"), 0.0, s))
        tl.store(p_rows + 2 * q_rows * UNIT, delta)
        large = (tl.abs(lse) > LARGE_LSE) & (tl.abs(lse) < float("inf"))
        guard = tl.max(large.to(tl.int32), 0) * 2
        if SPLIT:
            p_w = Halves + 2 * size_q + tile * UNIT * V0
            f, bad = split_operand(p_g, p_w, size_g, o_r, row0, rows, g_n, g_d, 1.0, DV, V0, UNIT_D)
            tl.store(Factors + 2 * tile + 1, f)
            guard = guard | bad
        tl.store(p_slot, guard)
    if SPLIT:
        if which == 1 and pid < q_rows:
            q_n = q_n * STEP
            p = Q + (i_b * q_b + i_h * q_h) * STEP + wide(row0) * q_n
            f, bad = split_operand(
                p, Halves + tile * UNIT * D0, size_q, o_r, row0, n_q - row0, q_n, q_d, significand,
                D, D0, UNIT_D,
            )  # fmt: skip
            tl.store(Factors + 2 * tile, f)
            tl.store(p_slot + group * q_tiles, bad)
        if which == 2 and pid < k_rows:
            k_n = k_n * STEP
            p = K + (i_b * k_b + i_h * k_h) * STEP + wide(row0) * k_n
            p_w = Halves + 2 * (size_q + size_g) + tile * UNIT * D0
            f, bad = split_operand(
                p, p_w, size_k, o_r, row0, n_k - row0, k_n, k_d, 1.0, D, D0, UNIT_D
            )
            tl.store(Factors + 2 * (q_rows + tile), f)
            tl.store(p_slot, bad)
        if which == 3 and pid < k_rows:
            v_n = v_n * STEP
            p = V + (i_b * v_b + i_h * v_h) * STEP + wide(row0) * v_n
            p_w = Halves + 2 * (size_q + size_g + size_k) + tile * UNIT * V0
            f, bad = split_operand(
                p, p_w, size_v, o_r, row0, n_k - row0, v_n, v_d, 1.0, DV, V0, UNIT_D
            )
            tl.store(Factors + 2 * (q_rows + tile) + 1, f)
            tl.store(p_slot + k_tiles, bad)


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
        x = product(q, q, k.T, k.T, MODE, False) * scale
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


@triton.jit(do_not_specialize=INTEGERS)
def normalise(
    Q, K, Mask, Lse, Rows, Guards,
    heads: tl.int32, group: tl.int32, n_q: tl.int32, n_k: tl.int32, batch: tl.int32,
    scale: tl.float32,
    q_b: tl.int64, q_h: tl.int64, q_n: tl.int64, q_d: tl.int64,
    k_b: tl.int64, k_h: tl.int64, k_n: tl.int64, k_d: tl.int64,
    mask_b: tl.int64, mask_h: tl.int64, mask_q: tl.int64, mask_k: tl.int64,
    SPLIT: tl.constexpr, MODE: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr,
    UNIT_D: tl.constexpr, UNIT_K: tl.constexpr, STEP: tl.constexpr,
    BM: tl.constexpr, BX: tl.constexpr, D: tl.constexpr, D0: tl.constexpr,
):  # fmt: skip
    """Grid (programs that share the tiles of queries out): m and s of rows whose lse is large."""
    count = slots(group, n_q, n_k, SPLIT)
    key_heads = heads // group
    if (verdict(Guards, batch * key_heads * count) & 2) != 0:
        q_n = q_n * STEP
        k_n = k_n * STEP
        if UNIT_K:
            mask_k = tl.full([], 1, tl.int64)
        tiles = tl.cdiv(n_q, BM)
        row_count = batch.to(tl.int64) * heads * tl.cdiv(n_q, UNIT) * UNIT
        o_m = tl.arange(0, BM)
        for pid in range(tl.program_id(0), batch * heads * tiles, tl.num_programs(0)):
            i_bh, i_m, i_b, i_h = place(pid, tiles, heads, False)
            row0 = i_m * BM
            rows = n_q - row0
            lse = tl.load(Lse + wide(i_bh) * n_q + row0 + o_m, mask=o_m < rows, other=0.0)
            large = (tl.abs(lse) > LARGE_LSE) & (tl.abs(lse) < float("inf"))
            if tl.max(large.to(tl.int32), 0) > 0:
                p_q = Q + (i_b * q_b + i_h * q_h) * STEP + wide(row0) * q_n
                p_k = K + (i_b * k_b + i_h // group * k_h) * STEP
                p_mask = Mask
                if MASK:
                    p_mask = Mask + i_b * mask_b + i_h * mask_h + wide(row0) * mask_q
                m, s = normaliser(
                    p_q, p_k, p_mask, o_m, rows, row0, n_k, scale, q_n, q_d, k_n, k_d,
                    mask_q, mask_k, MODE, MASK, CAUSAL, BX, D, D0, UNIT_D,
                )  # fmt: skip
                if MODE == 0:
                    s -= SHIFT
                p_rows = Rows + wide(i_bh) * tl.cdiv(n_q, UNIT) * UNIT + row0 + o_m
                tl.store(p_rows, m, mask=large)
                tl.store(p_rows + row_count, s, mask=large)
