"""The gradients of windows up to 64 tokens: a window in one tile, a list of windows to a program.

With P the weights of a window and g the gradient of its result: dV = P^T g, dP = g V^T,
dS = P * (dP - sum(P * dP)), dQ = scale dS K, dK = scale dS^T Q. Weights are computed again; nothing
of a window is written but its rows of dqkv. A program takes the windows [i * count, (i + 1) *
count) of one head in order and keeps its sums of dS (the bias's gradient), of the padded tokens'
gradients and of the logit scale's in registers; each is written once, and `add_partials` adds the
programs' in order: no float atomics, equal bits from run to run.

MODE, BIAS, DENSE, PADDED, COSINE, edge and code as in `helpers`, with MODE 3 (float32 FMA) here
too. Sums over keys and queries are products in accumulators of their own. Split and single
products take q, k, v, g and dS each scaled by a power of two of its window; where a window fails
the guard of `shared/helpers.py` nothing of it is written or summed, and a second launch (AGAIN)
computes it with float32 FMA.
"""

from __future__ import annotations

import triton
import triton.language as tl

from elsa_core.backends.triton.shared.helpers import (
    FLOAT_MAX,
    SINGLE_LIMIT,
    SPLIT_LIMIT,
    clamped_power,
    exponent,
    extent,
    fails_guard,
    halves,
    load_tile,
    power,
    times_power,
)
from elsa_core.backends.triton.window.helpers import (
    NORM_EPS,
    RUNTIME_INTEGERS,
    SCORE_LIMIT,
    add_terms,
    bias_tile,
    load_tokens,
    locate_tokens,
    locate_window,
    logit_factor,
    next_window,
    store_tokens,
    token_code,
    window_edge,
)

# bounds of an operand's exponent, so that those of two operands and of weights stay in float32
LEAST_EXPONENT: tl.constexpr = tl.constexpr(-40)
MOST_EXPONENT: tl.constexpr = tl.constexpr(56)
# dS of a window of zeros would take an exponent that no factor undoes
MOST_OF_SCORES: tl.constexpr = tl.constexpr(100)


@triton.jit
def operand(x, MODE: tl.constexpr):
    """A tile as products take it: high and low part, exponent, and 1 where the guard fails."""
    hi = x
    lo = x
    e = tl.full([], 0, tl.int32)
    bad = tl.full([], 0, tl.int32)
    if MODE == 1 or MODE == 2:
        LIMIT: tl.constexpr = SPLIT_LIMIT if MODE == 1 else SINGLE_LIMIT
        top, least = extent(tl.abs(x), 0.0)
        e = tl.minimum(exponent(top), MOST_EXPONENT)
        bad = fails_guard(least, e, LIMIT) | (e < LEAST_EXPONENT).to(tl.int32)
        hi, lo = halves(x * power(e))
    return hi, lo, e, bad


@triton.jit
def unit_operand(x, MODE: tl.constexpr):
    """Normalised rows as products take them, 1 / norm of each row, and 1 where a norm overflows.

    In split and single modes they carry 2**13.
    """
    square = tl.sum(x.to(tl.float32) * x.to(tl.float32), 1)
    inverse = 1.0 / tl.maximum(tl.sqrt(square), NORM_EPS)
    bad = tl.full([], 0, tl.int32)
    unit = x.to(tl.float32) * inverse[:, None]
    if MODE == 1 or MODE == 2:
        hi, lo = halves(unit * 8192.0)
        bad = (tl.max(square, 0) > FLOAT_MAX).to(tl.int32)
    else:
        hi = unit.to(x.dtype)
        lo = hi
    return hi, lo, inverse, bad


@triton.jit
def product(ah, al, bh, bl, MODE: tl.constexpr):
    """a b in an accumulator of its own, the smallest products first."""
    if MODE == 1:
        t = tl.dot(al, bh)
        t = tl.dot(ah, bl, t)
        t = tl.dot(ah, bh, t)
    elif MODE == 3:
        t = tl.dot(ah, bh, input_precision="ieee")
    else:
        t = tl.dot(ah, bh)
    return t


@triton.jit
def through_norm(u, x, inverse):
    """The gradient of rows before they were normalised, of that after, and its part along them.

    A row of a norm below NORM_EPS was divided by that constant.
    """
    unit = x.to(tl.float32) * inverse[:, None]
    along = tl.sum(unit * u, 1)
    held = tl.where(inverse * NORM_EPS < 1.0, along, 0.0)
    return (u - unit * held[:, None]) * inverse[:, None], along


@triton.jit
def rows_operand(x, MODE: tl.constexpr, COSINE: tl.constexpr):
    """Queries or keys as products take them: high and low part, exponent, 1 / norm of rows (of
    cosine attention), and 1 where the guard fails."""
    if COSINE:
        hi, lo, inverse, bad = unit_operand(x, MODE)
        e = tl.full([], 13 if MODE == 1 or MODE == 2 else 0, tl.int32)
    else:
        hi, lo, e, bad = operand(x, MODE)
        inverse = tl.zeros([x.shape[0]], tl.float32)
    return hi, lo, e, inverse, bad


@triton.jit
def score_tile(
    q, qh, ql, e_q, i_q, k, kh, kl, e_k, i_k, scale, scale_exp,
    MODE: tl.constexpr, COSINE: tl.constexpr,
):  # fmt: skip
    """Scores in base 2 of two tiles, and 1 where they may lie beyond what a split holds."""
    bad = tl.full([], 0, tl.int32)
    if MODE == 0 and COSINE:
        # as the forward, from rows that are not rounded again
        s = tl.dot(q, k.T) * (i_q * scale)[:, None] * i_k[None, :]
    else:
        e = scale_exp - e_q - e_k
        s = product(qh, ql, kh.T, kl.T, MODE) * (clamped_power(e) * scale)
        if MODE == 1 or MODE == 2:
            bad = (e > SCORE_LIMIT).to(tl.int32)
    return s, bad


@triton.jit
def differentiate(
    q, k, v, g, bias, edge, c_m, c_n, mask_value, scale, scale_exp, grad_scale,
    MODE: tl.constexpr, TERMS: tl.constexpr, SHIFTED: tl.constexpr, COSINE: tl.constexpr,
    SHIFT: tl.constexpr, WANT_ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of a window: rows dq, dk, dv [M, DP], dS [M, M], of the logit scale, the guard."""
    SCALED: tl.constexpr = MODE == 1 or MODE == 2
    qh, ql, e_q, i_q, bad_q = rows_operand(q, MODE, COSINE)
    kh, kl, e_k, i_k, bad_k = rows_operand(k, MODE, COSINE)
    s, bad = score_tile(q, qh, ql, e_q, i_q, k, kh, kl, e_k, i_k, scale, scale_exp, MODE, COSINE)
    bad = bad | bad_q | bad_k
    s = add_terms(s, bias, edge, c_m, c_n, mask_value, TERMS, SHIFTED)
    m = tl.max(s, 1)
    # a row that sees no key has no weights
    m = tl.where(m == -float("inf"), 0.0, m)
    p = tl.exp2(s - m[:, None])
    z = tl.sum(p, 1)
    gh, gl, e_g, bad_g = operand(g, MODE)
    vh, vl, e_v, bad_v = operand(v, MODE)
    bad = bad | bad_g | bad_v
    dp = product(gh, gl, vh.T, vl.T, MODE)
    # weights carry 2**LARGE, so that float16 keeps small ones
    LARGE: tl.constexpr = 13.0 if SCALED else SHIFT
    p = p * (2.0**LARGE / tl.where(z == 0.0, 1.0, z))[:, None]
    delta = tl.sum(p * dp, 1) * 2.0**-LARGE
    ds = p * (dp - delta[:, None])
    dq = tl.zeros(q.shape, tl.float32)
    dk = dq
    dv = dq
    dlogit = tl.full([], 0.0, tl.float32)
    if WANT_ROWS:
        if SCALED:
            ph, pl = halves(p)
            e_s = tl.minimum(exponent(tl.max(tl.max(tl.abs(ds), 1), 0)), MOST_OF_SCORES)
            sh, sl = halves(ds * power(e_s))
        else:
            e_s = tl.full([], 0, tl.int32)
            ph = p.to(v.dtype)
            pl = ph
            sh = ds.to(v.dtype)
            sl = sh
        dv = product(ph.T, pl.T, gh, gl, MODE) * 2.0**-LARGE
        factor = 2.0**-LARGE if COSINE else grad_scale * 2.0**-LARGE
        dq = product(sh, sl, kh, kl, MODE) * factor
        dk = product(sh.T, sl.T, qh, ql, MODE) * factor
        if SCALED:
            dv = dv * power(-e_g)
            # an exponent beyond what float32 holds gives zeros or infinities
            e = -(e_s + e_g + e_v)
            dq = times_power(dq, tl.minimum(tl.maximum(e - e_k, -252), 254))
            dk = times_power(dk, tl.minimum(tl.maximum(e - e_q, -252), 254))
        if COSINE:
            dq, along = through_norm(dq, q, i_q)
            dk, _ = through_norm(dk, k, i_k)
            dlogit = tl.sum(along, 0)
            dq = dq * grad_scale
            dk = dk * grad_scale
    ds = ds * 2.0**-LARGE
    if SCALED:
        ds = ds * power(-(e_g + e_v))
    return dq, dk, dv, ds, dlogit, bad


@triton.jit
def one_window(
    dbias, dpad_k, dpad_v, dlogit, bias, o, code, i_b, w_z, w_y, w_x, i_h,
    QKV, G, Pad, DQKV, heads, depth, height, width, n_d, n_h, n_w, shift_d, shift_h, shift_w,
    scale, scale_exp, grad_scale, mask_value, q_b, q_d, q_h, q_w,
    MODE: tl.constexpr, TERMS: tl.constexpr, SHIFTED: tl.constexpr, PADDED: tl.constexpr,
    COSINE: tl.constexpr, HEAD_FIRST: tl.constexpr, GRID: tl.constexpr, VOLUME: tl.constexpr,
    UNIT: tl.constexpr, WD: tl.constexpr, WH: tl.constexpr, WW: tl.constexpr, T: tl.constexpr,
    SHIFT: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr,
    WANT_QKV: tl.constexpr, WANT_BIAS: tl.constexpr, WANT_PAD: tl.constexpr,
    WANT_LOGIT: tl.constexpr,
):  # fmt: skip
    """Write a window's rows of dqkv, add to the sums. Returns the sums, and what the guard says."""
    BOUNDED: tl.constexpr = T < BM
    step = D if HEAD_FIRST else heads * D
    start = i_h * (3 * D) if HEAD_FIRST else i_h * D
    pixels = (depth * height * width).to(tl.int64)
    o_d = tl.arange(0, DP)
    offset, pixel, inside = locate_tokens(
        o, w_z, w_y, w_x, n_d, n_h, n_w, depth, height, width, shift_d, shift_h, shift_w,
        q_d, q_h, q_w, WD, WH, WW, GRID, VOLUME, UNIT,
    )  # fmt: skip
    p = QKV + i_b.to(tl.int64) * (q_b * UNIT) + start
    q = load_tokens(p, Pad + start, o, offset, inside, T, D, DP, PADDED, BOUNDED)
    p += step
    k = load_tokens(p, Pad + start + step, o, offset, inside, T, D, DP, PADDED, BOUNDED)
    p += step
    v = load_tokens(p, Pad + start + 2 * step, o, offset, inside, T, D, DP, PADDED, BOUNDED)
    # the result of a padded token is dropped
    there = (o < T) & inside
    p = G + (i_b * pixels + pixel)[:, None] * (heads * D) + i_h * D + o_d[None, :]
    g = load_tile(p, there, o_d < D, BOUNDED or PADDED != 0, D < DP)
    edge = window_edge(w_z, w_y, w_x, n_d, n_h, n_w)
    dq, dk, dv, ds, own_logit, bad = differentiate(
        q, k, v, g, bias, edge, code, code, mask_value, scale, scale_exp, grad_scale,
        MODE, TERMS, SHIFTED, COSINE, SHIFT, WANT_QKV or WANT_PAD or WANT_LOGIT,
    )  # fmt: skip
    # the rows that count: known at compile time in the modes without a guard
    kept = o < tl.where(bad == 0, T, 0)
    if WANT_BIAS:
        dbias += tl.where(kept[:, None], ds, 0.0)
    if WANT_LOGIT:
        dlogit += tl.where(bad == 0, own_logit, 0.0)
    if WANT_QKV:
        p_out = DQKV + i_b * pixels * (3 * heads * D) + start
        row = 3 * heads * D
        store_tokens(dq, p_out, row, kept, pixel, inside, D, DP)
        store_tokens(dk, p_out + step, row, kept, pixel, inside, D, DP)
        store_tokens(dv, p_out + 2 * step, row, kept, pixel, inside, D, DP)
    if WANT_PAD:  # noqa: SIM102 (one is decided at compile time, the other by the window)
        if edge != 0:
            # nothing comes back to a padded query; no window of a grid is padded
            padded = (kept & (inside == 0))[:, None]
            dpad_k += tl.sum(tl.where(padded, dk, 0.0), 0)
            dpad_v += tl.sum(tl.where(padded, dv, 0.0), 0)
    return dbias, dpad_k, dpad_v, dlogit, bad


@triton.jit(do_not_specialize=RUNTIME_INTEGERS)
def window_gradients(
    QKV, G, Bias, Pad, Logit, DQKV, Partial, Flags,
    windows: tl.int32, heads: tl.int32, count: tl.int32,
    depth: tl.int32, height: tl.int32, width: tl.int32, n_d: tl.int32, n_h: tl.int32,
    n_w: tl.int32, shift_d: tl.int32, shift_h: tl.int32, shift_w: tl.int32,
    scale_exp: tl.int32, scale: tl.float32, grad_scale: tl.float32, mask_value: tl.float32,
    q_b: tl.int64, q_d: tl.int64, q_h: tl.int64, q_w: tl.int64,
    bias_h: tl.int64, bias_q: tl.int64, bias_k: tl.int64, logit_h: tl.int64,
    MODE: tl.constexpr, AGAIN: tl.constexpr, BIAS: tl.constexpr, DENSE: tl.constexpr,
    SHIFTED: tl.constexpr, PADDED: tl.constexpr, COSINE: tl.constexpr, HEAD_FIRST: tl.constexpr,
    GRID: tl.constexpr, VOLUME: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr,
    WD: tl.constexpr, WH: tl.constexpr, WW: tl.constexpr, T: tl.constexpr, SHIFT: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr,
    WANT_QKV: tl.constexpr, WANT_BIAS: tl.constexpr, WANT_PAD: tl.constexpr,
    WANT_LOGIT: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Grid (groups of `count` windows x heads, the head fastest).

    G [B, D, H, W, C] and DQKV [B, D, H, W, 3 * C] without gaps; strides q_* in units of UNIT
    elements; `scale`, `scale_exp` and `mask_value` as in `window_tile`, `grad_scale` the
    factor of the scores itself. Partial, float32 [programs, ROW]: T * T sums of dS, then 2 * D of
    the padded keys' and values' gradients, then one of the logit scale's. Flags, int32 [programs +
    windows * heads], of split and single modes: whether a program met windows that fail the guard,
    and which. AGAIN: these alone, added to the sums that are there.
    """
    pid = tl.program_id(0)
    i_h = pid % heads
    first = pid // heads * count
    last = tl.minimum(first + count, windows)
    if not WIDE:
        q_d = q_d.to(tl.int32)
        q_h = q_h.to(tl.int32)
        q_w = q_w.to(tl.int32)
    BOUNDED: tl.constexpr = T < BM
    TERMS: tl.constexpr = BIAS or BOUNDED
    o = tl.arange(0, BM)
    o_d = tl.arange(0, DP)
    code = token_code(o, shift_d, shift_h, shift_w, WD, WH, WW, VOLUME)
    if COSINE:
        grad_scale = tl.load(Logit + i_h * logit_h).to(tl.float32)
        scale, scale_exp = logit_factor(Logit + i_h * logit_h, MODE)
    p_sums = Partial + pid.to(tl.int64) * ROW
    p_bias = p_sums + o[:, None] * T + o[None, :]
    p_pad = p_sums + (T * T if WANT_BIAS else 0) + o_d
    p_logit = p_sums + ROW - 1 + tl.arange(0, 1)
    # the sums of a program whose windows all passed are as they should be
    tokens = T
    channels = D
    if AGAIN:
        asked = tl.load(Flags + pid) != 0
        last = tl.where(asked, last, first)
        tokens = tl.where(asked, T, 0)
        channels = tl.where(asked, D, 0)
    in_bias = (o < tokens)[:, None] & (o < T)[None, :]
    in_pad = o_d < channels
    in_logit = tl.arange(0, 1) < channels
    dbias = tl.zeros([BM, BM if WANT_BIAS else 1], tl.float32)
    dpad_k = tl.zeros([DP], tl.float32)
    dpad_v = tl.zeros([DP], tl.float32)
    dlogit = tl.zeros([1], tl.float32)
    if AGAIN:
        if WANT_BIAS:
            dbias = tl.load(p_bias, mask=in_bias, other=0.0)
        if WANT_PAD:
            dpad_k = tl.load(p_pad, mask=in_pad, other=0.0)
            dpad_v = tl.load(p_pad + D, mask=in_pad, other=0.0)
        if WANT_LOGIT:
            dlogit = tl.load(p_logit, mask=in_logit, other=0.0)
    i_b, w_z, w_y, w_x = locate_window(tl.full([], 0, tl.int32) + first, n_d, n_h, n_w, VOLUME)
    bias = bias_tile(Bias, i_h, o, o, bias_h, bias_q, bias_k, BIAS, DENSE, T, BOUNDED)
    p_flags = Flags + tl.num_programs(0) + i_h
    verdicts = tl.full([], 0, tl.int32)
    for i_window in tl.range(first, last, num_stages=STAGES):
        now = True
        if AGAIN:
            now = tl.load(p_flags + i_window * heads) != 0
        if now:
            dbias, dpad_k, dpad_v, dlogit, bad = one_window(
                dbias, dpad_k, dpad_v, dlogit, bias, o, code, i_b, w_z, w_y, w_x, i_h,
                QKV, G, Pad, DQKV, heads, depth, height, width, n_d, n_h, n_w,
                shift_d, shift_h, shift_w, scale, scale_exp, grad_scale, mask_value,
                q_b, q_d, q_h, q_w,
                MODE, TERMS, SHIFTED, PADDED, COSINE, HEAD_FIRST, GRID, VOLUME, UNIT, WD, WH, WW,
                T, SHIFT, D, DP, BM, WANT_QKV, WANT_BIAS, WANT_PAD, WANT_LOGIT,
            )  # fmt: skip
            if MODE == 1 or MODE == 2:
                tl.store(p_flags + i_window * heads, bad)
                verdicts = verdicts | bad
        i_b, w_z, w_y, w_x = next_window(i_b, w_z, w_y, w_x, n_d, n_h, n_w, VOLUME)
    if MODE == 1 or MODE == 2:
        tl.store(Flags + pid, verdicts)
    if WANT_BIAS:
        tl.store(p_bias, dbias, mask=in_bias)
    if WANT_PAD:
        tl.store(p_pad, dpad_k, mask=in_pad)
        tl.store(p_pad + D, dpad_v, mask=in_pad)
    if WANT_LOGIT:
        tl.store(p_logit, dlogit, mask=in_logit)


@triton.jit(do_not_specialize=["groups", "heads", "pad_h", "pad_part"])
def add_partials(
    Partial, DBias, DPad, DLogit,
    groups: tl.int32, heads: tl.int32, pad_h: tl.int64, pad_part: tl.int64,
    SIZE: tl.constexpr, D: tl.constexpr, ROW: tl.constexpr, WANT_BIAS: tl.constexpr,
    WANT_PAD: tl.constexpr, WANT_LOGIT: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of ROW, heads): the sums of a head over its groups.

    Partial, float32 [groups, heads, ROW]: SIZE of the bias, then 2 * D of a padded token's key and
    value, then one of the logit scale. DBias [heads, SIZE] and DLogit [heads] are dense; DPad
    [3 * C] has a head at pad_h and the next of query, key and value pad_part further on.
    """
    i_h = tl.program_id(1)
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o_g = tl.arange(0, AT_ONCE)
    acc = tl.zeros([AT_ONCE, BLOCK], tl.float32)
    for g0 in tl.range(0, groups, AT_ONCE):
        p = Partial + ((g0 + o_g).to(tl.int64) * heads + i_h)[:, None] * ROW + o[None, :]
        acc += tl.load(p, mask=(g0 + o_g < groups)[:, None] & (o < ROW)[None, :], other=0.0)
    x = tl.sum(acc, 0)
    FIRST: tl.constexpr = SIZE if WANT_BIAS else 0
    if WANT_BIAS:
        p = DBias + i_h.to(tl.int64) * SIZE + o
        tl.store(p, x.to(DBias.dtype.element_ty), mask=o < SIZE)
    if WANT_PAD:
        i = o - FIRST
        p = DPad + i_h * pad_h + (1 + i // D) * pad_part + i % D
        tl.store(p, x.to(DPad.dtype.element_ty), mask=(i >= 0) & (i < 2 * D))
    if WANT_LOGIT:
        tl.store(DLogit + i_h + o * 0, x.to(DLogit.dtype.element_ty), mask=o == ROW - 1)


@triton.jit(do_not_specialize=["size", "rows", "heads", "tokens", "index_q", "index_k"])
def add_to_table(
    Dense, Index, DTable, size: tl.int32, rows: tl.int32, heads: tl.int32, tokens: tl.int32,
    index_q: tl.int64, index_k: tl.int64, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows of the table, blocks of HEADS heads): the sum of the entries that read a row.

    Dense, float32 [heads, tokens * tokens]; Index [tokens, tokens]; DTable [rows, heads]. Entries
    beyond the table have no gradient.
    """
    i_row = tl.program_id(0)
    o_h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    acc = tl.zeros([HEADS, BLOCK], tl.float32)
    for first in tl.range(0, size, BLOCK):
        o = first + tl.arange(0, BLOCK)
        i_q = o // tokens
        p = Index + i_q * index_q + (o - i_q * tokens) * index_k
        number = tl.load(p, mask=o < size, other=-1 - rows)
        mine = number == i_row
        p = Dense + o_h.to(tl.int64)[:, None] * size + o[None, :]
        acc += tl.load(p, mask=(o_h < heads)[:, None] & mine[None, :], other=0.0)
    p = DTable + i_row.to(tl.int64) * heads + o_h
    tl.store(p, tl.sum(acc, 1).to(DTable.dtype.element_ty), mask=o_h < heads)
