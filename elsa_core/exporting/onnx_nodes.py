"""Nodes of the domain `elsa` in an exported graph, and their functions."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from elsa_core.errors import ExportError
from elsa_core.exporting import onnx_functions, onnx_graph
from elsa_core.exporting.onnx_functions import DOMAIN, VARIANTS_MAX
from elsa_core.exporting.onnx_operator import Body, OnnxOperator

if TYPE_CHECKING:
    import onnx_ir as ir

_OLDEST_IR = 8  # the first with functions, and all that opset 18 needs: old runtimes read no newer
_SCOPES = "pkg.torch.onnx.name_scopes"


# By the type of an attribute: ONNX's, and what turns PyTorch's value into one.
_KINDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "bool": ("INT", int),
    "int": ("INT", int),
    "float": ("FLOAT", float),
    "int[]": ("INTS", list),
    "str": ("STRING", str),
}


def translations() -> dict[Any, Callable[..., Any]]:
    """What torch.onnx makes of the operators of `elsa_onnx`."""
    known = onnx_graph.onnx_operators().values()
    return {operator.overload: _translation(operator) for operator in known}


def _translation(operator: OnnxOperator) -> Callable[..., Any]:
    """One node, from positional arguments in the order of the operator's schema."""
    from onnxscript.values import Op, Opset

    op = Op(Opset(DOMAIN, 1), operator.name, _schema(operator))
    count = len(operator.inputs)

    def translate(*given: Any) -> Any:
        attributes = {
            name: _KINDS[kind][1](value)
            for (name, kind), value in zip(operator.attributes, given[count:], strict=True)
        }
        return op(*given[:count], **attributes)

    names = [name for name, _ in (*operator.parameters, *operator.attributes)]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    # torch.onnx reads the names of its arguments.
    signature = inspect.Signature([inspect.Parameter(name, kind) for name in names])
    translate.__signature__ = signature  # type: ignore[attr-defined]
    return translate


def _schema(operator: OnnxOperator) -> Any:
    """The operator's schema in onnx's own registry, which onnxscript asks for."""
    import onnx

    if not onnx.defs.has(operator.name, DOMAIN):
        onnx.defs.register_schema(_new_schema(operator))
    return onnx.defs.get_schema(operator.name, 1, DOMAIN)


def _new_schema(operator: OnnxOperator) -> Any:
    from onnx.defs import OpSchema

    floats = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"]
    kinds = OpSchema.FormalParameterOption
    inputs = []
    for index, (parameter, required) in enumerate(operator.parameters):
        option = kinds.Single if required else kinds.Optional
        own = "T" if required else f"M{index}"
        inputs.append(OpSchema.FormalParameter(parameter, own, param_option=option))
    free = [
        (p.type_str, [*floats, "tensor(bool)"], "mask or additional operand")
        for p in inputs
        if p.type_str != "T"
    ]
    attributes = [
        OpSchema.Attribute(name, getattr(OpSchema.AttrType, _KINDS[kind][0]), required=False)
        for name, kind in operator.attributes
    ]
    return OpSchema(
        operator.name, DOMAIN, 1,
        inputs=inputs,
        outputs=[OpSchema.FormalParameter("out", "T")],
        type_constraints=[("T", floats, "floating"), *free],
        attributes=attributes,
    )  # fmt: skip


def finish(model: ir.Model, mode: str, opset: int) -> None:
    """Give the nodes of `elsa` their functions, or their places, and every node a readable name.

    Raises:
        ExportError: the nodes need more different bodies than there are names.
    """
    nodes = [node for node in model.graph if node.domain == DOMAIN]
    if mode == "custom-only":  # what the library has no kernel of needs its body
        known = onnx_graph.onnx_operators()
        nodes = [node for node in nodes if not known[node.op_type].kernel]
    _add_functions(model, nodes, inlined=mode != "custom", opset=opset)
    if mode != "custom":
        _inline(model)
    if any(node.domain == DOMAIN for node in model.graph):
        model.graph.opset_imports[DOMAIN] = 1
    if opset < onnx_functions.ATTENTION_OPSET:
        model.ir_version = _OLDEST_IR
    _regroup_gelu(model)
    _name_nodes(model)


def _add_functions(model: ir.Model, nodes: list[ir.Node], *, inlined: bool, opset: int) -> None:
    """One function a kind of body; the leanest where they are to be inlined."""
    import onnx_ir as ir

    known = onnx_graph.onnx_operators()
    newest = inlined and opset >= onnx_functions.ATTENTION_OPSET
    kinds: dict[Body, Body] = {}  # what must agree -> all that its nodes need
    of_node = []
    for node in nodes:
        body = _body(known[node.op_type], node, newest, opset)
        kind = body if inlined else body.kind()
        kinds[kind] = body.joined(kinds.get(kind, body))
        of_node.append(kind)
    names: dict[Body, str] = {}
    for kind, body in kinds.items():
        earlier = sum(other.op_type == kind.op_type for other in names)
        if earlier == VARIANTS_MAX and known[kind.op_type].kernel and not inlined:
            raise ExportError(
                f"ONNX: the model needs more than {VARIANTS_MAX} kinds of elsa::{kind.op_type}; "
                "use mode 'custom-only' or 'standard'"
            )
        names[kind] = kind.op_type if earlier == 0 else f"{kind.op_type}_{earlier + 1}"
        text = onnx_functions.function(known[kind.op_type], body, names[kind], opset)
        function = ir.serde.deserialize_function(text)
        model.functions[function.identifier()] = function
    for node, kind in zip(nodes, of_node, strict=True):
        node.op_type = names[kind]


def _body(operator: OnnxOperator, node: ir.Node, newest: bool, opset: int) -> Body:
    """What the body of a node must do."""
    names = [name for name, _ in operator.parameters]
    given = {name: value for name, value in zip(names, node.inputs, strict=False) if value}
    traits, more = operator.needs(node, given, newest)
    return Body(operator.name, tuple(given), frozenset(traits), frozenset(more), opset)


def _inline(model: ir.Model) -> None:
    from onnx_ir.passes.common import InlinePass

    InlinePass()(model)
    model.graph.opset_imports.pop(DOMAIN, None)


def _regroup_gelu(model: ir.Model) -> None:
    """x * (0.5 * (1 + erf)) -> 0.5 * (x * (1 + erf)): the same number, in the order that ORT fuses.

    Halving is exact, so nothing changes but where it happens (short of subnormal numbers). Opset 20
    has Gelu as one operator; below it, ONNX Runtime runs five nodes where it does not see one.
    """
    for outer in model.graph:
        if outer.op_type != "Mul" or outer.domain:
            continue
        for place, value in enumerate(outer.inputs):
            inner = value.producer() if value is not None else None
            if inner is None or inner.op_type != "Mul" or len(inner.outputs[0].uses()) != 1:
                continue
            half = _index_of_half(inner)
            if half is None or not _adds_erf(inner.inputs[1 - half]):
                continue
            factor, x = inner.inputs[half], outer.inputs[1 - place]
            inner.replace_input_with(half, x)
            outer.replace_input_with(1 - place, factor)
            break


def _index_of_half(node: ir.Node) -> int | None:
    for index, value in enumerate(node.inputs):
        constant = value.const_value if value is not None else None
        if constant is not None and constant.size == 1 and float(constant.numpy().item()) == 0.5:
            return index
    return None


def _adds_erf(value: ir.Value | None) -> bool:
    node = value.producer() if value is not None else None
    if node is None or node.op_type != "Add":
        return False
    producers = [given.producer() for given in node.inputs if given is not None]
    return any(producer is not None and producer.op_type == "Erf" for producer in producers)


def _name_nodes(model: ir.Model) -> None:
    """Call nodes `blocks.0.attn/PackedAttention`; drop the tracer's notes (local paths)."""
    used: dict[str, int] = {}
    for node in model.graph:
        scopes = node.metadata_props.get(_SCOPES)
        path = _module_path(scopes) if scopes else ""
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


def _module_path(scopes: str) -> str:
    """The innermost module of "['', 'blocks', 'blocks.0', 'linear']", whose last is the node."""
    try:
        listed = ast.literal_eval(scopes)
    except (SyntaxError, ValueError):
        return ""
    return str(listed[-2]) if len(listed) > 1 else ""
