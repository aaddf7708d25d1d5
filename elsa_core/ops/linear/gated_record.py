"""The operator `elsa::gated_linear`: a gated linear unit.

    out = activation(input @ weight.T + bias) * (input @ value.T + value_bias)

Layouts: input [..., K], weight and value [N, K], bias and value_bias [N],
out [..., N], one floating dtype, any strides; an absent term is left out. Activations are
those of `ops.linear.record`. Of a call nothing but its operands is saved: the formula computes both
products again.

Source: Shazeer, GLU Variants Improve Transformer, arXiv 2002.05202.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from elsa_core.ops.factory import Grads, Operator, register
from elsa_core.ops.linear import record as linear

_SCHEMA = (
    "(Tensor input, Tensor weight, Tensor? bias, Tensor value, Tensor? value_bias, "
    'str activation="silu", str precision="strict") -> Tensor'
)


def plain(
    input: Tensor, weight: Tensor, bias: Tensor | None, value: Tensor, value_bias: Tensor | None,
    activation: str = "silu", precision: str = "strict",
) -> Tensor:  # fmt: skip
    """PyTorch's own, in the dtype of the operands also where autocast is on."""
    with torch.autocast(input.device.type, enabled=False):
        gate = linear.plain(input, weight, bias, activation)
        return gate * functional.linear(input, value, value_bias)


def _fake(
    input: Tensor, weight: Tensor, bias: Tensor | None, value: Tensor, value_bias: Tensor | None,
    activation: str = "silu", *rest: Any,
) -> Tensor:  # fmt: skip
    torch._check(
        weight.shape == value.shape,
        lambda: f"weight {list(weight.shape)} and value {list(value.shape)}: shapes differ",
    )
    return linear.fake(input, weight, bias, activation)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.activation, ctx.precision = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad_out: Tensor) -> Grads:
    activation, precision = ctx.activation, ctx.precision
    product: Callable[..., Tensor] = torch.ops.elsa.linear.default

    def compute(
        input: Tensor, weight: Tensor, bias: Tensor | None, value: Tensor, value_bias: Tensor | None
    ) -> Tensor:
        gate = product(input, weight, bias, "none", None, None, precision)
        other = product(input, value, value_bias, "none", None, None, precision)
        return linear.epilogue(gate, activation, None, None) * other

    grads = linear.recomputed(compute, ctx.saved_tensors, ctx.needs_input_grad[:5], grad_out)
    return *grads, None, None


GATED_LINEAR = register(
    Operator(
        name="gated_linear",
        schema=_SCHEMA,
        reference=plain,
        fake=_fake,
        setup_context=_setup_context,
        formula=_backward,
        kind="linear",
        terms=("input", "weight", "bias", "value", "value_bias"),
    )
)
