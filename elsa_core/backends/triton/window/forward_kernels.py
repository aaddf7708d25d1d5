"""The kernels of attention within windows; what they share is in `helpers`.

`window_tile` holds windows of up to 64 tokens in one tile each, several to a program. In
`window_fold` BM queries of a longer window fold its keys tile by tile. `exact_rows` computes with
float32 FMA: the `ieee` precision, and windows that a split cannot hold.
"""

from __future__ import annotations

import triton
import triton.language as tl

from elsa_core.backends.triton.attention.fold import accumulate_pv, advance, scores_of, split_tile
from elsa_core.backends.triton.shared.helpers import (
    LEAST_VALUE,
    LOG2E,
    SINGLE_LIMIT,
    SPLIT_LIMIT,
    add_scaled,
    exponent,
    finite_score,
    power,
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
    next_window,
    score_factor,
    split_factor,
    split_unit,
    store_tokens,
    token_code,
    window_edge,
)

# what the lean of P V towards zero is made up for with: half of it or more, on sm_90
UNBIAS: tl.constexpr = tl.constexpr(1.0 + 2.0**-23)


@triton.jit
def exact_rows(
    p_image, p_out, Bias, Pad, Logit, i_h, row0, rows, w_z, w_y, w_x,
    heads, depth, height, width, n_d, n_h, n_w, shift_d, shift_h, shift_w,
    scale, scale_exp, mask_value, q_d, q_h, q_w,
    bias_h, bias_q, bias_k, logit_h,
    BIAS: tl.constexpr, DENSE: tl.constexpr, SHIFTED: tl.constexpr, PADDED: tl.constexpr,
    COSINE: tl.constexpr, HEAD_FIRST: tl.constexpr, GRID: tl.constexpr, VOLUME: tl.constexpr,
    UNIT: tl.constexpr, WD: tl.constexpr, WH: tl.constexpr, WW: tl.constexpr,
    T: tl.constexpr, WEIGHT: tl.constexpr, XM: tl.constexpr, XN: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr,
):  # fmt: skip
    """Float32 FMA for every product of the queries [row0, rows) of a window, XM at a time.

    No finite input overflows. As `exact.fold_exact`: powers of two per row, scores beyond
    float32 clamped, weights times WEIGHT = 2**-k <= 1 / T.
    """
    step = D if HEAD_FIRST else heads * D
    start = i_h * (3 * D) if HEAD_FIRST else i_h * D
    edge = window_edge(w_z, w_y, w_x, n_d, n_h, n_w)
    for m0 in tl.range(row0, rows, XM, num_stages=1):
        o_m = m0 + tl.arange(0, XM)
        offset, pixel, inside = locate_tokens(
            o_m, w_z, w_y, w_x, n_d, n_h, n_w, depth, height, width, shift_d, shift_h, shift_w,
            q_d, q_h, q_w, WD, WH, WW, GRID, VOLUME, UNIT,
        )  # fmt: skip
        c_m = token_code(o_m, shift_d, shift_h, shift_w, WD, WH, WW, VOLUME)
        q = load_tokens(p_image + start, Pad + start, o_m, offset, inside, T, D, DP, PADDED, True)
        e_q = exponent(tl.max(tl.abs(q), 1))
        q = q * power(e_q)[:, None]
        if COSINE:
            q = q * inverse_norms(q, power(e_q))[:, None]
            logit = tl.load(Logit + i_h * logit_h).to(tl.float32) * LOG2E
        else:
            q = q * scale
        m = tl.full([XM], -float("inf"), tl.float32)
        z = tl.zeros([XM, 8], tl.float32)
        acc = tl.zeros([XM, DP], tl.float32)
        for n0 in tl.range(0, T, XN, num_stages=1):
            o_n = n0 + tl.arange(0, XN)
            offset_n, _, inside_n = locate_tokens(
                o_n, w_z, w_y, w_x, n_d, n_h, n_w, depth, height, width, shift_d, shift_h, shift_w,
                q_d, q_h, q_w, WD, WH, WW, GRID, VOLUME, UNIT,
            )  # fmt: skip
            k = load_tokens(
                p_image + start + step, Pad + start + step, o_n, offset_n, inside_n, T, D, DP,
                PADDED, True,
            )  # fmt: skip
            e_k = exponent(tl.max(tl.abs(k), 1))
            k = k * power(e_k)[:, None]
            if COSINE:
                k = k * inverse_norms(k, power(e_k))[:, None]
                s = tl.dot(q, k.T, input_precision="ieee") * logit
            else:
                s = tl.dot(q, k.T, input_precision="ieee")
                # scaled products are finite
                e = scale_exp - e_q[:, None] - e_k[None, :]
                s = finite_score(s, tl.minimum(tl.maximum(e, -252), 254))
            bias = bias_tile(Bias, i_h, o_m, o_n, bias_h, bias_q, bias_k, BIAS, DENSE, T, True)
            c_n = token_code(o_n, shift_d, shift_h, shift_w, WD, WH, WW, VOLUME)
            s = add_terms(s, bias, edge, c_m, c_n, mask_value, True, SHIFTED)
            m, z, a, p = advance(s, 1.0, m, z, 0.0, True)
            v = load_tokens(
                p_image + start + 2 * step, Pad + start + 2 * step, o_n, offset_n, inside_n, T, D,
                DP, PADDED, True,
            )  # fmt: skip
            acc = add_scaled(acc, a, tl.dot(p * WEIGHT, v, input_precision="ieee"))
        out = acc / (tl.sum(z, 1) * WEIGHT)[:, None]
        store_tokens(out, p_out, heads * D, o_m < T, pixel, inside, D, DP)


@triton.jit
def attend(
    q, k, v, bias, edge, c_m, c_n, mask_value, scale, scale_exp,
    MODE: tl.constexpr, TERMS: tl.constexpr, SHIFTED: tl.constexpr, COSINE: tl.constexpr,
    SHIFT: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """A whole window: its rows' results, and whether the guard failed. [M, DP]"""
    bad = tl.full([], 0, tl.int32)
    f_v = 1.0
    if MODE == 0:
        s = tl.dot(q, k.T)
        vh = v
        vl = v
        if COSINE:
            i_q = inverse_norms(q.to(tl.float32), 1.0) * scale
            s = s * i_q[:, None] * inverse_norms(k.to(tl.float32), 1.0)[None, :]
        else:
            s = s * scale
    else:
        vh, vl, _, _, e_v, bad = split_tile(v, v, 0.0, 0.0, 1.0, 0, LIMIT)
        bad = bad | (e_v < LEAST_VALUE).to(tl.int32)
        f_v = power(-e_v)
        if COSINE:
            qh, ql, bad_q = split_unit(q)
            kh, kl, bad_k = split_unit(k)
            f, beyond = score_factor(scale, scale_exp, 13, 13)
        else:
            qh, ql, e_q, bad_q = split_factor(q)
            kh, kl, e_k, bad_k = split_factor(k)
            f, beyond = score_factor(scale, scale_exp, e_q, e_k)
        bad = bad | bad_q | bad_k | beyond
        s = scores_of(qh, ql, qh, ql, kh, kl, kh, kl, 0, MODE) * f
    s = add_terms(s, bias, edge, c_m, c_n, mask_value, TERMS, SHIFTED)
    m = tl.max(s, 1) - SHIFT
    p = tl.exp2(s - m[:, None])
    z = tl.sum(p, 1)
    if MODE == 0:
        o = tl.dot(p.to(v.dtype), v)
    else:
        ph = p.to(tl.float16)
        if MODE == 1:
            pl = (p - ph.to(tl.float32)).to(tl.float16)
            o = tl.dot(pl, vh)
            o = tl.dot(ph, vl, o)
            o = tl.dot(ph, vh, o) * f_v
        else:
            o = tl.dot(ph, vh) * f_v
    r = 1.0 / z
    if MODE != 0 and p.shape[1] > 16:
        # weights are not negative: what tensor cores cut where they accumulate leans towards zero
        r = r * UNBIAS
    return o * r[:, None], bad


@triton.jit(do_not_specialize=RUNTIME_INTEGERS)
def window_tile(
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
    SHIFT: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, XM: tl.constexpr,
    XN: tl.constexpr, STAGES: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    """Grid (groups of `count` windows x heads, the head fastest): whole windows of up to BM tokens.

    Strides q_* come in units of UNIT elements, so that their divisibility is known without
    compiling for every image. `scale` * 2**`scale_exp` is the factor of scores in base 2 (MODE 0:
    `scale` alone); `mask_value` is in base 2 too. WIDE: an image has 2**31 elements or more.
    """
    pid = tl.program_id(0)
    i_h = pid % heads
    first = pid // heads * count
    step = D if HEAD_FIRST else heads * D
    start = i_h * (3 * D) if HEAD_FIRST else i_h * D
    if not WIDE:
        q_d = q_d.to(tl.int32)
        q_h = q_h.to(tl.int32)
        q_w = q_w.to(tl.int32)
    pixels = (depth * height * width).to(tl.int64)
    BOUNDED: tl.constexpr = T < BM
    TERMS: tl.constexpr = BIAS or BOUNDED
    LIMIT: tl.constexpr = SPLIT_LIMIT if MODE == 1 else SINGLE_LIMIT
    o = tl.arange(0, BM)
    code = token_code(o, shift_d, shift_h, shift_w, WD, WH, WW, VOLUME)
    if COSINE:
        scale, scale_exp = logit_factor(Logit + i_h * logit_h, MODE)
    i_b, w_z, w_y, w_x = locate_window(tl.full([], 0, tl.int32) + first, n_d, n_h, n_w, VOLUME)
    verdicts = tl.full([], 0, tl.int32)
    last = tl.minimum(first + count, windows)
    if LOOP:
        bias = tl.zeros([BM, BM], tl.float32)
        for i_window in tl.range(first, last, num_stages=STAGES):
            if TERMS:  # noqa: SIM102
                # in the first turn, while its rows are under way
                if i_window == first:
                    bias = bias_tile(
                        Bias, i_h, o, o, bias_h, bias_q, bias_k, BIAS, DENSE, T, BOUNDED
                    )
            offset, pixel, inside = locate_tokens(
                o,
                w_z, w_y, w_x, n_d, n_h, n_w, depth, height, width, shift_d, shift_h, shift_w,
                q_d, q_h, q_w, WD, WH, WW, GRID, VOLUME, UNIT,
            )  # fmt: skip
            p = QKV + i_b.to(tl.int64) * (q_b * UNIT) + start
            q = load_tokens(p, Pad + start, o, offset, inside, T, D, DP, PADDED, BOUNDED)
            p += step
            k = load_tokens(p, Pad + start + step, o, offset, inside, T, D, DP, PADDED, BOUNDED)
            p += step
            v = load_tokens(p, Pad + start + 2 * step, o, offset, inside, T, D, DP, PADDED, BOUNDED)
            edge = window_edge(w_z, w_y, w_x, n_d, n_h, n_w)
            x, bad = attend(
                q, k, v, bias, edge, code, code, mask_value, scale, scale_exp,
                MODE, TERMS, SHIFTED, COSINE, SHIFT, LIMIT,
            )  # fmt: skip
            p_out = Out + i_b.to(tl.int64) * pixels * (heads * D) + i_h * D
            kept = o < T
            if MODE != 0:
                kept = o < tl.where(bad == 0, T, 0)
                verdicts = verdicts | (bad << (i_window - first))
            store_tokens(x, p_out, heads * D, kept, pixel, inside, D, DP)
            i_b, w_z, w_y, w_x = next_window(i_b, w_z, w_y, w_x, n_d, n_h, n_w, VOLUME)
    else:
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
        # after the rows, so that all loads are under way together
        bias = bias_tile(Bias, i_h, o, o, bias_h, bias_q, bias_k, BIAS, DENSE, T, BOUNDED)
        edge = window_edge(w_z, w_y, w_x, n_d, n_h, n_w)
        x, verdicts = attend(
            q, k, v, bias, edge, code, code, mask_value, scale, scale_exp,
            MODE, TERMS, SHIFTED, COSINE, SHIFT, LIMIT,
        )  # fmt: skip
        p_out = Out + i_b.to(tl.int64) * pixels * (heads * D) + i_h * D
        kept = o < T
        if MODE != 0:
            kept = o < tl.where(verdicts == 0, T, 0)
        store_tokens(x, p_out, heads * D, kept, pixel, inside, D, DP)
    if MODE != 0:  # noqa: SIM102 (one is decided at compile time, the other by the data)
        if verdicts != 0:
            for i_window in range(first, last):
                if (verdicts >> (i_window - first)) & 1 != 0:
                    i_b, w_z, w_y, w_x = locate_window(
                        tl.full([], 0, tl.int32) + i_window, n_d, n_h, n_w, VOLUME
                    )
                    exact_rows(
                        QKV + i_b.to(tl.int64) * (q_b * UNIT),
                        Out + i_b.to(tl.int64) * pixels * (heads * D) + i_h * D,
                        Bias, Pad, Logit, i_h, 0, T, w_z, w_y, w_x,
                        heads, depth, height, width, n_d, n_h, n_w,
                        shift_d, shift_h, shift_w, scale, scale_exp, mask_value, q_d, q_h, q_w,
                        bias_h, bias_q, bias_k, logit_h,
                        BIAS, DENSE, SHIFTED, PADDED, COSINE, HEAD_FIRST, GRID, VOLUME,
                        UNIT, WD, WH, WW, T, WEIGHT, XM, XN, D, DP,
                    )  # fmt: skip


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
        o_n, w_z, w_y, w_x, n_d, n_h, n_w, depth, height, width, shift_d, shift_h, shift_w,
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
        Bias, i_h, o_m, o_n, bias_h, bias_q, bias_k, BIAS, DENSE, T, KEYS_BOUNDED or T % BM != 0
    )
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
    XM: tl.constexpr, XN: tl.constexpr, STAGES: tl.constexpr, UNROLL: tl.constexpr,
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
            o_m, w_z, w_y, w_x, n_d, n_h, n_w, depth, height, width, shift_d, shift_h, shift_w,
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
                p_image, p_out, Bias, Pad, Logit, i_h, i_m * BM, i_m * BM + BM, w_z, w_y, w_x,
                heads, depth, height, width, n_d, n_h, n_w, shift_d, shift_h, shift_w,
                scale, scale_exp, mask_value, q_d, q_h, q_w,
                bias_h, bias_q, bias_k, logit_h,
                BIAS, DENSE, SHIFTED, PADDED, COSINE, HEAD_FIRST, GRID, VOLUME,
                UNIT, WD, WH, WW, T, WEIGHT, XM, XN, D, DP,
            )  # fmt: skip
