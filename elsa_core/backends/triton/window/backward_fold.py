"""The gradients of long windows: three kernels that take a window tile by tile.

`fold_rows` gives dQ, and of each row (m, 1 / z, delta) with P = 2**(score - m) / z and delta =
sum(P * dP); `fold_columns` gives dK and dV from them, `fold_bias` the bias's gradient: a program
owns one tile of it for a list of windows, which it takes in order. Sums of padded tokens and of the
logit scale are written once for each tile and added in order by `backward_sums`.

Flags, int32 [windows, heads, tiles], of split and single modes: the tiles of queries that fail the
guard of `shared/helpers.py`. A window with such a tile is left out by these launches; all of it is
computed by those with AGAIN, in float32 FMA.
"""

from __future__ import annotations

import triton
import triton.language as tl

from elsa_core.backends.triton.attention.backward_prepare import verdict
from elsa_core.backends.triton.shared.helpers import exponent, halves, load_tile, power
from elsa_core.backends.triton.window.backward_products import (
    MOST_OF_SCORES,
    operand,
    product,
    rows_operand,
    scaled,
    score_tile,
    through_norm,
)
from elsa_core.backends.triton.window.helpers import (
    RUNTIME_INTEGERS,
    add_terms,
    bias_tile,
    load_tokens,
    locate_tokens,
    locate_window,
    logit_factor,
    store_tokens,
    token_code,
    window_edge,
)


@triton.jit
def load_side(
    p_image, p_grad, Pad, start, part, o, i_h, heads, w_z, w_y, w_x, n_d, n_h, n_w,
    depth, height, width, shift_d, shift_h, shift_w, q_d, q_h, q_w,
    QUERIES: tl.constexpr, PADDED: tl.constexpr, GRID: tl.constexpr, VOLUME: tl.constexpr,
    UNIT: tl.constexpr, WD: tl.constexpr, WH: tl.constexpr, WW: tl.constexpr, T: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Tokens `o` of a window: queries and grad_out if QUERIES, else keys and values; their pixels,
    and whether they lie in the image. `part`: elements from queries to keys to values. BOUNDED:
    some of them may lie beyond T."""
    offset, pixel, inside = locate_tokens(
        o,
        w_z, w_y, w_x, n_d, n_h, n_w, depth, height, width, shift_d, shift_h, shift_w,
        q_d, q_h, q_w, WD, WH, WW, GRID, VOLUME, UNIT,
    )  # fmt: skip
    if QUERIES:
        x = load_tokens(p_image + start, Pad + start, o, offset, inside, T, D, DP, PADDED, BOUNDED)
        o_d = tl.arange(0, DP)
        p = p_grad + (pixel.to(tl.int64) * (heads * D))[:, None] + o_d[None, :]
        y = load_tile(p, (o < T) & inside, o_d < D, BOUNDED or PADDED != 0, D < DP)
    else:
        start += part
        x = load_tokens(p_image + start, Pad + start, o, offset, inside, T, D, DP, PADDED, BOUNDED)
        start += part
        y = load_tokens(p_image + start, Pad + start, o, offset, inside, T, D, DP, PADDED, BOUNDED)
    return x, y, pixel, inside


@triton.jit
def tile_pair(
    q, qh, ql, e_q, i_q, gh, gl, e_g, k, kh, kl, e_k, i_k, vh, vl, e_v, Bias, i_h, o_m, o_n,
    edge, c_m, c_n, scale, scale_exp, mask_value, bias_h, bias_q, bias_k,
    MODE: tl.constexpr, BIAS: tl.constexpr, DENSE: tl.constexpr, SHIFTED: tl.constexpr,
    COSINE: tl.constexpr, T: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Scores in base 2 and dP of queries by keys, and 1 where scores are beyond a split."""
    s, bad = score_tile(q, qh, ql, e_q, i_q, k, kh, kl, e_k, i_k, scale, scale_exp, MODE, COSINE)
    bias = bias_tile(Bias, i_h, o_m, o_n, bias_h, bias_q, bias_k, BIAS, DENSE, T, BOUNDED)
    s = add_terms(s, bias, edge, c_m, c_n, mask_value, BIAS or BOUNDED, SHIFTED)
    dp = product(gh, gl, vh.T, vl.T, MODE)
    if MODE == 1 or MODE == 2:
        dp = dp * power(-(e_g + e_v))
    return s, dp, bad


@triton.jit
def score_halves(x, like, MODE: tl.constexpr, SHIFT: tl.constexpr):
    """Weights or dS as products take them, and the factor that undoes their scale."""
    undo = tl.full([], 0, tl.int32)
    if MODE == 1 or MODE == 2:
        e = tl.minimum(exponent(tl.max(tl.max(tl.abs(x), 1), 0)), MOST_OF_SCORES)
        hi, lo = halves(x * power(e))
        undo = -e
    else:
        hi = (x * 2.0**SHIFT).to(like.dtype)
        lo = hi
    return hi, lo, undo


@triton.jit
def undone(x, e, MODE: tl.constexpr, SHIFT: tl.constexpr):
    """A product of `score_halves` and an operand without their scales: x * 2**e, or 2**-SHIFT."""
    if MODE == 1 or MODE == 2:
        x = scaled(x, e)
    else:
        x = x * 2.0**-SHIFT
    return x


@triton.jit
def is_asked(
    Flags, i_window, i_h, heads, MODE: tl.constexpr, AGAIN: tl.constexpr, TILES: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Whether this launch computes a window: AGAIN those that a flag names, else the others."""
    asked = i_window >= 0
    if AGAIN or MODE == 1 or MODE == 2:
        o = tl.arange(0, WIDTH)
        p = Flags + (i_window.to(tl.int64) * heads + i_h) * TILES + o
        flagged = tl.max(tl.load(p, mask=o < TILES, other=0), 0)
        asked = flagged != 0 if AGAIN else flagged == 0
    return asked


@triton.jit(do_not_specialize=RUNTIME_INTEGERS)
def fold_rows(
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
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, WIDTH: tl.constexpr,
    STAGES: tl.constexpr, WANT_QKV: tl.constexpr, WANT_LOGIT: tl.constexpr,
):  # fmt: skip
    """Grid (windows x tiles of BM queries x heads, the head fastest).

    Rows, float32 [3, windows, heads, T]; LogitSums, float32 [windows * tiles, heads]. The other
    arguments as of `backward_tile.window_gradients`.
    """
    TILES: tl.constexpr = (T + BM - 1) // BM
    BOUNDED: tl.constexpr = T % BM != 0
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
    asked = i_window >= 0
    if AGAIN:
        asked = is_asked(Flags, i_window, i_h, heads, MODE, AGAIN, TILES, WIDTH)
    if asked:
        if COSINE:
            grad_scale = tl.load(Logit + i_h * logit_h).to(tl.float32)
            scale, scale_exp = logit_factor(Logit + i_h * logit_h, MODE)
        i_b, w_z, w_y, w_x = locate_window(i_window, n_d, n_h, n_w, VOLUME)
        pixels = (depth * height * width).to(tl.int64)
        p_image = QKV + i_b.to(tl.int64) * (q_b * UNIT)
        p_grad = G + i_b * pixels * (heads * D) + i_h * D
        edge = window_edge(w_z, w_y, w_x, n_d, n_h, n_w)
        o_m = i_m * BM + tl.arange(0, BM)
        c_m = token_code(o_m, shift_d, shift_h, shift_w, WD, WH, WW, VOLUME)
        q, g, pixel, inside = load_side(
            p_image, p_grad, Pad, start, part, o_m, i_h, heads, w_z, w_y, w_x, n_d, n_h, n_w,
            depth, height, width, shift_d, shift_h, shift_w, q_d, q_h, q_w,
            True, PADDED, GRID, VOLUME, UNIT, WD, WH, WW, T, D, DP, BOUNDED,
        )  # fmt: skip
        qh, ql, e_q, i_q, bad = rows_operand(q, MODE, COSINE)
        gh, gl, e_g, bad_g = operand(g, MODE)
        bad = bad | bad_g
        m = tl.full([BM], -float("inf"), tl.float32)
        z = tl.zeros([BM], tl.float32)
        total = tl.zeros([BM], tl.float32)
        for n0 in tl.range(0, T, BM, num_stages=STAGES):
            o_n = n0 + tl.arange(0, BM)
            c_n = token_code(o_n, shift_d, shift_h, shift_w, WD, WH, WW, VOLUME)
            k, v, _, _ = load_side(
                p_image, p_grad, Pad, start, part, o_n, i_h, heads, w_z, w_y, w_x, n_d, n_h, n_w,
                depth, height, width, shift_d, shift_h, shift_w, q_d, q_h, q_w,
                False, PADDED, GRID, VOLUME, UNIT, WD, WH, WW, T, D, DP, BOUNDED,
            )  # fmt: skip
            kh, kl, e_k, i_k, bad_k = rows_operand(k, MODE, COSINE)
            vh, vl, e_v, bad_v = operand(v, MODE)
            s, dp, beyond = tile_pair(
                q, qh, ql, e_q, i_q, gh, gl, e_g, k, kh, kl, e_k, i_k, vh, vl, e_v, Bias, i_h,
                o_m, o_n, edge, c_m, c_n, scale, scale_exp, mask_value, bias_h, bias_q, bias_k,
                MODE, BIAS, DENSE, SHIFTED, COSINE, T, BOUNDED,
            )  # fmt: skip
            bad = bad | bad_k | bad_v | beyond
            m_new = tl.maximum(m, tl.max(s, 1))
            # a row that sees no key yet keeps -inf
            m_safe = tl.where(m_new == -float("inf"), 0.0, m_new)
            a = tl.exp2(m - m_safe)
            p = tl.exp2(s - m_safe[:, None])
            z = z * a + tl.sum(p, 1)
            total = total * a + tl.sum(p * dp, 1)
            m = m_new
        m = tl.where(m == -float("inf"), 0.0, m)
        r = 1.0 / tl.where(z == 0.0, 1.0, z)
        delta = total * r
        p_rows = Rows + (i_window.to(tl.int64) * heads + i_h) * T + o_m
        size = windows.to(tl.int64) * heads * T
        tl.store(p_rows, m, mask=o_m < T)
        tl.store(p_rows + size, r, mask=o_m < T)
        tl.store(p_rows + 2 * size, delta, mask=o_m < T)
        if MODE == 1 or MODE == 2:
            tl.store(Flags + (i_window.to(tl.int64) * heads + i_h) * TILES + i_m, bad)
        if WANT_QKV or WANT_LOGIT:
            dq = tl.zeros([BM, DP], tl.float32)
            for n0 in tl.range(0, T, BM, num_stages=STAGES):
                o_n = n0 + tl.arange(0, BM)
                c_n = token_code(o_n, shift_d, shift_h, shift_w, WD, WH, WW, VOLUME)
                k, v, _, _ = load_side(
                    p_image, p_grad, Pad, start, part, o_n, i_h, heads, w_z, w_y, w_x,
                    n_d, n_h, n_w, depth, height, width, shift_d, shift_h, shift_w, q_d, q_h, q_w,
                    False, PADDED, GRID, VOLUME, UNIT, WD, WH, WW, T, D, DP, BOUNDED,
                )  # fmt: skip
                kh, kl, e_k, i_k, _ = rows_operand(k, MODE, COSINE)
                vh, vl, e_v, _ = operand(v, MODE)
                s, dp, _ = tile_pair(
                    q, qh, ql, e_q, i_q, gh, gl, e_g, k, kh, kl, e_k, i_k, vh, vl, e_v, Bias,
                    i_h, o_m, o_n, edge, c_m, c_n, scale, scale_exp, mask_value,
                    bias_h, bias_q, bias_k, MODE, BIAS, DENSE, SHIFTED, COSINE, T, BOUNDED,
                )  # fmt: skip
                ds = tl.exp2(s - m[:, None]) * r[:, None] * (dp - delta[:, None])
                sh, sl, e_s = score_halves(ds, q, MODE, SHIFT)
                dq += undone(product(sh, sl, kh, kl, MODE), e_s - e_k, MODE, SHIFT)
            along = tl.zeros([BM], tl.float32)
            if COSINE:
                dq, along = through_norm(dq, q, i_q)
            if WANT_LOGIT:
                p = LogitSums + (i_window * TILES + i_m) * heads + i_h
                tl.store(p, tl.sum(along, 0))
            if WANT_QKV:
                p_out = DQKV + i_b * pixels * (3 * heads * D) + start
                kept = o_m < T
                if MODE == 1 or MODE == 2:
                    kept = o_m < tl.where(bad == 0, T, 0)
                store_tokens(dq * grad_scale, p_out, 3 * heads * D, kept, pixel, inside, D, DP)


@triton.jit(do_not_specialize=RUNTIME_INTEGERS)
def fold_columns(
    QKV, G, Bias, Pad, Logit, DQKV, Rows, Flags, PadSums,
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
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, WIDTH: tl.constexpr,
    STAGES: tl.constexpr, WANT_QKV: tl.constexpr, WANT_PAD: tl.constexpr,
):  # fmt: skip
    """Grid (windows x tiles of BM keys x heads, the head fastest). PadSums, float32 [windows *
    tiles, heads, 2 * D]. Else as `fold_rows`."""
    TILES: tl.constexpr = (T + BM - 1) // BM
    BOUNDED: tl.constexpr = T % BM != 0
    pid = tl.program_id(0)
    i_h = pid % heads
    i_n = pid // heads % TILES
    i_window = pid // heads // TILES
    part = D if HEAD_FIRST else heads * D
    start = i_h * (3 * D) if HEAD_FIRST else i_h * D
    if not WIDE:
        q_d = q_d.to(tl.int32)
        q_h = q_h.to(tl.int32)
        q_w = q_w.to(tl.int32)
    if is_asked(Flags, i_window, i_h, heads, MODE, AGAIN, TILES, WIDTH):
        if COSINE:
            grad_scale = tl.load(Logit + i_h * logit_h).to(tl.float32)
            scale, scale_exp = logit_factor(Logit + i_h * logit_h, MODE)
        i_b, w_z, w_y, w_x = locate_window(i_window, n_d, n_h, n_w, VOLUME)
        pixels = (depth * height * width).to(tl.int64)
        p_image = QKV + i_b.to(tl.int64) * (q_b * UNIT)
        p_grad = G + i_b * pixels * (heads * D) + i_h * D
        edge = window_edge(w_z, w_y, w_x, n_d, n_h, n_w)
        o_n = i_n * BM + tl.arange(0, BM)
        c_n = token_code(o_n, shift_d, shift_h, shift_w, WD, WH, WW, VOLUME)
        k, v, pixel, inside = load_side(
            p_image, p_grad, Pad, start, part, o_n, i_h, heads, w_z, w_y, w_x, n_d, n_h, n_w,
            depth, height, width, shift_d, shift_h, shift_w, q_d, q_h, q_w,
            False, PADDED, GRID, VOLUME, UNIT, WD, WH, WW, T, D, DP, BOUNDED,
        )  # fmt: skip
        kh, kl, e_k, i_k, _ = rows_operand(k, MODE, COSINE)
        vh, vl, e_v, _ = operand(v, MODE)
        dk = tl.zeros([BM, DP], tl.float32)
        dv = tl.zeros([BM, DP], tl.float32)
        size = windows.to(tl.int64) * heads * T
        for m0 in tl.range(0, T, BM, num_stages=STAGES):
            o_m = m0 + tl.arange(0, BM)
            c_m = token_code(o_m, shift_d, shift_h, shift_w, WD, WH, WW, VOLUME)
            q, g, _, _ = load_side(
                p_image, p_grad, Pad, start, part, o_m, i_h, heads, w_z, w_y, w_x, n_d, n_h, n_w,
                depth, height, width, shift_d, shift_h, shift_w, q_d, q_h, q_w,
                True, PADDED, GRID, VOLUME, UNIT, WD, WH, WW, T, D, DP, BOUNDED,
            )  # fmt: skip
            p_rows = Rows + (i_window.to(tl.int64) * heads + i_h) * T + o_m
            m = tl.load(p_rows, mask=o_m < T, other=0.0)
            r = tl.load(p_rows + size, mask=o_m < T, other=0.0)
            delta = tl.load(p_rows + 2 * size, mask=o_m < T, other=0.0)
            qh, ql, e_q, i_q, _ = rows_operand(q, MODE, COSINE)
            gh, gl, e_g, _ = operand(g, MODE)
            s, dp, _ = tile_pair(
                q, qh, ql, e_q, i_q, gh, gl, e_g, k, kh, kl, e_k, i_k, vh, vl, e_v, Bias, i_h,
                o_m, o_n, edge, c_m, c_n, scale, scale_exp, mask_value, bias_h, bias_q, bias_k,
                MODE, BIAS, DENSE, SHIFTED, COSINE, T, BOUNDED,
            )  # fmt: skip
            p = tl.exp2(s - m[:, None]) * r[:, None]
            ds = p * (dp - delta[:, None])
            ph, pl, e_p = score_halves(p, q, MODE, SHIFT)
            sh, sl, e_s = score_halves(ds, q, MODE, SHIFT)
            dv += undone(product(ph.T, pl.T, gh, gl, MODE), e_p - e_g, MODE, SHIFT)
            dk += undone(product(sh.T, sl.T, qh, ql, MODE), e_s - e_q, MODE, SHIFT)
        if COSINE:
            dk, _ = through_norm(dk, k, i_k)
        dk = dk * grad_scale
        if WANT_QKV:
            p_out = DQKV + i_b * pixels * (3 * heads * D) + start + part
            row = 3 * heads * D
            store_tokens(dk, p_out, row, o_n < T, pixel, inside, D, DP)
            store_tokens(dv, p_out + part, row, o_n < T, pixel, inside, D, DP)
        if WANT_PAD:
            padded = ((o_n < T) & (inside == 0))[:, None]
            o_d = tl.arange(0, DP)
            p = PadSums + ((i_window * TILES + i_n).to(tl.int64) * heads + i_h) * (2 * D) + o_d
            tl.store(p, tl.sum(tl.where(padded, dk, 0.0), 0), mask=o_d < D)
            tl.store(p + D, tl.sum(tl.where(padded, dv, 0.0), 0), mask=o_d < D)


@triton.jit(do_not_specialize=RUNTIME_INTEGERS)
def fold_bias(
    QKV, G, Bias, Pad, Logit, Rows, Flags, Partial,
    windows: tl.int32, heads: tl.int32, count: tl.int32,
    depth: tl.int32, height: tl.int32, width: tl.int32, n_d: tl.int32, n_h: tl.int32,
    n_w: tl.int32, shift_d: tl.int32, shift_h: tl.int32, shift_w: tl.int32,
    scale_exp: tl.int32, scale: tl.float32, mask_value: tl.float32,
    q_b: tl.int64, q_d: tl.int64, q_h: tl.int64, q_w: tl.int64,
    bias_h: tl.int64, bias_q: tl.int64, bias_k: tl.int64, logit_h: tl.int64,
    MODE: tl.constexpr, AGAIN: tl.constexpr, BIAS: tl.constexpr, DENSE: tl.constexpr,
    SHIFTED: tl.constexpr, PADDED: tl.constexpr, COSINE: tl.constexpr, HEAD_FIRST: tl.constexpr,
    GRID: tl.constexpr, VOLUME: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr,
    WD: tl.constexpr, WH: tl.constexpr, WW: tl.constexpr, T: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (groups of `count` windows x tiles of the bias x heads, the head fastest).

    Partial, float32 [groups, heads, T, T]; AGAIN adds to what is there. Else as `fold_rows`.
    """
    TILES: tl.constexpr = (T + BM - 1) // BM
    BOUNDED: tl.constexpr = T % BM != 0
    pid = tl.program_id(0)
    i_h = pid % heads
    i_tile = pid // heads % (TILES * TILES)
    i_group = pid // heads // (TILES * TILES)
    part = D if HEAD_FIRST else heads * D
    start = i_h * (3 * D) if HEAD_FIRST else i_h * D
    if not WIDE:
        q_d = q_d.to(tl.int32)
        q_h = q_h.to(tl.int32)
        q_w = q_w.to(tl.int32)
    if COSINE:
        scale, scale_exp = logit_factor(Logit + i_h * logit_h, MODE)
    o_m = i_tile // TILES * BM + tl.arange(0, BM)
    o_n = i_tile % TILES * BM + tl.arange(0, BM)
    c_m = token_code(o_m, shift_d, shift_h, shift_w, WD, WH, WW, VOLUME)
    c_n = token_code(o_n, shift_d, shift_h, shift_w, WD, WH, WW, VOLUME)
    pixels = (depth * height * width).to(tl.int64)
    size = windows.to(tl.int64) * heads * T
    p_sums = Partial + (i_group.to(tl.int64) * heads + i_h) * (T * T)
    p_sums += o_m[:, None] * T + o_n[None, :]
    inside = (o_m < T)[:, None] & (o_n < T)[None, :]
    acc = tl.zeros([BM, BM], tl.float32)
    first = i_group * count
    last = tl.minimum(first + count, windows)
    if AGAIN:
        # nearly always no window of the list, of any head, is asked for
        p = Flags + first.to(tl.int64) * heads * TILES
        flagged = verdict(p, (last - first) * heads * TILES) != 0
        last = tl.where(flagged, last, first)
        inside = inside & (o_m < tl.where(flagged, T, 0))[:, None]
        acc = tl.load(p_sums, mask=inside, other=0.0)
    for i_window in tl.range(first, last, num_stages=STAGES):
        number = tl.full([], 0, tl.int32) + i_window
        if is_asked(Flags, number, i_h, heads, MODE, AGAIN, TILES, WIDTH):
            i_b, w_z, w_y, w_x = locate_window(number, n_d, n_h, n_w, VOLUME)
            p_image = QKV + i_b.to(tl.int64) * (q_b * UNIT)
            p_grad = G + i_b * pixels * (heads * D) + i_h * D
            edge = window_edge(w_z, w_y, w_x, n_d, n_h, n_w)
            q, g, _, _ = load_side(
                p_image, p_grad, Pad, start, part, o_m, i_h, heads, w_z, w_y, w_x, n_d, n_h, n_w,
                depth, height, width, shift_d, shift_h, shift_w, q_d, q_h, q_w,
                True, PADDED, GRID, VOLUME, UNIT, WD, WH, WW, T, D, DP, BOUNDED,
            )  # fmt: skip
            k, v, _, _ = load_side(
                p_image, p_grad, Pad, start, part, o_n, i_h, heads, w_z, w_y, w_x, n_d, n_h, n_w,
                depth, height, width, shift_d, shift_h, shift_w, q_d, q_h, q_w,
                False, PADDED, GRID, VOLUME, UNIT, WD, WH, WW, T, D, DP, BOUNDED,
            )  # fmt: skip
            p_rows = Rows + (number.to(tl.int64) * heads + i_h) * T + o_m
            m = tl.load(p_rows, mask=o_m < T, other=0.0)
            r = tl.load(p_rows + size, mask=o_m < T, other=0.0)
            delta = tl.load(p_rows + 2 * size, mask=o_m < T, other=0.0)
            qh, ql, e_q, i_q, _ = rows_operand(q, MODE, COSINE)
            gh, gl, e_g, _ = operand(g, MODE)
            kh, kl, e_k, i_k, _ = rows_operand(k, MODE, COSINE)
            vh, vl, e_v, _ = operand(v, MODE)
            s, dp, _ = tile_pair(
                q, qh, ql, e_q, i_q, gh, gl, e_g, k, kh, kl, e_k, i_k, vh, vl, e_v, Bias, i_h,
                o_m, o_n, edge, c_m, c_n, scale, scale_exp, mask_value, bias_h, bias_q, bias_k,
                MODE, BIAS, DENSE, SHIFTED, COSINE, T, BOUNDED,
            )  # fmt: skip
            acc += tl.exp2(s - m[:, None]) * r[:, None] * (dp - delta[:, None])
    tl.store(p_sums, acc, mask=inside)
