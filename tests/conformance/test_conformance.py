"""Every operator gives float64's results, on every backend that must serve a case, in each mode."""

import math
import os
import random
import statistics
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import python
from torch import Tensor

import elsa_core

from . import draw, edges
from .backends import HAS, INSTRUCTION_SETS, WHOLE, backends, serves, table, taken
from .cases import CASES, Case, build
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


@pytest.mark.parametrize("operator", HAS, ids=lambda name: f"cpu-{name}-")
def test_drawn_calls_are_exact(operator: str) -> None:
    """The same ones each time; `python -m tests.conformance.draw` takes others for hours."""
    r = random.Random(0)
    for _ in range(30):
        drawn, seed = draw.drawn(operator, r.randrange(1 << 30), r), r.randrange(1 << 30)
        for backend in backends(operator, "cpu"):
            if serves(backend, drawn, "infer"):
                assert not judge(drawn, backend, "infer", seed=seed), (drawn.changes, seed)


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


@pytest.mark.gpu
@pytest.mark.parametrize("operator", [name for name in HAS if name != "linear"])
def test_repeats_are_equal_bit_by_bit(operator: str) -> None:
    """Of results and gradients by Triton, while another stream is busy. PyTorch's kernels compute
    some gradients of dense attention, and add those of the query in no fixed order."""
    rows = [row for row in table(operator, "cuda") if row[1:] == ("train", "triton")]
    for case, mode, backend in rows[::9]:
        call, along = build(case, "cuda"), references(case, mode, "cuda", 0)[2]
        found = []
        for _ in range(3):
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.ones(1 << 24, device="cuda").cos_().sin_()
            found.append(execute(case, mode, backend, call.arguments, call.wants, along))
        softmax = operator in ("attention", "sparsity") or getattr(case, "alpha", None) == 1.0
        for name in found[0].keys() - ({"d query"} if softmax else set()):
            first = found[0][name]
            assert all(torch.equal(first, other[name]) for other in found[1:]), (case.name, name)


SLOPES = {
    "expanded": lambda t: t.new_ones(()).expand(t.shape),
    "transposed": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
    "every second": lambda t: torch.stack([t * math.nan, t], -1)[..., 1],
}


@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize("operator", HAS, ids=lambda name: f"cpu-{name}-")
def test_gradients_of_any_slope_and_of_one_operand(operator: str, backend: str) -> None:
    """What is propagated back may have any strides; operands without a gradient change no bit."""
    if backend not in HAS[operator]:
        return
    case = CASES[operator][-1] if operator == "linear" else Case(operator, "a step", {})
    call = build(case)

    def step(wants: tuple[str, ...], slope: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        leaves = {name: call.arguments[name].detach().requires_grad_() for name in wants}
        out = public(operator, backend, False)(call.arguments | leaves)["out"]
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        grads = torch.autograd.grad(
            out, list(leaves.values()), grad if slope is None else slope(grad)
        )
        return dict(zip(wants, grads, strict=True))

    whole = step(call.wants, None)
    for name in call.wants:
        torch.testing.assert_close(step((name,), None)[name], whole[name], rtol=1e-5, atol=1e-5)
    for slope in SLOPES.values():
        right = step(call.wants, lambda t, slope=slope: slope(t).contiguous())
        for name, grad in step(call.wants, slope).items():
            torch.testing.assert_close(grad, right[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 50, 64), (1, 197, 256), (2, 197, 256), (8, 197, 256),
                                   (197, 197, 64), (197, 197, 256), (49, 49, 256)])  # fmt: skip
def test_strict_rounds_as_little_as_pytorch(shape: tuple[int, int, int]) -> None:
    """One chain of sums over a long head dimension has 2.6 times the error; the median counts."""
    queries, keys, dim = shape
    row = Case("attention", "rounding", {"queries": queries, "keys": keys, "dim": dim, "heads": 4})
    ratios = []
    for seed in range(7):
        exact, peers, _ = references(row, "infer", "cpu", seed)
        arguments = build(row, seed=seed).arguments
        out = execute(row, "infer", "native", arguments, (), None)["out"]
        error, other = ((t.double() - exact["out"]).norm() for t in (out, peers["out"]))
        ratios.append((error / other).item())
    assert statistics.median(ratios) <= 1.25, ratios


@pytest.mark.long
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_every_instruction_set(isa: str) -> None:
    """The CPU kernels of each instruction set that this processor has, in a process of its own: the
    rows above are the best one's."""
    q = torch.randn(1, 1, 2, 8)
    if elsa_core.explain(q, q, q, backend="native").schedule.startswith(isa):
        pytest.skip(f"{isa} kernels are what the rows above run")
    if "lacks it" in run("-c", ASKED, ELSA_CPU_ISA=isa).stderr:
        pytest.skip(f"this CPU has no {isa}")
    every = "1" if WHOLE else "5"
    without_fault("--table", "--backend", "native", "--every", every, ELSA_CPU_ISA=isa)


# Of each operator's rows, one in so many is in the fixed sample.
INTERPRETED = {
    "attention": 12, "window_attention": 12, "linear": 6, "varlen_attention": 9,
    "entmax_attention": 21, "entmax_varlen_attention": 15, "sparsity": 9,
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("operator", INTERPRETED)
def test_triton_kernels_by_the_interpreter(operator: str) -> None:
    """Forward and gradients, with a fence behind every buffer; before anyone has Triton, hence a
    process of its own."""
    pytest.importorskip("triton")
    every = "1" if WHOLE else str(INTERPRETED[operator])
    words = ("--operator", operator, "--every", every)
    without_fault("--table", "--on-cpu", "triton", *words, TRITON_INTERPRET="1")


@pytest.mark.long
def test_edges_of_triton_kernels_by_the_interpreter() -> None:
    pytest.importorskip("triton")
    without_fault("--edges", "--on-cpu", "triton", TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.parametrize("edge", edges.GPU, ids=lambda edge: edge.__name__)
def test_edges_on_a_gpu(edge: edges.Edge) -> None:
    edge("cuda", "triton")


@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize("edge", edges.EVERYWHERE, ids=lambda edge: edge.__name__)
def test_edges_on_the_cpu(edge: edges.Edge, backend: str) -> None:
    edge("cpu", backend)


@pytest.mark.compiler
@pytest.mark.long
def test_portable_kernels_as_cpp() -> None:
    """Thread by thread, each tile size compiled anew: hence few rows."""
    without_fault("--table", "--on-cpu", "portable", "--every", "1" if WHOLE else "12")


def without_fault(*words: str, **variables: str) -> None:
    """The command that draws calls finds none."""
    done = run("-m", "tests.conformance.draw", *words, **variables)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return python(*words, cwd=ROOT, timeout=500, env=os.environ | variables)
