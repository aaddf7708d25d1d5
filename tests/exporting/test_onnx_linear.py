"""`elsa::linear` in ONNX: one node with a body, or standard operators, with every term."""

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx_files import no_worse, run
from test_torch_onnx import exported
from torch import Tensor, nn

import elsa_core as elsa
from elsa_core.base import calls
from elsa_core.exporting.onnx import export_onnx, quantise
from elsa_core.ops.linear.record import ACTIVATIONS, plain

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
runtime = pytest.importorskip("onnxruntime")
timm = pytest.importorskip("timm")

# activation, and whether there are a bias, a residual and a scale
TERMS = tuple(itertools.product(ACTIVATIONS, *((None, True),) * 3))
DEPTH, COLUMNS = 24, 16


class Terms(nn.Module):
    """A call of each combination of terms, with an output of its own."""

    def __init__(self, terms: Any = TERMS) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(COLUMNS, DEPTH, generator=generator))
        self.bias = nn.Parameter(torch.randn(COLUMNS, generator=generator))
        self.gamma = nn.Parameter(torch.randn(COLUMNS, generator=generator))
        self.terms = terms

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            elsa.linear(
                x, self.weight, self.bias if bias else None, activation=activation,
                residual=y if residual else None, scale=self.gamma if scale else None,
            )
            for activation, bias, residual, scale in self.terms
        )  # fmt: skip

    def plain(self, x: Tensor, y: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """PyTorch's own results in a dtype."""
        x, y, weight, bias, gamma = (
            t.detach().to(dtype) for t in (x, y, self.weight, self.bias, self.gamma)
        )
        return [
            plain(x, weight, b and bias, activation, r and y, s and gamma)
            for activation, b, r, s in self.terms
        ]


def operands(lead: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = (DEPTH, COLUMNS)
    x, y = (torch.randn(*lead, n, generator=generator).to(dtype) for n in sizes)
    return x, y


def all_no_worse(outs: list[Tensor], model: Terms, x: Tensor, y: Tensor) -> None:
    """Each output by the rule."""
    peers, exacts = model.plain(x, y, x.dtype), model.plain(x, y, torch.float64)
    for out, peer, exact in zip(outs, peers, exacts, strict=True):
        assert out.dtype == peer.dtype
        no_worse(out, peer, exact)


@pytest.mark.parametrize(
    ("lead", "dtype", "opset"),
    [((5,), torch.float16, 18), ((5, 3), torch.float16, 23), ((5, 3, 2), torch.float32, 18)],
    ids=str,
)
def test_each_call_is_one_node(
    lead: tuple[int, ...], dtype: torch.dtype, opset: int, tmp_path: Path
) -> None:
    model, (x, y) = Terms().to(dtype).eval(), operands(lead, dtype)
    path = tmp_path / "model.onnx"
    export_onnx(model, (x[:2], y[:2]), path, opset=opset)
    graph = onnx.load(path).graph
    assert {(node.domain, node.op_type.partition("_")[0]) for node in graph.node} == {
        ("elsa", "Linear")
    }
    named = [node.attribute[0].s.decode() for node in graph.node]
    assert named == [activation for activation, *_ in TERMS]
    all_no_worse(run(path, x, y), model, x, y)


@pytest.mark.parametrize("mode", ["standard", "custom-only"])
def test_no_library_is_asked_for_the_node(mode: str, tmp_path: Path) -> None:
    """ONNX Runtime alone runs either file: no kernel of `Linear` is in the library."""
    model, (x, y) = Terms(TERMS[::3]).eval(), operands((3, 5), torch.float32)
    path = tmp_path / "model.onnx"
    export_onnx(model, (x[:2], y[:2]), path, mode=mode, opset=23)
    found = onnx.load(path)
    assert not found.functions
    assert not [node for node in found.graph.node if node.domain]
    assert "Gelu" in {node.op_type for node in found.graph.node}
    all_no_worse(run(path, x, y), model, x, y)


@pytest.mark.parametrize("way", ["dynamo", "torchscript"])
def test_torch_onnx_writes_standard_operators(way: str, tmp_path: Path) -> None:
    model, (x, y) = Terms().eval(), operands((3, 5), torch.float32)
    path = tmp_path / "model.onnx"
    found = exported(model, (x[:2], y[:2]), way, 18, path)
    assert not [node for node in found.graph.node if node.domain]
    all_no_worse(run(path, x, y), model, x, y)


def test_half_precision_is_rounded_once(tmp_path: Path) -> None:
    """Not at each step of a formula, also where a runtime has half-precision kernels for them."""
    from onnx.reference import ReferenceEvaluator

    smooth = [each for each in TERMS if each[0] not in ("none", "relu") and each[1]]
    model, (x, y) = Terms(smooth).half().eval(), operands((40, 5), torch.float16)
    path = tmp_path / "model.onnx"
    export_onnx(model, (x[:2], y[:2]), path)
    feeds = dict(zip(("input_0", "input_1"), (x.numpy(), y.numpy()), strict=True))
    outs = ReferenceEvaluator(onnx.load(path)).run(None, feeds)
    all_no_worse([torch.from_numpy(np.asarray(out)) for out in outs], model, x, y)


class Cast(nn.Module):
    """A residual of another dtype, and a product that autocast computes in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DEPTH, COLUMNS)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        weight, bias = self.layer.weight, self.layer.bias
        first = elsa.linear(x, weight, bias, activation="silu", residual=y.double())
        with torch.autocast("cpu", torch.bfloat16):
            second = elsa.linear(x, weight, bias, activation="gelu")
        return first, second.float()


def test_dtypes_are_those_of_pytorch() -> None:
    model, (x, y) = Cast().eval(), operands((2, 3), torch.float32)
    with calls.products(kept=True), torch.no_grad():
        program = torch.export.export(model, (x, y), strict=False)
    assert sum("elsa.linear" in str(node.target) for node in program.graph.nodes) == 1
    with torch.no_grad():
        for out, wanted in zip(program.module()(x, y), model(x, y), strict=True):
            assert out.dtype == wanted.dtype
            torch.testing.assert_close(out, wanted)


def test_derivatives_within_a_model_are_of_pytorchs_operators() -> None:
    """The program held a formula of the operator that no exporter can decompose."""

    def pushed(layer: nn.Module, x: Tensor) -> Any:
        return torch.func.jvp(layer, (x,), (x,))[1]

    model, (x, _) = Through(pushed).eval(), operands((2, 3), torch.float32)
    try:
        with torch.no_grad():
            torch.export.export(model, (x,), strict=False)
    except AssertionError:
        pytest.skip("this PyTorch exports no forward derivative of a layer of its own")
    elsa.patch(model, scope="model")
    with calls.products(kept=True), torch.no_grad():
        program = torch.export.export(model, (x,), strict=False)
    assert not [node for node in program.graph.nodes if "elsa." in str(node.target)]
    torch.testing.assert_close(program.module()(x), model(x))


def test_double_precision_is_written_in_standard_operators(tmp_path: Path) -> None:
    some = [each for each in TERMS if each[0] in ("none", "relu")]
    model, (x, y) = Terms(some).double().eval(), operands((3,), torch.float64)
    path = tmp_path / "model.onnx"
    export_onnx(model, (x[:2], y[:2]), path)
    assert not [node for node in onnx.load(path).graph.node if node.domain]
    for out, exact in zip(run(path, x, y), model.plain(x, y, torch.float64), strict=True):
        torch.testing.assert_close(out, exact)


def vit() -> nn.Module:
    """Patched as a whole: nine linear layers."""
    torch.manual_seed(0)
    model: nn.Module = timm.create_model(
        "test_vit", img_size=32, num_classes=7, depth=2, init_values=0.5
    ).eval()
    elsa.patch(model, scope="model")
    return model


def written(path: Path) -> Counter[str]:
    return Counter(node.op_type.partition("_")[0] for node in onnx.load(path).graph.node)


def test_patched_layers_are_nodes(tmp_path: Path) -> None:
    """Residual, LayerScale and GELU are in them; ONNX Runtime then runs the same operators."""
    model, images = vit(), torch.randn(5, 3, 32, 32)
    with torch.no_grad():
        exact = model.double()(images.double())
        own = model.float()(images)
    path = tmp_path / "model.onnx"
    export_onnx(model, (images[:2],), path, input_names=["image"])
    found = written(path)
    assert found["Linear"] == 9
    assert not {"MatMul", "Gemm", "Erf", "Mul"} & set(found)
    no_worse(run(path, images)[0], own, exact)
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    optimised = written(tmp_path / "optimized.onnx")
    assert optimised["BiasGelu"] == 2 and not {"Erf", "Linear"} & set(optimised)


def test_integers_reach_the_layers_of_nodes(tmp_path: Path) -> None:
    path, target = tmp_path / "model.onnx", tmp_path / "model.int8.onnx"
    export_onnx(vit(), (torch.randn(2, 3, 32, 32),), path)
    quantise(path, target)
    found = written(target)
    assert (found["MatMulInteger"], found["Linear"], found["PackedAttention"]) == (9, 0, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.int8.onnx", "model.onnx"]


class Through(nn.Module):
    """A patched layer, and what calls it."""

    def __init__(self, call: Any = lambda layer, x: layer(x)) -> None:
        super().__init__()
        self.layer, self.call = nn.Linear(DEPTH, COLUMNS), call

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.call(self.layer, x)
        return out
