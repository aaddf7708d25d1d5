"""examples/cpp: built with CMake against this torch, it runs bundles on an image without Python."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from processes import environment, python

from elsa_core.exporting.bundle import Bundle, export
from elsa_core.loading.loader import Loaded, load_model
from elsa_core.patching.rewrite import patch
from elsa_core.proof import check

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "examples" / "cpp"
pytestmark = pytest.mark.compiler

# Exports a model for a GPU and keeps what it gives for `image(160, ...)`.
ON_GPU = """
import sys
from pathlib import Path
import numpy as np, torch
import elsa_core as elsa
from elsa_core.loading.loader import load_model
dtype = getattr(torch, sys.argv[2])
loaded = load_model("vit_tiny_patch16_224", image_size=160, seed=1, device="cuda", dtype=dtype)
model = loaded.model
elsa.patch(model, scope="attention")
compiled = sys.argv[3] == "aoti"
formats = ("pt2",) if compiled else ("torchscript",)
bundle = elsa.export(model, sys.argv[1], formats=formats, aoti=compiled, loaded=loaded)
assert {each.status for each in bundle.artefacts} == {"ok"}, bundle.artefacts
pixels = np.random.default_rng(160).integers(0, 255, (160, 160, 3), dtype=np.uint8)
pixels = torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 255
given = loaded.preprocess
mean, std = (torch.tensor(row).view(1, 3, 1, 1) for row in (given.mean, given.std))
with torch.no_grad():
    logits = model(((pixels - mean) / std).to("cuda", dtype))[0].float().cpu()
torch.save(logits, Path(sys.argv[1]).with_name("expected.pt"))
"""


def _cmake() -> str | None:
    """The cmake of this environment (a pip install), or the system's."""
    beside = Path(sys.executable).with_name("cmake")
    return str(beside) if beside.exists() else shutil.which("cmake")


@pytest.fixture(scope="module")
def program(once: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    cmake = _cmake()
    if cmake is None:
        pytest.skip("cmake is not installed: pip install cmake")
    if not (shutil.which("make") or shutil.which("ninja")):
        pytest.skip("neither make nor ninja is installed")

    def build(folder: Path) -> None:
        for command in (
            [cmake, "-S", str(SOURCE), "-B", str(folder), f"-DPython3_EXECUTABLE={sys.executable}"],
            [cmake, "--build", str(folder)],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            said = " ".join(done.stderr.split())
            if "links the C++ standard library statically" in said:
                pytest.skip(f"{os.environ.get('CXX')} links the C++ standard library statically")
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]

    return once("elsa_run", build) / "elsa_run"


def run(program: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [str(program), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def image(side: int, path: Path) -> torch.Tensor:
    """A random image as PPM; returns it as [1, 3, side, side], 0..1."""
    pixels = np.random.default_rng(side).integers(0, 255, (side, side, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 255


def agrees(done: subprocess.CompletedProcess[str], loaded: Loaded, pixels: torch.Tensor) -> None:
    assert (done.returncode, done.stderr) == (0, "")
    given = loaded.preprocess
    mean, std = (torch.tensor(row).view(1, 3, 1, 1) for row in (given.mean, given.std))
    with torch.no_grad():
        logits = loaded.model((pixels - mean) / std)[0]
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [int(row[0]) for row in rows] == logits.topk(5).indices.tolist()
    values = torch.tensor([float(row[1]) for row in rows])
    assert torch.allclose(values, logits.topk(5).values, rtol=1e-3, atol=1e-4)


def test_a_vit_runs(program: Path, bundle: Bundle, vit: Loaded, tmp_path: Path) -> None:
    pixels, words = image(64, tmp_path / "image.ppm"), (bundle.path, tmp_path / "image.ppm")
    for given in (words, (*words, 3), ("--device", "cpu", *words), (*words, "--device", "cpu")):
        agrees(run(program, *given), vit, pixels)


def test_a_swin_runs(program: Path, tmp_path: Path) -> None:
    loaded = load_model(
        "swin_tiny_patch4_window7_224", image_size=56, seed=1,
        model_kwargs={"depths": [2, 1, 1, 1], "embed_dim": 48},
    )  # fmt: skip
    patch(loaded.model)
    report = check(loaded.model, loaded.example_inputs(1), stress=False)
    made = export(
        loaded.model, tmp_path / "swin", formats=("torchscript",), loaded=loaded, check=report
    )
    pixels = image(56, tmp_path / "image.ppm")
    agrees(run(program, made.path, tmp_path / "image.ppm"), loaded, pixels)
    image(90, tmp_path / "larger.ppm")
    assert run(program, made.path, tmp_path / "larger.ppm").returncode == 0


@pytest.mark.long
def test_a_compiled_package_runs(
    program: Path, compiled: Path, one_block: Loaded, tmp_path: Path
) -> None:
    """model.aoti.pt2, at another batch size too; no model.ts is beside it."""
    pixels = image(64, tmp_path / "image.ppm")
    words = compiled, tmp_path / "image.ppm"
    for given in (words, (*words, 3), ("--format", "aoti", *words)):
        agrees(run(program, *given), one_block, pixels)
    done = run(program, "--format", "torchscript", *words)
    assert done.stderr == f"error: {compiled} has no model.ts\n" and done.returncode == 1


def test_a_format_that_the_bundle_lacks(program: Path, bundle: Bundle, tmp_path: Path) -> None:
    image(64, tmp_path / "image.ppm")
    done = run(program, bundle.path, tmp_path / "image.ppm", "--format", "aoti")
    assert done.stderr == f"error: {bundle.path} has no model.aoti.pt2\n" and done.returncode == 1
    assert run(program, bundle.path, tmp_path / "image.ppm", "--format", "onnx").returncode == 2


def test_a_device_that_the_bundle_is_not_for(program: Path, bundle: Bundle, tmp_path: Path) -> None:
    """One line that names the device and the file that is missing, in both directions."""
    image(64, tmp_path / "image.ppm")
    done = run(program, "--device", "cuda", bundle.path, tmp_path / "image.ppm")
    why = "has no lib/libelsa_cuda.so: it was not exported with --device cuda"
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [f"error: {bundle.path} {why}"]
    (tmp_path / "gpu" / "lib").mkdir(parents=True)
    (tmp_path / "gpu" / "lib" / "libelsa_cuda.so").write_bytes(b"")
    done = run(program, tmp_path / "gpu", tmp_path / "image.ppm", "--device", "cpu")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and "gpu has no lib/libelsa_torch.so: it was not" in line
    for wrong in (("--device",), ("--device", "tpu"), ("--devices", "cpu")):
        done = run(program, bundle.path, tmp_path / "image.ppm", *wrong)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("usage: elsa_run [--device cpu|cuda] [--format ")
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "format"),
    [("float32", "torchscript"), ("float16", "torchscript"), ("bfloat16", "torchscript"),
     ("float32", "aoti"), ("float16", "aoti")],
)  # fmt: skip
def test_a_vit_runs_on_a_gpu(program: Path, tmp_path: Path, dtype: str, format: str) -> None:
    """In a process that has neither Python nor Triton; another batch size is one line, of a
    compiled package among those that PyTorch writes."""
    env = environment(ELSA_CUDA_LIBRARY="1")
    done = python("-c", ON_GPU, tmp_path / "bundle", dtype, format, env=env)
    if format == "aoti" and "links its standard library statically" in done.stderr:
        pytest.skip("the C++ compiler (CXX) links its standard library statically")
    assert done.returncode == 0, done.stderr
    image(160, tmp_path / "image.ppm")
    words = (tmp_path / "bundle", tmp_path / "image.ppm")
    for batch in (1, 2):
        done = run(program, "--device", "cuda", *words, batch)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        rows = [line.split() for line in done.stdout.splitlines()]
        expected = torch.load(tmp_path / "expected.pt", weights_only=True)
        error = 1e-3 if dtype == "float32" else 5e-2
        for index, value in rows:
            assert abs(float(value) - float(expected[int(index)])) <= error
        assert len(rows) == 5
    done = run(program, "--device", "cuda", *words, 7)
    assert done.returncode == 1 and "no kernel is here" in done.stderr
    assert format == "aoti" or len(done.stderr.splitlines()) == 1
    done = run(program, "--device", "cpu", *words)
    assert done.returncode == 1 and "has no lib/libelsa_torch.so" in done.stderr


def test_the_real_reason_is_named(program: Path, tmp_path: Path) -> None:
    picture = tmp_path / "image.ppm"
    image(64, picture)
    (tmp_path / "onnx").mkdir()
    (tmp_path / "onnx" / "manifest.json").write_text("{}")
    (tmp_path / "onnx" / "model.onnx").write_bytes(b"")
    for bundle, words in (
        (tmp_path / "none", "there is no folder"),
        (tmp_path, "is no bundle of elsa export"),
        (tmp_path / "onnx", "has neither model.ts nor model.aoti.pt2: run its load.py"),
    ):
        done = run(program, bundle, picture)
        assert done.returncode == 1 and words in done.stderr, done.stderr


def test_bad_input_is_one_line(program: Path, bundle: Bundle, tmp_path: Path) -> None:
    image(64, tmp_path / "image.ppm")
    (tmp_path / "short.ppm").write_bytes(b"P6\n64 64\n255\nxyz")
    (tmp_path / "text.ppm").write_text("P3 no")
    assert run(program).returncode == 2
    for arguments in (
        (tmp_path, tmp_path / "image.ppm"),
        (bundle.path, tmp_path / "none.ppm"),
        (bundle.path, tmp_path / "short.ppm"),
        (bundle.path, tmp_path / "text.ppm"),
        (bundle.path, tmp_path / "image.ppm", "many"),
    ):
        done = run(program, *arguments)
        assert done.returncode == 1 and done.stdout == ""
        assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
