"""Which blocks the gradient kernels take, and where they beat PyTorch's: data, one table a GPU."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from elsa_core.backends.triton.attention.tiling import TABLES


@dataclass(frozen=True)
class Tile:
    """Blocks of one side: queries by keys, of a mode and up to a padded head dimension `dim`.

    side: normalise, key (dK and dV), query (dQ) or mask. query_m, query_n: where not 0,
    the queries' blocks of one launch for both sides. keys: the most keys (None: any).
    one_loop: every tile is tested for the end of its rows, so that no second loop does.
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
    one_loop: bool = False

    def serves(self, mode: str, side: str, dim: int, keys: int) -> bool:
        """Whether this row takes a side of a call; the first of a table that does is taken."""
        fits = dim <= self.dim and (self.keys is None or keys <= self.keys)
        return fits and (mode, side) == (self.mode, self.side)


@lru_cache(maxsize=8)
def load_table(name: str) -> dict[str, Any]:
    """The table `tuning/backward/<name>.json`."""
    data: dict[str, Any] = json.loads((TABLES / "backward" / f"{name}.json").read_text())
    data["tiles"] = tuple(Tile(**row) for row in data["tiles"])
    return data


def tiles_name(device: torch.device) -> str:
    """Which table a device takes: the H200's on sm_90, else the one of small tiles."""
    if device.type != "cuda" or torch.version.hip:
        return "default"
    return "h200" if torch.cuda.get_device_capability(device) == (9, 0) else "default"


@lru_cache(maxsize=1024)
def tile_for(table: str, mode: str, side: str, dim: int, keys: int) -> Tile:
    """The first row of a table that takes a side of a call.

    Raises:
        LookupError: no row does.
    """
    for tile in load_table(table)["tiles"]:
        if tile.serves(mode, side, dim, keys):
            found: Tile = tile
            return found
    raise LookupError(f"table {table} has no {side} tile for {mode}, head dimension {dim}")
