"""A model that has learnt something: predictions on real data are the same after patching."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sampling import some
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from elsa_core.loading.loader import load_model
from elsa_core.loading.recipe import Preprocess, Recipe
from elsa_core.loading.saving import save
from elsa_core.patching.rewrite import patch, patched_sites, unpatch
from elsa_core.proof.checking import check


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's 1 797 handwritten digits as [N, 1, 8, 8], normalised, and their labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.from_numpy(data.images).float().unsqueeze(1) / 16.0
    images = (images - 0.3) / 0.375
    return images, torch.from_numpy(data.target).long()


def tiny_vit() -> VisionTransformer:
    return VisionTransformer(
        img_size=8, patch_size=2, in_chans=1, num_classes=10, embed_dim=64, depth=2, num_heads=2
    )


@pytest.fixture(scope="module")
def trained(learnt_digits: Path) -> VisionTransformer:
    """A ViT of 17 tokens, trained on four fifths of the digits."""
    model = tiny_vit()
    model.load_state_dict(load_file(learnt_digits))
    return model.eval()


def test_same_predictions_on_all_digits(
    trained: VisionTransformer, digits: tuple[Tensor, Tensor]
) -> None:
    images, labels = digits
    with torch.no_grad():
        before = trained(images)
        try:
            report = patch(trained)
            after = trained(images)
            assert len(report.patched) == 2
            result = check(trained, images, batch_size=600)
        finally:
            unpatch(trained)
    assert len(images) == 1797 and torch.equal(before.argmax(1), after.argmax(1))
    assert float((before - after).abs().max()) < 1e-4 * float(before.abs().max())
    (case,) = result.cases
    assert result.ok, result.failures
    assert case.top1_rows == 1797 and case.top1_flips == case.top1_tie_flips == 0
    right = (after.argmax(1) == labels).float()
    # every fifth digit was held out of the training
    assert float(right.mean()) > 0.9 and float(right[::5].mean()) > 0.85


@pytest.mark.parametrize("dtype", some((torch.bfloat16, torch.float16)))
def test_half_precision_passes(
    trained: VisionTransformer, digits: tuple[Tensor, Tensor], dtype: torch.dtype
) -> None:
    model = copy.deepcopy(trained).to(dtype)
    patch(model)
    report = check(model, digits[0], batch_size=600)
    assert report.ok, report.failures
    assert report.cases[0].top1_rows == 1797 and report.cases[0].top1_flips == 0


def test_same_predictions_after_save_and_load(
    trained: VisionTransformer, digits: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    """A folder as a user has it: loaded, patched, saved, loaded again, and still patched."""
    images, _ = digits
    args = {"img_size": 8, "patch_size": 2, "embed_dim": 64, "depth": 2, "num_heads": 2}
    preprocess = Preprocess((1, 8, 8), (0.3,), (0.375,), "bilinear", 1.0)
    recipe = Recipe("timm", "vit_tiny_patch16_224", args, 10, preprocess)
    given = tmp_path / "given"
    given.mkdir()
    (given / "config.json").write_text(json.dumps(recipe.to_config()))
    save_file(trained.state_dict(), given / "model.safetensors")
    loaded = load_model(given)
    with torch.no_grad():
        before = trained(images)
        assert torch.equal(loaded.model(images), before)
        report = patch(loaded.model)
        after = loaded.model(images)
        save(loaded, report, tmp_path / "saved")
        again = load_model(tmp_path / "saved")
        assert len(patched_sites(again.model)) == 2
        assert torch.equal(again.model(images), after)
    assert torch.equal(after.argmax(1), before.argmax(1))
    assert check(again.model, images[:100]).ok
