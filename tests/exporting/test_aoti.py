"""`--aoti`: a package that AOTInductor compiled, verified beside the operator library."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from torch._inductor import config

from elsa_core.exporting import exported_program
from elsa_core.exporting.bundle import export
from elsa_core.loading.loader import load_model
from elsa_core.patching.rewrite import patch


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_a_compiled_package_reproduces_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Export itself runs the package in a fresh process at three batch sizes, or raises."""
    loaded = load_model("test_vit", image_size=64, model_kwargs={"depth": 1})
    patch(loaded.model)
    monkeypatch.setattr(config.aot_inductor, "compile_wrapper_opt_level", "O0")  # half of the time
    export(loaded.model, tmp_path / "out", formats=("pt2",), aoti=True, loaded=loaded)
    assert (tmp_path / "out" / "model.aoti.pt2").stat().st_size > 0


def test_one_standard_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A compiler that finds a static libstdc++ alone is given this process's; its environment is
    as before afterwards."""
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho libstdc++.so\n")
    compiler.chmod(0o755)
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", lambda: str(compiler))
    monkeypatch.setenv("LIBRARY_PATH", "/before")
    with exported_program._one_standard_library():
        first, *rest = os.environ["LIBRARY_PATH"].split(os.pathsep)
        assert (Path(first) / "libstdc++.so").resolve().name.startswith("libstdc++.so.6")
        assert rest == ["/before"]
    assert os.environ["LIBRARY_PATH"] == "/before" and not Path(first).exists()
    compiler.write_text("#!/bin/sh\necho /usr/lib/libstdc++.so\n")
    with exported_program._one_standard_library():
        assert os.environ["LIBRARY_PATH"] == "/before"
