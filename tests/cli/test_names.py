"""Typing errors in MODEL are answered before torch or timm is imported, with close names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from elsa_cli import names

from .conftest import environment
from .test_start import WATCH

HEAVY = ("torch", "timm", "open_clip", "numpy", "elsa_core")


@pytest.mark.parametrize(
    "command", ["inspect", "patch", "check", "profile", "export", "eval --images ."]
)
@pytest.mark.parametrize("text", ["swintiny", "missing/model.safetensors"])
def test_answered_without_heavy_imports(command: str, text: str) -> None:
    """inspect took 10 s for a misspelt name and 3.6 s for a missing file."""
    done = subprocess.run(
        [sys.executable, "-c", WATCH.format(arguments=[*command.split(), text])],
        capture_output=True, text=True, timeout=60, check=False, env=environment(),
    )  # fmt: skip
    line, modules = done.stderr.splitlines()[0], json.loads(done.stderr.splitlines()[-1])
    assert done.returncode == 4 and line.startswith("error: no ") and text in line
    assert not [name for name in modules if name.split(".")[0] in HEAVY]


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
        ("vitb32", "torchvision:vit_b_32"),
        ("open_clip:ViT-B-33", "open_clip:ViT-B-32"),
        ("timm:vit_bse_patch16_224", "vit_base_patch16_224"),
    ],
)
def test_close_names(text: str, first: str) -> None:
    with pytest.raises(names.ModelNameError) as caught:
        names.check(text)
    line = str(caught.value)
    assert f"'{text}'" in line and first in line.split("close names: ")[1].split(", ")[:2]


def test_what_is_right_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every name that the libraries know, aliases, tags, hub ids and whatever exists."""
    import timm
    import torchvision

    for name in [*timm.list_models()[::7], "test_vit"]:
        names.check(name)
    for name in torchvision.models.list_models(module=torchvision.models):
        names.check(f"torchvision:{name}")
    for text in (
        *("swin_tiny", "vit_base_patch16_224.mae", "vit_tiny_patch16_224_in21k", "timm:test_vit"),
        *("open_clip:ViT-B/32", "open_clip:ViT-B-32/openai", "open_clip:hf-hub:a/b", "hf-hub:a/b"),
        *("timm/vit_base_patch16_224.mae", "some/repository", "tensorflow:vit", ""),
    ):
        names.check(text)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "model.pth").touch()
    for text in ("mine", "./mine", "model.pth", str(tmp_path)):
        names.check(text)


def test_every_registered_name_is_found() -> None:
    import open_clip
    import timm

    from elsa_cli import completion

    assert set(timm.list_models()) <= completion.known("timm")
    assert set(open_clip.list_models()) <= completion.known("open_clip")
