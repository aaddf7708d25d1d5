"""Nodes of the domain `elsa` in an exported graph, and their functions."""

from __future__ import annotations

import ast
import contextlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from elsa_core.errors import ExportError
from elsa_core.exporting.onnx_linear import ACTIVATIONS, GELU_OPSET
from elsa_core.exporting.onnx_operator import (
    ATTENTION_OPSET,
    ATTRIBUTE_TYPES,
    DOMAIN,
    VARIANTS_MAX,
    Body,
    OnnxOperator,
    onnx_operators,
)

if TYPE_CHECKING:
    import onnx_ir as ir

_OLDEST_IR = 8  # the first with functions, and all that opset 18 needs: old runtimes read no newer
_SCOPES = "pkg.torch.onnx.name_scopes"


def translations(opset: int) -> dict[Any, Callable[..., Any]]:
    """What torch.onnx makes of the operators of `elsa_onnx`, and of GELU where there is none."""
    table = {each.overload: _translation(each) for each in onnx_operators().values()}
    if opset < GELU_OPSET:  # torch.onnx multiplies in an order that ONNX Runtime does not fuse
        table[torch.ops.aten.gelu.default] = _gelu
    return table


def _gelu(self: Any, approximate: str = "none") -> Any:
    import onnx_ir as ir
    from onnxscript import opset18

    class Typed:
        """Operators whose numbers have the input's type: that of a step is not known here."""

        def __getattr__(self, op_type: str) -> Callable[..., Any]:
            return lambda *given: getattr(opset18, op_type)(*map(typed, given))

    def typed(given: Any) -> Any:
        return ir.tensor(given, dtype=self.dtype) if isinstance(given, float) else given

    return ACTIVATIONS["gelu_tanh" if approximate == "tanh" else "gelu"](Typed(), self)


def _translation(operator: OnnxOperator) -> Callable[..., Any]:
    """One node, from positional arguments in the order of the operator's schema."""
    import onnx
    from onnxscript.values import Op, Opset

    if not onnx.defs.has(operator.name, DOMAIN):  # onnxscript asks onnx's own registry
        onnx.defs.register_schema(_schema(operator))
    op = Op(Opset(DOMAIN, 1), operator.name, onnx.defs.get_schema(operator.name, 1, DOMAIN))
    count = len(operator.inputs)

    def translate(*given: Any) -> Any:
        values = zip(operator.attributes, given[count:], strict=True)
        attributes = {name: int(v) if kind == "bool" else v for (name, kind), v in values}
        return op(*given[:count], **attributes)

    names = [name for name, _ in (*operator.parameters, *operator.attributes)]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    # torch.onnx reads the names of its arguments.
    signature = inspect.Signature([inspect.Parameter(name, kind) for name in names])
    translate.__signature__ = signature  # type: ignore[attr-defined]
    return translate


def _schema(operator: OnnxOperator) -> Any:
    from onnx.defs import OpSchema

    floats = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"]
    kinds = OpSchema.FormalParameterOption
    inputs, types = [], [("T", floats, "floating")]
    for index, (parameter, required) in enumerate(operator.parameters):
        option = kinds.Single if required else kinds.Optional
        own = "T" if required else f"M{index}"
        inputs.append(OpSchema.FormalParameter(parameter, own, param_option=option))
        if not required:
            types.append((own, [*floats, "tensor(bool)"], "mask or additional operand"))
    attributes = [
        OpSchema.Attribute(name, getattr(OpSchema.AttrType, ATTRIBUTE_TYPES[kind]), required=False)
        for name, kind in operator.attributes
    ]
    outputs = [OpSchema.FormalParameter("out", "T")]
    return OpSchema(
        operator.name, DOMAIN, 1, inputs=inputs, outputs=outputs, type_constraints=types,
        attributes=attributes,
    )  # fmt: skip


def finish(model: ir.Model, mode: str, opset: int) -> None:
    """Give the nodes of `elsa` their functions, or their places, and every node a readable name."""
    from onnx_ir.passes.common import InlinePass

    nodes = [node for node in model.graph if node.domain == DOMAIN]
    if mode == "custom-only":  # what the library has no kernel of needs its body
        known = onnx_operators()
        nodes = [node for node in nodes if not known[node.op_type].kernel]
    _add_functions(model, nodes, inlined=mode != "custom", opset=opset)
    if mode != "custom":
        InlinePass()(model)
        model.graph.opset_imports.pop(DOMAIN, None)
    if any(node.domain == DOMAIN for node in model.graph):
        model.graph.opset_imports[DOMAIN] = 1
    if opset < ATTENTION_OPSET:
        model.ir_version = _OLDEST_IR
    _name_nodes(model)


def _add_functions(model: ir.Model, nodes: list[ir.Node], *, inlined: bool, opset: int) -> None:
    """One function a kind of body; the leanest where they are to be inlined."""
    import onnx_ir as ir

    known = onnx_operators()
    kinds: dict[Body, Body] = {}  # what must agree -> all that its nodes need
    of_node = []
    for node in nodes:
        operator = known[node.op_type]
        names = [name for name, _ in operator.parameters]
        given = {name: value for name, value in zip(names, node.inputs, strict=False) if value}
        traits, more = operator.needs(node, given, inlined and opset >= ATTENTION_OPSET)
        kind = Body(operator.name, tuple(given), frozenset(traits), frozenset(), opset)
        body = replace(kind, more=frozenset(more))
        kind = body if inlined else kind
        kinds[kind] = replace(body, more=body.more | kinds.get(kind, body).more)
        of_node.append(kind)
    functions: dict[Body, str] = {}
    for kind, body in kinds.items():
        operator = known[kind.op_type]
        earlier = sum(other.op_type == kind.op_type for other in functions)
        if earlier == VARIANTS_MAX and operator.kernel and not inlined:
            raise ExportError(
                f"ONNX: the model needs more than {VARIANTS_MAX} kinds of elsa::{kind.op_type}; "
                "use mode 'custom-only' or 'standard'"
            )
        functions[kind] = kind.op_type if earlier == 0 else f"{kind.op_type}_{earlier + 1}"
        function = ir.serde.deserialize_function(operator.function(body, functions[kind]))
        model.functions[function.identifier()] = function
    for node, kind in zip(nodes, of_node, strict=True):
        node.op_type = functions[kind]


def _name_nodes(model: ir.Model) -> None:
    """Call nodes `blocks.0.attn/PackedAttention`; drop the tracer's notes (local paths)."""
    used: dict[str, int] = {}
    for node in model.graph:
        scopes: list[str] = []  # ['', 'blocks', 'blocks.0', 'linear'], whose last is the node
        with contextlib.suppress(SyntaxError, ValueError):
            scopes = ast.literal_eval(node.metadata_props.get(_SCOPES) or "[]")
        path = scopes[-2] if len(scopes) > 1 else ""
        kind = node.op_type.partition("_")[0]  # without a body's number, which is none of the node
        name = f"{path}/{kind}" if path else kind
        used[name] = used.get(name, 0) + 1
        node.name = name if used[name] == 1 else f"{name}_{used[name]}"
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
