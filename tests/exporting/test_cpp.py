"""examples/cpp: built with CMake against this torch, it runs bundles on an image without Python."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from elsa_core.exporting.bundle import Bundle, export
from elsa_core.loading.loader import Loaded, load_model
from elsa_core.patching.rewrite import patch

SOURCE = Path(__file__).parents[2] / "examples" / "cpp"


def _cmake() -> str | None:
    """The cmake of this environment (a pip install), or the system's."""
    beside = Path(sys.executable).with_name("cmake")
    return str(beside) if beside.exists() else shutil.which("cmake")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cmake = _cmake()
    if cmake is None:
        pytest.skip("cmake is not installed: pip install cmake")
    build = tmp_path_factory.mktemp("build")
    for command in (
        [cmake, "-S", str(SOURCE), "-B", str(build), f"-DPython3_EXECUTABLE={sys.executable}"],
        [cmake, "--build", str(build)],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return build / "elsa_run"


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
    mean, std = (torch.tensor(row).view(1, 3, 1, 1) for row in (loaded.mean, loaded.std))
    with torch.no_grad():
        logits = loaded.model((pixels - mean) / std)[0]
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [int(row[0]) for row in rows] == logits.topk(5).indices.tolist()
    values = torch.tensor([float(row[1]) for row in rows])
    assert torch.allclose(values, logits.topk(5).values, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_vit_runs(program: Path, bundle: Bundle, vit: Loaded, tmp_path: Path, batch: int) -> None:
    pixels = image(64, tmp_path / "image.ppm")
    agrees(run(program, bundle.path, tmp_path / "image.ppm", batch), vit, pixels)


def test_a_swin_runs(program: Path, tmp_path: Path) -> None:
    loaded = load_model("swin_tiny_patch4_window7_224", image_size=56, seed=1)
    patch(loaded.model)
    made = export(loaded.model, tmp_path / "swin", formats=("torchscript",), loaded=loaded)
    pixels = image(56, tmp_path / "image.ppm")
    agrees(run(program, made.path, tmp_path / "image.ppm"), loaded, pixels)
    image(90, tmp_path / "larger.ppm")
    assert run(program, made.path, tmp_path / "larger.ppm").returncode == 0


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
