"""The operator `elsa::layer_norm_linear`: a linear layer of the layer norm of its input.

    out = residual + scale * activation(layer_norm(input) @ weight.T + bias)
    layer_norm(x) = (x - mean(x)) / sqrt(variance(x) + eps) * norm_weight + norm_bias

over the last axis, the variance that of the rows themselves (not of a sample). Layouts and terms
are those of `elsa_core.operators.linear`; norm_weight and norm_bias are [K], an absent one is left
out. Of a call nothing but its operands is saved: the formula normalises again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from elsa_core.operators import linear
from elsa_core.operators.record import Gradients, Grads, Operator, needed, register

_SCHEMA = (
    "(Tensor input, Tensor weight, Tensor? bias, Tensor? norm_weight, Tensor? norm_bias, "
    'float eps, str activation="none", Tensor? residual=None, Tensor? scale=None, '
    'str precision="strict", Tensor? halves=None, Tensor? powers=None) -> Tensor'
)


def plain(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    activation: str = "none",
    residual: Tensor | None = None,
    scale: Tensor | None = None,
    precision: str = "strict",
    halves: Tensor | None = None,
    powers: Tensor | None = None,
) -> Tensor:
    """PyTorch's own, in the dtype of the operands also where autocast is on."""
    with torch.autocast(input.device.type, enabled=False):
        normed = functional.layer_norm(input, input.shape[-1:], norm_weight, norm_bias, eps)
    return linear.plain(normed, weight, bias, activation, residual, scale)


def _fake(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    activation: str = "none",
    residual: Tensor | None = None,
    scale: Tensor | None = None,
    precision: str = "strict",
    halves: Tensor | None = None,
    powers: Tensor | None = None,
) -> Tensor:
    return linear.fake(input, weight, bias, activation)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, weight, bias, norm_weight, norm_bias, eps, activation, _, scale, precision, *_ = inputs
    ctx.save_for_backward(input, weight, bias, norm_weight, norm_bias, scale)
    ctx.terms = (eps, activation, precision)


def _backward(ctx: Any, grad_out: Tensor) -> Grads:
    input, weight, bias, norm_weight, norm_bias, scale = ctx.saved_tensors
    eps, activation, precision = ctx.terms
    wanted = ctx.needs_input_grad
    # of input, weight, bias, norm_weight, norm_bias, residual, scale
    needs = [*wanted[:5], wanted[7], wanted[8]]
    of_norm = [needs[0], needs[3], needs[4]]
    normed, mean, rstd = torch.ops.aten.native_layer_norm.default(
        input, list(input.shape[-1:]), norm_weight, norm_bias, eps
    )
    of_normed, of_weight, of_bias, of_scale = linear.gradients_of(
        grad_out, (normed, weight, bias, scale), activation, precision,
        (any(of_norm), needs[1], needs[2], needs[6]),
    )  # fmt: skip
    found: Grads = (None, None, None)
    if any(of_norm):
        grads = torch.ops.aten.native_layer_norm_backward.default(
            of_normed, input, list(input.shape[-1:]), mean, rstd, norm_weight, norm_bias, of_norm
        )
        found = needed(grads, of_norm)
    of_input, of_gain, of_shift = found
    residual = grad_out if needs[5] else None
    return (
        of_input, of_weight, of_bias, of_gain, of_shift, None, None, residual, of_scale, None, None,
        None,
    )  # fmt: skip


LAYER_NORM_LINEAR = register(
    Operator(
        name="layer_norm_linear",
        schema=_SCHEMA,
        reference=plain,
        fake=_fake,
        gradients=Gradients(setup_context=_setup_context, formula=_backward),
        kind="linear",
        terms=("input", "weight", "bias", "norm_weight", "norm_bias"),
    )
)
