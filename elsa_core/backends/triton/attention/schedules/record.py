"""What a schedule is: one way to serve a call with launches of kernels.

A schedule is a record of functions. `serves` and `plan` see layouts alone, never data, so a plan is
made once for each layout; `run` makes the launches; `words` is what `explain` says.
`schedules.SCHEDULES` holds them in order: the first that serves a call plans and runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

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
class Call:
    """A planned call: its schedule, the shape of its results, and what it launches.

    launches: by name, in their order; `fold` folds keys, `merge` merges the states of split keys,
    which are (partitions, rows, value dimension). workspace: float16 elements that a launch ahead
    of the fold fills. lse_dtype: float64 for calls whose results are merged with others
    (`planner.plan_state`).
    """

    schedule: Schedule
    out_shape: tuple[int, int, int, int]
    words: str
    launches: dict[str, Launch] = field(default_factory=dict)
    workspace: int = 0
    states: tuple[int, int, int] | None = None
    lse_dtype: torch.dtype = torch.float32

    @property
    def fold(self) -> Launch:
        """The launch that folds keys.

        Raises:
            KeyError: there is nothing to compute.
        """
        return self.launches["fold"]


@dataclass(frozen=True)
class Schedule:
    """One way to serve a call.

    name: unique among schedules. serves: whether it takes a problem. plan: its launches, and the
    float16 elements of its workspace. run: launch for (call, query, key, value, mask, out, lse);
    without a mask it is the query again, which kernels then do not read, and a boolean one comes as
    uint8; where keys are split, out and lse are of their states. words: the schedule in the words
    of `explain`.
    """

    name: str
    serves: Callable[[Problem], bool]
    plan: Callable[[Problem], tuple[dict[str, Launch], int]]
    run: Callable[..., None]
    words: Callable[[Problem], str]
