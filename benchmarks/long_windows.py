"""Gradients of windows of more than 64 tokens on a GPU: `python -m benchmarks.long_windows`.

Stages of timm's Swin-B with windows of 12 (384 px) and SwinV2-B with windows of 16 and 24, batch 8,
float32 and bfloat16. Each contender computes the result and all gradients: `composite` (autograd of
what the models compute), `recomputed` (elsa's forward, gradients in plain PyTorch chunk by chunk),
and elsa's forward with candidate tiles of `backward_fold` (fold BLOCK, warps) and `backward_rows`
(chunks BLOCK x CHUNK, warps). Errors: the larger of the gradients of qkv and of the bias against
float64. `ok`: within twice the composite's, and the same bits twice.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import replace
from multiprocessing import get_context
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.harness import Row, compared, main, options
from benchmarks.window_cases import BF16, F32, composite, distance, make
from elsa_core.backends import eager_window
from elsa_core.backends.triton.shared import device
from elsa_core.backends.triton.window import backward, planner, tiling
from elsa_core.backends.triton.window.backward_plan import Wants, plan_call, tile_plan
from elsa_core.backends.triton.window.tiling import BackwardPlan
from elsa_core.backends.window_call import WindowCall
from elsa_core.measuring.timing import Contender

# batch, side, heads, window, shift, SwinV2's cosine attention
SHAPES: dict[str, tuple[int, int, int, int, int, bool]] = {
    "swin_base w12 stage 1": (8, 96, 4, 12, 6, False),
    "swin_base w12 stage 3": (8, 24, 16, 12, 6, False),
    "swinv2_base w16 stage 1": (8, 64, 4, 16, 8, True),
    "swinv2_base w24 stage 1": (8, 96, 4, 24, 12, True),
}
DTYPES = {"fp32": F32, "bf16": BF16}
NEEDS = (True, True, False, True)
BAND = {F32: 2.5e-7, BF16: 2.5e-3}


class Candidate(NamedTuple):
    """Tiles of `block` tokens; chunk: 0 for `backward_fold`; registers: as `WindowTile`'s."""

    block: int
    chunk: int
    warps: int
    registers: int = 0

    def __str__(self) -> str:
        tiles = f"chunks {self.block}x{self.chunk}" if self.chunk else f"fold {self.block}"
        return f"{tiles}, {self.warps} warps" + (f", {self.registers}" if self.registers else "")


# the first of each is what the tables say
CHUNKED = (
    Candidate(16, 128, 4), Candidate(16, 128, 4, 168), Candidate(16, 128, 8), Candidate(32, 128, 8),
    Candidate(64, 128, 8), Candidate(16, 64, 4),
)  # fmt: skip
FOLDED = {"fp32": (Candidate(64, 0, 8), Candidate(32, 0, 4)), "bf16": (Candidate(64, 0, 4),)}


def candidates(shape: str, dtype: str) -> tuple[Candidate, ...]:
    longest = SHAPES[shape][3] > 16
    return FOLDED[dtype] if longest else (*CHUNKED, *FOLDED[dtype])


def arguments(shape: str, dtype: str, *, small: bool = False) -> tuple[WindowCall, Tensor]:
    """The call, and the gradient of its result. small: few windows, by the same kernels."""
    batch, side, heads, win, shift, cosine = SHAPES[shape]
    if small:
        batch, side = 1, 2 * win
    given = make(
        batch, (1, side, side), heads, 32, (1, win, win), (0, shift, shift), {"cosine": cosine},
        DTYPES[dtype], "strict",
    )  # fmt: skip
    return given, torch.randn_like(given.qkv[..., : heads * 32])


def plan_of(given: WindowCall, chosen: Candidate) -> BackwardPlan:
    """The plan that a table with the candidate's row gives."""
    plan = tile_plan(given)
    tile = replace(
        plan.tile, block_m=chosen.block, block_n=chosen.chunk or chosen.block, warps=chosen.warps,
        registers=chosen.registers, chunked=chosen.chunk > 0,
    )  # fmt: skip
    index = device.index_of(given.qkv.device)
    table = tiling.load_table(device.table_of(index))
    table = replace(table, tiles=(tile, *table.tiles))
    mode = device.mode_of(given.qkv.dtype, given.precision)
    _, multiprocessors = device.device_table(index)
    return tiling.plan_backward(planner.shape_of(given), mode, table, multiprocessors)


def by_kernels(given: WindowCall, grad: Tensor, chosen: Candidate) -> Callable[[], list[Tensor]]:
    """Forward and gradients with the candidate's tiles."""
    wants = Wants(True, True, False, given.logit_scale is not None)
    call = plan_call(given, wants, None, plan_of(given, chosen))

    def run() -> list[Tensor]:
        planner.window_attention(*given)
        grads = [given.qkv.new_empty(0) if t is None else torch.empty_like(t)
                 for t in given.differentiable]  # fmt: skip
        backward.execute(call, given, grad, grads)
        return grads

    return run


def by_autograd(given: WindowCall, grad: Tensor) -> Callable[[], list[Tensor]]:
    """What a model computes, forward and backward."""

    def run() -> list[Tensor]:
        qkv, bias, _, logit = (
            None if t is None else t.detach().requires_grad_() for t in given.differentiable
        )
        assert qkv is not None
        out = composite(given._replace(qkv=qkv, bias=bias, logit_scale=logit))
        leaves = (qkv, bias, logit)
        return list(torch.autograd.grad(out, [t for t in leaves if t is not None], grad))

    return run


def by_recomputing(given: WindowCall, grad: Tensor) -> Callable[[], list[Tensor]]:
    def run() -> list[Tensor]:
        planner.window_attention(*given)
        return list(eager_window.backward(grad, *given, NEEDS))

    return run


def peak(call: Callable[[], object]) -> float:
    """MiB that a call holds at its peak beyond its arguments."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = call()
    torch.cuda.synchronize()
    del found
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def cases(given: Namespace) -> dict[str, tuple[str, str]]:
    """Each shape in each dtype."""
    return {f"{shape}, {dtype}": (shape, dtype) for shape in SHAPES for dtype in DTYPES}


def measure(name: str, case: tuple[str, str], given: Namespace) -> list[Row]:
    """Times, memory and errors of each contender; kernels are compiled ahead in processes."""
    compile_ahead(*case, given.seconds / 4)
    call, grad = arguments(*case)
    doubles = [None if t is None or t.dtype == torch.int64 else t.double() for t in call[:5]]
    expected = eager_window.backward(grad.double(), *doubles, *call[5:], NEEDS)[:2]
    calls: dict[str, Callable[[], list[Tensor]]] = {
        "composite": by_autograd(call, grad), "recomputed": by_recomputing(call, grad),
        **{str(chosen): by_kernels(call, grad, chosen) for chosen in candidates(*case)},
    }  # fmt: skip
    theirs: list[float] = []

    def judge(contender: Contender) -> Row:
        run = calls[contender.name]
        found, again = run()[:2], run()[:2]
        errors = [distance(x, e) for x, e in zip(found, expected, strict=True)]
        same = all(torch.equal(x, y) for x, y in zip(found, again, strict=True))
        theirs[:] = theirs or errors
        most = [2 * t + BAND[DTYPES[case[1]]] for t in theirs]
        right = same and all(x <= m for x, m in zip(errors, most, strict=True))
        return {"error": max(errors), "ok": right, "mib": peak(run)}

    return compared(name, [Contender(n, run) for n, run in calls.items()], given, judge)


def compile_one(shape: str, dtype: str, chosen: Candidate) -> None:
    """Fill Triton's cache."""
    by_kernels(*arguments(shape, dtype, small=True), chosen)()
    torch.cuda.synchronize()


def compile_ahead(shape: str, dtype: str, seconds: float) -> None:
    """The candidates of a case, side by side; what is late is compiled in its turn."""
    pool = ProcessPoolExecutor(min(14, os.cpu_count() or 1), mp_context=get_context("spawn"))
    tasks = [pool.submit(compile_one, shape, dtype, each) for each in candidates(shape, dtype)]
    _, late = wait(tasks, timeout=seconds)
    for process in list((pool._processes or {}).values()) if late else []:
        process.kill()
    pool.shutdown(wait=not late, cancel_futures=True)


if __name__ == "__main__":
    main(__doc__, cases, measure, options(__doc__, rounds=5, device=torch.device("cuda")))
