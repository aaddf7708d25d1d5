"""What `check` found as a table, for `print` and notebooks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from elsa_core.base.grouping import group
from elsa_core.base.summary import Summary

if TYPE_CHECKING:
    from elsa_core.proof.report import CheckReport, ModelCheck, SiteCheck

_COLUMNS = ("", "relative error of", ">elsa", ">original", ">allowed", "worst input")


def check_summary(report: CheckReport) -> Summary:
    """The verdict, a row for each group of sites and each input, and every failure."""
    rows = []
    for label, members in group(report.sites, lambda site: site.ok):
        worst = max(members, key=_severity)
        name = label if len(members) == 1 else f"{label} ({len(members)} sites)"
        rows.append((_mark(worst), name, *_errors(worst), worst.worst_case))
    for case in report.cases:
        rows.append((_mark(case), f"model: {case.case}", *_errors(case), classes(case)))
    verdict = "outputs agree" if report.ok else "outputs do NOT agree"
    if not report.tested:
        verdict = "nothing was tested"
    title = f"{verdict} · {report.dtype} on {report.device} · against float64"
    lines = [f"failed: {line}" for line in report.failures]
    if report.fault_injection:
        lines.append(f"ELSA_FAULT_INJECTION is on: {report.fault_injection}")
    return Summary(title, _COLUMNS, rows, lines)


def classes(case: ModelCheck) -> str:
    """How many rows have the same first class, or that the case proves nothing."""
    if not case.shown and case.ok:
        return "shows nothing"
    same = case.top1_rows - case.top1_flips
    return f"top-1 {same}/{case.top1_rows}" if case.top1_rows else ""


def _mark(result: SiteCheck | ModelCheck) -> str:
    return "ok" if result.ok else "FAIL"


def _errors(result: SiteCheck | ModelCheck) -> tuple[str, ...]:
    values = (result.patched_error, result.original_error, result.allowed)
    return tuple("-" if value is None else f"{value:.1e}" for value in values)


def _severity(result: SiteCheck | ModelCheck) -> float:
    # NaN compares false with everything: nothing is worse.
    return math.inf if math.isnan(result.excess) else result.excess
