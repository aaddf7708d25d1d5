"""The kernel of longer windows: BM queries of a window fold its keys tile by tile."""

from __future__ import annotations

import triton
import triton.language as tl

from elsa_core.backends.triton.attention.fold import accumulate_pv, advance, scores_of, split_tile
from elsa_core.backends.triton.shared.helpers import LEAST_VALUE, SINGLE_LIMIT, SPLIT_LIMIT, power
from elsa_core.backends.triton.window.exact import (
    exact_rows,
)
from elsa_core.backends.triton.window.helpers import (
    RUNTIME_INTEGERS,
    add_terms,
    bias_tile,
    inverse_norms,
    load_tokens,
    locate_tokens,
    locate_window,
    logit_factor,
    score_factor,
    split_factor,
    split_unit,
    store_tokens,
    token_code,
    window_edge,
)


@triton.jit
def fold_keys(
    qh, ql, e_q, i_q, m, z, acc, bad, n0, p_image, Pad, Bias, start, step, i_h, o_m,
    edge, c_m, w_z, w_y, w_x, depth, height, width, n_d, n_h, n_w,
    shift_d, shift_h, shift_w, scale, scale_exp, mask_value, q_d, q_h, q_w,
    bias_h, bias_q, bias_k,
    MODE: tl.constexpr, BIAS: tl.constexpr, DENSE: tl.constexpr, SHIFTED: tl.constexpr,
    PADDED: tl.constexpr, COSINE: tl.constexpr, GRID: tl.constexpr, VOLUME: tl.constexpr,
    UNIT: tl.constexpr, WD: tl.constexpr, WH: tl.constexpr, WW: tl.constexpr, T: tl.constexpr,
    SHIFT: tl.constexpr, LIMIT: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One tile of a window's keys folded into the state of BM queries."""
    KEYS_BOUNDED: tl.constexpr = T % BN != 0
    o_n = n0 + tl.arange(0, BN)
    offset, _, inside = locate_tokens(
        o_n,
        w_z, w_y, w_x, n_d, n_h, n_w, depth, height, width, shift_d, shift_h, shift_w,
        q_d, q_h, q_w, WD, WH, WW, GRID, VOLUME, UNIT,
    )  # fmt: skip
    p = p_image + start + step
    k = load_tokens(p, Pad + start + step, o_n, offset, inside, T, D, DP, PADDED, KEYS_BOUNDED)
    p += step
    v = load_tokens(p, Pad + start + 2 * step, o_n, offset, inside, T, D, DP, PADDED, KEYS_BOUNDED)
    f_v = 1.0
    if MODE == 0:
        s = tl.dot(qh, k.T)
        vh = v
        vl = v
        if COSINE:
            s = s * i_q[:, None] * inverse_norms(k.to(tl.float32), 1.0)[None, :]
        else:
            s = s * scale
    else:
        vh, vl, _, _, e_v, bad_v = split_tile(v, v, 0.0, 0.0, 1.0, 0, LIMIT)
        bad = bad | bad_v | (e_v < LEAST_VALUE).to(tl.int32)
        f_v = power(-e_v)
        if COSINE:
            kh, kl, bad_k = split_unit(k)
            f, beyond = score_factor(scale, scale_exp, 13, 13)
        else:
            kh, kl, e_k, bad_k = split_factor(k)
            f, beyond = score_factor(scale, scale_exp, e_q, e_k)
        bad = bad | bad_k | beyond
        s = scores_of(qh, ql, qh, ql, kh, kl, kh, kl, 0, MODE) * f
    bias = bias_tile(
        Bias, i_h, o_m, o_n, bias_h, bias_q, bias_k,
        BIAS, DENSE, T, KEYS_BOUNDED or T % BM != 0,
    )  # fmt: skip
    c_n = token_code(o_n, shift_d, shift_h, shift_w, WD, WH, WW, VOLUME)
    TERMS: tl.constexpr = BIAS or KEYS_BOUNDED
    s = add_terms(s, bias, edge, c_m, c_n, mask_value, TERMS, SHIFTED)
    m, z, a, w = advance(s, 1.0, m, z, SHIFT, True)
    if MODE == 0:
        wh = w.to(v.dtype)
        wl = wh
    else:
        wh = w.to(tl.float16)
        wl = (w - wh.to(tl.float32)).to(tl.float16)
    acc = accumulate_pv(acc, a, wh, wl, vh, vl, f_v, MODE, MODE != 0)
    return m, z, acc, bad


@triton.jit(do_not_specialize=RUNTIME_INTEGERS)
def window_fold(
    QKV, Bias, Pad, Logit, Out,
    windows: tl.int32, heads: tl.int32, count: tl.int32,
    depth: tl.int32, height: tl.int32, width: tl.int32, n_d: tl.int32, n_h: tl.int32,
    n_w: tl.int32, shift_d: tl.int32, shift_h: tl.int32, shift_w: tl.int32,
    scale_exp: tl.int32, scale: tl.float32, mask_value: tl.float32,
    q_b: tl.int64, q_d: tl.int64, q_h: tl.int64, q_w: tl.int64,
    bias_h: tl.int64, bias_q: tl.int64, bias_k: tl.int64, logit_h: tl.int64,
    MODE: tl.constexpr, BIAS: tl.constexpr, DENSE: tl.constexpr, SHIFTED: tl.constexpr,
    PADDED: tl.constexpr, COSINE: tl.constexpr, HEAD_FIRST: tl.constexpr, GRID: tl.constexpr,
    VOLUME: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr,
    WD: tl.constexpr, WH: tl.constexpr, WW: tl.constexpr, T: tl.constexpr, WEIGHT: tl.constexpr,
    SHIFT: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    XM: tl.constexpr, XN: tl.constexpr, STAGES: tl.constexpr, LOOP: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Grid (windows x tiles of BM queries x heads, the head fastest). Else as `window_tile`."""
    TILES_M: tl.constexpr = (T + BM - 1) // BM
    TILES_N: tl.constexpr = (T + BN - 1) // BN
    pid = tl.program_id(0)
    i_h = pid % heads
    rest = pid // heads
    i_m = rest % TILES_M
    step = D if HEAD_FIRST else heads * D
    start = i_h * (3 * D) if HEAD_FIRST else i_h * D
    if not WIDE:
        q_d = q_d.to(tl.int32)
        q_h = q_h.to(tl.int32)
        q_w = q_w.to(tl.int32)
    i_b, w_z, w_y, w_x = locate_window(rest // TILES_M, n_d, n_h, n_w, VOLUME)
    p_image = QKV + i_b.to(tl.int64) * (q_b * UNIT)
    p_out = Out + i_b.to(tl.int64) * (depth * height * width) * (heads * D) + i_h * D
    o_m = i_m * BM + tl.arange(0, BM)
    bad = tl.full([], 1 if MODE == 3 else 0, tl.int32)
    if MODE != 3:
        LIMIT: tl.constexpr = SPLIT_LIMIT if MODE == 1 else SINGLE_LIMIT
        offset, pixel, inside = locate_tokens(
            o_m,
            w_z, w_y, w_x, n_d, n_h, n_w, depth, height, width, shift_d, shift_h, shift_w,
            q_d, q_h, q_w, WD, WH, WW, GRID, VOLUME, UNIT,
        )  # fmt: skip
        q = load_tokens(
            p_image + start, Pad + start, o_m, offset, inside, T, D, DP, PADDED, T % BM != 0
        )
        qh = q
        ql = q
        e_q = 0
        i_q = tl.zeros([BM], tl.float32)
        if COSINE:
            scale, scale_exp = logit_factor(Logit + i_h * logit_h, MODE)
        if MODE == 0:
            if COSINE:
                i_q = inverse_norms(q.to(tl.float32), 1.0) * scale
        elif COSINE:
            qh, ql, bad = split_unit(q)
        else:
            qh, ql, e_q, bad = split_factor(q)
        edge = window_edge(w_z, w_y, w_x, n_d, n_h, n_w)
        c_m = token_code(o_m, shift_d, shift_h, shift_w, WD, WH, WW, VOLUME)
        m = tl.full([BM], -float("inf"), tl.float32)
        z = tl.zeros([BM, 8], tl.float32)
        acc = tl.zeros([BM, DP], tl.float32)
        if UNROLL:
            for i_n in tl.static_range(TILES_N):
                m, z, acc, bad = fold_keys(
                    qh, ql, e_q, i_q, m, z, acc, bad, i_n * BN, p_image, Pad, Bias,
                    start, step, i_h, o_m, edge, c_m, w_z, w_y, w_x, depth, height, width,
                    n_d, n_h, n_w,
                    shift_d, shift_h, shift_w, scale, scale_exp, mask_value, q_d, q_h, q_w,
                    bias_h, bias_q, bias_k,
                    MODE, BIAS, DENSE, SHIFTED, PADDED, COSINE, GRID, VOLUME, UNIT, WD, WH, WW, T,
                    SHIFT, LIMIT, D, DP, BM, BN,
                )  # fmt: skip
        else:
            for n0 in tl.range(0, T, BN, num_stages=STAGES):
                m, z, acc, bad = fold_keys(
                    qh, ql, e_q, i_q, m, z, acc, bad, n0, p_image, Pad, Bias, start, step,
                    i_h, o_m, edge, c_m, w_z, w_y, w_x, depth, height, width, n_d, n_h, n_w,
                    shift_d, shift_h, shift_w, scale, scale_exp, mask_value, q_d, q_h, q_w,
                    bias_h, bias_q, bias_k,
                    MODE, BIAS, DENSE, SHIFTED, PADDED, COSINE, GRID, VOLUME, UNIT, WD, WH, WW, T,
                    SHIFT, LIMIT, D, DP, BM, BN,
                )  # fmt: skip
        kept = o_m < T
        if MODE != 0:
            kept = o_m < tl.where(bad == 0, T, 0)
        x = acc * (1.0 / tl.sum(z, 1))[:, None]
        store_tokens(x, p_out, heads * D, kept, pixel, inside, D, DP)
    if MODE != 0:  # noqa: SIM102 (one is decided at compile time, the other by the data)
        if bad != 0:
            exact_rows(
                QKV, Bias, Pad, Logit, Out, p_image, p_out, i_h, i_m * BM,
                i_m * BM + BM, w_z, w_y, w_x,
                heads, depth, height, width, n_d, n_h, n_w, shift_d, shift_h, shift_w,
                scale, scale_exp, mask_value, q_d, q_h, q_w,
                bias_h, bias_q, bias_k, logit_h,
                BIAS, DENSE, SHIFTED, PADDED, COSINE, HEAD_FIRST, GRID, VOLUME,
                UNIT, WD, WH, WW, T, WEIGHT, XM, XN, D, DP,
            )  # fmt: skip
