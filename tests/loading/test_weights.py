"""Weights files are hostile until checked; a good one reads as it was written."""

import argparse
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from elsa_core.errors import ModelError
from elsa_core.loading.recipe import Given
from elsa_core.loading.stated import stated
from elsa_core.loading.weights import read_checkpoint, read_header, read_safetensors

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def refused(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        read_safetensors(path).tensors  # noqa: B018
    message = str(caught.value)
    assert path.name in message and "\n" not in message
    return message


def test_reads_what_safetensors_wrote(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {
        "a": torch.randn(3, 4),
        "module.b": torch.arange(5),
        "empty": torch.zeros(0, 7),
        "scalar": torch.tensor(1.5, dtype=torch.bfloat16),
    }
    save_file(tensors, path, metadata={"architecture": "test_vit"})
    read = read_safetensors(path)
    assert read.metadata == {"architecture": "test_vit"}
    assert read.shapes == {"a": (3, 4), "b": (5,), "empty": (0, 7), "scalar": ()}
    assert torch.equal(read.tensors["a"], tensors["a"])
    assert read_header(path).shapes["empty"] == (0, 7)


@pytest.mark.parametrize(
    ("name", "header", "data", "words"),
    [
        ("not json", b"{not json", b"", "invalid JSON"),
        ("not utf-8", b'{"\xff\xfe": 1}', b"", "invalid UTF-8"),
        ("deep", b"[" * 100_000, b"", "invalid JSON"),
        ("list", [], b"", "invalid JSON"),
        ("infinite", b'{"a": Infinity}', b"", "invalid JSON"),
        ("no tensors", {}, b"", "no tensors"),
        ("metadata", {"__metadata__": {"a": 1}}, b"", "expected a string"),
        ("overlap", {"a": F32, "b": {**F32, "data_offsets": [4, 12]}}, b"\0" * 12, "offset"),
        ("gap", {"a": F32, "b": {**F32, "data_offsets": [12, 20]}}, b"\0" * 20, "offset"),
        ("beyond", {"a": {**F32, "shape": [4], "data_offsets": [0, 16]}}, b"\0" * 8, "covered"),
        ("rest", {"a": F32}, b"\0" * 9, "not fully covered"),
        ("span", {"a": {**F32, "shape": [3]}}, b"\0" * 8, "shape"),
        ("negative", {"a": {**F32, "shape": [-2]}}, b"\0" * 8, "expected usize"),
        ("float shape", {"a": {**F32, "shape": [2.0]}}, b"\0" * 8, "expected usize"),
        ("bool shape", {"a": {**F32, "shape": [True, 2]}}, b"\0" * 8, "expected usize"),
        ("huge shape", {"a": {**F32, "shape": [2**70]}}, b"\0" * 8, "expected usize"),
        ("product", {"a": {**F32, "shape": [2**62, 2**62]}}, b"\0" * 8, "overflow"),
        ("axes", {"a": {**F32, "shape": [2] + [1] * 64}}, b"\0" * 8, "65 axes"),
        ("reversed", {"a": {**F32, "data_offsets": [8, 0]}}, b"\0" * 8, "offset"),
        ("three offsets", {"a": {**F32, "data_offsets": [0, 4, 8]}}, b"\0" * 8, "length 3"),
        ("dtype", {"a": {**F32, "dtype": "F33"}}, b"\0" * 8, "F33"),
        ("missing key", {"a": {"dtype": "F32"}}, b"", "missing field"),
    ],
)
def test_malformed_headers(tmp_path: Path, name: str, header: Any, data: bytes, words: str) -> None:
    assert words in refused(write(tmp_path / f"{name}.safetensors", header, data))


@pytest.mark.parametrize("length", [2**60, 2**64 - 1, 10**9])
def test_a_header_that_claims_too_much(tmp_path: Path, length: int) -> None:
    message = refused(write(tmp_path / "model.safetensors", {"a": F32}, b"\0" * 8, length))
    assert "header too large" in message


def test_truncated_empty_and_text_files(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.randn(64)}, path)
    whole = path.read_bytes()
    for cut in (4, 20, len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert "damaged or no safetensors file" in refused(path) or "too short" in refused(path)
    path.write_bytes(b"")
    assert "empty" in refused(path)
    path.write_text("<!DOCTYPE html><html>404 not found</html>")
    assert "looks like text" in refused(path)


def test_names_of_tensors_do_not_steer_a_terminal(tmp_path: Path) -> None:
    entries = {"\x1b]0;a\x07": F32, "b": {**F32, "data_offsets": [4, 12]}}
    assert refused(write(tmp_path / "m.safetensors", entries, b"\0" * 12)).isprintable()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_name_the_tensor(tmp_path: Path, value: float) -> None:
    path = tmp_path / "model.safetensors"
    bad = torch.ones(8, dtype=torch.float16)
    bad[3] = value
    save_file({"good": torch.ones(2), "blocks.0.bad": bad}, path)
    assert "'blocks.0.bad' holds " in refused(path)


class Hostile:
    """A pickle of it would run a command."""

    def __reduce__(self) -> Any:
        return (eval, ("open('/tmp/elsa-was-here', 'w')",))


W = torch.ones(4, 4)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (W.to_sparse, "is sparse_coo"),
        (lambda: W.to("meta"), "is on the meta device"),
        (lambda: W.to(torch.complex64), "is complex64"),
        (lambda: torch.quantize_per_tensor(W, 0.1, 0, torch.qint8), "is qint8"),
        (lambda: torch.nested.nested_tensor([W, W]), "is nested"),
        (lambda: W * torch.nan, "holds NaN"),
    ],
    ids=["sparse", "meta", "complex", "quantised", "nested", "nan"],
)
def test_tensors_that_are_no_weights(
    tmp_path: Path, made: Callable[[], torch.Tensor], words: str
) -> None:
    torch.save({"a.weight": made()}, tmp_path / "model.pth")
    with pytest.raises(ModelError) as caught:
        read_checkpoint(tmp_path / "model.pth")
    assert f"model.pth: tensor 'a.weight' {words}" in str(caught.value)


def test_what_a_file_says_and_cannot_be_read_is_not_said(tmp_path: Path) -> None:
    """Metadata and training arguments of a hostile file raised what no caller knows."""
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    quantised = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    meta = torch.empty(3, device="meta")
    for mean in (10**400, [0.5, 10**400], torch.eye(3).to_sparse(), nested, quantised, meta):
        assert stated({"args": {"mean": mean, "crop_pct": 0.9}}).preprocess == Given(crop_pct=0.9)
    path = tmp_path / "said.safetensors"
    save_file({"w": torch.ones(2)}, path, metadata={"model_args": "{[]: 1}"})
    assert read_safetensors(path).stated.args == {}


def test_complex_safetensors(tmp_path: Path) -> None:
    save_file({"a": W.to(torch.complex64)}, tmp_path / "model.safetensors")
    assert "tensor 'a' is complex64" in refused(tmp_path / "model.safetensors")


def test_a_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    marker = Path("/tmp/elsa-was-here")
    for zipped in (True, False):
        torch.save({"a": Hostile()}, path, _use_new_zipfile_serialization=zipped)
        with pytest.raises(ModelError, match=r"model\.pth needs pickle.*refused"):
            read_checkpoint(path)
        assert not marker.exists()


def test_a_training_checkpoint_is_unwrapped(tmp_path: Path) -> None:
    path = tmp_path / "last.pth.tar"
    plain, averaged = {"module.w": torch.zeros(2)}, {"_orig_mod.module.w": torch.ones(2)}
    content = {"epoch": 3, "args": argparse.Namespace(model="test_vit"), "state_dict": plain}
    torch.save(content, path)
    read = read_checkpoint(path)
    assert read.stated.architectures == ("test_vit",)
    assert torch.equal(read.tensors["w"], torch.zeros(2))
    torch.save({**content, "state_dict_ema": averaged}, path)
    assert torch.equal(read_checkpoint(path).tensors["w"], torch.ones(2))


def test_checkpoints_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    cases = {b"": "empty", b"just text": "not a PyTorch checkpoint", b"PK\x03\x04rubbish": "not a"}
    for content, words in cases.items():
        path.write_bytes(content)
        with pytest.raises(ModelError, match=words):
            read_checkpoint(path)
    for value in ([1, 2], {"epoch": 1}, torch.ones(2)):
        torch.save(value, path)
        with pytest.raises(ModelError, match="no state dict"):
            read_checkpoint(path)
    torch.save({"w": torch.tensor([float("nan")])}, path)
    with pytest.raises(ModelError, match="'w' holds NaN"):
        read_checkpoint(path)
    torch.jit.script(torch.nn.Linear(2, 2)).save(path)
    with pytest.raises(ModelError, match="TorchScript"):
        read_checkpoint(path)
