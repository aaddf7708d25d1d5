"""Attention and alpha-entmax attention of packed sequences in plain PyTorch: one sequence after
another.

Any device and floating dtype. The lengths are read by the host, so that on a GPU a call waits for
what was queued before it. `terms` are the operators' from is_causal or alpha on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from elsa_core.backends import eager, eager_entmax
from elsa_core.backends.eager_entmax import TILE
from elsa_core.base.packing import checked_bounds


def attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    *terms: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Layouts and results are those of the operator `elsa::varlen_attention`."""
    wide = torch.promote_types(query.dtype, torch.float32)
    outputs = [query.new_empty((0, query.shape[1], value.shape[-1]))]
    lses = [query.new_empty((query.shape[1], 0), dtype=wide)]
    for rows, columns in _parts(query, key, cu_seqlens_q, cu_seqlens_k):
        q, k, v = _alone(query[rows], key[columns], value[columns])
        out, lse = eager.attention(q, k, v, None, *terms)
        outputs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    return torch.cat(outputs), torch.cat(lses, 1)


def backward(
    grad_out: Tensor, grad_lse: Tensor, query: Tensor, key: Tensor, value: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, out: Tensor, lse: Tensor, *terms: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients as `elsa_core.backends.eager.backward` computes them, sequence by sequence."""
    is_causal, scale, precision, needs = terms
    if not grad_lse.numel():
        grad_lse = torch.zeros_like(lse)

    def of_sequence(_: int, rows: slice, columns: slice) -> Sequence[Tensor]:
        g_out, q, k, v, whole = _alone(
            grad_out[rows], query[rows], key[columns], value[columns], out[rows]
        )
        slope, of_rows = grad_lse[None, :, rows], lse[None, :, rows]
        return eager.backward(
            g_out, slope, q, k, v, None, whole, of_rows, is_causal, scale, precision,
            (*needs, False),
        )  # fmt: skip

    parts = _parts(query, key, cu_seqlens_q, cu_seqlens_k)
    return _joined((query, key, value), needs, parts, of_sequence)


def entmax_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    head_alpha: Tensor | None, longest_q: int, longest_k: int, *terms: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
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
    for s, (queries, keys) in enumerate(_parts(query, key, cu_seqlens_q, cu_seqlens_k)):
        q, k, v = _alone(query[queries], key[keys], value[keys])
        alpha = None if head_alpha is None else eager._part(head_alpha, slice(s, s + 1))
        found = eager_entmax.attention(q, k, v, None, alpha, *terms)
        out[queries] = found[0][0].transpose(0, 1)
        rows[:, :, queries] = found[1][:, 0]
        tile_rows, tile_columns = _tiles(s, queries, keys)
        tiles[:, tile_rows, tile_columns] = found[2][0]
    return out, rows, tiles


def entmax_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor, head_alpha: Tensor | None, out: Tensor, rows: Tensor, tiles: Tensor,
    longest_q: int, longest_k: int, *terms: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients as `eager_entmax.backward` computes them, sequence by sequence.

    Returns:
        Gradients of query, key, value and head_alpha; empty where `needs`, the last term, says that
        none is wanted.
    """
    alpha, is_causal, scale, precision, needs = terms
    of_alpha, dtype = query.new_empty(0), query.dtype
    if needs[3] and head_alpha is not None:
        # sums over sequences keep the digits that half precision has not
        head_alpha, dtype = head_alpha.to(rows.dtype), head_alpha.dtype
        of_alpha = torch.zeros_like(head_alpha, memory_format=torch.contiguous_format)
    dense = [*needs[:3], False, needs[3]]

    def of_sequence(s: int, queries: slice, keys: slice) -> Sequence[Tensor]:
        g, q, k, v = _alone(grad_out[queries], query[queries], key[keys], value[keys])
        tile_rows, tile_columns = _tiles(s, queries, keys)
        sequence = slice(s, s + 1)
        alpha_of_heads = None if head_alpha is None else eager._part(head_alpha, sequence)
        found = eager_entmax.backward(
            g, q, k, v, None, alpha_of_heads, out, rows[:, None, :, queries],
            tiles[None, :, tile_rows, tile_columns], alpha, is_causal, scale,
            precision, dense,
        )  # fmt: skip
        if of_alpha.numel():
            target = eager._part(of_alpha, sequence)
            target += found[4]
        return found

    parts = _parts(query, key, cu_seqlens_q, cu_seqlens_k)
    grads = _joined((query, key, value), needs, parts, of_sequence)
    return *grads, of_alpha.to(dtype)


def _parts(
    query: Tensor, key: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor
) -> list[tuple[slice, slice]]:
    """Queries and keys of each sequence, in order; the queries cover the packed ones."""
    starts = checked_bounds("cu_seqlens_q", cu_seqlens_q, query.shape[0])
    others = checked_bounds("cu_seqlens_k", cu_seqlens_k, key.shape[0])
    pairs = zip(pairwise(starts), pairwise(others), strict=True)
    return [(slice(*rows), slice(*columns)) for rows, columns in pairs]


def _alone(*packed: Tensor) -> tuple[Any, ...]:
    """[n, H, D] as a batch of one, [1, H, n, D]."""
    return tuple(t.transpose(0, 1).unsqueeze(0) for t in packed)


def _joined(
    inputs: Sequence[Tensor], needs: Sequence[bool], parts: Sequence[tuple[slice, slice]],
    of_sequence: Callable[[int, slice, slice], Sequence[Tensor]],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Packed gradients of query, key and value from those of each sequence; empty where `needs`
    wants none."""
    pairs = zip(inputs, needs, strict=False)
    grads = [torch.zeros_like(t) if needed else t.new_empty(0) for t, needed in pairs]
    for number, (rows, columns) in enumerate(parts):
        found = of_sequence(number, rows, columns)
        for grad, part, place in zip(grads, found, (rows, columns, columns), strict=False):
            if grad.dim() == 3:
                grad[place] = part[0].transpose(0, 1)
    return grads[0], grads[1], grads[2]


def _tiles(sequence: int, queries: slice, keys: slice) -> tuple[slice, slice]:
    """Rows and columns of a sequence's tiles: it begins in row start // TILE + its number."""
    first = queries.start // TILE + sequence
    rows = -(-(queries.stop - queries.start) // TILE)
    return slice(first, first + rows), slice(0, -(-(keys.stop - keys.start) // TILE))
