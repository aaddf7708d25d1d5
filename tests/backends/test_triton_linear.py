"""The linear kernel without a GPU: interpreted, compiled, and which tile serves what."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))
from interpreted import Rows, rows_of
from triton_compile import compile_launch

from elsa_core.backends.triton.linear import gemm as kernel

HERE = Path(__file__).parent
NAMES = [
    "one tile", "no bias", "ragged", "several groups", "tall", "large", "narrow", "images",
    "strided weight", "half", "half, ragged", "large numbers", "largest numbers", "small numbers",
    "one small row", "zeros", "whole numbers", "infinity", "not a number",
]  # fmt: skip


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Rows]:
    """Every case of linear_interpreted.py, in a process of its own."""
    with rows_of("linear_interpreted.py") as rows:
        yield rows


@pytest.mark.parametrize("name", NAMES)
def test_interpreted(interpreted, name):
    row = interpreted[name]
    assert row["same"]  # NaNs and infinities, where PyTorch has them
    assert row["error"] <= 2 * row["peer"] + 2**-24
    assert row["row"] <= 1e-6 or name.startswith("half")


def test_whole_numbers_are_exact(interpreted):
    assert interpreted["whole numbers"]["error"] == 0.0


def test_interpreted_cases_are_all_here(interpreted):
    assert sorted(interpreted) == sorted(NAMES)


def planned(rows, depth, columns, dtype=torch.float32):
    x = torch.empty(rows, depth, dtype=dtype, device="meta")
    w = torch.empty(columns, depth, dtype=dtype, device="meta")
    return kernel.plan(x, w, w[:, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("columns", [288, 768, 2304])
def test_compiles(dtype, columns):
    call = planned(1576, 96 if dtype != torch.float32 else 768, columns, dtype)
    compiled = compile_launch(call, dtype, "cuda", 90)
    text = compiled.asm["ptx"]
    assert "wgmma.mma_async" in text
    assert "st.global.v4" in text  # results leave 16 bytes at a time
    assert ("tf32" in text) == (dtype == torch.float32)
    assert compiled.metadata.shared <= 227 * 1024


def test_no_length_is_compiled_in():
    calls = [planned(rows, 768, 2304) for rows in (1576, 1577, 4608)]
    constants = [
        {n: v for n, v in call.tail.items() if n.isupper()} | call.options for call in calls
    ]
    assert constants[0] == constants[1] == constants[2]


@pytest.mark.parametrize(
    ("shape", "tile"),
    [
        # rows, columns, channels: the fastest tile on one H200, or one within 5% of it
        ((25088, 288, 96), kernel.TALL),
        ((131072, 288, 96), kernel.TALL),
        ((25088, 384, 128), kernel.TALL),
        ((25088, 96, 96), kernel.SMALL),
        ((6272, 576, 192), kernel.LARGE),
        ((6272, 192, 192), kernel.SMALL),
        ((6272, 768, 256), kernel.SMALL),
        ((4097, 576, 192), kernel.SMALL),
        ((1568, 1152, 384), kernel.LARGE),
        ((1568, 384, 384), kernel.NARROW),
        ((1568, 1536, 512), kernel.SMALL),
        ((1576, 2304, 768), kernel.LARGE),
        ((1576, 768, 768), kernel.SMALL),
        ((1576, 1024, 1024), kernel.LARGE),
        ((1576, 3072, 1024), kernel.LARGE),
        ((4097, 768, 768), kernel.SMALL),
        ((392, 2304, 768), kernel.SMALL),
        ((392, 768, 768), kernel.SMALL),
        ((197, 768, 768), kernel.NARROW),
        ((197, 576, 192), kernel.NARROW),
        ((4096, 4096, 4096), kernel.LARGE),
    ],
)
def test_tiles_are_those_measured(shape, tile):
    assert kernel.tile_for(*shape, True, 132) == tile
