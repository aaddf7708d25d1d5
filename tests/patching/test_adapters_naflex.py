"""Batches of images of different size in timm's NaFlexViT: padding is left out, and only that."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
from judging import assert_as_exact
from torch import Tensor, nn

import elsa_core as elsa

MODELS: dict[str, dict[str, Any]] = {
    "avg": {},
    "map": {"global_pool": "map"},
    "token": {"global_pool": "token", "class_token": True},
    "max, registers": {"global_pool": "max", "reg_tokens": 2},
    "avgmax": {"global_pool": "avgmax"},
    "mask of keys": {"use_key_only_attn_mask": True},
    "rope": {"rope_type": "axial"},
    "eva": {"attn_type": "eva", "swiglu_mlp": True},
    "qk norm": {"qk_norm": True},
}


def model(name: str = "avg", **options: Any) -> nn.Module:
    torch.manual_seed(0)
    made = timm.create_model(
        "naflexvit_base_patch16_gap", depth=2, embed_dim=32, num_heads=2, num_classes=7,
        **{**MODELS[name], **options},
    )  # fmt: skip
    for parameter in made.parameters():  # some are zeros
        nn.init.normal_(parameter, std=0.15)
    return made.eval()


def batch(valid: tuple[int, ...] = (20, 7, 12), tokens: int = 20) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    patches = torch.randn(len(valid), tokens, 16 * 16 * 3, generator=generator)
    place = torch.arange(tokens)
    coordinates = torch.stack((place // 5, place % 5), -1).expand(len(valid), -1, -1)
    there = place[None] < torch.tensor(valid)[:, None]
    return {"patches": patches, "patch_coord": coordinates.clone(), "patch_valid": there}


def pair(name: str = "avg", **options: Any) -> Any:
    """A model and its patched copy."""
    original = model(name)
    patched = copy.deepcopy(original)
    assert elsa.patch(patched, scope="attention", **options).scope == "attention"
    return original, patched


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_agrees_with_the_original(name: str, packed: list[Any]) -> None:
    original, patched = pair(name)
    assert_as_exact(original, patched, batch())
    whole = name in ("rope", "eva")  # blocks that read positions, or are none of timm's plain ones
    assert [queries for queries, _ in packed] == [39 + 3 * original.num_prefix_tokens] * 2 * (
        not whole
    )


@torch.no_grad()
def test_the_scale_of_an_unfused_attention_is_its_own(packed: list[Any]) -> None:
    original, patched = pair()
    for block in (*original.blocks, *patched.blocks):
        block.attn.fused_attn, block.attn.scale = False, 0.1
    assert_as_exact(original, patched, batch())
    assert packed


@torch.no_grad()
def test_images_of_one_size_have_no_mask(packed: list[Any]) -> None:
    original, patched = pair()
    image = torch.randn(2, 3, 64, 64)
    assert torch.allclose(patched(image), original(image), atol=1e-5)
    assert not packed


@torch.no_grad()
def test_a_mask_of_the_callers_is_a_mask(packed: list[Any]) -> None:
    (original, patched), given = pair(), batch()
    hidden = torch.rand(3, 1, 24, 24, generator=torch.Generator().manual_seed(2)) > 0.8
    given["attn_mask"] = torch.zeros(hidden.shape).masked_fill(hidden, -1e9)
    assert torch.allclose(patched(given), original(given), atol=1e-4)
    assert not packed


@torch.no_grad()
def test_hooks_see_padded_batches() -> None:
    (_, patched), given = pair(), batch()
    shapes: list[torch.Size] = []
    plain = patched(given)
    patched.blocks[1].mlp.register_forward_hook(lambda m, i, out: shapes.append(out.shape))
    assert torch.allclose(patched(given), plain, atol=1e-5)
    assert shapes == [(3, 24, 32)]


class _Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x


@torch.no_grad()
@pytest.mark.parametrize("since", [False, True])
def test_weights_that_another_module_changes(since: bool) -> None:
    """A module in the place of the dropout of weights: packed tokens once went past it."""
    original = model()
    patched = copy.deepcopy(original)
    if since:
        elsa.patch(patched)
    for each in (original, patched):
        for block in each.blocks:
            block.attn.fused_attn = False
            block.attn.attn_drop = _Halved().eval()
    if not since:
        elsa.patch(patched)
    assert_as_exact(original, patched, batch())


@torch.no_grad()
def test_a_block_that_is_not_patched_keeps_its_mask(packed: list[Any]) -> None:
    (original, patched), given = pair(exclude="blocks.0.*"), batch()
    assert torch.allclose(patched(given), original(given), atol=1e-4)
    assert not packed


@torch.no_grad()
def test_an_image_without_patches() -> None:
    assert_as_exact(*pair("map"), batch((20, 0, 3)))


def test_check_agrees() -> None:
    assert elsa.check(pair()[1], torch.randn(2, 3, 64, 64)).ok
