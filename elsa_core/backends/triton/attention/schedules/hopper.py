"""The schedule of float32 on sm_90: keys and values split ahead, folded by the warp-specialised
kernel, and what its guard flags folded again with float32 FMA.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from elsa_core.backends.triton.attention.schedules.forward import (
    ahead_launch,
    fold_grid,
    fold_options,
    fold_tail,
    fold_words,
)
from elsa_core.backends.triton.attention.schedules.merge import plan_merge
from elsa_core.backends.triton.attention.schedules.record import (
    Call,
    Parts,
    Problem,
    Schedule,
    known,
)
from elsa_core.backends.triton.shared.launch import Launch

# what a thread of a copying and of a second folding warpgroup may hold; the first gets the rest
COPY_REGISTERS = 40
FOLD_REGISTERS = 232


def _serves(problem: Problem) -> bool:
    return problem.tile.specialized and problem.tile.ahead


def _plan(problem: Problem) -> Parts:
    from elsa_core.backends.triton.attention import hopper

    tail = fold_tail(problem)
    ahead, workspace = ahead_launch(problem, tail)
    own = {
        **tail, "scale": tail["scale"] * tail["flip"],
        "FOLD_REGISTERS": FOLD_REGISTERS, "COPY_REGISTERS": COPY_REGISTERS,
    }  # fmt: skip
    options = fold_options(problem, tail)
    del options["num_stages"]
    fold = Launch(hopper.forward, fold_grid(problem), known(hopper.forward, own), options)
    fallback = fallback_launch(problem, tail)
    merge = plan_merge(problem.shape, problem.tiles.partitions, tail["OVERLAP"])
    return Parts({"ahead": ahead, "fold": fold, "fma_fallback": fallback}, merge, workspace)


def fallback_launch(problem: Problem, tail: dict[str, Any]) -> Launch:
    """The launch that folds flagged blocks of queries again with float32 FMA."""
    from elsa_core.backends.triton.attention import fma_fallback

    shape = problem.shape
    blocks = shape.batch * shape.heads * -(-shape.queries // fma_fallback.ROWS.value)
    blocks *= problem.tiles.partitions
    wide = max(tail["D0"], tail["V0"]) > 64
    options: dict[str, Any] = {"num_warps": 8 if wide else 4}
    if tail["OVERLAP"]:
        options["launch_pdl"] = True
    kernel = fma_fallback.fma_fallback
    grid = (min(blocks, fma_fallback.PROGRAMS),)
    return Launch(kernel, grid, known(kernel, {**tail, "blocks": blocks}), options)


def _run(call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = call.results(q)
    launches, merge = call.launches, call.merge
    outputs, logs = (out, lse) if merge is None else merge.states(q)
    halves = q.new_empty(call.workspace, dtype=torch.float16)
    launches["ahead"](k, v, halves)
    fallback = launches["fma_fallback"]
    flags = q.new_empty(fallback.tail["blocks"], dtype=torch.int32)
    launches["fold"](q, halves, flags, outputs, logs)
    fallback(q, k, v, flags, outputs, logs)
    if merge is not None:
        merge.launch(outputs, logs, out, lse)
    return out, lse


HOPPER = Schedule("hopper", _serves, _plan, _run, fold_words)
