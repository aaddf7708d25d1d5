"""The alpha-entmax kernels on packed sequences without a GPU: interpreted, and compiled."""

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
from entmax_varlen_interpreted import CASES, F16, OTHERS
from interpreted import Rows, rows_of
from sampling import some
from test_triton_entmax import KINDS, SHARED

from elsa_core import dispatch
from elsa_core.backends.support import Request, Support
from elsa_core.backends.triton.attention import entmax, entmax_varlen

NAMES = some(CASES)
for _name in ("mixed", "sparse tiles"):  # tests of their own look at them
    if _name not in NAMES:
        NAMES.append(_name)


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Rows]:
    """This run's cases of entmax_varlen_interpreted.py, in a process of its own."""
    with rows_of("entmax_varlen_interpreted.py", *NAMES, *OTHERS) as rows:
        yield rows


@pytest.mark.parametrize("name", NAMES)
def test_interpreted_error(interpreted, name):
    """Against float64, within twice float32's own error in plain PyTorch; twice the same bits."""
    row = interpreted[name]
    band = 6e-4 if CASES[name][2] == F16 else 2.4e-7
    assert row["finite"] and row["same"] and row["errors"] and row["fence"] and row["zeros"]
    for operand, error in row["errors"].items():
        assert error <= 2 * row["peer"][operand] + band, (operand, error, row["peer"][operand])


@pytest.mark.parametrize("name", NAMES)
def test_tiles_are_those_of_float64(interpreted, name):
    assert interpreted[name]["tiles"][1] == 0


def test_each_sequence_has_the_bits_of_a_call_of_it_alone(interpreted):
    same = interpreted["as alone"]["same"]
    assert len(same) == 4 and all(same.values()), same


def test_every_size_of_block_computes_the_same(interpreted):
    row = interpreted["blocks"]
    assert row["error"] < 6e-4 and row["other_tiles"] == 0


def test_wrong_lengths_write_nothing_outside(interpreted):
    assert interpreted["too short"]["inside"] == [True] * 3


def test_tokens_of_no_sequence_change_nothing(interpreted):
    """Two programs took the first block where sequences do not start at 0, one with an empty list
    of tiles: the gradients of its queries were zeros or not, as it came.
    """
    same = interpreted["tokens of nobody"]["same"]
    assert len(same) == 12 and all(same.values()), same


def test_without_sequences_nothing_is_read(interpreted):
    """Kernels read an end behind the only number of cu_seqlens, and an alpha that is not there."""
    assert interpreted["no sequences"]["zeros"]


def planned(dtype, alpha=1.5, *, needs=(), causal=False, dim=64, heads=None, longest=(100, 120)):
    """The launches of 5 sequences of 4 heads on a machine without a GPU."""
    q, k = (torch.empty((1, 4, n, dim), dtype=dtype, device="meta") for n in (300, 333))
    options = entmax.Options(alpha, causal, dim**-0.5, "strict", needs)
    operands = {"q": q, "k": k, "v": k}
    operands |= {"o": q, **({"g": q, "dq": q, "dk": k, "dv": k} if needs else {})}
    packing = entmax_varlen.Packing(5, *longest)
    call = entmax_varlen.plan_call(operands, heads, options, packing)
    found = (call.forward, call.by_rows, call.by_columns, call.query, call.key, call.alpha)
    return [launch for launch in found if launch is not None]


def compiled(monkeypatch, launch, dtype, arch):
    kinds = {**triton_compile.POINTERS, **KINDS, "X": "fp32", "Out": "fp32", "Starts": "i32"}
    if launch.kernel.__name__ == "forward":
        del kinds["Out"]
    monkeypatch.setattr(triton_compile, "POINTERS", kinds)
    return triton_compile.compile_launch(launch, dtype, "cuda", arch)


@pytest.mark.parametrize(
    ("arch", "dtype"),
    some([(80, torch.bfloat16), (90, torch.float32), (120, torch.float16)], one_in=3),
)
def test_compiles_and_fits(monkeypatch, arch, dtype):
    """The largest head dimensions, forward and backward; no atomics."""
    dim = entmax.LARGEST_WIDE if dtype == torch.float32 else entmax.LARGEST_HALF
    heads = torch.empty((5, 4, 1, 1), device="meta")
    launches = planned(dtype, dim=dim, causal=True)
    launches += planned(dtype, 0.0, dim=dim, heads=heads, needs=(True, True, True, False, True))
    assert len(launches) == 6
    for launch in launches:
        kernel = compiled(monkeypatch, launch, dtype, arch)
        assert kernel.metadata.shared <= SHARED[arch]
        assert not re.search(r"(?<![\w.])(atom|red)\.", kernel.asm["ptx"])


def test_grids_need_no_length() -> None:
    """Sized by tokens and sequences alone: longest lengths are for the workspace."""
    needs = (True, True, True, False, False)
    for some_needs in ((), needs):
        one, other = (
            planned(torch.float16, needs=some_needs, longest=longest)
            for longest in ((100, 120), (300, 333))
        )
        assert [x.grid for x in one] == [x.grid for x in other]
    (forward,) = planned(torch.float16)
    block = forward.tail["BM"]
    assert forward.grid[0] == 4 * (300 // block + 5)


def test_dense_calls_take_nothing_of_packed_ones() -> None:
    """Their starts are constants of the kernel: no pointer more, and no branch."""
    q = torch.empty((1, 4, 300, 64), dtype=torch.float16, device="meta")
    options = entmax.Options(1.5, False, 0.125, "strict")
    call = entmax.plan_call({"q": q, "k": q, "v": q, "o": q}, None, None, options)
    assert call.forward is not None
    tail = call.forward.tail
    assert tail["StartsQ"] is tail["StartsK"] is None and not tail["PACKED"]


def test_they_serve_as_those_of_dense_calls_do(monkeypatch) -> None:
    """`auto` takes both; and what explain says."""
    monkeypatch.setattr("elsa_core.backends.triton._environment", lambda _: Support(True))
    for operator in ("entmax_attention", "entmax_varlen_attention"):
        request = Request("cuda", torch.float32, 64, 64, "strict", operator)
        for backend in ("auto", "triton"):
            assert dispatch.select(request, backend)[0] == "triton"
        assert "triton" in dispatch.names(operator)
    route = dispatch.route(request._replace(gradient=("query",)), "triton", schedule=())
    assert route.reasons[-1] == "gradients: kernels of the same backend"
