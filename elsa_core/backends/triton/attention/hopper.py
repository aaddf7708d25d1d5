"""The fold of float32 split ahead on sm_90, warp-specialised, in Gluon: one warpgroup copies tiles
of keys and values, one or two others fold them, each for 64 queries of its own.

`forward.forward` copies, waits and multiplies in step: all its warps pass a barrier for every tile,
and it waits for a product before the loop goes on. Here a tile is handed over through
barriers in shared memory, keys are copied once for 128 queries, and within a warpgroup Q K^T of the
next tile and P V of this one are in flight during the softmax between them (the schedule of
FlashAttention-3, arXiv 2407.08608, section 3).

Served: no mask, head dimensions of one block each, 16-byte aligned rows, one chain of keys. Blocks
of queries whose guard fails set a flag, and `fma_fallback.py` folds them again.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from elsa_core.backends.triton.attention import INTEGERS
from elsa_core.backends.triton.attention.fma_fallback import ROWS
from elsa_core.backends.triton.shared.gluon import (
    barrier,
    exponent,
    halves,
    load_async,
    nonzero_min,
    place,
    power,
    scores,
    softmax,
    visible,
    weighted,
)
from elsa_core.backends.triton.shared.helpers import FACTOR_LIMIT, LN2, SPLIT_LIMIT

# threads of the copying warpgroup, each of which arrives when its copies have
COPIERS: gl.constexpr = gl.constexpr(128)


@gluon.jit
def wait_for_launch_before(x):
    """x, once the launch that split keys and values is over (it may still be running)."""
    return gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def after_softmax(part):
    """The weights' sums, behind a barrier that is never reached (no sum is that large).

    Without it the assembler moves the wait for P V in front of the softmax, which it does not
    depend on.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .f32 t;
        add.f32 t, $2, $3;
        setp.gt.f32 p, t, 0f7F000000;
        @p bar.sync 1;
        mov.b32 $0, $2;
        mov.b32 $1, $3;
        }""",
        "=f,=f,f,f", [part], dtype=gl.float32, is_pure=False, pack=2,
    )  # fmt: skip


@gluon.jit
def released(empty):
    """Every warp of this group is past its reads of a tile; one thread says so."""
    barrier()
    mbarrier.arrive(empty, count=1)


@gluon.jit
def exponents(p_e, e_q, n0, BN: gl.constexpr):
    """The factors of a tile's scores and of its values."""
    p = p_e + n0 // BN * 2
    e = gl.minimum(gl.maximum(e_q - gl.load(p), -126), 127)
    return power(e), power(-gl.load(p + 1))


@gluon.jit
def split_queries(
    p_q, q_n, row0, rows, factor, sqh, sql, D: gl.constexpr, D0: gl.constexpr, LANES: gl.constexpr
):
    """ROWS queries as scaled hi + lo into shared memory; the exponent, and whether the guard fails.

    As `fold.split_tile`.
    """
    o_m = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LANES))
    o_d = gl.arange(0, D0, layout=gl.SliceLayout(0, LANES))
    inside = (o_m < rows)[:, None]
    if D < D0:
        inside = inside & (o_d < D)[None, :]
    q = gl.load(p_q + o_m[:, None] * q_n + o_d[None, :], mask=inside, other=0.0)
    has_before = gl.where((row0 > 0) & (rows > 0), D, 0)
    before = gl.abs(gl.load(p_q - q_n + o_d, mask=o_d < has_before, other=0.0))
    x = gl.abs(q)
    m_c = gl.max(x, 0)
    e = exponent(gl.max(m_c, 0))
    least = gl.minimum(nonzero_min(gl.max(x, 1)), nonzero_min(gl.maximum(m_c, before)))
    bad = ((least * power(e) < SPLIT_LIMIT) & (e < 126)) | (e < -114)
    high, low = halves(q * (power(e) * factor))
    sqh.store(high)
    sql.store(low)
    return e, bad.to(gl.int32)


@gluon.jit
def failed(p_guard, values, tiles, e_q, WARPS: gl.constexpr):
    """Whether a tile of keys or values did not pass its guard, or scores could overflow.

    Bit 0 of a guard: the tile failed; above it: the keys' exponent + 256.
    """
    o_t = gl.arange(0, 256, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    verdict = o_t * 0
    smallest = verdict + 2048
    for t0 in range(0, tiles, 256):
        there = t0 + o_t < tiles
        guards = gl.load(p_guard + t0 + o_t, mask=there, other=4096)
        verdict = verdict | (guards & 1)
        verdict = verdict | gl.load(p_guard + values + t0 + o_t, mask=there, other=0)
        smallest = gl.minimum(smallest, guards >> 1)
    over = e_q - (gl.min(smallest, 0) - 256) > FACTOR_LIMIT
    return gl.max(verdict, 0) | over.to(gl.int32)


@gluon.jit
def copy_tile(sh, sl, p, region, BN: gl.constexpr, W: gl.constexpr, LANES: gl.constexpr):
    """Begin to copy the halves of a tile, dense rows of W."""
    o_n = gl.arange(0, BN, layout=gl.SliceLayout(1, LANES))
    o_d = gl.arange(0, W, layout=gl.SliceLayout(0, LANES))
    p = p + (o_n[:, None] * W + o_d[None, :])
    load_async(sh, p)
    load_async(sl, p + region)


@gluon.jit
def copy_tiles(
    p_k, p_v, region_k, region_v, count, skh, skl, svh, svl, k_full, k_empty, v_full, v_empty,
    OVERLAP: gl.constexpr, BN: gl.constexpr, D0: gl.constexpr, V0: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The copying warpgroup: `count` tiles, each into a place that its readers have left."""
    WARPS: gl.constexpr = gl.num_warps()
    OF_KEYS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D0, D0 // 8], [WARPS, 1], [1, 0])
    OF_VALUES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // V0, V0 // 8], [WARPS, 1], [1, 0])
    if OVERLAP:
        wait_for_launch_before(count)
    slot = 0
    phase = 1
    for _ in range(0, count):
        mbarrier.wait(k_empty.index(slot), phase)
        copy_tile(skh.index(slot), skl.index(slot), p_k, region_k, BN, D0, OF_KEYS)
        async_copy.mbarrier_arrive(k_full.index(slot), increment_count=False)
        mbarrier.wait(v_empty.index(slot), phase)
        copy_tile(svh.index(slot), svl.index(slot), p_v, region_v, BN, V0, OF_VALUES)
        async_copy.mbarrier_arrive(v_full.index(slot), increment_count=False)
        p_k += BN * D0
        p_v += BN * V0
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1


@gluon.jit
def fold_rows(
    p_q, Out, LSE, p_e, p_guard, Flags,
    sqh, sql, skh, skl, svh, svl, k_full, k_empty, v_full, v_empty,
    heads, n_q, n_k, tiles, scale_exp, scale, q_n, batch, key_rows, i_b, i_h, i_bh, i_part,
    row0, lo, count,
    CAUSAL: gl.constexpr, PARTIAL: gl.constexpr, OVERLAP: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, D: gl.constexpr, D0: gl.constexpr, DV: gl.constexpr, V0: gl.constexpr,
):  # fmt: skip
    """A folding warpgroup: ROWS queries from `row0` on, `count` tiles of keys from `lo` on."""
    WARPS: gl.constexpr = gl.num_warps()
    S_: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BN, 16])
    O_: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, V0, 16])
    P_: gl.constexpr = gl.DotOperandLayout(0, O_, 2)
    OF_QUERIES: gl.constexpr = gl.BlockedLayout([1, 4], [128 // D0, D0 // 4], [WARPS, 1], [1, 0])
    rows = n_q - row0
    e, bad = split_queries(p_q, q_n, row0, rows, scale, sqh, sql, D, D0, OF_QUERIES)
    e_q = scale_exp - e
    if OVERLAP:
        wait_for_launch_before(bad)
    f, fv = exponents(p_e, e_q, lo, BN)
    barrier()

    zero_s = gl.zeros([ROWS, BN], gl.float32, S_)
    acc = gl.zeros([ROWS, V0], gl.float32, O_)
    m = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, S_))
    mbarrier.wait(k_full.index(0), 0)
    fence_async_shared()
    s = warpgroup_mma_wait(0, [scores(sqh, sql, skh.index(0), skl.index(0), zero_s)])
    released(k_empty.index(0))
    m, a, p, z = softmax(visible(s, lo, n_k, row0, BN, CAUSAL, S_), f, m)
    high, low = halves(p)
    ph = gl.convert_layout(high, P_)
    pl = gl.convert_layout(low, P_)
    a = gl.convert_layout(a, gl.SliceLayout(1, O_))
    slot = 0
    phase = 0
    for j in range(1, count):
        n0 = lo + j * BN
        after = slot + 1
        phase_after = phase
        if after == STAGES:
            after = 0
            phase_after = phase ^ 1
        f, fv_next = exponents(p_e, e_q, n0, BN)
        # values of the tile before were copied before these keys
        mbarrier.wait(v_full.index(slot), phase)
        mbarrier.wait(k_full.index(after), phase_after)
        fence_async_shared()
        s_ahead = scores(sqh, sql, skh.index(after), skl.index(after), zero_s)
        o_ahead = weighted(ph, pl, svh.index(slot), svl.index(slot), acc)
        s = warpgroup_mma_wait(3, [s_ahead])
        released(k_empty.index(after))
        m, a_next, p, part = softmax(visible(s, n0, n_k, row0, BN, CAUSAL, S_), f, m)
        o, part = warpgroup_mma_wait(0, [o_ahead, after_softmax(part)])
        released(v_empty.index(slot))
        z = z * gl.convert_layout(a_next, gl.SliceLayout(1, z.type.layout))[:, None] + part
        acc = gl.fma(acc, gl.broadcast(a[:, None], acc)[0], o * fv)
        a = gl.convert_layout(a_next, gl.SliceLayout(1, O_))
        fv = fv_next
        high, low = halves(p)
        ph = gl.convert_layout(high, P_)
        pl = gl.convert_layout(low, P_)
        slot = after
        phase = phase_after
    mbarrier.wait(v_full.index(slot), phase)
    fence_async_shared()
    o = warpgroup_mma_wait(0, [weighted(ph, pl, svh.index(slot), svl.index(slot), acc)])
    acc = gl.fma(acc, gl.broadcast(a[:, None], acc)[0], o * fv)

    i_state = i_part.to(gl.int64) * batch * heads + i_bh
    if rows > 0:
        bad = bad | failed(p_guard, key_rows, tiles, e_q, WARPS)
        gl.store(Flags + i_state * gl.cdiv(n_q, ROWS) + row0 // ROWS, bad)
    total = gl.convert_layout(gl.sum(z, 1), gl.SliceLayout(1, O_))
    m = gl.convert_layout(m, gl.SliceLayout(1, O_))
    empty = total == 0.0
    inverse = 1.0 / gl.where(empty, 1.0, total)
    if LSE.dtype.element_ty == gl.float64:
        lse = m.to(gl.float64) + gl.log2(total.to(gl.float64))
    else:
        lse = m + gl.log2(total)
    lse = gl.where(empty, -float("inf"), lse)
    if PARTIAL:
        o_row = (i_state * n_q + row0) * DV
        o_step = gl.to_tensor(DV).to(gl.int64)
        lse_row = i_state * n_q + row0
    else:
        lse = lse * LN2
        o_row = ((i_b * n_q + row0) * heads + i_h) * DV
        o_step = heads.to(gl.int64) * DV
        lse_row = i_bh.to(gl.int64) * n_q + row0
    o_m = gl.arange(0, ROWS, layout=gl.SliceLayout(1, O_))
    o_v = gl.arange(0, V0, layout=gl.SliceLayout(0, O_))
    gl.store(LSE + lse_row + o_m, lse, mask=o_m < rows)
    written = (o_m < rows)[:, None]
    if DV < V0:
        written = written & (o_v < DV)[None, :]
    # a hidden tile folds 0 * value: NaN, where the value is
    x = gl.where(empty[:, None], 0.0, acc * inverse[:, None])
    gl.store(Out + o_row + o_m[:, None] * o_step + o_v[None, :], x, mask=written)


@gluon.jit(do_not_specialize=INTEGERS)
def forward(
    Q, W, Flags, Out, LSE,
    heads: tl.int32, group: tl.int32, n_q: tl.int32, n_k: tl.int32, chunk: tl.int32,
    tiles: tl.int32, scale_exp: tl.int32, scale: tl.float32,
    q_b: tl.int64, q_h: tl.int64, q_n: tl.int64, batch: tl.int32,
    CAUSAL: tl.constexpr, PARTIAL: tl.constexpr, OVERLAP: tl.constexpr, UNIT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, COPY_REGISTERS: tl.constexpr,
    FOLD_REGISTERS: tl.constexpr, D: tl.constexpr, D0: tl.constexpr, DV: tl.constexpr,
    V0: tl.constexpr,
):  # fmt: skip
    """Grid (query tiles x batch x heads, key partitions); arguments as `forward.forward` has them,
    `scale` with the sign.

    W: what `split.split_ahead` wrote. Flags: int32 of [partition, batch, head, ROWS queries].
    BM: ROWS for each folding warpgroup, one or two.
    """
    GROUPS: gl.constexpr = BM // ROWS
    SHARED_D: gl.constexpr = gl.NVMMASharedLayout(min(128, 2 * D0), 16, 2)
    SHARED_V: gl.constexpr = gl.NVMMASharedLayout(min(128, 2 * V0), 16, 2)
    BARRIERS: gl.constexpr = mbarrier.MBarrierLayout()
    q_tiles = gl.cdiv(n_q, BM)
    pid = gl.program_id(0)
    i_part = gl.program_id(1)
    i_bh, i_m, i_b, i_h = place(pid, q_tiles, heads, CAUSAL)
    row0 = i_m * BM
    q_n = q_n * UNIT
    p_q = Q + (i_b * q_b + i_h * q_h) * UNIT + row0.to(gl.int64) * q_n
    lo = i_part * chunk
    hi = gl.minimum(n_k, lo + chunk)
    if CAUSAL:
        hi = gl.minimum(hi, row0 + BM)
    # rows before a partition see none of its keys: one tile, all of it hidden
    count = gl.maximum(gl.cdiv(hi - lo, BN), 1)

    # as `split.split_ahead` lays it out
    key_rows = batch.to(gl.int64) * (heads // group) * tiles
    row = (i_b * (heads // group) + i_h // group) * tiles
    p_e = W.to(gl.pointer_type(gl.int32)) + 2 * row
    p_guard = W.to(gl.pointer_type(gl.int32)) + 2 * key_rows + row
    before_halves = (key_rows + 7) // 8 * 64
    region_k = key_rows * BN * D0
    region_v = key_rows * BN * V0
    p_k = W + before_halves + (row * BN + lo) * D0
    p_v = W + before_halves + 2 * region_k + (row * BN + lo) * V0

    sqh = gl.allocate_shared_memory(gl.float16, [GROUPS, ROWS, D0], SHARED_D)
    sql = gl.allocate_shared_memory(gl.float16, [GROUPS, ROWS, D0], SHARED_D)
    skh = gl.allocate_shared_memory(gl.float16, [STAGES, BN, D0], SHARED_D)
    skl = gl.allocate_shared_memory(gl.float16, [STAGES, BN, D0], SHARED_D)
    svh = gl.allocate_shared_memory(gl.float16, [STAGES, BN, V0], SHARED_V)
    svl = gl.allocate_shared_memory(gl.float16, [STAGES, BN, V0], SHARED_V)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=COPIERS)
        mbarrier.init(v_full.index(i), count=COPIERS)
        mbarrier.init(k_empty.index(i), count=GROUPS)
        mbarrier.init(v_empty.index(i), count=GROUPS)
    barrier()

    # tuples of constants turn into tensors where they are given a name: written out twice
    if GROUPS == 1:
        gl.warp_specialize([
            (fold_rows, (
                p_q, Out, LSE, p_e, p_guard, Flags, sqh.index(0), sql.index(0),
                skh, skl, svh, svl, k_full, k_empty, v_full, v_empty,
                heads, n_q, n_k, tiles, scale_exp, scale, q_n, batch, key_rows, i_b, i_h, i_bh,
                i_part, row0, lo, count, CAUSAL, PARTIAL, OVERLAP, BN, STAGES, D, D0, DV, V0,
            )),
            (copy_tiles, (
                p_k, p_v, region_k, region_v, count, skh, skl, svh, svl,
                k_full, k_empty, v_full, v_empty, OVERLAP, BN, D0, V0, STAGES,
            )),
        ], [4], [COPY_REGISTERS])  # fmt: skip
    else:
        gl.static_assert(GROUPS == 2)
        gl.warp_specialize([
            (fold_rows, (
                p_q, Out, LSE, p_e, p_guard, Flags, sqh.index(0), sql.index(0),
                skh, skl, svh, svl, k_full, k_empty, v_full, v_empty,
                heads, n_q, n_k, tiles, scale_exp, scale, q_n, batch, key_rows, i_b, i_h, i_bh,
                i_part, row0, lo, count, CAUSAL, PARTIAL, OVERLAP, BN, STAGES, D, D0, DV, V0,
            )),
            (fold_rows, (
                p_q + ROWS * q_n, Out, LSE, p_e, p_guard, Flags, sqh.index(1), sql.index(1),
                skh, skl, svh, svl, k_full, k_empty, v_full, v_empty,
                heads, n_q, n_k, tiles, scale_exp, scale, q_n, batch, key_rows, i_b, i_h, i_bh,
                i_part, row0 + ROWS, lo, count, CAUSAL, PARTIAL, OVERLAP, BN, STAGES,
                D, D0, DV, V0,
            )),
            (copy_tiles, (
                p_k, p_v, region_k, region_v, count, skh, skl, svh, svl,
                k_full, k_empty, v_full, v_empty, OVERLAP, BN, D0, V0, STAGES,
            )),
        ], [4, 4], [FOLD_REGISTERS, COPY_REGISTERS])  # fmt: skip
