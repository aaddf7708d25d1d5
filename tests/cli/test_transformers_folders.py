"""Folders of transformers' `save_pretrained` as MODEL, through every command."""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from sampling import taken

import elsa_core
from elsa_core.base.images import reader
from elsa_core.loading import load_model

from .conftest import Elsa

transformers = pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")

_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_MLP = {"intermediate_size": 64}
_IMAGES = {"image_size": 32, "patch_size": 8}
_LABELS = {"id2label": {0: "cat", 1: "dog", 2: "red fox"}}
_WHOLE = {"size": {"height": 32, "width": 32}}
_CROP = {"size": {"shortest_edge": 36}, "crop_size": {"height": 32, "width": 32}}
_RANGE = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}


def _sam() -> Any:
    vision = transformers.SamVisionConfig(
        **_SMALL, mlp_dim=64, image_size=64, patch_size=8, output_channels=16, window_size=4,
        global_attn_indexes=[1], num_pos_feats=8,
    )  # fmt: skip
    prompt = transformers.SamPromptEncoderConfig(
        hidden_size=16, image_size=64, patch_size=8, mask_input_channels=4
    )
    masks = transformers.SamMaskDecoderConfig(
        hidden_size=16, mlp_dim=32, num_hidden_layers=2, num_attention_heads=2,
        iou_head_hidden_dim=16,
    )  # fmt: skip
    return transformers.SamConfig(
        vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=masks
    )


Made = tuple[str, Callable[[], Any], str, dict[str, Any]]
# class, configuration, processor and its settings
MODELS: dict[str, Made] = {
    "vit": ("ViTForImageClassification",
            lambda: transformers.ViTConfig(**_SMALL, **_MLP, **_IMAGES, **_LABELS),
            "ViTImageProcessor", {**_WHOLE, **_RANGE, "resample": 3}),
    "deit": ("DeiTForImageClassification",
             lambda: transformers.DeiTConfig(**_SMALL, **_MLP, **_IMAGES, **_LABELS),
             "DeiTImageProcessor",
             {"size": {"height": 36, "width": 36}, "crop_size": {"height": 32, "width": 32}}),
    "dinov2": ("Dinov2Model", lambda: transformers.Dinov2Config(**_SMALL, **_IMAGES, mlp_ratio=2),
               "BitImageProcessor", _CROP),
    "dinov3": ("DINOv3ViTModel",
               lambda: transformers.DINOv3ViTConfig(**_SMALL, **_MLP, **_IMAGES), "", {}),
    "siglip": ("SiglipVisionModel",
               lambda: transformers.SiglipVisionConfig(**_SMALL, **_MLP, **_IMAGES),
               "SiglipImageProcessor", {**_WHOLE, "rescale_factor": 1 / 127.5}),
    "clip": ("CLIPVisionModel", lambda: transformers.CLIPVisionConfig(**_SMALL, **_MLP, **_IMAGES),
             "CLIPImageProcessor", {**_CROP, "do_normalize": False}),
    "beit": ("BeitForImageClassification",
             lambda: transformers.BeitConfig(**_SMALL, **_MLP, **_IMAGES, **_LABELS),
             "BeitImageProcessor", {**_WHOLE, "do_center_crop": False}),
    "swin": ("SwinForImageClassification",
             lambda: transformers.SwinConfig(image_size=32, patch_size=4, embed_dim=16, **_LABELS,
                                             depths=[2, 2], num_heads=[2, 2], window_size=4),
             "ViTImageProcessor", _WHOLE),
    "sam": ("SamModel", _sam, "SamImageProcessor",
            {"size": {"longest_edge": 64}, "pad_size": {"height": 64, "width": 64}}),
}  # fmt: skip
# Each format once: an export takes seconds.
FORMATS = {"vit": "pt2", "sam": "onnx"}


def saved(name: str, folder: Path) -> Path:
    """A folder of a small random model and its processor."""
    cls, config, processor, given = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        getattr(transformers, cls)(config()).eval().save_pretrained(folder / name)
    if processor:
        getattr(transformers, processor)(**given).save_pretrained(folder / name)
    return folder / name


# Each takes 10 to 40 s: a run takes one or two of them, the one at night all.
@pytest.mark.long
@pytest.mark.parametrize("name", [name for i, name in enumerate(MODELS) if taken(i, one_in=6)])
def test_a_folder_goes_through_every_command(name: str, tmp_path: Path, elsa: Elsa) -> None:
    folder = saved(name, tmp_path)
    cls, _, processor, _ = MODELS[name]
    result = elsa("inspect", folder, "--json")
    sites = json.loads(result.out)["results"]["inspection"]["sites"]
    assert result.code == 0 and len(sites) >= 2 and all(site["patchable"] for site in sites)
    found = elsa("patch", folder, "--check", "-o", "saved", "--json").document()["results"]
    assert len(found["patch"]["patched"]) == len(sites) and found["check"]["ok"]
    result = elsa("profile", folder, "--rounds", 3, "--budget", 0.1, "--no-sites", "--json")
    (row,) = result.document()["results"]["points"]
    assert row["profile"]["patched"] == len(sites)
    result = elsa("export", "saved", "--formats", FORMATS.get(name, "torchscript"), "-o", "bundle",
                  "--batches", "1,2", "--json")  # fmt: skip
    manifest = result.document()["results"]["manifest"]
    labelled = cls.endswith("ForImageClassification")
    assert (manifest["outputs"][0]["name"] == "logits") is labelled
    assert (manifest["labels"] is not None) is labelled
    assert bool(manifest["preprocess"]["assumed"]) is not bool(processor)


def agree(name: str, folder: Path, size: tuple[int, int]) -> None:
    loaded = load_model(folder)
    noise = np.random.default_rng(0).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    picture = Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC)
    picture.save(folder.parent / "image.png")
    read = reader(**loaded.preprocess.transform)
    ours = torch.as_tensor(read(folder.parent / "image.png"))
    processor = getattr(transformers, MODELS[name][2]).from_pretrained(folder)
    theirs = processor(picture, return_tensors="pt")["pixel_values"][0]
    # PyTorch resizes bytes, Pillow too, and each rounds: a level of 255 here and there.
    assert (ours - theirs).abs().max() < 2.5 / 255 / min(loaded.preprocess.std), name


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("dinov3", "sam")])
def test_the_processor_gives_the_preprocessing(name: str, tmp_path: Path) -> None:
    agree(name, saved(name, tmp_path), (64, 48))


def test_what_a_bundle_cannot_do_is_said(tmp_path: Path) -> None:
    folder = saved("sam", tmp_path)
    assert "pads images at the right" in load_model(folder).warnings[0]
    agree("sam", folder, (48, 48))


def test_a_clip_gives_its_image_tower(tmp_path: Path) -> None:
    text = transformers.CLIPTextConfig(**_SMALL, **_MLP, vocab_size=50)
    vision = transformers.CLIPVisionConfig(**_SMALL, **_MLP, **_IMAGES, projection_dim=8)
    config = transformers.CLIPConfig(
        text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=8
    )
    clip = transformers.CLIPModel(config).eval()
    clip.save_pretrained(tmp_path / "clip")
    loaded = load_model(tmp_path / "clip")
    assert loaded.notes == ("CLIPVisionModelWithProjection, the image tower of CLIPModel",)
    images = loaded.example_inputs(2)[0]
    with torch.no_grad():
        ours, theirs = loaded.model(images).image_embeds, clip.get_image_features(images)
    assert torch.equal(ours, getattr(theirs, "pooler_output", theirs))


def test_what_does_not_fit_is_one_line(tmp_path: Path, elsa: Elsa) -> None:
    folder = saved("vit", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    text = transformers.BertConfig(**_SMALL, **_MLP, vocab_size=50)
    for change, words in (
        ({"hidden_size": 64}, "of another shape"),
        ({"num_hidden_layers": 3}, "missing"),
        ({"num_hidden_layers": 1}, "unexpected"),
        ({"num_hidden_layers": 10**9}, "beyond the limit"),
        ({"hidden_size": 2**18}, "numbers and its file"),
        ({"architectures": ["NoSuchModel"]}, "has no model 'NoSuchModel'"),
        ({"architectures": ["AutoModel"]}, "has no model 'AutoModel'"),
        (text.to_dict() | {"architectures": ["BertModel"]}, "takes input_ids, not images"),
    ):
        (folder / "config.json").write_text(json.dumps(config | change))
        elsa("inspect", folder).fails(4, words)
    elsa("inspect", folder / "model.safetensors").fails(4, "give its folder")
    elsa("inspect", folder, "--arch", "vit_base_patch16_224").fails(2, "transformers describes")


def test_python_takes_the_folder_too(tmp_path: Path) -> None:
    folder = saved("swin", tmp_path)
    model = elsa_core.load(folder)
    example = torch.randn(2, 3, 32, 32)
    assert type(model).__name__ == "SwinForImageClassification"
    assert len(elsa_core.patch(model, example).patched) == 4
    assert elsa_core.check(model, example).ok
    with pytest.warns(UserWarning, match="does not say its preprocessing"):
        elsa_core.load(saved("dinov3", tmp_path))


def test_a_repository_of_the_hub(
    tmp_path: Path, elsa: Elsa, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the hub's cache, as transformers itself would leave it there."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    place = tmp_path / "cache" / "models--some--vit"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("a" * 40)
    (place / "snapshots").mkdir()
    saved("vit", tmp_path).rename(place / "snapshots" / ("a" * 40))
    loaded = load_model("hf-hub:some/vit", pretrained=True)
    assert loaded.weights == "pretrained (some/vit)" and loaded.preprocess.mean == (0.1, 0.2, 0.3)
    elsa("inspect", "hf-hub:some/vit").fails(2, "add --pretrained to fetch its weights")
    wider = ("--pretrained", "--model-kwargs", "hidden_size=64")
    elsa("inspect", "hf-hub:some/vit", *wider).fails(2, "model_kwargs are not for hf-hub:some/vit")


def test_weights_of_a_later_revision_than_the_configuration_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their folder was not the one that was opened: no weights were found in it."""
    later, folder = saved("vit", tmp_path), tmp_path / "earlier"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "vit"}')

    def hub(repository: str, name: str, local_files_only: bool, **options: Any) -> str:
        nonlocal folder
        folder = folder if local_files_only else later
        if not (folder / name).is_file():
            raise FileNotFoundError(name)
        return str(folder / name)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", hub)
    monkeypatch.setattr("socket.create_connection", lambda *given, **options: socket.socket())
    loaded = load_model("hf-hub:some/vit", pretrained=True)
    assert loaded.recipe.labels == ("cat", "dog", "red fox")


def test_eval_takes_the_logits(tmp_path: Path, elsa: Elsa) -> None:
    folder = saved("vit", tmp_path)
    for index, name in enumerate(("cat", "dog", "red fox")):
        (tmp_path / "images" / name).mkdir(parents=True)
        Image.new("RGB", (40, 40), (90 * index,) * 3).save(tmp_path / "images" / name / "1.png")
    result = elsa("eval", folder, "--images", tmp_path / "images", "--json")
    assert result.document()["results"]["evaluation"]["labelled"] == 3
