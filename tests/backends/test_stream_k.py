"""Stream-K's code fits a GPU, and its joins order memory as they must."""

import re

import pytest
import torch

pytest.importorskip("triton")
from triton_compile import compile_launch

from elsa_core.backends.triton.attention import varlen
from elsa_core.backends.triton.shared.launch import Launch


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
