"""`load`: names, sizes, files and architectures; what cannot be is one clear error."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from sampling import some
from torch import nn
from torch.overrides import TorchFunctionMode

from elsa_core.errors import ArgumentError, ModelError, UnavailableError
from elsa_core.loading import hub
from elsa_core.loading.configuration import from_config
from elsa_core.loading.libraries import build
from elsa_core.loading.loader import Loaded, load, load_model
from elsa_core.loading.recipe import Preprocess, Recipe


def write(
    state: dict[str, torch.Tensor] | nn.Module, path: Path, metadata: dict[str, str] | None = None
) -> Path:
    given = state.state_dict() if isinstance(state, nn.Module) else state
    save_file({name: tensor.contiguous() for name, tensor in given.items()}, path, metadata)
    return path


def tiny(name: str = "test_vit", seed: int = 3, **args: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: nn.Module = timm.create_model(name, **args).eval()
    return model


@torch.no_grad()
def agree(loaded: Loaded, model: nn.Module) -> bool:
    inputs = loaded.example_inputs(2)
    return torch.equal(loaded.model(*inputs), model(*inputs))


# --- names -------------------------------------------------------------------------------------


def test_random_weights_come_from_the_seed_alone() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    one, two, three = (load_model("test_vit", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert one.weights == "random (seed 1)" and not one.model.training
    assert agree(one, two.model) and not agree(one, three.model)
    assert (one.name, one.input_size, one.num_classes) == ("test_vit", (3, 160, 160), 1000)
    assert one.preprocess.mean == (0.5, 0.5, 0.5) and one.preprocess.interpolation == "bicubic"


class Dirty(TorchFunctionMode):
    """Memory that was used before: what `torch.empty` returns is NaN."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") == "empty" and out.is_floating_point():
            out.fill_(torch.nan)
        return out


def test_no_weight_of_a_coca_is_left_as_the_memory_was_found() -> None:
    text = {"context_length": 8, "vocab_size": 20, "width": 64, "heads": 2, "layers": 1}
    vision = {"image_size": 32, "patch_size": 8, "layers": 1, "width": 64, "head_width": 32}
    pooled = {"attentional_pool": True, "attn_pooler_heads": 2, "output_tokens": True}
    cfg = {
        "embed_dim": 64,
        "custom_text": True,
        "multimodal_cfg": text,
        "text_cfg": text | {"embed_cls": True, "output_tokens": True},
        "vision_cfg": vision | pooled,
    }
    recipe = Recipe("open_clip", "coca", {}, 0, Preprocess((3, 32, 32)), None, cfg)
    with Dirty():
        model = build(recipe)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_dtype_alias_note_and_plain_load() -> None:
    model = load("test_vit", dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    loaded = load_model("vit_tiny", image_size=32)
    assert loaded.notes == (f"vit_tiny is short for {loaded.name}",)


def test_example_inputs_are_repeatable_and_fit() -> None:
    loaded = load_model("test_vit", image_size=64, dtype=torch.float64)
    (images,) = loaded.example_inputs(3, seed=5)
    assert images.shape == (3, 3, 64, 64) and images.dtype == torch.float64
    assert torch.equal(images, loaded.example_inputs(3, seed=5)[0])
    assert not torch.equal(images, loaded.example_inputs(3, seed=6)[0])


@pytest.fixture(scope="module")
def clip() -> Loaded:
    return load_model("open_clip:ViT-S-32-alt", image_size=64)


def test_open_clip_is_both_towers(clip: Loaded) -> None:
    images, text = clip.example_inputs(2)
    assert images.shape == (2, 3, 64, 64) and text.dtype == torch.int64
    with torch.no_grad():
        image_features, text_features, _ = clip.model(images, text)
    assert image_features.shape == text_features.shape
    assert clip.num_classes == 0 and clip.input_size == (3, 64, 64)


def test_open_clip_around_a_timm_tower_takes_another_size(tmp_path: Path) -> None:
    """open_clip does not pass the image size on to the tower that it takes from timm."""
    text = {"context_length": 8, "vocab_size": 64, "width": 32, "heads": 2, "layers": 1}
    vision = {"timm_model_name": "test_vit", "timm_pool": "token", "image_size": 64}
    config = {"model_cfg": {"embed_dim": 16, "vision_cfg": vision, "text_cfg": text}}
    recipe = from_config(config, "config")
    model = build(recipe)
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    write(model, tmp_path / "open_clip_model.safetensors")
    for size in (None, 96):
        loaded = load_model(tmp_path, image_size=size)
        images, tokens = loaded.example_inputs(2)
        with torch.no_grad():
            assert loaded.model(images, tokens)[0].shape == (2, 16)
        assert images.shape[-1] == (size or 64) and tokens.shape == (2, 8)


# --- arguments ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [
        ("test_vit", 0, "whole numbers from 1 to 16384, not 0"),
        ("test_vit", -5, "from 1 to 16384, not -5"),
        ("test_vit", 10**9, "from 1 to 16384"),
        ("test_vit", (64, 64, 64), "one or two"),
        ("test_vit", True, "one or two"),
        ("test_vit", 100, "patch size 16 of test_vit; nearest valid: 96 or 112"),
        ("test_vit", 15, "nearest valid: 16"),
        ("swin_tiny", 225, "nearest valid: 224 or 228"),
        ("maxvit_nano_rw_256", 300, "nearest valid: 288 or 320"),
        ("vit_giant_patch14_224", 16380, "GiB"),
    ],
)
def test_image_sizes_that_cannot_be(name: str, size: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match="--img-size") as caught:
        load(name, image_size=size)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["test_vit", "test_resnet", "vit_tiny_patch16_224"])
def test_image_sizes_that_can(name: str) -> None:
    loaded = load_model(name, image_size=(64, 96))
    assert loaded.input_size == (3, 64, 96)
    with torch.no_grad():
        loaded.model(*loaded.example_inputs(1))


def test_devices_and_dtypes_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnavailableError, match="cuda is not available"):
        load("test_vit", device="cuda")
    for device in ("hpu", "vulkan"):  # each was another error of PyTorch's, after the build
        with pytest.raises(UnavailableError, match=f"{device} is not available here"):
            load("test_vit", device=device)
    for device in ("nonsense", "meta"):
        with pytest.raises(ArgumentError, match="--device"):
            load("test_vit", device=device)
    with pytest.raises(ArgumentError, match="dtype"):
        load("test_vit", dtype=torch.int8)
    with pytest.raises(ArgumentError, match="--arch"):
        load("test_vit", arch="test_vit")


# --- published weights -------------------------------------------------------------------------


@pytest.fixture
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # where nothing listens


@pytest.mark.usefixtures("no_cache")
@pytest.mark.parametrize(
    "spec", ["test_vit", "open_clip:ViT-B-32/laion2b_s34b_b79k", "hf-hub:some/model"]
)
def test_offline_fails_in_seconds_and_says_how_to_go_on(spec: str) -> None:
    start = time.monotonic()
    with pytest.raises(UnavailableError, match=r"not in the cache.*HF_HOME.*\.safetensors"):
        load(spec, pretrained=True)
    assert time.monotonic() - start < 30


@pytest.mark.parametrize(
    ("variable", "proxy", "words"),
    [
        ("all_proxy", "http://127.0.0.1:9", r"127\.0\.0\.1 cannot be reached"),
        ("https_proxy", "http://user:secret@127.0.0.1:port", "its proxy has no address"),
        ("https_proxy", "http://[::1", "its proxy has no address"),
    ],
)
def test_the_proxy_is_tried_and_named(
    no_cache: None, monkeypatch: pytest.MonkeyPatch, variable: str, proxy: str, words: str
) -> None:
    """One without an address was an internal error."""
    monkeypatch.delenv("https_proxy")
    monkeypatch.setenv(variable, proxy)
    with pytest.raises(UnavailableError, match=words) as caught:
        load("test_vit", pretrained=True)
    assert "secret" not in str(caught.value)


def test_hub_offline_is_obeyed(no_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UnavailableError, match="HF_HUB_OFFLINE is set"):
        load("test_vit", pretrained=True)


def test_an_unreachable_host_is_noticed_in_seconds() -> None:
    start = time.monotonic()
    with pytest.raises(UnavailableError, match="cannot be reached"):
        hub.require_network("https://host.invalid", need="the weights")
    assert time.monotonic() - start < 30


def test_no_published_weights_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="no weights are published"):
        load("vit_base_patch16_gap_224", pretrained=True)
    with pytest.raises(ModelError, match="open_clip:ViT-B-32/"):
        load("open_clip:ViT-B-32", pretrained=True)
    with pytest.raises(ModelError, match="ViT-B-32-quickgelu/openai"):
        load("open_clip:ViT-B-32/openai", pretrained=True)


def test_cached_weights_are_used_and_resized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the file in the cache no network is needed, at the usual size or at another."""
    model = tiny()
    path = write(model, tmp_path / "model.safetensors")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *args, **kwargs: str(path))
    loaded = load_model("test_vit", pretrained=True)
    assert agree(loaded, model) and loaded.weights == "pretrained (timm/test_vit.r160_in1k)"
    other = load_model("test_vit", pretrained=True, image_size=96)
    given = {"pretrained": True, "pretrained_cfg_overlay": {"file": str(path)}}
    assert agree(other, timm.create_model("test_vit", img_size=96, **given).eval())


def test_a_hub_repository_with_a_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(num_classes=7)
    config = {"architecture": "test_vit", "num_classes": 7, "pretrained_cfg": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write(model, tmp_path / "model.safetensors")

    def cached(repository: str, name: str, **options: Any) -> str:
        if not (tmp_path / name).is_file():
            raise FileNotFoundError(name)
        return str(tmp_path / name)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", cached)
    assert agree(load_model("hf-hub:some/model", pretrained=True), model)
    assert load_model("hf-hub:some/model").weights == "random (seed 0)"


# --- files -------------------------------------------------------------------------------------


RECOGNISED: list[tuple[str, dict[str, Any]]] = [
    ("test_vit", {}),
    ("test_vit", {"num_classes": 7, "img_size": 64}),
    ("test_vit", {"num_classes": 0, "in_chans": 1}),
    ("test_vit2", {"global_pool": "avg"}),
    ("vit_tiny_patch16_224", {"img_size": 64, "num_classes": 5}),
    ("eva02_tiny_patch14_224", {"img_size": 56}),
    ("vit_small_patch16_dinov3", {}),
    ("vit_small_patch16_rope_mixed_224", {}),
    ("beit_base_patch16_224", {"img_size": 64}),
    ("swin_tiny_patch4_window7_224", {"num_classes": 3}),
]


@pytest.mark.parametrize(("name", "args"), some(RECOGNISED))
def test_recognised_from_names_and_shapes(name: str, args: dict[str, Any], tmp_path: Path) -> None:
    model = tiny(name, **args)
    loaded = load_model(write(model, tmp_path / "model.safetensors"))
    assert agree(loaded, model)
    assert loaded.num_classes == args.get("num_classes", model.num_classes)
    assert "recognised" in loaded.notes[0]


def test_recognition_of_open_clip_and_torchvision(tmp_path: Path, clip: Loaded) -> None:
    path = write(clip.model, tmp_path / "clip.safetensors")
    again = load_model(path)
    assert again.recipe.library == "open_clip" and again.input_size == (3, 64, 64)
    torchvision = pytest.importorskip("torchvision")
    model = torchvision.models.swin_t(num_classes=4).eval()
    assert agree(load_model(write(model, tmp_path / "swin.safetensors")), model)


def test_ambiguity_lists_the_candidates(tmp_path: Path) -> None:
    """QuickGELU and GELU have the same tensors and compute differently."""
    model = tiny("vit_base_patch16_clip_quickgelu_224", img_size=32)
    path = write(model, tmp_path / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        load(path)
    message = str(caught.value)
    assert "vit_base_patch16_clip_224" in message and "--arch" in message
    assert "vit_base_patch16_clip_quickgelu_224" in message
    loaded = load_model(path, arch="vit_base_patch16_clip_quickgelu_224")
    assert agree(loaded, model)


def test_unknown_architecture_says_how_to_name_it(tmp_path: Path) -> None:
    path = write(nn.Linear(3, 4), tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"no known architecture.*--arch.*config\.json"):
        load(path)
    with pytest.raises(ModelError, match=r"does not fit test_vit: .* missing"):
        load(path, arch="test_vit")
    with pytest.raises(ArgumentError, match="must name an architecture"):
        load(path, arch=str(path))


def test_metadata_and_config_beside_the_file(tmp_path: Path) -> None:
    model = tiny("test_resnet", num_classes=6)
    path = write(model, tmp_path / "model.safetensors", {"architecture": "test_resnet"})
    loaded = load_model(path)
    assert agree(loaded, model) and "metadata" in loaded.notes[0]
    path = write(model, tmp_path / "model.safetensors")
    config = {"architecture": "test_resnet", "num_classes": 6}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert agree(load_model(path), model) and agree(load_model(tmp_path), model)


def test_image_size_of_a_file_is_resized_as_timm_does(tmp_path: Path) -> None:
    path = write(tiny(num_classes=5), tmp_path / "model.safetensors")
    cfg = {"file": str(path), "num_classes": 5, "input_size": (3, 160, 160)}
    given = {"pretrained": True, "num_classes": 5, "pretrained_cfg": cfg}
    expected = timm.create_model("test_vit", img_size=96, **given)
    loaded = load_model(path, image_size=96)
    assert loaded.input_size == (3, 96, 96) and agree(loaded, expected.eval())


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.int8])
def test_whole_numbers_are_no_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    state = tiny().state_dict()
    state["blocks.0.attn.qkv.weight"] = state["blocks.0.attn.qkv.weight"].to(dtype)
    save_file(state, tmp_path / "model.safetensors")
    for size in (None, 96):
        with pytest.raises(ModelError, match=r"qkv\.weight' is .*quantised weights"):
            load(tmp_path / "model.safetensors", arch="test_vit", image_size=size)


def with_args(**args: Any) -> dict[str, Any]:
    return {"architecture": "test_vit", "model_args": args}


def with_cfg(**cfg: Any) -> dict[str, Any]:
    return {"architecture": "test_vit", "pretrained_cfg": cfg}


def with_towers(vision: Any = None, **more: Any) -> dict[str, Any]:
    return {"model_cfg": {"vision_cfg": vision or {}, "text_cfg": {}}, **more}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("[]", "not a JSON object"),
        ("{", "not JSON"),
        ('{"architecture": "test_vit", "architecture": "x"}', "occurs twice"),
        ({"model_type": "vit"}, "has no model 'vit'"),
        ({"architecture": 3}, "names no architecture"),
        ({"architecture": "no_such_model"}, "no model 'no_such_model'"),
        ({"architecture": "../test_vit"}, "names an architecture '../test_vit'"),
        ({"architecture": "a..b"}, "names an architecture"),
        ({"architecture": "local-dir:/etc"}, "names an architecture"),
        ({"architecture": "test_vit", "num_classes": -1}, "num_classes"),
        ({"architecture": "test_vit", "num_classes": 4}, "does not fit"),
        ({"architecture": "test_vit", "elsa": {"library": "keras"}}, "keras"),
        (with_args(depth=9), "does not fit"),
        (with_args(embed_dim=90000000), "fit|build"),
        (with_args(nonsense=1), "nonsense"),
        (with_args(checkpoint_path="x"), "must not set"),
        (with_args(depth={"a": 1}), "plain value"),
        (with_args(img_size=65536), "img_size must"),
        (with_args(depth=100000), "limit of 1000 blocks"),
        (with_args(depths=[2, 100000]), "limit of 1000 blocks"),
        (with_cfg(input_size=[3, -1, 8]), "input_size"),
        (with_cfg(input_size=[3, 65536, 65536]), "input_size must"),
        (with_cfg(mean=[float("nan")]), "mean"),
        (with_cfg(mean=[0.5, 0.5]), "mean must be 3 numbers"),
        (with_cfg(mean=[0.5, 0.5, float("inf")]), "mean must be numbers"),
        (with_cfg(std=[0, 1, 1]), "std must be numbers"),
        (with_cfg(std=[1e-300, 1, 1]), "std must be numbers"),
        (with_cfg(std="123"), "std must be 3 numbers"),
        (with_cfg(std=[10**400, 1, 1]), "std must be numbers"),
        (with_cfg(crop_pct=0.0001), "crop_pct must"),
        (with_cfg(crop_pct=1000), "crop_pct must"),
        (with_cfg(crop_pct=float("nan")), "crop_pct must"),
        (with_cfg(interpolation="best"), "interpolation must be one of"),
        (with_cfg(interpolation=["best"]), "interpolation must be one of"),
        ({"model_cfg": {"vision_cfg": 1}}, "vision_cfg"),
        (with_towers({"layers": 100000}), "limit of 1000 blocks"),
        (with_towers({"image_size": 65536}), "input_size must"),
        (with_towers(architecture="../evil"), "names an architecture '../evil'"),
        (with_towers({"timm_model_name": "hf-hub:a/b"}), "names an architecture 'hf-hub:a/b'"),
    ],
)
def test_hostile_configurations(config: Any, words: str, tmp_path: Path) -> None:
    write(tiny(), tmp_path / "model.safetensors")
    text = config if isinstance(config, str) else json.dumps(config)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError) as caught:
        load(tmp_path)
    message = str(caught.value)
    assert any(word in message for word in words.split("|")) and "\n" not in message, message


def test_channels_and_crops_that_timm_has() -> None:
    """One number serves every channel, other channels have the average, VOLO crops beyond 1."""
    cfg = {"input_size": [1, 8, 8], "mean": [0.25], "std": [0.5], "crop_pct": 1.15}
    given = from_config({"architecture": "x", "pretrained_cfg": cfg}, "config").preprocess
    assert (given.mean, given.std, given.crop_pct) == ((0.25,), (0.5,), 1.15)
    bare = {"architecture": "x", "pretrained_cfg": cfg | {"mean": None}}
    given = from_config(bare, "config").preprocess
    assert given.mean == pytest.approx((sum(Preprocess().mean) / 3,))
    wide = Preprocess(mean=(0.1, 0.2, 0.3)).with_channels(2)
    assert wide.input_size == (2, 224, 224) and wide.mean == pytest.approx((0.2, 0.2))


def test_directories_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architecture": "test_vit"}')
    with pytest.raises(ModelError, match="no weights file"):
        load(tmp_path)
    for name in ("a", "b"):
        write(tiny(), tmp_path / f"{name}.safetensors")
    with pytest.raises(ModelError, match="several"):
        load(tmp_path)
