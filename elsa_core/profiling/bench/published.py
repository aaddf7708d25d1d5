"""Published results: `results/NAME.csv`, a row a contender, and `results/environments.json`.

Rows hold quantiles of the rounds. A row without a median says in `note` why the contender took no
part. Here they become the documents that `elsa bench` writes, without samples;
`benchmarks/publish.py` makes the rows.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from elsa_core.base.reading import RESULT_BYTES, json_problem, read_text
from elsa_core.errors import ArgumentError, ModelError
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
    r"(?P<table>\w+)/(?P<batch>\d+)x(?P<heads>\d+)x(?:(?P<queries>\d+):)?(?P<keys>\d+)"
    r"x(?P<head_dim>\d+)-(?P<dtype>\w+?)(?P<mask>-mask)?"
)
_WHOLE: Final = {"n", "sites", "px", "batch"}
_TEXT: Final = {"case", "contender", "environment", "precision", "best", "label", "model", "dtype",
                "note"}  # fmt: skip

Document = dict[str, Any]
Row = dict[str, Any]


def find(name: str) -> Path | None:
    """The published file of a name like `attention_cpu`, if there is one.

    Raises:
        ArgumentError: the package was installed without results.
    """
    if not RESULTS.is_dir():
        raise ArgumentError(
            "the published results are in elsa's repository, not in the installed package: "
            "run this from a checkout, or name a result file"
        )
    path = RESULTS / f"{name}.csv"
    return path if path.exists() else None


def load(path: Path) -> Document:
    """A document that `elsa bench -o` wrote, or a published file.

    Raises:
        ArgumentError: the file is missing, or is neither.
    """
    if not path.exists():
        raise ArgumentError(f"{path}: no such result; `elsa bench -o` writes it")
    if path.suffix == ".csv":
        return read(path)
    try:
        document = json.loads(read_text(path, RESULT_BYTES))
    except ModelError as error:
        raise ArgumentError(str(error)) from None
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{path}: not a result document: {json_problem(error)}") from error
    if not isinstance(document, dict) or document.get("command") not in _COMMANDS:
        raise ArgumentError(f"{path}: not a result document of `elsa bench`")
    return document


def read(path: Path) -> Document:
    """The document of a published file, whose environments stand beside it.

    Raises:
        ArgumentError: the file or its environment is missing, or holds something else.
    """
    try:
        rows = list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))))
        about = json.loads((path.parent / ENVIRONMENTS).read_text(encoding="utf-8"))
        return document_of(rows, about)
    except (OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise ArgumentError(f"{path}: not a published result: {error}") from None


def document_of(rows: Sequence[Row], environments: Document) -> Document:
    """The document of rows: what tables and comparisons read of one.

    A file of profiles has several environments; its document is of the first one, and `lines` are
    the commands of all.
    """
    keys = list(dict.fromkeys(row["environment"] for row in rows))
    entry = environments[keys[0]]
    attention = entry["command"] == "bench attention"
    grouped: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        typed = {name: _typed(name, text) for name, text in row.items()}
        grouped.setdefault((row["environment"], row["case"]), []).append(typed)
    made = _attention_case if attention else _model_case
    unknown = {"python": "", "platform": "", "machine": "", "gpu": None, "isa": None}
    described = unknown | {name: value for name, value in entry.items() if name not in ABOUT}
    return {
        "command": entry["command"], "elsa_version": entry["elsa_version"],
        "lines": [environments[key]["line"] for key in keys], "environment": described,
        "results": {"busy": "", **{name: entry[name] for name in ABOUT if name in entry}}
        | {"cases": [made(name, members) for (_, name), members in grouped.items()]},
    }  # fmt: skip


def _typed(name: str, text: str) -> Any:
    if name in _TEXT or name in ("sites", "px"):
        return text
    if not text:
        return None
    return int(text) if name in _WHOLE else float(text)


def _parts(members: Sequence[Row]) -> Document:
    """What cases of all kinds have."""
    measured = [row for row in members if row["median"] is not None]
    best = [row for row in measured if row["best"] == "best"]
    return {
        "measurements": measured,
        "best_peer": next((r["contender"] for r in best if not r["precision"]), None),
        "best_own": next((r["contender"] for r in best if r["precision"]), ""),
        "wrong": [row["contender"] for row in measured if row["best"] == "wrong"],
        "left_out": {r["contender"]: r["note"] for r in members if r["median"] is None},
    }


def _run(row: Row) -> Document:
    return row | {
        "seconds": row["median"], "seconds_p10": row["p10"], "seconds_p90": row["p90"],
        "precision": row["precision"] or None,
    }  # fmt: skip


def _attention_case(name: str, members: Sequence[Row]) -> Document:
    found = _NAME.fullmatch(name)
    if found is None:
        raise ValueError(f"{name!r} is no name of a case")
    about = found.groupdict()
    sizes = {key: int(about[key]) for key in ("batch", "heads", "keys", "head_dim")}
    parts = _parts(members)
    parts["measurements"] = [
        dict.fromkeys(ATTENTION)
        | _run(row)
        | {"notes": dict(each.split(": ", 1) for each in row["note"].split("; ") if each)}
        for row in parts["measurements"]
    ]
    own = [row for row in parts["measurements"] if row["precision"]]
    return parts | {
        "case": {
            "name": name, "table": about["table"], **sizes,
            "queries": int(about["queries"] or about["keys"]), "dtype": about["dtype"],
            "mask": "additive" if about["mask"] else "none",
            "precisions": [row["precision"] for row in own] or ["strict"],
            "goal": own[0].get("goal") if own else None,
        },
    }  # fmt: skip


def _model_case(name: str, members: Sequence[Row]) -> Document:
    parts, first = _parts(members), members[0]
    runs = []
    for row in parts["measurements"]:
        run = dict.fromkeys(MODELS) | _run(row)
        if row.get("ratio") is not None:
            value, low, high = (digits(row[name]) for name in _RATIO)
            run["ratio_to_best"] = Ratio(value, low, high, row["n"]).to_dict()
        if row.get("forward") is not None:
            run["parts"] = {part: row[part] for part in PARTS}
        runs.append(run)
    by_name = {run["contender"]: run for run in runs}
    own = by_name.get(parts["best_own"], {})
    original = by_name.get("eager") or by_name.get(parts["best_peer"]) or {}
    errors = [own.get("error"), original.get("error")]
    sites = first.get("sites") or ""
    asked = {key: first.get(key) or "" for key in ("label", "model", "dtype")}
    return parts | {
        "measurements": runs, "gain": own.get("ratio_to_best"),
        "errors": None if errors == [None, None] else errors,
        "sites": [int(count) for count in sites.split("/") if count], "warnings": [],
        "case": {"name": name, "table": name.partition("/")[0], **asked,
                 "image_size": first.get("px"), "batch": first.get("batch")},
    }  # fmt: skip
