"""Swin, in timm and torchvision, on elsa: padding and shift on both axes, sizes that change."""

import copy
import functools
from typing import Any

import pytest
import timm
import torch
from judging import assert_recorded, assert_same_gradients
from originals import of_original, torchvision_swin
from sampling import thinned
from seen import Calls
from torch import Tensor, nn

from elsa_core.patching.rewrite import patch, unpatch
from elsa_core.proof.checking import check

# 27 x 19 tokens in windows of 4 x 4: both axes are padded, in the second stage (14 x 10) too.
SIDES = (108, 76)
SMALL = {"embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4), "num_classes": 6}
TIMM = {
    "swin": "swin_tiny_patch4_window7_224",
    "swin-v2": "swinv2_tiny_window8_256",
    "swin-v2-cr": "swinv2_cr_tiny_224",
}
TORCHVISION = ("torchvision-v1", "torchvision-v2")
KINDS = (*TIMM, *TORCHVISION)


@functools.cache
def pads(kind: str) -> str:
    """Why this timm's model runs on no image that has to be padded, or ""."""
    try:
        with torch.random.fork_rng(devices=[]):
            timm.create_model(TIMM[kind], img_size=SIDES, window_size=4, **SMALL)(images(1))
    except RuntimeError as error:
        return f"this timm's {kind} does not pad images: {error}"
    return ""


def make(kind: str, **options: Any) -> nn.Module:
    """A small model in which no parameter is zero or all alike."""
    if kind in TIMM:
        if why := pads(kind):
            pytest.skip(why)
        given = {"img_size": SIDES, "window_size": 4} | SMALL | options
        model = timm.create_model(TIMM[kind], **given).eval()
    else:
        model = torchvision_swin(int(kind[-1]), **SMALL | options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "logit_scale" in name:
                parameter.uniform_(1.0, 6.0)  # some beyond the clamp at log 100
            elif parameter.dim() < 2 or "bias" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def images(batch: int = 2, sides: tuple[int, int] = SIDES) -> Tensor:
    return torch.randn(batch, 3, *sides, generator=torch.Generator().manual_seed(batch))


def features(model: nn.Module, x: Tensor) -> Tensor:
    """Tokens, not classes: as many values as a comparison can have."""
    return model.features(x) if hasattr(model, "features") else model.forward_features(x)


def assert_same(model: nn.Module, x: Tensor, dtype: torch.dtype, run: Any = None) -> None:
    """Patched, the model errs no more than twice as much as itself, against float64."""
    expected = features(copy.deepcopy(model).double(), x.double())
    model, x = copy.deepcopy(model).to(dtype), x.to(dtype)
    plain = features(model, x)
    report = patch(model)
    assert not report.kept
    with Calls() as calls:
        found = features(model, x)
    assert calls.windows == len(report.patched) and not calls.others("roll", "_softmax", "bmm")
    assert found.dtype == dtype and found.shape == plain.shape
    own, error = ((out.double() - expected) for out in (plain, found))
    eps = torch.finfo(dtype).eps
    assert error.norm() <= 2 * own.norm() + 2 * eps * expected.norm()
    assert error.abs().max() <= 2 * own.abs().max() + 2 * eps * expected.abs().max()


@pytest.mark.parametrize(
    ("kind", "batch", "dtype"), thinned(KINDS, (1, 3), (torch.float32, torch.bfloat16)), ids=str
)
@torch.no_grad()
def test_padded_and_shifted_on_both_axes(kind: str, batch: int, dtype: torch.dtype) -> None:
    assert_same(make(kind), images(batch), dtype)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_without_a_projection_bias(kind: str) -> None:
    model = make(kind, **({"qkv_bias": False} if kind in ("swin", "swin-v2") else {}))
    for module in model.modules():
        if kind in TORCHVISION and hasattr(module, "relative_position_index"):
            module.qkv.bias = None
    assert_same(model, images(1), torch.float32)


@pytest.mark.parametrize("kind", TIMM)
@torch.no_grad()
def test_windows_that_are_no_square_and_cover_an_axis(kind: str) -> None:
    """9 x 40 tokens: in the second stage a window covers the height, so that the width alone is
    shifted; `always_partition` shifts it all the same."""
    for always in (False, True):
        sides = (36, 160)
        model = make(kind, img_size=sides, window_size=(5, 6), always_partition=always)
        if kind == "swin" and timm.__version__ == "1.0.20":
            pytest.skip("timm 1.0.20 cuts a window that covers an axis in a way of its own")
        assert_same(model, images(2, sides), torch.float32)


@pytest.mark.parametrize("kind", TORCHVISION)
@pytest.mark.parametrize("sides", [(12, 150), (96, 64), (20, 20)])
@torch.no_grad()
def test_torchvision_sizes(kind: str, sides: tuple[int, int]) -> None:
    """One window covers the height; nothing is padded; a window is larger than the image."""
    assert_same(make(kind), images(2, sides), torch.float32)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_check_judges_each_site_at_its_attention(kind: str, monkeypatch) -> None:
    model = make(kind)
    before = {path: set(vars(m)) for path, m in model.named_modules()}
    report = patch(model)
    found = check(model, images(2))
    assert found.ok, found.failures
    assert len(found.sites) == 4 == len(report.patched)
    # The input and three hard cases; those of whole windows also padded, those of cosine attention
    # also with a scale above its limit.
    whole = 2 if kind in TORCHVISION else 0
    calls = 5 if "v2" in kind else 4
    assert sum(site.calls for site in found.sites) == 4 * calls + whole
    assert all(site.operator_calls == site.calls >= calls for site in found.sites)
    assert all(site.drift is not None and site.largest_logit > 5 for site in found.sites)
    path = report.patched[1].path
    monkeypatch.setenv("ELSA_FAULT_INJECTION", f"{path}:1e-5")
    found = check(model, images(1), stress=False)
    assert [site.path for site in found.sites if not site.ok] == [path]
    unpatch(model)
    assert {p: set(vars(m)) for p, m in model.named_modules()} == before


@pytest.mark.parametrize(("kind", "way"), thinned([*TIMM, "torchvision-v2"], ("compile", "export")))
@torch.no_grad()
def test_one_graph_and_a_dynamic_batch(kind: str, way: str) -> None:
    model = make(kind, depths=(2,), num_heads=(2,))
    patch(model)
    called = assert_recorded(way, model, images(2), images(1), images(5))
    windows = sum(name.startswith("elsa.window_attention") for name in called)
    assert windows == 2 * (way == "export")
    assert not any("softmax" in name or "roll" in name for name in called)


@pytest.mark.parametrize("kind", ["swin", "swin-v2", "torchvision-v2"])
def test_tangents_of_the_image_and_of_the_weights(kind: str) -> None:
    plain = make(kind).double()
    patched = copy.deepcopy(plain)
    patch(patched)
    x = images(1).double()
    with torch.no_grad():
        patched(x)  # keeps what is computed once
    weights = {name: t.detach() for name, t in plain.named_parameters()}
    primals = (weights, x)
    tangents = ({name: 0.1 * t for name, t in weights.items()}, x.flip(-1))

    def tangent(model: nn.Module) -> Tensor:
        def call(weights: dict[str, Tensor], x: Tensor) -> Tensor:
            return torch.func.functional_call(model, weights, (x,))

        return torch.func.jvp(call, primals, tangents)[1]

    torch.testing.assert_close(tangent(patched), tangent(plain), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind: str) -> None:
    plain, x = make(kind).double(), images(1).double()
    patched = copy.deepcopy(plain)
    patch(patched)
    with torch.no_grad():
        patched(x)  # must leave nothing behind that a gradient would miss
    for training in (False, True):
        for model in (plain, patched):
            model.train(training)
            for module in model.modules():
                if type(module).__name__ in ("Dropout", "DropPath", "StochasticDepth"):
                    module.eval()  # Swin-V2 CR drops in its position network
            model.zero_grad()
            model(x).square().sum().backward()
        assert_same_gradients(plain, patched)


@pytest.mark.parametrize("kind", TIMM)
@torch.no_grad()
def test_another_size_after_patching(kind: str) -> None:
    plain = make(kind)
    patched = copy.deepcopy(plain)
    patch(patched)
    patched(images(1))
    sides = (76, 132)
    for options in ({}, {"window_size": 5}, {"window_size": 5, "always_partition": True}):
        for model in (plain, patched):
            model.set_input_size(img_size=sides, **options)
        expected = of_original(lambda: features(plain, images(1, sides)))
        found = features(patched, images(1, sides))
        assert float((found - expected).norm()) < 1e-4 * float(expected.norm())


@torch.no_grad()
def test_a_model_of_any_size() -> None:
    """`strict_img_size=False`: the mask is made for each image; exported with a dynamic size."""
    plain = make("swin", img_size=64, strict_img_size=False, depths=(2,), num_heads=(2,))
    patched = copy.deepcopy(plain)
    patch(patched)
    for sides in ((64, 64), SIDES):
        expected, found = (model(images(1, sides)) for model in (plain, patched))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    any_size = {2: torch.export.Dim.AUTO, 3: torch.export.Dim.AUTO}
    program = torch.export.export(patched, (images(1, (96, 64)),), dynamic_shapes=(any_size,))
    torch.testing.assert_close(program.module()(images(1)), found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", TIMM)
@torch.no_grad()
def test_a_trace_computes_on_other_images(kind: str) -> None:
    model = make(kind)
    patch(model)
    model(images(1))
    traced = torch.jit.trace(model, images(2), check_trace=False)
    torch.testing.assert_close(traced(images(3)), model(images(3)), rtol=1e-4, atol=1e-5)


class LowRank(nn.Module):
    """A projection with an addition, as fine-tuning makes it; it has no bias of its own."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.addition = nn.Sequential(
            nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.addition(x)


@pytest.mark.parametrize("kind", ["swin", "swin-v2", "swin-v2 without bias", "swin-v2-cr"])
@torch.no_grad()
def test_another_projection_says_what_padding_becomes(kind: str) -> None:
    name, _, without = kind.partition(" ")
    plain = make(name, qkv_bias=False) if without else make(name)
    for module in plain.modules():
        if hasattr(module, "qkv"):
            module.qkv = LowRank(module.qkv)
            module.qkv_bias_separate = True  # Swin-V2 calls its projection then
    assert_same(plain, images(1), torch.float32)


@torch.no_grad()
def test_autocast_computes_in_its_dtype() -> None:
    for kind in KINDS:
        model, x = make(kind), images(1)
        expected = features(model, x)
        patch(model)
        features(model, x)  # what is kept from here is of another dtype
        with torch.autocast("cpu", torch.bfloat16):
            found = features(model, x)
        assert float((found.float() - expected).norm()) < 0.05 * float(expected.norm())


@pytest.mark.parametrize("kind", ["swin", "swin-v2", "torchvision-v1"])
@torch.no_grad()
def test_a_large_bias_is_read_through_its_index(kind: str) -> None:
    """Windows of usual models have a dense bias; one of 20 x 20 tokens is beyond its size."""
    window: Any = [20, 20] if kind in TORCHVISION else 20
    sizes = {} if kind in TORCHVISION else {"img_size": 80}
    model = make(kind, window_size=window, depths=(2,), num_heads=(3,), **sizes)
    assert_same(model, images(1, (80, 80)), torch.float32)
