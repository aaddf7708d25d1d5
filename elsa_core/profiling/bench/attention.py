"""`elsa bench attention`: measure cases against their peers."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from elsa_core import reference
from elsa_core.errors import UnavailableError
from elsa_core.measuring import busy, environment, timing
from elsa_core.measuring.intervals import digits, percentile
from elsa_core.measuring.timing import Contender
from elsa_core.precision import DTYPES
from elsa_core.profiling.bench.cases import Case, bench_of, inputs
from elsa_core.profiling.bench.peers import Inputs, field_of
from elsa_core.profiling.bench.results import CaseResult, Measurement, Report, Settings, compare

Progress = Callable[[str, int, int], None]

# Scores of the oracle for one case; beyond it, two heads and then evenly spread rows are judged.
_ORACLE_SCORES: Final = {"cpu": 2**25, "cuda": 2**30}
_GEMM_SIZE: Final = {"cpu": 1024, "cuda": 8192}
_LOOK_BACK: Final = 1.5  # seconds after which the driver's utilisation no longer holds our own work


def run(
    cases: Sequence[Case],
    *,
    device: torch.device | str = "cpu",
    settings: Settings | None = None,
    progress: Progress | None = None,
) -> Report:
    """Measure `cases` on `device`, one after another.

    A contender that fails is left out of its case with the reason; it ends nothing.

    Args:
        cases: from `elsa_core.profiling.bench.cases.select`.
        device: "cpu" or a CUDA device.
        settings: how to measure.
        progress: called with (name of the case, index, number of cases) before each.

    Raises:
        UnavailableError: `device` is CUDA and there is none.
    """
    device = torch.device(device)
    settings = settings or Settings()
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UnavailableError("device: torch sees no CUDA GPU; use --device cpu")
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    occupied = busy.reason(device)
    results = []
    matmul = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # no peer may compute fp32 in TF32
    try:
        limits = ceilings(device, sorted({case.dtype for case in cases}), settings)
        for i, case in enumerate(cases):
            if progress is not None:
                progress(case.name, i, len(cases))
            results.append(measure(case, device, settings, limits))
    finally:
        torch.set_float32_matmul_precision(matmul)
    if not occupied and device.type == "cuda":
        time.sleep(_LOOK_BACK)
    occupied = occupied or busy.reason(device)
    return Report(environment.describe(device), settings, limits, tuple(results), occupied)


def measure(
    case: Case, device: torch.device, settings: Settings, limits: dict[str, float]
) -> CaseResult:
    """Measure one case: time, error, memory and host cost of everyone who takes it."""
    try:
        tensors = Inputs(*inputs(case, device, settings.seed))
        expected, pick = _oracle(case, tensors)
    except torch.OutOfMemoryError as error:
        return CaseResult(case, (), None, {"all": str(error).splitlines()[0]}, None)
    contenders, left_out = field_of(case, tensors, backend=settings.backend, flex=settings.flex)
    if not contenders:
        return CaseResult(case, (), None, left_out, None)
    judge = bench_of(case).error or _distance
    errors = {c.name: judge(case, pick(c.output()), expected) for c in contenders}
    del expected
    output_bytes = case.batch * case.heads * case.queries * case.head_dim
    output_bytes *= case.torch_dtype.itemsize
    how = {"rounds": settings.rounds, "budget_seconds": settings.budget_seconds}
    remarks: dict[str, str] = {}
    if device.type == "cuda":
        samples, remarks = timing.time_cuda(contenders, **how)  # type: ignore[arg-type]
    else:
        samples = timing.time_cpu(contenders, **how)  # type: ignore[arg-type]
    found = [
        _measurement(case, c, samples[c.name], errors[c.name], limits, remarks.get(c.name, ""))
        for c in contenders
    ]
    for i, contender in enumerate(contenders):
        memory, host = _costs(contender, device, settings, output_bytes, found[i].seconds)
        found[i] = replace(found[i], workspace_bytes=memory, host_seconds=host)
    return compare(case, found, left_out)


def ceilings(device: torch.device, dtypes: Sequence[str], settings: Settings) -> dict[str, float]:
    """What this machine reaches at most: matrix products in FLOP/s, and a copy in bytes/s."""
    size = _GEMM_SIZE[device.type]
    budget = min(settings.budget_seconds, 2.0)
    found = {name: _gemm_rate(device, DTYPES[name], size, budget) for name in dtypes}
    found = {f"gemm_{name}": rate for name, rate in found.items()}
    if device.type == "cpu" and torch.get_num_threads() > 1 and "fp32" in dtypes:
        found["gemm_fp32_one_thread"] = _one_thread_rate(size, budget)
    if device.type == "cuda":
        if "fp32" in dtypes:
            torch.set_float32_matmul_precision("high")
            found["gemm_tf32"] = _gemm_rate(device, torch.float32, size, budget)
            torch.set_float32_matmul_precision("highest")
        source = torch.zeros(2**29, device=device)
        target = torch.empty_like(source)
        # A kernel rather than copy_(): under a graph that is a memory-copy node, which is slower.
        copy = Contender("copy", lambda: torch.neg(source, out=target))
        found["copy"] = 2 * source.nbytes / _seconds(copy, device, budget)
    return found


def _measurement(
    case: Case,
    contender: Contender,
    seconds: Sequence[float],
    error: float,
    limits: dict[str, float],
    remark: str,
) -> Measurement:
    median = statistics.median(seconds)
    rate = case.flops / median
    ceiling = limits.get(f"gemm_{case.dtype}")
    return Measurement(
        contender=contender.name,
        precision=contender.precision,
        seconds=digits(median),
        seconds_p10=digits(percentile(seconds, 0.1)),
        seconds_p90=digits(percentile(seconds, 0.9)),
        samples=tuple(digits(s) for s in seconds),
        flops_per_second=digits(rate),
        ceiling_share=digits(rate / ceiling) if ceiling else None,
        bytes_per_second=digits(case.key_value_bytes / median) if case.queries == 1 else None,
        error=error,
        workspace_bytes=None,
        host_seconds=None,
        notes=contender.notes | ({"timing": remark} if remark else {}),
    )


def _costs(
    contender: Contender, device: torch.device, settings: Settings, output: int, seconds: float
) -> tuple[int | None, float | None]:
    """Workspace in bytes, and host time in seconds."""
    memory: int | None = None
    host: float | None = None
    if settings.memory and not contender.pools:
        workspace = timing.workspace_cuda if device.type == "cuda" else timing.workspace_cpu
        memory = workspace(contender, output)
    if device.type == "cuda":
        host = digits(timing.host_seconds(contender, seconds))
    return memory, host


def _distance(case: Case, output: Tensor, expected: Tensor) -> float:
    return reference.relative_l2(output, expected)


def _oracle(case: Case, tensors: Inputs) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The float64 output where it is judged, and how to take the same part of any output."""
    query, key, value, mask = tensors
    if bench_of(case).error is not None:
        return bench_of(case).exact(*tensors), lambda output: output
    limit = _ORACLE_SCORES[query.device.type]
    batch, heads, rows = slice(None), slice(None), slice(None)
    if case.batch * case.heads * case.queries * case.keys > limit:
        # Two heads, the first and the last, of the first batch element.
        batch, heads = slice(0, 1), slice(None, None, max(1, case.heads - 1))
        rows = slice(None, None, math.ceil(2 * case.queries * case.keys / limit))

    def pick(output: Tensor) -> Tensor:
        return output[batch, heads, rows]

    part = None if mask is None else mask[:, heads, rows]
    exact = bench_of(case).exact
    expected = exact(pick(query), key[batch, heads], value[batch, heads], part)
    return expected, pick


def _one_thread_rate(size: int, budget: float) -> float:
    """What says whether the threads have cores of their own: virtual ones often share a core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _gemm_rate(torch.device("cpu"), torch.float32, size, budget)
    finally:
        torch.set_num_threads(threads)


def _gemm_rate(device: torch.device, dtype: torch.dtype, size: int, budget: float) -> float:
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _seconds(Contender("gemm", lambda: a @ b), device, budget)


def _seconds(contender: Contender, device: torch.device, budget: float) -> float:
    if device.type == "cuda":
        samples, _ = timing.time_cuda([contender], rounds=10, budget_seconds=budget)
    else:
        samples = timing.time_cpu([contender], rounds=10, budget_seconds=budget)
    return statistics.median(samples[contender.name])
