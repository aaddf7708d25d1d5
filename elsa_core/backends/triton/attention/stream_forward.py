"""Stream-K for single queries of heads that share a head of the keys, which are read once.

A tile is one query of all these heads. The fold and MODE are those of `forward.py`; the shares,
states and tickets those of `stream.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from elsa_core.backends.triton.attention.exact import fold_exact
from elsa_core.backends.triton.attention.fold import fold_range, key_tiles, merged, split_tile
from elsa_core.backends.triton.attention.stream import (
    all_units,
    arrive,
    first_unit,
    join_logs,
    join_outputs,
    joined_lse,
    key_tiles_of,
    owner,
    query_of,
    sequence_at,
    shape_of,
    units_before,
)
from elsa_core.backends.triton.attention.varlen_forward import bounds_of
from elsa_core.backends.triton.shared.helpers import (
    LN2,
    SINGLE_LIMIT,
    SPLIT_LIMIT,
    load_part,
    power,
    row_before,
    store_tile,
    wide,
)

RUNTIME_INTEGERS = [
    "heads", "group", "n_q", "n_k", "sequences", "least", "shift", "scale_exp", "lse_h",
    "q_b", "q_h", "q_n", "q_d", "k_b", "k_h", "k_n", "k_d", "v_b", "v_h", "v_n", "v_d",
]  # fmt: skip


@triton.jit
def fold_share(
    p_q, p_k, p_v, lo, chunk, n_k, q_m, q_d, k_n, k_d, v_n, v_d,
    rows, shift, scale_exp, scale, flip, once,
    MODE: tl.constexpr, ONE_LOOP: tl.constexpr, FRESH: tl.constexpr,
    FLIP: tl.constexpr, UNIT_D: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BX: tl.constexpr, CHAIN: tl.constexpr, SHIFT: tl.constexpr,
    STAGES: tl.constexpr, TAIL_STAGES: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    DV: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
):  # fmt: skip
    """The keys [lo, lo + chunk) of n_k folded for one query tile: its sums z [BM], acc0 and acc1,
    and the base 2 reference m that they are relative to.

    once: 1, see `forward.forward`.
    """
    lo, full, hi = key_tiles(p_q, lo, chunk, n_k, 0, BM, BN, False, 0)
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
        no_region = 0
        no_mask = 0
        q0 = load_part(p_q, o_m, rows, q_m, q_d, 0, D0, D, UNIT_D, True)
        q1 = q0
        if D1:
            q1 = load_part(p_q, o_m, rows, q_m, q_d, D0, D1, D, UNIT_D, True)
        if MODE == 0:
            if FLIP:
                q0 = (q0.to(tl.float32) * flip).to(q0.dtype)
                q1 = (q1.to(tl.float32) * flip).to(q1.dtype)
            qh0 = q0
            ql0 = q0
            qh1 = q1
            ql1 = q1
        else:
            before0 = row_before(p_q, 0, q_m, q_d, 0, D0, D, UNIT_D)
            before1 = before0
            if D1:
                before1 = row_before(p_q, 0, q_m, q_d, D0, D1, D, UNIT_D)
            qh0, ql0, qh1, ql1, e, bad = split_tile(
                q0, q1, before0, before1, scale * flip, D1, LIMIT
            )
            e_q = scale_exp - e
        if MODE == 0:
            m, z, acc0, acc1, bad = fold_range(
                qh0, ql0, qh1, ql1, f, e_q, m, z, acc0, acc1, bad, e_k, e_v,
                p_k, p_v, p_q, p_q, p_q, p_q, no_region, no_region, p_q, lo, full, hi, n_k,
                k_n, k_d, v_n, v_d, no_mask, no_mask, 0, rows, None, 0,
                MODE, False, FRESH, 0, False, BM, BN, D, D0, D1, DV, V0, V1,
                UNIT_D, SHIFT, LIMIT, ONE_LOOP, STAGES, TAIL_STAGES, 0,
            )  # fmt: skip
        elif CHAIN:
            for c0 in tl.range(lo, hi, CHAIN, num_stages=1):
                stop = tl.minimum(hi, c0 + CHAIN)
                m1, z1, x1, y1, bad = fold_range(
                    qh0, ql0, qh1, ql1, f, e_q, tl.full([BM], -float("inf"), tl.float32),
                    tl.zeros_like(z), tl.zeros_like(acc0), tl.zeros_like(acc1), bad, e_k, e_v,
                    p_k, p_v, p_q, p_q, p_q, p_q, no_region, no_region, p_q,
                    c0, tl.maximum(c0, tl.minimum(full, stop)), stop, n_k,
                    k_n, k_d, v_n, v_d, no_mask, no_mask, 0, rows, None, 0,
                    MODE, False, FRESH, 0, False, BM, BN, D, D0, D1, DV, V0, V1,
                    UNIT_D, SHIFT, LIMIT, ONE_LOOP, STAGES, TAIL_STAGES, 0,
                )  # fmt: skip
                m, z, acc0, acc1 = merged(m, z, acc0, acc1, m1, z1, x1, y1)
        else:
            # one pass: queries that arrive as a loop's argument stay in shared memory, not in
            # registers
            for _ in tl.range(0, once, num_stages=1):
                m, z, acc0, acc1, bad = fold_range(
                    qh0, ql0, qh1, ql1, f, e_q, m, z, acc0, acc1, bad, e_k, e_v,
                    p_k, p_v, p_q, p_q, p_q, p_q, no_region, no_region, p_q, lo, full, hi, n_k,
                    k_n, k_d, v_n, v_d, no_mask, no_mask, 0, rows, None, 0,
                    MODE, False, FRESH, 0, False, BM, BN, D, D0, D1, DV, V0, V1,
                    UNIT_D, SHIFT, LIMIT, ONE_LOOP, STAGES, TAIL_STAGES, 0,
                )  # fmt: skip
                qh0 = tl.zeros_like(qh0)
                ql0 = tl.zeros_like(ql0)
                qh1 = tl.zeros_like(qh1)
                ql1 = tl.zeros_like(ql1)
    if MODE != 0:  # noqa: SIM102 (one is decided at compile time, the other by the data)
        if bad != 0:
            m, z, acc0, acc1 = fold_exact(
                p_q, p_k, p_v, p_q, p_q, lo, hi, n_k, q_m, q_d, k_n, k_d, v_n, v_d,
                0, 0, 0, rows, scale * flip, scale_exp, power(-shift), None, 0,
                0, False, BM, BX, D, D0, D1, DV, V0, V1, UNIT_D, BN, 0,
            )  # fmt: skip
            m += shift.to(tl.float32)
    return m, tl.sum(z, 1), acc0, acc1


@triton.jit
def store_block(
    p, out, inside, step,
    DV: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Columns [START, START + WIDTH) of the rows that are there, `step` from row to row."""
    o_m = tl.arange(0, out.shape[0])
    o_v = START + tl.arange(0, WIDTH)
    store_tile(p + o_m[:, None] * step + o_v[None, :], out, inside, o_v < DV, True)


@triton.jit(do_not_specialize=RUNTIME_INTEGERS)
def stream_forward(
    Q, K, V, StartsQ, StartsK, PO, PL, Tickets, Out, LSE,
    heads: tl.int32, group: tl.int32, n_q: tl.int32, n_k: tl.int32, sequences: tl.int32,
    least: tl.int32, shift: tl.int32, scale_exp: tl.int32,
    scale: tl.float32, flip: tl.float32, lse_h: tl.int64,
    q_b: tl.int64, q_h: tl.int64, q_n: tl.int64, q_d: tl.int64,
    k_b: tl.int64, k_h: tl.int64, k_n: tl.int64, k_d: tl.int64,
    v_b: tl.int64, v_h: tl.int64, v_n: tl.int64, v_d: tl.int64,
    MODE: tl.constexpr, ONE_LOOP: tl.constexpr, FRESH: tl.constexpr,
    CAUSAL: tl.constexpr, FLIP: tl.constexpr,
    UNIT: tl.constexpr, UNIT_D: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BX: tl.constexpr, CHAIN: tl.constexpr, SHIFT: tl.constexpr,
    STAGES: tl.constexpr, TAIL_STAGES: tl.constexpr, PARTS: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    DV: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
):  # fmt: skip
    """Grid (programs). `heads`: those of the queries, Out and LSE; `group` of them share a head of
    the keys and are the rows of a tile. The other arguments as in
    `stream_decode.stream_decode` and `forward.forward`.
    """
    lines = heads // group
    units = all_units(StartsQ, StartsK, sequences, n_q, n_k, BN, CAUSAL) * lines
    programs = tl.maximum(tl.minimum(wide(tl.num_programs(0)), units // least), 1)
    program = wide(tl.program_id(0))
    unit = tl.minimum(first_unit(program, units, programs), units)
    end = tl.minimum(first_unit(program + 1, units, programs), units)
    o_m = tl.arange(0, BM)
    i_s = tl.full([], 0, tl.int32)
    base = wide(0)
    until = wide(0)
    while unit < end:
        if unit >= until:
            i_s, base = sequence_at(StartsQ, StartsK, unit, sequences, lines, n_q, n_k, BN, CAUSAL)
        first_q, len_q = bounds_of(StartsQ, i_s, n_q)
        first_k, len_k = bounds_of(StartsK, i_s, n_k)
        tokens, tiles, of_head = shape_of(len_q, len_k, BN, CAUSAL)
        until = base + of_head * lines
        i_kv = (unit - base) // of_head
        i_h = i_kv * group
        within = unit - base - i_kv * of_head
        i_q = query_of(within, tokens, tiles, BN, CAUSAL)
        count = key_tiles_of(i_q, tiles, BN, CAUSAL)
        tile = within - units_before(i_q, tiles, BN, CAUSAL)
        stop = tl.minimum(count, tile + end - unit)
        seen = wide(len_k).to(tl.int32)
        if CAUSAL:
            seen = tl.minimum(seen, i_q.to(tl.int32) + 1)
        row = first_q + i_q
        p_q = Q + (i_h * q_h + row * q_n) * UNIT
        p_lse = LSE + i_h * lse_h + row
        m, z, acc0, acc1 = fold_share(
            p_q, K + (i_kv * k_h + first_k * k_n) * UNIT,
            V + (i_kv * v_h + first_k * v_n) * UNIT,
            (tile * BN).to(tl.int32), ((stop - tile) * BN).to(tl.int32), seen,
            q_h * UNIT, q_d, k_n * UNIT, k_d, v_n * UNIT, v_d,
            group, shift, scale_exp, scale, flip, tl.minimum(heads, 1),
            MODE, ONE_LOOP, FRESH, FLIP, UNIT_D,
            BM, BN, BX, CHAIN, SHIFT, STAGES, TAIL_STAGES, D, D0, D1, DV, V0, V1,
        )  # fmt: skip
        empty = z == 0.0
        inverse = (1.0 / tl.where(empty, 1.0, z))[:, None]
        log = tl.where(empty, -float("inf"), m + tl.log2(z))
        p_out = Out + (row * heads + i_h) * DV
        inside = o_m < group
        if stop - tile == count:
            store_block(p_out, acc0 * inverse, inside, DV, DV, 0, V0)
            if V1:
                store_block(p_out, acc1 * inverse, inside, DV, DV, V0, V1)
            tl.store(p_lse + o_m * lse_h, log * LN2, mask=inside)
        else:
            slot = (2 * program + (tile == 0).to(tl.int64)) * BM
            store_block(PO + slot * DV, acc0 * inverse, inside, DV, DV, 0, V0)
            if V1:
                store_block(PO + slot * DV, acc1 * inverse, inside, DV, DV, V0, V1)
            tl.store(PL + slot + o_m, log, mask=inside)
            first = owner(unit - tile, units, programs)
            last = owner(unit - tile + count - 1, units, programs)
            if arrive(Tickets, first) == last - first:
                n = (last - first + 1).to(tl.int32)
                m, s = join_logs(PL, first, n, BM, PARTS)
                out = join_outputs(PO, PL, first, n, m, s, BM, PARTS, DV, 0, V0)
                store_block(p_out, out, inside, DV, DV, 0, V0)
                if V1:
                    out1 = join_outputs(PO, PL, first, n, m, s, BM, PARTS, DV, V0, V1)
                    store_block(p_out, out1, inside, DV, DV, V0, V1)
                tl.store(p_lse + o_m * lse_h, joined_lse(m, s), mask=inside)
                tl.store(Tickets + first, 0)
        unit += stop - tile
