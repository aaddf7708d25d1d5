"""Which launches the gradients of window attention take: by layouts, never by data."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from elsa_core.backends.triton.shared import device
from elsa_core.backends.triton.shared.launch import Launch
from elsa_core.backends.triton.window import planner, tiling
from elsa_core.backends.triton.window.tiling import BackwardPlan, WindowShape
from elsa_core.backends.window_call import WindowCall

# partial sums that a program adds at once, and entries of a row
AT_ONCE, SUM_BLOCK = 16, 64
TABLE_BLOCK = 512


class Wants(NamedTuple):
    """Which gradients are computed: those wanted of terms that there are."""

    qkv: bool
    bias: bool
    pad: bool
    logit: bool


class Call(NamedTuple):
    """A planned call: its launches with the names of what they read and write, and the elements and
    dtype of what it allocates beside the gradients."""

    steps: tuple[tuple[Launch, tuple[str, ...]], ...]
    workspace: dict[str, tuple[int, torch.dtype]]


def tile_plan(given: WindowCall) -> BackwardPlan:
    """Tiles and programs of a call, from the table of its GPU."""
    return tiling.plan_backward(*planner.tile_terms(given))


def plan_call(
    given: WindowCall,
    wants: Wants,
    table: tuple[Tensor, Tensor] | None,
    p: BackwardPlan | None = None,
) -> Call:
    """The launches of a call, by its own plan or a given one: all windows, with a guard again those
    that it turned away; then the sums of their programs, and a table's part of these.

    given: with a dense bias. table: the gradient of a table, and its index.
    """
    from elsa_core.backends.triton.window.backward_tile import window_gradients as kernel

    p = p or tile_plan(given)
    shape = planner.shape_of(given)
    row = shape.tokens**2 * wants.bias + 2 * shape.head_dim * wants.pad + wants.logit
    programs = p.groups * shape.heads
    terms: dict[str, Any] = {
        **planner.common_terms(given), "grad_scale": float(given.scale), "count": p.count,
        "DP": p.padded_dim, "BM": p.block, "ROW": row,
        **{f"WANT_{name.upper()}": wanted for name, wanted in wants._asdict().items()},
    }  # fmt: skip
    names = ("qkv", "grad", "bias", "pad", "logit", "dqkv" if wants.qkv else "none", "partial",
             "flags")  # fmt: skip
    steps = []
    for tile in (p.tile, p.exact):
        if tile is None:
            continue
        options: dict[str, Any] = {"num_warps": tile.warps, "num_stages": tile.stages}
        if tile.registers:
            options["maxnreg"] = tile.registers
        own = terms | {
            "MODE": device.MODES[tile.mode], "AGAIN": tile is p.exact, "STAGES": tile.stages,
            "RELOAD": tile.reload,
        }  # fmt: skip
        known = {name: own[name] for name in kernel.arg_names if name in own}
        steps.append((Launch(kernel, (programs,), known, options), names))
    flags = 1 if p.exact is None else programs + shape.windows * shape.heads
    sizes = {"partial": (max(1, programs * row), torch.float32), "flags": (flags, torch.int32)}
    if row:
        # what sums are written to: a table's are made dense first
        ends = ("dbias" if table is None else "dense", "dpad", "dlogit")
        ends = (end if wanted else "partial" for end, wanted in zip(ends, wants[1:], strict=True))
        launch = _sums(shape, wants, p.groups, row, given.layout == "head")
        steps.append((launch, ("partial", *ends)))
    if table is not None:
        steps.append((_table(table, shape), ("dense", "index", "dbias")))
        sizes["dense"] = (shape.heads * shape.tokens**2, torch.float32)
    return Call(tuple(steps), sizes)


def _sums(shape: WindowShape, wants: Wants, groups: int, row: int, head_first: bool) -> Launch:
    from elsa_core.backends.triton.window.backward_sums import add_partials

    dim = shape.head_dim
    tail = {
        "groups": groups, "heads": shape.heads, "pad_h": dim * (3 if head_first else 1),
        "pad_part": dim * (1 if head_first else shape.heads), "SIZE": shape.tokens**2, "D": dim,
        "ROW": row, "WANT_BIAS": wants.bias, "WANT_PAD": wants.pad, "WANT_LOGIT": wants.logit,
        "AT_ONCE": AT_ONCE, "BLOCK": SUM_BLOCK,
    }  # fmt: skip
    return Launch(add_partials, (-(-row // SUM_BLOCK), shape.heads), tail, {"num_warps": 4})


def _table(table: tuple[Tensor, Tensor], shape: WindowShape) -> Launch:
    from elsa_core.backends.triton.window.backward_sums import add_to_table

    (rows, heads), index = table[0].shape, table[1]
    block = min(8, tiling.padded(heads, 1))
    tail = {
        "size": shape.tokens**2, "rows": rows, "heads": heads, "tokens": shape.tokens,
        **dict(zip(("index_q", "index_k"), index.stride(), strict=True)),
        "HEADS": block, "BLOCK": TABLE_BLOCK,
    }  # fmt: skip
    return Launch(add_to_table, (rows, -(-heads // block)), tail, {"num_warps": 4})
