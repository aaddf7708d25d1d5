"""Limits that several parts of the package share."""

from __future__ import annotations

from typing import Final

LARGEST_HEAD_DIM: Final = 256
"""The largest head dimension of queries, keys and values that every compiled kernel takes."""
HALF_KEYS_MAX: Final = 512
"""The most keys of a masked call in half precision whose gradients the CPU kernels compute: beyond
them PyTorch's kernel takes less time in bfloat16, where the CPU multiplies it.
"""
