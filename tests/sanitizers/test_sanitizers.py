"""The short pass: the best kernels of this machine, the bindings of both runtimes, and of the
short pass's tests every third one.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from sampling import some

from elsa_core.backends import native

from .compile import FLAGS
from .run import BACKENDS, EVERYTHING, ROOT, SHORT, build, missing, run

REASON = missing()


@pytest.mark.long
@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_the_kernels_are_clean(tmp_path: Path) -> None:
    """No byte beyond an array, no overflow, no misaligned or invalid value."""
    name = native.isa()
    build(tmp_path, name, "-O0")
    code, text = run(tmp_path, name, tuple(some(SHORT, one_in=3)))
    assert code == 0, text
    assert "passed" in text and "skipped" not in text


def test_the_command_takes_all_operator_tests() -> None:
    """Those of the sparse kernels were left out when they were new."""
    found = {
        f"{BACKENDS}/{path.name}"
        for path in (ROOT / BACKENDS).glob("test_native*.py")
        if "from native_kernels import" in path.read_text(encoding="utf-8")
    }
    assert len(found) > 1 and found <= set(EVERYTHING)


@pytest.mark.skipif(bool(REASON), reason=REASON)
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("int* volatile a = new int[4]{}; return a[argc + 3];", "heap-buffer-overflow"),
        ("int a = 2147483647; return a + argc;", "signed integer overflow"),
    ],
)
def test_the_flags_find_defects(body: str, words: str, tmp_path: Path) -> None:
    """Sanitizers that are switched on in name alone would find nothing."""
    source = tmp_path / "a.cpp"
    source.write_text(f"int main(int argc, char**) {{ {body} }}\n")
    program = tmp_path / "a"
    subprocess.run(["g++", *FLAGS, "-O1", str(source), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert done.returncode != 0 and words in done.stderr, (sys.platform, done.stderr)
