"""Kernels by Triton's interpreter: each file listed here is tests for a process of their own, since
TRITON_INTERPRET is read where Triton is imported."""

import os
from pathlib import Path

import pytest
from processes import environment, python

pytest.importorskip("triton")
HERE = Path(__file__).parent


@pytest.mark.long
@pytest.mark.parametrize("name", ["fma_fallback", "linear", "stream"])
def test_kernels_by_the_interpreter(name: str) -> None:
    paths = os.pathsep.join(map(str, (HERE.parents[1], HERE.parent)))
    done = python("-m", "pytest", "-n", "0", "--durations=0", HERE / f"{name}_interpreted.py",
                  timeout=600, env=environment(TRITON_INTERPRET="1", PYTHONPATH=paths))  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
