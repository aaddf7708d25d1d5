"""`elsa bench attention --trace`: how a call is cut and merged, and the proof that it is exact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from elsa_cli import bench_common
from elsa_cli.console import Session
from elsa_cli.errors import VerdictError

if TYPE_CHECKING:
    import torch

    from elsa_core.backends.partition import Partition
    from elsa_core.profiling.bench.cases import Case
    from elsa_core.profiling.bench.trace import Trace


def run(
    session: Session, cases: Sequence[Case], device: torch.device, *, backend: str, seed: int
) -> None:
    """Trace `cases`, show them, and fail where a claim fails."""
    from elsa_core.profiling.bench import trace

    with session.stage("tracing") as update:
        traces = trace.run(cases, device=device, backend=backend, seed=seed, progress=update)
    found = {"traces": [each.to_dict() for each in traces]}
    session.document("bench attention", found, bench_common.described(device))
    for each in traces:
        _show(session, each)
    failed = [t.case.name for t in traces if not t.ok]
    if failed:
        raise VerdictError(f"a structural claim does not hold: {', '.join(failed)}")
    untried = sum(claim.ok is None for each in traces for claim in each.claims)
    rest = f"; what the kernel returns needs a GPU ({untried} not tried)" if untried else ""
    noun = "call" if len(traces) == 1 else "calls"
    session.line(f"{len(traces)} {noun} traced: every tried claim holds{rest}", even_quiet=True)


def _show(session: Session, trace: Trace) -> None:
    part = trace.partition
    session.line(f"{trace.case.name} · {trace.precision} · {part.backend}", "bold")
    session.line(f"{part.schedule} ({part.machine})")
    session.table(("", "of this call"), _structure(part), wrap=1)
    session.line()
    marks = {True: "✓", False: "✗ no", None: "not tried"}
    rows = [
        [claim.name, marks[claim.ok], _number(claim.found), _number(claim.allowed), claim.note]
        for claim in trace.claims
    ]
    session.table(("claim", "holds", ">found", ">at most", "what"), rows, wrap=4)
    session.line()


def _structure(part: Partition) -> list[list[str]]:
    last, states = part.spans()[-1], part.states
    trip = "none: states stay on chip from the first key to the output"
    if states.states:
        written, read, alive = map(
            _size, (states.written_bytes, states.read_bytes, states.resident_bytes)
        )
        trip = (
            f"{states.states} states ({states.form}) through {states.where}: {written} written, "
            f"{read} read, {alive} alive"
        )
    splits = f"{part.splits} of {part.split_keys} keys (the last: {last[1] - last[0]})"
    rows = [
        ["query tiles", f"{part.query_tiles} a head, up to {part.query_tile} rows each"],
        ["key leaves", f"{part.key_tiles} a row, up to {part.key_tile} keys each"],
        ["key splits", "none: one fold over all keys" if part.splits == 1 else splits],
        ["programs", f"{part.programs} that can run at once"],
        ["round trip", trip],
        [
            "merge depth",
            f"{part.depth} = {part.leaf_levels} in a leaf + {part.chain_merges} in a chain + "
            f"{part.tree_levels} in a tree + 3",
        ],
        ["L(n, B)", f"{part.scan_depth} for a scan of the same leaves (Eq. 6)"],
        ["u x depth", f"{part.bound:.2e}; Theorem 1, u L(n, B): {part.scan_bound:.2e}"],
    ]
    if part.ahead_bytes:
        rows.insert(4, ["operands ahead", f"{_size(part.ahead_bytes)} written, read by each tile"])
    return rows


def _size(count: int) -> str:
    return f"{count / 2**20:.3g} MiB" if count >= 2**20 else f"{count / 2**10:.3g} KiB"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}" if value else "0"
