"""The forward of packed sequences: a program folds all keys of one sequence for BLOCK_M of its
queries and one head.

Which sequence that is, the program finds itself: sequence s owns the programs from
starts[s] // BLOCK_M + s on, one more than its queries fill at most. So the grid needs the number of
tokens and of sequences alone, and the host never reads a length.

MODE as in `forward.py`; keys and values are split in the loop.
"""

from __future__ import annotations

import triton
import triton.language as tl

from elsa_core.backends.triton.attention import INTEGERS
from elsa_core.backends.triton.attention.forward import fold_rows, store_rows


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
    """Grid (slots x heads). n_q and n_k: the tokens of all sequences; Out [n_q, heads, DV], LSE
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
