"""Stream-K: every program gets an equal share of key tiles, whatever query tiles they belong to.

A query tile is a query of one head, or of all heads that share a head of the keys. A unit is one
tile of keys for one query tile. Units lie in one line: sequence, head, query, key tile. With n
units and P programs, program p folds the units from p * n // P to (p + 1) * n // P. A query tile
whose keys one program folds alone is written at once. One that is cut keeps a state for each of its
programs, and the last program to arrive joins them.

State: outputs [rows, DV] and base 2 log-sum-exp [rows], float32, as `merge.merge_states` has them.
A program cuts two query tiles at most, the one it ends and the one it begins: its states are 2 p
and 2 p + 1. A ticket counts those who have finished; that of a query tile is that of its first
program, which begins no other one that is cut. No program waits for another, so a grid of more than
the GPU holds at once is right as well. States are joined in the order of their keys, whichever
program does it: equal calls give equal bits.

Memory order: each thread stores its part of a state. The barrier, and an addition to the ticket
that releases and acquires at the scope of the GPU, put these stores before whatever the last
arriver loads behind its own barrier. It sets the ticket back to 0 for the next call.

Source: LeanAttention (arXiv 2405.10480), Algorithm 4; ELSA, Eq. 4 (the join).
"""

from __future__ import annotations

import triton
import triton.language as tl

from elsa_core.backends.triton.attention import INTEGERS
from elsa_core.backends.triton.attention.decode import fold_row
from elsa_core.backends.triton.attention.forward import bounds_of, fold_rows
from elsa_core.backends.triton.shared.helpers import LN2, store_tile, wide

# sequences whose lengths a program reads at once
SEQUENCES: tl.constexpr = tl.constexpr(128)


@triton.jit
def owner(unit, units, programs):
    """The program whose share holds a unit: the last one that begins at it or before."""
    return ((unit + 1) * programs - 1) // units


@triton.jit
def units_before(i, tiles, BN: tl.constexpr, CAUSAL: tl.constexpr):
    """Units of the queries 0 to i - 1 of one head: the sum of their key tiles. int64.

    Causal ones grow by 1 in BN queries, until they are `tiles`.
    """
    if CAUSAL:
        grown = tl.minimum(i, tiles * BN)
        rows = grown // BN
        below = BN * (rows * (rows + 1) // 2) + grown % BN * (rows + 1)
        return below + (i - grown) * tiles
    return i * tiles


@triton.jit
def query_of(unit, count, tiles, BN: tl.constexpr, CAUSAL: tl.constexpr):
    """The query, of `count` of one head, that holds a unit of that head."""
    if CAUSAL:
        low = tl.zeros_like(unit)
        high = low + count
        while high - low > 1:
            middle = (low + high) // 2
            below = units_before(middle, tiles, BN, True) <= unit
            low = tl.where(below, middle, low)
            high = tl.where(below, high, middle)
        return low
    return unit // tiles


@triton.jit
def shape_of(StartsQ, StartsK, i, n_q, n_k, BN: tl.constexpr, CAUSAL: tl.constexpr):
    """Of sequences i: first query, queries, first key, keys, and key tiles and units of one head,
    int64. No key: one tile of none, so that a program writes the zeros.
    """
    first_q, len_q = bounds_of(StartsQ, i, n_q)
    first_k, len_k = bounds_of(StartsK, i, n_k)
    count = len_q.to(tl.int64)
    tiles = tl.maximum((len_k.to(tl.int64) + BN - 1) // BN, 1)
    return first_q, count, first_k, len_k, tiles, units_before(count, tiles, BN, CAUSAL)


@triton.jit
def units_of(
    StartsQ, StartsK, i, sequences, n_q, n_k, BN: tl.constexpr, CAUSAL: tl.constexpr
):  # fmt: skip
    """Units of one head of sequences i; 0 behind the last one."""
    inside = tl.minimum(i, sequences - 1)
    _, _, _, _, _, units = shape_of(StartsQ, StartsK, inside, n_q, n_k, BN, CAUSAL)
    return tl.where(i < sequences, units, 0)


@triton.jit
def sequence_at(
    StartsQ, StartsK, unit, sequences, heads, n_q, n_k, BN: tl.constexpr, CAUSAL: tl.constexpr
):  # fmt: skip
    """(sequence, its first unit): the one that holds a unit of the call."""
    before = wide(0)
    base = wide(0)
    found = tl.full([], 0, tl.int32)
    for s0 in tl.range(0, sequences, SEQUENCES, num_stages=1):
        i = s0 + tl.arange(0, SEQUENCES)
        units = units_of(StartsQ, StartsK, i, sequences, n_q, n_k, BN, CAUSAL) * heads
        passed = (before + tl.cumsum(units, 0) <= unit) & (i < sequences)
        found += tl.sum(passed.to(tl.int32), 0)
        base += tl.sum(tl.where(passed, units, 0), 0)
        before += tl.sum(units, 0)
    return found, base


@triton.jit
def share_of(StartsQ, StartsK, lines, sequences, n_q, n_k, least, BN: tl.constexpr,
             CAUSAL: tl.constexpr):  # fmt: skip
    """(units, programs with a share, program, its first unit, and that behind its last) of a call
    whose sequences have `lines` heads each; `least` units a program, if there are as many.
    """
    units = wide(0)
    for s0 in tl.range(0, sequences, SEQUENCES, num_stages=1):
        i = s0 + tl.arange(0, SEQUENCES)
        units += tl.sum(units_of(StartsQ, StartsK, i, sequences, n_q, n_k, BN, CAUSAL), 0)
    units *= lines
    programs = tl.maximum(tl.minimum(wide(tl.num_programs(0)), units // least), 1)
    program = wide(tl.program_id(0))
    unit = tl.minimum(program * units // programs, units)
    end = tl.minimum((program + 1) * units // programs, units)
    return units, programs, program, unit, end


@triton.jit
def tile_of(
    StartsQ, StartsK, unit, end, i_s, base, until, lines, sequences, n_q, n_k,
    BN: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """The query tile that holds a unit of a share that ends at `end`.

    i_s, base, until: the sequence of the unit before, its first unit, and the one behind its last;
    returned as those of this unit. Then: head, token of the query, first token and length of the
    keys that it sees, its key tiles, that of the unit, and the one behind the share's last.
    """
    if unit >= until:
        i_s, base = sequence_at(StartsQ, StartsK, unit, sequences, lines, n_q, n_k, BN, CAUSAL)
    first_q, tokens, first_k, len_k, tiles, of_head = shape_of(
        StartsQ, StartsK, i_s, n_q, n_k, BN, CAUSAL
    )
    until = base + of_head * lines
    i_h = (unit - base) // of_head
    within = unit - base - i_h * of_head
    i_q = query_of(within, tokens, tiles, BN, CAUSAL)
    count = tiles
    if CAUSAL:
        count = tl.minimum(tiles, (i_q + BN) // BN)
    tile = within - units_before(i_q, tiles, BN, CAUSAL)
    stop = tl.minimum(count, tile + end - unit)
    seen = len_k.to(tl.int32)
    if CAUSAL:
        seen = tl.minimum(seen, i_q.to(tl.int32) + 1)
    return i_s, base, until, i_h, first_q + i_q, first_k, seen, count, tile, stop


@triton.jit
def arrive(Tickets, i_ticket):
    """How many have arrived before at this ticket. What all threads stored before it is seen by
    programs that arrive later.
    """
    tl.debug_barrier()
    before = tl.atomic_add(Tickets + i_ticket, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    return before


@triton.jit
def join_logs(PL, first, count, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """The maximum over `count` states from program `first` on of their log-sum-exp, and the sum of
    2**(log-sum-exp - maximum). [ROWS]
    """
    o_m = tl.arange(0, ROWS)
    m = tl.full([ROWS], -float("inf"), tl.float32)
    s = tl.zeros([ROWS], tl.float32)
    for p0 in tl.range(0, count, PARTS, num_stages=1):
        o_p = p0 + tl.arange(0, PARTS)
        row = (2 * (first + o_p) + (o_p == 0))[:, None] * ROWS + o_m[None, :]
        logs = tl.load(PL + row, mask=(o_p < count)[:, None], other=-float("inf"))
        m_new = tl.maximum(m, tl.max(logs, 0))
        m_safe = tl.where(m_new == -float("inf"), 0.0, m_new)
        s = s * tl.exp2(m - m_safe) + tl.sum(tl.exp2(logs - m_safe[None, :]), 0)
        m = m_new
    return m, s


@triton.jit
def join_outputs(
    PO, PL, first, count, m, s,
    ROWS: tl.constexpr, PARTS: tl.constexpr,
    DV: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Columns [START, START + WIDTH) of the joined output. [ROWS, WIDTH]"""
    o_m = tl.arange(0, ROWS)
    o_v = START + tl.arange(0, WIDTH)
    m_safe = tl.where(m == -float("inf"), 0.0, m)
    out = tl.zeros([ROWS, WIDTH], tl.float32)
    for p0 in tl.range(0, count, PARTS, num_stages=1):
        o_p = p0 + tl.arange(0, PARTS)
        row = (2 * (first + o_p) + (o_p == 0))[:, None] * ROWS + o_m[None, :]
        logs = tl.load(PL + row, mask=(o_p < count)[:, None], other=-float("inf"))
        w = tl.exp2(logs - m_safe[None, :])
        p = PO + row[:, :, None] * DV + o_v[None, None, :]
        inside = (o_p < count)[:, None, None] & (o_v < DV)[None, None, :]
        out += tl.sum(tl.load(p, mask=inside, other=0.0) * w[:, :, None], 0)
    return out / tl.where(s == 0.0, 1.0, s)[:, None]


@triton.jit(do_not_specialize=INTEGERS)
def stream_decode(
    Q, K, V, StartsQ, StartsK, PO, PL, Tickets, Out, LSE,
    heads: tl.int32, group: tl.int32, n_q: tl.int32, n_k: tl.int32, sequences: tl.int32,
    least: tl.int32, shift: tl.int32, scale_exp: tl.int32, scale: tl.float32, flip: tl.float32,
    lse_h: tl.int64,
    q_h: tl.int64, q_n: tl.int64, q_d: tl.int64, k_h: tl.int64, k_n: tl.int64, k_d: tl.int64,
    v_h: tl.int64, v_n: tl.int64, v_d: tl.int64,
    CAUSAL: tl.constexpr, UNIT: tl.constexpr, UNIT_D: tl.constexpr,
    BN: tl.constexpr, STAGES: tl.constexpr, PARTS: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    """Single queries: a row is a tile of its own, folded with float32 FMA as `decode.py` does.

    Grid (programs). Out [tokens, heads, DV], LSE with `lse_h` from head to head.

    StartsQ and StartsK are the cumulative lengths of `sequences`, n_q and n_k the tokens of all.
    `least`: units that a program gets, if there are as many. Strides as in `forward.forward`; PO,
    PL and Tickets as said above.
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
                lse = tl.where(s == 0.0, -float("inf"), m + tl.log2(s)) * LN2
                tl.store(p_lse + tl.arange(0, 1), lse)
                tl.store(Tickets + first, 0)
        unit += stop - tile


@triton.jit
def store_block(
    p, out, inside, DV: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Columns [START, START + WIDTH) of the rows that are there, of DV columns."""
    o_m = tl.arange(0, out.shape[0])
    o_v = START + tl.arange(0, WIDTH)
    store_tile(p + o_m[:, None] * DV + o_v[None, :], out, inside, o_v < DV, True)


@triton.jit(do_not_specialize=INTEGERS)
def stream_forward(
    Q, K, V, StartsQ, StartsK, PO, PL, Tickets, Out, LSE,
    heads: tl.int32, group: tl.int32, n_q: tl.int32, n_k: tl.int32, sequences: tl.int32,
    least: tl.int32, shift: tl.int32, scale_exp: tl.int32,
    scale: tl.float32, flip: tl.float32, lse_h: tl.int64,
    q_h: tl.int64, q_n: tl.int64, q_d: tl.int64, k_h: tl.int64, k_n: tl.int64, k_d: tl.int64,
    v_h: tl.int64, v_n: tl.int64, v_d: tl.int64,
    MODE: tl.constexpr, ONE_LOOP: tl.constexpr, FRESH: tl.constexpr,
    CAUSAL: tl.constexpr, FLIP: tl.constexpr,
    UNIT: tl.constexpr, UNIT_D: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BX: tl.constexpr, CHAIN: tl.constexpr, SHIFT: tl.constexpr,
    STAGES: tl.constexpr, TAIL_STAGES: tl.constexpr, PARTS: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    DV: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
):  # fmt: skip
    """Single queries of heads that share a head of the keys, which are read once: a tile is one
    query of all these heads. The fold and MODE are those of `forward.py`.

    Grid (programs). `heads`: those of the queries, Out and LSE; `group` of them share a head of
    the keys and are the rows of a tile. The other arguments as in `stream_decode` and
    `forward.forward`.
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
            store_block(p_out, acc0 * inverse, inside, DV, 0, V0)
            if V1:
                store_block(p_out, acc1 * inverse, inside, DV, V0, V1)
            tl.store(p_lse + o_m * lse_h, log * LN2, mask=inside)
        else:
            slot = (2 * program + (tile == 0).to(tl.int64)) * BM
            store_block(PO + slot * DV, acc0 * inverse, inside, DV, 0, V0)
            if V1:
                store_block(PO + slot * DV, acc1 * inverse, inside, DV, V0, V1)
            tl.store(PL + slot + o_m, log, mask=inside)
            first = owner(unit - tile, units, programs)
            last = owner(unit - tile + count - 1, units, programs)
            if arrive(Tickets, first) == last - first:
                n = (last - first + 1).to(tl.int32)
                m, s = join_logs(PL, first, n, BM, PARTS)
                out = join_outputs(PO, PL, first, n, m, s, BM, PARTS, DV, 0, V0)
                store_block(p_out, out, inside, DV, 0, V0)
                if V1:
                    out1 = join_outputs(PO, PL, first, n, m, s, BM, PARTS, DV, V0, V1)
                    store_block(p_out, out1, inside, DV, V0, V1)
                lse = tl.where(s == 0.0, -float("inf"), m + tl.log2(s)) * LN2
                tl.store(p_lse + o_m * lse_h, lse, mask=inside)
                tl.store(Tickets + first, 0)
        unit += stop - tile
