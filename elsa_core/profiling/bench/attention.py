"""`elsa bench attention`: measure cases against their peers."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from elsa_core import reference
from elsa_core.errors import UnavailableError
from elsa_core.measuring import busy, environment, timing
from elsa_core.measuring.intervals import digits, percentile
from elsa_core.measuring.timing import Contender
from elsa_core.precision import DTYPES
from elsa_core.profiling.bench.cases import Case, Inputs, bench_of, inputs
from elsa_core.profiling.bench.peers import field_of
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
        tensors = inputs(case, device, settings.seed)
        expected, pick = _oracle(case, tensors)
    except torch.OutOfMemoryError as error:
        return CaseResult(case, (), None, {"all": str(error).splitlines()[0]}, None)
    contenders, left_out = field_of(case, tensors, backend=settings.backend, flex=settings.flex)
    if not contenders:
        return CaseResult(case, (), None, left_out, None)
    judge = bench_of(case).error or (lambda _, output, exact: reference.relative_l2(output, exact))
    errors = {c.name: judge(case, pick(c.output()), expected) for c in contenders}
    del expected
    output_bytes = case.batch * case.heads * case.queries * case.head_dim
    output_bytes *= case.torch_dtype.itemsize
    samples, remarks = timing.time_all(contenders, device, settings.rounds, settings.budget_seconds)
    found = []
    for contender in contenders:
        seconds = samples[contender.name]
        median = statistics.median(seconds)
        rate, ceiling = case.flops / median, limits.get(f"gemm_{case.dtype}")
        remark = remarks.get(contender.name)
        memory = host = None
        if settings.memory and not contender.pools:
            memory = timing.workspace(contender, device, output_bytes)
        if device.type == "cuda":
            host = digits(timing.host_seconds(contender, median))
        found.append(
            Measurement(
                contender=contender.name,
                precision=contender.precision,
                seconds=digits(median),
                seconds_p10=digits(percentile(seconds, 0.1)),
                seconds_p90=digits(percentile(seconds, 0.9)),
                samples=tuple(digits(s) for s in seconds),
                flops_per_second=digits(rate),
                ceiling_share=digits(rate / ceiling) if ceiling else None,
                bytes_per_second=digits(case.key_value_bytes / median)
                if case.queries == 1
                else None,
                error=errors[contender.name],
                workspace_bytes=memory,
                host_seconds=host,
                notes=contender.notes | ({"timing": remark} if remark else {}),
            )
        )
    return compare(case, found, left_out)


def ceilings(device: torch.device, dtypes: Sequence[str], settings: Settings) -> dict[str, float]:
    """What this machine reaches at most: matrix products in FLOP/s, and a copy in bytes/s."""
    size = _GEMM_SIZE[device.type]
    budget = min(settings.budget_seconds, 2.0)

    def seconds(call: Callable[[], object]) -> float:
        samples, _ = timing.time_all([Contender("call", call)], device, 10, budget)
        return statistics.median(samples["call"])

    def rate(dtype: torch.dtype) -> float:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        return 2 * size**3 / seconds(lambda: a @ b)

    found = {f"gemm_{name}": rate(DTYPES[name]) for name in dtypes}
    threads = torch.get_num_threads()
    if device.type == "cpu" and threads > 1 and "fp32" in dtypes:
        # whether the threads have cores of their own: virtual ones often share a core
        torch.set_num_threads(1)
        try:
            found["gemm_fp32_one_thread"] = rate(torch.float32)
        finally:
            torch.set_num_threads(threads)
    if device.type == "cuda":
        if "fp32" in dtypes:
            torch.set_float32_matmul_precision("high")
            found["gemm_tf32"] = rate(torch.float32)
            torch.set_float32_matmul_precision("highest")
        source = torch.zeros(2**29, device=device)
        target = torch.empty_like(source)
        # A kernel rather than copy_(): under a graph that is a memory-copy node, which is slower.
        found["copy"] = 2 * source.nbytes / seconds(lambda: torch.neg(source, out=target))
    return found


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
