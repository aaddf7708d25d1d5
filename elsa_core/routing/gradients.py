"""Gradients of this package's forwards: the operators' kernels, and eager calls in fewer steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from elsa_core import operators
from elsa_core.backends import eager
from elsa_core.backends.support import Request, loses_digits
from elsa_core.operators.record import implement
from elsa_core.operators.window import Eager
from elsa_core.routing import measured
from elsa_core.routing.choose import DIRECT, implementation, mask_kind


def attention_backward(*arguments: Any) -> Any:
    """`elsa::attention_backward` on every device: the first backend of the table that serves it."""
    query, value, attn_mask = arguments[2], arguments[4], arguments[5]
    is_causal, _, precision, needs = arguments[8:]
    wanted = zip(operators.ATTENTION.terms, needs, strict=True)
    request = Request(
        query.device.type, query.dtype, query.shape[-1], value.shape[-1], precision, "attention",
        mask_kind(attn_mask, is_causal), "dense", tuple(name for name, needed in wanted if needed),
    )  # fmt: skip
    grads = _by_the_table(request, arguments)
    return operators.ATTENTION.recomputed(*arguments) if grads is None else grads


def _by_the_table(request: Request, arguments: tuple[Any, ...]) -> Any:
    """The gradients by the first backend of the table that serves the call, or None."""
    row = measured.training(request.operator, request.device_type, request.dtype)
    return _by_backends(request, row.backward if row else (), arguments)


def _by_backends(request: Request, names: Iterable[str], arguments: tuple[Any, ...]) -> Any:
    for name in names:
        offered = implementation(request.operator, name)
        if offered.backward is None or not (offered.gradient and offered.gradient(request).ok):
            continue
        with _without_autocast(request.device_type):
            grads = offered.backward(*arguments)
        if grads is not None:
            return grads
    return None


def shard_backward(*arguments: Any) -> Any:
    """As `attention_backward`, for keys and values that are a shard of those that the rows see.

    `out` and `lse` are of the whole rows, so that a kernel serves only where it reads both as they
    are: P = exp(score - lse), delta = rowsum(grad_out * out). PyTorch's kernels do; the Triton ones
    do in float32 where no lse is large. For others plain PyTorch.
    """
    query, value, attn_mask, lse = arguments[2], arguments[4], arguments[5], arguments[7]
    is_causal, _, precision, needs = arguments[8:]
    row = measured.training("attention", query.device.type, query.dtype)
    if row is None or not (query.numel() and value.numel()) or loses_digits(lse):
        return eager.backward(*arguments, is_shard=True)
    wanted = zip(operators.ATTENTION.terms, needs, strict=True)
    request = Request(
        query.device.type, query.dtype, query.shape[-1], value.shape[-1], precision, "attention",
        mask_kind(attn_mask, is_causal), "dense", tuple(name for name, needed in wanted if needed),
    )  # fmt: skip
    read = ("triton", "sdpa") if query.dtype == torch.float32 else ("sdpa",)
    names = [name for name in row.backward if name in read]
    grads = _by_backends(request, names, arguments)
    return eager.backward(*arguments, is_shard=True) if grads is None else grads


def window_attention_backward(*arguments: Any) -> Any:
    """`elsa::window_attention_backward` on every device: as `attention_backward`."""
    qkv, num_heads, precision, needs = arguments[1], arguments[6], arguments[13], arguments[14]
    head_dim = qkv.shape[-1] // (3 * num_heads)
    wanted = zip(operators.WINDOW_ATTENTION.terms, needs, strict=True)
    request = Request(
        qkv.device.type, qkv.dtype, head_dim, head_dim, precision, "window_attention",
        gradient=tuple(name for name, needed in wanted if needed), tokens=math.prod(arguments[7]),
    )  # fmt: skip
    grads = _by_the_table(request, arguments)
    return operators.WINDOW_ATTENTION.recomputed(*arguments) if grads is None else grads


def recorded(operator: str, backend: str) -> Callable[..., Any] | None:
    """`elsa::<operator>` of a backend, for eager calls whose gradient autograd records.

    The same kernels and formulas in fewer steps: the Python layers of
    `torch.library.register_autograd`, in both directions, take the host more time than all else of
    a call. None where a backend has no kernel to be called directly. Only for calls that none of
    `calls.watched` sees.
    """
    kernel = DIRECT.get((operator, backend))
    if kernel is None:
        return None
    return partial(Eager.apply, kernel, window_attention_backward)


def _without_autocast(device_type: str) -> AbstractContextManager[Any]:
    if not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


implement("attention_backward", attention_backward, "CompositeExplicitAutograd")
implement("window_attention_backward", window_attention_backward, "CompositeExplicitAutograd")
