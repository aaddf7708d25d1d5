"""Plans follow layouts alone: tables serve every call, memory grows with rows, lengths are data."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import elsa_core as elsa
from elsa_core import dispatch
from elsa_core.backends.support import Request
from elsa_core.backends.triton.attention import (
    backward,
    entmax,
    sparse,
    varlen,
)
from elsa_core.backends.triton.attention.backward_tiling import (
    load_table,
    tile_for,
)

NEEDS = (True, True, True, True)


@pytest.mark.parametrize("name", ["h200", "default"])
def test_tables_serve_every_call(name):
    modes = [*backward.MODES]
    for mode in modes:
        for side in ("key", "query", *(["mask", "normalise"] if mode != "split" else [])):
            for dim in (16, 32, 64, 128, 256):
                for keys in (5, 197, 100000):
                    tile = tile_for(name, mode, side, dim, keys)
                    assert 128 % tile.block_m == 0 and 128 % tile.block_n == 0
    assert load_table(name).measured == (name == "h200")
    with pytest.raises(LookupError, match="512"):
        tile_for(name, "half", "key", 512, 5)


def test_workspace_is_linear_in_the_rows():
    """Terms of rows, factors and halves: no product of lengths."""
    sizes = []
    for n in (1280, 2560):
        q = torch.empty((1, 2, n, 64), device="meta")
        lse = torch.empty((1, 2, n), device="meta")
        operands = dict.fromkeys(("q", "k", "v", "g", "o", "dq", "dk", "dv"), q)
        options = backward.Options(False, 0.125, "split", NEEDS, False, "h200")
        call = backward.plan_call({**operands, "l": lse}, None, options)
        sizes.append((call.rows, call.guards, call.factors, sum(call.halves)))
    assert [b / a for a, b in zip(*sizes, strict=True)] == [2.0] * 4


def test_auto_does_not_choose_what_was_not_measured():
    request = Request("cuda", torch.float16, 64, 64, "strict", "sparse_attention")
    name, reasons = dispatch.select(request)
    assert name == "eager" and any("not measured" in reason for reason in reasons)
    kind = ("attention_dropout", "cuda", torch.float16, 64, 64, "strict")
    assert dispatch.choose(*kind, mode="train", gradient=("query",)) == "sdpa"


def planned_varlen(dtype: torch.dtype, dim: int, precision: str, causal: bool):
    q = torch.empty(4096, 4, dim, dtype=dtype, device="meta")
    starts = torch.empty(9, dtype=torch.int32, device="meta")
    return varlen.plan(q, q, q, starts, causal, dim**-0.5, precision)


def test_grid_holds_every_tile() -> None:
    """One program more a sequence than its queries fill, whatever the lengths are."""
    launch = planned_varlen(torch.float32, 64, "strict", False)
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


def test_float32_on_an_amd_gpu_is_refused_but_for_ieee(monkeypatch):
    """Triton has no products of three TF32 ones there, and `auto` asks `support` alone."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    request = Request("cuda", torch.float32, 64, 64, "strict", "entmax_attention")
    assert "AMD" in entmax.support(request).reason
    assert "AMD" in entmax.support(request._replace(precision="lean")).reason
    assert entmax.support(request._replace(precision="ieee")).ok
    assert entmax.support(request._replace(dtype=torch.float16)).ok


def test_support_says_why_not():
    request = Request("cuda", torch.float32, 64, 64, "strict", "entmax_attention")
    assert "256" in entmax.support(request._replace(head_dim=256)).reason
    assert "lean" not in entmax.support(request._replace(precision="lean")).reason
    assert "turbo" in entmax.support(request._replace(precision="turbo")).reason
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(elsa.errors.UnavailableError, match="triton"):
        elsa.entmax_attention(q, q, q, backend="triton")


def test_grids_need_no_length() -> None:
    """Sized by tokens and sequences alone: longest lengths are for the workspace."""
    q, k = (torch.empty((1, 4, n, 64), dtype=torch.float16, device="meta") for n in (300, 333))
    operands = {"q": q, "k": k, "v": k, "o": q}
    trained = operands | {"g": q, "dq": q, "dk": k, "dv": k}
    for given, needs in ((operands, ()), (trained, (True, True, True, False, False))):
        one, other = (
            entmax.plan_call(given, None, None, entmax.Options(
                1.5, False, 0.125, "strict", needs, entmax.Packing(5, *longest)
            ))
            for longest in ((100, 120), (300, 333))
        )  # fmt: skip
        assert [x.grid for x in one.values()] == [x.grid for x in other.values()]
        if not needs:
            forward = one["forward"]
            assert forward.grid[0] == 4 * (300 // forward.tail["BM"] + 5)


def test_dense_calls_take_nothing_of_packed_ones() -> None:
    """Their starts are constants of the kernel: no pointer more, and no branch."""
    q = torch.empty((1, 4, 300, 64), dtype=torch.float16, device="meta")
    options = entmax.Options(1.5, False, 0.125, "strict")
    call = entmax.plan_call({"q": q, "k": q, "v": q, "o": q}, None, None, options)
    tail = call["forward"].tail
    assert tail["StartsQ"] is tail["StartsK"] is None and not tail["PACKED"]


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
