"""Times candidate tiles of the Triton kernels on this machine's GPU, for the tuning tables.

    python -m elsa_core.bench.tune.attention OUT.json GROUP ...   (groups of candidates.json)
    python -m elsa_core.bench.tune.attention OUT.json decode      (knobs of the one-query kernel)
    python -m elsa_core.bench.tune.attention OUT.json targets     (what ships, against its peers)

A row of candidates.json: block_m, block_n, warps, stages, ahead, part, partitions, one_loop,
registers. A shape: B, H, N, D and, where values are wider, Dv. mask: "heads" for a bias
[1, H, N, N], "batch" for one [B, H, N, N], "keys" for a boolean mask [B, 1, 1, N] that hides a
quarter of them.
Each candidate's output is checked against float64 rows before it is timed. Compilation runs in
parallel processes; times are medians of CUDA graph replays; peers run in the same process.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from elsa_core.backends.triton.attention import planner, tiling
from elsa_core.backends.triton.attention.schedules.record import Call
from elsa_core.backends.triton.attention.tiling import Plan, Shape, Tile
from elsa_core.backends.triton.shared.device import device_table
from elsa_core.graphs.capture import captured

PRECISIONS = {"half": "strict", "split": "strict", "single": "turbo"}
DTYPES = {"half": torch.float16, "split": torch.float32, "single": torch.float32}


Group = tuple[str, str | None]  # mode, mask
Tensors = tuple[Any, ...]  # query, key, value, mask


def candidates(group: str) -> list[tuple[Group, tuple[int, ...], list[tuple]]]:
    """(mode and mask, shape B H N D Dv, rows)."""
    groups = json.loads((Path(__file__).parent / "candidates.json").read_text())
    return [
        ((g["mode"], g.get("mask")), (*s, s[3])[:5], g["rows"])
        for g in groups[group]
        for s in g["shapes"]
    ]


def inputs(shape: tuple[int, ...], dtype: torch.dtype, mask: str | None = None) -> Tensors:
    b, h, n, *widths = shape
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, device="cuda", generator=generator).to(dtype)

    d, dv = widths[0], widths[-1]
    bias = None
    if mask == "keys":
        bias = torch.rand(b, 1, 1, n, device="cuda", generator=generator) > 0.25
    elif mask is not None:
        bias = draw(1 if mask == "heads" else b, h, n, n)
    return draw(b, h, n, d), draw(b, h, n, d), draw(b, h, n, dv), bias


def build(mode: str, shape: tuple[int, ...], row: list, tensors: Tensors) -> Call:
    bm, bn, warps, stages, ahead, part, parts, one, registers = row
    n, d = shape[2:4]
    tile = Tile(
        mode, 256, None, None, bm, bn, warps, stages, bool(ahead), part, registers, bool(one)
    )  # fmt: skip
    key_tiles = -(-n // bn)
    chunk = -(-key_tiles // parts) * bn
    plan = Plan(tile, -(-n // chunk), chunk)
    return planner.plan_call(*tensors, False, d**-0.5, PRECISIONS[mode], tiles=plan)


def compile_one(task: tuple) -> str:
    (mode, mask), shape, row = task
    small = (1, *shape[1:2], min(shape[2], 4096), *shape[3:])
    try:
        tensors = inputs(small, DTYPES[mode], mask)
        planner.execute(build(mode, small, row, tensors), *tensors)
        torch.cuda.synchronize()
    except Exception as error:
        return repr(error)[:120]
    return ""


def graph_ms(call: Any) -> float:
    import triton

    call()
    replay = captured(call)
    return triton.testing.do_bench(replay, warmup=8, rep=25, return_mode="median")


def oracle(tensors: Tensors, rows: int = 128) -> torch.Tensor:
    q, k, v = (t[:1, :2].double() for t in tensors[:3])
    ends = lambda t: torch.cat([t[:, :, :rows], t[:, :, -rows:]], 2)  # noqa: E731
    scores = ends(q) @ k.mT / math.sqrt(q.shape[-1])
    mask = tensors[3]
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask[:1], -math.inf)
    elif mask is not None:
        scores += ends(mask[:1, :2].double())
    return torch.softmax(scores, -1) @ v


def error(out: torch.Tensor, reference: torch.Tensor, rows: int = 128) -> float:
    out = torch.cat([out[:1, :2, :rows], out[:1, :2, -rows:]], 2).double()
    return ((out - reference).norm() / reference.norm()).item()


def peers(mode: str, tensors: Tensors, reference: torch.Tensor) -> dict[str, list[float]]:
    backends = {"efficient": SDPBackend.EFFICIENT_ATTENTION}
    if mode == "half":
        backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    if tensors[3] is not None:  # of PyTorch's choice, and the formula written out
        backends = {"math": SDPBackend.MATH, "efficient": SDPBackend.EFFICIENT_ATTENTION}
        backends |= {"cudnn": SDPBackend.CUDNN_ATTENTION} if mode == "half" else {}
    found = {}
    for name, backend in backends.items():
        with sdpa_kernel(backend):
            try:
                ms = graph_ms(lambda: F.scaled_dot_product_attention(*tensors))
                found[name] = [ms, error(F.scaled_dot_product_attention(*tensors), reference)]
            except RuntimeError:  # PyTorch has no such kernel for these tensors
                continue
    return found


def tune_decode() -> None:
    """Times the one-query kernel over its knobs."""
    import itertools

    shapes = [(1, 32, 32768, 64), (1, 8, 524288, 64), (4, 16, 65536, 128)]
    table, _ = device_table(0)
    for shape, dtype in itertools.product(shapes, (torch.float16, torch.float32)):
        b, h, n, d = shape
        q = torch.randn(b, h, 1, d, device="cuda", dtype=dtype)
        k, v = (torch.randn(b, h, n, d, device="cuda", dtype=dtype) for _ in range(2))
        size = 2 * k.numel() * k.element_size()
        backends = [SDPBackend.MATH]
        if dtype == torch.float16:
            backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]
        best = math.inf
        for backend in backends:
            with sdpa_kernel(backend):
                best = min(best, graph_ms(lambda: F.scaled_dot_product_attention(q, k, v)))  # noqa: B023
        timed = []
        for bytes_, warps, stages, resident in itertools.product(
            (8192, 16384, 32768), (4, 8), (1, 3, 4), (2, 4, 8)
        ):
            table.decode.update(tile_bytes=bytes_, warps=warps, stages=stages, resident=resident)
            try:
                call = planner.plan_call(q, k, v, None, False, d**-0.5, "strict")
                ms = graph_ms(lambda: planner.execute(call, q, k, v, None))  # noqa: B023
                timed.append((ms, (bytes_, warps, stages, resident), call.fold.grid))
            except Exception as problem:
                timed.append((math.inf, repr(problem)[:50], ()))
        timed.sort(key=lambda t: t[0])
        print("decode", shape, dtype, f"peer {best:.4f} ms {size / best / 1e9:.2f} TB/s")
        for ms, knobs, grid in timed[:6]:
            print(
                f"   {ms:.4f} ms {best / ms:.2f}x {size / ms / 1e9:.2f} TB/s {knobs} {grid}",
                flush=True,
            )


TARGETS = [
    (8, 12, 197, 64), (1, 12, 197, 64), (8, 16, 577, 64), (8, 12, 1025, 64), (1, 12, 4097, 64),
    (1, 8, 4096, 64),
    (1, 8, 16384, 64), (1, 4, 65536, 64), (8, 12, 1024, 32), (4, 16, 1024, 80), (1, 8, 4096, 128),
    (1, 8, 16384, 128),
]  # fmt: skip


def partitioned(mode: str, tensors: Tensors, count: int) -> Call:
    """The planned call, with another number of key partitions."""
    q = tensors[0]
    b, h, n, d = q.shape
    widths = d, tensors[2].shape[3]
    shape = Shape(b, h, h, n, n, *widths, tensors[3] is not None)
    table, multiprocessors = device_table(0)
    plan = tiling.plan(
        shape, mode, table, workspace=True, multiprocessors=multiprocessors,
        specialized=planner.may_specialize(*tensors),
    )  # fmt: skip
    if count:
        tiles = -(-n // plan.tile.block_n)
        chunk = -(-tiles // count) * plan.tile.block_n
        plan = Plan(plan.tile, -(-n // chunk), chunk)
    return planner.plan_call(*tensors, False, d**-0.5, PRECISIONS[mode], tiles=plan)


def peak(call: Any) -> float:
    """MiB that a call takes beyond what is there."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def time_targets() -> None:
    """The planned calls against their peers, and with 1 and 2 partitions."""
    from elsa_core.backends.triton import attention_forward as attention

    for mode, shape in [(m, s) for m in ("split", "half") for s in TARGETS]:
        tensors = inputs(shape, DTYPES[mode])
        reference = oracle(tensors) if shape[2] <= 16384 else oracle(tensors, 16)
        rows = 128 if shape[2] <= 16384 else 16
        best = {}
        for name, backend in (
            {"efficient": SDPBackend.EFFICIENT_ATTENTION}
            if mode == "split"
            else {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
        ).items():
            with sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(*tensors)
                best[name] = (
                    graph_ms(lambda: F.scaled_dot_product_attention(*tensors)),  # noqa: B023
                    error(out, reference, rows),
                    peak(lambda: F.scaled_dot_product_attention(*tensors)),  # noqa: B023
                )
        peer = min(v[0] for v in best.values())
        line = f"{mode} {shape} peer {peer:.4f} ms {min(v[1] for v in best.values()):.1e}"
        precision = "strict"
        run = lambda: attention(*tensors, False, shape[3] ** -0.5, precision)  # noqa: B023, E731
        ms, e, call = graph_ms(run), error(run()[0], reference, rows), partitioned(mode, tensors, 0)
        line += f" | ours {ms:.4f} ms {peer / ms:.2f}x {e:.1e} parts {call.fold.grid[1]}"
        line += f" MiB {peak(run):.0f} against {min(v[2] for v in best.values()):.0f} |"
        for count in (1, 2):
            forced = partitioned(mode, tensors, count)
            line += f" {count}: {graph_ms(lambda: planner.execute(forced, *tensors)):.4f}"  # noqa: B023
        if mode == "split" and shape[2] in (1025, 16384):
            for precision in ("turbo", "lean", "ieee"):
                line += f" {precision} {graph_ms(run):.4f} {error(run()[0], reference, rows):.1e}"
        print(line, flush=True)


def time_decode() -> None:
    """One query against long contexts, as planned."""
    from elsa_core.backends.triton import attention_forward as attention

    for b, h, n, d in (
        (1, 32, 32768, 64),
        (1, 32, 262144, 64),
        (1, 8, 524288, 64),
        (4, 16, 65536, 128),
    ):
        for dtype in (torch.float16, torch.float32):
            q = torch.randn(b, h, 1, d, device="cuda", dtype=dtype)
            k, v = (torch.randn(b, h, n, d, device="cuda", dtype=dtype) for _ in range(2))
            backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]
            if dtype == torch.float32:
                backends = [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION]
            best = math.inf
            for backend in backends:
                with sdpa_kernel(backend):
                    best = min(best, graph_ms(lambda: F.scaled_dot_product_attention(q, k, v)))  # noqa: B023
                    peer = F.scaled_dot_product_attention(q, k, v)
            run = lambda: attention(q, k, v, None, False, d**-0.5, "strict")  # noqa: B023, E731
            ms, out = graph_ms(run), run()[0]
            exact = torch.softmax(q[:1].double() @ k[:1].double().mT * d**-0.5, -1) @ v[:1].double()
            errors = [((x[:1].double() - exact).norm() / exact.norm()).item() for x in (out, peer)]
            rate = 2 * k.numel() * k.element_size() / ms / 1e9
            print(
                f"decode {b},{h},{n},{d} {dtype} {ms:.4f} ms {best / ms:.2f}x {rate:.2f} TB/s "
                f"{errors[0]:.1e} against {errors[1]:.1e}", flush=True,
            )  # fmt: skip


def million() -> None:
    """A million tokens in strict: time, memory, and the error of sampled rows."""
    from elsa_core.backends.triton import attention_forward as attention

    q, k, v, _ = inputs((1, 1, 1 << 20, 64), torch.float32)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    attention(q, k, v, None, False, 0.125, "strict")
    start.record()
    out, _ = attention(q, k, v, None, False, 0.125, "strict")
    end.record()
    torch.cuda.synchronize()
    rows = torch.arange(0, 1 << 20, 32771, device="cuda")
    s = q[:, :, rows].double() @ k.double().mT * 0.125
    exact = torch.softmax(s, -1) @ v.double()
    e = ((out[:, :, rows].double() - exact).norm() / exact.norm()).item()
    used = (torch.cuda.max_memory_allocated() - before) / 2**20
    print(f"1,1,1048576,64 strict: {start.elapsed_time(end):.1f} ms, error {e:.1e}, {used:.0f} MiB")


def main() -> None:
    target, groups = sys.argv[1], sys.argv[2:]
    if groups and groups[0] in ("decode", "targets"):
        (tune_decode if groups[0] == "decode" else time_targets)()
        if groups[0] == "targets":
            time_decode()
            million()
        return
    tasks = [(m, s, r) for g in groups for m, s, rows in candidates(g) for r in rows]
    unique = {
        json.dumps([m, s[3:], r[:6], r[6] > 1, r[7:], s[2] > 4096]): (m, s, r) for m, s, r in tasks
    }
    start = time.time()
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        failed = [f for f in pool.map(compile_one, unique.values()) if f]
    print(f"compiled {len(unique)} in {time.time() - start:.0f} s; failed: {set(failed)}")
    results = []
    for group in groups:
        for (mode, mask), shape, rows in candidates(group):
            tensors = inputs(shape, DTYPES[mode], mask)
            reference = oracle(tensors)
            best = peers(mode, tensors, reference)
            peer = min((ms for ms, _ in best.values()), default=math.inf)
            timed = []
            for row in rows:
                try:
                    call = build(mode, shape, row, tensors)
                    out, _ = planner.execute(call, *tensors)
                    e = error(out, reference)
                    timed.append((graph_ms(lambda: planner.execute(call, *tensors)), row, e))  # noqa: B023
                except Exception as problem:
                    timed.append((math.inf, row, repr(problem)[:60]))
            timed.sort(key=lambda t: t[0])
            shipped = partitioned(mode, tensors, 0)
            own = graph_ms(lambda: planner.execute(shipped, *tensors))  # noqa: B023
            results.append(
                {"mode": mode, "mask": mask, "shape": shape, "shipped": own, "peers": best,
                 "timed": timed}
            )  # fmt: skip
            flops = 2 * math.prod(shape[:3]) * shape[2] * (shape[3] + shape[4])
            shown = {name: (round(ms, 4), f"{e:.1e}") for name, (ms, e) in best.items()}
            print(mode, mask, shape, f"shipped {own:.4f}", shown)
            ahead = [build(mode, shape, r, tensors) for r in rows if r[4]][:1]
            if ahead:
                call, like = ahead[0], tensors[0]
                w = like.new_empty(call.workspace, dtype=torch.float16)
                split = call.launches["ahead"]
                for warps in (2, 4):
                    split.options["num_warps"], split.compiled = warps, None
                    ms = graph_ms(lambda: split(*tensors[1:3], w))  # noqa: B023
                    print(f"   split ahead alone, {warps} warps: {ms:.4f} ms")
            for ms, row, e in timed[:5]:
                rate = flops / ms / 1e9
                shown = e if isinstance(e, str) else f"{e:.1e}"
                print(f"   {ms:.4f} ms {peer / ms:.2f}x {rate:.0f} TF/s {shown} {row}", flush=True)
    with open(target, "w") as file:  # noqa: PTH123
        json.dump(results, file)


if __name__ == "__main__":
    main()
