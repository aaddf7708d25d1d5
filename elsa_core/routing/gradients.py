"""Gradients of this package's forwards: the operators' kernels, and eager calls in fewer steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from elsa_core import operators
from elsa_core.backends.support import Request
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
    for name in row.backward if row else ():
        offered = implementation(request.operator, name)
        if offered.backward is None or not (offered.gradient and offered.gradient(request).ok):
            continue
        with _without_autocast(request.device_type):
            grads = offered.backward(*arguments)
        if grads is not None:
            return grads
    return None


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


def entmax_backward_cuda(*arguments: Any) -> Any:
    """`elsa::entmax_attention_backward` on CUDA: Triton's kernels; of a mask plain PyTorch."""
    from elsa_core.backends.triton.attention.entmax import entmax_backward

    *terms, needs = arguments
    attn_mask = terms[4]
    with _without_autocast("cuda"):
        grads = list(entmax_backward(*arguments))
    if needs[3] and attn_mask is not None and attn_mask.dtype != torch.bool:
        of_mask = [False, False, False, True, False]
        grads[3] = operators.ENTMAX_ATTENTION.recomputed(*terms, of_mask)[3]
    return tuple(grads)


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
implement("entmax_attention_backward", entmax_backward_cuda, "CUDA")
