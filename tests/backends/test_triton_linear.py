"""The linear kernel without a GPU: interpreted, compiled, and which tile serves what."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))
import linear_interpreted as program
from interpreted import Rows, rows_of
from sampling import some, thinned
from triton_compile import compile_launch

from elsa_core.backends.triton.linear import gemm, launches, planner
from elsa_core.backends.triton.pack import cases
from elsa_core.backends.triton.shared.device import describing
from elsa_core.profiling.bench.tune.linear import SHAPES

HERE = Path(__file__).parent
NAMES = [
    "one tile", "no bias", "ragged", "several groups", "large", "wide", "medium", "shallow",
    "images", "strided weight", "frozen", "long rows", "half", "half, ragged", "large numbers",
    "largest numbers", "small numbers", "one small row", "channels of other magnitude", "zeros",
    "whole numbers", "infinity", "not a number", *launches.ACTIVATIONS[1:], "scale", "residual",
    "residual of what is not finite",
]  # fmt: skip
HOSTILE = [
    "rows of x", "rows of w", "rows of both", "outlier channel of x", "outlier channel of w",
    "outlier channels", "denormals in x", "denormals in w", "denormal results", "not finite in x",
    "not finite in w", "disjoint", "large times large", "an entry of 1e5",
]  # fmt: skip
GRADIENTS = [(70, 64, 72, 1), (300, 72, 136, 3), (64, 136, 64, 1)]
HOSTILE_GRADIENTS = [
    "rows of the gradient", "rows of all", "outlier channels", "infinity", "not a number", "both",
    "not finite in x", "large times large",
]  # fmt: skip
SHOWN = list(dict.fromkeys([*some(NAMES), "whole numbers"]))
CHOSEN = [
    *SHOWN,
    *(f"hostile, {name}" for name in some(HOSTILE)),
    *(f"gradient {case}" for case in some(GRADIENTS)),
    *(f"hostile gradient, {name}" for name in some(HOSTILE_GRADIENTS)),
]


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Rows]:
    """This run's cases of linear_interpreted.py, in a process of its own."""
    with rows_of("linear_interpreted.py", *CHOSEN) as rows:
        yield rows


@pytest.mark.parametrize("name", SHOWN)
def test_interpreted(interpreted, name):
    row = interpreted[name]
    assert row["same"]  # NaNs and infinities, where PyTorch has them
    assert row["fence"]
    assert row["error"] <= 2 * row["peer"] + 2**-24
    assert row["row"] <= 1e-6 or name.startswith("half")


def test_whole_numbers_are_exact(interpreted):
    assert interpreted["whole numbers"]["error"] == 0.0


@pytest.mark.parametrize("case", some(GRADIENTS))
def test_interpreted_gradients(interpreted, case):
    for ours, peer in interpreted[f"gradient {case}"]["errors"]:
        assert ours <= 2 * peer + 2**-24


@pytest.mark.parametrize("name", some(HOSTILE))
def test_interpreted_hostile(interpreted, name):
    row = interpreted[f"hostile, {name}"]
    assert row["same"] and row["fence"]
    assert row["excess"] <= 2**-24


@pytest.mark.parametrize("name", some(HOSTILE_GRADIENTS))
def test_interpreted_hostile_gradients(interpreted, name):
    """In sums that one product dominates PyTorch rounds once, and operands have 22 bits here."""
    row = interpreted[f"hostile gradient, {name}"]
    assert row["same"] and row["fence"]
    assert max(row["excess"]) <= (2**-23 if name.startswith("rows") else 2**-24)


def test_interpreted_cases_are_all_here(interpreted):
    """The program has no case that no run looks at."""
    assert sorted(interpreted) == sorted(CHOSEN)
    assert sorted(program.CASES) == sorted(NAMES)
    assert sorted(program.HOSTILE) == sorted(HOSTILE) and program.GRADIENTS == GRADIENTS
    assert sorted(program.HOSTILE_GRADIENTS) == sorted(HOSTILE_GRADIENTS)


def meta(rows, depth, columns, dtype=torch.float32):
    x = torch.empty(rows, depth, dtype=dtype, device="meta")
    w = torch.empty(columns, depth, dtype=dtype, device="meta")
    return x, w


EPILOGUES = [(True, "none", False, False), (True, "gelu", True, True), (False, "silu", False, True)]


SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 120: 99}
TILES = {name: getattr(launches, name) for name in ("LARGE", "NARROW", "WIDE", "SHALLOW", "SMALL")}


@pytest.mark.parametrize(
    ("epilogue", "arch", "name"), thinned(EPILOGUES, SHARED, [*TILES, "MEDIUM"], one_in=12)
)
def test_compiles(epilogue, arch, name):
    """Whether a tile fits is computed: as the compiler has it."""
    gpu = launches.Gpu(132, SHARED[arch] << 10, divmod(arch, 10))
    tile = launches.fitting(getattr(launches, name), gpu)
    call = launches.Multiply(
        launches.Shape(1576, 768, 768), (768, 1), (768, 1), torch.device("meta"), tile=tile,
        epilogue=epilogue,
    )  # fmt: skip
    compiled = compile_launch(call.launch, torch.float32, "cuda", arch)
    text = compiled.asm["ptx"]
    assert ("wgmma.mma_async" if arch == 90 else "mma.sync") in text
    assert "cp.async" in text
    assert compiled.metadata.shared == launches.shared_memory_of(tile, gpu) <= gpu.shared_memory


@pytest.mark.parametrize("gpu", [gpu for arch in SHARED for gpu in cases.gpus(arch)], ids=str)
def test_products_fit(gpu):
    """Those of `elsa bench linear --tune`, and their gradients' products."""
    found = []
    with describing(gpu.facts):
        limits = launches.gpu_of(torch.device("meta"))
        assert limits.shared_memory == gpu.shared_memory == SHARED[gpu.arch] << 10
        for rows, depth, columns in SHAPES:
            x, w = meta(rows, depth, columns)
            calls = planner.Backward(torch.empty(rows, columns, device="meta"), x, w, (True,) * 3)
            forward = planner.Forward(x, w, EPILOGUES[0], False, False)
            found += [forward.multiply, calls.of_input, calls.of_weight]
    for multiply in found:
        tail, options = multiply.launch.tail, multiply.launch.options
        tile = launches.Tile(
            tail["BM"], tail["BN"], tail["BK"], options["num_warps"], tail["STAGES"]
        )  # fmt: skip
        assert tile in (*TILES.values(), launches.MEDIUM)
        assert launches.shared_memory_of(tile, limits) <= gpu.shared_memory


def test_small_shared_memory_takes_smaller_tiles():
    gpu = launches.Gpu(128, 99 << 10, (8, 9))
    shape = launches.Shape(8200, 3072, 768)
    assert launches.tile_for(shape, gpu) == launches.NARROW
    assert launches.cut_for(launches.Shape(3072, 768, 8200), gpu)[0] == launches.NARROW
    blocks = gpu._replace(shared_memory=64 << 10)
    assert launches.tile_for(shape, blocks) == launches.MEDIUM
    assert launches.tile_for(shape, gpu._replace(shared_memory=163 << 10)) == launches.LARGE


@pytest.mark.parametrize("arch", some([80, 90, 120], one_in=3))
def test_splits_compile(arch):
    rows = launches.split_launch((1576, 768, 768), 768, 768)
    turned = launches.Turned(1577, 768, 768)
    for launch in (rows, turned.maxima, turned.split):
        compiled = compile_launch(launch, torch.float32, "cuda", arch)
        assert compiled.metadata.shared <= 99 * 1024
    assert "ld.global.v4" in compile_launch(rows, torch.float32, "cuda", arch).asm["ptx"]


@pytest.mark.parametrize(("dtype", "columns"), thinned([torch.float16, torch.bfloat16], [288, 768]))
def test_half_compiles(dtype, columns):
    compiled = compile_launch(gemm.plan(*meta(1576, 96, columns, dtype), None), dtype, "cuda", 90)
    assert "wgmma.mma_async" in compiled.asm["ptx"]
    assert "st.global.v4" in compiled.asm["ptx"]  # results leave 16 bytes at a time


def test_no_length_is_compiled_in():
    calls = [
        planner.Forward(*meta(rows, 768, 2304), EPILOGUES[0], False, False).multiply.launch
        for rows in (1576, 1577, 3152)
    ]
    constants = [
        {n: v for n, v in call.tail.items() if n.isupper()} | call.options for call in calls
    ]
    assert constants[0] == constants[1] == constants[2]


@pytest.mark.parametrize(
    ("shape", "tile"),
    [
        ((1576, 2304, 768), launches.LARGE),
        ((1576, 768, 768), launches.MEDIUM),
        ((1576, 3072, 768), launches.LARGE),
        ((1576, 768, 3072), launches.MEDIUM),
        ((32800, 3072, 768), launches.LARGE),
        ((197, 2304, 768), launches.WIDE),
        ((197, 768, 768), launches.SMALL),
        ((392, 3072, 768), launches.LARGE),
        ((25088, 384, 96), launches.SHALLOW),
        ((25088, 96, 384), launches.LARGE),
        ((6272, 192, 768), launches.LARGE),
    ],
)
def test_tiles_are_those_measured(shape, tile):
    assert launches.tile_for(launches.Shape(*shape), launches.H200) == tile


@pytest.mark.parametrize(
    ("shape", "cut"),
    [
        ((768, 768, 1576), (launches.SMALL, 1)),
        ((2304, 768, 1576), (launches.LARGE, 1)),
        ((3072, 768, 5480), (launches.LARGE, 7)),
        ((768, 768, 8200), (launches.LARGE, 7)),
        ((768, 192, 6272), (launches.SMALL, 7)),
    ],
)
def test_long_sums_are_cut(shape, cut):
    assert launches.cut_for(launches.Shape(*shape), launches.H200) == cut
