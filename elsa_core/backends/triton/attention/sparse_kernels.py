"""The kernel of attention that leaves out tiles of negligible weights.

As `elsa_core.ops.sparse.record` says; scores are in base 2. MODE: 0 half, 1 three TF32 products for
each float32 product, 2 float32 FMA. SKIP: tiles are left out. SUMMARIES, ORDER, FROZEN: how the
maxima of rows are found.
"""

from __future__ import annotations

import triton
import triton.language as tl

from elsa_core.backends.triton.attention import INTEGERS
from elsa_core.backends.triton.attention.entmax_kernels import product
from elsa_core.backends.triton.shared.helpers import (
    LN2,
    add_scaled,
    apply_mask,
    load_part,
    store_tile,
    wide,
)

# Tiles whose maxima are found before these are frozen: the first one and the local one.
SETTLE: tl.constexpr = tl.constexpr(2)
# What sums may be under a frozen maximum; else the rows are folded again.
LEAST_SUM: tl.constexpr = tl.constexpr(2.0**-20)
MOST_SUM: tl.constexpr = tl.constexpr(2.0**60)


@triton.jit
def first_maxima(
    q, p_k, p_index, tiles, n_k, k_n, k_d, row0, scale,
    MODE: tl.constexpr, CAUSAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr,
):  # fmt: skip
    """The largest score of each row with one key of each tile that it sees whole. [BM]

    These are keys of the problem, so that no maximum begins above the true one.
    """
    o_m = tl.arange(0, BM)
    o_t = tl.arange(0, BN)
    o_d = tl.arange(0, D0)
    m = tl.full([BM], -float("inf"), tl.float32)
    for t0 in tl.range(0, tiles, BN, num_stages=1):
        here = t0 + o_t < tiles
        index = tl.load(p_index + t0 + o_t, mask=here, other=0).to(tl.int64)
        p = p_k + index[:, None] * k_n + o_d[None, :] * k_d
        k = tl.load(p, mask=here[:, None] & (o_d < D)[None, :], other=0.0)
        s = product(q, k.T, MODE) * scale
        seen = here[None, :]
        if CAUSAL:
            last = tl.minimum((t0 + o_t + 1) * BN, n_k)
            seen = seen & (last[None, :] <= (row0 + o_m + 1)[:, None])
        m = tl.maximum(m, tl.max(tl.where(seen, s, -float("inf")), 1))
    return m


@triton.jit
def fold_tiles(
    q, m, z, acc, left_out, p_k, p_v, p_mask, first, end, local, n_k, k_n, k_d, v_n, v_d,
    mask_q, mask_k, row0, rows, scale, threshold,
    MODE: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, SKIP: tl.constexpr,
    ORDER: tl.constexpr, FROZEN: tl.constexpr, SHIFT: tl.constexpr, STAGES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, D0: tl.constexpr, DV: tl.constexpr,
    V0: tl.constexpr, UNIT_D: tl.constexpr,
):  # fmt: skip
    """Positions [first, end) folded into the state (m, z, acc) of BM rows; weights carry 2**SHIFT.

    ORDER: at these positions are tile 0, then the local one, then the others. FROZEN: m stays as it
    is, and nothing is rescaled.
    """
    o_m = tl.arange(0, BM)
    o_n = tl.arange(0, BN)
    for position in tl.range(first, end, num_stages=STAGES):
        n0 = position
        if ORDER:
            moved = tl.where(position <= 1, position * local, position - 1)
            n0 = tl.where((local > 0) & (position <= local), moved, position)
        n0 = n0 * BN
        n0_wide = wide(n0)
        columns = n_k - n0
        k = load_part(p_k + n0_wide * k_n, o_n, columns, k_n, k_d, 0, D0, D, UNIT_D, True)
        s = product(q, k.T, MODE) * scale
        needed = columns < BN
        if CAUSAL:
            needed = needed | (n0 + BN > row0 + 1)
        if MASK:
            s = apply_mask(
                s, p_mask + n0_wide * mask_k, o_m, o_n, rows, columns, mask_q, mask_k, row0, n0,
                MASK, CAUSAL, True,
            )  # fmt: skip
        elif needed:
            s = apply_mask(
                s, p_mask, o_m, o_n, rows, columns, mask_q, mask_k, row0, n0, 0, CAUSAL, True
            )
        m_new = m
        kept = tl.full([], 1, tl.int32)
        if SKIP or not FROZEN:
            top = tl.max(s, 1)
            if not FROZEN:
                m_new = tl.maximum(m, top)
            if SKIP:
                # the difference: of large scores m_new + threshold would be m_new itself
                passed = top - tl.where(m_new == -float("inf"), 0.0, m_new)
                small = (passed <= threshold) | (o_m >= rows)
                kept = 1 - tl.min(small.to(tl.int32), 0)
        if kept != 0:
            m_safe = tl.where(m_new == -float("inf"), 0.0, m_new)
            p = tl.exp2(s - (m_safe - SHIFT)[:, None])
            # summed over the columns that one lane holds; lanes are added up once, at the end
            part = tl.sum(tl.reshape(p, [BM, BN // 8, 8]), 1)  # [BM, 8]
            v = load_part(p_v + n0_wide * v_n, o_n, columns, v_n, v_d, 0, V0, DV, UNIT_D, True)
            if FROZEN:
                z = z + part
                if MODE == 0:
                    acc = tl.dot(p.to(v.dtype), v, acc)
                else:
                    # by name: written with + the compiler would let the product accumulate
                    acc = tl.fma(product(p, v, MODE), 1.0, acc)
            else:
                a = tl.exp2(m - m_safe)
                z = z * a[:, None] + part
                if MODE == 0:
                    acc = tl.dot(p.to(v.dtype), v, acc * a[:, None])
                else:
                    acc = add_scaled(acc, a, product(p, v, MODE))
                m = m_new
        left_out += 1 - kept
    return m, z, acc, left_out


@triton.jit(do_not_specialize=INTEGERS)
def forward(
    Q, K, V, Mask, Index, Out, LSE, Counts,
    heads: tl.int32, group: tl.int32, n_q: tl.int32, n_k: tl.int32, tiles: tl.int32,
    scale: tl.float32, threshold: tl.float32,
    q_b: tl.int64, q_h: tl.int64, q_n: tl.int64, q_d: tl.int64,
    k_b: tl.int64, k_h: tl.int64, k_n: tl.int64, k_d: tl.int64,
    v_b: tl.int64, v_h: tl.int64, v_n: tl.int64, v_d: tl.int64,
    mask_b: tl.int64, mask_h: tl.int64, mask_q: tl.int64, mask_k: tl.int64,
    MODE: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, SKIP: tl.constexpr,
    SUMMARIES: tl.constexpr, ORDER: tl.constexpr, FROZEN: tl.constexpr, SHIFT: tl.constexpr,
    STAGES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STEP: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, DV: tl.constexpr, V0: tl.constexpr, UNIT_D: tl.constexpr,
):  # fmt: skip
    """Grid (query tiles x batch x heads). Index: [B, Hkv, tiles], the key of each tile that stands
    for it. Counts: int64 [B x heads, 5], added to by atomics: sums of integers, whose order changes
    nothing. `scale` holds log2(e).
    """
    q_b, q_h, q_n = q_b * STEP, q_h * STEP, q_n * STEP
    k_b, k_h, k_n = k_b * STEP, k_h * STEP, k_n * STEP
    v_b, v_h, v_n = v_b * STEP, v_h * STEP, v_n * STEP
    q_tiles = tl.cdiv(n_q, BM)
    i_bh = tl.program_id(0) // q_tiles
    i_m = tl.program_id(0) - i_bh * q_tiles
    if CAUSAL:
        i_m = q_tiles - 1 - i_m  # the longest rows first
    row0 = i_m * BM
    rows = n_q - row0
    i_b = (i_bh // heads).to(tl.int64)
    i_h = (i_bh % heads).to(tl.int64)
    i_kv = i_h // group
    o_m = tl.arange(0, BM)
    p_q = Q + i_b * q_b + i_h * q_h + wide(row0) * q_n
    p_k = K + i_b * k_b + i_kv * k_h
    p_v = V + i_b * v_b + i_kv * v_h
    p_mask = Mask
    if MASK:
        p_mask = Mask + i_b * mask_b + i_h * mask_h + wide(row0) * mask_q
    q = load_part(p_q, o_m, rows, q_n, q_d, 0, D0, D, UNIT_D, True)
    seen = tiles
    local = ((row0 + BM // 2).to(tl.int64) * tiles // n_q).to(tl.int32)
    if CAUSAL:
        seen = tl.minimum(tiles, tl.cdiv(row0 + BM, BN))
        local = seen - 1
    local = tl.minimum(local, seen - 1)
    settled = seen
    if FROZEN:
        settled = tl.minimum(seen, SETTLE)

    m = tl.full([BM], -float("inf"), tl.float32)
    z = tl.zeros([BM, 8], tl.float32)
    acc = tl.zeros([BM, V0], tl.float32)
    left_out = tl.full([], 0, tl.int32)
    if SUMMARIES:
        p_index = Index + (i_b * (heads // group) + i_kv) * tiles
        m = first_maxima(
            q, p_k, p_index, tiles, n_k, k_n, k_d, row0, scale, MODE, CAUSAL, BM, BN, D, D0
        )
    m, z, acc, left_out = fold_tiles(
        q, m, z, acc, left_out, p_k, p_v, p_mask, 0, settled, local, n_k, k_n, k_d, v_n, v_d,
        mask_q, mask_k, row0, rows, scale, threshold,
        MODE, MASK, CAUSAL, SKIP, ORDER, False, SHIFT, STAGES, BM, BN, D, D0, DV, V0, UNIT_D,
    )  # fmt: skip
    rescaled = settled - left_out
    again = tl.full([], 0, tl.int32)
    folded = seen
    if FROZEN:
        m, z, acc, left_out = fold_tiles(
            q, m, z, acc, left_out, p_k, p_v, p_mask, settled, seen, local, n_k, k_n, k_d, v_n, v_d,
            mask_q, mask_k, row0, rows, scale, threshold,
            MODE, MASK, CAUSAL, SKIP, ORDER, True, SHIFT, STAGES, BM, BN, D, D0, DV, V0, UNIT_D,
        )  # fmt: skip
        if settled < seen:
            # whether some row passed its frozen maximum by more than the weights' range allows
            total = tl.sum(z, 1)
            held = (total >= LEAST_SUM) & (total <= MOST_SUM) & (m > -float("inf"))
            finite = tl.min((tl.abs(acc) < float("inf")).to(tl.int32), 1) != 0  # false of NaN
            again = tl.max((((held & finite) == 0) & (o_m < rows)).to(tl.int32), 0)
        if again != 0:
            before = left_out
            m, z, acc, left_out = fold_tiles(
                q, tl.full([BM], -float("inf"), tl.float32), tl.zeros([BM, 8], tl.float32),
                tl.zeros([BM, V0], tl.float32), left_out, p_k, p_v, p_mask, 0, seen, local,
                n_k, k_n, k_d, v_n, v_d, mask_q, mask_k, row0, rows, scale, threshold,
                MODE, MASK, CAUSAL, SKIP, False, False, SHIFT, STAGES,
                BM, BN, D, D0, DV, V0, UNIT_D,
            )  # fmt: skip
            folded = folded + seen
            settled = settled + seen
            rescaled = rescaled + seen - (left_out - before)
    maxima = folded
    if FROZEN and not SKIP:
        maxima = settled

    p_counts = Counts + i_bh.to(tl.int64) * 5
    tl.atomic_add(p_counts, folded.to(tl.int64), sem="relaxed")
    tl.atomic_add(p_counts + 1, left_out.to(tl.int64), sem="relaxed")
    tl.atomic_add(p_counts + 2, maxima.to(tl.int64), sem="relaxed")
    tl.atomic_add(p_counts + 3, rescaled.to(tl.int64), sem="relaxed")
    tl.atomic_add(p_counts + 4, again.to(tl.int64), sem="relaxed")
    total = tl.sum(z, 1)
    empty = total == 0.0
    lse = tl.where(empty, -float("inf"), (m - SHIFT + tl.log2(total)) * LN2)
    tl.store(LSE + wide(i_bh) * n_q + row0 + o_m, lse, mask=o_m < rows)
    out = acc * (1.0 / tl.where(empty, 1.0, total))[:, None]
    o_v = tl.arange(0, V0)
    p_out = Out + ((i_b * n_q + row0) * heads + i_h) * DV
    p_out = p_out + o_m[:, None] * (heads.to(tl.int64) * DV) + o_v[None, :]
    store_tile(p_out, out, o_m < rows, o_v < DV, V0 > DV)
