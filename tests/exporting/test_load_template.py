"""load.py of a bundle, alone: what it prints, writes and refuses, and which images it opens."""

import copy
import csv
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import Answer
from PIL import Image
from processes import python

from elsa_core.exporting.templates import load as template

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

FACTS: dict[str, Any] = {
    "preprocess": {
        "input_size": [3, 224, 224], "mean": [0.5] * 3, "std": [0.5] * 3, "crop_pct": 0.9,
        "interpolation": "bicubic", "assumed": ["mean", "std"],
    },
    "model": {"weights": "random (seed 0)", "dtype": "float32", "device": "cpu"},
    "outputs": [{"name": "logits"}],
    "labels": None,
    "artefacts": {"onnx": {"file": "model.onnx", "runtime": {"onnxruntime": ">=1.23"}}},
    "artefacts_libraries": {"onnxruntime": []},
}  # fmt: skip
# logits 0, 1, 2 times the mean pixel of an image of any size and number of channels
MODEL = """<ir_version: 8, opset_import: ["" : 18]>
one (float[batch, channels, height, width] image) => (float[batch, 3] logits) {
    axes = Constant<value = int64[3] {1, 2, 3}>()
    last = Constant<value = int64[1] {1}>()
    steps = Constant<value = float[3] {0.0, 1.0, 2.0}>()
    mean = ReduceMean<keepdims = 0>(image, axes)
    column = Unsqueeze(mean, last)
    logits = Mul(column, steps)
}"""


class Bundle:
    """A folder with load.py, its model and `facts`, which are written before each use."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.facts, self.capsys = folder, copy.deepcopy(FACTS), capsys
        onnx.save(onnx.parser.parse_model(MODEL), folder / "model.onnx")
        (folder / "load.py").write_text(Path(template.__file__).read_text())
        spec = importlib.util.spec_from_file_location("load_of_bundle", folder / "load.py")
        assert spec is not None and spec.loader is not None
        self._module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self._module)

    @property
    def py(self) -> Any:
        (self.folder / "manifest.json").write_text(json.dumps(self.facts))
        return self._module

    def main(self, *arguments: object) -> Answer:
        self.capsys.readouterr()
        return Answer(int(self.py.main(list(map(str, arguments)))), *self.capsys.readouterr())

    def channels(self, count: int) -> None:
        self.facts["preprocess"] |= {
            "input_size": [count, 16, 16], "mean": [0.25] * count, "std": [0.5] * count,
            "crop_pct": 1.0, "interpolation": "bilinear",
        }  # fmt: skip

    def pictures(self, *levels: int, under: str = "images") -> Path:
        """A folder of grey images."""
        place = self.folder / under
        place.mkdir(exist_ok=True, parents=True)
        for level in levels:
            Image.new("RGB", (30, 20), (level,) * 3).save(place / f"{level:03}.png")
        return place


@pytest.fixture
def bundle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Bundle:
    return Bundle(tmp_path, capsys)


def test_what_was_assumed_is_said(bundle: Bundle) -> None:
    bundle.facts["model"]["weights"] = "a.safetensors"
    images = bundle.pictures(0)
    said = bundle.main(images)
    assert "mean [0.5, 0.5, 0.5], std [0.5, 0.5, 0.5] assumed" in said.err
    assert " assumed" not in said.shows()
    bundle.facts["preprocess"]["assumed"] = []
    again = bundle.main(images)
    assert (again.code, again.err) == (0, "")


def test_images_that_are_none(bundle: Bundle) -> None:
    place = bundle.folder
    (place / "eps.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 20\n")
    with pytest.raises(OSError, match="cannot identify"):
        bundle.py.preprocess(str(place / "eps.png"))
    os.mkfifo(place / "fifo.png")
    for path in (place / "fifo.png", "/dev/zero"):
        with pytest.raises(ValueError, match="not a regular file"):
            bundle.py.preprocess(path)
    Image.new("L", (1, 60_000)).save(place / "thin.png")
    with pytest.raises(ValueError, match="after resizing"):
        bundle.py.preprocess(place / "thin.png")


@pytest.mark.parametrize("kind", ["u1.npy", "u2.npy", "f4.npy", "pages.tif"])
def test_images_of_five_channels(bundle: Bundle, kind: str) -> None:
    bundle.channels(5)
    levels = np.array([0, 51, 102, 153, 255])
    path = bundle.folder / kind
    if kind == "pages.tif":
        first, *rest = (Image.new("L", (20, 16), int(level)) for level in levels)
        first.save(path, save_all=True, append_images=rest)
    else:
        scale = {"u1": 1, "u2": 257, "f4": 1 / 255}[kind[:2]]
        np.save(path, np.broadcast_to((levels * scale).astype(kind[:2]), (16, 20, 5)))
    found = bundle.py.preprocess(path)
    assert found.shape == (1, 5, 16, 16) and found.dtype == np.float32
    np.testing.assert_allclose(found[0, :, 3, 5], (levels / 255 - 0.25) / 0.5, atol=1e-6)
    for given in (path, bundle.folder):  # a folder's arrays are found
        assert bundle.main(given).code == 0


def test_a_photograph_is_not_five_channels(bundle: Bundle) -> None:
    bundle.channels(5)
    images = bundle.pictures(10)
    np.save(images / "a.npy", np.zeros((5, 16, 16), np.uint8))
    code, _, said = bundle.main(images)
    assert code == 1
    assert "the image has 3 channels (PNG RGB), the model takes 5: give a .npy [height" in said
    assert "uint8 [5, 16, 16] is not [height, width, 5]" in said


@pytest.mark.parametrize("mode", ["center", "squash", "border"])
@pytest.mark.parametrize("size", [(90, 70), (50, 131)])
@pytest.mark.parametrize("count", [1, 3])
def test_images_are_cropped_as_timm_does(
    bundle: Bundle, mode: str, size: tuple[int, int], count: int
) -> None:
    from timm.data import create_transform

    bundle.channels(count)
    given = bundle.facts["preprocess"]
    given |= {"crop_mode": mode, "crop_pct": 0.9, "input_size": [count, 32, 32]}
    noise = np.random.default_rng(1).integers(0, 255, (size[1] // 8, size[0] // 8, 3), np.uint8)
    image = Image.fromarray(noise).resize(size).convert("RGB" if count == 3 else "L")
    keys = ("mean", "std", "crop_pct", "crop_mode", "interpolation")
    theirs = create_transform((count, 32, 32), **{key: given[key] for key in keys})(image).numpy()
    assert np.abs(bundle.py.preprocess(image)[0] - theirs).max() < 0.02


def test_grey_of_a_photograph(bundle: Bundle) -> None:
    bundle.channels(1)
    Image.new("RGB", (20, 16), (255, 0, 0)).save(bundle.folder / "red.png")
    found = bundle.py.preprocess(bundle.folder / "red.png")
    np.testing.assert_allclose(found, np.full((1, 1, 16, 16), (76 / 255 - 0.25) / 0.5), atol=1e-6)


def test_probabilities_with_names(bundle: Bundle) -> None:
    names = bundle.folder / "names.txt"
    names.write_text("cat\ndog\nowl, bird\n")
    said = bundle.main(bundle.pictures(255), "--labels", names, "--top", 2)
    # A white image is 1 after normalising: logits 0, 1, 2.
    shares = np.exp([0, 1, 2]) / np.exp([0, 1, 2]).sum()
    head, first, second = said.shows().splitlines()
    assert head.endswith("255.png")
    assert first.split(maxsplit=2) == [f"{shares[2]:.2%}", "2", "owl, bird"]
    assert second.split(maxsplit=2) == [f"{shares[1]:.2%}", "1", "dog"]
    assert "the weights are random" in said.err
    names.write_text("cat\ndog\n")  # of another model
    code, out, err = bundle.main(bundle.folder / "images", "--labels", names)
    assert (code, out) == (1, "")
    assert err.splitlines()[-1] == "error: --labels: 2 names for 3 classes"


@pytest.mark.parametrize("size", ["1", "2", "8"])
def test_folders_in_batches_as_csv_and_json(bundle: Bundle, size: str) -> None:
    images = bundle.pictures(0, 100, 200)
    bundle.pictures(50, under="images/more")
    (images / "notes.txt").write_text("no image")
    given = [images, images / "000.png", "--batch-size", size]
    assert bundle.main(*given, "-o", bundle.folder / "out.csv", "--top", 1).code == 0
    with (bundle.folder / "out.csv").open() as file:
        rows = list(csv.DictReader(file))
    names = [Path(row["file"]).name for row in rows]
    assert names == ["000.png", "100.png", "200.png", "050.png", "000.png"]
    # Dark images are negative after normalising: class 0 leads.
    assert [row["class"] for row in rows] == ["0", "0", "2", "0", "0"]
    assert bundle.main(*given, "-o", bundle.folder / "out.json").code == 0
    entries = json.loads((bundle.folder / "out.json").read_text())
    assert len(entries) == 5 and len(entries[0]["classes"]) == 3
    total = sum(one["probability"] for one in entries[0]["classes"])
    assert total == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("content", [b"no image", b"P6\n30000 30000\n255\n"])
def test_a_damaged_image_is_named_and_the_others_run(bundle: Bundle, content: bytes) -> None:
    """One that Pillow takes for a decompression bomb ended the run, and the others were lost."""
    images = bundle.pictures(10, 20)
    (images / "015.png").write_bytes(content)
    said = bundle.main(images)
    said.shows("010.png", "020.png", code=1)
    assert "error: " in said.err and "015.png" in said.err
    said = bundle.main(images, "--skip-unreadable")
    said.shows("020.png")
    assert "skipped: " in said.err and "015.png" in said.err


def test_names_do_not_steer_a_terminal(bundle: Bundle) -> None:
    bad = "\x1b[31m\x07\r\u202eé"
    images, names = bundle.pictures(10, under=f"{bad}images"), bundle.folder / "names.txt"
    (images / f"{bad}.png").write_bytes(b"no image")
    names.write_text(f"cat{bad}\ndog\nowl\n".replace("\r", ""))
    given = [images, "--labels", names]
    said, none = bundle.main(*given), bundle.main(f"{bad}.png")
    written = bundle.main(*given, "-o", bundle.folder / "out.csv")
    assert said.code == none.code == written.code == 1
    for text in (said.out, said.err, (bundle.folder / "out.csv").read_text(), none.err):
        assert repr(bad)[1:-1].replace(r"\r", "") in text.replace(r"\r", "")
        assert text.replace("\n", "").isprintable()


def test_features_are_written_whole(bundle: Bundle) -> None:
    bundle.facts["outputs"] = [{"name": "features"}]
    assert bundle.main(bundle.pictures(255), "-o", bundle.folder / "out.csv").code == 0
    cells = (bundle.folder / "out.csv").read_text().strip().split(",")
    assert [float(cell) for cell in cells[1:]] == pytest.approx([0, 1, 2])


def test_nothing_to_run(bundle: Bundle) -> None:
    (bundle.folder / "empty").mkdir()
    code, _, err = bundle.main(bundle.folder / "empty")
    assert code == 1 and "error: no image in" in err
    for option, value in (("-o", "out.txt"), ("--top", 0), ("--batch-size", -1)):
        with pytest.raises(SystemExit):
            bundle.main(bundle.folder, option, value)


def run_without(package: str, bundle: Bundle, *arguments: str) -> subprocess.CompletedProcess[str]:
    """load.py as a program, on a machine that lacks a package."""
    hidden = (
        f"import runpy, sys; sys.modules[{package!r}] = None; sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    return python("-c", hidden, bundle.py.__file__, *arguments, timeout=60)


@pytest.mark.parametrize("package", ["numpy", "PIL"])
def test_missing_packages_name_the_pip_line(bundle: Bundle, package: str) -> None:
    done = run_without(package, bundle, "--help")
    assert done.returncode == 0 and done.stdout.startswith("usage:") and done.stderr == ""
    done = run_without(package, bundle, "a.png")
    assert done.returncode == 1 and done.stdout == ""
    line = "error: load.py needs numpy and pillow: pip install numpy pillow"
    assert done.stderr.splitlines() == [line]


@pytest.mark.parametrize("arguments", [[], ["--format", "onnx"]], ids=str)
def test_a_missing_runtime_names_the_pip_line(bundle: Bundle, arguments: list[str]) -> None:
    done = run_without("onnxruntime", bundle, str(bundle.pictures(0)), *arguments)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.splitlines()[-1] == (
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


def test_another_device_is_for_onnx(bundle: Bundle) -> None:
    """`--device cpu` took model.pt2 of a GPU's bundle, and said that it is for cuda alone."""
    bundle.facts["model"]["device"] = "cuda"
    bundle.facts["artefacts"]["pt2"] = {"file": "model.pt2"}
    for device in ("", "cuda"):
        with pytest.raises(FileNotFoundError, match=r"model\.pt2"):
            bundle.py.load(device=device)
    images = np.ones((2, 3, 8, 8), np.float32)
    assert np.array_equal(bundle.py.load(device="cpu")(images)[0], [[0, 1, 2]] * 2)
    with pytest.raises(ValueError, match=r"model\.pt2 is for cuda alone"):
        bundle.py.load("pt2", device="cpu")


def test_openvino_is_no_runtime_of_a_gpu(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it alone is installed, a model that was exported for a GPU ran on the CPU."""
    with pytest.raises(ValueError, match="OpenVINO reads no functions: `elsa export --onnx-mode"):
        bundle.py.load("onnx", runtime="openvino")
    pytest.importorskip("openvino", reason="OpenVINO is not installed")
    bundle.facts["artefacts"]["onnx"]["mode"] = "standard"
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert bundle.py.runtime_of(bundle.facts, "onnx") == "openvino"
    with pytest.raises(ValueError, match="runs on cuda by onnxruntime-gpu"):
        bundle.py.load("onnx", device="cuda")
    bundle.facts["model"]["device"] = "cuda"
    with pytest.raises(ImportError, match="pip install 'onnxruntime-gpu>="):
        bundle.py.load("onnx")


@pytest.mark.parametrize(
    ("device", "seen"), [([], [4, 2]), (["--device", "cuda"], [4, 2]), (["--device", "cpu"], [5])]
)
def test_images_fill_up_the_batches_that_a_gpu_has_plans_for(
    bundle: Bundle, device: list[str], seen: list[int]
) -> None:
    """Five images, with the default of eight at once, had no plan."""
    bundle.facts["artefacts_libraries"]["cuda"] = ["lib/a.so", "lib/a.elsa"]
    bundle.facts["reference"] = {"batch_sizes": [2, 4]}
    images = bundle.pictures(0, 100, 200, 210, 220)
    rows: list[int] = []
    model = bundle.py.load()

    def counted(images: Any) -> Any:
        rows.append(len(images))
        return model(images)

    given = bundle.py._arguments([str(images), "--top", "1", *device])
    entries = list(bundle.py.predictions(counted, bundle.py.images_in([str(images)]), given))
    assert rows == seen
    assert [entry["classes"][0]["class"] for entry in entries] == [0, 0, 2, 2, 2]


def test_what_a_runtime_says_is_one_line(bundle: Bundle) -> None:
    """A GPU's bundle at a batch that has no plan ended in a traceback."""
    path = bundle.folder / "model.onnx"
    fixed = MODEL.replace("float[batch, channels, height, width]", "float[7, 3, 8, 8]")
    onnx.save(onnx.parser.parse_model(fixed), path)
    code, _, err = bundle.main(bundle.pictures(255))
    last = err.splitlines()[-1]
    assert code == 1 and last.startswith("error: ") and "invalid dimensions" in last
