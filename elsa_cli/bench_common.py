"""What the kinds of `elsa bench` have in common: their device, where results may be written, and
`--compare`: a run beside a published one, of which what became worse ends with exit code 1."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from elsa_cli.console import Session
from elsa_cli.errors import PlaceError, TargetError, VerdictError
from elsa_cli.options import Options, resolve_device

if TYPE_CHECKING:
    import torch

    from elsa_core.profiling.bench.published import Comparison

Document = dict[str, Any]


def device_of(options: Options, *, plans: bool = False) -> torch.device:
    """The device to measure on. Listing what a GPU would measure needs none; `plans`: nor does what
    is only planned for one."""
    import torch

    named = options.device
    listed = options.dry_run and named != "auto"
    absent = named.startswith("cuda") and not torch.cuda.is_available()
    return torch.device(named if listed or (absent and plans) else resolve_device(named))


def described(device: torch.device) -> dict[str, Any]:
    """The environment of a document about a device, which need not be here."""
    from torch.cuda import is_available

    from elsa_core.measuring import environment

    return environment.describe(device if device.type == "cpu" or is_available() else "cpu")


def require_free(device: torch.device, options: Options) -> None:
    """Refuse to keep what is measured on a machine that others use, unless --allow-busy."""
    from elsa_core.measuring import busy

    why = busy.reason(device)
    if why and not options.allow_busy:
        raise PlaceError(f"{why}: wait until the machine is free, or use --allow-busy")


def check_output(device: torch.device, options: Options, *, resumes: bool) -> None:
    """Whatever would keep --output from being written ends the command before it measures."""
    target = options.output
    if target is None:
        return
    if not target.parent.is_dir():
        raise TargetError(f"{target}: its folder does not exist; create it first")
    if target.exists() and not (options.force or (resumes and options.resume)):
        way = "--resume to go on, or --force" if resumes else "--force"
        raise TargetError(f"{target} exists; use {way} to replace it")
    require_free(device, options)


def published(given: str | None) -> Document | None:
    """The document that --compare names: a file, or a published one of the checkout.

    Raises: ArgumentError, ModelError.
    """
    if given is None:
        return None
    from elsa_core.base.files import located
    from elsa_core.errors import ModelError
    from elsa_core.profiling.bench import published as results

    path = located(given)
    if not path.exists() and not path.suffix:
        path = results.find(given) or path
    document = results.load(path)
    try:
        _compared(document, document)  # what it lacks is known before minutes of measuring
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None
    return document


def files(session: Session, own: Path, other: Document) -> None:
    """Compare an earlier run with another one; nothing is measured."""
    from elsa_core.errors import ArgumentError
    from elsa_core.profiling.bench import published as results

    if own.suffix == ".csv":
        raise ArgumentError(f"{own}: --from takes a run as `elsa bench -o` wrote it, in JSON")
    document = results.load(own)
    if document["command"] != other["command"]:
        raise ArgumentError(f"{own} holds {document['command']}, not {other['command']}")
    print_document(session, document, other)
    judge(session, document, other)


def print_document(session: Session, own: Document, other: Document | None) -> None:
    """Print the document of a run (only with --json), with what --compare adds to its results."""
    added = {} if other is None else {"comparison": _compared(own, other).to_dict()}
    session.document(own["command"], own["results"] | added, own["environment"])


def judge(session: Session, own: Document, other: Document) -> None:
    """Show both runs side by side; regressions end the command."""
    from elsa_core.measuring import environment

    found = _compared(own, other)
    session.line()
    session.line(f"against {environment.label(other['environment'])}", "bold")
    rows = []
    for row in found.rows:
        pair = (row.own, row.published)
        cells = [row.name]
        for each in pair:
            cells += [f"{each.ratio:.2f}", f"{each.low:.2f}-{each.high:.2f}"]
        if found.same_machine:
            cells.append("/".join(f"{each.seconds * 1e3:.3g}" for each in pair))
        mark = {"regression": "FAIL worse", "better": "better"}.get(row.verdict, "")
        rows.append([*cells, f"{mark} {row.note}".strip()])
    times = (">ms now/then",) if found.same_machine else ()
    columns = ("case", ">ratio", ">", ">published", ">", *times, "")
    session.table(columns, rows)
    if not found.same_machine:
        here = environment.label(own["environment"])
        session.line(
            f"Not the same processor (here {here}): ratios to the peers of each run are compared, "
            "times are not; a ratio may differ because the processor does.", "dim"
        )  # fmt: skip
    worse = [row for row in found.rows if row.verdict == "regression"]
    missing = f"; {len(found.missing)} of its cases were not measured" if found.missing else ""
    count = len(found.rows)
    line = f"{count} case{'s' * (count != 1)} compared, {len(worse)} worse{missing}"
    session.line(line, "bold red" if worse else "bold", even_quiet=True)
    if worse:
        named = ", ".join(row.name for row in worse[:5])
        more = f" and {len(worse) - 5} more" if len(worse) > 5 else ""
        busy = own["results"].get("busy")
        free = f"; the machine was not free: {busy}" if busy else ""
        raise VerdictError(f"worse than published: {named}{more}{free}")
    if not found.rows:
        raise VerdictError("nothing was compared: no case of this run was published")


def _compared(own: Document, other: Document) -> Comparison:
    from elsa_core.errors import ModelError
    from elsa_core.profiling.bench.published import compare

    try:
        return compare(own, other)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError,
            StopIteration) as error:  # fmt: skip
        raise ModelError(f"a document to compare lacks what `elsa bench` writes: {error}") from None
