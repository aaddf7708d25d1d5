"""`elsa patch`: replace a model's attention, check it, save it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from elsa_cli.commands.check import failure
from elsa_cli.console import Session
from elsa_cli.errors import VerdictError
from elsa_cli.options import (
    Command,
    FilePath,
    Options,
    example_options,
    input_options,
    kernel_options,
    model_options,
    output_options,
    pass_session,
)
from elsa_cli.site_options import site_options
from elsa_cli.targets import check_folder

if TYPE_CHECKING:
    from elsa_core.patching import PatchReport
    from elsa_core.proof import CheckReport


@click.command("patch", cls=Command)
@model_options
@example_options
@click.option(
    "--check",
    is_flag=True,
    help="Prove that the outputs agree; exit 1 if not. --images implies it.",
)
@input_options
@site_options
@click.option("--all-sites", is_flag=True, help="Fail when any attention site cannot be patched.")
@kernel_options
@click.option(
    "--offload",
    type=click.Choice(("host",)),
    help="Training keeps what its backward needs in host memory.",
)
@click.option(
    "--plan",
    type=FilePath(),
    metavar="FILE",
    help="Patch exactly the sites of a plan that `elsa profile --policy` wrote.",
)
@click.option(
    "--output",
    "-o",
    type=FilePath(folder=True),
    metavar="DIR",
    help="Save weights and plan in this new directory; it loads again as MODEL.",
)
@click.option("--force", is_flag=True, help="Replace DIR if it exists.")
@click.option("--dry-run", is_flag=True, help="Show what would be patched; write nothing.")
@output_options
@pass_session
def command(
    session: Session,
    /,
    model: str,
    check: bool,
    all_sites: bool,
    offload: str | None,
    plan: Path | None,
    output: Path | None,
    force: bool,
    dry_run: bool,
    **given: Any,
) -> None:
    """Replace the attention of MODEL by ELSA kernels, which compute the same numbers."""
    from elsa_cli import pipeline, render
    from elsa_cli.probes import environment

    options = Options.of(given)
    # Images are read by the check alone: whoever names some wants one.
    check = check or options.images is not None
    if output is not None:
        check_folder(output, force)
    if plan is not None:
        pipeline.check_plan_alone(plan)
    loaded = pipeline.open_model(session, model, options)
    if output is not None:
        _require_own(output, force)
    if plan is None:
        report = pipeline.patch_model(session, loaded, options, all_sites, offload)
    else:
        report = pipeline.patch_by_plan(session, loaded, plan)
    routes = pipeline.routes(session, loaded, report)
    outcome = pipeline.check_model(session, loaded, options) if check else None
    good = outcome is None or outcome.ok
    saved = None
    if output is not None and good and not dry_run:
        with session.stage(f"writing {output}"):
            from elsa_core.loading import PLAN_NAME, save

            saved = save(loaded, report, output, force=force)
            session.written.append(saved)
    results = {
        "model": render.described(loaded, options),
        "dry_run": dry_run,
        "patch": report.to_dict(),
        "routes": {str(dim): route.to_dict() for dim, route in routes.items()},
        "check": None if outcome is None else outcome.to_dict(),
        "output": None if saved is None else str(saved),
    }
    session.document("patch", environment(), results)
    render.header(
        session,
        loaded,
        options,
        render.kernels(routes) + (f" · batch {options.batch_size}" if check else ""),
    )
    render.patched(session, report)
    if report.offload is not None:
        session.line("offload host: what a backward needs stays in host memory")
    if outcome is not None:
        render.checked(session, outcome)
    session.line(_verdict(report, outcome, dry_run), "bold" if good else "bold red",
                 even_quiet=True)  # fmt: skip
    if outcome is not None and not outcome.ok:
        nothing = "; nothing was written" if output is not None else ""
        raise VerdictError(f"check failed: {failure(outcome.failures)}{nothing}")
    if saved is not None and loaded.spec.source == "python":
        step = session.again("patch", "--plan", str(saved / PLAN_NAME), "--check",
                             without=("--force",), valued=("-o", "--output"))  # fmt: skip
        session.line(f"Written: {saved}. Next: {step}", "dim")
        return
    session.line(_next(session, options, output, saved, check), "dim")


def _require_own(output: Path, force: bool) -> None:
    """Refuse a directory that elsa did not write before minutes go into the check."""
    from elsa_core.loading import check_target

    check_target(output.resolve(), output, force)


def _verdict(report: PatchReport, outcome: CheckReport | None, dry_run: bool) -> str:
    from elsa_cli import render

    done, total = len(report.patched), len(report.patched) + len(report.kept)
    line = f"{done} of {total} sites {'would be ' if dry_run else ''}patched"
    return f"{line} · {render.verdict(outcome)}" if outcome is not None else line


def _next(
    session: Session, options: Options, output: Path | None, saved: Path | None, check: bool
) -> str:
    if saved is not None:
        half = options.dtype != "fp32"
        flags = f" --dtype {options.dtype}" if half else ""
        named = f", dtype={options.torch_dtype()}" if half else ""
        return (
            f"Written: {saved}. Next: elsa check {shlex.quote(str(saved))}{flags}, "
            f"or elsa_core.load({str(saved)!r}{named})"
        )
    nothing = "Nothing was written. " if output is not None else ""
    if not check:
        return f"{nothing}Next: {session.again('patch', '--check', without=('--dry-run',))}"
    # It has passed: what is left is to save.
    added = () if output is not None else ("-o", "DIR")
    step = session.again("patch", *added, without=("--dry-run", "--check"), valued=("--images",))
    return f"{nothing}Next: {step}"
