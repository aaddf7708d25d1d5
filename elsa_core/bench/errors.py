"""Measures the errors of published model runs, without their times.

    python -m elsa_core.bench.errors models_h200.json --cases 'batch8/Swin*' --limit 90

Each case of a document of `elsa bench models` is built as it was, from the seed in its settings,
and every run that was timed is called on the batch that was timed. The errors go into the file,
with the machine that measured them, and to stdout, one line of JSON for each case. Cases that have
them are left as they are, so a run can be stopped and resumed.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from elsa_core.bench import models, tables
from elsa_core.bench.model_cases import ModelCase, images
from elsa_core.errors import ElsaError
from elsa_core.measuring import environment
from elsa_core.measuring.memory_limit import limited, release
from elsa_core.messages import first_line
from elsa_core.model_runs import runs, variants
from elsa_core.model_runs.errors import run_errors

SCOPE: Final = "attention"  # what the published models were patched with
Document = dict[str, Any]


def missing(document: Document, pattern: str = "*") -> list[Document]:
    """The measured cases of a name like `pattern` of which no run has an error."""
    return [
        case
        for case in document["results"]["cases"]
        if fnmatch.fnmatchcase(case["case"]["name"], pattern)
        and case["measurements"]
        and all(run.get("error") is None for run in case["measurements"])
    ]


def renew(
    document: Document,
    device: torch.device,
    *,
    pattern: str = "*",
    limit_seconds: float | None = None,
    keep: Callable[[Document, str], None] = lambda case, why: None,
) -> int:
    """Put the errors of every timed call into a document; return how many cases are left.

    Args:
        document: of `elsa bench models`; changed in place.
        device: of the kind that the document was measured on.
        pattern: of the names of cases.
        limit_seconds: no case begins after it; None for no limit.
        keep: called with each case and why its errors are not known, "" if they are.
    """
    end = None if limit_seconds is None else time.monotonic() + limit_seconds
    results, left = document["results"], missing(document, pattern)
    matmul = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        while left and (end is None or time.monotonic() < end):
            case = left.pop(0)
            why = _of_case(case, results["settings"], device)
            results["errors_measured"] = environment.describe(device)
            keep(case, why)
            release(device)
    finally:
        torch.set_float32_matmul_precision(matmul)
    return len(left)


def _of_case(found: Document, settings: Document, device: torch.device) -> str:
    """The errors of one case's runs; why they are not known."""
    case = ModelCase(**{name: value for name, value in found["case"].items() if name != "name"})
    variants.forget_compiled()
    found["errors"] = None  # what stood there was of other calls
    try:
        with limited(device):
            model = models.build(case, device, settings["seed"])
            ready = runs.prepare(
                model, (images(case, device, settings["seed"]),), settings["baselines"],
                lambda *_: None, precision=case.precision, backend=settings["backend"],
                scope=SCOPE,
            )  # fmt: skip
            known = run_errors(ready.plain, ready.built.contenders, ready.arguments, case.precision)
    except (ElsaError, RuntimeError, MemoryError) as error:
        return first_line(error)
    for run in found["measurements"]:
        run["error"] = known.errors.get(run["contender"])
    errors = {run["contender"]: run["error"] for run in found["measurements"]}
    if errors["eager"] is None or errors[found["best_own"]] is None:
        return known.reason or "the fastest patched run did not run"
    found["errors"] = [errors[found["best_own"]], errors["eager"]]
    ours = [name for name in known.wrong if name.startswith("patched") and name in errors]
    found["wrong"] = list(dict.fromkeys([*found["wrong"], *ours]))
    return ""


def main(arguments: list[str]) -> None:
    """Renew a file of `results/`, or one anywhere."""
    parser = argparse.ArgumentParser(prog="python -m elsa_core.bench.errors")
    parser.add_argument("file", type=Path, help="of `elsa bench models`, by path or in results/")
    parser.add_argument("--cases", default="*", help="names of cases, as a shell pattern")
    parser.add_argument("--limit", type=float, help="seconds after which no case begins")
    given = parser.parse_args(arguments)
    path = given.file if given.file.exists() else tables.published() / given.file.name
    document = tables.load(path)
    device = torch.device(document["environment"]["device"])
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error(f"{path} was measured on a GPU: PyTorch finds none here")

    def keep(case: Document, why: str) -> None:
        models.write(document, path)
        errors = {run["contender"]: run.get("error") for run in case["measurements"]}
        line = {"case": case["case"]["name"], "errors": errors, "wrong": case["wrong"], "why": why}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()

    left = renew(document, device, pattern=given.cases, limit_seconds=given.limit, keep=keep)
    measured = document["results"].get("errors_measured")
    sys.stdout.write(json.dumps({"left": left, "environment": measured}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
