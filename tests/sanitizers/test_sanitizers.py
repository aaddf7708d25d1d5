"""The short pass: the best kernels of this machine, the bindings of both runtimes, and of the
short pass's tests every third one.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from elsa_core.backends import native

from .compile import FLAGS
from .run import SHORT, build, missing, run

REASON = missing()


@pytest.mark.long
@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_the_kernels_are_clean(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """No byte beyond an array, no overflow, no misaligned or invalid value."""
    name = native.isa()
    objects = pytestconfig.cache.mkdir("sanitizers") if pytestconfig.cache else None
    build(tmp_path, name, "-O0", objects)
    code, text = run(tmp_path, name, SHORT)
    assert code == 0, text
    assert "passed" in text and "skipped" not in text


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
