"""model.onnx on ONNX Runtime's CUDA provider, by the library and plans of a bundle, on a GPU."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx_files import one_node
from processes import at_once, python, without

import elsa_core  # noqa: F401  (defines the operators)
from elsa_core.backends import cuda, eager_window
from elsa_core.backends.cuda import library, planfile
from elsa_core.exporting import gpu_library, ort_library

pytest.importorskip("triton")
pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

PROVIDER = "CUDAExecutionProvider"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        PROVIDER not in ort.get_available_providers(), reason=f"onnxruntime has no {PROVIDER}"
    ),
]
ROOT = Path(__file__).parents[2]
ULPS = 2.4e-7  # two roundings, so that a peer that happens to be exact is no trap
ROWS = 2
TYPES = {"float32": 1, "bool": 9, "float16": 10}
HEADS: dict[str, Any] = {"is_causal": 0, "scale": 0.125}
PACKED: dict[str, Any] = {"num_heads": 3, "is_causal": 0, "scale": 0.125}
WINDOW: dict[str, Any] = {
    "num_heads": 3, "window_size": [1, 7, 7], "shift_size": [0, 3, 3], "scale": 0.25,
    "mask_value": -100.0, "layout": "qkv", "grid": 0,
}  # fmt: skip
QKV, IMAGE = ("batch", 197, 576), ("batch", 1, 14, 14, 288)
# op_type, attributes, (type, sizes) of each input; "" is the case's own type
NODES: dict[str, tuple[str, dict[str, Any], list[Any]]] = {
    "heads": ("Attention", HEADS, [("", ("batch", 3, 197, 64))] * 3),
    "causal": ("Attention", {**HEADS, "is_causal": 1}, [("", ("batch", 3, 77, 64))] * 3),
    "a mask for each": (
        "Attention", HEADS, [("", ("batch", 3, 197, 64))] * 3 + [("bool", ("batch", 3, 197, 197))],
    ),
    "packed": ("PackedAttention", PACKED, [("", QKV)]),
    "packed, masked": ("PackedAttention", PACKED, [("", QKV), ("float32", (197, 197))]),
    "windows": ("WindowAttention", WINDOW, [("", IMAGE), ("", (3, 49, 49))]),
    "cosine windows": (
        "WindowAttention", WINDOW,
        [("", IMAGE), ("", (3, 49, 49)), ("", (288,)), ("float32", (3,))],
    ),
}  # fmt: skip
Session = Callable[..., np.ndarray]


def bundle(folder: Path, name: str, dtype: str) -> Path:
    """The node, and lib/ with the plans of its calls on this GPU."""
    op_type, terms, inputs = NODES[name]
    path = folder / "model.onnx"
    given = [(TYPES[kind or dtype], sizes) for kind, sizes in inputs]
    path.write_bytes(one_node(op_type, given, **terms))
    if not cuda.status().ok:
        pytest.skip(f"the CUDA library: {cuda.status().reason}")

    def run() -> None:
        for call in gpu_library.of_nodes(path, ROWS, "strict", torch.device("cuda", 0)):
            call()

    found = gpu_library.without_precision(planfile.recorded(library.load(), run), "strict")
    major, minor = torch.cuda.get_device_capability(0)
    (folder / "lib").mkdir()
    plans = planfile.write({10 * major + minor: found}, f"batches of {ROWS}")
    (folder / gpu_library.PLANS).write_bytes(plans)
    shutil.copyfile(ort_library.build(on_gpu=True), folder / "lib" / "libelsa_onnxruntime.so")
    return folder


def session(folder: Path, provider: str = PROVIDER) -> Session:
    """A node's session, of which no node goes to the CPU unless that is the provider."""
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(folder / "lib" / "libelsa_onnxruntime.so"))
    if provider == PROVIDER:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    made = ort.InferenceSession(str(folder / "model.onnx"), options, providers=[provider])
    assert made.get_providers()[0] == provider
    names = [each.name for each in made.get_inputs()]

    def run(*arrays: np.ndarray) -> np.ndarray:
        out: np.ndarray = made.run(None, dict(zip(names, arrays, strict=True)))[0]
        return out

    return run


def inputs_of(name: str, dtype: str, rows: int = ROWS) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    found = []
    for kind, sizes in NODES[name][2]:
        array = rng.standard_normal([rows if n == "batch" else n for n in sizes])
        found.append(array > -1 if kind == "bool" else array.astype(kind or dtype))
    return found


def computed(name: str, arrays: list[np.ndarray], dtype: torch.dtype, on: str) -> torch.Tensor:
    """The node by PyTorch in a dtype on a device."""
    op_type, terms, _ = NODES[name]
    tensors = [torch.from_numpy(each).to(on) for each in arrays]
    given = [t if t.dtype == torch.bool else t.to(dtype) for t in tensors]
    if op_type == "WindowAttention":
        qkv, bias, pad, cosine = [*given, None, None][:4]
        if cosine is not None and dtype == torch.float16:
            cosine = cosine.float()
        out: torch.Tensor = eager_window.attention(
            qkv, bias, None, pad, cosine, terms["num_heads"], terms["window_size"],
            terms["shift_size"], terms["scale"], terms["mask_value"], terms["layout"], False,
            "strict",
        )  # fmt: skip
        return out
    if op_type == "PackedAttention":
        batch, tokens, _ = given[0].shape
        apart = given[0].reshape(batch, tokens, 3, terms["num_heads"], -1)
        given = [*apart.permute(2, 0, 3, 1, 4).unbind(), *given[1:]]
    q, k, v, mask = [*given, None][:4]
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, mask, is_causal=bool(terms["is_causal"]), scale=terms["scale"]
    )
    return out if op_type == "Attention" else out.transpose(1, 2).reshape(batch, tokens, -1)


def error(out: torch.Tensor, exact: torch.Tensor) -> float:
    return float((out.cpu().double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", NODES)
def test_a_node_is_exact(name: str, dtype: str, tmp_path: Path) -> None:
    """Within twice the error of PyTorch's own kernels, or of the same file on the CPU."""
    folder, arrays = bundle(tmp_path, name, dtype), inputs_of(name, dtype)
    out = session(folder)(*arrays)
    exact = computed(name, arrays, torch.float64, "cpu")
    peers = (
        computed(name, arrays, getattr(torch, dtype), "cuda"),
        torch.from_numpy(session(folder, "CPUExecutionProvider")(*arrays)),
    )
    largest = max(error(peer, exact) for peer in peers)
    assert error(torch.from_numpy(out), exact) <= 2 * largest + ULPS
    assert np.array_equal(session(folder)(*arrays), out)


def test_threads_share_a_session(tmp_path: Path) -> None:
    """Each run has a stream and scratch of its own."""
    folder = bundle(tmp_path, "packed", "float16")
    run, arrays = session(folder), inputs_of("packed", "float16")[0]
    given = [arrays * np.float16(factor) for factor in (1, 0.5, 2)]
    alone = [run(each) for each in given]

    def work(index: int) -> None:
        for _ in range(100):
            assert np.array_equal(run(given[index]), alone[index])

    at_once(work, range(3))


def test_a_batch_without_a_plan_is_one_error(tmp_path: Path) -> None:
    run = session(bundle(tmp_path, "packed", "float32"))
    with pytest.raises(Exception, match=r"PackedAttention of \[5, 3, 197, 64\].* on sm_") as caught:
        run(*inputs_of("packed", "float32", rows=5))
    assert f"batches of {ROWS}" in str(caught.value)
    assert np.isfinite(run(*inputs_of("packed", "float32"))).all()


EXPORTED = """
import sys
import timm, torch
import elsa_core as elsa
from elsa_core.exporting.verify import verify
model = timm.create_model("vit_tiny_patch16_224", img_size=160, depth=2, num_classes=10)
model = model.to("cuda", getattr(torch, sys.argv[2])).eval()
elsa.patch(model, scope="attention")
bundle = elsa.export(model, sys.argv[1], formats=("onnx", "pt2"))
assert [each.status for each in bundle.artefacts] == ["ok", "ok"], bundle.artefacts
assert verify(sys.argv[1]).ok
"""
RUN = """
sys.path.insert(0, sys.argv[1])
import numpy as np
import load
images = np.random.default_rng(0).normal(size=(2, 3, 160, 160)).astype(np.float32)
outs = [load.load("onnx", device=device)(images)[0].astype(float) for device in ("cuda", "cpu")]
print(float(np.linalg.norm(outs[0] - outs[1]) / np.linalg.norm(outs[1])))
"""


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_bundle_runs_without_torch(tmp_path: Path, dtype: str) -> None:
    """`export` has verified it on this GPU; the CPU gives the same logits but for rounding."""
    pytest.importorskip("timm")
    pytest.importorskip("onnxscript")
    folder = tmp_path / "bundle"
    done = python("-c", EXPORTED, folder, dtype, timeout=600)
    assert done.returncode == 0, done.stderr
    facts = json.loads((folder / "manifest.json").read_text())
    assert facts["artefacts"]["onnx"]["runtime"] == {"onnxruntime": ">=1.18"}
    assert "CUDAExecutionProvider" in (folder / "README.md").read_text()
    done = python("-B", "-c", without("elsa_core", "timm", "torch") + RUN, folder)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.splitlines()[-1]) < (1e-4 if dtype == "float32" else 1e-2)
