"""`elsa_core.linear(norm=...)` and the operator `elsa::layer_norm_linear`."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import elsa_core as elsa
from elsa_core.errors import ArgumentError
from elsa_core.operators import LAYER_NORM_LINEAR
from elsa_core.operators.linear import ACTIVATIONS

EPS = 1e-3
NAMES = ("input", "weight", "bias", "norm_weight", "norm_bias", "residual", "scale")


def operands(dtype=torch.float64, **options):
    torch.manual_seed(0)
    shapes = ((2, 5, 8), (12, 8), (12,), (8,), (8,), (2, 5, 12), (12,))
    return {n: torch.randn(s, dtype=dtype, **options) for n, s in zip(NAMES, shapes, strict=True)}


def operator(given, activation="gelu"):
    first = [given[name] for name in NAMES[:5]]
    return LAYER_NORM_LINEAR.overload(
        *first, EPS, activation, given["residual"], given["scale"], "strict"
    )


def composed(given, activation="gelu"):
    x = functional.layer_norm(given["input"], (8,), given["norm_weight"], given["norm_bias"], EPS)
    out = functional.linear(x, given["weight"], given["bias"])
    activate = ACTIVATIONS[activation]
    out = out if activate is None else activate(out)
    out = out if given["scale"] is None else out * given["scale"]
    return out if given["residual"] is None else out + given["residual"]


def public(given, activation="gelu", **more):
    norm = (given["norm_weight"], given["norm_bias"], EPS)
    return elsa.linear(
        given["input"], given["weight"], given["bias"], activation=activation,
        residual=given["residual"], scale=given["scale"], norm=norm, **more,
    )  # fmt: skip


@pytest.mark.parametrize("left_out", [(), ("norm_weight",), ("norm_weight", "norm_bias"), ("bias",),
                                      ("residual", "scale")])  # fmt: skip
def test_is_its_parts(left_out):
    given = operands() | dict.fromkeys(left_out)
    assert torch.equal(operator(given), composed(given))
    assert torch.equal(public(given), composed(given))


@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_operator(activation):
    given = operands(torch.float32, requires_grad=True)
    arguments = (*(given[n] for n in NAMES[:5]), EPS, activation, given["residual"], given["scale"])
    torch.library.opcheck(LAYER_NORM_LINEAR.overload, arguments)


@pytest.mark.parametrize("activation", ["none", "silu"])
def test_derivatives(activation):
    given = operands(requires_grad=True)

    def called(*tensors):
        return operator(dict(zip(NAMES, tensors, strict=True)), activation)

    assert torch.autograd.gradcheck(called, list(given.values()))
    assert torch.autograd.gradgradcheck(called, list(given.values()))


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
            return operator(given | {"input": input}, "silu")

    layer, x = Layer(), given["input"]
    wanted = layer(x)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), wanted)
    torch.testing.assert_close(torch.export.export(layer, (x,)).module()(x), wanted)


def test_in_onnx(tmp_path):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    from elsa_core.exporting.onnx import export_onnx

    given = operands(torch.float32)

    class Layer(torch.nn.Module):
        def forward(self, input):
            out = operator(given | {"input": input})
            q = out.unflatten(-1, (2, 6)).transpose(1, 2)
            return elsa.attention(q, q, q)

    layer, file = Layer().eval(), tmp_path / "model.onnx"
    export_onnx(layer, (given["input"],), file, mode="standard", opset=18)
    graph = onnx.load(file).graph
    assert {node.domain for node in graph.node} == {""}
    session = runtime.InferenceSession(file)
    (out,) = session.run(None, {graph.input[0].name: given["input"].numpy()})
    wanted = layer(given["input"])
    torch.testing.assert_close(torch.from_numpy(out), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("norm", [(torch.ones(9), None, EPS), (None, torch.ones(2, 8), EPS)])
@pytest.mark.parametrize("call", [elsa.linear, elsa.explain_linear])
def test_a_norm_that_does_not_fit_is_named(call, norm):
    given = operands(torch.float32)
    with pytest.raises(ArgumentError, match="norm"):
        call(given["input"], given["weight"], norm=norm)


def test_autocast_and_forward_mode():
    given = operands(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(public(given), composed(given))
    given = operands()
    x = given["input"]
    _, tangent = torch.func.jvp(
        lambda x: public(given | {"input": x}), (x,), (torch.ones_like(x) * x,)
    )
    assert tangent.abs().max() > 0
