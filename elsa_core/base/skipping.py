"""What attention with `sparsity` may leave out, the same for every backend."""

from __future__ import annotations

import math
from typing import Final

import torch

COUNTS: Final = 5
"""Tiles seen, left out, with maxima, states rescaled, tiles of queries folded again."""


def exact_threshold(dtype: torch.dtype, keys: int) -> float:
    """log2 of the largest weight, relative to a maximum of its row, that may be left out without a
    trace beyond rounding: at most `keys` weights of u / (8 keys), with u the unit roundoff, change
    the sum (1 or more) by u / 8 of itself, and an output by a quarter of u times the largest
    |value| of its column."""
    return math.log2(torch.finfo(dtype).eps) - 4.0 - max(keys - 1, 0).bit_length()
