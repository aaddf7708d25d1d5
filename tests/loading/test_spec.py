"""Names, aliases and paths as a user types them; each mistake is one line."""

from pathlib import Path

import pytest
import timm
from processes import python

from elsa_core.errors import ModelError
from elsa_core.loading import timm_models
from elsa_core.loading.spec import parse


@pytest.mark.parametrize(
    ("text", "source", "name", "tag"),
    [
        ("vit_base_patch16_224", "timm", "vit_base_patch16_224", None),
        ("timm:deit3_small_patch16_224", "timm", "deit3_small_patch16_224", None),
        ("vit_base_patch16_224.augreg_in21k", *("timm", "vit_base_patch16_224", "augreg_in21k")),
        ("timm/vit_base_patch16_224.mae", "timm", "vit_base_patch16_224", "mae"),
        ("hf-hub:timm/vit_base_patch16_224.mae", "timm", "vit_base_patch16_224", "mae"),
        ("hf-hub:someone/model@v1", "hub", "someone/model@v1", None),
        ("open_clip:ViT-B-32", "open_clip", "ViT-B-32", None),
        ("open_clip:ViT-B/32", "open_clip", "ViT-B-32", None),
        ("open_clip:ViT-B-32/laion2b_s34b_b79k", "open_clip", "ViT-B-32", "laion2b_s34b_b79k"),
        ("open_clip:hf-hub:someone/clip", "hub", "someone/clip", None),
    ],
)
def test_names(text: str, source: str, name: str, tag: str | None) -> None:
    spec = parse(text)
    assert (spec.source, spec.name, spec.tag, spec.given) == (source, name, tag, text)
    assert spec.alias is None and spec.path is None


def test_torchvision_name() -> None:
    pytest.importorskip("torchvision")
    assert parse("torchvision:vit_b_16").source == "torchvision"
    with pytest.raises(ModelError, match="torchvision:vit_b_16"):
        parse("torchvision:vit_b_61")


def test_alias_is_the_shortest_name_and_is_shown() -> None:
    spec = parse("swin_tiny")
    assert spec.name == "swin_tiny_patch4_window7_224"
    assert spec.alias == "swin_tiny is short for swin_tiny_patch4_window7_224"
    assert parse("swin_tiny.ms_in1k").tag == "ms_in1k"


def test_an_alias_ends_at_an_underscore() -> None:
    """`vit_base_patch16_22` is a typing error, not short for vit_base_patch16_224."""
    with pytest.raises(ModelError, match="vit_base_patch16_224"):
        parse("vit_base_patch16_22")


def test_a_bundle_that_is_no_model(tmp_path: Path) -> None:
    """One tower of a CLIP: no library builds it from a configuration."""
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(ModelError, match=r"a bundle of one tower .* which its load\.py runs"):
        parse(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("vit_bse_patch16_224", ["vit_bse_patch16_224", "close names", "vit_base_patch16_224"]),
        ("ViT-B-32", ["did you mean open_clip:ViT-B-32"]),
        ("qqqq", ["qqqq", "timm"]),
        ("open_clip:ViT-B-33", ["open_clip:ViT-B-32"]),
        ("open_clip:ViT-B-32/nonsense", ["nonsense", "openai"]),
        ("vit_base_patch16_224.nonsense", ["nonsense", "mae"]),
        ("", ["empty"]),
        ("timm:", ["after the colon"]),
        ("tensorflow:vit", ["tensorflow", "timm:"]),
        ("some/repository", ["no such file", "hf-hub:some/repository"]),
        ("hf-hub:nonsense", ["OWNER/NAME"]),
        ("missing/model.safetensors", ["no such file or directory: missing/model.safetensors"]),
        ("/dev/null", ["neither a regular file nor a directory"]),
        ("a\0b/c", ["cannot be used as a path"]),
    ],
)
def test_mistakes_are_one_line(text: str, words: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        parse(text)
    message = str(caught.value)
    assert "\n" not in message
    assert all(any(part in message for part in word.split("|")) for word in words), message


def test_paths(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.touch()
    assert parse(str(weights)).source == "safetensors" and parse(weights).path == weights
    pickle = tmp_path / "model.pth"
    pickle.touch()
    assert parse(str(pickle)).source == "checkpoint"
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        parse(str(tmp_path))
    (tmp_path / "config.json").touch()
    assert parse(str(tmp_path)).source == "directory"
    notes = tmp_path / "notes.txt"
    notes.write_text("hello")
    with pytest.raises(ModelError, match=r"notes\.txt is not a model file"):
        parse(str(notes))


def test_a_model_name_wins_over_a_directory_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("test_vit", "mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").touch()
    assert parse("test_vit").source == "timm" and parse("./test_vit").source == "directory"
    assert parse("mine").source == "directory"


def test_a_path_needs_no_library(tmp_path: Path) -> None:
    """timm takes seconds to import; a file's name must not cost that. A model's name needs it."""
    path = tmp_path / "model.safetensors"
    path.touch()
    code = (
        "import sys; sys.modules['timm'] = sys.modules['open_clip'] = None\n"
        "from elsa_core.loading.spec import parse\n"
        "from elsa_core.errors import UnavailableError\n"
        f"print(parse({str(path)!r}).source)\n"
        "try:\n    parse('vit_base_patch16_224')\n"
        "except UnavailableError as error:\n    print(error)"
    )
    done = python("-c", code)
    first, *rest = done.stdout.splitlines()
    assert first == "safetensors" and "pip install timm" in rest[0], done.stderr


SWINS = ("tiny", "small", "base", "large")


@pytest.mark.parametrize(
    ("short", "full"),
    [
        *timm_models.PLAIN.items(),
        ("vit_tiny", "vit_tiny_patch16_224"),
        ("vit_huge", "vit_huge_patch14_224"),
        *((f"swin_{size}", f"swin_{size}_patch4_window7_224") for size in SWINS),
        *((f"deit_{size}", f"deit_{size}_patch16_224") for size in ("tiny", "small", "base")),
        ("beit_base", "beit_base_patch16_224"),
    ],
)
def test_short_names_are_the_plain_models(short: str, full: str) -> None:
    assert timm.is_model(full)
    assert parse(short).name == full and "is short for" in (parse(short).alias or "")
