"""Which launches the gradients of window attention take: by layouts, never by data."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from elsa_core.backends.triton.shared import device
from elsa_core.backends.triton.shared.launch import Launch
from elsa_core.backends.triton.window import planner, tiling
from elsa_core.backends.triton.window.tiling import BackwardPlan, WindowShape, WindowTile
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


_TERMS = ("qkv", "grad", "bias", "pad", "logit")


def tile_plan(given: WindowCall) -> BackwardPlan:
    """Tiles and programs of a call, from the table of its GPU."""
    index = device.index_of(given.qkv.device)
    _, multiprocessors = device.device_table(index)
    table = tiling.load_table(device.table_of(index))
    mode = device.mode_of(given.qkv.dtype, given.precision)
    return tiling.plan_backward(planner.shape_of(given), mode, table, multiprocessors)


def plan_call(
    given: WindowCall,
    wants: Wants,
    table: tuple[Tensor, Tensor] | None,
    p: BackwardPlan | None = None,
) -> Call:
    """The launches of a call, by its own plan or a given one.

    given: with a dense bias. table: the gradient of a table, and its index.
    """
    p = p or tile_plan(given)
    shape = planner.shape_of(given)
    terms = {
        **planner.common_terms(given), "grad_scale": float(given.scale), "count": p.count,
        "DP": p.padded_dim, "BM": p.block,
    }  # fmt: skip
    # what sums are written to: a table's are made dense first
    dense = "dbias" if table is None else "dense"
    call = _plan_windows(given, shape, terms, wants, p, dense)
    if table is not None:
        steps = (*call.steps, (_plan_table(table, shape), ("dense", "index", "dbias")))
        size = shape.heads * shape.tokens**2
        call = Call(steps, {**call.workspace, "dense": (size, torch.float32)})
    return call


def _passes(terms: dict[str, Any], p: BackwardPlan, programs: int) -> list[Launch]:
    """The launches of all windows, and with a guard of those that it turned away."""
    from elsa_core.backends.triton.window.backward_tile import window_gradients as kernel

    tiles: list[tuple[WindowTile, bool]] = [(p.tile, False)]
    if p.exact is not None:
        tiles.append((p.exact, True))
    found = []
    for tile, again in tiles:
        options: dict[str, Any] = {"num_warps": tile.warps, "num_stages": tile.stages}
        if tile.registers:
            options["maxnreg"] = tile.registers
        own = terms | {
            "MODE": device.MODES[tile.mode], "AGAIN": again, "STAGES": tile.stages,
            "RELOAD": tile.reload,
        }  # fmt: skip
        known = {name: own[name] for name in kernel.arg_names if name in own}
        found.append(Launch(kernel, (programs,), known, options))
    return found


def _plan_windows(
    given: WindowCall, shape: WindowShape, terms: dict[str, Any], wants: Wants, p: BackwardPlan,
    dense: str,
) -> Call:  # fmt: skip
    """The windows by `backward_tile`, then its sums."""
    row = shape.tokens**2 * wants.bias + 2 * shape.head_dim * wants.pad + wants.logit
    programs = p.groups * shape.heads
    own = {f"WANT_{name.upper()}": wanted for name, wanted in wants._asdict().items()}
    names = (*_TERMS, "dqkv" if wants.qkv else "none", "partial", "flags")
    found = _passes(terms | own | {"ROW": row}, p, programs)
    steps = [(launch, names) for launch in found]
    if row:
        steps.append(_plan_sums(given, shape, wants, p.groups, "partial", dense))
    flags = 1 if p.exact is None else programs + shape.windows * shape.heads
    sizes = {"partial": (max(1, programs * row), torch.float32), "flags": (flags, torch.int32)}
    return Call(tuple(steps), sizes)


def _plan_sums(
    given: WindowCall, shape: WindowShape, wants: Wants, groups: int, partial: str, dense: str
) -> tuple[Launch, tuple[str, ...]]:
    from elsa_core.backends.triton.window.backward_sums import add_partials

    size, dim, first = shape.tokens**2, shape.head_dim, given.layout == "head"
    row = size * wants.bias + 2 * dim * wants.pad + wants.logit
    tail = {
        "groups": groups, "heads": shape.heads, "pad_h": dim * (3 if first else 1),
        "pad_part": dim * (1 if first else shape.heads),
        "SIZE": size, "D": dim, "ROW": row, "WANT_BIAS": wants.bias,
        "WANT_PAD": wants.pad, "WANT_LOGIT": wants.logit, "AT_ONCE": AT_ONCE, "BLOCK": SUM_BLOCK,
    }  # fmt: skip
    launch = Launch(add_partials, (-(-row // SUM_BLOCK), shape.heads), tail, {"num_warps": 4})
    ends = zip((dense, "dpad", "dlogit"), wants[1:], strict=True)
    return launch, (partial, *(name if wanted else partial for name, wanted in ends))


def _plan_table(table: tuple[Tensor, Tensor], shape: WindowShape) -> Launch:
    from elsa_core.backends.triton.window.backward_sums import add_to_table

    (rows, heads), index = table[0].shape, table[1]
    block = min(8, tiling.padded(heads, 1))
    tail = {
        "size": shape.tokens**2, "rows": rows, "heads": heads, "tokens": shape.tokens,
        **dict(zip(("index_q", "index_k"), index.stride(), strict=True)),
        "HEADS": block, "BLOCK": TABLE_BLOCK,
    }  # fmt: skip
    return Launch(add_to_table, (rows, -(-heads // block)), tail, {"num_warps": 4})
