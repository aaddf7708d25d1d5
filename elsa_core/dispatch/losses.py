"""What the published results say of a call: whether elsa was slower than a peer near it.

`losses.json` beside this file is the part of the results that this needs;
`python -m benchmarks.losses` writes it.
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Final, NamedTuple

import torch

from elsa_core.precision import DTYPES

# Half as long or twice as long is still near: speed against a peer changes slowly with length.
_NEAR = 1.0
LOST: Final = 0.97
"""Ratio under which a case counts as lost: below the noise of a measurement."""
TABLE: Final = Path(__file__).with_name("losses.json")
_DTYPES = {dtype: name for name, dtype in DTYPES.items()}


class Case(NamedTuple):
    """One measured call and the ratio of the best peer's time over elsa's."""

    name: str
    batch: int
    heads: int
    queries: int
    keys: int
    head_dim: int
    dtype: str
    masked: bool
    precision: str
    peer: str
    ratio: float
    machine: str


def losing_case(
    device_type: str,
    shape: tuple[int, int, int, int],
    keys: int,
    dtype: torch.dtype,
    masked: bool,
    precision: str,
) -> str:
    """One line about the nearest published case if elsa lost it, else "".

    Args:
        device_type: "cpu" or "cuda".
        shape: [B, H, Nq, D] of the query.
        keys: Nk.
        dtype: of the query.
        masked: whether there is a mask or causality.
        precision: the one asked for.
    """
    batch, heads, queries, head_dim = shape
    if 0 in shape or keys == 0:
        return ""
    alike = [
        case
        for case in _cases(device_type)
        if case.dtype == _DTYPES.get(dtype)
        and (case.head_dim, case.masked, case.precision) == (head_dim, masked, precision)
    ]

    def distance(case: Case) -> float:
        lengths = abs(math.log2(case.queries / queries)), abs(math.log2(case.keys / keys))
        work = abs(math.log2(case.batch * case.heads / (batch * heads)))
        return max(*lengths, work / 4)

    nearest = min(alike, key=distance, default=None)
    if nearest is None or distance(nearest) > _NEAR or nearest.ratio >= LOST:
        return ""
    return (
        f"published results: {nearest.ratio:.2f}x the speed of {nearest.peer} at "
        f"{nearest.name} on {nearest.machine}; measure yours with elsa bench attention"
    )


@functools.cache
def _cases(device_type: str) -> tuple[Case, ...]:
    """The table's rows of a device type."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    machines = table["machines"]
    return tuple(
        Case._make([*row, machine["name"]])
        for machine in machines
        if machine["device"] == device_type
        for row in machine["cases"]
    )
