"""What the Gluon kernels of sm_90 share: products of halves, the softmax, loads, splitting with its
guard, the fold with float32 FMA, and stores.

They mirror `shared/helpers.py`, whose words they use; Gluon functions name the layout of every
tensor, so plain Triton ones cannot serve here. Those that name no layout are compiled from the same
source.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, warpgroup_mma

from elsa_core.backends.triton.shared import helpers
from elsa_core.backends.triton.shared.helpers import FLOAT_MAX, LN2, SPLIT_LIMIT

# Triton 3.8 renamed these two
load_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
barrier = getattr(gl, "barrier", None) or gl.thread_barrier

place = gluon.jit(helpers.place.fn)
power = gluon.jit(helpers.power.fn)
halves = gluon.jit(helpers.halves.fn)
exponent = gluon.jit(helpers.exponent.fn)
nonzero_min = gluon.jit(helpers.nonzero_min.fn)

# weights are 2**7 at most, so that small ones stay normal in float16
SHIFT: gl.constexpr = gl.constexpr(7.0)


@gluon.jit
def locate(
    Q, K, V, heads, group, n_q, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    UNIT: gl.constexpr, BM: gl.constexpr,
):  # fmt: skip
    """This program's batch, head and rows, steps from row to row in elements, and where its first
    query, key and value lie.
    """
    q_tiles = gl.cdiv(n_q, BM)
    i_bh, i_m, i_b, i_h = place(gl.program_id(0), q_tiles, heads, False)
    i_kv = i_h // group
    row0 = i_m * BM
    rows = n_q - row0
    q_n = q_n * UNIT
    k_n = k_n * UNIT
    v_n = v_n * UNIT
    p_q = Q + (i_b * q_b + i_h * q_h) * UNIT + row0.to(gl.int64) * q_n
    p_k = K + (i_b * k_b + i_kv * k_h) * UNIT
    p_v = V + (i_b * v_b + i_kv * v_h) * UNIT
    return i_b, i_h, i_bh, row0, rows, q_n, k_n, v_n, p_q, p_k, p_v


@gluon.jit
def load_rows(p, step, rows, before, R: gl.constexpr, D: gl.constexpr, D0: gl.constexpr):
    """[R, D0] float32; channels beyond D are zero.

    Rows beyond the last are copies of it; or, of queries, the ones R rows earlier where `before`
    says that there are such (None: keys): copies would leave single numbers to the guard's means.
    """
    WARPS: gl.constexpr = gl.num_warps()
    LANES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D0, D0 // 8], [WARPS, 1], [1, 0])
    o_n = gl.arange(0, R, layout=gl.SliceLayout(1, LANES))
    if before is None:
        o_n = gl.minimum(o_n, rows - 1)
    else:
        o_n = gl.where(o_n < rows, o_n, gl.where(before, o_n - R, rows - 1))
    o_d = gl.arange(0, D0, layout=gl.SliceLayout(0, LANES))
    p = p + o_n[:, None] * step + o_d[None, :]
    if D < D0:
        return gl.load(p, mask=(o_d < D)[None, :], other=0.0)
    return gl.load(p)


@gluon.jit
def greatest_and_least(a, b, c, d):
    return gl.maximum(a, c), gl.minimum(b, d)


@gluon.jit
def split(x, factor, high, low):
    """x, scaled and times `factor` in [1, 2), as hi + lo into shared memory; its exponent, and
    whether the guard fails.

    The guard of `helpers` asks for the maximum of each row and channel. Here every eight channels
    of a row must reach the limit in their maximum, and what one lane holds of a channel in its
    mean, or be zeros: where those pass, so do rows and channels whole, and no lane asks another.
    """
    R: gl.constexpr = x.shape[0]
    C: gl.constexpr = x.shape[1]
    WARPS: gl.constexpr = gl.num_warps()
    LANES: gl.constexpr = 32 * WARPS
    PASSES: gl.constexpr = R * C // (WARPS * 256)
    held = gl.reshape(gl.abs(x), [PASSES, WARPS, 256 // C, C // 8, 8])
    of_rows = gl.max(held, 4)
    of_channels = gl.sum(held, 0) * (1.0 / PASSES)
    top = gl.reshape(gl.max(of_rows, 0), [LANES])
    # zeros count as the largest there is
    of_rows = gl.where(of_rows == 0.0, FLOAT_MAX, of_rows)
    of_channels = gl.where(of_channels == 0.0, FLOAT_MAX, of_channels)
    least = gl.reshape(gl.min(of_rows, 0), [LANES])
    least_of_channels = gl.reshape(gl.min(of_channels, 3), [LANES])
    least = gl.minimum(least, gl.convert_layout(least_of_channels, least.type.layout))
    top, least = gl.reduce((top, least), 0, greatest_and_least)
    e = exponent(top)
    bad = ((least * power(e) < SPLIT_LIMIT) & (e < 126)) | (e < -114)
    h, lo = halves(x * (power(e) * factor))
    high.store(h)
    low.store(lo)
    return e, bad.to(gl.int32)


@gluon.jit
def softmax(s, f, m):
    """The reference of the scores s * f joined to m, the old state's factor, the weights and their
    sums over the columns that one lane holds, [ROWS, 4].

    As `advance` of `attention/fold.py`.
    """
    m_new = gl.maximum(m, gl.max(s, 1) * f - SHIFT)
    # a row without a visible key yet keeps m = -inf and weights 0, never exp2(-inf + inf)
    m_safe = gl.where(m_new == -float("inf"), 0.0, m_new)
    a = gl.exp2(m - m_safe)
    p = gl.exp2(s * f - m_safe[:, None])
    part = gl.sum(gl.reshape(p, [p.shape[0], p.shape[1] // 8, 8]), 1)
    part = gl.sum(gl.reshape(part, [p.shape[0], 4, 2]), 2)
    return m_new, a, p, part


@gluon.jit
def visible(s, n0, n_k, row0, BN: gl.constexpr, CAUSAL: gl.constexpr, S_: gl.constexpr):
    """-inf for keys that are not there or not seen, in the tiles that have such."""
    needed = n0 + BN > n_k
    if CAUSAL:
        needed = needed | (n0 + BN > row0 + 1)
    if needed:
        o_n = n0 + gl.arange(0, BN, layout=gl.SliceLayout(0, S_))
        there = (o_n < n_k)[None, :]
        if CAUSAL:
            o_m = row0 + gl.arange(0, s.shape[0], layout=gl.SliceLayout(1, S_))
            there = there & (o_m[:, None] >= o_n[None, :])
        s = gl.where(there, s, -float("inf"))
    return s


@gluon.jit
def scores(qh, ql, kh, kl, zero):
    """Q K^T in flight, smallest products first."""
    s = warpgroup_mma(ql, kh.permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma(qh, kl.permute((1, 0)), s, is_async=True)
    return warpgroup_mma(qh, kh.permute((1, 0)), s, is_async=True)


@gluon.jit
def weighted(ph, pl, vh, vl, zero):
    """P V in flight, in an accumulator of its own: tensor cores truncate, float32 adds round."""
    o = warpgroup_mma(pl, vh, zero, use_acc=False, is_async=True)
    o = warpgroup_mma(ph, vl, o, is_async=True)
    return warpgroup_mma(ph, vh, o, is_async=True)


@gluon.jit
def fold_exact(
    p_q, p_k, p_v, q_n, k_n, v_n, row0, rows, hi, scale, scale_exp, shift,
    CAUSAL: gl.constexpr, BM: gl.constexpr, D: gl.constexpr, D0: gl.constexpr, DV: gl.constexpr,
    V0: gl.constexpr, O_: gl.constexpr,
):  # fmt: skip
    """The state of all rows with float32 FMA, a key at a time; no finite input overflows.

    As `attention/exact.py`: the weights and their sum carry 2**-shift.
    """
    Q_: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D0, 16])
    IN_Q: gl.constexpr = gl.SliceLayout(1, Q_)
    o_m = gl.arange(0, BM, layout=IN_Q)
    o_d = gl.arange(0, D0, layout=gl.SliceLayout(0, Q_))
    o_v = gl.arange(0, V0, layout=gl.SliceLayout(0, O_))
    p_q = p_q + gl.minimum(o_m, rows - 1)[:, None] * q_n + o_d[None, :]
    q = gl.load(p_q, mask=(o_d < D)[None, :], other=0.0)
    e_q = exponent(gl.max(gl.abs(q), 1))
    q = q * (power(e_q) * scale)[:, None]
    m = gl.full([BM], -float("inf"), gl.float32, IN_Q)
    z = gl.zeros([BM], gl.float32, IN_Q)
    acc = gl.zeros([BM, V0], gl.float32, O_)
    for n in range(0, hi):
        k = gl.load(p_k + n * k_n + o_d, mask=o_d < D, other=0.0)
        v = gl.load(p_v + n * v_n + o_v, mask=o_v < DV, other=0.0)
        e_k = exponent(gl.max(gl.abs(k), 0))
        s = gl.sum(q * (k * power(e_k))[None, :], 1)
        e = gl.minimum(gl.maximum(scale_exp - e_q - e_k, -252), 254)
        x = s * power(e >> 1) * power(e - (e >> 1))
        x = gl.minimum(gl.maximum(x, -FLOAT_MAX), FLOAT_MAX)
        # scaled products are finite: an infinity or a NaN here came with the input and stays
        s = gl.where(gl.abs(s) <= FLOAT_MAX, x, s)
        if CAUSAL:
            s = gl.where(row0 + o_m >= n, s, -float("inf"))
        m_new = gl.maximum(m, s)
        m_safe = gl.where(m_new == -float("inf"), 0.0, m_new)
        a = gl.exp2(m - m_safe)
        w = gl.exp2(s - m_safe) * power(-shift)
        m = m_new
        z = z * a + w
        a = gl.convert_layout(a, gl.SliceLayout(1, O_))
        w = gl.convert_layout(w, gl.SliceLayout(1, O_))
        acc = gl.fma(acc, gl.broadcast(a[:, None], acc)[0], w[:, None] * v[None, :])
    m = gl.convert_layout(m, gl.SliceLayout(1, O_))
    return acc, m, gl.convert_layout(z, gl.SliceLayout(1, O_))


@gluon.jit
def store_rows(
    Out, LSE, acc, m, total, offset, heads, n_q, i_b, i_h, i_bh, row0,
    BM: gl.constexpr, DV: gl.constexpr, V0: gl.constexpr, O_: gl.constexpr,
):  # fmt: skip
    """The normalised rows and their log-sum-exp."""
    rows = n_q - row0
    o_m = gl.arange(0, BM, layout=gl.SliceLayout(1, O_))
    o_v = gl.arange(0, V0, layout=gl.SliceLayout(0, O_))
    lse = (m + offset + gl.log2(total)) * LN2
    gl.store(LSE + i_bh.to(gl.int64) * n_q + row0 + o_m, lse, mask=o_m < rows)
    written = (o_m < rows)[:, None]
    if DV < V0:
        written = written & (o_v < DV)[None, :]
    p_o = Out + ((i_b * n_q + row0) * heads + i_h) * DV
    p_o = p_o + o_m[:, None] * (heads.to(gl.int64) * DV) + o_v[None, :]
    gl.store(p_o, acc * (1.0 / total)[:, None], mask=written)
