"""The schedules of the fused forward kernel: operands as they are, or keys and values split ahead
by a launch of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from elsa_core.backends.triton.attention import tiling
from elsa_core.backends.triton.attention.schedules.merge import plan_merge
from elsa_core.backends.triton.attention.schedules.record import Call, Parts, Problem, Schedule
from elsa_core.backends.triton.shared import device, layout
from elsa_core.backends.triton.shared.launch import Launch

# above this many keys a chain of tensor-core additions costs half precision its own accuracy
FRESH_KEYS = 65536
# float32 states take this many tiles of keys before a fresh one begins: the error of a longer chain
# would grow beyond Theorem 1's bound (at a million keys it did)
CHAIN_TILES = 1024


def chain_keys(mode: str, tile: tiling.Tile, chunk: int) -> int:
    """Keys that one state folds before a fresh one begins; 0: all of a partition's."""
    keys = CHAIN_TILES * tile.block_n
    return keys if mode in ("split", "single") and chunk > keys else 0


def fold_tail(problem: Problem) -> dict[str, Any]:
    """The arguments of `forward.forward` but its pointers; `hopper.forward` takes some of them."""
    q, k, v, mask, shape = (
        problem.query, problem.key, problem.value, problem.mask, problem.shape,
    )  # fmt: skip
    p, t, mode = problem.tiles, problem.tile, problem.mode
    unit, unit_d = layout.row_unit((q, k, v))
    (d0, d1), (v0, v1) = _widths(problem, unit)
    m_strides, factors = layout.mask_strides(mask), layout.score_scale(problem.scale, mode)
    kind = layout.mask_kind(mask)
    tail_stages = 1
    if mode == "half" or t.ahead:
        tail_stages = t.stages if t.one_loop else 2
    return {
        "Tiles": None, "LISTED": 0, "Seed": None, "threshold": 0, "kept": 1.0,
        "heads": shape.heads, "group": shape.heads // shape.key_heads, "n_q": shape.queries,
        "n_k": shape.keys, "chunk": p.chunk, "tiles": -(-shape.keys // t.block_n),
        "shift": (shape.keys - 1).bit_length(), "scale_exp": factors["scale_exp"],
        "scale": factors["scale"], "flip": factors["flip"],
        **layout.strides("q", q, unit), **layout.strides("k", k, unit),
        **layout.strides("v", v, unit), **m_strides, "batch": shape.batch,
        "MODE": device.MODES[mode], "PRE": t.ahead, "ONE_LOOP": t.one_loop,
        "FRESH": mode != "half" or shape.keys > FRESH_KEYS,
        "MASK": kind + 2 if kind and not layout.has_rows(mask) else kind,
        "CAUSAL": problem.causal, "PARTIAL": p.partitions > 1,
        "FLIP": factors["FLIP"], "OVERLAP": device.overlaps(q.device),
        "BX": t.block_n if mode == "exact" else 16,
        "UNIT": unit, "UNIT_D": unit_d, "UNIT_K": m_strides["mask_k"] == 1,
        "BM": t.block_m, "BN": t.block_n, "STAGES": t.stages, "TAIL_STAGES": tail_stages,
        "CHAIN": chain_keys(mode, t, p.chunk),
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


def fold_grid(problem: Problem) -> tuple[int, int]:
    """Query tiles of all heads, and partitions of the keys."""
    shape = problem.shape
    rows = shape.batch * shape.heads
    return rows * -(-shape.queries // problem.tile.block_m), problem.tiles.partitions


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


def _fold(problem: Problem, tail: dict[str, Any]) -> Launch:
    from elsa_core.backends.triton.attention.forward import forward

    return Launch(forward, fold_grid(problem), tail, fold_options(problem, tail))


def ahead_launch(problem: Problem, tail: dict[str, Any]) -> tuple[Launch, int]:
    """The launch that splits keys and values ahead of the fold, and the float16 elements that it
    writes: exponents and guards, then the halves.
    """
    from elsa_core.backends.triton.attention.split import split_ahead

    k, v, shape, t = problem.key, problem.value, problem.shape, problem.tile
    low, unit = problem.mode == "split", tail["UNIT"]
    width, value_width = tail["D0"] + tail["D1"], tail["V0"] + tail["V1"]
    own: dict[str, Any] = {
        "heads": shape.key_heads, "n_k": shape.keys, "tiles": tail["tiles"], "batch": shape.batch,
        **layout.strides("k", k, unit), **layout.strides("v", v, unit),
        "UNIT": unit, "UNIT_D": tail["UNIT_D"], "HAS_LOW": low,
        "LIMIT": 2.0**-5 if low else 2.0**-14, "OVERLAP": tail["OVERLAP"], "BN": t.block_n,
        "D": shape.head_dim, "DW": width, "DP": 1 << (width - 1).bit_length(),
        "DV": shape.value_dim, "VW": value_width, "VP": 1 << (value_width - 1).bit_length(),
    }  # fmt: skip
    count = shape.batch * shape.key_heads * tail["tiles"]
    halves = count * t.block_n * (width + value_width) * (2 if low else 1)
    return Launch(split_ahead, (count, 2), own, {"num_warps": 4}), -(-count // 8) * 64 + halves


def _serves_ahead(problem: Problem) -> bool:
    return problem.tile.ahead


def _plan_ahead(problem: Problem) -> Parts:
    tail = fold_tail(problem)
    ahead, workspace = ahead_launch(problem, tail)
    merge = plan_merge(problem.shape, problem.tiles.partitions, tail["OVERLAP"])
    return Parts({"ahead": ahead, "fold": _fold(problem, tail)}, merge, workspace)


def _run_ahead(
    call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *drawn: Tensor
) -> tuple[Tensor, Tensor]:
    out, lse = call.results(q)
    launches, merge = call.launches, call.merge
    outputs, logs = (out, lse) if merge is None else merge.states(q)
    halves = q.new_empty(call.workspace, dtype=torch.float16)
    launches["ahead"](k, v, halves)
    launches["fold"](q, k, v, mask, halves, outputs, logs, *drawn)
    if merge is not None:
        merge.launch(outputs, logs, out, lse)
    return out, lse


def _serves(problem: Problem) -> bool:
    return problem.tiles is not None


def _plan(problem: Problem) -> Parts:
    tail = fold_tail(problem)
    merge = plan_merge(problem.shape, problem.tiles.partitions, tail["OVERLAP"])
    return Parts({"fold": _fold(problem, tail)}, merge)


def _run(
    call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *drawn: Tensor
) -> tuple[Tensor, Tensor]:
    out, lse = call.results(q)
    merge = call.merge
    outputs, logs = (out, lse) if merge is None else merge.states(q)
    # no workspace: the kernel does not read its pointer
    call.launches["fold"](q, k, v, mask, out, outputs, logs, *drawn)
    if merge is not None:
        merge.launch(outputs, logs, out, lse)
    return out, lse


def fold_words(problem: Problem) -> str:
    """Tiles and partitions of a fold in words."""
    p, t = problem.tiles, problem.tile
    size = f"{t.block_m} queries x {t.block_n} keys"
    where = ", keys and values split ahead" if t.ahead else ""
    if t.specialized:
        where += ", copied by warps of their own"
    if p.partitions == 1:
        return f"full fold: one program per {size}{where}"
    parts = f"split keys: {p.partitions} partitions of {p.chunk}, merged by a tree"
    return f"{parts}; {size}{where}"


SPLIT_AHEAD = Schedule("split_ahead", _serves_ahead, _plan_ahead, _run_ahead, fold_words)
FORWARD = Schedule("forward", _serves, _plan, _run, fold_words)
