"""The ONNX Runtime library on its own: hand-made models, hostile ones, threads, old runtimes."""

import ctypes
import gc
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx_files import one_node
from processes import at_once

import elsa_core  # noqa: F401  (defines the operator)
from elsa_core.backends import native
from elsa_core.exporting import ort_library

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
from onnx import TensorProto  # noqa: E402

FLOAT, HALF, DOUBLE, INT, BOOL = (
    TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.INT64, TensorProto.BOOL,
)  # fmt: skip
NUMPY = {
    FLOAT: np.float32, HALF: np.float16, DOUBLE: np.float64, INT: np.int64, BOOL: np.bool_,
}  # fmt: skip


@pytest.fixture(scope="module")
def library() -> str:
    return str(ort_library.build())


def model(op_type: str, types: list[int | None], **attributes: Any) -> bytes:
    """One node whose inputs have a type but no shape."""
    inputs = [None if kind is None else (kind, None) for kind in types]
    return one_node(op_type, inputs, **attributes)


def session(library: str, made: bytes, threads: int = 2) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    options.register_custom_ops_library(library)
    return ort.InferenceSession(made, options, providers=["CPUExecutionProvider"])


def run(on: Any, *arrays: np.ndarray) -> np.ndarray:
    names = [given.name for given in on.get_inputs()]
    out: np.ndarray = on.run(None, dict(zip(names, arrays, strict=True)))[0]
    return out


def softmax_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, kind: type = np.float64
) -> np.ndarray:
    q, k, v = (x.astype(kind) for x in (q, k, v))
    scores = q @ k.swapaxes(-1, -2) * kind(q.shape[-1] ** -0.5)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    result: np.ndarray = weights / weights.sum(-1, keepdims=True) @ v
    return result


def error(out: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(out - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_packed_attention_on_the_sessions_threads(threads: int, library: str) -> None:
    rng = np.random.default_rng(0)
    qkv = rng.standard_normal((3, 197, 3 * 4 * 16), dtype=np.float32)
    on = session(library, model("PackedAttention", [FLOAT], num_heads=4), threads)
    q, k, v = qkv.reshape(3, 197, 3, 4, 16).transpose(2, 0, 3, 1, 4)
    exact = softmax_attention(q, k, v).transpose(0, 2, 1, 3).reshape(3, 197, 64)
    peer = softmax_attention(q, k, v, np.float32).transpose(0, 2, 1, 3).reshape(3, 197, 64)
    assert error(run(on, qkv), exact) <= 2 * error(peer, exact) + 2.4e-7


def test_two_threads_share_a_session(library: str) -> None:
    on = session(library, model("Attention", [FLOAT] * 3))
    rng = np.random.default_rng(0)
    given = [
        [rng.standard_normal((2, 3, n, 32), np.float32) for n in (m, 77, 77)] for m in (50, 90)
    ]
    alone = [run(on, *arrays) for arrays in given]

    def work(index: int) -> None:
        for _ in range(30):
            assert np.array_equal(run(on, *given[index]), alone[index])

    at_once(work, (0, 1))


def test_sessions_come_and_go(library: str) -> None:
    made = model("PackedAttention", [FLOAT], num_heads=2)
    qkv = np.ones((1, 5, 3 * 2 * 8), np.float32)
    for _ in range(5):
        on = session(library, made)
        assert np.allclose(run(on, qkv), 1)
        del on
        gc.collect()


def test_one_true_is_no_mask_and_one_false_hides_everything(library: str) -> None:
    on = session(library, model("Attention", [FLOAT, FLOAT, FLOAT, BOOL]))
    q = np.random.default_rng(0).standard_normal((1, 2, 9, 8), np.float32)
    plain = session(library, model("Attention", [FLOAT] * 3))
    assert np.array_equal(run(on, q, q, q, np.array(True)), run(plain, q, q, q))
    assert not run(on, q, q, q, np.array([[False]])).any()


@pytest.mark.parametrize("heads", [1, 2])
def test_packed_attention_reads_its_mask(heads: int, library: str) -> None:
    rng = np.random.default_rng(0)
    qkv = rng.standard_normal((2, 9, 3 * heads * 8), np.float32)
    mask = rng.random((2, 1, 9, 9)) > 0.4
    packed = session(library, model("PackedAttention", [FLOAT, BOOL], num_heads=heads))
    plain = session(library, model("Attention", [FLOAT, FLOAT, FLOAT, BOOL]))
    q, k, v = (np.ascontiguousarray(x) for x in _apart(qkv, heads))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    given = [torch.from_numpy(x) for x in (q, k, v)]
    exact = sdpa(*(x.double() for x in given), torch.from_numpy(mask)).numpy()
    peer = sdpa(*given, torch.from_numpy(mask)).numpy()
    out = run(plain, q, k, v, mask)
    assert error(out, exact) <= 2 * error(peer, exact) + 2.4e-7
    expected = out.transpose(0, 2, 1, 3).reshape(2, 9, heads * 8)
    assert np.array_equal(run(packed, qkv, mask), expected)


def _apart(qkv: np.ndarray, heads: int) -> np.ndarray:
    batch, tokens, channels = qkv.shape
    shape = (batch, tokens, 3, heads, channels // (3 * heads))
    return qkv.reshape(shape).transpose(2, 0, 3, 1, 4)


def test_empty_inputs_give_empty_or_zero_outputs(library: str) -> None:
    on = session(library, model("Attention", [FLOAT] * 3))
    f = np.float32
    assert run(on, *[np.ones((0, 2, 3, 4), f)] * 3).size == 0
    out = run(on, np.ones((1, 2, 3, 4), f), np.ones((1, 2, 0, 4), f), np.ones((1, 2, 0, 5), f))
    assert out.shape == (1, 2, 3, 5)
    assert not out.any()
    packed = session(library, model("PackedAttention", [FLOAT], num_heads=2))
    assert run(packed, np.ones((2, 0, 12), f)).shape == (2, 0, 4)


TERMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shift and padding": {"shift_size": [0, 1, 2], "pad": True, "bias": True},
    "three axes": {"window_size": [2, 2, 4], "shift_size": [1, 1, 0], "size": (3, 5, 4)},
    "heads first": {"layout": "head", "shift_size": [0, 2, 1], "mask_value": -1.5, "bias": True},
    "grid": {"grid": 1, "size": (1, 6, 8), "bias": True},
    "cosine": {"cosine": True, "bias": True, "shift_size": [0, 1, 1]},
    "scale": {"scale": 0.7},
    "one head, one image": {"num_heads": 1, "batch": 1, "pad": True, "bias": True},
}


@pytest.mark.parametrize("kind", [FLOAT, HALF], ids=["float", "half"])
@pytest.mark.parametrize("case", TERMS)
def test_windows_are_those_of_the_torch_operator(case: str, kind: int, library: str) -> None:
    """Both libraries hold the same kernels: the bindings say the same problem, to the last bit."""
    assert native.load().ok
    given = {
        "num_heads": 2, "window_size": [1, 3, 4], "shift_size": [0, 0, 0], "size": (1, 5, 7),
        "batch": 2, "layout": "qkv", "grid": 0, "mask_value": -100.0, **TERMS[case],
    }  # fmt: skip
    heads, window, batch = given["num_heads"], given["window_size"], given["batch"]
    rng = np.random.default_rng(7)
    tokens, channels = math.prod(window), 3 * heads * 16
    parts = {"bias": (heads, tokens, tokens), "pad": (channels,), "cosine": (heads,)}
    kinds = {"bias": kind, "pad": kind, "cosine": FLOAT}
    arrays = [rng.standard_normal((batch, *given["size"], channels)).astype(NUMPY[kind])]
    terms = [
        rng.standard_normal(shape).astype(NUMPY[kinds[name]]) if given.get(name) else None
        for name, shape in parts.items()
    ]
    types = [kind, *(None if t is None else kinds[n] for n, t in zip(parts, terms, strict=True))]
    attributes = {k: v for k, v in given.items() if k not in ("size", "batch", *parts)}
    on = session(library, model("WindowAttention", types, **attributes))
    out = run(on, *arrays, *(term for term in terms if term is not None))
    qkv, bias, pad, cosine = (
        None if array is None else torch.from_numpy(array) for array in [*arrays, *terms]
    )
    expected = torch.ops.elsa.window_attention(
        qkv, bias, None, pad, cosine, heads, window, given["shift_size"],
        given.get("scale", 0.25), given["mask_value"], given["layout"], bool(given["grid"]),
        "strict",
    )  # fmt: skip
    assert np.isfinite(out).all() and np.array_equal(out, expected.numpy())


WINDOW = {"num_heads": 2, "window_size": [1, 2, 2], "shift_size": [0, 1, 1]}
Q = (FLOAT, (1, 1, 2, 4))
IMAGE = (FLOAT, (1, 1, 4, 4, 12))
PACKED = (FLOAT, (1, 2, 12))
# op, attributes, (dtype, shape) of each input (None: left out), words of the error
HOSTILE: dict[str, tuple[str, dict[str, Any], list[Any], str]] = {
    "rank": ("Attention", {}, [(FLOAT, (3, 4))] * 3, "4 dimensions"),
    "scalars": ("Attention", {}, [(FLOAT, ())] * 3, "4 dimensions"),
    "rank 9": ("Attention", {}, [(FLOAT, (1,) * 9)] * 3, "9 dimensions"),
    "head_dim 0": ("Attention", {}, [(FLOAT, (1, 1, 2, 0))] * 3, "head_dim"),
    "head_dim 257": ("Attention", {}, [(FLOAT, (1, 1, 2, 257))] * 3, "head_dim"),
    "batches": ("Attention", {}, [(FLOAT, (2, 1, 2, 4)), Q, Q], "batch"),
    "tokens": ("Attention", {}, [Q, Q, (FLOAT, (1, 1, 3, 4))], "tokens"),
    "heads": ("Attention", {}, [(FLOAT, (1, 3, 2, 4)), *[(FLOAT, (1, 2, 2, 4))] * 2], "multiple"),
    "no key heads": ("Attention", {}, [Q, *[(FLOAT, (1, 0, 2, 4))] * 2], "multiple"),
    "mask shape": ("Attention", {}, [Q, Q, Q, (FLOAT, (3, 2))], "attn_mask"),
    "mask rank": ("Attention", {}, [Q, Q, Q, (FLOAT, (1, 1, 1, 2, 2))], "attn_mask"),
    "mask dtype": ("Attention", {}, [Q, Q, Q, (INT, (2, 2))], "attn_mask"),
    "mask of another half": ("Attention", {}, [Q, Q, Q, (HALF, (2, 2))], "attn_mask"),
    "no num_heads": ("PackedAttention", {}, [PACKED], "num_heads"),
    "num_heads 0": ("PackedAttention", {"num_heads": 0}, [PACKED], "num_heads"),
    "num_heads < 0": ("PackedAttention", {"num_heads": -3}, [PACKED], "num_heads"),
    "num_heads a text": ("PackedAttention", {"num_heads": "4"}, [PACKED], "num_heads"),
    "channels": ("PackedAttention", {"num_heads": 5}, [PACKED], "12 channels"),
    "no channels": ("PackedAttention", {"num_heads": 2}, [(FLOAT, (1, 2, 0))], "head_dim"),
    "image rank": ("WindowAttention", WINDOW, [(FLOAT, (1, 4, 4, 12))], "5 dimensions"),
    "image channels": ("WindowAttention", WINDOW, [(FLOAT, (1, 1, 4, 4, 13))], "13 channels"),
    "no window_size": ("WindowAttention", {"num_heads": 2}, [IMAGE], "window_size"),
    "two axes": ("WindowAttention", {**WINDOW, "window_size": [2, 2]}, [IMAGE], "window_size"),
    "window 0": ("WindowAttention", {**WINDOW, "window_size": [1, 0, 2]}, [IMAGE], "window_size"),
    "vast": ("WindowAttention", {**WINDOW, "window_size": [2**62] * 3}, [IMAGE], "window_size"),
    "large": ("WindowAttention", {**WINDOW, "window_size": [60000] * 3}, [IMAGE], "tokens"),
    "long shift": ("WindowAttention", {**WINDOW, "shift_size": [0, 2, 0]}, [IMAGE], "shift_size"),
    "a grid that does not divide": (
        "WindowAttention", {**WINDOW, "shift_size": [0, 0, 0], "grid": 1},
        [(FLOAT, (1, 1, 4, 5, 12))], "grid",
    ),
    "bias shape": ("WindowAttention", WINDOW, [IMAGE, (FLOAT, (2, 4, 3))], "bias"),
    "bias dtype": ("WindowAttention", WINDOW, [IMAGE, (HALF, (2, 4, 4))], "bias"),
    "pad_qkv": ("WindowAttention", WINDOW, [IMAGE, None, (FLOAT, (11,))], "pad_qkv"),
    "logit_scale": ("WindowAttention", WINDOW, [IMAGE, None, None, (FLOAT, (3,))], "logit_scale"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_model_is_an_error_not_a_crash(case: str, library: str) -> None:
    op_type, attributes, inputs, words = HOSTILE[case]
    made = model(op_type, [None if i is None else i[0] for i in inputs], **attributes)
    arrays = [np.ones(i[1], NUMPY[i[0]]) for i in inputs if i is not None]
    with pytest.raises(Exception, match=re.escape(words)) as caught:
        run(session(library, made), *arrays)
    assert "elsa::" in str(caught.value)


@pytest.mark.parametrize("types", [[DOUBLE] * 3, [INT] * 3, [FLOAT, HALF, FLOAT], [FLOAT, FLOAT]])
def test_wrong_types_are_refused_when_the_model_is_read(types: list[int], library: str) -> None:
    with pytest.raises(Exception, match="ONNXRuntimeError"):
        session(library, model("Attention", types))


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm of binutils is not installed")
def test_it_exports_one_function_and_needs_no_runtime(library: str) -> None:
    exported = subprocess.run(
        ["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True
    ).stdout
    functions = [line.split()[-1] for line in exported.splitlines() if line.split()[1] in "TW"]
    assert functions == ["RegisterCustomOps"]
    needed = subprocess.run(
        ["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True
    ).stdout
    assert not re.search(r"\b(_?Py|Ort|_ZN2at|_ZN3c10)", needed)


def test_an_older_runtime_is_told_so(library: str) -> None:
    """A runtime that knows API version 16 at most, played by this process."""
    said = []
    status_type = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)
    create_status = status_type(lambda code, text: said.append((code, text)) or 1)
    entries = (ctypes.c_void_p * 275)()
    entries[0] = ctypes.cast(create_status, ctypes.c_void_p)
    get_api = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)(
        lambda version: ctypes.addressof(entries) if version <= 16 else None
    )
    base = (ctypes.c_void_p * 2)(ctypes.cast(get_api, ctypes.c_void_p), None)
    register = ctypes.CDLL(library).RegisterCustomOps
    register.restype = ctypes.c_void_p
    assert register(None, ctypes.byref(base)) == 1
    assert said
    assert b"1.17 or later" in said[0][1]


def test_building_again_does_nothing(library: str) -> None:
    before = Path(library).stat().st_mtime_ns
    assert str(ort_library.build()) == library
    assert Path(library).stat().st_mtime_ns == before
