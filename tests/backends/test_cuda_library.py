"""The CUDA library without a GPU: what it launches, over a driver that writes down its calls."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "csrc" / "cuda"


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A driver that gives out handles and runs nothing."""
    path = tmp_path_factory.mktemp("stub") / "libcuda_stub.so"
    command = ["g++", "-std=c++20", "-O1", "-Wall", "-Werror", "-fPIC", "-shared", f"-I{SOURCES}"]
    subprocess.run([*command, str(HERE / "cuda_stub.cpp"), "-o", str(path)], check=True)
    return path


def run(stub: Path, check: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """One check of `cuda_calls.py` in a process of its own."""
    environment = {**os.environ, "STUB_LOG": str(folder / "log"), "ELSA_NATIVE": "0", **variables}
    return subprocess.run(
        [sys.executable, str(HERE / "cuda_calls.py"), str(stub), check],
        capture_output=True, text=True, check=False, env=environment, timeout=600,
    )  # fmt: skip


@pytest.mark.parametrize("check", ["attention", "hopper"])
def test_launches_are_those_of_triton(check: str, stub: Path, tmp_path: Path) -> None:
    """The second call of a layout makes the launches of the first, with its own addresses."""
    done = run(stub, check, tmp_path)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
