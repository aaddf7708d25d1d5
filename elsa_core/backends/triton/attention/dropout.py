"""Attention with dropout of the weights on a GPU: the forward and gradient kernels with a seed.

Compiled and interpreted in the tests, but never timed on a GPU: `auto` does not choose it until it
was measured; it serves calls that name the backend. The schedules are those of `forward.forward`
(operands as they are, or keys and values split ahead); those of sm_90 alone drop nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from elsa_core.backends import philox
from elsa_core.backends.support import Request, Support
from elsa_core.backends.triton.attention import backward, planner, tiling
from elsa_core.backends.triton.attention.schedules import EMPTY
from elsa_core.backends.triton.attention.schedules.forward import FORWARD, SPLIT_AHEAD
from elsa_core.backends.triton.attention.schedules.record import Call, Problem
from elsa_core.backends.triton.shared import device, layout
from elsa_core.backends.triton.shared.plans import PLANS


def plan_call(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float,
    precision: str, dropout_p: float,
) -> Call:  # fmt: skip
    """The planned call; its fold takes a seed."""
    mode, shape = device.mode_of(q.dtype, precision), tiling.shape_of(q, k, v, mask)
    problem = Problem(q, k, v, mask, causal, scale, precision, mode, shape)
    if EMPTY.serves(problem):
        return planner.planned_by(EMPTY, problem)
    problem = replace(problem, tiles=planner.tiles_of(problem, specialized=False))
    call = planner.planned_by(SPLIT_AHEAD if SPLIT_AHEAD.serves(problem) else FORWARD, problem)
    tail = call.fold.tail
    del tail["Seed"]  # it is a pointer of the call
    tail |= {"threshold": philox.threshold(dropout_p), "kept": philox.kept_factor(dropout_p)}
    return call


def _planned(*terms: Any) -> Call:
    q, k, v, mask, *rest = terms
    layouts = tuple(layout.key_of(t) for t in (q, k, v, mask))
    key = ("attention_dropout", q.get_device(), layouts, *rest)
    found: Call = PLANS.get(key, plan_call, *terms)
    return found


def schedule(*terms: Any) -> str:
    """The schedule that would serve the call, in words."""
    q, k, v, mask, is_causal, precision = terms
    return _planned(q, k, v, mask, is_causal, 1.0, precision, 0.5).words


def attention_dropout(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool,
    scale: float, precision: str, dropout_p: float, seed: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The CUDA kernel of `elsa::attention_dropout`.

    Args:
        query, key, value, attn_mask, is_causal, scale, precision: as
            `elsa_core.backends.triton.attention_forward` takes them.
        dropout_p: in [0, 1]. seed: int64 [2] on the operands' device.

    Returns:
        out [B, Hq, Nq, Dv] and lse [B, Hq, Nq], the lse without dropout. The keep mask is that of
        `elsa_core.backends.philox`.
    """
    call = _planned(query, key, value, attn_mask, is_causal, scale, precision, dropout_p)
    drawn = () if call.schedule is EMPTY else (seed,)
    with layout.on_device(query):
        return planner.execute(call, query, key, value, attn_mask, *drawn)


def support_gradient(request: Request) -> Support:
    """Whether `attention_dropout_backward` serves gradients of calls like this."""
    if request.dtype == torch.float32 and request.precision not in backward.PRECISIONS:
        return Support(False, f"has no gradients of precision {request.precision!r}")
    return Support(True)


def attention_dropout_backward(
    grad_out: Tensor, grad_lse: Tensor, query: Tensor, key: Tensor, value: Tensor,
    attn_mask: Tensor | None, out: Tensor, lse: Tensor, is_causal: bool, scale: float,
    precision: str, dropout_p: float, seed: Tensor, needs: backward.Needs,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As `elsa::attention_dropout_backward`; see `backward.attention_backward`.

    Source: FlashAttention (2205.14135), Algorithm 4, with a mask of positions.
    """
    if not grad_lse.numel():
        grad_lse = lse.new_zeros(()).expand(lse.shape)
    dropout = philox.Dropout(dropout_p, seed) if dropout_p > 0.0 else None
    return backward.attention_backward(
        grad_out, grad_lse, query, key, value, attn_mask, out, lse, is_causal, scale, precision,
        needs, dropout=dropout,
    )  # fmt: skip
