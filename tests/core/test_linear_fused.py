"""`elsa_core.linear` with activation, LayerScale and residual, its gradients, and split weights."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

import elsa_core as elsa
from elsa_core.errors import ArgumentError
from elsa_core.operators.linear import ACTIVATIONS, Eager, plain, plain_backward, plain_split

OPERATOR = torch.ops.elsa.linear.default
BACKWARD = torch.ops.elsa.linear_backward.default
SPLIT = torch.ops.elsa.split_weight.default

# What each activation is in PyTorch, written out.
WANTED = {
    "none": lambda x: x,
    "gelu": functional.gelu,
    "gelu_tanh": torch.nn.GELU(approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": torch.nn.SiLU(),
    "relu": torch.relu,
}


def operands(dtype=torch.float64, **options):
    torch.manual_seed(0)
    shapes = {"input": (2, 5, 8), "weight": (12, 8), "bias": (12,), "residual": (2, 5, 12),
              "scale": (12,)}  # fmt: skip
    return {name: torch.randn(shape, dtype=dtype, **options) for name, shape in shapes.items()}


def positional(given, activation):
    order = ("input", "weight", "bias")
    return *(given[name] for name in order), activation, given["residual"], given["scale"]


def test_every_activation_is_tested():
    assert WANTED.keys() == ACTIVATIONS.keys()


@pytest.mark.parametrize("activation", WANTED)
@pytest.mark.parametrize("left_out", [(), ("bias",), ("residual",), ("scale",), ("bias", "scale")])
def test_is_its_parts(activation, left_out):
    given = operands()
    for name in left_out:
        given[name] = None
    out = WANTED[activation](functional.linear(given["input"], given["weight"], given["bias"]))
    out = out if given["scale"] is None else given["scale"] * out
    out = out if given["residual"] is None else given["residual"] + out
    assert torch.equal(elsa.linear(**given, activation=activation), out)
    assert torch.equal(OPERATOR(*positional(given, activation)), out)


@pytest.mark.parametrize("activation", WANTED)
def test_operator(activation):
    given = operands(torch.float32, requires_grad=True)
    torch.library.opcheck(OPERATOR, positional(given, activation))


def test_a_turned_input():
    given = operands(torch.float32)
    given["input"] = given["input"].transpose(0, 1)
    given["residual"] = given["residual"].transpose(0, 1)
    torch.library.opcheck(OPERATOR, positional(given, "gelu"))


@pytest.mark.parametrize("activation", WANTED)
def test_derivatives_of_the_operator(activation):
    given = operands(requires_grad=True)
    tensors = list(given.values())

    def called(input, weight, bias, residual, scale):
        return OPERATOR(input, weight, bias, activation, residual, scale)

    assert torch.autograd.gradcheck(called, tensors)
    assert torch.autograd.gradgradcheck(called, tensors)


@pytest.mark.parametrize("wanted", ["input", "weight", "bias", "residual", "scale"])
def test_one_gradient_alone(wanted):
    given = operands()
    given[wanted].requires_grad_()

    def grads(call):
        return torch.autograd.grad(call().square().sum(), given[wanted])[0]

    def reference():
        product = functional.linear(given["input"], given["weight"], given["bias"])
        return given["residual"] + given["scale"] * functional.gelu(product)

    peer = grads(reference)
    torch.testing.assert_close(grads(lambda: elsa.linear(**given, activation="gelu")), peer)
    torch.testing.assert_close(grads(lambda: OPERATOR(*positional(given, "gelu"))), peer)


@pytest.mark.parametrize("needs", [(True, False, False), (False, True, True), (True, True, True)])
def test_the_backward_computes_what_is_wanted(needs):
    given = operands(torch.float32)
    grad = torch.randn(2, 5, 12)
    absent = torch.empty(0)
    input = given["input"] if needs[1] else absent
    weight = given["weight"] if needs[0] else absent
    found = BACKWARD(grad, input, weight, "strict", needs)
    peers = (grad @ given["weight"], torch.einsum("bni,bnj->ij", grad, given["input"]),
             grad.sum((0, 1)))  # fmt: skip
    for result, peer, wanted in zip(found, peers, needs, strict=True):
        if wanted:
            torch.testing.assert_close(result, peer)
        else:
            assert result.shape == (0,)
    torch.library.opcheck(BACKWARD, (grad.requires_grad_(), input, weight, "strict", list(needs)))


def test_a_gradient_keeps_the_product_as_pytorch_does():
    """The public call is composed where a gradient is wanted: no product is computed twice."""
    given = operands(requires_grad=True)
    before = torch.autograd.graph.get_gradient_edge(elsa.linear(**given, activation="gelu"))
    assert "elsa" not in before.node.name() and "Add" in before.node.name()


def test_compiled_and_exported():
    given = operands(torch.float32)

    class Layer(torch.nn.Module):
        def forward(self, input, residual):
            return elsa.linear(
                input, given["weight"], given["bias"], activation="silu", residual=residual,
                scale=given["scale"],
            )  # fmt: skip

    layer, arguments = Layer(), (given["input"], given["residual"])
    wanted = layer(*arguments)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*arguments), wanted)
    program = torch.export.export(layer, arguments)
    torch.testing.assert_close(program.module()(*arguments), wanted)


def test_compiled_training():
    given = operands(torch.float32, requires_grad=True)
    compiled = torch.compile(
        lambda **terms: elsa.linear(**terms, activation="gelu"), fullgraph=True, backend="aot_eager"
    )
    ours = torch.autograd.grad(compiled(**given).square().sum(), list(given.values()))
    eager = elsa.linear(**given, activation="gelu").square().sum()
    for found, peer in zip(ours, torch.autograd.grad(eager, list(given.values())), strict=True):
        torch.testing.assert_close(found, peer)


def test_transforms_and_forward_mode():
    given = operands()

    def called(x):
        return elsa.linear(**{**given, "input": x}, activation="gelu")

    x = given["input"]
    _, tangent = torch.func.jvp(called, (x,), (torch.ones_like(x),))
    assert tangent.abs().max() > 0
    jacobian = torch.func.jacrev(called)(x)
    torch.testing.assert_close(torch.einsum("abcdef->abc", jacobian), tangent)


def test_dtypes_are_promoted_as_pytorch_does():
    given = operands(torch.bfloat16)
    given["scale"] = given["scale"].float()
    assert elsa.linear(**given).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert elsa.linear(**operands(torch.float32)).dtype == torch.float32
        plain = operands(torch.float32)
        assert elsa.linear(plain["input"], plain["weight"]).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("input", torch.randn(2, 5, 9)),
        ("input", torch.ones(2, 5, 8, dtype=torch.int64)),
        ("weight", torch.randn(8)),
        ("bias", torch.randn(1)),
        ("scale", torch.randn(2, 5, 12)),
        ("residual", torch.randn(5, 12)),
        ("activation", "gelu_"),
        ("precision", "exact"),
        ("precision", "turbo"),  # takes float32 alone
        ("backend", "none"),
    ],
)
@pytest.mark.parametrize("call", [elsa.linear, elsa.explain_linear])
def test_what_does_not_fit_is_named(call, name, value):
    given = operands() | {name: value}
    with pytest.raises(ArgumentError, match=name):
        call(**given)


def test_a_weight_in_halves():
    torch.manual_seed(0)
    rows = 10.0 ** torch.linspace(-44, 38, 42).double()
    weight = (torch.randn(42, 67).double().clamp(-3, 3) * rows[:, None]).float()
    halves, powers = SPLIT(weight)
    assert halves.shape == (2, 42, 72) and halves.dtype == torch.float16
    assert not halves[..., 67:].any()
    assert powers.shape == (42,) and powers.dtype == torch.float32
    most = weight.abs().amax(1).double() / powers.double()
    normal = powers > 2.0**-126
    assert torch.equal(powers.double().log2(), powers.double().log2().round())
    assert normal.sum() > 30
    assert ((most >= 2**13) & (most < 2**14))[normal].all() and (most < 2**14).all()
    joined = halves[..., :67].double().sum(0) * powers.double()[:, None]
    error = (joined - weight.double()).abs().amax(1)
    # 22 bits of the row's largest entry, or all of its bits where it is denormal
    assert (error <= weight.abs().amax(1).double() * 2.0**-22).all()


@pytest.mark.parametrize("entry", [0.0, float("inf"), float("-inf"), float("nan")])
def test_rows_without_a_power(entry):
    weight = torch.randn(3, 5)
    weight[1] = 0.0
    weight[1, 2] = entry
    halves, powers = plain_split(weight)
    assert powers[1] == (1.0 if entry else 0.0) and powers[0] != 1.0
    assert halves[:, (0, 2)].isfinite().all()
    assert torch.equal(halves[0, 1, :5], weight[1].half()) or entry != entry


def test_the_split_as_an_operator():
    torch.library.opcheck(SPLIT, (torch.randn(4, 7),))
    torch.library.opcheck(SPLIT, (torch.randn(7, 8).t(),))
    halves, powers = SPLIT(torch.empty(3, 0))
    assert halves.shape == (2, 3, 0) and torch.equal(powers, torch.zeros(3))
    with pytest.raises(RuntimeError, match="float32"):
        SPLIT(torch.randn(2, 3, device="meta", dtype=torch.float64))


def test_split_weights_are_not_read_without_a_kernel():
    given = operands(torch.float32)
    halves, powers = SPLIT(given["weight"])
    out = OPERATOR(*positional(given, "gelu"), "strict", halves * 0, powers)
    assert torch.equal(out, OPERATOR(*positional(given, "gelu")))


@pytest.mark.parametrize("wanted", [(True, True, True), (True, False, False), (False, True, True)])
def test_recorded_in_fewer_steps(wanted):
    """The eager form has the operator's gradients, of both orders, and saves what they need."""
    torch.manual_seed(0)
    leaves = [torch.randn(*shape, dtype=torch.float64) for shape in ((2, 5, 8), (3, 8), (3,))]
    for leaf, needed in zip(leaves, wanted, strict=True):
        leaf.requires_grad_(needed)

    def short(*given):
        return Eager.apply(*given, "strict", plain, plain_backward)

    assert torch.equal(short(*leaves), OPERATOR(*leaves))
    assert torch.autograd.gradcheck(short, leaves)
    assert torch.autograd.gradgradcheck(short, leaves)
    saved = short(*leaves).grad_fn.saved_tensors
    assert [t is not None for t in saved] == [wanted[1], wanted[0]]


@pytest.mark.parametrize("forms", [(), ("gated",), ("norm",), ("gated", "norm")])
@pytest.mark.parametrize("terms", ["norm", "value", "both"])
def test_what_is_explained_is_of_the_launch_that_serves(monkeypatch, forms, terms):
    """A norm or a gate has a launch of its own where that was measured; else parts are told."""
    from elsa_core.backends.triton.linear import gate

    monkeypatch.setattr(gate, "_least_served", lambda device: 0)
    monkeypatch.setattr(gate, "linear_form", lambda form, device: form in forms)
    with FakeTensorMode():
        x, w = torch.empty(64, 32, device="cuda"), torch.empty(48, 32, device="cuda")
        named = {}
        if terms != "value":
            named["norm"] = (torch.empty(32, device="cuda"), None, 1e-6)
        if terms != "norm":
            named["value"] = (torch.empty(48, 32, device="cuda"), None)
        route = elsa.explain_linear(x, w, **named)
        learnt = elsa.explain_linear(x, w.requires_grad_(), **named)
    wanted = {"norm": {"norm"}, "value": {"gated"}, "both": {"norm", "gated"}}[terms]
    apart = not wanted <= set(forms)
    assert route.backend == "triton"  # of the products alone otherwise
    assert any("not measured" in reason for reason in route.reasons) is apart
    assert any("without gradients" in reason for reason in learnt.reasons)
