"""load.py of a bundle, alone: what it says of the preprocessing, and which images it opens."""

from __future__ import annotations

import copy
import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from elsa_core.exporting.templates import load as template

GIVEN: dict[str, Any] = {
    "input_size": [3, 224, 224],
    "mean": [0.5, 0.5, 0.5],
    "std": [0.5, 0.5, 0.5],
    "interpolation": "bicubic",
    "crop_pct": 0.9,
    "assumed": ["mean", "std"],
}


FACTS: dict[str, Any] = {
    "preprocess": GIVEN,
    "model": {"weights": "random (seed 0)", "dtype": "float32", "device": "cpu"},
    "outputs": [{"name": "logits"}],
    "labels": None,
    "artefacts": {"onnx": {"file": "model.onnx", "runtime": {"onnxruntime": ">=1.23"}}},
}


@pytest.fixture
def facts() -> dict[str, Any]:
    return copy.deepcopy(FACTS)


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any]) -> Path:
    """A folder whose model answers with logits 0, 1, 2 times the mean pixel of an image."""
    (tmp_path / "manifest.json").write_text(json.dumps(facts))

    def model(images: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        return [images.mean((1, 2, 3))[:, None] * np.arange(3, dtype=np.float32)]

    monkeypatch.setattr(template, "manifest", lambda *_: facts)
    monkeypatch.setattr(template, "load", lambda *_, **__: model)
    return tmp_path


def pictures(folder: Path, *levels: int) -> None:
    folder.mkdir(exist_ok=True)
    for level in levels:
        Image.new("RGB", (30, 20), (level,) * 3).save(folder / f"{level:03}.png")


def test_what_was_assumed_is_said(
    bundle: Path, facts: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    facts["model"]["weights"] = "a.safetensors"
    Image.new("RGB", (30, 20)).save(bundle / "a.png")
    assert template.main([str(bundle / "a.png")]) == 0
    said = capsys.readouterr()
    assert "mean [0.5, 0.5, 0.5], std [0.5, 0.5, 0.5] assumed" in said.err
    assert " assumed" not in said.out
    facts["preprocess"]["assumed"] = []
    assert template.main([str(bundle / "a.png")]) == 0
    assert capsys.readouterr().err == ""


def test_images_that_are_none(bundle: Path) -> None:
    (bundle / "eps.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 20\n")
    with pytest.raises(OSError, match="cannot identify"):
        template.preprocess(str(bundle / "eps.png"), bundle)
    os.mkfifo(bundle / "fifo.png")
    for path in (bundle / "fifo.png", "/dev/zero"):
        with pytest.raises(ValueError, match="not a regular file"):
            template.preprocess(path, bundle)
    Image.new("L", (1, 60_000)).save(bundle / "thin.png")
    with pytest.raises(ValueError, match="after resizing"):
        template.preprocess(bundle / "thin.png", bundle)


def channels(facts: dict[str, Any], count: int) -> None:
    facts["preprocess"] |= {
        "input_size": [count, 16, 16], "mean": [0.25] * count, "std": [0.5] * count,
        "crop_pct": 1.0, "interpolation": "bilinear",
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["u1.npy", "u2.npy", "f4.npy", "pages.tif"])
def test_images_of_five_channels(bundle: Path, facts: dict[str, Any], kind: str) -> None:
    channels(facts, 5)
    levels = np.array([0, 51, 102, 153, 255])
    path = bundle / kind
    if kind == "pages.tif":
        first, *rest = (Image.new("L", (20, 16), int(level)) for level in levels)
        first.save(path, save_all=True, append_images=rest)
    else:
        scale = {"u1": 1, "u2": 257, "f4": 1 / 255}[kind[:2]]
        np.save(path, np.broadcast_to((levels * scale).astype(kind[:2]), (16, 20, 5)))
    found = template.preprocess(path)
    assert found.shape == (1, 5, 16, 16) and found.dtype == np.float32
    expected = (levels / 255 - 0.25) / 0.5
    np.testing.assert_allclose(found[0, :, 3, 5], expected, atol=1e-6)
    assert template.main([str(path)]) == 0
    assert template.main([str(bundle)]) == 0  # a folder's arrays are found


def test_a_photograph_is_not_five_channels(
    bundle: Path, facts: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    channels(facts, 5)
    pictures(bundle / "images", 10)
    np.save(bundle / "images" / "a.npy", np.zeros((5, 16, 16), np.uint8))
    assert template.main([str(bundle / "images")]) == 1
    said = capsys.readouterr().err
    assert "the image has 3 channels (PNG RGB), the model takes 5: give a .npy [height" in said
    assert "uint8 [5, 16, 16] is not [height, width, 5]" in said


@pytest.mark.parametrize("mode", ["center", "squash", "border"])
@pytest.mark.parametrize("size", [(90, 70), (50, 131)])
@pytest.mark.parametrize("count", [1, 3])
def test_images_are_cropped_as_timm_does(
    bundle: Path, facts: dict[str, Any], mode: str, size: tuple[int, int], count: int
) -> None:
    from timm.data import create_transform

    channels(facts, count)
    facts["preprocess"] |= {"crop_mode": mode, "crop_pct": 0.9, "input_size": [count, 32, 32]}
    noise = np.random.default_rng(1).integers(0, 255, (size[1] // 8, size[0] // 8, 3), np.uint8)
    image = Image.fromarray(noise).resize(size).convert("RGB" if count == 3 else "L")
    given = facts["preprocess"]
    keys = ("mean", "std", "crop_pct", "crop_mode", "interpolation")
    theirs = create_transform((count, 32, 32), **{key: given[key] for key in keys})(image).numpy()
    assert np.abs(template.preprocess(image)[0] - theirs).max() < 0.02


def test_grey_of_a_photograph(bundle: Path, facts: dict[str, Any]) -> None:
    channels(facts, 1)
    Image.new("RGB", (20, 16), (255, 0, 0)).save(bundle / "red.png")
    found = template.preprocess(bundle / "red.png")
    np.testing.assert_allclose(found, np.full((1, 1, 16, 16), (76 / 255 - 0.25) / 0.5), atol=1e-6)


def test_probabilities_with_names(
    bundle: Path, facts: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    pictures(bundle / "images", 255)
    (bundle / "names.txt").write_text("cat\ndog\nowl, bird\n")
    arguments = [str(bundle / "images"), "--labels", str(bundle / "names.txt"), "--top", "2"]
    assert template.main(arguments) == 0
    said = capsys.readouterr()
    # A white image is 1 after normalising: logits 0, 1, 2.
    shares = np.exp([0, 1, 2]) / np.exp([0, 1, 2]).sum()
    head, first, second = said.out.splitlines()
    assert head.endswith("255.png")
    assert first.split(maxsplit=2) == [f"{shares[2]:.2%}", "2", "owl, bird"]
    assert second.split(maxsplit=2) == [f"{shares[1]:.2%}", "1", "dog"]
    assert "the weights are random" in said.err


def test_names_of_the_bundle(
    bundle: Path, facts: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (bundle / "labels.txt").write_text("one\ntwo\nthree\n")
    facts["labels"] = "labels.txt"
    assert template.class_names(facts, bundle) == ["one", "two", "three"]
    facts["labels"] = None
    assert template.class_names(facts, bundle) == []


@pytest.mark.parametrize("size", ["1", "2", "8"])
def test_folders_in_batches_as_csv_and_json(bundle: Path, size: str) -> None:
    pictures(bundle / "images", 0, 100, 200)
    pictures(bundle / "images" / "more", 50)
    (bundle / "images" / "notes.txt").write_text("no image")
    given = [str(bundle / "images"), str(bundle / "images" / "000.png"), "--batch-size", size]
    assert template.main([*given, "-o", str(bundle / "out.csv"), "--top", "1"]) == 0
    with (bundle / "out.csv").open() as file:
        rows = list(csv.DictReader(file))
    names = [Path(row["file"]).name for row in rows]
    assert names == ["000.png", "100.png", "200.png", "050.png", "000.png"]
    # Dark images are negative after normalising: class 0 leads.
    assert [row["class"] for row in rows] == ["0", "0", "2", "0", "0"]
    assert template.main([*given, "-o", str(bundle / "out.json")]) == 0
    entries = json.loads((bundle / "out.json").read_text())
    assert len(entries) == 5 and len(entries[0]["classes"]) == 3
    total = sum(one["probability"] for one in entries[0]["classes"])
    assert total == pytest.approx(1.0, abs=1e-12)


def test_a_damaged_image_is_named_and_the_others_run(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pictures(bundle / "images", 10, 20)
    (bundle / "images" / "015.png").write_bytes(b"no image")
    assert template.main([str(bundle / "images")]) == 1
    said = capsys.readouterr()
    assert "010.png" in said.out and "020.png" in said.out
    assert "error: " in said.err and "015.png" in said.err
    assert template.main([str(bundle / "images"), "--skip-unreadable"]) == 0
    said = capsys.readouterr()
    assert "020.png" in said.out and "skipped: " in said.err and "015.png" in said.err


def test_names_do_not_steer_a_terminal(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = "\x1b[31m\x07\r\u202eé"
    pictures(bundle / f"{bad}images", 10)
    (bundle / f"{bad}images" / f"{bad}.png").write_bytes(b"no image")
    (bundle / "names.txt").write_text(f"cat{bad}\ndog\nowl\n".replace("\r", ""))
    given = [str(bundle / f"{bad}images"), "--labels", str(bundle / "names.txt")]
    assert template.main(given) == 1
    said = capsys.readouterr()
    assert template.main([*given, "-o", str(bundle / "out.csv")]) == 1
    assert template.main([f"{bad}.png"]) == 1
    said_of_none = capsys.readouterr().err
    for text in (said.out, said.err, (bundle / "out.csv").read_text(), said_of_none):
        assert repr(bad)[1:-1].replace(r"\r", "") in text.replace(r"\r", "")
        assert text.replace("\n", "").isprintable()


def test_features_are_written_whole(bundle: Path, facts: dict[str, Any]) -> None:
    facts["outputs"] = [{"name": "features"}]
    pictures(bundle / "images", 255)
    assert template.main([str(bundle / "images"), "-o", str(bundle / "out.csv")]) == 0
    cells = (bundle / "out.csv").read_text().strip().split(",")
    assert [float(cell) for cell in cells[1:]] == pytest.approx([0, 1, 2])


def test_nothing_to_run(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (bundle / "empty").mkdir()
    assert template.main([str(bundle / "empty")]) == 1
    assert "error: no image in" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        template.main([str(bundle), "-o", "out.txt"])


def test_names_of_another_model_are_refused(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two names for a thousand classes were taken and never shown."""
    pictures(bundle / "images", 255)
    (bundle / "names.txt").write_text("cat\ndog\n")
    assert template.main([str(bundle / "images"), "--labels", str(bundle / "names.txt")]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines()[-1] == "error: --labels: 2 names for 3 classes"


@pytest.mark.parametrize("option", ["--top", "--batch-size"])
@pytest.mark.parametrize("number", ["0", "-1"])
def test_numbers_below_one_are_refused(
    bundle: Path, capsys: pytest.CaptureFixture[str], option: str, number: str
) -> None:
    with pytest.raises(SystemExit):
        template.main([str(bundle), option, number])
    assert "give 1 or more" in capsys.readouterr().err


def run_without(package: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """load.py as a program, on a machine that lacks a package."""
    script = folder / "load.py"
    script.write_text(Path(template.__file__).read_text())
    (folder / "manifest.json").write_text(json.dumps(FACTS))
    hidden = (
        f"import runpy, sys; sys.modules[{package!r}] = None; sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    return subprocess.run(
        [sys.executable, "-c", hidden, str(script), *arguments],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("package", ["numpy", "PIL"])
def test_missing_packages_name_the_pip_line(tmp_path: Path, package: str) -> None:
    done = run_without(package, tmp_path, "--help")
    assert done.returncode == 0 and done.stdout.startswith("usage:") and done.stderr == ""
    done = run_without(package, tmp_path, "a.png")
    assert done.returncode == 1 and done.stdout == ""
    line = "error: load.py needs numpy and pillow: pip install numpy pillow"
    assert done.stderr.splitlines() == [line]


@pytest.mark.parametrize("arguments", [[], ["--format", "onnx"]], ids=str)
def test_a_missing_runtime_names_the_pip_line(tmp_path: Path, arguments: list[str]) -> None:
    Image.new("RGB", (30, 20)).save(tmp_path / "a.png")
    done = run_without("onnxruntime", tmp_path, str(tmp_path / "a.png"), *arguments)
    assert done.returncode == 1 and done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last == (
        "error: model.onnx needs onnxruntime, which is not installed: "
        "pip install 'onnxruntime>=1.23' numpy pillow"
    )


def test_a_bundle_of_plans_beside_the_package(tmp_path: Path) -> None:
    """The package serves its operators itself, by Python until the first call on a GPU: a second
    definition of them ends in many lines."""
    facts = {
        "model": {"device": "cuda"}, "operators": ["elsa::attention"],
        "artefacts_libraries": {"cuda": ["lib/none.so", "lib/none.elsa"]},
    }  # fmt: skip
    template.load_operators(facts, tmp_path)
    with pytest.MonkeyPatch.context() as alone:
        alone.delitem(sys.modules, "elsa_core")
        with pytest.raises(OSError, match=r"none\.so"):
            template.load_operators(facts, tmp_path)


def test_another_device_is_for_onnx(monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any]) -> None:
    """`--device cpu` took model.pt2 of a GPU's bundle, and said that it is for cuda alone."""
    facts["model"]["device"] = "cuda"
    facts["artefacts"]["pt2"] = {"file": "model.pt2"}
    facts["artefacts_libraries"] = {"onnxruntime": []}
    monkeypatch.setattr(template, "manifest", lambda *_: facts)
    monkeypatch.setattr(template.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(template, "_onnx", lambda path, libraries, device: (path.name, device))
    assert template._first(facts, "") == template._first(facts, "cuda") == "pt2"
    assert template.load(device="cpu") == ("model.onnx", "cpu")
    with pytest.raises(ValueError, match=r"model\.pt2 is for cuda alone"):
        template.load("pt2", device="cpu")


def test_openvino_is_no_runtime_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any]
) -> None:
    """Where it alone is installed, a model that was exported for a GPU ran on the CPU."""
    facts["artefacts"]["onnx"]["mode"] = "standard"
    monkeypatch.setattr(template, "manifest", lambda *_: facts)
    alone = {"openvino": "here"}
    monkeypatch.setattr(template.importlib.util, "find_spec", alone.get)
    assert template.runtime_of(facts, "onnx") == "openvino"
    with pytest.raises(ValueError, match="runs on cuda by onnxruntime-gpu"):
        template.load("onnx", device="cuda")
    facts["model"]["device"] = "cuda"
    with pytest.raises(ImportError, match="pip install 'onnxruntime-gpu>="):
        template.load("onnx")


@pytest.mark.parametrize(
    ("device", "seen"), [([], [4, 2]), (["--device", "cuda"], [4, 2]), (["--device", "cpu"], [5])]
)
def test_images_fill_up_the_batches_that_a_gpu_has_plans_for(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any], device: list[str],
    seen: list[int],
) -> None:  # fmt: skip
    """Five images, with the default of eight at once, had no plan."""
    facts["artefacts_libraries"] = {"cuda": ["lib/a.so", "lib/a.elsa"]}
    facts["reference"] = {"batch_sizes": [2, 4]}
    given = ["-o", str(bundle / "out.csv"), "--top", "1", *device]
    rows: list[int] = []
    model = template.load()

    def counted(images: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        rows.append(len(images))
        return model(images)

    monkeypatch.setattr(template, "load", lambda *_, **__: counted)
    pictures(bundle / "images", 0, 100, 200, 210, 220)
    assert template.main([str(bundle / "images"), *given]) == 0
    assert rows == seen
    with (bundle / "out.csv").open() as file:
        classes = [row["class"] for row in csv.DictReader(file)]
    assert classes == ["0", "0", "2", "2", "2"]


class RuntimeRefusedError(Exception):
    """As those of ONNX Runtime, which have no other base."""


@pytest.mark.parametrize("text", ["no kernel is here\nmore", ""])
def test_what_a_runtime_says_is_one_line(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    """A GPU's bundle at a batch that has no plan ended in a traceback."""

    def refuse(*_: Any, **__: Any) -> Any:
        def model(images: Any) -> Any:
            raise RuntimeRefusedError(text)

        return model

    monkeypatch.setattr(template, "load", refuse)
    pictures(bundle / "images", 255)
    assert template.main([str(bundle / "images")]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == ("error: no kernel is here" if text else "error: RuntimeRefusedError('')")
