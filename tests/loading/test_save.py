"""`save`: whole or not at all, and what was saved loads again as it was, patched."""

import json
import os
import shutil
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file
from timm.models._hub import has_hf_hub

from elsa_core.base import files
from elsa_core.errors import ArgumentError, ModelError, UnavailableError
from elsa_core.exporting.description import LABELS_NAME
from elsa_core.exporting.manifest import FILES, MANIFEST_NAME, REFERENCE_NAME
from elsa_core.exporting.signature import SIGNATURE_NAME
from elsa_core.loading import saving as save_module
from elsa_core.loading.loader import Loaded, load_model
from elsa_core.loading.saving import check_target, save, separate
from elsa_core.patching.rewrite import PatchReport, patch, patched_sites

Patched = tuple[Loaded, PatchReport]


@pytest.fixture(scope="module")
def patched() -> Patched:
    loaded = load_model("test_vit", image_size=64, seed=4)
    report = patch(loaded.model, exclude="blocks.0.attn", precision="ieee", backend="eager")
    return loaded, report


@torch.no_grad()
def outputs(loaded: Loaded) -> torch.Tensor:
    result = loaded.model(*loaded.example_inputs(2))
    return result if isinstance(result, torch.Tensor) else result[0]


def entries(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_round_trip(tmp_path: Path, patched: Patched) -> None:
    loaded, report = patched
    target = save(loaded, report, tmp_path / "deep" / "out")
    assert entries(target) == ["config.json", "elsa_plan.json", "model.safetensors"]
    again = load_model(target)
    assert again.spec.source == "directory" and again.name == "test_vit"
    assert again.input_size == (3, 64, 64) and again.preprocess == loaded.preprocess
    assert again.weights.endswith("saved from random (seed 4)")
    assert patched_sites(again.model).keys() == patched_sites(loaded.model).keys()
    assert again.report is not None and again.report.exclude == ("blocks.0.attn",)
    assert again.report.precision == "ieee" and again.report.backend == "eager"
    assert torch.equal(outputs(again), outputs(loaded))
    save(again, again.report, tmp_path / "again")
    third = load_model(tmp_path / "again")
    path = tmp_path / "again" / "model.safetensors"
    assert third.weights == f"{path}, saved from random (seed 4)"
    plans = [(d / "elsa_plan.json").read_text() for d in (target, tmp_path / "again")]
    assert plans[0] == plans[1]


def test_every_file_has_the_permissions_of_a_new_one(tmp_path: Path, patched: Patched) -> None:
    """safetensors leaves weights to their owner alone: nobody else could load the directory."""
    old = os.umask(0o027)
    try:
        target = save(*patched, tmp_path / "out")
    finally:
        os.umask(old)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in target.iterdir()}
    assert set(modes.values()) == {0o640}, modes


@pytest.mark.skipif(
    not has_hf_hub(), reason="this timm does not know the huggingface_hub that is installed"
)
def test_timm_opens_the_directory(tmp_path: Path, patched: Patched) -> None:
    target = save(*patched, tmp_path / "out")
    model = timm.create_model(f"local-dir:{target}", pretrained=True).eval()
    inputs = patched[0].example_inputs(1)
    with torch.no_grad():
        assert torch.allclose(model(*inputs), patched[0].model(*inputs), atol=1e-4)
    assert timm.create_model(f"local-dir:{target}", pretrained=True, num_classes=3).num_classes == 3


@pytest.mark.parametrize("name", ["open_clip:ViT-S-32-alt", "torchvision:swin_t", "swin_tiny"])
def test_other_libraries_and_sizes(tmp_path: Path, name: str) -> None:
    pytest.importorskip(name.partition(":")[0] if ":" in name else "timm")
    loaded = load_model(name, image_size=64, dtype=torch.bfloat16)
    report = PatchReport((), (), "strict", "auto")
    target = save(loaded, report, tmp_path / "out")
    (target / "elsa_plan.json").unlink()  # what the sites compute is for the tests of patch
    again = load_model(target, dtype=torch.bfloat16)
    assert again.name == loaded.name and again.input_size == (3, 64, 64)
    assert torch.equal(outputs(again), outputs(loaded))


def test_saved_sizes_can_be_changed_again(tmp_path: Path, patched: Patched) -> None:
    target = save(*patched, tmp_path / "out")
    again = load_model(target, image_size=96)
    assert again.input_size == (3, 96, 96) and outputs(again).shape == (2, 1000)
    assert len(patched_sites(again.model)) == len(patched[1].patched)
    # the weights alone still know their architecture
    again = load_model(shutil.copy(target / "model.safetensors", tmp_path / "alone.safetensors"))
    assert again.input_size == (3, 64, 64) and not patched_sites(again.model)


def test_tied_and_overlapping_tensors_are_written_in_full() -> None:
    big = torch.arange(12.0).view(3, 4)
    state = {"a": big, "tied": big, "row": big[1], "turned": big.t(), "empty": torch.zeros(0)}
    written = separate(state)
    assert all(torch.equal(written[name], state[name]) for name in state)
    addresses = [t.untyped_storage().data_ptr() for t in written.values() if t.numel()]
    assert len(set(addresses)) == len(addresses)


def test_a_model_with_tied_weights_saves(tmp_path: Path) -> None:
    loaded = load_model("test_vit", image_size=64)
    blocks: Any = loaded.model.blocks
    blocks[1].mlp.fc1.weight = blocks[0].mlp.fc1.weight
    target = save(loaded, patch(loaded.model), tmp_path / "out")
    state = load_file(target / "model.safetensors")
    assert torch.equal(state["blocks.0.mlp.fc1.weight"], state["blocks.1.mlp.fc1.weight"])
    assert torch.equal(outputs(load_model(target)), outputs(loaded))


# --- targets -----------------------------------------------------------------------------------


def test_an_existing_target_needs_force(tmp_path: Path, patched: Patched) -> None:
    target = save(*patched, tmp_path / "out")
    with pytest.raises(ArgumentError, match=r"exists: use --force"):
        save(*patched, target)
    plan = target / "elsa_plan.json"
    plan.write_text("old")
    save(*patched, target, force=True)
    assert json.loads(plan.read_text())["schema_version"] == 1
    assert entries(tmp_path) == ["out"]
    (tmp_path / "empty").mkdir()
    assert save(*patched, tmp_path / "empty") == tmp_path / "empty"


def test_force_replaces_every_file_that_elsa_writes(tmp_path: Path) -> None:
    names = [*FILES.values(), *(f"{FILES[each]}.data" for each in ("onnx", "onnx-int8"))]
    names += [MANIFEST_NAME, SIGNATURE_NAME, REFERENCE_NAME, LABELS_NAME, "load.py", "README.md"]
    for name in (*names, "elsa_plan.json"):
        (tmp_path / name).touch()
    (tmp_path / "lib").mkdir()
    check_target(tmp_path, tmp_path, force=True)


def test_force_does_not_remove_what_elsa_did_not_write(tmp_path: Path, patched: Patched) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ArgumentError, match=r"not a directory that elsa wrote.*thesis\.tex"):
        save(*patched, tmp_path, force=True)
    assert entries(tmp_path) == ["thesis.tex"]
    with pytest.raises(ArgumentError, match="is a file"):
        save(*patched, tmp_path / "thesis.tex", force=True)


@pytest.mark.parametrize("target", ["/proc/elsa/out", "/dev/null/out", "/sys/elsa"])
def test_unwritable_targets(target: str, patched: Patched) -> None:
    with pytest.raises(ArgumentError, match=r"\(-o\) cannot be written") as caught:
        save(*patched, target)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("module", "step"),
    [(save_module, "_write_tensors"), (files, "write_json"), (files, "flush"), (files, "_swap")],
)
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_a_failure_at_any_step_leaves_nothing(
    tmp_path: Path,
    patched: Patched,
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    step: str,
    error: Any,
) -> None:
    target = save(*patched, tmp_path / "out")
    before = {path.name: path.read_bytes() for path in target.iterdir()}

    def fail(*args: Any) -> None:
        raise error

    monkeypatch.setattr(module, step, fail)
    expected = KeyboardInterrupt if error is KeyboardInterrupt else UnavailableError
    with pytest.raises(expected):
        save(*patched, target, force=True)
    with pytest.raises(expected):
        save(*patched, tmp_path / "new" / "deep")
    assert entries(tmp_path) == ["out"]
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before


@pytest.mark.parametrize("fails_at", [1, 2])
def test_an_interrupt_between_the_renames_restores_the_target(
    tmp_path: Path, patched: Patched, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    target = save(*patched, tmp_path / "out")
    rename, calls = Path.rename, 0

    def interrupted(self: Path, other: Path) -> Path:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise KeyboardInterrupt
        return rename(self, other)

    monkeypatch.setattr(files, "_exchanged", lambda *_: False)  # a system without renameat2
    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(*patched, target, force=True)
    monkeypatch.undo()
    assert entries(tmp_path) == ["out"]
    assert load_model(target).report is not None


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path, patched: Patched) -> None:
    loaded = load_model("test_vit")
    with torch.no_grad():
        next(loaded.model.parameters()).fill_(float("nan"))
    with pytest.raises(ModelError, match="NaN or infinity"):
        save(loaded, patched[1], tmp_path / "out")
    assert entries(tmp_path) == []


# --- plans -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema_version": 2}, "schema_version 2"),
        ({"schema_version": None}, "schema_version"),
        ({"precision": 3}, "must be text"),
        ({"precision": "exact"}, "exact"),
        ({"backend": "abacus"}, "abacus"),
        ({"sites": []}, "names no sites"),
        ({"sites": "blocks.1.attn"}, "lists of text"),
        ({"sites": [1]}, "lists of text"),
        ({"sites": ["blocks.77.attn"]}, "no module 'blocks.77.attn'"),
        ({"sites": ["blocks.1.attn", "blocks.1.mlp"]}, "'blocks.1.mlp' was not patched"),
        ({"sites": ["blocks.*.attn"]}, r"no module"),
        ({"include": {}}, "lists of text"),
    ],
)
def test_plans_that_do_not_fit(
    tmp_path: Path, patched: Patched, change: dict[str, Any], words: str
) -> None:
    target = save(*patched, tmp_path / "out")
    path = target / "elsa_plan.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ModelError) as caught:
        load_model(target)
    message = str(caught.value)
    assert words in message and "elsa_plan.json" in message and "\n" not in message


def test_include_may_be_one_glob(tmp_path: Path, patched: Patched) -> None:
    loaded, report = patched
    target = save(loaded, replace(report, include="blocks.*"), tmp_path / "out")  # type: ignore[arg-type]
    assert json.loads((target / "elsa_plan.json").read_text())["include"] == ["blocks.*"]
