"""Arguments of a constructor that are found by what differs between its tensors and a file's."""

from __future__ import annotations

import cProfile
import inspect
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from sampling import some
from test_right_model import agree, made, write
from torch import nn

from elsa_core.errors import ModelError
from elsa_core.loading import adapted, constructor, torchvision_models
from elsa_core.loading.fit import recipe_of
from elsa_core.loading.libraries import build_meta
from elsa_core.loading.loader import load_model
from elsa_core.loading.recognise import fit_named
from elsa_core.loading.spec import ModelSpec

ONES = (1, 1, 1, 1)
TIMM: list[tuple[str, dict[str, Any]]] = [
    ("maxvit_pico_rw_256", {"img_size": 128, "depths": (1, 1, 2, 1)}),
    ("tiny_vit_5m_224", {"window_sizes": (7, 8, 16, 8), "depths": (1, 1, 2, 1)}),
    ("levit_128s", {"img_size": 160, "depth": (1, 2, 1)}),
    ("twins_svt_small", {"depths": (1, 1, 2, 1)}),
    ("twins_pcpvt_small", {"depths": (1, 2, 1, 1)}),
    ("pvt_v2_b0", {"depths": ONES, "mlp_ratios": (4, 8, 4, 2)}),
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
    ("vit_b_16", {"mlp_dim": 80, "num_layers": 2}),
    ("maxvit_t", {"partition_size": 8, "input_size": (256, 256), "block_layers": ONES}),
]  # fmt: skip


def of_torchvision(name: str, args: dict[str, Any]) -> nn.Module:
    torchvision = pytest.importorskip("torchvision")
    builder = torchvision.models.get_model_builder(name)
    model = torchvision_models.with_fixed(
        inspect.unwrap(builder), {**args, "num_classes": 3}
    ).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(0.05 * torch.randn(tensor.shape))
    return model


@pytest.mark.parametrize(("name", "args"), some(TIMM))
def test_timm(tmp_path: Path, name: str, args: dict[str, Any]) -> None:
    """Each of these files was refused."""
    model = made(name, num_classes=3, **args)
    loaded = load_model(write(model, tmp_path / "model.safetensors"), arch=name)
    assert agree(loaded, model) and loaded.num_classes == 3
    size = args.get("img_size", loaded.input_size[1])
    assert loaded.input_size == (3, size, size)
    said = "".join(loaded.notes)
    assert "as the tensors' shapes say" in said or set(args) == {"img_size"}
    assert (f"at {size} pixels" in said) is ("img_size" in args)


@pytest.mark.parametrize(("name", "args"), some(TORCHVISION))
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


WIDTHS: list[tuple[str, str, dict[str, Any], str]] = [
    # Published siblings, then other widths: the name, what was made, with what, the heads.
    ("vit_small_patch16_224", "vit_tiny_patch16_224", {"depth": 1}, "num_heads"),
    ("vit_base_patch14_dinov2", "vit_small_patch14_dinov2", {"depth": 1}, "num_heads"),
    ("eva02_tiny_patch14_224", "eva02_small_patch14_224", {"depth": 1}, "num_heads"),
    ("pit_ti_224", "pit_s_224", {"depth": (1, 1, 1)}, "heads"),
    ("pit_ti_224", "pit_ti_224", {"heads": (4, 8, 16), "depth": (1, 1, 1)}, "heads"),
    ("hiera_tiny_224", "hiera_large_224", {"stages": ONES}, "num_heads"),
    ("tnt_s_patch16_224", "tnt_b_patch16_224", {"depth": 1}, "num_heads_inner or num_heads_outer"),
    ("davit_tiny", "davit_base", {"depths": ONES}, "num_heads"),
    ("twins_svt_small", "twins_svt_base", {"depths": ONES}, "num_heads"),
    ("visformer_tiny", "visformer_small", {}, "num_heads"),
    ("pvt_v2_b0", "pvt_v2_b0", {"depths": ONES, "embed_dims": (32, 64, 80, 128)}, "num_heads"),
]


@pytest.mark.parametrize(("arch", "name", "args", "heads"), WIDTHS)
def test_another_width_says_nothing_of_heads(
    arch: str, name: str, args: dict[str, Any], heads: str
) -> None:
    """Each was loaded as another model: with the heads of the name, or with base x heads."""
    with torch.device("meta"):
        model = timm.create_model(name, **args)
    shapes = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    with pytest.raises(ModelError, match=f"and no tensor shows {heads}; .*--model-kwargs") as told:
        fit_named(ModelSpec("timm", arch, arch), shapes)
    assert "\n" not in str(told.value) and f"does not fit {arch}: it would with" in str(told.value)


def test_a_width_of_torchvision_and_its_heads(tmp_path: Path) -> None:
    args = {"num_layers": 1, "hidden_dim": 96, "mlp_dim": 384, "num_heads": 6}
    model = of_torchvision("vit_b_16", args)
    path = write(model, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"with num_layers=1, hidden_dim=96, .*shows num_heads"):
        load_model(path, arch="torchvision:vit_b_16")
    given = {"num_heads": 6}
    assert agree(load_model(path, arch="torchvision:vit_b_16", model_kwargs=given), model)


def test_a_sibling_by_the_heads_that_the_refusal_asks_for(tmp_path: Path) -> None:
    model = made("pit_s_224", depth=(1, 1, 1))
    path = write(model, tmp_path / "model.safetensors")
    loaded = load_model(path, arch="pit_ti_224", model_kwargs={"heads": [3, 6, 12]})
    assert agree(loaded, model) and loaded.unsaid == ""
    assert "with depth=[1, 1, 1], base_dims=[48, 48, 48], as" in loaded.notes[0]  # not the typed


def test_another_width_whose_heads_are_shown(tmp_path: Path) -> None:
    """The layers of CaiT that mix heads are as wide as there are heads."""
    args = {"depth": 1, "embed_dim": 96, "num_heads": 6}
    model = made("cait_xxs24_224", **args)
    loaded = load_model(write(model, tmp_path / "model.safetensors"), arch="cait_xxs24_224")
    assert agree(loaded, model) and "num_heads=6" in loaded.notes[0]


def test_an_architecture_of_the_metadata_tells_what_is_other(tmp_path: Path) -> None:
    """Depth and image size were taken from the shapes without a word."""
    model = made("levit_128s", img_size=160, depth=(1, 2, 1))
    path = tmp_path / "model.safetensors"
    state = {key: tensor.contiguous() for key, tensor in model.state_dict().items()}
    save_file(state, path, metadata={"architecture": "levit_128s"})
    note = "from the file's metadata with depth=[1, 2, 1], as the tensors' shapes say"
    assert load_model(path).notes == (f"architecture levit_128s, {note}, at 160 pixels",)


def test_what_does_not_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = recipe_of(ModelSpec("timm", "levit_128s", "levit_128s"))
    with torch.device("meta"):
        model = timm.create_model("levit_128s", depth=(1, 1, 1))
    shapes = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    fit = adapted.adapted(usual, shapes)
    assert fit is not None and fit.args["depth"] == [1, 1, 1]
    monkeypatch.setattr(adapted, "problem", lambda recipe: (recipe.args and "it stops") or None)
    assert adapted.adapted(usual, shapes) is None


# --- files that would stall the search ---------------------------------------------------------


def hostile(name: str, library: str, tensor: str, shape: tuple[int, ...]) -> float:
    """The seconds in which shapes with one other are refused."""
    spec = ModelSpec(library, name, name)  # type: ignore[arg-type]
    model = build_meta(recipe_of(spec))
    shapes = {key: tuple(each.shape) for key, each in model.state_dict().items()}
    begin = time.thread_time()
    fit = fit_named(spec, {**shapes, tensor: shape})
    assert not fit.args
    return time.thread_time() - begin


@pytest.mark.parametrize(
    ("name", "library", "tensor", "shape"),
    [
        ("swin_t", "torchvision", "features.1.0.mlp.0.weight", (384_000_000, 0)),
        ("swin_t", "torchvision", "features.1.0.mlp.0.weight", (384_000_000, 96)),
        ("levit_128s", "timm", "stages.0.blocks.0.attn.qkv.linear.weight", (256_000_000, 128)),
        ("tiny_vit_5m_224", "timm", "stages.1.blocks.0.attn.attention_biases", (4, 10**6)),
        ("vit_tiny_patch16_224", "timm", "blocks.999999.norm1.weight", (192,)),
    ],
)
def test_a_shape_of_millions(name: str, library: str, tensor: str, shape: tuple[int, ...]) -> None:
    """These built a million blocks, or all pairs of a million places."""
    pytest.importorskip(library)
    assert hostile(name, library, tensor, shape) < 2 * adapted.SECONDS + 2


def test_heads_that_were_not_compared_in_time_are_not_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(constructor, "_SECONDS", -1.0)
    name = "swin_tiny_patch4_window7_224"
    with torch.device("meta"):
        model = timm.create_model(name, embed_dim=48, num_heads=(3, 6, 12, 24), depths=ONES)
    shapes = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    with pytest.raises(ModelError, match="no tensor shows num_heads"):
        fit_named(ModelSpec("timm", name, name), shapes)


def test_a_build_ends_in_time() -> None:
    recipe = recipe_of(ModelSpec("timm", "vit_tiny_patch16_224", "vit_tiny_patch16_224"))
    many = constructor.with_args(recipe, {"depth": 1000})
    with pytest.raises(ModelError, match="takes too long to build"):
        constructor.watched(many, time.thread_time() + 0.05)


def test_a_search_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "maxvit_pico_rw_256"
    with torch.device("meta"):
        model = timm.create_model(name, transformer_dim_head=16)
    shapes = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    monkeypatch.setattr(adapted, "SECONDS", 0.3)
    begin = time.thread_time()
    assert adapted.adapted(recipe_of(ModelSpec("timm", name, name)), shapes) is None
    assert time.thread_time() - begin < 3  # 14 were needed


@pytest.mark.parametrize(
    ("args", "good"),
    [
        ({"depths": [250, 250, 250, 250]}, True),
        ({"depths": [250, 250, 250, 251]}, False),
        ({"embed_dim": 6144, "num_heads": 48, "mlp_ratio": 4.0}, True),
        ({"embed_dims": [64, 10**6]}, False),
        ({"num_heads": 10**4}, False),
        ({"window_size": 64, "img_size": [2048, 2048]}, True),
        ({"window_sizes": [7, 1000]}, False),
    ],
)
def test_what_is_tried_at_all(args: dict[str, Any], good: bool) -> None:
    assert adapted._is_bounded(args) is good


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
        _, args = constructor.watched(recipe)
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(before)
    assert args["depth"] == [2, 3, 4] and args["key_dim"] == 16 and "num_classes" not in args


def test_under_cprofile_nothing_breaks() -> None:
    recipe = recipe_of(ModelSpec("timm", "levit_128s", "levit_128s"))
    profiler = cProfile.Profile()
    model, _ = profiler.runcall(constructor.watched, recipe)
    assert next(model.parameters()).is_meta and profiler.getstats()
