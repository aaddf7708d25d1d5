"""How a call of attention is really cut: what `Implementation.partition` of a backend gives.

Every backend's schedule is one shape: leaves of `key_tile` keys, folded one after another within a
split, and the splits merged by a tree. What differs is where the states live in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from elsa_core.precision import ceil_log2, depth, theorem1_bound, unit_roundoff

STATE_BYTES: Final = 4  # of a number of a float32 state
_CONSTANT: Final = 3  # the constant of Eq. 6, counted in every schedule alike


@dataclass(frozen=True)
class RoundTrip:
    """What becomes of the states (m, S, W) between merges.

    Attributes:
        where: "registers", "worker memory" (a thread's own, cache-sized), or "memory".
        form: how a state is kept there.
        states: states that are written and read back, over all rows.
        written_bytes, read_bytes: their traffic; 0 where the fold stays on chip.
        resident_bytes: the most that exists at once, over all workers.
    """

    where: str
    form: str
    states: int
    written_bytes: int
    read_bytes: int
    resident_bytes: int


@dataclass(frozen=True)
class Partition:
    """The partition of one call.

    Attributes:
        backend, schedule: as `elsa_core.explain` says of calls that no measured table gives away.
        machine: what the plan was made for.
        queries, keys: tokens.
        query_tile, query_tiles: rows of a head that one program or pass works on, and how many such
            tiles a head has.
        key_tile, key_tiles: keys of a leaf (one maximum serves them), and leaves of a row.
        splits: partitions of the keys that are folded apart.
        split_keys: keys of a split, a multiple of `key_tile`; the last split may have fewer.
        chain_keys: keys of a split that one state folds before a fresh one begins, which is merged
            with those before it.
        programs: tiles that could all run at once.
        ahead_bytes: operands (not states) written ahead of the fold.
        states: the states' round trip.
    """

    backend: str
    schedule: str
    machine: str
    queries: int
    keys: int
    query_tile: int
    query_tiles: int
    key_tile: int
    key_tiles: int
    splits: int
    split_keys: int
    chain_keys: int
    programs: int
    ahead_bytes: int
    states: RoundTrip

    @property
    def tree(self) -> Mapping[str, Any]:
        """The merges on the longest path from a key to the output, and what theorems say of them.

        `leaf_levels`: of one leaf, ceil(log2 of its keys), as Eq. 6 counts a block. `chain_merges`:
        those, one after another, that fold the leaves of the longest split: of its first chain of
        leaves, and one for each chain that follows. `tree_levels`: of the tree over the splits.
        `depth`: their sum, with the constant of Eq. 6. `bound`: u x depth, Theorem 1's argument for
        this schedule's own merges, in float32. `scan_depth`: L(n, B) with B the keys of a leaf, of
        the paper's scan (Eq. 6). `scan_bound`: u L(n, B), Theorem 1.
        """
        longest = min(self.split_keys, self.keys)
        leaves = -(-min(self.chain_keys, longest) // self.key_tile)
        found: dict[str, Any] = {
            "leaf_levels": ceil_log2(min(self.key_tile, self.keys)),
            "chain_merges": leaves - 1 + -(-longest // self.chain_keys) - 1,
            "tree_levels": ceil_log2(self.splits),
        }
        found["depth"] = sum(found.values()) + _CONSTANT
        return found | {
            "bound": unit_roundoff(torch.float32) * found["depth"],
            "scan_depth": depth(self.keys, self.key_tile),
            "scan_bound": theorem1_bound(self.keys, self.key_tile),
        }

    def spans(self) -> tuple[tuple[int, int], ...]:
        """[first, last) key of every split."""
        step = self.split_keys
        return tuple((i * step, min(self.keys, (i + 1) * step)) for i in range(self.splits))

    def leaves(self) -> tuple[tuple[int, int], ...]:
        """[first, last) key of every leaf, in order."""
        return tuple(
            (i, min(last, i + self.key_tile))
            for first, last in self.spans()
            for i in range(first, last, self.key_tile)
        )
