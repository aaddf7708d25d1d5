"""The merge of partial states: the monoid's product over the partitions of the keys, in float32;
their lse may be float64."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from elsa_core.backends.triton.attention import INTEGERS
from elsa_core.backends.triton.shared.helpers import LN2


@triton.jit(do_not_specialize=INTEGERS)
def merge_states(
    PO, PL, Out, LSE, parts: tl.int32, heads: tl.int32, n_q: tl.int32, states: tl.int64,
    ROWS: tl.constexpr, PARTS: tl.constexpr, DV: tl.constexpr, VP: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (batch x heads x queries / ROWS). PO: [parts, states, DV] outputs; PL: [parts, states]
    base 2 lse, of the dtype of LSE.

    The weights exp2(lse - max) are summed by a tree over PARTS (a power of two >= parts).
    """
    i_state = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_p = tl.arange(0, PARTS)
    o_v = tl.arange(0, VP)
    if OVERLAP:
        gdc_wait()
    inside = (o_p < parts)[:, None] & (i_state < states)[None, :]
    o_state = o_p[:, None] * states + i_state[None, :]
    lse = tl.load(PL + o_state, mask=inside, other=-float("inf"))  # [PARTS, ROWS]
    m = tl.max(lse, 0)
    m_safe = tl.where(m == -float("inf"), 0.0, m)
    w = tl.exp2((lse - m_safe[None, :]).to(tl.float32))
    p = PO + o_state[:, :, None] * DV + o_v[None, None, :]
    x = tl.load(p, mask=inside[:, :, None] & (o_v < DV)[None, None, :], other=0.0)
    s = tl.sum(w, 0)
    out = tl.sum(x * w[:, :, None], 0) / tl.where(s == 0.0, 1.0, s)[:, None]  # [ROWS, VP]
    i_bh = i_state // n_q
    i_q = i_state - i_bh * n_q
    i_b = i_bh // heads
    i_h = i_bh - i_b * heads
    p_out = Out + (((i_b * n_q + i_q) * heads + i_h) * DV)[:, None] + o_v[None, :]
    written = i_state < states
    tl.store(p_out, out.to(Out.dtype.element_ty), mask=written[:, None] & (o_v < DV)[None, :])
    total = m + tl.log2(s.to(LSE.dtype.element_ty))
    tl.store(LSE + i_state, tl.where(s == 0.0, -float("inf"), total) * LN2, mask=written)
