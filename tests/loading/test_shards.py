"""Sharded weights: joined by their index, and no index is trusted."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

from elsa_core.errors import ModelError
from elsa_core.loading.loader import load_model

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        built: nn.Module = timm.create_model("test_vit", img_size=64, num_classes=7).eval()
    return built


def shard(model: nn.Module, directory: Path) -> Path:
    """Write the weights as two files and their index."""
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    names = sorted(state)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    directory.mkdir(exist_ok=True)
    for file, part in files.items():
        save_file({name: state[name] for name in part}, directory / file)
    weight_map = {name: file for file, part in files.items() for name in part}
    index = directory / INDEX
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return index


@pytest.mark.parametrize("image_size", [None, 32])
def test_shards_load_as_one_file(tmp_path: Path, model: nn.Module, image_size: int | None) -> None:
    index = shard(model, tmp_path / "weights")
    loaded = load_model(index, arch="test_vit", image_size=image_size)
    assert loaded.num_classes == 7 and loaded.input_size[1:] == ((image_size or 64),) * 2
    same = torch.equal(loaded.model.state_dict()["blocks.0.attn.qkv.weight"],
                       model.state_dict()["blocks.0.attn.qkv.weight"])  # fmt: skip
    assert same
    if image_size is None:
        inputs = loaded.example_inputs(2)
        with torch.no_grad():
            assert torch.equal(loaded.model(*inputs), model(*inputs))


def test_a_directory_with_shards(tmp_path: Path, model: nn.Module) -> None:
    shard(model, tmp_path)
    config = {"architecture": "test_vit", "num_classes": 7, "model_args": {"img_size": 64}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_model(tmp_path).num_classes == 7


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: {}, "no weight_map"),
        (lambda m: {"weight_map": []}, "no weight_map"),
        (lambda m: {"weight_map": {**m, "cls_token": 3}}, "no .safetensors file beside"),
        (lambda m: {"weight_map": {**m, "cls_token": "../x.safetensors"}}, "beside the index"),
        (lambda m: {"weight_map": {**m, "cls_token": "/x.safetensors"}}, "beside the index"),
        (lambda m: {"weight_map": {**m, "cls_token": "a\\x.safetensors"}}, "beside the index"),
        (lambda m: {"weight_map": {**m, "cls_token": "weights.bin"}}, "beside the index"),
        (lambda m: {"weight_map": {**m, "cls_token": "no.safetensors"}}, "not there"),
        (lambda m: {"weight_map": {**m, "more": "model-2.safetensors"}}, "lacks 'more'"),
        (lambda m: {"weight_map": dict(list(m.items())[1:])}, "also holds"),
    ],
)
def test_an_index_that_does_not_fit(
    tmp_path: Path, model: nn.Module, change: Any, words: str
) -> None:
    index = shard(model, tmp_path)
    index.write_text(json.dumps(change(json.loads(index.read_text())["weight_map"])))
    with pytest.raises(ModelError) as caught:
        load_model(index)
    message = str(caught.value)
    assert words in message and INDEX in message and "\n" not in message


def test_a_damaged_shard(tmp_path: Path, model: nn.Module) -> None:
    index = shard(model, tmp_path)
    path = tmp_path / "model-2.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"model-2\.safetensors is damaged"):
        load_model(index)
    for content in (b"", b"[1]", b"{", b"\xff", b"[" * 100_000):
        index.write_bytes(content)
        with pytest.raises(ModelError, match=r"index\.json"):
            load_model(index)
