"""Float32 FMA for every product: the `ieee` precision, and the path of data that a split cannot
hold.
"""

from __future__ import annotations

import triton
import triton.language as tl

from elsa_core.backends.triton.attention.fold import advance
from elsa_core.backends.triton.shared.helpers import (
    add_scaled,
    apply_mask,
    exponent,
    finite_score,
    load_part,
    power,
    wide,
)


@triton.jit
def fold_exact(
    p_q, p_k, p_v, p_mask, lo, hi, n_k, q_n, q_d, k_n, k_d, v_n, v_d, mask_q, mask_k,
    row0, rows, scale, scale_exp, weight,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, BM: tl.constexpr, BX: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    DV: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, UNIT_D: tl.constexpr,
):  # fmt: skip
    """Every key in [lo, hi) with float32 FMA; no finite input overflows.

    Queries are scaled per row and keys per tile by powers of two, a score beyond float32 is
    clamped, and weights carry 2**-shift <= 1 / n_k, so that no sum of values overflows: z returns
    with that factor too.
    """
    o_m = tl.arange(0, BM)
    o_x = tl.arange(0, BX)
    q0 = load_part(p_q, o_m, rows, q_n, q_d, 0, D0, D, UNIT_D, True)
    top = tl.max(tl.abs(q0), 1)
    q1 = q0
    if D1:
        q1 = load_part(p_q, o_m, rows, q_n, q_d, D0, D1, D, UNIT_D, True)
        top = tl.maximum(top, tl.max(tl.abs(q1), 1))
    e_q = exponent(top)
    q0 = q0 * (power(e_q)[:, None] * scale)
    q1 = q1 * (power(e_q)[:, None] * scale)
    m = tl.full([BM], -float("inf"), tl.float32)
    z = tl.zeros([BM, 8], tl.float32)
    acc0 = tl.zeros([BM, V0], tl.float32)
    acc1 = tl.zeros([BM, V1 if V1 else 1], tl.float32)
    for n0 in tl.range(lo, hi, BX, num_stages=1):
        n0_wide = wide(n0)
        columns = n_k - n0
        k0 = load_part(p_k + n0_wide * k_n, o_x, columns, k_n, k_d, 0, D0, D, UNIT_D, True)
        top_k = tl.max(tl.max(tl.abs(k0), 1), 0)
        k1 = k0
        if D1:
            k1 = load_part(p_k + n0_wide * k_n, o_x, columns, k_n, k_d, D0, D1, D, UNIT_D, True)
            top_k = tl.maximum(top_k, tl.max(tl.max(tl.abs(k1), 1), 0))
        e_k = exponent(top_k)
        k0 = k0 * power(e_k)
        s = tl.dot(q0, k0.T, input_precision="ieee")
        if D1:
            k1 = k1 * power(e_k)
            s = tl.dot(q1, k1.T, s, input_precision="ieee")
        # scaled products are finite
        s = finite_score(s, tl.minimum(tl.maximum(scale_exp - e_q - e_k, -252), 254)[:, None])
        s = apply_mask(
            s, p_mask + n0_wide * mask_k, o_m, o_x, rows, columns, mask_q, mask_k, row0, n0,
            MASK, CAUSAL, True,
        )  # fmt: skip
        m, z, a, p = advance(s, 1.0, m, z, 0.0, True)
        p = p * weight
        v0 = load_part(p_v + n0_wide * v_n, o_x, columns, v_n, v_d, 0, V0, DV, UNIT_D, True)
        o = tl.dot(p, v0, input_precision="ieee")
        acc0 = add_scaled(acc0, a, o)
        if V1:
            v1 = load_part(p_v + n0_wide * v_n, o_x, columns, v_n, v_d, V0, V1, DV, UNIT_D, True)
            o1 = tl.dot(p, v1, input_precision="ieee")
            acc1 = add_scaled(acc1, a, o1)
    return m, z * weight, acc0, acc1
