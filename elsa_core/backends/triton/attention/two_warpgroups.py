"""The fold of float32 over few keys for small grids on sm_90, in Gluon: two warpgroups, 64 queries.

A grid that leaves multiprocessors idle (batch 1) is bound by the latency of one program. Here two
warpgroups share a program's 64 queries: each takes half of the keys for the scores and half of the
channels for the values, and the weights go from one to the other through shared memory. All keys
are one tile: there is no running maximum, and no state to rescale.

Served: what `one_launch.py` serves, with head dimensions in blocks of 64 and keys up to the 128 or
208 that the program holds.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma_wait,
)

from elsa_core.backends.triton.attention import INTEGERS
from elsa_core.backends.triton.shared.gluon import (
    SHIFT,
    barrier,
    fold_exact,
    judge,
    load_rows,
    locate,
    measure,
    power,
    scores,
    split,
    store_halves,
    store_rows,
    visible,
    weighted,
)
from elsa_core.backends.triton.shared.helpers import FACTOR_LIMIT, LEAST_VALUE

# tiles that keys are split in; of the third, 16 keys are folded
FIRST: gl.constexpr = gl.constexpr(128)
SECOND: gl.constexpr = gl.constexpr(64)
THIRD: gl.constexpr = gl.constexpr(32)
FOLDED: gl.constexpr = gl.constexpr(16)


@gluon.jit
def halves_in(R: gl.constexpr, C: gl.constexpr, SHARED: gl.constexpr):
    """Shared memory for R rows as hi + lo."""
    high = gl.allocate_shared_memory(gl.float16, [R, C], SHARED)
    return high, gl.allocate_shared_memory(gl.float16, [R, C], SHARED)


@gluon.jit
def split_all(a, b, c, ah, al, bh, bl, ch, cl):
    """Three tiles of one operand split with one exponent; see `gluon.split`."""
    top, least, of_channels = measure(a)
    top_b, least_b, of_channels_b = measure(b)
    top_c, least_c, of_channels_c = measure(c)
    L: gl.constexpr = top.type.layout
    top = gl.maximum(top, gl.convert_layout(top_b, L))
    top = gl.maximum(top, gl.convert_layout(top_c, L))
    least = gl.minimum(least, gl.convert_layout(least_b, L))
    least = gl.minimum(least, gl.convert_layout(least_c, L))
    of_channels = of_channels + gl.convert_layout(of_channels_b, of_channels.type.layout)
    of_channels = of_channels + gl.convert_layout(of_channels_c, of_channels.type.layout)
    rows: gl.constexpr = a.shape[0] + b.shape[0] + c.shape[0]
    e, bad = judge(top, least, of_channels, rows * a.shape[1] // (gl.num_warps() * 256))
    store_halves(a, power(e), ah, al)
    store_halves(b, power(e), bh, bl)
    store_halves(c, power(e), ch, cl)
    return e, bad


@gluon.jit
def by_columns(x):
    """Columns of scores, or weights, as every width has them: [rows, warpgroup, a lane's, 8]."""
    return gl.reshape(x, [x.shape[0], 2, x.shape[1] // 16, 8])


@gluon.jit
def weights(s, f, m, S_: gl.constexpr):
    return gl.exp2(s * f - gl.convert_layout(m, gl.SliceLayout(1, S_))[:, None])


@gluon.jit(do_not_specialize=INTEGERS)
def forward(
    Q, K, V, Out, LSE,
    heads: tl.int32, group: tl.int32, n_q: tl.int32, n_k: tl.int32, shift: tl.int32,
    scale_exp: tl.int32, scale: tl.float32,
    q_b: tl.int64, q_h: tl.int64, q_n: tl.int64, k_b: tl.int64, k_h: tl.int64, k_n: tl.int64,
    v_b: tl.int64, v_h: tl.int64, v_n: tl.int64,
    CAUSAL: tl.constexpr, UNIT: tl.constexpr, BM: tl.constexpr, KEYS: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, DV: tl.constexpr, V0: tl.constexpr,
):  # fmt: skip
    """Grid (query tiles x batch x heads); arguments as `one_launch.forward` has them.

    BM: 64, of 8 warps. KEYS: 128 or 208. D0, V0: 64.
    """
    MORE: gl.constexpr = KEYS > FIRST
    # four warps for the rows, twice: for the left and the right half of the columns
    A_: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, FIRST // 2, 16])
    B_: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, SECOND // 2, 16])
    C_: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, FOLDED // 2, 16])
    O_: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, V0 // 2, 16])
    P_: gl.constexpr = gl.DotOperandLayout(0, O_, 2)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    NARROW: gl.constexpr = gl.NVMMASharedLayout(2 * FOLDED, 16, 2)
    i_b, i_h, i_bh, row0, rows, q_n, k_n, v_n, p_q, p_k, p_v = locate(
        Q, K, V, heads, group, n_q, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, UNIT, BM
    )

    sqh, sql = halves_in(BM, D0, SHARED)
    kah, kal = halves_in(FIRST, D0, SHARED)
    vah, val = halves_in(FIRST, V0, SHARED)
    if MORE:
        kbh, kbl = halves_in(SECOND, D0, SHARED)
        kch, kcl = halves_in(THIRD, D0, SHARED)
        vbh, vbl = halves_in(SECOND, V0, SHARED)
        vch, vcl = halves_in(THIRD, V0, SHARED)
    # all loads are issued before anything is split
    ka = load_rows(p_k, k_n, 0, n_k, False, FIRST, D, D0, False)
    if MORE:
        kb = load_rows(p_k, k_n, FIRST, n_k, False, SECOND, D, D0, False)
        kc = load_rows(p_k, k_n, FIRST + SECOND, n_k, False, THIRD, D, D0, False)
    q = load_rows(p_q, q_n, 0, rows, row0 > 0, BM, D, D0, True)
    va = load_rows(p_v, v_n, 0, n_k, False, FIRST, DV, V0, False)
    if MORE:
        vb = load_rows(p_v, v_n, FIRST, n_k, False, SECOND, DV, V0, False)
        vc = load_rows(p_v, v_n, FIRST + SECOND, n_k, False, THIRD, DV, V0, False)
        e_k, bad_k = split_all(ka, kb, kc, kah, kal, kbh, kbl, kch, kcl)
    else:
        e_k, bad_k = split(ka, 1.0, kah, kal)
    e_q, bad_q = split(q, scale, sqh, sql)
    if MORE:
        e_v, bad_v = split_all(va, vb, vc, vah, val, vbh, vbl, vch, vcl)
    else:
        e_v, bad_v = split(va, 1.0, vah, val)
    e = scale_exp - e_q - e_k
    bad = bad_q | bad_k | bad_v | (e_v < LEAST_VALUE).to(gl.int32) | (e > FACTOR_LIMIT).to(gl.int32)
    f = power(gl.minimum(gl.maximum(e, -126), 127))
    fence_async_shared()
    barrier()

    s_a = scores(sqh, sql, kah, kal, gl.zeros([BM, FIRST], gl.float32, A_))
    if MORE:
        s_b = scores(sqh, sql, kbh, kbl, gl.zeros([BM, SECOND], gl.float32, B_))
        s_c = scores(
            sqh, sql, kch.slice(0, FOLDED), kcl.slice(0, FOLDED),
            gl.zeros([BM, FOLDED], gl.float32, C_),
        )  # fmt: skip
        s_a, s_b, s_c = warpgroup_mma_wait(0, [s_a, s_b, s_c])
        s_b = visible(s_b, FIRST, n_k, row0, SECOND, CAUSAL, B_)
        s_c = visible(s_c, FIRST + SECOND, n_k, row0, FOLDED, CAUSAL, C_)
    else:
        s_a = warpgroup_mma_wait(0, [s_a])
    s_a = visible(s_a, 0, n_k, row0, FIRST, CAUSAL, A_)
    most = gl.max(by_columns(s_a), 2)
    if MORE:
        most = gl.maximum(most, gl.convert_layout(gl.max(by_columns(s_b), 2), most.type.layout))
        most = gl.maximum(most, gl.convert_layout(gl.max(by_columns(s_c), 2), most.type.layout))
    m = gl.max(gl.reshape(most, [BM, 16]), 1) * f - SHIFT
    p_a = weights(s_a, f, m, A_)
    pah, pal = halves_in(BM, FIRST, SHARED)
    store_halves(p_a, 1.0, pah, pal)
    z = gl.sum(by_columns(p_a), 2)
    if MORE:
        p_b = weights(s_b, f, m, B_)
        p_c = weights(s_c, f, m, C_)
        pbh, pbl = halves_in(BM, SECOND, SHARED)
        pch, pcl = halves_in(BM, FOLDED, NARROW)
        store_halves(p_b, 1.0, pbh, pbl)
        store_halves(p_c, 1.0, pch, pcl)
        z = z + gl.convert_layout(gl.sum(by_columns(p_b), 2), z.type.layout)
        z = z + gl.convert_layout(gl.sum(by_columns(p_c), 2), z.type.layout)
    total = gl.convert_layout(gl.sum(gl.reshape(z, [BM, 16]), 1), gl.SliceLayout(1, O_))
    m = gl.convert_layout(m, gl.SliceLayout(1, O_))
    barrier()
    zero = gl.zeros([BM, V0], gl.float32, O_)
    if MORE:
        o_c = weighted(
            pch.load(P_), pcl.load(P_), vch.slice(0, FOLDED), vcl.slice(0, FOLDED), zero
        )  # fmt: skip
        o_b = weighted(pbh.load(P_), pbl.load(P_), vbh, vbl, zero)
        o_a = weighted(pah.load(P_), pal.load(P_), vah, val, zero)
        o_a, o_b, o_c = warpgroup_mma_wait(0, [o_a, o_b, o_c])
        acc = o_a + (o_b + o_c)
    else:
        acc = warpgroup_mma_wait(0, [weighted(pah.load(P_), pal.load(P_), vah, val, zero)])
    acc = acc * power(-e_v)
    offset = 0.0
    if bad != 0:
        hi = n_k
        if CAUSAL:
            hi = gl.minimum(hi, row0 + BM)
        acc, m, total = fold_exact(
            p_q, p_k, p_v, q_n, k_n, v_n, row0, rows, hi, scale, scale_exp, shift,
            CAUSAL, BM, D, D0, DV, V0, O_,
        )  # fmt: skip
        offset = shift.to(gl.float32)
    store_rows(
        Out, LSE, acc, m, total, offset, heads, n_q, i_b, i_h, i_bh, row0, BM, DV, V0, O_
    )  # fmt: skip
