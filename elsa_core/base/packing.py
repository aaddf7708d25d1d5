"""Packed sequences [T, ...] and padded batches [S, N, ...] of the same tokens, by index arithmetic.

But for `checked_bounds` nothing here waits for a device, and no shape depends on the lengths.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from elsa_core.errors import ArgumentError


def checked_bounds(name: str, cu_seqlens: Tensor, tokens: int) -> list[int]:
    """Cumulative lengths as integers; on a GPU this waits for what was queued before it."""
    found: list[int] = cu_seqlens.tolist()
    if found[0] != 0 or found[-1] != tokens or any(a > b for a, b in pairwise(found)):
        raise ArgumentError(f"{name} must start with 0, not decrease and end with {tokens} tokens")
    return found


def inside(cu_seqlens: Tensor, longest: int) -> Tensor:
    """Which places of a padded batch hold a token: bool [S, longest] of cu_seqlens [S + 1]."""
    place = torch.arange(longest, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return place < cu_seqlens.diff()[:, None]


def padded(packed: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    """[T, ...] as [S, longest, ...], zeros where a sequence has no token; T is not 0."""
    place = torch.arange(longest, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    tokens = (cu_seqlens[:-1, None] + place).clamp(max=packed.shape[0] - 1)
    hidden = ~inside(cu_seqlens, longest)
    # zeros and not what stands there: zero times infinity is NaN
    return packed[tokens].masked_fill(hidden[(..., *(None,) * (packed.dim() - 1))], 0)


def packed(padded: Tensor, cu_seqlens: Tensor, tokens: int) -> Tensor:
    """[S, N, ...] as [tokens, ...], the places that hold a token."""
    token = torch.arange(tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:], token, right=True)
    return padded[sequence, token - cu_seqlens[sequence]]
