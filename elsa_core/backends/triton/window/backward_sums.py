"""What the programs of the gradients summed, added in one order, and a table's part of it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["groups", "heads", "pad_h", "pad_part"])
def add_partials(
    Partial, DBias, DPad, DLogit,
    groups: tl.int32, heads: tl.int32, pad_h: tl.int64, pad_part: tl.int64,
    SIZE: tl.constexpr, D: tl.constexpr, ROW: tl.constexpr, WANT_BIAS: tl.constexpr,
    WANT_PAD: tl.constexpr, WANT_LOGIT: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of ROW, heads): the sums of a head over its groups.

    Partial, float32 [groups, heads, ROW]: SIZE of the bias, then 2 * D of a padded token's key and
    value, then one of the logit scale. DBias [heads, SIZE] and DLogit [heads] are dense; DPad
    [3 * C] has a head at pad_h and the next of query, key and value pad_part further on.
    """
    i_h = tl.program_id(1)
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o_g = tl.arange(0, AT_ONCE)
    acc = tl.zeros([AT_ONCE, BLOCK], tl.float32)
    for g0 in tl.range(0, groups, AT_ONCE):
        p = Partial + ((g0 + o_g).to(tl.int64) * heads + i_h)[:, None] * ROW + o[None, :]
        acc += tl.load(p, mask=(g0 + o_g < groups)[:, None] & (o < ROW)[None, :], other=0.0)
    x = tl.sum(acc, 0)
    FIRST: tl.constexpr = SIZE if WANT_BIAS else 0
    if WANT_BIAS:
        p = DBias + i_h.to(tl.int64) * SIZE + o
        tl.store(p, x.to(DBias.dtype.element_ty), mask=o < SIZE)
    if WANT_PAD:
        i = o - FIRST
        p = DPad + i_h * pad_h + (1 + i // D) * pad_part + i % D
        tl.store(p, x.to(DPad.dtype.element_ty), mask=(i >= 0) & (i < 2 * D))
    if WANT_LOGIT:
        tl.store(DLogit + i_h + o * 0, x.to(DLogit.dtype.element_ty), mask=o == ROW - 1)


@triton.jit(do_not_specialize=["size", "rows", "heads", "tokens", "index_q", "index_k"])
def add_to_table(
    Dense, Index, DTable, size: tl.int32, rows: tl.int32, heads: tl.int32, tokens: tl.int32,
    index_q: tl.int64, index_k: tl.int64, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows of the table, blocks of HEADS heads): the sum of the entries that read a row.

    Dense, float32 [heads, tokens * tokens]; Index [tokens, tokens]; DTable [rows, heads]. Entries
    beyond the table have no gradient.
    """
    i_row = tl.program_id(0)
    o_h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    acc = tl.zeros([HEADS, BLOCK], tl.float32)
    for first in tl.range(0, size, BLOCK):
        o = first + tl.arange(0, BLOCK)
        i_q = o // tokens
        p = Index + i_q * index_q + (o - i_q * tokens) * index_k
        number = tl.load(p, mask=o < size, other=-1 - rows)
        mine = number == i_row
        p = Dense + o_h.to(tl.int64)[:, None] * size + o[None, :]
        acc += tl.load(p, mask=(o_h < heads)[:, None] & mine[None, :], other=0.0)
    p = DTable + i_row.to(tl.int64) * heads + o_h
    tl.store(p, tl.sum(acc, 1).to(DTable.dtype.element_ty), mask=o_h < heads)
