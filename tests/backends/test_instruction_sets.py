"""The tests of the CPU kernels again, with the kernels of every instruction set of this machine.

Half of the cases of each test: see `every_second`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from native_kernels import once, run

from elsa_core.backends import compiler, native

FILES = (
    "test_native.py", "test_native_dropout.py", "test_native_entmax.py", "test_native_gradient.py",
    "test_native_varlen.py", "test_native_sparse.py", "test_native_window.py",
)  # fmt: skip
SETS = [name.lower() for name in compiler.kernels()]  # a CPU that has one has those before it


@pytest.mark.long
@once
@pytest.mark.parametrize("isa", SETS)
def test_every_instruction_set(isa: str) -> None:
    answer = native.load()
    assert answer.ok, answer.reason  # a machine that tests elsa has a compiler
    best = SETS.index(native.isa())
    if SETS.index(isa) == best:
        pytest.skip(f"{isa} kernels are what the other tests run")
    if SETS.index(isa) > best:
        pytest.skip(f"this CPU has no {isa}")
    files = [str(Path(__file__).with_name(name)) for name in FILES]
    options = ("-x", "-q", "-o", "addopts=", "-p", "no:cacheprovider", "-p", "every_second")
    # Plugins that these files do not need take longer to import than some of their tests to run.
    done = run(
        "-m", "pytest", *options, *files, ELSA_CPU_ISA=isa, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",
        HALF=str(SETS.index(isa) % 2),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
