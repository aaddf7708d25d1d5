"""`--aoti`: a package that AOTInductor compiled, verified beside the operator library."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from torch._inductor import config

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
