"""`--aoti`: a package that AOTInductor compiled, verified beside the operator library."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.mark.long
def test_a_compiled_package_reproduces_the_model(compiled: Path) -> None:
    """Export itself runs the package in a fresh process at three batch sizes, or raises; it leaves
    the settings of Inductor as they were (asserted where the package is made)."""
    assert (compiled / "model.aoti.pt2").stat().st_size > 0
