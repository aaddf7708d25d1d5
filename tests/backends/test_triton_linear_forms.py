"""Gated units and half-precision products without a GPU: interpreted and compiled."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))
import linear_forms_interpreted as program
from interpreted import Rows, rows_of
from sampling import some, thinned
from triton_compile import compile_launch

from elsa_core.backends.triton.linear import gated, gemm
from elsa_core.backends.triton.shared.device import Described, describing

SHARED = {80: 163, 90: 227, 120: 99}
GATED = [
    "one tile", "ragged", "large", "shallow", "no biases", "one bias", "the other bias", "packed",
    "strided weights", "frozen", "frozen, packed", "gelu", "no activation", "small rows",
    "one small row", "large rows", "channels of other magnitude", "zeros", "disjoint",
    "infinity", "not a number",
]  # fmt: skip
HALVES = [f"{name}, float16" for name in ("gelu", "silu", "residual", "all terms")]
# kind of case: those of this run, and all that the program has
KINDS = {
    "gated": (some(GATED), program.GATED), "half": (some(HALVES), program.HALVES),
}  # fmt: skip


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Rows]:
    """This run's cases of linear_forms_interpreted.py, in a process of its own."""
    names = [f"{kind}, {name}" for kind, (part, _) in KINDS.items() for name in part]
    with rows_of("linear_forms_interpreted.py", *names) as rows:
        yield rows


@pytest.mark.parametrize("name", some(GATED))
def test_gated(interpreted, name):
    row = interpreted[f"gated, {name}"]
    assert row["same"] and row["intact"]
    assert row["error"] <= 2 * row["peer"] + 2**-24


@pytest.mark.parametrize("name", some(HALVES))
def test_half(interpreted, name):
    """What follows the product is rounded once, PyTorch's after each step."""
    row = interpreted[f"half, {name}"]
    assert row["same"] and row["intact"]
    assert row["error"] <= row["peer"]


def test_interpreted_cases_are_all_here(interpreted):
    """The program has no case that no run looks at."""
    names = [f"{kind}, {name}" for kind, (part, _) in KINDS.items() for name in part]
    assert sorted(interpreted) == sorted(names)
    listed = {"gated": GATED, "half": HALVES}
    assert {kind: sorted(held) for kind, (_, held) in KINDS.items()} == {
        kind: sorted(names) for kind, names in listed.items()
    }


def meta(rows, depth, columns, dtype=torch.float32):
    x = torch.empty(rows, depth, dtype=dtype, device="meta")
    w = torch.empty(columns, depth, dtype=dtype, device="meta")
    return x, w


def planned_for(arch):
    """Plans are for a GPU of that architecture."""
    return describing(Described("a GPU", divmod(arch, 10), 132))


@pytest.mark.parametrize(
    ("arch", "columns"), some([(80, 360), (90, 360), (120, 360), (120, 1152)], one_in=2)
)
def test_gated_compiles(arch, columns):
    with planned_for(arch):
        call = gated.Gated(
            *meta(1370, 1536, columns), (True, True), "silu", single=False, regions=None
        )
    compiled = compile_launch(call.multiply, torch.float32, "cuda", arch)
    text = compiled.asm["ptx"]
    assert ("wgmma.mma_async" if arch == 90 else "mma.sync") in text
    assert "cp.async.cg.shared.global" in text  # rows of both weights, 16 bytes at a time
    assert "cp.async.ca" not in text
    assert compiled.metadata.shared <= SHARED[arch] * 1024


@pytest.mark.parametrize(
    ("dtype", "arch"), thinned([torch.float16, torch.bfloat16], [80, 90, 120], one_in=3)
)
def test_half_compiles(dtype, arch):
    vector = torch.empty(384, dtype=dtype, device="meta")
    residual = torch.empty(1576, 384, dtype=dtype, device="meta")
    call = gemm.plan(*meta(1576, 96, 384, dtype), vector, "gelu", residual, vector)
    compiled = compile_launch(call, dtype, "cuda", arch)
    text = compiled.asm["ptx"]
    assert ("wgmma.mma_async" if arch == 90 else "mma.sync") in text
    assert "st.global.v4" in text
    assert compiled.metadata.shared <= SHARED[arch] * 1024
