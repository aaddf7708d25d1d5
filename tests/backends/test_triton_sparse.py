"""The kernel of `elsa::sparse_attention` without a GPU: interpreted, and compiled code."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))
import triton_compile
from interpreted import Rows, rows_of
from sampling import some
from skipping_interpreted import CASES, F16

import elsa_core as elsa
from elsa_core import dispatch
from elsa_core.backends.support import Request
from elsa_core.backends.triton.attention import sparse
from elsa_core.base import skipping
from elsa_core.ops.sparse import record as operator

KINDS = {"Index": "i64", "Counts": "i64"}
# bytes of shared memory that a program may have
SHARED = {80: 163 << 10, 90: 227 << 10, 120: 99 << 10}
SEEN, LEFT_OUT, MAXIMA, RESCALED, AGAIN = range(5)


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Rows]:
    """Every case of skipping_interpreted.py, in a process of its own."""
    with rows_of("skipping_interpreted.py") as rows:
        yield rows


@pytest.mark.parametrize("name", list(CASES))
def test_interpreted_error(interpreted, name):
    """Against float64, within twice float32's own error in plain PyTorch; twice the same bits."""
    row = interpreted[name]
    band = 1e-3 if CASES[name][1] == F16 else 2.4e-7
    assert row["finite"] and row["same"] and row["fence"] and row["hidden"]
    assert row["error"] <= 2 * row["peer"] + band, (row["error"], row["peer"])
    assert row["lse"] <= 1e-6
    assert (row["hidden_rows"] > 0) == ("mask" in CASES[name][4])


def test_tiles_are_left_out(interpreted):
    for name in ("exact, groups, odd widths", "causal", "half", "all relief, tiles left out"):
        counts = interpreted[name]["counts"]
        assert counts[LEFT_OUT] >= 0.25 * counts[SEEN], name
    assert interpreted["ties"]["counts"][LEFT_OUT] == 0
    assert interpreted["first keys hidden"]["counts"][LEFT_OUT] > 0


def test_what_relief_removes(interpreted):
    plain, frozen = interpreted["summaries"]["counts"], interpreted["frozen"]["counts"]
    assert plain[MAXIMA] == plain[SEEN] and frozen[MAXIMA] < frozen[SEEN]
    assert frozen[RESCALED] < plain[RESCALED] and frozen[AGAIN] == 0
    for name in ("frozen, passed", "half, frozen, passed", "first keys hidden"):
        assert interpreted[name]["counts"][AGAIN] > 0, name
    assert interpreted["large scores come last"]["counts"][AGAIN] == 0


def planned(dtype, *, dim=64, mask=None, causal=False, threshold=-20.0, relief=0):
    """The launch of a call of 4 heads on a machine without a GPU."""
    q, k = (torch.empty((1, 4, n, dim), dtype=dtype, device="meta") for n in (300, 333))
    options = sparse.Options(causal, dim**-0.5, "strict", threshold, relief)
    return sparse.plan_call(q, k, k, mask, options)


def compiled(monkeypatch, launch, dtype, arch):
    monkeypatch.setattr(triton_compile, "POINTERS", {**triton_compile.POINTERS, **KINDS})
    return triton_compile.compile_launch(launch, dtype, "cuda", arch)


@pytest.mark.parametrize(
    ("arch", "dtype"),
    some([(80, torch.float16), (90, torch.float32), (120, torch.bfloat16)], one_in=3),
)
def test_compiles_and_fits(monkeypatch, arch, dtype):
    """The largest head dimensions, with everything on; integers alone are added by atomics."""
    dim = sparse.LARGEST_WIDE if dtype == torch.float32 else sparse.LARGEST_HALF
    kernel = compiled(monkeypatch, planned(dtype, dim=dim, causal=True, relief=7), dtype, arch)
    assert kernel.metadata.shared <= SHARED[arch]
    atomics = re.findall(r"(?<![\w.])(?:atom|red)\.[\w.]+", kernel.asm["ptx"])
    assert atomics and all(re.search(r"\.[usb]64$", each) for each in atomics)


def test_the_value_product_is_behind_a_branch(monkeypatch):
    """Where nothing is left out the kernel has no such branch."""
    mask = torch.empty((1, 1, 300, 333), dtype=torch.bool, device="meta")
    branches = []
    for threshold in (-20.0, -math.inf):
        launch = planned(torch.float16, mask=mask, threshold=threshold)
        kernel = compiled(monkeypatch, launch, torch.float16, 90)
        branches.append(kernel.asm["ttgir"].count("scf.if"))
    assert branches[0] > branches[1]


def test_what_the_kernel_shares_with_the_operator():
    names = ("SUMMARIES", "ORDER", "FROZEN")
    assert all(getattr(sparse, name) == getattr(operator, name) for name in names)
    assert skipping.COUNTS == 5  # as the kernel's pointer steps


def test_auto_does_not_choose_it_and_support_says_why_not():
    request = Request("cuda", torch.float32, 64, 64, "strict", "sparse_attention")
    name, reasons = dispatch.select(request)
    assert name == "eager" and "triton" in dispatch.names("sparse_attention")
    assert any(reason.startswith("triton: ") and "measured" in reason for reason in reasons)
    assert "256" in sparse.support(request._replace(head_dim=256)).reason
    assert "turbo" in sparse.support(request._replace(precision="turbo")).reason
    assert sparse.support(request).ok
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(elsa.errors.UnavailableError, match="triton"):
        elsa.attention(q, q, q, backend="triton", sparsity="exact")
