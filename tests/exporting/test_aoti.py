"""`--aoti`: a package that AOTInductor compiled, verified beside the operator library."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from torch._inductor import config, cpp_builder

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


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_one_standard_library(tmp_path: Path) -> None:
    """A compiler that has a static libstdc++ alone links this process's."""
    own, source, built = tmp_path / "g++", tmp_path / "one.cpp", tmp_path / "one.so"
    static = tmp_path / "own"
    static.mkdir()
    shutil.copyfile(_answer(["g++", "-print-file-name=libstdc++.a"]), static / "libstdc++.a")
    own.write_text(
        '#!/bin/sh\n[ "$1" = -print-file-name=libstdc++.so ] && echo libstdc++.so && exit\n'
        f'exec g++ "$@" -L{static}\n'
    )
    own.chmod(0o755)
    source.write_text("#include <iostream>\nvoid f() { std::cout << 1; }\n")
    linked = [str(source), "-shared", "-fPIC", "-o", str(built)]
    _answer([str(own), *linked])
    assert "libstdc++.so.6" not in _answer(["ldd", str(built)])
    with config.patch({"cpp.cxx": (None, str(own))}):
        with exported_program._one_standard_library():
            _answer([cpp_builder.get_cpp_compiler(), *linked])
        assert cpp_builder.get_cpp_compiler() == str(own)
    assert "libstdc++.so.6" in _answer(["ldd", str(built)])


def _answer(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
