"""alpha-entmax attention: kernels of the gradients. `entmax_kernels` has the formulas.

With U = P^(2 - alpha): dV = P^T dO, dS = U (dP - delta), dQ = scale dS K, dK = scale dS^T Q, where
dP = dO V^T and delta = sum(U dP) / sum(U). Only tiles that hold a weight are read. Nothing is added
by atomics.

dQ takes one pass: with c = dO . O it is A - (delta - c) B of A = sum(U (dP - c) K) and
B = sum(U K). For alpha = 1.5, where U^2 is P, what rounding U to half precision adds is no more
than what rounding dS itself does: (delta - c)^2 sum(U^2) = (sum(P (dP - delta)))^2
<= sum(U^2 (dP - delta)^2), since c = sum(P dP). For alpha > 1.5 it can be many times that, and a
pass over the tiles finds delta first, which c is then.

float16: a power of two brings dS into its range. For alpha = 1.5 it is known ahead, since U <= 1
and |dP|, |delta|, |c| are at most the norm of dO's row times the largest of a value's; else each
product looks for its own (`accumulate`).

LINE: half precision and alpha = 1.5. RANGE: float16 and alpha = 1.5.
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
    accumulate,
    alpha_of,
    block_of,
    powers,
    product,
    scores,
)
from elsa_core.backends.triton.attention.forward import bounds_of
from elsa_core.backends.triton.shared.helpers import exponent, load_part, power, wide


@triton.jit
def norms(x):
    """Of each row, float32."""
    x = x.to(tl.float32)
    return tl.sqrt(tl.sum(x * x, 1))


@triton.jit
def largest(p, p_list, count, CHUNK: tl.constexpr):
    """The largest of the numbers at p of the tiles that a list has."""
    o = tl.arange(0, CHUNK)
    found = tl.zeros([CHUNK], tl.float32)
    for start in range(0, count, CHUNK):
        j = tl.load(p_list + 1 + start + o, mask=start + o < count, other=0)
        found = tl.maximum(found, tl.load(p + j, mask=start + o < count, other=0.0))
    return tl.max(found, 0)


@triton.jit
def write_list(p_list, p_tiles, length, step, CHUNK: tl.constexpr):
    """The number of those of `length` tiles that hold a weight, then which."""
    o = tl.arange(0, CHUNK)
    count = 0
    for start in range(0, length, CHUNK):
        at = start + o
        held = tl.load(p_tiles + at.to(tl.int64) * step, mask=at < length, other=0).to(tl.int32)
        tl.store(p_list + count + tl.cumsum(held, 0), at, mask=held != 0)
        count += tl.sum(held, 0)
    tl.store(p_list, count)


@triton.jit(do_not_specialize=INTEGERS)
def list_tiles(
    Tiles, Lists, V, Norms, length: tl.int32, others: tl.int32, own_step: tl.int64, step: tl.int64,
    heads: tl.int32, group: tl.int32, n_k: tl.int32,
    v_b: tl.int64, v_h: tl.int64, v_n: tl.int64, v_d: tl.int64,
    CHUNK: tl.constexpr, NORMS: tl.constexpr, STEP: tl.constexpr,
    DV: tl.constexpr, V0: tl.constexpr, UNIT_D: tl.constexpr,
):  # fmt: skip
    """Grid (lists): the number of tiles that hold a weight, then which, of each row of tiles
    (others = query tiles, own_step = key tiles, step = 1) or column of tiles.

    Tiles: of each head [query tiles, key tiles]. Lists: [programs, 1 + length]. NORMS: of columns;
    the largest norm of a value of each tile, of each head [key tiles].
    """
    program = tl.program_id(0)
    i_bh = program // others
    own = program - i_bh * others
    p_tiles = Tiles + wide(i_bh) * others * length + own * own_step
    p_list = Lists + wide(program) * (length + 1)
    write_list(p_list, p_tiles, length, step, CHUNK)
    if NORMS:
        p_v = V + (i_bh // heads).to(tl.int64) * v_b * STEP
        p_v += (i_bh % heads // group).to(tl.int64) * v_h * STEP
        o_c = tl.arange(0, TILE)
        row0 = wide(own) * TILE
        p_v += row0 * v_n * STEP
        v = load_part(p_v, o_c, n_k - row0, v_n * STEP, v_d, 0, V0, DV, UNIT_D, True)
        tl.store(Norms + wide(i_bh) * others + own, tl.max(norms(v), 0))


@triton.jit(do_not_specialize=INTEGERS)
def list_columns(
    Tiles, Lists, V, Norms, StartsQ, StartsK, n_q: tl.int32, n_k: tl.int32, batch: tl.int32,
    longest: tl.int32, width: tl.int32, steps: tl.int32, group: tl.int32,
    v_h: tl.int64, v_n: tl.int64, v_d: tl.int64, CHUNK: tl.constexpr, NORMS: tl.constexpr,
    STEP: tl.constexpr, DV: tl.constexpr, V0: tl.constexpr, UNIT_D: tl.constexpr,
):  # fmt: skip
    """As `list_tiles` of columns of tiles, of packed sequences: grid (blocks of 64 keys x heads).

    Tiles: [heads, n_q // 64 + batch, width]. longest: of the queries of a sequence.
    """
    k_blocks = n_k // TILE + batch
    i_h = tl.program_id(0) // k_blocks
    slot = tl.program_id(0) - i_h * k_blocks
    i_s, own, first_k, len_k, first_q, len_q = block_of(
        StartsK, StartsQ, slot, batch, steps, n_k, n_q, longest, TILE
    )
    if NORMS:
        row0 = wide(own) * TILE
        p_v = V + (i_h // group).to(tl.int64) * v_h * STEP + (first_k + row0) * v_n * STEP
        o_c = tl.arange(0, TILE)
        v = load_part(p_v, o_c, len_k - row0, v_n * STEP, v_d, 0, V0, DV, UNIT_D, True)
        tl.store(Norms + tl.program_id(0), tl.max(norms(v), 0))
    length = tl.cdiv(len_q, TILE)
    length = tl.where((own * TILE < len_k) & (own < width), length, 0)
    tile_row = wide(i_h) * (n_q // TILE + batch) + first_q // TILE + i_s
    p_tiles = Tiles + tile_row * width + own
    p_list = Lists + wide(tl.program_id(0)) * (tl.cdiv(longest, TILE) + 1)
    write_list(p_list, p_tiles, length, width, CHUNK)


@triton.jit(do_not_specialize=INTEGERS)
def sum_of_sequences(X, Out, Starts, heads: tl.int32, n_q: tl.int32, CHUNK: tl.constexpr):
    """Grid (sequences x heads): Out [sequences, heads], the sums of X [heads, n_q] over the tokens
    of each sequence.
    """
    i_s = tl.program_id(0) // heads
    i_h = tl.program_id(0) - i_s * heads
    first, length = bounds_of(Starts, i_s, n_q)
    p = X + wide(i_h) * n_q + first
    o = tl.arange(0, CHUNK)
    total = tl.zeros([CHUNK], tl.float32)
    for start in range(0, length, CHUNK):
        total += tl.load(p + start + o, mask=start + o < length, other=0.0)
    tl.store(Out + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def slant(p, a):
    """h of d p / d alpha, see `eager_entmax.slant`."""
    log_p = tl.log(tl.where(p > 0.0, p, 1.0))
    low = log_p * a
    series = 1.0 - low / 3.0 * (
        1.0 - low / 4.0 * (1.0 - low / 5.0 * (1.0 - low / 6.0 * (1.0 - low / 7.0)))
    )
    large = (tl.exp(-low) - 1.0 + low) / (a * a)
    bent = tl.where(tl.abs(low) < 0.5, log_p * log_p * (0.5 * series), large)
    return p * tl.where(a > 1.0, (1.0 - low) / (a * a), -bent)


@triton.jit
def parts(s, top, slope, one, scale, a, FOLD: tl.constexpr, POWER: tl.constexpr):
    """r = v^(1 / a) and u = r / v for v = one [1 + slope (s - top)]_+ (POWER 0: one is not taken).

    top, slope, one: of the rows, [R, 1] or [1, R].
    """
    if POWER == 0:
        if FOLD:
            s = s * scale
        _, r, u = powers(s, top, slope, a, POWER)
    else:
        if FOLD:
            x = tl.fma(s, scale, tl.broadcast_to(-top, s.shape))
        else:
            x = s - top
        steep = tl.broadcast_to(slope * one, s.shape)
        v = tl.maximum(tl.fma(x, steep, tl.broadcast_to(one, s.shape)), 0.0, propagate_nan=NAN)
        if POWER == 2:
            r = v * v
            u = v
        else:
            r = v
            u = tl.where(v == 0.0, 0.0, tl.where(v == v, 1.0, v))
    return r, u


@triton.jit
def line(top, slope, one, scale, FOLD: tl.constexpr, MASK: tl.constexpr):
    """Of rows the numbers of v = [steep s + shift]_+, which is that of `parts` for alpha = 1.5.

    For half precision: the difference of large scores is as exact as the scores are. An additive
    mask may hold -1e9 in all of a row, whose product with `steep` is not exact or overflows: of
    scores with one, `on_line` takes the row's maximum first.
    """
    steep = slope * one
    shift = one + 0.0 * steep
    if MASK != 2:
        shift = one - top * steep
    if FOLD:
        steep = steep * scale
    return steep, tl.where(top == float("inf"), -float("inf"), shift)


@triton.jit
def on_line(s, top, steep, shift, MASK: tl.constexpr):
    """r and u as `parts` has them. top, steep, shift: [R, 1]."""
    if MASK == 2:
        s = s - top
    steep = tl.broadcast_to(steep, s.shape)
    u = tl.maximum(tl.fma(s, steep, tl.broadcast_to(shift, s.shape)), 0.0, propagate_nan=NAN)
    return u * u, u


@triton.jit
def derivative_factor(z, a, POWER: tl.constexpr):
    """Z^(a - 1): U = u times this."""
    if POWER == 1:
        f = tl.where(z == z, 1.0, z)
    elif POWER == 2:
        f = 1.0 / tl.sqrt(z)
    else:
        f = tl.exp((a - 1.0) * tl.log(z))
    return f


@triton.jit
def row_numbers(Rows, at, stride, inside):
    """Maximum, slope and sum of rows; rows that are not there weigh nothing."""
    top = tl.load(Rows + at, mask=inside, other=float("inf"))
    slope = tl.load(Rows + stride + at, mask=inside, other=1.0)
    z = tl.load(Rows + 2 * stride + at, mask=inside, other=1.0)
    return tl.where(top == -float("inf"), float("inf"), top), slope, z


@triton.jit(do_not_specialize=INTEGERS)
def query_gradient(
    Q, K, V, G, O, Mask, Alpha, Rows, Lists, Norms, Delta, DQ, DAlpha, StartsQ, StartsK,
    heads: tl.int32, group: tl.int32, n_q: tl.int32, n_k: tl.int32, batch: tl.int32,
    longest: tl.int32, steps: tl.int32,
    scale: tl.float32, alpha: tl.float32,
    q_b: tl.int64, q_h: tl.int64, q_n: tl.int64, q_d: tl.int64,
    k_b: tl.int64, k_h: tl.int64, k_n: tl.int64, k_d: tl.int64,
    v_b: tl.int64, v_h: tl.int64, v_n: tl.int64, v_d: tl.int64,
    g_b: tl.int64, g_h: tl.int64, g_n: tl.int64, g_d: tl.int64,
    o_b: tl.int64, o_h: tl.int64, o_n: tl.int64, o_d: tl.int64,
    dq_b: tl.int64, dq_h: tl.int64, dq_n: tl.int64, dq_d: tl.int64,
    mask_b: tl.int64, mask_h: tl.int64, mask_q: tl.int64, mask_k: tl.int64,
    alpha_b: tl.int64, alpha_h: tl.int64,
    MODE: tl.constexpr, POWER: tl.constexpr, OF_HEADS: tl.constexpr, MASK: tl.constexpr,
    CAUSAL: tl.constexpr, FOLD: tl.constexpr, RANGE: tl.constexpr, WANT_Q: tl.constexpr,
    WANT_ALPHA: tl.constexpr,
    PACKED: tl.constexpr, STAGES: tl.constexpr, CHUNK: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, STEP: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, DV: tl.constexpr, V0: tl.constexpr, UNIT_D: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of BM queries x batch x heads): dQ, delta of each row and its part of the
    derivative by alpha. DAlpha: [batch * heads, n_q]; Delta: four of it: delta, two for the keys'
    kernel, and ahead in each head's part of each tile what |dP| and |delta| are at most. Lists: of
    the blocks' tiles. Norms: of the values, see `list_tiles`.

    PACKED: as `entmax_forward.forward`; DAlpha [heads, n_q].
    """
    q_b, q_h, q_n = q_b * STEP, q_h * STEP, q_n * STEP
    k_b, k_h, k_n = k_b * STEP, k_h * STEP, k_n * STEP
    v_b, v_h, v_n = v_b * STEP, v_h * STEP, v_n * STEP
    g_b, g_h, g_n = g_b * STEP, g_h * STEP, g_n * STEP
    q_blocks = n_q // BM + batch if PACKED else tl.cdiv(n_q, BM)
    i_bh = tl.program_id(0) // q_blocks
    i_m = tl.program_id(0) - i_bh * q_blocks
    if CAUSAL:
        i_m = q_blocks - 1 - i_m  # the longest rows first
    p_list = Lists + (wide(i_bh) * q_blocks + i_m) * (tl.cdiv(longest if PACKED else n_k, BN) + 1)
    i_b = (i_bh // heads).to(tl.int64)
    i_h = (i_bh % heads).to(tl.int64)
    p_q = Q + i_b * q_b + i_h * q_h
    p_k = K + i_b * k_b + i_h // group * k_h
    p_v = V + i_b * v_b + i_h // group * v_h
    p_g = G + i_b * g_b + i_h * g_h
    p_o = O + i_b * o_b + i_h * o_h
    p_dq = DQ + i_b * dq_b + i_h * dq_h
    first_row = wide(i_bh) * n_q
    p_norms = Norms + wide(i_bh) * tl.cdiv(n_k, BN)
    stride = batch.to(tl.int64) * heads * n_q
    i_s = i_b
    if PACKED:
        stride = wide(heads) * n_q
        p_norms = Norms + wide(i_bh) * (n_k // BN + batch)
        i_s, i_m, first_q, n_q, first_k, n_k = block_of(
            StartsQ, StartsK, i_m, batch, steps, n_q, n_k, longest, BM
        )
        if i_m * BM >= n_q:
            return
        p_q += first_q * q_n
        p_k += first_k * k_n
        p_v += first_k * v_n
        p_g += first_q * g_n
        p_o += first_q * o_n
        p_norms += first_k // BN + i_s
        p_dq += first_q * dq_n
        first_row += first_q
    row0 = i_m * BM
    rows = n_q - row0
    o_m = tl.arange(0, BM)
    o_c = tl.arange(0, BN)
    a = alpha_of(Alpha, i_s, i_h, alpha_b, alpha_h, alpha, OF_HEADS)
    p_mask = Mask
    if MASK:
        p_mask = Mask + i_b * mask_b + i_h * mask_h + wide(row0) * mask_q
    of_mask = o_m[:, None] * mask_q + o_c[None, :] * mask_k
    p_q += wide(row0) * q_n
    p_g += wide(row0) * g_n
    q = load_part(p_q, o_m, rows, q_n, q_d, 0, D0, D, UNIT_D, True)
    g = load_part(p_g, o_m, rows, g_n, g_d, 0, V0, DV, UNIT_D, True)
    inside = o_m < rows
    at = first_row + row0 + o_m
    top, slope, z = row_numbers(Rows, at, stride, inside)
    top, slope = top[:, None], slope[:, None]
    ones = tl.full([BM], 1.0, tl.float32)
    count = tl.load(p_list)
    whole = n_k // BN
    if CAUSAL:
        whole = tl.minimum(whole, (row0 + 1) // BN)
    LINE: tl.constexpr = MODE == 0 and POWER == 2
    one = UNIT if RANGE else 1.0  # small weights keep their digits in float16
    steep, shift = top, slope
    factor = derivative_factor(z, a, POWER)
    if LINE:
        unit = ROOT_UNIT if RANGE else 1.0  # of U and the root of P, which the keys' kernel takes
        steep, shift = line(top, slope, unit * factor[:, None], scale, FOLD, MASK)
        tl.store(Delta + stride + at, tl.reshape(steep, [BM]), mask=inside)
        tl.store(Delta + 2 * stride + at, tl.reshape(shift, [BM]), mask=inside)
        steep, shift = line(top, slope, one, scale, FOLD, MASK)
    wider = ones  # what dP is multiplied by
    e = tl.zeros([BM], tl.int32)
    if RANGE:
        bound = norms(g) * largest(p_norms, p_list, count, CHUNK)
        e = exponent((2.0 * one) * bound)
        wider = power(e)
        of_tiles = tl.max(tl.reshape(bound, (BM // TILE, TILE)), 1)
        o_t = i_m * (BM // TILE) + tl.arange(0, BM // TILE)
        tl.store(Delta + 3 * stride + first_row + o_t, of_tiles, mask=o_t * TILE < n_q)
    # a power of two is exact: c needs no more than to be the same in each tile
    o = load_part(p_o + wide(row0) * o_n, o_m, rows, o_n, o_d, 0, V0, DV, False, True)
    c = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
    if POWER != 2:
        # alpha > 1.5: delta is as the smaller weights have it, and may be far from c
        first = tl.where(a > 0.5, count, 0)
        total = tl.zeros([BM], tl.float32)
        mean = tl.zeros([BM], tl.float32)
        j = tl.load(p_list + 1, mask=first > 0, other=0)
        for i in tl.range(0, first, num_stages=STAGES):
            ahead = tl.load(p_list + tl.minimum(i + 2, count))
            n0 = wide(j) * BN
            k = load_part(p_k + n0 * k_n, o_c, n_k - j * BN, k_n, k_d, 0, D0, D, UNIT_D, True)
            v = load_part(p_v + n0 * v_n, o_c, n_k - j * BN, v_n, v_d, 0, V0, DV, UNIT_D, True)
            s = scores(
                q, k, p_mask + n0 * mask_k + of_mask, o_m[:, None], o_c[None, :], rows,
                n_k - j * BN, row0 - j * BN, scale, j >= whole, MODE, MASK, CAUSAL, FOLD,
            )  # fmt: skip
            r, u = parts(s, top, slope, ones[:, None], scale, a, FOLD, POWER)
            total += tl.sum(u, 1)
            mean += tl.sum(u * (product(g, v.T, MODE) - c[:, None]), 1)
            j = ahead
        c += mean / tl.where(total == 0.0, 1.0, total)
    wide_c = -(c * wider)[:, None]

    total = tl.zeros([BM], tl.float32)
    mean = tl.zeros([BM], tl.float32)
    dq = tl.zeros([BM, D0], tl.float32)
    of_keys = tl.zeros([BM, D0], tl.float32)
    by_alpha = tl.zeros([BM], tl.float32)
    slants = tl.zeros([BM], tl.float32)
    j = tl.load(p_list + 1, mask=count > 0, other=0)
    for i in tl.range(0, count, num_stages=STAGES):
        ahead = tl.load(p_list + tl.minimum(i + 2, count))
        n0 = wide(j) * BN
        k = load_part(p_k + n0 * k_n, o_c, n_k - j * BN, k_n, k_d, 0, D0, D, UNIT_D, True)
        v = load_part(p_v + n0 * v_n, o_c, n_k - j * BN, v_n, v_d, 0, V0, DV, UNIT_D, True)
        s = scores(
            q, k, p_mask + n0 * mask_k + of_mask, o_m[:, None], o_c[None, :], rows, n_k - j * BN,
            row0 - j * BN, scale, j >= whole, MODE, MASK, CAUSAL, FOLD,
        )  # fmt: skip
        if LINE:
            r, u = on_line(s, top, steep, shift, MASK)
        else:
            r, u = parts(s, top, slope, ones[:, None], scale, a, FOLD, POWER)
        d_p = product(g, v.T, MODE)
        if RANGE:
            d_p = tl.fma(d_p, tl.broadcast_to(wider[:, None], d_p.shape), wide_c)
        else:
            d_p = d_p + wide_c
        if WANT_ALPHA:
            bent = slant(r / (z * (one * one))[:, None], a)
            by_alpha += tl.sum(bent * d_p, 1)
            slants += tl.sum(bent, 1)
        x = u * d_p
        total += tl.sum(u, 1)
        mean += tl.sum(x, 1)
        if WANT_Q:
            if LINE:
                dq = tl.dot(x.to(k.dtype), k, dq)
                of_keys = tl.dot(u.to(k.dtype), k, of_keys)
            else:
                dq = accumulate(dq, x, k, MODE)
                of_keys = accumulate(of_keys, u, k, MODE)
        j = ahead
    mean = mean / tl.where(total == 0.0, 1.0, total)  # delta - c, times `wider`
    delta = c + mean * power(-e)
    tl.store(Delta + at, delta, mask=inside)
    if WANT_ALPHA:
        tl.store(DAlpha + at, (by_alpha - mean * slants) * power(-e), mask=inside)
    if WANT_Q:
        dq = tl.fma(of_keys, tl.broadcast_to(-mean[:, None], dq.shape), dq)
        dq = dq * (factor * power(-e) * (scale / one))[:, None]
        o_d = tl.arange(0, D0)
        p = p_dq + (wide(row0) + o_m)[:, None] * dq_n + (o_d * dq_d)[None, :]
        tl.store(p, dq.to(DQ.dtype.element_ty), mask=inside[:, None] & (o_d < D)[None, :])


@triton.jit(do_not_specialize=INTEGERS)
def key_gradient(
    Q, K, V, G, Mask, Alpha, Rows, Lists, Delta, DK, DV_, StartsQ, StartsK,
    heads: tl.int32, group: tl.int32, n_q: tl.int32, n_k: tl.int32, batch: tl.int32,
    longest: tl.int32, steps: tl.int32,
    scale: tl.float32, alpha: tl.float32,
    q_b: tl.int64, q_h: tl.int64, q_n: tl.int64, q_d: tl.int64,
    k_b: tl.int64, k_h: tl.int64, k_n: tl.int64, k_d: tl.int64,
    v_b: tl.int64, v_h: tl.int64, v_n: tl.int64, v_d: tl.int64,
    g_b: tl.int64, g_h: tl.int64, g_n: tl.int64, g_d: tl.int64,
    dk_b: tl.int64, dk_h: tl.int64, dk_n: tl.int64, dk_d: tl.int64,
    dv_b: tl.int64, dv_h: tl.int64, dv_n: tl.int64, dv_d: tl.int64,
    mask_b: tl.int64, mask_h: tl.int64, mask_q: tl.int64, mask_k: tl.int64,
    alpha_b: tl.int64, alpha_h: tl.int64,
    MODE: tl.constexpr, POWER: tl.constexpr, OF_HEADS: tl.constexpr, MASK: tl.constexpr,
    CAUSAL: tl.constexpr, FOLD: tl.constexpr, RANGE: tl.constexpr, WANT_K: tl.constexpr,
    WANT_V: tl.constexpr, PACKED: tl.constexpr, STAGES: tl.constexpr, CHUNK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STEP: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, DV: tl.constexpr, V0: tl.constexpr, UNIT_D: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of BN keys x batch x key heads): dK and dV, summed over the query heads that
    share them, in one order. Lists: of the blocks' tiles. Delta: of `query_gradient`.

    PACKED: grid (blocks x key heads), of which a sequence has one more than its keys fill at most;
    longest: of the queries of a sequence.
    """
    q_b, q_h, q_n = q_b * STEP, q_h * STEP, q_n * STEP
    k_b, k_h, k_n = k_b * STEP, k_h * STEP, k_n * STEP
    v_b, v_h, v_n = v_b * STEP, v_h * STEP, v_n * STEP
    g_b, g_h, g_n = g_b * STEP, g_h * STEP, g_n * STEP
    k_blocks = n_k // BN + batch if PACKED else tl.cdiv(n_k, BN)
    q_tiles = tl.cdiv(longest if PACKED else n_q, BM)
    key_heads = heads // group
    i_kv = tl.program_id(0) // k_blocks
    i_n = tl.program_id(0) - i_kv * k_blocks
    i_b = (i_kv // key_heads).to(tl.int64)
    i_k = (i_kv % key_heads).to(tl.int64)
    i_list = i_n
    tokens = n_q
    stride = batch.to(tl.int64) * heads * n_q
    p_q0 = Q + i_b * q_b
    p_k = K + i_b * k_b + i_k * k_h
    p_v = V + i_b * v_b + i_k * v_h
    p_g0 = G + i_b * g_b
    p_dk = DK + i_b * dk_b + i_k * dk_h
    p_dv = DV_ + i_b * dv_b + i_k * dv_h
    first_row = tl.full([], 0, tl.int64)
    i_s = i_b
    if PACKED:
        stride = wide(heads) * n_q
        i_s, i_n, first_k, n_k, first_q, n_q = block_of(
            StartsK, StartsQ, i_n, batch, steps, n_k, n_q, longest, BN
        )
        if i_n * BN >= n_k:
            return
        p_q0 += first_q * q_n
        p_k += first_k * k_n
        p_v += first_k * v_n
        p_g0 += first_q * g_n
        p_dk += first_k * dk_n
        p_dv += first_k * dv_n
        first_row = first_q
    n0 = wide(i_n) * BN
    columns = n_k - i_n * BN
    o_m = tl.arange(0, BM)
    o_c = tl.arange(0, BN)
    p_k += n0 * k_n
    p_v += n0 * v_n
    k = load_part(p_k, o_c, columns, k_n, k_d, 0, D0, D, UNIT_D, True)
    v = load_part(p_v, o_c, columns, v_n, v_d, 0, V0, DV, UNIT_D, True)
    of_mask = o_m[:, None] * mask_q + o_c[None, :] * mask_k
    dk = tl.zeros([BN, D0], tl.float32)
    dv = tl.zeros([BN, V0], tl.float32)
    LINE: tl.constexpr = MODE == 0 and POWER == 2
    root = ROOT_UNIT if MODE == 0 and (RANGE or not LINE) else 1.0
    e = 0
    if RANGE and WANT_K:
        bound = 0.0
        for i_g in range(0, group):
            i_bh = i_b * heads + i_k * group + i_g
            p_list = Lists + (i_bh * k_blocks + i_list) * (q_tiles + 1)
            p_bounds = Delta + 3 * stride + i_bh * tokens + first_row
            bound = tl.maximum(bound, largest(p_bounds, p_list, tl.load(p_list), CHUNK))
        e = exponent((2.0 * ROOT_UNIT) * bound)
        wider = power(e)
    for i_g in range(0, group):
        i_h = i_k * group + i_g
        i_bh = i_b * heads + i_h
        a = alpha_of(Alpha, i_s, i_h, alpha_b, alpha_h, alpha, OF_HEADS)
        p_list = Lists + (i_bh * k_blocks + i_list) * (q_tiles + 1)
        p_mask = Mask
        if MASK:
            p_mask = Mask + i_b * mask_b + i_h * mask_h + n0 * mask_k
        count = tl.load(p_list)
        j = tl.load(p_list + 1, mask=count > 0, other=0)
        for i in tl.range(0, count, num_stages=STAGES):
            ahead = tl.load(p_list + tl.minimum(i + 2, count))
            row0 = j * BM
            rows = n_q - row0
            p_q = p_q0 + i_h * q_h + wide(row0) * q_n
            p_g = p_g0 + i_h * g_h + wide(row0) * g_n
            q = load_part(p_q, o_m, rows, q_n, q_d, 0, D0, D, UNIT_D, True)
            g = load_part(p_g, o_m, rows, g_n, g_d, 0, V0, DV, UNIT_D, True)
            edge = columns < BN
            if CAUSAL:
                edge = edge | (row0 < (i_n + 1) * BN - 1)
            inside = o_m < rows
            at = i_bh * tokens + first_row + row0 + o_m
            delta = tl.load(Delta + at, mask=inside, other=0.0)
            if LINE:
                steep = tl.load(Delta + stride + at, mask=inside, other=1.0)
                shift = tl.load(Delta + 2 * stride + at, mask=inside, other=-float("inf"))
                top = steep
                if MASK == 2:
                    top, _, _ = row_numbers(Rows, at, stride, inside)
            else:
                top, slope, z = row_numbers(Rows, at, stride, inside)
                factor = derivative_factor(z, a, POWER)
            if LINE or MODE != 0:
                # as the query's kernel has products: there a row of one key has dP - delta = 0
                s = scores(
                    q, k, p_mask + wide(row0) * mask_q + of_mask, o_m[:, None], o_c[None, :],
                    rows, columns, row0 - i_n * BN, scale, edge, MODE, MASK, CAUSAL, FOLD,
                )  # fmt: skip
                if LINE:
                    r, u = on_line(s, top[:, None], steep[:, None], shift[:, None], MASK)
                else:
                    one = tl.full([BM, 1], 1.0, tl.float32)
                    r, u = parts(s, top[:, None], slope[:, None], one, scale, a, FOLD, POWER)
                    r = r / z[:, None]
                    u = u * factor[:, None]
                if WANT_V and LINE:
                    dv = tl.dot(tl.trans(r.to(g.dtype)), g, dv)
                elif WANT_V:
                    dv = accumulate(dv, tl.trans(r), g, MODE)
                if WANT_K:
                    d_p = product(g, v.T, MODE)
                    if RANGE:
                        d_p = tl.fma(d_p, wider, -(delta * wider)[:, None])
                    else:
                        d_p = d_p - delta[:, None]
                    if LINE:
                        dk = tl.dot(tl.trans((u * d_p).to(q.dtype)), q, dk)
                    else:
                        dk = accumulate(dk, tl.trans(u * d_p), q, MODE)
            else:
                # transposed: of each key a power of two is looked for
                one = root * (z / z)
                s = scores(
                    k, q, p_mask + wide(row0) * mask_q + of_mask.T, o_m[None, :], o_c[:, None],
                    rows, columns, row0 - i_n * BN, scale, edge, MODE, MASK, CAUSAL, FOLD,
                )  # fmt: skip
                r, u = parts(s, top[None, :], slope[None, :], one[None, :], scale, a, FOLD, POWER)
                r = r * ((UNIT if POWER == 0 else root) / z)[None, :]
                u = u * (root * factor)[None, :]
                if WANT_V:
                    dv = tl.dot(r.to(g.dtype), g, dv)
                if WANT_K:
                    d_p = product(v, g.T, MODE) - delta[None, :]
                    dk = accumulate(dk, u * d_p, q, MODE)
            j = ahead
    inside_k = (o_c < columns)[:, None]
    if WANT_K:
        o_d = tl.arange(0, D0)
        p = p_dk + (n0 + o_c)[:, None] * dk_n + (o_d * dk_d)[None, :]
        dk = dk * (scale / root)
        if RANGE:
            dk = dk * power(-e)
        tl.store(p, dk.to(DK.dtype.element_ty), mask=inside_k & (o_d < D)[None, :])
    if WANT_V:
        o_v = tl.arange(0, V0)
        p = p_dv + (n0 + o_c)[:, None] * dv_n + (o_v * dv_d)[None, :]
        x = dv * (1.0 / (root * root))
        tl.store(p, x.to(DV_.dtype.element_ty), mask=inside_k & (o_v < DV)[None, :])
