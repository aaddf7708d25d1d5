"""Attention of packed sequences in plain PyTorch: one sequence after another.

Any device and floating dtype. The lengths are read by the host, so that on a GPU a call waits for
what was queued before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from elsa_core.backends import eager
from elsa_core.base.packing import checked_bounds


class Part(NamedTuple):
    """One sequence: its queries and its keys among the packed ones."""

    queries: slice
    keys: slice


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    is_causal: bool,
    scale: float,
    precision: str = "strict",
) -> tuple[Tensor, Tensor]:
    """Layouts and results are those of the operator `elsa::varlen_attention`."""
    outputs, lses = [query.new_empty((0, query.shape[1], value.shape[-1]))], []
    for rows, columns in _parts(query, key, cu_seqlens_q, cu_seqlens_k):
        out, lse = eager.attention(
            *_alone(query[rows], key[columns], value[columns]), None, is_causal, scale, precision
        )
        outputs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    if not lses:
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        lses.append(query.new_empty((query.shape[1], 0), dtype=wide))
    return torch.cat(outputs), torch.cat(lses, 1)


def backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
    precision: str,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients as `elsa_core.backends.eager.backward` computes them, sequence by sequence."""
    if not grad_lse.numel():
        grad_lse = torch.zeros_like(lse)
    grads = [
        torch.empty_like(t) if needed else t.new_empty(0)
        for t, needed in zip((query, key, value), needs, strict=True)
    ]
    for rows, columns in _parts(query, key, cu_seqlens_q, cu_seqlens_k):
        operands = _alone(query[rows], key[columns], value[columns])
        g_out, whole = _alone(grad_out[rows], out[rows])
        found = eager.backward(
            g_out, grad_lse[None, :, rows], *operands, None, whole, lse[None, :, rows], is_causal,
            scale, precision, (*needs, False),
        )  # fmt: skip
        for grad, part, place in zip(grads, found, (rows, columns, columns), strict=False):
            if grad.dim() == 3:
                grad[place] = part[0].transpose(0, 1)
    return grads[0], grads[1], grads[2]


def schedule(*arguments: object) -> str:
    """How a call is cut, in words."""
    return "one sequence after another, each folded over key blocks"


def _parts(query: Tensor, key: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> list[Part]:
    """The sequences, in order; their queries cover the packed ones."""
    starts = checked_bounds("cu_seqlens_q", cu_seqlens_q, query.shape[0])
    others = checked_bounds("cu_seqlens_k", cu_seqlens_k, key.shape[0])
    pairs = zip(pairwise(starts), pairwise(others), strict=True)
    return [Part(slice(*rows), slice(*columns)) for rows, columns in pairs]


def _alone(*packed: Tensor) -> tuple[Tensor, ...]:
    """[n, H, D] as a batch of one, [1, H, n, D]."""
    return tuple(t.transpose(0, 1).unsqueeze(0) for t in packed)
