"""A patched model in torch.onnx.export, by torch.export and by tracing, and in torch.jit.script."""

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from onnx_files import no_worse, run
from processes import python
from sampling import thinned
from torch import Tensor, nn

import elsa_core as elsa
from elsa_core import ops
from elsa_core.errors import ModelError
from elsa_core.exporting.onnx import export_onnx

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
timm = pytest.importorskip("timm")

WAYS = [("dynamo", 23), ("dynamo", 18), ("torchscript", 18), ("program", 23), ("program", 18)]
MODELS: dict[str, dict[str, Any]] = {
    "vit": {"model_name": "test_vit", "img_size": 32, "num_classes": 7, "depth": 2},
    # 20 x 20 tokens in windows of 7: padded, and shifted in every second block
    "swin": {
        "model_name": "swin_tiny_patch4_window7_224", "img_size": 80, "depths": (2, 1),
        "num_heads": (2, 4), "embed_dim": 32, "num_classes": 7,
    },
    "swinv2": {
        "model_name": "swinv2_tiny_window8_256", "img_size": 64, "depths": (2,), "num_heads": (2,),
        "embed_dim": 32, "num_classes": 7, "window_size": 4,
    },
}  # fmt: skip


def exported(module: nn.Module, inputs: tuple[Tensor, ...], way: str, opset: int, path: Path):
    """The ONNX file of `module`, with an open batch."""
    if way == "torchscript":
        names = [f"in_{i}" for i in range(len(inputs))]
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("default", torch.jit.TracerWarning)
            warnings.filterwarnings("ignore", category=torch.jit.TracerWarning, module="elsa_core")
            torch.onnx.export(
                module, inputs, str(path), dynamo=False, opset_version=opset, input_names=names,
                dynamic_axes={name: {0: "batch"} for name in names},
            )  # fmt: skip
        assert not [w for w in seen if "elsa_core" in w.filename]
        return onnx.load(path)
    batch = torch.export.Dim("batch")
    shapes = tuple({0: batch} for _ in inputs)
    if way == "program":
        program = torch.export.export(module, inputs, dynamic_shapes=shapes)
        assert any("elsa." in str(node.target) for node in program.graph.nodes)
        torch.onnx.export(program, f=str(path), opset_version=opset, verbose=False)
    else:
        torch.onnx.export(
            module, inputs, str(path), opset_version=opset, dynamic_shapes=shapes, verbose=False
        )
    return onnx.load(path)


MODELS_BY_WAYS = [(name, *way) for name, way in thinned(MODELS, WAYS, one_in=4)]


@pytest.mark.parametrize(("name", "way", "opset"), MODELS_BY_WAYS)
def test_a_patched_model_exports(name: str, way: str, opset: int, tmp_path: Path) -> None:
    """Standard operators alone, and the original's accuracy at another batch size."""
    torch.manual_seed(0)
    model: nn.Module = timm.create_model(**MODELS[name]).eval()
    for parameter in model.parameters():  # no zero biases
        nn.init.normal_(parameter, std=0.05) if parameter.dim() < 2 else None
    size, path = MODELS[name]["img_size"], tmp_path / "model.onnx"
    images = torch.randn(5, 3, size, size)
    with torch.no_grad():
        peer, exact = model(images), model.double()(images.double())
    assert elsa.patch(model.float()).patched
    found = exported(model, (images[:2],), way, opset, path)
    domains = {each.domain for each in found.opset_import}
    assert domains <= {"", "ai.onnx", "pkg.onnxscript.torch_lib.common"}
    assert found.opset_import[0].version == opset
    assert not [node for node in found.graph.node if node.domain]
    if name == "vit" and opset == 23:
        assert [node.op_type for node in found.graph.node].count("Attention") == 2
    no_worse(run(path, images)[0], peer, exact)
    if importlib.util.find_spec("openvino"):  # 2026.4.1 read the files of every way
        import openvino

        exactly = {"INFERENCE_PRECISION_HINT": "f32"}
        compiled = openvino.Core().compile_model(str(path), "CPU", exactly)
        no_worse(torch.from_numpy(compiled([images.numpy()])[0]), peer, exact)


class Attend(nn.Module):
    """Calls of `elsa.attention` with a mask of each kind, grouped heads and lse."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        seen = torch.rand(7, 9, generator=torch.Generator().manual_seed(3)) > 0.4
        seen[2] = False  # a row that sees no key
        additive = torch.randn(7, 9, generator=torch.Generator().manual_seed(4))
        additive = additive.masked_fill(~seen, -torch.inf)
        self.register_buffer("seen", seen)
        self.register_buffer("additive", additive)

    def forward(self, q: Tensor, k: Tensor, v: Tensor):
        if self.kind == "causal":
            return elsa.attention(q, k, v, is_causal=True, enable_gqa=True, return_lse=True)
        mask = {"bool": self.seen, "additive": self.additive, "none": None}[self.kind]
        dtype = q.dtype
        mask = mask.to(dtype) if self.kind == "additive" else mask
        return elsa.attention(q, k, v, mask, scale=0.3, enable_gqa=True)


KINDS = ("none", "bool", "additive", "causal")


@pytest.mark.parametrize(
    ("kind", "way", "opset"), [(kind, *way) for kind, way in thinned(KINDS, WAYS, one_in=4)]
)
def test_calls_of_attention_export(kind: str, way: str, opset: int, tmp_path: Path) -> None:
    torch.manual_seed(1)
    q, k, v = (torch.randn(3, h, n, 16) for h, n in ((4, 7), (2, 9), (2, 9)))
    module = Attend(kind).eval()
    found = exported(module, (q[:2], k[:2], v[:2]), way, opset, tmp_path / "a.onnx")
    assert not [node for node in found.graph.node if node.domain]
    outs = run(tmp_path / "a.onnx", q, k, v)
    peers, exacts = module(q, k, v), module(q.double(), k.double(), v.double())
    if kind == "causal":
        assert len(outs) == 2
    else:
        peers, exacts = (peers,), (exacts,)
    for out, peer, exact in zip(outs, peers, exacts, strict=True):
        no_worse(out, peer, exact)
    if kind in ("bool", "additive"):
        assert not outs[0][:, :, 2].any()


@pytest.mark.usefixtures("inductor")
def test_translations_leave_the_compiler_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor refuses an operator that PyTorch decomposes, where CI is set."""
    from torch._decomp import get_decompositions

    assert not get_decompositions([operator.overload for operator in ops.RECORDS.values()])
    monkeypatch.setenv("CI", "true")
    torch.manual_seed(5)
    x = torch.randn(1, 2, 5, 8)
    compiled = torch.compile(lambda x: elsa.attention(x, x, x) + 1, fullgraph=True)
    torch.testing.assert_close(compiled(x), elsa.attention(x, x, x) + 1)


class Windows(nn.Module):
    def __init__(self, **terms: Any) -> None:
        super().__init__()
        self.terms = terms

    def forward(self, qkv: Tensor) -> Tensor:
        given = {
            name: t.to(qkv.dtype) if isinstance(t, Tensor) and t.is_floating_point() else t
            for name, t in self.terms.items()
        }
        out: Tensor = elsa.window_attention(qkv, num_heads=2, window_size=(4, 4), **given)
        return out


OF_WINDOWS = ("padded", "table", "grid", "hidden")


@pytest.mark.parametrize(
    ("kind", "way", "opset"), [(kind, *way) for kind, way in thinned(OF_WINDOWS, WAYS, one_in=4)]
)
def test_calls_of_windows_export(kind: str, way: str, opset: int, tmp_path: Path) -> None:
    torch.manual_seed(2)
    hidden = torch.randn(2, 16, 16)
    hidden[1, 3] = -torch.inf  # a row that sees no key
    terms: dict[str, dict[str, Any]] = {
        "padded": {"pad_qkv": torch.randn(48), "shift_size": (1, 2), "mask_value": -torch.inf},
        "table": {
            "bias": torch.randn(9, 2), "bias_index": torch.randint(9, (16, 16)), "scale": 0.2},
        "grid": {"grid": True, "layout": "head", "logit_scale": torch.rand(2) * 9},
        "hidden": {"bias": hidden},
    }  # fmt: skip
    qkv = torch.randn(3, 8, 8, 48) if kind == "grid" else torch.randn(3, 7, 10, 48)
    module = Windows(**terms[kind]).eval()
    found = exported(module, (qkv[:2],), way, opset, tmp_path / "w.onnx")
    assert not [node for node in found.graph.node if node.domain]
    no_worse(run(tmp_path / "w.onnx", qkv)[0], module(qkv), module(qkv.double()))


@pytest.mark.parametrize(
    ("entry", "way"),
    thinned((-1, -9, 9), ("dynamo", "torchscript", "standard", "custom"), one_in=3),
)
def test_an_index_beyond_its_table_is_nan(entry: int, way: str, tmp_path: Path) -> None:
    """An exporter cannot look at it, and ONNX reads a negative one from the end of the table."""
    index = torch.randint(9, (16, 16), generator=torch.Generator().manual_seed(0))
    terms = {"bias": torch.randn(9, 2), "bias_index": index}
    module, qkv = Windows(**terms).eval(), torch.randn(2, 8, 4, 48)
    wanted = module(qkv)
    index[5, 3] = entry
    path = tmp_path / "w.onnx"
    if way in ("standard", "custom"):
        export_onnx(module, (qkv,), path, mode=way)
    else:
        exported(module, (qkv,), way, 18, path)
    out = run(path, qkv)[0]
    spoilt = torch.zeros(2, 8, 4, dtype=torch.bool)
    spoilt[:, 1::4, 1] = True  # token 5 of each window of 4 x 4
    assert torch.equal(out.isnan().all(-1), spoilt)
    torch.testing.assert_close(out[~spoilt], wanted[~spoilt])


def test_torch_jit_script_says_what_to_do() -> None:
    model: nn.Module = timm.create_model("test_vit", img_size=32, scriptable=True).eval()
    elsa.patch(model)
    with pytest.raises(ModelError, match=r"elsa\.export.*elsa\.unpatch") as caught:
        torch.jit.script(model)
    assert "\n" not in str(caught.value)
    elsa.unpatch(model)
    torch.jit.script(model)


def test_a_trace_shows_no_warning_of_elsas_own_code() -> None:
    """Checks of arguments looked to users like faults of their models."""
    code = """
import sys, warnings, timm, torch, elsa_core as elsa
model = timm.create_model("test_vit", img_size=32).eval()
elsa.patch(model, backend="eager")
for once_more in (False, True):
    if once_more:
        warnings.resetwarnings()
        print("all of them", file=sys.stderr)
    torch.jit.trace(model, torch.ones(2, 3, 32, 32), check_trace=False)
"""
    done = python("-c", code)
    usual, mark, every = done.stderr.partition("all of them")
    assert mark

    def warned(text: str) -> int:
        lines = [line for line in text.splitlines() if "elsa_core" in line]
        return sum("TracerWarning" in line for line in lines)

    assert warned(usual) == 0 < warned(every)


class Packed(nn.Module):
    """A call of `elsa.varlen_attention`, a sequence without keys included."""

    def __init__(self, *, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor):
        return elsa.varlen_attention(
            q, k, v, cu_q, cu_k, is_causal=self.is_causal, enable_gqa=True, return_lse=True
        )


@pytest.mark.parametrize(
    ("is_causal", "way"), thinned((False, True), ("dynamo", "program", "torchscript"))
)
def test_calls_of_packed_sequences_export(is_causal: bool, way: str, tmp_path: Path) -> None:
    """The lengths are an input of the graph: others than those of the export are served."""
    torch.manual_seed(6)
    q, k, v = (torch.randn(n, h, 16) for n, h in ((11, 4), (13, 2), (13, 2)))
    path, module = tmp_path / "packed.onnx", Packed(is_causal=is_causal).eval()
    first = (torch.tensor([0, 4, 9, 11]), torch.tensor([0, 5, 6, 13]))
    if way == "torchscript":
        names = ["q", "k", "v", "cu_q", "cu_k"]
        torch.onnx.export(
            module, (q, k, v, *first), str(path), dynamo=False, opset_version=18, input_names=names
        )
    else:
        program = (q, k, v, *first)
        given = torch.export.export(module, program) if way == "program" else module
        torch.onnx.export(
            given, program if way == "dynamo" else (), str(path), opset_version=18, verbose=False
        )
    assert not [node for node in onnx.load(path).graph.node if node.domain]
    other = (torch.tensor([0, 2, 10, 11]), torch.tensor([0, 7, 13, 13]))  # the last sees no key
    outs = run(path, q, k, v, *other)
    exacts = module(*(x.double() for x in (q, k, v)), *other)
    for out, peer, exact in zip(outs, module(q, k, v, *other), exacts, strict=True):
        hidden = exact.isinf()
        assert (out.isinf() == hidden).all() and (exact == -torch.inf).eq(hidden).all()
        no_worse(*(each.masked_fill(hidden, 0.0) for each in (out, peer, exact)))
    assert not outs[0][10:].any()
