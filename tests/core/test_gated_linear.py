"""`elsa_core.linear(value=...)` and the operator `elsa::gated_linear`."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import elsa_core as elsa
from elsa_core.errors import ArgumentError
from elsa_core.operators import GATED_LINEAR
from elsa_core.operators.linear import ACTIVATIONS

EPS = 1e-3
NAMES = ("input", "weight", "bias", "value", "value_bias", "norm_weight", "norm_bias")


def operands(dtype=torch.float64, **options):
    torch.manual_seed(0)
    shapes = ((2, 5, 8), (12, 8), (12,), (12, 8), (12,), (8,), (8,))
    return {n: torch.randn(s, dtype=dtype, **options) for n, s in zip(NAMES, shapes, strict=True)}


def operator(given, activation="silu", eps=EPS):
    first = [given[name] for name in NAMES[:5]]
    return GATED_LINEAR.overload(
        *first, activation, given["norm_weight"], given["norm_bias"], eps, "strict"
    )


def public(given, activation="silu", eps=EPS, **more):
    norm = None if eps is None else (given["norm_weight"], given["norm_bias"], eps)
    return elsa.linear(
        given["input"], given["weight"], given["bias"], activation=activation, norm=norm,
        value=(given["value"], given["value_bias"]), **more,
    )  # fmt: skip


def composed(given, activation="silu", eps=EPS):
    x = given["input"]
    if eps is not None:
        x = functional.layer_norm(x, (8,), given["norm_weight"], given["norm_bias"], eps)
    gate = functional.linear(x, given["weight"], given["bias"])
    activate = ACTIVATIONS[activation]
    gate = gate if activate is None else activate(gate)
    return gate * functional.linear(x, given["value"], given["value_bias"])


@pytest.mark.parametrize("left_out", [(), ("bias",), ("value_bias", "norm_bias"), ("bias",
                                      "value_bias", "norm_weight", "norm_bias")])  # fmt: skip
@pytest.mark.parametrize("eps", [None, EPS])
def test_is_its_parts(left_out, eps):
    given = operands() | dict.fromkeys(left_out)
    assert torch.equal(operator(given, eps=eps), composed(given, eps=eps))
    assert torch.equal(public(given, eps=eps), composed(given, eps=eps))


def test_a_residual_and_a_scale_come_after_the_gate():
    given, residual, scale = operands(), torch.randn(2, 5, 12).double(), torch.rand(12).double()
    out = public(given, "gelu", residual=residual, scale=scale)
    assert torch.equal(out, composed(given, "gelu") * scale + residual)


@pytest.mark.parametrize("eps", [None, EPS])
def test_operator(eps):
    given = operands(torch.float32, requires_grad=True)
    norms = (given["norm_weight"], given["norm_bias"]) if eps else (None, None)
    arguments = (*(given[n] for n in NAMES[:5]), "gelu", *norms, eps)
    torch.library.opcheck(GATED_LINEAR.overload, arguments)


@pytest.mark.parametrize(("activation", "eps"), [("none", EPS), ("silu", EPS), ("gelu", None)])
def test_derivatives(activation, eps):
    given = operands(requires_grad=True)
    tensors = list(given.values())[: None if eps else 5]

    def called(*tensors):
        given = dict.fromkeys(NAMES) | dict(zip(NAMES, tensors, strict=False))
        return operator(given, activation, eps)

    assert torch.autograd.gradcheck(called, tensors)
    assert torch.autograd.gradgradcheck(called, tensors)


@pytest.mark.parametrize("wanted", NAMES)
def test_one_gradient_alone(wanted):
    given = operands()
    given[wanted].requires_grad_()
    grads = [
        torch.autograd.grad(call(given).square().sum(), given[wanted])[0]
        for call in (operator, public, composed)
    ]
    torch.testing.assert_close(grads[0], grads[2])
    torch.testing.assert_close(grads[1], grads[2])


def test_compiled_and_exported():
    given = operands(torch.float32)

    class Layer(torch.nn.Module):
        def forward(self, input):
            return operator(given | {"input": input})

    layer, x = Layer(), given["input"]
    wanted = layer(x)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), wanted)
    torch.testing.assert_close(torch.export.export(layer, (x,)).module()(x), wanted)


@pytest.mark.parametrize(
    "value",
    [
        (torch.ones(12, 9), None),
        (torch.ones(8, 8), None),
        (torch.ones(12, 8), torch.ones(8)),
        (torch.ones(12, 8),),
        torch.ones(12, 8),
    ],
)
@pytest.mark.parametrize("call", [elsa.linear, elsa.explain_linear])
def test_a_value_that_does_not_fit_is_named(call, value):
    given = operands(torch.float32)
    with pytest.raises(ArgumentError, match=r"^value"):
        call(given["input"], given["weight"], value=value)


def test_forward_mode():
    given = operands()
    x = given["input"]
    _, tangent = torch.func.jvp(
        lambda x: public(given | {"input": x}), (x,), (torch.ones_like(x) * x,)
    )
    assert tangent.abs().max() > 0
