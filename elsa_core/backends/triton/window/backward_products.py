"""What the kernels of window gradients share: operands, products, and scores of two tiles.

MODE as in `helpers`; MODE 3 (float32 FMA) is a mode of each of these kernels. Split and single
products take every operand scaled by a power of two of its own tile.
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
    power,
    times_power,
)
from elsa_core.backends.triton.window.helpers import NORM_EPS, SCORE_LIMIT

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
def scaled(x, e):
    """x * 2**e; e beyond what float32 holds gives zeros or infinities."""
    return times_power(x, tl.minimum(tl.maximum(e, -252), 254))


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
