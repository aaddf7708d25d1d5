"""The torch operators of elsa: schemas, fakes and autograd formulas. Imports torch only.

`elsa::attention` has its CPU kernel in the native library (`csrc/torch`) and its CUDA kernel in
`elsa_core.backends.triton`; `elsa::attention_eager` has the same schema and serves every device and
dtype in plain PyTorch. `elsa::linear` has a CUDA kernel and is PyTorch's own elsewhere. A native
library that is loaded without this package (a bundle, a program) defines `elsa::attention` itself;
loaded by this package it leaves that to this file.

`elsa::attention_backward` and `elsa::window_attention_backward` are the gradients of the operators
of that name; those of `*_eager` have operators of their own, so that a kernel of a device is asked
for nothing that its forward does not take. `needs` says which gradients are wanted: of query, key,
value and mask, or of qkv, bias, pad_qkv and logit_scale. What is not wanted is not computed and
comes back as an empty tensor [0]. A gradient has the dtype and shape of its input; query's, key's
and value's are laid out as `torch.empty_like` of them, all others are contiguous.

What attention saves is (out, lse), float32 and O(N) beside the output, not (m, log S):
P = exp(score - lse), and the rounding of lse, 2**-24 |lse| at most, is a relative error of P. For
|lse| <= 2**11 that is below 2**-13 in float32, of the size of what half-precision gradients round,
and for the |lse| < 2**5 of trained models below 2**-19. Of larger ones a backward computes (m, S)
again in a first pass over the keys; at |lse| >= 2**24 lse has lost all of log S. Window attention
saves nothing: a window's scores are computed again in one tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from elsa_core.backends import eager, eager_window

_Grads = tuple[Tensor | None, ...]
_ARGUMENTS = (
    "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, bool is_causal, "
    "float scale, str precision) -> (Tensor, Tensor)"
)
_BACKWARD_ARGUMENTS = (
    "(Tensor grad_out, Tensor grad_lse, Tensor query, Tensor key, Tensor value, "
    "Tensor? attn_mask, Tensor out, Tensor lse, bool is_causal, float scale, str precision, "
    "bool[] needs) -> (Tensor, Tensor, Tensor, Tensor)"
)
_WINDOW_TERMS = (
    "Tensor? bias, Tensor? bias_index, Tensor? pad_qkv, Tensor? logit_scale, int num_heads, "
    "int[] window_size, int[] shift_size, float scale, float mask_value, str layout, bool grid"
)
_WINDOW_ARGUMENTS = f"(Tensor qkv, {_WINDOW_TERMS}, str precision) -> Tensor"
_WINDOW_BACKWARD_ARGUMENTS = (
    f"(Tensor grad_out, Tensor qkv, {_WINDOW_TERMS}, str precision, bool[] needs) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
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
    precision: str,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_query, grad_key, grad_value = (
        torch.empty_like(t) if needed else query.new_empty(0)
        for t, needed in zip((query, key, value), needs[:3], strict=True)
    )
    grad_mask = query.new_empty(0)
    if attn_mask is not None and needs[3]:
        grad_mask = torch.empty_like(attn_mask, memory_format=torch.contiguous_format)
    return grad_query, grad_key, grad_value, grad_mask


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, attn_mask, *terms = inputs
    ctx.save_for_backward(query, key, value, attn_mask, *output)
    ctx.terms = terms


def _backward(operator: Any, ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> _Grads:
    """The gradients of `elsa::attention`: only those that somebody needs are computed."""
    needs = list(ctx.needs_input_grad[:4])
    grads = operator(grad_out, grad_lse, *ctx.saved_tensors, *ctx.terms, needs)
    return *_needed(grads, needs), None, None, None


def _needed(grads: Iterable[Tensor], needs: Iterable[bool]) -> _Grads:
    return tuple(grad if n else None for grad, n in zip(grads, needs, strict=True))


def _twice_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:8])
    ctx.terms = inputs[8:]


def _twice(ctx: Any, *grads: Tensor) -> _Grads:
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
    needs: Sequence[bool] = rest[-1]
    grad_qkv, grad_bias, grad_pad, grad_scale = (
        qkv.new_empty(0) if t is None or not needed else t.new_empty(t.shape)
        for t, needed in zip((qkv, bias, pad_qkv, logit_scale), needs, strict=True)
    )
    return grad_qkv, grad_bias, grad_pad, grad_scale


def _window_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.terms = inputs[5:]


def _window_backward(operator: Any, ctx: Any, grad_out: Tensor) -> _Grads:
    """The gradients of `elsa::window_attention`: only those that somebody needs are computed."""
    wanted = ctx.needs_input_grad
    needs = [wanted[0], wanted[1], wanted[3], wanted[4]]
    grads = operator(grad_out, *ctx.saved_tensors, *ctx.terms, needs)
    grad_qkv, grad_bias, grad_pad, grad_scale = _needed(grads, needs)
    return grad_qkv, grad_bias, None, grad_pad, grad_scale, *(None,) * 8


def _window_twice(ctx: Any, *grads: Tensor) -> _Grads:
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
        backward = f"{name}_backward"
        _define(backward, _BACKWARD_ARGUMENTS)
        _LIBRARY.impl(backward, eager.backward, "CompositeExplicitAutograd")
        torch.library.register_fake(f"elsa::{backward}", _backward_fake, lib=_LIBRARY)
        torch.library.register_autograd(
            f"elsa::{backward}", _twice, setup_context=_twice_setup_context, lib=_LIBRARY
        )
        _differentiable(name, _backward, _setup_context)
    _LIBRARY.impl("attention", _attention_cuda, "CUDA")


def _differentiable(name: str, formula: Callable[..., Any], setup: Callable[..., Any]) -> None:
    """Give an operator the gradients of `elsa::<name>_backward`."""
    operator = getattr(torch.ops.elsa, f"{name}_backward").default
    torch.library.register_autograd(
        f"elsa::{name}", partial(formula, operator), setup_context=setup, lib=_LIBRARY
    )


def _register_window() -> None:
    for name in ("window_attention", "window_attention_eager"):
        _define(name, _WINDOW_ARGUMENTS)
        torch.library.register_fake(f"elsa::{name}", _window_fake, lib=_LIBRARY)
        backward = f"{name}_backward"
        _define(backward, _WINDOW_BACKWARD_ARGUMENTS)
        _LIBRARY.impl(backward, eager_window.backward, "CompositeExplicitAutograd")
        torch.library.register_fake(f"elsa::{backward}", _window_backward_fake, lib=_LIBRARY)
        torch.library.register_autograd(f"elsa::{backward}", _window_twice, lib=_LIBRARY)
        _differentiable(name, _window_backward, _window_setup_context)
    _LIBRARY.impl("window_attention_eager", eager_window.attention, "CompositeExplicitAutograd")
    _LIBRARY.impl("window_attention", _window_attention_cuda, "CUDA")


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
