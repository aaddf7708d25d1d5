"""`--aoti`: a package that AOTInductor compiled, verified beside the operator library."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest

from elsa_core.exporting.artefacts import brings_cpp_library


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
