"""timm's MaxViT on elsa: windows and grids, every kind of relative positions."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import timm
import torch
from judging import assert_recorded, assert_same_gradients
from sampling import thinned
from seen import Calls
from torch import Tensor, nn

from elsa_core.patching.rewrite import patch, unpatch
from elsa_core.patching.sites import inspect
from elsa_core.proof.checking import check

TIMM = {
    # Heads first in the projection; a table of biases.
    "bias": ("maxvit_pico_rw_256", {}),
    "mlp": ("maxvit_rmlp_pico_rw_256", {}),
    # The projection as in other models; biases as TensorFlow keeps them.
    "tf": ("maxvit_tiny_tf_224", {}),
}
SIDE = 96  # 24 x 24 tokens in the first stage, windows and grids of 3 x 3


def make(kind: str) -> nn.Module:
    """A small model of four sites in which no bias is zero."""
    name, options = TIMM[kind]
    model = timm.create_model(
        name, img_size=SIDE, embed_dim=(32, 64), depths=(1, 1), stem_width=16, num_classes=6,
        drop_path_rate=0.0, **options,
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "rel" in name or "bias" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def images(batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(batch))


@pytest.mark.parametrize(("kind", "dtype"), thinned(TIMM, (torch.float32, torch.bfloat16)), ids=str)
@torch.no_grad()
def test_windows_and_grids(kind: str, dtype: torch.dtype) -> None:
    """Every site and the model, against float64, in batches of 1 and 3."""
    model = make(kind).to(dtype)
    report = patch(model)
    assert len(report.patched) == 4 and not report.kept
    with Calls() as calls:
        model(images(1).to(dtype))
    assert calls.windows == 4 and not calls.others("softmax")
    found = check(model, {"one": images(1), "three": images(3)})
    assert found.ok, found.failures
    assert all(site.operator_calls == site.calls > 0 for site in found.sites)


@pytest.mark.parametrize(("kind", "way"), thinned(("mlp", "tf"), ("compile", "export")))
@torch.no_grad()
def test_one_graph_a_dynamic_batch_and_copies(kind: str, way: str) -> None:
    model, x = make(kind), images(2)
    expected = model(x)
    patch(model)
    found = model(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), found)
        unpatch(twin)
        assert torch.equal(twin(x), expected)
    called = assert_recorded(way, model, x, images(3))
    windows = sum(name.startswith("elsa.window_attention") for name in called)
    assert windows == 4 * (way == "export")


@pytest.mark.parametrize("kind", TIMM)
def test_inspect_shows_windows(kind: str) -> None:
    sites = inspect(make(kind), (3, SIDE, SIDE)).sites
    assert [(s.kind, s.query_tokens, s.patchable) for s in sites] == [("window", 9, True)] * 4
    assert all("relative bias" in s.extra and s.flops for s in sites)


@pytest.mark.parametrize("kind", TIMM)
def test_gradients_and_hooks(kind: str) -> None:
    plain, x = make(kind).double(), images(2).double()
    patched = copy.deepcopy(plain)
    patch(patched)
    with torch.no_grad():
        patched(x)
    for model in (plain, patched):
        model(x).square().sum().backward()
    assert_same_gradients(plain, patched)
    seen: list[Any] = []
    attn = next(m for p, m in patched.named_modules() if p.endswith(".attn"))
    attn.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    with torch.no_grad(), Calls() as calls:
        patched(x)
    assert len(seen) == 1 and calls.windows == 3


@pytest.mark.parametrize("kind", TIMM)
@torch.no_grad()
def test_another_size_and_other_weights_after_patching(kind: str) -> None:
    plain, other = make(kind), make(kind)
    patched = copy.deepcopy(plain)
    patch(patched)
    patched(images(1))
    for model in (plain, patched):
        model.load_state_dict(other.state_dict())
    torch.testing.assert_close(patched(images(1)), plain(images(1)), rtol=1e-4, atol=1e-5)
    if hasattr(plain, "set_input_size"):
        for model in (plain, patched):
            model.set_input_size(img_size=(64, 96), window_size=(2, 3))
        x = images(2)[:, :, :64]
        torch.testing.assert_close(patched(x), plain(x), rtol=1e-4, atol=1e-5)
