"""`elsa check`: patch in memory, and prove that the outputs agree."""

from __future__ import annotations

from typing import Any

import click

from elsa_cli.console import Session
from elsa_cli.errors import VerdictError
from elsa_cli.options import (
    Command,
    Options,
    example_options,
    input_options,
    kernel_options,
    model_options,
    output_options,
    pass_session,
)
from elsa_cli.proof_options import proof_options
from elsa_cli.site_options import site_options


@click.command("check", cls=Command)
@model_options
@example_options
@input_options
@proof_options
@site_options
@kernel_options
@output_options
@pass_session
def command(session: Session, /, model: str, **given: Any) -> None:
    """Patch MODEL in memory and compare it with the original, site by site, against float64.

    The patched model's error may be at most twice the original's own (and a rounding band), for
    every site, for the model's output by every --path, and for gradients with --grad. Exit code 1
    when it is not so.
    """
    from elsa_cli import pipeline, render
    from elsa_cli.probes import environment

    options = Options.of(given)
    loaded = pipeline.open_model(session, model, options)
    report = pipeline.patch_model(session, loaded, options, strict=False)
    routes = pipeline.routes(session, loaded, report)
    outcome = pipeline.check_model(session, loaded, options)
    results = {
        "model": render.described(loaded, options),
        "patch": report.to_dict(),
        "routes": {str(dim): route.to_dict() for dim, route in routes.items()},
        "check": outcome.to_dict(),
    }
    session.document("check", environment(), results)
    render.header(
        session, loaded, options, f"{render.kernels(routes)} · batch {options.batch_size}"
    )
    render.checked(session, outcome)
    total = len(report.patched) + len(report.kept)
    line = f"{len(report.patched)} of {total} sites patched · {render.verdict(outcome)}"
    session.line(line, "bold" if outcome.ok else "bold red", even_quiet=True)
    if not outcome.ok:
        raise VerdictError(f"check failed: {failure(outcome.failures)}")
    if loaded.report is None:
        step = session.again(
            "patch",
            "-o",
            "DIR",
            without=("--grad",),
            valued=("--path", "--sparsity", "--sparsity-bound"),
        )
        session.line(f"Next: {step}", "dim")


def failure(lines: tuple[str, ...]) -> str:
    """The first failure, and how many more there are."""
    more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
    return (lines[0] if lines else "no reason given") + more
