"""Packed sequences on the GPU: tiles, launch and results of `elsa::varlen_attention`."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from elsa_core.backends.triton.attention import tiling
from elsa_core.backends.triton.attention.schedules import stream
from elsa_core.backends.triton.attention.schedules.forward import fold_options, fold_tail
from elsa_core.backends.triton.attention.schedules.record import Problem
from elsa_core.backends.triton.shared import device, layout
from elsa_core.backends.triton.shared.launch import Launch
from elsa_core.backends.triton.shared.plans import PLANS

# Keys of a sequence, on average, from which single queries go by equal shares: an H200 took 0.09 of
# the time in float32 and 0.26 in float16 for 32 sequences of 1024 to 65536 keys, 8 heads of 128.
_STREAMED_KEYS = 1024


def _streams(query: Tensor, key: Tensor, starts: Tensor) -> bool:
    """Whether a call is cut by stream-K: where sequences have one query each, or fewer on average,
    and many keys."""
    sequences = starts.shape[0] - 1
    single = 0 < query.shape[0] <= sequences and key.shape[0] >= _STREAMED_KEYS * sequences
    return single and device.capability_of(query.device) == (9, 0)


def schedule(query: Tensor, key: Tensor, starts: Tensor) -> str:
    """How a call is cut, in words."""
    if _streams(query, key, starts):
        return "packed sequences by stream-K: equal shares of key tiles, joined by the last program"
    return "packed sequences: each program finds its own, keys and values split in the loop"


def problem_of(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, precision: str
) -> Problem:
    """The call as one of dense attention, tokens [1, H, T, D]."""
    mode = device.mode_of(q.dtype, precision)
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    shape = tiling.shape_of(q, k, v)
    return Problem(q, k, v, None, causal, scale, precision, mode, shape)


def plan(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, causal: bool, scale: float, precision: str
) -> Launch | stream.Streamed:
    """The launch of a call that has queries; everything here depends on layouts, never on data."""
    from elsa_core.backends.triton.attention.varlen_forward import varlen_forward

    sequences = starts.shape[0] - 1
    problem = problem_of(q, k, v, causal, scale, precision)
    if _streams(q, k, starts):
        return stream.streamed(problem, sequences)
    shape = problem.shape
    # no sequence has more keys than there are
    tiles = replace(stream.usual_tiles(problem, sequences), partitions=1, chunk=max(1, shape.keys))
    problem = replace(problem, tiles=tiles)
    slots = shape.queries // tiles.tile.block_m + sequences
    tail = fold_tail(problem) | {
        "sequences": sequences, "steps": sequences.bit_length(), "slots": slots,
    }  # fmt: skip
    return Launch(varlen_forward, (slots * shape.heads,), tail, fold_options(problem, tail))


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    is_causal: bool, scale: float, precision: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The CUDA kernel of `elsa::varlen_attention`; layouts and results as there.

    Nothing is read by the host. Cumulative lengths that leave the tokens are cut to them; rows that
    no sequence has are not written.
    """
    tokens, heads, _ = query.shape
    out = query.new_empty((tokens, heads, value.shape[2]))
    lse = query.new_empty((heads, tokens), dtype=torch.float32)
    if not out.numel():
        return out, lse
    if not key.shape[0] or not key.shape[1] or cu_seqlens_q.shape[0] < 2:
        return out.zero_(), lse.fill_(-torch.inf)
    starts, others = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    layouts = tuple(layout.key_of(t) for t in (query, key, value, starts, others))
    key_of_plan = ("varlen_attention", *layouts, query.get_device(), is_causal, scale, precision)
    launch = PLANS.get(key_of_plan, plan, query, key, value, starts, is_causal, scale, precision)
    with layout.on_device(query):
        launch(query, key, value, starts, others, out, lse)
    return out, lse
