"""Building, caching and loading the CPU library: every way it can go wrong is one clear line."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elsa_core.backends import native

LOAD = """
import logging
logging.basicConfig(level="WARNING", format="%(message)s")
import torch, elsa_core as elsa
from elsa_core.backends import native
torch.manual_seed(0)
q = torch.randn(1, 2, 49, 16)
route = elsa.explain(q, q, q)
sdpa = torch.nn.functional.scaled_dot_product_attention
exact = sdpa(q.double(), q.double(), q.double())
error = lambda out: (out - exact).norm() / exact.norm()
ours, peer = error(elsa.attention(q, q, q)), error(sdpa(q, q, q))
assert ours <= 2 * peer + 2.4e-7, f"error {ours:.3g}, PyTorch's {peer:.3g}"  # two ulp
print(route.backend, native.isa() if route.backend == "native" else "|".join(route.reasons))
"""


def run(program: str = LOAD, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, timeout=300, env=environment, check=False,
    )  # fmt: skip


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, done.stderr
    return lines[0]


@pytest.fixture(scope="module")
def library() -> Path:
    return native.build()


def test_two_processes_build_at_once(tmp_path: Path) -> None:
    environment = {**os.environ, "ELSA_CACHE_DIR": str(tmp_path)}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", LOAD], env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for _ in range(2)
    ]  # fmt: skip
    for process in both:
        out, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        assert out.startswith("native")
    left = sorted(p.name for p in (tmp_path / "native").iterdir() if p.suffix != ".lock")
    assert left == [native.library_path().name]


@pytest.mark.parametrize(
    ("compiler", "words"),
    [("/bin/false", "failed"), ("no-such-compiler", "does not exist")],
)
def test_a_compiler_that_fails_leaves_eager_and_one_line(
    compiler: str, words: str, tmp_path: Path
) -> None:
    done = run(CXX=compiler, ELSA_CACHE_DIR=str(tmp_path))
    line = one_line(done)
    assert compiler in line
    assert words in line
    assert done.stdout.startswith("eager native:")
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and p.suffix != ".lock"]


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    done = run(ELSA_CACHE_DIR=str(tmp_path / "file" / "cache"))
    assert "ELSA_CACHE_DIR" in one_line(done)
    assert done.stdout.startswith("eager")


def test_it_can_be_switched_off() -> None:
    done = run(ELSA_NATIVE="0")
    assert done.stdout.strip() == "eager native: switched off by ELSA_NATIVE=0"
    assert done.stderr == ""


def test_an_unknown_instruction_set_is_refused_not_ignored(library: Path) -> None:
    done = run(ELSA_CPU_ISA="avx9000")
    assert "avx9000" in one_line(done)
    assert done.stdout.startswith("eager")


def test_an_interrupted_build_leaves_nothing(tmp_path: Path) -> None:
    slow = tmp_path / "slow-compiler"
    slow.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo slow 1.0 && exit\n'
        f"touch {tmp_path}/started-$$\nexec sleep 60\n"
    )
    slow.chmod(0o755)
    program = "from elsa_core.backends import native\nnative.build()"
    environment = {**os.environ, "CXX": str(slow), "ELSA_CACHE_DIR": str(tmp_path / "cache")}
    process = subprocess.Popen([sys.executable, "-c", program], env=environment, stderr=-3)
    cache = tmp_path / "cache" / "native"
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("started-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list(cache.glob(".build-*"))
    time.sleep(0.5)
    process.send_signal(2)
    assert process.wait(timeout=30) != 0
    assert not [p for p in cache.iterdir() if p.suffix != ".lock"]


def test_a_library_that_is_there_is_not_built_again(library: Path) -> None:
    before = library.stat().st_mtime_ns
    assert native.build() == library
    assert library.stat().st_mtime_ns == before


def test_status_builds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELSA_CACHE_DIR", str(tmp_path))
    facts = native.status()
    assert facts["built"] is False
    assert facts["compiler"]
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm of binutils is not installed")
def test_it_needs_no_python_and_no_cxx_symbol_of_torch(library: Path) -> None:
    done = subprocess.run(
        ["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True, check=True
    )
    names = [line.split()[-1] for line in done.stdout.splitlines()]
    assert any("torch_parallel_for" in name for name in names)
    assert not [name for name in names if re.match(r"_?Py|_ZN2at|_ZN3c10|_ZN5torch", name)]


def test_it_serves_a_process_without_elsa(library: Path) -> None:
    program = f"""
import torch
torch.ops.load_library({str(library)!r})
torch.manual_seed(0)
q = torch.randn(2, 3, 50, 16)
out, lse = torch.ops.elsa.attention(q, q, q, None, False, 0.25, "strict")
sdpa = torch.nn.functional.scaled_dot_product_attention
exact = sdpa(q.double(), q.double(), q.double())
error = lambda out: (out - exact).norm() / exact.norm()
assert error(out) <= 2 * error(sdpa(q, q, q)) + 2.4e-7 and lse.shape == (2, 3, 50)
import sys
assert "elsa_core" not in sys.modules
import elsa_core as elsa  # afterwards the package joins in: the schema is defined already
assert torch.equal(elsa.attention(q, q, q), out)
print("served")
"""
    done = run(program)
    assert done.stdout.strip() == "served", done.stderr
