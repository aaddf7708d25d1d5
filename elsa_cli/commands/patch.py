"""`elsa patch`: replace a model's attention, check it, save it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from elsa_cli import names, pipeline
from elsa_cli import options as shared
from elsa_cli.console import Session
from elsa_cli.errors import VerdictError, first_of
from elsa_cli.options import Options, elsa_command, typed

if TYPE_CHECKING:
    from elsa_core.loading import Loaded


@elsa_command(
    "patch",
    *shared.model_options(),
    *shared.EXAMPLE,
    shared.flag(
        "--check", text="Prove that the outputs agree; exit 1 if not. --images implies it.",
    ),
    *shared.INPUT,
    *shared.SITES,
    shared.flag("--all-sites", text="Fail when any attention site cannot be patched."),
    *shared.KERNELS,
    click.option(
        "--offload", type=click.Choice(("host",)),
        help="Training keeps what its backward needs in host memory.",
    ),
    shared.path_option(
        "--plan", text="Patch exactly the sites of a plan that `elsa profile --policy` wrote."
    ),
    shared.path_option(
        "--output", "-o", metavar="DIR",
        text="Save weights and plan in this new directory; it loads again as MODEL.",
    ),
    shared.flag("--force", text="Replace DIR if it exists."),
    shared.flag("--dry-run", text="Show what would be patched; write nothing."),
)  # fmt: skip
def command(session: Session, /, model: str, **values: Any) -> None:
    """Replace the attention of MODEL by ELSA kernels, which compute the same numbers."""
    options = Options(**values)
    output: Path | None = options.output
    # Images are read by the check alone: whoever names some wants one.
    check = options.check or options.images is not None
    if output is not None:
        names.check_folder(output, options.force)
    names.check_file(options.plan, "plan")
    if options.plan is not None and typed(pipeline.CHOICES):
        raise click.UsageError(
            "--plan names sites and kernels itself: leave --include, --exclude, --scope, "
            "--precision, --backend, --offload and --all-sites out"
        )
    loaded = pipeline.open_model(session, model, options)
    from elsa_cli import render

    if output is not None:
        from elsa_core.loading import check_target

        # what elsa did not write is refused before minutes go into the check
        check_target(output.resolve(), output, options.force)
    report, routes = pipeline.patch_model(
        session, loaded, options, strict=options.all_sites, plan=options.plan
    )
    outcome = pipeline.check_model(session, loaded, options) if check else None
    good = outcome is None or outcome.ok
    saved = None
    if output is not None and good and not options.dry_run:
        with session.stage(f"writing {output}"):
            from elsa_core.loading import save

            saved = save(loaded, report, output, force=options.force)
            session.written.append(saved)
    results = render.document(loaded, options, report, routes) | {
        "dry_run": options.dry_run,
        "check": None if outcome is None else outcome.to_dict(),
        "output": None if saved is None else str(saved),
    }
    session.document("patch", results)
    render.header(session, loaded, options, routes, batch=check)
    render.patched(session, report)
    if report.offload is not None:
        session.line("offload host: what a backward needs stays in host memory")
    done, total = len(report.patched), len(report.patched) + len(report.kept)
    line = f"{done} of {total} sites {'would be ' if options.dry_run else ''}patched"
    if outcome is not None:
        render.checked(session, outcome)
        line = f"{line} · {render.verdict(outcome)}"
    session.verdict(line, good=good)
    if outcome is not None and not good:
        nothing = "; nothing was written" if output is not None else ""
        raise VerdictError(f"check failed: {first_of(outcome.failures)}{nothing}")
    session.line(_next(session, loaded, options, saved, check), "dim")


def _next(
    session: Session, loaded: Loaded, options: Options, saved: Path | None, check: bool
) -> str:
    from elsa_core.precision import DTYPES

    if saved is not None and loaded.spec.source == "python":
        from elsa_core.loading import PLAN_NAME

        step = session.again(
            "patch", "--plan", str(saved / PLAN_NAME), "--check",
            without=("--force", "--all-sites"),
            valued=("-o", "--output", "--plan", "--include", "--exclude", "--scope", "--precision",
                    "--backend", "--offload"),
        )  # fmt: skip
        return f"Written: {saved}. Next: {step}"
    if saved is not None:
        flags = named = ""
        if options.dtype != "fp32":
            flags, named = f" --dtype {options.dtype}", f", dtype={DTYPES[options.dtype]}"
        return (
            f"Written: {saved}. Next: elsa check {shlex.quote(str(saved))}{flags}, "
            f"or elsa_core.load({str(saved)!r}{named})"
        )
    nothing = "Nothing was written. " if options.output is not None else ""
    if not check:
        return f"{nothing}Next: {session.again('patch', '--check', without=('--dry-run',))}"
    # It has passed: what is left is to save.
    added = () if options.output is not None else ("-o", "DIR")
    step = session.again("patch", *added, without=("--dry-run", "--check"), valued=("--images",))
    return f"{nothing}Next: {step}"
