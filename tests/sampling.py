"""Matrices of parameters, and lists of long cases, of which a run of the suite takes a part.

Which part is a number, SAMPLE, from 0 to 11: 0 where the variable names none. The same SAMPLE takes
the same part. WHOLE_MATRICES=1 takes all.
"""

import itertools
import os
from collections.abc import Iterable
from typing import Any

PARTS = 12  # a multiple of every `one_in` below
WHOLE = os.environ.get("WHOLE_MATRICES", "0") != "0"


SAMPLE = int(os.environ.get("SAMPLE", "0")) % PARTS


def taken(place: int, one_in: int = 2) -> bool:
    """Whether this run takes the combination whose indices add up to `place`."""
    return WHOLE or (place + SAMPLE) % one_in == 0


def thinned(*axes: Iterable[Any], one_in: int = 2) -> list[tuple[Any, ...]]:
    """Of all combinations, those whose indices and SAMPLE add up to a multiple of `one_in`.

    `one_in` runs with SAMPLE one after another take every combination once. Each of them takes
    every value of an axis where another axis has `one_in` values or more, and every pair of values
    of two axes where a third one has. `one_in` is 2, 3, 4, 6 or 12.
    """
    rows = [list(enumerate(axis)) for axis in axes]
    return [
        tuple(value for _, value in cells)
        for cells in itertools.product(*rows)
        if taken(sum(index for index, _ in cells), one_in)
    ]


def some(rows: Iterable[Any], one_in: int = 2) -> list[Any]:
    """Of a list of long cases, those whose index and SAMPLE add up to a multiple of `one_in`."""
    return [row for (row,) in thinned(rows, one_in=one_in)]
