"""The schedule of one query: keys and values streamed once, split over programs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from elsa_core.backends.triton.attention import tiling
from elsa_core.backends.triton.attention.schedules.merge import plan_merge
from elsa_core.backends.triton.attention.schedules.record import Call, Parts, Problem, Schedule
from elsa_core.backends.triton.shared import device, layout
from elsa_core.backends.triton.shared.launch import Launch


def _serves(problem: Problem) -> bool:
    return problem.shape.queries == 1


def _partitions(problem: Problem) -> tuple[int, int]:
    """(partitions, keys of a partition)."""
    shape = problem.shape
    table, multiprocessors = device.device_table(device.index_of(problem.query.device))
    rows = shape.batch * shape.heads
    return tiling.decode_partitions(rows, shape.keys, multiprocessors, table.decode)


def _plan(problem: Problem) -> Parts:
    from elsa_core.backends.triton.attention.decode import decode

    q, k, v, mask, shape = (
        problem.query, problem.key, problem.value, problem.mask, problem.shape,
    )  # fmt: skip
    knobs = device.device_table(device.index_of(q.device))[0].decode
    parts, chunk = _partitions(problem)
    overlap = parts > 1 and device.overlaps(q.device)
    unit, unit_d = layout.row_unit((k, v))
    if any(s % unit for s in q.stride()[:2]):
        unit = 1
    factors = layout.score_scale(problem.scale, "exact")
    q_strides, m_strides = layout.strides("q", q, unit), layout.mask_strides(mask)
    del q_strides["q_n"], m_strides["mask_q"]
    tail: dict[str, Any] = {
        "heads": shape.heads, "group": shape.heads // shape.key_heads, "n_k": shape.keys,
        "chunk": chunk, "shift": (shape.keys - 1).bit_length(),
        "scale_exp": factors["scale_exp"], "scale": factors["scale"], "flip": factors["flip"],
        **q_strides, **layout.strides("k", k, unit), **layout.strides("v", v, unit), **m_strides,
        "batch": shape.batch,
        "MASK": layout.mask_kind(mask), "PARTIAL": parts > 1, "UNIT": unit, "UNIT_D": unit_d,
        "OVERLAP": overlap, "BN": key_tile(knobs, problem), "STAGES": knobs["stages"],
        "D": shape.head_dim, "DP": max(16, 1 << (shape.head_dim - 1).bit_length()),
        "DV": shape.value_dim, "VP": max(16, 1 << (shape.value_dim - 1).bit_length()),
    }  # fmt: skip
    grid = (shape.batch * shape.heads, parts)
    fold = Launch(decode, grid, tail, {"num_warps": knobs["warps"]})
    return Parts({"fold": fold}, plan_merge(shape, parts, overlap))


def key_tile(knobs: dict[str, int], problem: Problem) -> int:
    """Keys a tile: about the same bytes for every dtype and head dimension."""
    shape = problem.shape
    width = max(shape.head_dim, shape.value_dim) * problem.key.element_size()
    block = knobs["tile_bytes"] // (1 << (width - 1).bit_length())
    return max(16, min(block, knobs["block_n"]))


def _run(call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = call.results(q)
    fold, merge = call.launches["fold"], call.merge
    if merge is None:
        fold(q, k, v, mask, out, lse)
    else:
        outputs, logs = merge.states(q)
        fold(q, k, v, mask, outputs, logs)
        merge.launch(outputs, logs, out, lse)
    return out, lse


def _words(problem: Problem) -> str:
    rows, parts = problem.shape.batch * problem.shape.heads, _partitions(problem)[0]
    return f"one query: keys streamed by {rows} x {parts} programs, float32 FMA"


DECODE = Schedule("decode", _serves, _plan, _run, _words)
