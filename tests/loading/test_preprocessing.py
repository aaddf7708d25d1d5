"""Preprocessing that a file does not say is assumed, said, and can be given."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file

from elsa_core.errors import ArgumentError, ModelError
from elsa_core.loading import timm_models
from elsa_core.loading.configuration import from_config, from_open_clip_config
from elsa_core.loading.loader import load_model
from elsa_core.loading.recipe import CLIP_MEAN, Given
from elsa_core.loading.stated import of_model
from elsa_core.loading.transformers_models import PROCESSORS, _preprocess

DEIT = "deit_tiny_patch16_224"
IMAGENET = Given((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), 0.9, "bicubic")


@pytest.fixture(scope="module")
def deit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deit") / "model.safetensors"
    save_file(timm.create_model(DEIT).state_dict(), path)
    return path


def test_a_deit_is_not_silently_a_vit(deit: Path) -> None:
    """Both have the same tensors; a ViT is normalised with 0.5, a DeiT with ImageNet's mean."""
    loaded = load_model(deit)
    assert {"mean", "std"} <= set(loaded.recipe.preprocess.assumed)
    (line,) = loaded.warnings
    assert "does not say its preprocessing" in line and "--mean" in line and "\n" not in line
    assert loaded.recipe.to_config()["elsa"]["assumed"] == list(loaded.recipe.preprocess.assumed)
    again = from_config(loaded.recipe.to_config(), "config").preprocess
    assert again == loaded.recipe.preprocess


def test_what_is_given_is_not_assumed(deit: Path) -> None:
    loaded = load_model(deit, arch=DEIT, preprocess=IMAGENET)
    assert loaded.warnings == () and loaded.recipe.preprocess.assumed == ()
    assert loaded.preprocess.with_said(vars(IMAGENET), str, ArgumentError) == loaded.preprocess
    some = load_model(deit, arch=DEIT, preprocess=Given(mean=[0.5], std=[0.5]))
    assert some.preprocess.mean == (0.5, 0.5, 0.5)
    assert not {"mean", "std"} & set(some.recipe.preprocess.assumed)


def test_a_tag_says_the_preprocessing(deit: Path) -> None:
    loaded = load_model(deit, arch=f"{DEIT}.fb_in1k")
    assert loaded.recipe.preprocess.assumed == () and loaded.warnings == ()
    assert loaded.preprocess.mean == IMAGENET.mean


TINY = {"num_layers": 1, "hidden_dim": 24, "num_heads": 3, "mlp_dim": 32}


def test_a_name_of_torchvision_says_no_preprocessing(tmp_path: Path) -> None:
    """V1 of ViT-B/16 is resized bilinearly and cropped, SWAG's bicubically and not cropped."""
    pytest.importorskip("torchvision")
    arch, path = "torchvision:vit_b_16", tmp_path / "model.safetensors"
    model = load_model(arch, model_kwargs=TINY).model
    save_file({key: t.contiguous() for key, t in model.state_dict().items()}, path)
    loaded = load_model(path, arch=arch, model_kwargs=TINY)
    assert loaded.recipe.preprocess.assumed == ("mean", "std", "crop_pct", "interpolation")
    assert (loaded.preprocess.crop_pct, loaded.preprocess.interpolation) == (0.875, "bilinear")
    (line,) = loaded.warnings
    assert "the defaults of vit_b_16: give --mean, --std, --crop-pct" in line
    assert "with a tag" not in line
    given = dataclasses.replace(IMAGENET, crop_pct=1.0)
    said = load_model(path, arch=arch, model_kwargs=TINY, preprocess=given)
    assert said.warnings == () and said.recipe.preprocess.assumed == ()
    assert said.preprocess.crop_pct == 1.0


def test_a_name_has_its_own() -> None:
    assert load_model("test_vit").recipe.preprocess.assumed == ()
    given = load_model("test_vit", preprocess=Given(crop_pct=1.0, interpolation="bilinear"))
    assert (given.preprocess.crop_pct, given.preprocess.interpolation) == (1.0, "bilinear")
    assert given.recipe.preprocess.crop_pct == 1.0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (Given(mean=(0.5, 0.5)), "--mean"),
        (Given(std=(0.0,)), "--std"),
        (Given(std=(float("nan"),)), "--std"),
        (Given(crop_pct=9.0), "--crop-pct"),
        (Given(interpolation="best"), "--interpolation"),
    ],
)
def test_values_that_cannot_be(given: Given, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        load_model("test_vit", preprocess=given)


def test_configurations_that_say_a_part() -> None:
    cfg: dict[str, Any] = {"mean": [0.1, 0.2, 0.3], "crop_pct": 0.9}
    read = from_config({"architecture": "test_vit", "pretrained_cfg": cfg}, "config").preprocess
    assert read.assumed == ("std", "interpolation")
    towers: dict[str, Any] = {"vision_cfg": {"image_size": 32}, "text_cfg": {}}
    clip = from_open_clip_config({"model_cfg": towers}, "config").preprocess
    assert clip.mean == CLIP_MEAN and clip.assumed == ("mean", "std", "interpolation")
    for noted in (["size"], "mean", [1], [["mean"]]):
        with pytest.raises(ModelError, match="assumed must list"):
            from_config({"architecture": "x", "elsa": {"assumed": noted}}, "config")


@pytest.mark.parametrize("factor", [10**400, float("inf"), -1, "1/255"])
def test_a_factor_that_cannot_be_is_none(tmp_path: Path, factor: Any) -> None:
    """A number of 400 digits was an internal error, and infinity a deviation of 0."""
    said = {"image_mean": [0.5] * 3, "image_std": [0.25] * 3, "rescale_factor": factor}
    (tmp_path / PROCESSORS[0]).write_text(json.dumps(said))
    found, _ = _preprocess(tmp_path, SimpleNamespace(image_size=32))
    assert found.std == (0.25, 0.25, 0.25)


@pytest.mark.parametrize("mode", [["squash"], {"squash": 1}, "other"])
def test_a_resize_mode_that_cannot_be(mode: Any) -> None:
    towers: dict[str, Any] = {"vision_cfg": {}, "text_cfg": {}}
    with pytest.raises(ModelError, match="resize_mode must be one of shortest, squash, longest"):
        from_config({"model_cfg": towers, "preprocess_cfg": {"resize_mode": mode}}, "it")


def test_crop_modes_are_kept() -> None:
    """Some of timm's weights and SigLIP's towers resize both sides; all were cropped."""
    recipe = timm_models.recipe("maxvit_tiny_tf_384", "in1k")
    assert recipe.preprocess.crop_mode == "squash"
    assert from_config(recipe.to_config(), "config").preprocess == recipe.preprocess
    model = torch.nn.Identity()
    recipe.describe(model)
    assert of_model(model, recipe.preprocess.input_size, Given()) == recipe.preprocess
    towers: dict[str, Any] = {"vision_cfg": {"image_size": 32}, "text_cfg": {}}
    given = {"model_cfg": towers, "preprocess_cfg": {"resize_mode": "squash"}}
    clip = from_open_clip_config(given, "config")
    assert clip.preprocess.crop_mode == "squash"
    assert clip.to_open_clip_config()["preprocess_cfg"]["resize_mode"] == "squash"
    for wrong in ({"crop_mode": "x"}, {"crop_mode": ["squash"]}):
        with pytest.raises(ModelError, match="crop_mode must be one of"):
            from_config({"architecture": "x", "pretrained_cfg": wrong}, "config")
