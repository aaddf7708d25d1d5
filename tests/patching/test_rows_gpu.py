"""Blocks as functions in a row on a real GPU: the kernels of elsa, with gradients and without."""

from __future__ import annotations

import copy

import pytest
import torch

import elsa_core as elsa
from elsa_core.patching.adapters import flat, rows

timm = pytest.importorskip("timm")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def made(**options):
    torch.manual_seed(0)
    return timm.create_model("vit_small_patch16_224", depth=3, init_values=0.1, **options)


def error(found, exact):
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("trains", [False, True])
def test_rows_are_as_exact_as_the_original(trains):
    original = made().cuda().train(trains)
    exact, patched = copy.deepcopy(original).double(), copy.deepcopy(original)
    elsa.patch(patched, scope="model")
    x = torch.randn(16, 3, 224, 224, device="cuda")
    found = []
    with torch.set_grad_enabled(trains):
        for model, given in ((exact, x.double()), (original, x), (patched, x)):
            for _ in range(2):
                model.zero_grad()
                out = model(given)
                if trains:
                    out.square().sum().backward()
            found.append([out, *(p.grad for p in model.parameters() if trains)])
    read = [each for key, each in flat._READINGS.items() if key[1] is rows.block]
    assert sum(each.run is not None and each.owner() in patched.blocks for each in read) == 3
    for right, theirs, ours in zip(*found, strict=True):
        assert error(ours, right) <= 2 * error(theirs, right) + 1e-7
