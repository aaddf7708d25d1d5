"""The gradients of windows a few tiles long: all keys of some queries at once, then the reverse.

Chunks: all tokens of a window, C at a time, the last REST, the power of two that holds what is
left. `row_gradients` keeps scores and dP of BM queries and all chunks in registers: dQ, and of each
row (m, 1 / z, delta) as `backward_fold` has them. `column_gradients` has BM keys meet one chunk of
queries after the other: dK and dV. A program of it takes the same keys of a list of windows in
order and keeps its sums of dS, the bias's gradient of these columns. Seven products of two tiles
where `backward_fold` takes eleven. Sums of padded tokens and of the logit scale are written once
for each tile; `backward_sums` adds all sums in order.

Flags of split and single modes, int32 [windows, heads, tiles], one array for each kernel: the tiles
whose operands fail the guard of `shared/helpers.py`. Nothing of such a tile is written or summed;
a second launch (AGAIN) computes it in float32 FMA. That of rows comes before the columns, which
read the numbers of all rows.

Not chosen by auto until measured: see `elsa_core.routing.measured.LONG_WINDOWS`.

Source: FlashAttention (arXiv 2205.14135), Algorithm 4, within windows (arXiv 2604.23798).
"""

from __future__ import annotations

import triton
import triton.language as tl

from elsa_core.backends.triton.window.backward_fold import (
    load_side,
    score_halves,
    tile_pair,
    undone,
)
from elsa_core.backends.triton.window.backward_products import (
    operand,
    product,
    rows_operand,
    through_norm,
)
from elsa_core.backends.triton.window.helpers import (
    RUNTIME_INTEGERS,
    locate_window,
    logit_factor,
    store_tokens,
    token_code,
    window_edge,
)


@triton.jit
def key_chunk(
    q, qh, ql, e_q, i_q, gh, gl, e_g, o_m, c_m, p_image, p_grad, Bias, Pad, start, part, i_h, heads,
    w_z, w_y, w_x, n_d, n_h, n_w, depth, height, width, shift_d, shift_h, shift_w, edge,
    scale, scale_exp, mask_value, q_d, q_h, q_w, bias_h, bias_q, bias_k,
    MODE: tl.constexpr, BIAS: tl.constexpr, DENSE: tl.constexpr, SHIFTED: tl.constexpr,
    PADDED: tl.constexpr, COSINE: tl.constexpr, GRID: tl.constexpr, VOLUME: tl.constexpr,
    UNIT: tl.constexpr, WD: tl.constexpr, WH: tl.constexpr, WW: tl.constexpr, T: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, FIRST: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Scores in base 2 and dP of BM queries by SIZE keys, the keys as a product takes them."""
    BEYOND: tl.constexpr = FIRST + SIZE > T
    o_n = FIRST + tl.arange(0, SIZE)
    c_n = token_code(o_n, shift_d, shift_h, shift_w, WD, WH, WW, VOLUME)
    k, v, _, _ = load_side(
        p_image, p_grad, Pad, start, part, o_n, i_h, heads, w_z, w_y, w_x, n_d, n_h, n_w,
        depth, height, width, shift_d, shift_h, shift_w, q_d, q_h, q_w,
        False, PADDED, GRID, VOLUME, UNIT, WD, WH, WW, T, D, DP, BEYOND,
    )  # fmt: skip
    kh, kl, e_k, i_k, bad_k = rows_operand(k, MODE, COSINE)
    vh, vl, e_v, bad_v = operand(v, MODE)
    s, dp, bad = tile_pair(
        q, qh, ql, e_q, i_q, gh, gl, e_g, k, kh, kl, e_k, i_k, vh, vl, e_v, Bias, i_h,
        o_m, o_n, edge, c_m, c_n, scale, scale_exp, mask_value, bias_h, bias_q, bias_k,
        MODE, BIAS, DENSE, SHIFTED, COSINE, T, BEYOND or T % BM != 0,
    )  # fmt: skip
    return s, dp, kh, kl, e_k, bad | bad_k | bad_v


@triton.jit(do_not_specialize=RUNTIME_INTEGERS)
def row_gradients(
    QKV, G, Bias, Pad, Logit, DQKV, Rows, Flags, LogitSums,
    windows: tl.int32, heads: tl.int32,
    depth: tl.int32, height: tl.int32, width: tl.int32, n_d: tl.int32, n_h: tl.int32,
    n_w: tl.int32, shift_d: tl.int32, shift_h: tl.int32, shift_w: tl.int32,
    scale_exp: tl.int32, scale: tl.float32, grad_scale: tl.float32, mask_value: tl.float32,
    q_b: tl.int64, q_d: tl.int64, q_h: tl.int64, q_w: tl.int64,
    bias_h: tl.int64, bias_q: tl.int64, bias_k: tl.int64, logit_h: tl.int64,
    MODE: tl.constexpr, AGAIN: tl.constexpr, BIAS: tl.constexpr, DENSE: tl.constexpr,
    SHIFTED: tl.constexpr, PADDED: tl.constexpr, COSINE: tl.constexpr, HEAD_FIRST: tl.constexpr,
    GRID: tl.constexpr, VOLUME: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr,
    WD: tl.constexpr, WH: tl.constexpr, WW: tl.constexpr, T: tl.constexpr, SHIFT: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, C: tl.constexpr, REST: tl.constexpr,
    WANT_QKV: tl.constexpr, WANT_LOGIT: tl.constexpr,
):  # fmt: skip
    """Grid (windows x tiles of BM queries x heads, the head fastest).

    Rows, float32 [3, windows, heads, T]; LogitSums, float32 [windows * tiles, heads]. The other
    arguments as of `backward_tile.window_gradients`.
    """
    TILES: tl.constexpr = (T + BM - 1) // BM
    COUNT: tl.constexpr = (T + C - 1) // C
    pid = tl.program_id(0)
    i_h = pid % heads
    i_m = pid // heads % TILES
    i_window = pid // heads // TILES
    part = D if HEAD_FIRST else heads * D
    start = i_h * (3 * D) if HEAD_FIRST else i_h * D
    if not WIDE:
        q_d = q_d.to(tl.int32)
        q_h = q_h.to(tl.int32)
        q_w = q_w.to(tl.int32)
    p_flag = Flags + (i_window.to(tl.int64) * heads + i_h) * TILES + i_m
    now = i_window >= 0
    if AGAIN:
        now = tl.load(p_flag) != 0
    if now:
        if COSINE:
            grad_scale = tl.load(Logit + i_h * logit_h).to(tl.float32)
            scale, scale_exp = logit_factor(Logit + i_h * logit_h, MODE)
        o_m = i_m * BM + tl.arange(0, BM)
        c_m = token_code(o_m, shift_d, shift_h, shift_w, WD, WH, WW, VOLUME)
        i_b, w_z, w_y, w_x = locate_window(i_window, n_d, n_h, n_w, VOLUME)
        pixels = (depth * height * width).to(tl.int64)
        p_image = QKV + i_b.to(tl.int64) * (q_b * UNIT)
        p_grad = G + i_b * pixels * (heads * D) + i_h * D
        edge = window_edge(w_z, w_y, w_x, n_d, n_h, n_w)
        q, g, pixel, inside = load_side(
            p_image, p_grad, Pad, start, part, o_m, i_h, heads, w_z, w_y, w_x, n_d, n_h, n_w,
            depth, height, width, shift_d, shift_h, shift_w, q_d, q_h, q_w,
            True, PADDED, GRID, VOLUME, UNIT, WD, WH, WW, T, D, DP, T % BM != 0,
        )  # fmt: skip
        qh, ql, e_q, i_q, bad = rows_operand(q, MODE, COSINE)
        gh, gl, e_g, bad_g = operand(g, MODE)
        bad = bad | bad_g
        scores = ()
        slopes = ()
        keys = ()
        m = tl.full([BM], -float("inf"), tl.float32)
        for j in tl.static_range(COUNT):
            s, dp, kh, kl, e_k, beyond = key_chunk(
                q, qh, ql, e_q, i_q, gh, gl, e_g, o_m, c_m, p_image, p_grad, Bias, Pad, start, part,
                i_h, heads, w_z, w_y, w_x, n_d, n_h, n_w, depth, height, width,
                shift_d, shift_h, shift_w, edge, scale, scale_exp, mask_value, q_d, q_h, q_w,
                bias_h, bias_q, bias_k,
                MODE, BIAS, DENSE, SHIFTED, PADDED, COSINE, GRID, VOLUME, UNIT, WD, WH, WW, T, D,
                DP, BM, j * C, C if (j + 1) * C <= T else REST,
            )  # fmt: skip
            bad = bad | beyond
            m = tl.maximum(m, tl.max(s, 1))
            scores += (s,)
            slopes += (dp,)
            keys += ((kh, kl, e_k),)
        # a row that sees no key has no weights
        m = tl.where(m == -float("inf"), 0.0, m)
        z = tl.zeros([BM], tl.float32)
        total = tl.zeros([BM], tl.float32)
        weights = ()
        for j in tl.static_range(COUNT):
            p = tl.exp2(scores[j] - m[:, None])
            z += tl.sum(p, 1)
            total += tl.sum(p * slopes[j], 1)
            weights += (p,)
        r = 1.0 / tl.where(z == 0.0, 1.0, z)
        delta = total * r
        p_rows = Rows + (i_window.to(tl.int64) * heads + i_h) * T + o_m
        size = windows.to(tl.int64) * heads * T
        tl.store(p_rows, m, mask=o_m < T)
        tl.store(p_rows + size, r, mask=o_m < T)
        tl.store(p_rows + 2 * size, delta, mask=o_m < T)
        kept = o_m < T
        if MODE == 1 or MODE == 2:
            tl.store(p_flag, bad)
            kept = o_m < tl.where(bad == 0, T, 0)
        dq = tl.zeros([BM, DP], tl.float32)
        for j in tl.static_range(COUNT):
            if WANT_QKV or WANT_LOGIT:
                ds = weights[j] * r[:, None] * (slopes[j] - delta[:, None])
                sh, sl, e_s = score_halves(ds, q, MODE, SHIFT)
                kh, kl, e_k = keys[j]
                dq += undone(product(sh, sl, kh, kl, MODE), e_s - e_k, MODE, SHIFT)
        if WANT_QKV or WANT_LOGIT:
            along = tl.zeros([BM], tl.float32)
            if COSINE:
                dq, along = through_norm(dq, q, i_q)
            if WANT_LOGIT:
                p = LogitSums + (i_window * TILES + i_m) * heads + i_h
                tl.store(p, tl.sum(along, 0))
            if WANT_QKV:
                p_out = DQKV + i_b * pixels * (3 * heads * D) + start
                store_tokens(dq * grad_scale, p_out, 3 * heads * D, kept, pixel, inside, D, DP)


@triton.jit
def window_columns(
    sums, QKV, G, Bias, Pad, DQKV, Rows, Flags, PadSums, i_window, i_n, i_h, o_n, c_n,
    windows, heads, depth, height, width, n_d, n_h, n_w, shift_d, shift_h, shift_w,
    scale_exp, scale, grad_scale, mask_value, q_b, q_d, q_h, q_w, bias_h, bias_q, bias_k,
    MODE: tl.constexpr, BIAS: tl.constexpr, DENSE: tl.constexpr, SHIFTED: tl.constexpr,
    PADDED: tl.constexpr, COSINE: tl.constexpr, HEAD_FIRST: tl.constexpr, GRID: tl.constexpr,
    VOLUME: tl.constexpr, UNIT: tl.constexpr, WD: tl.constexpr, WH: tl.constexpr,
    WW: tl.constexpr, T: tl.constexpr, SHIFT: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BM: tl.constexpr, C: tl.constexpr, REST: tl.constexpr, WANT_QKV: tl.constexpr,
    WANT_BIAS: tl.constexpr, WANT_PAD: tl.constexpr,
):  # fmt: skip
    """One window of `column_gradients`: write its rows, add dS to the sums, one of each chunk."""
    COUNT: tl.constexpr = (T + C - 1) // C
    TILES: tl.constexpr = (T + BM - 1) // BM
    part = D if HEAD_FIRST else heads * D
    start = i_h * (3 * D) if HEAD_FIRST else i_h * D
    i_b, w_z, w_y, w_x = locate_window(i_window, n_d, n_h, n_w, VOLUME)
    pixels = (depth * height * width).to(tl.int64)
    p_image = QKV + i_b.to(tl.int64) * (q_b * UNIT)
    p_grad = G + i_b * pixels * (heads * D) + i_h * D
    edge = window_edge(w_z, w_y, w_x, n_d, n_h, n_w)
    k, v, pixel, inside = load_side(
        p_image, p_grad, Pad, start, part, o_n, i_h, heads, w_z, w_y, w_x, n_d, n_h, n_w,
        depth, height, width, shift_d, shift_h, shift_w, q_d, q_h, q_w,
        False, PADDED, GRID, VOLUME, UNIT, WD, WH, WW, T, D, DP, T % BM != 0,
    )  # fmt: skip
    kh, kl, e_k, i_k, bad = rows_operand(k, MODE, COSINE)
    vh, vl, e_v, bad_v = operand(v, MODE)
    bad = bad | bad_v
    dk = tl.zeros([BM, DP], tl.float32)
    dv = tl.zeros([BM, DP], tl.float32)
    size = windows.to(tl.int64) * heads * T
    slopes = ()
    for j in tl.static_range(COUNT):
        o_m = j * C + tl.arange(0, C if (j + 1) * C <= T else REST)
        c_m = token_code(o_m, shift_d, shift_h, shift_w, WD, WH, WW, VOLUME)
        q, g, _, _ = load_side(
            p_image, p_grad, Pad, start, part, o_m, i_h, heads, w_z, w_y, w_x, n_d, n_h, n_w,
            depth, height, width, shift_d, shift_h, shift_w, q_d, q_h, q_w,
            True, PADDED, GRID, VOLUME, UNIT, WD, WH, WW, T, D, DP, T % C != 0,
        )  # fmt: skip
        p_rows = Rows + (i_window.to(tl.int64) * heads + i_h) * T + o_m
        m = tl.load(p_rows, mask=o_m < T, other=0.0)
        r = tl.load(p_rows + size, mask=o_m < T, other=0.0)
        delta = tl.load(p_rows + 2 * size, mask=o_m < T, other=0.0)
        qh, ql, e_q, i_q, bad_q = rows_operand(q, MODE, COSINE)
        gh, gl, e_g, bad_g = operand(g, MODE)
        s, dp, beyond = tile_pair(
            q, qh, ql, e_q, i_q, gh, gl, e_g, k, kh, kl, e_k, i_k, vh, vl, e_v, Bias, i_h,
            o_m, o_n, edge, c_m, c_n, scale, scale_exp, mask_value, bias_h, bias_q, bias_k,
            MODE, BIAS, DENSE, SHIFTED, COSINE, T, T % BM != 0 or T % C != 0,
        )  # fmt: skip
        bad = bad | bad_q | bad_g | beyond
        p = tl.exp2(s - m[:, None]) * r[:, None]
        ds = p * (dp - delta[:, None])
        ph, pl, e_p = score_halves(p, q, MODE, SHIFT)
        if WANT_BIAS:
            slopes += (ds,)
        sh, sl, e_s = score_halves(ds, q, MODE, SHIFT)
        dv += undone(product(ph.T, pl.T, gh, gl, MODE), e_p - e_g, MODE, SHIFT)
        dk += undone(product(sh.T, sl.T, qh, ql, MODE), e_s - e_q, MODE, SHIFT)
    if COSINE:
        dk, _ = through_norm(dk, k, i_k)
    dk = dk * grad_scale
    kept = o_n < T
    if MODE == 1 or MODE == 2:
        tl.store(Flags + (i_window.to(tl.int64) * heads + i_h) * TILES + i_n, bad)
        kept = o_n < tl.where(bad == 0, T, 0)
    if WANT_QKV:
        p_out = DQKV + i_b * pixels * (3 * heads * D) + start + part
        row = 3 * heads * D
        store_tokens(dk, p_out, row, kept, pixel, inside, D, DP)
        store_tokens(dv, p_out + part, row, kept, pixel, inside, D, DP)
    if WANT_PAD:
        padded = ((o_n < T) & (inside == 0))[:, None]
        o_d = tl.arange(0, DP)
        p = PadSums + ((i_window * TILES + i_n).to(tl.int64) * heads + i_h) * (2 * D) + o_d
        tl.store(p, tl.sum(tl.where(padded, dk, 0.0), 0), mask=o_d < D)
        tl.store(p + D, tl.sum(tl.where(padded, dv, 0.0), 0), mask=o_d < D)
    added = ()
    if WANT_BIAS:
        for j in tl.static_range(COUNT):
            added += (sums[j] + tl.where(kept[None, :], slopes[j], 0.0),)
    return added


@triton.jit(do_not_specialize=RUNTIME_INTEGERS)
def column_gradients(
    QKV, G, Bias, Pad, Logit, DQKV, Rows, Flags, PadSums, Partial,
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
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, C: tl.constexpr, REST: tl.constexpr,
    STAGES: tl.constexpr, WANT_QKV: tl.constexpr, WANT_BIAS: tl.constexpr,
    WANT_PAD: tl.constexpr,
):  # fmt: skip
    """Grid (groups of `count` windows x tiles of BM keys x heads, the head fastest).

    PadSums, float32 [windows * tiles, heads, 2 * D]; Partial, float32 [groups, heads, T, T]. AGAIN
    adds to what is in Partial, of flagged tiles alone. Else as `row_gradients`.
    """
    TILES: tl.constexpr = (T + BM - 1) // BM
    COUNT: tl.constexpr = (T + C - 1) // C
    pid = tl.program_id(0)
    i_h = pid % heads
    i_n = pid // heads % TILES
    i_group = pid // heads // TILES
    if not WIDE:
        q_d = q_d.to(tl.int32)
        q_h = q_h.to(tl.int32)
        q_w = q_w.to(tl.int32)
    if COSINE:
        grad_scale = tl.load(Logit + i_h * logit_h).to(tl.float32)
        scale, scale_exp = logit_factor(Logit + i_h * logit_h, MODE)
    o_n = i_n * BM + tl.arange(0, BM)
    c_n = token_code(o_n, shift_d, shift_h, shift_w, WD, WH, WW, VOLUME)
    sums = ()
    if WANT_BIAS:
        for j in tl.static_range(COUNT):
            sums += (tl.zeros([C if (j + 1) * C <= T else REST, BM], tl.float32),)
    # columns of sums that are written: none of a program that found no flag
    columns = T
    if AGAIN:
        columns = tl.full([], 0, tl.int32)
    first = i_group * count
    last = tl.minimum(first + count, windows)
    for i in tl.range(first, last, disable_licm=True):
        i_window = tl.full([], 0, tl.int32) + i
        now = True
        if AGAIN:
            p_flag = Flags + (i_window.to(tl.int64) * heads + i_h) * TILES + i_n
            now = tl.load(p_flag) != 0
            columns = tl.where(now, T, columns)
        if now:
            sums = window_columns(
                sums, QKV, G, Bias, Pad, DQKV, Rows, Flags, PadSums, i_window, i_n, i_h, o_n, c_n,
                windows, heads, depth, height, width, n_d, n_h, n_w, shift_d, shift_h, shift_w,
                scale_exp, scale, grad_scale, mask_value, q_b, q_d, q_h, q_w,
                bias_h, bias_q, bias_k,
                MODE, BIAS, DENSE, SHIFTED, PADDED, COSINE, HEAD_FIRST, GRID, VOLUME, UNIT,
                WD, WH, WW, T, SHIFT, D, DP, BM, C, REST, WANT_QKV, WANT_BIAS, WANT_PAD,
            )  # fmt: skip
    if WANT_BIAS:
        p_sums = Partial + (i_group.to(tl.int64) * heads + i_h) * (T * T)
        for j in tl.static_range(COUNT):
            o_m = j * C + tl.arange(0, C if (j + 1) * C <= T else REST)
            p = p_sums + o_m[:, None] * T + o_n[None, :]
            there = (o_m < T)[:, None] & (o_n < tl.minimum(columns, T))[None, :]
            x = sums[j]
            if AGAIN:
                x += tl.load(p, mask=there, other=0.0)
            tl.store(p, x, mask=there)
