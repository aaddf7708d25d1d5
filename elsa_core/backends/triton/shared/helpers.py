"""What the attention kernels share: exact scales, splitting, tile loads and one step of the fold.

The state of a row is (m, z, acc) in base 2: m the running maximum of `score * log2(e)`, z and acc
the sums of `2**(score - m)` and of that times the value. It is the monoid of `elsa_core.monoid`.

Split products. A float32 tile is scaled by an exact power of two so that its largest magnitude lies
in [2**13, 2**14), then written as hi + lo in float16. An element at 2**-k of the tile's maximum
keeps min(22, 38 - k) significand bits. A tile passes the guard when the maximum of every row and of
every channel that is not zero lies within 2**-18 of the tile's maximum (2**-27 where a single
float16 product is asked for); then the largest element of each row and channel keeps 20 (11) bits,
and 22 within 2**-16. A head with a tile that does not pass is folded by `fold_exact`, with float32
FMA.

A channel's maximum is taken over the row before the tile too (not in windows, nor in the whole
tiles of a split inside the loop): a tile of one row (k * k + 1 tokens) would else be judged by
single numbers, of which one in 100 000 lies that low. Such a number may keep fewer bits, as any
small one in a larger tile does.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
FLOAT_MAX: tl.constexpr = tl.constexpr(3.4028234663852886e38)
# the smallest scaled maximum of a row or channel that passes the guard: 2**13 / 2**18, 2**13 /
# 2**27
SPLIT_LIMIT: tl.constexpr = tl.constexpr(2.0**-5)
SINGLE_LIMIT: tl.constexpr = tl.constexpr(2.0**-14)
# values whose tile needs a smaller exponent could overflow the accumulator
LEAST_VALUE: tl.constexpr = tl.constexpr(-60)
# the exponent that a scaled maximum gets: x * 2**e lies in [2**13, 2**14)
TOP: tl.constexpr = tl.constexpr(13)
# products of two scaled operands stay below 2**37; beyond this factor they might overflow
FACTOR_LIMIT: tl.constexpr = tl.constexpr(88)


@triton.jit
def power(e):
    """2**e as float32 for int32 e in [-126, 127]."""
    return ((e + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def wide(n):
    """A number of rows or units as int64 (the interpreter hands plain integers to loops)."""
    return tl.full([], 0, tl.int64) + n


@triton.jit
def place(program, tiles, heads, CAUSAL: tl.constexpr):
    """What a program computes: which of batch x heads, its tile, the batch and the head. CAUSAL:
    the longest rows first.
    """
    i_bh = program // tiles
    i_tile = program - i_bh * tiles
    if CAUSAL:
        i_tile = tiles - 1 - i_tile
    return i_bh, i_tile, (i_bh // heads).to(tl.int64), (i_bh % heads).to(tl.int64)


@triton.jit
def clamped_power(e):
    return power(tl.minimum(tl.maximum(e, -126), 127))


@triton.jit
def times_power(x, e):
    """x * 2**e for int32 e in [-252, 254], in two steps that each exist in float32."""
    half = e >> 1
    return x * power(half) * power(e - half)


@triton.jit
def exponent_elements(rows):
    """Float16 elements that the exponents and guards of `rows` tiles take ahead of the halves:
    128-byte lines.
    """
    return (rows + 7) // 8 * 64


@triton.jit
def exponent(x):
    """e such that x * 2**e lies in [2**13, 2**14), for x >= 0; within [-115, 126]."""
    biased = x.to(tl.int32, bitcast=True) >> 23
    return tl.minimum(TOP + 127 - biased, 126)


@triton.jit
def halves(x):
    hi = x.to(tl.float16)
    return hi, (x - hi.to(tl.float32)).to(tl.float16)


@triton.jit
def nonzero_min(x):
    """The smallest entry that is not zero (large where all are)."""
    return tl.min(tl.where(x > 0.0, x, FLOAT_MAX), 0)


@triton.jit
def extent(x, before):
    """The largest magnitude of a tile, and the least maximum of its rows and channels that are not
    zero.

    x: [R, C] magnitudes, float32; before: [C] those of the row before, or 0. The largest is taken
    over the channels' maxima: they lie within each warp.
    """
    m_r = tl.max(x, 1)
    m_c = tl.max(x, 0)
    of_channels = nonzero_min(tl.maximum(m_c, before))
    return tl.max(m_c, 0), tl.minimum(nonzero_min(m_r), of_channels)


@triton.jit
def fails_guard(least, e, LIMIT: tl.constexpr):
    """1 where a row or channel lies too far below the tile's maximum, or the tile is not finite.

    LIMIT: the smallest scaled maximum of a row or channel that the split still holds.
    """
    # an infinity or a NaN gives exponents below -114; at 126 even denormals are held exactly
    return (((least * power(e) < LIMIT) & (e < 126)) | (e < -114)).to(tl.int32)


@triton.jit
def add_scaled(acc, a, o):
    """acc * a + o, by name: written with + the compiler lets the product that gave o accumulate
    into acc.
    """
    return tl.fma(acc, tl.broadcast_to(a[:, None], acc.shape), o)


@triton.jit
def load_tile(p, m_r, m_c, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """What lies at p, [R, C]; zeros in the rows that m_r [R] leaves out (if ROWS) and in the
    columns that m_c [C] leaves out (if COLUMNS).
    """
    if ROWS:
        m = m_r[:, None]
        if COLUMNS:
            m = m & m_c[None, :]
        return tl.load(p, mask=m, other=0.0)
    if COLUMNS:
        return tl.load(p, mask=m_c[None, :], other=0.0)
    return tl.load(p)


@triton.jit
def store_tile(p, x, m_r, m_c, COLUMNS: tl.constexpr):
    """x to p, [R, C], in the dtype of p; not the rows and (if COLUMNS) columns left out."""
    x = x.to(p.dtype.element_ty)
    m = m_r[:, None]
    if COLUMNS:
        m = m & m_c[None, :]
    tl.store(p, x, mask=m)


@triton.jit
def finite_score(s, e):
    """s * 2**e for e in [-252, 254], within float32; an infinity came with the input and stays."""
    infinite = tl.abs(s) == float("inf")
    x = times_power(s, e)
    x = tl.where(x > FLOAT_MAX, FLOAT_MAX, tl.where(x < -FLOAT_MAX, -FLOAT_MAX, x))
    return tl.where(infinite, s, x)


@triton.jit
def load_part(
    p_tile, o_rows, rows, stride_n, stride_d, START: tl.constexpr, WIDTH: tl.constexpr,
    DIM: tl.constexpr, UNIT_D: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Columns [START, START + WIDTH) of a tile; zero beyond `rows` (if BOUNDED) and beyond DIM."""
    o_d = START + tl.arange(0, WIDTH)
    if UNIT_D:
        p = p_tile + o_rows[:, None] * stride_n + o_d[None, :]
    else:
        p = p_tile + o_rows[:, None] * stride_n + o_d[None, :] * stride_d
    return load_tile(p, o_rows < rows, o_d < DIM, BOUNDED, START + WIDTH > DIM)


@triton.jit
def row_before(
    p_tile, first, stride_n, stride_d,
    START: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, UNIT_D: tl.constexpr,
):  # fmt: skip
    """Magnitudes of the row before a tile that begins at row `first` (0: zeros). [WIDTH]"""
    o_d = START + tl.arange(0, WIDTH)
    p = p_tile - stride_n + (o_d if UNIT_D else o_d * stride_d)
    return tl.abs(tl.load(p, mask=o_d < tl.where(first > 0, DIM, 0), other=0.0))


@triton.jit
def apply_mask(
    s, p_mask, o_m, o_n, rows, columns, stride_q, stride_k, first_row, first_key,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Scores in base 2 with the mask, the causal limit and the length applied. [BM, BN]

    MASK: 0 none, 1 boolean (as uint8), 2 additive; 3 and 4: such a mask of one row, which all
    queries see keys by, as they do where keys are padding. Row and column numbers count from the
    tile's corner.
    """
    valid = (o_n < columns)[None, :]
    if MASK > 2:
        row = p_mask + o_n * stride_k
        if MASK == 3:
            seen = tl.load(row, mask=o_n < columns, other=0) != 0
            s = tl.where(seen[None, :], s, -float("inf"))
        else:
            s += (tl.load(row, mask=o_n < columns, other=0.0).to(tl.float32) * LOG2E)[None, :]
    elif MASK:
        p = p_mask + o_m[:, None] * stride_q + o_n[None, :] * stride_k
        inside = (o_m < rows)[:, None] & valid
        if MASK == 1:
            b = tl.load(p, mask=inside, other=0)
            s = tl.where(b != 0, s, -float("inf"))
        else:
            s += tl.load(p, mask=inside, other=0.0).to(tl.float32) * LOG2E
    if BOUNDED:
        if CAUSAL:
            valid = valid & ((first_row + o_m)[:, None] >= (first_key + o_n)[None, :])
        s = tl.where(valid, s, -float("inf"))
    return s
