"""Portable GPU kernels: attention in float32 FMA, in CUDA C++ that NVRTC compiles at first need.

They use no matrix instruction, so that they serve every CUDA device that the installed PyTorch and
its NVRTC know, Turing (sm_75) too, which Triton does not serve. Float32 alone, forward; gradients
are those of every other backend's forward.

They serve calls that ask for `backend="portable"`, and under auto those of precision "ieee" on a
GPU that Triton does not serve, and where the shipped table says that they are the faster ones.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor

from elsa_core.backends.portable import attention
from elsa_core.backends.support import Request, Support
from elsa_core.base import calls
from elsa_core.base.limits import LARGEST_HEAD_DIM
from elsa_core.errors import UnavailableError
from elsa_core.precision import dtype_name

_LOG = logging.getLogger("elsa")


def support(request: Request) -> Support:
    """Whether the kernels serve calls of this kind; `reason` says why not. Never raises."""
    if request.dtype != torch.float32:
        return Support(False, f"takes float32, not {dtype_name(request.dtype)}")
    widest = max(request.head_dim, request.value_dim)
    if widest > LARGEST_HEAD_DIM:
        return Support(False, f"takes head_dim up to {LARGEST_HEAD_DIM}, not {widest}")
    if min(request.head_dim, request.value_dim) < 1:
        return Support(False, "takes head_dim from 1, not 0")
    if request.device_type != "cuda":
        return Support(False, f"serves cuda tensors, these are on {request.device_type}")
    device = request.ordinal
    if device < 0 and torch.cuda.is_available():
        device = torch.cuda.current_device()
    return _ready(request.head_dim, request.value_dim, device)


@functools.lru_cache(maxsize=256)
def _ready(head_dim: int, value_dim: int, device: int) -> Support:
    if torch.version.hip is not None:
        return Support(False, "serves NVIDIA GPUs, this PyTorch is built for AMD's")
    if not torch.cuda.is_available():
        return Support(False, "no CUDA device: PyTorch finds no GPU")
    try:
        attention.prepare(head_dim, value_dim, device)
    except Exception as error:  # whatever is wrong with this machine, another backend goes on
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        _LOG.warning("the portable kernels are off: %s", reason)
        return Support(False, reason)
    return Support(True)


def schedule(*arguments: Any) -> str:
    """The tile that would serve the call, in words."""
    found = attention.instance_of(*arguments[:5])
    return (
        f"float32 FMA, no tensor core: tiles of {found.tile_rows} queries and "
        f"{found.lanes * found.keys} keys, {found.threads} threads, "
        f"{found.shared_bytes >> 10} KiB of shared memory"
    )


def measured_attention(*arguments: Any) -> Tensor | None:
    """The output of `elsa::attention_portable` where no mask or order hides keys; None of other
    calls, which were not measured, and where the kernel cannot be had.
    """
    query, key, value, attn_mask, is_causal = arguments[:5]
    if attn_mask is not None or is_causal:
        return None
    if torch.compiler.is_compiling():
        if not _loads_plain(calls.place(query), query.shape[-1]):
            return None
    elif not _loads(query, key, value):
        return None
    out: Tensor = torch.ops.elsa.attention_portable.default(*arguments)[0]
    return out


def _loads(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the kernel of a plain call is there, compiled and loaded now if it was not. Not while
    a CUDA graph is recorded.
    """
    key_of = (attention.instance_of(query, key, value, None, False), query.get_device())
    if key_of not in attention.FUNCTIONS:
        if torch.cuda.is_current_stream_capturing():
            return False
        try:
            attention.function_of(*key_of)
        except UnavailableError as error:
            attention.FUNCTIONS[key_of] = None
            _LOG.warning("the portable kernels leave such calls to others: %s", error)
    return attention.FUNCTIONS[key_of] is not None


@functools.lru_cache(maxsize=256)
def _loads_plain(place: str, head_dim: int) -> bool:
    """`_loads` of rows without gaps: a constant for compilers, who have no tensors to ask by."""
    row = torch.empty(1, 1, 1, head_dim, device=place)
    return _loads(row, row, row)


_loads_plain._dynamo_marked_constant = True  # type: ignore[attr-defined]
