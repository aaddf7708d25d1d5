"""Arguments of a wrong type are refused by a TypeError that names the argument."""

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch

import elsa_core as elsa
from elsa_core import monoid

T = torch.zeros(1, 1, 2, 8)
G = torch.zeros(1, 1, 2, 8, requires_grad=True)
P, CU = torch.zeros(2, 1, 8), torch.tensor([0, 2])
X = torch.zeros(4, 4)
Q = torch.zeros(1, 8, 8, 24)
WINDOWS: dict[str, Any] = {"num_heads": 1, "window_size": (4, 4)}


def _model() -> torch.nn.Module:
    model: torch.nn.Module = timm.create_model("test_vit", img_size=32).eval()
    return model


def _patched() -> torch.nn.Module:
    model = _model()
    elsa.patch(model)
    return model


@pytest.mark.parametrize(
    ("call", "name"),
    [
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
        (lambda: elsa.window_attention(Q, T, **WINDOWS, bias_index=[[0]]), "bias_index"),
        (lambda: elsa.attention(T, T, T, is_causal="x"), "is_causal"),
        (lambda: elsa.attention(T, T, T, is_causal="x", dropout_p=0.5), "is_causal"),
        (lambda: elsa.attention(T, T, T, is_causal="x", sparsity="exact"), "is_causal"),
        (lambda: elsa.attention(T, T, T, is_causal="x", offload="host"), "is_causal"),
        (lambda: elsa.attention(G, T, T, is_causal="x"), "is_causal"),
        (lambda: elsa.attention(G, T, T, scale="x"), "scale"),
        (lambda: elsa.attention(T, T, T, dropout_p="x"), "dropout_p"),
        (lambda: elsa.attention(T, T, T, precision=[]), "precision"),
        (lambda: elsa.entmax_attention(T, T, T, is_causal="x"), "is_causal"),
        (lambda: elsa.entmax_attention(T, T, T, scale="x"), "scale"),
        (lambda: elsa.varlen_attention(P, P, P, CU, is_causal="x"), "is_causal"),
        (lambda: elsa.varlen_attention(P, P, P, CU, scale="x"), "scale"),
        (lambda: elsa.window_attention(Q, num_heads="1", window_size=(4, 4)), "num_heads"),
        (lambda: elsa.window_attention(Q, num_heads=1.0, window_size=(4, 4)), "num_heads"),
        (lambda: elsa.explain_window_attention(Q, num_heads="1", window_size=(4, 4)), "num_heads"),
        (lambda: elsa.window_attention(Q, **WINDOWS, mask_value="x"), "mask_value"),
        (lambda: elsa.window_attention(Q, **WINDOWS, scale="x"), "scale"),
        (lambda: elsa.window_attention(Q, **WINDOWS, grid="x"), "grid"),
        (lambda: elsa.explain_linear([1], [2]), "input"),
        (lambda: elsa.linear(X, X, "x"), "bias"),
        (lambda: elsa.linear(X, X, residual=[1]), "residual"),
        (lambda: elsa.linear(X, X, scale=0.5), "scale"),
        (lambda: elsa.linear(X, X, activation=[]), "activation"),
        (lambda: elsa.linear(X, X, value=(None, None)), "value"),
        (lambda: elsa.linear(X, X, value=(X, 3)), "value's bias"),
        (lambda: elsa.merge(1, 2), "State"),
        (lambda: elsa.merge(elsa.State(1, 2, 3), elsa.State(1, 2, 3)), "m of a State"),
        (lambda: elsa.merge(elsa.State(T, T, [3]), elsa.State(T, T, T)), "W of a State"),
        (lambda: monoid.finalize(elsa.State([1], [2], [3])), "m of a State"),
        (lambda: monoid.fold([elsa.State(1, 2, 3), elsa.State(1, 2, 3)]), "m of a State"),
        (lambda: monoid.tree([1, 2]), "State"),
        (lambda: elsa.attention(T, T, T, precision=None), "precision"),
        (lambda: elsa.attention(T, T, T, backend=3), "backend"),
        (lambda: elsa.explain(T, T, T, precision=3), "precision"),
        (lambda: elsa.explain(T, T, T, backend=None), "backend"),
        (lambda: elsa.window_attention(Q, **WINDOWS, backend=3), "backend"),
        (lambda: elsa.linear(X, X, precision=None), "precision"),
        (lambda: elsa.linear(X, X, backend=3), "backend"),
        (lambda: elsa.varlen_attention(P, P, P, CU, backend=3), "backend"),
        (lambda: elsa.entmax_attention(T, T, T, precision=None), "precision"),
        (lambda: elsa.patch(_model(), precision=None), "precision"),
        (lambda: elsa.patch(_model(), backend=3), "backend"),
        (lambda: elsa.patch(_model(), strict="yes"), "strict"),
        (lambda: elsa.profile(_model(), torch.zeros(1, 3, 32, 32), backend=3), "backend"),
        (lambda: elsa.export("vit", "zz"), "model"),
        (lambda: elsa.export(_patched(), "zz", formats=3), "formats"),
        (lambda: elsa.export(_patched(), "zz", formats=[3]), "formats"),
        (lambda: elsa.export(_patched(), "zz", labels=3), "labels"),
        (lambda: elsa.export(_patched(), 3), "directory"),
        (lambda: elsa.load("test_vit", pretrained="yes"), "pretrained"),
        (lambda: elsa.load("test_vit", device=3.5), "device"),
        (lambda: elsa.load("test_vit", image_size="224"), "image_size"),
        (lambda: elsa.load("test_vit", image_size=22.5), "image_size"),
        (lambda: elsa.check("vit", T), "model"),
        (lambda: elsa.check(_patched(), "x"), "inputs"),
        (lambda: elsa.check(_patched(), {"a": T, "b": [T]}), "b"),
        (lambda: elsa.check(_patched(), T, factor="x"), "factor"),
        (lambda: elsa.check(_patched(), T, batch_size="x"), "batch_size"),
        (lambda: elsa.profile(_model(), "x"), "inputs"),
        (lambda: elsa.evaluate(_patched(), 3), "batches"),
        (lambda: elsa.evaluate(_patched(), [3]), "batches"),
        (lambda: elsa.evaluate(_patched(), [(T, 4)]), "batches"),
        (lambda: elsa.profile("vit", T), "model"),
        (lambda: elsa.profile(_model(), T, rounds="x"), "rounds"),
        (lambda: elsa.patch(_model(), include=3), "include"),
        (lambda: elsa.patch(_model(), exclude=["a", 3]), "exclude"),
        (lambda: elsa.check(_patched(), T, paths=3), "paths"),
        (lambda: elsa.profile(_model(), T, seed="x"), "seed"),
        (lambda: elsa.profile(_model(), torch.zeros(1, 3, 32, 32), baselines=3), "baselines"),
        (lambda: elsa.load("test_vit", dtype="float32"), "dtype"),
        (lambda: elsa.load("test_vit", seed="x"), "seed"),
        (lambda: elsa.load("test_vit", mean="x"), "mean"),
        (lambda: elsa.load("test_vit", crop_pct="x"), "crop_pct"),
        (lambda: elsa.load(3), "spec"),
        (lambda: elsa.verify(3), "path"),
    ],
)  # fmt: skip
def test_a_wrong_type_is_named(call: Callable[[], Any], name: str) -> None:
    with pytest.raises(TypeError, match=rf"\b{name}\b"):
        call()


def test_a_failure_of_another_kind_is_left_as_it_is() -> None:
    with pytest.raises(elsa.errors.UnavailableError, match="triton"):
        elsa.attention(T, T, T, is_causal=1, backend="triton")


def test_scale_may_be_any_number() -> None:
    numpy = pytest.importorskip("numpy")
    assert torch.equal(elsa.attention(T, T, T, scale=numpy.float64(0.5)), T)
