"""Small models that train, and the criterion: twice the original's error against float64."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from elsa_core.patching.rewrite import patch
from elsa_core.proof.compare import Comparison

CLASSES = 5
Gradients = dict[str, Tensor | None]


def vit(**options: Any) -> VisionTransformer:
    """17 tokens, two blocks."""
    return VisionTransformer(
        img_size=32, patch_size=8, num_classes=CLASSES, embed_dim=32, depth=2, num_heads=2,
        **options,
    )  # fmt: skip


def swin(**options: Any) -> SwinTransformer:
    """Four windows of 16 tokens, the second block shifted."""
    return SwinTransformer(
        img_size=32, patch_size=4, num_classes=CLASSES, embed_dim=16, depths=(2,), num_heads=(2,),
        window_size=4, **{"drop_path_rate": 0.0} | options,
    )  # fmt: skip


MODELS: dict[str, Callable[..., nn.Module]] = {"vit": vit, "swin": swin}


@dataclass
class Subject:
    """A model as it is, the same patched, and a batch.

    Attributes:
        plain, patched: with equal weights, in training mode.
        images, labels: [4, 3, 32, 32] and [4].
    """

    plain: nn.Module
    patched: nn.Module
    images: Tensor
    labels: Tensor

    def exact(self) -> nn.Module:
        """The original in float64."""
        return copy.deepcopy(self.plain).double()


def subject(kind: str, backend: str, scope: str = "attention", **options: Any) -> Subject:
    torch.manual_seed(0)
    plain = MODELS[kind](**options).train()
    with torch.no_grad():
        for parameter in plain.parameters():  # sharper weights: attention is no mean of all tokens
            if parameter.dim() > 1:
                parameter.mul_(5.0)
    patched = copy.deepcopy(plain)
    sites = patch(patched, backend=backend, scope=scope).patched
    assert len(sites) == 2 if scope == "attention" else len(sites) > 2
    return Subject(plain, patched, torch.randn(4, 3, 32, 32), torch.arange(4) % CLASSES)


@pytest.fixture(params=["vit-auto", "vit-native", "swin-auto", "swin-native"])
def small(request: pytest.FixtureRequest) -> Subject:
    """A ViT and a Swin, by the backends that a user gets and by elsa's own kernels."""
    return subject(*request.param.split("-"))


@pytest.fixture(params=list(MODELS))
def whole(request: pytest.FixtureRequest) -> Subject:
    """A ViT and a Swin of which every layer is patched, as float32 models on a GPU are."""
    return subject(request.param, "auto", "model")


def loss_of(model: Callable[..., Tensor], images: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(images), labels)


def gradients(model: nn.Module) -> Gradients:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def step(model: nn.Module, images: Tensor, labels: Tensor) -> Gradients:
    """The gradients of one step."""
    model.zero_grad()
    loss_of(model, images, labels).backward()
    return gradients(model)


def assert_as_exact(found: Gradients, original: Gradients, oracle: Gradients) -> None:
    """Each gradient's error is at most twice that of all the original's, and two ulp.

    All parameters together are one vector: single ones may happen to be exact in the original.
    """
    assert list(found) == list(original) == list(oracle)
    comparison = Comparison(2.0)
    for name, exact in oracle.items():
        one, two = original[name], found[name]
        assert (one is None) == (two is None) == (exact is None), name
        if exact is not None and one is not None and two is not None:
            comparison.add(exact, one, two)
    assert comparison.reason() == "" and comparison.oracle.maximum > 0


def assert_step_as_exact(found: Subject, labels: Tensor | None = None) -> None:
    """A step of the patched model, beside the original's."""
    labels = found.labels if labels is None else labels
    oracle = step(found.exact(), found.images.double(), labels)
    original = step(found.plain, found.images, labels)
    assert_as_exact(step(found.patched, found.images, labels), original, oracle)
