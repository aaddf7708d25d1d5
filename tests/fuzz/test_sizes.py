"""Sizes and attributes at the ends of 64 bits give a result or an error and end no process."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from elsa_core.backends import native


def test_sizes_at_the_ends_of_64_bits() -> None:
    """A fixed sample; `python -m tests.fuzz.sizes` runs 10 000. Its last line is the case."""
    if not native.load().ok:
        pytest.skip(native.load().reason)
    command = [sys.executable, "-m", "tests.fuzz.sizes", "--cases", "400"]
    if not all(importlib.util.find_spec(name) for name in ("onnx", "onnxruntime")):
        command.append("--no-onnx")
    root = Path(__file__).parents[2]
    found = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert found.returncode == 0, "\n".join((*found.stdout.splitlines()[-2:], found.stderr[-2000:]))
