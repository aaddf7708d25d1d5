"""`elsa inspect --all`: the run over every architecture, its table and its page."""

from __future__ import annotations

import shlex
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import click

from elsa_cli import targets
from elsa_cli.console import Session
from elsa_cli.errors import VerdictError
from elsa_cli.options import Options

if TYPE_CHECKING:
    from elsa_core.proof.coverage import Coverage


def run(session: Session, match: str | None, options: Options) -> None:
    """Examine the architectures that the glob `match` selects, and show what was found.

    Raises: click.UsageError (nothing matches), TargetError (--state or --page cannot be written),
    ModelError (--state), VerdictError (a model differs, or fails).
    """
    state, page = options.state, options.page
    if page is not None and state is not None and page.resolve() == state.resolve():
        raise click.UsageError("--state and --page name one file")
    if page is not None:
        targets.check_new(page, options.force)
    if state is not None:
        targets.check_writable(state)
    with session.stage("listing architectures"):
        from elsa_core.base.files import write_text
        from elsa_core.proof import catalogue, coverage

        names = catalogue.architectures(match or "*")
    if not names:
        raise click.UsageError(
            f"no architecture matches {match!r}: with --all, MODEL is a glob like 'timm:swin*'"
        )
    with session.stage("examining") as update:
        records = []
        found = coverage.examine_all(names, checked=options.checked, state=state, progress=update)
        for record in found:
            records.append(record)
            if state is not None and state not in session.written:
                session.written.append(state)
    total = coverage.summarise(records)
    results = {"summary": total, "architectures": [record.to_dict() for record in records]}
    session.document("inspect --all", results)
    if page is not None:
        note = _note(match, options.checked)
        session.written.append(write_text(coverage.to_markdown(records, note), page))
    _table(session, coverage.by_family(records))
    bad = [record for record in records if record.verdict in (coverage.DIFFERS, coverage.FAILED)]
    for record in records:
        if record.reason and record.verdict not in (coverage.AGREES, coverage.NOT_CHECKED):
            session.line(f"{record.name}: {record.verdict}: {record.reason}", "yellow")
    said = ", ".join(f"{n} {verdict}" for verdict, n in sorted(total["verdicts"].items()))
    session.line(
        f"{total['complete']} of {total['attentive']} architectures with softmax attention are "
        f"patched whole ({total['share']:.1%}) · {said}",
        "bold" if not bad else "bold red", even_quiet=True,
    )  # fmt: skip
    if bad:
        raise VerdictError(f"{len(bad)} architectures differ or fail, {bad[0].name} first")


def _table(session: Session, families: dict[str, list[Coverage]]) -> None:
    rows = []
    for family, members in families.items():
        kept: Counter[str] = Counter()
        for record in members:
            for one in record.kept:
                kept[one.module_class.rpartition(".")[2]] += one.sites
        verdicts = Counter(record.verdict for record in members)
        counts = (len(members), sum(r.sites for r in members), sum(r.patchable for r in members))
        rows.append([
            family, *map(str, counts),
            ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items())),
            ", ".join(f"{count} {name}" for name, count in kept.items()),
        ])  # fmt: skip
    titles = ["family", ">models", ">sites", ">patched", "verdicts", "kept"]
    session.table(titles, rows, wrap=5)
    session.line()


def _note(match: str | None, checked: bool) -> str:
    """What wrote the page, and with which versions."""
    found = []
    for name in ("torch", "timm", "open_clip_torch"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    words = ["elsa", "inspect", "--all", *([match] if match else []), *(["--check"] * checked)]
    return f"Written by `{shlex.join(words)}`. Versions: {', '.join(found)}."
