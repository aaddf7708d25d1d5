"""Folds again, with float32 FMA, the blocks of queries that `hopper.forward` has flagged."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from elsa_core.backends.triton.attention import INTEGERS
from elsa_core.backends.triton.attention.exact import fold_exact
from elsa_core.backends.triton.attention.forward import store_rows
from elsa_core.backends.triton.shared.helpers import power

# queries of a block: the rows of a warpgroup's tensor-core instruction
ROWS: tl.constexpr = tl.constexpr(64)
# flags a program reads at once: nearly always it does so, finds none, and ends
FLAGS: tl.constexpr = tl.constexpr(16)
# programs, two for each multiprocessor of an H200: blocks of one head, which fail together, are
# dealt out among them
PROGRAMS = 264


@triton.jit(do_not_specialize=INTEGERS)
def fma_fallback(
    Q, K, V, Flags, Out, LSE,
    heads: tl.int32, group: tl.int32, n_q: tl.int32, n_k: tl.int32, chunk: tl.int32,
    shift: tl.int32, scale_exp: tl.int32, scale: tl.float32, flip: tl.float32,
    q_b: tl.int64, q_h: tl.int64, q_n: tl.int64, q_d: tl.int64,
    k_b: tl.int64, k_h: tl.int64, k_n: tl.int64, k_d: tl.int64,
    v_b: tl.int64, v_h: tl.int64, v_n: tl.int64, v_d: tl.int64,
    batch: tl.int32, blocks: tl.int32,
    CAUSAL: tl.constexpr, PARTIAL: tl.constexpr, OVERLAP: tl.constexpr, UNIT: tl.constexpr,
    UNIT_D: tl.constexpr, BX: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, DV: tl.constexpr, V0: tl.constexpr,
):  # fmt: skip
    """Grid: programs that deal out the `blocks` flags, int32, of [partition, batch, head, ROWS
    queries]. The other arguments as `forward.forward` has them; one block a head dimension.
    """
    if PARTIAL and OVERLAP:
        gdc_launch_dependents()
    if OVERLAP:
        # the launch that sets the flags may still be running
        gdc_wait()
    step = tl.num_programs(0)
    for first in tl.range(tl.program_id(0), blocks, step * FLAGS, num_stages=1):
        o_b = first + tl.arange(0, FLAGS) * step
        flagged = tl.load(Flags + o_b, mask=o_b < blocks, other=0)
        if tl.max(flagged, 0) != 0:
            for i in tl.range(first, tl.minimum(first + step * FLAGS, blocks), step, num_stages=1):
                if tl.load(Flags + i) != 0:
                    i_state = i // tl.cdiv(n_q, ROWS)
                    row0 = (i - i_state * tl.cdiv(n_q, ROWS)) * ROWS
                    rows = n_q - row0
                    i_part = i_state // (batch * heads)
                    i_bh = i_state - i_part * batch * heads
                    i_b = (i_bh // heads).to(tl.int64)
                    i_h = (i_bh % heads).to(tl.int64)
                    lo = i_part * chunk
                    hi = tl.minimum(n_k, lo + chunk)
                    if CAUSAL:
                        hi = tl.minimum(hi, row0 + ROWS)
                    m, z, acc, acc1 = fold_exact(
                        Q + (i_b * q_b + i_h * q_h) * UNIT + row0 * (q_n * UNIT),
                        K + (i_b * k_b + i_h // group * k_h) * UNIT,
                        V + (i_b * v_b + i_h // group * v_h) * UNIT,
                        Q, lo, hi, n_k, q_n * UNIT, q_d, k_n * UNIT, k_d, v_n * UNIT, v_d, 0, 0,
                        row0, rows, scale * flip, scale_exp, power(-shift),
                        0, CAUSAL, ROWS, BX, D, D0, 0, DV, V0, 0, UNIT_D,
                    )  # fmt: skip
                    z = tl.sum(z, 1)
                    offset = shift.to(tl.float32)
                    if PARTIAL:
                        row = i_state.to(tl.int64) * n_q + row0
                        store_rows(
                            acc, acc1, z, m, offset, Out, LSE, row * DV, DV, row, rows,
                            ROWS, DV, V0, 0, True,
                        )  # fmt: skip
                    else:
                        store_rows(
                            acc, acc1, z, m, offset, Out, LSE,
                            ((i_b * n_q + row0) * heads + i_h) * DV, heads.to(tl.int64) * DV,
                            i_bh.to(tl.int64) * n_q + row0, rows, ROWS, DV, V0, 0, False,
                        )  # fmt: skip
