"""elsa's ONNX operators: the body, the library's kernel, PyTorch and float64 on the same inputs."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx_files import ULPS, run, session
from torch import Tensor, nn

import elsa_core as elsa
from elsa_core.exporting.onnx import export_onnx
from elsa_core.ops.window.api import window_attention

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


def error(out: Tensor, exact: Tensor) -> float:
    assert out.shape == exact.shape
    return float((out.double() - exact).norm() / exact.norm())


class Sdpa(nn.Module):
    """elsa on [B, H, N, D], as a model."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None
    ) -> Any:
        return elsa.attention(query, key, value, attn_mask, enable_gqa=True, **self.options)


class Folded(nn.Module):
    """A call whose lse is reshaped as its output is, and not used."""

    def forward(self, x: Tensor) -> Tensor:
        out, lse = elsa.attention(x, x, x, return_lse=True)
        lse.unflatten(1, (2, 2))
        folded: Tensor = out.unflatten(1, (2, 2))
        return folded


def test_an_lse_that_is_not_used_is_left_out(tmp_path: Path) -> None:
    """Hiera, whose queries have five dimensions, was refused for its log-sum-exp."""
    path, x = tmp_path / "model.onnx", torch.randn(3, 4, 7, 8)
    export_onnx(Folded(), (x[:2],), path)
    torch.testing.assert_close(run(path, x)[0], Folded()(x))


CASES: dict[str, tuple[tuple[tuple[int, ...], ...], str, dict[str, Any]]] = {
    "plain, odd sizes": (((3, 63, 16), (3, 63, 16), (3, 63, 16)), "", {}),
    "Dv and Nk differ, scale": (((2, 7, 24), (2, 100, 24), (2, 100, 40)), "", {"scale": 0.3}),
    "causal, more keys": (((2, 9, 8), (2, 14, 8), (2, 14, 8)), "", {"is_causal": True}),
    "causal, more queries": (((2, 14, 8), (2, 9, 8), (2, 9, 8)), "", {"is_causal": True}),
    "grouped heads": (((6, 11, 16), (2, 11, 16), (2, 11, 12)), "", {}),
    "float mask": (((3, 13, 16), (3, 17, 16), (3, 17, 16)), "float", {}),
    "bool mask, empty rows": (((3, 13, 16), (3, 17, 16), (3, 17, 16)), "bool", {}),
    "grouped, bool mask": (((4, 13, 16), (2, 17, 16), (2, 17, 16)), "bool", {}),
}


def operands(shapes: tuple[tuple[int, ...], ...], mask: str) -> list[Tensor]:
    torch.manual_seed(0)
    inputs = [torch.randn(5, *shape) for shape in shapes]
    if mask:
        heads, queries = shapes[0][:2]
        open_to = torch.rand(5, 1 if mask == "bool" else heads, queries, shapes[1][1]) > 0.4
        open_to[:, :, 4] = False  # a row that sees no key
        additive = torch.randn(open_to.shape).masked_fill(~open_to, -math.inf)
        inputs.append(open_to if mask == "bool" else additive)
    return inputs


def reference(inputs: list[Tensor], options: dict[str, Any], dtype: torch.dtype) -> Tensor:
    cast = [t.to(dtype) if t.is_floating_point() else t for t in inputs]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return torch.nan_to_num(sdpa(*cast, enable_gqa=True, **options))


@pytest.mark.parametrize("case", CASES)
def test_body_kernel_and_torch_agree_with_float64(case: str, library: str, tmp_path: Path) -> None:
    shapes, mask, options = CASES[case]
    inputs = operands(shapes, mask)
    model = Sdpa(**options)
    exact = reference(inputs, options, torch.float64)
    allowed = 2 * error(reference(inputs, options, torch.float32), exact) + ULPS
    assert error(model(*inputs), exact) <= allowed
    path = tmp_path / "model.onnx"
    export_onnx(model, tuple(t[:2] for t in inputs), path)
    for on in (session(path), session(path, library)):
        for batch in (1, 2, 5):
            (out,) = run(on, *(t[:batch] for t in inputs))
            assert error(out, exact[:batch]) <= allowed
            if mask:
                assert not out[:, :, 4].any()


@pytest.mark.parametrize("case", ["bool mask, empty rows", "grouped, bool mask"])
def test_a_hidden_key_may_hold_nan(case: str, library: str, tmp_path: Path) -> None:
    """By a body, the library's kernel and standard operators; another row sees it."""
    shapes, mask, _ = CASES[case]
    q, k, v, seen = operands(shapes, mask)
    seen[:, :, :, 5] = False
    seen[:, :, 7, 5] = True
    spoilt = k.clone()
    spoilt[:, :, 5] = math.nan
    inputs, wrong = (q, k, v, seen), (q, spoilt, v, seen)
    export_onnx(Sdpa(), inputs, tmp_path / "node.onnx")
    export_onnx(Sdpa(), inputs, tmp_path / "standard.onnx", mode="standard", opset=18)
    node, standard = (tmp_path / f"{name}.onnx" for name in ("node", "standard"))
    reached = torch.zeros(q.shape[:-1], dtype=torch.bool)
    reached[:, :, 7] = True
    for on in (session(node), session(node, library), session(standard)):
        (out,), (again,) = run(on, *inputs), run(on, *wrong)
        assert torch.equal(again.isnan().all(-1), reached)
        assert torch.equal(again[~reached], out[~reached])


@pytest.mark.parametrize("case", ["plain, odd sizes", "float mask", "bool mask, empty rows"])
def test_the_standard_attention_of_opset_23_gives_the_same(case: str, tmp_path: Path) -> None:
    shapes, mask, options = CASES[case]
    inputs = operands(shapes, mask)
    exact = reference(inputs, options, torch.float64)
    path = tmp_path / "model.onnx"
    export_onnx(Sdpa(**options), tuple(inputs), path, mode="standard", opset=23)
    model = onnx.load(path)
    assert "Attention" in {node.op_type for node in model.graph.node}
    assert {node.domain for node in model.graph.node} == {""}
    assert not model.functions
    allowed = 2 * error(reference(inputs, options, torch.float32), exact) + ULPS
    assert error(run(path, *inputs)[0], exact) <= allowed


class Windows(nn.Module):
    def __init__(self, heads: int = 2, head_dim: int = 8, terms: str = "", **options: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        tokens = math.prod(options["window_size"])
        self.options = {"num_heads": heads, **options}
        self.bias = nn.Parameter(torch.randn(heads, tokens, tokens)) if "bias" in terms else None
        self.pad_qkv = nn.Parameter(torch.randn(3 * heads * head_dim)) if "pad" in terms else None
        self.logit_scale = nn.Parameter(torch.rand(heads) * 5) if "logit" in terms else None

    def forward(self, qkv: Tensor) -> Tensor:
        return window_attention(
            qkv, self.bias, pad_qkv=self.pad_qkv, logit_scale=self.logit_scale, **self.options
        )


WINDOWS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "shifted, bias": ((8, 12), {"window_size": (4, 3), "shift_size": (2, 1), "terms": "bias"}),
    "padded by a bias, shifted": (
        (9, 11), {"window_size": (4, 4), "shift_size": (2, 2), "terms": "bias pad"},
    ),
    "cosine, -inf across": (
        (9, 11),
        {"window_size": (4, 4), "shift_size": (2, 0), "mask_value": -math.inf, "terms": "logit"},
    ),
    "grid": ((8, 12), {"window_size": (4, 4), "grid": True, "terms": "bias"}),
    "a window larger than the image, heads first": (
        (5, 2), {"window_size": (7, 7), "shift_size": (3, 3), "layout": "head", "terms": "pad"},
    ),
    "three axes": (
        (5, 6, 7), {"window_size": (2, 4, 3), "shift_size": (1, 2, 1), "terms": "bias pad"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WINDOWS)
def test_windows_agree_with_float64(case: str, library: str, tmp_path: Path) -> None:
    size, options = WINDOWS[case]
    model = Windows(**options)
    qkv = torch.randn(5, *size, 48)
    with torch.no_grad():
        out = model(qkv)
        exact = model.double()(qkv.double())
        model.float()
    allowed = 2 * error(out, exact) + ULPS
    path = tmp_path / "model.onnx"
    export_onnx(model, (qkv[:2],), path)
    for on in (session(path), session(path, library)):
        for batch in (1, 5):
            assert error(run(on, qkv[:batch])[0], exact[:batch]) <= allowed


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_half_precision(dtype: torch.dtype, library: str, tmp_path: Path) -> None:
    inputs = [t.to(dtype) for t in operands(CASES["plain, odd sizes"][0], "")]
    exact = reference(inputs, {}, torch.float64)
    path = tmp_path / "model.onnx"
    export_onnx(Sdpa(), tuple(inputs), path)
    allowed = 2 * error(reference(inputs, {}, dtype), exact)
    for on in (session(path), session(path, library)):
        names = [given.name for given in on.get_inputs()]
        kind = onnx.TensorProto.FLOAT16 if dtype == torch.float16 else onnx.TensorProto.BFLOAT16
        values = [
            ort.OrtValue.ortvalue_from_numpy_with_onnx_type(t.view(torch.int16).numpy(), kind)
            for t in inputs
        ]
        out = on.run_with_ort_values(None, dict(zip(names, values, strict=True)))[0]
        raw = np.empty(tuple(exact.shape), np.int16)
        raw[...] = torch.utils.dlpack.from_dlpack(out._ortvalue.to_dlpack()).view(torch.int16)
        assert error(torch.from_numpy(raw).view(dtype), exact) <= allowed
