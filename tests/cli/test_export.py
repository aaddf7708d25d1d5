"""`elsa export` and `elsa verify` say what they assume and refuse; a signal leaves nothing."""

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from processes import alive, environment, gone, python, seen_from_proc, signalled, started
from safetensors.torch import save_file
from sampling import some

from elsa_cli.commands.export import _check_gpu
from elsa_core.backends import cuda
from elsa_core.backends.support import Support
from elsa_core.errors import UnavailableError

from .conftest import Elsa

TINY = ("test_vit", "--img", "32")


def test_export_and_verify_a_weights_file(elsa: Elsa, tmp_path: Path) -> None:
    """A file with another head and size, which says nothing of its architecture."""
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=11, img_size=32)
    save_file(model.state_dict(), tmp_path / "mine.safetensors")
    answer = elsa("export", "mine.safetensors", "--arch", "test_vit", "--formats", "torchscript")
    answer.shows("✓ model.ts", "1 of 1 artefacts reproduce")
    assert answer.err.count("TorchScript is deprecated") == 1
    manifest = json.loads((tmp_path / "test_vit-elsa" / "manifest.json").read_text())
    assert manifest["outputs"][0]["shape"] == ["batch", 11]
    assert manifest["inputs"][0]["shape"] == ["batch", 3, 32, 32]
    (tmp_path / "new").touch()
    mode = (tmp_path / "new").stat().st_mode
    files = [path for path in (tmp_path / "test_vit-elsa").rglob("*") if path.is_file()]
    assert [path.name for path in files if path.stat().st_mode != mode] == []
    assert elsa("inspect", "test_vit-elsa", "--json").document()["results"]["bundle"] == manifest
    elsa("verify", "test_vit-elsa", "--files-only").shows("files match; nothing was run")
    elsa("export", *TINY, "-o", "test_vit-elsa").fails(2, "exists", "--force")


def test_a_bundle_says_what_was_assumed(elsa: Elsa, tmp_path: Path) -> None:
    """A DeiT's tensors alone: what the bundle took from the architecture's name, it names."""
    torch.manual_seed(0)
    name = "vit_tiny_patch16_224"
    model = timm.create_model("deit_tiny_patch16_224", num_classes=11, img_size=32, depth=1)
    save_file(model.state_dict(), tmp_path / "mine.safetensors")
    mine = ("mine.safetensors", "--model-kwargs", "depth=1")
    answer = elsa("export", *mine, "--formats", "torchscript", "--batches", "4,1")
    assert answer.code == 0, answer.err
    assert "does not say its preprocessing" in answer.err
    bundle = tmp_path / f"{name}-elsa"
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert {"mean", "std"} <= set(manifest["preprocess"]["assumed"])
    assert manifest["model"]["assumed"] == {"heads": 3}
    Image.new("RGB", (40, 32), (200, 30, 90)).save(tmp_path / "a.png")
    alone = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ran = python("-B", bundle / "load.py", tmp_path / "a.png", cwd=tmp_path, env=alone)
    assert ran.returncode == 0, ran.stderr
    assert "mean [0.5, 0.5, 0.5]" in ran.stderr and "assumed" in ran.stderr
    image, *classes = ran.stdout.splitlines()
    assert image.endswith("a.png") and len(classes) == 5 and "assumed" not in ran.stdout
    assert manifest["reference"]["batch_sizes"] == [1, 4]
    again = elsa("patch", bundle, "--json").document()["results"]["model"]
    assert again["assumed"] == {"heads": 3}
    assert {"mean", "std"} <= set(again["preprocess"]["assumed"])
    given = ("--mean", "0.5", "--std", "0.5", "--crop-pct", "0.9", "--interpolation", "bicubic")
    told = elsa("inspect", *mine, *given, "--json").document()["results"]["model"]
    assert told["preprocess"]["assumed"] == []


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--formats", "tflite"), 2, ("'tflite'", "choose among")),
        (("--formats", ""), 2, ("choose among",)),
        (("--opset", "12"), 2, ("12",)),
        (("--batches", "1,65"), 2, ("65", "1<=x<=64")),
        (("--gpu-archs", "sm_75"), 2, ("sm_75 is unknown: choose of sm_80, ",)),
        (("--gpu-archs", "sm_80,ninety"), 2, ("'ninety' is no architecture (like sm_90)",)),
        (("--gpu-archs", "sm_80", "--device", "cpu"), 2, ("--gpu-archs", "--device cuda")),
        (("--dtype", "bf16"), 2, ("model.onnx", "bfloat16", "--formats")),
        (("--tower", "image"), 2, ("--tower", "not a CLIP")),
        (("--dynamic-size", "--formats", "onnx"), 2, ("--dynamic-size",)),
        (("--include", "nothing.*"), 1, ("nothing to patch",)),
        (("--backend", "eager", "--formats", "torchscript"), 5, ("attention_eager",)),
        (("-o", "/proc/elsa", "--formats", "torchscript"), 2, ("/proc/elsa",)),
    ],
)
def test_what_cannot_be_exported(
    elsa: Elsa, tmp_path: Path, arguments: tuple[str, ...], code: int, words: tuple[str, ...]
) -> None:
    elsa("export", *TINY, "--quiet", *arguments).fails(code, *words)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_provider_is_said_before_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """And of no one who has not asked for ONNX."""
    ort = pytest.importorskip("onnxruntime")
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CPUExecutionProvider"])
    monkeypatch.setattr(cuda, "status", lambda: Support(False, "no GPU"))
    weight = SimpleNamespace(device=torch.device("cuda"))
    loaded: Any = SimpleNamespace(weight=weight)
    _check_gpu((), ("torchscript", "pt2"), "custom", loaded)
    with pytest.raises(UnavailableError, match="its CUDAExecutionProvider: pip install"):
        _check_gpu((), ("onnx",), "custom", loaded)
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    with pytest.raises(UnavailableError, match="onnx on a GPU needs the CUDA library: no GPU"):
        _check_gpu((), ("onnx",), "custom", loaded)
    _check_gpu((), ("onnx",), "standard", loaded)


def test_a_clip_needs_a_tower(elsa: Elsa, tmp_path: Path) -> None:
    pytest.importorskip("open_clip")
    clip = ("export", "open_clip:ViT-S-32-alt", "--img", "32")
    elsa(*clip).fails(2, "--tower image or --tower text")
    elsa(*clip, "--tower", "text", "--images", str(Path(__file__).parent)).fails(2, "token ids")
    assert list(tmp_path.iterdir()) == []


def test_a_name_from_a_file_never_leads_out_of_the_folder(elsa: Elsa, tmp_path: Path) -> None:
    """The bundle is named after the architecture where -o is not given."""
    pytest.importorskip("open_clip")
    assert elsa("patch", "open_clip:ViT-S-32-alt", "--img", "32", "-o", "clip").code == 0
    for name in ("../evil", "/evil", "a/../../evil", "..", "a\x1b[2J"):
        for file in ("config.json", "open_clip_config.json"):
            path = tmp_path / "clip" / file
            path.write_text(json.dumps(json.loads(path.read_text()) | {"architecture": name}))
        elsa("export", "clip", "--tower", "image").fails(4, "names an architecture")
        assert [path.name for path in tmp_path.iterdir()] == ["clip"]


SIGNALS = [(signal.SIGINT, 130, ()), (signal.SIGTERM, 143, ("--zip",)), (signal.SIGHUP, 129, ())]


@pytest.mark.parametrize(("number", "code", "zip"), some(SIGNALS, one_in=3))
def test_a_signal_leaves_nothing_half_written(
    tmp_path: Path, number: int, code: int, zip: tuple[str, ...]
) -> None:
    """Ctrl-C, `kill` and a closed terminal while the artefacts are being written."""
    target = "out.zip" if zip else "out"
    words = ["export", "test_vit", "--img", "32", "--formats", "torchscript", "-o", target, *zip]
    child = started("-m", "elsa_cli", *words)
    ended, out, err = signalled(
        child, lambda: list(tmp_path.rglob("model.safetensors")), number, within=300
    )
    assert (ended, out) == (code, "") and "Traceback" not in err
    assert ("interrupted; nothing was written" in err) is (number == signal.SIGINT)
    assert list(tmp_path.iterdir()) == []


@seen_from_proc
def test_a_signal_ends_what_an_export_has_started(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The compilers of a library that the bundle needs, and what those have started."""
    place, word = tmp_path_factory.mktemp("slow"), f"98764.{os.getpid()}"
    (place / "slow").write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo slow 1.0 && exit\nsleep {word}\nexit 1\n'
    )
    (place / "slow").chmod(0o755)

    words = ["export", "test_vit", "--img", "32", "--formats", "torchscript", "--zip"]
    env = environment(CXX=str(place / "slow"), ELSA_CACHE_DIR=str(place / "cache"))
    child = started("-m", "elsa_cli", *words, "-o", "out.zip", env=env)
    code, out, err = signalled(child, lambda: alive(word), signal.SIGTERM, within=300)
    assert (code, out) == (143, "") and "Traceback" not in err
    assert gone(word) and list(tmp_path.iterdir()) == []
    assert not [each for each in (place / "cache").rglob("*") if ".build-" in each.name]
