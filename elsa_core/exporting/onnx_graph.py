"""From torch.export's graph to one with a single node for each attention, as ONNX will hold it."""

from __future__ import annotations

import torch

from elsa_core import ops
from elsa_core.exporting.onnx_operator import OnnxExport, OnnxOperator


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
    """Replace elsa's operators in place by the single-output ones of `elsa_onnx`.

    An operator whose record says nothing of ONNX stays: torch.onnx writes its portable form.

    Returns:
        How many calls of elsa's operators the graph holds, without projections of which there is no
        node.

    Raises:
        ExportError: the graph asks for what the ONNX operators do not give.
    """
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
