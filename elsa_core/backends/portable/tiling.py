"""The instances of the kernel, and the tile that a device takes for given dims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from elsa_core.errors import UnavailableError

FLOAT_BYTES = 4
WARP = 32
MASKS = ("none", "bool", "additive")
LOADS = (4, 2, 1)
# What each block of threads takes of a multiprocessor's shared memory besides its own.
BLOCK_RESERVE = 1 << 10


class Tile(NamedTuple):
    """How threads share a tile; see csrc/cuda/portable/attention.cu.

    Attributes:
        widest: the largest of D and Dv that it is for.
        lanes: threads of a warp that share a row.
        rows, keys: of one thread.
        warps: of a block of threads.
        blocks: of a multiprocessor, at least; what registers are limited to.
    """

    widest: int
    lanes: int
    rows: int
    keys: int
    warps: int
    blocks: int


# By dims; of those that fit into a device's shared memory the first serves. A thread holds
# rows * Dv / lanes numbers of the output twice: 64 to 80 of each leave room for the operands.
# Chosen on paper, by the 16-byte reads of shared memory that an FMA costs: not measured yet.
TILES = (
    Tile(64, 8, 8, 8, 4, 2), Tile(64, 8, 8, 4, 4, 2), Tile(64, 8, 8, 4, 4, 1),
    Tile(64, 8, 4, 4, 4, 1),
    Tile(80, 8, 8, 4, 4, 2), Tile(80, 8, 8, 4, 4, 1),
    Tile(128, 16, 8, 4, 8, 1), Tile(128, 16, 8, 2, 8, 1), Tile(128, 16, 8, 2, 4, 1),
    Tile(128, 16, 4, 2, 4, 1),
    Tile(256, 16, 4, 4, 8, 1), Tile(256, 16, 4, 2, 8, 1), Tile(256, 16, 4, 2, 2, 1),
    Tile(256, 8, 2, 2, 2, 1),
)  # fmt: skip


class Instance(NamedTuple):
    """One compilation of the kernel: the values of its macros ELSA_*."""

    head: int
    value: int
    load: int
    width: int
    lanes: int
    rows: int
    keys: int
    warps: int
    blocks: int
    mask: int
    causal: int

    @property
    def threads(self) -> int:
        """Of a block."""
        return WARP * self.warps

    @property
    def tile_rows(self) -> int:
        """Queries of a block."""
        return self.threads // self.lanes * self.rows

    @property
    def shared_bytes(self) -> int:
        """Of a block: queries, keys, values and weights, in the kernel's strides."""
        stride = self.head if self.head % 8 == 4 else self.head + 4
        rows, keys = self.tile_rows, self.lanes * self.keys  # of a block
        floats = (rows + keys) * stride + keys * self.value + rows * (keys + self.lanes)
        return FLOAT_BYTES * floats

    @property
    def macros(self) -> dict[str, int]:
        """The parameters of the compilation."""
        return {f"ELSA_{name.upper()}": number for name, number in self._asdict().items()}


def instance(
    head_dim: int, value_dim: int, load: int, mask: str, is_causal: bool, limit: int,
    tiles: Sequence[Tile] = TILES,
) -> Instance:  # fmt: skip
    """The instance that serves calls of a kind.

    Args:
        head_dim, value_dim: D and Dv, 1 to 256.
        load: floats of one load, of `LOADS`; it divides both dims.
        mask: of `MASKS`.
        limit: bytes of shared memory that a block of the device may have.
        tiles: to choose from, in this order.

    Raises:
        UnavailableError: no tile fits into that memory.
    """
    widest = max(head_dim, value_dim)
    for tile in tiles:
        if tile.widest < widest:
            continue
        # Dv rounded up to what the lanes share, and the floats of a lane's read: the fewest
        # columns, then the widest read
        shares = [(tile.lanes * floats, floats) for floats in (4, 2)]
        choices = [(-(-value_dim // share) * share, floats) for share, floats in shares]
        value, width = min(choices, key=lambda choice: choice[0])
        found = Instance(
            -(-head_dim // 4) * 4, value, load, width, *tile[1:], MASKS.index(mask), int(is_causal)
        )
        if tile.blocks * (found.shared_bytes + BLOCK_RESERVE) <= limit + BLOCK_RESERVE:
            return found
    raise UnavailableError(
        f"the portable kernels need more than the {limit} bytes of shared memory of this GPU for "
        f"head_dim {head_dim} and {value_dim}"
    )
