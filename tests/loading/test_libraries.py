"""A library is one record: its names, recipes, models, configurations and files need no other."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

import elsa_core as elsa
from elsa_cli import completion, names
from elsa_core.errors import ArgumentError, ModelError, UnavailableError
from elsa_core.loading import libraries, meta_model
from elsa_core.loading.configuration import from_config
from elsa_core.loading.fit import with_kwargs
from elsa_core.loading.library import Library, UninitialisedParameters
from elsa_core.loading.loader import load_model
from elsa_core.loading.recipe import Preprocess, Recipe
from elsa_core.loading.saving import save
from elsa_core.loading.spec import ModelSpec, parse

NAMES = ("toy_small", "toy_large")


class Toy(nn.Module):
    """Images to classes, by attention over 8 pixels of each row."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.stem = nn.Linear(3, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.stem(images.flatten(2).transpose(1, 2))
        q, k, v = self.qkv(tokens).unsqueeze(1).chunk(3, dim=-1)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.head(mixed[:, 0].mean(dim=1))


def build(recipe: Recipe) -> nn.Module:
    width = recipe.args.get("width", 16 if recipe.name == "toy_small" else 32)
    return Toy(width, 4 if recipe.num_classes is None else recipe.num_classes)


TOYS = Library(
    name="toys",
    names=lambda: list(NAMES),
    lookup=lambda text: (text, None) if text in NAMES else None,
    recipe=lambda name, tag: Recipe("toys", name, {}, None, Preprocess((3, 8, 8))),
    build=build,
    config_args=lambda cfg, preprocess: {},
)


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "LIBRARIES", (*libraries.LIBRARIES, TOYS))


@pytest.mark.usefixtures("toys")
def test_a_library_of_ones_own_is_one_record(tmp_path: Path) -> None:
    assert parse("toys:toy_small") == ModelSpec("toys", "toy_small", "toys:toy_small")
    loaded = load_model("toys:toy_small", model_kwargs={"num_classes": 3})
    assert loaded.weights == "random (seed 0)" and loaded.num_classes == 3
    assert loaded.model(*loaded.example_inputs()).shape == (1, 3)
    # Saved as a directory, and named for a file of tensors alone.
    report = elsa.patch(loaded.model)
    assert len(report.patched) == 1
    again = load_model(save(loaded, report, tmp_path / "saved"))
    assert again.recipe == loaded.recipe and again.report is not None
    file = tmp_path / "saved" / "model.safetensors"
    named = load_model(file, arch="toys:toy_small", model_kwargs={"num_classes": 3})
    pairs = zip(loaded.model.parameters(), named.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert load_model("toys:toy_large", image_size=4).input_size == (3, 4, 4)


@pytest.mark.usefixtures("toys")
def test_its_mistakes_are_told_like_any_others() -> None:
    with pytest.raises(ModelError, match=r"no toys model is named 'toy_smal'.*toys:toy_small"):
        parse("toys:toy_smal")
    with pytest.raises(ModelError, match=r"the sources are .*torchvision:, toys:, hf-hub:"):
        parse("tensorflow:vit")
    with pytest.raises(ModelError, match="did you mean toys:toy_large"):
        parse("toy_large")
    with pytest.raises(ModelError, match="toys publishes no weights: leave out --pretrained"):
        load_model("toys:toy_small", pretrained=True)
    clip = Recipe("open_clip", "ViT-B-32", model_cfg={})
    with pytest.raises(ArgumentError, match=r"are for timm, torchvision and toys; open_clip's"):
        with_kwargs(clip, {"depth": 1})


def test_without_its_record_a_library_is_unknown() -> None:
    with pytest.raises(ModelError, match="unknown model source 'toys'"):
        parse("toys:toy_small")
    config = {"architecture": "toy_small", "elsa": {"library": "toys"}}
    with pytest.raises(ModelError, match="unknown library 'toys'"):
        from_config(config, "config")
    with pytest.raises(ModelError, match="no library is named 'toys': elsa knows timm, open_clip"):
        libraries.build(Recipe("toys", "toy_small"))


@pytest.mark.parametrize("key", ["img_size", "image_size"])
def test_the_constructors_own_word_for_its_size_is_one(key: str) -> None:
    """Inputs stayed at 224 pixels under torchvision's."""
    usual = libraries.of("torchvision").recipe("vit_b_16", None)
    recipe = with_kwargs(usual, {key: 64})
    assert recipe.size == (64, 64) and recipe.args == {"image_size": 64}


def test_a_hub_id_is_no_architecture() -> None:
    with pytest.raises(ModelError, match=r"no library is named 'hub'"):
        meta_model("hf-hub:some/model")


def test_a_library_that_is_not_installed_has_no_close_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing() -> list[str]:
        raise UnavailableError("toys is not installed")

    absent = dataclasses.replace(TOYS, names=missing)
    monkeypatch.setattr(libraries, "LIBRARIES", (*libraries.LIBRARIES, absent))
    with pytest.raises(ModelError, match="did you mean open_clip:ViT-B-32"):
        parse("ViT-B-32")


def test_the_command_line_has_the_same_libraries() -> None:
    """It names them again, because the records import torch."""
    assert tuple(names.PREFIXES) == libraries.names()
    assert all(completion.known(library) for library in libraries.names())


def test_drop_path_rates_are_read_back_on_the_meta_device() -> None:
    """timm 1.0.20 does, and no model was built at another image size."""
    with torch.device("meta"), UninitialisedParameters():
        rates = torch.linspace(0, 0.1, 3)
        assert rates.tolist() == [0.0] * 3 and rates[1].item() == 0.0
