"""What a benchmark measured: its parts, how they are judged, and the document that keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch

from elsa_core.base.version import __version__
from elsa_core.errors import ArgumentError, UnavailableError
from elsa_core.measuring.documents import Plain, finite, write
from elsa_core.measuring.intervals import digits, percentile
from elsa_core.profiling.bench.cases import Case

SCHEMA_VERSION: Final = 1
TURBO_ULP: Final = 2.0**-10
"""Distance between neighbours of 1 with a significand of 11 bits."""


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


@dataclass(frozen=True)
class Measurement:
    """One contender in one case. Times are seconds a call; None is "not measured".

    Attributes:
        seconds, seconds_p10, seconds_p90: median and percentiles over the rounds, whose values
            `samples` holds.
        flops_per_second: 4 B H Nq Nk D over the median.
        ceiling_share: that over the rate of a matrix product of the same dtype in this run.
        bytes_per_second: bytes of key and value over the median (one query only).
        error: relative L2 against float64.
        workspace_bytes: allocated at the peak of a call beyond its output.
        host_seconds: host time of one eager call (CUDA).
        ratio, ratio_p10, ratio_p90: best peer's time over this one's: of the medians, and over the
            rounds (elsa's contenders only).
        notes: backend, schedule and arithmetic of elsa; how it was timed.
    """

    contender: str
    precision: str | None
    seconds: float
    seconds_p10: float
    seconds_p90: float
    samples: tuple[float, ...]
    flops_per_second: float
    ceiling_share: float | None
    bytes_per_second: float | None
    error: float
    workspace_bytes: int | None
    host_seconds: float | None
    ratio: float | None = None
    ratio_p10: float | None = None
    ratio_p90: float | None = None
    notes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CaseResult(Plain):
    """All contenders of one case.

    `best_peer` is the fastest exact one; `left_out` says why others did not take part; `wrong`
    names the contenders whose error is beyond what their dtype and precision explain; `reached`
    says whether the first precision is right and its ratio at least the case's goal (None without
    a ratio or a goal).
    """

    case: Case
    measurements: tuple[Measurement, ...]
    best_peer: str | None
    left_out: dict[str, str]
    reached: bool | None
    wrong: tuple[str, ...] = ()

    @property
    def own_wrong(self) -> tuple[str, ...]:
        """Those of `wrong` that are elsa's."""
        own = {m.contender for m in self.measurements if m.precision is not None}
        return tuple(name for name in self.wrong if name in own)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; non-finite numbers are None."""
        found: dict[str, Any] = finite(super().to_dict())
        return found


@dataclass(frozen=True)
class Report(Plain):
    """What one run measured, and where.

    `ceilings` holds `gemm_<dtype>` in FLOP/s and, for CUDA, `gemm_tf32` and `copy` in bytes/s
    (read and written); for several threads of a CPU also `gemm_fp32_one_thread`. `busy` says why
    the machine was not free, before or after; empty if it was.
    """

    environment: dict[str, Any]
    settings: Settings
    ceilings: dict[str, float]
    cases: tuple[CaseResult, ...]
    busy: str

    def to_dict(self) -> dict[str, Any]:
        """The `results` of the document: plain data for JSON."""
        return {name: each for name, each in super().to_dict().items() if name != "environment"}


def compare(
    case: Case, measurements: Sequence[Measurement], left_out: dict[str, str]
) -> CaseResult:
    """Relate elsa's contenders to the fastest peer, and judge everyone's error.

    A peer is wrong where its error is more than 10 times the most accurate peer's: it computes
    something else, and beating it means nothing. A contender of elsa is wrong above twice the error
    of the least accurate exact peer (and a band of a few ulp); "turbo" above 4 of its own ulp.
    """
    peers = [m for m in measurements if m.precision is None]
    least = min((m.error for m in peers if m.error >= 0), default=0.0)
    ulp = torch.finfo(case.torch_dtype).eps
    exact = [m for m in peers if m.error <= 10 * least + 4 * ulp]
    allowed = 2 * max((m.error for m in exact), default=0.0) + 4 * ulp
    limits = {"turbo": max(allowed, 4 * TURBO_ULP)}

    def is_wrong(m: Measurement) -> bool:
        if m.precision is None:
            return m not in exact
        return not m.error <= limits.get(m.precision, allowed)  # not `>`: NaN is wrong

    wrong = tuple(m.contender for m in measurements if is_wrong(m))
    best = min(exact, key=lambda m: m.seconds, default=None)

    def related(own: Measurement) -> Measurement:
        if own.precision is None or best is None:
            return own
        pairs = [b / a for a, b in zip(own.samples, best.samples, strict=True)]
        return replace(
            own,
            ratio=digits(best.seconds / own.seconds),
            ratio_p10=digits(percentile(pairs, 0.1)),
            ratio_p90=digits(percentile(pairs, 0.9)),
        )

    found = tuple(map(related, measurements))
    first = next((m for m in found if m.precision == case.precisions[0]), None)
    reached: bool | None = None
    if case.goal is not None and first is not None and first.ratio is not None:
        reached = first.ratio >= case.goal and first.contender not in wrong
    return CaseResult(case, found, best.contender if best else None, left_out, reached, wrong)


def document(report: Report) -> dict[str, Any]:
    """The result document: schema and elsa version, environment, results."""
    return {
        "schema_version": SCHEMA_VERSION,
        "elsa_version": __version__,
        "command": "bench attention",
        "environment": report.environment,
        "results": report.to_dict(),
    }


def publish(report: Report, path: Path, *, force: bool = False, allow_busy: bool = False) -> Path:
    """Write the result document to `path`, whole or not at all."""
    if report.busy and not allow_busy:
        raise UnavailableError(
            f"not written: {report.busy}; measure again on a free machine, or use --allow-busy"
        )
    if path.exists() and not force:
        raise ArgumentError(f"{path} exists; use --force to replace it")
    return write(document(report), path)
