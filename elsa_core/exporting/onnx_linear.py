"""`elsa::linear` in ONNX: the node `Linear` and its body.

The node's weight lies as MatMul takes it, [K, N]: torch.onnx folds the transposition, and a runtime
that does not optimise has none to compute. The library holds no kernel of it, so that every runtime
runs the body, in which ONNX Runtime finds what it fuses: the product with its bias, and GELU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, Node
from torch.fx.operator_schemas import normalize_function

from elsa_core.exporting.onnx_operator import (
    DTYPES,
    OnnxExport,
    OnnxOperator,
    Value,
    Writer,
    call,
)

if TYPE_CHECKING:
    import onnx_ir as ir

_GELU_OPSET = 20  # the first that has the standard `Gelu`


def _replace_linear(graph: Graph, node: Node) -> None:
    """One node, where the operands share a dtype that it takes; else the operator's portable form
    is written."""
    at: Any = node
    normal = normalize_function(at.target, at.args, at.kwargs, normalize_to_only_use_kwargs=True)
    given: dict[str, Any] = {} if normal is None else normal.kwargs
    terms = [given[name] for name in ("bias", "residual", "scale")]
    tensors = [each for each in (given["input"], given["weight"], *terms) if each is not None]
    dtypes = {each.meta["val"].dtype for each in tensors}
    if len(dtypes) > 1 or not dtypes <= DTYPES.keys() - {torch.bool}:
        return
    weight = given["weight"]
    with graph.inserting_before(node):
        turned = call(graph, node, torch.ops.aten.t.default, (weight,), weight.meta["val"].t())
        operands = (given["input"], turned, *terms)
        out = LINEAR.call(graph, node, operands, (given["activation"],), node.meta["val"])
    node.replace_all_uses_with(out)


def _needs(node: ir.Node, given: dict[str, ir.Value], newest: bool) -> tuple[set[str], set[str]]:
    traits = {node.attributes.get_string("activation") or "none"}
    dtype = given["input"].dtype
    if dtype is not None and dtype.name != "FLOAT":
        traits.add("half")
    return traits, set()


def _body(op: Writer, x: Value, weight: Value, bias: Value, residual: Value, scale: Value) -> Value:
    """residual + scale * activation(x @ weight + bias), in the order of `epilogue`.

    In half precision a formula is computed in float32 and rounded once, as PyTorch's kernels do:
    its steps, each rounded, would be several times as far from the value.
    """
    out = op.MatMul(x, weight)
    if bias:
        out = op.Add(out, bias)
    name = next((name for name in ACTIVATIONS if name in op.traits), None)
    if name in ("gelu", "gelu_tanh") and op.opset >= _GELU_OPSET:
        out = op.Gelu(out, approximate="tanh" if name == "gelu_tanh" else "none")
    elif name == "relu" or (name and "half" not in op.traits):
        out = ACTIVATIONS[name](op, out)
    elif name:
        out = op.CastLike(ACTIVATIONS[name](op, op.Cast(out, to=1)), out)
    if scale:
        out = op.Mul(out, scale)
    return op.Add(out, residual) if residual else out


ACTIVATIONS: dict[str, Callable[[Any, Value], Value]] = {
    # in the order that ONNX Runtime fuses
    "gelu": lambda op, x: op.Mul(op.Mul(x, op.Add(op.Erf(op.Div(x, math.sqrt(2.0))), 1.0)), 0.5),
    "gelu_tanh": lambda op, x: op.Mul(op.Mul(x, op.Add(op.Tanh(op.Mul(
        op.Add(x, op.Mul(op.Pow(x, 3.0), 0.044715)), math.sqrt(2.0 / math.pi)
    )), 1.0)), 0.5),
    "quick_gelu": lambda op, x: op.Mul(x, op.Sigmoid(op.Mul(x, 1.702))),
    "silu": lambda op, x: op.Mul(x, op.Sigmoid(x)),
    "relu": lambda op, x: op.Relu(x),
}  # fmt: skip

LINEAR = OnnxOperator(
    name="Linear",
    inputs=("input", "weight", "bias", "residual", "scale"),
    attributes={"activation": "STRING"},
    write=_body,
    needs=_needs,
    kernel=False,
)
EXPORT = OnnxExport(operators=(LINEAR,), rewrite=_replace_linear)


def translations(opset: int) -> dict[Any, Callable[..., Any]]:
    """GELU for opsets that have none: torch.onnx multiplies in an order that ONNX Runtime does not
    fuse."""
    if opset >= _GELU_OPSET:
        return {}

    def translate(self: Any, approximate: str = "none") -> Any:
        import onnx_ir as ir
        from onnxscript import opset18

        class Typed:
            """Operators whose numbers have the input's type: that of a step is not known here."""

            def __getattr__(_, op_type: str) -> Callable[..., Any]:  # noqa: N805
                return lambda *given: getattr(opset18, op_type)(
                    *(ir.tensor(x, dtype=self.dtype) if isinstance(x, float) else x for x in given)
                )

        return ACTIVATIONS["gelu_tanh" if approximate == "tanh" else "gelu"](Typed(), self)

    return {torch.ops.aten.gelu.default: translate}
