"""The keep mask of dropout on attention weights: Philox4x32-10, a function of positions alone.

Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011). The weight of batch
entry b, query head h of H, query i and key j is kept where the upper 31 bits of one word are at
least p * 2**31: word j % 4 of the counter (j // 4, i, b * H + h, offset) under the 64-bit key seed.
So tiles, schedules, backends and devices agree bit by bit, and a backward pass needs the seed
alone. The offset counts modulo 2**32. The same in C++: csrc/elsa/philox.h.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_FACTORS = (0xD2511F53, 0xCD9E8D57)
_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LEVELS = 1 << 31  # of what decides: 31 bits, so that a signed comparison is enough


class Dropout(NamedTuple):
    """What drops weights: a probability in [0, 1], and int64 [2], the seed and the offset."""

    p: float
    seed: Tensor


def draw(device: torch.device) -> Tensor:
    """A new seed and offset, int64 [2], from the device's default generator.

    A tensor and not numbers: nothing waits for the device, and a captured or compiled step draws
    new ones each time.
    """
    return torch.randint(0, (1 << 63) - 1, (2,), dtype=torch.int64, device=device)


def threshold(p: float) -> int:
    """The least 31-bit number that keeps a weight, below 2**31."""
    return min(round(p * _LEVELS), _LEVELS - 1)


def words(counters: tuple[Tensor, Tensor, Tensor, Tensor], seed: Tensor) -> tuple[Tensor, ...]:
    """The four words of Philox4x32-10, int64 in [0, 2**32).

    Args:
        counters: int64 in [0, 2**32), broadcastable to one shape.
        seed: int64, a scalar; its low word is the first of the key.
    """
    a, b, c, d = counters
    first, second = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(_ROUNDS):
        # products of 64 bits wrap; what is read of them are their bits
        x, y = a * _FACTORS[0], c * _FACTORS[1]
        a, b, c, d = (
            ((y >> 32) & _WORD) ^ b ^ first, y & _WORD, ((x >> 32) & _WORD) ^ d ^ second, x & _WORD,
        )  # fmt: skip
        first, second = (first + _STEPS[0]) & _WORD, (second + _STEPS[1]) & _WORD
    return a, b, c, d


def factors(
    dropout: Dropout, batch: int, heads: int, rows: slice, columns: slice, dtype: torch.dtype
) -> Tensor:
    """What the weights of a block are multiplied by, 0 or 1 / (1 - p): [batch, heads, rows, keys].

    Args:
        dropout: on the device where the factors are wanted.
        batch, heads: all of them, query heads.
        rows, columns: the queries and keys of the block, with ends.
        dtype: of the factors.
    """
    device = dropout.seed.device
    span = torch.arange(columns.start // 4, -(-columns.stop // 4), device=device)
    queries = torch.arange(rows.start, rows.stop, device=device)[:, None]
    heads_of_all = torch.arange(batch * heads, device=device)[:, None, None]
    counters = (span, queries, heads_of_all, dropout.seed[1] & _WORD)
    found = torch.stack(torch.broadcast_tensors(*words(counters, dropout.seed[0])), -1).flatten(-2)
    first = columns.start % 4
    found = found[..., first : first + columns.stop - columns.start] >> 1
    factor = 1.0 / (1.0 - dropout.p) if dropout.p < 1.0 else 0.0  # at 1 nothing is kept
    kept: Tensor = (found >= threshold(dropout.p)).to(dtype) * factor
    return kept.reshape(batch, heads, *kept.shape[1:])
