"""The operators `elsa::linear`, its gradients `elsa::linear_backward`, and `elsa::gated_linear`.

    out = residual + scale * activation(input @ weight.T + bias)
    out = activation(input @ weight.T + bias) * (input @ value.T + value_bias)

Layouts: input [..., K], weight and value [N, K], bias, value_bias and scale [N], residual and out
[..., N], one floating dtype, any strides. `activation` is a key of `ACTIVATIONS`. An absent term is
left out, not computed with zeros or ones.

`needs` of the backward says which gradients are wanted, of input, weight and bias: the others are
not computed and come back as an empty tensor [0], and so may input be where the weight's gradient
is not wanted, and weight where the input's is not. It is the backward of the product alone. Of a
gated call, or one with an activation or a scale, nothing but its operands is saved: the formula
computes the products again.

Source: Shazeer, GLU Variants Improve Transformer, arXiv 2002.05202.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from elsa_core.base import calls
from elsa_core.ops.factory import Backward, Grads, Operator, register
from elsa_core.ops.formulas import keep, second

_SCHEMA = (
    '(Tensor input, Tensor weight, Tensor? bias, str activation="none", Tensor? residual=None, '
    'Tensor? scale=None, str precision="strict") -> Tensor'
)
_BACKWARD_SCHEMA = (
    "(Tensor grad_out, Tensor input, Tensor weight, str precision, bool[] needs) "
    "-> (Tensor, Tensor, Tensor)"
)
_GATED_SCHEMA = (
    "(Tensor input, Tensor weight, Tensor? bias, Tensor value, Tensor? value_bias, "
    'str activation="silu", str precision="strict") -> Tensor'
)
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor] | None] = {
    "none": None,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": functional.silu,
    "relu": functional.relu,
}


def epilogue(
    product: Tensor, activation: str, residual: Tensor | None, scale: Tensor | None
) -> Tensor:
    """residual + scale * activation(product) in PyTorch's own operations: [..., N] -> [..., N]."""
    activate = ACTIVATIONS[activation]
    out = product if activate is None else activate(product)
    if scale is not None:
        out = out * scale
    # the product comes first: the sum is laid out like it
    return out if residual is None else out + residual


def plain(
    input: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "none",
    residual: Tensor | None = None, scale: Tensor | None = None, precision: str = "strict",
) -> Tensor:  # fmt: skip
    """PyTorch's own, in the dtype of the operands also where autocast is on."""
    with torch.autocast(input.device.type, enabled=False):
        return epilogue(functional.linear(input, weight, bias), activation, residual, scale)


def plain_backward(
    grad_out: Tensor, input: Tensor, weight: Tensor, precision: str, needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of input @ weight.T + bias by PyTorch's products."""
    with torch.autocast(grad_out.device.type, enabled=False):
        rows, inputs = (torch.atleast_2d(t).flatten(0, -2) for t in (grad_out, input))
        return (
            grad_out @ weight if needs[0] else grad_out.new_empty(0),
            rows.t() @ inputs if needs[1] else grad_out.new_empty(0),
            rows.sum(0) if needs[2] else grad_out.new_empty(0),
        )


def fake(
    input: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "none",
    residual: Tensor | None = None, scale: Tensor | None = None, precision: str = "strict",
) -> Tensor:  # fmt: skip
    """What the operator returns, on fake tensors."""
    torch._check(weight.dim() == 2, lambda: f"weight must be [N, K], not {list(weight.shape)}")
    torch._check(
        input.shape[-1] == weight.shape[1],
        lambda: f"input {list(input.shape)} and weight {list(weight.shape)}: channels differ",
    )
    torch._check(activation in ACTIVATIONS, lambda: f"activation {activation!r} is unknown")
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


def _backward_fake(
    grad_out: Tensor, input: Tensor, weight: Tensor, precision: str, needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    columns, none = grad_out.shape[-1], (0,)
    return (
        grad_out.new_empty((*grad_out.shape[:-1], weight.shape[1]) if needs[0] else none),
        grad_out.new_empty((columns, input.shape[-1]) if needs[1] else none),
        grad_out.new_empty((columns,) if needs[2] else none),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, weight, bias, activation, _, scale, precision = inputs
    again = activation != "none" or scale is not None  # the product, in the formula
    wanted = ctx.needs_input_grad
    ctx.save_for_backward(
        input if again or wanted[1] else None,
        weight if again or wanted[0] else None,
        bias if again else None,
        scale,
    )
    ctx.terms = (activation, precision, again)


def _backward(operator: Any, ctx: Any, grad_out: Tensor) -> Grads:
    activation, precision, again = ctx.terms
    wanted = [*ctx.needs_input_grad, *(False,) * (6 - len(ctx.needs_input_grad))]
    input, weight, bias, scale = ctx.saved_tensors
    of_residual = grad_out if wanted[4] else None
    if not again:
        grads = _gradients(operator, grad_out, input, weight, precision, wanted[:3])
        return *grads, None, of_residual, None, None
    product, plainly = torch.ops.elsa.linear.default, ("none", None, None, precision)
    found = second(
        lambda *given: (epilogue(product(*given[:3], *plainly), activation, None, given[3]),),
        (input, weight, bias, scale), (), (*wanted[:3], wanted[5]), (grad_out,),
    )  # fmt: skip
    return *found[:3], None, of_residual, found[3], None


def _gradients(
    compute: Any, grad_out: Tensor, input: Tensor | None, weight: Tensor | None, precision: str,
    wanted: Sequence[bool],
) -> Grads:  # fmt: skip
    """Gradients of input, weight and bias, None where one is not wanted.

    `compute` takes what `elsa::linear_backward` takes. The bias's sum is PyTorch's on every device,
    and not part of that call: what is left are launches alone, which the CUDA library keeps.
    """
    of_bias = None
    if wanted[2]:
        of_bias = torch.atleast_2d(grad_out).flatten(0, -2).sum(0, dtype=grad_out.dtype)
    if not any(wanted[:2]):
        return None, None, of_bias
    none = grad_out.new_empty(0)
    of_input, of_weight, _ = compute(
        grad_out, none if input is None else input, none if weight is None else weight, precision,
        [*wanted[:2], False],
    )  # fmt: skip
    return of_input if wanted[0] else None, of_weight if wanted[1] else None, of_bias


class Eager(torch.autograd.Function):
    """A product and its gradients by the functions given, for eager calls that autograd records.

    `forward` takes input, weight, bias, precision, `kernel` and `backward`: the last two what the
    operators `elsa::linear` and `elsa::linear_backward` take. The Python layers of
    `torch.library.register_autograd` take the host more time than all else of a call. Only for
    calls that none of `calls.traced` sees.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, precision: str, kernel: Any,
        backward: Any,
    ) -> Tensor:  # fmt: skip
        wanted = ctx.needs_input_grad
        ctx.save_for_backward(input if wanted[1] else None, weight if wanted[0] else None)
        ctx.terms = (precision, backward)
        out: Tensor = kernel(input, weight, bias, "none", None, None, precision)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Grads:
        input, weight = ctx.saved_tensors
        precision, compute = ctx.terms
        if calls.by_operator(grad_out):
            compute = torch.ops.elsa.linear_backward.default
        wanted = ctx.needs_input_grad[:3]
        grads = _gradients(compute, grad_out, input, weight, precision, wanted)
        return *grads, None, None, None


LINEAR = register(
    Operator(
        name="linear",
        schema=_SCHEMA,
        reference=plain,
        fake=fake,
        setup_context=_setup_context,
        formula=_backward,
        backward=Backward(
            _BACKWARD_SCHEMA,
            _backward_fake,
            plain_backward,
            lambda ctx, *grads: second(
                plain_backward, ctx.saved_tensors, ctx.terms, ctx.needs_input_grad, grads
            ),
            lambda ctx, inputs, output: keep(ctx, inputs[:3], inputs[3:]),
        ),
        kind="linear",
        terms=("input", "weight", "bias"),
        onnx="elsa_core.exporting.onnx_linear:EXPORT",
    )
)


def plain_gated(
    input: Tensor, weight: Tensor, bias: Tensor | None, value: Tensor, value_bias: Tensor | None,
    activation: str = "silu", precision: str = "strict",
) -> Tensor:  # fmt: skip
    """PyTorch's own, in the dtype of the operands also where autocast is on."""
    with torch.autocast(input.device.type, enabled=False):
        gate = plain(input, weight, bias, activation)
        return gate * functional.linear(input, value, value_bias)


def _gated_fake(
    input: Tensor, weight: Tensor, bias: Tensor | None, value: Tensor, value_bias: Tensor | None,
    activation: str = "silu", *rest: Any,
) -> Tensor:  # fmt: skip
    torch._check(
        weight.shape == value.shape,
        lambda: f"weight {list(weight.shape)} and value {list(value.shape)}: shapes differ",
    )
    return fake(input, weight, bias, activation)


def _gated_backward(ctx: Any, grad_out: Tensor) -> Grads:
    activation, precision = ctx.terms
    product, plainly = torch.ops.elsa.linear.default, ("none", None, None, precision)
    grads = second(
        lambda input, weight, bias, *other: (
            epilogue(product(input, weight, bias, *plainly), activation, None, None)
            * product(input, *other, *plainly),
        ),
        ctx.saved_tensors, (), ctx.needs_input_grad[:5], (grad_out,),
    )  # fmt: skip
    return *grads, None, None


GATED_LINEAR = register(
    Operator(
        name="gated_linear",
        schema=_GATED_SCHEMA,
        reference=plain_gated,
        fake=_gated_fake,
        setup_context=lambda ctx, inputs, output: keep(ctx, inputs[:5], inputs[5:]),
        formula=_gated_backward,
        kind="linear",
        terms=("input", "weight", "bias", "value", "value_bias"),
    )
)
