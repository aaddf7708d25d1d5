"""What the shipped benchmark results say of a call: whether elsa was slower than a peer near it."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch

# Half as long or twice as long is still near: speed against a peer changes slowly with length.
_NEAR = 1.0
_LOST = 0.97  # below the noise of a measurement
_DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


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
    if nearest is None or distance(nearest) > _NEAR or nearest.ratio >= _LOST:
        return ""
    return (
        f"published results: {nearest.ratio:.2f}x the speed of {nearest.peer} at "
        f"{nearest.name} on {nearest.machine}; measure yours with elsa bench attention"
    )


@functools.cache
def _cases(device_type: str) -> tuple[Case, ...]:
    """Every strict, turbo or lean measurement of the shipped files for a device type."""
    found: list[Case] = []
    for file in sorted((Path(__file__).parent / "results").glob("*.json")):
        document = json.loads(file.read_text(encoding="utf-8"))
        if document["environment"].get("device") == device_type:
            found += _read(document)
    return tuple(found)


def _read(document: dict[str, Any]) -> list[Case]:
    environment = document["environment"]
    machine = environment.get("gpu") or f"a CPU with {environment.get('isa') or 'no known ISA'}"
    found = []
    for row in document["results"].get("cases", ()):
        case = row["case"]
        for measured in row.get("measurements", ()):
            if measured.get("precision") and measured.get("ratio") and "queries" in case:
                found.append(
                    Case(
                        case["name"], case["batch"], case["heads"], case["queries"], case["keys"],
                        case["head_dim"], case["dtype"], case.get("mask", "none") != "none",
                        measured["precision"], row.get("best_peer") or "a peer",
                        measured["ratio"], machine,
                    )
                )  # fmt: skip
    return found
