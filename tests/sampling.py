"""Matrices of parameters, and lists of long cases, of which a run of the suite takes a part.

Which part is a number that the commit chooses, so that the runs of CI take the parts in turn:
SAMPLE, which every process of a run inherits and the end of its output names. The same SAMPLE
takes the same part. WHOLE_MATRICES=1 takes all.
"""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PARTS = 12  # a multiple of every `one_in` below
WHOLE = os.environ.get("WHOLE_MATRICES", "0") != "0"


def number() -> int:
    """SAMPLE, else one from the commit of this checkout; 0 where there is none."""
    if "SAMPLE" in os.environ:
        return int(os.environ["SAMPLE"]) % PARTS
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True,
            text=True, check=True,
        )  # fmt: skip
        return int(answer.stdout[:8], 16) % PARTS
    except (OSError, ValueError, subprocess.CalledProcessError):
        return 0


SAMPLE = number()
os.environ["SAMPLE"] = str(SAMPLE)  # for the processes of this run, whatever becomes of the commit


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
