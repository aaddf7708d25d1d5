"""`elsa bench attention`: measure cases against their peers, and judge everyone's error."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor

from elsa_core import reference
from elsa_core.base.messages import first_line
from elsa_core.measuring import busy, environment, timing
from elsa_core.measuring.documents import Document, finite, started
from elsa_core.measuring.intervals import digits, percentile
from elsa_core.measuring.memory_limit import is_out_of_memory
from elsa_core.measuring.timing import Contender, float32_products
from elsa_core.precision import DTYPES
from elsa_core.profiling.bench.cases import Case, Inputs, bench_of, inputs
from elsa_core.profiling.bench.peers import field_of
from elsa_core.profiling.runs.runs import Progress
from elsa_core.profiling.runs.variants import on_device

TURBO_ULP: Final = 2.0**-10
"""Distance between neighbours of 1 with a significand of 11 bits."""
# Scores of the oracle for one case; beyond it, two heads and then evenly spread rows are judged.
_ORACLE_SCORES: Final = {"cpu": 2**25, "cuda": 2**30}
_GEMM_SIZE: Final = {"cpu": 1024, "cuda": 8192}
_LOOK_BACK: Final = 1.5  # seconds after which the driver's utilisation no longer holds our own work


@dataclass(frozen=True)
class Settings:
    """How to measure: rounds are fewer where they would exceed the budget of a case. `flex`:
    compile and measure FlexAttention too (CUDA); `memory`: the workspace of each contender too.
    """

    rounds: int = 15
    budget_seconds: float = 20.0
    seed: int = 0
    backend: str = "auto"
    flex: bool = False
    memory: bool = True


def run(
    cases: Sequence[Case],
    *,
    device: torch.device,
    settings: Settings,
    progress: Progress = lambda what, done, total: None,
) -> Document:
    """Measure `cases` on `device`, one after another; the document of the results.

    `busy` says why the machine was not free, before or after. A contender that fails is left out of
    its case with the reason, and so are all where memory runs out later; that ends nothing.
    """
    occupied = busy.reason(device)
    results = []
    with on_device(device), float32_products():
        limits = ceilings(device, sorted({case.dtype for case in cases}), settings)
        for i, case in enumerate(cases):
            progress(case.name, i, len(cases))
            try:
                results.append(measure(case, device, settings, limits))
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                results.append(judged(case, [], {"all": first_line(error)}))
    if not occupied and device.type == "cuda":
        time.sleep(_LOOK_BACK)
    found = {
        "settings": asdict(settings), "ceilings": limits, "cases": results,
        "busy": occupied or busy.reason(device),
    }  # fmt: skip
    return started("bench attention", environment.describe(device), found)


def measure(
    case: Case, device: torch.device, settings: Settings, limits: dict[str, float]
) -> Document:
    """Measure one case: time, error, memory and host cost of everyone who takes it.

    Times are seconds a call, None is "not measured". Of a measurement: `ceiling_share` is its rate
    over that of a matrix product of the same dtype in this run, `bytes_per_second` of key and value
    (one query only), `error` relative L2 against float64, `workspace_bytes` what is allocated at
    the peak of a call beyond its output, `host_seconds` the host's of one eager call (CUDA).
    """
    tensors = inputs(case, device, settings.seed)
    expected, pick = _oracle(case, tensors)
    contenders, left_out = field_of(case, tensors, backend=settings.backend, flex=settings.flex)
    if not contenders:
        return judged(case, [], left_out)
    error_of = bench_of(case).error or (lambda _, out, exact: reference.relative_l2(out, exact))
    errors = {c.name: error_of(case, pick(c.output()), expected) for c in contenders}
    del expected
    output_bytes = case.batch * case.heads * case.queries * case.head_dim
    output_bytes *= DTYPES[case.dtype].itemsize
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
        bandwidth = None
        if case.queries == 1:  # what one query has to read: key and value
            elements = 2 * case.batch * case.heads * case.keys * case.head_dim
            bandwidth = digits(elements * DTYPES[case.dtype].itemsize / median)
        found.append({
            "contender": contender.name, "precision": contender.precision,
            "seconds": digits(median), "seconds_p10": digits(percentile(seconds, 0.1)),
            "seconds_p90": digits(percentile(seconds, 0.9)),
            "samples": [digits(each) for each in seconds], "flops_per_second": digits(rate),
            "ceiling_share": digits(rate / ceiling) if ceiling else None,
            "bytes_per_second": bandwidth, "error": errors[contender.name],
            "workspace_bytes": memory, "host_seconds": host,
            "notes": contender.notes | ({"timing": remark} if remark else {}),
        })  # fmt: skip
    return judged(case, found, left_out)


def judged(case: Case, measured: list[Document], left_out: dict[str, str]) -> Document:
    """The result of a case: elsa's contenders beside the fastest peer, and everyone's error.

    `ratio`, `ratio_p10` and `ratio_p90` are the best exact peer's time over elsa's: of the medians,
    and over the rounds. `reached` says whether the first precision is right and its ratio at least
    the case's goal. A peer is wrong where its error is more than 10 times the most accurate peer's:
    it computes something else, and beating it means nothing. A contender of elsa is wrong above
    twice the error of the least accurate exact peer (and a band of a few ulp); "turbo" above 4 of
    its own ulp.
    """
    peers = [m for m in measured if m["precision"] is None]
    least = min((m["error"] for m in peers if m["error"] >= 0), default=0.0)
    ulp = torch.finfo(DTYPES[case.dtype]).eps
    exact = [m for m in peers if m["error"] <= 10 * least + 4 * ulp]
    best = min(exact, key=lambda m: float(m["seconds"]), default=None)
    allowed = 2 * max((m["error"] for m in exact), default=0.0) + 4 * ulp
    reached, wrong = None, []
    for own in measured:
        own.update(ratio=None, ratio_p10=None, ratio_p90=None)
        if own["precision"] is None:
            is_right = own in exact
        else:
            limit = max(allowed, 4 * TURBO_ULP) if own["precision"] == "turbo" else allowed
            is_right = own["error"] <= limit  # NaN is wrong
        if not is_right:
            wrong.append(own["contender"])
        if own["precision"] is not None and best is not None:
            pairs = [b / a for a, b in zip(own["samples"], best["samples"], strict=True)]
            own["ratio"] = digits(best["seconds"] / own["seconds"])
            own["ratio_p10"], own["ratio_p90"] = (digits(percentile(pairs, p)) for p in (0.1, 0.9))
            if own["precision"] == case.precisions[0] and case.goal is not None:
                reached = own["ratio"] >= case.goal and is_right
    result: Document = finite({
        "case": case.to_dict(), "measurements": measured, "left_out": left_out, "wrong": wrong,
        "best_peer": best["contender"] if best else None, "reached": reached,
    })  # fmt: skip
    return result


def ceilings(device: torch.device, dtypes: Sequence[str], settings: Settings) -> dict[str, float]:
    """What this machine reaches at most in matrix products, in FLOP/s: `gemm_<dtype>`, and for
    several threads of a CPU `gemm_fp32_one_thread`."""
    size = _GEMM_SIZE[device.type]
    budget, threads = min(settings.budget_seconds, 2.0), torch.get_num_threads()
    products = [(f"gemm_{name}", DTYPES[name], threads) for name in dtypes]
    if device.type == "cpu" and threads > 1 and "fp32" in dtypes:
        # whether the threads have cores of their own: virtual ones often share a core
        products.append(("gemm_fp32_one_thread", torch.float32, 1))
    found = {}
    for name, dtype, count in products:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        torch.set_num_threads(count)
        try:
            call = partial(torch.matmul, a, b)
            samples, _ = timing.time_all([Contender("gemm", call)], device, 10, budget)
        finally:
            torch.set_num_threads(threads)
        found[name] = 2 * size**3 / statistics.median(samples["gemm"])
    return found


def _oracle(case: Case, tensors: Inputs) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The float64 output where it is judged, and how to take the same part of any output."""
    query, key, value, mask = tensors
    bench = bench_of(case)
    if bench.error is not None:
        return bench.exact(*tensors), lambda output: output
    limit = _ORACLE_SCORES[query.device.type]
    batch, heads, rows = slice(None), slice(None), slice(None)
    if case.batch * case.heads * case.queries * case.keys > limit:
        # Two heads, the first and the last, of the first batch element.
        batch, heads = slice(0, 1), slice(None, None, max(1, case.heads - 1))
        rows = slice(None, None, math.ceil(2 * case.queries * case.keys / limit))
    part = None if mask is None else mask[:, heads, rows]
    exact = bench.exact(query[batch, heads, rows], key[batch, heads], value[batch, heads], part)
    return exact, lambda output: output[batch, heads, rows]
