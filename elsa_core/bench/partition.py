"""How a call is really cut: asked of the backend that would serve it, never derived again here.

Every backend's schedule is one shape: leaves of `key_tile` keys, folded one after another within a
split, and the splits merged by a tree. What differs is where the states live in between.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from torch import Tensor

from elsa_core.attention import explain
from elsa_core.backends import eager
from elsa_core.bench.cases import Case
from elsa_core.bench.peers import Inputs
from elsa_core.errors import UnavailableError
from elsa_core.limits import LARGEST_HEAD_DIM
from elsa_core.precision import ceil_log2, depth, theorem1_bound, unit_roundoff

_STATE_BYTES: Final = 4
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
        backend, schedule: as `elsa_core.explain` says.
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
    def leaf_levels(self) -> int:
        """Levels of one leaf, counted as Eq. 6 counts a block: ceil(log2 of its keys)."""
        return ceil_log2(min(self.key_tile, self.keys))

    @property
    def chain_merges(self) -> int:
        """Merges, one after another, that fold the leaves of the longest split.

        Those of its first chain of leaves, and one for each chain that follows.
        """
        longest = min(self.split_keys, self.keys)
        leaves = -(-min(self.chain_keys, longest) // self.key_tile)
        return leaves - 1 + -(-longest // self.chain_keys) - 1

    @property
    def tree_levels(self) -> int:
        """Levels of the tree over the splits."""
        return ceil_log2(self.splits)

    @property
    def depth(self) -> int:
        """Merges on the longest path from a key to the output, with the constant of Eq. 6."""
        return self.leaf_levels + self.chain_merges + self.tree_levels + _CONSTANT

    @property
    def bound(self) -> float:
        """u x `depth`: Theorem 1's argument for this schedule's own merges, in float32."""
        return unit_roundoff(torch.float32) * self.depth

    @property
    def scan_depth(self) -> int:
        """L(n, B) with B the keys of a leaf: the depth of the paper's scan (Eq. 6)."""
        return depth(self.keys, self.key_tile)

    @property
    def scan_bound(self) -> float:
        """u L(n, B) in float32: Theorem 1."""
        return theorem1_bound(self.keys, self.key_tile)

    def spans(self) -> tuple[tuple[int, int], ...]:
        """[first, last) key of every split."""
        step = self.split_keys
        return tuple((i * step, min(self.keys, (i + 1) * step)) for i in range(self.splits))

    def chains(self, first: int, last: int) -> tuple[tuple[int, int], ...]:
        """[first, last) key of every chain of a split."""
        step = self.chain_keys
        return tuple((i, min(last, i + step)) for i in range(first, last, step))

    def leaves(self) -> tuple[tuple[int, int], ...]:
        """[first, last) key of every leaf, in order."""
        return tuple(
            (i, min(last, i + self.key_tile))
            for first, last in self.spans()
            for i in range(first, last, self.key_tile)
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, the derived numbers included."""
        tree = {
            "leaf_levels": self.leaf_levels,
            "chain_merges": self.chain_merges,
            "tree_levels": self.tree_levels,
            "depth": self.depth,
            "bound": self.bound,
            "scan_depth": self.scan_depth,
            "scan_bound": self.scan_bound,
        }
        spans = [list(span) for span in self.spans()]
        return asdict(self) | {"states": asdict(self.states), "spans": spans, "tree": tree}


def partition_of(
    case: Case, tensors: Inputs, precision: str, *, backend: str = "auto", planned: bool = False
) -> Partition:
    """The partition with which `elsa_core.attention` would serve a case.

    Args:
        case: its shape, which must not be empty.
        tensors: its inputs. Layout and device matter, values do not; meta tensors will do.
        precision: of the call.
        backend: as in `elsa_core.attention`.
        planned: plan the call for a GPU although none is here (with a shipped tuning table).

    Raises:
        ArgumentError, UnavailableError: as `elsa_core.attention` would.
    """
    if planned:
        return _triton(case, tensors, precision)
    query, key, value, mask = tensors
    route = explain(query, key, value, mask, precision=precision, backend=backend)
    if route.backend == "triton":
        return _triton(case, tensors, precision)
    if route.backend == "native":
        return _native(case, tensors, route.schedule)
    return _eager(case, tensors, route.schedule)


def _native(case: Case, tensors: Inputs, schedule: str) -> Partition:
    from elsa_core.backends import native

    query, key, value, mask = tensors
    cut = native.cut(query, key, value, mask, False)
    heads = case.batch * case.heads
    # The library folds a block at a time; with one block the state never leaves the row's pass.
    merges = cut.key_blocks - 1
    state = (case.head_dim + 2) * _STATE_BYTES
    rows = -(-case.queries // cut.query_ranges)
    trips = heads * case.queries * merges
    states = RoundTrip(
        where="worker memory" if merges else "registers",
        form="m, S, W in float32",
        states=trips,
        written_bytes=trips * state,
        read_bytes=trips * state,
        resident_bytes=cut.workers * rows * state if merges else 0,
    )
    tile = min(rows, cut.block_rows)
    return Partition(
        "native", schedule, f"{native.isa()}, {torch.get_num_threads()} threads",
        case.queries, case.keys, tile, cut.query_ranges * -(-rows // tile), cut.key_block,
        cut.key_blocks, 1, cut.key_block * cut.key_blocks, cut.key_block * cut.key_blocks,
        heads * cut.query_ranges, 0, states,
    )  # fmt: skip


def _eager(case: Case, tensors: Inputs, schedule: str) -> Partition:
    rows, keys = eager._block_sizes(tensors.query, tensors.key)
    heads = case.batch * case.heads
    tiles = -(-case.keys // keys)
    element = 8 if case.dtype == "fp64" else _STATE_BYTES
    state = (case.head_dim + 2) * element
    trips = heads * case.queries * tiles
    states = RoundTrip(
        "memory", f"m, S, W in float{8 * element}", trips, trips * state, trips * state,
        heads * rows * state,
    )  # fmt: skip
    return Partition(
        "eager", schedule, str(tensors.query.device), case.queries, case.keys, rows,
        -(-case.queries // rows), keys, tiles, 1, keys * tiles, keys * tiles, 1, 0, states,
    )  # fmt: skip


def _triton(case: Case, tensors: Inputs, precision: str) -> Partition:
    from elsa_core.backends import triton
    from elsa_core.backends.triton.attention import planner
    from elsa_core.backends.triton.shared import device

    query, key, value, mask = tensors
    if query.dtype not in triton.DTYPES or case.head_dim > LARGEST_HEAD_DIM:
        raise UnavailableError(
            f"the GPU kernels take {case.dtype} with head_dim {case.head_dim} on no GPU: eager "
            "serves it there; trace it with --device cpu"
        )
    try:
        # without a GPU, as the one would whose table is shown
        there = None if query.is_cuda else device.gluon_known()
        call = planner.plan_call(
            query, key, value, mask, False, case.head_dim**-0.5, precision,
            specialized=there and planner.fits_specialized(query, key, value, mask),
        )  # fmt: skip
    except ImportError as error:
        raise UnavailableError(
            f"a GPU's schedule needs Triton ({error}); pip install triton"
        ) from None
    constants = call.fold.tail
    rows = constants.get("BM", 1)  # one query has no tile of queries
    key_tile = constants["BN"] if "BN" in constants else constants["KEYS"]  # or all are one tile
    states = () if call.merge is None else call.merge.shape
    whole = -(-case.keys // key_tile) * key_tile
    split_keys = min(constants.get("chunk", whole), whole)
    return Partition(
        backend="triton",
        schedule=call.words,
        machine=_gpu(query),
        queries=case.queries,
        keys=case.keys,
        query_tile=rows,
        query_tiles=-(-case.queries // rows),
        key_tile=key_tile,
        key_tiles=-(-case.keys // key_tile),
        splits=states[0] if states else 1,
        split_keys=split_keys,
        chain_keys=constants.get("CHAIN") or split_keys,
        programs=call.fold.grid[0] * call.fold.grid[1],
        ahead_bytes=call.workspace * torch.float16.itemsize,
        states=_partial_states(states, call.out_shape[-1]),
    )


def _partial_states(shape: tuple[int, ...], value_dim: int) -> RoundTrip:
    if not shape:
        return RoundTrip("registers", "m, S, W in float32", 0, 0, 0, 0)
    splits, rows = shape[:2]
    size = splits * rows * (value_dim + 1) * _STATE_BYTES
    # A state (m, S, W) and (m + ln S, 1, W / S) are the same element: this is how it travels.
    return RoundTrip("memory", "lse, W / S in float32", splits * rows, size, size, size)


def _gpu(query: Tensor) -> str:
    from elsa_core.backends.triton.shared import device

    table, multiprocessors = device.device_table(device.index_of(query.device))
    how = "" if table.measured else ", tiles not measured"
    here = "" if query.is_cuda else ", planned without it"
    return f"{table.gpu}, {multiprocessors} multiprocessors{how}{here}"
