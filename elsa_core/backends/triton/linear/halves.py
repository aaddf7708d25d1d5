"""float32 matrices as float16 hi + lo, the operands of `product.py`.

Each row of what is summed over is scaled by a power of two, so that its largest magnitude lies in
[2**13, 2**14), and its entries x are written as hi = fp16(x) and lo = fp16(x - hi): 22 significant
bits, and 38 - k of an entry at 2**-k of the largest.

Source: Ootomo and Yokota, arXiv 2203.03341.
"""

from __future__ import annotations

import triton
import triton.language as tl

from elsa_core.backends.triton.shared.helpers import TOP, halves, load_tile, power


@triton.jit
def magnitude(x):
    """|x| as the bits of a float32, which are ordered like it; those of a NaN are the largest."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def row_exponent(top):
    """The exponent that scales a row of largest magnitude `top`, in bits; within [-114, 126].

    Rows with an infinity or a NaN stay as they are: their products are not finite, which the guard
    of a product finds.
    """
    biased = top >> 23
    e = tl.minimum(TOP + 127 - biased, 126)
    return tl.where(biased == 255, 0, e)


@triton.jit
def store_halves(p, region, x, there, SINGLE: tl.constexpr):
    """x as hi and, unless SINGLE, as lo."""
    hi, lo = halves(x)
    tl.store(p, hi, mask=there)
    if not SINGLE:
        tl.store(p + region, lo, mask=there)


@triton.jit
def split_tile(
    X, Halves, Powers, o_r, rows, depth, stride, SINGLE: tl.constexpr, C: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Rows `o_r` of X [rows, depth], to Halves [2, rows, depth]. WHOLE: C channels hold a row."""
    p_x = X + o_r.to(tl.int64)[:, None] * stride
    p_h = Halves + o_r.to(tl.int64)[:, None] * depth
    region = rows.to(tl.int64) * depth
    inside = (o_r < rows)[:, None]
    o_c = tl.arange(0, C)
    if WHOLE:
        there = inside & (o_c < depth)[None, :]
        x = tl.load(p_x + o_c[None, :], mask=there, other=0.0)
        top = tl.max(magnitude(x), 1)
        x = x * power(row_exponent(top))[:, None]
        store_halves(p_h + o_c[None, :], region, x, there, SINGLE)
    else:
        top = tl.zeros([o_r.shape[0]], tl.int32)
        for c in tl.range(0, depth, C):
            x = tl.load(p_x + c + o_c[None, :], mask=inside & (c + o_c < depth)[None, :], other=0.0)
            top = tl.maximum(top, tl.max(magnitude(x), 1))
        for c in tl.range(0, depth, C):
            there = inside & (c + o_c < depth)[None, :]
            x = tl.load(p_x + c + o_c[None, :], mask=there, other=0.0)
            x = x * power(row_exponent(top))[:, None]
            store_halves(p_h + c + o_c[None, :], region, x, there, SINGLE)
    # what the halves are to be multiplied by; 0 says that the row is zero
    factor = tl.where(top == 0, 0.0, power(-row_exponent(top)))
    tl.store(Powers + o_r, factor, mask=o_r < rows)


@triton.jit(do_not_specialize=["rows", "others", "depth", "x_row", "w_row"])
def split_rows(
    X, InputHalves, InputPowers, Weight, WeightHalves, WeightPowers,
    rows: tl.int32, others: tl.int32, depth: tl.int32, x_row: tl.int64, w_row: tl.int64,
    SINGLE: tl.constexpr, R: tl.constexpr, C: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """R rows to a program: of X [rows, depth], then of Weight [others, depth] (others may be 0).

    depth counts units of 8 elements; x_row and w_row, the steps from row to row, units of 4.
    """
    depth = depth * 8
    of_x = tl.cdiv(rows, R)
    pid = tl.program_id(0)
    o_r = tl.arange(0, R)
    if pid < of_x:
        o_r = pid * R + o_r
        split_tile(X, InputHalves, InputPowers, o_r, rows, depth, x_row * 4, SINGLE, C, WHOLE)
    else:
        o_r = (pid - of_x) * R + o_r
        split_tile(
            Weight, WeightHalves, WeightPowers, o_r, others, depth, w_row * 4, SINGLE, C, WHOLE
        )


@triton.jit(do_not_specialize=["depth", "columns", "stride", "steps"])
def column_maxima(
    X, Maxima, depth: tl.int32, columns: tl.int32, stride: tl.int64, steps: tl.int32,
    BK: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Grid (chunks of steps * BK rows, blocks of BC columns): the largest magnitudes of the columns
    of X [depth, columns] in each chunk, to Maxima [chunks, columns] int32.

    columns and stride (from row to row) count units of 4 elements.
    """
    columns = columns * 4
    o_c = tl.program_id(1) * BC + tl.arange(0, BC)
    top = tl.zeros([BC], tl.int32)
    for i in tl.range(0, steps):
        o_k = (tl.program_id(0) * steps + i) * BK + tl.arange(0, BK)
        p = X + o_k.to(tl.int64)[:, None] * (stride * 4) + o_c[None, :]
        x = load_tile(p, o_k < depth, o_c < columns, True, True)
        top = tl.maximum(top, tl.max(magnitude(x), 0))
    tl.store(Maxima + tl.program_id(0) * columns + o_c, top, mask=o_c < columns)


@triton.jit(do_not_specialize=["depth", "columns", "stride", "chunks"])
def split_turned(
    X, Maxima, Halves, Powers, depth: tl.int32, columns: tl.int32, stride: tl.int64,
    chunks: tl.int32, BK: tl.constexpr, BC: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of BK rows, blocks of BC columns): the transpose of X [depth, columns], to
    Halves [2, columns, padded], where padded is the next multiple of 8. MOST: at least `chunks`.
    """
    columns = columns * 4
    padded = tl.cdiv(depth, 8) * 8
    o_c = tl.program_id(1) * BC + tl.arange(0, BC)
    o_i = tl.arange(0, MOST)
    seen = (o_i < chunks)[:, None] & (o_c < columns)[None, :]
    maxima = tl.load(Maxima + o_i[:, None] * columns + o_c[None, :], mask=seen, other=0)
    top = tl.max(maxima, 0)
    if tl.program_id(0) == 0:
        factor = tl.where(top == 0, 0.0, power(-row_exponent(top)))  # as `split_tile`
        tl.store(Powers + o_c, factor, mask=o_c < columns)
    o_k = tl.program_id(0) * BK + tl.arange(0, BK)
    p_x = X + o_k.to(tl.int64)[:, None] * (stride * 4) + o_c[None, :]
    x = load_tile(p_x, o_k < depth, o_c < columns, True, True)
    x = tl.trans(x * power(row_exponent(top))[None, :])
    p = Halves + o_c.to(tl.int64)[:, None] * padded + o_k[None, :]
    there = (o_c < columns)[:, None] & (o_k < padded)[None, :]
    store_halves(p, columns.to(tl.int64) * padded, x, there, False)
