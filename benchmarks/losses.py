"""Writes the table of losses that `explain` reads, from the published results.

    python -m benchmarks.losses

A case can only be reported where a case of its kind (dtype, head_dim, masked or not, precision) was
lost on its machine, so the other kinds are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

from elsa_core.base.files import write_text
from elsa_core.dispatch.losses import LOST, TABLE, Case
from elsa_core.profiling.bench import published
from elsa_core.profiling.bench.cases import CPU_TABLES, CUDA_TABLES

_FORWARDS: Final = {*CPU_TABLES, *CUDA_TABLES}  # neither gradients nor packed sequences


def table() -> str:
    """The table as JSON, one case a line, from the published results."""
    held = json.loads((published.RESULTS / published.ENVIRONMENTS).read_text(encoding="utf-8"))
    names = sorted(name for name, each in held.items() if each.get("command") == "bench attention")
    found = [_machine(published.read(published.RESULTS / f"{name}.csv")) for name in names]
    machines = [machine for machine in found if machine["cases"]]
    lines = []
    for machine in machines:
        rows = ",\n".join(f"    {json.dumps(row)}" for row in machine["cases"])
        about = json.dumps({name: machine[name] for name in ("device", "name")})[:-1]
        lines.append(f'  {about}, "cases": [\n{rows}\n  ]}}')
    return '{"machines": [\n' + ",\n".join(lines) + "\n]}\n"


def _machine(document: dict[str, Any]) -> dict[str, Any]:
    environment = document["environment"]
    name = environment.get("gpu") or f"a CPU with {environment.get('isa') or 'no known ISA'}"
    cases = list(_cases(document, name))
    lost = {_kind(case) for case in cases if case.ratio < LOST}
    rows = [list(case[:-1]) for case in cases if _kind(case) in lost]
    return {"device": environment.get("device"), "name": name, "cases": rows}


def _kind(case: Case) -> tuple[Any, ...]:
    return case.dtype, case.head_dim, case.masked, case.precision


def _cases(document: dict[str, Any], machine: str) -> Iterable[Case]:
    """Every measurement of a forward of elsa's `attention` against a peer."""
    for row in document["results"].get("cases", ()):
        case = row["case"]
        if case["table"] not in _FORWARDS:
            continue
        for measured in row.get("measurements", ()):
            if measured.get("precision") and measured.get("ratio") and "queries" in case:
                yield Case(
                    case["name"], case["batch"], case["heads"], case["queries"], case["keys"],
                    case["head_dim"], case["dtype"], case.get("mask", "none") != "none",
                    measured["precision"], row.get("best_peer") or "a peer",
                    float(f"{measured['ratio']:.3g}"), machine,
                )  # fmt: skip


if __name__ == "__main__":
    write_text(table(), TABLE)
