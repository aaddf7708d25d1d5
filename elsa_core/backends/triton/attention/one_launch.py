"""The fold of float32 over few keys on sm_90, in Gluon: one launch, no workspace.

A ViT at 224 pixels has 197 tokens. There, launches and the first tile's latency are most of the
time, not the products: one program takes the keys of a head whole, splits keys, values and up to
256 of its queries into shared memory, and its warpgroups fold them without another barrier (Triton
3.9 puts one behind every product).

Served: no mask, 16-byte aligned rows, head dimensions in blocks of 32 or 64, keys up to the block
that holds them all. A program whose guard fails folds its rows again with float32 FMA.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from elsa_core.backends.triton.attention import INTEGERS
from elsa_core.backends.triton.shared.gluon import (
    barrier,
    fold_exact,
    halves,
    load_rows,
    locate,
    power,
    scores,
    softmax,
    split,
    store_rows,
    visible,
    weighted,
)
from elsa_core.backends.triton.shared.helpers import FACTOR_LIMIT, LEAST_VALUE

# keys of a last tile that holds no more: lengths k * k + 1 leave one key beyond the whole tiles
NARROW: gl.constexpr = gl.constexpr(16)

RENAMED: gl.constexpr = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def in_one(x, R: gl.constexpr, C: gl.constexpr, SHARED: gl.constexpr):
    """Tiles [n, rows, C] in shared memory as one of [R, C]."""
    if RENAMED:  # by Triton 3.9
        return x.reinterpret(gl.float16, [R, C], SHARED)
    else:  # noqa: RET505  # what follows a return is compiled too
        return x._reinterpret(gl.float16, [R, C], SHARED)


@gluon.jit
def take_turn(x):
    """x, once the warpgroup before this one has given its turn. The first does not wait."""
    return gl.inline_asm_elementwise(
        """{
        .reg .u32 w;
        .reg .pred p;
        mov.u32 w, %tid.x;
        shr.u32 w, w, 7;
        setp.ne.u32 p, w, 0;
        add.u32 w, w, 8;
        @p bar.sync w, 256;
        mov.b32 $0, $1;
        }""",
        "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def give_turn(x):
    """Let the warpgroup after this one, if there is one, go on."""
    return gl.inline_asm_elementwise(
        """{
        .reg .u32 w, n;
        .reg .pred p;
        mov.u32 w, %tid.x;
        mov.u32 n, %ntid.x;
        add.u32 w, w, 128;
        setp.lt.u32 p, w, n;
        shr.u32 w, w, 7;
        add.u32 w, w, 8;
        @p bar.arrive w, 256;
        mov.b32 $0, $1;
        }""",
        "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def fold_tile(
    sqh, sql, kh, kl, vh, vl, acc, m, z, f, n0, n_k, row0,
    BN: gl.constexpr, CAUSAL: gl.constexpr, O_: gl.constexpr,
):  # fmt: skip
    """BN keys from n0 on joined to the state of all rows."""
    S_: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BN, 16])
    P_: gl.constexpr = gl.DotOperandLayout(0, O_, 2)
    zero = gl.zeros([acc.shape[0], BN], gl.float32, S_)
    s = warpgroup_mma_wait(0, [scores(sqh, sql, kh, kl, zero)])
    before = gl.convert_layout(m, gl.SliceLayout(1, S_))
    m, a, p, part = softmax(visible(s, n0, n_k, row0, BN, CAUSAL, S_), f, before)
    z = z * gl.convert_layout(a, gl.SliceLayout(1, z.type.layout))[:, None]
    z = z + gl.convert_layout(part, z.type.layout)
    high, low = halves(p)
    high = gl.convert_layout(high, P_)
    o = warpgroup_mma_wait(0, [weighted(high, gl.convert_layout(low, P_), vh, vl, acc)])
    a = gl.convert_layout(a, gl.SliceLayout(1, O_))
    acc = gl.fma(acc, gl.broadcast(a[:, None], acc)[0], o)
    return acc, gl.convert_layout(m, gl.SliceLayout(1, O_)), z


@gluon.jit(do_not_specialize=INTEGERS)
def forward(
    Q, K, V, Out, LSE,
    heads: tl.int32, group: tl.int32, n_q: tl.int32, n_k: tl.int32, shift: tl.int32,
    scale_exp: tl.int32, scale: tl.float32,
    q_b: tl.int64, q_h: tl.int64, q_n: tl.int64, k_b: tl.int64, k_h: tl.int64, k_n: tl.int64,
    v_b: tl.int64, v_h: tl.int64, v_n: tl.int64,
    CAUSAL: tl.constexpr, UNIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    KEYS: tl.constexpr, TOGETHER: tl.constexpr, TURNS: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, DV: tl.constexpr, V0: tl.constexpr,
):  # fmt: skip
    """Grid (query tiles x batch x heads); arguments as `forward.forward` has them, `scale` with
    the sign.

    KEYS: a power of two, BN or more, that holds all keys. TOGETHER: queries, keys and values fit
    in registers at once, so all loads are issued before anything is split. TURNS: several
    warpgroups begin one after another; never with a compiler that puts a barrier of all of them
    behind a product.
    """
    WARPS: gl.constexpr = gl.num_warps()
    S_: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BN, 16])
    O_: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, V0, 16])
    P_: gl.constexpr = gl.DotOperandLayout(0, O_, 2)
    SHARED_D: gl.constexpr = gl.NVMMASharedLayout(min(128, 2 * D0), 16, 2)
    SHARED_V: gl.constexpr = gl.NVMMASharedLayout(min(128, 2 * V0), 16, 2)
    i_b, i_h, i_bh, row0, rows, q_n, k_n, v_n, p_q, p_k, p_v = locate(
        Q, K, V, heads, group, n_q, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, UNIT, BM
    )

    sqh = gl.allocate_shared_memory(gl.float16, [BM, D0], SHARED_D)
    sql = gl.allocate_shared_memory(gl.float16, [BM, D0], SHARED_D)
    skh = gl.allocate_shared_memory(gl.float16, [KEYS // BN, BN, D0], SHARED_D)
    skl = gl.allocate_shared_memory(gl.float16, [KEYS // BN, BN, D0], SHARED_D)
    svh = gl.allocate_shared_memory(gl.float16, [KEYS // BN, BN, V0], SHARED_V)
    svl = gl.allocate_shared_memory(gl.float16, [KEYS // BN, BN, V0], SHARED_V)
    k = load_rows(p_k, k_n, n_k, None, KEYS, D, D0)
    q = load_rows(p_q, q_n, rows, row0 > 0, BM, D, D0)
    if TOGETHER:
        v = load_rows(p_v, v_n, n_k, None, KEYS, DV, V0)
    high = in_one(skh, KEYS, D0, SHARED_D)
    e_k, bad_k = split(k, 1.0, high, in_one(skl, KEYS, D0, SHARED_D))
    if not TOGETHER:
        v = load_rows(p_v, v_n, n_k, None, KEYS, DV, V0)
    e_q, bad_q = split(q, scale, sqh, sql)
    high = in_one(svh, KEYS, V0, SHARED_V)
    e_v, bad_v = split(v, 1.0, high, in_one(svl, KEYS, V0, SHARED_V))
    e = scale_exp - e_q - e_k
    bad = bad_q | bad_k | bad_v | (e_v < LEAST_VALUE).to(gl.int32) | (e > FACTOR_LIMIT).to(gl.int32)
    f = power(gl.minimum(gl.maximum(e, -126), 127))
    fence_async_shared()
    barrier()

    hi = n_k
    if CAUSAL:
        hi = gl.minimum(hi, row0 + BM)
    count = gl.cdiv(hi, BN)
    turn = gl.arange(0, 32 * WARPS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    acc = gl.zeros([BM, V0], gl.float32, O_)
    m = gl.full([BM], -float("inf"), gl.float32, gl.SliceLayout(1, S_))
    # the first tile, one warpgroup after another: from then on one multiplies while others are at
    # their softmax
    if TURNS:
        take_turn(turn)
    zero = gl.zeros([BM, BN], gl.float32, S_)
    s = warpgroup_mma_wait(0, [scores(sqh, sql, skh.index(0), skl.index(0), zero)])
    if TURNS:
        give_turn(turn)
    m, _none, p, z = softmax(visible(s, 0, n_k, row0, BN, CAUSAL, S_), f, m)
    high, low = halves(p)
    high = gl.convert_layout(high, P_)
    low = gl.convert_layout(low, P_)
    acc = warpgroup_mma_wait(0, [weighted(high, low, svh.index(0), svl.index(0), acc)])
    m = gl.convert_layout(m, gl.SliceLayout(1, O_))
    narrow = (count > 1) & (n_k - (count - 1) * BN <= NARROW)
    count = gl.where(narrow, count - 1, count)
    for j in range(1, count):
        acc, m, z = fold_tile(
            sqh, sql, skh.index(j), skl.index(j), svh.index(j), svl.index(j),
            acc, m, z, f, j * BN, n_k, row0, BN, CAUSAL, O_,
        )  # fmt: skip
    if KEYS > BN:  # noqa: SIM102 (one is decided at compile time)
        if narrow:
            acc, m, z = fold_tile(
                sqh, sql, skh.index(count).slice(0, NARROW), skl.index(count).slice(0, NARROW),
                svh.index(count).slice(0, NARROW), svl.index(count).slice(0, NARROW),
                acc, m, z, f, count * BN, n_k, row0, NARROW, CAUSAL, O_,
            )  # fmt: skip
    acc = acc * power(-e_v)
    total = gl.convert_layout(gl.sum(z, 1), gl.SliceLayout(1, O_))
    offset = 0.0
    if bad != 0:
        acc, m, total = fold_exact(
            p_q, p_k, p_v, q_n, k_n, v_n, row0, rows, hi, scale, scale_exp, shift,
            CAUSAL, BM, D, D0, DV, V0, O_,
        )  # fmt: skip
        offset = shift.to(gl.float32)

    store_rows(Out, LSE, acc, m, total, offset, heads, n_q, i_b, i_h, i_bh, row0, BM, DV, V0, O_)
