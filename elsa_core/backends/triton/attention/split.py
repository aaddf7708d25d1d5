"""Operands split ahead of the fold: scaled float16 hi + lo in a workspace, in whole tiles."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from elsa_core.backends.triton.attention import INTEGERS
from elsa_core.backends.triton.shared.helpers import (
    LEAST_VALUE,
    exponent,
    exponent_elements,
    extent,
    fails_guard,
    halves,
    load_part,
    power,
    row_before,
)


@triton.jit
def split_operand(
    p_x, p_w, region, n0, rows, stride_n, stride_d,
    BN: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    UNIT_D: tl.constexpr, HAS_LOW: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """One tile of one operand; returns its exponent and its guard."""
    o_n = tl.arange(0, BN)
    o_d = tl.arange(0, PADDED)
    x = load_part(
        p_x + n0 * stride_n, o_n, rows - n0, stride_n, stride_d, 0, PADDED, DIM, UNIT_D, True
    )
    before = row_before(p_x + n0 * stride_n, n0, stride_n, stride_d, 0, PADDED, DIM, UNIT_D)
    top, least = extent(tl.abs(x), before)
    e = exponent(top)
    hi, lo = halves(x * power(e))
    p = p_w + o_n[:, None] * WIDTH + o_d[None, :]
    if WIDTH == PADDED:
        tl.store(p, hi)
        if HAS_LOW:
            tl.store(p + region, lo)
    else:
        m = (o_n >= 0)[:, None] & (o_d < WIDTH)[None, :]
        tl.store(p, hi, mask=m)
        if HAS_LOW:
            tl.store(p + region, lo, mask=m)
    return e, fails_guard(least, e, LIMIT)


@triton.jit(do_not_specialize=INTEGERS)
def split_ahead(
    K, V, W, heads: tl.int32, n_k: tl.int32, tiles: tl.int32, batch: tl.int32,
    k_b: tl.int64, k_h: tl.int64, k_n: tl.int64, k_d: tl.int64,
    v_b: tl.int64, v_h: tl.int64, v_n: tl.int64, v_d: tl.int64,
    UNIT: tl.constexpr, UNIT_D: tl.constexpr, HAS_LOW: tl.constexpr, LIMIT: tl.constexpr,
    OVERLAP: tl.constexpr, BN: tl.constexpr,
    D: tl.constexpr, DW: tl.constexpr, DP: tl.constexpr,
    DV: tl.constexpr, VW: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    """Grid (key tiles over batch and heads, 2: keys and values). Strides as in `forward.forward`.

    W: int32 (K, V) exponents per tile, the keys' guards, the values' guards; from
    `exponent_elements` on, float16 K and V, each hi then (HAS_LOW) lo, [heads, tiles * BN, DW or
    VW]. A guard: bit 0 set where the tile failed; the keys' also holds their exponent + 256 above
    it.
    """
    if OVERLAP:
        # the fold may start, and load its queries, while this runs; it waits before it reads W or E
        gdc_launch_dependents()
    i_row = tl.program_id(0)
    i_tile = i_row % tiles
    i_head = i_row // tiles
    i_b = (i_head // heads).to(tl.int64)
    i_h = (i_head % heads).to(tl.int64)
    n0 = i_tile * BN
    row = i_row.to(tl.int64)
    total = batch.to(tl.int64) * heads * tiles
    E = W.to(tl.pointer_type(tl.int32))
    p_guard = E + 2 * total + i_row
    p_w = W + exponent_elements(total)
    region_k = total * BN * DW
    if tl.program_id(1) == 0:
        e, bad = split_operand(
            K + (i_b * k_b + i_h * k_h) * UNIT, p_w + row * BN * DW, region_k, n0, n_k,
            k_n * UNIT, k_d, BN, D, DW, DP, UNIT_D, HAS_LOW, LIMIT,
        )  # fmt: skip
        tl.store(E + 2 * row, e)
        tl.store(p_guard, ((e + 256) << 1) | bad)
    else:
        p_w += region_k * (2 if HAS_LOW else 1) + row * BN * VW
        e, bad = split_operand(
            V + (i_b * v_b + i_h * v_h) * UNIT, p_w, total * BN * VW, n0, n_k, v_n * UNIT, v_d,
            BN, DV, VW, VP, UNIT_D, HAS_LOW, LIMIT,
        )  # fmt: skip
        tl.store(E + 2 * row + 1, e)
        tl.store(p_guard + total, bad | (e < LEAST_VALUE).to(tl.int32))
