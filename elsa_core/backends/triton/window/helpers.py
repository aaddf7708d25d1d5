"""What the window kernels share: coordinates, loads, the terms of scores, and splitting.

`window_tile` holds a whole window in one tile (up to 64 tokens) and folds several windows of one
head with one bias tile in registers; `window_fold` takes BM queries of a window and folds its keys
tile by tile. Roll, padding, partition and their reverse are arithmetic on coordinates.

MODE: 0 half (float16 or bfloat16 operands as they are), 1 split (float32 as hi + lo float16, three
products), 2 single (float32 as one scaled float16), 3 exact (float32 FMA; `window_fold` alone).
A window is computed by `exact_rows` in the same launch where the largest entries of its queries
and keys make scores beyond 2**15, or where its values fail the guard of `shared/helpers.py`.
BIAS: whether there is one, [heads, T, T]; DENSE: without gaps.
PADDED: 0 no token is padded, 1 padded tokens are zeros, 2 padded tokens are `Pad` [3 * C].
COSINE: rows of queries and keys are normalised and scores multiplied with `Logit` [heads].
Tokens of a window are numbered row by row; `edge` has a bit for each axis on which the window is
the last one, and `code` the bits of the axes on which the roll moved a token across the border.
"""

from __future__ import annotations

import triton
import triton.language as tl

from elsa_core.backends.triton.shared.helpers import (
    FLOAT_MAX,
    LOG2E,
    clamped_power,
    exponent,
    halves,
    load_tile,
    power,
    store_tile,
)

RUNTIME_INTEGERS = [
    "windows", "heads", "count", "depth", "height", "width", "n_d", "n_h", "n_w",
    "shift_d", "shift_h", "shift_w", "scale_exp", "q_b", "q_d", "q_h", "q_w",
    "bias_h", "bias_q", "bias_k", "logit_h",
]  # fmt: skip
# of torch.nn.functional.normalize, which cosine attention is defined with
NORM_EPS: tl.constexpr = tl.constexpr(1e-12)
# the factor's exponent beyond which the product of the two largest entries might exceed 2**15
SCORE_LIMIT: tl.constexpr = tl.constexpr(-14)


@triton.jit
def locate_window(i_window, n_d, n_h, n_w, VOLUME: tl.constexpr):
    """Image, and the window's place along depth, height and width, of a window's number."""
    # unsigned divisions take half the instructions
    rest = i_window.to(tl.uint32)
    w_x = rest % n_w.to(tl.uint32)
    rest = rest // n_w.to(tl.uint32)
    w_y = rest % n_h.to(tl.uint32)
    rest = rest // n_h.to(tl.uint32)
    w_z = w_x * 0
    if VOLUME:
        w_z = rest % n_d.to(tl.uint32)
        rest = rest // n_d.to(tl.uint32)
    return rest.to(tl.int32), w_z.to(tl.int32), w_y.to(tl.int32), w_x.to(tl.int32)


@triton.jit
def next_window(i_b, w_z, w_y, w_x, n_d, n_h, n_w, VOLUME: tl.constexpr):
    """As `locate_window` of the number after: its digits, carried instead of divided."""
    w_x += 1
    carry = w_x == n_w
    w_x = tl.where(carry, 0, w_x)
    w_y += carry.to(tl.int32)
    carry = w_y == n_h
    w_y = tl.where(carry, 0, w_y)
    if VOLUME:
        w_z += carry.to(tl.int32)
        carry = w_z == n_d
        w_z = tl.where(carry, 0, w_z)
    return i_b + carry.to(tl.int32), w_z, w_y, w_x


@triton.jit
def along(t, w, count, size, shift, W: tl.constexpr, GRID: tl.constexpr):
    """The source coordinate of a window's t-th token on one axis; False where it is padded."""
    if GRID:
        place = t * count + w
    else:
        place = w * W + t
    source = place + shift
    return tl.where(source >= size, source - size, source), place < size


@triton.jit
def locate_tokens(
    o, w_z, w_y, w_x, n_d, n_h, n_w, depth, height, width, shift_d, shift_h, shift_w,
    q_d, q_h, q_w, WD: tl.constexpr, WH: tl.constexpr, WW: tl.constexpr, GRID: tl.constexpr,
    VOLUME: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Tokens `o` of a window: offsets within the image of qkv, pixel numbers, whether in it."""
    x, inside = along(o % WW, w_x, n_w, width, shift_w, WW, GRID)
    y, inside_y = along((o // WW) % WH, w_y, n_h, height, shift_h, WH, GRID)
    inside = inside & inside_y
    offset = y * q_h + x * q_w
    pixel = y * width + x
    if VOLUME:
        z, inside_z = along(o // (WW * WH), w_z, n_d, depth, shift_d, WD, GRID)
        inside = inside & inside_z
        offset += z * q_d
        pixel += z * (height * width)
    return offset * UNIT, pixel, inside


@triton.jit
def token_code(
    o, shift_d, shift_h, shift_w, WD: tl.constexpr, WH: tl.constexpr, WW: tl.constexpr,
    VOLUME: tl.constexpr,
):  # fmt: skip
    """In a last window, the roll moved tokens from W - shift on across the border."""
    x = (o % WW >= WW - shift_w).to(tl.int32)
    if VOLUME:
        y = ((o // WW) % WH >= WH - shift_h).to(tl.int32)
        z = (o >= (WD - shift_d) * (WW * WH)).to(tl.int32)
        return x | (y << 1) | (z << 2)
    y = (o >= (WH - shift_h) * WW).to(tl.int32)
    return x | (y << 1)


@triton.jit
def window_edge(w_z, w_y, w_x, n_d, n_h, n_w):
    x = (w_x == n_w - 1).to(tl.int32)
    y = (w_y == n_h - 1).to(tl.int32)
    z = (w_z == n_d - 1).to(tl.int32)
    return x | (y << 1) | (z << 2)


@triton.jit
def load_tokens(
    p_base, p_pad, o, offset, inside, T: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    PADDED: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Rows of one of q, k, v; zeros beyond T (if BOUNDED) and beyond D. [R, DP]"""
    o_d = tl.arange(0, DP)
    p = p_base + offset[:, None] + o_d[None, :]
    if PADDED == 2:
        p = tl.where(inside[:, None], p, p_pad + o_d[None, :])
    m_r = o < T
    if PADDED == 1:
        m_r = m_r & inside if BOUNDED else inside
    return load_tile(p, m_r, o_d < D, BOUNDED or PADDED == 1, D < DP)


@triton.jit(do_not_specialize=["tokens", "rows"])
def gather_bias(
    Table, Index, Out, tokens: tl.int32, rows: tl.int32, table_l: tl.int64, table_h: tl.int64,
    index_q: tl.int64, index_k: tl.int64, BLOCK: tl.constexpr,
):  # fmt: skip
    """Out[h, q, k] = Table[Index[q, k], h], NaN outside the table's rows. Grid (blocks, heads)."""
    i_h = tl.program_id(1)
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = o < tokens * tokens
    i_q = o // tokens
    number = tl.load(Index + i_q * index_q + (o - i_q * tokens) * index_k, mask=inside, other=0)
    known = inside & (number >= 0) & (number < rows)
    b = tl.load(Table + number * table_l + i_h * table_h, mask=known, other=float("nan"))
    tl.store(Out + i_h.to(tl.int64) * tokens * tokens + o, b, mask=inside)


@triton.jit
def bias_tile(
    Bias, i_h, o_m, o_n, bias_h, bias_q, bias_k, BIAS: tl.constexpr, DENSE: tl.constexpr,
    T: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """The bias in base 2, -inf for keys beyond T."""
    if BIAS:
        if DENSE:
            p = Bias + i_h.to(tl.int64) * (T * T) + (o_m[:, None] * T + o_n[None, :])
        else:
            p = Bias + i_h * bias_h + o_m[:, None] * bias_q + o_n[None, :] * bias_k
        if BOUNDED or not DENSE:
            inside = (o_m < T)[:, None] & (o_n < T)[None, :]
            b = tl.load(p, mask=inside, other=0.0).to(tl.float32) * LOG2E
        else:
            b = tl.load(p).to(tl.float32) * LOG2E
    else:
        b = tl.zeros([o_m.shape[0], o_n.shape[0]], tl.float32)
    if BOUNDED:
        b = tl.where((o_n < T)[None, :], b, -float("inf"))
    return b


@triton.jit
def add_terms(
    s, bias, edge, c_m, c_n, mask_value, TERMS: tl.constexpr, SHIFTED: tl.constexpr
):  # fmt: skip
    """Scores in base 2 with the bias and what the shift adds across regions."""
    if TERMS:
        s = s + bias
    if SHIFTED:  # noqa: SIM102 (one is decided at compile time, the other by the window)
        if edge != 0:
            s = s + tl.where(((c_m[:, None] ^ c_n[None, :]) & edge) != 0, mask_value, 0.0)
    return s


@triton.jit
def logit_factor(p, MODE: tl.constexpr):
    """A head's logit scale in base 2; a significand and an exponent where products are scaled."""
    x = tl.load(p).to(tl.float32) * LOG2E
    e = x * 0.0
    e = e.to(tl.int32)
    if MODE != 0:
        e = ((x.to(tl.int32, bitcast=True) >> 23) & 255) - 127
        e = tl.minimum(tl.maximum(e, -126), 126)
        x = x * power(-e)
    return x, e


@triton.jit
def inverse_norms(x, unit):
    """1 / norm of each row of x, whose entries are `unit` times the true ones."""
    norm = tl.sqrt(tl.sum(x * x, 1))
    return 1.0 / tl.maximum(norm, tl.maximum(NORM_EPS * unit, 1e-30))


@triton.jit
def split_factor(x):
    """A tile of queries or keys as scaled halves, its exponent, and 1 where it is not finite.

    An entry x keeps an error of at most 2**-22 |x| + 2**-38 of the tile's maximum. As scores are
    bounded by SCORE_LIMIT, the second part adds less to a score than float32 products do, whatever
    row or channel it falls in; so the guard looks at the maximum alone.
    """
    e = exponent(tl.max(tl.max(tl.abs(x), 1), 0))
    hi, lo = halves(x * power(e))
    return hi, lo, e, (e < -114).to(tl.int32)


@triton.jit
def split_unit(x):
    """Normalised rows of a tile as halves times 2**13, and 1 where a norm is beyond float32."""
    square = tl.sum(x * x, 1)
    norm = tl.maximum(tl.sqrt(square), NORM_EPS)
    hi, lo = halves(x * (8192.0 / norm)[:, None])
    return hi, lo, (tl.max(square, 0) > FLOAT_MAX).to(tl.int32)


@triton.jit
def score_factor(scale, scale_exp, e_q, e_k):
    """The factor of products of scaled operands, and 1 where scores may be beyond the limit."""
    e = scale_exp - e_q - e_k
    return clamped_power(e) * scale, (e > SCORE_LIMIT).to(tl.int32)


@triton.jit
def store_tokens(x, p_out, row, kept, pixel, inside, D: tl.constexpr, DP: tl.constexpr):
    """Rows to their pixels; padded tokens have none. row: elements of a pixel."""
    o_d = tl.arange(0, DP)
    p = p_out + (pixel.to(tl.int64) * row)[:, None] + o_d[None, :]
    store_tile(p, x, kept & inside, o_d < D, D < DP)
