"""Operators of the ONNX domain `elsa`: their nodes, their bodies, and the calls that become them.

A body is a model-local function of standard operators: what a runtime without the library runs.
ONNX Runtime before 1.27 knows one function a name, so nodes that need different bodies get
different names: `Attention`, then `Attention_2`. The library knows them.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from elsa_core import ops
from elsa_core.errors import ExportError

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

DOMAIN = "elsa"
VARIANTS_MAX = 4  # names that the library registers for each operator
ATTENTION_OPSET = 23  # the first that has the standard `Attention`
# ONNX's numbers of the types that the operators take.
DTYPES = {torch.float32: 1, torch.bool: 9, torch.float16: 10, torch.bfloat16: 16}
_OLDEST_IR = 8  # the first with functions, and all that opset 18 needs: old runtimes read no newer
_SCOPES = "pkg.torch.onnx.name_scopes"
_CONSTANTS: dict[type, str] = {list: "value_ints", float: "value_float", int: "value_int"}
Value = Any  # the name of a value in a body; None where a node has no such input


class Body(NamedTuple):
    """What decides the body of a node."""

    op_type: str
    inputs: tuple[str, ...]  # which of the operator's inputs the node has
    traits: frozenset[str]  # what the nodes of one function must agree in
    more: frozenset[str]  # what some of its nodes need and the others can bear
    opset: int  # of the model


@dataclass
class Writer:
    """Writes a body: `op.Add(x, y)` appends a node and returns the name of its output.

    In the place of a value a list of integers is a constant of one axis, a number one without axes.
    A constant is written once.
    """

    opset: int  # of the model
    traits: frozenset[str]  # what the body has, and what it must bear
    attributes: dict[str, str]  # as `OnnxOperator` has them
    nodes: list[Any] = field(default_factory=list)
    constants: dict[str, str] = field(default_factory=dict)

    def __getattr__(self, op_type: str) -> Callable[..., Value]:
        return partial(self._append, op_type)

    def attribute(self, name: str) -> str:
        """The node's own attribute, as a value."""
        kind = self.attributes[name].lower()
        return str(self.Constant(**{f"value_{kind}": f"@{name}"}))

    def _append(self, op_type: str, *inputs: Any, outputs: int = 1, **attributes: Any) -> Any:
        import onnx

        constant = repr(attributes) if op_type == "Constant" else ""
        if constant in self.constants:
            return self.constants[constant]
        given = [
            self.Constant(**{_CONSTANTS[type(each)]: each}) if type(each) in _CONSTANTS else each
            for each in inputs
        ]
        names = [f"v{len(self.nodes)}_{i}" for i in range(outputs)]
        node = onnx.helper.make_node(op_type, given, names)
        for name, value in attributes.items():
            if isinstance(value, str) and value.startswith("@"):
                kind = getattr(onnx.AttributeProto, self.attributes[value[1:]])
                one = onnx.AttributeProto(name=name, ref_attr_name=value[1:], type=kind)
            else:
                one = onnx.helper.make_attribute(name, value)
            node.attribute.append(one)
        self.nodes.append(node)
        if constant:
            self.constants[constant] = names[0]
        return names if outputs > 1 else names[0]


@dataclass(frozen=True)
class OnnxOperator:
    """One operator `elsa::<name>` in ONNX."""

    name: str
    inputs: tuple[str, ...]  # names of its tensors
    attributes: dict[str, str]  # ONNX's type of each: "INT", "INTS", "FLOAT" or "STRING"
    # The body of standard operators, given the writer and each input's name, None for one that the
    # node has not; returns the name of the result.
    write: Callable[..., Value]
    # (traits, more) of a node's body, given the values of its inputs by name and whether it may
    # hold operators of opset 23.
    needs: Callable[[ir.Node, dict[str, ir.Value], bool], tuple[set[str], set[str]]]
    kernel: bool = True  # whether the library computes it, under `VARIANTS_MAX` names

    def call(
        self, graph: Graph, origin: Node, inputs: Sequence[Any], attributes: Sequence[Any],
        value: Tensor,
    ) -> Node:  # fmt: skip
        """A call for `origin` that becomes a node. Its result `value` has the sizes of the first
        input, but for the last."""
        from torch.onnx.ops import _symbolic_impl as symbolic

        shape: list[Any] = list(value.shape)
        for axis, size in enumerate(value.shape):
            if not isinstance(size, int):
                shape[axis] = graph.call_function(torch.ops.aten.sym_size.int, (inputs[0], axis))
                shape[axis].meta = {"val": size}
        named = zip(self.attributes, attributes, strict=True)
        given = {name: int(each) if isinstance(each, bool) else each for name, each in named}
        encoded = asdict(symbolic.EncodedAttrs.from_dict(given))
        node = call(
            graph, origin, torch.ops.onnx_symbolic._symbolic.default,
            (list(inputs), self.name, DTYPES[value.dtype]), value,
        )  # fmt: skip
        node.kwargs = {
            "shape": shape, **encoded, "metadata_props_keys": [], "metadata_props_values": [],
            "domain": DOMAIN, "version": 1,
        }  # fmt: skip
        return node

    def function(self, body: Body, name: str) -> onnx.FunctionProto:
        """The model-local function `elsa::<name>`."""
        import onnx

        op = Writer(body.opset, body.traits | body.more, self.attributes)
        names = list(self.inputs)
        out = self.write(op, *(given if given in body.inputs else None for given in names))
        while names[-1] not in body.inputs:
            names.pop()
        opset = onnx.helper.make_opsetid("", body.opset)
        return onnx.helper.make_function(
            DOMAIN, name, names, [out], op.nodes, [opset], list(self.attributes)
        )


@dataclass(frozen=True)
class OnnxExport:
    """How calls of one of elsa's operators become nodes: what a record names in `onnx`."""

    operators: tuple[OnnxOperator, ...]  # that `rewrite` may write
    rewrite: Callable[[Graph, Node], None]  # replaces the uses of a call in an exported program


def onnx_operators() -> dict[str, OnnxOperator]:
    """Every operator of the ONNX domain `elsa`, by its name."""
    exports = (record.part("onnx") for record in ops.RECORDS.values())
    return {each.name: each for export in exports if export for each in export.operators}


def rewrite(program: torch.export.ExportedProgram) -> int:
    """Replace elsa's operators in place by calls that become nodes, and count them, without
    projections of which there is no node. An operator whose record says nothing of ONNX stays:
    torch.onnx writes its portable form."""
    graph = program.graph_module.graph
    graph.eliminate_dead_code()  # an lse that is reshaped and not used is no lse that is used
    count = 0
    for node in list(graph.nodes):
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        record = ops.BY_SCHEMA.get(node.target._schema.name)
        export = None if record is None else record.part("onnx")
        if record is None or (record.kind == "linear" and export is None):
            continue
        count += 1
        if export is not None:
            export.rewrite(graph, node)
    graph.eliminate_dead_code()
    program.graph_module.recompile()
    return count


def call(graph: Graph, origin: Node, target: Any, args: tuple[Any, ...], value: Tensor) -> Node:
    """A new node that knows the module and the line of the one it stands for."""
    node = graph.call_function(target, args)
    node.meta = {**origin.meta, "val": value}
    return node


def static_shape(value: ir.Value) -> tuple[Any, ...]:
    """The shape of an ONNX value; open dims are no int. An unknown one is an ExportError."""
    if value.shape is None:
        raise ExportError(f"ONNX: the exporter lost the shape of {value.name}")
    return tuple(value.shape)


def finish(model: ir.Model, mode: str, opset: int) -> None:
    """Give the nodes of `elsa` their functions, or their places, and every node a readable name."""
    from onnx_ir.passes.common import InlinePass

    nodes, known = [node for node in model.graph if node.domain == DOMAIN], onnx_operators()
    if mode == "custom-only":  # what the library has no kernel of needs its body
        nodes = [node for node in nodes if not known[node.op_type].kernel]
    _add_functions(model, nodes, known, inlined=mode != "custom", opset=opset)
    if mode != "custom":
        InlinePass()(model)
        model.graph.opset_imports.pop(DOMAIN, None)
    if any(node.domain == DOMAIN for node in model.graph):
        model.graph.opset_imports[DOMAIN] = 1
    if opset < ATTENTION_OPSET:
        model.ir_version = _OLDEST_IR
    # `blocks.0.attn/PackedAttention`, without the notes of the tracer, which are local paths
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
        for value in node.outputs:
            value.metadata_props.clear()
        node.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
    model.metadata_props.clear()
    model.graph.metadata_props.clear()


def _add_functions(
    model: ir.Model, nodes: list[ir.Node], known: dict[str, OnnxOperator], *, inlined: bool,
    opset: int,
) -> None:  # fmt: skip
    """One function a kind of body; the leanest where they are to be inlined."""
    import onnx_ir as ir

    kinds: dict[Body, Body] = {}  # what must agree -> all that its nodes need
    of_node = []
    for node in nodes:
        operator = known[node.op_type]
        given = {name: x for name, x in zip(operator.inputs, node.inputs, strict=False) if x}
        traits, more = operator.needs(node, given, inlined and opset >= ATTENTION_OPSET)
        kind = Body(operator.name, tuple(given), frozenset(traits), frozenset(), opset)
        body = kind._replace(more=frozenset(more))
        kind = body if inlined else kind
        kinds[kind] = body._replace(more=body.more | kinds.get(kind, body).more)
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
