"""The model is the one that the file's tensors were made for, and holds every one of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from test_load import agree, write
from torch import nn

from elsa_core.errors import ArgumentError, ModelError
from elsa_core.loading.configuration import from_config
from elsa_core.loading.fit import changed
from elsa_core.loading.libraries import build
from elsa_core.loading.loader import load_model
from elsa_core.loading.names import bare_names

SWIN = "swin_tiny_patch4_window7_224"
CUT = {"depth": 2, "num_classes": 3}
SHALLOW = {"depths": (1, 1, 1, 1), "num_classes": 3}


def noisy(model: nn.Module, seed: int = 3) -> nn.Module:
    """Noise in every parameter: unequal heads, windows and tables show."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(0.05 * torch.randn(tensor.shape, generator=generator))
    return model


def made(name: str, seed: int = 3, **args: Any) -> nn.Module:
    return noisy(timm.create_model(name, **args).eval(), seed)


# --- an architecture that no name has ------------------------------------------------------------


def typed(args: dict[str, Any]) -> dict[str, Any]:
    """Arguments as the command line gives them."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in args.items()}


VIT = "vit_tiny_patch16_224"
CASES = [
    (VIT, {"mlp_ratio": 2.0, **CUT}, rf"the closest is {VIT} \("),
    (VIT, CUT, rf"the closest is {VIT} \("),
    ("beit_base_patch16_224", {"num_heads": 6, "img_size": 64, **CUT}, "the closest is beit"),
    (SWIN, {**SHALLOW, "mlp_ratio": 2.0}, rf"the closest is {SWIN} \("),
    # Window 7 was built and the tables of 225 rows resampled to 169: logits off by 0.08.
    (SWIN, {"img_size": 256, "window_size": 8, **SHALLOW}, "the closest is swin_"),
    ("torchvision:vit_b_32", {"num_layers": 1, "mlp_dim": 8}, "the closest is torchvision:vit_b_"),
    ("levit_128s", {"depth": [1] * 3, "num_classes": 3}, ""),
    ("hiera_tiny_224", {"stages": [1] * 4, "num_classes": 3}, ""),
]


@pytest.mark.parametrize(("name", "args", "closest"), CASES, ids=[case[0] for case in CASES])
def test_other_arguments_than_the_names_are_asked_for(
    tmp_path: Path, name: str, args: dict[str, Any], closest: str
) -> None:
    """The closest architecture is named, and what differs from it loads the file."""
    model = noisy(load_model(name, model_kwargs=typed(args)).model)
    path = write(model, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=rf"{closest}.*--model-kwargs") as caught:
        load_model(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(ModelError, match=f"does not fit {name}"):
        load_model(path, arch=name)
    assert agree(load_model(path, arch=name, model_kwargs=typed(args)), model)


# --- arguments that the user gives -------------------------------------------------------------


def test_model_kwargs(tmp_path: Path) -> None:
    """Heads of a plain ViT show nowhere: timm's own flag says them."""
    model = made("test_vit", num_heads=4, img_size=64)
    path = write(model, tmp_path / "model.safetensors")
    loaded = load_model(path, arch="test_vit", model_kwargs={"num_heads": 4})
    assert agree(loaded, model) and not agree(load_model(path, arch="test_vit"), model)
    assert load_model("test_vit", model_kwargs={"img_size": 64}).input_size == (3, 64, 64)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"checkpoint_path": "x"}, "must not set 'checkpoint_path'"),
        ({"depth": 10**6}, "limit of 1000 blocks"),
        ({"img_size": "large"}, "img_size must be"),
        ({"img_size": 64, "image_size": 96}, "img_size and image_size are one size"),
        ({"num_classes": -1}, "num_classes must be"),
        ({"act_layer": object()}, "plain value"),
    ],
)
def test_model_kwargs_that_cannot_be(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match="--model-kwargs") as caught:
        load_model("test_vit", model_kwargs=given)
    assert words in str(caught.value)


def test_another_window_is_resampled_where_it_is_asked_for(tmp_path: Path) -> None:
    model = made(SWIN, img_size=256, window_size=8, **SHALLOW)
    path = write(model, tmp_path / "model.safetensors")
    loaded = load_model(path, arch=SWIN, model_kwargs={"window_size": 7, "depths": [1, 1, 1, 1]})
    assert loaded.input_size == (3, 224, 224)
    assert "resampled as asked" in loaded.notes[-1] and "bias_table" in loaded.notes[-1]


TORCHVISION = {
    "vit_b_16": {
        **{"patch_size": 8, "num_layers": 1, "hidden_dim": 24, "num_heads": 3, "mlp_dim": 32},
        "img_size": 32,
    },
    "swin_t": {"window_size": 4, "depths": [2, 1], "num_heads": [1, 2], "embed_dim": 12},
    "swin_v2_t": {"window_size": [4, 8], "depths": [1, 1], "num_heads": [2, 2], "patch_size": 8},
    "maxvit_t": {"partition_size": 4, "block_layers": [1], "block_channels": [32], "img_size": 32},
}


@pytest.mark.parametrize("name", TORCHVISION)
def test_arguments_that_torchvisions_builders_fix(tmp_path: Path, name: str) -> None:
    """swin_t(window_size=...) itself says: got multiple values for keyword argument."""
    pytest.importorskip("torchvision")
    arch, given = f"torchvision:{name}", TORCHVISION[name]
    named = load_model(arch, model_kwargs={**given, "num_classes": 5})
    assert named.model(*named.example_inputs(2)).shape == (2, 5)
    again = build(from_config(json.loads(json.dumps(named.recipe.to_config())), "config"))
    shapes = [{key: t.shape for key, t in m.state_dict().items()} for m in (named.model, again)]
    assert shapes[0] == shapes[1]
    path = write(noisy(named.model), tmp_path / "model.safetensors")
    loaded = load_model(path, arch=arch, model_kwargs=given)
    assert agree(loaded, named.model) and loaded.recipe.unsaid == {}


def test_torchvisions_windows_and_patches_are_what_was_typed() -> None:
    pytest.importorskip("torchvision")
    swin: Any = load_model("torchvision:swin_t", model_kwargs=TORCHVISION["swin_t"]).model
    windows = [m.window_size for m in swin.modules() if hasattr(m, "window_size")]
    assert windows == [[4, 4]] * 3
    vit: Any = load_model("torchvision:vit_b_16", model_kwargs=TORCHVISION["vit_b_16"]).model
    assert vit.conv_proj.kernel_size == (8, 8) and vit.patch_size == 8
    wrong = {"patch_size": 8, "window_size": 4}
    with pytest.raises(ModelError, match="keyword argument 'window_size'") as caught:
        load_model("torchvision:vit_b_16", model_kwargs=wrong)
    assert "\n" not in str(caught.value)
    with pytest.raises(ModelError, match="resnet18 does not take layers"):
        load_model("torchvision:resnet18", model_kwargs={"layers": [1, 1, 1, 1]})


# --- every tensor, unchanged -------------------------------------------------------------------


def test_tables_that_timm_would_resample_are_named(tmp_path: Path) -> None:
    """A configuration of window 7 beside tables of window 8."""
    model = made(SWIN, window_size=8, img_size=256, **SHALLOW)
    write(model, tmp_path / "model.safetensors")
    config = {"architecture": SWIN, "num_classes": 3, "model_args": {"depths": [1, 1, 1, 1]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"bias_table \(225x3\) would be resampled to 169x3, and"):
        load_model(tmp_path)
    kwargs = {"window_size": 8, "img_size": 256}
    assert agree(load_model(tmp_path, model_kwargs=kwargs), model)


def test_a_grid_that_is_not_square(tmp_path: Path) -> None:
    model = made("test_vit", img_size=(64, 96))
    path = write(model, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"pos_embed.*--model-kwargs"):
        load_model(path, arch="test_vit")
    given = load_model(path, arch="test_vit", model_kwargs={"img_size": [64, 96]})
    assert agree(given, model)


@pytest.mark.parametrize("arch", [None, "test_vit"])
def test_the_size_that_was_typed_is_the_models(tmp_path: Path, arch: str | None) -> None:
    """The size of the tensors was taken in its place, without a word."""
    path = write(made("test_vit"), tmp_path / "model.safetensors")
    loaded = load_model(path, arch=arch, model_kwargs={"img_size": 64})
    assert loaded.input_size == (3, 64, 64) and loaded.notes[-1] == "resampled as asked: pos_embed"
    assert agree(loaded, load_model(path, arch=arch, image_size=64).model)


def test_a_tensor_that_timm_would_drop_is_named(tmp_path: Path) -> None:
    """Old files of ImageNet-21k have a layer before the classifier, which timm leaves out."""
    state = made("test_vit").state_dict()
    path = write(state | {"pre_logits.fc.weight": torch.ones(8, 8)}, tmp_path / "m.safetensors")
    with pytest.raises(ModelError, match=r"pre_logits\.fc\.weight \(8x8\) would be dropped"):
        load_model(path, arch="test_vit")


def test_the_mask_token_of_pretraining_is_not_missed(tmp_path: Path) -> None:
    model = made("vit_small_patch14_dinov2", img_size=28)
    state = model.state_dict() | {"mask_token": torch.zeros(1, 384)}
    path = write(state, tmp_path / "model.safetensors")
    assert agree(load_model(path), model)
    assert load_model(path, image_size=42).notes[-1] == "resampled as asked: pos_embed"


def test_files_that_timm_adds_up(tmp_path: Path) -> None:
    """DINOv2's own files with registers: the class token has a position of its own."""
    name = "vit_small_patch14_reg4_dinov2"
    model = made(name, depth=1, img_size=28)
    state = model.state_dict()
    place = torch.full((1, 1, 384), 0.25)
    state["register_tokens"] = state.pop("reg_token")
    state["pos_embed"] = torch.cat([place, state["pos_embed"]], dim=1)
    state["cls_token"] = state["cls_token"] - place
    state["mask_token"] = torch.zeros(1, 384)
    path = write(state, tmp_path / "model.safetensors")
    loaded = load_model(path, arch=name, model_kwargs={"depth": 1, "img_size": 28})
    with torch.no_grad():
        outputs = [each(*loaded.example_inputs(2)) for each in (loaded.model, model)]
    torch.testing.assert_close(*outputs)


def test_accounts() -> None:
    """Renamed, transposed, reshaped and joined tensors are there; others are not."""
    layer = nn.Linear(4, 6)
    weight, bias = layer.weight.detach(), layer.bias.detach()
    assert changed(layer, {"weight": weight, "bias": bias}) == {}
    assert changed(layer, {"w": weight.t(), "b": bias.view(2, 3)}) == {}
    assert changed(layer, {"q": weight[:2], "kv": weight[2:], "bias": bias}) == {}
    assert changed(layer, {"weight": weight, "bias": bias.double()}) == {}
    assert "would be changed" in changed(layer, {"weight": weight, "bias": bias + 1})["bias"]
    assert "would be dropped" in changed(layer, {"weight": weight, "x": bias + 1})["x"]
    assert "resampled to 6" in changed(layer, {"weight": weight, "bias": torch.ones(9)})["bias"]
    assert changed(layer, {"weight": weight, "bias": torch.ones(9)}, ["bias"]) == {}


# --- wrappers ----------------------------------------------------------------------------------


def test_wrappers_of_training(tmp_path: Path) -> None:
    names = ("blocks.0.attn.qkv.weight", "head.bias")
    for prefix in ("model.", "net.", "backbone.", "encoder.", "_orig_mod.", "module.", "ema.",
                   "model._orig_mod."):  # fmt: skip
        found = bare_names({f"{prefix}{name}": (1,) for name in names}, tmp_path)[0]
        assert found == {name: f"{prefix}{name}" for name in names}


def test_averaged_weights_come_first(tmp_path: Path) -> None:
    plain, averaged = made("test_vit", 1), made("test_vit", 2)
    state = {f"model.{name}": tensor for name, tensor in plain.state_dict().items()}
    state |= {f"ema_model.module.{name}": t for name, t in averaged.state_dict().items()}
    loaded = load_model(write(state, tmp_path / "model.safetensors"), arch="test_vit")
    assert agree(loaded, averaged) and "averaged weights (ema_model.*)" in loaded.warnings[0]
    for key in ("state_dict_ema", "ema_state_dict", "model_ema"):
        content = {"state_dict": plain.state_dict(), key: averaged.state_dict()}
        torch.save(content, tmp_path / "last.ckpt")
        loaded = load_model(tmp_path / "last.ckpt", arch="test_vit")
        assert agree(loaded, averaged) and f"averaged weights ({key})" in loaded.warnings[0]


def test_wrapped_names_that_meet_are_refused(tmp_path: Path) -> None:
    """Two names must not become one."""
    with pytest.raises(ModelError, match="are both 'w' without the wrappers"):
        bare_names({"module.w": (4, 4), "w": (4, 4)}, tmp_path)
    assert bare_names({"n_averaged": (), "module.w": (4, 4)}, tmp_path)[0] == {"w": "module.w"}


def test_a_file_without_attention_says_so(tmp_path: Path) -> None:
    path = write(timm.create_model("resnet18"), tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"has no attention: .* as of a ResNet"):
        load_model(path)
