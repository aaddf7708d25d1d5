"""The alpha-entmax kernels without a GPU: interpreted against float64, and compiled code."""

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
from entmax_interpreted import CASES, F16, OTHERS
from interpreted import Rows, rows_of
from sampling import some

import elsa_core as elsa
from elsa_core import dispatch
from elsa_core.backends import eager_entmax
from elsa_core.backends.support import Request, Support
from elsa_core.backends.triton.attention import entmax
from elsa_core.backends.triton.shared.device import Described, describing

KINDS = {
    "Alpha": "fp32", "Rows": "fp32", "Tiles": "u8", "Lists": "i32", "Delta": "fp32",
    "DAlpha": "fp32", "Norms": "fp32",
}  # fmt: skip
# bytes of shared memory that a program may have
SHARED = {80: 163 << 10, 90: 227 << 10, 120: 99 << 10}


NAMES = some(CASES)
if "sparse tiles" not in NAMES:  # a test of its own looks at it
    NAMES.append("sparse tiles")


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Rows]:
    """This run's cases of entmax_interpreted.py, in a process of its own."""
    with rows_of("entmax_interpreted.py", *NAMES, *OTHERS) as rows:
        yield rows


@pytest.mark.parametrize("name", NAMES)
def test_interpreted_error(interpreted, name):
    """Against float64, within twice float32's own error in plain PyTorch; twice the same bits."""
    row = interpreted[name]
    band = 6e-4 if CASES[name][1] == F16 else 2.4e-7
    assert row["finite"] and row["same"] and row["errors"] and row["fence"]
    for operand, error in row["errors"].items():
        assert error < 2 * row["peer"][operand] + band, (operand, error, row["peer"][operand])


@pytest.mark.parametrize("name", NAMES)
def test_tiles_are_those_of_float64(interpreted, name):
    _, missing, more = interpreted[name]["tiles"]
    assert missing == more == 0


def test_tiles_are_skipped(interpreted):
    row = interpreted["sparse tiles"]
    assert 0 < row["tiles"][0] < row["all"]


def test_every_size_of_block_computes_the_same(interpreted):
    row = interpreted["blocks"]
    assert row["error"] < 6e-4 and row["other_tiles"] == 0


def test_nan_stays_in_its_rows(interpreted):
    same = interpreted["not numbers"]["same"]
    assert all(same.values()), same


def planned(dtype, alpha=1.5, *, needs=(), mask=None, causal=False, dim=64, heads=None):
    """The launches of a call of 4 heads on a machine without a GPU."""
    q, k = (torch.empty((1, 4, n, dim), dtype=dtype, device="meta") for n in (300, 333))
    options = entmax.Options(alpha, causal, dim**-0.5, "strict", needs)
    operands = {"q": q, "k": k, "v": k}
    operands |= {"o": q, **({"g": q, "dq": q, "dk": k, "dv": k} if needs else {})}
    call = entmax.plan_call(operands, mask, heads, options)
    found = (call.forward, call.by_rows, call.by_columns, call.query, call.key)
    return [launch for launch in found if launch is not None]


def supported(arch, dtype, dim):
    """What a GPU of that architecture is told."""
    with describing(Described("a GPU", divmod(arch, 10), 132)):
        return entmax.support(Request("cuda", dtype, dim, dim, "strict", "entmax_attention")).ok


@pytest.mark.parametrize(("version", "served"), [((3, 6), True), ((3, 8), False), ((3, 9), True)])
def test_small_gpus_are_refused_where_triton_takes_more(monkeypatch, version, served):
    monkeypatch.setattr(entmax, "triton_version", lambda: version)
    assert supported(120, torch.float32, 64) is served
    for other in ((90, torch.float32, 64), (120, torch.float32, 32), (120, torch.float16, 64)):
        assert supported(*other)


def test_float32_on_an_amd_gpu_is_refused_but_for_ieee(monkeypatch):
    """Triton has no products of three TF32 ones there, and `auto` asks `support` alone."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    request = Request("cuda", torch.float32, 64, 64, "strict", "entmax_attention")
    assert "AMD" in entmax.support(request).reason
    assert "AMD" in entmax.support(request._replace(precision="lean")).reason
    assert entmax.support(request._replace(precision="ieee")).ok
    assert entmax.support(request._replace(dtype=torch.float16)).ok


def compiled(monkeypatch, launch, dtype, arch):
    monkeypatch.setattr(triton_compile, "POINTERS", {**triton_compile.POINTERS, **KINDS})
    return triton_compile.compile_launch(launch, dtype, "cuda", arch)


@pytest.mark.parametrize(
    ("arch", "dtype"),
    some([(80, torch.float16), (90, torch.float32), (120, torch.float32)], one_in=3),
)
def test_compiles_and_fits(monkeypatch, arch, dtype):
    """The largest head dimensions, forward and backward; no atomics."""
    dim = entmax.LARGEST_WIDE if dtype == torch.float32 else entmax.LARGEST_HALF
    launches = [*planned(dtype, dim=dim), *planned(dtype, dim=dim, needs=(True,) * 5)]
    assert len(launches) == 5
    for launch in launches:
        kernel = compiled(monkeypatch, launch, dtype, arch)
        fits = kernel.metadata.shared <= SHARED[arch]
        assert fits or not supported(arch, dtype, dim)
        assert not re.search(r"(?<![\w.])(atom|red)\.", kernel.asm["ptx"])


def test_compiles_with_a_mask_causal_and_alpha_of_heads(monkeypatch):
    heads = torch.empty((1, 4, 1, 1), device="meta")
    mask = torch.empty((1, 1, 300, 333), dtype=torch.bool, device="meta")
    backward = {"mask": mask, "needs": (True, True, True, False, True)}
    for given in ({"causal": True}, backward):
        for launch in planned(torch.bfloat16, 0.0, heads=heads, **given):
            assert "cubin" in compiled(monkeypatch, launch, torch.bfloat16, 90).asm


def test_products_are_what_the_precision_says(monkeypatch):
    (launch,) = planned(torch.float32)
    assert "tf32" in compiled(monkeypatch, launch, torch.float32, 80).asm["ptx"]


def test_what_the_kernels_share_with_the_operator():
    assert entmax.TILE == eager_entmax.TILE


@pytest.mark.parametrize("operator", ["entmax_attention", "entmax_varlen_attention"])
def test_auto_chooses_them_where_they_serve_and_says_why_not(monkeypatch, operator):
    request = Request("cuda", torch.float32, 64, 64, "strict", operator, gradient=("query",))
    monkeypatch.setattr("elsa_core.backends.triton._environment", lambda _: Support(True))
    assert "triton" in dispatch.names(operator)
    of_mask = "; of an additive mask plain PyTorch" if operator == "entmax_attention" else ""
    for backend in ("auto", "triton"):
        assert dispatch.select(request, backend) == ("triton", ())
        said = dispatch.route(request, backend).reasons
        assert said == (f"gradients: kernels of the same backend{of_mask}",)
    others = {
        "head dimension": request._replace(head_dim=128),
        "float64": request._replace(dtype=torch.float64),
    }
    for word, other in others.items():
        name, (reason,) = dispatch.select(other)
        assert name == "eager" and reason.startswith("triton: ") and word in reason
        said = dispatch.route(other).reasons
        assert said[-1] == "gradients: recomputed in plain PyTorch"
    monkeypatch.setattr("elsa_core.backends.triton._environment", lambda _: Support(False, "none"))
    assert dispatch.select(request) == ("eager", ("triton: none",))


def test_support_says_why_not():
    request = Request("cuda", torch.float32, 64, 64, "strict", "entmax_attention")
    assert "256" in entmax.support(request._replace(head_dim=256)).reason
    assert "lean" not in entmax.support(request._replace(precision="lean")).reason
    assert "turbo" in entmax.support(request._replace(precision="turbo")).reason
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(elsa.errors.UnavailableError, match="triton"):
        elsa.entmax_attention(q, q, q, backend="triton")


def test_columns_are_listed_only_where_something_reads_them():
    """The query's gradient alone: in float16 for the norms of values, in float32 not at all."""
    names = [
        launch.kernel.__name__ for launch in planned(torch.float32, needs=(True,) + (False,) * 4)
    ]
    assert names == ["list_tiles", "query_gradient"]
    names = [
        launch.kernel.__name__ for launch in planned(torch.float16, needs=(True,) + (False,) * 4)
    ]
    assert names == ["list_tiles", "list_tiles", "query_gradient"]
