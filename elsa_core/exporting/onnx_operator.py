"""What is known of an operator of the ONNX domain `elsa`, and of the call that becomes one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from elsa_core.errors import ExportError

if TYPE_CHECKING:
    import onnx_ir as ir

_LIBRARY = torch.library.Library("elsa_onnx", "DEF")
_DEFINED: set[str] = set()


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

    def __contains__(self, word: str) -> bool:
        return word in self.inputs or word in self.traits or word in self.more

    def kind(self) -> Body:
        """What nodes of one function must agree in: the rest serves more than asks for it."""
        return replace(self, more=frozenset())

    def joined(self, other: Body) -> Body:
        """A body for the nodes of both, which are of one kind."""
        return replace(self, more=self.more | other.more)


@dataclass(frozen=True)
class OnnxOperator:
    """One operator of the ONNX domain `elsa`.

    Attributes:
        name: `elsa::<name>` in ONNX.
        call: the same in PyTorch while a graph is translated, `elsa_onnx::<call>`.
        inputs: names of its tensors; the optional ones end with "?".
        attributes: (name, type) of what follows, "bool", "int", "float", "int[]" or "str".
        fake: the output of the PyTorch call on fake tensors.
        lines: of the body of standard operators, in ONNX's text form; results in `out`.
        needs: (traits, more) of a node's body, given the values of its inputs by name and whether
            it may hold operators of opset 23.
        kernel: whether the library for ONNX Runtime computes it, under `VARIANTS_MAX` names.
    """

    name: str
    call: str
    inputs: tuple[str, ...]
    attributes: tuple[tuple[str, str], ...]
    fake: Callable[..., Tensor]
    lines: Callable[[Body], list[str]]
    needs: Callable[[ir.Node, dict[str, ir.Value], bool], tuple[set[str], set[str]]]
    kernel: bool = True

    @property
    def parameters(self) -> tuple[tuple[str, bool], ...]:
        """Each input's name, and whether every node has it."""
        return tuple((name.removesuffix("?"), not name.endswith("?")) for name in self.inputs)

    @property
    def overload(self) -> Any:
        """`torch.ops.elsa_onnx.<call>.default`, defined when it is first asked for."""
        if self.call not in _DEFINED:
            given = [f"Tensor{'' if always else '?'} {name}" for name, always in self.parameters]
            given += [f"{kind} {name}" for name, kind in self.attributes]
            _LIBRARY.define(f"{self.call}({', '.join(given)}) -> Tensor")
            torch.library.register_fake(f"elsa_onnx::{self.call}", self.fake, lib=_LIBRARY)
            _DEFINED.add(self.call)
        return getattr(torch.ops.elsa_onnx, self.call).default


@dataclass(frozen=True)
class OnnxExport:
    """How calls of one of elsa's operators become nodes: what a record names in `onnx`.

    Attributes:
        operators: those that `rewrite` may write.
        rewrite: replaces a call in the graph of an exported program.
    """

    operators: tuple[OnnxOperator, ...]
    rewrite: Callable[[Graph, Node], None]


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


def arguments(node: Node) -> dict[str, Any]:
    """All arguments of a call by name, the defaults of its schema included."""
    target: Any = node.target
    found = {}
    for index, parameter in enumerate(target._schema.arguments):
        rest = node.kwargs.get(parameter.name, parameter.default_value)
        found[parameter.name] = node.args[index] if index < len(node.args) else rest
    return found


def value_of(node: Any) -> Tensor:
    """The fake tensor of a node of an exported program."""
    value: Tensor = node.meta["val"]
    return value


def static_shape(value: ir.Value) -> tuple[Any, ...]:
    """The shape of an ONNX value; open dims are no int.

    Raises:
        ExportError: it is not known.
    """
    if value.shape is None:
        raise ExportError(f"ONNX: the exporter lost the shape of {value.name}")
    return tuple(value.shape)
