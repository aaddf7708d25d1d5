"""Which tiles, and how many partitions of the keys: pure functions of the call's shape and of a
GPU's table.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

TABLES = Path(__file__).parents[1] / "tuning"
# what `one_launch.py` takes: keys, and the widths that a head dimension is padded to
ONE_LAUNCH_KEYS = 256
ONE_LAUNCH_DIMS = (32, 64)
# up to so many keys, of the wider head dimensions, its one launch of three products beats two
# launches of one (turbo)
TURBO_KEYS = 208
PARTITIONS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128)


class Shape(NamedTuple):
    """What decides tiles and schedule. Counts, not bytes. masked: by a row for each query; where
    keys are padding one row serves all.
    """

    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    masked: bool = False


@dataclass(frozen=True)
class Tile:
    """One row of a tuning table.

    mode: half, split, single or exact. dim: the largest padded head dimension it serves; keys: the
    most keys (None: any); programs: the most query tiles of the whole call (None: any). ahead: keys
    and values are split by an own launch first. part: the widest block of the head dimension (wider
    ones are cut in two). registers: the most a thread may use (0: the compiler decides).
    one_loop: one loop, which asks of each tile whether its scores need a test, instead of a loop
    for whole tiles and another for the rest: pipelined loads then wait once, not twice.
    specialized: for calls that a kernel of sm_90 serves. With `ahead` that is `hopper.py`: one
    warpgroup copies, the others fold, and `warps` are those of one warpgroup. Without, it is
    `one_launch.py`, which holds all keys at once: `warps` for all of block_m, 16 queries each.
    masked: for calls with a mask of a row for each query, whose tiles take registers of their own.
    """

    mode: str
    dim: int
    keys: int | None
    programs: int | None
    block_m: int
    block_n: int
    warps: int
    stages: int
    ahead: bool
    part: int = 256
    registers: int = 0
    one_loop: bool = False
    specialized: bool = False
    masked: bool = False

    @property
    def one_launch(self) -> bool:
        """Whether it is one of `one_launch.py`: all keys on chip."""
        return self.specialized and not self.ahead

    def serves(self, mode: str, dim: int, shape: Shape) -> bool:
        """Whether calls of this mode, padded head dimension and shape are its own. A turbo call
        takes a tile of strict, too, where its one launch is the faster one.
        """
        if mode == "single" and self.mode == "split":
            widths = {blocks(shape.head_dim)[0], blocks(shape.value_dim)[0]}
            few = self.one_launch and shape.keys <= TURBO_KEYS
            if not few or widths != {ONE_LAUNCH_DIMS[-1]}:
                return False
            mode = "split"
        if mode != self.mode or dim > self.dim or (self.masked and not shape.masked):
            return False
        if self.one_launch:
            dims = blocks(shape.head_dim), blocks(shape.value_dim)
            fits = all(width in ONE_LAUNCH_DIMS and not rest for width, rest in dims)
            few_rows = self.block_m > 64 and shape.queries <= self.block_m // 2
            if not fits or shape.keys > ONE_LAUNCH_KEYS or few_rows:
                return False
        if self.keys is not None and shape.keys > self.keys:
            return False
        count = shape.batch * shape.heads * -(-shape.queries // self.block_m)
        return self.programs is None or count <= self.programs


@dataclass(frozen=True)
class Table:
    """The tiles of one GPU, first match first.

    measured: the figures behind it were taken on that GPU; else they follow from its shared memory.
    shared_memory: bytes a program may use. decode: the knobs of the one-query kernel.
    """

    gpu: str
    measured: bool
    multiprocessors: int
    shared_memory: int
    decode: dict[str, int]
    tiles: tuple[Tile, ...]


@dataclass(frozen=True)
class Plan:
    """Tiles and partitions of one call. `chunk` keys a partition, a multiple of the key tile."""

    tile: Tile
    partitions: int
    chunk: int


@lru_cache(maxsize=16)
def load_table(name: str) -> Table:
    """The table `tuning/<name>.json`."""
    data = json.loads((TABLES / f"{name}.json").read_text())
    return Table(**{**data, "tiles": tuple(Tile(**row) for row in data["tiles"])})


def table_name(device_name: str, capability: tuple[int, int]) -> str:
    """Which table serves a GPU: its own, or that of the nearest generation and shared memory."""
    for mark, table in (
        ("H200", "h200"), ("H100", "h200"), ("A100", "a100"), ("L4", "l4"), ("4090", "rtx4090"),
        ("MI300", "mi300"),
    ):  # fmt: skip
        if mark in device_name:
            return table
    if capability in ((9, 0), (10, 0), (10, 3)):
        return "h200"
    return "a100" if capability in ((8, 0), (8, 7)) else "rtx4090"


def blocks(dim: int, part: int = 256) -> tuple[int, int]:
    """Two powers of two (the second may be 0) that cover `dim` with few more: 80 -> (64, 16)."""
    whole = max(16, 1 << (dim - 1).bit_length())
    if whole > part:
        return whole // 2, whole // 2
    lower = whole // 2
    if dim <= 32 or dim == whole:
        return whole, 0
    rest = max(16, 1 << (dim - lower - 1).bit_length())
    return (lower, rest) if lower + rest < whole else (whole, 0)


def padded_dim(shape: Shape) -> int:
    """The head dimension that tables are keyed by."""
    return max(sum(blocks(shape.head_dim)), sum(blocks(shape.value_dim)))


def waves(
    programs: int, multiprocessors: int, key_tiles: int, partitions: int, *, half: bool = False,
    specialized: bool = False,
) -> float:  # fmt: skip
    """Time of a schedule in units of one key tile of one program.

    Programs share out evenly over multiprocessors, and each has its own start. A multiprocessor
    that runs one program alone hides no latency and does 0.7 of its rate. The merge is a launch of
    its own, and its states travel through memory. half: a key tile is over sooner (0.6 us for 64 x
    64 of head_dim 64 on an H200), and the merge costs 2.4 for each partition instead of 4.0.
    specialized: warps of their own hide the latency of a program that is alone, and the merge costs
    8.0 (10 us on an H200: states, the FMA fallback's launch and its own).
    """
    start = 2.0
    launch = 2.4 * partitions if half else 8.0 if specialized else 4.0
    merge = 0.0 if partitions == 1 else launch + 0.01 * partitions * programs
    most = -(-programs * partitions // multiprocessors)
    rate = 0.7 if most == 1 and not specialized else 1.0
    return most * (-(-key_tiles // partitions) + start) / rate + merge


def partitions(programs: int, multiprocessors: int, key_tiles: int, **how: bool) -> int:
    """The number of key partitions with the least time by `waves`; 1 where splitting gains under 5
    %.
    """
    best, least = 1, waves(programs, multiprocessors, key_tiles, 1, **how) * 0.95
    for count in PARTITIONS[1:]:
        if count > key_tiles:
            break
        time = waves(programs, multiprocessors, key_tiles, count, **how)
        if time < least:
            best, least = count, time
    return best


def plan(
    shape: Shape, mode: str, table: Table, *, workspace: bool, multiprocessors: int,
    specialized: bool = False,
) -> Plan:  # fmt: skip
    """Tiles and partitions of a forward call.

    workspace False: no splitting ahead, no partial states. specialized: `hopper.py` takes the call,
    and `one_launch.py`, where its keys are few.
    """
    dim = padded_dim(shape)
    tile = next(
        t
        for t in table.tiles
        if t.serves(mode, dim, shape)
        and (workspace or not t.ahead)
        and (specialized or not t.specialized)
    )  # fmt: skip
    key_tiles = -(-shape.keys // tile.block_n)
    count = 1
    if workspace and not tile.one_launch:
        programs = shape.batch * shape.heads * -(-shape.queries // tile.block_m)
        count = partitions(
            programs, multiprocessors, key_tiles, half=mode == "half", specialized=tile.specialized
        )
    chunk = -(-key_tiles // count) * tile.block_n
    return Plan(tile, -(-shape.keys // chunk), chunk)


def decode_partitions(
    rows: int, keys: int, multiprocessors: int, knobs: dict[str, int]
) -> tuple[int, int]:
    """(partitions, keys of a partition) for one query: enough programs to keep the memory busy."""
    block = knobs["block_n"]
    wanted = multiprocessors * knobs["resident"]
    tiles = -(-keys // block)
    count = max(1, min(wanted // rows, tiles // knobs["least_tiles"], PARTITIONS[-1]))
    chunk = -(-tiles // count) * block
    return -(-keys // chunk), chunk
