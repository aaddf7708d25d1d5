"""Stream-K for single queries: a query row is a tile of its own, folded with float32 FMA.

The fold is that of `decode.py`; the shares, states and tickets are those of `stream.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from elsa_core.backends.triton.attention.decode import fold_keys
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
from elsa_core.backends.triton.shared.helpers import LN2, exponent, power, times_power, wide

RUNTIME_INTEGERS = [
    "heads", "group", "n_q", "n_k", "sequences", "least", "shift", "scale_exp", "lse_h",
    "q_b", "q_h", "q_n", "q_d", "k_b", "k_h", "k_n", "k_d", "v_b", "v_h", "v_n", "v_d",
]  # fmt: skip


@triton.jit
def fold_row(
    p_q, p_k, p_v, lo, hi, n_k, q_d, k_n, k_d, v_n, v_d, shift, scale_exp, scale,
    UNIT_D: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    """The keys [lo, hi) of n_k folded for one query: the output [VP] and base 2 log-sum-exp."""
    o_d = tl.arange(0, DP)
    q = tl.load(p_q + o_d * q_d, mask=o_d < D, other=0.0).to(tl.float32)
    # the scaled query stays below 2**-9: its product with any finite key is finite
    e_q = exponent(tl.max(tl.abs(q), 0)) - 24
    q = times_power(q, e_q) * scale
    e_s = tl.minimum(tl.maximum(scale_exp - e_q, -252), 254)
    # weights carry 2**-shift <= 1 / n_k, so that no sum of values overflows
    weight = power(-shift)
    full = lo + tl.maximum(hi - lo, 0) // BN * BN
    m = tl.full([], -float("inf"), tl.float32)
    z = tl.zeros([BN], tl.float32)
    acc = tl.zeros([BN, VP], tl.float32)
    for n0 in tl.range(lo, full, BN, num_stages=STAGES):
        m, z, acc = fold_keys(
            q, e_s, m, z, acc, p_k, p_v, p_k, n0, n_k, k_n, k_d, v_n, v_d, 0, weight,
            0, False, UNIT_D, BN, D, DP, DV, VP,
        )  # fmt: skip
    for n0 in tl.range(full, hi, BN, num_stages=1):
        m, z, acc = fold_keys(
            q, e_s, m, z, acc, p_k, p_v, p_k, n0, n_k, k_n, k_d, v_n, v_d, 0, weight,
            0, True, UNIT_D, BN, D, DP, DV, VP,
        )  # fmt: skip
    total = tl.sum(z, 0)
    empty = total == 0.0
    out = tl.sum(acc, 0) / (tl.where(empty, 1.0, total) * weight)
    return out, tl.where(empty, -float("inf"), m + tl.log2(total))


@triton.jit(do_not_specialize=RUNTIME_INTEGERS)
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
    units = all_units(StartsQ, StartsK, sequences, n_q, n_k, BN, CAUSAL) * heads
    programs = tl.maximum(tl.minimum(wide(tl.num_programs(0)), units // least), 1)
    program = wide(tl.program_id(0))
    unit = tl.minimum(first_unit(program, units, programs), units)
    end = tl.minimum(first_unit(program + 1, units, programs), units)
    o_v = tl.arange(0, VP)
    i_s = tl.full([], 0, tl.int32)
    base = wide(0)
    until = wide(0)
    while unit < end:
        if unit >= until:
            i_s, base = sequence_at(StartsQ, StartsK, unit, sequences, heads, n_q, n_k, BN, CAUSAL)
        first_q, len_q = bounds_of(StartsQ, i_s, n_q)
        first_k, len_k = bounds_of(StartsK, i_s, n_k)
        tokens, tiles, of_head = shape_of(len_q, len_k, BN, CAUSAL)
        until = base + of_head * heads
        i_h = (unit - base) // of_head
        within = unit - base - i_h * of_head
        i_q = query_of(within, tokens, tiles, BN, CAUSAL)
        start = units_before(i_q, tiles, BN, CAUSAL)
        count = key_tiles_of(i_q, tiles, BN, CAUSAL)
        tile = within - start
        stop = tl.minimum(count, tile + end - unit)
        seen = len_k.to(tl.int32)
        if CAUSAL:
            seen = tl.minimum(seen, i_q.to(tl.int32) + 1)
        i_kv = i_h // group
        row = first_q + i_q
        p_q = Q + (i_h * q_h + row * q_n) * UNIT
        out, log = fold_row(
            p_q, K + (i_kv * k_h + first_k * k_n) * UNIT,
            V + (i_kv * v_h + first_k * v_n) * UNIT,
            (tile * BN).to(tl.int32), tl.minimum((stop * BN).to(tl.int32), seen), seen,
            q_d, k_n * UNIT, k_d, v_n * UNIT, v_d, shift, scale_exp, scale * flip,
            UNIT_D, BN, STAGES, D, DP, DV, VP,
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
