"""What a schedule is: one way to serve a call with launches of kernels.

A schedule is a record of four functions. `serves` and `plan` see layouts alone, never data, so a
plan is made once for each layout; `run` allocates and launches; `words` is what `explain` says.
`schedules.SCHEDULES` holds them in order: the first that serves a call plans and runs it.

A sparse pattern needs a record and no kernel of its own: `forward.forward` folds a list of key
tiles for each program where it is planned with LISTED and launched with the list behind its other
pointers (`fold.key_tiles` and `fold.key_of`; `tests/backends/sparse_interpreted.py` has one).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from elsa_core.backends.triton.attention import tiling
from elsa_core.backends.triton.attention.tiling import Shape
from elsa_core.backends.triton.shared.launch import Launch


@dataclass(frozen=True)
class Problem:
    """A call as schedules see it.

    query, key, value: [B, Hq, Nq, D], [B, Hkv, Nk, D], [B, Hkv, Nk, Dv]; mask: 4-D, each dimension
    full or 1, or None. Of these only layouts and dtypes are read. mode: half, split, single or
    exact; precision: what was asked for. tiles: tiles and partitions of the fold; None for calls
    that are not folded in tiles (nothing to compute, one query).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    causal: bool
    scale: float
    precision: str
    mode: str
    shape: Shape
    tiles: tiling.Plan | None = None

    @property
    def tile(self) -> tiling.Tile:
        """The tile of a call that is folded in tiles."""
        assert self.tiles is not None
        return self.tiles.tile


@dataclass(frozen=True)
class Merge:
    """The merge of partial states, a part of every schedule that splits keys.

    launch: reads them and writes the results. shape: (partitions, states, value dimension).
    lse_dtype: of the call that it is a part of.
    """

    launch: Launch
    shape: tuple[int, int, int]
    lse_dtype: torch.dtype = torch.float32

    def states(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Memory for the partial outputs, float32, and their base 2 log-sum-exp."""
        partitions, states, _ = self.shape
        outputs = like.new_empty(self.shape, dtype=torch.float32)
        return outputs, like.new_empty((partitions, states), dtype=self.lse_dtype)


class Parts(NamedTuple):
    """What a schedule plans.

    launches: by name, in the order in which `run` makes them; `fold` is the one that folds keys.
    workspace: float16 elements that a launch ahead of the fold fills.
    """

    launches: dict[str, Launch] = {}  # noqa: RUF012 (never written to)
    merge: Merge | None = None
    workspace: int = 0


@dataclass(frozen=True)
class Call:
    """A planned call: its schedule, the shapes of its results, and what it launches.

    lse_dtype: float64 for calls whose results are merged with others (`planner.plan_state`).
    """

    schedule: Schedule
    out_shape: tuple[int, int, int, int]
    lse_shape: tuple[int, int, int]
    words: str
    launches: dict[str, Launch] = field(default_factory=dict)
    merge: Merge | None = None
    workspace: int = 0
    lse_dtype: torch.dtype = torch.float32

    @property
    def fold(self) -> Launch:
        """The launch that folds keys.

        Raises:
            KeyError: there is nothing to compute.
        """
        return self.launches["fold"]

    def every_launch(self) -> dict[str, Launch]:
        """All launches by name, in their order, with the merge."""
        if self.merge is None:
            return self.launches
        return {**self.launches, "merge": self.merge.launch}

    def results(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Memory for out, [B, H, N, Dv] in the memory of [B, N, H, Dv], and for lse."""
        _, h, n, d = self.out_shape
        out = query.new_empty_strided(self.out_shape, (n * h * d, d, h * d, 1))
        return out, query.new_empty(self.lse_shape, dtype=self.lse_dtype)


Run = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Schedule:
    """One way to serve a call.

    name: unique among schedules. serves: whether it takes a problem. plan: its launches. run: from
    (call, query, key, value, mask) to (out, lse); where there is no mask it is the query again,
    which kernels then do not read, and a boolean one comes as uint8. words: the schedule in the
    words of `explain`.
    """

    name: str
    serves: Callable[[Problem], bool]
    plan: Callable[[Problem], Parts]
    run: Run
    words: Callable[[Problem], str]


def known(kernel: Any, tail: dict[str, Any]) -> dict[str, Any]:
    """Of `tail`, what a kernel that takes less has arguments for."""
    return {name: tail[name] for name in kernel.arg_names if name in tail}
