"""From tensors to launches (`bound.Launch`): plans cached per layout, so that a warm call costs
little.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from elsa_core.backends.triton.attention import tiling
from elsa_core.backends.triton.attention.tiling import Shape, Table
from elsa_core.backends.triton.shared import usertable
from elsa_core.backends.triton.shared.launch import INTERPRETED, Launch

LOG2E = 1.4426950408889634
MODES = {"half": 0, "split": 1, "single": 2, "exact": 3}
# above this many keys a chain of tensor-core additions costs half precision its own accuracy
FRESH_KEYS = 65536
# float32 states take this many tiles of keys before a fresh one begins: the error of a longer chain
# would grow beyond Theorem 1's bound (at a million keys it did)
CHAIN_TILES = 1024
# room for every layout a process meets; a loop over lengths without end must not grow memory
CACHED_PLANS = 4096
# what a thread of a copying and of a second folding warpgroup may hold; the first gets the rest
COPY_REGISTERS = 40
FOLD_REGISTERS = 232
# what a thread of `one_launch.py` may hold of queries, keys and values while it splits them
HELD = 160
# the first and the last Triton that the Gluon kernels of this folder compile with
GLUON = ((3, 6), (3, 9))
# from here on Triton lets all warpgroups of a program meet behind a product: taking turns at one
# would never end
MEETING = (3, 9)


def mode_of(dtype: torch.dtype, precision: str) -> str:
    """How products are computed: half, split, single or exact (see `forward.py`)."""
    if dtype != torch.float32:
        return "half"
    return {"strict": "split", "lean": "split", "turbo": "single", "ieee": "exact"}[precision]


@lru_cache(maxsize=64)
def device_table(index: int) -> tuple[Table, int]:
    """The tuning table of a device, and its multiprocessors. Index -1: no device (interpreter)."""
    if index < 0:
        table = tiling.load_table("h200")
        return table, table.multiprocessors
    properties = torch.cuda.get_device_properties(index)
    name = "MI300" if torch.version.hip else properties.name
    table = tiling.load_table(tiling.table_name(name, (properties.major, properties.minor)))
    return usertable.joined(table, properties.name), properties.multi_processor_count


@lru_cache(maxsize=64)
def overlaps(device: torch.device) -> bool:
    """Whether a launch may start while the one before it runs (programmatic dependent launch, sm_90
    on).
    """
    if device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


@lru_cache(maxsize=64)
def specializes(device: torch.device) -> bool:
    """Whether the Gluon kernels of this folder run there: on sm_90, with a Triton they were tried
    with.
    """
    if device.type != "cuda" or torch.version.hip or INTERPRETED:
        return False
    return torch.cuda.get_device_capability(device) == (9, 0) and gluon_known()


def gluon_known() -> bool:
    """Gluon is young and changes: a Triton that is not known gets `forward.forward` alone."""
    return GLUON[0] <= _triton_version() <= GLUON[1]


def takes_turns() -> bool:
    """Whether warpgroups of `one_launch.py` may take turns at a product."""
    return _triton_version() < MEETING


def _triton_version() -> tuple[int, ...]:
    import triton

    return tuple(int(n) for n in triton.__version__.split(".")[:2])


@dataclass
class Call:
    """A planned call: the shapes to allocate and the launches to make."""

    out_shape: tuple[int, int, int, int]
    lse_shape: tuple[int, int, int]
    fold: Launch | None
    ahead: Launch | None = None
    merge: Launch | None = None
    repair: Launch | None = None
    workspace: int = 0
    partial_shape: tuple[int, ...] = ()
    decode: bool = False
    short: bool = False
    words: str = ""


def _unit(tensors: tuple[Tensor, ...]) -> tuple[int, bool]:
    """(UNIT, UNIT_D): 16 bytes in elements if all rows are 16-byte aligned, and whether rows are
    contiguous.
    """
    rows = all(t.stride(-1) == 1 or t.shape[-1] == 1 for t in tensors)
    unit = 16 // tensors[0].element_size()
    for t in tensors:
        if t.data_ptr() % 16 or any(s % unit for s in t.stride()[:3]):
            return 1, rows
    return (unit if rows else 1), rows


def _scale(scale: float, mode: str) -> dict[str, float | int | bool]:
    """|scale| * log2(e) as significand and exponent (half: whole), and the sign or zero apart."""
    size = abs(scale) * LOG2E if scale else 1.0
    exponent = 0
    if mode != "half":
        significand, exponent = math.frexp(size)
        size, exponent = significand * 2.0, exponent - 1
    flip = math.copysign(1.0, scale) if scale else 0.0
    return {"scale": size, "scale_exp": exponent, "flip": flip, "FLIP": flip != 1.0}


def _strides(name: str, t: Tensor, unit: int) -> dict[str, int]:
    b, h, n, d = t.stride()
    return {f"{name}_b": b // unit, f"{name}_h": h // unit, f"{name}_n": n // unit, f"{name}_d": d}


def _mask_strides(mask: Tensor | None) -> dict[str, int]:
    names = ("mask_b", "mask_h", "mask_q", "mask_k")
    if mask is None:
        return dict.fromkeys(names, 0)
    pairs = zip(names, mask.shape, mask.stride(), strict=True)
    return {name: 0 if size == 1 else stride for name, size, stride in pairs}


def _mask_kind(mask: Tensor | None) -> int:
    if mask is None:
        return 0
    return 1 if mask.dtype == torch.bool else 2


def _merge(shape: Shape, parts: int, overlap: bool) -> Launch:
    from elsa_core.backends.triton.attention.merge import merge_states

    states = shape.batch * shape.heads * shape.queries
    wide, deep = max(16, 1 << (shape.value_dim - 1).bit_length()), 1 << (parts - 1).bit_length()
    # 4096 numbers a program, but a program a row while rows are few
    rows = 1 if states < 1024 else max(1, 4096 // (wide * deep))
    tail: dict[str, Any] = {
        "parts": parts, "heads": shape.heads, "n_q": shape.queries, "states": states,
        "ROWS": rows, "PARTS": deep, "DV": shape.value_dim, "VP": wide, "OVERLAP": overlap,
    }  # fmt: skip
    options: dict[str, Any] = {"num_warps": 4 if rows * deep >= 16 else 1}
    if overlap:
        options["launch_pdl"] = True
    return Launch(merge_states, (-(-states // rows),), tail, options)


def _decode(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, shape: Shape
) -> Call:
    """One query: stream the keys, split over programs."""
    from elsa_core.backends.triton.attention.decode import decode

    table, multiprocessors = device_table(-1 if q.device.index is None else q.device.index)
    knobs = table.decode
    rows = shape.batch * shape.heads
    parts, chunk = tiling.decode_partitions(rows, shape.keys, multiprocessors, knobs)
    unit, unit_d = _unit((k, v))
    if any(s % unit for s in q.stride()[:2]):
        unit = 1
    factors = _scale(scale, "exact")
    factors.pop("FLIP")
    q_strides = _strides("q", q, unit)
    q_strides.pop("q_n")
    m_strides = _mask_strides(mask)
    m_strides.pop("mask_q")
    tail: dict[str, Any] = {
        "heads": shape.heads, "group": shape.heads // shape.key_heads, "n_k": shape.keys,
        "chunk": chunk, "shift": (shape.keys - 1).bit_length(),
        "scale_exp": factors["scale_exp"], "scale": factors["scale"], "flip": factors["flip"],
        **q_strides, **_strides("k", k, unit), **_strides("v", v, unit), **m_strides,
        "batch": shape.batch,
        "MASK": _mask_kind(mask), "PARTIAL": parts > 1, "UNIT": unit, "UNIT_D": unit_d,
        "OVERLAP": parts > 1 and overlaps(q.device), "BN": _decode_block(knobs, shape, k),
        "STAGES": knobs["stages"],
        "D": shape.head_dim, "DP": max(16, 1 << (shape.head_dim - 1).bit_length()),
        "DV": shape.value_dim, "VP": max(16, 1 << (shape.value_dim - 1).bit_length()),
    }  # fmt: skip
    call = Call(
        (shape.batch, shape.heads, 1, shape.value_dim),
        (shape.batch, shape.heads, 1),
        Launch(decode, (rows, parts), tail, {"num_warps": knobs["warps"]}),
        decode=True,
        words=f"one query: keys streamed by {rows} x {parts} programs, float32 FMA",
    )
    if parts > 1:
        call.merge = _merge(shape, parts, overlaps(q.device))
        call.partial_shape = (parts, rows, shape.value_dim)
    return call


def _decode_block(knobs: dict[str, int], shape: Shape, k: Tensor) -> int:
    """Keys a tile: about the same bytes for every dtype and head dimension."""
    width = max(shape.head_dim, shape.value_dim) * k.element_size()
    block = knobs["tile_bytes"] // (1 << (width - 1).bit_length())
    return max(16, min(block, knobs["block_n"]))


def plan_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    precision: str,
    *,
    specialized: bool | None = None,
) -> Call:
    """The launches of a call; everything here depends on layouts, never on data.

    specialized: whether a kernel of sm_90 may serve it; default: if they can, where the
    tensors are.
    """
    b, heads, n_q, d = q.shape
    if not (q.numel() and k.numel() and v.numel()):
        nothing = "nothing to compute: zeros"
        return Call((b, heads, n_q, v.shape[3]), (b, heads, n_q), None, words=nothing)
    shape = Shape(b, heads, k.shape[1], n_q, k.shape[2], d, v.shape[3])
    if causal and n_q == 1:
        # one query sees the first key alone
        shape, causal = shape._replace(keys=1), False
    if n_q == 1:
        return _decode(q, k, v, mask, scale, shape)
    mode = mode_of(q.dtype, precision)
    table, multiprocessors = device_table(-1 if q.device.index is None else q.device.index)
    p = tiling.plan(
        shape, mode, table, workspace=precision != "lean", multiprocessors=multiprocessors,
        specialized=may_specialize(q, k, v, mask) if specialized is None else specialized,
    )  # fmt: skip
    call = _fold_call(q, k, v, mask, causal, scale, shape, mode, p)
    if mode == "single" and p.tile.short:
        call.words += "; strict's products, faster here in their one launch"
    return call


def may_specialize(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether a kernel of sm_90 takes a call with such operands, on their device."""
    return specializes(q.device) and fits_specialized(q, k, v, mask)


def fits_specialized(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether `hopper.py` takes operands of such layouts: one block a head dimension, 16-byte
    aligned rows, one chain of the narrowest of its tiles, no mask. The others ask for no less;
    `tiling.Tile` knows their sizes.
    """
    one_block = all(tiling.blocks(t.shape[3])[1] == 0 for t in (q, v))
    short = k.shape[2] <= CHAIN_TILES * 64
    return mask is None and one_block and short and _unit((q, k, v))[0] > 1


def _fold_call(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float,
    shape: Shape, mode: str, p: tiling.Plan,
) -> Call:  # fmt: skip
    from elsa_core.backends.triton.attention.forward import forward

    t = p.tile
    if t.short:
        return _short(q, k, v, causal, scale, shape, p)
    d0, d1 = tiling.blocks(shape.head_dim, t.part)
    v0, v1 = tiling.blocks(shape.value_dim, t.part)
    if mode in ("split", "single") and not t.ahead:
        # split inside the loop, blocks of under 128 bytes a row were seen miscompiled (Triton 3.6,
        # sm_90)
        d0, d1 = max(64, d0 if not d1 else 2 * d0), 0
        v0, v1 = max(64, v0 if not v1 else 2 * v0), 0
    unit, unit_d = _unit((q, k, v))
    key_tiles = -(-shape.keys // t.block_n)
    strides = _mask_strides(mask)
    factors = _scale(scale, mode)
    overlap = overlaps(q.device)
    tail_stages = 1
    if mode == "half" or t.ahead:
        tail_stages = t.stages if t.one_loop else 2
    tail: dict[str, Any] = {
        "heads": shape.heads, "group": shape.heads // shape.key_heads, "n_q": shape.queries,
        "n_k": shape.keys, "chunk": p.chunk, "tiles": key_tiles,
        "shift": (shape.keys - 1).bit_length(), "scale_exp": factors["scale_exp"],
        "scale": factors["scale"], "flip": factors["flip"],
        **_strides("q", q, unit), **_strides("k", k, unit), **_strides("v", v, unit), **strides,
        "batch": shape.batch,
        "MODE": MODES[mode], "PRE": t.ahead, "ONE_LOOP": t.one_loop,
        "FRESH": mode != "half" or shape.keys > FRESH_KEYS,
        "MASK": _mask_kind(mask), "CAUSAL": causal, "PARTIAL": p.partitions > 1,
        "FLIP": factors["FLIP"], "OVERLAP": overlap, "BX": t.block_n if mode == "exact" else 16,
        "UNIT": unit, "UNIT_D": unit_d, "UNIT_K": strides["mask_k"] == 1,
        "BM": t.block_m, "BN": t.block_n, "STAGES": t.stages, "TAIL_STAGES": tail_stages,
        "CHAIN": chain_keys(mode, t, p.chunk),
        "SHIFT": 0.0 if q.dtype == torch.bfloat16 else 7.0,
        "D": shape.head_dim, "D0": d0, "D1": d1, "DV": shape.value_dim, "V0": v0, "V1": v1,
    }  # fmt: skip
    rows = shape.batch * shape.heads
    grid = (rows * -(-shape.queries // t.block_m), p.partitions)
    options: dict[str, Any] = {"num_warps": t.warps, "num_stages": t.stages}
    if t.registers:
        options["maxnreg"] = t.registers
    if overlap and t.ahead:
        options["launch_pdl"] = True
    call = Call(
        (shape.batch, shape.heads, shape.queries, shape.value_dim),
        (shape.batch, shape.heads, shape.queries),
        Launch(forward, grid, tail, options),
        words=p.words(),
    )
    if t.specialized:
        _specialize(call, tail, shape)
    if t.ahead:
        low = mode == "split"
        call.ahead = _ahead(k, v, shape, t, (d0 + d1, v0 + v1), (unit, unit_d), low, overlap)
        count = shape.batch * shape.key_heads * key_tiles
        halves = count * t.block_n * (d0 + d1 + v0 + v1) * (2 if low else 1)
        call.workspace = -(-count // 8) * 64 + halves
    if p.partitions > 1:
        call.merge = _merge(shape, p.partitions, overlap)
        call.partial_shape = (p.partitions, rows * shape.queries, shape.value_dim)
    return call


def _short(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, shape: Shape, p: tiling.Plan
) -> Call:
    """Few keys: one launch that holds them all."""
    from elsa_core.backends.triton.attention import one_launch, two_warpgroups

    t = p.tile
    d0, v0 = tiling.blocks(shape.head_dim)[0], tiling.blocks(shape.value_dim)[0]
    factors = _scale(scale, "split")
    unit, _ = _unit((q, k, v))
    tail: dict[str, Any] = {
        "heads": shape.heads, "group": shape.heads // shape.key_heads, "n_q": shape.queries,
        "n_k": shape.keys, "shift": (shape.keys - 1).bit_length(),
        "scale_exp": factors["scale_exp"], "scale": factors["scale"] * factors["flip"],
        **_strides("q", q, unit), **_strides("k", k, unit), **_strides("v", v, unit),
        "CAUSAL": causal, "UNIT": unit, "BM": t.block_m,
        "D": shape.head_dim, "D0": d0, "DV": shape.value_dim, "V0": v0,
    }  # fmt: skip
    if t.paired:
        kernel = two_warpgroups.forward
        tail["KEYS"] = next(n for n in tiling.PAIR_KEYS if shape.keys <= n)
    else:
        kernel = one_launch.forward
        # at least eight channels of a row for every lane
        keys = max(t.block_n, 1 << (shape.keys - 1).bit_length(), t.warps * 256 // min(d0, v0))
        tail |= {
            "BN": t.block_n, "KEYS": keys, "TURNS": t.warps > 4 and takes_turns(),
            "TOGETHER": keys * (d0 + v0) + t.block_m * d0 <= HELD * 32 * t.warps,
        }  # fmt: skip
    programs = shape.batch * shape.heads * -(-shape.queries // t.block_m)
    fold = Launch(kernel, (programs,), _known(kernel, tail), {"num_warps": t.warps})
    return Call(
        (shape.batch, shape.heads, shape.queries, shape.value_dim),
        (shape.batch, shape.heads, shape.queries), fold, short=True, words=p.words(),
    )  # fmt: skip


def _specialize(call: Call, tail: dict[str, Any], shape: Shape) -> None:
    """The warp-specialised kernel instead of `forward.forward`, and the repair of what it flags."""
    from elsa_core.backends.triton.attention import hopper

    assert call.fold is not None
    call.repair = _repair(tail, shape, call.fold.grid[1])
    own = {
        **tail, "scale": tail["scale"] * tail["flip"],
        "FOLD_REGISTERS": FOLD_REGISTERS, "COPY_REGISTERS": COPY_REGISTERS,
    }  # fmt: skip
    options = {name: value for name, value in call.fold.options.items() if name != "num_stages"}
    call.fold = Launch(hopper.forward, call.fold.grid, _known(hopper.forward, own), options)


def _repair(tail: dict[str, Any], shape: Shape, parts: int) -> Launch:
    from elsa_core.backends.triton.attention import fma_fallback

    blocks = parts * shape.batch * shape.heads * -(-shape.queries // fma_fallback.ROWS.value)
    wide = max(tail["D0"], tail["V0"]) > 64
    options: dict[str, Any] = {"num_warps": 8 if wide else 4}
    if tail["OVERLAP"]:
        options["launch_pdl"] = True
    grid = (min(blocks, fma_fallback.PROGRAMS),)
    return Launch(
        fma_fallback.repair, grid, _known(fma_fallback.repair, {**tail, "blocks": blocks}), options
    )


def _known(kernel: Any, tail: dict[str, Any]) -> dict[str, Any]:
    """What a kernel that takes less has arguments for."""
    return {name: tail[name] for name in kernel.arg_names if name in tail}


def chain_keys(mode: str, tile: tiling.Tile, chunk: int) -> int:
    """Keys that one state folds before a fresh one begins; 0: all of a partition's."""
    keys = CHAIN_TILES * tile.block_n
    return keys if mode in ("split", "single") and chunk > keys else 0


def _ahead(
    k: Tensor, v: Tensor, shape: Shape, t: tiling.Tile, widths: tuple[int, int],
    units: tuple[int, bool], low: bool, overlap: bool,
) -> Launch:  # fmt: skip
    """The launch that splits keys and values ahead."""
    from elsa_core.backends.triton.attention.split import split_ahead

    key_tiles = -(-shape.keys // t.block_n)
    tail: dict[str, Any] = {
        "heads": shape.key_heads, "n_k": shape.keys, "tiles": key_tiles, "batch": shape.batch,
        **_strides("k", k, units[0]), **_strides("v", v, units[0]),
        "UNIT": units[0], "UNIT_D": units[1], "HAS_LOW": low, "LIMIT": 2.0**-5 if low else 2.0**-14,
        "OVERLAP": overlap, "BN": t.block_n,
        "D": shape.head_dim, "DW": widths[0], "DP": 1 << (widths[0] - 1).bit_length(),
        "DV": shape.value_dim, "VW": widths[1], "VP": 1 << (widths[1] - 1).bit_length(),
    }  # fmt: skip
    grid = (shape.batch * shape.key_heads * key_tiles, 2)
    return Launch(split_ahead, grid, tail, {"num_warps": 4})


_CALLS: dict[Any, Call] = {}


def planned(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, precision: str
) -> Call:
    """The plan of a call, cached by layout."""
    extra = None
    aligned = (q.data_ptr() % 16, k.data_ptr() % 16, v.data_ptr() % 16)
    if mask is not None:
        extra = (mask.dtype, mask.shape, mask.stride(), mask.data_ptr() % 16)
    key = (
        q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.dtype, q.get_device(),
        aligned, extra, causal, scale, precision,
    )  # fmt: skip
    call = _CALLS.get(key)
    if call is None:
        if len(_CALLS) >= CACHED_PLANS:
            _CALLS.clear()
        call = _CALLS[key] = plan_call(q, k, v, mask, causal, scale, precision)
    return call


def execute(
    call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Allocate the results and launch."""
    _, h, n, d = call.out_shape
    # [B, H, N, Dv] in the memory of [B, N, H, Dv]
    out = q.new_empty_strided(call.out_shape, (n * h * d, d, h * d, 1))
    lse = q.new_empty(call.lse_shape, dtype=torch.float32)
    if call.fold is None:
        return out.zero_(), lse.fill_(-math.inf)
    m = q if mask is None else mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    o, logs = out, lse
    if call.merge is not None:
        parts, states, width = call.partial_shape
        o = q.new_empty((parts, states, width), dtype=torch.float32)
        logs = q.new_empty((parts, states), dtype=torch.float32)
    if call.decode:
        call.fold(q, k, v, m, o, logs)
    elif call.short:
        call.fold(q, k, v, out, lse)
    elif call.ahead is not None:
        w = q.new_empty(call.workspace, dtype=torch.float16)
        call.ahead(k, v, w)
        if call.repair is None:
            call.fold(q, k, v, m, w, o, logs)
        else:
            flags = q.new_empty(call.repair.tail["blocks"], dtype=torch.int32)
            call.fold(q, w, flags, o, logs)
            call.repair(q, k, v, flags, o, logs)
    else:
        call.fold(q, k, v, m, out, o, logs)
    if call.merge is not None:
        call.merge(o, logs, out, lse)
    return out, lse
