"""fp16 and INT8 on request: what they cost against float64 is measured, shown and verified."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import Elsa
from test_hostile import rehashed, rewrite

from elsa_core.errors import ArgumentError, ExportError, ModelError
from elsa_core.exporting import replay
from elsa_core.exporting.bundle import Bundle, export
from elsa_core.exporting.reference import Exact, exact_outputs
from elsa_core.exporting.templates import load as template
from elsa_core.exporting.verify import verify
from elsa_core.loading import Loaded
from elsa_core.proof import CheckReport

ROWS = 5


@pytest.fixture(scope="module")
def exact(vit: Loaded) -> Exact:
    return exact_outputs(vit.model, {"noise": vit.example_inputs(ROWS)})


@pytest.fixture(scope="module")
def int8(
    vit: Loaded, report: CheckReport, exact: Exact, tmp_path_factory: pytest.TempPathFactory
) -> Bundle:
    target = tmp_path_factory.mktemp("int8") / "vit"
    return export(
        vit.model, target, formats=("onnx",), quantize="int8", loaded=vit, check=report, exact=exact
    )


def outputs(bundle: Bundle, format: str, inputs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """In batches of three, as they are measured: the scales of INT8 are those of a batch."""
    model = template.load(format, bundle.path)
    return np.concatenate([model(inputs[row : row + 3])[0] for row in range(0, len(inputs), 3)])


def test_what_the_cost_is_measured_on_comes_in_verified_batches(tmp_path: Path) -> None:
    """A GPU's plans are for these alone."""
    images = np.arange(9.0)[:, None]
    np.savez(tmp_path / "reference.npz", **{"input.0": images[:4]})
    np.savez(tmp_path / "more.npz", **{"input.0": images})

    def load(*_: Any) -> Any:
        return lambda x: [2 * x] if len(x) in (2, 4) else pytest.fail("it is not planned")

    facts = {"reference": {"batch_sizes": [2, 4]}, "inputs": [{}]}
    code = {"load": load, "manifest": lambda bundle: facts}
    files = [str(tmp_path / name) for name in ("", "out.npz", "more.npz")]
    replay._replay(code, "pt2", *files)
    with np.load(tmp_path / "out.npz") as stored:
        assert np.array_equal(stored["further"], 2 * images)


def test_the_cost_in_the_manifest_is_the_one_that_is_measured(int8: Bundle, exact: Exact) -> None:
    accuracy = int8.manifest["accuracy"]
    assert accuracy["rows"] == ROWS and accuracy["inputs"] == f"noise {ROWS}"
    images = exact.inputs[0].numpy()
    for format, file in (("onnx", "model.onnx"), ("onnx-int8", "model.int8.onnx")):
        errors = np.abs(outputs(int8, format, images) - exact.output.numpy())
        found = accuracy["costs"][file]
        assert found["mean_error"] == pytest.approx(errors.mean(), rel=1e-3)
        assert found["max_error"] == pytest.approx(errors.max(), rel=1e-3)
    costs = accuracy["costs"]
    assert costs["model.onnx"]["max_error"] < 1e-5
    # 8 bits, not 24: an INT8 file that is as good as float32 would not be one.
    assert costs["model.int8.onnx"]["mean_error"] > 100 * costs["float32"]["mean_error"]
    assert costs["model.int8.onnx"]["max_error"] < accuracy["output_std"]


def test_classes_that_change_are_counted(exact: Exact) -> None:
    turned = exact.output.numpy().copy()
    turned[:2] *= -1
    assert exact.cost(turned)["class_changed"] == 2
    assert exact.cost(exact.output.numpy())["class_changed"] == 0
    turned[0, 0] = np.nan
    assert exact.cost(turned)["max_error"] == math.inf
    assert exact.to_dict({"x": exact.cost(turned)}, True)["costs"]["x"]["max_error"] is None
    with pytest.raises(ExportError, match="shape"):
        exact.cost(turned[:1])


def test_an_int8_bundle_verifies_and_is_called_an_approximation(int8: Bundle, elsa: Elsa) -> None:
    answer = elsa("verify", int8.path, "--trust")
    answer.shows("onnx reproduces the model; onnx-int8 errs as the manifest says")
    text = (int8.path / "README.md").read_text()
    assert "## What rounding costs" in text and "| model.int8.onnx |" in text
    assert "is an approximation" in text
    model = template.load(bundle=int8.path)
    images = np.zeros((1, 3, 64, 64), np.float32)
    assert np.array_equal(model(images)[0], template.load("onnx", int8.path)(images)[0])
    small, whole = ((int8.path / f"model{each}.onnx").stat().st_size for each in (".int8", ""))
    assert small < 0.6 * whole


def test_an_int8_file_that_errs_more_than_it_did_fails(int8: Bundle, tmp_path: Path) -> None:
    import shutil

    import onnx
    from onnx import numpy_helper

    copy = Path(shutil.copytree(int8.path, tmp_path / "copy"))
    model = onnx.load(copy / "model.int8.onnx")
    weights = [one for one in model.graph.initializer if one.name.endswith("_quantized")]
    values = numpy_helper.to_array(weights[0])
    weights[0].CopyFrom(numpy_helper.from_array(values[::-1].copy(), weights[0].name))
    onnx.save(model, copy / "model.int8.onnx")
    rehashed(copy, "model.int8.onnx")
    failures = verify(copy).failures
    assert len(failures) == 1 and failures[0].startswith("onnx-int8: at batch 1")
    for bad in (None, {}, {"1": [[1.0]]}, {str(n): [[1e300, -1.0]] for n in (1, 2, 3)}):
        rewrite(copy, lambda m, bad=bad: m["artefacts"]["onnx-int8"].update(norms=bad))
        with pytest.raises(ModelError, match=r"errors of model\.int8\.onnx"):
            verify(copy)


def test_int8_needs_onnx_and_float32(vit: Loaded, tmp_path: Path, elsa: Elsa) -> None:
    with pytest.raises(ArgumentError, match=r"quantize concerns model\.onnx"):
        export(vit.model, tmp_path / "a", formats=("pt2",), quantize="int8", loaded=vit)
    with pytest.raises(ArgumentError, match="choose int8"):
        export(vit.model, tmp_path / "a", quantize="int4", loaded=vit)
    for arguments in (["--formats", "pt2"], ["--dtype", "float16"]):
        assert elsa("export", "test_vit", "--quantize", "int8", *arguments, "-q").code == 2
    assert list(tmp_path.iterdir()) == []


def test_fp16_says_what_it_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsa: Elsa
) -> None:
    """Against float64 of the float32 weights, not of the rounded ones."""
    monkeypatch.chdir(tmp_path)
    command = ["export", "test_vit", "--img", "48", "--dtype", "float16", "--formats", "onnx"]
    elsa(*command, "-o", "half").shows(
        "against float64 of the float32 weights", "class changed",
        "reproduce the float16 model", "noise 3, constant 3",
    )  # fmt: skip
    accuracy = json.loads((tmp_path / "half/manifest.json").read_text())["accuracy"]
    assert accuracy["rows"] == 12
    own, half = accuracy["costs"]["float32"], accuracy["costs"]["model.onnx"]
    assert half["mean_error"] > 100 * own["mean_error"] and half["class_changed"] is not None


def test_openvino_is_one_more_runtime(vit: Loaded, report: CheckReport, tmp_path: Path) -> None:
    """Of a file without nodes of elsa's; at opset 23, which older versions of ONNX Runtime lack."""
    pytest.importorskip("openvino", reason="OpenVINO is not installed")
    made = export(
        vit.model, tmp_path / "out", formats=("onnx",), onnx_mode="standard", opset=23, loaded=vit,
        check=report,
    )  # fmt: skip
    assert made.artefacts[0].openvino == "ok"
    readme = (made.path / "README.md").read_text()
    assert "OpenVINO reads it too, and reproduced" in readme
    assert made.manifest["artefacts"]["onnx"]["runtime"] == {"onnxruntime": ">=1.23"}
    assert "'onnxruntime>=1.23'" in readme
    images = vit.example_inputs(2)[0].numpy()
    mine = template.load("onnx", made.path, runtime="openvino")(images)[0]
    assert np.abs(mine - template.load("onnx", made.path)(images)[0]).max() < 1e-5
