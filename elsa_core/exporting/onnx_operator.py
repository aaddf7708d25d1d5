"""An operator of the ONNX domain `elsa`: its node, its body, and the calls that become it.

A body is a model-local function of standard operators: what a runtime without the library runs.
ONNX Runtime before 1.27 knows one function a name, so nodes that need different bodies get
different names: `Attention`, then `Attention_2`. The library knows them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

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
# ONNX's type of an attribute, by the type in an operator's schema.
ATTRIBUTE_TYPES = {"bool": "INT", "int": "INT", "int[]": "INTS", "float": "FLOAT", "str": "STRING"}
Value = Any  # the name of a value in a body; None where a node has no such input
_LIBRARY = torch.library.Library("elsa_onnx", "DEF")


@dataclass(frozen=True)
class Body:
    """What decides the body of a node.

    Attributes:
        op_type: the operator.
        inputs: which of its inputs the node has.
        traits: what the nodes of one function must agree in.
        more: what some of its nodes need and the others can bear.
        opset: of the model.
    """

    op_type: str
    inputs: tuple[str, ...]
    traits: frozenset[str] = frozenset()
    more: frozenset[str] = frozenset()
    opset: int = 18


class Writer:
    """Writes a body: `op.Add(x, y)` appends a node and returns the name of its output.

    A list of integers in the place of a value is a constant of one axis, a float a number.
    """

    def __init__(self, body: Body, attributes: dict[str, str]) -> None:
        self.body, self.nodes = body, list[Any]()
        self._attributes, self._known = attributes, dict[Any, str]()

    def __contains__(self, word: str) -> bool:
        """Whether the body has this input or trait, or must bear it."""
        return word in self.body.inputs or word in self.body.traits | self.body.more

    def __getattr__(self, op_type: str) -> Callable[..., Value]:
        return partial(self._append, op_type)

    def attribute(self, name: str) -> str:
        """The node's own attribute, as a value."""
        kind = self._attributes[name].lower()
        return self._once(("attribute", name), **{f"value_{kind}": f"@{name}"})

    def scalar(self, value: int) -> str:
        """An integer without axes."""
        return self._once(("scalar", value), value_int=value)

    def _once(self, key: Any, **value: Any) -> str:
        if key not in self._known:
            self._known[key] = self._append("Constant", **value)
        return self._known[key]

    def _value(self, given: Any) -> str:
        if isinstance(given, list):
            return self._once(tuple(given), value_ints=given)
        return self._once(given, value_float=given) if isinstance(given, float) else given

    def _append(self, op_type: str, *inputs: Any, outputs: int = 1, **attributes: Any) -> Any:
        import onnx

        given = [self._value(each) for each in inputs]
        names = [f"v{len(self.nodes)}_{i}" for i in range(outputs)]
        node = onnx.helper.make_node(op_type, given, names)
        for name, value in attributes.items():
            if isinstance(value, str) and value.startswith("@"):
                kind = getattr(onnx.AttributeProto, self._attributes[value[1:]])
                one = onnx.AttributeProto(name=name, ref_attr_name=value[1:], type=kind)
            else:
                one = onnx.helper.make_attribute(name, value)
            node.attribute.append(one)
        self.nodes.append(node)
        return names if outputs > 1 else names[0]


@dataclass(frozen=True)
class OnnxOperator:
    """One operator of the ONNX domain `elsa`.

    Attributes:
        name: `elsa::<name>` in ONNX, and `elsa_onnx::<name>` in PyTorch while a graph is
            translated.
        inputs: names of its tensors; the optional ones end with "?".
        attributes: (name, type) of what follows, "bool", "int", "float", "int[]" or "str".
        fake: the output of the PyTorch call on fake tensors.
        write: the body of standard operators, given the writer and each input's name, None for one
            that the node has not; returns the name of the result.
        needs: (traits, more) of a node's body, given the values of its inputs by name and whether
            it may hold operators of opset 23.
        kernel: whether the library for ONNX Runtime computes it, under `VARIANTS_MAX` names.
    """

    name: str
    inputs: tuple[str, ...]
    attributes: tuple[tuple[str, str], ...]
    fake: Callable[..., Tensor]
    write: Callable[..., Value]
    needs: Callable[[ir.Node, dict[str, ir.Value], bool], tuple[set[str], set[str]]]
    kernel: bool = True

    @property
    def parameters(self) -> tuple[tuple[str, bool], ...]:
        """Each input's name, and whether every node has it."""
        return tuple((name.removesuffix("?"), not name.endswith("?")) for name in self.inputs)

    @cached_property
    def overload(self) -> Any:
        """`torch.ops.elsa_onnx.<name>.default`, defined when it is first asked for."""
        given = [f"Tensor{'' if always else '?'} {name}" for name, always in self.parameters]
        given += [f"{kind} {name}" for name, kind in self.attributes]
        _LIBRARY.define(f"{self.name}({', '.join(given)}) -> Tensor")
        torch.library.register_fake(f"elsa_onnx::{self.name}", self.fake, lib=_LIBRARY)
        return getattr(torch.ops.elsa_onnx, self.name).default

    def function(self, body: Body, name: str) -> onnx.FunctionProto:
        """The model-local function `elsa::<name>`."""
        import onnx

        attributes = {attribute: ATTRIBUTE_TYPES[kind] for attribute, kind in self.attributes}
        op = Writer(body, attributes)
        names = [given for given, _ in self.parameters]
        out = self.write(op, *(given if given in body.inputs else None for given in names))
        while names[-1] not in body.inputs:
            names.pop()
        opset = onnx.helper.make_opsetid("", body.opset)
        return onnx.helper.make_function(
            DOMAIN, name, names, [out], op.nodes, [opset], list(attributes)
        )


@dataclass(frozen=True)
class OnnxExport:
    """How calls of one of elsa's operators become nodes: what a record names in `onnx`.

    Attributes:
        operators: those that `rewrite` may write.
        rewrite: replaces a call in the graph of an exported program.
    """

    operators: tuple[OnnxOperator, ...]
    rewrite: Callable[[Graph, Node], None]


def exports() -> dict[str, OnnxExport]:
    """What the records of operators say of ONNX, by the names that serve a call."""
    found = {}
    for record in ops.records():
        export: OnnxExport | None = record.part("onnx")
        if export is not None:
            found.update(dict.fromkeys(record.names, export))
    return found


def onnx_operators() -> dict[str, OnnxOperator]:
    """Every operator of the ONNX domain `elsa`, by its name."""
    return {each.name: each for export in exports().values() for each in export.operators}


def rewrite(program: torch.export.ExportedProgram) -> int:
    """Replace elsa's operators in place by the single-output ones of `elsa_onnx`, and count them,
    without projections of which there is no node. An operator whose record says nothing of ONNX
    stays: torch.onnx writes its portable form."""
    graph, known = program.graph_module.graph, exports()
    graph.eliminate_dead_code()  # an lse that is reshaped and not used is no lse that is used
    count = 0
    for node in list(graph.nodes):
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        name = node.target._schema.name
        record = ops.of(name)
        if record is None or (record.kind == "linear" and name not in known):
            continue
        count += 1
        if name in known:
            known[name].rewrite(graph, node)
    graph.eliminate_dead_code()
    program.graph_module.recompile()
    return count


def call(graph: Graph, origin: Node, target: Any, args: tuple[Any, ...], value: Tensor) -> Node:
    """A new node that knows the module and the line of the one it stands for."""
    node = graph.call_function(target, args)
    node.meta = {**origin.meta, "val": value}
    return node


def take_over(graph: Graph, old: Node, new: Node) -> None:
    """Let the users of `old` read `new`, also where `old` is an output of the program."""
    old.replace_all_uses_with(new)
    if not old.users:
        graph.erase_node(old)


def value_of(node: Any) -> Tensor:
    """The fake tensor of a node of an exported program."""
    value: Tensor = node.meta["val"]
    return value


def static_shape(value: ir.Value) -> tuple[Any, ...]:
    """The shape of an ONNX value; open dims are no int. An unknown one is an ExportError."""
    if value.shape is None:
        raise ExportError(f"ONNX: the exporter lost the shape of {value.name}")
    return tuple(value.shape)
