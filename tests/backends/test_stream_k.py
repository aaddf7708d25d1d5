"""Stream-K cuts packed sequences into equal shares and joins each once, in any order."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")
from interpreted import Rows, rows_of
from stream_interpreted import CASES
from triton_compile import compile_launch

from elsa_core.backends.triton.attention import varlen
from elsa_core.backends.triton.shared.launch import Launch


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Rows]:
    with rows_of("stream_interpreted.py") as rows:
        yield rows


@pytest.mark.parametrize("name", CASES)
def test_interpreted(interpreted: Rows, name: str) -> None:
    dtype, precision, *_ = CASES[name][-4:]
    row = interpreted[name]
    assert row["finite"] and row["hidden"]
    assert row["again"], "another order of programs gave other bits"
    assert row["cleared"], "tickets are left for the next call"
    limit = 6e-4 if dtype == torch.float16 else 1e-3 if precision == "turbo" else 6e-7
    assert row["error"] < limit
    # scores of an outlier channel cancel: PyTorch's own rounding of them is the measure
    assert row["lse"] < (1e-4 if precision == "turbo" else max(4e-7, 2 * row["peer_lse"]))


def packed(dtype: torch.dtype, heads: int, kv_heads: int) -> Launch:
    q = torch.empty(32, heads, 128, dtype=dtype, device="meta")
    k = torch.empty(500_000, kv_heads, 128, dtype=dtype, device="meta")
    return varlen.streamed(varlen.problem_of(q, k, k, False, 0.1, "strict"), 32).fold


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "arch", "shared"),
    [(torch.float32, 16, 16, 120, 101376), (torch.float16, 32, 8, 90, 232448)],
    ids=["rows", "heads"],
)
def test_compiles(dtype: torch.dtype, heads: int, kv_heads: int, arch: int, shared: int) -> None:
    compiled = compile_launch(packed(dtype, heads, kv_heads), dtype, "cuda", arch)
    assert compiled.metadata.shared <= shared
    # the memory order that a join rests on: stores, barrier, ticket, barrier, loads
    ptx = compiled.asm["ptx"]
    ticket = re.search(r"atom\.(global\.gpu\.acq_rel|acq_rel\.gpu\.global)\.add\.u32", ptx)
    assert ticket, "no ticket that releases and acquires at the scope of the GPU"
    assert len(re.findall(r"\batom\.", ptx)) == 1
    ahead, behind = ptx[: ticket.start()], ptx[ticket.end() :]
    assert ahead.rfind("bar.sync") > ahead.rfind("st.global")
    assert 0 <= behind.find("bar.sync") < behind.find("ld.global")
    assert "ld.global.nc" not in behind
