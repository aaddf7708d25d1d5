"""float32 products of linear layers on tensor cores: Out = Left Right^T, [rows, columns].

Both operands come as float16 hi + lo, each row with a power of two of its own (`halves.py`), and a
tile of the result is the sum of lo * hi, hi * lo and hi * hi. The products of BK channels have an
accumulator of their own, which float32 additions sum: tensor cores truncate where they
accumulate, and what they cut leans towards zero.

The guard: what the halves leave out of an operand lies below 2**-39 of its row's largest magnitude.
Where a row or a column of a tile lies nowhere above 2**-14 of the product of these magnitudes
(though no operand is zero), or is not finite, the tile is computed again from the float32 operands
with FMA, in the same launch. So is one in which the largest power of two of a row times that of a
column would overflow, where a result that is small for other reasons would be infinite or NaN.

Source: split products as in Ootomo and Yokota, arXiv 2203.03341.
"""

from __future__ import annotations

import triton
import triton.language as tl

from elsa_core.backends.triton.shared.helpers import FLOAT_MAX, load_tile

# row tiles whose columns follow one another, so that they find their rows in cache
GROUP: tl.constexpr = tl.constexpr(8)
# 2**13 * 2**13 * 2**-14: what scaled rows and columns of the result must reach
REACHED: tl.constexpr = tl.constexpr(4096.0)
# Powers of two are made so much larger before those of a row and a column are multiplied, which
# UNSCALE undoes: they reach 2**-149 only where every result of 2**17 channels rounds to zero.
LIFT: tl.constexpr = tl.constexpr(2.0**23)
UNSCALE: tl.constexpr = tl.constexpr(2.0**-46)
# names of `elsa.linear`; their places are ACTIVATION
ACTIVATIONS = ("none", "gelu", "gelu_tanh", "quick_gelu", "silu", "relu")


@triton.jit
def activated(y, ACTIVATION: tl.constexpr):
    """The activation of number ACTIVATION."""
    if ACTIVATION == 1:
        y = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    elif ACTIVATION == 2:
        u = 1.5957691216057308 * (y + 0.044715 * y * y * y)
        y = y / (1.0 + tl.exp(-u))
    elif ACTIVATION == 3:
        y = y / (1.0 + tl.exp(-1.702 * y))
    elif ACTIVATION == 4:
        y = y / (1.0 + tl.exp(-y))
    elif ACTIVATION == 5:
        y = tl.where(y <= 0.0, 0.0, y)  # a NaN stays
    return y


@triton.jit
def either(a, b):
    return a | b


@triton.jit
def fails_guard(acc, of_left, of_right, BM: tl.constexpr, BN: tl.constexpr):
    """Whether split products cannot be trusted with a tile of results, [BM, BN].

    of_left [BM], of_right [BN]: the powers of rows of Left and of Right; 0 where a row is zero.
    """
    size = tl.abs(acc)
    live = of_left != 0.0
    weighs = of_right != 0.0
    # the columns of a row that one thread holds are bits of one number: what reaches the limit
    o_n = tl.arange(0, BN)
    bit = 1 << (o_n // 8 * 2 + o_n % 2)
    reached = tl.where(size >= REACHED, tl.broadcast_to(bit[None, :], [BM, BN]), 0)
    reached = tl.sum(tl.sum(tl.reshape(reached, [BM, BN // 8, 4, 2]), 3), 1)
    expected = tl.reshape(tl.where(weighs, bit, 0), [BN // 8, 4, 2])
    expected = tl.sum(tl.sum(expected, 2), 0)
    top_left = tl.max(of_left, 0)
    top_right = tl.max(of_right, 0)
    any_column = top_right != 0.0
    any_row = top_left != 0.0
    low_row = tl.max((live & (tl.reduce(reached, 1, either) == 0)).to(tl.int32), 0) != 0
    missing = expected & ~tl.reduce(reached, 0, either)
    low_column = tl.reduce(missing, 0, either) != 0
    finite = tl.sum(tl.sum(size, 1), 0) <= FLOAT_MAX
    finite &= (top_left * LIFT) * (top_right * LIFT) <= FLOAT_MAX
    return (low_row & any_column) | (low_column & any_row) | ~finite


@triton.jit
def finish(
    y, Bias, Scale, Residual, p_out, o_m, kept, o_n, beside, at, columns,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, SCALE: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Write residual + scale * activation(y + bias): the first `kept` rows, `beside` columns."""
    there = o_n < beside
    if BIAS:
        y += tl.load(Bias + o_n, mask=there, other=0.0)[None, :]
    y = activated(y, ACTIVATION)
    if SCALE:
        y *= tl.load(Scale + o_n, mask=there, other=0.0)[None, :]
    mask = (o_m < kept)[:, None] & there[None, :]
    offsets = o_m[:, None] * columns + o_n[None, :]
    if RESIDUAL:
        y += tl.load(Residual + at + offsets, mask=mask, other=0.0)
    tl.store(p_out + offsets, y, mask=mask)


@triton.jit
def exact_rows(
    X, p_w, o_m, rows, kept, first, last, x_row, x_depth, w_depth, XK: tl.constexpr,
):  # fmt: skip
    """Rows `o_m` of a tile of results with float32 FMA, in chains of 64 channels.

    p_w: where the columns begin; kept: those that there are.
    """
    y = tl.zeros([o_m.shape[0], p_w.shape[1]], tl.float32)
    for c0 in tl.range(first, last, 64, num_stages=1):
        part = tl.zeros([o_m.shape[0], p_w.shape[1]], tl.float32)
        for k0 in tl.range(c0, c0 + 64, XK, num_stages=1):
            o_k = k0 + tl.arange(0, XK)
            deep = o_k < last
            p_x = X + o_m[:, None] * x_row + o_k.to(tl.int64)[None, :] * x_depth
            x = tl.load(p_x, mask=(o_m < rows)[:, None] & deep[None, :], other=0.0)
            w = tl.load(
                p_w + o_k.to(tl.int64)[:, None] * w_depth, mask=kept & deep[:, None], other=0.0
            )
            part = tl.dot(x, w, part, input_precision="ieee")
        y += part
    return y


@triton.jit
def tile_of_program(rows, columns, BM: tl.constexpr, BN: tl.constexpr):
    """The row and the column of tiles of BM x BN that a program computes."""
    tiles_n = tl.cdiv(columns, BN)
    tiles_m = tl.cdiv(rows, BM)
    pid = tl.program_id(0)
    first_m = pid // (GROUP * tiles_n) * GROUP
    group = tl.minimum(tiles_m - first_m, GROUP)
    place = pid % (GROUP * tiles_n)
    return (first_m + place % group).to(tl.int64), (place // group).to(tl.int64)


@triton.jit
def split_products(
    p_l, p_r, region_l, region_r, first, last, SINGLE: tl.constexpr, EVEN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The products of the channels [first, last): p_l [BM, BK] and p_r [BK, BN] point to hi, lo
    lies `region_l` and `region_r` further on.
    """
    o_k = tl.arange(0, BK)
    acc = tl.zeros([p_l.shape[0], p_r.shape[1]], tl.float32)
    for k0 in tl.range(first, last, BK, num_stages=STAGES):
        deep = k0 + o_k < last
        lh = load_tile(p_l, deep, deep, False, not EVEN)
        rh = load_tile(p_r, deep, deep, not EVEN, False)
        if SINGLE:
            part = tl.dot(lh, rh)
        else:
            part = tl.dot(load_tile(p_l + region_l, deep, deep, False, not EVEN), rh)
            part = tl.dot(lh, load_tile(p_r + region_r, deep, deep, not EVEN, False), part)
            part = tl.dot(lh, rh, part)
        # by name: written with + the compiler lets the products accumulate into acc
        acc = tl.fma(part, 1.0, acc)
        p_l += BK
        p_r += BK
    return acc


@triton.jit(
    do_not_specialize=[
        "rows", "columns", "depth", "padded", "chunk", "x_row", "x_depth", "w_row", "w_depth",
    ]
)  # fmt: skip
def product(
    Left, LeftPowers, Right, RightPowers, X, Weight, Bias, Scale, Residual, Out,
    rows: tl.int32, columns: tl.int32, depth: tl.int32, padded: tl.int32, chunk: tl.int32,
    x_row: tl.int64, x_depth: tl.int64, w_row: tl.int64, w_depth: tl.int64,
    SINGLE: tl.constexpr, EVEN: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    SCALE: tl.constexpr, RESIDUAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr, XM: tl.constexpr, XK: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of BM rows and BN columns, parts of the channels).

    Left [2, rows, padded], Right [2, columns, padded] float16 with LeftPowers [rows], RightPowers
    [columns]: as `halves.py` writes them of X and Weight, whose steps x_row to w_depth count
    elements.
    padded counts units of 8, columns units of 4; EVEN: BK divides padded. SINGLE: only hi * hi is
    computed, for 11 bits; lo is not read. Each part sums `chunk` times BK channels, to its
    own place in Out [parts, rows, columns]; several parts have no epilogue.
    """
    padded = padded * 8
    columns = columns * 4
    i_m, i_n = tile_of_program(rows, columns, BM, BN)
    left = tl.minimum(rows - i_m * BM, BM).to(tl.int32)
    beside = tl.minimum(columns - i_n * BN, BN).to(tl.int32)
    o_m = tl.arange(0, BM)
    o_n = tl.arange(0, BN)
    o_k = tl.arange(0, BK)
    first = tl.program_id(1) * chunk * BK
    last = tl.minimum(first + chunk * BK, padded)
    # rows beyond the last are copies of it, which are not stored
    p_l = Left + i_m * BM * padded + first
    p_l = p_l + tl.minimum(o_m, left - 1)[:, None] * padded + o_k[None, :]
    p_r = Right + i_n * BN * padded + first
    p_r = p_r + tl.minimum(o_n, beside - 1)[None, :] * padded + o_k[:, None]
    region_l = rows.to(tl.int64) * padded
    region_r = columns.to(tl.int64) * padded
    acc = split_products(p_l, p_r, region_l, region_r, first, last, SINGLE, EVEN, BK, STAGES)
    of_left = tl.load(LeftPowers + i_m * BM + o_m, mask=o_m < left, other=0.0)
    of_right = tl.load(RightPowers + i_n * BN + o_n, mask=o_n < beside, other=0.0)
    bad = fails_guard(acc, of_left, of_right, BM, BN)
    y = acc * UNSCALE * ((of_left * LIFT)[:, None] * (of_right * LIFT)[None, :])
    part_at = tl.program_id(1).to(tl.int64) * rows * columns
    at = i_m * BM * columns + i_n * BN
    p_out = Out + part_at + at
    finish(
        y, Bias + i_n * BN, Scale + i_n * BN, Residual, p_out, o_m, tl.where(bad, 0, left), o_n,
        beside, at, columns, BIAS, ACTIVATION, SCALE, RESIDUAL,
    )  # fmt: skip
    if bad:
        p_x = X + i_m * BM * x_row
        p_w = Weight + i_n * BN * w_row + o_n.to(tl.int64)[None, :] * w_row
        for r in tl.range(0, BM, XM, num_stages=1):
            o_x = r + tl.arange(0, XM)
            exact = exact_rows(
                p_x, p_w, o_x, left, (o_n < beside)[None, :], first, tl.minimum(last, depth), x_row,
                x_depth, w_depth, XK,
            )  # fmt: skip
            finish(
                exact, Bias + i_n * BN, Scale + i_n * BN, Residual, p_out, o_x, left, o_n, beside,
                at, columns, BIAS, ACTIVATION, SCALE, RESIDUAL,
            )  # fmt: skip


@triton.jit(do_not_specialize=["count", "parts"])
def join_parts(Parts, Out, count: tl.int64, parts: tl.int32, BLOCK: tl.constexpr):
    """Grid (blocks of BLOCK elements): Out [4 * count] is the sum of Parts [parts, 4 * count], one
    after another.
    """
    count = count * 4
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.range(0, parts):
        total += tl.load(Parts + part * count + o, mask=o < count, other=0.0)
    tl.store(Out + o, total, mask=o < count)
