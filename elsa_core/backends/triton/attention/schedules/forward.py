"""The schedules of the fused forward kernels: operands as they are, or keys and values split ahead
by a launch of their own, which on sm_90 a warp-specialised kernel folds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from elsa_core.backends.triton.attention import tiling
from elsa_core.backends.triton.attention.schedules.record import Call, Problem, Schedule
from elsa_core.backends.triton.shared import device, layout
from elsa_core.backends.triton.shared.launch import Launch

# above this many keys a chain of tensor-core additions costs half precision its own accuracy
FRESH_KEYS = 65536
# float32 states take this many tiles of keys before a fresh one begins: the error of a longer chain
# would grow beyond Theorem 1's bound (at a million keys it did)
CHAIN_TILES = 1024
# what a thread of a copying and of a second folding warpgroup may hold; the first gets the rest
COPY_REGISTERS, FOLD_REGISTERS = 40, 232


def fold_tail(problem: Problem) -> dict[str, Any]:
    """The arguments of `forward.forward` but its pointers; `hopper.forward` takes some of them."""
    q, k, v, mask = problem.query, problem.key, problem.value, problem.mask
    p, t, mode, shape = problem.tiles, problem.tile, problem.mode, problem.shape
    assert p is not None
    unit, unit_d = layout.row_unit((q, k, v))
    (d0, d1), (v0, v1) = _widths(problem, unit)
    m_strides, kind = layout.mask_strides(mask), layout.mask_kind(mask)
    chain = CHAIN_TILES * t.block_n
    tail_stages = 1
    if mode == "half" or t.ahead:
        tail_stages = t.stages if t.one_loop else 2
    return {
        "heads": shape.heads, "group": shape.heads // shape.key_heads, "n_q": shape.queries,
        "n_k": shape.keys, "chunk": p.chunk, "tiles": -(-shape.keys // t.block_n),
        "shift": max(0, shape.keys - 1).bit_length(), **layout.score_scale(problem.scale, mode),
        **layout.strides("q", q, unit), **layout.strides("k", k, unit),
        **layout.strides("v", v, unit), **m_strides, "batch": shape.batch,
        "MODE": device.MODES[mode], "PRE": t.ahead, "ONE_LOOP": t.one_loop,
        "FRESH": mode != "half" or shape.keys > FRESH_KEYS,
        "MASK": kind + 2 if kind and not layout.has_rows(mask) else kind,
        "CAUSAL": problem.causal, "PARTIAL": p.partitions > 1,
        "OVERLAP": device.overlaps(q.device),
        "BX": t.block_n if mode == "exact" else 16,
        "UNIT": unit, "UNIT_D": unit_d, "UNIT_K": m_strides["mask_k"] == 1,
        "BM": t.block_m, "BN": t.block_n, "STAGES": t.stages, "TAIL_STAGES": tail_stages,
        "CHAIN": chain if mode in ("split", "single") and p.chunk > chain else 0,
        "SHIFT": 0.0 if q.dtype == torch.bfloat16 else 7.0,
        "D": shape.head_dim, "D0": d0, "D1": d1, "DV": shape.value_dim, "V0": v0, "V1": v1,
    }  # fmt: skip


def _widths(problem: Problem, unit: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The blocks that cover the head and the value dimension."""
    t, shape = problem.tile, problem.shape
    d0, d1 = tiling.blocks(shape.head_dim, t.part)
    v0, v1 = tiling.blocks(shape.value_dim, t.part)
    loaded = problem.mode == "half" and unit == 1  # rows that are not aligned are not copied ahead
    if loaded or (problem.mode in ("split", "single") and not t.ahead):
        # Tiles that the loop itself writes to shared memory, of under 128 bytes a row, were seen
        # miscompiled (Triton 3.6, sm_90): wrong results and reads out of bounds in half precision
        # where the value's rows were shorter there than the key's.
        d0, d1 = max(64, d0 if not d1 else 2 * d0), 0
        v0, v1 = max(64, v0 if not v1 else 2 * v0), 0
    return (d0, d1), (v0, v1)


def fold_options(problem: Problem, tail: dict[str, Any]) -> dict[str, Any]:
    """The compiler's options for the fold."""
    t = problem.tile
    options: dict[str, Any] = {"num_warps": t.warps, "num_stages": t.stages}
    # The tables were measured without masks. With one of a row for each query, half precision needs
    # twice the registers: within these limits it spilled 1 KB a thread; 196 tokens of 32 channels
    # took 58 us on an H200. With one row for all it needs some more: of 128 channels too many.
    wide = tail["MASK"] in (1, 2) or (tail["MASK"] and tail["D0"] > 64)
    if t.registers and not (problem.mode == "half" and wide):
        options["maxnreg"] = t.registers
    if tail["OVERLAP"] and t.ahead:
        options["launch_pdl"] = True
    return options


def _fold(kernel: Any, problem: Problem, tail: dict[str, Any], options: dict[str, Any]) -> Launch:
    """Grid: query tiles of all heads, and partitions of the keys."""
    shape, p = problem.shape, problem.tiles
    assert p is not None
    rows = shape.batch * shape.heads * -(-shape.queries // p.tile.block_m)
    return Launch(kernel, (rows, p.partitions), tail, options)


def ahead_launch(problem: Problem, tail: dict[str, Any]) -> tuple[Launch, int]:
    """The launch that splits keys and values ahead of the fold, and the float16 elements that it
    writes: exponents and guards, then the halves.
    """
    from elsa_core.backends.triton.attention.split import split_ahead

    shape, low = problem.shape, problem.mode == "split"
    width, value_width = tail["D0"] + tail["D1"], tail["V0"] + tail["V1"]
    own = tail | {
        "heads": shape.key_heads, "HAS_LOW": low, "LIMIT": 2.0**-5 if low else 2.0**-14,
        "DW": width, "DP": layout.padded(width, 1), "VW": value_width,
        "VP": layout.padded(value_width, 1),
    }  # fmt: skip
    count = shape.batch * shape.key_heads * tail["tiles"]
    halves = count * problem.tile.block_n * (width + value_width) * (2 if low else 1)
    return Launch(split_ahead, (count, 2), own, {"num_warps": 4}), -(-count // 8) * 64 + halves


def _plan(problem: Problem) -> tuple[dict[str, Launch], int]:
    from elsa_core.backends.triton.attention.forward import forward

    tail, launches, workspace = fold_tail(problem), {}, 0
    if problem.tile.ahead:
        launches["ahead"], workspace = ahead_launch(problem, tail)
    launches["fold"] = _fold(forward, problem, tail, fold_options(problem, tail))
    return launches, workspace


def _run(
    call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, out: Tensor, lse: Tensor
) -> None:
    halves = out  # without a workspace the kernel does not read its pointer
    if call.workspace:
        halves = q.new_empty(call.workspace, dtype=torch.float16)
        call.launches["ahead"](k, v, halves)
    call.launches["fold"](q, k, v, mask, halves, out, lse)


def _plan_hopper(problem: Problem) -> tuple[dict[str, Launch], int]:
    from elsa_core.backends.triton.attention import hopper

    tail = fold_tail(problem)
    ahead, workspace = ahead_launch(problem, tail)
    own = tail | {
        "scale": tail["scale"] * tail["flip"],
        "FOLD_REGISTERS": FOLD_REGISTERS, "COPY_REGISTERS": COPY_REGISTERS,
    }  # fmt: skip
    options = fold_options(problem, tail)
    del options["num_stages"]
    fold = _fold(hopper.forward, problem, own, options)
    launches = {"ahead": ahead, "fold": fold, "fma_fallback": fallback_launch(problem, tail)}
    return launches, workspace


def fallback_launch(problem: Problem, tail: dict[str, Any]) -> Launch:
    """The launch that folds blocks of queries which `hopper.forward` flags with float32 FMA."""
    from elsa_core.backends.triton.attention import fma_fallback

    shape, p = problem.shape, problem.tiles
    assert p is not None
    blocks = shape.batch * shape.heads * -(-shape.queries // fma_fallback.ROWS.value)
    blocks *= p.partitions
    options: dict[str, Any] = {"num_warps": 8 if max(tail["D0"], tail["V0"]) > 64 else 4}
    if tail["OVERLAP"]:
        options["launch_pdl"] = True
    grid = (min(blocks, fma_fallback.PROGRAMS),)
    return Launch(fma_fallback.fma_fallback, grid, {**tail, "blocks": blocks}, options)


def _run_hopper(
    call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, out: Tensor, lse: Tensor
) -> None:
    launches = call.launches
    halves = q.new_empty(call.workspace, dtype=torch.float16)
    launches["ahead"](k, v, halves)
    flags = q.new_empty(launches["fma_fallback"].tail["blocks"], dtype=torch.int32)
    launches["fold"](q, halves, flags, out, lse)
    launches["fma_fallback"](q, k, v, flags, out, lse)


def _words(problem: Problem) -> str:
    p, t = problem.tiles, problem.tile
    assert p is not None
    size = f"{t.block_m} queries x {t.block_n} keys"
    where = ", keys and values split ahead" if t.ahead else ""
    if t.specialized:
        where += ", copied by warps of their own"
    if p.partitions == 1:
        return f"full fold: one program per {size}{where}"
    parts = f"split keys: {p.partitions} partitions of {p.chunk}, merged by a tree"
    return f"{parts}; {size}{where}"


HOPPER = Schedule(
    "hopper", lambda problem: problem.tile.specialized and problem.tile.ahead,
    _plan_hopper, _run_hopper, _words,
)  # fmt: skip
SPLIT_AHEAD = Schedule("split_ahead", lambda problem: problem.tile.ahead, _plan, _run, _words)
FORWARD = Schedule("forward", lambda problem: problem.tiles is not None, _plan, _run, _words)
