"""Every operator gives float64's results, on every backend that must serve a case, in each mode."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import elsa_core

from .backends import HAS, INSTRUCTION_SETS, table
from .cases import Case
from .judge import judge

WHOLE = os.environ.get("WHOLE_MATRICES", "0") != "0"
ROOT = Path(__file__).parents[2]
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
ASKED = """
import torch, elsa_core
q = torch.ones(1, 1, 2, 8)
elsa_core.explain(q, q, q, backend="native")
"""
ROWS = [
    pytest.param(
        device, case, mode, backend, id=f"{device}-{case.operator}-{case}-{mode}-{backend}",
        marks=[pytest.mark.gpu] if device == "cuda" else [],
    )
    for device in DEVICES
    for operator in HAS
    for case, mode, backend in table(operator, device)
]  # fmt: skip


@pytest.mark.parametrize(("device", "case", "mode", "backend"), ROWS)
def test_results_are_exact(device: str, case: Case, mode: str, backend: str) -> None:
    assert not judge(case, backend, mode, device)


@pytest.mark.long
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_every_instruction_set(isa: str) -> None:
    """The CPU kernels of each instruction set that this processor has, in a process of its own: the
    rows above are the best one's."""
    q = torch.randn(1, 1, 2, 8)
    if elsa_core.explain(q, q, q, backend="native").schedule.startswith(isa):
        pytest.skip(f"{isa} kernels are what the rows above run")
    if "lacks it" in run("-c", ASKED, isa=isa).stderr:
        pytest.skip(f"this CPU has no {isa}")
    done = run("-m", "tests.conformance.draw", "--table", "--backend", "native", "--every",
               "1" if WHOLE else "2", isa=isa)  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


def run(*words: str, isa: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=500,
        check=False, env=os.environ | {"ELSA_CPU_ISA": isa},
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.is_available(), reason="the rows above are a GPU's too")
def test_there_is_a_gpu() -> None:
    pytest.skip("no GPU: its backends, and graphs, are not tried")
