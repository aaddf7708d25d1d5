"""Every operator gives float64's results, on every backend that must serve a case, in each mode."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import elsa_core

from .backends import HAS, INSTRUCTION_SETS, WHOLE, table, taken
from .cases import Case, build
from .judge import execute, judge, public, references

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
    if device == "cuda" or taken(case, mode, backend)
]  # fmt: skip


@pytest.mark.parametrize(("device", "case", "mode", "backend"), ROWS)
def test_results_are_exact(device: str, case: Case, mode: str, backend: str) -> None:
    assert not judge(case, backend, mode, device)


NATIVE = [operator for operator in HAS if "native" in HAS[operator]]


@pytest.mark.parametrize("operator", NATIVE, ids=lambda name: f"cpu-{name}-native")
def test_bits_do_not_depend_on_threads(operator: str) -> None:
    """Of float32 results and gradients; nor do they differ from call to call."""
    rows = [row for row in table(operator, "cpu") if row[1:] == ("train", "native")]
    for case, mode, backend in [row for row in rows if row[0].dtype == "float32"][::9]:
        found = []
        for threads in (1, 3, 1):
            torch.set_num_threads(threads)
            call = build(case)
            along = references(case, mode, "cpu", 0)[2]
            found.append(execute(case, mode, backend, call.arguments, call.wants, along))
        for name, first in found[0].items():
            assert all(torch.equal(first, other[name]) for other in found[1:]), (case.name, name)


@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize(
    "operator", ["attention", "dropout", "sparsity"], ids=lambda o: f"cpu-{o}-"
)
def test_a_row_that_sees_nothing_is_zero_whatever_values_hold(operator: str, backend: str) -> None:
    call = build(Case(operator, "a hidden row", {"mask": "hidden row", "queries": 20}))
    call.arguments["value"][..., 3, :] = math.inf
    call.arguments["attn_mask"][..., 3] = False
    for mask in (call.arguments["attn_mask"], torch.zeros(20, 20, dtype=torch.bool)):
        out = public(operator, backend, False)(call.arguments | {"attn_mask": mask})["out"]
        assert not out[:, :, 3].any() and (mask.any() or not out.any())


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
               "1" if WHOLE else "5", isa=isa)  # fmt: skip
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
