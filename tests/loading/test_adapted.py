"""Arguments of a constructor that are found by what differs between its tensors and a file's."""

from __future__ import annotations

import cProfile
import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_right_model import agree, made, write
from torch import nn

from elsa_core.errors import ModelError
from elsa_core.loading import adapted, libraries
from elsa_core.loading.fit import recipe_of
from elsa_core.loading.loader import load_model
from elsa_core.loading.spec import ModelSpec

ONES = (1, 1, 1, 1)
TIMM: list[tuple[str, dict[str, Any]]] = [
    ("maxvit_pico_rw_256", {"img_size": 128, "depths": (1, 1, 2, 1)}),
    ("tiny_vit_5m_224", {"window_sizes": (7, 8, 16, 8), "depths": (1, 1, 2, 1)}),
    ("levit_128s", {"img_size": 160, "depth": (1, 2, 1)}),
    ("twins_svt_small", {"depths": ONES, "embed_dims": (32, 64, 128, 256)}),
    ("twins_pcpvt_small", {"depths": (1, 2, 1, 1)}),
    ("pvt_v2_b0", {"depths": ONES, "embed_dims": (32, 64, 80, 128), "mlp_ratios": (4, 8, 4, 2)}),
    ("hiera_tiny_224", {"img_size": 128, "stages": (1, 1, 2, 1)}),
    ("mvitv2_tiny", {"img_size": 128}),
    ("coatnet_nano_rw_224", {"img_size": 160, "depths": ONES}),
    ("swin_tiny_patch4_window7_224", {"embed_dim": 32, "num_heads": (1, 2, 4, 8), "depths": ONES}),
    ("vit_tiny_patch16_224", {"depth": 1, "patch_size": 8, "img_size": 48, "mlp_ratio": 2.0}),
]
TORCHVISION: list[tuple[str, dict[str, Any]]] = [
    ("swin_t", {"window_size": [8, 8], "depths": ONES, "embed_dim": 32, "num_heads": (1, 2, 4, 8)}),
    ("swin_t", {"window_size": [4, 4], "depths": [2, 1], "num_heads": [1, 2], "embed_dim": 12}),
    ("swin_v2_t", {"window_size": [6, 6], "depths": ONES, "patch_size": [8, 8]}),
    ("vit_b_16", {"patch_size": 8, "num_layers": 1, "image_size": 48}),
    ("vit_b_16", {"hidden_dim": 96, "mlp_dim": 80, "num_layers": 2}),
    ("maxvit_t", {"partition_size": 8, "input_size": (256, 256), "block_layers": ONES}),
]  # fmt: skip


def of_torchvision(name: str, args: dict[str, Any]) -> nn.Module:
    torchvision = pytest.importorskip("torchvision")
    builder = torchvision.models.get_model_builder(name)
    model = libraries._with_fixed(inspect.unwrap(builder), {**args, "num_classes": 3}).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(0.05 * torch.randn(tensor.shape))
    return model


@pytest.mark.parametrize(("name", "args"), TIMM, ids=[name for name, _ in TIMM])
def test_timm(tmp_path: Path, name: str, args: dict[str, Any]) -> None:
    """Each of these files was refused."""
    model = made(name, num_classes=3, **args)
    loaded = load_model(write(model, tmp_path / "model.safetensors"), arch=name)
    assert agree(loaded, model) and loaded.num_classes == 3
    size = args.get("img_size", loaded.input_size[1])
    assert loaded.input_size == (3, size, size)
    assert "as the tensors' shapes say" in "".join(loaded.notes) or set(args) == {"img_size"}


@pytest.mark.parametrize(("name", "args"), TORCHVISION)
def test_torchvision(tmp_path: Path, name: str, args: dict[str, Any]) -> None:
    model = of_torchvision(name, args)
    path = write(model, tmp_path / "model.safetensors")
    loaded = load_model(path, arch=f"torchvision:{name}")
    assert agree(loaded, model) and loaded.num_classes == 3
    # A ViT's heads are those of its name, and that is said.
    assert ("heads=12" in loaded.unsaid) is (name == "vit_b_16")


def test_without_a_name_too(tmp_path: Path) -> None:
    """Names of torchvision that become the same are one answer; the nearest is told."""
    model = of_torchvision("swin_t", {"window_size": [8, 8], "depths": ONES})
    loaded = load_model(write(model, tmp_path / "model.safetensors"))
    assert agree(loaded, model) and "window_size=[8, 8]" in loaded.notes[0]
    assert "same computation as torchvision:swin_t" in loaded.notes[0]
    narrow = of_torchvision("vit_b_16", {"num_layers": 1, "hidden_dim": 96, "mlp_dim": 96})
    with pytest.raises(ModelError, match="name it with arch"):  # who says its heads?
        load_model(write(narrow, tmp_path / "narrow.safetensors"))


def test_what_is_typed_stays(tmp_path: Path) -> None:
    path = write(made("levit_128s", img_size=160), tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="does not fit levit_128s"):
        load_model(path, arch="levit_128s", model_kwargs={"img_size": 224})
    path = write(made("twins_svt_small", depths=ONES), tmp_path / "twins.safetensors")
    with pytest.raises(ModelError, match="does not fit twins_svt_small"):
        load_model(path, arch="twins_svt_small", model_kwargs={"depths": [1, 1, 2, 1]})


def test_heads_are_not_guessed(tmp_path: Path) -> None:
    """100 channels are no multiple of 8 heads; which other number they have shows nowhere."""
    args = {"depths": ONES, "embed_dims": (32, 64, 160, 100), "num_heads": (1, 2, 5, 4)}
    model = made("pvt_v2_b0", **args)
    path = write(model, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"does not fit pvt_v2_b0"):
        load_model(path, arch="pvt_v2_b0")
    given = {"num_heads": [1, 2, 5, 4]}
    assert agree(load_model(path, arch="pvt_v2_b0", model_kwargs=given), model)


@pytest.mark.parametrize("name", ["mvitv2_tiny", "levit_128s"])
def test_what_no_argument_makes_is_refused(tmp_path: Path, name: str) -> None:
    state = made(name).state_dict()
    key = next(key for key in state if key.endswith("norm1.weight") or "qkv" in key)
    state[key] = torch.ones(tuple(n + 1 for n in state[key].shape))
    path = write(state, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=rf"does not fit {name}"):
        load_model(path, arch=name)


def test_a_profiler_of_the_caller_goes_on() -> None:
    """Constructors are watched for the length of a build."""
    recipe = recipe_of(ModelSpec("timm", "levit_128s", "levit_128s"))
    seen: list[str] = []

    def profiler(frame: Any, _event: str, _argument: Any) -> None:
        seen.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(profiler)
    try:
        _, args = adapted._watched(recipe)
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(before)
    assert args["depth"] == [2, 3, 4] and args["key_dim"] == 16 and "num_classes" not in args


def test_under_cprofile_nothing_breaks() -> None:
    recipe = recipe_of(ModelSpec("timm", "levit_128s", "levit_128s"))
    profiler = cProfile.Profile()
    model, _ = profiler.runcall(adapted._watched, recipe)
    assert next(model.parameters()).is_meta and profiler.getstats()
