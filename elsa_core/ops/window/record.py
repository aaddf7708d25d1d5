"""The operator `elsa::window_attention` and its gradients `elsa::window_attention_backward`.

Layouts: qkv [B, D, H, W, 3 * C], last dim dense; the terms as in `ops.window.api`. The result is
[B, D, H, W, C], dense. Nothing is saved for the gradients: the scores of a window are computed
again, tile by tile. `needs` says which gradients are wanted, of qkv, bias, pad_qkv and logit_scale:
the others are not computed and come back as an empty tensor [0]. Gradients are contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from elsa_core.backends import eager_window
from elsa_core.backends.window_call import SCHEMA, WindowCall
from elsa_core.base import calls
from elsa_core.ops.attention import portable
from elsa_core.ops.attention.record import twice
from elsa_core.ops.factory import Backward, Gradients, Grads, Operator, needed, register

_SCHEMA = f"({SCHEMA}) -> Tensor"
_BACKWARD_SCHEMA = f"(Tensor grad_out, {SCHEMA}, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor)"


def fake(qkv: Tensor, *rest: Any) -> Tensor:
    """What the operator returns, on fake tensors."""
    return qkv.new_empty((*qkv.shape[:-1], qkv.shape[-1] // 3))


def _backward_fake(grad_out: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call, needs = WindowCall(*arguments[:-1]), arguments[-1]
    grad_qkv, grad_bias, grad_pad, grad_scale = (
        call.qkv.new_empty(0) if t is None or not needed else t.new_empty(t.shape)
        for t, needed in zip(call.differentiable, needs, strict=True)
    )
    return grad_qkv, grad_bias, grad_pad, grad_scale


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.terms = inputs[5:]


def _backward(operator: Any, ctx: Any, grad_out: Tensor) -> Grads:
    return _gradients(operator, ctx, ctx.needs_input_grad, grad_out)


def _gradients(operator: Any, ctx: Any, wanted: Sequence[bool], grad_out: Tensor) -> Grads:
    """The gradients of `elsa::window_attention`: only those that are wanted are computed."""
    needs = [wanted[0], wanted[1], wanted[3], wanted[4]]
    grads = operator(grad_out, *ctx.saved_tensors, *ctx.terms, needs)
    grad_qkv, grad_bias, grad_pad, grad_scale = needed(grads, needs)
    return grad_qkv, grad_bias, None, grad_pad, grad_scale, *(None,) * 8


def largest_score(**call: Any) -> float:
    """The largest |score| of a call of the operator, masked ones left out; 0 where none is finite.

    Takes what the operator takes.
    """
    return eager_window.largest_score(WindowCall(**call))


class Eager(torch.autograd.Function):
    """`elsa::window_attention` by the first argument, its gradients by the second, which take what
    the two operators take. See `elsa_core.dispatch.gradients.recorded`."""

    @staticmethod
    def forward(ctx: Any, kernel: Any, backward: Any, *inputs: Any) -> Tensor:
        out: Tensor = kernel(*inputs)
        _setup_context(ctx, inputs, out)
        ctx.compute = backward
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Grads:
        compute = ctx.compute
        if calls.by_operator(grad_out):
            # of a second derivative, which the operator has a formula for
            compute = torch.ops.elsa.window_attention_backward.default
        return None, None, *_gradients(compute, ctx, ctx.needs_input_grad[2:], grad_out)


def _twice_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.terms = inputs[6:]


def _twice(ctx: Any, *grads: Tensor) -> Grads:
    """Second derivatives of `elsa::window_attention`: those of the reference, all its windows'
    weights alive."""
    *terms, needs = ctx.terms

    def again(grad_out: Tensor, *tensors: Tensor | None) -> list[Tensor]:
        sources = [
            t if t is None or t.requires_grad else t.detach().requires_grad_(t.is_floating_point())
            for t in tensors
        ]
        out = eager_window.attention(*sources, *terms)
        places = zip((0, 1, 3, 4), needs, strict=True)
        asked = [sources[i] if wanted else None for i, wanted in places]
        found = iter(
            torch.autograd.grad(
                out, [t for t in asked if t is not None], grad_out,
                create_graph=True, materialize_grads=True,
            )
        )  # fmt: skip
        return [out.new_empty(0) if t is None else next(found) for t in asked]

    return twice(ctx, ctx.saved_tensors, again, grads)


WINDOW_ATTENTION = register(
    Operator(
        name="window_attention",
        schema=_SCHEMA,
        reference=eager_window.attention,
        portable=portable.window_attention,
        fake=fake,
        gradients=Gradients(
            setup_context=_setup_context,
            formula=_backward,
            backward=Backward(
                schema=_BACKWARD_SCHEMA,
                fake=_backward_fake,
                reference=eager_window.backward,
                formula=_twice,
                setup_context=_twice_setup_context,
            ),
        ),
        kind="window",
        terms=("qkv", "bias", "pad_qkv", "logit_scale"),
        twin=True,
        onnx="elsa_core.exporting.onnx_window:EXPORT",
        bench="elsa_core.profiling.bench.operators:WINDOW",
    )
)
