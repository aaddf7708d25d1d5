"""Forms of linear layers that no GPU has run yet, without one: interpreted and compiled."""

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

from elsa_core.backends.triton.linear import gated, gemm, launches, planner, rounded
from elsa_core.backends.triton.shared.device import Described, describing
from elsa_core.routing.measured import CENTRED, FORMS, HALF, linear_form, unmeasured

SHARED = {80: 163, 90: 227, 120: 99}
GATED = [
    "one tile", "ragged", "large", "shallow", "no biases", "one bias", "the other bias", "packed",
    "strided weights", "frozen", "frozen, packed", "padded", "normed", "normed, frozen", "gelu",
    "no activation", "centred", "small rows", "one small row", "large rows",
    "channels of other magnitude", "normed, an outlier gain", "zeros", "disjoint", "infinity",
    "not a number",
]  # fmt: skip
ROUNDED = [
    "one tile", "ragged", "images", "large", "frozen", "strided weight", "padded", "all terms",
    "large rows", "beyond float16", "small rows", "denormal rows", "one small row",
    "channels of other magnitude", "zeros", "infinity", "not a number",
]  # fmt: skip
HALVES = [f"{name}, float16" for name in ("gelu", "silu", "residual", "all terms", "deep")]
CENTRED_CASES = ["64 channels at once", "32 channels at once"]
# kind of case: those of this run, and all that the program has
KINDS = {
    "gated": (some(GATED), program.GATED), "rounded": (some(ROUNDED), program.ROUNDED_CASES),
    "half": (some(HALVES), program.HALVES), "centred": (CENTRED_CASES, program.CENTRED_CASES),
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


@pytest.mark.parametrize("name", some(ROUNDED))
def test_rounded(interpreted, name):
    """The peer's operands have the 11 bits that TF32 has."""
    row = interpreted[f"rounded, {name}"]
    assert row["same"] and row["intact"]
    assert row["error"] <= 1.1 * row["peer"] + 2**-24
    assert row["row"] <= 2**-10


@pytest.mark.parametrize("name", some(HALVES))
def test_half(interpreted, name):
    """What follows the product is rounded once, PyTorch's after each step."""
    row = interpreted[f"half, {name}"]
    assert row["same"] and row["intact"]
    assert row["error"] <= row["peer"]


@pytest.mark.parametrize("name", CENTRED_CASES)
def test_centred(interpreted, name):
    row = interpreted[f"centred, {name}"]
    assert row["intact"]
    assert row["moved"] == pytest.approx(row["wanted"], rel=0.25)


def test_interpreted_cases_are_all_here(interpreted):
    """The program has no case that no run looks at."""
    names = [f"{kind}, {name}" for kind, (part, _) in KINDS.items() for name in part]
    assert sorted(interpreted) == sorted(names)
    listed = {"gated": GATED, "rounded": ROUNDED, "half": HALVES, "centred": CENTRED_CASES}
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
    ("target", "normed"),
    thinned([(80, 360), (90, 360), (120, 360), (120, 1152)], [False, True], one_in=4),
)
def test_gated_compiles(target, normed):
    arch, columns = target
    norm = launches.Norm(True, True, 1e-6) if normed else None
    with unmeasured(*((CENTRED,) if normed else ())), planned_for(arch):
        call = gated.Gated(
            *meta(1370, 1536, columns), (True, True), "silu", single=False, regions=None, norm=norm
        )
    compiled = compile_launch(call.multiply, torch.float32, "cuda", arch)
    text = compiled.asm["ptx"]
    assert ("wgmma.mma_async" if arch == 90 else "mma.sync") in text
    assert "cp.async.cg.shared.global" in text  # rows of both weights, 16 bytes at a time
    assert "cp.async.ca" not in text
    assert compiled.metadata.shared <= SHARED[arch] * 1024


@pytest.mark.parametrize(
    ("arch", "columns"), some([(80, 2304), (90, 2304), (90, 768), (120, 2304)], one_in=4)
)
def test_rounded_compiles(arch, columns):
    with planned_for(arch):
        call = rounded.Rounded(*meta(1576, 768, columns), (True, "gelu", True, True), False)
    compiled = compile_launch(call.multiply, torch.float32, "cuda", arch)
    text = compiled.asm["ptx"]
    assert ("wgmma.mma_async" if arch == 90 else "mma.sync") in text and "cp.async.cg" in text
    assert compiled.metadata.shared <= SHARED[arch] * 1024
    compile_launch(call.split, torch.float32, "cuda", arch)


@pytest.mark.parametrize(
    ("dtype", "arch"), thinned([torch.float16, torch.bfloat16], [80, 90, 120], one_in=3)
)
def test_half_compiles(dtype, arch):
    vector = torch.empty(3072, dtype=dtype, device="meta")
    residual = torch.empty(1576, 3072, dtype=dtype, device="meta")
    with unmeasured(HALF):
        call = gemm.plan(*meta(1576, 768, 3072, dtype), vector, "gelu", residual, vector)
    compiled = compile_launch(call, dtype, "cuda", arch)
    text = compiled.asm["ptx"]
    assert ("wgmma.mma_async" if arch == 90 else "mma.sync") in text
    assert "st.global.v4" in text
    assert compiled.metadata.shared <= SHARED[arch] * 1024


@pytest.mark.parametrize("arch", some([80, 90, 120], one_in=3))
def test_centred_compiles(arch):
    with unmeasured(CENTRED):
        calls = [
            planner.Forward(*shape, (True, "none", False, False), False, False)
            for shape in (meta(1576, 768, 2304), meta(1576, 768, 768))
        ]
    assert [call.multiply.launch.tail["CENTRE"] for call in calls] == [1, 2]
    for call in calls[arch == 120 :]:
        compiled = compile_launch(call.multiply.launch, torch.float32, "cuda", arch)
        assert "fma.rn.f32" in compiled.asm["ptx"]


def test_no_form_is_chosen():
    device = torch.device("cuda", 0)
    assert not any(linear_form(form, device) for form in FORMS)
    x, w = meta(1576, 768, 768)
    assert isinstance(
        planner.planned(x, w, None, "none", None, None, "turbo", False), planner.Forward
    )
    assert (
        planner.Forward(x, w, launches.NO_EPILOGUE, False, False).multiply.launch.tail["CENTRE"]
        == 0
    )
    x, w = meta(1576, 768, 768, torch.float16)
    assert gemm.plan(x, w, None).tail["BK"] == launches.LARGE.depth
