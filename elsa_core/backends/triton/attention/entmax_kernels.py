"""alpha-entmax attention: what its kernels share.

A row of scores with maximum m has the weights r_j / Z with r_j = v_j^(1 / a),
v_j = [1 + b (s_j - m)]_+, a = alpha - 1 and Z = sum(r). `elsa_core.backends.eager_entmax` has the
condition on b = a / c, and why Newton's steps on c are enclosed. All are float32.

PACKED: the tokens of all sequences lie one after another, as `forward.varlen_forward` has them: a
program finds its sequence itself, and the grid needs the number of tokens and of sequences alone.
`batch` is then the number of sequences, n_q and n_k are the tokens of all; `block_of` has the rest.
Tiles of a sequence lie in rows of tiles of its own, `longest` keys wide: sequence s begins in row
StartsQ[s] // 64 + s of those of a head, which are n_q // 64 + batch.

POWER: 2 for alpha = 1.5 (r = v^2), 1 for alpha = 2 (r = v), 0 for any other, by logarithms.
MODE: 0 half, 1 three TF32 products for each float32 product, 2 float32 FMA. `entmax_forward` has
the output, `entmax_gradients` the gradients.
"""

from __future__ import annotations

import triton
import triton.language as tl

from elsa_core.backends.triton.attention.forward import bounds_of, sequence_of
from elsa_core.backends.triton.shared.helpers import exponent, power

TILE: tl.constexpr = tl.constexpr(64)  # queries and keys of a tile of the operator's third result
# weights are that much larger where they become half precision, so that small ones keep digits
UNIT: tl.constexpr = tl.constexpr(2.0**14)
ROOT_UNIT: tl.constexpr = tl.constexpr(2.0**7)
NAN: tl.constexpr = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def block_of(
    Starts, Others, slot, sequences, steps, tokens, others, longest, BLOCK: tl.constexpr
):  # fmt: skip
    """The sequence whose block `slot` is, which of its blocks, its first token and length, and of
    the other side (`Others`) first token and length, of which no more than `longest` are seen.

    A block that the sequence has not begins at its length or beyond. A slot before those of the
    first sequence, which does not start at 0, has a length of 0.
    """
    slot = slot.to(tl.int64)
    i_s = sequence_of(Starts, slot, sequences, steps, BLOCK)
    first, length = bounds_of(Starts, i_s, tokens)
    other, other_length = bounds_of(Others, i_s, others)
    block = slot - (first // BLOCK + i_s)
    length = tl.where(block < 0, 0, length)
    block = tl.maximum(block, 0).to(tl.int32)
    return i_s, block, first, length, other, tl.minimum(other_length, longest)


@triton.jit
def product(x, y, MODE: tl.constexpr):
    """x y in an accumulator of its own."""
    if MODE == 0:
        o = tl.dot(x, y)
    elif MODE == 1:
        o = tl.dot(x, y, input_precision="tf32x3")
    else:
        o = tl.dot(x, y, input_precision="ieee")
    return o


@triton.jit
def accumulate(acc, x, y, MODE: tl.constexpr):
    """acc + x y. float32: a fresh accumulator per tile, since tensor cores truncate.

    float16: each row of x gets a power of two of its own first.
    """
    if MODE == 0:
        if y.dtype == tl.float16:
            e = exponent(tl.max(tl.abs(x), 1))
            o = tl.dot((x * power(e)[:, None]).to(y.dtype), y)
            acc = tl.fma(o, tl.broadcast_to(power(-e)[:, None], acc.shape), acc)
        else:
            acc = tl.dot(x.to(y.dtype), y, acc)
    else:
        # by name: written with + the compiler would let the product accumulate into acc
        acc = tl.fma(product(x, y, MODE), 1.0, acc)
    return acc


@triton.jit
def scores(
    x, y, p_mask, o_m, o_n, rows, columns, above, scale, edge,
    MODE: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """Scores x y^T of a tile, without the scale if FOLD; -inf where a key is hidden or not there.

    o_m, o_n: numbers of queries and keys in the tile, [R, 1] and [1, C] or the other way round.
    p_mask: where the mask of each score lies. edge: whether the tile holds keys that are not there
    or that a causal call hides: query i sees keys up to i + above.
    """
    s = product(x, y.T, MODE)
    if not FOLD:
        s = s * scale
    if MASK:
        inside = (o_m < rows) & (o_n < columns)
        if MASK == 1:
            s = tl.where(tl.load(p_mask, mask=inside, other=0) != 0, s, -float("inf"))
        else:
            s += tl.load(p_mask, mask=inside, other=0.0).to(tl.float32)
    if edge:
        valid = tl.broadcast_to(o_n < columns, s.shape)
        if CAUSAL:
            valid = valid & (o_n <= o_m + above)
        s = tl.where(valid, s, -float("inf"))
    return s


@triton.jit
def powers(s, top, slope, a, POWER: tl.constexpr):
    """v (1 where a weight is 0), r and u = r / v, both 0 there; NaN stays.

    top, slope: of the rows, [R, 1].
    """
    z = (s - top) * slope
    v = 1.0 + z
    dead = v <= 0.0
    v = tl.where(dead, 1.0, v)
    if POWER == 1:
        r = v
        u = tl.where(v == v, 1.0, v)
    elif POWER == 2:
        r = v * v
        u = v
    else:
        # log1p: what 1 + z has lost of z is made up for
        d = v - 1.0
        log = tl.where(d == 0.0, tl.where(dead, 0.0, z), tl.log(v) * (z / d))
        r = tl.exp(log / a)
        u = r / v
    return v, tl.where(dead, 0.0, r), tl.where(dead, 0.0, u)


@triton.jit
def alpha_of(Alpha, i_b, i_h, alpha_b, alpha_h, alpha, OF_HEADS: tl.constexpr):
    """alpha - 1, NaN outside [0, 3]; at alpha = 1 so small that the formulas take their limit."""
    if OF_HEADS:
        alpha = tl.load(Alpha + i_b * alpha_b + i_h * alpha_h).to(tl.float32)
    a = alpha - 1.0
    inside = (a >= 0.0) & (a <= 3.0)
    return tl.where(inside, tl.maximum(a, 2.0**-60), float("nan"))
