"""Matrices of parameters, of which the suite takes a part by a fixed rule."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from typing import Any

WHOLE = os.environ.get("WHOLE_MATRICES", "0") != "0"


def thinned(*axes: Iterable[Any], one_in: int = 2) -> list[tuple[Any, ...]]:
    """Of all combinations, those whose indices add up to a multiple of `one_in`.

    Every value of every axis is among them, and every pair of values of two axes where there is a
    third of `one_in` values or more. All of them where WHOLE_MATRICES=1 is set.
    """
    rows = [list(enumerate(axis)) for axis in axes]
    return [
        tuple(value for _, value in cells)
        for cells in itertools.product(*rows)
        if WHOLE or sum(index for index, _ in cells) % one_in == 0
    ]
