"""Which kernel and tiles serve a window attention: pure functions of shapes and of a table."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from elsa_core.backends.triton.attention.tiling import TABLES
from elsa_core.backends.triton.shared.layout import padded

# a window this long fits one tile with its bias in registers
WHOLE = 64
# what a program folds is told from a word of verdicts
MOST_WINDOWS = 16


class WindowShape(NamedTuple):
    """What decides tiles. windows: of the whole call; tokens: of one window."""

    windows: int
    heads: int
    tokens: int
    head_dim: int


@dataclass(frozen=True)
class WindowTile:
    """One row of a table.

    mode: half, split, single or exact. dim: the largest padded head dimension it serves; tokens:
    the longest window (None: any). block_m queries and block_n keys a tile: a window of at most 64
    tokens is one tile of its own size, unless `folded`. windows: the most that a program takes one
    after the other; resident: programs a multiprocessor should have before that. registers: the
    most a thread may use (0: the compiler decides). unroll: the tiles of keys follow one another
    without a loop. least_dim: head dimensions are padded to it. direction: forward or backward;
    the other direction's rows never serve a call.
    """

    mode: str
    dim: int
    tokens: int | None
    block_m: int
    block_n: int
    warps: int
    stages: int
    windows: int = 1
    resident: int = 3
    registers: int = 0
    unroll: bool = False
    folded: bool = False
    least_dim: int = 16
    direction: str = "forward"


@dataclass(frozen=True)
class WindowTable:
    """The window tiles of one GPU, first match first; `measured` as in `tiling.Table`.

    gradients: tokens of the longest windows whose forward and gradients together were measured to
    be faster than those of the models' own operations there; 0: none were.
    """

    gpu: str
    measured: bool
    tiles: tuple[WindowTile, ...]
    gradients: int = 0

    def tile_for(self, mode: str, dim: int, tokens: int, direction: str = "forward") -> WindowTile:
        """The tile of calls of a mode, padded head dimension, length and direction."""
        return next(
            t
            for t in self.tiles
            if (t.direction, t.mode) == (direction, mode)
            and dim <= t.dim
            and (t.tokens is None or tokens <= t.tokens)
        )


class WindowPlan(NamedTuple):
    """whole: a program holds whole windows (`window_tile`), `count` of them; else `window_fold`."""

    tile: WindowTile
    whole: bool
    block_m: int
    block_n: int
    count: int
    programs: int
    padded_dim: int


class BackwardPlan(NamedTuple):
    """A program holds whole windows of up to `block` tokens. groups: of `count` windows each, a
    program for each group and head. exact: the tile of the windows that the guard of split products
    turns away; None where there is no guard."""

    tile: WindowTile
    exact: WindowTile | None
    block: int
    count: int
    groups: int
    padded_dim: int


@lru_cache(maxsize=16)
def load_table(name: str) -> WindowTable:
    """The table `tuning/windows/<name>.json`, or that of GPUs without one of their own."""
    path = TABLES / "windows" / f"{name}.json"
    if not path.exists():
        path = TABLES / "windows" / "default.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    tiles = tuple(WindowTile(**row) for row in data["tiles"])
    return WindowTable(data["gpu"], data["measured"], tiles, data.get("gradients", 0))


def windows_each(windows: int, heads: int, multiprocessors: int, tile: WindowTile) -> int:
    """Windows a program takes: as many as leave each multiprocessor `resident` programs."""
    count = 1
    while (
        count * 2 <= min(tile.windows, MOST_WINDOWS)
        and -(-windows // (count * 2)) * heads >= tile.resident * multiprocessors * 0.9
    ):
        count *= 2
    return count


def plan(shape: WindowShape, mode: str, table: WindowTable, multiprocessors: int) -> WindowPlan:
    """Kernel, tiles and programs of a forward call."""
    dim = padded(shape.head_dim)
    tile = table.tile_for(mode, dim, shape.tokens)
    whole = shape.tokens <= WHOLE and mode != "exact" and not tile.folded
    if whole:
        block = padded(shape.tokens)
        count = windows_each(shape.windows, shape.heads, multiprocessors, tile)
        programs = -(-shape.windows // count) * shape.heads
        return WindowPlan(tile, True, block, block, count, programs, max(dim, tile.least_dim))
    block_m = min(tile.block_m, padded(shape.tokens))
    block_n = min(tile.block_n, padded(shape.tokens))
    programs = shape.windows * -(-shape.tokens // block_m) * shape.heads
    return WindowPlan(tile, False, block_m, block_n, 1, programs, max(dim, tile.least_dim))


def plan_backward(
    shape: WindowShape, mode: str, table: WindowTable, multiprocessors: int
) -> BackwardPlan:
    """Tiles and programs of the gradients of windows of up to `WHOLE` tokens. Of sums: as many
    programs as a GPU runs at once."""
    dim = padded(shape.head_dim)
    tile, exact = table.tile_for(mode, dim, shape.tokens, "backward"), None
    if mode in ("split", "single"):
        exact = table.tile_for("exact", dim, shape.tokens, "backward")
    groups = tile.resident * multiprocessors // shape.heads
    count = -(-shape.windows // max(1, min(shape.windows, groups)))
    return BackwardPlan(
        tile, exact, padded(shape.tokens), count, -(-shape.windows // count),
        max(dim, tile.least_dim),
    )  # fmt: skip
