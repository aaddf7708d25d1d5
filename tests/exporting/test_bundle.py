"""`export`: what a bundle holds, that it runs alone, and that a failure leaves nothing."""

import dataclasses
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import Elsa
from PIL import Image
from processes import python
from torch import Tensor, nn

from elsa_core.errors import ArgumentError, ExportError, NothingPatchedError, UnavailableError
from elsa_core.exporting import reference
from elsa_core.exporting.bundle import Bundle, check_output, export
from elsa_core.exporting.description import readme, write_labels
from elsa_core.exporting.export_target import export_target, tower_of
from elsa_core.exporting.templates import load as template
from elsa_core.exporting.verify import verify
from elsa_core.loading.loader import Loaded, load_model
from elsa_core.patching.rewrite import patch, patched_sites, unpatch
from elsa_core.proof import CheckReport

FORMATS = ("torchscript", "onnx", "pt2")


def entries(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_model_that_gives_zeros_is_no_proof(tmp_path: Path) -> None:
    """Every artefact reproduces zeros, whatever becomes of its attention."""
    model = load_model("test_vit", image_size=64, model_kwargs={"depth": 1}).model
    torch.nn.init.zeros_(model.head.weight)
    patch(model)

    def progress(line: str) -> None:
        if "reference" in line:
            raise KeyboardInterrupt

    with (
        pytest.warns(UserWarning, match="shows nothing of their attention") as caught,
        pytest.raises(KeyboardInterrupt),
    ):
        export(model, tmp_path / "out", formats=("torchscript",), progress=progress)
    assert caught[-1].filename == __file__


def test_what_a_bundle_holds(bundle: Bundle, vit: Loaded) -> None:
    manifest = bundle.manifest
    assert entries(bundle.path) == [
        "README.md", "config.json", "elsa_plan.json", "lib", "load.py", "manifest.json",
        "model.onnx", "model.pt2", "model.safetensors", "model.ts", "reference.npz",
    ]  # fmt: skip
    assert [each.status for each in bundle.artefacts] == ["ok"] * 3
    assert manifest == json.loads((bundle.path / "manifest.json").read_text())
    assert manifest["inputs"] == [
        {"name": "image", "dtype": "float32", "shape": ["batch", 3, 64, 64],
         "dynamic": {"0": "batch"}}
    ]  # fmt: skip
    assert manifest["outputs"] == [{"name": "logits", "dtype": "float32", "shape": ["batch", 1000]}]
    given, known = manifest["preprocess"], vit.preprocess
    assert (given["mean"], given["std"]) == (list(known.mean), list(known.std))
    assert (given["crop_pct"], given["interpolation"]) == (known.crop_pct, known.interpolation)
    assert manifest["check"]["ok"] and manifest["model"]["precision"] == "strict"
    schema = manifest["operators"]["elsa::attention"]["schema"]
    assert schema == str(torch.ops.elsa.attention.default._schema)
    assert manifest["artefacts"]["torchscript"]["operators"] == ["elsa::attention"]
    assert manifest["artefacts"]["onnx"]["operators"]
    assert manifest["artefacts"]["onnx"]["runtime"] == {"onnxruntime": ">=1.17"}
    assert manifest["libraries"]["lib/libelsa_torch.so"]["minimum"] == "2.10"
    assert manifest["libraries"]["lib/libelsa_torch.so"]["gpu_archs"] == []
    assert "batch x 3 x 64 x 64" in (bundle.path / "README.md").read_text()
    first, *lines = str(bundle).splitlines()
    assert first.startswith(f"bundle {bundle.path} · 11 files") and len(lines) == 4
    assert lines[1] == "formats: torchscript, onnx, pt2" and str(bundle) == repr(bundle)
    for size in ("1", "2", "3"):
        verification = manifest["artefacts"]["pt2"]["verification"]["batches"][size]
        assert verification["error"] <= verification["allowed"]


def test_batch_sizes_of_the_users_own(vit: Loaded, report: CheckReport, tmp_path: Path) -> None:
    """In a fresh process at these alone."""
    made = export(
        vit.model, tmp_path / "out", formats=("torchscript",), batches=[5, 4, 5], check=report,
        loaded=vit,
    )  # fmt: skip
    assert made.manifest["reference"]["batch_sizes"] == [4, 5]
    assert list(made.artefacts[0].batches) == [4, 5]
    assert len(np.load(made.path / "reference.npz")["oracle.0"]) == 5


def test_a_runtime_that_is_missing_is_named_before_the_work(
    vit: Loaded, report: CheckReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    said: list[str] = []
    with pytest.raises(UnavailableError, match=r"onnxruntime.* name other --formats"):
        export(vit.model, tmp_path / "out", loaded=vit, check=report, progress=said.append)
    assert entries(tmp_path) == [] and not any(line.startswith("exporting") for line in said)


def test_the_bundle_loads_again_as_a_model(bundle: Bundle, vit: Loaded) -> None:
    again = load_model(bundle.path)
    assert patched_sites(again.model).keys() == patched_sites(vit.model).keys()
    with torch.no_grad():
        inputs = vit.example_inputs(2)
        assert torch.equal(again.model(*inputs), vit.model(*inputs))


def test_verify_repeats_it(bundle: Bundle, elsa: Elsa) -> None:
    results = elsa("verify", bundle.path, "--trust", "--json").document()["results"]
    assert results["ok"] and results["failures"] == []
    assert {name: each["status"] for name, each in results["artefacts"].items()} == dict.fromkeys(
        FORMATS, "ok"
    )


def test_the_readmes_python_leaves_nothing_behind(bundle: Bundle, tmp_path: Path) -> None:
    """A __pycache__ is no file of the manifest: the bundle would no longer verify."""
    copy = tmp_path / "copy"
    shutil.copytree(bundle.path, copy)
    text = readme(bundle.manifest | {"preprocess": None})  # as of a text tower
    line = next(line for line in text.splitlines() if line.startswith("python ") and "pt2" in line)
    shell = line.replace("python", shlex.quote(sys.executable), 1)
    env = {key: x for key, x in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        ["bash", "-c", shell], cwd=copy, env=env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "(1, 1000)\n"), done.stderr
    assert verify(copy, run=False).ok


def test_readme_says_what_goes_in_and_comes_out(bundle: Bundle) -> None:
    text = " ".join((bundle.path / "README.md").read_text().split())
    assert "In: RGB images of 64 x 64 pixels" in text and "mean 0.5, 0.5, 0.5" in text
    assert "Out: logits of 1000 classes, numbered from 0" in text
    assert "The weights are random" in text
    assert "Out: features, no classes" in readme(
        bundle.manifest | {"outputs": [{"name": "features", "dtype": "float32", "shape": [1, 8]}]}
    )
    assert "lines of labels.txt" in readme(bundle.manifest | {"labels": "labels.txt"})


def test_names_of_classes_are_in_the_bundle(vit: Loaded, tmp_path: Path) -> None:
    """Those that are given, those of published weights; of random weights nothing is known."""
    names = [f"class {i}" for i in range(1000)]
    published = dataclasses.replace(vit, weights="pretrained (timm)")
    for loaded, given, known in ((vit, names, names[281]), (vit, (), ""),
                                 (published, (), "tabby, tabby cat")):  # fmt: skip
        target = export_target(vit.model, loaded, None, 0)
        file = write_labels(target, given, tmp_path)
        found = template.class_names({"labels": file}, tmp_path)
        assert (found[281] == known) if known else file is None
    with pytest.raises(ArgumentError, match="3 names, the model has 1000 classes"):
        write_labels(target, names[:3], tmp_path)


RANDOM = "warning: the weights are random, and so are the results\n"


def test_load_py_runs_alone_on_an_image(bundle: Bundle, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (80, 100, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    done = python(bundle.path / "load.py", "image.png", "--format", "onnx", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, RANDOM), done.stderr
    head, *lines = done.stdout.splitlines()
    assert head == "image.png"
    order = [int(line.split()[1]) for line in lines]
    inputs = template.preprocess(tmp_path / "image.png", bundle.path)
    # Here the package has loaded the operators already; load_operators leaves them alone.
    logits = template.load("torchscript", bundle.path)(inputs)[0]
    assert order == logits[0].argsort()[::-1][:5].tolist()
    share = np.exp(logits[0].max()) / np.exp(logits[0]).sum()
    assert lines[0].split()[0] == f"{share:.2%}"


def test_load_py_beside_the_imported_package(bundle: Bundle) -> None:
    """The package has defined the operators, and loads its own library at the first call."""
    program = """
import sys
import torch
import elsa_core as elsa
sys.path.insert(0, sys.argv[1])
import load
facts = load.manifest()
name = next(iter(facts["operators"]))
served = torch._C._dispatch_has_kernel_for_dispatch_key
assert not served(name, "CPU")
load.load_operators(facts)
load.load_operators(facts)
assert served(name, "CPU")
q = torch.randn(1, 2, 5, 8, requires_grad=True)
torch.ops.elsa.attention(q.detach(), q.detach(), q.detach(), None, False, 0.3, "strict")
out = elsa.attention(q, q, q, backend="native")
out.sum().backward()
expected = torch.nn.functional.scaled_dot_product_attention(q, q, q)
torch.testing.assert_close(out, expected)
assert elsa.explain(*(q.detach(),) * 3).backend == "native"
"""
    done = python("-B", "-c", program, bundle.path)
    assert done.returncode == 0, done.stderr


def test_load_py_names_the_formats_that_are_here(bundle: Bundle) -> None:
    line = "this bundle holds no 'aoti': choose one of pt2, torchscript, onnx"
    with pytest.raises(ValueError, match=line):
        template.load("aoti", bundle.path)


def test_load_py_takes_the_first_format_that_can_run(
    bundle: Bundle, vit: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = vit.example_inputs(1)[0].numpy()
    expected = template.load("onnx", bundle.path)(images)[0]
    monkeypatch.setitem(sys.modules, "torch", None)
    assert np.array_equal(template.load(bundle=bundle.path)(images)[0], expected)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ImportError, match=r"needs onnxruntime, .*pip install"):
        template.load(bundle=bundle.path)


def test_an_existing_target_needs_force(bundle: Bundle, tmp_path: Path) -> None:
    target = Path(shutil.copytree(bundle.path, tmp_path / "deep" / "out"))
    with pytest.raises(ArgumentError, match="exists: use --force"):
        check_output(target, target, zip=False, force=False)
    check_output(target, target, zip=False, force=True)
    (target / "thesis.tex").touch()
    with pytest.raises(ArgumentError, match=r"elsa wrote.*thesis\.tex"):
        check_output(target, target, zip=False, force=True)


def test_zip(vit: Loaded, report: CheckReport, tmp_path: Path) -> None:
    """Verified with one image; tracers see two."""
    options = {"formats": ("torchscript",), "loaded": vit, "check": report, "zip": True,
               "batches": (1,)}  # fmt: skip
    made = export(vit.model, tmp_path / "out", **options)
    assert made.path == tmp_path / "out.zip" and entries(tmp_path) == ["out.zip"]
    with zipfile.ZipFile(made.path) as archive:
        assert "lib/libelsa_torch.so" in archive.namelist()
        assert len(np.load(archive.open("reference.npz"))["oracle.0"]) == 2
    assert verify(made.path, run=False).ok
    with pytest.raises(ArgumentError, match="exists: use --force"):
        export(vit.model, tmp_path / "out.zip", **options)
    check_output(made.path, made.path, zip=True, force=True)
    (tmp_path / "thesis.zip").write_bytes(b"mine")
    with pytest.raises(ArgumentError, match="not a bundle"):
        export(vit.model, tmp_path / "thesis.zip", force=True, **options)
    assert entries(tmp_path) == ["out.zip", "thesis.zip"]


def test_an_interrupt_at_any_step_leaves_nothing(
    vit: Loaded, report: CheckReport, tmp_path: Path
) -> None:
    """Before each line of progress in turn, until an export gets to its end."""
    (tmp_path / "mine").write_text("kept")
    for step in range(1, 20):
        said: list[str] = []

        def interrupt(line: str, said: list[str] = said, step: int = step) -> None:
            said.append(line)
            if len(said) == step:
                raise KeyboardInterrupt

        try:
            export(
                vit.model, tmp_path / "new" / "out", formats=("torchscript",), loaded=vit,
                check=report, progress=interrupt, zip=bool(step % 2),
            )  # fmt: skip
        except KeyboardInterrupt:
            assert entries(tmp_path) == ["mine"]
        else:
            break
    assert len(said) >= 4 and entries(tmp_path) == ["mine", "new"]


def test_a_disk_that_is_full(vit: Loaded, report: CheckReport, tmp_path: Path) -> None:
    """On a file system of 3 MB, where this process may mount one: refused at once where the
    weights do not fit, and cleaned up where what comes with them does not."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = os.getuid() == 0 and not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(small)],
        capture_output=True, check=False,
    ).returncode  # fmt: skip
    if not mounted:
        pytest.skip("a small tmpfs needs the right to mount")
    try:
        with pytest.raises(UnavailableError, match="MB are free"):
            export(vit.model, small / "out", loaded=vit, check=report)
        for zipped in (False, True):
            with pytest.raises(UnavailableError, match="No space left"):
                export(
                    vit.model, small / "out", formats=("torchscript",), loaded=vit, check=report,
                    zip=zipped,
                )  # fmt: skip
            assert entries(small) == []
    finally:
        subprocess.run(["umount", str(small)], check=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"formats": ("tflite",)}, "'tflite'"),
        ({"formats": ()}, "choose among"),
        ({"onnx_mode": "best"}, "onnx_mode='best'"),
        ({"opset": 12}, "18 or 23"),
        ({"dynamic_size": True}, "name pt2"),
        ({"inputs": torch.zeros(0, 3, 64, 64)}, "batch"),
        ({"labels": ["a", "b", "c"]}, "3 names, the model has 1000 classes"),
        *(({"batches": sizes}, "sizes from 1 to 64") for sizes in ((), (0, 1), (65,), (-1,))),
        ({"batches": ("a",)}, "whole numbers"),
    ],
    ids=str,
)
def test_arguments_that_cannot_be(
    vit: Loaded, report: CheckReport, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    given = {"formats": ("torchscript",), "loaded": vit, "check": report} | options
    with pytest.raises((ArgumentError, TypeError), match=words):
        export(vit.model, tmp_path / "out", **given)
    assert entries(tmp_path) == []


def test_a_dtype_that_a_format_cannot_hold(tmp_path: Path) -> None:
    loaded = load_model("test_vit", image_size=32, dtype=torch.bfloat16)
    patch(loaded.model)
    words = "format onnx: ONNX Runtime's CPU kernels take no bfloat16: use float32"
    with pytest.raises(ArgumentError, match=words):
        export(loaded.model, tmp_path / "out", loaded=loaded)
    assert entries(tmp_path) == []


def test_models_that_cannot_be(report: CheckReport, tmp_path: Path) -> None:
    plain = load_model("test_vit", image_size=64)
    with pytest.raises(NothingPatchedError, match="call patch first"):
        export(plain.model, tmp_path / "out")
    patch(plain.model)
    plain.model.train()
    with pytest.raises(ArgumentError, match=r"call model\.eval\(\) first"):
        export(plain.model, tmp_path / "out")
    with pytest.raises(ArgumentError, match="float64"):
        export(plain.model.eval().double(), tmp_path / "out")
    plain.model.float()
    patch(plain.model, backend="eager")
    with pytest.raises(ExportError, match="elsa::attention_eager, which no library holds"):
        export(plain.model, tmp_path / "out", formats=("torchscript",), check=report)
    assert entries(tmp_path) == []


class Untraceable(nn.Module):
    """Refuses every tracer, as a forward with data-dependent control flow does."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.jit.is_tracing() or torch.compiler.is_exporting():
            raise RuntimeError("no tracer here\nand more")
        return x


class Baked(nn.Module):
    """Takes a number out of the graph, which a trace makes a constant."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1.0 + float(x.abs().mean()))


@pytest.mark.parametrize("format", ["torchscript", "pt2"])
def test_a_model_that_cannot_be_traced_names_the_module(
    report: CheckReport, tmp_path: Path, format: str
) -> None:
    loaded = load_model("test_vit", image_size=64)
    model: Any = loaded.model
    model.blocks[1].mlp.drop1 = Untraceable()
    patch(model)
    with pytest.raises(ExportError) as caught:
        export(model, tmp_path / "out", formats=(format,), check=report)
    message = str(caught.value)
    assert "'blocks.1.mlp.drop1' (Untraceable): no tracer here" in message and "\n" not in message
    assert entries(tmp_path) == []


def test_an_artefact_that_does_not_reproduce_the_model_is_not_kept(
    report: CheckReport, tmp_path: Path
) -> None:
    loaded = load_model("test_vit", image_size=64)
    model: Any = loaded.model
    model.head_drop = Baked()
    patch(model)
    with pytest.raises(ExportError, match=r"model\.ts does not reproduce the model: at batch 1"):
        export(model, tmp_path / "out", formats=("torchscript",), check=report)
    assert entries(tmp_path) == []


def test_a_failed_check_exports_nothing(vit: Loaded, report: CheckReport, tmp_path: Path) -> None:
    bad = dataclasses.replace(report, ok=False, failures=("model on 'noise': too far off",))
    with pytest.raises(ExportError, match="too far off"):
        export(vit.model, tmp_path / "out", check=bad)
    assert entries(tmp_path) == []


def test_the_judgement_can_fail(vit: Loaded) -> None:
    inputs = tuple(vit.example_inputs(3))
    made = reference.make_reference(vit.model, inputs)
    with torch.no_grad():
        good = {size: [vit.model(inputs[0][:size]).numpy()] for size in (1, 2, 3)}
    assert not any(each.reason for each in reference.judge(made, good))
    off = {size: [outputs[0] * np.float32(1.00001)] for size, outputs in good.items()}
    assert all("allowed" in each.reason for each in reference.judge(made, off))
    nan = {size: [np.full_like(outputs[0], np.nan)] for size, outputs in good.items()}
    assert all("not finite" in each.reason for each in reference.judge(made, nan))
    short = good | {2: [good[2][0][:1]]}
    assert [bool(each.reason) for each in reference.judge(made, short)] == [False, True, False]
    assert all(each.reason for each in reference.judge(made, {}))


class Named(nn.Module):
    """As a model of transformers returns its logits and the hidden states behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = load_model("test_vit", image_size=64, model_kwargs={"depth": 1}).model

    def forward(self, images: Tensor) -> dict[str, Any]:
        net: Any = self.net
        states = net.forward_features(images)
        return {"logits": net.forward_head(states), "hidden": states.unbind(2)}


def test_every_tensor_of_a_nested_output_has_a_name(tmp_path: Path) -> None:
    """The manifest named fewer than there are, or was malformed by more than 64: a bundle that did
    not verify."""
    model = Named().eval()
    patch(model)
    images = torch.randn(2, 3, 64, 64)
    made = export(model, tmp_path / "out", formats=("torchscript",), inputs=images)
    names = [each["name"] for each in made.manifest["outputs"]]
    assert names == ["logits", *(f"hidden_{i}" for i in range(len(names) - 1))]
    assert len(names) > 64 and verify(made.path).ok


class Hides(nn.Module):
    def forward(self, logits: Tensor) -> Tensor:
        return torch.where(torch.arange(logits.shape[-1]) < 3, -torch.inf, logits)


def test_an_infinity_that_the_model_returns_is_no_error() -> None:
    """infinity - infinity would be a NaN among the original's errors, which nothing passes."""
    loaded = load_model("test_vit", image_size=64)
    model: Any = loaded.model
    model.head = nn.Sequential(model.head, Hides())
    patch(model)
    inputs = tuple(loaded.example_inputs(3))
    made = reference.make_reference(model, inputs)
    with torch.no_grad():
        good = {size: [model(inputs[0][:size]).numpy()] for size in (1, 2, 3)}
    assert not any(each.reason for each in reference.judge(made, good))
    finite = {size: [np.nan_to_num(outputs[0])] for size, outputs in good.items()}
    assert all("not finite where" in each.reason for each in reference.judge(made, finite))
    exact = reference.exact_outputs(model, {"example": inputs})
    cost = exact.cost(exact.own)
    assert cost["max_error"] < 1e-4 and cost["class_changed"] == 0 and 0 < exact.spread < math.inf
    assert exact.cost(np.nan_to_num(exact.own.numpy()))["max_error"] == math.inf


def test_the_text_tower_computes_what_the_clip_does() -> None:
    pytest.importorskip("open_clip")
    loaded = load_model("open_clip:ViT-S-32-alt", image_size=64)
    clip: Any = loaded.model
    tower = tower_of(clip, "text")
    images, tokens = loaded.example_inputs(2)
    with torch.no_grad():
        assert torch.equal(tower(tokens), clip.encode_text(tokens))
        assert torch.equal(tower_of(clip, "image")(images), clip.encode_image(images))
    assert not any(name.startswith("visual") for name in tower.state_dict())
    assert len(patch(tower).patched) == len(clip.transformer.resblocks)
    unpatch(tower)
    with pytest.raises(ArgumentError, match="'sound'"):
        tower_of(clip, "sound")
    with pytest.raises(ArgumentError, match="not a CLIP"):
        tower_of(nn.Linear(2, 2), "text")
