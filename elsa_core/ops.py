"""The torch operators of elsa: schemas, fakes and autograd formulas. Imports torch only.

`elsa::attention` has its CPU kernel in the native library (`csrc/torch`) and its CUDA kernel in
`elsa_core.backends.triton`; `elsa::attention_eager` has the same schema and serves every device and
dtype in plain PyTorch. `elsa::linear` has a CUDA kernel and is PyTorch's own elsewhere. A native
library that is loaded without this package (a bundle, a program) defines `elsa::attention` itself;
loaded by this package it leaves that to this file.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from elsa_core.backends import eager, eager_window

_ARGUMENTS = (
    "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, bool is_causal, "
    "float scale, str precision) -> (Tensor, Tensor)"
)
_BACKWARD_ARGUMENTS = (
    "(Tensor grad_out, Tensor grad_lse, Tensor query, Tensor key, Tensor value, "
    "Tensor? attn_mask, Tensor out, Tensor lse, bool is_causal, float scale, "
    "bool mask_needs_grad) -> (Tensor, Tensor, Tensor, Tensor)"
)
_WINDOW_TERMS = (
    "Tensor? bias, Tensor? bias_index, Tensor? pad_qkv, Tensor? logit_scale, int num_heads, "
    "int[] window_size, int[] shift_size, float scale, float mask_value, str layout, bool grid"
)
_WINDOW_ARGUMENTS = f"(Tensor qkv, {_WINDOW_TERMS}, str precision) -> Tensor"
_WINDOW_BACKWARD_ARGUMENTS = (
    f"(Tensor grad_out, Tensor qkv, {_WINDOW_TERMS}) -> (Tensor, Tensor, Tensor, Tensor)"
)
_LINEAR_ARGUMENTS = "(Tensor input, Tensor weight, Tensor? bias) -> Tensor"
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


def _twice_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:8])
    ctx.terms = inputs[8:]


def _twice(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    """Second derivatives: the backward once more, recorded, with all its weights alive."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Aliases, so that what is differentiated ends here and yet hangs on the caller's graph.
        operands = [
            t.view_as(t) if needed else t
            for t, needed in zip(ctx.saved_tensors, ctx.needs_input_grad[:8], strict=True)
        ]
        results = eager.backward(*operands, *ctx.terms)
    wanted = [i for i, needed in enumerate(ctx.needs_input_grad[:8]) if needed]
    ends = [(r, g) for r, g in zip(results, grads, strict=True) if r.requires_grad]
    found: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
    second = torch.autograd.grad(
        [r for r, _ in ends],
        [operands[i] for i in wanted],
        [g for _, g in ends],
        create_graph=create_graph,
        allow_unused=True,
    )
    for i, grad in zip(wanted, second, strict=True):
        found[i] = grad
    return tuple(found)


def _attention_cuda(*args: Any) -> tuple[Tensor, Tensor]:
    """The CUDA kernel of `elsa::attention`: Triton is imported at the first call, not before."""
    from elsa_core.backends import triton

    result: tuple[Tensor, Tensor] = triton.attention_forward(*args)
    return result


def _window_fake(
    qkv: Tensor,
    bias: Tensor | None,
    bias_index: Tensor | None,
    pad_qkv: Tensor | None,
    logit_scale: Tensor | None,
    *rest: Any,
) -> Tensor:
    return qkv.new_empty((*qkv.shape[:-1], qkv.shape[-1] // 3))


def _window_backward_fake(
    grad_out: Tensor,
    qkv: Tensor,
    bias: Tensor | None,
    bias_index: Tensor | None,
    pad_qkv: Tensor | None,
    logit_scale: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_bias, grad_pad, grad_scale = (
        qkv.new_empty(0) if t is None else t.new_empty(t.shape)
        for t in (bias, pad_qkv, logit_scale)
    )
    return qkv.new_empty(qkv.shape), grad_bias, grad_pad, grad_scale


def _window_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.terms = inputs[5:12]


def _window_backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    qkv, bias, bias_index, pad_qkv, logit_scale = ctx.saved_tensors
    grads = torch.ops.elsa.window_attention_backward(
        grad_out, qkv, bias, bias_index, pad_qkv, logit_scale, *ctx.terms
    )
    present = (bias is not None, pad_qkv is not None, logit_scale is not None)
    grad_bias, grad_pad, grad_scale = (
        grad if there else None for grad, there in zip(grads[1:], present, strict=True)
    )
    return grads[0], grad_bias, None, grad_pad, grad_scale, *(None,) * 8


def _window_twice(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    raise RuntimeError(
        "elsa.window_attention is differentiable once by torch.autograd; second derivatives come "
        "from torch.func (torch.func.hessian, or torch.func.grad of torch.func.grad)"
    )


def _window_attention_cuda(*args: Any) -> Tensor:
    """The CUDA kernel of `elsa::window_attention`: Triton is imported at the first call."""
    from elsa_core.backends.triton.window import planner

    result: Tensor = planner.window_attention(*args)
    return result


def _linear_fake(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    torch._check(weight.dim() == 2, lambda: f"weight must be [N, K], not {list(weight.shape)}")
    torch._check(
        input.shape[-1] == weight.shape[1],
        lambda: f"input {list(input.shape)} and weight {list(weight.shape)}: channels differ",
    )
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


def _linear_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, weight, bias = inputs
    ctx.save_for_backward(
        input if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None
    )
    ctx.bias = bias is not None


def _linear_backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    input, weight = ctx.saved_tensors
    grad_input = grad_weight = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_input = grad_out @ weight
    rows = grad_out.reshape(-1, grad_out.shape[-1])
    if ctx.needs_input_grad[1]:
        grad_weight = rows.t() @ input.reshape(-1, input.shape[-1])
    if ctx.bias and ctx.needs_input_grad[2]:
        grad_bias = rows.sum(0)
    return grad_input, grad_weight, grad_bias


def _linear_cuda(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The CUDA kernel of `elsa::linear`: Triton is imported at the first call."""
    from elsa_core.backends.triton.linear import gemm

    out = gemm.linear(input, weight, bias)
    return _linear_plain(input, weight, bias) if out is None else out


def _linear_plain(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """PyTorch's own, in the dtype of the operands also where autocast is on."""
    with torch.autocast(input.device.type, enabled=False):
        return torch.nn.functional.linear(input, weight, bias)


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
    torch.library.register_autograd(
        "elsa::attention_backward", _twice, setup_context=_twice_setup_context, lib=_LIBRARY
    )


def _register_window() -> None:
    for name in ("window_attention", "window_attention_eager"):
        _define(name, _WINDOW_ARGUMENTS)
        torch.library.register_fake(f"elsa::{name}", _window_fake, lib=_LIBRARY)
        torch.library.register_autograd(
            f"elsa::{name}", _window_backward, setup_context=_window_setup_context, lib=_LIBRARY
        )
    _LIBRARY.impl("window_attention_eager", eager_window.attention, "CompositeExplicitAutograd")
    _LIBRARY.impl("window_attention", _window_attention_cuda, "CUDA")
    _define("window_attention_backward", _WINDOW_BACKWARD_ARGUMENTS)
    _LIBRARY.impl("window_attention_backward", eager_window.backward, "CompositeExplicitAutograd")
    torch.library.register_fake(
        "elsa::window_attention_backward", _window_backward_fake, lib=_LIBRARY
    )
    torch.library.register_autograd("elsa::window_attention_backward", _window_twice, lib=_LIBRARY)


def _register_linear() -> None:
    _define("linear", _LINEAR_ARGUMENTS)
    torch.library.register_fake("elsa::linear", _linear_fake, lib=_LIBRARY)
    torch.library.register_autograd(
        "elsa::linear", _linear_backward, setup_context=_linear_setup_context, lib=_LIBRARY
    )
    _LIBRARY.impl("linear", _linear_plain, "CompositeExplicitAutograd")
    _LIBRARY.impl("linear", _linear_cuda, "CUDA")


_register()
_register_window()
_register_linear()
