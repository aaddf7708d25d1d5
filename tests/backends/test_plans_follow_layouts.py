"""Plans follow layouts alone: tables serve every call, memory grows with rows, lengths are data."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from elsa_core import dispatch
from elsa_core.backends.support import Request
from elsa_core.backends.triton.attention import backward, backward_tiling, entmax, sparse
from elsa_core.backends.triton.attention.backward_tiling import load_table, tile_for
from elsa_core.backends.triton.window import backward as window_backward

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
        sizes.append((call.rows, call.guards, sum(call.halves)))
    assert [b / a for a, b in zip(*sizes, strict=True)] == [2.0] * 3


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


def test_auto_does_not_choose_it_and_support_says_why_not():
    request = Request("cuda", torch.float32, 64, 64, "strict", "sparse_attention")
    name, reasons = dispatch.select(request)
    assert name == "eager" and "triton" in dispatch.names("sparse_attention")
    assert any(reason.startswith("triton: ") and "measured" in reason for reason in reasons)
    assert "256" in sparse.support(request._replace(head_dim=256)).reason
    assert "turbo" in sparse.support(request._replace(precision="turbo")).reason
    assert sparse.support(request).ok
    kind = ("attention_dropout", "cuda", torch.float16, 64, 64, "strict")
    assert dispatch.choose(*kind, mode="train", gradient=("query",)) == "sdpa"


def test_gradients_are_chosen_by_the_gpu_of_the_call(monkeypatch):
    """An H200, which is the current one, beside an L4."""
    known = {0: ("NVIDIA H200", (9, 0)), 1: ("NVIDIA L4", (8, 9))}

    def capability(device):
        return known[torch.device(device).index or 0][1]

    def properties(index):
        name, (major, minor) = known[index]
        return SimpleNamespace(name=name, major=major, minor=minor)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    for support, operator in (
        (backward_tiling.support, "attention"), (window_backward.support, "window_attention"),
    ):  # fmt: skip
        request = Request("cuda", torch.float32, 32, 32, "strict", operator, tokens=49)
        found = [support(request._replace(ordinal=ordinal)).ok for ordinal in (-1, 0, 1)]
        assert found == [True, True, False]
