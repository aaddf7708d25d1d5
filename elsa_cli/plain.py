"""Results as plain JSON data."""

from __future__ import annotations

import math
from typing import Any


def jsonable(value: Any) -> Any:
    """`value` as plain JSON data: paths and other objects as text, non-finite floats as null,
    because JSON has no such numbers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [jsonable(item) for item in value]
    return str(value)
