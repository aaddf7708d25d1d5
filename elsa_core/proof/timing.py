"""What a forward of a patched model takes beside one of the original."""

from __future__ import annotations

import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import nn

from elsa_core.measuring.timing import synchronize
from elsa_core.patching import original
from elsa_core.proof.sides import Given, own

_RUNS: Final = 5
_SECONDS: Final = 3.0  # after which no further round begins


def forwards(
    model: nn.Module, given: Given, device: torch.device
) -> tuple[tuple[float, float], int]:
    """Median seconds of (original, patched) forwards, run in turns, and how many of each.

    A forward that raises takes NaN seconds.
    """
    seconds: tuple[list[float], list[float]] = ([], [])
    start = time.perf_counter()
    while len(seconds[0]) < _RUNS:
        classes: list[AbstractContextManager[Any]] = [original(model), nullcontext()]
        for index, swapped in enumerate(classes):
            with swapped:
                seconds[index].append(_seconds(model, own(given), device))
        if time.perf_counter() - start > _SECONDS:
            break
    return (statistics.median(seconds[0]), statistics.median(seconds[1])), len(seconds[0])


def _seconds(model: nn.Module, given: Given, device: torch.device) -> float:
    args, kwargs = given
    synchronize(device)
    start = time.perf_counter()
    try:
        model(*args, **kwargs)
    except Exception:  # what it raises is in the report already, as the case that failed
        return float("nan")
    synchronize(device)
    return time.perf_counter() - start
