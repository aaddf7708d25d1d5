"""Checks and times the window attention kernels on this machine's GPU, for the tuning tables.

    python -m elsa_core.bench.tune.window OUT.json [check] [tune] [targets] [--seconds 450]

Without a word all three run, in that order; what is left when the seconds are over is skipped and
named. One line of JSON a result as it comes; OUT.json is rewritten whole after every section.

check: geometry x terms x dtype against float64, by twice the error of the composite that models
    compute in the same dtype (matmul, softmax, matmul on cut windows, as timm's Swin does).
tune: candidate tiles. `ms`: one launch in a CUDA graph, replayed behind a cleared L2;
    `stream_ms`: launches back to back over inputs larger than the L2, divided by their number,
    without the cost of a graph's launch. `copy_ms` and `copy_stream_ms`: a copy that moves the
    same bytes, timed in the same two ways.
targets: what ships against timm's `_attn` (its own softmax, with SDPA, compiled), both projections
    included; what a call costs the host; kernels compiled over image sizes.
Kernels are compiled, and cases checked, in parallel processes first.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from elsa_core.backends.triton.shared.device import device_table
from elsa_core.backends.triton.window import planner, tiling
from elsa_core.backends.triton.window.tiling import WHOLE, WindowPlan, WindowTile
from elsa_core.backends.window_call import WindowCall
from elsa_core.bench.tune.attention import graph_ms
from elsa_core.bench.tune.window_cases import (
    DEVICE,
    F16,
    F32,
    cases,
    check_one,
    composite,
    distance,
    float64,
    limit,
    make,
)

COPY_BYTES_PER_MS = 4.29e9
L2_BYTES = 256e6
START = time.time()

# batch, height and width, heads, head_dim, window, shift
SHAPES: dict[str, tuple[int, ...]] = {
    "56x56x96": (8, 56, 3, 32, 7, 0),
    "56x56x96 shifted": (8, 56, 3, 32, 7, 3),
    "28x28x192 shifted": (8, 28, 6, 32, 7, 3),
    "14x14x384 shifted": (8, 14, 12, 32, 7, 3),
    "112x112x96 shifted": (8, 112, 3, 32, 7, 3),
    "128x128x96 shifted": (8, 128, 3, 32, 7, 3),
    "64x64x96 window 8": (8, 64, 3, 32, 8, 4),
    "48x48x128 window 12": (8, 48, 4, 32, 12, 6),
    "64x64x128 window 16": (8, 64, 4, 32, 16, 8),
    "48x48x192 window 24": (8, 48, 6, 32, 24, 12),
}
# rows: warps, stages, windows a program, registers, least_dim
WHOLE_ROWS = {
    "half": [
        (4, 3, 4, 128, 16), (4, 1, 1, 0, 16), (4, 3, 4, 0, 16), (4, 1, 1, 128, 16),
        (4, 3, 2, 128, 16), (4, 3, 8, 128, 16), (4, 3, 2, 0, 16), (4, 3, 8, 0, 16),
        (4, 2, 4, 0, 16), (4, 2, 2, 128, 16), (4, 2, 4, 128, 16), (4, 2, 8, 128, 16),
        (4, 4, 4, 128, 16), (4, 3, 4, 96, 16), (4, 1, 1, 96, 16), (2, 1, 1, 0, 16),
        (2, 3, 4, 0, 16),
    ],
    "split": [
        (4, 1, 1, 128, 16), (4, 1, 1, 0, 16), (8, 1, 1, 0, 16), (4, 1, 1, 0, 64),
        (4, 1, 1, 168, 16), (2, 1, 1, 0, 16), (4, 1, 2, 128, 16), (4, 2, 2, 168, 16),
        (4, 3, 4, 168, 16), (8, 2, 4, 0, 16), (4, 2, 2, 0, 64),
    ],
}  # fmt: skip
# rows: block_m, block_n, warps, stages, unroll, registers, least_dim
FOLD_ROWS = {
    "half": [
        (64, 64, 4, 2, 0, 0, 16), (64, 64, 4, 3, 0, 0, 16), (128, 64, 8, 2, 0, 0, 16),
        (128, 64, 4, 2, 0, 0, 16), (64, 128, 4, 2, 0, 0, 16), (64, 64, 4, 1, 1, 0, 16),
        (64, 32, 4, 3, 0, 0, 16),
    ],
    "split": [
        (64, 64, 4, 1, 1, 0, 16), (64, 64, 4, 1, 1, 168, 16), (64, 64, 4, 1, 0, 0, 16),
        (64, 64, 4, 1, 0, 0, 64), (64, 64, 4, 2, 0, 168, 64), (128, 64, 8, 1, 1, 0, 16),
        (128, 64, 8, 1, 0, 0, 64), (64, 32, 4, 1, 0, 168, 64), (128, 128, 8, 1, 0, 0, 64),
    ],
}  # fmt: skip
# fewer of them where most answers are known from the shapes above
FEWER: dict[str, dict[str, slice]] = {
    "56x56x96": {"half": slice(0, 6), "split": slice(0, 3)},
    "64x64x96 window 8": {"half": slice(0, 8), "split": slice(0, 6)},
    "48x48x128 window 12": {"half": slice(0, 5), "split": slice(0, 5)},
    "48x48x192 window 24": {"half": slice(0, 4), "split": slice(3, 8, 2)},
}
MODES = {"half": F16, "split": F32}
Task = tuple[Callable[..., dict[str, Any]], tuple[Any, ...]]


def left(seconds: float) -> float:
    return seconds - (time.time() - START)


def built(
    shape: str, mode: str, row: tuple[int, ...], *, small: bool = False
) -> tuple[WindowCall, Any]:
    """The arguments and the launch of a candidate."""
    batch, side, heads, dim, w, s = SHAPES[shape]
    if small:
        batch, side = 2, 2 * w
    given = make(
        batch, (1, side, side), heads, dim, (1, w, w), (0, s, s), {}, MODES[mode], "strict"
    )
    return given, launched(given, mode, row)


def launched(given: WindowCall, mode: str, row: tuple[int, ...]) -> Any:
    tokens, qkv = math.prod(given.window_size), given.qkv
    dim = tiling.padded(qkv.shape[-1] // 3 // given.num_heads)
    cuts = zip(qkv.shape[1:4], given.window_size, strict=True)
    windows = qkv.shape[0] * math.prod(-(-n // w) for n, w in cuts)
    if tokens <= WHOLE:
        warps, stages, count, registers, least = row
        block = tiling.padded(tokens)
        tile = WindowTile(mode, 256, None, block, block, warps, stages, registers=registers)
        programs = -(-windows // count) * given.num_heads
        plan = WindowPlan(tile, True, block, block, count, programs, max(dim, least))
    else:
        bm, bn, warps, stages, unroll, registers, least = row
        tile = WindowTile(
            mode, 256, None, bm, bn, warps, stages, registers=registers, unroll=bool(unroll)
        )
        programs = windows * -(-tokens // bm) * given.num_heads
        plan = WindowPlan(tile, False, bm, bn, 1, programs, max(dim, least))
    return planner.plan_call(given, plan)


def run(call: Any, given: WindowCall, out: torch.Tensor) -> torch.Tensor:
    call(*planner.pointers(given), out)
    return out


def output(given: WindowCall) -> torch.Tensor:
    q = given.qkv
    return torch.full((*q.shape[:-1], q.shape[-1] // 3), math.nan, device=q.device, dtype=q.dtype)


def compile_one(shape: str, mode: str, row: tuple[int, ...]) -> dict[str, Any]:
    """Compile a candidate on a small image, and check it there."""
    result: dict[str, Any] = {"compile": shape, "mode": mode, "row": row}
    try:
        given, call = built(shape, mode, row, small=True)
        reference = float64(given)
        theirs = distance(composite(given), reference)
        ours = distance(run(call, given, output(given)), reference)
        result |= {
            "ours": ours,
            "theirs": theirs,
            "ok": ours <= limit(theirs, MODES[mode], "strict"),
        }
    except Exception as error:
        result |= {"ok": False, "error": repr(error)[:300]}
    return result


def rows_for(shape: str, mode: str) -> list[tuple[int, ...]]:
    rows = (WHOLE_ROWS if SHAPES[shape][4] ** 2 <= WHOLE else FOLD_ROWS)[mode]
    return rows[FEWER.get(shape, {}).get(mode, slice(None))]


def code_of(shape: str, mode: str, row: tuple[int, ...]) -> tuple[Any, ...]:
    """Equal for candidates of one kernel: sizes and windows a program are run-time arguments."""
    _, _, _, dim, w, s = SHAPES[shape]
    constants = row if w * w > WHOLE else (*row[:2], row[2] > 1, *row[3:])
    return mode, dim, w, s > 0, constants


def kernels() -> list[tuple[str, str, tuple[int, ...]]]:
    """One task for each kernel."""
    seen: dict[Any, tuple[str, str, tuple[int, ...]]] = {}
    for mode in MODES:
        for shape in SHAPES:
            for row in rows_for(shape, mode):
                seen.setdefault(code_of(shape, mode, row), (shape, mode, row))
    return list(seen.values())


class Results:
    def __init__(self, path: Path) -> None:
        self.path, self.rows = path, []  # type: ignore[var-annotated]

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        print(json.dumps(row), flush=True)

    def save(self) -> None:
        temporary = self.path.with_suffix(".part")
        temporary.write_text(json.dumps(self.rows, indent=1))
        temporary.replace(self.path)


def answer(job: Any) -> dict[str, Any]:
    """What a process found, or that it died."""
    try:
        row: dict[str, Any] = job.result()
    except Exception as error:
        row = {"ok": False, "error": repr(error)[:300]}
    return row


def prepare(results: Results, sections: list[str], seconds: float) -> set[Any]:
    """Check cases and compile candidates in parallel; returns the candidates that are right."""
    # the slowest compilations first
    tasks: list[Task] = [(compile_one, t) for t in reversed(kernels()) if "tune" in sections]
    tasks += [(check_one, c) for c in (cases() if "check" in sections else [])]
    rows = in_processes(tasks, max(30.0, left(seconds) * 0.6))
    # a fault on the GPU ends every later call of its process: those are asked again, each alone
    again = [i for i, row in enumerate(rows) if "CUDA" in row.get("error", "")][:40]
    fresh = in_processes([tasks[i] for i in again], min(120.0, left(seconds) * 0.3), alone=True)
    for i, row in zip(again, fresh, strict=True):
        rows[i] = row
    right = set()
    for row in rows:
        results.add(row)
        if "compile" in row and row["ok"]:
            right.add(code_of(row["compile"], row["mode"], tuple(row["row"])))
    results.add({
        "prepared": len(rows), "failed": sum(not row["ok"] for row in rows),
        "seconds": time.time() - START,
    })  # fmt: skip
    results.save()
    return right


def in_processes(tasks: list[Task], seconds: float, *, alone: bool = False) -> list[dict[str, Any]]:
    """What the tasks return, in order; an error for those that died or are late."""
    workers = max(1, min(15, (os.cpu_count() or 2) - 1, len(tasks)))
    limit = {"max_tasks_per_child": 1} if alone else {}
    pool = ProcessPoolExecutor(workers, get_context("spawn"), **limit)
    jobs = [pool.submit(function, *arguments) for function, arguments in tasks]
    wait(jobs, timeout=seconds)
    rows = [answer(job) if job.done() else {"ok": False, "error": "late"} for job in jobs]
    for row, (_, arguments) in zip(rows, tasks, strict=True):
        row.setdefault("task", repr(arguments))
    # compilations that still run are not waited for
    processes = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.terminate()
    return rows


def copies(qkv: torch.Tensor, number: int) -> tuple[float, float]:
    """Milliseconds of a copy that moves as many bytes, alone and back to back."""
    size = qkv.numel() * qkv.element_size() * 2 // 3
    sources = [torch.empty(size, dtype=torch.uint8, device=DEVICE) for _ in range(number)]
    target = [torch.empty_like(s) for s in sources]
    alone = graph_ms(lambda: target[0].copy_(sources[0]))

    def each() -> None:
        for a, b in zip(target, sources, strict=True):
            a.copy_(b)

    return alone, graph_ms(each) / number


def tune(results: Results, right: set[Any], seconds: float) -> None:
    for shape in SHAPES:
        for mode in MODES:
            if left(seconds) < 45:
                results.add({"skipped": f"tune {shape} {mode}"})
                continue
            tune_one(results, right, shape, mode)
        results.save()


def tune_one(results: Results, right: set[Any], shape: str, mode: str) -> None:
    rows = rows_for(shape, mode)
    given, _ = built(shape, mode, rows[0])
    total = given.qkv.numel() * given.qkv.element_size() * 4 // 3
    number = max(2, min(24, math.ceil(L2_BYTES / total)))
    inputs = [given._replace(qkv=given.qkv.clone()) for _ in range(number)]
    outs = [output(g) for g in inputs]
    copy_ms, copy_stream = copies(given.qkv, number)
    floor = total / COPY_BYTES_PER_MS
    timed = []
    for row in rows:
        if code_of(shape, mode, row) not in right:
            continue  # wrong, late, or a fault that would end this process too
        try:
            call = launched(given, mode, row)
            ms = graph_ms(lambda: run(call, inputs[0], outs[0]))  # noqa: B023

            def each() -> None:
                for g, out in zip(inputs, outs, strict=True):
                    run(call, g, out)  # noqa: B023

            timed.append((ms, graph_ms(each) / number, row))
        except Exception as error:
            results.add({"tune": shape, "mode": mode, "row": row, "error": repr(error)[:200]})
    timed.sort(key=lambda t: t[0])
    results.add({
        "tune": shape, "mode": mode, "floor_ms": round(floor, 5), "copy_ms": round(copy_ms, 5),
        "copy_stream_ms": round(copy_stream, 5), "columns": ["ms", "over floor", "stream_ms",
        "stream over floor", "row"],
        "rows": [
            [round(a, 5), round(a / floor, 2), round(b, 5), round(b / floor, 2), row]
            for a, b, row in timed
        ],
    })  # fmt: skip


BLOCKS = [(56, 96, 3, 7, 3), (56, 96, 3, 7, 0), (28, 192, 6, 7, 3), (14, 384, 12, 7, 3),
          (7, 768, 24, 7, 0), (128, 96, 3, 7, 3), (64, 128, 4, 16, 8)]  # fmt: skip


def targets(results: Results, seconds: float) -> None:
    """timm's `_attn` against the same with the fused launch, batch 8."""
    host_costs(results)
    for dtype in (F16, F32):
        for number, block in enumerate(BLOCKS):
            if left(seconds) < 30:
                results.add({"skipped": f"targets {dtype} {block}"})
                continue
            compiled = number in (0, 5) and left(seconds) > 100
            try:
                results.add(target(dtype, *block, compiled=compiled))
            except Exception as error:
                results.add({"target": block, "error": repr(error)[:300]})
        results.save()


@torch.no_grad()
def target(
    dtype: torch.dtype, side: int, channels: int, heads: int, w: int, s: int, *, compiled: bool
) -> dict[str, Any]:
    from timm.models.swin_transformer import SwinTransformerBlock

    block = SwinTransformerBlock(
        channels, (side, side), num_heads=heads, head_dim=channels // heads, window_size=w,
        shift_size=s,
    )  # fmt: skip
    block = block.eval().to(DEVICE, dtype)
    attn = block.attn
    torch.nn.init.normal_(attn.relative_position_bias_table, std=0.5)
    x = torch.randn(8, side, side, channels, device=DEVICE, dtype=dtype)
    table, index = attn.relative_position_bias_table, attn.relative_position_index
    dense = attn._get_rel_pos_bias()[0].contiguous()  # as an adapter hands it over
    size, shift = (1, *attn.window_size), (0, *block.shift_size)

    def kernel(qkv: torch.Tensor, bias: torch.Tensor, at: torch.Tensor | None) -> torch.Tensor:
        return planner.window_attention(
            qkv, bias, at, attn.qkv.bias, None, heads, size, shift, attn.scale, -100.0, "qkv",
            False, "strict",
        )  # fmt: skip

    def fused() -> torch.Tensor:
        out = kernel(attn.qkv(x).unsqueeze(1), dense, None)
        return attn.proj(out.squeeze(1))

    attn.fused_attn = False
    theirs = block._attn(x)
    ours = fused()
    reference = copy.deepcopy(block).double()._attn(x.double())
    given = attn.qkv(x).unsqueeze(1)
    row: dict[str, Any] = {
        "target": [side, channels, heads, w, s], "dtype": str(dtype).removeprefix("torch."),
        "ours": distance(ours, reference), "theirs": distance(theirs, reference),
        "fused_ms": graph_ms(fused), "timm_ms": graph_ms(lambda: block._attn(x)),
        "kernel_ms": graph_ms(lambda: kernel(given, dense, None)),
        "table_kernel_ms": graph_ms(lambda: kernel(given, table, index)),
        "linear_ms": graph_ms(lambda: attn.proj(attn.qkv(x)[..., :channels])),
    }  # fmt: skip
    attn.fused_attn = True
    row["timm_sdpa_ms"] = graph_ms(lambda: block._attn(x))
    if compiled:
        try:
            for name, flag in (("timm_compiled_ms", False), ("timm_sdpa_compiled_ms", True)):
                attn.fused_attn = flag
                run_compiled = torch.compile(block._attn, dynamic=False)
                run_compiled(x)
                row[name] = graph_ms(lambda: run_compiled(x))  # noqa: B023
        except Exception as error:
            row["compile_error"] = repr(error)[:200]
    row["ratio"] = round(min(row["timm_ms"], row["timm_sdpa_ms"]) / row["fused_ms"], 2)
    return {k: round(v, 9) if isinstance(v, float) else v for k, v in row.items()}


def host_costs(results: Results) -> None:
    from elsa_core.backends.triton.window.tile import window_tile

    for dtype in (F16, F32):
        given = make(1, (1, 14, 14), 3, 32, (1, 7, 7), (0, 3, 3), {}, dtype, "strict")
        planner.window_attention(*given)
        best = math.inf
        for _ in range(10):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(50):
                planner.window_attention(*given)
            best = min(best, (time.perf_counter() - start) / 50)
        results.add({"host us a call": round(best * 1e6, 1), "dtype": str(dtype)})
    before = sum(len(c[0]) for c in window_tile.device_caches.values())
    for side in range(14, 71, 7):
        given = make(1, (1, side, side), 3, 32, (1, 7, 7), (0, 3, 3), {}, F16, "strict")
        planner.window_attention(*given)
    after = sum(len(c[0]) for c in window_tile.device_caches.values())
    results.add({"kernels compiled over 9 image sizes": after - before})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("sections", nargs="*")
    parser.add_argument("--seconds", type=float, default=450.0)
    options = parser.parse_args()
    sections = options.sections or ["check", "tune", "targets"]
    results = Results(options.out)
    import triton

    results.add({
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__, "triton": triton.__version__,
        "measured": tiling.load_table("h200").measured,
        "multiprocessors": device_table(0)[1],
    })  # fmt: skip
    right = prepare(results, sections, options.seconds)
    if "tune" in sections:
        tune(results, right, options.seconds - (100 if "targets" in sections else 0))
    if "targets" in sections:
        targets(results, options.seconds)
    results.add({"seconds": round(time.time() - START)})
    results.save()


if __name__ == "__main__":
    main()
