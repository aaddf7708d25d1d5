"""transformers' vision towers of packed images (Qwen-VL): one call for all images and windows."""

from __future__ import annotations

import copy
import importlib
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import elsa_core as elsa
from elsa_core.patching.adapters import transformers_packed

pytest.importorskip("transformers")

_SHARED = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2}
TOWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_vl": (
        "Qwen2VisionTransformerPretrainedModel",
        {**_SHARED, "embed_dim": 32, "hidden_size": 48},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VisionTransformerPretrainedModel",
        {**_SHARED, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 48,
         "fullatt_block_indexes": [1], "window_size": 16},
    ),
    "qwen3_vl": (
        "Qwen3VLVisionModel",
        {**_SHARED, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 48,
         "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
}  # fmt: skip
# Frames, rows and columns of patches: images of different size, and a video.
GRIDS = {"mixed": ((1, 6, 10), (1, 2, 4), (3, 4, 6)), "one": ((1, 6, 10),), "equal": ((2, 4, 4),)}


def model(name: str) -> Any:
    torch.manual_seed(0)
    cls, options = TOWERS[name]
    made = getattr(importlib.import_module(f"transformers.models.{name}.modeling_{name}"), cls)
    tower = made._from_config(made.config_class(**options), attn_implementation="sdpa")
    for parameter in tower.parameters():
        nn.init.normal_(parameter, std=0.15)
    return tower.eval()


def batch(grid: str = "mixed") -> tuple[Tensor, Tensor]:
    sizes = torch.tensor(GRIDS[grid])
    generator = torch.Generator().manual_seed(1)
    return torch.randn(int(sizes.prod(1).sum()), 3 * 2 * 4 * 4, generator=generator), sizes


def pair(name: str, **options: Any) -> tuple[Any, Any]:
    original = model(name)
    patched = copy.deepcopy(original)
    report = elsa.patch(patched, scope="attention", **options)
    assert len(report.patched) == 2 and not report.kept
    return original, patched


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sequences each call of packed attention had."""
    seen: list[int] = []

    def attention(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, **rest: Any) -> Any:
        seen.append(starts.shape[0] - 1)
        return elsa.varlen_attention(query, key, value, starts, **rest)

    monkeypatch.setattr(transformers_packed, "varlen_attention", attention)
    return seen


def error(out: Tensor, exact: Tensor) -> float:
    return ((out.double() - exact).norm() / exact.norm()).item()


def results(tower: Any, pixels: Tensor, sizes: Tensor) -> list[Tensor]:
    out = tower(pixels, sizes)
    return [out.last_hidden_state, out.pooler_output, *(getattr(out, "deepstack_features", ()))]


@torch.no_grad()
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", TOWERS)
def test_agrees_with_the_original(name: str, grid: str, packed: list[int]) -> None:
    original, patched = pair(name)
    pixels, sizes = batch(grid)
    exact = results(copy.deepcopy(original).double(), pixels.double(), sizes)
    found, peer = results(patched, pixels, sizes), results(original, pixels, sizes)
    for one, other, reference in zip(found, peer, exact, strict=True):
        assert error(one, reference) <= 2 * error(other, reference) + 1e-6
    frames = int(sizes[:, 0].sum())
    windows = {"mixed": 6 + 1 + 3 * 2, "one": 6, "equal": 2}[grid]  # of 4 x 4 patches or less
    assert packed == [windows if name == "qwen2_5_vl" else frames, frames]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", TOWERS)
def test_gradients_are_the_originals(name: str, training: bool, packed: list[int]) -> None:
    original, patched = pair(name)
    pixels, sizes = batch()

    def grads(tower: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        tower.train(training)
        given = pixels.to(dtype).requires_grad_()
        sum(each.square().sum() for each in results(tower, given, sizes)).backward()
        of_weights = [p.grad.flatten() for p in tower.parameters() if p.grad is not None]
        assert given.grad is not None
        return given.grad, torch.cat(of_weights)

    exact = grads(copy.deepcopy(original).double(), torch.float64)
    peer, found = grads(original, torch.float32), grads(patched, torch.float32)
    for one, other, reference in zip(found, peer, exact, strict=True):
        assert error(one, reference) <= 2 * error(other, reference) + 1e-6
    assert len(packed) == 2


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype, packed: list[int]) -> None:
    original, patched = (m.to(dtype) for m in pair("qwen2_5_vl"))
    pixels, sizes = batch()
    pixels = pixels.to(dtype)
    exact = results(copy.deepcopy(original).double(), pixels.double(), sizes)
    found, peer = results(patched, pixels, sizes), results(original, pixels, sizes)
    for one, other, reference in zip(found, peer, exact, strict=True):
        band = 4 * torch.finfo(dtype).eps
        assert error(one, reference) <= 2 * error(other, reference) + band
    assert len(packed) == 2


def test_training_in_bfloat16_keeps_the_original(packed: list[int]) -> None:
    """Its packed backward is plain PyTorch."""
    original, patched = (m.to(torch.bfloat16) for m in pair("qwen2_vl"))
    pixels, sizes = batch()
    pixels = pixels.to(torch.bfloat16)
    found, peer = results(patched, pixels, sizes), results(original, pixels, sizes)
    assert all(map(torch.equal, found, peer)) and not packed


@torch.no_grad()
def test_other_backends_keep_the_original(packed: list[int]) -> None:
    """One that has no kernel of packed sequences is not asked for it."""
    original, patched = pair("qwen3_vl", backend="sdpa")
    assert all(map(torch.equal, results(patched, *batch()), results(original, *batch())))
    assert not packed


@torch.no_grad()
@pytest.mark.parametrize("name", TOWERS)
def test_copies_pickles_and_goes_back(name: str) -> None:
    original, patched = pair(name)
    out = results(patched, *batch())
    for other in (copy.deepcopy(patched), pickle.loads(pickle.dumps(patched))):
        assert all(map(torch.equal, results(other, *batch()), out))
    assert elsa.unpatch(patched) == 2
    assert all(map(torch.equal, results(patched, *batch()), results(original, *batch())))


@pytest.mark.parametrize("name", TOWERS)
def test_check_agrees(name: str) -> None:
    _, patched = pair(name)
    report = elsa.check(patched, batch(), batch_size=140, grad=True)  # 140 patches, all at once
    assert report.ok, report
    assert all(site.operator_calls for site in report.sites)


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("name", TOWERS)
def test_on_a_gpu_one_call_takes_all(name: str, packed: list[int]) -> None:
    pytest.importorskip("triton")
    original, patched = (m.cuda() for m in pair(name))
    given = [tensor.cuda() for tensor in batch()]
    exact = results(copy.deepcopy(original).double(), given[0].double(), given[1])
    peer = results(original, *given)
    for backend in ("auto", "triton"):
        elsa.patch(patched, scope="attention", backend=backend)
        packed.clear()
        for one, other, reference in zip(results(patched, *given), peer, exact, strict=True):
            assert error(one, reference) <= 2 * error(other, reference) + 1e-6
        assert len(packed) == 2
