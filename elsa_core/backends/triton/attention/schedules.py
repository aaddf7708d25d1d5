"""The schedules of the attention forward: each is one way to serve a call with launches of kernels.

The first of `SCHEDULES` that serves a call plans it. Those of sm_90 come first because their tiles
say so themselves (`tiling.Tile.specialized`), and a tile is chosen for a call before its schedule
is (`tiling.plan`). `FORWARD` takes every call that is folded in tiles, so the order ends with it.
`serves` and `plan` see layouts alone, never data, so a plan is made once for each layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from elsa_core.backends.triton.attention import tiling
from elsa_core.backends.triton.attention.tiling import Shape
from elsa_core.backends.triton.shared import device, layout
from elsa_core.backends.triton.shared.launch import Launch

# registers of a thread that queries, keys and values may take while `one_launch.py` splits them
SPLIT_REGISTERS = 160
# above this many keys a chain of tensor-core additions costs half precision its own accuracy
FRESH_KEYS = 65536
# float32 states take this many tiles of keys before a fresh one begins: the error of a longer chain
# would grow beyond Theorem 1's bound (at a million keys it did)
CHAIN_TILES = 1024
# what a thread of a copying and of a second folding warpgroup may hold; the first gets the rest
COPY_REGISTERS, FOLD_REGISTERS = 40, 232


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
    of the fold fills. lse_dtype: float64 for calls whose results are merged with others.
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

    name: unique among schedules. serves: whether it takes a problem. plan: its launches, the
    float16 elements of its workspace, and the schedule in the words of `explain`. takes: the
    pointers of `fold`, as `planner.execute` names them.
    """

    name: str
    serves: Callable[[Problem], bool]
    plan: Callable[[Problem], tuple[dict[str, Launch], int, str]]
    takes: tuple[str, ...]


def _shared(problem: Problem, unit: int) -> dict[str, Any]:
    shape, operands = problem.shape, (problem.query, problem.key, problem.value)
    tail: dict[str, Any] = {
        "heads": shape.heads, "group": shape.heads // shape.key_heads, "n_q": shape.queries,
        "n_k": shape.keys, "batch": shape.batch, "shift": max(0, shape.keys - 1).bit_length(),
        "UNIT": unit, "D": shape.head_dim, "DV": shape.value_dim,
    }  # fmt: skip
    for name, t in zip("qkv", operands, strict=True):
        tail |= layout.strides(name, t, unit)
    return tail


def decode_tail(problem: Problem, unit: int, unit_d: bool) -> dict[str, Any]:
    """The arguments of kernels that stream the keys of single queries."""
    k, shape = problem.key, problem.shape
    knobs = device.device_table(problem.query.get_device())[0].decode
    # about the same bytes for every dtype and head dimension
    width = max(shape.head_dim, shape.value_dim) * k.element_size()
    keys = knobs["tile_bytes"] // (1 << (width - 1).bit_length())
    return _shared(problem, unit) | layout.score_scale(problem.scale, "exact") | {
        "UNIT_D": unit_d, "BN": max(16, min(keys, knobs["block_n"])), "STAGES": knobs["stages"],
        "DP": layout.padded(shape.head_dim), "VP": layout.padded(shape.value_dim),
    }  # fmt: skip


def _plan_decode(problem: Problem) -> tuple[dict[str, Launch], int, str]:
    from elsa_core.backends.triton.attention.decode import decode

    q, shape = problem.query, problem.shape
    table, multiprocessors = device.device_table(q.get_device())
    rows, knobs = shape.batch * shape.heads, table.decode
    parts, chunk = tiling.decode_partitions(rows, shape.keys, multiprocessors, knobs)
    unit, unit_d = layout.row_unit((problem.key, problem.value))
    if any(s % unit for s in q.stride()[:2]):
        unit = 1
    tail = decode_tail(problem, unit, unit_d) | layout.mask_terms(problem.mask) | {
        "chunk": chunk, "PARTIAL": parts > 1, "OVERLAP": parts > 1 and device.overlaps(q.device),
    }  # fmt: skip
    words = f"one query: keys streamed by {rows} x {parts} programs, float32 FMA"
    return {"fold": Launch(decode, (rows, parts), tail, {"num_warps": knobs["warps"]})}, 0, words


def _plan_on_chip(problem: Problem) -> tuple[dict[str, Launch], int, str]:
    from elsa_core.backends.triton.attention import one_launch

    q, k, v, shape, t = problem.query, problem.key, problem.value, problem.shape, problem.tile
    factors = layout.score_scale(problem.scale, "split")
    unit, _ = layout.row_unit((q, k, v))
    d0, v0 = tiling.blocks(shape.head_dim)[0], tiling.blocks(shape.value_dim)[0]
    # at least eight channels of a row for every lane
    keys = max(t.block_n, 1 << (shape.keys - 1).bit_length(), t.warps * 256 // min(d0, v0))
    tail = _shared(problem, unit) | {
        "scale_exp": factors["scale_exp"], "scale": factors["scale"] * factors["flip"],
        "CAUSAL": problem.causal, "BM": t.block_m, "BN": t.block_n, "KEYS": keys,
        "TURNS": t.warps > 4 and device.triton_version() < device.BARRIER_BEHIND_PRODUCTS,
        "TOGETHER": keys * (d0 + v0) + t.block_m * d0 <= SPLIT_REGISTERS * 32 * t.warps,
        "D0": d0, "V0": v0,
    }  # fmt: skip
    programs = shape.batch * shape.heads * -(-shape.queries // t.block_m)
    words = f"one program per {t.block_m} queries, with all keys on chip"
    if problem.mode == "single":
        words += "; strict's products, faster here in their one launch"
    return {"fold": Launch(one_launch.forward, (programs,), tail, {"num_warps": t.warps})}, 0, words


def fold_tail(problem: Problem) -> dict[str, Any]:
    """The arguments of `forward.forward` but its pointers; `hopper.forward` takes some of them."""
    q, k, v, mask = problem.query, problem.key, problem.value, problem.mask
    p, t, mode, shape = problem.tiles, problem.tile, problem.mode, problem.shape
    assert p is not None
    unit, unit_d = layout.row_unit((q, k, v))
    d0, d1 = tiling.blocks(shape.head_dim, t.part)
    v0, v1 = tiling.blocks(shape.value_dim, t.part)
    loaded = mode == "half" and unit == 1  # rows that are not aligned are not copied ahead
    if loaded or (mode in ("split", "single") and not t.ahead):
        # Tiles that the loop itself writes to shared memory, of under 128 bytes a row, were seen
        # miscompiled (Triton 3.6, sm_90): wrong results and reads out of bounds in half precision
        # where the value's rows were shorter there than the key's.
        d0, d1 = max(64, d0 if not d1 else 2 * d0), 0
        v0, v1 = max(64, v0 if not v1 else 2 * v0), 0
    of_mask = layout.mask_terms(mask)
    kind = of_mask["MASK"]
    chain = CHAIN_TILES * t.block_n
    tail_stages = 1
    if mode == "half" or t.ahead:
        tail_stages = t.stages if t.one_loop else 2
    return _shared(problem, unit) | layout.score_scale(problem.scale, mode) | of_mask | {
        "chunk": p.chunk, "tiles": -(-shape.keys // t.block_n),
        "MODE": device.MODES[mode], "PRE": t.ahead, "ONE_LOOP": t.one_loop,
        "FRESH": mode != "half" or shape.keys > FRESH_KEYS,
        "MASK": kind + 2 if kind and of_mask["mask_q"] == 0 else kind,
        "CAUSAL": problem.causal, "PARTIAL": p.partitions > 1,
        "OVERLAP": device.overlaps(q.device),
        "BX": t.block_n if mode == "exact" else 16,
        "UNIT_D": unit_d, "UNIT_K": of_mask["mask_k"] == 1,
        "BM": t.block_m, "BN": t.block_n, "STAGES": t.stages, "TAIL_STAGES": tail_stages,
        "CHAIN": chain if mode in ("split", "single") and p.chunk > chain else 0,
        "SHIFT": 0.0 if q.dtype == torch.bfloat16 else 7.0,
        "D0": d0, "D1": d1, "V0": v0, "V1": v1,
    }  # fmt: skip


def fold_options(problem: Problem, tail: dict[str, Any]) -> dict[str, Any]:
    """The compiler's options for the fold."""
    t = problem.tile
    options: dict[str, Any] = {"num_warps": t.warps, "num_stages": t.stages}
    # The tables were measured without masks. With one of a row for each query, half precision needs
    # twice the registers: within these limits it spilled 1 KB a thread; 196 tokens of 32 channels
    # took 58 us on an H200. With one row for all it needs some more: of 128 channels too many.
    wide = tail["MASK"] in (1, 2) or (tail["MASK"] and tail["D0"] > 64)
    if t.registers and not (problem.mode == "half" and wide):
        options["maxnreg"] = t.registers
    if tail["OVERLAP"] and t.ahead:
        options["launch_pdl"] = True
    return options


def ahead_launch(problem: Problem, tail: dict[str, Any]) -> tuple[Launch, int]:
    """The launch that splits keys and values ahead of the fold, and the float16 elements that it
    writes: exponents and guards, then the halves.
    """
    from elsa_core.backends.triton.attention.split import split_ahead

    shape, low = problem.shape, problem.mode == "split"
    width, value_width = tail["D0"] + tail["D1"], tail["V0"] + tail["V1"]
    own = tail | {
        "heads": shape.key_heads, "HAS_LOW": low, "LIMIT": 2.0**-5 if low else 2.0**-14,
        "DW": width, "DP": layout.padded(width, 1), "VW": value_width,
        "VP": layout.padded(value_width, 1),
    }  # fmt: skip
    count = shape.batch * shape.key_heads * tail["tiles"]
    halves = count * problem.tile.block_n * (width + value_width) * (2 if low else 1)
    return Launch(split_ahead, (count, 2), own, {"num_warps": 4}), -(-count // 8) * 64 + halves


def _plan(problem: Problem) -> tuple[dict[str, Launch], int, str]:
    kernel: Any
    tail, launches, workspace, p = fold_tail(problem), {}, 0, problem.tiles
    assert p is not None
    options, own, rows = fold_options(problem, tail), tail, problem.shape.queries
    words = f"{p.tile.block_m} queries x {p.tile.block_n} keys"
    if p.tile.ahead:
        launches["ahead"], workspace = ahead_launch(problem, tail)
        words += ", keys and values split ahead"
    if p.tile.specialized:
        from elsa_core.backends.triton.attention.hopper import forward as kernel

        words += ", copied by warps of their own"
        del options["num_stages"]
        own = tail | {
            "scale": tail["scale"] * tail["flip"],
            "FOLD_REGISTERS": FOLD_REGISTERS, "COPY_REGISTERS": COPY_REGISTERS,
        }  # fmt: skip
    else:
        from elsa_core.backends.triton.attention.forward import forward as kernel
    programs = problem.shape.batch * problem.shape.heads * -(-rows // p.tile.block_m)
    launches["fold"] = Launch(kernel, (programs, p.partitions), own, options)
    if p.tile.specialized:
        launches["fma_fallback"] = fallback_launch(problem, tail)
    if p.partitions == 1:
        return launches, workspace, f"full fold: one program per {words}"
    parts = f"split keys: {p.partitions} partitions of {p.chunk}, merged by a tree"
    return launches, workspace, f"{parts}; {words}"


def fallback_launch(problem: Problem, tail: dict[str, Any]) -> Launch:
    """The launch that folds blocks of queries which `hopper.forward` flags with float32 FMA."""
    from elsa_core.backends.triton.attention import fma_fallback

    shape, p = problem.shape, problem.tiles
    assert p is not None
    blocks = shape.batch * shape.heads * -(-shape.queries // fma_fallback.ROWS.value)
    blocks *= p.partitions
    options: dict[str, Any] = {"num_warps": 8 if max(tail["D0"], tail["V0"]) > 64 else 4}
    if tail["OVERLAP"]:
        options["launch_pdl"] = True
    grid = (min(blocks, fma_fallback.PROGRAMS),)
    return Launch(fma_fallback.fma_fallback, grid, {**tail, "blocks": blocks}, options)


_FOLDED = ("q", "k", "v", "mask", "halves", "out", "lse")
EMPTY = Schedule(
    "empty", lambda p: not (p.query.numel() and p.key.numel() and p.value.numel()),
    lambda _: ({}, 0, "nothing to compute: zeros"), (),
)  # fmt: skip
DECODE = Schedule(
    "decode", lambda p: p.shape.queries == 1, _plan_decode, ("q", "k", "v", "mask", "out", "lse")
)
ONE_LAUNCH = Schedule(
    "one_launch", lambda p: p.tile.one_launch, _plan_on_chip, ("q", "k", "v", "out", "lse")
)
HOPPER = Schedule(
    "hopper", lambda p: p.tile.specialized and p.tile.ahead, _plan,
    ("q", "halves", "flags", "out", "lse"),
)  # fmt: skip
SPLIT_AHEAD = Schedule("split_ahead", lambda p: p.tile.ahead, _plan, _FOLDED)
FORWARD = Schedule("forward", lambda p: p.tiles is not None, _plan, _FOLDED)
SCHEDULES = (EMPTY, DECODE, ONE_LAUNCH, HOPPER, SPLIT_AHEAD, FORWARD)
