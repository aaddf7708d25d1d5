"""From tensors to a planned call: problem, tiles, schedule. Plans are cached per layout, so that a
warm call costs the host little.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from elsa_core.backends.triton.attention import schedules, tiling
from elsa_core.backends.triton.attention.schedules import (
    CHAIN_TILES,
    EMPTY,
    FORWARD,
    HOPPER,
    SPLIT_AHEAD,
    Call,
    Problem,
)
from elsa_core.backends.triton.attention.tiling import Plan, Shape
from elsa_core.backends.triton.shared import device, layout
from elsa_core.backends.triton.shared.launch import Launch
from elsa_core.backends.triton.shared.plans import PLANS


def plan_call(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float,
    precision: str, state: bool = False, *, specialized: bool | None = None,
    tiles: Plan | None = None,
) -> Call:  # fmt: skip
    """The planned call; everything here depends on layouts, never on data.

    state: lse in float64 where the kernels that fold in tiles serve. specialized: whether a kernel
    of sm_90 may serve it; default: if they can, where the tensors are. tiles: these instead of
    those that the device's table gives (two queries or more).
    """
    b, heads, n_q, dim = q.shape
    masked = layout.mask_terms(mask)["mask_q"] != 0
    shape = Shape(b, heads, k.shape[1], n_q, k.shape[2], dim, v.shape[3], masked)
    if causal and shape.queries == 1 and shape.keys:
        # one causal query sees the first key only
        shape, causal = shape._replace(keys=1), False
    mode = device.mode_of(q.dtype, precision)
    problem = Problem(q, k, v, mask, causal, scale, precision, mode, shape)
    if not (shape.queries == 1 or EMPTY.serves(problem)):
        if tiles is None:
            table, multiprocessors = device.device_table(q.get_device())
            if specialized is None:
                specialized = device.specializes(q.device) and fits_specialized(q, k, v, mask)
            tiles = tiling.plan(
                shape, mode, table, workspace=precision != "lean",
                multiprocessors=multiprocessors, specialized=specialized,
            )  # fmt: skip
        problem = replace(problem, tiles=tiles)
    schedule = next(each for each in schedules.SCHEDULES if each.serves(problem))
    launches, workspace, words = schedule.plan(problem)
    states = None
    if launches and launches["fold"].grid[1] > 1:
        fold = launches["fold"]
        states = fold.grid[1], b * heads * n_q, v.shape[3]
        launches["merge"] = _merge(heads, n_q, *states, overlap=fold.tail["OVERLAP"])
    out_shape = (b, heads, n_q, v.shape[3])
    wide = state and schedule in (HOPPER, SPLIT_AHEAD, FORWARD)
    lse_dtype = torch.float64 if wide else torch.float32
    return Call(schedule, out_shape, words, launches, workspace, states, lse_dtype)


def _merge(
    heads: int, queries: int, parts: int, states: int, width: int, *, overlap: bool
) -> Launch:
    from elsa_core.backends.triton.attention.merge import merge_states

    wide, deep = layout.padded(width), layout.padded(parts, 1)
    # 4096 numbers a program, but a program a row while rows are few
    rows = 1 if states < 1024 else max(1, 4096 // (wide * deep))
    tail = {
        "parts": parts, "heads": heads, "n_q": queries, "states": states,
        "ROWS": rows, "PARTS": deep, "DV": width, "VP": wide, "OVERLAP": overlap,
    }  # fmt: skip
    options: dict[str, Any] = {"num_warps": 4 if rows * deep >= 16 else 1}
    if overlap:
        options["launch_pdl"] = True
    return Launch(merge_states, (-(-states // rows),), tail, options)


def fits_specialized(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether `hopper.py` takes operands of such layouts: one block a head dimension, 16-byte
    aligned rows, one chain of the narrowest of its tiles, no mask. The others ask for no less;
    `tiling.Tile` knows their sizes.
    """
    one_block = all(tiling.blocks(t.shape[3])[1] == 0 for t in (q, v))
    one_chain = k.shape[2] <= CHAIN_TILES * 64
    return mask is None and one_block and one_chain and layout.row_unit((q, k, v))[0] > 1


def planned(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float,
    precision: str, state: bool = False,
) -> Call:  # fmt: skip
    """The plan of a call, cached by layout."""
    layouts = tuple(layout.key_of(t) for t in (q, k, v, mask))
    key = ("attention", state, layouts, q.get_device(), causal, scale, precision)
    return PLANS.get(key, plan_call, q, k, v, mask, causal, scale, precision, state)


def execute(
    call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Launch, into out [B, H, N, Dv] in the memory of [B, N, H, Dv] and lse."""
    _, h, n, d = shape = call.out_shape
    out = q.new_empty_strided(shape, (n * h * d, d, h * d, 1))
    lse = q.new_empty(shape[:3], dtype=call.lse_dtype)
    launches, outputs, logs = call.launches, out, lse
    if not launches:
        return out.zero_(), lse.fill_(-math.inf)
    if call.states is not None:  # outputs and base 2 log-sum-exp of each partition
        outputs = q.new_empty(call.states, dtype=torch.float32)
        logs = q.new_empty(call.states[:2], dtype=call.lse_dtype)
    # without a mask or a workspace the kernel does not read their pointers
    given = {"q": q, "k": k, "v": v, "mask": layout.mask_pointer(mask, q), "out": outputs}
    given |= {"lse": logs, "halves": outputs}
    if call.workspace:
        given["halves"] = q.new_empty(call.workspace, dtype=torch.float16)
        launches["ahead"](k, v, given["halves"])
    again = launches.get("fma_fallback")
    if again is not None:
        given["flags"] = q.new_empty(again.tail["blocks"], dtype=torch.int32)
    launches["fold"](*(given[name] for name in call.schedule.takes))
    if again is not None:
        again(q, k, v, given["flags"], outputs, logs)
    if call.states is not None:
        launches["merge"](outputs, logs, out, lse)
    return out, lse
