"""The kernel of windows up to 64 tokens: a window in one tile, several windows to a program."""

from __future__ import annotations

import triton
import triton.language as tl

from elsa_core.backends.triton.attention.fold import scores_of, split_tile
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
    SHIFT: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    XM: tl.constexpr, XN: tl.constexpr, STAGES: tl.constexpr, LOOP: tl.constexpr,
    UNROLL: tl.constexpr,
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
                        Bias, i_h, o, o, bias_h, bias_q, bias_k,
                        BIAS, DENSE, T, BOUNDED,
                    )  # fmt: skip
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
        # after the rows, so that all loads are under way together
        bias = bias_tile(
            Bias, i_h, o, o, bias_h, bias_q, bias_k,
            BIAS, DENSE, T, BOUNDED,
        )  # fmt: skip
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
                        QKV, Bias, Pad, Logit, Out,
                        QKV + i_b.to(tl.int64) * (q_b * UNIT),
                        Out + i_b.to(tl.int64) * pixels * (heads * D) + i_h * D,
                        i_h, 0, T, w_z, w_y, w_x,
                        heads, depth, height, width, n_d, n_h, n_w,
                        shift_d, shift_h, shift_w, scale, scale_exp, mask_value, q_d, q_h, q_w,
                        bias_h, bias_q, bias_k, logit_h,
                        BIAS, DENSE, SHIFTED, PADDED, COSINE, HEAD_FIRST, GRID, VOLUME,
                        UNIT, WD, WH, WW, T, WEIGHT, XM, XN, D, DP,
                    )  # fmt: skip
