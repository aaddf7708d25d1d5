"""compute-sanitizer over GPU tests: what the command makes of its answers, and a short pass."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conformance.backends import HAS, table

from . import cuda


def stand_in(folder: Path, text: str, code: int) -> None:
    """A compute-sanitizer that prints a text and its arguments."""
    path = folder / cuda.PROGRAM
    path.write_text(f"#!/bin/sh\necho \"$@\"\ncat <<'END'\n{text}\nEND\nexit {code}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("text", "code", "expected"),
    [
        ("1 passed\n========= ERROR SUMMARY: 0 errors", 0, (0, 0, True)),
        ("1 skipped\n========= ERROR SUMMARY: 0 errors", 0, (0, 0, False)),
        ("========= ERROR SUMMARY: 0 errors", 1, (0, 1, False)),  # a test failed
        ("========= ERROR SUMMARY: 1 error", 86, (1, 0, False)),
        ("========= ERROR SUMMARY: 0 errors\n========= ERROR SUMMARY: 7 errors", 86, (7, 0, False)),
        ("1 passed", 0, (None, 0, False)),  # the sanitizer did not run
        ("1 passed", 86, (None, 86, False)),
    ],
)
def test_answers(
    text: str, code: int, expected: tuple[object, ...], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    stand_in(tmp_path, text, code)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    answer = cuda.run("initcheck", ["tests/backends/test_portable_gpu.py"])
    assert (answer.errors, answer.code, answer.clean) == expected
    assert "--tool initcheck --error-exitcode 86" in answer.text
    assert "test_portable_gpu.py" in answer.text and "not graph" in answer.text


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """A line for each file and tool; 1 where one is not clean, 3 without a sanitizer."""
    monkeypatch.setattr(cuda, "missing", lambda: "")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    stand_in(tmp_path, "1 passed\n========= ERROR SUMMARY: 0 errors", 0)
    assert cuda.main(["a", "b"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" (")[0] for line in lines] == [
        "memcheck a: clean", "memcheck b: clean", "initcheck a: clean", "initcheck b: clean"
    ]  # fmt: skip
    stand_in(tmp_path, "========= ERROR SUMMARY: 2 errors", cuda.FOUND)
    assert cuda.main(["--tool", "memcheck", "a"]) == 1
    assert capsys.readouterr().out.startswith("memcheck a: 2 errors, exit 0\n")
    monkeypatch.setattr(cuda, "missing", lambda: "no NVIDIA GPU")
    assert cuda.main([]) == 3
    assert capsys.readouterr().err == "error: no NVIDIA GPU\n"


def test_the_files_are_there() -> None:
    assert all((cuda.ROOT / path).exists() for path in cuda.EVERYTHING)
    for test in cuda.SHORT:
        path, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (cuda.ROOT / path).read_text(encoding="utf-8")
    rows = {
        f"{name}-{case}-{mode}-{backend}"
        for name in HAS
        for case, mode, backend in table(name, "cuda")
    }
    asked = {test.partition("[cuda-")[2].rstrip("]") for test in cuda.SHORT}
    assert asked <= rows, asked - rows


BEYOND = """
import torch, triton
from triton import language as tl
@triton.jit
def copies(x, y, B: tl.constexpr):
    at = tl.arange(0, B)
    tl.store(y + at, tl.load(x + at))
x = torch.{fill}(1 << 12, device="cuda")
y = torch.zeros(1 << {power}, device="cuda")
copies[(1,)](x, y, B=1 << 12)
torch.cuda.synchronize()
"""


@pytest.mark.parametrize(
    ("tool", "fill", "power"), [("memcheck", "zeros", 2), ("initcheck", "empty", 12)]
)
@pytest.mark.gpu
def test_the_tools_find_defects(tool: str, fill: str, power: int, tmp_path: Path) -> None:
    """A write far beyond an allocation, a read of what nobody wrote."""
    if reason := cuda.missing():
        pytest.skip(reason)
    source = tmp_path / "beyond.py"
    source.write_text(BEYOND.format(fill=fill, power=power))
    words = cuda.command(tool, [])
    words = [*words[: words.index(sys.executable)], sys.executable, str(source)]
    done = subprocess.run(
        words, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )  # fmt: skip
    assert done.returncode == cuda.FOUND, done.stdout + done.stderr
    assert "copies" in done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.gpu
@pytest.mark.parametrize("tool", cuda.TOOLS)
def test_the_kernels_are_clean(tool: str) -> None:
    """The short pass; the command takes all operator tests."""
    if reason := cuda.missing():
        pytest.skip(reason)
    answer = cuda.run(tool, cuda.SHORT)
    assert answer.clean, answer.text
    assert " passed" in answer.text and " skipped" not in answer.text
