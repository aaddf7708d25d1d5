"""`--dynamic-size`: model.pt2 takes other image sizes, or one line says that the model does not.
`--aoti`: a package that AOTInductor compiled, verified beside the operator library."""

import json
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch

from elsa_core.errors import ExportError
from elsa_core.exporting.artefacts import brings_cpp_library
from elsa_core.exporting.bundle import export
from elsa_core.loading.loader import load_model
from elsa_core.patching.rewrite import patch
from elsa_core.proof import CheckReport, check

# Each stage halves the image, the first one quarters it; sizes that vary are slow to trace.
TWO_STAGES = {
    "depths": [1, 1], "embed_dims": [32, 64], "num_heads": [1, 2], "sr_ratios": [8, 4],
    "mlp_ratios": [8, 8],
}  # fmt: skip


def test_a_model_of_convolutions_and_attention_takes_other_sizes(tmp_path: Path) -> None:
    """Export itself compares it at other sizes with the model in float64."""
    loaded = load_model("pvt_v2_b0", image_size=96, model_kwargs=TWO_STAGES)
    patch(loaded.model)
    out, report = tmp_path / "out", check(loaded.model, loaded.example_inputs(1), stress=False)
    export(loaded.model, out, formats=("pt2",), dynamic_size=True, loaded=loaded, check=report)
    manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["inputs"][0]["dynamic_in_pt2"] == {"2": "height", "3": "width"}
    assert manifest["inputs"][0]["multiple_in_pt2"] == 8
    assert "multiples of 8." in (out / "README.md").read_text(encoding="utf-8")
    images = torch.randn(3, 3, 104, 88)
    with torch.no_grad():
        found = torch.export.load(out / "model.pt2").module()(images)
        torch.testing.assert_close(found, loaded.model(images))


def test_a_model_of_one_size_is_refused_in_one_line(report: CheckReport, tmp_path: Path) -> None:
    model = load_model("vit_tiny_patch16_224", image_size=64, model_kwargs={"depth": 1}).model
    patch(model)
    with pytest.raises(ExportError) as caught:
        export(model, tmp_path / "out", formats=("pt2",), dynamic_size=True, check=report)
    assert "\n" not in str(caught.value) and "dynamic_img_size=True" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_compiled_package_reproduces_the_model(compiled: Path) -> None:
    """Export itself runs the package in a fresh process at three batch sizes, or raises; it leaves
    the settings of Inductor as they were (asserted where the package is made)."""
    assert (compiled / "model.aoti.pt2").stat().st_size > 0


@pytest.mark.compiler
@pytest.mark.parametrize("static", [False, True])
def test_a_second_c_plus_plus_library_is_found(static: bool, tmp_path: Path) -> None:
    """A package that brings one ended its process by signal 11, without a word."""
    source, library, package = (tmp_path / f"x.{name}" for name in ("cpp", "so", "zip"))
    source.write_text("#include <iostream>\nvoid say() { std::cout << 1; }\n")
    command = ["g++", "-shared", "-fPIC", str(source), "-o", str(library)]
    subprocess.run([*command, *["-static-libstdc++"] * static], check=True)
    with zipfile.ZipFile(package, "w") as archive:
        archive.write(library, "data/x.so")
    assert brings_cpp_library(package) is static
