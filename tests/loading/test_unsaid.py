"""What no tensor of a file shows is taken from the architecture's name, and said."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from command import Elsa
from safetensors.torch import save_file
from test_right_model import typed

from elsa_core.errors import ArgumentError, ModelError
from elsa_core.loading.configuration import from_config
from elsa_core.loading.loader import load_model
from elsa_core.loading.saving import save
from elsa_core.patching.rewrite import patch

VIT = ("vit_tiny_patch16_224", {"depth": 1, "img_size": 64, "num_classes": 3})
SWIN_V2 = ("swinv2_tiny_window8_256", {"depths": (1, 1, 1, 1), "num_classes": 3})
SWIN = ("swin_tiny_patch4_window7_224", {"depths": (1, 1, 1, 1), "num_classes": 3})


def written(folder: Path, name: str, args: dict[str, Any]) -> Path:
    path = folder / "model.safetensors"
    save_file(timm.create_model(name, **args).state_dict(), path)
    return path


@pytest.mark.parametrize(
    ("made", "unsaid"),
    [
        (VIT, {"heads": 3}),  # 192 channels could be 6 heads of 32 as well
        (SWIN_V2, {"window": 8}),  # its bias is computed from coordinates, whatever the window
        (SWIN, {}),  # its tables show both
        (("vit_relpos_small_patch16_224", {"depth": 1, "num_classes": 3}), {}),
        (("pvt_v2_b0", {}), {"heads": [1, 2, 5, 8]}),
        (("pit_ti_224", {}), {"heads": [2, 4, 8]}),  # times a base
        (("eva02_tiny_patch14_224", {"depth": 1}), {"heads": 3}),
    ],
    ids=["vit", "swin v2", "swin", "relpos", "pvt", "pit", "eva02"],
)
def test_what_the_name_alone_says(
    tmp_path: Path, made: tuple[str, dict[str, Any]], unsaid: dict[str, Any]
) -> None:
    """Heads 3 were taken from `vit_tiny`, and window 8 from `swinv2_tiny_window8`, in silence."""
    name, args = made
    loaded = load_model(written(tmp_path, name, args), arch=name, model_kwargs=typed(args))
    assert loaded.recipe.unsaid == unsaid
    said = loaded.unsaid
    assert said.endswith(f"from {name} (not in the file)") if unsaid else said == ""


def test_another_window_computes_another_model(tmp_path: Path) -> None:
    """Why it is said: the tensors fit window 4 as well, and the logits are others."""
    name, args = SWIN_V2
    model = timm.create_model(name, **args)
    for key, parameter in model.named_parameters():
        if "norm" in key and key.endswith("weight"):  # those after attention begin as zeros
            torch.nn.init.ones_(parameter)
    path = tmp_path / "model.safetensors"
    save_file(model.state_dict(), path)
    usual = load_model(path, arch=name, model_kwargs=typed(args))
    other = load_model(path, arch=name, model_kwargs={**typed(args), "window_size": 4})
    assert other.recipe.unsaid == {}  # the user has said it
    inputs = usual.example_inputs(2)
    with torch.no_grad():
        one, two = usual.model(*inputs), other.model(*inputs)
    assert (one - two).norm() > 1e-3 * one.norm()


def test_what_is_typed_or_written_down_is_said(tmp_path: Path) -> None:
    name, args = VIT
    path = written(tmp_path, name, args)
    assert load_model(path, arch=name, model_kwargs={**args, "num_heads": 3}).recipe.unsaid == {}
    config = {"architecture": name, "num_classes": 3, "model_args": args}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_model(path).recipe.unsaid == {}


def test_a_saved_directory_remembers(tmp_path: Path) -> None:
    loaded = load_model(written(tmp_path, *VIT), arch=VIT[0], model_kwargs=VIT[1])
    assert from_config(loaded.recipe.to_config(), "config").unsaid == {"heads": 3}
    save(loaded, patch(loaded.model), tmp_path / "saved")
    assert load_model(tmp_path / "saved").recipe.unsaid == {"heads": 3}


@pytest.mark.parametrize("noted", [3, {"a b": 1}, {"heads": "3"}, {"heads": [0]}, {"heads": {}}])
def test_a_hostile_note_is_refused(noted: Any) -> None:
    config = {"architecture": "x", "elsa": {"unsaid": noted}}
    with pytest.raises(ModelError, match="unsaid must give numbers"):
        from_config(config, "config")


def test_attention_of_torch_never_shows_its_heads(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    given = {"num_layers": 1, "mlp_dim": 32}
    model = load_model("torchvision:vit_b_32", model_kwargs=given).model
    path = tmp_path / "model.safetensors"
    save_file(model.state_dict(), path)
    loaded = load_model(path, arch="torchvision:vit_b_32", model_kwargs=given)
    assert loaded.recipe.unsaid == {"heads": 12}


def test_inspect_says_it(tmp_path: Path, elsa: Elsa) -> None:
    path = str(written(tmp_path, *VIT))
    arguments = ["inspect", path, "--arch", VIT[0], "--model-kwargs", "depth=1"]
    elsa(*arguments).shows("assumed: heads=3 from vit_tiny_patch16_224 (not in the file)")
    told = elsa(*arguments, "--json").document()
    assert told["results"]["model"]["assumed"] == {"heads": 3}


# --- num_classes=0 of a file with a classifier -------------------------------------------------


@pytest.mark.parametrize("arch", [None, "test_vit"])
def test_a_classifier_is_dropped_where_that_is_asked(tmp_path: Path, arch: str | None) -> None:
    name, args = "test_vit", {"num_classes": 3}
    model = timm.create_model(name, **args).eval()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    path = tmp_path / "model.safetensors"
    loaded = load_model(path, arch=arch, model_kwargs={"num_classes": 0})
    assert loaded.num_classes == 0
    assert loaded.notes[-1] == "dropped as asked (num_classes=0): head.bias, head.weight"
    inputs = loaded.example_inputs(2)
    with torch.no_grad():
        assert torch.equal(loaded.model(*inputs), model.forward_head(
            model.forward_features(*inputs), pre_logits=True
        ))  # fmt: skip


def test_nothing_else_is_dropped(tmp_path: Path) -> None:
    name, args = VIT
    path = tmp_path / "model.safetensors"
    state = timm.create_model(name, **args).state_dict()
    save_file({**state, "extra.weight": torch.ones(2)}, path)
    with pytest.raises(ModelError, match=r"extra\.weight"):
        load_model(path, arch=name, model_kwargs={**args, "num_classes": 0})
    save_file(state, path)
    with pytest.raises(ModelError, match=r"head\.(weight|bias)"):
        load_model(path, arch=name, model_kwargs={**args, "num_classes": 5})
    with pytest.raises(ArgumentError, match="num_classes"):
        load_model(path, arch=name, model_kwargs={**args, "num_classes": False})
