"""examples/train.py on generated images: it learns, resumes, and elsa opens what it wrote."""

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from timm.models._hub import has_hf_hub

from elsa_core.loading.loader import load_model
from elsa_core.patching.rewrite import patched_sites

pytestmark = pytest.mark.skipif(
    not has_hf_hub(), reason="this timm does not know the huggingface_hub that is installed"
)
SCRIPT = Path(__file__).parents[2] / "examples" / "train.py"
SHORT = (
    "--model", "test_vit", "--img-size", "32", "--epochs", "3", "--batch-size", "8", "--workers",
    "0", "--device", "cpu", "--aa", "", "--lr", "2e-3", "--ema-decay", "0.9", "--drop-path", "0",
)  # fmt: skip


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes, red and blue, of 16 images to train on and 8 to validate."""
    folder = tmp_path_factory.mktemp("images")
    random = np.random.default_rng(0)
    for part, count in (("train", 16), ("val", 8)):
        for channel, name in ((0, "red"), (2, "blue")):
            place = folder / part / name
            place.mkdir(parents=True)
            for i in range(count):
                pixels = random.integers(0, 80, (40, 40, 3), dtype=np.uint8)
                pixels[..., channel] += 150
                Image.fromarray(pixels).save(place / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


@pytest.fixture(scope="module")
def finished(
    script: dict[str, Any], images: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder: Path = tmp_path_factory.mktemp("run") / "out"
    script["main"]([str(images), "-o", str(folder), *SHORT])
    return folder


def log(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_it_learns_and_elsa_opens_what_it_wrote(finished: Path, images: Path) -> None:
    lines = log(finished)
    assert [line["epoch"] for line in lines] == [0, 1, 2]
    assert lines[-1]["accuracy"] == 1.0
    loaded = load_model(finished / "model")
    assert loaded.input_size == (3, 32, 32)
    red = torch.full((1, 3, 32, 32), -0.5)
    red[:, 0] = 0.6
    with torch.no_grad():
        logits = loaded.model(red)
    names = json.loads((finished / "model" / "config.json").read_text())["label_names"]
    assert names[int(logits.argmax())] == "red"


def test_it_goes_on_where_it_was_interrupted(
    script: dict[str, Any], finished: Path, images: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The weights are those of the run that nobody interrupted, bit for bit."""
    line = [str(images), "-o", str(tmp_path), *SHORT]
    kind = script["Run"]
    train, seen = kind.train, []

    def interrupted(run: Any) -> float:
        seen.append(len(patched_sites(run.model)))
        if len(seen) == 3:
            raise KeyboardInterrupt
        loss: float = train(run)
        return loss

    monkeypatch.setattr(kind, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        script["main"](line)
    assert len(log(tmp_path)) == 2 and not (tmp_path / "model").exists()
    script["main"](line)
    assert seen == [6] * 4 and len(log(tmp_path)) == 3
    one, other = (load_file(f / "model" / "model.safetensors") for f in (finished, tmp_path))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    with pytest.raises(SystemExit, match="other settings"):
        script["main"]([*line, "--lr", "1"])


@pytest.mark.parametrize(
    "options", [("--amp", "bf16", "--opt", "lamb"), ("--amp", "fp16"), ("--no-patch",)]
)
def test_other_ways(
    script: dict[str, Any], images: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    line = [str(images), "-o", str(tmp_path), *SHORT, "--epochs", "1", "--sched", "step"]
    script["main"]([*line, *options])
    assert np.isfinite(log(tmp_path)[0]["loss"])


def test_a_folder_that_is_none(script: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        script["main"]([str(tmp_path), "-o", str(tmp_path / "out")])
    assert ended.value.code == 2
