"""What the studies share: options, contenders timed in turns, rows with quantiles, CSV out.

A study names its cases and measures one at a time:

    if __name__ == "__main__":
        main(__doc__, cases, measure)

`-o results/NAME.csv` writes the rows, and where they were measured beside them in
`environments.json`. Without it the CSV goes to stdout. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.publish import csv_of, save
from elsa_core.base.messages import first_line
from elsa_core.errors import ElsaError
from elsa_core.measuring import environment
from elsa_core.measuring.intervals import digits, percentile
from elsa_core.measuring.timing import Contender, interleaved, synchronize, time_all

Row = dict[str, Any]
FAILURES = (ElsaError, RuntimeError, ImportError, TypeError, AssertionError, ValueError)
"""What a contender that cannot take part raises."""


def row(case: str, contender: str, seconds: Sequence[float], **more: Any) -> Row:
    """The row of one contender: quantiles of its rounds, and further columns."""
    return {
        "case": case, "contender": contender, "n": len(seconds),
        "median": digits(percentile(seconds, 0.5)), "p10": digits(percentile(seconds, 0.1)),
        "p90": digits(percentile(seconds, 0.9)), **more,
    }  # fmt: skip


def left_out(case: str, contender: str, reason: object) -> Row:
    """The row of a contender that took no part."""
    text = first_line(reason) if isinstance(reason, BaseException) else str(reason)
    return {"case": case, "contender": contender, "note": text[:160]}


def compared(
    case: str,
    contenders: Iterable[Contender],
    given: Namespace,
    judge: Callable[[Contender], Mapping[str, Any]],
) -> list[Row]:
    """Judge each contender, time those that ran in turns; a row each.

    judge: calls a contender once and returns columns like `error`; one that raises is left out.
    """
    field, about, rows = [], {}, []
    for each in contenders:
        try:
            with each.context():
                about[each.name] = judge(each)
            if given.device.type == "cuda":
                torch.cuda.synchronize()  # an asynchronous failure must show here
        except FAILURES as error:
            rows.append(left_out(case, each.name, error))
            continue
        field.append(each)
    samples, _ = time_all(field, given.device, given.rounds, given.budget)
    return [row(case, c.name, samples[c.name], **about[c.name]) for c in field] + rows


def in_turns(
    contenders: Sequence[Contender], given: Namespace, *, calls: int, awaited: bool = False,
    launched: bool = False,
) -> dict[str, list[float]]:  # fmt: skip
    """Seconds of a call, a sample a round, of `calls` in a row.

    awaited: each call alone. launched: until the host has launched the last one.
    """

    def sample(contender: Contender) -> float:
        synchronize(given.device)
        started = time.perf_counter()
        for _ in range(calls):
            contender.call()
            if awaited:
                synchronize(given.device)
        if not launched:
            synchronize(given.device)
        taken = time.perf_counter() - started
        synchronize(given.device)
        return taken / calls

    interleaved(contenders, 3, sample)
    return interleaved(contenders, given.rounds, sample)


def options(doc: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """The options of every study."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--device", type=torch.device, default="cuda" if cuda else "cpu")
    parser.add_argument("--match", default="", help="only cases whose name holds this")
    parser.add_argument("--dry-run", action="store_true", help="list the cases; measure nothing")
    parser.add_argument("--quick", action="store_true", help="small cases, on a CPU too")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--budget", type=float, default=3.0, help="seconds of timing a case")
    parser.add_argument("--seconds", type=float, default=540.0, help="no case begins after them")
    parser.add_argument("-o", "--output", type=Path)
    parser.set_defaults(**defaults)
    return parser


def main(
    doc: str | None,
    cases: Callable[[Namespace], Mapping[str, Any]],
    measure: Callable[[str, Any, Namespace], list[Row]],
    parser: argparse.ArgumentParser | None = None,
    arguments: Sequence[str] | None = None,
) -> list[Row]:
    """Measure the cases that match, one after another, and write their rows.

    cases: by name. measure: the rows of one. A case that fails, or for which no time is left, has a
    row that says so.
    """
    given = (parser or options(doc)).parse_args(arguments)
    begin, rows = time.monotonic(), list[Row]()
    try:
        for name, case in cases(given).items():
            if given.match not in name:
                continue
            if given.dry_run:
                sys.stdout.write(f"{name}\n")
                continue
            spent = time.monotonic() - begin
            if spent > given.seconds:
                rows.append(left_out(name, "all", "no time was left"))
                continue
            try:
                found = measure(name, case, given)
            except FAILURES as error:
                found = [left_out(name, "all", error)]
            rows += found
            sys.stderr.write(f"{spent:6.1f} s  {name}: {', '.join(map(_words, found))}\n")
    finally:  # after Ctrl-C too: a study takes hours
        if rows:
            write(rows, given)
    return rows


def write(rows: Sequence[Row], given: Namespace) -> None:
    """The rows as CSV, to --output or stdout."""
    if given.output is None:
        sys.stdout.write(csv_of(rows))
        return
    module = sys.modules["__main__"].__spec__
    line = f"python -m {module.name}" if module else given.output.stem
    about = {"line": " ".join([line, *sys.argv[1:]]), **environment.describe(given.device)}
    save(given.output, rows, json.loads(json.dumps(about)))


def _words(found: Row) -> str:
    if found.get("median") is None:
        return f"{found['contender']} left out"
    error = f" ({found['error']:.1e})" if found.get("error") is not None else ""
    return f"{found['contender']} {found['median'] * 1e6:.4g} us{error}"
