"""The CPU kernels of `csrc/`: compiled on first need, cached, loaded as one operator library.

The library is written to PyTorch's stable ABI and holds no Python symbol, so one file serves every
torch from 2.10 on, with or without this package. Building it takes a C++20 compiler and seconds.

Environment variables:
    ELSA_NATIVE: "0" switches the backend off.
    ELSA_CPU_ISA: kernels to run ("baseline", "avx2", "avx512", "neon") instead of the best ones.
    ELSA_CACHE_DIR, CXX: see `elsa_core.backends.compiler`.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elsa_core.backends import compiler, native_backward
from elsa_core.backends.partition import STATE_BYTES, Partition, RoundTrip
from elsa_core.backends.support import Request, Support
from elsa_core.base.limits import LARGEST_HEAD_DIM
from elsa_core.errors import UnavailableError
from elsa_core.precision import dtype_name

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_SCHEMA_OWNER = "ELSA_SCHEMA_DEFINED_BY_PYTHON"
_LOG = logging.getLogger("elsa")
_LIBRARY: list[ctypes.CDLL] = []  # the one that `load` loaded
_LOADING = threading.Lock()


def support(request: Request) -> Support:
    """Whether the library can serve a call; builds and loads it at the first request it fits."""
    if request.dtype not in DTYPES:
        return Support(
            False, f"takes float32, float16 and bfloat16, not {dtype_name(request.dtype)}"
        )
    widest = max(request.head_dim, request.value_dim)
    if widest > LARGEST_HEAD_DIM:
        return Support(False, f"takes head_dim up to {LARGEST_HEAD_DIM}, not {widest}")
    if min(request.head_dim, request.value_dim) < 1:
        return Support(False, "takes head_dim from 1, not 0")
    return load()


def schedule(operator: str, *arguments: Any) -> str:
    """Name the kernels and how work is cut."""
    words = {
        "varlen_attention": "{} kernels, each sequence by itself, long ones first, their heads "
        "over {} threads",
        "entmax_attention": "{} kernels over {} threads; thresholds and values of listed keys "
        "alone",
    }.get(operator, "{} kernels, tiles of query rows over {} threads")
    return words.format(isa(), torch.get_num_threads())


def attention_state(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool,
    scale: float, precision: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out and lse of float32 operands, with lse in float64: no digit of the sum is lost in it."""
    operator = torch.ops.elsa.attention_state_native.default
    out, lse, low = operator(query, key, value, attn_mask, is_causal, scale)
    return out, lse.double() + low.double()


def partition(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool, *rest: Any
) -> Partition:
    """The kernels' own plan of a call that is not empty, for torch's current number of threads.

    Raises:
        UnavailableError: the library is not loaded, and why.
    """
    batch, heads, queries, head_dim = query.shape
    keys, value_dim, threads = key.shape[2], value.shape[3], torch.get_num_threads()
    sizes = (batch, heads, key.shape[1], queries, keys, head_dim, value_dim)
    answer = (ctypes.c_int64 * 5)()  # `elsa::Cut` in csrc/elsa/attention.h
    machine = f"{isa()}, {threads} threads"
    _LIBRARY[0].elsa_cpu_cut((ctypes.c_int64 * 7)(*sizes), is_causal, threads, answer)
    key_block, key_blocks, ranges, workers, block_rows = answer
    # The library folds a block at a time; with one block the state never leaves the row's pass.
    merges, rows = key_blocks - 1, -(-queries // ranges)
    state, trips = (value_dim + 2) * STATE_BYTES, batch * heads * queries * merges
    states = RoundTrip(
        "worker memory" if merges else "registers", "m, S, W in float32", trips, trips * state,
        trips * state, workers * rows * state if merges else 0,
    )  # fmt: skip
    tile, whole = min(rows, block_rows), key_block * key_blocks
    return Partition(
        "native", schedule("attention"), machine, queries, keys, tile,
        ranges * -(-rows // tile), key_block, key_blocks, 1, whole, whole,
        batch * heads * ranges, 0, states,
    )  # fmt: skip


@functools.cache
def load() -> Support:
    """Load the library, building it if this machine has not built it yet. Never raises.

    The answer is kept for the life of the process; a failure is logged once, in one line.
    """
    if os.environ.get("ELSA_NATIVE", "1") == "0":
        return Support(False, "switched off by ELSA_NATIVE=0")
    try:
        with _LOADING:  # what two threads define at once is refused, and the library off for both
            native_backward.define()
            library = _opened(build())
            isa(library)
            _LIBRARY.append(library)
    except Exception as error:  # whatever is wrong with this machine, plain PyTorch goes on
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        _LOG.warning("the native library is off, plain PyTorch takes over: %s", reason)
        return Support(False, reason)
    return Support(True)


def _opened(path: Path) -> ctypes.CDLL:
    os.environ[_SCHEMA_OWNER] = "1"  # to its static initialiser: `elsa_core.ops` has the schema
    try:
        torch.ops.load_library(str(path))
        return ctypes.CDLL(str(path))
    except OSError as error:  # torch says that it failed, the loader why
        if "failed to map segment" in f"{error} {error.__cause__}":
            raise UnavailableError(
                f"{path} cannot be loaded: no memory, or a file system without programs (noexec)"
            ) from None
        raise UnavailableError(
            f"{error.__cause__ or error}; `elsa build --force` builds the library again"
        ) from None
    finally:
        os.environ.pop(_SCHEMA_OWNER, None)


def isa(library: ctypes.CDLL | None = None) -> str:
    """The instruction set whose kernels run here: "avx512", "avx2", "baseline" or "neon".

    Raises:
        UnavailableError: the library is not loaded, and why.
    """
    if library is None:
        answer = load()
        if not answer.ok:
            raise UnavailableError(answer.reason)
        library = _LIBRARY[0]
    function = library.elsa_cpu_isa
    function.restype = ctypes.c_char_p
    name: bytes | None = function()
    if name is None:
        raise UnavailableError(
            f"ELSA_CPU_ISA={os.environ.get('ELSA_CPU_ISA')!r} is unknown, or this CPU lacks it; "
            "unset it for the best kernels"
        )
    return name.decode()


def build(*, force: bool = False, progress: Callable[[str], None] | None = None) -> Path:
    """Compile the library into the user's cache unless it is there already.

    Takes and raises what `elsa_core.backends.compiler.build` does.
    """
    return compiler.build(recipe(), force=force, progress=progress)


def status() -> dict[str, Any]:
    """What `elsa doctor` shows, without building anything: compiler, path, whether it is built."""
    return compiler.status(recipe())


def is_built() -> bool:
    """Whether asking for the library compiles nothing: it is there, or it cannot be built."""
    found = status()
    return bool(found["built"]) or "reason" in found


def recipe() -> compiler.Recipe:
    """How the library is built."""
    found = compiler.torch_recipe(
        "libelsa", "native library", "torch", ("attention", "window", "varlen", "entmax"),
        kernels=("attention", "window", "gradient", "entmax"),
    )  # fmt: skip
    return replace(found, units=(*found.units, ("varlen-driver", "../elsa/varlen.cpp", ())))
