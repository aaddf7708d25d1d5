"""`elsa bench --compare`: one run beside a published one, and what became worse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

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


class Figures(NamedTuple):
    """What is compared of a case: best peer's time over elsa's, of the medians, its 95% interval,
    elsa's seconds and its error."""

    ratio: float
    low: float
    high: float
    seconds: float
    error: float | None


@dataclass(frozen=True)
class Row:
    """One case of both runs.

    `verdict`: `REGRESSION` where the own interval lies below the published one by more than 5%, or
    the error is over twice the published, which `note` says; `BETTER`, `SAME`.
    """

    name: str
    own: Figures
    published: Figures
    verdict: str
    note: str


@dataclass(frozen=True)
class Comparison:
    """All cases that both runs have. Ratios against peers of the same run compare machines that
    differ; times do only where `same_machine`."""

    rows: tuple[Row, ...]
    same_machine: bool
    missing: tuple[str, ...]

    def to_dict(self) -> Document:
        """Plain data for JSON; seconds are None where the machines differ."""
        rows = []
        for row in self.rows:
            found: Document = {"name": row.name, "verdict": row.verdict, "note": row.note}
            for prefix, each in (("own", row.own), ("published", row.published)):
                found |= {
                    prefix: each.ratio,
                    f"{prefix}_low": each.low,
                    f"{prefix}_high": each.high,
                }
            same = self.same_machine
            found["seconds"] = row.own.seconds if same else None
            found["published_seconds"] = row.published.seconds if same else None
            rows.append(found)
        return {"rows": rows, "same_machine": self.same_machine, "missing": list(self.missing)}


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
            continue
        verdict, note = SAME, ""
        if here.high < there.low * (1 - _MARGIN):
            verdict = REGRESSION
        elif here.low > there.high * (1 + _MARGIN):
            verdict = BETTER
        errors = (here.error, there.error)
        if None not in errors and not errors[0] <= _ERRORS * errors[1]:  # type: ignore[operator]
            verdict, note = REGRESSION, f"error {errors[0]:.1e}, published {errors[1]:.1e}"
        rows.append(Row(name, here, there, verdict, note))
    return Comparison(tuple(rows), same, tuple(missing))


def _figures(case: Document) -> Figures | None:
    if "gain" in case:
        gain = case["gain"]
        if gain is None:
            return None
        run = next(m for m in case["measurements"] if m["contender"] == case["best_own"])
        error = case["errors"][0] if case["errors"] else None
        return Figures(gain["value"], gain["low"], gain["high"], run["seconds"], error)
    first = case["case"]["precisions"][0]
    run = next((m for m in case["measurements"] if m["precision"] == first), None)
    if run is None or run["ratio"] is None:
        return None
    share = _OF_MEDIAN * (run.get("n") or len(run["samples"])) ** -0.5
    middle = run["ratio"]
    low, high = (middle + share * (run[end] - middle) for end in ("ratio_p10", "ratio_p90"))
    low, high = min(low, middle), max(high, middle)  # quantiles of pairs may miss the medians' own
    return Figures(middle, low, high, run["seconds"], run["error"])
