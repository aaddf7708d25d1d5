"""What was measured on the user's GPU: files in `<cache>/tuning/`, two for each GPU model.

`elsa bench attention --tune` writes tiles. These rows stand before those of the shipped table and
serve only calls like the one that was measured. `elsa bench linear --tune` writes from how many
multiply-adds on split products are faster than PyTorch's; a GPU without such a file uses PyTorch's,
but for sm_90, whose figures are shipped. Whatever is wrong with a file, what is shipped serves and
one warning says why. A table decides speed alone.

Environment variables:
    ELSA_TUNING: "0" leaves the user's tables aside.
    ELSA_CACHE_DIR: the cache (default: the user's cache directory).
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elsa_core.backends.triton.attention.tiling import Shape, Table, Tile, padded_dim
from elsa_core.base.files import write_text
from elsa_core.base.version import __version__

SCHEMA = 1
# A measured tile serves calls whose keys and rows lie within this factor of the measured ones.
REACH = math.sqrt(2.0)
_LOG = logging.getLogger("elsa")


@dataclass(frozen=True)
class UserTile(Tile):
    """A tile for calls like a measured one.

    Beside `Tile.serves`: padded head dimensions above `over_dim`, at least `least_keys` keys, and a
    number of rows (batch x heads x queries) from `least_rows` to `most_rows`.
    """

    over_dim: int = 0
    least_keys: int = 0
    least_rows: int = 0
    most_rows: int = 0

    def serves(self, mode: str, dim: int, shape: Shape) -> bool:
        if mode != self.mode:  # what was measured for strict is no figure of turbo
            return False
        rows = shape.batch * shape.heads * shape.queries
        near = dim > self.over_dim and shape.keys >= self.least_keys
        near = near and self.least_rows <= rows <= self.most_rows
        return near and super().serves(mode, dim, shape)

    @property
    def calls(self) -> tuple[Any, ...]:
        """What it serves: two rows with equal `calls` replace one another."""
        sizes = self.least_keys, self.keys, self.least_rows, self.most_rows
        return self.mode, self.dim, self.over_dim, *sizes


def measured_for(tile: Tile, shape: Shape) -> UserTile:
    """The row that hands `tile` to calls like `shape`.

    They have its padded head dimension, and keys and rows within a factor of `REACH`.
    """
    dim = padded_dim(shape)
    rows = shape.batch * shape.heads * shape.queries
    values = {f.name: getattr(tile, f.name) for f in dataclasses.fields(Tile)}
    values |= {"dim": dim, "keys": math.floor(shape.keys * REACH), "programs": None}
    return UserTile(
        **values, over_dim=dim - 1, least_keys=math.ceil(shape.keys / REACH),
        least_rows=math.ceil(rows / REACH), most_rows=math.floor(rows * REACH),
    )  # fmt: skip


def path(gpu: str, kind: str = "") -> Path:
    """Where a table of a GPU model is kept, of tiles or of kind ".linear"; `gpu` is the name that
    its driver gives.
    """
    chosen = os.environ.get("ELSA_CACHE_DIR")
    if chosen:
        root = Path(os.path.expanduser(chosen))  # noqa: PTH111 (never raises)
    else:
        import platformdirs

        root = Path(platformdirs.user_cache_dir("elsa"))
    name = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    return root / "tuning" / f"{name}{kind}.json"


def read(file: Path) -> tuple[UserTile, ...]:
    """The rows of a user's table.

    Raises:
        ValueError: it is not such a table, or was measured with another version of the kernels.
    """
    try:
        tiles = tuple(UserTile(**row) for row in document(file)["tiles"])
        for tile in tiles:
            _check(tile)
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a tuning table ({type(error).__name__}: {error})") from error
    return tiles


def document(file: Path) -> dict[str, Any]:
    """What a user's table of this version of the kernels holds. Of a file that is none it raises
    ValueError, KeyError, TypeError or AttributeError.
    """
    data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if data["schema"] != SCHEMA:
        raise ValueError(f"schema {data['schema']} is not {SCHEMA}")
    if data["elsa_version"] != __version__:
        raise ValueError(f"measured with elsa {data['elsa_version']}, this is {__version__}")
    return data


def _check(tile: UserTile) -> None:
    if tile.mode not in ("half", "split", "single", "exact"):
        raise ValueError(f"mode {tile.mode!r} is unknown")
    for name in ("block_m", "block_n", "warps", "part"):
        size = getattr(tile, name)
        if not isinstance(size, int) or not 1 <= size <= 256 or size & (size - 1):
            raise ValueError(f"{name} {size!r} is not a power of two up to 256")
    counts = ("stages", "registers", "dim", "over_dim", "least_keys", "least_rows", "most_rows")
    for name in (*counts, "keys", "programs"):
        count = getattr(tile, name)
        if count is None and name not in counts:
            continue  # any number
        if not isinstance(count, int) or count < 0:
            raise ValueError(f"{name} {count!r} is not a count")
    if min(tile.stages, tile.dim) < 1 or min(tile.block_m, tile.block_n) < 16:
        raise ValueError("a tile of too few rows, keys or stages")
    if tile.specialized and not _exists(tile):
        raise ValueError("a specialized tile that its kernel does not have")


def _exists(tile: UserTile) -> bool:
    """Whether `one_launch.py` or `hopper.py` has this tile."""
    if tile.mode != "split" or tile.part != 256:
        return False
    if tile.one_launch:
        return tile.block_n == 64 and tile.warps == tile.block_m // 16 and tile.block_m >= 64
    sizes = tile.block_m in (64, 128) and tile.block_n >= 64
    return sizes and tile.warps == 4 and tile.dim <= 128


def joined(table: Table, gpu: str) -> Table:
    """`table` with the user's rows for this GPU before its own. Never raises."""
    if os.environ.get("ELSA_TUNING", "1") == "0":
        return table
    try:
        file = path(gpu)
        if not file.exists():
            return table
        return dataclasses.replace(table, tiles=(*read(file), *table.tiles))
    except (ValueError, OSError) as error:
        _LOG.warning("the user's tuning table is left aside: %s: %s", path(gpu), error)
        return table


def write(
    file: Path, tiles: tuple[UserTile, ...], facts: dict[str, Any], *,
    retired: tuple[UserTile, ...] = (),
) -> Path:  # fmt: skip
    """Put rows into a user's table, whole or not at all; rows for the same calls are replaced.

    facts: where and when they were measured, kept beside them. retired: calls that the shipped tile
    serves best; rows for them go. An unreadable old table is replaced.
    """
    try:
        kept = read(file)
    except (ValueError, OSError):
        kept = ()
    rows = {tile.calls: tile for tile in kept} | {tile.calls: tile for tile in tiles}
    for tile in retired:
        rows.pop(tile.calls, None)
    listed = [dataclasses.asdict(tile) for tile in rows.values()]
    data = {"schema": SCHEMA, "elsa_version": __version__, **facts, "tiles": listed}
    file.parent.mkdir(parents=True, exist_ok=True)
    return write_text(json.dumps(data, indent=1) + "\n", file)


def least_work(gpu: str) -> int | None:
    """The multiply-adds from which the user's table has linear layers gain on a GPU model; None
    where there is none. Never raises.
    """
    if os.environ.get("ELSA_TUNING", "1") == "0":
        return None
    file = path(gpu, ".linear")
    try:
        if not file.exists():
            return None
        least = document(file)["least_work"]
        if least is not None and (type(least) is not int or least < 0):
            raise ValueError(f"least_work {least!r} is not a count")
    except (ValueError, OSError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = error if isinstance(error, (ValueError, OSError)) else f"not a table: {error!r}"
        _LOG.warning("the user's table of products is left aside: %s: %s", file, reason)
        return None
    return least  # type: ignore[no-any-return]


def linear_document(least: int | None, rows: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    """A table of products as text; facts say where and when the rows were measured."""
    head = {"schema": SCHEMA, "elsa_version": __version__, "least_work": least}
    return json.dumps({**head, **facts, "products": rows}, indent=1) + "\n"
