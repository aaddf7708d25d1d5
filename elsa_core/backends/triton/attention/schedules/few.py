"""The schedules of one query, and of few keys on sm_90, which lie on chip in one launch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from elsa_core.backends.triton.attention import tiling
from elsa_core.backends.triton.attention.schedules.record import Call, Problem, Schedule
from elsa_core.backends.triton.shared import device, layout
from elsa_core.backends.triton.shared.launch import Launch

# registers of a thread that queries, keys and values may take while `one_launch.py` splits them
SPLIT_REGISTERS = 160


def _decode_partitions(problem: Problem) -> tuple[int, int]:
    """(partitions, keys of a partition)."""
    shape = problem.shape
    table, multiprocessors = device.device_table(device.index_of(problem.query.device))
    rows = shape.batch * shape.heads
    return tiling.decode_partitions(rows, shape.keys, multiprocessors, table.decode)


def decode_tail(problem: Problem, unit: int, unit_d: bool) -> dict[str, Any]:
    """The arguments of kernels that stream the keys of single queries."""
    k, v, shape = problem.key, problem.value, problem.shape
    knobs = device.device_table(device.index_of(problem.query.device))[0].decode
    # about the same bytes for every dtype and head dimension
    width = max(shape.head_dim, shape.value_dim) * k.element_size()
    keys = knobs["tile_bytes"] // (1 << (width - 1).bit_length())
    return {
        "heads": shape.heads, "group": shape.heads // shape.key_heads, "n_q": shape.queries,
        "n_k": shape.keys, "shift": (shape.keys - 1).bit_length(),
        **layout.score_scale(problem.scale, "exact"), **layout.strides("q", problem.query, unit),
        **layout.strides("k", k, unit), **layout.strides("v", v, unit), "UNIT": unit,
        "UNIT_D": unit_d, "BN": max(16, min(keys, knobs["block_n"])), "STAGES": knobs["stages"],
        "D": shape.head_dim, "DP": layout.padded(shape.head_dim),
        "DV": shape.value_dim, "VP": layout.padded(shape.value_dim),
    }  # fmt: skip


def _plan_decode(problem: Problem) -> tuple[dict[str, Launch], int]:
    from elsa_core.backends.triton.attention.decode import decode

    q, shape = problem.query, problem.shape
    knobs = device.device_table(device.index_of(q.device))[0].decode
    parts, chunk = _decode_partitions(problem)
    unit, unit_d = layout.row_unit((problem.key, problem.value))
    if any(s % unit for s in q.stride()[:2]):
        unit = 1
    tail = decode_tail(problem, unit, unit_d) | layout.mask_strides(problem.mask) | {
        "chunk": chunk, "batch": shape.batch, "MASK": layout.mask_kind(problem.mask),
        "PARTIAL": parts > 1, "OVERLAP": parts > 1 and device.overlaps(q.device),
    }  # fmt: skip
    grid = (shape.batch * shape.heads, parts)
    return {"fold": Launch(decode, grid, tail, {"num_warps": knobs["warps"]})}, 0


def _run_decode(
    call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, out: Tensor, lse: Tensor
) -> None:
    call.launches["fold"](q, k, v, mask, out, lse)


def _decode_words(problem: Problem) -> str:
    rows, parts = problem.shape.batch * problem.shape.heads, _decode_partitions(problem)[0]
    return f"one query: keys streamed by {rows} x {parts} programs, float32 FMA"


def _plan_on_chip(problem: Problem) -> tuple[dict[str, Launch], int]:
    from elsa_core.backends.triton.attention import one_launch, two_warpgroups

    q, k, v, shape, t = problem.query, problem.key, problem.value, problem.shape, problem.tile
    factors = layout.score_scale(problem.scale, "split")
    unit, _ = layout.row_unit((q, k, v))
    d0, v0 = tiling.blocks(shape.head_dim)[0], tiling.blocks(shape.value_dim)[0]
    kernel = two_warpgroups.forward if t.two_warpgroups else one_launch.forward
    if t.two_warpgroups:
        keys = next(n for n in tiling.TWO_WARPGROUPS_KEYS if shape.keys <= n)
    else:
        # at least eight channels of a row for every lane
        keys = max(t.block_n, 1 << (shape.keys - 1).bit_length(), t.warps * 256 // min(d0, v0))
    tail = {
        "heads": shape.heads, "group": shape.heads // shape.key_heads, "n_q": shape.queries,
        "n_k": shape.keys, "shift": (shape.keys - 1).bit_length(),
        "scale_exp": factors["scale_exp"], "scale": factors["scale"] * factors["flip"],
        **layout.strides("q", q, unit), **layout.strides("k", k, unit),
        **layout.strides("v", v, unit),
        "CAUSAL": problem.causal, "UNIT": unit, "BM": t.block_m, "BN": t.block_n, "KEYS": keys,
        "TURNS": t.warps > 4 and device.takes_turns(),
        "TOGETHER": keys * (d0 + v0) + t.block_m * d0 <= SPLIT_REGISTERS * 32 * t.warps,
        "D": shape.head_dim, "D0": d0, "DV": shape.value_dim, "V0": v0,
    }  # fmt: skip
    programs = shape.batch * shape.heads * -(-shape.queries // t.block_m)
    return {"fold": Launch(kernel, (programs,), tail, {"num_warps": t.warps})}, 0


def _run_on_chip(
    call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, out: Tensor, lse: Tensor
) -> None:
    call.launches["fold"](q, k, v, out, lse)


def _on_chip_words(problem: Problem) -> str:
    text = f"one program per {problem.tile.block_m} queries, with all keys on chip"
    if problem.tile.two_warpgroups:
        text += ", two warpgroups each"
    if problem.mode == "single":
        text += "; strict's products, faster here in their one launch"
    return text


DECODE = Schedule(
    "decode", lambda problem: problem.shape.queries == 1, _plan_decode, _run_decode, _decode_words
)
ONE_LAUNCH = Schedule(
    "one_launch", lambda problem: problem.tile.one_launch and not problem.tile.two_warpgroups,
    _plan_on_chip, _run_on_chip, _on_chip_words,
)  # fmt: skip
TWO_WARPGROUPS = Schedule(
    "two_warpgroups", lambda problem: problem.tile.two_warpgroups,
    _plan_on_chip, _run_on_chip, _on_chip_words,
)  # fmt: skip
