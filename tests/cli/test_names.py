"""Typing errors in MODEL are answered before torch or timm is imported, with close names."""

from pathlib import Path

import pytest
from sampling import taken

from elsa_cli import names, pipeline
from elsa_cli.errors import ModelFileError

from .conftest import Elsa


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("inspect timm:", "names no model after the colon; `elsa list 'timm:*'`"),
        ("inspect torchvision:", "names no model after the colon; `elsa list 'torchvision:*'`"),
        ("inspect hf-hub:", "names no model after the colon"),
        ("inspect model.pht", "'model.pht'; files of weights end in .safetensors"),
        ("inspect nope", "'nope'; `elsa list 'timm:*'` names them"),
        ("inspect facebook/dinov2-base", "write hf-hub:facebook/dinov2-base"),
        ("inspect notes.txt", "no such file or directory: notes.txt"),
        ("patch test_vit --plan nofile.json", "nofile.json: no such plan"),
        ("check test_vit --images nowhere", "nowhere: no such folder of images"),
        ("check test_vit --images file", "file: not a folder"),
        ("export test_vit --images nowhere", "nowhere: no such folder of images"),
        ("export test_vit --labels nofile", "nofile: no such file of labels"),
        ("export test_vit --sign nofile", "nofile: no such private key"),
        ("export model.pht --sign nofile", "'model.pht'"),
        ("verify nowhere", "no such bundle: nowhere"),
        ("verify file --key nofile", "nofile: no such public key"),
    ],
)
def test_what_is_not_there_is_said_without_heavy_imports(
    elsa: Elsa, monkeypatch: pytest.MonkeyPatch, arguments: str, words: str
) -> None:
    """These took 3 to 12 s: torch was imported, or the model loaded, before anybody looked."""
    Path("file").touch()

    def imported(*_: object, **__: object) -> None:
        raise AssertionError("torch would be imported")

    monkeypatch.setattr(pipeline, "import_torch", imported)
    elsa(*arguments.split()).fails(4, words)


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("swintiny", "swin_tiny_patch4_window7_224"),
        ("swin-tiny", "swin_tiny_patch4_window7_224"),
        ("clip", "open_clip:ViT-B-32"),
        ("dinov2_vits14", "vit_small_patch14_dinov2"),
        ("dinov2_vitl14_reg", "vit_large_patch14_reg4_dinov2"),
        ("vit_bse_patch16_224", "vit_base_patch16_224"),
        ("ViT-B-32", "open_clip:ViT-B-32"),
        ("ViT-B/16", "open_clip:ViT-B-16"),
        ("vitb32", "torchvision:vit_b_32"),
        ("open_clip:ViT-B-33", "open_clip:ViT-B-32"),
        ("timm:vit_bse_patch16_224", "vit_base_patch16_224"),
    ],
)
def test_close_names(text: str, first: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        names.check(text)
    line = str(caught.value)
    assert f"'{text}'" in line and first in line.split("close names: ")[1].split(", ")[:2]


def test_a_text_without_letters_is_close_to_nothing() -> None:
    """Every name begins with the nothing that was left of it."""
    assert names.close_names("##") == names.close_names("[") == []


def test_what_is_right_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every name that the libraries know, aliases, tags, hub ids and whatever exists."""
    import timm
    import torchvision

    for place, name in enumerate(timm.list_models()):
        if name == "test_vit" or taken(place, 12):
            names.check(name)
    for name in torchvision.models.list_models(module=torchvision.models):
        names.check(f"torchvision:{name}")
    for text in (
        *("swin_tiny", "vit_base_patch16_224.mae", "vit_tiny_patch16_224_in21k", "timm:test_vit"),
        *("open_clip:ViT-B/32", "open_clip:ViT-B-32/openai", "open_clip:hf-hub:a/b", "hf-hub:a/b"),
        *("timm/vit_base_patch16_224.mae", "tensorflow:vit", "local-dir:mine", ""),
    ):
        names.check(text)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "deep").mkdir()
    (tmp_path / "model.pth").touch()
    for text in ("mine", "./mine", "mine/deep", "model.pth", str(tmp_path)):
        names.check(text)


def test_every_registered_name_is_found() -> None:
    import open_clip
    import timm

    from elsa_cli import completion

    assert set(timm.list_models()) <= completion.known("timm")
    assert set(open_clip.list_models()) <= completion.known("open_clip")


def test_every_deprecated_name_is_found() -> None:
    registry = pytest.importorskip("timm.models._registry")
    for place, name in enumerate(getattr(registry, "_deprecated_models", ())):
        if taken(place, 6):
            names.check(name)


def test_libraries_are_spelt_as_the_loader_spells_them() -> None:
    from elsa_core.loading import libraries

    assert tuple(names.PREFIXES) == libraries.names()
    owners = {library.hub_owner for library in libraries.LIBRARIES}
    assert {None, *names.OWNERS} == owners
