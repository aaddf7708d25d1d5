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
from elsa_core.backends.triton.attention.schedules.few import decode_tail
from elsa_core.backends.triton.attention.schedules.forward import fold_options, fold_tail
from elsa_core.backends.triton.attention.schedules.record import Problem
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


def usual_tiles(problem: Problem, sequences: int) -> tiling.Plan:
    """The tiles of a call whose sequences all have the same number of keys."""
    table, multiprocessors = device.device_table(device.index_of(problem.query.device))
    keys = max(1, -(-problem.shape.keys // max(1, sequences)))
    # tiles of one product are for operands split ahead alone
    mode = "split" if problem.mode == "single" else problem.mode
    return tiling.plan(
        problem.shape._replace(keys=keys), mode, table, workspace=False,
        multiprocessors=multiprocessors, specialized=False,
    )  # fmt: skip


def streamed(
    problem: Problem, sequences: int, programs: int | None = None, least: int | None = None
) -> Streamed:
    """The launch for so many packed sequences of one query each, or fewer on average, whose tokens
    are [1, H, T, D].

    programs: of the whole grid; None: as many as the GPU holds. least: units of a program, if there
    are as many; None: as measured.
    """
    from elsa_core.backends.triton.attention import stream_decode, stream_forward

    q, shape = problem.query, problem.shape
    table, multiprocessors = device.device_table(device.index_of(q.device))
    group = shape.heads // shape.key_heads
    kernel: Any
    if 1 < group <= MOST_PACKED and problem.mode != "exact":
        # one query of all heads that share a head of the keys is a tile
        tile, block = usual_tiles(problem, sequences).tile, max(FEW, 1 << (group - 1).bit_length())
        # `RESIDENT` programs have all registers that a thread can have
        tile = replace(tile, block_m=min(block, tile.block_m), warps=4, registers=0)
        # a program may fold all keys of a query
        problem = replace(problem, tiles=tiling.Plan(tile, 1, max(1, shape.keys)))
        tail, rows, kernel = fold_tail(problem), tile.block_m, stream_forward.stream_forward
        options, resident, width = fold_options(problem, tail), RESIDENT, rows * tail["V0"]
        least = least or LEAST
    else:
        unit, unit_d = layout.row_unit((problem.key, problem.value))
        if any(s % unit for s in q.stride()[:3]):
            unit = 1
        tail, rows, kernel = decode_tail(problem, unit, unit_d), 1, stream_decode.stream_decode
        options, resident = {"num_warps": table.decode["warps"]}, table.decode["resident"]
        width, least = tail["VP"], least or table.decode["least_tiles"]
    tail |= {
        "sequences": sequences, "lse_h": shape.queries, "CAUSAL": problem.causal, "least": least,
        "PARTS": max(1, 4096 // width),
    }  # fmt: skip
    grid = (programs or resident * multiprocessors,)
    return Streamed(Launch(kernel, grid, tail, options), rows, shape.value_dim)
