"""Packed sequences on the GPU: tiles, launch and results of `elsa::varlen_attention`.

Single queries of sequences with many keys are cut by stream-K: equal shares of key tiles, joined in
the launch that folds them.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from elsa_core.backends.triton.attention import tiling
from elsa_core.backends.triton.attention.schedules import (
    Problem,
    decode_tail,
    fold_options,
    fold_tail,
)
from elsa_core.backends.triton.shared import device, layout
from elsa_core.backends.triton.shared.launch import Launch
from elsa_core.backends.triton.shared.plans import PLANS

# Keys of a sequence, on average, from which single queries go by equal shares: an H200 took 0.09 of
# the time in float32 and 0.26 in float16 for 32 sequences of 1024 to 65536 keys, 8 heads of 128.
_STREAMED_KEYS = 1024
# the fewest rows of a tensor-core product
FEW = 16
# heads of the queries that may share a tile
MOST_PACKED = 64
# programs for each multiprocessor
RESIDENT = 2
# units that a program gets, if there are as many: fewer cost more to join than they save
LEAST = 2
# counters that are allocated at once, 256 KiB, and those left below which calls that are not
# recorded allocate again: so that recorded ones, which cannot, find some
SLAB, FEW_LEFT = 1 << 16, 1 << 14
_LOCK = threading.Lock()
_slabs: dict[torch.device, Tensor] = {}  # what is left of each device's
_kept: list[Tensor] = []  # recorded launches know addresses in them
_of_streams: dict[tuple[torch.device, int], Tensor] = {}


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


def tickets(count: int, device: torch.device) -> Tensor:
    """Counters that programs of one launch on the current stream share: `count` int32 zeros, which
    the launch sets back to zeros.

    Nothing clears them between calls, so two launches that may run at once must not have the same
    ones. Launches of one stream follow one another; a CUDA graph may be replayed on any stream, so
    every launch that is recorded keeps counters of its own. While a graph is recorded and no slab
    is left, zeros that the graph itself clears.
    """
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    recording = torch.cuda.is_current_stream_capturing()
    with _LOCK:
        if recording:
            return _cut(count, device, recording)
        if device not in _slabs or _slabs[device].numel() < FEW_LEFT:
            _renew(count, device)
        key = (device, torch.cuda.current_stream(device).cuda_stream)
        found = _of_streams.get(key)
        if found is None or found.numel() < count:
            found = _of_streams[key] = _cut(count, device, recording)
        return found[:count]


def _renew(count: int, device: torch.device) -> None:
    """A new slab of at least `count`, which all streams see as zeros."""
    _slabs[device] = torch.zeros(max(SLAB, count), dtype=torch.int32, device=device)
    _kept.append(_slabs[device])
    torch.cuda.current_stream(device).synchronize()


def _cut(count: int, device: torch.device, recording: bool) -> Tensor:
    """Counters that no other call has."""
    left = _slabs.get(device)
    if left is None or left.numel() < count:
        if recording:
            return torch.zeros(count, dtype=torch.int32, device=device)
        _renew(count, device)
        left = _slabs[device]
    # whole cache lines: neighbours do not share one
    _slabs[device] = left[-(-count // 32) * 32 :]
    return left[:count]


def usual_tiles(problem: Problem, sequences: int) -> tiling.Plan:
    """The tiles of a call whose sequences all have the same number of keys."""
    table, multiprocessors = device.device_table(problem.query.get_device())
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
    from elsa_core.backends.triton.attention.stream import stream_decode, stream_forward

    q, shape = problem.query, problem.shape
    table, multiprocessors = device.device_table(q.get_device())
    group = shape.heads // shape.key_heads
    kernel: Any
    if 1 < group <= MOST_PACKED and problem.mode != "exact":
        # one query of all heads that share a head of the keys is a tile
        tile, block = usual_tiles(problem, sequences).tile, max(FEW, 1 << (group - 1).bit_length())
        # `RESIDENT` programs have all registers that a thread can have
        tile = replace(tile, block_m=min(block, tile.block_m), warps=4, registers=0)
        # a program may fold all keys of a query
        problem = replace(problem, tiles=tiling.Plan(tile, 1, max(1, shape.keys)))
        tail, rows, kernel = fold_tail(problem), tile.block_m, stream_forward
        options, resident, width = fold_options(problem, tail), RESIDENT, rows * tail["V0"]
        least = least or LEAST
    else:
        unit, unit_d = layout.row_unit((problem.key, problem.value))
        if any(s % unit for s in q.stride()[:3]):
            unit = 1
        tail, rows, kernel = decode_tail(problem, unit, unit_d), 1, stream_decode
        options, resident = {"num_warps": table.decode["warps"]}, table.decode["resident"]
        width, least = tail["VP"], least or table.decode["least_tiles"]
    tail |= {
        "sequences": sequences, "lse_h": shape.queries, "CAUSAL": problem.causal, "least": least,
        "PARTS": max(1, 4096 // width),
    }  # fmt: skip
    grid = (programs or resident * multiprocessors,)
    return Streamed(Launch(kernel, grid, tail, options), rows, shape.value_dim)


def _streams(query: Tensor, key: Tensor, starts: Tensor) -> bool:
    sequences = starts.shape[0] - 1
    single = 0 < query.shape[0] <= sequences and key.shape[0] >= _STREAMED_KEYS * sequences
    return single and device.capability_of(query.device) == (9, 0)


def schedule(query: Tensor, key: Tensor, starts: Tensor) -> str:
    """How a call is cut, in words."""
    if _streams(query, key, starts):
        return "packed sequences by stream-K: equal shares of key tiles, joined by the last program"
    return "packed sequences: each program finds its own, keys and values split in the loop"


def problem_of(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, precision: str
) -> Problem:
    """The call as one of dense attention, tokens [1, H, T, D]."""
    mode = device.mode_of(q.dtype, precision)
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    shape = tiling.Shape(*q.shape[:2], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3])
    return Problem(q, k, v, None, causal, scale, precision, mode, shape)


def plan(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, causal: bool, scale: float, precision: str
) -> Launch | Streamed:
    """The launch of a call that has queries; everything here depends on layouts, never on data."""
    from elsa_core.backends.triton.attention.forward import varlen_forward

    sequences = starts.shape[0] - 1
    problem = problem_of(q, k, v, causal, scale, precision)
    if _streams(q, k, starts):
        return streamed(problem, sequences)
    shape = problem.shape
    # no sequence has more keys than there are
    tiles = replace(usual_tiles(problem, sequences), partitions=1, chunk=max(1, shape.keys))
    problem = replace(problem, tiles=tiles)
    slots = shape.queries // tiles.tile.block_m + sequences
    tail = fold_tail(problem) | {
        "sequences": sequences, "steps": sequences.bit_length(), "slots": slots,
    }  # fmt: skip
    return Launch(varlen_forward, (slots * shape.heads,), tail, fold_options(problem, tail))


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    is_causal: bool, scale: float, precision: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The CUDA kernel of `elsa::varlen_attention`; layouts and results as there.

    Nothing is read by the host. Cumulative lengths that leave the tokens are cut to them; rows that
    no sequence has are not written.
    """
    tokens, heads, _ = query.shape
    out = query.new_empty((tokens, heads, value.shape[2]))
    lse = query.new_empty((heads, tokens), dtype=torch.float32)
    if not out.numel():
        return out, lse
    if not key.shape[0] or not key.shape[1] or cu_seqlens_q.shape[0] < 2:
        return out.zero_(), lse.fill_(-torch.inf)
    starts, others = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    layouts = tuple(layout.key_of(t) for t in (query, key, value, starts, others))
    key_of_plan = ("varlen_attention", *layouts, query.get_device(), is_causal, scale, precision)
    launch = PLANS.get(key_of_plan, plan, query, key, value, starts, is_causal, scale, precision)
    with layout.on_device(query):
        launch(query, key, value, starts, others, out, lse)
    return out, lse
