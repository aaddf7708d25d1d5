"""Hiera's and MViTv2's blocks as functions in a row on a real GPU."""

from __future__ import annotations

import copy

import pytest
import torch

import elsa_core as elsa
from elsa_core import short_calls
from elsa_core.patching.adapters import flat, flat_hiera, flat_mvitv2

timm = pytest.importorskip("timm")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

MODELS = {"hiera_tiny_224": flat_hiera.block, "mvitv2_tiny": flat_mvitv2.block}


def made(name, dtype=torch.float32):
    torch.manual_seed(0)
    model = timm.create_model(name)
    torch.nn.init.normal_(model.head.fc.weight, std=0.05)  # Hiera's begins as zeros
    return model.cuda().eval().to(dtype)


def image(dtype=torch.float32, batch=1):
    return torch.randn(batch, 3, 224, 224, device="cuda").to(dtype)


def rows_of(model, read):
    within = set(model.modules())
    found = (each for key, each in flat._READINGS.items() if key[1] is read)
    return sum(each.run is not None and each.owner() in within for each in found)


def error(found, exact):
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("scope", ["attention", "model"])
@pytest.mark.parametrize("name", MODELS)
def test_float32_is_as_exact_as_the_original(name, scope, batch):
    original, x = made(name), image(batch=batch)
    exact, patched = copy.deepcopy(original).double(), copy.deepcopy(original)
    elsa.patch(patched, scope=scope)
    with torch.inference_mode():
        right, theirs = exact(x.double()), original(x)
        for _ in range(4):
            assert error(patched(x), right) <= 2 * error(theirs, right)
    # of two images the attention of MViTv2's second stage begins with a call that is large
    blocks = 12 if name == "hiera_tiny_224" else 10
    large = batch == 2 and scope == "attention" and name == "mvitv2_tiny"
    assert rows_of(patched, MODELS[name]) == blocks - large


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scope", ["attention", "model"])
@pytest.mark.parametrize("name", MODELS)
def test_half_precision_is_as_exact_as_the_original(name, scope, dtype):
    original, x = made(name, dtype), image(dtype)
    exact, patched = copy.deepcopy(original).double(), copy.deepcopy(original)
    elsa.patch(patched, scope=scope)
    with torch.inference_mode():
        right, theirs = exact(x.double()), original(x)
        for _ in range(4):
            ours = patched(x)
    assert rows_of(patched, MODELS[name])
    assert error(ours, right) <= 2 * error(theirs, right)


def test_windows_of_one_image_go_the_short_way(monkeypatch):
    model, x = made("hiera_tiny_224", torch.float16), image(torch.float16)
    elsa.patch(model, scope="attention")
    with torch.inference_mode():
        for _ in range(4):
            model(x)
        if short_calls.ATTENTION.serve is None:
            pytest.skip("no short way here")
        found, attend = [], flat_hiera.attend_small

        def noted(*given):
            found.append(attend(*given))
            return found[-1]

        monkeypatch.setattr(flat_hiera, "attend_small", noted)
        model(x)
    assert len(found) == 12 and all(each is not None for each in found)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_the_originals(name):
    original, x = made(name).train(), image()
    patched = copy.deepcopy(original)
    elsa.patch(patched, scope="attention")
    grads = []
    for model in (original, patched):
        for _ in range(3):
            torch.manual_seed(0)
            model.zero_grad()
            model(x).square().sum().backward()
        grads.append([p.grad for p in model.parameters()])
    for theirs, ours in zip(*grads, strict=True):  # sums of PyTorch's kernels differ between runs
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4 * theirs.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_graph_replays_what_eager_calls_compute(name, dtype, replays):
    """Of the first call on another stream than that which made the distances, too."""
    replays(made(name, dtype), image(dtype), image(dtype))


def test_distances_are_those_that_a_gpu_computes():
    """One host computes them for all devices."""
    for queries, keys in ((56, 7), (7, 56), (14, 14), (28, 9), (9, 28), (50, 13)):
        kept = flat_mvitv2._distances(queries, keys, torch.device("cuda", 0))
        assert kept.is_cuda
        assert torch.equal(kept, flat_mvitv2._made(queries, keys, torch.device("cuda", 0)))
