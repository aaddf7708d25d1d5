"""From tensors to a planned call: problem, tiles, schedule. Plans are cached per layout, so that a
warm call costs the host little.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from elsa_core.backends.triton.attention import tiling
from elsa_core.backends.triton.attention.schedules import (
    EMPTY,
    FORWARD,
    HOPPER,
    SPLIT_AHEAD,
    forward,
    schedule_of,
)
from elsa_core.backends.triton.attention.schedules.record import Call, Problem, Schedule
from elsa_core.backends.triton.attention.tiling import Plan, Shape
from elsa_core.backends.triton.shared import device, layout
from elsa_core.backends.triton.shared.plans import PLANS


def plan_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    precision: str,
    *,
    specialized: bool | None = None,
    tiles: Plan | None = None,
) -> Call:
    """The planned call; everything here depends on layouts, never on data.

    specialized: whether a kernel of sm_90 may serve it; default: if they can, where the tensors
    are. tiles: these instead of those that the device's table gives (two queries or more).
    """
    widths = q.shape[3], v.shape[3]
    shape = Shape(*q.shape[:2], k.shape[1], q.shape[2], k.shape[2], *widths,
                  layout.has_rows(mask))  # fmt: skip
    if causal and shape.queries == 1 and shape.keys:
        # one causal query sees the first key only
        shape, causal = shape._replace(keys=1), False
    mode = device.mode_of(q.dtype, precision)
    problem = Problem(q, k, v, mask, causal, scale, precision, mode, shape)
    if not (shape.queries == 1 or EMPTY.serves(problem)):
        problem = replace(problem, tiles=tiles or tiles_of(problem, specialized))
    return planned_by(schedule_of(problem), problem)


def plan_state(*arguments: Any) -> Call:
    """As `plan_call`, with lse in float64 where the kernels that fold in tiles serve."""
    call = plan_call(*arguments)
    if call.schedule not in (HOPPER, SPLIT_AHEAD, FORWARD):
        return call
    merge = call.merge and replace(call.merge, lse_dtype=torch.float64)
    return replace(call, merge=merge, lse_dtype=torch.float64)


def planned_by(schedule: Schedule, problem: Problem) -> Call:
    """The call as one schedule plans it, whether or not it is the first that serves it."""
    b, heads, n_q, _ = problem.query.shape
    return Call(
        schedule, (b, heads, n_q, problem.value.shape[3]), (b, heads, n_q),
        schedule.words(problem), *schedule.plan(problem),
    )  # fmt: skip


def tiles_of(problem: Problem, specialized: bool | None) -> Plan:
    """The tiles of the device's table, for the kernels of sm_90 if those may serve."""
    q, k, v, mask = problem.query, problem.key, problem.value, problem.mask
    table, multiprocessors = device.device_table(device.index_of(q.device))
    return tiling.plan(
        problem.shape, problem.mode, table, workspace=problem.precision != "lean",
        multiprocessors=multiprocessors,
        specialized=may_specialize(q, k, v, mask) if specialized is None else specialized,
    )  # fmt: skip


def may_specialize(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether a kernel of sm_90 takes a call with such operands, on their device."""
    return device.specializes(q.device) and fits_specialized(q, k, v, mask)


def fits_specialized(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether `hopper.py` takes operands of such layouts: one block a head dimension, 16-byte
    aligned rows, one chain of the narrowest of its tiles, no mask. The others ask for no less;
    `tiling.Tile` knows their sizes.
    """
    one_block = all(tiling.blocks(t.shape[3])[1] == 0 for t in (q, v))
    one_chain = k.shape[2] <= forward.CHAIN_TILES * 64
    return mask is None and one_block and one_chain and layout.row_unit((q, k, v))[0] > 1


def planned(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    precision: str,
    plan: Callable[..., Call] = plan_call,
) -> Call:
    """The plan of a call, cached by layout."""
    extra = None
    aligned = (q.data_ptr() % 16, k.data_ptr() % 16, v.data_ptr() % 16)
    if mask is not None:
        extra = (mask.dtype, mask.shape, mask.stride(), mask.data_ptr() % 16)
    key = (
        "attention", plan, q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.dtype,
        q.get_device(), aligned, extra, causal, scale, precision,
    )  # fmt: skip
    return PLANS.get(key, plan, q, k, v, mask, causal, scale, precision)


def execute(
    call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Allocate the results and launch."""
    m = q if mask is None else mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    return call.schedule.run(call, q, k, v, m)
