"""A call of the portable kernel: its instance, its arguments, its launch."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from elsa_core.backends.portable import nvrtc, tiling
from elsa_core.backends.portable.driver import LARGEST_GRID, driver
from elsa_core.backends.portable.tiling import FLOAT_BYTES, Instance, Tile
from elsa_core.errors import UnavailableError

_LOG2_E = math.log2(math.e)
# A factor outside of this range goes into the query; the kernel's is positive and normal.
_LEAST_FACTOR, _LARGEST_FACTOR = 2.0**-126, 2.0**127
_LARGEST_INT = (1 << 31) - 1
# Handles of instances on devices, by `function_of`; None: it could not be had. None can be loaded
# while a graph is recorded.
FUNCTIONS: dict[tuple[Instance, int], int | None] = {}


class Arguments(ctypes.Structure):
    """`Arguments` of csrc/cuda/portable/attention.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "mask", "out", "lse")),
        *((f"{name}_strides", ctypes.c_longlong * 4) for name in ("query", "key", "value", "mask")),
        ("out_strides", ctypes.c_longlong * 3),
        *((name, ctypes.c_int) for name in (
            "batch_heads", "heads", "heads_of_key", "queries", "keys", "head_dim", "value_dim",
        )),
        ("factor", ctypes.c_float), ("to_log2", ctypes.c_float),
    )  # fmt: skip


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool,
    scale: float, tiles: Sequence[Tile] = tiling.TILES,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Out and lse; see `elsa_core.backends.portable.attention_forward`."""
    out, lse = empty(query, value)
    if not lse.numel():
        return out, lse
    if not key.shape[2]:
        return out.zero_(), lse.fill_(-math.inf)
    query, scale = _positive(query, scale)
    found = instance_of(query, key, value, attn_mask, is_causal, tiles)
    arguments = arguments_of(query, key, value, attn_mask, scale, out, lse)
    device = query.get_device()
    driver().launch(
        device, function_of(found, device), blocks_of(found, arguments), found.threads,
        found.shared_bytes, torch.cuda.current_stream(query.device).cuda_stream, arguments,
    )  # fmt: skip
    return out, lse


def prepare(head_dim: int, value_dim: int, device: int) -> None:
    """Look for what plain calls on a device need; nothing is compiled.

    Raises:
        UnavailableError: something is missing.
    """
    load = next(n for n in tiling.LOADS if head_dim % n == 0 and value_dim % n == 0)
    driver()
    tiling.instance(head_dim, value_dim, load, "none", False, _shared_limit(device))
    nvrtc.target(_arch(device))


def _arch(device: int) -> int:
    """90 for sm_90."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _shared_limit(device: int) -> int:
    """Bytes of shared memory that a block of threads may have."""
    facts: Any = torch.cuda.get_device_properties(device)
    return int(facts.shared_memory_per_block_optin)


def empty(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The results' memory: out [B, H, N, Dv] in that of [B, N, H, Dv], lse [B, H, N]."""
    batch, heads, length, _ = query.shape
    out = query.new_empty((batch, length, heads, value.shape[3])).transpose(1, 2)
    return out, query.new_empty((batch, heads, length))


def _positive(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """A query and a positive normal scale of the same scores."""
    if _LEAST_FACTOR <= scale * _LOG2_E < _LARGEST_FACTOR:
        return query, scale
    return query * scale, 1.0


def instance_of(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool,
    tiles: Sequence[Tile] = tiling.TILES,
) -> Instance:  # fmt: skip
    """The instance that serves a call on its device.

    Raises:
        UnavailableError: no tile fits into the device's shared memory.
    """
    mask = "none"
    if attn_mask is not None:
        mask = "bool" if attn_mask.dtype == torch.bool else "additive"
    load = load_of(query, key, value)
    limit = _shared_limit(query.get_device())
    return tiling.instance(query.shape[3], value.shape[3], load, mask, is_causal, limit, tiles)


def load_of(*tensors: Tensor) -> int:
    """The floats that every load may take: those of aligned rows with dense dims."""
    return next(n for n in tiling.LOADS if n == 1 or all(_is_aligned(t, n) for t in tensors))


def _is_aligned(tensor: Tensor, floats: int) -> bool:
    # the row's stride also of one token alone: a tile's other rows have addresses, but are not read
    strides = [
        s for i, s in enumerate(tensor.stride()[:3]) if i == 2 or tensor.shape[i] > 1
    ]  # fmt: skip
    counts = (tensor.shape[3], *strides, tensor.data_ptr() // FLOAT_BYTES)
    return tensor.stride(3) == 1 and all(n % floats == 0 for n in counts)


def arguments_of(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, scale: float, out: Tensor,
    lse: Tensor,
) -> Arguments:  # fmt: skip
    """The kernel's structure.

    Raises:
        UnavailableError: a size is beyond the kernel's 32-bit integers.
    """
    batch, heads, queries, head_dim = query.shape
    keys = key.shape[2]
    if max(queries, keys) > _LARGEST_INT - (1 << 16) or batch * heads > _LARGEST_INT:
        raise UnavailableError("the portable kernels take fewer than 2^31 queries, keys and heads")
    additive = attn_mask is not None and attn_mask.dtype != torch.bool
    found = Arguments(
        query=query.data_ptr(), key=key.data_ptr(), value=value.data_ptr(),
        mask=None if attn_mask is None else attn_mask.data_ptr(), out=out.data_ptr(),
        lse=lse.data_ptr(), batch_heads=batch * heads, heads=heads,
        heads_of_key=heads // key.shape[1], queries=queries, keys=keys, head_dim=head_dim,
        value_dim=value.shape[3], factor=scale if additive else 1.0,
        to_log2=_LOG2_E if additive else scale * _LOG2_E,
    )  # fmt: skip
    found.query_strides[:], found.key_strides[:] = query.stride(), key.stride()
    found.value_strides[:], found.out_strides[:] = value.stride(), out.stride()[:3]
    if attn_mask is not None:
        sizes = zip(attn_mask.shape, attn_mask.stride(), strict=True)
        found.mask_strides[:] = [0 if n == 1 else s for n, s in sizes]
    return found


def blocks_of(instance: Instance, arguments: Arguments) -> int:
    """Blocks of the grid.

    Raises:
        UnavailableError: more than a grid has.
    """
    blocks = int(-(-arguments.queries // instance.tile_rows) * arguments.batch_heads)
    if blocks > LARGEST_GRID:
        raise UnavailableError(f"the portable kernels have no grid of {blocks} blocks")
    return blocks


def function_of(instance: Instance, device: int) -> int:
    """The handle of an instance on a device.

    Raises:
        UnavailableError: it cannot be compiled or loaded.
    """
    function = FUNCTIONS.get((instance, device))
    if function is None:
        code = nvrtc.compiled(instance, _arch(device))
        function = driver().function(device, code, nvrtc.SYMBOL, instance.shared_bytes)
        FUNCTIONS[instance, device] = function
    return function
