"""The kernel of packed sequences without a GPU: interpreted, compiled, and off unless asked for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from elsa_core import dispatch
from elsa_core.backends.support import Request, Support

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))
from interpreted import Rows, rows_of
from sampling import some
from triton_compile import compile_launch
from varlen_interpreted import CASES

from elsa_core.backends.triton.attention import varlen


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Rows]:
    with rows_of("varlen_interpreted.py") as rows:
        yield rows


@pytest.mark.parametrize("name", list(CASES))
def test_interpreted(interpreted: Rows, name: str) -> None:
    _, _, dtype, precision, _ = CASES[name]
    row = interpreted[name]
    assert row["finite"] and row["hidden"] and row["fence"] and row["again"]
    limit = 6e-4 if dtype == torch.float16 else 1e-3 if precision == "turbo" else 6e-7
    assert row["error"] < limit
    band = 1e-3 if precision == "turbo" else torch.finfo(torch.float32).eps
    assert row["lse"] <= 2 * row["peer_lse"] + band


def planned(dtype: torch.dtype, dim: int, precision: str, causal: bool):
    q = torch.empty(4096, 4, dim, dtype=dtype, device="meta")
    starts = torch.empty(9, dtype=torch.int32, device="meta")
    return varlen.plan(q, q, q, starts, causal, dim**-0.5, precision)


CALLS = {
    "strict": (torch.float32, 64, "strict", False),
    "strict 80": (torch.float32, 80, "strict", False),
    "bf16 causal": (torch.bfloat16, 128, "strict", True),
    "ieee": (torch.float32, 64, "ieee", False),
}
TARGETS = [
    ("strict 80", 80), ("bf16 causal", 80), ("strict", 90), ("ieee", 90), ("strict", 120),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arch"), some(TARGETS, one_in=3))
def test_compiles(name: str, arch: int) -> None:
    dtype, dim, precision, causal = CALLS[name]
    compiled = compile_launch(planned(dtype, dim, precision, causal), dtype, "cuda", arch)
    assert ("mma" in compiled.asm["ptx"]) == (precision != "ieee")
    assert compiled.metadata.shared <= {80: 166912, 90: 232448, 120: 101376}[arch]


def test_grid_holds_every_tile() -> None:
    """One program more a sequence than its queries fill, whatever the lengths are."""
    launch = planned(torch.float32, 64, "strict", False)
    block = launch.tail["BM"]
    assert launch.tail["slots"] == 4096 // block + 8
    lengths = [1, 0, block, block + 1, 4096 - 2 * block - 2, 0, 0, 0]
    starts = [0]
    for n in lengths:
        starts.append(starts[-1] + n)
    first = [starts[s] // block + s for s in range(9)]
    for s, n in enumerate(lengths):
        assert first[s + 1] - first[s] >= -(-n // block)
    assert first[8] == launch.tail["slots"]


@pytest.mark.parametrize("operator", ["attention", "varlen_attention"])
def test_values_of_no_channel_are_not_for_kernels(
    operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their lse was what stood in memory, or minus infinity."""
    monkeypatch.setattr("elsa_core.backends.triton._environment", lambda _: Support(True))
    request = Request("cuda", torch.float32, 64, 0, "strict", operator)
    name, reasons = dispatch.select(request)
    assert name == "eager" and any("one channel or more" in reason for reason in reasons)
    assert dispatch.select(request._replace(value_dim=8, head_dim=0))[0] == "triton"


def test_auto_takes_it_where_triton_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "triton" in dispatch.names("varlen_attention")
    request = Request("cuda", torch.float32, 64, 64, "strict", "varlen_attention")
    asked = "elsa_core.backends.triton.attention.varlen.support"
    monkeypatch.setattr(asked, lambda _: Support(True))
    assert dispatch.select(request) == ("triton", ())
    trained = request._replace(gradient=("query",))
    assert dispatch.route(trained).reasons[-1] == "gradients: those of attention of a padded batch"
    half = dispatch.route(trained._replace(dtype=torch.float16)).reasons
    assert half == ("gradients: by sdpa",) and dispatch.route(request).reasons == ()
    monkeypatch.setattr(asked, lambda _: Support(False, "no GPU of its own"))
    name, reasons = dispatch.select(request)
    assert name == "eager"
    assert "triton: no GPU of its own" in reasons
