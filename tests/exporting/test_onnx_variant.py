"""An operator of another package in `elsa.export`'s ONNX: with nodes of its own, and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from onnx_files import run
from torch import Tensor, nn
from torch.fx import Graph, Node

from elsa_core import ops
from elsa_core.exporting.onnx import export_onnx
from elsa_core.exporting.onnx_operator import (
    OnnxExport,
    OnnxOperator,
    Value,
    Writer,
)

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


def _squared(query: Tensor, key: Tensor, scale: float) -> Tensor:
    weights = (query @ key.mT * scale).square()
    return weights / weights.sum(-1, keepdim=True)


def _body(op: Writer, query: Value, key: Value) -> Value:
    turned = op.Transpose(key, perm=[0, 1, 3, 2])
    scores = op.Mul(op.MatMul(query, turned), op.attribute("scale"))
    weights = op.Mul(scores, scores)
    return op.Div(weights, op.ReduceSum(weights, [-1], keepdims=1))


SQUARED = OnnxOperator(
    name="TestSquared",
    inputs=("query", "key"),
    attributes={"scale": "FLOAT"},
    write=_body,
    needs=lambda node, given, newest: (set(), set()),
)


def _rewrite(graph: Graph, node: Node) -> None:
    with graph.inserting_before(node):
        new = SQUARED.call(graph, node, node.args[:2], node.args[2:], node.meta["val"])
    node.replace_all_uses_with(new)


def _record(name: str, **parts: Any) -> ops.Operator:
    return ops.register(
        ops.Operator(
            name=name,
            schema="(Tensor query, Tensor key, float scale) -> Tensor",
            reference=_squared,
            **parts,
        )
    )


EXPORT = OnnxExport(operators=(SQUARED,), rewrite=_rewrite)
WITH = _record("test_squared_nodes", onnx=f"{__name__}:EXPORT")
WITHOUT = _record("test_squared_plain")


class Squared(nn.Module):
    def __init__(self, record: ops.Operator) -> None:
        super().__init__()
        self.operator = record.overload

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.operator(x, x, 0.5)
        return out


@pytest.mark.parametrize("mode", ["custom", "standard", "custom-only"])
@pytest.mark.parametrize("record", [WITH, WITHOUT], ids=lambda record: record.name)
def test_a_variant_says_its_onnx_in_one_place(
    record: ops.Operator, mode: str, tmp_path: Path
) -> None:
    path, x = tmp_path / "model.onnx", torch.rand(3, 2, 5, 8)
    export_onnx(Squared(record).eval(), (x[:2],), path, mode=mode)
    model = onnx.load(path)
    own = [node.op_type for node in model.graph.node if node.domain == "elsa"]
    assert own == (["TestSquared"] if record is WITH and mode != "standard" else [])
    assert [f.name for f in model.functions] == (own if mode == "custom" else [])
    if own and mode == "custom-only":
        return  # no library holds its kernel
    torch.testing.assert_close(run(path, x)[0], _squared(x, x, 0.5))


def test_a_record_knows_no_exporter() -> None:
    """Its parts are names until somebody asks for them."""
    assert isinstance(ops.ATTENTION.onnx, str)
    assert ops.ATTENTION.part("onnx").operators[0].name == "Attention"
    assert ops.GATED_LINEAR.part("onnx") is None
