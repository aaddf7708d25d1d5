"""The operator `elsa::gated_linear`: a gated linear unit, of the layer norm of its input if asked.

    x = layer_norm(input) if eps is given, else input
    out = activation(x @ weight.T + bias) * (x @ value.T + value_bias)

Layouts: input [..., K], weight and value [N, K], bias and value_bias [N], norm_weight and norm_bias
[K], out [..., N], one floating dtype, any strides; an absent term is left out. `halves` and
`powers` are what `elsa::split_weight` makes of weight, `value_halves` and `value_powers` of value;
see `elsa_core.operators.linear`, whose activations these are. Of a call nothing but its operands is
saved: the formula computes both products again.

Source: Shazeer, GLU Variants Improve Transformer, arXiv 2002.05202.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from elsa_core.operators import linear
from elsa_core.operators.record import Gradients, Grads, Operator, needed, register

_SCHEMA = (
    "(Tensor input, Tensor weight, Tensor? bias, Tensor value, Tensor? value_bias, "
    'str activation="silu", Tensor? norm_weight=None, Tensor? norm_bias=None, float? eps=None, '
    'str precision="strict", Tensor? halves=None, Tensor? powers=None, '
    "Tensor? value_halves=None, Tensor? value_powers=None) -> Tensor"
)


def plain(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    value: Tensor,
    value_bias: Tensor | None,
    activation: str = "silu",
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float | None = None,
    precision: str = "strict",
    halves: Tensor | None = None,
    powers: Tensor | None = None,
    value_halves: Tensor | None = None,
    value_powers: Tensor | None = None,
) -> Tensor:
    """PyTorch's own, in the dtype of the operands also where autocast is on."""
    with torch.autocast(input.device.type, enabled=False):
        if eps is not None:
            input = functional.layer_norm(input, input.shape[-1:], norm_weight, norm_bias, eps)
        gate = linear.plain(input, weight, bias, activation)
        return gate * functional.linear(input, value, value_bias)


def _fake(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    value: Tensor,
    value_bias: Tensor | None,
    activation: str = "silu",
    *rest: Any,
) -> Tensor:
    torch._check(
        weight.shape == value.shape,
        lambda: f"weight {list(weight.shape)} and value {list(value.shape)}: shapes differ",
    )
    return linear.fake(input, weight, bias, activation)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, activation, norm_weight, norm_bias, eps, precision = inputs[:10]
    ctx.save_for_backward(*tensors, norm_weight, norm_bias)
    ctx.terms = (activation, eps, precision)


def _backward(ctx: Any, grad_out: Tensor) -> Grads:
    input, weight, bias, value, value_bias, norm_weight, norm_bias = ctx.saved_tensors
    activation, eps, precision = ctx.terms
    # arguments that were left out are not counted
    wanted = [*ctx.needs_input_grad, *(False,) * 8][:8]
    of_norm = [wanted[0], wanted[6], wanted[7]]
    x, mean, rstd = input, input, input
    if eps is not None:
        x, mean, rstd = torch.ops.aten.native_layer_norm.default(
            input, list(input.shape[-1:]), norm_weight, norm_bias, eps
        )
    product = torch.ops.elsa.linear.default
    other = product(x, value, value_bias, "none", None, None, precision)
    gate = product(x, weight, bias, activation, None, None, precision)
    of_x = any(of_norm) if eps is not None else wanted[0]
    first = linear.gradients_of(
        grad_out * other, (x, weight, bias, None), activation, precision,
        (of_x, *wanted[1:3], False),
    )  # fmt: skip
    second = linear.gradients_of(
        grad_out * gate, (x, value, value_bias, None), "none", precision,
        (of_x, *wanted[3:5], False),
    )  # fmt: skip
    total = None if first[0] is None or second[0] is None else first[0] + second[0]
    found: Grads = (total, None, None)
    if eps is not None and total is not None:
        grads = torch.ops.aten.native_layer_norm_backward.default(
            total, input, list(input.shape[-1:]), mean, rstd, norm_weight, norm_bias, of_norm
        )
        found = needed(grads, of_norm)
    return found[0], *first[1:3], *second[1:3], None, *found[1:], *(None,) * 6


GATED_LINEAR = register(
    Operator(
        name="gated_linear",
        schema=_SCHEMA,
        reference=plain,
        fake=_fake,
        gradients=Gradients(setup_context=_setup_context, formula=_backward),
        kind="linear",
        terms=(
            "input", "weight", "bias", "value", "value_bias", "norm_weight", "norm_bias",
        ),
    )
)  # fmt: skip
