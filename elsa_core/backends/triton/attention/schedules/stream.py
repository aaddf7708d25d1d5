"""Stream-K for packed sequences: equal shares of key tiles, joined in the launch that folds them.

On an H200 it is the faster one for sequences of single queries, which it serves
(`varlen._streams`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from elsa_core.backends.triton.attention import tiling
from elsa_core.backends.triton.attention.schedules.decode import key_tile
from elsa_core.backends.triton.attention.schedules.forward import fold_options, fold_tail
from elsa_core.backends.triton.attention.schedules.record import Problem, known
from elsa_core.backends.triton.shared import device, layout
from elsa_core.backends.triton.shared.launch import Launch
from elsa_core.backends.triton.shared.tickets import tickets

# the fewest rows of a tensor-core product
FEW = 16
# heads of the queries that may share a tile
MOST_PACKED = 64
# programs for each multiprocessor
RESIDENT = 2
# units that a program gets, if there are as many: fewer cost more to join than they save
LEAST = 2


@dataclass(frozen=True)
class Streamed:
    """The launch that folds and joins, and the memory it needs.

    rows, width: of a state; there are two for each program.
    """

    fold: Launch
    rows: int
    width: int

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, others: Tensor, out: Tensor,
        lse: Tensor,
    ) -> None:  # fmt: skip
        """starts, others: cumulative lengths of queries and keys."""
        programs = self.fold.grid[0]
        states = 2 * programs * self.rows
        outputs = q.new_empty((states, self.width), dtype=torch.float32)
        logs = q.new_empty(states, dtype=torch.float32)
        counters = tickets(programs, q.device)
        self.fold(q, k, v, starts, others, outputs, logs, counters, out, lse)


def streamed(
    problem: Problem, sequences: int, programs: int | None = None, least: int | None = None
) -> Streamed:
    """The launch for so many packed sequences of one query each, or fewer on average, whose tokens
    are [1, H, T, D].

    programs: of the whole grid; None: as many as the GPU holds. least: units of a program, if there
    are as many; None: as measured.
    """
    shape = problem.shape
    packed = 1 < shape.heads // shape.key_heads <= MOST_PACKED and problem.mode != "exact"
    return (_heads if packed else _rows)(problem, sequences, programs, least)


def _shares(problem: Problem, sequences: int) -> dict[str, Any]:
    shape = problem.shape
    return {
        "sequences": sequences, "lse_h": shape.queries, "CAUSAL": problem.causal,
    }  # fmt: skip


def _programs(problem: Problem, resident: int) -> int:
    """Programs of the grid."""
    _, multiprocessors = device.device_table(device.index_of(problem.query.device))
    return resident * multiprocessors


def _rows(
    problem: Problem, sequences: int, programs: int | None, least: int | None
) -> Streamed:  # fmt: skip
    """Single queries, each with the keys of its own head."""
    from elsa_core.backends.triton.attention.stream_decode import stream_decode

    q, k, v, shape = problem.query, problem.key, problem.value, problem.shape
    knobs = device.device_table(device.index_of(q.device))[0].decode
    unit, unit_d = layout.row_unit((k, v))
    if any(s % unit for s in q.stride()[:3]):
        unit = 1
    factors = layout.score_scale(problem.scale, "exact")
    width = max(16, 1 << (shape.value_dim - 1).bit_length())
    block = key_tile(knobs, problem)
    tail: dict[str, Any] = {
        "heads": shape.heads, "group": shape.heads // shape.key_heads, "n_q": shape.queries,
        "n_k": shape.keys, "least": least or knobs["least_tiles"],
        "shift": (shape.keys - 1).bit_length(),
        "scale_exp": factors["scale_exp"], "scale": factors["scale"], "flip": factors["flip"],
        **layout.strides("q", q, unit), **layout.strides("k", k, unit),
        **layout.strides("v", v, unit), **_shares(problem, sequences),
        "UNIT": unit, "UNIT_D": unit_d, "BN": block, "STAGES": knobs["stages"],
        "PARTS": max(1, 4096 // width),
        "D": shape.head_dim, "DP": max(16, 1 << (shape.head_dim - 1).bit_length()),
        "DV": shape.value_dim, "VP": width,
    }  # fmt: skip
    programs = programs or _programs(problem, knobs["resident"])
    fold = Launch(stream_decode, (programs,), tail, {"num_warps": knobs["warps"]})
    return Streamed(fold, 1, shape.value_dim)


def _heads(
    problem: Problem, sequences: int, programs: int | None, least: int | None
) -> Streamed:  # fmt: skip
    """One query of all heads that share a head of the keys is a tile."""
    from elsa_core.backends.triton.attention.stream_forward import stream_forward

    shape = problem.shape
    tile = _tile(problem, sequences)
    # a program may fold all keys of a query
    problem = replace(problem, tiles=tiling.Plan(tile, 1, max(1, shape.keys)))
    tail = fold_tail(problem) | _shares(problem, sequences)
    own = known(stream_forward, tail | {
        "least": least or LEAST, "PARTS": max(1, 4096 // (tile.block_m * tail["V0"])),
    })  # fmt: skip
    programs = programs or _programs(problem, RESIDENT)
    fold = Launch(stream_forward, (programs,), own, fold_options(problem, tail))
    return Streamed(fold, tile.block_m, shape.value_dim)


def _tile(problem: Problem, sequences: int) -> tiling.Tile:
    shape, rows = problem.shape, problem.shape.heads // problem.shape.key_heads
    # tiles of one product are for operands split ahead alone
    mode = "split" if problem.mode == "single" else problem.mode
    usual = shape._replace(keys=max(1, -(-shape.keys // sequences)))
    table, multiprocessors = device.device_table(device.index_of(problem.query.device))
    tile = tiling.plan(
        usual, mode, table, workspace=False, multiprocessors=multiprocessors, specialized=False
    ).tile
    block = max(FEW, 1 << (rows - 1).bit_length())
    # `RESIDENT` programs have all registers that a thread can have
    return replace(tile, block_m=min(block, tile.block_m), warps=4, registers=0)
