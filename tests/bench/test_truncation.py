"""The simulated arithmetic of tensor cores: what it cuts, and what makes up for it."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from elsa_core.bench import truncation

timm = pytest.importorskip("timm")


def lean(out, exact):
    return (((out.double() - exact) * exact).sum() / exact.square().sum()).item()


def operands(rows=64, depth=192, columns=48):
    torch.manual_seed(0)
    return torch.randn(3, rows, depth), torch.randn(columns, depth)


def test_values_are_cut_towards_zero():
    x = torch.tensor([1 + 2.0**-23 + 2.0**-24, -1 - 2.0**-24, 3.0], dtype=torch.float64)
    assert truncation.truncated(x).tolist() == [1 + 2.0**-23, -1.0, 3.0]


@pytest.mark.parametrize(
    ("way", "least", "most"),
    [
        (truncation.Sum(64), -1.3e-7, -0.8e-7),
        (truncation.Sum(32), -0.8e-7, -0.5e-7),
        (truncation.Sum(64, 1), -0.5e-7, 0.5e-7),
        (truncation.Sum(32, 2), -0.2e-7, 0.2e-7),
        (truncation.Sum(64, 0, False), -0.1e-7, 0.1e-7),
    ],
)
def test_what_is_missing(way, least, most):
    x, w = operands()
    exact = functional.linear(x.double(), w.double())
    assert least < lean(truncation.product(x, w, way), exact) < most


def test_a_model():
    torch.manual_seed(0)
    options = {"img_size": 32, "depth": 1, "embed_dim": 32, "num_heads": 2, "num_classes": 5}
    model = timm.create_model("vit_tiny_patch16_224", **options).eval()
    original = functional.linear
    rows = list(truncation.measure(model, torch.randn(1, 3, 32, 32)))
    names = [name for name, *_ in rows]
    assert names[0] == "original" and {*truncation.SUMS, "qkv alone", "fc1 alone"} <= {*names}
    assert all(0 < error < 1e-5 for _, error, _ in rows)
    assert functional.linear is original
