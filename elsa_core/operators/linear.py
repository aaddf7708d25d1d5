"""The operator `elsa::linear`: input @ weight.T + bias, and its gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from elsa_core.operators.record import Gradients, Grads, Operator, register

_SCHEMA = "(Tensor input, Tensor weight, Tensor? bias) -> Tensor"


def plain(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """PyTorch's own, in the dtype of the operands also where autocast is on."""
    with torch.autocast(input.device.type, enabled=False):
        return torch.nn.functional.linear(input, weight, bias)


def _fake(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    torch._check(weight.dim() == 2, lambda: f"weight must be [N, K], not {list(weight.shape)}")
    torch._check(
        input.shape[-1] == weight.shape[1],
        lambda: f"input {list(input.shape)} and weight {list(weight.shape)}: channels differ",
    )
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, weight, bias = inputs
    ctx.save_for_backward(
        input if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None
    )
    ctx.bias = bias is not None


def _backward(ctx: Any, grad_out: Tensor) -> Grads:
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


LINEAR = register(
    Operator(
        name="linear",
        schema=_SCHEMA,
        reference=plain,
        fake=_fake,
        gradients=Gradients(formula=_backward, setup_context=_setup_context),
        kind="linear",
        terms=("input", "weight", "bias"),
    )
)
