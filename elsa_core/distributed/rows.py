"""Rows of an image over ranks, cut at windows, and their way from one cut to the next.

A windowed attention that shifts its image rolls the rows by -shift, cuts windows, and masks within
the last row of windows what came round from the first one. Cut at rows of the rolled image's
windows, every rank computes this alone: its windows hold its last rows and the first `shift` ones
of the next rank, the halo. Only the last rank's windows are masked along the rows; it keeps its
rows such that rolling them by -shift gives its windows, as for an image of its own.

Where a block of another shift follows, the ranks exchange halos: each row moves at most to a
neighbour. Rows also move where stages are cut differently, and then as far as they must.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from elsa_core.base.opaque import define
from elsa_core.distributed import groups
from elsa_core.distributed.plan import shard_lengths
from elsa_core.ops.factory import Grads

_Run = tuple[int, int]  # first row and the one behind the last


class Cut(NamedTuple):
    """Which rows of an image each rank holds, in their order.

    Attributes:
        lengths: rows of each rank; rank 0 holds the first ones of the image rolled by -shift.
        shift: the last rank that holds any has its rows rolled back by it.
    """

    lengths: tuple[int, ...]
    shift: int = 0

    def last(self) -> int:
        """The rank that holds the last rows."""
        return max(rank for rank, length in enumerate(self.lengths) if length or not rank)


def cut_at_windows(rows: int, window: int, shift: int, world: int) -> Cut:
    """Cut the windows of an image into runs of equal numbers of rows of windows, but for one.

    Args:
        rows: of the image, in tokens. window, shift: along them. world: the ranks.

    The last rank holds at least `shift` rows if the image has so many.
    """
    starts = list(range(0, rows, window))
    if len(starts) > 1 and rows - starts[-1] < shift:
        starts.pop()
    lengths, first = [], 0
    for count in shard_lengths(len(starts), world):
        start, stop = ((starts[i] if i < len(starts) else rows) for i in (first, first + count))
        lengths.append(stop - start)
        first += count
    return Cut(tuple(lengths), shift)


def cut_for_pairs(merged: Cut, rows: int) -> Cut:
    """The cut of an image of `rows` rows whose pairs become the rows of an unshifted `merged`."""
    stops = [min(2 * sum(merged.lengths[: i + 1]), rows) for i in range(len(merged.lengths))]
    return Cut(tuple(stop - start for start, stop in zip([0, *stops], stops, strict=False)))


def rows_of(cut: Cut, rank: int) -> list[int]:
    """The rows of the image that a rank holds, in its order."""
    total, start = sum(cut.lengths), sum(cut.lengths[:rank])
    held = [(row + cut.shift) % total for row in range(start, start + cut.lengths[rank])]
    if held and rank == cut.last():
        back = cut.shift % len(held)
        held = held[len(held) - back :] + held[: len(held) - back]
    return held


class _Moves(NamedTuple):
    """What a rank sends and keeps."""

    sent: tuple[tuple[_Run, ...], ...]  # runs of this rank's rows for each rank
    placed: tuple[tuple[int, _Run], ...]  # the new rows: from which rank, and which that it sends
    received: tuple[int, ...]  # how many rows come from each rank
    anywhere: bool  # whether any rank sends another one anything


@lru_cache(maxsize=1024)
def _moves(source: Cut, target: Cut, rank: int) -> _Moves:
    world = len(source.lengths)
    place = {row: (r, i) for r in range(world) for i, row in enumerate(rows_of(source, r))}
    wanted = [rows_of(target, r) for r in range(world)]
    sent = tuple(
        tuple(run for _, run in _runs([place[row] for row in rows if place[row][0] == rank]))
        for rows in wanted
    )
    counts = [0] * world
    arriving = []
    for row in wanted[rank]:
        origin = place[row][0]
        arriving.append((origin, counts[origin]))
        counts[origin] += 1
    anywhere = any(place[row][0] != r for r, rows in enumerate(wanted) for row in rows)
    return _Moves(sent, tuple(_runs(arriving)), tuple(counts), anywhere)


def _runs(places: Sequence[tuple[int, int]]) -> list[tuple[int, _Run]]:
    """Rows of ranks, consecutive ones of one rank as a run."""
    found: list[tuple[int, _Run]] = []
    for rank, row in places:
        if found and found[-1][0] == rank and found[-1][1][1] == row:
            found[-1] = (rank, (found[-1][1][0], row + 1))
        else:
            found.append((rank, (row, row + 1)))
    return found


def rows_sent(source: Cut, target: Cut, rank: int) -> int:
    """How many rows a rank sends to others."""
    sent = _moves(source, target, rank).sent
    return sum(stop - start for r, runs in enumerate(sent) if r != rank for start, stop in runs)


def move(x: Tensor, source: Cut, target: Cut, group: str) -> Tensor:
    """[B, rows, W, C] of each rank by `source` -> [B, rows, W, C] of each by `target`.

    Every rank makes this call. Differentiable: gradients go the way back. Nothing is rounded.
    """
    if source.lengths == target.lengths and source.shift == target.shift:
        return x
    moved: Tensor = torch.ops.elsa.move_rows(x, *source, *target, group)
    return moved


def _move(
    x: Tensor, lengths: Sequence[int], shift: int, to: Sequence[int], to_shift: int, group: str
) -> Tensor:
    process_group = groups.by_name(group)
    rank = process_group.rank()
    moves = _moves(Cut(tuple(lengths), shift), Cut(tuple(to), to_shift), rank)
    parts = [_joined(x, [x[:, a:b] for a, b in runs]) for runs in moves.sent]
    own, parts[rank] = parts[rank], x[:, :0]
    if moves.anywhere:
        counts = [0 if r == rank else n for r, n in enumerate(moves.received)]
        shapes = [(x.shape[0], n, *x.shape[2:]) for n in counts]
        with groups.watching(process_group, "exchanging rows of windows"):
            parts = groups.exchange(process_group, parts, shapes)
    parts[rank] = own
    return torch.cat([x[:, :0], *(parts[origin][:, a:b] for origin, (a, b) in moves.placed)], 1)


def _joined(x: Tensor, pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat([x[:, :0], *pieces], 1)


def _fake(
    x: Tensor, lengths: Sequence[int], shift: int, to: Sequence[int], to_shift: int, group: str
) -> Tensor:
    return x.new_empty((x.shape[0], to[groups.by_name(group).rank()], *x.shape[2:]))


def _context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.terms = inputs[1:]


def _formula(ctx: Any, grad: Tensor) -> Grads:
    lengths, shift, to, to_shift, group = ctx.terms
    back = torch.ops.elsa.move_rows(grad, to, to_shift, lengths, shift, group)
    return back, None, None, None, None, None


define(
    "move_rows(Tensor x, int[] lengths, int shift, int[] to, int to_shift, str group) -> Tensor",
    _move, _fake, _formula, _context,
)  # fmt: skip
