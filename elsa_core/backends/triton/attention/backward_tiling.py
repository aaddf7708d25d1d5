"""Which blocks the gradient kernels take, and where they beat PyTorch's: data, one table a GPU."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from elsa_core.backends.triton.attention.tiling import TABLES, Shape
from elsa_core.backends.triton.shared.device import described


@dataclass(frozen=True)
class Tile:
    """Blocks of one side: queries by keys, of a mode and up to a padded head dimension `dim`.

    side: normalise, key (dK and dV), query (dQ) or mask. query_m, query_n: where not 0,
    the queries' blocks of one launch for both sides. keys: the most keys (None: any).
    """

    mode: str
    side: str
    dim: int
    keys: int | None
    block_m: int
    block_n: int
    warps: int
    stages: int
    query_m: int = 0
    query_n: int = 0

    def serves(self, mode: str, side: str, dim: int, keys: int) -> bool:
        """Whether this row takes a side of a call; the first of a table that does is taken."""
        fits = dim <= self.dim and (self.keys is None or keys <= self.keys)
        return fits and (mode, side) == (self.mode, self.side)


class Faster(NamedTuple):
    """Calls whose gradients these kernels were measured to give sooner than PyTorch's.

    half: float16 and bfloat16, or float32. mask: none, causal, bool or bias (additive, its gradient
    included). dims: least and most head and value dimension; keys: least and most (None: any);
    queries: least.
    """

    half: bool
    mask: str
    dims: tuple[int, int]
    keys: tuple[int, int | None]
    queries: int

    def holds(self, shape: Shape, half: bool, mask: str) -> bool:
        """Whether a call is one of them."""
        least, most = self.dims
        first, last = self.keys
        dims = (shape.head_dim, shape.value_dim)
        return (
            (half, mask) == (self.half, self.mask)
            and least <= min(dims)
            and max(dims) <= most
            and first <= shape.keys
            and (last is None or shape.keys <= last)
            and shape.queries >= self.queries
        )


class Table(NamedTuple):
    """Tiles, first match first, and where they were measured to be the faster ones (no GPU that
    was not measured has such rows).
    """

    measured: bool
    faster: tuple[Faster, ...]
    tiles: tuple[Tile, ...]


@lru_cache(maxsize=8)
def load_table(name: str) -> Table:
    """The table `tuning/backward/<name>.json`."""
    data: dict[str, Any] = json.loads((TABLES / "backward" / f"{name}.json").read_text())
    faster = tuple(Faster(**row) for row in data["faster"])
    return Table(data["measured"], faster, tuple(Tile(**row) for row in data["tiles"]))


def tiles_name(device: torch.device) -> str:
    """Which table a device takes: the H200's on sm_90, else the one of small tiles."""
    gpu = described()
    if gpu is None and (device.type != "cuda" or torch.version.hip):
        return "default"
    capability = gpu.capability if gpu else torch.cuda.get_device_capability(device)
    return "h200" if capability == (9, 0) else "default"


@lru_cache(maxsize=1024)
def tile_for(table: str, mode: str, side: str, dim: int, keys: int) -> Tile:
    """The first row of a table that takes a side of a call.

    Raises:
        LookupError: no row does.
    """
    for tile in load_table(table).tiles:
        if tile.serves(mode, side, dim, keys):
            return tile
    raise LookupError(f"table {table} has no {side} tile for {mode}, head dimension {dim}")


def mask_kind(mask: torch.Tensor | None, is_causal: bool) -> str:
    """What `serves` calls a mask: none, causal, bool, bias, or both of two."""
    kind = "none" if mask is None else "bool" if mask.dtype == torch.bool else "bias"
    if not is_causal:
        return kind
    return "causal" if mask is None else f"causal {kind}"


def measured_faster(dtype: torch.dtype, dims: tuple[int, int], device_type: str) -> bool:
    """Whether any calls of this dtype, and of these head and value dimensions, are such calls."""
    if device_type != "cuda" or not torch.cuda.is_available():
        return False
    half = dtype in (torch.float16, torch.bfloat16)
    return (half or dtype == torch.float32) and any(
        row.half == half and row.dims[0] <= min(dims) and max(dims) <= row.dims[1]
        for row in load_table(tiles_name(torch.device("cuda"))).faster
    )


def serves(shape: Shape, dtype: torch.dtype, mask: str, device: torch.device) -> bool:
    """Whether `backward.attention_backward` was measured to be faster than PyTorch's kernels.

    mask: as `mask_kind` calls it. False for float64, and on every GPU without measurements.
    """
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return False
    half = dtype != torch.float32
    return any(row.holds(shape, half, mask) for row in load_table(tiles_name(device)).faster)
