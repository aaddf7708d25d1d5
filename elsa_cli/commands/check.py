"""`elsa check`: patch in memory, and prove that the outputs agree."""

from __future__ import annotations

from typing import Any

from elsa_cli import options as shared
from elsa_cli import pipeline
from elsa_cli.console import Session
from elsa_cli.errors import VerdictError, first_of
from elsa_cli.options import Options, elsa_command


@elsa_command(
    "check",
    *shared.model_options(),
    *shared.EXAMPLE,
    *shared.INPUT,
    *shared.PROOF,
    *shared.SITES,
    *shared.KERNELS,
)
def command(session: Session, /, model: str, **values: Any) -> None:
    """Patch MODEL in memory and compare it with the original, site by site, against float64.

    The patched model's error may be at most twice the original's own (and a rounding band), for
    every site, for the model's output by every --path, and for gradients with --grad. Exit code 1
    when it is not so.
    """
    options = Options(**values)
    loaded = pipeline.open_model(session, model, options)
    from elsa_cli import render

    report, routes = pipeline.patch_model(session, loaded, options)
    outcome = pipeline.check_model(session, loaded, options)
    results = render.document(loaded, options, report, routes) | {"check": outcome.to_dict()}
    session.document("check", results)
    render.header(session, loaded, options, routes, batch=True)
    render.checked(session, outcome)
    total = len(report.patched) + len(report.kept)
    line = f"{len(report.patched)} of {total} sites patched · {render.verdict(outcome)}"
    session.verdict(line, good=outcome.ok)
    if not outcome.ok:
        lossy = isinstance(options.sparsity, float) and not options.sparsity_bound
        hint = "; --sparsity-bound allows the error of a number as --sparsity" * lossy
        raise VerdictError(f"check failed: {first_of(outcome.failures)}{hint}")
    proof = ("--path", "--sparsity", "--sparsity-bound")
    step = session.again("patch", "-o", "DIR", without=("--grad",), valued=proof)
    if loaded.report is not None:  # it was saved patched already
        step = session.again("profile", without=("--grad",), valued=(*proof, "--images"))
    session.line(f"Next: {step}", "dim")
