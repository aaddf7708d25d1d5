"""Stream-K for single queries: a query row is a tile of its own, folded with float32 FMA.

The fold is that of `decode.py`; the shares, states and tickets are those of `stream.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from elsa_core.backends.triton.attention import INTEGERS
from elsa_core.backends.triton.attention.decode import fold_row
from elsa_core.backends.triton.attention.stream import (
    arrive,
    join_logs,
    join_outputs,
    joined_lse,
    owner,
    share_of,
    tile_of,
)
from elsa_core.backends.triton.shared.helpers import LN2, wide


@triton.jit(do_not_specialize=INTEGERS)
def stream_decode(
    Q, K, V, StartsQ, StartsK, PO, PL, Tickets, Out, LSE,
    heads: tl.int32, group: tl.int32, n_q: tl.int32, n_k: tl.int32, sequences: tl.int32,
    least: tl.int32, shift: tl.int32, scale_exp: tl.int32, scale: tl.float32, flip: tl.float32,
    lse_h: tl.int64,
    q_b: tl.int64, q_h: tl.int64, q_n: tl.int64, q_d: tl.int64,
    k_b: tl.int64, k_h: tl.int64, k_n: tl.int64, k_d: tl.int64,
    v_b: tl.int64, v_h: tl.int64, v_n: tl.int64, v_d: tl.int64,
    CAUSAL: tl.constexpr, UNIT: tl.constexpr, UNIT_D: tl.constexpr,
    BN: tl.constexpr, STAGES: tl.constexpr, PARTS: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    """Grid (programs). Out [tokens, heads, DV], LSE with `lse_h` from head to head.

    StartsQ and StartsK are the cumulative lengths of `sequences`, n_q and n_k the tokens of all.
    `least`: units that a program gets, if there are as many. Strides as in `forward.forward`, those
    of the batch unused; PO, PL and Tickets as `stream.py` says.
    """
    units, programs, program, unit, end = share_of(
        StartsQ, StartsK, heads, sequences, n_q, n_k, least, BN, CAUSAL
    )
    o_v = tl.arange(0, VP)
    i_s = tl.full([], 0, tl.int32)
    base = wide(0)
    until = wide(0)
    while unit < end:
        i_s, base, until, i_h, row, first_k, seen, count, tile, stop = tile_of(
            StartsQ, StartsK, unit, end, i_s, base, until, heads, sequences, n_q, n_k, BN, CAUSAL
        )
        i_kv = i_h // group
        p_q = Q + (i_h * q_h + row * q_n) * UNIT
        out, log = fold_row(
            p_q, K + (i_kv * k_h + first_k * k_n) * UNIT,
            V + (i_kv * v_h + first_k * v_n) * UNIT, Q,
            (tile * BN).to(tl.int32), tl.minimum((stop * BN).to(tl.int32), seen), seen,
            q_d, k_n * UNIT, k_d, v_n * UNIT, v_d, 0, shift, scale_exp, scale * flip,
            0, UNIT_D, BN, STAGES, D, DP, DV, VP,
        )  # fmt: skip
        p_out = Out + (row * heads + i_h) * DV + o_v
        p_lse = LSE + i_h * lse_h + row
        if stop - tile == count:
            tl.store(p_out, out.to(Out.dtype.element_ty), mask=o_v < DV)
            tl.store(p_lse, log * LN2)
        else:
            slot = 2 * program + (tile == 0).to(tl.int64)
            tl.store(PO + slot * DV + o_v, out, mask=o_v < DV)
            tl.store(PL + slot, log)
            first = owner(unit - tile, units, programs)
            last = owner(unit - tile + count - 1, units, programs)
            if arrive(Tickets, first) == last - first:
                n = (last - first + 1).to(tl.int32)
                m, s = join_logs(PL, first, n, 1, PARTS)
                joined = join_outputs(PO, PL, first, n, m, s, 1, PARTS, DV, 0, VP)
                mask = (o_v < DV)[None, :]
                tl.store(p_out[None, :], joined.to(Out.dtype.element_ty), mask=mask)
                tl.store(p_lse + tl.arange(0, 1), joined_lse(m, s))
                tl.store(Tickets + first, 0)
        unit += stop - tile
