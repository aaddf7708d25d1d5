"""`verify` on bundles that were damaged or made to do harm: one line, and nothing outside."""

import io
import json
import os
import shutil
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import Elsa

from elsa_core.errors import ModelError, UnavailableError
from elsa_core.exporting import archive
from elsa_core.exporting.manifest import hashed
from elsa_core.exporting.verify import verify


def rewrite(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = directory / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def rehashed(directory: Path, name: str) -> None:
    """The manifest has the hash of what a file holds now."""
    entry = vars(hashed(directory / name))
    rewrite(directory, lambda m: m["files"][name].update(entry))


def test_one_flipped_byte(copy: Path, elsa: Elsa) -> None:
    for name in ("model.ts", "model.onnx", "model.pt2", "model.safetensors",
                 "lib/libelsa_torch.so", "load.py", "reference.npz"):  # fmt: skip
        path = copy / name
        whole = path.read_bytes()
        content = bytearray(whole)
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        said = elsa("verify", copy)._replace(out="")  # a table of what was found
        said.fails(1, name, "differs from its sha256")
        path.write_bytes(whole)


def test_missing_extra_and_short_files(copy: Path) -> None:
    (copy / "model.ts").unlink()
    (copy / "lib" / "more.so").touch()
    (copy / "__pycache__").mkdir()
    (copy / "__pycache__" / "load.cpython-311.pyc").touch()
    path = copy / "load.py"
    path.write_bytes(path.read_bytes()[:-1])
    report = verify(copy)
    assert not report.ok and report.artefacts == ()
    assert "model.ts is missing" in report.failures
    assert "lib/more.so is not in the manifest" in report.failures
    assert any(line.endswith("delete __pycache__") for line in report.failures)
    assert any(line.startswith("load.py has") for line in report.failures)


@pytest.mark.parametrize("name", ["model.ts", "lib", "manifest.json", "more", "lib/more"])
def test_links_are_refused(copy: Path, tmp_path: Path, name: str) -> None:
    """The target of one that no file system follows was asked for before the link was seen: an
    OSError, and no verdict."""
    path, elsewhere = copy / name, tmp_path / "elsewhere"
    if path.exists():
        path.rename(elsewhere)
    else:
        elsewhere.touch()
    for target in (elsewhere, "x" * 300):
        path.symlink_to(target)
        with pytest.raises(ModelError, match=r"is a link|no regular file"):
            verify(copy)
        path.unlink()


def _add_file(path: str) -> Callable[[dict[str, Any]], Any]:
    return lambda m: m["files"].update({path: {"size": 1, "sha256": "0" * 64}})


CHANGES: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (_add_file("/etc/passwd"), "leads outside"),
    (_add_file("../secret"), "leads outside"),
    (_add_file("lib/../../secret"), "leads outside"),
    (_add_file("manifest.json"), "leads outside"),
    (lambda m: m.update(schema_version=2), "schema_version 2"),
    (lambda m: m.update(schema_version=True), "no schema_version"),
    (lambda m: m.update(schema_version="1"), "no schema_version"),
    (lambda m: m.update(kind="other"), "not the manifest"),
    (lambda m: m.update(files=[]), "files must be"),
    (lambda m: m.update(files={}), "files must be"),
    (lambda m: m["files"].update({"a": 3}), "size and a sha256"),
    (lambda m: m["files"]["model.ts"].update(size=-1), "size and a sha256"),
    (lambda m: m["files"]["model.ts"].update(size=10**400), "size and a sha256"),
    (lambda m: m["files"]["model.ts"].update(sha256="0"), "size and a sha256"),
    (lambda m: m.update(artefacts={}), "artefacts must name"),
    (lambda m: m.update(artefacts={"exe": {"file": "load.py"}}), "artefacts must name"),
    (lambda m: m["artefacts"].update(pt2={}), "names no file"),
    (lambda m: m["artefacts"]["pt2"].update(file="/bin/sh"), "not among the files"),
    (lambda m: m.update(artefacts_libraries={}), "artefacts_libraries"),
    (lambda m: m["artefacts_libraries"].update(torch=["/x.so"]), "not among the files"),
    (lambda m: m["model"].update(device="tpu"), "malformed"),
    (lambda m: m["model"].update(dtype="save"), "malformed"),
    (lambda m: m["reference"].update(batch_sizes=[0]), "malformed"),
    (lambda m: m["reference"].update(batch_sizes=[10**9]), "malformed"),
    (lambda m: m["reference"].update(batch_sizes=[9]), "reference"),
    (lambda m: m["reference"].update(eps="x"), "reference"),
    (lambda m: m["reference"].update(eps=1.0), "no numbers"),
    (lambda m: m["reference"]["original_norms"].update({"1": [[1e308, 1.0]]}), "no numbers"),
    (lambda m: m["reference"]["original_norms"].update({"1": [[10**400, 1]]}), "reference"),
    (lambda m: m.update(inputs=[]), "malformed"),
    (lambda m: m.update(outputs=["logits"]), "malformed"),
    (lambda m: m["outputs"][0].pop("shape"), "malformed"),
    (lambda m: m["model"].update(name="\x1b[2J"), "malformed"),
    (lambda m: m["outputs"][0].update(name="a\nb"), "malformed"),
    (lambda m: m["artefacts"]["pt2"].update(operators=3), "malformed operators"),
    (lambda m: m["artefacts"]["pt2"].update(runtime=[]), "malformed operators"),
]


def test_manifests_that_cannot_be(copy: Path) -> None:
    whole = (copy / "manifest.json").read_text()
    for change, words in CHANGES:
        (copy / "manifest.json").write_text(whole)
        rewrite(copy, change)
        with pytest.raises(ModelError) as caught:
            verify(copy)
        message = str(caught.value)
        assert words in message and "\n" not in message


def test_manifests_that_are_not_json(copy: Path) -> None:
    for content in (b"", b"[1]", b"\xff", b'{"a": 1, "a": 2}', b"[" * 100_000, b"x" * 17_000_000):
        (copy / "manifest.json").write_bytes(content)
        with pytest.raises(ModelError, match=r"manifest\.json"):
            verify(copy)


def test_a_reference_that_is_none(copy: Path, elsa: Elsa) -> None:
    """Nor is one that holds a pickle."""
    pickled, objects = io.BytesIO(), np.array([{"run": "me"}], dtype=object)
    np.savez(pickled, **{"input.0": objects, "oracle.0": objects})
    empty = (b"", b"PK", b"PK\x03\x04" + b"\0" * 40, b"\x93NUMPY", b"x")
    for content in (*empty, pickled.getvalue()):
        (copy / "reference.npz").write_bytes(content)
        rehashed(copy, "reference.npz")
        elsa("verify", copy, "--trust", "--quiet").fails(4, "does not hold the reference")


def test_what_this_machine_cannot_run_is_skipped_by_name(copy: Path, elsa: Elsa) -> None:
    rewrite(copy, lambda m: [x.update(platform="linux-riscv64") for x in m["libraries"].values()])
    report = verify(copy)
    assert report.ok and set(report.skipped) == {"torchscript", "onnx", "pt2"}
    assert all("is for linux-riscv64" in each.reason for each in report.artefacts)
    answer = elsa("verify", copy, "--trust")
    assert "nothing was run" in answer.shows() and answer.err.count("was skipped") == 3
    if not torch.cuda.is_available():
        rewrite(copy, lambda m: m["model"].update(device="cuda"))
        assert verify(copy).artefacts[0].reason == "it needs a CUDA GPU, and none is here"


def test_a_missing_runtime_is_named(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = 'raise ModuleNotFoundError("No module named onnxruntime", name="onnxruntime")'
    (tmp_path / "onnxruntime.py").write_text(missing)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    rewrite(copy, lambda m: [m["artefacts"].pop(name) for name in ("torchscript", "pt2")])
    report = verify(copy)
    assert report.ok and report.artefacts[0].reason == "onnxruntime is not installed"


def test_a_body_that_computes_something_else(copy: Path) -> None:
    """With the library model.onnx is right; other runtimes would run the bodies of its nodes."""
    onnx = pytest.importorskip("onnx")
    model = onnx.load(copy / "model.onnx")
    softmaxes = [n for f in model.functions for n in f.node if n.op_type == "Softmax"]
    assert softmaxes
    for node in softmaxes:
        node.op_type = "LogSoftmax"
    onnx.save(model, copy / "model.onnx")
    rehashed(copy, "model.onnx")
    rewrite(copy, lambda m: [m["artefacts"].pop(name) for name in ("torchscript", "pt2")])
    report = verify(copy)
    assert report.failures[0].startswith("onnx: without the library, at batch 1: error")
    rewrite(copy, lambda m: m["artefacts"]["onnx"].update(mode="custom-only"))
    assert verify(copy).ok


def test_an_artefact_that_computes_something_else(copy: Path) -> None:
    """All hashes right, and the oracle another: the run tells, in a process of its own."""

    def other(manifest: dict[str, Any]) -> None:
        norms = manifest["reference"]["original_norms"]
        manifest["reference"]["original_norms"] = {k: [[0.0, 0.0]] for k in norms}
        manifest["reference"]["eps"] = 1e-12
        for name in ("onnx", "pt2"):
            del manifest["artefacts"][name]

    rewrite(copy, other)
    report = verify(copy)
    assert [each.status for each in report.artefacts] == ["failed"]
    assert report.failures[0].startswith("torchscript: at batch 1: error")


def test_what_is_no_bundle(copy: Path, elsa: Elsa) -> None:
    (copy / "empty").mkdir()
    (copy / "text.zip").write_text("no zip")
    for given in ("nothing", "nothing.zip", "manifest.json", "empty", "text.zip", "/dev/null"):
        elsa("verify", copy / given).fails(4)


def zipped(directory: Path) -> Path:
    target = directory.with_suffix(".zip")
    archive.write_zip(directory, target)
    return target


def test_a_zip_of_a_zip_bomb(tmp_path: Path) -> None:
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("manifest.json", "{}")
        with file.open("model.ts", "w", force_zip64=True) as sink:
            for _ in range(256):
                sink.write(bytes(1 << 20))
    assert path.stat().st_size < 1_000_000
    with pytest.raises(ModelError, match="zip bomb"):
        verify(path)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_zip_with_names_that_no_directory_holds(copy: Path, tmp_path: Path) -> None:
    path = zipped(copy)
    whole, before = path.read_bytes(), sorted(tmp_path.iterdir())
    for name, words in (
        ("../out.py", "leads outside"),
        ("/tmp/out.py", "leads outside"),
        ("lib/../../out.py", "leads outside"),
        ("a\\..\\out.py", "leads outside"),
        ("é" * 200, "leads outside"),
        ("lib/link.so", "is a link"),
        ("load.py", "occurs twice"),
        ("model.ts/x", "'model.ts' is both a file and a folder"),
        ("manifest.json/x/y", "'manifest.json' is both a file and a folder"),
    ):
        path.write_bytes(whole)
        info = zipfile.ZipInfo(name)
        if name == "lib/link.so":
            info.external_attr = (stat.S_IFLNK | 0o777) << 16
        with zipfile.ZipFile(path, "a") as file:
            file.writestr(info, "/etc/passwd")
        with pytest.raises(ModelError, match=words):
            verify(path)
        assert sorted(tmp_path.iterdir()) == before


def test_a_zip_that_is_damaged_cut_or_has_more(copy: Path) -> None:
    path = zipped(copy)
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as file:
        start = file.getinfo("model.safetensors").header_offset
    path.write_bytes(whole[: start + 200] + b"x" + whole[start + 201 :])
    with pytest.raises(ModelError, match="damaged zip"):
        verify(path)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match=r"no bundle|damaged"):
        verify(path)
    path.write_bytes(whole)
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("more.bin", b"x" * 100)
    assert verify(path, run=False).failures == ("more.bin is not in the manifest",)


@pytest.mark.parametrize("place", [0, 9])
def test_a_zip_whose_compressed_bytes_are_damaged(copy: Path, place: int) -> None:
    path, name = copy.with_suffix(".zip"), "model.safetensors"
    with zipfile.ZipFile(path, "w") as file:
        file.write(copy / "manifest.json", "manifest.json")
        file.write(copy / name, name, compress_type=zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(path) as file:
        start = file.getinfo(name).header_offset + 30 + len(name) + place
    content = bytearray(path.read_bytes())
    content[start : start + 40] = b"\xff" * 40
    path.write_bytes(bytes(content))
    with pytest.raises(ModelError, match="damaged zip"):
        verify(path, run=False)


def test_a_zip_with_an_empty_name(copy: Path) -> None:
    path = zipped(copy)
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("empty-name", "x")
    path.write_bytes(path.read_bytes().replace(b"empty-name", b"\0mpty-name"))
    with pytest.raises(ModelError, match="leads outside"):
        verify(path, run=False)


def test_no_room_to_unpack(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = zipped(copy)
    free = shutil._ntuple_diskusage(1, 1, 0)  # type: ignore[attr-defined]
    monkeypatch.setattr(archive.shutil, "disk_usage", lambda _: free)
    with pytest.raises(UnavailableError, match="0 are free"):
        verify(path, run=False)
