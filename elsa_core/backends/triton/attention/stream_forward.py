"""Stream-K for single queries of heads that share a head of the keys, which are read once.

A tile is one query of all these heads. The fold and MODE are those of `forward.py`; the shares,
states and tickets those of `stream.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from elsa_core.backends.triton.attention import INTEGERS
from elsa_core.backends.triton.attention.forward import fold_rows
from elsa_core.backends.triton.attention.stream import (
    arrive,
    join_logs,
    join_outputs,
    joined_lse,
    owner,
    share_of,
    tile_of,
)
from elsa_core.backends.triton.shared.helpers import LN2, store_tile, wide


@triton.jit
def store_block(
    p, out, inside, step,
    DV: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Columns [START, START + WIDTH) of the rows that are there, `step` from row to row."""
    o_m = tl.arange(0, out.shape[0])
    o_v = START + tl.arange(0, WIDTH)
    store_tile(p + o_m[:, None] * step + o_v[None, :], out, inside, o_v < DV, True)


@triton.jit(do_not_specialize=INTEGERS)
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
    units, programs, program, unit, end = share_of(
        StartsQ, StartsK, lines, sequences, n_q, n_k, least, BN, CAUSAL
    )
    o_m = tl.arange(0, BM)
    i_s = tl.full([], 0, tl.int32)
    base = wide(0)
    until = wide(0)
    while unit < end:
        i_s, base, until, i_kv, row, first_k, seen, count, tile, stop = tile_of(
            StartsQ, StartsK, unit, end, i_s, base, until, lines, sequences, n_q, n_k, BN, CAUSAL
        )
        i_h = i_kv * group
        p_q = Q + (i_h * q_h + row * q_n) * UNIT
        p_lse = LSE + i_h * lse_h + row
        m, offset, z, acc0, acc1 = fold_rows(
            p_q, K + (i_kv * k_h + first_k * k_n) * UNIT, V + (i_kv * v_h + first_k * v_n) * UNIT,
            Q, Q, 0, 0, 0, (tile * BN).to(tl.int32), ((stop - tile) * BN).to(tl.int32), seen,
            0, group, q_h * UNIT, q_d, k_n * UNIT, k_d, v_n * UNIT, v_d, 0, 0,
            shift, scale_exp, scale, flip, tl.minimum(heads, 1),
            MODE, False, ONE_LOOP, FRESH, 0, False, FLIP, False, UNIT_D,
            BM, BN, BX, CHAIN, SHIFT, STAGES, TAIL_STAGES, D, D0, D1, DV, V0, V1,
        )  # fmt: skip
        m += offset
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
