"""Float32 FMA within windows: the `ieee` precision, and windows that a split cannot hold."""

from __future__ import annotations

import triton
import triton.language as tl

from elsa_core.backends.triton.attention.fold import advance
from elsa_core.backends.triton.shared.helpers import (
    LOG2E,
    add_scaled,
    exponent,
    finite_score,
    power,
)
from elsa_core.backends.triton.window.helpers import (
    add_terms,
    bias_tile,
    inverse_norms,
    load_tokens,
    locate_tokens,
    store_tokens,
    token_code,
    window_edge,
)


@triton.jit
def exact_rows(
    QKV, Bias, Pad, Logit, Out, p_image, p_out, i_h, row0, rows, w_z, w_y, w_x,
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
            bias = bias_tile(
                Bias, i_h, o_m, o_n, bias_h, bias_q, bias_k,
                BIAS, DENSE, T, True,
            )  # fmt: skip
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
