"""Linear layers of small eager calls on a GPU past PyTorch's dispatcher."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

import elsa_core as elsa
from elsa_core import short_calls
from elsa_core.backends import cuda
from elsa_core.patching.adapters import flat

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
HALF = (torch.float16, torch.bfloat16)
TERMS = {
    "bare": ("none", False, False),
    "gelu": ("gelu", False, False),
    "scaled": ("none", True, True),
    "all": ("silu", True, True),
}


@pytest.fixture(autouse=True)
def on_sm90():
    if torch.cuda.get_device_capability() != (9, 0) or not cuda.serves("linear"):
        pytest.skip("measured on sm_90 alone, by the CUDA library")
    with torch.inference_mode():
        yield


def exact(x, weight, bias, activation, residual, scale):
    out = F.linear(x.double(), weight.double(), bias.double())
    out = {"none": lambda y: y, "gelu": F.gelu, "silu": F.silu}[activation](out)
    out = out if scale is None else out * scale.double()
    return out if residual is None else residual.double() + out


def by_pytorch(x, weight, bias, activation, residual, scale):
    out = F.linear(x, weight, bias)
    out = {"none": lambda y: y, "gelu": F.gelu, "silu": F.silu}[activation](out)
    out = out if scale is None else out * scale
    return out if residual is None else residual + out


@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 197, 192, 576), (2, 77, 768, 776), (1, 197, 3072, 768), (3, 100, 96, 64)], ids=str
)
def test_agrees_with_float64(shape, dtype, terms):
    batch, rows, depth, columns = shape
    activation, has_residual, has_scale = terms
    torch.manual_seed(0)
    like = {"device": "cuda", "dtype": dtype}
    x = torch.randn(batch, rows, depth, **like)
    weight, bias = torch.randn(columns, depth, **like) / depth**0.5, torch.randn(columns, **like)
    residual = torch.randn(batch, rows, columns, **like) if has_residual else None
    scale = torch.randn(columns, **like) if has_scale else None
    given = (x, weight, bias, activation, residual, scale)
    way = short_calls.small_way(x)
    first, launched = way(*given), _launched()
    second = way(*given)
    assert _launched() == launched + 1, "the second call does not pass by the dispatcher"
    assert torch.equal(first, second) and second.dtype == dtype
    expected = exact(*given)
    ours, theirs = ((out.double() - expected).abs() for out in (second, by_pytorch(*given)))
    assert ours.max() <= 2 * theirs.max() and ours.mean() <= 2 * theirs.mean()


def _launched() -> int:
    from elsa_core.backends.cuda import library

    return library.load().counts()[1]


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_a_model_by_it(dtype, monkeypatch):
    """As exact as the original, from the first call on; not what was patched otherwise."""
    torch.manual_seed(0)
    model = elsa.load("vit_tiny_patch16_224", device="cuda", dtype=dtype).eval()
    images = torch.randn(2, 3, 224, 224, device="cuda", dtype=dtype)
    expected = copy.deepcopy(model).double()(images.double())
    worst = (model(images).double() - expected).abs().max()
    patched = copy.deepcopy(model)
    elsa.patch(patched)
    served = []

    def counted(*given):
        out = own(*given)
        served.append(out is not None)
        return out

    own = short_calls.small_product
    monkeypatch.setattr(short_calls, "small_product", counted)
    for _ in range(4):
        before = len(served)
        assert (patched(images).double() - expected).abs().max() <= 2 * worst
    assert len(served) - before == 48 and all(served[before:])
    alone = copy.deepcopy(model)
    elsa.patch(alone, scope="attention")
    for _ in range(4):  # in the first one sites load kernels for CUDA graphs, their layers' too
        before = len(served)
        alone(images)
    assert len(served) == before, "the layers are the user's own"
    with torch.autocast("cuda", dtype=torch.bfloat16):
        before = len(served)
        patched(images)
        assert len(served) == before


FRESH = """
import torch, elsa_core as elsa
from elsa_core import short_calls
model = elsa.load("vit_tiny_patch16_224", device="cuda", dtype=torch.float16).eval()
elsa.patch(model)
own, served = short_calls.small_product, []
def counted(*given):
    served.append(own(*given))
    return served[-1]
short_calls.small_product = counted
with torch.inference_mode():
    for _ in range(3):
        served.clear()
        model(torch.zeros(1, 3, 224, 224, device="cuda", dtype=torch.float16))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(torch.zeros(1, 3, 224, 224, device="cuda", dtype=torch.float16))
print(sum(out is not None for out in served))
"""


def test_a_fresh_process_loads_all_kinds():
    """The first operator of a process loads the library that plans it; a graph follows."""
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, check=True)
    assert done.stdout == "48\n"


def test_who_would_see_it_sees_pytorchs(monkeypatch):
    x = torch.randn(1, 64, 64, device="cuda")
    assert short_calls.small_way(x) is not None
    with torch.inference_mode(False), torch.enable_grad():
        assert short_calls.small_way(x) is None
    with torch.autocast("cuda"):
        assert short_calls.small_way(x) is None
    monkeypatch.setattr(short_calls, "_takes_tf32", lambda: True)
    assert short_calls.small_way(x) is None and short_calls.small_way(x.half()) is not None
    block = elsa.load("vit_tiny_patch16_224", device="cuda").eval().blocks[0]
    with torch.profiler.profile():
        assert short_calls.small_way(x.half()) is None
    tokens = torch.randn(1, 17, 192, device="cuda")
    assert torch.equal(flat.served(block, flat.block, tokens), block(tokens))
