"""`elsa list` and `elsa help`: names and numbers at once, without an import of torch or timm."""

import json
from pathlib import Path

import pytest

from elsa_cli import completion
from elsa_cli.commands import list as listing

from .conftest import Elsa

ROOT = Path(__file__).parents[2]
DEVICES = ROOT / "elsa_core/backends/triton/pack/devices.json"


def test_a_glob_selects_names(elsa: Elsa) -> None:
    answer = elsa("list", "swin_tiny*")
    assert (answer.code, answer.err) == (0, "")
    rows = [line.split() for line in answer.out.splitlines()]
    assert ["swin_tiny_patch4_window7_224", "12", "12", "28.3", "M"] in rows
    assert all("swin_tiny" in row[0] for row in rows[2:] if len(row) == 5)
    assert "Next: elsa inspect swin_tiny_patch4_window7_224" in answer.out
    whole = {row["name"] for row in elsa("list", "--json", "--all").document()["results"]["models"]}
    assert {"resnet50", "open_clip:ViT-B-32", "vit_base_patch16_224"} <= whole
    first = elsa("list", "vit_tiny", "--json").document()["results"]["models"]
    assert first[0]["name"] == "vit_tiny_patch16_224" and first[-1]["name"].count("vit_tiny")
    anywhere = elsa("list", "dinov2", "--json").document()["results"]["models"]
    assert len(anywhere) > 5 and all("dinov2" in row["name"] for row in anywhere)
    library = elsa("list", "open_clip:*", "--json").document()["results"]["models"]
    assert library and {row["library"] for row in library} == {"open_clip"}


def test_models_without_attention_are_left_out_and_counted(elsa: Elsa) -> None:
    answer = elsa("list", "resnet18*")
    assert answer.out.splitlines()[-1].startswith("0 models · ")
    assert "--all lists them" in answer.out
    assert "resnet18 " in elsa("list", "resnet18*", "--all").out
    elsa("list", "swintiny").fails(4, "swintiny", "swin_tiny")


@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "cait_xxs24_224", "resnet18"]
)
def test_the_counts_are_those_of_inspect(name: str) -> None:
    from elsa_core.loading import meta_model
    from elsa_core.patching.sites import find_sites

    counted = {model.name: model for model in listing.read(listing.TABLE)[1]}[name]
    model = meta_model(name)
    sites = find_sites(model)
    assert counted.sites == len(sites)
    assert counted.patchable == sum(site.patchable for site in sites)
    assert counted.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_a_newer_model_has_no_counts(monkeypatch: pytest.MonkeyPatch, elsa: Elsa) -> None:
    names = {"timm": {"vit_new"}, "open_clip": set(), "torchvision": set()}
    monkeypatch.setattr(completion, "known", names.get)
    models = {model.name: model for model in listing.installed()}
    assert models["vit_new"].parameters is None and "vit_tiny_patch16_224" in models
    assert not any(name.startswith("open_clip:") for name in models)
    assert "vit_new" in elsa("list", "vit_new").out


def test_help(elsa: Elsa) -> None:
    assert elsa("help").out == elsa("--help").out
    assert elsa("help", "patch").out == elsa("patch", "--help").out
    for kind in ("models", "attention"):
        assert elsa("help", "bench", kind).out == elsa("bench", "--help").out
    elsa("help", "bench", "modles").fails(2, "modles")
    elsa("help", "patch", "models").fails(2, "patch takes no 'models'")
    elsa("help", "pach").fails(2, "'pach'", "did you mean 'patch'?")
    assert elsa("help", "eval", "--json").document()["results"]["command"] == "elsa eval"


def test_offered_names_are_those_of_the_core() -> None:
    from elsa_core.profiling.runs.variants import BASELINES

    assert (*BASELINES, "all") == completion.BASELINES
    rows = json.loads(DEVICES.read_text())["devices"]
    assert tuple(dict.fromkeys(f"sm_{row['arch']}" for row in rows)) == completion.ARCHS
