"""Plain data in result documents: numbers that JSON can hold, sizes in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def side(size: Sequence[int]) -> str:
    """An image size in words: `384`, or `384x256`."""
    return str(size[0]) if size[0] == size[1] else f"{size[0]}x{size[1]}"


def finite(value: Any) -> Any:
    """Plain data with None for numbers that are not finite: JSON has none."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value
