"""Arguments of a wrong type are refused by a TypeError that names the argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch

import elsa_core as elsa

T = torch.zeros(1, 1, 2, 8)
Q = torch.zeros(1, 8, 8, 24)


def _model() -> torch.nn.Module:
    model: torch.nn.Module = timm.create_model("test_vit", img_size=32).eval()
    return model


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: elsa.attention([1], [2], [3]), "query"),
        (lambda: elsa.attention(T, [2], T), "key"),
        (lambda: elsa.attention(T, T, 3.0), "value"),
        (lambda: elsa.attention(T, T, T, attn_mask=[1]), "attn_mask"),
        (lambda: elsa.attention(T, T, T, scale="x"), "scale"),
        (lambda: elsa.attention([1], T, T, dropout_p=0.5), "query"),
        (lambda: elsa.explain(T, 2, T), "key"),
        (lambda: elsa.attention(None, T, T, offload="host"), "query"),
        (lambda: elsa.attention(T, T, T, scale="x", offload="host"), "scale"),
        (lambda: elsa.attention(T, None, T, sparsity=0.1), "key"),
        (lambda: elsa.attention(T, [1], T, sparsity=0.1), "key"),
        (lambda: elsa.attention(T, T, None, sparsity="exact"), "value"),
        (lambda: elsa.attention(T, T, T, attn_mask=[1], sparsity=0.1), "attn_mask"),
        (lambda: elsa.attention(T, T, T, scale="x", sparsity="exact"), "scale"),
        (lambda: elsa.explain(T, None, T, sparsity=0.1), "key"),
        (lambda: elsa.window_attention([1], num_heads=1, window_size=(4, 4)), "qkv"),
        (lambda: elsa.window_attention(Q, [1], num_heads=1, window_size=(4, 4)), "bias"),
        (
            lambda: elsa.window_attention(
                Q, T, num_heads=1, window_size=(4, 4), bias_index=[[0]]
            ),
            "bias_index",
        ),
        (lambda: elsa.merge(1, 2), "State"),
        (lambda: elsa.patch("vit"), "model"),
        (lambda: elsa.unpatch(3), "model"),
        (lambda: elsa.inspect("vit"), "model"),
        (lambda: elsa.check("vit", T), "model"),
        (lambda: elsa.profile("vit", T), "model"),
        (lambda: elsa.profile(_model(), T, rounds="x"), "rounds"),
        (lambda: elsa.patch(_model(), include=3), "include"),
        (lambda: elsa.patch(_model(), exclude=["a", 3]), "exclude"),
        (lambda: elsa.load(3), "spec"),
        (lambda: elsa.verify(3), "path"),
    ],
)  # fmt: skip
def test_a_wrong_type_is_named(call: Callable[[], Any], name: str) -> None:
    with pytest.raises(TypeError, match=rf"\b{name}\b"):
        call()


def test_scale_may_be_any_number() -> None:
    numpy = pytest.importorskip("numpy")
    assert torch.equal(elsa.attention(T, T, T, scale=numpy.float64(0.5)), T)


@pytest.mark.parametrize("backend", ["triton"])
def test_patch_refuses_a_backend_that_cannot_run_the_model(backend: str) -> None:
    model = _model()
    with pytest.raises(elsa.errors.UnavailableError, match="serves cuda tensors"):
        elsa.patch(model, backend=backend)
    assert elsa.unpatch(model) == 0
