"""What `check` found: the record of a site while it runs, and the reports as dataclasses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elsa_core.proof.capture import worst
from elsa_core.proof.compare import Comparison, Top1, plain
from elsa_core.proof.text import check_summary
from elsa_core.reference import Drift
from elsa_core.summary import Summarised, Summary

# A relative error of the original from which on twice as much says nothing: a model that draws
# random numbers or counts its calls has one.
LEGIBLE = 0.25

_SAMPLES = "errors are those of {} nearby inputs together, since one said too little"


@dataclass(frozen=True)
class SiteCheck:
    """One attention site on its own, over every call in every case.

    The numbers are those of `worst_case`, the one closest to (or furthest beyond) what is allowed:
    `max_abs` and `relative_l2` say how far patched and original are from each other;
    `original_error`, `patched_error` and `allowed` are relative Euclidean errors against the
    float64 oracle; `excess` is error over allowance in the worse of the Euclidean and the maximum
    norm, so above 1 it fails. Non-finite numbers become null in `to_dict`.

    `calls` counts the comparisons, `operator_calls` how often the elsa operator ran in them;
    `drift` is the worst of the paper's metrics among the calls, None where it never ran, and
    `largest_logit` the largest |score| in the sampled rows.
    """

    path: str
    max_abs: float
    relative_l2: float
    original_error: float
    patched_error: float
    allowed: float
    excess: float
    drift: Drift | None
    worst_case: str
    calls: int
    operator_calls: int
    largest_logit: float
    ok: bool
    reason: str
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return dict(plain(self))


@dataclass(frozen=True)
class ModelCheck:
    """The whole model on one case: numbers as in `SiteCheck`, for its worst output.

    `top1_rows` is 0 where the output is no [rows, classes]. `top1_ties` are rows whose two best
    classes the original's own rounding can swap; `top1_tie_flips` of them did swap.
    """

    case: str
    output: str
    inputs: int
    max_abs: float
    relative_l2: float
    original_error: float
    patched_error: float
    allowed: float
    excess: float
    top1_rows: int
    top1_flips: int
    top1_ties: int
    top1_tie_flips: int
    ok: bool
    reason: str
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return dict(plain(self))


@dataclass(frozen=True, repr=False)
class CheckReport(Summarised):
    """The verdict on a patched model.

    `failures` has one line for each thing that failed and names the site or the case.
    `seconds_original` and `seconds_patched` are medians of `timed_runs` interleaved forwards of
    the first batch: an indication, no benchmark. `fault_injection` is the switch that was on.
    """

    sites: tuple[SiteCheck, ...]
    cases: tuple[ModelCheck, ...]
    ok: bool
    dtype: str
    device: str
    factor: float
    stress: bool
    seconds_original: float
    seconds_patched: float
    timed_runs: int
    failures: tuple[str, ...]
    fault_injection: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return dict(plain(self))

    def summary(self) -> Summary:
        return check_summary(self)


@dataclass
class SiteRecord:
    """What was seen of one site so far."""

    worst: Comparison | None = None
    case: str = ""
    calls: int = 0
    operator_calls: int = 0
    largest_logit: float = 0.0
    clearest: float = math.inf  # the original's least error of an output other than zero
    drifts: list[Drift] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, case: str, comparisons: Mapping[str, Comparison]) -> None:
        """Takes the outputs of one run of the site; the worst of all runs is kept."""
        self.calls += 1
        for comparison in comparisons.values():
            if comparison.oracle.maximum > 0.0:
                self.clearest = min(self.clearest, comparison.original_error)
            if self.worst is None or comparison.excess > self.worst.excess:
                self.worst, self.case = comparison, case

    @property
    def shown(self) -> bool:
        """Whether an output tells the original apart from anything else."""
        return self.clearest < LEGIBLE

    def reason(self) -> str:
        """Why the site fails, or an empty string; its own output speaks before its operator."""
        why = "" if self.worst is None else self.worst.reason()
        if why:
            return f"{self.case}: {why}"
        if self.errors:
            return self.errors[0]
        if self.worst is None:
            return "not reached by these inputs, so nothing is known about it"
        if self.clearest == math.inf:
            return "its output is zero for each of these inputs, so nothing is known about it"
        if not self.shown:
            return (
                f"the original's own error is {self.clearest:.0%} or more on each of these inputs, "
                "so nothing is known about it"
            )
        return ""

    def result(self, path: str) -> SiteCheck:
        """The verdict on the site."""
        notes = list(dict.fromkeys(self.notes))
        if self.worst is not None and self.worst.samples > 1:
            notes.append(f"{self.case}: {_SAMPLES.format(self.worst.samples)}")
        if self.calls and not self.operator_calls:
            notes.append("the elsa operator was never called here")
        reason = self.reason()
        return SiteCheck(
            path=path,
            **_numbers(self.worst),
            drift=worst(self.drifts),
            worst_case=self.case,
            calls=self.calls,
            operator_calls=self.operator_calls,
            largest_logit=self.largest_logit,
            ok=not reason,
            reason=reason,
            notes=tuple(notes),
        )


def model_check(
    name: str, inputs: int, comparisons: Mapping[str, Comparison], top1: Top1, error: str
) -> ModelCheck:
    """The verdict on one case; `error` is what the patched model raised, if it did."""
    output = max(comparisons, key=lambda key: comparisons[key].excess, default="")
    worst_one = comparisons.get(output)
    why = worst_one.reason() if worst_one is not None else "nothing was compared"
    reason = error or why or top1.reason()
    notes = []
    if worst_one is not None and worst_one.oracle.maximum == 0.0:
        notes.append("the output is zero, so it shows nothing: the sites carry the proof")
    if worst_one is not None and worst_one.original_error >= LEGIBLE:
        notes.append("the original's own error hides any other: the sites carry the proof")
    if worst_one is not None and worst_one.samples > 1:
        notes.append(_SAMPLES.format(worst_one.samples))
    return ModelCheck(
        case=name,
        output=output,
        inputs=inputs,
        **_numbers(worst_one),
        top1_rows=top1.rows,
        top1_flips=top1.flips,
        top1_ties=top1.ties,
        top1_tie_flips=top1.tie_flips,
        ok=not reason,
        reason=reason,
        notes=tuple(notes),
    )


def _numbers(comparison: Comparison | None) -> dict[str, float]:
    """The numbers that `SiteCheck` and `ModelCheck` share; NaN where nothing was compared."""
    names = ("relative_l2", "original_error", "patched_error", "allowed", "excess")
    if comparison is None:
        return dict.fromkeys(("max_abs", *names), math.nan)
    values = {name: float(getattr(comparison, name)) for name in names}
    return {"max_abs": comparison.difference.maximum, **values}
