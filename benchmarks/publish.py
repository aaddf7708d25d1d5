"""Results as they are published: rows of CSV, and where they were measured.

    python -m benchmarks.publish run.json results/attention_cpu.csv --line "elsa bench attention"

turns what `elsa bench -o` or `elsa profile -o` wrote into rows and adds its environment, whose key
is the file's name, to `environments.json` beside it. Several JSON files make one CSV.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elsa_core.errors import ArgumentError
from elsa_core.profiling.bench.published import ABOUT, ATTENTION, ENVIRONMENTS, FIRST, MODELS, load

Document = dict[str, Any]
Row = dict[str, Any]
_NOT_KEPT = ("python", "platform", "machine", "cpu_count")


def csv_of(rows: Sequence[Row]) -> str:
    """Rows as CSV; None is an empty cell, and a column without any value is left out."""
    names = dict.fromkeys(name for row in rows for name in row if name not in FIRST)
    used = [*FIRST, *(n for n in names if any(_cell(row.get(n)) for row in rows))]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(used)
    writer.writerows([_cell(row.get(name)) for name in used] for row in rows)
    return text.getvalue()


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else str(value)


def save(path: Path, rows: Sequence[Row], *about: Document) -> None:
    """Write rows, and the environments of the file, in the order of their first rows."""
    keys = [path.stem] if len(about) == 1 else [f"{path.stem}/{i}" for i in range(len(about))]
    file = path.parent / ENVIRONMENTS
    held = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    held = {key: value for key, value in held.items() if key.partition("/")[0] != path.stem}
    held |= {
        key: {n: v for n, v in each.items() if n not in _NOT_KEPT and v not in (None, "", [])}
        for key, each in zip(keys, about, strict=True)
    }
    named = [{**row, "environment": keys[row.get("environment", 0)]} for row in rows]
    path.write_text(csv_of(named), encoding="utf-8")
    file.write_text(_lines(held), encoding="utf-8")


def _lines(environments: Document) -> str:
    """JSON with a line for each entry of an environment."""
    parts = []
    for key in sorted(environments):
        inner = (f"  {json.dumps(n)}: {json.dumps(v)}" for n, v in environments[key].items())
        parts.append(f" {json.dumps(key)}: {{\n" + ",\n".join(inner) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def about(document: Document, line: str) -> Document:
    """The environment of a document. line: the command that wrote it."""
    results = document["results"]
    return {
        "command": document["command"], "line": line, "elsa_version": document["elsa_version"],
        **document["environment"], **{name: results[name] for name in ABOUT if results.get(name)},
    }  # fmt: skip


def rows_of(document: Document, environment: int = 0) -> list[Row]:
    """The rows of a document. environment: which of a file's it has."""
    if document["command"] == "profile":
        cases = [_case_of_point(document, point) for point in document["results"]["points"]]
    else:
        cases = document["results"]["cases"]
    own = _attention_row if document["command"] == "bench attention" else _model_row
    rows: list[Row] = []
    for case in cases:
        name = {"case": case["case"]["name"], "environment": environment}
        rows += [name | own(case, measured) for measured in case["measurements"]]
        rows += [name | {"contender": who, "note": why} for who, why in case["left_out"].items()]
    return rows


def _times(case: Document, measured: Document) -> Row:
    who, wrong = measured["contender"], measured["contender"] in case["wrong"]
    best = who in (case["best_peer"], case.get("best_own"))
    return {
        "contender": who, "n": len(measured["samples"]), "median": measured["seconds"],
        "p10": measured["seconds_p10"], "p90": measured["seconds_p90"],
        "error": measured.get("error"), "precision": measured["precision"],
        "best": "wrong" if wrong else "best" if best else None,
    }  # fmt: skip


def _attention_row(case: Document, measured: Document) -> Row:
    kept = ("backend", "computes", "package")
    notes = {name: measured["notes"][name] for name in kept if name in measured["notes"]}
    first = measured["precision"] == case["case"]["precisions"][0]
    return (
        {name: measured.get(name) for name in ATTENTION}
        | _times(case, measured)
        | {"goal": case["case"]["goal"] if first else None}
        | {"note": "; ".join(f"{name}: {value}" for name, value in notes.items())}
    )


def _model_row(case: Document, measured: Document) -> Row:
    asked, ratio = case["case"], measured.get("ratio_to_best") or {}
    row = {name: measured.get(name) for name in MODELS} | _times(case, measured)
    row |= {"ratio": ratio.get("value"), "ratio_low": ratio.get("low"),
            "ratio_high": ratio.get("high"), **measured.get("parts", {})}  # fmt: skip
    row |= {name: asked.get(name) for name in ("label", "model", "batch", "dtype")}
    row["px"] = asked.get("image_size")
    row["sites"] = "/".join(map(str, case.get("sites") or ())) or None
    row["n"] = case["gain"]["rounds"]
    if row["error"] is None and case["errors"] is not None:  # of gradients, or measured apart
        row["error"] = dict(
            zip((case["best_own"], "eager"), case["errors"], strict=True)
        ).get(row["contender"])  # fmt: skip
    return row


def _case_of_point(document: Document, point: Document) -> Document:
    """A point of `elsa profile` as a case of `elsa bench models`."""
    results, asked = document["results"], point["configuration"]
    scope = results["settings"].get("scope", "auto")
    name = results["model"]["name"] + ("" if scope == "auto" else f", scope {scope}")
    found = point.get("profile")
    if not found:
        size = "x".join(map(str, dict.fromkeys(asked["image_size"] or ())))
        case = {"name": f"{name}-{size}x{asked['batch']}-{asked['dtype']}"}
        return {"case": case, "measurements": [], "left_out": {"all": point["reason"]}}
    size = "x".join(map(str, dict.fromkeys(found["image_size"])))
    runs = [
        run | {"contender": run["name"], "precision": "strict" if run["patched"] else None}
        for run in found["runs"]
    ]
    return {
        "case": {"name": f"{name}-{size}x{found['batch']}-{found['dtype']}", "label": name,
                 "image_size": size, "batch": found["batch"], "dtype": found["dtype"]},
        "measurements": runs, "best_peer": found["best_baseline"],
        "best_own": found["best_patched"], "gain": found["gain"], "errors": None,
        "sites": [found["patched"], found["patched"] + found["kept"]],
        "wrong": found.get("wrong", ()), "left_out": found["left_out"],
    }  # fmt: skip


def main() -> None:
    """Publish the documents."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.publish")
    parser.add_argument("documents", nargs="+", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--line", action="append", required=True, help="the command of each")
    given = parser.parse_args()
    if len(given.line) != len(given.documents):
        raise ArgumentError("--line: name the command of each document, in their order")
    documents = [load(path) for path in given.documents]
    rows = [row for i, document in enumerate(documents) for row in rows_of(document, i)]
    save(given.output, rows, *map(about, documents, given.line))


if __name__ == "__main__":
    main()
