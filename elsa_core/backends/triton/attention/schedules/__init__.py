"""The schedules of the attention forward, in order: the first that serves a call plans and runs it.

Those of sm_90 come first because their tiles say so themselves (`tiling.Tile.specialized`), and a
tile is chosen for a call before its schedule is (`tiling.plan`). `forward` takes every call that is
folded in tiles, so the order ends with it.
"""

from __future__ import annotations

import math

from torch import Tensor

from elsa_core.backends.triton.attention.schedules.few import DECODE, ONE_LAUNCH, TWO_WARPGROUPS
from elsa_core.backends.triton.attention.schedules.forward import FORWARD, HOPPER, SPLIT_AHEAD
from elsa_core.backends.triton.attention.schedules.record import Call, Problem, Schedule


def _is_empty(problem: Problem) -> bool:
    return not (problem.query.numel() and problem.key.numel() and problem.value.numel())


def _zeros(
    call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, out: Tensor, lse: Tensor
) -> None:
    out.zero_()
    lse.fill_(-math.inf)


EMPTY = Schedule(
    "empty", _is_empty, lambda problem: ({}, 0), _zeros, lambda problem: "nothing to compute: zeros"
)
SCHEDULES = (EMPTY, DECODE, TWO_WARPGROUPS, ONE_LAUNCH, HOPPER, SPLIT_AHEAD, FORWARD)
