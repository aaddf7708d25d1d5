"""Tiles and launches of products by `product.py`, from shapes alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from elsa_core.backends.triton.linear import halves as splitting
from elsa_core.backends.triton.linear.product import ACTIVATIONS, product
from elsa_core.backends.triton.shared.device import capability_of, device_table
from elsa_core.backends.triton.shared.launch import Launch

# Columns in one pass of `split_rows`, and the blocks of `split_turned`.
MOST_COLUMNS = 4096
BLOCK = 64
# Chunks that the largest magnitudes of a column are gathered from.
CHUNKS = 64


class Tile(NamedTuple):
    """Rows, columns and channels of a tile, warps of a program, and tiles under way."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


class Gpu(NamedTuple):
    """What tiles depend on: multiprocessors, bytes of shared memory that a program may use, and the
    compute capability.
    """

    multiprocessors: int
    shared_memory: int
    capability: tuple[int, int]


# Measured on one H200; `tile_for` says where each serves.
LARGE = Tile(128, 128, 64, 8, 3)
SHALLOW = Tile(64, 128, 32, 4, 4)
WIDE = Tile(64, 128, 64, 4, 3)
SMALL = Tile(64, 64, 64, 4, 3)
MEDIUM = Tile(64, 64, 32, 4, 4)
# What serves where a tile takes more shared memory than there is; not measured.
NARROW = Tile(128, 128, 32, 8, 4)
SMALLER = {LARGE: NARROW, NARROW: SHALLOW, WIDE: SHALLOW, SHALLOW: MEDIUM, SMALL: MEDIUM}
# Of the last round of large tiles, one to a multiprocessor, so many must be there.
FULL = 0.72
# Products that sum over fewer channels spend their time on the tiles' ends.
DEEP = 256
# Sums over fewer tokens in large tiles gain nothing.
LONG = 4096
# Writing and adding a part takes as long as the products of so many tokens.
PART = 130


# Whether there is a bias, the activation, whether there are a scale and a residual.
Epilogue = tuple[bool, str, bool, bool]
NO_EPILOGUE: Epilogue = (False, "none", False, False)


class Shape(NamedTuple):
    """A product [rows, depth] x [columns, depth]^T."""

    rows: int
    columns: int
    depth: int


def tile_for(shape: Shape, gpu: Gpu) -> Tile:
    """The tile that serves a product."""
    multiprocessors = gpu.multiprocessors
    if tiles_of(shape, SMALL) <= multiprocessors:
        return fitting(SMALL, gpu)
    if _fill(tiles_of(shape, LARGE), multiprocessors) >= FULL:
        return fitting(LARGE if shape.depth >= DEEP else SHALLOW, gpu)
    return fitting(WIDE if tiles_of(shape, WIDE) <= multiprocessors else MEDIUM, gpu)


def cut_for(shape: Shape, gpu: Gpu) -> tuple[Tile, int]:
    """The tile of a product with a long sum, and into how many parts its depth is cut, so that few
    tiles occupy the device.
    """
    multiprocessors = gpu.multiprocessors
    large, small = tiles_of(shape, LARGE), tiles_of(shape, SMALL)
    if shape.depth >= LONG and large * 8 >= multiprocessors:
        gains = {
            parts: _fill(large * parts, multiprocessors) / (1 + parts * PART / shape.depth)
            for parts in range(1, 17)
        }
        return fitting(LARGE, gpu), max(gains, key=gains.__getitem__)
    if _fill(large, multiprocessors) >= FULL:
        return fitting(LARGE, gpu), 1
    parts = max(1, min(2 * multiprocessors // small, shape.depth // 512, 32))
    return fitting(SMALL, gpu), parts


def fitting(tile: Tile, gpu: Gpu) -> Tile:
    """The tile, or the largest of `SMALLER` that a program of this GPU has shared memory for."""
    # products that read shared memory themselves (wgmma, tcgen05) hold the tile that is multiplied
    # there, others hold it in registers
    in_registers = 0 if 9 <= gpu.capability[0] < 12 else 1
    while True:
        held = tile.stages - in_registers
        under_way = held * (tile.rows + tile.columns) * tile.depth * 4  # bytes of halves
        if under_way <= gpu.shared_memory or tile not in SMALLER:
            return tile
        tile = SMALLER[tile]


def tiles_of(shape: Shape, tile: Tile) -> int:
    """Tiles of a result."""
    return -(-shape.rows // tile.rows) * -(-shape.columns // tile.columns)


def _fill(programs: int, multiprocessors: int) -> float:
    """The share of multiprocessors that work in all rounds, one program to each."""
    return programs / (-(-programs // multiprocessors) * multiprocessors)


def gpu_of(device: torch.device) -> Gpu:
    """The GPU that a plan is for: an H200 where there is none."""
    table, multiprocessors = device_table(-1 if device.index is None else device.index)
    return Gpu(multiprocessors, table.shared_memory, capability_of(device) or (9, 0))


def product_launch(
    shape: Shape, left: tuple[int, int], right: tuple[int, int], tile: Tile, *,
    single: bool = False, epilogue: Epilogue = NO_EPILOGUE, parts: int = 1,
) -> Launch:  # fmt: skip
    """One product, see `product.product`: a grid of tiles and of parts, `parts` of them or fewer.

    left, right: the steps of X and Weight from row to row and from channel to channel.
    """
    padded = -(-shape.depth // 8) * 8  # whole units of 16 bytes
    blocks = -(-padded // tile.depth)
    chunk = -(-blocks // parts)
    bias, activation, scale, residual = epilogue
    tail = {
        "rows": shape.rows, "columns": shape.columns // 4, "depth": shape.depth,
        "padded": padded // 8, "chunk": chunk, "x_row": left[0], "x_depth": left[1],
        "w_row": right[0], "w_depth": right[1], "SINGLE": single,
        "EVEN": padded % tile.depth == 0, "BIAS": bias,
        "ACTIVATION": ACTIVATIONS.index(activation), "SCALE": scale, "RESIDUAL": residual,
        "BM": tile.rows, "BN": tile.columns, "BK": tile.depth, "STAGES": tile.stages,
        "XM": 16, "XK": 16,
    }  # fmt: skip
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return Launch(product, (tiles_of(shape, tile), -(-blocks // chunk)), tail, options)


def split_launch(
    shape: tuple[int, int, int], x_row: int, w_row: int = 0, single: bool = False
) -> Launch:
    """Rows of X [rows, depth] and of W [others, depth] in one launch."""
    rows, others, depth = shape
    width = min(MOST_COLUMNS, max(8, triton.next_power_of_2(depth)))  # what a row is padded to
    held = max(1, min(4, 1024 // width))
    tail = {
        "rows": rows, "others": others, "depth": depth // 8, "x_row": x_row // 4,
        "w_row": w_row // 4, "SINGLE": single, "R": held, "C": width, "WHOLE": width >= depth,
    }  # fmt: skip
    programs = -(-rows // held) + -(-others // held)
    return Launch(splitting.split_rows, (programs,), tail, {"num_warps": 4})


def split_turned(depth: int, columns: int, stride: int) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """Two launches that split the transpose of X [depth, columns], into halves [2, columns, padded
    depth] and powers [columns].
    """
    steps = -(-depth // (BLOCK * CHUNKS))
    chunks = -(-depth // (BLOCK * steps))
    padded, blocks = -(-depth // 8) * 8, -(-columns // BLOCK)
    common = {
        "depth": depth, "columns": columns // 4, "stride": stride // 4, "BK": BLOCK, "BC": BLOCK,
    }  # fmt: skip
    maxima = Launch(
        splitting.column_maxima, (chunks, blocks), {**common, "steps": steps}, {"num_warps": 4}
    )
    split = Launch(
        splitting.split_turned, (-(-depth // BLOCK), blocks),
        {**common, "chunks": chunks, "MOST": CHUNKS}, {"num_warps": 4},
    )  # fmt: skip

    def run(x: Tensor) -> tuple[Tensor, ...]:
        largest = x.new_empty((chunks, columns), dtype=torch.int32)
        halves = x.new_empty((2, columns, padded), dtype=torch.float16)
        powers = x.new_empty(columns)
        maxima(x, largest)
        split(x, largest, halves, powers)
        return halves, powers

    return run
