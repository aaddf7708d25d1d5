"""Whole models as ONNX: three modes, two opsets, files, names, and what is refused; an operator of
another package, with nodes of its own and without."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from onnx_files import no_worse, run
from processes import python
from sampling import thinned
from torch import Tensor, nn
from torch.fx import Graph, Node

import elsa_core as elsa
from elsa_core import ops
from elsa_core.errors import ArgumentError, ExportError
from elsa_core.exporting import onnx as exporting
from elsa_core.exporting.artefacts import checked_operators
from elsa_core.exporting.onnx import export_onnx
from elsa_core.exporting.onnx_operator import OnnxExport, OnnxOperator, Value, Writer

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
timm = pytest.importorskip("timm")


@pytest.fixture(scope="module")
def vit() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = timm.create_model("test_vit", img_size=32, num_classes=7, depth=2).eval()
    elsa.patch(model)
    return model


@pytest.fixture(scope="module")
def images() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(5, 3, 32, 32)


@pytest.fixture(scope="module")
def written(vit: nn.Module, images: Tensor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ViT with the default choices."""
    path = tmp_path_factory.mktemp("written") / "model.onnx"
    export_onnx(vit, (images[:2],), path)
    return path


def agrees(path: Path, model: nn.Module, images: Tensor, library: str | None = None) -> None:
    """The file's error is at most twice that of the model it came from."""
    with torch.no_grad():
        own = model(images)
        exact = model.double()(images.double())
        model.float()
    no_worse(run(path, images, library=library)[0], own, exact)


@pytest.mark.parametrize(("mode", "opset"), thinned(exporting.MODES, exporting.OPSETS))
def test_modes_at_opsets(
    mode: str, opset: int, vit: nn.Module, images: Tensor, library: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.onnx"
    written = export_onnx(
        vit, (images[:1],), path, mode=mode, opset=opset, input_names=["image"],
        output_names=["logits"],
    )  # fmt: skip
    assert written == (path,)
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]
    model = onnx.load(path)
    assert {(o.domain, o.version) for o in model.opset_import if not o.domain} == {("", opset)}
    assert model.ir_version <= 10  # what onnxruntime 1.18 reads, and at opset 18 every 1.17
    own = [node for node in model.graph.node if node.domain == "elsa"]
    assert len(own) == (0 if mode == "standard" else len(vit.blocks))  # type: ignore[arg-type]
    assert len(model.functions) == (1 if mode == "custom" else 0)
    assert model.graph.input[0].name == "image"
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    assert model.graph.output[0].name == "logits"
    for batch in (1, 2, 5):
        if mode != "custom-only":
            agrees(path, vit, images[:batch])
        if mode != "standard":
            agrees(path, vit, images[:batch], library)
    if mode == "custom-only":
        with pytest.raises(Exception, match="elsa:PackedAttention"):
            run(path, images)


def test_a_node_replaces_everything_between_the_projections(written: Path) -> None:
    nodes = {out: node for node in onnx.load(written).graph.node for out in node.output}
    own = [node for node in nodes.values() if node.domain == "elsa"]
    assert [node.name for node in own] == [
        f"blocks.{i}.attn/PackedAttention" for i in range(len(own))
    ]
    for node in own:
        assert nodes[node.input[0]].op_type == "Add"  # the bias of the projection
        readers = [n.op_type for n in nodes.values() if node.output[0] in n.input]
        assert readers == ["MatMul"]


def test_nothing_of_this_machine_is_in_the_file(written: Path) -> None:
    content = written.read_bytes()
    assert os.fsencode(Path(timm.__file__).parent) not in content
    assert b"stack_trace" not in content


class Towers(nn.Module):
    """Attention with a mask, without one, and masked by a boolean: bodies of three kinds."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (2, 8)).transpose(1, 2)
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        additive = torch.zeros(x.shape[1], x.shape[1]).masked_fill(~seen, -torch.inf)
        first: Any = elsa.attention(heads, heads, heads, additive)
        second: Any = elsa.attention(first, first, first)
        third: Any = elsa.attention(second, second, second, seen)
        joined: Tensor = third.transpose(1, 2).flatten(2)
        return joined


def test_bodies_of_several_kinds_get_names_of_their_own(library: str, tmp_path: Path) -> None:
    model, x = Towers().eval(), torch.randn(3, 9, 16)
    path = tmp_path / "model.onnx"
    export_onnx(model, (x[:2],), path)
    written = onnx.load(path)
    names = [node.op_type for node in written.graph.node if node.domain == "elsa"]
    assert names == ["Attention", "Attention_2", "Attention_3"]
    assert [function.name for function in written.functions] == names
    agrees(path, model, x)
    agrees(path, model, x, library)


def test_large_weights_lie_beside_the_model(
    vit: nn.Module, images: Tensor, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "INLINE_BYTES_MAX", 1000)
    path = tmp_path / "model.onnx"
    written = export_onnx(vit, (images[:2],), path)
    assert written == (path, tmp_path / "model.onnx.data")
    assert sorted(tmp_path.iterdir()) == sorted(written)
    assert path.stat().st_size < written[1].stat().st_size
    agrees(path, vit, images, library)


def test_what_is_refused(vit: nn.Module, images: Tensor, tmp_path: Path) -> None:
    path, first = tmp_path / "model.onnx", (images[:2],)
    with pytest.raises(ArgumentError, match="input_names"):
        export_onnx(vit, first, path, input_names=["a", "b"])
    with pytest.raises(ExportError, match="no patched site"):
        export_onnx(nn.Linear(4, 4), (torch.ones(2, 4),), path)
    with pytest.raises(ExportError, match="float64"):
        export_onnx(Towers().double(), (torch.randn(2, 9, 16).double(),), path)
    with pytest.raises(ExportError, match="none of elsa's operators"):
        checked_operators(torch.export.export(nn.Linear(4, 4), (torch.ones(2, 4),)), "cpu")
    assert not list(tmp_path.iterdir())


class Drops(nn.Module):
    """Drops in eval mode too."""

    def forward(self, x: Tensor) -> Tensor:
        out: Any = elsa.attention(x, x, x, dropout_p=0.5)
        return out


def test_a_bundle_holds_no_dropout() -> None:
    program = torch.export.export(Drops().eval(), (torch.randn(1, 2, 9, 8),))
    with pytest.raises(ExportError, match="drops"):
        checked_operators(program, "cpu")


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x
        out: Any = elsa.attention(x, x, x)
        return out


def test_a_model_that_cannot_be_traced_is_named_and_leaves_the_old_file(tmp_path: Path) -> None:
    path, model = tmp_path / "model.onnx", nn.Sequential(nn.Identity(), Branches())
    path.write_text("before")
    with pytest.raises(ExportError, match=r"'1' \(Branches\)") as caught:
        export_onnx(model, (torch.ones(2, 2, 4, 8),), path)
    assert "\n" not in str(caught.value)
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_the_file_needs_neither_elsa_nor_torch(written: Path, library: str) -> None:
    program = f"""
import sys, numpy, onnxruntime as ort
for library in (None, {library!r}):
    options = ort.SessionOptions()
    if library:
        options.register_custom_ops_library(library)
    session = ort.InferenceSession({str(written)!r}, options)
    out, = session.run(None, {{"input": numpy.zeros((3, 3, 32, 32), numpy.float32)}})
    assert out.shape == (3, 7) and numpy.isfinite(out).all()
assert not {{"torch", "elsa_core", "onnx"}} & set(sys.modules)
print("served")
"""
    done = python("-c", program, cwd=written.parent)
    assert done.stdout.strip() == "served", done.stderr


# --- An operator of another package -----------------------------------------------------------


def _squared(query: Tensor, key: Tensor, scale: float) -> Tensor:
    weights = (query @ key.mT * scale).square()
    return weights / weights.sum(-1, keepdim=True)


def _body(op: Writer, query: Value, key: Value) -> Value:
    turned = op.Transpose(key, perm=[0, 1, 3, 2])
    scores = op.Mul(op.MatMul(query, turned), op.attribute("scale"))
    weights = op.Mul(scores, scores)
    return op.Div(weights, op.ReduceSum(weights, [-1], keepdims=1))


SQUARED = OnnxOperator(
    name="TestSquared", inputs=("query", "key"), attributes={"scale": "FLOAT"}, write=_body,
    needs=lambda node, given, newest: (set(), set()),
)  # fmt: skip


def _rewrite(graph: Graph, node: Node) -> None:
    with graph.inserting_before(node):
        new = SQUARED.call(graph, node, node.args[:2], node.args[2:], node.meta["val"])
    node.replace_all_uses_with(new)


def _record(name: str, **parts: Any) -> ops.Operator:
    schema = "(Tensor query, Tensor key, float scale) -> Tensor"
    return ops.register(ops.Operator(name=name, schema=schema, reference=_squared, **parts))


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
