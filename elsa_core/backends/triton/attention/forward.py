"""The fused forward kernel: one program folds a range of keys for BLOCK_M queries of one head.

MODE: 0 half (float16 or bfloat16 operands as they are), 1 split (float32 as hi + lo float16, three
products), 2 single (float32 as one scaled float16, one product), 3 exact (float32 FMA).
PRE: keys and values were split ahead (`split.py`) into W, with exponents and guards per tile in E.
D0 + D1 and V0 + V1 are the blocks that cover the head and value dimensions (80 = 64 + 16).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from elsa_core.backends.triton.attention import INTEGERS
from elsa_core.backends.triton.attention.exact import fold_exact
from elsa_core.backends.triton.attention.fold import fold_range, key_tiles, merged, split_tile
from elsa_core.backends.triton.shared.helpers import (
    FACTOR_LIMIT,
    LN2,
    SINGLE_LIMIT,
    SPLIT_LIMIT,
    exponent_elements,
    load_part,
    place,
    power,
    row_before,
    store_tile,
)


@triton.jit
def store_rows(
    acc0, acc1, z, m, offset, Out, LSE, o_row, o_step, lse_row, rows,
    BM: tl.constexpr, DV: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """out = acc / z, zeros where no key was seen; lse natural, or base 2 for a partial
    state, in the dtype of LSE: float64 for states that are merged.
    """
    o_m = tl.arange(0, BM)
    inside = o_m < rows
    empty = z == 0.0
    inverse = 1.0 / tl.where(empty, 1.0, z)
    if LSE.dtype.element_ty == tl.float64:
        lse = m.to(tl.float64) + offset.to(tl.float64) + tl.log2(z.to(tl.float64))
    else:
        lse = m + offset + tl.log2(z)
    lse = tl.where(empty, -float("inf"), lse)
    if not PARTIAL:
        lse = lse * LN2
    tl.store(LSE + lse_row + o_m, lse, mask=inside)
    o_v = tl.arange(0, V0)
    p = Out + o_row + o_m[:, None] * o_step + o_v[None, :]
    store_tile(p, acc0 * inverse[:, None], inside, o_v < DV, True)
    if V1:
        o_v1 = V0 + tl.arange(0, V1)
        p1 = Out + o_row + o_m[:, None] * o_step + o_v1[None, :]
        store_tile(p1, acc1 * inverse[:, None], inside, o_v1 < DV, True)


@triton.jit
def fold_rows(
    p_q, p_k, p_v, p_mask, W, key_rows, row, tiles, lo, chunk, n_k, row0, rows,
    q_n, q_d, k_n, k_d, v_n, v_d, mask_q, mask_k, shift, scale_exp, scale, flip, once,
    MODE: tl.constexpr, PRE: tl.constexpr, ONE_LOOP: tl.constexpr, FRESH: tl.constexpr,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, FLIP: tl.constexpr, OVERLAP: tl.constexpr,
    UNIT_D: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BX: tl.constexpr, CHAIN: tl.constexpr, SHIFT: tl.constexpr,
    STAGES: tl.constexpr, TAIL_STAGES: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    DV: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
):  # fmt: skip
    """The keys [lo, lo + chunk) of n_k folded for BM queries from `row0` on, `rows` of which are
    there: the base 2 reference m, what to add to it, and the sums z [BM], acc0 and acc1 that are
    relative to both.

    W, key_rows, row, tiles: of keys that were split ahead (PRE): the workspace, tiles of all heads,
    the first tile, and tiles of a head. once: 1, which the compiler does not know, or None (see
    below). The other arguments as `forward` has them.
    """
    # whole tiles seen by every row in [lo, full), the others in [full, hi)
    full, hi = key_tiles(lo, chunk, n_k, row0, BM, BN, CAUSAL)
    LIMIT: tl.constexpr = SPLIT_LIMIT if MODE == 1 else SINGLE_LIMIT

    m = tl.full([BM], -float("inf"), tl.float32)
    z = tl.zeros([BM, 8], tl.float32)
    acc0 = tl.zeros([BM, V0], tl.float32)
    acc1 = tl.zeros([BM, V1 if V1 else 1], tl.float32)
    bad = tl.full([], 1 if MODE == 3 else 0, tl.int32)
    if MODE != 3:
        o_m = tl.arange(0, BM)
        f = scale
        e_q = 0
        e_k = 0
        e_v = 0
        p_e = W
        WK = W
        WV = W
        region_k = 0
        region_v = 0
        q0 = load_part(p_q, o_m, rows, q_n, q_d, 0, D0, D, UNIT_D, True)
        q1 = q0
        if D1:
            q1 = load_part(p_q, o_m, rows, q_n, q_d, D0, D1, D, UNIT_D, True)
        if MODE == 0:
            if FLIP:
                q0 = (q0.to(tl.float32) * flip).to(q0.dtype)
                q1 = (q1.to(tl.float32) * flip).to(q1.dtype)
            qh0 = q0
            ql0 = q0
            qh1 = q1
            ql1 = q1
        else:
            before0 = row_before(p_q, row0, q_n, q_d, 0, D0, D, UNIT_D)
            before1 = before0
            if D1:
                before1 = row_before(p_q, row0, q_n, q_d, D0, D1, D, UNIT_D)
            qh0, ql0, qh1, ql1, e, bad = split_tile(
                q0, q1, before0, before1, scale * flip, D1, LIMIT
            )
            e_q = scale_exp - e
        if PRE:
            if OVERLAP:
                # the launch that split keys and values may still be running
                gdc_wait()
            # as `split.split_ahead` lays it out
            E = W.to(tl.pointer_type(tl.int32))
            region_k = key_rows * BN * (D0 + D1)
            region_v = key_rows * BN * (V0 + V1)
            LOW: tl.constexpr = 2 if MODE == 1 else 1
            WK = W + exponent_elements(key_rows) + row * BN * (D0 + D1)
            WV = W + exponent_elements(key_rows) + LOW * region_k + row * BN * (V0 + V1)
            p_e = E + 2 * row
            p_guard = E + 2 * key_rows + row
            # loaded early, used after the loop
            o_t = tl.arange(0, 256)
            guards = tl.load(p_guard + o_t, mask=o_t < tiles, other=2048)
            of_values = tl.load(p_guard + key_rows + o_t, mask=o_t < tiles, other=0)
            e_k = tl.load(p_e + lo // BN * 2)
            e_v = tl.load(p_e + lo // BN * 2 + 1)
        if MODE == 0 or (once is None and not CHAIN):
            m, z, acc0, acc1, bad = fold_range(
                qh0, ql0, qh1, ql1, f, e_q, m, z, acc0, acc1, bad, e_k, e_v,
                p_k, p_v, p_mask, WK, WV, p_e, region_k, region_v, lo, full, hi, n_k,
                k_n, k_d, v_n, v_d, mask_q, mask_k, row0, rows,
                MODE, PRE, FRESH, MASK, CAUSAL, BM, BN, D, D0, D1, DV, V0, V1,
                UNIT_D, SHIFT, LIMIT, ONE_LOOP, STAGES, TAIL_STAGES,
            )  # fmt: skip
        elif CHAIN:
            for c0 in tl.range(lo, hi, CHAIN, num_stages=1):
                end = tl.minimum(hi, c0 + CHAIN)
                if PRE:
                    e_k = tl.load(p_e + c0 // BN * 2)
                    e_v = tl.load(p_e + c0 // BN * 2 + 1)
                m1, z1, x1, y1, bad = fold_range(
                    qh0, ql0, qh1, ql1, f, e_q, tl.full([BM], -float("inf"), tl.float32),
                    tl.zeros_like(z), tl.zeros_like(acc0), tl.zeros_like(acc1), bad, e_k, e_v,
                    p_k, p_v, p_mask, WK, WV, p_e, region_k, region_v,
                    c0, tl.maximum(c0, tl.minimum(full, end)), end, n_k,
                    k_n, k_d, v_n, v_d, mask_q, mask_k, row0, rows,
                    MODE, PRE, FRESH, MASK, CAUSAL, BM, BN, D, D0, D1, DV, V0, V1,
                    UNIT_D, SHIFT, LIMIT, ONE_LOOP, STAGES, TAIL_STAGES,
                )  # fmt: skip
                m, z, acc0, acc1 = merged(m, z, acc0, acc1, m1, z1, x1, y1)
        else:
            # one pass: queries that arrive as a loop's argument stay in shared memory, not in
            # registers
            for _ in tl.range(0, once, num_stages=1):
                m, z, acc0, acc1, bad = fold_range(
                    qh0, ql0, qh1, ql1, f, e_q, m, z, acc0, acc1, bad, e_k, e_v,
                    p_k, p_v, p_mask, WK, WV, p_e, region_k, region_v, lo, full, hi, n_k,
                    k_n, k_d, v_n, v_d, mask_q, mask_k, row0, rows,
                    MODE, PRE, FRESH, MASK, CAUSAL, BM, BN, D, D0, D1, DV, V0, V1,
                    UNIT_D, SHIFT, LIMIT, ONE_LOOP, STAGES, TAIL_STAGES,
                )  # fmt: skip
                qh0 = tl.zeros_like(qh0)
                ql0 = tl.zeros_like(ql0)
                qh1 = tl.zeros_like(qh1)
                ql1 = tl.zeros_like(ql1)
        if PRE:
            # bit 0 of a guard: the tile failed; above it: the keys' exponent + 256
            least = guards >> 1
            verdict = (guards & 1) | of_values
            for t0 in range(256, tiles, 256):
                o_next = t0 + o_t
                guards = tl.load(p_guard + o_next, mask=o_next < tiles, other=2048)
                of_values = tl.load(p_guard + key_rows + o_next, mask=o_next < tiles, other=0)
                least = tl.minimum(least, guards >> 1)
                verdict = verdict | (guards & 1) | of_values
            over = e_q - (tl.min(least, 0) - 256) > FACTOR_LIMIT
            bad = bad | tl.max(verdict, 0) | over.to(tl.int32)
    offset = tl.full([], 0.0, tl.float32)
    if MODE != 0:  # noqa: SIM102 (one is decided at compile time, the other by the data)
        if bad != 0:
            m, z, acc0, acc1 = fold_exact(
                p_q, p_k, p_v, p_mask, lo, hi, n_k, q_n, q_d, k_n, k_d, v_n, v_d,
                mask_q, mask_k, row0, rows, scale * flip, scale_exp, power(-shift),
                MASK, CAUSAL, BM, BX, D, D0, D1, DV, V0, V1, UNIT_D,
            )  # fmt: skip
            offset = shift.to(tl.float32)
    return m, offset, tl.sum(z, 1), acc0, acc1


@triton.jit(do_not_specialize=INTEGERS)
def forward(
    Q, K, V, Mask, W, Out, LSE,
    heads: tl.int32, group: tl.int32, n_q: tl.int32, n_k: tl.int32, chunk: tl.int32,
    tiles: tl.int32, shift: tl.int32, scale_exp: tl.int32, scale: tl.float32, flip: tl.float32,
    q_b: tl.int64, q_h: tl.int64, q_n: tl.int64, q_d: tl.int64,
    k_b: tl.int64, k_h: tl.int64, k_n: tl.int64, k_d: tl.int64,
    v_b: tl.int64, v_h: tl.int64, v_n: tl.int64, v_d: tl.int64,
    mask_b: tl.int64, mask_h: tl.int64, mask_q: tl.int64, mask_k: tl.int64, batch: tl.int32,
    MODE: tl.constexpr, PRE: tl.constexpr, ONE_LOOP: tl.constexpr, FRESH: tl.constexpr,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, PARTIAL: tl.constexpr, FLIP: tl.constexpr,
    OVERLAP: tl.constexpr, UNIT: tl.constexpr, UNIT_D: tl.constexpr, UNIT_K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BX: tl.constexpr, CHAIN: tl.constexpr, SHIFT: tl.constexpr,
    STAGES: tl.constexpr, TAIL_STAGES: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    DV: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
):  # fmt: skip
    """Grid (query tiles x batch x heads, key partitions).

    Strides of batch, head and row come in units of UNIT elements (so that their divisibility is
    known without compiling per length); `chunk` keys a partition, a multiple of BN. `scale` and
    `scale_exp`: |scale| * log2(e) = scale * 2**scale_exp with scale in [1, 2) (MODE 0: scale
    alone). FLIP: queries are multiplied by `flip` (-1 for a negative scale, 0 for scale 0). CHAIN:
    a multiple of BN, after which keys are folded into a fresh state, merged later; 0: one state.
    """
    q_tiles = tl.cdiv(n_q, BM)
    if PARTIAL and OVERLAP:
        gdc_launch_dependents()
    pid = tl.program_id(0)
    i_part = tl.program_id(1)
    i_bh, i_m, i_b, i_h = place(pid, q_tiles, heads, CAUSAL)
    i_kv = i_h // group
    row0 = i_m * BM
    rows = n_q - row0
    q_n = q_n * UNIT
    k_n = k_n * UNIT
    v_n = v_n * UNIT
    p_q = Q + (i_b * q_b + i_h * q_h) * UNIT + row0 * q_n
    p_k = K + (i_b * k_b + i_kv * k_h) * UNIT
    p_v = V + (i_b * v_b + i_kv * v_h) * UNIT
    p_mask = Mask
    if MASK:
        if UNIT_K:
            mask_k = tl.full([], 1, tl.int64)
        p_mask = Mask + i_b * mask_b + i_h * mask_h + row0 * mask_q

    heads_k = heads // group
    key_rows = batch.to(tl.int64) * heads_k * tiles
    m, offset, z, acc0, acc1 = fold_rows(
        p_q, p_k, p_v, p_mask, W, key_rows, (i_b * heads_k + i_kv) * tiles, tiles,
        i_part * chunk, chunk, n_k, row0, rows, q_n, q_d, k_n, k_d, v_n, v_d, mask_q, mask_k,
        shift, scale_exp, scale, flip, tl.minimum(heads, 1),
        MODE, PRE, ONE_LOOP, FRESH, MASK, CAUSAL, FLIP, OVERLAP, UNIT_D, BM, BN, BX, CHAIN, SHIFT,
        STAGES, TAIL_STAGES, D, D0, D1, DV, V0, V1,
    )  # fmt: skip
    if PARTIAL:
        i_state = i_part.to(tl.int64) * batch * heads + i_bh
        store_rows(
            acc0, acc1, z, m, offset, Out, LSE, (i_state * n_q + row0) * DV, DV,
            i_state * n_q + row0, rows, BM, DV, V0, V1, True,
        )  # fmt: skip
    else:
        store_rows(
            acc0, acc1, z, m, offset, Out, LSE,
            ((i_b * n_q + row0) * heads + i_h) * DV, heads.to(tl.int64) * DV,
            i_bh.to(tl.int64) * n_q + row0, rows, BM, DV, V0, V1, False,
        )  # fmt: skip


@triton.jit
def sequence_of(Starts, slot, sequences, steps, BM: tl.constexpr):
    """The sequence whose programs `slot` is among; `steps` halvings reach any of `sequences`."""
    low = tl.zeros_like(slot)
    high = low + sequences
    for _ in tl.range(0, steps, num_stages=1):
        middle = (low + high) // 2
        first = tl.load(Starts + middle).to(tl.int64) // BM + middle
        below = first <= slot
        low = tl.where(below, middle, low)
        high = tl.where(below, high, tl.maximum(middle, low + 1))
    return low


@triton.jit
def bounds_of(Starts, i_sequence, tokens):
    """(first token, length) of a sequence, within the tokens that there are."""
    first = tl.minimum(tl.maximum(tl.load(Starts + i_sequence).to(tl.int64), 0), tokens)
    end = tl.minimum(tl.maximum(tl.load(Starts + i_sequence + 1).to(tl.int64), first), tokens)
    return first, (end - first).to(tl.int32)


@triton.jit(do_not_specialize=INTEGERS)
def varlen_forward(
    Q, K, V, StartsQ, StartsK, Out, LSE,
    heads: tl.int32, group: tl.int32, n_q: tl.int32, n_k: tl.int32, sequences: tl.int32,
    steps: tl.int32, slots: tl.int32, shift: tl.int32, scale_exp: tl.int32,
    scale: tl.float32, flip: tl.float32,
    q_h: tl.int64, q_n: tl.int64, q_d: tl.int64, k_h: tl.int64, k_n: tl.int64, k_d: tl.int64,
    v_h: tl.int64, v_n: tl.int64, v_d: tl.int64,
    MODE: tl.constexpr, ONE_LOOP: tl.constexpr, FRESH: tl.constexpr, CAUSAL: tl.constexpr,
    FLIP: tl.constexpr, UNIT: tl.constexpr, UNIT_D: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BX: tl.constexpr, CHAIN: tl.constexpr, SHIFT: tl.constexpr,
    STAGES: tl.constexpr, TAIL_STAGES: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    DV: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
):  # fmt: skip
    """The forward of packed sequences: a program folds all keys of one sequence for BM of its
    queries and one head; keys and values are split in the loop.

    Which sequence that is, the program finds itself: sequence s owns the programs from
    starts[s] // BM + s on, one more than its queries fill at most. So the grid needs the number of
    tokens and of sequences alone, and the host never reads a length.

    Grid (slots x heads). n_q and n_k: the tokens of all sequences; Out [n_q, heads, DV], LSE
    [heads, n_q]. `steps`: bits of `sequences`. The other arguments as in `forward.forward`.
    """
    pid = tl.program_id(0)
    slot = (pid % slots).to(tl.int64)
    i_h = (pid // slots).to(tl.int64)
    i_kv = i_h // group
    i_s = sequence_of(StartsQ, slot, sequences, steps, BM)
    first_q, len_q = bounds_of(StartsQ, i_s, n_q)
    first_k, len_k = bounds_of(StartsK, i_s, n_k)
    row0 = (slot - (first_q // BM + i_s)).to(tl.int32) * BM
    rows = len_q - row0
    if (rows <= 0) | (row0 < 0):  # of no sequence: behind the last one, or ahead of the first
        return
    q_n = q_n * UNIT
    k_n = k_n * UNIT
    v_n = v_n * UNIT
    p_q = Q + i_h * q_h * UNIT + (first_q + row0) * q_n
    p_k = K + i_kv * k_h * UNIT + first_k * k_n
    p_v = V + i_kv * v_h * UNIT + first_k * v_n
    m, offset, z, acc0, acc1 = fold_rows(
        p_q, p_k, p_v, Q, Q, 0, 0, 0, 0, len_k, len_k, row0, rows, q_n, q_d, k_n, k_d, v_n, v_d,
        0, 0, shift, scale_exp, scale, flip, None,
        MODE, False, ONE_LOOP, FRESH, 0, CAUSAL, FLIP, False, UNIT_D, BM, BN, BX, CHAIN, SHIFT,
        STAGES, TAIL_STAGES, D, D0, D1, DV, V0, V1,
    )  # fmt: skip
    token = first_q + row0
    store_rows(
        acc0, acc1, z, m, offset, Out, LSE, (token * heads + i_h) * DV,
        heads.to(tl.int64) * DV, i_h * n_q + token, rows, BM, DV, V0, V1, False,
    )  # fmt: skip
