"""Which of elsa's operators an exported graph calls, and whether a library can serve them alone."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch

from elsa_core import ops
from elsa_core.errors import ExportError

_NODE = re.compile(r"\belsa::(\w+)")


def in_text(graph: str) -> tuple[str, ...]:
    """Names of elsa's operators in the text of a TorchScript graph, without the domain."""
    return tuple(sorted(set(_NODE.findall(graph))))


def in_program(program: torch.export.ExportedProgram) -> tuple[str, ...]:
    """Names of elsa's operators in an exported program, subgraphs included."""
    names = set()
    for module in program.graph_module.modules():
        graph = getattr(module, "graph", None)
        for node in graph.nodes if graph is not None else ():
            target = node.target
            if isinstance(target, torch._ops.OpOverload) and target.namespace == "elsa":
                names.add(target._opname)
    return tuple(sorted(names))


def check(names: Iterable[str], device: str) -> tuple[str, ...]:
    """The names, where a library or the package serves each of them without Python's own eager one.

    Raises:
        ExportError: the graph holds none, one that only this package's Python code computes, or
            dropout.
    """
    found = tuple(names)
    if any(name.startswith("attention_dropout") for name in found):
        raise ExportError("the graph drops attention weights: a bundle is for inference")
    eager = [name for name in found if name.endswith("_eager")]
    if eager:
        raise ExportError(
            f"the graph calls elsa::{eager[0]}, which no library holds: {_why_eager(device)}"
        )
    if all(_is_projection(name) for name in found):  # these alone are no site
        raise ExportError("the graph calls none of elsa's operators: no patched site was reached")
    return found


def schemas(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The schema of each operator as torch knows it, by its full name."""
    result = {}
    for name in sorted(set(names)):
        overload = getattr(torch.ops.elsa, name).default
        result[f"elsa::{name}"] = {"schema": str(overload._schema), "version": 1}
    return result


def _is_projection(name: str) -> bool:
    record = ops.of(f"elsa::{name}")
    return record is not None and record.kind == "linear"


def _why_eager(device: str) -> str:
    if device == "cpu":
        from elsa_core.backends import native

        answer = native.load()
        if not answer.ok:
            return f"the native library is off ({answer.reason})"
    return "a site was patched with backend 'eager', or its head_dim or dtype has no kernel"
