"""Windows without shift, in timm's Twins, DaViT and TinyViT, on elsa: padded on both axes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
from judging import assert_same_gradients
from sampling import thinned
from torch import nn

from elsa_core.patching.rewrite import patch
from elsa_core.patching.sites import inspect
from elsa_core.proof.checking import check

SIDES = (104, 136)  # 26 x 34 tokens in the first stage, windows of 7 x 7 or 4 x 4
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "twins": (
        "twins_svt_small",
        {"img_size": SIDES, "embed_dims": (16, 32), "num_heads": (2, 4), "depths": (1, 1),
         "wss": (4, 3), "mlp_ratios": (2, 2), "sr_ratios": (8, 4)},
    ),
    "davit": (
        "davit_tiny",
        {"embed_dims": (16, 32), "num_heads": (2, 4), "depths": (1, 1), "window_size": 7},
    ),
    "tiny-vit": (
        "tiny_vit_5m_224",
        {"embed_dims": (8, 32, 32), "num_heads": (1, 2, 4), "depths": (1, 1, 1),
         "window_sizes": (7, 7, 5)},
    ),
}  # fmt: skip
ADAPTERS = {
    "twins": "ElsaLocallyGroupedAttn",
    "davit": "ElsaSpatialBlock",
    "tiny-vit": "ElsaTinyVitBlock",
}


def make(kind: str) -> nn.Module:
    name, options = MODELS[kind]
    model = timm.create_model(name, num_classes=6, **options).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path.endswith(("bias", "attention_biases")):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("sides", [(112, 136), (104, 112)])
@pytest.mark.parametrize("kind", ["davit", "tiny-vit"])
@torch.no_grad()
def test_windows_padded_on_one_axis(kind: str, sides: tuple[int, int]) -> None:
    """What a padded token is counts already there: norms and projections have biases."""
    model = make(kind)
    patch(model)
    found = check(model, torch.randn(2, 3, *sides))
    assert found.ok, found.failures


@pytest.mark.parametrize(
    ("kind", "dtype"), thinned(MODELS, (torch.float32, torch.bfloat16)), ids=str
)
@torch.no_grad()
def test_padded_windows(kind: str, dtype: torch.dtype) -> None:
    model = make(kind).to(dtype)
    sites = [site for site in patch(model).patched if site.adapter == ADAPTERS[kind]]
    assert len(sites) == 2
    found = check(model, {"one": torch.randn(1, 3, *SIDES), "three": torch.randn(3, 3, *SIDES)})
    assert found.ok, found.failures
    assert all(site.operator_calls == site.calls > 0 for site in found.sites)


@pytest.mark.parametrize("kind", MODELS)
def test_gradients_compiled_and_inspected(kind: str) -> None:
    torch._dynamo.reset()
    plain, x = make(kind).double(), torch.randn(2, 3, *SIDES).double()
    patched = copy.deepcopy(plain)
    patch(patched)
    for model in (plain, patched):
        model(x).square().sum().backward()
    assert_same_gradients(plain, patched)
    with torch.no_grad():
        compiled = torch.compile(patched, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x), plain(x))
    mine = [s for s in inspect(patched, (3, *SIDES)).sites if s.adapter == ADAPTERS[kind]]
    assert [(s.kind, s.patched) for s in mine] == [("window", True)] * 2


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_a_scale_of_ones_own_is_read(kind: str, fused: bool) -> None:
    """Where timm reads it: its fused branch leaves the scale to PyTorch, which knows the usual one.

    A scale that is left out shows at another than the usual one alone.
    """
    model = make(kind)
    scaled = [module for module in model.modules() if isinstance(vars(module).get("scale"), float)]
    assert scaled
    for module in scaled:
        module.scale *= 3.0
        module.fused_attn = fused
    patch(model)
    found = check(model, torch.randn(2, 3, *SIDES))
    assert found.ok, found.failures
