"""Each kind of weights file: architecture, preprocessing and class names are right or said to be
assumed, and the model that it holds is the one that comes out."""

import json
import re
import warnings
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models import save_for_hf
from timm.models._hub import has_hf_hub
from torch import Tensor, nn

import elsa_core as elsa
from elsa_core.errors import ArgumentError, ModelError
from elsa_core.loading.loader import Loaded, load_model
from elsa_core.loading.names import bare_names
from elsa_core.loading.stated import names_of, parsed, stated

NAME = "test_vit"
STATED: dict[str, Any] = {
    "mean": [0.3] * 3, "std": [0.35] * 3, "crop_pct": 1.0, "interpolation": "nearest",
}  # fmt: skip
ALL = ("mean", "std", "crop_pct", "interpolation")
LABELS = ["cat", "dog", "a red fox"]
State = dict[str, Tensor]
Writer = Callable[[Path, nn.Module], tuple[Path, dict[str, Any]]]


def made(seed: int = 0, **args: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: nn.Module = timm.create_model(NAME, **{"num_classes": 3, **args}).eval()
    return model


def prefixed(state: State, prefix: str, scale: float = 1.0) -> State:
    return {f"{prefix}{name}": scale * tensor for name, tensor in state.items()}


# Each writes a file of the model and returns its path and the arguments of `load_model`.


def timm_training(folder: Path, model: nn.Module) -> tuple[Path, dict[str, Any]]:
    args = Namespace(model=NAME, **STATED, model_kwargs={}, gp=None, data_dir=Path("data"))
    content = {"arch": NAME, "args": args, "state_dict": model.state_dict(), "epoch": 2}
    torch.save(content, folder / "last.pth.tar")
    return folder / "last.pth.tar", {}


def ddp(folder: Path, model: nn.Module) -> tuple[Path, dict[str, Any]]:
    content = {"model": prefixed(model.state_dict(), "module."), "optimizer": {"state": {}}}
    torch.save(content, folder / "ddp.pth")
    return folder / "ddp.pth", {"arch": NAME}


def lightning(folder: Path, model: nn.Module) -> tuple[Path, dict[str, Any]]:
    state = prefixed(model.state_dict(), "model.") | {"criterion.weight": torch.ones(3)}
    said = {"model_name": NAME, "class_names": LABELS, **STATED, "lr": 1e-3}
    content = {"state_dict": state | {"accuracy.hits": torch.zeros(3, 3)},
               "hyper_parameters": said, "callbacks": {}}  # fmt: skip
    torch.save(content, folder / "epoch=1.ckpt")
    return folder / "epoch=1.ckpt", {}


def hub_folder(folder: Path, model: nn.Module) -> tuple[Path, dict[str, Any]]:
    config = {"label_names": LABELS, "pretrained_cfg": STATED}
    save_for_hf(model, folder / "hub", model_config=config, safe_serialization=True)
    return folder / "hub", {}


def safetensors_with_metadata(folder: Path, model: nn.Module) -> tuple[Path, dict[str, Any]]:
    said = {key: json.dumps(value) for key, value in STATED.items() if key != "interpolation"}
    metadata = {"architecture": NAME, "interpolation": "nearest", **said,
                "label_names": json.dumps(LABELS)}  # fmt: skip
    save_file(model.state_dict(), folder / "model.safetensors", metadata=metadata)
    return folder / "model.safetensors", {}


def safetensors_bare(folder: Path, model: nn.Module) -> tuple[Path, dict[str, Any]]:
    save_file(model.state_dict(), folder / "model.safetensors")
    return folder / "model.safetensors", {"arch": NAME}


def sharded(folder: Path, model: nn.Module) -> tuple[Path, dict[str, Any]]:
    state = model.state_dict()
    parts = {"a.safetensors": dict(list(state.items())[:9]),
             "b.safetensors": dict(list(state.items())[9:])}  # fmt: skip
    for name, part in parts.items():
        save_file(part, folder / name, metadata={"architecture": NAME})
    index = {"weight_map": {key: name for name, part in parts.items() for key in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder / "model.safetensors.index.json", {}


def half(folder: Path, model: nn.Module) -> tuple[Path, dict[str, Any]]:
    model.half().float()  # what the file will hold
    state = {name: tensor.half() for name, tensor in model.state_dict().items()}
    torch.save({"arch": NAME, "state_dict": state}, folder / "half.pth")
    return folder / "half.pth", {}


def dino(folder: Path, model: nn.Module) -> tuple[Path, dict[str, Any]]:
    heads = {"last_layer.weight_v": torch.ones(2, 2), "mlp.0.weight": torch.ones(2, 2)}
    teacher = prefixed(model.state_dict(), "backbone.") | prefixed(heads, "head.")
    student = prefixed(model.state_dict(), "module.backbone.", 0.5)
    student |= prefixed(heads, "module.head.")
    content = {"student": student, "teacher": teacher, "args": Namespace(arch="vit_small")}
    torch.save({**content, "dino_loss": {"center": torch.ones(1, 2)}}, folder / "dino.pth")
    return folder / "dino.pth", {"arch": NAME}


def dinov2(folder: Path, model: nn.Module) -> tuple[Path, dict[str, Any]]:
    """The teacher of DINOv2's training, whose blocks lie in chunks."""
    last = len(model.blocks) - 1  # type: ignore[arg-type]
    chunks = {name: re.sub(r"^blocks\.(\d+)", lambda n: f"blocks.{int(int(n[1]) == last)}.{n[1]}",
                           name) for name in model.state_dict()}  # fmt: skip
    state = {f"backbone.{chunks[name]}": t for name, t in model.state_dict().items()}
    state |= {"dino_head.last_layer.weight_v": torch.ones(2, 2), "ibot_head.x": torch.ones(2, 2)}
    torch.save({"teacher": state}, folder / "teacher_checkpoint.pth")
    return folder / "teacher_checkpoint.pth", {"arch": NAME}


def mae(folder: Path, model: nn.Module) -> tuple[Path, dict[str, Any]]:
    decoder = {"decoder_embed.weight": torch.ones(4, 64), "decoder_pos_embed": torch.ones(1, 2, 4),
               "decoder_blocks.0.attn.qkv.weight": torch.ones(12, 4), "mask_token": torch.ones(1),
               "decoder_pred.bias": torch.ones(4)}  # fmt: skip
    said = Namespace(model="mae_vit_base_patch16", input_size=224)
    torch.save({"model": model.state_dict() | decoder, "args": said}, folder / "mae.pth")
    return folder / "mae.pth", {"arch": NAME}


def transformers_folder(folder: Path, model: nn.Module) -> tuple[Path, dict[str, Any]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        image_size=32, patch_size=8, id2label=dict(enumerate(LABELS)),
    )  # fmt: skip
    expected = transformers.ViTForImageClassification(config).eval()
    expected.save_pretrained(folder / "vit")
    transformers.ViTImageProcessor(
        size={"height": 32, "width": 32}, resample=0, image_mean=STATED["mean"],
        image_std=[0.35] * 3,
    ).save_pretrained(folder / "vit")  # fmt: skip
    return folder / "vit", {"expected": expected}


KINDS: list[tuple[Writer, dict[str, Any], tuple[str, ...], bool, str]] = [
    # who writes it, arguments of the model, what is assumed, class names, what is said
    (timm_training, {}, (), False, ""),
    (ddp, {}, ALL, False, ""),
    (lightning, {}, (), True, "left out, for training alone: criterion.weight, accuracy.hits"),
    (hub_folder, {}, (), True, ""),
    (safetensors_with_metadata, {}, (), True, ""),
    (safetensors_bare, {}, ALL, False, ""),
    (sharded, {}, ALL, False, ""),
    (half, {}, ALL, False, ""),
    (dino, {"num_classes": 0}, ALL, False, "weights (teacher) taken; --weights student"),
    (dinov2, {"num_classes": 0}, ALL, False, "left out, for training alone: dino_head.last"),
    (transformers_folder, {}, (), True, ""),
    (mae, {"num_classes": 0}, ALL, False, "left out, for training alone: decoder_"),
    (safetensors_bare, {"in_chans": 1}, ALL, False, ""),
    (safetensors_bare, {"in_chans": 5}, ALL, False, ""),
]


@pytest.mark.parametrize(
    ("write", "args", "assumed", "named", "said"),
    KINDS,
    ids=[f"{kind[0].__name__}{kind[1].get('in_chans', '')}" for kind in KINDS],
)
def test_what_a_file_states(
    tmp_path: Path, write: Writer, args: dict[str, Any], assumed: tuple[str, ...], named: bool,
    said: str,
) -> None:  # fmt: skip
    if write is hub_folder and not has_hf_hub():
        pytest.skip("this timm does not know the huggingface_hub that is installed")
    model = made(**args)
    path, given = write(tmp_path, model)
    expected = given.pop("expected", model)
    loaded = load_model(path, **given)
    assert loaded.name == (NAME if expected is model else type(expected).__name__)
    assert holds(loaded, expected) and loaded.recipe.preprocess.assumed == assumed
    if not assumed:
        given = {key: tuple(v) if isinstance(v, list) else v for key, v in STATED.items()}
        assert {key: loaded.preprocess.transform[key] for key in ALL} == given
    counts = {len(loaded.preprocess.mean), len(loaded.preprocess.std), loaded.input_size[0]}
    assert counts == {args.get("in_chans", 3)}
    told = "\n".join(loaded.warnings)
    assert ("does not say its preprocessing" in told) is bool(assumed) and said in told
    assert loaded.recipe.labels == (tuple(LABELS) if named else ())


@torch.no_grad()
def holds(loaded: Loaded, model: nn.Module) -> bool:
    images = loaded.example_inputs(1)
    ours, theirs = loaded.model(*images), model(*images)
    return torch.equal(ours[0], theirs[0])


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"])
@pytest.mark.parametrize("classes", [0, 5])
def test_names_of_swins_authors(tmp_path: Path, name: str, classes: int) -> None:
    """Downsampling ends a stage, the classifier is `head`, masks and indices are stored."""
    shallow = {"depths": [1, 1, 1, 1]}
    model = timm.create_model(name, num_classes=classes, **shallow).eval()
    state = {}
    stored = [b for b in model.named_buffers() if b[0].endswith(("index", "mask", "coords_table"))]
    for key, tensor in [*model.state_dict().items(), *stored]:
        stage = re.match(r"layers\.(\d)\.downsample\.", key)
        moved = f"layers.{int(stage[1]) - 1}.{key[9:]}" if stage else key
        state[moved.replace("head.fc.", "head.")] = tensor.detach().clone()
    torch.save({"model": state}, tmp_path / "swin.pth")
    loaded = load_model(tmp_path / "swin.pth", arch=name, model_kwargs=shallow)
    assert loaded.num_classes == classes and holds(loaded, model)


def test_weights_are_chosen(tmp_path: Path) -> None:
    plain, averaged = made(1), made(2)
    path = tmp_path / "last.pth"
    state = {"arch": NAME, "state_dict": prefixed(plain.state_dict(), "model."),
             "state_dict_ema": averaged.state_dict()}  # fmt: skip
    torch.save(state, path)
    assert holds(load_model(path), averaged)
    for key in ("state_dict", "state_dict.model"):
        chosen = load_model(path, weights=key)
        assert holds(chosen, plain) and "weights state_dict taken" in chosen.warnings[0]
    flat = prefixed(plain.state_dict(), "student.") | prefixed(averaged.state_dict(), "teacher.")
    flat["classifier.weight"] = torch.ones(3, 64)
    save_file(flat, tmp_path / "flat.safetensors")
    for key, model in (("student", plain), ("teacher", averaged)):
        assert holds(load_model(tmp_path / "flat.safetensors", arch=NAME, weights=key), model)
    with pytest.raises(ModelError, match=r"no weights 'ema' \(--weights\).*student, teacher"):
        load_model(tmp_path / "flat.safetensors", weights="ema")
    with pytest.raises(ArgumentError, match="--weights"):
        load_model(NAME, weights="ema")


def test_a_classifier_beside_a_backbone_is_not_dropped(tmp_path: Path) -> None:
    shapes = {"backbone.blocks.0.w": (4, 4), "backbone.blocks.1.w": (4, 4), "backbone.b": (4,),
              "classifier.w": (3, 4), "classifier.b": (3,)}  # fmt: skip
    assert bare_names(shapes, tmp_path) == ({name: name for name in shapes}, ())
    state = prefixed(made().state_dict(), "backbone.") | {"classifier.weight": torch.ones(3, 64)}
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"does not fit test_vit: .*; --weights backbone takes"):
        load_model(tmp_path / "model.safetensors", arch=NAME)
    loaded = load_model(tmp_path / "model.safetensors", arch=NAME, weights="backbone")
    assert "weights backbone taken, 1 other tensors left" in loaded.warnings[0]


def test_blocks_of_a_pyramid_are_no_chunks(tmp_path: Path) -> None:
    """Twins and PVT number stages, then blocks."""
    shapes = {f"blocks.{stage}.{block}.w": (1,) for stage in (0, 1) for block in (0, 1)}
    assert list(bare_names(shapes, tmp_path)[0]) == list(shapes)


@pytest.mark.parametrize(
    ("said", "mean", "std"),
    [
        ({"args": {"mean": 0.5, "std": (0.25,)}}, (0.5,), (0.25,)),
        ({"hyper_parameters": {"image_mean": torch.tensor([[0.5]])}}, (0.5,), None),
        ({"config": {"data_config": {"mean": [0.1, 0.2, 0.3]}}}, (0.1, 0.2, 0.3), None),
        ({"mean": [51.0], "std": [127.5]}, (0.2,), (0.5,)),  # of 0..255
        ({"mean": [102.0], "std": [1.0]}, (0.4,), (1 / 255,)),  # as Caffe has them
        ({"mean": [102.0]}, (0.4,), None),
        ({"args": Namespace(mean=None, std=[0.0]), "mean": "a", "std": [float("nan")]}, None, None),
        ({"mean": [True], "std": [[0.5]], "interpolation": "random", "crop_pct": 7}, None, None),
    ],
)
def test_what_is_read_of_it(said: dict[str, Any], mean: Any, std: Any) -> None:
    found = stated(said).preprocess
    assert found.mean == pytest.approx(mean) and found.std == pytest.approx(std)
    assert found.interpolation is None and found.crop_pct is None


def test_metadata_is_text() -> None:
    texts = {"mean": "(0.1, 0.2, 0.3)", "std": "0.5 0.5,0.5", "crop_pct": "0.9",
             "args": '{"model": "x"}', "deep": "[" * 5000}  # fmt: skip
    found = stated({key: parsed(text) for key, text in texts.items()})
    assert found.preprocess.mean == (0.1, 0.2, 0.3) and found.preprocess.std == (0.5,) * 3
    assert found.preprocess.crop_pct == 0.9 and found.architectures == ("x",)
    texts = {"config": "{'mean': (0.1, 0.2, 0.3)}", "classes": "['a', 'b']"}
    found = stated({key: parsed(text) for key, text in texts.items()})
    assert found.preprocess.mean == (0.1, 0.2, 0.3) and found.labels == ("a", "b")


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (["a", " b\n c"], ("a", "b c")),
        ({"0": "a", "2": "c"}, ("a", "", "c")),
        ({"b": 1, "a": 0}, ("a", "b")),
        ({0: "a"}, ("a",)),
        ({"a": -1}, ()),
        ({"0": "a", "1": 3}, ()),
        ({str(10**8): "a"}, ()),
        ([1], ()),
        ("ab", ()),
        (10, ()),
    ],
)
def test_names_of_classes(given: Any, names: tuple[str, ...]) -> None:
    assert names_of(given) == names


def test_load_says_and_the_model_states(tmp_path: Path) -> None:
    path, given = safetensors_bare(tmp_path, made())
    with pytest.warns(UserWarning, match="does not say its preprocessing: mean .* assumed"):
        model = elsa.load(path, **given)
    assert model.elsa_assumed == ALL
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = elsa.load(path, **given, **STATED)
    assert model.pretrained_cfg["mean"] == (0.3, 0.3, 0.3) and model.elsa_assumed == ()
    assert timm.data.resolve_model_data_config(model)["interpolation"] == "nearest"
