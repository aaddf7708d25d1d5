"""alpha-entmax attention: what the kernels share, and those of the gradients.

A row of scores with maximum m has the weights r_j / Z with r_j = v_j^(1 / a),
v_j = [1 + b (s_j - m)]_+, a = alpha - 1 and Z = sum(r). `elsa_core.backends.eager_entmax` has the
condition on b = a / c, and why Newton's steps on c are enclosed. All are float32.

POWER: 2 for alpha = 1.5 (r = v^2), 1 for alpha = 2 (r = v), 0 for any other, by logarithms.
MODE: 0 half, 1 three TF32 products for each float32 product, 2 float32 FMA. The gradients' tiles of
BM queries and BN keys are those of the operator's third result. `entmax_forward` has the output.
"""

from __future__ import annotations

import triton
import triton.language as tl

from elsa_core.backends.triton.shared.helpers import exponent, load_part, power, wide

INTEGERS = [
    "heads", "group", "n_q", "n_k", "batch", "length", "others", "own_step", "step",
    "q_b", "q_h", "q_n", "q_d", "k_b", "k_h", "k_n", "k_d", "v_b", "v_h", "v_n", "v_d",
    "g_b", "g_h", "g_n", "g_d", "o_b", "o_h", "o_n", "o_d", "dq_b", "dq_h", "dq_n", "dq_d",
    "dk_b", "dk_h", "dk_n", "dk_d", "dv_b", "dv_h", "dv_n", "dv_d",
    "mask_b", "mask_h", "mask_q", "mask_k", "alpha_b", "alpha_h",
]  # fmt: skip


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
    """acc + x y. A fresh accumulator per tile: tensor cores truncate, float32 adds round.

    In half precision each row of x gets a power of two of its own first.
    """
    if MODE == 0:
        e = exponent(tl.max(tl.abs(x), 1))
        o = tl.dot((x * power(e)[:, None]).to(y.dtype), y)
        acc = tl.fma(o, tl.broadcast_to(power(-e)[:, None], acc.shape), acc)
    else:
        # by name: written with + the compiler would let the product accumulate into acc
        acc = tl.fma(product(x, y, MODE), 1.0, acc)
    return acc


@triton.jit
def scores(
    q, k, p_mask, o_m, o_n, rows, columns, above, mask_q, mask_k, scale,
    MODE: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Scores of a tile, -inf where a key is hidden or not there. Query i sees j <= i + above."""
    s = product(q, k.T, MODE) * scale
    valid = (o_n < columns)[None, :]
    if MASK:
        p = p_mask + o_m[:, None] * mask_q + o_n[None, :] * mask_k
        inside = (o_m < rows)[:, None] & valid
        if MASK == 1:
            s = tl.where(tl.load(p, mask=inside, other=0) != 0, s, -float("inf"))
        else:
            s += tl.load(p, mask=inside, other=0.0).to(tl.float32)
    if CAUSAL:
        valid = valid & (o_n[None, :] <= (o_m + above)[:, None])
    return tl.where(valid, s, -float("inf"))


@triton.jit
def natural_power(x, a):
    """x^a for x > 0."""
    return tl.exp(a * tl.log(x))


@triton.jit
def powers(s, top, slope, a, POWER: tl.constexpr):
    """v (1 where a weight is 0), r and u = r / v, both 0 there; NaN stays."""
    z = (s - top[:, None]) * slope[:, None]
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


@triton.jit(do_not_specialize=INTEGERS)
def list_tiles(
    Tiles, Lists, length: tl.int32, others: tl.int32, own_step: tl.int64, step: tl.int64,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (lists): the number of tiles that hold a weight, then which, of each row of tiles
    (others = query tiles, own_step = key tiles, step = 1) or column of tiles.

    Tiles: of each head [query tiles, key tiles]. Lists: [programs, 1 + length].
    """
    program = tl.program_id(0)
    i_bh = program // others
    first = wide(i_bh) * others * length + (program - i_bh * others) * own_step
    p_list = Lists + wide(program) * (length + 1)
    o = tl.arange(0, CHUNK)
    count = 0
    for start in range(0, length, CHUNK):
        at = start + o
        held = tl.load(Tiles + first + at * step, mask=at < length, other=0).to(tl.int32)
        place = count + tl.cumsum(held, 0)
        tl.store(p_list + place, at, mask=held != 0)
        count += tl.sum(held, 0)
    tl.store(p_list, count)


@triton.jit
def slant(p, a):
    """h of d p / d alpha, see `eager_entmax.slant`."""
    log_p = tl.log(tl.where(p > 0.0, p, 1.0))
    low = log_p * a
    series = 1.0 - low / 3.0 * (
        1.0 - low / 4.0 * (1.0 - low / 5.0 * (1.0 - low / 6.0 * (1.0 - low / 7.0)))
    )
    large = (tl.exp(-low) - 1.0 + low) / (a * a)
    bent = tl.where(tl.abs(low) < 0.5, log_p * log_p * (0.5 * series), large)
    return p * tl.where(a > 1.0, (1.0 - low) / (a * a), -bent)


@triton.jit
def derivative_factor(z, a, POWER: tl.constexpr):
    """Z^(a - 1): U = u times this."""
    if POWER == 1:
        f = tl.where(z == z, 1.0, z)
    elif POWER == 2:
        f = 1.0 / tl.sqrt(z)
    else:
        f = natural_power(z, a - 1.0)
    return f


@triton.jit(do_not_specialize=INTEGERS)
def query_gradient(
    Q, K, V, G, Mask, Alpha, Rows, Lists, Delta, DQ, DAlpha,
    heads: tl.int32, group: tl.int32, n_q: tl.int32, n_k: tl.int32, batch: tl.int32,
    scale: tl.float32, alpha: tl.float32,
    q_b: tl.int64, q_h: tl.int64, q_n: tl.int64, q_d: tl.int64,
    k_b: tl.int64, k_h: tl.int64, k_n: tl.int64, k_d: tl.int64,
    v_b: tl.int64, v_h: tl.int64, v_n: tl.int64, v_d: tl.int64,
    g_b: tl.int64, g_h: tl.int64, g_n: tl.int64, g_d: tl.int64,
    dq_b: tl.int64, dq_h: tl.int64, dq_n: tl.int64, dq_d: tl.int64,
    mask_b: tl.int64, mask_h: tl.int64, mask_q: tl.int64, mask_k: tl.int64,
    alpha_b: tl.int64, alpha_h: tl.int64,
    MODE: tl.constexpr, POWER: tl.constexpr, OF_HEADS: tl.constexpr, MASK: tl.constexpr,
    CAUSAL: tl.constexpr, WANT_Q: tl.constexpr, WANT_ALPHA: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STEP: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, DV: tl.constexpr, V0: tl.constexpr, UNIT_D: tl.constexpr,
):  # fmt: skip
    """Grid (query tiles x batch x heads): delta of each row, then dQ and the rows' part of the
    derivative by alpha. Delta, DAlpha: [batch * heads, n_q]. Lists: of the rows of tiles.
    """
    q_b, q_h, q_n = q_b * STEP, q_h * STEP, q_n * STEP
    k_b, k_h, k_n = k_b * STEP, k_h * STEP, k_n * STEP
    v_b, v_h, v_n = v_b * STEP, v_h * STEP, v_n * STEP
    g_b, g_h, g_n = g_b * STEP, g_h * STEP, g_n * STEP
    q_tiles = tl.cdiv(n_q, BM)
    i_bh = tl.program_id(0) // q_tiles
    i_m = tl.program_id(0) - i_bh * q_tiles
    row0 = i_m * BM
    rows = n_q - row0
    i_b = (i_bh // heads).to(tl.int64)
    i_h = (i_bh % heads).to(tl.int64)
    o_m = tl.arange(0, BM)
    o_c = tl.arange(0, BN)
    a = alpha_of(Alpha, i_b, i_h, alpha_b, alpha_h, alpha, OF_HEADS)
    p_k = K + i_b * k_b + i_h // group * k_h
    p_v = V + i_b * v_b + i_h // group * v_h
    p_mask = Mask
    if MASK:
        p_mask = Mask + i_b * mask_b + i_h * mask_h + wide(row0) * mask_q
    p_list = Lists + (wide(i_bh) * q_tiles + i_m) * (tl.cdiv(n_k, BN) + 1)
    p_q = Q + i_b * q_b + i_h * q_h + wide(row0) * q_n
    p_g = G + i_b * g_b + i_h * g_h + wide(row0) * g_n
    q = load_part(p_q, o_m, rows, q_n, q_d, 0, D0, D, UNIT_D, True)
    g = load_part(p_g, o_m, rows, g_n, g_d, 0, V0, DV, UNIT_D, True)
    inside = o_m < rows
    stride = batch.to(tl.int64) * heads * n_q
    at = wide(i_bh) * n_q + row0 + o_m
    top = tl.load(Rows + at, mask=inside, other=-float("inf"))
    m = tl.where(top == -float("inf"), 0.0, top)
    slope = tl.load(Rows + stride + at, mask=inside, other=1.0)
    z = tl.load(Rows + 2 * stride + at, mask=inside, other=1.0)
    count = tl.load(p_list)

    total = tl.zeros([BM], tl.float32)
    mean = tl.zeros([BM], tl.float32)
    for i in tl.range(0, count, num_stages=1):
        j = tl.load(p_list + 1 + i)
        n0 = wide(j) * BN
        k = load_part(p_k + n0 * k_n, o_c, n_k - j * BN, k_n, k_d, 0, D0, D, UNIT_D, True)
        s = scores(
            q, k, p_mask + n0 * mask_k, o_m, o_c, rows, n_k - j * BN, row0 - j * BN,
            mask_q, mask_k, scale, MODE, MASK, CAUSAL,
        )  # fmt: skip
        _, r, u = powers(s, m, slope, a, POWER)
        v = load_part(p_v + n0 * v_n, o_c, n_k - j * BN, v_n, v_d, 0, V0, DV, UNIT_D, True)
        d_p = product(g, v.T, MODE)
        total += tl.sum(u, 1)
        mean += tl.sum(u * d_p, 1)
    delta = mean / tl.where(total == 0.0, 1.0, total)
    tl.store(Delta + at, delta, mask=inside)

    if WANT_Q or WANT_ALPHA:
        factor = derivative_factor(z, a, POWER)
        dq = tl.zeros([BM, D0], tl.float32)
        by_alpha = tl.zeros([BM], tl.float32)
        for i in tl.range(0, count, num_stages=1):
            j = tl.load(p_list + 1 + i)
            n0 = wide(j) * BN
            k = load_part(p_k + n0 * k_n, o_c, n_k - j * BN, k_n, k_d, 0, D0, D, UNIT_D, True)
            s = scores(
                q, k, p_mask + n0 * mask_k, o_m, o_c, rows, n_k - j * BN, row0 - j * BN,
                mask_q, mask_k, scale, MODE, MASK, CAUSAL,
            )  # fmt: skip
            _, r, u = powers(s, m, slope, a, POWER)
            v = load_part(p_v + n0 * v_n, o_c, n_k - j * BN, v_n, v_d, 0, V0, DV, UNIT_D, True)
            d_p = product(g, v.T, MODE) - delta[:, None]
            if WANT_ALPHA:
                by_alpha += tl.sum(slant(r / z[:, None], a) * d_p, 1)
            if WANT_Q:
                dq = accumulate(dq, u * d_p * factor[:, None], k, MODE)
        if WANT_ALPHA:
            tl.store(DAlpha + at, by_alpha, mask=inside)
        if WANT_Q:
            o_d = tl.arange(0, D0)
            p = DQ + i_b * dq_b + i_h * dq_h + (wide(row0) + o_m)[:, None] * dq_n
            x = (dq * scale).to(DQ.dtype.element_ty)
            tl.store(p + (o_d * dq_d)[None, :], x, mask=inside[:, None] & (o_d < D)[None, :])


@triton.jit(do_not_specialize=INTEGERS)
def key_gradient(
    Q, K, V, G, Mask, Alpha, Rows, Lists, Delta, DK, DV_,
    heads: tl.int32, group: tl.int32, n_q: tl.int32, n_k: tl.int32, batch: tl.int32,
    scale: tl.float32, alpha: tl.float32,
    q_b: tl.int64, q_h: tl.int64, q_n: tl.int64, q_d: tl.int64,
    k_b: tl.int64, k_h: tl.int64, k_n: tl.int64, k_d: tl.int64,
    v_b: tl.int64, v_h: tl.int64, v_n: tl.int64, v_d: tl.int64,
    g_b: tl.int64, g_h: tl.int64, g_n: tl.int64, g_d: tl.int64,
    dk_b: tl.int64, dk_h: tl.int64, dk_n: tl.int64, dk_d: tl.int64,
    dv_b: tl.int64, dv_h: tl.int64, dv_n: tl.int64, dv_d: tl.int64,
    mask_b: tl.int64, mask_h: tl.int64, mask_q: tl.int64, mask_k: tl.int64,
    alpha_b: tl.int64, alpha_h: tl.int64,
    MODE: tl.constexpr, POWER: tl.constexpr, OF_HEADS: tl.constexpr, MASK: tl.constexpr,
    CAUSAL: tl.constexpr, WANT_K: tl.constexpr, WANT_V: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STEP: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, DV: tl.constexpr, V0: tl.constexpr, UNIT_D: tl.constexpr,
):  # fmt: skip
    """Grid (key tiles x batch x key heads): dK and dV, summed over the query heads that share them,
    in one order. Lists: of the columns of tiles. Scores are those of the forward, bit by bit.
    """
    q_b, q_h, q_n = q_b * STEP, q_h * STEP, q_n * STEP
    k_b, k_h, k_n = k_b * STEP, k_h * STEP, k_n * STEP
    v_b, v_h, v_n = v_b * STEP, v_h * STEP, v_n * STEP
    g_b, g_h, g_n = g_b * STEP, g_h * STEP, g_n * STEP
    k_tiles = tl.cdiv(n_k, BN)
    q_tiles = tl.cdiv(n_q, BM)
    key_heads = heads // group
    i_kv = tl.program_id(0) // k_tiles
    j = tl.program_id(0) - i_kv * k_tiles
    i_b = (i_kv // key_heads).to(tl.int64)
    i_k = (i_kv % key_heads).to(tl.int64)
    n0 = wide(j) * BN
    columns = n_k - j * BN
    o_m = tl.arange(0, BM)
    o_c = tl.arange(0, BN)
    p_k = K + i_b * k_b + i_k * k_h + n0 * k_n
    p_v = V + i_b * v_b + i_k * v_h + n0 * v_n
    k = load_part(p_k, o_c, columns, k_n, k_d, 0, D0, D, UNIT_D, True)
    v = load_part(p_v, o_c, columns, v_n, v_d, 0, V0, DV, UNIT_D, True)
    stride = batch.to(tl.int64) * heads * n_q
    dk = tl.zeros([BN, D0], tl.float32)
    dv = tl.zeros([BN, V0], tl.float32)
    for i_g in range(0, group):
        i_h = i_k * group + i_g
        i_bh = i_b * heads + i_h
        a = alpha_of(Alpha, i_b, i_h, alpha_b, alpha_h, alpha, OF_HEADS)
        p_list = Lists + (i_bh * k_tiles + j) * (q_tiles + 1)
        p_mask = Mask
        if MASK:
            p_mask = Mask + i_b * mask_b + i_h * mask_h + n0 * mask_k
        count = tl.load(p_list)
        for i in tl.range(0, count, num_stages=1):
            row0 = tl.load(p_list + 1 + i) * BM
            rows = n_q - row0
            p_q = Q + i_b * q_b + i_h * q_h + wide(row0) * q_n
            p_g = G + i_b * g_b + i_h * g_h + wide(row0) * g_n
            q = load_part(p_q, o_m, rows, q_n, q_d, 0, D0, D, UNIT_D, True)
            g = load_part(p_g, o_m, rows, g_n, g_d, 0, V0, DV, UNIT_D, True)
            inside = o_m < rows
            at = i_bh * n_q + row0 + o_m
            top = tl.load(Rows + at, mask=inside, other=-float("inf"))
            m = tl.where(top == -float("inf"), 0.0, top)
            slope = tl.load(Rows + stride + at, mask=inside, other=1.0)
            z = tl.load(Rows + 2 * stride + at, mask=inside, other=1.0)
            s = scores(
                q, k, p_mask + wide(row0) * mask_q, o_m, o_c, rows, columns, row0 - j * BN,
                mask_q, mask_k, scale, MODE, MASK, CAUSAL,
            )  # fmt: skip
            s = tl.where(inside[:, None], s, -float("inf"))
            _, r, u = powers(s, m, slope, a, POWER)
            if WANT_V:
                dv = accumulate(dv, tl.trans(r / z[:, None]), g, MODE)
            if WANT_K:
                delta = tl.load(Delta + at, mask=inside, other=0.0)
                factor = derivative_factor(z, a, POWER)
                d_p = product(g, v.T, MODE) - delta[:, None]
                dk = accumulate(dk, tl.trans(u * d_p * factor[:, None]), q, MODE)
    inside_k = (o_c < columns)[:, None]
    if WANT_K:
        o_d = tl.arange(0, D0)
        p = DK + i_b * dk_b + i_k * dk_h + (n0 + o_c)[:, None] * dk_n + (o_d * dk_d)[None, :]
        tl.store(p, (dk * scale).to(DK.dtype.element_ty), mask=inside_k & (o_d < D)[None, :])
    if WANT_V:
        o_v = tl.arange(0, V0)
        p = DV_ + i_b * dv_b + i_k * dv_h + (n0 + o_c)[:, None] * dv_n + (o_v * dv_d)[None, :]
        tl.store(p, dv.to(DV_.dtype.element_ty), mask=inside_k & (o_v < DV)[None, :])
