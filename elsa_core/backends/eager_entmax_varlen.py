"""alpha-entmax attention of packed sequences in plain PyTorch: one sequence after another.

Any device and floating dtype. The lengths are read by the host, so that on a GPU a call waits for
what was queued before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from elsa_core.backends import eager_entmax
from elsa_core.backends.eager_entmax import TILE
from elsa_core.base.packing import checked_bounds


class Part(NamedTuple):
    """One sequence: its number, its queries and keys among the packed ones, and the rows and
    columns of its tiles."""

    sequence: int
    queries: slice
    keys: slice
    rows: slice
    columns: slice


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    head_alpha: Tensor | None,
    longest_q: int,
    longest_k: int,
    alpha: float,
    is_causal: bool,
    scale: float,
    precision: str = "strict",
) -> tuple[Tensor, Tensor, Tensor]:
    """Layouts and results are those of the operator `elsa::entmax_varlen_attention`.

    Raises:
        ArgumentError: cumulative lengths that are none.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    tokens, heads, _ = query.shape
    out = query.new_zeros((tokens, heads, value.shape[2]))
    rows = query.new_zeros((3, heads, tokens), dtype=wide)
    rows[0] = -math.inf
    sizes = (heads, tokens // TILE + cu_seqlens_q.shape[0] - 1, -(-longest_k // TILE))
    tiles = query.new_zeros(sizes, dtype=torch.uint8)
    for part in _parts(query, key, cu_seqlens_q, cu_seqlens_k):
        q, k, v = _alone(query[part.queries], key[part.keys], value[part.keys])
        own = _of_sequence(head_alpha, part)
        found = eager_entmax.attention(q, k, v, None, own, alpha, is_causal, scale, precision)
        out[part.queries] = found[0][0].transpose(0, 1)
        rows[:, :, part.queries] = found[1][:, 0]
        tiles[:, part.rows, part.columns] = found[2][0]
    return out, rows, tiles


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    head_alpha: Tensor | None,
    out: Tensor,
    rows: Tensor,
    tiles: Tensor,
    longest_q: int,
    longest_k: int,
    alpha: float,
    is_causal: bool,
    scale: float,
    precision: str,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients as `eager_entmax.backward` computes them, sequence by sequence.

    Returns:
        Gradients of query, key, value and head_alpha; empty where `needs` says that none is wanted.
    """
    grads = [
        torch.zeros_like(t) if needed else t.new_empty(0)
        for t, needed in zip((query, key, value), needs, strict=False)
    ]
    of_alpha, dtype = query.new_empty(0), query.dtype
    if needs[3] and head_alpha is not None:
        # sums over sequences keep the digits that half precision has not
        head_alpha, dtype = head_alpha.to(rows.dtype), head_alpha.dtype
        of_alpha = torch.zeros_like(head_alpha, memory_format=torch.contiguous_format)
    dense = [*needs[:3], False, needs[3]]
    for part in _parts(query, key, cu_seqlens_q, cu_seqlens_k):
        q, k, v = _alone(query[part.queries], key[part.keys], value[part.keys])
        g = grad_out[part.queries].transpose(0, 1)[None]
        own = _of_sequence(head_alpha, part)
        found = eager_entmax.backward(
            g, q, k, v, None, own, out, rows[:, None, :, part.queries],
            tiles[None, :, part.rows, part.columns], alpha, is_causal, scale, precision, dense,
        )  # fmt: skip
        for grad, where, x in zip(grads, (part.queries, part.keys, part.keys), found, strict=False):
            if grad.dim() == 3:
                grad[where] = x[0].transpose(0, 1)
        if of_alpha.numel():
            target = _of_sequence(of_alpha, part)
            target += found[4]  # type: ignore[operator]
    return grads[0], grads[1], grads[2], of_alpha.to(dtype)


def _parts(
    query: Tensor, key: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor
) -> Iterator[Part]:
    starts = checked_bounds("cu_seqlens_q", cu_seqlens_q, query.shape[0])
    others = checked_bounds("cu_seqlens_k", cu_seqlens_k, key.shape[0])
    ends = zip(pairwise(starts), pairwise(others), strict=True)
    for s, ((first, end), (first_k, end_k)) in enumerate(ends):
        row = first // TILE + s
        rows = slice(row, row - (first - end) // TILE)
        columns = slice(0, -((first_k - end_k) // TILE))
        yield Part(s, slice(first, end), slice(first_k, end_k), rows, columns)


def _alone(*packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[n, H, D] as a batch of one, [1, H, n, D]."""
    query, key, value = (t.transpose(0, 1)[None] for t in packed)
    return query, key, value


def _of_sequence(head_alpha: Tensor | None, part: Part) -> Tensor | None:
    """The part of a tensor [S or 1, Hq or 1, 1, 1]."""
    if head_alpha is None or head_alpha.shape[0] == 1:
        return head_alpha
    return head_alpha[part.sequence : part.sequence + 1]
