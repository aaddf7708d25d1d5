"""A call of the portable kernel: its instance, its arguments, its launch by the CUDA driver."""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from elsa_core.backends.portable import nvrtc, tiling
from elsa_core.backends.portable.tiling import FLOAT_BYTES, Instance, Tile
from elsa_core.errors import UnavailableError

_LOG2_E = math.log2(math.e)
# A factor outside of this range goes into the query; the kernel's is positive and normal.
_LEAST_FACTOR, _LARGEST_FACTOR = 2.0**-126, 2.0**127
_LARGEST_INT = (1 << 31) - 1
# Of cuda.h.
_MAX_DYNAMIC_SHARED = 8
_PREFER_SHARED = 1
# Above it a kernel must ask for its shared memory.
PLAIN_SHARED = 48 << 10
LARGEST_GRID = (1 << 31) - 1
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
    scale: float, precision: str = "strict", tiles: Sequence[Tile] = tiling.TILES,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Exact attention in float32 FMA on a CUDA device, the kernel of `elsa::attention_portable`.

    Args:
        query, key, value: [B, Hq, Nq, D], [B, Hkv, Nk, D], [B, Hkv, Nk, Dv], float32, any strides;
            Hq is a multiple of Hkv; D and Dv up to 256.
        attn_mask: 4-D, each dimension full or 1; boolean (True takes part) or float32. is_causal:
            top-left.
        scale: the factor of the scores. precision: any; every one is computed in float32 FMA.
        tiles: to choose from, in this order.

    Returns:
        out [B, Hq, Nq, Dv] in the memory of [B, Nq, Hq, Dv]; lse [B, Hq, Nq], natural logarithm.
        Rows that see no key: zeros and -inf.

    Raises:
        UnavailableError: the kernel cannot be compiled, loaded or launched, or the call is too
            large for a grid.

    Source: ELSA, Eq. 4 (the merge of partial states).
    """
    query, scale, out, lse = ready(query, value, scale)
    if not lse.numel():
        return out, lse
    if not key.shape[2]:
        return out.zero_(), lse.fill_(-math.inf)
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
    arch, limit = _facts(device)
    tiling.instance(head_dim, value_dim, load, "none", False, limit)
    nvrtc.target(arch)


def _facts(device: int) -> tuple[int, int]:
    """90 for sm_90, and the bytes of shared memory that a block of threads may have."""
    facts: Any = torch.cuda.get_device_properties(device)
    return 10 * facts.major + facts.minor, facts.shared_memory_per_block_optin


def ready(query: Tensor, value: Tensor, scale: float) -> tuple[Tensor, float, Tensor, Tensor]:
    """A query and a positive normal scale of the same scores, and the results' memory: out
    [B, H, N, Dv] in that of [B, N, H, Dv], lse [B, H, N]."""
    batch, heads, length, _ = query.shape
    out = query.new_empty((batch, length, heads, value.shape[3])).transpose(1, 2)
    lse = query.new_empty((batch, heads, length))
    if not _LEAST_FACTOR <= scale * _LOG2_E < _LARGEST_FACTOR:
        query, scale = query * scale, 1.0
    return query, scale, out, lse


def instance_of(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool,
    tiles: Sequence[Tile] = tiling.TILES, limit: int | None = None,
) -> Instance:  # fmt: skip
    """The instance that serves a call on its device, or on one whose blocks may have `limit` bytes
    of shared memory.

    Raises:
        UnavailableError: no tile fits into the device's shared memory.
    """
    mask = "none"
    if attn_mask is not None:
        mask = "bool" if attn_mask.dtype == torch.bool else "additive"
    if limit is None:
        limit = _facts(query.get_device())[1]
    operands, load = (query, key, value), 1
    if all(t.stride(3) == 1 for t in operands):
        counts = [n for t in operands for n in (t.shape[3], t.data_ptr() // FLOAT_BYTES)]
        # the row's stride also of one token alone: a tile's other rows have addresses, but are not
        # read
        counts += [
            t.stride(i) for t in operands for i in range(3) if i == 2 or t.shape[i] > 1
        ]  # fmt: skip
        load = next(floats for floats in tiling.LOADS if all(n % floats == 0 for n in counts))
    return tiling.instance(query.shape[3], value.shape[3], load, mask, is_causal, limit, tiles)


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
        code = nvrtc.compiled(instance, _facts(device)[0])
        function = driver().function(device, code, nvrtc.SYMBOL, instance.shared_bytes)
        FUNCTIONS[instance, device] = function
    return function


class Driver:
    """One driver library. Methods raise UnavailableError with the function and the error's name."""

    def __init__(self, library: ctypes.CDLL):
        self._calls = library
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._lock = threading.Lock()
        self._ask("cuInit", 0)

    def function(self, device: int, code: bytes, symbol: bytes, shared_bytes: int) -> int:
        """The handle of a kernel on a device; the code stays loaded."""
        with self._current(device):
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            self._ask("cuModuleLoadData", ctypes.byref(module), code)
            try:
                self._ask("cuModuleGetFunction", ctypes.byref(function), module, symbol)
                if shared_bytes > PLAIN_SHARED:
                    self._ask("cuFuncSetCacheConfig", function, _PREFER_SHARED)
                    self._ask("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, shared_bytes)
            except UnavailableError:
                self._calls.cuModuleUnload(module)
                raise
        return int(function.value or 0)

    def launch(
        self, device: int, function: int, grid: int, threads: int, shared_bytes: int, stream: int,
        arguments: ctypes.Structure,
    ) -> None:  # fmt: skip
        """Launch a kernel that takes one structure by value."""
        params = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        with self._current(device):
            self._ask(
                "cuLaunchKernel", ctypes.c_void_p(function), grid, 1, 1, threads, 1, 1,
                shared_bytes, ctypes.c_void_p(stream), params, None,
            )  # fmt: skip

    @contextmanager
    def _current(self, device: int) -> Iterator[None]:
        """Make the primary context of a device, which is PyTorch's, the current one."""
        with self._lock:
            context = self._contexts.get(device)
            if context is None:
                handle, context = ctypes.c_int(), ctypes.c_void_p()
                self._ask("cuDeviceGet", ctypes.byref(handle), device)
                self._ask("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
                self._contexts[device] = context
        self._ask("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self._ask("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _ask(self, function: str, *arguments: object) -> None:
        try:
            result = getattr(self._calls, function)(*arguments)
        except AttributeError:
            raise UnavailableError(f"the CUDA driver has no {function}: it is too old") from None
        if result:
            name = ctypes.c_char_p()
            self._calls.cuGetErrorName(result, ctypes.byref(name))
            raise UnavailableError(f"{function} failed: {(name.value or b'unknown').decode()}")


@functools.cache
def driver() -> Driver:
    """The driver of this machine.

    Raises:
        UnavailableError: there is none, or it does not start.
    """
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except OSError as error:
        raise UnavailableError(f"no CUDA driver: {error}") from None
