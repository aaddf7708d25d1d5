"""alpha-entmax attention: the kernel of the output. `entmax_kernels` has the formulas.

A program makes these passes over the keys that its queries see, in tiles of BN:

1. Maxima. Of each row the two largest scores of each of GROUPS groups of keys stay in registers,
   and of each tile the largest excess of a row's maximum over a reference of that row.
2. Newton's steps on the scores that were kept, without a load. They are a part of the row, so that
   their root c is an upper end of the row's: with it tiles are dropped by their excess alone.
3. Steps over the tiles that are left, mostly one or two. The first is at the upper end and drops
   the tiles that it finds empty.
4. The output. Its sum Z gives Z^-a, which lies at the other side of the root: a row that is too
   far from it, which is rare, sends the block back to 3.

Scores are relative to the maximum before anything is multiplied; the scale is a part of the slope
where it is positive and no mask is added (FOLD).
"""

from __future__ import annotations

import triton
import triton.language as tl

from elsa_core.backends.triton.attention import INTEGERS
from elsa_core.backends.triton.attention.entmax_kernels import (
    NAN,
    ROOT_UNIT,
    TILE,
    UNIT,
    alpha_of,
    block_of,
    powers,
    product,
    scores,
)
from elsa_core.backends.triton.shared.helpers import load_part, wide

CHUNK: tl.constexpr = tl.constexpr(128)
GROUP_STEPS: tl.constexpr = tl.constexpr(12)
CHECKS: tl.constexpr = tl.constexpr(3)  # how often a block may go back from the output
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def weights(s, top, slope, a, unit, POWER: tl.constexpr):
    """v = unit [1 + slope (s - top)]_+ and r = v^(1 / a) (POWER 0: times unit); NaN stays."""
    if POWER == 0:
        v, r, u = powers(s, top[:, None], slope[:, None], a, POWER)
        r = r * unit
    else:
        steep = tl.broadcast_to((slope * unit)[:, None], s.shape)
        v = tl.maximum(tl.fma(s - top[:, None], steep, unit), 0.0, propagate_nan=NAN)
        r = v
        u = v
        if POWER == 2:
            r = v * v
        else:
            u = (v > 0.0).to(tl.float32)
    return v, r, u


@triton.jit
def sums(s, top, slope, a, COUNT: tl.constexpr, POWER: tl.constexpr):
    """Z = sum(r), Y = sum(r^(1 - a)) and, if COUNT, the number of keys that weigh something."""
    v, r, u = weights(s, top, slope, a, 1.0, POWER)
    z = tl.sum(r, 1)
    n = z
    if COUNT:
        n = tl.sum((v > 0.0).to(tl.float32), 1)
    return z, tl.sum(u, 1), n


@triton.jit
def largest(s, GROUPS: tl.constexpr):
    """Of neighbouring columns the larger ones, until GROUPS are left; NaN stays."""
    best = s
    if s.shape[1] > GROUPS:
        even, odd = tl.split(tl.reshape(s, (s.shape[0], s.shape[1] // 2, 2)))
        best = tl.maximum(even, odd, propagate_nan=NAN)
    if s.shape[1] > 2 * GROUPS:
        even, odd = tl.split(tl.reshape(best, (s.shape[0], s.shape[1] // 4, 2)))
        best = tl.maximum(even, odd, propagate_nan=NAN)
    return best


@triton.jit
def other_end(z, c, a, POWER: tl.constexpr):
    """Z^-a; c where no key is seen."""
    if POWER == 1:
        g = 1.0 / z
    elif POWER == 2:
        g = 1.0 / tl.sqrt(z)
    else:
        g = tl.exp(-a * tl.log(z))
    return tl.where(z == 0.0, c, g)


@triton.jit
def next_slope(c, low, high, z, y, n, a, round, CLOSE: tl.constexpr, POWER: tl.constexpr):
    """One step: c, its enclosure, and whether any row has to go on.

    Newton's; for POWER 2 the root for the n keys that weigh something at c, of third order.
    CLOSE: the largest relative step after which c is taken; 0: as far as float32 goes.
    """
    other = other_end(z, c, a, POWER)
    width = high - low
    low = tl.maximum(low, tl.minimum(c, other))
    high = tl.minimum(high, tl.maximum(c, other))
    if POWER == 2:
        excess = z - 1.0 / (c * c)
        root = tl.sqrt(tl.maximum(y * y - n * excess, 0.0))
        new = c - c * tl.where(y > 0.0, excess / (y + root), 0.0)
    else:
        new = c - tl.where(y > 0.0, z / y, 0.0) * (c - other)
    new = tl.where(z == z, tl.minimum(tl.maximum(new, low), high), z)
    limit = tl.where((a > 1.0) & (round > 0), 0.5 * width, float("inf"))
    new = tl.where(high - low > limit, tl.sqrt(low * high), new)
    close = CLOSE
    if CLOSE == 0.0:
        # Newton's step of relative size d leaves an error of the order of d^min(2, 1 / a)
        exact = tl.exp(tl.minimum(tl.maximum(a, 0.5), 1.0) * (-23.0 * LN2)) / 16.0
        close = tl.maximum(exact, 2.0**-20)
    moved = tl.minimum(tl.abs(new - c), high - low)
    return new, low, high, tl.max((moved > close * new).to(tl.int32), 0)


@triton.jit
def list_above(p_list, seen, least):
    """The numbers of the tiles whose excess is not below `least`, in the place of the excesses."""
    o = tl.arange(0, CHUNK)
    count = 0
    for start in range(0, seen, CHUNK):
        at = start + o
        excess = tl.load(p_list + at, mask=at < seen, other=0).to(tl.float32, bitcast=True)
        held = tl.where((at < seen) & ~(excess < least), 1, 0)
        place = count + tl.cumsum(held, 0) - 1
        tl.debug_barrier()  # all of the chunk is read before any of it is written
        tl.store(p_list + place, at, mask=held != 0)
        count += tl.sum(held, 0)
    tl.debug_barrier()
    return count


@triton.jit(do_not_specialize=INTEGERS)
def forward(
    Q, K, V, Mask, Alpha, Out, Rows, Tiles, Lists, StartsQ, StartsK,
    heads: tl.int32, group: tl.int32, n_q: tl.int32, n_k: tl.int32, batch: tl.int32,
    longest: tl.int32, steps: tl.int32,
    scale: tl.float32, alpha: tl.float32, log_keys: tl.float32,
    q_b: tl.int64, q_h: tl.int64, q_n: tl.int64, q_d: tl.int64,
    k_b: tl.int64, k_h: tl.int64, k_n: tl.int64, k_d: tl.int64,
    v_b: tl.int64, v_h: tl.int64, v_n: tl.int64, v_d: tl.int64,
    o_b: tl.int64, o_h: tl.int64, o_n: tl.int64, o_d: tl.int64,
    mask_b: tl.int64, mask_h: tl.int64, mask_q: tl.int64, mask_k: tl.int64,
    alpha_b: tl.int64, alpha_h: tl.int64,
    MODE: tl.constexpr, POWER: tl.constexpr, OF_HEADS: tl.constexpr, MASK: tl.constexpr,
    CAUSAL: tl.constexpr, FOLD: tl.constexpr, PACKED: tl.constexpr, STEPS: tl.constexpr,
    GROUPS: tl.constexpr, COUNT: tl.constexpr, CLOSE: tl.constexpr, WITHIN: tl.constexpr,
    TOP_STAGES: tl.constexpr, STEP_STAGES: tl.constexpr, OUT_STAGES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STEP: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, DV: tl.constexpr, V0: tl.constexpr, UNIT_D: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of BM queries x batch x heads). Rows: [3, batch * heads, n_q]. Tiles: as the
    operator's, zeros. Lists: [programs, tiles of BN keys].

    COUNT: whether steps count the keys that weigh something, for POWER 2; else their number is that
    of the kept scores times the ratio of the sums Y. WITHIN: the largest relative distance of c to
    Z^-a, which the root lies between.

    PACKED: grid (blocks x heads), of which a sequence has one more than its queries fill at most;
    Rows [3, heads, n_q]; longest: of the keys of a sequence. Else StartsQ and StartsK are None.
    """
    q_b, q_h, q_n = q_b * STEP, q_h * STEP, q_n * STEP
    k_b, k_h, k_n = k_b * STEP, k_h * STEP, k_n * STEP
    v_b, v_h, v_n = v_b * STEP, v_h * STEP, v_n * STEP
    q_blocks = n_q // BM + batch if PACKED else tl.cdiv(n_q, BM)
    k_blocks = tl.cdiv(longest if PACKED else n_k, BN)
    i_bh = tl.program_id(0) // q_blocks
    i_m = tl.program_id(0) - i_bh * q_blocks
    if CAUSAL:
        i_m = q_blocks - 1 - i_m  # the longest rows first
    p_list = Lists + (wide(i_bh) * q_blocks + i_m) * k_blocks
    i_b = (i_bh // heads).to(tl.int64)
    i_h = (i_bh % heads).to(tl.int64)
    p_q = Q + i_b * q_b + i_h * q_h
    p_k = K + i_b * k_b + i_h // group * k_h
    p_v = V + i_b * v_b + i_h // group * v_h
    p_out = Out + i_b * o_b + i_h * o_h
    p_rows = Rows + wide(i_bh) * n_q
    stride = batch.to(tl.int64) * heads * n_q
    i_s = i_b
    if PACKED:
        stride = wide(heads) * n_q
        tile_row = wide(i_bh) * (n_q // TILE + batch)
        i_s, i_m, first_q, n_q, first_k, n_k = block_of(
            StartsQ, StartsK, i_m, batch, steps, n_q, n_k, longest, BM
        )
        if i_m * BM >= n_q:
            return
        tile_row += first_q // TILE + i_s
        p_q += first_q * q_n
        p_k += first_k * k_n
        p_v += first_k * v_n
        p_out += first_q * o_n
        p_rows += first_q
        log_keys = tl.log(tl.maximum(n_k, 1).to(tl.float32))
    else:
        tile_row = wide(i_bh) * tl.cdiv(n_q, TILE)
    row0 = i_m * BM
    rows = n_q - row0
    o_m = tl.arange(0, BM)
    o_c = tl.arange(0, BN)
    inside = o_m < rows
    a = alpha_of(Alpha, i_s, i_h, alpha_b, alpha_h, alpha, OF_HEADS)
    p_q += wide(row0) * q_n
    p_mask = Mask
    if MASK:
        p_mask = Mask + i_b * mask_b + i_h * mask_h + wide(row0) * mask_q
    of_mask = o_m[:, None] * mask_q + o_c[None, :] * mask_k
    q = load_part(p_q, o_m, rows, q_n, q_d, 0, D0, D, UNIT_D, True)
    seen = tl.cdiv(n_k, BN)
    whole = n_k // BN  # blocks that every row sees, but for a mask
    if CAUSAL:
        seen = tl.minimum(seen, tl.cdiv(row0 + BM, BN))
        whole = tl.minimum(whole, (row0 + 1) // BN)
    factor = 1.0
    if FOLD:
        factor = scale

    # the reference: maxima of the block on the diagonal
    j = tl.minimum(row0 // BN, seen - 1)
    if PACKED:
        j = tl.maximum(j, 0)  # of a sequence without keys
    n0 = wide(j) * BN
    k = load_part(p_k + n0 * k_n, o_c, n_k - j * BN, k_n, k_d, 0, D0, D, UNIT_D, True)
    s = scores(
        q, k, p_mask + n0 * mask_k + of_mask, o_m[:, None], o_c[None, :], rows,
        n_k - j * BN, row0 - j * BN, scale, j >= whole, MODE, MASK, CAUSAL, FOLD,
    )  # fmt: skip
    near = tl.max(s, 1)
    near = tl.where(near == -float("inf"), 0.0, near)
    first = tl.full([BM, GROUPS], -float("inf"), tl.float32)
    second = tl.full([BM, GROUPS], -float("inf"), tl.float32)
    for j in tl.range(0, seen, num_stages=TOP_STAGES):
        n0 = wide(j) * BN
        k = load_part(p_k + n0 * k_n, o_c, n_k - j * BN, k_n, k_d, 0, D0, D, UNIT_D, True)
        s = scores(
            q, k, p_mask + n0 * mask_k + of_mask, o_m[:, None], o_c[None, :], rows,
            n_k - j * BN, row0 - j * BN, scale, j >= whole, MODE, MASK, CAUSAL, FOLD,
        )  # fmt: skip
        best = largest(s, GROUPS)
        second = tl.maximum(second, tl.minimum(first, best))
        first = tl.maximum(first, best, propagate_nan=NAN)
        excess = tl.max(tl.max(best, 1) - near, 0)
        tl.store(p_list + j, excess.to(tl.int32, bitcast=True))
    tl.debug_barrier()
    top = tl.max(first, 1)
    top = tl.where(tl.max((first != first).to(tl.int32), 1) != 0, float("nan"), top)
    hidden = top == -float("inf")
    # rows that see no key, and those beyond the last: no score is above their threshold
    m = tl.where(hidden | (o_m >= rows), float("inf"), top)

    c = tl.full([BM], 1.0, tl.float32)
    high = c
    low = c * tl.exp(-a * log_keys)
    share = tl.zeros([BM], tl.float32)
    steps = tl.full([], 0, tl.int32)
    go = tl.full([], 1, tl.int32)
    while go > 0:
        slope = a / c * factor
        z, y, n = sums(first, m, slope, a, POWER == 2, POWER)
        z_2, y_2, n_2 = sums(second, m, slope, a, POWER == 2, POWER)
        y += y_2
        n += n_2
        share = n / y
        c, low, high, go = next_slope(c, low, high, z + z_2, y, n, a, steps, 2.0**-18, POWER)
        steps += 1
        go = tl.minimum(go, GROUP_STEPS - steps)
    high = tl.where(c == c, tl.minimum(high * (1.0 + 2.0**-20), 1.0), c)
    c = high
    low = tl.exp(-a * log_keys) + tl.zeros([BM], tl.float32)
    least = m - high / (a * factor) * (1.0 + 2.0**-16) - near
    least = least - 2.0**-20 * (tl.abs(m) + tl.abs(near))
    least = tl.where(m == float("inf"), tl.where(hidden | (o_m >= rows), m, -m), least)
    count = list_above(p_list, seen, tl.min(tl.where(least == least, least, -float("inf")), 0))

    width = tl.cdiv(longest if PACKED else n_k, TILE)
    p_tiles = Tiles + (tile_row + row0 // TILE) * width
    o_r = tl.arange(0, BM // TILE)
    o_t = tl.arange(0, BN // TILE)
    slope = a / c * factor
    z = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, V0], tl.float32)
    steps = tl.full([], 0, tl.int32)
    checks = tl.full([], 0, tl.int32)
    going = tl.full([], 1, tl.int32)
    while going > 0:
        go = tl.full([], 1, tl.int32)
        while go > 0:
            z = tl.zeros([BM], tl.float32)
            y = tl.zeros([BM], tl.float32)
            n = tl.zeros([BM], tl.float32)
            left = 0
            keep = tl.max((c < high).to(tl.int32), 0)
            slope = a / c * factor
            j = tl.load(p_list)
            for i in tl.range(0, count, num_stages=STEP_STAGES):
                ahead = tl.load(p_list + tl.minimum(i + 1, count - 1))
                n0 = wide(j) * BN
                k = load_part(p_k + n0 * k_n, o_c, n_k - j * BN, k_n, k_d, 0, D0, D, UNIT_D, True)
                s = scores(
                    q, k, p_mask + n0 * mask_k + of_mask, o_m[:, None], o_c[None, :], rows,
                    n_k - j * BN, row0 - j * BN, scale, j >= whole, MODE, MASK, CAUSAL, FOLD,
                )  # fmt: skip
                z_2, y_2, n_2 = sums(s, m, slope, a, COUNT, POWER)
                z += z_2
                y += y_2
                n += n_2
                tl.store(p_list + left, j)  # left <= i: what was read already
                left += tl.maximum(tl.max((z_2 != 0.0).to(tl.int32), 0), keep)
                j = ahead
            tl.debug_barrier()
            count = left
            if not COUNT:
                n = share * y
            c, low, high, go = next_slope(c, low, high, z, y, n, a, steps, CLOSE, POWER)
            steps += 1
            go = tl.minimum(go, STEPS - steps)

        slope = a / c * factor
        z = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, V0], tl.float32)
        j = tl.load(p_list)
        for i in tl.range(0, count, num_stages=OUT_STAGES):
            ahead = tl.load(p_list + tl.minimum(i + 1, count - 1))
            n0 = wide(j) * BN
            k = load_part(p_k + n0 * k_n, o_c, n_k - j * BN, k_n, k_d, 0, D0, D, UNIT_D, True)
            v = load_part(p_v + n0 * v_n, o_c, n_k - j * BN, v_n, v_d, 0, V0, DV, UNIT_D, True)
            s = scores(
                q, k, p_mask + n0 * mask_k + of_mask, o_m[:, None], o_c[None, :], rows,
                n_k - j * BN, row0 - j * BN, scale, j >= whole, MODE, MASK, CAUSAL, FOLD,
            )  # fmt: skip
            if MODE == 0:
                _, r, _ = weights(s, m, slope, a, ROOT_UNIT if POWER == 2 else UNIT, POWER)
                acc = tl.dot(r.to(v.dtype), v, acc)
            else:
                _, r, _ = weights(s, m, slope, a, 1.0, POWER)
                # by name: written with + the compiler would let the product accumulate into acc
                acc = tl.fma(product(r, v, MODE), 1.0, acc)
            parts = tl.sum(tl.reshape(r, (BM, BN // TILE, TILE)), 2)
            z += tl.sum(parts, 1)
            held = ((parts != 0.0) & inside[:, None]).to(tl.int32)
            held = tl.max(tl.reshape(held, (BM // TILE, TILE, BN // TILE)), 1)
            o_p = j * (BN // TILE) + o_t
            p = p_tiles + (o_r * width)[:, None] + o_p[None, :]
            there = (o_r * TILE < rows)[:, None] & (o_p * TILE < n_k)[None, :]
            tl.store(p, held.to(tl.uint8), mask=there)
            j = ahead
        if MODE == 0:
            z = z * (1.0 / UNIT)
            acc = acc * (1.0 / UNIT)
        going = tl.full([], 0, tl.int32)
        if POWER == 2:
            off = tl.abs(other_end(z, c, a, POWER) - c) > WITHIN * c
            going = tl.minimum(tl.max(off.to(tl.int32), 0), CHECKS - checks)
            checks += 1

    z = tl.where(z == 0.0, 1.0, z)
    p_rows += row0 + o_m
    tl.store(p_rows, top * factor, mask=inside)
    tl.store(p_rows + stride, a / c, mask=inside)
    tl.store(p_rows + 2 * stride, z, mask=inside)
    o_v = tl.arange(0, V0)
    p = p_out + (wide(row0) + o_m)[:, None] * o_n + (o_v * o_d)[None, :]
    out = (acc / z[:, None]).to(Out.dtype.element_ty)
    tl.store(p, out, mask=inside[:, None] & (o_v < DV)[None, :])
