"""`elsa::linear` in ONNX: what follows the product is written in standard operators."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import elsa_core as elsa

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
runtime = pytest.importorskip("onnxruntime")


class Layers(nn.Module):
    """What a GPU's program holds: products with all terms, and an attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.gamma = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.first.weight, self.first.bias
        y = torch.ops.elsa.linear(x, weight, bias, "gelu", x, self.gamma, "strict")
        for activation in ("gelu_tanh", "quick_gelu", "silu", "relu", "none"):
            y = torch.ops.elsa.linear(y, weight, None, activation)
        q = y.unflatten(-1, (2, 4)).transpose(1, 2)
        out = elsa.attention(q, q, q)
        assert isinstance(out, Tensor)
        return out


@pytest.mark.parametrize("opset", [18, 23])
def test_terms_are_standard_operators(tmp_path, opset):
    from elsa_core.exporting.onnx import export_onnx

    torch.manual_seed(0)
    model, x = Layers().eval(), torch.randn(2, 3, 8)
    file = tmp_path / "model.onnx"
    export_onnx(model, (x,), file, mode="standard", opset=opset)
    graph = onnx.load(file).graph
    assert {node.domain for node in graph.node} == {""}
    if opset == 23:  # the runtime's own Attention of opset 23 is not what is tested
        assert "Gelu" in {node.op_type for node in graph.node}
        return
    (out,) = runtime.InferenceSession(file).run(None, {graph.input[0].name: x.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(out), model(x), rtol=1e-5, atol=1e-6)
