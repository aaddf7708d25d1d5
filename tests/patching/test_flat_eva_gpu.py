"""EVA's blocks as functions in a row on a real GPU."""

from __future__ import annotations

import copy

import pytest
import torch

import elsa_core as elsa
from elsa_core.patching.adapters import flat, flat_eva

timm = pytest.importorskip("timm")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

MODELS = {
    "vit_small_patch16_dinov3": 224,
    "eva02_tiny_patch14_224": 224,
    "eva02_base_patch14_224": 224,
    "vit_small_patch16_rope_mixed_224": 224,
}
DEPTH = 4


def made(name, dtype=torch.float32):
    torch.manual_seed(0)
    model = timm.create_model(name, depth=DEPTH, num_classes=10, img_size=MODELS[name])
    for each, parameter in model.named_parameters():
        if "gamma" in each:  # which begins at 1e-5
            torch.nn.init.normal_(parameter, std=0.5)
    torch.nn.init.normal_(model.head.weight, std=0.05)
    return model.cuda().eval().to(dtype)


def image(name, dtype=torch.float32, batch=1):
    return torch.randn(batch, 3, MODELS[name], MODELS[name], device="cuda").to(dtype)


def rows_of(model):
    """Its blocks that ran in a row, by either reader."""
    within, readers = set(model.modules()), (flat_eva.block, flat_eva.any_block)
    found = (each for key, each in flat._READINGS.items() if key[1] in readers)
    return len({id(each.owner()) for each in found if each.run and each.owner() in within})


def error(found, exact):
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("scope", ["attention", "model", None])
@pytest.mark.parametrize("name", MODELS)
def test_float32_is_as_exact_as_the_original(name, scope, batch):
    original, x = made(name), image(name, batch=batch)
    exact, patched = copy.deepcopy(original).double(), copy.deepcopy(original)
    elsa.patch(patched, **({} if scope is None else {"scope": scope}))
    with torch.inference_mode():
        right, theirs = exact(x.double()), original(x)
        for _ in range(4):
            assert error(patched(x), right) <= 2 * error(theirs, right)
    if batch == 1:
        assert rows_of(patched) == DEPTH


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scope", ["attention", "model"])
@pytest.mark.parametrize("name", MODELS)
def test_half_precision_is_as_exact_as_the_original(name, scope, dtype):
    original, x = made(name, dtype), image(name, dtype)
    exact, patched = copy.deepcopy(original).double(), copy.deepcopy(original)
    elsa.patch(patched, scope=scope)
    with torch.inference_mode():
        right, theirs = exact(x.double()), original(x)
        for _ in range(4):
            assert error(patched(x), right) <= 2 * error(theirs, right)
    if scope == "attention" or "base" not in name:  # whose layers are large in half precision
        assert rows_of(patched) == DEPTH


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_the_originals(name):
    original, x = made(name).train(), image(name)
    patched = copy.deepcopy(original)
    elsa.patch(patched, scope="attention")
    grads = []
    for model in (original, patched):
        for _ in range(3):
            torch.manual_seed(0)
            model.zero_grad()
            model(x).square().sum().backward()
        grads.append([p.grad for p in model.parameters() if p.grad is not None])
    for theirs, ours in zip(*grads, strict=True):  # sums of PyTorch's kernels differ between runs
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4 * theirs.abs().max().item())


# timm's DINOv3 copies from the host in each forward, which no graph can record
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", [name for name in MODELS if "dinov3" not in name])
def test_a_graph_replays_what_eager_calls_compute(name, dtype, replays):
    replays(made(name, dtype), image(name, dtype), image(name, dtype))
