"""The launches of the gradients: both sides in one or two grids, and the gradient of a mask."""

from __future__ import annotations

import triton
import triton.language as tl

from elsa_core.backends.triton.attention import INTEGERS
from elsa_core.backends.triton.attention.backward_prepare import (
    UNIT,
    UNSHIFT,
    product,
    slots,
    verdict,
)
from elsa_core.backends.triton.attention.backward_tiles import key_side, query_side, weights
from elsa_core.backends.triton.shared.helpers import load_part, wide


@triton.jit
def one_program(
    pid, Q, K, V, G, Mask, GradLse, Rows, Guards, Factors, DQ, DK, DV_,
    heads, group, n_q, n_k, batch, key_programs, scale, scale_q, scale_k,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, g_b, g_h, g_n, g_d,
    dq_b, dq_h, dq_n, dq_d, dk_b, dk_h, dk_n, dk_d, dv_b, dv_h, dv_n, dv_d,
    l_b, l_h, l_n, mask_b, mask_h, mask_q, mask_k,
    MODE: tl.constexpr, WHERE: tl.constexpr, FRESH: tl.constexpr,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, REFINE: tl.constexpr,
    WANT_Q: tl.constexpr, WANT_K: tl.constexpr, WANT_V: tl.constexpr,
    KEY_M: tl.constexpr, KEY_N: tl.constexpr, QUERY_M: tl.constexpr, QUERY_N: tl.constexpr,
    STAGES: tl.constexpr, D: tl.constexpr, D0: tl.constexpr, DV: tl.constexpr, V0: tl.constexpr,
    UNIT_D: tl.constexpr, UNIT_OUT: tl.constexpr,
):  # fmt: skip
    """One tile of keys (pid < key_programs) or of queries.

    WHERE: 0 all heads, rows without the term s of a large lse; 1 with it, the heads that a guard
    names; 2 with it, all heads.
    """
    of_keys = pid < key_programs
    asked = pid >= 0
    if WHERE == 1:
        if of_keys:
            i_kv = pid // tl.cdiv(n_k, KEY_N)
        else:
            i_kv = (pid - key_programs) // tl.cdiv(n_q, QUERY_M) // group
        guards = slots(group, n_q, n_k, MODE != 0)
        asked = verdict(Guards + wide(i_kv) * guards, guards) != 0
    if asked:
        if of_keys:
            if WANT_K or WANT_V:
                key_side(
                    pid, Q, K, V, G, Mask, Rows, Factors, DK, DV_,
                    heads, group, n_q, n_k, batch,
                    scale, scale_k, q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d,
                    g_b, g_h, g_n, g_d, dk_b, dk_h, dk_n, dk_d, dv_b, dv_h, dv_n, dv_d,
                    mask_b, mask_h, mask_q, mask_k, MODE, FRESH, MASK, CAUSAL, WHERE != 0,
                    WANT_K, WANT_V, KEY_M, KEY_N, STAGES, D, D0, DV, V0, UNIT_D, UNIT_OUT,
                )  # fmt: skip
        elif WANT_Q:
            query_side(
                pid - key_programs, Q, K, V, G, Mask, Rows, GradLse, Factors, DQ,
                heads, group,
                n_q, n_k, batch, scale, scale_q, q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d,
                v_b, v_h, v_n, v_d, g_b, g_h, g_n, g_d, dq_b, dq_h, dq_n, dq_d, l_b, l_h, l_n,
                mask_b, mask_h, mask_q, mask_k, MODE, FRESH, MASK, CAUSAL, WHERE != 0,
                REFINE, QUERY_M, QUERY_N, STAGES, D, D0, DV, V0, UNIT_D, UNIT_OUT,
            )  # fmt: skip


@triton.jit(do_not_specialize=INTEGERS)
def gradients(
    Q, K, V, G, Mask, GradLse, Rows, Guards, Factors, DQ, DK, DV_,
    heads: tl.int32, group: tl.int32, n_q: tl.int32, n_k: tl.int32, batch: tl.int32,
    key_programs: tl.int32, programs: tl.int32, scale: tl.float32, scale_q: tl.float32,
    scale_k: tl.float32,
    q_b: tl.int64, q_h: tl.int64, q_n: tl.int64, q_d: tl.int64,
    k_b: tl.int64, k_h: tl.int64, k_n: tl.int64, k_d: tl.int64,
    v_b: tl.int64, v_h: tl.int64, v_n: tl.int64, v_d: tl.int64,
    g_b: tl.int64, g_h: tl.int64, g_n: tl.int64, g_d: tl.int64,
    dq_b: tl.int64, dq_h: tl.int64, dq_n: tl.int64, dq_d: tl.int64,
    dk_b: tl.int64, dk_h: tl.int64, dk_n: tl.int64, dk_d: tl.int64,
    dv_b: tl.int64, dv_h: tl.int64, dv_n: tl.int64, dv_d: tl.int64,
    l_b: tl.int64, l_h: tl.int64, l_n: tl.int64,
    mask_b: tl.int64, mask_h: tl.int64, mask_q: tl.int64, mask_k: tl.int64,
    MODE: tl.constexpr, WHERE: tl.constexpr, LOOP: tl.constexpr,
    FRESH: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr,
    REFINE: tl.constexpr, WANT_Q: tl.constexpr, WANT_K: tl.constexpr, WANT_V: tl.constexpr,
    KEY_M: tl.constexpr, KEY_N: tl.constexpr, QUERY_M: tl.constexpr, QUERY_N: tl.constexpr,
    STAGES: tl.constexpr, STEP: tl.constexpr, D: tl.constexpr, D0: tl.constexpr,
    DV: tl.constexpr, V0: tl.constexpr, UNIT_D: tl.constexpr, UNIT_OUT: tl.constexpr,
    UNIT_K: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of keys x batch x key heads, then tiles of queries x batch x heads), or, if LOOP,
    fewer programs that share those out.

    Terms of rows, guards, factors: as `backward_prepare.prepare` wrote them; MODE 1: Q, K, V and G
    are its halves. Strides q, k, v, g in units of STEP elements. scale: of the products that give
    scores in base 2; scale_q, scale_k: of the sums that give dQ and dK. WHERE: as `one_program` has
    it; REFINE: as `query_side` has it.
    """
    q_b, q_h, q_n = q_b * STEP, q_h * STEP, q_n * STEP
    k_b, k_h, k_n = k_b * STEP, k_h * STEP, k_n * STEP
    v_b, v_h, v_n = v_b * STEP, v_h * STEP, v_n * STEP
    g_b, g_h, g_n = g_b * STEP, g_h * STEP, g_n * STEP
    if UNIT_K:
        mask_k = tl.full([], 1, tl.int64)
    if LOOP:
        # where no head asks for it, which is nearly always, nothing else is read
        count = batch * (heads // group) * slots(group, n_q, n_k, MODE != 0)
        programs = tl.where(verdict(Guards, count) != 0, programs, 0)
        for pid in range(tl.program_id(0), programs, tl.num_programs(0)):
            one_program(
                pid, Q, K, V, G, Mask, GradLse, Rows, Guards, Factors, DQ, DK, DV_,
                heads, group, n_q, n_k, batch, key_programs, scale, scale_q, scale_k,
                q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, g_b, g_h, g_n, g_d,
                dq_b, dq_h, dq_n, dq_d, dk_b, dk_h, dk_n, dk_d, dv_b, dv_h, dv_n, dv_d,
                l_b, l_h, l_n, mask_b, mask_h, mask_q, mask_k, MODE, WHERE, FRESH,
                MASK, CAUSAL, REFINE, WANT_Q, WANT_K, WANT_V, KEY_M, KEY_N, QUERY_M, QUERY_N,
                STAGES, D, D0, DV, V0, UNIT_D, UNIT_OUT,
            )  # fmt: skip
    else:
        one_program(
            tl.program_id(0), Q, K, V, G, Mask, GradLse, Rows, Guards, Factors, DQ, DK, DV_,
            heads, group, n_q, n_k, batch, key_programs, scale, scale_q, scale_k,
            q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, g_b, g_h, g_n, g_d,
            dq_b, dq_h, dq_n, dq_d, dk_b, dk_h, dk_n, dk_d, dv_b, dv_h, dv_n, dv_d,
            l_b, l_h, l_n, mask_b, mask_h, mask_q, mask_k, MODE, WHERE, FRESH,
            MASK, CAUSAL, REFINE, WANT_Q, WANT_K, WANT_V, KEY_M, KEY_N, QUERY_M, QUERY_N,
            STAGES, D, D0, DV, V0, UNIT_D, UNIT_OUT,
        )  # fmt: skip


@triton.jit(do_not_specialize=INTEGERS)
def mask_gradient(
    Q, K, V, G, Mask, Rows, DMask,
    heads: tl.int32, group: tl.int32, n_q: tl.int32, n_k: tl.int32, batch: tl.int32,
    m_b: tl.int32, m_h: tl.int32, q_blocks: tl.int32, k_blocks: tl.int32, scale: tl.float32,
    q_b: tl.int64, q_h: tl.int64, q_n: tl.int64, q_d: tl.int64,
    k_b: tl.int64, k_h: tl.int64, k_n: tl.int64, k_d: tl.int64,
    v_b: tl.int64, v_h: tl.int64, v_n: tl.int64, v_d: tl.int64,
    g_b: tl.int64, g_h: tl.int64, g_n: tl.int64, g_d: tl.int64,
    mask_b: tl.int64, mask_h: tl.int64, mask_q: tl.int64, mask_k: tl.int64,
    MODE: tl.constexpr, CAUSAL: tl.constexpr, STEP: tl.constexpr,
    ALL_Q: tl.constexpr, ALL_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    STAGES: tl.constexpr, D: tl.constexpr, D0: tl.constexpr, DV: tl.constexpr, V0: tl.constexpr,
    UNIT_D: tl.constexpr, UNIT_K: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of an additive mask [m_b, m_h, 1 or n_q, 1 or n_k]): each is one program's own.

    It sums dS over the batches and heads (m_b, m_h = 1), query tiles (ALL_Q) and key tiles (ALL_K)
    that share its tile, in one order. DMask is contiguous. Operands as they are, never split.
    """
    pid = tl.program_id(0)
    own_q = 1 if ALL_Q else q_blocks
    own_k = 1 if ALL_K else k_blocks
    i_k = pid % own_k
    rest = pid // own_k
    i_q = rest % own_q
    rest = rest // own_q
    i_mh = rest % m_h
    i_mb = rest // m_h
    if UNIT_K:
        mask_k = tl.full([], 1, tl.int64)
    q_n, k_n, v_n, g_n = q_n * STEP, k_n * STEP, v_n * STEP, g_n * STEP
    steps_q = q_blocks if ALL_Q else 1
    steps_k = k_blocks if ALL_K else 1
    steps_h = heads // m_h
    steps_b = batch // m_b
    row_count = batch.to(tl.int64) * heads * tl.cdiv(n_q, UNIT) * UNIT
    o_m = tl.arange(0, BM)
    o_n = tl.arange(0, BN)
    acc = tl.zeros([BM, BN], tl.float32)
    for step in tl.range(0, steps_b * steps_h * steps_q * steps_k, num_stages=STAGES):
        row0 = (i_q + step // steps_k % steps_q) * BM
        n0 = (i_k + step % steps_k) * BN
        over = step // (steps_k * steps_q)
        i_h = (i_mh + over % steps_h).to(tl.int64)
        i_b = (i_mb + over // steps_h).to(tl.int64)
        rows = n_q - row0
        columns = n_k - n0
        p_q = Q + (i_b * q_b + i_h * q_h) * STEP + wide(row0) * q_n
        p_g = G + (i_b * g_b + i_h * g_h) * STEP + wide(row0) * g_n
        p_k = K + (i_b * k_b + i_h // group * k_h) * STEP + wide(n0) * k_n
        p_v = V + (i_b * v_b + i_h // group * v_h) * STEP + wide(n0) * v_n
        q = load_part(p_q, o_m, rows, q_n, q_d, 0, D0, D, UNIT_D, True)
        g = load_part(p_g, o_m, rows, g_n, g_d, 0, V0, DV, UNIT_D, True)
        k = load_part(p_k, o_n, columns, k_n, k_d, 0, D0, D, UNIT_D, True)
        v = load_part(p_v, o_n, columns, v_n, v_d, 0, V0, DV, UNIT_D, True)
        p_rows = Rows + (i_b * heads + i_h) * tl.cdiv(n_q, UNIT) * UNIT + row0 + o_m
        m = tl.load(p_rows)
        s = tl.load(p_rows + row_count)
        delta = tl.load(p_rows + 2 * row_count)
        p_mask = Mask + i_b * mask_b + i_h * mask_h + wide(row0) * mask_q + wide(n0) * mask_k
        t = product(q, q, k.T, k.T, MODE, False)
        p = weights(
            t, scale, m[:, None], s[:, None], p_mask, o_m, o_n, rows, columns, row0 - n0,
            mask_q, mask_k, MODE, 2, CAUSAL, True, True, False,
        )  # fmt: skip
        t = product(g, g, v.T, v.T, MODE, False) * (UNSHIFT if MODE == 0 else 1.0)
        acc += p * (t - delta[:, None])
    i_m = (i_mb * m_h + i_mh).to(tl.int64)
    size_q = 1 if ALL_Q else n_q
    size_k = 1 if ALL_K else n_k
    p_out = DMask + i_m * size_q * size_k
    o_m += i_q * BM
    o_n += i_k * BN
    kind = DMask.dtype.element_ty
    if ALL_Q and ALL_K:
        tl.store(p_out, tl.sum(tl.sum(acc, 1), 0).to(kind))
    elif ALL_Q:
        tl.store(p_out + o_n, tl.sum(acc, 0).to(kind), mask=o_n < n_k)
    elif ALL_K:
        tl.store(p_out + o_m, tl.sum(acc, 1).to(kind), mask=o_m < n_q)
    else:
        inside = (o_m < n_q)[:, None] & (o_n < n_k)[None, :]
        p = p_out + wide(o_m)[:, None] * n_k + o_n[None, :]
        tl.store(p, acc.to(kind), mask=inside)
