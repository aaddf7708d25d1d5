"""Limits that several parts of the package share."""

from __future__ import annotations

from typing import Final

LARGEST_HEAD_DIM: Final = 256
"""The largest head dimension of queries, keys and values that every compiled kernel takes."""
