"""Accuracy before and after patching, on real images that a trained model has not seen."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from command import Elsa
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

import elsa_core as elsa
from elsa_cli import console
from elsa_core.base.images import reader
from elsa_core.errors import ArgumentError, ModelError, NothingPatchedError
from elsa_core.loading.loader import load_model
from elsa_core.loading.recipe import Given
from elsa_core.loading.saving import save
from elsa_core.measuring.intervals import Ratio
from elsa_core.patching.adapters import patched_class
from elsa_core.patching.rewrite import patch
from elsa_core.proof.labelled import labelled_images

_SIZES = {"patch_size": 2, "in_chans": 1, "num_classes": 10, "embed_dim": 64, "depth": 2,
          "num_heads": 2}  # fmt: skip


@pytest.fixture(scope="session")
def trained(learnt_digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the model, trained on four fifths of the digits."""
    loaded = load_model(
        "vit_tiny_patch16_224", image_size=8, model_kwargs=_SIZES,
        preprocess=Given((0.3,), (0.375,), 1.0, "nearest"),
    )  # fmt: skip
    loaded.model.load_state_dict(load_file(learnt_digits))
    report = patch(loaded.model.eval())
    return save(loaded, report, tmp_path_factory.mktemp("trained") / "digits")


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits it has not seen as PNGs of 8 x 8, in one folder a class."""
    from sklearn.datasets import load_digits

    data, root = load_digits(), tmp_path_factory.mktemp("digits")
    for index in range(0, len(data.images), 5):
        folder = root / str(data.target[index])
        folder.mkdir(exist_ok=True)
        pixels = np.round(data.images[index] / 16.0 * 255.0).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{index:04}.png")
    return root


@pytest.fixture
def command(elsa: Elsa, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Elsa:
    """Runs the command in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return elsa


def batches(trained: Path, digits: Path) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    loaded = load_model(trained)
    read = reader(**loaded.preprocess.transform)
    return loaded.model, list(labelled_images(digits, 10).batches(read, 64))


def test_a_trained_model_keeps_its_accuracy(trained: Path, digits: Path) -> None:
    model, given = batches(trained, digits)
    report = elsa.evaluate(model, given)
    assert report.images == report.labelled == 360 and report.classes == 10
    assert report.top1_original == report.top1_patched > 0.85 * 360
    assert report.top5_original == report.top5_patched > 0.97 * 360
    assert report.changed == () and report.timed_batches == 5
    with torch.no_grad():  # the count is that of a plain loop
        hits = sum(int((model(x).argmax(1) == y).sum()) for x, y in given)
    assert report.top1_patched == hits
    assert "360 images · no classes changed" in str(report) and "images per second" in str(report)
    assert any(patched_class(m) for m in model.modules()) and not model.training


def test_changed_classes_are_found_and_named(trained: Path, digits: Path) -> None:
    """A patched model that computes something else must not pass for the same."""
    model, given = batches(trained, digits)
    site = next(m for m in model.modules() if patched_class(m) and m is not model)
    site.register_forward_hook(lambda m, args, out: 40 * out if patched_class(m) else None)
    report = elsa.evaluate(model, given)
    assert report.top1_patched < report.top1_original and 0 < len(report.changed) <= 360
    one = report.changed[0]
    images, labels = torch.cat([x for x, _ in given]), torch.cat([y for _, y in given])
    assert one.label == int(labels[one.index])
    with torch.no_grad():
        assert int(model(images[one.index, None]).argmax()) == one.patched != one.original
    assert one.margin > 0 and "classes that changed" in str(report)


def test_the_model_comes_back_as_it_was(trained: Path, digits: Path) -> None:
    model, given = batches(trained, digits)
    model.train()
    elsa.evaluate(model, given[:1])
    assert all(module.training for module in model.modules())
    with pytest.raises(ArgumentError, match="holds no image"):
        elsa.evaluate(model, [])
    with pytest.raises(ArgumentError, match="a label of 10: the model has classes 0 to 9"):
        elsa.evaluate(model, [(given[0][0], torch.full((64,), 10))])
    elsa.unpatch(model)
    with pytest.raises(NothingPatchedError, match="call patch first"):
        elsa.evaluate(model, given)


def test_features_are_no_classes() -> None:
    model = timm.create_model("test_vit", img_size=32, num_classes=0, global_pool="").eval()
    elsa.patch(model)
    with pytest.raises(ModelError, match=r"needs logits \[2, classes\]"):
        elsa.evaluate(model, [(torch.zeros(2, 3, 32, 32), torch.zeros(2, dtype=torch.int64))])


def test_labels_are_whole_numbers_of_any_type() -> None:
    """Unsigned ones, which wrap around below zero, are classes like others; 1.5 is none."""
    model, images = timm.create_model("test_vit", img_size=32), torch.randn(2, 3, 32, 32)
    elsa.patch(model)
    for dtype in (torch.uint8, torch.int16):
        report = elsa.evaluate(model, [(images, torch.tensor([1, 2], dtype=dtype))])
        assert report.labelled == 2
    with pytest.raises(TypeError, match="labels must be whole numbers, not torch"):
        elsa.evaluate(model, [(images, torch.tensor([1.5, 2.0]))])


def test_folders_and_files_name_classes(digits: Path, tmp_path: Path) -> None:
    found = labelled_images(digits, 10)
    assert found.how == "folders are numbers of classes" and len(found.files) == 360
    assert found.labels == tuple(int(file.parent.name) for file in found.files)
    named = tmp_path / "named"
    shutil.copytree(digits, named)
    for folder in list(named.iterdir()):
        folder.rename(named / f"digit {folder.name}")
    ordered = labelled_images(named, 10)
    assert ordered.how == "folders are classes in sorted order, since the model has no names"
    assert ordered.labels == found.labels
    names = [f"Digit_{number}" for number in (3, 1, 4, 0, 5, 9, 2, 6, 8, 7)]
    other = labelled_images(named, 10, names)
    assert other.how == "folders are names of classes"
    assert other.labels == tuple(names.index(f"Digit_{n}") for n in found.labels)
    with pytest.raises(ArgumentError, match=r"folder 'digit 0' is none .* \('a0', ...\).*--labels"):
        labelled_images(named, 10, [f"a{number}" for number in range(10)])
    with pytest.raises(ArgumentError, match=r"\(--labels\): 2 names of classes, the model has 10"):
        labelled_images(named, 10, ["a", "b"])
    turned = labelled_images(digits, 10, list("9876543210"))  # names come before numbers
    assert turned.labels == tuple(9 - number for number in found.labels)
    with pytest.raises(ArgumentError, match=r"has 10 class folders .*, the model 11"):
        labelled_images(named, 11)
    with pytest.raises(ArgumentError, match="folder 9 is no class of the model"):
        labelled_images(digits, 9)
    few = labelled_images(digits, 10, limit=20)
    assert len(few.files) == 20 and set(few.labels) == set(range(10))


def test_imagenets_synsets(digits: Path, tmp_path: Path) -> None:
    for name in ("n02123045", "n01440764"):
        shutil.copytree(digits / "0", tmp_path / "images" / name)
    found = labelled_images(tmp_path / "images", 1000)
    assert set(found.labels) == {0, 281} and found.how == "folders are ImageNet's synsets"


@pytest.mark.parametrize("line", ["{},{}", "{}\t{}", "./{} {}"])
def test_annotations(digits: Path, tmp_path: Path, line: str) -> None:
    flat = tmp_path / "flat"
    flat.mkdir()
    for file in digits.glob("*/*.png"):
        shutil.copy(file, flat / f"{file.parent.name} {file.name}")
    text = [line.format(file.name, file.name[0]) for file in sorted(flat.iterdir())][1:]
    labels = tmp_path / "labels.csv"
    labels.write_text("\n".join([line.format("file", "class"), *text]))
    found = labelled_images(flat, 10, annotations=labels)
    assert found.labels[0] == -1  # the one that the file leaves out
    assert found.labels[1:] == tuple(int(file.name[0]) for file in found.files[1:])
    with pytest.raises(ArgumentError, match="outside of class folders"):
        labelled_images(flat, 10)
    labels.write_text("a.png 1\nb.png twelve\n")
    for line in ("3/0000.png 1" + 5000 * "0", 140_000 * "x" + ",1"):
        (tmp_path / "long.txt").write_text(line)
        with pytest.raises(ArgumentError, match="line 1: too long for a path"):
            labelled_images(digits, 10, annotations=tmp_path / "long.txt")
    with pytest.raises(ArgumentError, match="line 2: 'twelve' is no class, 0 to 9"):
        labelled_images(flat, 10, annotations=labels)
    labels.write_text("\nfile class\n\na.png 1\nb.png twelve\n")  # blank lines count, too
    with pytest.raises(ArgumentError, match="line 5: 'twelve'"):
        labelled_images(flat, 10, annotations=labels)
    labels.write_text("other.png 1\n")
    with pytest.raises(ArgumentError, match="names no image"):
        labelled_images(flat, 10, annotations=labels)


def test_the_command(command: Elsa, trained: Path, digits: Path) -> None:
    code, out, err = command("eval", trained, "--images", digits)
    assert (code, err) == (0, "")
    assert "360 images, 360 with a class (folders are numbers of classes)" in out
    verdict = out.splitlines()[-1]
    assert verdict.startswith("top-1 9") and "0 of 360 images changed their class" in verdict
    assert re.search(
        r"(\d\.\d\dx the throughput|no difference in throughput found) \(\d\.\d\d to \d\.\d\d\)$",
        verdict,
    )
    Path("names.txt").write_text("\n".join("9876543210"))
    code, out, _ = command("eval", trained, "--images", digits, "--labels", "names.txt")
    assert code == 0 and "(folders are names of classes)" in out
    assert not out.splitlines()[-1].startswith("top-1 9")
    document = command("eval", trained, "--images", digits, "--json", "--limit", "30").document()
    assert document["results"]["evaluation"]["images"] == 30
    assert document["results"]["evaluation"]["speed"] is None
    assert document["results"]["evaluation"]["changed"] == []


def test_few_batches_do_not_compare_throughput(trained: Path, digits: Path) -> None:
    """Two batches of 40 images said 0.80x, without a range."""
    model, given = batches(trained, digits)
    few = elsa.evaluate(model, given[:6])  # of which the first is not timed
    assert few.speed is None and few.speed_text == "too few batches to compare throughput"
    report = elsa.evaluate(model, [(images[:8], labels[:8]) for images, labels in given * 2])
    assert report.speed is not None and report.speed.rounds == report.timed_batches == 11
    assert report.speed.low <= report.speed.value <= report.speed.high
    for low, text in (
        (0.9, "no difference in throughput found (0.90 to"),
        (1.1, "x the throughput"),
    ):
        one = dataclasses.replace(report, speed=Ratio(1.2, low, 1.3, 9))
        assert text in one.speed_text
    assert report.to_dict()["speed"]["low"] == report.speed.low


def test_progress_is_told(
    command: Elsa, trained: Path, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches are counted, and a file gets a line now and then."""
    model, given = batches(trained, digits)
    seen: list[tuple[str, int, int]] = []
    elsa.evaluate(model, given, progress=lambda *each: seen.append(each))
    done = [count for _, count, _ in seen]
    assert len(seen) >= len(given) and done == sorted(done) and done[-1] > done[0]
    monkeypatch.setattr(console, "_BEAT_SECONDS", 0.005)
    code, _, err = command("eval", trained, "--images", digits)
    assert code == 0 and any(line.startswith("evaluating ") for line in err.splitlines())


def test_the_command_says_what_is_missing(
    command: Elsa, trained: Path, digits: Path, tmp_path: Path
) -> None:
    shutil.copytree(digits, tmp_path / "digits")
    for arguments, code, words in (
        (("test_vit",), 2, "--images"),
        (("test_vit", "--images", "nowhere"), 4, "no such folder"),
        (("test_vit", "--images", digits, "--labels", "none.txt"), 4, "no such file of labels"),
        (("test_vit", "--images", digits, "--annotations", "x"), 4, "no such file of annotations"),
        ((trained, "--images", tmp_path), 2, "class folder"),
        (("test_vit", "--model-kwargs", "num_classes=0", "--images", digits), 4, "no classifier"),
    ):
        answer = command("eval", *arguments)
        answer.fails(code, words)
        assert not answer.out


def test_random_weights_are_said(command: Elsa, digits: Path) -> None:
    given = ("--model-kwargs", "num_classes=10", "--img", "32", "--limit", "8")
    code, out, err = command("eval", "test_vit", *given, "--images", digits)
    assert code == 0 and "weights are random" in err and "images per second" in out


def test_unreadable_images_are_left_out_where_that_is_asked(
    command: Elsa, trained: Path, digits: Path, tmp_path: Path
) -> None:
    shutil.copytree(digits, tmp_path / "digits")
    (tmp_path / "digits" / "3" / "0000.png").write_bytes(b"no image")
    given = ("eval", trained, "--images", tmp_path / "digits", "--limit", "40", "--json")
    code, _, err = command(*given[:-3])
    assert code == 4 and "0000.png: cannot read this image" in err
    (tmp_path / "digits" / "0" / "0000.png").write_bytes(b"no image")  # the first of the limit
    code, out, err = command(*given, "--skip-unreadable")
    assert code == 0 and "0/0000.png cannot be read: left out" in err
    results = json.loads(out)["results"]
    assert results["unreadable"] == ["0/0000.png"] and results["evaluation"]["images"] == 39
    found = labelled_images(tmp_path / "digits", 10)
    without = found.without([0, 2])
    assert without.files == (found.files[1], *found.files[3:])
    assert len(without.labels) == len(without.files) and without.labels[1:] == found.labels[3:]
