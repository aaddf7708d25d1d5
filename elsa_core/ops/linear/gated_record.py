"""The operator `elsa::gated_linear`: a gated linear unit.

    out = activation(input @ weight.T + bias) * (input @ value.T + value_bias)

Layouts: input [..., K], weight and value [N, K], bias and value_bias [N],
out [..., N], one floating dtype, any strides; an absent term is left out. `halves` and
`powers` are what `elsa::split_weight` makes of weight, `value_halves` and `value_powers` of value;
see `ops.linear.record`, whose activations these are. Of a call nothing but its operands is
saved: the formula computes both products again.

Source: Shazeer, GLU Variants Improve Transformer, arXiv 2002.05202.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from elsa_core.ops.factory import Gradients, Grads, Operator, register
from elsa_core.ops.linear import record as linear

_SCHEMA = (
    "(Tensor input, Tensor weight, Tensor? bias, Tensor value, Tensor? value_bias, "
    'str activation="silu", str precision="strict", Tensor? halves=None, Tensor? powers=None, '
    "Tensor? value_halves=None, Tensor? value_powers=None) -> Tensor"
)


def plain(
    input: Tensor, weight: Tensor, bias: Tensor | None, value: Tensor, value_bias: Tensor | None,
    activation: str = "silu", precision: str = "strict", halves: Tensor | None = None,
    powers: Tensor | None = None, value_halves: Tensor | None = None,
    value_powers: Tensor | None = None,
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
    *tensors, ctx.activation, ctx.precision = inputs[:7]
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
    return *grads, *(None,) * 6


GATED_LINEAR = register(
    Operator(
        name="gated_linear",
        schema=_SCHEMA,
        reference=plain,
        fake=_fake,
        gradients=Gradients(setup_context=_setup_context, formula=_backward),
        kind="linear",
        terms=("input", "weight", "bias", "value", "value_bias"),
    )
)
