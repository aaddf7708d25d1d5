"""`elsa bench --compare`: one run beside a published one, and what became worse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from elsa_core.measuring.documents import Plain

Document = dict[str, Any]

REGRESSION: Final = "regression"
BETTER: Final = "better"
SAME: Final = "same"
_MARGIN: Final = 0.05  # by which intervals have to be apart: machines of one name differ by as much
_ERRORS: Final = 2.0  # times the published error, from which on it is another computation
# Half the width of the median's 95% interval is this over the root of the number of rounds, times
# the distance of a 10 or 90% quantile from the median (normal samples: 1.96 x 1.2533 / 1.2816).
_OF_MEDIAN: Final = 1.917
_MACHINE: Final = ("cpu", "threads", "gpu")


@dataclass(frozen=True)
class Row(Plain):
    """One case of both runs: best peer's time over elsa's, of the medians, and its 95% interval.

    `verdict`: `REGRESSION` where the own interval lies below the published one by more than 5%, or
    the error is over twice the published, which `note` says; `BETTER`, `SAME`. The seconds are
    elsa's; None where the machines differ.
    """

    name: str
    own: float
    own_low: float
    own_high: float
    published: float
    published_low: float
    published_high: float
    verdict: str
    seconds: float | None
    published_seconds: float | None
    note: str


@dataclass(frozen=True)
class Comparison(Plain):
    """All cases that both runs have. Ratios against peers of the same run compare machines that
    differ; times do only where `same_machine`."""

    rows: tuple[Row, ...]
    same_machine: bool
    missing: tuple[str, ...]

    @property
    def regressions(self) -> tuple[Row, ...]:
        """What became worse."""
        return tuple(row for row in self.rows if row.verdict == REGRESSION)


def compare(own: Document, published: Document) -> Comparison:
    """Set two result documents of the same command side by side."""
    same = all(own["environment"].get(n) == published["environment"].get(n) for n in _MACHINE)
    mine = {case["case"]["name"]: case for case in own["results"]["cases"]}
    rows, missing = [], []
    for case in published["results"]["cases"]:
        name = case["case"]["name"]
        there, here = _figures(case), _figures(mine[name]) if name in mine else None
        if there is None:
            continue
        if here is None:
            missing.append(name)
        else:
            rows.append(_row(name, here, there, same))
    return Comparison(tuple(rows), same, tuple(missing))


class _Figures(NamedTuple):
    ratio: float
    low: float
    high: float
    seconds: float
    error: float | None


def _figures(case: Document) -> _Figures | None:
    """What is compared of a case, None where it was not measured or has no peer."""
    if "gain" in case:
        gain = case["gain"]
        if gain is None:
            return None
        run = next(m for m in case["measurements"] if m["contender"] == case["best_own"])
        error = case["errors"][0] if case["errors"] else None
        return _Figures(gain["value"], gain["low"], gain["high"], run["seconds"], error)
    first = case["case"]["precisions"][0]
    run = next((m for m in case["measurements"] if m["precision"] == first), None)
    if run is None or run["ratio"] is None:
        return None
    share = _OF_MEDIAN * (run.get("n") or len(run["samples"])) ** -0.5
    middle = run["ratio"]
    low, high = (middle + share * (run[end] - middle) for end in ("ratio_p10", "ratio_p90"))
    low, high = min(low, middle), max(high, middle)  # quantiles of pairs may miss the medians' own
    return _Figures(middle, low, high, run["seconds"], run["error"])


def _row(name: str, own: _Figures, published: _Figures, same: bool) -> Row:
    verdict, note = SAME, ""
    if own.high < published.low * (1 - _MARGIN):
        verdict = REGRESSION
    elif own.low > published.high * (1 + _MARGIN):
        verdict = BETTER
    here, there = own.error, published.error
    if here is not None and there is not None and not here <= _ERRORS * there:
        verdict, note = REGRESSION, f"error {here:.1e}, published {there:.1e}"
    return Row(
        name, own.ratio, own.low, own.high, published.ratio, published.low, published.high,
        verdict, own.seconds if same else None, published.seconds if same else None, note,
    )  # fmt: skip
