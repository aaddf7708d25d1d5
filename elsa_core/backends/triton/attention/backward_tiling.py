"""Which blocks the gradient kernels take, and where they beat PyTorch's: data, one table a GPU."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from elsa_core.backends.support import Request, Support
from elsa_core.backends.triton.attention.tiling import TABLES
from elsa_core.backends.triton.shared.device import capability_of

_HALF = (torch.float16, torch.bfloat16)


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
    return "h200" if capability_of(device) == (9, 0) else "default"


@lru_cache(maxsize=1024)
def tile_for(table: str, mode: str, side: str, dim: int, keys: int) -> Tile:
    """The first row of a table that takes a side of a call.

    Raises:
        LookupError: no row does.
    """
    for tile in load_table(table).tiles:
        fits = dim <= tile.dim and (tile.keys is None or keys <= tile.keys)
        if fits and (mode, side) == (tile.mode, tile.side):
            return tile
    raise LookupError(f"table {table} has no {side} tile for {mode}, head dimension {dim}")


def _faster(dtype: torch.dtype, dims: tuple[int, ...], device: torch.device) -> list[Faster]:
    """The rows of calls of a dtype and of these head and value dimensions."""
    if dtype not in (torch.float32, *_HALF):
        return []
    return [
        row
        for row in load_table(tiles_name(device)).faster
        if row.half == (dtype in _HALF) and row.dims[0] <= min(dims) and max(dims) <= row.dims[1]
    ]


def support(request: Request) -> Support:
    """Whether any gradients of this kind were measured to be faster than PyTorch's."""
    named = request.precision in ("strict", "turbo")  # the others' kernels were not measured
    if named and request.device_type == "cuda" and torch.cuda.is_available():
        dims = (request.head_dim, request.value_dim)
        if _faster(request.dtype, dims, request.device):
            return Support(True)
    return Support(False, "was not measured to be faster than PyTorch for such gradients")


def serves(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
    """Whether `backward.attention_backward` was measured to be faster than PyTorch's kernels for
    such a call."""
    kind = "none" if mask is None else "bool" if mask.dtype == torch.bool else "bias"
    if is_causal:
        kind = "causal" if mask is None else f"causal {kind}"
    queries, keys = query.shape[2], key.shape[2]
    return any(
        row.mask == kind
        and row.keys[0] <= keys
        and (row.keys[1] is None or keys <= row.keys[1])
        and queries >= row.queries
        for row in _faster(query.dtype, (query.shape[3], value.shape[3]), query.device)
    )
