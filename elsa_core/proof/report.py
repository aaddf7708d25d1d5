"""What `check` found: the record of a site while it runs, and the reports as dataclasses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from elsa_core.base.grouping import group
from elsa_core.base.summary import Summarised, Summary
from elsa_core.measuring.documents import finite
from elsa_core.proof.capture import OperatorCall
from elsa_core.proof.compare import Comparison, Judgement, ratio
from elsa_core.proof.site_cases import FILLED
from elsa_core.reference import Drift

# A relative error of the original from which on twice as much says nothing: a model that draws
# random numbers or counts its calls has one.
LEGIBLE = 0.25

NOTHING_TESTED = "no site ran elsa's operator on these inputs, so nothing is known about it"
_NOT_REACHED = "not reached by these inputs, so nothing is known about it"


@dataclass(frozen=True, kw_only=True)
class Errors:
    """How far one output is off, for the case that is closest to (or furthest beyond) the allowed.

    `max_abs` and `relative_l2` say how far patched and original are from each other;
    `original_error`, `patched_error` and `allowed` are relative Euclidean errors against the
    float64 oracle; `excess` is error over allowance in the worse of the Euclidean and the maximum
    norm, so above 1 it fails, and infinite where nothing was compared. Non-finite numbers become
    null in `to_dict`.
    """

    max_abs: float
    relative_l2: float
    original_error: float
    patched_error: float
    allowed: float
    excess: float
    ok: bool
    reason: str
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return dict(finite(asdict(self)))


@dataclass(frozen=True, kw_only=True)
class SiteCheck(Errors):
    """One attention site on its own, over every call in every case; the numbers are those of
    `worst_case`.

    `calls` counts the comparisons, `operator_calls` how often the elsa operator ran in them;
    `drift` is the worst of the paper's metrics among the calls, None where it never ran, and
    `largest_logit` the largest |score| in the sampled rows. `skip_rate` is the share of tiles that
    sparsity left out, None where none was asked for.
    """

    path: str
    drift: Drift | None
    worst_case: str
    calls: int
    operator_calls: int
    largest_logit: float
    skip_rate: float | None = None


@dataclass(frozen=True, kw_only=True)
class ModelCheck(Errors):
    """The whole model on one case by one path: the numbers are those of its worst output.

    `path` says how the patched model ran, one of `elsa_core.proof.paths.PATHS`.
    `top1_rows` is 0 where the output is no [rows, classes]. `top1_ties` are rows whose two best
    classes the original's own rounding can swap; `top1_tie_flips` of them did swap.
    `shown` is False where the numbers prove nothing, since the output depends on no site or the
    original's own error hides any other: `notes` say which, and the sites carry the proof.
    """

    case: str
    path: str
    output: str
    inputs: int
    top1_rows: int
    top1_flips: int
    top1_ties: int
    top1_tie_flips: int
    shown: bool = True


@dataclass(frozen=True, kw_only=True)
class GradientCheck(Errors):
    """The gradients of the site at `path`, or of the whole where that is "model".

    The numbers are those of the gradient `worst` in `worst_case`: of an input ("input[0]") or a
    parameter by its name. `gradients` counts those compared, `wrong` names those that fail.
    """

    path: str
    worst: str
    worst_case: str
    gradients: int
    wrong: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class CheckReport(Summarised):
    """The verdict on a patched model.

    `paths` says how the whole model was run; `left_out` why it could not be by one that was not
    asked for. Sites run eagerly. `gradients` is empty unless they were asked for.
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
    paths: tuple[str, ...] = ("eager",)
    left_out: dict[str, str] = field(default_factory=dict)
    gradients: tuple[GradientCheck, ...] = ()

    @property
    def tested(self) -> bool:
        """Whether a site ran elsa's operator: else outputs that agree show nothing."""
        return self.failures != (NOTHING_TESTED,)

    @property
    def shows_sites(self) -> bool:
        """Whether the model's output, with the weights that it has, depends on its sites."""
        return all(case.shown and not case.case.endswith(FILLED) for case in self.cases)

    def to_dict(self) -> dict[str, Any]:
        return dict(finite(asdict(self)))

    def rows(self) -> list[tuple[Any, ...]]:
        """The worst of each group of sites, each input, and the worst of each group of gradients:
        its name, how many it stands for (0 where it is no group), its errors, and as texts the
        error, the original's, what is allowed, and the worst input or the first classes."""
        found: list[tuple[str, int, Errors, str]] = []
        for label, members in group(self.sites, lambda site: site.ok):
            worst = max(members, key=lambda site: site.excess)
            found.append((label or "the model", len(members), worst, worst.worst_case))
        for case in self.cases:
            by = "" if case.path == "eager" else f", {case.path}"
            rows, same = case.top1_rows, case.top1_rows - case.top1_flips
            said = f"top-1 {same}/{rows}" if rows else ""
            said = said if case.shown or not case.ok else "shows nothing"
            found.append((f"model: {case.case}{by}", 0, case, said))
        for label, alike in group(self.gradients, lambda slope: slope.ok):
            slope = max(alike, key=lambda slope: slope.excess)
            worst_of = f"{slope.worst}, {slope.worst_case}"
            found.append((f"gradients: {label}", len(alike), slope, worst_of))
        return [
            (name, count, one,
             *(f"{error:.1e}" for error in (one.patched_error, one.original_error, one.allowed)),
             last)
            for name, count, one, last in found
        ]  # fmt: skip

    def summary(self) -> Summary:
        """The verdict, a row for each group of sites and each input, and every failure."""
        rows = [
            ("ok" if one.ok else "FAIL", f"{name} ({count} sites)" if count > 1 else name, *cells)
            for name, count, one, *cells in self.rows()
        ]
        verdict = "outputs agree" if self.ok else "outputs do NOT agree"
        if not self.tested:
            verdict = "nothing was tested"
        lines = [f"failed: {line}" for line in self.failures]
        if self.fault_injection:
            lines.append(f"ELSA_FAULT_INJECTION is on: {self.fault_injection}")
        columns = ("", "relative error of", ">elsa", ">original", ">allowed", "worst input")
        title = f"{verdict} · {self.dtype} on {self.device} · against float64"
        return Summary(title, columns, rows, lines)


@dataclass
class SiteRecord:
    """What was seen of one site so far; `layer`: it is no attention but a layer."""

    layer: bool = False
    worst: Comparison | None = None
    case: str = ""
    calls: int = 0
    operator_calls: int = 0
    backends: set[str] = field(default_factory=set)  # registered ones that served a call
    largest_logit: float = 0.0
    clearest: float = math.inf  # the original's least error of an output other than zero
    drifts: list[Drift] = field(default_factory=list)
    tiles: int = 0
    left_out: int = 0
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(
        self, case: str, comparisons: Mapping[str, Comparison], operator: Sequence[OperatorCall]
    ) -> None:
        self.calls += 1
        self.operator_calls += len(operator)
        for call in operator:
            self.drifts.append(call.drift)
            self.tiles += call.tiles
            self.left_out += call.left_out
            self.largest_logit = max(self.largest_logit, call.largest_logit)
            if why := call.reason():
                self.errors.append(f"{case}: {why}")
        for comparison in comparisons.values():
            if comparison.oracle.maximum > 0.0:
                self.clearest = min(self.clearest, comparison.original_error)
            if self.worst is None or comparison.excess > self.worst.excess:
                self.worst, self.case = comparison, case

    def result(self, path: str) -> SiteCheck:
        reason, notes = "", list(dict.fromkeys(self.notes))
        # a site's own output is judged before its operator
        if self.worst is not None and (why := self.worst.reason()):
            reason = f"{self.case}: {why}"
        elif self.errors:
            reason = self.errors[0]
        elif self.worst is None and not self.layer:
            reason = _NOT_REACHED
        elif self.worst is None:
            # a layer whose module is never called (its weight is read elsewhere) changes nothing
            notes.append(_NOT_REACHED)
        elif self.clearest == math.inf:
            reason = "its output is zero for each of these inputs, so nothing is known about it"
        elif self.clearest >= LEGIBLE:
            reason = (
                f"the original's own error is {self.clearest:.0%} or more on each of these inputs, "
                "so nothing is known about it"
            )
        if self.calls and not self.operator_calls and not self.layer:
            notes.append(
                f"it ran by the registered backend {', '.join(sorted(self.backends))}: its output "
                "is judged, and no operator inside"
                if self.backends
                else "the elsa operator was never called here"
            )
        # of the drifts the one with the largest relative error of P, or of Y where P is not known
        spreads = [(drift.p_relative_l2 or drift.y_relative_l2).value for drift in self.drifts]
        sizes = [math.inf if math.isnan(value) else value for value in spreads]
        drift = self.drifts[sizes.index(max(sizes))] if sizes else None
        return SiteCheck(
            path=path, **_errors(self.worst, reason, notes, self.case), drift=drift,
            worst_case=self.case, calls=self.calls, operator_calls=self.operator_calls,
            largest_logit=self.largest_logit,
            skip_rate=self.left_out / self.tiles if self.tiles else None,
        )  # fmt: skip


def gradient_check(path: str, judged: Sequence[tuple[str, Judgement]]) -> GradientCheck:
    """The verdict on the gradients of one site, or of the model, over the cases by name."""
    found = [(case, name, c) for case, each in judged for name, c in each.comparisons.items()]
    wrong = tuple(dict.fromkeys(name for _, name, comparison in found if comparison.reason()))
    # Failures first, then what is more than rounding, as no gradient of a bias of keys is.
    ranks = [(c.excess > 1.0, c.original_error < LEGIBLE, c.excess) for _, _, c in found]
    case, name, worst = found[ranks.index(max(ranks))] if found else ("", "", None)
    reason = next((f"{case}: {each.error}" for case, each in judged if each.error), "")
    if not reason and worst is None:
        reason = "no gradient was compared, so nothing is known about them"
    elif not reason and worst is not None and (why := worst.reason()):
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        reason = f"{case}: gradient of {name}{more}: {why}"
    return GradientCheck(
        path=path, worst=name, worst_case=case, gradients=len(found), wrong=wrong,
        **_errors(worst, reason, (), case),
    )  # fmt: skip


def model_check(
    case: str, path: str, inputs: int, judgement: Judgement, *, shown: bool = True
) -> ModelCheck:
    """The verdict on one case by one path; `shown`: the output depends on the sites."""
    comparisons, top1 = judgement.comparisons, judgement.top1
    output = max(comparisons, key=lambda key: comparisons[key].excess, default="")
    one = comparisons.get(output)
    why = one.reason() if one is not None else "nothing was compared"
    if not why and top1.flips:
        why = f"top-1 differs from the oracle's in {top1.flips} of {top1.rows} rows without a tie"
    notes = []
    if not shown:
        notes.append(
            "the output depends on no site, so it shows nothing: the sites carry the proof"
        )
    if one is not None and one.original_error >= LEGIBLE:
        shown = False
        notes.append("the original's own error hides any other: the sites carry the proof")
    return ModelCheck(
        case=case, path=path, output=output, inputs=inputs, shown=shown, top1_rows=top1.rows,
        top1_flips=top1.flips, top1_ties=top1.ties, top1_tie_flips=top1.tie_flips,
        **_errors(one, judgement.error or why, notes),
    )  # fmt: skip


def _errors(
    comparison: Comparison | None, reason: str, notes: Sequence[str], case: str = ""
) -> dict[str, Any]:
    names = ("original_error", "patched_error", "allowed", "excess")
    values = dict.fromkeys(("max_abs", "relative_l2", *names), math.nan) | {"excess": math.inf}
    if comparison is not None:
        values = {name: float(getattr(comparison, name)) for name in names}
        values["max_abs"] = comparison.difference.maximum
        values["relative_l2"] = ratio(comparison.difference.l2, comparison.oracle.l2)
        if comparison.samples > 1:
            said = f"errors are those of {comparison.samples} nearby inputs together, since one"
            notes = (*notes, f"{case}: " * bool(case) + f"{said} said too little")
    return {**values, "ok": not reason, "reason": reason, "notes": tuple(notes)}
