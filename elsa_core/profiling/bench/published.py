"""Published results: `results/NAME.csv`, a row a contender, and `results/environments.json`; and
`elsa bench --compare`: one run beside a published one, and what became worse.

Rows hold quantiles of the rounds. A row without a median says in `note` why the contender took no
part. Here they become the documents that `elsa bench` writes, without samples;
`benchmarks/publish.py` makes the rows.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from elsa_core.base.messages import first_line
from elsa_core.base.reading import RESULT_BYTES, parse_json, read_json, read_text
from elsa_core.errors import ArgumentError, ModelError
from elsa_core.measuring.documents import Document
from elsa_core.measuring.intervals import Ratio, digits

RESULTS: Final = Path(__file__).parents[3] / "results"
"""Where a checkout keeps the published results; an installed package has none."""
ENVIRONMENTS: Final = "environments.json"
FIRST: Final = ("case", "contender", "environment", "n", "median", "p10", "p90", "error")
"""The columns that every file begins with. Times are seconds; errors are relative L2."""
ATTENTION: Final = (
    "precision", "best", "goal", "ratio", "ratio_p10", "ratio_p90", "flops_per_second",
    "ceiling_share", "bytes_per_second", "workspace_bytes", "host_seconds", "note",
)  # fmt: skip
PARTS: Final = ("forward", "backward", "optimizer")
_RATIO: Final = ("ratio", "ratio_low", "ratio_high")
MODELS: Final = (
    "precision", "best", "label", "model", "px", "batch", "dtype", "sites", *_RATIO, *PARTS,
    "memory_bytes", "host_seconds", "device_seconds", "joules", "note",
)  # fmt: skip
_COMMANDS: Final = ("bench attention", "bench models", "bench training", "bench linear", "profile")
ABOUT: Final = ("settings", "ceilings", "busy", "errors_measured")
"""What an environment holds of a document's results."""
_NAME: Final = re.compile(
    r"\w+/(?P<batch>\d+)x(?P<heads>\d+)x(?:(?P<queries>\d+):)?(?P<keys>\d+)"
    r"x(?P<head_dim>\d+)-(?P<dtype>\w+?)(?P<mask>-mask)?"
)
_TEXT: Final = {"case", "contender", "environment", "precision", "best", "label", "model", "dtype",
                "note", "sites", "px"}  # fmt: skip

REGRESSION: Final = "regression"
BETTER: Final = "better"
SAME: Final = "same"
_MARGIN: Final = 0.05  # by which intervals have to be apart: machines of one name differ by as much
_ERRORS: Final = 2.0  # times the published error, from which on it is another computation
# Half the width of the median's 95% interval is this over the root of the number of rounds, times
# the distance of a 10 or 90% quantile from the median (normal samples: 1.96 x 1.2533 / 1.2816).
_OF_MEDIAN: Final = 1.917
_MACHINE: Final = ("cpu", "threads", "gpu")


def find(name: str) -> Path | None:
    """The published file of a name like `attention_cpu`, if there is one."""
    if not RESULTS.is_dir():
        raise ArgumentError(
            "the published results are in elsa's repository, not in the installed package: "
            "run this from a checkout, or name a result file"
        )
    path = RESULTS / f"{name}.csv"
    return path if path.exists() else None


def load(path: Path) -> Document:
    """A document that `elsa bench -o` wrote, or a published file."""
    if not path.exists():
        raise ArgumentError(f"{path}: no such result; `elsa bench -o` writes it")
    if path.suffix == ".csv":
        return read(path)
    try:
        document = parse_json(read_text(path, RESULT_BYTES), str(path))
    except ModelError as error:
        raise ArgumentError(str(error)) from None
    if document.get("command") not in _COMMANDS:
        raise ArgumentError(f"{path}: not a result document of `elsa bench`")
    return document


def read(path: Path) -> Document:
    """The document of a published file, whose environments stand beside it: what tables and
    comparisons read of one.

    A file of profiles has several environments; its document is of the first one, and `lines` are
    the commands of all.
    """
    try:
        rows = list(csv.DictReader(io.StringIO(read_text(path, RESULT_BYTES))))
        environments = read_json(path.parent / ENVIRONMENTS)
        keys = list(dict.fromkeys(row["environment"] for row in rows))
        entry = environments[keys[0]]
        made = _attention_case if entry["command"] == "bench attention" else _model_case
        grouped: dict[tuple[str, str], list[Document]] = {}
        for row in rows:
            found: Document = dict(row)
            for name in row.keys() - _TEXT:
                kind = int if name in ("n", "batch") else float
                found[name] = kind(row[name]) if row[name] else None
            grouped.setdefault((row["environment"], row["case"]), []).append(found)
        unknown = {"python": "", "platform": "", "machine": "", "gpu": None, "isa": None}
        return {
            "command": entry["command"],
            "elsa_version": entry["elsa_version"],
            "lines": [environments[key]["line"] for key in keys],
            "environment": unknown | {n: v for n, v in entry.items() if n not in ABOUT},
            "results": {
                "busy": "", **{name: entry[name] for name in ABOUT if name in entry},
                "cases": [made(name, members) for (_, name), members in grouped.items()],
            },
        }  # fmt: skip
    except (ModelError, csv.Error, LookupError, TypeError, ValueError, AttributeError) as error:
        raise ArgumentError(f"{path}: not a published result: {first_line(error)}") from None


def _case(
    name: str, members: Sequence[Document], columns: Sequence[str], about: Document
) -> Document:
    measured = [
        dict.fromkeys(columns)
        | row
        | {"seconds": row["median"], "seconds_p10": row["p10"], "seconds_p90": row["p90"],
           "precision": row["precision"] or None}
        for row in members
        if row["median"] is not None
    ]  # fmt: skip
    best = {bool(row["precision"]): row["contender"] for row in measured if row["best"] == "best"}
    return {
        "case": {"name": name, "table": name.partition("/")[0], **about},
        "measurements": measured, "best_peer": best.get(False), "best_own": best.get(True, ""),
        "wrong": [row["contender"] for row in measured if row["best"] == "wrong"],
        "left_out": {r["contender"]: r["note"] for r in members if r["median"] is None},
    }  # fmt: skip


def _attention_case(name: str, members: Sequence[Document]) -> Document:
    found = _NAME.fullmatch(name)
    if found is None:
        raise ValueError(f"{name!r} is no name of a case")
    about: Document = found.groupdict()
    own = [row for row in members if row["precision"] and row["median"] is not None]
    about |= {key: int(about[key]) for key in ("batch", "heads", "keys", "head_dim")}
    about |= {
        "queries": int(about["queries"] or about["keys"]),
        "mask": "additive" if about["mask"] else "none",
        "precisions": [row["precision"] for row in own] or ["strict"],
        "goal": own[0].get("goal") if own else None,
    }
    case = _case(name, members, ATTENTION, about)
    for row in case["measurements"]:
        row["notes"] = dict(each.split(": ", 1) for each in row["note"].split("; ") if each)
    return case


def _model_case(name: str, members: Sequence[Document]) -> Document:
    first = members[0]
    about = {key: first.get(key) or "" for key in ("label", "model", "dtype")}
    about |= {"image_size": first.get("px"), "batch": first.get("batch")}
    case = _case(name, members, MODELS, about)
    runs = {row["contender"]: row for row in case["measurements"]}
    for row in runs.values():
        if row["ratio"] is not None:
            value, low, high = (digits(row[key]) for key in _RATIO)
            row["ratio_to_best"] = Ratio(value, low, high, row["n"]).to_dict()
        if row["forward"] is not None:
            row["parts"] = {part: row[part] for part in PARTS}
    own = runs.get(case["best_own"], {})
    original = runs.get("eager") or runs.get(case["best_peer"]) or {}
    errors = [own.get("error"), original.get("error")]
    return case | {
        "gain": own.get("ratio_to_best"),
        "errors": None if errors == [None, None] else errors,
        "sites": [int(count) for count in (first.get("sites") or "").split("/") if count],
        "warnings": [],
    }


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
