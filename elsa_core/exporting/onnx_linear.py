"""`elsa::linear` in ONNX: the node `Linear` and its body.

The node's weight lies as MatMul takes it, [K, N]: torch.onnx folds the transposition, and a runtime
that does not optimise has none to compute. The library holds no kernel of it, so that every runtime
runs the body, in which ONNX Runtime finds what it fuses: the product with its bias, and GELU.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.fx import Graph, Node

from elsa_core.exporting.onnx_operator import (
    Body,
    OnnxExport,
    OnnxOperator,
    arguments,
    call,
    take_over,
    value_of,
)

if TYPE_CHECKING:
    import onnx_ir as ir

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_GELU_OPSET = 20  # the first that has the standard `Gelu`


def _replace_linear(graph: Graph, node: Node) -> None:
    """One node, where the operands share a dtype that it takes; else the operator's portable form
    is written."""
    given = arguments(node)
    input, weight = given["input"], given["weight"]
    terms = [given[name] for name in ("bias", "residual", "scale")]
    dtypes = {value_of(t).dtype for t in (input, weight, *terms) if t is not None}
    if len(dtypes) > 1 or not dtypes <= set(_DTYPES):
        return
    with graph.inserting_before(node):
        turned = call(graph, node, torch.ops.aten.t.default, (weight,), value_of(weight).t())
        out = call(
            graph, node, LINEAR.overload, (input, turned, *terms, given["activation"]),
            value_of(node),
        )  # fmt: skip
    take_over(graph, node, out)


def _fake(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    scale: Tensor | None,
    activation: str,
) -> Tensor:
    return input.new_empty((*input.shape[:-1], weight.shape[1]))


def _needs(node: ir.Node, given: dict[str, ir.Value], newest: bool) -> tuple[set[str], set[str]]:
    traits = {node.attributes.get_string("activation") or "none"}
    dtype = given["input"].dtype
    if dtype is not None and dtype.name != "FLOAT":
        traits.add("half")
    return traits, set()


def _lines(body: Body) -> list[str]:
    """residual + scale * activation(input @ weight + bias), in the order of `epilogue`."""
    lines, last = ["product = MatMul(input, weight)"], "product"
    if "bias" in body:
        lines.append(f"biased = Add({last}, bias)")
        last = "biased"
    activation = next((name for name in _ACTIVATIONS if name in body.traits), None)
    if activation is not None:
        lines += _activated(body, activation, last)
        last = "activated"
    if "scale" in body:
        lines.append(f"scaled = Mul({last}, scale)")
        last = "scaled"
    if "residual" in body:
        lines.append(f"summed = Add({last}, residual)")
    _, _, result = lines[-1].partition(" = ")
    return [*lines[:-1], f"out = {result}"]


def _activated(body: Body, name: str, x: str) -> list[str]:
    """`activated` of x. In half precision a formula is computed in float32 and rounded once, as
    PyTorch's kernels do: its steps, each rounded, would be several times as far from the value.
    """
    steps = _ACTIVATIONS[name]
    if body.opset >= _GELU_OPSET:
        steps = _GELU_OPERATORS.get(name, steps)
    if "half" not in body or len(steps) == 1:  # an operator rounds once by itself
        return [step.format(x=x, out="activated") for step in steps]
    wide = [step.format(x="wide", out="result") for step in steps]
    return [f"wide = Cast<to = 1>({x})", *wide, f"activated = CastLike(result, {x})"]


def _number(name: str, value: float) -> str:
    return f"{name} = Constant<value = float {{{{{value!r}}}}}>()"


# Each activation in steps from {x} to {out}. Those of GELU are the ones that ONNX Runtime fuses.
_ACTIVATIONS: dict[str, tuple[str, ...]] = {
    "gelu": (
        _number("root", math.sqrt(2.0)),
        _number("one", 1.0),
        _number("half", 0.5),
        "quotient = Div({x}, root)",
        "error = Erf(quotient)",
        "shifted = Add(error, one)",
        "twice = Mul({x}, shifted)",
        "{out} = Mul(twice, half)",
    ),
    "gelu_tanh": (
        _number("three", 3.0),
        _number("small", 0.044715),
        _number("steep", math.sqrt(2.0 / math.pi)),
        _number("one", 1.0),
        _number("half", 0.5),
        "cube = Pow({x}, three)",
        "part = Mul(cube, small)",
        "inner = Add({x}, part)",
        "stretched = Mul(inner, steep)",
        "tangent = Tanh(stretched)",
        "shifted = Add(tangent, one)",
        "twice = Mul({x}, shifted)",
        "{out} = Mul(twice, half)",
    ),
    "quick_gelu": (
        _number("steep", 1.702),
        "stretched = Mul({x}, steep)",
        "gate = Sigmoid(stretched)",
        "{out} = Mul({x}, gate)",
    ),
    "silu": ("gate = Sigmoid({x})", "{out} = Mul({x}, gate)"),
    "relu": ("{out} = Relu({x})",),
}
_GELU_OPERATORS = {
    "gelu": ("{out} = Gelu({x})",),
    "gelu_tanh": ('{out} = Gelu<approximate = "tanh">({x})',),
}

LINEAR = OnnxOperator(
    name="Linear",
    call="linear",
    inputs=("input", "weight", "bias?", "residual?", "scale?"),
    attributes=(("activation", "str"),),
    fake=_fake,
    lines=_lines,
    needs=_needs,
    kernel=False,
)
EXPORT = OnnxExport(operators=(LINEAR,), rewrite=_replace_linear)
