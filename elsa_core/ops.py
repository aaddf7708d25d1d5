"""The torch operators of elsa: schemas, fakes and autograd formulas. Imports torch only.

`elsa::attention` has its CPU kernel in the native library (`csrc/torch`) and its CUDA kernel in
`elsa_core.backends.triton`; `elsa::attention_eager` has the same schema and serves every device and
dtype in plain PyTorch. A native library that is loaded without this package (a bundle, a program)
defines `elsa::attention` itself; loaded by this package it leaves that to this file.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from elsa_core.backends import eager

_ARGUMENTS = (
    "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, bool is_causal, "
    "float scale, str precision) -> (Tensor, Tensor)"
)
_BACKWARD_ARGUMENTS = (
    "(Tensor grad_out, Tensor grad_lse, Tensor query, Tensor key, Tensor value, "
    "Tensor? attn_mask, Tensor out, Tensor lse, bool is_causal, float scale, "
    "bool mask_needs_grad) -> (Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY = torch.library.Library("elsa", "FRAGMENT")


def _define(name: str, arguments: str) -> None:
    if not hasattr(torch.ops.elsa, name):  # a native library that was loaded first has defined it
        _LIBRARY.define(name + arguments)


def _attention_fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float,
    precision: str,
) -> tuple[Tensor, Tensor]:
    batch, heads, length, _ = query.shape
    out = query.new_empty((batch, length, heads, value.shape[-1])).transpose(1, 2)
    lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return out, query.new_empty((batch, heads, length), dtype=lse_dtype)


def _backward_fake(
    grad_out: Tensor,
    grad_lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
    mask_needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_mask = query.new_empty(0)
    if attn_mask is not None and mask_needs_grad:
        grad_mask = torch.empty_like(attn_mask, memory_format=torch.contiguous_format)
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), grad_mask


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, attn_mask, is_causal, scale, _ = inputs
    ctx.save_for_backward(query, key, value, attn_mask, *output)
    ctx.is_causal, ctx.scale = is_causal, scale


def _backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, attn_mask, out, lse = ctx.saved_tensors
    mask_needs_grad = bool(ctx.needs_input_grad[3])
    grads = torch.ops.elsa.attention_backward(
        grad_out, grad_lse, query, key, value, attn_mask, out, lse,
        ctx.is_causal, ctx.scale, mask_needs_grad,
    )  # fmt: skip
    grad_mask = grads[3] if mask_needs_grad else None
    return grads[0], grads[1], grads[2], grad_mask, None, None, None


def _attention_cuda(*args: Any) -> tuple[Tensor, Tensor]:
    """The CUDA kernel of `elsa::attention`: Triton is imported at the first call, not before."""
    from elsa_core.backends import triton

    result: tuple[Tensor, Tensor] = triton.attention(*args)
    return result


def _register() -> None:
    for name, kernel in (("attention", None), ("attention_eager", eager.attention)):
        _define(name, _ARGUMENTS)
        if kernel is not None:
            _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"elsa::{name}", _attention_fake, lib=_LIBRARY)
        torch.library.register_autograd(
            f"elsa::{name}", _backward, setup_context=_setup_context, lib=_LIBRARY
        )
    _LIBRARY.impl("attention", _attention_cuda, "CUDA")
    _define("attention_backward", _BACKWARD_ARGUMENTS)
    _LIBRARY.impl("attention_backward", eager.backward, "CompositeExplicitAutograd")
    torch.library.register_fake("elsa::attention_backward", _backward_fake, lib=_LIBRARY)


_register()
