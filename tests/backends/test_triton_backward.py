"""The gradient kernels without a GPU: interpreted against float64, and compiled code."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))
import triton_compile
from backward_interpreted import CASES, F16
from interpreted import Rows, rows_of
from sampling import some, thinned

from elsa_core.backends.triton.attention import backward
from elsa_core.backends.triton.attention.backward_tiling import (
    load_table,
    mask_kind,
    serves,
    tile_for,
)
from elsa_core.backends.triton.attention.tiling import Shape

KINDS = {
    "Lse": "fp32", "GradLse": "fp32", "Rows": "fp32", "Guards": "i32", "Factors": "fp32",
    "Halves": "fp16",
}  # fmt: skip
NEEDS = (True, True, True, True)


NAMES = some(CASES)


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Rows]:
    """This run's cases of backward_interpreted.py, in a process of its own."""
    with rows_of("backward_interpreted.py", *NAMES) as rows:
        yield rows


@pytest.mark.parametrize("name", NAMES)
def test_interpreted_error(interpreted, name):
    """Against float64 autograd, within twice float32 autograd's own error; twice the same bits."""
    row = interpreted[name]
    # turbo's forward holds 11 bits of the lse from which the weights come
    band = 1e-3 if CASES[name][2] == "turbo" else 6e-4 if CASES[name][1] == F16 else 5e-7
    assert row["finite"] and row["same"] and row["errors"] and row["fence"]
    for operand, error in row["errors"].items():
        assert error < 2 * row["peer"][operand] + band, (operand, error, row["peer"][operand])


@pytest.mark.parametrize("name", [n for n in NAMES if "needs" in CASES[n][3]])
def test_what_is_not_needed_is_empty(interpreted, name):
    needs = CASES[name][3]["needs"]
    assert [shape != [0] for shape in interpreted[name]["shapes"]] == [bool(n) for n in needs]


def planned(dtype, precision="strict", *, mask=None, causal=False, tiles="h200", dim=64):
    """The launches of a backward of 4 heads on a machine without a GPU."""
    q, k = (torch.empty((1, 4, n, dim), dtype=dtype, device="meta") for n in (300, 333))
    lse = torch.empty((1, 4, 300), device="meta")
    mode = "half" if dtype != torch.float32 else backward.PRECISIONS[precision]
    options = backward.Options(causal, dim**-0.5, mode, NEEDS, mode == "half", tiles)
    operands = {"q": q, "k": k, "v": k, "g": q, "o": q, "l": lse, "dq": q, "dk": k, "dv": k}
    return backward.plan_call(operands, mask, options)


def compiled(monkeypatch, launch, dtype, arch):
    """A launch's code. Split operands are float16 where the gradients are float32."""
    monkeypatch.setattr(triton_compile, "POINTERS", {**triton_compile.POINTERS, **KINDS})
    if launch.tail["MODE"] == backward.MODES["split"]:
        for name in ("DQ", "DK", "DV_", "Mask"):
            triton_compile.POINTERS[name] = "fp32"
        dtype = torch.float16
    return triton_compile.compile_launch(launch, dtype, "cuda", arch).asm


def launches(call):
    return [x for x in (call.prepare, *call.sides, call.fallback, call.mask) if x is not None]


@pytest.mark.parametrize(
    ("target", "dtype"),
    thinned(
        [(80, "default"), (90, "h200"), (120, "default")],
        [torch.float16, torch.bfloat16, torch.float32],
        one_in=3,
    ),
)
def test_compiles(monkeypatch, target, dtype):
    arch, tiles = target
    for launch in launches(planned(dtype, tiles=tiles)):
        assert "cubin" in compiled(monkeypatch, launch, dtype, arch)


@pytest.mark.parametrize("dtype", some([torch.float16, torch.float32]))
def test_compiles_with_a_bias_and_causal(monkeypatch, dtype):
    mask = torch.empty((1, 4, 300, 333), dtype=dtype, device="meta")
    call = planned(dtype, mask=mask, causal=True)
    assert call.mask is not None and len(call.sides) == (2 if dtype == torch.float16 else 1)
    for launch in (*call.sides, call.mask):
        assert "cubin" in compiled(monkeypatch, launch, dtype, 90)


def test_products_are_what_the_precision_says(monkeypatch):
    strict = compiled(monkeypatch, planned(torch.float32).sides[0], torch.float32, 90)["ptx"]
    assert "wgmma" in strict and "f32.f16.f16" in strict
    lean = planned(torch.float32, "lean")
    assert lean.fallback is None
    for side in lean.sides:
        assert "tf32" in compiled(monkeypatch, side, torch.float32, 90)["ptx"]


def test_no_atomics(monkeypatch):
    for dtype in (torch.float16, torch.float32):
        for launch in launches(planned(dtype)):
            ptx = compiled(monkeypatch, launch, dtype, 90)["ptx"]
            assert not re.search(r"(?<![\w.])(atom|red)\.", ptx)


@pytest.mark.parametrize("name", ["h200", "default"])
def test_tables_serve_every_call(name):
    modes = [*backward.MODES]
    for mode in modes:
        for side in ("key", "query", *(["mask", "normalise"] if mode != "split" else [])):
            for dim in (16, 32, 64, 128, 256):
                for keys in (5, 197, 100000):
                    tile = tile_for(name, mode, side, dim, keys)
                    assert 128 % tile.block_m == 0 and 128 % tile.block_n == 0
    assert load_table(name).measured == (name == "h200")
    with pytest.raises(LookupError, match="512"):
        tile_for(name, "half", "key", 512, 5)


def test_workspace_is_linear_in_the_rows():
    """Terms of rows, factors and halves: no product of lengths."""
    sizes = []
    for n in (1280, 2560):
        q = torch.empty((1, 2, n, 64), device="meta")
        lse = torch.empty((1, 2, n), device="meta")
        operands = dict.fromkeys(("q", "k", "v", "g", "o", "dq", "dk", "dv"), q)
        options = backward.Options(False, 0.125, "split", NEEDS, False, "h200")
        call = backward.plan_call({**operands, "l": lse}, None, options)
        sizes.append((call.rows, call.guards, call.factors, sum(call.halves)))
    assert [b / a for a, b in zip(*sizes, strict=True)] == [2.0] * 4


def test_routing_follows_measurements(monkeypatch):
    """float32 from about 100 keys on, on sm_90 alone; PyTorch serves what was not measured."""
    device = torch.device("cuda", 0)
    shape = Shape(8, 12, 12, 197, 197, 64, 64)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    for mask in ("none", "causal", "bool"):
        assert serves(shape, torch.float32, mask, device)
        assert not serves(shape, torch.float16, mask, device)
    assert not serves(shape, torch.float32, "bias", device)
    assert serves(shape._replace(keys=1025, queries=1025), torch.float32, "bias", device)
    assert not serves(shape, torch.float32, "causal bias", device)
    assert not serves(shape, torch.float64, "none", device)
    assert not serves(shape._replace(keys=49), torch.float32, "none", device)
    assert not serves(shape._replace(head_dim=256), torch.float32, "none", device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert not serves(shape, torch.float32, "none", device)


def test_masks_have_kinds():
    bias = torch.zeros(1, 1, 2, 2)
    assert mask_kind(None, False) == "none" and mask_kind(None, True) == "causal"
    assert mask_kind(bias, False) == "bias" and mask_kind(bias > 0, False) == "bool"
    assert mask_kind(bias, True) == "causal bias"
